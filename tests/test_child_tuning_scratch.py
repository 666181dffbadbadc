"""Mode "taskfree" of ChildTuningAdamW: which masks are drawn, and what a step costs an accelerator.

Without a GPU, tensors on "meta" take its way through the code: shapes and calls are real, numbers are not.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils import ChildTuningAdamW
from fsdp_utils.child_tuning.random_masks import PAGE, draw, keys, table, threshold

_64 = 2**64 - 1


def mixed(z: int) -> int:
    """Splitmix64's finalizer."""
    z = z + 0x9E3779B97F4A7C15 & _64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _64
    return z ^ z >> 31


def signed(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def drawn(seed: int, step: int, element: int) -> int:
    """The number of an element of the model, as random_masks.py defines it, in Python's integers."""
    page, entry = divmod(element, PAGE)
    key = mixed(mixed(mixed(seed & _64) ^ step) ^ page)
    return signed((key & 0xFFFFFFFF) + (key >> 32 | 1) * (int(TABLE[entry]) & 0xFFFFFFFF))


TABLE = table(PAGE, torch.device("cpu"))


@pytest.mark.parametrize("seed", [0, -7, 2**63 + 5])
def test_the_masks_are_those_of_the_definition(seed: int) -> None:
    """Pages within a tensor, over two, and cut by a batch; the fixed numbers of a seed never change."""
    p, q = (nn.Parameter(torch.zeros(n)) for n in (3 * PAGE + 77, 2**20))
    optimizer = ChildTuningAdamW([p, q], betas=(0.0, 0.0), reserve_p=0.25, seed=seed)
    bound, _ = threshold(0.25)
    for step in (1, 2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        kept = torch.cat([optimizer.state[each]["exp_avg"] != 0 for each in (p, q)])
        edges = [page * PAGE + near for page in range(1, 19) for near in (-2, -1, 0, 1)]
        for element in [0, 1, *edges, p.numel() - 1, p.numel(), kept.numel() - 1]:
            assert bool(kept[element]) == (drawn(seed, step, element) > bound), (step, element)


def test_the_masks_of_a_seed_stay_the_same_between_releases() -> None:
    """So that a run goes on from a checkpoint with the masks that it would have had."""
    p = nn.Parameter(torch.zeros(20))
    p.grad = torch.ones(20)
    optimizer = ChildTuningAdamW([p], betas=(0.0, 0.0), seed=3)
    optimizer.step()
    kept = [i for i, average in enumerate(optimizer.state[p]["exp_avg"].tolist()) if average]
    assert kept == [1, 13, 15, 19]


def test_both_ways_to_draw_give_the_same_numbers() -> None:
    k1, k2 = keys(torch.arange(5), seed=1, step=2)
    numbers = torch.empty(5, PAGE, dtype=torch.int32)
    draw(numbers, TABLE, k1, k2)
    assert torch.equal(numbers, torch.addcmul(k1, k2, TABLE))  # as on a GPU


# ---- what a step costs ---------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts what is dispatched: on a GPU, at most as many launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def with_gradients(number: int, *shape: int, device: str, dtype: torch.dtype) -> Iterator[nn.Parameter]:
    for _ in range(number):
        p = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        p.grad = torch.zeros_like(p)
        yield p


def calls_of_a_step(
    number: int, *shape: int, device: str = "meta", dtype: Any = torch.float32
) -> Counter[str]:
    optimizer = ChildTuningAdamW([*with_gradients(number, *shape, device=device, dtype=dtype)])
    optimizer.step()  # makes the moments and the plan
    with Calls() as calls:
        optimizer.step()
    return calls.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "shape"), [(20, (1024, 1024)), (1000, (64, 64))])
def test_a_step_on_a_gpu_takes_few_calls(number: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    calls = calls_of_a_step(number, *shape, dtype=dtype)
    assert calls.total() <= 60, calls
    assert calls["aten::_local_scalar_dense"] == 0  # nobody waits for a number
    assert calls["aten::_to_copy"] <= 1  # the counts of steps go there, in one copy


def test_a_step_on_a_cpu_takes_a_call_for_a_batch_and_not_for_a_page() -> None:
    assert calls_of_a_step(20, 1024, 1024, device="cpu").total() <= 160  # 20 batches of 16 pages


@pytest.mark.parametrize(("dtype", "mib"), [(torch.float32, 32), (torch.bfloat16, 40), (torch.float64, 80)])
def test_the_scratch_memory_on_a_gpu_has_a_limit(dtype: torch.dtype, mib: int) -> None:
    optimizer = ChildTuningAdamW([*with_gradients(1, 2**14, 2**13, device="meta", dtype=dtype)])
    optimizer.step()
    (scratch,) = optimizer._scratch.values()
    tensors = {t.untyped_storage()._cdata: t for t in vars(scratch).values() if isinstance(t, Tensor)}
    sizes = [t.untyped_storage().nbytes() for t in tensors.values()]
    assert mib / 2 < sum(sizes) / 2**20 <= mib + 0.25  # and the table


# ---- arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_with_float64_by_default_it_trains_as_without(dtype: torch.dtype, fused: bool | None) -> None:
    def trained() -> Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 500, dtype=torch.float32).to(dtype))
        optimizer = ChildTuningAdamW([p], lr=0.1, weight_decay=0.1, fused=fused)
        for _ in range(3):
            p.grad = p.detach() * 2
            optimizer.step()
        return p.detach()

    expected = trained()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = trained()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)

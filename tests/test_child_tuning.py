"""ChildTuningAdamW: is the mask what it should be, wherever the weights lie, and is the rest AdamW?"""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_utils import ChildTuningAdamW, load_distributed, save_distributed
from fsdp_utils.child_tuning.optimizer import MASK
from fsdp_utils.child_tuning.random_masks import PAGE, threshold
from tests.children import WRAPPERS, loss_of, net, on_ranks, train, weights
from tests.children import batch as batch_of
from tests.sharded import TwoRanks


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.randn(*shape).to(dtype))
    p.grad = torch.ones_like(p)
    return p


def seen_by_adamw(p: nn.Parameter, **options: Any) -> Tensor:
    """The gradient of ones as AdamW gets it at the next step: its average begins at 0, with betas of 0."""
    optimizer = ChildTuningAdamW([p], betas=(0.0, 0.0), **options)
    optimizer.step()
    return optimizer.state[p]["exp_avg"]


# ---- the mask of mode "taskfree" -----------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_the_kept_fraction_is_p_and_the_mean_is_unbiased(p: float) -> None:
    n = 3 * PAGE + 1000
    seen = seen_by_adamw(parameter(n), reserve_p=p)
    deviation = (p * (1 - p) / n) ** 0.5
    assert float((seen != 0).float().mean()) == pytest.approx(p, abs=5 * deviation)
    assert float(seen.mean(dtype=torch.float64)) == pytest.approx(1, abs=5 * deviation / p)
    torch.testing.assert_close(seen[seen != 0], torch.full_like(seen[seen != 0], 1 / p))


@pytest.mark.parametrize("p", [1e-12, 0.001, 0.3, 0.5, 0.999, 1 - 1e-12])
def test_what_is_kept_is_divided_by_exactly_the_fraction_that_is_kept(p: float) -> None:
    bound, fraction = threshold(p)
    assert fraction == (2**31 - 1 - bound) / 2**32  # of the numbers from -2**31 to 2**31 - 1
    assert float(torch.tensor(fraction)) == fraction  # fp32 has it
    assert fraction == pytest.approx(p, abs=1e-7)


def test_any_two_elements_and_any_two_steps_are_independent() -> None:
    p, n = parameter(20000), 400
    optimizer = ChildTuningAdamW([p], betas=(0.0, 0.0), reserve_p=0.3)
    masks = []
    for _ in range(n):
        optimizer.step()
        masks.append(optimizer.state[p]["exp_avg"] != 0)
    kept = torch.stack(masks).float()
    deviation = (0.3 * 0.7) ** 0.5
    centred = (kept - 0.3) / deviation
    # per element over the steps: as binomial as independent draws are (variance 1, within its own error)
    means = centred.mean(0) * n**0.5
    assert float(means.var()) == pytest.approx(1, abs=5 * (2 / 20000) ** 0.5)
    # per step over the elements, likewise
    means = centred.mean(1) * 20000**0.5
    assert float(means.var()) == pytest.approx(1, abs=5 * (2 / n) ** 0.5)
    # between steps that follow each other, and between elements at some distances
    for first, second in [(centred[:-1], centred[1:])] + [
        (centred[:, :-d], centred[:, d:]) for d in (1, 2, 64, 1024, 4096)
    ]:
        assert float((first * second).mean()) == pytest.approx(0, abs=5 / first.numel() ** 0.5)


def test_masks_differ_between_parameters_steps_and_seeds() -> None:
    n = 5000

    def masks(seed: int) -> list[Tensor]:
        ps = [parameter(n), parameter(n)]
        optimizer = ChildTuningAdamW(ps, betas=(0.0, 0.0), seed=seed)
        found = []
        for _ in range(2):
            optimizer.step()
            found += [optimizer.state[p]["exp_avg"] != 0 for p in ps]
        return found

    found = masks(0) + masks(1)
    for i, one in enumerate(found):
        for other in found[:i]:
            agree = float((one == other).float().mean())
            assert agree == pytest.approx(0.3**2 + 0.7**2, abs=5 * (0.25 / n) ** 0.5)
    assert all(torch.equal(a, b) for a, b in zip(found, masks(0) + masks(1), strict=True))


def test_the_masks_of_many_small_tensors_are_those_of_their_places() -> None:
    """A page boundary, a batch boundary and tensors that share a page change nothing."""
    whole = parameter(PAGE + 5000)
    cuts = (3, 100, 4096, 1, 20000, 40000)
    pieces = [parameter(n) for n in (*cuts, PAGE + 5000 - sum(cuts))]
    optimizer = ChildTuningAdamW(pieces, betas=(0.0, 0.0))
    optimizer.step()
    assert torch.equal(
        seen_by_adamw(whole), torch.cat([optimizer.state[piece]["exp_avg"] for piece in pieces])
    )


def test_nobody_elses_random_numbers_change_and_they_change_nothing() -> None:
    before = torch.get_rng_state()
    first = seen_by_adamw(parameter(1000))
    torch.manual_seed(7)
    assert torch.equal(first, seen_by_adamw(parameter(1000)))
    torch.set_rng_state(before)
    expected = torch.rand(3)
    torch.set_rng_state(before)
    optimizer = ChildTuningAdamW([p := nn.Parameter(torch.zeros(9))])
    p.grad = torch.ones(9)
    optimizer.step()
    assert torch.equal(torch.rand(3), expected)


# ---- the rest is AdamW ---------------------------------------------------------------------------------


def trained(make: Any, steps: int = 5) -> list[Tensor]:
    model = net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(number)).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("options", [{"reserve_p": 1}, {"mode": None}])
def test_without_a_mask_it_is_adamw_bit_for_bit(fused: bool | None, options: dict) -> None:
    ours = trained(lambda m: ChildTuningAdamW(m.parameters(), weight_decay=0.1, fused=fused, **options))
    torchs = trained(lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1, fused=fused))
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def test_a_mask_of_ones_is_adamw() -> None:
    def make(model: nn.Module) -> ChildTuningAdamW:
        ones = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
        return ChildTuningAdamW(model.named_parameters(), weight_decay=0.1, mode="task", gradient_mask=ones)

    torchs = trained(lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1, fused=True))
    assert all(torch.equal(a, b) for a, b in zip(trained(make), torchs, strict=True))


@pytest.mark.parametrize("mode", ["taskfree", "task"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_masked_step_is_adamws_with_the_masked_gradient(mode: str, dtype: torch.dtype) -> None:
    p = parameter(50, 40, dtype=dtype)
    p.grad = torch.randn_like(p)
    twin = copy.deepcopy(p)
    mask = torch.rand(50, 40) < 0.3
    options: dict[str, Any] = {"gradient_mask": {"p": mask}} if mode == "task" else {"seed": 3}
    ours = ChildTuningAdamW([("p", p)], weight_decay=0.1, mode=mode, **options)
    if mode == "taskfree":
        probe = copy.deepcopy(p)
        probe.grad = torch.ones_like(p)
        mask = seen_by_adamw(probe, seed=3) != 0
    torchs = torch.optim.AdamW([twin], weight_decay=0.1, fused=True)
    ours.step()
    scale = 1 if mode == "task" else 1 / 0.3
    twin.grad = torch.where(mask, p.grad.double() * scale, 0).to(dtype)
    torchs.step()
    # one rounding of the scaled gradient may differ
    torch.testing.assert_close(p, twin, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"] != 0, mask & (twin.grad != 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_run_with_a_given_mask_is_adamws_with_masked_gradients_bit_for_bit(dtype: torch.dtype) -> None:
    """Weights, moments and counts, step after step, though the kernel sees the gradients unmasked."""
    p = parameter(50, 40, dtype=dtype)
    twin = copy.deepcopy(p)
    mask = torch.rand(50, 40) < 0.3
    ours = ChildTuningAdamW([("p", p)], weight_decay=0.1, mode="task", gradient_mask={"p": mask})
    torchs = torch.optim.AdamW([twin], weight_decay=0.1, fused=True)
    for _ in range(5):
        p.grad = torch.randn(50, 40).to(dtype)
        twin.grad = p.grad * mask
        ours.step()
        torchs.step()
        saved = ours.state_dict()["state"][0]
        assert torch.equal(p, twin)
        assert torch.equal(saved.pop(MASK) != 0, mask)
        for name, expected in torchs.state_dict()["state"][0].items():
            assert torch.equal(saved.pop(name), expected), name
        assert not saved


def test_infinite_gradients_do_not_leak_through_random_masks() -> None:
    p = parameter(1000)
    p.grad = torch.full_like(p, float("inf"))
    p.grad[::2] = float("nan")
    optimizer = ChildTuningAdamW([p], reserve_p=0.5)
    optimizer.step()
    masked = optimizer.state[p]["exp_avg"] == 0
    assert 300 < int(masked.sum()) < 700
    assert bool(p[masked].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_as_they_are(dtype: torch.dtype) -> None:
    ps = [parameter(50, dtype=dtype) for _ in range(9)]  # many: they are brought together first
    before = [p.grad for p in ps]
    ChildTuningAdamW(ps).step()
    ChildTuningAdamW(ps[:1]).step()
    masks = {"0": torch.arange(50) % 2 == 0}
    ChildTuningAdamW([(str(i), p) for i, p in enumerate(ps)], mode="task", gradient_mask=masks).step()
    for p, grad in zip(ps, before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.ones_like(p))


def test_a_given_mask_outlasts_steps_at_which_other_parameters_have_gradients() -> None:
    first, second, unnamed = (parameter(100) for _ in range(3))
    sparse = nn.Embedding(50, 2, sparse=True)
    sparse(torch.arange(50)).sum().backward()
    masks = {"first": torch.arange(100) % 2 == 0, "second": torch.arange(100) % 3 == 0}
    masks["sparse"] = (torch.arange(100) % 5 == 0).view(50, 2)
    named = {"first": first, "second": second, "unnamed": unnamed, "sparse": sparse.weight}
    optimizer = ChildTuningAdamW(
        list(named.items()), betas=(0.0, 0.0), lr=0.1, mode="task", gradient_mask=masks
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))
    second.grad = None
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [0, 2, 3]  # nothing yet for the second
    second.grad, first.grad = first.grad, None
    for _ in range(2):
        schedule.step()
        before = second.detach().clone()
        optimizer.step()
    assert torch.equal(second, before)  # the rate has become 0
    for number, name in enumerate(named):
        state = optimizer.state_dict()["state"][number]
        expected = masks.get(name, torch.ones(100, dtype=torch.bool))
        for seen in ("exp_avg", "exp_avg_sq", MASK):
            assert torch.equal(state[seen] != 0, expected), (name, seen)


def test_missing_sparse_empty_and_oddly_laid_out_gradients() -> None:
    missing, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 4))
    empty.grad = torch.ones(0, 4)
    embedding = nn.Embedding(50, 4, sparse=True)
    embedding(torch.tensor([1, 1, 7])).sum().backward()
    sparse, dense_twin = embedding.weight, nn.Parameter(embedding.weight.detach().clone())
    assert sparse.grad is not None
    dense_twin.grad = sparse.grad.to_dense()
    channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    channels_last.grad = torch.ones(2, 3, 4, 4)
    transposed = parameter(8, 5)
    transposed.grad = torch.ones(5, 8).T

    ours = ChildTuningAdamW([missing, empty, sparse, channels_last, transposed], reserve_p=0.5)
    twin = ChildTuningAdamW([nn.Parameter(torch.ones(3)), dense_twin], reserve_p=0.5)
    ours.step()
    twin.step()
    assert sparse.grad.is_sparse
    assert torch.equal(sparse, dense_twin)
    assert torch.equal(missing, torch.ones(3))
    for p in (channels_last, transposed):
        kept = ours.state[p]["exp_avg"] != 0
        assert 0 < float(kept.float().mean()) < 1
        torch.testing.assert_close(ours.state[p]["exp_avg"][kept], torch.full((int(kept.sum()),), 0.2))


def conv_steps(fmt: torch.memory_format, mode: str, state: dict[str, Any] | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 64, 6, bias=False).to(memory_format=fmt)  # of more than a page of random numbers
    mask = {"weight": torch.rand(conv.weight.shape) < 0.5}
    options: Any = {"gradient_mask": mask, "freeze_masked": True} if mode == "task" else {"reserve_p": 1.0}
    optimizer = ChildTuningAdamW(
        conv.named_parameters(),
        lr=0.1,
        weight_decay=0.1,
        mode=mode,
        **options,  # pyright: ignore
    )
    if state is not None:
        optimizer.load_state_dict(state)
    optimizer.param_groups[0]["reserve_p"] = 0.5
    for _ in range(3):
        conv.weight.grad = torch.randn_like(conv.weight, memory_format=torch.contiguous_format)
        optimizer.step()
    return conv.weight.detach().contiguous(), optimizer.state_dict()


@pytest.mark.parametrize("mode", ["task", "taskfree"])
def test_a_memory_format_changes_nothing_in_a_state_of_another_either(mode: str) -> None:
    weight, state = conv_steps(torch.contiguous_format, mode)
    other, other_state = conv_steps(torch.channels_last, mode)
    torch.testing.assert_close(other, weight)
    ways = (torch.contiguous_format, state), (torch.channels_last, state), (torch.channels_last, other_state)
    expected, *found = [conv_steps(fmt, mode, copy.deepcopy(loaded))[0] for fmt, loaded in ways]
    for each in found:
        torch.testing.assert_close(each, expected)


def moved_under_fsdp1(use_orig_params: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in before.items()}
    sharded = FSDP1(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = ChildTuningAdamW(sharded.named_parameters(), lr=0.1, mode="task", gradient_mask=masks)
    sharded(torch.ones(1, 3, 6, 6)).sum().backward()
    optimizer.step()
    with FSDP1.summon_full_params(sharded):
        return [(p != before[name]) & ~masks[name] for name, p in model.named_parameters()]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_whole_masks_fit_channels_last_parameters_under_fsdp1(
    two_ranks: TwoRanks, use_orig_params: bool
) -> None:
    for wrong in two_ranks(moved_under_fsdp1, use_orig_params):
        assert not any(each.any() for each in wrong)


@pytest.mark.parametrize("mode", ["task", "taskfree", None])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_gradient_of_another_dtype_is_converted(mode: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, grad_dtype = dtypes
    found = []
    for converted in (False, True):
        p = nn.Parameter(torch.ones(5, 3, dtype=dtype))
        p.grad_dtype = dtype if converted else grad_dtype
        p.grad = torch.linspace(-1, 1, 15).view(5, 3).to(grad_dtype).to(p.grad_dtype)
        options: Any = {"gradient_mask": {"p": torch.eye(5, 3)}} if mode == "task" else {}
        ChildTuningAdamW([("p", p)], lr=0.1, mode=mode, **options).step()
        assert p.grad.dtype == p.grad_dtype
        found.append(p.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones_like(found[0]))


@pytest.mark.parametrize("mode", ["task", "taskfree"])
def test_a_part_of_a_larger_tensor_is_refused_and_what_lies_between_stays(mode: str) -> None:
    whole = torch.ones(6, 6)
    p = nn.Parameter(whole[:, ::2])
    options: Any = {"gradient_mask": {"p": torch.ones(6, 3)}} if mode == "task" else {}
    optimizer = ChildTuningAdamW([("p", p)], mode=mode, **options)  # pyright: ignore
    p.grad = torch.ones(6, 3)
    with pytest.raises(ValueError, match=r"found one of shape \(6, 3\) with strides \(6, 2\)"):
        optimizer.step()
    assert torch.equal(whole, torch.ones(6, 6))


def test_what_no_step_can_do_is_refused_in_words() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    adamw = torch.optim.AdamW([p], maximize=True)
    adamw.step()
    optimizer = ChildTuningAdamW([p], mode=None)
    optimizer.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="expected maximize off, found it on in parameter group 0"):
        optimizer.step()
    with pytest.raises(ValueError, match="expected amsgrad off"):
        ChildTuningAdamW([{"params": [p], "amsgrad": True}]).step()
    z = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(ValueError, match="expected real parameters, found complex ones"):
        ChildTuningAdamW([z]).step()
    ChildTuningAdamW([z], mode=None).step()
    with pytest.raises(ValueError, match=r"expected a whole number as seed, found 1\.5"):
        ChildTuningAdamW([p], seed=1.5)  # pyright: ignore[reportArgumentType]


def test_groups_have_their_own_fraction_and_rate() -> None:
    ps = [parameter(10000) for _ in range(3)]
    optimizer = ChildTuningAdamW(
        [{"params": [ps[0]], "reserve_p": 0.1}, {"params": [ps[1]], "lr": 0.0}], reserve_p=0.6
    )
    optimizer.add_param_group({"params": [ps[2]], "reserve_p": 1.0})
    before = ps[1].detach().clone()
    optimizer.step()
    kept = [float((optimizer.state[p]["exp_avg"] != 0).float().mean()) for p in ps]
    assert kept == [pytest.approx(0.1, abs=0.03), pytest.approx(0.6, abs=0.03), 1.0]
    assert torch.equal(ps[1], before)


def test_what_momentum_and_decay_do_to_masked_weights() -> None:
    p = parameter(1000)
    optimizer = ChildTuningAdamW([p], lr=0.1, reserve_p=0.5, seed=1)
    optimizer.step()
    before = p.detach().clone()
    optimizer.step()
    first, second = (optimizer.state[p]["exp_avg"] == 0.2 * part for part in (0.9, 1.0))
    assert first.any()  # masked at the second step, and not at the first
    assert bool((p != before)[first | second].all())

    def masked_task(**options: Any) -> tuple[Tensor, Tensor]:
        p = parameter(1000)
        before = p.detach().clone()
        mask = torch.arange(1000) % 3 == 0
        optimizer = ChildTuningAdamW(
            [("p", p)], lr=0.1, weight_decay=0.5, mode="task", gradient_mask={"p": mask}, **options
        )
        optimizer.step()
        optimizer.state[p]["exp_avg"].fill_(0.3)  # momentum from elsewhere
        optimizer.step()
        return (p != before)[mask], (p != before)[~mask]

    kept, masked = masked_task()
    assert bool(kept.all())
    assert bool(masked.all())
    kept, masked = masked_task(freeze_masked=True)
    assert bool(kept.all())
    assert not bool(masked.any())


def test_the_decay_of_kept_weights_is_adamws_when_masked_ones_are_frozen() -> None:
    p = parameter(1000)
    twin = copy.deepcopy(p)
    mask = torch.arange(1000) % 2 == 0
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
    frozen = ChildTuningAdamW(
        [("p", p)], mode="task", gradient_mask={"p": mask}, freeze_masked=True, **options
    )
    plain = torch.optim.AdamW([twin], **options)
    twin.grad = torch.ones(1000)
    for _ in range(3):
        frozen.step()
        plain.step()
    torch.testing.assert_close(p[mask], twin[mask])


def test_a_closure_a_compiled_step_and_a_gradient_scaler() -> None:
    model, twin = net(), net()
    optimizer = ChildTuningAdamW(model.parameters())
    reference = ChildTuningAdamW(twin.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    compiled = torch.compile(optimizer.step, backend="eager")
    loss_of(model, batch_of(0)).backward()
    compiled()

    scaler.scale(loss_of(twin, batch_of(0))).backward()
    scaler.step(reference)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(1))
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0


def tensor_bytes() -> int:
    """Of all storages that are alive."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_a_given_mask_takes_no_memory() -> None:
    p = parameter(1024, 1024)
    optimizer = ChildTuningAdamW([("p", p)], mode="task", gradient_mask={"p": torch.rand(1024, 1024) < 0.5})
    before = tensor_bytes()
    optimizer.step()  # the mask, a byte per weight, goes; the moments come
    assert tensor_bytes() - before <= 2 * p.nbytes - p.numel() + 100


def test_scratch_memory_is_at_most_an_eighth_of_the_parameters() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        p = parameter(2048, 1024, dtype=dtype)
        optimizer = ChildTuningAdamW([("p", p)])
        optimizer.step()
        (scratch,) = optimizer._scratch.values()
        tensors = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in vars(scratch).values()
            if isinstance(t, Tensor)
        }
        assert 0 < sum(tensors.values()) <= p.nbytes / 8


# ---- saving and loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["taskfree", "task"])
def test_a_resumed_run_is_the_run(mode: str) -> None:
    def make(model: nn.Module, **options: Any) -> ChildTuningAdamW:
        masks = None
        if mode == "task":
            generator = torch.Generator().manual_seed(1)
            masks = {n: torch.rand(p.shape, generator=generator) < 0.5 for n, p in model.named_parameters()}
        return ChildTuningAdamW(model.named_parameters(), mode=mode, gradient_mask=masks, **options)

    straight, first = net(), net()
    train(straight, make(straight, seed=5), range(6))
    optimizer = make(first, seed=5)
    train(first, optimizer, range(3))
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = net()
    second.load_state_dict(saved[0])
    ones = {name: torch.ones_like(p, dtype=torch.bool) for name, p in second.named_parameters()}
    resumed = ChildTuningAdamW(
        second.named_parameters(), mode=mode, gradient_mask=ones if mode == "task" else None, reserve_p=0.9
    )
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["reserve_p"] == 0.3
    train(second, resumed, range(3, 6))
    third = copy.deepcopy(first)
    copied = copy.deepcopy(optimizer)  # holds copies of `first`'s parameters
    for p, q in zip(third.parameters(), copied.param_groups[0]["params"], strict=True):
        p.data = q.data
    for number in range(3, 6):
        for p, q in zip(third.parameters(), copied.param_groups[0]["params"], strict=True):
            p.grad = None
            q.grad = None
        loss_of(third, batch_of(number)).backward()
        for p, q in zip(third.parameters(), copied.param_groups[0]["params"], strict=True):
            q.grad = p.grad
        copied.step()
    for name, p in straight.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
        assert torch.equal(p, third.get_parameter(name)), name


def test_masks_outlast_a_copy_before_the_first_step_and_a_state_of_adamw() -> None:
    def made() -> tuple[nn.Parameter, ChildTuningAdamW]:
        p = parameter(100)
        masks = {"p": torch.arange(100) % 2 == 0}
        return p, ChildTuningAdamW([("p", p)], mode="task", gradient_mask=masks)

    _, optimizer = made()
    copied = copy.deepcopy(optimizer)
    (q,) = copied.param_groups[0]["params"]
    q.grad = torch.ones(100)
    copied.step()
    p, optimizer = made()
    optimizer.step()
    plain = torch.optim.AdamW([parameter(100)], weight_decay=0.0)
    plain.step()
    for _ in range(2):  # at once, and after a state without a mask has been loaded before any step
        optimizer.load_state_dict(plain.state_dict())
        assert torch.equal(optimizer.state_dict()["state"][0][MASK] != 0, torch.arange(100) % 2 == 0)
    before = p.detach().clone()
    optimizer.step()
    for moved in (copied.state_dict()["state"][0]["exp_avg"] != 0, p != before):
        assert torch.equal(moved, torch.arange(100) % 2 == 0)
    assert bool(
        plain.state_dict()["state"][0]["exp_avg_sq"].isfinite().all()
    )  # the lender's stay as they are


def test_masks_outlast_states_that_are_loaded_one_after_the_other() -> None:
    even = torch.arange(100) % 2 == 0
    plain = torch.optim.AdamW([parameter(100)], weight_decay=0.0)
    plain.step()
    lender = ChildTuningAdamW([("p", parameter(100))], mode="task", gradient_mask={"p": ~even})
    lender.step()

    def mask_after(*states: dict[str, Any]) -> torch.Tensor:
        optimizer = ChildTuningAdamW([("p", parameter(100))], mode="task", gradient_mask={"p": even})
        for state in states:
            optimizer.load_state_dict(state)
        return optimizer.state_dict()["state"][0][MASK] != 0

    without, other = plain.state_dict(), lender.state_dict()
    assert torch.equal(mask_after(without, without), even)  # the one that was given
    assert torch.equal(mask_after(other, without), ~even)  # the one that was loaded last
    assert torch.equal(mask_after(without, other), ~even)


def test_masks_outlast_a_checkpoint_of_adamw(tmp_path: Any) -> None:
    model, twin = net(), net()
    plain = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    train(twin, plain, range(1))
    save_distributed(tmp_path / "plain", twin, plain, step=1)
    masks = some_masks(model)
    optimizer = ChildTuningAdamW(model.named_parameters(), mode="task", gradient_mask=masks)
    train(model, optimizer, range(1))
    load_distributed(tmp_path / "plain", model, optimizer)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(1, 3))
    for number, (name, p) in enumerate(model.named_parameters()):
        assert torch.equal(p[~masks[name]], before[name][~masks[name]])
        assert torch.equal(optimizer.state_dict()["state"][number][MASK] != 0, masks[name])


def test_a_state_with_a_mask_goes_on_in_adamw_with_all_weights() -> None:
    p = parameter(100)
    optimizer = ChildTuningAdamW([("p", p)], mode="task", gradient_mask={"p": torch.arange(100) % 2 == 0})
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0][MASK]
    plain = torch.optim.AdamW([p], lr=0.1)
    plain.load_state_dict(saved)
    before = p.detach().clone()
    plain.step()
    assert bool((p != before).all())
    assert float((p - before).detach().abs().max()) < 0.5


# ---- on ranks ------------------------------------------------------------------------------------------


def some_masks(model: nn.Module) -> dict[str, Tensor]:
    """A mask for every parameter of the plain model: the same pattern wherever it is made."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(p.shape, generator=generator) < 0.5 for n, p in model.named_parameters()}


MODES: dict[str, dict[str, Any]] = {
    "taskfree": {"mode": "taskfree"},
    "task": {"mode": "task"},
    "task, frozen": {"mode": "task", "freeze_masked": True},
}


def trained_under(wrapper: str, mode: str, steps: int = 4) -> dict[str, Tensor]:
    model = net(wrapper)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks need not be seeded alike
    options = MODES[mode]
    if options["mode"] == "task":
        options = {**options, "gradient_mask": some_masks(net())}
    optimizer = ChildTuningAdamW(
        model.named_parameters(), lr=0.05, weight_decay=0.1, reserve_p=0.5, **options
    )
    train(model, optimizer, range(steps))
    return weights(model)


def trained_under_each() -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(mode, wrapper): trained_under(wrapper, mode) for mode in MODES for wrapper in WRAPPERS}


def test_a_frozen_weight_stays_as_it_is() -> None:
    found, began = trained_under("plain", "task, frozen"), net().state_dict()
    for name, mask in some_masks(net()).items():
        assert torch.equal(found[name][~mask], began[name][~mask])
        assert bool((found[name] != began[name])[mask].any())


def test_the_run_is_that_of_one_process_however_the_model_is_sharded() -> None:
    for world_size in (2, 3):
        first, second, *_ = on_ranks(trained_under_each, world_size=world_size)
        for mode, wrapper in first:
            alone = trained_under("plain", mode)
            for name, expected in alone.items():
                found = first[mode, wrapper]
                assert torch.equal(found[name], second[mode, wrapper][name])  # replicas, bit for bit
                if wrapper != "fsdp1, flat parameters" or mode != "taskfree":
                    torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
                else:  # other masks, as documented
                    assert not torch.allclose(found["head.weight"], alone["head.weight"], atol=1e-3)


def trained_with_one_mask(wrapper: str) -> dict[str, Tensor]:
    model = net(wrapper)
    masks = {"blocks.0.up.weight": some_masks(net())["blocks.0.up.weight"]}
    optimizer = ChildTuningAdamW(model.named_parameters(), lr=0.05, mode="task", gradient_mask=masks)
    train(model, optimizer, range(3))
    return weights(model)


def test_parameters_without_a_mask_train_on_in_a_flat_parameter_with_one(two_ranks: TwoRanks) -> None:
    alone = trained_with_one_mask("plain")
    for found in two_ranks(trained_with_one_mask, "fsdp1, flat parameters"):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def seen_on_shard(wrapper: str) -> Tensor:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(torch.zeros(4000, 4))
    if wrapper == "another dimension":
        p = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(1)]))
        p.grad = distribute_tensor(torch.ones(4000, 4), mesh, [Shard(1)])
    else:
        module = nn.Module()
        module.p = p
        wrapped = FSDP1(module, device_id=torch.device("cpu"), use_orig_params=wrapper == "original")
        (p,) = wrapped.parameters()
        p.grad = torch.ones_like(p)
    optimizer = ChildTuningAdamW([p], betas=(0.0, 0.0))
    optimizer.step()
    seen = optimizer.state[p]["exp_avg"]
    return (seen.to_local() if isinstance(seen, DTensor) else seen).reshape(-1) != 0


@pytest.mark.parametrize("wrapper", ["another dimension", "original", "flat"])
def test_masks_differ_between_shards(two_ranks: TwoRanks, wrapper: str) -> None:
    first, second = two_ranks(seen_on_shard, wrapper)
    assert first.numel() == second.numel() == 8000
    agree = float((first == second).float().mean())
    assert agree == pytest.approx(0.3**2 + 0.7**2, abs=5 * (0.25 / 8000) ** 0.5)


SAVED = [(mode, wrapper) for mode in ("taskfree", "task") for wrapper in WRAPPERS if wrapper != "ddp"]


def folder(directory: str, mode: str, wrapper: str) -> str:
    return f"{directory}/{mode}, {wrapper}"


def save(directory: str, mode: str, wrapper: str) -> dict[str, Tensor]:
    model = net(wrapper)
    masks = some_masks(net()) if mode == "task" else None
    optimizer = ChildTuningAdamW(model.named_parameters(), lr=0.05, mode=mode, gradient_mask=masks, seed=4)
    train(model, optimizer, range(2))
    save_distributed(folder(directory, mode, wrapper), model, optimizer, step=2)
    train(model, optimizer, range(2, 4))
    return weights(model)


def save_all(directory: str) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(mode, wrapper): save(directory, mode, wrapper) for mode, wrapper in SAVED}


def load(directory: str, mode: str, wrapper: str, other: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = net(other)
    ones = {name: torch.ones(p.shape) for name, p in net().named_parameters()}
    optimizer = ChildTuningAdamW(
        model.named_parameters(), lr=0.05, mode=mode, gradient_mask=ones if mode == "task" else None
    )
    load_distributed(folder(directory, mode, wrapper), model, optimizer)
    train(model, optimizer, range(2, 4))
    return weights(model), {
        name: optimizer.param_groups[0][name] for name in ("mode", "reserve_p", "seed", "mask_step")
    }


def load_all(directory: str, plain: bool) -> dict[tuple[str, str], tuple[dict[str, Tensor], dict[str, Any]]]:
    return {
        (mode, wrapper): load(directory, mode, wrapper, "plain" if plain else wrapper)
        for mode, wrapper in SAVED
    }


def test_a_checkpoint_goes_on_alike_on_another_number_of_ranks(tmp_path: Any) -> None:
    saved = on_ranks(save_all, str(tmp_path), world_size=2)[0]
    for plain, world_size in ((False, 3), (True, 1)):
        loaded = on_ranks(load_all, str(tmp_path), plain, world_size=world_size)[0]
        for (mode, wrapper), expected in saved.items():
            found, own = loaded[mode, wrapper]
            assert own == {"mode": mode, "reserve_p": 0.3, "seed": 4, "mask_step": 4}
            if plain and (mode, wrapper) == ("taskfree", "fsdp1, flat parameters"):
                continue  # other masks, as documented
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


# ---- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reserve_p": 0.0}, r"expected reserve_p in \(0, 1\], found 0.0"),
        ({"reserve_p": 1.5}, r"expected reserve_p in \(0, 1\], found 1.5"),
        ({"reserve_p": float("nan")}, "found nan"),
        ({"mode": "fisher"}, "expected mode .* found 'fisher'"),
        ({"mode": "task"}, "expects gradient_mask, found none"),
        ({"mode": "task", "gradient_mask": {}}, "expects gradient_mask, found none"),
        (
            {"mode": "task", "gradient_mask": {"x": torch.ones(3)}},
            "names x, which the optimizer does not have",
        ),
        (
            {"mode": "task", "gradient_mask": dict.fromkeys("zyx", torch.ones(3))},
            r"names x, y, z, which .* such as p\.",
        ),
        (
            {"mode": "task", "gradient_mask": dict.fromkeys("zyxw", torch.ones(3))},
            "names w, x, y and others, which",
        ),
        ({"mode": "task", "gradient_mask": {"p": torch.ones(3)}}, r"expected shape \(2, 4\).*found \(3,\)"),
        ({"freeze_masked": True}, 'freeze_masked needs mode "task"'),
    ],
)
def test_mistakes_are_told(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChildTuningAdamW([("p", parameter(2, 4))], **options)


def test_a_mask_without_names_and_a_group_with_a_wrong_fraction() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        ChildTuningAdamW([parameter(2)], mode="task", gradient_mask={"p": torch.ones(2)})
    with pytest.raises(ValueError, match="reserve_p"):
        ChildTuningAdamW([{"params": [parameter(2)], "reserve_p": -1}])


def mistaken() -> str:
    model = net("fsdp2")
    with pytest.raises(ValueError, match=r"'head.weight'\]: expected shape \(3, 6\), found \(3,\)") as error:
        ChildTuningAdamW(model.named_parameters(), mode="task", gradient_mask={"head.weight": torch.ones(3)})
    return str(error.value)


def test_every_rank_has_the_same_error(two_ranks: TwoRanks) -> None:
    first, second = two_ranks(mistaken)
    assert first == second

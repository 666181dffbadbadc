"""ChildTuningAdamW: is the mask what it should be, wherever the weights lie, and is the rest AdamW?"""

import copy
import zlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils import ChildTuningAdamW, load_distributed, run_on_ranks, save_distributed
from tests.children import WRAPPERS, loss_of, net, some_masks, train, weights
from tests.children import batch as batch_of

EVEN = torch.arange(100) % 2 == 0


def parameter(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
    p = nn.Parameter(torch.randn(*shape, device=device).to(dtype))
    p.grad = torch.ones_like(p)
    return p


def seen_by_adamw(*params: nn.Parameter, **options: Any) -> Tensor:
    """The gradients of ones as AdamW gets them at the next step: its average begins at 0, with betas of 0."""
    optimizer = ChildTuningAdamW(params, betas=(0.0, 0.0), **options)
    optimizer.step()
    return torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in params])


def masked(mask: Tensor = EVEN, **options: Any) -> tuple[nn.Parameter, ChildTuningAdamW]:
    """A parameter in mode "task"."""
    p = parameter(*mask.shape)
    return p, ChildTuningAdamW([("p", p)], mode="task", gradient_mask={"p": mask}, **options)


def child(model: nn.Module, mode: str, masks: dict[str, Tensor], **options: Any) -> ChildTuningAdamW:
    """The optimizer of a whole model."""
    given: dict[str, Any] = {"lr": 0.05, "mode": mode, "gradient_mask": masks if mode == "task" else None}
    return ChildTuningAdamW(model.named_parameters(), **given | options)


def is_kept(optimizer: ChildTuningAdamW, p: nn.Parameter) -> Tensor:
    return optimizer.state[p]["exp_avg_sq"].isfinite()


# ---- the mask of mode "taskfree" -----------------------------------------------------------------------


@pytest.mark.parametrize("p", [1e-12, 0.3, 0.999])
def test_the_kept_fraction_is_p_and_the_mean_is_unbiased(p: float) -> None:
    n = 200_000
    seen = seen_by_adamw(parameter(n), reserve_p=p)
    deviation = (p * (1 - p) / n) ** 0.5
    assert float((seen != 0).float().mean()) == pytest.approx(p, abs=5 * deviation)
    assert float(seen.mean(dtype=torch.float64)) == pytest.approx(1, abs=5 * deviation / p) or p < 1e-6
    torch.testing.assert_close(seen[seen != 0], torch.full_like(seen[seen != 0], 1 / p))


@pytest.mark.parametrize(("seed", "crc"), [(0, 1930306171), (-7, 1824298432), (2**63 + 5, 1061245460)])
def test_the_masks_of_a_seed_stay_the_same_between_releases(seed: int, crc: int) -> None:
    """So that a run goes on from a checkpoint with the masks that it would have had. Pages have 2**16."""
    params = [parameter(n) for n in (3 * 2**16 + 77, 2**20, 5)]
    optimizer = ChildTuningAdamW(params, betas=(0.0, 0.0), reserve_p=0.25, seed=seed)
    kept, random = [], torch.get_rng_state()
    for _ in range(2):
        optimizer.step()
        kept += [optimizer.state[p]["exp_avg"] != 0 for p in params]
    assert torch.equal(torch.get_rng_state(), random)  # nobody else's random numbers change
    assert zlib.crc32(torch.cat(kept).numpy().tobytes()) == crc


# ---- the rest is AdamW ---------------------------------------------------------------------------------


def trained(make: Any) -> list[Tensor]:
    """Losses, as closures give them, and weights."""
    model, losses = net(), []
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    for number in range(5):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(number))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
        scheduler.step()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("options", [{"reserve_p": 1}, {"mode": None}])
def test_without_a_mask_it_is_adamw_bit_for_bit(options: dict) -> None:
    ours = trained(lambda m: ChildTuningAdamW(m.parameters(), weight_decay=0.1, **options))
    torchs = trained(lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1))
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_random_step_is_adamws_with_the_masked_gradient(dtype: torch.dtype) -> None:
    p = parameter(50, 40, dtype=dtype)
    mask = seen_by_adamw(parameter(50, 40, dtype=dtype), seed=3).view(50, 40) != 0
    twin = copy.deepcopy(p)
    p.grad = torch.randn_like(p)
    twin.grad = torch.where(mask, p.grad.double() / 0.3, 0).to(dtype)
    ours = ChildTuningAdamW([p], weight_decay=0.1, seed=3)
    ours.step()
    torch.optim.AdamW([twin], weight_decay=0.1, fused=True).step()
    # one rounding of the scaled gradient may differ
    torch.testing.assert_close(p, twin, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
    assert torch.equal(ours.state[p]["exp_avg"] != 0, mask & (twin.grad != 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_run_with_a_given_mask_is_adamws_with_masked_gradients_bit_for_bit(dtype: torch.dtype) -> None:
    """Weights, moments and counts, step after step, though the kernel sees the gradients unmasked."""
    p = parameter(50, 40, dtype=dtype)
    twin = copy.deepcopy(p)
    mask = torch.rand(50, 40) < 0.3
    ours = ChildTuningAdamW([("p", p)], weight_decay=0.1, mode="task", gradient_mask={"p": mask})
    torchs = torch.optim.AdamW([twin], weight_decay=0.1, fused=True)
    for _ in range(5):
        p.grad = torch.randn(50, 40).to(dtype)
        before, twin.grad = p.grad.clone(), p.grad * mask
        ours.step()
        torchs.step()
        assert torch.equal(p.grad, before)
        assert torch.equal(p, twin)
        assert torch.equal(is_kept(ours, p), mask)
        for name, expected in torchs.state[twin].items():
            found = ours.state[p][name]
            assert torch.equal(found[mask], expected[mask]) if found.dim() else found == expected


def test_missing_empty_and_oddly_laid_out_gradients() -> None:
    missing, empty = nn.Parameter(torch.ones(3)), parameter(0, 4)
    channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    channels_last.grad = torch.ones(2, 3, 4, 4)
    transposed = parameter(8, 5)
    transposed.grad = torch.ones(5, 8).T
    optimizer = ChildTuningAdamW([missing, empty, channels_last, transposed], reserve_p=0.5)
    optimizer.step()
    assert bool((missing == 1).all())
    for p in (channels_last, transposed):
        seen = optimizer.state[p]["exp_avg"]
        assert 0 < float((seen != 0).float().mean()) < 1
        torch.testing.assert_close(seen[seen != 0], torch.full((int((seen != 0).sum()),), 0.2))
        assert p.grad is not None
        assert bool((p.grad == 1).all())  # it stays as it is


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


# ---- what a step costs ---------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts what is dispatched: on a GPU, at most as many launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("number", "side", "device", "dtype", "most"),
    [
        (20, 1024, "meta", torch.float32, 60),  # shapes and calls as on a GPU, without numbers
        (20, 1024, "meta", torch.bfloat16, 60),
        (1000, 64, "meta", torch.float32, 60),
        (20, 1024, "cpu", torch.float32, 160),
    ],
)
def test_a_step_takes_few_calls(number: int, side: int, device: str, dtype: torch.dtype, most: int) -> None:
    optimizer = ChildTuningAdamW([parameter(side, side, dtype=dtype, device=device) for _ in range(number)])
    optimizer.step()  # makes the moments and the plan
    with Calls() as calls:
        optimizer.step()
    assert calls.names.total() <= most, calls.names
    if device == "meta":
        assert calls.names["aten::_local_scalar_dense"] == 0  # nobody waits for a number
        assert calls.names["aten::_to_copy"] <= 1  # the counts of steps go there, in one copy


def everything() -> dict[str, Tensor]:
    """Masks that keep all."""
    return {name: torch.ones(p.shape) for name, p in net().named_parameters()}


# ---- saving and loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["taskfree", "task"])
def test_a_resumed_run_is_the_run(mode: str) -> None:
    straight, first, second = net(), net(), net()
    train(straight, child(straight, mode, some_masks(), seed=5), range(6))
    optimizer = child(first, mode, some_masks(), seed=5)
    train(first, optimizer, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed = child(second, mode, everything(), reserve_p=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["reserve_p"] == 0.3
    train(second, resumed, range(3, 6))
    first, optimizer = copy.deepcopy((first, optimizer))  # together: the copies belong to each other
    train(first, optimizer, range(3, 6))
    for name, p in straight.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
        assert torch.equal(p, first.get_parameter(name)), name


def test_masks_hold_with_a_state_of_adamw_and_give_way_to_those_of_a_state() -> None:
    plain = torch.optim.AdamW([parameter(100)], weight_decay=0.0)
    plain.step()
    _, lender = masked(~EVEN)
    lender.step()
    for states, expected in (((plain,), EVEN), ((plain, lender), ~EVEN)):
        p, optimizer = masked()
        for one in states:
            optimizer.load_state_dict(one.state_dict())
        before = p.detach().clone()
        optimizer.step()
        assert torch.equal(p != before, expected)
    moments = plain.state_dict()["state"][0]["exp_avg_sq"]
    assert bool(moments.isfinite().all())  # the lender's stay as they are


# ---- on ranks ------------------------------------------------------------------------------------------


def trained_under(wrapper: str, mode: str, masks: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    model = net(wrapper)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks need not be seeded alike
    optimizer = child(model, mode, masks or some_masks(), weight_decay=0.1, reserve_p=0.5)
    train(model, optimizer, range(4))
    return weights(model)


def one_mask() -> dict[str, Tensor]:
    return {"blocks.0.up.weight": some_masks()["blocks.0.up.weight"]}


def agreeing_masks() -> list[Tensor]:
    """What is kept of shards that begin with other rows or columns, by each way to shard."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(4000, 4), mesh, [Shard(1)]))
    p.grad = distribute_tensor(torch.ones(4000, 4), mesh, [Shard(1)])
    optimizer = ChildTuningAdamW([p], betas=(0.0, 0.0))
    optimizer.step()
    kept = [optimizer.state[p]["exp_avg"].to_local().reshape(-1) != 0]
    for use_orig_params in (True, False):
        module = nn.Module()
        module.p = nn.Parameter(torch.zeros(4000, 4))
        wrapped = FSDP1(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        (p,) = wrapped.parameters()
        p.grad = torch.ones_like(p)
        kept.append(seen_by_adamw(p) != 0)
    return kept


SAVED = [(mode, wrapper) for mode in ("taskfree", "task") for wrapper in WRAPPERS if wrapper != "ddp"]


def on_two(directory: str) -> tuple[dict[tuple[str, str], dict[str, Tensor]], list[Tensor]]:
    """Saved after two steps of four; and masks on shards."""
    found = {}
    for mode, wrapper in SAVED:
        model = net(wrapper)
        optimizer = child(model, mode, some_masks(), seed=4)
        train(model, optimizer, range(2))
        save_distributed(f"{directory}/{mode}, {wrapper}", model, optimizer, step=2)
        train(model, optimizer, range(2, 4))
        found[mode, wrapper] = weights(model)
    return found, agreeing_masks()


def load_all(directory: str, plain: bool) -> dict[tuple[str, str], tuple[dict[str, Tensor], dict[str, Any]]]:
    found = {}
    for mode, wrapper in SAVED:
        model = net("plain" if plain else wrapper)
        optimizer = child(model, mode, everything())
        load_distributed(f"{directory}/{mode}, {wrapper}", model, optimizer)
        train(model, optimizer, range(2, 4))
        own = {name: optimizer.param_groups[0][name] for name in ("mode", "reserve_p", "seed", "mask_step")}
        found[mode, wrapper] = weights(model), own
    return found


def on_three(directory: str) -> tuple[dict[tuple[str, str], dict[str, Tensor]], Any]:
    """Trained under each wrapper; and loaded from two ranks."""
    found = {(mode, w): trained_under(w, mode) for mode in ("taskfree", "task") for w in WRAPPERS}
    flat = "fsdp1, flat parameters"
    return {**found, ("one mask", flat): trained_under(flat, "task", one_mask())}, load_all(directory, False)


Told = tuple[Any, Any, str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    directory = str(tmp_path_factory.mktemp("saved"))
    two = run_on_ranks(on_two, directory, world_size=2)
    return two, run_on_ranks(on_three, directory, world_size=3), directory


def test_the_run_is_that_of_one_process_however_the_model_is_sharded(told: Told) -> None:
    alone = {mode: trained_under("plain", mode) for mode in ("taskfree", "task")}
    alone["one mask"] = trained_under("plain", "task", one_mask())
    (first, _), (second, _), _ = told[1]
    for mode, wrapper in first:
        for name, expected in alone[mode].items():
            found = first[mode, wrapper]
            assert torch.equal(found[name], second[mode, wrapper][name])  # replicas, bit for bit
            if wrapper != "fsdp1, flat parameters" or mode != "taskfree":
                torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
            else:  # other masks, as documented
                assert not torch.allclose(found["head.weight"], alone[mode]["head.weight"], atol=1e-3)


def test_masks_differ_between_shards(told: Told) -> None:
    (_, first), (_, second) = told[0]
    for one, other in zip(first, second, strict=True):
        assert one.numel() == other.numel() == 8000
        agree = float((one == other).float().mean())
        assert agree == pytest.approx(0.3**2 + 0.7**2, abs=5 * (0.25 / 8000) ** 0.5)


def test_a_checkpoint_goes_on_alike_on_another_number_of_ranks(told: Told) -> None:
    ((saved, _), _), ((_, elsewhere), *_), directory = told
    for plain, loaded in ((False, elsewhere), (True, load_all(directory, True))):
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
        ({"reserve_p": float("nan")}, "found nan"),
        ({"mode": "fisher"}, "expected mode .* found 'fisher'"),
        ({"mode": "task"}, "expects gradient_mask, found none"),
        (
            {"mode": "task", "gradient_mask": dict.fromkeys("zyx", torch.ones(3))},
            r"names x, y, z, which .* such as p\.",
        ),
        (
            {"mode": "task", "gradient_mask": {"p": torch.ones(4, 2)}},
            r"expected shape \(2, 4\).*found \(4, 2\)",
        ),
    ],
)
def test_mistakes_are_told(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChildTuningAdamW([("p", parameter(2, 4))], **options)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_masks_belong_to_exact_names(prefix: str) -> None:
    """DDP puts "module." before all names; a submodule may be called so, too."""
    ps = {f"{prefix}{name}": parameter(3) for name in ("module.w", "w")}
    kept, options = torch.tensor([True, False, False]), {"mode": "task", "lr": 0.1}
    before = {name: p.detach().clone() for name, p in ps.items()}
    ChildTuningAdamW([*ps.items()], gradient_mask={"module.w": kept, "w": ~kept}, **options).step()  # pyright: ignore
    assert torch.equal(ps[f"{prefix}module.w"] != before[f"{prefix}module.w"], kept)
    assert torch.equal(ps[f"{prefix}w"] != before[f"{prefix}w"], ~kept)


def test_what_no_step_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        ChildTuningAdamW([parameter(2)], mode="task", gradient_mask={"p": torch.ones(2)})
    whole = torch.ones(6, 6)
    part = nn.Parameter(whole[:, ::2])
    part.grad = torch.ones(6, 3)
    with pytest.raises(ValueError, match="Make the parameters contiguous"):
        ChildTuningAdamW([part]).step()
    assert torch.equal(whole, torch.ones(6, 6))
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.arange(2)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        ChildTuningAdamW(embedding.parameters()).step()

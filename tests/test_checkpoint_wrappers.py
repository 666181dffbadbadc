"""Wrappers that FSDP is combined with: saved from each, loaded into each, and trained on alike."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp._flat_param import _ShardParamInfo
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_utils import (
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
)
from fsdp_utils.checkpoint.restore import Unit, fsdp1_optimizer_state, restore_optimizer
from fsdp_utils.checkpoint.state import OptimizerPlan, Snapshot, parameter_names, quiet
from tests.checkpoints import Block, Data, Net, Outcome, build, outcome, rank, train
from tests.sharded import TwoRanks, fsdp1

WAIT_S = 1.0


class ForwardModule(nn.Module):
    """As Lightning Fabric's wrapper, which has what is wrapped and the model under these names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model
        self._original_module = next(module for module in model.modules() if isinstance(module, Net))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def blocks(model: Net, wrap: Callable[[nn.Module], nn.Module]) -> Net:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def no_shard(model: nn.Module, **options: Any) -> FSDP1:
    return fsdp1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        **options,
    )


# by name; "flat" and "original" parameters are FSDP1's
WRAPPED: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda model: model,
    "compile(DDP)": lambda model: compiled(DistributedDataParallel(model)),
    "DDP(compile)": lambda model: DistributedDataParallel(compiled(model)),
    "Fabric(DDP)": lambda model: ForwardModule(DistributedDataParallel(model)),
    "Fabric(FSDP2)": lambda model: ForwardModule(sharded(model)),
    "compile(FSDP1)": lambda model: compiled(fsdp1(model, use_orig_params=True)),
    "Fabric(compile(DDP(compile)))": lambda model: ForwardModule(
        compiled(DistributedDataParallel(compiled(model)))
    ),
    "FSDP2(checkpointing(compile))": lambda model: sharded(
        blocks(model, lambda block: checkpoint_wrapper(compiled(block)))
    ),
    "compile(checkpointing(DDP))": lambda model: compiled(checkpoint_wrapper(DistributedDataParallel(model))),
    "no shard, flat": lambda model: no_shard(model),
    "no shard, original": lambda model: no_shard(model, use_orig_params=True),
    "checkpointing outside, flat": lambda model: fsdp1(
        blocks(model, lambda block: checkpoint_wrapper(fsdp1(block)))
    ),
    "checkpointing outside, original": lambda model: fsdp1(
        blocks(model, lambda block: checkpoint_wrapper(fsdp1(block, use_orig_params=True))),
        use_orig_params=True,
    ),
    "checkpointing inside, flat": lambda model: fsdp1(
        blocks(model, lambda block: fsdp1(checkpoint_wrapper(block)))
    ),
    "checkpointing inside, original": lambda model: fsdp1(
        blocks(model, lambda block: fsdp1(checkpoint_wrapper(block), use_orig_params=True)),
        use_orig_params=True,
    ),
}


def wrapped(kind: str, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    with quiet():
        model = WRAPPED[kind](Net())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def from_each_into_each(folder: Path, kinds: list[str]) -> dict[str, list[str]]:
    """For each kind, into which kinds it could not be loaded such that training goes on alike."""
    wrong: dict[str, list[str]] = {}
    expected: dict[str, list[float]] = {}
    for kind in kinds:
        (model, optimizer), data = wrapped(kind), Data()
        train(model, optimizer, data, 2)
        place = data.generator.get_state()
        save_distributed(folder / kind, model, optimizer, step=1)
        save_full(folder / f"{kind}.pt", model, optimizer)
        expected[kind] = train(model, optimizer, data, 2)
        for into in {kind, kinds[0]}:
            for how in (
                lambda *to, kind=kind: load_distributed(folder / kind, *to),
                lambda *to, kind=kind: load_full(folder / f"{kind}.pt", *to),
            ):
                (model, optimizer), data = wrapped(into, seed=1), Data()
                data.generator.set_state(place)
                how(model, optimizer)
                if train(model, optimizer, data, 2) != pytest.approx(expected[into], rel=1e-6):
                    wrong.setdefault(kind, []).append(into)
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrappers_of_any_depth_give_the_same_names(ranks: int, tmp_path: Path) -> None:
    several = [kind for kind in WRAPPED if kind != "plain"]  # on two ranks, plain models train apart
    kinds = several if ranks == 2 else ["plain", *(kind for kind in WRAPPED if "original" in kind)]
    assert run_on_ranks(from_each_into_each, tmp_path, kinds, world_size=ranks)[0] == {}


def a_part_in_ddp(folder: Path) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[1] = DistributedDataParallel(model[1])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_distributed(folder, model, optimizer, step=1)
    into = torch.optim.AdamW(plain.parameters())
    load_distributed(folder, plain, into)
    load_distributed(folder, model, optimizer)
    return all(
        torch.equal(optimizer.state[a]["exp_avg"], into.state[b]["exp_avg"])
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_part_of_a_model_in_ddp_has_its_names_too(two_ranks: TwoRanks, tmp_path: Path) -> None:
    assert two_ranks(a_part_in_ddp, tmp_path) == [True, True]


def names_in_a_checkpoint(folder: Path, kinds: list[str]) -> dict[str, list[list[str]]]:
    found = {}
    for kind in kinds:
        model, optimizer = wrapped(kind)
        train(model, optimizer, Data(), 1)
        content = torch.load(save_full(folder / f"{kind}.pt", model, optimizer), weights_only=True)
        optimized = [name for group in content["optimizer"]["param_groups"] for name in group["params"]]
        found[kind] = [sorted(content["model"]), sorted(optimized), sorted(content["optimizer"]["state"])]
    return found


@pytest.mark.filterwarnings("ignore")
def test_no_wrapper_is_part_of_a_name(two_ranks: TwoRanks, tmp_path: Path) -> None:
    model = Net()
    params = sorted(name for name, _ in model.named_parameters())
    kinds = [kind for kind in WRAPPED if kind != "plain"]  # on two ranks, plain models train apart
    for found in two_ranks(names_in_a_checkpoint, tmp_path, kinds):
        for kind, names in found.items():
            assert names == [sorted(model.state_dict()), params, params], kind


HIDDEN: dict[str, Callable[[Net], nn.Module]] = {
    "FSDP1(compile), flat": lambda model: fsdp1(compiled(model)),
    "FSDP1(compile), original": lambda model: fsdp1(compiled(model), use_orig_params=True),
    "checkpointing(DDP)": lambda model: blocks(
        model, lambda block: checkpoint_wrapper(DistributedDataParallel(block))
    ),
}


def save_hidden(folder: Path) -> dict[str, Outcome]:
    """These were saved once, under names that nothing could be loaded from."""
    found = {}
    for kind, wrap in HIDDEN.items():
        model = wrap(Net())
        found[kind] = outcome(lambda model=model: save_full(folder / "f", model))
    return found


def test_names_that_torch_does_not_clean_are_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for found in two_ranks(save_hidden, tmp_path):
        for one in found.values():
            assert "expected the parameter 'blocks.0.down.bias' in the model's state dict" in one.error
            assert "Put FSDP1 inside of torch.compile" in one.error
    assert not list(tmp_path.iterdir())


class Holder(nn.Module):
    """Has a part of its own with the name that DDP gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_part_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = Holder()
    optimizer = torch.optim.AdamW(model.parameters())
    save_full(tmp_path / "f", model, optimizer)
    saved = torch.load(tmp_path / "f", weights_only=True)
    assert list(saved["model"]) == saved["optimizer"]["param_groups"][0]["params"]
    assert list(saved["model"]) == ["module.weight", "module.bias"]
    load_full(tmp_path / "f", Holder(), None)
    load_full(tmp_path / "f", model, optimizer)


# ---- FSDP1 with frozen parameters --------------------------------------------------------------------------


def half_frozen(frozen: int, seed: int) -> tuple[nn.Module, Optimizer]:
    """One unit of two layers, of which one is frozen, so that one rank's shard is all frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[frozen].requires_grad_(False)
    model = fsdp1(model, use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(6.0).reshape(1, 6) + number).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_half_frozen(folder: Path) -> list[tuple[int, list[float]]]:
    found = []
    for frozen in (0, 1):
        model, optimizer = half_frozen(frozen, 0)
        steps(model, optimizer)
        save_distributed(folder / f"{frozen}", model, optimizer, step=1, wait_s=5)
        save_full(folder / f"{frozen}.pt", model, optimizer, wait_s=5)
        found.append((len(optimizer.state), steps(model, optimizer)))
        for load in (
            lambda *to, frozen=frozen: load_distributed(folder / f"{frozen}", *to),
            lambda *to, frozen=frozen: load_full(folder / f"{frozen}.pt", *to),
        ):
            model, optimizer = half_frozen(frozen, 1)
            load(model, optimizer)
            found.append((len(optimizer.state), steps(model, optimizer)))
    return found


def test_a_rank_whose_shard_is_all_frozen_takes_part_in_a_save(two_ranks: TwoRanks, tmp_path: Path) -> None:
    by_rank = two_ranks(save_half_frozen, tmp_path, timeout=30)
    for found in by_rank:
        for first, *others in (found[:3], found[3:]):
            assert others == [first, first]
    assert [found[0][0] == 0 for found in by_rank] == [True, False]
    assert [found[3][0] == 0 for found in by_rank] == [False, True]


class Adapted(nn.Module):
    """A layer with an adapter, as LoRA trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.down, self.up = nn.Linear(5, 1, bias=False), nn.Linear(1, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.base(x) + self.up(self.down(x)))


TRAINED = {
    "adapters": ("down", "up"),
    "biases": ("bias",),
    "one parameter": ("1.down",),
    "last layer": ("2.",),
}


def adapted(trained: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(Adapted(), Adapted(), Adapted())
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in TRAINED[trained]))
    if dist.is_initialized():
        policy = ModuleWrapPolicy({Adapted})
        model = fsdp1(model, use_orig_params=True, auto_wrap_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def adapted_steps(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = (model(torch.arange(5.0).reshape(1, 5) + number) - torch.arange(5.0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_adapted(folder: Path) -> list[list[float]]:
    goes_on = []
    for trained in TRAINED:
        model, optimizer = adapted(trained, 0)
        adapted_steps(model, optimizer)
        save_distributed(folder / trained, model, optimizer, step=1, wait_s=5)
        save_full(folder / f"{trained}.pt", model, optimizer, wait_s=5)
        goes_on.append(adapted_steps(model, optimizer))
    return goes_on


def load_adapted(folder: Path, suffix: str) -> list[list[float]]:
    goes_on = []
    for trained in TRAINED:
        model, optimizer = adapted(trained, 1)
        (load_full if suffix else load_distributed)(folder / f"{trained}{suffix}", model, optimizer)
        goes_on.append(adapted_steps(model, optimizer))
    return goes_on


@pytest.mark.filterwarnings("ignore::UserWarning")  # that mixing takes more memory
def test_a_few_trained_parameters_among_frozen_ones_go_on_on_other_ranks(tmp_path: Path) -> None:
    expected = run_on_ranks(save_adapted, tmp_path, world_size=3)[0]
    for suffix in ("", ".pt"):
        for found in (
            load_adapted(tmp_path, suffix),
            run_on_ranks(load_adapted, tmp_path, suffix, world_size=2)[1],
        ):
            for trained, one, other in zip(TRAINED, found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4), (trained, suffix)


def fail_before_a_gather(folder: Path, call: str) -> list[Any]:
    """Rank 1 fails where FSDP1 would gather: rank 0 waits in a collective of the model's own group."""
    model, optimizer = build("fsdp1")
    train(model, optimizer, Data(), 1)
    group = model.process_group
    before = group._get_backend(torch.device("cpu")).options._timeout

    def hook(*_: Any) -> None:
        raise MemoryError("not enough for the state dict")

    if rank() == 1:
        model.register_state_dict_pre_hook(hook)
    found = outcome(
        lambda: (
            save_distributed(folder / "d", model, optimizer, step=1, wait_s=WAIT_S)
            if call == "distributed"
            else save_full(folder / "f", model, optimizer, wait_s=WAIT_S)
        )
    )
    return [found, before == group._get_backend(torch.device("cpu")).options._timeout]


@pytest.mark.parametrize("call", ["distributed", "full"])
def test_a_rank_that_fails_before_a_gather_of_fsdp1_is_not_waited_for_long(
    call: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    for found, restored in two_ranks(fail_before_a_gather, tmp_path, call, timeout=30):
        assert "rank 1 failed, or lost a rank that did: MemoryError: not enough" in found.error
        assert found.seconds < 10
        assert restored, "the group keeps another timeout"


# ---- what is refused ---------------------------------------------------------------------------------------


def tensor_parallel(folder: Path, use_orig_params: bool) -> tuple[list[Outcome], bool]:
    """FSDP1 over one dimension of a mesh, tensor parallel over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        models.append(fsdp1(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params))
    model, other = models
    optimizer = torch.optim.AdamW(model.parameters())
    steps_of_eight = torch.arange(8.0).reshape(1, 8)
    model(steps_of_eight).sum().backward()
    optimizer.step()
    found = [
        outcome(lambda: save_distributed(folder / "d", model, optimizer, step=1)),
        outcome(lambda: save_full(folder / "f", model, optimizer)),
    ]
    save_distributed(folder / "d", model, step=1)
    load_distributed(folder / "d", other)
    return found, torch.equal(model(steps_of_eight), other(steps_of_eight))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_an_optimizer_of_fsdp1_over_tensor_parallel_is_refused(use_orig_params: bool, tmp_path: Path) -> None:
    for found, same in run_on_ranks(tensor_parallel, tmp_path, use_orig_params, world_size=4):
        for one in found:
            assert "expected FSDP1 around parameters that nothing else shards, found tensor" in one.error
        assert same, "the model alone is saved and loaded"


def uneven_tensor_parallel(folder: Path, use_orig_params: bool) -> list[Outcome]:
    """Seven rows over two ranks: gloo ends the process in the middle of torch's gather, NCCL may do worse."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = fsdp1(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params)
    return [
        outcome(lambda: save_distributed(folder / "d", model, step=1)),
        outcome(lambda: save_full(folder / "f", model)),
        outcome(lambda: load_distributed(folder / "d", model)),
    ]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_over_uneven_tensor_parallel_parts_is_refused(use_orig_params: bool, tmp_path: Path) -> None:
    for found in run_on_ranks(uneven_tensor_parallel, tmp_path, use_orig_params, world_size=4):
        for one in found:
            assert "found '0.weight' [7, 8] cut into 2 along dimension 0" in one.error
    assert not list(tmp_path.iterdir())


def ddp_inside(folder: Path) -> list[Outcome]:
    model = Net()
    model.blocks[0] = DistributedDataParallel(model.blocks[0])
    model = fsdp1(model)
    return [
        outcome(lambda: save_distributed(folder / "d", model, step=1)),
        outcome(lambda: save_full(folder / "f", model)),
    ]


def test_ddp_inside_of_fsdp1_is_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for found in two_ranks(ddp_inside, tmp_path):
        for one in found:
            assert "expected no DistributedDataParallel inside of FSDP1, found 'blocks.0'" in one.error
    assert not list(tmp_path.iterdir())


class Experts(nn.Module):
    """Two experts of this rank, under the same names as those of the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 4)
        self.own = nn.ParameterList([torch.full((2, 4), 2.0 * rank() + number) for number in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


def experts_of_each_rank(folder: Path) -> list[list[Outcome]]:
    found = []
    for kind in ("none", "fsdp2", "fsdp1", "ddp"):
        model: Any = Experts()
        if kind == "fsdp2":
            fully_shard(model, ignored_params=set(model.own))
        elif kind == "fsdp1":
            model = fsdp1(model, use_orig_params=True, ignored_states=list(model.own))
        elif kind == "ddp":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.0", "own.1"])
            model = DistributedDataParallel(model)
        saves = (
            lambda model=model: save_distributed(folder / "d", model, step=1),
            lambda model=model: save_full(folder / "f", model),
        )
        found.append([outcome(save) for save in saves])
    return found


def test_experts_that_each_rank_has_for_itself_are_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(experts_of_each_rank, tmp_path)
    assert [[one.error for one in some] for some in first] == [[one.error for one in some] for some in second]
    for one in (one for some in first for one in some):
        assert "expected 'own.0', which nothing shards, to be the same on all ranks, found other" in one.error
    assert not list(tmp_path.iterdir())


class ShardedExperts(Experts):
    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        whole = torch.arange(16.0).reshape(4, 4)  # two rows on each rank of the mesh of two
        self.own = nn.ParameterList([whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])])


def experts_as_dtensors(folder: Path, action: str) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    model: Any = ShardedExperts(mesh["ep"])
    fully_shard(model, mesh=mesh["dp"], ignored_params=set(model.own))
    if action == "save":
        save_distributed(folder, model, step=1)
    else:
        with torch.no_grad():
            model.own[0].zero_()
        load_distributed(folder, model)
    return model.own[0].full_tensor()


def test_experts_as_dtensors_are_saved_by_parts(tmp_path: Path) -> None:
    (saved, *_) = run_on_ranks(experts_as_dtensors, tmp_path, "save", world_size=4)
    for found in run_on_ranks(experts_as_dtensors, tmp_path, "load", world_size=2):
        assert torch.equal(found, saved)
    model = ShardedExperts()
    load_distributed(tmp_path, model)
    assert torch.equal(model.own[0], saved)


# ---- the device of an optimizer's state --------------------------------------------------------------------


def test_an_optimizers_state_is_put_where_its_parameters_are() -> None:
    """What is loaded is in CPU memory; the parameters are on another device, here meta."""
    model = nn.Linear(2, 2, device="meta")  # outside of units
    flat: Any = nn.Parameter(torch.empty(6, device="meta"))
    flat._shard_param_infos = [_ShardParamInfo(True, 2, 3, 1, 3)]  # three numbers, at 2 in the shard
    flat._numels = (4,)
    flat._params = None
    unit: Any = SimpleNamespace(_flat_param=flat)
    shapes = {"weight": (2, 2), "bias": (2,), "inner": (2, 2)}
    tensors = {f"{name}.exp_avg": torch.ones(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.step": torch.tensor(1.0) for name in shapes}
    paths: dict[str, Any] = {key: tuple(key.split(".")) for key in tensors}
    saved = OptimizerPlan([{"params": ["weight", "bias"], "lr": 0.5}], paths, {})
    units = [Unit(unit, ["inner"])]
    state = fsdp1_optimizer_state(model, units, saved, tensors.__getitem__)
    assert state[flat]["exp_avg"].device.type == "meta"
    assert state[flat]["exp_avg"].shape == (6,)

    optimizer = torch.optim.AdamW(model.parameters())
    restore_optimizer(
        Snapshot(),
        parameter_names(model),
        optimizer,
        saved,
        {param: state[param] for param in model.parameters()},
    )
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].device.type == "meta"
        assert optimizer.state[param]["step"].device.type == "cpu"  # where AdamW itself keeps it
    assert optimizer.param_groups[0]["lr"] == 0.5

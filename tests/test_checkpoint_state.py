"""What is saved besides the model and its optimizer: sharded tensors come back as parts."""

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_utils import (
    CheckpointError,
    PerRank,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.state import quiet
from fsdp_utils.checkpoint.user_state import digest
from tests.checkpoints import Outcome, build, outcome, rank
from tests.sharded import TwoRanks, whole

ROWS = 5  # do not divide among 2 or 3 ranks


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, ROWS)
    fully_shard(model)
    return model


def numbers(start: int) -> Tensor:
    return torch.arange(float(3 * ROWS)).reshape(ROWS, 3) + start


def state_of(model: nn.Module) -> dict[str, Any]:
    """An average of the weights, and the state of a second optimizer, with a tuple and values per rank."""
    mesh = next(model.parameters()).device_mesh  # type: ignore[union-attr]
    average, moment = (
        distribute_tensor(numbers(start), mesh, [Shard(0)], src_data_rank=None) for start in (0, 100)
    )
    return {
        "average": {"weight": average, "decay": 0.9},
        "second": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moment}}, "param_groups": [{"lr": 1}]},
        "own": ([average], rank()),
        "alone": moment,
    }


def save_state(folder: Path) -> list[bool]:
    model = sharded()
    state = state_of(model)
    save_distributed(folder / "now", model, step=1, **state)
    save = save_distributed(folder / "later", model, step=1, asynchronous=True, **state)
    with torch.no_grad():
        state["alone"].to_local().zero_()
    save.wait()
    save_full(folder / "full", model, **state_of(model))
    return [state["average"]["weight"] is not None, "exp_avg" in state["second"]["state"][0]]


def load_state(folder: Path, how: str) -> list[tuple[dict[str, Any], dict[str, Tensor], list[str]]]:
    """What each way of saving gives back: the state without its tensors, these whole, and their types."""
    model = sharded() if how == "fsdp2" else nn.Linear(3, ROWS)
    answers = []
    for name in ("now", "later", "full"):
        state = (load_full if name == "full" else load_distributed)(folder / name, model)
        own = [
            part[0].pop() for part in (state["own"] if isinstance(state["own"], PerRank) else [state["own"]])
        ]
        found = {
            "average": state["average"].pop("weight"),
            "second": state["second"]["state"][0].pop("exp_avg"),
            "own": own[-1],
            "alone": state.pop("alone"),
        }
        kinds = [type(tensor).__name__ for tensor in found.values()]
        if how == "fsdp2":
            own_weight = next(model.parameters())
            assert isinstance(own_weight, DTensor)
            for tensor in found.values():
                assert tensor.placements == own_weight.placements
                assert tensor.to_local().shape == own_weight.to_local().shape
        whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in found.items()}
        answers.append((state, whole, kinds))
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    assert run_on_ranks(save_state, folder) == [[True, True]] * 2, "the caller's state was changed"
    return folder


@pytest.mark.parametrize(("ranks", "how"), [(2, "fsdp2"), (3, "fsdp2"), (1, "plain")])
def test_dtensors_in_the_state_come_back_as_this_ranks_part(saved: Path, ranks: int, how: str) -> None:
    for number, answers in enumerate(run_on_ranks(load_state, saved, how, world_size=ranks)):
        for state, found, kinds in answers:
            assert kinds == ["DTensor" if how == "fsdp2" else "Tensor"] * 4
            for key, start in (("average", 0), ("second", 100), ("own", 0), ("alone", 100)):
                assert torch.equal(found[key], numbers(start)), key
            assert state["average"] == {"decay": 0.9}
            assert state["second"] == {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1}]}
            assert state["own"] == (([], number) if ranks == 2 else [([], 0), ([], 1)])


def test_a_checkpoint_with_sharded_state_verifies(saved: Path) -> None:
    verify_checkpoint(saved / "now")
    verify_checkpoint(saved / "full")


def hybrid(folder: Path) -> list[Tensor]:
    """Saved over two dimensions of a mesh of which one replicates, loaded over one."""
    model = sharded()
    mesh = init_device_mesh("cpu", (1, 2))
    save_distributed(folder, model, step=1, x=distribute_tensor(numbers(0), mesh, [Replicate(), Shard(0)]))
    found = load_distributed(folder, model)["x"]
    assert found.device_mesh.ndim == 1
    return [found.full_tensor(), found.to_local()]


def test_a_hybrid_tensor_loads_over_a_mesh_of_one_dimension(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for full, local in two_ranks(hybrid, tmp_path):
        assert torch.equal(full, numbers(0))
        assert len(local) < ROWS


PLACEMENTS: dict[str, list[Placement]] = {
    "rows and columns": [Shard(0), Shard(1)],
    "columns and rows": [Shard(1), Shard(0)],
    "rows twice": [Shard(0), Shard(0)],
    "columns twice": [Shard(1), Shard(1)],
    "columns of copies": [Replicate(), Shard(1)],
    "copies of columns": [Shard(1), Replicate()],
    "counted from the end": [Shard(-1), Replicate()],
    "copies": [Replicate(), Replicate()],
}


def columns() -> nn.Module:
    """Sharded by its columns."""
    torch.manual_seed(0)
    model = nn.Linear(4, ROWS, bias=False)
    return fully_shard(model, shard_placement_fn=lambda param: Shard(1))


def save_two_dimensions(folder: Path) -> None:
    model = columns()
    for shape in ((1, 2), (2, 1)) if dist.get_world_size() == 2 else ((2, 2),):
        mesh = init_device_mesh("cpu", shape)
        state = {
            name: distribute_tensor(numbers(0), mesh, placements) for name, placements in PLACEMENTS.items()
        }
        name = str(shape)
        save_distributed(folder / name, model, step=1, **state)
        save_full(folder / f"{name}.pt", model, **state)


def load_two_dimensions(folder: Path) -> list[bool]:
    right = []
    for path in sorted(folder.iterdir()):
        for how in (nn.Linear(4, ROWS, bias=False), sharded_by_rows(), columns()):
            expected = [whole(param).detach().clone() for param in columns().parameters()]
            with torch.no_grad():
                for param in how.parameters():
                    param.zero_()
            state = (load_full if path.suffix else load_distributed)(path, how)
            right += [torch.equal(whole(state[name]), numbers(0)) for name in PLACEMENTS]
            right += [torch.equal(whole(p), e) for p, e in zip(how.parameters(), expected, strict=True)]
    return right


def sharded_by_rows() -> nn.Module:
    return fully_shard(nn.Linear(4, ROWS, bias=False))


def test_tensors_over_two_dimensions_and_models_sharded_by_columns(tmp_path: Path) -> None:
    run_on_ranks(save_two_dimensions, tmp_path, world_size=2)
    run_on_ranks(save_two_dimensions, tmp_path, world_size=4)
    for right in run_on_ranks(load_two_dimensions, tmp_path, world_size=2):
        assert len(right) == 6 * 3 * (len(PLACEMENTS) + 1)
        assert all(right)


def two_dimensions(width: int) -> nn.Module:
    """FSDP2 over one dimension of a mesh and tensor parallel over the other; on fewer ranks only FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
    if not dist.is_initialized():
        return model
    if dist.get_world_size() < 4:
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def save_average(folder: Path, width: int) -> None:
    model = two_dimensions(width)
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in average.values():
            param.mul_(2)
    save_distributed(folder / "d", model, step=1, state={"average": average})
    save_full(folder / "f.pt", model, state={"average": average})


def load_average(folder: Path, width: int) -> list[str]:
    wrong = []
    for load, path in ((load_distributed, folder / "d"), (load_full, folder / "f.pt")):
        model = two_dimensions(width)
        expected = {name: 2 * whole(param).detach() for name, param in model.named_parameters()}
        average = load(path, model)["average"]
        for name, param in model.named_parameters():
            found = average[name]
            if not torch.equal(whole(found), expected[name]):
                wrong.append(f"{name}: other values")
            if isinstance(param, DTensor) and (
                not isinstance(found, DTensor)
                or (found.device_mesh, found.placements) != (param.device_mesh, param.placements)
            ):
                wrong.append(f"{name}: {type(found).__name__}, not sharded as the parameter")
    return wrong


@pytest.mark.parametrize("width", [8, 6])  # 6 columns do not divide among 4 ranks
def test_an_average_comes_back_as_the_parameters_are_sharded(width: int, tmp_path: Path) -> None:
    run_on_ranks(save_average, tmp_path, width, world_size=4)
    for ranks in (4, 2):
        assert run_on_ranks(load_average, tmp_path, width, world_size=ranks) == [[]] * ranks
    assert load_average(tmp_path, width) == []


def save_by_rows(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    average = distribute_tensor(torch.arange(20.0).reshape(ROWS, 4), mesh, [Shard(0)])
    save_distributed(folder, columns(), step=1, state={"average": {"module.weight": average}})


def load_by_columns(folder: Path) -> tuple[list[int], Tensor]:
    found = load_distributed(folder, model := columns())["average"]["module.weight"]
    assert next(model.parameters()).placements == found.placements == (Shard(1),)  # type: ignore[union-attr]
    return list(found.to_local().shape), found.full_tensor()


def test_an_average_saved_by_rows_loads_by_columns_as_the_model_is(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    two_ranks(save_by_rows, tmp_path)
    for shape, full in run_on_ranks(load_by_columns, tmp_path, world_size=4):
        assert shape == [ROWS, 1]
        assert torch.equal(full, torch.arange(20.0).reshape(ROWS, 4))


def refused(folder: Path) -> list[Outcome]:
    model = sharded()
    mesh = next(model.parameters()).device_mesh  # type: ignore[union-attr]
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    flat = build("fsdp1")[0]
    with quiet(), FSDP1.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        parts = flat.state_dict()
    part = distribute_tensor(numbers(0), mesh, [Shard(0)], src_data_rank=None)
    differing = {"x": part} if rank() else {"x": torch.ones(2)}
    two_names = {"a": {"b.c": part}, "a.b": {"c": part}}
    states: list[dict[str, Any]] = [{"x": [partial]}, {"average": parts}, differing, two_names]
    return [outcome(lambda state=state: save_distributed(folder, model, step=1, **state)) for state in states]


def test_what_cannot_be_saved_as_a_part_is_refused_by_name(two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(refused, tmp_path)
    assert [one.error for one in first] == [one.error for one in second]
    partial, parts, differing, two_names = (one.error or "" for one in first)
    assert "state 'x'[0]: expected a DTensor with placements Shard and Replicate, found P(sum)" in partial
    assert "state 'average'['embed.weight']: expected a whole tensor or a DTensor, found a Shard" in parts
    assert "expected the same sharded tensors in the state on all ranks" in differing
    assert "two sharded tensors in the state have the name 'state.a.b.c'" in two_names
    assert not list(tmp_path.iterdir())


def digests() -> list[str]:
    model = sharded()
    mesh = next(model.parameters()).device_mesh  # type: ignore[union-attr]
    parts = [distribute_tensor(numbers(start), mesh, [Shard(0)], src_data_rank=None) for start in (0, 0, 7)]
    dist.barrier()
    return [digest({"x": part}) for part in parts]


def test_digests_of_sharded_tensors_tell_their_values_apart(two_ranks: TwoRanks) -> None:
    for same, again, other in two_ranks(digests):
        assert same == again != other


# ---- what is not plain data ------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1.5), r"found numpy\.float64, which .*\. Save its \.item\(\)"),
        ({"a": [np.int32(1)]}, r"found numpy\.int32 at \['a'\]\[0\], which .*\. Save its \.item\(\)"),
        (
            np.ones(2),
            r"found numpy\.ndarray, .*\. Save torch\.from_numpy\(array\), or its \.tolist\(\)",
        ),
        ({"a": Custom()}, r"found \S+\.Custom at \['a'\], which .*\. Save what it consists of"),
    ],
)
def test_a_value_that_is_no_plain_data_is_named_with_a_remedy(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state 'x': expected tensors, numbers.*" + words):
        save_full(tmp_path / "f", nn.Linear(2, 2), x=value)
    assert not list(tmp_path.iterdir())


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return Custom()

    def set_extra_state(self, state: Any) -> None:
        """Nothing: it is never loaded."""


@pytest.mark.parametrize("how", ["distributed", "full"])
def test_what_a_model_adds_and_nobody_could_load_is_refused_at_save(how: str, tmp_path: Path) -> None:
    model = WithExtraState(2, 2)
    save = {
        "full": lambda: save_full(tmp_path / "f", model),
        "distributed": lambda: save_distributed(tmp_path, model, step=1),
    }[how]
    with pytest.raises(CheckpointError, match=r"model or optimizer: expected tensors.*found \S+\.Custom at"):
        save()
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".saving-lock")]


def test_an_object_inside_of_a_value_is_told_to_give_its_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(
        CheckpointError, match=r"found torch\.optim\.lr_scheduler\.StepLR at \[0\].*\.state_dict\(\)"
    ):
        save_distributed(tmp_path, model, optimizer, step=1, schedulers=[scheduler])
    save_distributed(tmp_path, model, optimizer, step=1, scheduler=scheduler.state_dict())
    assert load_distributed(tmp_path, model)["scheduler"] == scheduler.state_dict()


@pytest.mark.parametrize("wrong", [7, ["AdamW"], {"first": None}])
def test_what_is_no_optimizer_is_refused(wrong: Any, tmp_path: Path) -> None:
    model, several = nn.Linear(2, 2), wrong
    words = "expected a torch.optim.Optimizer, a sequence or mapping of several, or None, found"
    for call in (
        lambda: save_distributed(tmp_path / "d", model, several, step=1),
        lambda: save_full(tmp_path / "f", model, several),
        lambda: load_distributed(tmp_path / "d", model, several),
        lambda: load_full(tmp_path / "f", model, several),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, -1, np.int64(1)])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected step to be a whole number of at least 0, found"):
        save_distributed(tmp_path, nn.Linear(2, 2), step=step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [True, 1.0, "1", None])
def test_a_loaded_step_is_a_whole_number_or_latest(step: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_distributed(tmp_path, model, step=1)
    with pytest.raises(CheckpointError, match='expected step to be a whole number or "latest", found'):
        load_distributed(tmp_path, model, step=step)


def test_keep_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected keep to be a whole number.*found True"):
        save_distributed(tmp_path, nn.Linear(2, 2), step=1, keep=True)


@pytest.mark.parametrize("how", ["distributed", "full"])
def test_dicts_of_all_kinds_come_back_as_they_were(how: str, tmp_path: Path) -> None:
    state = {
        "average": nn.Linear(2, 2).state_dict(),  # an OrderedDict
        "words": Counter("abc"),
        "nested": [OrderedDict([((1, 2), {3, 4}), (torch.Size([1]), 1j), (b"x", OrderedDict())])],
    }
    model = nn.Linear(2, 2)
    if how == "full":
        found = load_full(save_full(tmp_path / "f.pt", model, **state), model)
    else:
        save_distributed(tmp_path, model, step=1, **state)
        found = load_distributed(tmp_path, model)
    assert type(found["average"]) is OrderedDict
    torch.testing.assert_close(found["average"], state["average"])
    assert type(found["words"]) is Counter
    assert (found["words"], found["nested"]) == (state["words"], state["nested"])


def save_a_list_of_parts(folder: Path) -> str:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"last": [param.detach().clone()]}
    with pytest.raises(CheckpointError) as caught:
        save_distributed(folder, model, optimizer, step=1)
    return str(caught.value)


def test_parts_in_a_list_of_the_optimizers_state_are_refused(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for text in two_ranks(save_a_list_of_parts, tmp_path):
        assert "('weight', 'last'): expected sharded tensors by name, found them in a list" in text

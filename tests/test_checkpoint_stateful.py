"""state= of a save and a load: any name, and objects with a state_dict() that are loaded in place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import PerRank, load_distributed, load_full, run_on_ranks, save_distributed, save_full
from tests.checkpoints import Outcome, build, outcome, rank
from tests.sharded import TwoRanks, whole

HOW = ["distributed", "full"]


def save(how: str, folder: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> object:
    if how == "full":
        return save_full(folder / "f.pt", model, optimizer, **options)
    return save_distributed(folder / "d", model, optimizer, step=3, **options)


def load(how: str, folder: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> dict[str, Any]:
    if how == "full":
        return load_full(folder / "f.pt", model, optimizer, **options)
    return load_distributed(folder / "d", model, optimizer, **options)


# Names of arguments, and one that is no name in Python.
TAKEN = {"model": 1, "optimizer": "two", "keep": [3], "wait_s": rank, "state": 5, "path": 6, "my.name": 7}


def names_of_arguments(how: str, folder: Path) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    save(how, folder, model, state={**TAKEN, "wait_s": rank()}, epoch=8)
    return load(how, folder, model)


@pytest.mark.parametrize("how", HOW)
def test_a_name_in_the_state_may_be_that_of_an_argument(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    for number, found in enumerate(two_ranks(names_of_arguments, how, tmp_path)):
        step = {"step": 3} if how == "distributed" else {}
        assert found == {**TAKEN, "wait_s": number, "epoch": 8, **step}


def test_a_step_in_the_state_comes_back_as_it_was_given(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_distributed(tmp_path, model, step=3, state={"step": "mine"})
    assert load_distributed(tmp_path, model) == {"step": "mine"}


class Loader:
    """A data loader that knows its place: another one on each rank."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.place < 0:
            raise KeyError("broken")
        self.place = state_dict["place"]


def with_scheduler(seed: int) -> tuple[nn.Module, Any, Any]:
    model, optimizer = build("fsdp2" if torch.distributed.is_initialized() else "none", seed=seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return model, optimizer, scheduler


def save_objects(folder: Path) -> dict[str, Any]:
    model, optimizer, scheduler = with_scheduler(0)
    optimizer.step()
    for _ in range(4):
        scheduler.step()
    for how in HOW:
        save(how, folder, model, optimizer, state={"scheduler": scheduler, "data": Loader(10 + rank())}, at=1)
    return scheduler.state_dict()


def load_objects(folder: Path, how: str) -> tuple[Any, ...]:
    model, optimizer, scheduler = with_scheduler(1)
    loader = Loader()
    found = load(how, folder, model, optimizer, state={"scheduler": scheduler, "data": loader})
    assert found["scheduler"] == scheduler.state_dict()
    return scheduler.state_dict(), loader.place, found["at"]


@pytest.mark.parametrize("how", HOW)
def test_objects_with_a_state_are_saved_and_loaded_in_place(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    expected = two_ranks(save_objects, tmp_path)[0]
    assert two_ranks(load_objects, tmp_path, how) == [(expected, 10, 1), (expected, 11, 1)]


def load_on_one(folder: Path, how: str) -> tuple[str, float, Any, bool]:
    model, optimizer, scheduler = with_scheduler(1)
    before = whole(next(model.parameters())).clone()
    refused = outcome(lambda: load(how, folder, model, optimizer, state={"data": Loader()}))
    same = torch.equal(before, whole(next(model.parameters())))
    found = load(how, folder, model, optimizer, state={"scheduler": scheduler})
    return refused.error or "", scheduler.state_dict()["last_epoch"], found["data"], same


@pytest.mark.parametrize("how", HOW)
def test_an_object_whose_state_differed_between_other_ranks_is_not_guessed(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    two_ranks(save_objects, tmp_path)
    error, epoch, found, same = load_on_one(tmp_path, how)
    assert "state 'data': expected one value, found one for each of 2 ranks" in error
    assert same
    assert epoch == 4
    assert found == PerRank([{"place": 10}, {"place": 11}])


def wrong_loads(folder: Path, how: str) -> list[Outcome]:
    model, optimizer, scheduler = with_scheduler(0)
    save(how, folder, model, optimizer, state={"data": Loader(1)})
    given: list[Any] = [
        {"scheduler": scheduler},
        {"data": {"place": 0}},
        [("data", Loader())],
        {"data": Loader()} if rank() else {},
        {"data": Loader(-rank())},
    ]
    return [outcome(lambda state=state: load(how, folder, model, optimizer, state=state)) for state in given]


@pytest.mark.parametrize("how", HOW)
def test_what_cannot_be_loaded_in_place_is_an_error_on_all_ranks(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(wrong_loads, tmp_path, how)
    assert [one.error for one in first] == [one.error for one in second]
    missing, plain, pairs, differing, broken = (one.error or "" for one in first)
    assert "state 'scheduler': expected in the checkpoint, which holds ['data']" in missing
    assert "state 'data': expected an object with state_dict() and load_state_dict(), found a dict" in plain
    assert "expected state to be a mapping from names to values" in pairs
    assert "found a list" in pairs
    assert "expected the same state on all ranks" in differing
    assert "rank 1: state 'data': load_state_dict() of Loader failed: KeyError: 'broken'" in broken
    assert "may be partly loaded" in broken


class Broken(Loader):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state here")


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def wrong_saves(folder: Path, how: str) -> list[Outcome]:
    model = build("fsdp2")[0]
    flat = build("fsdp1")[0]
    calls: list[Callable[[], object]] = [
        lambda: save(how, folder, model, state={"x": 1}, x=2),
        lambda: save(how, folder, model, state={1: 2}),
        lambda: save(how, folder, model, state={"data": Broken() if rank() else Loader()}),
        lambda: save(how, folder, model, state={"average": flat}),
        lambda: save(how, folder, model, state={"pair": Pair(next(model.parameters()), 1)}),
    ]
    return [outcome(call) for call in calls]


@pytest.mark.parametrize("how", HOW)
def test_what_cannot_be_saved_is_an_error_on_all_ranks(how: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(wrong_saves, tmp_path, how)
    assert [one.error for one in first] == [one.error for one in second]
    twice, number, broken, flat, pair = (one.error or "" for one in first)
    assert "expected each name in the state once, found ['x'] by keyword and in state=" in twice
    assert "expected state to be a mapping from names to values" in number
    assert "found the names [1]" in number
    assert "rank 1: RuntimeError: no state here" in broken
    assert "state 'average': expected an object whose state_dict() involves no other rank" in flat
    assert "state 'pair': expected sharded tensors in lists, tuples and dicts, found a named tuple" in pair
    assert not list(tmp_path.iterdir())


def average_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    return fully_shard(model) if torch.distributed.is_initialized() else model


def save_average(folder: Path) -> list[torch.Tensor]:
    average = average_of(7)
    for how in HOW:
        save(how, folder, average_of(0), state={"average": average})
    return [whole(tensor).detach() for tensor in average.state_dict().values()]


def load_average(folder: Path, how: str) -> list[torch.Tensor]:
    average = average_of(8)
    load(how, folder, average_of(1), state={"average": average})
    return [whole(tensor).detach() for tensor in average.state_dict().values()]


@pytest.mark.parametrize(("how", "ranks"), [("distributed", 3), ("full", 3), ("distributed", 1)])
def test_a_second_model_is_loaded_in_place_on_any_number_of_ranks(
    how: str, ranks: int, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    expected = two_ranks(save_average, tmp_path)[0]
    for found in run_on_ranks(load_average, tmp_path, how, world_size=ranks):
        torch.testing.assert_close(found, expected)

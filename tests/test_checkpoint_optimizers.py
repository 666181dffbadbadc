"""Into which optimizer the state of another one may be loaded, and parameter groups of all sorts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.optim import Optimizer

from fsdp_utils import (
    CheckpointError,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
)
from fsdp_utils.checkpoint import save as save_module
from fsdp_utils.checkpoint.state import quiet
from tests.checkpoints import Outcome, fingerprint, outcome, rank
from tests.sharded import TwoRanks, fsdp1, whole


class Own(torch.optim.AdamW):
    """An optimizer of somebody's own."""


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Own": lambda params: Own(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
}
RELATED = ("AdamW", "AdamW, fused", "Adam", "Own")


def one_step(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = OPTIMIZERS[kind](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("how", ["distributed", "full"])
def test_only_a_related_optimizer_goes_on_and_others_change_nothing(how: str, tmp_path: Path) -> None:
    for kind in OPTIMIZERS:
        model, optimizer = one_step(kind, 0)
        if how == "full":
            save_full(tmp_path / kind, model, optimizer)
        else:
            save_distributed(tmp_path / kind, model, optimizer, step=1)
        for into in OPTIMIZERS:
            model, optimizer = one_step(into, 1)
            before = fingerprint(model, optimizer)
            load: Callable[..., Any] = load_full if how == "full" else load_distributed
            if kind == into or (kind in RELATED and into in RELATED):
                load(tmp_path / kind, model, optimizer)
                optimizer.step()
                continue
            own, saved = into.split(",")[0], kind.split(",")[0]
            with pytest.raises(CheckpointError, match=f"expected the state of {own}, found that of {saved}"):
                load(tmp_path / kind, model, optimizer)
            assert fingerprint(model, optimizer) == before
            load(tmp_path / kind, model)


def test_an_older_checkpoint_names_only_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = save_module.write_manifest
    monkeypatch.setattr(
        save_module,
        "write_manifest",
        lambda folder, content: write(
            folder, {key: value for key, value in content.items() if key != "optimizer_classes"}
        ),
    )
    for kind in ("AdamW", "Own"):
        save_distributed(tmp_path / kind, *one_step(kind, 0), step=1)
        load_distributed(tmp_path / kind, *one_step("Adam", 0))
    with pytest.raises(CheckpointError, match="expected the state of SGD, found that of AdamW"):
        load_distributed(tmp_path / "AdamW", *one_step("SGD", 0))


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's wrapper around an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_an_optimizer_in_a_wrapper_is_of_its_own_class(tmp_path: Path) -> None:
    model, optimizer = one_step("AdamW", 0)
    save_distributed(tmp_path, model, Accelerated(optimizer), step=1)
    other, plain = one_step("AdamW", 1)
    load_distributed(tmp_path, other, plain)
    load_distributed(tmp_path, other, Accelerated(plain))
    assert torch.equal(plain.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def with_empty_groups(where: int, kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 3)
    if kind == "fsdp2":
        fully_shard(model)
    elif kind == "fsdp1":
        model = fsdp1(model, use_orig_params=True)
    groups: list[dict[str, Any]] = [
        {"params": [param], "lr": 0.1 + number} for number, param in enumerate(model.parameters())
    ]
    groups.insert(where, {"params": [], "lr": 0.7})
    groups.insert(where, {"params": [], "lr": 0.8})
    return model, torch.optim.AdamW(groups)


def empty_groups(folder: Path, kind: str) -> list[list[float]]:
    rates = []
    for where in range(3):
        for before in (True, False):  # its first step
            model, optimizer = with_empty_groups(where, kind)
            if not before:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            path = folder / f"{kind}{where}{before}"
            save_distributed(path / "d", model, optimizer, step=1)
            save_full(path / "f", model, optimizer)
            files: list[tuple[Callable[..., Any], Path]] = [
                (load_distributed, path / "d"),
                (load_full, path / "f"),
            ]
            for load, file in files:
                model, optimizer = with_empty_groups(where, kind)
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                load(file, model, optimizer)
                rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2"])
def test_an_empty_parameter_group_is_loaded_wherever_it_is(kind: str, tmp_path: Path) -> None:
    expected = [[0.8, 0.7, 0.1, 1.1]] * 4 + [[0.1, 0.8, 0.7, 1.1]] * 4 + [[0.1, 1.1, 0.8, 0.7]] * 4
    assert run_on_ranks(empty_groups, tmp_path, kind, world_size=2)[0] == expected


# ---- under FSDP2 ----------------------------------------------------------------------------------------


class Local(Optimizer):
    """Keeps what it knows of a sharded parameter as a plain tensor, of this rank's part."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["moment"] = param.grad.to_local().clone()


SHARDED: dict[str, Callable[[Any], Optimizer]] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "a tensor as rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
}


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 4))
    if dist.is_initialized():
        fully_shard(model)
    return model


def some_steps(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(4.0) + step).square().mean().backward()
        optimizer.step()
    return [whole(param).detach().clone() for param in model.parameters()]


def save_all_kinds(folder: Path) -> list[list[torch.Tensor]]:
    """What two steps after the save give, by kind of optimizer."""
    goes_on = []
    for kind, make in SHARDED.items():
        model = sharded_model()
        optimizer = make(model.parameters())
        some_steps(model, optimizer)
        save_distributed(folder / kind, model, optimizer, step=1)
        save_full(folder / f"{kind}.pt", model, optimizer)
        goes_on.append(some_steps(model, optimizer))
    return goes_on


def load_all_kinds(folder: Path, how: str) -> list[list[torch.Tensor]]:
    goes_on = []
    for kind, make in SHARDED.items():
        model = sharded_model()
        optimizer = make(model.parameters())
        if how == "full":
            load_full(folder / f"{kind}.pt", model, optimizer)
        else:
            load_distributed(folder / kind, model, optimizer)
        goes_on.append(some_steps(model, optimizer))
    return goes_on


def test_every_optimizer_of_torch_goes_on_as_it_would_have(tmp_path: Path) -> None:
    expected = run_on_ranks(save_all_kinds, tmp_path)[0]
    for how in ("distributed", "full"):
        for found in (run_on_ranks(load_all_kinds, tmp_path, how)[0], load_all_kinds(tmp_path, how)):
            for kind, one, other in zip(SHARDED, found, expected, strict=True):
                torch.testing.assert_close(one, other, msg=lambda text, at=(kind, how): f"{at}: {text}")


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "state.0.weight.exp_avg": lambda optimizer, param: optimizer.state.pop(param),
    "state.0.weight.more": lambda optimizer, param: optimizer.state[param].update(more=torch.ones(2)),
    "state.0.weight.step": lambda optimizer, param: optimizer.state[param]["step"].add_(1),
    "state.0.weight.exp_avg_sq": lambda optimizer, param: optimizer.state[param].update(
        exp_avg_sq=optimizer.state[param]["exp_avg_sq"].bfloat16()
    ),
    "state.0.weight.note": lambda optimizer, param: optimizer.state[param].update(note="b"),
    "param_groups[0]['lr']": lambda optimizer, param: optimizer.param_groups[0].update(lr=0.5),
    "state.0.weight.moment": lambda optimizer, param: None,
}


def save_what_differs(folder: Path, entry: str) -> list[Outcome]:
    model = sharded_model()
    optimizer = Local(model.parameters()) if "moment" in entry else torch.optim.AdamW(model.parameters())
    some_steps(model, optimizer)
    if rank() == 1:
        CHANGES[entry](optimizer, next(model.parameters()))
    saves: list[Callable[[], object]] = [
        lambda: save_distributed(folder / "d", model, optimizer, step=1),
        lambda: save_full(folder / "f.pt", model, optimizer),
    ]
    return [outcome(save) for save in saves]


@pytest.mark.parametrize("entry", CHANGES)
def test_a_state_that_differs_between_ranks_is_refused(
    entry: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(save_what_differs, tmp_path, entry)
    for one, other in zip(first, second, strict=True):
        assert one.error == other.error
        told = re.escape(entry) + r" on ranks \[1\] than on rank 0"
        assert re.search(
            r": expected the same optimizer state on all ranks, found another \S*" + told, one.error or ""
        )
    assert [path for path in tmp_path.rglob("*") if path.name[0] != "." and path.is_file()] == []


def adafactor_under_fsdp1(folder: Path) -> str:
    """It comes back where nothing is cut; what is said where FSDP1 cuts parameters."""

    def trained(strategy: str, seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = fsdp1(nn.Linear(4, 6), use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    with quiet():
        model, optimizer = trained("NO_SHARD", 0)
        save_distributed(folder, model, optimizer, step=1)
        other, into = trained("NO_SHARD", 1)
        load_distributed(folder, other, into)
        torch.testing.assert_close(
            into.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0
        )
        cut = trained("FULL_SHARD", 1)
        return str(outcome(lambda: load_distributed(folder, *cut)).error)


def test_a_state_with_fewer_elements_than_its_parameter(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """Adafactor's rows and columns: FSDP1 has parameters in one dimension, and state for each element."""
    for said in two_ranks(adafactor_under_fsdp1, tmp_path):
        assert re.search(r"'(row|col)_var' of weight: expected 24 elements, .* found \[", said)

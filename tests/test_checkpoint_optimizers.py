"""Into which optimizer the state of another one may be loaded, and parameter groups of all sorts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
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
from tests.checkpoints import fingerprint
from tests.sharded import fsdp1


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

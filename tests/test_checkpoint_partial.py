"""Partial saves and loads: adapters without their base, what two models share, a part of a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer

from fsdp_utils import (
    CheckpointError,
    export_safetensors,
    load_distributed,
    load_full,
    load_pretrained,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint import LoadedState
from tests.checkpoints import Outcome, fingerprint, outcome, rank
from tests.sharded import TwoRanks, fsdp1, whole

HOW = ["distributed", "full"]


def load(how: str, folder: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> LoadedState:
    if how == "full":
        return load_full(folder / "f.pt", model, optimizer, **options)
    return load_distributed(folder / "d", model, optimizer, **options)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param).detach().clone() for name, param in model.named_parameters()}


# ---- adapters without their base ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with an adapter, as LoRA trains it, and a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


FROZEN = ["0.base.weight", "0.base.bias", "1.base.weight", "1.base.bias"]


def adapted(kind: str, *, base: int = 0, adapters: int = 0) -> tuple[nn.Module, Optimizer]:
    """With those seeds of the base and of the adapters."""
    torch.manual_seed(base)
    model: nn.Module = nn.Sequential(Adapted(), Adapted())
    torch.manual_seed(adapters + 100)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param)
    if kind == "fsdp2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    elif kind == "fsdp1":
        model = fsdp1(model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Adapted}))
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def steps(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for number in range(3):
        loss = (model(torch.arange(5.0).reshape(1, 5) + number) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_adapters(folder: Path) -> list[list[float]]:
    losses = []
    for kind in ("fsdp2", "fsdp1"):
        model, optimizer = adapted(kind)
        steps(model, optimizer)
        save_distributed(folder / kind / "d", model, optimizer, step=1, ignore_frozen_params=True)
        save_full(folder / kind / "f.pt", model, optimizer, ignore_frozen_params=True)
        losses.append(steps(model, optimizer))
    return losses


def load_adapters(folder: Path, kinds: tuple[str, ...]) -> dict[str, tuple[list[str], list[float]]]:
    found = {}
    for saver in ("fsdp2", "fsdp1"):
        for kind in kinds:
            for how in HOW:
                model, optimizer = adapted(kind, adapters=1)
                loaded = load(how, folder / saver, model, optimizer, ignore_frozen_params=True)
                assert loaded.unexpected_keys == []
                found[f"{saver} -> {kind}, {how}"] = loaded.missing_keys, steps(model, optimizer)
    return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("adapters")
    first, second = run_on_ranks(save_adapters, folder)[0]
    assert first == pytest.approx(second, rel=1e-4)
    return folder, first


@pytest.mark.filterwarnings("ignore::UserWarning")  # that FSDP1 over frozen parameters takes more memory
@pytest.mark.parametrize(("ranks", "kinds"), [(3, ("fsdp2", "fsdp1")), (1, ("plain",))])
def test_adapters_go_on_over_the_base_that_is_there(
    ranks: int, kinds: tuple[str, ...], adapters: tuple[Path, list[float]]
) -> None:
    folder, expected = adapters
    by_rank = (
        [load_adapters(folder, kinds)]
        if ranks == 1
        else run_on_ranks(load_adapters, folder, kinds, world_size=ranks)
    )
    for found in by_rank:
        for way, (missing, losses) in found.items():
            assert missing == FROZEN, way
            assert losses == pytest.approx(expected, rel=1e-4), way


def test_a_checkpoint_of_adapters_holds_no_frozen_parameter(adapters: tuple[Path, list[float]]) -> None:
    folder = adapters[0] / "fsdp2"
    (manifest,) = folder.glob("d/*/manifest.json")
    names = [name for name in json.loads(manifest.read_text())["tensors"] if name.startswith("model.")]
    expected = [f"{layer}.{name}" for layer in "01" for name in ("count", "down.weight", "up.weight")]
    assert sorted(names) == [f"model.{name}" for name in expected]
    assert sorted(torch.load(folder / "f.pt", weights_only=True)["model"]) == expected
    verify_checkpoint(folder / "d")
    verify_checkpoint(folder / "f.pt")


@pytest.mark.parametrize("how", HOW)
def test_adapters_alone_are_no_whole_model(how: str, adapters: tuple[Path, list[float]]) -> None:
    model, optimizer = adapted("plain", base=3, adapters=3)
    before = fingerprint(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        load(how, adapters[0] / "fsdp2", model, optimizer)
    assert "model.0.base.weight: expected by the model, found nothing in the checkpoint" in str(caught.value)
    assert "strict=False loads what both have" in str(caught.value)
    assert fingerprint(model, optimizer) == before


@pytest.mark.parametrize("how", HOW)
def test_the_base_of_a_whole_checkpoint_may_be_left_aside(how: str, tmp_path: Path) -> None:
    saved, optimizer = adapted("plain")
    save_distributed(tmp_path / "d", saved, optimizer, step=1)
    save_full(tmp_path / "f.pt", saved, optimizer)
    model, _ = adapted("plain", base=5, adapters=5)
    base = values(model)
    loaded = load(how, tmp_path, model, ignore_frozen_params=True)
    assert loaded.missing_keys == loaded.unexpected_keys == FROZEN
    for name, value in values(model).items():
        assert torch.equal(value, base[name] if name in FROZEN else values(saved)[name])


def save_differing(folder: Path) -> list[Outcome]:
    model, optimizer = adapted("fsdp2")
    if rank():
        next(model.parameters()).requires_grad_(True)
    options: dict[str, Any] = {"step": 1, "ignore_frozen_params": True}
    only_one = {**options, "ignore_frozen_params": rank() == 0}
    return [
        outcome(lambda: save_distributed(folder, model, optimizer, **options)),
        outcome(lambda: save_distributed(folder, model, optimizer, **only_one)),
    ]


def test_ranks_that_froze_other_parameters_are_told(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for frozen, option in two_ranks(save_differing, tmp_path):
        assert "expected the same frozen parameters on all ranks" in frozen.error
        assert "expected the same ignore_frozen_params on all ranks" in option.error


# ---- what two models share ---------------------------------------------------------------------------------


class Parts(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def network(seed: int, *parts: str, tied: bool = False) -> Any:
    torch.manual_seed(seed)
    sizes = {"body": (4, 5), "old": (5, 3), "new": (5, 2), "wide": (5, 7)}
    model: Any = Parts({part.split("=")[0]: nn.Linear(*sizes[part.split("=")[-1]]) for part in parts})
    model.register_buffer("scale", torch.full((2,), float(seed)))
    if tied:
        model["again"] = nn.Linear(4, 5)
        model["again"].weight = model["body"].weight
    if dist.is_initialized():
        fully_shard(model)
    return model


def save_network(folder: Path) -> dict[str, torch.Tensor]:
    model = network(0, "body", "old", tied=True)
    save_distributed(folder / "d", model, step=1)
    save_full(folder / "f.pt", model)
    return values(model)


def load_network(folder: Path, how: str) -> tuple[Any, ...]:
    model = network(1, "body", "new")
    before = values(model)
    loaded = load(how, folder, model, strict=False)
    others = [
        outcome(lambda: load(how, folder, network(1, "body", "old=wide"), strict=False)),
        outcome(lambda: load(how, folder, nn.ModuleDict({"other": nn.Linear(2, 2)}), strict=False)),
        outcome(lambda: load(how, folder, model, strict=bool(rank()))),
    ]
    return before, values(model), model.scale.tolist(), loaded, vars(loaded), [one.error for one in others]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [2, 3])
def test_strict_false_loads_what_both_have_and_says_what_it_did_not(
    how: str, ranks: int, tmp_path: Path
) -> None:
    saved = run_on_ranks(save_network, tmp_path)[0]
    for before, after, scale, loaded, left, errors in run_on_ranks(
        load_network, tmp_path, how, world_size=ranks
    ):
        assert scale == [0.0, 0.0]
        for name, value in after.items():
            assert torch.equal(value, (before if name.startswith("new") else saved)[name]), name
        assert loaded == ({"step": 1} if how == "distributed" else {})
        assert left["missing_keys"] == ["new.weight", "new.bias"]
        assert sorted(left["unexpected_keys"]) == ["again.bias", "again.weight", "old.bias", "old.weight"]
        shape, nothing, differing = errors
        assert "model.old.weight: expected shape [7, 5] (the model's), found [3, 5]" in shape
        assert "expected at least one tensor to load, found none: the model has ['other.weight'" in nothing
        assert "expected the same strict on all ranks" in differing


@pytest.mark.parametrize("how", HOW)
def test_a_tied_model_takes_the_name_that_the_checkpoint_has_or_none(how: str, tmp_path: Path) -> None:
    """The checkpoint has only a further name of the tied tensor: it is named as left aside."""
    saved = nn.ModuleDict({"again": nn.Linear(4, 5), "old": nn.Linear(5, 3)})
    save_distributed(tmp_path / "d", saved, step=1)
    save_full(tmp_path / "f.pt", saved)
    model = network(1, "body", "old", tied=True)
    loaded = load(how, tmp_path, model, strict=False)
    assert loaded.missing_keys == ["scale", "body.weight", "body.bias"]
    assert loaded.unexpected_keys == ["again.weight"]
    assert torch.equal(model["again"].bias, saved["again"].bias)  # type: ignore[arg-type]


# ---- a part of a model -------------------------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def save_body(folder: Path) -> list[torch.Tensor]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
    if dist.is_initialized():
        fully_shard(body)
    save_distributed(folder / "d", body, step=1)
    save_full(folder / "f.pt", body)
    return [whole(param).detach() for param in body.parameters()]


def load_body(folder: Path, how: str) -> tuple[list[torch.Tensor], bool]:
    """Into a part of a model; how may be "pretrained" too, a folder of safetensors."""
    torch.manual_seed(1)
    model = Headed()
    if dist.is_initialized():
        for layer in model.body:
            fully_shard(layer)
        fully_shard(model)
    head = whole(model.head.weight).detach().clone()
    if how == "pretrained":
        load_pretrained(folder / "safetensors", model.body)
    else:
        load(how, folder, model.body)
    model(torch.ones(1, 4)).sum().backward()
    return [whole(param).detach() for param in model.body.parameters()], torch.equal(
        head, whole(model.head.weight)
    )


@pytest.mark.parametrize("how", [*HOW, "pretrained"])
def test_a_part_of_a_model_takes_the_weights_of_a_model(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    expected = two_ranks(save_body, tmp_path)[0]
    export_safetensors(tmp_path / "d", tmp_path / "safetensors")
    for found, same in (
        load_body(tmp_path, how),
        *run_on_ranks(load_body, tmp_path, how, world_size=3),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert same

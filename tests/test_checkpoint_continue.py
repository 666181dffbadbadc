"""Training that goes on from a checkpoint never stopped: any wrapper, any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_utils import (
    CheckpointError,
    PerRank,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
)
from fsdp_utils.checkpoint.writer import without_process_group_warning
from tests.checkpoints import KINDS, Data, Net, build, rank, train
from tests.sharded import TwoRanks

BEFORE, AFTER = 3, 3  # training steps


def save_and_go_on(directory: Path, full: bool) -> list[list[float]]:
    """Every wrapper trains, saves, and trains on. Returns the losses after saving, by wrapper."""
    losses = []
    for kind in KINDS:
        (model, optimizer), data = build(kind), Data()
        train(model, optimizer, data, BEFORE)
        state = {"data": data.generator.get_state(), "epoch": 2, "rank": rank()}
        if full:
            save_full(directory / f"{kind}.pt", model, optimizer, **state)
        else:
            save_distributed(directory / kind, model, optimizer, step=BEFORE, **state)
        losses.append(train(model, optimizer, data, AFTER))
    return losses


def load_and_go_on(directory: Path, full: bool, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    """The losses by "who saved -> who loaded"."""
    losses = {}
    for saver in KINDS:
        for kind in kinds:
            (model, optimizer), data = build(kind, seed=1), Data()
            if full:
                state = load_full(directory / f"{saver}.pt", model, optimizer)
            else:
                state = load_distributed(directory / saver, model, optimizer)
                assert state["step"] == BEFORE
            assert state["epoch"] == 2
            data.generator.set_state(state["data"])
            losses[f"{saver} -> {kind}"] = train(model, optimizer, data, AFTER)
    return losses


@pytest.mark.parametrize("full", [False, True], ids=["distributed", "full"])
def test_every_wrapper_goes_on_from_every_wrapper(full: bool, tmp_path: Path) -> None:
    saved = run_on_ranks(save_and_go_on, tmp_path, full)[0]
    assert all(losses == saved[0] for losses in saved), "the wrappers train differently to begin with"
    expected = saved[0]

    for found in run_on_ranks(load_and_go_on, tmp_path, full, KINDS)[0].items():
        assert found == (found[0], expected)  # exactly, on as many ranks
    for ranks, kinds in ((1, ("none",)), (3, ("fsdp2", "fsdp1"))):
        for losses in run_on_ranks(load_and_go_on, tmp_path, full, kinds, world_size=ranks)[0].values():
            # other ranks sum the same gradients in another order: float32, over three steps
            assert losses == pytest.approx(expected, rel=1e-5)


def test_without_a_process_group(tmp_path: Path) -> None:
    (model, optimizer), data = build("none"), Data()
    train(model, optimizer, data, BEFORE)
    path = save_distributed(tmp_path / "sharded", model, optimizer, step=BEFORE, epoch=1).wait()
    assert path == tmp_path / "sharded" / "000001-step-3"
    save_full(tmp_path / "one.pt", model, optimizer, epoch=1)
    place = data.generator.get_state()
    expected = train(model, optimizer, data, AFTER)
    for load in (
        lambda *to: load_distributed(tmp_path / "sharded", *to),
        lambda *to: load_full(tmp_path / "one.pt", *to),
    ):
        model, optimizer = build("none", seed=1)
        assert load(model, optimizer)["epoch"] == 1
        assert model.seen == BEFORE  # the state of its own that is no tensor
        data.generator.set_state(place)
        assert train(model, optimizer, data, AFTER) == expected


def different_state(directory: Path) -> tuple[Any, Any]:
    model, optimizer = build("fsdp2")
    state = {"own": rank(), "both": {"names": ["a"], "values": (1.5, torch.ones(2))}}
    save_distributed(directory / "d", model, optimizer, step=1, **state)
    save_full(directory / "f", model, optimizer, **state)
    return load_distributed(directory / "d", model), load_full(directory / "f", model)


def load_state(directory: Path) -> tuple[Any, Any]:
    model, _ = build("fsdp2")
    return load_distributed(directory / "d", model), load_full(directory / "f", model)


def test_a_state_that_differs_comes_back_to_its_rank_or_as_a_list(tmp_path: Path) -> None:
    for number, answer in enumerate(run_on_ranks(different_state, tmp_path)):
        assert [state["own"] for state in answer] == [number, number]
        assert all(state["both"]["names"] == ["a"] for state in answer)
    for answer in run_on_ranks(load_state, tmp_path, world_size=3):
        for state in answer:
            assert state["own"] == [0, 1]
            assert isinstance(state["own"], PerRank)
            assert not isinstance(state["both"], PerRank)
            assert torch.equal(state["both"]["values"][1], torch.ones(2))


def save_before_the_first_step(directory: Path) -> list[list[float]]:
    losses = []
    for kind in KINDS:
        (model, optimizer), data = build(kind), Data()
        save_distributed(directory / kind, model, optimizer, step=0)
        save_full(directory / f"{kind}.pt", model, optimizer)
        losses.append(train(model, optimizer, data, 2))
        for load in (
            lambda *to, kind=kind: load_distributed(directory / kind, *to),
            lambda *to, kind=kind: load_full(directory / f"{kind}.pt", *to),
        ):
            load(model, optimizer)  # into an optimizer that has stepped
            losses.append(train(model, optimizer, Data(), 2))
    (model, optimizer), data = build("fsdp2"), Data()
    return [train(model, optimizer, data, 2), *losses]


def test_saving_before_the_first_step_does_not_take_one(two_ranks: TwoRanks, tmp_path: Path) -> None:
    expected, *losses = two_ranks(save_before_the_first_step, tmp_path)[0]
    assert len(losses) == 3 * len(KINDS)
    assert all(found == expected for found in losses)


def low_precision_states(directory: Path) -> list[tuple[torch.dtype, torch.dtype]]:
    """bfloat16 parameters with a float32 state, which Optimizer.load_state_dict would convert."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 1 / 3, dtype=torch.float32)
    save_distributed(directory / "d", model, optimizer, step=0)
    save_full(directory / "f", model, optimizer)
    found = []
    for load in (
        lambda *to: load_distributed(directory / "d", *to),
        lambda *to: load_full(directory / "f", *to),
    ):
        optimizer.state.clear()
        load(model, optimizer)
        for param in model.parameters():
            buffer = optimizer.state[param]["momentum_buffer"]
            assert torch.equal(buffer.full_tensor(), torch.full(param.shape, 1 / 3))
            found.append((param.dtype, buffer.dtype))
    return found


def test_a_state_keeps_its_dtype(two_ranks: TwoRanks, tmp_path: Path) -> None:
    assert set(two_ranks(low_precision_states, tmp_path)[0]) == {(torch.bfloat16, torch.float32)}


def partly_frozen(directory: Path) -> list[tuple[int, list[float]]]:
    """Half of the model is frozen, so that half of it has no optimizer state."""
    found = []
    for load_kind in ("none", "d", "f"):
        model = Net()
        model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-2), Data()
        if load_kind == "none":
            train(model, optimizer, data, BEFORE)
            save_distributed(directory / "d", model, optimizer, step=BEFORE, data=data.generator.get_state())
            save_full(directory / "f", model, optimizer, data=data.generator.get_state())
        else:
            load = load_distributed if load_kind == "d" else load_full
            data.generator.set_state(load(directory / load_kind, model, optimizer)["data"])
        found.append((len(optimizer.state), train(model, optimizer, data, AFTER)))
    return found


def test_frozen_parameters_have_no_state_and_get_none(two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, *others = two_ranks(partly_frozen, tmp_path)[0]
    assert others == [first, first]


def cast(directory: Path) -> list[str | None]:
    model, _ = build("fsdp2")
    save_distributed(directory / "d", model, step=0)
    save_full(directory / "f", model)
    expected = {name: tensor.full_tensor().bfloat16() for name, tensor in model.named_parameters()}
    errors = []
    for load, path in ((load_distributed, directory / "d"), (load_full, directory / "f")):
        low = Net().bfloat16()
        fully_shard(low)
        try:
            load(path, low)
            errors.append(None)
        except CheckpointError as error:
            errors.append(str(error))
        load(path, low, cast=True)
        for name, tensor in low.named_parameters():
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), expected[name])
    return errors


def test_another_dtype_is_loaded_only_when_told_to_cast(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for errors in two_ranks(cast, tmp_path):
        for error in errors:
            assert error is not None
            assert "model.embed.weight: expected torch.bfloat16 (the model's), found torch.float32" in error


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def load_with_plain_dcp(directory: Path) -> None:
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    path = save_distributed(directory, model, optimizer, step=1).wait()
    other, _ = build("fsdp2", seed=1)
    state = {"model": tensors_of(get_model_state_dict(other))}
    dcp.load(state, checkpoint_id=path)
    for (name, expected), found in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found.to_local(), expected.to_local()), name
    dist.barrier()


def test_plain_dcp_and_plain_torch_read_what_was_saved(two_ranks: TwoRanks, tmp_path: Path) -> None:
    two_ranks(load_with_plain_dcp, tmp_path / "d")
    model, _ = build("none")
    with without_process_group_warning():
        dcp.load({"model": tensors_of(model.state_dict())}, checkpoint_id=tmp_path / "d" / "000001-step-1")
    save_full(tmp_path / "one.pt", model)
    whole = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
    assert whole["head.weight"].data_ptr() == whole["embed.weight"].data_ptr(), (
        "tied weights are stored twice"
    )
    other, _ = build("none", seed=1)
    other.load_state_dict(whole)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

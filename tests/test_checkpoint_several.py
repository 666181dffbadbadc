"""Several optimizers in one checkpoint: each comes back, under every wrapper and on any number of ranks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    verify_checkpoint,
)
from tests.checkpoints import KINDS, WORDS, Data, Outcome, build, fingerprint, outcome, rank, world_size
from tests.sharded import TwoRanks


def momentum(params: Iterable[Any], lr: float = 1e-2) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def two(kind: str, seed: int = 0) -> tuple[Any, list[Optimizer]]:
    """A model with one optimizer for its blocks and another one, of two groups, for the rest."""
    model, optimizer = build(kind, seed=seed)
    blocks, others = (group["params"] for group in optimizer.param_groups)
    groups = [{"params": others}, {"params": [], "lr": 0.5}]
    return model, [momentum(blocks), torch.optim.AdamW(groups, lr=3e-2)]


def train(model: nn.Module, optimizers: Iterable[Optimizer], data: Data) -> list[float]:
    losses = []
    for _ in range(3):
        words = data.next()
        loss = nn.functional.cross_entropy(model(words), (words + 1) % WORDS)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size())
    return losses


def save_two(folder: Path) -> list[list[float]]:
    losses = []
    for kind in KINDS:
        (model, optimizers), data = two(kind), Data()
        train(model, optimizers, data)
        optimizers[0].param_groups[0]["lr"] = 2e-2
        state = {"data": data.generator.get_state()}
        save = save_distributed(folder / kind, model, optimizers, step=1, state=state, asynchronous=True)
        save_full(folder / f"{kind}.pt", model, dict(zip("ab", optimizers, strict=True)), state=state)
        save.wait()
        losses.append(train(model, optimizers, data))
    return losses


def load_two(folder: Path, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    losses = {}
    for saver in KINDS:
        for kind in kinds:
            for how in ("distributed", "full"):
                (model, (blocks, others)), data = two(kind, seed=1), Data()
                if how == "full":  # in another order
                    state = load_full(folder / f"{saver}.pt", model, (others, blocks))
                else:
                    state = load_distributed(folder / saver, model, {"x": blocks, "y": others})
                assert [group["lr"] for group in others.param_groups] == [3e-2, 0.5]
                data.generator.set_state(state["data"])
                losses[f"{saver} -> {kind}, {how}"] = train(model, [blocks, others], data)
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("two")
    first, *others = run_on_ranks(save_two, folder)[0]
    for one in others:
        assert one == pytest.approx(first, rel=1e-4)
    return folder, first


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ranks", "kinds"), [(2, KINDS), (3, KINDS), (1, ("none",))])
def test_two_optimizers_go_on_under_any_wrapper(
    ranks: int, kinds: tuple[str, ...], saved: tuple[Path, list[float]]
) -> None:
    folder, expected = saved
    if ranks == 1:
        found = load_two(folder, kinds)
    else:
        found = run_on_ranks(load_two, folder, kinds, world_size=ranks)[0]
    for way, losses in found.items():
        assert losses == pytest.approx(expected, rel=1e-4), way


def test_a_checkpoint_of_two_optimizers_verifies(saved: tuple[Path, list[float]]) -> None:
    verify_checkpoint(saved[0] / "fsdp2")
    verify_checkpoint(saved[0] / "fsdp2.pt")


# ---- one optimizer for each parameter ----------------------------------------------------------------------


def in_backward(seed: int) -> tuple[nn.Module, dict[nn.Parameter, Optimizer]]:
    """Each parameter is updated as soon as its gradient is there; one never gets one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 4))
    model[1].weight.requires_grad_(False)
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)
    return model, optimizers


def backwards(model: nn.Module) -> list[float]:
    losses = []
    for number in range(3):
        loss = (model(torch.arange(4.0) + number) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def save_in_backward(folder: Path) -> list[float]:
    model, optimizers = in_backward(0)
    backwards(model)
    save_distributed(folder / "d", model, optimizers, step=1)
    save_full(folder / "f.pt", model, optimizers)
    return backwards(model)


def load_in_backward(folder: Path) -> list[list[float]]:
    answers = []
    for load, path in ((load_distributed, folder / "d"), (load_full, folder / "f.pt")):
        model, optimizers = in_backward(1)
        load(path, model, optimizers)
        answers.append(backwards(model))
    return answers


def test_an_optimizer_for_each_parameter_goes_on_on_other_ranks(two_ranks: TwoRanks, tmp_path: Path) -> None:
    expected = two_ranks(save_in_backward, tmp_path)[0]
    for found in (load_in_backward(tmp_path), *run_on_ranks(load_in_backward, tmp_path, world_size=3)):
        assert found == [pytest.approx(expected, rel=1e-5)] * 2


# ---- Muon --------------------------------------------------------------------------------------------------


def with_muon(seed: int) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if dist.is_initialized():
        fully_shard(model)
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def muon_steps(model: nn.Module, optimizers: list[Optimizer]) -> list[float]:
    losses = []
    for number in range(3):
        loss = (model(torch.arange(4.0) + number) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def save_muon(folder: Path) -> list[float]:
    model, optimizers = with_muon(0)
    muon_steps(model, optimizers)
    save_distributed(folder, model, optimizers, step=1)
    return muon_steps(model, optimizers)


def load_muon(folder: Path) -> list[float]:
    model, optimizers = with_muon(1)
    load_distributed(folder, model, optimizers)
    return muon_steps(model, optimizers)


def test_muon_and_adamw_go_on_on_other_ranks(two_ranks: TwoRanks, tmp_path: Path) -> None:
    expected = two_ranks(save_muon, tmp_path)[0]
    for found in (load_muon(tmp_path), *run_on_ranks(load_muon, tmp_path, world_size=3)):
        assert found == pytest.approx(expected, rel=1e-2)  # Muon computes in bfloat16


# ---- what differs ------------------------------------------------------------------------------------------


def wrong(folder: Path, how: str) -> list[Outcome]:
    """Loads of two optimizers that were saved, into others. Each leaves all as it was."""
    model, optimizers = two("fsdp2")
    train(model, optimizers, Data())
    if how == "full":
        save_full(folder / "f", model, optimizers)
    else:
        save_distributed(folder / "d", model, optimizers, step=1)
    load: Callable[[Any], Any] = lambda given: (  # noqa: E731
        load_full(folder / "f", model, given)
        if how == "full"
        else load_distributed(folder / "d", model, given)
    )
    first, second = optimizers
    params = list(model.parameters())
    others: list[Any] = [
        first,
        [first, second, momentum(params[:1])],
        [first, torch.optim.AdamW(second.param_groups[0]["params"])],
        [momentum(params[:2]), torch.optim.AdamW(params[2:])],
        [first, torch.optim.Adagrad([{"params": second.param_groups[0]["params"]}, {"params": []}])],
        [second, first] if rank() else [first, second],
    ]
    before, found = fingerprint(model, first) + fingerprint(model, second), []
    for given in others:
        found.append(outcome(lambda given=given: load(given)))
        assert fingerprint(model, first) + fingerprint(model, second) == before
    return found


@pytest.mark.parametrize("how", ["distributed", "full"])
def test_other_optimizers_than_those_saved_are_refused_on_all_ranks(
    how: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(wrong, tmp_path, how)
    assert [one.error for one in first] == [one.error for one in second]
    fewer, shared, group, params, kind, order = (one.error or "" for one in first)
    assert "expected the state of 1 optimizers (SGD), found that of 2 in the checkpoint" in fewer
    assert "expected each parameter in one optimizer, found 'embed.weight' in two" in shared
    assert "expected an optimizer with parameter groups of [1] parameters, found [1, 0]" in group
    assert "expected an optimizer with parameter groups of [2]" in params
    assert "only here: ['embed.weight']" in params
    assert "expected the state of Adagrad, found that of AdamW" in kind
    assert "expected the same optimizer on all ranks" in order


def same_class_in_another_order() -> str | None:
    model = build("fsdp2")[0]
    params = list(model.parameters())
    optimizers = [momentum(params[:3]), momentum(params[3:])]
    return outcome(lambda: save_full("/nowhere", model, optimizers[:: -1 if rank() else 1])).error


def test_optimizers_in_another_order_on_another_rank_are_refused(two_ranks: TwoRanks) -> None:
    for error in two_ranks(same_class_in_another_order):
        assert "expected the same order of optimizers on all ranks" in error


def test_one_optimizer_goes_where_one_was_saved_as_a_list(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = momentum(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_distributed(tmp_path / "list", model, [optimizer], step=1)
    save_distributed(tmp_path / "one", model, optimizer, step=1)
    for path in (tmp_path / "list", tmp_path / "one"):
        for into in (momentum(model.parameters()), [momentum(model.parameters())]):
            load_distributed(path, model, into)
    save_distributed(tmp_path / "none", model, [], step=1)
    with pytest.raises(CheckpointError, match="found none: the checkpoint was saved without one"):
        load_distributed(tmp_path / "none", model, [optimizer])

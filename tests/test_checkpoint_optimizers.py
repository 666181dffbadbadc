"""Checkpoints of optimizers: every kind goes on bit by bit, one or several, and others are refused."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adam, AdamW, Optimizer

from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed
from tests.checkpoints import Data, assert_told, build, fingerprint, rank, refusals, train

Params = list[nn.Parameter]
Optimizers = Optimizer | list[Optimizer] | dict[Any, Optimizer]

# ---- every kind --------------------------------------------------------------------------------------------


class Doubled(Optimizer):
    """Keeps its state in another dtype than the parameters, to which load_state_dict would convert it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["moment"] = state.get("moment", 0) * 0.9 + param.grad.double()
                    state["notes"] = ("no tensor", 0.1 + 0.2)
                    param.data.sub_(state["moment"].float(), alpha=group["lr"])


def momentum(params: Params, **options: Any) -> SGD:
    return SGD(params, lr=0.01, momentum=0.9, **options)


def two(params: Params) -> list[Optimizer]:
    return [momentum(params[:3]), AdamW([{"params": params[3:]}, {"params": [], "lr": 0.5}], lr=3e-2)]


def matrices_and_others(params: Params) -> dict[str, Optimizer]:
    muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=1e-2)
    return {"matrices": muon, "others": AdamW([param for param in params if param.dim() != 2])}


def in_backward(params: Params) -> dict[nn.Parameter, Optimizer]:
    """Each parameter is updated as soon as its gradient is there; one never gets one."""
    optimizers: dict[nn.Parameter, Optimizer] = {param: AdamW([param], lr=1e-2) for param in params}
    params[1].requires_grad_(False)

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        param.grad = None

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(step)
    return optimizers


EVERY: dict[str, Callable[[Params], Optimizers]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "AdamW, amsgrad": lambda params: AdamW(params, amsgrad=True),
    "AdamW, a tensor as rate": lambda params: AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "SGD": lambda params: SGD(params, lr=0.01),
    "SGD, momentum": momentum,
    "state in float64": Doubled,
    "two": two,
    "Muon and AdamW": matrices_and_others,
    "one for each parameter": in_backward,
}


def made(kind: str, seed: int) -> tuple[nn.Module, Optimizers]:
    model, _ = build("fsdp2", seed=seed)
    return model, EVERY[kind](list(model.parameters()))


def each(optimizers: Optimizers) -> list[Optimizer]:
    if isinstance(optimizers, dict):
        return list(optimizers.values())
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


def goes_on(model: nn.Module, optimizers: Optimizers, place: torch.Tensor) -> tuple[list[float], list[str]]:
    """The losses of two more steps, and all that the optimizers hold besides the numbers in their tensors."""
    held = [{**group, "params": None} for one in each(optimizers) for group in one.param_groups]
    states = [state for one in each(optimizers) for state in one.state.values()]
    held += [{k: v.dtype if torch.is_tensor(v) else v for k, v in state.items()} for state in states]
    return train(model, each(optimizers), Data(place), 2), [str(sorted(one.items())) for one in held]


def save_every(folder: Path) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    for kind in EVERY:
        (model, optimizers), data = made(kind, 0), Data()
        train(model, each(optimizers), data, 2)
        each(optimizers)[0].param_groups[0]["lr"] *= 2
        state = {"place": data.generator.get_state()}
        save = save_distributed(folder / kind, model, optimizers, step=1, state=state, asynchronous=True)
        found[kind] = goes_on(model, optimizers, state["place"])
        save.wait()
    return found


def load_every(folder: Path, kinds: Iterable[str]) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    for kind in kinds:
        model, optimizers = made(kind, 1)
        # several are told apart by their parameters, not by their order or names
        state = load_distributed(folder / kind, model, each(optimizers)[::-1])
        found[kind] = goes_on(model, optimizers, state["place"])
    return found


def save_and_load_every(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return save_every(folder), load_every(folder, EVERY)


def test_every_optimizer_goes_on_as_it_would_have(tmp_path: Path) -> None:
    by_rank = run_on_ranks(save_and_load_every, tmp_path)
    for saved, found in by_rank:
        assert [kind for kind in EVERY if found[kind] != saved[kind]] == []
    expected = by_rank[0][0]
    some = ("AdamW, amsgrad", "state in float64", "two", "Muon and AdamW", "one for each parameter")
    for kind, (losses, held) in run_on_ranks(load_every, tmp_path, some, world_size=3)[0].items():
        assert held == expected[kind][1], kind
        rel = 1e-2 if "Muon" in kind else 1e-4  # Muon computes in bfloat16
        assert losses == pytest.approx(expected[kind][0], rel=rel), kind


def parts(params: Params, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """This rank's parts of the parameters and of their moments."""
    found = {f"{n}": param.detach() for n, param in enumerate(params)}
    found |= {f"{n} {k}": v for n, param in enumerate(params) for k, v in optimizer.state[param].items()}
    return {name: one.to_local() for name, one in found.items() if isinstance(one, DTensor)}


def load_in_place(folder: Path) -> tuple[list[str], list[str]]:
    """Load where two parameters share a moment, and another moment is its parameter's own memory."""
    model, optimizer = build("fsdp2")
    train(model, [optimizer], Data(), 2)
    save_distributed(folder, model, optimizer, step=1)
    params: Params = optimizer.param_groups[0]["params"]
    before = parts(params, optimizer)
    addresses, expected = [
        {k: fn(v) for k, v in before.items()} for fn in (torch.Tensor.data_ptr, torch.clone)
    ]
    one, other = params[0], params[6]  # of the two blocks
    optimizer.state[other]["exp_avg"] = optimizer.state[one]["exp_avg"]
    optimizer.state[other]["exp_avg_sq"] = other.detach()
    for part in before.values():
        part.zero_()
    load_distributed(folder, model, optimizer)
    found = parts(params, optimizer)
    moved = [name for name, part in found.items() if part.data_ptr() != addresses[name] and part.numel()]
    return moved, [name for name, part in found.items() if not torch.equal(part, expected[name])]


def test_a_load_reads_into_the_state_that_is_there(tmp_path: Path) -> None:
    """Memory from the system takes longer to get than to read into. What is shared gets memory of its own."""
    for moved, wrong in run_on_ranks(load_in_place, tmp_path):
        assert not wrong
        assert moved == ["6 exp_avg", "6 exp_avg_sq"]


# ---- other optimizers --------------------------------------------------------------------------------------


class Own(AdamW):
    """An optimizer of somebody's own."""


CLASSES: dict[str, Callable[[Any], Optimizer]] = {"AdamW": AdamW, "Adam": Adam, "Own": Own, "SGD": momentum}


def one_step(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = CLASSES[kind](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", CLASSES)
def test_only_a_related_optimizer_goes_on_and_others_change_nothing(kind: str, tmp_path: Path) -> None:
    saved, optimizer = one_step(kind, 0)
    save_distributed(tmp_path, saved, optimizer, step=1)
    for into in CLASSES:
        model, other = one_step(into, 1)
        before = fingerprint(model, other)
        if (kind == "SGD") == (into == "SGD"):
            load_distributed(tmp_path, model, other)
            for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
                assert all(torch.equal(one[key], two[key]) for key in one)
            continue
        with pytest.raises(CheckpointError, match=f"expected the state of {into}, found that of {kind}"):
            load_distributed(tmp_path, model, other)
        assert fingerprint(model, other) == before


def load_others(folder: Path) -> tuple[dict[str, str | None], bool]:
    """Of two optimizers that were saved."""
    model, _ = build("fsdp2")
    params = list(model.parameters())
    first, second = two(params)
    train(model, [first, second], Data(), 1)
    save_distributed(folder, model, [first, second], step=1)
    others = {
        "fewer": first,
        "parameters": [momentum(params[:2]), AdamW(params[2:])],
        "class": [first, torch.optim.Adagrad([{"params": params[3:]}, {"params": []}])],
        "order": [second, first] if rank() else [first, second],
        "number": 7,
    }
    before = fingerprint(model, first) + fingerprint(model, second)
    told = refusals({k: lambda given=v: load_distributed(folder, model, given) for k, v in others.items()})
    unsaved = [momentum(params[:3]), momentum(params[3:])][:: -1 if rank() else 1]
    # FSDP1 would cut a state into parts of one element for each of the parameter's, which Adafactor's has not
    narrow, flat = build("ddp")[0], build("fsdp1 with use_orig_params")[0]
    adafactor = torch.optim.Adafactor(narrow.parameters())
    train(narrow, adafactor, Data(), 1)
    save_distributed(folder / "narrow", narrow, adafactor, step=1)
    cut = torch.optim.Adafactor(flat.parameters())
    calls: dict[str, Callable[[], object]] = {
        "order of one class": lambda: save_distributed(folder / "x", model, unsaved, step=1),
        "cut": lambda: load_distributed(folder / "narrow", flat, cut),
    }
    told |= refusals(calls)
    return told, fingerprint(model, first) + fingerprint(model, second) == before


def test_other_optimizers_are_refused_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    by_rank = run_on_ranks(load_others, tmp_path)
    expected = {
        "fewer": "expected optimizers with groups of [3] parameters, found [3, 10, 0] in the checkpoint",
        "parameters": "expected optimizers with groups of [2, 11] parameters, found [3, 10, 0]",
        "class": "expected the state of Adagrad, found that of AdamW",
        "order": "on all ranks",
        "number": "'int' object has no attribute 'state_dict'",
        "order of one class": "on all ranks",
        "cut": "_var' of embed.weight: expected shape [11, 6], the parameter's",
    }
    assert_told([told for told, _ in by_rank], expected)
    assert all(unchanged for _, unchanged in by_rank)


# ---- states that differ between ranks ----------------------------------------------------------------------

# what rank 1 changes, and where the error says that it is
CHANGES: dict[str, tuple[Callable[[Optimizer, Any], object], str]] = {
    "exp_avg": (
        lambda optimizer, param: optimizer.state.pop(param),
        "kind of optimizer.embed.weight.exp_avg on all",
    ),
    "step": (
        lambda optimizer, param: optimizer.state[param]["step"].add_(1),
        "'optimizer.embed.weight.step' on",
    ),
    "lr": (
        lambda optimizer, param: optimizer.param_groups[0].update(lr=0.5),
        "param_groups[0]['settings']['lr'] on all",
    ),
    # this rank's part of a sharded parameter, as a plain tensor
    "local": (
        lambda optimizer, param: optimizer.state[param].update(local=param.to_local().detach().clone()),
        "kind of optimizer.embed.weight.local on all",
    ),
}


def save_what_differs(folder: Path) -> dict[str, str | None]:
    told = {}
    for entry, (change, _) in CHANGES.items():
        model, optimizer = build("fsdp2")
        train(model, optimizer, Data(), 1)
        if rank() == 1 or entry == "local":
            change(optimizer, next(model.parameters()))
        told |= refusals({entry: lambda m=model, o=optimizer: save_distributed(folder, m, o, step=1)})
    return told


def test_a_state_that_differs_between_ranks_is_refused_by_name(tmp_path: Path) -> None:
    by_rank = run_on_ranks(save_what_differs, tmp_path)
    assert_told(by_rank, {entry: (where, "rank 1") for entry, (_, where) in CHANGES.items()})
    assert not list(tmp_path.glob("*-step-*"))


class Quantized(Optimizer):
    """Momentum in 8 bits, with a scale for every two columns: neither has the shape of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, momentum = self.state[param], param.grad
            if state:
                momentum = momentum + 0.9 * (state["codes"] * state["scales"]).flatten(1)
            pairs = momentum.unflatten(1, (-1, 2))
            state["scales"] = pairs.abs().amax(-1, keepdim=True) / 127 + 1e-12
            state["codes"] = (pairs / state["scales"]).round().to(torch.int8)
            param.sub_(momentum, alpha=0.01)


def quantized(folder: Path, action: str) -> dict[str, tuple[Any, ...]]:
    """Train a step and save, or load; returns the full state: dtypes, placements and values."""
    torch.manual_seed(len(action))
    model: Any = nn.Linear(6, 7, bias=False)  # 7 rows do not divide among 2 or 3 ranks
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Quantized(model.parameters())
    if action == "save":
        model(torch.eye(6)).square().sum().backward()
        optimizer.step()
        save_distributed(folder, model, optimizer, step=1)
    else:
        load_distributed(folder, model, optimizer)
    state: dict[str, DTensor] = optimizer.state[model.weight]
    return {name: (one.dtype, one.placements, one.full_tensor().tolist()) for name, one in state.items()}


def test_a_sharded_state_of_another_shape_than_its_parameter_comes_back_sharded(tmp_path: Path) -> None:
    saved, _ = run_on_ranks(quantized, tmp_path, "save")
    assert saved["codes"][:2] == (torch.int8, (Shard(0),))
    assert run_on_ranks(quantized, tmp_path, "load", world_size=3) == [saved] * 3

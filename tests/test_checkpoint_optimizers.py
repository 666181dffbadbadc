"""Checkpoints of optimizers: every kind goes on bit by bit, one or several, and others are refused."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fsdp_utils import CheckpointError, load_distributed, save_distributed
from tests.checkpoints import Data, assert_told, build, fingerprint, played, rank, refusals, train

Happened = dict[str, list[Any]]  # what each scene returned by rank
pytestmark = pytest.mark.timeout(300)

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


class Quantized(Optimizer):
    """Momentum in 8 bits, with a scale for each row, which has not the shape of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, momentum = self.state[param], param.grad
            if state:
                momentum = momentum + 0.9 * state["codes"] * state["scales"]
            state["scales"] = momentum.abs().amax(-1, keepdim=True) / 127 + 1e-12
            state["codes"] = (momentum / state["scales"]).round().to(torch.int8)
            param.sub_(momentum, alpha=0.01)


def momentum(params: Params) -> SGD:
    return SGD(params, lr=0.01, momentum=0.9)


def two(params: Params) -> list[Optimizer]:
    return [momentum(params[:3]), AdamW([{"params": params[3:]}, {"params": [], "lr": 0.5}], lr=3e-2)]


def matrices_and_others(of_matrices: Any, params: Params) -> dict[str, Optimizer]:
    matrices, others = (
        [one for one in params if (one.dim() == 2) == is_matrix] for is_matrix in (True, False)
    )
    return {"matrices": of_matrices(matrices), "others": AdamW(others)}


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
    "AdamW, amsgrad": lambda params: AdamW(params, amsgrad=True),
    "AdamW, a tensor as rate": lambda params: AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "ASGD": lambda params: torch.optim.ASGD(params, t0=1),
    "SGD": lambda params: SGD(params, lr=0.01),
    "state in float64": Doubled,
    "two": two,
    "Muon and AdamW": partial(matrices_and_others, torch.optim.Muon),
    "8 bits and AdamW": partial(matrices_and_others, Quantized),
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
    held += [
        {k: (v.dtype, getattr(v, "placements", "")) if torch.is_tensor(v) else v for k, v in state.items()}
        for state in states
    ]
    return train(model, each(optimizers), Data(place), 2), [str(sorted(one.items())) for one in held]


def save_and_load_every(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = {}
    for kind in EVERY:
        (model, optimizers), data = made(kind, 0), Data()
        train(model, each(optimizers), data, 2)
        each(optimizers)[0].param_groups[0]["lr"] *= 2
        state = {"place": data.generator.get_state()}
        save = save_distributed(folder / kind, model, optimizers, step=1, state=state, asynchronous=True)
        saved[kind] = goes_on(model, optimizers, state["place"])
        save.wait()
    return saved, load_every(folder, EVERY)


def load_every(folder: Path, kinds: Iterable[str]) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    for kind in kinds:
        model, optimizers = made(kind, 1)
        # several are told apart by their parameters, not by their order or names
        state = load_distributed(folder / kind, model, each(optimizers)[::-1])
        found[kind] = goes_on(model, optimizers, state["place"])
    return found


def load_on_others(folder: Path) -> dict[str, tuple[list[float], list[str]]]:
    return load_every(folder, EVERY)


def test_every_optimizer_goes_on_as_it_would_have(happened: Happened) -> None:
    by_rank = happened["save_and_load_every"]
    for saved, found in by_rank:
        assert [kind for kind in EVERY if found[kind] != saved[kind]] == []
    assert "(torch.int8, (Shard(dim=0),))" in str(by_rank[0][0]["8 bits and AdamW"])
    for kind, (losses, held) in happened["load_on_others"][0].items():
        expected, then = by_rank[0][0][kind]
        assert held == then, kind
        rel = 1e-2 if "and" in kind else 1e-4  # Muon computes in bfloat16
        assert losses == pytest.approx(expected, rel=rel), kind


def parts(params: Params, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """This rank's parts of the parameters and of their moments."""
    found = {f"{n}": param.detach() for n, param in enumerate(params)}
    found |= {f"{n} {k}": v for n, param in enumerate(params) for k, v in optimizer.state[param].items()}
    return {name: one.to_local() for name, one in found.items() if isinstance(one, DTensor)}


def load_in_place(folder: Path) -> tuple[list[str], list[str]]:
    """Load where two parameters share a moment, and another moment is its parameter's own memory."""
    model, optimizer = build("fsdp2")
    train(model, [optimizer], Data(), 2)
    save_distributed(folder / "in place", model, optimizer, step=1)
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
    load_distributed(folder / "in place", model, optimizer)
    found = parts(params, optimizer)
    moved = [name for name, part in found.items() if part.data_ptr() != addresses[name] and part.numel()]
    return moved, [name for name, part in found.items() if not torch.equal(part, expected[name])]


def test_a_load_reads_into_the_state_that_is_there(happened: Happened) -> None:
    """Memory from the system takes longer to get than to read into. What is shared gets memory of its own."""
    for moved, wrong in happened["load_in_place"]:
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


def test_only_a_related_optimizer_goes_on_and_others_change_nothing(tmp_path: Path) -> None:
    for kind, into in product(CLASSES, CLASSES):
        saved, optimizer = one_step(kind, 0)
        save_distributed(tmp_path, saved, optimizer, step=1)
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
    folder = folder / "others"
    model, _ = build("fsdp2")
    params = list(model.parameters())
    first, second = two(params)
    train(model, [first, second], Data(), 1)
    save_distributed(folder, model, [first, second], step=1)
    others = {
        "fewer": first,
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


def test_other_optimizers_are_refused_on_all_ranks_and_change_nothing(happened: Happened) -> None:
    by_rank = happened["load_others"]
    expected = {
        "fewer": "expected optimizers with groups of [3] parameters, found [3, 10, 0] in the checkpoint",
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
    "exp_avg": (lambda one, param: one.state.pop(param), "['optimizer']['embed.weight']['exp_avg'] on all"),
    "step": (lambda one, param: one.state[param]["step"].add_(1), "'optimizer.embed.weight.step' on rank 1"),
    "lr": (lambda one, _: one.param_groups[0].update(lr=0.5), "['param_groups'][0]['settings']['lr'] on all"),
}


def save_what_differs(folder: Path) -> dict[str, str | None]:
    told, place = {}, folder / "differs"
    for entry, (change, _) in CHANGES.items():
        model, optimizer = build("fsdp2")
        train(model, optimizer, Data(), 1)
        if rank() == 1:
            change(optimizer, next(model.parameters()))
        told |= refusals({entry: lambda m=model, o=optimizer: save_distributed(place, m, o, step=1)})
    param: Any = next(model.parameters())  # of which each rank keeps its part as a plain tensor
    optimizer.state[param] = {"local": param.to_local().detach().clone()}
    told |= refusals({"local": lambda: save_distributed(place, model, optimizer, step=1)})
    return told | {"nothing is there": str(list(place.glob("*-step-*")))}


def test_a_state_that_differs_between_ranks_is_refused_by_name(happened: Happened) -> None:
    expected = {entry: where for entry, (_, where) in CHANGES.items()}
    expected |= {"local": "kind of optimizer.embed.weight.local on all", "nothing is there": "[]"}
    assert_told(happened["save_what_differs"], expected)


# ---- all that happens on ranks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    folder = tmp_path_factory.mktemp("optimizers")
    scenes = [save_and_load_every, load_in_place, load_others, save_what_differs]
    return {**played(scenes, folder), **played([load_on_others], folder, world_size=3)}

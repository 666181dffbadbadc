"""Attacks on checkpoints: bits that flip."""

import math
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from benchmarks.attack_parts.harness import REFUSED, SURVIVED, Attack, Verdict, judge
from benchmarks.attack_parts.mutate import flip_bit
from fsdp_utils import load_distributed, run_on_ranks, save_distributed
from fsdp_utils.checkpoint import CheckpointError, checkpoints

STEP = 3


def model_and_optimizer(value: float = math.nan) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every number of it is another one, from value on."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).reshape(param.shape) + value)
            value += param.numel()
            if not math.isnan(value):
                optimizer.state[param] = {
                    "step": torch.tensor(float(STEP)),
                    "exp_avg": param.detach() / 2,
                    "exp_avg_sq": param.detach() / 4,
                }
    return model, optimizer


def save_all(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model, optimizer = model_and_optimizer(1.0)
    rank = 0
    if torch.distributed.is_initialized():
        rank, state = torch.distributed.get_rank(), dict(optimizer.state)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for param, (_, old) in zip(model.parameters(), state.items(), strict=True):
            optimizer.state[param] = {"step": old["step"], "exp_avg": param.detach() / 2}
            optimizer.state[param]["exp_avg_sq"] = param.detach() / 4
    state = {"data": [1, 2, 3], "pair": (1, 2.5, None), "average": torch.ones(3)}
    save_distributed(folder / "home", model, optimizer, step=STEP, state=state, per_rank={"rank": rank})
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "plain")


def prepare(folder: Path, quick: bool) -> None:
    """By two ranks in the long form: each tensor has two chunks then."""
    if quick:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_all(folder)
    else:
        run_on_ranks(save_all, folder, timeout=120)


def wrong(loaded: tuple[nn.Module, torch.optim.Optimizer | None, Any]) -> str:
    """What is not as it was saved."""
    model, optimizer, state = loaded
    wanted_model, wanted_optimizer = model_and_optimizer(1.0)
    for param, wanted in zip(model.parameters(), wanted_model.parameters(), strict=True):
        if not torch.equal(param, wanted):
            return "a parameter is not what was saved"
        for name, value in wanted_optimizer.state[wanted].items() if optimizer is not None else ():
            found = optimizer.state[param].get(name)  # type: ignore[union-attr]
            if found is None or not torch.equal(found, value):
                return f"{name} is not what was saved"
    if state is not None and (state["data"], state["pair"]) != ([1, 2, 3], (1, 2.5, None)):
        return f"the state is not what was saved: {state}"
    return ""


def _untouched(path: Path) -> Verdict:
    """Load it; a refused load leaves the model and the optimizer as they were."""
    model, optimizer = model_and_optimizer()
    verdict = judge(
        lambda: (model, optimizer, load_distributed(path, model, optimizer)),
        (CheckpointError,),
        wrong,
    )
    touched = optimizer.state or not all(param.isnan().all() for param in model.parameters())
    if verdict.outcome == REFUSED and touched and "partly loaded" not in verdict.text:
        return Verdict("silently wrong", f"refused after the model was changed: {verdict.text}")
    return verdict


def _plain_dcp(path: Path) -> str:
    """How plain DCP ends on a bit that flipped in its own files."""
    model, _ = model_and_optimizer()
    state = {"model": dict(model.state_dict())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
        except BaseException:
            return "an error"
    return "silently wrong" if wrong((model, None, None)) else SURVIVED


def flip(folder: Path, chance: random.Random) -> Verdict:
    """One bit of one file."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in ("plain", "home"):
        shutil.copytree(folder / name, scratch / name)
    for home in (scratch / "plain", checkpoints(scratch / "home")[STEP]):
        path = chance.choice(sorted(home.iterdir()))
        path.write_bytes(flip_bit(chance, path.read_bytes()))
    return _untouched(scratch / "home")._replace(peer=_plain_dcp(scratch / "plain"))


FLIPS = Attack("bit flips in checkpoints", prepare, flip, 500, 25, "plain DCP")

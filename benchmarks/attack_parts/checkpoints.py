"""Attacks on checkpoints: bits that flip, and manifests, headers and states that somebody has changed."""

import json
import math
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from benchmarks.attack_parts.forge import MANIFEST, forge_hashes, forge_manifest, join, split
from benchmarks.attack_parts.harness import REFUSED, SURVIVED, Attack, Verdict, judge
from benchmarks.attack_parts.mutate import flip_bit, mutate_bytes, mutate_tree
from fsdp_utils import export_safetensors, load_distributed, run_on_ranks, save_distributed, verify_checkpoint
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


def wrong(loaded: tuple[nn.Module, torch.optim.Optimizer | None, Any], *, exactly: bool) -> str:
    """What is not as it was saved; of a forged file, what comes from no file at all."""
    model, optimizer, state = loaded
    wanted_model, wanted_optimizer = model_and_optimizer(1.0)
    pairs = list(zip(model.parameters(), wanted_model.parameters(), strict=True))
    for param, wanted in pairs:
        if param.isnan().any() or (exactly and not torch.equal(param, wanted)):
            return "a parameter is not what was saved"
        for name, value in wanted_optimizer.state[wanted].items() if optimizer is not None else ():
            found = optimizer.state[param].get(name)  # type: ignore[union-attr]
            if exactly and (found is None or not torch.equal(found, value)):
                return f"{name} is not what was saved"
            if isinstance(found, torch.Tensor) and found.is_floating_point() and found.isnan().any():
                return f"{name} comes from no file"
    if exactly and state is not None and (state["data"], state["pair"]) != ([1, 2, 3], (1, 2.5, None)):
        return f"the state is not what was saved: {state}"
    return ""


def _untouched(path: Path, *, exactly: bool) -> Verdict:
    """Load it; a refused load leaves the model and the optimizer as they were."""
    model, optimizer = model_and_optimizer()
    verdict = judge(
        lambda: (model, optimizer, load_distributed(path, model, optimizer)),
        (CheckpointError,),
        lambda loaded: wrong(loaded, exactly=exactly),
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
    return "silently wrong" if wrong((model, None, None), exactly=True) else SURVIVED


def flip(folder: Path, chance: random.Random) -> Verdict:
    """One bit of one file."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in ("plain", "home"):
        shutil.copytree(folder / name, scratch / name)
    for home in (scratch / "plain", checkpoints(scratch / "home")[STEP]):
        path = chance.choice(sorted(home.iterdir()))
        path.write_bytes(flip_bit(chance, path.read_bytes()))
    return _untouched(scratch / "home", exactly=True)._replace(peer=_plain_dcp(scratch / "plain"))


def changed_description(folder: Path, chance: random.Random) -> Verdict:
    """A manifest, header or state that is another one, in most cases with hashes that agree."""
    scratch, canary = folder / "scratch", str(folder / "canary")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder / "home", scratch / "home")
    checkpoint = checkpoints(scratch / "home")[STEP]
    path = chance.choice(sorted(checkpoint.iterdir()))
    forged = chance.random() < 0.8
    if not forged:
        path.write_bytes(mutate_bytes(chance, path.read_bytes()))
    elif path.name == MANIFEST:
        _change_manifest(chance, checkpoint, canary)
    else:
        path.write_bytes(_changed_file(chance, path, canary))
        forge_hashes(checkpoint)
    match chance.randrange(4):
        case 0:
            return judge(lambda: verify_checkpoint(checkpoint), (CheckpointError,), lambda _: "")
        case 1:
            return judge(
                lambda: export_safetensors(checkpoint, scratch / "out"), (CheckpointError,), _wrong_export
            )
    return _untouched(scratch / "home", exactly=not forged)


def _change_manifest(chance: random.Random, checkpoint: Path, canary: str) -> None:
    def change(content: dict[str, Any]) -> None:
        changed = json.loads(json.dumps(mutate_tree(chance, content, canary)))  # every key is text then
        content.clear()
        content.update(changed if isinstance(changed, dict) else {"x": changed})

    forge_manifest(checkpoint, change)


def _changed_file(chance: random.Random, path: Path, canary: str) -> bytes:
    """Another state, or a rank's file with another header."""
    data = path.read_bytes()
    if chance.random() < 0.3:
        return mutate_bytes(chance, data)
    if path.suffix == ".json":
        return json.dumps(mutate_tree(chance, json.loads(data), canary)).encode()
    text, tensors = split(data)
    header = json.loads(text)
    if chance.random() < 0.5:  # the places of the chunks are JSON in the header
        about = header["__metadata__"]
        places = mutate_tree(chance, json.loads(about["DCP_SHARDING_INFO"]), canary)
        about["DCP_SHARDING_INFO"] = json.dumps(places)
    else:
        header = mutate_tree(chance, header, canary)
    return join(json.dumps(header).encode(), tensors)


def _wrong_export(out: Path) -> str:
    found = [tensor for path in out.glob("*.safetensors") for tensor in load_file(path).values()]
    if not found:
        return "nothing was exported"
    memory = any(tensor.isnan().any() for tensor in found if tensor.is_floating_point())
    return "what was in memory was exported" if memory else ""


FLIPS = Attack("bit flips in checkpoints", prepare, flip, 500, 25, "plain DCP")
DESCRIPTIONS = Attack("manifests, headers and states", prepare, changed_description, 500, 40)

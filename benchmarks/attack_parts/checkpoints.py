"""Attacks on checkpoints: bits that flip, and manifests and descriptions that somebody has changed."""

import json
import math
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks.attack_parts.harness import REFUSED, SURVIVED, Attack, Verdict, judge
from benchmarks.attack_parts.mutate import flip_bit, insert_opcodes, mutate_bytes, mutate_tree
from fsdp_utils import (
    CheckpointError,
    export_safetensors,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.manifest import ALGORITHM, MANIFEST, committed, hash_file, write_manifest

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
    if torch.distributed.is_initialized():
        state = dict(optimizer.state)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for param, (_, old) in zip(model.parameters(), state.items(), strict=True):
            optimizer.state[param] = {"step": old["step"], "exp_avg": param.detach() / 2}
            optimizer.state[param]["exp_avg_sq"] = param.detach() / 4
    save_distributed(folder / "home", model, optimizer, step=STEP, data=[1, 2, 3])
    save_full(folder / "one.pt", model, optimizer, data=[1, 2, 3])
    state = dcp.state_dict.get_model_state_dict(model)  # type: ignore[attr-defined]
    dcp.save({"model": state}, checkpoint_id=folder / "plain")


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
            found = optimizer.state[param][name]  # type: ignore[union-attr]
            if found.isnan().any() or (exactly and not torch.equal(found, value)):
                return f"{name} is not what was saved"
    if exactly and state is not None and state.get("data") != [1, 2, 3]:
        return f"the state is not what was saved: {state}"
    return ""


def _load(path: Path) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer = model_and_optimizer()
    load = load_distributed if path.is_dir() else load_full
    return model, optimizer, load(path, model, optimizer)


def _untouched(path: Path, *, exactly: bool) -> Verdict:
    """Load it; a refused load leaves the model and the optimizer as they were."""
    model, optimizer = model_and_optimizer()
    load = load_distributed if path.is_dir() else load_full
    verdict = judge(
        lambda: (model, optimizer, load(path, model, optimizer)),
        (CheckpointError,),
        lambda loaded: wrong(loaded, exactly=exactly),
    )
    touched = optimizer.state or not all(param.isnan().all() for param in model.parameters())
    if verdict.outcome == REFUSED and touched and "partly loaded" not in verdict.text:
        return Verdict("silently wrong", f"refused after the model was changed: {verdict.text}")
    return verdict


def _peer(call: Callable[[], nn.Module]) -> str:
    """How plain PyTorch ends on the same file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = call()
        except BaseException:
            return "an error"
    return "silently wrong" if wrong((model, None, None), exactly=True) else SURVIVED


def _dcp(path: Path) -> nn.Module:
    model, _ = model_and_optimizer()
    state = {"model": dict(model.state_dict())}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return model


def _torch_load(path: Path) -> nn.Module:
    model, _ = model_and_optimizer()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model


def flip(folder: Path, chance: random.Random) -> Verdict:
    """One bit of one file. The peer has to notice one in its own files, or in the same file."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    if chance.random() < 0.25:
        path = scratch / "one.pt"
        path.write_bytes(flip_bit(chance, (folder / "one.pt").read_bytes()))
        return _untouched(path, exactly=True)._replace(peer=_peer(lambda: _torch_load(path)))
    shutil.copytree(folder / "plain", scratch / "plain")
    theirs = chance.choice(sorted((scratch / "plain").iterdir()))
    theirs.write_bytes(flip_bit(chance, theirs.read_bytes()))
    shutil.copytree(folder / "home", scratch / "home")
    ours = chance.choice(sorted(committed(scratch / "home")[0].path.iterdir()))
    ours.write_bytes(flip_bit(chance, ours.read_bytes()))
    return _untouched(scratch / "home", exactly=True)._replace(peer=_peer(lambda: _dcp(scratch / "plain")))


def forge(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as an attacker would."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest[ALGORITHM]
    for name in manifest["files"]:
        path = checkpoint / name
        manifest["files"][name] = {"bytes": path.stat().st_size, ALGORITHM: hash_file(path)}
    write_manifest(checkpoint, manifest)


def changed_description(folder: Path, chance: random.Random) -> Verdict:
    """A manifest or a .metadata that is another one, in most cases with hashes that agree."""
    scratch, canary = folder / "scratch", str(folder / "canary")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder / "home", scratch / "home")
    checkpoint = committed(scratch / "home")[0].path
    forged = chance.random() < 0.8
    if chance.random() < 0.5:
        _change_manifest(chance, checkpoint / MANIFEST, canary, forged=forged)
    else:
        path = checkpoint / ".metadata"
        path.write_bytes(_changed_metadata(chance, path.read_bytes(), canary))
        if forged:
            forge(checkpoint)
    match chance.randrange(4):
        case 0:
            return judge(lambda: verify_checkpoint(checkpoint), (CheckpointError,), lambda _: "")
        case 1:
            if chance.random() < 0.5:
                (checkpoint / MANIFEST).unlink(missing_ok=True)  # as of plain DCP
            return judge(
                lambda: export_safetensors(checkpoint, scratch / "out"), (CheckpointError,), _wrong_export
            )
    return _untouched(scratch / "home", exactly=not forged)


def _change_manifest(chance: random.Random, path: Path, canary: str, *, forged: bool) -> None:
    if not forged:
        path.write_bytes(mutate_bytes(chance, path.read_bytes()))
        return
    content = json.loads(path.read_text())
    del content[ALGORITHM]
    content = json.loads(json.dumps(mutate_tree(chance, content, canary)))  # every key is text then
    if isinstance(content, dict):
        write_manifest(path.parent, content)
    else:
        path.write_text(json.dumps(content))


def _changed_metadata(chance: random.Random, data: bytes, canary: str) -> bytes:
    kind = chance.randrange(3)
    if kind == 0:
        return mutate_bytes(chance, data)
    if kind == 1:
        return insert_opcodes(chance, data, canary)
    metadata = pickle.loads(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not (metadata.storage_data and metadata.state_dict_metadata):
            break
        _change_part(chance, metadata)
    for field in ("storage_data", "planner_data", "storage_meta"):
        if chance.random() < 0.05:
            setattr(metadata, field, chance.choice(_NO_NUMBERS))
    return pickle.dumps(metadata)


_NO_NUMBERS = (0, 1, -1, 7, 2**31, 2**62, 10**30, 0.5, None, "1", [], torch.Size([3]))


def _change_part(chance: random.Random, metadata: Metadata) -> None:
    """One field of one entry, or the entry itself."""
    key = chance.choice(list(metadata.state_dict_metadata))
    entry: Any = metadata.state_dict_metadata[key]
    index = chance.choice(list(metadata.storage_data))
    where = metadata.storage_data[index]
    number = chance.choice(_NO_NUMBERS)
    size = torch.Size([chance.choice((0, 1, 2, 8, 2**40)) for _ in range(chance.randrange(4))])
    match chance.randrange(9):
        case 0:
            setattr(where, chance.choice(("offset", "length")), number)
        case 1:
            where.relative_path = chance.choice(("../x", "/etc/passwd", "", "a", 3))
        case 2:
            entry.size = chance.choice((size, number, [4]))
        case 3:
            entry.chunks.clear()
        case 4:
            entry.chunks.extend(list(entry.chunks))
        case 5 if entry.chunks:
            setattr(chance.choice(entry.chunks), chance.choice(("offsets", "sizes")), size)
        case 6:
            entry.properties.dtype = chance.choice((torch.int8, torch.complex128, 3))
        case 7:
            del metadata.storage_data[index]
        case _:
            del metadata.state_dict_metadata[key]


def _wrong_export(out: Path) -> str:
    from safetensors.torch import load_file

    found = [tensor for path in out.glob("*.safetensors") for tensor in load_file(path).values()]
    if not found:
        return "nothing was exported"
    return (
        "what was in memory was exported"
        if any(t.isnan().any() for t in found if t.is_floating_point())
        else ""
    )


FLIPS = Attack("bit flips in checkpoints", prepare, flip, 500, 25, "plain DCP, torch.load")
DESCRIPTIONS = Attack("manifests and .metadata", prepare, changed_description, 500, 40)

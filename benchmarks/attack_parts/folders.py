"""Attacks on folders of safetensors files. What the format's own library refuses must be refused."""

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import torch

from benchmarks.attack_parts.checkpoints import model_and_optimizer
from benchmarks.attack_parts.harness import Attack, Verdict, judge
from benchmarks.attack_parts.mutate import mutate_bytes, mutate_tree
from fsdp_utils import CheckpointError, load_pretrained

INDEX = "model.safetensors.index.json"


def prepare(folder: Path, quick: bool) -> None:
    from safetensors.torch import save_file

    model, _ = model_and_optimizer(1.0)
    state = model.state_dict()
    (folder / "model").mkdir()
    halves = {"a.safetensors": list(state)[:3], "b.safetensors": list(state)[3:]}
    for file, names in halves.items():
        save_file({name: state[name] for name in names}, folder / "model" / file, {"format": "pt"})
    weight_map = {name: file for file, names in halves.items() for name in names}
    (folder / "model" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def changed_folder(folder: Path, chance: random.Random) -> Verdict:
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder / "model", scratch)
    path = chance.choice(sorted(scratch.iterdir()))
    data = path.read_bytes()
    if chance.random() < 0.3:
        path.write_bytes(mutate_bytes(chance, data))
    elif path.name == INDEX:
        path.write_text(json.dumps(mutate_tree(chance, json.loads(data), str(folder / "canary"))))
    else:
        path.write_bytes(_changed_header(chance, data, str(folder / "canary")))
    model, _ = model_and_optimizer()

    def right(_: Any) -> str:
        try:
            wanted = _read_by_the_library(scratch)
        except Exception as error:
            return f"safetensors refuses it: {error}"
        found = model.state_dict()
        same = found.keys() == wanted.keys() and all(_same(found[name], wanted[name]) for name in found)
        return "" if same else "safetensors reads something else"

    return judge(lambda: load_pretrained(scratch, model), (CheckpointError,), right)


def _changed_header(chance: random.Random, data: bytes, canary: str) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, other = chance.choice(names), chance.choice(names)
    text = ""
    match chance.randrange(7):
        case 0:
            header = mutate_tree(chance, header, canary)
        case 1:
            header[one]["data_offsets"] = header[other]["data_offsets"]  # two tensors over the same bytes
        case 2:
            shift = chance.choice((-8, -4, 4, 8))
            header[one]["data_offsets"] = [place + shift for place in header[one]["data_offsets"]]
        case 3:
            header[one]["shape"] = [2**32, 2**32]
            header[one]["data_offsets"] = [0, 0]  # the product of the shape, in 64 bits
        case 4:
            text = json.dumps(header)[:-1] + f", {json.dumps(one)}: {json.dumps(header[other])}}}"
        case 5:
            rest += bytes(chance.choice((1, 8, 4096)))
        case 6:
            del header[one]  # its bytes are a hole
    text = text or json.dumps(header)
    said = chance.choice((0, 0, 0, 0, 1, -1, 2**62)) + len(text.encode())
    return struct.pack("<Q", said) + text.encode() + rest


def _read_by_the_library(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers does: all tensors of the files that the index names."""
    from safetensors import safe_open

    found = {}
    for file in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())):
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{file!r} is not in the folder")
        with safe_open(folder / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


FOLDERS = Attack("safetensors folders", prepare, changed_folder, 500, 40)

"""List, inspect, verify and export checkpoints.

    python -m fsdp_utils.checkpoint list runs/a
    python -m fsdp_utils.checkpoint inspect runs/a --step 200

Without --step, `inspect` and `export` take the checkpoint that was saved last, `verify` all of them.
`COMMAND --help` explains the options. Exits with 1 and one line for a checkpoint that is missing or damaged.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_utils._commands import new_parser, run
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import readable
from fsdp_utils.checkpoint.full import read_full
from fsdp_utils.checkpoint.manifest import MANIFEST, Progress, find, read_manifest, tensor_specs
from fsdp_utils.checkpoint.metadata import read_any_metadata, specs
from fsdp_utils.checkpoint.remote import located
from fsdp_utils.checkpoint.state import MODEL, OptimizerPlan
from fsdp_utils.checkpoint.verify import bytes_of, checkpoints_in, newest, verify_checkpoint
from fsdp_utils.pretrained.export import export_safetensors, open_model


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 for a CheckpointError."""
    parser = new_parser("fsdp_utils.checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("list", "the checkpoints of a directory: step, when saved, ranks, size"),
        ("inspect", "what is in it: tensors, dtypes, sizes, ranks, step"),
        ("verify", "is every byte what was saved?"),
        ("export", "the model as safetensors, for from_pretrained"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "checkpoint", help="a file, a checkpoint, or a directory of checkpoints; a path or a URL"
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        if name != "list":
            command.add_argument("--step", type=int, help="which checkpoint of the directory")
    command.add_argument("out_dir", type=Path, help="the folder to write; made if it is not there")
    command.add_argument("--shard-gib", type=_gib, default=4.0, help="largest file, in GiB (default: 4)")
    command.add_argument("--adapter-only", action="store_true", help="LoRA alone, for peft (default: merged)")
    options = parser.parse_args(arguments)
    run_command = {"list": _list, "inspect": _inspect, "verify": _verify, "export": _export}[options.command]
    try:
        options.checkpoint = located(options.checkpoint)
        with readable(options.checkpoint):
            if getattr(options, "step", None) is not None:
                options.checkpoint = find(options.checkpoint, options.step)
            run_command(options)
    except CheckpointError as error:
        print(f"CheckpointError: {error}", file=sys.stderr)
        return 1
    return 0


def _gib(text: str) -> float:
    try:
        if 0 < (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass  # the same sentence
    raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")


def _list(options: argparse.Namespace) -> None:
    found, problems = [], []
    for path in checkpoints_in(options.checkpoint):
        about: dict[str, Any] = {"checkpoint": str(path), "bytes": bytes_of(path)}
        try:
            manifest = read_manifest(path) if (path / MANIFEST).exists() else {}
            about |= {
                key: manifest.get(key) for key in ("step", "saved_at", "world_size", "model", "optimizer")
            }
        except CheckpointError as error:
            about["problem"] = str(error)
            problems.append(error)
        found.append(about)
    if options.json:
        print(json.dumps({"checkpoints": found}))
    else:
        for about in found:
            step = "?" if about.get("step") is None else about["step"]
            ranks = about.get("world_size") or "?"
            saved = about.get("saved_at") or ("damaged" if "problem" in about else "plain DCP")
            size = _size(about["bytes"])
            print(f"step {step:>8}  {saved:<26}  {ranks:>4} ranks  {size:>11}  {about['checkpoint']}")
    if problems:
        raise problems[0]


def _inspect(options: argparse.Namespace) -> None:
    about, found = _look(newest(options.checkpoint))
    if options.json:
        tensors = {
            key: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
            for key, (dtype, shape) in found.items()
        }
        print(json.dumps({**about, "checkpoint": str(about["checkpoint"]), "tensors": tensors}))
        return
    rows = [
        (
            key,
            str(dtype).removeprefix("torch."),
            " x ".join(map(str, shape)) or "-",
            shape.numel() * dtype.itemsize,
        )
        for key, (dtype, shape) in found.items()
    ]
    widths = [max([len(str(row[column])) for row in rows], default=0) for column in range(3)]
    for name, dtype, shape, size in rows:
        print(f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:>{widths[2]}}  {_size(size):>11}")
    print()
    for key, value in about.items():
        print(f"{key + ':':<15}{value}")
    print(f"{'tensors:':<15}{len(rows)} of {_size(sum(row[3] for row in rows))}")


def _look(path: Path) -> tuple[dict[str, Any], dict[str, tuple[torch.dtype, torch.Size]]]:
    """Describe a checkpoint: what `inspect` prints below its tensors, and the tensors."""
    if path.is_dir() and not (path / MANIFEST).exists():
        found = specs(read_any_metadata(path))
        return {"checkpoint": path, "manifest": "none (plain DCP): nothing to verify it with"}, found
    if path.is_dir():
        manifest = read_manifest(path)
        keys = ("step", "saved_at", "world_size", "torch", "model", "optimizer")
        about = {"checkpoint": path} | {key: manifest[key] for key in keys}
        about["tied"] = (
            ", ".join(f"{alias} = {name}" for alias, name in manifest["tied"].items()) or "nothing"
        )
        about["files"] = len(manifest["files"]) + 1
        return about, {k: spec for k, spec in tensor_specs(manifest).items() if k in manifest["tensors"]}
    content = read_full(path)
    found = {
        MODEL + name: (tensor.dtype, tensor.shape)
        for name, tensor in content["model"].items()
        if isinstance(tensor, Tensor) and name not in content["tied"]
    }
    if content["optimizer"] is not None:
        _, tensors = OptimizerPlan.of(content["optimizer"])
        found |= {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    about = {"checkpoint": path, "world_size": content["world_size"], "torch": content["torch"]}
    about |= {"model": content["about"]["model"], "state": ", ".join(content["state"]) or "nothing"}
    return about, found


def _verify(options: argparse.Namespace) -> None:
    with _bar("verifying", bytes_of(options.checkpoint)) as progress:
        verify_checkpoint(options.checkpoint, progress=progress)
    count = bytes_of(options.checkpoint)
    if options.json:
        print(json.dumps({"checkpoint": str(options.checkpoint), "bytes": count, "whole": True}))
    else:
        print(f"{options.checkpoint}: every byte is what was saved ({_size(count)})")


def _export(options: argparse.Namespace) -> None:
    checkpoint = newest(options.checkpoint)
    if not checkpoint.is_dir() or (checkpoint / MANIFEST).exists():
        with _bar("verifying", bytes_of(checkpoint)) as progress:
            verify_checkpoint(checkpoint, progress=progress)
    lora = options.adapter_only
    found = open_model(checkpoint, verify=False, adapter_only=lora).specs
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in found.values())
    with _bar("exporting", size) as progress:
        export_safetensors(
            checkpoint,
            options.out_dir,
            shard_gib=options.shard_gib,
            adapter_only=lora,
            verify=False,
            progress=progress,
        )
    if options.json:
        print(json.dumps({"out_dir": str(options.out_dir), "tensors": len(found), "bytes": size}))
    else:
        print(f"{options.out_dir}: {len(found)} tensors, {_size(size)}")


@contextmanager
def _bar(what: str, total: int) -> Iterator[Progress]:
    """Show a progress bar on the terminal; nothing where stderr is a file."""
    done = shown = 0

    def show(end: str) -> None:
        part = done / total if total else 1.0
        print(
            f"\r{what} [{'#' * int(30 * part):<30}] {_size(done)} of {_size(total)}",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    def progress(count: int) -> None:
        nonlocal done, shown
        done += count
        if sys.stderr.isatty() and done - shown > total / 200:
            shown = done
            show("")

    yield progress
    if sys.stderr.isatty():
        show("\n")


def _size(count: int) -> str:
    if count < 2**20:
        return f"{count} bytes" if count < 1024 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(run(main))

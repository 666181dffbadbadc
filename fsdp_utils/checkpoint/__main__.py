"""List, inspect, verify and export checkpoints.

    python -m fsdp_utils.checkpoint list runs/a
    python -m fsdp_utils.checkpoint inspect runs/a --step 200

Without --step, `inspect` and `export` take the checkpoint that was saved last, `verify` all of them.
`COMMAND --help` explains the options. Exits with 1 and one line for a checkpoint that is missing or damaged.
"""

import argparse
import sys
from pathlib import Path

from fsdp_utils._commands import new_parser, run
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import doing
from fsdp_utils.checkpoint.folder import every, find, read_manifest, verify_checkpoint
from fsdp_utils.checkpoint.tensor_files import open_tensors
from fsdp_utils.pretrained.export import export_safetensors


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 for a CheckpointError."""
    parser = new_parser("fsdp_utils.checkpoint", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run_command, text in (
        ("list", _list, "the checkpoints of a directory: step, when saved, ranks, size"),
        ("inspect", _inspect, "what is in it: tensors, dtypes, sizes, ranks, step"),
        ("verify", _verify, "is every byte what was saved?"),
        ("export", _export, "the model as safetensors, for from_pretrained"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run_command)
        command.add_argument("checkpoint", type=Path, help="a checkpoint, or a directory of checkpoints")
        if name != "list":
            command.add_argument("--step", type=int, help="which checkpoint of the directory")
    command.add_argument("out_dir", type=Path, help="the folder to write; made if it is not there")
    command.add_argument("--prefix", default="", help="export what these names begin with, without it")
    command.add_argument("--adapter-only", action="store_true", help="the LoRA adapter, for peft")
    options = parser.parse_args(arguments)
    try:
        with doing("read", options.checkpoint):
            if getattr(options, "step", None) is not None:
                options.checkpoint = find(options.checkpoint, options.step)
            options.run(options)
    except CheckpointError as error:
        print(f"CheckpointError: {error}", file=sys.stderr)
        return 1
    return 0


def _list(options: argparse.Namespace) -> None:
    problem = None
    for path in every(options.checkpoint):
        try:
            about = read_manifest(path)
        except CheckpointError as error:
            about, problem = {"step": "?", "saved_at": "damaged", "world_size": "?"}, problem or error
        print(
            f"step {about['step']:>8}  {about['saved_at']:<26}  {about['world_size']:>4} ranks  "
            f"{_size(_bytes_of(path)):>11}  {path}"
        )
    if problem is not None:
        raise problem


def _inspect(options: argparse.Namespace) -> None:
    path = find(options.checkpoint)
    manifest = read_manifest(path)
    specs = open_tensors(path, manifest).specs
    width = max(map(len, specs), default=0)
    for key, spec in sorted(specs.items()):
        dtype, shape = str(spec.dtype).removeprefix("torch."), " x ".join(map(str, spec.shape)) or "-"
        print(f"{key:<{width}}  {dtype:<13}  {shape:>20}  {_size(spec.nbytes):>11}")
    shown = ("step", "saved_at", "world_size", "model", "optimizer", "torch")
    about = {"checkpoint": path} | {key: manifest[key] for key in shown}
    about["tied"] = ", ".join(f"{alias} = {name}" for alias, name in manifest["tied"].items()) or "nothing"
    about["files"] = len(manifest["files"]) + 1
    about["tensors"] = f"{len(specs)} of {_size(sum(spec.nbytes for spec in specs.values()))}"
    print("", *(f"{key + ':':<15}{value}" for key, value in about.items()), sep="\n")


def _verify(options: argparse.Namespace) -> None:
    verify_checkpoint(options.checkpoint)
    count = sum(map(_bytes_of, every(options.checkpoint)))
    print(f"{options.checkpoint}: every byte is what was saved ({_size(count)})")


def _export(options: argparse.Namespace) -> None:
    adapter_only, prefix = options.adapter_only, options.prefix
    out = export_safetensors(options.checkpoint, options.out_dir, prefix=prefix, adapter_only=adapter_only)
    print(f"{options.out_dir}: {_size(_bytes_of(out))}")


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _size(count: int) -> str:
    if count < 2**20:
        return f"{count} bytes" if count < 1024 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(run(main))

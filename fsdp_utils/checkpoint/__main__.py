"""List, inspect, verify and export checkpoints.

    python -m fsdp_utils.checkpoint list runs/a
    python -m fsdp_utils.checkpoint inspect runs/a --step 200

Without --step, `inspect` and `export` take the checkpoint that was saved last, `verify` all of them.
`COMMAND --help` explains the options. Exits with 1 and one line for a checkpoint that is missing or damaged.
"""

import argparse
import json
import sys
from pathlib import Path

from fsdp_utils._commands import new_parser, run
from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.files import doing
from fsdp_utils.checkpoint.folder import every, find, read_manifest, verify_checkpoint
from fsdp_utils.checkpoint.tensor_files import StoredTensors, open_tensors
from fsdp_utils.pretrained.export import ADAPTER_FILE, export_safetensors
from fsdp_utils.pretrained.loading import open_folder

_ABOUT = ("step", "saved_at", "world_size", "model", "optimizer")


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
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        if name != "list":
            command.add_argument("--step", type=int, help="which checkpoint of the directory")
    command.add_argument("out_dir", type=Path, help="the folder to write; made if it is not there")
    command.add_argument("--shard-gib", type=float, default=4.0, help="largest file, in GiB (default: 4)")
    command.add_argument("--prefix", default="", help="export what these names begin with, without it")
    command.add_argument("--adapter-only", action="store_true", help="the LoRA adapter, for peft")
    options = parser.parse_args(arguments)
    try:
        with doing("read", options.checkpoint):
            if getattr(options, "step", None) is not None:
                options.checkpoint = find(options.checkpoint, options.step)
            about, lines, problem = options.run(options)
    except CheckpointError as error:
        about, lines, problem = {}, [], error
    if options.json and about:
        print(json.dumps(about))
    else:
        print(*lines, sep="\n", end="\n" * bool(lines))
    if problem is not None:
        print(f"CheckpointError: {problem}", file=sys.stderr)
    return int(problem is not None)


# Each command returns its result for --json, the lines to print without, and a problem or None.
_Said = tuple[dict[str, object], list[str], CheckpointError | None]


def _list(options: argparse.Namespace) -> _Said:
    found, lines, problem = [], [], None
    for path in every(options.checkpoint):
        about = {"checkpoint": str(path), "bytes": _bytes_of(path)}
        try:
            manifest = read_manifest(path)
            about |= {key: manifest[key] for key in _ABOUT}
        except CheckpointError as error:
            about["problem"] = str(error)
            problem = problem or error
        found.append(about)
        step, ranks, saved = (about.get(key, "?") for key in ("step", "world_size", "saved_at"))
        saved = "damaged" if "problem" in about else saved
        lines.append(f"step {step:>8}  {saved:<26}  {ranks:>4} ranks  {_size(about['bytes']):>11}  {path}")
    return {"checkpoints": found}, lines, problem


def _inspect(options: argparse.Namespace) -> _Said:
    path = find(options.checkpoint)
    manifest = read_manifest(path)
    tied = ", ".join(f"{alias} = {name}" for alias, name in manifest["tied"].items())
    about = {"checkpoint": str(path)} | {key: manifest[key] for key in (*_ABOUT, "torch")}
    about |= {"tied": tied or "nothing", "files": len(manifest["files"]) + 1}
    specs, lines, tensors = open_tensors(path, manifest).specs, [], {}
    width = max(map(len, specs), default=0)
    for key, spec in sorted(specs.items()):
        dtype, shape = str(spec.dtype).removeprefix("torch."), " x ".join(map(str, spec.shape)) or "-"
        tensors[key] = {"dtype": dtype, "shape": spec.shape}
        lines.append(f"{key:<{width}}  {dtype:<13}  {shape:>20}  {_size(spec.nbytes):>11}")
    total = sum(spec.nbytes for spec in specs.values())
    summary = {**about, "tensors": f"{len(tensors)} of {_size(total)}"}
    lines += ["", *(f"{key + ':':<15}{value}" for key, value in summary.items())]
    return {**about, "tensors": tensors}, lines, None


def _verify(options: argparse.Namespace) -> _Said:
    verify_checkpoint(options.checkpoint)
    count = sum(map(_bytes_of, every(options.checkpoint)))
    line = f"{options.checkpoint}: every byte is what was saved ({_size(count)})"
    return {"checkpoint": str(options.checkpoint), "bytes": count, "whole": True}, [line], None


def _export(options: argparse.Namespace) -> _Said:
    settings = {name: getattr(options, name) for name in ("shard_gib", "prefix", "adapter_only")}
    out = export_safetensors(options.checkpoint, options.out_dir, **settings)
    written = StoredTensors([out / ADAPTER_FILE]) if options.adapter_only else open_folder(out)
    count, size = len(written.specs), sum(spec.nbytes for spec in written.specs.values())
    about = {"out_dir": str(options.out_dir), "tensors": count, "bytes": size}
    return about, [f"{options.out_dir}: {count} tensors, {_size(size)}"], None


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _size(count: int) -> str:
    if count < 2**20:
        return f"{count} bytes" if count < 1024 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(run(main))

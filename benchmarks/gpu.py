"""Record on one GPU what only a GPU can show: notebooks/recorded/PART.json, which the lessons quote.

    python benchmarks/gpu.py --all --out DIR         the smoke checks, then every part that DIR lacks
    python benchmarks/gpu.py place DIR               check what DIR holds, and put it where lessons read it
    python benchmarks/gpu.py memory allocator        some parts, anew
    python benchmarks/gpu.py --list                  what there is, and what is recorded
    python benchmarks/gpu.py --stale                 recordings that are missing or older than their code
    python benchmarks/gpu.py --all --device cpu --tiny    a dry run of all code, for a machine without a GPU

Needs the library and transformers, torch 2.11 or later, and no Jupyter. The command ends by itself after
nine minutes (--minutes). Where that is not enough, or where it was interrupted or killed, the same command
goes on: each result is on the disk as soon as it is measured. A job of many ranks is measured as one of its
ranks, alone on the GPU; the recording says so.
Exits with 0 when all is recorded, with 1 when something failed or is left to do, and with 2 where there is no
GPU, or where nothing says which commit the code is.
"""

import argparse
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_parts import NAMES
from benchmarks.gpu_parts.place import place
from benchmarks.gpu_parts.recorder import (
    RECORDED,
    Run,
    commit_of,
    failures,
    question,
    record,
    recorded,
    state,
)
from benchmarks.machine import table


def module_of(name: str) -> str:
    return f"benchmarks.gpu_parts.{name}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["place"]:
        parser = argparse.ArgumentParser(allow_abbrev=False, prog="gpu.py place", description=place.__doc__)
        parser.add_argument("folder", type=Path, metavar="DIR", help="what --out named")
        return place(parser.parse_args(arguments[1:]).folder, {name: module_of(name) for name in NAMES})

    options = _options(arguments)
    names = options.parts or NAMES
    if options.list or options.stale:
        states = {name: state(module_of(name), options.out or RECORDED) for name in names}
        listed = [name for name in names if options.list or not states[name].startswith("current")]
        for name in listed:
            print(f"{name}: {states[name]}" + f"\n    {question(module_of(name))}" * options.list)
        return 0

    import torch

    commit = options.commit or commit_of(RECORDED.parent)
    if options.device == "cuda" and (problem := _not_ready(commit, torch.cuda.is_available())):
        print(problem, file=sys.stderr)
        return 2
    folder = options.out or (Path(tempfile.mkdtemp(prefix="dry-run-")) if options.tiny else RECORDED)
    command = shlex.join(["python", "benchmarks/gpu.py", *arguments])
    ends = time.monotonic() + 60 * options.minutes
    return _record_all(names, Run(options.device, options.tiny, folder, command, commit, ends), options.all)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(NAMES))
    parser.add_argument("--all", action="store_true", help="every part that is not in --out yet")
    parser.add_argument("--list", action="store_true", help="the parts and their questions")
    parser.add_argument("--stale", action="store_true", help="what is missing or older than its code")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run with small sizes, not kept")
    parser.add_argument("--out", type=Path, metavar="DIR", help="another folder than notebooks/recorded")
    parser.add_argument("--commit", help="the commit of this code, where it is no git repository")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the command ends (9)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(NAMES):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if not (options.parts or options.all or options.list or options.stale):
        parser.error(f"name a part, or all by --all; there are {', '.join(NAMES)}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for a dry run: add --tiny")
    return options


def _not_ready(commit: str, gpu: bool) -> str | None:
    """Why nothing can be recorded here, in a sentence."""
    if not gpu:
        return "There is no CUDA GPU here: recordings need one (--device cpu --tiny is a dry run)."
    if commit == "unknown":
        return "This is no git repository: name the commit of this code by --commit (`git rev-parse HEAD`)."
    return None


def _record_all(names: list[str] | tuple[str, ...], run: Run, resume: bool) -> int:
    """Record one part after the other; a part that fails stops none that does not build on it."""
    rows: dict[str, str] = {}
    failed: dict[str, list[str]] = {}
    for name in names:
        basis = smoke_check_below(name, failed.get("smoke", []))
        try:
            recording = recorded(module_of(name), run) if resume else None
            if recording is None and basis:
                rows[name] = f"LEFT OUT, as the smoke check {basis} failed"
                continue
            if recording is None:
                recording = record(module_of(name), run)
        except Exception as error:  # of the part's code: the other parts go on
            rows[name] = f"FAILED, {type(error).__name__}: {error}"
            continue
        if recording is None:
            rows[name] = "not complete"
            continue
        failed[name] = failures(recording)
        total = len(recording["settings"])
        rows[name] = (
            f"{len(failed[name])} OF {total} FAILED" if failed[name] else f"recorded, {total} settings"
        )

    print("\n" + table(["part", "state"], [[name, text] for name, text in rows.items()]))
    print(*[f"{name}: {text}" for name in failed for text in failed[name]], sep="\n")
    return 0 if all(text.startswith("recorded") for text in rows.values()) else 1


def smoke_check_below(name: str, failed: list[str]) -> str | None:
    """The failed smoke check without which the numbers of a part mean nothing, if there is one."""
    if not failed:
        return None
    from benchmarks.gpu_parts.smoke import BASIS

    return next((BASIS[name] for text in failed if name in BASIS and f'"{BASIS[name]}"' in text), None)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the measuring process ends, too
    sys.exit(main(sys.argv[1:]))

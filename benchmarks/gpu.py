"""Record on one GPU what only a GPU can show: notebooks/recorded/PART.json, which the lessons quote.

    python benchmarks/gpu.py                         every part
    python benchmarks/gpu.py memory allocator        some of them
    python benchmarks/gpu.py --list                  what there is, and what is recorded
    python benchmarks/gpu.py --stale                 recordings that are missing or older than their code
    python benchmarks/gpu.py --device cpu --tiny     a dry run of all code, for a machine without a GPU

Needs the library and transformers, torch 2.11 or later, and no Jupyter. A part takes at most eight minutes;
where that is not enough, or where it was interrupted, the same command goes on. A job of many ranks is
measured as one of its ranks, alone on the GPU; the recording says so.
Exits with 0 when all is recorded, with 1 when something is left to do, with 2 without a GPU.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_parts import NAMES
from benchmarks.gpu_parts.recorder import RECORDED, Run, commit_of, question, record, state


def module_of(name: str) -> str:
    return f"benchmarks.gpu_parts.{name}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(NAMES))
    parser.add_argument("--list", action="store_true", help="the parts and their questions")
    parser.add_argument("--stale", action="store_true", help="what is missing or older than its code")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run with small sizes, not kept")
    parser.add_argument("--out", type=Path, help="another folder than notebooks/recorded")
    parser.add_argument("--commit", help="the commit of this code, where it is no git repository")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(NAMES):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    names = options.parts or NAMES

    if options.list or options.stale:
        states = {name: state(module_of(name), options.out or RECORDED) for name in names}
        listed = [name for name in names if options.list or not states[name].startswith("current")]
        for name in listed:
            print(f"{name}: {states[name]}" + f"\n    {question(module_of(name))}" * options.list)
        return 0

    import torch

    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for a dry run: add --tiny")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no CUDA GPU here: recordings need one (--device cpu --tiny is a dry run).",
            file=sys.stderr,
        )
        return 2
    folder = options.out or (Path(tempfile.mkdtemp(prefix="dry-run-")) if options.tiny else RECORDED)
    command = shlex.join(["python", "benchmarks/gpu.py", *arguments])
    commit = options.commit or commit_of(RECORDED.parent)
    run = Run(options.device, options.tiny, folder, command, commit)
    complete = [record(module_of(name), run) for name in names]
    return 0 if all(complete) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

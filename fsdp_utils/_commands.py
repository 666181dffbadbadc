"""The table of command lines, their parser with `--version`, and the error of a missing package."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from fsdp_utils import __version__

# name after `python -m fsdp_utils` -> the module that runs it, and what it is for
COMMANDS = {
    "bf16": ("fsdp_utils.bf16", "can this machine, and its network, train in bf16?"),
    "checkpoint": ("fsdp_utils.checkpoint", "list, inspect, verify and export checkpoints"),
    "doctor": ("fsdp_utils.doctor", "what is wrong with a training script: runs it for a few steps"),
    "explain": ("fsdp_utils.answers", "what an error message of FSDP means, and its cure"),
    "planner": ("fsdp_utils.planner", "memory and time of a training on GPUs that you do not have"),
    "train": ("fsdp_utils.train", "the training program; torchrun starts it"),
    "translate": (
        "fsdp_utils.migration",
        "a config of Accelerate, transformers, Composer or DeepSpeed in FSDP2",
    ),
}
VERSION = f"fsdp_utils {__version__}"


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviated options, in its subcommands too: `add_subparsers` makes them of this class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def new_parser(module: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with `--version`, whose description keeps its lines."""
    parser = _Parser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    return parser


def run(main: Callable[[], int]) -> int:
    """Return the exit code of a command; 2 with one sentence where a package of an extra is missing."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would flush, and complain, once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if "pip install 'fsdp_utils[" not in str(error):
            raise
        print(error, file=sys.stderr)
        return 2
    return code

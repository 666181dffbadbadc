"""The process that measures: the recorder starts one for each set of environment variables.

    python -m benchmarks.gpu_parts.worker DEVICE MODULE FILE [tiny]

Each result is appended to FILE as a line of JSON as soon as it is there.
"""

import faulthandler
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import Done, Setting

SETTING_S = 240.0  # a setting that takes longer is taken to hang: its process ends and the others go on


def missing(part: Any, file: Path, tiny: bool) -> list[Setting]:
    """The settings that are still to be measured, as far as is known yet."""
    done = read(file)
    measured = [setting for setting, _ in done]
    return [setting for setting in part.settings(tiny, done) if setting not in measured]


def environment(part: Any, setting: Setting) -> dict[str, str]:
    """The variables that must stand when the process starts that measures this setting."""
    return part.environment(setting) if hasattr(part, "environment") else {}


def read(file: Path) -> Done:
    """The settings measured so far, with their results.

    The first line says where they were measured. A last line that is cut short, by the end of the process
    that wrote it, is no result.
    """
    lines = [
        json.loads(line) for line in file.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")
    ]
    return [(line["setting"], line["result"]) for line in lines]


def drop_cut_line(file: Path) -> None:
    """Remove a last line that is cut short, so that the next result gets a line of its own."""
    text = file.read_text()
    if not text.endswith("\n"):
        file.write_text(text[: text.rfind("\n") + 1])


def write(file: Path, setting: Setting, result: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps({"setting": setting, "result": result}) + "\n")


def measure_missing(part: Any, file: Path, device: torch.device, tiny: bool) -> None:
    """Measure one setting after the other that belongs into this process's environment.

    Returns after a setting that raised, too: that is its result, and the recorder has the others measured by
    a new process. A kernel that failed leaves a CUDA context in which every later call fails as well.
    """
    recorder = os.getppid()
    while os.getppid() == recorder and (
        here := [s for s in missing(part, file, tiny) if environment(part, s).items() <= os.environ.items()]
    ):
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(SETTING_S, exit=True)
        try:
            result = part.measure(here[0], device, tiny)
            json.dumps(result, allow_nan=False)  # no number of a recording is NaN or infinite
        except Exception as error:
            traceback.print_exc()
            write(file, here[0], {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        write(file, here[0], result)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()


def main(kind: str, module: str, file: str, *tiny: str) -> None:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    measure_missing(importlib.import_module(module), Path(file), device, tiny == ("tiny",))


if __name__ == "__main__":
    main(*sys.argv[1:])

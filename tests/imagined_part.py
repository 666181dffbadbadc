"""Does the recorder keep what it measures, whatever becomes of the process?

A part that measures nothing: what each setting does is written in the setting itself.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import Done, Result, Setting, worker

USES = ("tests/__init__.py",)
GROUP = None
worker.SETTING_S = 4.0  # so that nobody waits for minutes; nothing else here takes a second
PLAN = "IMAGINED_PLAN"  # environment variable: a JSON file with the settings


def settings(tiny: bool, done: Done) -> list[Setting]:
    planned = json.loads(Path(os.environ[PLAN]).read_text())
    return planned if tiny else planned[: len(done) + 1]  # one more after each result


def environment(setting: Setting) -> dict[str, str]:
    return {"IMAGINED_SETTING": setting.get("environment", "")}


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    with Path(os.environ[PLAN]).with_name("log").open("a") as log:
        log.write(setting["name"] + "\n")
    match setting.get("does"):
        case "raise":
            raise RuntimeError("this setting cannot run\nand here is why")
        case "die":
            os._exit(7)
        case "nan":
            return {"speed": float("nan")}
        case "hang":
            time.sleep(100)
    return {"pid": os.getpid(), "environment": os.environ["IMAGINED_SETTING"]}


def summarize(done: Done) -> dict[str, Any]:
    return {"measured": [setting["name"] for setting, _ in done]}

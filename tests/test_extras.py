"""Where an optional package is missing, a sentence names who needs it and how to install it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import json, sys
from pathlib import Path

def translate():
    from fsdp_utils import translate
    Path("config.yaml").write_text("distributed_type: FSDP")
    translate("config.yaml")

def allocator():
    from fsdp_utils.allocator import AllocationTrace, simulate_allocator
    simulate_allocator(AllocationTrace()).plot()

def report():
    from fsdp_utils import MemoryReport
    MemoryReport.plot(None)

def collectives():
    from fsdp_utils.collectives import CollectiveTrace
    CollectiveTrace.plot(None)

def replay():
    from fsdp_utils.collectives import Replay
    Replay.plot(None)

def player():
    from fsdp_utils.collectives import play
    play({})

def planned():
    from types import SimpleNamespace
    from fsdp_utils.planner import Plan
    Plan.plot(SimpleNamespace(moments=[], available_gib=80.0, gpu=SimpleNamespace(name="H100")))

def planner():
    from fsdp_utils import plan
    Path("config.json").write_text("{}")
    plan(".", world_size=2, batch_size=2)

def model():
    from tests.training_runs import alone
    alone(Path("run"), "without_model", config=".")

def digits():
    from fsdp_utils.lessons import tasks
    tasks.digits_vit()

def lesson():
    from fsdp_utils.lessons import lesson

def plots():
    from fsdp_utils.lessons import plots

def recorded():
    from fsdp_utils.lessons import recorded

def tasks():
    from fsdp_utils.lessons import tasks

def trainer_callback():
    from fsdp_utils.integrations import transformers

def lightning_callback():
    from fsdp_utils.integrations.lightning import MemoryCallback
    MemoryCallback()

for name, blocked in json.loads(sys.argv[1]):
    before = sys.modules.get(blocked)
    sys.modules[blocked] = None  # an import says: No module named ...
    try:
        globals()[name]()
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    if before is None:
        del sys.modules[blocked]
    else:
        sys.modules[blocked] = before
    print(json.dumps([name, blocked, said]))
"""
ASKING = [  # what is called, which package it then misses, and the extra that has it
    ("translate", "yaml", "notebooks"),
    ("lesson", "yaml", "notebooks"),
    ("recorded", "yaml", "notebooks"),
    ("allocator", "matplotlib", "notebooks"),
    ("report", "matplotlib", "notebooks"),
    ("collectives", "matplotlib", "notebooks"),
    ("replay", "matplotlib", "notebooks"),
    ("player", "matplotlib", "notebooks"),
    ("planned", "matplotlib", "notebooks"),
    ("plots", "matplotlib", "notebooks"),
    ("tasks", "transformers", "notebooks"),
    ("planner", "transformers", "train"),
    ("model", "transformers", "train"),
    ("lesson", "IPython", "notebooks"),
    ("plots", "IPython", "notebooks"),
    ("recorded", "IPython", "notebooks"),
    ("trainer_callback", "transformers", "train"),
    ("lightning_callback", "lightning", "lightning"),
    ("digits", "sklearn", "notebooks"),
]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    asking = [(name, blocked) for name, blocked, _ in ASKING]
    said = {**say(tmp_path, asking), **say(tmp_path, [("report", "cycler")])}
    assert "needs matplotlib, which is not installed (cycler, which it imports)" in said.pop(
        ("report", "cycler")
    )
    assert said.keys() == set(asking)
    for name, blocked, extra in ASKING:
        text = said[name, blocked]
        assert f" needs {blocked}" in text.partition("ModuleNotFoundError: fsdp_utils.")[2], (name, text)
        assert f"pip install 'fsdp_utils[{extra}]'" in text, (name, text)


def say(folder: Path, asking: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What each of the calls says without a package."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(asking)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(asking), done.stderr
    return {(name, blocked): said for name, blocked, said in lines}

"""Where an optional package is missing, a sentence names who needs it and how to install it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_utils._extras import need

SCRIPT = """
import json, sys
from pathlib import Path

def translate():
    from fsdp_utils import translate
    Path("config.yaml").write_text("distributed_type: FSDP")
    translate("config.yaml")

def allocator():
    from fsdp_utils.allocator.trace import AllocationTrace
    from fsdp_utils import simulate_allocator
    simulate_allocator(AllocationTrace()).plot()

def report():
    from fsdp_utils.memory.report import MemoryReport
    MemoryReport.plot(None)

def collectives():
    from fsdp_utils.collectives.trace import CollectiveTrace
    CollectiveTrace.plot(None)

def replay():
    from fsdp_utils.collectives.replay import Replay
    Replay.plot(None)

def player():
    from fsdp_utils.collectives import play
    play({})

def planned():
    from fsdp_utils.planner.plot import plot_memory
    plot_memory([], 80.0, "H100")

def planner():
    from fsdp_utils import plan
    Path("config.json").write_text("{}")
    plan(".", world_size=2, batch_size=2)

def log():
    from fsdp_utils.train.metrics import RunLog
    RunLog(Path("."), step=0, steps=1, tensorboard=True)

def model():
    from fsdp_utils.train.model import _transformers_config
    _transformers_config("config.json", "model.config")

def data():
    from fsdp_utils.train.data import _from_folder
    _from_folder(Path("."), None)

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

def url():
    from fsdp_utils import latest_step
    latest_step("memory://runs/a")

def ranks():
    from types import SimpleNamespace
    from fsdp_utils.notebook.local_cluster import LocalCluster
    LocalCluster._connect(SimpleNamespace(settings={"directory": "."}))

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
    ("log", "tqdm", "train"),
    ("log", "tensorboard", "train"),
    ("data", "numpy", "train"),
    ("lesson", "IPython", "notebooks"),
    ("plots", "IPython", "notebooks"),
    ("recorded", "IPython", "notebooks"),
    ("trainer_callback", "transformers", "train"),
    ("lightning_callback", "lightning", "lightning"),
    ("url", "upath", "remote"),
    ("ranks", "ipyparallel", "notebooks"),
    ("digits", "sklearn", "notebooks"),
]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    asking = json.dumps([(name, blocked) for name, blocked, _ in ASKING])
    command = [sys.executable, "-c", SCRIPT, asking]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(ASKING), done.stderr
    for (name, blocked, extra), (*asked, said) in zip(ASKING, lines, strict=True):
        assert asked == [name, blocked]
        assert said.startswith("ModuleNotFoundError: fsdp_utils."), (name, said)
        assert f" needs {blocked}" in said, (name, said)
        assert f"pip install 'fsdp_utils[{extra}]'" in said, (name, said)


def test_a_package_of_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optional_package.py").write_text("import its_own_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"needs optional_package.* \(its_own_package, which it"):
        need("optional_package", "train")
    assert need("json.decoder", "train").JSONDecoder

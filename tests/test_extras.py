"""Where an optional package is missing, a sentence names who needs it and how to install it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = [  # a program, the package that it misses, and the extra that has it
    ("from fsdp_utils import MemoryReport; MemoryReport.plot(None)", "cycler", "notebooks"),
    ("from fsdp_utils.lessons import lesson", "IPython", "notebooks"),
    ("from fsdp_utils.lessons import recorded", "IPython", "notebooks"),
    ("from fsdp_utils.lessons import plots", "IPython", "notebooks"),
    ("from fsdp_utils.lessons import plots", "matplotlib", "notebooks"),
    ("from fsdp_utils.lessons import tasks", "transformers", "notebooks"),
    (
        "from fsdp_utils.allocator import *; simulate_allocator(AllocationTrace()).plot()",
        "matplotlib",
        "notebooks",
    ),
    ("from fsdp_utils import MemoryReport; MemoryReport.plot(None)", "matplotlib", "notebooks"),
    ("from fsdp_utils.collectives import *; CollectiveTrace.plot(None)", "matplotlib", "notebooks"),
    ("from fsdp_utils.collectives import *; play({})", "matplotlib", "notebooks"),
    ("from fsdp_utils.planner import *; Plan.plot(PLANNED)", "matplotlib", "notebooks"),
    ("from fsdp_utils import *; plan('.', world_size=2, batch_size=2)", "transformers", "train"),
    (
        "from tests.training_runs import alone; alone(Path('run'), 'without_model', config='.')",
        "transformers",
        "train",
    ),
    ("from fsdp_utils.integrations import transformers", "transformers", "train"),
    ("command('train', '--out', '.')", "jsonargparse", "train"),
    ("from fsdp_utils.integrations.lightning import *; MemoryCallback()", "lightning", "lightning"),
]
SCRIPT = """
import contextlib, json, runpy, sys
from pathlib import Path
from types import SimpleNamespace
from IPython.core.interactiveshell import InteractiveShell

InteractiveShell.instance()
Path("config.yaml").write_text("distributed_type: FSDP")
Path("config.json").write_text("{}")
PLANNED = SimpleNamespace(moments=[], available_gib=80.0, gpu=SimpleNamespace(name="H100"))

def command(*arguments):
    sys.argv = ["fsdp_utils", *arguments]
    with open("said", "w") as said, contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        runpy.run_module("fsdp_utils", None, "__main__", True)
    (line,) = Path("said").read_text().splitlines()
    raise ModuleNotFoundError(line)

for code, blocked in json.loads(sys.argv[1]):
    before = sys.modules.get(blocked)
    sys.modules[blocked] = None  # an import says: No module named ...
    try:
        exec(code)
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    if before is None:
        del sys.modules[blocked]
    else:
        sys.modules[blocked] = before
    print(json.dumps(["said", said]))
    if blocked == "cycler":  # half of matplotlib has been imported
        for name in [name for name in sys.modules if name.startswith("matplotlib")]:
            del sys.modules[name]
"""


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps([case[:2] for case in CASES])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    said = [json.loads(line)[1] for line in done.stdout.splitlines() if line.startswith('["said"')]
    assert len(said) == len(CASES), done.stderr
    assert "needs matplotlib, which is not installed (cycler, which it imports)" in said[0]
    for text, (code, blocked, extra) in zip(said, CASES, strict=True):
        needed = "matplotlib" if blocked == "cycler" else blocked
        assert f" needs {needed}" in text.partition("ModuleNotFoundError: fsdp_utils.")[2], (code, text)
        assert f"pip install 'fsdp_utils[{extra}]'" in text, (code, text)

"""How long until four ranks stand in a process group, and how long does an empty cell take?

    python benchmarks/ranks.py [--rounds 3]

Every way of starting is measured from a fresh Python process that has imported nothing, in turn, in one
run: `ranks.start(4)`, torchrun and accelerate's debug_launcher.
Exits with 1 if a limit that the project promises is broken.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, limits, options, table

RANKS = 4
START_RATIO, RESTART_S, CELL_MS = 0.45, 0.5, 15.0  # the limits

READY = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
STAMP = """
import time, os, pathlib
pathlib.Path(os.environ['STAMPS'], os.environ['RANK']).write_text(repr(time.time()))
"""

OURS = """
import json, os, signal, statistics, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.time()
from fsdp_utils.notebook import ranks
ranks.start(4)
ready = time.time()

def cell(source):
    began = time.perf_counter()
    shell.run_cell_magic("ranks", "", source)
    return time.perf_counter() - began

cells = [cell("pass") for _ in range(60)][10:]
cluster = ranks._cluster
began_restart = time.time()
os.kill(cluster.pids[2], signal.SIGKILL)
while not cluster.exits:
    cluster.take_messages(1)
cluster.regroup()
restart = time.time() - began_restart
ranks.stop()
print(json.dumps([began, ready, statistics.median(cells), restart]))
"""

LAUNCHER = """
import json, os, time
began = time.time()
from accelerate import debug_launcher

def join():
    import os, pathlib, time
    from accelerate import PartialState
    state = PartialState(cpu=True)
    pathlib.Path(os.environ["STAMPS"], str(state.process_index)).write_text(repr(time.time()))

debug_launcher(join, num_processes=RANKS)
print(json.dumps([began]))
"""


def python(code: str, stamps: str) -> list[float]:
    """Run code in a fresh Python; returns the list of numbers on its last line."""
    environment = {**os.environ, "STAMPS": stamps, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def last_stamp(stamps: str) -> tuple[float, int]:
    """When the last rank was ready, and how many ranks there were."""
    times = [float(path.read_text()) for path in Path(stamps).iterdir() if path.name.isdigit()]
    return max(times), len(times)


def ours(stamps: str) -> dict[str, float]:
    began, ready, cell, restart = python(OURS, stamps)
    return {"start": ready - began, "ranks": RANKS, "cell": cell, "restart": restart}


def torchrun(stamps: str) -> dict[str, float]:
    script = Path(stamps, "script.py")
    script.write_text(READY + STAMP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "STAMPS": stamps, "OMP_NUM_THREADS": "1"}
    began = time.time()
    subprocess.run([*command, str(script)], env=environment, capture_output=True, timeout=120, check=True)
    ready, count = last_stamp(stamps)
    return {"start": ready - began, "ranks": count}


def debug_launcher(stamps: str) -> dict[str, float]:
    (began,) = python(LAUNCHER.replace("RANKS", str(RANKS)), stamps)
    ready, count = last_stamp(stamps)
    return {"start": ready - began, "ranks": count}


WAYS = {
    "ranks.start(4)": ours,
    "torchrun": torchrun,
    "accelerate debug_launcher": debug_launcher,
}


def main() -> int:
    rounds = options(__doc__, rounds=3).rounds
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, measure in WAYS.items():
            with tempfile.TemporaryDirectory() as stamps:
                seen[name].append(measure(stamps))

    def median(name: str, what: str) -> float:
        return statistics.median(each[what] for each in seen[name])

    torchrun_s = median("torchrun", "start")
    rows = []
    for name, each in seen.items():
        starts = sorted(one["start"] for one in each)
        cell = f"{median(name, 'cell') * 1e3:.1f}" if "cell" in each[0] else "-"
        middle = median(name, "start")
        spread = f"{starts[0]:.2f}-{starts[-1]:.2f}"
        rows.append(
            [name, int(each[0]["ranks"]), f"{middle:.2f}", spread, f"{middle / torchrun_s:.2f}", cell]
        )
    print(describe("accelerate"))
    print(f"medians of {rounds} rounds, every way in turn\n")
    print(table(["way", "ranks", "ready s", "range s", "/ torchrun", "empty cell ms"], rows))
    pairs = zip(seen["ranks.start(4)"], seen["torchrun"], strict=True)
    ratio = statistics.median(ours["start"] / theirs["start"] for ours, theirs in pairs)
    restart, cell_ms = median("ranks.start(4)", "restart"), median("ranks.start(4)", "cell") * 1e3
    return limits(
        {
            f"ready in {ratio:.2f} of torchrun's time (limit {START_RATIO})": ratio <= START_RATIO,
            f"a killed rank is back after {restart:.2f} s (limit {RESTART_S})": restart <= RESTART_S,
            f"an empty cell takes {cell_ms:.1f} ms (limit {CELL_MS})": cell_ms <= CELL_MS,
        }
    )


if __name__ == "__main__":
    sys.exit(main())

"""How long until four ranks stand in a process group and have sharded a module; how long is an empty cell?

    python benchmarks/ranks.py [--rounds 3]

Every way of starting is measured from a fresh Python process that has imported nothing, in turn, in one
run: `ranks.start(4)`, torchrun and accelerate's debug_launcher. Ready means that a module is sharded:
`fully_shard` imports a second of modules at its first call, which a notebook's ranks have at their fork.
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

SHARD = """
from torch import nn
from torch.distributed.fsdp import fully_shard
fully_shard(nn.Linear(8, 8))
"""
TORCHRUN = """
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group('gloo')
ready = time.time()
SHARD
pathlib.Path(os.environ['STAMPS'], os.environ['RANK']).write_text(repr([ready, time.time()]))
dist.destroy_process_group()
""".replace("SHARD", SHARD)

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

cell(SHARD)
sharded = time.time()
cells = [cell("pass") for _ in range(60)][10:]
cluster = ranks._cluster
began_restart = time.time()
os.kill(cluster.pids[2], signal.SIGKILL)
while not cluster.exits:
    cluster.take_messages(1)
cluster.regroup()
restart = time.time() - began_restart
ranks.stop()
print(json.dumps([began, ready, sharded, statistics.median(cells), restart]))
""".replace("SHARD", repr(SHARD))

LAUNCHER = """
import json, os, time
began = time.time()
from accelerate import debug_launcher

def join():
    import os, pathlib, time
    from accelerate import PartialState
    state = PartialState(cpu=True)
    ready = time.time()
    exec(SHARD)
    pathlib.Path(os.environ["STAMPS"], str(state.process_index)).write_text(repr([ready, time.time()]))

debug_launcher(join, num_processes=RANKS)
print(json.dumps([began]))
""".replace("SHARD", repr(SHARD)).replace("RANKS", str(RANKS))


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


def last_stamps(stamps: str, began: float) -> dict[str, float]:
    """Seconds until the last rank was in the group and had sharded a module; how many ranks there were."""
    times = [json.loads(path.read_text()) for path in Path(stamps).iterdir() if path.name.isdigit()]
    start, sharded = (max(moments) - began for moments in zip(*times, strict=True))
    return {"start": start, "sharded": sharded, "ranks": len(times)}


def ours(stamps: str) -> dict[str, float]:
    began, ready, sharded, cell, restart = python(OURS, stamps)
    return {
        "start": ready - began,
        "sharded": sharded - began,
        "ranks": RANKS,
        "cell": cell,
        "restart": restart,
    }


def torchrun(stamps: str) -> dict[str, float]:
    script = Path(stamps, "script.py")
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "STAMPS": stamps, "OMP_NUM_THREADS": "1"}
    began = time.time()
    subprocess.run([*command, str(script)], env=environment, capture_output=True, timeout=120, check=True)
    return last_stamps(stamps, began)


def debug_launcher(stamps: str) -> dict[str, float]:
    (began,) = python(LAUNCHER, stamps)
    return last_stamps(stamps, began)


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

    def ratio(name: str, what: str) -> float:
        """Median over the rounds of the time beside torchrun's in the same round."""
        pairs = zip(seen[name], seen["torchrun"], strict=True)
        return statistics.median(one[what] / theirs[what] for one, theirs in pairs)

    rows = []
    for name, each in seen.items():
        row: list[object] = [name, int(each[0]["ranks"])]
        for what in ("start", "sharded"):
            row += [f"{median(name, what):.2f}", f"{ratio(name, what):.2f}"]
        rows.append([*row, f"{median(name, 'cell') * 1e3:.1f}" if "cell" in each[0] else "-"])
    print(describe("accelerate"))
    print(f"medians of {rounds} rounds, every way in turn\n")
    head = ["way", "ranks", "in a group s", "/ torchrun", "first sharded s", "/ torchrun", "empty cell ms"]
    print(table(head, rows))
    ready = ratio("ranks.start(4)", "sharded")
    restart, cell_ms = median("ranks.start(4)", "restart"), median("ranks.start(4)", "cell") * 1e3
    return limits(
        {
            f"ready in {ready:.2f} of torchrun's time (limit {START_RATIO})": ready <= START_RATIO,
            f"a killed rank is back after {restart:.2f} s (limit {RESTART_S})": restart <= RESTART_S,
            f"an empty cell takes {cell_ms:.1f} ms (limit {CELL_MS})": cell_ms <= CELL_MS,
        }
    )


if __name__ == "__main__":
    sys.exit(main())

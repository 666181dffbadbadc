"""Say what is wrong with a training script: python -m fsdp_utils doctor train.py ARGS.

The script is not changed. It runs on a few ranks of this machine until its next optimizer step after --steps.
On your own hosts: torchrun ... -m fsdp_utils.doctor train.py ARGS. What the script prints goes to stderr.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdp_utils._commands import new_parser, run
from fsdp_utils.doctor.findings import SEVERITIES

_GRACE_S = 5.0  # for the other ranks to end by themselves, once one has failed
_START_S = 60.0  # for the ranks to import torch, and for torchrun to end
_POLL_S = 0.2
_WELL = ("stopped", "finished")


def main() -> int:
    """Start the ranks, or be one; return 1 for a finding of --fail-on or worse, 2 where there is no page."""
    parser = new_parser("fsdp_utils doctor", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this machine (2)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to watch (3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until ranks are ended (300)")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page to a file, too")
    parser.add_argument("--gpu", metavar="NAME", help="plan the training for such GPUs, as H100 (FSDP2)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks to plan for (8)")
    ends = (*SEVERITIES, "never")
    parser.add_argument("--fail-on", choices=ends, default="warning", help="the least that exits with 1")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    options = parser.parse_args()
    if options.steps < 1 or options.ranks < 1 or not options.timeout > 0:
        parser.error("expected --steps and --ranks of at least 1, and a --timeout above 0")
    return _be_rank(options) if "RANK" in os.environ else _start(options)


def _start(options: argparse.Namespace) -> int:
    """Start torchrun, whose rank 0 prints facts and findings."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.ranks}", "-m", "fsdp_utils.doctor", "--json", "--fail-on=never"]
    command += [f"--timeout={options.timeout}", f"--steps={options.steps}"]
    command += [f"--gpu={options.gpu}", f"--world-size={options.world_size}"] * bool(options.gpu)
    command += [options.script, *options.arguments]
    env = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **os.environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as torchrun:
        text = ""
        try:
            with suppress(subprocess.TimeoutExpired):
                text = torchrun.communicate(timeout=options.timeout + _START_S)[0]
        finally:
            torchrun.terminate()  # it ends the ranks
    if not text:
        code = torchrun.wait()
        print(f"doctor: no page, as the ranks ended without one (exit code {code})", file=sys.stderr)
        return 2
    return _show(json.loads(text), options, sys.stdout)


def _be_rank(options: argparse.Namespace) -> int:
    """Run the script on this rank, and bring the facts of all ranks to rank 0, over torchrun's store."""
    import torch
    from torch.distributed import PrefixStore, rendezvous

    from fsdp_utils.distributed.agreement import wait_for
    from fsdp_utils.doctor.findings import Facts, judge
    from fsdp_utils.doctor.planned import Planned
    from fsdp_utils.doctor.watch import Watch

    if not torch.accelerator.is_available():  # else Accelerate and the Trainer would not join the ranks
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the script prints
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found, *_ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=options.timeout)))
    store = PrefixStore("fsdp_utils/doctor", found)
    planned = Planned() if options.gpu and rank == 0 else None
    watch, over, code = Watch(rank, world_size, options.steps, store, planned), threading.Event(), 0
    facts = watch.facts

    def report() -> None:
        nonlocal code
        end = time.monotonic() + options.timeout
        while not over.wait(_POLL_S) and time.monotonic() < end:
            text = watch.in_step.report if watch.in_step else ""
            if store.check(["failed"]) or text.startswith("the ranks part"):
                end = min(end, time.monotonic() + _GRACE_S)
        facts.report = watch.in_step.report if watch.in_step else ""
        if not over.is_set():
            facts.ended, facts.places["stood"] = "hang", watch.stands()
        if facts.ended not in _WELL:
            store.set("failed", "")
        store.set(f"facts/{rank}", json.dumps(asdict(facts)))
        if rank == 0:
            keys = [f"facts/{one}" for one in range(world_size)]
            wait_for(store, keys, 2 * _GRACE_S)
            ranks = [Facts(**json.loads(store.get(key))) for key in keys if store.check([key])]
            findings = judge(ranks)
            result = {"script": options.script, "ranks": [asdict(one) for one in ranks], "findings": findings}
            code = _show(result, options, out)
            store.set("done", "")
        wait_for(store, ["done"], 3 * _GRACE_S)
        if facts.ended not in _WELL:
            os._exit(code)  # the process may stand in a collective

    reporter = threading.Thread(target=report, name="doctor")
    reporter.start()
    watch.run(options.script, options.arguments)
    if planned and facts.ended in _WELL and facts.seen:
        micro_batches = len(facts.seen[-1].get("backwards", [1]))
        facts.plan = planned.text(options.gpu, options.world_size, micro_batches)
    over.set()
    reporter.join()
    return code


def _show(result: dict[str, Any], options: argparse.Namespace, out: Any) -> int:
    """Print facts and findings; return the exit code."""
    from fsdp_utils.doctor.report import page

    print(json.dumps(result, indent=2) if options.json else page(result), file=out, flush=True)
    if options.html:
        options.html.write_text(page(result, html=True), encoding="utf-8")
    worst = [SEVERITIES.index(one["severity"]) for one in result["findings"]]
    failed = any(one["ended"] not in _WELL for one in result["ranks"])
    limit = -1 if options.fail_on == "never" else SEVERITIES.index(options.fail_on)
    return int(limit >= 0 and (failed or any(one <= limit for one in worst)))


if __name__ == "__main__":
    sys.exit(run(main))

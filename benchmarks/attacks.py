"""Does anything hostile or damaged get through? Files and configs that somebody changed, saves cut short.

    python benchmarks/attacks.py                    # the long form: about half an hour on 2 cores; Linux
    python benchmarks/attacks.py --quick            # a few of each
    python benchmarks/attacks.py --only safetensors # the kinds with that in their name

Every attack is made in a child process that may take 30 seconds and 1 GiB. It is survived (what was loaded is
what was saved, or what the file truly says), refused in words (the documented error), or failed: a raw error,
a hang, too much memory, something silently wrong, code of the file's that ran. A peer is how plain PyTorch
ends on the same damage. Exits with 1 if any failed.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.attack_parts.checkpoints import FLIPS
from benchmarks.attack_parts.configs import CONFIGS
from benchmarks.attack_parts.folders import FOLDERS
from benchmarks.attack_parts.harness import FAILED, REFUSED, SURVIVED, Attack, Report, run
from benchmarks.attack_parts.kills import KILLS
from benchmarks.machine import describe, table

ATTACKS: list[Attack] = [FLIPS, KILLS, FOLDERS, *CONFIGS]
_SHOWN = 5  # failures of each kind


def attack(chosen: list[Attack], *, quick: bool, jobs: int = 2, seed: int = 0) -> list[Report]:
    """All attacks of those kinds, `jobs` kinds at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return list(
            pool.map(
                lambda pair: run(pair[1], Path(folder) / str(pair[0]), quick=quick, seed=seed),
                enumerate(chosen),
            )
        )


def shown(reports: list[Report]) -> str:
    rows = []
    for report in reports:
        failed = {name: report.outcomes[name] for name in FAILED if report.outcomes[name]}
        rows.append([report.name, *_counts(report.outcomes), _words(failed)])
        if report.peer:
            rows.append(
                [
                    f"  {report.peer}",
                    *_counts(report.peers),
                    _words({"silently wrong": report.peers["silently wrong"]}),
                ]
            )
    return table(["attack", "tried", SURVIVED, "refused", "failed", "of these"], rows)


def _counts(outcomes: Counter[str]) -> list[int]:
    """Tried, survived, refused, failed. (A peer's refusals are errors of any kind.)"""
    refused = outcomes[REFUSED] + outcomes["an error"]
    return [outcomes.total(), outcomes[SURVIVED], refused, outcomes.total() - outcomes[SURVIVED] - refused]


def _words(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in failed.items() if count) or "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--only", default="", help="the kinds with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="kinds at a time (default: 2)")
    options = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        print("attacks.py needs Linux: it reads memory from /proc and sends SIGKILL", file=sys.stderr)
        return 0
    start = time.monotonic()
    chosen = [one for one in ATTACKS if options.only in one.name]
    reports = attack(chosen, quick=options.quick, jobs=options.jobs, seed=options.seed)
    print(describe())
    print(shown(reports))
    print(f"{time.monotonic() - start:.0f} s, seed {options.seed}")
    for report in reports:
        for failure in report.failures[:_SHOWN]:
            print(f"\n{failure}")
        if len(report.failures) > _SHOWN:
            print(f"\n... and {len(report.failures) - _SHOWN} more of {report.name}")
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The short form of benchmarks/attacks.py: nothing hostile or damaged gets through."""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import attacks
from benchmarks.attack_parts.harness import (
    CODE,
    HANG,
    MEMORY,
    RAW,
    REFUSED,
    SURVIVED,
    WRONG,
    Attack,
    Verdict,
    judge,
    run,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is read from /proc, and SIGKILL sent"
)


@pytest.mark.timeout(300)  # a quarter of a minute on idle cores, most of it imports
def test_nothing_gets_through() -> None:
    reports = attacks.attack(attacks.ATTACKS, quick=True)
    assert [failure for report in reports for failure in report.failures] == []
    assert [report.outcomes.total() for report in reports] == [attack.quick for attack in attacks.ATTACKS]
    by_name = {report.name: report.outcomes for report in reports}
    assert by_name[attacks.KILLS.name] == {SURVIVED: attacks.KILLS.quick}
    assert by_name[attacks.FLIPS.name] == {REFUSED: attacks.FLIPS.quick}


# ---- are failures seen? --------------------------------------------------------------------------------


def refuse() -> None:
    raise ValueError("expected this, found that")


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: "wrong", WRONG),
    (lambda: {}["key"], RAW),
    (lambda: int("x"), RAW),  # a ValueError, but no sentence
    (refuse, REFUSED),
    (lambda: os.system("true"), CODE),
    (lambda: len(bytearray(1_200_000_000)), MEMORY),
    (lambda: bytearray(10**10), MEMORY),
    (lambda: time.sleep(60), HANG),
    (lambda: os._exit(3), RAW),
    (lambda: None, SURVIVED),
]


def one_after_the_other(folder: Path, chance: random.Random) -> Verdict:
    number = len(list(folder.iterdir()))
    (folder / str(number)).touch()
    return judge(CASES[number][0], (ValueError,), lambda result: "it is wrong" if result == "wrong" else "")


def nothing(folder: Path, quick: bool) -> None:
    """Nothing to prepare."""


def test_what_gets_through_is_counted(tmp_path: Path) -> None:
    examples = Attack("examples", nothing, one_after_the_other, len(CASES), len(CASES))
    report = run(examples, tmp_path / "x", quick=True, limit_s=10)
    found = dict(report.outcomes)
    assert found == {kind: sum(kind == one for _, one in CASES) for _, kind in CASES}, report.failures

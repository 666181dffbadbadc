"""The stored grid of lesson 14's sliders, held to the planner as it is today, and its closed form to 3%."""

import json

import pytest

from tools.plan_grid import (
    PARTS,
    PATH,
    PER_HOST,
    At,
    by_part,
    corners,
    is_planned,
    key,
    planned,
    points,
)

STORED = json.loads(PATH.read_text(encoding="utf-8"))
AGAIN = "The planner changed: run python tools/plan_grid.py"


def stored(model: str, strategy: str, checkpointing: str, at: At, micro_batches: int) -> list[float]:
    rows = STORED[key(model, strategy, checkpointing)]
    return rows[list(points()).index((at, micro_batches))]


def by_plan(model: str, strategy: str, checkpointing: str, at: At, micro_batches: int) -> list[float]:
    found = planned(model, strategy, checkpointing, at, micro_batches)
    parts = by_part(found.breakdown).values()
    return [*parts, found.step_s, 100 * found.timing.exposed_s / found.step_s]


def test_the_grid_is_whole_and_small():
    assert all(len(rows) == len(list(points())) for rows in STORED.values())
    assert len(STORED) == 27
    assert PATH.stat().st_size < 250 * 1024
    for name, rows in STORED.items():
        for (at, _), row in zip(points(), rows, strict=True):
            assert (row is None) == ("hybrid" in name and at.ranks <= PER_HOST)


@pytest.mark.parametrize(
    ("model", "strategy", "checkpointing", "corner", "micro_batches"),
    [
        ("Llama 3.2 1B", "full", "selective", 1, 1),
        ("Llama 2 7B", "grad_op", "full", 2, 1),
        ("Llama 3 70B", "hybrid", "full", 0, 1),
    ],
)
def test_what_plan_computed_is_what_it_says_today(
    model: str, strategy: str, checkpointing: str, corner: int, micro_batches: int
):
    at = corners(strategy)[corner]
    assert is_planned(strategy, at, micro_batches)
    there = stored(model, strategy, checkpointing, at, micro_batches)
    now = by_plan(model, strategy, checkpointing, at, micro_batches)
    assert there == pytest.approx(now, rel=1e-3, abs=1e-3), AGAIN


@pytest.mark.parametrize(
    ("model", "strategy", "checkpointing", "at", "micro_batches"),
    [
        ("Llama 3.2 1B", "grad_op", "full", At(1024, 1, 4096), 8),
        ("Llama 2 7B", "hybrid", "full", At(64, 4, 8192), 8),
        ("Llama 3.2 1B", "grad_op", "none", At(32, 2, 4096), 1),
        ("Llama 3 70B", "full", "full", At(256, 2, 8192), 1),
    ],
)
def test_the_closed_form_is_within_3_percent_of_plan(
    model: str, strategy: str, checkpointing: str, at: At, micro_batches: int
):
    assert not is_planned(strategy, at, micro_batches)
    there = stored(model, strategy, checkpointing, at, micro_batches)
    now = by_plan(model, strategy, checkpointing, at, micro_batches)
    total = sum(now[: len(PARTS)])
    assert sum(there[: len(PARTS)]) == pytest.approx(total, rel=0.03), AGAIN
    for mine, theirs in zip(there[: len(PARTS)], now[: len(PARTS)], strict=True):
        assert abs(mine - theirs) < 0.03 * total, AGAIN
    step_s, share = len(PARTS), len(PARTS) + 1
    assert there[step_s] == pytest.approx(now[step_s], rel=0.03), AGAIN
    assert abs(there[share] - now[share]) < 3, AGAIN

"""The stored grid of lesson 14's sliders, held to the planner as it is today, and its closed form to 3%."""

import json

import pytest

from tools.plan_grid import PATH, PER_HOST, At, by_part, is_planned, key, planned, points

STORED = json.loads(PATH.read_text(encoding="utf-8"))


def test_the_grid_is_whole_and_small():
    assert all(len(rows) == len(list(points())) for rows in STORED.values())
    assert len(STORED) == 27
    assert PATH.stat().st_size < 250 * 1024
    for name, rows in STORED.items():
        for (at, _), row in zip(points(), rows, strict=True):
            assert (row is None) == ("hybrid" in name and at.ranks <= PER_HOST)


# by model, strategy, checkpointing, place and micro-batches: whether plan computed it, or the closed form
ROWS = {
    ("Llama 3.2 1B", "full", "selective", At(64, 1, 2048), 1): True,
    ("Llama 2 7B", "grad_op", "full", At(8, 4, 2048), 1): True,
    ("Llama 3.2 1B", "grad_op", "none", At(256, 1, 4096), 1): False,
    ("Llama 2 7B", "hybrid", "full", At(64, 4, 8192), 8): False,
    ("Llama 3 70B", "full", "full", At(256, 2, 8192), 1): False,
}


@pytest.mark.parametrize(("row", "exact"), ROWS.items())
def test_what_is_stored_is_what_plan_says_today(row: tuple[str, str, str, At, int], exact: bool):
    """A planner that changed is noticed: run python tools/plan_grid.py."""
    model, strategy, checkpointing, at, micro_batches = row
    assert is_planned(strategy, at, micro_batches) is exact
    stored = STORED[key(model, strategy, checkpointing)][list(points()).index((at, micro_batches))]
    found = planned(*row)
    parts, exposed = list(by_part(found.breakdown).values()), 100 * found.timing.exposed_s / found.step_s
    if exact:
        assert stored == pytest.approx([*parts, found.step_s, exposed], rel=1e-3, abs=1e-3)
        return
    *there, step_s, share = stored
    assert sum(there) == pytest.approx(sum(parts), rel=0.03)
    assert there == pytest.approx(parts, rel=0, abs=0.03 * sum(parts))
    assert step_s == pytest.approx(found.step_s, rel=0.03)
    assert share == pytest.approx(exposed, rel=0, abs=3)

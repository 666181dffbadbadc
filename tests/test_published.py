"""The published runs are complete and kept apart by source, and what is stored of their plans is still so."""

import json
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import yaml

from benchmarks.published import FILE, left_out, predict, rows

ALL: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_there_are_fifty_runs_of_six_sources_and_a_third_is_kept_apart() -> None:
    counted = rows()
    assert len(counted) >= 50
    assert len({row["source"] for row in counted}) >= 6
    apart = rows("held_out")
    assert len(apart) >= len(counted) / 3
    assert len(rows("fit")) + len(apart) == len(counted)
    assert not {row["source"] for row in apart} & {row["source"] for row in rows("fit")}
    assert left_out("held_out") == {"float8": 4, "tensor parallel": 4, "float8; tensor parallel": 1}


def test_every_run_says_where_it_is_from_and_what_was_assumed() -> None:
    assert not [name for name, times in Counter(row["id"] for row in ALL["rows"]).items() if times > 1]
    for name, source in ALL["sources"].items():
        assert source["url"].startswith("https://"), name
        assert source["date"], name
        assert source["version"], name
        assert sum(row["source"] == name for row in ALL["rows"]) == source["rows"], name
    for row in ALL["rows"]:
        published = row["published"]
        assert row["split"] == ALL["sources"][row["source"]]["split"], row["id"]
        assert row["where"], row["id"]
        assert isinstance(row["assumed"], list), row["id"]
        assert (
            published["tokens_per_s_per_gpu"]
            or published["peak_memory"]
            or published["outcome"] == "out of memory"
            or row.get("exclude_from_fit")
        ), row["id"]


def test_what_is_stored_for_the_lesson_is_what_plan_says() -> None:
    stored = {
        row["id"]: row
        for row in json.loads(FILE.with_name("predictions.json").read_text(encoding="utf-8"))["rows"]
    }
    counted = {row["id"]: row for row in rows()}
    assert set(stored) <= set(counted)
    assert len(stored) >= 0.9 * len(counted)
    for name in ("atorch-7b-g8", "litgpt-thunder-eager-fsdp"):
        found, kept = predict(counted[name]), stored[name]
        assert found.speed == pytest.approx(kept["tokens_per_s"][0] / kept["tokens_per_s"][1], rel=0.01)
        assert found.memory == pytest.approx(kept["peak_gib"][0] / kept["peak_gib"][1], rel=0.01)
        assert found.plan.verdict == kept["verdict"]

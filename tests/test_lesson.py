"""Claims and recordings stand beside where they are from, and claims.yaml agrees with the lessons."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_utils.lessons import lesson, recorded

CLAIM = {
    "id": "twice-as-fast",
    "lesson": 2,
    "claim": "It is twice as fast.",
    "who": "Somebody",
    "url": "https://example.org",
    "when": 2022,
    "hardware": "8 A100",
    "cell": "speed",
}


def shown(folder: Path, measured: dict[str, str], **changed: Any) -> str:
    other = {**CLAIM, "lesson": 3, "id": "other"}
    (folder / "claims.yaml").write_text(yaml.safe_dump([{**CLAIM, **changed}, other]))
    return str(lesson.claims(2, measured, folder=folder).data)


def test_claims_stand_beside_what_was_measured_and_only_the_sources_words_are_quoted(tmp_path: Path) -> None:
    text = shown(tmp_path, {"twice-as-fast": "1.3 times"})
    assert "“It is twice as fast.” [Somebody](https://example.org), 2022, 8 A100" in text
    assert text.endswith("| 1.3 times |")
    assert "| It is twice as fast. [" in shown(tmp_path, {"twice-as-fast": "yes"}, paraphrased=True)
    for measured in ({}, {"twice-as-fast": "1", "never-claimed": "2"}):
        with pytest.raises(ValueError, match="lesson 2 has the claims"):
            shown(tmp_path, measured)


def test_every_claim_is_complete_and_names_a_cell_of_its_lesson() -> None:
    claims = lesson.read_claims()
    assert len({claim["id"] for claim in claims}) == len(claims)
    for claim in claims:
        assert CLAIM.keys() - {"hardware"} <= claim.keys() <= CLAIM.keys() | {"paraphrased", "found"}, claim
        (source,) = (lesson.NOTEBOOKS / "src").glob(f"{claim['lesson']:02d}_*.py")
        assert f'"{claim["cell"]}"' in source.read_text(encoding="utf-8"), claim


def test_a_recording_says_where_and_when_it_was_made_and_its_absence_is_not_hidden(tmp_path: Path) -> None:
    assert recorded.load("memory", folder=tmp_path) is None
    assert "Not recorded yet: `python benchmarks/gpu.py`" in str(
        recorded.caption("memory", folder=tmp_path).data
    )
    recording = {
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "date": "2025-11-21",
        "group": "a fake rank of 8",
    }
    (tmp_path / "recorded").mkdir()
    for group, told in (("a fake rank of 8", ", a fake rank of 8"), (None, "")):
        (tmp_path / "recorded" / "memory.json").write_text(json.dumps({**recording, "group": group}))
        assert recorded.load("memory", folder=tmp_path) == {**recording, "group": group}
        caption = recorded.caption("memory", folder=tmp_path).data
        assert caption == f"*Recorded on NVIDIA H200, torch 2.13.0, 2025-11-21{told}.*"

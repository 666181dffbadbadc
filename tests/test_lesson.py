"""Claims and recordings stand beside where they are from, and claims.yaml agrees with the lessons."""

import json
from pathlib import Path

from fsdp_utils.lessons import recorded
from fsdp_utils.lessons.tables import Table
from tools import claims_page

CLAIM = {
    "id": "twice-as-fast",
    "lesson": 2,
    "claim": "It is twice as fast.",
    "who": "Somebody",
    "url": "https://example.org",
    "when": 2022,
    "hardware": "8 A100",
    "cell": "speed",
    "found": "1.3 times",
}


def test_only_the_words_of_the_source_are_quoted() -> None:
    said = "“It is twice as fast.” [Somebody](https://example.org), 2022, 8 A100"
    assert claims_page.claimed(CLAIM) == said
    assert claims_page.claimed({**CLAIM, "paraphrased": True}).startswith("It is twice as fast. [")


def test_every_claim_is_complete_and_names_a_cell_of_its_lesson() -> None:
    claims = claims_page.read_claims()
    assert len({claim["id"] for claim in claims}) == len(claims)
    for claim in claims:
        assert CLAIM.keys() - {"hardware"} <= claim.keys() <= CLAIM.keys() | {"paraphrased"}, claim
        (source,) = (claims_page.NOTEBOOKS / "src").glob(f"{claim['lesson']:02d}_*.py")
        assert f'"{claim["cell"]}"' in source.read_text(encoding="utf-8"), claim


def test_a_recording_says_where_and_when_it_was_made(tmp_path: Path) -> None:
    recording = {"device": "NVIDIA H200", "torch": "2.13.0", "date": "2025-11-21"}
    (tmp_path / "recorded").mkdir()
    for group, told in (("a fake rank of 8", ", a fake rank of 8"), (None, "")):
        (tmp_path / "recorded" / "memory.json").write_text(json.dumps({**recording, "group": group}))
        assert recorded.load("memory", folder=tmp_path) == {**recording, "group": group}
        caption = recorded.caption("memory", folder=tmp_path).data
        assert caption == f"*Recorded on NVIDIA H200, torch 2.13.0, 2025-11-21{told}.*"


def test_a_table_aligns_numbers_right_and_escapes_html() -> None:
    table = Table(["way", "KiB"], [["<one>", 12345], ["two", 1.5]], note="Of all.")
    assert repr(table) == "way       KiB\n<one>  12,345\ntwo       1.5\nOf all."
    html = table._repr_html_()
    assert "&lt;one&gt;" in html
    assert '<td style="text-align: right">12,345</td>' in html
    assert html.endswith("<p>Of all.</p>")

"""The rows and the code of 250 configs, word for word: the table of keys may change, its output may not unseen.

data/translations.json holds the configs (those of data/public_configs.jsonl by number), each row that occurs
once, and each program once; a case names its rows and its program by number. "!" marks a lost setting.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_utils import translate

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "translations.json").read_text())
PUBLIC = [json.loads(line) for line in (DATA / "public_configs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["rows"])
def test_rows_and_code_are_those_on_record(case: dict[str, Any]) -> None:
    config = PUBLIC[case["public"]]["config"] if "public" in case else case["config"]
    found = translate(config, framework=case.get("framework"), given=case.get("given"))
    rows = [f"{' ' if row.has_counterpart else '!'} {row.key}: {row.fsdp2}" for row in found.rows]
    assert rows == [GOLDEN["rows"][int(number)] for number in case["rows"].split()]
    assert all(row.source.startswith("https://") for row in found.rows)
    if "program" in case:
        assert found.code() == GOLDEN["programs"][case["program"]]

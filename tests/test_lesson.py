"""Cards, claims and checks say what is true, and claims.yaml agrees with the lessons."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fsdp_utils.lessons import lesson

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

REQUIRED = {"id", "lesson", "claim", "who", "url", "when", "cell"}


def folder_with(tmp_path: Path, *claims: dict) -> Path:
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(list(claims)))
    return tmp_path


def test_claims_stand_beside_what_was_measured(tmp_path):
    folder = folder_with(tmp_path, CLAIM, {**CLAIM, "lesson": 3, "id": "other"})
    text = lesson.claims(2, {"twice-as-fast": "1.3 times"}, folder=folder).data
    assert "“It is twice as fast.” [Somebody](https://example.org), 2022, 8 A100" in text
    assert text.endswith("| 1.3 times |")


def test_only_the_words_of_the_source_are_quoted(tmp_path):
    def shown(claim):
        return lesson.claims(2, {claim["id"]: "yes"}, folder=folder_with(tmp_path, claim)).data

    assert f"“{CLAIM['claim']}”" in shown(CLAIM)
    retold = shown(CLAIM | {"paraphrased": True})
    assert CLAIM["claim"] in retold
    assert "“" not in retold


@pytest.mark.parametrize("measured", [{}, {"twice-as-fast": "1", "never-claimed": "2"}])
def test_claims_without_their_measurement_are_refused(tmp_path, measured):
    with pytest.raises(ValueError, match="lesson 2 has the claims"):
        lesson.claims(2, measured, folder=folder_with(tmp_path, CLAIM))


def square(x: int) -> int:
    return x * x


def test_a_right_answer_passes_strictly():
    text = lesson.check(square, {(2,): 4, (-3,): 9}, strict=True).data
    assert "Right" in text
    assert "| `square(-3)` | `9` | `9` | ✓ |" in text


def test_a_stub_is_not_yet_an_answer_and_does_not_raise():
    assert "Not yet" in lesson.check(lambda x: None, {(2,): 4}).data
    assert "Not yet" in lesson.check(None, {"T5Block"}).data


def test_an_empty_stub_is_not_called():
    def ask(numel: int) -> int | None:
        """How many?"""
        ...

    def dots(numel: int):
        return ...

    def prepared(numel: int):
        called.append(numel)
        return ...

    called: list[int] = []
    for stub in (ask, dots, lambda numel: None, prepared):
        shown = lesson.check(stub, {(2,): 4, (3,): 9}).data
        assert "Not yet" in shown
        assert "| · |" in shown
    assert called == [2, 3]
    assert "Not yet" in lesson.check(..., 4).data
    with pytest.raises(AssertionError, match="Not yet"):
        lesson.check(..., 4, strict=True)


def test_none_can_be_the_right_answer_of_some_cases():
    def smallest(numbers: tuple[int, ...]) -> int | None:
        return min(numbers, default=None)

    assert "Right" in lesson.check(smallest, {((),): None, ((3, 4),): 3}).data
    assert "Not yet" in lesson.check(lambda numbers: None, {((),): None, ((3, 4),): 3}).data


def test_a_text_where_a_number_is_asked_for_is_told_apart():
    shown = lesson.check(lambda numel: str(numel), {(12,): 12}).data
    assert "`'12'` is a string, and the spec is a number" in shown
    assert "1 of 1 differ" in shown
    assert "is a string" not in lesson.check("12", "13").data


def test_a_wrong_answer_shows_yours_and_spec():
    text = lesson.check(square, {(2,): 4, (3,): 6}).data
    assert "1 of 2 differ" in text
    assert "| `square(3)` | `9` | `6` | ✗ |" in text


def test_an_answer_that_raises_is_shown():
    assert "ZeroDivisionError" in lesson.check(lambda x: 1 / x, {(0,): 1.0}).data


@pytest.mark.parametrize("answer", [None, square])
def test_strict_raises_for_missing_and_wrong_answers(answer):
    with pytest.raises(AssertionError, match="Not"):
        lesson.check(answer, {(3,): 6} if answer else 6, strict=True)


@pytest.mark.parametrize(
    ("mine", "asked", "right"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1.0, 1, True),
        (2.9999999999999996, 3, True),
        (1_000_000_001, 1_000_000_000, False),
        (2**60 + 1, 2**60, False),
        (np.float64(0.3), 0.1 + 0.2, True),
        (np.int64(4), 4, True),
        (torch.tensor(4), 4, True),
        (torch.tensor(0.3), 0.3, True),
        (4, np.int32(4), True),
        (np.array([1, 2]), [1.0, 2.0], True),
        (np.array([1, 2]), [1, 3], False),
        (np.True_, 1, False),
        ("12", 12, False),
        (float("inf"), 3.0, False),
        (True, 1, False),
        ([1, 2.0], (1, 2.0), True),
        ([1], (1, 2), False),
        ({"a": 1.0}, {"a": 1.0 + 1e-9}, True),
        ({"a": 1}, {"b": 1}, False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), False),
        (torch.ones(1), 1.0, False),
        (str, str, True),
        ({int}, {str}, False),
    ],
)
def test_same_up_to_rounding(mine, asked, right):
    assert ("Right" in lesson.check(mine, asked).data) == right


def test_floats_are_shown_without_the_noise_of_their_last_digits():
    assert "`0.3` | `0.3`" in lesson.check(0.1 + 0.2, 0.3).data


def test_pipes_in_an_answer_do_not_break_the_table():
    assert "| `'a\\|b'` |" in lesson.check(["a|b"][0].join("''"), "'a|b'").data


def test_every_claim_is_complete_and_names_a_cell_of_its_lesson():
    claims = lesson.read_claims()
    assert len({claim["id"] for claim in claims}) == len(claims)
    for claim in claims:
        assert REQUIRED <= set(claim) <= REQUIRED | {"hardware", "paraphrased"}, claim
        sources = sorted((lesson.NOTEBOOKS / "src").glob(f"{claim['lesson']:02d}_*.py"))
        assert len(sources) == 1, claim
        assert f'"{claim["cell"]}"' in sources[0].read_text(encoding="utf-8"), claim

"""What ranks print is labelled, merged where they agree, and nothing of it is lost."""

import pytest

from fsdp_utils.notebook.output import Live, merge, name_ranks


@pytest.mark.parametrize(
    ("ranks", "world_size", "label"),
    [([0, 1], 2, "all ranks"), ([1], 2, "rank 1"), ([0, 2], 3, "ranks 0, 2"), ([0], 1, "rank 0")],
)
def test_ranks_are_named(ranks: list[int], world_size: int, label: str) -> None:
    assert name_ranks(ranks, world_size) == label


def test_the_same_text_is_shown_once() -> None:
    assert merge({0: "a\nb\n", 1: "a\nb\n"}, 2) == "all ranks | a\nall ranks | b\n"


def test_of_some_ranks_the_same_text_names_them() -> None:
    assert merge({0: "a\n", 2: "a\n"}, 3) == "ranks 0, 2 | a\n"


def test_common_beginning_and_end_stand_around_what_differs() -> None:
    texts = {0: "same\nown 0\nend\n", 1: "same\nown 1\nmore 1\nend\n"}
    assert merge(texts, 2).splitlines() == [
        "all ranks | same",
        "rank 0 | own 0",
        "rank 1 | own 1",
        "rank 1 | more 1",
        "all ranks | end",
    ]


def test_a_line_is_never_both_beginning_and_end() -> None:
    assert merge({0: "a\n", 1: "a\na\n"}, 2).splitlines() == ["all ranks | a", "rank 1 | a"]


def test_a_rank_that_printed_nothing_does_not_hide_the_others() -> None:
    assert merge({0: "a\n", 1: ""}, 2) == "rank 0 | a\n"


def test_empty_lines_and_a_missing_last_newline_are_kept_readable() -> None:
    assert merge({0: "a\n\nb"}, 2) == "rank 0 | a\nrank 0 |\nrank 0 | b\n"


def test_of_a_progress_bar_the_last_drawing_stays() -> None:
    assert merge({0: " 10%\r 50%\r100%\ndone\n"}, 2) == "rank 0 | 100%\nrank 0 | done\n"


def test_live_output_shows_each_line_once_as_it_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(2)
    live.update({0: "one\ntw", 1: ""})
    live.update({0: "one\ntwo\n", 1: "x\n"})
    live.update({0: "one\ntwo\n", 1: "x\n"})
    assert capsys.readouterr().out == "rank 0 | one\nrank 0 | two\nrank 1 | x\n"


def test_live_output_redraws_a_progress_bar_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(2)
    live.update({0: "\r 10%"})
    live.update({0: "\r 10%\r 20%"})
    assert capsys.readouterr().out == "\rrank 0 |  10%\rrank 0 |  20%"


def test_a_status_line_is_replaced_by_the_next_and_by_output(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(2)
    live.report("a long line")
    live.report("a long line")
    live.report("short")
    live.update({0: "one\n"})
    assert capsys.readouterr().out == "\ra long line\rshort      \r     \rrank 0 | one\n"
    assert live.showing
    live.report("x")
    live.report("")
    live.update({0: "one\n\r 10%"})
    live.report("y")
    live.update({0: "one\n\r 10%\r 20%"})
    assert capsys.readouterr().out == "\rx\r \r\rrank 0 |  10%\ry\r \r\rrank 0 |  20%"

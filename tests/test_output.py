"""What ranks print is labelled, merged where they agree, and nothing of it is lost."""

from collections.abc import Iterator

import pytest

from tests.notebook_kernel import Notebook


@pytest.fixture(scope="module")
def three() -> Iterator[Notebook]:
    """A notebook with three ranks, and a person who watches it."""
    notebook = Notebook(interactive=True)
    notebook.run("from fsdp_utils.notebook import ranks")
    assert notebook.run("ranks.start(3)").error == ""
    notebook.run("%%ranks\nimport os, sys, time\nrank = int(os.environ['RANK'])")
    yield notebook
    notebook.close()


@pytest.mark.parametrize(
    ("chosen", "source", "shown"),
    [
        ("", "print('a\\nb')", ["all ranks | a", "all ranks | b"]),
        ("1", "print('a')", ["rank 1 | a"]),
        ("0,2", "print('a')", ["ranks 0, 2 | a"]),
        ("0,1", "print('a') if rank == 0 else None", ["rank 0 | a"]),
        ("0,1", "for _ in range(1 + rank): print('a')", ["ranks 0, 1 | a", "rank 1 | a"]),
        ("0", "print('a\\n\\nb', end='')", ["rank 0 | a", "rank 0 |", "rank 0 | b"]),
        ("0", "print(' 10%\\r 50%\\r100%\\ndone')", ["rank 0 | 100%", "rank 0 | done"]),
        (
            "0,1",
            "print('same\\nown', rank)\nif rank: print('more', rank)\nprint('end')",
            ["ranks 0, 1 | same", "rank 0 | own 0", "rank 1 | own 1", "rank 1 | more 1", "ranks 0, 1 | end"],
        ),
    ],
)
def test_at_the_end_common_lines_are_shown_once_and_the_rest_by_rank(
    three: Notebook, chosen: str, source: str, shown: list[str]
) -> None:
    assert three.run(f"%%ranks {chosen}\n{source}").text.splitlines() == shown


def test_meanwhile_each_line_is_shown_as_it_is_finished(three: Notebook) -> None:
    shown = three.run(
        "%%ranks 0\nfor text in ('one\\ntw', 'o\\n', '\\r 10%', '\\r 20%'):\n"
        "    print(text, end='', flush=True); time.sleep(0.5)"
    )
    told = "".join(shown.streamed)
    assert told.startswith("rank 0 | one\nrank 0 | two\n")
    assert "\rrank 0 |  10%" in told  # a progress bar moves while it runs
    assert shown.cleared
    assert shown.text.splitlines() == ["rank 0 | one", "rank 0 | two", "rank 0 |  20%"]

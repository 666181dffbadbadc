"""Cells that defeat what reports on them: the cell ends at once, is reported, and the next one works."""

from collections.abc import Iterator

import pytest

from tests.notebook_kernel import Notebook, usable


@pytest.fixture(scope="module")
def started() -> Iterator[Notebook]:
    notebook = Notebook(limit=20)  # s for a cell, where the fault is that it never ends
    notebook.run("from fsdp_utils.notebook import ranks")
    notebook.run("ranks.start(2)")
    yield notebook
    notebook.close()


@pytest.fixture
def two(started: Notebook) -> Iterator[Notebook]:
    with usable(started, 2):
        yield started


STR = "class Odd(Exception):\n    def __str__(self):"
META = (
    "class Meta(type):\n    @property\n    def __name__(cls): raise KeyError('no name')\n"
    "class Odd(Exception, metaclass=Meta): pass\n"
)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (f"{STR} raise KeyError\nraise Odd", "Odd: (no text: its __str__ raised KeyError)"),
        (f"{STR} raise SystemExit\nraise Odd", "raised SystemExit)"),
        (f"{STR} 1 / 0\nraise ValueError('v') from Odd()", "ValueError: v"),
        (f"{STR} 1 / 0\nraise SyntaxError('bad', ('f', Odd(), 1, Odd()))", "SyntaxError: bad"),
        (f"{STR} return 'odd'\nraise SyntaxError(Odd())", "SyntaxError: odd"),
        (f"class Text(str): pass\n{STR} return Text('sub')\nraise Odd", "Odd: sub"),
        (f"{META}raise Odd", "KeyError: 'no name'"),
    ],
)
def test_an_exception_that_cannot_be_described_ends_its_cell(two: Notebook, source: str, told: str) -> None:
    failed = two.run(f"%%ranks\n{source}")
    assert failed.error.startswith("RankError: all ranks raised ")
    assert told in failed.error


def test_what_a_rank_cannot_say_of_its_cell_does_not_hide_a_rank_that_can(two: Notebook) -> None:
    failed = two.run(f"%%ranks\n{META}if rank == 1:\n    raise Odd\ndist.barrier()")
    assert failed.error.startswith("RankError: rank 1 raised KeyError")
    assert "rank 0 stood at line 7: dist.barrier()" in failed.traceback


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e15", "-inf", "0", "-1"])
def test_a_time_limit_that_is_none_is_refused(two: Notebook, seconds: str) -> None:
    failed = two.run(f"%%ranks --timeout {seconds}\ndist.all_reduce(x)")
    assert failed.error.startswith("ValueError: %%ranks --timeout")
    assert "above 0 and at most 1,000,000" in failed.error


def test_the_longest_time_limit_works(two: Notebook) -> None:
    assert two.run("%%ranks --timeout 1e6\ndist.all_reduce(x)").error == ""


@pytest.mark.parametrize(
    ("reduce", "told"),
    [
        ("return exec, ('raise SystemExit(3)',)", "SystemExit: 3 (while the notebook unpickled"),
        ("return __import__, ('nowhere',)", "ModuleNotFoundError: No module named 'nowhere' (while the"),
        ("raise SystemExit(4)", "SystemExit: 4"),
        ("raise KeyError('no')", "KeyError: 'no'"),
    ],
)
def test_a_value_that_cannot_travel_is_told(two: Notebook, reduce: str, told: str) -> None:
    two.run(f"%%ranks\nclass Odd:\n    def __reduce__(self): {reduce}")
    failed = two.run("ranks.get('Odd()')")
    assert failed.error.startswith(f"RankError: ranks.get('Odd()') raised {told}")


def test_an_object_of_a_class_from_a_cell_arrives(two: Notebook) -> None:
    two.run("%%ranks\nclass Mine:\n    def __init__(self): self.rank = rank")
    assert two.run("[mine.rank for mine in ranks.get('Mine()')]").value == "[0, 1]"


def test_a_rank_that_a_real_time_signal_ends_is_replaced(two: Notebook) -> None:
    failed = two.run("%%ranks\nif rank == 1:\n    os.kill(os.getpid(), 40)")
    assert failed.error.startswith("RankError: rank 1 was killed by signal 40")
    assert "The new rank 1 has no variables yet" in failed.traceback


def test_a_rank_that_is_stopped_is_replaced_when_its_cell_is_interrupted(two: Notebook) -> None:
    stopped = two.run("%%ranks\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)", interrupt_after=1.0)
    assert stopped.error.startswith("KeyboardInterrupt")
    assert "rank 1 could not be freed and was ended" in stopped.traceback


@pytest.mark.parametrize(
    "spoil",
    [
        "sys.stdout = sys.stderr = None",
        "sys.stdout.close(); sys.stderr.close()",
        "with open(os.devnull, 'w') as sys.stdout: pass",
        "sys.stdout = 5",
        "sys.stdout.write = sys.stdout.flush = sys.stderr.flush = None",
        "with contextlib.suppress(AttributeError): sys.__stdout__ = sys.__stdout__.close()",
    ],
)
def test_a_cell_that_takes_away_its_output_still_shows_its_value_and_error(two: Notebook, spoil: str) -> None:
    begin = "%%ranks\nimport contextlib, os, sys\nfrom IPython.display import display\n"
    spoilt = two.run(f"{begin}print('before')\n{spoil}\n6 * 7")
    assert (spoilt.text, spoilt.error) == ("all ranks | before\nall ranks | 42\n", "")
    shown = two.run(f"{begin}{spoil}\ndisplay(6 * 7)")
    assert (shown.text, shown.error) == ("all ranks | 42\n", "")
    failed = two.run(f"{begin}{spoil}\nraise KeyError('mine')")
    assert failed.error.startswith("RankError: all ranks raised KeyError: 'mine'")


def test_a_cell_that_takes_away_the_shells_output_leaves_that_of_the_next(two: Notebook) -> None:
    two.run("%%ranks\nget_ipython().displayhook = get_ipython().display_pub = None")
    assert two.run("%%ranks\n6 * 7").text == "all ranks | 42\n"

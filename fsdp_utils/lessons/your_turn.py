"""Your turn: `%%turn 1` runs a reader's answer and holds what it measures against targets."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython
from IPython.display import display

from fsdp_utils.lessons import progress
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks, tracebacks
from fsdp_utils.notebook.cell import RankError

TIMEOUT_S = 10.0  # the longest that a collective of an answer may wait
STUCK_S = 0.4  # ranks that have waited for so long in different collectives wait for each other

_HERE = f"__import__({__name__!r}, fromlist=['measure'])"  # this module, for code on the ranks


class NotYet(Exception):
    """There is nothing to measure, for the reason in the message; a scoring function may raise it."""


# ---- targets


@dataclass(frozen=True)
class Goal:
    """The target of one measured value."""

    wanted: str  # as it is shown
    meets: Callable[[Any], bool]
    advice: str | Callable[[Any], str]  # what a value that misses says about the code

    def row(self, name: str, found: Any) -> "Row":
        """Hold a value against the target; None is a value that was not measured."""
        if found is None:
            return Row(name, "·", self.wanted, "·", "")
        with suppress(TypeError, ValueError):
            if self.meets(found):
                return Row(name, _text(found), self.wanted, "✓", "")
            told = self.advice if isinstance(self.advice, str) else self.advice(found)
            return Row(name, _text(found), self.wanted, "✗", told)
        told = f"Expected for “{name}”: {self.wanted}, found a {type(found).__name__}."
        return Row(name, _text(found), self.wanted, "✗", told)


class Row(NamedTuple):
    """One measured value beside its target."""

    name: str
    found: str
    wanted: str
    mark: str  # ✓ met, ✗ missed, · not measured
    advice: str


def exactly(value: Any, otherwise: str = "", *, less: str = "", more: str = "") -> Goal:
    """Ask for the value itself, where 8 and 8.0 are the same; with advice for less, for more, or for both."""

    def advice(found: Any) -> str:
        return (less if found < value else more if found > value else "") or otherwise

    return Goal(_text(value), lambda found: bool(found == value), advice if less or more else otherwise)


def at_most(value: float, otherwise: str) -> Goal:
    """Ask for this value or less."""
    return Goal(f"at most {_text(value)}", lambda found: bool(found <= value), otherwise)


def _text(value: Any) -> str:
    if isinstance(value, bool) or type(value).__name__ == "bool":  # NumPy's too
        return "yes" if value else "no"
    if isinstance(value, Real) and float(value).is_integer():
        return f"{int(value):,}"  # pyright: ignore[reportArgumentType] - a Real has __trunc__
    return f"{value:,.4g}" if isinstance(value, Real) else str(value)


# ---- a turn, where its answer runs: on a rank or in the notebook


class _Turn(NamedTuple):
    score: Callable[..., Mapping[str, Any]]
    goals: Mapping[str, Goal]
    returns: bool


_turns: dict[int, _Turn] = {}


def turn(
    number: int, goals: Mapping[str, Goal], *, returns: bool = True
) -> Callable[[Callable[..., Mapping[str, Any]]], Callable[..., Mapping[str, Any]]]:
    """Register the function that measures the answer to a turn; `%%turn NUMBER` calls it.

    The names of its parameters are the names that the reader defines. It returns the measured values by the
    names of the goals, with None for what could not be measured, and perhaps a `Picture` as "picture"; or it
    raises `NotYet` with a sentence. Where it is defined under `%%ranks`, the answer runs on all ranks.
    `returns` says that None, returned by a function of the reader's, is a mistake.
    """

    def register(score: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        _turns[number] = _Turn(score, goals, returns)
        return score

    return register


@dataclass(frozen=True)
class Picture:
    """A figure of fsdp_utils.lessons.plots, which the notebook draws from rank 0's values."""

    name: str
    args: Sequence[Any] = ()
    options: Mapping[str, Any] | None = None


class Measured(NamedTuple):
    """What came of an answer on one rank."""

    rows: list[Row]
    problem: str  # why nothing was measured; "" where something was
    picture: Picture | None = None


def blank(number: int) -> list[Row]:
    """The rows of a turn before anything is measured; [] where the turn is not known, as on a new rank."""
    return _rows(number, {}) if number in _turns else []


def _rows(number: int, values: Mapping[str, Any]) -> list[Row]:
    return [goal.row(name, values.get(name)) for name, goal in _turns[number].goals.items()]


def measure(number: int, code: str) -> Measured:
    """Run an answer in a copy of the namespace here, and score it; raises what the answer raised."""
    from torch import distributed

    from fsdp_utils.lessons.together import run_together

    try:
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            values, parted = run_together(_score, number, code)  # no rank waits for a call that another lacks
        else:
            values, parted = _score(number, code), ""
    except NotYet as reason:
        values, parted = None, str(reason)
    values = values or {}
    return Measured(_rows(number, values), parted, values.get("picture"))


def _score(number: int, code: str) -> Mapping[str, Any]:
    """Run the answer, without what was defined under its names before, and measure its parts."""
    shell = get_ipython()
    assert shell is not None, "a turn runs in a notebook"
    turn = _turns[number]
    names = list(inspect.signature(turn.score).parameters)
    namespace = {name: value for name, value in shell.user_ns.items() if name not in names}
    try:
        exec(compile(code, shell.compile.cache(code), "exec"), namespace)
        if missing := [name for name in names if name not in namespace]:
            raise NotYet(f"This cell does not define `{missing[0]}`: keep the name that it began with.")
        parts = [namespace[name] for name in names]
        if empty := [name for name, part in zip(names, parts, strict=True) if _is_empty(part)]:
            all_of_them = "Not yet: fill in the cell and run it again."
            raise NotYet(all_of_them if empty == names else f"`{empty[0]}` is still empty.")
        return turn.score(*map(_returning, parts) if turn.returns else parts)
    finally:
        namespace.clear()  # what the answer has built goes now


def _returning(part: Any) -> Any:
    """A function that says so where it returns None; anything else as it is."""
    if not isinstance(part, FunctionType):
        return part

    def called(*args: Any, **options: Any) -> Any:
        value = part(*args, **options)
        if value is None:
            raise NotYet(f"`{part.__name__}` returned None: is a `return` missing?")
        return value

    return called


def _is_empty(part: Any) -> bool:
    """Tell whether a function, or each method of a class but `__init__`, does nothing, as in a stub."""
    if isinstance(part, type):
        methods = [m for name, m in vars(part).items() if isinstance(m, FunctionType) and name != "__init__"]
        return bool(methods) and all(map(_is_empty, methods))
    code, nothing = getattr(part, "__code__", None), (lambda: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (nothing.co_code, nothing.co_consts)


# ---- the verdict


class Verdict(Table):
    """A table of yours beside the target, and what to look at where it was missed."""

    def __init__(self, results: Sequence[Measured]) -> None:
        problems = [result.problem for result in results if result.problem]
        rows = []
        for of_ranks in zip(*(result.rows for result in results), strict=True):
            worst = max(of_ranks, key=lambda row: "✓·✗".index(row.mark))
            rows.append(worst if not problems else worst._replace(found="·", mark="·", advice=""))
        missed = dict.fromkeys(row.advice for row in rows if row.mark == "✗")  # a sentence once
        self.advice = problems[:1] or list(missed)
        if not self.advice and (unmeasured := [row.name for row in rows if row.mark == "·"]):
            self.advice = [f"Not measured: {'; '.join(unmeasured)}."]
        self.solved = bool(rows) and all(row.mark == "✓" for row in rows)
        note = "Right: every rank meets the target." if len(results) > 1 else "Right."
        super().__init__(
            ["", "yours", "target", ""],
            [row[:4] for row in rows],
            note=note if self.solved else " ".join(self.advice),
        )


# ---- the cell


def _magic(line: str, cell: str) -> None:
    """%%turn NUMBER: run the answer in this cell, measure it and show the verdict."""
    if not line.strip().isdigit():
        raise ValueError(f"%%turn {line.strip()}: expected the number of a turn, as in `%%turn 1`.")
    number = int(line)
    verdict, picture = _judge(number, cell)
    display(verdict)
    if picture is not None:
        from fsdp_utils.lessons import plots

        display(getattr(plots, picture.name)(*picture.args, **(picture.options or {})))
    if verdict.solved:
        progress.solved(number)
    if os.environ.get("FSDP_TRY_ANSWERS"):
        _try_answers(number)


def _judge(number: int, code: str) -> tuple[Verdict, Picture | None]:
    """Run an answer from a clean start, on the ranks or here, and measure it."""
    on_ranks = number not in _turns
    rows = ranks.get(f"{_HERE}.blank({number})") if on_ranks else [blank(number)]
    if not all(rows):
        raise RuntimeError(
            f"%%turn {number}: its set-up has not run. Run the cells above first, from the first cell of "
            "the lesson (in JupyterLab: Run > Run All Above Selected Cell)."
        )
    try:
        if on_ranks:
            ranks.run(
                f"_measured = {_HERE}.measure({number}, {code!r})", timeout_s=TIMEOUT_S, stuck_s=STUCK_S
            )
            results = ranks.get("_measured")
        else:
            results = [measure(number, code)]
    except RankError as error:
        _, cell, place = error.details.partition("in an earlier cell")
        results = [_failed(rows[0], str(error), error.where, cell + place or error.details)]
    except Exception as error:
        found = tracebacks.describe(error, code)
        said = f"your code raised {found.name}: {found.message}"
        results = [_failed(rows[0], said, found.where, found.text)]
    return Verdict(results), results[0].picture


def _failed(rows: list[Row], said: str, where: str | None, details: str) -> Measured:
    print(details)
    return Measured(rows, f"Nothing to measure: {said}{f' ({where})' if where else ''}.")


# ---- the answers in a lesson's source, which are tried where FSDP_TRY_ANSWERS is set: by CI


class Answer(NamedTuple):
    kind: str  # "solution", "right" or "wrong"
    turn: int
    says: str  # words of the sentence that names the mistake
    code: str


def answers(source: str) -> list[Answer]:
    """Find the answers in the text of a lesson's source: cells with the tag solution, right or wrong."""
    import jupytext

    cells = [cell for cell in jupytext.reads(source, "py:percent").cells if "turn" in cell.metadata]
    return [
        Answer(cell.metadata["tags"][0], cell.metadata["turn"], cell.metadata.get("says", ""), cell.source)
        for cell in cells
    ]


def _try_answers(number: int) -> None:
    """Hold the verdict on each known answer, and its sentence, against the kind of the answer."""
    from IPython.utils.capture import capture_output

    for answer in answers(progress.source()):
        if answer.turn == number:
            with capture_output():
                verdict, _ = _judge(number, answer.code)
            about = f"{answer.kind} answer to turn {number}:\n{answer.code}\n{verdict!r}"
            assert verdict.solved == (answer.kind != "wrong"), about
            assert answer.says in verdict.note, f"expected {answer.says!r} in the verdict on the {about}"


if (_shell := get_ipython()) is not None:
    _shell.register_magic_function(_magic, magic_kind="cell", magic_name="turn")  # pyright: ignore

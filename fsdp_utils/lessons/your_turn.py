"""Your turn: `%%turn 1` runs a reader's answer and holds what it measures against targets."""

import inspect
import os
import re
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

_ANSWER = re.compile(
    r'^# %% tags=\["(solution|right|wrong)"\] turn=(\d+)(?: says="(?P<says>[^"]*)")?', re.MULTILINE
)
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


@dataclass(frozen=True)
class _Turn:
    score: Callable[..., Mapping[str, Any]]
    goals: Mapping[str, Goal]
    returns: bool

    @property
    def names(self) -> list[str]:
        return list(inspect.signature(self.score).parameters)


_turns: dict[int, _Turn] = {}
_before: dict[str, Any] = {}  # the namespace as it was before the answer


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


def begin(number: int, namespace: dict[str, Any]) -> bool:
    """Take the names of an answer out of the namespace; returns whether the turn is known here."""
    end(namespace)
    if number not in _turns:
        return False
    for name in _turns[number].names:
        namespace.pop(name, None)
    _before.update(namespace)
    return True


def end(namespace: dict[str, Any]) -> None:
    """Put the namespace back as it was before the answer."""
    if _before:
        namespace.clear()
        namespace.update(_before)
        _before.clear()


def not_ready(number: int, namespace: Mapping[str, Any]) -> Measured | None:
    """Return what to say of an answer that cannot be measured yet, else None."""
    turn = _turns[number]
    missing = [name for name in turn.names if name not in namespace]
    empty = [name for name in turn.names if name not in missing and _is_empty(namespace[name])]
    if missing:
        sentence = f"This cell does not define `{missing[0]}`: keep the name that it began with."
    elif len(empty) == len(turn.names):
        sentence = "Not yet: fill in the cell and run it again."
    elif empty:
        sentence = f"`{empty[0]}` is still empty."
    else:
        return None
    return Measured([goal.row(name, None) for name, goal in turn.goals.items()], sentence)


def measure(number: int, namespace: Mapping[str, Any]) -> Measured:
    """Score an answer and hold the values against the targets; raises what the answer raised."""
    turn = _turns[number]
    parts = [_returning(namespace[name]) if turn.returns else namespace[name] for name in turn.names]
    try:
        values, parted = _scored(turn, parts)
    except NotYet as reason:
        values, parted = {}, str(reason)
    rows = [goal.row(name, values.get(name)) for name, goal in turn.goals.items()]
    return Measured(rows, parted, values.get("picture"))


def _scored(turn: _Turn, parts: list[Any]) -> tuple[Mapping[str, Any], str]:
    from torch import distributed

    from fsdp_utils.lessons.together import run_together

    if distributed.is_initialized() and distributed.get_world_size() > 1:
        values, parted = run_together(turn.score, *parts)  # no rank waits for a call that another lacks
        return values or {}, parted
    return turn.score(*parts), ""


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
    """Run an answer from a clean start, and measure it."""
    if number in _turns:
        results = _in_the_notebook(number, code)
    else:
        known = ranks.get(f"{_HERE}.begin({number}, globals())")
        if not all(known):
            raise RuntimeError(
                f"%%turn {number}: its set-up has not run. Run the cells above first, from the first cell of "
                "the lesson (in JupyterLab: Run > Run All Above Selected Cell)."
            )
        results = _on_ranks(number, code)
    return Verdict(results), results[0].picture


def _on_ranks(number: int, code: str) -> list[Measured]:
    blank: list[list[Row]] = ranks.get(f"{_HERE}.blank({number})")
    try:
        ranks.run(code, timeout_s=TIMEOUT_S, stuck_s=STUCK_S)
        asked = ranks.get(f"{_HERE}.not_ready({number}, globals())")
        if found := [result for result in asked if result is not None]:
            return found
        measuring = f"_measured = {_HERE}.measure({number}, globals())"
        ranks.run(measuring, timeout_s=TIMEOUT_S, stuck_s=STUCK_S)
        return ranks.get("_measured")
    except RankError as error:
        _, cell, place = error.details.partition("in an earlier cell")
        print(cell + place or error.details)
        where = f" ({error.where})" if error.where else ""
        return [Measured(blank[0], f"Nothing to measure: {error}{where}.")]
    finally:
        ranks.get(f"{_HERE}.end(globals())")


def blank(number: int) -> list[Row]:
    """The rows of a turn before anything is measured; [] where a new rank does not know the turn."""
    return [goal.row(name, None) for name, goal in _turns[number].goals.items()] if number in _turns else []


def _in_the_notebook(number: int, code: str) -> list[Measured]:
    shell = get_ipython()
    assert shell is not None, "a turn runs in a notebook"
    namespace = shell.user_ns
    begin(number, namespace)
    try:
        exec(compile(code, shell.compile.cache(code), "exec"), namespace)
        return [not_ready(number, namespace) or measure(number, namespace)]
    except Exception as error:
        found = tracebacks.describe(error, code)
        print(found.text)
        where = f" ({found.where})" if found.where else ""
        said = f"Nothing to measure: your code raised {found.name}: {found.message}{where}."
        return [Measured(blank(number), said)]
    finally:
        end(namespace)


# ---- the answers in a lesson's source, which are tried where FSDP_TRY_ANSWERS is set: by CI


class Answer(NamedTuple):
    kind: str  # "solution", "right" or "wrong"
    turn: int
    says: str  # words of the sentence that names the mistake
    code: str


def answers(source: str) -> list[Answer]:
    """Find the answers in the text of a lesson's source: cells with the tag solution, right or wrong."""
    found = []
    for cell in re.split(r"^(?=# %%(?!\w))", source, flags=re.MULTILINE):
        if match := _ANSWER.match(cell):
            code = cell.partition("\n")[2].strip()
            found.append(Answer(match[1], int(match[2]), match["says"] or "", code))
    return found


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

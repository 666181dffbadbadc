"""Your turn: what a reader wrote has run on the ranks; hold what was measured against a target."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from fsdp_utils.lessons.lesson import NOTEBOOKS
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

SOURCES = NOTEBOOKS / "src"

_ANSWER = re.compile(r'^# %% .*tags=\["(solution|wrong)"\].*\bturn=(\d+)(?:.*\braises="(.*)")?')
_WITH_COMMENT_SIGN = re.compile(r"^# (?=%%)")  # a magic is a comment in the source of a lesson


@dataclass(frozen=True)
class Goal:
    """What one measured value should be.

    Args:
        wanted: the target as it is shown.
        meets: whether a value meets it.
        otherwise: a sentence for who has missed it: what this value says about the code.
    """

    wanted: str
    meets: Callable[[Any], bool]
    otherwise: str


def exactly(value: Any, *, otherwise: str) -> Goal:
    """The value itself, where 8 and 8.0 are the same."""
    return Goal(_text(value), lambda found: found is not None and bool(found == value), otherwise)


def at_most(value: float, *, otherwise: str) -> Goal:
    """This value or less."""
    return Goal(f"at most {_text(value)}", lambda found: found is not None and found <= value, otherwise)


_goals: dict[int, Mapping[str, Goal]] = {}  # by the number of the turn, for try_answers


class Verdict(Table):
    """A turn's table of yours beside the target, and what to look at where it was missed."""

    def __init__(self, results: Sequence[Mapping[str, Any] | None], goals: Mapping[str, Goal]) -> None:
        missing = [rank for rank, result in enumerate(results) if result is None]
        problems = [result["problem"] for result in results if result and result.get("problem")]
        self.advice: list[str] = [] if missing else problems[:1]
        shown = next((result for result in results if result is not None), {})
        marks = []
        for name, goal in goals.items():
            missed = [
                rank
                for rank, result in enumerate(results)
                if result is not None and not goal.meets(result.get(name))
            ]
            if missed and not missing and not problems:
                self.advice.append(goal.otherwise)
                shown = {**shown, name: (results[missed[0]] or {}).get(name)}
            marks.append("·" if missing or problems else "✗" if missed else "✓")
        if missing:
            verdict = (
                "Not yet: there is nothing to measure."
                if len(missing) == len(results)
                else (f"Not yet: nothing to measure on rank {', '.join(map(str, missing))}.")
            )
        else:
            verdict = " ".join(self.advice) or "Right: every rank meets the target."
        self.solved = not missing and not self.advice
        super().__init__(
            ["", "yours", "target", ""],
            [
                [name, "·" if missing or problems else _text(shown.get(name)), goal.wanted, mark]
                for (name, goal), mark in zip(goals.items(), marks, strict=True)
            ],
            note=verdict,
        )


def turn(number: int, results: Sequence[Mapping[str, Any] | None], goals: Mapping[str, Goal]) -> Verdict:
    """Hold what a reader's code measured against the target.

    Args:
        number: of the turn in its lesson; `try_answers` uses the same goals again.
        results: by rank, the measured values by name (`ranks.get("result")`). None: nothing was written yet.
            `{"problem": sentence}`: nothing could be measured, for this reason.
        goals: by the same names, what they should be.
    """
    _goals[number] = goals
    return Verdict(results, goals)


class Answer(NamedTuple):
    """A solution or a wrong answer, as it stands in a lesson's source."""

    kind: str  # "solution" or "wrong"
    turn: int
    code: str
    raises: str | None  # a part of the error's text


def try_answers(lesson: int, *, folder: Path = SOURCES) -> None:
    """Run the lesson's solutions and its known wrong answers, in copies of the namespaces they belong to.

    Each answer is a cell of the lesson's source with the tag "solution" or "wrong" and the number of its
    turn. It leaves what it measured in a variable `result`; a wrong one may raise an error that it names.

    Args:
        lesson: its number.
        folder: holds the sources of the lessons.

    Raises:
        AssertionError: a solution misses its target, or a wrong answer meets it.
    """
    solved = refused = 0
    for answer in answers(_source(lesson, folder)):
        try:
            verdict = Verdict(_results(answer.code), _goals[answer.turn])
        except Exception as error:
            if answer.raises is None or answer.raises not in str(error):
                raise
            refused += 1
            continue
        if answer.kind == "solution":
            assert verdict.solved, f"The solution of turn {answer.turn} misses its target:\n{verdict}"
            solved += 1
        else:
            assert verdict.advice, f"A wrong answer to turn {answer.turn} meets its target:\n{answer.code}"
            refused += 1
    print(f"Checked: {solved} solutions meet their targets, {refused} wrong answers are refused.")


def run_solution(lesson: int, number: int, *, folder: Path = SOURCES) -> list[Any]:
    """What the solution of a turn measures, by rank: the target as a run of its own, to draw it.

    Args:
        lesson: its number.
        number: of the turn.
        folder: holds the sources of the lessons.
    """
    found = answers(_source(lesson, folder))
    return _results(next(a.code for a in found if (a.kind, a.turn) == ("solution", number)))


def _source(lesson: int, folder: Path) -> str:
    for path in folder.glob(f"{lesson:02d}_*.py"):
        return path.read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"expected the source of lesson {lesson} in {folder}, found none: the solutions are in the "
        "repository, so run the lesson in the folder notebooks of a clone"
    )


def answers(source: str) -> list[Answer]:
    """The answers in a lesson's source."""
    found = []
    for cell in re.split(r"^(?=# %%(?!\w))", source, flags=re.MULTILINE):
        head, _, body = cell.partition("\n")
        if match := _ANSWER.match(head):
            code = "\n".join(_WITH_COMMENT_SIGN.sub("", line) for line in body.strip().splitlines())
            found.append(Answer(match[1], int(match[2]), code, match[3]))
    return found


def run_answer(code: str, namespace: Mapping[str, Any]) -> Any:
    """What the code leaves in `result`. The namespace itself is not changed."""
    scratch = {**namespace, "result": None}
    exec(compile(code, "answer", "exec"), scratch)  # the lesson's own source
    return scratch["result"]


def _results(code: str) -> list[Any]:
    magic, _, body = code.partition("\n")
    if magic.strip() == "%%ranks":
        module = f"__import__({__name__!r}, fromlist=['run_answer'])"
        return ranks.get(f"{module}.run_answer({body!r}, globals())")
    shell = get_ipython()
    return [run_answer(code, {} if shell is None else shell.user_ns)]


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else f"{value:,.1f}" if isinstance(value, float) else str(value)

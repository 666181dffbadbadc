"""Your turn: measure what a reader wrote, and hold the measured values against a target."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from fsdp_utils.lessons.lesson import NOTEBOOKS
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks, tracebacks
from fsdp_utils.notebook.cell import RankError

SOURCES = NOTEBOOKS / "src"
TIMEOUT_S = 10.0  # the longest that a collective of a turn may wait: an answer computes for a second or two

_ANSWER = re.compile(r'^# %% .*tags=\["(solution|wrong)"\].*\bturn=(\d+)(?:.*\braises="(.*)")?')
_OTHERS = re.compile(r"^Meanwhile\n(.+?)\n\n", re.MULTILINE | re.DOTALL)  # where the other ranks stood
_HERE = f"__import__({__name__!r}, fromlist=['measure'])"  # this module, for code on the ranks


# ---- targets and verdicts


@dataclass(frozen=True)
class Goal:
    """The target of one measured value."""

    wanted: str  # the target as it is shown
    meets: Callable[[Any], bool]
    otherwise: str  # advice for who has missed it: what such a value says about the code


def exactly(value: Any, *, otherwise: str) -> Goal:
    """Ask for the value itself, where 8 and 8.0 are the same."""
    return Goal(_text(value), lambda found: bool(found == value), otherwise)


def at_most(value: float, *, otherwise: str) -> Goal:
    """Ask for this value or less."""
    return Goal(f"at most {_text(value)}", lambda found: found <= value, otherwise)


class Verdict(Table):
    """A turn's table of yours beside the target, and what to look at where it was missed."""

    def __init__(self, results: Sequence[Mapping[str, Any] | None], goals: Mapping[str, Goal]) -> None:
        missing = [str(rank) for rank, result in enumerate(results) if result is None]
        found = [result for result in results if result is not None]
        problems = [result["problem"] for result in found if result.get("problem")]
        self.advice: list[str] = [] if missing else problems[:1]
        rows, unmeasured = [], []
        for name, goal in goals.items():
            values = [] if missing or problems else [result.get(name) for result in found]
            measured = [value for value in values if value is not None]
            missed = [value for value in measured if not goal.meets(value)]
            complete = bool(values) and len(measured) == len(values)
            if missed:
                self.advice.append(goal.otherwise)
            elif values and not complete:
                unmeasured.append(name)
            mark = "✗" if missed else "✓" if complete else "·"
            shown = _text([*missed, *measured][0]) if mark != "·" else "·"
            rows.append([name, shown, goal.wanted, mark])
        if unmeasured and not self.advice:
            self.advice.append(f"Not measured: {'; '.join(unmeasured)}.")
        self.solved = not missing and not self.advice
        note = " ".join(self.advice) or "Right: every rank meets the target."
        if missing:
            note = f"Not yet: nothing to measure on rank {', '.join(missing)}."
            if not found:
                note = "Not yet: there is nothing to measure."
        super().__init__(["", "yours", "target", ""], rows, note=note)


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else f"{value:,.1f}" if isinstance(value, float) else str(value)


# ---- a turn in the notebook


@dataclass
class _Turn:
    call: str
    goals: Mapping[str, Goal]
    results: list[Any]  # what the reader's answer gave


_turns: dict[int, _Turn] = {}  # those that were run, by number


def turn(
    number: int,
    call: str,
    goals: Mapping[str, Goal],
    *,
    on_ranks: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Verdict:
    """Measure what a reader wrote, delete it, and hold the measured values against the target.

    Each answer is measured once: where the next answer's cell raises, the one before it cannot pass for it.

    Args:
        number: Number of the turn in its lesson.
        call: The lesson's scoring function and what the reader wrote: `"score(my_save, my_load)"`. It returns
            the measured values by name; `{"problem": sentence}` where there are none, for this reason; None
            where the reader's function returned None.
        goals: By the same names, the targets.
        on_ranks: Whether both are on the ranks, or else in the notebook.
        timeout_s: The longest that a collective may wait.
    """
    now = _turns[number] = _Turn(call, goals, [])
    shell = get_ipython()
    assert shell is not None, "a turn runs in a notebook"
    try:
        if on_ranks:
            asked = ranks.get(f"{_HERE}.not_ready({call!r}, globals())")
            now.results = [result for each in asked for result in each]
            if now.results:
                ranks.get(f"{_HERE}.forget({call!r}, globals())")
            else:
                measuring = f"_measured = {_HERE}.measure({call!r}, globals())"
                shell.run_cell_magic("ranks", f"--timeout {timeout_s:g}", measuring)
                now.results = ranks.get("_measured")
        else:
            now.results = not_ready(call, shell.user_ns) or [measure(call, shell.user_ns)]
            forget(call, shell.user_ns)
    except RankError as error:
        _, cell, place = error.details.partition("in an earlier cell")
        now.results = [_problem(str(error), error.where, cell + place or error.details)]
        if "A collective waits at most" in error.details and (others := _OTHERS.search(error.details)):
            now.results[0]["problem"] += f". Meanwhile {others[1].replace(chr(10), ', ')}."
    except Exception as error:
        if on_ranks:
            raise
        found = tracebacks.describe(error, "")
        said = f"your code raised {found['name']}: {found['message']}"
        now.results = [_problem(said, found["where"], found["text"])]
    return Verdict(now.results, goals)


def _problem(what: str, where: str | None, excerpt: str) -> dict[str, str]:
    print(excerpt)
    return {"problem": f"Nothing to measure: {what}" + (f" ({where})" if where else "")}


def yours(number: int, name: str) -> list[Any]:
    """Return one measured value of the reader's answer to a turn, by rank; [] unless every rank has it."""
    results = _turns[number].results if number in _turns else []
    values = [(result or {}).get(name) for result in results]
    return [] if any(value is None for value in values) else values


# ---- an answer in its namespace: that of a rank, or the notebook's


def forget(call: str, namespace: dict[str, Any]) -> None:
    """Delete an answer, or the parts of it that are there."""
    for name in re.findall(r"\w+", call)[1:]:
        namespace.pop(name, None)


def not_ready(call: str, namespace: Mapping[str, Any]) -> list[dict[str, str] | None]:
    """Return the one result of an answer that cannot be measured yet, or [].

    Asked before any rank begins to score: where one of them has no answer, the others would wait for it.
    """
    score, *names = re.findall(r"\w+", call)
    for name in (score, *names):
        if name not in namespace:
            sentence = f"There is no `{name}`: run the cells of this turn from the first one."
            why = "Each time its cell runs, your code is measured once."
            if name == score:
                why = "After a restart of the ranks or the kernel, begin with the first cell of the lesson."
            return [{"problem": f"{sentence} {why}"}]
    empty = [name for name in names if _is_empty(namespace[name])]
    if len(empty) == len(names):
        return [None]
    return [{"problem": f"`{name}` is still empty."} for name in empty[:1]]


def measure(call: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Score the answer in a namespace, delete it there, and return what `call` (see `turn`) returns."""
    score, *names = re.findall(r"\w+", call)
    try:
        found = namespace[score](*(namespace[name] for name in names))
    finally:
        forget(call, namespace)
    either = " or ".join(f"`{name}`" for name in names)
    return {"problem": f"{either} returned None: is a `return` missing?"} if found is None else found


def _is_empty(part: Any) -> bool:
    """Tell whether a function, or each method of a class but `__init__`, does nothing, as in a stub."""
    if isinstance(part, type):
        methods = [m for name, m in vars(part).items() if isinstance(m, FunctionType) and name != "__init__"]
        return all(map(_is_empty, methods))
    code, nothing = getattr(part, "__code__", None), (lambda: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (nothing.co_code, nothing.co_consts)


def run_answer(code: str, call: str, namespace: Mapping[str, Any]) -> Any:
    """Return what the answer in this code measures, or `{"problem": error}`; the namespace stays as it is."""
    names = re.findall(r"\w+", call)[1:]
    scratch = {name: value for name, value in namespace.items() if name not in names}
    exec(compile(code, "answer", "exec"), scratch)  # the lesson's own source
    assert scratch.keys() >= set(names), f"expected an answer that defines {names}, found:\n{code}"
    try:
        return (not_ready(call, scratch) or [measure(call, scratch)])[0]
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


# ---- the answers in a lesson's source


class Answer(NamedTuple):
    kind: str  # "solution" or "wrong"
    turn: int
    code: str
    raises: str | None  # a part of the error's text


def answers(source: str) -> list[Answer]:
    """Find the answers in the text of a lesson's source."""
    found = []
    for cell in re.split(r"^(?=# %%(?!\w))", source, flags=re.MULTILINE):
        head, _, body = cell.partition("\n")
        if match := _ANSWER.match(head):  # a magic is a comment in the source of a lesson
            code = re.sub(r"^# (?=%%)", "", body.strip(), flags=re.MULTILINE)
            found.append(Answer(match[1], int(match[2]), code, match[3]))
    return found


def try_answers(lesson: int, *, folder: Path = SOURCES) -> None:
    """Run the lesson's solutions and its known wrong answers, in copies of the namespaces they belong to.

    Each answer is a cell of the lesson's source with the tag "solution" or "wrong" and the number of its
    turn, which has been run. A wrong one may name a part of the error that it raises.
    """
    tried = {"solution": 0, "wrong": 0}
    for answer in _answers_of(lesson, folder):
        verdict = Verdict(_results(answer), _turns[answer.turn].goals)
        tried[answer.kind] += 1
        if answer.kind == "solution":
            assert verdict.solved, f"The solution of turn {answer.turn} misses its target:\n{verdict}"
        else:
            assert verdict.advice, f"A wrong answer to turn {answer.turn} meets its target:\n{answer.code}"
            raised = answer.raises or ""
            assert raised in verdict.advice[0], f"expected {raised!r} in the verdict:\n{verdict}"
    solved, refused = tried.values()
    print(f"Checked: {solved} solutions meet their targets, {refused} wrong answers are refused.")


def run_solution(lesson: int, number: int, *, folder: Path = SOURCES) -> list[Any]:
    """Return what the solution of a turn that has been run measures, by rank."""
    found = _answers_of(lesson, folder)
    return _results(next(a for a in found if (a.kind, a.turn) == ("solution", number)))


def _answers_of(lesson: int, folder: Path) -> list[Answer]:
    for path in folder.glob(f"{lesson:02d}_*.py"):
        return answers(path.read_text(encoding="utf-8"))
    raise FileNotFoundError(
        f"expected the source of lesson {lesson} in {folder}, found none: the solutions are in the "
        "repository, so run the lesson in the folder notebooks of a clone"
    )


def _results(answer: Answer) -> list[Any]:
    magic, _, body = answer.code.partition("\n")
    call = _turns[answer.turn].call
    if magic.strip() == "%%ranks":
        return ranks.get(f"{_HERE}.run_answer({body!r}, {call!r}, globals())")
    shell = get_ipython()
    return [run_answer(answer.code, call, {} if shell is None else shell.user_ns)]

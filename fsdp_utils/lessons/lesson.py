"""The table of claims of a lesson, and the checks of its exercises."""

import dis
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from IPython.display import Markdown

_CHECKOUT = Path(__file__).parents[2] / "notebooks"
# where the library is installed without -e, as in Colab: the folder of the notebook that runs
NOTEBOOKS = _CHECKOUT if _CHECKOUT.is_dir() else Path.cwd()


def claims(lesson: int, measured: Mapping[str, str], *, folder: Path = NOTEBOOKS) -> Markdown:
    """Show the claims of a lesson beside what the lesson measured.

    Args:
        lesson: Number of the lesson whose claims in claims.yaml are shown.
        measured: What the lesson's own cells found, in words with the number, by the claim's id.
        folder: Holds claims.yaml.

    Returns:
        A table with one row per claim.

    Raises:
        ValueError: A claim of the lesson was not measured, or something measured is no claim of it.
    """
    rows = [claim for claim in read_claims(folder) if claim["lesson"] == lesson]
    ids = {claim["id"] for claim in rows}
    if ids != set(measured):
        raise ValueError(
            f"lesson {lesson} has the claims {sorted(ids)} in {folder.name}/claims.yaml, but measurements "
            f"were given for {sorted(measured)}. Give each claim its own: claims({lesson}, {{id: text}})."
        )
    return _table(["Claimed", "Measured here"], [[_claimed(claim), measured[claim["id"]]] for claim in rows])


def read_claims(folder: Path = NOTEBOOKS) -> list[dict[str, Any]]:
    """Read the claims that the lessons compare with a measurement.

    Args:
        folder: Holds claims.yaml, whose head describes the fields.

    Returns:
        One dict per claim, in the order of the file.
    """
    return yaml.safe_load((folder / "claims.yaml").read_text(encoding="utf-8"))


def _claimed(claim: Mapping[str, Any]) -> str:
    context = ", ".join(str(claim[field]) for field in ("when", "hardware") if claim.get(field))
    words = claim["claim"] if claim.get("paraphrased") else f"“{claim['claim']}”"
    return f"{words} [{claim['who']}]({claim['url']}), {context}"


def check(yours: Any, spec: Any, *, strict: bool = False) -> Markdown:
    """Compare an answer with what the exercise asks for.

    Numbers are compared as numbers: 1, 1.0, and scalars of NumPy and torch alike, up to rounding.

    Args:
        yours: A function, or a value. None and `...` mean: not answered yet. A function whose body is one of
            them is not called.
        spec: For a function, what it must return, by the tuple of arguments that it is called with.
            For a value, the value.
        strict: Whether a wrong or missing answer raises. The solutions are checked so.

    Returns:
        A table of yours beside the spec, and the verdict.

    Raises:
        AssertionError: strict, and the answer is missing or wrong.
    """
    if callable(yours) and not isinstance(yours, type):
        rows = [_called(yours, *case) for case in spec.items()]
    else:
        rows = [("", yours, spec)]
    rows = [(call, None if mine is ... else mine, asked) for call, mine, asked in rows]
    marks = [_mark(mine, asked) for _, mine, asked in rows]
    open_rows = {mark for mark, (_, _, asked) in zip(marks, rows, strict=True) if asked is not None}
    if open_rows == {"·"}:
        verdict = "**Not yet.** Your answer is still `None`."
    elif set(marks) == {"✓"}:
        verdict = "✓ **Right.**"
    else:
        verdict = f"✗ **Not quite:** {len(marks) - marks.count('✓')} of {len(marks)} differ from the spec."
        verdict += next(filter(None, (_text_for_number(mine, asked) for _, mine, asked in rows)), "")
    table = _table(
        ["", "yours", "spec", ""],
        [
            [_code(call), _code(mine), _code(asked), mark]
            for (call, mine, asked), mark in zip(rows, marks, strict=True)
        ],
    )
    text = f"{verdict}\n\n{table.data}"
    if strict and not verdict.startswith("✓"):
        raise AssertionError(text)
    return Markdown(text)


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], asked: Any) -> tuple[str, Any, Any]:
    call = f"{function.__name__}({', '.join(map(repr, arguments))})"
    if _is_stub(function):
        return call, None, asked
    try:
        return call, function(*arguments), asked
    except Exception as error:  # the reader's own code: whatever it raises is the answer to show
        return call, error, asked


def _is_stub(function: Callable[..., Any]) -> bool:
    """Whether a function does nothing but return None or `...`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    done = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP")]
    names = {step.opname for step in done}
    return names <= {"LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"} and done[0].argval in (None, ...)


def _mark(mine: Any, asked: Any) -> str:
    if _same(mine, asked):
        return "✓"
    return "·" if mine is None else "✗"


def _same(mine: Any, asked: Any) -> bool:
    """Equal, where numbers and tensors may differ by rounding, and tuples may be lists."""
    mine, asked = _plain(mine), _plain(asked)
    if _is_tensor(asked) or _is_tensor(mine):
        return (
            _is_tensor(mine)
            and _is_tensor(asked)
            and mine.dtype == asked.dtype
            and mine.shape == asked.shape
            and mine.allclose(asked)
        )
    if isinstance(asked, list | tuple):
        return (
            isinstance(mine, list | tuple)
            and len(mine) == len(asked)
            and all(_same(a, b) for a, b in zip(mine, asked, strict=True))
        )
    if isinstance(asked, dict):
        return (
            isinstance(mine, dict)
            and mine.keys() == asked.keys()
            and all(_same(mine[k], asked[k]) for k in asked)
        )
    if _is_number(mine) and _is_number(asked):
        if isinstance(mine, int) and isinstance(asked, int):
            return mine == asked
        return math.isclose(mine, asked, rel_tol=1e-6 if isinstance(asked, float) else 1e-12)
    return type(mine) is type(asked) and bool(mine == asked)


def _plain(value: Any) -> Any:
    """Scalars of NumPy and torch as Python's numbers, NumPy's arrays as lists."""
    if type(value).__module__ == "numpy" or (_is_tensor(value) and value.ndim == 0):
        return value.tolist()
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text_for_number(mine: Any, asked: Any) -> str:
    """A sentence about a string given where the spec is a number; "" where the mistake is another."""
    if not isinstance(mine, str) or not _is_number(_plain(asked)):
        return ""
    return f" `{mine!r}` is a string, and the spec is a number: leave out the quotes, or convert it."


def _is_tensor(value: Any) -> bool:
    # without importing torch, for the sake of lessons that need it on the ranks alone
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def _code(value: Any) -> str:
    value = _plain(value)
    text = f"{value:.8g}" if isinstance(value, float) else value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{text}`" if text else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    # all columns aligned left: JupyterLab's own default is right
    lines = [head, [":--"] * len(head), *rows]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))

"""Rebuild the lessons: run each notebooks/src/NN_name.py in a clean kernel, write notebooks/NN_name.ipynb.

    python tools/build_lessons.py            all lessons
    python tools/build_lessons.py 01 04      some of them
    python tools/build_lessons.py --check-twins    run nothing: are source and notebook still the same lesson?

A lesson that fails, or whose outputs hold something that would differ on the next machine, is not written.
"""

import argparse
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
SOURCES = NOTEBOOKS / "src"

CELL_TIMEOUT_S = 120
LARGEST_BYTES = 1_500_000
# What a lesson's kernel runs under, here and under nbval: the same hashes each time, no look at a model hub,
# and every turn tries the answers in the lesson's source.
KERNEL_ENV = {
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "FSDP_TRY_ANSWERS": "1",
}
STORED_RANKS = "4"

# What no output may hold: it differs from one machine or run to the next, or says that something is wrong.
REFUSED = {
    "an absolute path": re.compile(
        r"/(?:home|root|tmp|work|usr|mnt|Users)/[\w.]+|(?<!\w)~/\w+|\b[A-Z]:\\\w+"
    ),
    "a warning": re.compile(r"\b\w*Warning\b"),
    "an object address": re.compile(r"\bat 0x[0-9a-f]{6,}"),
    "a float of more than ten digits": re.compile(r"\d\.\d{11,}"),
}
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Built(NamedTuple):
    lesson: str
    seconds: float
    cells: int
    problems: list[str]


def sources(only: tuple[str, ...] = ()) -> list[Path]:
    """Return the lessons' sources in order; only: the beginnings of the names wanted, such as "01"."""
    return [
        path for path in sorted(SOURCES.glob("[0-9][0-9]_*.py")) if not only or path.name.startswith(only)
    ]


def notebook_of(source: Path) -> Path:
    return NOTEBOOKS / f"{source.stem}.ipynb"


def read_source(source: Path) -> NotebookNode:
    """Return the lesson as a notebook not yet run; ids and metadata come from the source, for small diffs."""
    lesson = jupytext.read(source, fmt="py:percent")
    lesson.cells = [as_published(cell) for cell in lesson.cells if not {"right", "wrong"} & {*tags_of(cell)}]
    for index, cell in enumerate(lesson.cells):
        cell.id = f"{source.stem[:2]}-{index:03d}"
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter")})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=lesson.cells, metadata=metadata)


def tags_of(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def as_published(cell: NotebookNode) -> NotebookNode:
    """Make the solution of a turn a text that every viewer folds; fold the card and checks."""
    if "solution" in tags_of(cell) and "turn" in cell.metadata:
        code = f"```python\n{cell.source}\n```"
        text = f"<details><summary>Solution</summary>\n\n{code}\n\n</details>"
        return nbformat.v4.new_markdown_cell(text, metadata={"tags": ["solution"]})
    if {"check", "card"} & {*tags_of(cell)}:
        cell.metadata["jupyter"] = {"source_hidden": True}
    return cell


def code_cells(lesson: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in lesson.cells if cell.cell_type == "code"]


def twin_problems(source: Path) -> list[str]:
    """Say where a source and its notebook are not the same lesson."""
    if not notebook_of(source).exists():
        return [f"{notebook_of(source).name} does not exist: run make lessons ONLY={source.stem[:2]}"]
    ours, theirs = read_source(source).cells, nbformat.read(notebook_of(source), as_version=4).cells
    if len(ours) != len(theirs):
        return [f"{len(ours)} cells in the source, {len(theirs)} in the notebook"]
    return [
        f"{place(our)}: {what} differs between source and notebook"
        for our, their in zip(ours, theirs, strict=True)
        for what in ("id", "cell_type", "source", "metadata")
        if our[what] != their[what]
    ]


def place(cell: NotebookNode) -> str:
    first_line = cell.source.strip().split("\n", 1)[0]
    return f"cell {cell.get('id')} ({first_line[:40]})"


def notebook_problems(lesson: NotebookNode) -> list[str]:
    """Say what keeps an executed lesson from being published."""
    cells = code_cells(lesson)
    problems = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        problems.append("its code cells were not all executed, in order, in a clean kernel")
    if not any(re.search(r"^\s*(from|import) fsdp_utils\b", cell.source, re.MULTILINE) for cell in cells):
        problems.append("it does not import fsdp_utils")
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags_of(cell):
                problems.append(f"{place(cell)}: ends in {output.ename}: {output.evalue}")
            for text in output_texts(output):
                for what, pattern in REFUSED.items():
                    if found := pattern.search(text):
                        problems.append(f"{place(cell)}: its output holds {what}: {found[0][:60]}")
    size = len(nbformat.writes(lesson))
    if size > LARGEST_BYTES:
        problems.append(
            f"its notebook has {size / 1e6:.1f} MB, at most {LARGEST_BYTES / 1e6:.1f} are allowed"
        )
    return problems


def output_texts(output: NotebookNode) -> Iterator[str]:
    """Yield everything in an output that a reader reads as text, without colours."""
    if output.output_type == "stream":
        yield ANSI_COLOUR.sub("", output.text)
    elif output.output_type == "error":
        yield ANSI_COLOUR.sub("", "\n".join([output.evalue, *output.traceback]))
    else:
        yield from (str(data) for mime, data in output.data.items() if mime.startswith("text/"))


def tidy(lesson: NotebookNode) -> None:
    """Remove where, when and in how many pieces the outputs came."""
    for cell in code_cells(lesson):
        cell.metadata.pop("execution", None)
        merged: list[NotebookNode] = []
        for output in cell.outputs:
            if output.output_type == "error":
                output.traceback = [without_places(line) for line in output.traceback]
            if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
                merged[-1].text += output.text
            else:
                merged.append(output)
        cell.outputs = merged
    lesson.metadata.language_info = {"name": "python"}


def without_places(line: str) -> str:
    """Name the files of a traceback's line from the repository, site-packages or the library on."""
    paths, home = sysconfig.get_paths(), str(Path.home())
    for folder in (paths["purelib"], paths["platlib"], paths["stdlib"], str(ROOT)):
        line = line.replace(folder + os.sep, "")
        if folder.startswith(home):  # IPython writes ~ for the home directory
            line = line.replace("~" + folder[len(home) :] + os.sep, "")
    return line


def build(source: Path, on_cell: Callable[[], object]) -> Built:
    """Run a lesson and write its notebook if nothing is wrong with it; on_cell is called after each cell."""
    lesson = read_source(source)
    client = NotebookClient(
        lesson,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False,
        on_cell_executed=lambda **_: on_cell(),
    )
    problems, started = [], time.perf_counter()
    try:
        client.execute()
    except CellExecutionError as error:
        tqdm.write(str(error), file=sys.stderr)  # notebook_problems names the cell
    except (CellTimeoutError, DeadKernelError) as error:
        problems.append(str(error))
    seconds = time.perf_counter() - started
    tidy(lesson)
    problems += notebook_problems(lesson)
    if not problems:
        nbformat.write(lesson, notebook_of(source))
    return Built(source.stem, seconds, len(code_cells(lesson)), problems)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Rebuild the lessons.")
    parser.add_argument("only", nargs="*", help="the beginnings of the names wanted, such as 01")
    parser.add_argument("--check-twins", action="store_true", help="only compare sources with notebooks")
    args = parser.parse_args()
    chosen = sources(tuple(args.only))
    if not chosen:
        sys.exit(f"No lesson in notebooks/src begins with {' or '.join(args.only) or 'two digits'}.")
    if args.check_twins:
        problems = [f"{source.stem}: {problem}" for source in chosen for problem in twin_problems(source)]
        print("\n".join(problems) or f"{len(chosen)} lessons: source and notebook agree")
        return bool(problems)

    os.environ.update(KERNEL_ENV, FSDP_RANKS=STORED_RANKS)
    total = sum(len(code_cells(read_source(source))) for source in chosen)
    results = []
    with tqdm(total=total, unit="cell", disable=None) as bar:
        for source in chosen:
            bar.set_description(source.stem)
            results.append(build(source, bar.update))
    print(f"{'lesson':50}  seconds  cells  result")
    for lesson, seconds, cells, problems in results:
        print(f"{lesson:50}  {seconds:7.1f}  {cells:5d}  {'FAIL' if problems else 'pass'}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return any(result.problems for result in results)


if __name__ == "__main__":
    sys.exit(main())

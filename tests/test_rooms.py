"""The rooms of fsdp_utils: imports go down only, no copies, and each room keeps to its size."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp_utils"
FILES = {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
# A room imports only rooms of a lower level.
LEVEL = {
    "torch_internals": 0,
    "answers": 0,
    "distributed": 1,
    "sharding": 2,
    **dict.fromkeys(
        ["memory", "allocator", "checkpoint", "collectives", "child_tuning", "precision", "migration"], 3
    ),
    **dict.fromkeys(["pretrained", "planner"], 4),
    **dict.fromkeys(["train", "integrations"], 5),
    "notebook": 6,
    "doctor": 6,
    "lessons": 7,
}
# Lines of a room, with docstrings. The first rooms have reached their aim, a budget and a tenth. The others
# only get fewer on the way to theirs, the second number.
MOST_LINES = {
    "answers": 182,
    "doctor": 1236,  # 900
    "allocator": 612,
    "lessons": 1464,  # 1,300
    "memory": 760,
    "notebook": 1428,
    "precision": 260,
    "torch_internals": 383,
    "checkpoint": 2094,  # 1760
    "child_tuning": 537,  # 495
    "collectives": 1865,  # 1980
    "distributed": 968,  # 880
    "integrations": 367,  # 275
    "migration": 690,  # 660
    "planner": 1665,  # 1760
    "pretrained": 446,
    "sharding": 991,  # 770
    "train": 1052,
    "all together": 17_164,  # 15,000
}
# Modules inside rooms that lessons and users import by name too.
BY_NAME = (
    "fsdp_utils.lessons.",
    "fsdp_utils.notebook.",
    "fsdp_utils.integrations.lightning",
    "fsdp_utils.integrations.transformers",
)
# Tests that import other files inside rooms: the list only gets shorter.
INSIDE = {
    "test_torch_internals.py": "fsdp_utils.torch_internals.",  # private names of torch, which it is a test of
    "conftest.py": "fsdp_utils.distributed.launch",  # to import once what nearly all ranks of the tests need
    "recipe_ranks.py": "fsdp_utils.distributed.launch",  # as above
}


def imports(file: Path) -> set[str]:
    """Return the modules and names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PUBLIC = {  # the names of `fsdp_utils` itself: their rooms
    alias.name: str(node.module).split(".")[1]
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}


def rooms_of(file: Path) -> set[str]:
    """Return the rooms that a file imports."""
    names = {module.split(".")[1] for module in imports(file) if module.startswith("fsdp_utils.")}
    return {PUBLIC.get(name, name) for name in names} & {*ROOMS}


def test_a_room_imports_only_rooms_below_it_so_there_is_no_circle() -> None:
    upwards = [
        f"{file.relative_to(ROOT)} imports {there}"
        for file in FILES
        if file.stem != "__main__" and (here := file.parent.name) in ROOMS  # command lines stand above all
        for there in sorted(rooms_of(file) - {here})
        if LEVEL[there] >= LEVEL[here]
    ]
    assert upwards == []


def test_importing_the_library_imports_no_torch() -> None:
    code = "import sys, fsdp_utils; from fsdp_utils.torch_internals import fsdp, groups, names, runtime; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_tests_import_what_rooms_make_public() -> None:
    """A command line, `fsdp_utils.<room>.__main__`, is public too."""
    inside = {
        f"{file.name}: {module}"
        for file in (ROOT / "tests").glob("*.py")
        for module in imports(file)
        if module.startswith("fsdp_utils.")
        and module.count(".") > 1
        and (ROOT / f"{module.replace('.', '/')}.py").exists()
        and not module.endswith(".__main__")
        and not module.startswith((*BY_NAME, INSIDE.get(file.name, "none")))
    }
    assert sorted(inside) == []
    assert [name for name in INSIDE if not (ROOT / "tests" / name).exists()] == []


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank, an import or a part of a docstring."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and number not in left_out:
            yield number, line.strip()


def test_no_two_places_share_ten_equal_lines() -> None:
    seen: dict[tuple[str, ...], str] = {}
    twice = []
    for file, text in FILES.items():
        lines = list(code_lines(text))
        for start in range(len(lines) - 9):
            window = tuple(line for _, line in lines[start : start + 10])
            place = f"{file.relative_to(ROOT)}:{lines[start][0]}"
            if seen.setdefault(window, place) != place:
                twice.append(f"{seen[window]} and {place}")
    assert twice == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_in_six_lines_what_it_is_for(name: str) -> None:
    said = ast.get_docstring(ast.parse(FILES[PACKAGE / name / "__init__.py"]))
    assert said is not None
    assert 1 <= len(said.splitlines()) <= 6


def test_the_rooms_keep_to_their_sizes() -> None:
    lines = dict.fromkeys(ROOMS, 0)
    for file, text in FILES.items():
        if file.parent.name in lines:
            lines[file.parent.name] += len(text.splitlines())
    lines["all together"] = sum(len(text.splitlines()) for text in FILES.values())
    print(lines)
    assert {room: count for room, count in lines.items() if count > MOST_LINES[room]} == {}

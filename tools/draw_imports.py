"""Draw which room of fsdp_utils imports which, from the real imports, into CONTRIBUTING.md.

python tools/draw_imports.py            writes the diagram (Mermaid, which code hosts draw)
An arrow that follows from two others is left out. tests/test_rooms.py compares the diagram with the imports.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp_utils"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- drawn by tools/draw_imports.py -->\n", "<!-- end of the drawing -->\n"


def modules() -> dict[str, Path]:
    """Each module's dotted name and file."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, names: dict[str, Path]) -> set[str]:
    """The modules of fsdp_utils that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in names else node.module for name in inside}
    return {name for name in found if name.split(".")[0] == "fsdp_utils"}


def room(module: str) -> str:
    """The folder of fsdp_utils that holds a module; for the files beside the folders, their own name."""
    return ([*module.split("."), ""])[1]


def room_imports() -> dict[str, set[str]]:
    """Which rooms each room imports. Command lines (__main__.py) stand above all rooms and are left out."""
    names = modules()
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        if file.stem == "__main__" or not room(name) or not (PACKAGE / room(name)).is_dir():
            continue
        others = {room(other) for other in imports(file, names)}
        graph.setdefault(room(name), set()).update(others - {room(name), "_lazy", ""})
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def drawing() -> str:
    """The diagram in Mermaid's language, with its fence."""
    graph = room_imports()
    lines = ["```mermaid", "graph TD"]
    for name in sorted(graph):
        implied = {far for near in graph[name] for far in reachable(graph, near)}
        lines += [f"    {name} --> {other}" for other in sorted(graph[name] - implied)] or [f"    {name}"]
    return "\n".join([*lines, "```", ""])


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + drawing() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()

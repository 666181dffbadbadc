"""Build the book, book/_build/html, from the executed lessons, the other pages and the library's docstrings.

    python tools/build_book.py

Nothing is run again. Any warning of Sphinx is an error, a link that leads nowhere among them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from book.first_figure import html as first_figure
from fsdp_utils._commands import COMMANDS
from tools import answers_page

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "book" / "_build"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGEST_BYTES = 40 * 2**20
AXE = (
    BUILD / "node_modules" / "axe-core" / "axe.min.js"
)  # checks contrast and structure by WCAG, in tests/test_book.py


def jupyter_anchor(title: str) -> str:
    """Return a heading's anchor as JupyterLab makes it."""
    return title.replace(" ", "-")


def copy_sources(sources: Path) -> None:
    """Copy the book's pages and all that lessons link to into one folder, under the same relative names."""
    built = shutil.ignore_patterns("__pycache__", BUILD.name, ".ipynb_checkpoints")
    shutil.copytree(ROOT / "book", sources, ignore=built)
    folders = (".ci", "benchmarks", "book", "examples", "fsdp_utils", "locks", "notebooks", "tests", "tools")
    for folder in folders:
        shutil.copytree(ROOT / folder, sources / folder, ignore=built)
    for pattern in ("*.md", "*.txt", "*.yml", "LICENSE", "Makefile"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, sources)
    answers = sources / "notebooks" / answers_page.PAGE.name
    text = answers.read_text(encoding="utf-8")
    for title in re.findall(r"^### (.*)$", text, re.MULTILINE):  # GitHub makes other anchors
        text = text.replace(f"](#{answers_page.anchor(title)})", f"](#{jupyter_anchor(title)})")
    answers.write_text(text, encoding="utf-8")
    own = {path.name for path in (ROOT / "book").glob("*.md")}
    for page in sources.glob("*.md"):  # the book's own pages stand beside the others here
        link = "](../" if page.name in own else "](book/"
        page.write_text(page.read_text(encoding="utf-8").replace(link, "]("), encoding="utf-8")


def write_help(folder: Path) -> None:
    """Write the help of each command line into a file."""
    for name in ("fsdp_utils", *(module for module, _ in COMMANDS.values())):
        with (folder / f"{name.rpartition('.')[2]}.txt").open("w") as file:
            command, environment = [sys.executable, "-m", name, "--help"], {**os.environ, "COLUMNS": "100"}
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, check=True, timeout=120)


def print_page(page: Path, pdf: Path) -> None:
    """Let Chromium print a page of the book."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
        files = [f"--user-data-dir={profile}", f"--print-to-pdf={pdf}", page.as_uri()]
        subprocess.run([str(CHROMIUM), *options, *files], check=True, capture_output=True, timeout=120)


def fetch_axe() -> None:
    """Fetch axe-core where there is npm; without it, or offline, the test that needs it is skipped."""
    if npm := shutil.which("npm"):
        command = [npm, "install", "--silent", "--ignore-scripts", "--prefix", str(BUILD), "axe-core@4.14.1"]
        subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=120)


def main() -> int:
    sources, html = BUILD / "sources", BUILD / "html"
    shutil.rmtree(BUILD, ignore_errors=True)
    copy_sources(sources)
    write_help(sources / "reference")
    (sources / "first_figure.html").write_text(first_figure(), encoding="utf-8")
    options = ["--builder=html", "--fail-on-warning", "--keep-going", "--jobs=auto", "--quiet"]
    if CHROMIUM:
        options.append("--tag=pdf")  # the cheat sheet links to itself as PDF
    command = [sys.executable, "-m", "sphinx", *options, f"--doctree-dir={BUILD / 'doctrees'}"]
    if status := subprocess.run([*command, str(sources), str(html)], cwd=ROOT, timeout=900).returncode:
        return status
    if CHROMIUM:
        print_page(html / "cheat_sheet.html", html / "cheat_sheet.pdf")
        fetch_axe()
    size = sum(path.stat().st_size for path in html.rglob("*") if path.is_file())
    print(f"{html / 'index.html'}: {len([*html.rglob('*.html')])} pages, {size / 2**20:.0f} MiB")
    if size > LARGEST_BYTES:
        print(f"expected at most {LARGEST_BYTES / 2**20:.0f} MiB: is a large output or a copied file in it?")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

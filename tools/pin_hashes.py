"""Write locks/setup.txt: the versions of constraints.txt, with the hashes of their files on the index.

And of what locks/book.in and locks/tests.in bring in beside it, locks/book.txt and locks/tests.txt.

    python tools/pin_hashes.py

Needs uv (https://docs.astral.sh/uv/), which reads the index and downloads no package.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILE = (
    "uv pip compile --universal --generate-hashes --constraints constraints.txt "
    "--no-annotate --no-header --quiet"
)
HEADER = """\
# The versions of constraints.txt and the hashes of their files: `make setup` installs no file with another.
# PyTorch and the packages that only its CUDA builds need are not listed, and come without a hash: an index
# may serve a CPU build or a CUDA build under the one version. Written by tools/pin_hashes.py.
"""
BESIDES = "# What `make {}` installs beside setup.txt{}. Written by tools/pin_hashes.py.\n"
EXTRAS = ["--extra", "notebooks", "--extra", "train", "--extra", "test"]
BUILDS = re.compile(r"(torch==|triton|nvidia-|cuda-)")  # what depends on the build of PyTorch


def compiled(*args: str) -> dict[str, str]:
    """Return what uv works out: "name==version" -> its lines, with the hashes."""
    command = [*COMPILE.split(), *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"uv could not work out the hashes: {done.stderr.strip()}")
    return {text.split(" ")[0]: text for text in re.findall(r"^\S.*(?:\n +.*)*\n", done.stdout, re.MULTILINE)}


def write(name: str, header: str, packages: list[str]) -> None:
    (ROOT / "locks" / f"{name}.txt").write_text(header + "".join(packages))
    print(f"{name}: {len(packages)} packages, {''.join(packages).count('--hash')} hashes")


def main() -> None:
    pinned = {line.split(" ")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    # not what only runs in a browser, which uv lists, too
    found = compiled("pyproject.toml", *EXTRAS, "--python-version", "3.10")
    kept = {name: text for name, text in found.items() if name in pinned and not BUILDS.match(name)}
    write("setup", HEADER, [*kept.values()])
    # by name, version and marker: what the first file has for Python 3.10 alone is missing on 3.11
    ours = {text.partition(" \\")[0] for text in kept.values()}
    for name, made, python in (
        ("book", ("book", ", for Python 3.11 to 3.13"), "3.11"),
        ("tests", ("test", ""), "3.10"),
    ):
        found = compiled(f"locks/{name}.in", "--python-version", python).values()
        others = [t for t in found if t.partition(" \\")[0] not in ours and not BUILDS.match(t)]
        write(name, BESIDES.format(*made), others)


if __name__ == "__main__":
    main()

"""Write requirements.txt: the versions of constraints.txt, with the hashes of their files on the index.

    python tools/pin_hashes.py

Needs uv (https://docs.astral.sh/uv/), which reads the index and downloads no package.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILE = "uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --generate-hashes"
OPTIONS = "--no-annotate --no-header --quiet --constraints constraints.txt"
HEADER = """\
# The versions of constraints.txt and the hashes of their files: `make setup` installs no file with another.
# PyTorch and the packages that only its CUDA builds need are not listed, and come without a hash: an index
# may serve a CPU build or a CUDA build under the one version. Written by tools/pin_hashes.py.
"""
BUILDS = re.compile(r"(torch|triton|nvidia-|cuda-)")  # what depends on the build of PyTorch


def main() -> None:
    done = subprocess.run([*COMPILE.split(), *OPTIONS.split()], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"uv could not work out the hashes: {done.stderr.strip()}")
    packages = re.findall(r"^\S.*(?:\n +.*)*\n", done.stdout, re.MULTILINE)
    pinned = {line.split(" ")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    # not what only runs in a browser, which uv lists, too
    kept = [text for text in packages if text.split(" ")[0] in pinned and not BUILDS.match(text)]
    (ROOT / "requirements.txt").write_text(HEADER + "".join(kept))
    print(f"requirements.txt: {len(kept)} packages, {''.join(kept).count('--hash')} hashes")


if __name__ == "__main__":
    main()

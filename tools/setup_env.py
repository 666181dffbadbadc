"""Make or refresh .venv with the versions of constraints.txt; instant when nothing has changed.

First comes what locks/setup.txt lists, each file checked against its hash; then PyTorch, and this project.

Run by make with whatever Python the reader has. So that a Python too old to run it can still
read it and say so, the whole file keeps to the syntax of Python 3.6, and to the standard library.
"""

import sys

OLDEST = (3, 10)
if sys.version_info < OLDEST:
    sys.exit(
        "Python {}.{}.{} ({}) is too old: {}.{} or later is needed. Name another one, for example: "
        "make lab PYTHON=python3.12".format(*sys.version_info[:3], sys.executable, *OLDEST)
    )

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
INPUTS = ("pyproject.toml", "constraints.txt", "locks/setup.txt")
STAMP = VENV / "made-from"  # written last: a set-up that was cut short has none, and starts anew
LOG = VENV / "setup.log"
VERSION = "{}.{}".format(*sys.version_info)

TOO_LITTLE_MIB = 16  # a disk with less left than this, after a failure, is what caused it
# what pip prints once it has given up on the package index
UNREACHABLE = ("Retry(total=0", "ReadTimeoutError", "IncompleteRead", "ConnectionResetError")


def main() -> None:
    # what .venv must have been made from: this Python, this place, these requirements
    digest = hashlib.sha256(str(ROOT).encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    wanted = f"{VERSION} {digest.hexdigest()}"
    found = STAMP.read_text() if STAMP.exists() and VENV_PYTHON.exists() else ""
    if wanted == found:
        return
    if found.split(" ")[0] == VERSION:
        print("Refreshing .venv: {} or {} has changed".format(", ".join(INPUTS[:-1]), INPUTS[-1]), flush=True)
        STAMP.unlink()
    else:
        print(f"Making .venv with Python {VERSION}: a few minutes, most of them for PyTorch", flush=True)
        make_venv()
    pip = ("-m", "pip", "install", "--progress-bar=off")
    run(*pip, "--require-hashes", "--no-deps", "-r", "locks/setup.txt", doing="installing")
    # -e: a change in fsdp_utils/ needs no second installation; setuptools, which builds it, is there now
    project = ("--no-build-isolation", "-e", ".[notebooks,train,test]")
    run(*pip, "-c", "constraints.txt", *project, doing="installing")
    STAMP.write_text(wanted)


def make_venv() -> None:
    try:
        import ensurepip  # noqa: F401  Debian's python3 comes without these two
        import venv  # noqa: F401
    except ImportError as missing:
        sys.exit(
            f"Python {VERSION} ({sys.executable}) lacks the module {missing.name!r}, which makes virtual "
            f"environments; on Debian or Ubuntu: sudo apt install python{VERSION}-venv"
        )
    base = getattr(sys, "_base_executable", sys.executable)  # sys.executable may be the .venv to be replaced
    run("-m", "venv", "--clear", "--without-pip", str(VENV), doing="making .venv", python=base)
    run("-m", "ensurepip", "--default-pip", doing="putting pip into .venv")


def run(*args: str, doing: str, python: str = str(VENV_PYTHON)) -> None:
    """Run Python in ROOT and show its larger downloads; if it fails, leave with one sentence and a log."""
    lines = []
    env = {**os.environ, "PIP_BUILD_CONSTRAINT": "constraints.txt", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([python, *args], cwd=ROOT, env=env, **together) as process:
        for line in process.stdout or ():
            lines.append(line)
            if "Downloading" in line and line.rstrip().endswith("MB)"):  # what one waits for
                print("  " + line.strip()[:100], flush=True)
    if process.returncode != 0:
        sys.exit(why_it_failed(lines, doing))


def why_it_failed(lines: "list[str]", doing: str) -> str:
    output = "".join(lines)
    places = (ROOT, Path(tempfile.gettempdir()))
    refused = any(f"[Errno {code}]" in output for code in (errno.ENOSPC, errno.EDQUOT))
    if refused or any(shutil.disk_usage(place).free < TOO_LITTLE_MIB * 2**20 for place in places):
        return f"The disk is full ({doing} stopped): make room in {places[0]} or {places[1]}, then try again."
    LOG.write_text(output)
    errors = [line.strip() for line in lines if line.lstrip().lower().startswith("error")]
    told = "{} failed: {}".format(doing.capitalize(), " ".join(errors[-3:]))
    if any(sign in output for sign in UNREACHABLE):
        told = f"The package index cannot be reached ({doing} stopped): check the network, then try again."
    return f"{told} Log: {LOG}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.exit(f"The disk is full: make room in {ROOT}, then try again.")
        sys.exit(f"Cannot set up .venv: {error}")

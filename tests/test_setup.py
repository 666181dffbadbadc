"""tools/setup_env.py and the Makefile under the faults that a stranger's machine has."""

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = "tools/setup_env.py"

# Stands in for the real package and its hundreds of megabytes; pip builds it without any download.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import zipfile

METADATA = "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n"
METADATA += "".join("Provides-Extra: " + extra + "\\n" for extra in ("notebooks", "train", "test"))
METADATA += "REQUIRES"
WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/tiny-1-py3-none-any.whl", "w") as wheel:
        for file, text in {"METADATA": METADATA, "WHEEL": WHEEL, "RECORD": ""}.items():
            wheel.writestr("tiny-1.dist-info/" + file, text)
        wheel.writestr("tiny.py", "")
    return "tiny-1-py3-none-any.whl"
"""


def project(folder: Path) -> Path:
    """Make a small project that is set up as this one is."""
    for part in ("tools", "locks"):
        (folder / part).mkdir(parents=True)
    shutil.copy(ROOT / SETUP, folder / SETUP)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for empty in ("constraints.txt", "locks/setup.txt"):
        (folder / empty).write_text("")
    (folder / "backend.py").write_text(BACKEND.replace("REQUIRES", ""))
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return project(tmp_path / "a clone")  # with a space in its name


@pytest.fixture(scope="module")
def set_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that make has set up from nothing."""
    folder = project(tmp_path_factory.mktemp("projects") / "a clone")
    makes(folder, "Making .venv")
    return folder


@pytest.fixture
def made(clone: Path, set_up: Path) -> Path:
    """The clone with a .venv that something has changed since it was made."""
    shutil.copytree(set_up / ".venv", clone / ".venv", symlinks=True)
    outdated(clone)
    return clone


def makes(folder: Path, told: str) -> None:
    done = run(["make", "setup", f"PYTHON={sys.executable}"], folder)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def outdated(clone: Path) -> None:
    (clone / ".venv" / "made-from").write_text("{}.{} of old".format(*sys.version_info))


def run(command: list[str], clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    return subprocess.run(
        command,
        cwd=clone,
        env={**plain, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def run_setup(clone: Path, fault: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run setup_env.py after the statement `fault` has spoilt something in its process."""
    code = f"import runpy, sys; {fault or 'pass'}; runpy.run_path({SETUP!r}, run_name='__main__')"
    return run([sys.executable, "-c", code], clone, **env)


def the_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What a set-up that failed said: one line, no traceback."""
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr.strip()


def test_python_too_old_reads_the_script_and_is_told_both_versions(clone: Path) -> None:
    ast.parse((ROOT / SETUP).read_text(), feature_version=(3, 6))
    said = the_sentence(run_setup(clone, "sys.version_info = (3, 9, 18, 'final', 0)"))
    assert "Python 3.9.18" in said
    assert "3.10 or later is needed" in said


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_missing_venv_module_is_said_with_what_to_install(clone: Path, module: str) -> None:
    said = the_sentence(run_setup(clone, f"sys.modules[{module!r}] = None"))
    version = "{}.{}".format(*sys.version_info)
    assert f"lacks the module {module!r}" in said
    assert f"sudo apt install python{version}-venv" in said
    assert not (clone / ".venv").exists()


def test_no_network_is_said(made: Path) -> None:
    (made / "backend.py").write_text(BACKEND.replace("REQUIRES", "Requires-Dist: some-package\\n"))
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}/simple"
        done = run_setup(made, PIP_NO_INDEX="0", PIP_INDEX_URL=index, PIP_RETRIES="1")
    assert "The package index cannot be reached (installing stopped): check the network" in the_sentence(done)
    assert "some-package" in (made / ".venv" / "setup.log").read_text()


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (
            BACKEND.replace("REQUIRES", "Requires-Dist: some-package\\n"),
            "distribution found for some-package",
        ),
        ("raise OSError(28, 'No space left on device')", "The disk is full (installing stopped)"),
    ],
)
def test_another_failure_of_pip_is_said_in_its_own_words(made: Path, backend: str, told: str) -> None:
    (made / "backend.py").write_text(backend)
    assert told in the_sentence(run_setup(made))
    assert not (made / ".venv" / "made-from").exists()


def test_a_package_without_a_hash_is_refused(made: Path) -> None:
    build: dict[str, Any] = {}
    exec(BACKEND.replace("tiny", "stranger").replace("REQUIRES", ""), build)
    build["build_editable"](str(made))
    (made / "locks" / "setup.txt").write_text("stranger==1\n")
    assert "Hashes are required" in the_sentence(run_setup(made, PIP_FIND_LINKS=made.as_uri()))


def test_make_sets_up_once_refreshes_after_a_change_and_mends_a_set_up_cut_short(set_up: Path) -> None:
    stamp = set_up / ".venv" / "made-from"
    assert run([str(set_up / ".venv/bin/python"), "-c", "import tiny"], set_up).returncode == 0

    made = stamp.stat().st_mtime_ns
    second = run(["make", "setup"], set_up)  # with the Python of .venv itself
    assert (second.returncode, second.stdout) == (0, "")
    assert stamp.stat().st_mtime_ns == made

    (set_up / "constraints.txt").write_text("some-package==1\n")
    makes(set_up, "Refreshing .venv")
    stamp.unlink()
    (set_up / ".venv" / "pyvenv.cfg").unlink()
    makes(set_up, "Making .venv")
    done = run(["make", "setup", "PYTHON=no-such-python"], set_up)
    assert done.returncode != 0
    assert "There is no command no-such-python" in done.stdout

"""The package as others get it: an sdist and a wheel, each installed into a clean environment.

Nothing is downloaded: what fsdp_utils depends on is lent to the clean environments by this one. So this does
not show that an index has versions of the dependencies that go together; test_docs.py holds them against
constraints.txt.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import fsdp_utils

ROOT = Path(__file__).resolve().parent.parent
NAMES = """
from importlib import metadata
import fsdp_utils
print(fsdp_utils.__file__)
print(fsdp_utils.__version__, metadata.version("fsdp_utils"))
for name in {names}:
    getattr(fsdp_utils, name)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it, of a copy of the package's files."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "fsdp_utils", copy / "fsdp_utils", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ".", cwd=copy)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def installed(package: Path, folder: Path) -> Path:
    """The Python of a clean environment with the package in it, and this environment's packages behind it."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    # what a .pth file names comes after site-packages, and .pth files there (our editable one) stay unread
    (site / "zz.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", package, cwd=folder)
    return python


def test_the_wheel_works_and_the_sdist_installs_the_same_files(
    built: dict[str, Path], tmp_path: Path
) -> None:
    python = installed(built["wheel"], tmp_path / "wheel")
    said = run(python, "-W", "error", "-c", NAMES.format(names=fsdp_utils.__all__), cwd=tmp_path).splitlines()
    assert Path(said[0]).is_relative_to(tmp_path)
    assert said[1:] == [f"{fsdp_utils.__version__} {fsdp_utils.__version__}"]

    installed(built["sdist"], tmp_path / "sdist")
    files = {
        kind: {
            path.relative_to(tmp_path / kind).as_posix()
            for path in (tmp_path / kind).rglob("fsdp_utils/**/*")
            if path.is_file() and path.suffix != ".pyc"
        }
        for kind in built
    }
    assert files["wheel"] == files["sdist"]
    data = (
        "__init__.pyi",
        "collectives/player.js",
        "lessons/plan_grid.json",
        "lessons/sliders.js",
        "py.typed",
    )
    besides = {f"fsdp_utils/{name}" for name in data}
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_utils").rglob("*.py")}
    assert {path.partition("site-packages/")[2] for path in files["wheel"]} == ours | besides

"""The package as others get it: a wheel from an sdist, installed into a clean environment.

Nothing is downloaded: this environment lends the clean one what fsdp_utils depends on, and nothing else. So
this does not show that an index has versions of the dependencies that go together; test_docs.py holds them
against constraints.txt.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import fsdp_utils

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://example.org/lessons"
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-index", "--no-deps")
NAMES = """
from importlib import metadata
import fsdp_utils
print(fsdp_utils.__file__)
print(fsdp_utils.__version__, metadata.version("fsdp_utils"))
for name in {names}:
    getattr(fsdp_utils, name)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    environment = {**os.environ, **environment}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist of a copy of the package's files."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "fsdp_utils", copy / "fsdp_utils", ignore=shutil.ignore_patterns("__pycache__"))
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ".")
    run(*build, cwd=copy, REPOSITORY=ADDRESS, REVISION="v1")
    (found,) = out.glob("*.whl")
    return found


def required(package: Distribution, seen: set[str]) -> Iterator[Distribution]:
    """Everything that a plain install of the package brings in."""
    for requirement in map(Requirement, package.requires or ()):
        if requirement.name not in seen and (not requirement.marker or requirement.marker.evaluate()):
            seen.add(requirement.name)
            yield (found := distribution(requirement.name))
            yield from required(found, seen)


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it depends on: `pip install`, without an extra."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    run(*PIP, "--target", site, wheel, cwd=folder)
    (ours,) = site.glob("fsdp_utils-*.dist-info")
    for needed in required(Distribution.at(ours), set()):
        for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(needed.locate_file(name))))
    return python


def test_a_plain_install_has_every_public_name(plain: Path, tmp_path: Path) -> None:
    said = run(plain, "-W", "error", "-c", NAMES.format(names=fsdp_utils.__all__), cwd=tmp_path).splitlines()
    assert Path(said[0]).is_relative_to(plain.parents[1])
    assert said[1:] == [f"{fsdp_utils.__version__} {fsdp_utils.__version__}"]


def test_a_plain_install_explains_an_error(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "traceback.txt").write_text("ValueError: Cannot flatten integer dtype tensors")
    with (tmp_path / "traceback.txt").open() as text:
        command = [plain, "-m", "fsdp_utils", "explain"]
        said = subprocess.run(command, stdin=text, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.stdout.startswith("cannot-flatten-integer-dtype")


PAGES = (ROOT / "README.md").read_text() + (ROOT / "book/library.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGES, re.M | re.S)


@pytest.mark.timeout(300)  # some seconds where the cores are free
def test_the_snippets_of_the_readme_print_what_they_say_in_a_plain_install(
    plain: Path, tmp_path: Path
) -> None:
    files = [tmp_path / f"snippet_{number}.py" for number in range(len(SNIPPETS))]
    for file, text in zip(files, SNIPPETS, strict=True):
        file.write_text(text)
    one_by_one = "import runpy, sys\nfor file in sys.argv[1:]: runpy.run_path(file, run_name='__main__')"
    printed = run(plain, "-c", one_by_one, *files, cwd=tmp_path).splitlines()
    assert printed == [text.rpartition("# ")[2].strip() for text in SNIPPETS]


def test_the_wheel_from_the_sdist_has_the_packages_files_and_no_data_of_a_lesson(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fsdp_utils/")}
    ours = subprocess.check_output(["git", "ls-files", "fsdp_utils"], cwd=ROOT, text=True).splitlines()
    assert files == {path for path in ours if (ROOT / path).exists()}


def test_the_metadata_says_who_and_where_and_its_links_work_on_an_index(plain: Path) -> None:
    (described,) = plain.parents[1].rglob("fsdp_utils-*.dist-info/METADATA")
    metadata = message_from_string(described.read_text())
    assert metadata["Author"]
    assert dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Source"] == ADDRESS
    readme = metadata.get_payload()
    assert f"]({ADDRESS}/raw/v1/notebooks/one_unit.png)" in readme
    assert f"]({ADDRESS}/blob/v1/notebooks/00_fsdp_from_scratch.ipynb)" in readme
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", readme) == []


# --- the workflows


WORKFLOWS = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")]


def test_an_address_that_no_browser_opens_is_refused() -> None:
    command, environment = (
        (sys.executable, "setup.py", "--version"),
        {**os.environ, "REPOSITORY": "git@host:a"},
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert "REPOSITORY: expected an address with http:// or https://, found 'git@host:a'" in done.stderr


def test_each_action_is_one_commit_and_what_publishes_sees_the_artifact_alone() -> None:
    jobs = {name: job for workflow in WORKFLOWS for name, job in workflow["jobs"].items()}
    actions = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert len(actions) > 10
    assert [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []
    allowed = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}
    assert {workflow["permissions"]["contents"] for workflow in WORKFLOWS} == {"read"}
    steps = [re.split("[/@]", step["uses"])[1] for step in jobs["publish"]["steps"]]
    assert steps == ["download-artifact", "gh-action-pypi-publish"]

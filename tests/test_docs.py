"""What the documents say is so: commands, links, files, versions and snippets."""

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.on_ranks import on_ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("notebooks/*.md"), *ROOT.glob("book/*.md")])


def fences(document: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [text for tongue, text in found if tongue == language]


def tree() -> list[str]:
    """The paths that the tree of CONTRIBUTING.md names, folders with a slash at the end."""
    (drawn,) = [fence for fence in fences(ROOT / "CONTRIBUTING.md", "") if "\nfsdp_utils/ " in fence]
    paths: list[str] = []
    folders: list[str] = []
    for line in drawn.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


# --- files, links and commands


def test_files_that_documents_name_exist() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []
    named = re.findall(r"`([\w/]+\.(?:py|json|pyi))`", (ROOT / "CONTRIBUTING.md").read_text())
    # a file that every room has: the one of sharding
    folders = (ROOT, ROOT / "fsdp_utils", ROOT / "fsdp_utils" / "sharding")
    assert [n for n in named if n.islower() and not any((folder / n).exists() for folder in folders)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)  # layers[0](x)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue  # not fetched: the tests need no network
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\-]", "", text.lower().replace(" ", "-")) for text in [*headings, heading]]
        if not target.exists() or anchors[-1] not in [*anchors[:-1], ""]:
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_commands_are_targets(document: Path) -> None:
    text = document.read_text()
    code = fences(document, "sh") + re.findall(r"`([^`\n]+)`", text)
    named = {target for line in code for target in re.findall(r"\bmake ([a-z]+)", line)}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


CHEAT_SHEET = re.findall(r"^```python\n(.*?)^```$", (ROOT / "book/cheat_sheet.md").read_text(), re.M | re.S)
AROUND = """
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from fsdp_utils import load_distributed, save_distributed
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model, device, step = LlamaForCausalLM(LlamaConfig(**sizes)), "cpu", 7
"""
STEP = """
tokens = torch.randint(64, (2, 8))
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
"""


@on_ranks()
def test_the_code_of_the_cheat_sheet_runs(tmp_path: Path) -> None:
    recipe, save_and_load = CHEAT_SHEET
    names: dict[str, Any] = {"folder": str(tmp_path / "c")}
    exec(AROUND + recipe + STEP + save_and_load, names)
    assert names["state"]["step"] == 7
    assert bool(names["full"]) is (names["dist"].get_rank() == 0)


# --- versions: pyproject.toml, constraints.txt and environment.yml


SET_UP = ("notebooks", "train", "test")  # the extras of tools/setup_env.py
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked_for() -> dict[str, Requirement]:
    """What the package and the extras of the set-up ask for, by name."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in SET_UP for text in extras[extra])]
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def pins() -> dict[str, str]:
    """constraints.txt, as it applies to this Python: name -> version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate():
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


def test_constraints_pin_exactly_and_torch_first() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    exact = r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_full_version (<|>=) '3\.[0-9.]+')?"
    assert [line for line in lines if not re.fullmatch(exact, line)] == []
    assert lines[0].startswith("torch==")


def locked() -> dict[str, list[str]]:
    """locks/setup.txt: "name==version", and a marker where there is one -> the hashes of the files."""
    entries = re.findall(r"^([a-z].*?) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", LOCK, re.MULTILINE)
    return {name: hashes.split() for name, hashes in entries}


LOCK = (ROOT / "locks" / "setup.txt").read_text()
BUILDS = ("triton", "nvidia-", "cuda-")  # differ by the build of PyTorch under one version


def test_requirements_have_the_versions_of_the_constraints_each_with_hashes() -> None:
    lines = {line for line in LOCK.splitlines() if not line.startswith(("#", " "))}
    assert {f"{name} \\" for name in locked()} == lines  # every line is one with hashes
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    expected = {line.split(" ;")[0] for line in constraints if not line.startswith(("torch==", *BUILDS))}
    assert {name.split(" ;")[0] for name in locked()} == expected


def brought_in() -> set[str]:
    """Return the names of all that the extras of the set-up bring in on this machine."""
    found: set[str] = set()
    todo = list(asked_for().values())
    while todo:
        requirement = todo.pop()
        if (name := canonicalize_name(requirement.name)) in found:
            continue
        found.add(name)
        for needed in map(Requirement, metadata.requires(name) or ()):
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ["", *requirement.extras]):
                todo.append(needed)
    return found


def test_what_the_extras_bring_in_is_locked_and_installed_as_pinned() -> None:
    """PyTorch and what its builds need are pinned, and not locked."""
    pinned, here = pins(), set()
    for requirement in map(Requirement, locked()):
        if requirement.marker is None or requirement.marker.evaluate():
            here.add(canonicalize_name(requirement.name))
    needed = brought_in()
    assert {name for name in needed - here if not name.startswith(("torch", *BUILDS))} == set()
    installed = {name: metadata.version(name).partition("+")[0] for name in needed}  # 2.13.0+cpu is 2.13.0
    assert {
        name: (found, pinned.get(name)) for name, found in installed.items() if pinned.get(name) != found
    } == {}


def test_constraints_allow_what_pyproject_asks_for() -> None:
    pinned = pins()
    for name, requirement in asked_for().items():
        assert requirement.specifier.contains(pinned[canonicalize_name(name)]), requirement


def test_environment_yml_has_pytorch_from_conda_and_the_rest_by_the_constraints() -> None:
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    extras = ",".join(SET_UP)
    assert pip == {"pip": ["--constraint constraints.txt", f"-e .[{extras}]"]}
    python, *others = conda
    assert others == ["pip", f"pytorch ={pins()['torch']}"]  # conda's one "=" is pip's "=="
    assert re.fullmatch(r"python =3\.\d+", python)
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python ="))

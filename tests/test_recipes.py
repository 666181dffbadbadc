"""The recipes of book/trainers.md, as they stand: run on two ranks, killed, and resumed on three."""

import json
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "trainers.md").read_text()
RECIPES = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```$", PAGE, re.M | re.S))
# `make test` installs Lightning
TITLES = [title for title, text in RECIPES.items() if "from lightning" not in text or find_spec("lightning")]


def losses(said: str) -> list[float]:
    """The loss of each step, as `step 3: loss 4.1` or, in the Trainer's log, `{'loss': '4.1', ...}`."""
    return [float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", said)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each recipe, by its place among TITLES, with what its runs said."""
    folder = tmp_path_factory.mktemp("recipes")
    for number, title in enumerate(TITLES):
        (folder / str(number)).mkdir()
        (folder / str(number) / "recipe.py").write_text(RECIPES[title])
    # -u: what a killed rank has printed, too
    command = [sys.executable, "-u", "-m", "tests.recipe_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(420)
@pytest.mark.parametrize("title", TITLES)
def test_a_recipe_killed_on_two_ranks_resumes_on_three(title: str, folder: Path) -> None:
    place = folder / str(TITLES.index(title))
    whole, killed, resumed = json.loads((place / "runs.json").read_text())
    assert whole[1] == [0, 0], whole[0]
    assert killed[1][0] == -signal.SIGKILL, killed[0]
    assert resumed[1] == [0, 0, 0], resumed[0]
    assert len(losses(whole[0])) == 6
    assert losses(killed[0])[:3] == losses(whole[0])[:3]
    # it died when the checkpoint of step 4 was about to be there: that of step 2 is the newest
    assert losses(resumed[0]) == pytest.approx(losses(whole[0])[2:], abs=2e-3)
    if (exported := place / "run" / "exported").exists():
        found: dict[str, Any]
        model, found = LlamaForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not any(found.values()), found
        assert model.config.num_hidden_layers == 2

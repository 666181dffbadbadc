"""The recipes of book/trainers.md, as they stand: run on two ranks, killed, and resumed on three."""

import json
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "trainers.md").read_text()
RECIPES = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```$", PAGE, re.M | re.S))


def losses(said: str) -> list[float]:
    """The loss of each step, as `step 3: loss 4.1` or, in the Trainer's log, `{'loss': '4.1', ...}`."""
    return [float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", said)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_killed_on_two_ranks_resumes_on_three(title: str, tmp_path: Path) -> None:
    if "from lightning" in RECIPES[title] and not find_spec("lightning"):
        pytest.skip("Lightning is not installed: `make test` installs it")
    (tmp_path / "recipe.py").write_text(RECIPES[title])
    # -u: what a killed rank has printed, too
    command = [sys.executable, "-u", "-m", "tests.recipe_ranks", str(tmp_path / "recipe.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    whole, killed, resumed = json.loads((tmp_path / "runs.json").read_text())
    assert whole[1] == [0, 0], whole[0]
    assert killed[1][0] == -signal.SIGKILL, killed[0]
    assert resumed[1] == [0, 0, 0], resumed[0]
    assert len(losses(whole[0])) == 6
    assert losses(killed[0])[:3] == losses(whole[0])[:3]
    # it died when the checkpoint of step 4 was about to be there: that of step 2 is the newest
    assert losses(resumed[0]) == pytest.approx(losses(whole[0])[2:], abs=2e-3)
    if (exported := tmp_path / "run" / "exported").exists():
        model, found = LlamaForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not any(found.values()), found
        assert model.config.num_hidden_layers == 2

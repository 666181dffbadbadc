"""What a run cannot train, or would train wrongly, is refused in one sentence, the same on every rank."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.train import ConfigError, parse, train
from tests.on_ranks import one_rank
from tests.training_runs import alone, configured, program

ARGUMENTS = ["--out=a", "--data.source=x"]


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config=unsafe.yaml"], "could not determine a constructor"),
        (["--config=none.yaml"], "expected steps to be at least 1, found None"),
        (["--data.source=x"], "required: out"),
        ([*ARGUMENTS, "--out="], "expected out to be a name, found ''"),
        ([*ARGUMENTS, "--stepz=3"], "--stepz"),
        ([*ARGUMENTS, "--parallel.strategy=half"], "full.*half"),
        ([*ARGUMENTS, "--hang_s=.inf"], "expected hang_s to be greater than 0 and finite, found inf"),
        ([*ARGUMENTS, "--optim.lr=.nan"], r"optim\.lr to be greater than 0 and finite, found nan"),
        ([*ARGUMENTS, "--optim.warmup=101"], r"warmup.*from 0 to steps .100., found 101"),
        (
            [*ARGUMENTS, "--model.config=a", "--model.pretrained=b"],
            "expected model.config or model.pretrained, found both",
        ),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsafe.yaml").write_text("out: !!python/object/apply:os.system [id]\n")
    (tmp_path / "none.yaml").write_text("out: a\ndata: {source: x}\nsteps: null\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert re.search(told, str(caught.value), re.DOTALL)


def test_the_command_line_overrules_yaml_and_the_ends_of_each_range_are_in_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("out: a\nsteps: 3\ndata: {source: x}\noptim: {lr: 1e-4, betas: [0.5, 0.6]}\nseed: -7\n")
    config = parse(["--config", str(file), "--steps", "5"])
    assert (config.data.source, config.seed, config.steps) == ("x", -7, 5)
    assert (config.optim.lr, config.optim.betas) == (1e-4, (0.5, 0.6))
    parse([*ARGUMENTS, "--steps=1", "--optim.min_lr=0", "--keep=1", "--optim.clip=null"])
    parse([*ARGUMENTS, "--optim.min_lr=1", "--optim.warmup=100"])


# ---- data, models, directories ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source": "nothing"}, 'expected "module:function", found .*no attribute .nothing'),
        ({"source": "no_labels"}, "with a row for each sample, .labels. among them.*found KeyError"),
        ({"batch_size": 25}, r"at least data.batch_size \(25\) samples to train on, found 24"),
        ({"source": "without_model"}, "expected model.config or model.pretrained, as the data brings no"),
        ({"config": "/nowhere"}, "model.config '/nowhere': expected a config.json"),
        ({"config": {"architectures": ["Nothing"]}}, "architectures name a model.*no attribute Nothing"),
        ({"source": "without_model", "config": {"vocab_size": 15}}, "with vocab_size of 15, .* needs 16"),
        ({"source": "single_tokens"}, "expected samples of at least 2 tokens, .* found 1"),
    ],
)
def test_settings_from_python_data_and_models_are_checked(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    if isinstance(content := changes.get("config"), dict):
        (tmp_path / "m").mkdir()
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **content}
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        changes = {**changes, "config": str(tmp_path / "m")}
    settings = configured(tmp_path / "run", changes.pop("source", "counting"), **changes)
    with one_rank(), pytest.raises(ConfigError) as caught:
        train(settings)
    assert re.search(told, str(caught.value), re.DOTALL)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with (
        one_rank(),
        pytest.raises(ConfigError, match="out: expected a directory to write to for this run"),
    ):
        train(configured(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


# ---- on two ranks ----------------------------------------------------------------------------------


def starts(out: Path) -> dict[str, str]:
    """What a run says on a rank, by what was wrong with it."""

    def start(name: str, source: str = "counting", **settings: Any) -> str:
        try:
            train(configured(out / name, source, **settings))
        except ConfigError as error:
            return str(error)
        return "trained"

    is_first = get_rank() == 0
    return {
        "no data on rank 1": start("a", "counting" if is_first else "nothing"),
        "other settings": start("a", seed=get_rank(), save_every=4),
        "9 samples": start("a", batch_size=9),
        "first": start("run", steps=2),
        "other data": start("run", "gaps", steps=4),
        "again": start("run", steps=4),
    }


def test_what_is_refused_is_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    """Also what one of them alone can see."""
    first, second = run_on_ranks(starts, tmp_path, world_size=2)
    assert first == second
    assert {first.pop(scene) for scene in ("first", "again")} == {"trained"}
    for scene, told in {
        "no data on rank 1": "expected the same setting data on all ranks, found rank 0: ",
        "other settings": "expected the same setting seed on all ranks, found rank 0: 0; rank 1: 1",
        "9 samples": "expected data.batch_size to be a multiple of the 2 ranks, found 9; 10 is one",
        "other data": "data.source: expected 24 samples with hash ",
    }.items():
        assert told in first.pop(scene), scene
    assert first == {}


def test_the_program_says_it_once_and_ends_with_2(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert program(f"--out={tmp_path}", "--data.source=nowhere", "--parallel.device=cpu") == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("ConfigError: data.source: expected \"module:function\", found 'nowhere'")
    alone(tmp_path, steps=2)

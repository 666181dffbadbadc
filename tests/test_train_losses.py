"""Samples without labels, losses that are none and failing evaluations in the training program."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_utils import run_on_ranks
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.data import rows_at
from fsdp_utils.train.loop import train
from fsdp_utils.train.watchdog import NotFinite
from tests import tiny_training
from tests.training_runs import configured, events, metrics, run

STEPS = 6


def scenes(out: Path) -> dict[str, Any]:
    """On two ranks, most with one sample in a micro-batch, so that whole micro-batches lack labels."""
    few = {"steps": STEPS, "save_every": 2, "eval_every": 2}
    found: dict[str, Any] = {
        "whole": run(out / "whole", "gaps", **few),
        "parted": run(out / "parted", "gaps", micro_batch=1, **few),
        "divided": run(out / "divided", "gaps_divided", micro_batch=1, **few),
        "unlabelled": run(out / "unlabelled", "unlabelled", **few),
    }
    with pytest.raises(IndexError):
        train(configured(out / "bad", "bad_test", steps=STEPS, eval_every=100))
    found["left"] = [one.step for one in committed(out / "bad" / "checkpoints")]
    found["mended"] = run(out / "bad", steps=STEPS, eval_every=100)
    for seed in (2**63 - 1, -(2**63)):
        found[f"seed {seed}"] = run(out / str(seed), seed=seed, **few)
    with pytest.raises(NotFinite) as caught:
        train(configured(out / "nan", "poisoned_loss", save_every=1))
    found["NaN"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("losses")
    return run_on_ranks(scenes, out, world_size=2)[0], out


Told = tuple[dict[str, Any], Path]


def test_samples_without_labels_change_nothing_however_the_batch_is_divided(told: Told) -> None:
    found, _ = told
    task = tiny_training.gaps()
    first = {name: tensor[rows_at(0, 8, 24, seed=0)] for name, tensor in task.train.items()}
    assert found["whole"][1] == pytest.approx(tiny_training.build()(**first).loss.item(), rel=1e-5)
    assert len(found["whole"]) == STEPS
    for way in ("parted", "divided"):
        assert found[way] == pytest.approx(found["whole"], rel=1e-4)


def test_what_is_written_is_json(told: Told) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = [line for file in told[1].glob("*/*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) > 20
    for line in lines:
        json.loads(line, parse_constant=refuse)


def test_a_run_without_any_label_has_no_loss_and_ends_well(told: Told) -> None:
    found, out = told
    assert found["unlabelled"] == {}
    assert metrics(out / "unlabelled", "norm") == dict.fromkeys(range(1, STEPS + 1), 0.0)
    assert events(out / "unlabelled")[-1] == "finished"


def test_a_test_set_without_labels_costs_nothing(told: Told) -> None:
    _, out = told
    assert committed(out / "parted" / "checkpoints")[-1].step == STEPS
    assert metrics(out / "parted", "eval_loss") == {}
    assert events(out / "parted")[-1] == "finished"


def test_a_failed_last_evaluation_leaves_the_last_step_saved_and_is_made_up_for(told: Told) -> None:
    found, out = told
    assert found["left"][-1] == STEPS
    assert list(found["mended"]) == list(range(1, STEPS + 1))  # nothing was trained again
    assert events(out / "bad").count("finished") == 1
    task, trained = tiny_training.counting(), metrics(out / "bad", "eval_loss")
    untrained = tiny_training.build()(**task.test).loss.item()
    assert list(trained) == [STEPS]
    assert trained[STEPS] < untrained


def test_a_loss_that_is_none_ends_the_run_though_its_gradient_is_finite(told: Told) -> None:
    found, out = told
    step = next(n for n in range(1, 9) if 5 in rows_at(8 * (n - 1), 8, 24, seed=0))
    place = rows_at(8 * (step - 1), 8, 24, seed=0).tolist().index(5)
    assert f"step {step}: the loss is nan; the loss of rank {place // 4} is nan (samples" in found["NaN"]
    assert max((one.step for one in committed(out / "nan" / "checkpoints")), default=0) == step - 1
    assert torch.isfinite(torch.tensor([*metrics(out / "nan").values()])).all()


def test_every_seed_of_64_bits_is_one(told: Told) -> None:
    found, _ = told
    first, second = found[f"seed {2**63 - 1}"], found[f"seed {-(2**63)}"]
    assert len(first) == len(second) == STEPS
    assert first[1] != second[1]  # other samples

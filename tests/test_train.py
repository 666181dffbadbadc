"""What a run computes is right, however its ranks divide it and wherever it was interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.train import ConfigError, rows_at
from tests import tiny_training
from tests.training_runs import STEPS, alone, events, metrics, run, saved, saved_optimizer

# ---- the samples -----------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once_however_it_is_cut() -> None:
    at_once = rows_at(0, 30, 10, seed=1)
    in_parts = torch.cat([rows_at(start, 6, 10, seed=1) for start in range(0, 30, 6)])
    assert torch.equal(at_once, in_parts)
    assert all(sorted(epoch) == list(range(10)) for epoch in at_once.view(3, 10).tolist())


# ---- on one rank and on two ---------------------------------------------------------------------------


def first_loss(task: tiny_training.Counting) -> float:
    """Of the unsharded model."""
    rows = rows_at(0, 8, 24, seed=0)
    return task.build()(**{name: tensor[rows] for name, tensor in task.train.items()}).loss.item()


FEW: dict[str, Any] = {"micro_batch": 3, "save_every": STEPS}  # 3 do not divide the batch, 2 do


def runs(out: Path) -> dict[str, Any]:
    """On two ranks. Of `gaps_divided` with one sample in a micro-batch, whole ones lack labels."""
    few: dict[str, Any] = {"steps": 6, "save_every": 6, "eval_every": 2}
    three: dict[str, Any] = {"steps": 3, "save_every": 3}

    def drawn(name: str, steps: int, seed: int = 0) -> list[float]:
        tiny_training.Drawing.drawn.clear()
        run(out / name, "drawing", steps=steps, seed=seed)
        return tiny_training.Drawing.drawn[:]

    return {
        "pairs": run(out / "pairs", "pairs", **FEW),
        "gaps": run(out / "gaps", "gaps", **few),
        "gaps, divided": run(out / "divided", "gaps_divided", micro_batch=1, **few),
        "unlabelled": run(out / "unlabelled", "unlabelled", **few),
        "untrained": run(out / "untrained", lr=1e-12, steps=3),
        "plain": run(out / "plain", **three),
        "recomputed": run(out / "recomputed", **three, strategy="grad_op", recompute=True),
        "compiled": run(out / "compiled", **three, strategy="hybrid", compile="eager"),
        "drawn": [drawn("draws", 4), drawn("other draws", 4, seed=1)],
        "drawn again": [drawn("two draws", 2), drawn("two draws", 4)],
        **pretrained(out),
    }


def pretrained(out: Path) -> dict[str, Any]:
    """Resumed in bf16; and what the model itself says of the samples of the first step and of the test."""
    folder = out / "model"
    if get_rank() == 0:
        small: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 80}
        small |= {"num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.3}
        config = transformers.LlamaConfig(**small)
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    dist.barrier()
    for steps in (3, 6):
        settings: dict[str, Any] = {
            "pretrained": str(folder),
            "precision": "bf16",
            "lr": 1e-12,
            "steps": steps,
        }
        run(out / "pretrained", "without_model", **settings)
    task, model = tiny_training.without_model(), transformers.LlamaForCausalLM.from_pretrained(folder)
    rows = {"loss": rows_at(0, 8, 8, seed=0).tolist(), "eval_loss": range(3)}
    ids = {name: torch.stack([task.train[row]["input_ids"] for row in rows[name]]) for name in rows}
    own = {name: model(input_ids=ids[name], labels=ids[name]).loss.item() for name in ids}
    by_config = run(out / "config", "without_model", config=str(folder), steps=2)
    return {"pretrained": own, "by config": by_config}


Told = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    out = tmp_path_factory.mktemp("runs")
    return run_on_ranks(runs, out, world_size=2, timeout=100), out


def test_ranks_times_accumulation_gives_the_same_losses(told: Told, tmp_path: Path) -> None:
    """Space-time equivalence: 8 samples a step as 1 rank x 4 micro-batches and 2 x 2.

    The same numbers are added up in another order, so the losses agree to fp32's rounding and not to the bit.
    """
    one = alone(tmp_path, "pairs", **FEW)
    assert one[1] == pytest.approx(first_loss(tiny_training.counting()), rel=1e-5)
    assert one[STEPS] < one[1] / 2  # it does learn
    assert told[0][0]["pairs"] == pytest.approx(one, rel=1e-4)
    assert metrics(told[1] / "pairs", "eval_loss") == pytest.approx(metrics(tmp_path, "eval_loss"), rel=1e-4)


def test_samples_without_labels_change_nothing_and_without_any_label_a_run_ends_well(told: Told) -> None:
    (found, _), out = told
    assert found["gaps"][1] == pytest.approx(first_loss(tiny_training.gaps()), rel=1e-5)
    assert len(found["gaps"]) == 6
    assert found["gaps, divided"] == pytest.approx(found["gaps"], rel=1e-4)
    assert found["unlabelled"] == {}
    assert metrics(out / "unlabelled", "norm") == dict.fromkeys(range(1, 7), 0.0)
    assert metrics(out / "divided", "eval_loss") == {}  # no sample of its test has a label
    for name in ("unlabelled", "divided"):
        assert len(events(out / name, "finished")) == 1


def test_every_test_sample_counts_once_on_ranks_that_do_not_divide_them(told: Told) -> None:
    """7 samples on 2 ranks, 4 at a time, with labels left out, against the unsharded model."""
    task = tiny_training.counting()
    expected = task.build()(**task.test).loss.item()
    assert metrics(told[1] / "untrained", "eval_loss")[3] == pytest.approx(expected, rel=1e-5)


def test_strategies_recomputing_and_a_compiler_change_no_loss(told: Told) -> None:
    found = told[0][0]
    for way in ("recomputed", "compiled"):
        assert found[way] == pytest.approx(found["plain"], rel=1e-5)


def test_random_numbers_differ_between_ranks_steps_and_seeds_and_are_the_same_resumed(told: Told) -> None:
    numbers = [number for found in told[0] for part in found["drawn"] for number in part]
    assert len(numbers) == len(set(numbers)) == 2 * 2 * 4
    for found in told[0]:
        first, second = found["drawn again"]
        assert first + second == found["drawn"][0]


def test_a_pretrained_folder_in_bf16_is_resumed_and_a_configuration_begins_anew(told: Told) -> None:
    (found, _), out = told
    for name, step in (("loss", 1), ("eval_loss", 3)):
        by_step = metrics(out / "pretrained", name)
        assert by_step[step] == pytest.approx(found["pretrained"][name], rel=5e-3)
        assert by_step[step] != found["pretrained"][name]
    assert list(metrics(out / "pretrained")) == [1, 2, 3, 4, 5, 6]
    assert list(found["by config"]) == [1, 2]
    assert found["by config"][1] != pytest.approx(found["pretrained"]["loss"], rel=1e-2)


# ---- the optimizer ---------------------------------------------------------------------------------


def test_the_rate_warms_up_and_falls_and_is_logged_at_every_second_step_and_the_last(tmp_path: Path) -> None:
    rate: dict[str, Any] = {"lr": 1.0, "warmup": 2, "decay": "linear", "min_lr": 0.1}
    alone(tmp_path / "all", steps=6, **rate)
    assert metrics(tmp_path / "all", "lr") == pytest.approx({1: 0.5, 2: 1, 3: 1, 4: 0.775, 5: 0.55, 6: 0.325})
    alone(tmp_path / "some", steps=5, log_every=2, **rate)
    assert list(metrics(tmp_path / "some")) == [2, 4, 5]


def test_the_gradient_is_clipped_to_the_norm_and_its_own_norm_is_told(tmp_path: Path) -> None:
    norms = {}
    for clip in (None, 1e3, 0.01):
        out = tmp_path / str(clip)
        alone(out, steps=2, warmup=0, lr=1e-12, betas=(0.0, 0.0), clip=clip)
        means = [state["exp_avg"] for state in saved_optimizer(out).state.values()]  # of the last gradient
        norms[clip] = metrics(out, "norm")[2], float(torch.nn.utils.get_total_norm(means))
    assert norms[None] == pytest.approx((norms[None][0],) * 2) == norms[1e3]
    assert norms[0.01] == pytest.approx((norms[None][0], 0.01), rel=1e-4)


def test_changed_settings_of_the_optimizer_hold_from_there_on(tmp_path: Path) -> None:
    alone(tmp_path, steps=2)
    alone(tmp_path, steps=4, weight_decay=0.0, betas=(0.5, 0.6))
    (group,) = saved_optimizer(tmp_path).param_groups
    assert (group["weight_decay"], tuple(group["betas"])) == (0.0, (0.5, 0.6))


# ---- saved and logged ------------------------------------------------------------------------------


def test_each_save_is_told_and_the_last_step_is_saved_once(tmp_path: Path) -> None:
    for _ in range(2):
        alone(tmp_path, steps=5, keep=2)
        assert [event["step"] for event in events(tmp_path, "saved")] == [2, 4, 5]
        assert list(saved(tmp_path)) == [4, 5]
    alone(tmp_path, steps=6, keep=2)
    assert list(saved(tmp_path)) == [5, 6]


def test_lines_of_later_steps_and_what_a_kill_cut_short_are_removed(tmp_path: Path) -> None:
    file, log = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    alone(tmp_path, steps=3)
    before, told = file.read_bytes(), log.read_bytes()
    file.write_bytes(before + b'{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    log.write_bytes(told + b'{"event": "sav')
    assert list(alone(tmp_path, steps=4)) == [1, 2, 3, 4]
    assert file.read_bytes().startswith(before)
    assert log.read_bytes().startswith(told + b'{"event": "started"')

    file.write_bytes(before + b"[1, 2]\n")
    with pytest.raises(
        ConfigError, match=r'metrics.jsonl: expected lines of JSON with "step", line 5 is not'
    ):
        alone(tmp_path, steps=4)
    assert file.read_bytes() == before + b"[1, 2]\n"

"""The callbacks under the real Trainer of transformers, with DDP and with FSDP2, on two ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fsdp_utils import (
    CheckpointError,
    ChildTuningAdamW,
    checkpoints,
    get_rank,
    run_on_ranks,
    save_distributed,
)
from fsdp_utils.integrations.transformers import CheckpointCallback, MemoryCallback
from tests.sharded import TwoRanks
from tests.trainers import KINDS, llama, sharded, trainer_of, weights

# ---- memory ----------------------------------------------------------------------------------------------


class Reporter(transformers.TrainerCallback):
    """Stands in for the callback of TensorBoard or W&B."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(dict(given["logs"]))


def measured(folder: Path, kind: str) -> Any:
    memory, reporter = MemoryCallback(verbose=False), Reporter()
    # 24 rows, 2 a micro-batch, 2 ranks: 6 micro-batches in an epoch, so 2 steps of four, the last one of 2
    trainer = trainer_of(
        kind, folder, gradient_accumulation_steps=4, num_train_epochs=2, callbacks=[reporter]
    )
    trainer.callback_handler.callbacks.insert(0, memory)
    metrics = trainer.train().metrics
    report = memory.report
    assert report is not None
    return (
        sharded(trainer.model),
        report,
        [step.samples for step in report.history],
        metrics,
        trainer.state.log_history[-1],
        reporter.seen[-1],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_measured_in_a_trainer(kind: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    results = two_ranks(measured, tmp_path, kind)
    for is_sharded, report, samples, metrics, logged, reported in results:
        assert is_sharded == (kind == "fsdp2")
        assert [rank.rank for rank in report.ranks] == [0, 1]
        assert samples == [8, 4, 8, 4]
        assert report.steps == metrics["memory_steps"] == 4
        for log in (metrics, logged, reported):
            assert log["memory_max_reserved_gib"] == report.max_reserved_gib > 0
    assert results[0][1].max_reserved_gib == results[1][1].max_reserved_gib


# ---- child tuning ----------------------------------------------------------------------------------------


def child_tuned(folder: Path, kind: str, options: dict[str, Any]) -> Any:
    model = llama(dropout=0.0)
    masks = {}
    if options.get("mode") == "task":
        generator = torch.Generator().manual_seed(2)
        masks = {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}
        # the Trainer's own groups have no names
        options = {**options, "params": list(model.named_parameters()), "gradient_mask": masks}
    before = weights(model)
    optimizer = (ChildTuningAdamW, {"lr": 0.01, **options})
    trainer = trainer_of(kind, folder, model, max_steps=3, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    return before, weights(trainer.model), masks


def test_child_tuning_in_a_trainer_keeps_what_its_masks_hold(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for kind in KINDS:
        for before, after, masks in two_ranks(child_tuned, tmp_path, kind, {"mode": "task"}):
            for name, mask in masks.items():
                moved = after[name] != before[name]
                assert bool(moved.any()), name
                assert not bool((moved & ~mask).any()), name


def test_child_tuning_in_a_trainer_draws_the_same_masks_however_it_is_sharded(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    (_, with_ddp, _), _ = two_ranks(child_tuned, tmp_path, "ddp", {"reserve_p": 0.3})
    (_, with_fsdp, _), _ = two_ranks(child_tuned, tmp_path, "fsdp2", {"reserve_p": 0.3})
    (_, unmasked, _), _ = two_ranks(child_tuned, tmp_path, "ddp", {"reserve_p": 1.0})
    for name, weight in with_ddp.items():
        torch.testing.assert_close(with_fsdp[name], weight, rtol=1e-4, atol=1e-5)
    assert not all(torch.allclose(unmasked[name], weight, atol=1e-4) for name, weight in with_ddp.items())


# ---- checkpoints -----------------------------------------------------------------------------------------


def run(folder: Path, kind: str, *, resume: bool, steps: int, **more: Any) -> Any:
    """Train up to a step of a schedule of 9. Losses by step, the weights, and the learning rate."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == steps

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
    trainer = trainer_of(kind, folder / "own", max_steps=9, callbacks=[Stop], **(options | more))
    checkpoints = CheckpointCallback(trainer, folder / "run")
    found = checkpoints.newest() if resume else None
    assert (found is not None) == resume
    torch.manual_seed(trainer.args.process_index)  # what comes of it depends on what is restored
    trainer.train(resume_from_checkpoint=found)
    curve = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    assert found is None or not Path(found).exists()
    return curve, weights(trainer.model), trainer.optimizer.param_groups[0]["lr"]


def stopped_and_resumed(folder: Path, kind: str, stop: int, more: dict[str, Any]) -> Any:
    whole = run(folder / "whole", kind, resume=False, steps=9, **more)
    run(folder / "two", kind, resume=False, steps=stop, **more)
    return whole, run(folder / "two", kind, resume=True, steps=9, **more)


@pytest.mark.parametrize(
    ("kind", "stop", "more"),
    [
        ("ddp", 4, {}),
        ("fsdp2", 4, {}),
        ("fsdp2", 6, {"save_strategy": "epoch"}),  # 6 steps are an epoch
    ],
)
def test_a_trainer_resumes_exactly(
    kind: str, stop: int, more: dict[str, Any], two_ranks: TwoRanks, tmp_path: Path
) -> None:
    for whole, resumed in two_ranks(stopped_and_resumed, tmp_path, kind, stop, more, timeout=100):
        assert sorted(whole[0]) == [*range(1, 10)]
        assert resumed[0] == whole[0]  # those before the stop come with the Trainer's state
        assert resumed[2] == whole[2]
        for name, weight in whole[1].items():
            assert torch.equal(weight, resumed[1][name]), name
    assert not list((tmp_path / "two" / "own").glob("checkpoint-*"))


def resumed_elsewhere(folder: Path) -> Any:
    trainer = trainer_of("ddp", folder / "own", max_steps=9)
    checkpoints = CheckpointCallback(trainer, folder / "run")
    trainer.train(resume_from_checkpoint=checkpoints.newest())
    return [log["step"] for log in trainer.state.log_history if "loss" in log]


def saved_for_later(folder: Path) -> None:
    run(folder, "fsdp2", resume=False, steps=4)


def test_a_trainer_resumes_on_another_number_of_ranks(two_ranks: TwoRanks, tmp_path: Path) -> None:
    two_ranks(saved_for_later, tmp_path)
    assert run_on_ranks(resumed_elsewhere, tmp_path, world_size=1) == [[*range(1, 10)]]


class Interrupt(transformers.TrainerCallback):
    def on_save(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


def interrupted(folder: Path) -> Any:
    trainer = trainer_of("ddp", folder / "own", max_steps=2, save_strategy="steps", save_steps=1)
    checkpoints = CheckpointCallback(trainer, folder / "run")
    trainer.add_callback(interrupt := Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    found = checkpoints.newest()
    assert found is not None
    trainer.remove_callback(interrupt)
    with pytest.raises(CheckpointError, match=r"expected resume_from_checkpoint=.*newest\(\)"):
        trainer.train(resume_from_checkpoint=str(shutil.copytree(found, folder / "copy")))
    trainer.train(resume_from_checkpoint=found)
    return found, [log["step"] for log in trainer.state.log_history if "loss" in log]


def test_an_interrupted_trainer_resumes_in_the_same_process(tmp_path: Path) -> None:
    ((found, steps),) = run_on_ranks(interrupted, tmp_path, world_size=1)
    assert not Path(found).exists()
    assert steps == [1, 2]


def refused(folder: Path) -> list[str]:
    trainer = trainer_of("ddp", folder / "own")
    save_distributed(folder / "run", trainer.model, step=1)
    said = []
    for change in ({}, {"load_best_model_at_end": True}, {"push_to_hub": True}, {"deepspeed": True}):
        vars(trainer.args).update({"load_best_model_at_end": False, "push_to_hub": False, **change})
        trainer.is_deepspeed_enabled = "deepspeed" in change
        try:
            CheckpointCallback(trainer, folder / "run").newest()
        except (CheckpointError, ValueError) as error:
            said.append(str(error))
    return said


def looked_for(folder: Path) -> Any:
    """The step that both ranks resume from, though rank 1 sees no checkpoint, and the steps that are kept."""
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 0}
    trainer = trainer_of("ddp", folder / "own", max_steps=2, **more)
    CheckpointCallback(trainer, folder / "run")
    trainer.train()
    seen = CheckpointCallback(trainer, folder / ("run" if get_rank() == 0 else "late")).newest()
    assert seen is not None
    state = json.loads(Path(seen, "trainer_state.json").read_text())
    return state["global_step"], list(checkpoints(folder / "run"))


def test_rank_0_looks_for_the_newest_checkpoint_and_no_limit_deletes_none(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    assert two_ranks(looked_for, tmp_path) == [(2, [1, 2])] * 2


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    ((other, *own_folders),) = run_on_ranks(refused, tmp_path, world_size=1)
    assert "expected a checkpoint of CheckpointCallback, found state []" in other
    assert len(own_folders) == 3
    assert all("expected a Trainer that needs no folders of its own" in said for said in own_folders)

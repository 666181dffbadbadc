"""The callbacks under the real Trainer of transformers, with DDP and with FSDP2, on two ranks.

tests/test_recipes.py resumes the Trainer of book/trainers.md on three ranks.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
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
from tests.children import weights
from tests.trainers import KINDS, llama, sharded, trainer_of

# ---- all of it happens in one launch of two ranks --------------------------------------------------------

Scene = Callable[[Path], Any]
Happened = Callable[[Scene], list[Any]]  # what a scene returned, by rank


def play(folder: Path, scenes: Sequence[Scene]) -> dict[str, Any]:
    return {scene.__name__: scene(folder / scene.__name__) for scene in scenes}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    scenes = (measured, child_tuned, stopped_and_resumed, looked_for, interrupted, refused)
    by_rank = run_on_ranks(play, tmp_path_factory.mktemp("scenes"), scenes, timeout=110)
    return lambda scene: [found[scene.__name__] for found in by_rank]


# ---- memory ----------------------------------------------------------------------------------------------


class Reporter(transformers.TrainerCallback):
    """Stands in for the callback of TensorBoard or W&B."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(dict(given["logs"]))


def measured_by(kind: str, folder: Path) -> Any:
    memory, reporter = MemoryCallback(verbose=False), Reporter()
    # 24 rows, 2 a micro-batch, 2 ranks: 6 micro-batches in an epoch, so 2 steps of four, the last one of 2
    trainer = trainer_of(
        kind, folder, gradient_accumulation_steps=4, num_train_epochs=2, callbacks=[reporter]
    )
    trainer.callback_handler.callbacks.insert(0, memory)
    metrics = trainer.train().metrics
    logs = metrics, trainer.state.log_history[-1], reporter.seen[-1]
    return sharded(trainer.model), memory.report, logs


def measured(folder: Path) -> Any:
    return [measured_by(kind, folder) for kind in KINDS]


@pytest.mark.parametrize("number", range(2), ids=KINDS)
def test_memory_is_measured_in_a_trainer(number: int, happened: Happened) -> None:
    results = [found[number] for found in happened(measured)]
    for is_sharded, report, logs in results:
        assert is_sharded == (KINDS[number] == "fsdp2")
        assert [rank.rank for rank in report.ranks] == [0, 1]
        assert [step.samples for step in report.history] == [8, 4, 8, 4]
        assert report.steps == logs[0]["memory_steps"] == 4
        for log in logs:
            assert log["memory_max_reserved_gib"] == report.max_reserved_gib > 0
    assert results[0][1].max_reserved_gib == results[1][1].max_reserved_gib


# ---- child tuning ----------------------------------------------------------------------------------------


def child_tuned(folder: Path) -> list[tuple[str, bool, bool]]:
    """By parameter: whether anything moved, and whether anything did that its mask holds."""
    model, generator = llama(dropout=0.0), torch.Generator().manual_seed(2)
    masks = {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}
    settings: dict[str, Any] = {"lr": 0.01, "mode": "task", "gradient_mask": masks}
    settings["params"] = list(model.named_parameters())  # the Trainer's own groups have no names
    before, optimizer = weights(model), (ChildTuningAdamW, settings)
    # Accelerate gives the optimizer other parameters than it was made with
    trainer = trainer_of("fsdp2", folder, model, max_steps=3, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    moved = {name: after != before[name] for name, after in weights(trainer.model).items()}
    return [(name, bool(one.any()), bool((one & ~masks[name]).any())) for name, one in moved.items()]


def test_child_tuning_in_a_trainer_keeps_what_its_masks_hold(happened: Happened) -> None:
    for found in happened(child_tuned):
        assert [name for name, moved, moved_masked in found if not moved or moved_masked] == []


# ---- checkpoints -----------------------------------------------------------------------------------------


def run(folder: Path, kind: str, *, resume: bool, steps: int, **more: Any) -> Any:
    """Train up to a step of a schedule of 9. Losses by step, the weights, and the learning rate."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == steps

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
    model = llama()
    if kind == "fsdp2":  # adapters over a frozen base
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    trainer = trainer_of(kind, folder / "own", model, max_steps=9, callbacks=[Stop], **(options | more))
    checkpoints = CheckpointCallback(trainer, folder / "run")
    found = checkpoints.newest() if resume else None
    assert (found is not None) == resume
    torch.manual_seed(trainer.args.process_index)  # what comes of it depends on what is restored
    trainer.train(resume_from_checkpoint=found)
    curve = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return curve, weights(trainer.model), trainer.optimizer.param_groups[0]["lr"]


RESUMED = (("fsdp2", 4, {}), ("ddp", 6, {"save_strategy": "epoch"}))  # 6 steps are an epoch


def stopped_and_resumed(folder: Path) -> Any:
    found = []
    for kind, stop, more in RESUMED:
        whole = run(folder / "whole", kind, resume=False, steps=9, **more)
        run(folder / kind, kind, resume=False, steps=stop, **more)
        found.append((whole, run(folder / kind, kind, resume=True, steps=9, **more)))
        assert not list((folder / kind / "own").glob("checkpoint-*"))
    return found


@pytest.mark.parametrize("number", range(2), ids=[f"{kind}, stopped at {stop}" for kind, stop, _ in RESUMED])
def test_a_trainer_resumes_exactly(number: int, happened: Happened) -> None:
    for whole, resumed in (found[number] for found in happened(stopped_and_resumed)):
        assert sorted(whole[0]) == [*range(1, 10)]
        assert resumed[0] == whole[0]  # those before the stop come with the Trainer's state
        assert resumed[2] == whole[2]
        assert [name for name, one in whole[1].items() if not torch.equal(one, resumed[1][name])] == []


class Interrupt(transformers.TrainerCallback):
    def on_save(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


def interrupted(folder: Path) -> Any:
    trainer = trainer_of("ddp", folder / "own", max_steps=2, save_strategy="steps", save_steps=1)
    checkpoints = CheckpointCallback(trainer, folder / "run")
    trainer.add_callback(interrupt := Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train(resume_from_checkpoint=checkpoints.newest())
    return [log["step"] for log in trainer.state.log_history if "loss" in log]


def test_an_interrupted_trainer_resumes_in_the_same_process(happened: Happened) -> None:
    assert happened(interrupted) == [[1, 2]] * 2


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


def test_rank_0_looks_for_the_newest_checkpoint_and_no_limit_deletes_none(happened: Happened) -> None:
    assert happened(looked_for) == [(2, [1, 2])] * 2


def test_what_cannot_be_resumed_is_refused(happened: Happened) -> None:
    for other, *of_trainer in happened(refused):
        assert "expected checkpoints that CheckpointCallback saved, found in the newest the state" in other
        assert len(of_trainer) == 3
        assert all("a Trainer that needs no checkpoints of its own" in said for said in of_trainer)

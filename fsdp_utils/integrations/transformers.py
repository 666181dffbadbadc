"""Callbacks for transformers' Trainer: measure memory, and save and resume with `save_distributed`."""

import atexit
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_utils._extras import need
from fsdp_utils.checkpoint import CheckpointError, checkpoints, load_distributed, save_distributed
from fsdp_utils.checkpoint.load import read_state
from fsdp_utils.distributed.agreement import Ranks, agree
from fsdp_utils.integrations.state import numbers_of, rng_state, set_rng_state
from fsdp_utils.memory import Memory_Maximizer, MemoryReport

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
else:
    TrainerCallback = need("transformers", "train").TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerState

__all__ = ["CheckpointCallback", "MemoryCallback"]


class MemoryCallback(TrainerCallback):
    """Measures the memory of `Trainer.train()` on all ranks with `Memory_Maximizer(**options)`.

    Its `report` is that of the last training, over all ranks. The last line of the log and
    `trainer.train().metrics` get the report's numbers, such as `memory_max_reserved_gib`; reporters such as
    TensorBoard's too, if this callback comes first:
    `trainer.callback_handler.callbacks.insert(0, MemoryCallback())`.

    Example::

        memory = MemoryCallback(verbose=False)
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[memory])
        metrics = trainer.train().metrics
        print(memory.report.steps, metrics["memory_steps"])  # 2 2
    """

    def __init__(self, **options: Any) -> None:
        self.report: MemoryReport | None = None
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro_batches = 1
        self._memory = Memory_Maximizer(**{"device": args.device.type, **self._options})
        self._memory.start()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # train_batch_size is this rank's; auto_find_batch_size may have changed it
        self._memory.update(samples=state.train_batch_size * self._micro_batches)
        self._micro_batches = 1

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs = given["logs"]
        if "train_runtime" in logs:  # the last line of train(), which all ranks write
            self.report = self._memory.stop()
            for line in (logs, state.log_history[-1]):
                line.update(numbers_of(self.report))


class CheckpointCallback:
    """Saves a Trainer's training with `save_distributed` whenever the Trainer would save, and resumes it.

    A checkpoint holds model, optimizer, learning rate schedule, scaler, the Trainer's state, and each rank's
    random number generators, in place of the Trainer's own folders. `save_strategy`, `save_steps` and
    `save_total_limit` apply. directory is that of `save_distributed`.

    Raises:
        ValueError: the Trainer needs its own folders, for its best model or to upload them, or DeepSpeed.

    Example::

        trainer = Trainer(model, args, train_dataset=rows)
        checkpoints = CheckpointCallback(trainer, "run")
        trainer.train(resume_from_checkpoint=checkpoints.newest())
        print(len(list(Path("run").iterdir())))  # 1
    """

    def __init__(self, trainer: "Trainer", directory: str | os.PathLike[str]) -> None:
        args = trainer.args
        uploads = args.push_to_hub and args.hub_strategy != "end"
        if args.load_best_model_at_end or uploads or trainer.is_deepspeed_enabled:
            raise ValueError(
                "CheckpointCallback: expected a Trainer that needs no checkpoints of its own, which this "
                'replaces, found load_best_model_at_end, push_to_hub without hub_strategy="end" or DeepSpeed'
            )
        self._trainer: Any = trainer
        self._directory = directory
        # what the Trainer calls to resume, in this order, and to save
        self._trainer._load_from_checkpoint = self._trainer._load_scaler = lambda *_: None
        self._trainer._load_optimizer_and_scheduler = lambda _: self._load()
        self._trainer._load_rng_state = lambda _: set_rng_state(self._loaded["rng"])
        self._trainer._save_checkpoint = lambda *_: self._save()

    def newest(self) -> str | None:
        """Prepare to resume from the newest checkpoint. Call it on every rank.

        Returns what `trainer.train(resume_from_checkpoint=...)` takes, a temporary folder with the Trainer's
        state; the rest is loaded when the training begins. None where there is no checkpoint.

        Raises:
            CheckpointError: it is damaged, or not from this callback; or a rank did not call this.
        """

        def look() -> str | None:
            steps = checkpoints(self._directory)
            if not steps:
                return None
            state = read_state(steps[[*steps][-1]])  # saved last
            if "trainer" not in state:
                raise CheckpointError(
                    f"{self._directory}: expected checkpoints that CheckpointCallback saved, found in the "
                    f"newest the state {sorted(state)}"
                )
            return state["trainer"]

        # rank 0 looks: others may see the directory later
        ranks = agree("CheckpointCallback.newest", dict, error=CheckpointError, topic="newest")
        with ranks.guard():
            found = ranks.first(look)
        ranks.close()
        if found is None:
            return None
        folder = tempfile.mkdtemp(prefix="trainer-state-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        Path(folder, "trainer_state.json").write_text(found)
        return folder

    def _load(self) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step
        self._loaded = load_distributed(self._directory, trainer.model, trainer.optimizer, step=step)
        trainer.lr_scheduler.load_state_dict(self._loaded["scheduler"])
        if self._loaded["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(self._loaded["scaler"])

    def _save(self) -> None:
        trainer = self._trainer
        trainer.store_flos()
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        stateful: Any = [one for one in callbacks if isinstance(one, ExportableState)]
        trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        scaler, limit = getattr(trainer.accelerator, "scaler", None), trainer.args.save_total_limit
        ranks = Ranks("CheckpointCallback", CheckpointError)
        save_distributed(
            self._directory,
            trainer.model,
            trainer.optimizer,
            step=trainer.state.global_step,
            keep=limit if limit and limit > 0 else None,  # a Trainer deletes nothing for 0 and less
            state={
                "scheduler": trainer.lr_scheduler.state_dict(),
                "scaler": scaler and scaler.state_dict(),
                # rank 0's for all: times of an evaluation in it differ
                "trainer": ranks.first(lambda: json.dumps(dataclasses.asdict(trainer.state))),
            },
            per_rank={"rng": rng_state()},
        )

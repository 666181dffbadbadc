"""Callbacks for Lightning's Trainer: measure memory, and save and resume with `save_distributed`."""

import os
from typing import TYPE_CHECKING, Any

from fsdp_utils._extras import need
from fsdp_utils.checkpoint import CheckpointNotFoundError, PerRank, load_distributed, save_distributed
from fsdp_utils.integrations.state import numbers_of, rng_state, set_rng_state
from fsdp_utils.memory import Memory_Maximizer, MemoryReport

if TYPE_CHECKING:

    class Callback: ...
else:
    Callback = need("lightning.pytorch", "lightning").Callback

__all__ = ["CheckpointCallback", "MemoryCallback"]


class MemoryCallback(Callback):
    """Measures the memory of `Trainer.fit()` on all ranks with `Memory_Maximizer(**options)`.

    A step is one of the optimizer, with all micro-batches of `accumulate_grad_batches`. Its `report` is that
    of the last training, over all ranks; the Trainer's loggers get the report's numbers, such as
    `memory_max_reserved_gib`.

    Example::

        memory = MemoryCallback(verbose=False)
        Trainer(callbacks=[memory], **options).fit(model, loader)
        print(memory.report.steps)  # 4
    """

    def __init__(self, **options: Any) -> None:
        self.report: MemoryReport | None = None
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._micro_batches, self._step = 0, trainer.global_step
        self._memory = Memory_Maximizer(**{"device": pl_module.device.type, **self._options})
        self._memory.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._micro_batches += 1
        if trainer.global_step != self._step:
            size = getattr(trainer.train_dataloader, "batch_size", None)  # None where its sampler decides
            self._memory.update(samples=size and size * self._micro_batches)
            self._micro_batches, self._step = 0, trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.report = self._memory.stop()
        for logger in trainer.loggers:
            logger.log_metrics(numbers_of(self.report), step=trainer.global_step)


class CheckpointCallback(Callback):
    """Saves the training of `Trainer.fit()` with `save_distributed`, and resumes it, on any number of ranks.

    A checkpoint holds model, optimizers, schedules, gradient scaler, the progress of the loops, the
    callbacks' states, and each rank's random number generators. `fit()` of a new Trainer begins with the
    newest one. Within an epoch it skips the batches that were read: their order must depend on the epoch
    alone, as that of `fsdp_utils.sampler(dataset)` does. Saves are `every_n_steps` optimizer steps apart, and
    after the validation at the end of an epoch; `directory` and `keep` are those of `save_distributed`.

    Raises:
        ValueError: `fit(ckpt_path=...)` is to load another checkpoint.

    Example::

        checkpoints = CheckpointCallback("run", every_n_steps=2)
        Trainer(callbacks=[checkpoints], **options).fit(model, loader)
        print(len(list(Path("run").iterdir())))  # 2
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every_n_steps: int, keep: int | None = None
    ) -> None:
        self._directory, self._every, self._keep = directory, every_n_steps, keep
        self._rng: Any = None  # of the checkpoint, until the training begins

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step:
            return
        try:
            found = load_distributed(self._directory, trainer.model, trainer.optimizers or None)
        except CheckpointNotFoundError:
            return
        if trainer.ckpt_path:
            raise ValueError(
                f"CheckpointCallback: expected fit() without ckpt_path, as there is a checkpoint in "
                f"{self._directory}, found {trainer.ckpt_path}. Leave one of them out"
            )
        # on another number of ranks than the one that saved: rank 0's values
        saved = found["trainer"][0] if isinstance(found["trainer"], PerRank) else found["trainer"]
        trainer.precision_plugin.load_state_dict(saved["precision"])
        for config, state in zip(trainer.lr_scheduler_configs, saved["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        for callback in trainer.callbacks:
            if callback.state_key in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][callback.state_key])
        loop = trainer.fit_loop
        loop.load_state_dict(saved["loops"])
        if loop.epoch_loop.batch_progress.is_last_batch:  # the epoch had ended: begin the next as any other
            for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
                progress.ready = progress.completed  # saved after the next epoch was counted
            loop.epoch_loop.restarting = False
            loop.on_iteration_done()
        self._rng = found["rng"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.global_step
        if self._rng is None:
            return
        loop = trainer.fit_loop
        if loop.restarting:  # within an epoch
            for loader in loop._combined_loader.flattened:
                if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                    loader.sampler.set_epoch(trainer.current_epoch)
            fetcher = iter(loop._data_fetcher)  # Lightning began to read before it set the epoch
            fetched = fetcher.fetched
            for _ in range(loop.epoch_loop.batch_progress.current.ready):
                next(fetcher)
            fetcher.fetched = fetched  # Lightning adds the batches before these
        set_rng_state(self._rng)
        self._rng = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save_if_due(trainer)

    # After the last batch come validation, the hooks of the epoch's end, and its schedulers.
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._save_if_due(trainer)

    on_train_end = on_train_epoch_start

    def _save_if_due(self, trainer: Any) -> None:
        step = trainer.global_step
        if step // self._every == self._last // self._every:
            return
        self._last = step
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # the position of this number of ranks
        own = {  # callbacks and loops may keep times and losses of their rank
            "precision": trainer.precision_plugin.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "loops": loops,
            "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
        }
        save_distributed(
            self._directory,
            trainer.model,
            trainer.optimizers or None,
            step=step,
            keep=self._keep,
            per_rank={"trainer": own, "rng": rng_state()},
        )

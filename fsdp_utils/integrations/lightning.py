"""A callback for Lightning's Trainer: what its training takes of the device."""

from typing import TYPE_CHECKING, Any

from fsdp_utils._extras import need
from fsdp_utils.integrations.memory import numbers_of
from fsdp_utils.memory import Memory_Maximizer, MemoryReport

if TYPE_CHECKING:

    class Callback: ...
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # the reference is built without Lightning
        Callback = object

__all__ = ["MemoryCallback"]


class MemoryCallback(Callback):
    """Measures the memory of `Trainer.fit()` on all ranks with `Memory_Maximizer`.

    A step is one of the optimizer, with all micro-batches of `accumulate_grad_batches`; the batch size is the
    data loader's. The Trainer's loggers get the report's numbers, as `memory_max_reserved_gib`.

    Args:
        **options: as for `Memory_Maximizer`.

    Attributes:
        report: of the last training, over all ranks; None before its end.

    Example::

        memory = MemoryCallback(verbose=False)
        Trainer(callbacks=[memory], **options).fit(model, loader)
        print(memory.report.steps)  # 4
    """

    def __init__(self, **options: Any) -> None:
        need("lightning.pytorch", "lightning")
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

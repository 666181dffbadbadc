"""A device that is only imagined, with the three regimes of a real one: fits, retries, OOM."""

import torch

from fsdp_utils.memory import DeviceStats, Reading

GIB = 2**30


class ImaginedDevice(DeviceStats):
    """Stands in for a GPU's statistics and its clock. `train(batch_size)` uses its memory and its time.

    A batch needs `model_gib` and `sample_gib` for each sample. Beyond `total_gib` it fails; within the last
    `tight_gib` below it works, with one retry, and takes `retry_s` longer. By default 16 samples fit, 17 work
    with retries, and 18 are out of memory.
    """

    kind = "allocator"

    def __init__(
        self,
        *,
        total_gib: float = 22,
        model_gib: float = 5,
        sample_gib: float = 0.97,
        tight_gib: float = 0.7,
        step_s: float = 0.5,
        sample_s: float = 0.3,
        retry_s: float = 2.0,
    ) -> None:
        super().__init__(torch.device("cpu"), name="imagined", total=int(total_gib * GIB))
        self.model_gib, self.sample_gib, self.tight_gib = model_gib, sample_gib, tight_gib
        self.step_s, self.sample_s, self.retry_s = step_s, sample_s, retry_s
        self.time = 0.0
        self.retries = self.ooms = 0
        self.reserved_gib = self.peak_gib = model_gib

    # what a device does

    def train(self, batch_size: int) -> None:
        total_gib = (self.total or 0) / GIB
        need_gib = self.model_gib + batch_size * self.sample_gib
        if need_gib > total_gib:
            self.reserved_gib = total_gib
            self.retries += 1  # a real allocator, too, gives its cache back before it gives up
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. The device is an imagined one.")
        self.peak_gib = max(self.peak_gib, need_gib)
        self.reserved_gib = max(self.reserved_gib, need_gib)
        self.time += self.step_s + batch_size * self.sample_s
        if need_gib > total_gib - self.tight_gib:
            self.retries += 1
            self.time += self.retry_s

    # what it tells

    def read(self) -> Reading:
        reading = Reading(
            reserved=int(self.reserved_gib * GIB),
            allocated=int(self.peak_gib * GIB),
            live=int(self.model_gib * GIB),
            retries=self.retries,
            ooms=self.ooms,
        )
        self.peak_gib = self.model_gib
        return reading

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        self.reserved_gib = self.model_gib

    def now(self) -> float:
        return self.time

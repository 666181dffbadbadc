"""Asynchronous saves: a copy of the state in CPU memory, written by a thread whose error is not lost."""

import atexit
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.checkpoint.tensor_files import ALIGNED, Part

# The memory of the copies, kept for the next save: fresh memory takes longer than the copy into it.
_memory = torch.empty(0, dtype=torch.uint8)


def stage(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Copy chunks to CPU memory that the next call overwrites; pinned, if they are on a GPU."""
    global _memory
    sizes = [-(-part.nbytes // ALIGNED) * ALIGNED for _, part in parts.values()]
    cuda = any(part.is_cuda for _, part in parts.values())
    if _memory.nbytes != sum(sizes) or (cuda and not _memory.is_pinned()):
        _memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees what there was before
        _memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=cuda, device="cpu")
    staged = {}
    for (key, (offsets, part)), place in zip(parts.items(), _memory.split(sizes), strict=True):
        copy = place[: part.nbytes].view(part.dtype).view(part.shape)
        staged[key] = offsets, copy.copy_(part, non_blocking=True)
    if cuda:
        torch.cuda.synchronize()  # pinned memory is copied to without waiting
    return staged


class Save:
    """A save that may still be going on.

    Example::

        save = save_distributed("run", model, optimizer, step=step, asynchronous=True)
        train_step(batch)  # while a thread writes
        path = save.wait()
    """

    def __init__(self, write: Callable[[], Path], *, asynchronous: bool) -> None:
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._thread = threading.Thread(target=self._run, args=(write,), name="save in the background")
            self._thread.start()
            global _in_flight
            _in_flight = self
        else:
            self._path = write()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        # Only the text is kept: the frames of an exception hold connections, which other ranks see close.
        except BaseException as error:  # nobody else would hear of it
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            self._problem = f"{kind}{error}"

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is committed, and return its path. Each of its steps has a limit.

        Call it before `torch.distributed.destroy_process_group()`, which would cut the save off.

        Raises:
            CheckpointError: it was not saved; says why. Raised by every call of this; the next save or load
                raises it too, unless it was raised here before.
        """
        if self._thread is not None:
            self._thread.join()
        global _in_flight
        if _in_flight is self:
            _in_flight = None
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return self._path


_in_flight: Save | None = None


def wait_for_save_in_flight() -> None:
    """Wait for the save in flight, if there is one; raise its error."""
    if _in_flight is not None:
        try:
            _in_flight.wait()
        except CheckpointError as error:
            raise CheckpointError(f"the asynchronous save before this call failed: {error}") from error


@atexit.register
def _print_error_at_exit() -> None:
    """Print the error of a save that nobody waited for. (The interpreter has waited for its thread.)"""
    if _in_flight is not None and _in_flight._problem is not None:
        print(f"CheckpointError in an asynchronous save: {_in_flight._problem}", file=sys.stderr, flush=True)

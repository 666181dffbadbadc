"""Asynchronous saves: a copy of the state in CPU memory, written by a thread whose error is not lost."""

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.errors import CheckpointError
from fsdp_utils.sharding.local_part import local
from fsdp_utils.torch_internals.runtime import dtensor_like

# The copies, by name, kept for the next save: fresh memory costs several times as much as the copy into it.
_buffers: dict[str, Tensor] = {}


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors, sharded alike, to CPU memory that training does not touch.

    The copies are overwritten by the next call.

    Memory: the bytes of the rank's shards. The copies of CUDA tensors are pinned, and PyTorch rounds each
    pinned tensor up to a power of two: 96 MiB take 128 MiB, 129 MiB take 256 MiB, all up to twice the shards.
    """
    for name in _buffers.keys() - tensors.keys():
        del _buffers[name]
    staged = {name: _staged(name, tensor.detach()) for name, tensor in tensors.items()}
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()  # pinned buffers are copied to without waiting
    return staged


def _staged(name: str, tensor: Tensor) -> Tensor:
    part = local(tensor)
    buffer = _buffers.get(name)
    if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
        buffer = torch.empty(
            part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda", device="cpu"
        )
        _buffers[name] = buffer
    buffer.copy_(part, non_blocking=True)
    if isinstance(tensor, DTensor):
        return dtensor_like(buffer, tensor)
    return buffer


class Save:
    """A save that may still be going on.

    Example::

        save = save_distributed("run", model, optimizer, step=step, asynchronous=True)
        train_step(batch)  # while a thread writes
        path = save.wait()
    """

    def __init__(self, path: Path, write: Callable[[], None], *, asynchronous: bool) -> None:
        self._path = path
        self._write = write
        self._problem: str | None = None
        self._over = threading.Event()
        global _in_flight
        if asynchronous:
            _in_flight = self
            try:
                threading.Thread(target=self._run, name=f"save {path.name}").start()
            except RuntimeError:  # no more threads; the other ranks count on this one
                self._run()
        else:
            write()
            del self._write  # and with it the tensors
            self._over.set()

    def _run(self) -> None:
        try:
            self._write()
        # Only the text is kept: the frames of an exception hold connections, which other ranks see close.
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:  # nobody else would hear of it
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            del self._write
            self._over.set()

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed, and return its path.

        Call it before `torch.distributed.destroy_process_group()`, which would cut the save off.

        Args:
            timeout: seconds to wait; None for as long as it takes (each of its steps has a limit).

        Raises:
            CheckpointError: it was not saved; says why. Raised by every call of this; the next save or load
                raises it too, unless it was raised here before.
            TimeoutError: it is still going on.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self._path} is still being saved after {timeout:g} s")
        global _in_flight
        if _in_flight is self:
            _in_flight = None
        if self._problem is not None:
            raise CheckpointError(self._problem)
        return self._path


_in_flight: Save | None = None


def wait_for_save_in_flight() -> None:
    """Wait for the save in flight, if there is one.

    Raises:
        CheckpointError: it was not saved.
    """
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

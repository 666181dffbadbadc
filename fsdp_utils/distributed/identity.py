"""This process's rank, its order among the others, its samples; with defaults for a single process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from fsdp_utils.distributed.agreement import library_store, wait_for
from fsdp_utils.distributed.rank_errors import pack_error, unpack_error


def get_rank() -> int:
    """Return the rank of this process: in the process group, else the launcher's (torchrun, srun), else 0.

    Example::

        if get_rank() == 0:
            print(f"loss {loss:.2f}")  # loss 2.50
    """
    return dist.get_rank() if _has_group() else _launched()[0]


def get_world_size() -> int:
    """Return the number of ranks: in the process group, else the launcher's (torchrun, srun), else 1.

    Example::

        batch_size = 64 // get_world_size()
        loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))
    """
    return dist.get_world_size() if _has_group() else _launched()[1]


def get_local_rank() -> int:
    """Return the rank of this process among those of its host, which is also the index of its GPU.

    The launcher's LOCAL_RANK (torchrun) or SLURM_LOCALID (srun), else `get_rank()`.

    Example::

        device = torch.device("cuda", get_local_rank())
    """
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in os.environ:
            return int(os.environ[name])
    return get_rank()


@contextmanager
def rank0_first(*, timeout: float = 1800.0) -> Iterator[None]:
    """Run the body on rank 0 first and then on the others, such as filling a cache that all read.

    Every rank of the default process group enters it. In a single process the body runs at once.

    Args:
        timeout: seconds that the others wait for rank 0 at most.

    Raises:
        Exception: on the other ranks, what rank 0 raised in the body; their body is not run.
        TimeoutError: on the other ranks, when rank 0 is not done in time.
        ValueError: this process is one of several ranks, without a process group (torch's own error).

    Example::

        with rank0_first():
            if not Path("tokens.pt").exists():
                torch.save(tokenize("corpus.txt"), "tokens.pt")
        tokens = torch.load("tokens.pt")
    """
    if get_world_size() == 1:
        yield
        return
    # The store and not a collective: the wait has a separate limit, can be interrupted, and holds up no GPU.
    store = library_store("rank0_first")
    done = f"done/{store.add(f'calls/{get_rank()}', 1)}"  # the call count on this rank
    if get_rank() == 0:
        try:
            yield
        except BaseException as error:
            store.set(done, pack_error(error).hex())
            raise
        store.set(done, "")
        return
    if not wait_for(store, [done], timeout):
        waited = f"rank {get_rank()} waited {timeout:g} s and rank 0 was not done"
        raise TimeoutError(f"rank0_first: {waited}. Call it on every rank, or pass a larger timeout.")
    if failure := store.get(done):
        raise unpack_error(bytes.fromhex(failure.decode()), "rank 0, in rank0_first")
    yield


def sampler(dataset: Any, **options: Any) -> DistributedSampler:
    """Return the sampler of this rank's share of a dataset; of all of it when not distributed.

    Call its `set_epoch(epoch)` before each epoch, or each epoch has the same order. The order depends on seed
    and epoch alone: rank r of n takes every n-th sample, from the r-th on. Options are those of torch's
    DistributedSampler: shuffle=False for evaluation, seed, and drop_last for samples that do not divide among
    the ranks, of which some come twice otherwise.

    Raises:
        TypeError: the dataset has no length (an IterableDataset splits itself by rank, in `__iter__`).

    Example::

        loader = DataLoader(dataset, batch_size=4, sampler=sampler(dataset))
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                train_step(batch)
    """
    return DistributedSampler(dataset, get_world_size(), get_rank(), **options)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launched() -> tuple[int, int]:
    """The rank and world size from the launcher's environment variables, (0, 1) without a launcher.

    A RANK without a WORLD_SIZE means something else, and SLURM_NTASKS is also set in a batch script.
    """
    for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in os.environ and world_size in os.environ:
            return int(os.environ[rank]), int(os.environ[world_size])
    return 0, 1

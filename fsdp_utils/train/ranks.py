"""The ranks of a run: their device, their process group, and sums and agreement over them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_utils.distributed.agreement import Ranks
from fsdp_utils.distributed.identity import get_local_rank, get_world_size
from fsdp_utils.train.config import ConfigError

_ECHO_S = 2.0  # a rank that may only fail because another one did lets the other be heard first


def training_device(wanted: str) -> torch.device:
    """This rank's accelerator for "auto", where there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "cpu" or accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", get_local_rank() + 1))
    if needed > count:
        raise ConfigError(
            f"parallel.device: expected a {accelerator.type} device for each rank of a host, found {count} "
            f"for {needed} ranks. Start {count} ranks on each host, or set parallel.device to cpu."
        )
    return torch.device(accelerator.type, get_local_rank())


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Join the process group of the ranks that torchrun started; of a single one where nobody did."""
    # gloo for CPU tensors also beside GPUs: what the ranks exchange at each step then waits for no GPU
    backend, limit = "gloo", timedelta(seconds=timeout_s)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    alone = {} if get_world_size() > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=limit, **alone)
    try:
        yield
    except Exception as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            time.sleep(_ECHO_S)
        raise
    dist.destroy_process_group()


def ranks() -> Ranks:
    """Return the ranks, for agreement: a ConfigError on one of them becomes the same one on all."""
    return Ranks("", ConfigError, told=ConfigError)


def sum_of_all(*values: float) -> list[float]:
    """Add up each value over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()

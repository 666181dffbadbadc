"""The process group of the ranks that torchrun started or restarted, and what they exchange in training."""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_utils.distributed.agreement import Ranks
from fsdp_utils.distributed.identity import get_local_rank, get_rank, get_world_size
from fsdp_utils.train.config import ConfigError

__all__ = [
    "fresh_store",
    "on_rank_0",
    "process_group",
    "same_on_all",
    "share_interface",
    "sum_of_all",
    "training_device",
]

T = TypeVar("T")

_ECHO_S = 2.0  # a rank that fails because another one did lets the other be heard first
_POLL_S = 0.02


def training_device(wanted: str) -> torch.device:
    """This rank's accelerator for "auto", where there is one, else the CPU.

    Raises:
        ConfigError: the host has fewer accelerators than ranks.
    """
    if wanted == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    index, count = get_local_rank(), torch.accelerator.device_count()
    if count == 1 and "LOCAL_RANK" not in os.environ:
        index = 0  # srun without torchrun, which shows each task a GPU of its own
    if index >= count:
        raise ConfigError(
            f"parallel.device: expected a {accelerator.type} device for each rank of a host, found {count} "
            f"and rank {index} of the host. Start {count} ranks on it, or set parallel.device to cpu."
        )
    return torch.device(accelerator.type, index)


def share_interface(environment: MutableMapping[str, str], interfaces: Iterable[str]) -> None:
    """Make gloo and NCCL use the same network interface, where the user has set one for either.

    With GPUs both are used, and each chooses an interface by itself: gloo by the host's name, NCCL by the
    interface's. On hosts with several networks the two may choose different ones, and never connect.

    Args:
        environment: GLOO_SOCKET_IFNAME (names) and NCCL_SOCKET_IFNAME (beginnings of names; "=" before names,
            "^" before what is left out) are read, and the one that is missing is set.
        interfaces: the names of this host's.
    """
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")
    if gloo and not nccl:
        environment["NCCL_SOCKET_IFNAME"] = f"={gloo}"
    if nccl and not gloo and not nccl.startswith("^"):
        is_name, wanted = nccl.startswith("="), nccl.removeprefix("=").split(",")
        found = [
            each for each in interfaces if any(each == w if is_name else each.startswith(w) for w in wanted)
        ]
        if found:
            environment["GLOO_SOCKET_IFNAME"] = found[0]


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[None]:
    """The process group of the ranks that torchrun started; of a single one where nobody did.

    CPU tensors are sent by gloo, also where the model is on GPUs: what the ranks exchange at each step then
    waits for no GPU.

    Raises:
        ConfigError: this is one of several ranks, and nothing says where the others are.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing and get_world_size() > 1:
        raise ConfigError(
            f"expected torchrun to have started the {get_world_size()} ranks, found {', '.join(missing)} not "
            "set. Under Slurm, srun starts one torchrun on each node, as in examples/train.sbatch."
        )
    limit, backend, store = timedelta(seconds=timeout_s), "gloo", dist.HashStore()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        share_interface(os.environ, [name for _, name in socket.if_nameindex()])
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if "WORLD_SIZE" in os.environ:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        store = fresh_store(store, get_rank(), get_world_size(), timeout_s)
    dist.init_process_group(backend, store=store, rank=get_rank(), world_size=get_world_size(), timeout=limit)
    try:
        yield
    except Exception as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            time.sleep(_ECHO_S)  # it may be the echo of another rank's end
        raise
    dist.destroy_process_group()


def fresh_store(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """A part of the store that only the ranks of this start use, and nobody used before.

    torchrun keeps one store for all of its restarts [torch 2.13], so that restarted ranks find the addresses
    of those that are gone. Here rank 0 makes lists of who is there, by names that are new at each start; a
    list counts once everybody on it has confirmed it, which those that are gone cannot do.

    Raises:
        TimeoutError: not all ranks came in time.
    """
    store, me = dist.PrefixStore("fsdp_utils/start", store), uuid.uuid4().hex
    store.set(f"here/{rank}", me)
    here = [f"here/{other}" for other in range(world_size)]
    roster: dict[str, Any] = {"names": []}
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        if rank == 0 and store.check(here):
            names = [store.get(key).decode() for key in here]
            if names != roster["names"]:
                roster = {"id": uuid.uuid4().hex, "names": names}
                store.set("roster", json.dumps(roster))
        elif rank != 0 and store.check(["roster"]):
            roster = json.loads(store.get("roster"))
        if len(roster["names"]) == world_size and roster["names"][rank] == me:
            store.set(f"confirmed/{roster['id']}/{rank}", "")
            if store.check([f"confirmed/{roster['id']}/{other}" for other in range(world_size)]):
                return dist.PrefixStore(roster["id"], store)
        time.sleep(_POLL_S)
    raise TimeoutError(f"rank {rank}: not all {world_size} ranks started within {timeout_s:g} s")


# ---- what the ranks exchange in training ----------------------------------------------------------------


def sum_of_all(*values: float) -> list[float]:
    """The sum over all ranks of each value."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def same_on_all(fn: Callable[[], T]) -> T:
    """What fn returns on this rank; if it raises ConfigError on any rank, the same ConfigError on all."""
    return Ranks("", ConfigError, told=ConfigError).each(fn)


def on_rank_0(fn: Callable[[], T]) -> T:
    """What fn returns on rank 0, on every rank. One rank decides, as the others may see the disk later."""
    return Ranks("", ConfigError, told=ConfigError).first(fn)

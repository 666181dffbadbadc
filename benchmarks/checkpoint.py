"""What does it cost to save and load a training state safely, in time and in memory?

    python benchmarks/checkpoint.py [--gib 1] [--ranks 2 4] [--rounds 5] [--directory .]

A state of so many GiB, float32 parameters and AdamW's state sharded by fully_shard, is saved and loaded in
turn by `save_distributed` and `load_distributed` (hashes taken and compared), by plain dcp.save and dcp.load,
and written and read as raw bytes, without hashes and with them. No verified load takes less than the last:
nothing may change before all is verified, so it reads every byte twice, and hashes it once. Before it counts
as saved, everything is on the disk: DCP's writer calls fsync by default (sync_files=True), and the raw write
is given one. The peers' times leave out what a program adds to them, get_state_dict and set_state_dict; ours
contain it. All load into tensors that are there already, from the page cache: it was just written. Times are
of the slowest rank, from a barrier on. Ratios are medians over the rounds, each round with its own peer.

Then: how long save_distributed(asynchronous=True) keeps the training waiting, and how long a copy of the
shard takes, which it cannot do without (the first time into new memory); and the peak host memory of a
synchronous save and a load, each round in new processes.
Exits with 1 if a limit that the project promises is broken.
"""

import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.machine import describe, limits, options, table
from fsdp_utils import load_distributed, run_on_ranks, save_distributed
from fsdp_utils.checkpoint import Save
from fsdp_utils.sharding.local_part import view

WIDTH = 2048  # a layer has 16 MiB of parameters
SAVE_RATIO, BLOCKED, FIRST, MEMORY = 1.05, 0.10, 0.25, 1.0  # the limits
LOAD_RATIOS = {2: 1.0, 4: 1.2}  # by the number of ranks
LIMIT_S = 1200.0  # of one call of run_on_ranks

BLOCK = 1 << 20  # bytes that are hashed while they are in the processor's cache

WAYS = ("ours", "plain DCP", "raw bytes", "raw, hashed")


def build(gib: float) -> tuple[nn.Module, Optimizer]:
    """A model that with its optimizer's state has that size. No rank ever holds more than its shard."""
    layers = max(1, round(gib * 2**30 / (3 * 4 * WIDTH**2)))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
        fill = {"exp_avg": torch.full_like(param, 2.0), "exp_avg_sq": torch.full_like(param, 3.0)}
        optimizer.state[param] = {"step": torch.tensor(1.0), **fill}
    return model, optimizer


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of the state."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [local(tensor.detach()) for tensor in (*model.parameters(), *state)]


def timed(call: Callable[[], Any]) -> float:
    """Seconds until the slowest rank has done it."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


# ---- the ways of saving and loading ------------------------------------------------------------------


def write_raw(path: Path, tensors: list[Tensor], *, hashed: bool) -> None:
    digest = blake3()
    with path.open("wb", buffering=0) as file:
        for left in map(view, tensors):
            while left:
                count = file.write(left[:BLOCK])
                if hashed:
                    digest.update(left[:count])
                left = left[count:]
        os.fsync(file.fileno())


def read_raw(path: Path, tensors: list[Tensor], *, hashed: bool) -> None:
    with path.open("rb", buffering=0) as file:
        if hashed:
            digest, block = blake3(), memoryview(bytearray(BLOCK))
            while count := file.readinto(block):
                digest.update(block[:count])
            file.seek(0)
        for place in map(view, tensors):
            while place and (count := file.readinto(place)):
                place = place[count:]


def one_round(way: str, folder: Path, model: nn.Module, optimizer: Optimizer) -> tuple[float, float]:
    """Seconds to save and to load."""
    own, shard = folder / str(dist.get_rank()), shard_of(model, optimizer)
    if way == "ours":
        save = timed(lambda: save_distributed(folder, model, optimizer, step=1))
        return save, timed(lambda: load_distributed(folder, model, optimizer))
    if way == "plain DCP":
        parts = get_state_dict(model, optimizer)
        state = {"model": parts[0], "optimizer": parts[1]}
        save = timed(lambda: dcp.save(state, checkpoint_id=folder))
        return save, timed(lambda: dcp.load(state, checkpoint_id=folder))
    hashed = way == "raw, hashed"
    save = timed(lambda: write_raw(own, shard, hashed=hashed))
    return save, timed(lambda: read_raw(own, shard, hashed=hashed))


def measure_ways(directory: Path, gib: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Every way in turn; the first round, in which groups are made and modules imported, does not count."""
    model, optimizer = build(gib)
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            folder = directory / way
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            seconds = one_round(way, folder, model, optimizer)
            if number:
                seen[way].append(seconds)
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
                os.sync()  # what one way has left to the disk is not to delay the next
            dist.barrier()
    return seen


# ---- asynchronous --------------------------------------------------------------------------------------


def measure_blocking(directory: Path, gib: float, rounds: int) -> list[tuple[float, float, float, float]]:
    """Seconds of a synchronous save, that an asynchronous one blocks, until that is durable, and of a copy.

    The first round is a cold one.
    """
    model, optimizer = build(gib)
    seen, shard = [], shard_of(model, optimizer)
    room: list[Tensor] = []

    def copy() -> None:
        """Copy the shard, the first time into new memory."""
        room.extend(map(torch.empty_like, shard[len(room) :]))
        for place, part in zip(room, shard, strict=True):
            place.copy_(part)

    for _ in range(rounds + 1):
        sync = timed(lambda: save_distributed(directory, model, optimizer, step=1, keep=1))
        os.sync()
        saves: list[Save] = []

        def begin(saves: list[Save] = saves) -> None:
            saves.append(save_distributed(directory, model, optimizer, step=1, keep=1, asynchronous=True))

        blocked = timed(begin)
        rest = timed(saves[0].wait)
        os.sync()
        seen.append((sync, blocked, blocked + rest, timed(copy)))
    return seen


# ---- memory --------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of this process's status, in bytes. Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure_memory(directory: Path, gib: float) -> tuple[int, int, int]:
    """Bytes that a save and a load take at their peaks, beside model and optimizer; those of the shard."""
    model, optimizer = build(0.01)  # what is imported and connected once is no cost of a save
    save_distributed(directory, model, optimizer, step=1)
    load_distributed(directory, model, optimizer)
    model, optimizer = build(gib)
    peaks = []
    for call in (
        lambda: save_distributed(directory, model, optimizer, step=1),
        lambda: load_distributed(directory, model, optimizer),
    ):
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # else the call takes what was freed here, and its peak is read too low
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
        call()
        peaks.append(status("VmHWM") - before)
        if len(peaks) == 1:
            for part in shard_of(model, optimizer):
                part.zero_()  # so that the load has to bring the values back
    found = {value for part in shard_of(model, optimizer) for value in part.unique().tolist()}
    assert found == {1.0, 2.0, 3.0}, f"expected the values that were saved, found {found}"
    return peaks[0], peaks[1], sum(part.nbytes for part in shard_of(model, optimizer))


# ---- the report ----------------------------------------------------------------------------------------


def hash_seconds() -> float:
    """Of one GiB on one core."""
    data = b"x" * (1 << 28)  # zeros would be one page of memory, which stays in the processor's cache
    blake3(data)
    start = time.perf_counter()
    blake3(data)
    return 4 * (time.perf_counter() - start)


def seconds(values: list[float]) -> list[str]:
    return [f"{statistics.median(values):.2f}", f"{min(values):.2f}-{max(values):.2f}"]


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measure(ranks: int, gib: float, rounds: int, directory: Path) -> dict[str, bool]:
    """Print the tables for that many ranks. Returns the limits, and whether they were held."""
    by_way = run_on_ranks(measure_ways, directory, gib, rounds, world_size=ranks, timeout=LIMIT_S)[0]
    blocking = run_on_ranks(
        measure_blocking, directory / "async", gib, rounds, world_size=ranks, timeout=LIMIT_S
    )[0]
    shutil.rmtree(directory / "async")

    peaks = [
        run_on_ranks(measure_memory, directory / "memory", gib, world_size=ranks, timeout=LIMIT_S)
        for _ in range(2)
    ]
    shutil.rmtree(directory / "memory")

    saves = {way: [save for save, _ in seen] for way, seen in by_way.items()}
    loads = {way: [load for _, load in seen] for way, seen in by_way.items()}
    plain = "plain DCP"
    rows = [
        [
            way,
            *seconds(saves[way]),
            f"{ratio(saves[way], saves[plain]):.2f}",
            *seconds(loads[way]),
            f"{ratio(loads[way], loads[plain]):.2f}",
        ]
        for way in WAYS
    ]
    print(f"\n{gib:g} GiB on {ranks} ranks, medians of {rounds} rounds")
    print(table(["way", "save s", "range", "/ DCP", "load s", "range", "/ DCP"], rows))

    first, *later = blocking
    sync, blocked, whole, copied = ([one[column] for one in later] for column in range(4))
    print(
        f"\nsynchronous {seconds(sync)[0]} s; asynchronous: blocked {statistics.median(blocked):.3f} s "
        f"({first[1]:.3f} s the first time, when the copy's memory is new), "
        f"durable after {seconds(whole)[0]} s; a copy of the shard alone: {statistics.median(copied):.3f} s "
        f"({first[3]:.3f} s into new memory), {ratio(copied, sync):.2f} "
        f"({first[3] / statistics.median(sync):.2f}) of a synchronous save"
    )
    memory = max(peak / shard for each in peaks for *two, shard in each for peak in two)
    gibs = [[f"{value / 2**30:.3f}" for value in rank] for rank in peaks[-1]]
    print("memory of a save and of a load beside the shard, and the shard, by rank (GiB):", gibs)

    save, load = ratio(saves["ours"], saves[plain]), ratio(loads["ours"], loads[plain])
    block = ratio(blocked, sync)
    cold = first[1] / statistics.median(sync)
    on, load_limit = f"on {ranks} ranks", LOAD_RATIOS.get(ranks, 1.2)
    return {
        f"{on} a save takes {save:.2f} of plain DCP's time (limit {SAVE_RATIO})": save <= SAVE_RATIO,
        f"{on} a verified load takes {load:.2f} of plain DCP's (limit {load_limit})": load <= load_limit,
        f"{on} an asynchronous save blocks {block:.2f} of a synchronous one (limit {BLOCKED})": block
        <= BLOCKED,
        f"{on} the first asynchronous save blocks {cold:.2f} of one (limit {FIRST})": cold <= FIRST,
        f"{on} a save or load takes {memory:.2f} shards of memory at most (limit {MEMORY})": memory <= MEMORY,
    }


def main() -> int:
    asked = options(__doc__, gib=1.0, ranks=[2, 4], rounds=5, directory=Path())
    print(describe())
    print(f"BLAKE3 takes {hash_seconds():.2f} s per GiB and core")
    held: dict[str, bool] = {}
    for ranks in asked.ranks:
        with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=asked.directory.absolute()) as directory:
            held |= measure(ranks, asked.gib, asked.rounds, Path(directory))
    return limits(held)


if __name__ == "__main__":
    sys.exit(main())

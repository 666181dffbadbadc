"""load_full: ranks that do not read the file never hold much more than their shard."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_utils import load_full, save_full
from tests.sharded import TwoRanks

WIDTH, LAYERS = 1024, 24  # 96 MiB of parameters, 288 MiB with AdamW's state; 144 MiB for each of two ranks
TENSOR = 4 * WIDTH**2  # bytes of one


def build(layers: int, value: float | None) -> tuple[nn.Module, Optimizer]:
    """On its shard alone, never whole; with an optimizer's state if there is a value for it."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        nn.init.constant_(param, value or 0.0)
        if value is not None:
            averages = {name: torch.full_like(param, value) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(value), **averages}
    return model, optimizer


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def save(path: Path) -> None:
    save_full(path, *build(LAYERS, 3.0))


def load(path: Path, small: Path) -> tuple[int, int]:
    """The peak of the process above what it was before the model was made, and the bytes of the shard."""
    save_full(small, *build(1, 1.0))
    load_full(small, *build(1, None))  # what is imported and connected once is no part of a load
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # else the load takes what was freed here, and its peak is read too low
    before = status("VmRSS")
    model, optimizer = build(LAYERS, None)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew: proc(5)
    load_full(path, model, optimizer)
    peak = status("VmHWM") - before
    tensors = [*model.parameters(), *(t for one in optimizer.state.values() for t in one.values() if t.dim())]
    assert len(tensors) == 3 * LAYERS
    shards = [tensor.to_local() for tensor in tensors]
    assert all((shard == 3.0).all() for shard in shards)
    return peak, sum(shard.nbytes for shard in shards)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_loading_takes_the_shard_and_one_tensor_on_ranks_that_do_not_read(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    two_ranks(save, tmp_path / "one.pt")
    _, (peak, shard) = two_ranks(load, tmp_path / "one.pt", tmp_path / "small.pt")
    assert shard == 3 * LAYERS * TENSOR // 2
    assert peak > shard, "the peak is not that of the load"
    # A second copy of the shard, or the whole state, would be 2.0 of it.
    assert peak <= 1.3 * shard + TENSOR, f"{peak / 2**20:.0f} MiB, for a shard of {shard / 2**20:.0f} MiB"

"""load_full: ranks that do not read the file never hold much more than their shard."""

from pathlib import Path

import pytest

from benchmarks.checkpoint import peak_of_load_full, save_for_memory
from tests.sharded import TwoRanks

GIB = 0.28  # of parameters and AdamW's state, in tensors of 16 MiB


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_loading_takes_the_shard_and_one_tensor_on_ranks_that_do_not_read(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    two_ranks(save_for_memory, tmp_path / "one.pt", GIB)
    _, (peak, shard, tensor) = two_ranks(peak_of_load_full, tmp_path / "one.pt", tmp_path / "small.pt", GIB)
    assert shard == pytest.approx(GIB / 2 * 2**30, rel=0.1)
    assert peak > shard, "the peak is not that of the load"
    # A second copy of the shard, or the whole state, would be 2.0 of it.
    assert peak <= 1.3 * shard + tensor, f"{peak / 2**20:.0f} MiB, for a shard of {shard / 2**20:.0f} MiB"

"""Who a process is among the ranks, rank 0 first, and each rank's share of the samples."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from fsdp_utils import get_local_rank, get_rank, get_world_size, rank0_first, sampler
from tests.on_ranks import Together

on_two = Together(2)

TORCHRUN = {"RANK": "7", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def who_am_i() -> tuple[int, int, int]:
    return get_rank(), get_world_size(), get_local_rank()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (7, 16, 3)),
        (SRUN, (5, 8, 1)),
        ({**SRUN, **TORCHRUN}, (7, 16, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0)),
        ({"RANK": "7"}, (0, 1, 0)),
    ],
    ids=["alone", "torchrun", "srun", "torchrun under srun", "batch script", "somebody else's RANK"],
)
def test_before_there_is_a_group_the_launcher_is_believed(
    environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert who_am_i() == expected


# ---- on two ranks --------------------------------------------------------------------------------------


@on_two
def test_rank_0_goes_first_and_the_others_see_what_it_did() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for turn in range(3):
        done = Path(folder[0], str(turn))
        with rank0_first():
            assert done.exists() is (get_rank() == 1)
            time.sleep(0.1)  # long enough for rank 1 to come too early if it does not wait
            done.touch()


@on_two
def test_when_rank_0_fails_the_others_raise_that_and_do_not_run() -> None:
    def fail(fails: Callable[[], Any]) -> None:
        with rank0_first(timeout=30):
            assert get_rank() == 0
            fails()

    for fails, kinds, said in (
        (lambda: Path("/no/dataset").read_text(), [FileNotFoundError] * 2, "No such file or directory"),
        (lambda: sys.exit("stop here"), [SystemExit, RuntimeError], "stop here"),
    ):
        with pytest.raises(kinds[get_rank()], match=said) as caught:
            fail(fails)
        if get_rank() == 1:
            assert "rank 0, in rank0_first" in str(caught.value.__cause__)
            assert "fails()" in str(caught.value.__cause__)  # the line


@on_two
def test_the_wait_for_rank_0_has_a_limit() -> None:
    if get_rank() == 1:
        with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s"), rank0_first(timeout=0.2):
            pass
    dist.barrier()


@on_two
def test_ranks_share_the_order_of_one_process_and_take_equally_many_steps() -> None:
    alone = list(DistributedSampler(range(10), 1, 0, seed=3))
    assert list(sampler(range(10), seed=3)) == alone[get_rank() :: 2]
    assert (len(list(sampler(range(5)))), len(list(sampler(range(5), drop_last=True)))) == (3, 2)
    os.environ.update(RANK="7", WORLD_SIZE="16")  # the group is believed before the environment
    assert who_am_i() == (dist.get_rank(), 2, dist.get_rank())


# ---- alone ---------------------------------------------------------------------------------------------


def test_rank0_first_runs_in_a_single_process_and_not_in_ranks_without_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    with rank0_first():
        ran.append("alone")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="init_process_group"), rank0_first():
        ran.append("too early")
    assert ran == ["alone"]


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match=r"'Stream' has no len\(\)"):
        sampler(Stream())

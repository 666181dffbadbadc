"""Who a process is among the ranks, rank 0 first, and each rank's share of the samples."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from fsdp_utils import get_local_rank, get_rank, get_world_size, rank0_first, sampler

TwoRanks = Callable[..., list[Any]]
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


# ---- rank0_first ---------------------------------------------------------------------------------------


def test_rank_0_goes_first_and_the_others_see_what_it_did(two_ranks: TwoRanks, tmp_path: Path) -> None:
    def fn() -> list[bool]:
        seen = []
        for turn in range(3):
            with rank0_first():
                seen.append((tmp_path / str(turn)).exists())
                time.sleep(0.1)  # long enough for rank 1 to come too early if it does not wait
                (tmp_path / str(turn)).touch()
        return seen

    assert two_ranks(fn) == [[False] * 3, [True] * 3]


def test_when_rank_0_fails_the_others_raise_that_and_do_not_run(two_ranks: TwoRanks) -> None:
    def first(fails: Callable[[], Any]) -> tuple[bool, str, str]:
        ran = False
        try:
            with rank0_first(timeout=30):
                ran = True
                fails()
        except BaseException as error:
            return ran, f"{type(error).__name__}: {error}", str(error.__cause__)
        return ran, "", ""

    ways = [lambda: Path("/no/dataset").read_text(), lambda: sys.exit("stop here")]
    expected = (
        "FileNotFoundError: [Errno 2] No such file or directory",
        "RuntimeError: rank 0, in rank0_first: SystemExit: stop here",
    )
    for on_0, (ran, text, cause), said in zip(
        *two_ranks(lambda: list(map(first, ways))), expected, strict=True
    ):
        assert (on_0[0], ran) == (True, False)
        assert text.startswith(said)
        assert "rank 0, in rank0_first" in cause
        assert "fails()" in cause  # the line


def test_the_wait_for_rank_0_has_a_limit(two_ranks: TwoRanks) -> None:
    def fn() -> str:
        if get_rank() == 0:
            return "never entered"
        with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s") as caught, rank0_first(timeout=0.2):
            pass
        return type(caught.value).__name__

    assert two_ranks(fn) == ["never entered", "TimeoutError"]


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


# ---- sampler -------------------------------------------------------------------------------------------


def test_ranks_share_the_order_of_one_process_and_take_equally_many_steps(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[list[int], int, int, tuple[int, int, int]]:
        even, dropped = list(sampler(range(5))), list(sampler(range(5), drop_last=True))
        os.environ.update(RANK="7", WORLD_SIZE="16")  # the group is believed before the environment
        return list(sampler(range(10), seed=3)), len(even), len(dropped), who_am_i()

    alone = list(sampler(range(10), seed=3))
    assert two_ranks(fn) == [(alone[rank::2], 3, 2, (rank, 2, rank)) for rank in range(2)]


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match=r"'Stream' has no len\(\)"):
        sampler(Stream())

"""run_on_ranks: which devices its ranks see, from which processes it may be called, where prints go."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.distributed.rank_process import START_LIMIT_S, Job, _be_rank

TwoRanks = Callable[..., list[Any]]

# ---- devices -------------------------------------------------------------------------------------------


def visible_gpus() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("HIP_VISIBLE_DEVICES")


def test_ranks_of_the_cpu_see_no_gpu(two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert two_ranks(visible_gpus) == [("", "-1")] * 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_what_the_fork_server_imports_asks_for_no_gpu() -> None:
    """Its answer would be remembered by torch and hold for all ranks, whatever they set later."""
    code = """
import torch
def fail(*arguments, **options): raise AssertionError("asked at import")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail
torch.accelerator.is_available = torch.accelerator.current_accelerator = torch._C._get_accelerator = fail
import fsdp_utils.distributed.preload
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("gpus", "found"), [(0, "found 0"), (1, "found 1")])
def test_cuda_ranks_without_a_gpu_each_are_refused_in_the_caller(gpus: int, found: str) -> None:
    with (
        patch.object(torch.cuda, "device_count", lambda: gpus),
        pytest.raises(RuntimeError, match=rf'a GPU for each rank: expected 2, {found}.*device="cpu"'),
    ):
        run_on_ranks(get_rank, device="cuda")


def test_a_torch_without_cuda_is_named() -> None:
    with (
        patch.object(torch.backends.cuda, "is_built", lambda: False),
        patch.object(torch.cuda, "device_count", lambda: 0),
        pytest.raises(RuntimeError, match=r"found 0 \(this torch is a build without CUDA\)"),
    ):
        run_on_ranks(get_rank, world_size=1, device="cuda")


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match='expected device "cpu" or "cuda", found \'gpu\''):
        run_on_ranks(get_rank, device="gpu")


def be_a_rank_with_a_gpu(directory: Path) -> tuple[list[Any], dict[str, str], int]:
    """What the third of three CUDA ranks does, on a rank that has no GPU."""
    calls: list[Any] = []
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6", "PATH": os.environ["PATH"]}
    job = Job(3, "cuda", directory, environ, None, b"", 7.0)
    with (
        patch.object(torch.cuda, "set_device", lambda device: calls.append(("set_device", device))),
        patch.object(dist, "init_process_group", lambda *args, **options: calls.append((args, options))),
    ):
        _be_rank(2, job)
    return calls, dict(os.environ), torch.get_num_threads()


def test_a_cuda_rank_takes_its_gpu_then_joins_nccl(two_ranks: TwoRanks, tmp_path: Path) -> None:
    calls, environ, threads = two_ranks(be_a_rank_with_a_gpu, tmp_path)[0]
    set_device, (args, options) = calls
    assert set_device == ("set_device", 2)
    assert args == ("cpu:gloo,cuda:nccl",)
    assert (options["rank"], options["world_size"]) == (2, 3)
    assert options["timeout"].total_seconds() == 7 + START_LIMIT_S
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    assert "HIP_VISIBLE_DEVICES" not in environ
    assert environ["LOCAL_RANK"] == "2"
    if sys.platform == "linux":
        assert environ["NCCL_SOCKET_IFNAME"] == "=lo"
        assert threads == max(1, len(psutil.Process().cpu_affinity()) // 3)


def test_cuda_ranks_start_afresh_and_not_as_forks() -> None:
    with patch.object(torch.cuda, "device_count", lambda: 1):
        if torch.cuda.is_available():
            assert run_on_ranks(torch.cuda.current_device, world_size=1, device="cuda") == [0]
        else:  # the rank comes as far as its GPU
            # the exception differs with how torch was built
            with pytest.raises((AssertionError, AttributeError, RuntimeError), match=r"(?i)cuda") as caught:
                run_on_ranks(get_rank, world_size=1, device="cuda")
            assert "torch.cuda.set_device(rank)" in str(caught.value.__cause__)


# ---- callers -------------------------------------------------------------------------------------------


def call_from_here() -> list[int]:
    return run_on_ranks(get_rank)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_may_call_it_although_the_server_is_its_parents(two_ranks: TwoRanks) -> None:
    two_ranks(get_rank)  # the server is up
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(call_from_here).result(timeout=100) == [0, 1]


def test_a_daemonic_process_is_told_that_it_cannot() -> None:
    with (
        multiprocessing.get_context("forkserver").Pool(1) as pool,
        pytest.raises(RuntimeError, match=r"this process is daemonic.*ProcessPoolExecutor"),
    ):
        pool.apply(call_from_here)


# ---- how ranks end -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs real-time signals")
def test_death_by_a_real_time_signal_is_named(two_ranks: TwoRanks) -> None:
    def fn() -> None:
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGRTMIN + 3)
        dist.barrier()

    number = signal.SIGRTMIN + 3
    with pytest.raises(RuntimeError, match=rf"rank 1 was killed by signal {number} \(SIGRTMIN\+3\)"):
        two_ranks(fn)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a supervisor process")
def test_a_supervisor_that_does_not_answer_is_not_waited_for(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_utils.distributed.launch._EXIT_S", 0.3)

    def fn() -> tuple[int, int]:
        os.kill(os.getppid(), signal.SIGSTOP)
        return os.getpid(), os.getppid()

    for process in [process for rank in two_ranks(fn) for process in rank]:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).wait(10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_closes_its_connection_to_the_caller_is_named_without_a_traceback(
    two_ranks: TwoRanks, capfd: pytest.CaptureFixture
) -> None:
    def fn() -> None:
        if get_rank() == 1:
            for path in list(Path("/proc/self/fd").iterdir()):  # gloo's stay open: it would abort
                with suppress(OSError), socket.socket(fileno=int(path.name)) as found:
                    if found.family != socket.AF_UNIX:
                        found.detach()

    with pytest.raises(RuntimeError, match=r"rank 1 closed its connection to the caller \(does"):
        two_ranks(fn)
    assert capfd.readouterr().err == ""


# ---- prints --------------------------------------------------------------------------------------------


def test_prints_go_where_the_callers_go_even_if_that_changed_since_the_first_call(
    two_ranks: TwoRanks, capfd: pytest.CaptureFixture
) -> None:
    def fn() -> None:
        print(f"out of rank {get_rank()}")
        print(f"err of rank {get_rank()}", file=sys.stderr)

    two_ranks(fn)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(captured.err.splitlines()) == ["err of rank 0", "err of rank 1"]


def test_a_caller_without_standard_output_is_served(two_ranks: TwoRanks) -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        assert two_ranks(get_rank) == [0, 1]
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def ends_whoever_unpickles_it(raised: bool) -> Any:
    class Leaves(Exception):
        def __reduce__(self) -> Any:
            return sys.exit, (3,)

    if raised:
        raise Leaves
    return Leaves()


def test_what_a_rank_sends_does_not_end_the_caller(two_ranks: TwoRanks) -> None:
    with pytest.raises(RuntimeError, match=r"rank \d of 2: .*Leaves"):
        two_ranks(ends_whoever_unpickles_it, True)
    with pytest.raises(RuntimeError, match="what rank 0 returned cannot be read here: SystemExit: 3"):
        two_ranks(ends_whoever_unpickles_it, False)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_timeout_that_is_none_is_refused_in_the_caller(timeout: float) -> None:
    with pytest.raises(ValueError, match="expected a timeout above 0 and at most 1,000,000 seconds"):
        run_on_ranks(visible_gpus, timeout=timeout)


@pytest.mark.parametrize("world_size", ["2", 2.0, True, 0])
def test_a_number_of_ranks_that_is_none_is_refused_in_the_caller(world_size: Any) -> None:
    with pytest.raises(ValueError, match=f"expected world_size of at least 1, found {world_size!r}"):
        run_on_ranks(visible_gpus, world_size=world_size)

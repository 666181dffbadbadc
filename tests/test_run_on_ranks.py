"""run_on_ranks under every way a rank or its caller can fail: what comes back, and that nothing stays."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from fsdp_utils import get_rank, run_on_ranks, sampler

TwoRanks = Callable[..., list[Any]]
ROOT = Path(__file__).parent.parent


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true within 60 s"
        time.sleep(0.02)


# ---- what fn finds, and what comes back ------------------------------------------------------------------


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x * (get_rank() + 1)
    dist.all_reduce(x)
    return x


def test_results_come_by_rank_and_by_value() -> None:
    results = run_on_ranks(summed, torch.ones(2_500_000), world_size=3)  # 10 MB each way
    assert all(torch.equal(result, torch.full((2_500_000,), 6.0)) for result in results)
    results[0].zero_()
    assert results[1].sum() == 15_000_000
    assert run_on_ranks(get_rank, world_size=1) == [0]


def test_the_environment_is_torchruns_and_otherwise_the_callers(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # the server is up since the test before: what follows must not depend on the environment it started with
    for name in ("A_SETTING", "RANK", "TORCHELASTIC_USE_AGENT_STORE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "5")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.chdir(tmp_path)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "A_SETTING")
    gpus = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCHELASTIC_USE_AGENT_STORE")

    def fn() -> tuple[list[str | None], str, int, int]:
        environ = [os.environ.get(name) for name in names + gpus]
        return environ, str(Path.cwd()), torch.get_num_threads(), gc.get_freeze_count()

    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count()
    for rank, (environ, cwd, threads, frozen) in enumerate(two_ranks(fn)):
        assert environ == [str(rank), str(rank), "0", "2", "2", "5", "", "-1", None]
        assert Path(cwd).samefile(tmp_path)
        assert threads == max(1, cores // 2)
        assert frozen > 100_000  # torch, mostly, is not looked through for garbage
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_on_ranks(torch.get_num_threads, world_size=1) == [1]


def test_ranks_listen_on_loopback_only_may_start_workers_and_print_where_the_caller_does(
    two_ranks: TwoRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    def fn() -> tuple[set[str], int]:
        print(f"out of rank {get_rank()}")
        print(f"err of rank {get_rank()}", file=sys.stderr)
        dataset = TensorDataset(torch.arange(8))
        loader = DataLoader(dataset, batch_size=2, sampler=sampler(dataset), num_workers=1)
        loaded = int(sum(batch.sum() for (batch,) in loader))
        dist.barrier()
        return {socket.laddr.ip for socket in psutil.Process().net_connections("inet")}, loaded

    (first, some), (second, others) = two_ranks(fn)
    assert first
    assert first | second <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert some + others == sum(range(8))
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(captured.err.splitlines()) == ["err of rank 0", "err of rank 1"]


def call_from_here() -> list[int]:
    return run_on_ranks(get_rank, world_size=1)


def test_a_forked_process_may_call_it_although_the_server_is_its_parents() -> None:
    run_on_ranks(get_rank, world_size=1)  # the server is up
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(call_from_here).result(timeout=100) == [0]


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"world_size": n}, f"world_size of at least 1, found {n!r}") for n in ("2", True, 0)),
        *(({"timeout": s}, f"a timeout above 0, found {s}") for s in (0.0, float("nan"))),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"expected.* {message}"):
        run_on_ranks(get_rank, **options)


def test_what_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks: .*lock"):
        run_on_ranks(lambda: lock)  # before anything starts
    with pytest.raises(TypeError, match=r"cannot pickle.*lock"):
        run_on_ranks(threading.Lock)


# ---- one exception, the earliest rank's ------------------------------------------------------------------


class OwnError(Exception):
    pass


class UnfriendlyError(Exception):
    """Pickles, but cannot be built again from its args."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} ({code})")


def test_a_rank_that_raises_frees_its_peers_and_its_own_exception_arrives(two_ranks: TwoRanks) -> None:
    class LocalError(Exception):
        pass

    def fn() -> None:
        if get_rank() == 1:
            raise LocalError("rank 1 had enough")
        dist.all_reduce(torch.ones(1))  # waits for rank 1 for ever

    with pytest.raises(LocalError, match="rank 1 had enough") as caught:
        two_ranks(fn, timeout=3600)
    cause = str(caught.value.__cause__)
    assert cause.startswith("rank 1 of 2")
    assert 'raise LocalError("rank 1 had enough")' in cause
    assert "call_function" not in cause  # the reader's frames alone


def test_of_several_failures_the_earliest_is_raised_even_if_it_arrives_later(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    happened = tmp_path / "happened"

    class SlowToTell(Exception):
        def __reduce__(self) -> tuple[type, tuple[int]]:
            happened.touch()
            time.sleep(0.1)
            return OwnError, (1,)

    def fn() -> None:
        if get_rank() == 1:
            raise SlowToTell
        wait_until(happened.exists)
        raise OwnError(get_rank())

    with pytest.raises(OwnError) as caught:
        two_ranks(fn)
    assert caught.value.args == (1,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnfriendlyError(7, "no way back"), r".*UnfriendlyError: no way back \(7\)"),
        (lambda: OwnError(threading.Lock()), r".*OwnError: <unlocked"),
        (lambda: SystemExit(3), r"SystemExit: 3"),
    ],
    ids=["not rebuilt", "not pickled", "exit"],
)
def test_what_cannot_be_raised_here_becomes_a_runtime_error_that_tells_it(
    make: Callable[[], BaseException], message: str
) -> None:
    def fn() -> None:
        raise make()

    with pytest.raises(RuntimeError, match=rf"rank 0 of 1: {message}") as caught:
        run_on_ranks(fn, world_size=1)
    assert "raise make()" in str(caught.value.__cause__)


# ---- ranks that die or hang: what is told, and that nothing stays ------------------------------------------


def leave_traces(directory: Path) -> None:
    """Write down this rank's process and what it started: in its session, in another one, and a daemon."""
    pids = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (False, True)]
    daemon = "setsid sleep 1000 >&- 2>&- & echo $!"  # a shell that starts it, tells its id, and exits
    pids.append(int(subprocess.run(["sh", "-c", daemon], stdout=subprocess.PIPE, check=True).stdout))
    for pid in (os.getpid(), *pids):
        (directory / str(pid)).touch()


def alive(directory: Path) -> list[psutil.Process]:
    pids = {int(path.name) for path in directory.iterdir()}
    return [
        process
        for process in psutil.process_iter()
        if process.pid in pids and process.status() != psutil.STATUS_ZOMBIE
    ]


def end_in_c_code() -> None:
    sum(range(10**12))  # holds the interpreter: no Python code of ours could run in this process


ENDS: dict[str, tuple[Callable[[], Any], type[Exception] | None, str]] = {
    "return": (int, None, ""),
    "exit": (lambda: os._exit(17), RuntimeError, "rank 1 ended with exit code 17"),
    "kill": (lambda: os.kill(os.getpid(), 40), RuntimeError, r"rank 1 was killed by signal 40"),
    "hang": (
        lambda: time.sleep(1000),
        TimeoutError,
        r"ranks \[0, 1\] within 6 s.*dist.barrier\(\)  # where rank 1 is gone.*time.sleep\(1000\)",
    ),
    "hang in C": (end_in_c_code, TimeoutError, r"sum\(range\(10\*\*12\)\)  # holds the interpreter"),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_rank_ends_it_is_told_and_its_processes_are_gone(
    two_ranks: TwoRanks, tmp_path: Path, end: str
) -> None:
    ends, kind, message = ENDS[end]

    def fn() -> None:
        leave_traces(tmp_path)
        dist.barrier()
        if get_rank() == 1:
            ends()
        dist.barrier()  # where rank 1 is gone, this fails with "connection closed", which is not the news

    if kind is None:
        two_ranks(fn)
    else:
        with pytest.raises(kind, match=f"(?s){message}"):
            two_ranks(fn, timeout=6 if end.startswith("hang") else 60)
    assert len(list(tmp_path.iterdir())) == 8
    wait_until(lambda: not alive(tmp_path))


# ---- in a script -------------------------------------------------------------------------------------------


# After the text each rank hangs in its own way: asleep, in a collective, and in C code.
SCRIPT = """
    import os, signal, sys, time
    import torch.distributed as dist
    from pathlib import Path
    from fsdp_utils import run_on_ranks
    from tests.test_run_on_ranks import end_in_c_code, leave_traces

    # what a shell starts in the background, as these tests may be, ignores Ctrl-C unless told otherwise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("top level")

    class Box:
        def __init__(self, value): self.value = value

    class BoxError(Exception): pass

    def fn(box):
        return Box(box.value * 3 + dist.get_rank())

    def fails(): raise BoxError("from main")

    print([type(box) is Box and box.value for box in run_on_ranks(fn, Box(5))])
    try:
        run_on_ranks(fails)
    except BoxError as error:
        print("caught", error)

    def hang():
        leave_traces(Path(sys.argv[1]))
        [lambda: time.sleep(1000), dist.barrier, end_in_c_code][dist.get_rank()]()

    for _ in range(2):
        try:
            run_on_ranks(hang, world_size=3)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def test_a_script_may_call_it_at_its_top_level_and_takes_all_with_it(tmp_path: Path) -> None:
    script, traces = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(SCRIPT))
    traces.mkdir()
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen(
        [sys.executable, script, traces],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for count, number in ((12, signal.SIGINT), (24, signal.SIGKILL)):
            wait_until(lambda count=count: len(list(traces.iterdir())) == count or caller.poll() is not None)
            started = psutil.Process(caller.pid).children(recursive=True)
            caller.send_signal(number)
        out, err = caller.communicate(timeout=30)
    finally:
        caller.kill()
    assert out.splitlines() == ["top level", "[15, 16]", "caught from main", "interrupted"]
    assert (err, caller.returncode) == ("", -signal.SIGKILL)
    assert len(list(traces.iterdir())) == 24
    wait_until(lambda: not alive(traces) and not any(process.is_running() for process in started))
    assert list(tmp_path.glob("fsdp_utils_*")) == []

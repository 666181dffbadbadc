"""Rank helpers, and run_on_ranks under every way a rank or its caller can fail."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fsdp_utils import (
    get_local_rank,
    get_node_rank,
    get_rank,
    get_world_size,
    rank0_first,
    run_on_ranks,
    sampler,
)

TwoRanks = Callable[..., list[Any]]
ROOT = Path(__file__).parent.parent
LAUNCHER_VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"),
]


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def who_am_i() -> tuple[int, int, int, int]:
    return get_rank(), get_world_size(), get_local_rank(), get_node_rank()


# ---- rank, world size, local rank, node rank ---------------------------------------------------------


def test_a_process_on_its_own_is_rank_0_of_1() -> None:
    assert who_am_i() == (0, 1, 0, 0)


def test_before_there_is_a_group_the_launcher_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "7", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert who_am_i() == (7, 16, 3, 1)


def test_srun_is_a_launcher_and_torchrun_under_it_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    assert who_am_i() == (5, 8, 1, 2)
    for name, value in {"RANK": "9", "WORLD_SIZE": "64", "LOCAL_RANK": "4", "GROUP_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert who_am_i() == (9, 64, 4, 3)


def test_a_slurm_batch_script_or_shell_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert who_am_i() == (0, 1, 0, 0)


def test_a_rank_without_a_world_size_is_somebody_elses_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    assert get_rank() == 0


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ValueError, match="LOCAL_RANK: expected an integer, found 'first'"):
        get_local_rank()


def test_the_group_is_believed_before_the_environment(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[int, int, int, int]:
        os.environ.update(RANK="7", WORLD_SIZE="16")
        return who_am_i()

    assert two_ranks(fn) == [(0, 2, 0, 0), (1, 2, 1, 0)]


# ---- rank0_first ---------------------------------------------------------------------------------------


def test_rank_0_goes_first_and_the_others_see_what_it_did(two_ranks: TwoRanks, tmp_path: Path) -> None:
    def fn(directory: Path) -> list[bool]:
        seen = []
        for turn in range(3):
            with rank0_first():
                seen.append((directory / str(turn)).exists())
                time.sleep(0.1)  # long enough for rank 1 to come too early if it does not wait
                (directory / str(turn)).touch()
        return seen

    assert two_ranks(fn, tmp_path) == [[False] * 3, [True] * 3]


def test_when_rank_0_fails_the_others_get_its_exception_and_not_their_turn(
    two_ranks: TwoRanks,
) -> None:
    def fn() -> tuple[str, str, bool]:
        ran = False
        try:
            with rank0_first(timeout=30):
                ran = True
                raise FileNotFoundError("no such dataset")
        except FileNotFoundError as error:
            return str(error), str(error.__cause__), ran

    (message_0, _, ran_0), (message_1, cause_1, ran_1) = two_ranks(fn)
    assert (message_0, ran_0) == ("no such dataset", True)
    assert (message_1, ran_1) == ("no such dataset", False)
    assert "rank 0, in rank0_first" in cause_1
    assert 'raise FileNotFoundError("no such dataset")' in cause_1


def test_when_rank_0_exits_the_others_fail_rather_than_exit(two_ranks: TwoRanks) -> None:
    def fn() -> str:
        try:
            with rank0_first(timeout=30):
                sys.exit("stop here")
        except (SystemExit, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    assert two_ranks(fn) == [
        "SystemExit: stop here",
        "RuntimeError: rank 0, in rank0_first: SystemExit: stop here",
    ]


def test_the_wait_for_rank_0_has_a_limit(two_ranks: TwoRanks) -> None:
    def fn() -> str:
        if get_rank() == 0:
            return "never entered"
        with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s") as caught, rank0_first(timeout=0.2):
            pass
        return type(caught.value).__name__

    assert two_ranks(fn) == ["never entered", "TimeoutError"]


def test_rank0_first_simply_runs_in_a_single_process() -> None:
    ran = False
    with rank0_first():
        ran = True
    assert ran


def test_rank0_first_does_not_let_all_ranks_go_at_once_for_want_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"rank 1 of 4.*init_process_group"), rank0_first():
        pass


# ---- sampler -------------------------------------------------------------------------------------------


def test_alone_the_sampler_gives_every_sample_once_in_an_order_that_changes_by_epoch() -> None:
    dataset = TensorDataset(torch.arange(10))
    order = sampler(dataset)
    epochs = []
    for epoch in range(2):
        order.set_epoch(epoch)
        epochs.append(
            [int(i) for (batch,) in DataLoader(dataset, batch_size=3, sampler=order) for i in batch]
        )
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert list(sampler(dataset, shuffle=False)) == list(range(10))


def test_the_ranks_share_the_order_that_one_process_has(two_ranks: TwoRanks) -> None:
    alone = list(sampler(range(10), seed=3))
    by_rank = two_ranks(lambda: list(sampler(range(10), seed=3)))
    assert by_rank == [alone[0::2], alone[1::2]]


def test_all_ranks_take_equally_many_steps(two_ranks: TwoRanks) -> None:
    assert two_ranks(lambda: len(list(sampler(range(5))))) == [3, 3]
    assert two_ranks(lambda: len(list(sampler(range(5), drop_last=True)))) == [2, 2]


def test_a_dataset_without_a_length_is_refused_with_what_to_do() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match=r"found Stream.*get_rank\(\) and get_world_size\(\)"):
        sampler(Stream())


# ---- run_on_ranks: what fn finds, and what comes back ----------------------------------------------------


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x * (get_rank() + 1)
    dist.all_reduce(x)
    return x


def test_results_come_by_rank_and_tensors_by_value() -> None:
    results = run_on_ranks(summed, torch.ones(3), world_size=3)
    assert [result.tolist() for result in results] == [[6.0] * 3] * 3
    results[0].zero_()
    assert results[1].tolist() == [6.0] * 3
    assert run_on_ranks(get_rank, world_size=3) == [0, 1, 2]
    assert run_on_ranks(summed, torch.ones(1), world_size=1) == [torch.ones(1)]


def test_closures_and_lambdas_and_their_classes_travel(two_ranks: TwoRanks) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    offset = 10
    results = two_ranks(lambda point: Point(point.x + offset + get_rank()), Point(5))
    assert [result.x for result in results] == [15, 16]
    assert all(type(result) is Point for result in results)


def test_the_environment_is_torchruns_and_otherwise_the_callers(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_ranks(get_rank)  # the server is up: what follows must not depend on the environment it started with
    monkeypatch.setenv("A_SETTING", "of now")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.chdir(tmp_path)
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "A_SETTING"]

    def fn() -> tuple[list[str], bool, str, int]:
        environ = [os.environ[name] for name in names]
        return environ, "TORCHELASTIC_USE_AGENT_STORE" in os.environ, str(Path.cwd()), torch.get_num_threads()

    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count()
    for rank, (environ, elastic, cwd, threads) in enumerate(two_ranks(fn)):
        assert environ == [str(rank), str(rank), "0", "2", "2", "of now"]
        assert not elastic
        assert Path(cwd).samefile(tmp_path)
        assert threads == max(1, cores // 2)
    assert run_on_ranks(torch.get_num_threads, world_size=1) == [cores]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_on_ranks(torch.get_num_threads, world_size=1) == [1]


def test_what_a_rank_begins_with_is_not_looked_through_for_garbage(two_ranks: TwoRanks) -> None:
    assert min(two_ranks(gc.get_freeze_count)) > 100_000  # torch, mostly


def test_ranks_listen_on_the_loopback_interface_only(two_ranks: TwoRanks) -> None:
    def fn() -> set[str]:
        dist.barrier()
        sockets = psutil.Process().net_connections("inet")
        return {socket.laddr.ip for socket in sockets}

    addresses = set().union(*two_ranks(fn))
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_dataloader_with_workers_works_in_a_rank(two_ranks: TwoRanks) -> None:
    def fn() -> int:
        dataset = TensorDataset(torch.arange(8))
        loader = DataLoader(dataset, batch_size=2, sampler=sampler(dataset), num_workers=1)
        return int(sum(batch.sum() for (batch,) in loader))

    assert sum(two_ranks(fn)) == sum(range(8))


def test_two_calls_at_once_do_not_meet() -> None:
    results: dict[int, list[torch.Tensor]] = {}

    def call(factor: int) -> None:
        results[factor] = run_on_ranks(summed, torch.tensor([float(factor)]))

    threads = [threading.Thread(target=call, args=(factor,)) for factor in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {factor: [result.item() for result in by_rank] for factor, by_rank in results.items()} == {
        1: [3.0, 3.0],
        10: [30.0, 30.0],
    }


def test_ten_megabytes_each_way_pass(two_ranks: TwoRanks) -> None:
    data = torch.arange(2_500_000, dtype=torch.float32)
    for rank, result in enumerate(two_ranks(lambda x: x + get_rank(), data)):
        assert torch.equal(result, data + rank)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"world_size": 0}, "world_size of at least 1, found 0"),
        ({"timeout": 0}, "above 0 and at most 1,000,000 seconds, found 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_on_ranks(get_rank, **kwargs)


def test_what_cannot_travel_is_said_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks: .*lock"):
        run_on_ranks(lambda: lock)


def test_a_result_that_cannot_travel_is_that_ranks_failure(two_ranks: TwoRanks) -> None:
    with pytest.raises(TypeError, match=r"what fn returned cannot be sent to the caller: .*lock"):
        two_ranks(threading.Lock)


def test_a_result_that_cannot_be_read_here_is_told_with_its_rank(two_ranks: TwoRanks) -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[type, tuple[str]]:
            return int, ("not a number",)

    with pytest.raises(RuntimeError, match=r"what rank 0 returned cannot be read here: ValueError.*number"):
        two_ranks(Unreadable)


# ---- run_on_ranks: one exception, the earliest rank's ----------------------------------------------------


class OwnError(Exception):
    pass


class UnfriendlyError(Exception):
    """Pickles, but cannot be built again from its args."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} ({code})")


def test_a_rank_that_raises_frees_its_peers_and_its_own_exception_arrives(
    two_ranks: TwoRanks,
) -> None:
    def fn() -> None:
        if get_rank() == 1:
            raise OwnError("rank 1 had enough")
        dist.all_reduce(torch.ones(1))  # waits for rank 1 for ever

    with pytest.raises(OwnError, match="rank 1 had enough") as caught:
        two_ranks(fn, timeout=3600)
    cause = str(caught.value.__cause__)
    assert cause.startswith("rank 1 of 2")
    assert 'raise OwnError("rank 1 had enough")' in cause
    assert "_rank_main" not in cause  # the reader's frames alone


def test_an_exception_class_made_in_a_function_arrives_as_itself(two_ranks: TwoRanks) -> None:
    class LocalError(Exception):
        pass

    def fn() -> None:
        raise LocalError(get_rank())

    with pytest.raises(LocalError):
        two_ranks(fn)


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_failures_the_earliest_is_raised_even_if_it_takes_longer_to_tell(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: int
) -> None:
    monkeypatch.setattr("fsdp_utils.distributed.launch._BLAME_S", 30.0)  # however slow this machine is
    happened = tmp_path / "happened"

    class SlowToTell(Exception):
        def __reduce__(self) -> tuple[type, tuple[int]]:
            happened.touch()
            time.sleep(0.3)
            return OwnError, (first,)

    def fn() -> None:
        if get_rank() == first:
            raise SlowToTell
        wait_until(happened.exists)
        raise OwnError(get_rank())

    with pytest.raises(OwnError) as caught:
        two_ranks(fn)
    assert caught.value.args == (first,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnfriendlyError(7, "no way back"), r"rank [01] of 2: .*UnfriendlyError: no way back \(7\)"),
        (lambda: OwnError(threading.Lock()), r"rank [01] of 2: .*OwnError: <unlocked"),
        (lambda: SystemExit(3), r"rank [01] of 2: SystemExit: 3"),
        (lambda: KeyboardInterrupt(), r"rank [01] of 2: KeyboardInterrupt"),
    ],
    ids=["not rebuilt", "not pickled", "exit", "interrupt"],
)
def test_what_cannot_be_raised_here_becomes_a_runtime_error_that_tells_it(
    two_ranks: TwoRanks, make: Callable[[], BaseException], message: str
) -> None:
    def fn() -> None:
        raise make()

    with pytest.raises(RuntimeError, match=message) as caught:
        two_ranks(fn)
    assert "raise make()" in str(caught.value.__cause__)


# ---- run_on_ranks: ranks that die or hang ----------------------------------------------------------------


def test_a_rank_killed_by_a_signal_is_named_with_it(two_ranks: TwoRanks) -> None:
    def fn() -> None:
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))  # fails with "connection closed by peer", which is not the news

    with pytest.raises(RuntimeError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        two_ranks(fn)


def test_a_rank_that_exits_is_named_with_its_code(two_ranks: TwoRanks) -> None:
    def fn() -> None:
        if get_rank() == 0:
            os._exit(17)
        dist.barrier()

    with pytest.raises(RuntimeError, match="rank 0 exited with code 17"):
        two_ranks(fn)


def test_a_hang_ends_with_the_line_on_which_each_rank_stands(two_ranks: TwoRanks) -> None:
    def fn() -> None:
        if get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # only rank 0 is here

    with pytest.raises(TimeoutError) as caught:
        two_ranks(fn, timeout=1)
    message = str(caught.value)
    assert "ranks [0] within 1 s" in message
    assert "dist.all_reduce(torch.ones(1))  # only rank 0 is here" in message
    assert f'File "{__file__}"' in message
    assert "rank 1: has returned" in message
    assert "_rank_main" not in message


def test_a_rank_in_c_code_that_never_lets_go_is_shown_and_ended(two_ranks: TwoRanks) -> None:
    def fn() -> None:
        sum(range(10**12))  # holds the interpreter: no Python code of ours could run in this process

    with pytest.raises(TimeoutError, match=r"sum\(range\(10\*\*12\)\)"):
        two_ranks(fn, timeout=1)


# ---- run_on_ranks: nothing stays ---------------------------------------------------------------------------


def leave_traces(directory: Path) -> None:
    """Write down this rank's process and two that it started, of which one has a session of its own."""
    children = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
    for pid in (os.getpid(), *(child.pid for child in children)):
        (directory / str(pid)).touch()


def alive(directory: Path) -> list[psutil.Process]:
    pids = {int(path.name) for path in directory.iterdir()}
    return [
        process
        for process in psutil.process_iter()
        if process.pid in pids and process.status() != psutil.STATUS_ZOMBIE
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true within 60 s"
        time.sleep(0.02)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    directory = tmp_path / "pids"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("end", ["return", "raise", "die", "hang"])
def test_however_fn_ends_its_processes_are_gone(two_ranks: TwoRanks, traces: Path, end: str) -> None:
    def fn() -> None:
        leave_traces(traces)
        dist.barrier()
        if end == "raise":
            raise OwnError
        if end == "die":
            os._exit(1)
        if end == "hang":
            time.sleep(1000)

    expected = {"return": (), "raise": OwnError, "die": RuntimeError, "hang": TimeoutError}[end]
    try:
        two_ranks(fn, timeout=3)
    except expected:
        pass
    else:
        assert end == "return"
    assert len(list(traces.iterdir())) == 6
    assert not alive(traces)


def test_daemons_that_fn_left_behind_are_gone(two_ranks: TwoRanks, traces: Path) -> None:
    def fn() -> None:
        # a shell that starts a process in a session of its own, tells its id, and exits
        script = "setsid sleep 1000 >&- 2>&- & echo $!"
        pid = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
        (traces / pid.strip()).touch()

    two_ranks(fn)
    assert len(list(traces.iterdir())) == 2
    wait_until(lambda: not alive(traces))


# ---- run_on_ranks in a script ------------------------------------------------------------------------------


# Each rank hangs in its own way: asleep, in a collective, and in C code that lets no other Python code run.
HANGS = """
    import os, subprocess, sys, time
    from pathlib import Path
    import torch.distributed as dist
    from fsdp_utils import run_on_ranks

    def hang():
        children = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
        for pid in (os.getpid(), *(child.pid for child in children)):
            Path(sys.argv[1], str(pid)).touch()
        if dist.get_rank() == 0:
            time.sleep(1000)
        elif dist.get_rank() == 1:
            dist.barrier()
        else:
            sum(range(10**12))

    try:
        run_on_ranks(hang, world_size=3)
    except KeyboardInterrupt:
        print("interrupted")
"""


class Script:
    """Runs text in a script, without an `if __name__ == "__main__"`, which then hangs until it gets a signal.

    Attributes:
        processes: all that it had started when it hung.
        folder: the script's, and its directory for temporary files.
        traces: a folder with the processes of the ranks that hung and what they had started, by name.
        out, err, code: how it ended.
    """

    def __init__(self, folder: Path, text: str, number: signal.Signals) -> None:
        # what a shell starts in the background, as these tests may be, ignores Ctrl-C unless told otherwise
        head = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        self.folder = folder
        file, self.traces = folder / "script.py", folder / "pids"
        file.write_text(head + textwrap.dedent(text) + textwrap.dedent(HANGS))
        self.traces.mkdir()
        caller = subprocess.Popen(
            [sys.executable, file, self.traces],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: len(list(self.traces.iterdir())) == 9 or caller.poll() is not None)
            self.processes = psutil.Process(caller.pid).children(recursive=True)
            caller.send_signal(number)
            self.out, self.err = caller.communicate(timeout=30)
        finally:
            caller.kill()
        self.code = caller.returncode


OWN_CLASSES = """
    import torch, torch.distributed as dist
    from fsdp_utils import run_on_ranks

    print("top level")
    FACTOR = 3

    class Box:
        def __init__(self, value): self.value = value

    class BoxError(Exception): pass

    def helper(box):
        return Box(box.value * FACTOR + dist.get_rank())

    def fn(box):
        print("said on rank", dist.get_rank())
        return helper(box)

    def fails():
        raise BoxError("from main")

    results = run_on_ranks(fn, Box(5))
    print([type(box) is Box and box.value for box in results])
    try:
        run_on_ranks(fails)
    except BoxError as error:
        print("caught", error)
"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(tmp_path_factory.mktemp("interrupted"), OWN_CLASSES, signal.SIGINT)


def test_a_script_may_call_it_at_its_top_level_with_its_own_classes(interrupted: Script) -> None:
    lines = ["top level", "said on rank 0", "said on rank 1", "[15, 16]", "caught from main"]
    assert sorted(interrupted.out.splitlines()) == sorted([*lines, "interrupted"])
    assert (interrupted.err, interrupted.code) == ("", 0)


def test_ctrl_c_in_the_caller_ends_the_ranks(interrupted: Script) -> None:
    assert interrupted.out.splitlines()[-1] == "interrupted"
    assert (interrupted.err, interrupted.code) == ("", 0)
    assert len(list(interrupted.traces.iterdir())) == 9
    wait_until(lambda: not alive(interrupted.traces))


MANY_LINES = """
    from fsdp_utils import run_on_ranks

    def fn():
        for _ in range(300):
            print(*"abcdefgh")

    run_on_ranks(fn)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Script:
    with pytest.MonkeyPatch.context() as patch:
        # many containers set it; each part of a print is then a write
        patch.setenv("PYTHONUNBUFFERED", "1")
        return Script(tmp_path_factory.mktemp("killed"), MANY_LINES, signal.SIGKILL)


def test_prints_of_ranks_arrive_in_whole_lines(killed: Script) -> None:
    assert (killed.out.splitlines(), killed.err) == (["a b c d e f g h"] * 600, "")


def test_a_killed_caller_takes_all_with_it(killed: Script) -> None:
    assert len(list(killed.traces.iterdir())) == 9
    assert len(killed.processes) >= 9
    wait_until(lambda: not alive(killed.traces))
    wait_until(lambda: not any(process.is_running() for process in killed.processes))
    assert list(killed.folder.glob("fsdp_utils_*")) == []


# ---- run_on_ranks in a notebook ----------------------------------------------------------------------------


def test_a_function_from_a_notebook_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "import torch.distributed as dist\nfrom fsdp_utils import run_on_ranks\nscale = 7",
        "def fn(x):\n    return x * scale + dist.get_rank()",
        "run_on_ranks(fn, 2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    assert notebook.cells[2].outputs[0]["data"]["text/plain"] == "[14, 15]"

"""`%%ranks` in a real kernel, with every fault that a reader can cause, injected for real."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.notebook_kernel import IMPORTS, WHOLE, Notebook, usable

VOID = "models sharded before are void"


def ranks_of(notebook: Notebook) -> list[psutil.Process]:
    """The processes that the notebook's server has forked."""
    return [process for server in notebook.process.children() for process in server.children()]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has stays in the table until its new parent looks."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true within 30 s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def started() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.run("from fsdp_utils.notebook import ranks")
    assert notebook.run("ranks.start(4)").text == "4 ranks in one process group (gloo on CPU)\n"
    yield notebook
    notebook.close()


@pytest.fixture
def four(started: Notebook) -> Iterator[Notebook]:
    """A notebook with four ranks, shared by the tests that leave them usable."""
    with usable(started, 4):
        yield started


@pytest.fixture(scope="module")
def watched() -> Iterator[Notebook]:
    """A notebook with four ranks, and a person who watches it."""
    notebook = Notebook(interactive=True)
    notebook.run("from fsdp_utils.notebook import cell, ranks; cell.WAITING_S = 2.0")  # else 5
    started = notebook.run("ranks.start(4)")
    assert started.streamed[0] == "starting the ranks: importing torch ..."
    assert started.text.rpartition("\r")[2] == "4 ranks in one process group (gloo on CPU)\n"
    notebook.run(IMPORTS)
    yield notebook
    notebook.close()


@pytest.fixture
def another() -> Iterator[Callable[..., Notebook]]:
    """Makes further notebooks and closes them."""
    made: list[Notebook] = []

    def make() -> Notebook:
        made.append(Notebook())
        made[-1].run("from fsdp_utils.notebook import ranks")
        return made[-1]

    yield make
    for notebook in made:
        alive = notebook.manager.is_alive()
        processes = notebook.process.children(recursive=True) if alive else []
        notebook.close()
        _, left = psutil.wait_procs(processes, timeout=5)
        assert [one for one in left if runs(one)] == []


LOCALS_THAT_OUTLIVE = """%%ranks
import time
import weakref
from torch import nn

model = nn.Linear(8, 8)
for _ in range(40):                     # library code between this cell and what runs
    model = nn.Sequential(model)


class Activation:
    pass


def forward():
    local = Activation()
    model(torch.ones(8))
    return weakref.ref(local)


began, outlived = time.monotonic(), 0
while time.monotonic() - began < 2:
    outlived += forward()() is not None
print(outlived)"""


def test_a_rank_that_tells_where_it_stands_keeps_nothing_alive(four: Notebook) -> None:
    assert four.run(LOCALS_THAT_OUTLIVE).text == "all ranks | 0\n"


def test_the_ranks_form_a_process_group_as_under_torchrun(four: Notebook) -> None:
    four.run("%%ranks\nx = torch.tensor([float(rank)]); dist.all_reduce(x)")
    assert four.run("[t.item() for t in ranks.get('x')]").value == "[6.0, 6.0, 6.0, 6.0]"
    names = "[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]"
    assert four.run(f'ranks.get("{names}")[2]').value == "['2', '2', '4']"


def test_variables_live_on_from_cell_to_cell(four: Notebook) -> None:
    four.run("%%ranks\nkept = rank * 10")
    assert four.run("%%ranks 1,3\nkept + 1").text == "rank 1 | 11\nrank 3 | 31\n"


def test_figures_of_the_ranks_are_shown(four: Notebook) -> None:
    shown = four.run("%%ranks 0,1\nimport matplotlib.pyplot as plt\nplt.plot([0, rank])\nplt.show()")
    assert (shown.images, shown.error) == (2, "")
    assert shown.text == "rank 0 |\nrank 1 |\n"


def test_a_long_output_of_every_rank_arrives_whole(four: Notebook) -> None:
    shown = four.run("%%ranks\nfor i in range(200):\n    print(rank, i, 'x' * 10_000)")
    assert len(shown.text) > 4 * 2_000_000
    for rank in range(4):
        assert all(f"rank {rank} | {rank} {i} x" in shown.text for i in (0, 99, 199))


def test_an_exception_on_one_rank_frees_the_others_and_shows_that_ranks_lines(four: Notebook) -> None:
    four.run("%%ranks\nkept = 'kept'")
    failed = four.run("%%ranks\nif rank == 2:\n    raise ValueError('boom')\ndist.all_reduce(x)")
    assert failed.error == "RankError: rank 2 raised ValueError: boom"
    assert "---->   2     raise ValueError('boom')" in failed.traceback
    assert failed.traceback.index("line 2") < failed.traceback.index(
        "rank 0 stood at line 3: dist.all_reduce(x)"
    )
    assert VOID in failed.traceback
    assert failed.seconds < 20  # and not the 60 s that a collective waits
    assert four.run("ranks.get('kept')").value == "['kept', 'kept', 'kept', 'kept']"


def test_the_rank_that_failed_first_is_shown_not_those_it_took_along(four: Notebook) -> None:
    failed = four.run(
        "%%ranks\ntime.sleep(0.2 * rank)\nif rank in (1, 2):\n    raise KeyError(rank)\ndist.barrier()"
    )
    assert failed.error == "RankError: rank 1 raised KeyError: 1"


def test_the_last_line_of_a_known_error_names_its_answer(four: Notebook) -> None:
    failed = four.run("%%ranks\nraise ValueError('Cannot flatten integer dtype tensors')")
    assert failed.error == "RankError: all ranks raised ValueError: Cannot flatten integer dtype tensors"
    last = failed.traceback.splitlines()[-1]
    assert last.startswith("Explained: cannot-flatten-integer-dtype in notebooks/answers.md, lesson 17.")


def test_a_rank_that_loops_is_freed_when_another_fails(four: Notebook) -> None:
    failed = four.run("%%ranks\nif rank == 1:\n    raise KeyError('k')\nwhile True:\n    pass")
    assert failed.error == "RankError: rank 1 raised KeyError: 'k'"
    assert "rank 0 stood at line" in failed.traceback


def test_a_mistake_that_all_ranks_make_alike_leaves_sharded_models_valid(four: Notebook) -> None:
    four.run("%%ranks\ngroup = dist.group.WORLD")
    failed = four.run("%%ranks\nnot_there")
    assert failed.error == "RankError: all ranks raised NameError: name 'not_there' is not defined"
    assert VOID not in failed.traceback
    assert four.run("ranks.get('group is dist.group.WORLD')").value == "[True, True, True, True]"


def test_a_syntax_error_is_shown_with_its_line(four: Notebook) -> None:
    # (Python 3.13 has another error for a bracket that is not closed)
    failed = four.run("%%ranks 0\nx = 1\nprint('a'))")
    assert failed.error.startswith("RankError: rank 0 raised SyntaxError")
    assert "line 2: print('a'))" in failed.traceback


def test_a_collective_that_some_ranks_never_enter_ends_and_shows_where_each_stands(four: Notebook) -> None:
    failed = four.run("%%ranks --timeout 1\nif rank < 2:\n    dist.all_reduce(x)")
    assert failed.error.startswith("RankError: ranks 0, 1 raised")
    assert "---->   2     dist.all_reduce(x)" in failed.traceback
    assert "rank 2 had finished the cell\nrank 3 had finished the cell" in failed.traceback
    assert "waits at most 1 s" in failed.traceback


ANOTHER_THREAD_COMES = """ranks.run('''
import threading, time
second = dist.new_group()

def come_late():
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass
    dist.broadcast(torch.ones(1), 0, group=second)

if rank == 0:
    threading.Thread(target=come_late).start()
else:
    dist.broadcast(torch.ones(1), 0, group=second)
dist.barrier()
print("met")
''', stuck_s=0.4)"""


def test_ranks_in_different_collectives_are_not_stuck_while_a_thread_of_one_can_go_on(four: Notebook) -> None:
    assert four.run(ANOTHER_THREAD_COMES).text == "all ranks | met\n"


def test_a_rank_that_dies_is_named_and_replaced(four: Notebook) -> None:
    four.run("%%ranks\nkept = rank")
    die = "time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    failed = four.run(f"%%ranks\nif rank == 1:\n    {die}\ndist.barrier()")
    told = "rank 1 was killed by SIGKILL (often: out of memory) while it ran this cell"
    assert failed.error == f"RankError: {told}"
    assert "The new rank 1 has no variables yet" in failed.traceback
    assert failed.seconds < 20
    assert four.run(WHOLE).text == "all ranks | 4.0\n"
    assert four.run("%%ranks 0,2,3\nkept").text == "rank 0 | 0\nrank 2 | 2\nrank 3 | 3\n"


def test_a_rank_that_does_not_run_the_cell_and_dies_ends_no_wait(four: Notebook) -> None:
    (pid,) = four.run("print(ranks.get('os.getpid()')[1])").text.split()
    failed = four.run(f"%%ranks 0\nos.kill({pid}, signal.SIGKILL); time.sleep(0.5); print('done')")
    assert failed.text == "rank 0 | done\n"
    assert failed.error.startswith("RankError: rank 1 was killed by SIGKILL")
    assert "rank 0 had finished the cell" in failed.traceback


def test_a_death_between_two_cells_is_told_before_the_next_one_runs(four: Notebook) -> None:
    four.run("import os, signal, time\nos.kill(ranks.get('os.getpid()')[0], signal.SIGKILL); time.sleep(0.5)")
    failed = four.run("%%ranks\nran = True")
    assert failed.error.startswith("RankError: rank 0 was killed by SIGKILL")
    assert "this cell was not run" in failed.error


@pytest.mark.parametrize("stuck", ["while True: pass", "dist.recv(torch.zeros(2), src=(rank + 1) % 4)"])
def test_an_interrupt_gives_the_prompt_back_and_keeps_the_ranks(four: Notebook, stuck: str) -> None:
    stopped = four.run(f"%%ranks\n{stuck}", interrupt_after=1.0)
    assert stopped.error.startswith("KeyboardInterrupt")
    stood = [f"rank {rank} stood at line 1: {stuck}" for rank in range(4)]
    assert stopped.traceback.splitlines()[2:6] == stood
    assert stopped.seconds < 20


def test_a_name_that_lives_on_the_ranks_is_told_where_it_is(four: Notebook) -> None:
    four.run("%%ranks\nonly_there = 1")
    failed = four.run("only_there")
    assert failed.error == "NameError: name 'only_there' is not defined"
    assert failed.text == (
        "only_there lives on the ranks: use it in a %%ranks cell, or fetch it with ranks.get('only_there').\n"
    )
    assert four.run("nowhere").text == ""
    assert four.run("raise NameError").text == ""


def test_what_get_cannot_bring_is_told(four: Notebook) -> None:
    assert four.run("ranks.get('nowhere')").error.startswith(
        "RankError: ranks.get('nowhere') raised NameError"
    )
    shards = four.run(
        "%%ranks\nfrom torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
        "whole = distribute_tensor(torch.arange(8.), init_device_mesh('cpu', (4,)), [Shard(0)])"
    )
    assert shards.error == ""
    assert four.run("ranks.get('whole')[3]").value == "tensor([6., 7.])"


# ---- cells that defeat what reports on them: each ends at once, is reported, and the next one works ----


ODD = {
    "def __str__(self): raise SystemExit": "raised SystemExit)",
    "def __str__(self): 1 / 0": "Odd: (no text: its __str__ raised ZeroDivisionError)",
}
REDUCED = {
    "return exec, ('raise SystemExit(3)',)": (
        "RuntimeError: the rank's value cannot be read here: SystemExit: 3. Ask for something simpler"
    ),
    "raise SystemExit(4)": "SystemExit: 4",
}


def test_what_cannot_be_described_or_travel_ends_its_cell_and_is_told(four: Notebook) -> None:
    for method, told in ODD.items():
        failed = four.run(f"%%ranks\nclass Odd(Exception):\n    {method}\nraise Odd")
        assert failed.error.startswith("RankError: all ranks raised ")
        assert told in failed.error
    for reduce, told in REDUCED.items():
        four.run(f"%%ranks\nclass Odd:\n    def __reduce__(self): {reduce}")
        failed = four.run("ranks.get('Odd()')")
        assert failed.error.startswith(f"RankError: ranks.get('Odd()') raised {told}")


def test_a_rank_that_is_stopped_is_replaced_when_its_cell_is_interrupted(four: Notebook) -> None:
    stopped = four.run(
        "%%ranks\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)", interrupt_after=1.0
    )
    assert stopped.error.startswith("KeyboardInterrupt")
    assert "rank 1 could not be freed and was ended" in stopped.traceback


SPOILT = (
    "sys.stdout = sys.stderr = None",
    "sys.stdout.close(); sys.stderr.close()",
    "sys.stdout.write = sys.stdout.flush = sys.stderr.flush = None",
    "with contextlib.suppress(AttributeError): sys.__stdout__ = sys.__stdout__.close()",
)


def test_a_cell_that_takes_away_its_output_still_shows_its_value_and_error(four: Notebook) -> None:
    for spoil in SPOILT:
        begin = f"%%ranks\nimport contextlib, sys\nprint('before')\n{spoil}"
        spoilt = four.run(f"{begin}\n6 * 7")
        assert (spoilt.text, spoilt.error) == ("all ranks | before\nall ranks | 42\n", "")
        failed = four.run(f"{begin}\nraise KeyError('mine')")
        assert failed.error.startswith("RankError: all ranks raised KeyError: 'mine'")


def test_a_cell_that_takes_away_the_shells_output_leaves_that_of_the_next(four: Notebook) -> None:
    four.run("%%ranks\nget_ipython().displayhook = get_ipython().display_pub = None")
    assert four.run("%%ranks\n6 * 7").text == "all ranks | 42\n"


# ---- start and stop ----


def test_wrong_lines_and_wrong_starts_say_what_was_expected(four: Notebook) -> None:
    for line in (
        "4",
        "0,9",
        "x",
        "--timeout",
        "0 1",
        *(f"--timeout {s}" for s in ("nan", "1e15", "0", "-1")),
    ):
        told = four.run(f"%%ranks {line}\ndist.all_reduce(x)").error
        assert told.startswith("ValueError: %%ranks")
        assert "expected ranks from 0 to 3" in told
        assert "above 0 and at most 1,000,000" in told
    for call, told in (
        ("ranks.start(0)", "expected 1 to 999 ranks"),
        ("ranks.start(device='tpu')", "expected 'cpu' or 'cuda'"),
    ):
        assert four.run(call).error.startswith(f"ValueError: {call}: {told}")


def test_starting_again_keeps_the_ranks(four: Notebook) -> None:
    four.run("%%ranks\nkept = 5")
    assert four.run("ranks.start(4)").text == "4 ranks are running already; their variables are kept.\n"
    assert four.run("ranks.get('kept')").value == "[5, 5, 5, 5]"


def test_every_port_is_on_the_loopback_interface(four: Notebook) -> None:
    processes = four.process.children(recursive=True)
    connections = [each for process in processes for each in process.net_connections("inet")]
    addresses = {connection.laddr.ip.removeprefix("::ffff:") for connection in connections}
    assert addresses == {"127.0.0.1"}


def test_before_the_start_a_cell_says_what_to_do_and_another_number_of_ranks_replaces_them(
    four: Notebook, another: Callable[..., Notebook]
) -> None:
    notebook = another()
    assert "Call ranks.start()" in notebook.run("%%ranks\n1").error
    notebook.run("import os, sys; os.environ['FSDP_RANKS'] = 'many'")
    many = "ValueError: FSDP_RANKS should be a number of ranks, found 'many'."
    assert notebook.run("ranks.start()").error == many
    notebook.run("os.environ['FSDP_RANKS'] = '2'")
    before_it = notebook.run("'sched' in sys.modules").value
    assert notebook.run("ranks.start(preload=['sched'])").text.startswith("2 ranks in one")
    assert (before_it, notebook.run("'sched' in sys.modules").value) == ("False", "True")
    imported = "%%ranks\nimport sys\n{'sched', 'torch._dynamo'} <= {*sys.modules}"  # the latter always
    assert notebook.run(imported).text == "all ranks | True\n"
    assert notebook.run(WHOLE).text == "all ranks | 2.0\n"
    assert four.run(WHOLE).text == "all ranks | 4.0\n"  # two notebooks never meet
    before = ranks_of(notebook)
    assert notebook.run("ranks.start(3)").text.startswith("3 ranks in one")
    assert notebook.run(WHOLE).text == "all ranks | 3.0\n"
    assert not any(process.is_running() for process in before)


# ---- to a person who watches: lines are labelled, merged where they agree, and shown as they come ----


@pytest.mark.parametrize(
    ("chosen", "source", "shown"),
    [
        ("", "print('a\\nb')", ["all ranks | a", "all ranks | b"]),
        ("1", "print('a')", ["rank 1 | a"]),
        ("0,2", "print('a')", ["ranks 0, 2 | a"]),
        ("0,1", "print('a') if rank == 0 else None", ["rank 0 | a"]),
        ("0,1", "for _ in range(1 + rank): print('a')", ["ranks 0, 1 | a", "rank 1 | a"]),
        ("0", "print('a\\n\\nb', end='')", ["rank 0 | a", "rank 0 |", "rank 0 | b"]),
        ("0", "print(' 10%\\r 50%\\r100%\\ndone')", ["rank 0 | 100%", "rank 0 | done"]),
        (
            "0,1",
            "print('same\\nown', rank)\nif rank: print('more', rank)\nprint('end')",
            ["ranks 0, 1 | same", "rank 0 | own 0", "rank 1 | own 1", "rank 1 | more 1", "ranks 0, 1 | end"],
        ),
    ],
)
def test_at_the_end_common_lines_are_shown_once_and_the_rest_by_rank(
    watched: Notebook, chosen: str, source: str, shown: list[str]
) -> None:
    assert watched.run(f"%%ranks {chosen}\n{source}").text.splitlines() == shown


def test_meanwhile_each_line_is_shown_as_it_is_finished(watched: Notebook) -> None:
    shown = watched.run(
        "%%ranks 0\nfor text in ('one\\ntw', 'o\\n', '\\r 10%', '\\r 20%'):\n"
        "    print(text, end='', flush=True); time.sleep(0.5)"
    )
    told = "".join(shown.streamed)
    assert told.startswith("rank 0 | one\nrank 0 | two\n")
    assert "\rrank 0 |  10%" in told  # a progress bar moves while it runs
    assert shown.cleared
    assert shown.text.splitlines() == ["rank 0 | one", "rank 0 | two", "rank 0 |  20%"]


def test_a_collective_that_some_ranks_have_not_entered_is_reported_while_it_waits(watched: Notebook) -> None:
    waited = watched.run("%%ranks\nif rank == 2:\n    time.sleep(4)\ndist.all_reduce(x)")
    told = [piece.strip() for piece in waited.streamed]
    running = next(index for index, line in enumerate(told) if line.startswith("running on all ranks"))
    report = told.index("rank 2: at line 2; ranks 0, 1, 3: waiting in all_reduce (line 3)")
    assert running < report
    alone = watched.run("%%ranks 1 --timeout 4\ndist.barrier()")
    told = [piece.strip() for piece in alone.streamed]
    assert "ranks 0, 2, 3: not in this cell; rank 1: waiting in barrier (line 1)" in told
    assert alone.error.startswith("RankError: rank 1 raised")
    assert (waited.text, waited.cleared, waited.error) == ("", True, "")


# ---- the ends of ranks ----


def test_when_a_start_is_interrupted_or_the_kernel_goes_no_process_stays(
    another: Callable[..., Notebook],
) -> None:
    notebook = another()
    assert notebook.run("ranks.start(2)", interrupt_after=0.6).error.startswith("KeyboardInterrupt")
    wait_until(lambda: not ranks_of(notebook))
    told = notebook.run("ranks.start(2, device='cuda')").error
    assert told.startswith("ValueError: ranks.start(")
    assert "Leave device out" in told or "leave device out" in told
    assert notebook.run("ranks.start(2)").text.startswith("2 ranks in one")
    for end in (lambda: notebook.manager.restart_kernel(now=True), lambda: notebook.process.kill()):
        notebook.client.wait_for_ready(timeout=60)
        notebook.run("from fsdp_utils.notebook import ranks\nranks.start(2)")
        notebook.run("%%ranks\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'])")
        processes = notebook.process.children(recursive=True)
        assert len([process for process in processes if process.name() == "sleep"]) == 2
        end()
        _, left = psutil.wait_procs(processes, timeout=5)
        assert [one for one in left if runs(one)] == []


def test_in_a_script_start_names_what_to_use_instead_and_no_torch_is_loaded() -> None:
    code = "import sys; from fsdp_utils.notebook import ranks; print('torch' in sys.modules); ranks.start()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert "fsdp_utils.run_on_ranks" in done.stderr

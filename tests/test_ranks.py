"""`%%ranks` in a real kernel, with every fault that a reader can cause, injected for real."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.notebook_kernel import IMPORTS, WHOLE, Notebook

VOID = "models sharded before are void"


def ranks_of(notebook: Notebook) -> list[psutil.Process]:
    """The processes that the notebook's server has forked."""
    return [process for server in notebook.process.children() for process in server.children()]


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=5)
    # one that has ended stays in the table until its new parent looks
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def started() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.run("from fsdp_utils.notebook import cell, ranks; cell.WAITING_S = 2.0")  # else 5
    assert notebook.run("ranks.start(4)").text == "4 ranks in one process group (gloo on CPU)\n"
    yield notebook
    processes = notebook.process.children(recursive=True)
    notebook.close()
    assert_all_end(processes)


@pytest.fixture
def four(started: Notebook) -> Iterator[Notebook]:
    """Four ranks with `os`, `rank` and `x`; whatever a test does to them, the next cell works."""
    started.run(IMPORTS)
    yield started
    assert started.run(WHOLE).text == "all ranks | 4.0\n"


LOCALS_THAT_OUTLIVE = """%%ranks
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


def test_the_ranks_form_a_group_as_under_torchrun_and_keep_their_variables(four: Notebook) -> None:
    four.run("%%ranks\nx = torch.tensor([float(rank)]); dist.all_reduce(x)\nkept = rank * 10")
    assert four.run("[t.item() for t in ranks.get('x')]").value == "[6.0, 6.0, 6.0, 6.0]"
    names = "[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]"
    assert four.run(f'ranks.get("{names}")[2]').value == "['2', '2', '4']"
    assert four.run("%%ranks 1,3\nkept + 1").text == "rank 1 | 11\nrank 3 | 31\n"
    assert four.run("ranks.start(4)").text == "4 ranks are running already; their variables are kept.\n"
    assert four.run("ranks.get('kept')").value == "[0, 10, 20, 30]"


def test_figures_and_long_outputs_of_every_rank_arrive(four: Notebook) -> None:
    shown = four.run("%%ranks 0,1\nimport matplotlib.pyplot as plt\nplt.plot([0, rank])\nplt.show()")
    assert (shown.images, shown.error, shown.text) == (2, "", "rank 0 |\nrank 1 |\n")
    shown = four.run("%%ranks\nfor i in range(200):\n    print(rank, i, 'x' * 10_000)")
    for rank in range(4):
        assert all(f"rank {rank} | {rank} {i} {'x' * 10_000}\n" in shown.text for i in (0, 99, 199))


FAILURES = [  # a cell; the error; what stands in its traceback, in this order
    (
        "if rank == 2:\n    raise ValueError('boom')\ndist.all_reduce(x)",
        "rank 2 raised ValueError: boom",
        ["---->   2     raise ValueError('boom')", "rank 0 stood at line 3: dist.all_reduce(x)", VOID],
    ),
    (  # not those that it took along
        "time.sleep(0.2 * rank)\nif rank in (1, 2):\n    raise KeyError(rank)\ndist.barrier()",
        "rank 1 raised KeyError: 1",
        [],
    ),
    (
        "if rank == 1:\n    raise KeyError('k')\nwhile True:\n    pass",
        "rank 1 raised KeyError: 'k'",
        ["rank 0 stood at line"],
    ),
    (
        "raise ValueError('Cannot flatten integer dtype tensors')",
        "all ranks raised ValueError: Cannot flatten integer dtype tensors",
        ["\nExplained: cannot-flatten-integer-dtype in notebooks/answers.md, lesson 17."],
    ),
    # (Python 3.13 has another error for a bracket that is not closed)
    ("x = 1\nprint('a'))", "all ranks raised SyntaxError", ["line 2: print('a'))"]),
    ("torch.ones(2) @ torch.ones(3)", "all ranks raised RuntimeError", ["---->   1 torch.ones(2)"]),
    ("import json; json.loads('{')", "all ranks raised JSONDecodeError", ["which called", "json/decoder.py"]),
]


@pytest.mark.parametrize(("source", "error", "told"), FAILURES)
def test_a_failure_frees_all_ranks_and_shows_one_traceback(
    four: Notebook, source: str, error: str, told: list[str]
) -> None:
    four.run("%%ranks\nkept, group = 'kept', dist.group.WORLD")
    failed = four.run(f"%%ranks\n{source}")
    assert failed.error.startswith(f"RankError: {error}")
    places = [failed.traceback.index(text) for text in told]
    assert places == sorted(places)
    assert failed.seconds < 20  # and not the 60 s that a collective waits
    assert four.run("ranks.get('kept')").value == "['kept', 'kept', 'kept', 'kept']"
    whole = error.startswith("all ranks")  # a mistake that all make alike leaves sharded models valid
    assert (VOID not in failed.traceback) == whole
    assert four.run("ranks.get('group is dist.group.WORLD')").value == str([whole] * 4)


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
    assert four.run("%%ranks 0,2,3\nkept").text == "rank 0 | 0\nrank 2 | 2\nrank 3 | 3\n"


def test_a_rank_that_dies_outside_of_the_cell_is_told_too(four: Notebook) -> None:
    (pid,) = four.run("print(ranks.get('os.getpid()')[1])").text.split()
    failed = four.run(f"%%ranks 0\nos.kill({pid}, signal.SIGKILL); time.sleep(0.5); print('done')")
    assert failed.text == "rank 0 | done\n"
    assert failed.error.startswith("RankError: rank 1 was killed by SIGKILL")
    assert "rank 0 had finished the cell" in failed.traceback
    four.run("%%ranks\nimport os")
    four.run("import os, signal, time\nos.kill(ranks.get('os.getpid()')[0], signal.SIGKILL); time.sleep(0.5)")
    failed = four.run("%%ranks\nran = True")
    assert failed.error.startswith("RankError: rank 0 was killed by SIGKILL")
    assert "this cell was not run" in failed.error


@pytest.mark.parametrize(
    "stuck",
    [
        "while True: pass",
        "dist.recv(torch.zeros(2), src=(rank + 1) % 4)",
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_an_interrupt_gives_the_prompt_back_and_keeps_the_ranks(four: Notebook, stuck: str) -> None:
    stopped = four.run(f"%%ranks\n{stuck}", interrupt_after=1.0)
    assert stopped.error.startswith("KeyboardInterrupt")
    if "SIGSTOP" in stuck:
        stood = ["had finished the cell", "could not be freed and was ended", *["had finished the cell"] * 2]
    else:
        stood = [f"stood at line 1: {stuck}"] * 4
    assert stopped.traceback.splitlines()[2:6] == [f"rank {rank} {how}" for rank, how in enumerate(stood)]
    assert stopped.seconds < 20


def test_what_is_not_in_the_notebook_or_cannot_be_brought_there_is_told(four: Notebook) -> None:
    four.run("%%ranks\nonly_there = 1")
    failed = four.run("only_there")
    assert failed.error == "NameError: name 'only_there' is not defined"
    assert failed.text == (
        "only_there lives on the ranks: use it in a %%ranks cell, or fetch it with ranks.get('only_there').\n"
    )
    assert four.run("nowhere").text == four.run("raise NameError").text == ""
    four.run("%%ranks\nclass Odd:\n    def __reduce__(self): return exec, ('raise SystemExit(3)',)")
    unread = "RuntimeError: the rank's value cannot be read here: SystemExit: 3. Ask for something simpler"
    for asked, told in (("nowhere", "NameError"), ("Odd()", unread)):
        failed = four.run(f"ranks.get('{asked}')")
        assert failed.error.startswith(f"RankError: ranks.get('{asked}') raised {told}")
    four.run(
        "%%ranks\nfrom torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
        "whole = distribute_tensor(torch.arange(8.), init_device_mesh('cpu', (4,)), [Shard(0)])"
    )
    assert four.run("ranks.get('whole')[3]").value == "tensor([6., 7.])"


def test_wrong_lines_and_wrong_starts_say_what_was_expected(four: Notebook) -> None:
    for line in ("4", "0,9", "x", "0 1", *(f"--timeout{s}" for s in ("", " nan", " 1e15", " 0", " -1"))):
        told = four.run(f"%%ranks {line}\ndist.all_reduce(x)").error
        assert told.startswith(f"ValueError: %%ranks {line}: expected ranks from 0 to 3")
        assert "above 0 and below 1,000,000" in told
    for call, told in (
        ("ranks.start(0)", "expected 1 to 999 ranks"),
        ("ranks.start(device='tpu')", "expected 'cpu' or 'cuda'"),
    ):
        assert four.run(call).error.startswith(f"ValueError: {call}: {told}")


def test_every_port_is_on_the_loopback_interface(four: Notebook) -> None:
    processes = four.process.children(recursive=True)
    connections = [each for process in processes for each in process.net_connections("inet")]
    addresses = {connection.laddr.ip.removeprefix("::ffff:") for connection in connections}
    assert addresses == {"127.0.0.1"}


# ---- output: lines are labelled, merged where they agree, and shown to a person as they come ----


def test_at_the_end_common_lines_are_shown_once_and_the_rest_by_rank(four: Notebook) -> None:
    for chosen, source, shown in (
        ("", "print('a\\nb')", ["all ranks | a", "all ranks | b"]),
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
    ):
        assert four.run(f"%%ranks {chosen}\n{source}", watched=True).text.splitlines() == shown


def test_meanwhile_each_line_is_shown_as_it_is_finished(four: Notebook) -> None:
    shown = four.run(
        "%%ranks 0\nfor text in ('one\\ntw', 'o\\n', '\\r 10%', '\\r 20%'):\n"
        "    print(text, end='', flush=True); time.sleep(0.5)",
        watched=True,
    )
    told = "".join(shown.streamed)
    assert told.startswith("rank 0 | one\nrank 0 | two\n")
    assert "\rrank 0 |  10%" in told  # a progress bar moves while it runs
    assert shown.cleared
    assert shown.text.splitlines() == ["rank 0 | one", "rank 0 | two", "rank 0 |  20%"]


def test_a_collective_that_some_ranks_have_not_entered_is_reported_while_it_waits(four: Notebook) -> None:
    waited = four.run("%%ranks\nif rank == 2:\n    time.sleep(4)\ndist.all_reduce(x)", watched=True)
    told = [piece.strip() for piece in waited.streamed]
    standing = told.index("ranks 0, 1, 3: at line 3; rank 2: at line 2")
    assert standing < told.index("ranks 0, 1, 3: waiting in all_reduce (line 3); rank 2: at line 2")
    assert (waited.text, waited.cleared, waited.error) == ("", True, "")
    alone = four.run("%%ranks 1 --timeout 4\ndist.barrier()", watched=True)
    told = [piece.strip() for piece in alone.streamed]
    assert "ranks 0, 2, 3: not in this cell; rank 1: waiting in barrier (line 1)" in told
    assert alone.error.startswith("RankError: rank 1 raised")


# ---- other notebooks: starts, and the ends of ranks ----


@pytest.fixture
def another() -> Iterator[Notebook]:
    """A notebook without ranks; none of its processes outlives it."""
    notebook = Notebook()
    notebook.run("from fsdp_utils.notebook import ranks")
    yield notebook
    notebook.close()


def test_another_notebook_starts_replaces_and_ends_its_own_ranks(four: Notebook, another: Notebook) -> None:
    assert "Call ranks.start()" in another.run("%%ranks\n1").error
    many = "ValueError: FSDP_RANKS should be a number of ranks, found 'many'."
    assert another.run("import os\nos.environ['FSDP_RANKS'] = 'many'; ranks.start()").error == many
    another.run("os.environ['FSDP_RANKS'] = '2'")
    assert another.run("ranks.start()", interrupt_after=0.6).error.startswith("KeyboardInterrupt")
    assert_all_end(ranks_of(another))
    told = another.run("ranks.start(2, device='cuda')").error
    assert told.startswith("ValueError: ranks.start(2, device='cuda'): nccl wants one GPU for each rank")
    assert another.run("ranks.start()").text.startswith("2 ranks in one")
    assert another.run(WHOLE).text == "all ranks | 2.0\n"
    assert four.run(WHOLE).text == "all ranks | 4.0\n"  # two notebooks never meet
    before = ranks_of(another)
    assert another.run("ranks.start(3)").text.startswith("3 ranks in one")
    assert another.run(WHOLE).text == "all ranks | 3.0\n"
    assert not any(process.is_running() for process in before)


def test_what_is_preloaded_is_imported_once_and_nothing_outlives_the_kernel(another: Notebook) -> None:
    assert another.run("import sys\n'sched' in sys.modules").value == "False"
    imported = "import sys\n{'sched', 'torch._dynamo'} <= {*sys.modules}"  # the latter always
    for end in (lambda: another.manager.restart_kernel(now=True), lambda: another.process.kill()):
        another.client.wait_for_ready(timeout=60)
        another.run("from fsdp_utils.notebook import ranks\nranks.start(2, preload=['sched'])")
        assert another.run("import sys\n'sched' in sys.modules").value == "True"
        assert another.run(f"%%ranks\n{imported}").text == "all ranks | True\n"
        another.run("%%ranks\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'])")
        processes = another.process.children(recursive=True)
        assert len([process for process in processes if process.name() == "sleep"]) == 2
        end()
        assert_all_end(processes)


def test_in_a_script_start_names_what_to_use_instead_and_no_torch_is_loaded() -> None:
    code = "import sys; from fsdp_utils.notebook import ranks; print('torch' in sys.modules); ranks.start()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert "fsdp_utils.run_on_ranks" in done.stderr

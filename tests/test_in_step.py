"""check_in_step on real ranks that part, each by a mistake that programs make."""

import contextlib
import io
import re
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import check_in_step, record_collectives, run_on_ranks
from fsdp_utils.collectives import OutOfStep

WAIT_S = 5.0  # the longest that a collective of these tests waits
WAIT = timedelta(seconds=WAIT_S)


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _set_pg_timeout(WAIT, mesh.get_group())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    return model


def train_step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    return loss.detach()


def told(program: Callable[[], Any], **options: Any) -> tuple[str, float, str, str]:
    """Run a program under check_in_step on this rank; returns the error, seconds, the report and stderr."""
    _set_pg_timeout(WAIT, dist.group.WORLD)
    warnings.simplefilter("ignore")  # torch's own, on stderr
    dist.barrier()
    error, began, printed, check = "", time.monotonic(), io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            with check_in_step(**options) as check:
                program()
        except OutOfStep as raised:
            error = str(raised)
    return error, time.monotonic() - began, check.report if check else "", printed.getvalue()


def in_step(_: Path) -> tuple[str, float, str, str]:
    model = sharded()

    def program() -> None:
        for _ in range(30):
            train_step(model)
            dist.broadcast(torch.ones(1), src=0)
            dist.all_gather_object([None] * dist.get_world_size(), "x" * 100 * dist.get_rank())

    return told(program)


def branch_on_the_local_loss() -> tuple[str, float, str, str]:
    def program() -> None:
        for step in range(2000):
            loss = torch.tensor(1.0 if step != 100 or dist.get_rank() else 0.5)
            if loss < 1.0:
                dist.all_reduce(torch.zeros(1))  # the better loss
            else:
                dist.all_reduce(torch.ones(1))  # the usual one
            time.sleep(0.005)

    return told(program)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_calls_from_two_lines_are_found_while_both_go_on(ranks):
    results = run_on_ranks(branch_on_the_local_loss, world_size=ranks, timeout=60)
    others = "rank 1" if ranks == 2 else "ranks 1, 2, 3"
    for error, seconds, _, _ in results:
        assert error.startswith("the ranks part at collective 101 of all ranks.\n"), error
        assert "  rank 0: all_reduce of float32[1] by SUM, at test_in_step.py:" in error
        assert "`dist.all_reduce(torch.zeros(1))  # the better loss`" in error
        assert f"  {others}: all_reduce of float32[1] by SUM, at test_in_step.py:" in error
        assert error.endswith("use check_in_step(by_line=False).")
        assert seconds < 9  # it would run for more than ten seconds
    assert [bool(printed) for *_, printed in results] == [True] + [False] * (ranks - 1)


def branch_with_a_late_rank() -> tuple[str, float, str, str]:
    def program() -> None:
        time.sleep(0.9 if dist.get_rank() == 2 else 0.0)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))  # the better loss
        else:
            dist.all_reduce(torch.ones(1))  # the usual one

    return told(program)


def test_the_report_waits_for_the_call_of_a_rank_that_is_a_little_late():
    for error, *_ in run_on_ranks(branch_with_a_late_rank, world_size=3, timeout=60):
        assert "  ranks 1, 2: all_reduce of float32[1] by SUM, at test_in_step.py:" in error
        assert "has not called it" not in error


SUM = "  rank 0: all_reduce of float32[2, 3] by SUM"
WRONG = {
    "dtype": (SUM, "  rank 1: all_reduce of int32[2, 3] by SUM"),
    "op": (SUM, "  rank 1: all_reduce of float32[2, 3] by MAX"),
    "shape": (SUM, "  rank 1: all_reduce of float32[3, 2] by SUM"),
    "shape given": ("  rank 0: all_gather of float32[2, 3]", "  rank 1: all_gather of float32[6]"),
    "kind": (SUM, "  rank 1: broadcast of float32[2, 3] from rank 0"),
    "broadcast": tuple(f"  rank {n}: broadcast of float32[2, 3] from rank {n}" for n in range(2)),
    "reduce": tuple(f"  rank {n}: reduce of float32[2, 3] by SUM to rank {n}" for n in range(2)),
    "numbers": ("\n  rank 1 gives 3 elements to rank 0, which takes 6\n",),
}


def pass_other_arguments() -> dict[str, tuple[str, float, str, str]]:
    rank, x = dist.get_rank(), torch.ones(2, 3)
    gives, takes = ([1, 1], [2, 1]) if rank else ([1, 2], [1, 2])
    programs: dict[str, Callable[..., Any]] = {
        "dtype": lambda group: dist.all_reduce([x, x.int()][rank], group=group),
        "op": lambda group: dist.all_reduce(x, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group),
        "shape": lambda group: dist.all_reduce([x, x.T.contiguous()][rank], group=group),
        # gloo refuses it on rank 0 before rank 1 has come
        "shape given": lambda group: (
            time.sleep(0.7 * rank),
            dist.all_gather_into_tensor(torch.ones(12), [x, x.view(6)][rank], group),
        ),
        "kind": lambda group: (dist.broadcast if rank else dist.all_reduce)(
            x, **({"src": 0} if rank else {}), group=group
        ),
        "broadcast": lambda group: dist.broadcast(x, src=rank, group=group),
        "reduce": lambda group: dist.reduce(x, dst=rank, group=group),
        "numbers": lambda group: dist.all_to_all_single(
            torch.ones(sum(takes), 3), torch.ones(sum(gives), 3), takes, gives, group
        ),
    }
    found = {}
    for name in WRONG:
        group = dist.new_group()
        dist.barrier(group)
        _set_pg_timeout(WAIT, group)
        found[name] = told(partial(programs[name], group), by_line=False)
    return found


def test_arguments_that_differ_are_named_by_rank(two_ranks):
    results = two_ranks(pass_other_arguments)
    for name, lines in WRONG.items():
        for found in results:
            error, seconds, _, _ = found[name]
            assert error.startswith("the ranks part at collective 1 of all ranks.\n"), (name, error)
            assert [line for line in lines if line not in f"{error}\n"] == []
            assert "by_line" not in error
            assert seconds < WAIT_S + 6
        assert "the ranks part" in results[0][name][3]


def call_with_what_may_differ(_: Path) -> tuple[str, float, str, str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    half, x = halves[rank % 2], torch.ones(2, 3)

    def program() -> None:
        for step in range(3):
            counts = [[(source + target + step) % 3 for target in range(world)] for source in range(world)]
            gives, takes = counts[rank], [row[rank] for row in counts]
            dist.all_to_all_single(torch.ones(sum(takes), 2), torch.ones(sum(gives), 2), takes, gives)
            dist.all_to_all([torch.ones(2)] * world, [torch.ones(2)] * world)
        functional.all_to_all_single(torch.ones(8), None, None, dist.group.WORLD).sum()
        functional.all_reduce(x, "sum", dist.group.WORLD).sum()
        functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD).sum()
        dist.broadcast(x, src=rank % 2, group=half)  # a rank of each half, as a global number ...
        dist.reduce(x, group_dst=1, group=half)  # ... and as one of the group
        dist.gather(x, [torch.ones(2, 3) for _ in range(world)] if rank == 1 else None, dst=1)
        dist.scatter(x, [torch.ones(2, 3) for _ in range(world)] if rank == 1 else None, src=1)
        dist.all_reduce(torch.ones(()) if rank else torch.ones(1, 1))
        dist.all_reduce_coalesced([x, x[:, 0].clone()])
        dist.broadcast_object_list(["x" * 9, 1] if rank == 0 else [None, None], src=0)
        if rank == 0:
            dist.gather_object("", [None] * world)
        else:
            dist.gather_object("x" * rank)
        dist.scatter_object_list([None], ["x" * n for n in range(world)] if rank == 0 else [None] * world)
        work = dist.all_reduce(x, async_op=bool(rank))
        if work is not None:
            work.wait()
        dist.monitored_barrier()
        dist.barrier()

    return told(program)


def train_in_parallel(folder: Path) -> tuple[str, float, str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)

    def part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 7))

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def program() -> None:
        flat, wrapped = FSDP(part(), device_id=torch.device("cpu")), DistributedDataParallel(part())
        both = fully_shard(parallelize_module(part(), mesh["tp"], plan), mesh=mesh["dp"])
        hybrid = fully_shard(part(), mesh=mesh)
        for model in (flat, wrapped, both, hybrid):
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.randn(3, 7)).square().mean().backward()
                optimizer.step()
            state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state[0],
                optim_state_dict=state[1],
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=model in (both, hybrid)),
            )

    return told(program, after_s=30)


def hang_by_root() -> None:
    with check_in_step():
        dist.broadcast(torch.ones(2), src=dist.get_rank())


def test_a_hang_of_all_ranks_is_reported_with_what_each_has_called(two_ranks, capfd):
    with pytest.raises(TimeoutError, match="They stand at"):
        two_ranks(hang_by_root, timeout=5)
    report = r"rank 0: broadcast of .* from rank 0.*\n.*rank 1: .* from rank 1"
    assert re.search(report, capfd.readouterr().err)


def early_stop() -> tuple[str, float, str, str]:
    model = sharded()

    def program() -> None:
        for step in range(5):
            if step == 3 and dist.get_rank() == 1:
                break
            train_step(model)

    return told(program)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_stops_early_is_named_with_the_unit_that_waits_for_it(ranks):
    results = run_on_ranks(early_stop, world_size=ranks, timeout=60)
    others = "rank 0" if ranks == 2 else "ranks 0, 2, 3"
    for error, seconds, _, _ in results:
        assert "waits for rank 1.\n" in error, error
        assert f"  {others}: all_gather" in error
        assert ", at test_in_step.py:" in error
        assert "`loss = model(torch.randn(4, 8)).square().mean()`" in error
        assert "  rank 1: has left the block; its last: reduce_scatter" in error
        assert seconds < WAIT_S + 6
    assert results[1][1] < 5  # the rank that left does not wait for the time-out


def raises_alone() -> tuple[str, str]:
    _set_pg_timeout(WAIT, dist.group.WORLD)
    try:
        with check_in_step():
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 1:
                raise KeyError("mine")
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def test_a_rank_that_raises_keeps_its_error_and_is_named_to_the_others(two_ranks):
    (kind_0, text_0), (kind_1, text_1) = two_ranks(raises_alone)
    assert (kind_0, kind_1) == ("OutOfStep", "KeyError")
    for text in (text_0, text_1):
        assert "collective 2 of all ranks waits for rank 1" in text
        assert "  rank 1: left the block by KeyError; its last: all_reduce of float32[1] by SUM" in text


def slow() -> tuple[str, float, str, str]:
    def program() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            time.sleep(3.5)  # such as an evaluation
        dist.all_reduce(torch.ones(1))

    return told(program, after_s=1)


def test_a_long_wait_is_reported_once_with_the_line_of_the_slow_rank_and_raises_nothing(two_ranks):
    results = two_ranks(slow)
    assert [error for error, *_ in results] == ["", ""]
    printed = results[0][3]
    assert printed.count("check_in_step: collective 2 of all ranks waits for rank 1.\n") == 1
    assert "rank 1: has not called it, and stands at test_in_step.py:" in printed
    assert "`time.sleep(3.5)  # such as an evaluation`" in printed
    assert results[1][3] == ""


def branch_without_lines(_: Path) -> tuple[str, float, str, str]:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.ones(1))

    return told(program, by_line=False)


def compute(_: Path) -> tuple[str, float, str, str]:
    def program() -> None:
        dist.barrier()
        x, end = torch.ones(200, 200), time.monotonic() + 2.5
        while time.monotonic() < end:
            torch.ops.aten.mm(x, x)

    return told(program, after_s=1)


def leave_a_thread_behind(_: Path) -> tuple[str, float, str, str]:
    group = dist.new_group()

    def save() -> None:
        for _ in range(15):
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(0.1)

    thread = threading.Thread(target=save)

    def program() -> None:
        thread.start()
        time.sleep(0.1 + dist.get_rank())

    found = told(program)
    thread.join()
    return found


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        (in_step, 2),
        (in_step, 4),
        (branch_without_lines, 2),
        (compute, 2),
        (leave_a_thread_behind, 2),
        (call_with_what_may_differ, 4),
        (train_in_parallel, 4),
    ],
)
def test_right_programs_hear_nothing(program: Any, ranks: int, tmp_path: Path) -> None:
    for error, seconds, report, printed in run_on_ranks(program, tmp_path, world_size=ranks, timeout=120):
        assert (error, report, printed) == ("", "", "")
        assert seconds < 60


def in_half_of_a_mesh() -> tuple[str, float, str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        _set_pg_timeout(WAIT, mesh.get_group(name))

    def program() -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=mesh.get_group("b"))
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("b"))

    return told(program)


def test_ranks_of_a_mesh_are_compared_within_their_group():
    for error, _, _, _ in run_on_ranks(in_half_of_a_mesh, world_size=4, timeout=60):
        assert "collective 4 of the group of ranks 2, 3 waits for rank 2.\n" in error
        assert "rank 0" not in error


def with_a_recording() -> tuple[str, int, int]:
    model = sharded()
    before = torch.ones(1)
    with check_in_step() as check, record_collectives(model) as trace:
        train_step(model)
    with record_collectives(model) as again:
        train_step(model)
    dist.all_reduce(before)
    return check.report, len(trace.events), len(again.events)


def test_a_recording_inside_sees_all_that_it_sees_without(two_ranks):
    for report, events, again in two_ranks(with_a_recording):
        assert report == ""
        assert events == again > 6


def test_without_a_process_group_it_does_nothing():
    with check_in_step() as check:
        pass
    assert check.report == ""


@pytest.mark.parametrize("after_s", [0, -1, float("nan"), float("inf")])
def test_after_s_has_to_be_a_time(after_s):
    with pytest.raises(ValueError, match="expected after_s above 0"), check_in_step(after_s=after_s):
        pass

"""check_in_step on real ranks that part, each by a mistake that programs make."""

import contextlib
import io
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

from fsdp_utils import check_in_step, run_on_ranks

WAIT_S = 2.0  # the longest that a collective of ranks that part waits
WAIT = timedelta(seconds=WAIT_S)


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in [*model, model]:
        fully_shard(part)
    return model


def train_step(model: nn.Module) -> None:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()


class Told(NamedTuple):
    error: str  # with its notes
    kind: str  # the class of the error
    seconds: float
    report: str
    printed: str


def told(program: Callable[[], Any], *, wait_s: float = WAIT_S, **options: Any) -> Told:
    """Run a program under check_in_step on this rank."""
    _set_pg_timeout(timedelta(seconds=wait_s), dist.group.WORLD)
    warnings.simplefilter("ignore")  # torch's own, on stderr
    dist.barrier()
    error = kind = ""
    began, printed, check = time.monotonic(), io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            with check_in_step(**options) as check:
                program()
        except Exception as raised:
            kind = type(raised).__name__
            error = "\n".join([str(raised), *getattr(raised, "__notes__", [])])
    seconds = time.monotonic() - began
    return Told(error, kind, seconds, check.report if check else "", printed.getvalue())


def told_each(program: Callable[[], Any], ranks: int = 2, **options: Any) -> list[Told]:
    """Run a program under check_in_step; returns what each rank is told."""
    return run_on_ranks(partial(told, program, **options), world_size=ranks)


# ---- programs that part


def branch_on_the_local_loss() -> None:
    for step in range(2000):
        if step == 100 and dist.get_rank() == 3:
            time.sleep(0.9)  # the report waits for the call of a rank that is a little late
        if step == 100 and dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))  # the better loss
        else:
            dist.all_reduce(torch.ones(1))  # the usual one
        time.sleep(0.005)


def test_equal_calls_from_two_lines_are_found_while_both_go_on():
    results = told_each(branch_on_the_local_loss, ranks=4)
    for error, _, seconds, _, _ in results:
        assert error.startswith("the ranks part at collective 101 of all ranks.\n"), error
        assert "  rank 0: all_reduce of float32[1] by SUM, at test_in_step.py:" in error
        assert "`dist.all_reduce(torch.zeros(1))  # the better loss`" in error
        assert "  ranks 1, 2, 3: all_reduce of float32[1] by SUM, at test_in_step.py:" in error
        assert error.endswith("use check_in_step(by_line=False).")
        assert seconds < 9  # it would run for more than ten seconds
    assert [bool(each.printed) for each in results] == [True, False, False, False]


SUM = "  rank 0: all_reduce of float32[2, 3] by SUM"
COUNTS = [([1, 2], [1, 2]), ([1, 1], [2, 1])]  # by rank: how many rows it gives to each, and takes
# by what differs: a call with a rank, x of float32[2, 3] and a group; and what is told of it
PARTING: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "dtype": (
        lambda rank, x, group: dist.all_reduce([x, x.int()][rank], group=group),
        (SUM, "  rank 1: all_reduce of int32[2, 3] by SUM"),
    ),
    "op": (
        lambda rank, x, group: dist.all_reduce(x, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group),
        (SUM, "  rank 1: all_reduce of float32[2, 3] by MAX"),
    ),
    "shape": (
        lambda rank, x, group: dist.all_reduce([x, x.T.contiguous()][rank], group=group),
        (SUM, "  rank 1: all_reduce of float32[3, 2] by SUM"),
    ),
    # gloo refuses it on rank 0 before rank 1 has come
    "shape given": (
        lambda rank, x, group: (
            time.sleep(0.7 * rank),
            dist.all_gather_into_tensor(torch.ones(12), [x, x.view(6)][rank], group),
        ),
        ("  rank 0: all_gather of float32[2, 3]", "  rank 1: all_gather of float32[6]"),
    ),
    "kind": (
        lambda rank, x, group: dist.broadcast(x, 0, group=group) if rank else dist.all_reduce(x, group=group),
        (SUM, "  rank 1: broadcast of float32[2, 3] from rank 0"),
    ),
    "root": (
        lambda rank, x, group: dist.reduce(x, dst=rank, group=group),
        tuple(f"  rank {n}: reduce of float32[2, 3] by SUM to rank {n}" for n in range(2)),
    ),
    "numbers": (
        lambda rank, x, group: dist.all_to_all_single(
            torch.ones(sum(COUNTS[rank][1]), 3),
            torch.ones(sum(COUNTS[rank][0]), 3),
            *COUNTS[rank][::-1],
            group,
        ),
        ("\n  rank 1 gives 3 elements to rank 0, which takes 6\n",),
    ),
}


def test_arguments_that_differ_are_named_by_rank(two_ranks):
    def fn() -> dict[str, Told]:
        found = {}
        for name, (call, _) in PARTING.items():
            group = dist.new_group()
            dist.barrier(group)
            _set_pg_timeout(WAIT, group)
            program = partial(call, dist.get_rank(), torch.ones(2, 3), group)
            found[name] = told(program, wait_s=10, by_line=False)
        return found

    results = two_ranks(fn)
    for name, (_, lines) in PARTING.items():
        for found in results:
            error = found[name].error
            assert error.startswith("the ranks part at collective 1 of all ranks.\n"), (name, error)
            assert [line for line in lines if line not in f"{error}\n"] == []
            assert "by_line" not in error
            assert found[name].seconds < 11
        assert "the ranks part" in results[0][name].printed


def early_stop() -> None:
    model = sharded()
    for _ in range(3 if dist.get_rank() == 1 else 5):
        train_step(model)


def test_a_rank_that_stops_early_is_named_with_the_unit_that_waits_for_it():
    results = told_each(early_stop, ranks=4)
    for error, _, seconds, _, _ in results:
        assert "waits for rank 1.\n" in error, error
        assert "  ranks 0, 2, 3: all_gather" in error
        assert ", at test_in_step.py:" in error
        assert "`loss = model(torch.randn(4, 8)).square().mean()`" in error
        assert "  rank 1: has left the block; its last: reduce_scatter" in error
        assert seconds < 11
    assert results[1].seconds < 5  # the rank that left does not wait for the time-out


def raise_alone() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_keeps_its_error_and_is_named_to_the_others():
    results = told_each(raise_alone)
    assert [each.kind for each in results] == ["OutOfStep", "KeyError"]
    for error, *_ in results:
        assert "collective 2 of all ranks waits for rank 1" in error
        assert "  rank 1: left the block by KeyError; its last: all_reduce of float32[1] by SUM" in error


def in_half_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        _set_pg_timeout(WAIT, mesh.get_group(name))
    for _ in range(3 if dist.get_rank() == 2 else 4):
        dist.all_reduce(torch.ones(1), group=mesh.get_group("b"))


def test_ranks_of_a_mesh_are_compared_within_their_group():
    for error, *_ in told_each(in_half_of_a_mesh, ranks=4):
        assert "collective 4 of the group of ranks 2, 3 waits for rank 2.\n" in error
        assert "rank 0" not in error


# ---- programs that are right


def slow() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(3)  # such as an evaluation
    dist.all_reduce(torch.ones(1))


def test_a_long_wait_is_reported_once_with_the_line_of_the_slow_rank_and_raises_nothing():
    first, second = told_each(slow, wait_s=10, after_s=1)
    assert (first.error, second.error, second.printed) == ("", "", "")
    assert first.printed.count("check_in_step: collective 2 of all ranks waits for rank 1.\n") == 1
    assert "rank 1: has not called it, and stands at test_in_step.py:" in first.printed
    assert "`time.sleep(3)  # such as an evaluation`" in first.printed


def two_lines() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1))


def leave_a_thread_behind() -> None:
    group = dist.new_group()

    def save() -> None:
        for _ in range(15):
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(0.1)

    threading.Thread(target=save).start()
    time.sleep(0.1 + dist.get_rank())


def compute() -> None:
    dist.barrier()
    x, end = torch.ones(200, 200), time.monotonic() + 2.5
    while time.monotonic() < end:
        torch.ops.aten.mm(x, x)


def train() -> None:
    model = sharded()
    for _ in range(30):
        train_step(model)
        dist.broadcast(torch.ones(1), src=0)
        dist.all_gather_object([None] * dist.get_world_size(), "x" * 100 * dist.get_rank())


def call_with_what_may_differ() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    half, x = halves[rank % 2], torch.ones(2, 3)
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


def train_in_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)

    def part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 7))

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    flat, wrapped = FSDP(part(), device_id=torch.device("cpu")), DistributedDataParallel(part())
    both = fully_shard(parallelize_module(part(), mesh["tp"], plan), mesh=mesh["dp"])
    hybrid = fully_shard(part(), mesh=mesh)
    for model in (flat, wrapped, both, hybrid):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(3, 7)).square().mean().backward()
            optimizer.step()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="saved")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=model in (both, hybrid))
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        states = {"model_state_dict": of_model, "optim_state_dict": of_optimizer}
        set_state_dict(model, optimizer, **states, options=options)


# by the number of ranks: programs, which are one after another, and the options of check_in_step
RIGHT: dict[int, list[tuple[Callable[[], None], dict[str, Any]]]] = {
    2: [(two_lines, {"by_line": False}), (leave_a_thread_behind, {}), (compute, {"after_s": 1})],
    4: [(train, {}), (call_with_what_may_differ, {}), (train_in_parallel, {"after_s": 30})],
}


@pytest.mark.parametrize("ranks", RIGHT)
def test_right_programs_hear_nothing(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fn() -> list[Told]:
        return [told(program, wait_s=30, **options) for program, options in RIGHT[ranks]]

    for found in run_on_ranks(fn, world_size=ranks, timeout=100):
        assert [(each.error, each.report, each.printed) for each in found] == [("", "", "")] * 3


def test_without_a_process_group_it_does_nothing_and_after_s_has_to_be_a_time():
    with check_in_step() as check:
        pass
    assert check.report == ""
    for after_s in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected after_s above 0"), check_in_step(after_s=after_s):
            pass

"""check_in_step on real ranks that part, each by a mistake that programs make."""

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_utils import OutOfStep, check_in_step, record_collectives, run_on_ranks
from fsdp_utils.torch_internals.groups import set_gloo_timeout

WAIT_S = 5.0  # the longest that a collective of these tests waits


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    set_gloo_timeout(mesh.get_group(), WAIT_S)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
    return model


def train_step(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    return loss.detach()


def told(program: Callable[[], Any], **options: Any) -> tuple[str, float, str, str]:
    """What check_in_step says of a program on this rank: the error, seconds, the report, stderr."""
    set_gloo_timeout(dist.group.WORLD, WAIT_S)  # type: ignore[arg-type]
    dist.barrier()
    error, began, printed, check = "", time.monotonic(), io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            with check_in_step(**options) as check:
                program()
        except OutOfStep as raised:
            error = str(raised)
    return error, time.monotonic() - began, check.report if check else "", printed.getvalue()


def in_step() -> tuple[str, float, str, str]:
    model = sharded()

    def program() -> None:
        for _ in range(30):
            train_step(model)
            dist.broadcast(torch.ones(1), src=0)
            dist.all_gather_object([None] * dist.get_world_size(), "x" * 100 * dist.get_rank())

    return told(program)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_in_step_hear_nothing(ranks):
    for error, seconds, report, printed in run_on_ranks(in_step, world_size=ranks, timeout=60):
        assert (error, report, printed) == ("", "", "")
        assert seconds < 30


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
        assert "  rank 0: all_reduce, 4 bytes, at test_in_step.py:" in error
        assert "`dist.all_reduce(torch.zeros(1))  # the better loss`" in error
        assert f"  {others}: all_reduce, 4 bytes, at test_in_step.py:" in error
        assert seconds < 9  # it would run for more than ten seconds
    assert [bool(printed) for *_, printed in results] == [True] + [False] * (ranks - 1)


def branch_without_lines() -> tuple[str, float, str, str]:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.ones(1))

    return told(program, by_line=False)


def test_lines_may_differ_where_by_line_is_false(two_ranks):
    for error, _, report, _ in two_ranks(branch_without_lines):
        assert (error, report) == ("", "")


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
    set_gloo_timeout(dist.group.WORLD, WAIT_S)  # type: ignore[arg-type]
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
        assert "  rank 1: left the block by KeyError; its last: all_reduce, 4 bytes" in text


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


def under_if_rank_0() -> tuple[str, float, str, str]:
    def program() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(2)

    return told(program)


def test_a_collective_under_if_rank_0(two_ranks):
    for error, _, _, _ in two_ranks(under_if_rank_0):
        assert "collective 2 of all ranks waits for rank 1" in error
        assert "  rank 0: barrier, at test_in_step.py:" in error


def in_half_of_a_mesh() -> tuple[str, float, str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        set_gloo_timeout(mesh.get_group(name), WAIT_S)

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

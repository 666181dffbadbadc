"""Ranks on GPUs join, fail and recover, with CUDA faked: the real group underneath is gloo's."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from fsdp_utils import run_on_ranks
from fsdp_utils.notebook import engine, group, nccl
from fsdp_utils.notebook.cluster import choose

ASSERT = "CUDA error: device-side assert triggered"


@contextmanager
def faked_cuda(calls: list[str]) -> Iterator[None]:
    """CUDA seems to be there; `calls` gets what would have reached it, in order."""
    init, abort = dist.init_process_group, dist.distributed_c10d._abort_process_group
    all_reduce = dist.all_reduce

    def init_process_group(backend: str, *settings: Any) -> None:
        set_before = all(os.environ.get(name) == value for name, value in nccl.WATCHDOG.items())
        calls.append(f"init {backend}, environment set: {set_before}")
        init("gloo", *settings)

    def abort_process_group(_group: dist.ProcessGroup | None = None) -> None:
        calls.append("abort")
        abort()

    def noted_all_reduce(*arguments: Any, **options: Any) -> Any:
        calls.append("all_reduce")
        return all_reduce(*arguments, **options)

    def note(name: str) -> Callable[..., None]:
        return lambda *arguments: calls.append(" ".join(map(str, [name, *arguments])))

    with ExitStack() as stack:
        for patched in (
            patch.object(nccl, "DEVICE", torch.device("cpu")),
            patch.object(torch.cuda, "is_initialized", lambda: True),
            patch.object(torch.cuda, "set_device", note("set_device")),
            patch.object(torch.cuda, "synchronize", note("synchronize")),
            patch.object(dist, "init_process_group", init_process_group),
            patch.object(dist, "destroy_process_group", note("destroy")),
            patch.object(dist, "all_reduce", noted_all_reduce),
            patch.object(dist.distributed_c10d, "_abort_process_group", abort_process_group),
        ):
            stack.enter_context(patched)
        yield


def test_joining_sets_nccls_environment_aborts_the_old_group_and_warms_up(two_ranks, tmp_path: Path):
    def on_rank() -> tuple[list[str], str, bool]:
        calls: list[str] = []
        with faked_cuda(calls):
            group.join_group(dist.get_rank(), 2, "cuda", tmp_path / "store", 20.0)
            return calls, os.environ["NCCL_SOCKET_IFNAME"], group.group_is_healthy()

    for rank, (calls, interface, whole) in enumerate(two_ranks(on_rank)):
        init = "init cpu:gloo,cuda:nccl, environment set: True"
        assert calls == [f"set_device {rank}", "abort", init, "all_reduce", "all_reduce"]
        assert interface in ("=lo", "=lo0")
        assert whole


def alone(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in another process, as a cell changes signal handlers."""
    return run_on_ranks(fn, *arguments, world_size=1)[0]


def test_a_cell_ends_when_its_work_on_the_gpu_has_ended_and_has_its_errors():
    def on_rank() -> tuple[Any, ...]:
        calls: list[str] = []
        with faked_cuda(calls):
            done, failed = engine.run_cell("x = 1", 5.0), engine.run_cell("raise KeyError", 5.0)
            with patch.object(torch.cuda, "synchronize", mock.Mock(side_effect=RuntimeError(ASSERT))):
                late = engine.run_cell("x = 1", 5.0)
        return done, failed.name, calls, late.message, late.where

    assert alone(on_rank) == (None, "KeyError", ["synchronize"], ASSERT, engine.AT_THE_END)


def test_a_collective_past_its_limit_ends_the_cell_and_not_the_process():
    def on_rank() -> Any:
        asked = iter([ErrorType.SUCCESS] * 6)  # for a while all is well
        backend = SimpleNamespace(get_error=lambda: next(asked, ErrorType.TIMEOUT))
        world = SimpleNamespace(pg_map={mock.Mock(_get_backend=lambda _: backend): None})
        faked_world = patch.object(dist.distributed_c10d, "_world", world)
        with patch.object(engine, "set_group_timeout"), faked_world, faked_cuda([]):
            return engine.run_cell("import time\ntime.sleep(0)\ntime.sleep(30)", 5.0)

    found = alone(on_rank)
    assert (found.name, found.in_collective) == ("CollectiveError", True)
    assert found.message == "a collective waited for the other ranks until its time limit"
    assert found.where == "line 3: time.sleep(30)"
    assert found.seconds < 5


@pytest.mark.parametrize(
    ("gpus", "asked", "chosen"),
    [
        (0, (None, None), (4, "cpu")),
        (4, (None, None), (4, "cuda")),
        (5, (None, None), (4, "cuda")),  # 24 samples have no equal shares for 5
        (7, (None, None), (6, "cuda")),
        (7, (8, None), (8, "cpu")),
        (7, (None, "cpu"), (4, "cpu")),
    ],
)
def test_as_many_ranks_as_gpus_or_as_share_a_lessons_batch_equally(
    gpus: int, asked: tuple[int | None, str | None], chosen: tuple[int, str]
) -> None:
    assert choose(*asked, gpus) == chosen

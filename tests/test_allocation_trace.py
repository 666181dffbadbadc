"""The trace holds what was really allocated and freed."""

import gc
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from fsdp_utils.allocator import AllocationTrace, record_allocations
from tests.blocks import Block
from tests.on_ranks import on_ranks

MIB = 2**20


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def live_bytes(trace: AllocationTrace) -> int:
    return sum({"alloc": 1, "free": -1, "step": 0}[event.kind] * event.size for event in trace.events)


def test_peak_and_end_equal_those_of_the_cpu_allocator() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), Block(64), nn.Linear(64, 8)
    )
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 32, 64)
    train_step(model, optimizer, x)
    with record_allocations(model, optimizer, x) as trace:
        train_step(model, optimizer, x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(model, optimizer, x)

    live = peak = 0
    for event in profiler.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    before = sum(event.size for event in trace.events if event.name == "before the recording")
    assert peak > MIB
    assert trace.peak_gib * 2**30 - before == peak
    assert live_bytes(trace) - before == live == 0


def test_every_free_follows_the_allocation_it_frees() -> None:
    model = Block(32)
    optimizer = torch.optim.AdamW(model.parameters())
    with record_allocations(model, optimizer) as trace:
        for _ in range(2):
            trace.begin_step()
            train_step(model, optimizer, torch.randn(4, 32))
    live: dict[int, int] = {}
    for event in trace.events:
        if event.kind == "alloc":
            assert event.block not in live
            live[event.block] = event.size
        elif event.kind == "free":
            assert live.pop(event.block) == event.size
    states = 3 * sum(p.nbytes for p in model.parameters()) + 4 * 4  # weights, two moments, four step counters
    assert sum(live.values()) == states
    assert [event.kind for event in trace.events].count("step") == 2


def test_a_resized_storage_is_freed_and_allocated_anew() -> None:
    with record_allocations() as trace:
        tensor = torch.empty(1000)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(8000)
    kinds = [(event.kind, event.size) for event in trace.events]
    assert kinds == [("alloc", 4000), ("free", 4000), ("alloc", 8000)]


def test_nothing_is_recorded_after_the_block_even_if_it_raised() -> None:
    resize = torch.UntypedStorage.resize_
    kept, traces = [], []

    def fail_while_recording() -> None:
        with record_allocations() as trace:
            traces.append(trace)
            kept.append(torch.empty(1000))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_while_recording()
    assert torch.UntypedStorage.resize_ is resize
    kept.clear()
    gc.collect()
    assert [event.kind for event in traces[0].events] == ["alloc"]


def fsdp_trace(backend: str, fake_tensors: bool) -> AllocationTrace:
    """Two steps of a model sharded over all ranks, in which each unit's parameters are gathered and freed."""
    mesh = DeviceMesh.from_group(torch.distributed.new_group(backend=backend), "cpu")
    with FakeTensorMode() if fake_tensors else nullcontext():
        model = nn.Sequential(*[Block(256) for _ in range(4)])
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with record_allocations(model, optimizer) as trace:
            for _ in range(2):
                trace.begin_step()
                train_step(model, optimizer, torch.randn(4, 256))
    return trace


@on_ranks()
def test_fsdp_gathers_in_streams_of_its_own_and_fake_tensors_give_the_trace_of_real_ones() -> None:
    trace, unit = fsdp_trace("gloo", fake_tensors=False), sum(p.nbytes for p in Block(256).parameters())
    second = trace.events[[i for i, event in enumerate(trace.events) if event.kind == "step"][1] :]
    gathered = Counter(e.kind for e in second if e.stream == 1 and e.size >= 0.9 * unit)
    # 4 units in forward and again in backward, where the last may have stayed
    assert gathered["alloc"] == gathered["free"] >= 7
    at_rest = AllocationTrace([e for e in trace.events if e.name == "before the recording"]).peak_gib * 2**30
    assert at_rest == pytest.approx(4 * unit / 2, rel=0.02)
    # unsharded training would hold weights, moments and at least one unit's gradients
    assert trace.peak_gib * 2**30 < 3 * 4 * unit
    real, fake = (fsdp_trace("fake", fake_tensors) for fake_tensors in (False, True))
    assert len(real.events) > 100
    assert real == fake

"""Steps that are not the usual ones: what the recording says of them, and that it leaves them alone."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace
from tests.on_ranks import fake_group, on_ranks
from tests.recorded import LAYERS, Model, fsdp1, fsdp2, record, step

UNITS = LAYERS + 1  # with the root's, of the head
NAMES = {"(root)", *(f"layers.{i}" for i in range(LAYERS))}


class BrokenError(Exception):
    """Raised in the middle of a recording."""


def phases(trace: CollectiveTrace, kind: str) -> Counter[str]:
    return Counter(event.phase for event in trace.events if event.kind == kind)


# ---- asserted on two ranks -------------------------------------------------------------------------------


@on_ranks()
def test_names_of_units() -> None:
    for build in (fsdp1, fsdp2):
        model = Model()
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
        trace = record(build(model))
        assert set(trace.unit_bytes) == {event.module for event in trace.collectives} == NAMES
        # activation checkpointing computes each layer again in backward
        assert {e.module for e in trace.events if (e.kind, e.phase) == ("compute", "backward")} == NAMES
    shared = Model()
    fully_shard([shared.layers[0], shared.layers[1]])
    trace = record(fully_shard(shared))
    assert trace.unit_bytes["layers.0, layers.1"] == 2 * 4 * 56


@on_ranks()
def test_unusual_steps() -> None:
    for build in (fsdp1, fsdp2):
        model = build(Model())
        step(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with record_collectives(model) as trace:
            optimizer.step(lambda model=model: step(model))  # pyright: ignore
        assert phases(trace, "all_gather")["forward"] == phases(trace, "compute")["forward"] == UNITS
        assert set(phases(trace, "all_gather")) == {"forward", "backward"}
        if build is fsdp2:
            model.set_requires_gradient_sync(False)
        with record_collectives(model) as trace, model.no_sync() if build is fsdp1 else nullcontext():
            step(model)
        assert list(trace.bytes_by_kind()) == ["all_gather"]
        with record_collectives(model) as trace, torch.no_grad():
            model(torch.ones(3, 7))
        computed = [event.module for event in trace.events if event.kind == "compute"]
        assert set(computed) == NAMES
        assert computed[-1] == "(root)"  # the head
        frozen = Model()
        frozen.layers[1].requires_grad_(False)
        frozen = build(frozen)
        step(frozen)
        with record_collectives(frozen) as trace:
            for _ in range(3):
                step(frozen)
        assert phases(trace, "all_gather")["forward"] == 3 * UNITS  # a frozen unit ends in backward, too
        assert phases(trace, "reduce_scatter") == {"backward": 3 * (UNITS - 1)}


@on_ranks()
def test_a_thread_that_sends() -> None:
    model, group = fsdp2(Model()), dist.new_group()
    step(model)

    def gather() -> None:
        for _ in range(40):
            dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=group)

    with record_collectives(model) as trace:
        step(model)
        thread = threading.Thread(target=gather)
        thread.start()
        for _ in range(10):
            step(model)
        thread.join(60)
    gathers = [event for event in trace.collectives if event.kind == "all_gather"]
    assert Counter(event.module for event in gathers if event.bytes_in == 4) == {"": 40}
    assert len(gathers) == 40 + 11 * (2 * UNITS - 1)  # the root's is not gathered again


class Outside(TorchDispatchMode):
    """Each operation that reaches the dispatcher, whoever else watches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@on_ranks()
def test_losses_and_operations() -> None:
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        found = []
        for recorded in (True, False):
            torch.manual_seed(0)
            model = build(Model())
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            losses = [step(model, optimizer)]
            # the outer mode: it sees what the recording passes on
            with Outside() as outside, record_collectives(model) if recorded else nullcontext():
                losses += [step(model, optimizer) for _ in range(2)]
            losses.append(step(model, optimizer))  # and after it, all is as before
            found.append((losses, outside.names))
        assert found[0] == found[1]
        assert any(name.startswith("c10d::") for name in outside.names)


class Own(nn.Linear):
    """torch.compile leaves the layers of torch itself alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(input, self.weight, self.bias))


@on_ranks()
def test_compiled_layers() -> None:
    from torch._dynamo.testing import CompileCounter  # here: it takes a second, and only this test needs it

    torch._dynamo.reset()
    for build in (fsdp2, lambda model: fsdp1(model, use_orig_params=True)):
        orders, counter = [], CompileCounter()
        for compiles in (False, True):
            torch.manual_seed(0)
            model = Model()
            model.layers = nn.ModuleList(Own(7, 7) for _ in range(LAYERS))
            model = build(model)
            for layer in model.layers if compiles else ():
                layer = layer._fsdp_wrapped_module if isinstance(layer, FSDP) else layer
                layer.compile(backend=counter, fullgraph=True)
            step(model)
            frames = counter.frame_count
            with record_collectives(model) as trace:
                step(model)
            orders.append(trace.order())
            assert counter.frame_count == frames
        assert orders[0] == orders[1]


@on_ranks()
def test_recordings_within_each_other() -> None:
    with pytest.raises(ValueError, match="without any of them"), record_collectives(nn.Linear(2, 2)):
        pass
    model = fsdp2(Model())
    with record_collectives(model) as outer, record_collectives(model) as inner:
        step(model)
    with record_collectives(model) as again:
        step(model)
    assert outer.order() == inner.order() == again.order()
    assert len(again.collectives) == 14


@on_ranks()
def test_an_exception() -> None:
    """The trace keeps the events until then, nothing more is recorded, and no hook stays in the model."""
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        model = build(Model())
        step(model)
        before = hooks(model)
        with pytest.raises(BrokenError, match="in the middle"):  # noqa: PT012, SIM117
            with record_collectives(model) as trace:
                step(model)
                raise BrokenError("in the middle")
        events = len(trace.events)
        step(model)
        assert len(trace.events) == events > 1
        assert trace.notes == ["the block ended early, by BrokenError: in the middle"]
        assert trace.summary().splitlines()[-1] == f"note: {trace.notes[0]}"
        assert hooks(model) == before


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@on_ranks()
def test_a_forward_that_fails() -> None:
    """In front of a unit's forward: the steps after it are recorded as ever."""
    for build, least in ((fsdp1, 2 * UNITS), (fsdp2, 2 * UNITS), (DistributedDataParallel, 2)):
        model = Model()
        raises = iter([False, True, False, False])
        model.layers[1].register_forward_pre_hook(lambda *_, raises=raises: 1 / 0 if next(raises) else None)
        model = build(model)
        step(model)
        with record_collectives(model) as trace:
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(3, 7))
            gathered = [call for call in trace.order() if "all_gather" in call]
            step(model)
            first = len(trace.events)
            step(model)
        units = ["(root)", "layers.0", "layers.1"] if least > 2 else []
        assert gathered == [f"all_gather {unit}" for unit in units]
        assert sum(event.kind == "compute" for event in trace.events[first:]) >= least


@on_ranks()
def test_times_on_a_cpu() -> None:
    """Nothing overlaps, and everything ends."""
    events = record(fsdp2(Model())).events
    assert [event.start for event in events] == sorted(event.start for event in events)
    # What is computed ends where the next event begins. That a collective has ended is told by a callback in
    # gloo's thread, which may be a little late, but never so late as the next collective.
    for position, event in enumerate(events):
        assert event.seconds is not None
        assert event.seconds >= 0
        following = [e for e in events[position + 1 :] if e.is_collective or not event.is_collective]
        assert not following or event.start + event.seconds <= following[0].start, position


@on_ranks()
def test_collectives_without_work() -> None:
    """NCCL gives none for a collective that is not asynchronous; gloo's is hidden here."""
    model = fsdp2(Model())
    with patch.object(dist.Work, "unbox", return_value=None):
        trace = record(model)
    sent = trace.collectives
    assert {event.kind for event in sent} == {"all_gather", "reduce_scatter"}
    assert all(event.seconds is not None for event in sent)


# ---- on a GPU --------------------------------------------------------------------------------------------


@pytest.fixture
def one_of_two() -> Iterator[None]:
    with fake_group(2):
        yield


class FakeEvent:
    """A GPU's event: the GPU runs everything 1 s late, and takes a ms from one event to the next."""

    made = itertools.count()

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert (device, enable_timing) == (torch.device("cpu"), True)

    def record(self, stream: str) -> None:
        assert stream == "the current stream"
        self.at = next(self.made)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_times_are_those_of_events_in_its_streams(monkeypatch: pytest.MonkeyPatch, fails: bool):
    model, waited = fsdp2(Model()), []
    order = record(model).order()
    monkeypatch.setattr(FakeEvent, "made", itertools.count())
    monkeypatch.setattr(torch, "Event", FakeEvent)
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(accelerator, "synchronize", waited.append)
    trace = None
    try:
        with record_collectives(model) as trace:
            step(model)
            if fails:
                raise BrokenError
    except BrokenError:
        assert fails
    assert trace is not None
    assert trace.order() == order
    known = [event for event in trace.events if event.seconds is not None and event.kind != "free"]
    starts = [round(1e3 * event.start) for event in known]
    assert starts == sorted(starts)
    assert [1e3 * event.start for event in known] == pytest.approx(starts)  # by the events, to the ms
    if fails:  # a stuck GPU is not waited for
        assert waited == known == []
        assert trace.notes[1].startswith("the GPU may have failed")
    else:
        assert waited == [torch.device("cpu")]
        assert len(known) == len(order)
        assert trace.notes == []

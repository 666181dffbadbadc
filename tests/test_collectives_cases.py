"""Steps that are not the usual ones: what the recording says of them, and that it leaves them alone."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

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
from tests.recorded import LAYERS, Model, fsdp1, fsdp2, record, step

UNITS = LAYERS + 1  # with the root's, of the head
NAMES = {"(root)", *(f"layers.{i}" for i in range(LAYERS))}


class BrokenError(Exception):
    """Raised in the middle of a recording."""


def phases(trace: CollectiveTrace, kind: str) -> Counter[str]:
    return Counter(event.phase for event in trace.events if event.kind == kind)


# ---- what is recorded ------------------------------------------------------------------------------------


def names() -> str:
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
    return "as in the model"


def test_units_are_called_as_in_the_model_however_they_are_wrapped(two_ranks):
    assert two_ranks(names) == ["as in the model"] * 2


def unusual_steps(build: Any) -> dict[str, Any]:
    model = build(Model())
    step(model)
    found: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with record_collectives(model) as trace:
        optimizer.step(lambda: step(model))  # pyright: ignore
    found["inside of an optimizer"] = phases(trace, "all_gather"), phases(trace, "compute")["forward"]
    if build is fsdp2:
        model.set_requires_gradient_sync(False)
    with record_collectives(model) as trace:
        if build is fsdp1:
            with model.no_sync():
                step(model)
        else:
            step(model)
    found["without sync"] = list(trace.bytes_by_kind())
    with record_collectives(model) as trace, torch.no_grad():
        model(torch.ones(3, 7))
    found["without gradients"] = [event.module for event in trace.events if event.kind == "compute"]
    frozen = Model()
    frozen.layers[1].requires_grad_(False)
    frozen = build(frozen)
    step(frozen)
    with record_collectives(frozen) as trace:
        for _ in range(3):
            step(frozen)
    found["frozen"] = phases(trace, "all_gather"), phases(trace, "reduce_scatter")
    return found


def test_unusual_steps_are_recorded_alike_under_fsdp1_and_fsdp2(two_ranks):
    for one, two in two_ranks(lambda: [unusual_steps(build) for build in (fsdp1, fsdp2)]):
        for found in (one, two):
            assert set(found["without gradients"]) == NAMES
            assert found["without gradients"][-1] == "(root)"  # the head
            gathered, computed = found["inside of an optimizer"]
            assert gathered["forward"] == computed == UNITS
            assert set(gathered) == {"forward", "backward"}
            assert found["without sync"] == ["all_gather"]
        assert one["frozen"] == two["frozen"]  # a unit that is frozen ends in backward, too
        gathered, reduced = one["frozen"]
        assert gathered["forward"] == 3 * UNITS
        assert reduced == {"backward": 3 * (UNITS - 1)}


def beside_a_thread() -> tuple[Counter[str], int]:
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
    return Counter(event.module for event in gathers if event.bytes_in == 4), len(gathers)


def test_what_another_thread_sends_belongs_to_no_unit(two_ranks):
    for small, gathers in two_ranks(beside_a_thread):
        assert small == {"": 40}
        assert gathers == 40 + 11 * (2 * UNITS - 1)  # the root's is not gathered again


# ---- what is left alone ----------------------------------------------------------------------------------


class Outside(TorchDispatchMode):
    """Each operation that reaches the dispatcher, whoever else watches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def train(build: Any, recorded: bool) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = build(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer)]
    with Outside() as outside:  # the outer mode: it sees what the recording passes on
        if recorded:
            with record_collectives(model):
                losses += [step(model, optimizer) for _ in range(2)]
        else:
            losses += [step(model, optimizer) for _ in range(2)]
    losses.append(step(model, optimizer))  # and after it, all is as before
    return losses, outside.names


def test_recording_changes_neither_losses_nor_operations(two_ranks):
    builds = (fsdp1, fsdp2, DistributedDataParallel)
    for found in two_ranks(lambda: [(train(build, True), train(build, False)) for build in builds]):
        for recorded, plain in found:
            assert recorded == plain
            assert any(name.startswith("c10d::") for name in plain[1])


class Own(nn.Linear):
    """torch.compile leaves the layers of torch itself alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(input, self.weight, self.bias))


def compiled() -> list[tuple[list[str], list[str], int]]:
    from torch._dynamo.testing import CompileCounter  # here: it takes a second, and only this test needs it

    torch._dynamo.reset()
    found = []
    for build in (fsdp2, lambda model: fsdp1(model, use_orig_params=True)):
        orders, counter, frames = [], CompileCounter(), 0
        for compiles in (False, True):
            torch.manual_seed(0)
            model = Model()
            model.layers = nn.ModuleList(Own(7, 7) for _ in range(LAYERS))
            model = build(model)
            if compiles:
                for layer in model.layers:
                    layer = layer._fsdp_wrapped_module if isinstance(layer, FSDP) else layer
                    layer.compile(backend=counter, fullgraph=True)
            step(model)
            frames = counter.frame_count
            with record_collectives(model) as trace:
                step(model)
            orders.append(trace.order())
            frames = counter.frame_count - frames
        found.append((*orders, frames))
    return found


def test_torch_compile_sees_nothing_of_a_recording(two_ranks):
    for found in two_ranks(compiled):
        for plain, with_compile, new_frames in found:
            assert with_compile == plain
            assert new_frames == 0


# ---- what fails ------------------------------------------------------------------------------------------


def refused(model: nn.Module, **options: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught, record_collectives(model, **options):
        pass
    return str(caught.value)


def test_a_model_that_is_not_distributed_is_refused():
    assert "found a Linear without any of them" in refused(nn.Linear(2, 2))


def nested() -> tuple[str, str, int, int]:
    model = fsdp2(Model())
    with record_collectives(model) as outer:
        message = refused(model)
        step(model)
    impossible = refused(model, ranks_per_host=0)
    with record_collectives(model) as again:  # neither refusal is left behind
        step(model)
    return message, impossible, len(outer.collectives), len(again.collectives)


def test_nested_recordings_are_refused_and_the_outer_one_goes_on(two_ranks):
    for message, impossible, recorded, again in two_ranks(nested):
        assert "expected no other recording in this process" in message
        assert "ranks_per_host of at least 1, found 0" in impossible
        assert recorded == again == 14


def interrupted() -> list[tuple[list[str], list[str], int]]:
    results = []
    for build in (fsdp1, fsdp2, DistributedDataParallel):
        model = build(Model())
        step(model)
        with pytest.raises(BrokenError, match="in the middle"):  # noqa: PT012, SIM117
            with record_collectives(model) as trace:
                step(model)
                raise BrokenError("in the middle")
        before = len(trace.events)
        step(model)  # and no longer recorded
        assert len(trace.events) == before
        results.append((trace.notes, trace.summary().splitlines()[-1:], len(trace.collectives)))
    return results


def test_an_exception_leaves_what_was_recorded_until_then(two_ranks):
    for results in two_ranks(interrupted):
        for notes, last_line, recorded in results:
            assert notes == ["the block ended early, by BrokenError: in the middle"]
            assert last_line == [f"note: {notes[0]}"]
            assert recorded >= 1


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def broken_forward(build: Any) -> tuple[int, list[str], int, int]:
    """An exception in front of a unit's forward, and nothing of the recording left in the model."""
    model = Model()
    raises = iter([False, True, False, False])
    model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0 if next(raises) else None)
    model = build(model)
    step(model)
    before = hooks(model)
    with record_collectives(model) as trace:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(3, 7))
        order = trace.order()
        step(model)
        first = len(trace.events)
        step(model)
    plain = sum(event.kind == "compute" for event in trace.events[first:])
    return plain, [call for call in order if "all_gather" in call], before, hooks(model)


def test_a_failed_forward_spoils_nothing_after_it_and_leaves_no_hooks(two_ranks):
    builds = (fsdp1, fsdp2, DistributedDataParallel)
    for found in two_ranks(lambda: [broken_forward(build) for build in builds]):
        gathered = ["all_gather (root)", "all_gather layers.0", "all_gather layers.1"]
        for (computed, order, before, after), least in zip(found, (2 * UNITS, 2 * UNITS, 2), strict=True):
            assert computed >= least
            assert order == (gathered if least > 2 else [])
            assert before == after


# ---- when it ran -----------------------------------------------------------------------------------------


def times() -> list[tuple[bool, float, float]]:
    trace = record(fsdp2(Model()))
    assert all(event.seconds is not None for event in trace.events)
    return [(event.is_collective, event.start, event.start + (event.seconds or 0)) for event in trace.events]


def test_on_cpu_nothing_overlaps_and_everything_ends(two_ranks):
    for events in two_ranks(times):
        assert all(end >= start for _, start, end in events)
        assert [start for _, start, _ in events] == sorted(start for _, start, _ in events)
        # What is computed ends where the next event begins. That a collective has ended is told by a callback
        # in gloo's thread, which may be a little late, but never so late as the next collective.
        for position, (is_collective, _, end) in enumerate(events):
            following = [e for e in events[position + 1 :] if e[0] or not is_collective]
            if following:
                assert end <= following[0][1], position


@pytest.fixture
def one_of_two() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class FakeEvent:
    """A GPU's event: the GPU runs everything 1 s late, and takes a ms from one event to the next."""

    made = itertools.count()
    finished = 10**9  # of so many

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert (device, enable_timing) == (torch.device("cpu"), True)

    def record(self, stream: str) -> None:
        assert stream == "the current stream"
        self.at = next(self.made)

    def query(self) -> bool:
        return self.at < self.finished

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_times_are_those_of_events_in_its_streams(monkeypatch: pytest.MonkeyPatch, fails: bool):
    model, waited = fsdp2(Model()), []
    order = record(model).order()
    monkeypatch.setattr(FakeEvent, "made", itertools.count())
    monkeypatch.setattr(FakeEvent, "finished", 12 if fails else 10**9)
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
        assert waited == []
        assert 3 <= len(known) < len(order)
        assert trace.notes[1].startswith("the GPU failed, or had not finished")
    else:
        assert waited == [torch.device("cpu")]
        assert len(known) == len(order)
        assert trace.notes == []

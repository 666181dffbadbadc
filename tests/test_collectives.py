"""Recorded orders and bytes, held against FSDP's documentation and torch's profiler; unusual steps."""

import itertools
import json
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils import record_collectives
from fsdp_utils.collectives import CollectiveTrace, StepEvent
from tests.on_ranks import Together, case, fake_group
from tests.recorded import LAYERS, Model, by_unit, fsdp1, fsdp2, order, record, step

UNITS = LAYERS + 1  # with the root's, of the head
NAMES = {"(root)", *(f"layers.{i}" for i in range(LAYERS))}
MODEL_BYTES = 4 * (LAYERS * (7 * 7 + 7) + 5 * 7 + 5)

on_two, on_three, on_four = Together(2), Together(3), Together(4)


class BrokenError(Exception):
    """Raised in the middle of a recording."""


def phases(trace: CollectiveTrace, kind: str) -> Counter[str]:
    return Counter(event.phase for event in trace.events if event.kind == kind)


def short(trace: CollectiveTrace, phase: str) -> str:
    """The order in letters: AG, RS, AR, and mm for the computation of a unit."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "compute": "mm"}
    return " ".join(
        letters[event.kind]
        for event in trace.events
        if event.phase == phase and event.kind in letters and event.module != "(root)"
    )


# ---- in which order --------------------------------------------------------------------------------------


@on_two
def test_the_order_is_the_one_that_each_prefetch_setting_promises() -> None:
    prefetch = {"none": None, "post": BackwardPrefetch.BACKWARD_POST, "pre": BackwardPrefetch.BACKWARD_PRE}
    models: dict[str, nn.Module] = {
        f"FSDP1 {name}": fsdp1(Model(head=False), backward_prefetch=way) for name, way in prefetch.items()
    }
    models["forward_prefetch"] = fsdp1(Model(head=False), forward_prefetch=True, backward_prefetch=None)
    models["FSDP2"] = fsdp2(Model(head=False))
    models["FSDP2 without resharding"] = fsdp2(Model(head=False), reshard_after_forward=False)
    models["FSDP2 explicit"] = explicit = fsdp2(Model(head=False))
    for i, layer in enumerate(explicit.layers):
        layer.set_modules_to_forward_prefetch(list(explicit.layers[i + 1 : i + 3]))
        layer.set_modules_to_backward_prefetch(list(explicit.layers[max(0, i - 2) : i])[::-1])
    traces = {name: record(model) for name, model in models.items()}
    plain = "AG mm AG mm AG mm AG mm"
    pre = "AG AG mm RS AG mm RS AG mm RS mm RS"
    assert {
        name: (short(trace, "forward"), short(trace, "backward"), trace.peak_units)
        for name, trace in traces.items()
    } == {
        "FSDP1 none": (plain, "AG mm RS AG mm RS AG mm RS AG mm RS", 1),
        "FSDP1 post": (plain, "AG mm AG RS mm AG RS mm AG RS mm RS", 1),
        "FSDP1 pre": (plain, pre, 2),
        # Its views of a gathered parameter are older than the computation before it. Autograd runs what
        # is younger first: in backward that computation comes before the gradient is reduced.
        "forward_prefetch": ("AG AG mm AG mm AG mm mm", "AG mm AG mm RS AG mm RS AG mm RS mm RS", 2),
        "FSDP2": (plain, pre, 2),
        "FSDP2 without resharding": (plain, "mm RS mm RS mm RS mm RS", 4),
        "FSDP2 explicit": ("AG AG AG mm AG mm mm mm", "AG AG AG mm RS AG mm RS mm RS mm RS", 3),
    }


# ---- how many bytes --------------------------------------------------------------------------------------

# By torch's operator: the kind, and the place among its arguments of a tensor of which `bytes` is a multiple.
OPERATORS = {
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 0),
    "c10d::allreduce_": ("all_reduce", 0),
}


def in_the_profiler(model: nn.Module, itemsize: int) -> list[tuple[str, int]]:
    """Kind and bytes of a step's collectives, by the shapes in the record of torch's profiler."""
    with profile(record_shapes=True) as profiler:
        step(model)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        records = json.loads(Path(file.name).read_text())["traceEvents"]
    seen = []
    for call in sorted((one for one in records if one.get("name") in OPERATORS), key=lambda one: one["ts"]):
        kind, place = OPERATORS[call["name"]]
        (numel,) = torch.tensor(call["args"]["Input Dims"][place]).flatten().tolist()
        seen.append((kind, numel * itemsize * (1 if kind == "all_reduce" else dist.get_world_size())))
    return seen


@on_three
def test_bytes_of_every_strategy_are_what_the_profiler_says_and_each_unit_has_its_own() -> None:
    forward, backward = [("all_gather", "forward")], [("reduce_scatter", "backward")]
    for reshard, strategy in ((True, ShardingStrategy.FULL_SHARD), (False, ShardingStrategy.SHARD_GRAD_OP)):
        again = [("all_gather", "backward")] if reshard else []
        for bf16 in (False, True):
            one = fsdp1(Model(), bf16=bf16, sharding_strategy=strategy)
            # The root frees nothing after forward by default; told to, it would.
            two = fsdp2(Model(), bf16=bf16, reshard_root=False, reshard_after_forward=reshard)
            for model in (one, two):
                with case(f"{type(model).__name__}, reshard {reshard}, bf16 {bf16}"):
                    trace = record(model)
                    sent = [(event.kind, event.bytes) for event in trace.collectives]
                    assert sent == in_the_profiler(model, 2 if bf16 else 4)
                    for unit, calls in by_unit(trace).items():
                        twice = again if unit != "(root)" else []
                        assert [call[:2] for call in calls] == [*twice, *forward, *backward], unit
    model = DistributedDataParallel(Model())
    step(model)  # it makes its buckets anew
    sent = [(event.kind, event.bytes) for event in record(model).collectives]
    assert sent == in_the_profiler(model, 4)


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


@on_four
def test_hybrid_shards_within_a_host_and_reduces_shards_between_hosts() -> None:
    rank = dist.get_rank()
    one = fsdp1(Model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh(2, 2))
    # 56 elements; FSDP2 pads the 7 rows of the weight, and the bias, to 8
    for model, whole in ((one, 4 * 56), (fsdp2(Model(), mesh=mesh(2, 2)), 4 * 64)):
        trace = record(model, ranks_per_host=2)
        seen = by_unit(trace)
        for unit in (f"layers.{i}" for i in range(LAYERS)):
            assert seen[unit] == [
                ("all_gather", "backward", whole // 2, whole),
                ("all_gather", "forward", whole // 2, whole),
                ("all_reduce", "backward", whole // 2, whole // 2),
                ("reduce_scatter", "backward", whole, whole // 2),
            ]
        assert len(seen["(root)"]) == 3
        mine = (0, 1) if rank < 2 else (2, 3)
        assert {(event.kind, event.ranks, event.link) for event in trace.collectives} == {
            ("all_gather", mine, "within a host"),
            ("reduce_scatter", mine, "within a host"),
            ("all_reduce", (rank % 2, rank % 2 + 2), "between hosts"),
        }
    assert sorted(trace.sent_bytes_by_dimension()) == ["replicate", "shard"]  # lesson 16 counts them
    assert "  replicate  " in trace.summary()


@on_two
def test_ddp_reduces_every_gradient_once() -> None:
    def reduced(model: nn.Module) -> list[tuple[str, int]]:
        events = [event for event in record(model).collectives if event.kind == "all_reduce"]
        assert all(event.bytes_in == event.bytes_out == event.sent_bytes for event in events)
        return [(event.module, event.bytes) for event in events]

    model = DistributedDataParallel(Model())
    assert reduced(model) == [("bucket 0", MODEL_BYTES)]
    with record_collectives(model) as silent, model.no_sync():
        step(model)
    assert silent.collectives == []
    small = DistributedDataParallel(Model(), bucket_cap_mb=1e-4)
    step(small)
    buckets = reduced(small)
    assert len(buckets) > 1  # a limit so low that there are several
    assert [name for name, _ in buckets] == [f"bucket {i}" for i in range(len(buckets))]
    assert reduced(small) == buckets  # counted from 0 again
    assert sum(size for _, size in buckets) == MODEL_BYTES


def test_what_a_ring_of_four_sends() -> None:
    for kind, given, got, sent in (
        ("all_gather", 100, 400, 300),
        ("reduce_scatter", 400, 100, 300),
        ("all_reduce", 400, 400, 600),
        # three ranks send a piece, the mean over four
        ("gather", 12, 48, 9),  # on the root
        ("gather", 12, 0, 9),
        ("scatter", 48, 12, 9),
        ("scatter", 0, 12, 9),
        ("send", 400, 0, 400),
        ("recv", 0, 400, 0),
    ):
        event = StepEvent(0, kind, "", "other", given, got, (0, 1, 2, 3), "within a host")
        assert (event.bytes, event.sent_bytes) == (max(given, got), sent), kind
    assert StepEvent(0, "all_reduce", "", "other", 400, 400, (0,), "within a host").sent_bytes == 0


# ---- every call ------------------------------------------------------------------------------------------


def call_as_compiled_code_does(small: torch.Tensor, large: torch.Tensor) -> None:
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    functional.wait_tensor(functional.all_gather_into_tensor_out(small, 2, group, out=large))
    functional.wait_tensor(functional.reduce_scatter_tensor_out(large, "sum", 2, group, out=small))


@on_two
def test_every_call_is_seen_once_whoever_issues_it() -> None:
    """torch.distributed in Python, DTensor and compiled graphs in C++."""
    model = fsdp2(Model())
    small, large = torch.ones(3), torch.ones(6)
    is_first = dist.get_rank() == 0
    calls = {
        "Python": [
            lambda: dist.all_gather([small, small.clone()], small),
            lambda: dist.all_gather_into_tensor(large, small),
            lambda: dist.group.WORLD._allgather_base(output=large, input=small).wait(),
            lambda: dist.reduce_scatter(small, [small, small]),
            lambda: dist.reduce_scatter_tensor(small, large),
            lambda: dist.all_reduce(small),
            lambda: dist.broadcast(small, 0),
            lambda: dist.reduce(small, 0),
            lambda: dist.gather(small, [small, small.clone()] if is_first else None),
            lambda: dist.scatter(small, [small, small] if is_first else None),
            lambda: dist.all_to_all([small, small.clone()], [small, small]),
            lambda: dist.all_to_all_single(large, large.clone()),
            lambda: dist.send(small, 1) if is_first else dist.recv(small),
            lambda: dist.barrier(),
        ],
        "DTensor": [
            lambda: DTensor.from_local(small, mesh(2), [Shard(0)]).full_tensor(),
            lambda: DTensor.from_local(large, mesh(2), [Partial()]).redistribute(placements=[Shard(0)]),
            lambda: DTensor.from_local(large, mesh(2), [Partial()]).full_tensor(),
        ],
        "compiled": [lambda: call_as_compiled_code_does(small, large)],
    }
    with record_collectives(model) as trace, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that this torch calls old
        seen = {}
        for turn in ("Python", "DTensor", "compiled", "Python again"):
            before = len(trace.events)
            for call in calls[turn.split()[0]]:
                call()
            seen[turn] = [(event.kind, event.bytes_in, event.bytes_out) for event in trace.events[before:]]
    dtensor = [("all_gather", 12, 24), ("reduce_scatter", 24, 12), ("all_reduce", 24, 24)]
    python = [
        *[("all_gather", 12, 24)] * 3,
        *[("reduce_scatter", 24, 12)] * 2,
        ("all_reduce", 12, 12),
        ("broadcast", 12, 12),
        ("reduce", 12, 12),
        ("gather", 12, 24 if is_first else 0),
        ("scatter", 24 if is_first else 0, 12),
        *[("all_to_all", 24, 24)] * 2,
        ("send", 12, 0) if is_first else ("recv", 0, 12),
        ("barrier", 0, 0),
    ]
    assert seen["Python"] == seen["Python again"] == python
    assert seen["DTensor"] == dtensor
    assert seen["compiled"] == dtensor[:2]


# ---- steps that are not the usual ones -------------------------------------------------------------------


@on_two
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


@on_two
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


@on_two
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


@on_two
def test_losses_and_operations_are_those_of_a_step_that_nobody_records() -> None:
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


@on_two
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
            orders.append(order(trace))
            assert counter.frame_count == frames
        assert orders[0] == orders[1]


@on_two
def test_recordings_within_each_other() -> None:
    with pytest.raises(ValueError, match="without any of them"), record_collectives(nn.Linear(2, 2)):
        pass
    model = fsdp2(Model())
    with record_collectives(model) as outer, record_collectives(model) as inner:
        step(model)
    with record_collectives(model) as again:
        step(model)
    assert order(outer) == order(inner) == order(again)
    assert len(again.collectives) == 14


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@on_two
def test_an_exception_or_a_forward_that_fails() -> None:
    """What comes before and after is recorded as ever, and no hook stays in the model."""
    for build, least in ((fsdp1, 2 * UNITS), (fsdp2, 2 * UNITS), (DistributedDataParallel, 2)):
        model = Model()
        raises = iter([False, True, *[False] * 3])  # in front of a unit's forward
        model.layers[1].register_forward_pre_hook(lambda *_, raises=raises: 1 / 0 if next(raises) else None)
        model = build(model)
        step(model)
        before = hooks(model)
        with pytest.raises(BrokenError, match="in the middle"):  # noqa: PT012, SIM117
            with record_collectives(model) as trace:
                with pytest.raises(ZeroDivisionError):
                    model(torch.ones(3, 7))
                gathered = [call for call in order(trace) if "all_gather" in call]
                step(model)
                first = len(trace.events)
                step(model)
                raise BrokenError("in the middle")
        units = ["(root)", "layers.0", "layers.1"] if least > 2 else []
        assert gathered == [f"all_gather {unit}" for unit in units]
        assert sum(event.kind == "compute" for event in trace.events[first:]) >= least
        events = len(trace.events)
        step(model)
        assert len(trace.events) == events
        assert trace.notes == ["the block ended early, by BrokenError: in the middle"]
        assert trace.summary().splitlines()[-1] == f"note: {trace.notes[0]}"
        assert hooks(model) == before


@on_two
def test_times_on_a_cpu() -> None:
    """Nothing overlaps, and everything ends."""
    model = fsdp2(Model())
    events = record(model).events
    assert [event.start for event in events] == sorted(event.start for event in events)
    # What is computed ends where the next event begins. That a collective has ended is told by a callback in
    # gloo's thread, which may be a little late, but never so late as the next collective.
    for position, event in enumerate(events):
        assert event.seconds is not None
        assert event.seconds >= 0
        following = [e for e in events[position + 1 :] if e.is_collective or not event.is_collective]
        assert not following or event.start + event.seconds <= following[0].start, position
    # NCCL gives no work for a collective that is not asynchronous; gloo's is hidden here
    with patch.object(dist.Work, "unbox", return_value=None):
        assert all(event.seconds is not None for event in record(model).collectives)


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
    known_order = order(record(model))
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
    assert order(trace) == known_order
    known = [event for event in trace.events if event.seconds is not None and event.kind != "free"]
    starts = [round(1e3 * event.start) for event in known]
    assert starts == sorted(starts)
    assert [1e3 * event.start for event in known] == pytest.approx(starts)  # by the events, to the ms
    if fails:  # a stuck GPU is not waited for
        assert waited == known == []
        assert trace.notes[1].startswith("the GPU may have failed")
    else:
        assert waited == [torch.device("cpu")]
        assert len(known) == len(known_order)
        assert trace.notes == []

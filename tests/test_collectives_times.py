"""Times read from torch's profiler, as on a GPU.

Without one, the profiler and the marks are real, with operations of the CPU in place of kernels, and a GPU's
records are constructed: which there are and how their ids link them is taken from `_KinetoEvent` and from
`_parse_kineto_results` in torch/autograd/profiler.py. The last test takes a GPU.
"""

import statistics
import threading
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import ProfilerState
from torch.autograd import DeviceType, profiler
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.collectives import CollectiveTrace, StepEvent, recording
from fsdp_utils.collectives.device_times import MARK, TAKEN, UNFINISHED, UNSEEN, DeviceTimes, read
from tests.recorded import Model, fsdp1, fsdp2

WIDTH = 384  # a layer computes for milliseconds


class WatchedTimes(DeviceTimes):
    """Looks at the clock at each mark as well."""

    def __init__(self, trace: CollectiveTrace) -> None:
        super().__init__(trace, "cpu")
        self.clock: list[float] = []

    def mark(self) -> int:
        self.clock.append(time.perf_counter())
        return super().mark()


class Recorded(NamedTuple):
    """What a rank recorded: starts and durations of its computations, and how far they are from the clock."""

    order: list[str]
    notes: list[str]
    starts: list[float]
    seconds: list[float | None]
    starts_apart: list[float]
    seconds_apart: list[float]


class BrokenError(Exception):
    """Raised in the middle of a recording."""


def step(model: nn.Module) -> None:
    model(torch.ones(256, WIDTH)).sum().backward()


def recorded(model: nn.Module, fails: bool = False) -> Recorded:
    watched: list[WatchedTimes] = []

    def times(trace: CollectiveTrace, device: torch.device) -> WatchedTimes:
        assert device == torch.device("cpu")  # where these models compute
        watched.append(WatchedTimes(trace))
        return watched[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_times", times)
        with pytest.raises(BrokenError) if fails else nullcontext(), record_collectives(model) as trace:
            step(model)
            if fails:
                raise BrokenError("on purpose")
    clock = watched[0].clock
    issued = [(event, clock[a] - clock[0], clock[b] - clock[a]) for event, a, b in watched[0]._issued]
    seen = [(e, begin, length) for e, begin, length in issued if e.kind == "compute" and e.seconds]
    return Recorded(
        trace.order(),
        trace.notes,
        [event.start for event in trace.events if event.kind == "compute"],
        [event.seconds for event in trace.events if event.kind == "compute"],
        [abs(event.start - begin) for event, begin, _ in seen],
        [abs((event.seconds or 0.0) - length) for event, _, length in seen],
    )


def on_a_rank() -> dict[str, Any]:
    models, found = {"FSDP1": fsdp1(Model(WIDTH)), "FSDP2": fsdp2(Model(WIDTH))}, {}
    for name, model in models.items():
        step(model)
        with record_collectives(model) as plain:
            step(model)
        found[name] = recorded(model), plain.order()
    model = models["FSDP2"]
    found["failed"] = recorded(model, fails=True)
    with profile() as around:
        found["around"] = recorded(model)
    with profile(schedule=schedule(wait=0, warmup=1, active=1)) as warming:
        found["warming up"] = recorded(model)
        warming.step()
        step(model)
    found["events of theirs"] = [len(theirs.events() or []) for theirs in (around, warming)]

    def start_another(*_: Any) -> None:
        with profile():
            pass

    model.head.register_forward_hook(start_another)
    found["inside"] = recorded(model)
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, world_size=2, timeout=60)


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2"])
def test_what_the_profiler_says_agrees_with_the_clock(by_rank: list[dict[str, Any]], way: str) -> None:
    for found in by_rank:
        seen, order = found[way]
        assert seen.order == order  # as recorded without the profiler
        assert seen.notes == []
        assert seen.starts == sorted(seen.starts)
        assert None not in seen.seconds
        assert len(seen.starts_apart) >= 8  # each layer, forward and backward
        # the median, for a core may be taken away between a mark and a look at the clock
        assert statistics.median(seen.starts_apart) < 5e-4 < statistics.median(map(float, seen.seconds))
        assert statistics.median(seen.seconds_apart) < 5e-4


def test_an_exception_in_the_block_leaves_the_times(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        assert found["failed"].notes == ["the block ended early, by BrokenError: on purpose"]
        assert len(found["failed"].starts_apart) >= 8


@pytest.mark.parametrize("when", ["around", "warming up", "inside"])
def test_beside_another_profiler_there_are_no_times_and_a_note_says_so(
    by_rank: list[dict[str, Any]], when: str
) -> None:
    for found in by_rank:
        assert found[when].notes == [TAKEN]
        assert set(found[when].seconds) == {None}
        assert found[when].order == found["FSDP2"][1]
        assert min(found["events of theirs"]) > 0  # which the recording has not ended


class Record(NamedTuple):
    """One of the profiler's records, of which `read` asks these. Times in ns."""

    label: str
    begin: int
    length: int = 0
    own: int = 0
    around: int = 0
    device: DeviceType = DeviceType.CPU
    thread: int = 1
    annotation: bool = False

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin

    def duration_ns(self) -> int:
        return self.length

    def correlation_id(self) -> int:
        return self.own

    def linked_correlation_id(self) -> int:
        return self.around

    def device_type(self) -> DeviceType:
        return self.device

    def start_thread_id(self) -> int:
        return self.thread

    def is_user_annotation(self) -> bool:
        return self.annotation


def on_gpu(label: str, begin: int, length: int, *ids: int, annotation: bool = False) -> Record:
    return Record(label, begin, length, *ids, device=DeviceType.CUDA, annotation=annotation)


def test_kernels_belong_to_what_launched_them_however_late_they_run() -> None:
    """The CPU issues an all-gather, then two computations, long before the GPU runs them."""
    marks = {n: Record(f"{MARK}{n}", 1000 + 100 * n, 1, own=90 + n) for n in range(7)}
    records = [
        *marks.values(),
        # the operation of a collective is around the marks, what nccl does is between them
        Record("c10d::_allgather_base_", 1090, 120, own=1),
        Record("record_param_comms", 1110, 80, own=2),
        Record("cuLaunchKernelEx", 1150, 5, 700, 2, thread=77),  # the runtime's threads are not torch's
        on_gpu("ncclDevKernel_AllGather", 9000, 4000, 700, 2),
        Record("nccl:_all_gather_base", 1120, 40, own=3, annotation=True),
        on_gpu("nccl:_all_gather_base", 9000, 4000, 800, 3, annotation=True),
        # two kernels and a copy; the operation's id is also that of a runtime's call without an operation
        Record("aten::mm", 1310, 60, own=4),
        Record("cudaStreamWaitEvent", 1010, 2, own=4, thread=77),
        Record("cudaLaunchKernel", 1320, 5, 701, 4),
        Record("cudaLaunchKernel", 1330, 5, 702, 4),
        Record("cudaMemcpyAsync", 1340, 5, 703, 4),
        on_gpu("gemm", 13000, 500, 701, 4),
        on_gpu("reduce", 13600, 100, 702, 4),
        on_gpu("Memcpy DtoD", 12900, 50, 703, 4),
        # an annotation around all of them
        Record("FSDP::pre_forward", 1005, 600, own=5, annotation=True),
        on_gpu("FSDP::pre_forward", 9000, 9000, 801, 5, annotation=True),
        # another thread copies the next batch meanwhile
        Record("aten::copy_", 1345, 10, own=6, thread=2),
        Record("cudaMemcpyAsync", 1346, 5, 704, 6),
        on_gpu("Memcpy HtoD", 1400, 20000, 704, 6),
        # what is launched between two events, as FSDP's copies are, belongs to none
        Record("aten::cat", 1450, 10, own=7),
        Record("cudaLaunchKernel", 1452, 2, 705, 7),
        on_gpu("cat", 14000, 100, 705, 7),
        # a launch that the profiler has not seen; and a kernel that no operation launched
        Record("aten::add", 1560, 10, own=8),
        on_gpu("add", 15000, 300, 706, 8),
        on_gpu("mystery", 16000, 100, 707, 0),
    ]
    events = [
        StepEvent(i, kind, "layer", "forward") for i, kind in enumerate(["all_gather", "compute", "compute"])
    ]
    issued = [(events[0], 1, 2), (events[1], 3, 4), (events[2], 5, 6)]
    for order in (records, records[::-1]):
        seen = read(order, marks, issued, "cuda")
        assert seen == [(8e-6, 4e-6), (11.9e-6, 0.8e-6), (14e-6, 0.3e-6)]
    assert read(records[: len(marks)], marks, issued, "cuda") == [None, None, None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_on_a_gpu_computations_take_most_of_a_large_step() -> None:
    """One rank of two under a fake group: what it computes is real, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = fsdp2(Model(4096).cuda(), mesh=init_device_mesh("cuda", (2,)))
        x = torch.ones(8192, 4096, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        model(x).sum().backward()
        with record_collectives(model) as trace:
            begin.record()
            model(x).sum().backward()
            end.record()
        computed = [event for event in trace.events if event.kind == "compute" and event.seconds]
        total = sum(event.seconds or 0.0 for event in computed)
        assert len(computed) >= 8  # each layer, forward and backward
        assert [event.start for event in computed] == sorted(event.start for event in computed)
        assert 0.5 < total / (begin.elapsed_time(end) / 1e3) < 1.05
    finally:
        dist.destroy_process_group()


# ---- what torch's profiler is asked for, and how it ends -------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, set[ProfilerActivity]]]:
    """What Kineto is asked for, as if there were a GPU and a torch that can see it. It sees no kernel."""
    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    found: list[tuple[Any, set[ProfilerActivity]]] = []
    prepare = profiler._prepare_profiler

    def prepare_and_note(config: Any, asked_for: set[ProfilerActivity], **options: Any) -> None:
        found.append((config, set(asked_for)))
        prepare(config, asked_for, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: activities)
    monkeypatch.setattr(profiler, "_supported_activities", lambda: activities)
    monkeypatch.setattr(profiler, "_prepare_profiler", prepare_and_note)
    return found


def compute(times: DeviceTimes) -> StepEvent:
    event = StepEvent(0, "compute", "layer", "forward")
    mark = times.mark()
    torch.ones(3).add(1)
    times.issued(event, mark)
    return event


def test_on_cuda_kinetos_cuda_activity_is_recorded(asked: list[tuple[Any, set[ProfilerActivity]]]) -> None:
    with DeviceTimes(CollectiveTrace(0, 1, {}), "cuda") as times:
        assert times._profiler.profiler_kind == ProfilerState.KINETO
        compute(times)
    assert [activities for _, activities in asked] == [{ProfilerActivity.CPU, ProfilerActivity.CUDA}]


@pytest.mark.usefixtures("asked")
def test_where_the_profiler_saw_no_kernel_no_times_are_invented() -> None:
    trace = CollectiveTrace(0, 1, {})
    with DeviceTimes(trace, "cuda") as times:
        event = compute(times)
    assert trace.notes == [UNSEEN]
    assert event.seconds is None  # and not 0.0, as of what has nothing for the device


def broken_recording(trace: CollectiveTrace) -> StepEvent:
    """A recording that an exception ends, and its one event."""
    found: list[StepEvent] = []

    def run() -> None:
        with DeviceTimes(trace, "cuda") as times:
            found.append(compute(times))
            raise BrokenError("on purpose")

    with pytest.raises(BrokenError):
        run()
    return found[0]


@pytest.mark.usefixtures("asked")
def test_after_an_exception_a_stuck_kernel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: finished.wait(30))
    trace, begun = CollectiveTrace(0, 1, {}), time.monotonic()
    try:
        event = broken_recording(trace)
        assert time.monotonic() - begun < 10
    finally:
        finished.set()
    assert trace.notes == [UNFINISHED, UNSEEN]
    assert event.seconds is None


@pytest.mark.usefixtures("asked")
def test_an_error_of_the_device_ends_the_profiler_and_hides_no_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: int | None = None) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    trace = CollectiveTrace(0, 1, {})
    broken_recording(trace)  # raises its own error
    assert UNFINISHED in trace.notes
    with pytest.raises(RuntimeError, match="device-side assert"), DeviceTimes(trace, "cuda") as times:
        compute(times)
    assert not torch.autograd._profiler_enabled()  # the next recording can have one
    assert TAKEN not in trace.notes


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_a_device_that_the_profiler_cannot_see_gets_a_note(device: str) -> None:
    trace = CollectiveTrace(0, 1, {})
    with DeviceTimes(trace, device) as times:
        event = compute(times)
    (note,) = trace.notes
    assert f"cannot see what {device} runs" in note
    assert event.seconds is None

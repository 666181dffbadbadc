"""Memory_Maximizer: what it says is true, on one rank and on several, and where there is little to say."""

import contextlib
import copy
import io
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_utils import Memory_Maximizer, MemoryReport, run_on_ranks
from fsdp_utils.memory.device_stats import (
    GIB,
    AllocatorStats,
    NoStats,
    ProcessStats,
    Reading,
    _Peaks,
    device_stats,
)
from tests.imagined_device import ImaginedDevice

# On the imagined device 16 fits, 17 works with retries, 18 is out of memory.


def measured(device: ImaginedDevice, batch_sizes: list[int], *, verbose: bool = False) -> MemoryReport:
    """Train on these batch sizes and report."""
    mm = Memory_Maximizer(device, verbose=verbose)
    mm.start()
    if dist.is_initialized():
        dist.barrier()  # real training has its collectives: no rank stops before all have started
    for batch_size in batch_sizes:
        device.train(batch_size)
        mm.update(samples=batch_size)
    return mm.stop()


# ---- one rank


def test_reports_peaks_counters_and_throughput():
    report = measured(ImaginedDevice(), [16, 8])
    assert report.steps == 2
    assert report.max_reserved_gib == pytest.approx(5 + 16 * 0.97)
    assert report.max_reserved_pct == pytest.approx(100 * (5 + 16 * 0.97) / 22)
    assert report.max_allocated_gib == pytest.approx(5 + 16 * 0.97)
    assert report.fragmentation_pct == pytest.approx(0)
    assert (report.num_alloc_retries, report.num_ooms) == (0, 0)
    assert report.samples_per_s == pytest.approx(24 / (5.3 + 2.9))
    assert report.total_gib == 22


def test_each_step_has_its_own_peak():
    report = measured(ImaginedDevice(), [16, 8])
    assert [step.allocated for step in report.history] == [int((5 + size * 0.97) * GIB) for size in (16, 8)]
    assert [step.seconds for step in report.history] == pytest.approx([5.3, 2.9])
    assert report.history[1].reserved == report.history[0].reserved  # the allocator keeps what it has


def test_what_happened_before_start_does_not_count():
    device = ImaginedDevice()
    device.train(17)
    with pytest.raises(torch.OutOfMemoryError):
        device.train(30)
    assert (device.retries, device.ooms) == (2, 1)
    device.empty_cache()

    report = measured(device, [4])
    assert (report.num_alloc_retries, report.num_ooms) == (0, 0)
    assert report.max_allocated_gib == pytest.approx(5 + 4 * 0.97)

    second = measured(device, [17])
    assert second.num_alloc_retries == 1


def test_retries_are_found_in_the_steps_that_had_them():
    report = measured(ImaginedDevice(), [16, 17, 16, 17, 17])
    assert report.num_alloc_retries == 3
    assert [step.retries for step in report.history] == [0, 1, 0, 1, 1]
    assert report.advice[0].startswith("Lower the batch size: 3 of 5 steps")


def test_counters_that_somebody_resets_in_between_do_not_go_back():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    mm.start()
    for _ in range(3):
        device.train(17)
        mm.update()
    device.reset()
    device.train(17)
    mm.update()
    assert mm.stop().num_alloc_retries == 4


def test_out_of_memory_and_then_recovery():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    mm.start()
    for batch_size in (16, 18, 16):
        try:
            device.train(batch_size)
        except torch.OutOfMemoryError:
            device.empty_cache()
            continue
        mm.update(batch_size)
    report = mm.stop()
    assert (report.steps, report.num_ooms) == (2, 1)
    assert report.advice[0].startswith("Lower the batch size: 1 allocations failed for good (OOM)")


def test_memory_used_after_the_last_step_counts():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    mm.start()
    device.train(2)
    mm.update()
    device.train(10)  # such as saving a checkpoint
    report = mm.stop()
    assert report.steps == 1
    assert report.max_allocated_gib == pytest.approx(5 + 10 * 0.97)
    assert report.seconds == pytest.approx(0.5 + 2 * 0.3)


def test_stop_without_start_says_that_nothing_was_measured(capsys):
    report = Memory_Maximizer(ImaginedDevice()).stop()
    assert report.steps == 0
    assert report.max_reserved_gib is None
    assert report.num_alloc_retries is None
    assert "note: start() was not called: nothing was measured" in capsys.readouterr().out


def test_update_without_start_says_what_to_do():
    with pytest.raises(RuntimeError, match="call start\\(\\) before the first step"):
        Memory_Maximizer(ImaginedDevice()).update()


def test_a_second_stop_returns_the_same_report(capsys):
    mm = Memory_Maximizer(ImaginedDevice())
    mm.start()
    mm.update()
    assert mm.stop() is mm.stop() is mm.report
    assert capsys.readouterr().out.count("Memory over") == 1


def test_start_again_measures_again():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    for batch_size, retries in ((17, 1), (4, 0)):
        mm.start()
        device.train(batch_size)
        mm.update()
        assert mm.stop().num_alloc_retries == retries
    assert mm.report is not None
    assert mm.report.steps == 1


def test_updates_without_samples_leave_the_throughput_open():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    mm.start()
    for samples in (4, None):
        device.train(4)
        mm.update(samples)
    report = mm.stop()
    assert report.samples_per_s is None
    assert "1.7000 s per step (samples/s: pass update(samples=...))" in str(report)


def test_no_steps_at_all():
    report = measured(ImaginedDevice(), [])
    assert (report.steps, report.samples_per_s) == (0, None)
    assert report.max_reserved_gib == pytest.approx(5)  # what the model takes is known even so
    assert report.advice == [
        "Nothing was measured: call start() before the first step and update() after each."
    ]
    assert "no step was counted" in str(report)


def test_a_device_without_statistics_still_has_its_time():
    class Silent(ImaginedDevice):
        kind = "none"
        remark = "no memory statistics"

        def read(self) -> Reading:
            return Reading(None, None, None, None, None)

    device = Silent()
    report = measured(device, [4, 4])
    assert (report.max_reserved_gib, report.max_reserved_pct, report.num_alloc_retries) == (None, None, None)
    assert report.samples_per_s == pytest.approx(4 / 1.7)
    assert report.notes == ("no memory statistics",)
    assert report.advice == ["Choose by seconds per step: this device tells nothing about its memory."]


def test_a_context_manager_starts_and_stops(capsys):
    device = ImaginedDevice()
    with Memory_Maximizer(device) as mm:
        device.train(4)
        mm.update(4)
    assert mm.report is not None
    assert str(mm.report) == capsys.readouterr().out.rstrip("\n")


def test_after_an_exception_the_report_is_there_and_the_exception_too():
    device = ImaginedDevice()
    mm = Memory_Maximizer(device, verbose=False)
    with pytest.raises(torch.OutOfMemoryError), mm:
        device.train(40)
    assert mm.report is not None
    assert mm.report.num_ooms == 1


def test_the_report_reads_well():
    assert str(measured(ImaginedDevice(), [17, 17])).splitlines() == [
        "Memory over 2 steps (imagined)",
        "  reserved       21.49 GiB = 97.7% of 22.00 GiB",
        "  allocated      21.49 GiB",
        "  fragmentation  0.0% of what is reserved",
        "  retries        2",
        "  OOMs           0",
        "  throughput     2.237 samples/s, 7.6000 s per step",
        "  -> Lower the batch size: 2 of 2 steps had to empty the allocator's cache and ask the device "
        "again. find_batch_size(step) finds the best.",
        "  -> To make room: 77% of the peak is gone when the step is over (activations, gathered parameters, "
        "gradients), so activation checkpointing is the first thing to try.",
    ]
    assert (
        '<td style="text-align:left">21.49 GiB = 97.7% of 22.00 GiB</td>'
        in measured(ImaginedDevice(), [17])._repr_html_()
    )


def test_the_dictionary_goes_into_a_log():
    report = measured(ImaginedDevice(), [16])
    logged = json.loads(json.dumps(report.to_dict()))
    names = "device total_gib steps max_reserved_gib max_reserved_pct max_allocated_gib num_alloc_retries"
    for name in [*names.split(), "num_ooms", "samples_per_s", "advice"]:
        assert logged[name] == getattr(report, name)
    assert logged["ranks"][0]["reserved"] == report.worst.reserved


# ---- advice


def test_advice_to_raise_the_batch_size_holds_on_the_device():
    device = ImaginedDevice()
    advice = measured(device, [4]).advice
    assert advice == [
        "Raise the batch size: 11.58 GiB are free below 93% of the device, enough for some 11 samples more "
        "per step and rank."
    ]
    assert measured(ImaginedDevice(), [4 + 11]).num_alloc_retries == 0


def test_advice_to_keep_a_full_device_without_retries():
    assert measured(ImaginedDevice(), [16]).advice[0].startswith("Keep this batch size")


class Fragmented(ImaginedDevice):
    def read(self) -> Reading:
        return super().read()._replace(reserved=int(20 * GIB))


def test_advice_on_expandable_segments_where_reserved_is_far_above_allocated(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    expected = (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
        f"{20 - (5 + 8 * 0.97):.2f} GiB were reserved beyond what tensors used."
    )
    assert expected in measured(Fragmented(), [8]).advice
    assert expected not in measured(ImaginedDevice(), [8]).advice
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert expected not in measured(Fragmented(), [8]).advice


def test_advice_on_making_room_depends_on_what_fills_the_device():
    activations = measured(ImaginedDevice(model_gib=5, sample_gib=1), [16]).advice[-1]
    assert "76% of the peak is gone when the step is over" in activations
    assert "activation checkpointing" in activations
    model = measured(ImaginedDevice(model_gib=19, sample_gib=1), [2]).advice[-1]
    assert "90% of the peak stays between steps" in model
    assert "sharding strategy" in model


# ---- several ranks


def test_retries_on_one_rank_of_four_are_in_the_report_of_all():
    def train() -> tuple[MemoryReport, str]:
        report = measured(ImaginedDevice(), [17 if dist.get_rank() == 2 else 12] * 3)
        return report, str(report)

    results = run_on_ranks(train, world_size=4)
    texts = {text for _, text in results}
    assert len(texts) == 1
    lines = texts.pop().splitlines()
    assert lines[0] == "Memory over 3 steps, 4 of 4 ranks (imagined)"
    assert (
        lines[1] == "  reserved       21.49 GiB = 97.7% of 22.00 GiB on rank 2, the fullest; least 16.64 GiB"
    )
    assert lines[4] == "  retries        3 (3 on rank 2)"
    assert any("Even out the ranks: rank 2" in line for line in lines)
    for rank, (report, _) in enumerate(results):
        assert (report.num_alloc_retries, report.worst.rank, report.rank) == (3, 2, rank)
        assert report.samples_per_s == pytest.approx(3 * (3 * 12 + 17) / (3 * 7.6))
        assert [step.retries for step in report.history] == [rank == 2] * 3


def test_only_the_first_rank_prints(two_ranks):
    def train() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            measured(ImaginedDevice(), [4], verbose=True)
        return printed.getvalue()

    first, second = two_ranks(train)
    assert first.startswith("Memory over 1 step, 2 of 2 ranks")
    assert second == ""


def test_created_on_rank_0_only_as_in_the_video_it_says_so_at_once(two_ranks):
    def train() -> tuple[MemoryReport, float] | None:
        begun = time.monotonic()
        rank = dist.get_rank()
        device = ImaginedDevice()
        if rank == 0:
            mm = Memory_Maximizer(device, verbose=False)
            mm.start()
        device.train(4)
        dist.barrier()
        if rank == 0:
            mm.update(4)
            return mm.stop(), time.monotonic() - begun
        return None

    (report, seconds), nothing = two_ranks(train)
    assert nothing is None
    assert [rank.rank for rank in report.ranks] == [0]
    assert report.notes == ("rank 1 took no part: no start() there",)
    assert "1 of 2 ranks" in str(report)
    assert seconds < 20  # and not the 30 s that it would wait for a rank that had started


def test_a_rank_that_never_comes_to_stop_is_not_waited_for_longer_than_told(two_ranks):
    def train() -> tuple[str, ...]:
        mm = Memory_Maximizer(ImaginedDevice(), verbose=False, timeout=0.3)
        mm.start()
        dist.barrier()
        notes = mm.stop().notes if dist.get_rank() == 0 else ()
        dist.barrier()
        return notes

    assert two_ranks(train)[0] == ("rank 1 did not come to stop() within 0.3 s and so are not included",)


def test_a_measurement_of_one_rank_is_not_taken_for_a_later_one_of_all(two_ranks):
    def train() -> list[tuple[int, int]]:
        mm = Memory_Maximizer(ImaginedDevice(), verbose=False)
        if dist.get_rank() == 1:
            mm.start()
            assert [(rank.rank, rank.steps) for rank in mm.stop().ranks] == [(1, 0)]
        dist.barrier()
        mm.start()
        dist.barrier()
        mm.update()
        if dist.get_rank() == 1:
            time.sleep(0.3)  # rank 0 is to find what rank 1 told before, if that can be found
        return [(rank.rank, rank.steps) for rank in mm.stop().ranks]

    assert two_ranks(train) == [[(0, 1), (1, 1)]] * 2


def test_an_exception_on_one_rank_waits_for_nobody(two_ranks):
    def train() -> int | None:
        device = ImaginedDevice()
        mm = Memory_Maximizer(device, verbose=False)
        if dist.get_rank() == 1:
            mm.start()
            dist.barrier()
            return mm.stop().num_ooms
        with contextlib.suppress(torch.OutOfMemoryError), mm:
            dist.barrier()
            device.train(40)
        return mm.report.num_ooms if mm.report else None

    assert two_ranks(train) == [1, 1]


# ---- where the statistics come from


def test_without_an_accelerator_the_process_is_measured(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert isinstance(device_stats(), ProcessStats)


def test_the_process_peak_is_that_of_each_step():
    mm = Memory_Maximizer("cpu", verbose=False)
    mm.start()
    mm.update(1)
    block = torch.ones(256 * 2**20 // 4)
    del block
    mm.update(1)
    mm.update(1)
    before, during, after = (step.reserved or 0 for step in mm.stop().history)
    assert during - before > 200 * 2**20
    assert abs(after - before) < 100 * 2**20


def test_the_cpu_is_labelled_and_has_no_retries():
    mm = Memory_Maximizer("cpu", verbose=False)
    mm.start()
    mm.update(1)
    report = mm.stop()
    text = str(report)
    assert "resident" in text
    assert "reserved" not in text
    assert "retries     not applicable: the CPU has no caching allocator" in text
    assert report.num_alloc_retries is None
    assert report.notes == ("resident memory of the whole process",)


def test_where_the_system_keeps_no_peak_the_report_says_that_it_looked_only_now_and_then(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    mm = Memory_Maximizer("cpu", verbose=False)
    mm.start()
    mm.update(1)
    report = mm.stop()
    assert (report.max_reserved_gib or 0) > 0
    assert "seen only at each update()" in report.notes[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and a peak that the system keeps")
def test_a_forked_process_reads_its_own_memory():
    stats = ProcessStats()
    stats.reset()
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        before = stats.read().reserved or 0
        block = bytearray(b"1" * (256 * 2**20))
        theirs.send((stats.read().reserved or 0) - before)
        del block

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert ours.recv() > 200 * 2**20
    assert (stats.read().reserved or 0) > 0


def test_files_are_closed_with_the_statistics():
    stats = ProcessStats()
    files = stats._peak_files
    assert files is not None
    del stats
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


class CudaModule:
    """The part of torch.cuda that is asked, over a dictionary of the shape that CUDA's allocator gives."""

    def __init__(self) -> None:
        sizes = {"peak": 3 * GIB, "current": 2 * GIB, "allocated": 9 * GIB, "freed": 7 * GIB}
        self.stats = {
            "allocated_bytes": {"all": sizes, "large_pool": {}, "small_pool": {}},
            "reserved_bytes": {"all": {**sizes, "peak": 5 * GIB}},
            "num_alloc_retries": 4,
            "num_ooms": 1,
        }

    def rise(self, gib: int, retries: int = 0) -> None:
        """Tensors take so much for a moment, with so many retries."""
        for sizes in (self.stats["allocated_bytes"]["all"], self.stats["reserved_bytes"]["all"]):
            sizes["peak"] = max(sizes["peak"], gib * GIB)
        self.stats["num_alloc_retries"] += retries

    def current_device(self) -> int:
        return 1

    def get_device_name(self, index: int) -> str:
        return f"GPU {index}"

    def get_device_properties(self, index: int) -> Any:
        return type("Properties", (), {"total_memory": 80 * GIB})

    def get_per_process_memory_fraction(self, index: int) -> float:
        return 0.5

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        return copy.deepcopy(self.stats)

    def reset_peak_memory_stats(self, index: int) -> None:
        for sizes in (self.stats["allocated_bytes"]["all"], self.stats["reserved_bytes"]["all"]):
            sizes["peak"] = sizes["current"]

    def reset_accumulated_memory_stats(self, index: int) -> None:
        self.stats |= {"num_alloc_retries": 0, "num_ooms": 0}


@pytest.fixture
def cuda(monkeypatch) -> CudaModule:
    module = CudaModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_reads_the_allocator_of_cuda(cuda):
    stats = AllocatorStats(torch.device("xpu"))
    assert (stats.name, stats.total) == ("GPU 1", 40 * GIB)  # half of it is this process's
    cuda.rise(3)
    cuda.stats["reserved_bytes"]["all"]["peak"] = 5 * GIB
    assert stats.read() == Reading(5 * GIB, 3 * GIB, 2 * GIB, 4, 1)
    stats.reset()
    assert stats.read()[-2:] == (0, 0)
    cuda.stats["num_alloc_retries"] += 2
    assert stats.read()[-2:] == (2, 0)
    cuda.stats["num_alloc_retries"] = 1  # somebody else has reset it, and then there was one
    assert stats.read()[-2:] == (1, 0)


class NoWait(AllocatorStats):
    def synchronize(self) -> None:
        pass


def test_measurements_that_overlap_have_their_own_peaks_and_counts(cuda):
    outer, inner = (Memory_Maximizer(NoWait(torch.device("xpu")), verbose=False) for _ in range(2))
    outer.start()
    cuda.rise(20, retries=1)  # before the inner one
    inner.start()
    cuda.rise(10, retries=2)
    inner.update()
    cuda.rise(7)
    inner.update()
    outer.update()
    inside = inner.stop()
    cuda.rise(8, retries=4)  # after it
    outside = outer.stop()
    assert [step.allocated for step in inside.history] == [10 * GIB, 7 * GIB]
    assert (inside.max_reserved_gib, inside.num_alloc_retries) == (10, 2)
    assert [step.allocated for step in outside.history] == [20 * GIB]
    assert (outside.max_reserved_gib, outside.num_alloc_retries) == (20, 7)


def test_measurements_may_begin_and_end_in_other_threads_meanwhile():
    # As likely as rare: threads take turns at nearly every instruction.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    over = threading.Event()
    device = object()

    def begin_and_end() -> None:
        while not over.is_set():
            alive = [_Peaks(device) for _ in range(20)]
            del alive

    def read() -> None:
        mine = _Peaks(device)
        for peak in range(3000):
            assert mine.read(peak) >= (peak,)

    try:
        with ThreadPoolExecutor(3) as pool:
            threads = [pool.submit(begin_and_end), pool.submit(read), pool.submit(read)]
            try:
                for each in threads[1:]:
                    each.result(60)
            finally:
                over.set()
    finally:
        sys.setswitchinterval(before)


def test_measurements_of_the_process_that_overlap_have_their_own_peaks():
    outer, inner = (Memory_Maximizer("cpu", verbose=False) for _ in range(2))
    outer.start()
    block = torch.ones(256 * 2**20 // 4)
    del block
    with inner:
        inner.update()
    outer.update()
    (around,), (within,) = (mm.report.ranks for mm in (_stopped(outer), inner) if mm.report)
    assert (around.reserved or 0) - (within.reserved or 0) > 200 * 2**20


def _stopped(mm: Memory_Maximizer) -> Memory_Maximizer:
    mm.stop()
    return mm


def test_after_an_exception_the_device_is_not_waited_for():
    class Stuck(ImaginedDevice):
        waits = False

        def synchronize(self) -> None:
            if self.waits:
                raise AssertionError("it would wait for ever")

    device = Stuck()
    mm = Memory_Maximizer(device, verbose=False)

    def train() -> None:
        with mm:
            device.train(4)
            mm.update(4)
            device.waits = True  # such as in a collective whose other rank is dead
            raise KeyError("labels")

    with pytest.raises(KeyError):
        train()
    assert mm.report is not None
    assert mm.report.steps == 1
    assert mm.report.max_allocated_gib == pytest.approx(5 + 4 * 0.97)


def test_an_allocator_that_does_not_count_is_not_said_to_have_no_retries(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    stats = AllocatorStats(torch.device("cuda"))
    assert stats.read()[-2:] == (None, None)
    assert stats.remark == "cudaMallocAsync counts no retries"


def test_an_allocator_that_refuses_has_no_statistics(cuda, monkeypatch):
    def refuse(index: int) -> dict[str, Any]:
        raise RuntimeError("pluggable allocator does not yet support getDeviceStats")

    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", refuse)
    stats = device_stats(torch.device("meta"))
    assert isinstance(stats, NoStats)
    assert "pluggable allocator" in stats.remark
    assert stats.read() == Reading(None, None, None, None, None)


def test_other_accelerators_are_read_through_torch_accelerator(monkeypatch):
    flat = {
        f"{name}.all.{what}": size * GIB
        for name, sizes in {"allocated_bytes": (3, 2), "reserved_bytes": (5, 4)}.items()
        for what, size in zip(("peak", "current"), sizes, strict=True)
    } | {"num_alloc_retries": 2, "num_ooms": 0}
    calls = []
    for name, value in {
        "memory_stats": lambda index: flat,
        "reset_peak_memory_stats": calls.append,
        "reset_accumulated_memory_stats": calls.append,
        "get_memory_info": lambda index: (1 * GIB, 64 * GIB),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: type("Module", (), {}))
    stats = AllocatorStats(torch.device("mtia", 3))
    assert (stats.name, stats.total) == ("mtia:3", 64 * GIB)
    assert stats.read() == Reading(5 * GIB, 3 * GIB, 2 * GIB, 2, 0)


# ---- figures


def test_the_figure_shows_memory_the_limit_and_the_retries():
    pytest.importorskip("matplotlib").use("Agg")
    figure = measured(ImaginedDevice(), [8, 17, 16]).plot()
    memory, speed = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in memory.lines}
    assert lines["allocated"] == pytest.approx([5 + size * 0.97 for size in (8, 17, 16)])
    assert lines["device"] == [22, 22]
    assert [list(line.get_xdata()) for line in memory.lines][-1] == [2, 2]  # the step with the retry
    assert list(speed.lines[0].get_ydata()) == pytest.approx([8 / 2.9, 17 / 7.6, 16 / 5.3])


def test_the_figure_of_no_steps_is_empty_and_no_error():
    pytest.importorskip("matplotlib").use("Agg")
    assert measured(ImaginedDevice(), []).plot().axes


def test_importing_does_not_import_matplotlib():
    code = (
        "import sys, fsdp_utils.memory, fsdp_utils.memory.batch_size; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0

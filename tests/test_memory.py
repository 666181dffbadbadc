"""Memory_Maximizer: what it says is true, on one rank and on several, and where there is little to say."""

import contextlib
import io
import json
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fsdp_utils import Memory_Maximizer, MemoryReport
from fsdp_utils.memory import Reading
from tests.imagined_device import GIB, ImaginedDevice
from tests.on_ranks import on_ranks


def measured(device: ImaginedDevice, batch_sizes: list[int], *, verbose: bool = False) -> MemoryReport:
    """Train on these batch sizes and report."""
    mm = Memory_Maximizer(device, verbose=verbose)
    mm.start()
    if dist.is_initialized():
        dist.barrier()  # as real training does with its collectives
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
    assert (report.num_alloc_retries, report.num_ooms) == (0, 0)
    assert report.samples_per_s == pytest.approx(24 / (5.3 + 2.9))
    assert (report.device, report.total_gib) == ("imagined", 22)
    # each step has its own peak; the allocator keeps what it has
    assert [step.allocated for step in report.history] == [int((5 + size * 0.97) * GIB) for size in (16, 8)]
    assert [step.seconds for step in report.history] == pytest.approx([5.3, 2.9])
    assert report.history[1].reserved == report.history[0].reserved


def test_what_happened_before_start_does_not_count():
    device = ImaginedDevice()
    with pytest.raises(torch.OutOfMemoryError):
        device.train(30)
    device.empty_cache()
    mm = Memory_Maximizer(device, verbose=False)
    for batch_size, retries in ((4, 0), (17, 1), (4, 0)):
        mm.start()
        device.train(batch_size)
        mm.update()
        report = mm.stop()
        assert (report.steps, report.num_alloc_retries, report.num_ooms) == (1, retries, 0)
        assert report.max_allocated_gib == pytest.approx(5 + batch_size * 0.97)


def test_without_start_it_says_what_to_do():
    mm = Memory_Maximizer(ImaginedDevice())
    for method in (mm.update, mm.stop):
        with pytest.raises(
            RuntimeError, match=r"call start\(\) before the first update\(\), and before stop"
        ):
            method()


def test_after_an_exception_the_report_is_there_and_the_device_is_not_waited_for():
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
            device.train(40)

    with pytest.raises(torch.OutOfMemoryError):
        train()
    assert mm.report is not None
    assert (mm.report.steps, mm.report.num_ooms) == (1, 1)
    assert mm.report.notes == ["rank 0 only: OutOfMemoryError ended it"]


def test_the_dictionary_goes_into_a_log():
    report = measured(ImaginedDevice(), [16])
    logged = json.loads(json.dumps(report.to_dict()))
    names = "device total_gib steps max_reserved_gib max_reserved_pct max_allocated_gib num_alloc_retries"
    for name in [*names.split(), "num_ooms", "samples_per_s", "advice"]:
        assert logged[name] == getattr(report, name)
    assert logged["ranks"][0]["reserved"] == report.worst.reserved


# ---- advice


class Fragmented(ImaginedDevice):
    def read(self) -> Reading:
        return super().read()._replace(reserved=int(20 * GIB))


RAISE = r"Raise the batch size: 11\.58 GiB are free below 93% of the device\."
KEEP = "Keep this batch size"
SEGMENTS = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: at the peak "
    f"{20 - (5 + 8 * 0.97):.2f} GiB were reserved beyond what tensors used."
)
GONE = "To make room: 76% of the peak is gone when the step is over .*activation checkpointing"
STAYS = "To make room: 90% of the peak stays between steps .*sharding strategy"


@pytest.mark.parametrize(
    ("device", "batch_size", "told"),
    [
        (ImaginedDevice(), 4, [RAISE]),
        (Fragmented(), 8, [KEEP, SEGMENTS, ".*is gone"]),
        (ImaginedDevice(sample_gib=1), 16, [KEEP, GONE]),
        (ImaginedDevice(model_gib=19, sample_gib=1), 2, [KEEP, STAYS]),
    ],
)
def test_advice(monkeypatch, device, batch_size, told):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    advice = measured(device, [batch_size]).advice
    assert [bool(re.match(*both)) for both in zip(told, advice, strict=True)] == [True] * len(told)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert SEGMENTS not in measured(device, [batch_size]).advice  # it is set already


# ---- several ranks


@on_ranks(4)
def test_retries_on_one_rank_of_four_are_in_the_report_of_all_and_one_rank_alone_says_so():
    rank = dist.get_rank()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report = measured(ImaginedDevice(), [17 if rank == 2 else 12] * 3, verbose=True)
    lines = str(report).splitlines()
    assert printed.getvalue().splitlines() == ([] if rank else lines)
    assert lines[0] == "Memory over 3 steps, 4 of 4 ranks (imagined)"
    assert lines[1] == "  reserved    21.49 GiB = 97.7% of 22.00 GiB on rank 2, the fullest"
    assert lines[3] == "  retries     3"
    assert any("Even out the ranks: rank 2" in line for line in lines)
    assert (report.num_alloc_retries, report.worst.rank) == (3, 2)
    assert report.samples_per_s == pytest.approx(3 * (3 * 12 + 17) / (3 * 7.6))
    assert [step.retries for step in report.history] == [rank == 2] * 3

    if rank == 0:  # created on rank 0 only, as in the video: it says so and goes on
        with (
            patch("fsdp_utils.memory.maximizer._WAIT_S", 2.0),
            Memory_Maximizer(ImaginedDevice(), verbose=False) as mm,
        ):
            mm.update(4)
        assert mm.report is not None
        assert [one.rank for one in mm.report.ranks] == [0]
        assert "found only rank 0 after 2 s; missing: ranks 1, 2, 3. Call it on every" in mm.report.notes[0]
        assert "1 of 4 ranks" in str(mm.report)
    dist.barrier()
    everyone = measured(ImaginedDevice(), [4])  # and the next measurement is of all
    assert [one.rank for one in everyone.ranks] == [0, 1, 2, 3]


# ---- where the statistics come from


def test_without_an_accelerator_the_process_is_measured_with_the_peak_of_each_step(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    mm = Memory_Maximizer(verbose=False)
    mm.start()
    mm.update(1)
    block = torch.ones(256 * 2**20 // 4)
    del block
    mm.update(1)
    mm.update(1)
    report = mm.stop()
    before, during, after = (step.reserved for step in report.history)
    assert during - before > 200 * 2**20
    assert abs(after - before) < 100 * 2**20
    assert report.num_alloc_retries is None
    assert report.notes == ["resident memory of the whole process"]
    assert "  resident    " in str(report)
    assert "  retries     not applicable: the CPU has no caching allocator" in str(report)
    assert report.advice[0].startswith("Measure on the accelerator before choosing a batch size")


class CudaModule:
    """The part of torch.cuda that is asked, over a dictionary of the shape that CUDA's allocator gives."""

    peak, retries = 3, 4

    def current_device(self) -> int:
        return 1

    def get_device_name(self, index: int) -> str:
        return f"GPU {index}"

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=80 * GIB)

    def get_per_process_memory_fraction(self, index: int) -> float:
        return 0.5

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        sizes = {"peak": self.peak * GIB, "current": 2 * GIB}
        return {
            "allocated_bytes": {"all": dict(sizes)},
            "reserved_bytes": {"all": dict(sizes)},
            "num_alloc_retries": self.retries,
            "num_ooms": 1,
        }

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = 2


@pytest.mark.parametrize(
    ("device", "backend", "counts", "notes"),
    [
        ("cuda", "native", (2, 0), []),
        # its counters stay 0, which does not mean that there were no retries
        ("cuda", "cudaMallocAsync", (None, None), ["cudaMallocAsync counts no retries"]),
    ],
)
def test_the_counters_of_cuda_are_read(monkeypatch, device, backend, counts, notes):
    cuda = CudaModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with Memory_Maximizer(device, verbose=False) as mm:
        for cuda.peak, cuda.retries in ((20, 5), (10, 6)):
            mm.update()
        cuda.peak = 7
    report = mm.stop()
    assert (report.device, report.total_gib) == ("GPU 1", 40)  # half of it is this process's
    assert [step.allocated for step in report.history] == [20 * GIB, 10 * GIB]
    assert (report.max_reserved_gib, report.num_alloc_retries, report.num_ooms) == (20, *counts)
    assert report.notes == notes


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
    empty = measured(ImaginedDevice(), [])  # no steps are no error
    assert empty.plot().axes
    assert empty.max_reserved_gib == pytest.approx(5)  # what the model takes is known even so
    assert "no step was counted" in str(empty)
    assert empty.advice[0].startswith("Nothing was measured: call start() before the first step")

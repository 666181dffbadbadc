"""The bf16 checker says yes only where the hardware and the network can, and else says why not.

Most devices here are stand-ins: what torch would say on them is patched, the judgement is real.
"""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fsdp_utils import bf16_support, run_on_ranks
from fsdp_utils.bf16 import main
from fsdp_utils.precision import Bf16Support
from tests.sharded import TwoRanks

GPUS = {
    "Tesla V100-SXM2-16GB": ((7, 0), "emulated"),
    "Tesla T4": ((7, 5), "emulated"),
    "NVIDIA A100-SXM4-80GB": ((8, 0), "native"),
    "NVIDIA L4": ((8, 9), "native"),
    "NVIDIA H100 80GB HBM3": ((9, 0), "native"),
}


@contextmanager
def a_gpu(name: str, cuda: str | None = "12.8", nccl: Any = (2, 27, 5), there: bool = True) -> Any:
    """torch as it would answer on a host with this GPU. The matmul that is tried runs on the CPU."""
    major, minor = GPUS[name][0]
    properties = SimpleNamespace(name=name, major=major, minor=minor)
    ones = torch.ones

    def version() -> Any:
        if nccl is None:
            raise AttributeError("module 'torch._C' has no attribute '_nccl_version'")
        return nccl

    with (
        patch.object(torch.backends.cuda, "is_built", lambda: cuda is not None),
        patch.object(torch.version, "cuda", cuda),
        patch.object(torch.version, "hip", None),
        patch.object(torch.cuda, "is_available", lambda: there),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        patch.object(torch.cuda.nccl, "version", version),
        patch.object(torch, "ones", lambda *size, device=None, **options: ones(*size, **options)),
    ):
        yield


@contextmanager
def a_cpu(**capabilities: bool) -> Any:
    """torch as it would answer on a CPU with these instructions."""
    with patch.object(torch.cpu, "get_capabilities", lambda: capabilities):
        yield


# ---- what the hardware can -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_ready_if_it_computes_in_bf16_and_not_if_it_emulates(name: str) -> None:
    with a_gpu(name):
        support = bf16_support("cuda")
    assert support.compute == GPUS[name][1]
    assert support.ready is bool(support) is (support.compute == "native")
    assert name in support.reasons[0]
    assert ("fp16 with a gradient scaler" in support.reasons[0]) is not support.ready
    assert support.network is None


def test_where_torch_says_yes_to_emulation_the_checker_does_not() -> None:
    with a_gpu("Tesla V100-SXM2-16GB"), patch.object(torch.cuda, "current_device", lambda: 0):
        with patch.object(torch.cuda, "_check_bf16_tensor_supported", lambda device: True):
            assert torch.cuda.is_bf16_supported()  # the default of torch: including_emulation=True
        assert not bf16_support("cuda")


@pytest.mark.parametrize(
    ("cuda", "nccl", "there", "compute", "words"),
    [
        (None, None, False, "none", "build without CUDA"),
        ("12.8", (2, 27, 5), False, "none", "No GPU is visible"),
        ("10.2", (2, 10, 3), True, "none", "CUDA 10.2"),
        ("11.1", (2, 8, 3), True, "native", "NCCL 2.8.3 cannot send bf16"),
        ("12.8", (2, 27, 5, "suffix"), True, "native", "compute capability 8.0"),
    ],
)
def test_builds_and_versions(cuda: Any, nccl: Any, there: bool, compute: str, words: str) -> None:
    with a_gpu("NVIDIA A100-SXM4-80GB", cuda, nccl, there):
        support = bf16_support("cuda")
    assert support.compute == compute
    assert any(words in reason for reason in support.reasons)
    assert support.ready is (compute == "native" and nccl >= (2, 10))


def test_an_old_nccl_is_no_obstacle_where_nccl_is_not_used() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with a_gpu("NVIDIA A100-SXM4-80GB", "11.1", (2, 8, 3)):
            support = bf16_support("cuda")
        assert support.network is True  # gloo; the all-reduce ran on the CPU
        assert support.ready
    finally:
        dist.destroy_process_group()


def test_a_driver_that_fails_is_a_reason_and_no_exception() -> None:
    def fail(device: Any) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    with a_gpu("NVIDIA A100-SXM4-80GB"), patch.object(torch.cuda, "get_device_properties", fail):
        support = bf16_support("cuda:3")
    assert support.compute == "none"
    assert "driver on your system is too old" in support.reasons[0]


def test_a_matmul_that_fails_counts_more_than_what_the_device_claims() -> None:
    def fail(*size: int, **options: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    with a_gpu("NVIDIA A100-SXM4-80GB"), patch.object(torch, "ones", fail):
        support = bf16_support("cuda")
    assert support.compute == "none"
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in support.reasons[0]


@pytest.mark.parametrize(
    ("capabilities", "compute", "words"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, "native", "AMX and AVX512-BF16"),
        ({"avx512_bf16": True, "amx_bf16": False}, "native", "AVX512-BF16"),
        ({"bf16": True, "neon": True}, "native", "Arm BF16"),
        ({"avx2": True}, "emulated", "no instructions for it"),
    ],
)
def test_a_cpu_is_ready_if_it_has_instructions_for_it(capabilities: dict, compute: str, words: str) -> None:
    with a_cpu(**capabilities), patch.object(torch.backends.mkldnn, "is_available", lambda: True):
        support = bf16_support("cpu")
    assert support.compute == compute
    assert words in support.reasons[0]


def test_instructions_that_torch_was_built_not_to_use_do_not_count() -> None:
    with a_cpu(amx_bf16=True), patch.object(torch.backends.mkldnn, "is_available", lambda: False):
        assert bf16_support("cpu").compute == "emulated"


@contextmanager
def another_device(kind: str, **properties: Any) -> Any:
    """torch as it would answer on a host with a device of another vendor."""
    ones = torch.ones
    modules = {"rocm": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    with (
        patch.object(torch.backends.cuda, "is_built", lambda: kind == "rocm"),
        patch.object(torch.version, "cuda", None),
        patch.object(torch.version, "hip", "6.4" if kind == "rocm" else None),
        patch.object(modules[kind], "is_available", lambda: True),
        patch.object(
            modules[kind], "get_device_properties", lambda device: SimpleNamespace(**properties), create=True
        ),
        patch.object(torch, "ones", lambda *size, device=None, **options: ones(*size, **options)),
    ):
        yield


AMD = {"major": 9, "minor": 0}
XMX = {"has_subgroup_matrix_multiply_accumulate": True, "has_bfloat16_conversions": True}


@pytest.mark.parametrize(
    ("kind", "properties", "compute", "words"),
    [
        ("rocm", {**AMD, "name": "MI250X", "gcnArchName": "gfx90a:sramecc+:xnack-"}, "native", "gfx90a"),
        ("rocm", {**AMD, "name": "MI50", "gcnArchName": "gfx906"}, "emulated", "no matrix units"),
        ("xpu", {**XMX, "name": "Data Center GPU Max"}, "native", "XMX"),
        ("xpu", {**XMX, "name": "older", "has_bfloat16_conversions": False}, "emulated", "no instructions"),
        ("xpu", {"name": "an older torch"}, "emulated", "torch does not tell"),
        ("mps", {}, "emulated", "torch does not tell"),
    ],
)
def test_other_devices_by_what_torch_tells(
    kind: str, properties: dict[str, Any], compute: str, words: str
) -> None:
    with another_device(kind, **properties):
        support = bf16_support("cuda" if kind == "rocm" else kind)
    assert support.compute == compute
    assert words in support.reasons[0]
    assert not any("NCCL" in reason for reason in support.reasons)


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "mps", "xpu", "meta"])
def test_asking_never_raises_on_this_machine(device: str | None) -> None:
    support = bf16_support(device)
    assert support.compute in ("native", "emulated", "none")
    assert all(reason.endswith(".") for reason in support.reasons)
    assert support.device in str(support)


# ---- the ranks and the network -------------------------------------------------------------------------


def native_except(rank_without: int | None) -> Bf16Support:
    with a_cpu(avx512_bf16=dist.get_rank() != rank_without):
        return bf16_support("cpu")


def test_a_real_all_reduce_checks_the_network(two_ranks: TwoRanks) -> None:
    first, second = two_ranks(native_except, None)
    assert first == second
    assert (first.ready, first.compute, first.network) == (True, "native", True)
    assert "over 2 ranks (gloo) gave the right sum" in first.reasons[-1]


def test_one_rank_without_is_enough_for_a_no_on_all(two_ranks: TwoRanks) -> None:
    first, second = two_ranks(native_except, 1)
    assert first == second
    assert (first.ready, first.compute, first.network) == (False, "emulated", True)
    assert any(reason.startswith("rank 1: ") and "no instructions" in reason for reason in first.reasons)


def an_all_reduce_that(goes_wrong: str) -> tuple[Bf16Support, float, float]:
    real = dist.all_reduce

    def raises(tensor: torch.Tensor, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("Unconvertible NCCL type BFloat16")
        return real(tensor, **options)

    def sums_wrongly(tensor: torch.Tensor, **options: Any) -> Any:
        work = real(tensor, **options)
        work.wait()
        if dist.get_rank() == 1:
            tensor[-1] += 1
        return work

    began = time.monotonic()
    with patch.object(dist, "all_reduce", {"raises": raises, "sums wrongly": sums_wrongly}[goes_wrong]):
        support = bf16_support("cpu")
    seconds = time.monotonic() - began
    after = torch.ones(1)
    dist.all_reduce(after)  # the training's own group is as it was
    return support, seconds, float(after)


@pytest.mark.parametrize(
    ("goes_wrong", "words"), [("raises", "Unconvertible NCCL type"), ("sums wrongly", "gave 2 to 3")]
)
def test_a_network_that_fails_on_one_rank_is_told_on_all(
    two_ranks: TwoRanks, goes_wrong: str, words: str
) -> None:
    (first, seconds, after), (second, *_) = two_ranks(an_all_reduce_that, goes_wrong)
    assert first == second
    assert (first.ready, first.network) == (False, False)
    assert any("rank 1: " in reason and words in reason for reason in first.reasons)
    assert seconds < 5
    assert after == 2


class Stuck:
    """A kernel that never ends by itself, as NCCL's whose peer is gone. Only an abort ends it."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.waited = False
        self.abort, self.destroy = dist.distributed_c10d._abort_process_group, dist.destroy_process_group

    def is_completed(self) -> bool:
        return self.aborted.is_set()

    def abort_group(self, group: Any) -> None:
        self.aborted.set()
        self.abort(group)

    def destroy_group(self, group: Any = None) -> None:
        self.waited = not self.aborted.wait(5)  # in place of for ever
        self.destroy(group)


def test_an_all_reduce_that_never_ends_is_told_and_aborted_and_not_waited_for() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stuck = Stuck()
    try:
        with (
            a_cpu(amx_bf16=True),
            patch("fsdp_utils.precision.bf16.LIMIT_S", 0.2),
            patch.object(dist, "all_reduce", lambda *arguments, **options: stuck),
            patch.object(dist.distributed_c10d, "_abort_process_group", stuck.abort_group),
            patch.object(dist, "destroy_process_group", stuck.destroy_group),
        ):
            support = bf16_support("cpu")
    finally:
        dist.destroy_process_group()
    assert (support.ready, support.network) == (False, False)
    assert support.reasons[-1] == ("An all-reduce in bf16 did not end within 0.1 s. Check the network.")
    assert stuck.aborted.is_set()
    assert not stuck.waited


def asked_on_rank_0_only() -> Bf16Support | None:
    with patch("fsdp_utils.precision.bf16.LIMIT_S", 1.0):
        return bf16_support("cpu") if dist.get_rank() == 0 else time.sleep(2)


def test_a_rank_that_does_not_ask_is_not_waited_for_forever(two_ranks: TwoRanks) -> None:
    support = two_ranks(asked_on_rank_0_only, timeout=30)[0]
    assert (support.ready, support.network) == (False, False)
    assert "found only rank 0 after 1 s; missing: rank 1. Call it on every rank" in support.reasons[-1]


def test_a_fake_group_says_nothing_about_the_network() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        assert bf16_support("cpu").network is None
    finally:
        dist.destroy_process_group()


def test_a_group_without_a_backend_for_the_device_is_not_tried() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with a_gpu("NVIDIA A100-SXM4-80GB"):
            support = bf16_support("cuda")
        assert support.network is None
        assert "sends no cuda tensors" in support.reasons[-1]
    finally:
        dist.destroy_process_group()


# ---- the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "code"), [("avx512_bf16", 0), ("avx2", 1)])
def test_the_command_prints_the_answer_and_exits_with_it(
    capability: str, code: int, capsys: pytest.CaptureFixture
) -> None:
    with a_cpu(**{capability: True}):
        assert main(["--device", "cpu"]) == code
    assert f": {'ready' if code == 0 else 'not ready'} for bf16" in capsys.readouterr().out


def test_the_command_runs_and_asks_nothing_at_import() -> None:
    code = """
import sys, torch
from unittest.mock import patch
def fail(*arguments, **options): raise AssertionError("asked at import")
with patch.object(torch.cuda, "is_available", fail), patch.object(torch.accelerator, "is_available", fail):
    import fsdp_utils.bf16
sys.exit(fsdp_utils.bf16.main(["--device", "cuda"]))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 1, done.stderr
    assert "not ready for bf16" in done.stdout


def launched(port: int) -> str:
    """As a rank under torchrun would run the command; the group of run_on_ranks is given up for it."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    with patch.dict(os.environ, {key: str(value) for key, value in variables.items()}), a_cpu(amx_bf16=True):
        code = main(["--device", "cpu"])
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9)
    )
    return str(code)


def test_under_a_launcher_the_command_checks_the_network_too() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert run_on_ranks(launched, port, world_size=2) == ["0", "0"]

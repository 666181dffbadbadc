"""The bf16 checker says yes only where the hardware and the network can, and else says why not.

Most devices here are stand-ins: what torch would say on them is patched, the judgement is real.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from fsdp_utils import bf16_support
from fsdp_utils.bf16 import main
from tests.on_ranks import Together, case, one_rank

on_two = Together(2)


@contextmanager
def a_gpu(name: str = "NVIDIA A100-SXM4-80GB", *, hip: str | None = None, **properties: Any) -> Any:
    """torch as it would answer on a host with this GPU. The matmul that is tried runs on the CPU."""
    found = SimpleNamespace(**{"name": name, "major": 8, "minor": 0, **properties})
    ones = torch.ones
    with (
        patch.object(torch.version, "hip", hip),
        patch.object(torch.cuda, "get_device_properties", lambda device: found),
        patch.object(torch, "ones", lambda *size, device=None, **options: ones(*size, **options)),
    ):
        yield


def a_cpu(**capabilities: bool) -> Any:
    """torch as it would answer on a CPU with these instructions."""
    return patch.object(torch.cpu, "get_capabilities", lambda: capabilities)


# ---- what the hardware can


@pytest.mark.parametrize(
    ("name", "properties", "compute", "words"),
    [
        ("Tesla T4", {"major": 7, "minor": 5}, "emulated", "compute capability 7.5 has no units"),
        ("NVIDIA A100-SXM4-80GB", {"major": 8, "minor": 0}, "native", "compute capability 8.0"),
        ("MI250X", {"hip": "6.4", "gcnArchName": "gfx90a:sramecc+:xnack-"}, "native", "gfx90a"),
        ("MI50", {"hip": "6.4", "gcnArchName": "gfx906"}, "emulated", "no matrix units"),
    ],
)
def test_a_gpu_is_ready_if_it_computes_in_bf16_and_not_if_it_emulates(
    name: str, properties: dict[str, Any], compute: str, words: str
) -> None:
    with a_gpu(name, **properties):
        support = bf16_support("cuda")
    assert (support.compute, support.device, support.network) == (compute, name, None)
    assert support.ready is bool(support) is (compute == "native")
    assert words in support.reasons[0]
    assert ("fp16 with a gradient scaler" in support.reasons[0]) is not support.ready


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ((torch.cuda, "get_device_properties"), "The NVIDIA driver on your system is too old"),
        ((torch, "ones"), "CUBLAS_STATUS_NOT_SUPPORTED"),  # counts more than what the device claims
    ],
)
def test_what_fails_is_a_reason_and_no_exception(place: tuple[Any, str], error: str) -> None:
    with a_gpu(), patch.object(*place, Mock(side_effect=RuntimeError(f"{error}\nand more"))):
        support = bf16_support("cuda:3")
    assert (support.ready, support.compute) == (False, "none")
    assert f"bf16 fails: RuntimeError: {error}. Instead, train in fp32" in support.reasons[0]
    assert "bf16_support('cpu')" in support.reasons[0]


@pytest.mark.parametrize(
    ("capabilities", "used", "compute", "words"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, True, "native", "AMX and AVX512-BF16"),
        ({"bf16": True, "amx_bf16": False}, True, "native", "Arm BF16"),
        ({"avx2": True}, True, "emulated", "no instructions for it"),
        ({"amx_bf16": True}, False, "emulated", "no instructions for it"),  # torch was built without oneDNN
    ],
)
def test_a_cpu_is_ready_if_it_has_instructions_for_it(
    capabilities: dict, used: bool, compute: str, words: str
) -> None:
    with a_cpu(**capabilities), patch.object(torch.backends.mkldnn, "is_available", lambda: used):
        support = bf16_support("cpu")
    assert support.compute == compute
    assert words in support.reasons[0]


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "mps", "meta"])
def test_asking_never_raises_on_this_machine(device: str | None) -> None:
    support = bf16_support(device)
    assert support.compute in ("native", "emulated", "none")
    assert support.ready is (support.compute == "native")
    assert all(reason.endswith(".") for reason in support.reasons)
    assert support.device in str(support)


# ---- the ranks and the network


@on_two
def test_all_ranks_and_a_real_all_reduce_are_asked() -> None:
    with a_cpu(avx512_bf16=True):
        support = bf16_support("cpu")
    assert (support.ready, support.compute, support.network) == (True, "native", True)
    assert "over 2 ranks gave the right sum" in support.reasons[-1]
    with a_cpu(avx512_bf16=dist.get_rank() == 0):
        support = bf16_support("cpu")
    assert (support.ready, support.compute, support.network) == (False, "emulated", True)
    assert any(reason.startswith("rank 1: ") and "no instructions" in reason for reason in support.reasons)


@on_two
def test_a_network_that_fails_on_one_rank_is_told_on_all() -> None:
    real = dist.all_reduce

    def raises(tensor: torch.Tensor, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("Unconvertible NCCL type BFloat16")
        return real(tensor, **options)

    def sums_wrongly(tensor: torch.Tensor, **options: Any) -> Any:
        work = real(tensor, **options)
        work.wait()  # pyright: ignore[reportOptionalMemberAccess]
        if dist.get_rank() == 1:
            tensor[-1] += 1
        return work

    for goes_wrong, words in ((raises, "Unconvertible NCCL type"), (sums_wrongly, "2 ranks gave 2 to 3")):
        with case(words), patch.object(dist, "all_reduce", goes_wrong):
            support = bf16_support("cpu")
            assert (support.ready, support.network) == (False, False)
            assert any("rank 1: " in reason and words in reason for reason in support.reasons)
        after = torch.ones(1)
        dist.all_reduce(after)  # the training's own group is as it was
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
    stuck = Stuck()
    with (
        one_rank(),
        a_cpu(amx_bf16=True),
        patch("fsdp_utils.precision.bf16.LIMIT_S", 0.2),
        patch.object(dist, "all_reduce", lambda *arguments, **options: stuck),
        patch.object(dist.distributed_c10d, "_abort_process_group", stuck.abort_group),
        patch.object(dist, "destroy_process_group", stuck.destroy_group),
    ):
        support = bf16_support("cpu")
    assert (support.ready, support.network) == (False, False)
    assert "TimeoutError: it did not end within 0.1 s. Check the network" in support.reasons[-1]
    assert stuck.aborted.is_set()
    assert not stuck.waited


@on_two
def test_a_rank_that_does_not_ask_is_not_waited_for_forever() -> None:
    if dist.get_rank() == 0:
        with patch("fsdp_utils.precision.bf16.LIMIT_S", 1.0):
            support = bf16_support("cpu")
        assert (support.ready, support.network) == (False, False)
        assert "found only rank 0 after 1 s; missing: rank 1. Call it on every rank" in support.reasons[-1]
    dist.barrier()


@on_two
def test_under_a_launcher_the_command_checks_the_network_too() -> None:
    """As a rank under torchrun would; it comes last, as the group of run_on_ranks is given up for it."""
    rank, port = dist.get_rank(), [0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port[0] = probe.getsockname()[1]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0]}
    with patch.dict(os.environ, {key: str(value) for key, value in variables.items()}), a_cpu(amx_bf16=True):
        assert main(["--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("backend", "network", "words"),
    [("gloo", True, "gave the right sum"), ("cpu:gloo", None, "sends no cuda tensors")],
)
def test_the_network_is_tried_where_there_is_one(backend: str, network: bool | None, words: str) -> None:
    with one_rank(backend), a_gpu():  # whose all-reduce ran on the CPU
        support = bf16_support("cuda")
    assert support.network is network
    assert words in support.reasons[-1]
    assert support.ready


def test_the_command_runs_and_asks_nothing_at_import() -> None:
    code = """
import sys, torch
from unittest.mock import patch
def fail(*arguments, **options): raise AssertionError("asked at import")
with patch.object(torch.cuda, "is_available", fail), patch.object(torch.accelerator, "is_available", fail):
    import fsdp_utils.bf16
sys.exit(fsdp_utils.bf16.main(["--device", "cuda"]))
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1, done.stderr
    assert "not ready for bf16" in done.stdout

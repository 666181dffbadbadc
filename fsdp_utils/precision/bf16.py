"""Checks whether this machine, and its network, can train in bf16.

    python -m fsdp_utils.bf16
    torchrun --nproc-per-node 8 -m fsdp_utils.bf16       the network too

prints the answer with its reasons and exits with 0 for yes, with 1 for no.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_utils._commands import new_parser
from fsdp_utils.distributed.agreement import agree, by_ranks, has_peers
from fsdp_utils.distributed.identity import get_local_rank
from fsdp_utils.precision.facts import Compute, judge
from fsdp_utils.torch_internals.groups import abort_groups

__all__ = ["Bf16Support", "bf16_support"]

LIMIT_S = 60.0  # that a rank waits for the others, and for the all-reduce
_ORDER: list[Compute] = ["none", "emulated", "native"]


@dataclass(frozen=True)
class Bf16Support:
    """The result of `bf16_support`; the same on every rank, and true only if all ranks can.

    compute is the least of all ranks: "native": the hardware computes in bf16. "emulated": tensors in bf16
    work, but the hardware does not compute in it, or nothing tells that it does. "none": they do not work.
    """

    ready: bool  #: the hardware computes in bf16, and nothing speaks against the network
    compute: Compute
    network: bool | None  #: whether an all-reduce over all ranks gave the right sum; None: not tried
    reasons: tuple[str, ...]  #: what was found, in words, with what to do where it speaks against bf16
    device: str  #: such as "NVIDIA H200"; the names of all ranks' devices, each once

    def __bool__(self) -> bool:
        return self.ready

    def __str__(self) -> str:
        network = {True: "works", False: "fails", None: "not tried"}[self.network]
        head = f"{self.device}: {'ready' if self.ready else 'not ready'} for bf16"
        head += f" (compute: {self.compute}, network: {network})"
        return "\n".join([head, *(f"- {text}" for text in self.reasons)])


class _NoAnswer(RuntimeError):
    """A rank did not take part, or has ended."""


def bf16_support(device: torch.device | str | None = None) -> Bf16Support:
    """Check whether this machine, or this whole process group, can train in bf16.

    Where there is a process group, every rank must call it: the ranks compare what they found and then sum
    a tensor in bf16 over another group, so that the training's group stays as it was.

    Args:
        device: None for the current accelerator, or the CPU where there is none.

    Returns:
        The answer, the same on every rank. It does not raise for lack of a device, a driver, or a rank:
        the reasons then say what is missing. A rank waits 60 s for the others at most.

    Source: torch.cuda.is_bf16_supported also says yes where bf16 is emulated, unless it is called with
        including_emulation=False; CUDA C++ Programming Guide, "Compute Capabilities".

    Example::

        support = bf16_support()
        print(support)
        dtype = torch.bfloat16 if support else torch.float32
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(device or "cpu")
    name, compute, reason = judge(device)
    try:
        return _agree(name, compute, reason, device)
    except _NoAnswer as error:
        reasons = (reason, f"{error} So nothing is known about the network.")
        return Bf16Support(False, compute, False, reasons, name)


def _agree(name: str, compute: Compute, reason: str, device: torch.device) -> Bf16Support:
    ranks = agree("bf16_support", dict, error=_NoAnswer, topic="bf16", wait_s=LIMIT_S)
    ranks.consequence = ". Every rank must take part."
    try:
        with ranks.guard():
            found = ranks.all(lambda: (name, compute, reason))
        names, computes, texts = zip(*found, strict=True)
        compute = min(computes, key=_ORDER.index)
        reasons = by_ranks([[text] for text in texts])
        network: bool | None = None
        if compute == "none":
            reasons.append("The network was not tried: first all ranks must compute in bf16.")
        elif why_not := _why_not_tried(device):
            reasons.append(why_not)
        else:
            with ranks.guard():
                problems = ranks.all(lambda: _all_reduce(device))
            network = not any(problems)
            reasons += by_ranks([[problem] if problem else [] for problem in problems]) or [
                f"An all-reduce in bf16 over {len(found)} rank{'s' * (len(found) > 1)} gave the right sum."
            ]
    finally:
        ranks.close()
    ready = compute == "native" and network is not False
    return Bf16Support(ready, compute, network, tuple(reasons), ", ".join(dict.fromkeys(names)))


def _why_not_tried(device: torch.device) -> str:
    if not has_peers():
        return (
            "The network was not tried: it takes a process group. Where there are several ranks, call "
            "init_process_group() first, or run `torchrun … -m fsdp_utils.bf16`."
        )
    if f"{device.type}:" not in dist.get_backend_config():
        return (
            f"The network was not tried: the process group sends no {device.type} tensors. Call "
            f"init_process_group with a backend for {device.type}."
        )
    return ""


def _all_reduce(device: torch.device) -> str:
    """Sum ones in bf16 over all ranks; returns what went wrong. A collective, over a new group."""
    group: Any = None
    problem = ""
    try:
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        ones = torch.ones(1024, dtype=torch.bfloat16, device=device)
        work: Any = dist.all_reduce(ones, group=group, async_op=True)
        limit = time.monotonic() + LIMIT_S / 2  # before the group's own, at which NCCL ends the process
        while not work.is_completed():
            if time.monotonic() > limit:
                raise TimeoutError(f"it did not end within {LIMIT_S / 2:g} s")
            time.sleep(0.001)
        work.wait()
        size, low, high = dist.get_world_size(), float(ones.min()), float(ones.max())
        if abs(low - size) > size / 64 or abs(high - size) > size / 64:  # bf16 has 8 significant bits
            raise ValueError(f"ones of {size} ranks gave {low:g} to {high:g}")
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
        problem = f"An all-reduce in bf16 fails: {text}. Check the network, or reduce in fp32 (reduce_dtype)."
    with suppress(Exception):
        if problem and group is not None:
            # Destroying an NCCL group waits for its kernels, and the one that is stuck never ends. Aborting
            # ends the kernel, and closes the connections: that tells the others if this rank failed alone.
            abort_groups(group)
        elif group is not None:
            dist.destroy_process_group(group)
    return problem


def main(arguments: list[str] | None = None) -> int:
    """Print the answer; 0 for yes, 1 for no."""
    parser = new_parser("fsdp_utils.bf16", "Can this machine train in bf16? Exits with 0 for yes, 1 for no.")
    parser.add_argument("--device", help="cuda, cpu, …; the accelerator by default, or the CPU without one")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    options = parser.parse_args(arguments)
    device = options.device
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if launched:
        if device in (None, "cuda") and torch.cuda.is_available():
            torch.cuda.set_device(get_local_rank())
        dist.init_process_group(timeout=timedelta(seconds=LIMIT_S))
    try:
        support = bf16_support(device)
        if not launched or dist.get_rank() == 0:
            print(json.dumps(asdict(support)) if options.json else support)
    finally:
        if launched:
            dist.destroy_process_group()
    return 0 if support else 1

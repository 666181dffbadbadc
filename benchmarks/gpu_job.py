"""One rank on a GPU, or on a CPU for a dry run, and steps that it trains: shared by the parts of gpu.py."""

import contextlib
import gc
import time
from collections.abc import Iterator
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_utils

Result = dict[str, Any]
GIB = 2**30
KINDS = ("allocated", "reserved")  # of memory
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


@contextlib.contextmanager
def one_rank(device: torch.device, of: int = 1) -> Iterator[None]:
    """Be the only rank of a group, or rank 0 of a larger one that sends nothing; leave no memory behind."""
    backend = "fake" if of > 1 else "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = FakeStore() if of > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=of, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # FSDP's modules refer to each other, and the next setting needs their memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured_steps(
    config: LlamaConfig, shape: tuple[int, int], device: torch.device, how: dict[str, Any]
) -> Result:
    """Return the peaks in GiB and the seconds of the steps.

    Args:
        how: options of fsdp_utils.shard. `units`: False for one unit. `compiled`: each block. `saved`: a
            context for each forward. `fsdp1`: what wraps the model in place of FSDP2.
    """
    how = dict(how)
    fsdp1, units, compiled = how.pop("fsdp1", None), how.pop("units", True), how.pop("compiled", False)
    saved = how.pop("saved", contextlib.nullcontext)
    with torch.device(device if fsdp1 else "meta"):
        model: Any = LlamaForCausalLM(config)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if fsdp1:
        model = fsdp1(model)
    else:
        (fsdp_utils.shard if units else fully_shard)(model, mesh=mesh, **how)
        model.to_empty(device="cpu" if "offload_policy" in how else device)
    for block in model.model.layers if compiled else ():
        block.compile()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local(tensor).normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    cuda, seconds = device.type == "cuda", []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(12 if cuda else 4):
        begin = time.perf_counter()
        with saved():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    stats = torch.cuda.memory_stats() if cuda else {}
    peaks = {f"peak_{kind}_gib": stats.get(f"{kind}_bytes.all.peak", 0) / GIB for kind in KINDS}
    return {**peaks, "step_s": median(seconds[2:])}

"""What does FSDP1's rate limiter (limit_all_gathers) cost in time, and what does it save in memory?

A Llama of 1.8 billion parameters under FSDP1, FULL_SHARD. Without the limiter the CPU issues all-gathers as
fast as it can; each takes memory at once, long before the GPU comes to use it.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils import transformer_block_classes

USES = ("benchmarks/gpu_parts/workload.py",)
GROUP = workload.GROUP


def settings(tiny: bool, done: Done) -> list[Setting]:
    sizes = [1] if tiny else [2, 8]
    return [{"batch_size": size, "limit_all_gathers": limit} for size in sizes for limit in (True, False)]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    warm, steps, length = (1, 2, 16) if tiny else (3, 15, 1024)
    workload.join_fake_group(device)
    config = workload.llama_config(tiny, layers=32)
    model = workload.on_meta(config)
    dtype = torch.bfloat16
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)),
        param_init_fn=lambda module: workload.fill(module, device, recurse=False),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        limit_all_gathers=setting["limit_all_gathers"],
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = workload.random_batch(config, setting["batch_size"], length, device)
    step = partial(workload.train_step, model, optimizer, batch)
    workload.seconds_per_step(step, warm, device)
    workload.reset_memory(device)
    seconds = workload.seconds_per_step(step, steps, device)
    measured = workload.memory(device)
    workload.refuse_infinite_gradients(model, batch)
    return {"step_s": workload.spread(seconds), **measured}


def summarize(done: Done) -> dict[str, Any]:
    """With the limiter against without it, by batch size."""
    results = {(setting["batch_size"], setting["limit_all_gathers"]): result for setting, result in done}
    return {
        f"batch_{size}": _compare(results[size, True], results[size, False])
        for size in sorted({size for size, _ in results})
        if {(size, True), (size, False)} <= set(results)
    }


def _compare(limited: Result, free: Result) -> dict[str, float | None]:
    peak = "peak_reserved_gib"
    return {
        "time_ratio": limited["step_s"]["median"] / free["step_s"]["median"],
        "peak_reserved_ratio": limited[peak] / free[peak] if free[peak] else None,
    }

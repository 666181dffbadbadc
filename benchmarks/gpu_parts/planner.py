"""Is the memory and the time of a step what fsdp_utils.planner predicts?

One rank of eight trains three models in twelve settings (strategy, precision, checkpointing, batch). Before
that, `plan` predicts the same setting. A `fake` group sends nothing in no time, so the time to compare with
is that of computation. It is predicted from the published rates of the GPU, and from rates measured on it.
"""

import re
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils import plan, shard
from fsdp_utils.planner import GPU, GPUS

USES = (
    "benchmarks/gpu_parts/workload.py",
    "fsdp_utils/allocator/rules.py",
    "fsdp_utils/planner/simulated_rank.py",
    "fsdp_utils/planner/recorder.py",
    "fsdp_utils/planner/extrapolation.py",
    "fsdp_utils/planner/efficiency.py",
    "fsdp_utils/planner/roofline.py",
)
GROUP = workload.GROUP
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16_reduce_fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
# model, batch of a rank, sequence length, strategy, precision, checkpointing
SETTINGS = (
    ("llama 1B", 4, 2048, "full", "bf16", "none"),
    ("llama 1B", 4, 2048, "full", "bf16", "full"),
    ("llama 1B", 4, 2048, "grad_op", "bf16", "none"),
    ("llama 1B", 2, 2048, "full", "fp32", "none"),
    ("llama 1B", 1, 512, "full", "bf16", "none"),
    ("llama 1B", 8, 2048, "full", "bf16_reduce_fp32", "full"),
    ("llama 3B", 1, 2048, "full", "bf16", "none"),
    ("llama 3B", 4, 2048, "full", "bf16", "full"),
    ("llama 3B", 2, 4096, "grad_op", "bf16", "full"),
    ("vit 2B", 8, 0, "full", "bf16", "none"),
    ("vit 2B", 32, 0, "full", "bf16", "full"),
    ("vit 2B", 16, 0, "grad_op", "bf16", "none"),
)


NAMES = ("model", "batch", "length", "strategy", "precision", "checkpointing")
COMPARED = {"peak_allocated_gib": "allocated", "peak_reserved_gib": "reserved", "step_s": "step time"}


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [dict(zip(NAMES, row, strict=True)) for row in (SETTINGS[1:2] if tiny else SETTINGS)]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    size, length = (2, 16) if tiny else (setting["batch"], setting["length"])
    config = _config(setting["model"], tiny)
    if dist.is_initialized():
        dist.destroy_process_group()  # plan joins one of its own
    rates = _rates(device, tiny)
    result: Result = {
        "rates": rates,
        "predicted": {
            name: _predict(setting, config, size, length, gpu) for name, gpu in _gpus(device, rates).items()
        },
    }
    mesh = workload.join_fake_group(device)
    model = workload.on_meta(config)
    if setting["checkpointing"] == "full":
        blocks = workload.blocks_of(model)
        for i in range(len(blocks)):
            blocks[i] = checkpoint_wrapper(blocks[i], preserve_rng_state=False)
    shard(model, mesh=mesh, strategy=setting["strategy"], mp_policy=POLICIES[setting["precision"]])
    workload.fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        workload.train_step(model, optimizer, workload.random_batch(config, size, length, device))

    workload.reset_memory(device)
    workload.seconds_per_step(step, 2, device)
    measured = workload.memory(device)  # of two steps, as many as are simulated
    seconds = workload.spread(workload.seconds_per_step(step, 2 if tiny else 10, device))
    workload.refuse_infinite_gradients(model, workload.random_batch(config, size, length, device))
    return {**result, "measured": {**measured, "step_s": seconds["median"]}, "step_s": seconds}


def summarize(done: Done) -> dict[str, Any]:
    """Predicted beside measured, and the error of each number: the median and the worst."""
    rows, errors = [], {}
    for setting, result in done:
        predicted = result["predicted"].get("published rates") or result["predicted"]["measured rates"]
        row: dict[str, Any] = {"setting": ", ".join(str(setting[name]) for name in NAMES)}
        for key, name in COMPARED.items():
            row[key] = [predicted[key], result["measured"][key]]
            if result["measured"][key]:
                errors.setdefault(name, []).append(abs(predicted[key] / result["measured"][key] - 1))
        rows.append(row)
    return {
        "settings": len(rows),
        "rows": rows,
        "errors": {name: {"median": median(e), "worst": max(e)} for name, e in errors.items()},
    }


def _config(name: str, tiny: bool) -> Any:
    if name == "vit 2B":
        return workload.vit_config(tiny)
    return workload.llama_config(tiny) if name == "llama 1B" else workload.llama_config(tiny, 28, 3072)


def _predict(setting: Setting, config: Any, size: int, length: int, gpu: GPU) -> dict[str, float]:
    predicted = plan(
        config,
        world_size=workload.RANKS,
        batch_size=size * workload.RANKS,
        seq_len=length or None,
        gpu=gpu,
        strategy=setting["strategy"],
        precision=setting["precision"],
        checkpointing=setting["checkpointing"],
    )
    return {
        "peak_allocated_gib": predicted.peak_allocated_gib,
        "peak_reserved_gib": predicted.peak_reserved_gib,
        "step_s": predicted.timing.compute_s,
    }


def _gpus(device: torch.device, rates: dict[str, float]) -> dict[str, GPU]:
    """The GPU by its rates as measured, and as published where it is in the planner's table."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    alike = [gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.name.split('-')[0]}\b", name)]
    size = torch.cuda.get_device_properties(device).total_memory / workload.GIB if alike else 0.0
    known = min(alike, key=lambda gpu: abs(gpu.usable_gib - size), default=None)
    measured = replace(
        known or GPUS["H100"],
        reached_tflops=rates["half_tflops"],
        fp32_tflops=rates["fp32_tflops"],
        memory_gb_s=rates["memory_gb_s"],
    )
    return {"measured rates": measured} | ({"published rates": known} if known else {})


def _rates(device: torch.device, tiny: bool) -> dict[str, float]:
    """Of matrix products, and of a copy within the GPU's memory."""
    side, repeats = (64, 2) if tiny else (8192, 10)

    def best(call: Any) -> float:
        return min(workload.seconds_per_step(call, repeats, device))

    rates = {}
    for name, dtype in (("half_tflops", torch.bfloat16), ("fp32_tflops", torch.float32)):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates[name] = 2 * side**3 / best(lambda a=a, b=b: a @ b) / 1e12
    source, target = (torch.zeros(side, side, device=device) for _ in range(2))
    rates["memory_gb_s"] = 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9
    return rates

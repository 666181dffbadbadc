"""How long does a training step take, and how much memory, in fp32, with TF32, in bf16 and in fp16?

A Llama of about 350 million parameters under FSDP2. Parameters, moments and reduced gradients are fp32 in all
ways; what differs is what computes and what is gathered. fp16 with a gradient scaler.
"""

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils import shard

USES = ("benchmarks/gpu_parts/workload.py",)
GROUP = workload.GROUP
DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [{"way": way} for way in DTYPES]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    warm, steps, size, length = (1, 2, 1, 16) if tiny else (3, 15, 8, 1024)
    torch.backends.cuda.matmul.allow_tf32 = setting["way"] == "tf32"
    mesh = workload.join_fake_group(device)
    dtype = DTYPES[setting["way"]]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    llama = workload.llama_config(tiny, layers=24, width=1024)  # 0.37 billion parameters
    model = shard(workload.on_meta(llama), mesh=mesh, mp_policy=policy)
    workload.fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=setting["way"] == "fp16")
    batch = workload.random_batch(llama, size, length, device)

    def step() -> None:
        scaler.scale(model(**batch).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    workload.seconds_per_step(step, warm, device)
    workload.reset_memory(device)
    seconds = workload.seconds_per_step(step, steps, device)
    measured = workload.memory(device)
    workload.refuse_infinite_gradients(model, batch)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": size,
        "length": length,
        "step_s": workload.spread(seconds),
        **measured,
    }


def summarize(done: Done) -> dict[str, Any]:
    """Each way against fp32, and fp16 against bf16."""
    by_way = {setting["way"]: result for setting, result in done}
    if not set(DTYPES) <= set(by_way):
        return {}
    seconds = {way: result["step_s"]["median"] for way, result in by_way.items()}
    peak = {way: result["peak_allocated_gib"] for way, result in by_way.items()}
    against: dict[str, Any] = {
        way: {
            "time_ratio": seconds[way] / seconds["fp32"],
            "peak_ratio": peak[way] / peak["fp32"] if peak["fp32"] else None,
        }
        for way in DTYPES
    }
    return {**against, "fp16_against_bf16": seconds["fp16"] / seconds["bf16"]}

"""How much of a GPU does the training program use on a Llama of 1.1 billion parameters, eagerly and compiled?

One GPU is the whole job: a process group of one rank, the model built, sharded and stepped by the functions
of fsdp_utils.train, in bf16 with recomputation off. A step is the program's own: it clips, checks for NaN,
and so waits for the device once. Random tokens; nothing is logged or saved.
"""

from typing import Any

import torch
import torch.distributed as dist
from fsdp_utils.train.group import process_group
from transformers.utils.import_utils import is_flash_attn_2_available

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils import Memory_Maximizer
from fsdp_utils.train import loop
from fsdp_utils.train.config import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from fsdp_utils.train.data import Data, TensorRows
from fsdp_utils.train.model import NAMED, build_model, flops_per_token, parallelize, peak_flops, throughput

USES = (
    "benchmarks/gpu_parts/workload.py",
    "fsdp_utils/memory/device_stats.py",
    "fsdp_utils/memory/maximizer.py",
    "fsdp_utils/memory/advice.py",
    "fsdp_utils/train/loop.py",
    "fsdp_utils/train/model.py",
    "fsdp_utils/sharding/wrapping.py",
)
GROUP = None
MFU = 0.45  # the limit: on an H200, with compile, at least that


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [
        {"attention": attention, "compile": compiled, "batch_size": size}
        for attention in ("sdpa", *["flash_attention_2"] * is_flash_attn_2_available())
        for compiled in (True, False)  # the limit is for the compiled ones: they come first
        for size in ((2,) if tiny else (16, 8))
    ]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    torch._dynamo.utils.counters.clear()
    torch.compiler.reset()  # or another batch than that of the last setting is compiled for all sizes
    if dist.is_initialized():
        dist.destroy_process_group()  # of a setting that failed
    with process_group(device, 60):
        return _measure(setting, device, tiny)


def _measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    name, warm, steps, length = ("llama-tiny", 1, 2, 16) if tiny else ("llama-1b", 5, 20, 2048)
    size = setting["batch_size"]
    # the dry run is to need no C++ compiler
    backend = "inductor" if device.type == "cuda" else "eager"
    config = TrainConfig(
        out="",
        data=DataConfig(source="", batch_size=size, seq_len=length),
        model=ModelConfig(config=name),
        parallel=ParallelConfig(precision="bf16", compile=backend if setting["compile"] else None),
        steps=warm + steps,
    )
    data = _random_tokens(config, NAMED[name]["vocab_size"])
    with device:  # drawing a billion weights takes a CPU half a minute
        model: Any = build_model(config.model, data, config.seed)
    model.set_attn_implementation(setting["attention"])
    model = parallelize(model, config, device)
    optimizer = loop._optimizer(model, config.optim)
    maximizer, losses = Memory_Maximizer(device, verbose=False), []

    def step() -> None:
        at = len(losses)
        rate = loop.learning_rate(at, config.optim, config.steps)
        batch = loop._batch(config, data, at * size)
        loss, _ = loop._step(config, model, optimizer, batch, sum(batch.labels), at, rate)
        losses.append(loss)
        maximizer.update(size)

    peak = peak_flops(device, None)
    result: Result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.config._attn_implementation,
        "length": length,
        "flops_per_token": flops_per_token(model, length),
        "peak_tflops": peak / 1e12 if peak else None,
        "out_of_memory": False,
    }
    model.train()
    maximizer.start()
    try:
        workload.seconds_per_step(step, warm, device)
        maximizer.start()  # anew: of the steps that are all alike
        seconds = workload.seconds_per_step(step, steps, device)
    except torch.OutOfMemoryError:
        return {**result, "out_of_memory": True, "memory_maximizer": maximizer.stop().to_dict()}
    report = maximizer.stop()
    spread = workload.spread(seconds)
    return {
        **result,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "losses": [losses[0], losses[-1]],
        "step_s": spread,
        **throughput(config, model, data, device)(spread["median"]),
        "peak_allocated_gib": report.max_allocated_gib,
        "peak_reserved_gib": report.max_reserved_gib,
        "memory_maximizer": report.to_dict(),
    }


def _random_tokens(config: TrainConfig, vocabulary: int) -> Data:
    """As many samples as the run sees, in the host's memory."""
    tokens = torch.randint(vocabulary, (config.steps * config.data.batch_size, config.data.seq_len))
    rows = TensorRows({"input_ids": tokens, "labels": tokens})
    return Data(rows, TensorRows({"labels": tokens[:0]}), predicts_next=True)


def summarize(done: Done) -> dict[str, Any]:
    """A row for each setting, and whether the best compiled one holds the limit; None without an H200."""
    keys = ("tokens_per_s", "mfu", "peak_allocated_gib", "peak_reserved_gib")
    rows = [
        {
            **setting,
            "step_s": result["step_s"]["median"] if "step_s" in result else None,
            **{key: result.get(key) for key in keys},
            "verdict": result["memory_maximizer"]["advice"],
        }
        for setting, result in done
    ]
    mfu = [row["mfu"] for row in rows if row["compile"] and row["mfu"] is not None]
    best = max(mfu, default=None)
    on_h200 = all("H200" in result["memory_maximizer"]["device"] for _, result in done)
    return {
        "rows": rows,
        "best_compiled_mfu": best,
        "limit_on_h200": MFU,
        "limit_held": best >= MFU if best is not None and on_h200 else None,
    }

"""What does activation checkpointing save, and what does it cost, eagerly and compiled?

A Llama of 1 billion parameters under fully_shard, 4 sequences of 2048 tokens: nothing checkpointed, every
block, every second block, selectively by operator (matrix products and attention are kept, the rest is
computed again), and activations moved to the CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_parts import Done, Result, Setting, workload

USES = ("benchmarks/gpu_parts/workload.py",)
GROUP = workload.GROUP

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _by_operator(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, context_fn=partial(create_selective_checkpoint_contexts, _keep))


# for each policy, what becomes of block number i
POLICIES: dict[str, Callable[[int, nn.Module], nn.Module]] = {
    "none": lambda i, block: block,
    "full": lambda i, block: checkpoint_wrapper(block),
    "every second block": lambda i, block: checkpoint_wrapper(block) if i % 2 == 0 else block,
    "selective by operator": lambda i, block: _by_operator(block),
    "offload": lambda i, block: offload_wrapper(block),
}


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [{"policy": policy, "compile": compiled} for compiled in (False, True) for policy in POLICIES]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    warm, steps, size, length = (1, 2, 2, 16) if tiny else (3, 10, 4, 2048)
    torch.compiler.reset()
    mesh = workload.join_fake_group(device)
    config = workload.llama_config(tiny)
    model = workload.on_meta(config)
    blocks = workload.blocks_of(model)
    for i in range(len(blocks)):  # wrapped first, then compiled, then sharded
        blocks[i] = POLICIES[setting["policy"]](i, blocks[i])
        if setting["compile"]:
            # the dry run is to need no C++ compiler
            blocks[i].compile(backend="inductor" if device.type == "cuda" else "eager")
    workload.fsdp2(model, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = workload.random_batch(config, size, length, device)
    step = partial(workload.train_step, model, optimizer, batch)

    (first_s,) = workload.seconds_per_step(step, 1, device)
    workload.seconds_per_step(step, warm, device)
    workload.reset_memory(device)
    seconds = workload.seconds_per_step(step, steps, device)
    result = {"first_step_s": first_s, "step_s": workload.spread(seconds), **workload.memory(device)}
    if not setting["compile"]:
        with FlopCounterMode(display=False) as counter:
            step()
        result["flop_per_step"] = counter.get_total_flops()
    workload.refuse_infinite_gradients(model, batch)
    return result


def summarize(done: Done) -> dict[str, Any]:
    """Each policy against none: eager against eager, compiled against compiled."""
    results = {(setting["compile"], setting["policy"]): result for setting, result in done}
    return {
        name: {
            policy: _compare(results[compiled, policy], results[compiled, "none"])
            for policy in POLICIES
            if {(compiled, policy), (compiled, "none")} <= set(results)
        }
        for name, compiled in (("eager", False), ("compiled", True))
    }


def _compare(result: Result, none: Result) -> dict[str, float | None]:
    def ratio(key: str) -> float | None:
        return result[key] / none[key] if result.get(key) and none.get(key) else None

    return {
        "time_ratio": result["step_s"]["median"] / none["step_s"]["median"],
        "peak_allocated_ratio": ratio("peak_allocated_gib"),
        "flop_ratio": ratio("flop_per_step"),
    }

"""Does the simulated allocator reserve what the real one reserves, and retry when it retries?

The same training runs on the GPU and is replayed by `fsdp_utils.allocator`: from the GPU's own history, which
tests the rules, and from a trace recorded on fake tensors without the GPU, which tests what a reader sees on
a laptop. Then the GPU is limited to half of the room between what was allocated and what was reserved, and
the retries are compared.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.gpu_parts import Done, Result, Setting, workload
from fsdp_utils.allocator.simulate import Simulation, simulate_allocator
from fsdp_utils.allocator.trace import AllocationTrace, record_allocations

USES = (
    "benchmarks/gpu_parts/workload.py",
    "fsdp_utils/allocator/trace.py",
    "fsdp_utils/allocator/simulate.py",
    "fsdp_utils/allocator/rules.py",
)
GROUP = workload.GROUP
LENGTHS = (640, 896, 768, 1024, 704, 960)  # of the sequences, step by step


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [
        {"model": model, "strategy": strategy, "expandable_segments": expandable}
        for expandable in ((False,) if tiny else (False, True))
        for model, strategy in (("vit", "grad_op"), ("llama", "full"))
    ]


def environment(setting: Setting) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting['expandable_segments']}"}


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    meshes = {kind: workload.join_fake_group(torch.device(kind)) for kind in ("cpu", device.type)}
    simulate = partial(simulate_allocator, expandable_segments=setting["expandable_segments"])
    with FakeTensorMode(), record_allocations() as fake_trace:
        _train(setting, meshes["cpu"], torch.device("cpu"), tiny)
    fake = simulate(fake_trace)
    result = {"simulated_from_fake_tensors": _sizes(fake), "events": len(fake_trace.events)}
    if device.type != "cuda":
        return {**result, "measured": None}  # only CUDA's allocator keeps a history

    train = partial(_train, setting, meshes[device.type], device, tiny)
    torch.cuda.memory._record_memory_history(context=None)
    result["measured"] = _measured(train, device)
    history = AllocationTrace.from_snapshot(torch.cuda.memory._snapshot(), device=torch.cuda.current_device())
    torch.cuda.memory._record_memory_history(enabled=None)
    result["simulated_from_history"] = _sizes(simulate(history))

    measured = result["measured"]
    limit_gib = (measured["peak_allocated_gib"] + measured["peak_reserved_gib"]) / 2
    torch.cuda.set_per_process_memory_fraction(
        limit_gib * workload.GIB / torch.cuda.get_device_properties(device).total_memory
    )
    return {
        **result,
        "limit_gib": limit_gib,
        "measured_under_limit": _measured(train, device),
        "simulated_under_limit": _sizes(simulate(history, limit_gib=limit_gib)),
    }


def _train(setting: Setting, mesh: DeviceMesh, device: torch.device, tiny: bool) -> None:
    config = workload.vit_config(tiny) if setting["model"] == "vit" else workload.llama_config(tiny)
    model = workload.fsdp2(workload.on_meta(config), mesh, device, setting["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for length in [16, 24] if tiny else LENGTHS:
        workload.train_step(model, optimizer, workload.random_batch(config, 2 if tiny else 8, length, device))


def _measured(train: Callable[[], None], device: torch.device) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    workload.reset_memory(device)
    try:
        train()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True, **workload.memory(device)}
    return {"out_of_memory": False, **workload.memory(device)}


def _sizes(simulation: Simulation) -> dict[str, Any]:
    return {
        "out_of_memory": simulation.num_ooms > 0,
        "peak_reserved_gib": simulation.peak_reserved_gib,
        "peak_allocated_gib": simulation.peak_allocated_gib,
        "num_alloc_retries": simulation.num_alloc_retries,
        "num_device_alloc": simulation.num_device_alloc,
    }


def summarize(done: Done) -> dict[str, Any]:
    """By how much the simulated peak of reserved memory is off at worst, relative to the measured one."""
    pairs = [result for _, result in done if result.get("measured")]

    def worst(simulated: str) -> float | None:
        peak = "peak_reserved_gib"
        errors = [abs(result[simulated][peak] / result["measured"][peak] - 1) for result in pairs]
        return max(errors, default=None)

    return {
        "worst_error_from_history": worst("simulated_from_history"),
        "worst_error_from_fake_tensors": worst("simulated_from_fake_tensors"),
    }

"""What does training just below out of memory cost, and do expandable segments avoid it?

A vision transformer of 2 billion parameters, sharded as in ZeRO-2, on a GPU of which PyTorch may use 64 GiB
at most. The batch doubles until memory runs out, and then closes in on the largest that fits.
"""

from typing import Any

import torch

from benchmarks.gpu_parts import Done, Result, Setting, workload

CAP_GIB = 64.0
USES = ("benchmarks/gpu_parts/workload.py",)
GROUP = workload.GROUP


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [
        {"expandable_segments": expandable, "batch_size": size}
        for expandable in ((False,) if tiny else (False, True))
        for size in _sizes(
            {
                setting["batch_size"]: not result.get("out_of_memory")
                for setting, result in done
                if setting["expandable_segments"] == expandable and "error" not in result
            },
            largest=2 if tiny else 512,
        )
    ]


def _sizes(fits: dict[int, bool], largest: int) -> list[int]:
    """The batch sizes tried so far, by whether they fit, and the next one if there is any to try."""
    low = max((size for size, fit in fits.items() if fit), default=0)
    high = min((size for size, fit in fits.items() if not fit), default=None)
    following = max(1, 2 * low) if high is None else low + max(1, (high - low) // 4)
    return [*fits] if following > largest or following in fits else [*fits, following]


def environment(setting: Setting) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting['expandable_segments']}"}


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    warm, steps = (1, 2) if tiny else (3, 10)
    result: Result = {"cap_gib": None, "out_of_memory": False}
    if device.type == "cuda":
        total_gib = torch.cuda.get_device_properties(device).total_memory / workload.GIB
        result["cap_gib"] = min(CAP_GIB, 0.9 * total_gib)
        torch.cuda.set_per_process_memory_fraction(result["cap_gib"] / total_gib)
    mesh = workload.join_fake_group(device)
    config = workload.vit_config(tiny)
    model = workload.fsdp2(workload.on_meta(config), mesh, device, "grad_op")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())

    def step() -> None:
        batch = workload.random_batch(config, setting["batch_size"], 0, device)
        workload.train_step(model, optimizer, batch)

    workload.reset_memory(device)
    try:
        workload.seconds_per_step(step, warm, device)
        result["warm_up"] = workload.memory(device)
        workload.reset_memory(device)
        seconds = workload.seconds_per_step(step, steps, device)
    except torch.OutOfMemoryError:
        return {**result, "out_of_memory": True, **workload.memory(device)}
    measured = workload.memory(device)
    workload.refuse_infinite_gradients(model, workload.random_batch(config, 1, 0, device))
    return {
        **result,
        "step_s": workload.spread(seconds),
        "samples_per_s": setting["batch_size"] * steps / sum(seconds),
        **measured,
    }


def summarize(done: Done) -> dict[str, Any]:
    """For each way of allocating: the best batch without a retry beside the largest that ran at all."""
    return {
        "expandable" if expandable else "default": _compare(
            [
                {**setting, **result}
                for setting, result in done
                if setting["expandable_segments"] == expandable and "samples_per_s" in result
            ]
        )
        for expandable in (False, True)
    }


def _compare(ran: list[dict[str, Any]]) -> dict[str, Any] | None:
    quiet = [run for run in ran if not run["num_alloc_retries"]]
    if not quiet:
        return None
    best = max(quiet, key=lambda run: run["samples_per_s"])
    largest = max(ran, key=lambda run: run["batch_size"])
    keys = ("batch_size", "samples_per_s", "num_alloc_retries", "peak_reserved_gib", "peak_allocated_gib")
    return {
        "best_without_retry": {key: best[key] for key in keys},
        "largest": {key: largest[key] for key in keys},
        "gain": best["samples_per_s"] / largest["samples_per_s"],
    }

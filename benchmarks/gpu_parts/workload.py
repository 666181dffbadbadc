"""The training that the recordings measure: one rank of eight, alone on its GPU.

A `fake` process group answers every collective at once, from the rank's own data. The rank allocates what
it would allocate in the real job and runs the same kernels; the values and the time of communication are not
those of the job.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification
from transformers.initialization import no_init_weights

from fsdp_utils import shard

GIB = 2**30
RANKS = 8
GROUP = (
    f"one rank of {RANKS} under a fake process group: memory and kernels are those of the job, the values "
    "and the time of communication are not"
)


def join_fake_group(device: torch.device) -> DeviceMesh:
    """Be rank 0 of RANKS; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        _fill_reduce_scatter()
    return init_device_mesh(device.type, (RANKS,))


# by which FSDP1 and FSDP2 call it, up to torch 2.12 and after; they look it up in torch.distributed each time
REDUCE_SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")


def _fill_reduce_scatter() -> None:
    """Have reduce_scatter write its output, where the fake group does not [torch 2.11].

    FSDP's gradients would be what the memory happened to hold. They become this rank's part of its own input,
    as in later versions of torch.
    """
    output = torch.full((1,), math.nan)
    names = [name for name in REDUCE_SCATTER if hasattr(dist, name)]
    getattr(dist, names[-1])(output, torch.zeros(RANKS))  # the older name warns where there is a newer one
    if output.isnan().item():
        for name in names:
            setattr(dist, name, _filling(getattr(dist, name)))


def _filling(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def filled(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = call(output, input, *args, **kwargs)
        output.detach().copy_(input.detach().view(-1)[: output.numel()].view_as(output))
        return work

    return filled


def vit_config(tiny: bool) -> ViTConfig:
    """A vision transformer of 2.0 billion parameters, about that of the video of lesson 5."""
    width, layers = (64, 2) if tiny else (1664, 60)
    return ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32 if tiny else 16,
        image_size=32 if tiny else 224,
    )


def llama_config(tiny: bool, layers: int = 16, width: int = 2048) -> LlamaConfig:
    """A Llama: of 0.95 billion parameters, unless told otherwise."""
    width = 64 if tiny else width
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=2 if tiny else layers,
        num_attention_heads=width // 32 if tiny else 16,
        num_key_value_heads=width // 32 if tiny else 16,
        vocab_size=512 if tiny else 32000,
        use_cache=False,
    )


def on_meta(config: ViTConfig | LlamaConfig) -> nn.Module:
    """The model without memory, to be sharded before it gets any."""
    with torch.device("meta"), no_init_weights():
        if isinstance(config, ViTConfig):
            return ViTForImageClassification(config)
        return LlamaForCausalLM(config)


def fill(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Give a module on "meta" memory, and weights that keep activations finite."""
    module.to_empty(device=device, recurse=recurse)
    with torch.no_grad():
        for parameter in module.parameters(recurse):
            _local(parameter).normal_(std=0.02)
        for buffer in module.buffers(recurse):
            buffer.zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The list of the transformer blocks, to be changed in place."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def fsdp2(model: nn.Module, mesh: DeviceMesh, device: torch.device, strategy: str = "full") -> nn.Module:
    """Shard a model on "meta" by fully_shard; it computes in bf16 from fp32 weights."""
    shard(model, mesh=mesh, strategy=strategy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fill(model, device)
    return model


def random_batch(
    config: ViTConfig | LlamaConfig, size: int, length: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Images and labels, or `size` sequences of `length` tokens."""
    if isinstance(config, ViTConfig):
        side = config.image_size
        assert isinstance(side, int)
        return {
            "pixel_values": torch.randn(size, 3, side, side, device=device),
            "labels": torch.zeros(size, dtype=torch.long, device=device),
        }
    tokens = torch.randint(config.vocab_size, (size, length), device=device)
    return {"input_ids": tokens, "labels": tokens}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def refuse_infinite_gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Compute the gradients of one more batch, after what was measured; the optimizer takes no step.

    Raises:
        ValueError: some are NaN or infinite. Such a setting measured kernels on numbers that no job has.
    """
    model(**batch).loss.backward()
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _local(parameter.grad).isfinite().all().item()
    ]
    model.zero_grad()
    if wrong:
        raise ValueError(f"the gradients of {len(wrong)} parameters are not finite, the first is {wrong[0]}")


def seconds_per_step(step: Callable[[], Any], steps: int, device: torch.device) -> list[float]:
    """How long each step takes on the device. The CPU may run ahead from step to step, as in training."""
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, and all values as they were measured."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {"median": middle, "quartiles": [low, high], "raw": list(values)}


def reset_memory(device: torch.device) -> None:
    """Peaks and counters begin anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def memory(device: torch.device) -> dict[str, float | int | None]:
    """Peaks in GiB and counters since reset_memory(); None on the CPU, whose allocator keeps none."""
    names = {
        "peak_reserved_gib": "reserved_bytes.all.peak",
        "peak_allocated_gib": "allocated_bytes.all.peak",
        "peak_active_gib": "active_bytes.all.peak",  # also what waits for another stream
        "num_alloc_retries": "num_alloc_retries",
        "num_ooms": "num_ooms",
        "num_device_alloc": "num_device_alloc",
    }
    stats = torch.cuda.memory_stats() if device.type == "cuda" else {}
    return {
        name: None if key not in stats else stats[key] / GIB if name.endswith("gib") else stats[key]
        for name, key in names.items()
    }

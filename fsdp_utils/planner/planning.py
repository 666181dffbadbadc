"""Predict how much memory and time a training takes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils.allocator.simulate import simulate_allocator
from fsdp_utils.planner import efficiency as rates
from fsdp_utils.planner.efficiency import BOUND, Efficiency
from fsdp_utils.planner.extrapolation import RECORDED, Irregular, extend
from fsdp_utils.planner.gpus import GPU, find_gpu
from fsdp_utils.planner.memory import memory_of
from fsdp_utils.planner.models import Inputs, Source, own_loss, source_of
from fsdp_utils.planner.result import Plan
from fsdp_utils.planner.roofline import time_of
from fsdp_utils.planner.simulated_rank import Setting, no_collection, record_one_rank
from fsdp_utils.planner.work_items import Recording, Work

OVERHEAD_GIB = 2.0  # for the CUDA context and NCCL's buffers: a cautious choice, not measured
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)


@no_collection()
def plan(
    model: Any,
    *,
    world_size: int,
    batch_size: int,
    seq_len: int | None = None,
    strategy: str = "full",
    gpu: str | GPU = "H100",
    mp_policy: MixedPrecisionPolicy | None = BF16,
    checkpointing: str | int | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    compiled: bool = False,
    offload: bool = False,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = FUSED_ADAMW,
    loss: Callable[[nn.Module, Any], torch.Tensor] = own_loss,
    inputs: Inputs | None = None,
    shard: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    ranks_per_host: int = 8,
    expandable_segments: bool = False,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Predict the memory and the step time of a training, by simulating one rank on the CPU.

    Two training steps of rank 0 run on fake tensors, which take no memory, in a `fake` process group, through
    PyTorch's own FSDP. Of each list of equal blocks four run, and are written out for all of them. The memory
    goes through the simulation of the CUDA allocator; computation and messages go through a replay, by what
    published runs reach of the GPU's rates (`planner.efficiency`). Not simulated: tensor, pipeline, context
    and expert parallelism, fp8, quantized weights.

    Args:
        model: an nn.Module with transformer blocks (it is not changed; on "meta" it needs no memory), a
            function of no arguments that builds one (called on "meta"), a transformers config, or a folder
            with a config.json. Frozen parameters have no gradients and no optimizer state. A config's
            attention is torch's, in one kernel, unless it asks for "eager"; its `use_cache` counts as False.
            A model has the cache that its config asks for, but not in blocks that are computed again.
        world_size: ranks.
        batch_size: samples in a step, of all ranks and micro-batches together.
        seq_len: tokens of a sample, for models that read tokens.
        strategy, mp_policy, checkpointing: as for `fsdp_utils.shard`. By default it computes and reduces in
            bf16; None as mp_policy leaves that to the dtype of the model, which its parameters have at rest.
        gpu: a name out of `fsdp_utils.planner.GPUS`, or a GPU.
        micro_batches: gradient accumulation: forward and backward that many times in a step.
        no_sync: reduce gradients in the last micro-batch alone, and keep those of whole units until then.
        compiled: each block by torch.compile.
        offload: parameters, gradients and the optimizer state lie on the host.
        optimizer: makes the optimizer of a list of parameters. The default is fused AdamW.
        loss: loss(model, batch) calls the sharded model and returns the loss; what it keeps elsewhere, such
            as the logits, stays in memory. The default is the model's own loss.
        inputs: for models that transformers does not know: inputs(batch_per_rank, seq_len) makes one rank's
            batch of one micro-batch, a tensor, a tuple or a dict.
        shard: shard(model, mesh) returns the model, sharded by your own code with FSDP1 or FSDP2. The mesh is
            2-D (replicate, shard) for "hybrid"; `mp_policy` then only describes the plan.
        ranks_per_host: GPUs of a host. More ranks than that are several hosts.
        expandable_segments: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        efficiency: shares of the GPU's rates that are reached; None takes the fitted ones.

    Returns:
        A `Plan`: memory in GiB, times in seconds.

    Raises:
        ValueError: an argument is unknown or does not go with the others; the model cannot be built without
            memory, or nobody knows what to call it with.
        RuntimeError: there is a process group already.

    Example::

        config = LlamaConfig()  # 6.7 billion parameters
        found = plan(config, world_size=8, batch_size=8, seq_len=2048, checkpointing="full")
        print(found)
        peak = found.peak
        print(f"{found.verdict}; the peak is in {peak}")
        # fits; the peak is in backward of ...
    """
    asked = dict(locals())
    setting = Setting(**{name: asked[name] for name in Setting.__dataclass_fields__})
    chip = find_gpu(gpu)
    _check(setting)
    source = source_of(model)
    at_rest = next(source.model.parameters()).dtype
    computes_in = (mp_policy and mp_policy.param_dtype) or at_rest
    if computes_in == torch.bfloat16 and not chip.bf16:
        raise ValueError(
            f"plan: a {chip.name} does not compute in bf16; expected mp_policy=None and a model in fp32"
        )
    recording, notes = _recorded(source, setting)
    works = [item for _, items in recording for item in items if isinstance(item, Work)]
    uncounted = sorted({work.uncounted for work in works} - {""})
    dtype = str(computes_in).removeprefix("torch.")
    masked = source.unlike or any(work.masked for work in works)
    differs = [f"gpu {chip.name}"] * (not rates.is_published(chip))
    differs += [f"computation in {dtype}"] * (dtype != "bfloat16") + ["offload"] * offload + source.unlike
    differs += ["a model without fused causal attention"] * (not masked)
    notes += _notes(uncounted, differs, setting)
    moments, trace, sharded = memory_of(recording, offload=offload)
    simulated = simulate_allocator(trace, expandable_segments=expandable_segments)
    reached = efficiency or rates.of_gpu(chip.name)
    reached = reached if compiled else replace(reached, fused=1.0)
    host_ratio = at_rest.itemsize / computes_in.itemsize if offload else 0.0
    return Plan(
        model=source.name,
        parameters=sum(parameter.numel() for parameter in source.model.parameters()),
        setting=setting,
        gpu=chip,
        computes_in=dtype,
        peak_reserved_gib=simulated.peak_reserved_gib,
        moments=moments,
        at_rest=sharded,
        available_gib=chip.usable_gib - OVERHEAD_GIB,
        timing=time_of(recording, chip, reached, setting, host_ratio),
        step_s_bound=time_of(recording, chip, BOUND, setting, host_ratio).step_s,
        notes=notes,
        unlike=differs,
        uncounted=uncounted,
    )


def _recorded(source: Source, setting: Setting) -> tuple[Recording, list[str]]:
    """Return one rank's recording of the whole model, and what to know about it."""
    if source.blocks <= RECORDED:
        return record_one_rank(source, setting, None), []
    if repeated := {name: count for name, count in source.stacks.items() if count > RECORDED}:
        with suppress(Irregular):
            return extend(record_one_rank(source, setting, RECORDED), repeated), []
    return record_one_rank(source, setting, None), ["all blocks were simulated, because they do not repeat"]


def _notes(uncounted: list[str], differs: list[str], setting: Setting) -> list[str]:
    """Say what is derived and not simulated, and how far off such predictions were on published runs."""
    kind = rates.kind(setting.compiled)
    (low, high), (least, most) = rates.STEP_RANGE[kind], rates.MEMORY_RANGE
    texts = {
        f"no speed is predicted: the operations of {', '.join(uncounted)} are not counted": uncounted,
        "offload is derived: what is sharded is taken off the GPU, copies over PCIe are added to each "
        "collective, and the optimizer's time on the host is left out": setting.offload,
        "compiled is derived: a block keeps what its matrix products give, the rest is fused": (
            setting.compiled
        ),
        "how far off this prediction may be is unknown: none of the published runs that tell plan's error "
        f"has {' or '.join(differs)}": differs,
        f"of {rates.RUNS[kind]} published {kind} runs, 80% took {low:.2f} to {high:.2f} times the predicted "
        f"step; of {rates.RUNS['memory']} published runs, eager and compiled, that tell their memory, "
        f"80% took {least:.2f} to {most:.2f} times the predicted": not differs,
    }
    return [text for text, applies in texts.items() if applies]


def _check(setting: Setting) -> None:
    """Refuse what is unknown, or does not go with something else."""
    for name in ("world_size", "batch_size", "micro_batches", "ranks_per_host", "seq_len"):
        value = getattr(setting, name)
        is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if not (is_whole and value >= 1) and (name, value) != ("seq_len", None):
            raise ValueError(f"plan: expected {name} to be a whole number from 1 on, found {value!r}")
    world, hosted, strategy = setting.world_size, setting.ranks_per_host, setting.strategy
    batch_size, parts = setting.batch_size, setting.micro_batches
    share = world * parts
    wrong = {
        f"expected a batch_size that {world} ranks in {parts} micro-batches can share, such as "
        f"{-(-batch_size // share) * share}, found {batch_size}": batch_size % share,
        f"expected world_size in multiples of {hosted}, the ranks_per_host, found {world}": (
            world > hosted and world % hosted
        ),
        f'strategy "hybrid" expects several hosts, more than {hosted} ranks, found {world}': (
            strategy == "hybrid" and world <= hosted
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"plan: {text}")

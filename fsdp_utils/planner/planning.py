"""plan: how much memory and time will this training take?"""

import math
import operator
from dataclasses import replace
from typing import Any

from fsdp_utils.allocator.simulate import simulate_allocator
from fsdp_utils.planner import efficiency
from fsdp_utils.planner.batch import LOSSES_OF_LOGITS, Inputs
from fsdp_utils.planner.extrapolation import RECORDED, Irregular, extend
from fsdp_utils.planner.gpus import GPU, find_gpu
from fsdp_utils.planner.memory import (
    at_rest_gib,
    moments_of,
    offload_activations,
    resized,
    trace_of,
)
from fsdp_utils.planner.models import Source, source_of
from fsdp_utils.planner.result import Plan
from fsdp_utils.planner.roofline import Timing, collective_s, time_of
from fsdp_utils.planner.simulated_rank import (
    APIS,
    ATTENTION,
    CHECKPOINTING,
    HELD_OUTPUTS,
    LOSSES,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    Setting,
    no_collection,
    record_one_rank,
)
from fsdp_utils.planner.work_items import OPTIMIZER, Recording, Send, Work
from fsdp_utils.sharding.wrapping import strategy_named

MAX_WORLD = 4096
MAX_UNLIKE = 500  # blocks that are all simulated, because they do not repeat
OVERHEAD_GIB = 2.0
# bytes of one number of the optimizer's state, where that is not the parameters' dtype; bitsandbytes keeps
# one fp32 scale for 256 numbers
STATE_BYTES = {"adamw_bf16": 2.0, "adamw_8bit": 1 + 4 / 256}


@no_collection()
def plan(
    model: Any,
    *,
    world_size: int,
    batch_size: int,
    seq_len: int | None = None,
    strategy: str = "full",
    gpu: str | GPU = "H100",
    api: str = "fsdp2",
    precision: str = "bf16",
    checkpointing: str = "none",
    optimizer: str = "adamw",
    offload: bool = False,
    micro_batches: int = 1,
    no_sync: bool = False,
    attention: str = "sdpa",
    loss: str = "full",
    held_output: str = "none",
    compiled: bool = False,
    activation_offload: bool = False,
    tensor_parallel: int = 1,
    ranks_per_host: int = 8,
    expandable_segments: bool = False,
    overhead_gib: float = OVERHEAD_GIB,
    inputs: Inputs | None = None,
    whole: bool = False,
) -> Plan:
    """Predict the memory and the step time of a training, by simulating one rank on the CPU.

    Two training steps of rank 0 run on fake tensors, which take no memory, in a `fake` process group of that
    many ranks, through PyTorch's own FSDP. Each list of equal blocks is run with four and written out for all
    of them, which is checked (`fsdp_utils.planner.extrapolation`). What is allocated goes through the
    simulation of the CUDA allocator; what is computed and sent goes through a replay, by the GPU's rates and
    by what published runs reach of them (`roofline`, `efficiency`). Not simulated: pipeline, context and
    expert parallelism, fp8, quantized weights.

    Args:
        model: an nn.Module with transformer blocks (it is not changed; on "meta" it needs no memory), a
            function of no arguments that builds one (called on "meta"), a transformers config, a folder with
            a config.json, or a model id of the hub ("org/name"). Frozen parameters, as of a model that peft
            has wrapped for LoRA, have no gradients and no optimizer's state.
        world_size: ranks, 1 to 4096.
        batch_size: samples in a step, of all ranks and micro-batches together.
        seq_len: tokens of a sample, for models that read tokens.
        strategy: "full", "grad_op" or "hybrid", or another spelling that `fsdp_utils.shard` takes.
        gpu: a name out of `fsdp_utils.planner.GPUS`, a GPU, or the arguments of one as a JSON object.
        api: "fsdp2" (fully_shard) or "fsdp1" (FullyShardedDataParallel).
        precision: "fp32"; "bf16": fp32 parameters, computes and reduces in bf16; "bf16_reduce_fp32": reduces
            in fp32; "pure_bf16": all is bf16; "pure_bf16_reduce_fp32": all but the reduction.
        checkpointing: "none"; "full": each block; "every_2" to "every_4": one block in 2, 3 or 4;
            "selective": each block, except for what torchtitan's list of operators keeps.
        optimizer: "adamw" (fused), "adamw_one_by_one" (foreach=False), "sgd" or "sgd_momentum"; "adamw_bf16"
            and "adamw_8bit": AdamW whose state takes 2 bytes, or 1, for each number.
        offload: parameters, gradients and the optimizer's state lie on the host.
        micro_batches: gradient accumulation: forward and backward that many times in a step.
        no_sync: reduce gradients in the last micro-batch alone, and keep those of whole units until then.
        attention: "sdpa", "flash", "flash1", "flash3" (kernels that never have the whole matrix) or "eager".
            A config that names eager attention itself keeps it under "sdpa".
        loss: "full": logits of all tokens, and of them a copy in fp32; "shifted": one more copy, without the
            last token, as transformers 4.44 made it; "half": cross entropy of the logits in the dtype of
            computation; "compiled": in one kernel, without a copy; "chunked": of an eighth of
            the tokens, computed again in backward; "fused": in chunks whose gradients are computed in
            forward.
        held_output: what the training loop still holds of the model's output during backward and until the
            next forward pass has returned, as after `output = model(**batch)` without `del output`: "none",
            "logits" or "fp32_logits" (where the model itself returns fp32); "logits_and_cache" and
            "fp32_logits_and_cache": also each block's keys and values, which transformers returns with
            use_cache=True.
        compiled: each block by torch.compile, under `fully_shard`.
        activation_offload: what a block keeps for backward moves to the host until then.
        tensor_parallel: GPUs that share each unit: heads, MLP and vocabulary are divided among them, the rest
            is not. As sizes: a model with that many fewer heads is simulated, on as many fewer ranks.
        ranks_per_host: GPUs of a host. More ranks than that are several hosts.
        expandable_segments: as PYTORCH_ALLOC_CONF=expandable_segments:True.
        overhead_gib: of what CUDA offers, what is not PyTorch's: the CUDA context, NCCL's buffers. The
            default is a cautious choice, not a measurement.
        inputs: for models that transformers does not know: inputs(batch_size, seq_len) makes one rank's
            batch of one micro-batch, a tensor, a tuple or a dict.
        whole: run all blocks instead of four of each list. Slow.

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
    if (
        isinstance(overhead_gib, bool)
        or not isinstance(overhead_gib, int | float)
        or not math.isfinite(overhead_gib)
    ):
        raise ValueError(f"plan: expected overhead_gib to be a number of GiB, found {overhead_gib!r}")
    chip = find_gpu(gpu)
    wanted = Setting(
        world_size=world_size,
        batch_size=batch_size,
        seq_len=seq_len,
        strategy=strategy_named(strategy),
        api=api,
        precision=precision,
        checkpointing=checkpointing,
        optimizer=optimizer,
        ranks_per_host=ranks_per_host,
        micro_batches=micro_batches,
        no_sync=no_sync,
        attention=attention,
        loss=loss,
        held_output=held_output,
        compiled=compiled,
        activation_offload=activation_offload,
        tensor_parallel=tensor_parallel,
    )
    for name, value in {
        "offload": offload,
        "whole": whole,
        "expandable_segments": expandable_segments,
    }.items():
        _flag(name, value)
    setting = _setting(wanted, chip)
    source = source_of(model, attention=attention, tensor_parallel=setting.tensor_parallel)
    recording, notes = recorded(source, setting, inputs, whole=whole)
    rest = PRECISIONS[precision][0]
    if optimizer in STATE_BYTES:
        recording = resized(recording, OPTIMIZER, STATE_BYTES[optimizer] / (rest.itemsize if rest else 4))
    moved_gib = 0.0
    if activation_offload:
        recording, moved_gib = offload_activations(recording, tuple(source.stacks))
        notes.append(
            "activations on the host are derived: they leave a block after it and come back one early"
        )
    if offload:
        notes.append(
            "offload is derived: what is sharded is taken off the GPU, copies over PCIe are added to each "
            "collective, and the optimizer's time on the host is left out"
        )
    if api == "fsdp1":
        notes.append("FSDP1's record_stream is not simulated: without limit_all_gathers it takes more memory")
    if compiled:
        notes.append(
            "compiled is derived: a block keeps what its matrix products give, and its other kernels are "
            "fused"
        )
    if tensor_parallel > 1:
        notes.append(
            "tensor parallelism is derived from sizes; sequence parallelism would divide the rest, too"
        )
    works = [entry for _, entries in recording for entry in entries if isinstance(entry, Work)]
    causal = [] if any(work.masked for work in works) else ["a model without fused causal attention"]
    differs = [
        *efficiency.unlike(chip, **{**vars(setting), "offload": offload}),
        *(source.unlike or causal),
    ]
    notes.append(efficiency.accuracy(compiled, differs=differs))
    moments = moments_of(recording, offload=offload)
    peak = max(moments, key=lambda moment: moment.total_gib)
    simulated = simulate_allocator(
        trace_of(recording, offload=offload), expandable_segments=expandable_segments
    )
    at_rest = at_rest_gib(recording)
    hosted = min(setting.ranks_per_host, setting.world_size)
    offload_ratio = (1.0 if rest or precision == "fp32" else 2.0) if offload else 0.0

    def timed(reached: efficiency.Efficiency) -> Timing:
        timing = time_of(
            recording,
            chip,
            reached,
            ranks_per_host=hosted,
            offload_ratio=offload_ratio,
            micro_batches=setting.micro_batches,
            micro_batch_s=_tensor_parallel_s(source, setting, chip, reached),
        )
        # there and back, beside the computation; of two micro-batches at most it is recorded
        moves = 2 * setting.micro_batches / min(setting.micro_batches, 2)
        copied_s = moves * moved_gib * 2**30 / (chip.host_link_gb_s * 1e9)
        return replace(timing, step_s=max(timing.step_s, copied_s))

    return Plan(
        model=source.name,
        parameters=source.parameters,
        setting=setting,
        gpu=chip,
        batch_size=batch_size,
        offload=offload,
        peak_allocated_gib=peak.total_gib,
        peak_reserved_gib=simulated.peak_reserved_gib,
        breakdown=peak.gib,
        moments=moments,
        at_rest=at_rest,
        host_gib=sum(at_rest.values()) if offload else 0.0,
        available_gib=chip.usable_gib - overhead_gib,
        timing=timed(efficiency.of_gpu(chip.name, compiled=compiled, attention=attention)),
        step_s_bound=timed(efficiency.BOUND).step_s,
        notes=notes,
        unlike=differs,
        uncounted=sorted({work.uncounted for work in works} - {""}),
    )


def recorded(
    source: Source, setting: Setting, inputs: Inputs | None = None, *, whole: bool = False
) -> tuple[Recording, list[str]]:
    """One rank's recording of the whole model, and what to know about it."""
    repeated = {name: count for name, count in source.stacks.items() if count > RECORDED}
    if not whole and repeated:
        try:
            return extend(record_one_rank(source, setting, RECORDED, inputs), repeated), []
        except Irregular:
            pass
    if source.blocks <= RECORDED or whole:
        return record_one_rank(source, setting, None, inputs), []
    if source.blocks > MAX_UNLIKE:
        raise ValueError(
            f"plan: expected at most {MAX_UNLIKE} blocks that do not repeat, found {source.blocks} in "
            f"{source.name}"
        )
    note = "all blocks were simulated, because they do not repeat"
    return record_one_rank(source, setting, None, inputs), [note]


def _setting(wanted: Setting, gpu: GPU) -> Setting:
    """Checked, and with the batch of one rank in one micro-batch.

    Raises:
        ValueError: something is unknown, or does not go with something else.
    """
    for what, known in (
        ("strategy", STRATEGIES),
        ("api", APIS),
        ("precision", tuple(PRECISIONS)),
        ("checkpointing", CHECKPOINTING),
        ("optimizer", tuple(OPTIMIZERS)),
        ("attention", ATTENTION),
        ("loss", LOSSES),
        ("held_output", HELD_OUTPUTS),
    ):
        if (value := getattr(wanted, what)) not in known:
            raise ValueError(f"plan: expected {what} out of {', '.join(known)}, found {value!r}")
    for what in ("no_sync", "compiled", "activation_offload"):
        _flag(what, getattr(wanted, what))
    world, hosted, shared, batches = (
        _at_least_1(name, getattr(wanted, name))
        for name in ("world_size", "ranks_per_host", "tensor_parallel", "micro_batches")
    )
    if world > MAX_WORLD:
        raise ValueError(f"plan: expected a world_size from 1 to {MAX_WORLD}, found {world}")
    if world % shared or min(world, hosted) % shared:
        raise ValueError(
            f"plan: expected tensor_parallel to divide the {min(world, hosted)} ranks of a host, found "
            f"{shared}"
        )
    batch_size = _at_least_1("batch_size", wanted.batch_size)
    share = world // shared * batches
    if batch_size % share:
        among = f"{world // shared} ranks" + (f" in {batches} micro-batches" if batches > 1 else "")
        raise ValueError(
            f"plan: expected a batch_size that {among} can share, such as "
            f"{math.ceil(batch_size / share) * share}, found {batch_size}"
        )
    if wanted.seq_len is not None and _whole_number("seq_len", wanted.seq_len) < 1:
        raise ValueError(f"plan: expected a seq_len from 1 on, or None, found {wanted.seq_len}")
    if world > hosted and world % hosted:
        raise ValueError(
            f"plan: expected world_size in multiples of {hosted}, the ranks_per_host, found {world}"
        )
    if wanted.strategy == "hybrid" and world <= hosted:
        raise ValueError(
            f'plan: strategy "hybrid" expects several hosts, more than {hosted} ranks, found {world}'
        )
    if "bf16" in wanted.precision and not gpu.bf16:
        raise ValueError(f'plan: a {gpu.name} does not compute in bf16; expected precision="fp32"')
    if wanted.no_sync and batches == 1:
        raise ValueError("plan: no_sync expects micro_batches of 2 or more, found 1")
    if wanted.held_output != "none" and wanted.loss not in LOSSES_OF_LOGITS:
        raise ValueError(
            f"plan: held_output expects a loss out of {', '.join(LOSSES_OF_LOGITS)}, found {wanted.loss!r}, "
            "where the model returns no logits"
        )
    if wanted.loss == "half" and "fp32" in wanted.held_output:
        raise ValueError(
            'plan: loss "half" is of logits in the dtype of computation, and held_output of logits in fp32; '
            'expected held_output="logits"'
        )
    if wanted.activation_offload and wanted.compiled:
        raise ValueError("plan: activation_offload is not simulated together with compiled")
    return replace(
        wanted,
        world_size=world // shared,
        batch_size=batch_size // share,
        ranks_per_host=hosted // shared,
        tensor_parallel=shared,
        micro_batches=batches,
    )


def _tensor_parallel_s(source: Source, setting: Setting, gpu: GPU, reached: efficiency.Efficiency) -> float:
    """Seconds of a micro-batch in which tensor parallelism sends: nothing computes meanwhile.

    Each block sums up what its GPUs have twice in forward, as often in backward, and twice more where
    forward is computed again (M. Shoeybi et al., "Megatron-LM", 2019).
    """
    gpus = setting.tensor_parallel
    if gpus == 1:
        return 0.0
    tokens = setting.batch_size * (setting.seq_len or 1)
    nbytes = tokens * source.config.hidden_size * (4 if setting.precision == "fp32" else 2)
    sends = sum(source.stacks.values()) * (4 if setting.checkpointing == "none" else 6)
    return sends * collective_s(Send("all_reduce", "", nbytes, gpus, gpus), gpu, gpus, reached)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"plan: expected {name} to be True or False, found {value!r}")


def _at_least_1(name: str, value: Any) -> int:
    if (number := _whole_number(name, value)) < 1:
        raise ValueError(f"plan: expected {name} from 1 on, found {number}")
    return number


def _whole_number(name: str, value: Any) -> int:
    """The value, if it is a whole number: True is none, and NumPy's are.

    Raises:
        ValueError: it is none, or larger than torch's sizes can be.
    """
    whole = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if whole is None or whole.bit_length() > 62:
        raise ValueError(f"plan: expected {name} to be a whole number below 2**62, found {value!r}")
    return whole

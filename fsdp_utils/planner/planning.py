"""plan: how much memory and time will this training take, on GPUs that I don't have?"""

import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_utils.allocator.simulate import simulate_allocator
from fsdp_utils.planner.accuracy import accuracy
from fsdp_utils.planner.advice import advice
from fsdp_utils.planner.extrapolation import RECORDED, Irregular, extend
from fsdp_utils.planner.gpus import GPU, find_gpu
from fsdp_utils.planner.memory import Moment, at_rest_gib, moments_of, size_text, trace_of
from fsdp_utils.planner.models import Inputs, Source, source_of
from fsdp_utils.planner.roofline import Timing, time_of
from fsdp_utils.planner.simulated_rank import (
    APIS,
    CHECKPOINTING,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    Setting,
    no_collection,
    record_one_rank,
)
from fsdp_utils.planner.work_items import Recording
from fsdp_utils.sharding.wrapping import strategy_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_WORLD = 4096
OVERHEAD_GIB = 2.0


@dataclass(frozen=True)
class Plan:
    """What a simulation of one rank predicts. All memory is of that rank, in GiB.

    Args:
        model: name of its class.
        parameters: of the whole model.
        setting: how the job is to be run.
        gpu: what it is to run on.
        batch_size: of all ranks together.
        offload: parameters, gradients and the optimizer's state lie on the host.
        peak_allocated_gib, peak_reserved_gib: as `torch.cuda.max_memory_allocated()` and `_reserved()`.
        breakdown: by category, what is allocated at the moment of the peak.
        moments: the peak of each part of two steps, with its own breakdown.
        at_rest: parameters, gradients and optimizer's state at their most, wherever they lie.
        host_gib: on the host for this rank; 0 without offload.
        available_gib: what CUDA offers (`GPU.usable_gib`) without `overhead_gib`.
        timing: of the second step.
        notes: what to know about this plan.
    """

    model: str
    parameters: int
    setting: Setting
    gpu: GPU
    batch_size: int
    offload: bool
    peak_allocated_gib: float
    peak_reserved_gib: float
    breakdown: dict[str, float]
    moments: list[Moment] = field(repr=False)
    at_rest: dict[str, float]
    host_gib: float
    available_gib: float
    timing: Timing = field(repr=False)
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Is what PyTorch reserves less than what the GPU has left for it?"""
        return self.peak_reserved_gib <= self.available_gib

    @property
    def peak(self) -> Moment:
        """When most is allocated."""
        return max(self.moments, key=lambda moment: moment.total_gib)

    @property
    def step_s(self) -> float:
        """By the GPU's rates. An eager step takes longer, as a rule; a compiled one may take less."""
        return self.timing.step_s

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.batch_size / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None where there is no sequence length."""
        length = self.setting.seq_len
        return None if length is None else self.samples_per_s * length

    @property
    def mfu(self) -> float:
        """Operations that the model needs, as a share of what the GPU's maker says that it can do."""
        rate = self.gpu.fp32_tflops if self.setting.precision == "fp32" else self.gpu.half_tflops
        return self.timing.model_flop / self.step_s / (rate * 1e12)

    @property
    def advice(self) -> list[str]:
        """What to change first; empty where it fits."""
        return [] if self.fits else advice(self)

    def __str__(self) -> str:
        setting = self.setting
        speed = f"{self.samples_per_s:,.1f} samples/s"
        if self.tokens_per_s is not None:
            speed = (
                f"{self.tokens_per_s:,.0f} tokens/s, {self.tokens_per_s / setting.world_size:,.0f} per GPU"
            )
        billions = self.parameters / 1e9
        number = f"{billions:.2f} billion" if billions >= 0.1 else f"{billions * 1000:.2f} million"
        # one unit for the whole table: MiB where GiB would be little more than zeros
        unit, factor = ("GiB", 1) if self.peak_reserved_gib >= 0.1 else ("MiB", 1024)
        of = f"{self.available_gib:.0f}" if unit == "GiB" else size_text(self.available_gib, 0)
        lines = [
            f"{self.model}, {number} parameters, on {setting.world_size} "
            f"{self.gpu.name}: {'fits' if self.fits else 'does not fit'} (simulated)",
            f"  {setting.api}, {setting.strategy}, {setting.precision}, activation checkpointing "
            f"{setting.checkpointing}, {setting.optimizer}, batch {self.batch_size}"
            + (f" of {setting.seq_len} tokens" if setting.seq_len else "")
            + (", offloaded" if self.offload else ""),
            f"  memory    {self.peak_allocated_gib * factor:.2f} {unit} allocated, "
            f"{self.peak_reserved_gib * factor:.2f} reserved of {of}; at the peak ({self.peak}):",
        ]
        for category, size in sorted(self.breakdown.items(), key=lambda pair: -pair[1]):
            if size * factor >= 0.005:
                lines.append(f"            {size * factor:8.2f}  {category}")
        if self.host_gib:
            lines.append(f"  host      {size_text(self.host_gib, 2)} for this rank")
        exposed_s = self.timing.exposed_s
        lines.append(
            f"  step      {self.step_s:.3g} s by the GPU's rates, of which {exposed_s:.2g} s only send: "
            f"{speed}, MFU {self.mfu:.0%}"
        )
        lines += [f"  advice    {text}" for text in self.advice]
        lines += [f"  note      {text}" for text in self.notes]
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Memory over the parts of the second step, by category. A simulation.

        Args:
            ax: where to draw; a new figure by default.
        """
        from fsdp_utils.planner.plot import plot_memory  # here: only who draws needs matplotlib

        return plot_memory(self, ax)


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
    ranks_per_host: int = 8,
    expandable_segments: bool = False,
    overhead_gib: float = OVERHEAD_GIB,
    inputs: Inputs | None = None,
    whole: bool = False,
) -> Plan:
    """Will it fit, and how fast will it be? A simulation of one rank, on the CPU, without memory for tensors.

    Two training steps of rank 0 run on fake tensors in a `fake` process group of that many ranks, through
    PyTorch's own FSDP. Each list of equal blocks is run with four and written out for all of them, which is
    checked (`fsdp_utils.planner.extrapolation`). What is allocated goes through the simulation of the CUDA
    allocator; what is computed and sent goes through a roofline and a replay (`step_time`).

    Args:
        model: an nn.Module with transformer blocks (it is not changed; on "meta" it needs no memory), a
            transformers config, or a folder with a config.json.
        world_size: ranks, 1 to 4096.
        batch_size: samples in a step, of all ranks together.
        seq_len: tokens of a sample, for models that read tokens.
        strategy: "full", "grad_op" or "hybrid", or another spelling that `fsdp_utils.shard` takes.
        gpu: a name out of `fsdp_utils.planner.GPUS`, or a GPU.
        api: "fsdp2" (fully_shard) or "fsdp1" (FullyShardedDataParallel).
        precision: "fp32"; "bf16": fp32 parameters, computes and reduces in bf16; "bf16_reduce_fp32": reduces
            in fp32; "pure_bf16": all is bf16.
        checkpointing: "none", or "full": each block.
        optimizer: "adamw" (fused), "adamw_one_by_one" (foreach=False), "sgd" or "sgd_momentum".
        offload: parameters, gradients and the optimizer's state lie on the host.
        ranks_per_host: GPUs of a host. More ranks than that are several hosts.
        expandable_segments: as PYTORCH_ALLOC_CONF=expandable_segments:True.
        overhead_gib: of what CUDA offers, what is not PyTorch's: the CUDA context, NCCL's buffers. The
            default is a cautious choice, not a measurement.
        inputs: for models that transformers does not know: inputs(batch_size, seq_len) makes one rank's
            batch, a tensor, a tuple or a dict.
        whole: run all blocks instead of four of each list. Slow.

    Returns:
        A `Plan`.

    Raises:
        ValueError: an argument is unknown or does not go with the others; the model cannot be built without
            memory, or nobody knows what to call it with.
        RuntimeError: there is a process group already.
    """
    if (
        isinstance(overhead_gib, bool)
        or not isinstance(overhead_gib, int | float)
        or not math.isfinite(overhead_gib)
    ):
        raise ValueError(f"plan: expected overhead_gib to be a number of GiB, found {overhead_gib!r}")
    source = source_of(model)
    chip = find_gpu(gpu)
    setting = _setting(
        Setting(
            world_size,
            batch_size,
            seq_len,
            strategy_named(strategy),
            api,
            precision,
            checkpointing,
            optimizer,
            ranks_per_host,
        ),
        chip,
        offload=offload,
    )
    recording, notes = recorded(source, setting, inputs, whole=whole)
    if offload:
        notes.append(
            "offload is derived: what is sharded is taken off the GPU, copies over PCIe are added to each "
            "collective, and the optimizer's time on the host is left out"
        )
    if api == "fsdp1":
        notes.append("FSDP1's record_stream is not simulated: without limit_all_gathers it takes more memory")
    notes.append(accuracy())
    moments = moments_of(recording, offload=offload)
    peak = max(moments, key=lambda moment: moment.total_gib)
    simulated = simulate_allocator(
        trace_of(recording, offload=offload), expandable_segments=expandable_segments
    )
    at_rest = at_rest_gib(recording)
    return Plan(
        source.name,
        source.parameters,
        setting,
        chip,
        batch_size,
        offload,
        peak.total_gib,
        simulated.peak_reserved_gib,
        peak.gib,
        moments,
        at_rest,
        sum(at_rest.values()) if offload else 0.0,
        chip.usable_gib - overhead_gib,
        time_of(
            recording,
            chip,
            ranks_per_host=min(ranks_per_host, world_size),
            offload_ratio=_offload_ratio(setting) if offload else 0.0,
        ),
        notes,
    )


def recorded(
    source: Source, setting: Setting, inputs: Inputs | None = None, *, whole: bool = False
) -> tuple[Recording, list[str]]:
    """One rank's recording of the whole model, and what to know about it."""
    repeated = {name: count for name, count in source.stacks.items() if count > RECORDED}
    if whole or not repeated:
        return record_one_rank(source, setting, None, inputs), []
    try:
        few = record_one_rank(source, setting, RECORDED, inputs)
        return extend(few, repeated), []
    except Irregular as reason:
        note = f"all blocks were simulated, because they do not repeat: {reason}"
        return record_one_rank(source, setting, None, inputs), [note]


def _setting(wanted: Setting, gpu: GPU, *, offload: bool) -> Setting:
    """Checked, and with the batch of one rank.

    Raises:
        ValueError: something is unknown, or does not go with something else.
    """
    for what, value, known in (
        ("strategy", wanted.strategy, STRATEGIES),
        ("api", wanted.api, APIS),
        ("precision", wanted.precision, tuple(PRECISIONS)),
        ("checkpointing", wanted.checkpointing, CHECKPOINTING),
        ("optimizer", wanted.optimizer, tuple(OPTIMIZERS)),
    ):
        if value not in known:
            raise ValueError(f"plan: expected {what} out of {', '.join(known)}, found {value!r}")
    world = _whole_number("world_size", wanted.world_size)
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"plan: expected a world_size from 1 to {MAX_WORLD}, found {world}")
    batch_size = _whole_number("batch_size", wanted.batch_size)
    if batch_size < 1 or batch_size % world:
        raise ValueError(
            f"plan: expected a batch_size that {world} ranks can share, such as "
            f"{max(1, math.ceil(batch_size / world)) * world}, found {batch_size}"
        )
    if wanted.seq_len is not None and _whole_number("seq_len", wanted.seq_len) < 1:
        raise ValueError(f"plan: expected a seq_len from 1 on, or None, found {wanted.seq_len}")
    if _whole_number("ranks_per_host", wanted.ranks_per_host) < 1:
        raise ValueError(f"plan: expected ranks_per_host from 1 on, found {wanted.ranks_per_host}")
    if world > wanted.ranks_per_host and world % wanted.ranks_per_host:
        raise ValueError(
            f"plan: expected world_size in multiples of {wanted.ranks_per_host}, the ranks_per_host, "
            f"found {world}"
        )
    if wanted.strategy == "hybrid" and world <= wanted.ranks_per_host:
        raise ValueError(
            f'plan: strategy "hybrid" expects several hosts, more than {wanted.ranks_per_host} ranks, found '
            f"{world}"
        )
    if "bf16" in wanted.precision and not gpu.bf16:
        raise ValueError(f'plan: a {gpu.name} does not compute in bf16; expected precision="fp32"')
    return Setting(
        world,
        batch_size // world,
        wanted.seq_len,
        wanted.strategy,
        wanted.api,
        wanted.precision,
        wanted.checkpointing,
        wanted.optimizer,
        wanted.ranks_per_host,
    )


def _whole_number(name: str, value: Any) -> int:
    """The value, if it is a whole number: True is none, and NumPy's are.

    Raises:
        ValueError: it is none, or larger than torch's sizes can be.
    """
    whole = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if whole is None or whole.bit_length() > 62:
        raise ValueError(f"plan: expected {name} to be a whole number below 2**62, found {value!r}")
    return whole


def _offload_ratio(setting: Setting) -> float:
    rest, compute, _ = PRECISIONS[setting.precision]
    return 1.0 if rest or not compute else 2.0

"""Plan: what the simulation of one rank predicts, in numbers, words and a picture."""

from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fsdp_utils.planner import efficiency, work_items
from fsdp_utils.planner.gpus import GPU
from fsdp_utils.planner.memory import Moment, size_text
from fsdp_utils.planner.plot import plot_memory
from fsdp_utils.planner.roofline import Timing
from fsdp_utils.planner.simulated_rank import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GROUPS = {
    "activations": (work_items.ACTIVATIONS, work_items.TEMPORARIES, work_items.INPUTS),
    "sharded": work_items.AT_REST,
    "whole": (
        work_items.GATHERED,
        work_items.GATHER_BUFFERS,
        work_items.WHOLE_GRADIENTS,
        work_items.REDUCE_BUFFERS,
    ),
}
_SPEED = ("step_s", "step_s_bound", "step_s_range", "samples_per_s", "tokens_per_s", "mfu")


@dataclass(frozen=True)
class Plan:
    """What a simulation of one rank predicts. All memory is of that rank, in GiB.

    Args:
        model: name of its class.
        parameters: of the whole model.
        setting: how the job is to be run.
        gpu: what it is to run on.
        batch_size: of all ranks and micro-batches together.
        offload: parameters, gradients and the optimizer's state lie on the host.
        peak_allocated_gib, peak_reserved_gib: as `torch.cuda.max_memory_allocated()` and `_reserved()`.
        breakdown: by category, what is allocated at the moment of the peak.
        moments: the peak of each part of two steps, with its own breakdown.
        at_rest: parameters, gradients and optimizer's state at their most, wherever they lie.
        host_gib: on the host for this rank; 0 without offload.
        available_gib: what CUDA offers (`GPU.usable_gib`) without `overhead_gib`.
        timing: of the second step, by the rates that such runs reach (`fsdp_utils.planner.efficiency`).
        step_s_bound: the same step by the GPU's rates alone, a roofline. An eager step takes longer; a
            compiled one, whose kernels are fused, may take less.
        notes: what to know about this plan.
        unlike: in what it differs from the published runs that tell the error of plans; empty where in
            nothing that is known to matter.
        uncounted: operators that seem to multiply matrices and have no formula for their operations. Then
            the plan has no speed, and what needs one raises ValueError.
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
    step_s_bound: float
    notes: list[str]
    unlike: list[str]
    uncounted: list[str]

    @property
    def fits(self) -> bool:
        """Whether what PyTorch reserves is at most what the GPU has left for it."""
        return self.peak_reserved_gib <= self.available_gib

    @property
    def headroom_gib(self) -> float:
        """GiB of the GPU that are left beside what PyTorch reserves; negative where it reserves more."""
        return self.available_gib - self.peak_reserved_gib

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit".

        "tight" spans the error of the published runs (`efficiency.MEMORY_RANGE`), whether they are like this
        one or not: from as much as may be reserved, if the prediction is low, to as little as must be
        allocated, if it is high. Between allocated and reserved a run goes on, but the allocator has to give
        memory back and ask for it again.
        """
        least, most = efficiency.MEMORY_RANGE
        if self.peak_reserved_gib * max(most, 1.0) <= self.available_gib:
            return "fits"
        return "tight" if self.peak_allocated_gib * min(least, 1.0) <= self.available_gib else "does not fit"

    @property
    def peak(self) -> Moment:
        """The moment at which the most is allocated."""
        return max(self.moments, key=lambda moment: moment.total_gib)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.setting.world_size * self.setting.tensor_parallel

    @property
    def step_s(self) -> float:
        """The best estimate of a step's duration, in seconds.

        Raises:
            ValueError: operations of the model are not counted.
        """
        if self.uncounted:
            raise ValueError(f"plan: {self._no_speed}")
        return self.timing.step_s

    @property
    def _no_speed(self) -> str:
        """Say why no speed is predicted."""
        return (
            f"no speed is predicted: the operations of {', '.join(self.uncounted)} are not counted. Memory "
            "is predicted"
        )

    @property
    def step_s_range(self) -> tuple[float, float] | None:
        """Seconds of a step between which 80% of the published runs of this kind fall (eager or compiled).

        None where no published run is of this kind (`unlike`).
        """
        if self.unlike:
            return None
        low, high = efficiency.STEP_RANGE[efficiency.kind(self.setting.compiled)]
        return low * self.step_s, high * self.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.batch_size / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks together; None where there is no sequence length."""
        length = self.setting.seq_len
        return None if length is None else self.samples_per_s * length

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, from 0 to 1, the operations of the model as a share of the GPU's rate."""
        rate = self.gpu.fp32_tflops if self.setting.precision == "fp32" else self.gpu.half_tflops
        return self.timing.model_flop / self.step_s / (rate * 1e12)

    @property
    def advice(self) -> list[str]:
        """What to change first, the largest part of the peak first; empty where it fits."""
        if self.fits:
            return []
        sizes = {
            name: sum(self.breakdown.get(category, 0.0) for category in group)
            for name, group in _GROUPS.items()
        }
        ways = {
            "activations": self._less_activations(),
            "sharded": self._less_shards(),
            "whole": self._less_whole(),
        }
        largest = sorted(sizes.items(), key=lambda pair: -pair[1])
        return [
            f"{size_text(-self.headroom_gib)} too much is reserved",
            *(f"{size_text(size)}: {ways[name]}" for name, size in largest),
            f"{size_text(self._stays_gib)} do not shrink with more ranks: {self._what_stays()}",
        ]

    @property
    def _stays_gib(self) -> float:
        """GiB of the peak that a rank has however many ranks there are."""
        shrinks = () if self.setting.strategy == "hybrid" else work_items.AT_REST
        return sum(size for category, size in self.breakdown.items() if category not in shrinks)

    def _what_stays(self) -> str:
        whole = sum(self.breakdown.get(category, 0.0) for category in _GROUPS["whole"])
        parts = {
            "activations of a micro-batch": self.breakdown.get(work_items.ACTIVATIONS, 0.0),
            "temporaries": self.breakdown.get(work_items.TEMPORARIES, 0.0),
            "units that are whole, with their gradients and buffers": whole,
        }
        if self.setting.strategy == "hybrid":
            parts["shards, which are of one host"] = self.peak_allocated_gib - sum(parts.values())
        return ", ".join(
            f"{size_text(size)} of {name}"
            for name, size in sorted(parts.items(), key=lambda p: -p[1])
            if size
        )

    def _less_activations(self) -> str:
        if self.setting.checkpointing == "none":
            return 'activations; checkpointing="full" keeps one input of each block'
        if self.setting.batch_size > 1:
            return f"activations; {self.setting.batch_size} samples at a time on a rank can be fewer"
        return "activations of a single sample; a shorter sequence, or context parallelism"

    def _less_shards(self) -> str:
        if self.setting.strategy == "hybrid":
            return 'shards; strategy="full" shares them among all ranks instead of those of a host'
        if self._stays_gib > self.available_gib:
            return "shards; twice the ranks halve them, but the rest alone is too much"
        return "shards; twice the ranks halve them"

    def _less_whole(self) -> str:
        if self.setting.no_sync:
            return "whole units and gradients; no_sync=False reduces gradients in every micro-batch"
        if self.setting.strategy == "grad_op":
            return 'whole units; strategy="full" frees them after forward'
        return "whole units; smaller units, or tensor parallelism"

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as JSON can hold them; those of a speed that is not predicted are None."""
        speed: dict[str, Any] = dict.fromkeys(("exposed_s", *_SPEED))
        if not self.uncounted:
            speed = {"exposed_s": self.timing.exposed_s, **{name: getattr(self, name) for name in _SPEED}}
        return {
            "model": self.model,
            "parameters": self.parameters,
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "setting": asdict(self.setting),
            "batch_size": self.batch_size,
            "offload": self.offload,
            "verdict": self.verdict,
            "fits": self.fits,
            "headroom_gib": self.headroom_gib,
            "available_gib": self.available_gib,
            "peak_allocated_gib": self.peak_allocated_gib,
            "peak_reserved_gib": self.peak_reserved_gib,
            "peak": str(self.peak),
            "breakdown": self.breakdown,
            "at_rest": self.at_rest,
            "host_gib": self.host_gib,
            **speed,
            "advice": self.advice,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        setting = self.setting
        billions = self.parameters / 1e9
        number = f"{billions:.2f} billion" if billions >= 0.1 else f"{billions * 1000:.2f} million"
        # one unit for the whole table: MiB where GiB would be little more than zeros
        unit, factor = ("GiB", 1) if self.peak_reserved_gib >= 0.1 else ("MiB", 1024)
        of = f"{self.available_gib:.0f}" if unit == "GiB" else size_text(self.available_gib, 0)
        options = [
            setting.api,
            setting.strategy,
            setting.precision,
            f"activation checkpointing {setting.checkpointing}",
            setting.optimizer,
            f"batch {self.batch_size}" + (f" of {setting.seq_len} tokens" if setting.seq_len else ""),
        ]
        options += [f"attention {setting.attention}"] if setting.attention != "sdpa" else []
        options += [f"{setting.loss} loss"] if setting.loss != "full" else []
        options += [f"{setting.held_output.replace('_', ' ')} held"] if setting.held_output != "none" else []
        options += [f"{setting.micro_batches} micro-batches"] if setting.micro_batches > 1 else []
        options += [f"tensor parallel {setting.tensor_parallel}"] if setting.tensor_parallel > 1 else []
        for text, used in {
            "no_sync": setting.no_sync,
            "compiled": setting.compiled,
            "activations offloaded": setting.activation_offload,
            "offloaded": self.offload,
        }.items():
            options += [text] if used else []
        lines = [
            f"{self.model}, {number} parameters, on {self.gpus} {self.gpu.name}: {self.verdict} (simulated)",
            *wrap(", ".join(options), 88, initial_indent="  ", subsequent_indent="  "),
            f"  memory    {self.peak_allocated_gib * factor:.2f} {unit} allocated, "
            f"{self.peak_reserved_gib * factor:.2f} reserved of {of}; at the peak",
            f"            ({self.peak}):",
        ]
        for category, size in sorted(self.breakdown.items(), key=lambda pair: -pair[1]):
            if size * factor >= 0.005:
                lines.append(f"            {size * factor:8.2f}  {category}")
        if self.host_gib:
            lines.append(f"  host      {size_text(self.host_gib, 2)} for this rank")
        lines += self._speed_lines()
        for name, texts in {"advice": self.advice, "note": self.notes}.items():
            for text in texts:
                lines += wrap(text, 88, initial_indent=f"  {name:10}", subsequent_indent=" " * 12)
        return "\n".join(lines)

    def _speed_lines(self) -> list[str]:
        if self.uncounted:
            return wrap(self._no_speed, 88, initial_indent="  speed     ", subsequent_indent=" " * 12)
        per_gpu = f"{self.samples_per_s:,.1f} samples/s"
        if self.tokens_per_s is not None:
            per_gpu = f"{self.tokens_per_s:,.0f} tokens/s, {self.tokens_per_s / self.gpus:,.0f} per GPU"
        likely = "" if self.step_s_range is None else ", likely {:.3g} to {:.3g}".format(*self.step_s_range)
        return [
            f"  step      {self.step_s:.3g} s{likely}; {self.step_s_bound:.3g} by the GPU's rates",
            f"            {self.timing.exposed_s:.2g} s of it only send",
            f"  speed     {per_gpu}, MFU {self.mfu:.0%}",
        ]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Memory over the parts of the second step, by category, and what the GPU has. A simulation.

        Args:
            ax: where to draw; a new figure by default.
        """
        second = [moment for moment in self.moments if moment.step == 2]
        return plot_memory(second, self.available_gib, self.gpu.name, ax)

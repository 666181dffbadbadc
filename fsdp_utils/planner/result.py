"""Plan: what the simulation of one rank predicts, in numbers, words and a picture."""

import math
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fsdp_utils._extras import need
from fsdp_utils.planner import efficiency, work_items
from fsdp_utils.planner.gpus import GPU
from fsdp_utils.planner.memory import Moment
from fsdp_utils.planner.roofline import Timing
from fsdp_utils.planner.simulated_rank import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# told apart with any kind of colour vision, light to dark within a group
COLORS: dict[str, str] = {
    work_items.PARAMETERS: "#0072B2",
    work_items.GRADIENTS: "#56B4E9",
    work_items.OPTIMIZER: "#004C77",
    work_items.BUFFERS: "#999999",
    work_items.INPUTS: "#CCCCCC",
    work_items.ACTIVATIONS: "#E69F00",
    work_items.GATHERED: "#009E73",
    work_items.WHOLE_GRADIENTS: "#CC79A7",
    work_items.GATHER_BUFFERS: "#8FD3BD",
    work_items.REDUCE_BUFFERS: "#E8C1D6",
    work_items.TEMPORARIES: "#F0E442",
}
_ACTIVATIONS = work_items.ACTIVATIONS, work_items.TEMPORARIES, work_items.INPUTS
_WHOLE = work_items.GATHERED, work_items.GATHER_BUFFERS, work_items.WHOLE_GRADIENTS, work_items.REDUCE_BUFFERS
# what makes a part of the peak smaller
_LESS = {
    'activations: checkpointing="full" keeps one input of each block; fewer samples or tokens at a time': (
        _ACTIVATIONS
    ),
    "shards: twice the ranks halve them": work_items.AT_REST,
    'full units, which do not shrink with more ranks: strategy="full", no_sync=False, smaller units': _WHOLE,
}


@dataclass(frozen=True)
class Plan:
    """The prediction of a simulated rank. All memory is that rank's, in GiB."""

    model: str  #: the name of its class
    parameters: int  #: their number
    setting: Setting  #: how the job is to be run, as `plan` was told
    gpu: GPU
    computes_in: str  #: the dtype of matrix products
    peak_reserved_gib: float  #: as `torch.cuda.max_memory_reserved()`
    moments: list[Moment] = field(repr=False)  #: the peak of each part of two steps, with its own breakdown
    at_rest: dict[str, float]  #: parameters, gradients and optimizer state at their most, wherever they lie
    available_gib: float  #: `GPU.usable_gib` less 2 GiB for the CUDA context and NCCL's buffers
    timing: Timing = field(repr=False)  #: of the second step, by the rates that published runs reach
    #: the same step by the GPU's rates alone, a roofline. An eager step takes longer; a compiled one, whose
    #: kernels are fused, may take less
    step_s_bound: float
    notes: list[str]  #: what to know about this plan
    unlike: list[str]  #: in what it differs from the published runs that tell the error of plans
    #: operators that seem to multiply matrices and have no formula: if any, `step_s` and its like are NaN
    uncounted: list[str]

    @property
    def host_gib(self) -> float:
        """GiB on the host for this rank; 0 without offload."""
        return sum(self.at_rest.values()) if self.setting.offload else 0.0

    @property
    def headroom_gib(self) -> float:
        """GiB of the GPU that are left beside what PyTorch reserves; negative where it reserves more."""
        return self.available_gib - self.peak_reserved_gib

    @property
    def fits(self) -> bool:
        """Whether what PyTorch reserves is at most what the GPU has left for it."""
        return self.headroom_gib >= 0

    @property
    def verdict(self) -> str:
        """Tell "fits", "tight" or "does not fit"; "tight" spans the error of published runs."""
        least, most = efficiency.MEMORY_RANGE
        if self.peak_reserved_gib * max(most, 1.0) <= self.available_gib:
            return "fits"
        return "tight" if self.peak_allocated_gib * min(least, 1.0) <= self.available_gib else "does not fit"

    @property
    def peak(self) -> Moment:
        """The moment at which the most is allocated."""
        return max(self.moments, key=lambda moment: moment.total_gib)

    @property
    def peak_allocated_gib(self) -> float:
        """As `torch.cuda.max_memory_allocated()`."""
        return self.peak.total_gib

    @property
    def breakdown(self) -> dict[str, float]:
        """GiB by category at the moment of the peak."""
        return self.peak.gib

    @property
    def step_s(self) -> float:
        """The best estimate of a step's duration, in seconds; NaN where operations are not counted."""
        return math.nan if self.uncounted else self.timing.step_s

    @property
    def step_s_range(self) -> tuple[float, float] | None:
        """Seconds between which 80% of the published runs of this kind fall; None where `unlike`."""
        if self.unlike:
            return None
        low, high = efficiency.STEP_RANGE[efficiency.kind(self.setting.compiled)]
        return low * self.step_s, high * self.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.setting.batch_size / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks together; None where there is no sequence length."""
        length = self.setting.seq_len
        return None if length is None else self.samples_per_s * length

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, from 0 to 1, the operations of the model as a share of the GPU's rate."""
        rate = self.gpu.fp32_tflops if self.computes_in == "float32" else self.gpu.half_tflops
        return self.timing.model_flop / self.step_s / (rate * 1e12)

    @property
    def advice(self) -> list[str]:
        """Name what to change, the largest part of the peak first; empty where it fits."""
        if self.fits:
            return []
        sizes = {text: sum(self.breakdown.get(name, 0.0) for name in names) for text, names in _LESS.items()}
        parts = [f"{sizes[text]:.1f} GiB of {text}" for text in sorted(sizes, key=lambda text: -sizes[text])]
        return [f"{-self.headroom_gib:.1f} GiB too much is reserved", *parts]

    def __str__(self) -> str:
        setting, billions = self.setting, self.parameters / 1e9
        number = f"{billions:.2f} billion" if billions >= 1 else f"{1e3 * billions:.2f} million"
        # one unit for the whole table: MiB where GiB would be little more than zeros
        unit, factor = ("GiB", 1) if self.peak_reserved_gib >= 0.1 else ("MiB", 1024)
        options = [
            setting.strategy if setting.shard is None else "sharded by your own function",
            f"computes in {self.computes_in}",
            f"batch {setting.batch_size}" + (f" of {setting.seq_len} tokens" if setting.seq_len else ""),
        ]
        if setting.checkpointing or setting.shard is None:
            options.insert(2, f"activation checkpointing {setting.checkpointing or 'none'}")
        options += [f"{setting.micro_batches} micro_batches"] if setting.micro_batches > 1 else []
        options += [name for name in ("no_sync", "compiled", "offload") if getattr(setting, name)]
        lines = [
            f"{self.model}, {number} parameters, on {setting.world_size} {self.gpu.name}: "
            f"{self.verdict} (simulated)",
            *wrap(", ".join(options), 88, initial_indent="  ", subsequent_indent="  "),
            f"  memory    {self.peak_allocated_gib * factor:.2f} {unit} allocated, "
            f"{self.peak_reserved_gib * factor:.2f} reserved of {self.available_gib:.0f} GiB; at the",
            f"            peak ({self.peak}):",
        ]
        for category, size in sorted(self.breakdown.items(), key=lambda pair: -pair[1]):
            if size * factor >= 0.005:
                lines.append(f"            {size * factor:8.2f}  {category}")
        lines += [f"  host      {self.host_gib * factor:.2f} {unit} for this rank"] if setting.offload else []
        if not self.uncounted:
            likely = ", likely {:.3g} to {:.3g}".format(*self.step_s_range) if self.step_s_range else ""
            speed = f"{self.samples_per_s:,.1f} samples/s"
            if self.tokens_per_s is not None:
                speed = f"{self.tokens_per_s:,.0f} tokens/s, "
                speed += f"{self.tokens_per_s / setting.world_size:,.0f} per GPU"
            lines += [
                f"  step      {self.step_s:.3g} s{likely}; {self.step_s_bound:.3g} by the GPU's rates",
                f"            {self.timing.exposed_s:.2g} s of it only send",
                f"  speed     {speed}, MFU {self.mfu:.0%}",
            ]
        for name, texts in (("advice", self.advice), ("note", self.notes)):
            for text in texts:
                lines += wrap(text, 88, initial_indent=f"  {name:10}", subsequent_indent=" " * 12)
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the memory over the parts of the second step, by category, and what the GPU has.

        Args:
            ax: where to draw; a new figure by default.
        """
        need("matplotlib", "notebooks")
        import matplotlib.pyplot as plt

        ax = ax or plt.subplots(figsize=(9, 3.4), layout="constrained")[1]
        moments = [moment for moment in self.moments if moment.step == 2]
        highest = max(moment.total_gib for moment in moments)
        heights = {name: [moment.gib.get(name, 0.0) for moment in moments] for name in COLORS}
        shown = [name for name in COLORS if max(heights[name]) > 0.01 * highest]
        looks: dict[str, Any] = {"colors": [COLORS[name] for name in shown], "step": "post", "linewidth": 0}
        ax.stackplot(range(len(moments)), [heights[name] for name in shown], labels=shown, **looks)
        phases = [moment.label.phase for moment in moments]
        for phase in ("forward", "backward", "optimizer"):
            begin = phases.index(phase)
            ax.axvline(begin, color="grey", lw=0.6, ls=":")
            ax.text(begin, 1.0, f" {phase}", transform=ax.get_xaxis_transform(), va="bottom", fontsize=8)
        if highest > 0.2 * self.available_gib:  # below, a line so far up would make the curve flat
            label = f"{self.gpu.name}: {self.available_gib:.0f} GiB for PyTorch"
            ax.axhline(self.available_gib, color="#D55E00", lw=1.2, ls="--", label=label)
        ax.set(xlim=(0, len(moments) - 1), ylim=(0, None), xticks=[])
        ax.set(xlabel="parts of one training step, in order", ylabel="GiB allocated, simulated")
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
        return ax

"""Memory through a step, as a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_utils._extras import need
from fsdp_utils.planner.memory import Moment
from fsdp_utils.planner.work_items import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# told apart with any kind of colour vision, light to dark within a group
COLORS: dict[str, str] = dict(
    zip(
        CATEGORIES,
        [
            "#0072B2",
            "#56B4E9",
            "#004C77",
            "#999999",
            "#CCCCCC",
            "#E69F00",
            "#009E73",
            "#CC79A7",
            "#8FD3BD",
            "#E8C1D6",
            "#F0E442",
        ],
        strict=True,
    )
)


def plot_memory(moments: Sequence[Moment], limit_gib: float, gpu: str, ax: "Axes | None" = None) -> "Axes":
    """Stacked by category, over the parts of a step, each at its peak; the GPU's limit is a line."""
    need("matplotlib", "notebooks")
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(9, 3.4), layout="constrained")[1]
    highest = max(moment.total_gib for moment in moments)
    shown = [c for c in CATEGORIES if max(m.gib.get(c, 0.0) for m in moments) > 0.01 * highest]
    heights = [[moment.gib.get(category, 0.0) for moment in moments] for category in shown]
    colors = [COLORS[c] for c in shown]
    ax.stackplot(range(len(moments)), heights, labels=shown, colors=colors, step="post", linewidth=0)
    # the optimizer and zero_grad are too short beside the blocks to be told apart
    phases = [moment.label.phase for moment in moments]
    updates = phases.index("optimizer") if "optimizer" in phases else len(phases)
    phases[updates:] = ["optimizer, zero_grad"] * (len(phases) - updates)
    phases = ["backward" if phase == "other" else phase for phase in phases]
    for begin, phase in enumerate(phases):
        if begin == 0 or phases[begin - 1] != phase:
            ax.axvline(begin, color="grey", lw=0.6, ls=":")
            ax.text(begin, 1.0, f" {phase}", transform=ax.get_xaxis_transform(), va="bottom", fontsize=8)
    if highest > 0.2 * limit_gib:  # below, a line so far up would make the curve flat
        ax.axhline(
            limit_gib, color="#D55E00", lw=1.2, ls="--", label=f"{gpu}: {limit_gib:.0f} GiB for PyTorch"
        )
    ax.set(xlim=(0, len(moments) - 1), ylim=(0, None), xticks=[])
    ax.set(xlabel="parts of one training step, in order", ylabel="GiB allocated, simulated")
    ax.legend(*_reversed(ax), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return ax


def _reversed(ax: "Axes") -> tuple[list, list]:
    handles, labels = ax.get_legend_handles_labels()
    return handles[::-1], labels[::-1]

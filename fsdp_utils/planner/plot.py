"""Memory through a step, as a picture."""

from typing import TYPE_CHECKING

from fsdp_utils._extras import need
from fsdp_utils.planner.work_items import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fsdp_utils.planner.planning import Plan

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


def plot_memory(plan: "Plan", ax: "Axes | None" = None) -> "Axes":
    """Stacked by category, over the parts of the second step, each at its peak."""
    need("matplotlib", "notebooks")
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(9, 3.4), layout="constrained")[1]
    moments = [moment for moment in plan.moments if moment.step == 2]
    shown = [
        c for c in CATEGORIES if max(m.gib.get(c, 0.0) for m in moments) > 0.01 * plan.peak_allocated_gib
    ]
    heights = [[moment.gib.get(category, 0.0) for moment in moments] for category in shown]
    ax.stackplot(
        range(len(moments)),
        heights,
        labels=shown,
        colors=[COLORS[c] for c in shown],
        step="post",
        linewidth=0,
    )
    phases = [moment.label.phase for moment in moments]
    for phase in ("forward", "backward", "optimizer"):
        if phase in phases:
            begin = phases.index(phase)
            ax.axvline(begin, color="grey", lw=0.6, ls=":")
            ax.text(begin, 1.0, f" {phase}", transform=ax.get_xaxis_transform(), va="bottom", fontsize=8)
    ax.set(xlim=(0, len(moments) - 1), ylim=(0, None), xticks=[], ylabel="GiB, simulated")
    ax.legend(*_reversed(ax), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return ax


def _reversed(ax: "Axes") -> tuple[list, list]:
    handles, labels = ax.get_legend_handles_labels()
    return handles[::-1], labels[::-1]

"""Which shares of a GPU's rates did published runs reach? Prints the fitted lines of planner/efficiency.py.

    python tools/fit_planner.py

Fits on the rows of notebooks/published.yaml whose split is "fit": the share of matrix products, for each kind
of GPU, on eager runs; then the share of bytes that torch.compile leaves, on compiled ones. Each is the value
with the least sum of absolute logarithms of predicted over published. The ranges are those of rows that were
left out, one source at a time, of a fit on the others, so that they hold for runs that were not fitted.
"""

import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.published import Prediction, predict_all
from fsdp_utils.planner import efficiency

FUSED = efficiency.of_gpu("").fused
SHARES = [n / 200 for n in range(60, 241)]


class Run(NamedTuple):
    """A row of a source, and what its step consists of, in seconds at the published rates."""

    source: str
    gpu: str  # as MATMUL names it
    compiled: bool
    products: float
    others: float
    fusible: float
    published: float

    def ratio(self, matmul: dict[str, float], fused: float) -> float:
        """Published step over predicted step."""
        fusible = self.fusible * (fused if self.compiled else 1.0)
        return self.published / (self.products / matmul[self.gpu] + fusible + self.others)


def main() -> int:
    found, refused = predict_all("fit")
    print("\n".join(f"# left out: {text}" for text in refused))
    memory = [1 / each.memory for each in found if each.memory and not each.not_comparable]
    runs = [run_of(each) for each in found if each.speed]
    matmul, fused = fit(runs)
    ratios: dict[str, list[float]] = {"eager": [], "compiled": []}
    for source in {run.source for run in runs}:
        others = [run for run in runs if run.source != source]
        without = fit(others)
        # a GPU that no other source has keeps the share of the fit on all
        shares = {**matmul, **{gpu: without[0][gpu] for gpu in {other.gpu for other in others}}}
        for run in runs:
            if run.source == source:
                ratios[efficiency.kind(run.compiled)].append(run.ratio(shares, without[1]))
    print("MATMUL =", {name: round(share, 3) for name, share in matmul.items()})
    print("fused:", round(fused, 3))
    print("STEP_RANGE =", {kind: middle(found) for kind, found in ratios.items()})
    print("MEMORY_RANGE =", middle(memory))
    print("PUBLISHED_GPUS =", tuple(sorted({each.plan.gpu.name for each in found})))
    print("RUNS =", {**{kind: len(found) for kind, found in ratios.items()}, "memory": len(memory)})
    return 0


def run_of(found: Prediction) -> Run:
    """What the step consists of: its matrix products and what can be fused, at the published rates."""
    timing, name, compiled = found.plan.timing, found.plan.gpu.name, found.plan.setting.compiled
    used = efficiency.of_gpu(name)
    assert found.speed is not None
    return Run(
        found.row["source"],
        next(begin for begin in efficiency.MATMUL if name.startswith(begin)),
        compiled,
        products=timing.products_s * used.matmul,
        others=found.plan.step_s - timing.products_s - timing.fusible_s,
        fusible=timing.fusible_s / (used.fused if compiled else 1.0),
        published=found.plan.step_s * found.speed,
    )


def fit(runs: list[Run]) -> tuple[dict[str, float], float]:
    """The share of matrix products by GPU, and what torch.compile leaves, in turn until both stay."""
    matmul, fused = dict(efficiency.MATMUL), FUSED
    for _ in range(5):
        for name in {run.gpu for run in runs}:
            here = [run for run in runs if run.gpu == name]
            eager = [run for run in here if not run.compiled] or here
            matmul[name] = best(eager, lambda share, name=name, fused=fused: ({**matmul, name: share}, fused))
        compiled = [run for run in runs if run.compiled]
        fused = best(compiled, lambda share: (matmul, share)) if compiled else fused
    return matmul, fused


def best(runs: list[Run], trial: Any) -> float:
    return min(SHARES, key=lambda share: sum(abs(math.log(run.ratio(*trial(share)))) for run in runs))


def middle(ratios: Iterable[float]) -> tuple[float, float]:
    """Between which 80% lie."""
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return round(tenths[0], 2), round(tenths[-1], 2)


if __name__ == "__main__":
    sys.exit(main())

"""Which shares of a GPU's rates did published runs reach? Prints the fitted lines of planner/efficiency.py.

    python tools/fit_planner.py

Fits on the rows of notebooks/published.yaml whose split is "fit": the share of matrix products, for each
kind of GPU, on eager runs; then the share of bytes that torch.compile leaves, on compiled ones. Each is the
value with the least sum of absolute logarithms of predicted over published. The ranges are those of rows
that were left out, one source at a time, of a fit on the others, so that they hold for runs that were not
fitted.
"""

import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.published import Prediction, predict, rows
from fsdp_utils.planner import efficiency

FUSED = efficiency.of_gpu("").fused
SHARES = [n / 200 for n in range(60, 241)]


@dataclass(frozen=True)
class Run:
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
    runs, memory = [], []
    gpus: set[str] = set()
    for row in rows("fit"):
        try:
            found = predict(row)
        except ValueError as error:
            print(f"# left out: {row['id']}: {error}")
            continue
        shown = f"# {row['id']:36} {found.plan.verdict:13}"
        if found.memory and not found.not_comparable:
            memory.append((row["source"], 1 / found.memory))
            shown += f" memory {found.memory:5.2f}"
        gpus.add(found.plan.gpu.name)
        if found.speed:
            runs.append(run_of(found))
            shown += f" speed {found.speed:5.2f} of the published, as it is"
        print(shown, flush=True)
    matmul, fused = fit(runs)
    ratios: dict[str, list[float]] = {"eager": [], "compiled": []}
    for source in {run.source for run in runs}:
        others = [run for run in runs if run.source != source]
        without = fit(others)
        for run in runs:
            # a GPU that no other source has keeps the share of the whole fit
            shares = {**matmul, **{gpu: without[0][gpu] for gpu in {other.gpu for other in others}}}
            if run.source == source:
                ratios[efficiency.kind(run.compiled)].append(run.ratio(shares, without[1]))
    print("MATMUL =", {**{name: round(share, 3) for name, share in matmul.items()}})
    print("fused:", round(fused, 3))
    print("STEP_RANGE =", {kind: middle(found) for kind, found in ratios.items()})
    print("MEMORY_RANGE =", middle([ratio for _, ratio in memory]))
    print("PUBLISHED_GPUS =", tuple(sorted(gpus)))
    print("RUNS =", {**{kind: len(found) for kind, found in ratios.items()}, "memory": len(memory)})
    return 0


def run_of(found: Prediction) -> Run:
    """What the step consists of: its matrix products and what can be fused, at the published rates."""
    timing, used = found.plan.timing, efficiency.of_gpu(found.plan.gpu.name)
    fused = used.fused if found.plan.setting.compiled else 1.0
    others = found.plan.step_s - timing.products_s - timing.fusible_s
    assert found.speed is not None
    name = next(begin for begin in efficiency.MATMUL if found.plan.gpu.name.startswith(begin))
    return Run(
        found.row["source"],
        name,
        found.plan.setting.compiled,
        timing.products_s * used.matmul,
        others,
        timing.fusible_s / fused,
        found.plan.step_s * found.speed,
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

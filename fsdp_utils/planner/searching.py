"""search: with which setting will the training do on the fewest GPUs?"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_utils.planner.gpus import GPU
from fsdp_utils.planner.memory import size_text
from fsdp_utils.planner.planning import plan
from fsdp_utils.planner.result import Plan


@dataclass(frozen=True)
class SearchResult:
    """What was tried, and what came of it.

    Args:
        best: None where nothing meets what was asked for.
        tried: in the order of the search.
    """

    best: Plan | None
    tried: list[Plan]

    def __str__(self) -> str:
        table = "\n".join([_HEAD, *map(_row, self.tried)])
        if self.best is None:
            closest = max(self.tried, key=lambda found: found.headroom_gib)
            said = f"none of {len(self.tried)} settings will do (simulated); the one with most room"
            text = f"{said}:\n{closest}"
        else:
            text = f"the cheapest of {len(self.tried)} settings tried (simulated):\n{self.best}"
        return f"{table}\n\n{text}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "best": None if self.best is None else self.best.to_dict(),
            "tried": [found.to_dict() for found in self.tried],
        }


_HEAD = "GPUs             strategy  checkpointing   batch  reserved  samples/s  verdict"


def _row(found: Plan) -> str:
    setting = found.setting
    rate = "-" if found.uncounted else f"{found.samples_per_s:,.1f}"
    return (
        f"{found.gpus:4} {found.gpu.name:11} {setting.strategy:9} {setting.checkpointing:13} "
        f"{found.batch_size:7}  {size_text(found.peak_reserved_gib):>8} "
        f"{rate:>10}  {found.verdict}"
    )


def search(
    model: Any,
    *,
    world_sizes: Iterable[int],
    gpu: str | GPU = "H100",
    batch_per_rank: Sequence[int] = (1, 2, 4, 8),
    batch_size: int | None = None,
    strategies: Sequence[str] = ("full", "grad_op"),
    checkpointing: Sequence[str] = ("none", "full"),
    tokens_per_s: float | None = None,
    samples_per_s: float | None = None,
    progress: bool = False,
    **options: Any,
) -> SearchResult:
    """Search for the setting that needs the fewest GPUs, and of these for the fastest.

    Numbers of GPUs are tried from the smallest on, and the search ends at the first that will do. A larger
    batch is not tried where a smaller one does not fit. Speeds are best estimates (`Plan.step_s_range`).

    Args:
        model: as for `plan`.
        world_sizes: numbers of GPUs to try.
        gpu: what they are.
        batch_per_rank: samples of one rank in one micro-batch; ranks of tensor parallelism share theirs.
        batch_size: samples of all ranks together, the only batch to try; None tries `batch_per_rank`.
        strategies, checkpointing: as for `plan`.
        tokens_per_s, samples_per_s: of all ranks, to be reached; None asks only for what fits.
        progress: write a line to stderr for each setting that was tried.
        options: for `plan`.

    Returns:
        A `SearchResult`.

    Raises:
        ValueError: as `plan`; or there is nothing to try; or tokens_per_s for a model that reads none; or a
            rate for one whose time is unknown (`Plan.step_s`).
        RuntimeError: as `plan`.

    Example::

        result = search(
            config, world_sizes=[8, 16], batch_size=16, seq_len=1024, checkpointing=["full"]
        )
        print(result.best.gpus, result.best.setting.strategy)  # 8 grad_op
    """
    for name, rate in (("tokens_per_s", tokens_per_s), ("samples_per_s", samples_per_s)):
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
            raise ValueError(f"search: expected {name} to be a number above 0, or None, found {rate!r}")
    tried: list[Plan] = []
    for world_size in sorted(world_sizes):
        will_do: list[Plan] = []
        apart = world_size * options.get("micro_batches", 1) // options.get("tensor_parallel", 1)
        batches = [batch_size] if batch_size is not None else [n * apart for n in sorted(batch_per_rank)]
        for strategy in strategies:
            for checkpoint in checkpointing:
                for batch in batches:
                    found = plan(
                        model,
                        world_size=world_size,
                        batch_size=batch,
                        gpu=gpu,
                        strategy=strategy,
                        checkpointing=checkpoint,
                        **options,
                    )
                    if found.uncounted and (tokens_per_s or samples_per_s):
                        raise ValueError(
                            "search: expected a model whose time is known where a rate is asked for, found "
                            f"operators without counted operations: {', '.join(found.uncounted)}"
                        )
                    if tokens_per_s is not None and found.tokens_per_s is None:
                        raise ValueError(
                            "search: expected samples_per_s, as the model reads no tokens, found tokens_per_s"
                        )
                    tried.append(found)
                    if progress:
                        head = f"{_HEAD}\n" if len(tried) == 1 else ""
                        print(f"{head}{_row(found)}", file=sys.stderr, flush=True)
                    if not found.fits:
                        break
                    if _fast_enough(found, tokens_per_s, samples_per_s):
                        will_do.append(found)
        if will_do:
            return SearchResult(max(will_do, key=lambda p: 0.0 if p.uncounted else p.samples_per_s), tried)
    if not tried:
        raise ValueError(
            "search: expected at least one world_size, strategy, checkpointing and batch, found none"
        )
    return SearchResult(None, tried)


def _fast_enough(found: Plan, tokens_per_s: float | None, samples_per_s: float | None) -> bool:
    if tokens_per_s is not None and (found.tokens_per_s or 0.0) < tokens_per_s:
        return False
    return samples_per_s is None or found.samples_per_s >= samples_per_s

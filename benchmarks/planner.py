"""How long does a plan take, and how near is it to published runs?

    python benchmarks/planner.py            --keep also writes notebooks/predictions.json, for lesson 14

The rows of notebooks/published.yaml that no constant was fitted on: predicted against published, and how
many of them are left out for which reason. Exits with 1 if a limit that the project promises is broken.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import LlamaConfig

from benchmarks.machine import describe, limits, table
from benchmarks.published import FILE, Prediction, left_out, predict_all
from fsdp_utils import plan
from fsdp_utils.planner import STEP_RANGE
from fsdp_utils.planner.efficiency import kind

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SEVENTY: dict[str, Any] = dict(zip(WIDTHS, (8192, 28672, 64, 8, 32000), strict=True))
FOUR_HUNDRED: dict[str, Any] = dict(zip(WIDTHS, (16384, 53248, 128, 8, 128256), strict=True))


def cost_of(*arguments: str) -> tuple[float, float]:
    """Seconds and GiB of a Python process, from its start to its end; GiB of the largest so far."""
    begin = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, timeout=120)
    seconds = time.perf_counter() - begin
    if ended.returncode not in (0, 1):  # 1: planned, and does not fit
        raise RuntimeError(f"{' '.join(arguments)} ended with {ended.returncode}")
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def command_on_1024(sizes: dict[str, int], layers: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**sizes, num_hidden_layers=layers).save_pretrained(folder)
        job = ["--world-size", "1024", "--batch-size", "1024", "--seq-len", "4096", "--checkpointing", "full"]
        return cost_of("-m", "fsdp_utils.planner", folder, *job)


def of_published(each: Prediction) -> list[str]:
    """A row of the table."""

    def off(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio - 1:+.0%}"

    # of runs that differ from the fitted ones, too, for which `plan` itself states no range
    published, (low, high) = each.row["published"], STEP_RANGE[kind(each.plan.setting.compiled)]
    inside = "" if each.speed is None else ("yes" if low <= each.speed <= high else "no")
    speed = f"{published['tokens_per_s_per_gpu']:,.0f}" if each.speed else ""
    memory = f"{published['peak_memory']['gib']:.1f}" if each.memory else ""
    said = [published["outcome"], each.plan.verdict]
    return [each.row["id"], speed, off(each.speed), inside, memory, off(each.memory), *said]


def keep_for_the_lesson(predictions: list[Prediction]) -> None:
    """Write predicted and published of every run to notebooks/predictions.json."""

    def beside(ratio: float | None, published: float) -> list[float] | None:
        return None if ratio is None else [round(ratio * published, 3), published]

    kept = []
    for each in predictions:
        published = each.row["published"]
        row = {name: each.row[name] for name in ("id", "source", "split", "gpu")}
        row["kind"] = kind(each.plan.setting.compiled)
        row["tokens_per_s"] = beside(each.speed, published["tokens_per_s_per_gpu"])
        row["peak_gib"] = beside(each.memory, (published["peak_memory"] or {"gib": 0.0})["gib"])
        kept.append({**row, "verdict": each.plan.verdict, "outcome": published["outcome"]})
    command = "python benchmarks/planner.py --keep"
    text = json.dumps({"command": command, "torch": torch.__version__, "rows": kept}, indent=1)
    FILE.with_name("predictions.json").write_text(text + "\n", encoding="utf-8")


def seconds_of(layers: int) -> float:
    config = LlamaConfig(**SEVENTY, num_hidden_layers=layers)
    begin = time.perf_counter()
    plan(config, world_size=1024, batch_size=1024, seq_len=4096, checkpointing="full")
    return time.perf_counter() - begin


def main() -> int:
    _, imported_gib = cost_of("-c", "import torch, transformers")
    command_s, command_gib = command_on_1024(SEVENTY, 80)
    largest_s, largest_gib = command_on_1024(FOUR_HUNDRED, 126)
    # a plan takes a second or two, and only the lesson needs those of the rows that were fitted
    everything, refused = predict_all(None if "--keep" in sys.argv else "held_out")
    predictions = [each for each in everything if each.row["split"] == "held_out"]
    if "--keep" in sys.argv:
        keep_for_the_lesson(everything)
    # in turn, so that a busy moment of the machine meets both
    times = [(seconds_of(8), seconds_of(80)) for _ in range(3)]
    growth = median(many for _, many in times) / median(few for few, _ in times)
    speeds = [abs(each.speed - 1) for each in predictions if each.speed is not None]
    with_memory = [each for each in predictions if each.memory is not None]
    apart = [each for each in with_memory if each.not_comparable]
    memories = [abs(each.memory - 1) for each in with_memory if not each.not_comparable]
    wrong = [each.row["id"] for each in predictions if each.is_wrongly_said]

    print(describe("transformers"))
    counts = f"{len(predictions)}, of {len(speeds)} the speed, of {len(with_memory)} the peak memory"
    print(f"published runs that were not fitted: {counts}\n")
    head = ["run", "tokens/s and GPU", "off", "in range", "GiB", "off", "outcome", "said"]
    print(table(head, [of_published(each) for each in predictions]))
    for reason, count in left_out("held_out").items():
        print(f"left out, {count} runs: {reason}")
    for text in refused:
        print(f"not simulated: {text}")
    for each in apart:
        print(f"memory not comparable: {each.row['id']} ({each.memory - 1:+.0%}): {each.not_comparable}")
    print(f"\nimporting torch and transformers alone takes {imported_gib:.3f} GiB")
    return limits(
        {
            f"tokens/s off in the median: {median(speeds):.1%} (limit 10%)": median(speeds) <= 0.10,
            f"tokens/s off at worst: {max(speeds):.1%} (limit 25%)": max(speeds) <= 0.25,
            f"peak memory off in the median of {len(memories)} comparable rows: {median(memories):.1%} "
            f"(limit 5%), at worst {max(memories):.1%}": median(memories) <= 0.05,
            f"wrong about what fits: {', '.join(wrong) or 'none'} (limit none)": not wrong,
            f"70B on 1024 ranks, the whole command: {command_s:.1f} s (limit 5)": command_s <= 5,
            f"70B on 1024 ranks, the whole command: {command_gib:.3f} GiB (limit 0.4)": command_gib <= 0.4,
            f"405B on 1024 ranks, the whole command: {largest_s:.1f} s (limit 15)": largest_s <= 15,
            f"405B on 1024 ranks, the whole command: {largest_gib:.2f} GiB (limit 1)": largest_gib <= 1,
            f"80 layers take {growth:.2f} times as long as 8 (limit 1.5)": growth <= 1.5,
        }
    )


if __name__ == "__main__":
    sys.exit(main())

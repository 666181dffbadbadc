"""What does the training program cost beside a loop written by hand, and beside Hugging Face's Trainer?

    python benchmarks/train.py [--rounds 5] [--ranks 2]

The same Llama, the same batches in the same order, the same AdamW and clipping, on the same ranks: by
fsdp_utils.train, and by transformers' Trainer with accelerate's FSDP2, each of which takes turns with a bare
FSDP2 loop, step by step. A step lasts from one call of the optimizer to the next. Exits with 1 if the program
takes more than 2% longer than the bare loop, or if the losses differ.
"""

import contextlib
import importlib.util
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.machine import describe, limits, options, table
from fsdp_utils import run_on_ranks
from fsdp_utils.train import DataConfig, OptimConfig, ParallelConfig, TrainConfig, rows_at, train

COST = 1.02  # the limit: the program's step, against the bare loop's
STEP_S = 0.100  # for steps of at least that
STEPS, WARM_UP = 48, 4
BATCH, LENGTH, RATE = 4, 80, 1e-3
LLAMA: dict[str, Any] = {"vocab_size": 256, "hidden_size": 192, "intermediate_size": 512}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": LENGTH}


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def task() -> SimpleNamespace:
    """Random tokens, as many as a run sees."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(LLAMA["vocab_size"], (STEPS * BATCH, LENGTH), generator=generator)
    rows = {"input_ids": tokens, "labels": tokens}
    return SimpleNamespace(train=rows, test=None, predicts_next=True, build=build)


def settings(folder: Path, name: str) -> TrainConfig:
    """The run that all three do."""
    return TrainConfig(
        out=str(folder / name),
        data=DataConfig(source="benchmarks.train:task", batch_size=BATCH),
        optim=OptimConfig(lr=RATE, decay="none", weight_decay=0.0),
        parallel=ParallelConfig(device="cpu"),
        steps=STEPS,
        eval_every=STEPS,
        save_every=STEPS,
    )


# --- the three -------------------------------------------------------------------------------------------


def by_the_program(config: TrainConfig) -> list[float]:
    """fsdp_utils.train with all that it does: metrics, watchdog, memory, signals, the last checkpoint."""
    train(config)
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def by_hand(config: TrainConfig, losses: list[float]) -> Iterator[None]:
    """What one would write if a loop were all that is needed. Pauses before each call of the optimizer."""
    model: Any = build()
    samples = task().train
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(STEPS):
        rows = rows_at(step * BATCH, BATCH, STEPS * BATCH, config.seed).chunk(dist.get_world_size())
        loss = model(**{name: tensor[rows[dist.get_rank()]] for name, tensor in samples.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def by_the_trainer(config: TrainConfig) -> list[float]:
    """transformers' Trainer, with FSDP2 as accelerate sets it up."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    model, rows = build(), task().train
    order = rows_at(0, STEPS * BATCH, STEPS * BATCH, config.seed).tolist()
    samples = [{name: tensor[row] for name, tensor in rows.items()} for row in order]

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None) -> SequentialSampler:
            return SequentialSampler(samples)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # accelerate's AcceleratorState chooses FSDP on accelerators only; here it is told to on a CPU.
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
            self.is_fsdp_enabled = True

    arguments = TrainingArguments(
        output_dir=config.out,
        use_cpu=True,
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=samples)  # pyright: ignore[reportArgumentType]
    trainer.train()
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    if kinds != {"DTensor"}:
        raise RuntimeError(f"the Trainer was to train a model sharded by FSDP2, its parameters are {kinds}")
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


WAYS: dict[str, Callable[[TrainConfig], list[float]]] = {
    "fsdp_utils.train": by_the_program,
    "Trainer, accelerate's FSDP2": by_the_trainer,
}


# --- measuring -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def taking_turns(bare: Iterator[None]) -> Iterator[tuple[list[float], list[float]]]:
    """The seconds of each step of what runs in the block, and of the bare loop's.

    Where the other is about to call its optimizer, it waits, and the bare loop goes on to the same place. So
    what slows the machine down slows both alike, and a ratio of 2% can be told from it.
    """
    seconds: list[float] = []
    bare_seconds: list[float] = []
    left = time.perf_counter()
    is_bare = False

    def turn(*_: Any) -> None:
        nonlocal left, is_bare
        if is_bare:  # the bare loop's own optimizer
            return
        begun = time.perf_counter()
        seconds.append(begun - left)
        is_bare = True
        next(bare)
        is_bare = False
        left = time.perf_counter()
        bare_seconds.append(left - begun)

    hook = register_optimizer_step_pre_hook(turn)
    try:
        yield seconds, bare_seconds
    finally:
        hook.remove()


def measure(ways: list[str], rounds: int, folder: str) -> dict[str, list[tuple[list[float], ...]]]:
    """By way and turn: the seconds of its steps and of the bare loop's in between, and the losses of both."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: dict[str, list[tuple[list[float], ...]]] = {way: [] for way in ways}
    for turn, way in itertools.product(range(rounds), ways):
        config = settings(Path(folder), f"{turn} {way}")
        bare_losses: list[float] = []
        bare = by_hand(config, bare_losses)
        with contextlib.ExitStack() as during:
            log = during.enter_context((Path(folder) / f"log{dist.get_rank()}").open("a"))
            during.enter_context(contextlib.redirect_stdout(log))
            during.enter_context(contextlib.redirect_stderr(log))
            seconds, bare_seconds = during.enter_context(taking_turns(bare))
            losses = WAYS[way](config)
        next(bare, None)  # its last step is not done yet
        mean = torch.tensor(bare_losses, dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(mean)
        found[way].append((seconds[WARM_UP:], bare_seconds[WARM_UP:], losses, mean.tolist()))
    return found


def main() -> int:
    asked = options(__doc__, rounds=5, ranks=2)
    there = importlib.util.find_spec("accelerate") is not None
    ways = [way for way in WAYS if there or way != "Trainer, accelerate's FSDP2"]

    print(describe("transformers", *["accelerate"] * there))
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_on_ranks(measure, ways, asked.rounds, folder, world_size=asked.ranks, timeout=600)
    found = by_rank[0]
    rows, held = [], {}
    for way in ways:
        turns = [statistics.median(seconds) / statistics.median(bare) for seconds, bare, *_ in found[way]]
        ratio, spread = statistics.median(turns), f"{min(turns):.3f}-{max(turns):.3f}"
        step_s, bare_s = (
            statistics.median(itertools.chain.from_iterable(turn[i] for turn in found[way])) for i in (0, 1)
        )
        rows.append([way, f"{1e3 * step_s:.1f}", f"{1e3 * bare_s:.1f}", f"{ratio:.3f}", spread])
        *_, losses, bare_losses = found[way][-1]
        apart = max(abs(mine - theirs) for mine, theirs in zip(losses, bare_losses, strict=True))
        held[f"losses of {way} differ from the bare loop's by {apart:.1e} (limit 1e-3)"] = apart <= 1e-3
        if way == "fsdp_utils.train":
            held[f"the program takes {ratio:.3f} of the bare loop's time (limit {COST})"] = ratio <= COST
            held[f"for a step of {1e3 * bare_s:.0f} ms (at least {1e3 * STEP_S:.0f})"] = bare_s >= STEP_S
    print(f"rank 0 of {asked.ranks}: medians of {asked.rounds} turns of {STEPS - WARM_UP} steps each\n")
    print(table(["", "ms/step", "bare loop", "ratio", "of the turns"], rows))
    if not there:
        print("\nNot measured: transformers' Trainer, as accelerate is not installed.")
    return limits(held)


if __name__ == "__main__":
    sys.exit(main())

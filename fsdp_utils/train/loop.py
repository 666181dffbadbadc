"""The training program: FSDP2 from a laptop to a cluster, resumed after failures.

    torchrun --nproc-per-node 2 -m fsdp_utils.train --out runs/a \\
        --data.source fsdp_utils.lessons.tasks:dates_llama --steps 200

Started again, the program resumes from its newest whole checkpoint, on any number of ranks. SIGTERM and
SIGUSR1 make it save and exit with code 75. `config.py` documents the settings.
"""

import math
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from fsdp_utils.checkpoint import CheckpointError
from fsdp_utils.distributed.identity import get_local_rank, get_rank, get_world_size
from fsdp_utils.memory import Memory_Maximizer
from fsdp_utils.precision import bf16_support
from fsdp_utils.train.checkpoints import Checkpoints, lock_directory, resume
from fsdp_utils.train.config import ConfigError, OptimConfig, TrainConfig, check, micro_batches, parse
from fsdp_utils.train.data import Data, check_same_data, collate, load_data, rows_at
from fsdp_utils.train.faults import NotFinite, StopSignal, Watchdog, check_finite
from fsdp_utils.train.metrics import RunLog
from fsdp_utils.train.model import build_model, parallelize
from fsdp_utils.train.ranks import process_group, ranks, sum_of_all, training_device

_EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: come again, and it goes on


class Progress(NamedTuple):
    """The position of a run."""

    step: int  # steps of the optimizer that are done
    seen: int  # samples that were trained on, by all ranks together
    stopped: bool = False  # whether a signal ended it before its last step


def train(config: TrainConfig) -> Progress:
    """Train as configured, from the newest checkpoint in the run's directory. Every rank must call it.

    Returns:
        The position at which the run ended.

    Raises:
        ConfigError: it cannot begin, or the settings differ between ranks; the same on every rank.
        CheckpointError: the newest checkpoint is of another model, or the last save failed.
        NotFinite: the loss or the gradient is NaN or infinite; names ranks and samples.
    """
    out, device = Path(config.out), training_device(config.parallel.device)
    with Watchdog(out / "hang", config.timeout_s) as watchdog, StopSignal() as stop:
        ranks().same("setting", {name: str(value) for name, value in asdict(config).items()})
        with ranks().each(lambda: lock_directory(out)):
            watchdog.at("building")
            data, model = ranks().each(lambda: _prepare(config))
            model = parallelize(model, config, device)
            optimizer = AdamW(model.parameters(), lr=config.optim.lr, fused=True)

            watchdog.at("loading")
            state, damaged = resume(out / "checkpoints", model, optimizer)
            check_same_data(data, state.get("data"))
            at = Progress(state.get("step", 0), state.get("seen", 0))
            with closing(ranks().each(lambda: RunLog(out, at.step))) as log:
                for text in damaged:
                    log.event("damaged", error=text)
                    log.say(f"passed over a damaged checkpoint: {text}")
                log.event("started", step=at.step, world_size=get_world_size(), config=asdict(config))
                if config.parallel.precision == "bf16" and not (support := bf16_support(device)):
                    log.say(f"bf16 will be slow here, or wrong: {support}")
                saved = at.step if state else None
                checkpoints = Checkpoints(out / "checkpoints", config.keep, saved, data.identity, log)
                return _loop(config, model, optimizer, data, at, checkpoints, log, watchdog, stop)


def _prepare(config: TrainConfig) -> tuple[Data, nn.Module]:
    check(config)
    micro_batches(config, get_world_size())
    data = load_data(config.data)
    return data, build_model(config, data)


def _loop(
    config: TrainConfig,
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    at: Progress,
    checkpoints: Checkpoints,
    log: RunLog,
    watchdog: Watchdog,
    stop: StopSignal,
) -> Progress:
    """Train, log, save and evaluate until the last step or the scheduler's signal."""

    def evaluate(step: int) -> None:
        if step and (step % config.eval_every == 0 or step == config.steps):
            log.metrics(step, eval_loss=_evaluate(config, model, data, watchdog))

    step, seen, _ = at
    memory = Memory_Maximizer(next(model.parameters()).device, verbose=False)
    memory.start()
    model.train()
    batch = _batch(config, data, seen)
    labels, asked = sum_of_all(batch.labels, stop.asked)
    while step < config.steps and not asked:
        evaluate(step)  # the run may have ended between the save and the evaluation of this step
        # The first step takes longer than all others: FSDP sets itself up, blocks are compiled.
        watchdog.at(f"step {step + 1}", config.timeout_s if step == at.step else config.hang_s)
        begun = time.perf_counter()
        rate = learning_rate(step, config.optim, config.steps)
        own, norm = _backward(config, model, batch, labels, step)
        step, seen = step + 1, seen + config.data.batch_size
        following = _batch(config, data, seen)
        # one exchange a step, where the ranks have just met
        loss, labels_after, asked = sum_of_all(own, following.labels, stop.asked)
        check_finite(loss, norm, own, step, batch.samples)
        for group in optimizer.param_groups:  # not what the checkpoint holds
            group.update(lr=rate, betas=config.optim.betas, weight_decay=config.optim.weight_decay)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begun
        memory.update(config.data.batch_size // get_world_size())
        if step % config.log_every == 0 or step == config.steps:
            known = loss if labels else None  # a batch without a label has no loss
            speed = config.data.batch_size / seconds
            log.metrics(step, loss=known, lr=rate, norm=norm, seconds=seconds, samples_per_s=speed)
        batch, labels = following, labels_after
        if step % config.save_every == 0 and step < config.steps:
            watchdog.at(f"saving after step {step}")
            checkpoints.save(model, optimizer, step, seen, last=False)
    stopped = step < config.steps
    watchdog.at(f"saving after step {step}")
    checkpoints.save(model, optimizer, step, seen, last=True)
    if not stopped:
        evaluate(step)
    report = memory.stop()
    log.event("stopped" if stopped else "finished", step=step, memory=report.to_dict())
    log.say(f"{'stopped' if stopped else 'finished'} after step {step}\n{report}")
    return Progress(step, seen, stopped)


class _Batch(NamedTuple):
    """This rank's samples of a step."""

    samples: list[int]
    parts: list[dict[str, Tensor]]  # micro-batches
    weights: list[int]  # their numbers of labels

    @property
    def labels(self) -> int:
        return sum(self.weights)


def _batch(config: TrainConfig, data: Data, seen: int) -> _Batch:
    """Load this rank's next samples."""
    number, size = micro_batches(config, get_world_size())
    rows = rows_at(seen, config.data.batch_size, len(data.train), config.seed)
    mine = rows.view(number, get_world_size(), size)[:, get_rank()]  # i64[micro-batches, samples]
    parts = [collate(data.train, part) for part in mine.tolist()]
    return _Batch(mine.flatten().tolist(), parts, [data.labels(part) for part in parts])


def _backward(
    config: TrainConfig, model: Any, batch: _Batch, labels: float, step: int
) -> tuple[float, float]:
    """Compute this rank's part of the mean over the batch's labels, and the norm of the gradient."""
    device = next(model.parameters()).device
    # Dropout's numbers follow from the place in the run, so that a resumed run draws the same ones.
    seed = ((config.seed * 1_000_003 + step) * 65_537 + get_rank()) % 2**63
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes half a millisecond to note the caller
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    total = torch.zeros((), device=device)
    for index, (part, weight) in enumerate(zip(batch.parts, batch.weights, strict=True)):
        if len(batch.parts) > 1:  # sum gradients between ranks only once, after the last micro-batch
            model.set_requires_gradient_sync(index == len(batch.parts) - 1)
        if not weight:  # a mean over no label is NaN: it counts 0 times with some labels, whatever they are
            part = {**part, "labels": part["labels"].clamp(min=0)}
        loss = model(**_to(part, device)).loss * (weight / max(labels, 1))
        (loss * get_world_size()).backward()  # FSDP averages over the ranks, and this loss is a part of a sum
        total += loss.detach()
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if config.optim.clip is not None:
        clip_grads_with_norm_(model.parameters(), config.optim.clip, norm)
    own, length = torch.stack([total, norm.to(total)]).tolist()  # waits for the device: once a step
    return own, length


@torch.no_grad()
def _evaluate(config: TrainConfig, model: nn.Module, data: Data, watchdog: Watchdog) -> float | None:
    """Return the mean loss of the test samples; a rank without one runs another again, uncounted."""
    device, rank, world_size = next(model.parameters()).device, get_rank(), get_world_size()
    _, size = micro_batches(config, world_size)
    total = loss = 0.0
    model.eval()
    for start in range(0, len(data.test), size * world_size):
        watchdog.at("evaluating")
        rows = range(start, min(start + size * world_size, len(data.test)))[rank::world_size]
        batch = collate(data.test, rows or [0])
        weight = data.labels(batch) if rows else 0
        mean = model(**_to(batch, device)).loss.item()
        if weight:
            total, loss = total + weight, loss + mean * weight
    model.train()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # what FSDP keeps for a backward that does not come; checkpoints are of shards
    loss, total = sum_of_all(loss, total)
    return loss / total if total else None


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the rate of a step, counted from 0. It follows from the step alone: no checkpoint holds it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, steps - config.warmup)
    fall = {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return config.lr * (config.min_lr + (1 - config.min_lr) * fall)


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@record  # writes torchelastic's error file, from which torchrun tells which rank failed first, and how
def _run(arguments: list[str] | None) -> Progress:
    config = parse(arguments)
    with process_group(training_device(config.parallel.device), config.timeout_s):
        return train(config)


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns 0 finished, 75 stopped by a signal and saved, 1 failed, 2 not begun."""
    try:
        progress = _run(arguments)
    except (ConfigError, CheckpointError, NotFinite) as error:
        if get_local_rank() == 0:  # told once on each host
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return _EXIT_REQUEUE if progress and progress.stopped else 0

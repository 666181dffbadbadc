"""The training program: FSDP2 from a laptop to a cluster, resumed after failures.

    torchrun --nproc-per-node 2 -m fsdp_utils.train --out runs/a \\
        --data.source fsdp_utils.lessons.tasks:dates_llama --steps 200

Started again, the program resumes from its newest whole checkpoint, on any number of ranks. SIGTERM and
SIGUSR1 make it save and exit with code 75. `config.py` documents the settings. In this file `train` sets up,
`_loop` is the training loop, `_step` trains one step and `_evaluate` evaluates.
"""

import faulthandler
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fsdp_utils.checkpoint import CheckpointError
from fsdp_utils.child_tuning.optimizer import ChildTuningAdamW
from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.memory.maximizer import Memory_Maximizer
from fsdp_utils.precision.bf16 import bf16_support
from fsdp_utils.train.checkpoints import Checkpoints, lock_directory, resume
from fsdp_utils.train.config import (
    ConfigError,
    OptimConfig,
    TrainConfig,
    changes,
    check_ranges,
    mesh_shape,
    micro_batches,
    parse,
)
from fsdp_utils.train.data import Data, DataError, load_data, must_be_the_same, rows_at
from fsdp_utils.train.group import on_rank_0, process_group, same_on_all, sum_of_all, training_device
from fsdp_utils.train.metrics import RunLog
from fsdp_utils.train.model import build_model, check_data, parallelize, throughput
from fsdp_utils.train.watchdog import EXIT_REQUEUE, Heartbeat, NotFinite, StopSignal, check_finite

__all__ = ["learning_rate", "main", "train"]

# Settings of which a host may have its own.
_PATHS = {"out", "data.source", "data.tokenizer", "model.config", "model.pretrained"}
_END_S = 60.0  # from a failure to the end of its process, at most


class Batch(NamedTuple):
    """One rank's share of the samples of a step."""

    samples: list[int]  # their numbers
    parts: list[dict[str, Tensor]]  # the micro-batches
    labels: list[int]  # how many each of them predicts


class Progress(NamedTuple):
    """The position of a run."""

    step: int  # steps of the optimizer that are done
    seen: int  # samples that were trained on, by all ranks together
    stopped: str | None = None  # the signal that ended it before its last step


def train(config: TrainConfig) -> Progress:
    """Train as configured, from the newest checkpoint in the run's directory. Every rank must call it.

    Returns:
        The position at which the run ended.

    Raises:
        ConfigError: it cannot begin, or settings other than paths differ between ranks; the same on every
            rank.
        CheckpointError: the newest checkpoint is of another model, or the last save failed.
        NotFinite: the gradient is NaN or infinite; names ranks and samples.
    """
    out = Path(config.out)
    device = training_device(config.parallel.device)
    with Heartbeat(out / "hang", config.timeout_s) as heart, StopSignal(heart) as stop, ExitStack() as at_end:
        heart.at("building")
        of_rank_0 = on_rank_0(lambda: asdict(config))
        data, model, is_locked = same_on_all(lambda: _prepare(config, of_rank_0, at_end))
        model = parallelize(model, config, device)
        optimizer = _optimizer(model, config.optim)

        heart.at("loading")
        state, damaged = resume(out / "checkpoints", model, optimizer)
        must_be_the_same(data, state.get("data"))
        for group in optimizer.param_groups:  # instead of those of the checkpoint
            group.update(_hyperparameters(config.optim))
        at = Progress(state.get("step", 0), state.get("seen", 0))
        about = {"config": asdict(config), "data": data.identity}
        changed = changes(state.get("config", about["config"]), about["config"])
        log = RunLog(out, step=at.step, steps=config.steps, tensorboard=config.tensorboard)
        try:
            for text in damaged:
                log.event("damaged", error=text)
                log.say(f"passed over a damaged checkpoint: {text}")
            log.event("started", step=at.step, world_size=get_world_size(), config=about["config"])
            if changed:
                log.say(f"from step {at.step} on with other settings than before: {', '.join(changed)}")
            if not is_locked:
                log.say(
                    f"{out / '.lock'} cannot be locked here (the file system has no locks), so a second run "
                    "in this directory would not be noticed: see to it that there is none"
                )
            if config.parallel.precision == "bf16" and not (support := bf16_support(device)):
                log.say(f"bf16 will be slow here, or wrong: {support}")
            saved = at.step if state else None
            checkpoints = Checkpoints(out / "checkpoints", config.keep, saved, log, about)
            return _loop(config, model, optimizer, data, at, checkpoints, log, stop, heart)
        finally:
            log.close()


def _prepare(
    config: TrainConfig, of_rank_0: dict[str, Any], at_end: ExitStack
) -> tuple[Data, nn.Module, bool]:
    """All that can be refused before the ranks work together: the data, the model, is `out` locked?"""
    check_ranges(config)
    if differing := [each for each in changes(of_rank_0, asdict(config)) if each.split()[0] not in _PATHS]:
        raise ConfigError(
            "configuration: expected the same settings on all ranks, found other ones than rank 0's: "
            f"{', '.join(differing)}. Start all ranks with the same command line and the same --config."
        )
    micro_batches(config, get_world_size())
    mesh_shape(config, get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size())))
    is_locked = True
    if get_rank() == 0:
        lock = lock_directory(Path(config.out))
        at_end.callback(lock.release)
        is_locked = lock.held
    data = load_data(config.data)
    model = build_model(config.model, data, config.seed)
    check_data(model, data, config.data.seq_len)
    return data, model, is_locked


def _loop(
    config: TrainConfig,
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    at: Progress,
    checkpoints: Checkpoints,
    log: RunLog,
    stop: StopSignal,
    heart: Heartbeat,
) -> Progress:
    """Train, log, save and evaluate until the last step or the scheduler's signal."""

    def evaluate(step: int) -> None:
        if step % config.eval_every == 0 or step == config.steps:
            found = _evaluate(config, model, data, heart)
            log.metrics(step, **found)
            if len(data.test) and not found:
                log.say(f"step {step}: no eval_loss, as no test sample has a label")

    device, count = next(model.parameters()).device, config.data.batch_size
    step, seen = at.step, at.seen
    if step and not on_rank_0(lambda: log.has("eval_loss")):
        evaluate(step)  # the run had ended between the save and the evaluation of this step
    batch = _batch(config, data, seen)
    (labels,) = sum_of_all(sum(batch.labels))
    measure = throughput(config, model, data, device)
    memory = Memory_Maximizer(device, verbose=False)
    memory.start()
    model.train()
    stopped = None
    while step < config.steps and stopped is None:
        # The first step takes longer than all others: FSDP sets itself up, blocks are compiled.
        heart.at(f"step {step + 1}", config.timeout_s if step == at.step else config.hang_s)
        begun = time.perf_counter()
        rate = learning_rate(step, config.optim, config.steps)
        with _profiled(config, step + 1):
            own, norm = _step(config, model, optimizer, batch, labels, step, rate)
        step, seen = step + 1, seen + count
        following = _batch(config, data, seen)
        loss, asked, more = sum_of_all(own, stop.wanted is not None, sum(following.labels))
        check_finite("the loss", loss, own, step, batch.samples)
        known = loss if labels else None  # a batch without a label has no loss, and its gradient is zero
        batch, labels = following, more
        seconds = time.perf_counter() - begun
        if step > at.step + 1:
            heart.longest_step_s = max(heart.longest_step_s, seconds)
        memory.update(count // get_world_size())
        log.progress(step)
        if step % config.log_every == 0 or step == config.steps:
            log.metrics(step, loss=known, lr=rate, norm=norm, seconds=seconds, **measure(seconds))
        if step == config.steps:
            break
        if step % config.save_every == 0:
            heart.at(f"saving after step {step}", is_saving=True)
            log.durable()
            checkpoints.begin(model, optimizer, step, seen=seen)
        evaluate(step)
        if asked:
            stopped = _signal(stop.wanted)
    heart.at(f"saving after step {step}", is_saving=True)
    log.durable()
    checkpoints.finish(model, optimizer, step, seen=seen)
    if step == config.steps > at.step:
        evaluate(step)  # after the save: an evaluation that fails costs no step
    report = memory.stop()
    log.event("stopped" if stopped else "finished", step=step, signal=stopped, memory=report.to_dict())
    log.say(str(report))
    return Progress(step, seen, stopped)


def _batch(config: TrainConfig, data: Data, seen: int) -> Batch:
    """This rank's share of the batch that follows when so many samples have been seen."""
    world_size = get_world_size()
    number, size = micro_batches(config, world_size)
    rows = rows_at(seen, config.data.batch_size, len(data.train), config.seed).view(number, world_size, size)
    mine = rows[:, get_rank()]  # i64[micro-batches, samples]
    parts = [data.train[part] for part in mine]
    return Batch(mine.flatten().tolist(), parts, [data.predictions(part) for part in parts])


def _step(
    config: TrainConfig, model: Any, optimizer: Optimizer, batch: Batch, labels: float, step: int, rate: float
) -> tuple[float, float]:
    """One step of the optimizer: this rank's part of the loss, and the norm of the whole gradient.

    The sum of the parts is the mean over the `labels` labels of the whole batch, of all ranks and
    micro-batches together. So its gradient does not depend on how the batch was divided.
    """
    device = next(model.parameters()).device
    rank, world_size, number = get_rank(), get_world_size(), len(batch.parts)

    # Dropout's numbers follow from the place in the run, so that a resumed run draws the same ones.
    _seed((config.seed * 1_000_003 + step) * 65_537 + rank, device)
    local = torch.zeros((), device=device)
    for index, (part, weight) in enumerate(zip(batch.parts, batch.labels, strict=True)):
        if number > 1:  # sum gradients between ranks only once, after the last micro-batch
            model.set_requires_gradient_sync(index == number - 1)
        if not weight:  # a mean over no label is NaN: it counts 0 times with some labels, whatever they are
            part = {**part, "labels": part["labels"].clamp(min=0)}
        loss = model(**_to(part, device)).loss * (weight / max(labels, 1))
        (loss * world_size).backward()  # FSDP averages over the ranks, and this loss is a part of a sum
        local += loss.detach()

    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    own, length = torch.stack([local, norm.to(local)]).tolist()  # waits for the device: once a step
    check_finite("the gradient's norm", length, own, step + 1, batch.samples)
    if config.optim.clip is not None:
        clip_grads_with_norm_(model.parameters(), config.optim.clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return own, length


@torch.no_grad()
def _evaluate(config: TrainConfig, model: nn.Module, data: Data, heart: Heartbeat) -> dict[str, float]:
    """The mean loss over all test samples, each counted once, on any number of ranks.

    Each rank must run equally many batches, as each of them gathers parameters from all ranks. Where a rank
    has none left it runs a sample again and does not count it.
    """
    if not len(data.test):
        return {}
    device, rank, world_size = next(model.parameters()).device, get_rank(), get_world_size()
    _, size = micro_batches(config, world_size)
    total = loss = 0.0
    model.eval()
    for start in range(0, len(data.test), size * world_size):
        heart.at("evaluating")
        rows = torch.arange(start, min(start + size * world_size, len(data.test)))[rank::world_size]
        batch = data.test[rows if len(rows) else torch.zeros(1, dtype=torch.int64)]
        weight = data.predictions(batch) if len(rows) else 0
        mean = model(**_to(batch, device)).loss.item()
        if weight:
            total, loss = total + weight, loss + mean * weight
    model.train()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # what FSDP keeps for a backward that does not come; checkpoints are of shards
    loss, total = sum_of_all(loss, total)
    return {"eval_loss": loss / total} if total else {}


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """The rate of a step, counted from 0: a function of the step alone, so nothing of it is to be saved."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, steps - config.warmup)
    fall = {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.decay]
    return config.lr * (config.min_lr + (1 - config.min_lr) * fall)


def _optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    settings = {"lr": config.lr, **_hyperparameters(config)}
    if config.name == "child_tuning":
        return ChildTuningAdamW(model.parameters(), **settings)
    return torch.optim.AdamW(model.parameters(), **settings, fused=True)


def _hyperparameters(config: OptimConfig) -> dict[str, Any]:
    """What the optimizer is told besides the learning rate, which `_step` sets at each step."""
    settings: dict[str, Any] = {"betas": config.betas, "weight_decay": config.weight_decay}
    return settings | ({"reserve_p": config.reserve_p} if config.name == "child_tuning" else {})


@contextmanager
def _profiled(config: TrainConfig, step: int) -> Iterator[None]:
    """A trace of the step that is to be profiled, on rank 0, for Perfetto or chrome://tracing."""
    if step != config.profile_step or get_rank() != 0:
        yield
        return
    from torch.profiler import profile

    with profile(record_shapes=True) as profiler:
        yield
    profiler.export_chrome_trace(str(Path(config.out) / f"trace-step-{step}.json"))


def _signal(mine: str | None) -> str:
    """The signal that some rank has received; the same answer on every rank."""
    found: list[Any] = [None] * get_world_size()
    dist.all_gather_object(found, mine)
    return next(name for name in found if name is not None)


def _seed(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, which on a CPU takes half a millisecond to note where it was called from."""
    seed %= 2**63  # torch's seeds have 64 bits
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


# ---- the program -----------------------------------------------------------------------------------


@record  # writes torchelastic's error file, from which torchrun tells which rank failed first, and how
def _run(arguments: list[str] | None) -> Progress:
    config, problem = None, None
    try:
        config = parse(arguments)
    except ConfigError as error:
        problem = error

    def configured() -> TrainConfig:
        if problem is not None:
            raise problem
        assert config is not None
        return config

    device = training_device(config.parallel.device if config else "cpu")
    with process_group(device, config.timeout_s if config else 60):
        return train(same_on_all(configured))


def main(arguments: list[str] | None = None) -> int:
    """The program's exit code: 0 finished, 75 stopped by a signal and saved, 1 failed, 2 not begun."""
    try:
        progress = _run(arguments)
    except Exception as error:
        # A process group that lost a rank, or a save, can hold up the end of a process.
        faulthandler.dump_traceback_later(_END_S, exit=True)
        if isinstance(error, DataError):  # this rank alone has seen it
            print(f"rank {get_rank()}: DataError: {error}", file=sys.stderr, flush=True)
            return 1
        if not isinstance(error, (ConfigError, CheckpointError, NotFinite)):
            raise
        if get_rank() == 0 or not dist.is_initialized():  # in a group the same on every rank: told once
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    gc.freeze()  # no garbage among what was imported: the process ends a second sooner
    if progress is not None and progress.stopped:
        print(json.dumps({"stopped": progress.stopped, "step": progress.step}), flush=True)
        return EXIT_REQUEUE
    return 0

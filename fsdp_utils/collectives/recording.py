"""record_collectives: record what FSDP or DDP sends, computes and frees, in the order of issue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls, when_done
from fsdp_utils.collectives.clock import Clock
from fsdp_utils.collectives.events import BETWEEN, BUCKET, COMPUTE, FREE, WITHIN, StepEvent
from fsdp_utils.collectives.fsdp_hooks import Listener, in_backward, listen
from fsdp_utils.collectives.trace import CollectiveTrace
from fsdp_utils.sharding.units import ROOT, find_units, parents
from fsdp_utils.torch_internals.names import sequence_nr
from fsdp_utils.torch_internals.runtime import has_compiled, is_under_compile


@contextmanager
def record_collectives(model: nn.Module, *, ranks_per_host: int | None = None) -> Iterator[CollectiveTrace]:
    """Record which collectives FSDP or DDP issues: their order, bytes, links and durations.

    Put it around any number of training steps, on one rank or on all. The recording itself sends nothing. If
    the block raises, the trace has what was recorded until then, with a note.

    All collectives of the process are recorded, with their durations, which include the wait for other ranks.
    Of the computation, the model's forward and backward and the optimizer's steps are recorded, but not the
    loss. On a GPU, times are those at which the GPU ran what was issued; they are set when the block ends.

    Args:
        model: Under fully_shard, FullyShardedDataParallel or DistributedDataParallel, and not wrapped once
            more inside the block.
        ranks_per_host: How many consecutive ranks share a host, to tell the links apart; by default
            torchrun's LOCAL_WORLD_SIZE, else all. Another number shows another placement of the same ranks.

    Returns:
        A context manager that gives a `CollectiveTrace`.

    Raises:
        ValueError: no part of the model is distributed.

    Example::

        with record_collectives(model) as trace:
            train_step(batch)
        print(trace.summary())
        first = trace.events[0]
        print(first.kind, first.module, f"{first.bytes:,} bytes")
        # all_gather (root) 1,088 bytes
    """
    parts = [m for m in model.modules() if isinstance(m, FSDP1 | FSDPModule | DistributedDataParallel)]
    if not parts:
        raise ValueError(
            "record_collectives: expected a model under fully_shard, FullyShardedDataParallel or "
            f"DistributedDataParallel, found a {type(model).__name__} without any of them"
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    units = find_units(model)
    trace = CollectiveTrace(rank, world_size, {unit.name: unit.nbytes for unit in units})
    is_compiled = has_compiled() or any(map(is_under_compile, model.modules()))
    hidden = (torch.compiler.disable,) if is_compiled else ()
    # where the model computes, wherever its shards are at rest
    clock = Clock(units[0].parts[0].device if units else next(model.parameters()).device)
    ddp = any(isinstance(part, DistributedDataParallel) for part in parts)
    recorder = _Recorder(trace, clock, ddp, parents(units), on_host, _dimensions(model))
    try:
        with (
            listen_to_calls(recorder.collective),
            listen(model, units, recorder, *hidden),
            # the steps of every optimizer are computation
            register_optimizer_step_pre_hook(lambda *_: recorder.begin(ROOT, "optimizer")),
            register_optimizer_step_post_hook(lambda *_: recorder.end(ROOT, "optimizer")),
        ):
            yield trace
    except BaseException as error:
        trace.notes.append(f"the block ended early, by {type(error).__name__}: {error}")
        raise
    finally:
        recorder.closed = True
        trace.notes += clock.finish(failed=bool(trace.notes))


def _dimensions(model: nn.Module) -> dict[Any, str]:
    """By process group, the name of its mesh dimension, for the meshes of the model's parameters."""
    names: dict[Any, str] = {}
    for mesh in {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}:
        for dimension, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(dimension) > 1:
                names.setdefault(mesh.get_group(dimension), name)
    return names


class _Piece(NamedTuple):
    """Computation of one module between two events."""

    begin: Any  # a mark of the clock
    is_first: bool  # among its module's pieces
    nodes: int  # that autograd had made when it began


@dataclass
class _Sent:
    """A collective that has been issued."""

    event: StepEvent
    begin: Any  # a mark of the clock
    is_over: Callable[[], bool] = bool  # False until it is known how to tell


@dataclass
class _Recorder(Listener):
    """Writes the trace, from what `listen_to_calls` and `listen` tell."""

    trace: CollectiveTrace
    clock: Clock
    ddp: bool  # is any part of the model under DDP?
    parents: set[str]  # modules that hold other units
    ranks_per_host: int
    dimensions: dict[Any, str]  # names in a mesh, by process group
    links: dict[Any, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)  # by process group
    working_for: list[str] = field(default_factory=list)  # units that FSDP itself works for now
    computing: list[tuple[str, str]] = field(default_factory=list)  # modules and phases, nested
    gathered: set[str] = field(default_factory=set)
    pending: dict[int, _Sent] = field(default_factory=dict)  # collectives whose end was not seen yet, by id
    piece: _Piece | None = None  # what is being computed since the last event
    closed: bool = False  # hooks that autograd still holds may be called after the block
    forwards: int = 0  # calls of the model that are running
    buckets: int = 0  # that DDP has reduced in this backward pass
    thread: int = 0  # in which FSDP worked, or the model computed, last

    # what `listen` tells

    def in_forward(self, change: int) -> None:
        self.forwards += change
        self.buckets = 0

    def enter(self, unit: str) -> None:
        self.thread = get_ident()
        if self.piece is not None:
            self._end_piece()
        self.working_for.append(unit)

    def leave(self, unit: str) -> None:
        if unit in self.working_for:
            self.working_for.remove(unit)
        if self.pending:
            self._end_finished()
        if self.computing and not self.working_for:
            self._begin_piece()

    def begin(self, module: str, phase: str) -> None:
        self.thread = get_ident()
        self._end_piece()
        if not in_backward():  # what has not ended in backward by now, never will
            self.computing = [running for running in self.computing if running[1] != "backward"]
        if phase != "backward" or (module, phase) not in self.computing:
            self.computing.append((module, phase))
        self._begin_piece(is_first=True)

    def end(self, module: str, phase: str) -> None:
        if (module, phase) not in self.computing:
            return
        if self.computing[-1] == (module, phase):
            self._end_piece(is_last=True)
        if phase == "backward" and module == ROOT:
            self.buckets = 0
        # the innermost: an optimizer may call another one's step
        del self.computing[len(self.computing) - 1 - self.computing[::-1].index((module, phase))]

    def freed(self, unit: str) -> None:
        if unit in self.gathered:
            self.gathered.discard(unit)
            self._end_piece()
            self._add(StepEvent(0, FREE, unit, self._phase(), start=self.clock.now(), seconds=0.0))
            self._begin_piece()

    # what `listen_to_calls` tells

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        ranks, link, dimension = self._link(call.group)
        is_ours = self.thread in (0, get_ident())  # else another thread sends something
        module, phase = "", "other"
        if is_ours:
            self._end_piece()
            module, phase = self.working_for[-1] if self.working_for else "", self._phase()
            if call.kind == "all_reduce" and not module and self.ddp and in_backward():
                module = f"{BUCKET}{self.buckets}"  # DDP reduces its buckets in their order
                self.buckets += 1
        event = StepEvent(0, call.kind, module, phase, call.bytes_in, call.bytes_out, ranks, link)
        event.start, event.dimension = self.clock.now(), dimension
        self._add(event)
        if call.kind == "all_gather" and module:
            self.gathered.add(module)
        sent = _Sent(event, self.clock.mark())
        self.pending[id(sent)] = sent
        result = issue()
        sent.is_over = when_done(call.kind, result, lambda: self._ended(sent))
        if is_ours:
            self._begin_piece()
        return result

    def _end_finished(self) -> None:
        """Set the end of what is over, when FSDP goes on and has waited for what it needs."""
        for sent in list(self.pending.values()):
            if sent.is_over():
                self._ended(sent)

    def _ended(self, sent: _Sent) -> None:
        if self.pending.pop(id(sent), None) is not None:
            self.clock.set_time(sent.event, sent.begin, self.clock.mark())

    # pieces of computation, from one event to the next

    def _begin_piece(self, *, is_first: bool = False) -> None:
        if self.working_for or not self.computing:
            return  # nothing is computed now
        self.piece = _Piece(self.clock.mark(), is_first, sequence_nr())

    def _end_piece(self, *, is_last: bool = False) -> None:
        """End the current piece of computation; record it if anything was computed in it."""
        if self.pending:
            self._end_finished()
        piece, self.piece = self.piece, None
        if piece is None:
            return
        module, phase = self.computing[-1]
        # A module may compute nothing between two units. In forward, new nodes of autograd show whether it
        # did; backward adds none: a unit's first and last piece count.
        is_end = piece.is_first or is_last
        if phase == "forward" and module in self.parents:
            if torch.is_grad_enabled():
                if sequence_nr() == piece.nodes:
                    return
            elif not (is_end and module in self.trace.unit_bytes):
                return
        elif phase == "backward" and self.trace.unit_bytes and not is_end:
            return
        if phase == "forward":
            phase = self._phase()  # backward, where activation checkpointing computes it again
        self._add(event := StepEvent(0, COMPUTE, module, phase))
        self.clock.set_time(event, piece.begin, self.clock.mark())

    def _add(self, event: StepEvent) -> None:
        if not self.closed:
            event.order = len(self.trace.events)
            self.trace.events.append(event)

    def _phase(self) -> str:
        if in_backward():
            return "backward"
        if self.forwards:
            return "forward"
        return next((phase for _, phase in reversed(self.computing) if phase != "backward"), "other")

    def _link(self, group: Any) -> tuple[tuple[int, ...], str, str]:
        """Which ranks a process group has, whether they are all on one host, and their mesh dimension."""
        if group not in self.links:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            hosts = {rank // self.ranks_per_host for rank in ranks}
            name = self.dimensions.get(group, "")
            self.links[group] = (ranks, BETWEEN if len(hosts) > 1 else WITHIN, name)
        return self.links[group]

"""record_collectives: record what FSDP or DDP sends, computes and frees, in the order of issue."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls, when_done
from fsdp_utils.collectives.device_times import DeviceTimes
from fsdp_utils.collectives.events import BETWEEN, BUCKET, COMPUTE, FREE, WITHIN, StepEvent
from fsdp_utils.collectives.fsdp_hooks import as_it_is, in_backward, listen
from fsdp_utils.collectives.trace import CollectiveTrace
from fsdp_utils.sharding.names import module_names
from fsdp_utils.sharding.units import ROOT, Unit, find_units, parents
from fsdp_utils.torch_internals.names import sequence_nr
from fsdp_utils.torch_internals.runtime import has_compiled, is_under_compile

_recording = False
_OF_MESH = "mesh_"  # how init_device_mesh begins the description of a dimension's process group
_WITHOUT_NAME = re.compile(r"dim_\d+|default")  # and how it goes on if the dimension has no name


@contextmanager
def record_collectives(model: nn.Module, *, ranks_per_host: int | None = None) -> Iterator[CollectiveTrace]:
    """Record which collectives FSDP or DDP issues: their order, bytes, links and durations.

    Put it around any number of training steps, on one rank or on all. Nothing is sent by the recording
    itself, and what it watches runs as it would without it. The trace grows while the block runs; if the
    block raises, what was recorded until then is in the trace, with a note.

    All collectives of the process are recorded, and how long they took, including the wait for other ranks.
    Of the computation, the model's forward and backward and the optimizer's steps are recorded, but not the
    loss, nor in backward what stands between two units.

    On a GPU, times are those at which the GPU ran what was issued, read from torch's profiler when the block
    ends; of a collective of gloo they cover only the copies. torch runs one profiler at a time. Where another
    one is in use, or torch's profiler cannot see the device, a note says so, `start` is when the CPU issued
    an event, and `seconds` is None.

    Args:
        model: Under fully_shard, FullyShardedDataParallel or DistributedDataParallel.
        ranks_per_host: How many consecutive ranks share a host, to tell the links apart. By default what
            torchrun says (LOCAL_WORLD_SIZE); without torchrun, all ranks are on one host. Give it to see
            what another placement of the same ranks would send over which link.

    Returns:
        A context manager that gives a `CollectiveTrace`.

    Raises:
        ValueError: no part of the model is distributed, or ranks_per_host is less than 1.
        RuntimeError: another recording is running in this process; the model was moved or wrapped again
            inside the block (the trace is complete, but no longer tells of one model).

    Example::

        with record_collectives(model) as trace:
            train_step(batch)
        print(trace.summary())
        first = trace.events[0]
        print(first.kind, first.module, f"{first.bytes:,} bytes")
        # all_gather (root) 1,088 bytes
    """
    global _recording
    names = module_names(model)
    parts = _distributed(names)
    if not parts:
        raise ValueError(
            "record_collectives: expected a model under fully_shard, FullyShardedDataParallel or "
            f"DistributedDataParallel, found a {type(model).__name__} without any of them. Wrap it first, "
            "and pass what the wrapping returns."
        )
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"record_collectives: expected ranks_per_host of at least 1, found {ranks_per_host}")
    if _recording:
        raise RuntimeError(
            "record_collectives: expected no other recording in this process, found one that is still "
            "running. End it first; one recording can hold any number of steps."
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_host = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    units = find_units(model, names)
    devices = _devices(model, parts, units)
    is_compiled = has_compiled() or any(map(is_under_compile, names))
    hidden = torch.compiler.disable if is_compiled else as_it_is
    trace = CollectiveTrace(rank, world_size, {unit.name: unit.nbytes for unit in units})
    times = _times(trace, _compute_device(model, units))  # a GPU's
    _recording = True
    try:
        with times or nullcontext():
            recorder = _Recorder(
                trace,
                on_host,
                ddp=_has_ddp(parts),
                parents=parents(units),
                times=times,
                dimensions=_dimensions(model),
            )
            try:
                with (
                    listen_to_calls(recorder.collective),
                    listen(model, units, recorder, hidden),
                    recorder.optimizer_steps(),
                ):
                    yield trace
            finally:
                recorder.close()
    except BaseException as error:
        trace.notes.append(f"the block ended early, by {type(error).__name__}: {error}")
        raise
    finally:
        _recording = False
    if problem := _changed(model, parts, units, devices):
        trace.notes.append(problem)
        raise RuntimeError(
            f"record_collectives: {problem}. What was recorded stays in the trace, but it is of two models. "
            "Record after the model has been moved and wrapped for the last time."
        )


def _distributed(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those under FSDP1, FSDP2 or DDP."""
    return [m for m in modules if isinstance(m, FSDP1 | FSDPModule | DistributedDataParallel)]


def _has_ddp(modules: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in modules)


def _dimensions(model: nn.Module) -> dict[Any, str]:
    """By process group, the name of its mesh dimension, for the meshes that the model's parameters are on."""
    names: dict[Any, str] = {}
    for mesh in {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}:
        for dimension, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(dimension) > 1:
                names.setdefault(mesh.get_group(dimension), name)
    return names


def _dimension_by_description(group: Any) -> str:
    """The name of a group's mesh dimension, from the description that init_device_mesh gave the group.

    It serves FSDP1, whose parameters do not say their mesh. A dimension over all ranks has the default group,
    whose description says nothing.
    """
    description = group.group_desc
    name = description.removeprefix(_OF_MESH)
    return "" if name == description or _WITHOUT_NAME.fullmatch(name) else name


def _compute_device(model: nn.Module, units: list[Unit]) -> torch.device:
    """Where the model computes, wherever its shards are at rest."""
    return units[0].parts[0].device if units else next(model.parameters()).device


def _times(trace: CollectiveTrace, device: torch.device) -> DeviceTimes | None:
    """What measures when the device computes; None for the CPU, where events are timed as they are issued."""
    if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
        return None
    return DeviceTimes(trace, device.type)


def _devices(model: nn.Module, parts: list[nn.Module], units: list[Unit]) -> dict[str, str]:
    """Where the shards of each unit are, and the parameters under DDP."""
    devices = {f"the shards of {unit.name}": unit.device for unit in units}
    if _has_ddp(parts):
        devices["the parameters"] = ", ".join(sorted({str(p.device) for p in model.parameters()}))
    return devices


def _changed(
    model: nn.Module, parts: list[nn.Module], units: list[Unit], devices: dict[str, str]
) -> str | None:
    """What has changed since the recording began, in words; None if nothing."""
    names = module_names(model)
    after = find_units(model, names)
    for what, before, now in (
        ("units with parameters", [unit.parts for unit in units], [unit.parts for unit in after]),
        ("modules under FSDP or DDP", parts, _distributed(names)),
    ):
        if before != now:
            return (
                f"the model was wrapped again inside the block: {len(before)} {what} at its start, "
                f"{len(now)} at its end, and not all are the same"
            )
    devices_now = _devices(model, parts, after)
    for what, device in devices.items():
        if devices_now[what] != device:
            return (
                f"the model was moved inside the block: {what} were on {device} at its start, and are on "
                f"{devices_now[what]} at its end"
            )
    return None


class _Piece(NamedTuple):
    """Computation of one module between two events."""

    start: float  # seconds since the recording began
    mark: int  # in the profiler's record, on a GPU
    is_first: bool  # of its module's pieces
    nodes: int  # that autograd had made when it began


class _Recorder:
    """Writes the trace: `listen_to_calls` tells it what is sent, `listen` what FSDP does and computes."""

    def __init__(
        self,
        trace: CollectiveTrace,
        ranks_per_host: int,
        *,
        ddp: bool,
        parents: set[str],
        times: DeviceTimes | None,
        dimensions: dict[Any, str],
    ) -> None:
        self._trace = trace
        self._ranks_per_host = ranks_per_host
        self._ddp = ddp  # is any part of the model under DDP?
        self._parents = parents  # modules that hold other units
        self._times = times  # of a GPU: there the CPU issues work, and does not see when it runs
        self._began = time.perf_counter()
        self._working_for: list[str] = []  # units that FSDP itself works for; empty while the model computes
        self._closed = False
        self._forwards = 0  # calls of the model that are running
        self._computing: list[tuple[str, str]] = []  # what is being computed: modules and phases, nested
        self._piece: _Piece | None = None  # what is being computed since the last event
        self._gathered: set[str] = set()
        self._buckets = 0  # that DDP has reduced in this backward pass
        self._thread = 0  # in which FSDP worked, or the model computed, last
        # Collectives whose end may not have been seen yet, and functions that say whether they are over.
        self._pending: list[tuple[StepEvent, Callable[[], bool]]] = []
        self._dimensions = dimensions  # of a mesh, by process group
        self._links: dict[Any, tuple[tuple[int, ...], str, str]] = {}  # by process group

    def close(self) -> None:
        """Record nothing more: hooks that autograd still holds may be called after the block."""
        self._closed = True

    @contextmanager
    def optimizer_steps(self) -> Iterator[None]:
        """Record the steps of every optimizer as computation."""
        before = register_optimizer_step_pre_hook(lambda *_: self.begin(ROOT, "optimizer"))
        after = register_optimizer_step_post_hook(lambda *_: self.end(ROOT, "optimizer"))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    # what `listen` tells

    def enter_forward(self) -> None:
        self._forwards += 1
        self._buckets = 0

    def leave_forward(self) -> None:
        self._forwards -= 1

    def enter(self, unit: str) -> None:
        self._thread = get_ident()
        if self._piece is not None:
            self._end_piece()
        self._working_for.append(unit)

    def leave(self, unit: str) -> None:
        if unit in self._working_for:
            self._working_for.remove(unit)
        if self._pending:
            self._end_finished()
        if self._computing and not self._working_for:
            self._begin_piece()

    def begin(self, module: str, phase: str) -> None:
        self._thread = get_ident()
        self._end_piece()
        if not in_backward():  # what has not ended in backward by now, never will
            self._computing = [running for running in self._computing if running[1] != "backward"]
        if phase != "backward" or (module, phase) not in self._computing:
            self._computing.append((module, phase))
        self._begin_piece(is_first=True)

    def end(self, module: str, phase: str) -> None:
        if (module, phase) not in self._computing:
            return
        if self._computing[-1] == (module, phase):
            self._end_piece(is_last=True)
        if phase == "backward" and module == ROOT:
            self._buckets = 0
        # the innermost: an optimizer may call another one's step
        del self._computing[len(self._computing) - 1 - self._computing[::-1].index((module, phase))]

    def freed(self, unit: str) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self._end_piece()
            self._add(StepEvent(0, FREE, unit, self._phase(), start=self._now(), seconds=0.0))
            self._begin_piece()

    # what `listen_to_calls` tells

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Record a call around its issue."""
        ranks, link, dimension = self._link(call.group)
        is_ours = self._thread in (0, get_ident())  # else another thread sends something of its own
        module, phase = "", "other"
        if is_ours:
            self._end_piece()
            module, phase = self._working_for[-1] if self._working_for else "", self._phase()
            if call.kind == "all_reduce" and not module and self._ddp and in_backward():
                module = f"{BUCKET}{self._buckets}"  # DDP reduces its buckets in their order
                self._buckets += 1
        event = self._add(
            StepEvent(
                0,
                call.kind,
                module,
                phase,
                call.bytes_in,
                call.bytes_out,
                ranks,
                link,
                self._now(),
                dimension=dimension,
            )
        )
        if call.kind == "all_gather" and module:
            self._gathered.add(module)
        mark = self._times.mark() if self._times else 0
        result = issue()

        if self._times:
            self._times.issued(event, mark)
        else:
            self._pending.append((event, when_done(call.kind, result, lambda: self._ended(event))))
        if is_ours:
            self._begin_piece()
        return result

    def _end_finished(self) -> None:
        """Called when FSDP goes on and has waited for what it needs: set the end of what is over."""
        for event, is_over in self._pending:
            if event.seconds is None and is_over():
                self._ended(event)
        self._pending = [pending for pending in self._pending if pending[0].seconds is None]

    def _ended(self, event: StepEvent) -> None:
        if event.seconds is None:
            event.seconds = self._now() - event.start

    # pieces of computation, from one event to the next

    def _begin_piece(self, *, is_first: bool = False) -> None:
        if self._working_for or not self._computing:
            return  # nothing is computed now
        mark = self._times.mark() if self._times else 0
        self._piece = _Piece(self._now(), mark, is_first, sequence_nr())

    def _end_piece(self, *, is_last: bool = False) -> None:
        """End the current piece of computation; record it if anything was computed in it."""
        if self._pending:
            self._end_finished()
        piece, self._piece = self._piece, None
        if piece is None:
            return
        module, phase = self._computing[-1]
        # A module may compute nothing of its own between two units, and a unit nothing more before it ends.
        # In forward, new nodes of autograd show it; backward adds none: a unit's first and last piece count.
        is_end = piece.is_first or is_last
        if phase == "forward" and module in self._parents:
            if torch.is_grad_enabled():
                if sequence_nr() == piece.nodes:
                    return
            elif not (is_end and module in self._trace.unit_bytes):
                return
        elif phase == "backward" and self._trace.unit_bytes and not is_end:
            return
        if phase == "forward":
            phase = self._phase()  # backward, where activation checkpointing computes it again
        event = self._add(StepEvent(0, COMPUTE, module, phase, start=piece.start))
        if self._times:
            self._times.issued(event, piece.mark)
        else:
            event.seconds = self._now() - piece.start

    def _add(self, event: StepEvent) -> StepEvent:
        if not self._closed:
            event.order = len(self._trace.events)
            self._trace.events.append(event)
        return event

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _phase(self) -> str:
        if in_backward():
            return "backward"
        if self._forwards:
            return "forward"
        return next((phase for _, phase in reversed(self._computing) if phase != "backward"), "other")

    def _link(self, group: Any) -> tuple[tuple[int, ...], str, str]:
        """Which ranks a process group has, whether they are all on one host, and their mesh dimension."""
        if group not in self._links:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            hosts = {rank // self._ranks_per_host for rank in ranks}
            name = self._dimensions.get(group) or _dimension_by_description(group)
            self._links[group] = (ranks, BETWEEN if len(hosts) > 1 else WITHIN, name)
        return self._links[group]

"""Run a reader's function on all ranks: a collective that not all of them call ends in a sentence."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_utils.collectives.c10d_hooks import Call, listen_to_calls
from fsdp_utils.distributed.agreement import rank_names
from fsdp_utils.lessons.your_turn import NotYet

_PAIRED = {"send", "recv"}  # between two ranks, so not every rank has one
_SAME_IN, _SAME_OUT = {"all_reduce", "reduce", "broadcast", "reduce_scatter"}, {"all_gather"}
_CALL, _END, _ERROR = "call", "end", "error"
_gathers_scores = False  # whether this rank is done with the answer's own calls


class Parted(RuntimeError):
    """A collective that another rank does not call; it was not begun."""


def run_together(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Call a function on all ranks, and begin only those collectives that every rank calls.

    Before each collective of all ranks, and at the end, the ranks exchange what they are about to do. So no
    rank waits for a call that the others do not make, and the process group stays usable. Returns what the
    function returned, and ""; or None and a sentence, the same on all ranks: they called different
    collectives, or some of them raised an error (on its own rank it is raised).
    """
    parted = ""

    def exchange(state: str, text: str = "") -> None:
        nonlocal parted
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (state, text))
        parted = _how_they_part(everyone)

    def listen(call: Call, issue: Callable[[], Any]) -> Any:
        if call.kind in _PAIRED or call.group.size() < dist.get_world_size():
            return issue()
        if not parted and _gathers_scores:
            exchange(_END)
        elif not parted:
            exchange(_CALL, _words(call))
        if parted:
            raise Parted(parted)
        return issue()

    try:
        with listen_to_calls(listen):
            value = function(*args)
    except BaseException as error:  # such as PyTorch's CheckpointException
        if isinstance(error, KeyboardInterrupt):
            raise
        if parted:
            return None, parted
        said = (str(error).splitlines() or [""])[0]
        exchange(
            _ERROR, f": {said}" if isinstance(error, NotYet) else f" raised {type(error).__name__}: {said}."
        )
        raise
    if not parted:
        exchange(_END)
    return (None if parted else value), parted


def gather_scores(found: Any) -> list[Any]:
    """All-gather what a scoring function has found on each rank; returns it by rank.

    Within `run_together`, a rank whose answer still calls a collective is told that the others do not; it
    would meet an `all_gather_object` of the scoring function itself.
    """
    global _gathers_scores
    everyone: list[Any] = [None] * dist.get_world_size()
    _gathers_scores = True
    try:
        dist.all_gather_object(everyone, found)
    finally:
        _gathers_scores = False
    return everyone


def _words(call: Call) -> str:
    """Such as "all_reduce of 2,048 bytes"; the bytes only where all ranks need as many."""
    if call.kind in _SAME_IN | _SAME_OUT:
        return f"{call.kind} of {call.bytes_out if call.kind in _SAME_OUT else call.bytes_in:,} bytes"
    return call.kind


def _how_they_part(everyone: list[tuple[str, str]]) -> str:
    """Return the sentence for what all ranks are about to do; "" where that is the same."""
    if len(set(everyone)) == 1 and everyone[0][0] != _ERROR:
        return ""
    calls: dict[str, list[int]] = {}
    for rank, (state, text) in enumerate(everyone):
        if state == _ERROR:
            return f"Rank {rank}{text}"
        if state == _CALL:
            calls.setdefault(text, []).append(rank)
    called = "; ".join(f"{text} on {rank_names(ranks)}" for text, ranks in calls.items())
    if len(calls) > 1:
        return f"The ranks call different collectives: {called}. Each would wait for the others."
    absent = [rank for rank, (state, _) in enumerate(everyone) if state != _CALL]
    return f"A rank would wait for ever: {called}, and no such call on {rank_names(absent)}."

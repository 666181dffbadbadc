"""Write a recording of four blocks out for as many blocks as the model has.

A block's part of a step is the same for all blocks but the first and the last. So the part of the second is
repeated, with its references moved along. That the parts of the second and the third block are the same, up
to that move, is checked; nothing is fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

from fsdp_utils.planner.work_items import Alloc, Free, Gone, Label, Recording, Send

RECORDED = 4  # blocks: the first, two that are compared, the last
ALL = list(range(RECORDED))
MIDDLE = 1  # this block and the next are compared, and this one is repeated


class Irregular(Exception):
    """The blocks do not repeat as they would have to."""


@dataclass
class _Part:
    """The items under one label; `stack` is empty unless it belongs to a run over all recorded blocks."""

    label: Label
    items: list[Any]
    stack: str = ""
    index: int = 0  # the number of the block


class _Place(NamedTuple):
    """Where memory was allocated, in a model of any number of blocks."""

    run: int  # the part's
    stack: str
    index: Any
    ordinal: int


def extend(recording: Recording, stacks: Mapping[str, int]) -> Recording:
    """Return the recording of the whole model, with its blocks of memory named by their places.

    The given one has `RECORDED` blocks of each stack; `stacks` has how many the whole model has, by name.
    """
    runs = _runs(recording, stacks)
    _use_places(runs)
    extended: Recording = []
    allocated: set[_Place] = set()
    for run in runs:
        for part, index in _written(run, stacks):
            label, *items = _moved(part, index, stacks)
            for item in items:
                if isinstance(item, Alloc):
                    allocated.add(item.block)
                elif isinstance(item, Free):
                    if item.block not in allocated:
                        raise Irregular(f"{part.label}, block {index}: frees what is not there")
                    allocated.remove(item.block)
            if items:
                extended.append((label, items))
    return extended


def _runs(recording: Recording, stacks: Mapping[str, int]) -> list[list[_Part]]:
    """Group the parts in their order: a run over all blocks of a stack, in either direction, is one group.

    What stands between two blocks of a run goes with the first of them.
    """
    parts = [_Part(label, list(items), *_block(label.unit, stacks)) for label, items in recording]
    runs: list[list[_Part]] = []
    position = 0
    while position < len(parts):
        first = parts[position]
        own = list(islice((n for n in range(position, len(parts)) if parts[n].stack), RECORDED))
        run = [parts[n] for n in own]
        end = own[-1] + 1 if first.stack else position + 1
        phases = {part.label.phase for part in parts[position:end]}
        is_run = {part.stack for part in run} == {first.stack} and len(phases) == 1
        if is_run and [part.index for part in run] in (ALL, ALL[::-1]):
            for one, following in pairwise(own):
                parts[one].items += [item for part in parts[one + 1 : following] for item in part.items]
        elif first.stack and first.index not in (0, RECORDED - 1):
            raise Irregular(f"{first.label}: expected all {RECORDED} blocks in a row")
        else:  # something of the first or the last block alone, or of no block
            first.stack, first.index = "", 0
            run, end = [first], position + 1
        runs.append(run)
        position = end
    return runs


def _use_places(runs: list[list[_Part]]) -> None:
    """Name each block of memory by the place where it was allocated."""
    places: dict[int, _Place] = {}
    for number, run in enumerate(runs):
        for part in run:
            made = count()
            for n, item in enumerate(part.items):
                if isinstance(item, Alloc):
                    places[item.block] = _Place(number, part.stack, part.index, next(made))
                if isinstance(item, Alloc | Free):
                    part.items[n] = item._replace(block=places[item.block])


def _written(run: list[_Part], stacks: Mapping[str, int]) -> list[tuple[_Part, int]]:
    """Return the parts that the whole model has in place of a run, each with the number of its block."""
    first = run[0]
    if not first.stack:
        return [(first, 0)]
    more = stacks[first.stack] - RECORDED
    by_index = sorted(run, key=lambda part: part.index)
    one, other = by_index[MIDDLE : MIDDLE + 2]
    if _moved(one, MIDDLE + 1, dict.fromkeys(stacks, RECORDED)) != [other.label, *other.items]:
        raise Irregular(f"{one.label} and {other.label} differ")
    written = [(part, part.index + more * (part.index > MIDDLE)) for part in by_index]
    written[MIDDLE + 1 : MIDDLE + 1] = [(one, MIDDLE + 1 + extra) for extra in range(more)]
    return written if first.index == 0 else written[::-1]


def _moved(part: _Part, index: int, stacks: Mapping[str, int]) -> list[Any]:
    """Return label and items, with what they refer to, as those of another block."""

    def move(stack: str, number: int) -> int:
        if part.stack == stack and part.index in (MIDDLE, MIDDLE + 1):
            return index + number - part.index
        return number if number <= MIDDLE else number + stacks[stack] - RECORDED

    moved: list[Any] = []
    for item in (part.label, *part.items):
        if isinstance(item, Alloc | Free) and (place := item.block).stack:
            item = item._replace(block=place._replace(index=move(place.stack, place.index)))
        elif isinstance(item, Send | Gone | Label):
            stack, number = _block(item.unit, stacks)
            item = item._replace(unit=f"{stack}.{move(stack, number)}") if stack else item
        moved.append(item)
    return moved


def _block(unit: str, stacks: Mapping[str, int]) -> tuple[str, int]:
    stack, _, number = unit.rpartition(".")
    return (stack, int(number)) if stack in stacks and number.isdigit() else ("", 0)

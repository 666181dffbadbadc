"""What would the recording be with more blocks? Recorded with four, written out for as many as there are.

A block's part of a step is the same for all blocks but the first and the last. So the part of the second is
repeated, with its references moved along: it frees what it had allocated itself, or what the block before it
had. That the second and the third block's parts are the same, up to that move, is checked; nothing is fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_utils.planner.work_items import Alloc, Free, Gone, Label, Recording, Send

RECORDED = 4  # blocks: the first, two that are compared, the last


class Irregular(Exception):
    """The blocks do not repeat as they would have to."""


class _Place(NamedTuple):
    """Where something was allocated: in which segment, in which sweep over the blocks, as what."""

    segment: int
    sweep: int | None
    at: int  # number of the block
    ordinal: int


@dataclass
class _Segment:
    label: Label
    entries: list[Any]
    sweep: int | None = None
    index: int = 0  # of the block
    more: list[tuple[Label, list[Any]]] = field(default_factory=list)  # what follows, up to the next block


def extend(recording: Recording, stacks: Mapping[str, int], recorded: int = RECORDED) -> Recording:
    """The recording of the whole model.

    Args:
        recording: with `recorded` blocks of each stack.
        stacks: names of the lists of blocks, and how many blocks they have in truth.

    Returns:
        A recording whose blocks of memory are numbered anew.

    Raises:
        Irregular: the parts of the second and third block differ.
    """
    segments = [_Segment(label, entries) for label, entries in recording]
    stack_of = _find_sweeps(segments, stacks, recorded)
    return _Writer(segments, stack_of, stacks, recorded).write()


def _find_sweeps(segments: list[_Segment], stacks: Mapping[str, int], recorded: int) -> list[str]:
    """Mark the segments that belong to a run over all blocks; the stack of each run."""
    stack_of: list[str] = []
    position = 0
    while position < len(segments):
        stack, index = _block(segments[position].label.unit, stacks)
        if stack is None:
            position += 1
            continue
        run, between = [position], []
        last, direction, ahead = index, 0, position + 1
        while ahead < len(segments):
            label = segments[ahead].label
            other, number = _block(label.unit, stacks)
            if label.phase != segments[position].label.phase:
                break
            if other is None:
                between.append(ahead)
            elif other == stack and abs(number - last) == 1 and direction in (0, number - last):
                run.append(ahead)
                direction, last = number - last, number
            else:
                break
            ahead += 1
        if len(run) == 1 and index in (0, recorded - 1):  # something of the first or the last block alone
            position += 1
            continue
        if len(run) != recorded:
            raise Irregular(f"{segments[position].label}: {len(run)} blocks in a row, expected {recorded}")
        for place, at in enumerate(run):
            segments[at].sweep = len(stack_of)
            segments[at].index = _block(segments[at].label.unit, stacks)[1]
            if place + 1 < recorded:  # what stands between two blocks goes with the first
                for gap in between:
                    if at < gap < run[place + 1]:
                        segments[at].more.append((segments[gap].label, segments[gap].entries))
        for gap in between:
            if gap < run[-1]:
                segments[gap].entries = []
        stack_of.append(stack)
        position = run[-1] + 1
    for segment in segments:
        for _, entries in segment.more:
            segment.entries = [*segment.entries, *entries]
    return stack_of


def _block(unit: str, stacks: Mapping[str, int]) -> tuple[str | None, int]:
    stack, _, number = unit.rpartition(".")
    return (stack, int(number)) if stack in stacks and number.isdigit() else (None, 0)


class _Writer:
    def __init__(
        self, segments: list[_Segment], stack_of: list[str], stacks: Mapping[str, int], recorded: int
    ) -> None:
        self._segments, self._stack_of, self._stacks, self._recorded = segments, stack_of, stacks, recorded
        self._middle = recorded // 2 - 1  # this block and the next are compared, and this one is repeated
        self._places: dict[int, _Place] = {}
        for number, segment in enumerate(segments):
            allocs = [entry for entry in segment.entries if isinstance(entry, Alloc)]
            for ordinal, alloc in enumerate(allocs):
                self._places[alloc.block] = _Place(number, segment.sweep, segment.index, ordinal)
        self._blocks: dict[_Place, int] = {}  # by place in the whole recording, its number there
        self._alive: set[int] = set()
        self._count = 0
        self._out: Recording = []

    def write(self) -> Recording:
        position = 0
        while position < len(self._segments):
            segment = self._segments[position]
            if segment.sweep is None:
                self._emit(position, segment, 0)
                position += 1
                continue
            run = [
                number
                for number in range(position, len(self._segments))
                if self._segments[number].sweep == segment.sweep
            ]
            self._sweep(sorted(run, key=lambda number: self._segments[number].index), segment.index != 0)
            position = run[-1] + 1
        return self._out

    def _sweep(self, run: list[int], descending: bool) -> None:
        middle = self._middle
        self._compare(self._segments[run[middle]], self._segments[run[middle + 1]])
        total = self._total(self._segments[run[0]])
        more = total - self._recorded
        plan = [(run[index], index) for index in range(middle + 1)]
        plan += [(run[middle], middle + 1 + extra) for extra in range(more)]
        plan += [(run[index], index + more) for index in range(middle + 1, self._recorded)]
        for number, index in reversed(plan) if descending else plan:
            self._emit(number, self._segments[number], index)

    def _emit(self, number: int, segment: _Segment, index: int) -> None:
        """A segment, at the block of that index in the whole model."""
        entries, ordinal = [], 0
        for entry in segment.entries:
            if isinstance(entry, Alloc):
                place = _Place(*self._key(number, segment.sweep), index, ordinal)
                self._blocks[place] = self._count
                self._alive.add(self._count)
                entries.append(entry._replace(block=self._count))
                self._count += 1
                ordinal += 1
            elif isinstance(entry, Free):
                block = self._blocks.get(self._moved(segment, index, self._places[entry.block]), -1)
                if block not in self._alive:
                    raise Irregular(f"{segment.label}, block {index}: frees what is not there")
                self._alive.remove(block)
                entries.append(Free(block))
            elif isinstance(entry, Send | Gone):
                entries.append(entry._replace(unit=self._renamed(segment, index, entry.unit)))
            else:
                entries.append(entry)
        if entries:
            label = segment.label
            self._out.append((label._replace(unit=self._renamed(segment, index, label.unit)), entries))

    def _key(self, number: int, sweep: int | None) -> tuple[int, int | None]:
        return (number, None) if sweep is None else (-1, sweep)

    def _moved(self, segment: _Segment, index: int, place: _Place) -> _Place:
        if place.sweep is None:
            return place._replace(at=0)
        moved = self._index(segment, index, self._stack_of[place.sweep], place.at)
        return _Place(-1, place.sweep, moved, place.ordinal)

    def _renamed(self, segment: _Segment, index: int, unit: str) -> str:
        stack, number = _block(unit, self._stacks)
        return unit if stack is None else f"{stack}.{self._index(segment, index, stack, number)}"

    def _index(self, segment: _Segment, index: int, stack: str, number: int) -> int:
        """Which block of the whole model is meant by a segment that names a recorded one?"""
        if self._is_middle(segment) and self._stack_of[segment.sweep or 0] == stack:
            return index + number - segment.index
        return number if number <= self._middle else number + self._stacks[stack] - self._recorded

    def _is_middle(self, segment: _Segment) -> bool:
        return segment.sweep is not None and segment.index in (self._middle, self._middle + 1)

    def _total(self, segment: _Segment) -> int:
        assert segment.sweep is not None
        return self._stacks[self._stack_of[segment.sweep]]

    def _compare(self, one: _Segment, other: _Segment) -> None:
        if [self._relative(one, entry) for entry in one.entries] != [
            self._relative(other, entry) for entry in other.entries
        ]:
            raise Irregular(f"{one.label} and {other.label} differ")

    def _relative(self, segment: _Segment, entry: Any) -> Any:
        """What an entry does, seen from its own block."""
        if isinstance(entry, Alloc):
            return entry._replace(block=0)
        if isinstance(entry, Free):
            place = self._places[entry.block]
            if place.sweep is None:
                return place
            return place._replace(segment=-1, at=place.at - segment.index)
        if isinstance(entry, Send | Gone):
            stack, number = _block(entry.unit, self._stacks)
            return entry if stack is None else entry._replace(unit=f"{stack}.{number - segment.index:+}")
        return entry

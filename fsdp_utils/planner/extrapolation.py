"""Write a recording of four blocks out for as many blocks as the model has.

A block's part of a step is the same for all blocks but the first and the last. So the part of the second is
repeated, with its references moved along: it frees what it had allocated itself, or what the block before it
had. That the parts of the second and the third block are the same, up to that move, is checked; nothing is
fitted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_utils.planner.work_items import Alloc, Free, Gone, Label, Recording, Send

RECORDED = 4  # blocks: the first, two that are compared, the last
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


class _Home(NamedTuple):
    """Where a block of memory was allocated."""

    group: int
    stack: str
    number: Any  # the block's, in the stack
    ordinal: int


def extend(recording: Recording, stacks: Mapping[str, int]) -> Recording:
    """Return the recording of the whole model, with its blocks of memory numbered anew.

    Args:
        recording: with `RECORDED` blocks of each stack.
        stacks: names of the lists of blocks, and how many blocks each has in the whole model.

    Raises:
        Irregular: the parts of the second and the third block differ.
    """
    groups = _grouped(recording, stacks)
    homes: dict[int, _Home] = {}
    for number, group in enumerate(groups):
        for part in group:
            allocs = [item for item in part.items if isinstance(item, Alloc)]
            for ordinal, alloc in enumerate(allocs):
                homes[alloc.block] = _Home(number, part.stack, part.index, ordinal)
    writer = _Writer(stacks, homes)
    for number, group in enumerate(groups):
        first = group[0]
        if not first.stack:
            writer.write(number, first, 0)
            continue
        by_index = sorted(group, key=lambda part: part.index)
        if writer.relative(by_index[MIDDLE]) != writer.relative(by_index[MIDDLE + 1]):
            raise Irregular(f"{by_index[MIDDLE].label} and {by_index[MIDDLE + 1].label} differ")
        more = stacks[first.stack] - RECORDED
        written = [(part, part.index + more * (part.index > MIDDLE)) for part in by_index]
        written[MIDDLE + 1 : MIDDLE + 1] = [(by_index[MIDDLE], MIDDLE + 1 + extra) for extra in range(more)]
        for part, index in written if first.index == 0 else reversed(written):
            writer.write(number, part, index)
    return writer.recording


def _grouped(recording: Recording, stacks: Mapping[str, int]) -> list[list[_Part]]:
    """The parts in order; those of a run over all blocks of a stack, in either direction, in one group.

    What stands between two blocks of a run goes with the first of them.
    """
    parts = [_Part(label, list(items), *_block(label.unit, stacks)) for label, items in recording]
    groups: list[list[_Part]] = []
    position = 0
    while position < len(parts):
        first = parts[position]
        run, between, end = [first], [], position + 1
        directions: tuple[int, ...] = (1, -1)
        for ahead in range(position + 1, len(parts) if first.stack else 0):
            part = parts[ahead]
            step = part.index - run[-1].index
            if part.label.phase != first.label.phase:
                break
            if not part.stack:
                between.append(part)
            elif part.stack == first.stack and step in directions:
                directions = (step,)
                run[-1].items += [item for gap in between for item in gap.items]
                run.append(part)
                between, end = [], ahead + 1
            else:
                break
        if len(run) == 1 and first.index in (0, RECORDED - 1):
            first.stack, first.index = "", 0  # something of the first or the last block alone
        elif first.stack and len(run) != RECORDED:
            raise Irregular(f"{first.label}: {len(run)} blocks in a row, expected {RECORDED}")
        groups.append(run)
        position = end
    return groups


def _block(unit: str, stacks: Mapping[str, int]) -> tuple[str, int]:
    stack, _, number = unit.rpartition(".")
    return (stack, int(number)) if stack in stacks and number.isdigit() else ("", 0)


class _Writer:
    def __init__(self, stacks: Mapping[str, int], homes: dict[int, _Home]) -> None:
        self.recording: Recording = []
        self._stacks, self._homes = stacks, homes
        self._alive: dict[_Home, int] = {}  # by place in the whole recording: the new number
        self._count = 0

    def write(self, group: int, part: _Part, index: int) -> None:
        """Add a part, as that of the block of this index in the whole model."""

        def moved(stack: str, number: int) -> int:
            if part.stack == stack and part.index in (MIDDLE, MIDDLE + 1):
                return index + number - part.index
            return number if number <= MIDDLE else number + self._stacks[stack] - RECORDED

        items, ordinal = [], 0
        for item in self._read(part, moved):
            if isinstance(item, Alloc):
                self._alive[_Home(group, part.stack, index, ordinal)] = self._count
                items.append(item._replace(block=self._count))
                self._count, ordinal = self._count + 1, ordinal + 1
            elif isinstance(item, Free):
                if item.block not in self._alive:
                    raise Irregular(f"{part.label}, block {index}: frees what is not there")
                items.append(Free(self._alive.pop(item.block)))
            else:
                items.append(item)
        if items:
            self.recording.append((self._named(part.label, moved), items))

    def relative(self, part: _Part) -> list[Any]:
        """Describe what the items do, seen from their block."""
        return list(self._read(part, lambda _, number: f"{number - part.index:+}"))

    def _read(self, part: _Part, moved: Callable[[str, int], Any]) -> Iterator[Any]:
        """The items, with each block of the model renamed, and what is freed by where it was allocated."""
        for item in part.items:
            if isinstance(item, Free):
                home = self._homes[item.block]
                yield Free(home._replace(number=moved(home.stack, home.number)) if home.stack else home)
            elif isinstance(item, Send | Gone):
                yield self._named(item, moved)
            else:
                yield item._replace(block=0) if isinstance(item, Alloc) else item

    def _named(self, item: Any, moved: Callable[[str, int], Any]) -> Any:
        stack, number = _block(item.unit, self._stacks)
        return item._replace(unit=f"{stack}.{moved(stack, number)}") if stack else item

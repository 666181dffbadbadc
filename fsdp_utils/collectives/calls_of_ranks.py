"""Compare the calls of all ranks, as they arrive on rank 0, and say in words where the ranks part."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_utils.collectives.call_site import CallSite
from fsdp_utils.distributed.agreement import rank_names

LATE_S = 1.0  # a parting is not reported for so long while a rank may yet publish its call
SILENT_S = 3.0  # a rank that has published nothing for so long is said not to answer


class Finding(NamedTuple):
    """The result of a comparison."""

    text: str  # the report; "" where the ranks are in step
    parted: bool = False  # for good; else a rank may still come
    gone: Sequence[int] = ()  # ranks that have left the block while others wait for them


class CallsOfRanks:
    """Holds, on rank 0, where each rank stands, and its calls that are not compared yet."""

    def __init__(self, world_size: int) -> None:
        self.left = dict.fromkeys(range(world_size), "")  # how each rank has left the block
        self.changed = time.monotonic()  # when the last new call arrived
        self._world_size = world_size
        self._heard = dict.fromkeys(range(world_size), float("-inf"))
        self._stands: dict[int, str] = {}
        self._last: dict[int, str] = {}
        self._parted_at = float("inf")  # when a parting was seen first
        self._compared: Counter[str] = Counter()  # calls of each group that all ranks agree on
        self._calls: dict[str, dict[int, list[CallSite]]] = {}  # those after them, by group and rank
        self._sites: dict[int, dict[int, CallSite]] = defaultdict(dict)  # by rank and its number

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a rank has published since its last message."""
        self._heard[rank] = time.monotonic()
        self.left[rank], self._stands[rank] = message["left"], message["stands"]
        for number, *new in message["calls"]:
            if new:
                self._sites[rank][number] = CallSite(*new[0])
            site = self._sites[rank][number]
            self._calls.setdefault(site.group, {member: [] for member in site.ranks})[rank].append(site)
            self._last[rank] = site.words
        if message["calls"]:
            self.changed = self._heard[rank]

    def find(self) -> Finding:
        """Compare call by call, in each process group, and forget the calls that all ranks agree on."""
        waits = Finding("")
        for group in sorted(self._calls):
            calls = self._calls[group]
            for number in range(max(map(len, calls.values()))):
                found = self._compare(group, number)
                if found.parted:
                    return found
                if found.text:
                    waits = waits if waits.text else found
                    break
            agreed = min(map(len, calls.values()))
            self._compared[group] += agreed
            for rank in calls:
                del calls[rank][:agreed]
        return waits

    def _compare(self, group: str, number: int) -> Finding:
        """Compare one call; `number` counts from those that are not compared yet."""
        members = list(self._calls[group])
        sites = {r: calls[number] for r, calls in self._calls[group].items() if number < len(calls)}
        absent = [rank for rank in members if rank not in sites]
        same_call = len({site.agreed for site in sites.values()}) == 1
        same_line = len({site.place for site in sites.values()}) == 1
        has_sizes = same_call and not absent and next(iter(sites.values())).gives
        sizes = _other_sizes([sites[rank] for rank in members], members) if has_sizes else []
        if same_call and same_line and not absent and not sizes:
            return Finding("")
        gone = [rank for rank in absent if self.left[rank]]
        if len(gone) < len(absent) and (gone or not (same_call and same_line)):
            self._parted_at = min(self._parted_at, time.monotonic())
            if time.monotonic() < self._parted_at + LATE_S:
                return Finding("")
        of = "all ranks" if len(members) == self._world_size else f"the group of {rank_names(members)}"
        title = f"collective {self._compared[group] + number + 1} of {of}"
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, site in sorted(sites.items()):
            ranks_of[site.words].append(rank)
        lines = [f"  {rank_names(ranks)}: {words}" for words, ranks in ranks_of.items()]
        lines += [f"  rank {rank}: {self._without_it(rank)}" for rank in absent] + sizes
        if same_call and same_line and absent:
            text = f"{title} waits for {rank_names(gone or absent)}."
            return Finding("\n".join([text, *lines]), bool(gone), gone)
        if same_call and not sizes:
            lines.append("If different lines are right here, use check_in_step(by_line=False).")
        return Finding("\n".join([f"the ranks part at {title}.", *lines]), parted=True)

    def _without_it(self, rank: int) -> str:
        """Say where a rank is that has not called a collective."""
        if time.monotonic() - self._heard[rank] > SILENT_S and not self.left[rank]:
            return "does not answer"
        last = f"its last: {self._last[rank]}" if rank in self._last else "it has called none yet"
        return f"{self.left[rank] or 'has not called it, and stands ' + self._stands[rank]}; {last}"


def _other_sizes(sites: Sequence[CallSite], members: Sequence[int]) -> list[str]:
    """Where a rank of an all_to_all gives another number of elements than its peer takes."""
    return [
        f"  rank {giver} gives {site.gives[j]} elements to rank {taker}, which takes {sites[j].takes[i]}"
        for i, (giver, site) in enumerate(zip(members, sites, strict=True))
        for j, taker in enumerate(members)
        if site.gives[j] != sites[j].takes[i]
    ]

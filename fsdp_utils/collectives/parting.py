"""Compare what the ranks have recorded for check_in_step, and say in words where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_utils.distributed.agreement import rank_names


class Finding(NamedTuple):
    """What a comparison has found.

    Args:
        text: the report; "" where the ranks are in step.
        parted: whether they have parted for good; else a rank may still come.
        gone: ranks that have left the block while others wait for them.
    """

    text: str
    parted: bool = False
    gone: Sequence[int] = ()


def have_parted(beats: Mapping[int, Any]) -> bool:
    """Do two ranks have different hashes of as many calls, or has a rank left that others wait for?"""
    for name in {name for beat in beats.values() for name in beat["groups"]}:
        groups = {rank: beat["groups"][name] for rank, beat in beats.items() if name in beat["groups"]}
        seen: dict[str, int] = {}
        for group in groups.values():
            if any(seen.setdefault(number, chain) != chain for number, chain in group["chains"].items()):
                return True
        counts = {rank: group["count"] for rank, group in groups.items()}
        gone = [
            rank for rank in next(iter(groups.values()))["ranks"] if rank in beats and beats[rank]["left"]
        ]
        if any(counts.get(rank, 0) < max(counts.values()) for rank in gone):
            return True
    return False


def find_parting(records: Mapping[int, Any], world_size: int) -> Finding:
    """Compare the records of the ranks call by call, in each process group."""
    waits = Finding("")
    for name in sorted({name for record in records.values() for name in record["groups"]}):
        groups = {rank: one["groups"][name] for rank, one in records.items() if name in one["groups"]}
        start = max(group["first"] for group in groups.values())
        end = max(group["first"] + len(group["calls"]) for group in groups.values())
        for number in range(start, end):
            found = _compare_call(records, groups, number, range(start, end), world_size)
            if found.parted:
                return found
            if found.text:
                waits = waits if waits.text else found
                break
    return waits


def _compare_call(
    records: Mapping[int, Any], groups: Mapping[int, Any], number: int, numbers: range, world_size: int
) -> Finding:
    sites = {
        rank: records[rank]["sites"][group["calls"][number - group["first"]]]
        for rank, group in groups.items()
        if number < group["first"] + len(group["calls"])
    }
    members = next(iter(groups.values()))["ranks"]
    is_last = number == numbers[-1]  # nobody knows what a rank without a record has called before
    absent = [rank for rank in members if rank not in sites and (rank in records or is_last)]
    whats, lines, _ = (set(values) for values in zip(*sites.values(), strict=True))
    if len(whats) == len(lines) == 1 and not absent:
        return Finding("")
    of = "all ranks" if len(members) == world_size else f"the group of {rank_names(members)}"
    title = f"collective {number} of {of}"
    told = _by_words({rank: words for rank, (_, _, words) in sites.items()})
    told += [f"  rank {rank}: {_absent(records.get(rank))}" for rank in absent]
    if len(whats) == len(lines) == 1:
        gone = [rank for rank in absent if rank in records and records[rank]["left"]]
        text = f"{title} waits for {rank_names(gone or absent)}."
        return Finding("\n".join([text, *told]), bool(gone), gone)
    if len(whats) == 1:
        told.append("If it is right to call them from different lines, use check_in_step(by_line=False).")
    oldest = " or before, which no rank remembers" if number == numbers[0] > 1 else ""
    return Finding("\n".join([f"the ranks part at {title}{oldest}.", *told]), True)


def _by_words(words: Mapping[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        ranks.setdefault(text, []).append(rank)
    return [f"  {rank_names(those)}: {text}" for text, those in ranks.items()]


def _absent(record: Any) -> str:
    """What a rank does that has not called a collective."""
    if record is None:
        return "does not answer"
    return f"{record['left'] or 'has not called it, and stands ' + record['stands']}; {record['last']}"

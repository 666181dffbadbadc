"""Merge the output of the ranks: shown once where they agree, by rank where they do not."""

from collections.abc import Mapping, Sequence
from typing import Any


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """ "rank 0", "ranks 1, 3" or "all ranks"."""
    if len(ranks) == world_size > 1:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def merge(texts: Mapping[int, str], world_size: int) -> str:
    """Merge what each rank printed into one labelled text.

    Lines that all ranks have alike at the start and at the end are shown once; what lies between
    stands rank by rank, in rank order.
    """
    ranks = sorted(texts)
    lines = {rank: _lines(texts[rank]) for rank in ranks}
    together = name_ranks(ranks, world_size)
    if len(set(map(tuple, lines.values()))) == 1:
        return _labelled(together, lines[ranks[0]])
    head = _common(list(lines.values()))
    rest = {rank: lines[rank][head:] for rank in ranks}
    tail = _common([own[::-1] for own in rest.values()])
    middle = {rank: own[: len(own) - tail] for rank, own in rest.items()}
    same = lines[ranks[0]]
    return (
        _labelled(together, same[:head])
        + "".join(_labelled(name_ranks([rank], world_size), middle[rank]) for rank in ranks)
        + _labelled(together, same[len(same) - tail :])
    )


def _lines(text: str) -> list[str]:
    """The lines as a terminal would leave them: of a line that was drawn over, the last drawing."""
    if not text:
        return []
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]


def _labelled(label: str, lines: Sequence[str]) -> str:
    return "".join(f"{label} | {line}".rstrip() + "\n" for line in lines)


def _common(sequences: Sequence[Sequence[str]]) -> int:
    """Count the first items that all sequences share."""
    count = 0
    for items in zip(*sequences, strict=False):
        if len(set(items)) > 1:
            break
        count += 1
    return count


class Live:
    """Shows lines while they come, labelled; the settled text takes their place at the end."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.shown: dict[int, int] = {}  # rank -> characters shown
        self.drawn: dict[int, str] = {}  # rank -> its unfinished line that is on the screen (a progress bar)
        self.status = ""  # the line on the screen that says what the ranks do

    @property
    def showing(self) -> bool:
        """Whether anything is on the screen that must be replaced at the end."""
        return bool(self.shown or self.drawn or self.status)

    def report(self, status: str) -> None:
        """Show one line that says what the ranks do, in place of the one before; "" takes it away."""
        if status != self.status:
            print("\r" + status.ljust(len(self.status)) + "\r" * (not status), end="", flush=True)
            self.status = status

    def update(self, texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            label = name_ranks([rank], self.world_size)
            start = self.shown.get(rank, 0)
            end = text.rfind("\n") + 1
            if end > start:
                self.report("")
                print("\r" * bool(self.drawn) + _labelled(label, _lines(text[start:end])), end="", flush=True)
                self.shown[rank] = end
                self.drawn.clear()
            unfinished = text[max(start, end) :]
            if "\r" in unfinished and self.drawn.get(rank) != unfinished:
                self.report("")
                print("\r" + _labelled(label, _lines(unfinished)[-1:]).rstrip("\n"), end="", flush=True)
                self.drawn[rank] = unfinished


def show_values(shown: Mapping[int, Sequence[Mapping[str, Any]]], world_size: int) -> None:
    """Show figures and values, each with `data` and `metadata`: once where the ranks agree, else by rank."""
    from IPython.display import display

    ranks = sorted(shown)
    data_of = {rank: [value["data"] for value in shown[rank]] for rank in ranks}
    agree = all(data == data_of[ranks[0]] for data in data_of.values())
    for group in [ranks] if agree else [[rank] for rank in ranks]:
        for value in shown[group[0]]:
            data = dict(value["data"])
            if set(data) == {"text/plain"}:
                print(_labelled(name_ranks(group, world_size), data["text/plain"].split("\n")), end="")
            else:
                print(f"{name_ranks(group, world_size)} |")
                display(data, metadata=value.get("metadata"), raw=True)

"""One run of a cell on all ranks: wait, show the output, free stuck ranks, report failures."""

import contextlib
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from fsdp_utils.answers import explained_in_a_line
from fsdp_utils.distributed.rank_processes import Ended
from fsdp_utils.notebook import output
from fsdp_utils.notebook.cluster import STREAMS, Cluster, Interrupts
from fsdp_utils.notebook.tracebacks import Failure, Position

CUT_S = 0.5  # after a failure the other ranks may return by themselves; then their connections are shut
INTERRUPT_S = 0.8  # ... after this those that are in no collective are interrupted
CUT_INTERRUPTED_S = 1.5  # an interrupted rank shuts its own; after this those that are back shut theirs
LOOK_S = 0.05  # how often to look at what the ranks print
STATUS_S = 1.0  # a cell that takes longer says what its ranks do
WAITING_S = 5.0  # a rank that is in the same collective for longer waits for the others
KILL_S = {"cpu": 3.0, "cuda": 20.0}  # ... and after this, killed; to abort NCCL's communicators takes longer
UNKNOWN = Position()


class RankError(RuntimeError):
    """A cell failed on a rank, or a rank died. The message says which and why, the details where."""

    def __init__(self, message: str, details: str, where: str | None = None) -> None:
        super().__init__(message)
        self.details = details
        self.where = where

    def _render_traceback_(self) -> list[str]:
        """For IPython: the rank's lines instead of the notebook's."""
        return [f"RankError: {self}", "", *self.details.splitlines()]


class Cell:
    """One run of a cell: one loop decides by what the ranks tell, their ends, the time and the interrupts."""

    def __init__(
        self,
        cluster: Cluster,
        source: str,
        chosen: list[int],
        timeout_s: float,
        interrupts: Interrupts,
        stuck_s: float | None = None,
    ) -> None:
        self.cluster = cluster
        self.chosen = chosen
        self.timeout_s = timeout_s
        self.stuck_s = stuck_s
        self.stuck = ""  # which ranks wait for each other, in words
        self.interrupts = interrupts
        cluster.forget_printed()
        self.calls = {rank: cluster.call(rank, "run_cell", source, timeout_s) for rank in chosen}
        self.outcomes: dict[int, Failure | None] = {}  # the ranks that have answered
        self.trouble_at: float | None = None  # when something first went wrong
        self.cut: set[int] = set()
        self.interrupted: dict[int, int] = {}  # ranks, and in which second after the trouble
        self.killed: set[int] = set()
        self.began = time.monotonic()
        streams = STREAMS if someone_watches() else ()
        self.live = {stream: output.Live(cluster.world_size) for stream in streams}

    def run(self) -> None:
        """Wait for all ranks, show what they printed, and raise what went wrong."""
        while self._busy():
            self.cluster.take_messages(LOOK_S)
            self._collect()
            self._free_stuck_ranks()
            for stream, live in self.live.items():
                live.update(self._texts(stream))
            if self.live:
                self.live["stdout"].report(self._status())
        self._show()
        failures = {rank: found for rank, found in self.outcomes.items() if found is not None}
        exits = dict(sorted(self.cluster.exits.items()))
        if not failures and not exits and not self.interrupts.come:
            return
        note = self._recover()
        if self.interrupts.come:
            error: Any = KeyboardInterrupt("the cell was interrupted on its ranks")
            lines = [f"KeyboardInterrupt: {error}", "", *self._where_stood(()), *(["", note] if note else [])]
            error._render_traceback_ = lambda: lines
            raise error
        self._raise(failures, exits, note)

    def _busy(self) -> list[int]:
        """The ranks that still run the cell."""
        return [rank for rank in self.chosen if rank not in {**self.outcomes, **self.cluster.exits}]

    def _collect(self) -> None:
        for rank, call in self.calls.items():
            if rank not in self.outcomes and call.answer is not None:  # a call that failed is an outcome, too
                self.outcomes[rank] = call.answer if isinstance(call.answer, Failure) else call.result()
        trouble = self.interrupts.come or self.cluster.exits.keys() & set(self.chosen)
        if self.trouble_at is None and not (trouble or any(self.outcomes.values())):
            self.stuck = self._wait_for_each_other() if self.stuck_s else ""
        if self.trouble_at is None and (trouble or any(self.outcomes.values()) or self.stuck):
            self.trouble_at = time.monotonic()

    def _wait_for_each_other(self) -> str:
        """Say where the ranks wait if none of them can go on; "" while one may."""
        places = {rank: self.calls[rank].position or UNKNOWN for rank in self._busy()}
        together = len({(p.collective, p.line) for p in places.values()}) == 1 and not self.outcomes
        limit_s = self.timeout_s if together else self.stuck_s or 0.0  # gloo's recv waits longer than it may
        waiting = [p.collective and p.seconds > limit_s and not p.runnable for p in places.values()]
        if not places or not all(waiting):
            return ""
        lines = [f"{output.name_ranks([rank], 0)} waits at {p.where}" for rank, p in places.items()]
        done = [f"{output.name_ranks([rank], 0)} has finished" for rank in sorted(self.outcomes)]
        return "; ".join([*lines, *done])

    def _status(self) -> str:
        """Say in one line what the ranks do, if some wait for others or nobody prints for long."""
        if time.monotonic() - self.began < STATUS_S:
            return ""
        doing: dict[str, list[int]] = {}
        busy, waits = self._busy(), False
        for rank in range(self.cluster.world_size):
            place = (rank in busy and self.calls[rank].position) or UNKNOWN
            if place.collective and place.seconds > WAITING_S:
                waits, what = True, f"waiting in {place.collective} (line {place.line})"
            elif rank in busy:
                what = f"at line {place.line}" if place.line else "running"
            else:
                what = "finished" if rank in self.chosen else "not in this cell"
            doing.setdefault(what, []).append(rank)
        if not (waits and len(doing) > 1) and any(live.shown or live.drawn for live in self.live.values()):
            return ""
        world_size = self.cluster.world_size
        return "; ".join(f"{output.name_ranks(some, world_size)}: {what}" for what, some in doing.items())

    def _texts(self, stream: str) -> dict[int, str]:
        texts = {rank: self.cluster.printed[rank, stream].read() for rank in self.chosen}
        return texts if any(texts.values()) else {}

    def _free_stuck_ranks(self) -> None:
        """Once a rank has failed nobody can finish a collective with it: get the others out, gently first."""
        if self.trouble_at is None or not self._busy():
            return
        since = time.monotonic() - self.trouble_at
        if since > (CUT_INTERRUPTED_S if self.interrupts.come else CUT_S):
            for rank in self.outcomes.keys() - self.cluster.exits.keys() - self.cut:
                self.cut.add(rank)
                self.cluster.call(rank, "shut_connections")
        interrupt_s = 0 if self.interrupts.come else INTERRUPT_S
        for rank in self._busy():
            if since > KILL_S[self.cluster.device]:
                self.killed.add(rank)
                self.cluster.kill(rank)
            elif since > interrupt_s and self.interrupted.get(rank) != int(since):
                self.interrupted[rank] = int(since)  # each second: one that has not begun the cell ignores it
                self.cluster.interrupt(rank)

    def _show(self) -> None:
        """Settle the output: text in rank order, then figures and values."""
        shown = {rank: call.displayed for rank, call in self.calls.items()}
        if any(live.showing for live in self.live.values()):
            from IPython.display import clear_output

            something_follows = any(shown.values()) or any(map(self._texts, STREAMS))
            clear_output(wait=something_follows)
        for name, stream in zip(STREAMS, (sys.stdout, sys.stderr), strict=True):
            if texts := self._texts(name):
                stream.write(output.merge(texts, self.cluster.world_size))
                stream.flush()
        output.show_values(shown, self.cluster.world_size)

    def _recover(self) -> str:
        """Make the process group whole again where it is not; returns what the reader should know."""
        exits, everyone = self.cluster.exits, range(self.cluster.world_size)
        lost: list[int] = []  # on which every later CUDA call would fail
        with contextlib.suppress(RuntimeError):  # another one has ended
            if self.cluster.device == "cuda":
                alive = [rank for rank in everyone if rank not in exits]
                found = zip(alive, self.cluster.ask(alive, "gpu_is_lost"), strict=True)
                lost = [rank for rank, is_lost in found if is_lost]
            if not (exits or lost or self.cut) and all(self.cluster.ask(everyone, "group_is_healthy")):
                return ""
        return regroup(self.cluster, lost)

    def _raise(self, failures: dict[int, Failure], exits: dict[int, Ended], note: str) -> NoReturn:
        """Raise what began it: a rank that died by itself, else the first that raised."""
        if self.stuck:
            raise RankError(f"the ranks wait for each other: {self.stuck}", note)
        if died := {rank: how for rank, how in exits.items() if rank not in self.killed}:
            when = "while it ran this cell" if died.keys() <= set(self.chosen) else "while this cell ran"
            raise ranks_died(died, when, "\n".join([*self._meanwhile(died), note]))
        in_order = sorted(failures, key=lambda rank: failures[rank].time)
        in_collective = [rank for rank in in_order if failures[rank].in_collective]
        timed_out = [rank for rank in in_collective if failures[rank].seconds >= self.timeout_s]
        first = in_order[0]
        if first in in_collective and timed_out:  # one that waited to the end, not one it took along
            first = timed_out[0]
        cause = failures[first]
        same = [rank for rank in sorted(failures) if _alike(failures[rank], cause)]
        label = output.name_ranks(same, self.cluster.world_size)
        raised = f"{cause.name}: {cause.message}"
        details = [f"{label}, {cause.text}", raised, "", *self._meanwhile(same)]
        if first in timed_out:
            details += [
                f"A collective waits at most {self.timeout_s:g} s; %%ranks --timeout SECONDS changes that.",
                "Has every rank entered it?",
                "",
            ]
        known = explained_in_a_line(f"{cause.text}\n{raised}")
        raise RankError(f"{label} raised {raised}", "\n".join([*details, note, known]).rstrip(), cause.where)

    def _meanwhile(self, but: Collection[int]) -> list[str]:
        others = self._where_stood(but)
        return ["Meanwhile", *others, ""] if others else []

    def _where_stood(self, but: Collection[int]) -> list[str]:
        lines = []
        for rank in self.chosen:
            if rank in but:
                continue
            found = self.outcomes.get(rank)
            if rank in self.outcomes and found is None:
                stood = "had finished the cell"
            elif rank in self.killed:
                stood = "could not be freed and was ended"
            else:
                stood = f"stood at {(found and found.where) or 'a place unknown'}"
            lines.append(f"{output.name_ranks([rank], 0)} {stood}")
        return lines


def regroup(cluster: Cluster, lost: Iterable[int] = ()) -> str:
    """Make the process group anew, with new ranks for those that ended or are lost; returns a note on it."""
    replaced = cluster.regroup(lost)
    note = "The process group was made anew: models sharded before are void."
    if replaced:
        new = output.name_ranks(replaced, 0)
        return f"{note} The new {new} has no variables yet; the other ranks keep theirs."
    return f"{note} Ordinary variables are kept."


def _alike(one: Failure, other: Failure) -> bool:
    """Whether two ranks failed alike; what torch says of a broken connection differs by its ports."""
    same = (one.name, one.where) == (other.name, other.where)
    return same and (other.in_collective or one.message == other.message)


def ranks_died(died: Mapping[int, Ended], when: str, details: str) -> RankError:
    how = "; ".join(f"{output.name_ranks([rank], 0)} {end}" for rank, end in died.items())
    return RankError(f"{how} {when}", details)


def someone_watches() -> bool:
    """Whether a person sees output as it comes: front ends that run a notebook unattended take no input."""
    kernel = getattr(ipython(), "kernel", None)
    return bool(kernel and kernel.get_parent().get("content", {}).get("allow_stdin"))


def ipython() -> Any:
    """The notebook's shell, or None outside IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None

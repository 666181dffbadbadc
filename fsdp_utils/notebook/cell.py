"""One run of a cell on all ranks: wait, show the output, free stuck ranks, report failures."""

import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from fsdp_utils.distributed.rank_processes import how_it_ended
from fsdp_utils.notebook import output
from fsdp_utils.notebook.cluster import STREAMS, Call, CallError, Cluster
from fsdp_utils.notebook.tracebacks import text_of

CUT_S = 0.5  # after a failure the other ranks may return by themselves; then their connections are shut
INTERRUPT_S = 0.8  # ... after this those that are in no collective are interrupted
CUT_INTERRUPTED_S = 1.5  # an interrupted rank shuts its own; after this those that are back shut theirs
LOOK_S = 0.05  # how often to look at what the ranks print
STATUS_S = 1.0  # a cell that takes longer says what its ranks do
STATUS_LENGTH = 100  # characters: a line that wraps cannot be replaced
WAITING_S = 5.0  # a rank that is in the same collective for longer waits for the others
KILL_S = {"cpu": 3.0, "cuda": 20.0}  # ... and after this, killed; to abort NCCL's communicators takes longer


class RankError(RuntimeError):
    """A cell failed on a rank, or a rank died. The message says which and why, the details where.

    `where` is the innermost line of the reader's own code, or None where it is not known.
    """

    def __init__(self, message: str, details: str, where: str | None = None) -> None:
        super().__init__(message)
        self.details = details
        self.where = where

    def _render_traceback_(self) -> list[str]:
        """For IPython: the rank's lines instead of the notebook's."""
        return [f"RankError: {self}", "", *self.details.splitlines()]


def _interrupt(details: list[str]) -> KeyboardInterrupt:
    """What an interrupted cell raises: IPython shows the details, where the ranks stood, as its traceback."""
    error = KeyboardInterrupt("the cell was interrupted on its ranks")
    lines = [f"KeyboardInterrupt: {error}", "", *details]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


class Cell:
    """One run of a cell: what each rank has printed, how it ended there, and what to do about it."""

    def __init__(self, cluster: Cluster, source: str, chosen: list[int], timeout_s: float) -> None:
        self.cluster = cluster
        self.chosen = chosen
        self.timeout_s = timeout_s
        cluster.forget_printed()
        self.calls = {rank: cluster.call(rank, "run_cell", source, timeout_s) for rank in chosen}
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.trouble_at: float | None = None  # when something first went wrong
        self.cut: set[int] = set()
        self.signalled: set[tuple[int, int]] = set()
        self.interrupted = False
        self.began = time.monotonic()
        streams = STREAMS if someone_watches() else ()
        self.live = {stream: output.Live(cluster.world_size) for stream in streams}

    def run(self) -> None:
        """Wait for all ranks, show what they printed, and raise what went wrong."""
        while len(self.outcomes) < len(self.chosen):
            try:
                self._look()
            except KeyboardInterrupt:  # noqa: PERF203 - every round must survive an interrupt
                self.interrupted = True
                self.trouble_at = self.trouble_at or time.monotonic()
        self._show()
        failures = {rank: outcome for rank, outcome in self.outcomes.items() if not outcome["ok"]}
        if not failures:
            return
        note = self._recover()
        if self.interrupted:
            raise _interrupt([*self._where_stood(self.chosen), *filter(None, ["", note])])
        self._raise(failures, note)

    def _look(self) -> None:
        """One round of waiting."""
        self.cluster.wait(LOOK_S)
        self._collect()
        self._free_stuck_ranks()
        for stream, live in self.live.items():
            live.update(self._texts(stream))
        if self.live:
            self.live["stdout"].report(self._status())

    def _status(self) -> str:
        """What the ranks do, in one line, if some wait for others or if nobody prints anything for long."""
        if time.monotonic() - self.began < STATUS_S:
            return ""
        positions = {rank: self.calls[rank].position for rank in self._busy()}
        waiting: dict[str, list[int]] = {}
        others: dict[str, list[int]] = {}
        for rank in self.chosen:
            place = positions.get(rank) or {"where": None, "collective": None, "seconds": 0.0}
            if rank in self.outcomes:
                others.setdefault("has|have finished the cell", []).append(rank)
            elif place["collective"] and place["seconds"] > WAITING_S:
                what = f"waits|wait in {place['collective']} (line {place['line']})"
                waiting.setdefault(what, []).append(rank)
            elif place["where"]:
                others.setdefault(f"stands|stand at line {place['line']}", []).append(rank)
        absent = [rank for rank in range(self.cluster.world_size) if rank not in self.chosen]
        if absent:
            others["does|do not run this cell"] = absent
        if waiting and len(waiting) + len(others) > 1:
            return "; ".join(_clause(ranks, what) for what, ranks in [*others.items(), *waiting.items()])
        if any(live.shown or live.drawn for live in self.live.values()):
            return ""
        where = {place["where"] for place in positions.values() if place and place["where"]}
        at = f" at {where.pop()}" if len(where) == 1 else ""
        return f"running on {output.name_ranks(self._busy(), self.cluster.world_size)}{at}"[:STATUS_LENGTH]

    def _texts(self, stream: str) -> dict[int, str]:
        texts = {rank: self.cluster.printed[rank, stream].read() for rank in self.chosen}
        return texts if any(texts.values()) else {}

    def _collect(self) -> None:
        exits = self.cluster.take_exits()  # first: what a rank has told before it ended is here then
        for rank in self._busy():
            if self.calls[rank].answer is not None:
                self.outcomes[rank] = _outcome(self.calls[rank])
        for rank, code in exits.items():
            self.outcomes[rank] = {"ok": False, "time": time.time(), "code": code, "where": None}
        if self.trouble_at is None and not all(outcome["ok"] for outcome in self.outcomes.values()):
            self.trouble_at = time.monotonic()

    def _busy(self) -> list[int]:
        return [rank for rank in self.chosen if rank not in self.outcomes]

    def _free_stuck_ranks(self) -> None:
        """Once a rank has failed nobody can finish a collective with it: get the others out, gently first."""
        if self.trouble_at is None or not self._busy():
            return
        since = time.monotonic() - self.trouble_at
        if since > (CUT_INTERRUPTED_S if self.interrupted else CUT_S):
            for rank in set(self.outcomes) - self.cut:
                self.cut.add(rank)
                if "code" not in self.outcomes[rank]:
                    self.cluster.call(rank, "shut_connections")
        signals = {
            signal.SIGINT: 0 if self.interrupted else INTERRUPT_S,
            signal.SIGKILL: KILL_S[self.cluster.device],
        }
        for number, after_s in signals.items():
            if since > after_s:
                again = [rank for rank in self._busy() if (rank, number) not in self.signalled]
                self.cluster.signal(again, number)
                self.signalled.update((rank, number) for rank in again)

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
        dead = [rank for rank, outcome in self.outcomes.items() if "code" in outcome]
        everyone = range(self.cluster.world_size)
        if self.cluster.device == "cuda":
            dead += self._end_ranks_without_gpu([rank for rank in everyone if rank not in dead])
        if not (dead or self.cut) and all(self.cluster.ask(everyone, "group_is_healthy")):
            return ""
        return regroup(self.cluster, dead)

    def _end_ranks_without_gpu(self, alive: list[int]) -> list[int]:
        """Kill the ranks on which every later CUDA call would fail; returns them."""
        answers = self.cluster.ask(alive, "gpu_is_lost")
        lost = [rank for rank, is_lost in zip(alive, answers, strict=True) if is_lost]
        self.cluster.signal(lost, signal.SIGKILL)
        return lost

    def _raise(self, failures: dict[int, dict[str, Any]], note: str) -> NoReturn:
        """Raise what began it: a rank that died by itself, else the first that raised."""
        killed_here = {rank for rank, number in self.signalled if number == signal.SIGKILL}
        codes = {rank: failure["code"] for rank, failure in failures.items() if "code" in failure}
        died = {rank: code for rank, code in codes.items() if rank not in killed_here}
        first = min(failures, key=lambda rank: (rank not in died, failures[rank]["time"]))
        in_collective = [rank for rank, failure in failures.items() if failure.get("in_collective")]
        timed_out = [rank for rank in in_collective if failures[rank]["seconds"] >= self.timeout_s]
        if first in in_collective and timed_out:  # one that waited to the end, not one it took along
            first = min(timed_out, key=lambda rank: failures[rank]["time"])
        cause = failures[first]
        same = sorted(died) or [rank for rank in self.chosen if _alike(self.outcomes[rank], cause)]
        label = output.name_ranks(same, self.cluster.world_size)
        details = [] if died else [f"{label}, {cause['text']}", f"{cause['name']}: {cause['message']}", ""]
        others = self._where_stood([rank for rank in self.chosen if rank not in same])
        details += ["Meanwhile", *others, ""] if others else []
        if first in timed_out:
            details += [
                f"A collective waits at most {self.timeout_s:g} s; %%ranks --timeout SECONDS changes that.",
                "Has every rank entered it?",
                "",
            ]
        details += [note] if note else []
        if died:
            raise ranks_died(died, "while it ran this cell", "\n".join(details))
        message = f"{label} raised {cause['name']}: {cause['message']}"
        raise RankError(message, "\n".join(details).rstrip(), cause["where"])

    def _where_stood(self, some: list[int]) -> list[str]:
        return [f"{output.name_ranks([rank], 0)} {self._stood(rank)}" for rank in some]

    def _stood(self, rank: int) -> str:
        outcome = self.outcomes[rank]
        if outcome["ok"]:
            return "had finished the cell"
        if "code" in outcome:
            return "could not be freed and was ended"
        return f"stood at {outcome['where'] or 'a place unknown'}"


def regroup(cluster: Cluster, dead: Iterable[int]) -> str:
    """Make the process group anew, with new ranks for the dead; returns what the reader should know."""
    dead = list(dead)
    cluster.regroup(dead)
    note = "The process group was made anew: models sharded before are void."
    if dead:
        new = output.name_ranks(dead, 0)
        return f"{note} The new {new} has no variables yet; the other ranks keep theirs."
    return f"{note} Ordinary variables are kept."


def _outcome(call: Call) -> dict[str, Any]:
    """How a cell ended on a rank, also where the rank could not say it: a failed call is an outcome."""
    try:
        return call.result()
    except Exception as error:
        unknown = {"text": "no place known", "where": None, "in_collective": False, "seconds": 0.0}
        name, message = type(error).__name__, text_of(error)
        if isinstance(error, CallError):
            name, message = error.name, error.message
        return {"ok": False, "time": time.time(), "name": name, "message": message, **unknown}


def _clause(ranks: list[int], what: str) -> str:
    """ "rank 2 waits in ..." or "ranks 0, 1 wait in ..." of "waits|wait in ..."."""
    verbs, _, rest = what.partition(" ")
    return f"{output.name_ranks(ranks, 0)} {verbs.split('|')[len(ranks) > 1]} {rest}"


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks failed alike; what torch says of a broken connection differs by its ports."""
    keys = {"ok", "code", "name", "where", "message"} - ({"message"} if other.get("in_collective") else set())
    return all(one.get(key) == other.get(key) for key in keys)


def ranks_died(dead: Mapping[int, int], when: str, details: str) -> RankError:
    how = "; ".join(f"{output.name_ranks([rank], 0)} {how_it_ended(code)}" for rank, code in dead.items())
    return RankError(f"{how} {when}", details)


def someone_watches() -> bool:
    """Whether a person sees output as it comes: front ends that run a notebook unattended take no input."""
    kernel = getattr(ipython(), "kernel", None)
    return bool(kernel and kernel.get_parent().get("content", {}).get("allow_stdin"))


def ipython() -> Any:
    """The notebook's shell, or None outside IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None

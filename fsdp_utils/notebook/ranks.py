"""Real ranks in a notebook: cells under `%%ranks` run on every rank, as a script does under torchrun.

    from fsdp_utils.notebook import ranks
    ranks.start()             # 4 processes in one process group: gloo on CPU, nccl on two GPUs or more

    %%ranks                   # first line of a cell: run it on every rank; `%%ranks 1,3` on some
    model = fully_shard(model)

    ranks.get("loss.item()")  # its value on each rank: [2.31, 2.31, 2.31, 2.31]
    ranks.stop()

The ranks are ipyparallel engines; added here are the process group, output in rank order, errors that
end the cell on every rank at once, and recovery. team.py knows the processes, nursery.py bears them,
engine.py runs inside them, output.py shows what they print, hosts.py starts them on other hosts.
"""

import argparse
import atexit
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from fsdp_utils.notebook import output
from fsdp_utils.notebook.excerpt import words
from fsdp_utils.notebook.hosts import RemoteTeam
from fsdp_utils.notebook.nursery import LESSON_BATCH
from fsdp_utils.notebook.team import SIGKILL, CallError, Team, result_of, until

TIMEOUT_S = 60.0  # the longest that a collective may wait, unless the cell says otherwise
LONGEST_TIMEOUT_S = 1e6  # eleven days; torch's clocks overflow long after
CUT_S = 0.2  # after a failure: time for the other ranks to come back by themselves, then they are cut free
INTERRUPT_S = 0.5  # ... after this those that are in no collective are interrupted
CUT_INTERRUPTED_S = 1.5  # an interrupted rank cuts itself free; after this the ranks that are back help
END_S = 10.0  # how long a killed rank may take to be gone
KILL_S = {"cpu": 3.0, "cuda": 20.0}  # ... and after this, killed; to abort NCCL's communicators takes longer

# What most often is behind the signal that ended a rank.
OFTEN = {
    "SIGKILL": " (often: out of memory)",
    "SIGABRT": " (often: C++ code ended it, such as NCCL's watchdog after a time-out or an error of the GPU)",
}

_team: Team | RemoteTeam | None = None


class RankError(RuntimeError):
    """A cell failed on a rank, or a rank died. The message says which and why, the details where."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        """For IPython: the rank's lines instead of the notebook's."""
        return [f"RankError: {self}", "", *self.details.splitlines()]


def start(
    world_size: int | None = None,
    *,
    device: str | None = None,
    method: str | None = None,
    profile: str | None = None,
    preload: Sequence[str] = (),
) -> None:
    """Start the ranks, or keep them if they run already.

    Args:
        world_size: how many. Default: the environment's FSDP_RANKS, else one for each GPU where there
            are two or more, else 4. Of 5, 7 or 9 GPUs it leaves some unused, because the lessons' batches
            of 24 samples are shared equally.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU for each rank). Default: "cuda" where there are two
            GPUs or more and enough for all ranks.
        method: "fork" from one process that has imported torch, the default where it exists, or "spawn".
        profile: start them on other hosts instead, through the launcher (SSH, Slurm, ...) that this IPython
            profile names: see hosts.py. There a rank that dies is not replaced: all end, to be started again.
        preload: modules that are slow to import and that the notebook and its ranks both need. The process
            that forks the ranks imports them once for all of them, and meanwhile the notebook does, too. With
            "spawn" or a profile each rank still imports them itself.

    Raises:
        ImportError: one of `preload` cannot be imported.
        RuntimeError: not in a notebook; `fsdp_utils.run_on_ranks` is for scripts. Or the profile's launcher
            did not start the ranks.
        ValueError: a number of ranks below 1, or more ranks on CUDA than there are GPUs, or no such profile.
    """
    global _team
    if _ipython() is None:
        raise RuntimeError(
            "ranks.start() serves notebooks, and this is not one. In a script use "
            "fsdp_utils.run_on_ranks(function, world_size=4), or torchrun."
        )
    if world_size is None and os.environ.get("FSDP_RANKS"):
        try:
            world_size = int(os.environ["FSDP_RANKS"])
        except ValueError:
            found = os.environ["FSDP_RANKS"]
            raise ValueError(f"FSDP_RANKS should be a number of ranks, found {found!r}.") from None
    if world_size is not None and not 1 <= world_size < 1000:
        raise ValueError(f"ranks.start({world_size}): expected 1 to 999 ranks.")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"ranks.start(device={device!r}): expected 'cpu' or 'cuda'.")
    if profile is not None and method is not None:
        raise ValueError(
            f"ranks.start(profile=..., method={method!r}): the profile's launcher starts the ranks."
        )
    if _team is not None:
        same = world_size in (None, _team.world_size) and device in (None, _team.device)
        if same and profile == _team.settings.get("profile") and _alive(_team):
            print(f"{_team.world_size} ranks are running already; their variables are kept.")
            return
        stop()
    if profile is None:
        _team = Team(world_size, device, method or ("fork" if hasattr(os, "fork") else "spawn"), preload)
    else:
        _team = RemoteTeam(world_size, device, profile)
    backend = "nccl, one GPU each" if _team.device == "cuda" else "gloo on CPU"
    hosts = list(dict.fromkeys(_team.settings.get("hosts", [])))
    print(
        f"{_team.world_size} rank{'s' * (_team.world_size > 1)} in one process group ({backend})"
        + f", on {', '.join(hosts)}" * bool(hosts)
    )
    if unused := _team.settings.get("unused_gpus"):
        gpus = _team.world_size + unused
        print(
            f"{gpus} GPUs are here. The lessons' batches of {LESSON_BATCH} samples have no equal shares for "
            f"{gpus} ranks; ranks.start({gpus}) starts them all the same."
        )


def stop() -> None:
    """End all ranks; nothing happens where there are none."""
    global _team
    if _team is not None:
        _team.end()
    _team = None


def get(expression: str) -> list[Any]:
    """The value of an expression on each rank.

    Args:
        expression: a variable's name, or any expression: `"loss.item()"`.

    Returns:
        A list by rank. Tensors come as CPU tensors; of a DTensor each rank gives its own shard.

    Raises:
        RankError: the expression fails on a rank, or its value cannot be pickled there or unpickled here.
    """
    team = _running()
    try:
        return team.ask(range(team.world_size), "evaluate", expression)
    except CallError as error:
        raise RankError(f"ranks.get({expression!r}) raised {error}", "") from None


def _alive(team: Team | RemoteTeam) -> bool:
    try:
        return not team.the_dead()
    except RuntimeError:
        return False


def _running() -> Team | RemoteTeam:
    if _team is None:
        raise RuntimeError("There are no ranks yet. Call ranks.start() in a cell of its own first.")
    return _team


def _ipython() -> Any:
    """The notebook's shell, or None outside IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


# --- a cell ------------------------------------------------------------------------------------------


def _magic(line: str, cell: str) -> None:
    """%%ranks [RANKS] [--timeout SECONDS]: run the cell on all ranks, or on some, as `%%ranks 1,3`."""
    team = _running()
    chosen, timeout_s = _arguments(line, team.world_size)
    dead = team.the_dead()
    if dead:
        note = _regroup(team, dead)
        raise _death(dead, "between two cells; this cell was not run", note, team.world_size)
    Cell(team, cell, chosen, timeout_s).run()


def _arguments(line: str, world_size: int) -> tuple[list[int], float]:
    parser = argparse.ArgumentParser("%%ranks", add_help=False, exit_on_error=False)
    parser.add_argument("ranks", nargs="?")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    try:
        arguments = parser.parse_args(shlex.split(line.split("#")[0]))
        names = range(world_size) if arguments.ranks is None else arguments.ranks.split(",")
        chosen = sorted({int(name) for name in names})
        if not all(0 <= rank < world_size for rank in chosen):
            raise ValueError
        if not 0 < arguments.timeout <= LONGEST_TIMEOUT_S:  # false for nan, too
            raise ValueError
    except (argparse.ArgumentError, ValueError, SystemExit):
        raise ValueError(
            f"%%ranks {line.strip()}: expected ranks from 0 to {world_size - 1}, as in `%%ranks 0` or "
            "`%%ranks 0,1`, and nothing for all; `--timeout SECONDS`, above 0 and at most "
            f"{LONGEST_TIMEOUT_S:,.0f}, limits how long a collective may wait."
        ) from None
    return chosen, arguments.timeout


class Cell:
    """One run of a cell: what each rank has printed, how it ended there, and what to do about it."""

    def __init__(self, team: Team | RemoteTeam, source: str, chosen: list[int], timeout_s: float) -> None:
        self.team = team
        self.chosen = chosen
        self.timeout_s = timeout_s
        self.calls = {rank: team.call(rank, "run_cell", source, timeout_s) for rank in chosen}
        self.printed = {rank: call.metadata for rank, call in self.calls.items()}  # filled while it runs
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.trouble_at: float | None = None  # when something first went wrong
        self.cut: set[int] = set()
        self.signalled: set[tuple[int, int]] = set()
        self.interrupted = False
        streams = ("stdout", "stderr") if _someone_watches() else ()
        self.live = {stream: output.Live(team.world_size) for stream in streams}

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
        note = self._mend()
        if self.interrupted:
            print(note, end="\n" * bool(note))
            raise KeyboardInterrupt
        self._raise(failures, note)

    def _look(self) -> None:
        """One round of waiting."""
        self._collect()
        self._free_the_stuck()
        for stream, live in self.live.items():
            live.update(self._texts(stream))
        time.sleep(0.002)

    def _texts(self, stream: str) -> dict[int, str]:
        texts = {rank: printed[stream] or "" for rank, printed in self.printed.items()}
        return texts if any(texts.values()) else {}

    def _collect(self) -> None:
        for rank in self._busy():
            if not self.calls[rank].ready():
                continue
            if _engine_is_gone(self.calls[rank]):
                self.team.signal([rank], SIGKILL)  # it has ended, or would never answer; the_dead tells
            else:
                self.outcomes[rank] = _outcome(self.calls[rank])
        for rank, code in self.team.the_dead().items():
            self.outcomes[rank] = {"ok": False, "time": time.time(), "code": code, "where": None}
        if self.trouble_at is None and not all(outcome["ok"] for outcome in self.outcomes.values()):
            self.trouble_at = time.monotonic()

    def _busy(self) -> list[int]:
        return [rank for rank in self.chosen if rank not in self.outcomes]

    def _free_the_stuck(self) -> None:
        """Once a rank has failed nobody can finish a collective with it: get the others out, gently first."""
        if self.trouble_at is None or not self._busy():
            return
        since = time.monotonic() - self.trouble_at
        if since > (CUT_INTERRUPTED_S if self.interrupted else CUT_S):
            for rank in set(self.outcomes) - self.cut:
                self.cut.add(rank)
                if "code" not in self.outcomes[rank]:
                    self.team.call(rank, "cut_group")
        signals = {
            signal.SIGINT: 0 if self.interrupted else INTERRUPT_S,
            SIGKILL: KILL_S[self.team.device],
        }
        for number, after_s in signals.items():
            if since > after_s:
                again = [rank for rank in self._busy() if (rank, number) not in self.signalled]
                self.team.signal(again, number)
                self.signalled.update((rank, number) for rank in again)

    def _show(self) -> None:
        """Settle the output: text in rank order, then figures and values."""
        for call in self.calls.values():
            if call.ready():
                call.wait_for_output(timeout=5)
        if any(live.shown or live.drawn for live in self.live.values()):
            from IPython.display import clear_output

            clear_output(wait=True)
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            texts = self._texts(name)
            if texts:
                stream.write(output.settle(texts, self.team.world_size))
                stream.flush()
        shown = {
            rank: [*printed["outputs"], *filter(None, [printed["execute_result"]])]
            for rank, printed in self.printed.items()
        }
        output.show_values(shown, self.team.world_size)

    def _mend(self) -> str:
        """Make the process group whole again where it is not; returns what the reader should know."""
        dead = [rank for rank, outcome in self.outcomes.items() if "code" in outcome]
        everyone = range(self.team.world_size)
        if self.team.device == "cuda":
            dead += self._end_those_without_gpu([rank for rank in everyone if rank not in dead])
        if not (dead or self.cut) and all(self.team.ask(everyone, "group_is_whole")):
            return ""
        return _regroup(self.team, dead)

    def _end_those_without_gpu(self, alive: list[int]) -> list[int]:
        """Kill the ranks on which every later CUDA call would fail; returns them."""
        lost = [rank for rank, gone in zip(alive, self.team.ask(alive, "gpu_is_lost"), strict=True) if gone]
        self.team.signal(lost, SIGKILL)
        ended: set[int] = set()
        until(lambda: ended.update(self.team.the_dead()) or ended >= set(lost), END_S, "ranks to end")
        return sorted(ended)

    def _raise(self, failures: dict[int, dict[str, Any]], note: str) -> NoReturn:
        """Raise what began it: a rank that died by itself, else the first that raised."""
        killed_here = {rank for rank, number in self.signalled if number == SIGKILL}
        codes = {rank: failure["code"] for rank, failure in failures.items() if "code" in failure}
        died = {rank: code for rank, code in codes.items() if rank not in killed_here}
        first = min(failures, key=lambda rank: (rank not in died, failures[rank]["time"]))
        timed_out = [
            r for r, f in failures.items() if f.get("in_collective") and f["seconds"] >= self.timeout_s
        ]
        if (
            failures[first].get("in_collective") and timed_out
        ):  # one that waited to the end, not one it took along
            first = min(timed_out, key=lambda rank: failures[rank]["time"])
        cause = failures[first]
        same = sorted(died) or [rank for rank in self.chosen if _alike(self.outcomes[rank], cause)]
        label = output.who(same, self.team.world_size)
        details = [] if died else [f"{label}, {cause['text']}", f"{cause['name']}: {cause['message']}", ""]
        others = [f"{output.who([rank], 0)} {self._stood(rank)}" for rank in self.chosen if rank not in same]
        details += ["Meanwhile", *others, ""] if others else []
        if first in timed_out:
            details += [
                f"A collective waits at most {self.timeout_s:g} s; %%ranks --timeout SECONDS changes that.",
                "Has every rank entered it?",
                "",
            ]
        details += [note] if note else []
        if died:
            raise _death(died, "while it ran this cell", "\n".join(details), self.team.world_size)
        raise RankError(f"{label} raised {cause['name']}: {cause['message']}", "\n".join(details).rstrip())

    def _stood(self, rank: int) -> str:
        outcome = self.outcomes[rank]
        if outcome["ok"]:
            return "had finished the cell"
        if "code" in outcome:
            return "could not be freed and was ended"
        return f"stood at {outcome['where'] or 'a place unknown'}"


def _regroup(team: Team | RemoteTeam, dead: Iterable[int]) -> str:
    """Make the process group anew, with new ranks for the dead; returns what the reader should know."""
    dead = list(dead)
    team.regroup(dead)
    if dead and isinstance(team, RemoteTeam):
        stop()
        return "Ranks of a profile are not replaced one by one: all were stopped. Call ranks.start() again."
    note = "The process group was made anew: models sharded before are void."
    if dead:
        return f"{note} The new {output.who(dead, 0)} has no variables yet; the other ranks keep theirs."
    return f"{note} Ordinary variables are kept."


def _engine_is_gone(call: Any) -> bool:
    """Whether ipyparallel has given up a call because it no longer hears from the engine."""
    return not call.successful() and getattr(call.exception(), "ename", None) == "EngineError"


def _outcome(call: Any) -> dict[str, Any]:
    """How a cell ended on a rank, also where the rank could not say it: a failed call is an outcome."""
    try:
        return result_of(call)
    except Exception as error:
        unknown = {"text": "no place known", "where": None, "in_collective": False, "seconds": 0.0}
        name, message = type(error).__name__, words(error)
        if isinstance(error, CallError):
            name, message = error.name, error.message
        return {"ok": False, "time": time.time(), "name": name, "message": message, **unknown}


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two ranks failed alike; what torch says of a broken connection differs by its ports."""
    keys = {"ok", "code", "name", "where", "message"} - ({"message"} if other.get("in_collective") else set())
    return all(one.get(key) == other.get(key) for key in keys)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "ended, how is known on its host only,"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"was killed by {name}{OFTEN.get(name, '')}"


def _death(dead: Mapping[int, int | None], when: str, details: str, world_size: int) -> RankError:
    how = "; ".join(f"{output.who([rank], world_size)} {_how_it_ended(code)}" for rank, code in dead.items())
    return RankError(f"{how} {when}", details)


def _someone_watches() -> bool:
    """Whether a person sees output as it comes: front ends that run a notebook unattended take no input."""
    kernel = getattr(_ipython(), "kernel", None)
    return bool(kernel and kernel.get_parent().get("content", {}).get("allow_stdin"))


if _ipython() is not None:
    _ipython().register_magic_function(_magic, magic_kind="cell", magic_name="ranks")
    atexit.register(stop)

"""The ranks of a notebook as processes: start, call, interrupt, replace and end them."""

import codecs
import contextlib
import importlib
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_utils.distributed.rank_errors import unpickle
from fsdp_utils.distributed.rank_processes import Ended, RankProcess, receive, start_rank, start_server
from fsdp_utils.notebook.tracebacks import Failure, Position
from fsdp_utils.torch_internals.names import DYNAMO

LESSON_BATCH = 24  # the samples of a lesson's batch; ranks need equal shares of it
TIMEOUT_S = 60.0  # the longest that a collective may wait, unless the cell says otherwise
CALL_LIMIT_S = 90.0
STREAMS = ("stdout", "stderr")
# imported once, by the server that the ranks are forked from; fully_shard imports DYNAMO: a second on a rank
PRELOAD = ("fsdp_utils.notebook.engine", "torch.distributed.fsdp", DYNAMO)


class CallError(RuntimeError):
    """A function that the notebook has called on a rank raised, or its result could not be unpickled."""


class Interrupts:
    """While this is entered, an interrupt only sets `come`, which the caller's loop looks at.

    A KeyboardInterrupt could be raised anywhere: amid a message, or between taking a result and keeping it.
    """

    come = False

    def __enter__(self) -> "Interrupts":
        self._before = signal.getsignal(signal.SIGINT)
        with contextlib.suppress(ValueError):  # not in the main thread, which alone is interrupted
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError, TypeError):  # the same; or the handler is not Python's
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.come = True


@dataclass
class Call:
    """A call of a function on a rank, and what the rank has told of it so far."""

    answer: bytes | Failure | None = None  # what the function returned, pickled, or how it failed
    displayed: list[dict[str, Any]] = field(default_factory=list)
    position: Position | None = None

    def result(self) -> Any:
        """Return what the function returned; raise a CallError if it raised or cannot be unpickled."""
        if isinstance(self.answer, Failure):
            raise CallError(f"{self.answer.name}: {self.answer.message}")
        assert self.answer is not None
        try:
            return unpickle(self.answer, "the rank's value")
        except RuntimeError as error:
            simpler = "Ask for something simpler: tensors, numbers, and lists and dictionaries of them"
            raise CallError(f"RuntimeError: {error}. {simpler}") from None


class Printed:
    """The growing file of what a rank prints to its standard output or standard error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text = ""

    def read(self) -> str:
        if new := self._file.read():
            self.text += self._decode(new)
        return self.text


class Cluster:
    """The ranks of a notebook; arguments as of `ranks.start`."""

    def __init__(self, world_size: int | None, device: str | None, preload: Sequence[str] = ()) -> None:
        self.ended = False  # whether no process is left, so that only ranks.start() helps
        self.pids: dict[int, int] = {}
        self.exits: dict[int, Ended] = {}  # the ranks that have ended and are not replaced yet
        self.printed: dict[tuple[int, str], Printed] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: dict[int, RankProcess] = {}
        self._calls: dict[int, Call] = {}  # by number, those that are not answered yet
        self._number = 0
        try:
            self._method = start_server([*PRELOAD, *preload])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="IProgress not found")
                for name in preload:
                    importlib.import_module(name)
            self._start(0)
            (gpus,) = [0] if device == "cpu" else self.ask([0], "count_gpus")
            self.world_size, self.device = choose(world_size, device, gpus)
            for rank in range(1, self.world_size):
                self._start(rank)
            # Counting may have initialised CUDA on rank 0, which would then still find a GPU.
            self.regroup([0] if self.device == "cpu" and gpus else [])
        except BaseException:
            self.end()
            raise

    def call(self, rank: int, function: str, *args: Any) -> Call:
        """Call a function of engine.py on a rank."""
        self._number += 1
        call = self._calls[self._number] = Call()
        self._processes[rank].send((self._number, function, args))
        return call

    def ask(
        self,
        some: Iterable[int],
        function: str,
        *args: Any,
        limit_s: float = CALL_LIMIT_S,
        interrupts: Interrupts | None = None,
    ) -> list[Any]:
        """Call a function of engine.py on some ranks and wait for their answers, in that order.

        Raises the first rank's CallError, a KeyboardInterrupt if one of `interrupts` has come, a RuntimeError
        if a rank has ended, or a TimeoutError.
        """
        calls = {rank: self.call(rank, function, *args) for rank in some}
        end = time.monotonic() + limit_s
        while waiting := [rank for rank, call in calls.items() if call.answer is None]:
            if interrupts is not None and interrupts.come:
                raise KeyboardInterrupt
            if ended := self.exits.keys() & waiting:
                said = "".join(self.printed[rank, "stderr"].read()[-400:] for rank in ended)
                raise RuntimeError(
                    f"a rank ended before it answered. The next %%ranks cell replaces it. {said}".rstrip()
                )
            if time.monotonic() > end:
                raise TimeoutError(f"waited {limit_s:.0f} s for answers of the ranks")
            self.take_messages(0.1)
        return [call.result() for call in calls.values()]

    def take_messages(self, limit_s: float) -> bool:
        """Take what ranks tell, and notice those that end; wait for the first no longer than this."""
        running = [process for rank, process in self._processes.items() if rank not in self.exits]
        received = receive(running, limit_s)
        for process, message in received:
            if isinstance(message, Ended):
                process.end()  # it may have closed its connection only
                self.exits[process.rank] = message
                continue
            number, what, value = message
            call = self._calls.get(number, Call())
            if what == "display":
                call.displayed.append(value)
            elif what == "position":
                call.position = value
            else:
                call.answer = value
                self._calls.pop(number, None)
        return bool(received)

    def take_all_messages(self, limit_s: float = 1.0) -> None:
        """Take what has come between two cells: the end of a rank is behind what it told before."""
        end = time.monotonic() + limit_s
        while self.take_messages(0) and time.monotonic() < end:
            pass

    def interrupt(self, rank: int) -> None:
        """Stop the cell that a rank runs."""
        with contextlib.suppress(KeyError, ProcessLookupError):  # it has not joined yet; it has just ended
            os.kill(self.pids[rank], signal.SIGINT)

    def kill(self, rank: int) -> None:
        """End a rank and all that it started; that it has ended is noticed later."""
        self._processes[rank].end()

    def regroup(self, lost: Iterable[int] = ()) -> list[int]:
        """Replace the ranks that have ended, and these; form the group anew. Returns the new ranks."""
        dead = sorted({*self.exits, *lost})
        self._end(dead)
        for rank in dead:
            self._start(rank)
        everyone = range(self.world_size)
        store = self._directory / f"store{self._number}"
        joined = self.ask(everyone, "join_group", self.world_size, self.device, store, TIMEOUT_S)
        self.pids = dict(zip(everyone, joined, strict=True))
        self.forget_printed()
        return dead

    def forget_printed(self) -> None:
        """Leave out of the next cell's output what the ranks have printed until now."""
        for printed in self.printed.values():
            printed.read()
            printed.text = ""

    def end(self) -> None:
        """Leave no process behind."""
        self.ended = True
        with Interrupts():
            self._end(list(self._processes))
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> None:
        paths = {stream: self._directory / f"rank{rank}.{stream}" for stream in STREAMS}
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(path.open("ab")).fileno() for path in paths.values()]
            main = "fsdp_utils.notebook.engine:serve"
            self._processes[rank] = start_rank(self._method, main, rank, self._directory, output=files)
        self.exits.pop(rank, None)
        self.pids.pop(rank, None)
        for stream, path in paths.items():
            if (rank, stream) not in self.printed:
                self.printed[rank, stream] = Printed(path)

    def _end(self, some: Sequence[int]) -> None:
        """End ranks and all that they started, and wait until they are gone."""
        for rank in some:
            self._processes[rank].end()
        for rank in some:
            self._processes[rank].close()


def choose(world_size: int | None, device: str | None, gpus: int) -> tuple[int, str]:
    """Choose the number of ranks and their device."""
    if device is None:
        device = "cuda" if gpus >= 2 and (world_size or gpus) <= gpus else "cpu"
    if world_size is None:
        shares = [ranks for ranks in range(1, gpus + 1) if LESSON_BATCH % ranks == 0]
        world_size = max(shares, default=1) if device == "cuda" else 4
    if device == "cuda" and world_size > gpus:
        raise ValueError(
            f"ranks.start({world_size}, device='cuda'): nccl wants one GPU for each rank, and torch finds "
            f"{gpus} here. Start at most as many, or leave device out to run on the CPU."
        )
    return world_size, device

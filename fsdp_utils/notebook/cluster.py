"""The ranks of a notebook as processes: start, call, interrupt, replace and end them."""

import codecs
import contextlib
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp_utils.distributed.rank_processes import EXIT_S, RankProcess, start_rank, start_server
from fsdp_utils.notebook.tracebacks import text_of
from fsdp_utils.torch_internals.names import DYNAMO

LESSON_BATCH = 24  # the samples of a lesson's batch; ranks need equal shares of it
TIMEOUT_S = 60.0  # the longest that a collective may wait, unless the cell says otherwise
START_LIMIT_S = 90.0
CALL_LIMIT_S = 60.0
STREAMS = ("stdout", "stderr")


class CallError(RuntimeError):
    """A function that the notebook has called on a rank raised, or its result could not be unpickled."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


class Call:
    """A call of a function on a rank, and what the rank has told of it so far."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        self.displayed: list[dict[str, Any]] = []
        self.position: dict[str, Any] | None = None  # see `tracebacks.position`

    def take(self, what: str, value: Any) -> None:
        if what == "display":
            self.displayed.append(value)
        elif what == "position":
            self.position = value
        else:
            self.answer = value

    def result(self) -> Any:
        """What the function returned.

        Raises:
            CallError: it raised, or this process cannot unpickle its result.
        """
        assert self.answer is not None
        if "name" in self.answer:
            raise CallError(self.answer["name"], self.answer["message"])
        try:
            return pickle.loads(self.answer["value"])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # unpickling runs the reader's code, which may raise SystemExit, too
            raise CallError(
                type(error).__name__,
                f"{text_of(error)} (while the notebook unpickled the rank's value: ask for something "
                "simpler, such as tensors, numbers, and lists and dictionaries of them)",
            ) from None


class Printed:
    """What a rank prints to its standard output or standard error: a file that grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text = ""

    def read(self) -> str:
        if new := self._file.read():
            self.text += self._decode(new)
        return self.text


class Cluster:
    """The ranks of a notebook.

    Args:
        world_size: number of ranks; None: the GPUs where there are two or more, else 4.
        device: "cuda", "cpu", or None to choose.
        preload: modules to import in the server that ranks are forked from and, meanwhile, here.

    Attributes:
        unused_gpus: how many GPUs the default number of ranks leaves out.
        pids: process ids by rank.
        ended: whether no process is left, so that only ranks.start() helps.

    Raises:
        ImportError: one of `preload` cannot be imported.
        ValueError: `device` and `world_size` ask for more GPUs than there are.
        TimeoutError: the ranks are not there after 90 s.
    """

    def __init__(self, world_size: int | None, device: str | None, preload: Sequence[str] = ()) -> None:
        self.ended = False
        self.pids: dict[int, int] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: dict[int, tuple[RankProcess, threading.Thread]] = {}
        self._calls: dict[int, Call] = {}  # by number, those that are not answered yet
        self._number = 0
        self._exits: dict[int, int] = {}  # ranks that have ended and that nobody was told of
        self._news = threading.Event()
        self.printed: dict[tuple[int, str], Printed] = {}
        try:
            self._method = start_server(["fsdp_utils.notebook.engine", *_imported_here(), *preload])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="IProgress not found")
                for name in preload:
                    importlib.import_module(name)
            self._start([0])
            (gpus,) = [0] if device == "cpu" else self.ask([0], "count_gpus", limit_s=START_LIMIT_S)
            self.world_size, self.device, self.unused_gpus = choose(world_size, device, gpus)
            self._start(range(1, self.world_size))
            # Counting may have initialised CUDA on rank 0, which would then still find a GPU.
            self.regroup([0] if self.device == "cpu" and gpus else [])
        except BaseException:
            self.end()
            raise

    # --- calls ---

    def call(self, rank: int, function: str, *args: Any) -> Call:
        """Call a function of engine.py on a rank."""
        self._number += 1
        call = self._calls[self._number] = Call()
        with contextlib.suppress(OSError):  # the rank has ended, which `take_exits` tells
            self._processes[rank][0].pipe.send((self._number, function, args))
        return call

    def ask(self, some: Iterable[int], function: str, *args: Any, limit_s: float = CALL_LIMIT_S) -> list[Any]:
        """Call a function of engine.py on some ranks and wait for their answers, in that order.

        Raises:
            CallError: the function raised on a rank; of several, the first rank's.
            RuntimeError: a rank has ended.
            TimeoutError: some have not answered in time.
        """
        calls = [self.call(rank, function, *args) for rank in some]
        end = time.monotonic() + limit_s
        while any(call.answer is None for call in calls):
            if self._exits:
                said = "".join(self.printed[rank, "stderr"].read()[-400:] for rank in self._exits)
                raise RuntimeError(
                    f"a rank ended before it answered. The next %%ranks cell replaces it. {said}".rstrip()
                )
            if time.monotonic() > end:
                raise TimeoutError(f"waited {limit_s:.0f} s for answers of the ranks")
            self.wait(0.1)
        return [call.result() for call in calls]

    def wait(self, limit_s: float) -> None:
        """Wait until a rank tells something or ends, no longer than this."""
        if self._news.wait(limit_s):
            self._news.clear()

    def take_exits(self) -> dict[int, int]:
        """rank -> exit code (minus the signal) of those that ended since the last call."""
        return {rank: self._exits.pop(rank) for rank in list(self._exits)}

    def signal(self, some: Iterable[int], number: int) -> None:
        """Send a signal to some ranks."""
        for rank in some:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.pids[rank], number)

    # --- processes ---

    def regroup(self, dead: Iterable[int]) -> None:
        """Replace the dead by new processes, and form the process group of all ranks anew."""
        dead = sorted(dead)
        self._end(dead)
        self._start(dead)
        everyone = range(self.world_size)
        (port,) = self.ask([0], "open_store")
        joined = self.ask(everyone, "join_group", self.world_size, self.device, port, TIMEOUT_S)
        self.pids = dict(zip(everyone, joined, strict=True))
        self.forget_printed()

    def forget_printed(self) -> None:
        """Leave out of the next cell's output what the ranks have printed until now."""
        for printed in self.printed.values():
            printed.read()
            printed.text = ""

    def end(self) -> None:
        """Leave no process behind."""
        self.ended = True
        self._end(list(self._processes))
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, some: Iterable[int]) -> None:
        for rank in some:
            paths = {stream: self._directory / f"rank{rank}.{stream}" for stream in STREAMS}
            with contextlib.ExitStack() as opened:
                files = [opened.enter_context(path.open("ab")) for path in paths.values()]
                process = start_rank(
                    self._method,
                    "fsdp_utils.notebook.engine:serve",
                    rank,
                    self._directory,
                    output=[file.fileno() for file in files],
                )
            listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
            self._processes[rank] = process, listener
            listener.start()
            for stream, path in paths.items():
                if (rank, stream) not in self.printed:
                    self.printed[rank, stream] = Printed(path)

    def _end(self, some: Iterable[int]) -> None:
        """End ranks and all that they started, and wait until they are gone."""
        ending = [self._processes[rank] for rank in some]
        for process, _ in ending:
            process.end()
        for process, listener in ending:
            if listener.is_alive():
                listener.join(3 * EXIT_S)
            self._exits.pop(process.rank, None)

    def _listen(self, process: RankProcess) -> None:
        """In a thread for each process: take what the rank tells, and notice its end.

        An interrupt reaches the main thread alone, so that none cuts a message off.
        """
        with contextlib.suppress(Exception):  # the pipe is closed, or the rank has written nonsense to it
            while True:
                number, what, value = process.pipe.recv()
                call = self._calls.pop(number, None) if what == "answer" else self._calls.get(number)
                if call is not None:
                    call.take(what, value)
                self._news.set()
        code = process.exit_code()
        process.end()  # it may have closed its connection only
        self._exits[process.rank] = -int(signal.SIGKILL) if code is None else code
        self._news.set()
        process.close()


def choose(world_size: int | None, device: str | None, gpus: int) -> tuple[int, str, int]:
    """Choose the number of ranks and their device; returns also how many GPUs that leaves unused.

    Raises:
        ValueError: there are not as many GPUs.
    """
    asked = world_size
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
    return world_size, device, gpus - world_size if device == "cuda" and asked is None else 0


def _imported_here() -> list[str]:
    """Slow modules that the notebook has imported: the server imports them once for all ranks."""
    slow = ("torch.distributed.fsdp", "torch.distributed.checkpoint", DYNAMO, "sklearn.datasets")
    return [
        name
        for name in sys.modules
        if name in slow or (name.startswith("transformers.models.") and ".modeling_" in name)
    ]

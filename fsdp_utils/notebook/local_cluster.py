"""The ranks of a notebook as processes: start, call, interrupt, replace and end them, on this machine."""

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdp_utils._extras import need
from fsdp_utils.notebook.fork_server import is_written
from fsdp_utils.notebook.tracebacks import text_of
from fsdp_utils.torch_internals.names import DYNAMO

START_LIMIT_S = 90.0
CALL_LIMIT_S = 60.0
POLL_S = 0.002
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL

T = TypeVar("T")


def wait_until(ready: Callable[[], T], limit_s: float, what: str) -> T:
    """Wait for a true value of `ready()` and return it; TimeoutError after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not (value := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(POLL_S)
    return value


def _on_rank(function: str, *args: Any) -> Any:
    """Runs in a rank, where engine.py (and torch) is imported already; the notebook need not import it."""
    from fsdp_utils.notebook import engine

    return engine.answer(function, *args)


class CallError(RuntimeError):
    """A function that the notebook has called on a rank raised, or its result could not be unpickled."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


def result_of(call: Any, timeout_s: float | None = None) -> Any:
    """What the function returned that `Cluster.call` called.

    Raises:
        CallError: it raised, or this process cannot unpickle its result.
    """
    answer = call.get(timeout=timeout_s)
    if "name" in answer:
        raise CallError(answer["name"], answer["message"])
    try:
        return pickle.loads(answer["value"])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # unpickling runs the reader's code, which may raise SystemExit as well
        raise CallError(
            type(error).__name__,
            f"{text_of(error)} (while the notebook unpickled the rank's value: ask for something simpler, "
            "such as tensors, numbers, and lists and dictionaries of them)",
        ) from None


class Cluster(ABC):
    """The ranks of a notebook, wherever they run: call functions on them, signal them, end them."""

    client: Any  # of ipyparallel's controller
    settings: dict[str, Any]
    ended = False  # whether no process is left, so that only ranks.start() helps

    @property
    def world_size(self) -> int:
        return self.settings["world_size"]

    @property
    def device(self) -> str:
        return self.settings["device"]

    @abstractmethod
    def engine_of(self, rank: int) -> int:
        """ipyparallel's number of the engine that is this rank now."""

    @abstractmethod
    def has_ended_ranks(self) -> bool:
        """Whether a rank has ended that `ended_ranks` has not told of yet."""

    @abstractmethod
    def ended_ranks(self) -> Mapping[int, int | None]:
        """By rank, exit codes (minus the signal; None: unknown) of those that ended since the last call."""

    @abstractmethod
    def signal(self, some: Iterable[int], number: int) -> None:
        """Send a signal to some ranks."""

    @abstractmethod
    def regroup(self, dead: Iterable[int]) -> None:
        """Replace the dead ranks where that is possible, and form the process group of all ranks anew."""

    @abstractmethod
    def end(self) -> None:
        """End all ranks and whatever else was started for them."""

    def call(self, rank: int, function: str, *args: Any) -> Any:
        """Call a function of engine.py on a rank; returns ipyparallel's AsyncResult, for `result_of`."""
        return self.client[self.engine_of(rank)].apply_async(_on_rank, function, *args)

    def _join_group(self, alive: Iterable[int]) -> None:
        for joining in [self.call(rank, "join_group", rank, self.settings) for rank in alive]:
            result_of(joining, CALL_LIMIT_S)

    def ask(self, some: Iterable[int], function: str, *args: Any, limit_s: float = CALL_LIMIT_S) -> list[Any]:
        """Call a function of engine.py on some ranks and wait for their answers, in that order.

        Raises:
            CallError: the function raised on a rank; of several, the first rank's.
        """
        calls = [self.call(rank, function, *args) for rank in some]

        def answered() -> bool:
            return all(call.ready() for call in calls)

        wait_until(lambda: answered() or self.has_ended_ranks(), limit_s, "answers of the ranks")
        if not answered():
            raise RuntimeError("a rank ended before it answered. The next %%ranks cell replaces it.")
        return [result_of(call) for call in calls]


class LocalCluster(Cluster):
    """Ranks of this machine: the fork server that starts them, and a client of ipyparallel's controller.

    Args:
        world_size: number of ranks; None: the GPUs where there are two or more, else 4.
        device: "cuda", "cpu", or None to choose.
        method: "fork" or "spawn".
        preload: modules to import in the ranks' common parent and, meanwhile, here.

    Raises:
        ImportError: one of `preload` cannot be imported.
        ValueError: `device` and `world_size` ask for more GPUs than there are.
        TimeoutError: the ranks are not there after 90 s.
    """

    def __init__(
        self, world_size: int | None, device: str | None, method: str, preload: Sequence[str] = ()
    ) -> None:
        self.settings: dict[str, Any] = {
            "world_size": world_size,
            "device": device,
            "method": method,
            "directory": tempfile.mkdtemp(prefix="ranks-"),
            "generation": 0,
            "timeout_s": 60.0,
            "preload": [*_imported_here(), *preload],
        }
        self._events: list[dict[str, Any]] = []
        self._generation_of: dict[int, int] = {}  # rank -> which generation its present process came from
        self._fork_server = subprocess.Popen(
            [sys.executable, "-m", "fsdp_utils.notebook.fork_server", json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Jupyter interrupts the kernel's whole process group
        )
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="IProgress not found")
                for name in preload:
                    importlib.import_module(name)
            self._connect()
        except BaseException:
            self.end()
            raise

    def engine_of(self, rank: int) -> int:
        return self._generation_of[rank] * 1000 + rank

    def has_ended_ranks(self) -> bool:
        return self._happened("ended") is not None

    def ended_ranks(self) -> dict[int, int]:
        """rank -> exit code (minus the signal) of the ranks that ended since this was last asked."""
        dead = {}
        while event := self._take("ended"):
            if event["rank"] is None:
                raise RuntimeError("ipyparallel's controller has ended. Call ranks.start() again.")
            dead[event["rank"]] = event["code"]
        if self._happened("gone"):
            raise RuntimeError("the parent process of the ranks has ended. Call ranks.start() again.")
        return dead

    def signal(self, some: Iterable[int], number: int) -> None:
        for rank in some:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.pids[rank], number)

    def regroup(self, dead: Iterable[int]) -> None:
        """Replace the dead by new processes, and form the process group of all ranks anew."""
        dead = sorted(dead)
        alive = [rank for rank in range(self.world_size) if rank not in dead]
        if 0 in alive:
            (self.settings["store"],) = self.ask([0], "open_store")
        if dead:
            self.settings["generation"] += 1
            for rank in dead:
                self._generation_of[rank] = self.settings["generation"]
            assert self._fork_server.stdin is not None
            self._fork_server.stdin.write(json.dumps({"ranks": dead, "settings": self.settings}) + "\n")
            self._fork_server.stdin.flush()
            self._await_forks()
        self._join_group(alive)
        self._await_engines()

    def end(self) -> None:
        """Leave no process behind."""
        self.ended = True
        if hasattr(self, "client"):
            self.client.close()
        assert self._fork_server.stdin is not None
        self._fork_server.stdin.close()
        try:
            self._fork_server.wait(5)
        except subprocess.TimeoutExpired:
            # it does not listen while it imports torch
            getattr(os, "killpg", os.kill)(self._fork_server.pid, SIGKILL)
            self._fork_server.wait(5)

    # --- the fork server's events ---

    def _listen(self) -> None:
        assert self._fork_server.stdout is not None
        with self._fork_server.stdout as lines:
            for line in lines:
                self._events.append(json.loads(line))
        self._events.append({"event": "gone"})

    def _happened(self, *kinds: str) -> dict[str, Any] | None:
        return next((event for event in self._events if event["event"] in kinds), None)

    def _take(self, kind: str) -> dict[str, Any] | None:
        event = self._happened(kind)
        if event:
            self._events.remove(event)
        return event

    def _await(self, ready: Callable[[], T], what: str) -> T:
        """Wait for the start of something, unless it has failed."""
        wait_until(lambda: ready() or self._happened("failed", "gone", "ended"), START_LIMIT_S, what)
        if failed := self._happened("failed"):
            raise {"ValueError": ValueError}.get(failed["name"], RuntimeError)(failed["message"])
        if self._happened("gone", "ended"):
            raise RuntimeError(
                f"a process of the ranks ended while the notebook waited for {what}:{self._logs()}"
            )
        return ready()

    def _logs(self) -> str:
        """The end of what the processes wrote for themselves."""
        logs = sorted(Path(self.settings["directory"]).glob("*.log"))
        return "".join(f"\n{log.name}: ...{log.read_text(errors='replace')[-400:]}" for log in logs)

    def _connect(self) -> None:
        connection = Path(self.settings["directory"], "security", "ipcontroller-client.json")
        ipyparallel = need("ipyparallel", "notebooks")

        self._await(lambda: is_written(connection), "the controller to start")
        self.client = ipyparallel.Client(str(connection), timeout=int(START_LIMIT_S))
        self._await_forks()
        self._generation_of = dict.fromkeys(range(self.world_size), 0)
        self._await_engines()

    def _await_forks(self) -> None:
        self._await(lambda: self._happened("forked"), "the ranks to be forked")
        forked = self._take("forked")
        assert forked is not None
        self.settings = forked["settings"]
        self.pids = {int(rank): pid for rank, pid in forked["pids"].items() if rank != "null"}

    def _await_engines(self) -> None:
        wanted = {generation * 1000 + rank for rank, generation in self._generation_of.items()}
        self._await(lambda: wanted <= set(self.client.ids), "the ranks to connect")


def _imported_here() -> list[str]:
    """Slow modules that the notebook has imported: the ranks' common parent imports them once for all."""
    slow = (
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        DYNAMO,  # an optimizer imports it
        "sklearn.datasets",
    )
    return [
        name
        for name in sys.modules
        if name in slow or (name.startswith("transformers.models.") and ".modeling_" in name)
    ]

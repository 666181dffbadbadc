"""The process that the ranks of a notebook are forked from.

It imports torch once, starts ipyparallel's controller, forks an engine for each rank, forks a rank
again when asked to, reports each that ends, and kills everything when the notebook's kernel goes.
`ranks.start` runs it as `python -m fsdp_utils.notebook.fork_server '<settings as JSON>'`; it reads
commands and writes events, one JSON object a line, on its standard streams.

torch is imported here but CUDA is never initialised: a process that has done so cannot fork.
"""

import ctypes
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LESSON_BATCH = 24  # the samples of a lesson's batch; ranks need equal shares of it
COUNT_LIMIT_S = 60.0
HEARTBEAT_MS = 200  # ipyparallel admits an engine at a heartbeat; its default of 3000 is most of a start


# --- the children ------------------------------------------------------------------------------------


def controller(settings: dict[str, Any]) -> None:
    """Become ipyparallel's controller, on the loopback interface."""
    from ipyparallel.controller.app import IPController

    IPController.launch_instance(
        [
            *_profile(settings),
            "--ip=127.0.0.1",
            "--location=127.0.0.1",
            "--usethreads",
            "--nodb",
            f"--HeartMonitor.period={HEARTBEAT_MS}",
        ]
    )


def engine(settings: dict[str, Any], rank: int) -> None:
    """Become a rank: join the process group, then serve the notebook."""
    from ipyparallel.engine.app import IPEngine

    from fsdp_utils.notebook.engine import join_group

    join_group(rank, settings)
    IPEngine.launch_instance(
        [
            *_profile(settings),
            f"--file={settings['directory']}/security/ipcontroller-engine.json",
            f"--IPEngine.id={settings['generation'] * 1000 + rank}",  # cluster.py finds a rank's engine by it
            "--timeout=60",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
        ]
    )


def _profile(settings: dict[str, Any]) -> list[str]:
    directory = settings["directory"]
    return [f"--ipython-dir={directory}", f"--profile-dir={directory}", "--log-level=ERROR"]


def _die_with_parent() -> None:
    """Where the system offers it: this process goes when the one that forked it goes, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_child(settings: dict[str, Any], rank: int | None) -> NoReturn:
    """In a child: run rank `rank`, or the controller for None. Never returns."""
    code = 1
    try:
        _die_with_parent()
        if rank is None and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_die_with_parent)  # the controller forks a heart monitor
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # tqdm would draw widgets in a notebook; what ranks show is text.
        warnings.filterwarnings("ignore", message="IProgress not found")
        # The fork server's own streams carry commands and events: leave them.
        name = "controller" if rank is None else f"rank{rank}"
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(Path(settings["directory"]) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for own, stream in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(own, stream)
        controller(settings) if rank is None else engine(settings, rank)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# --- the fork server -------------------------------------------------------------------------------------


class ForkServer:
    """The child processes: starts, watches and ends them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.ends: dict[int | None, Callable[[], int | None]] = {}  # rank -> asks for its exit code
        self.pids: dict[int | None, int] = {}

    def fork(self, ranks: list[int]) -> None:
        """Start the processes of `ranks`."""
        from fsdp_utils.notebook import engine as at_engine  # imports torch

        if 0 in ranks:
            self.settings["store"] = at_engine.open_store()  # before there are ranks: all must know the port
        for rank in ranks:
            self.start(rank)
        at_engine.close_store()  # rank 0 has its own hold on it

    def start(self, rank: int | None) -> None:
        """Start one process; None is the controller's."""
        if self.settings["method"] == "fork":
            pid = os.fork()
            if pid == 0:
                run_child(self.settings, rank)
            self.ends[rank] = lambda: _exit_code(pid)
        else:
            command = [sys.executable, "-m", "fsdp_utils.notebook.fork_server", json.dumps(self.settings)]
            child = subprocess.Popen([*command, json.dumps(rank)])
            pid, self.ends[rank] = child.pid, child.poll
        self.pids[rank] = pid

    def reap(self) -> None:
        for rank, ended in list(self.ends.items()):
            code = ended()
            if code is not None:
                del self.ends[rank]
                send_event(event="ended", rank=rank, pid=self.pids.pop(rank), code=code)

    def end(self) -> NoReturn:
        """Kill all children and whatever they started, then go."""
        for pid in self.pids.values():
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        shutil.rmtree(self.settings["directory"], ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)  # the fork server leads a group of its own
        os._exit(0)


def _exit_code(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def is_written(connection: Path) -> bool:
    """Whether the controller has written a connection file to its end."""
    try:
        return bool(json.loads(connection.read_text()))
    except (OSError, ValueError):
        return False


def send_event(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def count_gpus() -> int:
    """Count the GPUs that torch can use, without initialising CUDA: a process that has done so cannot fork.

    Where NVML does not answer (MIG, Jetson, ROCm, no NVML), torch asks the driver and initialises it. So
    another process does.

    Raises:
        RuntimeError: that process failed.
    """
    import torch

    from fsdp_utils.torch_internals.runtime import nvml_device_count

    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    if torch.version.hip is None and nvml_device_count() >= 0:
        return torch.cuda.device_count()
    counted = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COUNT_LIMIT_S,
        check=False,
    )
    if counted.returncode != 0:
        raise RuntimeError(
            f"ranks.start(): counting this machine's GPUs failed:\n{counted.stderr.strip()[-400:]}\n"
            "To use the CPU alone, set os.environ['CUDA_VISIBLE_DEVICES'] = '' before ranks.start()."
        )
    return int(counted.stdout.split()[-1])


def resolve(settings: dict[str, Any]) -> None:
    """Choose the device and the number of ranks, now that torch can be asked about GPUs."""
    world_size, device, gpus = settings["world_size"], settings["device"], count_gpus()
    if device is None:
        device = "cuda" if gpus >= 2 and (world_size or gpus) <= gpus else "cpu"
    if world_size is None:
        world_size = _equal_shares(gpus) if device == "cuda" else 4
        settings["unused_gpus"] = gpus - world_size if device == "cuda" else 0
    if device == "cuda" and world_size > gpus:
        raise ValueError(
            f"ranks.start({world_size}, device='cuda'): nccl wants one GPU for each rank, and torch finds "
            f"{gpus} here. Start at most {gpus} or leave device out to run on the CPU."
            if gpus
            else "ranks.start(device='cuda'): torch finds no GPU here. Leave device out to run on the CPU."
        )
    settings.update(world_size=world_size, device=device)


def _equal_shares(gpus: int) -> int:
    """The largest number of ranks, at most one for each GPU, that the lessons' batches divide among."""
    return max((ranks for ranks in range(1, gpus + 1) if LESSON_BATCH % ranks == 0), default=1)


def read_commands(commands: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)  # the kernel closed the pipe, or is gone


def main() -> None:
    settings = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        run_child(settings, json.loads(sys.argv[2]))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counting GPUs does not initialise CUDA then
    kernel = os.getppid()
    fork_server = ForkServer(settings)
    try:
        fork_server.start(None)  # it imports what it needs while this process imports torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notebook has imported the same, and was warned
            for name in ("torch.distributed", "ipyparallel.engine.app", *settings["preload"]):
                importlib.import_module(name)
        resolve(settings)
        for_engines = Path(settings["directory"], "security", "ipcontroller-engine.json")
        while not is_written(for_engines) and None in fork_server.pids:
            fork_server.reap()
            time.sleep(0.01)
        fork_server.fork(list(range(settings["world_size"])))
    except Exception as error:
        send_event(event="failed", name=type(error).__name__, message=str(error))
        fork_server.end()
    send_event(event="forked", settings=settings, pids=fork_server.pids)
    commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    while os.getppid() == kernel:
        fork_server.reap()
        try:
            command = commands.get(timeout=0.02)
        except queue.Empty:
            continue
        if command is None:
            break
        settings.update(command["settings"])
        fork_server.fork(command["ranks"])
        send_event(event="forked", settings=settings, pids=fork_server.pids)
    fork_server.end()


if __name__ == "__main__":
    main()

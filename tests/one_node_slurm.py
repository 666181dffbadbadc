"""A Slurm of one node for tests: munged, slurmctld and slurmd from Debian's packages, in a temporary folder.

apt-get install munge slurmctld slurmd slurm-client
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LIMIT_S = 30.0
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
# How long a re-queued job waits, too (slurm.conf: cred_expire); the default is 120 s.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
# No cgroups: a container may have none.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What is missing here, or None."""
    needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    if missing := [tool for tool in needed if _where(tool) is None]:
        return f"{', '.join(missing)} of Slurm are not installed"
    if os.geteuid() != 0:
        return "starting Slurm's daemons takes root"
    return None


def _where(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Slurm runs; yields the environment in which its commands find it."""
    with tempfile.TemporaryDirectory(prefix="slurm") as name, ExitStack() as undo:
        folder, host = Path(name), socket.gethostname().split(".")[0]
        for part in ("state", "spool"):
            (folder / part).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=host, folder=folder, cores=os.cpu_count(), ports=[_free_port(), _free_port()]
            )
        )
        environment = {**os.environ, "SLURM_CONF": str(configuration)}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
        _start([*munged, f"--log-file={folder}/munged.log"], environment, folder, undo)
        _until((folder / "munge.socket").exists, "munged's socket", folder)
        folder.chmod(0o755)  # its clients may be other users
        _start(["slurmctld", "-D"], environment, folder, undo)
        _start(["slurmd", "-D", "-N", host], environment, folder, undo)

        def idle() -> bool:
            sinfo = ["sinfo", "--noheader", "-o", "%T"]
            done = subprocess.run(sinfo, env=environment, capture_output=True, text=True, timeout=30)
            return done.stdout.strip() == "idle"

        _until(idle, "the node to be idle", folder)
        yield environment
        with contextlib.suppress(subprocess.SubprocessError):
            cancel = ["scancel", "--signal=KILL", "--user=root"]
            subprocess.run(cancel, env=environment, timeout=30, check=False)


def _start(command: list[str], environment: dict[str, str], folder: Path, undo: ExitStack) -> None:
    log = undo.enter_context((folder / f"{command[0]}.out").open("w"))
    program = _where(command[0])
    assert program is not None
    options: Any = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True}
    process = subprocess.Popen([program, *command[1:]], **options)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    undo.callback(end)


def _until(ready: Callable[[], bool], what: str, folder: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not ready():
        if time.monotonic() > end:
            logs = [*folder.glob("*.log"), *folder.glob("*.out")]
            told = "".join(f"\n{log.name}: {log.read_text(errors='replace')[-800:]}" for log in sorted(logs))
            raise TimeoutError(f"waited {LIMIT_S:.0f} s for {what}{told}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

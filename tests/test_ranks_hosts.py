"""`ranks.start(profile=...)`: ranks that ipyparallel's SSH launcher starts on another host.

The other host is a network namespace with a name of its own and an sshd; this machine is the first.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks import two_hosts
from tests.notebook_kernel import Notebook

NEAR, FAR = "10.78.0.1", "10.78.0.2"
PROFILE = """
c.Cluster.engine_launcher_class = "ssh"
c.Cluster.controller_ip = "{near}"
c.Cluster.delay = 0.1
c.SSHEngineSetLauncher.engines = {{"{near}": 1, "{far}": 1}}
c.SSHLauncher.ssh_args = {ssh_args}
c.SSHLauncher.scp_args = {ssh_args}
c.SSHLauncher.remote_python = "{python}"
"""
WHOLE = "%%ranks\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"


def why_not() -> str | None:
    """What is missing here, or None."""
    if missing := [tool for tool in ("sshd", "ssh", "ssh-keygen", "scp") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} of OpenSSH are not installed"
    return two_hosts.why_not()


def connect_another_host(undo: ExitStack) -> str:
    """A second host, at the other end of a link from this one."""
    host, end = f"far{os.getpid()}", f"near{os.getpid()}"
    two_hosts.run("ip", "netns", "add", host)
    undo.callback(two_hosts.run, "ip", "netns", "del", host)
    two_hosts.run("ip", "link", "add", end, "type", "veth", "peer", "name", "link", "netns", host)
    two_hosts.run("ip", "addr", "add", f"{NEAR}/24", "dev", end)
    two_hosts.run("ip", "link", "set", end, "up")
    two_hosts.run("ip", "-n", host, "addr", "add", f"{FAR}/24", "dev", "link")
    for interface in ("link", "lo"):
        two_hosts.run("ip", "-n", host, "link", "set", "dev", interface, "up")
    return host


def serve_ssh(folder: Path, address: str, within: list[str], undo: ExitStack) -> None:
    """An sshd on port 2222 of one address that lets the test's own key in."""
    settings = folder / f"sshd_{address}"
    settings.write_text(
        f"Port 2222\nListenAddress {address}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPasswordAuthentication no\n"
        "Subsystem sftp internal-sftp\n"
    )
    sshd = [*within, shutil.which("sshd") or "sshd", "-D", "-f", str(settings)]
    process = subprocess.Popen(sshd, stderr=subprocess.DEVNULL, start_new_session=True)
    undo.callback(two_hosts.end, process)
    wait_until(lambda: answers(address), 10, f"sshd at {address}")


def wait_until(ready: Callable[[], object], limit_s: float, what: str) -> None:
    limit = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < limit, f"waited {limit_s} s for {what}"
        time.sleep(0.05)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, 2222), timeout=1).close()
        return True
    return False


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose profile `two` names this host and another."""
    folder = tmp_path_factory.mktemp("ssh")
    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        if why_not() is None:
            host = connect_another_host(undo)
            for key in ("key", "host_key"):
                subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / key], check=True)
            Path("/run/sshd").mkdir(exist_ok=True)
            serve_ssh(folder, NEAR, [], undo)
            another = ["unshare", "--uts", "sh", "-c", 'hostname far; exec "$@"', "sh"]
            serve_ssh(folder, FAR, ["ip", "netns", "exec", host, *another], undo)
        options = ["UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=no", "LogLevel=ERROR", "Port=2222"]
        ssh_args = ["-i", str(folder / "key"), *(f"-o{option}" for option in options)]
        profile = folder / "ipython" / "profile_two"
        profile.mkdir(parents=True)
        (profile / "ipcluster_config.py").write_text(
            PROFILE.format(near=NEAR, far=FAR, ssh_args=ssh_args, python=sys.executable)
        )
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        made = Notebook()
        undo.callback(made.close)
        made.run("from fsdp_utils.notebook import ranks")
        yield made


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            "ranks.start(profile='none')",
            "ValueError: ranks.start(profile='none'): there is no IPython profile",
        ),
        ("ranks.start(profile='two', method='fork')", "ValueError: ranks.start(profile=..., method='fork')"),
    ],
)
def test_a_wrong_profile_is_told_at_once(notebook: Notebook, call: str, told: str) -> None:
    failed = notebook.run(call)
    assert failed.error.startswith(told)
    assert failed.seconds < 5


@pytest.mark.skipif(why_not() is not None, reason=f"another host: {why_not()}")
def test_ranks_on_two_hosts_fail_recover_and_end_as_they_do_on_one(notebook: Notebook) -> None:
    name = socket.gethostname()
    started = notebook.run("ranks.start(2, profile='two')")
    assert started.text == f"2 ranks in one process group (gloo on CPU), on {name}, far\n", started
    notebook.run(
        "%%ranks\nimport os, signal, socket, torch, torch.distributed as dist\nrank = dist.get_rank()"
    )
    assert notebook.run(WHOLE).text == "all ranks | 2.0\n"
    names = "('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')"
    placed = f'ranks.get("(socket.gethostname(), *(os.environ[n] for n in {names}))")'
    assert notebook.run(placed).value == f"[('{name}', '0', '0', '1', '0'), ('far', '1', '0', '1', '1')]"

    raised = notebook.run("%%ranks\nif rank == 1:\n    raise ValueError('boom')\ndist.barrier()")
    assert raised.error == "RankError: rank 1 raised ValueError: boom"
    assert "rank 0 stood at line 3: dist.barrier()" in raised.traceback
    assert raised.seconds < 20
    assert notebook.run(WHOLE).text == "all ranks | 2.0\n"
    for stuck in ("while True: pass", "dist.recv(torch.zeros(2), src=(rank + 1) % 2)"):
        stopped = notebook.run(f"%%ranks\n{stuck}", interrupt_after=1.0)
        assert stopped.error.startswith("KeyboardInterrupt")
        assert stopped.seconds < 20
        assert notebook.run(WHOLE).text == "all ranks | 2.0\n"

    died = notebook.run("%%ranks\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert died.error == "RankError: rank 1 ended, how is known on its host only, while it ran this cell"
    assert "not replaced one by one: all were stopped" in died.traceback
    assert died.seconds < 20
    assert "Call ranks.start()" in notebook.run(WHOLE).error
    wait_until(lambda: not left_behind(), 5, "ipyparallel's processes to end")


@pytest.mark.skipif(why_not() is not None, reason=f"another host: {why_not()}")
def test_when_the_notebook_is_closed_no_process_stays(notebook: Notebook) -> None:
    assert notebook.run("ranks.start(2, profile='two')").error == ""
    assert len(left_behind()) >= 5  # two engines with their nannies, and the controller's
    notebook.close()
    wait_until(lambda: not left_behind(), 5, "ipyparallel's processes to end")


def left_behind() -> list[str]:
    """The processes of ipyparallel that know this notebook's profile."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            known = process.environ().get("IPP_PROFILE_DIR", "").endswith("profile_two")
            if known and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(" ".join(process.cmdline()))
    return found

"""Ranks of a notebook on other hosts: ipyparallel starts them there, through SSH, Slurm and others.

Which launcher, which hosts and which address of this one is what an IPython profile says, in its
`ipcluster_config.py` (`ipython profile create hosts --parallel` makes one):

    c.Cluster.engine_launcher_class = "ssh"
    c.Cluster.controller_ip = "10.0.0.1"  # where the other hosts reach this one
    c.SSHEngineSetLauncher.engines = {"10.0.0.1": 4, "10.0.0.2": 4}

Then `ranks.start(8, profile="hosts")`. fsdp_utils has to be installed on every host.
"""

import atexit
import contextlib
import logging
import signal
from collections.abc import Iterable
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.notebook.local_cluster import CALL_LIMIT_S, SIGKILL, Cluster, wait_until

END_LIMIT_S = 5.0


class RemoteCluster(Cluster):
    """Ranks that ipyparallel's launchers have started, and the process group between their hosts.

    Args:
        world_size: number of ranks; None: the profile's `c.Cluster.n`, else 4.
        device: "cuda", "cpu", or None to choose.
        profile: name of an IPython profile.

    Raises:
        ValueError: no such profile, it starts fewer engines than wanted, or a host has too few GPUs.
        RuntimeError: the engines did not start, or their hosts cannot reach each other.
    """

    def __init__(self, world_size: int | None, device: str | None, profile: str) -> None:
        self.settings = {"profile": profile, "timeout_s": CALL_LIMIT_S}
        self._launcher = _launcher(profile)
        wanted = world_size or self._launcher.n or 4
        try:
            self._start(wanted)
            atexit.register(self._end_with_kernel)  # last, so before ipyparallel closes what `end` needs
            self._engines = sorted(self.client.ids)[:wanted]
            self._gone: set[int] = set()
            self.settings["world_size"] = wanted
            self._place(device)
            self.regroup([])
        except BaseException:
            self.end()
            raise

    def engine_of(self, rank: int) -> int:
        return self._engines[rank]

    def has_ended_ranks(self) -> bool:
        return not {self._engines[r] for r in range(self.world_size) if r not in self._gone} <= set(
            self.client.ids
        )

    def ended_ranks(self) -> dict[int, None]:
        """The ranks that ended since this was last asked; their exit codes stay on their hosts."""
        there = set(self.client.ids)
        dead = {r for r, engine in enumerate(self._engines) if engine not in there} - self._gone
        self._gone |= dead
        return dict.fromkeys(sorted(dead))

    def signal(self, some: Iterable[int], number: int) -> None:
        """Send a signal; ipyparallel's nanny beside each engine delivers it."""
        targets = [self._engines[rank] for rank in some if rank not in self._gone]
        with contextlib.suppress(Exception):  # it has just ended by itself
            self.client.send_signal(number, targets=targets, block=False)

    def regroup(self, dead: Iterable[int]) -> None:
        """Form the process group anew. Ranks that have died are not replaced: then all end."""
        if list(dead):
            self.end()
            return
        address = self.settings["address"]
        (self.settings["store"],) = self.ask([0], "open_store", address)
        self._join_group(range(self.world_size))

    def end(self) -> None:
        """Leave no process behind, here and there."""
        self.ended = True
        atexit.unregister(self._end_with_kernel)
        if hasattr(self, "client"):
            with contextlib.suppress(Exception):  # those that cannot be reached are left to their launcher
                self.client.send_signal(SIGKILL, block=False)
                # A nanny that cannot tell the controller of the end any more would stay.
                wait_until(lambda: not self.client.ids, END_LIMIT_S, "the engines to end")
            self.client.close()
        with contextlib.suppress(Exception):  # what is gone already cannot be stopped
            self._launcher.stop_cluster_sync()

    def _end_with_kernel(self) -> None:
        # Jupyter sends SIGTERM to a kernel that takes more than some seconds, and SIGKILL as many later.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.end()

    def _start(self, wanted: int) -> None:
        """Start controller and engines, and wait for them as long as the profile's engine_timeout says."""
        ipyparallel = need("ipyparallel", "notebooks")

        profile = self.settings["profile"]
        try:
            self._launcher.start_cluster_sync(n=wanted)
            self.client = self._launcher.connect_client_sync()
            self.client.wait_for_engines(wanted, timeout=self._launcher.engine_timeout, interactive=False)
        except (ipyparallel.TimeoutError, TimeoutError) as error:
            found = len(self.client.ids) if hasattr(self, "client") else 0
            raise RuntimeError(
                f"ranks.start({wanted}, profile={profile!r}): {found} of {wanted} engines connected within "
                f"{self._launcher.engine_timeout} s. Does the profile's launcher start as many, and can "
                f"their hosts reach c.Cluster.controller_ip? Their logs are in the profile's folder log."
            ) from error
        except Exception as error:
            raise RuntimeError(
                f"ranks.start({wanted}, profile={profile!r}): the profile's launcher did not start the "
                f"engines: {type(error).__name__}: {error}"
            ) from error

    def _place(self, device: str | None) -> None:
        """Give neighbouring ranks to the same host; find where each host reaches the others."""
        everyone = range(self.world_size)
        arrived = dict(zip(self._engines, self.ask(everyone, "describe_host"), strict=True))
        order = list(dict.fromkeys(host for host, _, _ in arrived.values()))
        self._engines.sort(key=lambda engine: (order.index(arrived[engine][0]), engine))
        hosts, addresses, gpus = zip(*(arrived[engine] for engine in self._engines), strict=True)
        address = addresses[0]
        if len(order) > 1 and _is_loopback(address):  # rank 0 is where the controller is
            (address,) = self.ask([0], "address_towards", _outside(addresses, hosts))
        enough = all(gpus[rank] >= hosts.count(host) for rank, host in enumerate(hosts))
        if device == "cuda" and not enough:
            found = ", ".join(
                f"{host}: {hosts.count(host)} ranks, {gpus[hosts.index(host)]} GPUs" for host in order
            )
            raise ValueError(
                f"ranks.start({self.world_size}, device='cuda', profile=...): nccl wants one GPU for each "
                f"rank of a host. Found {found}. Start fewer there, or leave device out to run on the CPU."
            )
        self.settings.update(
            hosts=list(hosts),
            address=address,
            device=device or ("cuda" if enough else "cpu"),
            interfaces=self.ask(everyone, "interface_towards", address),
        )


def _launcher(profile: str) -> Any:
    """ipyparallel's cluster as the profile describes it."""
    ipyparallel = need("ipyparallel", "notebooks")
    from IPython.core.profiledir import ProfileDir, ProfileDirError
    from IPython.paths import get_ipython_dir

    try:
        where = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), profile)
    except ProfileDirError:
        raise ValueError(
            f"ranks.start(profile={profile!r}): there is no IPython profile of that name. Make it with "
            f"`ipython profile create {profile} --parallel`, and name a launcher in its ipcluster_config.py."
        ) from None
    return ipyparallel.Cluster(profile_dir=where.location, log_level=logging.ERROR)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _outside(addresses: Iterable[str], hosts: Iterable[str]) -> str:
    """An address that is seen from outside its host."""
    for address in addresses:
        if not _is_loopback(address):
            return address
    raise RuntimeError(
        f"the hosts {', '.join(dict.fromkeys(hosts))} reach this notebook on their own loopback interface "
        "only (a tunnel?), so they cannot form a process group. Set c.Cluster.controller_ip in the profile "
        "to an address that all of them can reach."
    )

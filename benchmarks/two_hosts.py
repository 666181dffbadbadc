"""Which sharding strategy suits two hosts with a slow link between them?

Makes two hosts of this machine: network namespaces, joined by one link whose rate is set with tc. torchrun
runs on both, with two ranks each. Measured are the time of a step and the bytes that leave a host, as the
link's own counter has them, beside what `record_collectives` counts.

    python benchmarks/two_hosts.py                        # a table; needs Linux, root, iproute2
    python benchmarks/two_hosts.py --rates 50
    python benchmarks/two_hosts.py --record               # also writes notebooks/recorded/two_hosts.json
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.machine import describe, keep, table
from fsdp_utils import record_collectives

MIB = 2**20
RANKS_PER_HOST = 2
PORT = 29400  # the namespaces are ours alone, so any port is free
LIMIT_S = 240.0  # for all strategies at one rate
STRATEGIES = ("DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")


# --- the two hosts


def why_not() -> str | None:
    """What is missing here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces take Linux and root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    host = f"try{os.getpid()}"
    try:
        run("ip", "netns", "add", host)
    except RuntimeError as error:
        return f"this kernel or container makes no network namespaces: {error}"
    run("ip", "netns", "del", host)
    return None


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def connect(hosts: list[str], rate_mbit: float | None, undo: ExitStack) -> None:
    """Make the hosts and the link between them: 10.77.0.1 and 10.77.0.2, each on its interface `link`."""
    for host in hosts:
        run("ip", "netns", "add", host)
        undo.callback(run, "ip", "netns", "del", host)
    ends = [f"{host}v" for host in hosts]  # a name has at most 15 characters
    run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for i, (host, end) in enumerate(zip(hosts, ends, strict=True), start=1):
        run("ip", "link", "set", end, "netns", host, "name", "link")
        run("ip", "-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "link")
        run("ip", "-n", host, "link", "set", "dev", "link", "up")
        run("ip", "-n", host, "link", "set", "dev", "lo", "up")
        if rate_mbit is not None:
            # burst: what may pass at once; latency: how long a packet may wait before it is dropped
            rate = ["rate", f"{rate_mbit:g}mbit", "burst", "256kb", "latency", "400ms"]
            run("tc", "-n", host, "qdisc", "add", "dev", "link", "root", "tbf", *rate)


def measure(rate_mbit: float | None, steps: int) -> list[dict[str, Any]]:
    """Run all strategies over a link of that rate; one result for each rank."""
    hosts = [f"fsdp{os.getpid()}{letter}" for letter in "ab"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        connect(hosts, rate_mbit, undo)
        running = []
        for i, host in enumerate(hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={i}"]
            torchrun += [f"--nproc-per-node={RANKS_PER_HOST}", "--master-addr=10.77.0.1"]
            torchrun += [f"--master-port={PORT}", __file__, f"--rank-of={folder}", f"--steps={steps}"]
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *torchrun],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "link", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=undo.enter_context((Path(folder) / f"{i}.log").open("w")),
                start_new_session=True,
            )
            undo.callback(end, process)
            running.append(process)
        limit = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in running):
            if time.monotonic() > limit or any(process.poll() for process in running):
                break
            time.sleep(0.1)
        if any(process.poll() != 0 for process in running):
            logs = "\n".join(log.read_text()[-1500:] for log in sorted(Path(folder).glob("*.log")))
            raise RuntimeError(f"torchrun failed, or took longer than {LIMIT_S:g} s:\n{logs}")
        return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill torchrun and its workers, whatever state they are in."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- a rank


def be_rank(folder: Path, steps: int) -> None:
    """Train with each strategy in turn; write what this rank saw."""
    dist.init_process_group("gloo")
    result = {strategy: train(build(strategy), steps) for strategy in STRATEGIES}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def build(strategy: str) -> Any:
    """Four layers of 4 MiB each, as DDP's model or as four FSDP2 units."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    if strategy == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    shape, names = (dist.get_world_size(),), ("shard",)
    if strategy == "HYBRID_SHARD":  # replicated over the hosts, sharded within each
        shape, names = (shape[0] // RANKS_PER_HOST, RANKS_PER_HOST), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=strategy != "SHARD_GRAD_OP")
    return fully_shard(model, mesh=mesh)


def train(model: Any, steps: int) -> dict[str, Any]:
    """Seconds of each step; bytes that this host sent in a step, and of them this rank, as recorded."""
    torch.manual_seed(dist.get_rank())
    sample = torch.randn(4, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()  # connections are made at the first use
    seconds, losses = [], []
    dist.barrier()
    before = sent_by_host()
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(step())
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    on_the_wire = (sent_by_host() - before) / steps
    with record_collectives(model, ranks_per_host=RANKS_PER_HOST) as trace:
        step()
    mean = torch.tensor(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    recorded = sum(crossing(event, dist.get_rank()) for event in trace.collectives)
    counted = {"wire_bytes": on_the_wire, "recorded_bytes": recorded}
    return {"seconds": seconds, **counted, "losses": mean.tolist()}


def sent_by_host() -> int:
    """Bytes that have left this network namespace over its link."""
    return int(Path("/sys/class/net/link/statistics/tx_bytes").read_text())


def crossing(event: Any, rank: int) -> float:
    """Bytes of a collective that this rank sends to the other host, as gloo passes them around a ring.

    gloo makes a reduce-scatter of an all-reduce of the whole and keeps a part of the result
    (ProcessGroupGloo::reduce_scatter_tensor_coalesced), which sends twice what nccl's would.
    """
    following = event.ranks[(event.ranks.index(rank) + 1) % len(event.ranks)]
    if following // RANKS_PER_HOST == rank // RANKS_PER_HOST:
        return 0.0
    return event.sent_bytes * (2 if event.kind == "reduce_scatter" else 1)


# --- the table


def summarize(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """By strategy: the step's median seconds, and MiB that leave a host in a step, counted in two ways."""
    hosts = len(by_rank) // RANKS_PER_HOST
    result: dict[str, Any] = {}
    for strategy in STRATEGIES:
        ranks = [rank[strategy] for rank in by_rank]
        result[strategy] = {
            "step_s": statistics.median(ranks[0]["seconds"]),
            "step_s_raw": ranks[0]["seconds"],
            "wire_mib": statistics.mean(rank["wire_bytes"] for rank in ranks) / MIB,
            "recorded_mib": sum(rank["recorded_bytes"] for rank in ranks) / hosts / MIB,
            "losses": ranks[0]["losses"],
        }
    return result


def show(rate: float | None, result: dict[str, Any]) -> None:
    """Print what lesson 6 asserts of a recording: bytes counted in two ways, and the time of a step."""
    print(f"\nlink: {'no limit' if rate is None else f'{rate:g} Mbit/s'}")
    numbers = [(name, r["step_s"], r["wire_mib"], r["recorded_mib"]) for name, r in result.items()]
    rows = [[name, f"{s:.3f}", f"{wire:.2f}", f"{recorded:.2f}"] for name, s, wire, recorded in numbers]
    print(table(["", "s/step", "MiB on the wire", "recorded"], rows))


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200], help="of the link, in Mbit/s")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write two_hosts.json for lesson 6")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        be_rank(arguments.rank_of, arguments.steps)
        return 0
    if reason := why_not():
        print(f"Not run: {reason}.")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go, however this ends
    print(describe())
    results = []
    for rate in [*sorted(arguments.rates), None]:
        results.append({"rate_mbit": rate, "strategies": summarize(measure(rate, arguments.steps))})
        show(rate, results[-1]["strategies"])
    if arguments.record:
        group = f"two hosts made of one machine, {RANKS_PER_HOST} ranks each, gloo, a link limited by tc"
        keep("two_hosts", __doc__, group=group, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

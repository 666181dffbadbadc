"""How long does a step take, and how much of its communication does nothing hide? A calculation, not a run.

Each kernel takes its operations and its bytes at the rates that a GPU reaches (`efficiency`); with `BOUND` it
takes as long as the longer of both at the published rates, or at the rate of matrix products that somebody
reached where one is known, which is a roofline. Each collective takes its bytes divided by the slowest link
on its way, and a latency for each hop of the ring. Who waits for whom is replayed by
`fsdp_utils.collectives.replay`. Python has to start every kernel, so a step takes at least that long. Left
out: waits for data, other users of the network, ranks that are slower than the rest.

Source: S. Williams et al., "Roofline", 2009; for the latencies src/graph/tuning.cc of NVIDIA/nccl (commit
01afd20): the base latency and the latency of a hop, for the algorithm "ring" and the protocol "simple".
"""

from dataclasses import dataclass, replace
from typing import Any

from fsdp_utils.collectives.events import COMPUTE, FREE, StepEvent
from fsdp_utils.collectives.replay import Replay, replay
from fsdp_utils.planner.efficiency import BOUND, Efficiency
from fsdp_utils.planner.gpus import GPU
from fsdp_utils.planner.work_items import Gone, Label, MicroBatch, Recording, Send, Step, Work

BASE_S = 8.4e-6
HOP_S = {"NVLink": 3.4e-6, "Infinity Fabric": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}


@dataclass(frozen=True)
class Timing:
    """One step of one rank.

    Args:
        step_s: all of it.
        compute_s: in which something is computed.
        exposed_s: in which something is sent and nothing computed.
        model_flop: operations of forward and backward, without those that are computed a second time, in
            checkpointed blocks and within attention; attention is counted without its mask, as is usual for
            MFU. A frozen matrix has none for its gradient.
        replay: when what happens.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    model_flop: int
    replay: Replay


def time_of(
    recording: Recording,
    gpu: GPU,
    efficiency: Efficiency = BOUND,
    *,
    ranks_per_host: int,
    offload_ratio: float = 0.0,
    micro_batches: int = 1,
    micro_batch_s: float = 0.0,
) -> Timing:
    """The time of the last step that is recorded.

    Args:
        recording: of the whole model.
        gpu: its rates and links.
        efficiency: how much of them is reached.
        ranks_per_host: that share the host's network.
        offload_ratio: 0 where nothing is offloaded; else bytes of a parameter on the host per byte gathered.
        micro_batches: of the step; no more than two are recorded, and the others take as long as the first.
        micro_batch_s: seconds of each that the recording does not show.
    """
    step = _last_step(recording)
    replayed, flop, launched = _replayed(step, gpu, efficiency, ranks_per_host, offload_ratio)
    step_s, compute_s, exposed_s = replayed.step_s, replayed.compute_s, replayed.exposed_s
    first = _first_micro_batch(step) if micro_batches > 2 else []
    if first:
        one, of_one, launched_in_one = _replayed(first, gpu, efficiency, ranks_per_host, offload_ratio)
        more = micro_batches - 2
        flop, launched = flop + more * of_one, launched + more * launched_in_one
        step_s += more * one.step_s
        compute_s += more * one.compute_s
        exposed_s += more * one.exposed_s
    step_s = max(step_s, launched * efficiency.launch_s) + micro_batches * micro_batch_s
    exposed_s += micro_batches * micro_batch_s
    return Timing(step_s, compute_s, exposed_s, flop, replayed)


def _replayed(
    step: Recording, gpu: GPU, efficiency: Efficiency, ranks_per_host: int, offload_ratio: float
) -> tuple[Replay, int, int]:
    """The replay, operations of the model, and kernels that Python starts."""
    events: list[StepEvent] = []
    model_flop = launched = 0
    beside = 0.0  # kernels on the streams of communication, before the next collective
    computing: list[Work] = []
    computing_label = Label("")
    unfused = replace(efficiency, fused=1.0)

    def add(kind: str, unit: str, phase: str, seconds: float) -> None:
        events.append(StepEvent(len(events), kind, unit, phase, seconds=seconds))

    def compute() -> None:
        if computing:
            reached = unfused if computing_label.phase == "optimizer" else efficiency
            seconds = sum(_kernel_s(work, gpu, reached) for work in computing)
            add(COMPUTE, computing_label.unit, computing_label.phase, seconds)
            computing.clear()

    for label, entries in step:
        compute()
        computing_label = label
        for entry in entries:
            if isinstance(entry, Work):
                launched += 1
                if not entry.again:
                    # backward of attention computes five products, of which the first is forward's
                    twice = entry.attention and label.phase == "backward"
                    model_flop += entry.flop * 4 // 5 if twice else entry.flop
                if label.phase == "optimizer" and offload_ratio:
                    continue  # the host does that
                if entry.stream == 0:
                    computing.append(entry)
                else:
                    beside += _kernel_s(entry, gpu, efficiency)
            elif isinstance(entry, Send):
                compute()
                seconds = beside + collective_s(entry, gpu, ranks_per_host, efficiency)
                seconds += offload_ratio * entry.nbytes / entry.ranks / (gpu.host_link_gb_s * 1e9)
                add(entry.kind, entry.unit, label.phase, seconds)
                beside = 0.0
            elif isinstance(entry, Gone):
                compute()
                add(FREE, entry.unit, label.phase, 0.0)
    compute()
    # an all-gather waits for the unit before the last: FSDP1's limiter; FSDP2 waits for its last copy-out
    return replay(events, limit_units=2), model_flop, launched


def collective_s(send: Send, gpu: GPU, ranks_per_host: int, efficiency: Efficiency = BOUND) -> float:
    """How long does a ring of that many ranks take?"""
    if send.ranks == 1:
        return 0.0
    rounds = 2 if send.kind == "all_reduce" else 1
    hosts = -(-send.ranks // send.ranks_per_host)
    speed = gpu.link_gb_s * efficiency.link
    if gpu.link == "Infinity Fabric":  # no switch: each pair of the eight GPUs has a seventh
        speed *= max(1, min(send.ranks_per_host - 1, 7)) / 7
    if hosts > 1:
        # the ring leaves the host over all its network cards; rings side by side share them
        shared = gpu.network_gb_s * efficiency.network * send.ranks_per_host / ranks_per_host
        speed = min(speed, shared) if send.ranks_per_host > 1 else shared
    hops, hops_between = send.ranks - 1, (hosts - 1 if hosts > 1 else 0)
    latency = BASE_S + rounds * ((hops - hops_between) * HOP_S[gpu.link] + hops_between * HOP_S["network"])
    return latency + rounds * hops / send.ranks * send.nbytes / (speed * 1e9)


def _kernel_s(work: Work, gpu: GPU, efficiency: Efficiency) -> float:
    bytes_s = work.nbytes / (gpu.memory_gb_s * 1e9 * efficiency.memory)
    if not work.flop:
        return bytes_s * efficiency.fused
    if not work.half:
        tflops = gpu.fp32_tflops
    elif work.attention and efficiency.by_shape:
        tflops = gpu.half_tflops * efficiency.attention
    else:
        tflops = (gpu.reached_tflops or gpu.half_tflops) * efficiency.matmul
    flop_s = (work.flop - work.masked) / (tflops * 1e12)
    return flop_s + bytes_s if efficiency.by_shape else max(flop_s, bytes_s)


def _last_step(recording: Recording) -> list[tuple[Label, list[Any]]]:
    begins = [n for n, (_, entries) in enumerate(recording) if any(isinstance(e, Step) for e in entries)]
    return recording[begins[-1] :]


def _first_micro_batch(step: Recording) -> Recording:
    """The step up to its second micro-batch."""
    for number, (_, entries) in enumerate(step):
        if any(isinstance(entry, MicroBatch) for entry in entries):
            return step[:number]
    return []

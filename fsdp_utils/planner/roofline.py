"""Calculate how long a step takes, and how much of its communication no computation hides.

Each kernel takes its operations and its bytes at the rates that a GPU reaches (`efficiency`); with `BOUND` it
takes as long as the longer of both at the published rates, which is a roofline. Each collective takes its
bytes divided by the slowest link on its way, and a latency for each hop of the ring. Who waits for whom is
replayed by `fsdp_utils.collectives.replay`. Python starts every kernel, so a step takes at least that long.
Left out: waits for data, other users of the network, ranks that are slower than the rest.

Source: S. Williams et al., "Roofline", 2009; for the latencies src/graph/tuning.cc of NVIDIA/nccl (commit
01afd20): the base latency and the latency of a hop, for the algorithm "ring" and the protocol "simple".
"""

from dataclasses import dataclass, replace

from fsdp_utils.collectives.events import COMPUTE, FREE, StepEvent
from fsdp_utils.collectives.replay import Replay, replay
from fsdp_utils.planner.efficiency import BOUND, Efficiency
from fsdp_utils.planner.gpus import GPU
from fsdp_utils.planner.simulated_rank import Setting
from fsdp_utils.planner.work_items import Begin, Gone, Recording, Send, Work

BASE_S = 8.4e-6
HOP_S = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}


@dataclass(frozen=True)
class Timing:
    """One step of one rank, in seconds."""

    step_s: float
    compute_s: float  # in which something is computed
    exposed_s: float  # in which something is sent and nothing computed
    products_s: float  # of compute_s, in matrix products in 16 bits, without fused attention
    fusible_s: float  # of compute_s, in kernels that torch.compile could fuse
    model_flop: int  # of forward and backward as MFU counts them: none twice, attention without its mask
    kernels: int  # that Python starts
    replay: Replay  # when what happens, in two micro-batches at most


def time_of(
    recording: Recording, gpu: GPU, efficiency: Efficiency, setting: Setting, host_ratio: float
) -> Timing:
    """Compute the time of the last step that is recorded; its third micro-batch and later are as the first.

    `host_ratio` is 0 where nothing is offloaded, else the bytes of a parameter on the host per byte gathered.
    """
    begins = {
        items[0].micro_batch: n for n, (_, items) in enumerate(recording) if isinstance(items[0], Begin)
    }
    job = gpu, efficiency, min(setting.ranks_per_host, setting.world_size), host_ratio
    timing = _replayed(recording[begins[0] :], *job)
    if setting.micro_batches > 2:
        first, more = _replayed(recording[begins[0] : begins[1]], *job), setting.micro_batches - 2
        numbers = [name for name in vars(timing) if name != "replay"]
        sums = {name: getattr(timing, name) + more * getattr(first, name) for name in numbers}
        timing = replace(timing, **sums)
    return replace(timing, step_s=max(timing.step_s, timing.kernels * efficiency.launch_s))


def _replayed(
    step: Recording, gpu: GPU, efficiency: Efficiency, ranks_per_host: int, host_ratio: float
) -> Timing:
    events: list[StepEvent] = []
    model_flop = kernels = 0
    products_s = fusible_s = 0.0
    beside = 0.0  # kernels on the streams of communication, before the next collective
    for label, items in step:
        update, computed = label.phase == "optimizer", None  # computed: since the last event

        def add(kind: str, unit: str, seconds: float, phase: str = label.phase) -> None:
            events.append(StepEvent(len(events), kind, unit, phase, seconds=seconds))

        for item in [*items, None]:  # None ends the part
            if isinstance(item, Work):
                kernels += 1
                if not item.again:
                    # backward of attention computes five products, of which the first is forward's
                    twice = item.attention and label.phase == "backward"
                    model_flop += item.flop * 4 // 5 if twice else item.flop
                if update and host_ratio:
                    continue  # the host does that
                flop_s, bytes_s = _kernel_s(item, gpu, efficiency)
                if not item.flop and not update:
                    bytes_s *= efficiency.fused
                seconds = flop_s + bytes_s if efficiency.by_shape else max(flop_s, bytes_s)
                if item.stream:
                    beside += seconds
                    continue
                computed = (computed or 0.0) + seconds
                if item.half and not item.attention:
                    products_s += flop_s
                if not item.flop and not update:
                    fusible_s += bytes_s
            elif item is None or isinstance(item, Send | Gone):
                if computed is not None:
                    add(COMPUTE, label.unit, computed)
                computed = None
                if isinstance(item, Send):
                    seconds = beside + collective_s(item, gpu, ranks_per_host, efficiency)
                    seconds += host_ratio * item.nbytes / item.ranks / (gpu.host_link_gb_s * 1e9)
                    add(item.kind, item.unit, seconds)
                    beside = 0.0
                elif item is not None:
                    add(FREE, item.unit, 0.0)
    # an all-gather waits for the unit before the last: FSDP1's limiter; FSDP2 waits for its last copy-out
    found = replay(events, limit_units=2)
    seconds = found.step_s, found.compute_s, found.exposed_s, products_s, fusible_s
    return Timing(*seconds, model_flop, kernels, found)


def collective_s(send: Send, gpu: GPU, ranks_per_host: int, efficiency: Efficiency = BOUND) -> float:
    """Compute the seconds that a ring of that many ranks takes."""
    if send.ranks == 1:
        return 0.0
    rounds = 2 if send.kind == "all_reduce" else 1
    hosts = -(-send.ranks // send.ranks_per_host)
    speed = gpu.link_gb_s * efficiency.link
    if hosts > 1:
        # the ring leaves the host over all its network cards; rings side by side share them
        shared = gpu.network_gb_s * efficiency.network * send.ranks_per_host / ranks_per_host
        speed = min(speed, shared) if send.ranks_per_host > 1 else shared
    hops, hops_between = send.ranks - 1, hosts - 1
    latency = BASE_S + rounds * ((hops - hops_between) * HOP_S[gpu.link] + hops_between * HOP_S["network"])
    return latency + rounds * hops / send.ranks * send.nbytes / (speed * 1e9)


def _kernel_s(work: Work, gpu: GPU, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds for a kernel's operations, and for its bytes."""
    bytes_s = work.nbytes / (gpu.memory_gb_s * 1e9 * efficiency.memory)
    if not work.half:
        tflops = gpu.fp32_tflops
    elif work.attention and efficiency.by_shape:
        tflops = gpu.half_tflops * efficiency.attention
    else:
        tflops = (gpu.reached_tflops or gpu.half_tflops) * efficiency.matmul
    return (work.flop - work.masked) / (tflops * 1e12), bytes_s

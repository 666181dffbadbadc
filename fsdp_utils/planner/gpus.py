"""Which GPUs can be planned for, and what do their makers, and those who rent them out, say of them?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in a host of eight. Change one by `dataclasses.replace(GPUS["H100"], link_gb_s=...)`.

    Rates are dense, without sparsity. Speeds of links are of one direction.

    Args:
        name: as in the table.
        memory_gib: size of its memory.
        memory_gb_s: how fast it reads and writes its memory, 10^9 bytes/s.
        half_tflops: matrix products in bf16, or in fp16 where `bf16` is False, 10^12 operations/s.
        fp32_tflops: matrix products in fp32, without TF32, as torch computes by default.
        reached_tflops: the most that a search over shapes of matrix products got out of it in bf16; None
            where unknown: then `half_tflops` is planned with, which is never reached.
        link: "NVLink" or "PCIe", to the other GPUs of the host.
        link_gb_s: its speed for one GPU.
        host_link_gb_s: PCIe, to the memory of the host.
        network_gb_s: of the whole host, to other hosts.
        bf16: computes in bf16 natively.
        source: documents for these numbers.
    """

    name: str
    memory_gib: float
    memory_gb_s: float
    half_tflops: float
    fp32_tflops: float
    reached_tflops: float | None
    link: str
    link_gb_s: float
    host_link_gb_s: float
    network_gb_s: float
    source: str
    bf16: bool = True


_MAX = "github.com/stas00/ml-engineering, compute/accelerator: maximum achievable matmul FLOPS, torch 2.6-2.7"


def _source(page: str, instance: str, *more: str) -> str:
    network = f"network as of {instance}, aws.amazon.com/ec2/instance-types"
    return "; ".join([f"nvidia.com/en-us/data-center/{page}", network, *more])


# fmt: off
_ALL = (
    # name, memory: size and speed, bf16, fp32, reached, links: to GPUs, to the host, to other hosts
    GPU("A10", 24, 600, 125, 31.2, None, "PCIe", 32, 32, 12.5, _source("products/a10-gpu", "g5.48xlarge")),
    GPU("A100-40", 40, 1555, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source("a100", "p4d.24xlarge", _MAX)),
    GPU("A100-80", 80, 2039, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source("a100", "p4de.24xlarge", _MAX)),
    GPU("H100", 80, 3350, 989, 67, 794.5, "NVLink", 450, 64, 400, _source("h100", "p5.48xlarge", _MAX)),
    GPU("H200", 141, 4800, 989, 67, 794.5, "NVLink", 450, 64, 400, _source("h200", "p5en.48xlarge", _MAX)),
    GPU("B200", 180, 7700, 2250, 75, 1745, "NVLink", 900, 64, 400, _source("hgx", "p6-b200.48xlarge", _MAX)),
    GPU("L4", 24, 300, 121, 30.3, None, "PCIe", 32, 32, 12.5, _source("l4", "g6.48xlarge")),
    GPU("T4", 16, 320, 65, 8.1, None, "PCIe", 16, 16, 12.5, _source("tesla-t4", "g4dn.metal"), bf16=False),
)
# fmt: on
GPUS = {gpu.name: gpu for gpu in _ALL}


def find_gpu(gpu: str | GPU) -> GPU:
    """The GPU of that name, in whatever case; a GPU of one's own is given back.

    Raises:
        ValueError: the table has no such GPU.
    """
    if isinstance(gpu, GPU):
        return gpu
    for name, known in GPUS.items():
        if name.lower() == str(gpu).lower():
            return known
    raise ValueError(f"plan: expected gpu out of {', '.join(GPUS)}, or a GPU, found {gpu!r}")

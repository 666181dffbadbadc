"""The GPUs that can be planned for, with what their makers, and those who rent them out, say of them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in a host of eight.

    Rates are dense, without sparsity. Speeds of links are of one direction.

    Args:
        name: its beginning tells which share of the rates is reached: "A100", "H" for Hopper, any other.
        usable_gib: the memory that CUDA offers to a process, as PyTorch's error on running out of memory
            calls it ("a total capacity of 79.11 GiB"), less than what the GPU is sold with.
        memory_gb_s: speed of its memory, 10^9 bytes/s.
        half_tflops: matrix products in bf16, or in fp16 where `bf16` is False, 10^12 operations/s.
        fp32_tflops: matrix products in fp32, without TF32, as torch computes by default.
        reached_tflops: the most that a search over shapes of matrix products got out of it in bf16; None
            where unknown: then `half_tflops` is planned with, which is never reached.
        link: the kind of link to the other GPUs of the host.
        link_gb_s: its speed for one GPU, to all seven others together.
        host_link_gb_s: PCIe, to the memory of the host.
        network_gb_s: of the whole host, to other hosts.
        source: of these numbers, by document, and which of them were not checked at their source.
        bf16: computes in bf16 natively.

    Example::

        gpu = dataclasses.replace(GPUS["H100"], network_gb_s=50)
        print(plan(config, world_size=16, batch_size=16, seq_len=1024, gpu=gpu).verdict)  # fits
    """

    name: str
    usable_gib: float
    memory_gb_s: float
    half_tflops: float
    fp32_tflops: float
    reached_tflops: float | None
    link: Literal["NVLink", "PCIe"]
    link_gb_s: float
    host_link_gb_s: float
    network_gb_s: float
    source: str = "its user"
    bf16: bool = True


def _source(usable: str, rates: str, network: str) -> str:
    return f"usable: {usable}; rates and links: {rates}; network: {network}"


# NVIDIA's own pages were not read, but pages that quote them. *: not checked at its source. The most that was
# reached is from github.com/stas00/ml-engineering*.
_LOCKWOOD = "glennklockwood.com/garden/processors"
_A100 = f"NVIDIA's A100 data sheet 1758950-r4, quoted in {_LOCKWOOD}/A100"
_H100 = f"{_LOCKWOOD}/h100, after NVIDIA's documents"
# fmt: off
_ALL = (
    # name, usable, memory's speed, bf16, fp32, reached, links: to GPUs, to the host, to other hosts
    GPU("A10", 21.99, 600, 125, 31.2, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/zai-org/CogVLM/issues/236",
        "memory and fp32: sysrqmts.com; bf16: NVIDIA's A10 data sheet*",
        "AWS g5.48xlarge, whose A10G is a variant of the A10, EC2 user guide")),
    GPU("A100-40", 39.50, 1555, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/TianheWu/CoSeR/issues/10", _A100, "AWS p4d.24xlarge*")),
    GPU("A100-80", 79.25, 2039, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/HiDream-ai/VAREdit/issues/6", _A100, "AWS p4de.24xlarge*")),
    GPU("H100", 79.11, 3350, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        "github.com/vllm-project/vllm/issues/27508", _H100, "AWS p5.48xlarge*")),
    GPU("H200", 139.80, 4800, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        "benchmarks/README.md of github.com/PrimeIntellect-ai/prime-rl, 2026-01-13",
        f"{_H100} (computes as an H100); memory, NVLink and PCIe: NVIDIA's systems in MLCommons "
        "inference_results_v4.1, and github.com/stas00/ml-engineering", "AWS p5en.48xlarge*")),
    GPU("B200", 178.36, 7700, 2250, 80, 1745, "NVLink", 900, 64, 400, _source(
        "benchmarks/README.md of github.com/PrimeIntellect-ai/prime-rl, 2026-01-13",
        f"NVIDIA's Blackwell technical brief (HGX at 1,000 W), quoted in {_LOCKWOOD}/B200; memory's speed is "
        "quoted from that brief in public repositories*; PCIe: Gen5, as its hosts have",
        "AWS p6-b200.48xlarge*")),
    GPU("L4", 22.03, 300, 121, 30.3, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/ArcInstitute/evo2/issues/190", "memory and fp32: fpsbench.com; bf16: half of the 242 "
        "TFLOPS with sparsity in grokipedia.com/page/NVIDIA_L4_vs_L40S", "AWS g6.48xlarge*")),
    GPU("T4", 14.56, 320, 65, 8.1, None, "PCIe", 16, 16, 12.5, _source(
        "github.com/Zheng-Chong/CatVTON/issues/133",
        "NVIDIA's T4 data sheet*; memory and rates agree with sysrqmts.com", "AWS g4dn.metal*"), bf16=False),
    GPU("L40S", 44.42, 864, 362, 91.6, None, "PCIe", 32, 32, 50, _source(
        "github.com/stepfun-ai/Step-Video-T2V/issues/8",
        "NVIDIA's L40S data sheet, quoted in mullet.se (product 355414)", "AWS g6e.48xlarge*")),
    GPU("RTX-4090", 23.64, 1008, 165.2, 82.6, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/3DTopia/Phidias-Diffusion/issues/8", "NVIDIA's Ada whitepaper, quoted in "
        "hmc-tech.com/gpus; bf16 with fp32 accumulation, half of the rate with fp16 accumulation; GeForce "
        "cards reach each other at PCIe's rate, assumed", "a card of 100 Gbit/s for eight GPUs, assumed")),
)
# fmt: on
GPUS = {gpu.name: gpu for gpu in _ALL}


def find_gpu(gpu: str | GPU) -> GPU:
    """Find a GPU by its name, in whatever case, with spaces or dashes. A GPU is returned as it is."""
    names = {name.lower(): known for name, known in GPUS.items()}
    found = gpu if isinstance(gpu, GPU) else names.get(str(gpu).strip().replace(" ", "-").lower())
    if found is None:
        raise ValueError(
            f"plan: expected gpu out of {', '.join(GPUS)}, or a fsdp_utils.planner.GPU, found {gpu!r}"
        )
    return found

"""The GPUs that can be planned for, with what their makers, and those who rent them out, say of them."""

import math
import re
from dataclasses import dataclass

LINKS = ("NVLink", "PCIe")


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in a host of eight.

    Rates are dense, without sparsity. Speeds of links are of one direction.

    Args:
        name: its beginning tells which share of the rates is reached: "A100", "H" for Hopper, any other.
        usable_gib: the memory that CUDA offers to a process, as PyTorch's error on running out of memory
            calls it ("a total capacity of 79.11 GiB"). It is less than what the GPU is sold with: ECC on
            GDDR6 and the driver take their share.
        memory_gb_s: how fast it reads and writes its memory, 10^9 bytes/s.
        half_tflops: matrix products in bf16, or in fp16 where `bf16` is False, 10^12 operations/s.
        fp32_tflops: matrix products in fp32, without TF32, as torch computes by default.
        reached_tflops: the most that a search over shapes of matrix products got out of it in bf16; None
            where unknown: then `half_tflops` is planned with, which is never reached.
        link: "NVLink" or "PCIe", to the other GPUs of the host.
        link_gb_s: its speed for one GPU, to all seven others together.
        host_link_gb_s: PCIe, to the memory of the host.
        network_gb_s: of the whole host, to other hosts.
        source: of these numbers, by document, and which of them were not checked at their source.
        bf16: computes in bf16 natively.
        device: a regular expression that finds the name which `torch.cuda.get_device_name()` gives.

    Raises:
        ValueError: a number is not above 0, or the link is none of these.

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
    link: str
    link_gb_s: float
    host_link_gb_s: float
    network_gb_s: float
    source: str = "its user"
    bf16: bool = True
    device: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith(("_gib", "_gb_s", "_tflops")) and value is not None and not 0 < value < math.inf:
                raise ValueError(f"GPU: expected {name} to be a number above 0, found {value!r}")
        if self.link not in LINKS:
            raise ValueError(f"GPU: expected link out of {', '.join(LINKS)}, found {self.link!r}")


# NVIDIA's own pages were not read, but pages that quote them. "A: B" is "what it says: where".
_LOCKWOOD = "glennklockwood.com/garden/processors"
_REACHED = "most that was reached: github.com/stas00/ml-engineering, not checked at its source"


def _source(usable: str, rates: str, network: str, *more: str) -> str:
    return "; ".join([f"usable: {usable}", f"rates and links: {rates}", f"network: {network}", *more])


def _unread(instance: str) -> str:
    return f"AWS {instance}, not checked at its source"


_A100 = f"NVIDIA's A100 data sheet 1758950-r4, quoted in {_LOCKWOOD}/A100"
_T4 = "NVIDIA's T4 data sheet, not checked at its source; memory and rates agree with sysrqmts.com"
_A10 = "memory and fp32: sysrqmts.com; bf16: NVIDIA's A10 data sheet, not checked at its source"
_L4 = (
    "memory and fp32: fpsbench.com; bf16: half of the 242 TFLOPS with sparsity in "
    "grokipedia.com/page/NVIDIA_L4_vs_L40S"
)
_H100 = f"{_LOCKWOOD}/h100, after NVIDIA's documents"
_H200 = (
    f"{_LOCKWOOD}/h100 (computes as an H100); memory, NVLink and PCIe: NVIDIA's systems in MLCommons "
    "inference_results_v4.1, and github.com/stas00/ml-engineering"
)
_B200 = (
    f"NVIDIA's Blackwell technical brief (HGX at 1,000 W), quoted in {_LOCKWOOD}/B200; memory's speed, 7.7 "
    "TB/s, is quoted from that brief in public repositories, not checked at its source; PCIe: Gen5, as its "
    "hosts have"
)
_PRIME_RL = "benchmarks/README.md of github.com/PrimeIntellect-ai/prime-rl, 2026-01-13"
_L40S = "NVIDIA's L40S data sheet, quoted in mullet.se (product 355414)"
_4090 = (
    "NVIDIA's Ada whitepaper, quoted in hmc-tech.com/gpus; bf16 with fp32 accumulation, half of the rate "
    "with fp16 accumulation"
)
_WORKSTATION = (
    "one card of 100 Gbit/s for eight GPUs, assumed; GeForce cards reach each other through the host's "
    "memory, at PCIe's rate, assumed"
)
# fmt: off
_ALL = (
    # name, usable, memory's speed, bf16, fp32, reached, links: to GPUs, to the host, to other hosts
    GPU("A10", 21.99, 600, 125, 31.2, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/zai-org/CogVLM/issues/236", _A10,
        "AWS g5.48xlarge, whose A10G is a variant of the A10, EC2 user guide"), device=r"\bA10\b"),
    GPU("A100-40", 39.50, 1555, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/TianheWu/CoSeR/issues/10", _A100, _unread("p4d.24xlarge"), _REACHED),
        device=r"\bA100\b.*40GB"),
    GPU("A100-80", 79.25, 2039, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/HiDream-ai/VAREdit/issues/6", _A100, _unread("p4de.24xlarge"), _REACHED),
        device=r"\bA100\b"),
    GPU("H100", 79.11, 3350, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        "github.com/vllm-project/vllm/issues/27508", _H100, _unread("p5.48xlarge"), _REACHED),
        device=r"\bH100 80GB HBM3\b"),
    GPU("H200", 139.80, 4800, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        _PRIME_RL, _H200, _unread("p5en.48xlarge"), _REACHED), device=r"\bG?H200\b(?! NVL)"),
    GPU("B200", 178.36, 7700, 2250, 80, 1745, "NVLink", 900, 64, 400, _source(
        _PRIME_RL, _B200, _unread("p6-b200.48xlarge"), _REACHED), device=r"\bB200\b"),
    GPU("L4", 22.03, 300, 121, 30.3, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/ArcInstitute/evo2/issues/190", _L4, _unread("g6.48xlarge")), device=r"\bL4\b"),
    GPU("T4", 14.56, 320, 65, 8.1, None, "PCIe", 16, 16, 12.5, _source(
        "github.com/Zheng-Chong/CatVTON/issues/133", _T4, _unread("g4dn.metal")), bf16=False,
        device=r"\bT4\b"),
    GPU("L40S", 44.42, 864, 362, 91.6, None, "PCIe", 32, 32, 50, _source(
        "github.com/stepfun-ai/Step-Video-T2V/issues/8", _L40S, _unread("g6e.48xlarge")), device=r"\bL40S\b"),
    GPU("RTX-4090", 23.64, 1008, 165.2, 82.6, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/3DTopia/Phidias-Diffusion/issues/8", _4090, _WORKSTATION), device=r"\bRTX 4090$"),
)
# fmt: on
GPUS = {gpu.name: gpu for gpu in _ALL}


def find_gpu(gpu: str | GPU) -> GPU:
    """Find the GPU of that name, in whatever case, with spaces or dashes. A GPU is given back.

    Raises:
        ValueError: the table has no such GPU.
    """
    if isinstance(gpu, GPU):
        return gpu
    name = str(gpu).strip().replace(" ", "-").lower()
    for known in GPUS.values():
        if known.name.lower() == name:
            return known
    raise ValueError(
        f"plan: expected gpu out of {', '.join(GPUS)}, or a fsdp_utils.planner.GPU, found {gpu!r}"
    )


def peak_flops(device_name: str) -> float | None:
    """The peak rate of a GPU in 16-bit matrix products, without sparsity.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it, such as "NVIDIA H100 80GB HBM3".

    Returns:
        Floating-point operations per second; None for a GPU that is not in `GPUS`.

    Source: `GPU.source` of each GPU.

    Example::

        rate = peak_flops("NVIDIA H100 80GB HBM3")
        print(f"{rate / 1e12:.0f} TFLOP/s")  # 989 TFLOP/s
    """
    for gpu in GPUS.values():
        if gpu.device and re.search(gpu.device, device_name):
            return gpu.half_tflops * 1e12
    return None

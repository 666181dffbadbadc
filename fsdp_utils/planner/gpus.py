"""Which GPUs can be planned for, and what do their makers, and those who rent them out, say of them?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in a host of eight. Change one by `dataclasses.replace(GPUS["H100"], link_gb_s=...)`.

    Rates are dense, without sparsity. Speeds of links are of one direction.

    Args:
        name: as in the table.
        usable_gib: the memory that CUDA offers to a process, as PyTorch's error on running out of memory
            calls it ("a total capacity of 79.11 GiB"). It is less than what the GPU is sold with: ECC on
            GDDR6 and the driver take their share.
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
        source: of these numbers, by document, and which of them were not checked at their source.
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
    source: str
    bf16: bool = True


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
# fmt: off
_ALL = (
    # name, usable, memory's speed, bf16, fp32, reached, links: to GPUs, to the host, to other hosts
    GPU("A10", 21.99, 600, 125, 31.2, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/zai-org/CogVLM/issues/236", _A10,
        "AWS g5.48xlarge, whose A10G is a variant of the A10, EC2 user guide")),
    GPU("A100-40", 39.50, 1555, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/TianheWu/CoSeR/issues/10", _A100, _unread("p4d.24xlarge"), _REACHED)),
    GPU("A100-80", 79.25, 2039, 312, 19.5, 271.2, "NVLink", 300, 32, 50, _source(
        "github.com/HiDream-ai/VAREdit/issues/6", _A100, _unread("p4de.24xlarge"), _REACHED)),
    GPU("H100", 79.11, 3350, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        "github.com/vllm-project/vllm/issues/27508", _H100, _unread("p5.48xlarge"), _REACHED)),
    GPU("H200", 139.80, 4800, 989, 67, 794.5, "NVLink", 450, 64, 400, _source(
        _PRIME_RL, _H200, _unread("p5en.48xlarge"), _REACHED)),
    GPU("B200", 178.36, 7700, 2250, 80, 1745, "NVLink", 900, 64, 400, _source(
        _PRIME_RL, _B200, _unread("p6-b200.48xlarge"), _REACHED)),
    GPU("L4", 22.03, 300, 121, 30.3, None, "PCIe", 32, 32, 12.5, _source(
        "github.com/ArcInstitute/evo2/issues/190", _L4, _unread("g6.48xlarge"))),
    GPU("T4", 14.56, 320, 65, 8.1, None, "PCIe", 16, 16, 12.5, _source(
        "github.com/Zheng-Chong/CatVTON/issues/133", _T4, _unread("g4dn.metal")), bf16=False),
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

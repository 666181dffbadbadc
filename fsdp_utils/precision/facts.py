"""Properties of a device that matter for bf16, and the conclusion from them.

`look` reads the properties from torch, `judge` draws the conclusion; so a device that is not present can be
judged, too.
"""

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp_utils.torch_internals.runtime import cpu_capabilities

Compute = Literal["native", "emulated", "none"]

# PyTorch's kernels for bf16 came with CUDA 11, NCCL's ncclBfloat16 with NCCL 2.10 (its release notes).
FIRST_CUDA = (11, 0)
FIRST_NCCL = (2, 10)
FIRST_CAPABILITY = (8, 0)  # Ampere: the first tensor cores that take bf16 (CUDA C++ Programming Guide)
# AMD's matrix cores that take bf16: CDNA (MI100), RDNA3 (gfx11) and what came after them
# (ROCm documentation, "Data types and precision support").
AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")

INSTEAD = "train in fp32, or in fp16 with a gradient scaler."


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device.

    Attributes:
        kind: "cuda", "rocm", "xpu", "mps", "cpu" or the name of another device.
        name: what the device is called.
        missing: why there is no such device, in words; empty where there is one.
        error: what a small matmul in bf16 raised; empty where it ran.
        capability: CUDA's compute capability.
        architecture: AMD's name of it (gfx…).
        cuda, nccl: the versions that this torch was built with; None where it was built without.
        units: what of the hardware computes in bf16, by the name of the instructions; None where torch
            does not tell.
    """

    kind: str
    name: str = ""
    missing: str = ""
    error: str = ""
    capability: tuple[int, int] | None = None
    architecture: str = ""
    cuda: tuple[int, ...] | None = None
    nccl: tuple[int, ...] | None = None
    units: tuple[str, ...] | None = None


def look(device: torch.device) -> DeviceFacts:
    """Read a device's properties. Never raises for lack of a device, a driver or a build."""
    facts = DeviceFacts("rocm" if device.type == "cuda" and torch.version.hip else device.type)
    try:
        facts = _named(facts, device)
    except Exception as error:  # a driver too old, a device index too high: torch has many words for it
        return replace(facts, missing=_first_line(error))
    if facts.missing:
        return facts
    try:
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        if float((square @ square).sum()) != 16**3:
            return replace(facts, error="a matmul in bf16 gave a wrong result")
    except Exception as error:
        return replace(facts, error=_first_line(error))
    return facts


def judge(facts: DeviceFacts) -> tuple[Compute, list[str]]:
    """Whether the device computes in bf16, and why; each reason against it says what to do."""
    if facts.missing:
        return "none", [f"{facts.missing} Check the CPU instead: bf16_support('cpu')."]
    name = facts.name or facts.kind
    if facts.kind == "cuda" and (facts.cuda is None or facts.cuda < FIRST_CUDA):
        found = "without CUDA" if facts.cuda is None else f"with CUDA {_dotted(facts.cuda)}"
        return "none", [
            f"This PyTorch was built {found}; bf16 needs CUDA {_dotted(FIRST_CUDA)}. Install a newer one. "
            f"Until then, {INSTEAD}"
        ]
    if facts.error:
        return "none", [f"{name}: a matmul in bf16 fails: {facts.error}. Instead, {INSTEAD}"]
    native, because = _hardware(facts)
    if native:
        return "native", [f"{name} computes in bf16: {because}."]
    if facts.kind in ("cpu", "mps"):
        advice = "Good for trying things out; expect no speed from it. For speed, train in fp32."
    else:
        advice = f"It saves memory and has the range of fp32; expect no speed from it. For speed, {INSTEAD}"
    return "emulated", [f"{name}: tensors in bf16 work, {because}. {advice}"]


def judge_nccl(facts: DeviceFacts) -> str:
    """The reason against bf16 in NCCL's collectives; empty when there is none."""
    if facts.kind != "cuda" or facts.missing or facts.nccl is None or facts.nccl >= FIRST_NCCL:
        return ""
    return (
        f"NCCL {_dotted(facts.nccl)} cannot send bf16; it needs NCCL {_dotted(FIRST_NCCL)}. Install a "
        "PyTorch with a newer one. Until then, gather and reduce in fp32."
    )


def _hardware(facts: DeviceFacts) -> tuple[bool, str]:
    """Whether the hardware computes in bf16, and how that is known."""
    if facts.kind == "cuda":
        capability = facts.capability or (0, 0)
        text = f"compute capability {_dotted(capability)}"
        if capability >= FIRST_CAPABILITY:
            return True, text
        return False, f"but {text} has no units for it (they came with {_dotted(FIRST_CAPABILITY)})"
    if facts.kind == "rocm":
        if facts.architecture.startswith(AMD_WITH_BF16):
            return True, facts.architecture
        return False, f"but {facts.architecture or 'this architecture'} has no matrix units for it"
    if facts.units:
        return True, " and ".join(facts.units)
    if facts.units is None:
        return False, "but torch does not tell whether the hardware computes in it"
    return False, "but the hardware has no instructions for it, as far as torch can tell"


def _named(facts: DeviceFacts, device: torch.device) -> DeviceFacts:
    if device.type == "cpu":
        return replace(facts, name=_cpu_name(), units=_cpu_units())
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():
            return replace(facts, missing="This PyTorch is a build without CUDA.")
        facts = replace(facts, cuda=_parts(torch.version.cuda), nccl=_nccl())
        if not torch.cuda.is_available():
            return replace(facts, missing="No GPU is visible to CUDA: none there, no driver, or hidden.")
        properties = torch.cuda.get_device_properties(device)
        return replace(
            facts,
            name=properties.name,
            capability=(properties.major, properties.minor),
            architecture=getattr(properties, "gcnArchName", ""),
        )
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            return replace(facts, missing="There is no MPS device here.")
        return replace(facts, name="Apple GPU (mps)")  # units stay None: torch does not tell
    if device.type == "xpu":
        if not torch.xpu.is_available():
            return replace(facts, missing="There is no XPU here.")
        properties: Any = torch.xpu.get_device_properties(device)
        has_units = getattr(properties, "has_subgroup_matrix_multiply_accumulate", None)
        conversions = getattr(properties, "has_bfloat16_conversions", None)
        units = None if has_units is None else ("XMX",) if has_units and conversions else ()
        return replace(facts, name=properties.name, units=units)
    return replace(facts, name=str(device))


def _cpu_units() -> tuple[str, ...]:
    """The CPU's instructions for bf16 that torch's matmuls use, through oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return ()
    has = {name for name, there in cpu_capabilities().items() if there}
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16", "sve_bf16": "SVE BF16"}
    return tuple(text for name, text in names.items() if name in has)


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"


def _nccl() -> tuple[int, ...] | None:
    try:
        nccl: Any = torch.cuda.nccl  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(part for part in nccl.version() if isinstance(part, int))
    except Exception:  # a build without NCCL says so in several ways
        return None


def _parts(version: str | None) -> tuple[int, ...] | None:
    return tuple(int(part) for part in version.split(".") if part.isdigit()) if version else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")

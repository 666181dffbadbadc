"""Properties of a device that matter for bf16, and the conclusion from them.

`look` reads the properties from torch, `judge` draws the conclusion; so a device that is not present can be
judged, too.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fsdp_utils.torch_internals.runtime import cpu_capabilities

Compute = Literal["native", "emulated", "none"]

FIRST_CAPABILITY = (8, 0)  # Ampere: the first tensor cores that take bf16 (CUDA C++ Programming Guide)
# AMD's matrix cores that take bf16: CDNA (MI100), RDNA3 (gfx11) and what came after them
# (ROCm documentation, "Data types and precision support").
AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
# A CPU's instructions for bf16 that torch's matmuls use, by torch's name of the capability.
CPU_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16", "sve_bf16": "SVE BF16"}

INSTEAD = "train in fp32, or in fp16 with a gradient scaler."


@dataclass
class DeviceFacts:
    """Properties of a device that `look` has found."""

    kind: str  # "cuda", "cpu" or the name of another device
    name: str = ""  # for people
    problem: str = ""  # why the device is missing, or the error of a small matmul in bf16; empty where it ran
    capability: tuple[int, int] | None = None  # CUDA's compute capability
    architecture: str = ""  # AMD's name of it (gfx…)
    units: tuple[str, ...] = ()  # the CPU's instructions for bf16


def look(device: torch.device) -> DeviceFacts:
    """Read a device's properties. Never raises for lack of a device, a driver or a build."""
    facts = DeviceFacts(device.type, str(device))
    try:
        if device.type == "cpu":
            facts.name = _cpu_name()
            if torch.backends.mkldnn.is_available():
                capabilities = cpu_capabilities()
                facts.units = tuple(unit for name, unit in CPU_UNITS.items() if capabilities.get(name))
        elif device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            facts.name = properties.name
            if torch.version.hip:
                facts.architecture = properties.gcnArchName
            else:
                facts.capability = (properties.major, properties.minor)
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        if float((square @ square).sum()) != 16**3:
            facts.problem = "a matmul in bf16 gave a wrong result"
    except Exception as error:  # no driver, one too old, a device index too high: torch has many words for it
        facts.problem = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
    return facts


def judge(facts: DeviceFacts) -> tuple[Compute, list[str]]:
    """Whether the device computes in bf16, and why; each reason against it says what to do."""
    if facts.problem:
        check = "" if facts.kind == "cpu" else " To check the CPU, call bf16_support('cpu')."
        return "none", [f"{facts.name}: bf16 fails: {facts.problem}. Instead, {INSTEAD}{check}"]
    native, because = _hardware(facts)
    if native:
        return "native", [f"{facts.name} computes in bf16: {because}."]
    if facts.kind in ("cpu", "mps"):
        advice = "Good for trying things out; expect no speed from it. For speed, train in fp32."
    else:
        advice = f"It saves memory and has the range of fp32; expect no speed from it. For speed, {INSTEAD}"
    return "emulated", [f"{facts.name}: tensors in bf16 work, {because}. {advice}"]


def _hardware(facts: DeviceFacts) -> tuple[bool, str]:
    """Whether the hardware computes in bf16, and how that is known."""
    if facts.capability:
        text = f"compute capability {facts.capability[0]}.{facts.capability[1]}"
        if facts.capability >= FIRST_CAPABILITY:
            return True, text
        return False, f"but {text} has no units for it (they came with 8.0)"
    if facts.architecture:
        if facts.architecture.startswith(AMD_WITH_BF16):
            return True, facts.architecture
        return False, f"but {facts.architecture} has no matrix units for it"
    if facts.units:
        return True, " and ".join(facts.units)
    if facts.kind == "cpu":
        return False, "but the hardware has no instructions for it, as far as torch can tell"
    return False, "but this library does not know whether the hardware computes in it"


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"

"""Whether a device computes in bf16, and how that is known."""

import platform
from pathlib import Path
from typing import Literal

import torch

Compute = Literal["native", "emulated", "none"]

FIRST_CAPABILITY = (8, 0)  # Ampere: the first tensor cores that take bf16 (CUDA C++ Programming Guide)
# AMD's matrix cores that take bf16: CDNA (MI100), RDNA3 (gfx11) and what came after them
# (ROCm documentation, "Data types and precision support").
AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
# A CPU's instructions for bf16 that torch's matmuls use, by torch's name of the capability.
CPU_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16", "sve_bf16": "SVE BF16"}

_INSTEAD = "train in fp32, or in fp16 with a gradient scaler."


def judge(device: torch.device) -> tuple[str, Compute, str]:
    """The device's name for people, how it computes in bf16, and why; a reason against it says what to do.

    Never raises for lack of a device, a driver or a build.
    """
    name = str(device)
    try:
        name, native, because = _hardware(device)
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        if float((square @ square).sum()) != 16**3:
            raise ValueError("a matmul gave a wrong result")
    except Exception as error:  # no driver, one too old, a device index too high: torch has many words for it
        problem = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
        check = "" if device.type == "cpu" else " To check the CPU, call bf16_support('cpu')."
        return name, "none", f"{name}: bf16 fails: {problem}. Instead, {_INSTEAD}{check}"
    if native:
        return name, "native", f"{name} computes in bf16: {because}."
    if device.type in ("cpu", "mps"):
        advice = "Good for trying things out; expect no speed from it. For speed, train in fp32."
    else:
        advice = f"It saves memory and has the range of fp32; expect no speed from it. For speed, {_INSTEAD}"
    return name, "emulated", f"{name}: tensors in bf16 work, but {because}. {advice}"


def _hardware(device: torch.device) -> tuple[str, bool, str]:
    """The device's name, whether it has units for bf16, and how that is known."""
    if device.type == "cpu":
        tells = hasattr(torch.cpu, "get_capabilities") and torch.backends.mkldnn.is_available()
        found = torch.cpu.get_capabilities() if tells else {}
        if units := [unit for name, unit in CPU_UNITS.items() if found.get(name)]:
            return _cpu_name(), True, " and ".join(units)
        return _cpu_name(), False, "the hardware has no instructions for it, as far as torch can tell"
    if device.type != "cuda":
        return str(device), False, "this library does not know whether the hardware computes in it"
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        native = found.gcnArchName.startswith(AMD_WITH_BF16)
        return found.name, native, found.gcnArchName + ("" if native else " has no matrix units for it")
    native = (found.major, found.minor) >= FIRST_CAPABILITY
    without = "" if native else " has no units for it (they came with 8.0)"
    return found.name, native, f"compute capability {found.major}.{found.minor}{without}"


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"

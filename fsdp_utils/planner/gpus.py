"""The GPUs that can be planned for: gpus.json has what their makers, and those who rent them out, say."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class GPU:
    """One kind of GPU, in a host of eight.

    Rates are dense, without sparsity. Speeds of links are of one direction.

    Example::

        gpu = dataclasses.replace(GPUS["H100"], network_gb_s=50)
        print(plan(config, world_size=16, batch_size=16, seq_len=1024, gpu=gpu).verdict)  # fits
    """

    name: str  #: its beginning tells which share of the rates is reached: "A100", "H" for Hopper, any other
    #: the memory that CUDA offers to a process, as PyTorch's error on running out of memory calls it ("a
    #: total capacity of 79.11 GiB"), less than what the GPU is sold with
    usable_gib: float
    memory_gb_s: float  #: speed of its memory, 10^9 bytes/s
    half_tflops: float  #: matrix products in bf16, or in fp16 where `bf16` is False, 10^12 operations/s
    fp32_tflops: float  #: matrix products in fp32, without TF32, as torch computes by default
    #: the most that a search over shapes of matrix products got out of it in bf16; None where unknown: then
    #: `half_tflops` is planned with, which is never reached
    reached_tflops: float | None
    link: Literal["NVLink", "PCIe"]  #: to the other GPUs of the host
    link_gb_s: float  #: its speed for one GPU, to all seven others together
    host_link_gb_s: float  #: PCIe, to the memory of the host
    network_gb_s: float  #: of the whole host, to other hosts
    source: str = "its user"  #: of these numbers, by document; * marks what was not checked at its source
    bf16: bool = True  #: computes in bf16 natively


_TABLE = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
GPUS = {row["name"]: GPU(**row) for row in _TABLE["gpus"]}


def find_gpu(gpu: str | GPU) -> GPU:
    """Find a GPU by its name, in whatever case, with spaces or dashes. A GPU is returned as it is."""
    names = {name.lower(): known for name, known in GPUS.items()}
    found = gpu if isinstance(gpu, GPU) else names.get(str(gpu).strip().replace(" ", "-").lower())
    if found is None:
        raise ValueError(
            f"plan: expected gpu out of {', '.join(GPUS)}, or a fsdp_utils.planner.GPU, found {gpu!r}"
        )
    return found

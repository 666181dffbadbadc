"""The shares of a GPU's published rates that training reaches: the table of constants behind `Plan.step_s`.

A constant is either what a source measured, named beside it, or fitted: tools/fit_planner.py finds it on the
published runs of notebooks/published.yaml that are marked for fitting, and prints this table. Runs that are
kept for checking are never fitted; benchmarks/planner.py holds the predictions against them.
"""

from dataclasses import dataclass, replace

from fsdp_utils.planner.gpus import GPU, GPUS


@dataclass(frozen=True)
class Efficiency:
    """Shares of a rate from 0 to 1, and seconds.

    Example::

        slow_links = Efficiency(matmul=0.7, attention=0.3, link=0.4, network=0.4)
        found = plan(config, world_size=8, batch_size=8, seq_len=1024, efficiency=slow_links)
        print(found.verdict)  # fits
    """

    matmul: float  #: of `GPU.reached_tflops` that matrix products keep up over a whole step
    attention: float  #: of `GPU.half_tflops` that attention in one fused kernel reaches, both passes
    #: of the memory's rate that kernels reach which move more than they compute. BabelStream copies at 0.87
    #: to 0.92 of the published rate on A100, H100 (github.com/UoB-HPC/BabelStream)
    memory: float = 0.85
    fused: float = 0.35  #: of these kernels' bytes that torch.compile leaves in compiled blocks; fitted
    #: seconds in which one kernel is started: 5 to 10 us an operator in eager mode, more under hooks:
    #: pytorch.org/blog/accelerating-pytorch-with-cuda-graphs
    launch_s: float = 8e-6
    #: of NVLink's or PCIe's rate that a collective within a host reaches. nccl-tests on 8 GPUs: 230 to 240 of
    #: 300 GB/s (A100), 360 to 370 of 450 (H100); the network alike
    link: float = 0.8
    network: float = 0.8
    by_shape: bool = True  #: a product's bytes take time beside its operations: small ones reach less


BOUND = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, False)  # a roofline

# Fitted (the first three; the last, for all other GPUs, is between them). By the beginning of the GPU's name;
# "H" is Hopper, whose power limit slows down long products.
MATMUL = {"A100": 0.835, "H100-500W": 0.66, "H": 0.73, "": 0.75}
# Both passes, causal, heads of 128, sequences of 4k to 16k. A100: 170 to 190 of 312 TFLOP/s,
# FlashAttention-2 on H100: 250 to 300 of 989, figures 4 to 7 of arxiv.org/abs/2307.08691. Neither was checked
# at its source.
ATTENTION = {"A100": 0.56, "H": 0.28, "": 0.4}

# Fitted. Measured step divided by predicted step: the middle 80% of the published runs of each kind.
STEP_RANGE = {"eager": (0.88, 1.14), "compiled": (0.88, 1.05)}
# Measured peak memory divided by the predicted: the middle 80% of the published runs that tell it.
MEMORY_RANGE = (0.83, 1.12)
RUNS = {"eager": 50, "compiled": 11, "memory": 14}
# The GPUs of these runs. All computed in bf16, without offload; all are of dense decoders, Llama and MPT.
PUBLISHED_GPUS = ("A100-40", "A100-80", "H100", "H100-500W")


def of_gpu(name: str) -> Efficiency:
    """Return the shares that training reaches on the GPU of that name."""

    def share(table: dict[str, float]) -> float:
        return next(value for begin, value in table.items() if name.startswith(begin))

    return Efficiency(share(MATMUL), share(ATTENTION))


def is_published(gpu: GPU) -> bool:
    """Whether a published run used this GPU, which may differ in its name, memory and network."""
    free = {name: getattr(gpu, name) for name in ("name", "usable_gib", "memory_gb_s", "network_gb_s")}
    return any(replace(GPUS[name], **free) == gpu for name in PUBLISHED_GPUS if name in GPUS)


def kind(compiled: bool) -> str:
    """Return the kind of run, as `STEP_RANGE` has it."""
    return "compiled" if compiled else "eager"

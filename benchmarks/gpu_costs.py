"""Parts of gpu.py: what a step's choices cost on a GPU, and what FSDP1 takes beside FSDP2."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.gpu_job import GIB, POLICIES, Result, measured_steps, one_rank

HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16}
JOB = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, vocab_size=32000, **HEADS)
TINY = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128, **HEADS)
TO_CPU = {"saved": partial(save_on_cpu, pin_memory=True)}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one unit": {"units": False},
    "checkpointing of each block": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
    "activations to the CPU": TO_CPU,
    "blocks checkpointed, their inputs to the CPU": {"checkpointing": "full", **TO_CPU},
    "parameters to the CPU": {"offload_policy": CPUOffloadPolicy()},
    "parameters to the CPU, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "blocks compiled": {"compiled": True},
    "blocks checkpointed and compiled": {"checkpointing": "full", "compiled": True},
}


def one_way(way: dict[str, Any], device: torch.device, ranks: int = 1, batch: int = 4) -> Result:
    """Train a Llama of 0.95 billion parameters, `batch` x 2048 tokens a rank and step."""
    cuda = device.type == "cuda"
    config, shape = (JOB, (batch, 2048)) if cuda else (TINY, (2, 16))
    with one_rank(device, ranks):
        return measured_steps(config, shape, device, {"mp_policy": POLICIES["bf16"], **way})


def timed(step: Callable[[], Any], times: int) -> float:
    """Return the median seconds of a step on the GPU, the first third left out."""
    took = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return median(took[times // 3 :])


def attention(backend: str, length: int, device: torch.device) -> Result:
    """Causal attention of one sequence of 16 heads of 128 in bf16: extra memory and time, with backward."""
    shape = (1, 16, length, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def step() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    with sdpa_kernel(getattr(SDPBackend, backend)):
        seconds = timed(step, 5)
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20, "ms": 1e3 * seconds}


def product(float8: bool, rows: int, device: torch.device) -> Result:
    """x @ w.T of 8192 columns in bf16, or cast to float8 with one scale for each tensor first: TFLOP/s."""
    x, w = (torch.randn(n, 8192, device=device, dtype=torch.bfloat16) for n in (rows, 8192))

    def cast(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        return (tensor / scale).to(torch.float8_e4m3fn), scale

    @torch.compile
    def with_casts() -> Tensor:
        (a, by), (b, also) = cast(x), cast(w)
        return torch._scaled_mm(a, b.t(), scale_a=by, scale_b=also, out_dtype=torch.bfloat16)

    seconds = timed(with_casts if float8 else lambda: x @ w.t(), 20)
    return {"tflop_s": 2 * rows * 8192**2 / seconds / 1e12}


def copy(pinned: bool, device: torch.device) -> Result:
    """Copy one GiB from the host."""
    source, target = torch.ones(GIB // 4, pin_memory=pinned), torch.empty(GIB // 4, device=device)
    return {"gib_s": 1 / timed(lambda: target.copy_(source, non_blocking=True), 8)}


def costs(device: torch.device) -> dict[str, Callable[[], Result]]:
    """What do a step's choices cost on a GPU, in memory and time?"""
    found: dict[str, Callable[[], Result]] = {
        name: partial(one_way, way, device) for name, way in WAYS.items() if device.type == "cuda" or not way
    }
    if device.type == "cpu":
        return found
    for backend in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        for length in (2048, 8192, 16384, 65536)[: 3 if backend == "MATH" else 4]:
            found[f"{backend}, {length} tokens"] = partial(attention, backend, length, device)
    for told, pinned in (("copy from the CPU", True), ("copy from the CPU, not pinned", False)):
        found[told] = partial(copy, pinned, device)
    for rows in (1024, 4096, 16384):
        for told, float8 in (("bf16", False), ("float8", True)):
            found[f"{told}, {rows} rows"] = partial(product, float8, rows, device)
    return found


def selective(device: torch.device) -> dict[str, Callable[[], Result]]:
    """When does selective checkpointing pay? Over the batch, eager and compiled."""
    kinds = {"none": {}, "full": {"checkpointing": "full"}, "selective": {"checkpointing": "selective"}}
    return {
        f"{name}, {'compiled' if compiled else 'eager'}, batch of {batch}": partial(
            one_way, {**kind, "compiled": compiled}, device, batch=batch
        )
        for compiled in ((False, True) if device.type == "cuda" else (False,))
        for batch in ((2, 8) if device.type == "cuda" else (2,))
        for name, kind in kinds.items()
        if device.type == "cuda" or name == "selective"
    }


def kernels(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Which kernels of attention take which inputs?"""

    def taken(dtype: torch.dtype, head: int, value: int, options: dict[str, Any]) -> Result:
        q, k, v = (torch.randn(1, 4, 512, n, dtype=dtype, device=device) for n in (head, head, value))
        tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
        found: Result = {}
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        ):
            found[backend.name] = False
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
                nn.functional.scaled_dot_product_attention(*tensors, **options).sum().backward()
                found[backend.name] = True
        return found

    causal = torch.ones(512, 512, dtype=torch.bool, device=device).tril()
    bias = torch.zeros(512, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
    bf16 = torch.bfloat16
    calls: dict[str, tuple[torch.dtype, int, int, dict[str, Any]]] = {
        "is_causal=True": (bf16, 64, 64, {"is_causal": True}),
        "a mask of booleans": (bf16, 64, 64, {"attn_mask": causal}),
        "a bias that is learned": (bf16, 64, 64, {"attn_mask": bias}),
        "dropout_p=0.1": (bf16, 64, 64, {"is_causal": True, "dropout_p": 0.1}),
        "values narrower than keys": (bf16, 64, 32, {"is_causal": True}),
        "float32": (torch.float32, 64, 64, {"is_causal": True}),
        "heads of 512": (bf16, 512, 512, {"is_causal": True}),
    }
    return {name: partial(taken, *call) for name, call in calls.items()}


def forward(way: str, tokens: int, device: torch.device) -> Result:
    """Forward of 32 blocks of 256 MiB, as one rank of 64 that send nothing: how far ahead is the CPU?"""
    cuda = device.type == "cuda"
    width, dtype = (4096, torch.bfloat16) if cuda else (16, torch.float32)
    with one_rank(device, 64), torch.no_grad():
        mesh = init_device_mesh(device.type, (64,))
        options = {
            "limit_all_gathers": way != "FSDP1, no limit",
            "device_id": device,
            "use_orig_params": True,
        }
        fsdp2, blocks = way == "FSDP2", list[Any]()
        for _ in range(32):
            with device:
                linears = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            block = nn.Sequential(*linears).to(dtype)
            blocks.append(
                fully_shard(block, mesh=mesh) if fsdp2 else FullyShardedDataParallel(block, **options)
            )
        model: Any = nn.Sequential(*blocks)
        model = fully_shard(model, mesh=mesh) if fsdp2 else FullyShardedDataParallel(model, **options)
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        model(x)
        if not cuda:
            return {}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        issued: list[float] = []

        def step() -> None:
            begin = time.perf_counter()
            model(x)
            issued.append(time.perf_counter() - begin)

        seconds = timed(step, 9)
        # what record_stream holds back is still active, but no longer allocated
        kinds, stats = ("active", "allocated"), torch.cuda.memory_stats()
        peaks = {f"peak_{kind}_gib": (stats[f"{kind}_bytes.all.peak"] - before) / GIB for kind in kinds}
        return {**peaks, "seconds": seconds, "seconds_until_the_cpu_returns": median(issued[3:])}


def as_fsdp1(ranks: int, device: torch.device) -> Result:
    """The job of `one_way`, under FSDP1 with a unit for each block."""
    options: dict[str, Any] = {
        "auto_wrap_policy": ModuleWrapPolicy({LlamaDecoderLayer}),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "use_orig_params": True,
        "device_id": device,
    }
    return one_way({"fsdp1": partial(FullyShardedDataParallel, **options)}, device, ranks)


def saved(options: dict[str, Any], device: torch.device) -> Result:
    """Reserved memory before and after the state dict is taken, after three steps as one rank of 8."""
    with one_rank(device, 8):
        mesh = init_device_mesh(device.type, (8,))
        width = 4096 if device.type == "cuda" else 16
        model: Any = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(32)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters())
        for _ in range(3):
            model(torch.randn(64, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = torch.cuda.memory_reserved()
        get_model_state_dict(model, options=StateDictOptions(**options))
        return {"reserved_gib": [before / GIB, torch.cuda.memory_reserved() / GIB]}


def fsdp1(device: torch.device) -> dict[str, Callable[[], Result]]:
    """What does FSDP1 take beside FSDP2, when does its rate limiter matter, and what does a save leave?"""
    found: dict[str, Callable[[], Result]] = {
        f"{way}, {tokens} tokens": partial(forward, way, tokens, device)
        for tokens in ((256, 4096, 16384) if device.type == "cuda" else (4,))
        for way in ("FSDP1", "FSDP1, no limit", "FSDP2")
    }
    for ranks in (1, 8) if device.type == "cuda" else (8,):
        found[f"FSDP1, {ranks} of the job's ranks"] = partial(as_fsdp1, ranks, device)
        found[f"FSDP2, {ranks} of the job's ranks"] = partial(one_way, {}, device, ranks)
    if device.type == "cuda":
        whole = {"full_state_dict": True}
        found["state dict in full"] = partial(saved, whole, device)
        found["state dict in full, to the CPU"] = partial(saved, {**whole, "cpu_offload": True}, device)
        found["state dict of shards"] = partial(saved, {}, device)
    return found

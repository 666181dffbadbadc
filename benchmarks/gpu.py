"""Record on one GPU what only a GPU can show: does the library work there, are plan and simulation right?

    python benchmarks/gpu.py [PART …]             smoke, scripts, messages, costs, planner, retries; default: all
    python benchmarks/gpu.py --dry-run DIR        all of the code, with small sizes on a CPU; writes to DIR

The job is one rank, by itself on the GPU (two ranks cannot share one under NCCL). Where memory is measured it
may be one rank of a larger `fake` group: that group sends nothing, and FSDP2 allocates as in a real one. Each
result is written to notebooks/recorded/PART.json when it is measured; the same command with the same code
goes on where it was interrupted. Needs transformers, and torch 2.11 or later. Exits with 1 on failure, 2
without a GPU.
"""

import argparse
import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_utils
from benchmarks.machine import RECORDED, ROOT, commit, keep, table
from fsdp_utils.planner import GPUS

Result = dict[str, Any]
GIB = 2**30

# ---- smoke: the library's CUDA paths, as a process group of one rank shows them ---------------------------


def ranks_on_the_cpu_do_not_see_the_gpu(device: torch.device) -> Result:
    """Ranks joined by gloo would otherwise take the mesh "cuda", and share one GPU."""

    def step() -> dict[str, int]:
        model: Any = fully_shard(nn.Linear(256, 256, bias=False))
        with fsdp_utils.record_collectives(model) as trace:
            model(torch.ones(1, 256)).sum().backward()
        return trace.bytes_by_kind()

    expected, found = (
        dict.fromkeys(["all_gather", "reduce_scatter"], 4 * 256**2),
        fsdp_utils.run_on_ranks(step),
    )
    assert found == [expected] * 2, f"expected {expected} on each of 2 ranks, found {found}"
    return expected


def a_recording_has_device_times(device: torch.device) -> Result:
    width = 2048 if device.type == "cuda" else 64
    model, x = fsdp2(layers(device, width)), torch.randn(2 * width, width, device=device)
    model(x).sum().backward()  # the first step sets FSDP up
    with fsdp_utils.record_collectives(model) as trace:
        model(x).sum().backward()
    untimed = [f"{event.kind} of {event.module}" for event in trace.events if event.seconds is None]
    compute = sum(event.seconds or 0.0 for event in trace.events if event.kind == "compute")
    assert not untimed, f"no time on the device for {untimed}"
    assert compute > 0
    return {"events": len(trace.events), "compute_s": compute}


def collectives_are_recorded_whether_they_are_waited_for_or_not(device: torch.device) -> Result:
    """NCCL gives no work object for a collective that is not asynchronous."""
    model, x = fsdp1(layers(device)), torch.ones(8, 256, device=device)
    with fsdp_utils.record_collectives(model) as trace:
        model(x).sum().backward()  # with one rank FSDP1 all-reduces its gradients
        for asynchronous in (False, True):
            for issue in (
                partial(dist.all_reduce, x),
                partial(dist.all_gather_into_tensor, torch.empty_like(x), x),
                partial(dist.reduce_scatter_tensor, torch.empty_like(x), x),
            ):
                if (work := issue(async_op=asynchronous)) is not None:
                    work.wait()
    sent = [event for event in trace.events if event.kind != "compute"]
    untimed = [event.kind for event in sent if event.seconds is None and device.type == "cuda"]
    assert not untimed, f"no time on the device for {untimed}"
    found = Counter(event.kind for event in sent)
    assert (found["all_gather"], found["reduce_scatter"], found["all_reduce"] > 2) == (2, 2, True), found
    return dict(found)


def an_asynchronous_save_keeps_the_weights_of_its_step_for_each_wrapper(device: torch.device) -> Result:
    """The steps after the call change the weights while the save is under way."""

    def build(wrap: Callable[[nn.Sequential], nn.Module]) -> tuple[nn.Module, torch.optim.AdamW]:
        model = wrap(layers(device))
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    x = torch.ones(8, 256, device=device)
    for save_as in (fsdp1, fsdp2):
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = build(save_as)
            train(model, optimizer, x)
            saving = fsdp_utils.save_distributed(folder, model, optimizer, step=1, asynchronous=True)
            before = [local(parameter).clone() for parameter in model.parameters()]  # one rank: all of it
            train(model, optimizer, x)
            saving.wait()
            for load_as in (fsdp1, fsdp2, lambda module: module):
                model, optimizer = build(load_as)
                fsdp_utils.load_distributed(folder, model, optimizer)
                pairs = zip(before, model.parameters(), strict=True)
                changed = sum(not torch.equal(old.flatten(), local(new).flatten()) for old, new in pairs)
                assert not changed, f"{save_as} to {load_as}: {changed} parameters differ from the saved ones"
                train(model, optimizer, x)  # with the state that was loaded
    return {}


def child_tuning_steps_as_on_the_cpu(device: torch.device) -> Result:
    """The masks are the same on every device."""

    def weights(kind: str, mode: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        named = [(str(i), nn.Parameter(torch.randn(30, 50, generator=generator).to(kind))) for i in range(6)]
        kept = (torch.arange(1500).view(30, 50) % 3 == 0).to(kind)
        masks = {name: kept for name, _ in named} if mode == "task" else None
        optimizer = fsdp_utils.ChildTuningAdamW(named, mode=mode, gradient_mask=masks)
        for _ in range(3):
            for _, parameter in named:
                parameter.grad = parameter.detach().cos()
            optimizer.step()
        return torch.cat([parameter.detach().cpu().flatten() for _, parameter in named])

    for mode in ("taskfree", "task"):
        torch.testing.assert_close(weights(device.type, mode), weights("cpu", mode), rtol=1e-4, atol=1e-5)
    return {}


def a_search_survives_out_of_memory(device: torch.device) -> Result:
    cuda, room_gib = device.type == "cuda", 2
    width = 1024 if cuda else 64
    model = layers(device, width)  # FSDP2 can be reset after the exception from torch 2.13 on
    model = fsdp2(model) if torch.__version__ >= "2.13" else model
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch_size: int) -> None:
        train(model, optimizer, torch.randn(batch_size, width, device=device), steps=1)

    if not cuda:
        return {"best": fsdp_utils.find_batch_size(step, limit=4).best}
    torch.cuda.set_per_process_memory_fraction(room_gib * GIB / torch.cuda.mem_get_info()[1])
    try:
        search = fsdp_utils.find_batch_size(step, start=4096)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert search.best, f"no batch size fits: {search}"
    assert len(search.trials) > 1, f"nothing was too much for {room_gib} GiB: {search}"
    return {"best": search.best, "trials": len(search.trials)}


def bf16_gets_an_answer(device: torch.device) -> Result:
    support = fsdp_utils.bf16_support(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert support.compute == "native", f"expected native bf16 on {device}, found {support}"
    return {"ready": bool(support), "compute": support.compute, "reasons": list(support.reasons)}


CHECKS = (
    ranks_on_the_cpu_do_not_see_the_gpu,
    a_recording_has_device_times,
    collectives_are_recorded_whether_they_are_waited_for_or_not,
    an_asynchronous_save_keeps_the_weights_of_its_step_for_each_wrapper,
    child_tuning_steps_as_on_the_cpu,
    a_search_survives_out_of_memory,
    bf16_gets_an_answer,
)


def layers(device: torch.device, width: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)


def fsdp1(model: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=next(model.parameters()).device, use_orig_params=True)


def fsdp2(model: nn.Sequential) -> Any:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- scripts: the ones that the lessons give to readers -----------------------------------------------------

SCRIPT = r"# ## The script\n.*?# ```python\n(.*?)# ```\n# ```text\n(.*?)# ```\n"
ON_ONE_GPU = (  # gloo lets ranks share a GPU, and it moves CUDA tensors
    ('"cpu:gloo,cuda:nccl"', '"gloo"'),
    ('"nccl"', '"gloo"'),
    ("dist.get_node_local_rank()", "0"),
)


def run_script(lesson: Path, ranks: int) -> Result:
    """Run a lesson's script under torchrun: one rank with NCCL, several with gloo on the same GPU."""
    ((code, expected),) = re.findall(SCRIPT, lesson.read_text(encoding="utf-8"), re.DOTALL)
    code, expected = (re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in (code, expected))
    for before, after in ON_ONE_GPU if ranks > 1 else ():
        code = code.replace(before, after)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    result: Result = {"exit": done.returncode, "prints_what_four_cpus_print": done.stdout == expected}
    if done.stdout != expected:
        result["prints"] = done.stdout[-2000:]
    if done.returncode:
        result["stderr"] = [line for line in done.stderr.splitlines() if "Error" in line][:6]
    return result


# ---- messages: those that only CUDA raises -------------------------------------------------------------------


def offload_not_on_cpu(device: torch.device) -> None:
    model = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    model.to_empty(device=device)
    model(torch.ones(1, 8, device=device))


def allgather_output_dtype(device: torch.device) -> None:
    dist.all_gather_into_tensor(torch.empty(4, device=device), torch.ones(4, device=device).bfloat16())


def cuda_out_of_memory(device: torch.device) -> None:
    fully_shard(nn.Linear(8, 8))(torch.ones(1, 8, device=device)).expand(2**45, 8).square().sum().backward()


def cuda_in_forked_subprocess(device: torch.device) -> None:
    torch.multiprocessing.start_processes(torch.cuda.set_device, (0,), start_method="fork")


def cpu_tensor_under_nccl(device: torch.device) -> None:
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1), group=group)


def clip_under_offload(device: torch.device) -> None:
    group = init_device_mesh("cuda", (1,))
    model = fully_shard(nn.Linear(8, 8), mesh=group, offload_policy=CPUOffloadPolicy())
    model(torch.ones(1, 8, device=device)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()


def sync_module_states_on_cpu(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8), sync_module_states=True)


def inconsistent_compute_device(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8).cuda(), device_id=torch.device("cpu"))


def moved_after_sharding(device: torch.device) -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=device).cpu()
    model(torch.ones(1, 8, device=device))


def moved_between_steps(device: torch.device) -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=0)
    model(torch.ones(1, 8, device=device)).sum().backward()
    model.cpu()
    model(torch.ones(1, 8, device=device)).sum().backward()


def invalid_device_ordinal(device: torch.device) -> None:
    torch.cuda.set_device(1)


def fsdp2_input_on_cpu(device: torch.device) -> None:
    inner = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    inner[0](torch.ones(1, 8))


def fused_on_two_devices(device: torch.device) -> None:
    ps = [nn.Parameter(torch.ones(4, device=d)) for d in (device, "cpu")]
    opt = torch.optim.AdamW(ps, fused=True)
    for p in ps:
        p.grad = torch.ones_like(p)
    opt.step()
    raise AssertionError("fused stepped on two devices")


def foreach_on_two_devices(device: torch.device) -> None:
    ps = [nn.Parameter(torch.ones(4, device=d)) for d in (device, "cpu")]
    opt = torch.optim.AdamW(ps, foreach=True)
    for p in ps:
        p.grad = torch.ones_like(p)
    opt.step()
    raise AssertionError(f"foreach stepped on two devices {[p[0].item() for p in ps]}")


def clip_on_two_devices(device: torch.device) -> None:
    ps = [nn.Parameter(torch.ones(4, device=d)) for d in (device, "cpu")]
    for p in ps:
        p.grad = torch.ones_like(p)
    raise AssertionError(f"clip on two devices {nn.utils.clip_grad_norm_(ps, 1.0)}")


def watchdog(device: torch.device) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    torch.cuda._sleep(int(20e9))
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()


MESSAGES = (
    offload_not_on_cpu,
    allgather_output_dtype,
    cuda_out_of_memory,
    cuda_in_forked_subprocess,
    cpu_tensor_under_nccl,
    clip_under_offload,
    sync_module_states_on_cpu,
    inconsistent_compute_device,
    moved_after_sharding,
    moved_between_steps,
    invalid_device_ordinal,
    fsdp2_input_on_cpu,
    fused_on_two_devices,
    foreach_on_two_devices,
    clip_on_two_devices,
    watchdog,
)

# ---- costs: what lessons 2, 12, 21 and 22 say of a GPU, measured -------------------------------------------------

JOB = LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, vocab_size=32000,
)  # fmt: skip
SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
)
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one unit": {"units": False},
    "checkpointing of each block": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
    "activations to the CPU": {"saved": partial(torch.autograd.graph.save_on_cpu, pin_memory=True)},
    "blocks checkpointed, their inputs to the CPU": {
        "checkpointing": "full",
        "saved": partial(torch.autograd.graph.save_on_cpu, pin_memory=True),
    },
    "parameters to the CPU": {"offload_policy": CPUOffloadPolicy()},
    "parameters to the CPU, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "blocks compiled": {"compiled": True},
    "blocks checkpointed and compiled": {"checkpointing": "full", "compiled": True},
}


def one_way(way: dict[str, Any], device: torch.device) -> Result:
    """Train a Llama of 0.9 billion parameters, 4 x 2048 tokens a step, by one rank of one."""
    how = {"mp_policy": POLICIES["bf16"], **way}
    saved, compiled = how.pop("saved", contextlib.nullcontext), how.pop("compiled", False)
    cuda = device.type == "cuda"
    shape = (4, 2048) if cuda else (2, 16)
    with one_rank(device):
        return measured_steps(JOB if cuda else SMALL, shape, device, how, saved, compiled)


def attention(name: str, length: int, device: torch.device) -> Result:
    """Causal attention of one sequence, 16 heads of 128 in bf16: extra memory and time, forward and backward."""
    shape = (1, 16, length, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    took = []
    with sdpa_kernel(getattr(SDPBackend, name)):
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - begin)
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20, "ms": 1e3 * median(took[2:])}


def product(float8: bool, rows: int, device: torch.device) -> Result:
    """x @ w.T of 8192 columns: bf16, or both cast to float8 with a scale for each tensor; TFLOP/s."""
    x, w = (torch.randn(n, 8192, device=device, dtype=torch.bfloat16) for n in (rows, 8192))

    def cast(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        return (tensor / scale).to(torch.float8_e4m3fn), scale

    def alone() -> Tensor:
        return x @ w.t()

    def with_casts() -> Tensor:
        (a, by), (b, also) = cast(x), cast(w)
        return torch._scaled_mm(a, b.t(), scale_a=by, scale_b=also, out_dtype=torch.bfloat16)

    step = torch.compile(with_casts) if float8 else alone
    took = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return {"tflop_s": 2 * rows * 8192**2 / median(took[5:]) / 1e12}


def copy_speed(pinned: bool, device: torch.device) -> Result:
    source, target = torch.ones(2**28, pin_memory=pinned), torch.empty(2**28, device=device)
    took = []
    for _ in range(8):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return {"gib_s": 1 / median(took[2:])}


# ---- planner: predicted beside measured ------------------------------------------------------------------

SETTINGS = (  # ranks, layers, width, batch, length, strategy, precision, checkpointing
    (1, 16, 2048, 4, 2048, "full", "bf16", None),
    (1, 16, 2048, 4, 2048, "full", "bf16", "full"),
    (1, 16, 2048, 2, 2048, "full", "fp32", None),
    (1, 16, 2048, 1, 512, "full", "bf16", None),
    (1, 28, 3072, 4, 2048, "full", "bf16", "full"),
    (1, 28, 3072, 2, 4096, "grad_op", "bf16", "full"),
    (8, 16, 2048, 4, 2048, "full", "bf16", "full"),
    (8, 28, 3072, 4, 2048, "full", "bf16", None),
    (8, 28, 3072, 4, 2048, "grad_op", "bf16", "full"),
    (64, 32, 4096, 1, 4096, "full", "bf16", "full"),
)
TINY = ((1, 2, 64, 2, 16, "full", "bf16", "full"), (8, 2, 64, 2, 16, "grad_op", "bf16", None))
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
KINDS = ("allocated", "reserved")  # of memory
COMPARED = {**{f"peak_{kind}_gib": kind for kind in KINDS}, "step_s": "step time"}


def predicted_and_measured(row: tuple[Any, ...], device: torch.device) -> Result:
    """Plan one setting before anything runs, then train ten measured steps of it (two in a dry run)."""
    world, count, width, batch, length, strategy, precision, checkpointing = row
    cuda = device.type == "cuda"
    sizes: Any = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": count}
    heads = dict.fromkeys(["num_attention_heads", "num_key_value_heads"], width // (128 if cuda else 32))
    config = LlamaConfig(**sizes, **heads, vocab_size=32000 if cuda else 512)
    how = {"strategy": strategy, "mp_policy": POLICIES[precision], "checkpointing": checkpointing}
    gpu = planned_gpu(device)
    shape = {"world_size": world, "batch_size": world * batch, "seq_len": length}
    predicted = fsdp_utils.plan(config, gpu=gpu, **shape, **how)
    with one_rank(device, world):
        measured = measured_steps(config, (batch, length), device, how)
    # the time of a group that sends nothing says nothing
    return {
        key: [getattr(predicted, key), measured[key]] for key in COMPARED if world == 1 or key != "step_s"
    }


def measured_steps(
    config: LlamaConfig,
    shape: tuple[int, int],
    device: torch.device,
    how: dict[str, Any],
    saved: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    compiled: bool = False,
) -> Result:
    """Return the peaks in GiB and the seconds of the steps; `saved` is entered for each forward."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if how.pop("units", True):
        fsdp_utils.shard(model, mesh=mesh, **how)
    else:
        fully_shard(model, mesh=mesh, **how)
    for block in model.model.layers if compiled else ():
        block.compile()
    model.to_empty(device="cpu" if "offload_policy" in how else device)
    for tensor in [*model.parameters(), *model.buffers()]:
        local(tensor).normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    cuda, seconds = device.type == "cuda", []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(12 if cuda else 4):
        begin = time.perf_counter()
        with saved():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    stats = torch.cuda.memory_stats() if cuda else {}
    peaks = {f"peak_{kind}_gib": stats.get(f"{kind}_bytes.all.peak", 0) / GIB for kind in KINDS}
    return {**peaks, "step_s": median(seconds[2:])}


# ---- retries: lesson 5's script, under the allocator that it simulates ------------------------------------

LIMITS = (1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1)  # GiB


def steps_under_a_limit(gib: float, expandable: bool, sizes: Sequence[int], device: torch.device) -> Result:
    """Train five steps of each batch size, as one rank of four that may use so much memory."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
        torch.cuda.set_per_process_memory_fraction(
            gib * GIB / torch.cuda.get_device_properties(0).total_memory
        )
    try:
        return {"batches": {size: five_steps(size, device) for size in sizes}}
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def five_steps(batch_size: int, device: torch.device) -> Result:
    """Return each step's retries, the seconds of the faster of the last two, and the error that ended it."""
    count, took, error = [], [], None

    def retried() -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if device.type == "cuda" else 0

    with one_rank(device, of=4):
        model = encoder(device, init_device_mesh(device.type, (4,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        try:
            for _ in range(5):
                before, begin = retried(), time.perf_counter()
                train(model, optimizer, torch.randn(batch_size, 256, 1024, device=device), steps=1)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                count, took = [*count, retried() - before], [*took, time.perf_counter() - begin]
        except torch.OutOfMemoryError as raised:
            error = type(raised).__name__
        del model, optimizer
    return {"retries_by_step": str(count), "step_s": min(took[3:], default=None), "error": error}


def encoder(device: torch.device, mesh: DeviceMesh) -> Any:
    blocks = [
        nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, device=device)
        for _ in range(4)
    ]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(nn.Sequential(*blocks), mesh=mesh)


def planned_gpu(device: torch.device) -> str:
    """Return the planner's name of this GPU; H100 in a dry run."""
    if device.type == "cpu":
        return "H100"
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1] / GIB
    alike = [gpu for gpu in GPUS if gpu.split("-")[0] in name]
    if not alike:
        raise LookupError(f"expected a GPU of the planner's table ({', '.join(GPUS)}), found {name}")
    return min(alike, key=lambda gpu: abs(GPUS[gpu].usable_gib - memory))


def errors(rows: list[Result]) -> Result:
    """Return by how much predictions are off, relative to what was measured: in the median and at worst."""
    found: dict[str, list[float]] = {}
    for key, name in COMPARED.items():
        for predicted, measured in (row[key] for row in rows if isinstance(row.get(key), list)):
            if measured:
                found.setdefault(name, []).append(abs(predicted / measured - 1))
    return {name: {"median": median(off), "worst": max(off)} for name, off in found.items()}


# ---- the command -----------------------------------------------------------------------------------------


def smoke(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Does the library work on this GPU?"""
    return {check.__name__: partial(one_rank(device)(check), device) for check in CHECKS}


def scripts(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Do the lessons' scripts run on a GPU as they stand, and print what they print on four CPUs?"""
    lessons = sorted((ROOT / "notebooks" / "src").glob("[0-9]*.py"))
    several = 4 if device.type == "cuda" else 1
    pool = ThreadPoolExecutor(4)
    began = {
        f"lesson {int(lesson.name[:2])}, {ranks} rank{'s' if ranks > 1 else ''}": pool.submit(run_script, lesson, ranks)
        for ranks in dict.fromkeys((1, several))
        for lesson in lessons[: None if device.type == "cuda" else 1]
    }
    return {name: future.result for name, future in began.items()}


def messages(device: torch.device) -> dict[str, Callable[[], Result]]:
    """What does CUDA raise, and does `explain` know it?"""
    def told(raiser):
        command = [sys.executable, "-c", f"from benchmarks.gpu import *; device = torch.device('cuda');\nwith one_rank(device): {raiser.__name__}(device)"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            text, code = done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            text, code = str(late.stderr), "timeout"
        return {"exit": code, "explain": [answer.id for answer in fsdp_utils.explain(text)], "text": text[-1500:]}
    pool = ThreadPoolExecutor(4)
    return {raiser.__name__: pool.submit(told, raiser).result for raiser in MESSAGES} if device.type == "cuda" else {}


def costs(device: torch.device) -> dict[str, Callable[[], Result]]:
    """What do a step's choices cost on a GPU, in memory and time?"""
    found = {name: partial(one_way, way, device) for name, way in WAYS.items()}
    if device.type == "cpu":
        return found
    for name in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
        for length in (2048, 8192, 16384, 65536):
            if name != "MATH" or length <= 16384:
                found[f"{name}, {length} tokens"] = partial(attention, name, length, device)
    found["copy from the CPU"] = partial(copy_speed, True, device)
    found["copy from the CPU, not pinned"] = partial(copy_speed, False, device)
    for rows in (1024, 4096, 16384):
        for float8 in (False, True):
            found[f"{'float8' if float8 else 'bf16'}, {rows} rows"] = partial(product, float8, rows, device)
    return found


def planner(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Are memory and time of a step what fsdp_utils.planner predicts?"""
    rows = SETTINGS if device.type == "cuda" else TINY
    name = (
        "{} ranks, {} layers of width {}, {} samples of {} tokens, strategy {}, {}, checkpointing {}".format
    )
    return {name(*row): partial(predicted_and_measured, row, device) for row in rows}


def retries(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Does the real allocator retry where lesson 5's simulation says so, and what does a retry cost?"""
    cuda = device.type == "cuda"
    limits, sizes = (LIMITS, range(16, 33)) if cuda else ((1.8,), (1,))
    name = "{} GiB, expandable segments {}".format
    return {
        name(limit, expandable): partial(steps_under_a_limit, limit, expandable, sizes, device)
        for expandable in (False, True)
        for limit in limits
    }


PARTS = (smoke, scripts, messages, costs, planner, retries)


@contextlib.contextmanager
def one_rank(device: torch.device, of: int = 1) -> Iterator[None]:
    """Be the only rank of a group, or rank 0 of a larger one that sends nothing; leave no memory behind."""
    backend = "fake" if of > 1 else "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = FakeStore() if of > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=of, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # FSDP's modules refer to each other, and the next setting needs their memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def record(part: Callable[..., Any], device: torch.device, out: Path) -> list[str]:
    """Measure what the recording of a part lacks; return what failed, with the error of each."""
    file = out / f"{part.__name__}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    same = (before.get("commit"), before.get("dry_run")) == (commit(), device.type == "cpu")
    done = {row["setting"]: row for row in before["results"]["rows"] if "error" not in row} if same else {}
    rows: list[Result] = []
    for name, measure in part(device).items():
        if name not in done:
            print(name, flush=True)
            begin = time.perf_counter()
            try:
                result = measure()
            except Exception as error:  # the other settings are measured all the same
                result = {"error": f"{type(error).__name__}: {error}"}
            done[name] = {"setting": name, "took_s": time.perf_counter() - begin, **result}
        rows.append(done[name])
        held: Result = {"dry_run": device.type == "cpu", "results": {"rows": rows, "errors": errors(rows)}}
        keep(part.__name__, part.__doc__, group="one rank", folder=out, **held)
    print("\n" + table([part.__name__, ""], [[row["setting"], row.get("error", "recorded")] for row in rows]))
    return [f"{row['setting']}: {row['error']}" for row in rows if "error" in row]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).splitlines()[0])
    names = [part.__name__ for part in PARTS]
    parser.add_argument("parts", nargs="*", choices=[*names, []], help="default: all", metavar="PART")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="small sizes on a CPU; writes to DIR")
    asked = parser.parse_args(arguments)
    out, wanted = asked.dry_run, asked.parts or names
    if out is None and not torch.cuda.is_available():
        print("There is no CUDA GPU here (--dry-run DIR runs all of the code on a CPU).", file=sys.stderr)
        return 2
    device = torch.device("cpu" if out else "cuda")
    failed = [
        failure
        for part in PARTS
        if part.__name__ in wanted
        for failure in record(part, device, out or RECORDED)
    ]
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

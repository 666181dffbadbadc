"""Record on one GPU what only a GPU can show: does the library work there, and is the plan right?

    python benchmarks/gpu.py                          smoke, then planner
    python benchmarks/gpu.py planner --out DIR        one part, to another folder than notebooks/recorded
    python benchmarks/gpu.py --device cpu --tiny --out DIR      a dry run of all code, without a GPU

The job is one rank, by itself on the GPU (two ranks cannot share one under NCCL). Each result is written to
PART.json when it is measured; the same command with the same code goes on where it was interrupted. Needs the
library, transformers and torch 2.11 or later. Exits with 1 when something failed and 2 without a GPU.
"""

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import RECORDED, commit, keep, table
from fsdp_utils import (
    ChildTuningAdamW,
    bf16_support,
    find_batch_size,
    load_distributed,
    plan,
    record_collectives,
    run_on_ranks,
    save_distributed,
    shard,
)
from fsdp_utils.planner import GPUS

Result = dict[str, Any]
GIB = 2**30

# ---- smoke: what a process group of one rank shows of the library's CUDA paths ---------------------------


def ranks_on_the_cpu_do_not_see_the_gpu(device: torch.device, tiny: bool) -> Result:
    """Ranks joined by gloo would otherwise take the mesh "cuda", and share one GPU."""

    def step() -> dict[str, int]:
        model: Any = fully_shard(nn.Linear(256, 256, bias=False))
        with record_collectives(model) as trace:
            model(torch.ones(1, 256)).sum().backward()
        return trace.bytes_by_kind()

    expected = {"all_gather": 4 * 256**2, "reduce_scatter": 4 * 256**2}
    found = run_on_ranks(step)
    assert found == [expected] * 2, f"expected {expected} on each of 2 ranks, found {found}"
    return {"bytes": found[0]}


def a_recording_has_device_times(device: torch.device, tiny: bool) -> Result:
    width = 64 if tiny else 2048
    model, x = fsdp2(layers(device, width)), torch.randn(2 * width, width, device=device)
    model(x).sum().backward()  # the first step sets FSDP up
    with record_collectives(model) as trace:
        model(x).sum().backward()
    untimed = [f"{event.kind} of {event.module}" for event in trace.events if event.seconds is None]
    assert not untimed, f"no time on the device for {untimed}"
    compute = sum(event.seconds or 0.0 for event in trace.events if event.kind == "compute")
    assert compute > 0, f"all computation took {compute} s on the device"
    return {"events": len(trace.events), "compute_s": compute}


def an_asynchronous_save_keeps_the_weights_of_its_step_for_each_wrapper(
    device: torch.device, tiny: bool
) -> Result:
    """The steps after the call change the weights while the save is under way."""
    for save_as in (fsdp1, fsdp2):
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = trained(save_as, device)
            saving = save_distributed(folder, model, optimizer, step=1, asynchronous=True)
            before = [local(parameter).clone() for parameter in model.parameters()]  # one rank: all of it
            train(model, optimizer, device)
            saving.wait()
            for load_as in (fsdp1, fsdp2, lambda module: module):
                model, optimizer = trained(load_as, device, steps=0)
                load_distributed(folder, model, optimizer)
                pairs = zip(before, model.parameters(), strict=True)
                changed = sum(not torch.equal(old.flatten(), local(new).flatten()) for old, new in pairs)
                assert not changed, f"{save_as} to {load_as}: {changed} parameters differ from the saved ones"
                train(model, optimizer, device)  # with the state that was loaded
    return {}


def child_tuning_steps_as_on_the_cpu(device: torch.device, tiny: bool) -> Result:
    """The masks are the same on every device."""
    shape = (30, 50) if tiny else (300, 500)
    modes: tuple[Literal["taskfree", "task"], ...] = ("taskfree", "task")
    for mode in modes:
        on_cpu, here = (child_tuned(torch.device(kind), mode, shape) for kind in ("cpu", device.type))
        torch.testing.assert_close(here, on_cpu, rtol=1e-4, atol=1e-5)
    return {}


def a_search_survives_out_of_memory(device: torch.device, tiny: bool) -> Result:
    width, room_gib, cuda = 64 if tiny else 1024, 2, device.type == "cuda"
    if cuda:
        torch.cuda.set_per_process_memory_fraction(room_gib * GIB / torch.cuda.mem_get_info()[1])
    model = fsdp2(layers(device, width))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch_size: int) -> None:
        model(torch.randn(batch_size, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        search = find_batch_size(step, start=4096 if cuda else 1, limit=None if cuda else 4)
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert search.best, f"no batch size fits: {search}"
    assert not cuda or len(search.trials) > 1, f"nothing was too much for {room_gib} GiB: {search}"
    return {"best": search.best, "trials": len(search.trials)}


def bf16_gets_an_answer(device: torch.device, tiny: bool) -> Result:
    support = bf16_support(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert support.compute == "native", f"expected native bf16 on {device}, found {support}"
    return {"ready": bool(support), "compute": support.compute, "reasons": list(support.reasons)}


CHECKS = (
    ranks_on_the_cpu_do_not_see_the_gpu,
    a_recording_has_device_times,
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


def trained(
    wrap: Callable[[nn.Sequential], nn.Module], device: torch.device, steps: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(layers(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, device, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(8, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def child_tuned(device: torch.device, mode: Literal["taskfree", "task"], shape: tuple[int, int]) -> Tensor:
    """All weights after three steps, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for _ in range(6)]
    named = [(str(i), nn.Parameter(weight.to(device))) for i, weight in enumerate(drawn)]
    kept = (torch.arange(drawn[0].numel()).view(shape) % 3 == 0).to(device)
    masks = {name: kept for name, _ in named} if mode == "task" else None
    optimizer = ChildTuningAdamW(named, mode=mode, gradient_mask=masks)
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = parameter.detach().cos()
        optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for _, parameter in named])


# ---- planner: predicted beside measured ------------------------------------------------------------------

NAMES = ("layers", "width", "batch", "length", "strategy", "precision", "checkpointing")
SETTINGS = (
    (16, 2048, 4, 2048, "full", "bf16", None),
    (16, 2048, 4, 2048, "full", "bf16", "full"),
    (16, 2048, 4, 2048, "grad_op", "bf16", None),
    (16, 2048, 2, 2048, "full", "fp32", None),
    (16, 2048, 1, 512, "full", "bf16", None),
    (16, 2048, 8, 2048, "full", "bf16", "full"),
    (28, 3072, 1, 2048, "full", "bf16", None),
    (28, 3072, 4, 2048, "full", "bf16", "full"),
    (28, 3072, 2, 4096, "grad_op", "bf16", "full"),
)
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
TINY = ((2, 64, 2, 16, "full", "bf16", "full"),)
COMPARED = {"peak_allocated_gib": "allocated", "peak_reserved_gib": "reserved", "step_s": "step time"}


def llama(count: int, width: int, tiny: bool) -> LlamaConfig:
    heads = width // (32 if tiny else 128)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=512 if tiny else 32000,
        use_cache=False,
    )


def predicted_and_measured(row: tuple[Any, ...], device: torch.device, tiny: bool) -> Result:
    """The plan of one setting, made before anything runs, and ten steps of it (two in a dry run)."""
    count, width, batch, length, strategy, precision, checkpointing = row
    config = llama(count, width, tiny)
    predicted = plan(
        config,
        world_size=1,
        batch_size=batch,
        seq_len=length,
        gpu=_gpu(device),
        strategy=strategy,
        mp_policy=POLICIES[precision],
        checkpointing=checkpointing,
    )
    with one_rank(device):
        measured = measured_steps(config, row, device, tiny)
    return {key: [getattr(predicted, key), measured[key]] for key in COMPARED} | {
        "seconds": measured["seconds"]
    }


def measured_steps(config: LlamaConfig, row: tuple[Any, ...], device: torch.device, tiny: bool) -> Result:
    """Peaks in GiB, and the seconds of a step."""
    _, _, batch, length, strategy, precision, checkpointing = row
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shard(
        model,
        mesh=init_device_mesh(device.type, (1,)),
        strategy=strategy,
        mp_policy=POLICIES[precision],
        checkpointing=checkpointing,
    )
    model.to_empty(device=device)
    for tensor in [*model.parameters(), *model.buffers()]:
        local(tensor).normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    seconds = []
    for step in range(4 if tiny else 12):
        if step == 0 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    gc.collect()  # FSDP's modules refer to each other, and the next setting needs their memory
    stats = torch.cuda.memory_stats() if device.type == "cuda" else {}
    return {
        "peak_allocated_gib": stats.get("allocated_bytes.all.peak", 0) / GIB,
        "peak_reserved_gib": stats.get("reserved_bytes.all.peak", 0) / GIB,
        "step_s": median(seconds[2:]),
        "seconds": seconds,
    }


def _gpu(device: torch.device) -> str:
    """The planner's name of this GPU; H100 in a dry run.

    Raises:
        LookupError: the planner does not know it.
    """
    if device.type == "cpu":
        return "H100"
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1] / GIB
    alike = [gpu for gpu in GPUS if gpu.split("-")[0] in name]
    if not alike:
        raise LookupError(f"expected a GPU of the planner's table ({', '.join(GPUS)}), found {name}")
    return min(alike, key=lambda gpu: abs(GPUS[gpu].usable_gib - memory))


def errors(rows: list[Result]) -> Result:
    """How far predictions are off, relative to what was measured: in the median and at worst."""
    found: dict[str, list[float]] = {}
    for key, name in COMPARED.items():
        for row in rows:
            predicted, measured = row[key]
            if measured:
                found.setdefault(name, []).append(abs(predicted / measured - 1))
    return {name: {"median": median(off), "worst": max(off)} for name, off in found.items()}


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be a process group of one rank."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- the command -----------------------------------------------------------------------------------------


def smoke(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Does the library work on this GPU?"""
    for check in CHECKS:

        def measure(check: Callable[[torch.device, bool], Result] = check) -> Result:
            with one_rank(device):
                return check(device, tiny)

        yield check.__name__, measure


def planner(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Are memory and time of a step what fsdp_utils.planner predicts?"""
    for row in TINY if tiny else SETTINGS:
        name = ", ".join(f"{key} {value}" for key, value in zip(NAMES, row, strict=True))
        yield name, lambda row=row: predicted_and_measured(row, device, tiny)


PARTS = {part.__name__: part for part in (smoke, planner)}


def record(part: str, device: torch.device, tiny: bool, out: Path) -> list[str]:
    """Measure what the recording of a part lacks; return what failed, with the error of each."""
    file = out / f"{part}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    same = (before.get("commit"), before.get("dry_run")) == (commit(), tiny)
    done = {row["setting"]: row for row in before["results"]["rows"] if "error" not in row} if same else {}
    rows: list[Result] = []
    for name, measure in PARTS[part](device, tiny):
        if name not in done:
            begin = time.perf_counter()
            try:
                result = measure()
            except Exception as error:  # the other settings are measured all the same
                result = {"error": f"{type(error).__name__}: {error}"}
            done[name] = {"setting": name, "took_s": time.perf_counter() - begin, **result}
        rows.append(done[name])
        results = {"rows": rows, "errors": errors([row for row in rows if "step_s" in row])}
        keep(part, PARTS[part].__doc__, group="one rank", folder=out, dry_run=tiny, results=results)
    print(
        "\n" + table([part, ""], [[row["setting"], row.get("error", "recorded")] for row in rows]), flush=True
    )
    return [f"{row['setting']}: {row['error']}" for row in rows if "error" in row]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run with small sizes")
    parser.add_argument("--out", type=Path, default=RECORDED, metavar="DIR", help="not notebooks/recorded")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if (options.device == "cpu") > options.tiny or options.tiny > (options.out != RECORDED):
        parser.error("--device cpu is for a dry run: add --tiny, and --out, as a dry run is no recording")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA GPU here (--device cpu --tiny --out DIR is a dry run).", file=sys.stderr)
        return 2
    failed = []
    for part in options.parts or PARTS:
        failed += record(part, torch.device(options.device), options.tiny, options.out)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

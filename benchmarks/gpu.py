"""Record on one GPU what only a GPU can show: does the library work there, are plan and simulation right?

    python benchmarks/gpu.py [PART …]             all of PARTS, or the named ones
    python benchmarks/gpu.py --dry-run DIR        all of the code, with small sizes on a CPU; writes to DIR

The job is one rank, by itself on the GPU (two ranks cannot share one under NCCL). Where memory is measured it
may be one rank of a larger `fake` group: that group sends nothing, and FSDP2 allocates as in a real one. Each
result is written to notebooks/recorded/PART.json when it is measured; the same command with the same code
goes on where it was interrupted. Needs transformers, and torch 2.11 or later. Exits with 1 on failure, 2
without a GPU.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
)
from transformers import LlamaConfig

import fsdp_utils
from benchmarks.gpu_costs import costs, fsdp1, kernels, selective
from benchmarks.gpu_job import GIB, KINDS, POLICIES, Result, local, measured_steps, one_rank
from benchmarks.gpu_scripts import messages, scripts
from benchmarks.machine import RECORDED, commit, keep, table
from fsdp_utils.planner import GPUS

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
    model, x = as_fsdp2(layers(device, width)), torch.randn(2 * width, width, device=device)
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
    model, x = as_fsdp1(layers(device)), torch.ones(8, 256, device=device)
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
    for save_as in (as_fsdp1, as_fsdp2):
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = build(save_as)
            train(model, optimizer, x)
            saving = fsdp_utils.save_distributed(folder, model, optimizer, step=1, asynchronous=True)
            before = [local(parameter).clone() for parameter in model.parameters()]  # one rank: all of it
            train(model, optimizer, x)
            saving.wait()
            for load_as in (as_fsdp1, as_fsdp2, lambda module: module):
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
    model = as_fsdp2(model) if torch.__version__ >= "2.13" else model
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


def as_fsdp1(model: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=next(model.parameters()).device, use_orig_params=True)


def as_fsdp2(model: nn.Sequential) -> Any:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


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
TINY = ((1, 2, 64, 2, 16, "full", "bf16", "full"),)
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
    width = 1024 if device.type == "cuda" else 64

    def retried() -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if device.type == "cuda" else 0

    with one_rank(device, of=4):
        model = encoder(device, init_device_mesh(device.type, (4,)), width)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        try:
            for _ in range(5):
                before, begin = retried(), time.perf_counter()
                train(model, optimizer, torch.randn(batch_size, 256, width, device=device), steps=1)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                count, took = [*count, retried() - before], [*took, time.perf_counter() - begin]
        except torch.OutOfMemoryError as raised:
            error = type(raised).__name__
        del model, optimizer
    return {"retries_by_step": str(count), "step_s": min(took[3:], default=None), "error": error}


def encoder(device: torch.device, mesh: DeviceMesh, width: int) -> Any:
    blocks = [
        nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, device=device)
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
        for expandable in ((False, True) if cuda else (False,))
        for limit in limits
    }


PARTS = (smoke, scripts, messages, costs, selective, kernels, fsdp1, planner, retries)


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
        group = "four ranks that share the GPU, gloo" if part is scripts else "one rank"
        keep(part.__name__, part.__doc__, group=group, folder=out, **held)
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

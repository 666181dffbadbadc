"""Do the library's CUDA paths work on this GPU?

Seven checks of a few seconds each, with what a process group of one rank can do. They come before the parts
that take minutes: a check that fails names the part of the library whose numbers on this GPU mean nothing.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from benchmarks import child_tuning
from benchmarks.gpu_parts import Done, Result, Setting
from benchmarks.gpu_parts.recorder import ROOT
from fsdp_utils import (
    ChildTuningAdamW,
    bf16_support,
    find_batch_size,
    load_distributed,
    record_collectives,
    run_on_ranks,
    save_distributed,
)

USES = (
    "benchmarks/child_tuning.py",
    *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "fsdp_utils").rglob("*.py")),
)
GROUP = None
WAIT = timedelta(seconds=60)
Said = dict[str, Any]


def settings(tiny: bool, done: Done) -> list[Setting]:
    return [{"check": name} for name in CHECKS]


def measure(setting: Setting, device: torch.device, tiny: bool) -> Result:
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=WAIT)
    began = time.perf_counter()
    said = CHECKS[setting["check"]](device, tiny)
    return {"seconds": time.perf_counter() - began, **said}


def summarize(done: Done) -> dict[str, Any]:
    """The checks that passed. One that raised is among the settings, with its error."""
    return {"passed": [setting["check"] for setting, _ in done], "of": len(CHECKS)}


def ranks_on_the_cpu_do_not_see_the_gpu(device: torch.device, tiny: bool) -> Said:
    """Ranks joined by gloo would otherwise take the mesh "cuda", and share one GPU."""

    def step() -> dict[str, int]:
        model = fully_shard(nn.Linear(256, 256, bias=False))
        with record_collectives(model) as trace:
            model(torch.ones(1, 256)).sum().backward()
        return trace.bytes_by_kind()

    expected = {"all_gather": 4 * 256**2, "reduce_scatter": 4 * 256**2}
    found = run_on_ranks(step)
    assert found == [expected] * 2, f"expected {expected} on each of 2 ranks, found {found}"
    return {"bytes": found[0]}


def a_recording_has_device_times(device: torch.device, tiny: bool) -> Said:
    width = 64 if tiny else 2048
    model, x = _fsdp2(_net(device, width)), torch.randn(2 * width, width, device=device)
    model(x).sum().backward()  # the first step sets FSDP up
    with record_collectives(model) as trace:
        model(x).sum().backward()
    assert not trace.notes, trace.notes
    untimed = [f"{event.kind} of {event.module}" for event in trace.events if event.seconds is None]
    assert not untimed, f"no time on the device for {untimed}"
    compute = sum(event.seconds or 0.0 for event in trace.events if event.kind == "compute")
    assert compute > 0, f"all computation took {compute} s on the device"
    return {"events": len(trace.events), "compute_s": compute}


def an_asynchronous_save_keeps_the_weights_of_its_step(device: torch.device, tiny: bool) -> Said:
    """The steps after the call change the weights while the save is under way."""
    for name, model, optimizer in _trained(device, (_fsdp1, _fsdp2)):
        with tempfile.TemporaryDirectory() as folder:
            saving = save_distributed(folder, model, optimizer, step=1, asynchronous=True)
            before = [p.detach().clone() for p in model.parameters()]
            _train(model, optimizer, device)
            saving.wait()
            load_distributed(folder, model, optimizer)
        pairs = zip(before, model.parameters(), strict=True)
        changed = sum(not torch.equal(_local(a), _local(b)) for a, b in pairs)
        assert not changed, f"{name}: {changed} parameters differ from those of the call"
        _train(model, optimizer, device)  # with the state that was loaded
    return {}


def a_checkpoint_loads_into_each_wrapper(device: torch.device, tiny: bool) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        _, model, optimizer = next(_trained(device, (_fsdp2,)))
        saved = [p.full_tensor().clone() for p in model.parameters()]
        save_distributed(folder, model, optimizer, step=1)
        for name, model, optimizer in _trained(device, (_fsdp1, _fsdp2, _plain), steps=0):
            load_distributed(folder, model, optimizer)
            pairs = zip(saved, model.parameters(), strict=True)
            assert all(torch.equal(a, _local(b).view_as(a)) for a, b in pairs), f"{name}: other weights"
            _train(model, optimizer, device)
    return {}


def child_tuning_steps_as_on_the_cpu(device: torch.device, tiny: bool) -> Said:
    """The masks are the same numbers on every device; the time is that of 20 tensors of 1024 x 1024."""
    shape = (30, 50) if tiny else (300, 500)
    for mode in ("taskfree", "task"):
        on_cpu, here = (_child_tuned(torch.device(kind), mode, shape) for kind in ("cpu", device.type))
        torch.testing.assert_close(here, on_cpu, rtol=1e-4, atol=1e-5)
    steps = child_tuning.ways(*((2, 64) if tiny else (20, 1024)), device.type)
    return {"ratios": child_tuning.ratios(child_tuning.measure(steps, 2 if tiny else 10, device.type))}


def a_search_survives_out_of_memory(device: torch.device, tiny: bool) -> Said:
    width, room_gib = 1024, 2
    limit = 4 if device.type == "cpu" else None  # whose memory no limit ends
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(room_gib * 2**30 / total)
    model = _fsdp2(_net(device, 64 if tiny else width))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch_size: int) -> None:
        x = torch.randn(batch_size, 64 if tiny else width, device=device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    search = find_batch_size(step, start=1 if limit else 4096, limit=limit)
    assert search.best, f"no batch size fits: {search}"
    assert device.type == "cpu" or len(search.trials) > 1, (
        f"nothing was too much for {room_gib} GiB: {search}"
    )
    return {"best": search.best, "trials": len(search.trials)}


def bf16_gets_an_answer(device: torch.device, tiny: bool) -> Said:
    support = bf16_support(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert support.compute == "native", f"expected native bf16 on {device}, found {support}"
    return {"ready": bool(support), "compute": support.compute, "reasons": list(support.reasons)}


CHECKS: dict[str, Callable[[torch.device, bool], Said]] = {
    check.__name__: check
    for check in (
        ranks_on_the_cpu_do_not_see_the_gpu,
        a_recording_has_device_times,
        an_asynchronous_save_keeps_the_weights_of_its_step,
        a_checkpoint_loads_into_each_wrapper,
        child_tuning_steps_as_on_the_cpu,
        a_search_survives_out_of_memory,
        bf16_gets_an_answer,
    )
}
# the part whose numbers mean nothing where a check failed; the other parts do not use what the checks try
BASIS = {"child_tuning": child_tuning_steps_as_on_the_cpu.__name__}


def _net(device: torch.device, width: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)


def _plain(model: nn.Sequential) -> nn.Module:
    return model


def _fsdp1(model: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=next(model.parameters()).device, use_orig_params=True)


def _fsdp2(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _trained(
    device: torch.device, wrappers: tuple[Callable[[nn.Sequential], nn.Module], ...], steps: int = 2
) -> Iterator[tuple[str, Any, torch.optim.Optimizer]]:
    """For each wrapper, and each kernel of AdamW: a name to show, the model and the optimizer."""
    for wrap in wrappers:
        for fused in (False, True):
            model = wrap(_net(device))
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            _train(model, optimizer, device, steps)
            yield f"{wrap.__name__[1:]}, fused={fused}", model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(8, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _child_tuned(device: torch.device, mode: str, shape: tuple[int, int]) -> torch.Tensor:
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

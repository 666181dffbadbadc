"""Parts of gpu.py that run in processes of their own: the lessons' scripts, and what only CUDA raises."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

from benchmarks.gpu_job import Result
from benchmarks.machine import ROOT
from fsdp_utils.answers import explain

SCRIPT = r"# ## The script\n.*?# ```python\n(.*?)# ```\n# ```text\n(.*?)# ```\n"
# All ranks on one GPU: gloo allows it, and sends CUDA tensors.
SHARED = "import os\nos.environ['LOCAL_RANK'] = '0'\n"


def run_script(lesson: Path, ranks: int) -> Result:
    """Run a lesson's script under torchrun, with gloo in place of NCCL, which has no two ranks on a GPU."""
    ((code, expected),) = re.findall(SCRIPT, lesson.read_text(encoding="utf-8"), re.DOTALL)
    code, expected = (re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in (code, expected))
    code = SHARED + code.replace('"cpu:gloo,cuda:nccl"', '"gloo"').replace('"nccl"', '"gloo"')
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
    found: Result = {"exit": done.returncode, "prints_the_same": done.stdout == expected}
    if not found["prints_the_same"]:
        found["prints"] = done.stdout.splitlines()[-20:]
    if done.returncode:
        found["errors"] = [
            line for line in done.stderr.splitlines() if re.search("Error|exitcode|SIG", line)
        ][:8]
    return found


def scripts(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Do the lessons' scripts run on four ranks of a GPU, and print what they print on four CPU ranks?"""
    lessons = sorted((ROOT / "notebooks" / "src").glob("[0-9]*.py"))
    ranks, lessons = (4, lessons) if device.type == "cuda" else (1, lessons[:1])
    pool = ThreadPoolExecutor(4)
    return {
        f"lesson {int(lesson.name[:2])}": pool.submit(run_script, lesson, ranks).result for lesson in lessons
    }


def offload_not_on_cpu(device: torch.device) -> None:
    model: Any = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    model.to_empty(device=device)
    model(torch.ones(1, 8, device=device))


def allgather_output_dtype(device: torch.device) -> None:
    dist.all_gather_into_tensor(torch.empty(4, device=device), torch.ones(4, device=device).bfloat16())


def cuda_out_of_memory(device: torch.device) -> None:
    model: Any = fully_shard(nn.Linear(8, 8, device=device))
    model(torch.ones(2**38, 8, device=device)).sum().backward()


def cuda_in_forked_subprocess(device: torch.device) -> None:
    torch.multiprocessing.start_processes(torch.cuda.set_device, (0,), start_method="fork")


def cpu_tensor_under_nccl(device: torch.device) -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="nccl"))


def clip_under_offload(device: torch.device) -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    model(torch.ones(1, 8, device=device)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def sync_module_states_on_cpu(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8), sync_module_states=True)


def inconsistent_compute_device(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8).cuda(), device_id=torch.device("cpu"))


def moved_after_sharding(device: torch.device) -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.cuda.current_device()).cpu()
    model(torch.ones(1, 8, device=device))


def moved_between_steps(device: torch.device) -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.cuda.current_device())
    model(torch.ones(1, 8, device=device)).sum().backward()
    model.cpu()
    model(torch.ones(1, 8, device=device)).sum().backward()


def not_moved_to_the_gpu(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8))(torch.ones(1, 8))


def invalid_device_ordinal(device: torch.device) -> None:
    torch.cuda.set_device(1)


def duplicate_gpu(device: torch.device) -> None:
    """Two ranks of NCCL on one GPU."""
    torch.multiprocessing.start_processes(_one_of_two, nprocs=2, start_method="spawn")


def _one_of_two(rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", 29517, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1, device="cuda:0"))


def fused_on_two_devices(device: torch.device) -> None:
    _step_on_two_devices(device, fused=True)


def foreach_on_two_devices(device: torch.device) -> None:
    _step_on_two_devices(device, foreach=True)


def _step_on_two_devices(device: torch.device, **how: Any) -> None:
    parameters = [nn.Parameter(torch.ones(4, device=place)) for place in (device, "cpu")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, **how).step()
    print([parameter.tolist() for parameter in parameters])


def watchdog_time_out(device: torch.device) -> None:
    dist.destroy_process_group()
    limit = timedelta(seconds=3)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda._sleep(int(30e9))  # cycles
    dist.all_reduce(torch.ones(1, device=device))
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
    not_moved_to_the_gpu,
    invalid_device_ordinal,
    duplicate_gpu,
    fused_on_two_devices,
    foreach_on_two_devices,
    watchdog_time_out,
)


def raised(message: Callable[[torch.device], None]) -> Result:
    """Raise it in a process of its own, a group of one rank, and look it up."""
    name = message.__name__
    code = (
        f"from benchmarks import gpu_job, gpu_scripts\nimport torch\ndevice = torch.device('cuda', 0)\n"
        f"with gpu_job.one_rank(device):\n    gpu_scripts.{name}(device)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired as late:
        return {"exit": None, "entries": [], "tail": str(late.stderr)[-800:]}
    entries = [answer.id for answer in explain(done.stderr)]
    return {"exit": done.returncode, "entries": entries, "tail": (done.stdout + done.stderr)[-1500:]}


def messages(device: torch.device) -> dict[str, Callable[[], Result]]:
    """What does CUDA raise, and does `explain` know it?"""
    if device.type == "cpu":
        return {}
    pool = ThreadPoolExecutor(4)
    return {message.__name__: pool.submit(raised, message).result for message in MESSAGES}

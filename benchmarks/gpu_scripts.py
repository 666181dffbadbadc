"""Parts of gpu.py that run in processes of their own: the lessons' scripts, and what only CUDA raises."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
SHARED = "import os; os.environ['LOCAL_RANK'] = '0'; "  # on the first line: the lines keep their numbers


def run_script(lesson: Path, ranks: int) -> Result:
    """Run a lesson's script under torchrun and the doctor, with gloo: NCCL has no two ranks on a GPU."""
    ((code, expected),) = re.findall(SCRIPT, lesson.read_text(encoding="utf-8"), re.DOTALL)
    code, expected = (re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in (code, expected))
    code = SHARED + code.replace('"cpu:gloo,cuda:nccl"', '"gloo"').replace('"nccl"', '"gloo"')
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    doctor = ["fsdp_utils", "doctor", f"--ranks={ranks}", "--json", "--fail-on=never", "train.py"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(code)
        done, examined = (
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", *command],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                capture_output=True,
                text=True,
                timeout=100,
            )
            for command in (torchrun, doctor)
        )
    found: Result = {"exit": done.returncode, "prints_the_same": done.stdout == expected}
    if not found["prints_the_same"]:
        found["prints"] = done.stdout.splitlines()[-20:]
    if done.returncode:
        found["errors"] = [
            re.sub(r"/\S*/(?=torch/|fsdp_utils/|python)", "", line)
            for line in done.stderr.splitlines()
            if re.search("Error|exitcode|^Fatal|^  File", line)
        ][:12]
    try:
        found["doctor"] = [one["id"] for one in json.loads(examined.stdout)["findings"]]
    except ValueError:
        found["doctor"] = examined.stderr[-600:]
    return found


def scripts(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Do the lessons' scripts run on four ranks of a GPU, and print what they print on four CPU ranks?"""
    lessons = sorted((ROOT / "notebooks" / "src").glob("[0-9]*.py"))
    ranks, lessons = (4, lessons) if device.type == "cuda" else (1, lessons[:1])
    pool = ThreadPoolExecutor(8)
    return {
        f"lesson {int(lesson.name[:2])}": pool.submit(run_script, lesson, ranks).result for lesson in lessons
    }


def offload_not_on_cpu(device: torch.device) -> None:
    model: Any = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())
    model.to_empty(device=device)
    model(torch.ones(1, 8, device=device))


def output_same_type_nccl(device: torch.device) -> None:
    dist.all_gather_into_tensor(torch.empty(4, device=device), torch.ones(4, device=device).bfloat16())


def cuda_out_of_memory(device: torch.device) -> None:
    model: Any = fully_shard(nn.Linear(8, 8, device=device))
    model(torch.ones(2**38, 8, device=device)).sum().backward()


def cuda_in_forked_subprocess(device: torch.device) -> None:
    torch.multiprocessing.start_processes(torch.cuda.set_device, start_method="fork")


def no_backend_for_device(device: torch.device) -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="nccl"))


def fsdp1_sync_module_states_on_cpu(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8), sync_module_states=True)


def fsdp1_device_id_differs(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8).cuda(), device_id=torch.device("cpu"))


def fsdp1_parameters_on_cpu(device: torch.device) -> None:
    FullyShardedDataParallel(nn.Linear(8, 8))(torch.ones(1, 8))


def fsdp1_moved_after_a_step(device: torch.device) -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.cuda.current_device())
    model(torch.ones(1, 8, device=device)).sum().backward()
    model.cpu()
    model(torch.ones(1, 8, device=device))


def cuda_invalid_device_ordinal(device: torch.device) -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def duplicate_gpu(device: torch.device) -> None:
    torch.multiprocessing.start_processes(_one_of_two, nprocs=2, start_method="spawn")


def _one_of_two(rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", 29517, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1, device="cuda:0"))


MESSAGES = {  # with the entry of fsdp_utils/answers/messages.yaml
    offload_not_on_cpu: "offload-not-on-cpu",
    output_same_type_nccl: "output-same-type-nccl",
    cuda_out_of_memory: "cuda-out-of-memory",
    cuda_in_forked_subprocess: "cuda-in-forked-subprocess",
    no_backend_for_device: "no-backend-for-device",
    fsdp1_sync_module_states_on_cpu: "fsdp1-sync-module-states-on-cpu",
    fsdp1_device_id_differs: "fsdp1-parameters-on-another-device",
    fsdp1_parameters_on_cpu: "fsdp1-parameters-on-another-device",
    fsdp1_moved_after_a_step: "fsdp1-parameters-on-another-device",
    cuda_invalid_device_ordinal: "invalid-device-ordinal",
    duplicate_gpu: "duplicate-gpu",
}


def raised(message: Callable[[torch.device], None]) -> Result:
    """Raise it in a process of its own, a group of one rank, and look it up."""
    name, entry = message.__name__, MESSAGES[message]
    code = (
        "from benchmarks import gpu_job, gpu_scripts\nimport torch\ndevice = torch.device('cuda', 0)\n"
        f"with gpu_job.one_rank(device):\n    gpu_scripts.{name}(device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    entries = [answer.id for answer in explain(done.stderr)]
    assert entry in entries, f"explain found {entries} in {done.stderr[-800:]}"
    return {"entries": entries}


def messages(device: torch.device) -> dict[str, Callable[[], Result]]:
    """Does CUDA raise what `explain` knows it by?"""
    if device.type == "cpu":
        return {}
    pool = ThreadPoolExecutor(4)
    return {message.__name__: pool.submit(raised, message).result for message in MESSAGES}

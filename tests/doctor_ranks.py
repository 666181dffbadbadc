"""Run the doctor on a script in ranks that are forked from one warm process, as torchrun would start them."""

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# A server of its own: the one of run_on_ranks need not import transformers, and may have started before.
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(
    [
        "fsdp_utils.distributed.preload",
        "torch._dynamo",  # fully_shard imports it
        "torch.distributed.checkpoint.state_dict",
        "fsdp_utils.doctor.watch",
        "fsdp_utils.doctor.report",
        "accelerate",
        "transformers.trainer",
        "transformers.models.llama",
        "yaml",
    ]
)
SCRIPTS = Path(__file__).with_name("doctor_scripts")
_ONE_STARTS = threading.Lock()
_END_S = 120.0


def examine(script: Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what `torchrun -m fsdp_utils.doctor --json` prints; "log" is what the script has printed."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = ["--json", "--fail-on=never", *options, str(script), *arguments]
        args = [(rank, ranks, store.port, folder, given) for rank in range(ranks)]
        processes = [context.Process(target=_be_rank, args=one) for one in args]
        with _ONE_STARTS, patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            for one in processes:
                one.start()
        limit = time.monotonic() + _END_S
        for one in processes:
            one.join(max(0.0, limit - time.monotonic()))
            one.kill()
        log = "".join(file.read_text() for file in sorted(folder.glob("log_*")))
        shown = (folder / "page_0").read_text()
        assert shown, log
        return {**json.loads(shown), "log": log}


def _be_rank(rank: int, ranks: int, port: int, folder: Path, given: list[str]) -> None:
    gc.freeze()  # the doctor looks through what the script has made
    gc.enable()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for number, kind in ((1, "page"), (2, "log")):
        os.dup2(os.open(folder / f"{kind}_{rank}", os.O_WRONLY | os.O_CREAT), number)
    import torch

    from fsdp_utils.doctor.__main__ import main

    torch.set_num_threads(1)
    sys.argv = ["doctor", *given]
    sys.path.append(str(SCRIPTS))  # for `import common`
    sys.exit(main())

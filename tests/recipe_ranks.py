"""Run recipes of book/trainers.md as torchrun would, on CPU ranks: whole, killed, and resumed.

    python -m tests.recipe_ranks folder        # each folder/*/recipe.py

Their packages are imported once, here; the ranks are forked from this process.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_utils.distributed.launch import PRELOAD


def start(recipe: Path, folder: Path, world_size: int, *, dies_at: int = -1) -> tuple[str, list[int]]:
    """Run the recipe in a folder, and kill all ranks when one has ended otherwise than well.

    Rank 0 is killed when it is about to commit the checkpoint of step `dies_at`. Returns the output of all
    ranks, and the exit code of each rank as waitstatus_to_exitcode gives it.
    """
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / f"log-{world_size}"
    codes: dict[int, int] = {}
    children: list[int] = []
    for rank in range(world_size):
        if (child := os.fork()) == 0:
            _be_rank(recipe, folder, log, rank, world_size, port, dies_at)
        children.append(child)
    ends = time.monotonic() + 100
    while len(codes) < world_size:
        for child in children:
            if child not in codes and (done := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(done[1])
        if any(codes.values()) or time.monotonic() > ends:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
                codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.02)
    return log.read_text(), [codes[child] for child in children]


def _be_rank(recipe: Path, folder: Path, log: Path, rank: int, size: int, port: int, dies_at: int) -> None:
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        settings = {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
            **{"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            "TORCHELASTIC_RUN_ID": "test",  # or Lightning starts further processes
        }
        os.environ.update({name: str(value) for name, value in settings.items()})

        def killed(event: str, given: tuple[Any, ...]) -> None:
            if event == "os.rename" and str(given[1]).endswith(f"-step-{dies_at}"):
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == 0 and dies_at >= 0:
            sys.addaudithook(killed)
        runpy.run_path(str(recipe), run_name="__main__")
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(recipe: Path) -> None:
    """Whole, killed and resumed; writes what was said and the exit codes beside the recipe."""
    lines = recipe.read_text().splitlines()
    exec("\n".join(line for line in lines if line.startswith(("import ", "from "))))  # once for all ranks
    if "transformers" in sys.modules:
        import transformers

        from tests.trainers import TrainerOnCpus

        transformers.Trainer = TrainerOnCpus  # type: ignore[misc]
    whole, again = recipe.parent / "whole", recipe.parent / "run"
    runs = [start(recipe, whole, 2), start(recipe, again, 2, dies_at=4), start(recipe, again, 3)]
    recipe.with_name("runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for module in PRELOAD:
        importlib.import_module(module)
    for recipe in sorted(Path(sys.argv[1]).absolute().glob("*/recipe.py")):
        run(recipe)

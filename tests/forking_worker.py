"""Workers of benchmarks/gpu.py as forks of one process that has imported what all parts import.

So torch and transformers are imported once. A fork has nothing of the workers before it.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import worker

ROOT = Path(__file__).parents[1]


@contextmanager
def forking() -> Iterator[Any]:
    """To be put in the place of `recorder._worker`."""
    command = [sys.executable, "-m", "tests.forking_worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(
            arguments: list[str], *, timeout: float, variables: Mapping[str, str], log: Path
        ) -> subprocess.CompletedProcess[str]:
            print(json.dumps([arguments, {**os.environ, **variables}]), file=server.stdin, flush=True)
            return subprocess.CompletedProcess(arguments, int(server.stdout.readline()))

        try:
            yield run
            server.stdin.close()  # it ends by itself
        except BaseException:
            server.kill()
            raise


def main() -> None:
    importlib.import_module("benchmarks.gpu_parts.workload")  # which all parts import
    gc.freeze()  # no garbage in it: forks end a second sooner
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what workers print is no answer
    for line in sys.stdin:
        arguments, variables = json.loads(line)
        if (pid := os.fork()) == 0:
            os.environ.update(variables)
            worker.main(*arguments)
            break
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()

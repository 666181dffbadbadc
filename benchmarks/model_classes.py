"""Which model classes of transformers does shard take, at the sizes of their default configurations?

    python benchmarks/model_classes.py                # all that build: some 30 minutes on 2 cores
    python benchmarks/model_classes.py --only Llama   # those with that in their name

Each is built on the meta device, so that it takes no memory, and sharded in a fake process group of eight
ranks. It is sharded, refused in words (ValueError of shard), not built (its default configuration or another
package is missing), or failed. Exits with 1 if any failed.
"""

import signal
import sys
import time
import warnings
from collections import Counter
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.machine import describe, options, table
from fsdp_utils import check_sharding, shard
from fsdp_utils.torch_internals.groups import fake_store

MODEL = transformers.PreTrainedModel
RANKS = 8
LIMIT_S = 120
SHARDED, REFUSED, NOT_BUILT, FAILED = "sharded", "refused", "not built", "failed"


def classes(part: str) -> list[str]:
    """By name. A class that ends in PreTrainedModel is what those of a family share, without a forward."""
    transformers.logging.set_verbosity_error()
    named = {name: getattr(transformers, name, None) for name in sorted(dir(transformers)) if part in name}
    found = [name for name, it in named.items() if isinstance(it, type) and issubclass(it, MODEL)]
    return [name for name in found if not name.endswith("PreTrainedModel")]


def start() -> None:
    """In each worker: quiet, and one of eight ranks that do not exist."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=RANKS)
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"took longer than {LIMIT_S} s")


def sharded(name: str) -> tuple[str, str, str]:
    """The class, how it ended, and why."""
    cls = getattr(transformers, name)
    signal.alarm(LIMIT_S)
    try:
        with torch.device("meta"):
            model = cls(cls.config_class())
    except Exception as error:
        return name, NOT_BUILT, f"{type(error).__name__}: {error}"
    try:
        shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        return name, SHARDED, " ".join(check_sharding(model))
    except ValueError as error:
        refused = str(error).startswith("shard: ") or "found no transformer blocks" in str(error)
        return name, REFUSED if refused else FAILED, str(error)
    except Exception as error:
        return name, FAILED, f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def main() -> int:
    chosen = options(__doc__, only="")
    print(describe("transformers"))
    start_s = time.monotonic()
    names, outcomes = classes(chosen.only), []
    # spawned: a fork has this process's threads' locks; few classes each: some leave memory behind
    with get_context("spawn").Pool(2, initializer=start, maxtasksperchild=50) as pool:
        waiting = pool.imap(sharded, names)
        for name in names:
            try:
                outcomes.append(waiting.next(timeout=2 * LIMIT_S))
            except PoolTimeoutError:  # its process has died: the pool would wait for it for ever
                outcomes.append((name, FAILED, "its process died"))
            print(name, end=" ", flush=True, file=sys.stderr)
    counts = Counter(outcome for _, outcome, _ in outcomes)
    print(table(["model classes", *counts], [[len(outcomes), *counts.values()]]))
    problems = [name for name, outcome, said in outcomes if outcome == SHARDED and said]
    print(f"check_sharding finds a problem in {len(problems)} that are sharded: {', '.join(problems[:20])}")
    for name, outcome, said in outcomes:
        if outcome in (REFUSED, FAILED):
            print(f"{outcome}: {name}: {said[:200]}")
    print(f"{time.monotonic() - start_s:.0f} s")
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())

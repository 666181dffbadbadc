"""What does the doctor add to a training step?

    python benchmarks/doctor.py [--pairs 20]

Trains transformer layers under FSDP2 with and without the doctor in turn, on two CPU ranks (gloo) or a GPU
(NCCL), with the smallest batch of which a step takes 20 ms. The first and the last step of a run, when the
doctor looks at the model, do not count. Exits with 1 if the median ratio over pairs of runs is above 1.10.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import Flatten, Linear, Sequential, TransformerEncoderLayer

from benchmarks.machine import describe, limits, options
from fsdp_utils.distributed.agreement import library_store
from fsdp_utils.doctor.watch import Watch

COST, STEP_S, STEPS, LAYERS, WIDTH, LENGTH = 1.10, 0.020, 12, 4, 256, 32


def measure(pairs: int) -> tuple[float, float]:
    """Return the ratio of a step with the doctor to one without, and the milliseconds without."""
    dist.init_process_group()
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [TransformerEncoderLayer(WIDTH, 4, batch_first=True, dropout=0.0) for _ in range(LAYERS)]
    model = Sequential(*layers, Flatten(0, 1), Linear(WIDTH, 100))
    for part in [*layers, model]:
        fully_shard(part)
    optimizer, times, batch = torch.optim.AdamW(model.parameters(), fused=True), [0.0], 0

    def loop(steps: int) -> float:
        dist.barrier()
        times.clear()
        for _ in range(steps):
            began = time.perf_counter()
            loss = model(torch.randn(batch, LENGTH, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for a GPU
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:-1])

    step_s = torch.tensor(0.0)
    while step_s < STEP_S:
        batch += max(1, batch // 4)
        dist.all_reduce(step_s.fill_(loop(STEPS)), dist.ReduceOp.MAX)
    sys.modules["training"] = loop  # pyright: ignore[reportArgumentType]
    script = Path(tempfile.mkdtemp(), "train.py")
    script.write_text(f"import training\n\ntraining({STEPS + 1})\n")
    ratios, plain = [], []
    for number in range(pairs):
        plain.append(loop(STEPS))
        watch = Watch(dist.get_rank(), dist.get_world_size(), STEPS, library_store(f"doctor/{number}"))
        watch.run(str(script), [])
        assert (watch.facts.ended, watch.facts.unseen) == ("stopped", []), watch.facts
        ratios.append(statistics.median(times[1:-1]) / plain[-1])
    return statistics.median(ratios), 1e3 * statistics.median(plain)


if __name__ == "__main__":
    asked = options(__doc__, pairs=20)
    if "RANK" not in os.environ:
        ranks = f"--nproc-per-node={1 if torch.cuda.is_available() else 2}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *sys.argv]
        os.execv(sys.executable, command)
    cost, step_ms = measure(asked.pairs)
    if dist.get_rank() == 0:
        print(f"{describe()}\nA step of {step_ms:.1f} ms takes {cost:.3f} times as long with the doctor.")
        sys.exit(limits({f"at most {COST} times as long": cost <= COST}))

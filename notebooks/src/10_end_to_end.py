# %% [markdown]
# # 10 · End to end
#
# Each lesson so far showed one technique. A training program needs all of them at once, and it must not lose
# work when something fails. In this lesson you read the program `fsdp_utils.train` in small
# pieces, start it with torchrun, kill one of its ranks, and resume it on another number of ranks. You also
# write two of its parts yourself: the evaluation, and a save that survives a kill at any moment.

# %% [markdown] tags=["card"]
# learn:
# - what a training step needs besides forward and backward, so that the number of ranks does not change it
# - how to evaluate on ranks that do not divide the samples, without a hang
# - how to save so that a kill at any moment leaves a checkpoint to go on from
# - how to resume on another number of ranks, without a jump in the loss
# - what to change for a model of yours, and for several hosts
# needs: '[lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) · no GPU'
# ranks: 4 on this machine, and programs of 1, 3 and 2 ranks under torchrun. With `FSDP_RANKS=2` programs of
#   1, 2 and 1.
# takes: a minute to run on 2 cores (AMD EPYC) · 35 minutes to read
# video: '[End to end](https://www.loom.com/share/fbd5cb0aefca41ff9bb6f6c291e75ec8), 2022. Since then: the
#   parts have changed as the lessons before this one say.'

# %% [markdown]
# **The question of this lesson:** a run is killed at an arbitrary moment and started again on fewer ranks.
# What must it have saved, and in which order, so that the loss curve shows nothing of it?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

plots.life_of_a_run(
    [
        {"ranks": 3, "begun": 0, "points": [(2, 0), (5.4, 17)], "ended": 5.4, "killed": 1},
        {"ranks": 2, "begun": 6.4, "points": [(8.4, 10), (15, 40)], "ended": 15, "killed": None},
    ],
    every=10,
    unit="time",
    alt="A run of 3 ranks is killed at step 17, and 2 ranks resume it from the checkpoint of step 10.",
)

# %% [markdown]
# This is a sketch; below you start such a run and measure it. Three ranks train, and save a checkpoint every
# ten steps. After step 17 one rank is killed; the others cannot go on without it and end too. Then two ranks
# are started. They load the checkpoint of step 10 and train to the end. Steps 11 to 17 are trained twice. If
# the second time gives other losses than the first, the loss curve has a jump.
#
# ## In your own code
#
# The script below survives being killed. Start it with `torchrun --nproc-per-node 4 train.py`, kill it, and
# start it again with any number of processes: it goes on from its newest complete checkpoint. It uses
# `torch.distributed.checkpoint` ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)), which
# writes the file `.metadata` last. A checkpoint without that file is incomplete, and the script ignores it.
#
# ```python
# from pathlib import Path
# import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.manual_seed(0)
# model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
# for part in [*model, model]:
#     fully_shard(part, mesh=init_device_mesh(device, (dist.get_world_size(),)))
# optimizer = torch.optim.AdamW(model.parameters())
# folder = Path(__file__).with_name("checkpoints")                  # on a disk that all ranks see
# found = [max([int(file.parent.name) for file in folder.glob("*/.metadata")], default=0)]
# dist.broadcast_object_list(found, src=0)                          # all ranks take what rank 0 finds
# step = found[0]
# if step:
#     state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
#     dcp.load(state, checkpoint_id=folder / str(step))             # in place, own shards only
#     set_state_dict(
#         model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
#     )
# for step in range(step + 1, 41):
#     torch.manual_seed(1000 * step + dist.get_rank())              # your data, by step and rank
#     loss = model(torch.randn(8, 64, device=device)).square().mean()
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     if step % 10 == 0:
#         state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
#         dcp.save(state, checkpoint_id=folder / str(step))
# dist.destroy_process_group()
# ```
#
# The program of this lesson does the same with more care: it saves in the background, checks what it loads,
# and draws the same samples on any number of ranks.
#
# ## What it trains
#
# `fsdp_utils.train` trains a model of the transformers library or, as here, a model of your own. For your own
# you give it a function that returns the data and a function that builds the model. Here the data are sums
# such as `07+35=042`, the function is `sums` in `sums.py`, and the model, a small decoder in the folded cell,
# learns to complete them.

# %% jupyter={"source_hidden": true}
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from IPython.display import Markdown, display

from fsdp_utils.lessons import lesson, recorded
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours

home = Path.cwd()
folder = Path(tempfile.mkdtemp())
os.chdir(folder)                                # the ranks and programs of this lesson find sums.py there
sys.path.insert(0, str(folder))
os.environ["OMP_NUM_THREADS"] = "1"             # as torchrun would set it, with a warning

# %% jupyter={"source_hidden": true}
# %%writefile decoder.py
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):                                             # f32[batch, length, width]
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Two blocks; forward returns logits, f32[batch, length, 128]."""

    def __init__(self, width=64):
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 128)

    def logits(self, input_ids):
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        x = self.token(input_ids) + self.place.weight[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

    def loss(self, input_ids, labels):
        return F.cross_entropy(self.logits(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# %%
# %%writefile sums.py
from types import SimpleNamespace
from typing import NamedTuple

import torch
from decoder import Decoder


class Output(NamedTuple):               # FSDP2 finds the tensors in tuples, lists, dicts and dataclasses
    loss: torch.Tensor


class Model(Decoder):
    def forward(self, input_ids, labels):
        return Output(self.loss(input_ids, labels))


def build():
    torch.manual_seed(0)
    return Model()


def sums():
    texts = [f"{a:02}+{b:02}={a + b:03}" for a in range(0, 100, 3) for b in range(0, 100, 4)]
    tokens = torch.tensor([list(text.encode()) for text in texts])      # i64[850, 9]
    labels = tokens.masked_fill(torch.arange(9) < 6, -100)              # only what stands after the "="
    test = torch.arange(len(tokens)) % 12 == 11                         # 70 sums that it never trains on
    train = {"input_ids": tokens[~test], "labels": labels[~test]}
    test = {"input_ids": tokens[test], "labels": labels[test]}
    return SimpleNamespace(train=train, test=test, predicts_next=True, build=build)


# %% [markdown]
# The settings are a YAML file; the command line overrides it.

# %%
from fsdp_utils.notebook import ranks

# %% jupyter={"source_hidden": true}
ranks.start()
on_ranks = len(ranks.get("0"))
world = min(3, on_ranks)
fewer = world - 1

# %%
settings = """
data: {source: "sums:sums", batch_size: 24}
optim: {lr: 0.003, warmup: 5}
steps: 40
save_every: 10
eval_every: 20
"""

# %% jupyter={"source_hidden": true}
import torch

# GPUs, where there is one for each rank
device = "auto" if torch.accelerator.is_available() and torch.accelerator.device_count() >= world else "cpu"
_ = Path("run.yaml").write_text(settings + f"parallel: {{device: {device}}}")

# %% [markdown]
# The batch of 24 samples is that of all ranks together. Every setting is checked before the first step, and a
# wrong one is reported once, not by each rank:

# %% jupyter={"source_hidden": true}
from fsdp_utils.train import ConfigError, learning_rate, parse, rows_at
from fsdp_utils.train import train as train_program


def refusal(*arguments):
    try:
        parse(["--config", "run.yaml", "--out", "x", *arguments])
    except ConfigError as error:
        return " ".join(str(error).split())
    raise AssertionError("it was accepted")


wrong = [("--stepz", "100"), ("--optim.lr", "fast"), ("--optim.warmup", "41")]
Table(["argument", "the program says"], [[" ".join(argument), refusal(*argument)] for argument in wrong])

# %% [markdown]
# The first run is undisturbed and has a single rank: everything that comes later is compared with it. It
# starts in the next cell, which is folded, and trains while you read on. In a terminal the command would be
#
# ```sh
# torchrun --standalone --nproc-per-node 1 -m fsdp_utils.train --config run.yaml --out runs/a
# ```

# %% jupyter={"source_hidden": true}
def start(out, ranks, *arguments):
    """Start the program under torchrun, which is the module torch.distributed.run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = ["-m", "fsdp_utils.train", "--config", "run.yaml", "--out", out]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with Path(f"{out}.log").open("w") as log:
        return subprocess.Popen([*command, *program, *arguments], stdout=log, stderr=log, env=env)


def metrics(out, name="loss"):
    """What rank 0 has written: (step, value) for each step that has such a value."""
    file = folder / out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(line["step"], line[name]) for line in found if name in line]


def watch(out, process, until=40, limit_s=100):
    """Show the last line until the program ends or has come to a step; (time, step) as they were seen."""
    page, limit, seen = display(Markdown("starting"), display_id=True), time.monotonic() + limit_s, []
    while process.poll() is None and time.monotonic() < limit:
        lines = metrics(out)
        if lines and (not seen or lines[-1][0] != seen[-1][1]):
            seen.append((time.time(), lines[-1][0]))
            page.update(Markdown(f"step {lines[-1][0]}: loss {lines[-1][1]:.2f}"))
            if until < 40 and lines[-1][0] >= until:
                break
        time.sleep(0.02)
    assert time.monotonic() < limit, Path(f"{out}.log").read_text()[-2000:]
    page.update(Markdown(f"past step {until}" if until < 40 else "the program has ended"))
    return seen


loop = inspect.getmodule(train_program)


def source(*functions):
    """The program's own lines."""
    return Markdown("\n\n".join(f"```python\n{inspect.getsource(function)}```" for function in functions))


undisturbed = start("undisturbed", 1)

# %% [markdown]
# ## One step
#
# **Predict:** the loss of a batch is a mean over its labels. Each rank computes the mean over its own
# labels, and FSDP averages the gradients over the ranks. When is that *not* the gradient of the whole
# batch's mean?
#
# <details><summary>Answer</summary>
#
# When ranks have different numbers of labels: in a mean of means, each label of a rank with few labels
# weighs more. The same holds for micro-batches, the parts of its samples that a rank computes one after the
# other before the optimizer's step ([lesson 6](06_sharding_strategies.ipynb) calls it gradient
# accumulation).
#
# </details>
#
# So the program first counts the labels of the batch over all ranks. Each rank then weighs its loss by its
# share of them, so that the losses of all ranks and micro-batches add up to the mean of the whole batch. Here
# is what the program computes before the optimizer's step:

# %% jupyter={"source_hidden": true}
source(loop._backward)

# %% [markdown]
# Four things in it are easily missed:
#
# - `set_requires_gradient_sync`: ranks reduce their gradients once, after the last micro-batch.
# - `get_total_norm` and `full_tensor` give the norm of the whole gradient, because under FSDP2 gradients are
#   DTensors. All ranks get the same number. If it is NaN or infinite, all of them stop at the same step.
# - `seed`: the random numbers of dropout follow from the seed of the run, the step and the rank. The
#   learning rate follows from the step alone. Neither needs to be saved.
# - The samples of a step follow from how many samples were seen before. So the checkpoint has to hold one
#   number to continue with the right data. These functions compute the learning rate and the samples:

# %% jupyter={"source_hidden": true}
source(learning_rate, rows_at)

# %% [markdown]
# The order of the samples does not depend on the number of ranks: the ranks divide among them the 24 samples
# that come next. (Dropout does depend on it, because each rank draws its own numbers. This model has no
# dropout. With dropout, a run that is resumed on another number of ranks is a valid run, but not the same.)
#
# ### Clipping, measured
#
# To clip a gradient, a rank must know the norm of the whole gradient. Under FSDP1 each rank sees only its
# own piece of the gradient, and `nn.utils.clip_grad_norm_` does not know that. Compute the norm of one
# gradient in four ways:

# %% tags=["clip"]
# %%ranks
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.utils import clip_grad_norm_

from fsdp_utils import shard

sys.path.insert(0, str(Path.cwd()))
import sums

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
samples = {name: tensor.to(device) for name, tensor in sums.sums().train.items()}

# %%
# %%ranks
def with_gradients(wrap):
    model = wrap(sums.build().to(device))
    model(**{name: tensor[:4] for name, tensor in samples.items()}).loss.backward()
    return model


fsdp1 = with_gradients(lambda model: FSDP(model, device_id=device))
norms = {
    "one process, nn.utils.clip_grad_norm_": clip_grad_norm_(with_gradients(lambda m: m).parameters(), 1e9),
    "FSDP1, nn.utils.clip_grad_norm_": clip_grad_norm_(fsdp1.parameters(), 1e9),
    "FSDP1, its own clip_grad_norm_": fsdp1.clip_grad_norm_(1e9),
    "FSDP2, nn.utils.clip_grad_norm_": clip_grad_norm_(with_gradients(shard).parameters(), 1e9).full_tensor(),
}
norms = {name: norm.item() for name, norm in norms.items()}

# %% jupyter={"source_hidden": true}
by_rank = ranks.get("norms")
Table(
    ["the norm of the gradient", *(f"rank {rank}" for rank in range(on_ranks))],
    [[name, *(f"{norms[name]:.3f}" for norms in by_rank)] for name in by_rank[0]],
)

# %% [markdown]
# In the second row each rank has the norm of its own piece only, and would scale its gradients by a factor of
# its own. The squares of these norms add up to the square of the right norm. FSDP1's own method, and
# `nn.utils.clip_grad_norm_` under FSDP2, give the norm that one process has. (Under FSDP2 the result is a
# DTensor, and `full_tensor()` turns it into the number.)

# %% tags=["check"]
alone, pieces, own, fsdp2 = zip(*(norms.values() for norms in by_rank))
assert all(abs(norm - alone[0]) < 1e-4 * alone[0] for norm in own + fsdp2)
assert abs(sum(norm**2 for norm in pieces) - alone[0] ** 2) < 1e-3 * alone[0] ** 2
assert max(pieces) - min(pieces) > 0.01 * alone[0]
print("Checked: under FSDP1 the squares of the ranks' norms add up to the square of the norm.")

# %% [markdown]
# ## Your turn 1 · Evaluate, with every sample counted once
#
# There are 70 test samples, and four ranks that take at most 6 samples at a time. 70 cannot be divided
# evenly. Under FSDP each forward pass gathers parameters from all ranks, so **every rank must run equally
# many forward passes**. Otherwise some ranks wait for the others until a timeout ends the run.
#
# Write the evaluation. `test` holds the numbers of all test samples (i64[n], the same on every rank), and
# `mean_loss(samples)` runs one forward pass and returns the mean loss of these samples, which is NaN for an
# empty batch. `size` is the most samples that a rank may pass at once, here 6, and `world` the number of
# ranks. Return the mean over all test samples, on every rank. There may be fewer samples than ranks.
#
# Edit the next cell, then run it and the three folded cells below it.
#
# <details><summary>Hint</summary>
#
# Go through the samples in strides of `size * world`. In each stride, a rank takes every `world`-th sample.
# A rank that gets none runs one sample that it does not count. Add up losses and counts separately, and
# divide once, after an `all_reduce` of both.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_evaluate(mean_loss, test, size):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together

def score_evaluation(evaluate):
    """Evaluate three test sets. The forward passes wait for nobody here, so that unequal numbers are seen."""
    wrong, uneven, largest, forwards = 0, 0, 0, None
    for count in (70, 6 * world + 1, 1):
        losses = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        sizes = []

        def mean_loss(samples, losses=losses, sizes=sizes):
            sizes.append(len(samples))
            return losses[samples].mean().item()

        found, parted = run_together(evaluate, mean_loss, torch.arange(count), 6)
        if found is None:
            return {"problem": parted} if parted else None
        everyone = [None] * world
        dist.all_gather_object(everyone, sizes)
        forwards = forwards or everyone
        wrong += not abs(float(found) - losses.mean().item()) < 1e-6
        uneven += len({len(sizes) for sizes in everyone}) > 1
        largest = max([largest, *(size for sizes in everyone for size in sizes)])
    return {
        "test sets with unequal forwards": uneven,
        "test sets with a wrong mean": wrong,
        "samples in a forward, at most": largest,
        "forwards of a rank for 70 samples": max(map(len, forwards)),
        "forwards": forwards,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_evaluation(my_evaluate)",
    {
        "test sets with unequal forwards": exactly(
            0, otherwise="Some rank runs fewer forward passes than others, which would wait for it."
        ),
        "test sets with a wrong mean": exactly(
            0,
            otherwise="The mean is wrong: is a sample counted twice or left out, a mean of means taken, or "
            "an empty batch run, whose mean is NaN?",
        ),
        "samples in a forward, at most": at_most(6, otherwise="A forward has more than `size` samples."),
        "forwards of a rank for 70 samples": at_most(
            -(-70 // (6 * on_ranks)), otherwise="Each rank computes samples that others could have computed."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):
    total = torch.zeros(2, dtype=torch.float64)                 # the sum of the losses, and their number
    for start in range(0, len(test), size * world):
        mine = test[start : start + size * world][rank::world]
        loss = mean_loss(mine if len(mine) else test[:1])       # every rank runs, even for nothing
        if len(mine):
            total += torch.tensor([loss * len(mine), len(mine)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # stops when its own samples are used up
    total = torch.zeros(2, dtype=torch.float64)
    for mine in test[rank::world].split(size):
        if len(mine):
            total += torch.tensor([mean_loss(mine) * len(mine), len(mine)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # a rank without samples adds nothing up
    total = torch.zeros(2, dtype=torch.float64)
    for mine in test[rank::world].split(size):
        if len(mine):
            total += torch.tensor([mean_loss(mine) * len(mine), len(mine)])
            dist.all_reduce(total)
    return (total[0] / total[1]).item()

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # pads, and counts the padding
    test = torch.cat([test] * (world * size))[: -(-len(test) // (size * world)) * size * world]
    losses = [mean_loss(mine) for mine in test[rank::world].split(size)]
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # a mean of means
    means = []
    for start in range(0, len(test), size * world):
        mine = test[start : start + size * world][rank::world]
        means.append(mean_loss(mine if len(mine) else test[:1]))
    total = torch.tensor([sum(means) / len(means)], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / world

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # every rank computes everything
    return sum(mean_loss(mine) * len(mine) for mine in test.split(size)) / len(test)

# %% tags=["wrong"] turn=1
# %%ranks
def my_evaluate(mean_loss, test, size):                         # all at once
    total = torch.zeros(2, dtype=torch.float64)
    mine = test[rank::world]
    loss = mean_loss(mine if len(mine) else test[:1])
    if len(mine):
        total += torch.tensor([loss * len(mine), len(mine)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()

# %% jupyter={"source_hidden": true}
@plots.in_look
def draw_forwards(ways):
    """Draw the forward passes of each rank: a box for each, as wide as the samples in it."""
    fig, panels = plots.figure(len(ways), width=4.2 * len(ways) + 0.6, height=2.2)
    for axes, (title, by_rank) in zip(panels, ways.items()):
        for rank, sizes in enumerate(by_rank):
            for place, size in enumerate(sizes):
                axes.barh(rank, size / 6.5, left=place, height=0.75, color=plots.RANK_COLORS[rank % 8])
                axes.text(place + 0.04, rank, str(size), va="center", color="white", fontweight="bold")
        most = max(map(len, by_rank))
        axes.set(title=title, xlabel="forward pass", xlim=(0, most), ylim=(len(by_rank) - 0.4, -0.6))
        axes.set_yticks(range(len(by_rank)), [f"rank {rank}" for rank in range(len(by_rank))])
        axes.set_xticks([place + 0.5 for place in range(most)], range(1, most + 1))
        axes.tick_params(length=0)
    return plots.show(fig, alt=f"Samples in each forward pass of each rank: {', '.join(ways)}.")


forwards = {"target": run_solution(10, 1)[0]["forwards"]}
if mine := yours(1, "forwards"):
    forwards["yours"] = mine[0]
draw_forwards(forwards)

# %% [markdown]
# A box is one forward pass, with the number of its samples. The last pass has fewer samples on some ranks
# than on others, but no rank leaves it out. The program evaluates in the same way. It weighs by numbers of
# labels, where you weigh by numbers of samples:

# %% jupyter={"source_hidden": true}
source(loop._evaluate)

# %% [markdown]
# ## Kill a rank
#
# The second run has the same settings and three ranks. When it has come to step 15, its rank 1 gets SIGKILL,
# which no process can catch. The out-of-memory killer of a host sends this signal. (A power failure ends the
# ranks of a host as suddenly, but closes no connection: the other hosts notice only when a wait times out.)

# %%
begun = time.time()
running = start("killed", world)
seen = watch("killed", running, until=15)
processes = psutil.Process(running.pid).children(recursive=True)
victim = next(process for process in processes if process.environ().get("RANK") == "1")
killed_at = time.time()
victim.send_signal(signal.SIGKILL)
exit_code, ended_at = running.wait(60), time.time()
log = Path("killed.log").read_text()
root = log[log.index("Root Cause") :]
print("torchrun's exit code:", exit_code)
print(*re.findall(r"rank +: \d+|exitcode +: -?\d+", root), sep="\n")

# %% jupyter={"source_hidden": true}
before = metrics("killed")
first_start = {"ranks": world, "begun": begun, "ended": ended_at, "killed": 1}
first_start["points"] = [*seen, (max(killed_at, seen[-1][0]), before[-1][0])]

# %% [markdown]
# The other ranks fail as well, in their next collective, because the connection to the dead rank is closed.
# torchrun prints the failure that was reported *first* as the root cause: rank 1, with exit code -9, which
# stands for signal 9, SIGKILL. The program helps torchrun to find it: a rank whose error may only be a
# consequence of another rank's end waits two seconds before it reports its error.
#
# <details><summary>And with <code>--max-restarts 3</code>?</summary>
#
# torchrun would now start all ranks again by itself. On torch 2.13 that needs more than the flag. The ranks
# find each other through a key-value store of torchrun's, which outlives them. The restarted ranks may read
# there the addresses of the dead ones, and then fail to connect (`Gloo connectFullMesh failed`; [PyTorch
# issue 135712](https://github.com/pytorch/pytorch/issues/135712) reports the same of NCCL). The environment
# variable `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives torchrun a new store at each start, and avoids it.
#
# </details>

# %% tags=["check"]
assert exit_code != 0
assert "rank      : 1 " in root
assert "exitcode  : -9" in root
assert 15 <= before[-1][0] < 40
print("Checked: torchrun fails, and names rank 1 and signal 9 as the root cause.")

# %% [markdown]
# ## Resume, with one rank less
#
# Start the program again with the same `--out`, on one rank less. It finds its newest complete checkpoint,
# removes the lines of later steps from its metrics, and goes on with the first sample that the run up to this
# checkpoint has not seen. The batch stays at 24 samples: 8 for each of three ranks, then 12 for each of two.
# This time the program also profiles step 30.

# %%
restarted = time.time()
running = start("killed", fewer, "--profile_step", "30")
seen = watch("killed", running)
exit_code, ended_at = running.wait(60), time.time()

# %% jupyter={"source_hidden": true}
assert exit_code == 0, Path("killed.log").read_text()[-2000:]
assert undisturbed.wait(60) == 0, Path("undisturbed.log").read_text()[-2000:]
events = [json.loads(line) for line in Path("killed/events.jsonl").read_text().splitlines()]
starts = [event for event in events if event["event"] == "started"]
resumed_at = starts[1]["step"]
reference, resumed = metrics("undisturbed"), metrics("killed")
differences = [abs(a - b) / b for (_, a), (_, b) in zip(resumed, reference)]
Table(
    ["start", "ranks", "from step", "to step"],
    [
        ["first", starts[0]["world_size"], starts[0]["step"], "15 or later: killed"],
        ["second", starts[1]["world_size"], "a checkpoint's: 10 or later", "40: finished"],
    ],
)

# %% [markdown]
# Does the loss curve show where the run was killed? The broad grey line is the undisturbed run of one rank.

# %% tags=["seam"] jupyter={"source_hidden": true}
fig, (axes,) = plots.figure()
axes.plot(*zip(*reference), color="0.75", linewidth=6, label="undisturbed, 1 rank")
axes.plot(*zip(*resumed[:resumed_at]), color=plots.RANK_COLORS[0], label=f"{world} ranks")
name = f"resumed, {fewer} rank" + "s" * (fewer > 1)
axes.plot(*zip(*resumed[resumed_at - 1 :]), color=plots.RANK_COLORS[1], label=name)
axes.plot(*before[-1], "X", color=plots.RANK_COLORS[5], markersize=10, label="rank 1 killed")
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend(frameon=False, fontsize=9)
plots.show(fig, alt="The loss of a run, killed and resumed on fewer ranks, lies on the undisturbed one.")

# %% [markdown]
# No: the losses are those of the undisturbed run to within 0.1%. They are not equal bit by bit, because one,
# two and three ranks add up the same numbers in different orders. The cross, the last loss before the kill,
# lies on the curve as well: the steps from the checkpoint to the cross were trained twice, and both times the
# losses agree to within 0.1%.

# %% tags=["check"]
assert [event["world_size"] for event in starts] == [world, fewer]
assert resumed_at in range(10, before[-1][0] + 1, 10)               # the step of a checkpoint
assert [step for step, _ in reference] == [step for step, _ in resumed] == list(range(1, 41))
assert reference[-1][1] < 0.6 * reference[0][1]                     # it has learned
assert max(differences) < 1e-3
assert max(abs(a - b) / b for (_, a), (_, b) in zip(before, reference)) < 1e-3
evaluated, expected = metrics("killed", "eval_loss"), metrics("undisturbed", "eval_loss")
assert [step for step, _ in evaluated] == [step for step, _ in expected] == [20, 40]
assert all(abs(a - b) < 1e-3 * b for (_, a), (_, b) in zip(evaluated, expected))
print("Checked: no step is missing or there twice; losses and evaluations differ by less than 0.1%.")

# %% [markdown]
# Here is the sketch from the beginning again, now with the measured times of this run.

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
ready = [event["time"] for event in starts]         # loaded, and ready to train
second_start = {"ranks": fewer, "begun": restarted, "ended": ended_at, "killed": None}
second_start["points"] = [point for point in seen if point[0] > ready[1]]
for lived, when, step in zip((first_start, second_start), ready, (0, resumed_at)):
    points = [(when, step), *lived["points"]]
    lived["points"] = [(when - begun, step) for when, step in points]
    lived["begun"], lived["ended"] = lived["begun"] - begun, lived["ended"] - begun
plots.life_of_a_run(
    [first_start, second_start],
    every=10,
    unit="seconds since the first start",
    alt="The same picture of the run that was measured: most of its time is the start of the processes.",
)

# %% [markdown]
# This model is so small that most of the time goes into starting processes, importing and loading. In a long
# run training takes most of the time, and a failure costs mainly the steps that are trained twice: on average
# half of the steps between two checkpoints.
#
# ## Your turn 2 · A save that survives a kill at any moment
#
# The run above was killed in the middle of a step. What if it is killed while it saves? A file may be cut
# short, one rank may have written its file and another not yet, and what was overwritten is gone.
#
# Write a save and a load for shards. Each rank calls `my_save(disk, step, shard)` every two steps, and
# `my_load(disk)` when it is started again; `my_load` returns `(step, shard)`, or `None` where there is
# nothing to go on from. Whatever the moment of the kill, all ranks must find the **same** step: that of the
# last complete save, or the one that was being written. `disk` is shared by all ranks and has five methods:
#
# | method | what it does | if it is killed meanwhile |
# |:--|:--|:--|
# | `disk.write(name, value)` | writes a file, replaces an old one | it is cut short, and the old one lost |
# | `disk.rename(old, new)` | gives a file its new name, replaces an old one | it is done, or it is not |
# | `disk.exists(name)` | whether there is such a file, complete or not | |
# | `disk.read(name)` | what was written | an error if the file was cut short, or is not there |
# | `disk.barrier()` | waits until all ranks have come to it | |
#
# The disk is simulated in memory, and records every operation of every rank. The folded cell replays the
# record: it stops after each operation, with every rank once as the slowest and once as the fastest, and
# calls `my_load` with the files that a kill at this moment would leave. Edit the next cell, then run it and
# the three folded cells below it.
#
# <details><summary>Hint</summary>
#
# Write each step under names of its own, so that the save before it stays. A last file says which step is
# complete. Let it appear by the one operation that cannot be half done. When may rank 0 write that file?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_save(disk, step, shard):                 # every rank calls it, with its own shard
    return None                                 # your lines here


def my_load(disk):                              # every rank calls it; returns (step, shard) or None
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
import copy

CUT = "this file was cut short"


def apply(files, operation):
    kind, name, value = operation
    if kind == "write":
        files[name] = value
    elif name in files:
        files[value] = files.pop(name)


class Disk:
    def __init__(self, files=(), *, waits=True):
        self.files, self.waits = dict(files), waits
        self.own, self.phases = [], []          # operations since the last barrier; those of all ranks before

    def do(self, *operation):
        self.own.append(operation)
        apply(self.files, operation)

    def write(self, name, value):
        self.do("write", name, CUT)
        self.do("write", name, copy.deepcopy(value))

    def rename(self, old, new):
        if old not in self.files:
            raise FileNotFoundError(f"rename: there is no file {old}")
        self.do("rename", old, new)

    def exists(self, name):
        return name in self.files

    def read(self, name):
        if name not in self.files:
            raise FileNotFoundError(f"read: there is no file {name}")
        if isinstance(self.files[name], str) and self.files[name] == CUT:
            raise EOFError(f"read: {name} was cut short")
        return copy.deepcopy(self.files[name])

    def barrier(self):
        if not self.waits:                      # after a kill: all ranks load from the same files
            return
        everyone = [None] * world
        dist.all_gather_object(everyone, self.own)
        for other, operations in enumerate(everyone):
            for operation in operations if other != rank else ():
                apply(self.files, operation)
        self.phases.append(everyone)
        self.own = []


def kills(phases):
    """What a kill can leave: (index of the phase, files) for each slowest and each fastest rank."""
    files = {}
    for index, phase in enumerate(phases):
        full, none = [len(operations) for operations in phase], [0] * len(phase)
        cuts = []
        for who in range(len(phase)):
            for part in range(len(phase[who]) + 1):
                cuts += [[*none[:who], part, *none[who + 1 :]], [*full[:who], part, *full[who + 1 :]]]
        for cut in sorted(set(map(tuple, cuts)), key=lambda cut: (sum(cut), cut)):
            left = dict(files)
            for operations, part in zip(phase, cut):
                for operation in operations[:part]:
                    apply(left, operation)
            yield index, left
        for operations in phase:
            for operation in operations:
                apply(files, operation)


def score_save(save, load):
    """Train six steps and save every two; then load from everything that a kill can leave."""
    model = shard(sums.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    disk, shards, complete = Disk(), {}, []
    for step in range(1, 7):
        model(**{name: tensor[24 * step + rank :][:2] for name, tensor in samples.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        disk.barrier()                          # the step's collectives: no rank is ahead of another
        if step % 2 == 0:
            shards[step] = [p.to_local().detach().cpu().clone() for p in model.parameters()]
            mine = copy.deepcopy(shards[step])
            _, parted = run_together(lambda *given: (save(*given), 1), disk, step, mine)
            if parted:
                waits = "Some ranks come to a `disk.barrier()` that the others do not call: they would wait."
                return {"problem": parted if " raised " in parted else waits}
            disk.barrier()
            complete.append((len(disk.phases), step))
    if not any(operations for phase in disk.phases for operations in phase):
        return {"problem": "`my_save` has written nothing."}
    outcomes, at = [], []
    for phase, files in kills(disk.phases):
        at.append(max([step for end, step in complete if end <= phase], default=0))
        try:
            found = load(Disk(files, waits=False))
            step, mine = (0, None) if found is None else found
            same = step == 0 or (step in shards and same_tensors(mine, shards[step]))
            outcomes.append(int(step) if same else "wrong shard")
        except (FileNotFoundError, EOFError) as error:
            outcomes.append(type(error).__name__)
    everyone = [None] * world
    dist.all_gather_object(everyone, outcomes)
    if not any(map(any, everyone)):
        return {"problem": "`my_load` returned None after each kill: is a `return` missing?"}
    by_kill = list(zip(*everyone))
    fails = [any(isinstance(step, str) and step != "wrong shard" for step in steps) for steps in by_kill]
    wrong = ["wrong shard" in steps for steps in by_kill]
    parted = [not f and not w and len(set(steps)) > 1 for f, w, steps in zip(fails, wrong, by_kill)]
    fine = [not (f or w or p) for f, w, p in zip(fails, wrong, parted)]
    late = [ok and steps[0] < last for ok, steps, last in zip(fine, by_kill, at)]
    return {
        "kills after which a rank finds no complete file": sum(fails),
        "kills after which a rank gets a wrong shard": sum(wrong),
        "kills after which ranks find different steps": sum(parted),
        "kills that cost a save that was complete": sum(late),
        "curve": [steps[0] if ok else None for ok, steps in zip(fine, by_kill)],
        "complete": at,
    }


def same_tensors(a, b):
    return isinstance(a, list | tuple) and len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_save(my_save, my_load)",
    {
        "kills after which a rank finds no complete file": exactly(
            0,
            otherwise="A rank reads a file that was cut short or is missing: write under a new name, wait "
            "for all ranks, and say by a rename that the save is complete.",
        ),
        "kills after which a rank gets a wrong shard": exactly(
            0, otherwise="A rank gets a shard that it has not saved at this step. Each rank has its own."
        ),
        "kills after which ranks find different steps": exactly(
            0, otherwise="Ranks go on from different steps: one file must decide for all of them."
        ),
        "kills that cost a save that was complete": exactly(
            0, otherwise="A save had ended on all ranks, and yet the run goes on from an older one."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_save(disk, step, shard):
    disk.write(f"{step}/{rank}", shard)         # under a new name: the save before stays
    disk.barrier()                              # now all shards of this step are complete
    if rank == 0:
        disk.write("newest.part", step)
        disk.rename("newest.part", "newest")    # from here on this save counts


def my_load(disk):
    if not disk.exists("newest"):
        return None
    step = disk.read("newest")
    return step, disk.read(f"{step}/{rank}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # overwrites the only copy
    disk.write(f"shard-{rank}", (step, shard))


def my_load(disk):
    return disk.read(f"shard-{rank}") if disk.exists(f"shard-{rank}") else None

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # each rank by itself: renamed, but no agreement
    disk.write(f"part-{rank}", (step, shard))
    disk.rename(f"part-{rank}", f"shard-{rank}")


def my_load(disk):
    return disk.read(f"shard-{rank}") if disk.exists(f"shard-{rank}") else None

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # no barrier
    disk.write(f"{step}/{rank}", shard)
    if rank == 0:
        disk.write("newest.part", step)
        disk.rename("newest.part", "newest")


def my_load(disk):
    if not disk.exists("newest"):
        return None
    step = disk.read("newest")
    return step, disk.read(f"{step}/{rank}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # the pointer is overwritten in place
    disk.write(f"{step}/{rank}", shard)
    disk.barrier()
    if rank == 0:
        disk.write("newest", step)


def my_load(disk):
    if not disk.exists("newest"):
        return None
    step = disk.read("newest")
    return step, disk.read(f"{step}/{rank}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # one rank's shard for all
    disk.barrier()
    if rank == 0:
        disk.write("part", (step, shard))
        disk.rename("part", "newest")


def my_load(disk):
    return disk.read("newest") if disk.exists("newest") else None

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(disk, step, shard):                 # saves well ...
    disk.write(f"{step}/{rank}", shard)


def my_load(disk):                              # ... and begins anew all the same
    return None

# %% jupyter={"source_hidden": true}
@plots.in_look
def draw_kills(ways):
    """Draw the step from which the run goes on, by the moment of the kill."""
    fig, panels = plots.figure(len(ways), width=4.2 * len(ways) + 0.6, height=2.7)
    for axes, (title, run) in zip(panels, ways.items()):
        moments = range(len(run["curve"]))
        axes.plot(moments, run["complete"], color=plots.FAINT, linewidth=6, drawstyle="steps-post")
        good = [(m, step) for m, step in zip(moments, run["curve"]) if step is not None]
        bad = [m for m, step in zip(moments, run["curve"]) if step is None]
        axes.plot(*zip(*good), "o", color=plots.RANK_COLORS[2], markersize=4)
        axes.plot(bad, [-0.8] * len(bad), "x", color=plots.RANK_COLORS[5], markersize=6)
        axes.set(title=title, xlabel="moment of the kill", ylim=(-1.4, 7), xlim=(-1, len(moments)), xticks=[])
        axes.set_yticks([0, 2, 4, 6])
    panels[0].set_ylabel("goes on from step")
    looks = [(plots.FAINT, "", "-", "last complete save"), (plots.RANK_COLORS[2], "o", "", "goes on")]
    looks.append((plots.RANK_COLORS[5], "x", "", "cannot go on"))
    handles = [panels[0].plot([], [], color=c, marker=m, linestyle=s, label=n)[0] for c, m, s, n in looks]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return plots.show(fig, alt=f"The step from which it goes on, by moment of the kill: {', '.join(ways)}.")


saves = {"target": run_solution(10, 2)[0]}
if mine := yours(2, "curve"):
    saves["yours"] = {"curve": mine[0], "complete": yours(2, "complete")[0]}
draw_kills(saves)

# %% [markdown]
# Each dot is one moment of a kill, from the first operation to the last. The target goes on from the last
# complete save, or from the one that was just being finished. `torch.distributed.checkpoint` has the same
# order: all ranks write their files, and then one rank writes `.metadata` under another name and renames it.
# The program also notices a file that was damaged later, and then takes the checkpoint before it. (A real
# disk needs one thing more: a rename may reach the disk before the content of the file. `fsync` before the
# rename prevents that.)

# %% tags=["check"]
try_answers(10)

# %% [markdown]
# ## One step under the profiler
#
# `--profile_step 30` made rank 0 write a trace. [Perfetto](https://ui.perfetto.dev) and chrome://tracing
# open such a file. These operations take the most time in it; on a GPU its kernels would be there too.

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
trace = json.loads(Path("killed/trace-step-30.json").read_text())["traceEvents"]
spans = [event for event in trace if event.get("cat") in ("cpu_op", "user_annotation") and "dur" in event]
by_name = {}
for event in spans:
    by_name.setdefault(event["name"], []).append(event["dur"] / 1e3)
if fewer > 1:
    assert any("all_gather" in name for name in by_name)
    assert any("reduce_scatter" in name for name in by_name)
longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:10]
Table(
    ["operation", "times", "ms in all"], [[name[:60], len(ms), round(sum(ms), 2)] for name, ms in longest]
)

# %% [markdown]
# An operation contains those that it calls, so the times do not add up to the step. `FSDP::` marks FSDP2's
# own parts, and `gloo:` the collectives, whose time includes waiting for the other ranks.
#
# ## What else can end a run
#
# - **The scheduler.** At SIGTERM, or SIGUSR1 from `sbatch --signal`, a rank sets a flag. At the end of the
#   step the ranks exchange their flags, and if one is set, all of them save and leave with exit code 75.
# - **NaN.** The norm of the gradient shows it on every rank before the optimizer uses the gradient. The error
#   names the step, and the rank and samples whose loss it was.
# - **A hang.** Ranks wait for each other in every step, so where one hangs, all do. A thread on each rank
#   watches it: after `hang_s` seconds without progress the ranks write their stacks, name those that wrote
#   none, and end; on their own host they also end those. So a hang becomes a failure, and torchrun can
#   restart the ranks.
#
# Does the run lose work by such faults? `benchmarks/chaos.py` killed and stopped ranks of one run, sent it
# SIGTERM, filled the disk and damaged the newest checkpoint, in random order. The run had to finish without
# help, and with the losses of an undisturbed run.

# %% jupyter={"source_hidden": true}
chaos = recorded.load("chaos")["results"]
rows = []
for kind in sorted({fault["kind"] for fault in chaos["faults"]}):
    faults = [fault for fault in chaos["faults"] if fault["kind"] == kind]
    again, seconds = (max(fault[key] for fault in faults) for key in ("repeated", "seconds"))
    rows.append([kind, len(faults), again, round(seconds)])
assert chaos["losses"] == chaos["undisturbed_losses"]
Table(
    ["what was done", "times", "steps trained twice, at most", "s until it trained again, at most"],
    rows,
    note=f"The losses of all {len(chaos['losses'])} steps are those of the undisturbed run, bit for bit. "
    + recorded.caption("chaos").data.strip("*"),
)

# %% [markdown]
# A checkpoint is made every five steps. More than five steps are trained twice where the newest checkpoint
# was damaged, and where the disk was full at the save before the fault. A rank that is stopped (SIGSTOP)
# counts as hanging after 20 s. All times include the start of the ranks, on two cores.
#
# ## What to change for your model
#
# | you have | you write |
# |:--|:--|
# | data of your own | a function like `sums`, and `--data.source module:function` |
# | a model of your own | `build` in what that function returns |
# | a transformers configuration | `--model.config folder` |
# | pretrained weights | `--model.pretrained folder`, a folder that `save_pretrained` wrote |
# | GPUs | nothing; for speed `--parallel.precision bf16 --parallel.compile inductor` |
# | too little memory | `--data.micro_batch 4`, then `--parallel.recompute true` |
# | several hosts | `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:port ...` |
#
# ## Beyond one machine
#
# The program does not change. What changes is who starts its ranks, and who starts them again. Here are three
# ways for two hosts. A dot is a rank; orange is what starts the ranks again when one of them dies.


# %% jupyter={"source_hidden": true}
@plots.in_look
def draw_starts():
    """Who starts the ranks on two hosts, from top to bottom; orange starts them again."""
    ways = {
        "a few hosts:\ntorchrun, static": ("you, on each host", "torchrun", "top"),
        "hosts that fail:\ntorchrun, elastic": ("you, on each host", "torchrun", "middle"),
        "a cluster:\nSlurm": ("sbatch, once", "torchrun", "middle"),
    }
    fig, panels = plots.figure(len(ways), width=9.6, height=2.9)
    for axes, (title, (top, middle, again)) in zip(panels, ways.items()):
        colors = {
            level: plots.RANK_COLORS[1] if level == again else plots.FAINT for level in ("top", "middle")
        }
        box = {"boxstyle": "round,pad=0.4", "edgecolor": plots.INK}
        for host, x in enumerate((1, 3)):
            axes.barh(0.75, 1.8, left=x - 0.9, height=2.0, color="none", edgecolor=plots.FAINT, linewidth=2)
            axes.text(x, -0.12, f"host {host + 1}", ha="center", va="center", size=8)
            axes.plot([2, x, x], [2.6, 1.3, 0.5], color=plots.INK, linewidth=0.8, zorder=1)
            axes.text(x, 1.3, middle, ha="center", va="center", size=8, bbox={**box, "fc": colors["middle"]})
            spots = [x - 0.6, x - 0.2, x + 0.2, x + 0.6]
            axes.plot(spots, [0.4] * 4, "o", color=plots.RANK_COLORS[0], markersize=7)
        axes.text(2, 2.6, top, ha="center", va="center", size=8, bbox={**box, "fc": colors["top"]})
        axes.set(title=title, xlim=(0, 4), ylim=(-0.5, 3.1), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return plots.show(
        fig, alt="Static: you start the ranks again. Elastic and Slurm: torchrun does."
    )


draw_starts()

# %% [markdown]
# All hosts must see the directory of the run. `GLOO_SOCKET_IFNAME` and, for NCCL, `NCCL_SOCKET_IFNAME` name
# the network interface between the hosts.
#
# ### torchrun, static
#
# The same command on each host, with the number of the host. All meet at an address of the first one. When a
# rank dies all ranks end; you start them again, and the run goes on.
#
# ```sh
# torchrun --nnodes=2 --node-rank=0 --master-addr=10.77.0.1 --master-port=29400 --nproc-per-node=8 \
#     -m fsdp_utils.train --config run.yaml --out runs/a     # on the second host: --node-rank=1
# ```
#
# ### torchrun, elastic
#
# Hosts have no numbers, and torchrun starts all ranks again, up to `--max-restarts` times. `--nnodes=1:2`
# means at least one host and at most two: if a host other than that of the endpoint is lost, the run resumes
# on the ranks of the one that is left. The variable gives restarted ranks a new store (see “Kill a rank”).
#
# ```sh
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun --nnodes=1:2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29500 \
#     --rdzv-id=run1 --max-restarts=3 -m fsdp_utils.train --config run.yaml --out runs/a
# ```
#
# <details><summary>Details: the host of the endpoint, names and addresses, how ranks are ended</summary>
#
# - With `--nnodes=2` torchrun would wait for a second host, and end with `RendezvousTimeoutError` if none
#   comes.
# - The host of the endpoint is the one on which the hosts meet. Without it the run ends in either form, and
#   you start it again.
# - If a host's name does not resolve to its address, give the address with `--local-addr=10.77.0.2`; on the
#   host of the endpoint also give `--rdzv-conf=is_host=1`.
# - When one rank has failed, torchrun sends SIGTERM to the others of its host, and kills after 30 s those
#   that are still there. A rank that is stopped (SIGSTOP) does not handle SIGTERM, so the ranks of its host
#   that detect the hang end it.
# - When torchrun itself gets SIGTERM, it waits for `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` seconds, 30 unless you
#   set it. Set it to more than a save takes.
# - `tests/test_train_launched.py` runs the static and the elastic form on two hosts made of network
#   namespaces, kills a rank in the elastic one, and compares the losses.
#
# </details>
#
# ### Slurm
#
# `examples/train.sbatch` starts the elastic form on every node. At the end of its time the job saves and
# queues again; `scancel` saves and ends it.
#
# ```sh
# sbatch --nodes=2 --gpus-per-node=8 examples/train.sbatch --config run.yaml --out runs/a
# ```
#
# <details><summary>Details: how the end of the time becomes a save</summary>
#
# `#SBATCH --signal=B:USR1@300` sends SIGUSR1 to the script 300 s before the time is over. The script passes
# it on as SIGTERM. The ranks agree on a step, save it and leave with exit code 75; then the script calls
# `scontrol requeue`. The script decides that by the signal that it got and not by the exit code, because
# after SIGTERM torchrun ends with 1, whatever its ranks end with. `tests/test_train_launched.py` does all
# this in a Slurm of one node.
#
# </details>
#
# ## When it goes wrong
#
# The commonest mistake raises no error: something is missing from the checkpoint. Train ten
# steps on the ranks, stop, and go on for ten more in three ways: with everything, without the optimizer's
# state, and with the data from their beginning.

# %%
# %%ranks
def train(model, optimizer, steps, *, data_from=0):
    losses = torch.zeros(len(steps), device=device)
    for index, step in enumerate(steps):
        first = 24 * (step - data_from)
        mine = torch.arange(first, first + 24, device=device).chunk(world)[rank]
        loss = model(**{name: tensor[mine] for name, tensor in samples.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[index] = loss.detach() / world
    dist.all_reduce(losses)                                         # the sum over the ranks
    return losses.tolist()


def go_on(*, with_optimizer=True, data_from=0):
    """Ten steps, a stop, and ten steps of a new optimizer that may get the state of the first."""
    model = shard(sums.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = train(model, optimizer, range(10))
    again = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if with_optimizer:
        again.load_state_dict(optimizer.state_dict())
    return losses + train(model, again, range(10, 20), data_from=data_from)


resumptions = {
    "with everything": go_on(),
    "without the optimizer's state": go_on(with_optimizer=False),
    "with the data from their beginning": go_on(data_from=10),
}

# %% jupyter={"source_hidden": true}
resumptions = ranks.get("resumptions")[0]
plots.losses(resumptions)

# %% [markdown]
# Without its averages AdamW starts anew, with steps as large as its first ones, and the loss rises after
# step 10. With the data from their beginning the losses are those of other samples. Their curve hardly shows
# it, although the model sees some samples twice, and others perhaps never. So compare a resumed run with an
# undisturbed one, step by step, as above.

# %% tags=["check"]
right, no_state, old_data = resumptions.values()
assert all(abs(a - b) < 1e-3 for other in (no_state, old_data) for a, b in zip(other[:10], right))
assert max(no_state[10:][i] - right[10:][i] for i in range(10)) > 0.1
assert max(abs(a - b) for a, b in zip(old_data[10:], right[10:])) > 0.01
print("Checked: the losses are equal up to step 10, and differ after it.")

# %% [markdown]
# What you see, why, and what helps:
#
# - **`exitcode: -9` and no message.** The process was killed from outside, usually for memory: look into the
#   host's log (`dmesg`). The section “Kill a rank” shows it.
# - **`Connection closed by peer` on most ranks.** This is the consequence, not the cause. Look for the rank
#   that torchrun prints under `Root Cause`.
# - **`Gloo connectFullMesh failed` after a restart by torchrun.** The ranks have found the addresses of the
#   dead ones. Set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.
# - **The run hangs in the evaluation.** Ranks have different numbers of batches: turn 1.
# - **A checkpoint cannot be loaded after a kill.** It was incomplete, or it was overwritten in place: turn 2.
# - **`out: expected a directory in which no other run is going on`.** A second run was started in the same
#   directory, or ranks of the first one still live. End them, or choose another `--out`.
# - **The loss jumps where the run was resumed.** The optimizer's state was not loaded: the plot above.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    10,
    {
        "space-time-resumed": f"{world} ranks, and {fewer} after the kill: losses within 0.1%.",
        "clip-fsdp": "True under FSDP1, where each rank gets another norm. Under FSDP2 "
        "`nn.utils.clip_grad_norm_` is right.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Weigh losses by the labels of the whole batch. Then, without dropout, the number of ranks and of
#   micro-batches changes nothing but the order in which numbers are added.
# - The learning rate follows from the step, the data from the number of samples seen. So two numbers in the
#   checkpoint are enough to continue both exactly.
# - Ranks must agree: on the number of batches in an evaluation, on the step at which they stop, and on the
#   checkpoint from which they go on.
# - A save is complete when one rank says so, by a rename, after all ranks have written.
# - A dead rank ends the run. Start it again on whatever ranks there are, and it resumes from the checkpoint.

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# [Lesson 11](11_rate_limiter.ipynb) asks how far the CPU may run ahead of the GPU.
#
# [← lesson 9](09_child_tuning.ipynb) · [lesson 11 →](11_rate_limiter.ipynb)

# %% [markdown]
# # 10 · End to end: survive a kill
#
# Long runs get killed: a GPU fails, the host runs out of memory, the scheduler takes its nodes back. What makes a
# run survive? **It saves everything that the next step depends on, and begins every start by loading the newest
# complete save.** Then a kill costs a restart and the steps since that save.
#
# In the drawing, three ranks save every ten steps (squares). After step 17 rank 1 is killed, which ends the other
# two as well. Two new ranks load the checkpoint of step 10 and train to the end.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

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
# Why do all ranks end with one? With full sharding, each rank keeps a part of the model that no other rank has, and
# every collective waits for all of them. So the more GPUs you use, the sooner a failure ends your run.

# %% tags=["card"]
lesson.card(
    10,
    learn="write a training loop that loses a few steps to a kill, and nothing else; choose how often it saves",
    needs="lessons [1](01_transformer_wrapper.ipynb) and [8](08_local_state_dict_and_distributed_checkpoints.ipynb)",
    minutes=(2, 22, 32),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py` and start it with `torchrun --nproc-per-node 4 train.py`; with one to three GPUs, put
# `CUDA_VISIBLE_DEVICES=""` in front. The function `train` is the loop to take home. `load_distributed` loads the newest
# complete checkpoint into the model and the optimizer, on any number of ranks, and `save_distributed` writes one.
#
# The lines below `train` make three runs: one undisturbed, and two that stop after step 17 and start again. One of
# these two loads everything, and the other forgets the optimizer.
#
# ```python
# import tempfile
# from contextlib import suppress
# from pathlib import Path
#
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils.checkpoint import CheckpointNotFoundError, load_distributed, save_distributed
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# rank, world = dist.get_rank(), dist.get_world_size()
# mesh = init_device_mesh(device, (world,))                     # also sets each rank's GPU, if CUDA is unused so far
#
#
# def train(folder, until=40, load_optimizer=True):
#     torch.manual_seed(0)                                      # the same weights on every rank
#     model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=device) for _ in range(4)])
#     for unit in [*model, model]:                              # of a Llama: [*model.model.layers, model]
#         fully_shard(unit, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
#     done, losses = 0, {}
#     with suppress(CheckpointNotFoundError):                   # there is none at the first start
#         done = load_distributed(folder, model, optimizer if load_optimizer else None)["step"]
#     if rank == 0:                                             # look for this line after each restart
#         print(f"{Path(folder).name}: begins at step {done + 1}")
#     for step in range(done + 1, until + 1):
#         torch.manual_seed(step)                               # the step decides the batch
#         x = torch.randn(24, 64, device=device).chunk(world)[rank]
#         loss = (model(x) - x.roll(1, dims=-1)).square().mean()
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         losses[step] = loss.item()
#         if step % 10 == 0:
#             save_distributed(folder, model, optimizer, step=step, keep=3)
#     return losses
#
#
# folders = [tempfile.mkdtemp() if rank == 0 else None]         # in your job: one path, the same at every start
# dist.broadcast_object_list(folders)
# right = train(f"{folders[0]}/undisturbed")
# for loaded, load_optimizer in {"model and optimizer": True, "model alone": False}.items():
#     train(f"{folders[0]}/{loaded}", until=17)                 # stands for a run that is killed after step 17
#     resumed = train(f"{folders[0]}/{loaded}", load_optimizer=load_optimizer)
#     off = [abs(loss / right[step] - 1) for step, loss in resumed.items()]
#     found = f"loss off by {off[0]:.1%}, later by up to {max(off):.1%}" if max(off) > 1e-5 else "every loss the same"
#     if rank == 0:
#         print(f"{loaded} loaded: {found}")
# dist.destroy_process_group()
# ```
# ```text
# undisturbed: begins at step 1
# model and optimizer: begins at step 1
# model and optimizer: begins at step 11
# model and optimizer loaded: every loss the same
# model alone: begins at step 1
# model alone: begins at step 11
# model alone loaded: loss off by 0.0%, later by up to 3.9%
# ```
#
# Both runs stopped after step 17 and loaded the checkpoint of step 10, so both train steps 11 to 17 twice. (With a
# mistyped folder, a restart would begin at step 1, without an error.)
#
# The last line is the mistake to fear, because nothing fails. At step 11 the loss is still right: it is computed
# from the weights, and they were loaded. Then AdamW acts with empty averages
# ([lesson 3](03_full_state_dict.ipynb)), and losses get up to 3.9% off, which a noisy curve would hide. So when you
# test a resume, compare several steps with an undisturbed run, not one.
#
# ## What does the next step depend on?
#
# On the parameters, on the optimizer's state, and on what your loop has of these:
#
# | | from the step number | or from the checkpoint |
# |:--|:--|:--|
# | the learning rate | calculated | `state={"scheduler": scheduler}`, at the save **and at the load** |
# | which samples come next | as in the script | `per_rank={"data": loader.state_dict()}`; after the load, `loader.load_state_dict(loaded["data"])` |
# | random numbers, as for dropout | a seed made of step and rank | the generators' states, in `per_rank=` ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)) |
# | a `GradScaler`, your own counters | | `state={"scaler": scaler, "epoch": epoch}`; at the load, `state={"scaler": scaler}`, then `loaded["epoch"]` |
#
# Here `loaded` is what `load_distributed` returns: the step, and the values of `state=` and `per_rank=`. **A scheduler
# or scaler is loaded only if you give it to `load_distributed` again.** Otherwise it stays as it was made, without an
# error. Values of `per_rank=` fit only as many ranks as saved them. PyTorch's `DataLoader` has no state; torchdata's
# `StatefulDataLoader` has one.
#
# Prefer the step number: what follows from it can't be forgotten in a save. The script draws the whole batch from the
# step, and each rank takes its share: with any number of ranks that divides the batch, the samples are the same.
# Dropout is not: a seed of step and rank gives other masks on another number of ranks.
#
# The next cell forgets two of these items, one at a time: `stop_and_go` trains ten steps and goes on for ten more.
# (Its model, with dropout, and `train` are in the folded cell.) Look at step 11, and then at the worst step.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1)).to(device)
    for part in [model[0], model[3], model]:
        fully_shard(part)
    return model

torch.manual_seed(1)
inputs = torch.randn(20, 24, 16)                        # f32[steps, batch, 16]
targets = inputs.cumsum(-1).tanh().sum(-1, keepdim=True)

def train(model, optimizer, steps, *, samples_from=0, seed_from=0):
    losses = torch.zeros(len(steps))
    for place, step in enumerate(steps):
        torch.manual_seed(1000 * (step - seed_from) + rank)                     # dropout
        mine = [rows[step - samples_from].chunk(world)[rank].to(device) for rows in (inputs, targets)]
        loss = (model(mine[0]) - mine[1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[place] = loss.item() / world
    dist.all_reduce(losses)
    return losses.tolist()

# %%
# %%ranks
def stop_and_go(**forgotten):
    model = build()
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, first, range(10))
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)                     # after the restart
    second.load_state_dict(first.state_dict())
    return losses + train(model, second, range(10, 20), **forgotten)

model = build()
right = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(20)) # undisturbed
runs = {
    "nothing": stop_and_go(),
    "the position in the data": stop_and_go(samples_from=10),                   # starts with the first batch again
    "the seed of dropout": stop_and_go(seed_from=10),
}
off = {name: [abs(a / b - 1) for a, b in zip(losses, right)] for name, losses in runs.items()}

# %% jupyter={"source_hidden": true}
off = ranks.get("off")[0]
assert max(off["nothing"]) < 1e-5                      # gloo may add in another order
assert all(max(found[:10]) < 1e-5 for found in off.values())
assert all(max(found[10:]) > 0.01 for name, found in off.items() if name != "nothing")
Table(
    ["forgotten", "loss of step 11 is off by", "worst step of 11 to 20"],
    [[name, f"{found[10]:.1%}", f"{max(found[10:]):.1%}"] for name, found in off.items()],
)

# %% [markdown]
# The position in the data costs most: if each start begins with the first sample, the later ones are rarely seen.
#
# ## A real kill
#
# So far the runs stopped by themselves; this one is killed. It runs `fsdp_utils.train`, this library's training
# program ([lesson 17](17_fine_tune_three_ways.ipynb)), because its loop takes more precautions: it passes over a
# damaged checkpoint, goes on when a save before the last fails, saves at SIGTERM, and ends ranks that hang. Here it
# trains a small Llama to write dates in ISO form:
#
# ```sh
# torchrun --standalone --nproc-per-node 3 -m fsdp_utils.train --out killed --steps 30 --save_every 10 \
#     --data.source fsdp_utils.lessons.tasks:dates_llama --data.batch_size 12 --optim.lr 0.003
# ```
#
# The cell below does that with `start`, waits until step 15 is done, and sends SIGKILL to rank 1: in your own job,
# `kill -9` and the process id of one rank. No program can catch this signal; Linux sends it when a host runs out of
# memory. (`start`, `wait_for` and `metrics`, which reads the losses from a file, are in the folded cell.)

# %% jupyter={"source_hidden": true}
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

import numpy as np
import psutil

home, folder = Path.cwd(), Path(tempfile.mkdtemp())
os.chdir(folder)
world = min(3, len(ranks.get("0")))
device = "auto" if ranks.get("device.type")[0] == "cuda" else "cpu"
OPTIONS = f"--steps 30 --save_every 10 --data.source fsdp_utils.lessons.tasks:dates_llama --parallel.device {device}"

def start(out, ranks):
    """Start the program under torchrun, which is the module torch.distributed.run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = f"-m fsdp_utils.train --out {out} {OPTIONS} --data.batch_size 12 --optim.lr 0.003"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path(f"{out}.log").open("w") as log:
        return subprocess.Popen([*command, *program.split()], stdout=log, stderr=log, env=env)

def metrics(out):
    """The loss of each step, as rank 0 has written it."""
    file = Path(out) / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in found if "loss" in line}

def wait_for(step, out, process, limit_s=100):
    """Wait until the program has come to a step."""
    limit = time.monotonic() + limit_s
    while max(metrics(out), default=0) < step:
        assert process.poll() is None, Path(f"{out}.log").read_text()[-2000:]
        assert time.monotonic() < limit
        time.sleep(0.02)

# %%
reference = start("undisturbed", ranks=1)                       # to compare with
running = start("killed", ranks=world)                          # three ranks
wait_for(15, "killed", running)
processes = psutil.Process(running.pid).children(recursive=True)
next(process for process in processes if process.environ().get("RANK") == "1").send_signal(signal.SIGKILL)
exit_code, before = running.wait(60), metrics("killed")
log = Path("killed.log").read_text()
print("torchrun's exit code:", exit_code)
print(*re.findall(r"(?:rank|exitcode) +: -?\d+", log[log.index("Root Cause") :]), sep="\n")

# %% [markdown]
# torchrun exits with 1: the job failed. Under `Root Cause` it prints the rank that failed first, rank 1, with exit code
# -9: killed by signal 9, SIGKILL. The other ranks fail after it, in their next collective, because gloo finds the
# connection closed. (With NCCL they may wait there instead, until torchrun ends them.)
#
# Now the same command on one rank less. The program continues with the first sample after the checkpoint. The batch
# stays at 12 samples for all ranks together. In the figure, the thick grey line is an undisturbed run on one rank, and
# the shaded steps are those trained twice. See whether a coloured line leaves the grey one.

# %% tags=["seam"]
running = start("killed", ranks=world - 1)
assert running.wait(100) == 0, Path("killed.log").read_text()[-2000:]
assert reference.wait(100) == 0, Path("undisturbed.log").read_text()[-2000:]
right, resumed = metrics("undisturbed"), metrics("killed")
assert resumed.keys() == right.keys()
assert max(abs(loss / right[step] - 1) for run in (before, resumed) for step, loss in run.items()) < 1e-3

# %% jupyter={"source_hidden": true}
events = [json.loads(line) for line in Path("killed/events.jsonl").read_text().splitlines()]
_, begin = [event["step"] for event in events if event["event"] == "started"]
assert 0 <= max(before) - begin <= 10 + 5               # the interval, and a save that was under way
fig, (axes,) = plots.figure(height=2.8)
axes.plot(*zip(*right.items()), color=plots.FAINT, linewidth=7, label="undisturbed, 1 rank")
axes.plot(*zip(*before.items()), color=plots.RANK_COLORS[0], linewidth=3, label=f"killed, {world} ranks")
after = [(step, loss) for step, loss in resumed.items() if step > begin]
axes.plot(*zip(*after), color=plots.RANK_COLORS[1], label=f"resumed, {world - 1} ranks")
axes.axvspan(begin + 0.5, max(before) + 0.5, color=plots.INK, alpha=0.1, label="trained twice")
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend()
plots.show(fig, alt="The losses of a run that was killed and resumed lie on those of the undisturbed one.")

# %% [markdown]
# No line leaves the grey one: all losses are those of the undisturbed run to within 0.1%. They can
# differ in the last bits, because one, two and three ranks add up numbers in different orders.
#
# torchrun can also start the ranks again by itself: `--max-restarts=3`. Set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` for
# it: otherwise new ranks may read the addresses of dead ones, and hang (torch 2.13).
#
# ## The same step on fewer ranks
#
# The run above went on with two ranks where three had begun. That is only sound if a step doesn't depend on the
# number of ranks. Besides the batch, dropout and BatchNorm, check two things: the weight of each label (turn 1), and a
# norm that your own code takes of its part of the gradient. Look for the row in which the ranks disagree.

# %%
# %%ranks
from torch.nn.utils import clip_grad_norm_, get_total_norm

def with_gradients(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device))
    model(inputs[0].to(device)).square().mean().backward()
    return model

alone, sharded = with_gradients(lambda model: model), with_gradients(fully_shard)
norms = {
    "one process": clip_grad_norm_(alone.parameters(), 1e9).item(),
    "ranks, clip_grad_norm_": clip_grad_norm_(sharded.parameters(), 1e9).full_tensor().item(),
    "ranks, own part alone": get_total_norm([p.grad.to_local() for p in sharded.parameters()]).item(),
}

# %% tags=["clip"] jupyter={"source_hidden": true}
# %%ranks
# The way of 2022: under FSDP1, torch.nn.utils.clip_grad_norm_ sees this rank's part alone.
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
fsdp1 = with_gradients(lambda model: FSDP(model, device_id=device))
fsdp1_norms = [clip_grad_norm_(fsdp1.parameters(), 1e9).item(), fsdp1.clip_grad_norm_(1e9).item()]

# %% jupyter={"source_hidden": true}
by_rank = ranks.get("norms")
alone, right_norm, own = zip(*(found.values() for found in by_rank))
assert all(abs(norm / alone[0] - 1) < 1e-4 for norm in right_norm)
assert abs(sum(norm**2 for norm in own) / alone[0] ** 2 - 1) < 1e-3
assert all(abs(model / alone[0] - 1) < 1e-4 for _, model in ranks.get("fsdp1_norms"))
assert len({round(part, 3) for part, _ in ranks.get("fsdp1_norms")}) > 1
Table(
    ["norm of the gradient", *(f"rank {rank}" for rank in range(len(by_rank)))],
    [[name, *(f"{found[name]:.3f}" for found in by_rank)] for name in by_rank[0]],
)

# %% [markdown]
# Under `fully_shard`, `torch.nn.utils.clip_grad_norm_` is right: the gradients are DTensors, and the norm of all their
# parts is computed. It is a DTensor: `.full_tensor()` is the number. The last row is what your own
# code gets from the local tensors. Each rank would then scale its part by another factor, without an error.
#
# ## What does a kill cost?
#
# The steps since the last complete checkpoint, and the time until the ranks train again. A longer run of
# `fsdp_utils.train` on four CPU ranks, saved every five steps, was disturbed 25 times in five ways. A step of
# this run takes half a second.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import recorded

chaos = recorded.load("chaos")["results"]
assert chaos["losses"] == chaos["undisturbed_losses"]
assert 0.4 < chaos["seconds"]["undisturbed"] / len(chaos["losses"]) < 0.6

def row(kind):
    found = [fault for fault in chaos["faults"] if fault["kind"] == kind]
    stopped = all(fault["resumed"] is not None for fault in found)
    seconds = f"{np.median([fault['seconds'] for fault in found]):.0f}" if stopped else "does not stop"
    return [kind, len(found), max(fault["repeated"] for fault in found), seconds]

Table(
    ["what was done", "times", "steps trained twice, at most", "seconds until it trains again, median"],
    [row(kind) for kind in sorted({fault["kind"] for fault in chaos["faults"]})],
    note=f"All {len(chaos['losses'])} losses are those of the undisturbed run, bit for bit. "
    + recorded.caption("chaos").data.strip("*"),
)

# %% [markdown]
# **Steps.** At most four steps were repeated after these SIGKILLs. Five and more are possible: the program saves in the
# background, and a kill during a save leads back to the checkpoint before. Two rows have more:
#
# - Where the newest checkpoint was cut short on disk, the program takes the one before.
# - One SIGSTOP, which freezes a rank, came after a full disk had kept a checkpoint from being written.
#
# At SIGTERM, which schedulers send as a warning, the program saves at the end of the step and leaves: nothing is
# repeated. After 30 seconds torchrun kills what still runs; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240` gives it 240.
#
# (The script's loop ends with `CheckpointDamagedError` at a damaged file, until you give `load_distributed` an older
# `step=`; and with `CheckpointError` where a save fails, unless you catch it.)
#
# **Seconds.** A restart takes about 20 seconds. A frozen rank costs 20 seconds more, because here the program waits so
# long before it calls a rank hung (`--hang_s=20`; 300 by default).
#
# **How often should you save, then?** Rare saves lose more steps at a kill, frequent ones hold up training. The next
# figure adds up both. It is calculated for kills at random moments (exponential times between them), a save that
# stops training for 30 seconds, and a restart of 5 minutes. A curve stands for a mean time between kills; three hours
# is what Llama 3 met on up to 16,384 GPUs ([419 unexpected interruptions in 54
# days](https://arxiv.org/abs/2407.21783)). See how flat each curve is around its lowest point.

# %%
save, restart = 0.5, 5

def extra(every, between):
    """Percent of time added by saves, repeated steps and restarts, all times in minutes."""
    return 100 * ((between + restart) * np.expm1((every + save) / between) / every - 1)

# %% jupyter={"source_hidden": true}
minutes = np.geomspace(1, 360, 200)

fig, (axes,) = plots.figure(height=2.8)
for index, (name, between) in enumerate({"3 hours": 180, "day": 1440, "week": 10080}.items()):
    best = (2 * save * between) ** 0.5
    assert extra(best, between) < 1.01 * min(extra(minutes, between))
    assert max(extra(best / 2, between), extra(best * 2, between)) < 1.25 * extra(best, between)
    label = f"a kill every {name}: {best:.0f} min, {extra(best, between):.1f}%"
    axes.plot(minutes, extra(minutes, between), color=plots.RANK_COLORS[index], label=label)
    axes.plot(best, extra(best, between), "o", color=plots.RANK_COLORS[index])
axes.set(xscale="log", ylim=(0, 40), xlabel="minutes between saves", ylabel="extra time, %")
axes.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
axes.legend(loc="upper center")
plots.show(fig, alt="Extra time over the minutes between saves: each curve has a flat minimum, marked by a dot.")

# %% [markdown]
# The dots are [Young's rule of thumb](https://doi.org/10.1145/361147.361115): **save every √(2 · s · M)**, where s is
# how long a save stops training and M the mean time between kills. They lie within 1% of the lowest points; half or
# twice the interval raises the extra time by a quarter at most, so a guess of M four times off will do. For s, time
# your save.
#
# With `asynchronous=True`, s is shorter: training waits only until the state is copied to CPU memory. But a save that
# is still being written at the kill doesn't count, so a few more steps may be lost.
#
# ## Your turn 1 · Weigh by labels
#
# The loss of a batch is the mean over *all* its labels, but FSDP averages the ranks' gradients as if all ranks had
# equally many. If one rank has 1 label and another has 10, and each takes its own mean, the single label weighs as
# much as the ten together.
#
# - **Goal**: the gradients of one process that has all samples.
# - **Given**: `loss_sum`, the sum of the losses of this rank's labels (a tensor with a gradient); `labels`, how many
#   there are (an int, on some ranks 0). `dist`, `rank`, `world` and `device` are there, too.
# - **Return**: the tensor on which `backward` is to be called.
#
# <details><summary>Hint</summary>
#
# FSDP adds up the ranks' gradients and divides by the number of ranks. What should it have divided by?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

weighings = {
    "equal numbers": ([6] * world, "Wrong even with as many labels on every rank: check the factor. FSDP itself divides "
        "by the number of ranks."),
    "unequal numbers": ([1 + 3 * rank for rank in range(world)], "A label on a rank with few labels weighs more than one "
        "on a rank with many: use the number on all ranks."),
    "a rank without labels": ([0, *[5] * (world - 1)], "A rank without labels spoils the gradient: what does it divide by?"),
}

@turn(1, {f"error of the gradients, %, {name}": at_most(0.1, advice) for name, (_, advice) in weighings.items()})
def score_loss(my_loss):
    found = {}
    for name, (counts, _) in weighings.items():
        begin, rows = sum(counts[:rank]), torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(1))
        def summed(model, part):
            return (model(part.to(device)) - part.sum(-1, keepdim=True).to(device)).square().sum()
        model, alone = with_gradients(fully_shard), with_gradients(lambda model: model)
        model.zero_grad()
        alone.zero_grad()
        mine = rows[begin : begin + counts[rank]] if counts[rank] else rows[:1]  # a sample that has no label
        loss = my_loss(summed(model, mine) * min(counts[rank], 1), counts[rank])
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            raise NotYet("Scale `loss_sum` itself: `.item()`, `.detach()` or a new tensor cuts the loss off from backward.")
        loss.sum().backward()
        (summed(alone, rows) / sum(counts)).backward()
        pairs = [(p.grad.full_tensor(), right.grad) for p, right in zip(model.parameters(), alone.parameters())]
        worst = torch.stack([(mine - right).abs().max() / right.abs().max() for mine, right in pairs]).max()
        found[f"error of the gradients, %, {name}"] = error = round(100 * worst.item(), 2)
        if not error <= 0.1:                            # or nan
            break                                       # one mistake would miss the other rows, too
    return found

# %%
# %%turn 1
def my_loss(loss_sum, labels):                          # a tensor with a gradient, an int
    # 1. count the labels of all ranks   2. scale loss_sum, so that FSDP's mean comes out right
    return None                                         # your lines here

# %% tags=["solution"] turn=1
def my_loss(loss_sum, labels):
    total = torch.tensor(labels, device=device)
    dist.all_reduce(total)                              # of all ranks
    return loss_sum * world / total

# %% tags=["right"] turn=1
def my_loss(loss_sum, labels):
    counts = [None] * world
    dist.all_gather_object(counts, labels)
    return loss_sum / (sum(counts) / world)

# %% tags=["right"] turn=1
from torch.distributed import _functional_collectives as functional

def my_loss(loss_sum, labels):                          # by the mean number of labels
    mean = functional.all_reduce(torch.tensor([float(labels)], device=device), "sum", dist.group.WORLD) / world
    return loss_sum / mean

# %% tags=["right"] turn=1
import numpy as np

def my_loss(loss_sum, labels):                          # this rank's mean, weighed by its share of the labels
    total = torch.tensor(labels, device=device)
    dist.all_reduce(total)
    share = np.float64(labels / total.item())
    return loss_sum / max(labels, 1) * share * world

# %% tags=["wrong"] turn=1 says="weighs more than one on a rank with many"
def my_loss(loss_sum, labels):
    return loss_sum / max(labels, 1)

# %% tags=["wrong"] turn=1 says="FSDP itself divides by the number of ranks"
def my_loss(loss_sum, labels):
    return loss_sum / (labels * world)

# %% tags=["wrong"] turn=1 says="check the factor"
def my_loss(loss_sum, labels):                          # weighs a sum as if it were a mean
    total = torch.tensor(labels, device=device)
    dist.all_reduce(total)
    return loss_sum * labels / total

# %% tags=["wrong"] turn=1 says="what does it divide by"
def my_loss(loss_sum, labels):
    total = torch.tensor(labels, device=device)
    dist.all_reduce(total)
    return loss_sum / labels * (world * labels / total)

# %% tags=["wrong"] turn=1 says="cuts the loss off from backward"
def my_loss(loss_sum, labels):                          # a new zero on the rank without labels
    total = torch.tensor(labels, device=device)
    dist.all_reduce(total)
    return loss_sum * world / total if labels else torch.zeros(1, device=device, requires_grad=True)

# %% [markdown]
# ## Your turn 2 · A save that a kill cannot break
#
# `save_distributed` leaves a complete checkpoint whenever the kill comes. Build that from three operations:
#
# | operation | what it does | if the kill comes meanwhile |
# |:--|:--|:--|
# | `("write", name, value)` | writes a file, replaces an old one | the new file is cut short, and the old one is lost |
# | `("rename", old, new)` | renames a file, replaces an old one | the rename is done, or it is not |
# | `("barrier",)` | waits until all ranks have come to it | |
#
# - **Goal**: after a kill at any moment, all ranks go on from the same step, and no complete save is lost.
# - **Write `my_save(rank, step)`**: return this rank's operations at a save, such as
#   `[("write", "a", "shard"), ("barrier",)]`. The value `"shard"` stands for this rank's shard at this step.
# - **Write `my_load(rank, files)`**: `files` is what a kill has left, a dict from name to value, without files that
#   were cut short. Return the step to go on from and the name of the file with this rank's shard at that step, or
#   `0, None` where there is no complete save.
#
# A save is complete when every rank has done all its operations; no rank begins the next one earlier. A kill in the
# middle may lead back to the save before, or to this one, but for all ranks to the same.
#
# <details><summary>Hint</summary>
#
# Write each step under a name of its own, so that the save before it stays. Then one file says which step is
# complete. Who writes it, when, and how does it appear at once?
#
# </details>

# %% jupyter={"source_hidden": true}
from itertools import permutations

RANKS = 3

def apply(files, phase, done, step):
    """Do the first operations of each rank on the files, `done` of them."""
    for rank, operations in enumerate(phase):
        for kind, name, value in operations[: done[rank]]:
            if kind == "write":
                files[name] = ("shard", step, rank) if value == "shard" else value
            elif name in files:
                files[value] = files.pop(name)
            else:
                raise NotYet(f"Rank {rank} renames {name!r}, which is not there.")

def kills(my_save):
    """What each kill can leave: (last complete step, files), with each rank once fastest and once slowest."""
    files = {}
    for step in (2, 4, 6):
        phases = [[[]] for _ in range(RANKS)]                   # for each rank, its operations between barriers
        for rank in range(RANKS):
            for operation in my_save(rank, step):
                if {"write": 3, "rename": 3, "barrier": 1}.get(operation[0]) != len(operation):
                    raise NotYet(f"{operation!r} is no operation: write takes a name and a value, rename two names.")
                if operation[0] == "barrier":
                    phases[rank].append([])
                else:
                    phases[rank][-1].append(operation)
        if len({len(found) for found in phases}) > 1:
            raise NotYet("Some ranks come to a barrier that the others do not call: they would wait.")
        for phase in zip(*phases):
            for one, other in permutations(phase, 2):           # of two ranks, which run at the same time
                own = {operation[1] for operation in one}       # what a rank writes or renames
                both = own & {name for kind, *names in other for name in names[: 1 + (kind == "rename")]}
                if both:
                    raise NotYet(f"Several ranks use {min(both)!r} at once: let one write and rename it.")
            full = [len(found) for found in phase]
            for who in range(RANKS):
                for part in range(full[who] + 1):
                    for others in ([0] * RANKS, full):
                        done = [*others[:who], part, *others[who + 1 :]]
                        left = dict(files)
                        apply(left, phase, done, step)
                        yield step - 2, left
                        if part < full[who] and phase[who][part][0] == "write":
                            yield step - 2, {name: left[name] for name in left if name != phase[who][part][1]}
            apply(files, phase, full, step)
        yield step, dict(files)

from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

goals = {
    "kills after which a rank has no complete shard": exactly(0, "A rank goes on from a file that is missing, cut short, "
        "or not its own of that step: keep the save before, and let a step count only when all ranks have written."),
    "kills after which ranks go on from different steps": exactly(0, "One file must decide the step for all ranks."),
    "kills that cost a complete save": exactly(0, "Every rank had finished a save, and the run goes on from an older "
        "one. If the newest file is written over in place: rename a new one over it."),
}

@turn(2, goals)
def score_save(my_save, my_load):
    broken = parted = late = 0
    for complete, files in kills(my_save):
        found = [my_load(rank, dict(files)) for rank in range(RANKS)]
        if any(not isinstance(one, tuple | list) or len(one) != 2 for one in found):
            raise NotYet("Return two things from my_load: the step, and a file name or None.")
        steps = [int(step) for step, _ in found]
        shards = [files.get(name) == ("shard", step, rank) for rank, (step, name) in enumerate(found) if step]
        broken += not all(shards)
        parted += all(shards) and len(set(steps)) > 1
        late += all(shards) and min(steps) < complete
    return dict(zip(goals, (broken, parted, late)))

# %%
# %%turn 2
def my_save(rank, step):                                # called on ranks 0, 1 and 2, for steps 2, 4 and 6
    return None                                         # your lines here: [("write", name, "shard"), ...]

def my_load(rank, files):                               # the names you wrote, with their values
    return None                                         # your lines here: step, name

# %% tags=["solution"] turn=2
def my_save(rank, step):
    operations = [("write", f"{step}/{rank}", "shard"), ("barrier",)]   # now all shards of this step are complete
    if rank == 0:
        operations += [("write", "newest.part", step), ("rename", "newest.part", "newest")]
    return operations

def my_load(rank, files):
    step = files.get("newest", 0)
    return step, f"{step}/{rank}" if step else None

# %% tags=["right"] turn=2
def my_save(rank, step):                                # every rank renames the same file; a generator
    yield "write", f"shard-{rank}-of-{step}", "shard"
    yield ("barrier",)
    yield "write", f"mark-{rank}", {"step": step}
    yield "rename", f"mark-{rank}", "newest"

def my_load(rank, files):
    step = files["newest"]["step"] if "newest" in files else 0
    return [step, f"shard-{rank}-of-{step}"]

# %% tags=["right"] turn=2
import numpy as np

def my_save(rank, step):                                # one empty file for each complete step
    last = [("write", f"{step}.part", True), ("rename", f"{step}.part", f"{step}.complete")]
    return [("write", f"{step}/{rank}", "shard"), ("barrier",), *(last if rank == 0 else [])]

def my_load(rank, files):
    step = np.max([0, *(int(name.split(".")[0]) for name in files if name.endswith(".complete"))])
    return step, f"{step}/{rank}"

# %% tags=["right"] turn=2
def my_save(rank, step):                                # a step counts when all its files are there
    return [("write", f"{step}/{rank}", "shard")]

def my_load(rank, files):
    step = max((s for s in (2, 4, 6) if all(f"{s}/{r}" in files for r in range(3))), default=0)
    return step, f"{step}/{rank}"

# %% tags=["wrong"] turn=2 says="Several ranks use 'tmp' at once"
def my_save(rank, step):                                # another rank may be writing what this one renames
    return [("write", f"{step}/{rank}", "shard"), ("barrier",), ("write", "tmp", step), ("rename", "tmp", "newest")]

def my_load(rank, files):
    step = files.get("newest", 0)
    return step, f"{step}/{rank}"

# %% tags=["wrong"] turn=2 says="keep the save before"
def my_save(rank, step):                                # overwrites the only copy
    return [("write", f"shard-{rank}", "shard")]

def my_load(rank, files):
    return files.get(f"shard-{rank}", (0, 2))[1], f"shard-{rank}"

# %% tags=["wrong"] turn=2 says="decide the step for all ranks"
def my_save(rank, step):                                # renamed, but each rank by itself
    return [("write", f"part-{rank}", "shard"), ("rename", f"part-{rank}", f"shard-{rank}")]

def my_load(rank, files):
    found = files.get(f"shard-{rank}")
    return (found[1], f"shard-{rank}") if found else (0, None)

# %% tags=["wrong"] turn=2 says="when all ranks have written"
def my_save(rank, step):                                # no barrier
    mark = [("write", "newest.part", step), ("rename", "newest.part", "newest")]
    return [("write", f"{step}/{rank}", "shard"), *(mark if rank == 0 else [])]

def my_load(rank, files):
    step = files.get("newest", 0)
    return step, f"{step}/{rank}"

# %% tags=["wrong"] turn=2 says="rename a new one over it"
def my_save(rank, step):                                # the mark is overwritten in place
    return [("write", f"{step}/{rank}", "shard"), ("barrier",), *[("write", "newest", step)][rank:]]

def my_load(rank, files):
    step = files.get("newest", 0)
    return step, f"{step}/{rank}"

# %% tags=["wrong"] turn=2 says="the run goes on from an older one"
def my_save(rank, step):
    return []

def my_load(rank, files):                               # never resumes
    return 0, None

# %% tags=["wrong"] turn=2 says="Return two things"
def my_save(rank, step):
    return [("write", f"{step}/{rank}", "shard")]

def my_load(rank, files):
    return 0

# %% [markdown]
# `save_distributed` does the same with a folder: all ranks write into one with a temporary name, and when all are
# done, rank 0 adds a list of the files with their hashes and renames the folder. (`my_load` may also look for all files
# of a step. On a disk, it would have to recognise a file that was cut short, as by its hash.)
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `exitcode: -9` and no message | killed from outside, usually for memory; or by torchrun, 30 s after SIGTERM | the host's log (`dmesg`); `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` |
# | `Connection closed by peer` on most ranks | the consequence, not the cause | look at the rank that torchrun prints under `Root Cause`; on several hosts each torchrun knows only its own ranks: take the earliest `time` of all |
# | after `--max-restarts` the new ranks hang at the start, or say `Gloo connectFullMesh failed` | they read addresses of dead ones from torchrun's store (torch 2.13; [issue 135712](https://github.com/pytorch/pytorch/issues/135712) for NCCL) | `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` |
# | the evaluation hangs | ranks have different numbers of batches | the same number on each rank; a rank without samples runs one that does not count |
#
# On several hosts, start the same command on each, without `--standalone` and with `--nnodes=2 --rdzv-backend=c10d
# --rdzv-endpoint=host:29500 --max-restarts=3`. All hosts need the same folder; `examples/train.sbatch` does it all
# under Slurm.
#
# ## The rule
#
# Save what the next step depends on, let a save count by one rename after all ranks have written, and begin every
# start by loading. Before a long run, kill a short one and compare its losses.

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# [← lesson 9](09_child_tuning.ipynb) · [lesson 11 →](11_rate_limiter.ipynb)

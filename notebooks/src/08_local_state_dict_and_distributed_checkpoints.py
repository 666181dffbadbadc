# %% [markdown]
# # 8 · LOCAL_STATE_DICT and distributed checkpoints
#
# Four ranks train today, and tomorrow there may be three. How do I save so that I can resume on other ranks?
# **Each rank writes the shards that it holds, with a description of which rows are in which file. At a load,
# each rank looks up where its rows are, and reads those.** No tensor is gathered. You type two calls, and every
# rank makes both:
#
# ```python
# from fsdp_utils import load_distributed, save_distributed
#
# save_distributed("run", model, optimizer, step=step, keep=3)     # every N steps; keeps the last three
# state = load_distributed("run", model, optimizer)                # on any number of ranks; go on at state["step"]
# ```
#
# PyTorch's own module for this is `torch.distributed.checkpoint` (DCP). The script uses DCP alone, because it
# shows the mechanism. The two calls also do what DCP leaves to you: they notice that a save was interrupted, and
# that a file is damaged.
#
# **When do you need it?** [Lesson 3](03_full_state_dict.ipynb) gathers everything on rank 0, which writes one
# file. Float32 weights with AdamW's two averages take 12 bytes per parameter, so at 7 billion parameters one
# host holds 84 GB and one process writes them. If 16 ranks write their own shards, each writes 5.25 GB, all at
# the same time. The price is a folder that all hosts must reach and other programs do not read. So save like
# this while you train, and make lesson 3's file when you hand the weights on.

# %% jupyter={"source_hidden": true}
import os

from fsdp_utils.lessons import lesson, plots

world = int(os.environ.get("FSDP_RANKS", 4))

def cut(rows, ranks):
    """First and last row (exclusive) of each rank's part, as FSDP2 cuts a parameter."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]

fig, (axes,) = plots.figure(width=7.5, height=2.2)
for index, (begin, end) in enumerate(cut(256, 4)):
    axes.barh(0, end - begin, left=begin, height=0.5, color=plots.RANK_COLORS[index], edgecolor=plots.CARD)
    axes.text(begin + 3, 0, f"file {index}: {begin} to {end - 1}", va="center", color="white" if index in (0, 2) else plots.INK)
for reader, (first, stop) in enumerate(cut(256, 3)):
    for index, (begin, end) in enumerate(cut(256, 4)):
        left, right = max(first, begin), min(stop, end)
        axes.barh(1, max(right - left, 0), left=left, height=0.5, color=plots.RANK_COLORS[index], alpha=0.5)
    axes.barh(1, stop - first, left=first, height=0.5, fill=False, edgecolor=plots.INK, linewidth=1.5)
    axes.text((first + stop) / 2, 1, f"rank {reader}: rows {first} to {stop - 1}", ha="center", va="center")
axes.set_yticks([0, 1], ["saved by 4 ranks", "wanted by 3 ranks"])
axes.set(ylim=(1.5, -0.5), xlabel="the rows of one weight")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The rows of one weight, saved by four ranks and wanted by three: each needs two files.")

# %% [markdown]
# The drawing shows one weight of 256 rows; a colour is the file that holds the row. Four ranks have saved 64 rows
# each. Three ranks cut the same weight into larger parts, so each rank's part lies in two files. Finding and
# fetching these rows is **resharding**. Files that each rank writes by `torch.save` do not allow it: rank 0's
# file has 64 rows, rank 0 now wants 86, and nothing says where the other 22 are.

# %% tags=["card"]
lesson.card(
    8,
    learn="save shards, resume on any number of ranks, and notice a checkpoint that is damaged",
    needs="[lesson 3](03_full_state_dict.ipynb)",
    ranks="jobs of 4, 3 and 1 ranks on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 20, 31),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It stands for four jobs. The first trains
# 12 steps on 4 ranks and saves after 8. The others load what it saved, on 4, 3 and 1 ranks, and train the last
# four steps again. To have this in one script, a job of 3 ranks is the first 3 of the 4 processes.
#
# ```python
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch import nn
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import DeviceMesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# rank = dist.get_rank()
#
#
# def state_of(model, optimizer, step):                       # what a save writes, and what a load fills
#     weights, averages = get_state_dict(model, optimizer)
#     return {"model": weights, "optimizer": averages, "step": step}
#
#
# def train(mesh, resume):
#     torch.manual_seed(1 if resume else 0)                   # a job that resumes has other weights, until it loads
#     model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
#     fully_shard(model, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
#     losses, state = [], {"step": 0}
#     if resume:
#         state = state_of(model, optimizer, step=0)
#         dcp.load(state, checkpoint_id="step-8", process_group=mesh.get_group())
#         set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
#     for step in range(state["step"], 12):
#         if step == 8 and not resume:
#             dcp.save(state_of(model, optimizer, step), checkpoint_id="step-8")
#         torch.manual_seed(step)
#         x = torch.randn(96, 64, device=device).chunk(mesh.size())[rank]     # this rank's share of the batch
#         loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         loss = loss.detach() / mesh.size()
#         dist.all_reduce(loss, group=mesh.get_group())
#         losses.append(f"{loss:.2f}")
#     return " ".join(losses[-4:])
#
#
# for size, resume in [(4, False), (4, True), (3, True), (1, True)]:
#     mesh = DeviceMesh(device, range(size))                  # the first ranks stand for a job of this size
#     losses = train(mesh, resume) if rank < size else ""
#     if rank == 0:
#         print(f"{'resumed' if resume else 'never stopped':13} on {size}: {losses}")
# dist.destroy_process_group()
# ```
# ```text
# never stopped on 4: 1.15 1.07 1.31 1.03
# resumed       on 4: 1.15 1.07 1.31 1.03
# resumed       on 3: 1.15 1.07 1.31 1.03
# resumed       on 1: 1.15 1.07 1.31 1.03
# ```
#
# Each line has the losses of steps 9 to 12, averaged over the ranks. The first job never stopped, so its losses
# are the right ones. The others began with other weights and an empty optimizer, then loaded, and they print the
# same losses to two digits, on each number of ranks. That has two reasons.
#
# The first is resharding. `state_of` builds the same dict for a save and for a load. `get_state_dict` returns
# every weight and every average of AdamW under its name, as a DTensor, and gathers nothing. For a save, the
# dict is what this rank has. For a load, its names say what to read and its DTensors which rows, and `dcp.load`
# writes into their memory; `set_state_dict` gives the values to model and optimizer. (In your own program the
# mesh has all ranks, and `process_group=` can go.)
#
# The second is the batch: each job divides the same 96 samples by its number of ranks. Your program may not;
# more on that below.
#
# ## Which file holds which rows?
#
# What `get_state_dict` returned is a **sharded state dict**: the ordinary names, and for each a DTensor of which
# this rank holds a part. `dcp.save` writes one file per rank, `__0_0.distcp` for rank 0. Then rank 0 writes
# `.metadata`, which says which rows of which tensor are in which file.
#
# The next cell saves the script's model, made wider, and asks `.metadata` about its first weight, which has
# 4,096 rows. Look for a quarter of the rows in each file, and a quarter of the bytes. (`run_on_ranks` starts
# processes, calls a function on each, and returns what they returned. A folded cell has the script's parts as
# functions: `plain` is the model, `build` shards it and adds the optimizer, `train` is the loop.)

# %% jupyter={"source_hidden": true}
import logging
import pickle
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed
from fsdp_utils.lessons.tables import Table

folder = Path(tempfile.mkdtemp())
fewer = max(world - 1, 1)
sizes = sorted({world, fewer, 1}, reverse=True)

def plain(seed, width=256):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

def build(seed, width=256):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(plain(seed, width), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)

def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}

def train(model, optimizer, steps, on_each_rank=None):
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(on_each_rank * size if on_each_rank else 96, 64).chunk(size)[rank]
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / size)
        losses.append(f"{loss:.2f}")
    return " ".join(losses)

# %% tags=["files"]
def save_wide(path):
    model, optimizer = build(seed=0, width=4096)
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=path)

run_on_ranks(save_wide, folder / "wide", world_size=world)
complete = 12 * sum(p.numel() for p in plain(seed=0, width=4096).parameters())      # bytes: weights, two averages
rows = []
for piece, place in dcp.FileSystemReader(folder / "wide").read_metadata().storage_data.items():
    if piece.fqn == "model.0.weight":
        size = (folder / "wide" / place.relative_path).stat().st_size
        rows.append([place.relative_path, f"from {piece.offset[0]}", f"{size / complete:.0%}"])
assert len(rows) == world                                           # nobody has gathered
Table(["file", "rows of 0.weight", "bytes, of model and optimizer"], sorted(rows))

# %% [markdown]
# Both are there, so nothing is written twice. (The sum is a little over 100%, because each piece of a tensor has
# a header. Rank 3's file is smaller: the last layer's weight has 10 rows, which FSDP2 cuts into 3, 3, 3 and 1.)
#
# A checkpoint knows names and rows, not which modules were units. So you can resume with other units, or in one
# process without FSDP. And a name that is not in the dict is not read: to get the weights alone, give `dcp.load`
# a dict with `"model"` only.
#
# ## Your turn 1 · A load that reads only its part
#
# **Goal.** Write the core of resharding: fetch the rows that one rank wants from files that another number of
# ranks has written, and read no other row.
#
# **Given.**
# - `saved.files` is a list with a pair `(begin, end)` per file: file `i` holds the weight's rows from `begin`
#   up to `end`, `end` not included.
# - `saved.read(i, a, b)` reads rows `a` up to `b` of file `i`, **counted from the first row of that file**, as a
#   tensor of 4 columns.
# - `cut(saved.rows, world)[rank]` is the pair `(first, stop)`: the rows that rank `rank` of `world` wants.
#
# **Return** these rows, in their order, as one tensor. A rank may want none (3 rows on 4 ranks): then return
# `torch.empty(0, 4)`. The test tries 100 cases with up to 33 rows and 5 ranks. All ranks together want 1,175
# rows in them, so no more may be read.
#
# <details><summary>Hint</summary>
#
# The rows that a file and a rank have in common go from the larger beginning to the smaller end. `torch.cat`
# does not accept an empty list.
#
# </details>

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

class Saved:                                                # a weight in files, one from each rank that saved
    def __init__(self, rows, ranks):
        self.rows, self.files, self.rows_read = rows, cut(rows, ranks), 0
        self.weight = torch.arange(4.0 * rows).view(rows, 4)

    def read(self, index, first, stop):
        begin, end = self.files[index]
        part = self.weight[begin:end][first:stop].clone()
        self.rows_read += len(part)
        return part

WAYS = [(rows, a, b) for rows in (1, 3, 10, 33) for a in range(1, 6) for b in range(1, 6)]

@turn(1, {
    "parts that are wrong": exactly(
        0, "Rows are missing, or not those wanted: `read` counts from the file's own first row, and a rank may "
        "want rows of several files."),
    "rows read": exactly(
        sum(rows for rows, _, _ in WAYS), less="Some rows are never read.",
        more="Rows are read that this rank does not want, or twice."),
})
def score_rows(my_rows):
    wrong = read = 0
    for rows, saved_by, wanted_by in WAYS:
        for reader, (first, stop) in enumerate(cut(rows, wanted_by)):
            saved = Saved(rows, saved_by)
            try:
                part = my_rows(saved, reader, wanted_by)
            except (RuntimeError, ValueError, IndexError) as error:
                wants = f"Rank {reader} of {wanted_by} wants the rows from {first} up to {stop}"
                raise NotYet(f"{wants}: {error}.") from error
            wrong += not (isinstance(part, torch.Tensor) and torch.equal(part, saved.weight[first:stop]))
            read += saved.rows_read
    return {"parts that are wrong": wrong, "rows read": read}

# %%
# %%turn 1
def my_rows(saved, rank, world):
    # 1. first, stop = cut(saved.rows, world)[rank] are the rows wanted
    # 2. for each file: which of its rows are among them? read those
    # 3. put the parts together
    return None                                             # your lines here

# %% tags=["solution"] turn=1
def my_rows(saved, rank, world):
    first, stop = cut(saved.rows, world)[rank]
    parts = [torch.empty(0, 4)]
    for index, (begin, end) in enumerate(saved.files):
        left, right = max(first, begin), min(stop, end)
        if left < right:
            parts.append(saved.read(index, left - begin, right - begin))
    return torch.cat(parts)

# %% tags=["right"] turn=1
def my_rows(saved, rank, world):                    # row by row
    mine = torch.empty(0, 4)
    for row in range(*cut(saved.rows, world)[rank]):
        (index,) = [i for i, (begin, end) in enumerate(saved.files) if begin <= row < end]
        at = row - saved.files[index][0]
        mine = torch.cat([mine, saved.read(index, at, at + 1)])
    return mine

# %% tags=["right"] turn=1
import numpy as np
def my_rows(saved, rank, world):                    # NumPy's integers
    files, (first, stop) = np.array(saved.files), cut(saved.rows, world)[rank]
    left, right = np.maximum(files[:, 0], first), np.minimum(files[:, 1], stop)
    found = [saved.read(i, left[i] - files[i, 0], right[i] - files[i, 0]) for i in np.flatnonzero(left < right)]
    return torch.cat(found) if found else torch.empty(0, 4)

# %% tags=["right"] turn=1
def my_rows(saved, rank, world):                    # into memory that is there already, as DCP does
    first, stop = cut(saved.rows, world)[rank]
    mine = torch.empty(stop - first, 4)
    for index, (begin, end) in enumerate(saved.files):
        if begin < stop and first < end and first < stop:
            a, b = max(first - begin, 0), min(stop, end) - begin
            mine[begin + a - first : begin + b - first] = saved.read(index, a, b)
    return mine

# %% tags=["wrong"] turn=1 says="non-empty list"
def my_rows(saved, rank, world):                    # nothing to put together where a rank wants no rows
    first, stop = cut(saved.rows, world)[rank]
    return torch.cat([
        saved.read(index, max(first, begin) - begin, min(stop, end) - begin)
        for index, (begin, end) in enumerate(saved.files) if max(first, begin) < min(stop, end)
    ])

# %% tags=["wrong"] turn=1 says="that this rank does not want"
def my_rows(saved, rank, world):                    # everything, and then cut
    first, stop = cut(saved.rows, world)[rank]
    return torch.cat([saved.read(i, 0, end - begin) for i, (begin, end) in enumerate(saved.files)])[first:stop]

# %% tags=["wrong"] turn=1 says="the file's own first row"
def my_rows(saved, rank, world):                    # rows of the weight, not of the file
    first, stop = cut(saved.rows, world)[rank]
    parts = [torch.empty(0, 4)]
    for index, (begin, end) in enumerate(saved.files):
        if max(first, begin) < min(stop, end):
            parts.append(saved.read(index, max(first, begin), min(stop, end)))
    return torch.cat(parts)

# %% [markdown]
# ## What belongs in a checkpoint?
#
# Everything that the next step depends on, which is more than the weights:
#
# | part | if it is missing | in `save_distributed` |
# |:--|:--|:--|
# | weights | training starts again | `model` |
# | the optimizer's state | the loss jumps from the second step on ([lesson 3](03_full_state_dict.ipynb)) | `optimizer` |
# | the step | samples are repeated | `step=` |
# | the learning-rate schedule | the schedule starts again | `state={"scheduler": scheduler}` |
# | random numbers, of each rank | dropout differs from the run that never stopped | `per_rank={"random": torch.get_rng_state()}`, on a GPU also `"cuda": torch.cuda.get_rng_state()`; set both after loading |
# | the data loader's position, of each rank | samples are repeated or left out | `per_rank={"loader": loader.state_dict()}`, with torchdata's `StatefulDataLoader` |
#
# `state=` is for what is equal on all ranks, `per_rank=` for what differs. The next cell saves on all ranks and
# resumes on each number of them. What comes back for the random numbers when the number of ranks has changed?
# And what are the losses in the last row, where each rank keeps its 24 samples, as in most programs?

# %% tags=["resume"]
def save_all(directory):
    model, optimizer = build(seed=0)
    train(model, optimizer, range(8))
    save_distributed(directory, model, optimizer, step=8, keep=2, per_rank={"random": torch.get_rng_state()})
    return train(model, optimizer, range(8, 12))

def resume(directory, on_each_rank=None):
    model, optimizer = build(seed=1)                                    # other weights, to be overwritten
    state = load_distributed(directory, model, optimizer)
    losses = train(model, optimizer, range(state["step"], 12), on_each_rank)
    return [on_each_rank or 96 // dist.get_world_size(), type(state["random"]).__name__, losses]

never_stopped = run_on_ranks(save_all, folder / "run", world_size=world)[0]
rows = [[n, *run_on_ranks(resume, folder / "run", world_size=n)[0]] for n in sizes]
assert all(row[-1] == never_stopped for row in rows)
rows.append([fewer, *run_on_ranks(resume, folder / "run", 24, world_size=fewer)[0]])
Table(["ranks", "samples per rank", "random numbers", "losses of steps 9 to 12"], rows)

# %% [markdown]
# **Random numbers.** On 4 ranks, each gets back the tensor that it saved. On 3, the fourth's state would belong
# to nobody. So `load_distributed` returns a `PerRank`, the list of all four, and leaves the choice to you;
# usually you seed anew. The same goes for the positions of data loaders: go on from the number of samples that
# the run has seen in all.
#
# **The batch.** Three ranks with 24 samples have a batch of 72. So the last row trains on other samples, and its
# losses differ from the first step on, but no error says so. To keep the batch, give each rank more samples or
# micro-batches; otherwise write down that it changed at this step.
#
# **Did the resume work?** Compare several losses with those of a run that never stopped, as the assertion does.
# The first loss depends on the weights alone, so it is right even if the optimizer's state was lost.
#
# ## A directory that is there completely, or not at all
#
# Now the first of the two things that DCP leaves to you. A job may be killed while it saves. By default
# `dcp.save` writes over an older checkpoint, with the warning `Detected an existing checkpoint`, and a kill can
# then leave files of two steps. So each save needs a directory of its own, and you have to know whether the
# newest one is complete. The cure is to write under a temporary name and to **rename** at the end. A local file
# system renames at once or not at all, so a directory with its final name is complete. This is the one that the
# cell above has made, its first save, of step 8:

# %%
checkpoint = sorted((folder / "run").iterdir())[-1]
print(checkpoint.name, *sorted(path.name for path in checkpoint.iterdir()), sep="\n   ")

# %% [markdown]
# Each rank wrote its shards (`.safetensors`) and its `per_rank=` (`.json`); `state.json` is what the ranks share.
# When all that was on the disk, rank 0 added `manifest.json`, with size and hash of each file, and renamed.
# `keep=2` deletes the oldest checkpoint after the rename, so the disk needs room for three.
#
# The directory must be on a file system that all hosts mount; `save_distributed` refuses one that other ranks
# do not see. S3 has no such rename: there, a manifest that is written last has to mark a complete checkpoint.
#
# ## Your turn 2 · Rename
#
# **Goal.** Write such a save with DCP: a directory that has its final name is complete.
#
# **Given.** `my_save(folder, step, state)` is called on every rank. `state` is a sharded state dict, `folder` a
# `Path` that all ranks see. You also have `dcp`, `dist`, `rank` and `world`.
#
# **To do.** Save with `dcp.save(state, checkpoint_id=...)`; return nothing. When the function returns, on any
# rank, `folder / f"step-{step}"` has to be there, and no incomplete directory may ever have a name that begins
# with `step-`. The test interrupts the second of three saves at the end of `dcp.save`; then `step-1` must still
# be the latest.
#
# <details><summary>Hint</summary>
#
# `dcp.save` returns when all ranks have written. Which call makes the others wait for the rank that renames?
#
# </details>

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

rank, world = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh("cpu", (world,))
warnings.filterwarnings("ignore", message="Detected an existing checkpoint")

def weight(value):
    return {"weight": distribute_tensor(torch.full((8 * world, 4), float(value)), mesh, [Shard(0)])}

def slowly(rename):
    return lambda *names, **options: (time.sleep(0.2), rename(*names, **options))[1]

def interrupted(*args, save=dcp.save, **options):
    save(*args, **options)
    raise InterruptedError

@turn(2, {
    "ranks that return too early": exactly(
        0, "A rank returns before the directory has its name: wait, on all ranks, for the rank that renames."),
    "latest after an interruption": exactly(
        "step-1", "An interrupted save counts as a checkpoint: give the directory its name at the end."),
    "the third save loads": exactly(
        True, "It is not there, or not complete: do all ranks write to the same directory?"),
}, returns=False)
def score_save(my_save):
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder, early = Path(shared[0]), 0

    def latest():
        dist.barrier()
        return max((path.name for path in folder.glob("step-*")), default="none")

    def save(step):
        nonlocal early
        try:
            my_save(folder, step, weight(step))
        except OSError as error:
            raise RuntimeError(f"{error.strerror}: do several ranks rename one directory?") from error
        missing = torch.tensor(int(not (folder / f"step-{step}").is_dir()))    # looked up before any rank waits
        dist.all_reduce(missing)
        early += int(missing)

    with mock.patch("os.rename", slowly(os.rename)), mock.patch("os.replace", slowly(os.replace)):
        save(1)
        if latest() == "none":
            raise NotYet('There is no directory `folder / "step-1"` after the first save.')
        with mock.patch.object(dcp, "save", interrupted), contextlib.suppress(InterruptedError):
            my_save(folder, 2, weight(2))
        stopped = latest()
        save(3)
    state, loads = weight(0), False
    with contextlib.suppress(CheckpointException):
        dcp.load(state, checkpoint_id=folder / "step-3")
        loads = torch.equal(state["weight"].to_local(), weight(3)["weight"].to_local())
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return {"ranks that return too early": early, "latest after an interruption": stopped, "the third save loads": loads}

# %%
# %%turn 2
def my_save(folder, step, state):
    # 1. all ranks save, under a name that no reader takes for a checkpoint
    # 2. one rank renames
    # 3. the others wait for it
    return None                                             # your lines here

# %% tags=["solution"] turn=2
def my_save(folder, step, state):
    unfinished = folder / f"unfinished-{step}"
    dcp.save(state, checkpoint_id=unfinished)               # returns when all ranks have written
    if rank == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()                                          # the others wait for rank 0

# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # the last rank renames, and an all_reduce waits
    dcp.save(state, checkpoint_id=folder / f"tmp{step}")
    if rank == world - 1:
        (folder / f"tmp{step}").replace(folder / f"step-{step}")
    dist.all_reduce(torch.zeros(1))

# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # a writer, and a directory that rank 0 names
    name = [tempfile.mkdtemp(dir=folder) if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(name[0]))
    if rank == 0:
        shutil.move(name[0], folder / f"step-{step}")
    dist.barrier()

# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # rank 0 says that it is done
    dcp.save(state, checkpoint_id=folder / ".new")
    done = [rank == 0 and str((folder / ".new").rename(folder / f"step-{step}"))]
    dist.broadcast_object_list(done, src=0)

# %% tags=["wrong"] turn=2 says="An interrupted save counts"
def my_save(folder, step, state):                           # under its name from the beginning
    dcp.save(state, checkpoint_id=folder / f"step-{step}")

# %% tags=["wrong"] turn=2 says="before the directory has its name"
def my_save(folder, step, state):                           # nobody waits for rank 0
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    if rank == 0:
        (folder / f"unfinished-{step}").rename(folder / f"step-{step}")

# %% tags=["wrong"] turn=2 says="do several ranks rename"
def my_save(folder, step, state):                           # every rank renames
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    (folder / f"unfinished-{step}").rename(folder / f"step-{step}")
    dist.barrier()

# %% tags=["wrong"] turn=2 says="write to the same directory"
def my_save(folder, step, state):                           # another directory on each rank
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    dcp.save(state, checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()

# %% [markdown]
# ## Who notices damage?
#
# This is the second thing that DCP leaves to you. Disks fail, and copies are cut short. The next cell damages a
# checkpoint of DCP alone, and one of `save_distributed`, in four ways. Then it loads each and trains step 9:
#
# - **a bit flipped**: of one weight, which makes it 2^128 times as large
# - **cut short**: rank 0's file without its last 1,000 bytes
# - **mixed**: rank 0's file is of step 4, the others of step 8, as when a save over another one is killed
# - **forged**: DCP's `.metadata` is a pickle, which may name a function to call at reading: here, `os.makedirs`
#
# "Loads" is bad news in every row but the first. (`DAMAGES` and `load_all`, which loads each directory and says
# what came of it, are in a folded cell.)

# %% jupyter={"source_hidden": true}
def flipped(path, older):                                   # one bit of one weight
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        if (at := data.find(some_weights)) >= 0:
            data[at + 403] ^= 0b01000000                    # the highest bit of weight 100's exponent
            file.write_bytes(data)

def rank_0s(path):
    return next(path.glob("__0_0.distcp"), path / "rank-00000.safetensors")

DAMAGES = {
    "nothing": lambda path, older: None,
    "a bit flipped": flipped,
    "cut short": lambda path, older: os.truncate(rank_0s(path), rank_0s(path).stat().st_size - 1000),
    "mixed": lambda path, older: shutil.copy(rank_0s(older), path),
    "forged": lambda path, older: next(path.glob("state.json"), path / ".metadata").write_bytes(pickle.dumps(Attack())),
}

marker = folder / "it ran"

class Attack:
    def __reduce__(self):
        return os.makedirs, (str(marker), 0o777, True)

def two_checkpoints():
    model, optimizer = build(seed=0)
    for step in (4, 8):
        train(model, optimizer, range(step - 4, step))
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / "dcp" / f"{step}")
        save_distributed(folder / "ours", model, optimizer, step=step)
    return model[0].weight.to_local().detach().numpy().tobytes()

def load_all(paths):
    """What loading each of the directories comes to: the loss of a batch, or the error."""
    logging.disable(logging.CRITICAL)
    said = []
    for path in paths:
        model, optimizer = build(seed=1)
        try:
            if path.parent.name == "dcp":
                state = state_of(model, optimizer)
                dcp.load(state, checkpoint_id=path)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            else:
                load_distributed(path.parent, model, optimizer, step=8)
            largest = max(p.full_tensor().abs().max().item() for p in model.parameters())
            said.append(f"loads: loss {train(model, optimizer, [8])}, largest weight {largest:.1g}")
        except CheckpointException as error:
            said.append(f"refused: {type(error.failures[min(error.failures)][0]).__name__}")
        except CheckpointError as error:
            said.append("refused: " + re.search(r"[\w.-]+\.(json|safetensors)", str(error))[0])
    return said

# %% tags=["damage"]
some_weights = run_on_ranks(two_checkpoints, world_size=world)[0]       # of steps 4 and 8, in both ways
found = []
for kind in ("dcp", "ours"):
    older, newer = sorted((folder / kind).iterdir())
    paths = []
    for name, damage in DAMAGES.items():
        paths.append(shutil.copytree(newer, folder / name / kind / newer.name))
        damage(paths[-1], older)
    found.append(run_on_ranks(load_all, paths, world_size=world)[0])
    if marker.exists():                                                 # the attack's function was called
        found[-1][-1] += ", and its code has run"
        marker.rmdir()
Table(["damage", "DCP alone", "load_distributed"], [list(row) for row in zip(DAMAGES, *found)])

# %% jupyter={"source_hidden": true}
assert [said[:5] for said in found[0]] == ["loads", "loads", "refus", "loads", "refus"]
assert all(said.startswith("refused") for said in found[1][1:])
assert ["code has run" in said[-1] for said in found] == [True, False]

# %% [markdown]
# DCP alone notices the short file, because it cannot read it. The two wrong values load, and neither looks
# alarming: the `tanh` behind the huge weight hides it from the loss, and the mixture passes for a checkpoint of
# a step in between. The forged file is refused, but its code has run.
#
# `load_distributed` compares sizes and hashes with the manifest before it loads anything, and names the file.
# Its files are safetensors and JSON, which hold nothing to call. **Load DCP's checkpoints only from people whose
# code you would run.** To check without loading, `python -m fsdp_utils.checkpoint verify run` reads every byte.
#
# ## Saving while the training goes on
#
# A save stops the training, because the next step would change values that are not written yet. An
# **asynchronous save** copies this rank's shards to host memory, lets the training go on, and writes the copy
# from a thread: `save_distributed(..., asynchronous=True)`, or `dcp.async_save`.
#
# The next cell saves 34 MiB from each of two CPU ranks to one disk, four times in each way; the first is not
# counted. Compare each asynchronous bar with the one above it.

# %% tags=["async"]
def seconds_blocked(directory):
    model, optimizer = build(seed=0, width=80_000)
    train(model, optimizer, [0])                                        # so that AdamW has a state
    ways = {
        "dcp.save": lambda n: dcp.save(state_of(model, optimizer), checkpoint_id=directory / f"a{n}"),
        "dcp.async_save": lambda n: dcp.async_save(state_of(model, optimizer), checkpoint_id=directory / f"b{n}"),
        "save_distributed": lambda n: save_distributed(directory, model, optimizer, step=2 * n, keep=1),
        "save_distributed, asynchronous": lambda n: save_distributed(
            directory, model, optimizer, step=2 * n + 1, keep=1, asynchronous=True),
    }
    seconds = {name: [] for name in ways}
    for number in range(4):
        for name, save in ways.items():
            dist.barrier()
            began = time.perf_counter()
            saving = save(number)
            seconds[name].append(time.perf_counter() - began)
            if "async" in name:                                         # in a job: before the next save
                saving.result() if name.startswith("dcp") else saving.wait()
    return {name: median(times[1:]) for name, times in seconds.items()}

measured = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = {name: 1000 * max(of[name] for of in measured) for name in measured[0]}
assert blocked["save_distributed, asynchronous"] < 0.8 * blocked["save_distributed"]
plots.amounts({"training waits for": {name: {"median of three": ms} for name, ms in blocked.items()}}, unit="ms",
              alt="Milliseconds for which each kind of save blocks the training; asynchronous ones block less.")

# %% [markdown]
# An asynchronous save blocks for a fraction of the time: for the copy and for some messages between the ranks.
# The gain depends on your model and disk; PyTorch's
# [blog](https://pytorch.org/blog/reducing-checkpointing-times/) reports 6.3 s instead of 148.8 s for a 7B model.
#
# You pay with host memory, as much as this rank's shards of model and optimizer, and an error in the thread has
# to reach you. `save_distributed` returns an object whose `wait()` raises it; the next save does, too.
# `dcp.async_save` returns a future: call its `result()` before the next save. Call either before the job ends.
# `dcp.async_save` also needs a backend for CPUs beside NCCL, hence the script's `cpu:gloo,cuda:nccl`.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# The lesson has its name from the video, which is about FSDP1. FSDP1 joins the
# parameters of a unit into one flat parameter. `LOCAL_STATE_DICT` holds this rank's piece of it, without the
# names in it; `SHARDED_STATE_DICT` holds this rank's rows of each parameter. The folded cell saves both by DCP
# and loads them on each number of ranks:

# %% tags=["local"] jupyter={"source_hidden": true}
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

def in_2022(right=None):                                            # right: what the saved model computes
    warnings.simplefilter("ignore")                                 # these functions of FSDP1 are deprecated
    said = []
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        model = FSDP(plain(seed=1 if right else 0), device_id=torch.device("cpu"))
        try:
            with FSDP.state_dict_type(model, kind):
                state = model.state_dict()
                (dcp.load if right else dcp.save)(state, checkpoint_id=folder / kind.name)
                model.load_state_dict(state)
            said.append(model(torch.arange(64.0).view(1, 64)).sum().item())
        except CheckpointException as error:                        # a BaseException, not an Exception
            said.append(str(error.failures[min(error.failures)][0]).split(" and ")[0].split(". ")[0])
    return ["loads" if right and said[i] == right[i] else said[i] for i in range(2)]

right = run_on_ranks(in_2022, world_size=world)[0]
rows = [[size, *run_on_ranks(in_2022, right, world_size=size)[0]] for size in sizes]
assert [row[2] for row in rows] == ["loads"] * len(sizes)
assert [rows[0][1], rows[-1][1][:11]] == ["loads", "Missing key"]
Table([f"saved by {world}, loaded on", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"], rows)

# %% [markdown]
# The local state dict loads on as many ranks as have saved it. On 3 and 1 it fails, with messages that do not
# say why. The sharded one loads on all, and it is the one that `get_state_dict` returns.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `dcp.save` never returns | one rank alone calls it: `if rank == 0:`, as around `torch.save` | all ranks call it |
# | `FileNotFoundError` for a file of the checkpoint | each host wrote to its own disk | a directory that all hosts mount |
# | `Missing key in checkpoint state_dict` | the model has a name that the checkpoint lacks | `DefaultLoadPlanner(allow_partial_load=True)` if it is meant |
# | `except Exception` does not catch a failed `dcp.load` | `CheckpointException` is a `BaseException` | name it |
# | a job's last checkpoint is missing | it was asynchronous, and `destroy_process_group` came first | `wait()` or `result()` before it |
# | other programs cannot read the folder | its format is DCP's, or ours | `dcp_to_torch_save` of `torch.distributed.checkpoint.format_utils`; `export_safetensors` |
#
# ## The rule
#
# All ranks save the sharded state of model and optimizer, with the step, into a new directory that gets its
# name when it is complete (with DCP alone, by the rename of turn 2). Any number of ranks loads it; decide then
# what happens to the batch. [Lesson 10](10_end_to_end.ipynb) builds a job on this that survives a kill.

# %% jupyter={"source_hidden": true}
shutil.rmtree(folder)
ranks.stop()

# %% [markdown]
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

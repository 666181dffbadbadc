# %% [markdown]
# # 8 · LOCAL_STATE_DICT and distributed checkpoints
#
# Four ranks train; tomorrow there may be three: how do I save so that I can resume on other ranks? **Every
# rank writes its own shards, with a description of which rows are where: `torch.distributed.checkpoint` (DCP)
# does that for what `get_state_dict` returns, and `save_distributed` and `load_distributed` of `fsdp_utils`
# do it so that a crash or a damaged file is noticed.** In a job use the second pair, or DCP with the rename
# of turn 2; the script shows DCP alone.

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
    axes.text(begin + 4, 0, f"file {index}", va="center", color="white" if index in (0, 2) else plots.INK)
for reader, (first, stop) in enumerate(cut(256, 3)):
    for index, (begin, end) in enumerate(cut(256, 4)):
        left, right = max(first, begin), min(stop, end)
        axes.barh(1, max(right - left, 0), left=left, height=0.5, color=plots.RANK_COLORS[index], alpha=0.5)
    axes.barh(1, stop - first, left=first, height=0.5, fill=False, edgecolor=plots.INK, linewidth=1.5)
    axes.text((first + stop) / 2, 1, f"rank {reader} wants", ha="center", va="center")
axes.set_yticks([0, 1], ["saved by 4", "wanted by 3"])
axes.set(ylim=(1.5, -0.5), xlabel="rows of a weight of 256 rows")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The rows of one weight, saved by four ranks and wanted by three: each needs two files.")

# %% [markdown]
# A drawing. Four ranks have saved a weight, each its own rows; the colour of a row is the file that holds it.
# Three ranks want larger parts, so each of them needs rows of two files. Finding them is **resharding**.

# %% tags=["card"]
lesson.card(
    8,
    learn="save shards, resume on any number of ranks, and notice a checkpoint that is damaged",
    needs="[lesson 3](03_full_state_dict.ipynb)",
    ranks="jobs of 4, 3 and 1 ranks on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 15, 31),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It saves after 8 of 12 steps, in two
# ways: with DCP, and as files that each rank writes for itself. Then it resumes on 4, 3 and 1 ranks. Each
# line of its output is a job of its own; to keep it one script, a job of 3 ranks is a process group of 3.
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
# def job(group, size, load=None):
#     torch.manual_seed(1 if load else 0)                     # when it resumes: other weights, to be overwritten
#     model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
#     fully_shard(model, mesh=DeviceMesh.from_group(group, device))
#     optimizer, start, losses = torch.optim.AdamW(model.parameters(), lr=0.02), 0, []
#     if load == "DCP":
#         weights, moments = get_state_dict(model, optimizer)                 # what is wanted, and where to
#         state = {"model": weights, "optimizer": moments, "step": 0}
#         dcp.load(state, checkpoint_id="step-8", process_group=group)        # fills it
#         set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
#         start = state["step"]
#     elif load:                                              # without DCP: each rank reads the file that it wrote
#         with torch.no_grad():
#             for mine, saved in zip(model.parameters(), torch.load(f"rank-{rank}.pt")):
#                 mine.to_local().copy_(saved)
#     for step in range(start, 12):
#         if step == 8 and not load:
#             weights, moments = get_state_dict(model, optimizer)             # DTensors: nothing is gathered
#             dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id="step-8")
#             torch.save([p.to_local() for p in model.parameters()], f"rank-{rank}.pt")
#         torch.manual_seed(step)
#         x = torch.randn(96, 64, device=device).chunk(size)[rank]            # this rank's share of the batch
#         loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(loss := loss.detach() / size, group=group)
#         losses.append(f"{loss:.2f}")
#     return " ".join(losses[-4:])
#
#
# for load, size in [(None, 4), ("DCP", 4), ("DCP", 3), ("DCP", 1), ("own files", 3)]:
#     group = dist.new_group(range(size))                     # stands for a job of so many ranks
#     try:
#         said = job(group, size, load) if rank < size else ""
#     except RuntimeError as error:
#         said = error
#     if rank == 0:
#         print(f"{load or 'never stopped':13} on {size}: {said}")
# dist.destroy_process_group()
# ```
# ```text
# never stopped on 4: 1.15 1.07 1.31 1.03
# DCP           on 4: 1.15 1.07 1.31 1.03
# DCP           on 3: 1.15 1.07 1.31 1.03
# DCP           on 1: 1.15 1.07 1.31 1.03
# own files     on 3: The size of tensor a (86) must match the size of tensor b (64) at non-singleton dimension 0
# ```
#
# These are the losses of steps 9 to 12. From DCP's checkpoint 4, 3 and 1 ranks go on with the same losses, to
# two digits. The files that ranks wrote for themselves hold 64 rows each, and of three ranks the first wants
# 86.
#
# ## Which file holds which rows
#
# A **sharded state dict** has the ordinary names, and for each name a DTensor of which a rank holds a part.
# `get_state_dict` returns two, of model and optimizer, and gathers nothing. DCP writes one file per rank, and
# then `.metadata`, which says which rows of which tensor are in which file. The first cell has the script's
# model and loop. `run_on_ranks` starts processes, calls a function on each, and returns what they returned.

# %%
import logging
import pickle
import re
import shutil
import tempfile
import time
import warnings
from functools import partial
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
def save_plain(path):
    model, optimizer = build(seed=0, width=4096)
    train(model, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)


run_on_ranks(save_plain, folder / "plain", world_size=world)
complete = 3 * 4 * sum(p.numel() for p in plain(seed=0, width=4096).parameters())   # bytes: weights, two averages
pieces = dcp.FileSystemReader(folder / "plain").read_metadata().storage_data       # reads .metadata
begins = {place.relative_path: index.offset[0] for index, place in pieces.items() if index.fqn == "model.0.weight"}
rows = []
for (file, begin), (first, stop) in zip(sorted(begins.items()), cut(4096, world)):
    assert begin == first                                   # .metadata says what the drawing shows
    rows.append([file, f"{begin} to {stop - 1}", f"{(folder / 'plain' / file).stat().st_size / complete:.0%}"])
Table(["file", "rows of 0.weight", "size, of model and optimizer"], rows)

# %% [markdown]
# Nothing is written twice: the files add up to the model and AdamW's two averages, plus headers. `dcp.load`
# gets a state dict whose names say what to read and whose tensors are filled in place. It looks up which
# pieces hold rows that this rank wants, and reads those pieces alone, each as a whole, then cuts them. So a
# state dict with fewer names, such as the model without the optimizer, reads less.
#
# ## Your turn 1 · A load that reads only its part
#
# Write the heart of resharding, and go further than DCP: read single rows. A weight of `saved.rows` rows is
# in `len(saved.files)` files. `saved.files[i]` is a pair `(begin, end)`: file `i` holds the rows from `begin`
# up to `end`, `end` not included. `saved.read(i, a, b)` reads the rows from `a` up to `b` **of that file**,
# counted from the file's own first row, as a tensor of 4 columns.
#
# `my_rows(saved, rank, world)` returns the rows that rank `rank` of `world` wants: from `first` up to `stop`,
# where `first, stop = cut(saved.rows, world)[rank]`. A weight of 3 rows on 4 ranks leaves one rank without
# rows: it gets `torch.empty(0, 4)`. No row may be read for nothing.
#
# <details><summary>Hint</summary>
#
# The rows that a file and a rank have in common go from the larger of the two beginnings to the smaller of
# the two ends. `torch.cat` does not accept an empty list.
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
        "want rows of several files."
    ),
    "rows read": exactly(
        sum(rows for rows, _, _ in WAYS), less="Some rows are never read.",
        more="Rows are read that this rank does not want, or twice.",
    ),
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
    return None             # your lines here; begin with first, stop = cut(saved.rows, world)[rank]


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
# ## What belongs into a checkpoint
#
# | what | if it is missing | with `save_distributed` |
# |:--|:--|:--|
# | weights | you start again | `model` |
# | the optimizer's state | the loss jumps from the second step on ([lesson 3](03_full_state_dict.ipynb)) | `optimizer` |
# | the step | samples are repeated | `step=` |
# | the learning-rate schedule | the rate starts again | `state={"scheduler": scheduler}` |
# | random numbers, of each rank | dropout differs from the run that never stopped | `per_rank={"random": torch.get_rng_state()}`, on a GPU also `"cuda": torch.cuda.get_rng_state()`; set both after loading |
# | the data loader's position, of each rank | samples are repeated or left out | `per_rank={"loader": loader.state_dict()}`, with torchdata's `StatefulDataLoader` |
#
# `optimizer.state_dict()` numbers the parameters instead of naming them, so it belongs to one order of
# parameters; `get_state_dict` gives it their names. `save_distributed` does that, too. Save on all ranks,
# then resume on each number of them:

# %% tags=["resume"]
def with_schedule(seed):
    model, optimizer = build(seed)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def save_all(directory):
    model, optimizer, scheduler = with_schedule(seed=0)
    train(model, optimizer, range(8))
    for _ in range(8):
        scheduler.step()
    save_distributed(directory, model, optimizer, step=8, keep=2,
                     state={"scheduler": scheduler}, per_rank={"random": torch.get_rng_state()})
    return train(model, optimizer, range(8, 12))


def resume(directory, on_each_rank=None):
    model, optimizer, scheduler = with_schedule(seed=1)                 # other weights, to be overwritten
    state = load_distributed(directory, model, optimizer, state={"scheduler": scheduler})
    random = "its own" if isinstance(state["random"], torch.Tensor) else "a list of all"
    losses = train(model, optimizer, range(state["step"], 12), on_each_rank)
    return [state["step"], f"{scheduler.get_last_lr()[0]:.4f}", random, losses]


never_stopped = run_on_ranks(save_all, folder / "run", world_size=world)[0]
rows = [[f"{n}", *run_on_ranks(resume, folder / "run", world_size=n)[0]] for n in sizes]
assert all(row[-1] == never_stopped for row in rows)
rows.append([f"{fewer}, 24 samples each", *run_on_ranks(resume, folder / "run", 24, world_size=fewer)[0]])
Table(["ranks", "step", "learning rate", "random state", "losses of steps 9 to 12"], rows)

# %% [markdown]
# On another number of ranks, the random state of rank 2 means nothing: `load_distributed` returns the list of
# all, and you seed anew. So too with the data: go on from the number of samples that the run has seen.
#
# The first rows agree because the script cuts *one batch of 96* by the number of ranks. The last row keeps 24
# samples per rank, as most programs do: three ranks then have a batch of 72, so the run goes on with other
# samples and another batch. Change the number of micro-batches or the learning rate with the ranks, or say
# that you did not.
#
# ## A directory that is there completely, or not at all

# %%
checkpoint = sorted((folder / "run").iterdir())[-1]
print(checkpoint.name, *sorted(path.name for path in checkpoint.iterdir()), sep="\n   ")

# %% [markdown]
# A save over the last checkpoint destroys it while it runs; a crash then leaves a mixture. DCP does that by
# default, with the warning `Detected an existing checkpoint`. So each save needs a directory of its own, and
# a reader has to know whether the save was finished. `save_distributed` writes under a temporary name, waits
# until the files are on the disk, adds a manifest with the size and the BLAKE3 hash of each file, and then
# **renames**. A local file system renames at once or not at all. With several hosts the directory has to be
# on a file system that all of them mount (`save_distributed` refuses another). An object store such as S3 has
# no rename: there a manifest, written last, has to say that a checkpoint is complete. With `keep=2` the
# oldest is deleted only after that, so plan the disk for three.
#
# ## Your turn 2 · Rename
#
# Write such a save with DCP and the file system. `my_save(folder, step, state)` is called on every rank. It
# saves `state` with `dcp.save(state, checkpoint_id=...)`. When it returns, the checkpoint is the directory
# `folder / f"step-{step}"`, on every rank. A reader takes each directory whose name begins with `step-` for a
# complete checkpoint. Three saves are tested; the second is interrupted at the end of `dcp.save`. Renaming
# takes longer here than on your disk. Nothing is returned.
#
# <details><summary>Hint</summary>
#
# Save under a name that does not begin with `step-`, the same on all ranks. `dcp.save` returns when all ranks
# have written. Who renames, by `unfinished.rename(...)`, and how do the others know that it is done?
#
# </details>

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")

# %%
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

# %% jupyter={"source_hidden": true}
# %%ranks
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
        0, "A rank returns before the directory has its name: wait, on all ranks, for the rank that renames."
    ),
    "latest after an interruption": exactly(
        "step-1", "An interrupted save counts as a checkpoint: give the directory its name at the end."
    ),
    "the third save loads": exactly(
        True, "It is not there, or not complete: do all ranks write to the same directory?"
    ),
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
    return {
        "ranks that return too early": early,
        "latest after an interruption": stopped,
        "the third save loads": loads,
    }


# %%
# %%turn 2
def my_save(folder, step, state):
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
# ## Damage: who notices?
#
# Disks fail, and copies are cut short. Here four kinds of damage are done to a checkpoint of plain DCP and to
# one of `save_distributed`, both of step 8, which are then loaded. The last one is an attack: DCP's
# `.metadata` is a pickle, and a pickle may name any function to be called when it is read. This one only
# makes a directory. (A folded cell has the two checkpoints of steps 4 and 8, `Attack`, and `load_all`, which
# loads each directory and says what came of it.)

# %%
def flipped(path, older):                                   # one bit of one weight
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        if (at := data.find(some_weights)) >= 0:
            data[at + 403] ^= 0b01000000                    # the highest bit of weight 100's exponent
            file.write_bytes(data)


def of_rank_0(path):
    return next(path.glob("__0_0.distcp"), path / "rank-00000.safetensors")


def truncated(path, older):
    of_rank_0(path).write_bytes(of_rank_0(path).read_bytes()[:-1000])


def two_steps(path, older):                                 # stopped while it was written over another
    shutil.copy(of_rank_0(older), path)


def attack(path, older):
    name = ".metadata" if (path / ".metadata").exists() else "state.json"
    (path / name).write_bytes(pickle.dumps(Attack()))


DAMAGES = {
    "nothing": lambda path, older: None,
    "one bit of one weight flipped": flipped,
    "rank 0's file too short": truncated,
    "rank 0's file of an older step": two_steps,
    "a forged pickle": attack,
}

# %% jupyter={"source_hidden": true}
marker = folder / "it ran"


class Attack:
    def __reduce__(self):
        return os.makedirs, (str(marker), 0o777, True)


def two_checkpoints():
    model, optimizer = build(seed=0)
    for step in (4, 8):
        train(model, optimizer, range(step - 4, step))
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp" / f"{step}")
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
                weights, moments = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            else:
                load_distributed(path.parent, model, optimizer, step=8)
            largest = max(p.full_tensor().abs().max().item() for p in model.parameters())
            said.append(f"loads: loss {train(model, optimizer, [8])}, largest weight {largest:.1g}")
        except CheckpointException as error:
            cause, _ = error.failures[min(error.failures)]
            said.append(f"refused: {type(cause).__name__}")
        except CheckpointError as error:
            said.append("refused: " + re.search(r"[\w.-]+\.(json|safetensors)", str(error))[0])
    return said


# %% tags=["damage"]
some_weights = run_on_ranks(two_checkpoints, world_size=world)[0]
found = []
for kind in ("dcp", "ours"):
    older, newer = sorted((folder / kind).iterdir())
    paths = []
    for number, damage in enumerate(DAMAGES.values()):
        paths.append(shutil.copytree(newer, folder / f"damaged {number}" / kind / newer.name))
        damage(paths[-1], older)
    found.append(run_on_ranks(load_all, paths, world_size=world)[0])
    if marker.exists():                                     # the attack's function was called
        found[-1][-1] += ", and its code has run"
        marker.rmdir()
assert [said[:5] for said in found[0]] == ["loads", "loads", "refus", "loads", "refus"]
assert all(said.startswith("refused") for said in found[1][1:])
assert "code has run" not in found[1][-1]
assert "code has run" in found[0][-1]
Table(["damage", "plain DCP", "load_distributed"], [list(row) for row in zip(DAMAGES, *found)])

# %% [markdown]
# Plain DCP notices a file that is too short, and neither of the two wrong values. The flipped bit makes a
# weight 2^128 times too large, and the `tanh` behind it hides that from the loss. The mixture of two steps
# looks like a checkpoint of a step in between. `load_distributed` compares sizes and hashes before it loads
# anything, and names the file. Its files are safetensors and JSON, which hold nothing to call. **Load DCP's
# checkpoints only from people whose code you would run.** `python -m fsdp_utils.checkpoint verify run` reads
# every byte without a load, `inspect run` lists the tensors.
#
# ## Saving while the training goes on
#
# A save must keep the next step from changing the state before it is written. A copy in memory is enough for
# that; the writing goes on in the background. `dcp.async_save` does it, and `save_distributed` with
# `asynchronous=True`. In the background collectives go through gloo, so with NCCL ask for both, as the script
# does. The cell saves 34 MiB per rank on two ranks, four times; the first is not counted. (These are CPUs: on
# a GPU the copy goes to host memory.)

# %% tags=["async"]
def seconds_blocked(directory):
    model, optimizer = build(seed=0, width=80_000)
    group, seconds = dist.new_group(backend="gloo"), {}
    train(model, optimizer, [0])

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    ours = partial(save_distributed, directory, model, optimizer, keep=1)
    ways = {
        "dcp.save": lambda n: dcp.save(state(), checkpoint_id=directory / f"a{n}"),
        "dcp.async_save": lambda n: dcp.async_save(state(), checkpoint_id=directory / f"b{n}", process_group=group),
        "save_distributed": lambda n: ours(step=2 * n),
        "save_distributed, asynchronous": lambda n: ours(step=2 * n + 1, asynchronous=True),
    }
    for number in range(4):
        for name, save in ways.items():
            dist.barrier()
            began = time.perf_counter()
            saving = save(number)
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            if "async" in name:                                     # in a job: before the next save
                saving.result() if name.startswith("dcp") else saving.wait()
    return {name: median(times[1:]) for name, times in seconds.items()}


measured = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = {name: 1000 * max(of[name] for of in measured) for name in measured[0]}
assert blocked["save_distributed, asynchronous"] < 0.8 * blocked["save_distributed"]
plots.amounts({"training waits for": {name: {"median of three": ms} for name, ms in blocked.items()}}, unit="ms",
              alt="Milliseconds for which each kind of save blocks the training; asynchronous ones block less.")

# %% [markdown]
# Compare each save with its asynchronous form alone: the times vary. An asynchronous save blocks for the copy
# and some messages; the copy takes as much memory as this rank's shards. `wait()` (`.result()` for DCP)
# raises an error of the background: call it before the job ends.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# FSDP1 joins the parameters of a unit into one flat parameter. `LOCAL_STATE_DICT`, the video's, holds this
# rank's piece of it, under the name `_flat_param`; `SHARDED_STATE_DICT` holds this rank's rows of each
# parameter. Both are of the model alone; the optimizer's state took a call of its own. Saved by DCP and
# loaded on each number of ranks:

# %% tags=["local"]
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


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
assert rows[0][1] == "loads"
assert rows[-1][1].startswith("Missing key")
Table([f"saved by {world}, loaded on", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"], rows)

# %% [markdown]
# The video's code loads a local state dict on as many ranks as have saved it. On 3 and 1 it fails, with
# messages that do not name the cause. A sharded one loads on all of them, and that is what `get_state_dict`
# gives you.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `Missing key in checkpoint state_dict` | the model has a name that the checkpoint lacks | the same model; or `DefaultLoadPlanner(allow_partial_load=True)` if it is meant |
# | `Size mismatch between saved … and current` | another shape: another vocabulary, or pieces that ranks saved by themselves | save what `get_state_dict` gives |
# | `except Exception` does not catch a failed `dcp.load` | `CheckpointException` is a `BaseException` | name it |
# | a new run's first step differs after `get_state_dict` was called | `get_state_dict` gives a new optimizer its state by a step with learning rate 0, and AdamW counts it | call it to save, or to load |
# | the last checkpoint of a job is missing | it was asynchronous, and the job ended first | `wait()` or `.result()` at the end |
# | other programs cannot read `.distcp` files | they are DCP's own | `export_safetensors`, or `dcp_to_torch_save` of `torch.distributed.checkpoint.format_utils` (Accelerate's `merge-weights` wants the directory with `.metadata` of a checkpoint of the model alone) |
#
# ## The rule
#
# All ranks save the sharded state of model and optimizer, with the step, into a new directory that gets its
# name when it is complete. Any number of ranks loads it; decide then what happens to the batch.

# %% jupyter={"source_hidden": true}
shutil.rmtree(folder)
ranks.stop()

# %% [markdown]
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

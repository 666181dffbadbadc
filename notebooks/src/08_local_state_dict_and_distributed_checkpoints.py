# %% [markdown]
# # 8 · LOCAL_STATE_DICT and distributed checkpoints
#
# Four ranks train today, and tomorrow there may be three. How do I save so that I can resume on other ranks?
# **Each rank writes the shards that it holds, and one rank writes which rows are in which file. At a load, each
# rank looks up which files hold its rows, and reads from those only.** No tensor is gathered.

# %% jupyter={"source_hidden": true}
import os

from fsdp_utils.lessons import lesson, plots

world = int(os.environ.get("FSDP_RANKS", 4))

plots.resharding(256, saved_by=4, wanted_by=3)

# %% [markdown]
# The drawing shows one weight of 256 rows; a colour is the file that holds the row. Three ranks cut the weight
# into larger parts than four, so each rank's part lies in two files. Finding and fetching these rows is
# **resharding**. You type two calls, and every rank makes both:
#
# ```python
# from fsdp_utils import load_distributed, save_distributed
# from fsdp_utils.checkpoint import CheckpointNotFoundError
#
# try:
#     start = load_distributed("run", model, optimizer)["step"]               # on any number of ranks
# except CheckpointNotFoundError:                                             # the first start
#     start = 0
# for step in range(start, 1000):
#     ...                                                                     # your training step
#     if (step + 1) % 100 == 0:
#         save_distributed("run", model, optimizer, step=step + 1, keep=3)    # keeps the last three
# ```
#
# The script uses PyTorch's own module, `torch.distributed.checkpoint` (DCP), because it shows the mechanism. DCP
# alone is enough if you add what its column says:
#
# | | DCP alone | the two calls |
# |:--|:--|:--|
# | the job is killed in a save | give each save a new directory, and skip incomplete ones | the older checkpoint stays the latest |
# | a byte changes on the disk | loads without an error: keep hashes yourself | refused, by its hash |
# | scheduler, random numbers | put them into the dict | `state=`, `per_rank=` |
#
# (`LOCAL_STATE_DICT`, as in the video, is FSDP1's older format, which depends on the units: see the end.)
#
# **When do you need it?** [Lesson 3](03_full_state_dict.ipynb) gathers everything on rank 0. With AdamW, float32
# takes 12 bytes per parameter, so at 7 billion one host holds 84 GB; of 16 ranks, each writes 5.25 GB, all at the
# same time. But all hosts must reach the folder, and other programs do not read it. So save like this while you
# train, and make lesson 3's file when you hand the weights on.

# %% tags=["card"]
lesson.card(
    8,
    learn="save shards, resume on any number of ranks, and refuse a checkpoint that is incomplete or damaged",
    needs="[lesson 3](03_full_state_dict.ipynb)",
    ranks="jobs of 4, 3 and 1 ranks on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 20, 15),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`. It trains 12 steps and saves the state after eight as `step-8`; where it finds that, it
# resumes. So the first command trains and saves, and the next two resume (`rm -r step-8` begins again).
#
# ```python
# from pathlib import Path
#
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch import nn
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# rank, size = dist.get_rank(), dist.get_world_size()
#
# saved = Path("step-8/.metadata").exists()
# torch.manual_seed(1 if saved else 0)                        # a job that resumes has other weights, until it loads
# model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
# fully_shard(model, mesh=init_device_mesh(device, (size,)))  # without a mesh, a Mac would take its GPU
# optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
#
#
# def state_of(step):                                         # what a save writes, and what a load fills
#     weights, averages = get_state_dict(model, optimizer)
#     return {"model": weights, "optimizer": averages, "step": step}
#
#
# losses, state = [], {"step": 0}
# if saved:
#     dcp.load(state := state_of(0), checkpoint_id="step-8")
#     set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# for step in range(state["step"], 12):
#     if step == 8 and not saved:
#         dcp.save(state_of(step), checkpoint_id="step-8")
#     torch.manual_seed(step)
#     x = torch.randn(96, 64, device=device).chunk(size)[rank]                # this rank's share of the batch
#     loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     dist.all_reduce(loss := loss.detach() / size)
#     losses.append(f"{loss:.2f}")
# if rank == 0:
#     print(f"{'resumed' if saved else 'started'} on {size}: {' '.join(losses[-4:])}")
# dist.destroy_process_group()
# ```
# ```text
# $ torchrun --nproc-per-node 4 train.py
# started on 4: 1.15 1.07 1.31 1.03
# $ torchrun --nproc-per-node 3 train.py
# resumed on 3: 1.15 1.07 1.31 1.03
# $ torchrun --nproc-per-node 1 train.py
# resumed on 1: 1.15 1.07 1.31 1.03
# ```
#
# Each line has the losses of steps 9 to 12, averaged over the ranks. The first job did not stop, so its losses are
# right. The others began with other weights and an empty optimizer, and print the same, for two reasons.
#
# The first is resharding. `get_state_dict` returns every weight and every average of AdamW under its name, as a
# DTensor, and gathers nothing. For a save, this dict is what the rank has. For a load, its names say what to read
# and its DTensors which rows, and `dcp.load` writes into their memory, the model's and the optimizer's own.
# `set_state_dict` then restores the optimizer's settings, also its learning rate: the saved one replaces yours. (A
# new optimizer has no averages to fill. `get_state_dict` makes them, by a step that changes no weight but that
# AdamW counts. So call it before the first step only to load, which overwrites the count.)
#
# The second is the batch: 4, 3 and 1 ranks divide the same 96 samples equally. Five cannot, and print other losses.
#
# ## Which file holds which rows?
#
# What `get_state_dict` returns is a **sharded state dict**. `dcp.save` writes one file per rank, `__0_0.distcp`
# for rank 0. Then rank 0 writes `.metadata`, which says which rows of which tensor are in which file.
#
# The next cell saves the script's model, made wider, and asks `.metadata` about its first weight, which has 4,096
# rows. Look for a quarter of the bytes and of the rows in each file. (`run_on_ranks` calls a function on new
# processes. Folded: `build` makes the script's model and optimizer, `train` is its loop.)

# %% jupyter={"source_hidden": true}
import contextlib
import logging
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_utils.checkpoint.save as parts_of_ours
from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed
from fsdp_utils.lessons.tables import Table

folder = Path(tempfile.mkdtemp())
fewer = max(world - 1, 1)
sizes = sorted({world, fewer, 1}, reverse=True)

def plain(seed, width=256):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))

def build(seed, width=256, sharded=True):
    model = plain(seed, width)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)

def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}

def train(model, optimizer, steps, on_each_rank=None, scheduler=None):
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(on_each_rank * size if on_each_rank else 96, 64).chunk(size)[rank]
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
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
metadata = dcp.FileSystemReader(folder / "wide").read_metadata()
rows = []
for piece in metadata.state_dict_metadata["model.0.weight"].chunks:
    (file,) = [place.relative_path for index, place in metadata.storage_data.items()
               if (index.fqn, index.offset) == ("model.0.weight", piece.offsets)]
    begin, size = piece.offsets[0], (folder / "wide" / file).stat().st_size
    rows.append([file, f"{size / complete:.0%}", f"{begin} to {begin + piece.sizes[0] - 1}"])
assert len(rows) == world                                           # nobody has gathered
Table(["file", "its bytes, of model and optimizer", "rows of 0.weight"], sorted(rows))

# %% [markdown]
# Each file has about a quarter of both, so nothing is written twice. (Headers bring the sum above 100%; the second
# layer's 10 rows are cut into 3, 3, 3 and 1.) A checkpoint knows names and rows, not which modules were units. So
# you can resume with other units, or in one process without FSDP. `dcp.load` reads only the names in your dict:
# for the weights alone, give it a dict with `"model"` only.
#
# ## Your turn 1 · A load that reads only its part
#
# **Goal.** Write the core of resharding: fetch the rows that one rank wants from files that another number of
# ranks has written, and read no other row. (DCP reads every shard that it needs in full, then cuts it.)
#
# **Given.**
# - `saved.files` is a list with a pair `(begin, end)` per file: file `i` holds the weight's rows from `begin`
#   up to `end`, `end` not included.
# - `saved.read(i, a, b)` reads rows `a` up to `b` of file `i`, **counted from the first row of that file**, as a
#   tensor of 4 columns.
# - `cut(saved.rows, world)[rank]` is the pair `(first, stop)`: the rows that rank `rank` of `world` wants.
#
# **Return** these rows, in their order, as one tensor. A rank may want none (3 rows on 4 ranks): then return
# `torch.empty(0, 4)`. The test tries 100 cases with up to 33 rows and up to 5 ranks. Over all cases and ranks,
# 1,175 rows are wanted, and exactly so many may be read.
#
# <details><summary>Hint</summary>
#
# The rows that a file and a rank have in common go from the larger beginning to the smaller end. `torch.cat` does
# not accept an empty list.
#
# </details>

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

def cut(rows, ranks):                                       # from where to where each rank's part goes, as in FSDP2
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]

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
        0, "Rows are missing, or not those wanted: `read` counts from the file's own first row; a rank may want "
        "rows of several files, and none of others."),
    "rows read": exactly(
        sum(rows for rows, _, _ in WAYS), less="Some rows are never read.",
        more="Rows are read that this rank does not want, or twice."),
})
def score_rows(my_rows):
    wrong = read = 0
    for rows, saved_by, wanted_by in WAYS:
        for reader, (first, stop) in enumerate(cut(rows, wanted_by)):
            saved = Saved(rows, saved_by)
            which = f"the rows from {first} up to {stop}" if first < stop else "no rows"
            wants = f"Rank {reader} of {wanted_by} wants {which}, and there are {saved_by} files"
            try:
                part = my_rows(saved, reader, wanted_by)
            except (RuntimeError, ValueError, IndexError) as error:
                raise NotYet(f"{wants}: {error}.") from error
            if isinstance(part, torch.Tensor) and part.shape != (stop - first, 4) and first == stop:
                raise NotYet(f"{wants}: return `torch.empty(0, 4)`. The shape here is {tuple(part.shape)}.")
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
        if (a := max(first, begin)) < (b := min(stop, end)):
            mine[a - first : b - first] = saved.read(index, a - begin, b - begin)
    return mine

# %% tags=["wrong"] turn=1 says="return `torch.empty(0, 4)`"
def my_rows(saved, rank, world):                    # no rows, but without columns
    first, stop = cut(saved.rows, world)[rank]
    common = [(i, max(first, a) - a, min(stop, b) - a) for i, (a, b) in enumerate(saved.files)]
    parts = [saved.read(i, a, b) for i, a, b in common if a < b]
    return torch.cat(parts) if parts else torch.empty(0)

# %% tags=["wrong"] turn=1 says="that this rank does not want"
def my_rows(saved, rank, world):                    # everything, and then cut
    first, stop = cut(saved.rows, world)[rank]
    return torch.cat([saved.read(i, 0, end - begin) for i, (begin, end) in enumerate(saved.files)])[first:stop]

# %% tags=["wrong"] turn=1 says="the file's own first row"
def my_rows(saved, rank, world):                    # rows of the weight, not of the file
    first, stop = cut(saved.rows, world)[rank]
    common = [(i, max(first, begin), min(stop, end)) for i, (begin, end) in enumerate(saved.files)]
    return torch.cat([torch.empty(0, 4), *(saved.read(i, a, b) for i, a, b in common if a < b)])

# %% [markdown]
# ## What belongs in a checkpoint?
#
# Everything that the next step depends on, which is more than the weights:
#
# | part | if it is missing | to `save_distributed` | to `load_distributed`, or after it |
# |:--|:--|:--|:--|
# | weights | training starts again | `model` | `model` |
# | the optimizer's state | the loss jumps from the second step on ([lesson 3](03_full_state_dict.ipynb)) | `optimizer` | `optimizer` |
# | the step | samples are repeated | `step=` | go on at `state["step"]` |
# | the learning-rate schedule | the schedule starts again | `state={"scheduler": scheduler}` | the same `state=` |
# | random numbers, of each rank | dropout differs from the run that never stopped | `per_rank={"random": torch.get_rng_state()}` | `torch.set_rng_state(state["random"])`; on a GPU also those of `torch.cuda` |
# | the data loader's position, of each rank | samples are repeated or left out | `per_rank={"loader": loader.state_dict()}` | `loader.load_state_dict(state["loader"])`, with torchdata's `StatefulDataLoader` |
#
# `state=` is for what is equal on all ranks, `per_rank=` for what differs. The next cell saves, with a schedule
# that lowers the learning rate, and resumes in five ways. The last two are mistakes that raise no error: each rank
# keeps its 24 samples although a rank is gone, or `state=` is forgotten at the load. Which column shows each?

# %% tags=["resume"]
def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 16)

def save_all(directory):
    model, optimizer = build(seed=0)
    scheduler = falling(optimizer)
    train(model, optimizer, range(8), scheduler=scheduler)
    save_distributed(directory, model, optimizer, step=8, state={"scheduler": scheduler},
                     per_rank={"random": torch.get_rng_state()})
    return train(model, optimizer, range(8, 12), scheduler=scheduler), f"{scheduler.get_last_lr()[0]:.3f}"

def resume(directory, on_each_rank, objects):
    model, optimizer = build(seed=1, sharded=dist.get_world_size() > 1)     # other weights, to be overwritten
    scheduler = falling(optimizer)
    state = load_distributed(directory, model, optimizer, state={"scheduler": scheduler} if objects else None)
    if isinstance(state["random"], torch.Tensor):                           # as many ranks as have saved
        torch.set_rng_state(state["random"])
    losses = train(model, optimizer, range(state["step"], 12), on_each_rank, scheduler)
    return type(state["random"]).__name__, losses, f"{scheduler.get_last_lr()[0]:.3f}"

never_stopped = run_on_ranks(save_all, folder / "run", world_size=world)[0]
ways = {f"{n} ranks" if n > 1 else "1 process, no FSDP": (n, None, True) for n in sizes}
ways[f"{fewer} ranks, 24 samples each"] = (fewer, 24, True)
ways[f"{world} ranks, no state= at the load"] = (world, None, False)
rows = [["never stopped", 96 // world, "", *never_stopped]]
for name, (n, each, objects) in ways.items():
    found = run_on_ranks(resume, folder / "run", each, objects, world_size=n)[0]
    rows.append([name, each or 96 // n, *found])
assert [tuple(row[3:]) == never_stopped for row in rows] == [True] * (1 + len(sizes)) + [False] * 2
Table(["resumed on", "samples per rank", "random numbers", "losses of steps 9 to 12", "rate after step 12"], rows)

# %% [markdown]
# **The schedule.** The last row has the right learning rate for one step, because the optimizer's state brings it.
# Then the scheduler, which counts from 0 again, sets it to nearly its beginning. Two losses are still right:
# compare several, and print the rate.
#
# **The batch.** Three ranks with 24 samples have a batch of 72: the fourth rank's samples are missing, and the
# losses differ from the first one on. To keep the batch, give each rank more samples or micro-batches.
#
# **Random numbers.** On 4 ranks, each gets back the tensor that it saved. On 3, the fourth's would belong to
# nobody. So `load_distributed` returns a `PerRank`, the list of all four; usually you seed anew. For data loaders,
# go on from the number of samples that the run has seen in all.
#
# ## A directory that is there completely, or not at all
#
# A job may be killed while it saves. In the next cell each job saves step 4, trains on and saves step 8, where rank
# 0 is killed when the others have written their parts. Then a new job loads what is there and prints the loss of a
# batch: right is 1.53 with the weights of step 4, and 1.15 with those of step 8. Look for a loss that is neither.

# %% jupyter={"source_hidden": true}
def or_die(write, written):                                 # rank 0, when the others have written
    def instead(*args, **options):
        if rank := dist.get_rank():
            result = write(*args, **options)
            (written / str(rank)).touch()
            return result
        while len(list(written.iterdir())) < world - 1:
            time.sleep(0.01)
        os._exit(1)
    return instead

def killed_save(older, newer, written):
    warnings.simplefilter("ignore")
    ours, (model, optimizer) = older.parent.name == "ours", build(seed=0)
    where, name = (parts_of_ours, "write_tensors") if ours else (dcp.FileSystemWriter, "write_data")
    for path, step, write in (older, 4, getattr(where, name)), (newer, 8, or_die(getattr(where, name), written)):
        train(model, optimizer, range(step - 4, step))
        with mock.patch.object(where, name, write):
            if ours:
                save_distributed(path.parent, model, optimizer, step=step)
            else:
                dcp.save(state_of(model, optimizer), checkpoint_id=path)

def load_all(paths):
    logging.disable(logging.CRITICAL)
    said = []
    for path in paths:
        model, optimizer = build(seed=1)
        try:
            if path.parent.name == "ours":
                load_distributed(path.parent, model, optimizer, step=8 if path.name == "step-8" else "latest")
            else:
                dcp.load(state := state_of(model, optimizer), checkpoint_id=path)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            largest = max(p.full_tensor().abs().max().item() for p in model.parameters())
            note = f", with a weight of {largest:.0g}" if largest > 100 else ""
            said.append(f"loads: loss {train(model, optimizer, [8])}{note}")
        except (CheckpointException, CheckpointError) as error:
            reason = r"metadata is None|expected a checkpoint of step 8|[\w-]+\.(json|safetensors)"
            said.append(f"refused: {re.search(reason, str(error))[0]}")
    return said

# %% tags=["kills"]
def kill(older, newer):
    older.parent.mkdir()
    with contextlib.suppress(RuntimeError):                                 # a rank has ended
        run_on_ranks(killed_save, older, newer, Path(tempfile.mkdtemp(dir=folder)), world_size=world)

once, each, ours = folder / "once" / "run", folder / "each", folder / "ours"
kill(older=once, newer=once)
kill(older=each / "step-4", newer=each / "step-8")
kill(older=ours / "step-4", newer=ours / "step-8")
newest = max(each.iterdir())                                                # as one would look for it
mixture, refused, latest, step_8 = run_on_ranks(
    load_all, [once, newest, ours / "latest", ours / "step-8"], world_size=world)[0]
assert mixture.startswith("loads")
assert not {"1.53", "1.15"} & set(mixture.split())
absent = "expected a checkpoint of step 8"
assert (refused, latest, step_8) == ("refused: metadata is None", "loads: loss 1.53", f"refused: {absent}")
Table(["a load after the kill", "DCP alone", "save_distributed"], [
    ["all saves into one directory", mixture, latest],
    ["a new directory for each, step 8", refused, step_8],
    ["a new directory for each, the newest", f"is {newest.name}, {refused}", latest],
])

# %% [markdown]
# Row 1 is the trap. By default `dcp.save` writes over an older checkpoint, with the warning `Detected an existing
# checkpoint`. The kill left rank 0's file of step 4, the others' of step 8, and the `.metadata` of step 4. The mixture
# loads, and its loss looks healthy. `save_distributed` makes a new directory for each save.
#
# Row 2 is safe with DCP, too: it writes `.metadata` last, and `dcp.load` refuses a directory without it. But your own
# code sees the directory from the first byte on (row 3), when it looks for the newest one or deletes old ones. The
# cure is to write under a temporary name and to **rename** at the end. A local file system renames at once or not at
# all, so after a kill a directory with its final name is complete; after a power cut, only if the directory was synced,
# as by `save_distributed`. S3 cannot rename a directory: there, the file that is written last marks a complete
# checkpoint, as `.metadata` does.
#
# `save_distributed` writes a manifest last, with size and hash of each file, and renames. Then `keep=3` deletes
# the oldest checkpoint, so the disk needs room for four. All hosts must mount the directory.
#
# ## Your turn 2 · Rename
#
# **Goal.** Write such a save with DCP: a directory that has its final name is complete.
#
# **Given.** `my_save(folder, step, state)` is called on every rank (of processes that stay, which `ranks.start`
# starts). `state` is a sharded state dict, `folder` a `Path` that all ranks see. You also have `dcp`, `dist`,
# `rank` and `world`.
#
# **To do.** Save with `dcp.save(state, checkpoint_id=...)`; return nothing. When the function returns, on any
# rank, `folder / f"step-{step}"` has to be there, and no incomplete directory may ever have a name that begins
# with `step-`. The test makes three saves. In the second, `dcp.save` raises an error before it writes `.metadata`,
# which stands for a kill; then `step-1` must still be the latest.

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

def no_copy(*_, **options):
    raise NotYet("A copy can be interrupted halfway: rename.")

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
            raise NotYet(f"{error.strerror}: do several ranks rename one directory?") from error
        missing = torch.tensor(int(not (folder / f"step-{step}").is_dir()))    # looked up before any rank waits
        dist.all_reduce(missing)
        early += int(missing)

    with mock.patch.multiple(os, rename=slowly(os.rename), replace=slowly(os.replace)), mock.patch("shutil.copytree", no_copy):
        save(1)
        if latest() == "none":
            raise NotYet('There is no directory `folder / "step-1"` after the first save.')
        with mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=InterruptedError), contextlib.suppress(CheckpointException):
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
        unfinished.rename(folder / f"step-{step}")          # fails if an older step-N is there: delete it first
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

# %% tags=["wrong"] turn=2 says="A copy can be interrupted halfway: rename."
def my_save(folder, step, state):                           # a copy has its name before it is complete
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    if rank == 0:
        shutil.copytree(folder / f"unfinished-{step}", folder / f"step-{step}")
    dist.barrier()

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
# A kill is not the only risk: disks fail, and folders change hands. The next cell takes a complete checkpoint of
# DCP alone, and one of `save_distributed`. It flips one bit of one weight, which multiplies this weight by 2^128. Or
# it forges a file: DCP's `.metadata` is a pickle, which may name a function to call at reading, here
# `os.makedirs`.

# %% jupyter={"source_hidden": true}
def flipped(path):                                          # one bit of one weight
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        if (at := data.find(some_weights)) >= 0:
            data[at + 403] ^= 0b01000000                    # the highest bit of weight 100's exponent
            file.write_bytes(data)

def forged(path):                                           # a pickle that calls os.makedirs(marker, 0o777, True)
    attack = f"cos\nmakedirs\n(V{marker}\nI511\nI01\ntR."
    next(path.glob("state.json"), path / ".metadata").write_text(attack)

DAMAGES = {"nothing": lambda path: None, "a bit flipped": flipped, "forged": forged}
marker = folder / "it ran"

def save_both(alone, ours):
    model, optimizer = build(seed=0)
    train(model, optimizer, range(8))
    dcp.save(state_of(model, optimizer), checkpoint_id=alone)
    save_distributed(ours, model, optimizer, step=8)
    return model[0].weight.to_local().detach().numpy().tobytes()

# %% tags=["damage"]
some_weights = run_on_ranks(save_both, folder / "good", folder / "intact", world_size=world)[0]
found = []
for good, kind in ((folder / "good", "dcp"), (next((folder / "intact").glob("*-step-8")), "ours")):
    paths = []
    for name, damage in DAMAGES.items():
        copy = shutil.copytree(good, folder / name / kind / good.name)
        damage(copy)
        paths.append(copy if kind == "dcp" else copy.parent / "latest")
    found.append(run_on_ranks(load_all, paths, world_size=world)[0])
    if marker.exists():                                                 # the attack's function was called
        found[-1][-1] += ", and its code has run"
        marker.rmdir()
assert [said[:5] for said in found[0]] == ["loads", "loads", "refus"]
assert all(said.startswith("refused") for said in found[1][1:])
assert ["code has run" in said[-1] for said in found] == [True, False]
Table(["damage", "DCP alone", "load_distributed"], [list(row) for row in zip(DAMAGES, *found)])

# %% [markdown]
# DCP alone loads the wrong weight, and the loss does not look alarming, because the `tanh` behind the huge weight
# hides it. DCP refuses the forged file, but its code has run. `load_distributed` compares sizes and hashes with the
# manifest before it loads anything, and names the file. Hashes find accidents: a forger can write new ones. But
# safetensors and JSON hold nothing to call. **Load DCP's checkpoints only from people whose code you would run.**
#
# ## Saving while the training goes on
#
# A save stops the training, because the next step would change values that are not written yet. An **asynchronous
# save** copies this rank's shards to host memory, lets the training go on, and writes the copy from a thread:
# `save_distributed(..., asynchronous=True)`, or `dcp.async_save`.
#
# The next cell saves 34 MiB from each of two CPU ranks to one disk, four times in each way; the first is not
# counted. How much of the wait is left?

# %% tags=["async"]
def seconds_blocked(directory):
    model, optimizer = build(seed=0, width=80_000)
    train(model, optimizer, [0])                                        # so that AdamW has a state
    seconds = {False: [], True: []}
    for step, asynchronous in enumerate([False, True] * 4):
        dist.barrier()
        began = time.perf_counter()
        saving = save_distributed(directory, model, optimizer, step=step, keep=1, asynchronous=asynchronous)
        seconds[asynchronous].append(time.perf_counter() - began)
        saving.wait()                                                   # in a job: before the next save
    return [median(times[1:]) for times in seconds.values()]

measured = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = [1000 * max(times) for times in zip(*measured)]
assert blocked[1] < 0.8 * blocked[0]
plots.amounts({"training waits for save_distributed": {
    name: {"median of three saves": ms} for name, ms in zip(("synchronous", "asynchronous"), blocked)}}, unit="ms",
    alt="Milliseconds for which a save blocks the training; an asynchronous one blocks less.")

# %% [markdown]
# What is left is the copy, and some messages between the ranks. Divide the blocked seconds by the seconds between two
# saves: this share of the run is lost. PyTorch's [blog](https://pytorch.org/blog/reducing-checkpointing-times/)
# reports 6.3 s instead of 148.8 s for a 7B model.
#
# You pay with host memory, as much as this rank's shards. An error in the thread is raised by `wait()` of what
# `save_distributed` returns, or by `result()` of `dcp.async_save`'s future. Call either before the next save and
# before `destroy_process_group`. `dcp.async_save` also needs a backend for CPUs beside NCCL; the script's
# `cpu:gloo,cuda:nccl` has one, so you can replace its `dcp.save`.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# FSDP1 joins the parameters of a unit into one flat parameter. `LOCAL_STATE_DICT` holds this rank's piece of it,
# without the names in it; `SHARDED_STATE_DICT` holds this rank's rows of each parameter. Both saved by DCP with
# the model as one unit, and loaded:

# %% tags=["local"] jupyter={"source_hidden": true}
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def in_2022(right=None, units=None):                                # right: what the saved model computes
    warnings.simplefilter("ignore")                                 # these functions of FSDP1 are deprecated
    said = []
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        model = FSDP(plain(seed=1 if right else 0), device_id=torch.device("cpu"), auto_wrap_policy=units)
        try:
            with FSDP.state_dict_type(model, kind), torch.no_grad():
                (dcp.load if right else dcp.save)(state := model.state_dict(), checkpoint_id=folder / kind.name)
                model.load_state_dict(state)
            said.append(model(torch.arange(64.0).view(1, 64)).sum().item())
        except CheckpointException as error:                        # a BaseException, not an Exception
            said.append("no " + re.search(r"Missing key in checkpoint state_dict: ([\w.]+)\.", str(error))[1])
    return ["loads" if right and a == b else a for a, b in zip(said, right or said)]

right = run_on_ranks(in_2022, world_size=world)[0]
ways = {str(size): (size, None) for size in sizes} | {f"{world}, other units": (world, ModuleWrapPolicy({nn.Linear}))}
rows = [[name, *run_on_ranks(in_2022, right, units, world_size=size)[0]] for name, (size, units) in ways.items()]
local = [*["loads"] * (len(sizes) - 1), "no 0.bias", "no 0._flat_param"]
assert rows == [[name, said, "loads"] for name, said in zip(ways, local)]
Table([f"saved by {world}, loaded on", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"], rows)

# %% [markdown]
# The local state dict loads on 3 ranks under `torch.no_grad()`; without it, autograd refuses. But the only name in
# it is the unit's, `_flat_param`. Other units have other names, and on one rank FSDP1 does not shard, and keeps
# `0.bias`. The sharded one has the parameters' names and loads on all; `get_state_dict` returns this format.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `dcp.save` hangs, then times out | only one rank calls it: `if rank == 0:`, as for `torch.save` | all ranks call it |
# | `metadata is None; …` from `dcp.load` | the save was interrupted, or each host wrote to its own disk | load a complete one, from a directory that all hosts mount |
# | `Missing key in checkpoint state_dict` | the model has a name that the checkpoint lacks | `DefaultLoadPlanner(allow_partial_load=True)` if it is meant |
# | `except Exception` does not catch a failed `dcp.load` | `CheckpointException` is a `BaseException` | name it |
# | other programs cannot read the folder | its format is DCP's, or ours | `dcp_to_torch_save` of `torch.distributed.checkpoint.format_utils`; `export_safetensors` |
#
# ## The rule
#
# All ranks save the sharded state of model and optimizer, with all else that the next step depends on, into a new
# directory that gets its name when it is complete (with DCP alone, by turn 2's rename). Any number of ranks loads
# it; decide then about the batch. [Lesson 10](10_end_to_end.ipynb) builds a job on this.

# %% jupyter={"source_hidden": true}
shutil.rmtree(folder)
ranks.stop()

# %% [markdown]
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

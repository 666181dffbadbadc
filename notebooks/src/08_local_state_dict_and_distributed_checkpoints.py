# %% [markdown]
# # 8 · Save to resume on other ranks
#
# Four ranks train today, and tomorrow there may be three. How do I save so that I can resume on other ranks?
# **Each rank writes its own shards, and one more file lists which rows are where. At a load, each rank takes its rows
# from the files that hold them.** No tensor is gathered.

# %% jupyter={"source_hidden": true}
import os

from fsdp_utils.lessons import lesson, plots

world = int(os.environ.get("FSDP_RANKS", 4))

plots.resharding(256, saved_by=4, wanted_by=3)

# %% [markdown]
# The colour of a row is the file that holds it. Three ranks cut this weight into larger parts than four, so each
# part lies in two files. Finding and fetching these rows is **resharding**.
#
# In your job, use these two calls, on every rank:
#
# ```python
# from fsdp_utils import load_distributed, save_distributed
# from fsdp_utils.checkpoint import CheckpointNotFoundError
#
# try:
#     start = load_distributed("run", model, optimizer)["step"]               # on any number of ranks
# except CheckpointNotFoundError:
#     start = 0
# print("steps done:", start)                                                 # 0 after a restart: a mistyped path?
# for step in range(start, 1000):
#     ...                                                                     # your training step
#     if (step + 1) % 100 == 0:
#         save_distributed("run", model, optimizer, step=step + 1, keep=3)    # keeps the last three
# ```
#
# The script below is a complete job with PyTorch's own module, `torch.distributed.checkpoint` (DCP), because it shows
# the mechanism. If you stay with DCP, copy it, and mind:
#
# | | with DCP, you | the two calls |
# |:--|:--|:--|
# | the job is killed in a save | rename the directory at the end, as the script does | keep the older one as the latest |
# | a byte of a tensor changes on the disk | keep hashes: DCP loads it without an error | refuse it, by its hash |
# | scheduler | put it into the dict | take `state=` |
# | random numbers, of each rank | put them into the dict as `f"random-{rank}"`: under one name, DCP saves one rank's | take `per_rank=` |
#
# **When do you need it?** [Lesson 3](03_full_state_dict.ipynb) gathers everything on rank 0. In float32, a weight and
# AdamW's two averages take 3 x 4 bytes, so at 7 billion parameters one host holds 84 GB. Of 16 ranks, each writes a
# sixteenth, 5.25 GB, at the same time. But all hosts must reach the folder, and other programs do not read it. So save
# like this while you train, and export when you hand the weights on.

# %% tags=["card"]
lesson.card(
    8,
    learn="save shards, resume on any number of ranks, and refuse a checkpoint that is incomplete or damaged",
    needs="[lesson 3](03_full_state_dict.ipynb)",
    ranks="jobs of 4, 3 and 1 ranks on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 28, 18),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`; with fewer GPUs than ranks, put `CUDA_VISIBLE_DEVICES=""` in front of `torchrun`. It trains 12
# steps and saves the state after eight as `step-8`; where it finds that, it resumes. So the first command trains and
# saves, and the next two resume (`rm -r step-8` begins again).
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
# saved = Path("step-8").exists()
# torch.manual_seed(1 if saved else 0)                        # a job that resumes has other weights, until it loads
# model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
# fully_shard(model, mesh=init_device_mesh(device, (size,)))  # without a mesh, a Mac would take its GPU
# optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
#
# def state_of(model, optimizer):                             # what a save writes, and what a load fills
#     weights, averages = get_state_dict(model, optimizer)
#     return {"model": weights, "optimizer": averages}
#
# losses, state = [], {"step": 0}
# if saved:
#     state |= state_of(model, optimizer)
#     dcp.load(state, checkpoint_id="step-8")
#     set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# for step in range(state["step"], 12):
#     if step == 8 and not saved:
#         dcp.save(state_of(model, optimizer) | {"step": step}, checkpoint_id="unfinished")
#         if rank == 0:
#             Path("unfinished").rename("step-8")             # complete before it has this name
#         dist.barrier()
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
# **Resharding.** `get_state_dict` returns every weight and every average of AdamW under its name, as a DTensor, and
# gathers nothing. (For a new optimizer, it makes averages first.) A save writes what the DTensors hold. A load reads
# this rank's rows of each name in the dict. It writes them into the tensors of the model and the optimizer themselves,
# so `set_state_dict` only has to restore the optimizer's settings. The saved learning rate replaces yours.
#
# **The batch.** 4, 3 and 1 ranks divide the same 96 samples equally. Five cannot, and print other losses.
#
# ## Which file holds which rows?
#
# What `get_state_dict` returns is a **sharded state dict**. `dcp.save` writes one file per rank, `__0_0.distcp` for rank
# 0. Then rank 0 writes `.metadata`, which says which rows of which tensor are in which file. The next cell saves the
# script's model, made wider, so that its first weight has 4,096 rows. The table is what `.metadata` says of it.
# (`run_on_ranks` calls a function on new processes. Folded: `build` makes model and optimizer, `train` is the loop.)

# %% jupyter={"source_hidden": true}
import contextlib
import logging
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

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
    weights, averages = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": averages}

def train(model, optimizer, steps, on_each_rank=None, scheduler=None):
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(on_each_rank * size if on_each_rank else 96, 64).chunk(size)[rank]
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler and scheduler.step()
        dist.all_reduce(loss := loss.detach() / size)
        losses.append(f"{loss:.2f}")
    return " ".join(losses)

# %%
def save_wide(path):
    model, optimizer = build(seed=0, width=4096)
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=path)

run_on_ranks(save_wide, folder / "wide", world_size=world)
metadata = dcp.FileSystemReader(folder / "wide").read_metadata()

# %% tags=["files"] jupyter={"source_hidden": true}
complete = 12 * sum(p.numel() for p in plain(seed=0, width=4096).parameters())      # bytes: weights, two averages
rows = []
for piece in metadata.state_dict_metadata["model.0.weight"].chunks:
    (file,) = [place.relative_path for index, place in metadata.storage_data.items()
               if (index.fqn, index.offset) == ("model.0.weight", piece.offsets)]
    begin, size = piece.offsets[0], (folder / "wide" / file).stat().st_size
    rows.append([file, f"{size / complete:.0%}", f"{begin} to {begin + piece.sizes[0] - 1}"])
assert len(rows) == world                                           # nobody has gathered
Table(["file", "its bytes, of model and optimizer", "rows of 0.weight"], sorted(rows))

# %% [markdown]
# Each file has about a quarter of both, so nothing is written twice. (Headers bring the sum above 100%. The last file
# has one of the second layer's 10 rows, the others three.)
#
# A checkpoint knows names and rows, not which modules were units. So you can resume with other units, or in one
# process without FSDP. `dcp.load` reads only the names in your dict: for the weights alone, give it `"model"` only.
#
# ## Your turn 1 · A load that reads only its part
#
# **Goal.** Write the core of resharding: fetch one rank's rows, and no others, from files of another number of ranks.
#
# **Given.**
# - `saved.files` has a pair `(begin, end)` per file: file `i` holds the weight's rows from `begin` to `end - 1`.
# - `saved.read(i, a, b)` reads rows `a` to `b - 1` **of that file, counted from its own first**, as `f32[b - a, 4]`.
# - `cut(saved.rows, world)[rank]` is the pair `(first, stop)`: rank `rank` of `world` wants rows `first` to `stop - 1`.
#
# **Return** these rows, in their order, as one tensor. A rank may want none (3 rows on 4 ranks): then return
# `torch.empty(0, 4)`. The test tries 33, 10, 3 and 1 rows with all 25 pairs of 1 to 5 ranks. Read each row once.
#
# <details><summary>Hint</summary>
#
# The rows that a file and a rank share go from the larger beginning to the smaller end. `torch.cat` refuses `[]`.
#
# </details>

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import Goal, NotYet, exactly, turn

def cut(rows, ranks):                                       # from where to where each rank's part goes, as in FSDP2
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]

class Saved:                                                # a weight in files, one from each rank that saved
    def __init__(self, rows, ranks):
        self.rows, self.files, self.rows_read, self.beyond = rows, cut(rows, ranks), 0, ""
        self.weight = torch.arange(4.0 * rows).view(rows, 4)

    def read(self, index, first, stop):
        own = self.weight[slice(*self.files[index])]
        if not 0 <= first <= stop <= len(own):
            self.beyond = f" `read({index}, {first}, {stop})`: file {index} has {len(own)} rows, counted from its own first."
        self.rows_read += len(part := own[first:stop].clone())
        return part

WAYS = [(rows, a, b) for rows in (33, 10, 3, 1) for a in range(1, 6) for b in range(1, 6)]
mistakes = []                                               # a sentence for each part that is wrong

@turn(1, {
    "parts that are wrong": Goal("0", lambda found: found == 0, lambda _: mistakes[0]),
    "rows read": exactly(sum(rows for rows, _, _ in WAYS), less="Some rows are never read.",
                         more="Rows are read that this rank does not want, or twice."),
})
def score_rows(my_rows):
    read = 0
    mistakes.clear()
    for rows, saved_by, wanted_by in WAYS:
        for reader, (first, stop) in enumerate(cut(rows, wanted_by)):
            saved = Saved(rows, saved_by)
            rows_wanted = f"the rows from {first} up to {stop}" if first < stop else "no rows"
            wants = f"Rank {reader} of {wanted_by} wants {rows_wanted} of {saved_by} file(s)"
            try:
                part = my_rows(saved, reader, wanted_by)
            except (RuntimeError, ValueError, IndexError) as error:
                raise NotYet(f"{wants}: {error}.") from error
            if not isinstance(part, torch.Tensor):
                raise NotYet(f"{wants}: return one tensor, not a {type(part).__name__}.")
            if not torch.equal(part, saved.weight[first:stop]):
                came = "other rows" if part.shape == (stop - first, 4) else f"a tensor of shape {tuple(part.shape)}"
                mistakes.append(f"{wants}: {came} came.{saved.beyond}{'' if first < stop else ' Then return `torch.empty(0, 4)`.'}")
            read += saved.rows_read
    return {"parts that are wrong": len(mistakes), "rows read": read}

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
# %% tags=["wrong"] turn=1 says="counted from its own first"
def my_rows(saved, rank, world):                    # rows of the weight, not of the file
    first, stop = cut(saved.rows, world)[rank]
    common = [(i, max(first, begin), min(stop, end)) for i, (begin, end) in enumerate(saved.files)]
    return torch.cat([torch.empty(0, 4), *(saved.read(i, a, b) for i, a, b in common if a < b)])
# %% tags=["wrong"] turn=1 says="wants the rows from 17 up to 33 of 1 file(s): list index"
my_rows = lambda saved, rank, world: (              # the file of the same number
    saved.read(rank, *(row - saved.files[rank][0] for row in cut(saved.rows, world)[rank])))
# %% tags=["wrong"] turn=1 says="up to 33 of 1 file(s): a tensor of shape (32, 4) came."
def my_rows(saved, rank, world):                    # without the last row
    first, stop = cut(saved.rows, world)[rank]
    common = [(i, max(first, a) - a, min(stop - 1, b) - a) for i, (a, b) in enumerate(saved.files)]
    return torch.cat([torch.empty(0, 4), *(saved.read(i, a, b) for i, a, b in common if a < b)])
# %% tags=["wrong"] turn=1 says="return one tensor, not a list"
def my_rows(saved, rank, world):                    # parts that nobody puts together
    return [saved.read(i, 0, end - begin) for i, (begin, end) in enumerate(saved.files)]

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
# | random numbers, of each rank | dropout differs from the run that never stopped | `per_rank={"random": torch.get_rng_state()}` | on as many ranks, `torch.set_rng_state(state["random"])`; on a GPU also those of `torch.cuda` |
# | the data loader's position, of each rank | samples are repeated or left out | `per_rank={"loader": loader.state_dict()}` | on as many ranks, `loader.load_state_dict(state["loader"])`, with torchdata's `StatefulDataLoader` |
#
# `state=` is for what is equal on all ranks, `per_rank=` for what differs. The next cell shows both calls, with a
# schedule that lowers the learning rate. The folded cell after it saves once and resumes in five ways. The last two are
# mistakes that raise no error: each rank keeps its 24 samples although a rank is gone, or the load forgets `state=`.

# %%
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

# %% tags=["resume"] jupyter={"source_hidden": true}
never_stopped = run_on_ranks(save_all, folder / "run", world_size=world)[0]
ways = {f"{n} ranks" if n > 1 else "1 process, no FSDP": (n, None, True) for n in sizes}
ways |= {f"{fewer} ranks, 24 samples each": (fewer, 24, True), f"{world} ranks, no state= at the load": (world, None, False)}
rows = [["never stopped", 96 // world, "", *never_stopped]]
for name, (n, each, objects) in ways.items():
    found = run_on_ranks(resume, folder / "run", each, objects, world_size=n)[0]
    rows.append([name, each or 96 // n, *found])
assert [tuple(row[3:]) == never_stopped for row in rows] == [True] * (1 + len(sizes)) + [False] * 2
Table(["resumed on", "samples per rank", "random numbers", "losses of steps 9 to 12", "rate after step 12"], rows)

# %% [markdown]
# **The schedule.** The last row has the right rate for one step, because the optimizer's state brings it. Then the
# scheduler counts from 0 again. Two losses are still right: compare several, and print the rate.
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
# A job may be killed while it saves. Each job of the next cell saves step 4, trains on and saves step 8, where rank 0 is
# killed when the others have written their parts (`kill_rank_0`, folded). Then a new job loads what is there. Its loss
# in step 9 is 1.15 with the weights of step 8, as the script has it, and 1.53 with those of step 4.

# %% jupyter={"source_hidden": true}
def kill_rank_0(written):                                   # in the next save, when the others have written
    def or_die(write):
        def instead(*args, **options):
            if rank := dist.get_rank():
                result = write(*args, **options)
                (written / str(rank)).touch()
                return result
            while len(list(written.iterdir())) < world - 1:
                time.sleep(0.01)
            os._exit(1)
        return instead
    dcp.FileSystemWriter.write_data = or_die(dcp.FileSystemWriter.write_data)
    parts_of_ours.write_tensors = or_die(parts_of_ours.write_tensors)

def load_all(places):                                       # a directory, with the step for load_distributed
    logging.disable(logging.CRITICAL)
    said = []
    for path, step in places:
        model, optimizer = build(seed=1)
        try:
            if step:
                load_distributed(path, model, optimizer, step=step)
            else:
                dcp.load(state := state_of(model, optimizer), checkpoint_id=path)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            largest = max(p.full_tensor().abs().max().item() for p in model.parameters())
            note = f", with a weight of {largest:.0g}" if largest > 100 else ""
            said.append(f"loads: loss {train(model, optimizer, [8])}{note}")
        except (CheckpointException, CheckpointError) as error:
            why = re.search(r"metadata is None|expected a checkpoint of step 8|[\w-]+\.safetensors", str(error))[0]
            said.append(f"refused: {why}")
    return said

# %%
def save_dcp(path, model, optimizer, step):
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    dcp.save(state_of(model, optimizer), checkpoint_id=path)

def killed_save(save, older, newer, written):
    model, optimizer = build(seed=0)
    train(model, optimizer, range(4))
    save(older, model, optimizer, step=4)
    train(model, optimizer, range(4, 8))
    kill_rank_0(written)                                    # in what follows; written: where the others report
    save(newer, model, optimizer, step=8)

once, each, ours = folder / "once", folder / "each", folder / "ours"
for way in (save_dcp, once, once), (save_dcp, each / "step-4", each / "step-8"), (save_distributed, ours, ours):
    with contextlib.suppress(RuntimeError):                 # run_on_ranks says that a rank has ended
        run_on_ranks(killed_save, *way, Path(tempfile.mkdtemp(dir=folder)), world_size=world)

# %% tags=["kills"] jupyter={"source_hidden": true}
newest = max(each.iterdir())                                # as one would look for it
found = run_on_ranks(load_all, [(once, None), (newest, None), (ours, "latest"), (ours, 8)], world_size=world)[0]
assert found[0].startswith("loads")
assert not {"1.53", "1.15"} & set(found[0].split())
assert found[1:] == ["refused: metadata is None", "loads: loss 1.53", "refused: expected a checkpoint of step 8"]
Table(["saved by", "what you load", "after the kill"], [list(row) for row in zip(
    ["DCP, both steps into one directory", "DCP, a new directory for each", *["save_distributed"] * 2],
    ["the directory", f"the newest, {newest.name}", "the latest", "step 8"], found)])

# %% [markdown]
# Row 1 is the trap. By default `dcp.save` writes over an older checkpoint, with the warning `Detected an existing
# checkpoint`. The kill left rank 0's file of step 4, the others' of step 8, and the `.metadata` of step 4. The mixture
# loads, and its loss looks healthy. Row 2 is refused, because DCP writes `.metadata` last. But your own code sees the
# directory from the first byte on: it is the newest one, and a clean-up may delete step 4 for it.
#
# The cure is the script's: write under a temporary name and **rename** at the end. A local file system renames at once
# or not at all, so after a kill a directory with its final name is complete; after a power cut, only if synced, as by
# `save_distributed`.
#
# `save_distributed` (rows 3 and 4) writes a manifest last, with size and hash of each file, and renames. Then `keep=3`
# deletes the oldest checkpoint, so the disk needs room for four.
#
# ## Your turn 2 · Save over an older step
#
# **Goal.** Make a function of the script's save that also works where `step-N` is there already. A job that has gone
# back to an older checkpoint comes to step N again, and the script's `rename` would fail.
#
# **Given.** `my_save(folder, step, state)` is called on every rank. `state` is a sharded state dict, `folder` a `Path`
# that all ranks see. You also have `dcp`, `dist`, `shutil` and `rank`.
#
# **To do.** Save with `dcp.save(state, checkpoint_id=...)`; return nothing. When the function returns, on any rank,
# `folder / f"step-{step}"` has to be the new checkpoint. No directory whose name begins with `step-` may ever be
# incomplete, neither while it is made nor while it is deleted. The test saves step 1, step 2, which fails before
# `.metadata` is written, and step 1 again with other values. After the failure, `step-1` must be the latest.

# %%
from fsdp_utils.notebook import ranks
ranks.start(device="cpu")

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import os
import shutil
import sys
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

from fsdp_utils.lessons.your_turn import Goal, NotYet, exactly, turn

rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
warnings.filterwarnings("ignore", message="Detected an existing checkpoint")

def weight(value):
    return {"weight": distribute_tensor(torch.full((8 * world, 4), float(value)), mesh, [Shard(0)])}

calls = {}                                                  # with the final name; empty where nothing is tested
def watch(event, args):
    if calls and event == "os.rename":
        time.sleep(0.2)
    elif calls and event in calls and Path(os.fsdecode(args[0])).match("turn-2-*/step-*"):
        calls[event] += 1
sys.addaudithook(watch)                                     # Python tells it of each call, also of pathlib's and shutil's

GOALS = {
    "ranks that return too early": exactly(0, "A rank returns before the directory has its name: wait, on all ranks, for the rank that renames."),
    "latest after an interruption": exactly("step-1", "An interrupted save counts as a checkpoint: give the directory its name at the end."),
    "made with the final name": exactly(0, "A directory has its final name before its files are there: rename the finished directory."),
    "deleted with the final name": exactly(0, "While you delete the older directory, an incomplete one has the final name: rename it first."),
    "save in step-1 at the end": Goal("the second", lambda value: value == "the second", lambda value:
        "`step-1` still holds its first save: move that away before you rename." if value == "the first" else
        "`step-1` is not there, or not complete: do all ranks write to the same directory?"),
}

@turn(2, GOALS, returns=False)
def score_save(my_save):
    shared = [tempfile.mkdtemp(prefix="turn-2-") if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    folder, early = Path(shared[0]), 0

    def latest():
        dist.barrier()
        return max((path.name for path in folder.glob("step-*")), default="none")

    def save(step, value):
        nonlocal early
        try:
            my_save(folder, step, weight(value))
        except OSError as error:
            why = "move the older directory away before you rename." if "empty" in str(error) else "do several ranks rename one directory?"
            raise NotYet(f"{error.strerror}: {why}") from error
        missing = torch.tensor(int(not (folder / f"step-{step}").is_dir()))    # looked up before any rank waits
        dist.all_reduce(missing)
        early += int(missing)

    calls.update({"os.mkdir": 0, "os.rmdir": 0})
    save(1, value=1)
    if latest() == "none":
        raise NotYet('There is no directory `folder / "step-1"` after the first save.')
    with mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=InterruptedError), contextlib.suppress(CheckpointException):
        my_save(folder, 2, weight(3))
    stopped = latest()
    save(1, value=2)
    state = weight(0)
    with contextlib.suppress(CheckpointException):
        dcp.load(state, checkpoint_id=folder / "step-1")
    held = {0: "none", 1: "the first", 2: "the second"}.get(state["weight"].to_local().mean().item(), "a mixture")
    found = dict(zip(GOALS, [early, stopped, *calls.values(), held]))
    calls.clear()
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return found

# %%
# %%turn 2
def my_save(folder, step, state):
    # 1. all ranks save, under a name that no reader takes for a checkpoint
    # 2. one rank renames, after it has moved an older directory away
    # 3. the others wait for it
    return None                                             # your lines here

# %% tags=["solution"] turn=2
def my_save(folder, step, state):
    unfinished, final, old = (folder / f"{name}-{step}" for name in ("unfinished", "step", "old"))
    dcp.save(state, checkpoint_id=unfinished)               # returns when all ranks have written
    if rank == 0:
        shutil.rmtree(old, ignore_errors=True)              # from a job that was killed here
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()                                          # the others wait for rank 0
# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # the last rank renames, and an all_reduce waits
    new, final = folder / f"tmp{step}", folder / f"step-{step}"
    dcp.save(state, checkpoint_id=new)
    rank == world - 1 and final.is_dir() and final.replace(folder / f"gone{step}")
    rank == world - 1 and new.replace(final)
    dist.all_reduce(torch.zeros(1))
# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # a writer, and a directory that rank 0 names
    name = [tempfile.mkdtemp(dir=folder) if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(name[0]))
    rank or ((final := folder / f"step-{step}").exists() and shutil.rmtree(shutil.move(final, tempfile.mkdtemp(dir=folder))))
    rank or shutil.move(name[0], final)
    dist.barrier()
# %% tags=["right"] turn=2
def my_save(folder, step, state):                           # the older one goes first; rank 0 says that it is done
    final, new = folder / f"step-{step}", folder / ".new"
    rank == 0 and final.exists() and shutil.rmtree(final.rename(folder / ".old"))
    dcp.save(state, checkpoint_id=new)
    dist.broadcast_object_list([rank == 0 and str(new.rename(final))], src=0)
# %% tags=["wrong"] turn=2 says="An interrupted save counts"
def my_save(folder, step, state):                           # under its name from the beginning
    dcp.save(state, checkpoint_id=folder / f"step-{step}")
# %% tags=["wrong"] turn=2 says="before its files are there"
def my_save(folder, step, state):                           # a copy has its name before it is complete
    dcp.save(state, checkpoint_id=folder / "new")
    rank or shutil.copytree(folder / "new", folder / f"step-{step}", dirs_exist_ok=True)
    dist.barrier()
# %% tags=["wrong"] turn=2 says="before its files are there"
def my_save(folder, step, state):                           # file by file
    dcp.save(state, checkpoint_id=folder / "new")
    rank or (folder / f"step-{step}").mkdir(exist_ok=True)
    rank or [file.replace(folder / f"step-{step}" / file.name) for file in (folder / "new").iterdir()]
    dist.barrier()
# %% tags=["wrong"] turn=2 says="While you delete the older directory"
def my_save(folder, step, state):                           # half deleted, the older one still has its name
    dcp.save(state, checkpoint_id=folder / "new")
    rank or shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
    rank or (folder / "new").rename(folder / f"step-{step}")
    dist.barrier()
# %% tags=["wrong"] turn=2 says="not empty: move the older directory away"
def my_save(folder, step, state):                           # the script's
    dcp.save(state, checkpoint_id=folder / "new")
    rank or (folder / "new").rename(folder / f"step-{step}")
    dist.barrier()
# %% tags=["wrong"] turn=2 says="still holds its first save"
def my_save(folder, step, state):                           # shutil.move moves into the older one
    dcp.save(state, checkpoint_id=folder / "new")
    rank or shutil.move(folder / "new", folder / f"step-{step}")
    dist.barrier()
# %% tags=["wrong"] turn=2 says="before the directory has its name"
def my_save(folder, step, state):                           # nobody waits for rank 0
    dcp.save(state, checkpoint_id=folder / "new")
    rank == 0 and (final := folder / f"step-{step}").exists() and final.rename(folder / "old")
    rank or (folder / "new").rename(folder / f"step-{step}")
# %% tags=["wrong"] turn=2 says="do several ranks rename"
def my_save(folder, step, state):                           # every rank renames
    dcp.save(state, checkpoint_id=folder / "new")
    (folder / "new").rename(folder / f"step-{step}")
    dist.barrier()
# %% tags=["wrong"] turn=2 says="write to the same directory"
def my_save(folder, step, state):                           # another directory on each rank
    dcp.save(state, checkpoint_id=(unfinished := Path(tempfile.mkdtemp(dir=folder))))
    rank == 0 and (final := folder / f"step-{step}").exists() and final.rename(folder / "old")
    rank or unfinished.rename(folder / f"step-{step}")
    dist.barrier()

# %% [markdown]
# ## Who notices damage?
#
# Disks fail, too. The next cell saves step 8 with DCP alone and with `save_distributed`. Then it flips one bit, the
# highest of one weight's exponent, which multiplies this weight by 2^128.

# %% tags=["damage"]
def before_and_after(alone, ours):
    model, optimizer = build(seed=0)
    train(model, optimizer, range(8))
    save_dcp(alone, model, optimizer, step=8)
    save_distributed(ours, model, optimizer, step=8)
    intact = load_all([(alone, None), (ours, 8)])
    if dist.get_rank() == 0:
        weights = model[0].weight.to_local().detach().numpy().tobytes()
        for file in (*alone.iterdir(), *ours.glob("*/*")):
            data = bytearray(file.read_bytes())
            if (at := data.find(weights)) >= 0:             # this file has rank 0's rows of the first weight
                data[at + 4 * 100 + 3] ^= 0b01000000        # in the highest of weight 100's four bytes
                file.write_bytes(data)
    dist.barrier()
    return intact, load_all([(alone, None), (ours, 8)])

intact, damaged = run_on_ranks(before_and_after, folder / "alone", folder / "intact", world_size=world)[0]
assert intact == ["loads: loss 1.15"] * 2
assert [said[:5] for said in damaged] == ["loads", "refus"]
Table(["damage", "DCP alone", "load_distributed"], [["none", *intact], ["a bit flipped", *damaged]])

# %% [markdown]
# DCP alone loads the wrong weight, and the loss looks healthy, because the `tanh` behind the huge weight hides it.
# `load_distributed` first reads every file once more, compares sizes and hashes with the manifest, and names the file.
#
# DCP's `.metadata` is a pickle, which may name a function to call at reading; safetensors and JSON hold nothing to
# call. **Load DCP's checkpoints only from people whose code you would run.**
#
# ## Saving while the training goes on
#
# An **asynchronous save** copies this rank's shards to host memory, lets the training go on, and writes the copy from
# a thread: `save_distributed(..., asynchronous=True)`, or `dcp.async_save`. The next cell saves 34 MiB from each of two
# CPU ranks to one disk, four times in each way; the first is not counted. How long does the training wait?

# %% tags=["async"]
def seconds_blocked(directory):
    model, optimizer = build(seed=0, width=80_000)
    train(model, optimizer, [0])                                        # so that AdamW has a state
    saves = {"dcp.save": (save_dcp, {}), "save_distributed": (save_distributed, {"keep": 1}),
             "save_distributed, asynchronous": (save_distributed, {"keep": 1, "asynchronous": True})}
    seconds = {name: [] for name in saves}
    for step in range(4):
        for name, (save, options) in saves.items():
            dist.barrier()
            began = time.perf_counter()
            saving = save(directory / name, model, optimizer, step=step, **options)
            seconds[name].append(time.perf_counter() - began)
            saving and saving.wait()                                    # in a job: before the next save
    return {name: sorted(times[1:])[1] for name, times in seconds.items()}

measured = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = {name: 1000 * max(times[name] for times in measured) for name in measured[0]}
assert blocked["save_distributed, asynchronous"] < 0.8 * blocked["save_distributed"]
plots.amounts({"training waits": {name: {"median of three saves": ms} for name, ms in blocked.items()}}, unit="ms")

# %% [markdown]
# `save_distributed` also hashes the files and compares the ranks: which of the first two bars is longer changes from
# run to run. Of an asynchronous save, the copy and some messages remain. Divide the blocked seconds by those between
# two saves: this share of the run is lost. PyTorch's [blog](https://pytorch.org/blog/reducing-checkpointing-times/)
# reports 6.3 s instead of 148.8 s for a 7B model.
#
# You pay with host memory, as much as this rank's shards. An error in the thread is raised by `wait()` of what
# `save_distributed` returns, or by `result()` of `dcp.async_save`'s future. Call either before the next save and before
# `destroy_process_group`. `dcp.async_save` also needs a backend for CPUs beside NCCL, such as the script's.
#
# ## From shards to `from_pretrained`
#
# Your users want a folder that transformers reads. `export_safetensors("run", "exported")` of `fsdp_utils` writes
# `model.safetensors` and `config.json`, in one process, a tensor at a time. Add `tokenizer.save_pretrained("exported")`.
# `from_pretrained("exported")` then gives a model with equal logits (`tests/test_export.py`). From DCP alone,
# `dcp_to_torch_save`, of `torch.distributed.checkpoint.format_utils`, makes a file for `torch.load`.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# FSDP1 joins the parameters of a unit into one flat parameter. `LOCAL_STATE_DICT` holds this rank's piece of it, and
# loads only into the same units. `SHARDED_STATE_DICT`, which FSDP2's `get_state_dict` returns, holds this rank's rows
# of each parameter. Each digit is the rank of a row, in a unit of 24 and 8:
#
# ```text
# LOCAL      00000000111111112222222233333333      one name, _flat_param
# SHARDED    000000111111222222333333 00112233     two names, 0.weight and 0.bias
# ```
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `Directory not empty` at the rename | the job went back to an older step, and `step-N` is there | move it away first, as in turn 2 |
# | `metadata is None; …` from `dcp.load` | the save was interrupted, or each host wrote to its own disk | load a complete one, from a directory that all hosts mount |
# | `Missing key in checkpoint state_dict` | the model has a name that the checkpoint lacks | `DefaultLoadPlanner(allow_partial_load=True)` if it is meant |
# | `except Exception` does not catch a failed `dcp.load` | `CheckpointException` is a `BaseException` | name it |
# | the first step has another size than without saves | `get_state_dict` before it: AdamW counts the empty step that makes its averages | call it after a step, or to load |
#
# ## The rule
#
# All ranks save the sharded state of model and optimizer, with all else that the next step depends on, into a new
# directory that gets its name when it is complete (with DCP alone, as in turn 2). Any number of ranks loads it; decide
# then about the batch. [Lesson 10](10_end_to_end.ipynb) builds a job on this.

# %% jupyter={"source_hidden": true}
shutil.rmtree(folder)
ranks.stop()

# %% [markdown]
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

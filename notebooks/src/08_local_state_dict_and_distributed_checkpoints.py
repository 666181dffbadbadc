# %% [markdown]
# # 8 · LOCAL_STATE_DICT and distributed checkpoints
#
# Gathering a model on one rank, to save it in one file, takes a rank that can hold the model. Without
# gathering, every rank saves its own part. The checkpoints of the video, from 2022, could be loaded by the
# same number of ranks only. In this lesson you load on another number, save while the training goes on, and
# damage checkpoints to see who notices.

# %% [markdown] tags=["card"]
# learn:
# - what LOCAL_STATE_DICT saved, and what can still be done with it
# - how to save on four ranks and go on with three, then with one
# - what an asynchronous save costs the training
# - which damage PyTorch's distributed checkpoints notice, and which they load
# - how to get from a directory of shards to `from_pretrained`
# needs: '[lesson 3](03_full_state_dict.ipynb) · no GPU'
# ranks: jobs of 4, 3 and 1 ranks, on the CPU. With `FSDP_RANKS=3` or 2 the first has as many.
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: '[LOCAL_STATE_DICT](https://www.loom.com/share/be15a814a28145b9aebbaac683a44e3b), 2022. Since then:
#   sharded state dicts of FSDP2 are made of DTensors, and load on any number of ranks.'

# %% [markdown]
# **The question of this lesson:** four ranks have saved a weight, each its own rows. Three ranks want to load
# it. Which of them has to read which file?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots


def cut(rows, ranks):
    """First and last row (exclusive) of each rank's part, as FSDP2 cuts a parameter."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


def draw_cuts(rows, saved_by, wanted_by):
    fig, (axes,) = plots.figure(width=7.5, height=2.2)
    files, parts = cut(rows, saved_by), cut(rows, wanted_by)
    colors = plots.RANK_COLORS
    for index, (first, stop) in enumerate(files):
        axes.barh(0, stop - first, left=first, height=0.5, color=colors[index], edgecolor=plots.CARD)
        ink = "white" if index in (0, 2) else plots.INK
        axes.text(first + 6, 0, f"file {index}", ha="left", va="center", color=ink, size=8)
    for index, (first, stop) in enumerate(parts):
        for source, (begin, end) in enumerate(files):
            left, right = max(first, begin), min(stop, end)
            if left < right:
                axes.barh(1, right - left, left=left, height=0.5, color=colors[source], alpha=0.55)
        axes.barh(1, stop - first, left=first, height=0.5, fill=False, edgecolor=plots.INK, linewidth=1.5)
        axes.text((first + stop) / 2, 1, f"rank {index} wants", ha="center", va="center", size=8)
        axes.plot([stop, stop], [-0.3, 1.3], color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set_yticks([0, 1], [f"saved by {saved_by}", f"wanted by {wanted_by}"])
    axes.set(ylim=(1.5, -0.5), xlabel=f"rows of a weight of {rows} rows")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt="The rows of one weight, saved by one number of ranks and wanted by another.")


draw_cuts(512, 4, 3)

# %% [markdown]
# The colour of a row is the file that holds it. Each dashed line is the end of a part that a rank wants: two
# of the three cut a saved piece in two. So each of the three ranks needs rows from two files. By the end of
# the lesson you have measured this, and written a load that does it.
#
# ## In your own code
#
# PyTorch's own way is `torch.distributed.checkpoint`, in short **DCP**. Save this as `train.py` and start it
# with `torchrun --nproc-per-node 4 train.py`. Start it again, with another number, and it goes on where it
# stopped: each start trains ten more steps. It needs as many GPUs as ranks, or none. `averages` is the
# optimizer's state: for AdamW two running averages per weight, and a count of steps.
#
# ```python
# from pathlib import Path
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# model = fully_shard(torch.nn.Linear(256, 256), mesh=mesh)
# optimizer = torch.optim.AdamW(model.parameters())
# folder = Path(__file__).with_name("checkpoints")                  # on a disk that all hosts see
# found = [max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)]
# dist.broadcast_object_list(found, src=0)                          # what rank 0 sees decides
# done = found[0]
# if done:
#     weights, averages = get_state_dict(model, optimizer)          # DTensors: nothing is gathered
#     dcp.load({"model": weights, "optimizer": averages}, checkpoint_id=folder / str(done))
#     set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
# for step in range(done, done + 10):
#     model(torch.randn(32, 256, device=device)).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# weights, averages = get_state_dict(model, optimizer)
# dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=folder / str(step + 1))
# dist.destroy_process_group()
# ```
#
# `.metadata` is the file that DCP writes last, so a directory without it is a save that was interrupted. Each
# save has a directory of its own: a save over an older one destroys it, as you will see in a later section.
#
# Rank 0 looks for the newest checkpoint, and the other ranks take its answer. On a network disk one host may
# see a file seconds later than another. Ranks that choose for themselves then load a mixture of two
# checkpoints, or hang because one of them loads nothing.
#
# `get_state_dict` is not called before the first training step of all. It gives an optimizer without state
# one, by a step with learning rate 0, and AdamW counts that step: the first real one would be its second, and
# of another size.
#
# ## Jobs
#
# A checkpoint carries a run from one job to the next. A **job** starts its ranks, trains, and ends them; only
# its files remain. In this lesson a job is a function: `run_on_ranks(job, ..., world_size=4)` starts four
# processes with a process group, calls the function on each, ends the processes, and returns a list of what
# the ranks returned.

# %% jupyter={"source_hidden": true}
import json
import logging
import math
import os
import pickle
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from blake3 import blake3
from torch.distributed.fsdp import fully_shard

from fsdp_utils import run_on_ranks
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import exactly, try_answers, turn
from fsdp_utils.notebook import ranks

world = int(os.environ.get("FSDP_RANKS", 4))
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# The model is that of lesson 3, with two blocks instead of three. `build`, `shard`, `adam`, `train` and
# `evaluate` are in the next cell, which is folded, as they contain nothing about checkpoints. `train(model,
# optimizer, steps)` returns the loss of each step as the mean over the ranks.

# %% jupyter={"source_hidden": true}
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                           # f32[batch, width]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=128, depth=2):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):                                           # f32[batch, 64]
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)                                         # f32[batch, 10]


def build(seed):
    torch.manual_seed(seed)
    return Model()


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


torch.manual_seed(0)
labels = torch.randint(10, (1600,))                                  # i64[1600]
inputs = torch.randn(10, 64)[labels] + 2 * torch.randn(1600, 64)     # f32[1600, 64]


def train(model, optimizer, steps):
    """The loss of each of these steps, as the mean over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        rows = torch.arange(24 * step, 24 * step + 24).chunk(world)[rank]
        loss = F.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / world)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses.tolist()


@torch.no_grad()
def evaluate(model):
    """The loss on samples that training has not seen; the same on every rank."""
    return F.cross_entropy(model(inputs[1200:]), labels[1200:]).item()


# %% [markdown]
# ## The idea
#
# Each rank writes one file with its shards. One more file, `.metadata`, says which rows of which parameter
# are in which file. DCP writes both. The state dict that DCP gets is a **sharded state dict**: the ordinary
# names, and for each name a `DTensor` of which each rank holds a part.

# %%
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(path, model, optimizer):
    weights, averages = get_state_dict(model, optimizer)                    # no gathering: DTensors
    dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=path)


# %% [markdown]
# `dcp.load` gets such a state dict too: its names say what to read, and its tensors are filled in place.
# `NotingReader` only notes which files are read, for a table below. In your code, pass `checkpoint_id=path`
# instead of `storage_reader=reader`.

# %%
class NotingReader(dcp.FileSystemReader):
    """Reads a checkpoint, and notes for each piece that it reads: which tensor, from which file."""

    def read_data(self, plan, planner):
        self.notes = [
            (item.storage_index.fqn, self.storage_data[item.storage_index].relative_path)
            for item in plan.items
        ]
        return super().read_data(plan, planner)


def load(path, model, optimizer):
    weights, averages = get_state_dict(model, optimizer)                    # what is wanted, and where to
    reader = NotingReader(path)
    dcp.load({"model": weights, "optimizer": averages}, storage_reader=reader)       # fills the tensors
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
    return reader.notes


# %% [markdown]
# Here is the job. It trains some steps, from newly initialised weights or from a checkpoint.

# %%
def job(steps, load_from=None, save_to=None):
    model = shard(build(seed=1 if load_from else 0))                        # NOTE: other weights to load into
    optimizer = adam(model)
    notes = load(load_from, model, optimizer) if load_from else []
    losses = train(model, optimizer, steps)
    if save_to:
        save(save_to, model, optimizer)
    rows = model.blocks[0].up.weight.to_local().shape[0]
    return {"losses": losses, "rows": rows, "notes": notes}


# %% [markdown]
# **Predict before you go on.**
#
# 1. Four ranks save three numbers per parameter: the weight and Adam's two averages. How large is each file?
#   Count in multiples of the model's size.
# 2. Three ranks load it. From how many files does rank 1 of the three read rows of one weight?
#
# <details><summary>Answers</summary>
#
# 1. Three quarters of the model's size, as nothing is written twice.
# 2. Two. Its third reaches from one third to two thirds, which are in the second and the third quarter. (What
#   is not cut, such as Adam's count of steps, is in one of the files, and every rank reads it there.)
#
# </details>
#
# ## Measure

# %% tags=["files"]
first = run_on_ranks(job, range(4), None, folder / "a", world_size=world)

complete = 3 * 4 * sum(p.numel() for p in build(0).parameters())                    # bytes
files = {path.name: path.stat().st_size for path in sorted((folder / "a").iterdir())}
data_files = {name: size for name, size in files.items() if name.endswith(".distcp")}
Table(
    ["file", "of model and optimizer"],
    [[name, f"{size / complete:.0%}"] for name, size in files.items()],
)

# %% [markdown]
# Each of the four ranks has written one file. It holds a quarter of model and optimizer, and the headers of
# many small tensors make up the rest.
#
# Now a job with one rank less goes on with it. Which rows does each of its ranks want, and where does it find
# them?

# %%
fewer = max(world - 1, 1)
second = run_on_ranks(job, range(4, 8), folder / "a", folder / "b", world_size=fewer)

# %% jupyter={"source_hidden": true}
WEIGHT = "model.blocks.0.up.weight"
described = dcp.FileSystemReader(folder / "a").read_metadata()                      # reads .metadata
chunks = described.state_dict_metadata[WEIGHT].chunks
saved_rows = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in chunks]
found_in = [sorted({file for name, file in result["notes"] if name == WEIGHT}) for result in second]
start, rows = 0, []
for rank, result in enumerate(second):
    rows.append([rank, f"{start} to {start + result['rows'] - 1}", ", ".join(found_in[rank])])
    start += result["rows"]
Table(
    ["rank", "rows of blocks.0.up.weight that it wants", "files that it reads them from"],
    rows,
    note=f"Saved by {world} ranks, loaded by {fewer}. The files: DCP's own plan of what to read.",
)

# %% tags=["check"]
assert len(data_files) == world
untrained = nn.Linear(2, 2)
untouched = adam(untrained)
get_state_dict(untrained, untouched)
assert all(state["step"] == 1 for state in untouched.state.values())  # as the script's text says
assert all(0.9 < size / (complete / world) < 1.2 for size in data_files.values())
assert sorted(saved_rows) == cut(512, world)
assert [result["rows"] for result in second] == [stop - first for first, stop in cut(512, fewer)]
for names, (begin, end) in zip(found_in, cut(512, fewer)):
    holders = [rank for rank, (first, stop) in enumerate(cut(512, world)) if first < end and begin < stop]
    assert names == [f"__{rank}_0.distcp" for rank in holders]
print("Checked: one file per rank, rows cut as in the drawing, no file read that holds none of the rows.")

# %% [markdown]
# The files are those of the drawing. DCP looks up in `.metadata` which saved pieces hold rows that a rank
# wants, reads those pieces and no others, and copies the rows out of them. That is **resharding**.
#
# Is the training the same? Go on with one rank, and compare with a job that never stopped.

# %% tags=["reshard"]
third = run_on_ranks(job, range(8, 12), folder / "b", world_size=1)
unbroken = run_on_ranks(job, range(12), world_size=world)[0]["losses"]

broken = [loss for results in (first, second, third) for loss in results[0]["losses"]]
torch.testing.assert_close(broken, unbroken, rtol=1e-4, atol=1e-4)

# %% jupyter={"source_hidden": true}
plots.losses({f"{world} ranks, unbroken": unbroken, f"{world}, then {fewer}, then 1": broken})

# %% [markdown]
# Both runs have the same curve. Different numbers of ranks add gradients in different orders, so the losses
# agree only to within the rounding of float32.
#
# ## Your turn 1 · A load that reads only its part
#
# Write the heart of resharding. A weight of `saved.rows` rows is in `len(saved.files)` files.
# `saved.files[i]` is a pair `(begin, end)`: file `i` holds the rows from `begin` up to `end`, `end` not
# included. `saved.read(i, a, b)` reads the rows from `a` up to `b` **of that file**, counted from the file's
# own first row; it returns f32[b - a, 4].
#
# `my_rows(saved, rank, world)` returns the rows that rank `rank` of `world` wants. `cut(rows, world)[rank]`
# is the pair `(first, stop)` of that rank: it wants the rows from `first` up to `stop`, `stop` not included.
# A weight of 3 rows on 4 ranks leaves one rank without rows: it gets an empty tensor, `torch.empty(0, 4)`,
# and opens no file.
#
# The next cell starts ranks that stay until turn 2 is done: a cell that begins with `%%ranks` runs on each of
# them. Run it and the folded cell after it. Then edit the cell with `my_rows`, and run it and the folded
# cells below it.
#
# <details><summary>Hint</summary>
#
# For each file: the rows that both have go from the larger of the two beginnings to the smaller of the two
# ends. If there are any, read them, after subtracting `begin`. `torch.cat` puts them together, but it does
# not accept an empty list.
#
# </details>

# %%
ranks.start(device="cpu")           # on CPUs as the jobs are, also where there are GPUs

# %% jupyter={"source_hidden": true}
# %%ranks
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

rank, world = dist.get_rank(), dist.get_world_size()


def cut(rows, ranks):
    """First and last row (exclusive) of each rank's part, as FSDP2 cuts a parameter."""
    size = -(-rows // ranks)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks)]


def shared_folder():
    """A new folder, the same on all ranks."""
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


class Saved:
    """A weight f32[rows, 4] in files, one from each rank that has saved it; counts what is read."""

    def __init__(self, folder, rows, ranks):
        self.folder, self.rows, self.files = folder, rows, cut(rows, ranks)
        self.opened, self.bytes_read = [], 0

    def write(self, weight):
        self.folder.mkdir()
        for index, (begin, end) in enumerate(self.files):
            (self.folder / f"{index}").write_bytes(weight[begin:end].numpy().tobytes())

    def read(self, index, first, stop):
        with (self.folder / f"{index}").open("rb") as file:
            file.seek(16 * first)                                     # 4 numbers of 4 bytes in a row
            data = file.read(16 * (stop - first))
        self.opened.append(index)
        self.bytes_read += len(data)
        if not data:
            return torch.empty(0, 4)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, 4)


# %% tags=["exercise"]
# %%ranks
def my_rows(saved, rank, world):
    return None     # your lines here; begin with first, stop = cut(saved.rows, world)[rank]


# %% jupyter={"source_hidden": true}
# %%ranks
def score_rows(my_rows):
    """Weights of several sizes, saved by 1 to 5 ranks, loaded by each rank of 1 to 5."""
    folder = shared_folder()
    if rank == 0:
        for rows in (1, 3, 10, 33):
            for saved_by in range(1, 6):
                weight = torch.arange(4.0 * rows).view(rows, 4)
                Saved(folder / f"{rows} by {saved_by}", rows, saved_by).write(weight)
    dist.barrier()
    try:
        return count_rows(my_rows, folder)
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def count_rows(my_rows, folder):
    errors = wrong = read = needless = 0
    for rows in (1, 3, 10, 33):
        weight = torch.arange(4.0 * rows).view(rows, 4)
        for saved_by in range(1, 6):
            for wanted_by in range(1, 6):
                for reader, (first, stop) in enumerate(cut(rows, wanted_by)):
                    saved = Saved(folder / f"{rows} by {saved_by}", rows, saved_by)
                    try:
                        part = my_rows(saved, reader, wanted_by)
                    except Exception as error:
                        if not errors:
                            print(f"rank {reader} of {wanted_by} wants {rows=} [{first}:{stop}]: {error}")
                        errors += 1
                        continue
                    if part is None:
                        return None
                    right = isinstance(part, torch.Tensor) and torch.equal(part, weight[first:stop])
                    wrong += not right
                    holders = {i for i, (a, b) in enumerate(saved.files) if max(a, first) < min(b, stop)}
                    needless += len(saved.opened) - len(holders & set(saved.opened))
                    read += saved.bytes_read
    return {
        "calls that raise": errors,
        "wrong parts": wrong,
        "bytes read": read,
        "files opened for nothing": needless,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_rows(my_rows)",
    {
        "calls that raise": exactly(
            0,
            otherwise="Some calls raised an error, of which the first is printed above. A rank that wants no "
            "rows gets an empty tensor.",
        ),
        "wrong parts": exactly(
            0,
            otherwise="Some rows are missing or others than wanted: `read` counts from the file's own first "
            "row, and a rank may want no rows at all, or rows of several files.",
        ),
        "bytes read": exactly(
            5 * 5 * (1 + 3 + 10 + 33) * 16,
            otherwise="Each row should be read once, by the rank that wants it.",
        ),
        "files opened for nothing": exactly(
            0, otherwise="A file was opened that holds none of the rows, perhaps by a rank that wants none."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_rows(saved, rank, world):
    first, stop = cut(saved.rows, world)[rank]
    parts = [torch.empty(0, 4)]
    for index, (begin, end) in enumerate(saved.files):
        left, right = max(first, begin), min(stop, end)
        if left < right:
            parts.append(saved.read(index, left - begin, right - begin))
    return torch.cat(parts)

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # nothing to put together where a rank wants no rows
    first, stop = cut(saved.rows, world)[rank]
    parts = []
    for index, (begin, end) in enumerate(saved.files):
        left, right = max(first, begin), min(stop, end)
        if left < right:
            parts.append(saved.read(index, left - begin, right - begin))
    return torch.cat(parts)

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # everything, and then cut
    first, stop = cut(saved.rows, world)[rank]
    pieces = [saved.read(i, 0, end - begin) for i, (begin, end) in enumerate(saved.files)]
    return torch.cat(pieces)[first:stop]

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # one file too many where the rank holds nothing
    first, stop = cut(saved.rows, world)[rank]
    piece = -(-saved.rows // len(saved.files))
    parts = []
    for index in range(min(first, saved.rows - 1) // piece, max(stop - 1, 0) // piece + 1):
        begin, end = saved.files[index]
        parts.append(saved.read(index, max(first, begin) - begin, max(0, min(stop, end) - begin)))
    return torch.cat(parts)

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # rows of the weight, not of the file
    first, stop = cut(saved.rows, world)[rank]
    parts = [torch.empty(0, 4)]
    for index, (begin, end) in enumerate(saved.files):
        left, right = max(first, begin), min(stop, end)
        if left < right:
            parts.append(saved.read(index, left, right))
    return torch.cat(parts)

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # its own file, as LOCAL_STATE_DICT
    if rank >= len(saved.files):
        return torch.empty(0, 4)
    begin, end = saved.files[rank]
    return saved.read(rank, 0, end - begin)

# %% tags=["wrong"] turn=1
# %%ranks
def my_rows(saved, rank, world):                    # the next file, but no third
    first, stop = cut(saved.rows, world)[rank]
    parts = [torch.empty(0, 4)]
    for index, (begin, end) in enumerate(saved.files[rank : rank + 2], rank):
        left, right = max(first, begin), min(stop, end)
        if left < right:
            parts.append(saved.read(index, left - begin, right - begin))
    return torch.cat(parts)

# %% [markdown]
# The target reads no row twice: in each load, the ranks together read the weight once. DCP reads a little
# more: every saved piece that has a wanted row is read completely, and then the wanted rows are copied.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# FSDP1, `FullyShardedDataParallel`, joins all parameters of a unit into one flat parameter and shards that.
# It has two state dicts of which each rank keeps a part. `LOCAL_STATE_DICT`, the video's, holds this rank's
# shards of the flat parameters. `SHARDED_STATE_DICT` holds this rank's rows of each parameter. (To cut these
# rows FSDP1 gathers each unit for a moment; FSDP2 holds them already.) As a sketch, for a unit of three
# parameters:


# %% jupyter={"source_hidden": true}
@plots.in_look
def draw_kinds(parameters, ranks):
    """The rows of a unit in the two state dicts, a colour for the rank that keeps them."""
    fig, (axes,) = plots.figure(width=7.5, height=2.3)
    total = sum(parameters.values())
    for index, (first, stop) in enumerate(cut(total, ranks)):
        axes.barh(0, stop - first, left=first, height=0.5, color=plots.RANK_COLORS[index])
    start = 0
    for name, rows in parameters.items():
        for index, (first, stop) in enumerate(cut(rows, ranks)):
            label = f"rank {index}" if start == 0 else None
            color = plots.RANK_COLORS[index]
            axes.barh(1, stop - first, left=start + first, height=0.5, color=color, label=label)
        for row in (0, 1):
            axes.barh(row, rows, left=start, height=0.5, fill=False, edgecolor=plots.INK, linewidth=1.5)
        axes.text(start + rows / 2, 0.5, name, ha="center", va="center", size=8)
        start += rows
    axes.set_yticks([0, 1], ["LOCAL: one entry,\nthe flat parameter", "SHARDED: an entry\nper parameter"])
    axes.set(ylim=(1.4, -0.4), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=ranks)
    return plots.show(fig, alt="LOCAL cuts a unit once, across its parameters; SHARDED cuts each parameter.")


draw_kinds({"up.weight": 8, "up.bias": 4, "down.weight": 8}, 4)

# %% [markdown]
# The black frames are the parameters. A local state dict cuts the unit once, without regard to them, and has
# the single name `_flat_param`. `save_2022` and `load_2022` take either kind.

# %% jupyter={"source_hidden": true}
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LOCAL, SHARDED = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def fsdp1(model, use_orig_params):
    warnings.simplefilter("ignore")                                  # FSDP1 is deprecated, as we know
    device = torch.device("cpu")
    policy = ModuleWrapPolicy({Block})
    return FSDP(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


# %%
def save_2022(path, kind, steps, use_orig_params=False):
    model = fsdp1(build(seed=0), use_orig_params)
    train(model, adam(model), steps)
    with FSDP.state_dict_type(model, kind):
        state = model.state_dict()
    dcp.save(state, checkpoint_id=path)
    return {"loss": evaluate(model), "names": {name: type(value).__name__ for name, value in state.items()}}


def load_2022(path, kind, use_orig_params=False, grad=True):
    """The loss after loading, or what went wrong."""
    model = fsdp1(build(seed=1), use_orig_params)
    try:
        with FSDP.state_dict_type(model, kind), torch.set_grad_enabled(grad):
            state = model.state_dict()
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state)
    except CheckpointException as error:                             # a BaseException, not an Exception
        cause, _ = error.failures[min(error.failures)]               # of the lowest rank that failed
        return str(cause).split(". ")[0].rstrip(".")
    return evaluate(model)


# %% jupyter={"source_hidden": true}
def save_three_ways():
    return (
        save_2022(folder / "local", LOCAL, range(4)),
        save_2022(folder / "sharded", SHARDED, range(4)),
        save_2022(folder / "orig", LOCAL, range(4), use_orig_params=True),
    )


local, sharded, _ = run_on_ranks(save_three_ways, world_size=world)[0]

# %% [markdown]
# Neither kind holds the optimizer's state, which FSDP1 gives by another call.
#
# Load them on the same number of ranks, on one rank less and on a single rank. Two rows are our additions:
# the video's code under `torch.no_grad()`, and with FSDP1's later option `use_orig_params=True`.

# %% tags=["local"]
attempts = {
    "LOCAL, as in the video": (folder / "local", LOCAL),
    "LOCAL, under no_grad": (folder / "local", LOCAL, False, False),
    "LOCAL, use_orig_params": (folder / "orig", LOCAL, True),
    "SHARDED": (folder / "sharded", SHARDED),
}
sizes = sorted({world, fewer, 1}, reverse=True)


def load_each_way():
    return {name: load_2022(*arguments) for name, arguments in attempts.items()}


found = {size: run_on_ranks(load_each_way, world_size=size)[0] for size in sizes}

# %% jupyter={"source_hidden": true}
def right(result):
    return isinstance(result, float) and abs(result - local["loss"]) < 1e-4


Table(
    ["", *(f"on {size}" for size in sizes)],
    [
        [name, *("loads" if right(found[size][name]) else "fails" for size in sizes)] for name in attempts
    ],
)

# %% tags=["check"]
assert not any("exp_avg" in name for saved in (local, sharded) for name in saved["names"])
assert [name.split(".")[-1] for name in local["names"]] == ["_flat_param"] * 3  # two blocks and the root
assert len(sharded["names"]) == len(build(0).state_dict())
assert right(found[world]["LOCAL, as in the video"])
assert "Missing key" in found[1]["LOCAL, as in the video"]
assert "Size mismatch" in found[world]["LOCAL, use_orig_params"]
assert not right(found[world]["LOCAL, use_orig_params"])
assert not any(right(result) for name, result in found[1].items() if name != "SHARDED")
assert all(right(found[size]["SHARDED"]) for size in sizes)
if fewer > 1:
    assert "A view was created in no_grad mode" in found[fewer]["LOCAL, as in the video"]
    assert right(found[fewer]["LOCAL, under no_grad"])
print("Checked: which way loads on how many ranks; what loads has the loss that was saved.")

# %% [markdown]
# So in PyTorch 2.13, row by row:
#
# - The video's code loads on as many ranks as have saved, and on no others. On three ranks DCP reshards the
#   flat parameters, but writes to views of a shard that needs a gradient: `A view was created in no_grad mode
#   …`. Under `no_grad` it loads. On a single rank FSDP1 does not shard, and its state dict has the names of
#   the parameters: `Missing key in checkpoint state_dict`.
# - With `use_orig_params=True`, which keeps the model's own parameters, a local state dict does not even load
#   on the ranks that have saved it. It also holds pieces of parameters, which have the same name but
#   different sizes on different ranks: `Size mismatch between saved … and current`.
# - The sharded state dict loads on all of them. `get_state_dict` gives you this kind today, with FSDP2.
#
# ## Every save overwrites the last
#
# The video ends with a note: be careful to use a new directory each time. What if you forget? The next job
# saves step 8 over the checkpoint of step 4, and then saves once more with `overwrite=False`.


# %% tags=["overwrite"] jupyter={"source_hidden": true}
def save_over(path):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = shard(build(seed=0))
        optimizer = adam(model)
        train(model, optimizer, range(8))
        weights, _ = get_state_dict(model, optimizer)
        dcp.save({"model": weights}, checkpoint_id=path)
        said = [str(w.message) for w in warned if "existing checkpoint" in str(w.message)]
    try:
        writer = dcp.FileSystemWriter(path, overwrite=False)
        dcp.save({"model": weights}, storage_writer=writer)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        return {"loss": evaluate(model), "warning": said[0].split(" in ")[0], "refusal": str(cause)}


# %%
shutil.copytree(folder / "a", folder / "over")
before = {path.name for path in (folder / "over").iterdir()}
over = run_on_ranks(save_over, folder / "over", world_size=world)[0]
after = {path.name for path in (folder / "over").iterdir()}

Table(
    ["saving where a checkpoint is", "what DCP says"],
    [
        ["checkpoint_id=path", f"a warning: “{over['warning']}…”"],
        ["FileSystemWriter(path, overwrite=False)", f"an error: “{over['refusal']}”"],
    ],
    note=f"Files before: {len(before)}, after: {len(after)}, with new names: {len(after - before)}.",
)

# %% tags=["check"]
assert after == before
assert all((folder / "a" / name).read_bytes() != (folder / "over" / name).read_bytes() for name in after)
assert over["warning"].startswith("Detected an existing checkpoint")
print("Checked: the default warns and overwrites every file; overwrite=False refuses.")

# %% [markdown]
# By default DCP warns and goes on. As many ranks write files of the same names, so the first checkpoint is
# gone. Worse: *while* the second is written, there is no complete checkpoint at all, only a mixture of two.
# With `overwrite=False` DCP raises an error before it writes a file. (The complete warning says that this
# becomes the default after version 2.5. In 2.13 it is not.)
#
# ## `save_distributed` and `load_distributed`
#
# `save_distributed` of `fsdp_utils` writes safetensors, at most one per rank, and JSON besides. Each
# checkpoint gets a directory of its own. It is written under a temporary name, and **renamed** when all ranks
# are done and all files are on the disk: the checkpoint is there completely, or not at all.


# %% jupyter={"source_hidden": true}
def draw_saves():
    """What a load would find while step 8 is saved: over step 4, or beside it and then renamed."""
    fig, (axes,) = plots.figure(width=7.5, height=1.9)
    found = {
        "saved over the last": ("step 4", "a mixture of 4 and 8"),
        "renamed at the end": ("step 4", "step 4"),
    }
    colors = {"step 4": plots.RANK_COLORS[4], "step 8": plots.RANK_COLORS[2]}
    for row, states in enumerate(found.values()):
        for (left, right), state in zip(((0, 2), (2, 6), (6, 8)), (*states, "step 8")):
            axes.barh(row, right - left, left=left, height=0.6, color=colors.get(state, plots.RANK_COLORS[5]))
            axes.text((left + right) / 2, row, state, ha="center", va="center", fontweight="bold")
    axes.set_yticks([0, 1], found)
    axes.set_xticks([2, 6], ["the save of step 8 begins", "and ends"])
    axes.set(ylim=(1.5, -0.5), title="What does a load find?")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt="A save over the last leaves a mixture while it runs; a rename never does.")


draw_saves()

# %% [markdown]
# With `keep=2` it then deletes all but the two newest. What else training needs, such as the number of
# samples seen, goes into `state` (`per_rank` where ranks differ).

# %% tags=["keep"]
from fsdp_utils import CheckpointError, load_distributed, save_distributed, verify_checkpoint


def train_and_save(directory, steps=6, every=2, keep=2):
    model = shard(build(seed=0))
    optimizer = adam(model)
    for step in range(0, steps, every):
        train(model, optimizer, range(step, step + every))
        done = step + every
        save_distributed(directory, model, optimizer, step=done, keep=keep, state={"samples": 24 * done})
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return {"loss": evaluate(model), "full": full, "next": train(model, optimizer, [steps])}


def load_and_go_on(directory, step="latest"):
    model = shard(build(seed=1))
    optimizer = adam(model)
    state = load_distributed(directory, model, optimizer, step=step)
    return {**state, "loss": evaluate(model), "next": train(model, optimizer, [6])}


ours = run_on_ranks(train_and_save, folder / "run", world_size=world)[0]
print(*sorted(path.name for path in (folder / "run").iterdir()))

# %% [markdown]
# Three saves, of which two were kept. No file says which is the latest, so none can be wrong: the latest is
# the directory with the highest first number. Load it on each number of ranks:

# %%
resumed = {size: run_on_ranks(load_and_go_on, folder / "run", world_size=size)[0] for size in sizes}
Table(
    ["loaded on", "step", "samples", "loss", "loss of the next step"],
    [
        [f"{size} rank{'s' * (size > 1)}", r["step"], r["samples"], f"{r['loss']:.4f}", f"{r['next'][0]:.4f}"]
        for size, r in resumed.items()
    ],
    note=f"The run that was saved: loss {ours['loss']:.4f}, of the next step {ours['next'][0]:.4f}.",
)

# %% [markdown]
# Every number of ranks has the same loss, and the same loss of the next step. Beside the ranks' files lie
# `state.json`, with all that is no tensor, and `manifest.json`, with the size and BLAKE3 hash of each file,
# which a load compares. In a terminal, `python -m fsdp_utils.checkpoint inspect run` lists the tensors;
# `verify` reads every byte. The header of each rank's file says, in the words of torch's own reader of
# safetensors, where in the full tensor a piece begins. So `safetensors` alone reads the weights:

# %% tags=["plain-reader"]
from safetensors import safe_open

checkpoint = sorted((folder / "run").iterdir())[-1]
weights = {name: torch.full_like(full, torch.nan) for name, full in ours["full"].items()}
for path in checkpoint.glob("rank-*.safetensors"):
    with safe_open(path, framework="pt") as file:
        for key, piece in json.loads(file.metadata()["DCP_SHARDING_INFO"]).items():
            kind, _, name = key.partition(".")
            if kind == "model":                                      # the others are the optimizer's
                rows, begin = file.get_tensor(key), piece["saved_offsets"][0]
                weights[name][begin:begin + len(rows)] = rows
assert all(torch.equal(weights[name], full) for name, full in ours["full"].items())
print(f"{len(weights)} tensors of {checkpoint.name}, equal to the model's")

# %% tags=["check"]
for there in resumed.values():
    torch.testing.assert_close(there["loss"], ours["loss"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there["next"], ours["next"], rtol=1e-4, atol=1e-4)
assert resumed[world]["next"] == ours["next"]
manifest = json.loads((checkpoint / "manifest.json").read_text())
assert {"manifest.json", *manifest["files"]} == {path.name for path in checkpoint.iterdir()}
assert all(set(about) == {"bytes", "blake3"} for about in manifest["files"].values())
verify_checkpoint(folder / "run")  # raises unless every byte is right
print("Checked: resumed losses are those of the run that was saved, exactly on as many ranks.")

# %% [markdown]
# ## Your turn 2 · A save that is there completely, or not at all
#
# Write a save that renames, with DCP and the file system alone. `my_save(folder, step, state)` is called on
# every rank. It saves `state` with `dcp.save(state, checkpoint_id=...)`, and when it returns, the checkpoint
# is the directory `folder / f"step-{step}"`, on every rank. `latest(folder)` takes every directory with such
# a name for a complete checkpoint, so no directory may get the name before all of its files are there.
#
# Three things are tested: a save, one that is interrupted at the end of `dcp.save`, and a save after that. To
# make mistakes visible, renaming takes a little longer here than on your disk.
#
# Edit the cell with `my_save`, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Save under another name, such as `folder / f"unfinished-{step}"`, the same on all ranks. `dcp.save` returns
# on a rank when all ranks have written. Then one rank renames, by `unfinished.rename(...)`. Do the others
# know when it is done? `dist.barrier()` returns when all ranks have entered it.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import os
import re
import time
import warnings
from unittest import mock

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_utils.lessons.together import run_together

warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
mesh = init_device_mesh("cpu", (world,))


def latest(folder):
    """The name of the checkpoint with the highest step."""
    steps = [int(m[1]) for path in folder.iterdir() if (m := re.fullmatch(r"step-(\d+)", path.name))]
    return f"step-{max(steps)}" if steps else "none"


# %% tags=["exercise"]
# %%ranks
def my_save(folder, step, state):
    return None     # your lines here; at the end folder / f"step-{step}" is there, on every rank


# %% jupyter={"source_hidden": true}
# %%ranks
class Interrupted(Exception):
    """The job is stopped."""


def weight(value):
    return {"weight": distribute_tensor(torch.full((8 * world, 4), float(value)), mesh, [Shard(0)])}


def slow(rename):
    def renamed(*arguments, **options):
        time.sleep(0.2)
        return rename(*arguments, **options)

    return renamed


def interrupted(save):
    """Like dcp.save, but the last rank's file does not make it to the disk, and then the job is stopped."""

    def saved(state, **options):
        save(state, **options)
        target = options.get("checkpoint_id") or options["storage_writer"].path
        dist.barrier()
        if rank == 0:
            sorted(Path(target).glob("*.distcp"))[-1].unlink(missing_ok=True)
        dist.barrier()
        raise Interrupted

    return saved


def on_ranks(fact):
    """The number of ranks on which it is so."""
    count = torch.tensor(int(fact))
    dist.all_reduce(count)
    return int(count)


def score_save(my_save):
    """Three saves, the second interrupted."""
    folder = shared_folder()
    renames = [mock.patch.object(os, name, slow(getattr(os, name))) for name in ("rename", "replace")]
    try:
        with renames[0], renames[1]:
            return three_saves(my_save, folder)
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def three_saves(my_save, folder):
    raised = missing = 0
    problem = ""

    def saved(step):
        my_save(folder, step, weight(step))
        return (folder / f"step-{step}").is_dir()               # at once: run_together waits for all ranks

    def save(step):                                             # without the wait for a call that others lack
        nonlocal problem
        there, parted = run_together(saved, step)
        problem = problem or (parted if " raised " not in parted else "")
        return there

    def attempt(step):
        nonlocal raised, missing
        error = there = None
        try:
            there = save(step)
        except (OSError, CheckpointException) as failure:
            error = failure
        raised += on_ranks(error is not None)
        missing += on_ranks(there is False)

    attempt(1)
    if problem:
        return {"problem": problem}
    if on_ranks(any(folder.iterdir())) == 0:
        return {"problem": "`my_save` has left nothing in `folder`."}
    with mock.patch.object(dcp, "save", interrupted(dcp.save)), contextlib.suppress(Interrupted):
        save(2)
    dist.barrier()
    after_interruption = latest(folder)
    dist.barrier()
    attempt(3)
    if problem:
        return {"problem": problem}
    state, name = weight(0), latest(folder)
    try:
        dcp.load(state, checkpoint_id=folder / name)
        loads = bool(torch.equal(state["weight"].to_local(), weight(3)["weight"].to_local()))
    except (OSError, CheckpointException):
        loads = False
    return {
        "errors on ranks": raised,
        "ranks that return too early": missing,
        "latest after an interruption": after_interruption,
        "latest after the next save": name,
        "the latest loads": loads,
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_save(my_save)",
    {
        "errors on ranks": exactly(
            0, otherwise="Some rank has raised an error: do several ranks rename the same directory?"
        ),
        "ranks that return too early": exactly(
            0,
            otherwise="A rank has returned while the checkpoint had not got its name. Wait for the rank that "
            "renames, on all ranks.",
        ),
        "latest after an interruption": exactly(
            "step-1",
            otherwise="An interrupted save counts as a checkpoint. Give the directory its name when all of "
            "its files are there.",
        ),
        "latest after the next save": exactly("step-3", otherwise="The save after it did not arrive."),
        "the latest loads": exactly(
            True,
            otherwise="The last checkpoint is not complete: have all ranks written to the same directory?",
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_save(folder, step, state):
    unfinished = folder / f"unfinished-{step}"
    dcp.save(state, checkpoint_id=unfinished)               # returns when all ranks have written
    if rank == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()                                          # the others wait for rank 0

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(folder, step, state):                           # under its name from the beginning
    dcp.save(state, checkpoint_id=folder / f"step-{step}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(folder, step, state):                           # nobody waits for rank 0
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    if rank == 0:
        (folder / f"unfinished-{step}").rename(folder / f"step-{step}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(folder, step, state):                           # the barrier on rank 0 alone
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    if rank == 0:
        (folder / f"unfinished-{step}").rename(folder / f"step-{step}")
        dist.barrier()

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(folder, step, state):                           # every rank renames
    dcp.save(state, checkpoint_id=folder / f"unfinished-{step}")
    (folder / f"unfinished-{step}").rename(folder / f"step-{step}")

# %% tags=["wrong"] turn=2
# %%ranks
def my_save(folder, step, state):                           # another directory on each rank
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    dcp.save(state, checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()

# %% tags=["check"]
try_answers(8)
ranks.stop()

# %% [markdown]
# `save_distributed` does what you wrote, and more: it waits until the files are durable, adds the manifest,
# and raises the same error on every rank where one of them fails.
#
# ## Saving while the training goes on
#
# A save must keep the next step from changing the state before it is written. A copy in memory is enough for
# that: training stops while the copy is made, and the writing goes on in the background. PyTorch's call for
# it is `dcp.async_save`; ours is `save_distributed(..., asynchronous=True)`. The background has collectives
# of its own. With NCCL for training they go through gloo, which is why the script at the beginning asks for
# `cpu:gloo,cuda:nccl`. Here training uses gloo as well, so `dcp.async_save` gets a group of its own.
#
# We save 48 MiB per rank, on two ranks, and measure how long each call blocks the training. Your times will
# differ.

# %% jupyter={"source_hidden": true}
def timed(call):
    dist.barrier()
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def large_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


# %%
def seconds_blocked(directory):
    model = large_model()
    optimizer, group = adam(model), dist.new_group(backend="gloo")

    def step():
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()

    def save_async(name):
        weights, averages = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": averages}
        return dcp.async_save(state, checkpoint_id=directory / name, process_group=group)

    def ours(step, asynchronous=False):
        return save_distributed(
            directory / "ours", model, optimizer, step=step, asynchronous=asynchronous
        )

    step()
    save(directory / "first", model, optimizer)  # not timed: work that is done only once
    seconds = {}
    seconds["dcp.save"], _ = timed(lambda: save(directory / "plain", model, optimizer))
    seconds["dcp.async_save"], saving = timed(lambda: save_async("async"))
    step()                                                       # while the checkpoint is written
    saving.result()                                              # waits for the end of the writing
    seconds["save_distributed"], _ = timed(lambda: ours(1))
    ours(2, asynchronous=True).wait()  # the memory of its copy is used again
    before = [p.to_local().clone() for p in model.parameters()]
    seconds["save_distributed, asynchronous"], saving = timed(lambda: ours(3, asynchronous=True))
    step()
    saving.wait()
    load_distributed(directory / "ours", model, optimizer, step=3)
    same = all(torch.equal(p.to_local(), saved) for p, saved in zip(model.parameters(), before))
    return seconds, same


# %% tags=["async", "nbval-ignore-output"]
timings = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = {name: max(seconds[name] for seconds, _ in timings) for name in timings[0][0]}
plots.amounts(
    {"training is blocked for": {name: {"one call": 1000 * s} for name, s in blocked.items()}},
    unit="ms",
    alt="Milliseconds for which each kind of save blocks the training; the asynchronous ones block for less.",
)

# %% tags=["check"]
assert all(same for _, same in timings)
assert blocked["save_distributed, asynchronous"] < 0.7 * blocked["save_distributed"]
print("Checked: asynchronous blocks for less than 0.7 of the time, and saves the state of the call.")

# %% [markdown]
# The asynchronous saves block for much less: mostly for the copy. An error in the background is raised by
# `wait()`, or by the next save or load. The check compares the loaded weights with those at the moment of the
# call, though training has changed the model meanwhile.
#
# ## Damage
#
# Disks fail, and copies are cut short. Here we damage a checkpoint of plain DCP and one of
# `save_distributed`, and load them. First, two checkpoints of each kind: after 4 steps and after 8.

# %% jupyter={"source_hidden": true}
def two_checkpoints():
    model = shard(build(seed=0))
    optimizer = adam(model)
    for step in (4, 8):
        train(model, optimizer, range(step - 4, step))
        save(folder / "plain" / f"{step}", model, optimizer)
        save_distributed(folder / "safe", model, optimizer, step=step)
    return evaluate(model), model.blocks[0].up.weight.to_local().detach()


undamaged, some_weights = run_on_ranks(two_checkpoints, world_size=world)[0]
old, new = sorted((folder / "safe").iterdir())
pairs = {"plain": (folder / "plain" / "4", folder / "plain" / "8"), "ours": (old, new)}

# %% [markdown]
# Five kinds of damage follow. The last one is an attack: `.metadata` is a pickle, and a pickle may name any
# function to be called when it is read. This one only makes a directory. In our format it is `state.json`.

# %%
def flip(path, bit):
    """One bit of one weight, in the byte with its sign and the first seven bits of its exponent."""
    weights = some_weights.numpy().tobytes()
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        if (at := data.find(weights)) >= 0:
            data[at + 4 * 100 + 3] ^= bit                            # of weight 100
            file.write_bytes(data)


def high_bit(path, older):
    flip(path, 0b01000000)


def low_bit(path, older):
    flip(path, 0b00000001)


def of_rank_0(path):
    return next(path / name for name in ("__0_0.distcp", "rank-00000.safetensors") if (path / name).exists())


def truncated(path, older):
    file = of_rank_0(path)
    file.write_bytes(file.read_bytes()[:-1000])


def two_steps(path, older):
    """As if the machine had stopped when all ranks but rank 0 had overwritten their files."""
    for file in (of_rank_0(older), older / ".metadata", older / "manifest.json"):  # the last: written last
        if file.exists():
            shutil.copy(file, path)


# %%
marker = folder / "it ran"


class Attack:
    def __reduce__(self):
        return os.makedirs, (str(marker), 0o777, True)


def attack(path, older):
    name = ".metadata" if (path / ".metadata").exists() else "state.json"
    (path / name).write_bytes(pickle.dumps(Attack()))


damages = [high_bit, low_bit, truncated, two_steps, attack]
damaged = {"plain": [], "ours": []}
for kind, (older, path) in pairs.items():
    for damage in damages:
        damaged[kind].append(folder / "damaged" / kind / damage.__name__ / path.name)
        shutil.copytree(path, damaged[kind][-1])
        damage(damaged[kind][-1], older)

# %% [markdown]
# Now load them all, each by its own way: `dcp.load` or `load_distributed`.

# %% jupyter={"source_hidden": true}
def load_plain(path):
    model = shard(build(seed=1))
    try:
        load(path, model, adam(model))
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        return f"refused: {type(cause).__name__}"
    except Exception as error:
        return f"refused: {type(error).__name__}"
    return evaluate(model)


def load_ours(directory):
    model = shard(build(seed=1))
    before = evaluate(model)
    try:
        load_distributed(directory, model, adam(model), step=8)
    except CheckpointError as error:
        return str(error), evaluate(model) == before                 # is the model as it was?
    return evaluate(model), False


def load_damaged():
    logging.disable(logging.CRITICAL)                                # DCP logs what it raises
    plain = [load_plain(path) for path in damaged["plain"]]
    dist.barrier()
    ran = marker.exists()                                            # has the attack's function been called?
    dist.barrier()
    if dist.get_rank() == 0 and ran:
        marker.rmdir()
    dist.barrier()
    return plain, ran, [load_ours(path.parent) for path in damaged["ours"]]


# %% tags=["damage"]
plain, ran, safe = run_on_ranks(load_damaged, world_size=world)[0]

# %% jupyter={"source_hidden": true}
rows = []
for damage, by_plain, (by_ours, untouched) in zip(damages, plain, safe):
    text = by_plain if isinstance(by_plain, str) else f"loads, loss {by_plain:.3f}"
    verdict = "refused" if isinstance(by_ours, str) else "loads"
    rows.append([damage.__name__, text, f"{verdict}, model {'untouched' if untouched else 'changed'}"])
Table(
    ["damage", "plain DCP", "load_distributed"],
    rows,
    note=f"Undamaged, the loss is {undamaged:.3f}. The attack's function {'was' if ran else 'was not'} "
    f"called by plain DCP, and {'was' if marker.exists() else 'was not'} called by load_distributed.",
)

# %% tags=["check"]
assert ran
assert not marker.exists()
assert [isinstance(by_plain, str) for by_plain in plain] == [False, False, True, False, True]
assert math.isnan(plain[0])
assert abs(plain[1] - undamaged) < 0.01
assert all(isinstance(by_ours, str) and untouched for by_ours, untouched in safe)
print("Checked: plain DCP loads three of five, load_distributed none, and leaves the model untouched.")

# %% [markdown]
# Plain DCP refuses a file that is too short, and a `.metadata` that does not describe a checkpoint, but by
# then the code in that pickle has run. Data of the right shape is loaded, whatever it holds: with the high
# bit flipped the loss is `nan`, with the low bit it does not change to three decimals, and the mixture of two
# steps looks like a checkpoint of a step in between.
#
# Here are three of the errors of `load_distributed`; the folder, the hashes and the sizes of `state.json` are
# left out.

# %% tags=["words"]
def shortened(text):
    text = re.sub(r"\b[0-9a-f]{64}\b", "…", text.replace(f"{folder}/damaged/ours/", ""))
    return re.sub(r"(json: expected) \d+ bytes, found \d+", r"\1 … bytes, found …", text)


for by_ours, _ in (safe[1], safe[2], safe[4]):                       # low_bit, truncated, attack
    print(shortened(by_ours))

# %% [markdown]
# `load_distributed` compares the size and the BLAKE3 hash of each file with the manifest before it loads
# anything; the ranks share the work. An attacker could forge the manifest as well. But no file here is a
# pickle: safetensors and JSON hold nothing to call. Here is the attack with a forged manifest.

# %%
forged = damaged["ours"][-1]
evil = (forged / "state.json").read_bytes()
manifest = json.loads((forged / "manifest.json").read_text())
manifest["files"]["state.json"] = {"bytes": len(evil), "blake3": blake3(evil).hexdigest()}
del manifest["blake3"]                                               # of all the rest
manifest["blake3"] = blake3(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
(forged / "manifest.json").write_text(json.dumps(manifest))

text, untouched = run_on_ranks(load_ours, forged.parent, world_size=1)[0]
print(shortened(text))

# %% tags=["check"]
named = ("rank-0000", "state.json: expected")
assert all(any(name in by_ours for name in named) for by_ours, _ in safe)
assert "state.json: expected" in text
assert untouched
assert not marker.exists()
print("Checked: each refusal names a file; with a forged manifest too, the attack's function is not called.")

# %% [markdown]
# With plain DCP, load checkpoints only from people whose code you would run. `.metadata` is not the only way
# in: entries that are not tensors, such as the learning rate, are pickles too.
#
# ## A part of a checkpoint
#
# `dcp.load` reads what the state dict asks for. A state dict with fewer names reads fewer pieces: the model
# without the optimizer, or one bias. It needs no ranks either. A state dict with a name that the checkpoint
# lacks is refused, unless you say that this is meant.

# %%
def load_part(tensors, **options):
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process, on purpose
    reader = NotingReader(folder / "a")
    planner = dcp.DefaultLoadPlanner(**options)
    dcp.load({"model": tensors}, storage_reader=reader, planner=planner)
    return [file for _, file in reader.notes]


bias, added = torch.full((10,), -1.0), torch.full((3,), -1.0)
files_read = load_part({"head.bias": bias})
try:
    load_part({"head.bias": bias, "new.bias": added})
except CheckpointException as error:
    refusal = str(error.failures[0][0])
files_read_then = load_part({"head.bias": bias, "new.bias": added}, allow_partial_load=True)

# %% jupyter={"source_hidden": true}
Table(
    ["asked for", "what dcp.load does"],
    [
        ["head.bias alone", f"reads {len(files_read)} pieces, from {len(set(files_read))} files"],
        ["head.bias and new.bias", f"refuses: {refusal.rstrip('.')}"],
        ["the same, with allow_partial_load=True", f"loads; new.bias stays {added.tolist()}"],
    ],
)

# %% tags=["check"]
assert len(files_read) == sum(first < stop for first, stop in cut(10, world))
assert files_read_then == files_read
assert (bias != -1).all()
assert (added == -1).all()
assert "new.bias" in refusal
print("Checked: as many pieces as ranks that hold rows of the bias; what is not there stays as it was.")

# %% [markdown]
# ## To safetensors, and into transformers
#
# `dcp_to_torch_save(directory, file)`, from `torch.distributed.checkpoint.format_utils`, turns a checkpoint
# into one file of `torch.save`. It needs no ranks, but memory for everything in the checkpoint at once, with
# the optimizer. Users of a model want `from_pretrained`, and that reads safetensors. A small Llama is trained
# on two ranks and saved.

# %%
def train_llama(directory):
    from fsdp_utils import shard
    from fsdp_utils.lessons import tasks

    rank, world = dist.get_rank(), dist.get_world_size()
    task = tasks.dates_llama()
    model = shard(task.build())
    optimizer = adam(model)
    for step in range(2):
        model(**task.batch(step, rank=rank, world_size=world)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_distributed(directory, model, optimizer, step=2)
    ids = task.batch(2, size=4)["input_ids"]                         # i64[4, length], the same on all ranks
    with torch.no_grad():
        return ids, model(input_ids=ids).logits                     # f32[4, length, 64]


ids, logits = run_on_ranks(train_llama, folder / "llama", world_size=2)[0]

# %% [markdown]
# `export_safetensors` needs no ranks, and holds one tensor at a time. With a limit on the size of a file it
# writes several files and an index, as large models have.

# %% tags=["export"]
warnings.filterwarnings("ignore", message="IProgress")             # about bars that we do not show
import transformers

from fsdp_utils import export_safetensors

transformers.utils.logging.disable_progress_bar()
export_safetensors(folder / "llama", folder / "exported", shard_gib=1 / 1024)
loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
with torch.no_grad():
    torch.testing.assert_close(loaded(input_ids=ids).logits, logits, rtol=0, atol=1e-5)

# %% jupyter={"source_hidden": true}
Table(
    ["file", "KiB"],
    [[path.name, f"{path.stat().st_size / 2**10:,.1f}"] for path in sorted((folder / "exported").iterdir())],
    note=f"Loaded by from_pretrained as {type(loaded).__name__}: the same logits.",
)

# %% [markdown]
# ## When it goes wrong
#
# - **`A view was created in no_grad mode and its base … has been modified inplace`**, or **`Size mismatch
#   between saved … and current`**, when loading a local state dict. Save and load sharded state dicts.
# - **`Missing key in checkpoint state_dict`.** The model has a name that the checkpoint lacks, as in *A part
#   of a checkpoint*. If that is meant, use `allow_partial_load=True`; the rest keeps its values.
# - **`try` … `except Exception` does not catch a failed load.** `CheckpointException` is a `BaseException`.
#   Name it, as `load_2022` does above.
# - **The warning `Detected an existing checkpoint`.** You are about to lose the previous one. Give each step
#   a directory of its own.
# - **After a restart the loss is that of no step you know.** The checkpoint may be a mixture of two steps, as
#   in *Damage*. Give a directory its name when it is complete, and keep hashes.
# - **After a restart the loss jumps and then recovers.** The optimizer's state was not in the checkpoint, as
#   in both state dicts of 2022. Save what `get_state_dict(model, optimizer)` gives.
# - **The last checkpoint of a job is missing.** The save was asynchronous, and the job ended before it. Call
#   `wait()` (or `.result()` for DCP) at the end.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
local_rows = ", ".join(
    f"on {size} {'yes' if right(found[size]['LOCAL, as in the video']) else 'no'}" for size in sizes
)
lesson.claims(
    8,
    {
        "thousands-of-files": f"{len(data_files)} files and .metadata, from {world} ranks: one file per rank "
        "today.",
        "overwrites-metadata": "Today the data files have fixed names and are overwritten too: the first "
        "checkpoint was gone. DCP warns; with overwrite=False it refuses.",
        "elastic": f"Saved by {world}: SHARDED and DCP load on {', '.join(map(str, sizes))} ranks. LOCAL, as "
        f"in the video: {local_rows}.",
        "quick-shards": f"Each rank wrote {max(data_files.values()) / complete:.0%} of model and optimizer "
        "at most. With FSDP2 none gathered any of it.",
        "async-downtime": "An asynchronous save blocked training for less than 0.7 of the time of a "
        "synchronous one, asserted on this CPU; see the seconds above.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - A distributed checkpoint is one file per rank, and a description of which rows are where.
# - DCP reads the pieces that a rank wants, so any number of ranks can go on. A LOCAL_STATE_DICT loads on as
#   many ranks as have saved it.
# - Never save over a checkpoint: write under another name, and rename when everything is there.
# - An asynchronous save blocks the training for a copy. Wait for the last save before the job ends.
# - Plain DCP loads a flipped bit and a mixture of steps, and runs what a forged `.metadata` says. Hashes, and
#   no pickles, prevent all three.

# %% jupyter={"source_hidden": true}
shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# [Lesson 9](09_child_tuning.ipynb) fine-tunes a part of each gradient. [Lesson 10](10_end_to_end.ipynb) puts
# all of this into one training program.
#
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

# %% [markdown]
# # 8 · LOCAL_STATE_DICT and distributed checkpoints
#
# A model that no host can hold cannot be saved in one file. So every rank saves its own part. That is simple
# to write, and in 2022 it could be read again by the same number of ranks only. In this lesson you load on
# another number, save while the training goes on, and damage checkpoints to see who notices.

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
#   sharded state dicts are made of DTensors, and load on any number of ranks.'

# %%
import hashlib
import json
import logging
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from fsdp_utils import run_on_ranks
from fsdp_utils.lessons import lesson, plots

world = int(os.environ.get("FSDP_RANKS", 4))
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Jobs
#
# What a checkpoint is for is the time between two jobs. So here the ranks do not stay: each function below is
# a **job**. `run_on_ranks(job, ..., world_size=4)` starts four processes with a process group, calls the
# function on each, returns what it returned by rank, and ends them. Only what is on the disk is left.
#
# The model and its training are those of lesson 3, with two blocks instead of three.

# %%
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
# are in which file. PyTorch's `torch.distributed.checkpoint`, in short **DCP**, does both. The state dict
# that it gets is the ordinary one of a sharded model: names, and `DTensor`s of which each rank holds a part.

# %%
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(path, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)         # no gathering: DTensors
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)         # what is wanted, and where to
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)                                     # fills the tensors
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def job(steps, load_from=None, save_to=None):
    """Begin, or go on where another job has stopped."""
    model = shard(build(seed=1 if load_from else 0))
    optimizer = adam(model)
    if load_from:
        load(load_from, model, optimizer)
    losses = train(model, optimizer, steps)
    if save_to:
        save(save_to, model, optimizer)
    rows = model.blocks[0].up.weight.to_local().shape[0]
    return {"losses": losses, "rows": rows, "loss": evaluate(model)}


# %% [markdown]
# ## Predict
#
# 1. Four ranks save 3 models' worth: weights and Adam's two averages. How large is each file?
# 2. Three ranks load it. In how many files are the rows that rank 1 of the three wants?
#
# <details><summary>Answers</summary>
#
# 1. A quarter of it: three quarters of the model each. Nothing is written twice.
# 2. Two. Its third reaches from one third to two thirds, which are in the second and the third quarter. (What
#    is not cut, such as Adam's count of steps, is in one file or another, and every rank reads it there.)
#
# </details>
#
# ## Measure

# %% tags=["files"]
first = run_on_ranks(job, range(4), None, folder / "a", world_size=world)

whole = 3 * 4 * sum(p.numel() for p in build(0).parameters())                       # bytes
files = {path.name: path.stat().st_size for path in sorted((folder / "a").iterdir())}
data_files = {name: size for name, size in files.items() if name.endswith(".distcp")}
for name, size in files.items():
    print(f"{name:14} {size / whole:4.0%} of model and optimizer")
assert len(data_files) == world
assert all(0.9 < size / (whole / world) < 1.2 for size in data_files.values())

# %% [markdown]
# A quarter each, and some more for the headers of many small tensors. Now three ranks go on with it. Which
# rows of one weight were saved by whom, and which are wanted by whom?

# %%
fewer = max(world - 1, 1)
second = run_on_ranks(job, range(4, 8), folder / "a", folder / "b", world_size=fewer)

described = dcp.FileSystemReader(folder / "a").read_metadata()                      # reads .metadata
chunks = described.state_dict_metadata["model.blocks.0.up.weight"].chunks
saved_rows = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in chunks)
wanted_rows = [result["rows"] for result in second]
print(f"saved by {world} ranks:  {[rows for _, rows in saved_rows]} rows")
print(f"wanted by {fewer} ranks: {wanted_rows} rows")
assert sum(wanted_rows) == sum(rows for _, rows in saved_rows)

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.5, height=1.9)
for y, pieces in enumerate([[rows for _, rows in saved_rows], wanted_rows]):
    left = 0
    for index, rows in enumerate(pieces):
        axes.barh(y, rows, left=left, height=0.55, color=plots.RANK_COLORS[index], edgecolor=plots.CARD)
        ink = "white" if index in (0, 2) else plots.INK
        axes.text(left + rows / 2, y, f"rank {index}", ha="center", va="center", fontsize=8, color=ink)
        left += rows
        if y == 1:
            axes.plot([left, left], [-0.3, 1.3], color=plots.INK, linestyle="--", linewidth=0.8)
axes.set_yticks([0, 1], [f"saved by {world}", f"wanted by {fewer}"])
axes.set(ylim=(1.5, -0.5), xlabel="rows of blocks.0.up.weight, from .metadata and from the job")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The rows of one weight, as saved by one number of ranks and wanted by another.")

# %% [markdown]
# Follow the first dashed line upwards: it cuts a saved piece in two. DCP looks up in `.metadata` which
# saved pieces hold the rows that a rank wants, reads those pieces and no others, and takes the rows out of
# them. That is **resharding**.
#
# Is the training the same? Go on with one rank, and compare with a job that never stopped.

# %% tags=["reshard"]
third = run_on_ranks(job, range(8, 12), folder / "b", world_size=1)
unbroken = run_on_ranks(job, range(12), world_size=world)[0]["losses"]

broken = [loss for results in (first, second, third) for loss in results[0]["losses"]]
print(f"steps on {world}, {fewer}, 1 ranks: ", *(f"{loss:.4f}" for loss in broken[3::4]))
print(f"steps on {world}, unbroken: ", *(f"{loss:.4f}" for loss in unbroken[3::4]))
torch.testing.assert_close(broken, unbroken, rtol=1e-4, atol=1e-4)

# %% jupyter={"source_hidden": true}
plots.losses({f"{world} ranks, unbroken": unbroken, f"{world}, then {fewer}, then 1": broken})

# %% [markdown]
# One curve. The ranks add up in another order, so the losses agree within the rounding of float32.
#
# ## The way of 2022: LOCAL_STATE_DICT
#
# The video's state dict is FSDP1's **local** one: what the rank holds, as it holds it. `SHARDED_STATE_DICT`
# is the other one that is not gathered. Same code, another type.

# %%
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def fsdp1(model, use_orig_params):
    warnings.simplefilter("ignore")                                  # deprecated, as we know
    device = torch.device("cpu")
    policy = ModuleWrapPolicy({Block})
    return FSDP(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


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


LOCAL, SHARDED = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
local = run_on_ranks(save_2022, folder / "local", LOCAL, range(4), world_size=world)[0]
sharded = run_on_ranks(save_2022, folder / "sharded", SHARDED, range(4), world_size=world)[0]
for title, saved in (("LOCAL", local), ("SHARDED", sharded)):
    print(f"{title:8} {len(saved['names']):2} entries, such as", *list(saved["names"].items())[-1])
    assert not any("exp_avg" in name for name in saved["names"])     # Adam's averages: not there

# %% [markdown]
# A local state dict has no parameters, only `_flat_param`: one per unit, all of its parameters laid end to
# end and cut by the number of ranks. A sharded one has names and shapes. (`DTensor` has taken the place of
# `ShardedTensor` since.) Neither holds the optimizer.
#
# Load them, on the same number of ranks, on one less and on one. The second row is our addition: the video's
# code under `torch.no_grad()`.

# %% tags=["local"]
run_on_ranks(save_2022, folder / "orig", LOCAL, range(4), True, world_size=world)
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


def right(result):
    return isinstance(result, float) and abs(result - local["loss"]) < 1e-4


print(" " * 24, *(f"on {size}    " for size in sizes))
for name in attempts:
    print(f"{name:24}", *("loads   " if right(found[size][name]) else "fails   " for size in sizes))
print()
for name in attempts:
    for size in sizes:
        if not right(found[size][name]):
            print(f"{name}, on {size}:\n    {found[size][name]}")

# %%
assert right(found[world]["LOCAL, as in the video"])
assert not right(found[world]["LOCAL, use_orig_params"])
assert not any(right(result) for name, result in found[1].items() if name != "SHARDED")
assert all(right(found[size]["SHARDED"]) for size in sizes)
if fewer > 1:
    assert not right(found[fewer]["LOCAL, as in the video"])
    assert right(found[fewer]["LOCAL, under no_grad"])

# %% [markdown]
# So in PyTorch 2.13, row by row:
#
# - The video's code loads on as many ranks as have saved, and on no others. On fewer it ends in an error
#   about views, which is an accident: a shard that needs a gradient is written to in pieces. Under
#   `no_grad` DCP reshards the flat parameters too. One rank alone shards nothing, and FSDP1 then gives the
#   full state dict, which has other names.
# - With `use_orig_params=True`, which came later and keeps the model's own parameters, it does not even
#   load what it has just saved. The pieces of parameters in it are of another size on every rank, under one
#   name.
# - The sharded one always loads. What FSDP2 and `get_state_dict` give you today is of this kind.
#
# ## Every save overwrites the last
#
# The video ends with a note: be careful to use a new directory each time. What if one forgets?

# %% tags=["overwrite"]
before = {path.name for path in (folder / "local").iterdir()}
later = run_on_ranks(save_2022, folder / "local", LOCAL, range(8), world_size=world)[0]
after = {path.name for path in (folder / "local").iterdir()}
again = run_on_ranks(load_2022, folder / "local", LOCAL, world_size=world)[0]

print(f"files before: {len(before)}, after: {len(after)}, new names: {len(after - before)}")
print(f"loss when saved first: {local['loss']:.3f}, then: {later['loss']:.3f}, as loaded: {again:.3f}")
assert after == before
assert abs(again - later["loss"]) < 1e-4

# %% [markdown]
# The same names, so the first checkpoint is gone. Worse: *while* the second is written, there is no whole
# checkpoint at all, only a mixture of two. Keep that in mind for the damage below.
#
# ## `save_distributed` and `load_distributed`
#
# `fsdp_utils` saves with DCP, and puts a little around it. Each checkpoint gets a directory of its own. It is
# written under another name, and **renamed** when all ranks are done and all is on the disk: it is there as a
# whole, or not at all. `keep=2` deletes the oldest, after that. What else training needs is given by name.

# %% tags=["keep"]
from fsdp_utils import CheckpointError, load_distributed, save_distributed, verify_checkpoint


def train_and_save(directory, steps=6, every=2, keep=2):
    model = shard(build(seed=0))
    optimizer = adam(model)
    for step in range(0, steps, every):
        train(model, optimizer, range(step, step + every))
        done = step + every
        save_distributed(directory, model, optimizer, step=done, keep=keep, samples=24 * done)
    return {"loss": evaluate(model), "next": train(model, optimizer, [steps])}


def load_and_go_on(directory, step="latest"):
    model = shard(build(seed=1))
    optimizer = adam(model)
    state = load_distributed(directory, model, optimizer, step=step)
    return {**state, "loss": evaluate(model), "next": train(model, optimizer, [6])}


ours = run_on_ranks(train_and_save, folder / "run", world_size=world)[0]
print(*sorted(path.name for path in (folder / "run").iterdir()))

resumed = {size: run_on_ranks(load_and_go_on, folder / "run", world_size=size)[0] for size in sizes}
for size, there in resumed.items():
    print(f"loaded on {size}: step {there['step']}, {there['samples']} samples, loss {there['loss']:.4f}")
    torch.testing.assert_close(there["loss"], ours["loss"], rtol=1e-4, atol=1e-4)

# %% [markdown]
# Three saves, two kept. There is no file that says which is the latest, so none can be wrong: it is the one
# with the highest number. What is in it? Two lines are left out here, those with the date and with your
# version of PyTorch.

# %% tags=["inspect"]
command = [sys.executable, "-m", "fsdp_utils.checkpoint", "inspect", "run"]
said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
lines = [line for line in said.stdout.splitlines() if not line.startswith(("saved_at:", "torch:"))]
print("$ python -m fsdp_utils.checkpoint inspect run")
print(*lines[:8], "...", *lines[lines.index("") :], sep="\n")

# %% [markdown]
# `verify` in place of `inspect` reads every byte, and `export` writes safetensors. And the directory
# itself:

# %%
checkpoint = sorted((folder / "run").iterdir())[-1]
manifest = json.loads((checkpoint / "manifest.json").read_text())
print(*sorted(path.name for path in checkpoint.iterdir()))
print("the manifest knows of each file:", ", ".join(next(iter(manifest["files"].values()))))

# %% [markdown]
# A size and a hash for each file: a load compares them, as you will see under *Damage*.
#
# ## Saving while the training goes on
#
# Training has to stop until its state can no longer be changed by the next step. For that a copy in memory
# is enough. The writing can go on in the background. We save 48 MiB per rank, on two ranks, and measure how
# long the call takes until training may go on. Your numbers will be others.

# %% tags=["async", "nbval-ignore-output"]
def seconds_blocked(directory):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model)

    def step():
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()

    def timed(call):
        dist.barrier()
        began = time.perf_counter()
        result = call()
        return time.perf_counter() - began, result

    step()
    seconds = {}
    seconds["dcp.save"], _ = timed(lambda: save(directory / "plain", model, optimizer))
    seconds["save_distributed"], _ = timed(
        lambda: save_distributed(directory / "ours", model, optimizer, step=1)
    )
    for options in ({"step": 2}, {"step": 3}):                       # the first makes room for the copy
        before = [p.to_local().clone() for p in model.parameters()]
        options["asynchronous"] = True
        seconds["asynchronous"], saving = timed(
            lambda options=options: save_distributed(directory / "ours", model, optimizer, **options)
        )
        step()                                                       # while the checkpoint is written
        saving.wait()
    load_distributed(directory / "ours", model, optimizer, step=3)
    same = all(torch.equal(p.to_local(), saved) for p, saved in zip(model.parameters(), before))
    return seconds, same


timings = run_on_ranks(seconds_blocked, folder / "async", world_size=2)
blocked = {name: max(seconds[name] for seconds, _ in timings) for name in timings[0][0]}
for name, seconds in blocked.items():
    print(f"{name:17} training is blocked for {seconds:.2f} s")
assert all(same for _, same in timings)
assert blocked["asynchronous"] < 0.7 * blocked["save_distributed"]

# %% [markdown]
# The copy is what blocks. `same` checks the other half of the promise: the checkpoint holds the state at the
# moment of the call, though the training has changed the weights meanwhile. An error in the background is
# raised by `wait()`, or by the next save or load.
#
# ## Damage
#
# Disks and copies go wrong. We do it on purpose, to a checkpoint of plain DCP and to one of ours. First, two
# of each: after 4 steps and after 8.

# %%
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


def load_plain(path):
    logging.disable(logging.CRITICAL)                                # DCP logs what it raises
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


# %% [markdown]
# Five kinds of damage. The last one is an attack: `.metadata` is a pickle, and a pickle may name any function
# to be called when it is read. Ours only makes an empty directory.

# %%
def flip(path, bit):
    """One bit of one weight, in the byte with its sign and the first seven bits of its exponent."""
    weights = some_weights.numpy().tobytes()
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        if (at := data.find(weights)) >= 0:
            data[at + 4 * 100 + 3] ^= bit                            # of weight 100
            file.write_bytes(data)


def high_bit(path, older):
    flip(path, 0b01000000)


def low_bit(path, older):
    flip(path, 0b00000001)


def truncated(path, older):
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])


def two_steps(path, older):
    """As if the machine had stopped when all ranks but rank 0 had overwritten their files."""
    shutil.copy(older / "__0_0.distcp", path)


marker = folder / "it ran"


class Attack:
    def __reduce__(self):
        return os.makedirs, (str(marker), 0o777, True)


def attack(path, older):
    (path / ".metadata").write_bytes(pickle.dumps(Attack()))


damages = [high_bit, low_bit, truncated, two_steps, attack]
damaged = {"plain": [], "ours": []}
for kind, (older, path) in pairs.items():
    for damage in damages:
        damaged[kind].append(folder / "damaged" / kind / damage.__name__ / path.name)
        shutil.copytree(path, damaged[kind][-1])
        damage(damaged[kind][-1], older)

# %% [markdown]
# And now load them all.

# %% tags=["damage"]
plain = run_on_ranks(lambda: [load_plain(path) for path in damaged["plain"]], world_size=world)[0]
ran = marker.exists()
marker.rmdir()
safe = run_on_ranks(lambda: [load_ours(path.parent) for path in damaged["ours"]], world_size=world)[0]

print(f"{'':10} plain DCP                 load_distributed")
for damage, by_plain, (by_ours, untouched) in zip(damages, plain, safe):
    text = by_plain if isinstance(by_plain, str) else f"loads, loss {by_plain:.3f}"
    verdict = "refused" if isinstance(by_ours, str) else "loads"
    print(f"{damage.__name__:10} {text:25} {verdict}, model {'untouched' if untouched else 'changed'}")
print(f"undamaged, the loss is {undamaged:.3f}. The attack's code {'RAN' if ran else 'did not run'}.")
assert ran
assert not marker.exists()
assert [isinstance(by_plain, str) for by_plain in plain] == [False, False, True, False, True]
assert math.isnan(plain[0])
assert abs(plain[1] - undamaged) < 0.01
assert all(isinstance(by_ours, str) and untouched for by_ours, untouched in safe)

# %% [markdown]
# Plain DCP sees what does not fit: a file that is too short, a pickle that is no description. But by then the
# code in that pickle has run. And what fits in shape is loaded, whatever it says: the high bit makes the loss
# no number at all, the low bit nothing that one would notice, and the mixture of two steps looks like a
# checkpoint of some step between.
#
# What ours says, word for word. Cut out are the hashes, and the sizes of `.metadata`.

# %% tags=["words"]
def shortened(text):
    text = re.sub(r"\b[0-9a-f]{64}\b", "…", text.replace(f"{folder}/damaged/ours/", ""))
    return re.sub(r"(metadata: expected) \d+ bytes, found \d+", r"\1 … bytes, found …", text)


for by_ours, _ in safe:
    print(shortened(by_ours))
    assert "__0_0.distcp: expected" in by_ours or ".metadata: expected" in by_ours

# %% [markdown]
# `load_distributed` compares size and SHA-256 of each file with the manifest before it reads it, the ranks
# sharing the work. An attacker could forge the manifest as well. So the pickle is never simply loaded: it is
# read by an unpickler that knows the few classes of which a description is made, and calls nothing else.

# %%
forged = damaged["ours"][-1]
evil = (forged / ".metadata").read_bytes()
manifest = json.loads((forged / "manifest.json").read_text())
manifest["files"][".metadata"] = {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
del manifest["sha256"]                                               # of all the rest
manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
(forged / "manifest.json").write_text(json.dumps(manifest))

text, untouched = run_on_ranks(load_ours, forged.parent, world_size=world)[0]
print(shortened(text))
assert untouched
assert not marker.exists()

# %% [markdown]
# Still: load nothing from people whom you would not let run code. There is more than one way into a process.
#
# ## To safetensors, and into transformers
#
# Users of a model want `from_pretrained`, not shards. A small Llama is trained on two ranks and saved.

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
# `export_safetensors` needs no ranks, and never holds more than one tensor. With a limit on the size of a
# file it writes several and an index, as large models have.

# %% tags=["export"]
warnings.filterwarnings("ignore", message="IProgress")             # about bars that we do not show
import transformers

from fsdp_utils import export_safetensors

transformers.utils.logging.disable_progress_bar()
export_safetensors(folder / "llama", folder / "exported", shard_gib=1 / 1024)
for path in sorted((folder / "exported").iterdir()):
    print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.name}")

loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
with torch.no_grad():
    torch.testing.assert_close(loaded(input_ids=ids).logits, logits, rtol=0, atol=1e-5)
print(f"{type(loaded).__name__}: the same logits")

# %% [markdown]
# ## Proof
#
# Everything that this lesson loaded, once more against runs that never stopped: DCP by hand over three sizes,
# and `load_distributed`, exactly on as many ranks as have saved and within rounding on others.

# %% tags=["equality"]
for size, there in resumed.items():
    print(f"step 7 on {size}, load_distributed: {there['next'][0]:.4f}, never stopped: {ours['next'][0]:.4f}")
    torch.testing.assert_close(there["next"], ours["next"], rtol=1e-4, atol=1e-4)
print(f"step 12 on {world}, {fewer}, 1, plain DCP: {broken[-1]:.4f}, never stopped: {unbroken[-1]:.4f}")
assert resumed[world]["next"] == ours["next"]
torch.testing.assert_close(broken, unbroken, rtol=1e-4, atol=1e-4)
verify_checkpoint(folder / "run")                                    # raises unless every byte is right

# %% [markdown]
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
        "checkpoint was gone.",
        "elastic": f"Saved by {world}: SHARDED and DCP load on {', '.join(map(str, sizes))} ranks. LOCAL, as "
        f"in the video: {local_rows}.",
        "quick-shards": f"Each rank wrote {max(data_files.values()) / whole:.0%} of model and optimizer at "
        "most, and none gathered any of it.",
        "async-downtime": "The call returned in less than 0.7 of the time of a synchronous save, asserted on "
        "this CPU; see the seconds above.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Who holds which rows?** FSDP2 cuts a parameter into pieces of equal size, rounded up; the last ranks
# get what is left. How many rows does each of `ranks` hold?

# %%
def pieces(rows, ranks):
    return None  # your lines here


cuts = {(512, 4): [128] * 4, (512, 3): [171, 171, 170], (10, 4): [3, 3, 3, 1], (5, 4): [2, 2, 1, 0]}
lesson.check(pieces, cuts)

# %% [markdown]
# **2. Who has what I need?** A parameter of `rows` rows was saved by `old` ranks. From the files of which of
# them does rank `rank` of `new` read?

# %%
def sources(rows, old, new, rank):
    return None  # your lines here


needed = {(512, 4, 3, 1): [1, 2], (512, 4, 3, 0): [0, 1], (512, 4, 1, 0): [0, 1, 2, 3], (12, 2, 4, 3): [1]}
lesson.check(sources, needed)

# %% [markdown]
# **3. How full does the disk get?** Checkpoints of `billions` of parameters in fp32 with Adam, and `keep`.
# The oldest is deleted *after* the new one is there. How many GiB at the worst moment, rounded?

# %%
def disk_gib(billions, keep):
    return None  # your line here


disks = {(7, 2): 235, (70, 1): 1565, (70, 3): 3129}
lesson.check(disk_gib, disks)

# %% [markdown]
# ## Summary
#
# - A distributed checkpoint is one file per rank, and a description of which rows are where.
# - DCP reads what a rank wants, so any number of ranks can go on. LOCAL_STATE_DICT could not.
# - Never save over a checkpoint: write beside it, and rename when all is there.
# - An asynchronous save blocks for a copy. Wait for the last one before the job ends.
# - Plain DCP loads a flipped bit and a mixture of steps, and runs what a forged `.metadata` says. With hashes
#   and a restricted unpickler both are refused.
# - From shards to `from_pretrained` it is one call, in one process.

# %%
shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# [Lesson 9](09_child_tuning.ipynb) fine-tunes a part of each gradient. [Lesson 10](10_end_to_end.ipynb) puts
# all of this into one training program.
#
# [← lesson 7](07_mixed_precision.ipynb) · [lesson 9 →](09_child_tuning.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def pieces(rows, ranks):
    size = -(-rows // ranks)
    return [max(0, min(size, rows - rank * size)) for rank in range(ranks)]


lesson.check(pieces, cuts, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def sources(rows, old, new, rank):
    size, piece = -(-rows // new), -(-rows // old)
    first, last = rank * size, min((rank + 1) * size, rows) - 1
    return list(range(first // piece, last // piece + 1))


lesson.check(sources, needed, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def disk_gib(billions, keep):
    return round((keep + 1) * 12e9 * billions / 2**30)


lesson.check(disk_gib, disks, strict=True)

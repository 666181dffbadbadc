# %% [markdown]
# # 3 · FULL_STATE_DICT
#
# Under FSDP no rank has the model. To save it in one file, as you always did, the ranks have to put it
# together first. In this lesson you do that, break it in five ways, and mend each.

# %% [markdown] tags=["card"]
# learn:
# - how to save and load model and optimizer as one file, with FSDP2 and with FSDP1
# - what that takes on rank 0, and on the others
# - three ways to hang, and why no error says so
# - how weights were corrupted and optimizer state was lost without any error
# - from which size on one file is the wrong choice
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: '[FULL_STATE_DICT](https://www.loom.com/share/97fb9a52037b4834a99a142d30ce6ee6), 2022. Since then:
#   `get_state_dict` and `set_state_dict`, and two mistakes in the video''s code, shown and mended here.'

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")    # also where there are GPUs: this lesson hangs on purpose

# %%
# %%ranks
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# A small model of three blocks. `build` takes a seed: what is loaded must not depend on what the weights were
# before.

# %%
# %%ranks
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                           # f32[batch, width]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=128, depth=3):
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
    return Model().to(device)


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# %% [markdown]
# What it learns: ten clouds of points in 64 dimensions. To which one does a point belong?

# %%
# %%ranks
torch.manual_seed(0)
labels = torch.randint(10, (1600,))                                  # i64[1600]
inputs = torch.randn(10, 64)[labels] + 2 * torch.randn(1600, 64)     # f32[1600, 64]
inputs, labels = inputs.to(device), labels.to(device)


def train(model, optimizer, steps, rank=rank, world=world):
    """The loss of each of these steps, as the mean over the ranks."""
    losses = []
    for step in steps:
        rows = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]
        loss = F.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / world)
    losses = torch.stack(losses)
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist()


model = shard(build(seed=0))
optimizer = adam(model)
losses = train(model, optimizer, range(6))
print(f"loss of step 1: {losses[0]:.4f}, of step 6: {losses[5]:.4f}")

# %% [markdown]
# ## The idea
#
# A **full state dict** is what plain PyTorch calls a state dict: every parameter by its name, whole. A
# sharded model cannot just hand it out. Its ranks **gather** one tensor after the other, rank 0 moves each
# to its CPU memory, and the others let go of it at once. Then rank 0 writes one file.

# %%
# %%ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=to_rank_0)                # a collective: call it on all ranks
print(f"{len(full)} tensors, {sum(tensor.nbytes for tensor in full.values()) / 2**20:.1f} MiB")

# %% jupyter={"source_hidden": true}
names = [f"blocks.0.{name}" for name in ("norm.weight", "up.weight", "up.bias", "down.weight")] + [
    "head.weight",
    "head.bias",
]
held = ranks.get(
    f"[({{n: p.to_local() for n, p in model.named_parameters()}}[n].numel(),"
    f" full[n].numel() if n in full else 0) for n in {names}]"
)
plots.shards(
    {
        title: {name: [of_rank[row][column] for of_rank in held] for row, name in enumerate(names)}
        for column, title in enumerate(["the model", "its full state dict"])
    }
)

# %% [markdown]
# Some of the parameters, and the part of each that each rank holds, as measured. The full state dict is whole
# on rank 0, and **empty** on all others. All have taken part in making it.
#
# ## Predict
#
# 1. The optimizer is AdamW. How large is its state, beside the model's?
# 2. `cpu_offload=True` does two things. What happens on ranks 1 to 3 without it?
#
# <details><summary>Answers</summary>
#
# 1. Twice the model: two averages for every parameter. A checkpoint that can be continued from is three
#   times as large as the model.
# 2. It moves the result to the CPU, and it leaves the result to rank 0 alone. Without it *every* rank gets
#   the whole of it, and on GPUs it gets it in GPU memory.
#
# </details>
#
# ## Measure
#
# `get_state_dict` gives model and optimizer together. The `Meter` of lesson 0 sees all tensors that are alive
# meanwhile.

# %% tags=["gather"]
# %%ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_leaves

from fsdp_utils.lessons.meter import Meter


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def local_bytes(tree):
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors(tree))


kinds = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, cpu_offload": to_rank_0,
}
resting = [*model.parameters(), *tensors(optimizer.state_dict())]
whole = 4 * sum(p.numel() for p in model.parameters())               # bytes of the model, in fp32
times_the_model = {}
for kind, options in kinds.items():
    with Meter(resting) as meter:
        states = get_state_dict(model, optimizer, options=options)
    times_the_model[kind] = local_bytes(states) / whole
    print(f"{kind:18} {times_the_model[kind]:.2f} times the model")
curve = [nbytes / whole for nbytes in meter.tensor_bytes]
del states

# %%
by_rank = ranks.get("times_the_model")
world = len(by_rank)
assert all(abs(held["sharded"] - 3 / world) < 0.03 for held in by_rank)
assert all(abs(held["full"] - 3) < 0.01 for held in by_rank)
assert abs(by_rank[0]["full, cpu_offload"] - 3) < 0.01
assert all(held["full, cpu_offload"] == 0 for held in by_rank[1:])

# %% [markdown]
# Three models' worth on rank 0, nothing elsewhere. Here is the gathering itself, operation by operation, on
# rank 0 and on the last rank.

# %% tags=["peak"] jupyter={"source_hidden": true}
curves = ranks.get("curve")
fig, panels = plots.figure(2, width=8, height=2.6)
for axes, rank, color in zip(panels, (0, world - 1), plots.RANK_COLORS):
    axes.fill_between(range(len(curves[rank])), curves[rank], color=color, linewidth=0)
    axes.text(len(curves[rank]) / 2, max(curves[rank]) + 0.1, f"peak {max(curves[rank]):.1f}", ha="center")
    axes.set(title=f"rank {rank}", xlabel="operations of get_state_dict", xticks=[], yticks=range(5))
    axes.set(ylim=(0, 4.6), xlim=(0, len(curves[rank])))
panels[0].set_ylabel("tensors alive, in models")
peak_first, peak_last = max(curves[0]), max(curves[-1])
assert peak_first > 3 + 2.5 / world
assert peak_last < 3 / world + 1
plots.show(fig, alt="Tensors alive while a full state dict is gathered, on rank 0 and on the last rank.")

# %% [markdown]
# Both begin with their shards of model and optimizer. The last rank's teeth are tensors that it helps to
# gather and drops. Rank 0 keeps them and climbs by three models. With GPUs the shards and the teeth are in
# GPU memory, and rank 0's climb is in the memory of its host.
#
# ## Save and load, today's way
#
# First a folder that all ranks know: rank 0 makes it and tells the others. In a real job it is on a disk that
# rank 0 can write to.

# %%
# %%ranks
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = Path(shared[0])

# %% [markdown]
# Saving is the gather, then `torch.save` on rank 0. Loading is the reverse: rank 0 reads the file, and
# `broadcast_from_rank0` sends one tensor after the other, of which each rank keeps its shard.

# %%
# %%ranks
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save(path, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=to_rank_0)      # on ALL ranks
    if rank == 0:
        torch.save({"model": model_state, "optimizer": optimizer_state}, path)
    dist.barrier()                                                   # the file is there when save returns


def load(path, model, optimizer):
    state = {"model": {}, "optimizer": {}}
    if rank == 0:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    read = local_bytes(state)
    set_model_state_dict(model, state["model"], options=from_rank_0)                        # on ALL ranks
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=from_rank_0)
    return read


save(folder / "full.pt", model, optimizer)
never_stopped = train(model, optimizer, range(6, 10))                # what the loaded model has to repeat

# %% [markdown]
# `weights_only=True` keeps `torch.load` from running code that someone put into the file. `mmap=True` reads a
# tensor when it is needed. Now another model, with other weights and a new optimizer, takes over.

# %% tags=["load"]
# %%ranks
model = shard(build(seed=1))
optimizer = adam(model)
read = load(folder / "full.pt", model, optimizer)
print(f"{read / whole:.0f} times the model read from the file")
continued = train(model, optimizer, range(6, 10))
print(f"loss of step 10: {continued[-1]:.4f}, without the stop: {never_stopped[-1]:.4f}")
assert continued == never_stopped

# %% [markdown]
# Not just close: equal, bit for bit, in all four steps. One rank has read the file. If each rank read it for
# itself, without `mmap`, a host with eight ranks would hold it eight times.
#
# ## Mistake 1: only rank 0 writes, so only rank 0 saves
#
# It looks so reasonable. The file is written by rank 0, so the whole thing goes under `if rank == 0`. But the
# gather needs all ranks. We give this cell one second.

# %% tags=["raises-exception", "hang"]
# %%ranks --timeout 1
if rank == 0:
    torch.save(get_model_state_dict(model, options=to_rank_0), folder / "never.pt")

# %% [markdown]
# Rank 0 waits for an all_gather that nobody else enters. The others have gone on. In a script they would now
# wait in *their* next collective. Nothing is printed until the process group's timeout: 10 minutes with NCCL
# and 30 with gloo, unless `init_process_group(timeout=...)` says otherwise.
#
# The group is broken after that, and a sharded model with it. The notebook makes a new group. The model comes
# back from its checkpoint.

# %%
# %%ranks
def resume():
    model = shard(build(seed=1))
    optimizer = adam(model)
    load(folder / "full.pt", model, optimizer)
    return model, optimizer


model, optimizer = resume()

# %% [markdown]
# ## Mistake 2: save if it is the best, says each rank
#
# Every rank looks at its own share of the validation samples, and saves if the loss is the lowest so far. The
# call is not under `if rank == 0` now. But each rank decides for itself.

# %%
# %%ranks
rows = torch.arange(1200, 1200 + 48 * world, device=device).chunk(world)[rank]
with torch.no_grad():
    mine = F.cross_entropy(model(inputs[rows]), labels[rows]).item()
every = [None] * world
dist.all_gather_object(every, mine)
best_so_far = sum(sorted(every)[:2]) / 2             # for the example: between the two lowest losses
print(f"my loss {mine:.3f}, best so far {best_so_far:.3f}: {'save!' if mine < best_so_far else 'no'}")

# %% tags=["raises-exception"]
# %%ranks --timeout 1
if mine < best_so_far:
    save(folder / "best.pt", model, optimizer)

# %% [markdown]
# The same hang, though every rank has the same line. Whatever guards a collective has to be the same on all
# ranks: make one number of all, then compare.

# %%
# %%ranks
model, optimizer = resume()

loss = torch.tensor(mine, device=device) / world
dist.all_reduce(loss)                                               # the mean over the ranks
if loss < 1.5:                                                      # the same answer on all of them
    save(folder / "best.pt", model, optimizer)
print(f"our loss {loss:.3f}: {'saved' if (folder / 'best.pt').exists() else 'not saved'}")
assert (folder / "best.pt").exists()

# %% [markdown]
# ## Mistake 3: `set_state_dict` with nothing on the other ranks
#
# There is one call for model and optimizer together, `set_state_dict`. With `broadcast_from_rank0` the other
# ranks have nothing to give, as in our `load` above. So they pass empty dictionaries, and PyTorch takes an
# empty one to mean "optimizer only".

# %% tags=["raises-exception"]
# %%ranks --timeout 1
from torch.distributed.checkpoint.state_dict import set_state_dict

state = {"model": {}, "optimizer": {}}
if rank == 0:
    state = torch.load(folder / "full.pt", weights_only=True)
set_state_dict(
    model,
    optimizer,
    model_state_dict=state["model"],
    optim_state_dict=state["optimizer"],
    options=from_rank_0,
)

# %% [markdown]
# Ranks 1 to 3 report success: "all keys", of none. Rank 0 sends weights that nobody waits for. So call
# `set_model_state_dict` and `set_optimizer_state_dict`, as `load` does.
#
# ## The way of 2022: FSDP1
#
# FSDP1 has a mode, `state_dict_type`, in which `model.state_dict()` is full. The optimizer has a function of
# its own. This is the code of the video, for saving.

# %% tags=["fsdp1"]
# %%ranks
import warnings

from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def fsdp1(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)


def save_2022(folder, model, optimizer):
    policy = FullStateDictConfig(offload_to_cpu=on_gpu, rank0_only=True)      # in the video both are True
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        model_state = model.state_dict()                            # on ALL ranks
    optimizer_state = FSDP.full_optim_state_dict(model, optimizer)  # on ALL ranks
    if rank == 0:
        torch.save(model_state, folder / "model.pt")
        torch.save(optimizer_state, folder / "optimizer.pt")
    dist.barrier()


old = fsdp1(build(seed=0))
old_optimizer = adam(old)
train(old, old_optimizer, range(6))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_2022(folder, old, old_optimizer)
for name in ("FSDP.state_dict_type", "full_optim_state_dict"):
    assert any(name in str(one.message) and "deprecated" in str(one.message) for one in said)
    print(f"deprecated: {name}")
old_never_stopped = train(old, old_optimizer, range(6, 10))

# %% [markdown]
# The file is as good as ours, and the calls are on their way out. (Without GPUs there is nothing to offload;
# in PyTorch 2.13 `offload_to_cpu=True` then fails.) Loading is where it went wrong.
#
# ## Mistake 4: loaded on rank 0, and nobody told
#
# In the video rank 0 loads the file into the plain model, and then all ranks wrap theirs in FSDP.

# %% tags=["silent"]
# %%ranks
def load_2022(wrap):
    plain = build(seed=1)
    if rank == 0:
        plain.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return wrap(plain)


def right_elements(model):
    """For each parameter, whole: which of its elements are those of the file?"""
    saved = torch.load(folder / "model.pt", weights_only=True, map_location=device)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: found[name] == saved[name] for name in saved}


corrupt = load_2022(fsdp1)
right = right_elements(corrupt)
share = torch.cat([mask.flatten() for mask in right.values()]).float().mean().item()
after = train(corrupt, adam(corrupt), [6])[0]
print(f"{share:.0%} of the elements are those of the file")
print(f"loss of step 7: {after:.2f} instead of {old_never_stopped[0]:.2f}")
assert abs(share - 1 / world) < 0.02
assert after > 1.2 * old_never_stopped[0]

# %% jupyter={"source_hidden": true}
# %%ranks
pieces = [right[f"blocks.0.{name}.weight"].flatten().chunk(64) for name in ("up", "down")]
pieces = [[piece.float().mean().item() for piece in weight] for weight in pieces]

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.5, height=1.4)
for row, shares in enumerate(ranks.get("pieces")[0]):
    for index, share in enumerate(shares):
        color = plots.RANK_COLORS[0] if share > 0.5 else plots.RANK_COLORS[5]
        axes.barh(row, 1 / len(shares), left=index / len(shares), height=0.8, color=color)
axes.set_yticks(range(2), ["up.weight", "down.weight"])
axes.set(ylim=(1.6, -0.6), xlim=(0, 1), xticks=[])
axes.set_title("blocks.0 after loading: blue is the file's, orange is not")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The first block's weights after loading on rank 0 alone: a part is right.")

# %% [markdown]
# No error. FSDP took each rank's shard from that rank's own weights, and only rank 0 had the file's. Its
# shard is the first part of the flattened block: with four ranks, the norm and the beginning of `up.weight`.
# What is trained from here on is a patchwork.
#
# The mend is an argument of FSDP, `sync_module_states=True`: all ranks get rank 0's weights before they are
# sharded. It wants the weights on GPUs. On the CPU it refuses, so there we write what it does: a broadcast.

# %%
# %%ranks
def synced(model):
    if on_gpu:
        policy = ModuleWrapPolicy({Block})
        return FSDP(model, auto_wrap_policy=policy, device_id=device, sync_module_states=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return fsdp1(model)


mended = load_2022(synced)
right = right_elements(mended)
assert all(mask.all() for mask in right.values())
print("all elements are those of the file")

# %% [markdown]
# ## Mistake 5: the optimizer's state, made and dropped
#
# The weights are right now. The video goes on with the optimizer: rank 0 loads its file and
# `scatter_full_optim_state_dict` gives each rank its part.

# %% tags=["optimizer"]
# %%ranks
warnings.filterwarnings("ignore", message=".*deprecated")            # we know by now

mended_optimizer = adam(mended)
full_osd = torch.load(folder / "optimizer.pt", weights_only=True) if rank == 0 else None
sharded_osd = FSDP.scatter_full_optim_state_dict(full_osd, mended)

print(f"state in sharded_osd: {len(sharded_osd['state'])}, in the optimizer: {len(mended_optimizer.state)}")
assert len(sharded_osd["state"]) > 0
assert len(mended_optimizer.state) == 0

# %% [markdown]
# There the code of 2022 ends. `sharded_osd` is right, a state for each FlatParameter, and the optimizer has
# never heard of it. Training goes on with averages that begin at zero again. The line that is missing:

# %%
# %%ranks
dropped = load_2022(synced)
without = train(dropped, adam(dropped), range(6, 10))

mended_optimizer.load_state_dict(sharded_osd)                        # the line that was missing
with_state = train(mended, mended_optimizer, range(6, 10))
print(f"loss of step 10, state dropped: {without[-1]:.4f}")
print(f"loss of step 10, state loaded:  {with_state[-1]:.4f}")
print(f"loss of step 10, never stopped: {old_never_stopped[-1]:.4f}")
assert with_state == old_never_stopped
assert without[0] == old_never_stopped[0]                            # not seen at once ...
assert abs(without[-1] - old_never_stopped[-1]) > 1e-3               # ... but then

# %% [markdown]
# The first loss after loading is right to the last bit, because it needs the weights alone. So a test that
# compares one loss does not find this. Compare the loss after several *steps*.
#
# `set_model_state_dict` and `set_optimizer_state_dict` take a model in FSDP1 too, and hand the state to the
# optimizer themselves: the proof below has a line on it.
#
# ## What `save_full` and `load_full` do
#
# Two functions of `fsdp_utils` do all of the above: the gather, the file, the broadcast, the optimizer, with
# FSDP1, FSDP2 and DDP. What else training needs is given by name and comes back.

# %%
# %%ranks
from fsdp_utils import CheckpointError, load_full, save_full

model, optimizer = resume()
save_full(folder / "ours.pt", model, optimizer, step=6)

model = shard(build(seed=1))
optimizer = adam(model)
state = load_full(folder / "ours.pt", model, optimizer)
print(f"step {state['step']}")
assert train(model, optimizer, range(6, 10)) == never_stopped

# %% [markdown]
# And the mistakes? Before any collective the ranks ask each other whether all of them have come. They wait
# for `wait_s` seconds, half a minute if you say nothing.

# %%
# %%ranks
def told(call):
    try:
        call()
    except CheckpointError as error:
        print(error)


if rank == 0:                                                        # mistake 1
    told(lambda: save_full(folder / "never.pt", model, optimizer, wait_s=1))

# %%
# %%ranks
if mine < best_so_far:                                               # mistake 2
    told(lambda: save_full(folder / "best.pt", model, optimizer, wait_s=1))

# %% [markdown]
# Words instead of a hang, within a second, and they say who is missing. The process group has not been
# harmed, and the model can go on:

# %%
# %%ranks
(loss,) = train(model, optimizer, [10])
assert loss < never_stopped[0]

# %% [markdown]
# Mistakes 3 to 5 cannot be made: `load_full` is called on all ranks, takes a model that is wrapped already,
# broadcasts, and fills the optimizer that it is given. The file is an ordinary one. A process without FSDP,
# and without `fsdp_utils`, reads it.

# %%
# %%ranks 0
saved = torch.load(folder / "ours.pt", weights_only=True)
plain = build(seed=1)
plain.load_state_dict(saved["model"])
accuracy = (plain(inputs[1200:]).argmax(1) == labels[1200:]).float().mean().item()
print(f"step {saved['state']['step']}, accuracy {accuracy:.0%}")

# %% [markdown]
# Guessing would be right on a tenth of the points.
#
# ## When it stops fitting
#
# Rank 0's host takes in all of model and optimizer. In fp32 with Adam that is 12 bytes for each parameter.
# This is a calculation, not a measurement.

# %% tags=["fits"]
whole_gib = {f"{billions:g}B": 12e9 * billions / 2**30 for billions in (1.5, 7, 13, 20, 30, 70, 175, 405)}
for name, gib in whole_gib.items():
    print(f"{name:>5} {gib:8,.0f} GiB on rank 0's host, and in the file")

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.5, height=2.8)
axes.bar(range(len(whole_gib)), list(whole_gib.values()), color=plots.RANK_COLORS[0], width=0.6)
for gib, text in ((256, "a host of 256 GiB"), (1024, "1 TiB"), (2048, "2 TiB")):
    axes.axhline(gib, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.text(-0.45, gib * 1.08, text, fontsize=8)
axes.set_xticks(range(len(whole_gib)), list(whole_gib))
axes.set(yscale="log", ylabel="GiB on rank 0's host", ylim=(8, 9000))
axes.set_title("model + Adam in fp32, calculated")
plots.show(fig, alt="Host memory that a full state dict takes on rank 0, for models from 1.5B to 405B.")

# %% [markdown]
# And time: one rank writes, and all GPUs wait. How fast does a rank write here? We write 64 MiB, the way
# `torch.save` does and as raw bytes, until they are on the disk. Your numbers will be others.

# %% tags=["nbval-ignore-output", "seconds"]
# %%ranks 0
import os


def seconds_to_write(write):
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        with (folder / "large").open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        best = min(best, time.perf_counter() - began)
    return best


large = torch.randn(2**24)                                           # f32[16777216], 64 MiB
saving = seconds_to_write(lambda file: torch.save(large, file))
raw = seconds_to_write(lambda file: file.write(large.numpy()))
(folder / "large").unlink()
gib_per_s = 1 / 16 / saving
print(f"torch.save {gib_per_s:.2f} GiB/s, raw bytes {1 / 16 / raw:.2f} GiB/s")
assert 0.1 < saving / raw < 20

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
gib_per_s = ranks.get("rank == 0 and gib_per_s")[0]
minutes = {name: gib / gib_per_s / 60 for name, gib in whole_gib.items()}
for name, some in minutes.items():
    print(f"{name:>5} {some:7.1f} minutes to write at {gib_per_s:.2f} GiB/s, calculated")
assert 0.01 < gib_per_s < 100

# %% [markdown]
# So a full checkpoint is right for a model that fits into one host, and at the end of training, when the file
# goes elsewhere. While a large model trains, let every rank write its own part. That is [lesson
# 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# ## Proof
#
# Each way of saving and loading, then four more steps: against the run that never stopped, and against one
# process that has the whole model and never stopped either.

# %% tags=["equality"]
# %%ranks
alone = build(seed=0)
whole_run = train(alone, adam(alone), range(10), rank=0, world=1)[6:]


def after(load, wrap):
    model = wrap(build(seed=1))
    optimizer = adam(model)
    load(model, optimizer)
    return train(model, optimizer, range(6, 10))


full_pt, ours_pt = folder / "full.pt", folder / "ours.pt"
ways = {
    "FSDP2, never stopped": never_stopped,
    "FSDP2, set_…_state_dict": after(lambda m, o: load(full_pt, m, o), shard),
    "FSDP2, load_full": after(lambda m, o: load_full(ours_pt, m, o), shard),
    "FSDP1, never stopped": old_never_stopped,
    "FSDP1, as in 2022, mended": with_state,
    "FSDP1, set_…_state_dict": after(lambda m, o: load(full_pt, m, o), fsdp1),
    "FSDP1, load_full of FSDP2's file": after(lambda m, o: load_full(ours_pt, m, o), fsdp1),
    "one process, never stopped": whole_run,
}
for name, losses in ways.items():
    print(f"{name:34} step 7: {losses[0]:.4f}   step 10: {losses[-1]:.4f}")
    torch.testing.assert_close(losses, whole_run, rtol=1e-4, atol=1e-4)
assert ways["FSDP2, set_…_state_dict"] == ways["FSDP2, load_full"] == never_stopped
assert with_state == old_never_stopped

# %% [markdown]
# Continuing equals not having stopped, to the last bit. FSDP2, FSDP1 and one process agree within the order
# of additions in float32.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    3,
    {
        "full-fits-20b": f"Model and Adam in fp32, calculated: {whole_gib['20B']:.0f} GiB for 20B, "
        f"{whole_gib['30B']:.0f} GiB for 30B, {whole_gib['405B'] / 1024:.1f} TiB for 405B. Rank 0 took in "
        f"{by_rank[0]['full, cpu_offload']:.1f} times the model, the others nothing.",
        "optimizer-17-gb": f"Calculated: weights and both averages are {12 * 1.5:.0f} GB, which are "
        f"{whole_gib['1.5B']:.1f} GiB. The averages alone, 12 GB. Three minutes for 17 GB are 0.1 GB/s.",
        "full-timeouts": "A save that not all ranks enter hangs until the group's timeout: two ways above. "
        "One that all enter holds all of them until rank 0 has written: see the minutes above.",
        "monolith-rank0": f"The file was read on one rank of {world}. The others received tensor by tensor, "
        "and kept their shards.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. How large is the file?** A model has `billions` of parameters. Its weights take `weight_bytes` each.
# The optimizer keeps `averages` tensors of the same shape in fp32. How many GiB has a full checkpoint,
# rounded to a whole number?

# %%
def file_gib(billions, weight_bytes, averages):
    return None  # your line here


files = {(7, 4, 2): 78, (7, 2, 2): 65, (7, 2, 0): 13, (70, 4, 1): 522}
lesson.check(file_gib, files)

# %% [markdown]
# **2. One decision.** Write `decide(mine, best)`: whether to save, the same on every rank. Save if the
# *worst* rank's loss is below `best`. Here each rank's loss is `1 + rank`.

# %%
# %%ranks
def decide(mine, best):
    return None  # your lines here


answers = [decide(1.0 + rank, best) for best in (0.5, 1.5, world + 1)]

# %%
yours = ranks.get("answers")
lesson.check(None if None in yours[0] else yours, [[False, False, True]] * world)

# %% [markdown]
# **3. How often?** A save stops training for `seconds`. How many minutes of training have to lie between two
# saves, so that saving takes at most `share` of all time? One decimal.

# %%
def minutes_between(seconds, share):
    return None  # your line here


pauses = {(60, 0.05): 19.0, (60, 0.5): 1.0, (600, 0.01): 990.0}
lesson.check(minutes_between, pauses)

# %% [markdown]
# ## Summary
#
# - A full state dict is gathered by all ranks, in rank 0's CPU memory: three models' worth with Adam.
# - `full_state_dict=True` without `cpu_offload=True` gives all of it to every rank.
# - All ranks call, rank 0 writes. What guards the call has to be one decision for all.
# - FSDP1: `sync_module_states=True`, or rank 0 alone has what was loaded. Give the optimizer its state.
# - Test a checkpoint by the losses of several steps, not of one.
# - `save_full` and `load_full` say who is missing, instead of waiting.
# - At 12 bytes per parameter the host of rank 0 is the limit.

# %%
# %%ranks 0
import shutil

shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# [Lesson 4](04_backward_prefetch.ipynb) turns to speed: in which order does FSDP gather? How a model is saved
# that is too large for one host is [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# [← lesson 2](02_activation_checkpointing.ipynb) · [lesson 4 →](04_backward_prefetch.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def file_gib(billions, weight_bytes, averages):
    return round(billions * 1e9 * (weight_bytes + 4 * averages) / 2**30)


lesson.check(file_gib, files, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def decide(mine, best):
    worst = torch.tensor(mine, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item() < best


answers = [decide(1.0 + rank, best) for best in (0.5, 1.5, world + 1)]

# %% tags=["solution"] jupyter={"source_hidden": true}
lesson.check(ranks.get("answers"), [[False, False, True]] * world, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def minutes_between(seconds, share):
    return round(seconds * (1 - share) / share / 60, 1)


lesson.check(minutes_between, pauses, strict=True)

# %% [markdown]
# # 3 · FULL_STATE_DICT
#
# After training with FSDP, each rank holds a part of the model. How do I get one file out of the shards,
# and back?
#
# - **To save, every rank calls `get_state_dict` with `full_state_dict=True, cpu_offload=True`, and rank 0
#   writes what it gets.**
# - **To load, rank 0 reads the file, and every rank calls `set_model_state_dict` and
#   `set_optimizer_state_dict` with `full_state_dict=True, broadcast_from_rank0=True`.**
#
# You need such a file when the weights leave FSDP: for inference, for a colleague, for `from_pretrained`.
# You can also resume training from it if rank 0's machine can hold model and optimizer in full. (The title
# is FSDP1's name for such a file; the code is FSDP2's, `fully_shard`.)
#
# The drawing shows a save of four tensors by four ranks; each colour is one rank's piece. All ranks gather
# one tensor after another, and only rank 0 keeps it. At the end, the others have what they had before.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table

WORLD, TENSORS = 4, 4
fig, panels = plots.figure(3, width=9.4, height=2.4)
for axes, (title, moment) in zip(panels, {"in training": 0, "tensor 2 is gathered": 2, "at the end": 5}.items()):
    for rank in range(WORLD):
        for tensor in range(TENSORS):
            full = tensor + 1 == moment or (rank == 0 and tensor + 1 < moment)
            for piece in range(WORLD):
                color = plots.RANK_COLORS[piece] if full or piece == rank else plots.FAINT
                axes.barh(rank, 0.22, left=1.1 * tensor + piece / WORLD, height=0.6, color=color)
    axes.set_yticks(range(WORLD), [f"rank {r}" for r in range(WORLD)] if axes is panels[0] else [])
    axes.set_xticks([1.1 * t + 0.5 for t in range(TENSORS)], [f"tensor {t + 1}" for t in range(TENSORS)])
    axes.set(title=title, ylim=(WORLD - 0.5, -0.5))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Each rank has a piece of each tensor; rank 0 ends up with all pieces of all tensors.")

# %% tags=["card"]
lesson.card(
    3,
    learn="save and load a sharded model and its optimizer as one file, and five mistakes with it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    ranks="4 on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 18, 22),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then run `torchrun --nproc-per-node 4 train.py`. `save` and `load` are the
# functions to take home; the rest tests them. The first run trains eight steps, saves, and goes on. Two
# others begin with other weights and a new optimizer, and load the file; one forgets the optimizer's state.
# Then all three train steps 9 to 13 on the same batches (each rank has its own), so after a good load their
# losses are the same.
#
# ```python
# import torch
# import torch.distributed.checkpoint.state_dict as sd
# from torch import distributed as dist, nn
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# rank, mesh = dist.get_rank(), dist.init_device_mesh(device, (dist.get_world_size(),))  # also sets the GPU
# to_rank_0 = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
# from_rank_0 = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
#
#
# def save(model, optimizer):                                 # ALL ranks call it
#     weights, averages = sd.get_state_dict(model, optimizer, options=to_rank_0)
#     if rank == 0:
#         torch.save({"model": weights, "optimizer": averages}, "full.pt")
#
#
# def load(model, optimizer=None):                            # ALL ranks call it, after fully_shard
#     file = torch.load("full.pt", mmap=True) if rank == 0 else {"model": {}, "optimizer": {}}
#     sd.set_model_state_dict(model, file["model"], options=from_rank_0)
#     if optimizer is not None:
#         sd.set_optimizer_state_dict(model, optimizer, file["optimizer"], options=from_rank_0)
#
#
# def build(seed):
#     torch.manual_seed(seed)
#     model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
#     return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), lr=0.02)
#
#
# def train_step(model, optimizer, step):
#     x = torch.randn(64, 64, generator=torch.Generator(device).manual_seed(100 * step + rank), device=device)
#     loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     return f"{loss:.2f}"
#
#
# runs = {"never stopped": build(seed=0), "both loaded": build(seed=1), "model alone": build(seed=1)}
# for step in range(8):
#     train_step(*runs["never stopped"], step)
# save(*runs["never stopped"])
# load(*runs["both loaded"])
# load(runs["model alone"][0])                                # a mistake: this run's AdamW starts from zero
# for name, run in runs.items():
#     losses = [train_step(*run, step) for step in range(8, 13)]
#     if rank == 0:
#         print(f"{name:13}: steps 9 to 13:", *losses)
# dist.destroy_process_group()
# ```
# ```text
# never stopped: steps 9 to 13: 0.90 0.96 0.92 0.85 0.61
# both loaded  : steps 9 to 13: 0.90 0.96 0.92 0.85 0.61
# model alone  : steps 9 to 13: 0.90 0.82 1.01 0.94 1.10
# ```
#
# The losses are rank 0's, each computed before that step's update. "Both loaded" prints what "never
# stopped" prints, so nothing was lost. "Model alone" begins with the right loss, because a loss before the
# first update depends on the weights alone. Then it drifts away without an error (mistake 5 below). A check
# of the first loss would pass here: **compare the losses of several steps.**
#
# The optimizer's part also holds its settings, so the saved learning rate replaces yours. Your loop's step
# number, the scheduler and the place in your data are not in the file (AdamW's own count of steps is);
# [lesson 10](10_end_to_end.ipynb) lists all that a run needs.
#
# ## From a shard to the full tensor, and back
#
# A **state dict** is the dictionary that `model.state_dict()` returns: every parameter by its name. After
# `fully_shard` its values are **DTensors**. A DTensor knows the shape of the full tensor but holds this
# rank's piece, its shard. So `torch.save(model.state_dict(), …)` on rank 0 is not enough: the file gets
# rank 0's shards alone.
#
# Two calls convert. `tensor.full_tensor()` gathers the pieces of all ranks into an ordinary tensor.
# `distribute_tensor(...)` goes the other way: it takes the values of rank 0 and sends each rank its piece.
# Both are **collectives**: they exchange data between the ranks, so every rank has to make the call, even
# if only rank 0 needs the result. The script's functions do the same for every tensor.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")

# %% [markdown]
# A cell with `%%ranks` runs on all four ranks. The folded cell below defines what the lesson needs:
# `plain(seed)` is a model of three blocks and a last layer, and `shard(model)` wraps it and makes its
# AdamW. `train`, `save` and `load` are the script's functions, with the path as an argument, and `train`
# returns the mean loss of all ranks.

# %% jupyter={"source_hidden": true}
# %%ranks
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

rank, world = dist.get_rank(), dist.get_world_size()
to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
shared = [tempfile.mkdtemp() if rank == 0 else None]    # in a job: a path that you pass
dist.broadcast_object_list(shared, src=0)
path = Path(shared[0]) / "full.pt"


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 10))


def shard(model):
    mesh = init_device_mesh("cpu", (world,))
    for part in [*model[:3], model]:
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def my_loss(model, seed):
    torch.manual_seed(seed)
    x = torch.randn(64, 64)
    return nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = my_loss(model, 100 * step + rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / world)
        losses.append(f"{loss:.2f}")
    return losses


def save(path, model, optimizer):
    weights, averages = get_state_dict(model, optimizer, options=to_rank_0)
    if rank == 0:
        torch.save({"model": weights, "optimizer": averages}, path)


def read(path):
    return torch.load(path, mmap=True) if rank == 0 else {"model": {}, "optimizer": {}}


def load(path, model, optimizer):
    file = read(path)
    set_model_state_dict(model, file["model"], options=from_rank_0)
    set_optimizer_state_dict(model, optimizer, file["optimizer"], options=from_rank_0)


def leaves(tree):
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in found]


# %% [markdown]
# The cell gathers one parameter, the last layer's bias, then distributes the numbers 0 to 9 in the same way.
# Look at how many each rank holds.

# %%
# %%ranks
model, optimizer = shard(plain(seed=0))
bias = model.state_dict()["3.bias"]                                 # a DTensor
full = bias.full_tensor()                                           # on ALL ranks
values = torch.arange(10.0) if rank == 0 else torch.empty(10)       # only rank 0's values count
piece = distribute_tensor(values, bias.device_mesh, bias.placements)
print(f"{len(bias.to_local())} of {len(full)} are mine; distributed: {piece.to_local().tolist()}")

# %% [markdown]
# Ten divided by four is rounded up to three, and rank 3 has the one that is left. The `torch.empty(10)` of
# the other ranks was not read; it only says which shape and dtype to receive.
#
# ## Who holds how much
#
# `get_state_dict(model, optimizer)` returns two state dicts, one of the model and one of the optimizer.
# AdamW keeps two averages for each parameter, so in full both together are three times the size of the
# model. The cell prints what each rank holds of the result under three kinds of options, in sizes of the
# model. Predict first: what do ranks 1 to 3 hold with `full_state_dict=True` alone?
#
# (`leaves`, folded above, lists a state dict's tensors; `Meter` records which tensors are alive, for the
# figure.)

# %% tags=["gather"]
# %%ranks
from fsdp_utils.lessons.meter import Meter

train(model, optimizer, range(8))
model_bytes = sum(4 * p.numel() for p in model.parameters())
kinds = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full + cpu_offload": to_rank_0,
}
held = {}
for kind, options in kinds.items():
    with Meter([*model.parameters(), *leaves(optimizer.state_dict())]) as meter:
        states = get_state_dict(model, optimizer, options=options)              # on ALL ranks
    held[kind] = sum(tensor.nbytes for tensor in leaves(states)) / model_bytes
    del states
curve = [nbytes / model_bytes for nbytes in meter.tensor_bytes]                 # of the last kind
print(" | ".join(f"{kind} {size:.2f}" for kind, size in held.items()))

# %% [markdown]
# Without options nothing is gathered: each rank has a quarter of three sizes, 0.75. With
# `full_state_dict=True` alone, *every* rank gets all three, and on GPUs each GPU has to hold them, which
# sharding was to avoid. Added to it, `cpu_offload=True` does two things, although its name says one: each
# gathered tensor moves to the CPU, and only rank 0 gets the result. The others get `{}`.
#
# The figure shows all tensors alive on a rank during the last of the three calls.

# %% jupyter={"source_hidden": true}
of_first, *_, of_last = ranks.get("curve")
world = len(ranks.get("0"))
fig, panels = plots.figure(2, width=9.4, height=2.5)
for axes, rank, curve in zip(panels, (0, world - 1), (of_first, of_last)):
    axes.fill_between(range(len(curve)), curve, color=plots.RANK_COLORS[rank], linewidth=0)
    axes.axhline(3 / world, color="black", linewidth=0.8, linestyle=":")
    axes.text(0.04 * len(curve), 4.3, f"peak {max(curve):.1f}", fontweight="bold")
    axes.set(title=f"rank {rank}", xlabel="operations of get_state_dict", xticks=[])
    axes.set(ylim=(0, 5), xlim=(0, len(curve)))
panels[0].set_ylabel("tensors alive,\nin sizes of the model")
panels[0].text(0.04 * len(of_first), 0.4 * 3 / world, "shards", color="white")
assert all(abs(of["full"] - 3) < 0.01 for of in ranks.get("held"))
assert [round(of["full + cpu_offload"]) for of in ranks.get("held")] == [3] + [0] * (world - 1)
assert max(of_last) < 3 / world + 1
assert max(of_first) > 3 + 2.5 / world
plots.show(fig, alt="Tensors alive while rank 0 gets a full state dict, on rank 0 and on the last rank.")

# %% [markdown]
# The dotted line is the shards. Rank 0 climbs tensor by tensor to 3.75: its shards and the full result. The
# last rank only has bumps: each is a tensor that it helps to gather and drops. So beyond its shards it needs
# room for about one full tensor, not for the model.
#
# All of this is CPU memory here. With GPUs, the shards and the bumps are in GPU memory, and rank 0's climb
# is in its machine's.
#
# ## Your turn 1 · Gather a full state dict
#
# Write `my_full(model)`, which does for the model what `get_model_state_dict(model, options=to_rank_0)`
# does.
#
# - **Given:** the sharded `model`, and `rank`.
# - **Return:** on rank 0 a dictionary with every name and its full, ordinary tensor; on the other ranks
#   `{}`.
# - **Also measured:** a rank other than 0 must not collect full tensors. One at a time, as in the figure,
#   is enough. Up to four of the largest pass, because other ways to gather need buffers; the blocks have
#   six of that size.
#
# <details><summary>Hint</summary>
#
# Loop over `model.state_dict().items()` and gather one tensor per iteration. Which line must *not* stand
# under `if rank == 0`?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

BEYOND = "memory beyond shards and result, in largest tensors"


def beyond(work, model, file=()):
    """Run `work`; return its result, and the most bytes beyond shards, file and result, in largest tensors."""
    with Meter([*leaves(model.state_dict()), *file]) as meter:
        found = work()
    spare = max(meter.peak_tensor_bytes - meter.held_bytes - sum(t.nbytes for t in leaves(found)), 0)
    return found, spare / max(4 * p.numel() for p in model.parameters())


@turn(1, {
    "rank 0 has all tensors in full": exactly(True, "Rank 0 should have every name, with the full tensor."),
    "the other ranks have {}": exactly(True, "The other ranks should return `{}`: they need no result."),
    BEYOND: at_most(4, "A rank collected full tensors: only rank 0 may keep them."),
})
def score_full(my_full):
    (model, _), right = shard(plain(seed=2)), plain(seed=2).state_dict()
    found, spare = beyond(lambda: my_full(model), model)
    if not isinstance(found, dict):
        raise NotYet(f"Return a dictionary of tensors by name, not a {type(found).__name__}.")
    if any(type(tensor) is not torch.Tensor for tensor in found.values()):
        raise NotYet("Return ordinary tensors: a DTensor in the result holds only this rank's piece.")
    equal = found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
    here = rank == 0
    return {
        "rank 0 has all tensors in full": equal if here else True,
        "the other ranks have {}": True if here else not found,
        BEYOND: spare,
    }


# %%
# %%turn 1
def my_full(model):
    # for each tensor of model.state_dict(): gather it, and keep it on rank 0
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def my_full(model):
    full = {}
    for name, tensor in model.state_dict().items():
        gathered = tensor.full_tensor()         # on ALL ranks
        if rank == 0:
            full[name] = gathered.cpu()
    return full

# %% tags=["right"] turn=1
from torch.distributed.tensor import Replicate

def my_full(model):
    full = {}
    for name, tensor in model.state_dict().items():
        gathered = tensor.redistribute(placements=[Replicate()]).to_local()
        full.update({name: gathered} if rank == 0 else {})
    return full

# %% tags=["right"] turn=1
def my_full(model):
    return get_model_state_dict(model, options=to_rank_0)

# %% tags=["right"] turn=1
def my_full(model):                             # gather the pieces as objects
    full = {}
    for name, tensor in model.state_dict().items():
        pieces = [None] * world if rank == 0 else None
        dist.gather_object(tensor.to_local(), pieces)
        if rank == 0:
            full[name] = torch.cat(pieces)
    return full

# %% tags=["wrong"] turn=1 says="they need no result"
def my_full(model):
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

# %% tags=["wrong"] turn=1 says="collected full tensors"
def my_full(model):
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return full if rank == 0 else {}

# %% tags=["wrong"] turn=1 says="with the full tensor"
def my_full(model):
    return {name: tensor.to_local() for name, tensor in model.state_dict().items()} if rank == 0 else {}

# %% tags=["wrong"] turn=1 says="holds only this rank's piece"
def my_full(model):
    return model.state_dict() if rank == 0 else {}

# %% tags=["wrong"] turn=1 says="no such call on"
def my_full(model):
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()} if rank == 0 else {}

# %% [markdown]
# ## One file, which plain PyTorch reads
#
# Now save, and load the file in two ways: into a sharded model with other weights, and into a plain model
# on rank 0 alone. The cell asserts that the loaded run repeats the losses of the first. Look at who reads from the file.

# %% tags=["load"]
# %%ranks
save(path, model, optimizer)                            # on ALL ranks
never_stopped = train(model, optimizer, range(8, 13))
model, optimizer = shard(plain(seed=1))                 # other weights, to be overwritten
load(path, model, optimizer)                            # on ALL ranks
assert train(model, optimizer, range(8, 13)) == never_stopped

read_mib = sum(tensor.nbytes for tensor in leaves(read(path))) / 2**20
print(f"{read_mib:.2f} MiB read from the file", end="")
if rank == 0:                                           # no collective here: an ordinary model
    alone = plain(seed=1)
    alone.load_state_dict(read(path)["model"])          # strict: every name is there, and no other
    print(f"; plain PyTorch takes {len(alone.state_dict())} tensors", end="")

# %% [markdown]
# The file is three times the model's size. Rank 0 alone reads, and broadcasts one tensor after another; each
# rank copies its piece into its shard and drops the rest. So only rank 0's machine needs room for the file,
# and a GPU needs room for about one full tensor beside its shards. With `mmap=True`, `torch.load` reads a
# tensor from the disk when it is used, and not all at the beginning.
#
# The load into the plain model is strict and did not complain, so the file has exactly the names of an
# unsharded model. Nothing in it depends on the number of ranks: you can save on 64 ranks and load on 8.
#
# For a transformers model that you wrapped yourself, call `get_model_state_dict(model, options=to_rank_0)`
# on all ranks, and on rank 0 `model.save_pretrained(folder, state_dict=weights)`. `from_pretrained` reads
# that folder.
#
# ## All ranks call, or one waits
#
# Rank 0 writes the file, so everything goes under `if rank == 0`: that is the first of five mistakes. The
# cell makes it, and is meant to fail. A collective waits for at most 1 second in it; the defaults are 30
# minutes with gloo and 10 with NCCL. Look at the first line and at "Meanwhile".

# %% tags=["raises-exception", "hang"]
# %%ranks --timeout 1
if rank == 0:
    torch.save(get_model_state_dict(model, options=to_rank_0), path.with_name("never.pt"))

# %% [markdown]
# Rank 0 waits in an all-gather, and the others, done with the cell, never enter it. In a script they would
# go on to the next training step, and its first collective would meet rank 0's gather: the result is a
# hang, an error or wrong numbers ([lesson 15](15_when_it_hangs.ipynb)).
#
# Here are all five, as functions. In the first three, some ranks make a collective call that others do not.
# The last two call the same on all ranks, and raise nothing. `outcome(mistake)` (folded) lets the ranks
# tell each other each call before they begin it, and says who would wait for whom. (In a job,
# `check_in_step` of lesson 15 finds such a line.) If nobody would wait, it trains steps 9 to 13 and returns
# the mean losses, to compare with the row `right`.

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together


def right():
    model, optimizer = shard(plain(seed=1))
    load(path, model, optimizer)
    return model, optimizer


def validate(model):
    """Return this rank's own loss, and the mean of all ranks."""
    mine = my_loss(model, rank).detach()
    dist.all_reduce(mean := mine / world)
    return mine, mean


def outcome(program):
    """Say on which call the ranks part, else give the losses of five more steps."""
    loaded, parted = run_together(program)
    if parted:
        return "hangs: " + parted.partition(": ")[2].rstrip(".")
    return "no error, losses " + " ".join(train(*loaded, range(8, 13)))


# %% tags=["mistakes"]
# %%ranks
def only_rank_0_saves():                                # 1
    model, optimizer = right()
    if rank == 0:
        save(path.with_name("never.pt"), model, optimizer)
    return model, optimizer


def each_rank_decides():                                # 2: "save if the loss is the best so far"
    model, optimizer = right()
    loss, best = validate(model)                        # this rank's loss; as best, the mean of all ranks
    if loss < best:
        save(path.with_name("best.pt"), model, optimizer)
    return model, optimizer


def nothing_on_the_others():                            # 3: one call for both state dicts
    model, optimizer = shard(plain(seed=1))
    file = read(path)                                   # on the other ranks, two empty dicts
    set_state_dict(model, optimizer, model_state_dict=file["model"], optim_state_dict=file["optimizer"],
                   options=from_rank_0)
    return model, optimizer


def loads_before_sharding():                            # 4: rank 0 loads, then all ranks shard
    model = plain(seed=1)
    if rank == 0:
        model.load_state_dict(read(path)["model"])
    model, optimizer = shard(model)
    set_optimizer_state_dict(model, optimizer, read(path)["optimizer"], options=from_rank_0)
    return model, optimizer


def forgets_the_optimizer():                            # 5
    model, optimizer = shard(plain(seed=1))
    set_model_state_dict(model, read(path)["model"], options=from_rank_0)
    return model, optimizer


found = {}
for program in [right, only_rank_0_saves, each_rank_decides, nothing_on_the_others, loads_before_sharding,
                forgets_the_optimizer]:
    found[program.__name__] = outcome(program)

# %% jupyter={"source_hidden": true}
found = ranks.get("found")[0]
assert [said.startswith("hangs") for said in found.values()] == [False, True, True, True, False, False]
assert len(set(found.values())) == 6
assert found["right"].endswith(" ".join(ranks.get("never_stopped")[0]))
first = {name: said.split("losses ")[-1].split()[0] for name, said in found.items()}
assert first["forgets_the_optimizer"] == first["right"] != first["loads_before_sharding"]
Table(["", "function", "what happens"], [[n or "", name, said] for n, (name, said) in enumerate(found.items())])

# %% [markdown]
# (The model is larger than the script's, so its losses differ.) 65,536 bytes are the first tensor to gather:
# a block's weight in full, 64 · 256 numbers of 4 bytes.
#
# 1. All ranks have to call `save`; only `torch.save` is rank 0's.
# 2. All ranks run the same line, but each judges by its own loss. A condition around a collective must have
#    the same value on all ranks: `all_reduce` the loss first, then compare.
# 3. `set_state_dict` takes an *empty* model state dict to mean "load the optimizer only" (in its source,
#    `optim_only=not model_state_dict`). So the ranks without a file skip the model, and rank 0 broadcasts
#    alone: its first 8 bytes say how long the list of names will be. Make two calls, as the script does.
# 4. `fully_shard` cuts each rank's piece from that rank's own weights, and only rank 0's were the file's.
#    Three quarters of the model are still random, and the loss is near ln 10 = 2.30, a guess among ten
#    classes. Shard first, then load.
# 5. AdamW divides an average of past gradients by the root of an average of their squares. After one step
#    of a new AdamW each holds one gradient alone, so their ratio, corrected for the empty start, is about 1
#    or -1: every weight moves by the whole learning rate, however small its gradient is.
#
# ## Your turn 2 · Load a full state dict
#
# Write the way back, `my_load(model, state)`, as `set_model_state_dict` does it. This model also has
# **buffers**: tensors that are saved but not trained, here those of a `BatchNorm1d`. FSDP2 does not shard
# buffers, so every rank needs them in full.
#
# - **Given:** `model`, sharded, with other values; `state`, the full state dict on rank 0 and `{}` on the
#   others.
# - **Do:** copy the file's values into the tensors of `model`, on every rank. Return nothing.
# - **Also measured:** memory as in turn 1; no rank but 0 may hold the whole file.
#
# <details><summary>Hint</summary>
#
# The tensors of `model.state_dict()` are the model's own, so `.copy_(...)` into them loads it. On the ranks
# without a file they also tell which shape and dtype will come. Which of them are DTensors?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
@turn(2, {
    "parameters that are wrong": exactly(
        0, lambda n: "The shards are not the file's: either nothing is copied into the model, or a rank other "
        "than 0 cuts its piece from values of its own."
    ),
    "buffers that are wrong": exactly(0, "A buffer is no DTensor: rank 0 has to send it, in full."),
    BEYOND: at_most(4, "A rank held several full tensors at once: send one, cut it, drop it."),
}, returns=False)
def score_load(my_load):
    def whole(seed):
        model = plain(seed).append(nn.BatchNorm1d(10))
        for buffer in model.buffers():
            buffer.fill_(seed)
        return model

    (model, _), right = shard(whole(seed=3)), whole(seed=4).state_dict()
    state = {name: tensor.clone() for name, tensor in right.items()} if rank == 0 else {}
    with torch.no_grad():
        _, spare = beyond(lambda: my_load(model, state), model, state.values())
    parameters = {name for name, _ in model.named_parameters()}
    now = model.state_dict()
    if any(isinstance(now[name], DTensor) != (name in parameters) for name in right):
        raise NotYet("The model is no longer sharded as it was: copy into its tensors.")
    wrong = set()
    for name, tensor in now.items():
        if name in parameters:
            mesh, tensor = tensor.device_mesh, tensor.to_local()
            mine = distribute_tensor(right[name], mesh, now[name].placements, src_data_rank=None).to_local()
        else:
            mine = right[name]
        wrong |= set() if torch.equal(tensor, mine) else {name}
    return {
        "parameters that are wrong": len(wrong & parameters),
        "buffers that are wrong": len(wrong - parameters),
        BEYOND: spare,
    }


# %%
# %%turn 2
def my_load(model, state):
    # for each tensor of model.state_dict(): send rank 0's value to all ranks, and copy this rank's part
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def my_load(model, state):
    for name, mine in model.state_dict().items():
        full = state[name] if rank == 0 else torch.empty(mine.shape, dtype=mine.dtype)
        if isinstance(mine, DTensor):
            mine.copy_(distribute_tensor(full, mine.device_mesh, mine.placements))
        else:
            dist.broadcast(full, src=0)
            mine.copy_(full)

# %% tags=["right"] turn=2
def my_load(model, state):
    set_model_state_dict(model, state, options=from_rank_0)

# %% tags=["right"] turn=2
def my_load(model, state):                      # every rank receives all, and cuts its piece by itself
    for name, mine in model.state_dict().items():
        full = state[name] if rank == 0 else torch.empty(mine.shape, dtype=mine.dtype)
        dist.broadcast(full, src=0)
        if isinstance(mine, DTensor):
            mine = mine.to_local()
            rows = -(-len(full) // world)
            full = full[rank * rows : (rank + 1) * rows]
        mine.copy_(full)

# %% tags=["right"] turn=2
def my_load(model, state):                      # one tensor at a time as an object, then load_state_dict
    for name, mine in model.state_dict().items():
        sent = [state.get(name)]
        dist.broadcast_object_list(sent, src=0)
        if isinstance(mine, DTensor):
            sent[0] = distribute_tensor(sent[0], mine.device_mesh, mine.placements)
        model.load_state_dict({name: sent[0]}, strict=False)

# %% tags=["wrong"] turn=2 says="A buffer is no DTensor"
def my_load(model, state):
    for name, mine in model.named_parameters():
        full = state[name] if rank == 0 else torch.empty(mine.shape)
        mine.copy_(distribute_tensor(full, mine.device_mesh, mine.placements))

# %% tags=["wrong"] turn=2 says="values of its own"
def my_load(model, state):
    for name, mine in model.state_dict().items():
        full = state[name] if rank == 0 else torch.zeros(mine.shape, dtype=mine.dtype)
        if isinstance(mine, DTensor):
            mine.copy_(distribute_tensor(full, mine.device_mesh, mine.placements, src_data_rank=None))
        else:
            dist.broadcast(full, src=0)
            mine.copy_(full)

# %% tags=["wrong"] turn=2 says="several full tensors at once"
def my_load(model, state):
    sent = [state]
    dist.broadcast_object_list(sent, src=0)     # the whole state dict, on every rank
    for name, mine in model.state_dict().items():
        full = sent[0][name]
        if isinstance(mine, DTensor):
            full = distribute_tensor(full, mine.device_mesh, mine.placements)
        mine.copy_(full)

# %% tags=["wrong"] turn=2 says="no such call on"
def my_load(model, state):
    for name, full in state.items():
        mine = model.state_dict()[name]
        if isinstance(mine, DTensor):
            full = distribute_tensor(full, mine.device_mesh, mine.placements)
        mine.copy_(full)

# %% [markdown]
# ## When one file stops fitting
#
# In float32, rank 0's machine has to hold 4 bytes for each weight, and 8 for AdamW's two averages. The
# table is arithmetic, not a measurement. Compare its third column with your machine's memory. The last
# column assumes a disk that takes 1 GiB per second; divide it by your disk's number.

# %% tags=["fits"]
rows = []
for billions in (1.5, 7, 20, 70, 405):
    model_gib, all_gib = 4e9 * billions / 2**30, 12e9 * billions / 2**30
    rows.append([f"{billions:g}B", round(model_gib, 1), round(all_gib, 1), round(all_gib / 60, 1)])
Table(["model", "GiB, model alone", "GiB, with AdamW", "minutes to write at 1 GiB/s"], rows)

# %% [markdown]
# Time can be the tighter limit. While rank 0 writes, the GPUs are idle and the other ranks wait in their
# next collective, no longer than its time-out. At 1 GiB/s, 70B takes 13 minutes, and with NCCL's default of
# 10 the job would be aborted (`init_process_group(timeout=...)` sets another).
#
# So take one file to hand on the weights after training, and to resume models that one machine holds
# easily. While a larger model trains, let every rank write its own shards at the same time:
# [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# <details><summary>The way of 2022: FSDP1</summary>
#
# The [video](../videos.md) uses `FSDP.state_dict_type` with `StateDictType.FULL_STATE_DICT`, and
# `FSDP.full_optim_state_dict`; both are deprecated. The functions of this lesson also take a model under
# FSDP1, and the names and shapes in the file are the same. (On a CPU leave out `cpu_offload=True` for
# FSDP1: with it PyTorch 2.13 crashes.) Before FSDP2 loads such an optimizer's state, see turn 2 of
# [lesson 13](13_from_fsdp1_to_fsdp2.ipynb).
#
# </details>
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the job hangs in a save; after the time-out `Timed out waiting 1800000ms` (gloo) | mistakes 1 to 3: not all ranks call | call on all ranks; [lesson 15](15_when_it_hangs.ipynb) finds the line |
# | `torch.distributed.tensor must be imported to load DTensors` in `torch.load` | the file holds `model.state_dict()` of rank 0, its shards alone | save again, with `get_state_dict` on all ranks |
# | `got mixed torch.Tensor and DTensor` in `load_state_dict` | a full state dict for a sharded model | `set_model_state_dict` with `broadcast_from_rank0=True` |
# | the loss is as before training | mistake 4 | shard, then load |
# | the first loss is right, later ones are not | mistake 5, or a file from FSDP1 | load the optimizer; for FSDP1 see [lesson 13](13_from_fsdp1_to_fsdp2.ipynb) |
# | `Expected device to be set` in `set_optimizer_state_dict` | a new optimizer, and gradients of an earlier `backward` in the model; or an optimizer that keeps no tensors, as SGD without momentum | `optimizer.zero_grad()` before the load; for such an SGD, load the model alone |
# | out of memory on every GPU in `get_state_dict` | `cpu_offload=True` is missing | add it |
# | rank 0 is killed without a Python error | its machine is out of memory | sharded checkpoints, [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) |
#
# ## The rule
#
# All ranks gather, rank 0 writes; rank 0 reads, all ranks load, into a model that is sharded already. Give
# the optimizer its state too, and test a checkpoint by the losses of several steps.

# %% jupyter={"source_hidden": true}
# %%ranks 0
import shutil

shutil.rmtree(path.parent)

# %% [markdown]
# [← lesson 2](02_activation_checkpointing.ipynb) · [lesson 4 →](04_backward_prefetch.ipynb)

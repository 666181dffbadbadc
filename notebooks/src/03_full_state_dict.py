# %% [markdown]
# # 3 · FULL_STATE_DICT
#
# Each rank holds a part of the model: how do I get one file out of the shards, and back? **All ranks call
# `get_state_dict` with `full_state_dict=True, cpu_offload=True`, and rank 0 writes what it gets. Back: rank 0
# reads the file, and all ranks call `set_model_state_dict` and `set_optimizer_state_dict` with
# `full_state_dict=True, broadcast_from_rank0=True`.** It works as long as model and optimizer fit into the
# memory of one host.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WORLD, TENSORS = 4, 4
fig, panels = plots.figure(3, width=9.4, height=2.3)
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

# %% [markdown]
# A drawing of four tensors on four ranks; each colour is one rank's piece. In training a rank holds its own
# pieces. To save, all ranks gather one tensor after the other. Rank 0 copies each full tensor to its host's
# memory and keeps it; the other ranks drop it at once.

# %% tags=["card"]
lesson.card(
    3,
    learn="save and load a sharded model and its optimizer as one file, and five mistakes with it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    ranks="4 on the CPU, because one of them waits on purpose (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 12, 22),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains 13 steps and saves after step
# 8. Then it loads the file into new models, with and without the optimizer's state, and repeats steps 9 to
# 13.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
# from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# rank, world = dist.get_rank(), dist.get_world_size()
# mesh = init_device_mesh(device, (world,))                   # without it a Mac would take its GPU
# to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
# from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
#
# for run in ("never stopped", "model and optimizer loaded", "model alone loaded"):
#     first = run == "never stopped"
#     torch.manual_seed(0 if first else 1)                    # later: other weights, to be overwritten
#     model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
#     for part in [model[0], model[2], model]:
#         fully_shard(part, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
#     if not first:
#         file = torch.load("full.pt", mmap=True) if rank == 0 else {"model": {}, "optimizer": {}}
#         set_model_state_dict(model, file["model"], options=from_rank_0)                       # on ALL ranks
#         if "optimizer" in run:
#             set_optimizer_state_dict(model, optimizer, file["optimizer"], options=from_rank_0)
#     losses = []
#     for step in range(0 if first else 8, 13):
#         if first and step == 8:
#             weights, moments = get_state_dict(model, optimizer, options=to_rank_0)            # on ALL ranks
#             if rank == 0:
#                 torch.save({"model": weights, "optimizer": moments}, "full.pt")               # on rank 0
#         torch.manual_seed(100 * step + rank)                # other samples on each rank
#         x = torch.randn(64, 64, device=device)
#         loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(loss := loss.detach() / world)
#         losses.append(f"{loss:.2f}")
#     if rank == 0:
#         print(f"{run:26}: steps 9 to 13:", *losses[-5:])
# dist.destroy_process_group()
# ```
# ```text
# never stopped             : steps 9 to 13: 0.85 0.80 0.79 0.74 0.76
# model and optimizer loaded: steps 9 to 13: 0.85 0.80 0.79 0.74 0.76
# model alone loaded        : steps 9 to 13: 0.85 0.77 0.88 0.95 0.98
# ```
#
# With model and optimizer loaded, the run goes on as if it had never stopped. With the model alone, the first
# loss is right and the later ones are not. The rest of this lesson shows what the two calls do, what they
# cost, and how they go wrong.
#
# ## From a shard to the full tensor, and back
#
# A **state dict** is the dictionary that `model.state_dict()` returns: every parameter by its name. After
# `fully_shard` its values are **DTensors**: each knows its full shape and holds this rank's piece.
# `tensor.full_tensor()` gathers one, and `distribute_tensor` cuts one: rank 0's values count, and it sends
# each rank its piece. Both are collectives, so all ranks must call them. The cell also has the script's lines
# as functions, for later use.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")

# %%
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

rank, world = dist.get_rank(), dist.get_world_size()
to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


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


model, optimizer = shard(plain(seed=0))
bias = model.state_dict()["3.bias"]                     # the last layer's: 10 numbers
full = bias.full_tensor()                               # on ALL ranks
piece = distribute_tensor(torch.arange(10.0) if rank == 0 else torch.empty(10), bias.device_mesh, bias.placements)
print(f"{len(bias.to_local())} of {len(full)} are mine; cut: {piece.to_local().tolist()}")

# %% [markdown]
# Ten numbers on four ranks are cut as 3, 3, 3 and 1. (Every rank gets as many as the first, as long as there
# are any left.)
#
# ## Who holds how much
#
# `get_state_dict(model, optimizer)` returns two state dicts, of the model and of the optimizer. AdamW keeps
# two averages for each parameter, so all of it is three sizes of the model. The cell asks for three kinds and
# prints how much each rank then holds, in sizes of the model. `Meter` records which tensors are alive
# meanwhile. (`leaves`, which lists the tensors of a state dict on this rank, is in the folded cell. So is
# `train`, the script's loop.)

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._pytree import tree_leaves


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + rank)
        x = torch.randn(64, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / world)
        losses.append(f"{loss:.2f}")
    return losses


def leaves(tree):
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in found]


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
held, curves = {}, {}
for kind, options in kinds.items():
    with Meter([*model.parameters(), *leaves(optimizer.state_dict())]) as meter:
        states = get_state_dict(model, optimizer, options=options)              # on ALL ranks
    held[kind] = sum(tensor.nbytes for tensor in leaves(states)) / model_bytes
    curves[kind] = [nbytes / model_bytes for nbytes in meter.tensor_bytes]
    del states
print(" | ".join(f"{kind} {size:.2f}" for kind, size in held.items()))

# %% jupyter={"source_hidden": true}
of_first, *_, of_last = ranks.get("curves")
fig, panels = plots.figure(3, width=9.4, height=2.4)
shown = {"full: every rank": of_last["full"], "full + cpu_offload: rank 0": of_first["full + cpu_offload"]}
shown[f"full + cpu_offload: rank {len(ranks.get('0')) - 1}"] = of_last["full + cpu_offload"]
for axes, (title, curve), color in zip(panels, shown.items(), plots.RANK_COLORS):
    axes.fill_between(range(len(curve)), curve, color=color, linewidth=0)
    axes.text(0.04 * len(curve), 4.3, f"peak {max(curve):.1f}", fontweight="bold")
    axes.set(title=title, xlabel="operations of get_state_dict", xticks=[], ylim=(0, 5), xlim=(0, len(curve)))
panels[0].set_ylabel("tensors alive,\nin sizes of the model")
world = len(ranks.get("0"))
assert all(abs(of["full"] - 3) < 0.01 for of in ranks.get("held"))
assert [round(of["full + cpu_offload"]) for of in ranks.get("held")] == [3] + [0] * (world - 1)
assert max(of_last["full + cpu_offload"]) < 3 / world + 1
assert max(of_first["full + cpu_offload"]) > 3 + 2.5 / world
plots.show(fig, alt="Tensors alive while a full state dict is gathered, on all ranks and on rank 0 alone.")

# %% [markdown]
# `full_state_dict=True` alone gives *every* rank three sizes of the model, on a GPU in its GPU's memory. With
# it, `cpu_offload=True` does two things: it moves each gathered tensor to the CPU, and it leaves the result
# to rank 0 alone. The curves begin at 0.75, the shards, which stay beside the result: so 3.75 at the end for
# 3.00 in the table. The spikes of the last rank are the tensors that it helps to gather and then drops. With
# GPUs, shards and spikes are in GPU memory, and rank 0's climb is in its host's memory.
#
# ## Your turn 1 · Gather a full state dict
#
# Write `my_full(model)` yourself. On rank 0 it returns the full state dict as ordinary tensors, on all other
# ranks `{}`. No rank but 0 may collect full tensors: at most the last one may still be alive while the next
# is gathered. The turn counts the bytes beyond the shards and the result, in sizes of the largest tensor: 4
# are allowed, because an all-gather needs buffers beside its result; all tensors together are 6.1 of the
# largest.
#
# <details><summary>Hint</summary>
#
# Loop over `model.state_dict().items()`, and gather one tensor in each turn of the loop. What must *not*
# stand under `if rank == 0`?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

BEYOND = "bytes beyond shards and result, in largest tensors"


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
        raise NotYet("Return ordinary tensors: a DTensor in the result is a piece still.")
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
def my_full(model):                             # pieces as objects
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

# %% tags=["wrong"] turn=1 says="is a piece still"
def my_full(model):
    return model.state_dict() if rank == 0 else {}

# %% tags=["wrong"] turn=1 says="no such call on"
def my_full(model):
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()} if rank == 0 else {}

# %% [markdown]
# ## One file, which plain PyTorch reads
#
# Now save it, and load it in both ways: into a sharded model, and into a plain one on rank 0 alone, as
# somebody without FSDP would.

# %% tags=["load"]
# %%ranks
shared = [tempfile.mkdtemp() if rank == 0 else None]    # in a job: a path that you pass
dist.broadcast_object_list(shared, src=0)
path = Path(shared[0]) / "full.pt"


def save(path, model, optimizer):                       # on ALL ranks
    weights, moments = get_state_dict(model, optimizer, options=to_rank_0)
    if rank == 0:
        torch.save({"model": weights, "optimizer": moments}, path)
    dist.barrier()                                      # the file is complete when save returns


def read(path):
    return torch.load(path, mmap=True) if rank == 0 else {"model": {}, "optimizer": {}}


def load(path, model, optimizer):                       # on ALL ranks
    file = read(path)
    set_model_state_dict(model, file["model"], options=from_rank_0)
    set_optimizer_state_dict(model, optimizer, file["optimizer"], options=from_rank_0)


save(path, model, optimizer)
never_stopped = train(model, optimizer, range(8, 13))
model, optimizer = shard(plain(seed=1))                 # other weights, to be overwritten
load(path, model, optimizer)
assert train(model, optimizer, range(8, 13)) == never_stopped
read_mib = sum(tensor.nbytes for tensor in leaves(read(path))) / 2**20
print(f"{read_mib:.2f} MiB read from the file", end="")
if rank == 0:
    alone = plain(seed=1)
    alone.load_state_dict(read(path)["model"])          # strict: every name is there, and no other
    print(f"; plain PyTorch takes {len(alone.state_dict())} tensors", end="")

# %% [markdown]
# One rank reads, and the others receive one tensor after the other. If each of the eight ranks of a host read
# the file for itself without `mmap`, the host would hold it eight times. `mmap=True` maps the file into
# memory, and a tensor is read from the disk when it is used. For transformers' `from_pretrained`, gather the
# model alone with `get_model_state_dict` and let rank 0 call `model.save_pretrained(folder,
# state_dict=weights)`. (Only a model that transformers has sharded itself is saved by all ranks together.)
#
# ## All ranks call, or one waits
#
# The most frequent mistake: rank 0 writes the file, so everything is put under `if rank == 0`. Collectives
# wait for 1 second in this cell, and not for the 30 minutes of gloo's default (10 with NCCL).

# %% tags=["raises-exception", "hang"]
# %%ranks --timeout 1
if rank == 0:
    torch.save(get_model_state_dict(model, options=to_rank_0), path.with_name("never.pt"))

# %% [markdown]
# Rank 0 waits for an all-gather that no other rank enters. In a script the others would go on to their next
# collective, and that would be paired with rank 0's: an abort, wrong numbers, or a hang ([lesson
# 15](15_when_it_hangs.ipynb)).
#
# Here are all five mistakes. `outcome(mistake)` (folded) compares the collectives of the ranks before they
# begin, so that it can say who would wait for whom. If none does, it trains steps 9 to 13 and returns their
# losses.

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together


def outcome(program):
    """Say on which call the ranks part, else give the losses of five more steps."""
    loaded, parted = run_together(program)
    if parted:
        return "hangs: " + parted.partition(": ")[2].rstrip(".")
    return "no error, losses " + " ".join(train(*loaded, range(8, 13)))


# %% tags=["mistakes"]
# %%ranks
def right():
    model, optimizer = shard(plain(seed=1))
    load(path, model, optimizer)
    return model, optimizer


def only_rank_0_saves():                                # 1
    model, optimizer = right()
    if rank == 0:
        save(path.with_name("never.pt"), model, optimizer)
    return model, optimizer


def each_rank_decides():                                # 2: saves if its own loss is below the mean of all
    model, optimizer = right()
    torch.manual_seed(rank)
    x = torch.randn(64, 64)
    mine = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).detach()
    dist.all_reduce(mean := mine / world)
    if mine < mean:
        save(path.with_name("best.pt"), model, optimizer)
    return model, optimizer


def nothing_on_the_others():                            # 3: one call for both state dicts
    model, optimizer = shard(plain(seed=1))
    model_state, optimizer_state = read(path).values()
    set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=from_rank_0
    )
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

# %%
from fsdp_utils.lessons.tables import Table

found = ranks.get("found")[0]
assert [said.startswith("hangs") for said in found.values()] == [False, True, True, True, False, False]
assert len(set(found.values())) == 6
assert found["right"].endswith(" ".join(ranks.get("never_stopped")[0]))
Table(["", "what happens"], [[name, said] for name, said in found.items()])

# %% [markdown]
# 1. Everything under `if rank == 0`. All ranks have to call `save`.
# 2. All ranks run the same line, but its condition differs from rank to rank. A condition that guards a
#    collective must have the same value on all ranks: `all_reduce` the loss, then compare.
# 3. `set_state_dict` takes an *empty* model state dict to mean "the optimizer only". So the ranks that have
#    no file skip the model, and rank 0 broadcasts alone. Make two calls, as the script does.
# 4. No error, and a wrong model. Each rank cuts its piece from its own weights, and only rank 0's are the
#    file's. Shard first, then load. (FSDP1 does the same unless it is given `sync_module_states=True`.)
# 5. No error, and the first loss is right, because it needs the weights alone. AdamW's averages begin at zero
#    again. A test of a checkpoint has to compare the losses of several steps.
#
# The [video of 2022](../videos.md) that this lesson follows shows mistakes 4 and 5.
#
# ## Your turn 2 · Load a full state dict
#
# The way back, without `set_model_state_dict`. `state` is the full state dict on rank 0, and `{}` on the
# others. Write `my_load(model, state)`: afterwards the shards of `model` are those of the file, on every
# rank. This model also has **buffers**, tensors that are not trained, here those of a `BatchNorm1d`. FSDP2
# does not shard buffers: every rank has them in full. Memory counts as in turn 1. Nothing is returned.
#
# <details><summary>Hint</summary>
#
# The tensors of `model.state_dict()` are the model's own: `.copy_(...)` into them is enough. They also tell
# the ranks that have no file which shapes and dtypes will come. Which of them are DTensors?
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
# ## A file from FSDP1: one `step` for a whole unit
#
# The same functions take a model under FSDP1, so its files have the same names and shapes. One thing differs.
# FSDP1's optimizer sees one flat parameter for each unit, and AdamW counts its steps once for it. In the full
# state dict all parameters of the unit get the *same tensor* as their `step`, and `torch.save` keeps that.
# Loaded into FSDP2, each of them adds 1 to it at each step.

# %% tags=["fsdp1"]
# %%ranks
import warnings

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.fsdp._optim_utils")
old = FSDP(plain(seed=0), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
old_optimizer = torch.optim.AdamW(old.parameters(), lr=0.01)
train(old, old_optimizer, range(8))
weights, moments = get_state_dict(old, old_optimizer, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save({"model": weights, "optimizer": moments}, path.with_name("fsdp1.pt"))
for cloned in (False, True):
    file = read(path.with_name("fsdp1.pt"))
    for state in file["optimizer"].get("state", {}).values() if cloned else ():
        state["step"] = state["step"].clone()           # one for each parameter
    model, optimizer = shard(plain(seed=1))
    set_model_state_dict(model, file["model"], options=from_rank_0)
    set_optimizer_state_dict(model, optimizer, file["optimizer"], options=from_rank_0)
    train(model, optimizer, range(8, 13))
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    if rank == 0:
        print(f"{'cloned' if cloned else 'as it is'}: steps counted after 13: {sorted(set(steps))}")
    assert set(steps) == ({13} if cloned else {8 + 4 * 5, 8 + 2 * 5})

# %% [markdown]
# Each block has four parameters and counts 8 + 4 · 5 steps; the last layer has two. A wrong count changes
# AdamW's bias correction, without an error. That matters in the first some thousand steps; later the
# correction is near 1 with either count. This is AdamW's default, which counts on the CPU. With
# `use_orig_params=True` FSDP1 does not share. (The functions that the video shows, `FSDP.state_dict_type` and
# `FSDP.full_optim_state_dict`, are deprecated.)
#
# ## When one file stops fitting
#
# In float32 with AdamW, rank 0's host takes in 12 bytes for each parameter. This is a calculation:

# %% tags=["fits"]
rows = []
for billions in (1.5, 7, 20, 70, 405):
    model_gib, all_gib = 4e9 * billions / 2**30, 12e9 * billions / 2**30
    rows.append([f"{billions:g}B", round(model_gib, 1), round(all_gib, 1), round(all_gib / 60, 1)])
Table(["model", "GiB, model alone", "GiB, with AdamW", "minutes to write at 1 GiB/s"], rows)

# %% [markdown]
# All GPUs wait while one rank writes. So take a full state dict for a model that fits into one host, and at
# the end of training, when the file goes elsewhere. While a large model trains, let every rank write its own
# part: [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the job hangs in a save; after the time-out `Timed out waiting 1800000ms` (gloo) | mistakes 1 to 3: not all ranks call | call on all ranks; [lesson 15](15_when_it_hangs.ipynb) finds the line |
# | `got mixed torch.Tensor and DTensor` in `load_state_dict` | a full state dict for a sharded model | `set_model_state_dict` with `broadcast_from_rank0=True` |
# | the loss jumps after loading | mistake 4 | shard, then load |
# | the first loss is right, later ones are not | mistake 5, or a file from FSDP1 | load the optimizer; clone each `step` |
# | out of memory on every GPU in `get_state_dict` | `cpu_offload=True` is missing | add it |
# | rank 0 is killed without an error of Python | its host is out of memory | sharded checkpoints, [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) |
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

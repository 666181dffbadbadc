# %% [markdown]
# # 3 · FULL_STATE_DICT
#
# Under FSDP no rank has all of the model. To save the model in one file, as you would without FSDP, the ranks
# have to gather it first. In this lesson you do that by hand and with PyTorch's functions. Then you make five
# mistakes that others have made, and mend each.

# %% [markdown] tags=["card"]
# learn:
# - how to save and load model and optimizer as one file, with FSDP2 and with FSDP1
# - how much memory that takes on rank 0 and on the others
# - 'why ranks hang, or silently mix up numbers: collectives are paired by order, not by intent'
# - how weights were corrupted and optimizer state was lost without any error
# - from which size on one file is the wrong choice
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb): ranks, shards, all_gather · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 35 minutes to read
# video: '[FULL_STATE_DICT](https://www.loom.com/share/97fb9a52037b4834a99a142d30ce6ee6), 2022. Since then:
#   `get_state_dict` and `set_state_dict`, and two mistakes in the video''s code, shown and mended here.'

# %% [markdown]
# **The question of this lesson:** how does a model of which each rank holds a quarter become one file, and
# who holds how much of it meanwhile?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots


def gathering(world=4, tensors=4):
    moments = {"in training": 0, "the second tensor is gathered": 2, "the full state dict": tensors + 1}
    fig, panels = plots.figure(len(moments), width=9.4, height=2.3)
    for axes, (title, moment) in zip(panels, moments.items()):
        for rank in range(world):
            for tensor in range(tensors):
                on_host = rank == 0 and tensor + 1 < moment
                full = on_host or tensor + 1 == moment
                for piece in range(world):
                    color = plots.RANK_COLORS[piece] if full or piece == rank else plots.FAINT
                    axes.barh(rank, 0.22, left=1.1 * tensor + piece / world, height=0.6, color=color)
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(world), [f"rank {r}" for r in range(world)] if axes is panels[0] else [])
        axes.set_xticks([1.1 * t + 0.5 for t in range(tensors)], [f"tensor {t + 1}" for t in range(tensors)])
        axes.tick_params(length=0, labelsize=8)
        axes.set(ylim=(world - 0.5, -0.5))
        axes.spines[:].set_visible(False)
    return plots.show(fig, alt="Each rank has a piece of each tensor; rank 0 ends up with all of all.")


gathering()

# %% [markdown]
# The drawing shows four tensors of a model on four ranks; each colour is one rank's piece. In training each
# rank holds its own pieces. To save, all ranks gather one tensor after the other. Rank 0 copies each full
# tensor to its CPU memory and keeps it there; the other ranks drop it at once. At the end rank 0 has all
# tensors in full, and the others have what they had before.
#
# A **state dict** is the dictionary that `model.state_dict()` returns: every parameter by its name. A **full
# state dict** is one in which every tensor is complete, as in plain PyTorch.
#
# ## In your own code
#
# Save a full state dict and load it again, with FSDP2. Save the script as `save.py` and start it with
# `torchrun --nproc-per-node 4 save.py`. It needs four GPUs, or none. (FSDP1 and the optimizer come below.)
#
# ```python
# from pathlib import Path
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
# from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# torch.manual_seed(0)                                  # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh)
# path = Path(__file__).with_name("model.pt")
# state = get_model_state_dict(model, options=Options(full_state_dict=True, cpu_offload=True))  # ALL ranks
# if dist.get_rank() == 0:
#     torch.save(state, path)                           # rank 0 alone
# state = torch.load(path, weights_only=True, mmap=True) if dist.get_rank() == 0 else {}
# set_model_state_dict(model, state, options=Options(full_state_dict=True, broadcast_from_rank0=True))
# dist.destroy_process_group()
# ```
#
# `fsdp_utils.save_distributed` saves shards, with the checks that this lesson shows to be needed.
# `export_safetensors` joins their weights.
#
# ## Four ranks

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, try_answers, turn
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")    # also where there are GPUs: this lesson hangs on purpose

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")

# %% [markdown]
# The model is small and has three blocks. `build` takes a seed, so that you can build a second model with
# other weights: what is loaded must not depend on what was there before.

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


# %%
# %%ranks
def build(seed):
    torch.manual_seed(seed)
    return Model().to(device)


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


model = shard(build(seed=0))

# %% [markdown]
# ## The state dict of a sharded model
#
# Under `fully_shard`, `model.state_dict()` has the usual names, but its values are DTensors: each knows its
# full shape, and holds this rank's piece. This is a **sharded state dict**. Making it sends nothing.

# %%
# %%ranks
sharded = model.state_dict()
shapes = {
    name: (list(tensor.shape), list(tensor.to_local().shape), repr(tensor.placements[0]))
    for name, tensor in sharded.items()
}

# %% jupyter={"source_hidden": true}
shapes = ranks.get("shapes")
Table(
    ["name", "full shape", "on rank 0", f"on rank {len(shapes) - 1}", "placement"],
    [
        [name, str(full), str(held), str(shapes[-1][name][1]), placement]
        for name, (full, held, placement) in shapes[0].items()
        if name.startswith(("stem", "blocks.0", "head"))
    ],
    note="Blocks 1 and 2 are like block 0.",
)

# %% [markdown]
# `Shard(dim=0)` says that a tensor is cut by rows. The two tensors of the head have 10 rows, which four ranks
# cannot share equally: three ranks get 3 rows, and the last one gets 1.
#
# For a full state dict these pieces have to come together. `full_tensor()` makes one complete tensor out of a
# DTensor. It is an all-gather, so all ranks must call it, and all get the result.

# %%
# %%ranks
head = sharded["head.bias"].full_tensor()               # on ALL ranks
print(f"{len(head)} elements here, of which {len(sharded['head.bias'].to_local())} were mine")

# %% [markdown]
# `distribute_tensor` is the way back. It takes a full tensor and a placement, and gives each rank its piece.
# Only rank 0's numbers count: it sends the others their pieces.

# %%
# %%ranks
from torch.distributed.tensor import distribute_tensor

full = torch.arange(10.0) if rank == 0 else torch.empty(10)           # f32[10], right on rank 0 alone
mesh, placements = sharded["head.bias"].device_mesh, sharded["head.bias"].placements
piece = distribute_tensor(full, mesh, placements)                     # on ALL ranks
print(piece.to_local().tolist())

# %% [markdown]
# With these two functions you can make a full state dict yourself, and load one:
# `model.load_state_dict({name: distribute_tensor(...) for ...})`.
#
# ## Your turn 1 · Gather a full state dict
#
# Write `my_full`. It gets a sharded model. On rank 0 it returns the full state dict, on all other ranks an
# empty dictionary. No rank but 0 may keep a full tensor while it gathers the next one: a GPU that trains a
# large model has room for one full tensor, and not for all.
#
# The meter counts all bytes beyond the shards and the result, in units of the largest tensor, the `up.weight`
# of a block. The target is 4.5 and not 1, because an all-gather needs buffers beside its result. All tensors
# together are six of the largest.
#
# Edit the next cell, then run it and the two folded cells below it. If ranks wait for each other for 5
# seconds, the cell ends with a report of who stood where.
#
# <details><summary>Hint</summary>
#
# Loop over `model.state_dict().items()`. Each turn of the loop gathers one tensor on all ranks, and stores it
# on rank 0. What must *not* stand under `if rank == 0`?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_full(model):
    return None                                         # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.meter import Meter

def score_full(gather):
    """Gather a model with other weights, under the meter."""
    model = shard(build(seed=2))
    expected = build(seed=2).state_dict() if rank == 0 else {}
    largest = max(p.numel() for p in model.parameters()) * 4                            # bytes
    with Meter(model.parameters()) as meter:
        found = gather(model)
    if found is None:
        return None
    if not isinstance(found, dict):
        return {"problem": f"Return a dictionary of tensors by name, not a {type(found).__name__}."}
    equal = found.keys() == expected.keys() and all(
        type(tensor) is torch.Tensor and torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )
    of_result = sum(tensor.nbytes for tensor in found.values()) if equal else 0
    beyond = (meter.peak_tensor_bytes - meter.held_bytes - of_result) / largest
    return {
        "the right result on each rank": equal,
        "most bytes beyond shards and result, in largest tensors": beyond,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_full(my_full)",
    {
        "the right result on each rank": exactly(
            True, otherwise="Rank 0 should return all tensors in full, and the other ranks `{}`."
        ),
        "most bytes beyond shards and result, in largest tensors": at_most(
            4.5, otherwise="A rank held several full tensors at once that it had no use for."
        ),
    },
    timeout_s=5,
)

# %% tags=["solution"] turn=1
# %%ranks
def my_full(model):
    full = {}
    for name, tensor in model.state_dict().items():
        gathered = tensor.full_tensor()                 # on ALL ranks
        if rank == 0:
            full[name] = gathered.cpu()
    return full

# %% tags=["wrong"] turn=1
# %%ranks
def my_full(model):
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

# %% tags=["wrong"] turn=1
# %%ranks
def my_full(model):
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return full if rank == 0 else {}

# %% tags=["wrong"] turn=1
# %%ranks
def my_full(model):
    return {name: tensor.to_local() for name, tensor in model.state_dict().items()} if rank == 0 else {}

# %% tags=["wrong"] turn=1
# %%ranks
def my_full(model):
    return model.state_dict() if rank == 0 else {}

# %% [markdown]
# ## The same with `get_model_state_dict`
#
# PyTorch's function for this takes models under FSDP2, FSDP1 and DDP alike. First train, so that there is
# something to save. The model learns ten clouds of points in 64 dimensions: to which cloud does a point
# belong?

# %% jupyter={"source_hidden": true}
# %%ranks
torch.manual_seed(0)
labels = torch.randint(10, (1600,))                                  # i64[1600]
inputs = torch.randn(10, 64)[labels] + 2 * torch.randn(1600, 64)     # f32[1600, 64]


def train(model, optimizer, steps, rank=rank, world=world):
    """The loss of each of these steps, as the mean over the ranks."""
    losses = []
    for step in steps:
        rows = torch.arange(24 * step, 24 * step + 24).chunk(world)[rank]
        loss = F.cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / world)
    losses = torch.stack(losses)
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist()


# %%
# %%ranks
def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


model = shard(build(seed=0))
optimizer = adam(model)
losses = train(model, optimizer, range(6))          # steps 1 to 6; the loop is in the folded cell above
print(f"loss of step 1: {losses[0]:.4f}, of step 6: {losses[5]:.4f}")

# %%
# %%ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=to_rank_0)                # a collective: call it on ALL ranks
print(f"{len(full)} tensors, {sum(tensor.nbytes for tensor in full.values()) / 2**20:.1f} MiB")

# %% [markdown]
# The full state dict is complete on rank 0 and empty on all other ranks, although all have taken part in
# making it.
#
# **Predict before you go on.**
#
# 1. The optimizer is AdamW. How large is its state, beside the model's?
# 2. `cpu_offload=True` does two things. What happens on ranks 1 to 3 without it?
#
# <details><summary>Answers</summary>
#
# 1. Twice the model: two averages for every parameter. A checkpoint from which training can continue is three
#   times as large as the model.
# 2. It moves the result to the CPU, and it leaves the result to rank 0 alone. Without it *every* rank gets
#    the full state dict, on GPUs in GPU memory.
#
# </details>
#
# `get_state_dict` returns model and optimizer together. Measure three kinds with the `Meter` of lesson 0.
# The folded cell defines `tensors`, which lists the tensors of a nested dictionary, and `local_bytes`, which
# adds up what this rank holds of them.

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._pytree import tree_leaves


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def local_bytes(tree):
    """Bytes of all tensors in the tree on this rank; of a DTensor, its piece."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors(tree))


# %% tags=["gather"]
# %%ranks
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp_utils.lessons.meter import Meter

kinds = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, cpu_offload": to_rank_0,
}
model_bytes = 4 * sum(p.numel() for p in model.parameters())         # of the full model, in float32
times_the_model = {}
for kind, options in kinds.items():
    with Meter([*model.parameters(), *tensors(optimizer.state_dict())]) as meter:
        states = get_state_dict(model, optimizer, options=options)
    times_the_model[kind] = local_bytes(states) / model_bytes
curve = [nbytes / model_bytes for nbytes in meter.tensor_bytes]      # of the last kind
del states

# %% jupyter={"source_hidden": true}
by_rank = ranks.get("times_the_model")
Table(
    ["rank", *by_rank[0]],
    [[rank, *(f"{held:.2f}" for held in of_rank.values())] for rank, of_rank in enumerate(by_rank)],
    note="Model and optimizer together, in sizes of the full model.",
)

# %% [markdown]
# With `full_state_dict=True` alone, each rank gets three times the model. With `cpu_offload=True` rank 0 gets
# that, and the others nothing. The figure shows this last kind, operation by operation, on rank 0 and on the
# last rank.

# %% tags=["peak"] jupyter={"source_hidden": true}
curves = ranks.get("curve")
world = len(curves)
fig, panels = plots.figure(2, width=8, height=2.6)
for axes, rank, color in zip(panels, (0, world - 1), plots.RANK_COLORS):
    course, peak = curves[rank], max(curves[rank])
    at = course.index(peak)
    axes.fill_between(range(len(course)), course, color=color, linewidth=0)
    axes.text(at, peak + 0.1, f"peak {peak:.1f}", ha="right" if at > len(course) / 2 else "left")
    axes.set(title=f"rank {rank}", xlabel="operations of get_state_dict", xticks=[], yticks=range(5))
    axes.set(ylim=(0, 4.6), xlim=(0, len(course)))
panels[0].set_ylabel("tensors alive,\nin sizes of the model")
peak_first, peak_last = max(curves[0]), max(curves[-1])
plots.show(fig, alt="Tensors alive while a full state dict is gathered, on rank 0 and on the last rank.")

# %% [markdown]
# Both ranks begin with their shards of model and optimizer. The narrow spikes on the last rank are tensors
# that it helps to gather and drops. Rank 0 keeps these tensors, so its curve climbs by three sizes of the
# model. With GPUs, shards and spikes are in GPU memory, and rank 0's climb is in the memory of its host.

# %% tags=["check"]
assert all(abs(held["sharded"] - 3 / world) < 0.03 for held in by_rank)
assert all(abs(held["full"] - 3) < 0.01 for held in by_rank)
assert abs(by_rank[0]["full, cpu_offload"] - 3) < 0.01
assert all(held["full, cpu_offload"] == 0 for held in by_rank[1:])
assert peak_first > 3 + 2.5 / world
assert peak_last < 3 / world + 1
print("Checked: three sizes of the model on rank 0, nothing on the others, and less than one more meanwhile.")

# %% [markdown]
# ## Save and load, today's way
#
# First the ranks need a folder whose name they all know: rank 0 makes it and tells the others its name. (In a
# real job you would pass the folder as an argument. Of the ranks only rank 0 has to write to it.)

# %%
# %%ranks
import tempfile
from pathlib import Path

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = Path(shared[0])

# %% [markdown]
# Saving is the gather, then `torch.save` on rank 0. Loading is the reverse: rank 0 reads the file, and
# `broadcast_from_rank0` sends one full tensor after the other, of which each rank keeps its shard.

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
    read = local_bytes(state) / model_bytes
    set_model_state_dict(model, state["model"], options=from_rank_0)                        # on ALL ranks
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=from_rank_0)
    return read


save(folder / "full.pt", model, optimizer)
never_stopped = train(model, optimizer, range(6, 10))                # what the loaded model has to repeat

# %% [markdown]
# `weights_only=True`, the default, keeps `torch.load` from running code that someone put into the file. With
# `mmap=True` a tensor is read from the disk only when it is used, so rank 0 need not hold the file's contents
# in memory all at once. Now a model with other weights and a new
# optimizer load the file and go on.

# %% tags=["load"]
# %%ranks
model = shard(build(seed=1))
optimizer = adam(model)
read = load(folder / "full.pt", model, optimizer)
continued = train(model, optimizer, range(6, 10))
print(f"{read:.0f} times the model read from the file")
print(f"loss of step 10: {continued[-1]:.4f}, without the stop: {never_stopped[-1]:.4f}")
assert continued == never_stopped

# %% [markdown]
# The losses are not just close: they are equal, bit for bit, in all four steps. One rank has read the file.
# If each rank read it for itself, without `mmap`, a host with eight ranks would hold it eight times.
#
# ## Collectives are paired by order, not by intent
#
# All of this works because each rank calls the same collectives in the same order. A collective has no label
# that says what it is for. A rank's fifth collective in a process group is paired with the fifth of the
# other ranks, whatever each of them meant it to be. In the next cell every rank adds up its number of
# samples and its loss. But rank 0 does so in the other order.

# %%
# %%ranks
samples, loss = torch.tensor([24.0]), torch.tensor([0.5])
first, second = (samples, loss) if rank == 0 else (loss, samples)
dist.all_reduce(first)
dist.all_reduce(second)

# %% jupyter={"source_hidden": true}
mixed = ranks.get("(samples.item(), loss.item())")
world = len(mixed)
Table(
    ["rank", "sum of samples", "right sum", "sum of losses", "right sum "],
    [[rank, got[0], 24.0 * world, got[1], 0.5 * world] for rank, got in enumerate(mixed)],
)

# %% [markdown]
# No error, and every number is wrong. What happens when ranks call different collectives depends on which
# collectives are paired:
#
# - **Equal kinds and sizes**: numbers are mixed up, as here.
# - **A rank receives more than it expects**: gloo ends the process of that rank within a tenth of a second,
#   with `gloo::EnforceNotMet … Received data size doesn't match expected size. Is there a distributed
#   collective mismatch in your code?` NCCL does not compare sizes: what follows is undefined, often a hang.
# - **No partner at all**: the rank waits until the timeout of the process group: by default 10 minutes with
#   NCCL and 30 minutes with gloo.
#
# PyTorch can compare the calls. With the environment variable `TORCH_DISTRIBUTED_DEBUG=DETAIL` each
# collective is preceded by a comparison of its kind and its shapes. It is slow, so switch it on to find a
# fault. Here it is on for one new process group.

# %%
# %%ranks
dist.set_debug_level(dist.DebugLevel.DETAIL)            # as TORCH_DISTRIBUTED_DEBUG=DETAIL does
watched = dist.new_group()
dist.set_debug_level(dist.DebugLevel.OFF)
error = "none"
try:
    dist.all_reduce(torch.ones(2 if rank == 0 else 3), group=watched)
except RuntimeError as raised:
    error = str(raised)
dist.destroy_process_group(watched)

# %% jupyter={"source_hidden": true}
import re

told = ranks.get("error")[0]
found = re.findall(r"Rank (\d+) is running collective: .*?OpType=(\w+), TensorShape=\[(\d+)\]", told)
Table(
    ["what rank 0 is told", "collective", "elements"],
    [[f"rank {rank}", kind, int(numel)] for rank, kind, numel in found],
    note=told.split(" Rank ")[0],
)

# %% [markdown]
# This check finds collectives of different kinds or shapes. It does not find the mix-up above, in which both
# are equal. The next three mistakes belong to the third line of the list: some ranks call a collective that
# others do not call.
#
# ## Mistake 1: only rank 0 writes, so only rank 0 saves
#
# The file is written by rank 0, so everything is put under `if rank == 0`. But the gather needs all ranks. In
# the next cell a collective waits one second, and then raises an error, instead of 30 minutes.

# %% tags=["raises-exception", "hang"]
# %%ranks --timeout 1
if rank == 0:
    torch.save(get_model_state_dict(model, options=to_rank_0), folder / "never.pt")

# %% [markdown]
# Rank 0 waits for an all-gather that no other rank enters. The others have finished the cell. In a script
# they would go on to *their* next collective, such as the all-gather of the next training step, and that
# would be paired with rank 0's: an abort, wrong numbers, or a hang, as above.
#
# After the timeout this notebook makes a new process group. A model that was sharded over the old group can
# no longer be used, so `resume` builds a new one and loads the checkpoint.

# %%
# %%ranks
def resume():
    model = shard(build(seed=1))
    optimizer = adam(model)
    load(folder / "full.pt", model, optimizer)
    return model, optimizer


model, optimizer = resume()

# %% [markdown]
# ## Mistake 2: each rank decides for itself
#
# Every rank looks at its own share of the validation samples, and saves if the loss is the lowest so far. The
# call is not under `if rank == 0` now, but its condition is true on some ranks and false on others.

# %%
# %%ranks
rows = torch.arange(1200, 1200 + 48 * world).chunk(world)[rank]
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
# The rank that saves hangs as before, although all ranks run the same line. A condition that guards a
# collective must have the same value on all ranks. So compute one number from all, then compare:

# %%
# %%ranks
model, optimizer = resume()

loss = torch.tensor(mine) / world
dist.all_reduce(loss)                                               # the mean over the ranks
if loss < 1.5:                                                      # the same answer on all of them
    save(folder / "best.pt", model, optimizer)
print(f"our loss {loss:.3f}: {'saved' if (folder / 'best.pt').exists() else 'not saved'}")

# %% [markdown]
# ## Mistake 3: `set_state_dict` with nothing on the other ranks
#
# There is one call for model and optimizer together, `set_state_dict`. With `broadcast_from_rank0` the other
# ranks have nothing to give, as in `load` above, so someone passes empty dictionaries there. But
# `set_state_dict` takes an empty model state to mean "load the optimizer only".

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
# The ranks other than 0 skip the model and report success: "all keys matched". Rank 0 broadcasts weights that
# no other rank receives, and times out. So call `set_model_state_dict` and `set_optimizer_state_dict`, as
# `load` does.
#
# ## Your turn 2 · Ask before you save
#
# A rank that waits inside a collective cannot look around. So ask *before* the first collective whether all
# ranks have come, with something that is no collective: a **store**. A store is a small table of keys and
# values that all ranks can read and write. Each `init_process_group` makes one to let the ranks find each
# other. Here is another one, which is kept in a file:

# %%
# %%ranks
store = dist.FileStore(str(folder / "store"), world)

# %% [markdown]
# Two of its functions are enough here:
#
# - `store.add(key, n)` adds `n` to the number under that key, which starts at 0, and returns the new number.
# - `store.compare_set(key, "", text)` writes the text if nothing has been written under that key yet. It
#   returns what is there now, as bytes: the text of the rank that was first, such as `b"yes"`.
#
# Write `all_here(name, seconds)`. It returns True as soon as every rank has called it with this name, and
# False if some rank has not called it within `seconds`. All ranks must get the same answer, also a rank that
# comes when the others have given up: if it were told True, it would go into the save alone. `all_here` may
# call no collective. `name` is a text that no earlier call has used. Edit the next cell, then run it and the
# two folded cells below it.
#
# <details><summary>Hint</summary>
#
# Say that you are here: add 1 under the key `name`. Then look at the number again and again, `store.add(name,
# 0)`, until it is `world` or the time is over. `time.sleep(0.01)` between two looks leaves the CPU to others.
# Then decide "yes" or "no", and write it under a second key with `compare_set`. The first rank that writes
# decides for all: return what it wrote, not what you found.
#
# </details>

# %% tags=["exercise"]
# %%ranks
import time


def all_here(name, seconds):
    return None                                         # your lines here: True or False


# %% jupyter={"source_hidden": true}
# %%ranks
import uuid

from torch.utils._python_dispatch import TorchDispatchMode

class NoCollectives(TorchDispatchMode):
    """Refuses collectives: one rank of several may be alone in here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            raise RuntimeError(f"{func.name()} is a collective: it hangs where a rank is missing.")
        return func(*args, **(kwargs or {}))


def score_here(all_here):
    """Ask four times: all ranks come; rank 0 alone; one rank half a second late; one when all gave up."""
    names = [uuid.uuid4().hex]                           # another one each time this runs
    dist.broadcast_object_list(names, src=0)
    (name,) = names
    with NoCollectives():
        began = time.perf_counter()
        together = all_here(f"{name}, together", 5)
        waited = time.perf_counter() - began
        if together is None:
            return None
        alone, seconds = False, 0.0
        if rank == 0:
            began = time.perf_counter()
            alone = all_here(f"{name}, alone", 0.5)
            seconds = time.perf_counter() - began
    dist.barrier()
    if rank == world - 1:
        time.sleep(0.5)
    with NoCollectives():
        late = all_here(f"{name}, late", 5)
    if rank == world - 1:
        dist.barrier()                                   # comes when the others have given up
    with NoCollectives():
        too_late = all_here(f"{name}, too late", 0.3)
    if rank < world - 1:
        dist.barrier()
    for answer in (together, alone, late, too_late):
        if answer not in (True, False):
            return answer if answer is None else {"problem": f"Return True or False, and not {answer!r}."}
    return {
        "all ranks come": together,
        "seconds until all know that": waited,
        "only rank 0 comes": alone,
        "seconds until rank 0 knows that": seconds,
        "one rank comes half a second late": late,
        "one rank comes when the others gave up": too_late,
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_here(all_here)",
    {
        "all ranks come": exactly(True, otherwise="All ranks came, and one was told that some had not."),
        "seconds until all know that": at_most(
            3, otherwise="All ranks came at once, and the answer took longer: look again and again."
        ),
        "only rank 0 comes": exactly(
            False, otherwise="Rank 0 was alone and was told that all were there: count under the given name."
        ),
        "seconds until rank 0 knows that": at_most(
            3, otherwise="Rank 0 was told to wait for half a second and waited much longer."
        ),
        "one rank comes half a second late": exactly(
            True, otherwise="A rank came late but in time: look more than once."
        ),
        "one rank comes when the others gave up": exactly(
            False, otherwise="The rank that came too late was told that all were there: it would save alone."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def all_here(name, seconds):
    store.add(name, 1)
    end = time.monotonic() + seconds
    while store.add(name, 0) < world and time.monotonic() < end:
        time.sleep(0.01)
    mine = "yes" if store.add(name, 0) == world else "no"
    return store.compare_set(f"{name}, decided", "", mine) == b"yes"    # the first rank decides for all

# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):
    store.add(name, 1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if store.add(name, 0) == world:
            return True
        time.sleep(0.01)
    return False

# %% tags=["wrong"] turn=2 raises="is a collective"
# %%ranks
def all_here(name, seconds):
    dist.barrier()
    return True

# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):
    return store.add(name, 1) == world

# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):
    store.add("here", 1)
    end = time.monotonic() + seconds
    while store.add("here", 0) < world and time.monotonic() < end:
        time.sleep(0.01)
    return store.add("here", 0) >= world


# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):                            # waits for the whole time, always
    store.add(name, 1)
    time.sleep(seconds)
    mine = "yes" if store.add(name, 0) == world else "no"
    return store.compare_set(f"{name}, decided", "", mine) == b"yes"

# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):
    store.add(name, 1)
    time.sleep(seconds / 50)
    return store.add(name, 0) == world

# %% tags=["wrong"] turn=2
# %%ranks
def all_here(name, seconds):
    return True

# %% [markdown]
# `if all_here("save 7", 30): save(...)` then replaces a hang by an answer. (Where a rank dies inside the
# save, the others still wait in its collectives.) `save_distributed` below asks in the same way and names
# the missing ranks. PyTorch has `dist.monitored_barrier(timeout=...)`, for gloo only, which also names a rank
# that did not come.
#
# ## The way of 2022: FSDP1
#
# FSDP1 has a mode, `state_dict_type`, in which `model.state_dict()` is a full one. The optimizer's state has
# a function of its own. This is the code of the video, for saving. (In the video `offload_to_cpu` is True,
# too. Without GPUs there is nothing to offload.)

# %% tags=["fsdp1"]
# %%ranks
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def fsdp1(model, **options):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options)


def save_2022(folder, model, optimizer):
    policy = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        model_state = model.state_dict()                            # on ALL ranks
    optimizer_state = FSDP.full_optim_state_dict(model, optimizer)  # on ALL ranks
    if rank == 0:
        torch.save(model_state, folder / "model.pt")
        torch.save(optimizer_state, folder / "optimizer.pt")
    dist.barrier()


# %%
# %%ranks
import warnings

old = fsdp1(build(seed=0))
old_optimizer = adam(old)
train(old, old_optimizer, range(6))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    save_2022(folder, old, old_optimizer)
messages = [str(one.message) for one in said if "deprecated" in str(one.message)]
for name in ("FSDP.state_dict_type", "full_optim_state_dict"):
    print(f"deprecated: {name}" if any(name in message for message in messages) else f"not said: {name}")
old_never_stopped = train(old, old_optimizer, range(6, 10))

# %% [markdown]
# The two files hold what `full.pt` holds, and PyTorch calls both functions deprecated. The video's mistakes
# are in loading.
#
# ## Mistake 4: only rank 0 has loaded the weights
#
# In the video rank 0 loads the file into the plain model, and then all ranks wrap theirs in FSDP.

# %% tags=["silent"]
# %%ranks
def load_2022(wrap):
    plain = build(seed=1)
    if rank == 0:
        plain.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return wrap(plain)


corrupt = load_2022(fsdp1)

# %% jupyter={"source_hidden": true}
# %%ranks
def right_elements(model):
    """For each parameter in full: which of its elements are those of the file?"""
    saved = torch.load(folder / "model.pt", weights_only=True, map_location=device)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: found[name] == saved[name] for name in saved}


right = right_elements(corrupt)
share = torch.cat([mask.flatten() for mask in right.values()]).float().mean().item()
pieces = [right[f"blocks.0.{name}.weight"].flatten().chunk(64) for name in ("up", "down")]
pieces = [[piece.float().mean().item() for piece in weight] for weight in pieces]
after = train(corrupt, adam(corrupt), [6])[0]

# %% jupyter={"source_hidden": true}
share, after, old_losses = ranks.get("(share, after, old_never_stopped)")[0]
Table(
    ["after loading on rank 0 alone", "found", "right"],
    [
        ["elements that are those of the file", f"{share:.0%}", "100%"],
        ["loss of step 7", f"{after:.2f}", f"{old_losses[0]:.2f}"],
    ],
)

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.5, height=1.4)
for row, shares in enumerate(ranks.get("pieces")[0]):
    for index, part in enumerate(shares):
        color = plots.RANK_COLORS[0] if part > 0.5 else plots.RANK_COLORS[5]
        axes.barh(row, 1 / len(shares), left=index / len(shares), height=0.8, color=color)
axes.set_yticks(range(2), ["up.weight", "down.weight"])
axes.set(ylim=(1.6, -0.6), xlim=(0, 1), xticks=[])
axes.set_title("blocks.0 after loading: blue elements are the file's, orange are not")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The first block's weights after loading on rank 0 alone: a part is right.")

# %% [markdown]
# There was no error. FSDP took each rank's shard from that rank's own weights, and only rank 0 had the
# file's. Its shard is the first part of the flattened block: with four ranks, the norm and the beginning of
# `up.weight`.
#
# The mend is an argument of FSDP, `sync_module_states=True`: all ranks get rank 0's weights before FSDP
# shards them. It wants the weights on GPUs and raises an error on the CPU. So the next cell writes what it
# does: a broadcast of every tensor.

# %%
# %%ranks
def synced(model):
    """On GPUs: fsdp1(model, sync_module_states=True)."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return fsdp1(model)


mended = load_2022(synced)
right = right_elements(mended)
print("all elements are those of the file:", all(mask.all().item() for mask in right.values()))

# %% [markdown]
# ## Mistake 5: the optimizer's state, made and dropped
#
# The weights are right now. The video goes on with the optimizer: rank 0 loads its file and
# `scatter_full_optim_state_dict` gives each rank its part.

# %% tags=["optimizer"]
# %%ranks
warnings.filterwarnings("ignore", message=".*deprecated")            # already shown above

mended_optimizer = adam(mended)
full_osd = torch.load(folder / "optimizer.pt", weights_only=True) if rank == 0 else None
sharded_osd = FSDP.scatter_full_optim_state_dict(full_osd, mended)
print(f"state in sharded_osd: {len(sharded_osd['state'])}, in the optimizer: {len(mended_optimizer.state)}")

# %% [markdown]
# There the code of 2022 ends. `sharded_osd` is right: it has a state for each of the four flat tensors in
# which FSDP1 keeps the parameters of its units. But the code does not give it to the optimizer, so training
# goes on with averages that begin at zero again. The missing line is `load_state_dict`:

# %%
# %%ranks
dropped = load_2022(synced)
without = train(dropped, adam(dropped), range(6, 10))

mended_optimizer.load_state_dict(sharded_osd)                        # the missing line
with_state = train(mended, mended_optimizer, range(6, 10))

# %% jupyter={"source_hidden": true}
names = ["state dropped", "state loaded", "never stopped"]
ways = dict(zip(names, ranks.get("(without, with_state, old_never_stopped)")[0]))
Table(
    ["loss at step", *map(str, range(7, 11))],
    [[how, *(f"{loss:.4f}" for loss in losses)] for how, losses in ways.items()],
)

# %% [markdown]
# The first loss after loading is right to the last bit, because it needs the weights alone. So a test that
# compares one loss does not find this mistake. Compare the losses of several *steps*.
#
# `set_model_state_dict` and `set_optimizer_state_dict` take a model under FSDP1, too, and hand the state to
# the optimizer themselves. The table of the proof below has a line with them.

# %% tags=["check"]
# %%ranks
assert abs(share - 1 / world) < 0.02
assert after > 1.2 * old_never_stopped[0]
assert all(mask.all() for mask in right.values())
assert len(sharded_osd["state"]) > 0
assert with_state == old_never_stopped
assert without[0] == old_never_stopped[0]
assert abs(without[-1] - old_never_stopped[-1]) > 1e-3
assert len(messages) >= 2
print("Checked: 1 / world of the elements is right; without its state the optimizer errs from step 8 on.")

# %% [markdown]
# ## From a sharded checkpoint to one file
#
# `save_distributed` of `fsdp_utils` gathers no FSDP2 model: ranks write their shards. `load_distributed`
# loads them, under FSDP1, FSDP2 and DDP, and returns what else was saved, such as the step.

# %%
# %%ranks
from fsdp_utils import CheckpointError, load_distributed, save_distributed

model, optimizer = resume()
checkpoint = save_distributed(folder / "run", model, optimizer, step=6).wait()

model = shard(build(seed=1))
optimizer = adam(model)
state = load_distributed(folder / "run", model, optimizer)
print(f"step {state['step']}")
assert train(model, optimizer, range(6, 10)) == never_stopped

# %% [markdown]
# And the mistakes? Before any collective the ranks ask each other whether all of them have come, as in turn
# 2. They wait for `wait_s` seconds, half a minute by default.

# %%
# %%ranks
def told(call):
    try:
        call()
    except CheckpointError as error:
        print(error)


if rank == 0:                                                        # mistake 1
    told(lambda: save_distributed(folder / "run", model, optimizer, step=10, wait_s=1))

# %%
# %%ranks
if mine < best_so_far:                                               # mistake 2
    told(lambda: save_distributed(folder / "best", model, optimizer, step=10, wait_s=1))

# %% [markdown]
# The error comes after a second and names the ranks that are missing. The process group is intact, and the
# model can go on training:

# %%
# %%ranks
(loss,) = train(model, optimizer, [10])
print(f"loss of step 11: {loss:.4f}")

# %% [markdown]
# Mistakes 3 and 4 cannot be made: all ranks load, into a model that is wrapped already. Mistake 5 can:
# without `optimizer`, its state is left aside. `export_safetensors` needs no ranks, no gather and no memory
# for the whole model. It writes the weights into one file (above 4 GiB, several), which `safetensors` reads
# without FSDP.

# %%
# %%ranks 0
from safetensors.torch import load_file

from fsdp_utils import export_safetensors

export_safetensors(checkpoint, folder / "exported")
plain = build(seed=1)
plain.load_state_dict(load_file(folder / "exported" / "model.safetensors"))
accuracy = (plain(inputs[1200:]).argmax(1) == labels[1200:]).float().mean().item()
print(f"right on {accuracy:.0%} of points that it never saw")

# %% [markdown]
# Guessing would be right on a tenth of the points.
#
# ## When it stops fitting
#
# Rank 0's host takes in all of model and optimizer. In float32 with AdamW that is 12 bytes for each
# parameter. The figure is a calculation, not a measurement.

# %% tags=["fits"] jupyter={"source_hidden": true}
billions = (1.5, 7, 13, 20, 30, 70, 175, 405)
full_gib = {f"{size:g}B": 12e9 * size / 2**30 for size in billions}
fig, (axes,) = plots.figure(width=7.5, height=3.0)
axes.plot(billions, list(full_gib.values()), "o-", color=plots.RANK_COLORS[0])
for gib, text in ((256, "a host of 256 GiB"), (1024, "1 TiB"), (2048, "2 TiB")):
    axes.axhline(gib, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.text(1.3, gib * 1.1, text, fontsize=8)
for size, (name, gib) in zip(billions, full_gib.items()):
    below = (9, -4) if name == "30B" else (5, -12)                      # 30B's label would lie on a line
    axes.annotate(name, (size, gib), xytext=below, textcoords="offset points", fontsize=8)
axes.set(xscale="log", yscale="log", xlabel="parameters, billions", ylabel="GiB on rank 0's host")
axes.set(ylim=(10, 9000), xlim=(1.2, 700))
axes.set_xticks([1.5, 7, 20, 70, 400], ["1.5", "7", "20", "70", "400"], minor=False)
axes.minorticks_off()
axes.set_title("model and AdamW in float32, calculated")
plots.show(fig, alt="Host memory that a full state dict takes on rank 0, for models from 1.5B to 405B.")

# %% [markdown]
# It also takes time: one rank writes, and all GPUs wait. How fast does a rank write here? The next cell
# writes 64 MiB with `torch.save`, until they are on the disk. Your numbers will differ.

# %% jupyter={"source_hidden": true}
# %%ranks 0
import os


def seconds_to_write(tensor):
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        with (folder / "large").open("wb") as file:
            torch.save(tensor, file)
            file.flush()
            os.fsync(file.fileno())
        best = min(best, time.perf_counter() - began)
    (folder / "large").unlink()
    return best


# %% tags=["nbval-ignore-output", "seconds"]
# %%ranks 0
gib_per_s = 1 / 16 / seconds_to_write(torch.randn(2**24))            # f32[16777216], 64 MiB
print(f"{gib_per_s:.2f} GiB/s")

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
gib_per_s = ranks.get("rank == 0 and gib_per_s")[0]
Table(
    ["model", "GiB in the file", "minutes to write, as fast as here", "at 5 GiB/s"],
    [
        [name, round(gib), round(gib / gib_per_s / 60, 1), round(gib / 5 / 60, 1)]
        for name, gib in full_gib.items()
    ],
    note="Calculated from the size and the speed.",
)

# %% [markdown]
# So a full checkpoint is right for a model that fits into one host, and at the end of training, when the file
# goes elsewhere. While a large model trains, let every rank write its own part. That is
# [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# ## Proof
#
# The table compares each way of saving and loading, with four more steps after it, to the runs that never
# stopped. The last row is one process that has the full model and never stopped either.

# %% tags=["equality"] jupyter={"source_hidden": true}
# %%ranks
alone = build(seed=0)
one_process = train(alone, adam(alone), range(10), rank=0, world=1)[6:]


def continued_from(load, wrap):
    model = wrap(build(seed=1))
    optimizer = adam(model)
    load(model, optimizer)
    return train(model, optimizer, range(6, 10))


full_pt, run = folder / "full.pt", folder / "run"
ways = {
    "FSDP2, never stopped": never_stopped,
    "FSDP2, set_…_state_dict": continued_from(lambda m, o: load(full_pt, m, o), shard),
    "FSDP2, load_distributed": continued_from(lambda m, o: load_distributed(run, m, o), shard),
    "FSDP1, never stopped": old_never_stopped,
    "FSDP1, as in 2022, mended": with_state,
    "FSDP1, set_…_state_dict": continued_from(lambda m, o: load(full_pt, m, o), fsdp1),
    "FSDP1, from FSDP2's checkpoint": continued_from(lambda m, o: load_distributed(run, m, o), fsdp1),
    "one process, never stopped": one_process,
}

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", *map(str, range(7, 11))],
    [[how, *(f"{loss:.4f}" for loss in losses)] for how, losses in ranks.get("ways")[0].items()],
)

# %% [markdown]
# Where the same version of FSDP saved and loaded, the continued run equals the one that never stopped, to the
# last bit. FSDP2, FSDP1 and one process agree up to rounding, because they add up the same numbers in another
# order.

# %% tags=["check"]
# %%ranks
for losses in ways.values():
    torch.testing.assert_close(losses, one_process, rtol=1e-4, atol=1e-4)
assert ways["FSDP2, set_…_state_dict"] == ways["FSDP2, load_distributed"] == never_stopped
assert with_state == old_never_stopped
print("Checked: equal to the last bit within FSDP2 and within FSDP1 as in 2022, and to 0.0001 between all.")

# %% tags=["check"]
try_answers(3)

# %% [markdown]
# ## When it goes wrong
#
# What you see, why, and what helps:
#
# - **The job hangs in a save, and nothing is printed.** Some ranks have not called it: mistakes 1 to 3. To
#   see where each process stands, run `py-spy dump --pid PID` for it. With NCCL and
#   `TORCH_FR_BUFFER_SIZE=2000`, `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, each rank writes its last collectives to a
#   file at the timeout, and `torchfrtrace` compares the files. To be told within seconds by the next run, ask
#   with `all_here` of turn 2 first, or use `save_distributed`.
# - **`Received data size doesn't match expected size`**, and gloo ends the process. Ranks are in different
#   collectives. Run once with `TORCH_DISTRIBUTED_DEBUG=DETAIL`: the error then names both collectives.
# - **The loss jumps after loading.** Some ranks have other weights: mistake 4. Compare a full state dict with
#   the file, as `right_elements` does.
# - **The first loss is right, and later ones are not.** The optimizer's state is missing: mistake 5. Or it is
#   from FSDP1 and goes into FSDP2: clone each `step` first ([lesson 13](13_from_fsdp1_to_fsdp2.ipynb)).
# - **Rank 0 is killed, without an error from Python.** Its host has run out of memory: 12 bytes per
#   parameter, and that several times if several of its ranks read the file without `mmap`. Use sharded
#   checkpoints, [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
# - **Out of memory on every GPU in `get_state_dict`.** `cpu_offload=True` is missing: every rank gets the
#   full state dict on its GPU.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    3,
    {
        "full-fits-20b": f"Model and AdamW in float32, calculated: {full_gib['20B']:.0f} GiB for 20B, "
        f"{full_gib['30B']:.0f} GiB for 30B, {full_gib['405B'] / 1024:.1f} TiB for 405B. Rank 0 took in "
        f"{by_rank[0]['full, cpu_offload']:.1f} times the model, the others nothing.",
        "optimizer-17-gb": f"Calculated: weights and both averages are {12 * 1.5:.0f} GB, which are "
        f"{full_gib['1.5B']:.1f} GiB. The averages alone, 12 GB. Three minutes for 17 GB are 0.1 GB/s.",
        "full-timeouts": "A save that some ranks do not enter hangs until the timeout: mistakes 1 and 2. "
        "One that all enter holds all of them until rank 0 has written: see the minutes above.",
        "monolith-rank0": f"The file was read on one rank of {world}. The others received tensor by tensor, "
        "and kept their shards.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - `model.state_dict()` under `fully_shard` has DTensors. `full_tensor()` gathers one, `distribute_tensor`
#   cuts one; `get_state_dict` and the `set_…` functions do it for model and optimizer.
# - All ranks call, rank 0 writes. `full_state_dict=True` without `cpu_offload=True` gives everything to every
#   rank.
# - Collectives are paired by order, not by intent. What guards one must have the same value on all ranks.
# - Test a checkpoint by the losses of several steps: the first one does not need the optimizer's state.
# - At 12 bytes per parameter the host of rank 0 is the limit.

# %% jupyter={"source_hidden": true}
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

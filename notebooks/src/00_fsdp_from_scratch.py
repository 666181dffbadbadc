# %% [markdown]
# # 0 · FSDP from scratch
#
# FSDP trains a model that is cut into pieces, one piece for each process. In this lesson you write it
# yourself, in some thirty lines. Then you see PyTorch's own do the same, with the same losses.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson

lesson.card(
    learn=[
        "what each process holds under FSDP, and when",
        "the two collectives that FSDP is made of: all_gather and reduce_scatter",
        "how to shard a model by hand, and with `fully_shard`",
        "what the FlatParameter of FSDP1 was",
    ],
    needs="a training loop in plain PyTorch holds no secrets for you · no GPU · no other lesson",
    ranks="4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.",
    takes="half a minute to run on 2 cores (AMD EPYC) · 20 minutes to read",
    video="none: the [video series](../videos.md) begins with lesson 1",
)

# %% [markdown]
# ## Four processes
#
# A **rank** is one of several processes that train one model together. The number of ranks is the **world
# size**. In a real job each rank has a GPU of its own. Here the ranks are four processes on your CPU. If
# your machine has two or more GPUs, the ranks use those, and nothing else in this lesson changes.

# %%
from fsdp_utils.lessons import plots
from fsdp_utils.notebook import ranks

ranks.start()

# %% [markdown]
# A **process group** is what ranks talk through. On CPUs its *backend* is gloo, on GPUs NCCL.
#
# A cell that begins with `%%ranks` runs on every rank. It holds what you would write in a script for
# torchrun, PyTorch's launcher. What a rank prints is labelled with its number. What all ranks print alike
# is shown once.

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
print(f"I am rank {rank} of {world}.")

# %% [markdown]
# ## The idea
#
# Plain data parallelism (DDP) gives each rank a share of the samples and the **whole** model. So every rank
# holds all parameters, all gradients and all of the optimizer's state: the same numbers, four times over.
#
# FSDP, *fully sharded data parallel*, shares out the samples in the same way, and the model too. Between
# two steps a rank holds one piece of the parameters, its **shard**, with the gradients and the optimizer's
# state of that piece. No rank can compute with a piece of a weight matrix. So the ranks put a layer
# together just before they use it, and take it apart right after. What is put together at once is called a
# **unit**.

# %% jupyter={"source_hidden": true}
plots.life_of_a_unit(ranks.get("world")[0])

# %% [markdown]
# Read it from left to right: the life of one unit during one training step. Each colour is one piece of the
# unit's parameters. The unit is whole twice, for the forward pass and for the backward pass. The gradients
# are added up over the ranks, and each rank keeps those of its own piece. Then the optimizer updates that
# piece, and only that.
#
# ## The two collectives
#
# A **collective** is a call that all ranks make together. FSDP needs two of them. The first turns pieces
# into the whole.

# %%
# %%ranks
piece = torch.full((2,), float(rank), device=device)           # f32[2], another one on each rank
pieces = [torch.empty(2, device=device) for _ in range(world)]
dist.all_gather(pieces, piece)                                 # NOTE: on every rank, or the others wait
print(torch.cat(pieces).tolist())                              # f32[2 * world], the same on every rank

# %% [markdown]
# `all_gather`: everyone gives a piece, everyone gets all pieces.
#
# The second collective goes the other way. Each rank comes with a whole tensor of its own.

# %%
# %%ranks
own = torch.arange(2.0 * world, device=device) * (rank + 1)     # f32[2 * world], another one on each rank
mine = torch.empty(2, device=device)                            # f32[2]
dist.reduce_scatter(mine, list(own.chunk(world)))
print(mine.tolist())

# %% [markdown]
# `reduce_scatter`: the tensors are added up over the ranks, and each rank gets its piece of the sum. For
# gradients this is just what is wanted: each rank has seen other samples, and needs the sum over all of
# them, for its own piece alone.
#
# ## A model, trained by one process
#
# Three blocks and a last layer, to tell digits apart. The same seed gives all ranks the same weights.

# %%
# %%ranks
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):                                       # f32[batch, width]
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))     # f32[batch, width]


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(64), Block(64), Block(64), nn.Linear(64, 10)).to(device)


for name, layer in build().named_children():
    numel = sum(p.numel() for p in layer.parameters())
    print(f"layer {name}: {type(layer).__name__:6} {numel:7,} parameters")

# %% [markdown]
# The data are the 1,797 handwritten digits that come with scikit-learn, 8 by 8 pixels each. One training
# loop serves the whole lesson. Each step takes 24 samples, and each rank computes with its share of them.

# %%
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)     # f32[1797, 64]
labels = torch.tensor(digits.target, device=device)                             # i64[1797]


def share(step, rank=rank, world=world):
    rows = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]
    return images[rows], labels[rows]                           # f32[24 / world, 64], i64[24 / world]


def train(forward, parameters, rank=rank, world=world):
    """Twenty steps; the loss of each, as the mean over all ranks."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = torch.zeros(20, device=device)
    for step in range(20):
        x, y = share(step, rank, world)
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    if world > 1:
        dist.all_reduce(losses)                                 # the sum over the ranks
    return losses.tolist()


# %% [markdown]
# First the yardstick: one process, the whole model, all 24 samples. Here each rank does that by itself.

# %%
# %%ranks
model = build()
alone = train(model, model.parameters(), rank=0, world=1)
print(f"one process: loss {alone[0]:.4f} at the first step, {alone[-1]:.4f} at the last")

# %% [markdown]
# All ranks print the same, because none of them has shared anything yet. Everything below has to meet these
# losses.
#
# ## Predict
#
# All numbers are float32, so 4 bytes each. AdamW keeps two averages for each parameter. How many bytes per
# parameter does training take, activations aside? And how many of them does one rank of four hold, if
# everything is sharded?
#
# <details><summary>Answer</summary>
#
# 16 bytes per parameter: 4 for itself, 4 for its gradient, 8 for AdamW's averages. One rank of four holds a
# quarter, 4 bytes per parameter. The measurement comes at the end of the lesson.
#
# </details>
#
# ## By hand: a gather that knows its own backward
#
# This is the heart of FSDP. The whole comes from the shards, by `all_gather`. So the gradient of a shard
# comes from the gradients of the whole, by `reduce_scatter`. An autograd function says both in one place.

# %%
# %%ranks
class Whole(torch.autograd.Function):
    """Forward: my shard to the whole unit. Backward: the gradient of the whole to that of my shard."""

    @staticmethod
    def forward(ctx, shard, unit):                              # f32[n / world]
        unit.gather()
        ctx.unit = unit
        return unit.whole.data                                  # f32[n]

    @staticmethod
    def backward(ctx, grad):                                    # f32[n], from this rank's samples
        ctx.unit.free()                                         # the last use of the whole is over
        mine = torch.empty_like(ctx.unit.shard)                 # f32[n / world]
        dist.reduce_scatter(mine, list(grad.chunk(world)))      # sum over the ranks, this rank's piece of it
        return mine / world, None                               # the loss is a mean over ranks: so is this


# %% [markdown]
# A unit lays all parameters of a layer end to end in one flat tensor, and keeps its own piece. If the
# length does not divide by the world size, it is padded with zeros. The layer itself moves to the meta
# device, where tensors have shapes but no memory: from here on its weights exist only as shards.
# `functional_call` runs such a layer with weights that it is handed.

# %%
# %%ranks
from torch.func import functional_call


class Unit:
    """A layer of which each rank holds 1 / world."""

    def __init__(self, layer):
        self.shapes = {name: p.shape for name, p in layer.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in layer.parameters()])     # f32[numel]
        flat = F.pad(flat, (0, -len(flat) % world))                              # f32[n], world divides n
        self.shard = flat.chunk(world)[rank].clone().requires_grad_()            # f32[n / world]
        self.whole = torch.empty_like(flat)                                      # f32[n], but ...
        self.free()                                                              # ... no memory until needed
        self.layer = layer.to("meta")

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.data.chunk(world)), self.shard.data)

    def free(self):
        self.whole.untyped_storage().resize_(0)

    def __call__(self, x):
        whole = Whole.apply(self.shard, self)                                    # f32[n]
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = whole[: sum(sizes)].split(sizes)                                # the padding stays behind
        named = zip(self.shapes.items(), pieces)
        return functional_call(self.layer, {name: piece.view(shape) for (name, shape), piece in named}, x)


units = [Unit(layer) for layer in build()]
print("elements in each rank's shard:", [unit.shard.numel() for unit in units])

# %% [markdown]
# A block has 33,216 parameters, so with four ranks each holds 8,304. The last layer has 650: padded to 652,
# that is 163 for each.
#
# Now the model is a list of units, and the optimizer is given the shards. The loop is the one from above.

# %%
# %%ranks
def through(units):
    def forward(x):
        for unit in units:
            x = unit(x)
        return x

    return forward


by_hand = train(through(units), [unit.shard for unit in units])
print(f"by hand: loss {by_hand[0]:.4f} at the first step, {by_hand[-1]:.4f} at the last")
torch.testing.assert_close(by_hand, alone, rtol=1e-5, atol=1e-5)

# %% [markdown]
# The same losses as one process, on every rank, though no rank ever updated more than its own piece.
#
# The last line holds the two lists of losses against each other. They differ only by rounding: the same
# numbers are added up in another order.
#
# ## Is it whole for no longer than needed?
#
# A meter looks at every operation of one step. It counts the collectives, and the bytes of gathered
# parameters that are alive.

# %%
# %%ranks
from fsdp_utils.lessons.meter import Meter


def measure(forward, parameters):
    """One forward and backward pass under the meter."""
    x, y = share(step=0)
    with Meter(parameters) as meter:
        F.cross_entropy(forward(x), y).backward()
    print(f"{meter.all_gathers} all_gathers, {meter.reduce_scatters} reduce_scatters")
    print(f"at most {meter.peak_whole_bytes / 2**10:.0f} KiB of parameters whole at once")
    return meter


kept = measure(through(units), [unit.shard for unit in units])
print(f"the model: {sum(unit.whole.nbytes for unit in units) / 2**10:.0f} KiB")
assert kept.peak_whole_bytes == sum(unit.whole.nbytes for unit in units)

# %% [markdown]
# Four gathers, four reductions. But at one moment the whole model was there! Autograd keeps each weight
# from the forward pass, because the backward pass needs it again. So the units pile up until backward takes
# them off one by one.
#
# The cure is to empty a unit after its forward pass, and to gather it again when backward comes back to it.
# Two lines.

# %%
# %%ranks
class UnitFreedAfterForward(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())             # runs when backward arrives at this unit
        return y


units = [UnitFreedAfterForward(layer) for layer in build()]
freed_by_hand = train(through(units), [unit.shard for unit in units])
torch.testing.assert_close(freed_by_hand, alone, rtol=1e-5, atol=1e-5)
freed = measure(through(units), [unit.shard for unit in units])
assert freed.all_gathers == 2 * len(units)
assert freed.peak_whole_bytes == units[0].whole.nbytes

# %% [markdown]
# Now at most one block is whole at a time, and the losses are still those of one process. The price is four
# more gathers: each unit is now sent twice in each step. PyTorch gives you the same choice and calls it
# `reshard_after_forward`. [Lesson 6](06_sharding_strategies.ipynb) weighs the two.
#
# ## The same with `fully_shard`
#
# This is FSDP as PyTorch offers it today, often called FSDP2. Call `fully_shard` on each layer that shall
# be a unit, then on the model. The model stays an `nn.Module` with its own parameters, and each of them is
# now a `DTensor`: a tensor that knows its whole shape, and holds this rank's shard of it.

# %% tags=["equality"]
# %%ranks
from torch.distributed.fsdp import fully_shard

model = build()
for layer in model:
    fully_shard(layer)
fully_shard(model)                          # the root unit takes what is left over: here nothing

sharded = train(model, model.parameters())
print(f"fully_shard: loss {sharded[0]:.4f} at the first step, {sharded[-1]:.4f} at the last")
torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(sharded, by_hand, rtol=1e-5, atol=1e-5)

# %% [markdown]
# The losses of one process, and those of our thirty lines. The meter tells how alike the two really are.

# %% tags=["meter"]
# %%ranks
fsdp2 = measure(model, model.parameters())
theirs, ours = fsdp2.gathered_bytes / 2**10, freed.gathered_bytes / 2**10
print(f"{theirs:.0f} KiB gathered in one step, by hand {ours:.0f} KiB")
assert (fsdp2.all_gathers, fsdp2.reduce_scatters) == (freed.all_gathers, freed.reduce_scatters)
assert 0.97 < theirs / ours < 1.03
assert fsdp2.peak_whole_bytes >= 2 * units[0].whole.nbytes

# %% [markdown]
# As many collectives, and nearly as many bytes. Two things differ.
#
# - **Two blocks** are whole at once, where we had one. In the backward pass, `fully_shard` gathers the next
#   unit while it still computes with the present one. On GPUs the two happen at the same time. [Lesson
#   4](04_backward_prefetch.ipynb) is about this.
# - A few bytes of padding, because `fully_shard` cuts elsewhere. That is the next question.
#
# ## What each rank holds
#
# To see where the cuts are, fill each parameter of a block with a number of its own, shard the block, and
# count which numbers a rank has got.

# %%
# %%ranks
def marked():
    block = Block(64).to(device)
    for number, parameter in enumerate(block.parameters(), start=1):
        parameter.data.fill_(number)
    return block


names = [name for name, _ in Block(64).named_parameters()]
flat_shard = Unit(marked()).shard
held_flat = [(flat_shard == number).sum().item() for number, _ in enumerate(names, start=1)]
held_rows = [parameter.to_local().numel() for parameter in fully_shard(marked()).parameters()]
assert sum(held_flat) + (flat_shard == 0).sum().item() == len(flat_shard)   # the zeros are padding

# %% jupyter={"source_hidden": true}
names = ranks.get("names")[0]


def by_parameter(held):
    """From one list for each rank to one list for each parameter."""
    return {name: [on_rank[index] for on_rank in held] for index, name in enumerate(names)}


plots.shards(
    {
        "flat: by hand": by_parameter(ranks.get("held_flat")),
        "by rows: fully_shard": by_parameter(ranks.get("held_rows")),
    }
)

# %% [markdown]
# On the left a rank holds a stretch of the flat tensor, wherever that happens to lie: with four ranks, rank
# 0 has all of the norm, and rank 3 nothing of `fc1`. On the right each rank holds its rows of every
# parameter. So each parameter keeps its own setting of `requires_grad`, and its name, under which a
# checkpoint can store it.
#
# ## The way of 2022: FSDP1
#
# The first FSDP, the class `FullyShardedDataParallel`, cuts flat, as we did. It *wraps* each layer in a
# module of its own and replaces the layer's parameters by one `FlatParameter`.

# %%
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

layers = [FSDP(layer, device_id=device) for layer in build()]
model = FSDP(nn.Sequential(*layers), device_id=device)
for name, parameter in model.named_parameters():
    print(f"{name.replace('_fsdp_wrapped_module.', '')}: {list(parameter.shape)}")

# Is it the same flat tensor, cut at the same places, as by hand?
assert all(torch.equal(parameter, Unit(layer).shard) for parameter, layer in zip(model.parameters(), build()))

# %% [markdown]
# Four parameters are left, where the model had twenty. And rank by rank, each one equals our shard, number
# by number: what you wrote by hand is FSDP1's FlatParameter.

# %%
# %%ranks
wrapped = train(model, model.parameters())
print(f"FSDP1: loss {wrapped[0]:.4f} at the first step, {wrapped[-1]:.4f} at the last")
torch.testing.assert_close(wrapped, alone, rtol=1e-5, atol=1e-5)
fsdp1 = measure(model, model.parameters())
assert fsdp1.gathered_bytes == freed.gathered_bytes

# %% [markdown]
# The same losses, the same number of bytes as by hand, and the same two blocks at once as `fully_shard`.
#
# ## Measured: what one rank keeps
#
# Now to the prediction. After one step, count the bytes of parameters, gradients and the optimizer's state.

# %%
# %%ranks
from torch.distributed.tensor import DTensor


def bytes_here(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def kept_bytes(forward, parameters, rank=rank, world=world):
    """Bytes of parameters, gradients and AdamW's averages on this rank after one step."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters)
    x, y = share(0, rank, world)
    F.cross_entropy(forward(x), y).backward()
    optimizer.step()
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [bytes_here(tensors) for tensors in (parameters, [p.grad for p in parameters], averages)]


model = build()
numel = sum(p.numel() for p in model.parameters())
kept_alone = kept_bytes(model, model.parameters(), rank=0, world=1)
kept_by_hand = kept_bytes(through(units), [unit.shard for unit in units])
for layer in model:
    fully_shard(layer)
kept_sharded = kept_bytes(fully_shard(model), model.parameters())
print(f"one process: {sum(kept_alone) / numel:.1f} bytes per parameter")
assert sum(kept_alone) == 16 * numel

# %% jupyter={"source_hidden": true}
world = ranks.get("world")[0]
kept = {
    "one process": ranks.get("kept_alone")[0],
    f"rank 0 of {world}, by hand": ranks.get("kept_by_hand")[0],
    f"rank 0 of {world}, fully_shard": ranks.get("kept_sharded")[0],
}
for way in list(kept)[1:]:
    assert 0.99 < world * sum(kept[way]) / sum(kept["one process"]) < 1.03
kinds = ["parameters", "gradients", "AdamW's averages"]
kib = {way: {kind: nbytes / 2**10 for kind, nbytes in zip(kinds, sizes)} for way, sizes in kept.items()}
plots.memory_per_rank(kib, unit="KiB")

# %% [markdown]
# Sixteen bytes per parameter for one process, and a quarter of that on each of four ranks. Only a little
# padding is lost. The meter's other number comes on top of it for a moment: the units that are whole.
#
# ## Proof
#
# Four ways to train, and one curve.

# %%
# %%ranks
ways = [("one process", alone), ("by hand", freed_by_hand), ("fully_shard", sharded), ("FSDP1", wrapped)]
for way, losses in ways:
    print(f"{way:12}", "  ".join(f"step {step + 1}: {losses[step]:.4f}" for step in (0, 9, 19)))
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-5)

# %% jupyter={"source_hidden": true}
plots.losses(dict(ranks.get("ways")[0]))

# %% [markdown]
# ## Claims, then and now
#
# What others have written about FSDP, beside what the cells above have found. The last column is for numbers
# that only a GPU can give; none is needed here.

# %% jupyter={"source_hidden": true}
gathers, scatters = ranks.get("(fsdp2.all_gathers, fsdp2.reduce_scatters)")[0]
one, two = ranks.get("(freed.peak_whole_bytes / 2**10, fsdp2.peak_whole_bytes / 2**10)")[0]
lesson.claims(
    0,
    {
        "same-results": "Yes: all 20 losses equal those of one process to within 0.00004. "
        "Efficiency is not for a CPU to say.",
        "two-gathers-one-scatter": f"Yes: {gathers} all_gathers and {scatters} reduce_scatters for 4 units.",
        "biggest-layer": f"True, and `fully_shard` needs more: {two:.0f} KiB were whole at once, two of the "
        f"biggest layers. By hand, with one at a time: {one:.0f} KiB.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. The size of a shard.** A unit has `numel` parameters. How many elements does each rank hold, padding
# included?

# %%
def shard_numel(numel, world_size):
    return None  # your line here


sizes = {(33_216, 4): 8_304, (650, 4): 163, (650, 3): 217, (1, 4): 1}
lesson.check(shard_numel, sizes)

# %% [markdown]
# **2. Seven billion.** A model has so many billion parameters, in float32, and AdamW trains it. Everything
# is sharded. How many GiB of parameters, gradients and averages does one rank hold? 1 GiB is 2**30 bytes.

# %%
def gib_per_rank(billions, world_size):
    return None  # your line here


memory = {(7, 1): 104.308128, (7, 8): 13.038516, (70, 64): 16.298145}
lesson.check(gib_per_rank, memory)

# %% [markdown]
# **3. DDP's collective.** DDP adds up gradients with `all_reduce`: every rank comes with a tensor and
# leaves with the sum of all of them. Write it with the two collectives of this lesson. The length of the
# tensor divides by the world size.

# %%
# %%ranks
def my_all_reduce(tensor):                  # f32[n] -> f32[n]
    return None  # your lines here


summed = my_all_reduce(torch.arange(3.0 * world, device=device) * (rank + 1))

# %%
factor = sum(range(1, world + 1))
on_last_rank = ranks.get("None if summed is None else summed.tolist()")[-1]
lesson.check(on_last_rank, [factor * float(i) for i in range(3 * world)])

# %% [markdown]
# ## Summary
#
# - A rank keeps a shard of the parameters, and the gradients and optimizer state of that shard: `1 / world`
#   of everything.
# - A unit is put together by `all_gather` before forward and again before backward, and emptied after each.
# - `reduce_scatter` adds up the gradients, and leaves each rank those of its own shard.
# - The losses are those of one process. FSDP changes where numbers are kept, not what is computed.
# - `fully_shard` (FSDP2) cuts every parameter by rows. FSDP1 cuts one flat tensor per unit, as you did by
#   hand.
#
# ## Next
#
# We made each layer a unit, because there were only four. In [lesson 1](01_transformer_wrapper.ipynb) the
# model is a real transformer, and the question is which modules should be units.
#
# [lesson 1 →](01_transformer_wrapper.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def shard_numel(numel, world_size):
    return -(-numel // world_size)  # rounded up: the padding


lesson.check(shard_numel, sizes, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def gib_per_rank(billions, world_size):
    return 16 * billions * 1e9 / world_size / 2**30


lesson.check(gib_per_rank, memory, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def my_all_reduce(tensor):                  # f32[n] -> f32[n]
    mine = torch.empty_like(tensor[: len(tensor) // world])
    dist.reduce_scatter(mine, list(tensor.chunk(world)))
    whole = torch.empty_like(tensor)
    dist.all_gather(list(whole.chunk(world)), mine)
    return whole


summed = my_all_reduce(torch.arange(3.0 * world, device=device) * (rank + 1))

# %% tags=["solution"] jupyter={"source_hidden": true}
lesson.check(ranks.get("summed.tolist()")[-1], [factor * float(i) for i in range(3 * world)], strict=True)

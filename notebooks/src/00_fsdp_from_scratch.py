# %% [markdown]
# # 0 · FSDP from scratch
#
# FSDP trains a model that is cut into pieces, one piece per process. In this lesson you build FSDP in some
# thirty lines. Then you run PyTorch's `fully_shard` on the same model and compare the two: their losses,
# the bytes that they send, and the memory that they hold.

# %% [markdown] tags=["card"]
# learn:
# - what each process holds under FSDP, and when
# - the two collectives that FSDP is made of, all_gather and reduce_scatter
# - how to shard a model by hand, and with `fully_shard`
# - what the FlatParameter of FSDP1 was
# needs: You can write a training loop in plain PyTorch · no GPU · no other lesson
# ranks: "4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab."
# takes: half a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: "none: the [video series](../videos.md) begins with lesson 1"

# %% [markdown]
# **The question of this lesson:** a model that is cut into four pieces cannot compute anything with one of
# them. So where are its parameters at each moment of a training step?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

plots.life_of_a_unit(4)

# %% [markdown]
# The drawing shows one layer of a model on four processes, from left to right through one training step.
# Each colour is one quarter of the layer's parameters. The layer is complete on every process twice: for
# the forward pass and for the backward pass. At all other times each process holds one quarter. By the end
# of the lesson you have written code that does this, and measured that it does.
#
# ## In your own code
#
# This is FSDP as PyTorch offers it today. Save it as `train.py` and start four processes with
# `torchrun --nproc-per-node 4 train.py`; it runs with GPUs and without.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.fsdp import fully_shard
#
# dist.init_process_group()                             # torchrun tells each process its rank
# device = "cuda" if torch.cuda.is_available() else "cpu"
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.manual_seed(0)                                  # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for layer in model:
#     fully_shard(layer)                                # each layer is gathered, used and freed by itself
# fully_shard(model)                                    # the root takes what is left over: here nothing
# optimizer = torch.optim.AdamW(model.parameters())     # after sharding: the parameters are shards now
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# for step in range(10):
#     x = torch.randn(32, 256, device=device)           # your data
#     model(x).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# Two lines are new compared with training on one GPU, both `fully_shard`. The rest of the lesson is about
# what they do.
#
# ## Four processes
#
# A **rank** is one of several processes that train one model together. The number of ranks is the **world
# size**. In a real job each rank has a GPU of its own. Here the ranks are four processes on your CPU. If
# your machine has two or more GPUs, the ranks use those, and nothing else in this lesson changes.

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn
from fsdp_utils.notebook import ranks

ranks.start()

# %% [markdown]
# Ranks talk to each other through a **process group**. On CPUs its *backend* is gloo, on GPUs it is NCCL.
#
# A cell that begins with `%%ranks` runs on every rank. It holds what you would write in a script for
# `torchrun`. Output is labelled with the rank that printed it. What all ranks print alike is shown once.

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
# two steps a rank holds one piece of the parameters, its **shard**, with the gradients and the optimizer
# state of that piece. To compute with a layer, the ranks first rebuild all of its parameters on every rank,
# and drop them again right after. The parameters that are rebuilt together are called a **unit**.
#
# (There are ways to compute with a piece of a weight matrix, called tensor parallelism. FSDP is not one of
# them.)
#
# ## The two collectives
#
# A **collective** is a call that all ranks make together. FSDP needs two of them. The first is
# `all_gather`: every rank brings a piece, and every rank gets all pieces.

# %%
# %%ranks
piece = torch.full((2,), float(rank), device=device)           # f32[2], other values on each rank
pieces = [torch.empty(2, device=device) for _ in range(world)]
dist.all_gather(pieces, piece)                                 # NOTE: on every rank, or the others wait
gathered = torch.cat(pieces)                                   # f32[2 * world], the same on every rank

# %% jupyter={"source_hidden": true}
brought, got = ranks.get("piece.tolist()"), ranks.get("gathered.tolist()")
Table(
    ["rank", "brings to all_gather", "gets"],
    [[rank, str(brought[rank]), str(got[rank])] for rank in range(len(got))],
)

# %% [markdown]
# This is how the shards of a layer become its full parameters.
#
# The second collective is `reduce_scatter`. Every rank brings a full tensor. The tensors are added up, and
# each rank gets its own piece of the sum.

# %%
# %%ranks
own = torch.arange(2.0 * world, device=device) * (rank + 1)     # f32[2 * world], other values on each rank
mine = torch.empty(2, device=device)                            # f32[2]
dist.reduce_scatter(mine, list(own.chunk(world)))

# %% jupyter={"source_hidden": true}
brought, got = ranks.get("own.tolist()"), ranks.get("mine.tolist()")
Table(
    ["rank", "brings to reduce_scatter", "gets"],
    [[rank, str(brought[rank]), str(got[rank])] for rank in range(len(got))],
)

# %% [markdown]
# Look down the first two numbers of each row: rank 0 gets their sums. This is how gradients are shared out.
# Each rank has seen other samples. It needs the sum of the gradients over all ranks, and only for the
# parameters that it holds.
#
# ## A model, trained by one process
#
# The model has three blocks and a last layer, and learns to tell digits apart. The same seed gives all ranks
# the same weights.

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


# %% jupyter={"source_hidden": true}
# %%ranks
layers = [
    (name, type(layer).__name__, sum(p.numel() for p in layer.parameters()))
    for name, layer in build().named_children()
]

# %% jupyter={"source_hidden": true}
layers = ranks.get("layers")[0]
model_numel = sum(numel for *_, numel in layers)
Table(
    ["layer", "class", "parameters", "KiB in float32"],
    [[name, kind, numel, round(4 * numel / 2**10, 1)] for name, kind, numel in layers],
    note=f"In total {model_numel:,} parameters, {4 * model_numel / 2**10:.0f} KiB.",
)

# %% [markdown]
# The data are the 1,797 handwritten digits that come with scikit-learn, 8 by 8 pixels each. Each step takes
# 24 of them, and each rank computes with its share of the 24.

# %%
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)     # f32[1797, 64]
labels = torch.tensor(digits.target, device=device)                             # i64[1797]


def share(step, rank=rank, world=world):
    """The samples of one rank in one step: f32[24 / world, 64] and i64[24 / world]."""
    rows = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]
    return images[rows], labels[rows]


# %% [markdown]
# One training loop serves the whole lesson. It is the loop of any PyTorch program. The last lines only
# average the losses over the ranks, so that we can compare them.

# %%
# %%ranks
def train(forward, parameters, rank=rank, world=world, optimizer=torch.optim.AdamW, lr=1e-3):
    """Twenty steps; the loss of each, as the mean over all ranks."""
    optimizer = optimizer(parameters, lr=lr)
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
# First the reference: one process, the whole model, all 24 samples. Each rank does this by itself.

# %%
# %%ranks
model = build()
alone = train(model, model.parameters(), rank=0, world=1)
print(f"one process: loss {alone[0]:.4f} at the first step, {alone[-1]:.4f} at the last")

# %% [markdown]
# All ranks print the same, because no rank has talked to another yet. Everything below has to give these
# losses.
#
# **Predict before you go on.** All numbers are float32, 4 bytes each. AdamW keeps two averages for each
# parameter. How many bytes per parameter does training take, without the activations? If all of it is
# sharded over four ranks, how many of these bytes does one rank hold?
#
# <details><summary>Answer</summary>
#
# 16 bytes per parameter: 4 for the parameter, 4 for its gradient, 8 for AdamW's averages. One rank of four
# holds a quarter of that, 4 bytes per parameter. Further down you measure it.
#
# </details>
#
# ## By hand: a gather that knows its backward
#
# This is the heart of FSDP. In the forward pass, `all_gather` turns the shards into the full parameters. In
# the backward pass, `reduce_scatter` turns the gradients of the full parameters into the gradient of each
# shard. A `torch.autograd.Function` holds both directions.

# %%
# %%ranks
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, unit):                              # f32[n / world]
        unit.gather()
        ctx.unit = unit
        return unit.full.data                                   # f32[n]

    @staticmethod
    def backward(ctx, grad):                                    # f32[n], from this rank's samples
        ctx.unit.free()                                         # backward has used the parameters: drop them
        mine = torch.empty_like(ctx.unit.shard)                 # f32[n / world]
        dist.reduce_scatter(mine, list(grad.chunk(world)))      # the sum over the ranks, this rank's piece
        return mine / world, None                               # the loss is a mean over the ranks


# %% [markdown]
# A unit lays all parameters of a layer end to end in one flat tensor and cuts it into `world` equal pieces.
# If its length does not divide by the world size, it is padded with zeros. Each rank keeps its own piece.

# %%
# %%ranks
class Unit:
    """A layer of which each rank keeps 1 / world."""

    def __init__(self, layer):
        self.shapes = {name: p.shape for name, p in layer.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in layer.parameters()])     # f32[numel]
        flat = F.pad(flat, (0, -len(flat) % world))                              # f32[n], world divides n
        self.shard = flat.chunk(world)[rank].clone().requires_grad_()            # f32[n / world]
        self.full = torch.empty_like(flat)                                       # f32[n] ...
        self.free()                                                              # ... without memory, yet
        self.layer = layer.to("meta")                                            # shapes, but no numbers

    def gather(self):
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather(list(self.full.data.chunk(world)), self.shard.data)

    def free(self):
        self.full.untyped_storage().resize_(0)

    def __call__(self, x):
        return run(self.layer, Gather.apply(self.shard, self), self.shapes, x)


# %% [markdown]
# A tensor is a view of a **storage**, which holds the bytes. `free` shrinks the storage to nothing, and
# `gather` gives it its bytes back. The tensor `full` stays the same object all the time. FSDP1 and FSDP2
# manage their parameters in this way, too.
#
# The layer itself moves to the **meta device**, where tensors have shapes but no memory. To run it,
# `functional_call` puts the gathered weights in the places of its own.

# %%
# %%ranks
from torch.func import functional_call


def run(layer, flat, shapes, x):
    """Call the layer with weights taken from a flat tensor; padding at its end is left out."""
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = flat[: sum(sizes)].split(sizes)
    weights = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)}
    return functional_call(layer, weights, x)


def through(units):
    def forward(x):
        for unit in units:
            x = unit(x)
        return x

    return forward


# %% [markdown]
# Now the model is a list of units, and the optimizer gets the shards. The training loop is the one from
# above, unchanged.

# %%
# %%ranks
units = [Unit(layer) for layer in build()]
by_hand = train(through(units), [unit.shard for unit in units])
print("elements in each rank's shard:", [unit.shard.numel() for unit in units])
print(f"by hand: loss {by_hand[0]:.4f} at the first step, {by_hand[-1]:.4f} at the last")
torch.testing.assert_close(by_hand, alone, rtol=1e-5, atol=1e-5)        # all 20 losses, up to rounding

# %% [markdown]
# These are the losses of one process, although no rank updated more than its own piece. They differ by
# rounding only, because the same numbers are added up in another order.
#
# ## How long does a rank hold the full parameters?
#
# A meter looks at every operation of one step. It counts the collectives, and the bytes of full parameters
# that exist.

# %%
# %%ranks
from fsdp_utils.lessons.meter import Meter


def measure(forward, parameters):
    """One forward and backward pass under the meter."""
    x, y = share(step=0)
    with Meter(parameters) as meter:
        F.cross_entropy(forward(x), y).backward()
    return meter


kept = measure(through(units), [unit.shard for unit in units])

# %% jupyter={"source_hidden": true}
def row(way, meter):
    """One line of the table of measurements; meter names one on the ranks."""
    gathers, scatters, full, buffers = ranks.get(
        f"({meter}.all_gathers, {meter}.reduce_scatters, {meter}.peak_whole_bytes, {meter}.peak_gather_bytes)"
    )[0]
    return [way, gathers, scatters, round(full / 2**10), round(buffers / 2**10)]


HEAD = ["one step", "all_gathers", "reduce_scatters", "full parameters, peak KiB", "with buffers, peak KiB"]
Table(HEAD[:4], [row("by hand", "kept")[:4]])

# %% jupyter={"source_hidden": true}
plots.alive({"by hand": ranks.get("kept.whole_bytes")[0]}, whole_model=4 * model_numel)

# %% [markdown]
# There is one all-gather and one reduce-scatter for each of the four units. But between forward and
# backward, all 392 KiB of the model exist on every rank. `Unit.__call__` gathers, and nothing frees the unit
# until its backward pass is over. So the units pile up in the forward pass, and go away one by one in the
# backward pass. A model that does not fit on one GPU would not fit in this way either.

# %% tags=["check"]
# %%ranks 0
assert (kept.all_gathers, kept.reduce_scatters) == (len(units), len(units))
assert kept.peak_whole_bytes == sum(unit.full.nbytes for unit in units)
print("Checked: 4 all-gathers, 4 reduce-scatters, and all units are complete at the peak.")

# %% [markdown]
# ## Your turn 1 · Free each unit, and gather it again
#
# Write a unit that is complete only while it is used. After its forward pass, free it. The backward pass
# needs the weights again, so gather them when it arrives at this unit.
#
# `y.register_hook(f)` calls `f(grad)` when the backward pass has computed the gradient of `y`, which is
# just before it enters the layer that has made `y`.
#
# <details><summary>Hint</summary>
#
# Between `y = ...` and `return y` you need two lines: one that frees now, and one that registers a hook
# which gathers later. The hook must return `None`, or its result replaces the gradient.
#
# Why may the storage be empty in between, although autograd has saved the weights? It has saved tensors,
# and a tensor refers to its storage, not to the bytes in it. When backward reads them, the bytes must be
# there again.
#
# </details>

# %% tags=["exercise"]
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        return None                             # your lines here; begin with y = super().__call__(x)


# %% jupyter={"source_hidden": true}
# %%ranks
def score(kind):
    """Train with units of this kind, and measure one step. None where nothing is written yet."""
    units = [kind(layer) for layer in build()]
    if units[0](images[:1]) is None:
        return None
    shards = [unit.shard for unit in units]
    losses = train(through(units), shards)
    meter = measure(through(units), shards)
    return {
        "all-gathers in one step": meter.all_gathers,
        "full parameters at the peak, KiB": meter.peak_whole_bytes / 2**10,
        "losses that differ from one process's": sum(abs(a - b) > 1e-4 for a, b in zip(losses, alone)),
        "curve": meter.whole_bytes,
    }


result = score(MyUnit)

# %% jupyter={"source_hidden": true}
turn(
    1,
    ranks.get("result"),
    {
        "all-gathers in one step": exactly(
            2 * len(layers),
            otherwise="Each unit should be gathered twice in a step: once for forward, once for backward.",
        ),
        "full parameters at the peak, KiB": at_most(
            130, otherwise="More than one block is complete at the same time: a unit is not freed after use."
        ),
        "losses that differ from one process's": exactly(
            0, otherwise="The losses are wrong: backward has worked with other weights than forward."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())
        return y


result = score(MyUnit)

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        y.register_hook(lambda grad: self.gather())
        return y


result = score(MyUnit)

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        return super().__call__(x)


result = score(MyUnit)

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.full.untyped_storage().resize_(self.full.nbytes) and None)
        return y


result = score(MyUnit)

# %% tags=["wrong"] turn=1 raises="out of bounds for storage of size 0"
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        return y


result = score(MyUnit)

# %% jupyter={"source_hidden": true}
curves = {"above: kept": ranks.get("kept.whole_bytes")[0], "target": run_solution(0, 1)[0]["curve"]}
if ranks.get("result is not None")[0]:
    curves["yours"] = ranks.get("result['curve']")[0]
plots.alive(curves, whole_model=4 * model_numel)

# %% [markdown]
# The second panel is the run of the folded solution. When your unit works, run this cell once more, and your
# run appears beside the two.
#
# The price is four more all-gathers in each step. PyTorch gives you the same choice and calls it
# `reshard_after_forward`. [Lesson 6](06_sharding_strategies.ipynb) weighs the two.
#
# ## The same with `fully_shard`
#
# `fully_shard` is often called FSDP2. Call it on each layer that should be a unit, then on the model. The
# model stays an `nn.Module` with its own parameters. Each parameter is now a `DTensor`: a tensor that knows
# its full shape, and holds this rank's shard of it.

# %% tags=["equality"]
# %%ranks
from torch.distributed.fsdp import fully_shard


def shard_layers(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)        # the root unit takes what is left over: here nothing


model = shard_layers(build())
sharded = train(model, model.parameters())
print(f"fully_shard: loss {sharded[0]:.4f} at the first step, {sharded[-1]:.4f} at the last")
torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-5)

# %% [markdown]
# The losses are those of one process again. Does `fully_shard` also send and hold the same? Measure it in
# both settings: keep each unit after the forward pass, as our `Unit` does, or free it, which is the default.

# %% tags=["meter"]
# %%ranks
fsdp2 = measure(model, model.parameters())
keeping = shard_layers(build(), reshard_after_forward=False)
train(keeping, keeping.parameters())            # its first step sets up; measure a later one
fsdp2_kept = measure(keeping, keeping.parameters())

# %% jupyter={"source_hidden": true}
Table(
    HEAD,
    [
        row("by hand, kept", "kept"),
        row("fully_shard, reshard_after_forward=False", "fsdp2_kept"),
        row("fully_shard", "fsdp2"),
    ],
)

# %% [markdown]
# The numbers of collectives are those of your two units. The memory differs in two ways.
#
# - **Two blocks** exist at the peak where your unit of turn 1 has one. In the backward pass, `fully_shard`
#   gathers the next unit while it still computes with the present one. On GPUs the two happen at the same
#   time. [Lesson 4](04_backward_prefetch.ipynb) is about this.
# - **Buffers** come on top. `fully_shard` gathers all parameters of a unit into one buffer, then copies each
#   parameter out of it. In the forward pass it keeps this buffer until the next unit has been gathered. So
#   its peak is three blocks' worth of bytes, where two blocks are parameters.

# %% tags=["check"]
# %%ranks 0
block_bytes = 4 * sum(p.numel() for p in Block(64).parameters())
assert (fsdp2.all_gathers, fsdp2.reduce_scatters) == (2 * len(units), len(units))
assert (fsdp2_kept.all_gathers, fsdp2_kept.reduce_scatters) == (kept.all_gathers, kept.reduce_scatters)
assert 0.97 < fsdp2.gathered_bytes / (2 * kept.gathered_bytes) < 1.03
assert 2 <= fsdp2.peak_whole_bytes / block_bytes < 2.05
assert 3 <= fsdp2.peak_gather_bytes / block_bytes < 3.05
print("Checked: collectives as by hand; two blocks at the peak, three with the buffer.")

# %% [markdown]
# ## What each rank holds
#
# Our unit cuts a flat tensor; where does `fully_shard` cut? To see it, fill each parameter of a block with
# a number of its own, shard the block, and count which numbers each rank has got.

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
# Each bar is one parameter, and its colours are the ranks that hold it. By hand, a rank holds a stretch of
# the flat tensor, wherever that happens to lie: with four ranks, rank 0 holds the whole norm, and rank 3
# nothing of `fc1`. Under `fully_shard` each rank holds some rows of every parameter. So each parameter keeps
# its own name, under which a checkpoint can store it, and its own `requires_grad`.
#
# ## The way of 2022: FSDP1
#
# The first FSDP, the class `FullyShardedDataParallel`, cuts a flat tensor, as our unit does. It *wraps* each
# layer in a module of its own and replaces the layer's parameters by one `FlatParameter`.

# %%
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

wrapped = [FSDP(layer, device_id=device) for layer in build()]
model = FSDP(nn.Sequential(*wrapped), device_id=device)
fsdp1_shards = [parameter.detach().clone() for parameter in model.parameters()]
fsdp1_losses = train(model, model.parameters())
print(f"{len(fsdp1_shards)} parameters of shapes {[list(shard.shape) for shard in fsdp1_shards]}")
print(f"FSDP1: loss {fsdp1_losses[0]:.4f} at the first step, {fsdp1_losses[-1]:.4f} at the last")

# %% [markdown]
# The model had twenty parameters and has four now, one for each unit. On every rank each of the four equals
# our shard, number by number: what you read above in `Unit` is FSDP1's FlatParameter.

# %% tags=["check"]
# %%ranks
assert all(torch.equal(shard, Unit(layer).shard) for shard, layer in zip(fsdp1_shards, build()))
torch.testing.assert_close(fsdp1_losses, alone, rtol=1e-5, atol=1e-5)
fsdp1 = measure(model, model.parameters())
assert fsdp1.gathered_bytes == 2 * kept.gathered_bytes
assert fsdp1.peak_whole_bytes == 2 * units[0].full.nbytes
print("Checked: FSDP1 holds our shards, gathers the bytes of turn 1, and has two blocks at the peak.")

# %% [markdown]
# ## What one rank keeps between steps
#
# Back to the prediction. After one step, count the bytes of parameters, gradients and optimizer state that
# a rank holds.

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


# %% jupyter={"source_hidden": true}
# %%ranks
model = build()
kept_alone = kept_bytes(model, model.parameters(), rank=0, world=1)
kept_by_hand = kept_bytes(through(units), [unit.shard for unit in units])
model = shard_layers(build())
kept_sharded = kept_bytes(model, model.parameters())

# %% jupyter={"source_hidden": true}
world = ranks.get("world")[0]
held = {
    "one process": ranks.get("kept_alone")[0],
    f"rank 0 of {world}, by hand": ranks.get("kept_by_hand")[0],
    f"rank 0 of {world}, fully_shard": ranks.get("kept_sharded")[0],
}
kinds = ["parameters", "gradients", "AdamW's averages"]
kib = {way: {kind: nbytes / 2**10 for kind, nbytes in zip(kinds, sizes)} for way, sizes in held.items()}
plots.memory_per_rank(kib, unit="KiB")

# %% [markdown]
# One process holds sixteen bytes per parameter, and each of four ranks a quarter of that, plus a little
# padding. During a step more is needed for a moment: the full parameters of the units in use, their full
# gradients before they are reduced, the buffers of the collectives, and the activations.

# %% tags=["check"]
assert sum(held["one process"]) == 16 * model_numel
for way in list(held)[1:]:
    assert 0.99 < world * sum(held[way]) / sum(held["one process"]) < 1.03
print("Checked: 16 bytes per parameter, divided by the number of ranks.")

# %% [markdown]
# ## Proof
#
# Four ways to train, one curve.

# %% jupyter={"source_hidden": true}
# %%ranks
ways = {"one process": alone, "by hand": by_hand, "fully_shard": sharded, "FSDP1": fsdp1_losses}
for losses in ways.values():
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-5)

# %% jupyter={"source_hidden": true}
plots.losses(ranks.get("ways")[0])

# %% [markdown]
# ## Your turn 2 · DDP's collective
#
# DDP adds up gradients with `all_reduce`: every rank brings a tensor, and every rank gets the sum of all of
# them. Write `all_reduce` with the two collectives of this lesson. The length of the tensor divides by the
# world size.
#
# <details><summary>Hint</summary>
#
# First let each rank have its piece of the sum. Then let every rank have all pieces.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_all_reduce(tensor):                      # f32[n] -> f32[n]
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def score_sum(all_reduce):
    """Add up one tensor over the ranks, and count what was called."""
    tensor = torch.arange(3.0 * world, device=device) * (rank + 1)
    given = tensor.clone()
    with Meter() as meter:
        summed = all_reduce(given)
    if summed is None:
        return None
    dist.all_reduce(tensor)
    return {
        "the sum, on every rank": torch.equal(summed, tensor),
        "reduce_scatters": meter.reduce_scatters,
        "all_gathers": meter.all_gathers,
    }


result = score_sum(my_all_reduce)

# %% jupyter={"source_hidden": true}
turn(
    2,
    ranks.get("result"),
    {
        "the sum, on every rank": exactly(
            True, otherwise="At least one rank has another result than the sum over all ranks."
        ),
        "reduce_scatters": exactly(1, otherwise="Let one reduce_scatter do the adding up."),
        "all_gathers": exactly(1, otherwise="Let one all_gather bring the pieces of the sum to every rank."),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_all_reduce(tensor):                      # f32[n] -> f32[n]
    mine = torch.empty_like(tensor[: len(tensor) // world])
    dist.reduce_scatter(mine, list(tensor.chunk(world)))
    full = torch.empty_like(tensor)
    dist.all_gather(list(full.chunk(world)), mine)
    return full


result = score_sum(my_all_reduce)

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


result = score_sum(my_all_reduce)

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):
    full = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(full, tensor)
    return sum(full)


result = score_sum(my_all_reduce)

# %% [markdown]
# So one `all_reduce` sends as much as one `all_gather` and one `reduce_scatter` together. In each step, DDP
# sends two model sizes' worth in this sense, and FSDP three: it gathers twice and reduces once.

# %% tags=["check"]
try_answers(0)

# %% [markdown]
# ## When it goes wrong
#
# A mistake that raises no error: leave out the division by the world size in `Gather.backward`. Every
# gradient is then the sum over the ranks, where one process has the mean.

# %%
# %%ranks
class GatherWithoutMean(Gather):
    @staticmethod
    def backward(ctx, grad):
        mine, _ = Gather.backward(ctx, grad)
        return mine * world, None               # as if nobody had divided


class WrongUnit(Unit):
    def __call__(self, x):
        return run(self.layer, GatherWithoutMean.apply(self.shard, self), self.shapes, x)


def train_wrongly(**options):
    units = [WrongUnit(layer) for layer in build()]
    return train(through(units), [unit.shard for unit in units], **options)


sgd = {"optimizer": torch.optim.SGD, "lr": 0.1}
model = build()
compared = {
    "AdamW, one process": alone,
    "AdamW, without the division": train_wrongly(),
    "SGD, one process": train(model, model.parameters(), rank=0, world=1, **sgd),
    "SGD, without the division": train_wrongly(**sgd),
}

# %% jupyter={"source_hidden": true}
compared = ranks.get("compared")[0]
steps = [1, 2, 5, 10, 20]
Table(
    ["loss at step", *map(str, steps)],
    [[way, *(round(losses[step - 1], 4) for step in steps)] for way, losses in compared.items()],
)

# %% [markdown]
# With AdamW the losses show nothing. AdamW divides each gradient by its own average size, so a factor of
# four in all gradients cancels. SGD takes steps that are four times as large. So losses prove less than they
# seem to: compare them over several steps, and with SGD as well as with your own optimizer.
#
# What you see, why, and what helps:
#
# - **`setStorage: … out of bounds for storage of size 0`.** A parameter is used after it was freed: turn 1
#   without its last line. Gather before each use. With `fully_shard`, call the module, not its `forward`.
# - **The losses differ from those of one process from the second step on.** Gradients are a sum where they
#   should be a mean, or all ranks got the same samples. Look at the gradients, and at the rank in your
#   sampler.
# - **The program hangs.** One rank did not enter a collective in which the others wait. Call collectives on
#   every rank; [lesson 3](03_full_state_dict.ipynb) shows how it happens.
# - **The loss never changes.** The optimizer was made before the model was sharded, so it updates tensors
#   that the model no longer uses. Make it after sharding, as [lesson 1](01_transformer_wrapper.ipynb) shows.

# %% tags=["check"]
def apart(optimizer):
    """The largest difference of a loss with and without the division."""
    pairs = zip(compared[f"{optimizer}, one process"], compared[f"{optimizer}, without the division"])
    return max(abs(a - b) for a, b in pairs)


assert apart("AdamW") < 1e-3 < 0.05 < apart("SGD")
print("Checked: without the division, AdamW's losses are the same to 0.001, and SGD's are not to 0.05.")

# %% [markdown]
# ## Claims, then and now
#
# The table shows what others have written about FSDP beside what the cells above have found. The last
# column is for numbers that only a GPU can give; none is needed here.

# %% jupyter={"source_hidden": true}
gathers, scatters = ranks.get("(fsdp2.all_gathers, fsdp2.reduce_scatters)")[0]
two, three = ranks.get("(fsdp2.peak_whole_bytes / 2**10, fsdp2.peak_gather_bytes / 2**10)")[0]
one = ranks.get("units[0].full.nbytes / 2**10")[0]
lesson.claims(
    0,
    {
        "same-results": "Yes: all 20 losses equal those of one process to within 0.00004. "
        "Efficiency is not for a CPU to say.",
        "two-gathers-one-scatter": f"Yes: {gathers} all_gathers and {scatters} reduce_scatters for 4 units.",
        "biggest-layer": f"True for the unit of turn 1, which needs {one:.0f} KiB. `fully_shard` needs more: "
        f"{two:.0f} KiB of parameters, two of the biggest layers, and {three:.0f} KiB with its buffers.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - A rank keeps a shard of the parameters, and the gradients and optimizer state of that shard: `1 / world`
#   of everything.
# - `all_gather` rebuilds the full parameters of a unit before forward and again before backward. They are
#   freed after each.
# - `reduce_scatter` adds up the gradients, and leaves each rank those of its own shard.
# - The losses are those of one process. FSDP changes where numbers are kept, not what is computed.
# - `fully_shard` (FSDP2) cuts every parameter by rows. FSDP1 cuts one flat tensor per unit, as you did by
#   hand.
#
# ## Next
#
# Here each layer is a unit, because there are only four. In [lesson 1](01_transformer_wrapper.ipynb) the
# model is a real transformer, and the question is which modules should be units.
#
# [lesson 1 →](01_transformer_wrapper.ipynb)

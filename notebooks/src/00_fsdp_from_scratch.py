# %% [markdown]
# # 0 · FSDP from scratch
#
# FSDP trains a model that is cut into pieces, one piece per process. In this lesson you build FSDP in some
# forty lines. Then you run PyTorch's `fully_shard` on the same model and compare the two: their losses,
# the collectives that they call, and the memory that they hold.

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
# This is FSDP as PyTorch offers it today. You need not understand the script yet: every word in its comments
# is explained below. Save it as `train.py` and start four processes with
# `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none, and prints a loss that falls.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))     # all ranks, in one line
# torch.manual_seed(0)                                  # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:                          # each layer is a unit; the model comes last
#     fully_shard(part, mesh=mesh)
# optimizer = torch.optim.AdamW(model.parameters())     # after sharding: the parameters are shards now
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# for step in range(10):
#     x = torch.randn(32, 256, device=device)           # your data
#     loss = model(x).square().mean()
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         print(f"step {step + 1}: loss {loss.item():.4f}")
# dist.destroy_process_group()
# ```
#
# The lines that begin with `dist`, the GPU, the mesh and the seeds are there because several processes run.
# What turns the model into an FSDP model is `fully_shard`. The rest of the lesson is about what it does.
#
# ## Four processes
#
# Several processes train one model together. Each of them is called a **rank** and has a number, also called
# its rank: 0 to 3. The number of ranks is the **world size**. In a real job each rank has a GPU of its own.
# Here the ranks are four processes on your CPU. If your machine has two or more GPUs, there is one rank for
# each GPU instead; the numbers per rank are then others than in this text.

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start()

# %% [markdown]
# Ranks talk to each other through a **process group**. Its **backend** is the library that sends the bytes:
# gloo on CPUs, NCCL on NVIDIA GPUs.
#
# A cell that begins with `%%ranks` runs on every rank. It holds what you would write in a script for
# `torchrun`. Output is labelled with the rank that printed it. Output that is the same on all ranks is shown
# once, labelled `all ranks`.

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
# Distributed data parallel (DDP) gives each rank a share of the samples and the **whole** model. So every
# rank holds all parameters, all gradients and all of the optimizer's state: the same numbers, four times
# over.
#
# FSDP, *fully sharded data parallel*, splits the samples in the same way, and splits the model as well. Each
# rank holds one piece of the parameters, its **shard**, with the gradients and the optimizer state of that
# piece. To compute with a layer, the ranks first rebuild all of its parameters on every rank. After the
# computation each rank frees them. The parameters that are rebuilt together are called a **unit**.
#
# (There are ways to compute with a piece of a weight matrix, called tensor parallelism. FSDP is not one of
# them.)
#
# ## The two collectives
#
# A **collective** is a call that all ranks make together. Plain FSDP needs two of them. The first is
# `all_gather`: each rank passes in a piece, and each rank gets all pieces.
#
# In the comments, `f32[2]` stands for a float32 tensor of two elements.

# %%
# %%ranks
piece = torch.full((2,), float(rank), device=device)           # f32[2], other values on each rank
pieces = [torch.empty(2, device=device) for _ in range(world)]
dist.all_gather(pieces, piece)                                 # NOTE: on every rank, or the others wait
gathered = torch.cat(pieces)                                   # f32[2 * world], the same on every rank

# %% jupyter={"source_hidden": true}
brought, got = ranks.get("piece.tolist()"), ranks.get("gathered.tolist()")
Table(
    ["rank", "passes to all_gather", "gets"],
    [[rank, str(brought[rank]), str(got[rank])] for rank in range(len(got))],
)

# %% [markdown]
# FSDP uses `all_gather` to rebuild a layer's full parameters from the shards.
#
# The second collective is `reduce_scatter`. Each rank passes in a full tensor. By default the tensors are
# added up, and each rank gets its own piece of the sum.

# %%
# %%ranks
own = torch.arange(2.0 * world, device=device) * (rank + 1)     # f32[2 * world], other values on each rank
mine = torch.empty(2, device=device)                            # f32[2]
dist.reduce_scatter(mine, list(own.chunk(world)))

# %% jupyter={"source_hidden": true}
brought, got = ranks.get("own.tolist()"), ranks.get("mine.tolist()")
Table(
    ["rank", "passes to reduce_scatter", "gets"],
    [[rank, str(brought[rank]), str(got[rank])] for rank in range(len(got))],
)

# %% [markdown]
# Look down the first two numbers of each row: rank 0 gets their sums. FSDP reduces gradients in this way.
# Each rank has computed gradients from different samples. It needs the mean of the gradients over all ranks,
# which is the sum divided by the world size, and only for the parameters that it holds.
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
# First the reference: one process, the whole model, all 24 samples. Every rank runs it on its own, without
# communication.

# %%
# %%ranks
model = build()
alone = train(model, model.parameters(), rank=0, world=1)
print(f"one process: loss {alone[0]:.4f} at the first step, {alone[-1]:.4f} at the last")

# %% [markdown]
# All ranks print the same: they have the same weights and the same 24 samples. Every method below must
# reproduce these losses.
#
# **Predict before you go on.** All numbers are float32, 4 bytes each. AdamW keeps two averages for each
# parameter. How many bytes per parameter does training take, not counting activations (the intermediate
# results that backward needs)? If all of it is sharded over four ranks, how many of these bytes does one
# rank hold?
#
# <details><summary>Answer</summary>
#
# 16 bytes per parameter: 4 for the parameter, 4 for its gradient, 8 for AdamW's averages. One rank of four
# holds a quarter of that, 4 bytes per parameter. Further down you measure it.
#
# </details>
#
# ## By hand: shards and full parameters
#
# Our unit lays all parameters of a layer end to end in one flat tensor and cuts it into `world` equal pieces.
# If its length is not a multiple of the world size, it is padded with zeros. Each rank keeps its own piece,
# the shard.
#
# A tensor is a view of a **storage**, which holds the bytes. `free` shrinks the storage of the full tensor
# to nothing, and `gather` gives it its bytes back and fills them. The tensor `full` stays the same object
# all the time. FSDP1 and FSDP2 free and refill full parameters by resizing storages, too.

# %%
# %%ranks
class Shards:
    """The parameters of a layer, of which each rank keeps 1 / world."""

    def __init__(self, layer):
        self.shapes = {name: p.shape for name, p in layer.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in layer.parameters()])     # f32[numel]
        flat = F.pad(flat, (0, -len(flat) % world))                              # f32[n], a multiple of world
        self.shard = flat.chunk(world)[rank].clone().requires_grad_()            # f32[n / world]
        self.full = torch.empty_like(flat)                                       # f32[n]
        self.free()                                                              # no bytes until it is used

    def gather(self):
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather(list(self.full.data.chunk(world)), self.shard.data)

    def free(self):
        self.full.untyped_storage().resize_(0)


# %% [markdown]
# ## By hand: an all_gather with a backward pass
#
# This is the heart of FSDP. In the forward pass, `all_gather` turns the shards into the full parameters. In
# the backward pass, `reduce_scatter` turns the gradients of the full parameters into the gradient of each
# shard.
#
# A `torch.autograd.Function` defines an operation with a backward of its own. `ctx` carries what backward
# needs from forward. `backward` returns one gradient for each argument of `forward`: one for `shard`, and
# `None` for `unit`, which is no tensor.

# %%
# %%ranks
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, unit):                              # f32[n / world]
        unit.gather()
        ctx.unit = unit
        return unit.full.data                                   # f32[n]; .data: the bytes, without autograd

    @staticmethod
    def backward(ctx, grad):                                    # f32[n], from this rank's samples
        ctx.unit.free()                                         # backward has used the parameters: free them
        mine = torch.empty_like(ctx.unit.shard)                 # f32[n / world]
        dist.reduce_scatter(mine, list(grad.chunk(world)))      # the sum over the ranks, this rank's piece
        return mine / world, None                               # the mean over the ranks


# %% [markdown]
# ## By hand: a layer that runs on gathered weights
#
# The unit keeps the layer on the **meta device**, where tensors have shapes but no memory. To run the layer,
# `functional_call` replaces its parameters by pieces of the gathered tensor for the time of one call.

# %%
# %%ranks
from torch.func import functional_call


class Unit(Shards):
    """A layer that gathers its parameters when it is called."""

    gather_with_backward = Gather.apply

    def __init__(self, layer):
        super().__init__(layer)
        self.layer = layer.to("meta")

    def __call__(self, x):
        full = type(self).gather_with_backward(self.shard, self)                 # f32[n]
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = full[: sum(sizes)].split(sizes)                                 # without the padding
        shapes = self.shapes.items()
        weights = {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces)}
        return functional_call(self.layer, weights, x)


# %% [markdown]
# Now the model is a list of units, and the optimizer gets the shards. The training loop is the one from
# above, unchanged.

# %%
# %%ranks
def through(units):
    def forward(x):
        for unit in units:
            x = unit(x)
        return x

    return forward


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
# `Meter` records every operation of one forward and backward pass. It counts the collectives, and the bytes
# of full parameters that exist.

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
# backward pass. A model whose parameters alone do not fit on one GPU would not fit in this way either.
#
# A line that begins with `Checked:`, as the next one, comes from a folded cell that asserts the sentences
# above it.

# %% tags=["check"]
# %%ranks 0
assert (kept.all_gathers, kept.reduce_scatters) == (len(units), len(units))
assert kept.peak_whole_bytes == sum(unit.full.nbytes for unit in units)
print("Checked: 4 all-gathers, 4 reduce-scatters, and all units are complete at the peak.")

# %% [markdown]
# ## Your turn 1 · Free each unit, and gather it again
#
# Write a unit whose full parameters exist only while they are used. After its forward pass, free them. The
# backward pass needs them again, so gather them when the backward pass reaches this unit.
#
# `y.register_hook(f)` calls `f(grad)` when the backward pass has computed the gradient of `y`, just before
# autograd runs the backward of the layer that produced `y`.
#
# Edit the next cell, then run it and the two folded cells below it. The target for the memory is one block,
# 129.75 KiB. The error `out of bounds for storage of size 0` means that backward has used parameters which
# were freed and not gathered again.
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
    def __call__(self, x):                      # super().__call__(x) gathers and computes
        return None                             # your lines here; begin with y = super().__call__(x)


# %% jupyter={"source_hidden": true}
# %%ranks
def score(kind):
    """Train with units of this kind, and measure one step."""
    units = [kind(layer) for layer in build()]
    if units[0](images[:1]) is None:
        return None
    shards = [unit.shard for unit in units]
    losses = train(through(units), shards)
    meter = measure(through(units), shards)
    return {
        "all-gathers in one step": meter.all_gathers,
        "full parameters at the peak, KiB": meter.peak_whole_bytes / 2**10,
        "losses that differ from one process's": sum(
            not abs(a - b) <= 1e-4 for a, b in zip(losses, alone)
        ),
        "curve": meter.whole_bytes,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score(MyUnit)",
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

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        y.register_hook(lambda grad: self.gather())
        return y

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        return super().__call__(x)

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.full.untyped_storage().resize_(self.full.nbytes) and None)
        return y

# %% tags=["wrong"] turn=1
# %%ranks
class MyUnit(Unit):                             # everything right, but for NaN in the losses
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())
        return y * float("nan")

# %% tags=["wrong"] turn=1 raises="out of bounds for storage of size 0"
# %%ranks
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        return y

# %% jupyter={"source_hidden": true}
curves = {"above: kept": ranks.get("kept.whole_bytes")[0], "target": run_solution(0, 1)[0]["curve"]}
if mine := yours(1, "curve"):
    curves["yours"] = mine[0]
plots.alive(curves, whole_model=4 * model_numel)

# %% [markdown]
# The second panel is the run of the folded solution. When your unit works, run the cell with the plot again,
# and your run appears beside the two.
#
# The price is four more all-gathers in each step. PyTorch gives you the same choice and calls it
# `reshard_after_forward`. [Lesson 6](06_sharding_strategies.ipynb) weighs the two.
#
# ## The same with `fully_shard`
#
# `fully_shard` is often called FSDP2. Call it on each layer that should be a unit, then on the model. The
# last call is needed although no parameter is left for it: it makes the layers one model. Without it, each
# layer is the root of a model of its own, and a root is not freed after its forward pass.
#
# The model stays an `nn.Module` with its own parameters. Outside of forward and backward, each parameter is
# now a `DTensor`: a tensor that knows its full shape, and holds this rank's shard of it.

# %% tags=["equality"]
# %%ranks
from torch.distributed.fsdp import fully_shard


def shard_layers(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)        # the root: makes the layers one model


model = shard_layers(build())
sharded = train(model, model.parameters())
print(f"fully_shard: loss {sharded[0]:.4f} at the first step, {sharded[-1]:.4f} at the last")
torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-5)

# %% [markdown]
# The losses are those of one process again. Does `fully_shard` also send and hold the same? Measure it in
# both settings: keep each unit after the forward pass, as our `Unit` does, or free it. Freeing is the default
# for all units but the root.

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
    note="Buffers: those that FSDP2 gathers into. What the backend allocates for itself is not counted.",
)

# %% [markdown]
# The numbers of collectives match those of `Unit` (4 and 4) and of turn 1 (8 and 4). The memory differs in
# two ways.
#
# - **Two blocks** of full parameters exist at the peak, where the unit of turn 1 has one. In the backward
#   pass, `fully_shard` gathers the next unit while it still computes with the present one. On GPUs the two
#   happen at the same time. [Lesson 4](04_backward_prefetch.ipynb) is about this.
# - **Buffers** come on top. `fully_shard` gathers all parameters of a unit into one buffer, then copies each
#   parameter out of it. In the forward pass it keeps this buffer until the next unit has been copied out. So
#   the forward pass peaks at three blocks' worth of bytes: one block of parameters and two buffers.

# %% tags=["check"]
# %%ranks 0
block_bytes = 4 * sum(p.numel() for p in Block(64).parameters())
assert (fsdp2.all_gathers, fsdp2.reduce_scatters) == (2 * len(units), len(units))
assert (fsdp2_kept.all_gathers, fsdp2_kept.reduce_scatters) == (kept.all_gathers, kept.reduce_scatters)
assert 0.97 < fsdp2.gathered_bytes / (2 * kept.gathered_bytes) < 1.03
assert 2 <= fsdp2.peak_whole_bytes / block_bytes < 2.05
assert 3 <= fsdp2.peak_gather_bytes / block_bytes < 3 * 66 / 64     # three ranks pad 64 rows to 66
moment = fsdp2.gather_bytes.index(fsdp2.peak_gather_bytes)
assert 1 <= fsdp2.whole_bytes[moment] / block_bytes < 1.05          # one block of parameters, two buffers
print("Checked: collectives as by hand; two blocks at the peak, three where buffers are counted.")

# %% [markdown]
# To see the first difference, record one step of `fully_shard` and **replay** it. The order of the calls is
# the recorded one. The times are invented: a block computes for 1 ms in forward and 2 ms in backward, and its
# all-gather and its reduce-scatter take 0.5 ms each. As on a GPU, one stream computes while another sends.

# %%
# %%ranks
from fsdp_utils import record_collectives

with record_collectives(model) as trace:
    measure(model, model.parameters())

# %% jupyter={"source_hidden": true}
from fsdp_utils.collectives import play

trace = ranks.get("trace")[0]
block_sent = max(event.sent_bytes for event in trace.collectives)
replayed = trace.replay(
    compute_s={"0": 1e-3, "1": 1e-3, "2": 1e-3, "3": 0.2e-3}, link_gib_s=block_sent / 2**30 / 0.5e-3
)
play({"replay: one step of fully_shard": replayed})

# %% [markdown]
# Press ▶, or ▶| to go from event to event; hover over a bar to read what it is. Above are the two streams,
# below them what rank 0 holds of each layer: its shard, the full parameters for a while, its shard again. In
# backward the all-gather of the next layer runs while the present one still computes, so two layers are
# complete at once. Gradients are hatched: full until `reduce_scatter`, then a shard's.

# %% tags=["check"]
backward = {
    (span.event.kind, span.event.module): span for span in replayed.spans if span.event.phase == "backward"
}
for present, following in [("2", "1"), ("1", "0")]:
    gather, computing = backward["all_gather", following], backward["compute", present]
    assert computing.start <= gather.start < gather.end <= computing.end
print("Checked: in backward, the next block is gathered while the present one computes.")

# %% [markdown]
# ## What each rank holds
#
# Our unit cuts a flat tensor. Where does `fully_shard` cut? To see it, fill each parameter of a block with
# a different number, shard the block, and count which numbers each rank has got.

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
# nothing of `fc1`. `fully_shard` cuts each parameter by rows, so each rank holds some rows of every
# parameter of this block. (A parameter with fewer rows than ranks leaves some ranks with none.) Each
# parameter keeps its own name, under which a checkpoint can store it, and its own `requires_grad`.
#
# ## FSDP1, the older API
#
# PyTorch's first FSDP, the class `FullyShardedDataParallel` of 2022, cuts a flat tensor, as our unit does. It
# *wraps* each layer in a module of its own and by default replaces the layer's parameters by one
# `FlatParameter`.

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
# The model had twenty parameters and has four now, one for each unit. (With `use_orig_params=True` FSDP1
# shows all twenty, as views of the same four.) On every rank each of the four equals our shard, number by
# number: what you read above in `Shards` is FSDP1's FlatParameter.

# %% tags=["check"]
# %%ranks
assert all(torch.equal(shard, Unit(layer).shard) for shard, layer in zip(fsdp1_shards, build()))
torch.testing.assert_close(fsdp1_losses, alone, rtol=1e-5, atol=1e-5)
fsdp1 = measure(model, model.parameters())
assert fsdp1.gathered_bytes == 2 * kept.gathered_bytes
assert fsdp1.peak_whole_bytes == 2 * units[0].full.nbytes
print("Checked: FSDP1 holds our shards, gathers twice the bytes of Unit, and has two blocks at the peak.")

# %% [markdown]
# ## What one rank holds at the end of a step
#
# Back to the prediction: 16 bytes per parameter, divided by the number of ranks. After `optimizer.step()` and
# before `zero_grad()`, count the bytes of parameters, gradients and optimizer state that a rank holds.

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
plots.amounts({"memory of one rank": kib}, unit="KiB")

# %% [markdown]
# One process holds sixteen bytes per parameter, and each of four ranks a quarter of that, plus a little
# padding. `zero_grad()` then frees the gradients. During a step more is needed for a moment: the full
# parameters of the units in use, their full gradients before they are reduced, the buffers of the
# collectives, and the activations.

# %% tags=["check"]
assert sum(held["one process"]) == 16 * model_numel
for way in list(held)[1:]:
    assert 0.99 < world * sum(held[way]) / sum(held["one process"]) < 1.03
print("Checked: 16 bytes per parameter, divided by the number of ranks.")

# %% [markdown]
# ## Proof
#
# The plot shows the losses of all four runs. They agree at every step.

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
# DDP reduces gradients with `all_reduce`: each rank passes in a tensor, and each rank gets the sum of all of
# them. Write `all_reduce` with the two collectives of this lesson. The length of the tensor is a multiple of
# the world size. Edit the next cell, then run it and the two folded cells below it.
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
from fsdp_utils.lessons.together import run_together

def score_sum(all_reduce):
    """Add up one tensor over the ranks, and count what was called."""
    tensor, meter = torch.arange(3.0 * world, device=device) * (rank + 1), Meter()

    def counted():
        with meter:
            return all_reduce(tensor.clone())

    summed, parted = run_together(counted)
    if summed is None:
        return {"problem": parted} if parted else None
    dist.all_reduce(tensor)
    return {
        "the sum, on every rank": isinstance(summed, torch.Tensor) and torch.equal(summed, tensor),
        "reduce_scatters": meter.reduce_scatters,
        "all_gathers": meter.all_gathers,
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_sum(my_all_reduce)",
    {
        "the sum, on every rank": exactly(
            True,
            otherwise="At least one rank has another result than the sum over all ranks. Return one tensor, "
            "as long as the one passed in, and no list of pieces.",
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

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):
    full = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(full, tensor)
    return sum(full)

# %% tags=["wrong"] turn=2 raises="A rank would wait for ever: reduce_scatter"
# %%ranks
def my_all_reduce(tensor):
    mine = torch.empty_like(tensor[: len(tensor) // world])
    if rank == 0:
        dist.reduce_scatter(mine, list(tensor.chunk(world)))
    return tensor

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):                      # a list of pieces
    mine = torch.empty_like(tensor[: len(tensor) // world])
    dist.reduce_scatter(mine, list(tensor.chunk(world)))
    pieces = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(pieces, mine)
    return pieces

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):                      # this rank's piece alone
    mine = torch.empty_like(tensor[: len(tensor) // world])
    dist.reduce_scatter(mine, list(tensor.chunk(world)))
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def my_all_reduce(tensor):                      # in place, without a result
    mine = torch.empty_like(tensor[: len(tensor) // world])
    dist.reduce_scatter(mine, list(tensor.chunk(world)))
    dist.all_gather(list(tensor.chunk(world)), mine)

# %% [markdown]
# With the usual ring algorithm, one `all_reduce` sends as much as one `all_gather` and one `reduce_scatter`
# together: `(world - 1) / world` of the tensor in each of the two. In a step DDP sends that share of the
# model twice, and FSDP three times: it gathers twice and reduces once. With `reshard_after_forward=False` it
# is twice.

# %% tags=["check"]
try_answers(0)

# %% [markdown]
# ## When it goes wrong
#
# A mistake that raises no error: leave out the division by the world size in `Gather.backward`. Every
# gradient is then the sum over the ranks. It should be the mean.

# %%
# %%ranks
class GatherWithoutMean(Gather):
    @staticmethod
    def backward(ctx, grad):
        mine, _ = Gather.backward(ctx, grad)
        return mine * world, None               # undoes the division


class WrongUnit(Unit):
    gather_with_backward = GatherWithoutMean.apply


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
    [[way, *(f"{losses[step - 1]:.4f}" for step in steps)] for way, losses in compared.items()],
)

# %% [markdown]
# With AdamW the losses show nothing. AdamW divides an average of the gradients by their average size, so a
# factor of four in all gradients cancels, except for AdamW's small `eps`. SGD takes steps that are four times
# as large and diverges: its loss at step 20 is above a thousand. So compare losses over several steps, and
# with SGD as well as with your own optimizer.
#
# What you see, why, and what helps:
#
# - **`setStorage: … out of bounds for storage of size 0`.** A parameter is used after it was freed: turn 1
#   without the hook. Gather before each use.
# - **`got mixed torch.Tensor and DTensor`.** A sharded layer ran without its hooks, which gather. Call the
#   module, not its `forward`.
# - **The losses differ from those of one process.** From the first step on: all ranks got the same samples,
#   or began with other weights; look at the rank in your sampler and at the seed. From the second step on,
#   with SGD: gradients are a sum, not a mean.
# - **The program hangs.** One rank did not enter a collective in which the others wait. Call collectives on
#   every rank; [lesson 3](03_full_state_dict.ipynb) shows how it happens.
# - **The loss does not fall.** The optimizer was made before `fully_shard`, which replaces the parameters. It
#   holds the old ones, which get no gradients, so `step` does nothing. Make the optimizer after sharding, as
#   [lesson 1](01_transformer_wrapper.ipynb) shows.

# %% tags=["check"]
def apart(optimizer):
    """The largest difference of a loss with and without the division."""
    pairs = zip(compared[f"{optimizer}, one process"], compared[f"{optimizer}, without the division"])
    return max(abs(a - b) for a, b in pairs)


assert apart("AdamW") < 1e-3 < 0.05 < apart("SGD")
assert world != 4 or compared["SGD, without the division"][-1] > 1000
print("Checked: without the division, AdamW's losses are the same to 0.001, and SGD's are not to 0.05.")

# %% [markdown]
# ## Claims, then and now
#
# The table shows what others have written about FSDP beside what the cells above have found.

# %% jupyter={"source_hidden": true}
gathers, scatters = ranks.get("(fsdp2.all_gathers, fsdp2.reduce_scatters)")[0]
two, three = ranks.get("(fsdp2.peak_whole_bytes / 2**10, fsdp2.peak_gather_bytes / 2**10)")[0]
one = ranks.get("units[0].full.nbytes / 2**10")[0]
lesson.claims(
    0,
    {
        "same-results": "Yes: all 20 losses equal those of one process to within 0.00004. "
        "Efficiency is not measured here: that takes GPUs.",
        "two-gathers-one-scatter": f"Yes: {gathers} all_gathers and {scatters} reduce_scatters for 4 units.",
        "biggest-layer": f"True for the unit of turn 1, which needs {one:.0f} KiB. `fully_shard` needs more: "
        f"{two:.0f} KiB of parameters in backward, two of the biggest layers, and in forward {three:.0f} KiB "
        "with its buffers.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - A rank holds a shard of the parameters, of the gradients and of the optimizer state: `1 / world` of each
#   of the three.
# - `all_gather` rebuilds the full parameters of a unit before forward and again before backward. They are
#   freed after each.
# - `reduce_scatter` adds up the gradients and gives each rank the gradients of its shard; FSDP divides them
#   by the world size.
# - The losses are those of one process. FSDP changes where numbers are kept, not what is computed.
# - `fully_shard` (FSDP2) cuts every parameter by rows, by default. FSDP1 cuts one flat tensor per unit, as
#   you did by hand.
#
# ## Next
#
# Here each layer is a unit, because there are only four. In [lesson 1](01_transformer_wrapper.ipynb) the
# model is a real transformer, and the question is which modules should be units.
#
# [lesson 1 →](01_transformer_wrapper.ipynb)

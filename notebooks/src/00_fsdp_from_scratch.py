# %% [markdown]
# # 0 · FSDP from scratch
#
# Your model trains on one GPU until its parameters, gradients and optimizer state no longer fit. FSDP, *fully
# sharded data parallel*, trains it on several GPUs, each of which stores only a piece of all three. What does
# it do in one training step? **FSDP gathers a layer's parameters just before the layer computes, frees them
# afterwards, and averages each gradient into the piece that a GPU owns. Between steps each of N GPUs stores
# 1/N; it sends 1.5 times as many bytes as in DDP, where each GPU stores everything.** In PyTorch that takes four
# lines:
#
# ```python
# for layer in model:
#     fully_shard(layer)
# fully_shard(model)
# optimizer = torch.optim.AdamW(model.parameters())
# ```
#
# In the script below they reduce what each of four processes stores from 8,224 KiB to 2,056.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

plots.life_of_a_unit(4)

# %% [markdown]
# This drawing follows one layer through one training step on four GPUs, one per row. Each GPU has a number, its
# *rank*, and each colour is a quarter of the layer's parameters. At rest each rank has its **shard**, a quarter.
# For forward, and again for backward, it must **gather** all four; in between it can **free** the other three. At
# the end the ranks **reduce** the gradients: each gets the average of its own quarter, which is all that AdamW
# needs to update that quarter.

# %% tags=["card"]
lesson.card(
    0,
    learn="write the four operations of an FSDP step; shard your own model; know when its gradients are wrong",
    needs="a training loop in PyTorch that you could write; no GPU",
    minutes=(1, 25, 20),
)

# %% [markdown]
# ## The script
#
# DDP, *distributed data parallel*, gives each process a copy of the whole model; each trains on its own samples,
# and the gradients are averaged over the processes. FSDP does the same, but stores less. Look at two places:
# `shard`, which wraps the model, and the line that makes the optimizer, which must come after it. After sharding,
# each parameter is a `DTensor`: a tensor of which this process holds a piece, `to_local()`. DDP copies rank 0's
# weights to all, `fully_shard` does not: hence the seed before the model.
#
# Save it as `train.py`, then run `torchrun --nproc-per-node 4 train.py`. It takes four GPUs, or the CPU where
# there is none; with fewer than four, put `CUDA_VISIBLE_DEVICES=""` in front.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor import DTensor
# from torch.nn.parallel import DistributedDataParallel
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())      # each process has its own GPU
# mesh = init_device_mesh(device, (dist.get_world_size(),))  # all processes; the default takes a Mac's GPU
#
# def shard(model):
#     for layer in model:                                    # each layer is gathered and freed by itself
#         fully_shard(layer, mesh=mesh)
#     return fully_shard(model, mesh=mesh)                   # the model comes last
#
# def nbytes(tensor):                                        # of a DTensor, the bytes of this process's piece
#     return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
#
# for name, prepare in [("DDP", DistributedDataParallel), ("fully_shard", shard)]:
#     torch.manual_seed(0)                                   # the same weights in every process
#     model = prepare(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(device))
#     optimizer = torch.optim.AdamW(model.parameters())      # after sharding: it must hold the pieces
#     torch.manual_seed(1 + dist.get_rank())                 # other samples in each process
#     for step in range(10):
#         optimizer.zero_grad()
#         x = torch.randn(32, 256, device=device)            # your data
#         loss = (model(x) - x).square().mean()
#         loss.backward()
#         optimizer.step()
#     kib = 0
#     for p in model.parameters():                           # with its gradient and AdamW's two averages
#         kib += sum(map(nbytes, (p, p.grad, *optimizer.state[p].values()))) / 2**10
#     loss = loss.detach() / dist.get_world_size()
#     dist.all_reduce(loss)                                  # adds up over the processes: now it is the mean
#     if dist.get_rank() == 0:
#         print(f"{name:11}  loss {loss.item():.4f}, a process stores {kib:,.0f} KiB")
# dist.destroy_process_group()
# ```
# ```text
# DDP          loss 0.9676, a process stores 8,224 KiB
# fully_shard  loss 0.9676, a process stores 2,056 KiB
# ```
#
# The losses are equal, because both train the same model on the same samples. The bytes are not. The model has
# 526,336 parameters in float32, and training takes 16 bytes for each: 4 for the parameter, 4 for its gradient,
# and 8 for the two averages that AdamW keeps. Under DDP each process stores all of that (without
# DDP's buffers), under FSDP a quarter.
#
# The same sum tells you **when you need FSDP**. For a model of 8 billion parameters, 16 bytes each are 119 GiB,
# more than a GPU of 80 GB has; over 8 GPUs it is 15 GiB on each. Leave room for the layers that are gathered at
# the moment, with their full gradients, and for the activations (what forward saves for backward), which grow
# with the batch and are not sharded. If everything fits on one GPU, DDP is simpler and sends less.
#
# ## Two collectives
#
# The ranks exchange data by **collectives**, operations that all of them call together. `gloo` moves the bytes
# between CPUs, NCCL between NVIDIA GPUs; the number of ranks is the **world size**. FSDP needs two collectives:
#
# - `all_gather` takes one piece from each rank, and gives every rank all the pieces, in the ranks' order.
# - `reduce_scatter` takes a full tensor from each rank, adds these up, and gives each rank a piece of the sum.
#
# `ranks.start()` starts four processes behind this notebook; a cell that begins with `%%ranks` runs in all.

# %%
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

piece = torch.full((2,), rank, device=device)                   # [2], other values on each rank
full = piece.new_empty(2 * world)                               # [2 * world]
dist.all_gather_single(full, piece)                             # before PyTorch 2.13: all_gather_into_tensor
print(f"all_gather:     {piece.tolist()} -> {full.tolist()}")

own = torch.arange(2 * world, device=device) * (rank + 1)       # [2 * world], other values on each rank
mine = own.new_empty(2)                                         # [2]
dist.reduce_scatter_single(mine, own)                           # before PyTorch 2.13: reduce_scatter_tensor
print(f"reduce_scatter: {own.tolist()} -> {mine.tolist()}")

# %% [markdown]
# After `all_gather`, every rank has the same eight numbers, two from each. For `reduce_scatter`, read the four
# long lists from top to bottom: their first two columns add up to 0 and 10, which rank 0 gets.
#
# ## Your turn 1 · Shard, gather, reduce
#
# Write three of the four operations, for one flat tensor, with the names of the cell above; free is for turn 2.
#
# - `shard(flat)` returns this rank's piece. All pieces must be equally long, so first append zeros, but no more
#   than needed. The piece must own its memory, so that the full tensor can be freed.
# - `gather(piece)` returns the full tensor, with its zeros, on every rank.
# - `reduce(grad)` gets a full gradient, which differs from rank to rank. It returns this rank's piece of the
#   **mean** over the ranks. The row “reduced gradient, of the mean” is your result, divided by the right one.
#
# <details><summary>Hint</summary>
#
# `-len(flat) % world` zeros are missing, none where the length divides. `F.pad(flat, (0, n))` appends n of them.
# `chunk` returns views, and a view keeps the memory of the whole tensor alive.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.your_turn import NotYet, Picture, at_most, exactly, turn


def tensor_of(name, value):
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"`{name}` returned a {type(value).__name__}: return one tensor.")
    if value.ndim != 1:
        raise NotYet(f"`{name}` returned a tensor of {value.ndim} dimensions: return one dimension.")
    return value


MISSING = "Elements are missing in the shard: pad before you cut."
UNEVEN, EVEN = 4 * world + 1, 4 * world


@turn(1, {
    f"elements of the shard, of {UNEVEN}": exactly(
        5, less=MISSING, more="The shard has more elements than needed: pad to the next multiple of `world`."
    ),
    f"elements of the shard, of {EVEN}": exactly(
        4, less=MISSING, more=f"{EVEN} numbers can be cut into equal pieces: append no zeros to them."
    ),
    "the shard is this rank's piece": exactly(
        True, "The shard has other elements than this rank's piece: append the zeros at the end, cut into equal "
        "pieces, and take piece number `rank`.",
    ),
    "bytes that it keeps alive beside its own": exactly(0, more="The shard is a view of a larger tensor: clone it."),
    "gathered tensor is right": exactly(True, "The gathered tensor is not the flat one with zeros at its end."),
    "all-gathers": exactly(1, less="Let `all_gather` rebuild the tensor.", more="One all_gather is enough."),
    "reduced gradient, of the mean": exactly(
        1, less="The gradient is smaller than the mean: either it is divided twice, or other ranks' are missing.",
        more="The gradient is larger than the mean: either the sum isn't divided, or it is one rank's own.",
        otherwise="The gradient is not this rank's piece of the mean.",
    ),
    "reduce-scatters": exactly(
        1, less="No reduce_scatter: it adds up and cuts in one call.", more="One reduce_scatter is enough."
    ),
})
def score_operations(shard, gather, reduce):
    flats = [torch.arange(1.0, n + 1, device=device) for n in (UNEVEN, EVEN)]
    pieces = [tensor_of("shard", shard(flat.clone())) for flat in flats]
    padded = F.pad(flats[0], (0, world - 1))
    references = [whole.chunk(world)[rank] for whole in (padded, flats[1])]
    as_long = all(map(lambda a, b: a.shape == b.shape, pieces, references))
    right = as_long and all(map(lambda a, b: bool((a == b).all()), pieces, references))
    values = {
        f"elements of the shard, of {UNEVEN}": len(pieces[0]),
        f"elements of the shard, of {EVEN}": len(pieces[1]),
        "the shard is this rank's piece": right if as_long else None,
        "bytes that it keeps alive beside its own": max(p.untyped_storage().nbytes() - p.nbytes for p in pieces),
    }
    reference = references[0]
    with Meter() as meter:
        full = tensor_of("gather", gather(pieces[0] if right else reference.clone()))
        right = full.shape == padded.shape and bool((full == padded).all())
    values |= {"gathered tensor is right": right, "all-gathers": meter.all_gathers}
    with Meter() as meter:
        mean = tensor_of("reduce", reduce(padded * (2 * rank + 1)))       # the mean: world times padded
        if mean.shape != reference.shape:
            raise NotYet(f"`reduce` returned {list(mean.shape)}: expected this rank's piece, [5].")
        where = reference > 0                                             # not the padding
        ratios = (mean[where] / (reference[where] * world)).tolist() or [1.0]
    same = max(ratios) - min(ratios) < 1e-5
    values["reduced gradient, of the mean"] = round(ratios[0], 4) if same else float("nan")
    return values | {"reduce-scatters": meter.reduce_scatters}


# %%
# %%turn 1
def shard(flat):                                # [n] -> [m], where m * world is n or a little more
    return None                                 # your lines here: pad, cut, copy


def gather(piece):                              # [m] -> [m * world]
    return None                                 # your lines here: one all_gather


def reduce(grad):                               # [m * world] -> [m]
    return None                                 # your lines here: one reduce_scatter, then the mean


# %% tags=["solution"] turn=1
def shard(flat):
    padded = F.pad(flat, (0, -len(flat) % world))
    return padded.chunk(world)[rank].clone()


def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather_single(full, piece)
    return full


def reduce(grad):
    mine = grad.new_empty(len(grad) // world)
    dist.reduce_scatter_single(mine, grad)
    return mine / world
# %% tags=["right"] turn=1
def shard(flat):                                # a list of pieces
    return F.pad(flat, (0, -len(flat) % world)).view(world, -1)[rank].clone()
def gather(piece):
    pieces = [torch.empty_like(piece) for _ in range(world)]
    dist.all_gather(pieces, piece)
    return torch.cat(pieces)
def reduce(grad):
    mine = torch.empty_like(grad[: len(grad) // world])
    dist.reduce_scatter(mine, list((grad / world).chunk(world)))
    return mine
# %% tags=["right"] turn=1
import torch.distributed._functional_collectives as funcol
def shard(flat):                                # functional collectives
    n = -(-len(flat) // world)
    piece = flat.new_zeros(n)
    own = flat[rank * n : (rank + 1) * n]
    piece[: len(own)] = own
    return piece
def gather(piece):
    return funcol.all_gather_tensor(piece, 0, dist.group.WORLD)
def reduce(grad):
    return funcol.reduce_scatter_tensor(grad, "sum", 0, dist.group.WORLD) / world
# %% tags=["right"] turn=1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
mesh = init_device_mesh(device.type, (world,))
def shard(flat):                                # DTensor
    return distribute_tensor(F.pad(flat, (0, -len(flat) % world)), mesh, [Shard(0)]).to_local().clone()
def gather(piece):
    return DTensor.from_local(piece, mesh, [Shard(0)]).full_tensor()
def reduce(grad):
    return DTensor.from_local(grad, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local() / world
# %% tags=["wrong"] turn=1 says="clone it"
shard = lambda flat: F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank]
gather, reduce = torch.clone, lambda grad: grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="pad before you cut"
shard = lambda flat: flat[: len(flat) // world * world].chunk(world)[rank].clone()
gather, reduce = torch.clone, lambda grad: grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="pad to the next multiple"
shard = lambda flat: F.pad(flat, (0, world)).chunk(world)[rank].clone()
gather, reduce = torch.clone, lambda grad: grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="append no zeros"
shard = lambda flat: F.pad(flat, (0, world - len(flat) % world)).chunk(world)[rank].clone()
gather, reduce = torch.clone, lambda grad: grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="other elements than"
shard = lambda flat: F.pad(flat, (0, -len(flat) % world))[rank::world].clone()
gather, reduce = torch.clone, lambda grad: grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="larger than the mean"
shard = lambda flat: F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
gather, reduce = torch.clone, lambda grad: world * grad.chunk(world)[rank]
# %% tags=["wrong"] turn=1 says="No reduce_scatter"
shard = lambda flat: F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
gather, reduce = torch.clone, lambda grad: dist.all_reduce(grad) or grad.chunk(world)[rank] / world
# %% tags=["wrong"] turn=1 says="`gather` returned a list"
shard = lambda flat: F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
gather, reduce = (lambda piece: [piece] * world), torch.clone

# %% [markdown]
# `reduce`, then `gather`, is DDP's collective, `all_reduce`. FSDP stops after `reduce`, because a rank updates its
# own piece only.
#
# ## A layer on gathered weights
#
# A layer that computes with these operations needs its full parameters, but the optimizer must see only the
# shard. So the full parameters must come from the shard by an operation that autograd can differentiate. That is
# `Gather` below: its forward is an `all_gather`, and its backward a `reduce_scatter`, which turns the gradient of
# the full parameters into that of the shard. Autograd calls it once that gradient is complete, and then the
# layer's input gradient is complete too, so `backward` can also free the parameters.
#
# They must be freed although autograd has saved them for backward. The bytes of a tensor lie in its *storage*,
# and `resize_(0)` gives those back while the tensor itself stays. So `free` empties the storage, and `gather`
# fills it again before backward reads it. Autograd would raise an error: each tensor has a *version counter*,
# which an in-place write moves on, and autograd refuses a saved tensor whose counter has moved. So `Gather`
# returns `full.data`, which has the same storage but its own counter. What is gathered and freed together is a
# **unit**: here, each layer.

# %%
# %%ranks
from torch.func import functional_call


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, unit):                              # [m]
        ctx.unit = unit
        unit.gather()
        return unit.full.data                                   # [m * world]; its own version counter

    @staticmethod
    def backward(ctx, grad):                                    # [m * world], from this rank's samples
        ctx.unit.free()                                         # the layer's backward is over
        mine = torch.empty_like(ctx.unit.shard)                 # [m]
        dist.reduce_scatter_single(mine, grad)
        return mine / world, None                               # the mean; None: `unit` has no gradient


class Unit:
    def __init__(self, layer):
        self.shapes = {name: p.shape for name, p in layer.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
        flat = F.pad(flat, (0, -len(flat) % world))             # [m * world]
        self.shard = flat.chunk(world)[rank].clone().requires_grad_()           # [m]
        self.full = torch.empty_like(flat)                      # [m * world]
        self.layer = layer.to("meta")                           # code and shapes, without bytes
        self.free()

    def gather(self):
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather_single(self.full, self.shard.data)

    def free(self):
        self.full.untyped_storage().resize_(0)

    def __call__(self, x):
        full = Gather.apply(self.shard, self)
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = full[: sum(sizes)].split(sizes)                # cut off the zeros, then cut by parameter
        parameters = {name: piece.view(self.shapes[name]) for name, piece in zip(self.shapes, pieces)}
        return functional_call(self.layer, parameters, x)


# %% [markdown]
# `Unit.__call__` gathers one flat tensor, cuts it into the layer's parameters, and runs the layer with them:
# `functional_call(layer, parameters, x)` computes `layer(x)` as if these were its own.
#
# Does it train? A folded cell defines `build`, three blocks (a LayerNorm and two Linears each, 130 KiB) and a last
# layer (2.5 KiB); `train`, twenty steps of 24 handwritten digits, of which each rank takes its share; and
# `through(units)`, the forward through all units. The plain model trains in one process, the units on four ranks.

# %% jupyter={"source_hidden": true}
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)     # [1797, 64]
labels = torch.tensor(digits.target, device=device)                             # [1797]


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def build(blocks=3):
    torch.manual_seed(0)                                        # the same weights on every rank
    return nn.Sequential(*[Block() for _ in range(blocks)], nn.Linear(64, 10)).to(device)


def train(forward, parameters, rank=rank, world=world, steps=20, factor=1):
    optimizer, losses = torch.optim.AdamW(parameters), torch.zeros(steps, device=device)
    for step in range(steps):
        rows = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]    # this rank's share
        loss = F.cross_entropy(forward(images[rows]), labels[rows])
        (factor * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    if world > 1:
        dist.all_reduce(losses)
    return losses


def through(units):
    def forward(x):
        for unit in units:
            x = unit(x)
        return x
    return forward


# %% tags=["equality"]
# %%ranks
model = build()
alone = train(model, model.parameters(), rank=0, world=1)
units = [Unit(layer) for layer in build()]
by_hand = train(through(units), [unit.shard for unit in units])
for name, losses in {"one process": alone, "by hand": by_hand}.items():
    print(f"{name:12} loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
torch.testing.assert_close(by_hand, alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The losses are the same (all twenty, asserted), although each rank updated only its quarter of the parameters.
# But how long does a rank hold the full ones? `Meter`, a helper of these lessons, counts the collectives of one
# step, and the bytes of gathered parameters after each operation.

# %%
# %%ranks
def measure(forward, held):
    with Meter(held) as meter:                                  # held: tensors that the rank has already
        loss = F.cross_entropy(forward(images[:6]), labels[:6])
        meter.in_forward = len(meter.whole_bytes)               # operations so far, for the figure
        loss.backward()
    return meter


kept = measure(through(units), [unit.shard for unit in units])
model_bytes = sum(p.nbytes for p in build().parameters())
print(f"{kept.all_gathers} all-gathers, {kept.reduce_scatters} reduce-scatters; at the peak "
      f"{kept.peak_whole_bytes / 2**10:.0f} KiB of full parameters, of {model_bytes / 2**10:.0f}")

# %% [markdown]
# Each of the four units is gathered and reduced once. The gradients and AdamW's averages, 12 of the 16 bytes, are
# sharded already. The parameters are not: nothing is freed between a block's forward and its backward, so in the
# middle of the step every rank holds those of the **whole model**.
#
# ## Your turn 2 · Free, and gather again
#
# Write a unit whose full parameters exist only while they are used: free them after the layer's forward, and
# gather them again just before its backward. `y.register_hook(f)` helps: it calls `f(grad)` as soon as the gradient
# of `y` is known, before the layer that made `y` needs its parameters. Your target: no rank holds more than one
# block (130 KiB), with the same losses.
#
# <details><summary>Hint</summary>
#
# Two lines between `y = ...` and `return y`. The hook gets one argument, the gradient, so pass a `lambda`, not
# `self.gather`. It must return `None`, or its result replaces the gradient.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
MISTAKES = {
    "storage of size 0": "Backward read the full parameters while they were freed: a hook on `y` has to gather "
    "them, and nothing may free them before the layer's backward is over.",
    "takes 1 positional argument": "A hook gets one argument, the gradient: pass a `lambda`, not `self.gather`.",
    "'NoneType' object is not callable": "`register_hook` got None: pass a function, not the result of a call.",
}


class Freed(Unit):                              # turn 2's solution, for the figure after it
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())
        return y


@turn(2, {
    "all-gathers in one step": exactly(
        8, less="Each unit should be gathered twice in a step: for forward and for backward.",
        more="A unit is gathered more than twice in a step.",
    ),
    "full parameters at the peak, KiB": at_most(
        130,
        "More than one block is complete at a time: either a unit isn't freed after its forward pass, or it is "
        "gathered before backward reaches it.",
    ),
    "losses that differ from one process's": exactly(
        0, "The losses are wrong: either forward returns something else, or backward works with other weights."
    ),
})
def score_units(MyUnit):
    units = [MyUnit(layer) for layer in build()]
    shards = [unit.shard for unit in units]
    if MyUnit(build()[0])(images[:6]) is None:
        raise NotYet("`__call__` returned None: is a `return` missing?")
    try:
        losses, meter = train(through(units), shards, steps=5), measure(through(units), shards)
    except (RuntimeError, TypeError) as error:
        for words, sentence in MISTAKES.items():
            if words in str(error):
                raise NotYet(sentence) from None
        raise
    return {
        "all-gathers in one step": meter.all_gathers,
        "full parameters at the peak, KiB": meter.peak_whole_bytes / 2**10,
        "losses that differ from one process's": int((~((losses - alone[:5]).abs() <= 1e-3)).sum()),
        "picture": Picture("alive", [{"kept": kept.whole_bytes, "yours": meter.whole_bytes}], {
            "whole_model": model_bytes, "backward": [kept.in_forward, meter.in_forward],
        }),
    }


# %%
# %%turn 2
class MyUnit(Unit):
    def __call__(self, x):                      # returns the layer's output
        return None                             # your lines here; begin with y = super().__call__(x)


# %% tags=["solution"] turn=2
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())
        return y
# %% tags=["right"] turn=2
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        y.grad_fn.register_prehook(lambda grads: self.gather())
        self.free()
        return y
# %% tags=["right"] turn=2
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        torch.autograd.graph.register_multi_grad_hook((y,), lambda grads: self.gather())
        self.free()
        return y
# %% tags=["right"] turn=2
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        y.register_hook(lambda grad: self.gather() or grad)
        self.free()
        return y
# %% tags=["wrong"] turn=2 says="isn't freed"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        y.register_hook(lambda grad: self.gather())
        return y
# %% tags=["wrong"] turn=2 says="gathered twice"
class MyUnit(Unit):
    def __call__(self, x):
        return super().__call__(x)
# %% tags=["wrong"] turn=2 says="backward works with other weights"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.full.untyped_storage().resize_(self.full.nbytes).fill_(0) and None)
        return y
# %% tags=["wrong"] turn=2 says="nothing may free them"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather() or self.free())
        return y
# %% tags=["wrong"] turn=2 says="gets one argument"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(self.gather)
        return y
# %% tags=["wrong"] turn=2 says="not the result of a call"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(self.gather())
        return y
# %% tags=["wrong"] turn=2 says="is a `return` missing"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        y.register_hook(lambda grad: self.gather())

# %% [markdown]
# Your step is now the one in the drawing at the top. Its **price**: each unit is gathered twice and its gradients
# are reduced once, so the model passes through the network three times in a step. Under DDP it is twice, as an
# `all_reduce` is one of each: hence the 1.5, if all is float32 and the collectives use the usual ring algorithms.
# GPUs can send much of it while they compute: see [lesson 4](04_backward_prefetch.ipynb).
#
# ## PyTorch's own
#
# `fully_shard`, also called FSDP2, replaces each parameter of a layer by a shard, and adds hooks that gather,
# free and reduce as you did. The last call makes the model the outermost unit, the **root**. A root's own
# parameters (here it has none) are not freed after forward, because backward usually needs them first. Without
# the last call each layer would be a root, and all would stay full until backward has used them. You can ask for
# that, too, with `reshard_after_forward=False`: one gather per step instead of two, for the memory of the whole
# model. The next cell measures both settings beside your units.

# %% tags=["meter"]
# %%ranks
from torch.distributed.fsdp import fully_shard


def shard_layers(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


settings = {"fully_shard, kept": {"reshard_after_forward": False}, "fully_shard": {}}
freed = [Freed(layer) for layer in build()]                     # Freed: the solution of turn 2
meters = {"by hand, kept": kept, "by hand, freed": measure(through(freed), [unit.shard for unit in freed])}
for name, options in settings.items():
    model = shard_layers(build(), **options)
    torch.testing.assert_close(train(model, model.parameters()), alone, rtol=1e-4, atol=1e-4)
    meters[name] = measure(model, model.parameters())
for name, m in meters.items():
    counts = f"{m.all_gathers} all-gathers, {m.reduce_scatters} reduce-scatters"
    print(f"{name:18} {counts}, at most {m.peak_whole_bytes / 2**10:.0f} KiB of full parameters")
del meters["fully_shard, kept"]                                 # it would look like the first
curves = {name: m.whole_bytes for name, m in meters.items()}

# %%
begins = ranks.get("[m.in_forward for m in meters.values()]")[0]
plots.alive(ranks.get("curves")[0], whole_model=ranks.get("model_bytes")[0], forward=begins)

# %% [markdown]
# The losses are again those of one process (asserted), with your units' collectives: four gathers where parameters
# are kept, eight where they are freed. Kept, the whole model exists at once, 392 KiB. Freed by hand, one block
# does (the slivers beside the vertical line are the last layer); freed by `fully_shard`, two. The third panel shows
# when. In forward the full parameters of one block exist at a time; in backward `fully_shard` gathers the next
# block, still in a buffer, before the present one computes, so that a GPU need not wait for it.
#
# The next cell measures deeper models. Its last row adds
# the buffers that have been copied out and are not freed yet: in forward `fully_shard` keeps one until the next
# block has arrived. What is left with 32 blocks?

# %% tags=["depth"]
# %%ranks
depths, shares = (3, 12, 32), {}
for blocks in depths:
    whole = sum(p.nbytes for p in build(blocks).parameters())
    for name, options in settings.items():
        deep = shard_layers(build(blocks), **options)
        m = measure(deep, deep.parameters())
        shares.setdefault(name, []).append(m.peak_whole_bytes / whole)
    least = torch.tensor(m.peak_gather_bytes)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)                # a thread of gloo may free a buffer late
    shares.setdefault("fully_shard, with its buffers", []).append(least.item() / whole)
print("gathered at the peak; blocks:   ", *(f"{blocks:5}" for blocks in depths))
for name, found in shares.items():
    print(f"{name:32}", *(f"{share:5.0%}" for share in found))

# %% [markdown]
# **The deeper the model, the more FSDP saves**: `fully_shard` gathers two blocks at most, three with the buffers,
# however many there are: of 32 that is 6%, or 9%, beside the quarter that a rank stores. Backward adds one block's
# full gradient and the buffer from which it is reduced, so allow for four blocks. Smaller units save more:
# [lesson 1](01_transformer_wrapper.ipynb) chooses them.
#
# ## How do you know that it worked?
#
# Look at a parameter, which should be a `DTensor`, then ask `check_sharding`, which lists mistakes.

# %%
# %%ranks
from fsdp_utils import check_sharding

weight = model[0].fc1.weight
print(type(weight).__name__, tuple(weight.shape), "of which this rank holds", tuple(weight.to_local().shape))
print("mistakes:", check_sharding(model))

# %% [markdown]
# Each rank holds a quarter of the rows, and no mistake was found. In your script (after `pip install .` in this
# repository's folder), call it on all ranks, as `check_sharding(model, optimizer)`: then it also notices an
# optimizer that holds other parameters.
#
# ## In your loop
#
# | on one GPU | with FSDP |
# | :-- | :-- |
# | `AdamW(model.parameters())` | the same, after sharding |
# | `DataLoader(data, shuffle=True)` | `DataLoader(data, sampler=sampler)` with `sampler = DistributedSampler(data)`, and `sampler.set_epoch(epoch)` before each epoch |
# | `clip_grad_norm_(model.parameters(), 1.0)` | the same; it returns a DTensor: `.full_tensor()`, called on all ranks, is the norm ([lesson 10](10_end_to_end.ipynb)) |
# | `loss.item()` | first average over the ranks, as in the script |
# | `torch.save(model.state_dict(), path)` | holds shards: [lesson 3](03_full_state_dict.ipynb) saves one file, [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) saves to resume |
#
# ## When the losses are not equal
#
# So far FSDP's losses were those of one process, but that depends on you. FSDP, like DDP, takes the **mean over
# the ranks**, so each rank's gradient counts the same. That is right if all ranks have equally many samples, and
# each rank's loss is a mean over independent samples. Otherwise the gradients are wrong, and no error says so.
#
# The next cell prints how far the gradient of 24 samples is from that of one process, relative to its size. The
# first rows make the shares more and more unequal. How small a difference matters, and is DDP any better?

# %% tags=["unequal"]
# %%ranks
from torch.nn.parallel import DistributedDataParallel

every, each, extreme = torch.arange(24, device=device), 24 // world, [24 - 2 * (world - 1)] + [2] * (world - 1)
equal, milder = [each] * world, [each + 1, *[each] * (world - 2), each - 1]
mean, total = F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")


def gradient(rows, loss_of, norm, wrap):
    model = wrap(nn.Sequential(norm(64), *build()).to(device))
    loss_of(model(images[rows]), labels[rows]).backward()
    grads = [p.grad.full_tensor() if wrap is shard_layers else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def compare(name, sizes, loss_of=mean, reference=mean, norm=nn.Identity):
    right, rows = gradient(every, reference, norm, nn.Sequential), every.split(sizes)[rank]
    found = [gradient(rows, loss_of, norm, wrap) for wrap in (DistributedDataParallel, shard_layers)]
    print(f"{name:22}", *(f"{(grad - right).norm() / right.norm():5.0%}" for grad in found))


print("gradient off by, with    DDP  FSDP")
steeper = [[24 - n * (world - 1)] + [n] * (world - 1) for n in range(each - 1, 2, -1)]
for sizes in (equal, milder, *steeper, extreme):
    compare("/".join(map(str, sizes)), sizes)
compare("the last, weighted", extreme, lambda logits, y: mean(logits, y) * len(y) * world / 24)
compare("sum over the samples", equal, total, total)
compare("BatchNorm", equal, norm=nn.BatchNorm1d)
one, four = build(), shard_layers(build())
right = train(one, one.parameters(), rank=0, world=1, factor=24)                    # the sum of 24 samples
found = train(four, four.parameters(), factor=each)                                 # and of each rank's
print(f"sum: after 20 steps the loss is {found[-1]:.3f}, in one process {right[-1]:.3f}")

# %% [markdown]
# The two columns are equal: what goes wrong here goes wrong with DDP, too.
#
# - **Unequal shares**: one sample on another rank puts the gradient 9% off, because a sample counts less the more
#   of them its rank has. `DistributedSampler` prevents this, for which it may repeat a few samples. Otherwise
#   multiply the loss by `len(y) * world`, divided by all ranks' samples. For a language model, count tokens
#   ([lesson 10](10_end_to_end.ipynb)).
# - **A sum over the samples**: FSDP divides it by 4, so the gradient is 75% off. The cure is to multiply the loss
#   by the world size. The last line's loss is right without it, because AdamW divides by the size of the gradients; with
#   SGD it would not be. So equal losses do not prove equal gradients.
# - **BatchNorm** normalises a sample by the others in its batch, and a rank sees only 6 of the 24. Use LayerNorm
#   or RMSNorm, which treat each sample by itself; on GPUs `nn.SyncBatchNorm` normalises over all ranks.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# | :-- | :-- | :-- |
# | `setStorage: … out of bounds for storage of size 0` | your own unit is used while it is freed | gather before each use |
# | `got mixed torch.Tensor and DTensor` | you called `layer.forward(x)`, so the hooks that gather did not run | call the module: `layer(x)` |
# | the loss does not fall, no error | the optimizer was made before `fully_shard`: its parameters are no longer the model's | make it after sharding |
# | the loss is not that of one process, from the first step | each rank drew other weights, or one of the cases above | the same seed before the model, or the cure above |
# | the program hangs | one rank did not call a collective in which the others wait | call it on every rank; [lesson 15](15_when_it_hangs.ipynb) finds the line |
#
# ## The rule
#
# Use FSDP when 16 bytes per parameter (AdamW in float32), together with the activations, do not fit on one GPU.
# It shards the 16 bytes only: if the activations are too large, see [lesson 2](02_activation_checkpointing.ipynb).
# Call `fully_shard` on each layer (each block of a transformer), then on the model; then make the optimizer.
# Give each rank equally many samples.
#
# [lesson 1 →](01_transformer_wrapper.ipynb)

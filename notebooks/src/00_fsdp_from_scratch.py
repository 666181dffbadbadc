# %% [markdown]
# # 0 · FSDP from scratch
#
# What does FSDP do in one training step? **It rebuilds the parameters of a layer with `all_gather` before the
# layer is used, frees them afterwards, and leaves each rank its piece of the averaged gradients with
# `reduce_scatter`; so a rank keeps `1 / world_size` of parameters, gradients and optimizer state.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

plots.life_of_a_unit(4)

# %% [markdown]
# A drawing of one layer on four processes, from left to right through one step. Each colour is a quarter of
# the layer's parameters. The layer is complete on every process twice, for forward and for backward.

# %% tags=["card"]
lesson.card(
    0,
    learn="write shard, gather, reduce and free; know when FSDP's losses are not those of one process",
    needs="a training loop in PyTorch that you could write; no GPU",
    minutes=(1, 16, 25),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none, and trains
# one model twice in four processes: copied to each (DDP, distributed data parallel), and sharded.
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
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))  # all ranks; without it a Mac takes its GPU
#
#
# def shard(model):
#     for part in [*model, model]:                           # each layer is a unit; the model comes last
#         fully_shard(part, mesh=mesh)
#     return model
#
#
# for name, prepare in [("DDP", DistributedDataParallel), ("fully_shard", shard)]:
#     torch.manual_seed(0)                                   # the same weights on every rank
#     model = prepare(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(device))
#     optimizer = torch.optim.AdamW(model.parameters())      # after sharding: the parameters are shards now
#     torch.manual_seed(1 + dist.get_rank())                 # other samples on each rank
#     for step in range(10):
#         optimizer.zero_grad()
#         x = torch.randn(32, 256, device=device)            # your data
#         loss = (model(x) - x).square().mean()
#         loss.backward()
#         optimizer.step()
#     averages = [t for state in optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
#     held = [*model.parameters(), *(p.grad for p in model.parameters()), *averages]
#     kib = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held) / 2**10
#     dist.all_reduce(loss.detach_())                        # the sum over the ranks
#     if dist.get_rank() == 0:
#         print(f"{name:11}  loss {loss.item() / dist.get_world_size():.4f}, a rank holds {kib:,.0f} KiB")
# dist.destroy_process_group()
# ```
# ```text
# DDP          loss 0.9676, a rank holds 8,224 KiB
# fully_shard  loss 0.9676, a rank holds 2,056 KiB
# ```
#
# Each process is called a **rank** and has a number, 0 to 3; the **world size** is 4. Both ways give each
# rank its own samples, and both end at the same loss. The model has 526,336 parameters in float32. Training
# keeps 16 bytes for each of them: 4 for the parameter, 4 for its gradient, 8 for AdamW's two averages. That
# is 8,224 KiB under DDP, and a quarter under FSDP. For a model of 8 billion parameters it is 119 GiB, or 15
# GiB on each of 8 GPUs. Activations, the results that backward needs, come on top: they grow with the samples
# of the rank, and FSDP does not shard them. Nor are DDP's buckets counted, by default a second copy of the
# gradients, or what exists only during a step. The rest of the lesson builds `fully_shard`, so that you see
# both what it saves and what it costs.
#
# ## Two collectives
#
# A **collective** is a call that all ranks make together. Ranks talk through a **process group**, whose bytes
# are sent by a *backend*: gloo on CPUs, NCCL on NVIDIA GPUs. FSDP needs two collectives. `all_gather` takes a
# piece from each rank and gives all pieces to every rank. `reduce_scatter` takes a full tensor from each
# rank, adds them up, and gives each rank one piece of the sum.
#
# A cell that begins with `%%ranks` runs on every rank, here four processes on your CPU. In the comments,
# `f32[2]` is a float32 tensor of two elements.

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

piece = torch.full((2,), float(rank), device=device)            # f32[2], other values on each rank
full = torch.empty(2 * world, device=device)                    # f32[2 * world]
dist.all_gather(list(full.chunk(world)), piece)                 # on every rank, or the others wait

own = torch.arange(2.0 * world, device=device) * (rank + 1)     # f32[2 * world], other values on each rank
mine = torch.empty(2, device=device)                            # f32[2]
dist.reduce_scatter(mine, list(own.chunk(world)))               # the sum over the ranks

print(f"all_gather:     {piece.tolist()} -> {full.tolist()}")
print(f"reduce_scatter: {own.tolist()} -> {mine.tolist()}")

# %% [markdown]
# After `all_gather` every rank has the same. After `reduce_scatter`, rank 0 has the sums of everybody's first
# two numbers, rank 1 of the next two.
#
# ## Your turn 1 · Shard, gather, reduce
#
# Write the three operations on one flat tensor. `shard(flat)` returns this rank's piece; the pieces are
# equally long, so pad the tensor with zeros at its end, with as few as possible. The full tensor must be able
# to leave memory afterwards. `gather(piece)` returns the padded tensor on every rank. `reduce(grad)` gets a
# padded gradient that comes from this rank's samples, and returns this rank's piece of the mean over all
# ranks. `rank`, `world`, `dist` and `F` are given. The turn calls each function once; the length of `flat` is
# not a multiple of the world size.
#
# <details><summary>Hint</summary>
#
# `-len(flat) % world` is the number of zeros, and `F.pad(flat, (0, n))` appends them. `chunk` returns views,
# and a view keeps the storage of the whole tensor alive.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.your_turn import NotYet, Picture, at_most, exactly, turn


def tensor_of(name, value):
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"`{name}` returned a {type(value).__name__}: return one tensor.")
    return value


LONGER = "The shard has more elements than needed: pad to the next multiple of the world size, then cut."


@turn(1, {
    "elements of the shard": exactly(
        5, less="Elements are missing in the shard: pad before you cut.", more=LONGER
    ),
    "bytes that the shard keeps alive": at_most(20, "The shard is a view of the full tensor: clone it."),
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
    flat = torch.arange(1.0, 4 * world + 2, device=device)
    padded = F.pad(flat, (0, world - 1))
    piece = tensor_of("shard", shard(flat.clone()))
    reference = padded.chunk(world)[rank]
    values = {
        "elements of the shard": piece.numel(),
        "bytes that the shard keeps alive": piece.untyped_storage().nbytes(),
    }
    with Meter() as meter:
        full = tensor_of("gather", gather(reference.clone()))
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
def shard(flat):                                # f32[n] -> f32[ceil(n / world)]
    return None                                 # your lines here


def gather(piece):                              # f32[m] -> f32[m * world]
    return None                                 # your lines here


def reduce(grad):                               # f32[m * world] -> f32[m]
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def shard(flat):
    padded = F.pad(flat, (0, -len(flat) % world))
    return padded.chunk(world)[rank].clone()


def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather(list(full.chunk(world)), piece)
    return full


def reduce(grad):
    mine = grad.new_empty(len(grad) // world)
    dist.reduce_scatter(mine, list(grad.chunk(world)))
    return mine / world

# %% tags=["right"] turn=1
def shard(flat):                                # one tensor for all pieces
    return F.pad(flat, (0, -len(flat) % world)).view(world, -1)[rank].clone()
def gather(piece):
    full = piece.new_empty(world * len(piece))
    dist.all_gather_single(full, piece)
    return full
def reduce(grad):
    mine = torch.empty_like(grad[: len(grad) // world])
    dist.reduce_scatter_single(mine, grad / world)
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
def shard(flat):
    return F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank]
def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather(list(full.chunk(world)), piece)
    return full
def reduce(grad):
    mine = grad.new_empty(len(grad) // world)
    dist.reduce_scatter(mine, list(grad.chunk(world)))
    return mine / world

# %% tags=["wrong"] turn=1 says="larger than the mean"
def shard(flat):
    return F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather(list(full.chunk(world)), piece)
    return full
def reduce(grad):
    mine = grad.new_empty(len(grad) // world)
    dist.reduce_scatter(mine, list(grad.chunk(world)))
    return mine

# %% tags=["wrong"] turn=1 says="No reduce_scatter"
def shard(flat):
    return F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather(list(full.chunk(world)), piece)
    return full
def reduce(grad):
    dist.all_reduce(grad)
    return grad.chunk(world)[rank] / world

# %% tags=["wrong"] turn=1 says="pad before you cut"
def shard(flat):
    return flat[: len(flat) // world * world].chunk(world)[rank].clone()
def gather(piece):
    full = piece.new_empty(len(piece) * world)
    dist.all_gather(list(full.chunk(world)), piece)
    return full
def reduce(grad):
    mine = grad.new_empty(len(grad) // world)
    dist.reduce_scatter(mine, list(grad.chunk(world)))
    return mine / world

# %% tags=["wrong"] turn=1 says="`gather` returned a list"
def shard(flat):
    return F.pad(flat, (0, -len(flat) % world)).chunk(world)[rank].clone()
def gather(piece):
    pieces = [torch.empty_like(piece) for _ in range(world)]
    dist.all_gather(pieces, piece)
    return pieces
def reduce(grad):
    return grad

# %% [markdown]
# `reduce` and then `gather` would be DDP's `all_reduce`: the mean of all gradients, on every rank. FSDP stops
# after `reduce`, because a rank updates its own piece only.
#
# ## A layer on gathered weights
#
# The parameters that are gathered together are called a **unit**. Our unit is a layer. It keeps its **shard**
# of the flattened parameters, which the optimizer updates, and one tensor `full`, whose *storage* (the bytes
# behind a tensor) is emptied by `free` and filled by `gather`.
#
# `Gather` is FSDP for autograd: forward gathers, and backward turns the gradient of the full parameters into
# that of the shard. `functional_call` runs the layer with other tensors in place of its parameters. The layer
# itself stays on the *meta device*, with shapes and no memory.

# %%
# %%ranks
from torch.func import functional_call


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, unit):                              # f32[m]
        unit.gather()
        ctx.unit = unit
        return unit.full.data                                   # f32[m * world]

    @staticmethod
    def backward(ctx, grad):                                    # f32[m * world], from this rank's samples
        ctx.unit.free()                                         # backward has used the parameters
        mine = torch.empty_like(ctx.unit.shard)                 # f32[m]
        dist.reduce_scatter(mine, list(grad.chunk(world)))
        return mine / world, None                               # the mean; None: `unit` is no tensor


class Unit:
    def __init__(self, layer):
        self.shapes = {name: p.shape for name, p in layer.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
        flat = F.pad(flat, (0, -len(flat) % world))             # f32[m * world]
        self.shard = flat.chunk(world)[rank].clone().requires_grad_()           # f32[m]
        self.full = torch.empty_like(flat)                      # f32[m * world]
        self.layer = layer.to("meta")
        self.free()

    def gather(self):
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather(list(self.full.data.chunk(world)), self.shard.data)

    def free(self):
        self.full.untyped_storage().resize_(0)

    def __call__(self, x):
        full = Gather.apply(self.shard, self)
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = full[: sum(sizes)].split(sizes)                # without the padding
        shaped = zip(self.shapes.items(), pieces)
        return functional_call(self.layer, {name: p.view(shape) for (name, shape), p in shaped}, x)


# %% [markdown]
# The model has three blocks and a last layer, and learns to tell handwritten digits apart, 24 in each step.
# `train` runs twenty steps and returns the losses, as means over the ranks. One process with all 24 samples
# is the reference.

# %% tags=["equality"]
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)     # f32[1797, 64]
labels = torch.tensor(digits.target, device=device)                             # i64[1797]


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def build():
    torch.manual_seed(0)                                        # the same weights on every rank
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 10)).to(device)


def train(forward, parameters, rank=rank, world=world, steps=20):
    optimizer, losses = torch.optim.AdamW(parameters), torch.zeros(steps, device=device)
    for step in range(steps):
        rows = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]
        loss = F.cross_entropy(forward(images[rows]), labels[rows])
        loss.backward()
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


model = build()
alone = train(model, model.parameters(), rank=0, world=1)
units = [Unit(layer) for layer in build()]
by_hand = train(through(units), [unit.shard for unit in units])
for name, losses in {"one process": alone, "by hand": by_hand}.items():
    print(f"{name:12} loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
torch.testing.assert_close(by_hand, alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The losses are those of one process, although no rank updated more than its own piece. They differ by
# rounding only. Now look at one step: how many full parameters does a rank hold at each moment? `Meter`
# watches every operation of a step.

# %%
# %%ranks
from fsdp_utils.lessons.meter import Meter


def measure(forward, held):
    with Meter(held) as meter:
        F.cross_entropy(forward(images[:6]), labels[:6]).backward()
    return meter


kept = measure(through(units), [unit.shard for unit in units])
model_bytes = sum(p.nbytes for p in build().parameters())
print(f"{kept.all_gathers} all-gathers, {kept.reduce_scatters} reduce-scatters")

# %%
plots.alive({"by hand": ranks.get("kept.whole_bytes")[0]}, whole_model=ranks.get("model_bytes")[0])

# %% [markdown]
# Each of the four units is gathered once. Nothing frees a unit before its backward pass is over, so between
# forward and backward the whole model exists on every rank. A model whose parameters do not fit on one GPU
# would not fit in this way either.
#
# ## Your turn 2 · Free, and gather again
#
# Write a unit whose full parameters exist only while they are used: free them after forward, and gather them
# again when backward reaches the unit. `y.register_hook(f)` calls `f(grad)` when backward has computed the
# gradient of `y`, before it goes into the layer that produced `y`. The target for the memory is one block.
#
# <details><summary>Hint</summary>
#
# Two lines between `y = ...` and `return y`. The hook must return `None`, or its result replaces the
# gradient. The storage may be empty in between: autograd has saved tensors, and reads their bytes only when
# backward reaches the layer.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
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
    losses, meter = train(through(units), shards, steps=5), measure(through(units), shards)
    return {
        "all-gathers in one step": meter.all_gathers,
        "full parameters at the peak, KiB": meter.peak_whole_bytes / 2**10,
        "losses that differ from one process's": int((~((losses - alone[:5]).abs() <= 1e-3)).sum()),
        "picture": Picture(
            "alive", [{"kept": kept.whole_bytes, "yours": meter.whole_bytes}], {"whole_model": model_bytes}
        ),
    }


# %%
# %%turn 2
class MyUnit(Unit):
    def __call__(self, x):                      # super().__call__(x) gathers and computes
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
from torch.autograd.graph import register_multi_grad_hook
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        register_multi_grad_hook((y,), lambda grads: self.gather())
        self.free()
        return y

# %% tags=["right"] turn=2
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, unit):
        ctx.unit = unit
        unit.free()
        return y.view_as(y)
    @staticmethod
    def backward(ctx, grad):
        ctx.unit.gather()
        return grad, None
class MyUnit(Unit):
    def __call__(self, x):
        return Again.apply(super().__call__(x), self)

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

# %% tags=["wrong"] turn=2 says="out of bounds for storage of size 0"
class MyUnit(Unit):
    def __call__(self, x):
        y = super().__call__(x)
        self.free()
        return y

# %% [markdown]
# The price is four more all-gathers in a step. With ring algorithms a rank now sends three quarters of the
# model three times (two gathers, one reduce), under DDP twice. PyTorch calls this choice
# `reshard_after_forward`. [Lesson 6](06_sharding_strategies.ipynb) weighs the two.
#
# ## PyTorch's own
#
# `fully_shard`, also called FSDP2, is called on each unit and last on the model. That last call makes the
# layers one model. The model keeps its named parameters; each is now a `DTensor`, which knows its full shape
# and holds this rank's shard.

# %% tags=["meter"]
# %%ranks
from torch.distributed.fsdp import fully_shard


def shard_layers(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


meters = {"by hand, kept": kept}
for name, options in {"fully_shard, kept": {"reshard_after_forward": False}, "fully_shard": {}}.items():
    model = shard_layers(build(), **options)
    torch.testing.assert_close(train(model, model.parameters()), alone, rtol=1e-4, atol=1e-4)
    meters[name] = measure(model, model.parameters())
for name, m in meters.items():
    whole, buffers = m.peak_whole_bytes / 2**10, m.peak_gather_bytes / 2**10
    counts = f"{m.all_gathers} all-gathers, {m.reduce_scatters} reduce-scatters"
    print(f"{name:18} {counts}, peak {whole:.0f} KiB, with buffers {buffers:.0f} KiB")

# %% [markdown]
# The losses are those of one process again (the cell asserts it), and the numbers of collectives are those of
# your units. The memory differs in two ways. `fully_shard` holds **two blocks** at its peak: in backward it
# gathers the next unit while it computes with the present one, which on GPUs happens at the same time (in
# forward, too) ([lesson 4](04_backward_prefetch.ipynb)). And it gathers into **buffers**, out of which it
# copies each parameter; in forward it keeps a buffer until the next unit has been copied out. That makes
# three blocks.
#
# Where does it cut? Fill each parameter of a block with another number, shard the block, and count which
# numbers each rank holds.

# %%
# %%ranks
def marked():
    block = Block().to(device)
    for number, parameter in enumerate(block.parameters(), start=1):
        parameter.data.fill_(number)
    return block


names, flat_shard = [name for name, _ in Block().named_parameters()], Unit(marked()).shard
held_flat = {name: int((flat_shard == number).sum()) for number, name in enumerate(names, start=1)}
held_rows = {name: p.to_local().numel() for name, p in fully_shard(marked()).named_parameters()}

# %%
held = {"flat: by hand": ranks.get("held_flat"), "by rows: fully_shard": ranks.get("held_rows")}
plots.shards({way: {name: [of[name] for of in each] for name in each[0]} for way, each in held.items()})

# %% [markdown]
# Each bar is a parameter, each colour a rank. By hand, a rank holds a stretch of the flat tensor, wherever
# that lies. FSDP1, the class `FullyShardedDataParallel` of 2022, cuts in this way too, and calls the flat
# tensor `FlatParameter`. `fully_shard` cuts each parameter by rows, so each parameter keeps its name in a
# checkpoint and its own `requires_grad`. The rows are cut as `torch.chunk` cuts them, so some ranks may hold
# none: always with fewer rows than ranks, but also with 5 rows on 4 ranks (2, 2, 1, 0).
#
# ## When the losses are not equal
#
# FSDP takes the **mean over the ranks** of their gradients. That is the gradient of one process only if the
# mean of the ranks' losses is the loss of one process. There are two usual ways in which it is not: the
# ranks' shares are unequal, or the loss is no mean over independent samples. The next cell takes one gradient
# with `fully_shard`, compares it with that of one process, and trains both for twenty steps on the same 24
# samples.

# %% tags=["unequal"]
# %%ranks
equal = torch.arange(24, device=device).chunk(world)
unequal = torch.arange(24, device=device).split([24 - 2 * (world - 1)] + [2] * (world - 1))
mean, total = F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")


def weighted(logits, y):
    return mean(logits, y) * len(y) * world / 24


def compare(name, shares, loss_of=mean, reference=mean, norm=nn.Identity):
    found = []
    for rows, loss in ((torch.arange(24, device=device), reference), (shares[rank], loss_of)):
        model = nn.Sequential(norm(64), *build()).to(device)
        if found:
            for part in [*model[1:], model]:
                fully_shard(part)
        optimizer, first = torch.optim.AdamW(model.parameters()), None
        for _ in range(20):
            loss(model(images[rows]), labels[rows]).backward()
            if first is None:
                grads = [p.grad.full_tensor() if found else p.grad for p in model.parameters()]
                first = torch.cat([g.flatten() for g in grads])
            optimizer.step()
            optimizer.zero_grad()
        found.append((first, mean(model(images[:24]), labels[:24]).item()))
    (one, loss_one), (sharded, loss_sharded) = found
    apart = float((sharded - one).norm() / one.norm())
    if rank == 0:
        print(f"{name:26} gradient off by {apart:4.0%}, loss {loss_sharded:.3f} instead of {loss_one:.3f}")
    return apart


off = [
    compare("equal shares", equal),
    compare("unequal shares", unequal),
    compare("unequal, weighted", unequal, weighted),
    compare("sum over the samples", equal, total, total),
    compare("BatchNorm", equal, norm=nn.BatchNorm1d),
]

# %% tags=["check"]
# %%ranks
assert max(off[0], off[2]) < 1e-4
assert min(off[1], off[4]) > 0.05
assert abs(off[3] - (1 - 1 / world)) < 1e-3

# %% [markdown]
# With unequal shares, a sample in a small share weighs more. The cure is a weight for each rank's loss: its
# samples times the world size, divided by all samples. The same holds for tokens ([lesson
# 10](10_end_to_end.ipynb)). A sum over the samples comes out divided by the world size. BatchNorm normalises
# each rank's samples among themselves, unlike one process.
#
# Look at the row of the sum: its gradient is a quarter of what it should be (with four ranks), and the loss
# hardly shows it. AdamW divides an average of the gradients by their size, so a common factor cancels. A loss
# curve under AdamW does not prove that gradients are right; compare the gradients, or train with SGD.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# | :-- | :-- | :-- |
# | `setStorage: … out of bounds for storage of size 0` | a parameter is used after it was freed: turn 2 without the hook | gather before each use |
# | `got mixed torch.Tensor and DTensor` | `layer.forward(x)` on a unit: the hooks that gather did not run | call the module: `layer(x)` |
# | the loss does not fall, no error | the optimizer was made before `fully_shard` and holds the old parameters, which get no gradients | make it after sharding |
# | the losses are not those of one process | from the first step: other weights, other samples, unequal shares, or a loss that is no mean over samples. Only later: the gradients or the optimizer | seed, sampler, weights for the losses |
# | the program hangs | one rank did not enter a collective in which the others wait | call collectives on every rank; [lesson 15](15_when_it_hangs.ipynb) finds the line |
#
# ## The rule
#
# `all_gather` a unit before it is used and free it afterwards; `reduce_scatter` its gradients, as a mean.
# `fully_shard` each layer, then the model, then make the optimizer; give each rank an equal share of samples.
#
# [lesson 1 →](01_transformer_wrapper.ipynb)

# %% [markdown]
# # 16 · Two dimensions: FSDP with tensor parallelism
#
# Under FSDP a rank *holds* a part of each layer, and gathers the rest to compute. Under tensor parallelism it
# also *computes* with its part alone: it multiplies with some rows or columns of a weight matrix, and no rank
# gathers the full matrix. In this lesson you arrange four ranks in a mesh of two rows and two columns, train
# with tensor parallelism within a row and FSDP along a column, and count the bytes sent along each.

# %% [markdown] tags=["card"]
# learn:
# - how a matrix is cut for tensor parallelism, and which collectives that takes
# - FSDP and tensor parallelism on one mesh, with the losses of one process
# - which rows and columns of each weight a rank holds
# - the bytes along each dimension of the mesh, and which dimension belongs on the fast link
# - when FSDP alone ends, and what tensor parallelism costs
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 6](06_sharding_strategies.ipynb) · no GPU'
# ranks: "4 on the CPU of this machine, always: a mesh of two by two needs them. `FSDP_RANKS` and GPUs are
#   left aside."
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read

# %% [markdown]
# **The question of this lesson:** under FSDP every rank computes with samples of its own, and gathers every
# layer in full for that. What if there are more ranks than samples, or if a rank gathers a layer for longer
# than it computes with it?

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.2, height=2.5)
arrow = {"arrowstyle": "->", "color": plots.INK}
axes.add_patch(Rectangle((0, 1.2), 1.3, 1.6, color=plots.FAINT))
axes.text(0.65, 2.0, "input,\non both", ha="center", va="center", fontsize=9)
for r, color in enumerate(plots.RANK_COLORS[:2]):
    low = 2.2 - 1.8 * r
    middle = low + 0.7
    axes.text(1.75, low + 1.52, f"rank {r}", fontsize=8)
    said = (
        "half of\nup's rows",
        "half of the\nactivations",
        "half of down's\ncolumns",
        "a summand of\nthe output",
    )
    for place, text in enumerate(said):
        left = 2.0 + 2.3 * place
        dark = place in (0, 2)
        fill = {"facecolor": color, "alpha": 1 if dark else 0.3, "linewidth": 0}
        axes.add_patch(Rectangle((left, low), 1.8, 1.4, **fill))
        look = {"color": "white", "fontweight": "bold"} if dark else {"color": plots.INK}
        axes.text(left + 0.9, middle, text, ha="center", va="center", fontsize=8, **look)
        begin = (left - 0.46, middle) if place else (1.34, 2.0)
        axes.annotate("", (left - 0.04, middle), begin, arrowprops=arrow)
    axes.annotate("", (11.3, 2.0), (10.74, middle), arrowprops=arrow)
axes.text(11.4, 2.0, "all_reduce:\nthe output,\non both", va="center", fontsize=9)
axes.set(xlim=(-0.1, 13.2), ylim=(0.2, 4.0), xticks=[], yticks=[], title="an MLP on two ranks")
axes.spines[:].set_visible(False)
plots.show(fig, alt="Two ranks: each has half of up's rows and of down's columns; the outputs are added.")

# %% [markdown]
# The drawing shows the two weight matrices of an MLP, `up` and `down`, on two ranks. Each rank computes half
# of the hidden activations, and from them a summand of the output. One all_reduce adds the two summands. No
# weight is sent. (Backward takes one more all_reduce, for the gradient of the input.)
#
# ## In your own code
#
# This script trains with FSDP and tensor parallelism. Save it as `train.py` and start it with `torchrun
# --nproc-per-node 4 train.py`. The order matters: first tensor parallelism cuts the matrices, then
# `fully_shard` shards the parts.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# tp = 2                                                  # at most the ranks of one host
# mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("fsdp", "tp"))
# torch.manual_seed(0)                                    # the same weights on every rank
# mlp = lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
# model = nn.Sequential(*[mlp() for _ in range(4)])
# for block in model:
#     parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh["fsdp"])
# optimizer = torch.optim.AdamW(model.parameters())
# torch.manual_seed(mesh.get_local_rank("fsdp"))          # the ranks along "tp" need the same samples
# for step in range(10):
#     model(torch.randn(32, 256, device=device)).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# Each rank warns that a module "returned a view tensor": the output of `RowwiseParallel` is one. The warning
# concerns code that writes into this output in place (`x += y`), and the script does not.
#
# ## Four ranks, two dimensions

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start(4, device="cpu")

# %% jupyter={"source_hidden": true}
# %%ranks
import tempfile
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp_utils import load_distributed, record_collectives, save_distributed
from fsdp_utils.collectives.c10d_hooks import listen_to_calls
from fsdp_utils.collectives.replay import replay
from fsdp_utils.lessons.together import run_together

rank, world = dist.get_rank(), dist.get_world_size()

# %%
# %%ranks
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
mine = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("fsdp", "tp")}

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=6.4, height=2.9)
for r, place in enumerate(ranks.get("(mesh.get_local_rank('fsdp'), mesh.get_local_rank('tp'))")):
    left, low = 2.6 * place[1], 1.9 - 1.7 * place[0]
    axes.add_patch(Rectangle((left, low), 1.4, 1.0, facecolor=plots.RANK_COLORS[r], linewidth=0))
    look = {"ha": "center", "va": "center", "color": "white"}
    axes.text(left + 0.7, low + 0.5, f"rank {r}\nplace {place}", **look, fontsize=9)
both_ways = {"arrowstyle": "<->", "color": plots.INK}
for low, samples in ((2.4, "samples 0 to 3"), (0.7, "samples 4 to 7")):
    axes.annotate("", (2.55, low), (1.45, low), arrowprops=both_ways)
    axes.text(2.0, low + 0.1, "tp", ha="center", fontsize=9)
    axes.text(4.2, low, samples, va="center", fontsize=9)
for left in (0.7, 3.3):
    axes.annotate("", (left, 1.22), (left, 1.88), arrowprops=both_ways)
    axes.text(left + 0.1, 1.47, "fsdp", fontsize=9)
axes.set(xlim=(-0.1, 6.0), ylim=(0.0, 3.1), xticks=[], yticks=[])
axes.spines[:].set_visible(False)
plots.show(fig, alt="Ranks 0 and 1 above 2 and 3: tp joins the ranks of a row, fsdp those of a column.")

# %% [markdown]
# A **row** is a group along "tp": ranks 0 and 1 compute together, on the same samples. A **column** is a
# group along "fsdp": ranks 0 and 2 have different samples and shard the same part of the weights between
# them. Think of ranks 0 and 1 as one host and of 2 and 3 as another.

# %% tags=["check"]
mine = ranks.get("mine")
assert [m["tp"] for m in mine] == [[0, 1], [0, 1], [2, 3], [2, 3]]
assert [m["fsdp"] for m in mine] == [[0, 2], [1, 3], [0, 2], [1, 3]]
print("Checked: the groups of each rank are those of the drawing.")

# %% [markdown]
# ## Train on the mesh
#
# The model is a small transformer: an embedding, four blocks, a norm and a head. A folded cell defines it,
# with the `MLP` of the drawing above in each block. One line in its attention is written for tensor
# parallelism: the forward pass does not name the number of heads, `unflatten(-1, (-1, 16))` takes as many
# heads of 16 as the rank has.

# %% jupyter={"source_hidden": true}
# %%ranks
VOCABULARY, WIDTH, LENGTH, SAMPLES, BLOCKS = 128, 64, 16, 8, 4


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):                                       # f32[batch, length, width]
        heads = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width)
        self.norm2, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):                                  # i64[batch, length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))                          # f32[batch, length, vocabulary]


def build():
    torch.manual_seed(0)
    return Model()


def batch(number, part=0, of=1):
    """Tokens of one step: the part of the samples for one place along "fsdp"."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator).chunk(of)[part]


# %% [markdown]
# A **plan** says for each module how "tp" cuts it. `ColwiseParallel` cuts the outputs of a layer, as for `up`
# in the drawing, and `RowwiseParallel` the inputs, as for `down`. (The names come from papers that write
# `x @ A`. `nn.Linear` stores the transpose, so `ColwiseParallel` cuts the *rows* of `weight`.) Attention is
# cut in the same way: rows of `q`, `k` and `v` belong to heads, so each rank computes half of the heads, and
# `o` has its columns cut. `PrepareModuleInput` hands attention's input, of which each rank of a row has all
# (`Replicate()`), to the three of them at once; "When it goes wrong" counts what that saves. The number of
# heads (of key and value heads, too, where there are fewer) has to be divisible by the ranks along "tp".

# %%
# %%ranks
tensor_plan = {
    "attention": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}

# %% [markdown]
# What the plan does not name is not cut along "tp": both ranks of a row compute the same embedding, norms and
# head. Then come two calls. `parallelize_module` cuts the matrices along "tp". `fully_shard` shards along
# "fsdp" what is left on each rank. (`fsdp_utils.shard(model, mesh=mesh["fsdp"])` can take the place of the
# loop with `fully_shard`.)

# %%
# %%ranks
def with_tensor_plan(mesh, model=None):
    model = model or build()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], tensor_plan)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh["fsdp"])
    return model


def samples_of(number, mesh):
    """This rank's tokens of one step: only its place along "fsdp" chooses them."""
    place, of = (mesh.get_local_rank("fsdp"), mesh["fsdp"].size()) if mesh else (0, 1)
    return batch(number, place, of)


# %% jupyter={"source_hidden": true}
# %%ranks
def step(model, number, mesh, sequence=False):
    """Forward and backward; the loss of this rank's samples."""
    tokens = samples_of(number, mesh)
    with loss_parallel() if sequence else nullcontext():        # for the sequence plan, further down
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def train(model, optimizer, mesh, sequence=False, steps=range(4)):
    """The losses, as the mean over all samples, and what was sent in the last step."""
    losses = []
    for number in steps:
        recorded = mesh is not None and number == steps[-1]
        with record_collectives(model, ranks_per_host=2) if recorded else nullcontext() as trace:
            loss = step(model, number, mesh, sequence)
            optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:                                    # the rows have different samples
            dist.all_reduce(loss, group=mesh.get_group("fsdp"))
            loss /= mesh["fsdp"].size()
        losses.append(loss.item())
    return losses, trace


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fsdp_alone(model=None):
    model = model or build()
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=all_four["fsdp"])
    return model


all_four = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

# %% [markdown]
# A step has eight samples. One process takes all eight, under FSDP alone each rank takes two, and on the mesh
# each *row* takes four: both of its ranks compute with all four. Now train three times from the same weights,
# four steps with AdamW: on one process, with FSDP alone and on the mesh. (The loop is folded.)

# %% tags=["equality"]
# %%ranks
ways = {
    "FSDP, 4 ranks": (fsdp_alone, all_four, False),
    "2 x 2, tensor": (lambda: with_tensor_plan(mesh), mesh, False),
}
model = build()
alone, _ = train(model, adamw(model), None)
results = {}
for name, (make, its_mesh, sequence) in ways.items():
    model = make()
    results[name] = train(model, adamw(model), its_mesh, sequence)

# %% jupyter={"source_hidden": true}
curves = ranks.get("{'one process': alone, **{name: losses for name, (losses, _) in results.items()}}")[0]
Table(
    ["loss at step", "1", "2", "3", "4"],
    [[name, *(f"{loss:.4f}" for loss in losses)] for name, losses in curves.items()],
)

# %% [markdown]
# The mesh trains with the losses of one process. Tensor parallelism, like FSDP, changes where the numbers are
# computed, and the result by rounding only.

# %% tags=["check"]
# %%ranks 0
for losses, _ in results.values():
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
print("Checked: the losses of both ways are those of one process, to 0.01%.")

# %% [markdown]
# ## Your turn 1 · An MLP in four parts
#
# What did the plan do in each MLP? Write it by hand, this time over all four ranks. `my_parts` gets the full
# weights (`up` is f32[256, 64], `down` f32[64, 256]), a place from 0 to 3 and the world size. It returns what
# the rank at this place keeps of each. `my_mlp` computes `F.linear(F.gelu(F.linear(x, up)), down)` from these
# parts. Every rank has the same `x`, f32[8, 64], and has to get the full output.
#
# A folded cell counts what a rank keeps and what `my_mlp` passes to collectives. Edit the next cell, then run
# it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# `F.linear(x, weight)` has one output for each *row* of the weight, and one input for each *column*. Which
# cut of `up` gives complete hidden activations, so that GELU can be applied to each? Which cut of `down` can
# work with these alone?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_parts(up, down, place, world):
    return None                                 # your lines here; return (part_of_up, part_of_down)


def my_mlp(x, part_of_up, part_of_down):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def score_mlp(parts, mlp):
    """Run what was written on all ranks, and count its collectives."""
    generator = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(size, generator=generator) / 8 for size in ((256, 64), (64, 256), (8, 64)))
    kept, parted = run_together(parts, up.clone(), down.clone(), rank, world)
    if kept is None:
        return {"problem": parted} if parted else None
    two = isinstance(kept, tuple | list) and [
        isinstance(part, torch.Tensor) and not isinstance(part, DTensor) for part in kept
    ] == [True, True]
    shapes = [None] * world
    dist.all_gather_object(shapes, [part.shape for part in kept] if two else None)
    if None in shapes:
        return {"problem": "`my_parts` should return a pair of two tensors, and no DTensor."}
    if any(shape != shapes[0] for shape in shapes):
        return {"problem": "The ranks keep parts of different shapes."}
    nbytes, calls = sum(part.nbytes for part in kept), []

    def listen(call, issue):
        calls.append(call)
        return issue()

    def heard():
        with listen_to_calls(listen):
            return mlp(x.clone(), *(part.clone() for part in kept))

    output, parted = run_together(heard)
    if output is None:
        return {"problem": parted} if parted else None
    output = output.full_tensor() if isinstance(output, DTensor) else output
    right = F.linear(F.gelu(F.linear(x, up)), down)
    return {
        "KiB of weights kept": nbytes / 1024,
        "the output of the full MLP": torch.allclose(output, right, atol=1e-4)
        if isinstance(output, torch.Tensor) and output.shape == right.shape
        else "no tensor of the output's shape",
        "collectives of one forward pass": ", ".join(call.kind for call in calls) or "none",
        "KiB passed to them": sum(call.bytes_in for call in calls) / 1024,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_mlp(my_parts, my_mlp)",
    {
        "KiB of weights kept": exactly(
            32, otherwise="Both matrices together have 128 KiB, and a rank should keep a quarter of each."
        ),
        "the output of the full MLP": exactly(
            True,
            otherwise="The output is not that of the full MLP. GELU of a sum is not the sum of GELUs: each "
            "hidden activation has to be complete before it. Each rank has only its summand of the output.",
        ),
        "collectives of one forward pass": exactly(
            "all_reduce", otherwise="One all_reduce, of the outputs, is enough: no weight has to be sent."
        ),
        "KiB passed to them": at_most(
            2, otherwise="The output has 2 KiB. More than that is passed to collectives."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world, dim=1)[place]


def my_mlp(x, part_of_up, part_of_down):
    output = F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)
    dist.all_reduce(output)
    return output

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world)[place]


def my_mlp(x, part_of_up, part_of_down):
    output = F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)
    dist.all_reduce(output)
    return output

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world, dim=1)[place]


def my_mlp(x, part_of_up, part_of_down):
    return F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world, dim=1)[place], down.chunk(world)[place]


def my_mlp(x, part_of_up, part_of_down):
    hidden = F.linear(x.chunk(world, dim=1)[rank], part_of_up)
    dist.all_reduce(hidden)
    pieces = [torch.empty(8, 16) for _ in range(world)]
    dist.all_gather(pieces, F.linear(F.gelu(hidden), part_of_down))
    return torch.cat(pieces, dim=1)

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world)[place]


def my_mlp(x, part_of_up, part_of_down):
    full = []
    for part in (part_of_up, part_of_down):
        pieces = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(pieces, part)
        full.append(torch.cat(pieces))
    return F.linear(F.gelu(F.linear(x, full[0])), full[1])

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up[64 * place : 64 * (place + 1)], down[:, 64 * place : 64]


def my_mlp(x, part_of_up, part_of_down):
    output = F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)
    dist.all_reduce(output)
    return output

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world, dim=1)[place]


def my_mlp(x, part_of_up, part_of_down):        # only one rank calls the collective
    output = F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)
    if rank == 0:
        dist.all_reduce(output)
    return output

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up.chunk(world)[place]


def my_mlp(x, part_of_up, part_of_down):
    return x

# %% tags=["wrong"] turn=1
# %%ranks
def my_parts(up, down, place, world):
    return up, down


def my_mlp(x, part_of_up, part_of_down):
    return F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)

# %% [markdown]
# ## Cut the rest: sequence parallelism
#
# With the plan above, both ranks of a row still repeat the work on embedding, norms and head. **Sequence
# parallelism** cuts that, too. Outside attention and the MLP each rank has its part of the *tokens*
# (`Shard(1)`: cut along dimension 1, the sequence) and computes the norms of these alone. Before attention
# and before the MLP an all_gather collects all tokens of the row (`whole_tokens`). After each a
# reduce_scatter, in place of the all_reduce, adds the summands and leaves each rank its tokens
# (`output_layouts=Shard(1)`).

# %%
# %%ranks
whole_tokens = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
sequence_plan = {
    **tensor_plan,
    "norm1": SequenceParallel(),
    "attention": whole_tokens,
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": whole_tokens,
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}

# %% [markdown]
# Outside the blocks, the embedding and the head are cut by the vocabulary. `use_local_output=False` hands the
# logits on as a DTensor that is cut like that. Under `loss_parallel` no rank gathers them, and the loss takes
# small all_reduces instead. Put the loss and its `backward()` under it, as the folded `step` does: a backward
# outside raises an error.

# %%
# %%ranks
outer_plan = {                                          # for what is outside of the blocks
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def with_sequence_plan(mesh, model=None):
    model = model or build()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], sequence_plan)
    parallelize_module(model, mesh["tp"], outer_plan)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh["fsdp"])
    return model


ways["2 x 2, tensor and sequence"] = lambda: with_sequence_plan(mesh), mesh, True
model = with_sequence_plan(mesh)
results["2 x 2, tensor and sequence"] = train(model, adamw(model), mesh, sequence=True)
torch.testing.assert_close(results["2 x 2, tensor and sequence"][0], alone, rtol=1e-4, atol=1e-5)

# %% [markdown]
# The last line raises no error: these are the losses of one process, too.

# %% [markdown]
# ## What each rank holds
#
# The next cell fills each weight with the numbers of its elements, 0, 1, 2 and so on, cuts it in each way,
# and asks every rank which numbers it has. The figure draws each weight in the colours of the ranks.

# %%
# %%ranks
SHOWN = ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight")


def marked():
    model = build()
    for parameter in model.parameters():
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape)
    return model


def held(model):
    return {name: p.to_local().flatten().int() for name, p in model.named_parameters() if name in SHOWN}


cuts = {"FSDP": held(fsdp_alone(marked())), "2 x 2": held(with_sequence_plan(mesh, marked()))}
shapes = {name: tuple(p.shape) for name, p in build().named_parameters() if name in SHOWN}

# %% jupyter={"source_hidden": true}
import torch

cuts, shapes = ranks.get("cuts"), ranks.get("shapes")[0]
fig, panels = plots.figure(6, width=9.8, height=2.9)
owners = {}
for axes, (way, name) in zip(panels, [(way, name) for way in cuts[0] for name in shapes]):
    rows, columns = shapes[name]
    owners[way, name] = owner = torch.full((rows * columns,), -1)
    for r, of_rank in enumerate(cuts):
        owner[of_rank[way][name].long()] = r
    owner = owner.view(rows, columns)
    for r in range(len(cuts)):
        ys, xs = torch.where(owner == r)
        top, left = ys.min().item(), xs.min().item()
        high, wide = ys.max().item() + 1 - top, xs.max().item() + 1 - left
        axes.add_patch(Rectangle((left, top), wide, high, facecolor=plots.RANK_COLORS[r], edgecolor="white"))
        axes.text(left + wide / 2, top + high / 2, r, ha="center", va="center", color="white", fontsize=9)
    axes.set(title=f"{way}: {name.split('.')[-2]}\n{rows} x {columns}")
    axes.set(xlim=(0, 256), ylim=(256, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Which rank holds which rows and columns of three weights: FSDP, and a 2 x 2 mesh.")

# %% [markdown]
# Under FSDP every rank holds a quarter of the rows of each weight. On the mesh, "tp" cuts first. Of `up`,
# ranks 0 and 2 have the upper half of the rows, because their place along "tp" is 0, and FSDP gives each of
# the two half of that. (So the order from above is 0, 2, 1, 3. PyTorch calls the placement along "fsdp"
# `_StridedShard`.) Of `down`, "tp" has cut the columns and FSDP the rows. In each of the six drawings a rank
# holds a quarter. (The norms are not cut along "tp": both ranks of a row hold the same half of them.)

# %% tags=["check"]
for owner in owners.values():
    assert all((owner == r).sum() == owner.numel() / 4 for r in range(4))
by_rows = owners["2 x 2", "blocks.0.mlp.up.weight"].view(256, 64)[:, 0]
assert by_rows.unique_consecutive().tolist() == [0, 2, 1, 3]
corners = owners["2 x 2", "blocks.0.mlp.down.weight"].view(64, 256)
assert [corners[y, x].item() for y in (0, 63) for x in (0, 255)] == [0, 1, 2, 3]
print("Checked: a quarter on each rank; up by rows in the order 0, 2, 1, 3; down in four corners.")

# %% [markdown]
# What changes is what a rank holds *within* a step. FSDP gathers a unit along "fsdp" only, so a rank never
# has more of a cut matrix than its half. Its activations change, too. The folded cell measures both: the
# largest all_gather of a block, and the bytes that autograd keeps from the forward pass for backward.

# %% jupyter={"source_hidden": true}
# %%ranks
def local(tensor):
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if hasattr(tensor, "wait") else tensor         # a collective may still be running


def storage(tensor):
    return local(tensor).untyped_storage()


def activation_bytes(make, mesh, sequence):
    """Bytes that autograd keeps from forward for backward, without the weights."""
    model, kept = make(), {}

    def pack(tensor):
        weights = {storage(p).data_ptr() for p in model.parameters()}
        if storage(tensor).data_ptr() not in weights:
            kept[storage(tensor).data_ptr()] = local(tensor)            # held: no other gets its place
        return tensor

    tokens = samples_of(0, mesh)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens[:, :-1])
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def gathered_bytes(trace):
    return max(e.bytes for e in trace.collectives if e.kind == "all_gather" and e.module == "blocks.0")


kept = {name: activation_bytes(*way) for name, way in ways.items()}
gathered = {name: gathered_bytes(trace) for name, (_, trace) in results.items()}

# %% jupyter={"source_hidden": true}
kept, gathered = ranks.get("(kept, gathered)")[0]
Table(
    ["on rank 0", "KiB of a gathered block", "KiB of activations", "samples it computes with"],
    [[n, round(gathered[n] / 1024), round(kept[n] / 1024), 2 if "FSDP" in n else 4] for n in kept],
    note="Activations: what autograd keeps of the model's forward pass, without weights and loss.",
)

# %% [markdown]
# A gathered block is half as large on the mesh. With the tensor plan alone the activations grow by a good
# third: a rank computes with twice the samples, and only what is inside attention and the MLP is cut in two.
# With sequence parallelism the rest is cut, too, and an eighth more than under FSDP alone remains: the tokens
# that are gathered before attention, the MLP and the head, which autograd keeps for backward.

# %% tags=["check"]
assert 0.5 <= gathered["2 x 2, tensor"] / gathered["FSDP, 4 ranks"] < 0.51
assert 1.3 < kept["2 x 2, tensor"] / kept["FSDP, 4 ranks"] < 1.4
gathered_tokens = 4 * 16 * 64 * 4                               # of a row's four samples
more = kept["2 x 2, tensor and sequence"] - kept["FSDP, 4 ranks"]
assert more == (2 * 4 + 1) * gathered_tokens / 2                # twice in a block, and before the head
print("Checked: half a block is gathered; activations grow by a third, with sequence by the gathered tokens.")

# %% [markdown]
# ## What is sent along each dimension
#
# `record_collectives` notes for each collective the name of its dimension of the mesh, so the bytes can be
# counted by it. As in [lesson 6](06_sharding_strategies.ipynb) they are the least that a rank has to send:
# what a ring sends, whatever gloo or NCCL does.

# %% tags=["dimensions"]
# %%ranks
sent = {name: trace.sent_bytes_by_dimension() for name, (_, trace) in results.items()}

# %% jupyter={"source_hidden": true}
sent = ranks.get("sent")[0]
fig, (axes,) = plots.figure(width=7.4, height=2.1)
for row, by_dimension in enumerate(sent.values()):
    left = 0.0
    for dimension, color in zip(("fsdp", "tp"), (plots.RANK_COLORS[0], plots.RANK_COLORS[1])):
        wide = by_dimension.get(dimension, 0.0) / 1024
        axes.barh(row, wide, left=left, color=color, label=dimension if row == 1 else "")
        if wide:
            axes.text(left + wide / 2, row, f"{wide:,.0f}", ha="center", va="center", color="white")
        left += wide
axes.set_yticks(range(len(sent)), list(sent))
axes.set(ylim=(2.5, -0.5), xlabel="KiB that a rank sends in one step")
axes.legend(title="along")
plots.show(fig, alt="Bytes sent in a step along the dimensions fsdp and tp, for three ways.")

# %% [markdown]
# - **Along "fsdp"** a rank sends parts of parameters and gradients: how much depends on the model and not
#   on the samples. On the mesh it is about a third of FSDP alone: half of each matrix is gathered, by two
#   ranks instead of four. Half of a half travels, instead of three quarters of the matrix. (With the tensor
#   plan, embedding and head are not cut, and are gathered in full.)
# - **Along "tp"** it sends activations: for each block four all_reduces of `samples x length x width`
#   numbers, two in forward and two in backward, with the samples of a row. How wide the MLP is inside does
#   not matter.
# - **Sequence parallelism** sends the same bytes for a block: an all_reduce around a ring is a reduce_scatter
#   and an all_gather, and here the two are done at different places. What is more is for the embedding and
#   the head, which are cut now, and twelve small all_reduces: nine for the gradients of the nine norms, since
#   each rank has seen only its tokens, and three for the loss.

# %% tags=["check"]
traces = ranks.get("{name: trace for name, (_, trace) in results.items()}")[0]
BLOCK, NORMS, ROOT, ACTIVATIONS = 12 * 64 * 64 * 4, 2 * 64 * 4, 2 * 128 * 64 * 4 + 64 * 4, 4 * 16 * 64 * 4


def fsdp_bytes(n, block, root):
    return (n - 1) / n * (4 * 3 * block + 2 * root)             # the root is gathered once


assert sent["FSDP, 4 ranks"] == {"fsdp": fsdp_bytes(4, BLOCK + NORMS, ROOT)}
tensor, both = sent["2 x 2, tensor"], sent["2 x 2, tensor and sequence"]
assert tensor == {"fsdp": fsdp_bytes(2, BLOCK / 2 + NORMS, ROOT), "tp": 4 * 4 * ACTIVATIONS}
assert both["fsdp"] == fsdp_bytes(2, BLOCK / 2 + NORMS, ROOT / 2 + 128)
of_blocks = [
    e.sent_bytes
    for e in traces["2 x 2, tensor and sequence"].collectives
    if e.dimension == "tp" and e.kind != "all_reduce"
]
assert sum(of_blocks) == tensor["tp"] + 4 * ACTIVATIONS / 2     # two gathers and two scatters more
small = [e for e in traces["2 x 2, tensor and sequence"].collectives if e.dimension == "tp"]
assert sum(e.kind == "all_reduce" for e in small) == 12
assert [e.kind for e in traces["2 x 2, tensor"].collectives if e.dimension == "tp"] == ["all_reduce"] * 16
assert 0.33 < both["fsdp"] / sent["FSDP, 4 ranks"]["fsdp"] < 0.35
print("Checked, to the byte: along fsdp by the parameters, along tp by the activations.")

# %% [markdown]
# ## Which dimension belongs on the fast link?
#
# Ranks 0 and 1 are one host, 2 and 3 another. **A replay**, as in [lesson 4](04_backward_prefetch.ipynb),
# calculates how long a step of a large model takes on such hosts. From the recording it takes the order of
# all collectives. The rest is assumed:
#
# - a width of 4,096, so that a block has 201 million parameters; bf16; 16,384 tokens in a step;
# - 400 TFLOP/s on each rank, for the products with weight matrices (those inside attention are left out);
# - a rank sends 300 GiB/s within a host and 40 GiB/s between hosts, and collectives that run at the same time
#   do not slow each other down;
# - what is sent along "tp" is waited for by **the computation after it**, while FSDP gathers a unit beside
#   the computation of the unit before.

# %%
# %%ranks
FLOPS, SPEEDS = 4e14, {"within a host": 300, "between hosts": 40}


def imagine(trace, tokens, of_ranks=4, change=lambda event: {}):
    """Replay a recorded step with the sizes of the large model; tokens are those of all ranks together."""
    weights = 2 * 4096**2 / (4 * WIDTH**2)                      # bf16 and wider; recorded was float32
    activations = 2 * 4096 * tokens / (4 * WIDTH * SAMPLES * LENGTH)
    events = []
    for e in trace.events:
        larger = weights if e.module else activations
        e = replace(e, bytes_in=round(e.bytes_in * larger), bytes_out=round(e.bytes_out * larger))
        events.append(replace(e, **change(e)))
    block_s = 2 * 12 * 4096**2 * tokens / of_ranks / FLOPS      # a multiplication and an addition each
    seconds = {**{f"blocks.{i}": block_s for i in range(BLOCKS)}, "(root)": block_s / 3}
    return replay(events, units=list(trace.unit_bytes), compute_s=seconds, link_gib_s=SPEEDS)


# %% [markdown]
# (The embedding and the head count for a third of a block, as in the recorded model.) The replay compares
# FSDP alone with the same mesh laid over the hosts in two ways: with a row on one host, and with a row over
# both.

# %%
# %%ranks
across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("fsdp", "tp"))     # rows: one rank of each host
model = with_sequence_plan(across)
results["2 x 2, tp between hosts"] = train(model, adamw(model), across, True)

compared = {
    "FSDP alone": "FSDP, 4 ranks",
    "tp within hosts": "2 x 2, tensor and sequence",
    "tp between hosts": "2 x 2, tp between hosts",
}
replays = {name: imagine(results[way][1], 16384) for name, way in compared.items()}

# %% jupyter={"source_hidden": true}
replays = ranks.get("replays")[0]
Table(
    ["replayed, on two hosts of two", "ms a step", "of these, only sending"],
    [[name, f"{1e3 * r.step_s:.1f}", f"{1e3 * r.exposed_s:.1f}"] for name, r in replays.items()],
)

# %% [markdown]
# Each way computes for 54 ms; the second number says why they differ. FSDP alone waits for its
# gathers over the slow link. With "tp" within the hosts, a third of these bytes goes over the slow link, most
# of it behind the computation, and what is sent along "tp" over the fast link is short. With "tp" between the
# hosts, the slow link carries what every block has to wait for.
#
# The player shows the three steps on one time axis. Press ▶, or ▶| to go from event to event. What is sent
# along "tp" is in the lane "in the model". Below the lanes stands what rank 0 holds of each
# block. At its highest that is the full block under FSDP alone, and on the mesh the half that "tp" leaves it.

# %%
from fsdp_utils.collectives import play

play({f"replay: {name}": run for name, run in replays.items()})

# %% [markdown]
# Look at the gaps in the lane of computation:
#
# - **FSDP alone**: all are under its own gathers and reductions.
# - **"tp" between hosts**: nearly all are under the lane "in the model".
# - **"tp" within hosts**: both kinds are left, and short. FSDP's are where there is nothing to compute beside
#   them: at the beginning of forward and of backward, and at the end.
#
# (The recording has a block's backward pass in one
# piece, so the player shows what is sent along "tp" after it. On a GPU it is sent in between; all of it is
# waited for in either case.)

# %% tags=["check"]
alone_s, within_s, between_s = replays.values()
assert abs(alone_s.compute_s - within_s.compute_s) < 1e-9
assert min(alone_s.step_s, between_s.step_s) > 1.2 * within_s.step_s
assert within_s.exposed_s < alone_s.exposed_s / 2
print("Checked: tp within hosts is the fastest of the three by a fifth or more.")

# %% [markdown]
# ## Your turn 2 · Lay the mesh over the hosts
#
# `init_device_mesh` fills the mesh with the ranks in order. That is right where ranks are numbered host by
# host. Some launchers deal them out in turn (Slurm's `--distribution=cyclic`): rank 0 on host 0, rank 1 on
# host 1, rank 2 on host 0 again. Write `my_mesh`: it gets the host of each rank, such as `[0, 1, 0, 1]`, and
# returns the rows of the mesh as lists of ranks. A row is a group along "tp", a column a group along "fsdp".
#
# A folded cell builds your mesh for `[0, 1, 0, 1]`, trains with it on the real ranks, and replays the step
# with the sizes of above. It also looks at your meshes for other hosts. Edit the next cell, then run it and
# the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Which of the two dimensions should stay on the fast link? Then which ranks belong in one row?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_mesh(host_of):                           # such as [0, 1, 0, 1]
    return None                                 # your lines here; return rows, such as [[0, 1], [2, 3]]


# %% jupyter={"source_hidden": true}
# %%ranks
OTHER_HOSTS = ([0, 0, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3], [1, 0, 0, 1, 1, 0, 0, 1])


def is_mesh(rows, count):
    flat = sorted(member for row in rows for member in row)
    return flat == list(range(count)) and len({len(row) for row in rows}) == 1


def as_rows(answer):
    """Lists of ranks, also from an array or a tensor; no rows where it is something else."""
    try:
        return [[int(member) for member in row] for row in answer]
    except (TypeError, ValueError):
        return []


def on_hosts(host_of):
    """A change of events: the links between these hosts."""
    links = ("within a host", "between hosts")
    return lambda e: {"link": links[len({host_of[r] for r in e.ranks}) > 1]} if e.is_collective else {}


def score_mesh(lay):
    """Train on the mesh that was written, and replay its step."""
    hosts = [0, 1, 0, 1]
    answer = lay(list(hosts))
    if answer is None:
        return None
    rows = as_rows(answer)
    others = [(given, as_rows(lay(list(given)))) for given in OTHER_HOSTS]
    good = is_mesh(rows, world) and all(is_mesh(found, len(given)) for given, found in others)
    result = {"each rank once, in rows of equal length": good}
    if not good:
        return result
    made = DeviceMesh("cpu", rows, mesh_dim_names=("fsdp", "tp"))
    model = with_sequence_plan(made)
    losses, trace = train(model, adamw(model), made, True)
    run = imagine(trace, 16384, change=on_hosts(hosts))
    return {
        **result,
        "the losses of one process": all(abs(a - b) < 1e-3 for a, b in zip(losses, alone)),
        "ms in which it only sends": round(1e3 * run.exposed_s, 1),
        "rows over several hosts, elsewhere": sum(
            len({given[r] for r in row}) > 1 for given, found in others for row in found
        ),
        "replay": run,
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_mesh(my_mesh)",
    {
        "each rank once, in rows of equal length": exactly(
            True,
            otherwise="A mesh is a list of rows of equal length in which each rank stands once. That has to "
            "hold for other hosts, too, such as four hosts with two ranks each.",
        ),
        "the losses of one process": exactly(
            True, otherwise="The mesh trains something else: are the samples those of its place along fsdp?"
        ),
        "ms in which it only sends": at_most(
            10,
            otherwise="The slow link carries too much: the activations along tp, or, without tp, all "
            "parameters in full.",
        ),
        "rows over several hosts, elsewhere": exactly(
            0, otherwise="For other hosts some of your rows have ranks of more than one host."
        ),
    },
)

# %% jupyter={"source_hidden": true}
runs = {"replay: target": run_solution(16, 2)[0]["replay"]}
if mine := yours(2, "replay"):
    runs["replay: yours"] = mine[0]
play(runs)

# %% tags=["solution"] turn=2
# %%ranks
def my_mesh(host_of):
    hosts = sorted(set(host_of))
    return [[rank for rank, host in enumerate(host_of) if host == wanted] for wanted in hosts]

# %% tags=["wrong"] turn=2
# %%ranks
def my_mesh(host_of):
    half = len(host_of) // 2
    return [list(range(half)), list(range(half, len(host_of)))]

# %% tags=["wrong"] turn=2
# %%ranks
def my_mesh(host_of):
    return [[rank] for rank in range(len(host_of))]

# %% tags=["wrong"] turn=2
# %%ranks
def my_mesh(host_of):
    return [list(range(len(host_of)))]

# %% tags=["wrong"] turn=2
# %%ranks
def my_mesh(host_of):
    return [[0, 2], [1, 3]]

# %% tags=["wrong"] turn=2
# %%ranks
def my_mesh(host_of):
    return [0, 2, 1, 3]

# %% tags=["check"]
try_answers(16)

# %% [markdown]
# ## When FSDP alone ends
#
# Now let the cluster grow, while the step keeps its 256 samples of 4,096 tokens: a larger batch does not
# always train as well. Hosts have eight ranks. Each rank has less and less to compute, but under FSDP it
# still gathers every block in full. And with more than 256 ranks some have no sample at all: **the batch per
# rank falls below one**.
#
# A folded cell replays the recorded orders with that many ranks. With tensor parallelism a row is one host,
# so "tp" is 8 and FSDP has an eighth of the ranks along it.

# %% tags=["scale"] jupyter={"source_hidden": true}
# %%ranks
def at_scale(way, size, tp):
    """One step of the recorded way on so many ranks, in hosts of eight."""
    fsdp, recorded_tp = size // tp, 1 if tp == 1 else 2

    def change(event):
        if not event.is_collective:
            return {}
        if event.dimension == "tp":
            part = 1 if event.module else 2 / fsdp              # of the samples; a recorded row has half
            place = {"ranks": tuple(range(tp)), "link": "within a host"}
        else:
            part = recorded_tp / tp                             # of a unit
            place = {"ranks": tuple(range(fsdp)), "link": "between hosts"}
        return {"bytes_in": round(event.bytes * part), "bytes_out": 0, **place}

    return imagine(results[way][1], 256 * 4096, size, change)


sizes = (32, 64, 128, 256, 512, 1024, 2048)
scaled = {
    "FSDP alone": {n: at_scale("FSDP, 4 ranks", n, 1) for n in sizes if n <= 256},
    "with tp = 8": {n: at_scale("2 x 2, tensor and sequence", n, 8) for n in sizes},
}

# %% jupyter={"source_hidden": true}
scaled, sizes = ranks.get("(scaled, sizes)")[0]

fig, (axes,) = plots.figure(width=7.0, height=3.0)
for (name, runs), color in zip(scaled.items(), plots.RANK_COLORS):
    axes.plot(list(runs), [1e3 * run.step_s for run in runs.values()], "o-", color=color, label=name)
compute = [1e3 * scaled["with tp = 8"][n].compute_s for n in sizes]
axes.plot(sizes, compute, ":", color=plots.INK, label="computation alone")
last = scaled["FSDP alone"][256]
axes.text(280, 1.1e3 * last.step_s, "one sample each:\nit ends here", fontsize=8)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(sizes, [str(n) for n in sizes])
ticks = [8, 16, 32, 64, 128, 256, 512]
axes.set_yticks(ticks, [str(ms) for ms in ticks])
axes.set(xlabel="ranks, in hosts of eight", ylabel="ms a step", title="replay: the same batch on more ranks")
axes.legend()
plots.show(fig, alt="Step time against ranks: FSDP alone flattens and ends at 256, with tp it falls on.")

# %% [markdown]
# - On **few ranks** there is much to compute. FSDP hides its gathers behind it, and tensor parallelism only
#   costs time, because what goes along "tp" is not hidden: half as much again on 32 ranks.
# - From some size on, FSDP alone **hardly gets faster**: a step takes as long as its gathers and reductions,
#   which do not shrink. Here twice the ranks, 256 instead of 128, save an eighth of a step.
# - FSDP alone **ends** at one sample for each rank. With "tp" of 8, each *row* needs a sample, so it goes on
#   to eight times as many ranks, and each rank gathers an eighth of a block.
#
# So use tensor parallelism where FSDP's sending is no longer hidden or the samples have run out. There is a
# third reason, memory: where the activations of a single sample, or one gathered unit, do not fit on a rank,
# tensor and sequence parallelism divide them.

# %% tags=["check"]
fsdp_ms, tp_ms = ({n: 1e3 * run.step_s for n, run in runs.items()} for runs in scaled.values())
assert all(fsdp_ms[n] < tp_ms[n] for n in (32, 64, 128))
assert 1.4 < tp_ms[32] / fsdp_ms[32] < 1.6
assert 0.86 < fsdp_ms[256] / fsdp_ms[128] < 0.89
assert fsdp_ms[256] > tp_ms[256] > tp_ms[512] > tp_ms[1024] > tp_ms[2048]
print("Checked: FSDP alone is faster on up to 128 ranks, slower on 256, and then ends.")

# %% [markdown]
# ## When shards are too small
#
# The replays above count bytes only. But around a ring of `n` ranks an all_gather takes `n - 1` hops, each
# with one shard, and a hop takes a latency besides the time for its bytes: here, by assumption, 5 µs. More
# ranks mean smaller shards and more hops.

# %%
HOP_S = 5e-6


def ring(numel, n):
    """KiB of a shard in bf16, ms of its all_gather over n ranks, and the part of it that is latency."""
    shard = 2 * numel / n
    seconds = (n - 1) * (HOP_S + shard / (40 * 2**30))
    return shard / 1024, 1e3 * seconds, (n - 1) * HOP_S / seconds


blocks = {"width 1,024": 12 * 1024**2, "width 4,096": 12 * 4096**2}

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.0, height=2.8)
powers = [2**exponent for exponent in range(3, 12)]
for (name, numel), color in zip(blocks.items(), plots.RANK_COLORS):
    axes.plot(powers, [ring(numel, n)[1] for n in powers], "o-", color=color, label=f"a block of {name}")
    by_bytes = [ring(numel, n)[1] * (1 - ring(numel, n)[2]) for n in powers]
    axes.plot(powers, by_bytes, ":", color=color, label="without latency")
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(powers, [str(n) for n in powers])
ticks = [0.5, 1, 2, 4, 8, 16]
axes.set_yticks(ticks, [str(ms) for ms in ticks])
axes.set(xlabel="ranks in the ring", ylabel="ms of an all_gather", title="calculated: a block in bf16")
axes.legend(fontsize=8)
plots.show(fig, alt="Time of an all_gather against ranks: by bytes nearly constant, with latency rising.")

# %% [markdown]
# - **Without latency** (dotted) the time hardly depends on the number of ranks.
# - **Half of the gather is latency** for a width of 4,096 on 2,048 ranks, and for a width of 1,024 already on
#   about 128. From there, twice the ranks make the gather half as long again; the more of it is latency, the
#   closer this comes to twice as long.
# - **With "tp" of 8** the shard of a rank is as small, but the ring has an eighth of the hops.
#
# NCCL chooses between several algorithms, some with fewer hops, so measure on your own cluster before you
# believe this figure.
#
# Shards can even be empty: by default `fully_shard` cuts along the first dimension, between rows. Of a matrix
# with three rows of eight, four ranks get this many elements:

# %%
# %%ranks
small = fully_shard(nn.Linear(8, 3, bias=False), mesh=all_four["fsdp"])
elements = small.weight.to_local().numel()

# %%
ranks.get("elements")

# %% [markdown]
# The last rank holds nothing. It still takes part in each collective, which is padded to four rows.
# (`fsdp_utils.shard` cuts such a matrix between its columns, which four ranks can share evenly.)
#
# **Two alternatives.** HYBRID_SHARD of [lesson 6](06_sharding_strategies.ipynb) keeps the gathers within a
# host. It needs a model whose shards fit on one host, and still a sample for each rank. *Async tensor
# parallelism* hides a part of what goes along "tp": on GPUs `torch.compile` sends a product in pieces while
# the next piece is computed (a private switch turns it on, `torch._inductor.config._micro_pipeline_tp`).

# %% tags=["check"]
assert ranks.get("elements") == [8, 8, 8, 0]
assert 0.5 < ring(blocks["width 4,096"], 2048)[2] < 0.55
assert 0.4 < ring(blocks["width 1,024"], 128)[2] < 0.6
assert ring(blocks["width 1,024"], 256)[1] < ring(blocks["width 1,024"], 2048)[1]
print("Checked: with more ranks latency takes half of the gather, and a rank may hold nothing.")

# %% [markdown]
# ## Checkpoints from one mesh to another
#
# A checkpoint of `save_distributed` ([lesson
# 8](08_local_state_dict_and_distributed_checkpoints.ipynb)) knows which rows and columns each rank has saved.
# So it can be loaded on another mesh: here from 2 x 2 to four ranks of FSDP alone (4 x 1), and to a model
# that is not sharded, which every rank loads in full (1 x 1). Each goes on with steps 3 and 4.

# %% tags=["checkpoints"]
# %%ranks
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
model = with_sequence_plan(mesh)
optimizer = adamw(model)
train(model, optimizer, mesh, True, steps=range(2))
save_distributed(folder[0], model, optimizer, step=2)
resumed = {"2 x 2, goes on": train(model, optimizer, mesh, True, steps=range(2, 4))[0]}
for name, make, its_mesh in (("4 x 1, loaded", fsdp_alone, all_four), ("1 x 1, loaded", build, None)):
    model = make()
    optimizer = adamw(model)
    load_distributed(folder[0], model, optimizer)
    resumed[name] = train(model, optimizer, its_mesh, steps=range(2, 4))[0]

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", "3", "4"],
    [[name, *(f"{loss:.4f}" for loss in losses)] for name, losses in ranks.get("resumed")[0].items()],
)

# %% tags=["check"]
# %%ranks 0
import shutil

for losses in resumed.values():
    torch.testing.assert_close(losses, alone[2:], rtol=1e-4, atol=1e-5)
shutil.rmtree(folder[0])
print("Checked: all three go on with the losses of the run that was never stopped.")

# %% [markdown]
# ## More dimensions
#
# A mesh can have more dimensions. Each of these cuts something else:
#
# - **Pipeline parallelism** cuts the model between its layers: each rank has some of the blocks and passes
#   activations on to the next. It sends little, so it suits slow links, but ranks wait for each other at the
#   beginning and the end of a step.
#   [torch.distributed.pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html)
# - **Context parallelism** cuts the sequence everywhere, inside attention too, where keys and values are
#   passed around. It is for sequences that do not fit on one rank.
#   [Tutorial](https://docs.pytorch.org/tutorials/unstable/context_parallel.html)
# - **Expert parallelism** is for mixtures of experts: each rank has some of the experts, and tokens are sent
#   to theirs and back by all_to_all. [GShard](https://arxiv.org/abs/2006.16668)
#
# [torchtitan](https://github.com/pytorch/torchtitan) puts all of them together with `fully_shard`.
#
# ## When it goes wrong
#
# The worst mistake raises no error: the ranks of a row get *different* samples, from a sampler that knows
# only `rank` and `world`. The plan says that inputs are `Replicate()`, and PyTorch does not compare them.

# %%
# %%ranks
def train_on_own_samples():
    model = with_tensor_plan(mesh)
    optimizer, losses = adamw(model), []
    for number in range(4):
        tokens = batch(number, rank, world)                     # wrong: by rank, not by the place along fsdp
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / world
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


mixed = {"one process": alone, "other samples within a row": train_on_own_samples()}

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", "1", "2", "3", "4"],
    [[name, *(f"{loss:.4f}" for loss in losses)] for name, losses in ranks.get("mixed")[0].items()],
)

# %% [markdown]
# The losses look like losses, and are wrong from the first step on: the all_reduce adds up activations of
# different samples. Compare the first step with one process, as [lesson 15](15_when_it_hangs.ipynb) does.
#
# Other mistakes raise errors, whose text does not always say the cause:

# %%
# %%ranks
def shard_first():
    model = fsdp_alone()
    parallelize_module(model.blocks[0], mesh["tp"], tensor_plan)


def whole_mesh():
    model = build()
    parallelize_module(model.blocks[0], mesh["tp"], tensor_plan)
    fully_shard(model.blocks[0], mesh=mesh)


def no_mesh():
    model = build()
    parallelize_module(model.blocks[0], mesh["tp"], tensor_plan)
    fully_shard(model.blocks[0])


def clip():
    model = with_tensor_plan(mesh)
    step(model, 0, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class WithFourHeads(Attention):
    def forward(self, x):
        return self.o(self.v(x).unflatten(-1, (4, 16)).flatten(-2))


def four_heads():
    model = build()
    model.blocks[0].attention = WithFourHeads(WIDTH)
    step(with_tensor_plan(mesh, model), 0, mesh)


# %% jupyter={"source_hidden": true}
# %%ranks
def error_of(mistake):
    try:
        mistake()
    except Exception as error:
        text = str(error).splitlines()[0]
        return f"{type(error).__name__}: {text[:90]}{' …' * (len(text) > 90)}"
    return "no error"


mistakes = (shard_first, whole_mesh, no_mesh, clip, four_heads)
errors = {mistake.__name__: error_of(mistake) for mistake in mistakes}

# %% jupyter={"source_hidden": true}
Table(["mistake", "what PyTorch says"], [[name, text] for name, text in ranks.get("errors")[0].items()])

# %% [markdown]
# - **`shard_first`**: `fully_shard` came before `parallelize_module`. Call `parallelize_module` first.
# - **`whole_mesh`** and **`no_mesh`**: `fully_shard` takes its own dimension, `mesh["fsdp"]`, of the mesh
#   whose "tp" the model is on.
# - **`clip`**: the tensor plan leaves some parameters out (the norms, the embedding and the head). They are
#   on a mesh of one dimension and the others on a mesh of two, and `clip_grad_norm_` cannot stack the norms
#   of both. Put every module that has parameters into the plan, as the sequence plan does.
# - **`four_heads`**: the forward pass names the number of heads, and a rank has fewer. Let it take as many as
#   are there: `-1`.
# - **More all_reduces in backward than two for each block.** Each of `q`, `k` and `v` turns its input into a
#   replicated tensor for itself, and reduces its gradient for itself. `PrepareModuleInput` on attention does
#   it once. A folded cell counts both.

# %% tags=["check"]
# %%ranks
import logging


def backward_reductions(plan):
    model = build()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh["fsdp"])
    with record_collectives(model) as trace:
        step(model, 0, mesh)
    return sum(e.dimension == "tp" and e.phase == "backward" for e in trace.collectives)


without = {name: style for name, style in tensor_plan.items() if name != "attention"}
counts = backward_reductions(tensor_plan), backward_reductions(without)
assert counts == (2 * BLOCKS, 4 * BLOCKS)
assert all(abs(a - b) > 1e-3 for a, b in zip(mixed["other samples within a row"], alone))
assert "no error" not in errors.values()
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
model = with_sequence_plan(mesh)
step(model, 0, mesh, True)
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
one = build()
step(one, 0, None)
torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 1.0), rtol=1e-4, atol=1e-6)
if rank == 0:
    print("Checked: two reductions a block in backward, four without PrepareModuleInput; each mistake shows.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
slow = {n: run.exposed_s / run.step_s for n, run in scaled["FSDP alone"].items()}
share = sent["2 x 2, tensor and sequence"]["fsdp"] / sent["FSDP, 4 ranks"]["fsdp"]
lesson.claims(
    16,
    {
        "ring-latency": "FSDP's groups are smaller by the size of tp: 2 instead of 4 here. Latency is for "
        f"GPUs to say. By bytes alone, {slow[128]:.0%} of a step only sends on 128 ranks in the replay, and "
        f"{slow[256]:.0%} on 256. Here tp cuts what is sent along fsdp to {share:.0%}.",
        "data-parallel-limit": "The limit is real: no more ranks than samples. Tensor parallelism moves it "
        "by the size of tp: from 256 to 2,048 in the replay. It is not the only way: context and pipeline "
        "parallelism use more ranks for a batch, too.",
        "sequence-is-free": "Yes: for the four blocks, as many bytes to the byte. Embedding, norm and head, "
        "cut as well, add two all_gathers and two reduce_scatters, and there are small all_reduces for the "
        "norms' gradients and the loss.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Tensor parallelism cuts the computation: rows of the first weight, columns of the second, one all_reduce
#   of activations. FSDP cuts what is held between the computations, and sends parameters and gradients.
# - First `parallelize_module` on `mesh["tp"]`, then `fully_shard` on `mesh["fsdp"]`. The ranks of a "tp"
#   group get the same samples.
# - Along "fsdp" the bytes go with the parameters, and hide behind computation. Along "tp" they go with the
#   tokens, and the computation waits for them: "tp" belongs on the fast link, within a host.
# - Use tensor parallelism where FSDP's sending is no longer hidden, where the samples have run out, or where
#   one sample does not fit on a rank. Elsewhere it costs time.
# - A checkpoint of one mesh loads on another.
#
# ## Next
#
# [Lesson 17](17_fine_tune_three_ways.ipynb) fine-tunes a model, from its config to the checkpoint, in three
# ways.
#
# [← lesson 15](15_when_it_hangs.ipynb) · [lesson 17 →](17_fine_tune_three_ways.ipynb)

# %% [markdown]
# # 2 · Activation checkpointing
#
# FSDP shards what a model *has*: parameters, gradients, optimizer state. It does not shard what a forward
# pass *leaves behind* for the backward pass. With large batches or long sequences that can be most of the
# memory. In this lesson you throw nearly all of it away, compute it again when it is needed, and measure
# what that costs.

# %% [markdown] tags=["card"]
# learn:
# - what autograd keeps from forward to backward, tensor by tensor
# - 'five ways to keep less: all blocks, every second one, by operation, on the CPU, and combined'
# - what recomputing really costs, and why it is less than a full forward pass
# - where the checkpoint goes under `fully_shard`, under FSDP1 and under `torch.compile`
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb): ranks, units, all_gather · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: '[Activation checkpointing](https://www.loom.com/share/31749107033841959989aa8da45487c7), 2022.
#   Since then: FSDP2, checkpoints that choose by operation, and `torch.compile`.'

# %% [markdown]
# **The question of this lesson:** which results of the forward pass does a rank keep until the backward pass,
# which does it compute a second time, and what does the second time cost?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots


def what_is_kept(ways, blocks=6):
    fig, (axes,) = plots.figure(width=7.5, height=1.9)
    for row, kept in enumerate(ways.values()):
        for block in range(blocks):
            axes.barh(row, 0.9, left=block, height=0.7, color=plots.FAINT)
            width = 0.9 if kept(block) else 0.09
            axes.barh(row, width, left=block, height=0.7, color=plots.RANK_COLORS[row])
    axes.set_yticks(range(len(ways)), list(ways))
    axes.set_xticks([i + 0.45 for i in range(blocks)], [f"block {i}" for i in range(blocks)])
    axes.set(ylim=(len(ways) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return plots.show(fig, alt="What is kept until backward without checkpoints and with two kinds of them.")


what_is_kept(
    {
        "no checkpoint": lambda block: True,
        "every second block": lambda block: block % 2,
        "every block": lambda block: False,
    }
)

# %% [markdown]
# The drawing shows a model of six blocks. What is coloured stays in memory from the forward pass to the
# backward pass. What is grey is thrown away and computed again: of a block with a checkpoint, only its input
# stays.
#
# ## In your own code
#
# Put `checkpoint_wrapper` around each block, then `fully_shard` around that. Save the script as `train.py`
# and start it with `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# torch.manual_seed(0)                                  # the same weights on every rank
# model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)])
# for index, block in enumerate(model):
#     model[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh)    # the checkpoint is inside
# fully_shard(model, mesh=mesh)
# optimizer = torch.optim.AdamW(model.parameters())     # after sharding
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# for step in range(5):
#     x = torch.randn(4, 30, 64, device=device)         # your data
#     model(x).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# `checkpoint_wrapper` changes no name in `state_dict()`, so checkpoints on disk stay readable. The
# underscore in `_checkpoint` says that the module is private; PyTorch's own training code, torchtitan,
# imports it all the same. The public function below it is `torch.utils.checkpoint.checkpoint(block, x,
# use_reentrant=False)`, which you call inside of your model's `forward`.
#
# ## Four ranks

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch._dynamo", "sklearn.datasets"])            # slow to import

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## What a forward pass leaves behind
#
# The backward pass of `y = x @ w` needs `x` and `w` again, so autograd keeps both. The weights `w` exist
# anyway. The tensors in between, the **activations**, are kept for the backward pass alone. They grow with
# the batch, with the length of the sequence and with the depth of the model. FSDP does not shard them: every
# rank holds the activations of its own samples in full.
#
# Here is a block of a transformer, written out so that you can see each tensor.

# %%
# %%ranks
class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                               # f32[batch, tokens, width]
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                            # each f32[batch, heads, tokens, 16]
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))           # f32[batch, tokens, width]
        return x + self.down(F.gelu(self.up(self.norm2(x))))            # f32[batch, tokens, width]


# %% [markdown]
# `saved_tensors_hooks` calls a function for every tensor that autograd keeps. The function below leaves out
# the weights. Where two tensors share memory, it counts the memory once.

# %%
# %%ranks
from torch.autograd.graph import saved_tensors_hooks


def saved_by(block, x):
    """What autograd keeps when the block runs: for each piece of memory, a shape and its bytes."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def look(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = (list(tensor.shape), memory.nbytes())
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        y = block(x)
    return list(kept.values()), y


x = torch.randn(24 // world, 64, 64, device=device, requires_grad=True)     # f32[24 / world, tokens, width]
kept, _ = saved_by(Block().to(device), x)

# %% jupyter={"source_hidden": true}
x_bytes = ranks.get("x.nbytes")[0]
kept = ranks.get("kept")[0]
ON_CPU = [
    "the block's input",
    *("mean in norm1", "1 / deviation in norm1"),
    "result of norm1, for qkv",
    "queries, keys and values, for attention",
    "sums of the softmax in attention",
    "result of attention, for out",
    "x after attention, for norm2",
    *("mean in norm2", "1 / deviation in norm2"),
    "result of norm2, for up",
    "result of up, for gelu",
    "result of gelu, for down",
]
labels = ON_CPU if len(kept) == len(ON_CPU) else [""] * len(kept)
Table(
    ["tensor", "shape", "times the input"],
    [
        [label, str(shape), f"{nbytes / x_bytes:.2f}"]
        for label, (shape, nbytes) in zip(labels, kept, strict=True)
    ],
    note=f"In all {sum(nbytes for _, nbytes in kept) / x_bytes:.2f} times the size of the block's input.",
)

# %% [markdown]
# One block keeps 16 times the size of its own input, and six blocks keep 96 times. Half of that is the wide
# middle of the feed-forward network, before and after `gelu`, with 4 each. Queries, keys and values take 3.
#
# ## The idea
#
# All activations of a block follow from its input. So keep the input alone and let the rest go. When the
# backward pass arrives at the block, run the block's forward once more, from the input, and go on. This is
# **activation checkpointing**: it buys memory with computation.
#
# **Predict before you go on.** Take a model of six such blocks. A backward pass takes twice the FLOPs
# (multiplications and additions) of a forward pass, because each matrix product has two gradients. With a
# checkpoint around every block: what share of the activations stays? And how many FLOPs more does a training
# step take?
#
# <details><summary>Answer</summary>
#
# One in sixteen, about 6%: only the inputs stay. The forward pass is one third of a step and runs twice, so a
# step should take a third more. The measurement below says less. You will see why.
#
# </details>
#
# ## A model, and how to measure it
#
# The data are the digits of lesson 0, but now each of the 64 pixels is a token. `build` takes a **recipe**: a
# function that gets a block and its number and returns what should stand in the block's place.

# %%
# %%ranks
class Model(nn.Module):
    def __init__(self, depth=6, width=64):
        super().__init__()
        self.pixel, self.place = nn.Linear(1, width), nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):                                          # f32[batch, 64, 1]
        x = self.pixel(pixels) + self.place                             # f32[batch, 64, width]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))                                     # f32[batch, 10]


# %%
# %%ranks
def build(recipe):
    torch.manual_seed(0)
    model = Model().to(device)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = recipe(block, index)
    return model


def loss_of(model, rows):
    return F.cross_entropy(model(images[rows]), labels[rows])


# %% jupyter={"source_hidden": true}
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)[..., None]  # f32[1797, 64, 1]
labels = torch.tensor(digits.target, device=device)                                     # i64[1797]

# %% [markdown]
# `measure` runs two training steps. In the first one the `Meter` of lesson 0 counts the bytes of all tensors
# that are alive. In the second one PyTorch's `FlopCounterMode` counts the FLOPs of matrix products and of
# attention.

# %% jupyter={"source_hidden": true}
# %%ranks
# FlopCounterMode of PyTorch 2.13 does not count attention on the CPU, unless it is told how.
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
attention = "_scaled_dot_product_flash_attention_for_cpu"
CPU_ATTENTION = {
    getattr(aten, attention): lambda *shapes, **__: sdpa_flop_count(*shapes[:3]),
    getattr(aten, attention + "_backward"): lambda *shapes, **__: sdpa_backward_flop_count(*shapes[:4]),
}


# %%
# %%ranks
from types import SimpleNamespace

from fsdp_utils.lessons.meter import Meter


def measure(model, rows=slice(0, 24 // world)):
    with Meter([*model.parameters(), images, labels], device=device) as meter:
        loss = loss_of(model, rows)
        kept = meter.tensor_bytes[-1] - meter.held_bytes        # bytes alive between forward and backward
        loss.backward()
    course = [nbytes - meter.held_bytes for nbytes in meter.tensor_bytes]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as flops:
        flops.mod_tracker.__exit__()                            # its hooks on modules forbid autograd.grad
        loss = loss_of(model, rows)
        forward = flops.get_total_flops()
        loss.backward()
    backward = flops.get_total_flops() - forward                # FLOPs, recomputation included
    return SimpleNamespace(kept=kept, course=course, forward=forward, backward=backward, gradients=gradients)


none = measure(build(lambda block, index: block))

# %% jupyter={"source_hidden": true}
per_block, ratio = ranks.get("(none.kept / 6 / x.nbytes, none.backward / none.forward)")[0]
Table(
    ["without checkpoints", "measured"],
    [
        ["activations kept per block, times the block's input", f"{per_block:.2f}"],
        ["FLOPs of backward, times those of forward", f"{ratio:.2f}"],
    ],
)

# %% [markdown]
# The meter agrees with the list above: 16 times the input for each block. The backward pass takes a little
# more than twice the FLOPs of the forward pass, because attention computes its scores again there.

# %% tags=["check"]
assert 16 < per_block < 16.5
assert 2 < ratio < 2.2
print("Checked: 16 times the input in each block, and backward takes 2.0 to 2.2 times the FLOPs of forward.")

# %% [markdown]
# ## Every block: only the inputs stay
#
# `checkpoint_wrapper` turns a module into one that keeps its input alone.

# %% tags=["full"]
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

full = measure(build(lambda block, index: checkpoint_wrapper(block)))


def extra_flops(step):
    """FLOPs beyond those of a step without checkpoints, as a share of it."""
    return (step.forward + step.backward) / (none.forward + none.backward) - 1


# %% jupyter={"source_hidden": true}
def compared(names):
    """Rows of a table: for each measured step its name, the share of activations kept, and extra FLOPs."""
    measured = ranks.get("[" + ", ".join(f"({n}.kept / none.kept, extra_flops({n}))" for n in names) + "]")[0]
    return [[how, f"{kept:.1%}", f"{flops:+.1%}"] for how, (kept, flops) in zip(names.values(), measured)]


HEAD = ["", "activations kept", "FLOPs of a step"]
Table(HEAD, compared({"none": "no checkpoint", "full": "every block"}))

# %% [markdown]
# The memory is as predicted, and the gradients are the same. But the price is less than a third: PyTorch
# stops the second forward as soon as it has recomputed all that the backward pass asks for. The backward
# pass never asks for the result of a block's *last* matrix product, `down`, because only an addition follows
# it, and the backward pass of an addition needs no activations. This **early stop** can be switched off.

# %%
# %%ranks
from torch.utils.checkpoint import set_checkpoint_early_stop

with set_checkpoint_early_stop(False):
    to_the_end = measure(build(lambda block, index: checkpoint_wrapper(block)))

# %% jupyter={"source_hidden": true}
Table(HEAD, compared({"full": "every block", "to_the_end": "every block, without early stop"}))

# %% [markdown]
# Without early stop the price is nearly the third that we expected. In our block `down` holds a third of the
# weights, so early stop saves more than a quarter of the recomputation.

# %% tags=["check"]
# %%ranks 0
assert full.kept < 0.07 * none.kept
for gradient, expected in zip(full.gradients, none.gradients, strict=True):
    torch.testing.assert_close(gradient, expected)
assert 0.29 < extra_flops(to_the_end) < 1 / 3
assert extra_flops(full) < 0.75 * extra_flops(to_the_end)
print("Checked: 7% of the activations or less, the same gradients, a quarter saved by early stop.")

# %% [markdown]
# The figure shows all activations and gradients that are alive, operation by operation.

# %% jupyter={"source_hidden": true}
def courses(steps):
    fig, panels = plots.figure(len(steps), width=8.5, height=2.6)
    steps = {name: [nbytes / 2**20 for nbytes in course] for name, course in steps.items()}
    top = max(max(course) for course in steps.values())
    for axes, color, (name, course) in zip(panels, plots.RANK_COLORS, steps.items()):
        axes.fill_between(range(len(course)), course, color=color, linewidth=0)
        at, peak = course.index(max(course)), max(course)
        side = "right" if at > 0.75 * len(course) else "left" if at < 0.25 * len(course) else "center"
        axes.text(at, peak + 0.03 * top, f"peak {peak:.1f} MiB", ha=side)
        axes.set(title=name, xlabel="operations of one step", xticks=[])
        axes.set(xlim=(0, len(course)), ylim=(0, 1.2 * top))
    panels[0].set_ylabel("activations and\ngradients, MiB")
    return plots.show(fig, alt=f"Bytes alive over one step: {', '.join(steps)}.")


none_course, full_course = ranks.get("(none.course, full.course)")[0]
courses({"no checkpoint": none_course, "every block": full_course})

# %% [markdown]
# Without checkpoints the memory grows through the forward pass and shrinks in the backward pass. With
# checkpoints it stays low in the forward pass. In the backward pass one block at a time is computed again
# and freed. The gradients of the weights rise slowly underneath. So the peak falls by less than the kept
# bytes do, from 9.6 MiB to 3.0: at the peak the activations of one block and most of the gradients are
# there.
#
# ## Your turn 1 · Write the checkpoint
#
# A checkpoint is an operation with a backward of its own, like `Gather` in lesson 0. The next cell has its
# forward: it runs the block, during which autograd is off and keeps nothing, and saves the input. The
# backward is yours.

# %%
# %%ranks
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, backward):               # x: f32[batch, tokens, width]
        ctx.block, ctx.backward_of_block = block, backward
        ctx.save_for_backward(x)
        return block(x)                                 # autograd is off inside of a forward like this

    @staticmethod
    def backward(ctx, grad):                            # f32[batch, tokens, width]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()                 # a leaf: its gradient ends up in x.grad
        return ctx.backward_of_block(ctx.block, x, grad), None, None


# %% [markdown]
# Write `my_backward`. It gets the block, the block's input `x`, and `grad`, the gradient of the block's
# output. It returns the gradient of `x`, and each weight of the block must have got its gradient in `.grad`.
#
# Edit the next cell, then run it and the three folded cells below it.
#
# <details><summary>Hint</summary>
#
# Three steps: run the block, run the backward pass of its output, return a gradient. Autograd is off in a
# backward, too. `with torch.enable_grad():` switches it on. `y.backward(grad)` starts a backward pass from a
# tensor `y` that is no scalar.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_backward(block, x, grad):                        # x, grad: f32[batch, tokens, width]
    return None                                         # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
class Recomputed(nn.Module):
    """A block under a reader's own checkpoint."""

    def __init__(self, block, backward):
        super().__init__()
        self.block, self.backward = block, backward

    def forward(self, x):
        return Recompute.apply(x, self.block, self.backward)


def score(backward):
    """Measure a step with this checkpoint around every block."""
    probe = torch.zeros(1, 64, 64, device=device, requires_grad=True)
    with torch.no_grad():
        try:
            if backward(Block().to(device), probe, torch.ones_like(probe)) is None:
                return None
        except RuntimeError as error:
            if "does not require grad" in str(error):
                return {"problem": "Backward begins at what does not require grad: switch autograd on."}
            raise
    model = build(lambda block, index: Recomputed(block, backward))
    loss_of(model, slice(0, 24 // world)).backward()
    pairs = [(p.grad, right) for p, right in zip(model.parameters(), none.gradients, strict=True)]
    wrong = sum(mine is None or not torch.allclose(mine, right, 1e-4, 1e-6) for mine, right in pairs)
    if wrong:                                                           # no use in measuring the rest
        return {"parameters with a missing or wrong gradient": wrong}
    step = measure(build(lambda block, index: Recomputed(block, backward)))
    return {
        "parameters with a missing or wrong gradient": wrong,
        "activations kept, %": 100 * step.kept / none.kept,
        "extra FLOPs of a step, %": 100 * extra_flops(step),
        "curve": step.course,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score(my_backward)",
    {
        "parameters with a missing or wrong gradient": exactly(
            0,
            otherwise="`x` and each weight of the block need their gradients, once each, and they start from "
            "`grad`. The rest is measured once they are right.",
        ),
        "activations kept, %": at_most(7, otherwise="More than the inputs is kept."),
        "extra FLOPs of a step, %": at_most(33, otherwise="A block runs more than twice."),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_backward(block, x, grad):                        # x, grad: f32[batch, tokens, width]
    with torch.enable_grad():
        y = block(x)
    y.backward(grad)
    return x.grad

# %% tags=["wrong"] turn=1
# %%ranks
def my_backward(block, x, grad):
    return grad

# %% tags=["wrong"] turn=1
# %%ranks
def my_backward(block, x, grad):
    with torch.enable_grad():
        y = block(x)
    return torch.autograd.grad(y, x, grad)[0]

# %% tags=["wrong"] turn=1
# %%ranks
def my_backward(block, x, grad):
    with torch.enable_grad():
        y = block(x)
        y.sum().backward()
    return x.grad

# %% tags=["wrong"] turn=1
# %%ranks
def my_backward(block, x, grad):
    with torch.enable_grad():
        y = block(x)
    y.backward(grad)
    return grad

# %% tags=["wrong"] turn=1 raises="does not require grad"
# %%ranks
def my_backward(block, x, grad):
    y = block(x)
    y.backward(grad)
    return x.grad

# %% jupyter={"source_hidden": true}
curves = {"no checkpoint": none_course, "target": run_solution(2, 1)[0]["curve"]}
if mine := yours(1, "curve"):
    curves["yours"] = mine[0]
courses(curves)

# %% [markdown]
# The panel "target" is the run of the folded solution. When yours works, run the cell with the plot again,
# and your run appears beside it.
#
# PyTorch calls a checkpoint of this kind **reentrant**, because it starts a backward pass inside of the
# backward pass. `checkpoint_wrapper` uses a newer kind by default, which works through hooks on saved
# tensors, as in `saved_by` above. Only the newer kind can stop early.
#
# ## Every second block
#
# If there is enough memory for half of the activations, pay for half of the recomputation.

# %%
# %%ranks
def every(k):
    return lambda block, index: checkpoint_wrapper(block) if index % k == 0 else block


second = measure(build(every(2)))

# %% jupyter={"source_hidden": true}
Table(HEAD, compared({"none": "no checkpoint", "second": "every second block", "full": "every block"}))

# %% [markdown]
# Half the price, and a little more than half of the activations stay.
#
# ## Selective: choose by operation
#
# Not all activations cost the same to compute again. The result of a matrix product is expensive. The results
# of `gelu` and LayerNorm are cheap, and take as many bytes. A **policy** is a function that is asked for the
# operations of the block, one by one, whether to save the result or to compute it again.

# %%
# %%ranks
from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def asking(policy):
    """The recipe that saves what the policy says, and computes all else again."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda block, index: checkpoint_wrapper(block, context_fn=contexts)


# %% [markdown]
# The operations have the names under which PyTorch dispatches them: `aten.addmm` is the product inside of an
# `nn.Linear` with a bias. The first policy saves all matrix products and the results of attention.

# %%
# %%ranks
aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTION = {                                                           # one kernel for each kind of machine
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def products(context, operation, *args, **kwargs):
    return SAVE if operation in MATRIX_PRODUCTS | ATTENTION else RECOMPUTE


selective = measure(build(asking(products)))

# %% jupyter={"source_hidden": true}
Table(HEAD, compared({"none": "no checkpoint", "selective": "selective: products and attention"}))

# %% [markdown]
# Nearly a third of the activations is gone, and no matrix product is computed twice. What is recomputed are
# operations on single elements, and LayerNorm, which `FlopCounterMode` does not count. They do take time,
# most of it for reading and writing memory.

# %% tags=["check"]
# %%ranks 0
assert abs(extra_flops(second) - extra_flops(full) / 2) < 0.001
assert extra_flops(selective) == 0
assert selective.kept < 0.75 * none.kept
print("Checked: every second block costs half of every block; selective recomputes no matrix product.")

# %% [markdown]
# ## Your turn 2 · A policy under a budget
#
# Suppose a GPU has room for 40% of the activations. Write a policy that keeps no more than that and adds at
# most 10% to the FLOPs of a step. (Every second block keeps 53% and adds 12%.) The table shows what each
# operation of a block would cost you: measured with a policy that saves this one alone.

# %% jupyter={"source_hidden": true}
# %%ranks
LINEARS = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}


def saving_one(name):
    def policy(context, operation, *args, **kwargs):
        if name == "attention":
            return SAVE if operation in ATTENTION else RECOMPUTE
        chosen = operation is aten.addmm.default and args[2].shape == LINEARS[name]
        return SAVE if chosen else RECOMPUTE

    return policy


costs = []
for name in ("qkv", "attention", "out", "up", "down"):
    step = measure(build(asking(saving_one(name))))
    costs.append((name, (step.kept - full.kept) / none.kept, extra_flops(full) - extra_flops(step)))

# %% jupyter={"source_hidden": true}
shape_of = ranks.get("LINEARS")[0]
full_kept, full_flops = ranks.get("(full.kept / none.kept, extra_flops(full))")[0]
Table(
    ["operation", "shape of its weight", "saving it keeps", "and spares FLOPs"],
    [
        ["(nothing saved)", "", f"{full_kept:.1%}", "0.0%"],
        *(
            [name, str(shape_of.get(name, "")), f"+{kept:.1%}", f"{abs(flops):.1%}"]
            for name, kept, flops in ranks.get("costs")[0]
        ),
    ],
    note=f"With nothing saved, a step takes {full_flops:.1%} more FLOPs. Keeps: share of all activations.",
)

# %% [markdown]
# `down` takes memory and spares nothing: because of early stop it is never computed again anyway.
#
# A policy is called with `operation` and with the operation's own arguments in `args`. For
# `aten.addmm.default` they are the bias, the input and the weight, so `args[2].shape` is the shape in the
# table. Return `SAVE` or `RECOMPUTE` for every operation. Edit the next cell, then run it and the two folded
# cells below it.
#
# <details><summary>Hint</summary>
#
# Attention gives the most for its memory. Then there is room for 27% more. Which products spare the most in
# that room?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    return None                                         # your lines here: SAVE or RECOMPUTE


# %% jupyter={"source_hidden": true}
# %%ranks
def score_policy(policy):
    if policy(None, aten.gelu.default, x) is None:
        return None
    step = measure(build(asking(policy)))
    pairs = zip(step.gradients, none.gradients, strict=True)
    return {
        "activations kept, %": 100 * step.kept / none.kept,
        "extra FLOPs of a step, %": 100 * extra_flops(step),
        "gradients that differ": sum(not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs),
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_policy(my_policy)",
    {
        "activations kept, %": at_most(
            40, otherwise="Too much is saved: add up the third column of the table, its first row included."
        ),
        "extra FLOPs of a step, %": at_most(
            10, otherwise="Too much is recomputed: the last column of what you save should be 13.3% or more."
        ),
        "gradients that differ": exactly(0, otherwise="The gradients differ from those without checkpoints."),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    is_up = operation is aten.addmm.default and args[2].shape == (64, 256)
    return SAVE if is_up or operation in ATTENTION else RECOMPUTE

# %% tags=["wrong"] turn=2
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    return SAVE if operation in MATRIX_PRODUCTS | ATTENTION else RECOMPUTE

# %% tags=["wrong"] turn=2
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    return SAVE if operation in ATTENTION else RECOMPUTE

# %% tags=["wrong"] turn=2
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    is_up = operation is aten.addmm.default and args[2].shape == (64, 256)
    return SAVE if is_up else RECOMPUTE

# %% tags=["wrong"] turn=2
# %%ranks
def my_policy(context, operation, *args, **kwargs):
    return RECOMPUTE

# %% [markdown]
# Two choices of operations meet the budget: attention with `up`, and attention with `qkv` and `out`. On a
# real model you choose in the same way. Which operations spare how much depends on the widths and on the
# length of the sequence: attention grows with its square.
#
# ## Offload: keep everything, elsewhere
#
# A third way moves the activations to the memory of the CPU and fetches them back for the backward pass. It
# needs the same hooks as `saved_by`: the first one stores a tensor, the second one fetches it.

# %%
# %%ranks
class Offloaded(nn.Module):
    """Keeps what autograd saves inside `module` in the memory of the CPU."""

    def __init__(self, module):
        super().__init__()
        self.module, self.host_bytes = module, 0

    def forward(self, x):
        self.host_bytes = 0
        weights = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def store(tensor):
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor                                           # the weights stay where they are
            host = tensor.to("cpu", copy=True)
            self.host_bytes += host.nbytes
            return host

        with saved_tensors_hooks(store, lambda tensor: tensor.to(device)):
            return self.module(x)


# %% [markdown]
# This machine may have no GPU. Then "device" and "host" are the same memory, but the copies are real, and
# they are counted separately. Offloading combines with checkpointing: then only the input of each block is
# moved.

# %% tags=["offload"]
# %%ranks
def measure_offloaded(recipe):
    model = build(lambda block, index: Offloaded(recipe(block, index)))
    step = measure(model)
    step.host = sum(block.host_bytes for block in model.blocks)
    if device.type == "cpu":
        step.kept -= step.host                                          # here the host is the device
    return step


offloaded = measure_offloaded(lambda block, index: block)
both = measure_offloaded(lambda block, index: checkpoint_wrapper(block))

# %% jupyter={"source_hidden": true}
on_host = ranks.get("(offloaded.host / none.kept, both.host / none.kept)")[0]
rows = compared({"offloaded": "offload", "both": "every block, its input offloaded"})
Table(
    ["", "kept on the device", "kept on the host", "FLOPs of a step"],
    [[how, kept, f"{host:.1%}", flops] for (how, kept, flops), host in zip(rows, on_host)],
)

# %% [markdown]
# Almost nothing stays on the device. The price is traffic: all those bytes cross the bus to the CPU and back
# in every step. More than 100% of them arrive there, because tensors that shared memory are copied one by
# one.
#
# PyTorch has both ready-made: `torch.autograd.graph.save_on_cpu` is the hooks, and `offload_wrapper`, beside
# `checkpoint_wrapper`, puts `save_on_cpu(pin_memory=True)` around a module. They also move weights that
# autograd has saved.

# %% tags=["check"]
# %%ranks 0
assert max(offloaded.kept, both.kept) < 0.02 * none.kept
assert (extra_flops(offloaded), extra_flops(both)) == (0, extra_flops(full))
print("Checked: less than 2% stays on the device, and offloading adds no FLOPs.")

# %% [markdown]
# ## The choice
#
# The figure shows all recipes. Further left is less memory, further down is less computation.

# %% jupyter={"source_hidden": true}
def trade_off(points):
    fig, (axes,) = plots.figure(width=6.5, height=3.2)
    axes.plot(*zip(points["no checkpoint"], points["every block"]), ":", color=plots.INK, linewidth=1)
    for index, (name, (kept, flops)) in enumerate(points.items()):
        axes.scatter(kept, flops, s=70, color=plots.RANK_COLORS[index], zorder=3)
        below = name == "every block"                                   # its neighbour is labelled above
        axes.annotate(name, (kept, flops), xytext=(8, -15 if below else 7), textcoords="offset points")
    axes.set(xlabel="activations kept on the device, %", xlim=(-4, 128))
    axes.set(ylabel="extra FLOPs of a step, %", ylim=(-3, 34))
    axes.grid(color=plots.FAINT, linewidth=0.6)
    return plots.show(fig, alt="Recipes by activations kept and extra FLOPs.")


names = {
    "none": "no checkpoint",
    "full": "every block",
    "second": "every second",
    "selective": "selective",
    "offloaded": "offload",
    "both": "every block + offload",
}
steps = ", ".join(names)
measured = ranks.get(f"[(100 * s.kept / none.kept, 100 * extra_flops(s)) for s in ({steps})]")[0]
points = dict(zip(names.values(), measured))
budget = run_solution(2, 2)[0]
points["turn 2"] = (budget["activations kept, %"], budget["extra FLOPs of a step, %"])
if mine := [*yours(2, "activations kept, %")[:1], *yours(2, "extra FLOPs of a step, %")[:1]]:
    points["yours"] = mine
trade_off(points)

# %% [markdown]
# The dotted line leads from "no checkpoint" to "every block", and "every second" lies on it. "turn 2", the
# folded solution, lies below the line: it pays fewer FLOPs for the same memory. When your policy works, run
# the cell again, and it appears as "yours". Offload looks best only because its price, the traffic, is on
# neither axis.
#
# ## With FSDP: what is inside what?
#
# Two things now happen around a block: FSDP gathers its weights, and the checkpoint runs it again. Which of
# the two should be inside the other? The rule is: **FSDP outside, the checkpoint inside, one checkpoint in
# one unit.** With FSDP2 the checkpoint comes first, then `fully_shard`.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard


def sharded(recipe):
    model = build(recipe)
    for block in model.blocks:
        fully_shard(block)                                              # around the checkpoint
    return fully_shard(model)


# %% [markdown]
# With FSDP1 the calls come the other way round. First wrap the model with FSDP, then let
# `apply_activation_checkpointing` look for blocks. It puts its wrapper around the block itself, *inside* the
# FSDP unit that is there already. The order of the calls is the reverse, and the order of the modules is the
# same.

# %%
# %%ranks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

by_block = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": device}


def fsdp1_outside(wrap=checkpoint_wrapper):
    model = FSDP(build(lambda block, index: block), **by_block)
    checkpoints.apply_activation_checkpointing(model, wrap, check_fn=lambda part: isinstance(part, Block))
    return model


def fsdp1_inside(wrap=checkpoint_wrapper):
    return FSDP(build(lambda block, index: wrap(block)), **by_block)


# %%
# %%ranks
for make in (fsdp1_outside, fsdp1_inside):
    outer = make().blocks[0]
    (inner,) = outer.children()
    print(f"{make.__name__}: {type(outer).__name__}({type(inner).__name__}(...))")

# %% [markdown]
# Both ways run without an error. In the wrong order, `fsdp1_inside`, FSDP1's policy still finds the blocks,
# and puts the unit *inside* the checkpoint. Then the second forward runs FSDP's own hooks again. What do they
# do? Count the gathers and the memory, for both orders, both versions of FSDP, and both kinds of checkpoint,
# the default one and the reentrant one of turn 1. The last row of each version has one checkpoint around
# *two* units.

# %%
# %%ranks
reentrant = partial(checkpoint_wrapper, checkpoint_impl=checkpoints.CheckpointImpl.REENTRANT)


def fsdp2_inside(wrap):
    return fully_shard(build(lambda block, index: wrap(fully_shard(block))))


def in_pairs(unit):
    """A checkpoint around two units at a time."""
    model = build(lambda block, index: unit(block))
    two_by_two = [nn.Sequential(*model.blocks[i : i + 2]) for i in range(0, 6, 2)]
    model.blocks = nn.ModuleList(checkpoint_wrapper(two) for two in two_by_two)
    return unit(model)


# %% tags=["order"] jupyter={"source_hidden": true}
# %%ranks
fsdp1_unit = partial(FSDP, device_id=device)
orders = {
    "FSDP2 · no checkpoint": sharded(lambda block, index: block),
    "FSDP2 · FSDP outside": sharded(lambda block, index: checkpoint_wrapper(block)),
    "FSDP2 · checkpoint outside": fsdp2_inside(checkpoint_wrapper),
    "FSDP2 · checkpoint outside, reentrant": fsdp2_inside(reentrant),
    "FSDP2 · a checkpoint around two units": in_pairs(fully_shard),
    "FSDP1 · no checkpoint": FSDP(build(lambda block, index: block), **by_block),
    "FSDP1 · FSDP outside": fsdp1_outside(),
    "FSDP1 · checkpoint outside": fsdp1_inside(),
    "FSDP1 · checkpoint outside, reentrant": fsdp1_inside(reentrant),
    "FSDP1 · a checkpoint around two units": in_pairs(fsdp1_unit),
}


def gathers(model):
    """All-gathers of one step, and KiB of full parameters at the peak, without buffers and with them."""
    for _ in range(2):                                                  # the first step sets up
        with Meter(model.parameters()) as meter:
            loss_of(model, slice(0, 24 // world)).backward()
        model.zero_grad()
    return meter.all_gathers, round(meter.peak_whole_bytes / 2**10), round(meter.peak_gather_bytes / 2**10)


counted = {name: gathers(model) for name, model in orders.items()}

# %% jupyter={"source_hidden": true}
counted = ranks.get("counted")[0]
Table(
    ["", "all_gathers", "full parameters at the peak, KiB", "with buffers, KiB"],
    [[name, *numbers] for name, numbers in counted.items()],
    note="A block has 195 KiB. Buffers: those that FSDP2 gathers into.",
)

# %% [markdown]
# Thirteen gathers are two for each of the six blocks and one for the root, which stays gathered after the
# forward pass. The rows say:
#
# - **One checkpoint around one unit**: with the default checkpoint the order changes nothing here. (It does
#   with mixed precision, see below.)
# - **The reentrant checkpoint outside, FSDP1**: each block is gathered a third time, and one block is
#   complete at once instead of two. FSDP2 notices that it is in a backward pass, and keeps what it has
#   gathered.
# - **A checkpoint around two units**: the second forward has to run through both units before the backward
#   pass can begin with the second one. FSDP1 frees the first unit after its forward and gathers it once
#   more: three gathers more than 13, one for each pair. FSDP2 does not free it: in the backward pass three
#   blocks are complete at once, where two were before. (The last column does not show this, because it was as
#   high before, in the forward pass: one block and two buffers. But in the backward pass activations come on
#   top, here those of two blocks.)

# %% tags=["check"]
rows = {name.partition(" · ")[2]: numbers for name, numbers in counted.items() if name.startswith("FSDP2")}
old = {name.partition(" · ")[2]: numbers for name, numbers in counted.items() if name.startswith("FSDP1")}
assert {numbers[0] for numbers in rows.values()} == {2 * 6 + 1}
assert rows["a checkpoint around two units"][1] > 1.4 * rows["FSDP outside"][1]
assert rows["FSDP outside"] == rows["checkpoint outside"] == rows["checkpoint outside, reentrant"]
assert old["checkpoint outside, reentrant"][0] == 3 * 6 + 1
assert old["a checkpoint around two units"][0] == 2 * 6 + 1 + 3
assert old["FSDP outside"] == old["checkpoint outside"] == old["no checkpoint"]
print("Checked: 13 gathers, but 19 and 16 in two rows of FSDP1; in one of FSDP2 a block more at the peak.")

# %% [markdown]
# With mixed precision the order matters for FSDP2, too. FSDP casts a unit's inputs to bf16 just before its
# forward. A checkpoint inside keeps the input after that cast, a checkpoint outside keeps it before. Here the
# blocks return float32, so the input before the cast takes twice the bytes.

# %%
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy

in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
unit_in_bf16 = partial(fully_shard, mp_policy=in_bf16)
places = {
    "checkpoint inside": lambda block, index: unit_in_bf16(checkpoint_wrapper(block)),
    "checkpoint outside": lambda block, index: checkpoint_wrapper(unit_in_bf16(block)),
}


def kept_per_block(recipe):
    """Activations between forward and backward, per block, times the block's input in float32."""
    model = fully_shard(build(recipe))
    with Meter([*model.parameters(), images, labels]) as meter:
        loss = loss_of(model, slice(0, 24 // world))
    bytes_kept = meter.tensor_bytes[-1] - meter.held_bytes - meter.gather_bytes[-1]
    loss.backward()
    return bytes_kept / 6 / x.nbytes


in_places = [(place, f"{kept_per_block(recipe):.1f}") for place, recipe in places.items()]

# %% jupyter={"source_hidden": true}
in_places = ranks.get("in_places")[0]
Table(["FSDP2 in bf16", "kept per block, times its input in float32"], in_places)

# %% tags=["check"]
assert [kept for _, kept in in_places] == ["0.5", "1.0"]
print("Checked: half of the input inside, all of it outside.")

# %% [markdown]
# ## Proof
#
# The table shows three steps of AdamW: all recipes under FSDP, and one process that trains on all samples
# without any checkpoint.

# %% tags=["equality"]
# %%ranks
def train(model, rank=rank, world=world, steps=3):
    """The loss of each step, as the mean over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        loss = loss_of(model, torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist()


# %% jupyter={"source_hidden": true}
# %%ranks
alone = train(build(lambda block, index: block), rank=0, world=1)
ways = {
    "one process, no checkpoint": alone,
    "fully_shard, every block": train(sharded(lambda block, index: checkpoint_wrapper(block))),
    "fully_shard, every second block": train(sharded(every(2))),
    "fully_shard, selective": train(sharded(asking(products))),
    "fully_shard, every block + offload": train(
        sharded(lambda block, index: Offloaded(checkpoint_wrapper(block)))
    ),
    "FSDP1, every block": train(fsdp1_outside()),
}
for losses in ways.values():
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", "1", "2", "3"],
    [[name, *(f"{loss:.4f}" for loss in losses)] for name, losses in ranks.get("ways")[0].items()],
)

# %% [markdown]
# The losses are the same. A checkpoint changes when numbers are computed, not which.
#
# ## With `torch.compile`
#
# The compiler sees forward and backward together, and decides for itself what to keep. How does a checkpoint
# fit in? Compile one block, on one rank, and list again what it saves. The backend `aot_eager` traces the
# block and plans what to keep, and then runs the plan with PyTorch's own kernels. The default backend,
# `inductor`, would write C++ here, and needs a compiler and a minute or two for it.

# %% tags=["compile"]
# %%ranks 0
import torch._functorch.config as planner

backend = "aot_eager"                                                   # or "inductor", if you have the time
cases = {
    "compiled": (lambda block: block, 1.0),
    "compiled, with half the memory": (lambda block: block, 0.5),
    "checkpointed, then compiled": (checkpoint_wrapper, 1.0),
}
torch.manual_seed(0)
eager = Block().to(device)
(expected,) = torch.autograd.grad(eager(x).sum(), x)
saved = {}
for name, (wrapper, budget) in cases.items():
    torch.compiler.reset()
    with planner.patch(activation_memory_budget=budget):
        kept, y = saved_by(torch.compile(wrapper(eager), backend=backend), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    saved[name] = sum(nbytes for _, nbytes in kept) / x.nbytes

# %% jupyter={"source_hidden": true}
saved = ranks.get("rank == 0 and saved")[0]
Table(["", "kept, times the input"], [[name, f"{kept:.2f}"] for name, kept in saved.items()])

# %% [markdown]
# Left alone, the compiler keeps as much as autograd does. It honours the checkpoint: again little more than
# the input. (With `inductor` the three numbers were 16.12, 8.00 and 1.05 on our machine.) And the compiler
# has a setting of its own, `activation_memory_budget`: at 0.5 it chooses by itself what to compute again,
# with no checkpoint written anywhere. With FSDP2 the three go from the inside out: checkpoint the block,
# compile it, `fully_shard` it.
#
# ## What the freed memory buys
#
# Freed memory is worth nothing until it is used. The peak of a step grows linearly with the batch. So measure
# two batches, and compute how many samples fit into the memory that 24 of them needed without checkpoints.
# Parameters and AdamW's averages are the same in all recipes, so they are left out.

# %% tags=["buys"]
# %%ranks 0
def peak(recipe, samples):
    """The most bytes beyond parameters and data in a step with so many samples."""
    model = build(recipe)
    with Meter([*model.parameters(), images, labels]) as meter:
        loss_of(model, slice(0, samples)).backward()
    return meter.peak_tensor_bytes - meter.held_bytes


def samples_that_fit(recipe, room):
    """How many samples a step may take so that its peak stays within `room` bytes."""
    small, large = peak(recipe, 12), peak(recipe, 24)
    per_sample = (large - small) / 12
    return int(24 + (room - large) / per_sample)


# %% jupyter={"source_hidden": true}
# %%ranks 0
room = peak(lambda block, index: block, 24)
fitting = {
    "no checkpoint": samples_that_fit(lambda block, index: block, room),
    "selective": samples_that_fit(asking(products), room),
    "every second block": samples_that_fit(every(2), room),
    "every block": samples_that_fit(every(1), room),
}

# %% jupyter={"source_hidden": true}
fitting, room_mib = ranks.get("rank == 0 and (fitting, room / 2**20)")[0]
Table(["", f"samples that fit in {room_mib:.0f} MiB"], list(fitting.items()))

# %% [markdown]
# With a checkpoint around every block nearly four times the samples fit. A folded cell does not trust the
# formula: it measures a step with that many samples, which fits, and one with two more, which does not.
#
# More samples in a step are not more samples per second. A GPU that a small batch leaves idle gains a lot. A
# GPU that is busy already only pays for the recomputation. So see first whether your GPU is busy, then
# checkpoint as little as you must. ([Lesson 5](05_maximising_throughput.ipynb) is about this.)

# %% tags=["check"]
# %%ranks 0
assert 24 < fitting["selective"] < fitting["every second block"] < fitting["every block"]
assert fitting["every block"] > 2.5 * 24
assert peak(every(1), fitting["every block"]) <= room < peak(every(1), fitting["every block"] + 2)
print("Checked: the formula is right to within two samples.")

# %% [markdown]
# ## What does it cost in seconds, here?
#
# Rank 0 measures alone, while the others wait. Your numbers will differ: they depend on your CPU.

# %% jupyter={"source_hidden": true}
# %%ranks 0
import time


def seconds_of(recipes, repeats=10):
    """The fastest of some steps for each recipe, measured alternately."""
    models, best = [build(recipe) for recipe in recipes], [float("inf")] * len(recipes)
    for _ in range(repeats):
        for index, model in enumerate(models):
            started = time.perf_counter()
            loss_of(model, slice(0, 24)).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[index] = min(best[index], time.perf_counter() - started)
    return best


# %% tags=["nbval-ignore-output", "seconds"]
# %%ranks 0
recipes = [lambda block, index: block, lambda block, index: checkpoint_wrapper(block)]
seconds_none, seconds_full = seconds_of(recipes)
print(f"no checkpoint {1000 * seconds_none:.0f} ms, every block {1000 * seconds_full:.0f} ms")
print(f"a ratio of {seconds_full / seconds_none:.2f}")

# %% [markdown]
# By FLOPs alone the ratio would be 1.23, and here it is larger. What the FLOP counter does not see takes
# time, too: reading and writing memory, and PyTorch itself on tensors as small as these.
#
# ## When it goes wrong
#
# A checkpoint is right only if the second forward computes what the first one did. Dropout draws random
# numbers. So `checkpoint` saves the state of the random number generators with the input, and restores it
# for the second forward. Someone may switch that off, because it takes a little time in each block.

# %%
# %%ranks
class Dropped(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.2)


def gradients(wrap):
    torch.manual_seed(0)
    block = Dropped().to(device)
    wrap(block)(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in block.parameters()])


right = gradients(lambda block: block)
with_state = gradients(checkpoint_wrapper)
without = gradients(lambda block: checkpoint_wrapper(block, preserve_rng_state=False))
apart = [((found - right).norm() / right.norm()).item() for found in (with_state, without)]

# %% jupyter={"source_hidden": true}
apart = ranks.get("apart")[0]
names = ["checkpoint", "checkpoint, preserve_rng_state=False"]
Table(
    ["a block with dropout", "its gradients, beside those without a checkpoint"],
    [[name, "equal" if far == 0 else "wrong by more than 10%"] for name, far in zip(names, apart)],
    note="The norm of the difference, beside the norm of the right gradients.",
)

# %% [markdown]
# No error. (Your own checkpoint of turn 1 has the same fault: it does not restore the state.) PyTorch checks
# only the number, shapes, types and devices of the tensors that it computes again. Where randomness changes
# a shape, as in a block that drops tokens or routes them to experts, that check speaks:

# %%
# %%ranks
class DropsTokens(Block):
    def forward(self, x):
        return super().forward(x[:, torch.rand(x.shape[1]) < 0.5])


torch.manual_seed(0)
try:
    wrong = checkpoint_wrapper(DropsTokens().to(device), preserve_rng_state=False)
    wrong(x).sum().backward()
except torch.utils.checkpoint.CheckpointError as error:
    print(str(error).splitlines()[0])

# %% tags=["check"]
assert apart[0] == 0
assert apart[1] > 0.1
print("Checked: with the state the gradients are equal, without it they differ by more than a tenth.")

# %% [markdown]
# What you see, why, and what helps:
#
# - **`Recomputed values … have different metadata`**, as above. The second forward took another path: random
#   numbers, a counter, a cache that the first forward has filled. Make the block depend on its input alone,
#   or keep that part outside of the checkpoint. `determinism_check="none"` only silences the check.
# - **The loss is worse than without checkpoints, and nothing complains.** Dropout without the state of the
#   random number generator, as above. Leave `preserve_rng_state` at its default.
# - **Memory does not fall.** No module was wrapped: `apply_activation_checkpointing` is silent when its
#   `check_fn` matches nothing. Print the model and look for `CheckpointWrapper`.
# - **More gathers, or more full parameters in the backward pass, than without checkpoints.** A checkpoint
#   spans several units, or is outside of FSDP1 units and reentrant: the table
#   [above](#With-FSDP:-what-is-inside-what?).
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
share, flops, whole_flops, full_peak = ranks.get(
    "(full.kept / none.kept, extra_flops(full), extra_flops(to_the_end), max(full.course) / max(none.course))"
)[0]
lesson.claims(
    2,
    {
        "checkpoint-slowdown": f"{flops:.0%} more FLOPs, and {whole_flops:.0%} without early stop. Seconds "
        "are for a GPU to say.",
        "checkpoint-memory": f"{1 - share:.0%} of the activations freed, and {1 - full_peak:.0%} of the peak "
        "beyond the parameters. How much of all memory that is depends on the model and the batch.",
        "checkpoint-reinvested": f"{fitting['every block'] / fitting['no checkpoint']:.1f} times the samples "
        "fit into the same memory. How much faster that is depends on how idle the GPU was.",
        "checkpoint-after-fsdp": "With FSDP1 the call comes after, so that the checkpoint lies inside the "
        "unit; outside, a reentrant one gathers each block a third time. With FSDP2 the call comes before, "
        "for the same order of modules; outside, it keeps twice the bytes in bf16 with blocks that return "
        "float32.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Autograd keeps activations for the backward pass, and FSDP does not shard them: here 16 times a block's
#   input, in each block.
# - A checkpoint around every block keeps the inputs alone. It costs a second forward pass, less what early
#   stop leaves out: 23% more FLOPs here.
# - A selective policy can free the same memory for fewer FLOPs than every k-th block. Offloading costs
#   traffic instead of FLOPs.
# - FSDP outside, the checkpoint inside, one checkpoint in one unit.
# - The losses are the same in all recipes, as long as the second forward repeats the first.

# %% tags=["check"]
try_answers(2)

# %% [markdown]
# ## Next
#
# In [lesson 3](03_full_state_dict.ipynb) the trained model is saved, by ranks of which none has all of it.
#
# [← lesson 1](01_transformer_wrapper.ipynb) · [lesson 3 →](03_full_state_dict.ipynb)

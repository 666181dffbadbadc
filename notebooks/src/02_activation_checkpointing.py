# %% [markdown]
# # 2 · Activation checkpointing
#
# FSDP shards what a model *has*. It does not shard what a forward pass *leaves behind*, and in a large model
# that is often most of the memory. In this lesson you throw nearly all of it away, compute it again when it
# is needed, and find out what that costs.

# %% [markdown] tags=["card"]
# learn:
# - what autograd keeps from forward to backward, tensor by tensor
# - 'five ways to keep less: all blocks, every second one, by operation, on the CPU, and combined'
# - what recomputing really costs, and why it is less than a whole forward pass
# - where the checkpoint goes under `fully_shard`, under FSDP1 and under `torch.compile`
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 20 minutes to read
# video: '[Activation checkpointing](https://www.loom.com/share/31749107033841959989aa8da45487c7), 2022.
#   Since then: FSDP2, checkpoints that choose by operation, and `torch.compile`.'

# %%
from fsdp_utils.lessons import lesson, plots
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
# The backward pass of `y = x @ w` needs `x` and `w` again. So autograd keeps both. Weights are there anyway.
# The tensors in between, the **activations**, are there only for that. They grow with the batch, with the
# length of the sequence and with the depth of the model, and every rank holds those of its own samples in
# full.
#
# Here is a block of a transformer, written out so that each tensor can be seen.

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
# `saved_tensors_hooks` calls a function of ours for every tensor that autograd keeps. We leave out the
# weights, and count memory that two tensors share once.

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
for shape, nbytes in kept:
    print(f"{nbytes / x.nbytes:5.2f} times the input   {shape}")
print(f"{sum(nbytes for _, nbytes in kept) / x.nbytes:5.2f} times the input in all")

# %% [markdown]
# One block keeps 16 times the size of its own input. Half of that is the wide middle of the MLP, before and
# after `gelu`, with 4 each. Queries, keys and values take 3. Multiply by the number of blocks: that is what
# fills a GPU.
#
# ## The idea
#
# A block's activations all follow from its input. So keep the input alone, and let the rest go. When backward
# arrives at the block, run its forward once more, from the input, and go on. This is **activation
# checkpointing**: memory is bought with computation.

# %% jupyter={"source_hidden": true}
def what_is_kept(ways, blocks=6):
    fig, (axes,) = plots.figure(width=7.5, height=2.2)
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
    return plots.show(fig, alt="What is kept until backward by each recipe.")


what_is_kept(
    {"none": lambda block: True, "every second": lambda block: block % 2, "full": lambda block: False}
)

# %% [markdown]
# Coloured is what stays in memory until backward, grey what is computed again. "None", "every second" and
# "full" count the blocks that are checkpointed.
#
# ## Predict
#
# A model of six such blocks. Backward takes twice the FLOPs of forward, because each matrix product has two
# gradients. With all blocks checkpointed: what share of the activations stays? And how many FLOPs more does a
# training step take?
#
# <details><summary>Answer</summary>
#
# One in sixteen, about 6%: only the inputs stay. Forward is one third of a step and runs twice, so the step
# should take a third more. Should: the measurement below says less, and why.
#
# </details>
#
# ## The model and the scales
#
# The digits again, but now each of the 64 pixels is a token. `build` takes a **recipe**: what becomes of a
# block.

# %%
# %%ranks
from sklearn.datasets import load_digits


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


def build(recipe):
    torch.manual_seed(0)
    model = Model().to(device)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = recipe(block, index)
    return model


digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)[..., None]  # f32[1797, 64, 1]
labels = torch.tensor(digits.target, device=device)                                     # i64[1797]


def loss_of(model, rows):
    return F.cross_entropy(model(images[rows]), labels[rows])


# %% [markdown]
# Two instruments weigh a training step. The `Meter` of lesson 0 sees every tensor as long as it is alive.
# PyTorch's `FlopCounterMode` counts the FLOPs of matrix products. It does not know attention on the CPU, so
# we tell it. Each gets a step of its own, because tensors live longer while the FLOPs are counted.

# %%
# %%ranks
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_utils.lessons.meter import Meter

aten = torch.ops.aten
attention = "_scaled_dot_product_flash_attention_for_cpu"
CPU_ATTENTION = {
    getattr(aten, attention): lambda *shapes, **__: sdpa_flop_count(*shapes[:3]),
    getattr(aten, attention + "_backward"): lambda *shapes, **__: sdpa_backward_flop_count(*shapes[:4]),
}


@dataclass
class Step:
    """What one forward and backward pass took."""

    kept: int           # bytes alive between forward and backward, beyond parameters and batch
    peak: int           # the most bytes beyond those, at any moment
    course: list        # all those bytes, operation by operation
    forward: int        # FLOPs
    backward: int       # FLOPs, recomputation included
    gradients: list


def weigh(model, rows=slice(0, 24 // world)):
    with Meter([*model.parameters(), images, labels], device=device) as meter:
        loss = loss_of(model, rows)
        kept = meter.tensor_bytes[-1] - meter.held_bytes
        loss.backward()
    course = [nbytes - meter.held_bytes for nbytes in meter.tensor_bytes]
    gradients = [p.grad.clone() for p in model.parameters()]

    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as flops:
        loss = loss_of(model, rows)
        forward = flops.get_total_flops()
        loss.backward()
    return Step(kept, max(course), course, forward, flops.get_total_flops() - forward, gradients)


none = weigh(build(lambda block, index: block))
print(f"kept per block: {none.kept / 6 / x.nbytes:.2f} times its input")
print(f"FLOPs of backward: {none.backward / none.forward:.2f} times those of forward")
assert 16 < none.kept / 6 / x.nbytes < 16.5

# %% [markdown]
# The scales agree with the list above: 16 times the input for each block. Backward takes a little more than
# twice the FLOPs of forward, because attention computes its scores again there.
#
# ## Full: only the inputs stay
#
# `checkpoint_wrapper` turns a module into one that keeps its input alone.

# %% tags=["full"]
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def extra_flops(step):
    """FLOPs beyond those of a step without checkpoints, as a share of it."""
    return (step.forward + step.backward) / (none.forward + none.backward) - 1


full = weigh(build(lambda block, index: checkpoint_wrapper(block)))
print(f"activations kept: {full.kept / none.kept:.1%}, FLOPs: {extra_flops(full):+.1%}")
assert full.kept < 0.07 * none.kept
for gradient, expected in zip(full.gradients, none.gradients):
    torch.testing.assert_close(gradient, expected)

# %% [markdown]
# The gradients are the same and the memory is as predicted, but the price is not: less than the third that we
# expected. PyTorch stops the second forward as soon as it has all that backward asks for. Backward never asks
# for a block's *last* matrix product, because nothing in the block computes with its result. This **early
# stop** can be switched off.

# %%
# %%ranks
from torch.utils.checkpoint import set_checkpoint_early_stop

with set_checkpoint_early_stop(False):
    whole_forward = weigh(build(lambda block, index: checkpoint_wrapper(block)))
print(f"without early stop, FLOPs: {extra_flops(whole_forward):+.1%}")
assert 0.29 < extra_flops(whole_forward) < 1 / 3
assert extra_flops(full) < 0.8 * extra_flops(whole_forward)

# %% [markdown]
# There is the third, nearly. In our block `down` holds a third of the weights, so early stop saves
# more than a quarter of the recomputation.
#
# See it happen: all activations and gradients that are alive, operation by operation.

# %% jupyter={"source_hidden": true}
def courses(steps):
    fig, panels = plots.figure(len(steps), width=8.5, height=2.6)
    steps = {name: [nbytes / 2**20 for nbytes in course] for name, course in steps.items()}
    top = max(max(course) for course in steps.values())
    for axes, color, (name, course) in zip(panels, plots.RANK_COLORS, steps.items()):
        axes.fill_between(range(len(course)), course, color=color, linewidth=0)
        axes.set(title=name, xlabel="operations of one step", xticks=[])
        axes.set(xlim=(0, len(course)), ylim=(0, 1.1 * top))
        axes.text(len(course) / 2, max(course) + 0.02 * top, f"peak {max(course):.1f}", ha="center")
    panels[0].set_ylabel("activations and gradients, MiB")
    return plots.show(fig, alt="Bytes alive over one step, without checkpoints and with.")


none_course, full_course = ranks.get("(none.course, full.course)")[0]
courses({"none": none_course, "full": full_course})

# %% [markdown]
# Without checkpoints a mountain grows through forward and melts in backward. With checkpoints forward stays
# flat. In backward one block at a time is filled again and emptied. What rises slowly underneath is the
# gradients of the weights. So the peak falls by less than the kept bytes do: one block's activations and all
# gradients remain.
#
# ## Every second block
#
# If memory suffices for half, pay for half.

# %%
# %%ranks
def every(k):
    return lambda block, index: checkpoint_wrapper(block) if index % k == 0 else block


second = weigh(build(every(2)))
print(f"activations kept: {second.kept / none.kept:.1%}, FLOPs: {extra_flops(second):+.1%}")
assert abs(extra_flops(second) - extra_flops(full) / 2) < 0.001

# %% [markdown]
# Exactly half the price, and half of the activations stay.
#
# ## Selective: choose by operation
#
# Not all activations are worth the same. The result of a matrix product is expensive to compute again. The
# results of `gelu` and LayerNorm are cheap, and as large. So keep the expensive ones and recompute the cheap:
# a **policy** is asked for every operation of the block.

# %%
# %%ranks
from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTION = {                                                           # one kernel for each kind of machine
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def keeping(operations):
    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation in operations else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda block, index: checkpoint_wrapper(block, context_fn=contexts)


selective = weigh(build(keeping(MATRIX_PRODUCTS | ATTENTION)))
print(f"activations kept: {selective.kept / none.kept:.1%}, FLOPs: {extra_flops(selective):+.1%}")
assert extra_flops(selective) == 0
assert selective.kept < 0.75 * none.kept

# %% [markdown]
# Nearly a third of the activations gone, and not one matrix product computed twice. What is recomputed are
# element by element operations, which the FLOP counter does not count. They do take time, most of all for
# reading and writing memory.
#
# ## Offload: keep everything, elsewhere
#
# The third way: move activations to the memory of the CPU and fetch them back for backward. It needs the same
# hooks as our list at the beginning. The first one stores, the second one fetches.

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
                return tensor                                           # stays where it is anyway
            host = tensor.to("cpu", copy=True)
            self.host_bytes += host.nbytes
            return host

        with saved_tensors_hooks(store, lambda tensor: tensor.to(device)):
            return self.module(x)


# %% [markdown]
# This machine may have no GPU. Then "device" and "host" are the same memory, but the copies are real, and we
# count them apart. Offloading also combines with checkpointing: then the only thing that is left to move is
# the input of each block.

# %% tags=["offload"]
# %%ranks
def weigh_offloaded(recipe):
    model = build(lambda block, index: Offloaded(recipe(block, index)))
    step = weigh(model)
    host = sum(block.host_bytes for block in model.blocks)
    if device.type == "cpu":
        step.kept -= host                                               # here the host is the device
    return step, host


offloaded, host = weigh_offloaded(lambda block, index: block)
both, host_of_both = weigh_offloaded(lambda block, index: checkpoint_wrapper(block))
for name, step, moved in [("offload", offloaded, host), ("full + offload", both, host_of_both)]:
    shares = f"on the device {step.kept / none.kept:.1%}, on the host {moved / none.kept:.1%}"
    print(f"{name}: {shares}, FLOPs: {extra_flops(step):+.1%}")
assert max(offloaded.kept, both.kept) < 0.02 * none.kept
assert (extra_flops(offloaded), extra_flops(both)) == (0, extra_flops(full))

# %% [markdown]
# Almost nothing stays on the device. The price is traffic: all those bytes cross the bus to the CPU and back
# in every step. And more than 100% of them arrive there, because tensors that shared one memory are copied
# one by one.
#
# PyTorch has this ready-made: `torch.autograd.graph.save_on_cpu`, and `offload_wrapper` beside
# `checkpoint_wrapper`. Both move weights too where autograd has saved them. On a CPU `save_on_cpu` copies
# nothing, because the tensors are there already.
#
# ## The choice
#
# All recipes on one page. To the left is less memory, below is less computation.

# %% jupyter={"source_hidden": true}
def trade_off(points):
    fig, (axes,) = plots.figure(width=6.5, height=3.2)
    for index, (name, (kept, flops)) in enumerate(points.items()):
        axes.scatter(kept, flops, s=70, color=plots.RANK_COLORS[index], zorder=3)
        below = name == "full"                                          # its neighbour is labelled above
        axes.annotate(name, (kept, flops), xytext=(8, -15 if below else 7), textcoords="offset points")
    axes.set(xlabel="activations kept on the device, %", xlim=(-4, 118))
    axes.set(ylabel="extra FLOPs of a step, %", ylim=(-3, 34))
    axes.grid(color=plots.FAINT, linewidth=0.6)
    return plots.show(fig, alt="Recipes by activations kept and extra FLOPs.")


names = ["none", "full", "every second", "selective", "offload", "full + offload"]
steps = "(none, full, second, selective, offloaded, both)"
measured = ranks.get(f"[(100 * s.kept / none.kept, 100 * extra_flops(s)) for s in {steps}]")[0]
trade_off(dict(zip(names, measured)))

# %% [markdown]
# Offload is best on both axes only because its price, the traffic, is on neither.
#
# ## What does it cost in seconds, here?
#
# Rank 0 alone, while the others wait. Your numbers will be others: it is your CPU. The table of claims has a
# column for **recordings** on a GPU, made once and stored.

# %% tags=["nbval-ignore-output", "seconds"]
# %%ranks 0
import time


def seconds_of(recipes, repeats=10):
    """The fastest of some steps for each recipe, taken in turns."""
    models, best = [build(recipe) for recipe in recipes], [float("inf")] * len(recipes)
    for _ in range(repeats):
        for index, model in enumerate(models):
            started = time.perf_counter()
            loss_of(model, slice(0, 24)).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[index] = min(best[index], time.perf_counter() - started)
    return best


recipes = [lambda block, index: block, lambda block, index: checkpoint_wrapper(block)]
seconds_none, seconds_full = seconds_of(recipes)
ratio = seconds_full / seconds_none
print(f"none {1000 * seconds_none:.0f} ms, full {1000 * seconds_full:.0f} ms, a ratio of {ratio:.2f}")
assert 0.8 < ratio < 3

# %% [markdown]
# If time went with the FLOPs alone, the ratio would be 1.23. But what the FLOP counter does not see takes
# time, too: reading and writing memory, and PyTorch itself on tensors as small as these.
#
# ## With FSDP: what is inside what?
#
# Two things now happen around a block: FSDP gathers its weights, and the checkpoint runs it again. The rule
# is: **FSDP outside, the checkpoint inside.** With FSDP2 that means: checkpoint first, then `fully_shard`.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard


def sharded(recipe):
    model = build(recipe)
    for block in model.blocks:
        fully_shard(block)                                              # around the checkpoint
    return fully_shard(model)


# %% [markdown]
# FSDP1 reads the other way round: first wrap with FSDP, then let `apply_activation_checkpointing` look for
# blocks. It puts its wrapper around the block itself, *inside* the FSDP unit that is there already. So the
# order of calls is the reverse, and the order of modules is the same.

# %%
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def fsdp1_then_checkpoint(wrapper=checkpoint_wrapper):
    model = build(lambda block, index: block)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, Block))
    return model


def checkpoint_then_fsdp1(wrapper=checkpoint_wrapper):
    model = build(lambda block, index: wrapper(block))
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)


for make in (fsdp1_then_checkpoint, checkpoint_then_fsdp1):
    outer = make().blocks[0]
    (inner,) = outer.children()
    print(f"{make.__name__}: {type(outer).__name__}({type(inner).__name__}(...))")

# %% [markdown]
# Both ways run without complaint. Called in the wrong order, FSDP's policy still finds the blocks, and puts
# the unit *inside* the checkpoint. Does that matter? Then the second forward would run FSDP's own hooks
# again, and might gather again. Count the gathers.
#
# There are two implementations of the checkpoint. `NO_REENTRANT`, the default here, works through hooks on
# saved tensors. `REENTRANT` is the older one, which starts a backward pass within the backward pass.

# %% tags=["order"]
# %%ranks
def gathers(model):
    with Meter() as meter:
        loss_of(model, slice(0, 24 // world)).backward()
    return meter.all_gathers


reentrant = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
orders = {
    "FSDP2, no checkpoint": sharded(lambda block, index: block),
    "FSDP2, FSDP outside": sharded(lambda block, index: checkpoint_wrapper(block)),
    "FSDP2, checkpoint outside": fully_shard(build(lambda b, index: checkpoint_wrapper(fully_shard(b)))),
    "FSDP1, FSDP outside": fsdp1_then_checkpoint(),
    "FSDP1, checkpoint outside": checkpoint_then_fsdp1(),
    "FSDP1, FSDP outside, reentrant": fsdp1_then_checkpoint(reentrant),
    "FSDP1, checkpoint outside, reentrant": checkpoint_then_fsdp1(reentrant),
}
counted = {name: gathers(model) for name, model in orders.items()}
for name, count in counted.items():
    print(f"{name:37} {count} all_gathers")
*right, wrong = counted.values()
assert set(right) == {2 * 6 + 1}
assert wrong == 3 * 6 + 1

# %% [markdown]
# Thirteen: each of six blocks twice, and the root, which stays whole after forward, once. With `NO_REENTRANT`
# the order makes no difference to that. With `REENTRANT` the wrong order gathers each block a third time.
# With `NO_REENTRANT`, too, the place of a checkpoint matters once it spans *several* units:

# %%
# %%ranks
def in_pairs(unit):
    """A checkpoint around two units at a time."""
    model = build(lambda block, index: block)
    blocks = [unit(block) for block in model.blocks]
    two_by_two = [nn.Sequential(*blocks[i : i + 2]) for i in range(0, 6, 2)]
    model.blocks = nn.ModuleList(checkpoint_wrapper(two) for two in two_by_two)
    return unit(model)


pairs = gathers(in_pairs(partial(FSDP, device_id=device)))
print(f"FSDP1, a checkpoint around two units: {pairs} all_gathers instead of {2 * 6 + 1}")
assert pairs > 2 * 6 + 1

# %% [markdown]
# The second forward has to walk through both units before backward can begin with the last one. Each pair
# costs one gather more. So let one checkpoint lie within one unit.
#
# ## Proof
#
# All recipes under FSDP, against one process without any checkpoint that trains on all samples: three steps
# of AdamW.

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


alone = train(build(lambda block, index: block), rank=0, world=1)
ways = {
    "one process, none": alone,
    "fully_shard, full": train(sharded(lambda block, index: checkpoint_wrapper(block))),
    "fully_shard, every second": train(sharded(every(2))),
    "fully_shard, selective": train(sharded(keeping(MATRIX_PRODUCTS | ATTENTION))),
    "fully_shard, full + offload": train(sharded(lambda block, index: Offloaded(checkpoint_wrapper(block)))),
    "FSDP1, full": train(fsdp1_then_checkpoint()),
}
for name, losses in ways.items():
    print(f"{name:28} step 1: {losses[0]:.4f}   step 3: {losses[-1]:.4f}")
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# One curve. A checkpoint changes when numbers are computed, not which.
#
# ## With `torch.compile`
#
# The compiler sees forward and backward together, and decides for itself what to keep. How does a checkpoint
# fit in? We compile one block, on one rank, and list again what it saves. The backend `aot_eager` traces and
# plans much like the default one, `inductor`, but then runs the plan with PyTorch's own kernels. `inductor`
# would write C++ here, and needs a compiler and about a minute for it. What is kept is planned before that.

# %% tags=["compile"]
# %%ranks 0
import shutil

import torch._functorch.config as planner

backend = "aot_eager"                                                   # or "inductor", if you have the time
cases = {
    "compiled": (lambda block: block, 1.0),
    "compiled, with half the memory": (lambda block: block, 0.5),
    "checkpointed, then compiled": (checkpoint_wrapper, 1.0),
}
if backend == "inductor" and device.type == "cpu" and not shutil.which("c++"):
    print("Skipped: inductor needs a C++ compiler, and this machine has none.")
    cases = {}

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
    print(f"{name:31} {saved[name]:5.2f} times the input")
if saved:
    compiled, half, checkpointed = saved.values()
    assert checkpointed < 1.2 < half < compiled

# %% [markdown]
# Left alone, the compiler keeps as much here as autograd does. It honours the checkpoint: again little more
# than the input. And it has a dial of its own, `activation_memory_budget`: at 0.5 it chooses by itself what
# to compute again, with no checkpoint written anywhere. With FSDP2 the three go from the inside out:
# checkpoint the block, compile it, `fully_shard` it.
#
# ## What the freed memory buys
#
# Freed memory is worth nothing until it is used. The peak of a step grows evenly with the batch. So weigh two
# batches, and see how many samples fit into what 24 of them needed without checkpoints. Parameters, gradients
# and the averages of AdamW are the same in all recipes.

# %% tags=["buys"]
# %%ranks 0
def peak(recipe, samples):
    """The most bytes beyond parameters and batch in a step with so many samples."""
    model = build(recipe)
    with Meter([*model.parameters(), images, labels]) as meter:
        loss_of(model, slice(0, samples)).backward()
    return meter.peak_tensor_bytes - meter.held_bytes


def samples_that_fit(recipe, room):
    """How many samples a step may take so that its peak stays within `room` bytes."""
    small, large = peak(recipe, 12), peak(recipe, 24)
    per_sample = (large - small) / 12
    return int(24 + (room - large) / per_sample)


all_blocks = every(1)
room = peak(lambda block, index: block, 24)
fitting = {
    "none": samples_that_fit(lambda block, index: block, room),
    "selective": samples_that_fit(keeping(MATRIX_PRODUCTS | ATTENTION), room),
    "every second": samples_that_fit(every(2), room),
    "full": samples_that_fit(all_blocks, room),
}
for name, samples in fitting.items():
    print(f"{name:13} {samples:3d} samples in {room / 2**20:.0f} MiB")
assert 24 < fitting["selective"] < fitting["every second"] < fitting["full"]
assert fitting["full"] > 2.5 * 24
assert peak(all_blocks, fitting["full"]) <= room < peak(all_blocks, fitting["full"] + 2)

# %% [markdown]
# With a full checkpoint nearly four times the samples fit. The last line of the cell does not trust the
# formula: it weighs a step with that many samples, which fits, and one with two more, which does not.
#
# More samples in a step are not more samples per second. A GPU that a small batch leaves idle gains a lot.
# One that is busy already only pays for the recomputation. So first see whether your GPU is busy, then
# checkpoint as little as you must.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
share, flops, whole_flops, full_peak = ranks.get(
    "(full.kept / none.kept, extra_flops(full), extra_flops(whole_forward), full.peak / none.peak)"
)[0]
fitting = ranks.get("rank == 0 and fitting")[0]
lesson.claims(
    2,
    {
        "checkpoint-slowdown": f"{flops:.0%} more FLOPs, and {whole_flops:.0%} without early stop. Seconds "
        "are for a GPU to say.",
        "checkpoint-memory": f"{1 - share:.0%} of the activations freed, and {1 - full_peak:.0%} of the peak "
        "beyond the parameters. How much of all memory that is depends on the model and the batch.",
        "checkpoint-reinvested": f"{fitting['full'] / fitting['none']:.1f} times the samples fit into the "
        "same memory. How much faster that is depends on how idle the GPU was.",
        "checkpoint-after-fsdp": "The checkpoint has to lie inside the FSDP unit. With the reentrant "
        "checkpoint the wrong order costs a third gather of each block, with the non-reentrant one nothing. "
        "With FSDP2 the calls come in the other order.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Every k-th.** A model has `depth` blocks. A block keeps 16 times its input, or once its input if it is
# checkpointed. Blocks 0, k, 2k, ... are checkpointed. How many times the input is kept in all?

# %%
def kept_inputs(depth, k):
    return None  # your line here


inputs = {(8, 1): 8, (8, 2): 68, (32, 4): 392, (7, 2): 52}
lesson.check(kept_inputs, inputs)

# %% [markdown]
# **2. A policy of your own.** Keep *only* the results of attention, and recompute everything else. Write the
# recipe: a function of `block` and `index`. How much more than with the full checkpoint is kept, in inputs
# per block?

# %%
# %%ranks
attention_only = None  # your line here


def more_than_full(recipe):
    return recipe and round((weigh(build(recipe)).kept - full.kept) / 6 / x.nbytes, 2)


answer = more_than_full(attention_only)

# %%
lesson.check(ranks.get("answer")[0], 1.06)

# %% [markdown]
# **3. Will it fit?** A GPU has `free` GiB left when parameters, gradients and optimizer state are in. One
# sample takes `sample` GiB of activations, of which a checkpoint keeps a sixteenth. On top comes one block of
# `depth` that is filled again. How many samples fit?

# %%
def samples(free, sample, depth):
    return None  # your lines here


room_for = {(40, 2.0, 32): 213, (40, 2.0, 16): 160, (10, 4.0, 48): 30}
lesson.check(samples, room_for)

# %% [markdown]
# ## Summary
#
# - Autograd keeps activations for backward, and FSDP does not shard them: 16 times a block's input, in each
#   block.
# - A full checkpoint keeps the input alone. It costs a second forward, less what early stop leaves out.
# - Every k-th block and selective policies are the steps in between. Offloading costs traffic instead of
#   FLOPs.
# - FSDP outside, the checkpoint inside, one checkpoint within one unit.
# - The losses are the same in all ways. The freed memory pays only if you use it.
#
# ## Next
#
# In [lesson 3](03_full_state_dict.ipynb) the model is trained, and has to be saved, by ranks of which none
# has all of it.
#
# [← lesson 1](01_transformer_wrapper.ipynb) · [lesson 3 →](03_full_state_dict.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def kept_inputs(depth, k):
    return sum(1 if block % k == 0 else 16 for block in range(depth))


lesson.check(kept_inputs, inputs, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
answer = more_than_full(keeping(ATTENTION))

# %% tags=["solution"] jupyter={"source_hidden": true}
lesson.check(ranks.get("answer")[0], 1.06, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def samples(free, sample, depth):
    return int(free / (sample / 16 + sample / depth))


lesson.check(samples, room_for, strict=True)

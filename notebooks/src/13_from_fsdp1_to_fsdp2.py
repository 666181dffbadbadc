# %% [markdown]
# # 13 · From FSDP1 to FSDP2
#
# You have a program that trains with `FullyShardedDataParallel` (FSDP1), or a
# [config file](#A-framework's-config-file) of Accelerate, Composer or DeepSpeed. FSDP1 still runs in torch
# 2.13, but PyTorch's [tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html) teaches
# `fully_shard` (FSDP2) in its place. This lesson writes each idea of the earlier lessons with both, and
# compares losses and bytes. Then you translate a training step. To look up one name of FSDP1, go to
# [All settings](#All-settings).

# %% [markdown] tags=["card"]
# learn:
# - what to write in FSDP2 for each argument of FSDP1
# - for which settings the two send the same bytes, and for which they do not
# - how to translate a training step, and what clipping has to do under sharding
# - how to move checkpoints, with the optimizer's state, and translate a framework's config file
# needs: lessons [0](00_fsdp_from_scratch.ipynb) to [12](12_a_model_too_big_for_one_rank.ipynb), or a program
#   that uses FSDP1 · no GPU
# ranks: 4 on this machine. `HYBRID_SHARD` is left out with `FSDP_RANKS=2` or 3.
# takes: a minute to run on 2 cores (AMD EPYC) · 20 minutes to read

# %% [markdown]
# **The question of this lesson:** what do you write with `fully_shard` for each setting of FSDP1, and is the
# training still the same?

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

sizes = {"norm": 96, "up.weight": 9216, "up.bias": 192, "down.weight": 9216, "down.bias": 48}
total = sum(sizes.values())
fig, (axes,) = plots.figure(width=8.5, height=2.2)


def draw_quarters(row, left, size):
    for owner in range(4):
        color = plots.RANK_COLORS[owner]
        axes.barh(row, size / 4, left=left + owner * size / 4, height=0.55, color=color)


draw_quarters(0, 0, total)
end = 0
for name, size in sizes.items():
    draw_quarters(1, end, size)
    if size > 1000:
        axes.text(end + size / 2, 0.5, name, ha="center", va="center", fontsize=8)
    end += size
    axes.plot([end, end], [-0.35, 1.35], color=plots.INK, linewidth=0.8)
for owner in range(4):
    ink = "white" if owner in (0, 2) else plots.INK
    axes.text((owner + 0.5) * total / 4, 0, f"rank {owner}", ha="center", va="center", fontsize=8, color=ink)
axes.set_yticks([0, 1], ["FSDP1: one flat parameter", "FSDP2: each parameter"])
axes.set(ylim=(1.5, -0.5), xlabel=f"the {total:,} numbers of a block; a colour is the rank that holds them")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="FSDP1 cuts the parameters of a block, laid end to end, in four; FSDP2 each of them.")

# %% [markdown]
# This is one block of the model below, on four ranks. FSDP1 lays the parameters of a block end to end (the
# lines are their ends; the norm and the biases are too thin for a label) and cuts this flat parameter into
# four shards. FSDP2 cuts each parameter into four. Each rank holds a quarter of the numbers in both, but in
# FSDP2 a shard belongs to one parameter and keeps its name. The differences in clipping, freezing and
# checkpoints below follow from that.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import exactly, try_answers, turn
from fsdp_utils.notebook import ranks

ranks.start()

# %% [markdown]
# ## In your own code
#
# This script does with FSDP2 what most FSDP1 programs do: wrapping by block, mixed precision, a sharding
# strategy, gradient accumulation and clipping. The comments give FSDP1's name for each. Save it as `train.py`
# and start it with `torchrun --nproc-per-node 4 train.py`.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())              # device_id=
# mesh = init_device_mesh(device, (dist.get_world_size(),))          # process_group=
# torch.manual_seed(0)                                               # the same weights on each rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)    # MixedPrecision
# for part in [*model, model]:                                       # auto_wrap_policy=, FULL_SHARD
#     fully_shard(part, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=part is not model)
# optimizer = torch.optim.AdamW(model.parameters())
# torch.manual_seed(dist.get_rank())                                 # other batches on each rank
# for number in range(20):
#     model.set_requires_gradient_sync(number % 2 == 1)              # no_sync() for every other batch
#     model(torch.randn(32, 256, device=device)).square().mean().backward()
#     if number % 2 == 1:
#         norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # model.clip_grad_norm_(1.0)
#         optimizer.step()
#         optimizer.zero_grad()
# print(f"rank {dist.get_rank()}: norm of the last gradients {norm.full_tensor().item():.3f}")
# dist.destroy_process_group()
# ```
#
# Three changes show in no argument. `fully_shard` changes the model in place: no wrapper, no `model.module`,
# no `_fsdp_wrapped_module.` in the names of parameters. You call it on the units first, and on the model
# last. And `norm` is a DTensor. An f-string cannot format it, so call `.full_tensor().item()` first.

# %% jupyter={"source_hidden": true}
# %%ranks
import inspect
import shutil
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_utils import record_collectives
from fsdp_utils.lessons.meter import Meter

warnings.simplefilter("ignore", FutureWarning)          # some of FSDP1's functions are deprecated
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                      # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## The model, and what "the same" means
#
# The model is a transformer without its attention: a first layer, four blocks, a head. All sizes divide by
# 24, so that nothing is padded on 2, 3, 4 or 8 ranks. Otherwise FSDP1, which pads a unit, and FSDP2, which
# pads each parameter, would send a few bytes more or less.

# %%
# %%ranks
class Block(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                               # f32[batch, 48]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.stem = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 24)

    def forward(self, x):                               # f32[batch, 24]
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)                             # f32[batch, 24]


def build(seed=0):
    torch.manual_seed(seed)
    return Model().to(device)


# %% [markdown]
# The folded cell holds the training: random samples of 24 classes, of which each rank has its share; one
# `step`, which computes the loss and the gradients; and `train`, which returns the losses of three steps and
# a record of the collectives in the last of them. It also trains one process alone, as the reference.

# %% jupyter={"source_hidden": true}
# %%ranks
def batch(step, rank=rank, world=world):
    random = torch.Generator().manual_seed(step)
    labels = torch.randint(24, (24,), generator=random)                         # i64[24]
    x = F.one_hot(labels, 24) + 0.5 * torch.randn(24, 24, generator=random)     # f32[24, 24]
    return x.chunk(world)[rank].to(device), labels.chunk(world)[rank].to(device)


def step(model, number, rank=rank, world=world):
    x, labels = batch(number, rank, world)
    loss = F.cross_entropy(model(x).float(), labels)
    loss.backward()
    return loss.detach()


def train(model, steps=3, rank=rank, world=world, clip=None):
    """The loss of each step, as the mean over the ranks, and the trace of the last step."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = torch.zeros(steps, device=device)
    for number in range(steps):
        watched = world > 1 and number == steps - 1
        with record_collectives(model) if watched else nullcontext() as trace:
            losses[number] = step(model, number, rank, world) / world
        if clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist(), trace


alone, _ = train(build(), rank=0, world=1)

# %% [markdown]
# Here is the wrapping with each, as you would find it in a program. FSDP1 is a class that wraps the model
# and takes every setting as an argument. FSDP2 is a function that you call on each unit, and then on the
# model.

# %%
# %%ranks
def fsdp1(model=None, **options):
    policy = ModuleWrapPolicy({Block})
    model = build() if model is None else model
    return FSDP(model, auto_wrap_policy=policy, device_id=device, **options)


def fsdp2(model=None, reshard_after_forward=True, **options):
    model = build() if model is None else model
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, **options)                # the root's default: kept after forward


# %% [markdown]
# `compare` trains both for three steps and compares them with one process that is not sharded. "The same"
# means two things: the losses agree up to rounding, and each kind of collective carries the same number of
# bytes. Where one of the two does not hold, `compare` raises an error. The bytes are those of the full
# tensors that are gathered or reduced; each rank of a group of four sends three quarters of them.
#
# The results go into a table that grows with this lesson. It has the last loss of one process and of the
# sharded models, and what the collectives of a step carry. Where FSDP1 and FSDP2 differ, both numbers stand
# there, FSDP1's first.

# %% jupyter={"source_hidden": true}
# %%ranks
compared, traces = {}, {}


def kib(sent, *kinds):
    return round(sum(size for name, size in sent.items() if name.startswith(kinds)) / 1024, 1)


def compare(setting, one, two, wanted=None, rtol=1e-4, same_bytes=True, clip=(None, None)):
    (losses1, trace1), (losses2, trace2) = train(one, clip=clip[0]), train(two, clip=clip[1])
    wanted = alone if wanted is None else wanted
    torch.testing.assert_close(losses1, wanted, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(losses2, wanted, rtol=rtol, atol=1e-5)
    sent1, sent2 = trace1.bytes_by_kind(), trace2.bytes_by_kind()
    assert (sent1 == sent2) == same_bytes
    compared[setting] = {
        "losses": (wanted[-1], losses1[-1], losses2[-1]),
        "sent": [
            (kib(sent, "all_gather"), kib(sent, "reduce_scatter", "all_reduce")) for sent in (sent1, sent2)
        ],
    }
    traces[setting] = trace1, trace2


# %% jupyter={"source_hidden": true}
WRITTEN = {  # setting: what you write in FSDP1, and in FSDP2
    "wrapping": ("auto_wrap_policy=, FULL_SHARD", "fully_shard on each block, then on the model"),
    "SHARD_GRAD_OP": ("SHARD_GRAD_OP", "reshard_after_forward=False"),
    "HYBRID_SHARD": ("HYBRID_SHARD", "a 2-D mesh"),
    "clipping": ("model.clip_grad_norm_", "nn.utils.clip_grad_norm_"),
    "bf16": ("MixedPrecision", "MixedPrecisionPolicy"),
    "checkpointing": ("apply_activation_checkpointing after FSDP", "checkpoint_wrapper before fully_shard"),
    "freezing": ("use_orig_params=True", "nothing"),
    "from rank 0": ("sync_module_states=True", "set_model_state_dict, broadcast_from_rank0"),
    "config file": ("Accelerate's config file", "the code of translate"),
}


def both(one, two):
    return f"{one}" if one == two else f"{one} and {two}"


def translations(*settings):
    """What to write, the last loss and what a step's collectives carry, for these settings."""
    rows = []
    for setting, found in ranks.get("compared")[0].items():
        if setting in settings or not settings:
            alone, *losses = (f"{loss:.4f}" for loss in found["losses"])
            (gathered1, reduced1), (gathered2, reduced2) = found["sent"]
            sent = both(gathered1, gathered2), both(reduced1, reduced2)
            rows.append([*WRITTEN[setting], alone, both(*losses), *sent])
    head = ["FSDP1", "FSDP2", "loss of one process", "sharded", "gathered, KiB", "reduced, KiB"]
    return Table(head, rows)


# %% [markdown]
# ## Predict
#
# You write the same setting with FSDP1 and with FSDP2. For which of these do the two send different numbers
# of bytes in a step: the wrapping, the strategy, `no_sync()` under SHARD_GRAD_OP, mixed precision,
# activation checkpointing, layers frozen within a block that is trained?
#
# <details><summary>Answer</summary>
#
# For two: `no_sync()` and the frozen layers. The sections "Strategies" and "Precision, checkpointing,
# freezing" show both.
#
# </details>
#
# ## Wrapping and prefetching (lessons 1, 4 and 11)
#
# The functions `fsdp1` and `fsdp2` above make the same units: each block, and the root with what is left. In
# which order do they gather parameters and reduce gradients?

# %% tags=["wrapping"]
# %%ranks
compare("wrapping", fsdp1(backward_prefetch=BackwardPrefetch.BACKWARD_PRE), fsdp2())

orders = [
    [event for event in trace.order("backward") if event != "compute (root)"] for trace in traces["wrapping"]
]

# %% jupyter={"source_hidden": true}
SHORT = {"all_gather": ("AG", 0), "reduce_scatter": ("RS", 1), "compute": ("grad", 2)}

fig, (axes,) = plots.figure(width=9.0, height=1.7)
for row, order in enumerate(ranks.get("orders")[0]):
    for place, event in enumerate(order):
        kind, name = event.split(" ", 1)
        short, color = SHORT[kind]
        axes.barh(row, 0.92, left=place, height=0.7, color=plots.RANK_COLORS[color])
        ink = plots.INK if kind == "reduce_scatter" else "white"
        text = f"{short}\n{name}"
        axes.text(place + 0.46, row, text, ha="center", va="center", fontsize=6.5, color=ink)
axes.set_yticks([0, 1], ["FSDP1", "FSDP2"])
label = "order in backward (AG: all_gather, RS: reduce_scatter, grad: gradients computed)"
axes.set(ylim=(1.5, -0.5), xticks=[], xlabel=label)
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The collectives of a backward pass in order, FSDP1 and FSDP2: the same.")

# %% tags=["check"]
# %%ranks
assert orders[0] == orders[1]
print("Checked: the same collectives in the same order.")

# %% [markdown]
# The orders are equal. `AG blocks.2` stands before `grad blocks.3`: the next unit is gathered before the
# gradients of the current unit are computed. FSDP1 calls this `BACKWARD_PRE`, and it is FSDP2's default. With
# `set_modules_to_backward_prefetch` FSDP2 gathers further ahead, or not ahead at all (lesson 4).
# `BACKWARD_POST` has no counterpart.
#
# ## Strategies (lesson 6)
#
# A strategy of FSDP1 answers two questions at once. FSDP2 asks them one by one: `reshard_after_forward` says
# whether parameters are freed between forward and backward, and the mesh says which ranks share them.

# %% tags=["strategies"]
# %%ranks
compare(
    "SHARD_GRAD_OP",
    fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    fsdp2(reshard_after_forward=False),
)
hybrid = world == 4
if hybrid:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(
        "HYBRID_SHARD",
        fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh),
        fsdp2(mesh=mesh),
    )

# %% jupyter={"source_hidden": true}
translations()

# %% [markdown]
# FSDP1 and FSDP2 agree in each row. `SHARD_GRAD_OP` gathers about half as much as the first row, because
# parameters are kept after forward. `HYBRID_SHARD` reduces more: by reduce-scatters among the ranks that
# share a copy, and then by all-reduces between the copies. Without a mesh FSDP1 takes the ranks of a host as
# those that share a copy. FSDP2's default is one copy over all ranks, so write the mesh.
#
# ### Gradient accumulation is not the same
#
# With gradient accumulation only the last of several small batches reduces its gradients. FSDP2's nearest
# method to `no_sync()` is `set_requires_gradient_sync`:

# %%
# %%ranks
def accumulate1(model):
    with model.no_sync():
        step(model, 0)
    step(model, 1)


def accumulate2(model):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)


# %% jupyter={"source_hidden": true}
# %%ranks
def norm_and_bytes(model, accumulate):
    """The norm of the gradients of two batches, and the bytes gathered for them."""
    with Meter() as meter:
        accumulate(model)
    square = sum(
        (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).square().sum()
        for p in model.parameters()
    )
    dist.all_reduce(square)                             # each rank has a shard of the gradients
    return square.sqrt().item(), meter.gathered_bytes


accumulated = {
    name: (norm_and_bytes(fsdp1(sharding_strategy=strategy), accumulate1),
           norm_and_bytes(fsdp2(reshard_after_forward=reshard), accumulate2))
    for name, strategy, reshard in [("FULL_SHARD", ShardingStrategy.FULL_SHARD, True),
                                    ("SHARD_GRAD_OP", ShardingStrategy.SHARD_GRAD_OP, False)]
}

# %% jupyter={"source_hidden": true}
Table(
    ["two batches", "gathered by FSDP1, KiB", "gathered by FSDP2, KiB"],
    [
        [name, round(one[1] / 1024, 1), round(two[1] / 1024, 1)]
        for name, (one, two) in ranks.get("accumulated")[0].items()
    ],
)

# %% tags=["check", "accumulation"]
# %%ranks
plain = build()
for number in (0, 1):
    step(plain, number, rank=0, world=1)
wanted = torch.stack([p.grad.square().sum() for p in plain.parameters()]).sum().sqrt().item()
for one, two in accumulated.values():
    torch.testing.assert_close([one[0], two[0]], [wanted, wanted], rtol=1e-4, atol=0)
(freed1, freed2), (kept1, kept2) = accumulated.values()
assert freed1[1] == freed2[1]
assert kept2[1] == 2 * kept1[1]
print("Checked: in all four the gradients have the norm that one process finds for two batches of 24.")

# %% [markdown]
# The gradients agree, but under `SHARD_GRAD_OP` FSDP2 gathers twice as much. FSDP1's `no_sync()` does two
# things there: it reduces no gradients, and it keeps the gathered parameters for the next batch. FSDP2 has a
# method for each. The second is `set_reshard_after_backward` of lesson 6, and you will use it in turn 2.
#
# ## Clipping (lesson 10)
#
# In FSDP1 `model.clip_grad_norm_` finds the norm over all ranks, because each rank sees only its part of the
# flat gradients. FSDP2's gradients are DTensors, and `torch.nn.utils.clip_grad_norm_` finds their norm over
# all ranks.

# %% tags=["clipping"]
# %%ranks
def clip1(model):
    return model.clip_grad_norm_(0.1)


def clip2(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


clipped_alone, _ = train(build(), rank=0, world=1, clip=clip2)
compare("clipping", fsdp1(), fsdp2(), wanted=clipped_alone, clip=(clip1, clip2))

# %% [markdown]
# `compare` found equal losses. What if a program of FSDP1 calls `torch.nn.utils.clip_grad_norm_`?

# %%
# %%ranks
model = fsdp1()
step(model, 0)
own_norm = clip2(model).item()                          # FSDP2's way, on FSDP1: wrong

# %% jupyter={"source_hidden": true}
own_norms = ranks.get("own_norm")
Table(["rank", "norm that it finds"], [[rank, f"{norm:.3f}"] for rank, norm in enumerate(own_norms)])

# %% [markdown]
# Each rank finds the norm of its own shards, and so each scales its gradients by another factor. There is no
# error. If your FSDP1 program has this line, the losses change when you move to FSDP2, which clips correctly.

# %% tags=["check"]
assert len({round(norm, 4) for norm in own_norms}) > 1
print("Checked: the ranks find different norms.")

# %% [markdown]
# ## Your turn 1 · Clip sharded gradients
#
# Write what `model.clip_grad_norm_` of FSDP1 does, for a model of which each rank sees only its shards: find
# the norm of *all* gradients, and scale this rank's gradients in place so that the norm of all is at most
# `most`. Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# The square of the norm is the sum of the squares of all elements. A sum over the ranks is one `all_reduce`.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_clip(gradients, most):                   # this rank's shards: a list of f32[n]
    return None                                 # your lines here; return the norm before clipping


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together

def score_clip(clip):
    """Clip the gradients of a step of FSDP1."""
    norm, parted = run_together(clip, [torch.zeros(1, device=device)], 1.0)
    if norm is None:
        return {"problem": parted} if parted else None
    found = {"norms that are wrong": 0, "norms after clipping that are wrong": 0}
    for most in (0.1, 100.0):
        theirs, mine = fsdp1(), fsdp1()
        step(theirs, 0), step(mine, 0)
        norm = theirs.clip_grad_norm_(most)
        clipped = float(clip([p.grad for p in mine.parameters()], most))
        found["norms that are wrong"] += not abs(clipped - norm) <= 1e-4
        before, after = theirs.clip_grad_norm_(1e9), mine.clip_grad_norm_(1e9)
        found["norms after clipping that are wrong"] += not abs(after - before) <= 1e-4
    return {name: int(count) for name, count in found.items()}

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_clip(my_clip)",
    {
        "norms that are wrong": exactly(
            0, otherwise="This is not the norm of all gradients: add up squares over the ranks."
        ),
        "norms after clipping that are wrong": exactly(
            0, otherwise="The gradients have another norm afterwards: scale them in place, and only down."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(gradients, most, norm)
    return norm

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    dist.all_reduce(norm)
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_(most / square.sqrt())
    return square.sqrt()

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    return square.sqrt()

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_((most / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return square.sqrt() * float("nan")

# %% tags=["wrong"] turn=1 raises="A rank would wait for ever: all_reduce"
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    if dist.get_rank() == 0:
        dist.all_reduce(square)
    return square.sqrt()

# %% [markdown]
# ## Precision, checkpointing, freezing (lessons 7, 2 and 9)
#
# `MixedPrecision` becomes `MixedPrecisionPolicy`. The two dtypes that decide what is computed and what is
# sent keep their names. By default FSDP1 casts the inputs of the root alone, FSDP2 those of each unit.

# %% tags=["precision"]
# %%ranks
dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
one, two = fsdp1(mixed_precision=MixedPrecision(**dtypes)), fsdp2(mp_policy=MixedPrecisionPolicy(**dtypes))
compare("bf16", one, two, rtol=2e-2)                    # compared with one process in fp32

# %% [markdown]
# For activation checkpointing the two calls change places. With FSDP1: FSDP first, then
# `apply_activation_checkpointing`, which puts the checkpoint inside the unit. With FSDP2: wrap the block in
# `checkpoint_wrapper` first, and give `fully_shard` the wrapper. The nesting is the same in both: FSDP
# outside, the checkpoint inside.

# %% tags=["checkpointing"]
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def checkpointed1(**options):
    model = fsdp1(**options)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def checkpointed2():
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return fsdp2(model)


compare("checkpointing", checkpointed1(), checkpointed2())

# %% [markdown]
# FSDP1 can freeze single parameters of a unit if you pass `use_orig_params=True`. FSDP2 needs no option for
# it. Freeze the layer `up` of every block:

# %% tags=["freezing"]
# %%ranks
def frozen():
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".up." not in name
    return model


frozen_alone, _ = train(frozen(), rank=0, world=1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)        # FSDP1: gradients need the memory of all parameters
    one = fsdp1(frozen(), use_orig_params=True)
compare("freezing", one, fsdp2(frozen()), wanted=frozen_alone, same_bytes=False)

# %% jupyter={"source_hidden": true}
translations("wrapping", "clipping", "bf16", "checkpointing", "freezing")

# %% [markdown]
# - With bf16 the all-gathers carry half the bytes of the first row, and the reduce-scatters as many, because
#   `reduce_dtype` is float32. The losses differ from one process in float32, and agree with each other.
# - Checkpointing changes neither losses nor bytes.
# - With frozen layers FSDP2 reduces fewer bytes. FSDP1 reduces a gradient of the whole flat parameter, with
#   zeros for what is frozen. FSDP2 leaves the frozen parameters out of the reduce-scatter. (A unit that is
#   frozen as a whole sends no gradients in either.)

# %% tags=["check"]
# %%ranks
_, one, two = compared["bf16"]["losses"]
assert abs(one - two) < 1e-3
(_, one), (_, two) = compared["freezing"]["sent"]
assert two < 0.6 * one
print("Checked: both agree to 0.001 in bf16; with frozen layers FSDP2 reduces at least 40% less.")

# %% [markdown]
# ## Your turn 2 · Translate a training step
#
# Here is a program in FSDP1, with `SHARD_GRAD_OP`, mixed precision, gradient accumulation and clipping:

# %%
# %%ranks
def old_model():
    dtypes = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=dtypes)


def old_step(model, optimizer):
    """Two batches, one step; the norm of the gradients."""
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


# %% [markdown]
# Write both functions with `fully_shard`. `build()` gives the model, `step(model, 0)` and `step(model, 1)`
# run forward and backward on the two batches. The folded cell runs four steps of both programs, and compares
# the norms, the loss that the trained models have, and the collectives of the last step. Both programs should
# gather each unit once in a step. Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# The function `fsdp2` above has the wrapping; the root is a unit, too, so give it the same policy. For
# `no_sync()` you need two methods, `set_requires_gradient_sync` and `set_reshard_after_backward`. What has to
# hold for the second batch?
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_model():
    return None                                 # your lines here


def my_step(model, optimizer):
    return None                                 # your lines here; return the norm of the gradients


# %% jupyter={"source_hidden": true}
# %%ranks
def run_steps(make, take):
    """Four steps: the norms, the loss after them, and the meter of the last."""
    model = make()
    if model is None:
        return None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = [take(model, optimizer) for _ in range(3)]
    if norms[0] is None:
        return None
    with Meter() as meter:
        norms.append(take(model, optimizer))
    loss = step(model, 2)
    dist.all_reduce(loss)
    norms = [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms]
    return norms, loss.item() / world, meter


def score_steps(make, take):
    mine = run_steps(make, take)
    if mine is None:
        return None
    (norms1, loss1, _), (norms2, loss2, meter) = run_steps(old_model, old_step), mine
    return {
        "all_gathers in a step": meter.all_gathers,
        "reduce_scatters in a step": meter.reduce_scatters,
        "gathered KiB": round(meter.gathered_bytes / 1024),
        "norms that differ": sum(not abs(a - b) <= 0.02 * a for a, b in zip(norms1, norms2)),
        "loss at the end agrees": abs(loss1 - loss2) < 0.01 * loss1,
    }


old_meter = run_steps(old_model, old_step)[2]
old_counts = old_meter.all_gathers, old_meter.reduce_scatters, round(old_meter.gathered_bytes / 1024)

# %% jupyter={"source_hidden": true}
gathers, scatters, kib = ranks.get("old_counts")[0]
turn(
    2,
    "score_steps(my_model, my_step)",
    {
        "all_gathers in a step": exactly(
            gathers,
            otherwise="Each unit should be gathered once in a step. More: parameters are freed too early. "
            "None: they are never freed, and the model computes with its old weights.",
        ),
        "reduce_scatters in a step": exactly(
            scatters, otherwise="Gradients should be reduced once for each unit and step."
        ),
        "gathered KiB": exactly(
            kib, otherwise="Each parameter should be gathered once, and in bf16."
        ),
        "norms that differ": exactly(
            0, otherwise="The norm is not that of both batches, over all ranks, before clipping."
        ),
        "loss at the end agrees": exactly(
            True, otherwise="The trained model differs: are the gradients clipped before the step?"
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_model():
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy)


def my_step(model, optimizer):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        step(model, number)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    step(model, 0)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(build(), mp_policy=policy, reshard_after_forward=False)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    return fsdp2(reshard_after_forward=False)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(reshard_after_forward=False, mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    return fsdp2(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["check"]
try_answers(13)

# %% [markdown]
# ## Weights and checkpoints (lessons 3, 8 and 12)
#
# ### Rank 0 has the weights
#
# In FSDP1 `sync_module_states` sends rank 0's weights to all ranks before they are sharded, so every rank
# holds at least all parameters of one unit for a time. It refuses tensors on a CPU, so here a broadcast does
# what it does. In FSDP2 *all* ranks build the model on the meta device, shard it, and then get their shards
# of rank 0's weights. (This model has no buffers. What `to_empty` leaves in buffers is in lesson 12.)

# %% tags=["meta"]
# %%ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)


def from_rank0_1():
    model = build(seed=rank)                                    # right on rank 0 alone
    if on_gpu:
        return fsdp1(model, sync_module_states=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return fsdp1(model)


def from_rank0_2():
    full = build().state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = Model()
    model = fsdp2(model)
    model.to_empty(device=device)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=from_rank0)       # on ALL ranks
    return model


compare("from rank 0", from_rank0_1(), from_rank0_2())

# %% [markdown]
# ### State dicts
#
# With FSDP1 a setting, `state_dict_type`, decides what `state_dict()` returns. With FSDP2 no mode is set:
# `state_dict()` returns sharded tensors, and `get_model_state_dict` gives you the full ones if you ask for
# them.

# %% tags=["state"]
# %%ranks
model1, model2 = fsdp1(), fsdp2()
train(model1), train(model2)
with FSDP.state_dict_type(model1, StateDictType.FULL_STATE_DICT):
    full1 = model1.state_dict()                                 # on ALL ranks
full2 = get_model_state_dict(model2, options=StateDictOptions(full_state_dict=True))

# %% tags=["check"]
# %%ranks
assert list(full1) == list(full2)
torch.testing.assert_close(full1, full2, rtol=1e-4, atol=1e-5)
print(f"Checked: {len(full1)} entries, the same names in the same order, the same values up to rounding.")

# %% [markdown]
# The names and shapes are those of the model without FSDP, so a full state dict that FSDP1 has saved loads
# into FSDP2. A checkpoint in SHARDED_STATE_DICT has the same names, and `torch.distributed.checkpoint` (DCP)
# loads it into FSDP2.
#
# ### The optimizer's state
#
# To go on with a run, you also need AdamW's averages and its count of steps. Train three steps with FSDP1,
# save, load into FSDP2 and train three more. There are two ways: `save_distributed` of `fsdp_utils` (lesson
# 8), which takes models in FSDP1 too, and a full state dict in a file. (The folded cell defines `adamw` and
# `go_on`, which trains these steps and returns their losses.)

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.fsdp._optim_utils")
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
folder = Path(shared[0])                                        # the same on all ranks


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def go_on(model, optimizer, numbers):
    losses = []
    for number in numbers:
        losses.append(step(model, number))
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses) / world
    dist.all_reduce(losses)
    return losses.tolist()


# %% tags=["optimizer"]
# %%ranks
from fsdp_utils import load_distributed, save_distributed

old = fsdp1()
old_optimizer = adamw(old)
go_on(old, old_optimizer, range(3))
save_distributed(folder / "run", old, old_optimizer, step=3)    # way 1
whole = StateDictOptions(full_state_dict=True)
state = get_optimizer_state_dict(old, old_optimizer, options=whole)
if rank == 0:
    torch.save(state, folder / "optimizer.pt")                  # way 2
dist.barrier()


def resumed(way):
    """A model in FSDP2 with the weights and the optimizer's state of `old`."""
    model = fsdp2(build(seed=1))
    optimizer = adamw(model)
    load_distributed(folder / "run", model, optimizer if way == "save_distributed" else None)
    if way != "save_distributed":
        state = torch.load(folder / "optimizer.pt")
        if way == "full, step cloned":
            for values in state["state"].values():
                values["step"] = values["step"].clone()
        set_optimizer_state_dict(model, optimizer, state, options=whole)
    return model, optimizer


# %% jupyter={"source_hidden": true}
# %%ranks
def continued(model, optimizer):
    """The losses of steps 4 to 6, and the counts of steps after them."""
    losses = go_on(model, optimizer, range(3, 6))
    return losses, sorted({int(values["step"]) for values in optimizer.state.values()})


runs = {way: continued(*resumed(way)) for way in ("save_distributed", "full", "full, step cloned")}
runs = {"FSDP1, never stopped": continued(old, old_optimizer), **runs}

# %% jupyter={"source_hidden": true}
Table(
    ["run", "loss at step 4", "5", "6", "AdamW's counts of steps"],
    [
        [way, *(f"{loss:.4f}" for loss in losses), " and ".join(map(str, counts))]
        for way, (losses, counts) in ranks.get("runs")[0].items()
    ],
)

# %% tags=["check"]
# %%ranks
losses, counts = runs["FSDP1, never stopped"]
for way in ("save_distributed", "full, step cloned"):
    torch.testing.assert_close(runs[way][0], losses, rtol=1e-4, atol=1e-5)
    assert runs[way][1] == counts == [6]
assert runs["full"][1] == [3 + 3 * 4, 3 + 3 * 6]
assert abs(runs["full"][0][-1] - losses[-1]) > 1e-3
one, other = (state["state"][f"blocks.0.up.{kind}"]["step"] for kind in ("weight", "bias"))
assert one is other
print("Checked: two ways go on as FSDP1 does. In the full state dict the parameters of a unit share a count.")

# %% [markdown]
# The file's first loss is right, because it needs the weights alone. Then it differs, without an error.
# FSDP1 counts steps once for each flat parameter, and in its full state dict all parameters of a unit share
# this one tensor. `torch.save` keeps it shared, so in FSDP2 each of a block's six parameters (the root has
# four) adds 1 to the same count in every step. `save_distributed` writes a count for each parameter. If you
# have a file, clone each `step` as above. (With `use_orig_params=True` FSDP1 has a count for each
# parameter.)
#
# ### LOCAL_STATE_DICT has to be moved
#
# A checkpoint in this format holds pieces of flat parameters, without the names of parameters. Only FSDP1 can
# read it, with the wrapping and the number of ranks that have saved it (lesson 8 shows how it fails
# otherwise). So move it in two steps, while you still have FSDP1: read it the old way, then save the model
# with `save_distributed`, which writes names.

# %% tags=["local"]
# %%ranks
import torch.distributed.checkpoint as dcp

with FSDP.state_dict_type(model1, StateDictType.LOCAL_STATE_DICT):
    dcp.save(model1.state_dict(), checkpoint_id=folder / "old")         # your old checkpoint

old = fsdp1(build(seed=1))                                              # 1. read it the old way
with FSDP.state_dict_type(old, StateDictType.LOCAL_STATE_DICT):
    state = old.state_dict()
    dcp.load(state, checkpoint_id=folder / "old")
    old.load_state_dict(state)
save_distributed(folder / "new", old, step=4)                           # 2. save it with names

moved = fsdp2(build(seed=1))                                            # from here on FSDP2
load_distributed(folder / "new", moved)
full = get_model_state_dict(moved, options=StateDictOptions(full_state_dict=True))
old_names = sorted(dcp.FileSystemReader(folder / "old").read_metadata().state_dict_metadata)

# %% jupyter={"source_hidden": true}
old_names, new_names = ranks.get("(old_names, list(full))")[0]
Table(
    ["checkpoint", "entries", "the first two"],
    [
        ["LOCAL_STATE_DICT", len(old_names), ", ".join(old_names[:2])],
        ["save_distributed", len(new_names), ", ".join(new_names[:2])],
    ],
)

# %% [markdown]
# The new checkpoint has an entry for each parameter. It loads on any number of ranks (lesson 8), and into a
# model that is not sharded. It has no optimizer's state, because the old one has none (the code of the
# video in lesson 8 never saved it), so AdamW's averages start from zero.

# %% tags=["check"]
# %%ranks
torch.testing.assert_close(full, full1, rtol=0, atol=0)
plain = build(seed=1)
load_distributed(folder / "new", plain)
torch.testing.assert_close(dict(plain.state_dict()), full1, rtol=0, atol=0)
with FSDP.state_dict_type(model1, StateDictType.SHARDED_STATE_DICT), warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    dcp.save(model1.state_dict(), checkpoint_id=folder / "sharded")
state = get_model_state_dict(fsdp2(build(seed=2)))
dcp.load(state, checkpoint_id=folder / "sharded")
torch.testing.assert_close({name: part.full_tensor() for name, part in state.items()}, full1, rtol=0, atol=0)
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
print("Checked: the moved model and a model without FSDP have the old values to the last bit.")
print("Checked: FSDP2 reads what FSDP1 has saved in SHARDED_STATE_DICT.")

# %% [markdown]
# ## A framework's config file
#
# In many programs a framework sets FSDP's arguments from a config file. The function `translate` of
# `fsdp_utils` takes the config of Accelerate, Composer (or LLM Foundry), DeepSpeed, or transformers'
# `Trainer` (axolotl's files too), as a file or a dict, and says what each key is in FSDP2. In a terminal,
# `python -m fsdp_utils translate FILE` does the same. Here is the content of a file of Accelerate:

# %% tags=["translate"]
# %%ranks
from fsdp_utils.migration import translate

found = translate({
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_activation_checkpointing": True,
    },
})

# %% jupyter={"source_hidden": true}
found = ranks.get("found")[0]
print(found)

# %% [markdown]
# The keys with an exclamation mark have no counterpart, or not for all that they do, and the text says why:
# with `mixed_precision` Accelerate also makes the weights float32, and with FSDP2 the code has to. A key that
# `translate` does not know is marked too, because a setting that is silently dropped changes the training.
# And this is what to write:

# %%
print(found.code())

# %% [markdown]
# Does this code train as the old program did? Run it, and beside it FSDP1 with this file's strategy,
# prefetching, checkpointing and dtypes.

# %%
# %%ranks
written = {}
exec(found.code(), written)                             # defines shard_model

bf16 = torch.bfloat16
old = checkpointed1(
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
)
compare("config file", old, written["shard_model"](build()), rtol=2e-2)

# %% [markdown]
# It does; the numbers are in the last row of the next table. (Its losses differ in the third decimal, because
# gradients are summed over the ranks in bf16. In the row `MixedPrecision` they are summed in float32.)
#
# For Composer and DeepSpeed the tests of `fsdp_utils` compare in the same way. DeepSpeed's stages 3 and 2
# become `reshard_after_forward=True` and `False`. Its stage 1 shards the optimizer's state alone. This is
# `False` too, with `set_requires_gradient_sync` and `set_reshard_after_backward` on for the last micro-batch
# of a step only: parameters and gradients stay complete until then, and a step gathers and reduces once.
#
# ## All settings
#
# Here is everything that this lesson has run, in one table:

# %% jupyter={"source_hidden": true}
translations()

# %% tags=["check", "equality"]
# %%ranks
for setting, pair in compared.items():
    _, loss1, loss2 = pair["losses"]
    assert abs(loss1 - loss2) < (1e-2 if setting in ("bf16", "config file") else 1e-4), setting
    assert (pair["sent"][0] == pair["sent"][1]) == (setting != "freezing"), setting
arguments = "process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch mixed_precision"
arguments += " ignored_modules param_init_fn device_id sync_module_states forward_prefetch limit_all_gathers"
arguments += " use_orig_params ignored_states device_mesh"
assert set(inspect.signature(FSDP).parameters) == {"module", *arguments.split()}
print("Checked: losses in all rows, bytes in all but one. FSDP1 has no argument that both tables lack.")

# %% [markdown]
# The two send the same bytes in each row but one: with frozen layers FSDP2 sends less. Here are FSDP1's other
# arguments, and the functions that programs call most. They need no run, or had one in an earlier section or
# lesson:
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `backward_prefetch=BACKWARD_PRE` | nothing to write |
# | `backward_prefetch=None` | `unit.set_modules_to_backward_prefetch([unit])` for each unit (lesson 4) |
# | `backward_prefetch=BACKWARD_POST` | no counterpart |
# | `forward_prefetch=` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=` | nothing to write: FSDP2 needs no limit (lesson 11) |
# | `process_group=`, `device_mesh=` | `mesh=` |
# | `device_id=` | `torch.cuda.set_device` before `fully_shard` |
# | `cpu_offload=` | `offload_policy=CPUOffloadPolicy()` (lesson 12) |
# | `param_init_fn=` | shard on the meta device, `to_empty`, then initialise (lesson 12) |
# | `ignored_modules=`, `ignored_states=` | `ignored_params=`, a set of parameters |
# | `no_sync()` | `set_requires_gradient_sync`, and `set_reshard_after_backward` for SHARD_GRAD_OP |
# | `_HYBRID_SHARD_ZERO2` | a 2-D mesh and `reshard_after_forward=False` |
# | `NO_SHARD` | use `DistributedDataParallel` |
# | `buffer_dtype` | cast buffers yourself |
# | `keep_low_precision_grads` | no counterpart: gradients have the dtype of the shards |
# | `ShardedGradScaler` | `torch.amp.GradScaler` (lesson 7) |
# | `isinstance(module, FSDP)`, `FSDP.fsdp_modules` | `isinstance(module, FSDPModule)` |
# | `FullStateDictConfig`, all True | `full_state_dict` and `cpu_offload` of `StateDictOptions` (lesson 3) |
# | `optim_state_dict`, `full_optim_state_dict` | `get_optimizer_state_dict` |
# | `optim_state_dict_to_load`, `scatter_full_optim_state_dict` | `set_optimizer_state_dict` |
# | `summon_full_params` | `full_tensor()` of a parameter: a copy to read, changes to it are lost |

# %% [markdown]
# ## When it goes wrong
#
# A call that FSDP2 does not have:

# %% tags=["raises-exception"]
# %%ranks
with fsdp2().no_sync():
    pass

# %% [markdown]
# - **`has no attribute 'no_sync'`** (or `clip_grad_norm_`, `summon_full_params`). The program still calls
#   methods of FSDP1. "All settings" says what to write instead.
# - **More all-gathers than before.** The program accumulates gradients under SHARD_GRAD_OP, or the root alone
#   got `reshard_after_forward=False`. It is not passed on to the units inside.
# - **The loss does not fall, the norm of the gradients is 0, and there is no error.**
#   `set_reshard_after_backward(False)` still held for the last batch of a step. The gathered parameters stay:
#   `model.parameters()` gives these, without gradients, and the next forward computes with their old values.
# - **`unsupported format string passed to DTensor.__format__`.** The norm is a DTensor. Format
#   `norm.full_tensor().item()`.
# - **The ranks print different norms of the gradients.** `nn.utils.clip_grad_norm_` runs on a model of FSDP1.
#   There is no error: see "Clipping".
# - **`mat1 and mat2 must have the same dtype, but got BFloat16 and Float`.** `mp_policy` was given to the
#   root alone: the root casts its inputs to bf16, and the blocks keep float32 weights. Give the policy to
#   each call of `fully_shard`.
# - **`Missing key in checkpoint state_dict` when an old checkpoint is loaded.** It is a LOCAL_STATE_DICT: see
#   "LOCAL_STATE_DICT has to be moved".
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
from fsdp_utils.migration import translate

for zero in ({"offload_param": {"device": "nvme"}}, {"zero_quantized_weights": True}):
    assert translate({"zero_optimization": {"stage": 3, **zero}}).without_counterpart
kib2, world = sum(ranks.get("compared")[0]["wrapping"]["sent"][1]), ranks.get("rank")
lesson.claims(
    13,
    {
        "fsdp2-lower-peak": "The same losses. The peak has to be measured on GPUs: FSDP2 changed how streams "
        "share memory, and a CPU has no streams.",
        "always-backward-pre": "The same all-gathers and reduce-scatters in the same order as FSDP1 with "
        f"`BACKWARD_PRE`, and {kib2:.0f} KiB as there. That is the default today: "
        "`set_modules_to_backward_prefetch` changes it.",
        "space-time": f"Yes: two batches of {24 // len(world)} on each of {len(world)} ranks, added up, give "
        "the gradients of two batches of 24 in one process.",
        "everything-deepspeed": "No. `translate` finds no counterpart for offloading to NVMe, nor for "
        "quantized communication.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - With the same units FSDP1 and FSDP2 have the same losses and, apart from padding, send the same bytes. Two
#   exceptions: frozen layers within a unit, and accumulation under SHARD_GRAD_OP. How long a GPU's memory is
#   held differs too (lesson 11).
# - Strategy and groups became `reshard_after_forward` and the mesh; `no_sync()` became two methods.
# - Clip FSDP2 with `torch.nn.utils.clip_grad_norm_`. Under FSDP1 the same line is wrong, without an error.
# - Full and sharded state dicts of the model carry over. In a full one of the optimizer, clone each `step`.
# - Move LOCAL_STATE_DICT while you still have FSDP1 to read it.
#
# ## Next
#
# So far everything ran on this machine. How much memory and time would it take on GPUs that you do not
# have? [Lesson 14](14_plan_before_you_rent.ipynb) plans before you rent.
#
# [← lesson 12](12_a_model_too_big_for_one_rank.ipynb) · [lesson 14 →](14_plan_before_you_rent.ipynb)

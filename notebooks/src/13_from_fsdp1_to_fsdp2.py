# %% [markdown]
# # 13 · From FSDP1 to FSDP2
#
# You have a program that trains with `FullyShardedDataParallel` (FSDP1), or a config file of Accelerate,
# Composer or DeepSpeed. This lesson writes each idea of the earlier lessons twice, with FSDP1 and with
# `fully_shard` (FSDP2), and requires the same losses of both. Then you translate a training step.

# %% [markdown] tags=["card"]
# learn:
# - each argument of FSDP1, and what you write for it in FSDP2
# - for which ideas the two send the same bytes, and for which only the results agree
# - how to translate a training step, and what clipping has to do under sharding
# - what settings of Accelerate, Composer and DeepSpeed become, by hand and by a function
# - how a checkpoint in LOCAL_STATE_DICT is moved
# needs: lessons [0](00_fsdp_from_scratch.ipynb) to [12](12_a_model_too_big_for_one_rank.ipynb), or a program
#   that uses FSDP1 · no GPU
# ranks: 4 on this machine. With `FSDP_RANKS=2` or 3 what needs two hosts is left out.
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read

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
# four shards. FSDP2 cuts each parameter into four. The ranks hold equally much, but in FSDP2 a shard belongs
# to one parameter and keeps its name. Most differences in this lesson follow from that: in clipping, in
# freezing and in checkpoints.

# %% jupyter={"source_hidden": true}
import tempfile
from pathlib import Path

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
# torch.manual_seed(0)
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)    # MixedPrecision
# for part in [*model, model]:                                       # auto_wrap_policy=, FULL_SHARD
#     fully_shard(part, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=part is not model)
# optimizer = torch.optim.AdamW(model.parameters())
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

warnings.simplefilter("ignore", FutureWarning)          # several ways of FSDP1 are deprecated, as we know
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
# `compare` trains both and compares them with one process. "The same" means two things: the losses agree up
# to the rounding of float32, and each kind of collective carries the same number of bytes. Where one of the
# two does not hold, `compare` raises an error. Bytes are those of the full tensors that are gathered or
# reduced; each of four ranks sends about three quarters of them.

# %% jupyter={"source_hidden": true}
# %%ranks
compared, traces = {}, {}


def kib(sent, kind):
    return round(sum(size for name, size in sent.items() if name.startswith(kind)) / 1024, 1)


def compare(idea, one, two, wanted=None, rtol=1e-4, same_bytes=True, clip=(None, None)):
    (losses1, trace1), (losses2, trace2) = train(one, clip=clip[0]), train(two, clip=clip[1])
    wanted = alone if wanted is None else wanted
    torch.testing.assert_close(losses1, wanted, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(losses2, wanted, rtol=rtol, atol=1e-5)
    sent1, sent2 = trace1.bytes_by_kind(), trace2.bytes_by_kind()
    assert (sent1 == sent2) == same_bytes
    compared[idea] = {
        "losses": (wanted[-1], losses1[-1], losses2[-1]),
        "sent": [(kib(sent, "all_gather"), kib(sent, "reduce_scatter")) for sent in (sent1, sent2)],
        "all": [sum(sent.values()) / 1024 for sent in (sent1, sent2)],
    }
    traces[idea] = trace1, trace2


# %% jupyter={"source_hidden": true}
def pairs(*ideas):
    """The last loss, and what a step's collectives carry, for some of the pairs."""
    found = ranks.get("compared")[0]
    rows = []
    for idea in ideas:
        wanted, *losses = found[idea]["losses"]
        rows.append([idea, "one process", f"{wanted:.4f}", "", ""])
        for name, loss, sent in zip(("FSDP1", "FSDP2"), losses, found[idea]["sent"]):
            rows.append(["", name, f"{loss:.4f}", *map(str, sent)])
    return Table(["idea", "", "last loss", "gathered, KiB", "reduced, KiB"], rows)


# %% [markdown]
# ## Predict
#
# You write the same setting with FSDP1 and with FSDP2. For which of these settings do the two send different
# numbers of bytes in a step: the wrapping, the prefetching, the strategy, mixed precision, activation
# checkpointing, layers frozen within a block that is trained?
#
# <details><summary>Answer</summary>
#
# Only for the frozen layers, and FSDP2 sends less: FSDP1 reduces the gradient of a unit's whole flat
# parameter, frozen parts included. (A unit that is frozen as a whole sends no gradients in either, as in
# lesson 9.) With all other settings both send the same number of bytes. The tables below show it.
#
# </details>
#
# ## Wrapping and prefetching (lessons 1, 4 and 11)
#
# In FSDP1 you pass a policy, and FSDP1 finds the units by it. In FSDP2 each call of `fully_shard` makes a
# unit, so the wrapping is code that you can read. Find the arguments of your program on the left:
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `auto_wrap_policy=` | call `fully_shard` on each block, then on the model |
# | `backward_prefetch=` | as `BACKWARD_PRE`, unless you call `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=` | none: FSDP2 needs no limit |
# | `use_orig_params=`, `device_id=` | none: names and shapes are kept; the mesh says which device |

# %% tags=["wrapping"]
# %%ranks
compare("wrapping", fsdp1(backward_prefetch=BackwardPrefetch.BACKWARD_PRE, limit_all_gathers=True), fsdp2())

orders = [
    [event for event in trace.order("backward") if "compute" not in event] for trace in traces["wrapping"]
]

# %% jupyter={"source_hidden": true}
pairs("wrapping")

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=9.0, height=1.7)
for row, order in enumerate(ranks.get("orders")[0]):
    for place, event in enumerate(order):
        gathers = "all_gather" in event
        axes.barh(row, 0.92, left=place, height=0.7, color=plots.RANK_COLORS[0 if gathers else 1])
        text = event.replace("all_gather", "AG").replace("reduce_scatter", "RS").replace(" ", "\n")
        ink = "white" if gathers else "black"
        axes.text(place + 0.46, row, text, ha="center", va="center", fontsize=7, color=ink)
axes.set_yticks([0, 1], ["FSDP1", "FSDP2"])
axes.set(ylim=(1.5, -0.5), xticks=[], xlabel="order in backward (AG: all_gather, RS: reduce_scatter)")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="The collectives of a backward pass in order, FSDP1 and FSDP2: the same.")

# %% tags=["check"]
# %%ranks
assert orders[0] == orders[1]
gone = {"auto_wrap_policy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"}
gone |= {"sync_module_states", "param_init_fn", "device_id"}
assert gone <= set(inspect.signature(FSDP).parameters)
assert not gone & set(inspect.signature(fully_shard).parameters)
print("Checked: the same order; the table's arguments are in FSDP1's signature and not in fully_shard's.")

# %% [markdown]
# FSDP1 and FSDP2 issue the same collectives in the same order. Each unit's all-gather is issued before the
# gradients of the unit in use are computed, and so before these are reduced: `AG blocks.2` stands before `RS
# blocks.3`. This is what `BACKWARD_PRE` means.
#
# ## Strategies (lesson 6)
#
# A strategy of FSDP1 answers two questions at once. FSDP2 asks them one by one: `reshard_after_forward` says
# whether parameters are freed between forward and backward, and the mesh says which ranks share them.
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `FULL_SHARD` | `reshard_after_forward=True` |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | `HYBRID_SHARD` | a 2-D mesh: copies, and the ranks that share one |
# | `_HYBRID_SHARD_ZERO2` | the same, with `reshard_after_forward=False` |
# | `NO_SHARD` | none: `DistributedDataParallel` |
# | `no_sync()` | `set_requires_gradient_sync(False)` |

# %% tags=["strategies"]
# %%ranks
compare(
    "FULL_SHARD",
    fsdp1(sharding_strategy=ShardingStrategy.FULL_SHARD),
    fsdp2(reshard_after_forward=True),
)
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
hybrid = ranks.get("hybrid")[0]
pairs("FULL_SHARD", "SHARD_GRAD_OP", *(["HYBRID_SHARD"] if hybrid else []))

# %% [markdown]
# `SHARD_GRAD_OP` gathers about half as much, because parameters are kept after forward. `HYBRID_SHARD`
# reduces twice: within the ranks that share a copy, and between the copies by an all_reduce that the last
# column does not count.
#
# With gradient accumulation only the last of several small batches reduces its gradients. (Under `FULL_SHARD`
# and `reshard_after_forward=True` parameters are still gathered for each batch.)

# %% tags=["accumulation"]
# %%ranks
def accumulated(model, quietly):
    """The gradients of two batches, added up; only the second is reduced."""
    quietly(model, lambda: step(model, 0))
    step(model, 1)
    norm = sum((p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).square().sum()
               for p in model.parameters())
    if isinstance(model, FSDP):
        dist.all_reduce(norm)                           # each rank has a shard of the gradients
    return norm.sqrt().item()


def no_sync(model, compute):
    with model.no_sync():
        compute()


def without_gradient_sync(model, compute):
    model.set_requires_gradient_sync(False)
    compute()
    model.set_requires_gradient_sync(True)


plain = build()
for number in (0, 1):
    step(plain, number, rank=0, world=1)
wanted = torch.stack([p.grad.square().sum() for p in plain.parameters()]).sum().sqrt().item()
one, two = accumulated(fsdp1(), no_sync), accumulated(fsdp2(), without_gradient_sync)
torch.testing.assert_close([one, two], [wanted, wanted], rtol=1e-4, atol=0)

# %% jupyter={"source_hidden": true}
norms = ranks.get("(wanted, one, two)")[0]
ways = ("one process", "FSDP1, no_sync()", "FSDP2, set_requires_gradient_sync(False)")
Table(["two batches", "norm of the gradients"], [[way, f"{norm:.4f}"] for way, norm in zip(ways, norms)])

# %% [markdown]
# ## Mixed precision (lesson 7)
#
# The two dtypes that decide what is computed and what is sent keep their names. The class changes, and the
# other options become fewer:
#
# | FSDP1, `MixedPrecision` | FSDP2, `MixedPrecisionPolicy` |
# |:--|:--|
# | `param_dtype`, `reduce_dtype` | the same |
# | `buffer_dtype` | none: cast buffers yourself |
# | `cast_root_forward_inputs` for the root, `cast_forward_inputs` for units | `cast_forward_inputs` |
# | `keep_low_precision_grads` | none: gradients have the dtype of the shards |

# %% tags=["precision"]
# %%ranks
dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
one, two = fsdp1(mixed_precision=MixedPrecision(**dtypes)), fsdp2(mp_policy=MixedPrecisionPolicy(**dtypes))
compare("bf16", one, two, rtol=2e-2)                    # compared with one process in fp32

# %% jupyter={"source_hidden": true}
pairs("bf16")

# %% [markdown]
# The loss of one process is in float32. `compare` allows both to differ from it by 2%, because bf16 has fewer
# than three decimal digits, and the check below allows them to differ from each other by 0.001. All-gathers
# send half the bytes, reduce-scatters as many as in float32.

# %% tags=["check"]
# %%ranks
_, one, two = compared["bf16"]["losses"]
assert abs(one - two) < 1e-3
then, now = (set(inspect.signature(kind).parameters) for kind in (MixedPrecision, MixedPrecisionPolicy))
assert {"buffer_dtype", "keep_low_precision_grads", "cast_root_forward_inputs"} <= then - now
assert {"param_dtype", "reduce_dtype", "cast_forward_inputs"} <= then & now
print("Checked: both agree to 0.001, and the table's rows with the two signatures.")

# %% [markdown]
# ## Activation checkpointing (lesson 2)
#
# With FSDP1 the order was: FSDP first, then `apply_activation_checkpointing`, which goes inside the units.
# With FSDP2 you wrap the block in `checkpoint_wrapper`, and give `fully_shard` the wrapper.

# %% tags=["checkpointing"]
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def checkpointed1():
    model = fsdp1()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def checkpointed2():
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return fsdp2(model)


compare("checkpointing", checkpointed1(), checkpointed2())

# %% jupyter={"source_hidden": true}
pairs("checkpointing")

# %% [markdown]
# ## Clipping (lesson 10)
#
# FSDP1 has a method, because a rank sees only its part of the flat gradients. FSDP2's gradients are DTensors,
# and PyTorch's own function takes the norm over all ranks.

# %% tags=["clipping"]
# %%ranks
def clip1(model):
    return model.clip_grad_norm_(0.1)


def clip2(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


clipped_alone, _ = train(build(), rank=0, world=1, clip=clip2)
compare("clipping", fsdp1(), fsdp2(), wanted=clipped_alone, clip=(clip1, clip2))

# %% jupyter={"source_hidden": true}
pairs("clipping")

# %% [markdown]
# What if a program of FSDP1 calls PyTorch's own function?

# %%
# %%ranks
model = fsdp1()
step(model, 0)
own_norm = clip2(model).item()                          # FSDP2's way, on FSDP1: wrong

# %% jupyter={"source_hidden": true}
own_norms = ranks.get("own_norm")
Table(["rank", "norm that it finds"], [[rank, f"{norm:.3f}"] for rank, norm in enumerate(own_norms)])

# %% [markdown]
# Each rank finds the norm of its own shards, and scales its gradients by another factor. There is no error.

# %% tags=["check"]
assert len({round(norm, 4) for norm in own_norms}) > 1
print("Checked: the ranks find different norms.")

# %% [markdown]
# ## Your turn 1 · Clip sharded gradients
#
# Write what `model.clip_grad_norm_` of FSDP1 does, for a model of which each rank sees only its shards: find
# the norm of *all* gradients, and scale this rank's gradients so that the norm of all is at most `most`. Edit
# the next cell, then run it and the two folded cells below it.
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
def score_clip(clip):
    """Clip the gradients of a step of FSDP1. None: nothing is written yet."""
    if clip([torch.zeros(1, device=device)], 1.0) is None:
        return None
    found = {"norms that are wrong": 0, "norms after clipping that are wrong": 0}
    for most in (0.1, 100.0):
        theirs, mine = fsdp1(), fsdp1()
        step(theirs, 0), step(mine, 0)
        norm = theirs.clip_grad_norm_(most)
        found["norms that are wrong"] += abs(clip([p.grad for p in mine.parameters()], most) - norm) > 1e-4
        before, after = theirs.clip_grad_norm_(1e9), mine.clip_grad_norm_(1e9)
        found["norms after clipping that are wrong"] += abs(after - before) > 1e-4
    return {name: int(count) for name, count in found.items()}


result = score_clip(my_clip)

# %% jupyter={"source_hidden": true}
turn(
    1,
    ranks.get("result"),
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


result = score_clip(my_clip)

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(gradients, most, norm)
    return norm


result = score_clip(my_clip)

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


result = score_clip(my_clip)

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    dist.all_reduce(norm)
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


result = score_clip(my_clip)

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_(most / square.sqrt())
    return square.sqrt()


result = score_clip(my_clip)

# %% tags=["wrong"] turn=1
# %%ranks
def my_clip(gradients, most):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    return square.sqrt()


result = score_clip(my_clip)

# %% [markdown]
# ## Freezing (lesson 9)
#
# FSDP1 can freeze single parameters with `use_orig_params=True`. FSDP2 needs no option for it. Freeze the
# layer `up` of every block:

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
pairs("freezing")

# %% [markdown]
# The losses are the same, and FSDP2 reduces fewer bytes. FSDP1 reduces a gradient of the whole flat
# parameter, with zeros for what is frozen. FSDP2 leaves the frozen parameters out of the reduce-scatter.

# %% tags=["check"]
# %%ranks
one, two = compared["freezing"]["all"]
assert two < 0.9 * one
print("Checked: with frozen layers FSDP2 sends at least a tenth less.")

# %% [markdown]
# ## Your turn 2 · Translate a training step
#
# Here is a program in FSDP1, with mixed precision, gradient accumulation and clipping:

# %%
# %%ranks
def old_model():
    dtypes = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp1(sharding_strategy=ShardingStrategy.FULL_SHARD, mixed_precision=dtypes)


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
# the norms, the loss that the trained models have, and the collectives of the last step. Edit the next cell,
# then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# The tables above have a row for each of `auto_wrap_policy`, `FULL_SHARD`, `MixedPrecision`, `no_sync()`, and
# the section "Clipping" has the last. The root is a unit, too: give it the same policy.
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
from fsdp_utils.lessons.meter import Meter


def whole(norm):
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def run_steps(make, take):
    """Four steps: the norms, the loss after them, and the meter of the last. None: nothing is written yet."""
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
    return [whole(norm) for norm in norms], loss.item() / world, meter


def score_steps(make, take):
    mine = run_steps(make, take)
    if mine is None:
        return None
    (norms1, loss1, meter1), (norms2, loss2, meter2) = run_steps(old_model, old_step), mine
    return {
        "all_gathers in a step": meter2.all_gathers,
        "reduce_scatters in a step": meter2.reduce_scatters,
        "gathered KiB": round(meter2.gathered_bytes / 1024),
        "norms that differ": sum(abs(a - b) > 0.02 * a for a, b in zip(norms1, norms2)),
        "loss at the end agrees": abs(loss1 - loss2) < 0.01 * loss1,
        "old": (meter1.all_gathers, meter1.reduce_scatters, round(meter1.gathered_bytes / 1024)),
    }


result = score_steps(my_model, my_step)
old_counts = run_steps(old_model, old_step)[2]
old_counts = old_counts.all_gathers, old_counts.reduce_scatters, round(old_counts.gathered_bytes / 1024)

# %% jupyter={"source_hidden": true}
gathers, scatters, kib = ranks.get("old_counts")[0]
turn(
    2,
    ranks.get("result"),
    {
        "all_gathers in a step": exactly(
            gathers, otherwise="Count the units, and when each is gathered again."
        ),
        "reduce_scatters in a step": exactly(
            scatters, otherwise="Gradients should be reduced once for each unit and step."
        ),
        "gathered KiB": exactly(kib, otherwise="The parameters are gathered in another dtype."),
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
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(mp_policy=policy)


def my_step(model, optimizer):
    step(model, 0)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(build(), mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    return fsdp2()


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(mp_policy=policy)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(mp_policy=policy)


def my_step(model, optimizer):
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["wrong"] turn=2
# %%ranks
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(mp_policy=policy, reshard_after_forward=False)


def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    step(model, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


result = score_steps(my_model, my_step)

# %% tags=["check"]
try_answers(13)

# %% [markdown]
# ## Rank 0 has the weights (lesson 12)
#
# In FSDP1 `sync_module_states` sends rank 0's weights to all ranks before they are sharded, so every rank
# holds at least all parameters of one unit for a time. It refuses parameters on a CPU, so on the CPU we write
# what it does: a broadcast. In FSDP2 *all* ranks build the model on the meta device, shard it, and then get
# their shards of rank 0's weights.

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

# %% jupyter={"source_hidden": true}
pairs("from rank 0")

# %% [markdown]
# ## State dicts (lessons 3 and 8)
#
# With FSDP1 a setting, `state_dict_type`, decides what `state_dict()` returns. With FSDP2 no mode is set:
# `state_dict()` returns sharded tensors, and a function gives you the full ones if you ask for them.
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `FULL_STATE_DICT` | `get_state_dict` with `full_state_dict=True` |
# | `SHARDED_STATE_DICT` | `get_state_dict`, then `torch.distributed.checkpoint.save` |
# | `LOCAL_STATE_DICT` | none |
# | `full_optim_state_dict`, `scatter_full_optim_state_dict` | `get_state_dict`, `set_state_dict` |
# | `summon_full_params` | `full_tensor()` of a parameter: a copy to read, changes to it are lost |

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
print(f"Checked: {len(full1)} entries, the same names in the same order, the same values after training.")

# %% [markdown]
# So a full state dict that FSDP1 has saved loads into FSDP2, and into the model without FSDP.
#
# ### LOCAL_STATE_DICT has to be moved
#
# A checkpoint in this format holds pieces of flat parameters, without the names of parameters. Only FSDP1 can
# read it, with the wrapping and the number of ranks that have saved it (lesson 8 shows how it fails
# otherwise). So move it in two steps, while you still have FSDP1: read it the old way, then save the model
# with `save_distributed` of `fsdp_utils`, which takes models in FSDP1 too and writes names.

# %% tags=["local"]
# %%ranks
import torch.distributed.checkpoint as dcp

from fsdp_utils import load_distributed, save_distributed

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
folder = Path(shared[0])

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

# %% tags=["check"]
# %%ranks
torch.testing.assert_close(full, full1, rtol=0, atol=0)
print("Checked: the moved model has the old values to the last bit.")

# %% [markdown]
# The new checkpoint has no optimizer's state, because the old one has none: the code of the video in lesson 8
# never saved it. AdamW starts with empty averages. The new checkpoint loads on any number of ranks (lesson
# 8), and into a model that is not sharded, as the next folded cell checks.

# %% tags=["check"]
# %%ranks
plain = build(seed=1)
load_distributed(folder / "new", plain)
torch.testing.assert_close(dict(plain.state_dict()), full1, rtol=0, atol=0)
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
print("Checked: a model without FSDP loads the same values.")

# %% [markdown]
# ## Config files
#
# In many programs a framework sets FSDP's arguments from a config file. The function `translate` of
# `fsdp_utils` reads the config file of Accelerate, Composer (or LLM Foundry) or DeepSpeed, and the arguments
# of transformers' `Trainer` (axolotl's files too), and says what each key is in FSDP2. In a terminal,
# `python -m fsdp_utils translate FILE` does the same. Here is a file like those that `accelerate config`
# writes:

# %% tags=["translate"]
from fsdp_utils.migration import translate

accelerate_yaml = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_use_orig_params: true
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: LOCAL_STATE_DICT
"""
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "default_config.yaml"
    file.write_text(accelerate_yaml)
    found = translate(file)
print(found)

# %% [markdown]
# A key with an exclamation mark has no counterpart, and the text says why. `BACKWARD_POST` has one: the
# result stays the same, but it saves memory, and FSDP2 has no setting for that. `found.rows` also names
# the source of each row. And this is what to write:

# %%
print(found.code())

# %% [markdown]
# A key that `translate` does not know is marked too: a setting that is silently dropped changes the training.

# %%
print(translate({"zero_optimization": {"stage": 3, "offload_parm": {"device": "cpu"}}}))

# %% [markdown]
# ## The table, checked
#
# The folded cell lists nine settings, each in the words of every framework that has it.

# %% jupyter={"source_hidden": true}
# %%ranks
def accelerate(mixed_precision="no", **settings):
    settings = {f"fsdp_{key}": value for key, value in settings.items()}
    settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    settings["fsdp_transformer_layer_cls_to_wrap"] = "Block"
    return {"distributed_type": "FSDP", "mixed_precision": mixed_precision, "fsdp_config": settings}


def composer(precision="fp32", **settings):
    return {"precision": precision, "parallelism_config": {"fsdp": settings}}


def deepspeed(stage=3, above=None, **settings):
    return {"zero_optimization": {"stage": stage, **settings}, **(above or {})}


bf16 = torch.bfloat16
bf16_on = {"bf16": {"enabled": True}}
asked = {
    # what for: (the settings in each framework, the same in FSDP1)
    "shard everything": (
        [accelerate(sharding_strategy="FULL_SHARD"), composer(sharding_strategy="FULL_SHARD"), deepspeed(3)],
        {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    ),
    "keep gathered parameters until backward": (
        [
            accelerate(sharding_strategy="SHARD_GRAD_OP"),
            composer(sharding_strategy="SHARD_GRAD_OP"),
            deepspeed(2),
        ],
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ),
    "shard nothing": (
        [accelerate(sharding_strategy="NO_SHARD"), composer(sharding_strategy="NO_SHARD"), deepspeed(0)],
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ),
    "compute and reduce in bf16": (
        [accelerate("bf16"), composer("amp_bf16", mixed_precision="PURE"), deepspeed(above=bf16_on)],
        {"mixed_precision": MixedPrecision(param_dtype=bf16, reduce_dtype=bf16)},
    ),
    "compute in bf16, reduce in fp32": (
        [composer("amp_bf16"), deepspeed(above={**bf16_on, "communication_data_type": "fp32"})],
        {"mixed_precision": MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32)},
    ),
    "recompute activations": (
        [accelerate(activation_checkpointing=True), composer(activation_checkpointing=True)],
        {"checkpointed": True},
    ),
    "copies of two ranks each": (
        [
            composer(data_parallel_shard_degree=2, data_parallel_replicate_degree=-1),
            deepspeed(mics_shard_size=2),
        ],
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if hybrid else None,
    ),
    "gather again among two ranks": ([deepspeed(zero_hpz_partition_size=2)], None),
    "offload to host memory": ([deepspeed(offload_param={"device": "cpu", "pin_memory": False})], None),
}

# %% [markdown]
# For each of the nine settings `translate` has to make the same code from the settings of all frameworks. The
# next folded cell *runs* that code, and FSDP1 with the old setting, and compares their losses and bytes. What
# FSDP1 does not have, or cannot do on a CPU, is compared with one process.

# %% tags=["table"] jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.migration import translate


def by_translation(code):
    names = {}
    exec(code, names)                                   # defines shard_model
    return names["shard_model"](build())


def by_fsdp1(options):
    if "checkpointed" in options:
        return checkpointed1()
    if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        options = {**options, "device_mesh": mesh}
    return fsdp1(**options)


found = []
for what, (configs, options) in asked.items():
    translations = [translate(config) for config in configs]
    for translation in translations:
        translation.blocks = ("Block",)                 # Accelerate names the class, the others find it
    codes = {translation.code() for translation in translations}
    assert len(codes) == 1, what
    needs_two_hosts = "two ranks" in what
    if needs_two_hosts and not hybrid:
        found.append((what, translations, "not run: takes 4 ranks"))
        continue
    new, new_trace = train(by_translation(*codes))
    low = translations[0].param_dtype is not None
    torch.testing.assert_close(new, alone, rtol=2e-2 if low else 1e-4, atol=1e-5)
    verdict = "losses of one process"
    if options is not None:
        old, old_trace = train(by_fsdp1(options))
        torch.testing.assert_close(new, old, rtol=1e-2 if low else 1e-4, atol=1e-5)
        assert new_trace.bytes_by_kind() == old_trace.bytes_by_kind(), what
        verdict = "losses and bytes of FSDP1"
    found.append((what, translations, verdict))

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown


def setting(translation):
    """The settings without which it would be another translation."""
    shown = []
    for row in translation.rows:
        section, _, key = row.key.rpartition(".")
        plain = key in ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "distributed_type")
        if not plain and (key, row.value) not in (("mixed_precision", "no"), ("precision", "fp32")):
            shown.append(f"`{section if key == 'enabled' else key}: {row.value}`")
    return ", ".join(shown)


def in_fsdp2(translation):
    if translation.ddp:
        return "`DistributedDataParallel`"
    words = [f"`reshard_after_forward={translation.reshard_after_forward}`"]
    if translation.shard_size:
        words.append(f"2-D mesh (copies, {translation.shard_size})")
    if translation.param_dtype:
        words.append(f"`MixedPrecisionPolicy({translation.param_dtype}, {translation.reduce_dtype})`")
    if translation.checkpointing:
        words.append("`checkpoint_wrapper`")
    if translation.offload:
        words.append("`CPUOffloadPolicy`")
    return ", ".join(words)


lines = ["| what it does | settings | FSDP2 | checked here |", "|:--" * 4 + "|"]
for what, translations, verdict in ranks.get("found")[0]:
    settings = "<br>".join(f"{one.framework}: {setting(one)}" for one in translations)
    lines.append(f"| {what} | {settings} | {in_fsdp2(translations[0])} | {verdict} |")
Markdown("\n".join(lines))

# %% [markdown]
# "Losses and bytes" were measured in the cell above, on this CPU, with FSDP1 set by hand as the framework's
# source sets it: neither Composer nor DeepSpeed runs here. DeepSpeed has an implementation of its own, so its
# bytes are not FSDP's; the check shows that the FSDP2 program does what FSDP1 does for that ZeRO stage. Which
# FSDP strategy stands for which stage is taken from the documents of [PyTorch's
# developers](https://github.com/pytorch/torchtitan/blob/00293cb7d0a8916b1401d694edc6f0002e99fd5c/docs/fsdp.md)
# and of [Accelerate](https://huggingface.co/docs/accelerate/v1.15.0/en/concept_guides/fsdp_and_deepspeed).
# Offloading frees memory of a GPU; on a CPU only its losses can be seen.
#
# Two rows need a comment. `accelerate to-fsdp2` writes `fsdp_reshard_after_forward: true` for `HYBRID_SHARD`
# and `false` for `NO_SHARD`: the second dimension of the mesh is gone, and a model that was not sharded gets
# sharded. And DeepSpeed's stage 1 cuts the optimizer's state alone, for which FSDP2 has nothing; the
# translation takes stage 2 and says so.

# %% jupyter={"source_hidden": true}
Table(
    ["setting", "in FSDP2", "counterpart"],
    [
        [row.key, row.fsdp2, "yes" if row.has_counterpart else "no"]
        for row in translate({"zero_optimization": {"stage": 1}}).rows
    ],
)

# %% [markdown]
# ## Proof
#
# The figure shows all pairs at a glance: the bytes that the collectives of a step carry, with FSDP1 and
# FSDP2.

# %% jupyter={"source_hidden": true}
everything = ranks.get("compared")[0]
fig, (axes,) = plots.figure(width=8.0, height=0.42 * len(everything) + 1.0)
for row, found_pair in enumerate(everything.values()):
    for index, sent in enumerate(found_pair["all"]):
        place = row + 0.36 * (index - 0.5)
        label = f"FSDP{index + 1}" if row == 0 else None
        axes.barh(place, sent, height=0.34, color=plots.RANK_COLORS[index], label=label)
        axes.text(sent, place, f" {sent:.0f}", va="center", fontsize=8)
axes.set_yticks(range(len(everything)), list(everything))
axes.set(xlabel="KiB that the collectives of a step carry", ylim=(len(everything) - 0.4, -0.6))
axes.margins(x=0.1)
axes.tick_params(length=0)
fig.legend(loc="outside lower center", ncols=2, frameon=False)
plots.show(fig, alt="KiB that the collectives of a step carry with FSDP1 and FSDP2, for each idea.")

# %% [markdown]
# The two send the same in every pair but one: with frozen layers FSDP2 sends less.

# %% tags=["check", "equality"]
# %%ranks
for idea, pair in compared.items():
    _, loss1, loss2 = pair["losses"]
    assert abs(loss1 - loss2) < (1e-2 if idea == "bf16" else 1e-4), idea
    assert (pair["all"][0] == pair["all"][1]) == (idea != "freezing"), idea
print("Checked: the last losses agree for every pair, and the bytes for all but freezing.")

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
#   methods of FSDP1. The tables above say what to write instead.
# - **The ranks print different norms of the gradients.** `nn.utils.clip_grad_norm_` runs on a model of FSDP1.
#   There is no error: see "Clipping".
# - **`mat1 and mat2 must have the same dtype, but got BFloat16 and Float`.** `mp_policy` was given to the
#   root alone: the root casts its inputs to bf16, and the blocks keep float32 weights. Give the policy to
#   each call of `fully_shard`.
# - **`Missing key in checkpoint state_dict` when an old checkpoint is loaded.** It is a LOCAL_STATE_DICT: see
#   "LOCAL_STATE_DICT has to be moved".
# - **The model of a config file trains in another way.** A key had no counterpart: look at the rows with an
#   exclamation mark in "Config files".
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
for zero in ({"offload_param": {"device": "nvme"}}, {"zero_quantized_weights": True}, {"stage": 1}):
    assert translate({"zero_optimization": {"stage": 3, **zero}}).without_counterpart
kib2, world = everything["wrapping"]["all"][1], ranks.get("rank")
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
        "everything-deepspeed": "No. `translate` finds no counterpart for offloading to NVMe, for quantized "
        "communication, nor for ZeRO-1.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - With the same units FSDP1 and FSDP2 have the same losses and send the same bytes. How long memory is held
#   on a GPU differs (lesson 11).
# - Some arguments of FSDP1 are gone because nothing is left to choose (`use_orig_params`,
#   `limit_all_gathers`). Others became calls: strategy and groups are `reshard_after_forward` and the mesh,
#   prefetching has two methods.
# - Clip FSDP2 with PyTorch's own function. Under FSDP1 the same line is wrong, without an error.
# - Full and sharded state dicts carry over. Move LOCAL_STATE_DICT while you still have FSDP1 to read it.
# - `translate` reads the config files of several frameworks, and names what has no counterpart.
#
# ## Next
#
# So far everything ran on this machine. How much memory and time would it take on GPUs that you do not
# have? [Lesson 14](14_plan_before_you_rent.ipynb) plans before you rent.
#
# [← lesson 12](12_a_model_too_big_for_one_rank.ipynb) · [lesson 14 →](14_plan_before_you_rent.ipynb)

# %% [markdown]
# # 6 · Sharding strategies
#
# What is cut into shards: the optimizer's state, the gradients, the parameters, or all three? And over which
# ranks? Each answer is a strategy, and each trades memory for bytes on a link. In this lesson you measure
# both for six strategies, on the same model and with the same result.

# %% [markdown] tags=["card"]
# learn:
# - 'DDP, ZeRO-1, ZeRO-2, FULL_SHARD, HYBRID_SHARD and resharding to a host: memory
#   on each rank'
# - how many bytes each sends, and how many of them cross the link between two hosts
# - how the ranks of several hosts are arranged in a mesh
# - gradient accumulation that communicates once
# - the largest model that fits, and when DDP is the better choice
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 4](04_backward_prefetch.ipynb)
#   · no GPU'
# ranks: '4 on this machine, as two hosts of two. With `FSDP_RANKS=2` or 3 all are on
#   one host: then HYBRID_SHARD and resharding to a host are left out, and nothing is
#   sent between hosts.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: '[Sharding strategies](https://www.loom.com/share/1f280618955c4f22a5a1ad6cbb41b28c),
#   2022. Since then: HYBRID_SHARD, then announced, exists, and FSDP2 takes a mesh
#   instead of the name of a strategy.'

# %% [markdown]
# **The question of this lesson:** two hosts, with a slow link between them. Which part of the model should
# each rank hold, and which ranks should exchange it?

# %% jupyter={"source_hidden": true}
from matplotlib.patches import FancyBboxPatch, Rectangle

from fsdp_utils.lessons import lesson, plots, recorded

PIECES = {
    "DDP": [(0, 1, 2, 3)] * 4,
    "FULL_SHARD": [(0,), (1,), (2,), (3,)],
    "HYBRID_SHARD": [(0, 1), (2, 3)] * 2,
    "reshard to a host": [(0,), (1,), (2,), (3,)],
}
SAID = {
    "DDP": "all_reduce: 0 1 2 3",
    "FULL_SHARD": "all_gather, reduce_scatter:\n0 1 2 3",
    "HYBRID_SHARD": "all_gather, reduce_scatter:\n0 1 and 2 3\nall_reduce: 0 2 and 1 3",
    "reshard to a host": "all_gather in forward,\nreduce_scatter: 0 1 2 3\nall_gather in backward:\n"
    "0 1 and 2 3",
}
fig, panels = plots.figure(4, width=9.8, height=3.1)
for axes, (name, pieces) in zip(panels, PIECES.items()):
    for r, held in enumerate(pieces):
        left = r * 1.15 + (r // 2) * 0.55
        for piece in range(4):
            color = plots.RANK_COLORS[piece] if piece in held else plots.FAINT
            axes.add_patch(Rectangle((left, 3 - piece), 0.9, 0.9, color=color))
        axes.text(left + 0.45, -0.45, f"rank {r}", ha="center", fontsize=7.5)
    for host in range(2):
        style = {"boxstyle": "round,pad=0.12", "fill": False, "edgecolor": plots.INK, "linewidth": 1}
        axes.add_patch(FancyBboxPatch((host * 2.85, -0.75), 2.05, 4.7, **style))
        axes.text(host * 2.85 + 1.02, 4.3, f"host {host}", ha="center", fontsize=8)
    axes.text(2.45, -1.25, SAID[name], ha="center", va="top", fontsize=8)
    axes.set(title=name, xlim=(-0.25, 5.15), ylim=(-3.5, 4.8), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Which quarter of the parameters each of four ranks on two hosts holds at rest.")

# %% [markdown]
# The parameters of a model are cut into four pieces, one colour each. A column is a rank, and shows the
# pieces that it holds between two steps (*at rest*). The text under each drawing names the collectives and
# the groups of ranks that take part in them. DDP holds everything everywhere. FULL_SHARD holds each piece
# once, so its collectives go over both hosts. HYBRID_SHARD (also called HSDP) holds a copy of the model on
# each host, and cuts each copy over the ranks of its host. The fourth strategy, resharding to a host, looks
# like FULL_SHARD at rest and differs within a step; *Six strategies* explains it. (`fully_shard` cuts each
# parameter by itself. The drawing shows all of them as one.)
#
# ## In your own code
#
# With FSDP2 a strategy is two arguments of `fully_shard`: the `mesh`, which says which ranks share the
# shards, and `reshard_after_forward`, which says whether a unit is freed after its forward pass. This script
# is HYBRID_SHARD. Save it as `train.py`. On one host start it with `torchrun --nproc-per-node 4 train.py`:
# the mesh then has one row, which is FULL_SHARD. For two hosts run the same command on each of them, and tell
# torchrun where they meet:
# `torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 train.py`, where
# HOST0 is the name of one of the two.
#
# ```python
# import os
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
# per_host = int(os.environ["LOCAL_WORLD_SIZE"])               # set by torchrun
# shape = (dist.get_world_size() // per_host, per_host)        # hosts, ranks on each
# mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
# # FULL_SHARD: mesh = init_device_mesh(device, (dist.get_world_size(),)); ZeRO-2: that, and False below
# torch.manual_seed(0)                                         # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh, reshard_after_forward=True)
# optimizer = torch.optim.AdamW(model.parameters())
# for step in range(10):
#     x = torch.randn(32, 256, device=device)                  # your data
#     model(x).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# ## Two hosts, imagined

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, try_answers, turn
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import warnings
from contextlib import nullcontext
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")                             # it uses torch.jit, which is deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

from fsdp_utils import record_collectives
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.sharding.units import find_units

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                              # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
hosts = 2 if world >= 4 and 64 % world == 0 else 1              # not real ones, see below
per_host = world // hosts


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                       # f32[batch, 64]
        return x + self.down(F.gelu(self.up(x)))                # f32[batch, 64]


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6))).to(device)


def batch(number, alone=False):
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(number))    # f32[24, 64]
    return (x if alone else x.chunk(world)[rank]).to(device)                    # f32[24 / world, 64]


P = sum(p.nbytes for p in build().parameters())                 # bytes of all parameters
print(f"{P / 1024:.0f} KiB of parameters, {len(build())} blocks; {hosts} host(s) of {per_host} ranks")

# %% [markdown]
# All ranks are processes of this machine. To count bytes between hosts, the lesson treats them as **two hosts
# of two ranks**: ranks 0 and 1, and ranks 2 and 3. The bytes are real, the hosts are not. The model has six
# equal blocks, and each is a unit: `fully_shard` gathers and frees it as one. The folded cell above defines
# the model (`build`) and its data (`batch`). `P` stands for the bytes of all parameters.
#
# A **device mesh** says which ranks belong together: it arranges them in rows and columns.

# %%
# %%ranks
if hosts == 2:
    mesh = init_device_mesh(device.type, (hosts, per_host), mesh_dim_names=("replicate", "shard"))
    of_rank = {dim: dist.get_process_group_ranks(mesh.get_group(dim)) for dim in ("shard", "replicate")}

# %% jupyter={"source_hidden": true}
hosts, per_host = ranks.get("(hosts, per_host)")[0]
fig, (axes,) = plots.figure(width=6.4, height=2.5)
for r in range(hosts * per_host):
    row, column = divmod(r, per_host)
    axes.text(column, row, str(r), ha="center", va="center", fontsize=15, fontweight="bold")
style = {"fill": False, "linewidth": 2.2}
for row in range(hosts):
    box = {"boxstyle": "round,pad=0.1", "edgecolor": plots.RANK_COLORS[0], **style}
    axes.add_patch(FancyBboxPatch((-0.3, row - 0.22), per_host - 0.4, 0.44, **box))
    axes.text(-0.55, row, f"host {row}", ha="right", va="center")
for column in range(per_host):
    box = {"boxstyle": "round,pad=0.1", "edgecolor": plots.RANK_COLORS[5], "linestyle": "--", **style}
    axes.add_patch(FancyBboxPatch((column - 0.17, -0.36), 0.34, hosts - 0.28, **box))
words = {"va": "center", "fontsize": 9}
axes.text(per_host - 0.2, 0.2, "rows: the groups of dimension “shard”", color=plots.RANK_COLORS[0], **words)
axes.text(
    per_host - 0.2, 0.8, "columns: the groups of “replicate”", color=plots.RANK_COLORS[5], **words
)
axes.set(xlim=(-1.2, per_host + 2.2), ylim=(hosts - 0.4, -0.6), xticks=[], yticks=[], title="the mesh")
axes.spines[:].set_visible(False)
plots.show(fig, alt="The ranks as a mesh: rows are hosts and share shards, columns hold copies.")

# %% [markdown]
# A row is a host. Its ranks share one copy of the model, one piece each: they form a group of the dimension
# "shard". The ranks of a column hold the same piece: a group of the dimension "replicate". FSDP2 reads a mesh
# of two dimensions in this order: the first replicates, the second shards.

# %% tags=["check"]
# %%ranks 0
if hosts == 2:
    assert of_rank == {"shard": list(range(per_host)), "replicate": list(range(0, world, per_host))}
print("Checked: the groups of rank 0 are its row and its column.")

# %% [markdown]
# ## Six strategies
#
# ZeRO-1 to ZeRO-3 are the stages of [the ZeRO paper](https://arxiv.org/abs/1910.02054); FULL_SHARD and
# HYBRID_SHARD are the names of FSDP1.
#
# | strategy | cuts | how |
# |:--|:--|:--|
# | DDP | nothing | `DistributedDataParallel` |
# | ZeRO-1 | the optimizer's state | DDP with `ZeroRedundancyOptimizer` |
# | ZeRO-2 | gradients, too | `fully_shard(…, reshard_after_forward=False)` |
# | ZeRO-3, in FSDP FULL_SHARD | parameters, too | `fully_shard(…, reshard_after_forward=True)` |
# | HYBRID_SHARD | as FULL_SHARD, within a host | a mesh of two dimensions |
# | reshard to a host | as FULL_SHARD | `reshard_after_forward=` ranks per host |
#
# FSDP's ZeRO-2 cuts the parameters, too, but a unit that was gathered for forward stays complete until its
# backward pass. **Resharding to a host** shards over all ranks, as FULL_SHARD does. But after its forward
# pass a unit is not cut back to a piece for each of all ranks: the ranks of one host keep all of it between
# them, `1 / per_host` each, until backward. So backward gathers within the host.

# %%
# %%ranks
def sharded(**options):
    model = build()
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ddp():
    return DDP(build(), gradient_as_bucket_view=True)           # else DDP holds the gradients twice


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def zero1(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


# %%
# %%ranks
strategies = {
    "DDP": (ddp, adamw),
    "ZeRO-1": (ddp, zero1),
    "ZeRO-2": (lambda: sharded(reshard_after_forward=False), adamw),
    "FULL_SHARD": (lambda: sharded(reshard_after_forward=True), adamw),
}
if hosts == 2:
    strategies["HYBRID_SHARD"] = (lambda: sharded(mesh=mesh, reshard_after_forward=True), adamw)
    strategies["reshard to a host"] = (lambda: sharded(reshard_after_forward=per_host), adamw)

# %% [markdown]
# **Predict before you go on.** Which of them holds the least on a rank? Which sends the least between the
# hosts? Is one of them best at both?
#
# <details><summary>Answer</summary>
#
# FULL_SHARD holds the least: a quarter of everything, and the units that are gathered. HYBRID_SHARD sends the
# least between the hosts: each rank reduces only its shard of the gradients there. No strategy is best at
# both. The next cells measure it.
#
# </details>
#
# ## The same losses
#
# A comparison means something only if all strategies train the same model. So first compare their losses with
# those of one process.

# %% tags=["equality"]
# %%ranks
def train(strategy, steps=4):
    """The losses of all steps, and what was sent in the last one."""
    make_model, make_optimizer = strategies[strategy]
    model = make_model()
    optimizer = make_optimizer(model)
    losses = torch.zeros(steps, device=device)
    for number in range(steps):
        last = number == steps - 1
        with record_collectives(model, ranks_per_host=per_host) if last else nullcontext() as trace:
            loss = model(batch(number)).square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach() / world
    dist.all_reduce(losses)
    return losses.tolist(), trace


results = {name: train(name) for name in strategies}

# %% jupyter={"source_hidden": true}
# %%ranks
def train_alone():
    model = build()
    optimizer = adamw(model)
    losses = []
    for number in range(4):
        loss = model(batch(number, alone=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


alone = train_alone()
curves = {"one process": alone, **{name: losses for name, (losses, _) in results.items()}}

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", "1", "2", "3", "4"],
    [[name, *(f"{loss:.4f}" for loss in losses)] for name, losses in ranks.get("curves")[0].items()],
)

# %% [markdown]
# FSDP1, the API of the original video, chooses by a name, `ShardingStrategy.FULL_SHARD` for instance. A
# folded cell runs three of its strategies, and compares losses and bytes with those of FSDP2.

# %% tags=["check"]
# %%ranks
for losses in curves.values():
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)

names = {"ZeRO-2": ShardingStrategy.SHARD_GRAD_OP, "FULL_SHARD": ShardingStrategy.FULL_SHARD}
if hosts == 2:
    names["HYBRID_SHARD"] = ShardingStrategy.HYBRID_SHARD


def fsdp1(name):
    options = {"sharding_strategy": names[name], "device_id": device}
    if name == "HYBRID_SHARD":
        options["device_mesh"] = mesh
    return FSDP(nn.Sequential(*(FSDP(block, **options) for block in build())), **options)


fsdp2_strategies = dict(strategies)
for name in names:
    strategies[name] = (lambda name=name: fsdp1(name), adamw)
    losses, trace = train(name)
    torch.testing.assert_close(losses, results[name][0], rtol=1e-5, atol=1e-6)
    if 64 % world == 0:                                         # else the two pad differently
        assert trace.bytes_by_kind() == results[name][1].bytes_by_kind()
strategies = fsdp2_strategies
print("Checked: all losses are those of one process. FSDP1: the same losses, the same bytes in each kind.")

# %% [markdown]
# ## Memory of a rank
#
# What does a rank hold at rest, and how much comes on top within a step? The meter of lesson 0 counts what
# is gathered, with the buffers that FSDP2 gathers into.

# %% jupyter={"source_hidden": true}
# %%ranks
def local_bytes(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def fsdp2_parameters(model):
    """What FSDP2 knows of each parameter of the model."""
    return [p for unit in find_units(model) for group in unit.parts for p in group.fsdp_params]


def kept_after_forward(model):
    """Bytes of the larger shards that FSDP2 keeps from forward to backward, if it reshards to a host."""
    kept = (getattr(p, "_sharded_post_forward_param_data", None) for p in fsdp2_parameters(model))
    return sum(data.nbytes for data in kept if data is not None)


def hold(strategy):
    """What this rank holds in the second step, in bytes."""
    make_model, make_optimizer = strategies[strategy]
    model = make_model()
    optimizer = make_optimizer(model)
    kept = []                                                   # when the last block begins its forward pass
    blocks = model.module if isinstance(model, DDP) else model
    blocks[-1].register_forward_pre_hook(lambda *_: kept.append(kept_after_forward(model)))
    for _ in range(2):
        with Meter(model.parameters()) as meter:
            model(batch(0)).square().mean().backward()
        gradients = local_bytes(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeroRedundancyOptimizer wraps one
    return {
        "parameters": local_bytes(model.parameters()),
        "gradients": gradients,
        "AdamW's averages": local_bytes(t for s in states for t in s.values() if t.dim() > 0),
        # the peak of what is gathered is in forward, and lasts until the last block
        "gathered at the peak": meter.peak_gather_bytes + kept[-1],
    }


held = {name: hold(name) for name in strategies}

# %% tags=["memory"] jupyter={"source_hidden": true}
P = ranks.get("P")[0]
held = ranks.get("held")[0]
Table(
    ["KiB on rank 0", *held["DDP"]],
    [[name, *(round(size / 1024) for size in sizes.values())] for name, sizes in held.items()],
    note=f"P is {P / 1024:.0f} KiB, a block {P / 6 / 1024:.0f} KiB. The last column includes buffers.",
)

# %% jupyter={"source_hidden": true}
kib = {name: {kind: size / 1024 for kind, size in sizes.items()} for name, sizes in held.items()}
plots.amounts({"memory of one rank": kib}, unit="KiB")

# %% [markdown]
# - **DDP** holds everything: parameters, gradients, and twice as much for AdamW's two averages.
# - **ZeRO-1** cuts the averages, the largest part. It hands out whole parameters, so ranks may hold a little
#   more or less than their share.
# - **ZeRO-2** cuts all three at rest. But within a step it gathers the whole model and keeps it, with two
#   buffers at the end of the forward pass: eight blocks.
# - **FULL_SHARD** gathers at most three blocks' worth of bytes, in forward: one block and two buffers. (In
#   backward it is two blocks, by the prefetch of [lesson 4](04_backward_prefetch.ipynb).)
# - **HYBRID_SHARD** cuts over the two ranks of a host, so at rest it holds twice as much as FULL_SHARD.
# - **Resharding to a host** keeps half of each block from forward to backward. So it holds more than
#   FULL_SHARD and less than ZeRO-2.
#
# The columns are maxima, and do not all occur at the same moment: when all gradients are there, nothing is
# gathered any more. So where units are gathered, the sum beside a bar is more than a rank ever holds of the
# four. On the other hand the table leaves out the complete gradients of the block that computes, the buffer
# of the same size from which `fully_shard` reduces them, the activations, and what the optimizer needs for a
# moment within its step.

# %% tags=["check"]
# %%ranks
assert list(held["DDP"].values()) == [P, P, 2 * P, 0]
assert (held["ZeRO-1"]["parameters"], held["ZeRO-1"]["gradients"]) == (P, P)
states = [None] * world
dist.all_gather_object(states, held["ZeRO-1"]["AdamW's averages"])
assert sum(states) == 2 * P                                      # each average is on one rank
for name in ("ZeRO-2", "FULL_SHARD", "reshard to a host"):
    if name in held and 64 % world == 0:                         # else some shards are smaller
        assert list(held[name].values())[:3] == [P // world, P // world, 2 * P // world]
expected = {"ZeRO-2": 8, "FULL_SHARD": 3}
if hosts == 2:
    assert held["HYBRID_SHARD"]["parameters"] == P // per_host
    expected |= {"HYBRID_SHARD": 3, "reshard to a host": 3 + 5 / per_host}
for name, in_blocks in expected.items():
    assert abs(held[name]["gathered at the peak"] / (P / 6) - in_blocks) < 0.04 * in_blocks     # padding
print("Checked: the shares of P, and the gathered blocks: 8 of ZeRO-2, 3 of FULL_SHARD, 5.5 resharded to 2.")

# %% [markdown]
# ## Bytes that a rank sends
#
# In an all-gather over n ranks each rank holds 1 / n of the tensor and receives the rest. So on average a
# rank has to send (n - 1) / n of the full tensor at least. The same holds for a reduce-scatter and a
# broadcast. For an all-reduce it is twice that: once to reduce, once to hand out the result. `sent_bytes` of
# a recorded collective is this lower bound; a backend may send more. The last column counts the collectives
# whose ranks are all on one host.

# %% tags=["bytes"]
# %%ranks
total = {name: sum(e.sent_bytes for e in trace.collectives) for name, (_, trace) in results.items()}
within = {name: trace.sent_bytes_by_link().get("within a host", 0.0) for name, (_, trace) in results.items()}

# %% jupyter={"source_hidden": true}
total, within = ranks.get("(total, within)")[0]
Table(
    ["one step, per rank", "KiB sent", "in units of P", "of these, in collectives within a host"],
    [[n, round(sent / 1024), f"{sent / P:.2f}", f"{within[n] / P:.2f}"] for n, sent in total.items()],
)

# %% [markdown]
# - ZeRO-2 sends no more than DDP: an all-reduce needs as many bytes as a reduce-scatter and an all-gather
#   together. FULL_SHARD sends half as much again, for its second all-gather.
# - ZeRO-1 sends as much as FULL_SHARD and saves less memory. DDP reduces all gradients to every rank,
#   although the optimizer of a rank needs only those of its own part; then the new parameters are broadcast.
# - HYBRID_SHARD sends three quarters of its bytes within a host, resharding to a host a quarter.

# %% tags=["check"]
# %%ranks
def share(n):
    return (n - 1) / n


ring = share(world) * P
assert abs(total["DDP"] - 2 * ring) < 1                          # one all-reduce
assert abs(total["ZeRO-1"] - 3 * ring) < 1                       # an all-reduce, broadcasts of parameters
padded = results["FULL_SHARD"][1].bytes_by_kind()["reduce_scatter"] / P  # 1, or a little more: padding
assert abs(total["ZeRO-2"] - 2 * ring * padded) < 1              # an all-gather and a reduce-scatter
assert abs(total["FULL_SHARD"] - 3 * ring * padded) < 1          # two all-gathers and a reduce-scatter
if hosts == 2:
    assert within["HYBRID_SHARD"] == 3 * share(per_host) * P
    assert total["HYBRID_SHARD"] - within["HYBRID_SHARD"] == 2 * share(hosts) * P / per_host
    assert within["reshard to a host"] == share(per_host) * P
    assert total["reshard to a host"] - within["reshard to a host"] == 2 * ring
print("Checked: each number from its formula, such as 3 (n - 1) / n P of FULL_SHARD.")

# %% [markdown]
# ## Bytes that cross the link
#
# Not all bytes of a collective that spans both hosts cross the link between them. Backends often pass bytes
# around a **ring**: rank 0 sends to 1, 1 to 2, 2 to 3, and 3 to 0. Then only the last rank of a host sends to
# the other host. Under HYBRID_SHARD, an all-reduce goes over one rank of each host, so every rank sends to
# the other host, but only its own shard.

# %%
# %%ranks
def crosses(event):
    """Bytes that this rank sends to another host, if they are passed around a ring."""
    if rank not in event.ranks:
        return 0.0
    following = event.ranks[(event.ranks.index(rank) + 1) % len(event.ranks)]
    return event.sent_bytes if following // per_host != rank // per_host else 0.0


crossing = {name: sum(map(crosses, trace.collectives)) for name, (_, trace) in results.items()}

# %% jupyter={"source_hidden": true}
by_rank = ranks.get("crossing")
crossing = {name: sum(by_rank[r][name] for r in range(per_host)) for name in by_rank[0]}       # of host 0
Table(
    ["one step", "KiB that leave a host", "in units of P"],
    [[name, round(nbytes / 1024), f"{nbytes / P:.2f}"] for name, nbytes in crossing.items()],
)

# %% [markdown]
# FULL_SHARD sends 2.25 times as much over the link as HYBRID_SHARD, and DDP half as much again as
# HYBRID_SHARD. With H hosts and n ranks in all, a host sends 3 (n - 1) / n P under FULL_SHARD and
# 2 (H - 1) / H P under HYBRID_SHARD. So with two hosts of eight ranks the factor is 2.8, and with many hosts
# it is 1.5.
#
# The sliders below go through hosts and ranks per host. The columns are what a rank sends on average, split
# by the link that it takes in the ring; "leave a host" is the sum of its ranks, which share the link. The
# numbers come from the formulas above, for all six strategies. A check below holds these formulas to the
# bytes that were recorded here, and where you read "the rule" no such ranks ran.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore

# collectives over all ranks, then of those within a host, in full sizes; an all-reduce counts twice
TIMES = {"DDP": (2, 0), "ZeRO-1": (3, 0), "ZeRO-2": (2, 0), "FULL_SHARD": (3, 0), "reshard to a host": (2, 1)}


def by_the_rule(strategy, on_hosts, on_each):
    """What a rank sends on average within its host, and what leaves a host, in units of P."""
    if strategy == "HYBRID_SHARD":
        return 3 * (on_each - 1) / on_each, 2 * (on_hosts - 1) / on_hosts
    over_all, in_host = TIMES[strategy]
    n = on_hosts * on_each
    sent = over_all * (n - 1) / n
    leave = sent if on_hosts > 1 else 0.0                       # the last rank of the host sends it
    return sent - leave / on_each + in_host * (on_each - 1) / on_each, leave


def sends(on_hosts, on_each, strategy):
    inside, leave = by_the_rule(strategy, on_hosts, on_each)
    ran = (on_hosts, on_each) == (hosts, per_host)
    note = "recorded on this page, and the rule says the same"
    return Point([inside, leave / on_each], [leave], note if ran else "by the rule: no such ranks ran here")


explore(
    "calculated: bytes that a rank sends in one step, in units of P",
    [Axis("hosts", [1, 2, 4, 8, 16, 32], start=1), Axis("ranks per host", [1, 2, 4, 8], start=1),
     Axis("strategy", [*TIMES, "HYBRID_SHARD"], start=3)],
    Stack("sent by a rank, on average", "P",
          {"to a rank of its host": plots.RANK_COLORS[0], "to another host": plots.RANK_COLORS[5]}, upto=3.2),
    sends,
    scalars={"leave a host": "P"},
    over="strategy",
)

# %% tags=["check"]
recorded_total = ranks.get("total")
for name in crossing:
    inside, leave = by_the_rule(name, hosts, per_host)
    mean = sum(recorded_total[r][name] for r in range(per_host)) / per_host / P
    exact = 64 % (hosts * per_host) == 0                        # else the shards are padded
    assert abs(crossing[name] / P - leave) < 1e-3
    assert abs(mean - inside - leave / per_host) < (1e-3 if exact else 0.12)
print("Checked: the rule of the sliders gives the recorded bytes, for each strategy that ran.")

# %% [markdown]
# More ranks on a host change little of what a rank sends, but more of it stays on the host. Only what leaves
# the host does not shrink: it is paid once for each host, however many ranks share the link.
#
# The next figure puts memory and link together. The best place would be the bottom left: little memory,
# little on the link. No strategy is there.

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=6.8, height=3.0)
beside = {"HYBRID_SHARD": ((0, -17), "center"), "reshard to a host": ((-9, -3), "right")}
for index, name in enumerate(crossing):
    x, y = sum(held[name].values()) / P, crossing[name] / P
    axes.plot(x, y, "o", color=plots.RANK_COLORS[index], markersize=9)
    offset, side = beside.get(name, ((0, 9), "center"))
    axes.annotate(name, (x, y), offset, textcoords="offset points", ha=side)
axes.set(xlabel="held by a rank, sum of the four columns above, in units of P", ylabel="P that leave a host")
axes.set(xlim=(0, 4.6), ylim=(0, max(crossing.values()) / P + 0.5), title="memory against the link")
plots.show(fig, alt="What each strategy holds on a rank, against what it sends between the hosts.")

# %% tags=["check"]
if hosts == 2:
    assert abs(crossing["FULL_SHARD"] / crossing["HYBRID_SHARD"] - 2.25) < 0.01
    assert abs(crossing["DDP"] / crossing["HYBRID_SHARD"] - 1.5) < 0.01
    factor = {(H, r): (3 * (H * r - 1) / (H * r)) / (2 * (H - 1) / H) for H, r in ((2, 2), (2, 8), (500, 8))}
    assert [round(value, 2) for value in factor.values()] == [2.25, 2.81, 1.5]
print("Checked: the factors 2.25, 2.8 and 1.5.")

# %% [markdown]
# ## Your turn 1 · The groups of HYBRID_SHARD
#
# Write what `init_device_mesh` works out: given the world size and the number of ranks on each host, which
# ranks share the shards with this rank, and which ranks hold the same shard? Ranks are numbered host by host:
# with two hosts of four, ranks 0 to 3 are on host 0. Return two lists of ranks in ascending order, this rank
# included.
#
# A folded cell compares your groups with the right ones for four clusters. Then it trains with a mesh made of
# your groups, and counts what your strategy sends between the hosts. Edit the next cell, then run it and the
# folded cells below it.
#
# <details><summary>Hint</summary>
#
# `rank // per_host` is the number of the rank's host. Ranks that hold the same shard have the same place on
# their host, `rank % per_host`.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_groups(rank, world, per_host):
    return None                                 # your lines here; return (shard_group, replicate_group)


# %% jupyter={"source_hidden": true}
# %%ranks
def right_groups(rank, world, per_host):
    first = rank - rank % per_host
    return [*range(first, first + per_host)], [*range(rank % per_host, world, per_host)]


def score_groups(groups):
    """Compare the groups of all ranks of some clusters, then train on a mesh made of them."""
    if groups(rank, world, per_host) is None:
        return None

    def given(*case):
        return [[int(member) for member in group] for group in groups(*case)]

    clusters = [(4, 2), (8, 4), (8, 2), (64, 8)]
    asked = [(r, *cluster) for cluster in clusters for r in range(cluster[0])]
    wrong = sum(given(*case) != [*right_groups(*case)] for case in asked)
    rows = sorted({tuple(given(r, world, per_host)[0]) for r in range(world)})
    columns = {tuple(given(r, world, per_host)[1]) for r in range(world)}
    sent = None
    if sorted(sum(rows, ())) == list(range(world)) and columns == set(zip(*rows)):
        yours = DeviceMesh(device.type, rows, mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=yours, reshard_after_forward=True)
        model(batch(0)).square().mean().backward()
        with record_collectives(model, ranks_per_host=per_host) as trace:
            model(batch(0)).square().mean().backward()
        sent = round(trace.sent_bytes_by_link().get("between hosts", 0.0) / P, 2)
    return {"ranks with wrong groups, in four clusters": wrong, "P sent between hosts, per rank": sent}

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_groups(my_groups)",
    {
        "ranks with wrong groups, in four clusters": exactly(
            0,
            otherwise="Some ranks get wrong groups. Return the rank's row of the mesh first, then its "
            "column; each rank is in one row and in one column.",
        ),
        "P sent between hosts, per rank": at_most(
            0.5, otherwise="Shards are shared between hosts, which sends more than 0.5 P over the link."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_groups(rank, world, per_host):
    host, place = divmod(rank, per_host)
    shard = list(range(host * per_host, (host + 1) * per_host))
    replicate = list(range(place, world, per_host))
    return shard, replicate

# %% tags=["wrong"] turn=1
# %%ranks
def my_groups(rank, world, per_host):
    host, place = divmod(rank, per_host)
    return list(range(place, world, per_host)), list(range(host * per_host, (host + 1) * per_host))

# %% tags=["wrong"] turn=1
# %%ranks
def my_groups(rank, world, per_host):
    return list(range(world)), [rank]

# %% tags=["wrong"] turn=1
# %%ranks
def my_groups(rank, world, per_host):
    return list(range(per_host)), list(range(0, world, per_host))

# %% tags=["wrong"] turn=1
# %%ranks
def my_groups(rank, world, per_host):
    hosts = world // per_host
    host, place = divmod(rank, hosts)
    return list(range(host * hosts, (host + 1) * hosts)), list(range(place, world, hosts))

# %% [markdown]
# ## A slow link
#
# How long would a step take on links of different speeds? **This is a replay**, as in
# [lesson 4](04_backward_prefetch.ipynb): the recorded collectives and the computation run on two simulated
# streams, in the recorded order. A block takes 1 ms in forward and 2 ms in backward, and its parameters are
# 4,096 times as large as those of our model: 0.5 GiB. Within a host a rank sends 50 GiB/s. Each row of the
# table is another speed of the link between the hosts. The two ranks of a host share that link in the
# all-reduces of HYBRID_SHARD.

# %% tags=["replay"]
traces = ranks.get("{name: trace for name, (_, trace) in results.items()}")[0]
speeds, scale = (50, 10, 2, 0.5), 4096          # GiB/s of the link between hosts; see above


def step_ms(name, link):
    trace = traces[name]
    flows = per_host if name == "HYBRID_SHARD" else 1           # that share the link at the same time
    compute = dict.fromkeys(trace.unit_bytes, 1e-3) or {"(root)": 6e-3}         # DDP has no units
    gib_s = {"within a host": 50 / scale, "between hosts": link / flows / scale}
    return 1e3 * trace.replay(compute_s=compute, link_gib_s=gib_s).step_s


steps = {link: {name: step_ms(name, link) for name in traces} for link in speeds}

# %% jupyter={"source_hidden": true}
Table(
    ["ms a step, replayed", *traces],
    [[f"{link} GiB/s between", *(round(ms) for ms in row.values())] for link, row in steps.items()],
)

# %% [markdown]
# On the fastest link ZeRO-1 takes 64% longer than ZeRO-2, and HYBRID_SHARD is slower than FULL_SHARD. The
# slower the link between the hosts, the more of a step is the time of the bytes that cross it, and
# HYBRID_SHARD sends the fewest. On the slowest link it is 2.2 times as fast as FULL_SHARD; the bytes predict
# 2.25.
#
# (This replay has one stream for all collectives. FSDP2 gives the all-reduces of HYBRID_SHARD a stream of
# their own, beside the collectives within the host. So on fast links HYBRID_SHARD does better than here.)
#
# (DDP would do better with a larger model. It fills *buckets* with gradients, the first of 1 MiB and then of
# 25 MiB, and reduces each as soon as it is full, during backward. Here all gradients fit into the first one,
# which is sent when backward is over.)

# %% tags=["check"]
fastest, slowest = steps[50], steps[0.5]
apart = max(fastest.values()) / min(fastest.values())
if hosts == 2:
    assert 1.62 < apart < 1.66
    assert 2.15 < slowest["FULL_SHARD"] / slowest["HYBRID_SHARD"] < 2.25
    assert min(slowest, key=slowest.get) == "HYBRID_SHARD"
print("Checked: 64% on the fastest link, a factor of 2.2 on the slowest.")

# %% [markdown]
# ### Recorded: two hosts, one link
#
# Both hosts of this recording run on one machine, too, but the link between them is real: its rate is
# limited, and its bytes are counted ("on the wire"). The column "s for the bytes" is the time that the link
# needs for them.

# %% jupyter={"source_hidden": true}
two_hosts = recorded.load("two_hosts")
rows, ratios = [], []
slowest_link = min(result["rate_mbit"] for result in two_hosts["results"] if result["rate_mbit"])
for result in two_hosts["results"]:
    rate = f"{result['rate_mbit']} Mbit/s" if result["rate_mbit"] else "not limited"
    runs = result["strategies"]
    for name, run in runs.items():
        bits = 8 * 2**20 * run["recorded_mib"]
        predicted = bits / (1e6 * result["rate_mbit"]) if result["rate_mbit"] else None
        assert abs(run["wire_mib"] / run["recorded_mib"] - 1) < 0.05
        assert predicted is None or run["step_s"] > predicted
        assert result["rate_mbit"] != slowest_link or run["step_s"] < 1.25 * predicted
        shown = {"SHARD_GRAD_OP": "ZeRO-2"}.get(name, name)
        sent = [f"{run['recorded_mib']:.1f}", f"{run['wire_mib']:.1f}"]
        rows.append([rate, shown, *sent, f"{predicted:.2f}" if predicted else "-", f"{run['step_s']:.2f}"])
    full, hybrid = runs["FULL_SHARD"], runs["HYBRID_SHARD"]
    measured, by_bytes = (full[of] / hybrid[of] for of in ("step_s", "recorded_mib"))
    assert result["rate_mbit"] != slowest_link or abs(measured / by_bytes - 1) < 0.25
    ratios.append(f"{rate}: {measured:.1f} times")
Table(
    ["link", "strategy", "MiB a host sends", "MiB on the wire", "s for the bytes", "s a step"],
    rows,
    note=f"HYBRID_SHARD is faster than FULL_SHARD by: {', '.join(ratios)}. By the bytes: {by_bytes:.1f}. "
    f"{two_hosts['group'][0].upper()}{two_hosts['group'][1:]}; {two_hosts['device']}, {two_hosts['date']}. "
    f"Command: {two_hosts['command']}",
)

# %% [markdown]
# "MiB a host sends" is computed from the recorded collectives as above, with one difference: gloo carries
# out a reduce-scatter as an all-reduce, and so sends twice the least. That is why ZeRO-2 sends more than DDP
# here, and why the bytes predict a factor of 3, where they predict 2.25 for a backend that sends the least.
#
# On the slowest link each step takes at most a quarter longer than its bytes do. The faster the link, the
# more the rest of a step counts.
#
# ## Gradient accumulation
#
# Four small batches, one optimizer step. Do the ranks have to reduce gradients after each batch? Only after
# the last. FSDP2 has `set_requires_gradient_sync(False)` for the others; DDP and FSDP1 have `no_sync()`.

# %% tags=["accumulation"]
# %%ranks
def accumulate(model, sync):
    for number in range(4):
        model.set_requires_gradient_sync(sync or number == 3)
        (model(batch(number)).square().mean() / 4).backward()


# %% jupyter={"source_hidden": true}
# %%ranks
def unsharded_gradients(model):
    """Bytes of gradients that FSDP2 keeps complete, because they were not reduced yet."""
    kept = 0
    for p in fsdp2_parameters(model):
        gradient = p.unsharded_accumulated_grad
        if gradient is None and hasattr(p, "_unsharded_param"):
            gradient = p.unsharded_param.grad
        kept += 0 if gradient is None else gradient.nbytes
    return kept


def still_gathered(model):
    """Number of units that are complete."""
    return sum(group.is_unsharded for unit in find_units(model) for group in unit.parts)


def measure(accumulate):
    """What four batches and a step gather and reduce, in times the whole model, and the weights after it."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = []                                       # bytes of gradients that are kept when a batch begins

    def before_batch(*_):
        sharded = [p.grad for p in model.parameters() if isinstance(p, DTensor) and p.grad is not None]
        most.append(unsharded_gradients(model) + local_bytes(sharded))

    model.register_forward_pre_hook(before_batch)
    with record_collectives(model, ranks_per_host=per_host) as trace:
        accumulate(model)
    left = still_gathered(model)
    optimizer.step()
    model.reshard()
    for block in model:
        block.reshard()
    once = results["FULL_SHARD"][1].bytes_by_kind()
    kinds = trace.bytes_by_kind()
    return {
        "gathers of the model": round(2 * kinds.get("all_gather", 0) / once["all_gather"], 2),
        "reductions of the model": round(kinds.get("reduce_scatter", 0) / once["reduce_scatter"], 2),
        "gradients kept, KiB": round(max(most, default=0) / 1024),
        "blocks still gathered at the end": left,
    }, [p.full_tensor() for p in model.parameters()]


with_sync, weights = measure(lambda model: accumulate(model, True))
without, same_weights = measure(lambda model: accumulate(model, False))

# %% jupyter={"source_hidden": true}
measured = {"with sync": ranks.get("with_sync")[0], "without": ranks.get("without")[0]}
Table(
    ["four batches, FULL_SHARD", *list(measured["without"])[:3]],
    [[way, *list(values.values())[:3]] for way, values in measured.items()],
)

# %% [markdown]
# The weights after the step are the same up to rounding. A gather and a reduction of the model send about the
# same number of bytes. With synchronisation there are 8 + 4 of them, without it 8 + 1: a quarter less. The
# eight gathers stay, two for each batch, because the parameters are freed as before. The price is in the last
# column, the gradients that a rank keeps between two batches: without synchronisation all 776 KiB, complete,
# instead of a quarter.
#
# Two more switches govern the gathers. `set_reshard_after_forward(False)` keeps a unit complete from its
# forward to its backward pass, as ZeRO-2 does. `set_reshard_after_backward(False)` keeps it complete *after*
# its backward pass, so that the next batch finds it gathered. (Under HYBRID_SHARD there is a middle way:
# `set_requires_all_reduce(False)` reduces within the host after each batch, so that gradients stay shards,
# and leaves out the all-reduce between the hosts.)

# %% tags=["check"]
# %%ranks
assert with_sync["reductions of the model"] == 4 * without["reductions of the model"] == 4
assert with_sync["gathers of the model"] == without["gathers of the model"] == 8
assert without["gradients kept, KiB"] == round(P / 1024)
for a, b in zip(weights, same_weights):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
model = ddp()
for number in range(3):
    model(batch(number)).sum().backward()
with record_collectives(model) as four:
    for number in range(4):
        model(batch(number)).sum().backward()
with record_collectives(model) as one:
    for number in range(4):
        with model.no_sync() if number < 3 else nullcontext():
            model(batch(number)).sum().backward()
assert four.bytes_by_kind()["all_reduce"] == 4 * one.bytes_by_kind()["all_reduce"] == 4 * P
print("Checked: the same weights; 4 and 1 reductions, 8 gathers; DDP 4 all-reduces of P, 1 with no_sync.")

# %% [markdown]
# ## Your turn 2 · Accumulate, and communicate once
#
# Write an accumulation that gathers the model once and reduces it once, for all batches together. That
# pays where the link is slow, and memory has room for all parameters and all gradients at once. At the end
# all blocks have to be freed again, so that the next step does not begin with old parameters. Divide each
# loss by the number of batches, as above. Edit the next cell, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Turn three switches off before the first batch: `set_reshard_after_forward`, `set_reshard_after_backward`
# and `set_requires_gradient_sync`. Turn the last two on again before the last batch, so that its backward
# pass reduces the gradients and frees the parameters.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_accumulate(model, batches):              # batches: a list of tensors
    pass                                        # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def score_once(my_accumulate):
    """Measure the reader's accumulation of four batches."""
    batches = [batch(number) for number in range(4)]
    measured, mine = measure(lambda model: my_accumulate(model, batches))
    if measured["gathers of the model"] == 0:
        return {"problem": "No unit was gathered: `my_accumulate` has not run the model."}
    off = sum(not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(mine, weights))
    return {**measured, "parameters that differ after the step": off}

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_once(my_accumulate)",
    {
        "gathers of the model": exactly(
            1, otherwise="The model is gathered more than once: units are freed after forward or backward."
        ),
        "reductions of the model": exactly(
            1, otherwise="Gradients should be reduced once, in the backward pass of the last batch."
        ),
        "blocks still gathered at the end": exactly(
            0, otherwise="Blocks are left complete: the next forward pass would use these old parameters."
        ),
        "parameters that differ after the step": exactly(
            0, otherwise="The weights differ from those with four reductions: is each loss divided by four?"
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        last = number == len(batches) - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (model(x).square().mean() / len(batches)).backward()

# %% tags=["wrong"] turn=2
# %%ranks
def my_accumulate(model, batches):
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (model(x).square().mean() / len(batches)).backward()

# %% tags=["wrong"] turn=2
# %%ranks
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (model(x).square().mean() / len(batches)).backward()

# %% tags=["wrong"] turn=2
# %%ranks
def my_accumulate(model, batches):
    for number, x in enumerate(batches):
        last = number == len(batches) - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (model(x).square().mean() / len(batches)).backward()

# %% tags=["wrong"] turn=2
# %%ranks
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        last = number == len(batches) - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model(x).square().mean().backward()

# %% tags=["check"]
try_answers(6)

# %% [markdown]
# ## The largest model that fits
#
# The video of 2022 shows how large a model could be trained on a machine with eight GPUs of 24 GB. Compute
# what parameters, gradients and AdamW's averages alone allow: 16 bytes for each parameter in fp32. On top of
# its shards ZeRO-2 has all parameters complete within a step: 4 bytes each in fp32, 2 if they are gathered
# in bf16 ([lesson 7](07_mixed_precision.ipynb)). For FULL_SHARD the few gathered units are left out.

# %% tags=["largest"]
bytes_per_parameter = {                                         # fp32, then gathered in bf16
    "DDP": (16, 16),
    "ZeRO-2": (4 + 16 / 8, 2 + 16 / 8),
    "FULL_SHARD": (16 / 8, 16 / 8),                             # gathered units left out
}
claimed = {"DDP": 0.75, "ZeRO-2": 2.0, "FULL_SHARD": 2.5}       # billions, 2022
billions = {name: [24 / nbytes for nbytes in both] for name, both in bytes_per_parameter.items()}

# %% jupyter={"source_hidden": true}
Table(
    ["billions of parameters", "fp32", "gathered in bf16", "trained in 2022"],
    [[name, *(f"{b:.1f}" for b in both), f"{claimed[name]:.2f}"] for name, both in billions.items()],
)

# %% [markdown]
# This is a bound, not a measurement: activations, buffers and the allocator's cache come on top. In 2022 the
# model of ZeRO-2 was 2.7 times that of DDP. The states allow 2.7 in fp32, but that run gathered in bf16,
# where they allow 4. FULL_SHARD reached a fifth of its bound. So something other than the states filled the
# memory, and cutting the states into smaller shards would not have helped much. Against activations,
# activation checkpointing helps ([lesson 2](02_activation_checkpointing.ipynb)).

# %% tags=["check"]
for name, both in billions.items():
    assert claimed[name] < min(both)
in_fp32, in_bf16 = (billions["ZeRO-2"][i] / billions["DDP"][i] for i in (0, 1))
assert round(in_fp32, 2) == round(claimed["ZeRO-2"] / claimed["DDP"], 2) == 2.67
assert in_bf16 == 4
assert 0.2 < claimed["FULL_SHARD"] / billions["FULL_SHARD"][0] < 0.22
print("Checked: the factors 2.7 and 4, and a fifth.")

# %% [markdown]
# ## A model that fits
#
# If a model fits under DDP, what does FSDP cost? It sends half as much again, and it has more to do for each
# block. Measured here, on a model far too small for FSDP:

# %% tags=["nbval-ignore-output", "fits"]
# %%ranks
import statistics
import time


def seconds(name):
    make_model, make_optimizer = strategies[name]
    model = make_model()
    optimizer, times = make_optimizer(model), []
    for number in range(14):
        began = time.perf_counter()
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()                            # else only the issuing would be timed
        times.append(time.perf_counter() - began)
    return statistics.median(times[4:])


slower = seconds("FULL_SHARD") / seconds("DDP")
if rank == 0:
    print(f"FULL_SHARD takes {slower:.1f} times as long as DDP")
assert slower > 1.2

# %% [markdown]
# This is the ratio of small collectives on a CPU, and says nothing about a GPU. The reason holds everywhere:
# FULL_SHARD has three collectives for each block, where DDP has one for many blocks.
#
# ## Which is which in ZeRO
#
# | DeepSpeed | cuts | FSDP1 | FSDP2 |
# |:--|:--|:--|:--|
# | ZeRO-0 | nothing | `NO_SHARD`, better DDP | DDP |
# | ZeRO-1 | optimizer state | none; `ZeroRedundancyOptimizer` with DDP | the same, or see below |
# | ZeRO-2 | and gradients | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | ZeRO-3 | and parameters | `FULL_SHARD` | `reshard_after_forward=True` |
# | ZeRO++ hpZ | backward gathers within the host | none | `reshard_after_forward=ranks_per_host` |
# | MiCS | within a group, replicated over groups | `HYBRID_SHARD` | a mesh of two dimensions |
#
# hpZ is the part of [ZeRO++](https://arxiv.org/abs/2306.10209) that keeps a second set of shards within each
# host; [MiCS](https://arxiv.org/abs/2205.00119) shards over small groups of ranks.
# FSDP's ZeRO-2 differs from DeepSpeed's mainly in one point: between two steps it cuts the parameters too.
# FSDP2 accumulates as ZeRO-1 does with `reshard_after_forward=False` if `set_requires_gradient_sync` and
# `set_reshard_after_backward` are on for the last micro-batch only: a step then gathers and reduces once.
#
# ## When it goes wrong
#
# One mistake raises no error: units are kept complete after backward, as in turn 2, and are not freed after
# the last batch. The optimizer then updates the shards, while forward goes on with the complete parameters
# that it finds. Here it happens:

# %%
# %%ranks
def train_on_one_batch(free):
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(free)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = torch.zeros(4, device=device)
    for step in range(4):
        loss = model(batch(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    dist.all_reduce(losses)
    return losses.tolist()


stale = {"freed after backward": train_on_one_batch(True), "never freed": train_on_one_batch(False)}

# %% jupyter={"source_hidden": true}
Table(
    ["loss at step", "1", "2", "3", "4"],
    [[way, *(f"{loss:.4f}" for loss in losses)] for way, losses in ranks.get("stale")[0].items()],
)

# %% [markdown]
# What you see, why, and what helps:
#
# - **The loss does not change**, as above. Forward uses the parameters of the first step in every step. Set
#   `set_reshard_after_backward(True)` before the backward pass of the last batch.
# - **HYBRID_SHARD is slower than FULL_SHARD.** One cause: the mesh has its dimensions in the wrong order, so
#   each copy is cut over ranks of different hosts. With two ranks on a host that sends three times the bytes
#   between the hosts. (Try it: return the two groups of turn 1 in the other order.) The first dimension
#   replicates, the second shards. With the right mesh a fast link is another cause: see *A slow link*.
# - **Out of memory since you accumulate without synchronisation.** Each rank now holds all gradients,
#   complete ("gradients kept" above). Under HYBRID_SHARD use `set_requires_all_reduce(False)`; otherwise
#   synchronise after each batch.
# - **Out of memory under HYBRID_SHARD, not under FULL_SHARD.** Each copy of the model is cut over the ranks
#   of one host only. Use FULL_SHARD, or rows of several hosts: a row of the mesh need not be one host.
# - **`If passing reshard_after_forward as an int, it should be a factor of …`.** The number must divide the
#   number of ranks that share the shards.

# %% tags=["check"]
# %%ranks
freed, kept_stale = stale["freed after backward"], stale["never freed"]
assert freed[0] == kept_stale[0] == kept_stale[1] == kept_stale[3]
assert freed[3] < freed[0] - 0.001
print("Checked: the loss of the second way is the same at each step, that of the first falls.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    6,
    {
        "zero2-less-communication": f"Yes: {total['ZeRO-2'] / total['FULL_SHARD']:.0%} of the bytes of "
        "FULL_SHARD, one all-gather of each block instead of two.",
        "no-shard-is-ddp": "DDP holds all parameters, gradients and states, and sends the gradients alone. "
        "NO_SHARD itself is deprecated: use DDP.",
        "largest-model": f"By the states alone ZeRO-2 fits {in_fp32:.2f} times the model of DDP in fp32, and "
        f"{in_bf16:.0f} times if it gathers in bf16, as the run of 2022 did; that run reached "
        f"{claimed['ZeRO-2'] / claimed['DDP']:.2f} times. FULL_SHARD would fit 8 times.",
        "zero2-shards-parameters": "It does: at rest a rank holds its share of them. They are complete "
        "within a step.",
        "fsdp-worse-than-ddp": f"FULL_SHARD sends {total['FULL_SHARD'] / total['DDP']:.1f} times what "
        "DDP does. On this CPU DDP is faster too; that says nothing of GPUs.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Each strategy gives the same losses. They differ in what a rank holds and in what it sends.
# - ZeRO-2 sends as much as DDP, FULL_SHARD half as much again. What is gathered comes on top of the shards:
#   three blocks' worth under FULL_SHARD, the model and two blocks under ZeRO-2.
# - HYBRID_SHARD holds more, and sends little between hosts: rows of the mesh share shards, columns hold
#   copies.
# - Accumulation without synchronisation saves reductions, and holds complete gradients.
# - If the model fits under DDP, and the link is fast, use DDP. Between hosts with a slow link HYBRID_SHARD
#   can be faster even then.
#
# ## Next
#
# Fewer bytes by smaller numbers: mixed precision. That is [lesson 7](07_mixed_precision.ipynb).
#
# [← lesson 5](05_maximising_throughput.ipynb) · [lesson 7 →](07_mixed_precision.ipynb)

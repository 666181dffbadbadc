# %% [markdown]
# # 6 · Sharding strategies
#
# Which strategy for my model and my links? **Begin with FULL_SHARD, which is what `fully_shard` does by
# default. Of FSDP's strategies it keeps the least memory, and sends the most between hosts. Change it only if
# your GPUs wait for that.** Then you pay memory to send less. Three changes do so, each with one argument:
#
# | strategy | what you type, for each block and then the model | a rank holds, GiB | leave a host in a step, GiB |
# |:--|:--|--:|--:|
# | FULL_SHARD | `fully_shard(block, mesh=flat)` | 8.8 | 55.9 |
# | hpZ | `fully_shard(block, mesh=flat, reshard_after_forward=8)` | 10.7 | 41.9 |
# | ZeRO-2 | `fully_shard(block, mesh=flat, reshard_after_forward=False)` | 23.3 | 41.9 |
# | HYBRID_SHARD | `fully_shard(block, mesh=hosts)` | 16.3 | 29.8 |
# | DDP, no FSDP | `DistributedDataParallel(model)` | 119.2 | 55.9 |
#
# The numbers are calculated for 8 billion parameters on two hosts of eight GPUs, without activations; set your
# own below, in "Your cluster". `flat` is a mesh of all ranks in one row, `hosts` has one row for each host.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots, recorded

SAID = {
    "FULL_SHARD": "a quarter; one or two units\nat a time are complete",
    "ZeRO-2": "a quarter; all is complete\nfrom forward to backward",
    "HYBRID_SHARD": "a half: each host\nhas a copy",
    "DDP": "everything",
}
KEPT = {"DDP": lambda r, piece: True, "HYBRID_SHARD": lambda r, piece: piece // 2 == r % 2}
fig, panels = plots.figure(4, width=9.8, height=2.8)
for axes, (name, said) in zip(panels, SAID.items()):
    for r, piece in ((r, piece) for r in range(4) for piece in range(4)):
        place, color = (r * 1.15 + (r // 2) * 0.55, 3 - piece), plots.RANK_COLORS[piece]
        own = KEPT.get(name, int.__eq__)(r, piece)
        axes.add_patch(Rectangle(place, 0.9, 0.9, color=color if own else plots.FAINT))
        if name == "ZeRO-2" and not own:
            axes.add_patch(Rectangle((place[0] + 0.2, place[1] + 0.2), 0.5, 0.5, color=color))
        axes.text(place[0] + 0.45, -0.45, "" if piece else f"rank {r}", ha="center", fontsize=7.5)
    for host in range(2):
        axes.text(host * 2.85 + 1.02, 4.2, f"host {host}", ha="center", fontsize=8)
    axes.text(2.45, -1, said, ha="center", va="top", fontsize=8)
    axes.set(title=name, xlim=(-0.25, 5.15), ylim=(-3.2, 4.8), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Which quarters of the parameters each of four ranks on two hosts holds, by strategy.")

# %% [markdown]
# A drawing of what four ranks on two hosts keep. A column is a rank, a colour a quarter of the parameters.
# Large squares are kept all the time; the small ones of ZeRO-2 arrive in forward and stay until backward has
# used them. HYBRID_SHARD cuts the model over the ranks of one host, so each host has a copy. (hpZ, not drawn,
# is FULL_SHARD that keeps the squares of HYBRID_SHARD from forward to backward.)

# %% tags=["card"]
lesson.card(
    6,
    learn="choose what a rank keeps and which ranks share it, by memory and by bytes on the slowest link",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), and [lesson 4](04_backward_prefetch.ipynb) for the replay",
    ranks="4 on this machine, taken as two hosts of two (with 2 or 3, all are on one host)",
    minutes=(1, 19, 30),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains one model under three of the
# strategies. The four ranks are taken as two hosts of two: the bytes are counted, the hosts aren't real.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# rank, world = dist.get_rank(), dist.get_world_size()
# per_host = world // 2                                        # in a job: int(os.environ["LOCAL_WORLD_SIZE"])
# flat = init_device_mesh(device, (world,))                    # all ranks in one row
# hosts = init_device_mesh(device, (world // per_host, per_host), mesh_dim_names=("replicate", "shard"))
#
# for name, mesh, reshard in [("FULL_SHARD", flat, True), ("ZeRO-2", flat, False), ("HYBRID_SHARD", hosts, True)]:
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])
#     for part in [*model, model]:                             # 8 units
#         fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + rank)                              # other samples on each rank
#     for step in range(10):
#         x = torch.randn(32, 256, device=device)              # your data
#         with record_collectives(model, ranks_per_host=per_host) as trace:
#             loss = (model(x) - x).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     state = 4 * sum(p.to_local().nbytes for p in model.parameters())  # parameters, gradients, AdamW's two moments
#     far = [event for event in trace.collectives if event.link == "between hosts"]
#     leaves = sum(event.sent_bytes * world / len(event.ranks) for event in far)  # one ring per group of ranks
#     if rank == 0:
#         print(f"{name:12} state {state / 2**20:.1f} MiB, {trace.peak_units} of 8 units complete at once,", end=" ")
#         print(f"{leaves / 2**20:.1f} MiB leave a host, loss {loss.item():.2f}")
# dist.destroy_process_group()
# ```
# ```text
# FULL_SHARD   state 2.0 MiB, 2 of 8 units complete at once, 4.5 MiB leave a host, loss 0.96
# ZeRO-2       state 2.0 MiB, 8 of 8 units complete at once, 3.0 MiB leave a host, loss 0.96
# HYBRID_SHARD state 4.0 MiB, 2 of 8 units complete at once, 2.0 MiB leave a host, loss 0.96
# ```
#
# The loss is the same, because a strategy changes where tensors are and in which order gradients are added, not
# what is computed. The other numbers follow from the size of all parameters, P = 2.0 MiB.
#
# **State.** For each parameter, training keeps four tensors: the parameter, its gradient and AdamW's two
# moments. That makes 4 P = 8 MiB. FULL_SHARD and ZeRO-2 cut it over four ranks, so a rank has 2.0 MiB;
# HYBRID_SHARD cuts it over the two ranks of a host, so a rank has 4.0.
#
# **Complete units.** FULL_SHARD frees a unit after its forward pass, and has two complete at most: in backward,
# the one that computes and the next. ZeRO-2 doesn't free them: at the end of forward it has the whole model.
#
# **Bytes.** Ranks usually form a **ring**, in which each passes pieces to the next. To gather P on four ranks,
# each rank sends three quarters of P, 1.5 MiB, and so does a host, because the ring leaves it at one place
# only. Reducing gradients costs the same. FULL_SHARD gathers the parameters in forward, gathers them again in
# backward and reduces the gradients: `3 * 1.5` = 4.5 MiB. ZeRO-2 saves the second gather: `2 * 1.5` = 3.0. Under
# HYBRID_SHARD all three stay inside the host. Only the gradients have to be averaged with the other host's
# copy, by an all-reduce, which is a reduce-scatter and an all-gather: between two hosts `2 * P / 2` = 2.0.
#
# ## What a rank holds, and what leaves a host
#
# The next cells start four ranks and measure all five strategies on them. **hpZ**, a part of
# [ZeRO++](https://arxiv.org/abs/2306.10209), is an integer in FSDP2: with `reshard_after_forward=2` a unit is cut
# in two after forward, one part for each rank of a host, so that backward gathers it within the host. (In
# torch 2.13 each such call makes two process groups of its own, and hpZ hasn't run on GPUs here: time it on yours.)

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
n_hosts = 2 if world % 2 == 0 and world > 2 else 1
per_host = world // n_hosts
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
flat = init_device_mesh(device.type, (world,))
hosts = init_device_mesh(device.type, (n_hosts, per_host), mesh_dim_names=("replicate", "shard"))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])


def fsdp(mesh, reshard, **options):
    model = build()
    for part in [*model, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **options)
    return model


def batch(number):  # f32[32, 256], other samples on each rank
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(100 * rank + number)).to(device)


def leaving(trace):
    """MiB that leave a host in a step: each group of ranks forms a ring, and a ring leaves a host once."""
    far = [event for event in trace.collectives if event.link == "between hosts"]
    return sum(event.sent_bytes * world / len(event.ranks) for event in far) / 2**20


# %% [markdown]
# `hold` (folded) trains six steps under the `Meter` of lesson 0, and returns what this rank holds when it holds
# most, and what leaves a host in one step.

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.tensor import DTensor

from fsdp_utils.lessons.meter import Meter
from fsdp_utils.sharding.units import find_units


def record(model):
    for number in range(2):
        with record_collectives(model, ranks_per_host=per_host) as trace:
            (model(batch(number)) - batch(number)).square().mean().backward()
    return trace


def mib(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) / 2**20


def hold(model):
    """MiB on this rank when it holds most in a step, by part; and what leaves a host in one."""
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    for number in range(6):
        with Meter(model.parameters(), device=device.type) as meter:
            (model(batch(number)) - batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(max(zip(meter.tensor_bytes, meter.gather_bytes)))
    total, gathered = (nbytes / 2**20 for nbytes in min(found))  # a buffer may be freed late, never early
    shards = mib(model.parameters())
    moments = mib(t for state in optimizer.state.values() for t in state.values() if t.dim() > 0)
    parts = {"parameters": shards, "AdamW's moments": moments, "gathered, with buffers": gathered}
    parts["the rest"] = total - gathered - shards
    return parts, leaving(record(model))


# %% tags=["memory", "bytes"]
# %%ranks
measured = {
    "FULL_SHARD": hold(fsdp(flat, True)),
    "hpZ": hold(fsdp(flat, per_host)),
    "ZeRO-2": hold(fsdp(flat, False)),
    "HYBRID_SHARD": hold(fsdp(hosts, True)),
    "DDP": hold(DistributedDataParallel(build(), gradient_as_bucket_view=True)),  # else gradients are held twice
}

# %%
measured = ranks.get("measured")[0]
plots.amounts(
    {
        "held by a rank at its peak": {name: parts for name, (parts, _) in measured.items()},
        "leaves a host in a step": {name: {"sent to the other host": sent} for name, (_, sent) in measured.items()},
    },
    unit="MiB",
)

# %% tags=["check"]
held = {name: sum(parts.values()) for name, (parts, _) in measured.items()}
assert held["FULL_SHARD"] < held["ZeRO-2"] < held["DDP"]
if ranks.get("n_hosts")[0] == 2:  # else hpZ is FULL_SHARD
    assert held["FULL_SHARD"] < held["hpZ"] < held["ZeRO-2"]
    assert measured["hpZ"][1] == measured["ZeRO-2"][1]

# %% [markdown]
# Read the two panels together: no strategy has the shortest bar in both. Blue and orange are the state without
# gradients. Green is the price of ZeRO-2: its peak is at the end of forward, when all eight units are complete
# and buffers hold as much as two more, 2.5 MiB. hpZ sends the same and holds less, because it keeps half of the
# model instead of all of it. (That half is in the rest, with gradients and activations.)
#
# DDP sends as much as ZeRO-2, because its all-reduce is a reduce-scatter and an all-gather. It sends gradients
# in **buckets**, groups that leave while backward goes on. If all of it fits, DDP is a good choice.
#
# ## Your cluster
#
# Two things differ in your job: hosts have more ranks, and you don't send float32. The next cell calculates
# what leaves a host for gathers in bf16, 2 bytes, and gradients that are reduced in float32, 4 bytes ([lesson
# 7](07_mixed_precision.ipynb)).

# %% tags=["link"]
def leave_a_host(strategy, hosts, per_host, gather=2, reduce=4):  # bytes of an element when it is sent
    """Bytes that leave a host in one step, per parameter of the model."""
    n = hosts * per_host
    all_ranks, copies = ((n - 1) / n if hosts > 1 else 0), (hosts - 1) / hosts
    return {
        "FULL_SHARD": (2 * gather + reduce) * all_ranks,
        "hpZ": (gather + reduce) * all_ranks,  # the second gather stays in the host
        "ZeRO-2": (gather + reduce) * all_ranks,
        "HYBRID_SHARD": 2 * reduce * copies,
        "DDP": 2 * reduce * all_ranks,
    }[strategy]


NAMES = ["FULL_SHARD", "hpZ", "ZeRO-2", "HYBRID_SHARD", "DDP"]
Table(
    ["bytes per parameter that leave a host of 8 ranks", *NAMES],
    [[f"{hosts} hosts", *(f"{leave_a_host(name, hosts, 8):.1f}" for name in NAMES)] for hosts in (2, 4, 8, 64)],
)

# %% [markdown]
# Read it from top to bottom. On two hosts HYBRID_SHARD sends about half of what FULL_SHARD sends. **With more
# hosts that gain goes**, because an all-reduce sends each float32 gradient almost twice: from four hosts on,
# hpZ and ZeRO-2 send less. (If you reduce in bf16, call this with `reduce=2`: HYBRID_SHARD then sends least on
# any number of hosts.) On a single host nothing leaves, so HYBRID_SHARD and hpZ have no use there.
#
# The sliders put memory beside these bytes. State takes 16 bytes per parameter, divided by the ranks that share
# it. To that come in bf16: under FULL_SHARD and HYBRID_SHARD three units' worth of parameters and buffers, under
# hpZ its part of the model as well, under ZeRO-2 the complete model. Set two ranks per host, then eight: only
# with eight does HYBRID_SHARD hold less than ZeRO-2, because then eight ranks share a copy.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore

GIB, UNITS = 8e9 / 2**30, 32  # one byte for each of 8 billion parameters, in units of equal size


def calculated(hosts, per_host, strategy):
    cut_by = {"DDP": 1, "HYBRID_SHARD": per_host}.get(strategy, hosts * per_host)
    complete = {"DDP": 0, "ZeRO-2": 1 + 2 / UNITS}.get(strategy, 3 / UNITS)  # of the model
    complete += 1 / per_host if strategy == "hpZ" and hosts > 1 else 0
    leaves = GIB * leave_a_host(strategy, hosts, per_host)
    return Point([16 * GIB / cut_by, 2 * GIB * complete], [leaves], "calculated, before activations")


first = [calculated(2, 8, name) for name in NAMES]  # the lesson's first table
assert [round(sum(point.parts), 1) for point in first] == [8.8, 10.7, 23.3, 16.3, 119.2]
assert [round(point.scalars[0], 1) for point in first] == [55.9, 41.9, 41.9, 29.8, 55.9]
explore(
    "calculated: 8 billion parameters, before activations",
    [Axis("hosts", [1, 2, 4, 8, 32, 64], start=1), Axis("ranks per host", [1, 2, 4, 8], start=3),
     Axis("strategy", NAMES, start=0)],
    Stack("held by a rank", "GiB", {"state": plots.RANK_COLORS[0], "complete units and buffers, bf16": plots.RANK_COLORS[1]},
          upto=140, limit=80, limit_name="80 GiB"),
    calculated, scalars={"leave a host in a step": "GiB"}, over="strategy",
)

# %% [markdown]
# ## When gathers are hidden
#
# Sending fewer bytes helps only if the GPU waits for them. FSDP sends while the GPU computes, so compare the
# two for FULL_SHARD, per parameter. Let T be the tokens of **one rank in one forward pass**: micro-batch times
# sequence length. Forward computes 2 T FLOP and gathers 2 bytes. Backward computes 4 T FLOP, gathers 2 bytes
# and reduces 4, which makes 6.
#
# Let F be the FLOP/s that your GPU reaches, and B the bytes per second of your collectives. Backward is hidden
# once 4 T / F exceeds 6 / B, and forward earlier. So the line is **T = 1.5 F / B**. With F = 400 TFLOP/s it is
# 1,500 tokens where B is 400 GB/s, 12,000 at 50 GB/s and 48,000 at 12.5 GB/s, which is 100 Gbit/s.
#
# For B take `busbw` of nccl-tests' `all_gather_perf` on all your ranks; for F, `6 * parameters` times the tokens per
# second of a GPU that doesn't wait. Or see in a profile whether it waits ([lesson 4](04_backward_prefetch.ipynb)).
#
# To check the line, the next cells replay the collectives that FSDP2 issues here, as in lesson 4, with the
# durations of an invented GPU: 400 TFLOP/s, 200 GB/s within a host, 50 GB/s between hosts, no latency. In the
# figure, 1 means that all communication is hidden.

# %%
# %%ranks
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ways = {"FULL_SHARD": (flat, True), "hpZ": (flat, per_host), "ZeRO-2": (flat, False), "HYBRID_SHARD": (hosts, True)}
traces = {name: record(fsdp(*way, mp_policy=mixed)) for name, way in ways.items()}
sent = {name: leaving(trace) for name, trace in traces.items()}

# %% tags=["replay"]
TOKENS, traces = [500 * 2**i for i in range(7)], ranks.get("traces")[0]
n_hosts, per_host = ranks.get("(n_hosts, per_host)")[0]


def slowdown(name, tokens, link, flops=400e12):
    """Length of a replayed step, in times of its computation."""
    compute = {unit: 2 * (nbytes / 4) * tokens / flops for unit, nbytes in traces[name].unit_bytes.items()}
    between = link / per_host if name == "HYBRID_SHARD" else link  # its all-reduces share the link
    speeds = {"within a host": 200e9 / 2**30, "between hosts": between / 2**30}
    run = traces[name].replay(compute_s=compute, link_gib_s=speeds)
    return run.step_s / run.compute_s


fig, (axes,) = plots.figure(width=7, height=2.7)
for name, color in zip(["FULL_SHARD", "hpZ", "ZeRO-2"], plots.RANK_COLORS):
    axes.plot(TOKENS, [slowdown(name, tokens, 50e9) for tokens in TOKENS], "o-", color=color, label=name)
axes.axvline(1.5 * 400e12 / 50e9, color=plots.INK, linestyle="--", linewidth=1)
axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="step / computation", title="replayed")
axes.set_xticks(TOKENS, TOKENS)
axes.set_yticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
axes.minorticks_off()
axes.legend(loc="lower left")
plots.show(fig, alt="How much longer than its computation a step is, over tokens per rank, by strategy.")

# %% tags=["check"]
parameters = ranks.get("sum(p.numel() for p in build().parameters())")[0]
for name, in_mixed in ranks.get("sent")[0].items():             # as calculated, with both sets of dtypes
    for found, dtypes in ((in_mixed, (2, 4)), (measured[name][1], (4, 4))):
        assert abs(found * 2**20 / parameters - leave_a_host(name, n_hosts, per_host, *dtypes)) < 0.1, name
for link in (5e9, 12.5e9, 25e9, 50e9, 100e9) if n_hosts == 2 else ():  # the rule, swept over the link
    line = 1.5 * 400e12 / link
    far, at = ({name: slowdown(name, tokens, link) for name in traces} for tokens in (line / 8, line))
    assert 1.28 < far["FULL_SHARD"] / far["ZeRO-2"] < 1.31
    assert max(at.values()) < 1.09
    assert 5.3 < far["FULL_SHARD"] < 5.4
    assert 4.0 < far["HYBRID_SHARD"] < 5.4

# %% [markdown]
# The dashed line is 1.5 F / B = 12,000 tokens. There a replayed step takes at most 9% longer than its
# computation under any strategy, so none can save more than that. To the left the curves part. At 1,500 tokens
# a step of FULL_SHARD takes 5.3 times as long as its computation, 1.3 times as long as one of ZeRO-2, because it
# sends 8 bytes where ZeRO-2 sends 6. A check finds the same at links of 5 to 100 GB/s, each at its own line.
#
# hpZ is close to ZeRO-2, because its second gather uses the faster link. HYBRID_SHARD isn't drawn, because hosts
# of two ranks hide its gain: it sends 4.0 bytes where ZeRO-2 sends 4.5, on hosts of eight 4.0 and 5.6.
#
# ### Recorded: a slow link
#
# This recording has a real link, which `tc` limits, between two hosts made of one machine with two CPU cores.
# Compare FULL_SHARD with HYBRID_SHARD in the first row.

# %%
two_hosts, rows = recorded.load("two_hosts"), []
for result in two_hosts["results"]:
    seconds = [f"{run['step_s']:.2f}" for run in result["strategies"].values()]
    rows.append([result["rate_mbit"] or "not limited", *seconds])
assert [round(float(row[3]) / float(row[4]), 1) for row in rows] == [3.3, 2.7, 1.1]
note = f"Seconds of a step. Recorded {two_hosts['date']} on {two_hosts['device']}."
Table(["link, Mbit/s", "DDP", "ZeRO-2", "FULL_SHARD", "HYBRID_SHARD"], rows, note=note)

# %% [markdown]
# On the slowest link HYBRID_SHARD is 3.3 times as fast. It sends 16 MiB, which take 2.7 of its 3.0 seconds;
# FULL_SHARD sends 48. Expect less on GPUs: gloo carries out a reduce-scatter as an all-reduce, with twice the
# bytes, where a true one makes it 36 MiB. In the last row the link isn't limited, and HYBRID_SHARD gains little.
#
# ## The mesh of HYBRID_SHARD
#
# A **device mesh** arranges ranks in rows. `fully_shard` cuts the model over the *last* dimension, a row, and
# keeps a copy in each row, so a row should be a host. What if the two dimensions are swapped?

# %%
# %%ranks
swapped = DeviceMesh(device.type, hosts.mesh.t(), mesh_dim_names=("replicate", "shard"))
of_swapped = leaving(record(fsdp(swapped, True)))
if rank == 0:
    print("rows", hosts.mesh.tolist(), f"{measured['HYBRID_SHARD'][1]:.1f} MiB leave a host")
    print("rows", swapped.mesh.tolist(), f"{of_swapped:.1f} MiB leave a host")
if n_hosts == 2:
    assert of_swapped > 2.9 * measured["HYBRID_SHARD"][1]

# %% [markdown]
# Swapped, each copy lies across both hosts, so its gathers cross the link: three times the bytes, and no error.
# Print `mesh.mesh.tolist()` once in your job, and look whether each row is a host. `fully_shard` doesn't compare
# the copies either: give all ranks the same weights, by a seed or a file.
#
# If one host is too small for a copy, a row may be several. Its gathers then cross hosts as under FULL_SHARD,
# and the all-reduce comes on top: this pays only where the hosts of a row share a faster network.
#
# ## Your turn 1 · As few hosts as possible
#
# Write `my_rows(world, per_host, state, room)`, which chooses the rows of a HYBRID_SHARD mesh. Each row holds
# one copy of the model, on whole hosts, and on as few of them as have room for it.
#
# - Given: `world` ranks, numbered host by host, `per_host` on each; `state`, the GiB of the complete model's
#   state; `room`, the GiB that one rank can give to its part of it.
# - Return a list of rows, each a list of ranks. Each rank is in one row, and all rows are equally long.
#
# For example, `my_rows(4, 2, 100, 60)` is `[[0, 1], [2, 3]]`: the two ranks of a host have 120 GiB, enough for a
# copy. Your function is tried on five clusters, all large enough, and then on these ranks.
#
# <details><summary>Hint</summary>
#
# Try rows of 1, 2, 3 … hosts, and take the first that divides the number of hosts and in which
# `state / ranks in a row` is at most `room`.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

CLUSTERS = [(8, 2, 100, 30), (16, 4, 100, 25), (16, 4, 100, 200), (24, 4, 100, 11), (24, 4, 100, 7)]
FULL, PART, WIDE = "clusters: no room on a rank", "clusters: part of a host in a row", "clusters: more hosts than needed"


def as_lists(rows, world):
    try:
        rows = [[int(member) for member in row] for row in getattr(rows, "mesh", rows)]
    except TypeError:
        raise NotYet("Return a list of rows, each a list of ranks.") from None
    if sorted(member for row in rows for member in row) != list(range(world)):
        raise NotYet(f"Each of the {world} ranks has to be in exactly one row; found {rows}.")
    if len(set(map(len, rows))) > 1:
        raise NotYet(f"All rows of a mesh are equally long, so their hosts must divide all hosts; found {rows}.")
    return rows


@turn(1, {
    FULL: exactly(0, "A copy is cut over too few ranks: state / ranks in a row is more than the room."),
    PART: exactly(0, "A row has only some ranks of a host."),
    WIDE: exactly(0, "Fewer hosts would hold a copy: more than necessary is sent between hosts."),
    "MiB that leave a host, here": at_most(2.01, "A row spans both hosts here: its gathers cross the link."),
})
def score_rows(my_rows):
    found = {FULL: 0, PART: 0, WIDE: 0}
    for on_all, on_each, state, room in CLUSTERS:
        rows = as_lists(my_rows(on_all, on_each, state, room), on_all)
        needed = next(n for n in range(on_each, 99, on_each) if on_all % n == 0 and state / n <= room)
        found[FULL] += state / len(rows[0]) > room
        found[PART] += any(len(row) != on_each * len({member // on_each for member in row}) for row in rows)
        found[WIDE] += len(rows[0]) > needed
    rows = as_lists(my_rows(world, per_host, 100, 100), world)
    mesh = DeviceMesh(device.type, rows, mesh_dim_names=("replicate", "shard"))
    return {**found, "MiB that leave a host, here": round(leaving(record(fsdp(mesh, True))), 2)}


# %%
# %%turn 1
def my_rows(world, per_host, state, room):  # int, int, GiB, GiB
    # first: how many ranks are in a row? then: cut range(world) into rows of that length
    return None  # your lines here: [[rank, ...], ...]


# %% tags=["solution"] turn=1
def my_rows(world, per_host, state, room):
    for size in range(per_host, world + 1, per_host):
        if world % size == 0 and state / size <= room:
            return [list(range(first, first + size)) for first in range(0, world, size)]


# %% tags=["right"] turn=1
import numpy as np


def my_rows(world, per_host, state, room):  # NumPy's array
    sizes = np.arange(1, world // per_host + 1) * per_host
    size = sizes[(world % sizes == 0) & (state / sizes <= room)].min()
    return np.arange(world).reshape(-1, size)


# %% tags=["right"] turn=1
def my_rows(world, per_host, state, room):  # a tensor
    hosts = 1
    while world % (hosts * per_host) or state > room * hosts * per_host:
        hosts += 1
    return torch.arange(world).view(-1, hosts * per_host)


# %% tags=["right"] turn=1
import math


def my_rows(world, per_host, state, room):  # tuples and ranges
    hosts = math.ceil(state / room / per_host)
    while (world // per_host) % hosts:
        hosts += 1
    size = hosts * per_host
    return tuple(range(i * size, (i + 1) * size) for i in range(world // size))


# %% tags=["wrong"] turn=1 says="more than the room"
def my_rows(world, per_host, state, room):  # always one host
    return torch.arange(world).view(-1, per_host)


# %% tags=["wrong"] turn=1 says="Fewer hosts would hold a copy"
def my_rows(world, per_host, state, room):  # always all
    return [list(range(world))]


# %% tags=["wrong"] turn=1 says="only some ranks of a host"
def my_rows(world, per_host, state, room):  # strided
    size = next(r for r in range(per_host, world + 1, per_host) if world % r == 0 and state / r <= room)
    return torch.arange(world).view(size, -1).t()


# %% tags=["wrong"] turn=1 says="their hosts must divide all hosts"
import math


def my_rows(world, per_host, state, room):
    size = math.ceil(state / room / per_host) * per_host
    return [list(range(first, min(first + size, world))) for first in range(0, world, size)]


# %% tags=["wrong"] turn=1 says="Return a list of rows"
def my_rows(world, per_host, state, room):
    return list(range(world))


# %% [markdown]
# ## Gradient accumulation
#
# With **gradient accumulation** an optimizer step uses several *micro-batches*, one after the other. By default
# FSDP2 reduces gradients after each; `set_requires_gradient_sync(False)` leaves them unreduced until you turn it
# on again (DDP and FSDP1: `no_sync()`). What does that save and cost? `accumulated` (folded) counts for four
# micro-batches how often the whole model is gathered and reduced, and the gradients kept between two of them.

# %% jupyter={"source_hidden": true}
# %%ranks
def accumulated(accumulate):
    model, kept = fsdp(flat, True), []
    units = [group for unit in find_units(model) for group in unit.parts]  # what FSDP2 knows of each unit
    inside = [p for unit in units for p in unit.fsdp_params]

    def before_forward(*_):
        complete = [p._unsharded_param.grad for p in inside if hasattr(p, "_unsharded_param")]
        kept.append(mib(g for g in [*complete, *(p.grad for p in model.parameters())] if g is not None))

    model.register_forward_pre_hook(before_forward, prepend=True)
    with record_collectives(model) as trace:
        accumulate(model, [batch(number) for number in range(4)])
    left = sum(unit.is_unsharded for unit in units)
    gradients = [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
    once = record(fsdp(flat, False)).bytes_by_kind()  # one gather, one reduction
    counts = {kind: round(trace.bytes_by_kind().get(kind, 0) / once[kind], 2) for kind in once}
    found = {"forward passes": len(kept), **counts, "MiB of gradients kept": round(max(kept, default=0), 1)}
    return {**found, "units left complete": left}, gradients


# %% tags=["accumulation"]
# %%ranks
def with_sync(model, batches):
    for x in batches:
        (model(x).square().mean() / len(batches)).backward()


def without_sync(model, batches):
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (model(x).square().mean() / len(batches)).backward()


(synced, gradients), (not_synced, same) = accumulated(with_sync), accumulated(without_sync)
torch.testing.assert_close(gradients, same, rtol=1e-3, atol=1e-9)

# %%
both = {"after each": ranks.get("synced")[0], "after the last": ranks.get("not_synced")[0]}
Table(["FULL_SHARD, reduced", *both["after each"]], [[name, *found.values()] for name, found in both.items()])

# %% [markdown]
# Three of four reductions are saved, and the gradients are the same up to rounding. The price is in the column
# of gradients: what isn't reduced isn't cut, so each rank keeps **complete** gradients, 2.0 MiB instead of its
# quarter, 0.5. For 26 billion parameters on 16 ranks, 48 GiB in bf16 instead of 6 for the float32 shards. The
# gathers are still eight, two for each micro-batch, because FULL_SHARD frees its units as before.
#
# ## Your turn 2 · ZeRO-1 out of `fully_shard`
#
# ZeRO-1 cuts only the optimizer's state; parameters and gradients are complete for the whole step, so each is
# sent once, however many micro-batches there are, and a rank has to hold them. To do this, write
# `my_accumulate(model, batches)`, which gathers each unit once and reduces it once for all four micro-batches.
#
# - Given: `model`, the one above under FULL_SHARD; `batches`, a list of four inputs. The loss of one is
#   `model(x).square().mean() / len(batches)`.
# - Run forward and backward for each; return nothing. At the end no unit may be complete, because the
#   optimizer updates shards.
#
# <details><summary>Hint</summary>
#
# Begin with `without_sync` above. Two more switches of the model keep units complete:
# `set_reshard_after_forward` and `set_reshard_after_backward`. Which of the three changes in the last
# micro-batch?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
@turn(2, {
    "forward passes": exactly(4, "Compute one micro-batch after the other: together, their activations need more memory."),
    "all_gather": exactly(1, less="Not every unit was gathered.",
                          more="The model is gathered more than once: units are freed after forward or after backward."),
    "reduce_scatter": exactly(1, less="Gradients were not reduced: the last backward has to do it.",
                              more="Gradients are reduced more than once: only the last backward should do it."),
    "units left complete": exactly(0, "Units are left complete: the next forward would use these old parameters."),
    "gradients that differ": exactly(0, "They differ from those above: is each of the four losses divided by four?"),
}, returns=False)
def score_once(my_accumulate):
    found, mine = accumulated(my_accumulate)
    if not found["forward passes"]:
        raise NotYet("`my_accumulate` has not run the model.")
    differ = sum(
        a is None or not torch.allclose(a, b, rtol=1e-3, atol=1e-9) for a, b in zip(mine, gradients)
    )
    ready = found["reduce_scatter"] == 1 and found["units left complete"] == 0
    return {**found, "gradients that differ": differ if ready else None}


# %%
# %%turn 2
def my_accumulate(model, batches):  # batches: a list of four tensors
    # set the switches, run forward and backward for each x in batches, and set them otherwise for the last
    return None  # your lines here


# %% tags=["solution"] turn=2
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        last = number == len(batches) - 1
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (model(x).square().mean() / len(batches)).backward()


# %% tags=["right"] turn=2
def my_accumulate(model, batches):  # frees units by hand
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == 3)
        (model(x).square().mean() / 4).backward()
    for part in [*model, model]:
        part.reshard()


# %% tags=["right"] turn=2
def my_accumulate(model, batches):  # gathers by hand, and the last apart
    for part in [*model, model]:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for x in batches[:-1]:
        (model(x).square().mean() / 4).backward()
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    (model(batches[-1]).square().mean() / 4).backward()


# %% tags=["right"] turn=2
def my_accumulate(model, batches):  # the gradient of a sum of squares
    model.set_reshard_after_forward(False)
    for left in reversed(range(len(batches))):
        model.set_requires_gradient_sync(not left)
        model.set_reshard_after_backward(not left)
        y = model(batches[left])
        torch.autograd.backward(y, 2 * y.detach() / (4 * y.numel()))


# %% tags=["wrong"] turn=2 says="gathered more than once"
def my_accumulate(model, batches):
    without_sync(model, batches)


# %% tags=["wrong"] turn=2 says="left complete"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    without_sync(model, batches)


# %% tags=["wrong"] turn=2 says="reduced more than once"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        model.set_reshard_after_backward(number == 3)
        (model(x).square().mean() / 4).backward()


# %% tags=["wrong"] turn=2 says="They differ from those above: is each of the four losses divided by four"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == 3)
        model.set_reshard_after_backward(number == 3)
        model(x).square().mean().backward()


# %% tags=["wrong"] turn=2 says="one micro-batch after the other"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    model(torch.cat(batches)).square().mean().backward()


# %% tags=["wrong"] turn=2 says="Gradients were not reduced"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    model.set_requires_gradient_sync(False)
    for x in batches:
        (model(x).square().mean() / 4).backward()


# %% [markdown]
# ## The same under other names
#
# What a paper or a config of FSDP1 or DeepSpeed calls by another name, the last column says in FSDP2. FSDP's
# ZeRO-2 cuts more than DeepSpeed's: between two steps the parameters are shards, too.
#
# | DeepSpeed | cuts | FSDP1 | FSDP2 |
# |:--|:--|:--|:--|
# | ZeRO-0 | nothing | `NO_SHARD` (deprecated: DDP) | DDP |
# | ZeRO-1 | optimizer state | `SHARD_GRAD_OP`, in `no_sync()` until the last micro-batch | turn 2 |
# | ZeRO-2 | and gradients | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | ZeRO-3 | and parameters | `FULL_SHARD` | the default |
# | ZeRO++ hpZ | backward gathers within the host | none | `reshard_after_forward=` ranks per host |
# | [MiCS](https://arxiv.org/abs/2205.00119) | within a group of ranks | `HYBRID_SHARD` | a mesh of two dimensions |
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the loss on the same samples stays the same | units stay complete after the last backward, so forward uses the old parameters: the optimizer updates shards | `set_reshard_after_backward(True)` before the last micro-batch |
# | HYBRID_SHARD is no faster than FULL_SHARD | the mesh's dimensions are swapped; or the GPU never waited for the link | first replicate, then shard; else stay with FULL_SHARD |
# | the same input has another loss on another host, no error | under HYBRID_SHARD copies began with different weights, and keep them | one seed or one file for all ranks |
# | out of memory since gradients are not reduced each time | complete gradients on each rank | reduce each time; under HYBRID_SHARD `set_requires_all_reduce(False)` leaves out the all-reduce alone, and keeps shards |
#
# ## The rule
#
# 1. One GPU holds the whole state, 16 bytes per parameter, with room: DDP, `gradient_as_bucket_view=True`.
# 2. Else FULL_SHARD. If the GPU doesn't wait, as above 1.5 F / B tokens per rank, you are done.
# 3. It waits, and each of your two or three hosts can hold the state: HYBRID_SHARD. (On more hosts, too, if
#    gradients are reduced in bf16.)
# 4. Else ZeRO-2, if 2 bytes per parameter are free on each GPU; if not, on several hosts, hpZ.
# 5. Else more tokens per rank, by [checkpointing](02_activation_checkpointing.ipynb), or a
#    [second dimension](16_two_dimensions.ipynb).
#
# After a change look at the bytes that leave a host, counted as in the script, at
# `torch.cuda.max_memory_allocated()`, and at the time of ten steps, which decides.
#
# [← lesson 5](05_maximising_throughput.ipynb) · [lesson 7 →](07_mixed_precision.ipynb)

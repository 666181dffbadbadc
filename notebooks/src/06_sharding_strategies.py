# %% [markdown]
# # 6 · Sharding strategies
#
# Which strategy for my model and my links? **Begin with FULL_SHARD. If its gathers are not hidden: on two or
# three hosts of which each can hold the model's state, put a copy on each (HYBRID_SHARD, a mesh of two
# dimensions); else, if memory is left, keep units complete until backward (ZeRO-2,
# `reshard_after_forward=False`).**

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots, recorded

SAID = {
    "DDP": "state 4 P\nsends 2 P",
    "ZeRO-2": "state 4 P / n, and P in a step\nsends 2 P",
    "FULL_SHARD": "state 4 P / n\nsends 3 P",
    "HYBRID_SHARD": "state 4 P / m\nsends 3 P in the host,\n2 P / m between hosts",
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
# A drawing. A column is a rank, a colour a quarter of the parameters. Large squares are kept between two
# steps, small ones from forward to backward alone. P is the bytes of all parameters, n the number of ranks, m
# of those on one host. *State* is parameters, gradients and AdamW's two moments, all in float32. What is sent
# in a step is an upper limit: of n ranks, each sends (n - 1) / n of it. It is counted per rank. In a *ring*
# each rank passes pieces to the next, so one rank of a host sends over the link: 3 P leave it. HYBRID_SHARD
# has m such rings between hosts, each of 2 P / m: together 2 P. Activations are in no formula, because each
# rank computes its own samples: [lesson 2](02_activation_checkpointing.ipynb) makes them smaller.

# %% tags=["card"]
lesson.card(
    6,
    learn="choose what a rank keeps and which ranks share it, by memory and by bytes on the slowest link",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), and [lesson 4](04_backward_prefetch.ipynb) for the replay",
    ranks="4 on this machine, taken as two hosts of two (with 2 or 3, all are on one host)",
    minutes=(1, 15, 34),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same model under three
# strategies. The four ranks are taken as two hosts of two: the bytes are real, the hosts are not.
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
# flat = init_device_mesh(device, (world,))                    # without a mesh a Mac would take its GPU
# hosts = init_device_mesh(device, (world // per_host, per_host), mesh_dim_names=("replicate", "shard"))
#
#
# def leaving(event):                                          # bytes that this rank passes to the other host, in a ring
#     following = event.ranks[(event.ranks.index(rank) + 1) % len(event.ranks)]
#     return event.sent_bytes if following // per_host != rank // per_host else 0.0
#
#
# for name, mesh, reshard in [("FULL_SHARD", flat, True), ("ZeRO-2", flat, False), ("HYBRID_SHARD", hosts, True)]:
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])
#     for part in [*model, model]:
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
#     kept = 4 * sum(p.to_local().nbytes for p in model.parameters()) / 2**20     # gradients, two moments
#     sent = torch.tensor(sum(map(leaving, trace.collectives)) / 2**20, device=device)
#     dist.all_reduce(sent)                                    # over the ranks of two hosts
#     if rank == 0:
#         print(f"{name:12} state {kept:.1f} MiB, {trace.peak_units} of 8 units complete at once,", end=" ")
#         print(f"{sent.item() / 2:.1f} MiB leave a host, loss {loss.item():.2f}")
# dist.destroy_process_group()
# ```
# ```text
# FULL_SHARD   state 2.0 MiB, 2 of 8 units complete at once, 4.5 MiB leave a host, loss 0.96
# ZeRO-2       state 2.0 MiB, 8 of 8 units complete at once, 3.0 MiB leave a host, loss 0.96
# HYBRID_SHARD state 4.0 MiB, 2 of 8 units complete at once, 2.0 MiB leave a host, loss 0.96
# ```
#
# The loss is the same to the digits shown: a strategy changes where tensors are and the order of sums, and
# not what is computed. P is 2 MiB here. ZeRO-2 has all 8 units complete at once, and sends a third less.
# HYBRID_SHARD has twice the state, and less than half of the bytes leave a host. No line is the best in all
# columns.
#
# ## What a rank holds, and what leaves a host
#
# The same model again, and two strategies more. DDP cuts nothing. PyTorch's `ZeroRedundancyOptimizer` is for
# DDP: it divides the optimizer's state among the ranks, which is ZeRO-1.

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


def ddp():
    return DistributedDataParallel(build(), gradient_as_bucket_view=True)  # else it holds gradients twice


def batch(number):  # f32[32, 256], other samples on each rank
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(100 * rank + number)).to(device)


def leaving(trace):
    """MiB that leave host 0 in a step, if the ranks of a collective form a ring."""
    sent = torch.zeros(world, device=device)
    for event in trace.collectives:
        following = event.ranks[(event.ranks.index(rank) + 1) % len(event.ranks)]
        sent[rank] += event.sent_bytes if following // per_host != rank // per_host else 0
    dist.all_reduce(sent)
    return sent[:per_host].sum().item() / 2**20


# %% [markdown]
# `hold` (folded) trains six steps under the `Meter` of lesson 0. It returns what this rank holds at the
# moment at which it holds most, and what leaves the host.

# %% jupyter={"source_hidden": true}
# %%ranks
import warnings

from torch.distributed.tensor import DTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses torch.jit, which is deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

from fsdp_utils.lessons.meter import Meter
from fsdp_utils.sharding.units import find_units


def record(model, optimizer=None):
    for number in range(2):
        with record_collectives(model, ranks_per_host=per_host) as trace:
            (model(batch(number)) - batch(number)).square().mean().backward()
            if optimizer:
                optimizer.step()
    return trace


def mib(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) / 2**20


def hold(model, zero1=False):
    """MiB on this rank when it holds most in a step, by part; and what leaves the host in one."""
    adamw = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw) if zero1 else adamw(model.parameters())
    found = []
    for number in range(6):
        with Meter(model.parameters(), device=device.type) as meter:
            (model(batch(number)) - batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(max(zip(meter.tensor_bytes, meter.gather_bytes)))
    total, gathered = (nbytes / 2**20 for nbytes in min(found))  # a buffer may be freed late, never early
    states, shards = getattr(optimizer, "optim", optimizer).state.values(), mib(model.parameters())
    moments = mib(t for state in states for t in state.values() if t.dim() > 0)
    parts = {"parameters": shards, "AdamW's moments": moments, "gathered, with buffers": gathered}
    parts["gradients, activations"] = total - gathered - shards
    return parts, leaving(record(model, optimizer))


# %% tags=["memory", "bytes"]
# %%ranks
measured = {
    "DDP": hold(ddp()),
    "ZeRO-1, with DDP": hold(ddp(), zero1=True),
    "ZeRO-2": hold(fsdp(flat, False)),
    "FULL_SHARD": hold(fsdp(flat, True)),
    "HYBRID_SHARD": hold(fsdp(hosts, True)),
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

# %% [markdown]
# - **FULL_SHARD** holds a quarter of everything, and at most three units' worth of complete parameters and
#   buffers. **ZeRO-2** keeps all eight units from forward to backward, and saves their second all-gather.
# - **HYBRID_SHARD** cuts over the two ranks of a host, so its state is twice that of FULL_SHARD.
# - In float32 **DDP** sends as much as ZeRO-2, since an all-reduce is a reduce-scatter and an all-gather in one.
#   It sends gradients in *buckets*, each closed once it has 25 MiB (the first: 1 MiB): here fewer and larger
#   messages than FSDP2's, in a model of billions of parameters more and smaller ones. If a model fits under DDP
#   with room to spare, DDP is a good choice.
# - **ZeRO-1, with DDP** sends as much as FULL_SHARD and holds much more: all gradients are reduced to every
#   rank, and then the new parameters are broadcast. ZeRO-1 as it was designed sends 2 P; you build it in
#   turn 2.
#
# The sum is that of one moment, and leaves out what the optimizer needs within its step. A rank's bytes are
# the least that its collectives have to send without reductions in the switch; what leaves a host is that of
# a ring over all ranks, (n - 1) / n, where an algorithm that knows the hosts could send (hosts - 1) / hosts.
# How it sends them is the backend's choice: gloo carries out a reduce-scatter as an all-reduce, with twice
# the bytes.
#
# ## Your cluster
#
# Two hosts of two ranks are a small cluster, and float32 is not what you send. **The numbers here are
# calculated**, for state in float32, gathers in bf16 and gradients reduced in float32 ([lesson
# 7](07_mixed_precision.ipynb)).

# %% tags=["link"]
def leave_a_host(strategy, hosts, per_host, gather=2, reduce=4):  # bytes of an element when it is sent
    """Bytes that leave a host in one step, per parameter of the model."""
    n = hosts * per_host
    all_ranks, copies = ((n - 1) / n if hosts > 1 else 0), (hosts - 1) / hosts
    return {
        "DDP": 2 * reduce * all_ranks,
        "ZeRO-2": (gather + reduce) * all_ranks,
        "FULL_SHARD": (2 * gather + reduce) * all_ranks,
        "HYBRID_SHARD": 2 * reduce * copies,
    }[strategy]


NAMES = ["DDP", "ZeRO-2", "FULL_SHARD", "HYBRID_SHARD"]
Table(
    ["bytes per parameter that leave a host of 8 ranks", *NAMES],
    [[f"{hosts} hosts", *(f"{leave_a_host(name, hosts, 8):.1f}" for name in NAMES)] for hosts in (2, 4, 8, 64)],
)

# %% [markdown]
# On two hosts HYBRID_SHARD sends about half of what FULL_SHARD sends over the link. **With more hosts that
# gain goes**: from four hosts on ZeRO-2 sends less, and on 64 HYBRID_SHARD sends as much as FULL_SHARD. Its
# all-reduce sends each gradient twice, in float32. (With `reduce=2`, bf16, it sends the least on any number
# of hosts.) Two gains stay: in forward nothing crosses the link, and a collective across hosts has one rank
# of each host. On 64 hosts that is a ring of 64 ranks in place of 512, and each hop has a latency.
#
# The sliders put memory beside it, for 8 billion parameters in 32 equal units.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore

GIB = 8e9 / 2**30  # one byte for each of 8 billion parameters
COMPLETE = {"DDP": 0, "ZeRO-2": 34 / 32, "FULL_SHARD": 3 / 32, "HYBRID_SHARD": 3 / 32}  # of the model


def calculated(hosts, per_host, strategy):
    cut_by = {"DDP": 1, "HYBRID_SHARD": per_host}.get(strategy, hosts * per_host)
    leaves = GIB * leave_a_host(strategy, hosts, per_host)
    return Point(
        [16 * GIB / cut_by, 2 * GIB * COMPLETE[strategy]], [leaves], "calculated, before activations"
    )


explore(
    "calculated: 8 billion parameters, before activations",
    [Axis("hosts", [1, 2, 4, 8, 32, 64], start=1), Axis("ranks per host", [1, 2, 4, 8], start=3),
     Axis("strategy", NAMES, start=2)],
    Stack("held by a rank", "GiB", {"state": plots.RANK_COLORS[0], "complete units and buffers, bf16": plots.RANK_COLORS[1]},
          upto=140, limit=80, limit_name="80 GiB"),
    calculated, scalars={"leave a host in a step": "GiB"}, over="strategy",
)

# %% [markdown]
# ## When gathers are hidden
#
# Bytes cost little time while the GPU computes long enough (the collectives' kernels slow it somewhat). In
# forward a rank computes 2 FLOP for each parameter and token, and gathers 2 bytes in bf16. That is hidden
# from `F / B` tokens on, where F is the FLOP/s that the GPU reaches, and B the bytes per second of an
# all-gather (the *bus bandwidth* that nccl-tests prints). Backward computes 4 FLOP, gathers 2 bytes and
# reduces 4: hidden from `1.5 F / B` tokens on. Tokens are those of **one rank in one forward pass**,
# micro-batch times sequence length.
#
# A replay of the recorded steps checks this rule. Its GPU is invented: 400 TFLOP/s, 200 GB/s within a host,
# 50 GB/s between the two hosts, and no latency.

# %%
# %%ranks
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ways = {"ZeRO-2": (flat, False), "FULL_SHARD": (flat, True), "HYBRID_SHARD": (hosts, True)}
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
for name, color in zip(traces, plots.RANK_COLORS):
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
# The dashed line is 1.5 F / B: 12,000 tokens. There, a step of any strategy is at most 9% longer than its
# computation, so no other strategy saves much over FULL_SHARD. With an eighth of the tokens a step of
# FULL_SHARD takes 5.3 times as long as its computation, 1.3 times as long as one of ZeRO-2: about the ratio
# of their bytes, 8 to 6. A check finds the same at links of 5 to 100 GB/s, each at its own line. (This replay
# does not choose between HYBRID_SHARD and ZeRO-2. With two ranks on a host they send 4.0 and 4.5 bytes per
# parameter, with eight 4.0 and 5.6; and the replay has one stream, where FSDP2 gives the all-reduces of
# HYBRID_SHARD their own.)
#
# More tokens per rank need more memory for activations. That memory may come from FULL_SHARD itself, or from
# checkpointing.
#
# ### Recorded: a slow link
#
# In this recording the link is real: its rate is limited with `tc`. The two hosts are one machine with two
# CPU cores, and the backend is gloo.

# %%
two_hosts, rows = recorded.load("two_hosts"), []
for result in two_hosts["results"]:
    rate = f"{result['rate_mbit']} Mbit/s" if result["rate_mbit"] else "not limited"
    rows.append([rate, *(f"{run['step_s']:.2f}" for run in result["strategies"].values())])
assert [round(float(row[3]) / float(row[4]), 1) for row in rows] == [3.3, 2.7, 1.1]
Table(
    ["link; seconds of a step", *NAMES], rows, note=f"Recorded {two_hosts['date']} on {two_hosts['device']}."
)

# %% [markdown]
# HYBRID_SHARD is 3.3 times as fast as FULL_SHARD on the slowest link, and 1.1 times as fast without a limit.
# (gloo sends a reduce-scatter as an all-reduce: 24, 36, 48 and 16 MiB crossed the link. With a true
# reduce-scatter it is 24, 24, 36 and 16: expect 2.25 times, not 3.3, and ZeRO-2 like DDP. Without a limit DDP
# is the fastest.)
#
# ## The mesh of HYBRID_SHARD
#
# A **device mesh** arranges ranks in rows and columns. `fully_shard` shards over the *last* dimension, the
# rows, and replicates over the first. A row need not be one host: with eight hosts, rows of four hosts make
# two copies.

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
# With the dimensions in the wrong order each copy is cut across the hosts. Nothing raises an error, and three
# times as much leaves a host. Nor does `fully_shard` compare the copies: give all ranks the same weights, by
# a seed or a file.
#
# ## Your turn 1 · As few hosts as possible
#
# Write `my_rows(world, per_host, state, room)`: the rows of the mesh. `state` is the GiB of the complete
# model's state, `room` the GiB that a rank has for its part of it. Ranks are numbered host by host. Return a
# list of rows, each a list of ranks. A row is one copy of the model, on whole hosts, on as few of them as
# hold it; all rows are equally long. For instance, `my_rows(4, 2, 100, 60)` is `[[0, 1], [2, 3]]`. In the
# clusters of the turn, all ranks together always have room.
#
# <details><summary>Hint</summary>
#
# Try 1, 2, 3 … hosts per row: the number must divide the number of hosts, and `state / ranks in a row` must
# be at most `room`.
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
# Four micro-batches, one optimizer step: FSDP2 reduces after each of them, unless you call
# `set_requires_gradient_sync(False)` (DDP and FSDP1 have `no_sync()`). `accumulated` counts what the four
# gather and reduce, in times the whole model, and the gradients that a rank keeps between them.

# %%
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
# The gradients are equal up to rounding. The price of three reductions less: each rank keeps **complete**
# gradients between micro-batches, 2 MiB in place of 0.5. For 26 billion parameters on 16 ranks that is 48 GiB
# in bf16 (97 with `reduce_dtype=torch.float32`), in place of 6: the shards of gradients have the dtype of the
# stored parameters, here float32 (3 if these are bf16). And the eight gathers stay, two for each micro-batch,
# since units are freed as before.
#
# ## Your turn 2 · ZeRO-1 out of `fully_shard`
#
# ZeRO-1 as it was designed cuts the optimizer's state alone, and sends parameters and gradients once per
# step. Write an accumulation that gathers each unit once and reduces it once, for all micro-batches together.
# At the end no unit may be complete. `model` is the one above, with `reshard_after_forward=True`; divide each
# loss by the number of micro-batches.
#
# <details><summary>Hint</summary>
#
# Three switches of the model: `set_reshard_after_forward`, `set_reshard_after_backward` and
# `set_requires_gradient_sync`. What should each be in the last micro-batch?
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


# %% tags=["wrong"] turn=2 says="They differ from those above"
def my_accumulate(model, batches):              # the gradients of the first two alone
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == 3)
        model.set_reshard_after_backward(number == 3)
        (model(x).square().mean() / 2 * (number < 2)).backward()

# %% tags=["wrong"] turn=2 says="divided by four"
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
# ## Which one?
#
# 1. One GPU holds the state, 16 bytes per parameter with `gradient_as_bucket_view=True` and 20 without, with room to spare: DDP.
# 2. Tokens per rank are above 1.5 F / B, with B measured over the slowest link: FULL_SHARD.
# 3. Else, on two or three hosts of which each can hold the state: HYBRID_SHARD, because it sends least; if ZeRO-2 fits, time ten steps of both.
#    (On more hosts, too, if gradients are reduced in bf16.)
# 4. Else, with room for a complete model in bf16, 2 bytes per parameter: ZeRO-2.
# 5. Else FULL_SHARD, and memory for more tokens per rank: [lesson 2](02_activation_checkpointing.ipynb).
#    With fewer samples than ranks, a second dimension: [lesson 16](16_two_dimensions.ipynb).
#
# ## The same under other names
#
# | DeepSpeed | cuts | FSDP1 | FSDP2 |
# |:--|:--|:--|:--|
# | ZeRO-0 | nothing | `NO_SHARD` (deprecated: DDP) | DDP |
# | ZeRO-1 | optimizer state | `SHARD_GRAD_OP`, in `no_sync()` until the last micro-batch | turn 2 |
# | ZeRO-2 | and gradients | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | ZeRO-3 | and parameters | `FULL_SHARD` | the default |
# | [ZeRO++](https://arxiv.org/abs/2306.10209) hpZ | backward gathers within the host | none | `reshard_after_forward=` ranks per host |
# | [MiCS](https://arxiv.org/abs/2205.00119) | within a group of ranks | `HYBRID_SHARD` | a mesh of two dimensions |
#
# FSDP's ZeRO-2 differs from DeepSpeed's mainly in one point: between two steps the parameters are cut, too.
# By default FSDP2 frees every unit after forward but the root. After backward it frees all, whatever
# `reshard_after_forward` says, unless you call `set_reshard_after_backward(False)`.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the loss stays the same in each step | units are complete after the last backward: the optimizer updates shards, forward uses the old complete parameters | `set_reshard_after_backward(True)` before the last micro-batch |
# | HYBRID_SHARD is slower than FULL_SHARD | the mesh's dimensions are swapped, as above | first replicate, then shard |
# | the same input has another loss on another host, no error | under HYBRID_SHARD the copies began with different weights, and stay different | one seed or one file for all ranks |
# | out of memory since gradients are not reduced each time | complete gradients on each rank | reduce each time; under HYBRID_SHARD `set_requires_all_reduce(False)` keeps shards and leaves out the all-reduce alone |
# | FSDP needs as much memory as DDP | one unit ([lesson 1](01_transformer_wrapper.ipynb)), or activations dominate ([lesson 2](02_activation_checkpointing.ipynb)) | units by block; checkpointing |
# | `If passing reshard_after_forward as an int, it should be a factor of` | the number does not divide the ranks that share the shards | a divisor, such as the ranks of a host |
#
# ## The rule
#
# Tokens per rank above 1.5 F / B: FULL_SHARD. Below: HYBRID_SHARD on two or three hosts (on more if gradients
# are reduced in bf16), else ZeRO-2, on one host too, as memory allows.
#
# [← lesson 5](05_maximising_throughput.ipynb) · [lesson 7 →](07_mixed_precision.ipynb)

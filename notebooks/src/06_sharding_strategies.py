# %% [markdown]
# # 6 · Sharding strategies
#
# Which strategy for my model and my links? **Begin with FULL_SHARD, the default of `fully_shard`. Pay memory for another
# strategy only if the GPU waits for communication; with more than 1.5 F / B tokens per rank in a forward pass it
# hardly does.** F is what a GPU computes, in FLOP/s, and B what a host sends to the next, in bytes per second; "When
# gathers are hidden" derives the line.
#
# You choose by an argument or two of `fully_shard`, called for each block and then the model. DDP is there to compare:
#
# | strategy | what a rank keeps | arguments | holds | leaves a host |
# |:--|:--|:--|--:|--:|
# | FULL_SHARD | its shard; a unit is complete while it computes, and shortly before | `mesh=flat` | 8.8 | 55.9 |
# | hpZ | its shard, and from forward to backward an eighth of all parameters | `mesh=flat, reshard_after_forward=8` | 8.8 | 41.9 |
# | ZeRO-2 | its shard, and from forward to backward all parameters | `mesh=flat, reshard_after_forward=False` | 21.9 | 41.9 |
# | HYBRID_SHARD | its shard of one copy per host | `mesh=hosts` | 16.3 | 29.8 |
# | DDP | everything | `DDP(model, gradient_as_bucket_view=True)` | 119.2 | 55.9 |
#
# In GiB, calculated for 8 billion parameters on two hosts of eight GPUs: "holds" is a rank's peak in forward and
# backward, before activations; "leaves a host" is what a step sends. `flat` is a mesh of all ranks in one row, `hosts`
# has a row for each host.

# %% jupyter={"source_hidden": true}
from itertools import product

from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots, recorded

SENDS = {"FULL_SHARD": 6.0, "hpZ": 4.5, "ZeRO-2": 4.5, "HYBRID_SHARD": 4.0, "DDP": 6.0}
LARGE = {"DDP": lambda r, piece: True, "HYBRID_SHARD": lambda r, piece: piece // 2 == r % 2}
SMALL = {"ZeRO-2": lambda r, piece: True, "hpZ": lambda r, piece: piece // 2 == r % 2}
fig, panels = plots.figure(5, width=9.8, height=2.1)
for axes, (name, sends) in zip(panels, SENDS.items()):
    for r, piece in ((r, piece) for r in range(4) for piece in range(4)):
        place, color = (r * 1.15 + (r // 2) * 0.55, 3 - piece), plots.RANK_COLORS[piece]
        own = LARGE.get(name, int.__eq__)(r, piece)
        axes.add_patch(Rectangle(place, 0.9, 0.9, color=color if own else plots.FAINT))
        if not own and name in SMALL and SMALL[name](r, piece):
            axes.add_patch(Rectangle((place[0] + 0.2, place[1] + 0.2), 0.5, 0.5, color=color))
    axes.text(2.45, 4.15, "host 0                  host 1", ha="center", fontsize=8)
    axes.annotate("", (1, -0.55), (3.9, -0.55), arrowprops={"arrowstyle": "<->", "linewidth": sends / 1.5})
    axes.text(2.45, -0.95, f"{sends} bytes", ha="center", va="top", fontsize=8, weight="bold")
    axes.set(title=name, xlim=(-0.25, 5.15), ylim=(-1.9, 4.8), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Which quarters of the parameters each of four ranks on two hosts holds, and what leaves a host.")

# %% [markdown]
# A drawing of four ranks on two hosts. A column is a rank, a colour a quarter of the parameters. Large squares are
# kept all the time; small ones stay from forward until backward has used them; for hpZ the ranks of a host cut
# everything anew among themselves. The arrow is what leaves a host in a step, in bytes per parameter.

# %% tags=["card"]
lesson.card(
    6,
    learn="choose what a rank keeps and which ranks share it, by memory and by bytes on the slowest link",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), and [lesson 4](04_backward_prefetch.ipynb) for the replay",
    ranks="4 on this machine, taken as two hosts of two (with 2 or 3, all are on one host)",
    minutes=(1, 28, 25),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. The four ranks are taken as two hosts of two,
# which aren't real: the script records each collective's size and calculates what a ring sends between them. All is in
# float32, so its bytes differ from the drawing's.
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
#     complete = trace.peak_units * sum(p.nbytes for p in model.parameters()) / 8  # of 8 equal units
#     far = [event for event in trace.collectives if event.link == "between hosts"]
#     leaves = sum(event.sent_bytes * world / len(event.ranks) for event in far)  # one ring per group of ranks
#     if rank == 0:
#         print(f"{name:12} state {state / 2**20:.1f} MiB, complete at once {complete / 2**20:.1f} MiB,", end=" ")
#         print(f"{leaves / 2**20:.1f} MiB leave a host, loss {loss.item():.2f}")
# dist.destroy_process_group()
# ```
# ```text
# FULL_SHARD   state 2.0 MiB, complete at once 0.5 MiB, 4.5 MiB leave a host, loss 0.96
# ZeRO-2       state 2.0 MiB, complete at once 2.0 MiB, 3.0 MiB leave a host, loss 0.96
# HYBRID_SHARD state 4.0 MiB, complete at once 0.5 MiB, 2.0 MiB leave a host, loss 0.96
# ```
#
# On two real hosts take `per_host` from its comment, and start on each
# `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 train.py`.
#
# The loss is the same, because a strategy changes where tensors are, not what is computed. The other numbers follow
# from the size of all parameters, P = 2.0 MiB.
#
# **State.** Training keeps each parameter, its gradient and AdamW's two moments, all of one size: 4 P = 8 MiB.
# FULL_SHARD and ZeRO-2 cut it over four ranks, 2.0 MiB each; HYBRID_SHARD over the two ranks of a host, 4.0 MiB each.
#
# **Complete at once.** FULL_SHARD frees a unit after its forward pass, and has two of eight complete at most: in
# backward, the one that computes and the next. ZeRO-2 doesn't free them: at the end of forward it has all of P.
#
# **Bytes.** Ranks usually form a **ring**, in which each passes pieces to the next. To gather P on four ranks, each
# rank sends three quarters of P, 1.5 MiB, and so does a host, because the ring leaves it at one place only. Reducing
# gradients costs the same. FULL_SHARD gathers in forward, gathers again in backward and reduces: `3 * 1.5` = 4.5 MiB.
# ZeRO-2 saves the second gather: `2 * 1.5` = 3.0. Under HYBRID_SHARD all three stay inside the host. Only the
# gradients are averaged with the other host's copy, by an all-reduce, which is a reduce-scatter and an all-gather:
# between two hosts `2 * P / 2` = 2.0.
#
# ## What a rank holds, and what leaves a host
#
# The next cells train with all five strategies on four ranks. They measure memory, and calculate bytes from the
# recorded collectives as the script does, now with the dtypes of a usual job: state in float32, gathers in bf16, 2
# bytes, and gradients reduced in float32, 4 bytes ([lesson 7](07_mixed_precision.ipynb)). The unit is **bytes per
# parameter of the model**, so that you can multiply by your own. **hpZ**, a part of
# [ZeRO++](https://arxiv.org/abs/2306.10209), is an integer in FSDP2: with `reshard_after_forward=2` a unit is cut in
# two after forward, one part for each rank of a host, so that backward gathers it within the host. `hold` (folded)
# trains three steps under the `Meter` of lesson 0.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils import record_collectives
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.sharding.units import find_units

rank, world = dist.get_rank(), dist.get_world_size()
n_hosts = 2 if world % 2 == 0 and world > 2 else 1
per_host, UNITS = world // n_hosts, 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
flat = init_device_mesh(device.type, (world,))
hosts = init_device_mesh(device.type, (n_hosts, per_host), mesh_dim_names=("replicate", "shard"))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(UNITS)])


def batch(number):  # f32[2, 256], other samples on each rank; so few that activations don't count
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(100 * rank + number)).to(device)


local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor


def hold(model, micro_batches=1, before=lambda model, is_last: None):
    """Bytes per parameter on this rank at its peak, those that leave a host in a step, and the first gradients."""
    optimizer, peaks, gradients = torch.optim.AdamW(model.parameters()), [], []
    for _ in range(3):
        with (record_collectives(model, ranks_per_host=per_host) as trace, Meter(model.parameters(), device=device.type) as meter):
            for number in range(micro_batches):
                before(model, number == micro_batches - 1)
                ((model(batch(number)) - batch(number)).square().mean() / micro_batches).backward()
        peaks.append(meter.peak_tensor_bytes)
        gradients = gradients or [local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    always, moments = (sum(local(t).nbytes for t in tensors) for tensors in (model.parameters(), moments))
    far = [event for event in trace.collectives if event.link == "between hosts"]
    sent = sum(event.sent_bytes * world / len(event.ranks) for event in far)  # a ring leaves a host once
    numel, added = sum(p.numel() for p in model.parameters()), min(peaks) - always  # a buffer may be freed late
    parts = {"parameters and AdamW's moments": (always + moments) / numel, "added in the step": added / numel}
    return parts, sent / numel, gradients


# %% tags=["memory", "bytes"]
# %%ranks
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp(mesh, reshard, policy=mixed):
    model = build()
    for part in [*model, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model


ways = {"FULL_SHARD": (flat, True), "hpZ": (flat, per_host), "ZeRO-2": (flat, False), "HYBRID_SHARD": (hosts, True)}
measured = {name: hold(fsdp(*way))[:2] for name, way in ways.items()}
measured["DDP"] = hold(DistributedDataParallel(build(), gradient_as_bucket_view=True))[:2]  # else gradients are held twice

# %%
measured = ranks.get("measured")[0]
plots.amounts({
    "held by a rank at its peak": {name: parts for name, (parts, _) in measured.items()},
    "leaves a host in a step": {name: {"sent to the other host": sent} for name, (_, sent) in measured.items()},
}, unit="bytes per parameter")

# %% [markdown]
# No strategy has the shortest bar in both panels. Blue is there all the time, 12 bytes per parameter divided by the
# ranks that share them: two under HYBRID_SHARD, which therefore holds much here. Orange comes and goes within a step,
# and explains hpZ, which holds hardly more than FULL_SHARD and sends as little as ZeRO-2. At the end of forward a rank
# of hpZ keeps half of the parameters in bf16, 1 byte per parameter here, but no gradients: `zero_grad()` has freed
# them. In backward each unit's gradient takes the room of the unit's half, so **with one micro-batch the two don't add
# up**. ZeRO-2 keeps 2 bytes where hpZ keeps 1, and peaks at the end of forward.
#
# ## Your cluster
#
# So the peak of forward and backward is the larger of two moments, the end of either. `holds` calculates it, and
# `leave_a_host` the bytes; from the second micro-batch on, the end of forward has the gradients of the earlier ones,
# too. `optimizer.step()` isn't counted, which makes no copies with `AdamW(fused=True)`.

# %% tags=["link"]
def holds(strategy, hosts, per_host, micro_batches=1, units=32):
    """Bytes per parameter that a rank holds at its peak, before activations; DDP in float32."""
    if strategy == "DDP":
        return 16  # parameter, gradient and two moments, 4 bytes each
    cut_by = per_host if strategy == "HYBRID_SHARD" else hosts * per_host
    kept = {"hpZ": 2 / per_host if hosts > 1 else 0, "ZeRO-2": 2}.get(strategy, 0)  # from forward to backward
    end_of_forward = (12 if micro_batches == 1 else 16) / cut_by + kept  # with gradients of earlier micro-batches
    end_of_backward = 16 / cut_by
    return max(end_of_forward, end_of_backward) + 6 / units  # two units and a gradient in bf16; measured: 7 to 12 / units


def leave_a_host(strategy, hosts, per_host, micro_batches=1, gather=2, reduce=4):
    """Bytes per parameter that leave a host in one optimizer step."""
    n = hosts * per_host
    ring = (n - 1) / n if hosts > 1 else 0  # the part of a tensor that a ring of all ranks sends
    return {
        "FULL_SHARD": micro_batches * (gather + gather + reduce) * ring,
        "hpZ": micro_batches * (gather + reduce) * ring,  # the second gather stays in the host
        "ZeRO-2": micro_batches * (gather + reduce) * ring,
        "HYBRID_SHARD": 2 * reduce * (hosts - 1) / hosts,  # an all-reduce sends twice; once in a step
        "DDP": 2 * reduce * ring,  # once in a step
    }[strategy]


# %% tags=["check"]
n_hosts, per_host, units = ranks.get("(n_hosts, per_host, UNITS)")[0]
for name, (parts, sent) in measured.items():
    assert 0 <= sum(parts.values()) - holds(name, n_hosts, per_host, units=units) < 0.4, name
    assert abs(sent - leave_a_host(name, n_hosts, per_host)) < 0.1, name

# %% [markdown]
# A folded check holds both against the bars above: the bytes agree, and `holds` is a little low, as its last comment
# says. The first table is made by them: AdamW, 32 equal units, no activations. Now set your cluster, for 8 billion
# parameters.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore

NAMES = ["FULL_SHARD", "hpZ", "ZeRO-2", "HYBRID_SHARD", "DDP"]
GIB = 8e9 / 2**30  # one byte for each of 8 billion parameters


def of_8_billion(hosts, per_host, micro_batches, strategy):
    cluster = strategy, hosts, per_host, micro_batches
    return Point([GIB * holds(*cluster)], [GIB * leave_a_host(*cluster)], "calculated, before activations")


first = [[round(GIB * f(name, 2, 8), 1) for name in NAMES] for f in (holds, leave_a_host)]
assert first == [[8.8, 8.8, 21.9, 16.3, 119.2], [55.9, 41.9, 41.9, 29.8, 55.9]]
assert [round(GIB * holds(name, 64, 8), 1) for name in NAMES] == [1.6, 3.4, 16.5, 16.3, 119.2]
explore(
    "calculated: 8 billion parameters, before activations",
    [Axis("hosts", [1, 2, 4, 8, 32, 64], start=1), Axis("ranks per host", [1, 2, 4, 8], start=3),
     Axis("micro-batches", [1, 2, 4, 8]), Axis("strategy", NAMES, start=0)],
    Stack("held by a rank at its peak", "GiB", {"held": plots.RANK_COLORS[0]}, upto=140, limit=80, limit_name="80 GiB"),
    of_8_billion, scalars={"leave a host in a step": "GiB"}, over="strategy",
)

# %% [markdown]
# Go from 2 hosts to 64 with eight ranks each. FULL_SHARD falls to 1.6 GiB and hpZ to 3.4, but ZeRO-2 and HYBRID_SHARD
# stay above 16: ZeRO-2 always has the complete bf16 parameters, HYBRID_SHARD one copy's state on eight ranks. On a
# single host nothing leaves, so HYBRID_SHARD and hpZ have no use.
#
# The units are equal here. By default the root unit, often embedding and head, is kept from forward to backward as
# under ZeRO-2, unless you pass `reshard_after_forward=True` for the model, too.
#
# ## Gradient accumulation
#
# With **gradient accumulation** an optimizer step uses several *micro-batches*, one after the other. By default FSDP2
# reduces gradients after each. Two switches change that, and both are turned on again for the last:
# `set_requires_gradient_sync(False)` leaves gradients unreduced (DDP and FSDP1: `no_sync()`), and under HYBRID_SHARD
# `set_requires_all_reduce(False)` reduces them within the host and leaves out the all-reduce alone.

# %% tags=["accumulation"]
# %%ranks
accumulated = {
    "FULL_SHARD, reduced after each": hold(fsdp(flat, True), 4),
    "FULL_SHARD, reduced after the last": hold(
        fsdp(flat, True), 4, lambda model, is_last: model.set_requires_gradient_sync(is_last)),
    "HYBRID_SHARD, all-reduced after each": hold(fsdp(hosts, True), 4),
    "HYBRID_SHARD, all-reduced after the last": hold(
        fsdp(hosts, True), 4, lambda model, is_last: model.set_requires_all_reduce(is_last)),
}
for pair in (list(accumulated)[:2], list(accumulated)[2:]):  # the same gradients
    for one, other in zip(*(accumulated[way][2] for way in pair)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)

# %%
by_rank = ranks.get("{way: (sum(parts.values()), sent) for way, (parts, sent, _) in accumulated.items()}")
accumulated = {way: min(of_rank[way] for of_rank in by_rank) for way in by_rank[0]}  # freed late on some
rows = [[way, round(held), round(sent, 1)] for way, (held, sent) in accumulated.items()]
Table(["four micro-batches, bytes per parameter", "a rank holds", "leave a host"], rows)

# %% tags=["check"]
for way, strategy in zip(list(accumulated)[::3], ("FULL_SHARD", "HYBRID_SHARD")):
    held, sent = accumulated[way]
    assert 0 <= held - holds(strategy, n_hosts, per_host, 4, units) < 0.6, way
    assert abs(sent - leave_a_host(strategy, n_hosts, per_host, 4)) < 0.1, way
after_each, after_last = (held for held, _ in list(accumulated.values())[2:])
assert n_hosts == 1 or 0 < after_each - after_last < 4.1 / per_host
assert [round(GIB * 4 / ranks_of, 1) for ranks_of in (1, 16)] == [29.8, 1.9]
assert [[round(leave_a_host(name, n, 8), 1) for name in NAMES[1:4:2]] for n in (2, 3, 4)] == [[5.6, 4], [5.8, 5.3], [5.8, 6]]

# %% [markdown]
# **Reducing after the last costs FULL_SHARD memory.** What isn't reduced isn't cut, so each rank keeps complete
# gradients in float32, 4 bytes per parameter: 29.8 GiB for 8 billion, where their shards on 16 ranks take 1.9.
#
# **HYBRID_SHARD, all-reduced after the last, sends the least by far**, a quarter of what it sends otherwise. It also
# holds less. Where an earlier micro-batch has left gradients, FSDP2 adds the all-reduced ones to them and keeps both
# until backward ends: 4 bytes per parameter more, divided by the ranks of a host, so up to 2 here.
#
# **With one micro-batch HYBRID_SHARD gains less.** On two hosts of eight it sends 4.0 bytes, hpZ and ZeRO-2 5.6. From
# four hosts on it sends more than they do, because an all-reduce sends each float32 gradient almost twice.
#
# ## When gathers are hidden
#
# FSDP sends while the GPU computes, so sending less helps only if the GPU waits. Let T be the tokens of **one rank in
# one forward pass**, micro-batch times sequence length. For each parameter, FULL_SHARD
#
# | in | computes, FLOP | sends, bytes | is hidden once |
# |:--|:--|:--|:--|
# | forward | 2 T | 2, gathered | T > F / B |
# | backward | 4 T | 2, gathered, and 4, reduced | **T > 1.5 F / B** |
#
# Backward decides. (With activation checkpointing it computes 6 T, and the line falls to F / B.) B is what all cards
# of a host send together, measured as `busbw` of nccl-tests' `all_gather_perf` on all your ranks; F is `6 *
# parameters` times the tokens per second of one GPU without FSDP, on fewer blocks. With F = 400 TFLOP/s the line is
# 12,000 tokens where a host has one card of 400 Gbit/s, 50 GB/s, and 1,500 with eight such cards.
#
# To check the line, the next cells record what one of 16 ranks issues on torch's `fake` backend and replay it as in
# lesson 4 for two hosts of eight invented GPUs: 400 TFLOP/s, 200 GB/s within a host, no latency. At the left 50 GB/s
# link the hosts, and 1 means that all communication is hidden. The maps vary link and tokens. A square has the colour of
# the fastest of FULL_SHARD, ZeRO-2 and HYBRID_SHARD, and says how many times as long FULL_SHARD takes; grey gains at
# most 10%.

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_utils import record_collectives


def recorded_on_16(mesh, reshard, micro_batches=1):
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    for part in [*model, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=mixed)
    for _ in range(2):  # from the second step on, backward knows what to prefetch
        with record_collectives(model, ranks_per_host=8) as trace:
            for number in range(micro_batches):
                model.set_requires_all_reduce(number == micro_batches - 1)
                model(torch.zeros(1, 256)).sum().backward()
    return trace


dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
flat, hosts = init_device_mesh("cpu", (16,)), init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
traces = {name: recorded_on_16(flat, reshard) for name, reshard in (("FULL_SHARD", True), ("hpZ", 8), ("ZeRO-2", False))}
traces["HYBRID_SHARD"] = recorded_on_16(hosts, True)
traces["HYBRID_SHARD, 4 micro-batches"] = recorded_on_16(hosts, True, 4)
dist.destroy_process_group()

# %% tags=["replay"]
def slowdown(name, tokens, link, flops=400e12):
    """Length of a replayed step, in times of its computation."""
    compute = {unit: 2 * (nbytes / 4) * tokens / flops for unit, nbytes in traces[name].unit_bytes.items()}
    between = link / 8 if name.startswith("HYBRID") else link  # the all-reduces of eight ranks share the link
    speeds = {"within a host": 200e9 / 2**30, "between hosts": between / 2**30}
    run = traces[name].replay(compute_s=compute, link_gib_s=speeds)
    return run.step_s / run.compute_s


# %% jupyter={"source_hidden": true}
TOKENS, PARTS, FASTER = [500 * 2**i for i in range(7)], [16, 8, 4, 2, 1], [1, 2, 4, 8, 16]
COLOR = dict(zip(traces, (*plots.RANK_COLORS[:4], plots.RANK_COLORS[3])))
fig, (axes, *maps) = plots.figure(3, width=9.8, height=3.2)
for name, color in COLOR.items():
    axes.plot(TOKENS, [slowdown(name, n, 50e9) for n in TOKENS], "o--" if "4" in name else "o-", color=color, label=name)
axes.axvline(1.5 * 400e12 / 50e9, color=plots.INK, linestyle=":", linewidth=1.2)
axes.set(title="50 GB/s between hosts", xlabel="tokens per rank in a forward pass", ylabel="step / computation")
axes.loglog()
axes.set_xticks(TOKENS, [f"{tokens / 1000:g}k" for tokens in TOKENS])
axes.set_yticks(FASTER, FASTER)
axes.minorticks_off()
fig.legend(loc="outside lower center", ncols=5, fontsize=8)
fastest = {}
for axes, hybrid, title in zip(maps, list(traces)[3:], ("one micro-batch", "four micro-batches")):
    for (x, part), (y, faster) in product(enumerate(PARTS), enumerate(FASTER)):
        link = 200e9 / faster
        took = {name: slowdown(name, 1.5 * 400e12 / link / part, link) for name in ("FULL_SHARD", "ZeRO-2", hybrid)}
        best = min(took, key=took.get)
        times = took["FULL_SHARD"] / took[best]
        fastest[hybrid, part, faster] = best if times > 1.1 else "FULL_SHARD"
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, color=COLOR[best] if times > 1.1 else plots.FAINT))
        axes.text(x, y, f"{times:.1f}", ha="center", va="center", fontsize=8)
    axes.set(title=f"fastest with {title}", xlim=(-0.5, 4.5), ylim=(-0.5, 4.5), xlabel="tokens / (1.5 F / B)")
    axes.set_xticks(range(5), ["1/16", "1/8", "1/4", "1/2", "1"])
    axes.set_yticks(range(5), FASTER)
maps[0].set_ylabel("link within / between hosts")
plots.show(fig, alt="Step over computation by tokens and strategy; and the fastest strategy by tokens and link, for one and four micro-batches.")

# %% tags=["check"]
for name, trace in traces.items():  # hosts of eight leave what is calculated
    far = [event for event in trace.collectives if event.link == "between hosts"]
    sent = sum(event.sent_bytes * 16 / len(event.ranks) for event in far) / sum(trace.unit_bytes.values()) * 4
    assert abs(sent - leave_a_host(name.split(",")[0], 2, 8, 4 if "4" in name else 1)) < 0.01, name
assert max(slowdown(name, 1.5 * 400e12 / link, link) for name in traces for link in (5e9, 12.5e9, 25e9, 50e9)) < 1.08
for (hybrid, part, faster), best in fastest.items():  # what the text says of the maps
    expected = hybrid if ("4" in hybrid and faster > 1) or (part >= 4 and faster >= 8) else "ZeRO-2"
    assert best == (expected if part > 1 else "FULL_SHARD"), (hybrid, part, faster)
assert [round(slowdown(name, 2000, 50e9), 1) for name in traces] == [5.0, 4.1, 3.9, 3.9, 1.9]
assert slowdown("HYBRID_SHARD", 4096, 12.5e9) < 0.85 * slowdown("ZeRO-2", 4096, 12.5e9)  # job 2 of turn 1

# %% [markdown]
# The dotted line is 1.5 F / B = 12,000 tokens. There a replayed step takes at most 8% longer than its computation
# under any strategy, so none can save more than 8%. To the left the curves part: at 2,000 tokens a step takes 5.0
# times its computation under FULL_SHARD, 3.9 under ZeRO-2, and 1.9 under HYBRID_SHARD with four micro-batches.
#
# The maps are in shares, so F, B and the link within your host find their square. With four micro-batches HYBRID_SHARD
# is the fastest left of the line, unless the link between hosts is as fast as the one within. With one, it needs a link
# of an eighth and at most a quarter of the line's tokens: elsewhere its gathers within the host take too long, as the
# replay sends one collective at a time, and ZeRO-2 is faster.
#
# A recording has a real link, limited by `tc` to 50 Mbit/s, between two hosts of two ranks on one machine, with one
# micro-batch in float32:

# %% jupyter={"source_hidden": true}
at_50_mbit = recorded.load("two_hosts")["results"][0]["strategies"]
rows = [[name.replace("SHARD_GRAD_OP", "ZeRO-2"), round(run["wire_mib"]), f"{run['step_s']:.1f}"] for name, run in at_50_mbit.items()]
Table(["recorded", "MiB over the link", "s a step"], rows)

# %% [markdown]
# Expect smaller differences on GPUs: gloo carries out a reduce-scatter as an all-reduce, with twice the bytes, and
# float32 doubles the gathers.
#
# ## The mesh of HYBRID_SHARD
#
# A **device mesh** arranges ranks in rows. `fully_shard` keeps a copy of the model in each row, cut over its ranks, so
# a row should be a host. What if the two dimensions are swapped?

# %%
# %%ranks
swapped = DeviceMesh(device.type, hosts.mesh.t(), mesh_dim_names=("replicate", "shard"))
of_hosts, of_swapped = measured["HYBRID_SHARD"][1], hold(fsdp(swapped, True))[1]
if rank == 0:
    print("rows", hosts.mesh.tolist(), f"{of_hosts:.1f} bytes per parameter leave a host")
    print("rows", swapped.mesh.tolist(), f"{of_swapped:.1f} bytes per parameter leave a host")
if n_hosts == 2:
    assert of_swapped > 1.9 * of_hosts

# %% [markdown]
# Swapped, each copy lies across both hosts, so its gathers cross the link: twice the bytes here, eight times on hosts
# of eight, and no error. Print `mesh.mesh.tolist()` in your job: is each row a host?
#
# ## Your turn 1 · Which strategy?
#
# Write `my_strategy(job)`, which chooses for the jobs below. None fits under DDP. `tokens` are those of one rank in
# one forward pass; `room` is a GPU's GiB for all that `holds` counts.
#
# - Return one of `FSDP`, the names in the next cell. It has to fit into `room`.
# - If the line says that FULL_SHARD hides its communication, take that; the jobs don't use checkpointing. Else take
#   the one that sends least, which in these jobs is also the fastest of those that fit, replayed on their hosts.
#
# <details><summary>Hint</summary>
#
# A list of the names that fit: `holds(...)` times the parameters, divided by 2**30. Then `min` of that list, with
# `leave_a_host` as its key.
#
# </details>

# %%
from collections import namedtuple

Job = namedtuple("Job", "parameters hosts per_host micro_batches tokens flops bandwidth room")
FSDP = ["FULL_SHARD", "hpZ", "ZeRO-2", "HYBRID_SHARD"]
JOBS = [
    Job(8e9, 2, 8, 1, 15_000, 400e12, 50e9, 60),
    Job(8e9, 2, 8, 1, 4_096, 400e12, 12.5e9, 40),
    Job(8e9, 8, 8, 1, 10_000, 400e12, 50e9, 40),
    Job(8e9, 8, 8, 8, 4_096, 400e12, 50e9, 40),
    Job(70e9, 8, 8, 4, 2_048, 400e12, 50e9, 50),
    Job(70e9, 4, 8, 4, 2_048, 400e12, 50e9, 50),
]
Table(["job", *Job._fields], [[number, *map("{:g}".format, job)] for number, job in enumerate(JOBS, 1)])

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

FITS, HIDDEN = "jobs where it does not fit", "jobs that pay memory for nothing"
WAITS, SENDS = "jobs left waiting under FULL_SHARD", "jobs that send more than needed"


def sent_for(job, name):
    return leave_a_host(name, job.hosts, job.per_host, job.micro_batches)


def that_fit(job):
    cluster = job.hosts, job.per_host, job.micro_batches
    return [name for name in FSDP if holds(name, *cluster) * job.parameters / 2**30 <= job.room]


@turn(1, {
    FITS: exactly("none", "It needs more than the room: call `holds` with the job's hosts, ranks and micro-batches."),
    HIDDEN: exactly("none", "Above 1.5 F / B tokens communication is hidden: FULL_SHARD, which holds least, is as fast."),
    WAITS: exactly("none", "Another one fits and sends less. Is the line 1.5 F / B? T is the tokens of one forward pass, not of the step."),
    SENDS: exactly("none", "Another one that fits sends less: call `leave_a_host` with the job's hosts and micro-batches."),
})
def score_strategy(my_strategy):
    found = {FITS: [], HIDDEN: [], WAITS: [], SENDS: []}
    for number, job in enumerate(JOBS, 1):
        name, sends = my_strategy(job), {other: sent_for(job, other) for other in that_fit(job)}
        if name not in FSDP:
            raise NotYet(f"Job {number}: expected one of {', '.join(FSDP)}; found {name!r}.")
        if name not in sends:
            found[FITS].append(number)
        elif job.tokens > 1.5 * job.flops / job.bandwidth:
            found[HIDDEN] += [number] * (name != "FULL_SHARD")
        elif sends[name] > min(sends.values()):
            found[WAITS if name == "FULL_SHARD" else SENDS].append(number)
    return {row: ", ".join(map(str, numbers)) or "none" for row, numbers in found.items()}


# %%
# %%turn 1
def my_strategy(job):
    # is communication hidden? if not: which strategies fit, and which of these sends least?
    return None  # your lines here: one of FSDP


# %% tags=["solution"] turn=1
def my_strategy(job):
    if job.tokens > 1.5 * job.flops / job.bandwidth:
        return "FULL_SHARD"
    cluster = job.hosts, job.per_host, job.micro_batches
    fits = [name for name in FSDP if holds(name, *cluster) * job.parameters / 2**30 <= job.room]
    return min(fits, key=lambda name: leave_a_host(name, *cluster))


# %% tags=["right"] turn=1
def my_strategy(job):  # the rule, by hand
    fits = that_fit(job)
    if job.tokens * job.bandwidth > 1.5 * job.flops:
        return "FULL_SHARD"
    if "HYBRID_SHARD" in fits and (job.micro_batches > 1 or job.hosts == 2):
        return "HYBRID_SHARD"
    return next((name for name in ("ZeRO-2", "hpZ") if name in fits), "FULL_SHARD")


# %% tags=["right"] turn=1
def my_strategy(job):  # sorted, the one that holds less first
    order = sorted(that_fit(job), key=lambda name: holds(name, job.hosts, job.per_host, job.micro_batches))
    hidden = job.tokens > 1.5 * job.flops / job.bandwidth
    return order[0] if hidden else min(order, key=lambda name: sent_for(job, name))


# %% tags=["right"] turn=1
import numpy as np


def my_strategy(job):  # NumPy's string
    waits, names = 6 / job.bandwidth > 4 * job.tokens / job.flops, np.array(that_fit(job))
    return names[np.argmin([waits * sent_for(job, name) for name in names])]


# %% tags=["wrong"] turn=1 says="It needs more than the room"
def my_strategy(job):
    return "HYBRID_SHARD"


# %% tags=["wrong"] turn=1 says="T is the tokens of one forward pass, not of the step"
def my_strategy(job):
    hidden = job.tokens * job.micro_batches > 1.5 * job.flops / job.bandwidth
    return "FULL_SHARD" if hidden else min(that_fit(job), key=lambda name: sent_for(job, name))


# %% tags=["wrong"] turn=1 says="Is the line 1.5 F / B"
def my_strategy(job):  # forward's line
    hidden = job.tokens > job.flops / job.bandwidth
    return "FULL_SHARD" if hidden else min(that_fit(job), key=lambda name: sent_for(job, name))


# %% tags=["wrong"] turn=1 says="FULL_SHARD, which holds least, is as fast"
def my_strategy(job):  # without the line
    return min(that_fit(job), key=lambda name: sent_for(job, name))


# %% tags=["wrong"] turn=1 says="with the job's hosts and micro-batches"
def my_strategy(job):
    if job.tokens > 1.5 * job.flops / job.bandwidth:
        return "FULL_SHARD"
    return min(that_fit(job), key=lambda name: leave_a_host(name, job.hosts, job.per_host))


# %% [markdown]
# ## Your turn 2 · Gather once, reduce once
#
# Write `my_accumulate(model, batches)`, which gathers each unit once and reduces it once for all four micro-batches. (A
# single unit gathered twice still passes.) This is ZeRO-1: it cuts only the optimizer's state; parameters and gradients
# are complete for the whole step, 2 and 4 bytes per parameter.
#
# - Given: `model`, the one above under FULL_SHARD; `batches`, a list of four inputs. The loss of one is
#   `model(x).square().mean() / len(batches)`.
# - Return nothing. At the end no unit may be complete, because the optimizer updates shards.
#
# <details><summary>Hint</summary>
#
# Begin with `set_requires_gradient_sync(is_last)` before each forward pass. Two more switches of the model keep units
# complete: `set_reshard_after_forward` and `set_reshard_after_backward`. Which of the three change in the last
# micro-batch?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import Goal, NotYet, exactly, turn


def counted(accumulate):
    model, passes = fsdp(flat, True, MixedPrecisionPolicy()), []
    model.register_forward_hook(lambda *_: passes.append(1))
    with record_collectives(model) as trace:
        accumulate(model, [batch(number) for number in range(4)])
    left = sum(group.is_unsharded for unit in find_units(model) for group in unit.parts)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else None for p in model.parameters()]
    counts = {kind: round(trace.bytes_by_kind().get(kind, 0) / once[kind], 2) for kind in once}
    return {"forward passes": len(passes), **counts, "units left complete": left}, gradients


def loop(model, batches, sync=(3,), reshard=(3,), by=4):
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number in sync)
        model.set_reshard_after_backward(number in reshard)
        (model(x).square().mean() / by).backward()


with record_collectives(kept := fsdp(flat, False, MixedPrecisionPolicy())) as trace:
    kept(batch(0)).sum().backward()
once = trace.bytes_by_kind()  # one gather and one reduction of everything, with padding
_, gradients = counted(lambda model, batches: loop(model, batches, sync=range(4), reshard=range(4)))


@turn(2, {
    "forward passes": exactly(4, "Compute one micro-batch after the other: together, their activations need more memory."),
    "all_gather": Goal("1 to 1.1", lambda n: 1 <= n <= 1.1, lambda n: "Not every unit was gathered." if n < 1 else  # 1.06: one prefetched
                       "The model is gathered more than once: units are freed after forward or backward, or one backward is for all."),
    "reduce_scatter": exactly(1, less="Gradients were not reduced: the last backward has to do it.",
                              more="Gradients are reduced more than once: only the last backward should do it."),
    "units left complete": exactly(0, "Units are left complete: the next forward would use these old parameters."),
    "gradients that differ": exactly(0, "They differ from those above: is each of the four losses divided by four?"),
}, returns=False)
def score_once(my_accumulate):
    found, mine = counted(my_accumulate)
    if not found["forward passes"]:
        raise NotYet("`my_accumulate` has not run the model.")
    differ = sum(a is None or not torch.allclose(a, b, rtol=1e-3, atol=1e-9) for a, b in zip(mine, gradients))
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
    loop(model, batches, reshard=())
    for part in [*model, model]:
        part.reshard()


# %% tags=["right"] turn=2
def my_accumulate(model, batches):  # gathers by hand
    for part in [*model, model]:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    loop(model, batches)


# %% tags=["right"] turn=2
def my_accumulate(model, batches):  # with FSDP2's own switch for micro-batches, which gathers one unit again
    model.set_reshard_after_forward(False)
    for number, x in enumerate(batches):
        model.set_is_last_backward(number == 3)
        loop(model, [x], sync=[0] * (number == 3), reshard=[0] * (number == 3))


# %% tags=["wrong"] turn=2 says="Gradients were not reduced"
def my_accumulate(model, batches):  # never on again
    model.set_reshard_after_forward(False)
    loop(model, batches, sync=(), reshard=())


# %% tags=["wrong"] turn=2 says="Units are left complete"
def my_accumulate(model, batches):  # switches after backward
    for number, x in enumerate(batches):
        (model(x).square().mean() / 4).backward()
        model.set_requires_gradient_sync(number == 3)
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(number == 3)


# %% tags=["wrong"] turn=2 says="gathered more than once"
def my_accumulate(model, batches):
    loop(model, batches, reshard=range(4))


# %% tags=["wrong"] turn=2 says="reduced more than once"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    loop(model, batches, sync=range(4))


# %% tags=["wrong"] turn=2 says="They differ from those above: is each of the four losses divided by four"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    loop(model, batches, by=1)


# %% tags=["wrong"] turn=2 says="one micro-batch after the other"
def my_accumulate(model, batches):
    model.set_reshard_after_forward(False)
    model(torch.cat(batches)).square().mean().backward()


# %% [markdown]
# ## The same under other names
#
# FSDP's ZeRO-2 cuts more than DeepSpeed's: between two steps the parameters are shards, too.
#
# | DeepSpeed | FSDP1 | here |
# |:--|:--|:--|
# | ZeRO-0 | `NO_SHARD` (deprecated) | DDP |
# | ZeRO-1, cuts optimizer state | `SHARD_GRAD_OP`, in `no_sync()` until the last micro-batch | turn 2 |
# | ZeRO-2, and gradients | `SHARD_GRAD_OP` | ZeRO-2, `reshard_after_forward=False` |
# | ZeRO-3, and parameters | `FULL_SHARD` | FULL_SHARD, the default |
# | ZeRO++ hpZ | none | hpZ, `reshard_after_forward=` ranks per host |
# | [MiCS](https://arxiv.org/abs/2205.00119) | `HYBRID_SHARD` | HYBRID_SHARD, a mesh of two dimensions |
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the loss on the same samples stays the same | units stay complete after the last backward, so forward uses the old parameters | `set_reshard_after_backward(True)` before the last micro-batch |
# | HYBRID_SHARD is no faster than FULL_SHARD | the mesh's dimensions are swapped; or it all-reduces after each micro-batch; or the GPU never waited | first replicate, then shard; all-reduce after the last; stay with FULL_SHARD |
# | the same input has another loss on another host, no error | under HYBRID_SHARD copies began with different weights, and keep them | one seed or one file for all ranks |
# | out of memory from the second micro-batch on | complete gradients on each rank; or HYBRID_SHARD keeps the inputs of its all-reduces | reduce each time; under HYBRID_SHARD all-reduce after the last |
#
# ## The rule
#
# 1. One GPU holds the whole state, 16 bytes per parameter with `AdamW(fused=True)`: DDP,
#    `gradient_as_bucket_view=True`.
# 2. Else FULL_SHARD. With more than 1.5 F / B tokens per rank in a forward pass the GPU doesn't wait: you are done.
# 3. The GPU waits, and each host can hold the whole state: HYBRID_SHARD where the maps have its colour. With several
#    micro-batches, all-reduced after the last, that is nearly everywhere; with one, only two hosts on a slow link.
# 4. Else ZeRO-2, if 2 bytes per parameter are free on each GPU; with many micro-batches and 6 free, turn 2.
# 5. Else, on several hosts, hpZ, for at most 2 bytes divided by the ranks of a host. It hasn't run on GPUs here.
# 6. The GPU waits, and only FULL_SHARD fits: more tokens per rank, by
#    [checkpointing](02_activation_checkpointing.ipynb), or a [second dimension](16_two_dimensions.ipynb).
#
# After a change look at `torch.cuda.max_memory_allocated()` and at the time of ten steps, which decides.
#
# [← lesson 5](05_maximising_throughput.ipynb) · [lesson 7 →](07_mixed_precision.ipynb)

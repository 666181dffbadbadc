# %% [markdown]
# # 6 · Sharding strategies
#
# What is cut into shards: the optimizer's state, the gradients, the parameters, or all three? And over which
# ranks? Each answer is a strategy, and each trades memory for bytes on a link. In this lesson you measure
# both, for six strategies, on the same model with the same result.

# %% [markdown] tags=["card"]
# learn:
# - 'DDP, ZeRO-1, ZeRO-2, FULL_SHARD, HYBRID_SHARD and resharding to a part: memory
#   on each rank'
# - how many bytes each sends, within a host and between hosts
# - gradient accumulation with and without synchronisation
# - the largest model that fits, and when DDP is the better choice
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 4](04_backward_prefetch.ipynb)
#   · no GPU'
# ranks: '4 on this machine, as two hosts of two. With `FSDP_RANKS=2` or 3 all are on
#   one host: then HYBRID_SHARD and resharding to a host are left out, and nothing is
#   sent between hosts.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: '[Sharding strategies](https://www.loom.com/share/1f280618955c4f22a5a1ad6cbb41b28c),
#   2022. Since then: HYBRID_SHARD, then announced, is there, and FSDP2 takes a mesh
#   instead of the name of a strategy.'

# %%
from fsdp_utils.lessons import lesson, plots, recorded
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import warnings
from contextlib import nullcontext
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")                             # it uses torch.jit, which is deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

from fsdp_utils import record_collectives
from fsdp_utils.sharding.units import find_units

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                              # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
hosts = 2 if world >= 4 and 64 % world == 0 else 1              # that we imagine
per_host = world // hosts

# %% [markdown]
# ## Two hosts, imagined
#
# All ranks are processes of this machine. For the count of bytes we declare them to be **two hosts of two
# ranks**: ranks 0 and 1, and ranks 2 and 3. The bytes are real, the hosts are not. So the cells count what
# would go over which link. How long that takes is replayed, and shown in a recording.

# %%
# %%ranks
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
# ## Six strategies
#
# The names come from [the ZeRO paper](https://arxiv.org/abs/1910.02054). **ZeRO-1** shards the optimizer's
# state, **ZeRO-2** the gradients too, **ZeRO-3** the parameters too. FSDP calls the last one
# **FULL_SHARD**. In its ZeRO-2 a unit gathered for forward stays whole until its backward.
#
# With FSDP2 a strategy is two arguments of `fully_shard`: the `mesh`, which ranks share the shards, and
# `reshard_after_forward`, what happens to a whole unit between forward and backward.

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


strategies = {
    "DDP": (ddp, adamw),
    "ZeRO-1": (ddp, zero1),
    "ZeRO-2": (lambda: sharded(reshard_after_forward=False), adamw),
    "FULL_SHARD": (lambda: sharded(reshard_after_forward=True), adamw),
}
if hosts == 2:
    mesh = init_device_mesh(device.type, (hosts, per_host), mesh_dim_names=("replicate", "shard"))
    strategies["HYBRID_SHARD"] = (lambda: sharded(mesh=mesh, reshard_after_forward=True), adamw)
    strategies["reshard to a host"] = (lambda: sharded(reshard_after_forward=per_host), adamw)

# %% [markdown]
# **HYBRID_SHARD** shards within a host, and holds the same shards on each host, as DDP would. **Resharding to
# a host** shards over all ranks, but after forward it keeps a larger shard, one part of `per_host`. Then
# backward gathers within the host alone.
#
# ## Predict
#
# Which of them holds the least on a rank? Which sends the least between the hosts? Is one of them best at
# both?
#
# <details><summary>Answer</summary>
#
# FULL_SHARD holds the least: a quarter of everything, and the units that are whole. HYBRID_SHARD sends the
# least between the hosts: only its shard of the gradients, which is half of them. No strategy is best at
# both. The next cells measure it.
#
# </details>

# %%
# %%ranks
def local_bytes(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def fsdp2_parameters(model):
    """What FSDP2 knows of each parameter of the model."""
    return [p for unit in find_units(model) for group in unit.parts for p in group.fsdp_params]


def kept_after_forward(model):
    """Bytes that FSDP2 keeps of gathered units besides the shards, between forward and backward."""
    kept = (getattr(p, "_sharded_post_forward_param_data", None) for p in fsdp2_parameters(model))
    return sum(data.nbytes for data in kept if data is not None)


def most_gathered(trace, kept=0.0):
    """Bytes of gathered units at once, in the order of issue, if forward keeps that part of a unit."""
    held, most = {}, 0
    for event in trace.events:
        size = trace.unit_bytes.get(event.module, 0)
        if event.kind == "all_gather":
            held[event.module] = size
        elif event.kind == "free":
            held[event.module] = round(kept * size) if event.phase == "forward" else 0
        most = max(most, sum(held.values()))
    return most


def train(strategy, steps=4):
    """Losses, what this rank holds, and the trace of the last step."""
    make_model, make_optimizer = strategies[strategy]
    model = make_model()
    optimizer = make_optimizer(model)
    losses = torch.zeros(steps, device=device)
    for number in range(steps):
        last = number == steps - 1
        with record_collectives(model, ranks_per_host=per_host) if last else nullcontext() as trace:
            loss = model(batch(number)).square().mean()
            kept = kept_after_forward(model) if strategy.startswith("reshard") else 0
            loss.backward()
            gradients = local_bytes(p.grad for p in model.parameters())
            optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach() / world
    dist.all_reduce(losses)
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeroRedundancyOptimizer wraps one
    held = {
        "parameters": local_bytes(model.parameters()),
        "gradients": gradients,
        "optimizer state": local_bytes(t for s in states for t in s.values() if t.dim() > 0),
        "gathered at the peak": most_gathered(trace, kept / P),
    }
    return losses.tolist(), held, trace


results = {name: train(name) for name in strategies}

# %% [markdown]
# ## The same losses
#
# First the proof, for otherwise all comparison is idle. One process with all samples is what the strategies
# have to equal:

# %% tags=["equality"]
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
print(f"{'one process':18} {alone[0]:.4f} -> {alone[-1]:.4f}")
for name, (losses, _, _) in results.items():
    print(f"{name:18} {losses[0]:.4f} -> {losses[-1]:.4f}")
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)

# %% [markdown]
# The way of the original video chooses by a name. It gives the same losses:

# %%
# %%ranks
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
    losses, _, trace = train(name)
    torch.testing.assert_close(losses, results[name][0], rtol=1e-5, atol=1e-6)
    if 64 % world == 0:                                         # else the two pad differently
        assert trace.bytes_by_kind() == results[name][2].bytes_by_kind()
strategies = fsdp2_strategies
print("FSDP1: the same losses, and the same number of bytes in each kind of collective")

# %% [markdown]
# ## Memory of a rank

# %% tags=["memory"]
# %%ranks 0
print(f"{'KiB on rank 0':18} parameters  gradients  optimizer state  gathered")
for name, (_, held, _) in results.items():
    kib = [f"{size / 1024:.0f}" for size in held.values()]
    print(f"{name:18} {kib[0]:>10} {kib[1]:>10} {kib[2]:>16} {kib[3]:>9}")

# %%
# %%ranks
held = {name: result[1] for name, result in results.items()}
assert list(held["DDP"].values()) == [P, P, 2 * P, 0]
assert (held["ZeRO-1"]["parameters"], held["ZeRO-1"]["gradients"]) == (P, P)
states = [None] * world
dist.all_gather_object(states, held["ZeRO-1"]["optimizer state"])
assert sum(states) == 2 * P                                      # each state is on one rank
for name in ("ZeRO-2", "FULL_SHARD", "reshard to a host"):
    if name in held and 64 % world == 0:                         # else some shards are smaller
        assert list(held[name].values())[:3] == [P // world, P // world, 2 * P // world]
assert held["ZeRO-2"]["gathered at the peak"] == P               # all blocks, from forward to backward
assert held["FULL_SHARD"]["gathered at the peak"] == 2 * P // 6  # two of six: the prefetch
if hosts == 2:
    assert held["HYBRID_SHARD"]["parameters"] == P // per_host
    peak = (2 + 4 / per_host) * P // 6                               # two blocks whole, four in part
    assert held["reshard to a host"]["gathered at the peak"] == peak

# %% jupyter={"source_hidden": true}
held = ranks.get("held")[0]
in_order = ("DDP", "ZeRO-1", "ZeRO-2", "FULL_SHARD", "HYBRID_SHARD", "reshard to a host")
kib = {n: {kind: size / 1024 for kind, size in held[n].items()} for n in in_order if n in held}
plots.memory_per_rank(kib, unit="KiB")

# %% [markdown]
# - **DDP** holds everything: parameters, gradients, and twice as much for AdamW's two states.
# - **ZeRO-1** cuts the states, the largest part. It hands out whole parameters, so ranks may hold a little
#   more or less than their share.
# - **ZeRO-2** cuts all three at rest. But within a step it gathers the whole model and keeps it.
# - **FULL_SHARD** never has more than two blocks whole.
# - **HYBRID_SHARD** cuts over the ranks of a host alone, so it holds more.
# - **Resharding to a host** keeps a larger shard of each block from forward to backward: a half of it here.
#   Within a step it holds more than FULL_SHARD and less than ZeRO-2.
#
# Each of these is what a rank holds at most of it, not all of them at the same moment: when the last
# gradients are there, no unit is whole any more. Two things come on top. The gradients of the block that
# computes are whole until they are reduced. And there are the activations, the same in all of them.
#
# ## Bytes on each link
#
# What does one step send? For a collective over n ranks, each rank has to send at least (n - 1) / n of the
# whole, and for an all-reduce twice that: to reduce, and to hand out. `sent_bytes_by_link` adds it up. A
# backend may send more than this least: what is to be moved is FSDP's choice, how it is done is the
# backend's.
#
# A collective whose ranks are not all on one host counts as "between hosts" with all of its bytes, though
# some of them go from one rank to another on the same host. How much crosses the link is counted further
# down.

# %% tags=["bytes"]
# %%ranks
sent = {name: trace.sent_bytes_by_link() for name, (_, _, trace) in results.items()}
if rank == 0:
    print(f"{'KiB sent by a rank':18} within a host  between hosts  all, in units of P")
    for name, links in sent.items():
        within, between = (links.get(link, 0.0) for link in ("within a host", "between hosts"))
        print(f"{name:18} {within / 1024:13.0f} {between / 1024:14.0f} {(within + between) / P:10.2f}")

# %%
# %%ranks
def share(n):
    return (n - 1) / n


ring = share(world) * P
total = {name: sum(links.values()) for name, links in sent.items()}
assert abs(total["DDP"] - 2 * ring) < 1                          # one all-reduce
assert abs(total["ZeRO-1"] - 3 * ring) < 1                       # an all-reduce, broadcasts of parameters
padded = results["FULL_SHARD"][2].bytes_by_kind()["reduce_scatter"] / P  # 1, or a little more: padding
assert abs(total["ZeRO-2"] - 2 * ring * padded) < 1              # an all-gather and a reduce-scatter
assert abs(total["FULL_SHARD"] - 3 * ring * padded) < 1          # two all-gathers and a reduce-scatter
if hosts == 2:
    assert sent["HYBRID_SHARD"] == {
        "within a host": 3 * share(per_host) * P,
        "between hosts": 2 * share(hosts) * P / per_host,        # an all-reduce of the shards of gradients
    }
    assert sent["reshard to a host"] == {"within a host": share(per_host) * P, "between hosts": 2 * ring}

# %% [markdown]
# Three things are worth a sentence each:
#
# - ZeRO-2 sends no more than DDP: an all-reduce *is* a reduce-scatter and an all-gather. FULL_SHARD sends
#   half as much again.
# - `ZeroRedundancyOptimizer` sends as much as FULL_SHARD and saves less memory. DDP has reduced all
#   gradients for it already, although each rank needs only those of its own part.
# - HYBRID_SHARD sends only its shards of the gradients between the hosts: half a P here. Of FULL_SHARD all
#   2.25 P belong to collectives between hosts. The more ranks a host has, the less each of them sends.
#
# ## What that is worth on a slow link
#
# **A replay**, as in lesson 4: the recorded order on two streams, a block takes 1 ms in forward, a rank sends
# at 50 GiB/s within a host, and at the speed of its row what belongs to a collective between hosts.

# %% tags=["replay"]
traces = ranks.get("{name: trace for name, (_, _, trace) in results.items()}")[0]
compute_s, scale = 1e-3, 4096                   # pretend that each block is 4096 times as large: 0.5 GiB
shown = [name for name in in_order if name in traces]
steps = {}
width = {name: max(10, len(name) + 2) for name in shown}
print("ms a step, replayed " + "".join(f"{name:>{width[name]}}" for name in shown))
for gib_s in (50, 10, 2, 0.5):
    speeds = {"within a host": 50 / scale, "between hosts": gib_s / scale}
    for name in shown:
        compute = dict.fromkeys(traces[name].unit_bytes, compute_s) or {"(root)": 6 * compute_s}  # DDP
        steps[name, gib_s] = traces[name].replay(compute_s=compute, link_gib_s=speeds).step_s
    row = "".join(f"{1e3 * steps[name, gib_s]:{width[name]}.0f}" for name in shown)
    print(f"{gib_s:4} GiB/s between  {row}")

if "HYBRID_SHARD" in traces:
    faster = steps["FULL_SHARD", 0.5] / steps["HYBRID_SHARD", 0.5]
    full, hybrid = (traces[n].sent_bytes_by_link()["between hosts"] for n in ("FULL_SHARD", "HYBRID_SHARD"))
    by_bytes = full / hybrid
    print(f"slowest link: HYBRID_SHARD is {faster:.1f} times as fast; the bytes predict {by_bytes:.1f}")
    assert abs(faster / by_bytes - 1) < 0.25

# %% [markdown]
# On a fast link the strategies are not far apart. The slower the link between the hosts gets, the more a
# step takes just the time of its bytes between hosts, and HYBRID_SHARD has the fewest. (DDP would do better
# with larger models than this one. It fills *buckets* of 25 MiB with gradients, and reduces each as soon as
# it is full. Here all fit into one, which is sent when backward is over.)
#
# ### Recorded: two hosts, one link
#
# These hosts are made of one machine, but the link between them is one: it has a rate, and a counter of
# bytes.

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown

two_hosts = recorded.load("two_hosts")
if two_hosts is None:
    page = "*Not recorded yet: step times of two hosts with a link of known speed between them.*"
else:
    lines = [
        "| link | strategy | MiB by the recorder | MiB on the wire | s by the bytes | s a step |",
        "|:--|:--|--:|--:|--:|--:|",
    ]
    ratios = []
    slowest = min(result["rate_mbit"] for result in two_hosts["results"] if result["rate_mbit"])
    for result in two_hosts["results"]:
        rate = f"{result['rate_mbit']} Mbit/s" if result["rate_mbit"] else "not limited"
        runs = result["strategies"]
        for name, run in runs.items():
            bits = 8 * 2**20 * run["recorded_mib"]
            predicted = bits / (1e6 * result["rate_mbit"]) if result["rate_mbit"] else None
            name = {"SHARD_GRAD_OP": "ZeRO-2"}.get(name, name)
            lines.append(
                f"| {rate} | {name} | {run['recorded_mib']:.1f} | {run['wire_mib']:.1f} "
                f"| {f'{predicted:.2f}' if predicted else '-'} | {run['step_s']:.2f} |"
            )
            assert predicted is None or run["step_s"] > predicted
            assert result["rate_mbit"] != slowest or run["step_s"] < 1.25 * predicted
        full, hybrid = runs["FULL_SHARD"], runs["HYBRID_SHARD"]
        assert max(abs(run["wire_mib"] / run["recorded_mib"] - 1) for run in runs.values()) < 0.05
        measured = full["step_s"] / hybrid["step_s"]
        by_bytes = full["recorded_mib"] / hybrid["recorded_mib"]
        assert result["rate_mbit"] != slowest or abs(measured / by_bytes - 1) < 0.25
        ratios.append(
            f"- {rate}: HYBRID_SHARD is {measured:.1f} times as fast as FULL_SHARD; "
            f"the bytes alone predict {by_bytes:.1f}"
        )
    page = "\n".join([*lines, "", *ratios, "", f"*Recorded on {two_hosts['group']}: {two_hosts['device']}, "
                      f"{two_hosts['date']}. Command: `{two_hosts['command']}`.*"])
Markdown(page)

# %% [markdown]
# "By the recorder" is what a host sends in a step, computed from the recorded collectives, and "on the wire"
# what the link's counter says. "By the bytes" is how long the link takes for them. Two things go into it that
# the replay left out:
#
# - Ranks pass the bytes around a *ring*, each to the next one. Of a host's two ranks only one then sends to
#   the other host; under HYBRID_SHARD both do, each to its own partner.
# - gloo carries out a reduce-scatter as an all-reduce of the whole, and so sends twice the least. That is why
#   ZeRO-2 sends more than DDP here.
#
# So the bytes predict a factor of 3 here, and 4.5 in the replay. On the slowest link each step takes at most
# a quarter longer than its bytes do. The faster the link, the more the rest of a step counts, and on the link
# without a limit it is not the link that takes the time.
#
# ## Gradient accumulation
#
# Four small batches, one optimizer step. Do the ranks have to add up gradients after each of them? Only
# after the last. FSDP2 has `set_requires_gradient_sync(False)` for the others; DDP and FSDP1 have
# `no_sync()`.

# %% tags=["accumulation"]
# %%ranks
def unsharded_gradients(model):
    """Bytes of gradients that FSDP2 keeps whole, because they were not reduced yet."""
    kept = 0
    for p in fsdp2_parameters(model):
        gradient = p.unsharded_accumulated_grad
        if gradient is None and hasattr(p, "_unsharded_param"):
            gradient = p.unsharded_param.grad
        kept += 0 if gradient is None else gradient.nbytes
    return kept


def accumulate(sync):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_collectives(model, ranks_per_host=per_host) as trace:
        for number in range(4):
            model.set_requires_gradient_sync(sync or number == 3)
            (model(batch(number)).square().mean() / 4).backward()
            if number == 2:
                kept = unsharded_gradients(model) + local_bytes(
                    p.grad for p in model.parameters() if p.grad is not None
                )
        optimizer.step()
    final = [p.full_tensor() for p in model.parameters()]
    return trace.bytes_by_kind(), kept, final


with_sync, without_sync = accumulate(True), accumulate(False)
if rank == 0:
    for name, (kinds, kept, _) in {"with sync": with_sync, "without": without_sync}.items():
        gathered, reduced = kinds["all_gather"] / P, kinds["reduce_scatter"] / P
        print(f"{name:10} gathers {gathered:.1f} P, reduces {reduced:.1f} P, keeps {kept / 1024:.0f} KiB")
assert with_sync[0]["reduce_scatter"] == 4 * without_sync[0]["reduce_scatter"]
assert with_sync[0]["all_gather"] == without_sync[0]["all_gather"]
assert without_sync[1] == P
assert with_sync[1] < 0.6 * P
for a, b in zip(with_sync[2], without_sync[2]):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

# %% [markdown]
# The same weights. Without synchronisation, three of four reduce-scatters are gone, and each rank holds the
# whole gradients until the last batch. The all-gathers stay: the parameters are freed after each batch. So it
# saves a quarter of what is sent here, and gives back a part of what sharding has saved. (Who has the memory
# for whole parameters too can keep them from batch to batch: `set_reshard_after_backward(False)`.)
#
# For DDP it is another matter. There the gradients are whole anyway:

# %%
# %%ranks
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
print(f"DDP: {four.bytes_by_kind()['all_reduce'] // P} all-reduces of P with sync, "
      f"{one.bytes_by_kind()['all_reduce'] // P} without")
assert four.bytes_by_kind()["all_reduce"] == 4 * one.bytes_by_kind()["all_reduce"] == 4 * P

# %% [markdown]
# ## The largest model that fits
#
# The video of 2022 shows how large a model could be trained on a machine with eight GPUs of 24 GB. Compute
# what the states alone allow: fp32, AdamW, 16 bytes for each parameter, of which ZeRO-2 keeps 4 whole.

# %% tags=["largest"]
bytes_per_parameter = {
    "DDP": lambda n: 16,
    "ZeRO-2": lambda n: 4 + 16 / n,                             # whole parameters in the step, and its shards
    "FULL_SHARD": lambda n: 16 / n,                             # and two blocks, which we leave out
}
claimed = {"DDP": 0.75, "ZeRO-2": 2.0, "FULL_SHARD": 2.5}       # billions, 2022
print("billions of parameters on 8 GPUs of 24 GB, no activations")
for name, per_parameter in bytes_per_parameter.items():
    billions = 24e9 / per_parameter(8) / 1e9
    print(f"{name:10}  {billions:5.1f} by the states alone, {claimed[name]:4.2f} trained in 2022")
    assert claimed[name] < billions
ratio = bytes_per_parameter["DDP"](8) / bytes_per_parameter["ZeRO-2"](8)
print(f"ZeRO-2 over DDP: {ratio:.2f} computed, {claimed['ZeRO-2'] / claimed['DDP']:.2f} in 2022")

# %% [markdown]
# This is a bound, not a measurement: activations, buffers and the allocator's cache come on top. Both DDP and
# ZeRO-2 reached half of it in 2022. FULL_SHARD reached a fifth. There it was no longer the states that filled
# the memory, so sharding them more finely would not have helped; activation checkpointing
# ([lesson 2](02_activation_checkpointing.ipynb)) would.
#
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
# This ratio is that of small collectives on a CPU, and says nothing about a GPU. What holds everywhere is its
# reason: three collectives for each block, where DDP has one for many.
#
# ## Which is which in ZeRO
#
# | DeepSpeed | cuts | FSDP1 | FSDP2 |
# |:--|:--|:--|:--|
# | ZeRO-0 | nothing | `NO_SHARD`, better DDP | DDP |
# | ZeRO-1 | optimizer state | none; `ZeroRedundancyOptimizer` with DDP | the same |
# | ZeRO-2 | and gradients | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | ZeRO-3 | and parameters | `FULL_SHARD` | `reshard_after_forward=True` |
# | ZeRO++ hpZ | backward gathers within the host | none | `reshard_after_forward=ranks_per_host` |
# | MiCS | within a group, replicated over groups | `HYBRID_SHARD` | a 2-D mesh |
#
# hpZ is the part of [ZeRO++](https://arxiv.org/abs/2306.10209) that keeps a second set of shards within each
# host; [MiCS](https://arxiv.org/abs/2205.00119) shards over small groups of ranks.
# FSDP's ZeRO-2 differs from DeepSpeed's in one point: it cuts the parameters too, outside of a step.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
total, P = ranks.get("total")[0], ranks.get("P")[0]
lesson.claims(
    6,
    {
        "zero2-less-communication": f"Yes: {total['ZeRO-2'] / total['FULL_SHARD']:.0%} of the bytes of "
        "FULL_SHARD, one all-gather of each block instead of two.",
        "no-shard-is-ddp": "DDP holds all parameters, gradients and states, and sends the gradients alone. "
        "NO_SHARD itself is deprecated: use DDP.",
        "largest-model": f"By the states alone ZeRO-2 fits {ratio:.2f} times the model of DDP, as in 2022. "
        "FULL_SHARD would fit 8 times.",
        "zero2-shards-parameters": "It does: at rest a rank holds its share of them. They are whole within a "
        "step.",
        "fsdp-worse-than-ddp": f"FULL_SHARD sends {total['FULL_SHARD'] / total['DDP']:.1f} times what "
        "DDP does. On this CPU DDP is faster too; that says nothing of GPUs.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. What does a rank hold?** Bytes for each parameter (fp32, AdamW) at rest, for "DDP", "ZeRO-1" and
# "FULL_SHARD" on `n` ranks, while the gradients are there.

# %%
def per_parameter(strategy, n):
    return None  # your line here


states = {("DDP", 8): 16.0, ("ZeRO-1", 8): 9.0, ("FULL_SHARD", 8): 2.0, ("FULL_SHARD", 64): 0.25}
lesson.check(per_parameter, states)

# %% [markdown]
# **2. HYBRID_SHARD between hosts.** How many bytes does a rank send between the hosts in a step? `P` bytes of
# parameters, `hosts` hosts, `per_host` ranks on each.

# %%
def between_hosts(P, hosts, per_host):
    return None  # your line here


hybrid = {(1024, 2, 2): 512.0, (1024, 2, 8): 128.0, (1024, 4, 8): 192.0}
lesson.check(between_hosts, hybrid)

# %% [markdown]
# **3. Accumulation.** FULL_SHARD, `k` small batches. What part of its bytes does a step save without
# synchronisation?

# %%
def saved(k):
    return None  # your line here


parts = {(1,): 0.0, (4,): 0.25, (16,): 0.3125}
lesson.check(saved, parts)

# %% [markdown]
# ## Summary
#
# - Each strategy gives the same losses. They differ in what a rank holds and in what it sends.
# - ZeRO-2 sends as much as DDP, FULL_SHARD half as much again.
# - HYBRID_SHARD holds more, and sends little between hosts.
# - Accumulation without synchronisation saves reduce-scatters, and holds whole gradients.
# - If the model fits under DDP, and the link is fast, use DDP. Between hosts with a slow link HYBRID_SHARD
#   can be faster even then.
#
# ## Next
#
# Fewer bytes by smaller numbers: mixed precision. That is [lesson 7](07_mixed_precision.ipynb).
#
# [← lesson 5](05_maximising_throughput.ipynb) · [lesson 7 →](07_mixed_precision.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def per_parameter(strategy, n):
    return {"DDP": 16, "ZeRO-1": 8 + 8 / n, "FULL_SHARD": 16 / n}[strategy]


lesson.check(per_parameter, states, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def between_hosts(P, hosts, per_host):
    return 2 * (hosts - 1) / hosts * P / per_host


lesson.check(between_hosts, hybrid, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def saved(k):
    return (k - 1) / (3 * k)


lesson.check(saved, parts, strict=True)

# %% [markdown]
# # 5 · Maximising throughput
#
# Which batch size trains the most samples per second? **Time several sizes, drop those at which the GPU keeps
# running short of memory, and take the fastest of the rest. It is rarely the largest size that runs.**
#
# A batch that is too large need not fail. When PyTorch finds no room for a tensor, it gives the GPU back the memory
# that it had kept for reuse, and asks again. This is a **cudaMalloc retry**. It prints nothing, and it makes the
# step longer.
#
# The counter `torch.cuda.memory_stats()["num_alloc_retries"]` shows retries. `find_batch_size(step)` of this
# series' library, `fsdp_utils`, reads it while it searches, on all ranks.
#
# The picture shows this lesson's small model on an H200 of which PyTorch was allowed only 1.8 GiB. Each dot is a
# run of five steps, and its height is the speed of the faster of the last two.

# %% jupyter={"source_hidden": true}
from ast import literal_eval

from fsdp_utils.lessons import lesson, plots, recorded

ZONES = {"no retries": 2, "retries at first only": 0, "retries that continue": 1, "out of memory": 5}
GOOD = ("no retries", "retries at first only")
log_of = {}                                     # by limit and setting, then batch size: retries by step, seconds
for row in recorded.load("retries")["results"]["rows"]:
    limit, expandable = row["setting"].split(" GiB, expandable segments ")
    log_of[float(limit), expandable == "True"] = {
        int(size): None if one["error"] else (literal_eval(one["retries_by_step"]), round(one["step_s"], 5))
        for size, one in row["batches"].items()
    }


def zone_of(retries):
    if not retries or not any(retries):
        return "no retries" if retries else "out of memory"
    return "retries that continue" if any(retries[-2:]) else "retries at first only"


fig, (axes,) = plots.figure(width=6.4, height=3.2)
scarce = {size: (one[0], size / one[1]) for size, one in log_of[1.8, False].items() if one}
for zone in (*GOOD, "retries that continue"):
    dots = zip(*[(size, speed) for size, (retries, speed) in scarce.items() if zone_of(retries) == zone])
    axes.plot(*dots, "o", color=plots.RANK_COLORS[ZONES[zone]], markersize=7, label=zone)
axes.axvspan(20.5, 22.4, color=plots.RANK_COLORS[5], alpha=0.15, linewidth=0)
axes.text(21.5, 459, "out of\nmemory", ha="center", va="center")
axes.set(title="H200, limited to 1.8 GiB", xlabel="batch size per rank", ylabel="samples/s", ylim=(420, 500))
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="The fastest size is 16; from 18 retries continue; 20 is the largest that runs, and the slowest.")

# %% [markdown]
# 16 is fastest: 485 samples per second. From 18 on, retries continue (orange). 20 is the largest size that runs,
# and it trains 11% fewer samples per second than 16.
#
# Retries do not explain everything: 17 is slower than 16, though its retries had stopped. That is why you time
# sizes. 16 is the smallest that was measured here; "What a larger batch gains" shows how slow a tiny batch is.

# %% tags=["card"]
lesson.card(
    5,
    learn="tell reserved from allocated memory, see retries, and choose a batch size by measuring",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 20, 18),
)

# %% [markdown]
# ## The script
#
# Where do retries begin, and why there? You can find out without a GPU, by a **simulation**. The script records
# what one rank allocates and frees in five training steps with FSDP2, for a model of 50 million parameters. Then it
# replays the record by the rules of PyTorch's GPU allocator, for a GPU with 1.8 GiB. (The code that measures a GPU
# is in "On your ranks".)
#
# Under `FakeTensorMode` tensors have shapes but no data, and the `fake` process group claims to have four ranks and
# sends nothing. Save the script as `simulate.py` and run `python simulate.py`, without `torchrun`.
#
# Each line of output gives, in GiB, the most that tensors occupy at one time and the most that the allocator
# **reserves** for them if there is room; then each step's retries with 1.8 GiB.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch._subclasses.fake_tensor import FakeTensorMode
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.testing._internal.distributed.fake_pg import FakeStore
#
# from fsdp_utils.allocator import record_allocations, simulate_allocator
#
# dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
# mesh = init_device_mesh("cpu", (4,))
#
#
# def record(batch_size):
#     blocks = [nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(4)]
#     for block in blocks:
#         fully_shard(block, mesh=mesh, reshard_after_forward=False)    # full weights stay until backward
#     model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters(), fused=True)
#     with record_allocations(model, optimizer) as trace:
#         for step in range(5):
#             trace.begin_step()
#             model(torch.randn(batch_size, 256, 1024)).square().mean().backward()
#             optimizer.step()
#             optimizer.zero_grad()
#     return trace
#
#
# print("batch  tensors  reserved  retries by step, with 1.8 GiB")
# for batch_size in (20, 22, 24, 26):
#     with FakeTensorMode():
#         trace = record(batch_size)
#     reserved = simulate_allocator(trace).peak_reserved_gib            # without a limit
#     tight = simulate_allocator(trace, limit_gib=1.8)
#     ends = "out of memory" if tight.out_of_memory else tight.retries_by_step
#     print(f"{batch_size:5}  {trace.peak_gib:7.2f}  {reserved:8.2f}  {ends}")
# dist.destroy_process_group()
# ```
# ```text
# batch  tensors  reserved  retries by step, with 1.8 GiB
#    20     1.44      1.69  [0, 0, 0, 0, 0]
#    22     1.55      1.82  [0, 1, 1, 1, 1]
#    24     1.66      1.86  [0, 1, 2, 2, 2]
#    26     1.77      2.00  out of memory
# ```
#
# By the column "tensors", all four sizes fit into 1.8 GiB. The allocator wants to reserve more, which passes 1.8 at
# 22, and there the retries begin. (Step 1 of 22 and 24 has none: AdamW's state does not exist before the first
# `optimizer.step()`.) And 26 fails, though its tensors would fit.
#
# Two things are left to explain: what the additional memory is for, and how a GPU that is not full runs out.
#
# ## Reserved and allocated
#
# Asking a GPU for memory (`cudaMalloc`) takes time, and giving it back (`cudaFree`) makes the program wait for the
# GPU. PyTorch's **caching allocator** therefore does both rarely. It asks the GPU for **segments** and places
# tensors in them. When a tensor is freed, its place stays in a cache, where the next tensor takes it if it is large
# enough.
#
# **Allocated** is what tensors occupy, and **reserved** is allocated plus cache. Reserved is what has to fit on the
# GPU, beside the CUDA context and NCCL's buffers, which neither number counts.
#
# On a simulated GPU of 100 MiB, the next cell frees a tensor of 60 MiB and then asks for 62, twice. The bars show
# the first round.

# %%
import torch

from fsdp_utils.allocator import AllocationTrace, record_allocations, simulate_allocator
from fsdp_utils.lessons.tables import Table

MIB = 2**20
with record_allocations() as trace:
    for _ in range(2):
        a = torch.empty(60 * MIB, dtype=torch.uint8)
        b = torch.empty(30 * MIB, dtype=torch.uint8)
        del a
        c = torch.empty(62 * MIB, dtype=torch.uint8)
        del b, c

run = simulate_allocator(trace, limit_gib=100 / 1024)
print("retries in two rounds:", run.num_alloc_retries)

# %% jupyter={"source_hidden": true}
held = [(now // MIB, most // MIB) for now, most in zip(run.allocated, run.reserved)]
assert held[:4] == [(60, 60), (90, 90), (30, 90), (92, 92)]  # after each line of the first round
lines = ["a = 60 MiB", "b = 30 MiB", "del a", "c = 62 MiB: refused,\ncache given back", "asked again"]
looks = {"allocated": plots.RANK_COLORS[0], "cache": plots.RANK_COLORS[4], "left on the GPU": plots.FAINT}
fig, (axes,) = plots.figure(width=8.0, height=2.9)
for place, (now, most) in enumerate([*held[:3], (30, 30), held[3]]):    # as it retries, only b's segment is left
    for size, left, (name, color) in zip((now, most - now, 100 - most), (0, now, most), looks.items()):
        axes.barh(place, size, 0.6, left, color=color, label=None if place else name)
        axes.text(left + size / 2, place, size or "", ha="center", va="center", color="black" if left else "white")
axes.set(yticks=range(5), yticklabels=lines, xlim=(0, 100), xlabel="MiB", title="one retry, simulated")
axes.invert_yaxis()
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="After del a, 60 MiB are cached and 10 left: too little in one place for 62. The cache is given back.")

# %% [markdown]
# `del a` moves 60 MiB from allocated to cache, and reserved stays at 90. Then `c` needs 62 MiB in one place. The
# cached place has 60 and the GPU has 10 left, so the GPU refuses. The allocator gives the cached segment back,
# the GPU has 70 left, and the second request succeeds: one retry. The second round has none, because the cached
# 62 MiB serve `a` as well as `c`. A training step asks for many more sizes. Where the GPU is too small for a
# cache that serves them all, retries continue.
#
# ## Why the cache is so large
#
# The next picture shows the script's steps with 1.8 GiB. A folded cell makes `traces`, the records of the sizes 16
# to 32 (interpolated between 16 and 32, and checked at 24).

# %% jupyter={"source_hidden": true}
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))


def record(batch_size):                         # as in the script
    blocks = [nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(4)]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with record_allocations(model, optimizer) as trace:
        for _ in range(5):
            trace.begin_step()
            model(torch.randn(batch_size, 256, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace.events


with FakeTensorMode():
    smallest, middle, largest = record(16), record(24), record(32)
dist.destroy_process_group()


def between(size):                              # recording 17 sizes would take long: each allocation grows evenly
    grown = [a.size + (b.size - a.size) * (size - 16) // 16 for a, b in zip(smallest, largest, strict=True)]
    return AllocationTrace([replace(event, size=bytes) for event, bytes in zip(smallest, grown)])


assert between(24).events == middle             # each event and each size
traces = {size: between(size) for size in range(16, 33)}

# %%
fig, panels = plots.figure(3, width=10.4, height=3.4)
for axes, size in zip(panels, (20, 24, 26)):
    simulate_allocator(traces[size], limit_gib=1.8).plot(axes)
    axes.set(title=f"simulated, batch {size}", ylim=(0, 2), xticks=[])
    axes.get_legend().remove()
plots.show(fig, alt="Simulated memory with 1.8 GiB: 20 stays below the limit, 24 retries in each step, 26 fails.")

# %% [markdown]
# The line is allocated, the area reserved, the dashed line the limit, and each dotted line begins a step. At 20,
# reserved reaches its height and stays there. At 24 there are retries (red marks): reserved falls, because the
# cache is given back, and rises again. At 26 even that is not enough, and the red line ends the run.
#
# Some requests are refused at the start of a step, with less than 0.2 GiB allocated. Why? The next table replays
# five sizes without a limit. Each of the two columns on the right takes one cause away.

# %% tags=["reserved"]
def on_one_stream(trace):
    return AllocationTrace([replace(event, stream=0) for event in trace.events])


def reserved(trace, **how):
    return round(simulate_allocator(trace, **how).peak_reserved_gib, 2)


Table(
    ["batch size", "tensors, GiB", "reserved, GiB", "on one stream", "expandable segments"],
    [
        [size, round(traces[size].peak_gib, 2), reserved(traces[size]), reserved(on_one_stream(traces[size])),
         reserved(traces[size], expandable_segments=True)]
        for size in (16, 20, 24, 28, 32)
    ],
    note="Simulated, without a limit.",
)

# %% [markdown]
# The first cause is **streams**, queues of GPU work that run side by side. FSDP2 gathers weights in one stream and
# reduces gradients in another while a third computes. The allocator keeps a cache for each, and a place in one does
# not serve another. With all tensors on one stream, reserved would fall by 0.07 to 0.13 GiB, and 24 would not
# retry.
#
# The second cause is **pieces**. A tensor needs one free place that is large enough, but free memory lies between
# tensors that still live, and a retry can only give back segments in which no tensor lives. This is how 26 fails:
# at the red line it asks for 0.10 GiB. 0.07 are free on the GPU and 0.07 in pieces: enough together, but nowhere
# 0.10 in a row.
#
# PyTorch's remedy for pieces is `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, set before the program
# starts: segments grow by pages. Each stream still has its own, and reserved falls by 0.06 GiB at most.
#
# ## Three zones, at every limit
#
# The limit of 1.8 GiB could be an accident, so the next cell replays 17 sizes at 25 limits. Beside it stand runs of
# the same model on the H200 (`benchmarks/gpu.py`, torch 2.11), as one rank of a `fake` group of four: its
# collectives send nothing; the allocator, kernels and streams are real. (The first cell has these runs in `log_of`;
# `zone_of` names a zone.) Read a row from left to right: the batch size grows on one GPU. White was not measured.

# %% tags=["regimes", "on-a-gpu"]
def simulated(trace, limit):
    run = simulate_allocator(trace, limit_gib=limit)
    return zone_of(None if run.out_of_memory else run.retries_by_step)


limits = [1.25 + 0.05 * step for step in range(25)]         # GiB
maps = {
    "simulated": {limit: [simulated(trace, limit) for trace in traces.values()] for limit in limits},
    "H200": {},
    "H200, expandable segments": {},
}
for (limit, expandable), log in log_of.items():
    zones = [zone_of(one and one[0]) for one in log.values()]
    maps["H200, expandable segments" if expandable else "H200"][limit] = zones

# %% jupyter={"source_hidden": true}
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

fig, axes_of = plots.figure(3, width=10.4, height=3.6)
for axes, (title, found) in zip(axes_of, maps.items()):
    half = 0.025 if title == "simulated" else 0.05          # of the distance between two limits
    axes.imshow(
        [[list(ZONES).index(zone) for zone in row] for row in found.values()],
        cmap=ListedColormap([plots.RANK_COLORS[place] for place in ZONES.values()]), vmin=0, vmax=3,
        origin="lower", aspect="auto", extent=(15.5, 32.5, min(found) - half, max(found) + half),
    )
    axes.set(title=title, xlabel="batch size per rank", xticks=range(16, 33, 4), ylim=(1.225, 2.475))
axes_of[0].set_ylabel("PyTorch may use, GiB")
patches = [Patch(color=plots.RANK_COLORS[place], label=name) for name, place in ZONES.items()]
fig.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
plots.show(fig, alt="A band of retries lies between what trains and what runs out of memory, wider on the H200.")

# %% jupyter={"source_hidden": true} tags=["check"]
def largest_good(row):                          # the size up to which all are good; 15 if none is
    return next((size - 1 for size, zone in zip(traces, row) if zone not in GOOD), 32)


inside = [row for row in maps["simulated"].values() if largest_good(row) > 15 and row[-1] == "out of memory"]
widths = [row.count("retries that continue") for row in inside]
assert (len(inside), widths.count(0), {*widths}) == (16, 1, {0, 1, 2, 3})
usual, growing = maps["H200"], maps["H200, expandable segments"]
some = [at for at in growing if largest_good(growing[at]) > 15]
assert some == [1.6, 1.7, 1.8, 1.9, 2.0, 2.1]
assert [largest_good(growing[at]) - largest_good(usual[at]) for at in some] == [1, 1, 2, 1, 0, 1]
assert {usual[at].count("retries that continue") for at in some[1:]} == {3, 4}      # at 1.6 none is good
assert {growing[at].count("retries that continue") for at in some} == {2, 3, 4, 5}
ours = {at: largest_good([simulated(trace, at) for trace in traces.values()]) for at in some}
assert all(ours[at] > largest_good(theirs[at]) for at in some for theirs in (usual, growing))
shown = [traces[size] for size in (16, 20, 24, 28, 32)]
saved = [round(reserved(trace) - reserved(on_one_stream(trace)), 2) for trace in shown]
assert (min(saved), max(saved)) == (0.07, 0.13)
assert f"{max(reserved(trace) - reserved(trace, expandable_segments=True) for trace in shown):.2f}" == "0.06"
assert simulate_allocator(on_one_stream(traces[24]), limit_gib=1.8).num_alloc_retries == 0
run = simulate_allocator(traces[24], limit_gib=1.8)
assert max(run.allocated[at - 1] for at in run.retries[1::2]) < 0.2 * 2**30
failed = simulate_allocator(traces[26], limit_gib=1.8).out_of_memory
asked, kept, most = failed.requested_gib, failed.allocated_gib, failed.reserved_gib
assert [round(size, 2) for size in (asked, kept, most, 1.8 - most, most - kept)] == [0.1, 1.67, 1.73, 0.07, 0.07]

# %% [markdown]
# Most rows pass the same zones. In the orange one the program trains, prints nothing, and retries in step after
# step. It is a few sizes wide at nearly every limit. On the H200 it begins at smaller sizes than in the simulation,
# perhaps because kernels also allocate workspaces, which the trace does not see.
#
# Blue is fine: after a few retries the cache serves every request. This lesson calls a size **good** if the last
# two of five steps have no retry.
#
# So "the largest batch that runs" usually ends in the orange zone, and so can tools that lower the batch size until
# no error comes, such as Accelerate's `find_executable_batch_size`.
#
# Two settings make more sizes good. Expandable segments added one or two at most limits. And in the script, delete
# `reshard_after_forward=False`, and 24 trains without a retry: FSDP2 then frees each block's full weights after its
# forward, and gathers them again for backward.
#
# ## What a larger batch gains
#
# A step has costs that do not grow with the batch: the optimizer's step, the CPU's work of starting kernels, and
# FSDP's all-gathers and reduce-scatters. A small batch pays them for few samples. On an H200, another model (a
# Llama of 16 layers in bf16, on a single rank) took 1.3 times as long for four samples of 2,048 tokens as for one
# of 512. That is 12 times the throughput.
#
# The gain ends where the GPU is busy. In the maps' runs on the H200 it has ended: at each limit, no size above 16
# (4,096 tokens) is faster. But neither recording sends anything between GPUs. On several GPUs the gain goes on
# until the computing takes longer than the collectives, so measure there.
#
# ## What a retry costs
#
# To give memory back, the program waits until the GPU has finished its work, and then the GPU idles until the next
# kernel is launched. The table takes the H200's runs with retries in both of their last two steps. It compares the
# faster of them with the median run of the same size in which at least one of the two had none.

# %% jupyter={"source_hidden": true} tags=["cost"]
from statistics import median

ran = [(size, *one) for log in log_of.values() for size, one in log.items() if one]
longer = {False: [], True: []}
for (_, expandable), log in log_of.items():
    for size, one in log.items():
        alike = [seconds for other, retries, seconds in ran if other == size and min(retries[-2:]) == 0]
        if one and min(one[0][-2:]) > 0 and alike:
            longer[expandable].append(one[1] / median(alike) - 1)
Table(
    ["expandable segments", "runs", "least", "median", "most"],
    [[str(on), len(found), f"{min(found):.0%}", f"{median(found):.0%}", f"{max(found):.0%}"]
     for on, found in longer.items()],
    note="How much longer a step with retries takes, measured on an H200.",
)

# %% jupyter={"source_hidden": true} tags=["check", "gpu"]
both = sorted(longer[False] + longer[True])
assert (f"{both[0]:.0%}", f"{median(both):.0%}", f"{both[-1]:.0%}") == ("2%", "9%", "44%")
sixteen = [1000 * seconds for size, retries, seconds in ran if size == 16 and min(retries[-2:]) == 0]
assert (round(min(sixteen), 1), round(max(sixteen), 1)) == (31.7, 33.6)
seventeen = [1000 * seconds for size, retries, seconds in ran if size == 17 and min(retries[-2:]) == 0]
assert f"{1 - 17 / median(seventeen) / (16 / median(sixteen)):.0%}" == "9%"
slower = []
for log in log_of.values():
    rates = {size: size / one[1] for size, one in log.items() if one}
    assert not rates or max(rates, key=rates.get) == 16
    if any(zone_of(log[size][0]) in GOOD for size in rates):
        assert zone_of(log[max(rates)][0]) == "retries that continue"
        slower.append(1 - rates[max(rates)] / rates[16])
assert (len(slower), f"{min(slower):.0%}", f"{max(slower):.0%}") == (11, "4%", "35%")
assert (round(scarce[16][1]), max(scarce), f"{1 - scarce[20][1] / scarce[16][1]:.0%}") == (485, 20, "11%")
assert [size for size, (retries, _) in scarce.items() if zone_of(retries) not in GOOD] == [18, 19, 20]
name = "1 ranks, 16 layers of width 2048, {} tokens, strategy full, bf16, checkpointing None".format
took = {row["setting"]: row.get("step_s") for row in recorded.load("planner")["results"]["rows"]}
few, many = took[name("1 samples of 512")][1], took[name("4 samples of 2048")][1]     # [0]: as planned
assert (round(many / few, 1), round(4 * 2048 / 512 * few / many)) == (1.3, 12)

# %% [markdown]
# In the median a step with retries takes 7% longer, and 19% with expandable segments. The least, 2%, says little:
# runs of 16 without retries differ by up to 6% among themselves. With several GPUs every rank waits for the
# slowest, so one rank's retries slow all of them down.
#
# Wherever some size was good, the largest that ran had retries, and trained 4 to 35% fewer samples per second than
# 16. Part of that is the size itself: without a retry in the timed step, 17 trains 9% fewer than 16.
#
# If speed decides, why look at retries? A short test can miss their cost, and a GPU that retries is full: a longer
# sequence may find no memory.
#
# ## On your ranks
#
# By hand, on a GPU, this measures one size. `step(batch_size)` trains one step: forward, backward, optimizer.
#
# ```python
# import time
#
# import torch
#
# def retries():
#     return torch.cuda.memory_stats()["num_alloc_retries"]    # since the process began
#
# torch.cuda.empty_cache()                                     # drop what another size left in the cache
# for _ in range(3):
#     step(batch_size)                                         # the cache takes its shape
# torch.cuda.synchronize()
# before, begin = retries(), time.perf_counter()
# for _ in range(2):
#     step(batch_size)
# torch.cuda.synchronize()
# print(2 * batch_size / (time.perf_counter() - begin), "samples/s,", retries() - before, "retries")
# ```
#
# `find_batch_size(step)` does this for many sizes, on all ranks together. It doubles the size until a trial of five
# steps fails, and then halves the distance between the last good size and the first bad one. A trial fails if any
# rank runs out of memory, or has a retry in the last two steps. Of the sizes that pass, it takes the fastest, or a
# larger one that is nearly as fast. Before you call it:
#
# - let `step` use your longest sequence, as memory grows with the number of tokens;
# - build model and optimizer anew afterwards, because the steps really train;
# - use FSDP2 and torch 2.13 or later, as otherwise out of memory ends the search. On several ranks, out of memory
#   after the first two steps of a trial always ends it: start the job again, with a smaller `limit`;
# - another batch size changes the training: make up for it by gradient accumulation, or adapt the learning rate.
#
# The next cells run the search on this machine's ranks (a CPU needs a `limit`), and then train ten steps under
# `Memory_Maximizer`, which counts memory and retries on all ranks.

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch.distributed.fsdp", "torch._dynamo"])

# %% tags=["nbval-ignore-output"]
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import Memory_Maximizer, find_batch_size

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])
for part in [*model, model]:
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters())


def step(batch_size):                           # one whole step, as your loop makes it
    model(torch.randn(batch_size, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


search = find_batch_size(step, start=16, limit=128)         # all ranks together
print(search)
with Memory_Maximizer() as watch:
    for _ in range(10):
        step(search.best)
        watch.update(samples=search.best)

# %% [markdown]
# A CPU has no retries to count ("-"), so speed alone decides here. The answer is the same on every rank. The report
# is how you check a long run: on a GPU it shows *reserved* memory on the fullest rank, which limits all others, and
# the retries, which should stop.

# %% jupyter={"source_hidden": true} tags=["check", "watched"]
assert len(set(ranks.get("search.best"))) == 1
assert set(ranks.get("watch.report.steps")) == {10}

# %% [markdown]
# ## Your turn 1 · Choose from an H200's logs
#
# **Goal:** write this lesson's rule: choose a batch size from what the H200 measured at one limit.
#
# **Given:** a dict `log`. `log[size]` is `None` if that size ran out of memory, otherwise `(retries, seconds)`:
# a list with the retries of steps 1 to 5, and the seconds of the faster of the last two.
#
# **Return:** of the sizes without a retry in steps 4 and 5, the one with the most samples per second; 0 if none.
#
# Five logs are tried. The next cell prints part of one, at 2.1 GiB: which size is right there?
#
# <details><summary>Hint</summary>
#
# First keep the good sizes, then compare `size / seconds`.
#
# </details>

# %%
LOGS = [                                        # limit, expandable segments, the smallest size of the log
    {size: one for size, one in log_of[limit, expandable].items() if size >= first}
    for limit, expandable, first in
    [(2.1, False, 16), (2.1, False, 17), (1.8, True, 17), (2.0, True, 17), (1.6, False, 16)]
]
for size in range(20, 28):
    print(size, LOGS[1][size])

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn


@turn(1, {
    "logs where your size is not good": exactly(
        0, "You took a size that runs out of memory, or that has a retry in one of its last two steps."
    ),
    "logs with a faster good size": exactly(
        0, "You left a good size with more samples per second. Either you refused one whose retries stop before "
        "the last two steps, or you compared something other than size / seconds."
    ),
    "size for the log without a good one": exactly(0, "In one log every size has retries to the end: return 0."),
})
def score_choice(my_choice):
    not_good = slower = 0
    for log in LOGS:
        chosen = my_choice(dict(log))
        if isinstance(chosen, bool) or chosen not in [0, *log]:
            raise NotYet("Return one of the batch sizes of the log, or 0.")
        rates = {size: size / one[1] for size, one in log.items() if one and zone_of(one[0]) in GOOD}
        if rates:
            not_good += chosen != 0 and chosen not in rates
            slower += chosen == 0 or rates.get(chosen, max(rates.values())) < max(rates.values())
    return {
        "logs where your size is not good": not_good,
        "logs with a faster good size": slower,
        "size for the log without a good one": chosen,
    }


# %%
# %%turn 1
def my_choice(log):
    # for each size: log[size] is None, or (retries, seconds), such as ([0, 1, 0, 0, 0], 0.045)
    return None                                 # one of the sizes, or 0


# %% tags=["solution"] turn=1
def my_choice(log):
    rates = {}
    for size, one in log.items():
        if one is not None:
            retries, seconds = one
            if sum(retries[-2:]) == 0:
                rates[size] = size / seconds
    return max(rates, key=rates.get, default=0)

# %% tags=["right"] turn=1
import numpy as np

def my_choice(log):                             # arrays; returns a NumPy integer
    sizes = np.array([size for size, one in log.items() if one and not np.any(one[0][3:])])
    if sizes.size == 0:
        return 0
    return sizes[np.argmax(sizes / np.array([log[size][1] for size in sizes]))]

# %% tags=["right"] turn=1
def my_choice(log):                             # one running maximum
    best, most = 0, 0.0
    for size in sorted(log, reverse=True):
        match log[size]:
            case [*_, 0, 0], seconds if size / seconds > most:
                best, most = size, size / seconds
    return best

# %% tags=["right"] turn=1
def my_choice(log):                             # the least time for one sample
    good = [(one[1] / size, size) for size, one in log.items() if one and one[0][-2:] == [0, 0]]
    return min(good)[1] if good else 0

# %% tags=["wrong"] turn=1 says="a retry in one of its last two steps"
def my_choice(log):                             # the largest that runs
    return max(size for size, one in log.items() if one)

# %% tags=["wrong"] turn=1 says="a retry in one of its last two steps"
def my_choice(log):                             # the fastest, whatever its retries
    return max((size for size, one in log.items() if one), key=lambda size: size / log[size][1])

# %% tags=["wrong"] turn=1 says="a retry in one of its last two steps"
def my_choice(log):                             # looks at the last step only
    good = [size for size, one in log.items() if one and one[0][-1] == 0]
    return max(good, key=lambda size: size / log[size][1], default=0)

# %% tags=["wrong"] turn=1 says="retries stop before the last two steps"
def my_choice(log):                             # refuses any retry
    good = [size for size, one in log.items() if one and not any(one[0])]
    return max(good, key=lambda size: size / log[size][1], default=0)

# %% tags=["wrong"] turn=1 says="other than size / seconds"
def my_choice(log):                             # the largest good one
    return max((size for size, one in log.items() if one and not any(one[0][-2:])), default=0)

# %% tags=["wrong"] turn=1 says="other than size / seconds"
def my_choice(log):                             # the shortest step
    good = [size for size, one in log.items() if one and not any(one[0][-2:])]
    return min(good, key=lambda size: log[size][1], default=0)

# %% tags=["wrong"] turn=1 says="every size has retries to the end"
def my_choice(log):                             # where no size is good, the smallest
    good = [size for size, one in log.items() if one and not any(one[0][-2:])]
    return max(good, key=lambda size: size / log[size][1], default=min(log))

# %% tags=["wrong"] turn=1 says="your code raised TypeError"
def my_choice(log):                             # does not expect None
    good = [size for size, (retries, seconds) in log.items() if not any(retries[-2:])]
    return max(good, key=lambda size: size / log[size][1], default=0)

# %% [markdown]
# ## Your turn 2 · One answer for all ranks
#
# **Goal:** make all ranks agree whether a batch size is good. If each decided for itself, they would go on to
# different sizes, and in the end wait for each other.
#
# **Given:** `step(batch_size)`, a whole trial on this rank. It returns the retries of its last two steps, or raises
# `torch.OutOfMemoryError`. `torch`, `dist` and `device` are those of the search's cell. This `step` calls no
# collective. In a real FSDP step the other ranks would wait in a collective, and never reach yours, so
# `find_batch_size` also exchanges states before each collective in a trial's first two steps.
#
# **Return**, on every rank: True if no rank ran out of memory and none had a retry, otherwise False.
#
# <details><summary>Hint</summary>
#
# Turn what happened on this rank into a number, and sum it over the ranks with one `dist.all_reduce`, which the
# rank that ran out of memory has to reach, too.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import exactly, turn


@turn(2, {
    "batch sizes on which ranks disagree": exactly(0, "Ranks have different answers: use what every rank has seen."),
    "failures that were accepted": exactly(0, "Every rank accepted a size at which some rank failed or retried."),
    "good sizes that were refused": exactly(0, "A size at which no rank failed or retried was refused."),
})
def score_trial(my_trial):
    def step(size):                             # 4 is good; 5: the last rank fails; 6: rank 0 retries; 7, 8: all
        if (size == 5 and rank == world - 1) or size == 7:
            raise torch.OutOfMemoryError("simulated")
        return {6: 2 if rank == 0 else 0, 8: 1}.get(size, 0)

    answers = [bool(my_trial(step, size)) for size in (4, 5, 6, 7, 8)]
    everyone = [None] * world
    dist.all_gather_object(everyone, answers)
    columns = [set(column) for column in zip(*everyone)]
    return {
        "batch sizes on which ranks disagree": sum(len(column) > 1 for column in columns),
        "failures that were accepted": columns[1:].count({True}),
        "good sizes that were refused": columns[:1].count({False}),
    }


# %%
# %%turn 2
def my_trial(step, batch_size):
    # 1. call step, and note whether it failed or retried on this rank
    # 2. one collective that every rank calls
    return None                                 # True or False, the same on every rank


# %% tags=["solution"] turn=2
def my_trial(step, batch_size):
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
    except torch.OutOfMemoryError:
        failed += 1
    dist.all_reduce(failed)                     # after the try, so that every rank calls it
    return failed.item() == 0

# %% tags=["right"] turn=2
def my_trial(step, batch_size):
    try:
        good = step(batch_size) == 0
    except torch.OutOfMemoryError:
        good = False
    everyone = [None] * world
    dist.all_gather_object(everyone, good)
    return all(everyone)

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional

def my_trial(step, batch_size):                 # the least of the ranks, as a tensor
    try:
        good = torch.tensor([step(batch_size) == 0], dtype=torch.int32, device=device)
    except torch.OutOfMemoryError:
        good = torch.zeros(1, dtype=torch.int32, device=device)
    return functional.all_reduce(good, "min", dist.group.WORLD)

# %% tags=["right"] turn=2
import numpy as np

def my_trial(step, batch_size):                 # rank 0 decides for all
    try:
        retries = step(batch_size)
    except torch.OutOfMemoryError:
        retries = np.inf
    found = [None] * world if rank == 0 else None
    dist.gather_object(retries, found)
    answer = [np.max(found) == 0 if rank == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]

# %% tags=["wrong"] turn=2 says="use what every rank has seen"
def my_trial(step, batch_size):                 # each rank for itself
    try:
        return step(batch_size) == 0
    except torch.OutOfMemoryError:
        return False

# %% tags=["wrong"] turn=2 says="failed or retried"
def my_trial(step, batch_size):                 # retries do not count
    failed = torch.zeros(1, device=device)
    try:
        step(batch_size)
    except torch.OutOfMemoryError:
        failed += 1
    dist.all_reduce(failed)
    return failed.item() == 0

# %% tags=["wrong"] turn=2 says="call different collectives"
def my_trial(step, batch_size):                 # the collective in the try
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
        dist.all_reduce(failed)
    except torch.OutOfMemoryError:
        return False
    return failed.item() == 0

# %% tags=["wrong"] turn=2 says="failed or retried"
def my_trial(step, batch_size):                 # what rank 0 has seen
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
    except torch.OutOfMemoryError:
        failed += 1
    dist.broadcast(failed, src=0)
    return failed.item() == 0

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `CUDA out of memory`, with gigabytes "reserved by PyTorch but unallocated" | the cache is in pieces that do not serve the request | `expandable_segments:True`; a smaller batch |
# | `CUDA out of memory`, and you don't know what fills the GPU | the allocator's history tells | `torch.cuda.memory._record_memory_history()` before the first step; in `except torch.OutOfMemoryError`, `torch.cuda.memory._dump_snapshot(f"rank-{rank}.pickle")`; drop the file on [pytorch.org/memory_viz](https://pytorch.org/memory_viz) |
# | one rank runs out of memory, and the others hang | they wait in a collective that it never calls | stop the job, and take a smaller batch on all ranks; `find_batch_size(step)` tells the other ranks, in the first two steps of a trial |
# | slower since `torch.cuda.empty_cache()` runs in each step | it gives back every segment in which no tensor lives, as a retry does | leave it out |
#
# ## The rule
#
# Take the fastest batch size whose retries have stopped on all ranks: `find_batch_size(step)`. A full GPU
# without an error is no proof of speed.
#
# [← lesson 4](04_backward_prefetch.ipynb) · [lesson 6 →](06_sharding_strategies.ipynb)

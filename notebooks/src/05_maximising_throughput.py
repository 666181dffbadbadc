# %% [markdown]
# # 5 · Maximising throughput
#
# Which batch size should you take? **The one with the most samples per second, if the GPU refuses no request
# for memory once the first steps are over. That is rarely the largest size that runs.** A refused request
# raises no error at first: PyTorch's allocator gives back the memory that it had kept for later, and asks
# again. This is a **cudaMalloc retry**, and it makes the step slower. To see it, time some steps of each size
# and read `torch.cuda.memory_stats()["num_alloc_retries"]` before and after; `find_batch_size(step)` does
# this on all ranks.

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


fig, (axes,) = plots.figure(width=8.0, height=3.2)
ran = [(size, *one) for log in log_of.values() for size, one in log.items() if one]
for zone in (*GOOD, "retries that continue"):
    dots = [(size, size / seconds) for size, retries, seconds in ran if zone_of(retries) == zone]
    axes.plot(*zip(*dots), "o", color=plots.RANK_COLORS[ZONES[zone]], markersize=5, label=zone)
axes.set(title="measured on one H200", xlabel="batch size per rank", ylabel="samples per second", ylim=(300, 520))
axes.set_xticks(range(16, 28))
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="The fastest size is 16, and at each size the runs with retries are mostly the slower ones.")

# %% [markdown]
# Each dot is one run of five steps on an H200 that may use 1.5 to 2.1 GiB (the axis begins at 300). At the
# same batch size, runs with retries in the last two steps (orange) are mostly the slower ones. The fastest
# runs are those of 16, the smallest size that was measured. (A far smaller batch is slow: see "What a
# larger batch gains".)

# %% tags=["card"]
lesson.card(
    5,
    learn="tell reserved from allocated memory, see retries, and choose a batch size by measuring",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 19, 18),
)

# %% [markdown]
# ## The script
#
# At which sizes do retries begin, and why? A CPU has no allocator of this kind, so this script **simulates**
# PyTorch's, for a model of 50 million parameters and a GPU that has 1.8 GiB to give. It prints what tensors
# occupy, and what the allocator holds for them (**reserved**). First it records what five training steps of
# one rank allocate and free. No GPU is needed for that: under `FakeTensorMode` tensors have
# shapes and no numbers, and the `fake` process group sends nothing. FSDP2's calls are the real ones. Save it
# as `train.py`, then `torchrun --nproc-per-node 4 train.py`.
#
# ```python
# import os
#
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
# rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
# mesh = init_device_mesh("cpu", (world,))
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
# if rank == 0:                                                         # each rank would print the same
#     for batch_size in (20, 22, 24, 26):
#         with FakeTensorMode():
#             trace = record(batch_size)
#         roomy = simulate_allocator(trace)                             # a GPU with room for everything
#         tight = simulate_allocator(trace, limit_gib=1.8)
#         sizes = f"tensors {trace.peak_gib:.2f} GiB, reserved {roomy.peak_reserved_gib:.2f} GiB if there is room"
#         ends = "out of memory" if tight.out_of_memory else f"retries by step {tight.retries_by_step}"
#         print(f"{batch_size}: {sizes}; with 1.8 GiB: {ends}")
# dist.destroy_process_group()
# ```
# ```text
# 20: tensors 1.44 GiB, reserved 1.69 GiB if there is room; with 1.8 GiB: retries by step [0, 0, 0, 0, 0]
# 22: tensors 1.55 GiB, reserved 1.82 GiB if there is room; with 1.8 GiB: retries by step [0, 1, 1, 1, 1]
# 24: tensors 1.66 GiB, reserved 1.86 GiB if there is room; with 1.8 GiB: retries by step [0, 1, 2, 2, 2]
# 26: tensors 1.77 GiB, reserved 2.00 GiB if there is room; with 1.8 GiB: out of memory
# ```
#
# The tensors of all four sizes are smaller than 1.8 GiB. What PyTorch *reserves* for them is not, from 22 on,
# and there the retries begin. (Delete `reshard_after_forward=False`, and 24 trains without a retry: each
# block's full weights are then freed after its forward.)
#
# ## Reserved and allocated
#
# Asking a GPU for memory (`cudaMalloc`) takes time, and giving it back (`cudaFree`) makes the program wait
# for the GPU. So PyTorch's **caching allocator** asks for segments, and places tensors in them: those below
# 10 MiB share segments of 2 or 20 MiB, a larger one gets its own. When a tensor is freed, its place stays in
# a cache, and the next tensor takes it if it is large enough. **Allocated** is what tensors occupy;
# **reserved** is allocated plus cache. Reserved has to fit on the GPU, beside the CUDA context and NCCL's
# buffers, which it does not count. The next cell replays four lines on a simulated GPU of 100 MiB.

# %%
import torch

from fsdp_utils.allocator import AllocationTrace, record_allocations, simulate_allocator
from fsdp_utils.lessons.tables import Table

MIB = 2**20
with record_allocations() as trace:
    a = torch.empty(60 * MIB, dtype=torch.uint8)
    b = torch.empty(30 * MIB, dtype=torch.uint8)
    del a
    c = torch.empty(62 * MIB, dtype=torch.uint8)

run = simulate_allocator(trace, limit_gib=100 / 1024)
assert run.num_alloc_retries == 1
Table(
    ["the program", "allocated, MiB", "reserved, MiB"],
    [
        [f"{event.kind} {event.size // MIB} MiB", allocated // MIB, reserved // MIB]
        for event, allocated, reserved in zip(trace.events, run.allocated, run.reserved)
    ],
)

# %% [markdown]
# After `free`, reserved stays at 90. The last request finds no cached place of 62 MiB, and the GPU has only
# 10 left. So the allocator gives the cached 60 MiB back and asks again, and now it works: 30 + 62 = 92. That
# is one retry.
#
# ## Why the cache is so large
#
# In the script, reserved is 0.20 to 0.27 GiB more than the tensors. The next cells record its model again,
# and replay it without a limit in three ways. (Only sizes 16, 24 and 32 are recorded. Those between are
# interpolated, tensor by tensor, which gives exactly the recorded 24.)

# %%
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

# %% tags=["reserved"]
from dataclasses import replace


def between(size):
    """The trace of a batch size from 16 to 32."""
    def grown(a, b):
        return a.size + (b.size - a.size) * (size - 16) // 16
    return AllocationTrace([replace(a, size=grown(a, b)) for a, b in zip(smallest, largest, strict=True)])


assert between(24).events == middle             # each event and each size
traces = {size: between(size) for size in range(16, 33)}
one_stream = {s: AllocationTrace([replace(event, stream=0) for event in t.events]) for s, t in traces.items()}


def reserved(trace, **how):
    return round(simulate_allocator(trace, **how).peak_reserved_gib, 2)


Table(
    ["batch size", "tensors, GiB", "reserved, GiB", "on one stream", "expandable segments"],
    [
        [s, round(traces[s].peak_gib, 2), reserved(traces[s]), reserved(one_stream[s]),
         reserved(traces[s], expandable_segments=True)]
        for s in (16, 20, 24, 28, 32)
    ],
    note="Simulated, without a limit.",
)

# %% [markdown]
# Two things make the cache large. The first is **streams**, queues of GPU work that run side by side. FSDP2
# gathers in one and reduces in another while a third computes, and a cached place of one stream does not
# serve another. With all tensors on one stream, reserved falls by 0.07 to 0.13 GiB. The second is **pieces**:
# a request needs one free place that is large enough, and free memory lies in pieces between tensors that
# still live. A retry does not help there: it can only give back segments in which no tensor lives. This is
# how 26 runs out of memory, with tensors of 1.77 GiB on a GPU of 1.8.
#
# `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, set before the program starts, is PyTorch's remedy for
# pieces: a segment grows page by page, in place of many segments of fixed size. Each stream still has its
# own.
#
# ## Three zones, at every limit
#
# One limit could be an accident. The left panel replays the model at 25 limits. The other two are what the
# H200 did at eight: `benchmarks/gpu.py` trained the same model there (torch 2.11) as one rank of a `fake`
# group of four. Its collectives send nothing; the allocator, kernels and streams are real.

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
alone = {limit: [simulated(trace, limit) for trace in one_stream.values()] for limit in limits}
assert not any("retries that continue" in row for row in alone.values())
pairs = [pair for at in limits for pair in zip(maps["simulated"][at], alone[at])]
then = [other for zone, other in pairs if zone == "retries that continue"]
assert (len(then), then.count("out of memory")) == (40, 18)
usual, growing = maps["H200"], maps["H200, expandable segments"]
some = [at for at in growing if largest_good(growing[at]) > 15]
assert some == [1.6, 1.7, 1.8, 1.9, 2.0, 2.1]
assert [largest_good(growing[at]) - largest_good(usual[at]) for at in some] == [1, 1, 2, 1, 0, 1]
assert {usual[at].count("retries that continue") for at in some[1:]} == {3, 4}      # at 1.6 none is good
saved = [round(reserved(traces[s]) - reserved(one_stream[s]), 2) for s in (16, 20, 24, 28, 32)]
assert (min(saved), max(saved)) == (0.07, 0.13)
more = [reserved(traces[s]) - traces[s].peak_gib for s in (20, 22, 24, 26)]
assert (f"{min(more):.2f}", f"{max(more):.2f}") == ("0.20", "0.27")

# %% [markdown]
# A band of retries (orange) separates the sizes that train well from those that run out of memory. In the
# simulation it is one to three sizes wide, at 15 of the 16 limits at which some size trains well and some
# runs out of memory. On the H200 it begins at smaller sizes, at the limits where any size is good, and is
# three or four sizes wide, with expandable segments two to five. One likely cause is the kernels'
# workspaces, which no trace of tensors sees. (With all tensors on one stream the simulation has no orange:
# of its 40 orange places 22 then train, and 18 run out of memory.)
#
# At the lower edge retries may stop after a few steps (blue): the cache has then found a shape that serves
# every request. Such a size is called good here: no retry in the last two of five steps. In a long run, keep
# watching the counter. Above the edge retries continue. Advice like "the largest batch
# that runs" usually ends in the orange band, and so can tools that lower the batch size until no error comes,
# such as Accelerate's `find_executable_batch_size`.
#
# Expandable segments made one or two more sizes good on the H200, at five of the six limits where any was.
# They are worth a try, but they do not remove the band.
#
# ## What a larger batch gains
#
# A step has costs that do not grow with the batch: the optimizer's step, the CPU's work of starting
# kernels, and FSDP's all-gathers and reduce-scatters. A small batch pays them for few samples. The next
# cell reads two runs of a Llama (16 layers, width 2,048, bf16) on an H200, as a single rank: one sample of
# 512 tokens a step, and four of 2,048.

# %% tags=["gain"]
import re

rows = []
for row in recorded.load("planner")["results"]["rows"]:
    if re.search("^1 ranks, 16 layers .* bf16, checkpointing None", row["setting"]):
        samples, length = map(int, re.search(r"(\d+) samples of (\d+) tokens", row["setting"]).groups())
        seconds = row["step_s"][1]              # [0] is what fsdp_utils.plan expected
        rows.append([samples * length, round(seconds, 3), round(samples * length / seconds)])
rows.sort()
Table(["tokens a step", "seconds", "tokens per second"], rows)

# %% [markdown]
# 16 times as many tokens take 1.3 times as long: 12 times the throughput. (This is another model, without
# communication.) The gain ends where the GPU is busy. In the first figure no size above 16 (4,096 tokens) is
# faster: they need more memory, and 17 is slower even without a retry.
#
# ## What a retry costs
#
# To give memory back (`cudaFree`, or unmapping pages of expandable segments), the program waits for the GPU.
# The next cell takes the H200's runs that had retries in both of their last two steps, and compares the
# faster of these steps with the median run of the same batch size, at any limit and setting, in which at
# least one of the two steps had none.

# %% tags=["cost"]
from statistics import median

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
both = longer[False] + longer[True]
assert (f"{min(both):.0%}", f"{median(both):.0%}", f"{max(both):.0%}") == ("2%", "9%", "44%")
sixteen = [1000 * seconds for size, retries, seconds in ran if size == 16 and min(retries[-2:]) == 0]
assert (round(min(sixteen), 1), round(max(sixteen), 1)) == (31.7, 33.6)
for larger, fewer in ((17, "9%"), (22, "1%")):
    found = [1000 * seconds for size, retries, seconds in ran if size == larger and min(retries[-2:]) == 0]
    assert f"{1 - larger / median(found) / (16 / median(sixteen)):.0%}" == fewer
slower = []
for log in log_of.values():
    rates = {size: size / one[1] for size, one in log.items() if one}
    assert not rates or max(rates, key=rates.get) == 16
    if any(zone_of(log[size][0]) in GOOD for size in rates):
        assert zone_of(log[max(rates)][0]) == "retries that continue"
        slower.append(1 - rates[max(rates)] / rates[16])
assert (len(slower), f"{min(slower):.0%}", f"{max(slower):.0%}") == (11, "4%", "35%")
assert (rows[1][0] / rows[0][0], round(rows[1][1] / rows[0][1], 1), round(rows[1][2] / rows[0][2])) == (16, 1.3, 12)

# %% [markdown]
# Read the least with care: runs of 16 without retries differ by 6% among themselves (31.7 to 33.6 ms). With
# expandable segments retries cost more here. And with several GPUs every rank waits for the slowest one, so
# one rank's retry costs all of them.
#
# At 11 of the 16 settings (eight limits, with and without expandable segments) some size was good. At each of
# them the largest size that runs had retries, and trained 4 to 35% fewer samples per second than 16. Retries
# are one part of that. The size itself is the other: without a retry in the timed steps, 17 trains 9% fewer
# than 16, and 22 1% fewer. Sizes below 16 were not measured, so a smaller one may be as fast.
#
# So samples per second decide. Then why look at retries at all? Because a short test can miss what they
# cost: at 2.1 GiB, size 22 retried in every second step, and its other steps were fast. And because retries
# say that the GPU is full: a longer sequence may find no memory.
#
# In 2022 the author of the [videos](../videos.md) measured a vision transformer of 1.986 billion parameters:
# 5.46 s a step at batch size 16, and 7.26 s at 17, with nine retries in five steps: 20% fewer images per
# second.
#
# ## On your ranks
#
# By hand, on a GPU, with a `step(batch_size)` that trains one step (forward, backward, optimizer):
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
# `find_batch_size(step)` searches in this way on all ranks. It doubles the batch size until a trial fails,
# then halves the distance. A trial of five steps fails if any rank runs out of memory, or has a retry in
# the last two steps. Of the sizes that pass, it takes the fastest, and of several within 2% the largest.
# Four things to know:
#
# - after out of memory it can go on with FSDP2 from torch 2.13 on, and not with FSDP1. With several ranks,
#   out of memory after the first two steps of a trial ends the search: start the job again, with a smaller
#   `limit`;
# - let `step` use your longest sequence: memory grows with the number of tokens;
# - the steps really train, so build model and optimizer anew afterwards;
# - another batch size changes the training: make up for it by gradient accumulation, or adapt the learning
#   rate.
#
# `Memory_Maximizer` then counts retries and memory on all ranks while you train. On a CPU, as here, the
# search needs a `limit`, and there are no retries to see.

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
# Seconds and bytes differ from run to run, and the answer is the same on every rank. On a CPU the report
# shows *resident* memory, which is what the system holds for the whole process. On a GPU it shows *reserved*
# memory, the retries, and the fullest rank, which limits all others.

# %% jupyter={"source_hidden": true} tags=["check", "watched"]
assert len(set(ranks.get("search.best"))) == 1
assert set(ranks.get("watch.report.steps")) == {10}

# %% [markdown]
# ## Your turn 1 · Choose from an H200's logs
#
# Write the rule. `log` is what the H200 measured under one limit. For each batch size, `log[size]` is `None`
# if it ran out of memory, else two values: the retries of each of five steps, and the seconds of a step (the
# faster of the last two). A size is good if neither of its last two steps retried. Return the good size with
# the most samples per second, and 0 if no size is good. Your rule is run on five logs. A part of
# one, at 2.1 GiB, is printed below: which size is right there?
#
# <details><summary>Hint</summary>
#
# First keep the sizes that are good: no retry in either of the last two steps. Then compare samples per
# second. Of the sizes below, 23 is right: 22 and 24 are faster, and their retries continue.
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
    return None                                 # your lines here


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
# One rank may run out of memory where the others do not. If each rank decided for itself, they would go on to
# different sizes, train different numbers of steps, and in the end wait for each other. Here
# `step(batch_size)` is a whole trial: it trains some steps on this rank and returns the retries of the last
# two, or raises `torch.OutOfMemoryError`. Your function runs on every rank. Return True on all ranks if no
# rank ran out of memory and no rank had a retry, and False on all ranks otherwise. `torch`, `dist` and
# `device` are those of the search's cell above.
#
# (This `step` has no collective. In a real one the other ranks would wait for the rank that failed, so
# `find_batch_size` sends the failure to them.)

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
    return None                                 # your lines here


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
# | steps take longer than with a slightly smaller batch, and memory is nearly full | retries | read `num_alloc_retries` before and after some steps; a smaller batch |
# | `CUDA out of memory`, with gigabytes "reserved by PyTorch but unallocated" | the cache is in pieces that do not serve the request | `expandable_segments:True`; a smaller batch |
# | `CUDA out of memory`, and you don't know what fills it | unknown, so look | `torch.cuda.memory._record_memory_history()` before the first step; in `except torch.OutOfMemoryError`, `torch.cuda.memory._dump_snapshot(f"rank-{rank}.pickle")`; drop the file on [pytorch.org/memory_viz](https://pytorch.org/memory_viz), or replay it: `AllocationTrace.from_snapshot(pickle.load(open(file, "rb")))` |
# | one rank runs out of memory, and the others hang | they wait in a collective that it never calls | in training: stop the job, and take a smaller batch on all ranks. In a search: `find_batch_size(step)` sends a failure in the first two steps of a trial to the other ranks; turn 2 alone is enough only for a step without collectives |
# | slower since `torch.cuda.empty_cache()` runs in each step | it gives back every segment in which no tensor lives, as a retry does | leave it out |
#
# ## The rule
#
# Take the fastest batch size whose retries have stopped, on all ranks: `find_batch_size(step)`. A full GPU
# without an error is no proof of speed.
#
# [← lesson 4](04_backward_prefetch.ipynb) · [lesson 6 →](06_sharding_strategies.ipynb)

# %% [markdown]
# # 5 · Maximising throughput
#
# Which batch size should you take? **Measure samples per second, and leave out each size that still has
# retries after a few steps.** (A cudaMalloc retry: cudaMalloc fails, so the allocator gives back what it can
# of its cache and asks again.) On an H200 a step with retries took 2 to 46% longer than a step of the same
# batch without. `find_batch_size(step)` searches for you.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

NAMES = {"fits": 2, "retries that settle": 0, "retries that recur": 1, "out of memory": 5}
fig, (axes,) = plots.figure(width=8.0, height=1.7)
for name, left, width in zip(NAMES, (0, 21, 22, 24), (21, 1, 2, 5)):
    axes.barh(0, width, left=left, height=0.7, color=plots.RANK_COLORS[NAMES[name]], label=name)
axes.annotate("the largest to use", (22, 0.36), (19, 0.85), ha="center", arrowprops={"arrowstyle": "->"})
axes.annotate("no error, and slow", (23.5, 0.36), (25.5, 0.85), ha="center", arrowprops={"arrowstyle": "->"})
axes.set(xlim=(14, 29), ylim=(-0.4, 1.1), xlabel="batch size per rank, growing", xticks=[], yticks=[])
axes.spines[:].set_visible(False)
fig.legend(loc="outside lower center", ncols=4, frameon=False)
plots.show(fig, alt="As the batch grows: it fits, it retries, it runs out of memory.")

# %% [markdown]
# A drawing. As the batch grows, training first fits. Then it runs, but requests for memory fail at first, and
# the allocator has to give back what it can of its cache: a **retry**. Then it runs out of memory.

# %% tags=["card"]
lesson.card(
    5,
    learn="tell reserved from allocated memory, see retries, and choose the batch size below them",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 16, 20),
)

# %% [markdown]
# ## The script
#
# A CPU has no caching allocator, so this script **simulates** one for a GPU of which PyTorch may use 1.8 GiB
# (a small limit for a small model). It records five training steps of each rank: under `FakeTensorMode`
# tensors have shapes and no numbers, the `fake` process group sends nothing, and FSDP2's calls are the real
# ones. Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`.
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
#         fully_shard(block, mesh=mesh, reshard_after_forward=False)
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
# for batch_size in (20, 22, 24, 26):
#     with FakeTensorMode():
#         trace = record(batch_size)
#     words = []
#     for expandable in (False, True):
#         run = simulate_allocator(trace, limit_gib=1.8, expandable_segments=expandable)
#         words.append("out of memory" if run.out_of_memory else f"retries by step {run.retries_by_step}")
#     if rank == 0:
#         print(f"{batch_size}: tensors {trace.peak_gib:.2f} GiB; {words[0]}; expandable: {words[1]}")
# dist.destroy_process_group()
# ```
# ```text
# 20: tensors 1.44 GiB; retries by step [0, 0, 0, 0, 0]; expandable: retries by step [0, 0, 0, 0, 0]
# 22: tensors 1.55 GiB; retries by step [0, 1, 1, 1, 1]; expandable: retries by step [0, 0, 0, 0, 0]
# 24: tensors 1.66 GiB; retries by step [0, 1, 2, 2, 2]; expandable: retries by step [0, 1, 2, 1, 2]
# 26: tensors 1.77 GiB; out of memory; expandable: out of memory
# ```
#
# A retry raises no error. At 24 the tensors need 1.66 of 1.8 GiB, and still there are retries in almost every
# step. Expandable segments, a setting of the allocator that is explained below, help 22 and do not help 24.
# Why?
#
# ## Reserved and allocated
#
# Asking a GPU for memory (`cudaMalloc`) takes time, and giving it back (`cudaFree`) makes the program wait
# for the GPU. So PyTorch's **caching allocator** asks for large segments, cuts tensors out of them, and keeps
# what is freed in a cache. **Allocated** is what tensors occupy. **Reserved** is what the allocator holds of
# the GPU: allocated plus cache. Reserved has to fit beside the CUDA context and NCCL's buffers, which it does
# not count. The next cell replays four lines of a program on a simulated GPU of 100 MiB.

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
# After `free`, reserved stays at 90. The last request finds no free place of 62 MiB, and the GPU has only 10
# left. So the allocator gives the cached 60 MiB back and asks again, and now it works: 30 + 62 = 92. That is
# one retry. The program sees no error and no warning. `torch.cuda.memory_stats()["num_alloc_retries"]` counts
# them.
#
# ## Three zones, at every limit
#
# One limit could be an accident. So the next cell replays the script's model over a sweep of limits and batch
# sizes. (`record` is the script's function. Batch sizes between 16 and 32 are interpolated tensor by tensor,
# and checked at 24.) All of it is recorded with `reshard_after_forward=False`: full parameters stay after
# forward. With FSDP2's default the zones may lie elsewhere.

# %%
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))


def record(batch_size):
    """Record five steps of one rank of four; no tensor has numbers."""
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


# %% tags=["regimes"]
from dataclasses import replace
from functools import cache

with FakeTensorMode():
    smallest, middle, largest = record(16), record(24), record(32)
dist.destroy_process_group()


def between(size):
    """The events of a batch size from 16 to 32."""
    def grown(a, b):
        return a.size + (b.size - a.size) * (size - 16) // 16
    return [replace(a, size=grown(a, b)) for a, b in zip(smallest, largest, strict=True)]


assert between(24) == middle                                # each event and each size
events = {size: between(size) for size in range(16, 33)}
one_stream = {size: [replace(event, stream=0) for event in found] for size, found in events.items()}


@cache
def zone(size, limit, streams=3, expandable=False):
    trace = AllocationTrace(events[size] if streams == 3 else one_stream[size])
    run = simulate_allocator(trace, limit_gib=limit, expandable_segments=expandable)
    if run.out_of_memory:
        return "out of memory"
    if not run.num_alloc_retries:
        return "fits"
    return "retries that recur" if sum(run.retries_by_step[-2:]) else "retries that settle"


limits = [1.25 + 0.05 * step for step in range(25)]         # GiB
panels = {
    "default": {},
    "all tensors on one stream": {"streams": 1},
    "expandable segments": {"expandable": True},
}
maps = {title: {limit: [zone(s, limit, **how) for s in events] for limit in limits} for title, how in panels.items()}

# %% jupyter={"source_hidden": true}
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

colors = ListedColormap([plots.RANK_COLORS[place] for place in NAMES.values()])
fig, axes_of = plots.figure(3, width=10.4, height=3.6)
for axes, (title, found) in zip(axes_of, maps.items()):
    grid = [[list(NAMES).index(word) for word in row] for row in found.values()]
    axes.imshow(grid, cmap=colors, vmin=0, vmax=3, origin="lower", aspect="auto", extent=(15.5, 32.5, 1.225, 2.475))
    axes.set(title=f"simulated: {title}", xlabel="batch size per rank", xticks=range(16, 33, 4))
axes_of[0].set_ylabel("PyTorch may use, GiB")
patches = [Patch(color=plots.RANK_COLORS[place], label=name) for name, place in NAMES.items()]
fig.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
plots.show(fig, alt="Zones over batch size and limit: with one stream there is almost no zone of retries.")

# %% jupyter={"source_hidden": true} tags=["check", "expandable"]
FIT = ("fits", "retries that settle")


def best(row, accepted=FIT):
    """The largest batch size below which all are accepted."""
    return next((size - 1 for size, word in zip(events, row) if word not in accepted), 32)


inside = [limit for limit, row in maps["default"].items() if best(row) > 15 and row[-1] == "out of memory"]
default, alone, expandable = ([found[limit] for limit in inside] for found in maps.values())
gaps = [best(row, (*FIT, "retries that recur")) - best(row) for row in default]
assert len(inside) == 16
assert sum(gap > 0 for gap in gaps) == 15
assert max(gaps) == 3
assert sum("retries that settle" in row for row in default) > 5     # where they do, at the lower edge
assert not any("retries that recur" in row for row in alone)
pairs = [
    (limit, size)
    for limit, row in maps["default"].items()
    for size, word in zip(events, row)
    if word == "retries that recur"
]
alone_there = [zone(size, limit, streams=1) for limit, size in pairs]
assert (len(pairs), alone_there.count("out of memory")) == (40, 18)
assert sorted(best(row) - best(old) for row, old in zip(expandable, default)) == [0] * 14 + [1] * 2

# %% [markdown]
# **The default.** At 16 of these limits some batch size fits or settles and some runs out. At 15 of the 16
# there is a zone of retries between the two, one to three sizes wide. At its lower edge retries may
# **settle**: the cache takes another shape after a step or two, and they stop. Above that they recur. Advice
# like "the largest batch that runs", and tools that lower the batch size until there is no error, such as
# Accelerate's `find_executable_batch_size`, can end inside the zone.
#
# **One stream.** FSDP2 works in several CUDA **streams**, queues of work that run side by side, so that it
# can gather while it computes. The allocator keeps a cache for each stream, and a cached place of one stream
# does not serve another. In the second panel all tensors of the same recording are put on one stream: nowhere
# do retries recur. Of the 40 places where they did, 22 now train without: there the tensors fitted and the
# caches did not. The other 18 run out of memory: their free memory lies in pieces, which no retry can give
# back.
#
# **Expandable segments.** `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, set before the program starts,
# lets segments grow page by page. It wastes less between tensors, but streams still do not share pages. In
# this sweep it makes a larger batch fit at 2 of the 16 limits. At 11 of the 16 the first size that runs out of
# memory is one or two larger, which widens the zone of retries. Switch it on for messages with gigabytes
# "reserved by PyTorch but unallocated", and keep watching the counter.
#
# ## The same on an H200
#
# Is the real allocator like that? `benchmarks/gpu.py` trained the script's model on one H200, under eight
# limits (`torch.cuda.set_per_process_memory_fraction`), as one rank of a `fake` group of four: the
# collectives send nothing, all else is real. The next cell reads its stored measurements.

# %% tags=["on-a-gpu"]
from ast import literal_eval

from fsdp_utils.lessons import recorded


def zone_on_gpu(error, retries):
    if error:
        return "out of memory"
    return "fits" if not sum(retries) else "retries that recur" if sum(retries[-2:]) else "retries that settle"


gpu, rates = {}, {}                                         # by setting, one entry for each batch size
for row in recorded.load("retries")["results"]["rows"]:
    limit, expandable = row["setting"].split(" GiB, expandable segments ")
    setting = float(limit), expandable == "True"
    found = {int(size): trained for size, trained in row["batches"].items()}
    gpu[setting] = [zone_on_gpu(one["error"], literal_eval(one["retries_by_step"])) for one in found.values()]
    rates[setting] = [size / one["step_s"] if not one["error"] else 0 for size, one in found.items()]
WORKSPACES = 0.19                                           # GiB
simulated = {at: [zone(size, at[0] - WORKSPACES, expandable=at[1]) for size in events] for at in gpu}

# %% jupyter={"source_hidden": true}
fig, axes_of = plots.figure(2, width=8.4, height=3.0)
for axes, (title, found) in zip(axes_of, {"H200": gpu, "simulated": simulated}.items()):
    grid = [[list(NAMES).index(word) for word in row] for (_, expandable), row in found.items() if not expandable]
    axes.imshow(grid, cmap=colors, vmin=0, vmax=3, origin="lower", aspect="auto", extent=(15.5, 32.5, 1.35, 2.15))
    axes.set(title=title, xlabel="batch size per rank", xticks=range(16, 33, 4))
axes_of[0].set_ylabel("PyTorch may use, GiB")
fig.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
plots.show(fig, alt="Zones over batch size and limit: the H200's zone of retries is wider than the simulated one.")

# %% jupyter={"source_hidden": true} tags=["check", "gpu"]
good = {at: [rate for rate, word in zip(rates[at], row) if word in FIT] for at, row in gpu.items()}
largest = {at: [rate for rate in row if rate][-1] for at, row in rates.items() if any(row)}
slower = [1 - largest[at] / max(rates) for at, rates in good.items() if rates]
assert (len(slower), f"{min(slower):.0%}", f"{max(slower):.0%}") == (11, "4%", "35%")
alike = [ours == real for at in gpu for ours, real in zip(simulated[at], gpu[at])]
assert (sum(alike), len(alike)) == (245, 272)
trains = [(ours, real) for at in gpu for ours, real in zip(simulated[at], gpu[at]) if real != "out of memory"]
assert (len(alike) - len(trains), len(trains), sum(ours == real for ours, real in trains)) == (183, 89, 64)
assert {ours for ours, real in trains if real == "retries that settle"} == {"fits"}
assert max(rates[1.9, False]) == rates[1.9, False][0] > 1.1 * rates[1.9, False][1]          # 16 and 17, no retries
wide = [row.count("retries that recur") for at, row in gpu.items() if not at[1] and good[at]]
assert (min(wide), max(wide)) == (3, 4)
assert all(rates[at].index(max(good[at])) == 0 for at in good if good[at])      # the fastest is 16

# %% [markdown]
# All zones are there, and the H200's zone of retries is wider: three or four sizes where some size is good,
# one to three in the simulation. The GPU needs more than the tensors that a trace sees: kernels take
# workspaces of their own (cuBLAS, attention's backward). With its limit lowered by 0.19 GiB, the value that
# fits these points best, the simulation names the right zone at 245 of 272 points. 183 of the 272 run out of
# memory on the H200; of the 89 that train it names 64, and each of the other 25 it takes for better than it
# is: it never sees the retries that settle.
#
# ## What a retry costs
#
# To give memory back (`cudaFree`, or unmapping pages of expandable segments) the program waits for the GPU.
# The next cell compares steps of the same batch on the H200: those with no retry in at least one of their
# last two steps (the faster of the two is timed) with those that had retries in both.

# %% tags=["cost"]
def last_two(one):
    return min(literal_eval(one["retries_by_step"])[-2:])


by_size = {}
for row in recorded.load("retries")["results"]["rows"]:
    for size, one in row["batches"].items():
        if not one["error"]:
            by_size.setdefault(int(size), []).append((last_two(one), one["step_s"] * 1000))
costs, longer = [], []
for size, steps in by_size.items():
    alone = [took for count, took in steps if count == 0]
    costs += [(took - min(alone)) / count for count, took in steps if count and alone]
    longer += [took / min(alone) - 1 for count, took in steps if count and alone]
assert (f"{min(longer):.0%}", f"{max(longer):.0%}") == ("2%", "46%")
print(f"{len(costs)} settings: a retry costs {min(costs):.1f} to {max(costs):.1f} ms; a step takes 32 to 62 ms")

# %% [markdown]
# Differences below about 2 ms are within the noise: batch 16 without retries took 31.7 to 33.6 ms.
#
# At the 11 settings where some size is good, the largest that runs trains 4 to 35% fewer samples per second
# than the fastest good one. Not all of that is retries: the fastest is always 16, the smallest of the sweep,
# and 17 without any retry is already 10% slower than 16. So measure samples per second, and don't count
# retries alone. The author of the [videos](../videos.md) measured the same in 2022 on a vision transformer of
# 1.986 billion parameters: 5.46 s a step at batch size 16, and 7.26 s at 17, with nine retries in five steps,
# which is 20% fewer images per second.
#
# ## On your ranks
#
# Two tools look at the counter for you. `find_batch_size(step)` doubles the batch size until a trial fails,
# then halves the distance. A trial fails on out of memory, or on retries in its last two steps: those that
# settle earlier are accepted. Of the sizes that pass, it takes the fastest, and of several within 2% the
# largest. Its steps really train: build model and optimizer anew afterwards. And another batch size changes
# the training: keep the global batch size by gradient accumulation, or adapt the learning rate.
# `Memory_Maximizer` watches a training loop. On a CPU, as here, the search needs a `limit`, and there are no
# retries to see.

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
# Seconds and bytes differ from run to run, and the answer is the same on every rank (asserted below). On a
# CPU the report shows *resident* memory: what the system holds for the whole process, Python and libraries
# included. On a GPU it shows *reserved* memory, the retries, and the fullest rank, which limits all others.

# %% jupyter={"source_hidden": true} tags=["check", "watched"]
assert len(set(ranks.get("search.best"))) == 1
assert set(ranks.get("watch.report.steps")) == {10}

# %% [markdown]
# ## Your turn 1 · Search for the batch size
#
# `trial(batch_size)` trains five steps on the simulated GPU and returns a list, the retries of each step;
# where memory runs out it raises `torch.OutOfMemoryError`. Sizes go from 16, which always trains, to 32.
# Return the largest batch size with no retry in the last two steps, after **at most six trials**. Your search
# is run on four GPUs of different sizes.
#
# <details><summary>Hint</summary>
#
# Keep two numbers: the largest size known to be good, and the smallest size known to be bad.
#
# </details>

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

GPUS = (1.4, 1.5, 1.8, 2.1)


@turn(1, {
    "GPUs with too large a batch": exactly(
        0, "A size that has retries in its last two steps was accepted: only errors were noticed?"
    ),
    "GPUs with too small a batch": exactly(
        0, "A larger size is good, too: retries in the first steps alone do not matter, or the search ends early."
    ),
    "trials, at most": at_most(6, "Six trials are enough if each halves what is left."),
})
def score_search(my_search):
    too_large = too_small = most = 0
    for limit in GPUS:
        tried = []

        def trial(size, limit=limit, tried=tried):
            tried.append(size)
            run = simulate_allocator(AllocationTrace(events[int(size)]), limit_gib=limit)
            if run.out_of_memory:
                raise torch.OutOfMemoryError(str(run.out_of_memory))
            return run.retries_by_step

        found = my_search(trial)
        if isinstance(found, bool) or int(found) != found:
            raise NotYet("Return a batch size, a whole number.")
        right = best([zone(size, limit) for size in events])
        too_large, too_small = too_large + (found > right), too_small + (found < right)
        most = max(most, len(tried))
    return {
        "GPUs with too large a batch": too_large,
        "GPUs with too small a batch": too_small,
        "trials, at most": most,
    }


# %%
# %%turn 1
def my_search(trial):
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def my_search(trial):
    good, bad = 16, 33
    while bad - good > 1:
        size = (good + bad) // 2
        try:
            is_good = sum(trial(size)[-2:]) == 0
        except torch.OutOfMemoryError:
            is_good = False
        good, bad = (size, bad) if is_good else (good, size)
    return good

# %% tags=["right"] turn=1
import numpy as np

def my_search(trial, good=16, bad=33):          # calls itself, returns a NumPy integer
    if bad - good == 1:
        return np.int64(good)
    size = good + (bad - good) // 2
    try:
        recurs = any(trial(size)[3:])
    except torch.OutOfMemoryError:
        recurs = True
    return my_search(trial, good, size) if recurs else my_search(trial, size, bad)

# %% tags=["right"] turn=1
import bisect
import contextlib

def my_search(trial):
    def bad(size):
        try:
            *_, fourth, fifth = trial(size)
        except torch.OutOfMemoryError:
            return True
        return fourth + fifth > 0

    return 16 + bisect.bisect_left(range(17, 33), True, key=bad)

# %% tags=["right"] turn=1
import contextlib

def my_search(trial):                           # steps of 8, 4, 2, 1
    size = 16
    for more in (8, 4, 2, 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            size += 0 if any(trial(size + more)[-2:]) else more
    return size

# %% tags=["wrong"] turn=1 says="only errors were noticed"
def my_search(trial):
    good, bad = 16, 33
    while bad - good > 1:
        size = (good + bad) // 2
        try:
            trial(size)
            good = size
        except torch.OutOfMemoryError:
            bad = size
    return good

# %% tags=["wrong"] turn=1 says="retries in the first steps alone"
def my_search(trial):
    good, bad = 16, 33
    while bad - good > 1:
        size = (good + bad) // 2
        try:
            is_good = sum(trial(size)) == 0
        except torch.OutOfMemoryError:
            is_good = False
        good, bad = (size, bad) if is_good else (good, size)
    return good

# %% tags=["wrong"] turn=1 says="halves what is left"
def my_search(trial):                           # one after the other
    size = 16
    while size < 32:
        try:
            if any(trial(size + 1)[-2:]):
                break
        except torch.OutOfMemoryError:
            break
        size += 1
    return size

# %% tags=["wrong"] turn=1 says="OutOfMemoryError"
def my_search(trial):                           # does not expect the error
    return max(size for size in (16, 24, 32) if not any(trial(size)[-2:]))

# %% [markdown]
# ## Your turn 2 · One answer for all ranks
#
# One rank may run out of memory where the others do not. If each rank decided for itself, they would end with
# different batch sizes and wait for each other. `step(batch_size)` runs this rank's step, after some to
# settle, and returns its retries, or raises `torch.OutOfMemoryError`. Return True, on every rank, if no rank
# ran out of memory and no rank had a retry, and False otherwise, on every rank.
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
# | step times vary, and memory is nearly full | retries | read `num_alloc_retries` before and after some steps; a smaller batch |
# | `CUDA out of memory`, with gigabytes "reserved by PyTorch but unallocated" | the cache is in pieces that do not serve the request | `expandable_segments:True`; a smaller batch |
# | `CUDA out of memory`, and you don't know what fills it | | `torch.cuda.memory._record_memory_history()` before the first step; in `except torch.OutOfMemoryError`, `torch.cuda.memory._dump_snapshot("rank-0.pickle")`; drop the file on [pytorch.org/memory_viz](https://pytorch.org/memory_viz), or replay it with `AllocationTrace.from_snapshot` |
# | one rank runs out of memory, and the others hang | they wait in a collective that it never calls | `find_batch_size(step)` sends a failure in the first two steps of a trial to the other ranks; turn 2 alone is enough only for a step without collectives |
# | slower since `torch.cuda.empty_cache()` runs in each step | it gives back every segment in which no tensor lives, as a retry does | leave it out |
#
# ## The rule
#
# Take the fastest batch size whose retries have stopped, on all ranks: `find_batch_size(step)`. A full GPU
# without an error is no proof of speed.
#
# [← lesson 4](04_backward_prefetch.ipynb) · [lesson 6 →](06_sharding_strategies.ipynb)

# %% [markdown]
# # 5 · Maximising throughput
#
# The usual advice is: raise the batch size until memory runs out, then take one step back. In this lesson
# you see why one step back is not enough. Just below "out of memory" lies a zone where training still runs,
# but the allocator has to give memory back and ask for it again, step after step. The best batch size lies
# below that zone. You also write a search that finds it.

# %% [markdown] tags=["card"]
# learn:
# - what *reserved* and *allocated* mean, and what PyTorch's caching allocator does
# - what a cudaMalloc retry is, and why FSDP's streams cause it
# - to find the batch size below the retries, with `Memory_Maximizer` and `find_batch_size`
# - what `expandable_segments` changes
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU: what needs one is simulated,
#   and called so'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: '[Maximising throughput](https://www.loom.com/share/2dd1bb59468640df876578835603d0a7),
#   2022. Since then: `Memory_Maximizer` looks at all ranks and forgets earlier trials,
#   and PyTorch has expandable segments.'

# %% [markdown]
# **The question of this lesson:** the tensors of a training step fit into the GPU, and still the step is
# slower than with a smaller batch. Where does the time go?
#
# ## In your own code
#
# `find_batch_size` tries batch sizes on your own training step, on all ranks, and reports the fastest one
# that causes no *retry*: a request for memory that failed at first, so that the allocator had to give memory
# back to the GPU. Save the script as `train.py` and start it with
# `torchrun --nproc-per-node 4 train.py`. `limit` is the largest batch size to try. On GPUs leave it out; on
# CPUs the search needs it.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from fsdp_utils import find_batch_size
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:
#     fully_shard(part, mesh=init_device_mesh(device, (dist.get_world_size(),)))
# optimizer = torch.optim.AdamW(model.parameters())
#
# def step(batch_size):                                       # one whole step, as your loop makes it
#     model(torch.randn(batch_size, 256, device=device)).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
#
# search = find_batch_size(step, start=4, limit=64)           # all ranks together
# if dist.get_rank() == 0:
#     print(search)
# dist.destroy_process_group()
# ```
#
# The steps of the search really train the model, so run it before your training and not within it.

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

# real ranks, for the second half of the lesson
ranks.start(preload=["torch.distributed.fsdp", "torch._dynamo", "sklearn.datasets"])

# %% [markdown]
# ## Reserved and allocated
#
# Asking a GPU for memory (`cudaMalloc`) takes time, and giving it back (`cudaFree`) makes the program
# wait for the GPU. So PyTorch does neither for each tensor. Its **caching allocator** asks for large
# **segments**, and cuts tensors out of them. When a tensor is freed, its place goes into a cache for later
# tensors. The GPU gets nothing back.
#
# So there are two numbers. **Allocated** is what tensors occupy at the moment. **Reserved** is what PyTorch
# has asked the GPU for: allocated plus cache. Of the two, reserved is what counts against the size of the
# GPU.
#
# A CPU has no such allocator. But its rules are in PyTorch's source
# (`c10/cuda/CUDACachingAllocator.cpp`), and `fsdp_utils.allocator` replays them. First record which
# tensors exist at which time. These are real tensors, on the CPU.

# %%
import torch
from fsdp_utils.allocator import record_allocations

MIB, GIB = 2**20, 2**30

with record_allocations() as trace:
    a = torch.empty(60 * MIB, dtype=torch.uint8)        # u8[60 MiB]
    b = torch.empty(30 * MIB, dtype=torch.uint8)        # u8[30 MiB]
    del a
    c = torch.empty(62 * MIB, dtype=torch.uint8)        # u8[62 MiB]

# %% [markdown]
# Now replay what was recorded. **This is a simulation:** no GPU takes part.

# %%
from fsdp_utils.allocator import simulate_allocator


def show(result):
    rows = [
        [f"{event.kind} {event.size // MIB} MiB", allocated // MIB, reserved // MIB]
        for event, allocated, reserved in zip(trace.events, result.allocated, result.reserved)
    ]
    return Table(["the program", "allocated, MiB", "reserved, MiB"], rows)


show(simulate_allocator(trace))

# %% [markdown]
# Look at the third line: 60 MiB are freed, and reserved stays as it was. The last line needs 62 MiB, and the
# free place in the cache has only 60. So the allocator asks the GPU for 62 more. At the end 92 MiB are in use
# and 152 are reserved.
#
# ## Predict
#
# What happens if the GPU has only 100 MiB?
#
# <details><summary>Answer</summary>
#
# The request for 62 MiB more fails at first: 90 + 62 is too much. The allocator then gives back to the GPU
# each segment of its cache in which no tensor lives, here the 60 MiB, and asks again. Now it works: 30 + 62
# = 92. That is a **retry**. PyTorch counts it: `torch.cuda.memory_stats()["num_alloc_retries"]`.
#
# </details>

# %%
small_gpu = simulate_allocator(trace, limit_gib=100 / 1024)
show(small_gpu)

# %% tags=["check"]
assert (small_gpu.regime, small_gpu.num_alloc_retries, small_gpu.reserved[-1] // MIB) == ("retries", 1, 92)
print("Checked: one retry, and 92 MiB reserved at the end.")

# %% [markdown]
# There was one retry, and the program did not notice it: no error, no warning. But `cudaFree` waits until
# the GPU has finished its work, and what was given back must later be asked for again. If that happens step
# after step, each step is slower.
#
# ## A real FSDP step, recorded
#
# Next, a whole training step. The model is a small vision transformer. It is sharded with `fully_shard` and
# `reshard_after_forward=False`: a block that is gathered for forward keeps its full parameters until its
# backward. This strategy is called ZeRO-2; [lesson 6](06_sharding_strategies.ipynb) compares it with others.
# The next cell is folded; it defines `SmallViT`, with four blocks.

# %% jupyter={"source_hidden": true}
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                                   # f32[batch, 196, width]
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))    # f32[batch, 196, 3, heads, 64]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # each f32[batch, heads, 196, 64]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))                # f32[batch, 196, width]


class SmallViT(nn.Module):
    def __init__(self, width, layers=4):
        super().__init__()
        self.patches = nn.Linear(768, width)                                    # 16 x 16 pixels, 3 colours
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x):                                                       # f32[batch, 196, 768]
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))                                             # f32[batch, 1000]


# %% [markdown]
# Record what one rank of eight does. The process group is PyTorch's `fake` one: it accepts all the calls and
# sends nothing. Under `FakeTensorMode` tensors have shapes and no numbers, so a model that
# would fill a GPU can be recorded on a laptop. The calls of FSDP2 are the real ones.

# %%
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
mesh = init_device_mesh("cpu", (8,))


def record(batch_size, width=1024):
    """Five training steps of one rank of eight."""
    model = SmallViT(width)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with record_allocations(model, optimizer) as trace:
        for _ in range(5):
            trace.begin_step()
            logits = model(torch.randn(batch_size, 196, 768))                   # f32[batch, 1000]
            F.cross_entropy(logits, torch.zeros(batch_size, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace


# %% [markdown]
# Do tensors without numbers take the same memory as real ones? Record a narrow model both ways and
# compare every allocation and every free.

# %%
real = record(batch_size=2, width=64)
with FakeTensorMode():
    fake = record(batch_size=2, width=64)
assert real.events == fake.events               # the same events, in the same order, of the same sizes
print(f"{len(real.events):,} events with real tensors, {len(fake.events):,} with fake ones")

# %% [markdown]
# They do. Next the wide model, at growing batch sizes. To save time, record only the batch sizes 16 and 32. A
# step makes the same tensors at each batch size; parameters keep their size, and activations grow evenly with
# the batch. So what lies between 16 and 32 can be interpolated, tensor by tensor. Is that right? Record 24 as
# well, and compare.

# %%
from dataclasses import replace
from fsdp_utils.allocator import AllocationTrace

with FakeTensorMode():
    smallest, middle, largest = (record(size).events for size in (16, 24, 32))
dist.destroy_process_group()


def between(size):
    """The trace of a batch size from 16 to 32."""
    pairs = zip(smallest, largest, strict=True)                             # of the same tensor
    resized = (replace(a, size=a.size + (b.size - a.size) * (size - 16) // 16) for a, b in pairs)
    return AllocationTrace(list(resized))


sizes = [16, 20, 22, 23, 24, 25, 26, 27, 28, 32]
traces = {size: between(size) for size in sizes}
assert traces[24].events == middle                                          # each event, each size


# %% jupyter={"source_hidden": true}
rows = [[size, round(traces[size].peak_gib, 2)] for size in (16, 20, 24, 26, 32)]
Table(["batch size", "tensors at the peak, GiB"], rows)

# %% [markdown]
# These are sizes of tensors; no allocator is simulated yet. From 16 to 32 memory grows by three quarters and
# not to twice as much, because only the activations grow with the batch.
#
# ## Predict
#
# Say that PyTorch may use 1.73 GiB. (A small limit for a small model.) The tensors of batch size 24 need
# 1.54 GiB. Does it fit? And 26, which needs a tenth of a GiB more?
#
# <details><summary>Answer</summary>
#
# Both run, and both have retries. The tensors would fit, but the allocator cannot place them without
# giving its cache back. The next section shows it.
#
# </details>
#
# ## The batch-size curve
#
# Replay each trace under the limit. **This is a simulation again**, of a GPU of which PyTorch may use 1.73
# GiB.

# %% tags=["regimes"]
LIMIT_GIB = 1.73
plain = {size: simulate_allocator(traces[size], limit_gib=LIMIT_GIB) for size in sizes}

# %% jupyter={"source_hidden": true}
Table(
    ["batch size", "regime", *(f"retries, step {step}" for step in range(1, 6))],
    [
        [size, result.regime, *(list(map(str, result.retries_by_step)) + [""] * 5)[:5]]
        for size, result in plain.items()
    ],
)

# %% [markdown]
# There are three regimes, in this order: the batch fits, it runs with retries, it runs out of memory. (An
# empty cell means that the step was not reached.) In the middle regime the retries do not stop after the
# first step: each of the steps 2 to 5 has one or two.

# %% tags=["check"]
order = ["fits", "retries", "out of memory"]
regimes = [result.regime for result in plain.values()]
assert set(regimes) == set(order)                                   # all three are there ...
assert regimes == sorted(regimes, key=order.index)                  # ... and in this order
assert all(min(result.retries_by_step[1:]) > 0 for result in plain.values() if result.regime == "retries")
print("Checked: three regimes, in this order; in the middle one there are retries in steps 2 to 5.")

# %% jupyter={"source_hidden": true}
fig, panels = plots.figure(3, width=10.0, height=3.4)
for axes, size in zip(panels, (20, 25, 28)):
    plain[size].plot(axes)
    axes.set_title(f"simulated, batch {size}: {plain[size].regime}", fontsize=9)
    covers = "first step, until it fails" if plain[size].out_of_memory else "five steps"
    axes.set(ylim=(0, 2), ylabel="", xlabel=covers, xticks=[])
    axes.get_legend().remove()
panels[0].set_ylabel("GiB")
marks, _ = panels[2].get_legend_handles_labels()                    # all of them occur there
names = ["reserved", "allocated", "limit", "retry", "out of memory"]
fig.legend(marks, names, loc="outside lower center", ncols=5, frameon=False)
plots.show(fig, alt="Simulated memory over five steps: it fits, it retries, it runs out.")

# %% [markdown]
# The line is allocated, the area is reserved, the dashed line is the limit. Each dotted line is the beginning
# of a step. On the left, reserved soon reaches its height and stays: from then on the allocator asks the GPU
# for nothing. In the middle each red mark is a retry: the area drops, because the cache is given back, and
# rises again. On the right even a retry was not enough: at the red line the memory has run out.
#
# Some of the red marks in the middle stand low, where little is allocated. How can a request fail when nearly
# all of the memory is cache?
#
# ## Why does a request fail beside a full cache?
#
# At batch size 24 the tensors need 1.54 of 1.73 GiB, and still there are retries. FSDP2 works in several CUDA
# **streams**, queues of work that run side by side. Beside the stream of the computation it has four of its
# own: for the copies into the all-gather, for the all-gather, for the reduce-scatter, and for the all-reduce
# of HSDP. In this recording, tensors are allocated in three: in that of the computation and in two of FSDP's.
# The allocator keeps a cache for each stream, and a cached place of one stream does not serve another. Each
# red mark that stands low is a request from one of FSDP's two streams, while the cache belongs to the
# computation.
#
# To see how much that matters, put all tensors of the same trace on one stream, and replay it.

# %%
streams = sorted({event.stream for event in traces[24].events})
one_stream = AllocationTrace([replace(event, stream=0) for event in traces[24].events])

replayed = {
    f"{len(streams)} streams": simulate_allocator(traces[24]),
    "one stream": simulate_allocator(one_stream),
}

# %% jupyter={"source_hidden": true}
Table(
    ["batch size 24, without a limit", "allocated at the peak, GiB", "reserved at the peak, GiB"],
    [
        [name, round(result.peak_allocated_gib, 2), round(result.peak_reserved_gib, 2)]
        for name, result in replayed.items()
    ],
)

# %% tags=["check"]
assert len(streams) == 3
low = [event for event in plain[25].retries if plain[25].allocated[event] < GIB]
assert low
assert all(traces[25].events[event].stream != 0 for event in low)
assert plain[24].regime == "retries"
assert simulate_allocator(one_stream, limit_gib=LIMIT_GIB).regime == "fits"
print("Checked: three streams retry, one fits. With little allocated, FSDP's streams alone retry.")

# %% [markdown]
# The tensors are the same in both lines, and at most 1.55 GiB are allocated at a time. (That is a little more
# than the tensors need, because the allocator rounds each size up.) But with three streams the allocator
# would like to reserve 1.78 GiB, above our limit, and with one stream 1.68. So the tensors fit, and the
# *cache* passes the limit: that causes the retries. FSDP needs its streams: they let it gather the next block
# while it computes. [Lesson 4](04_backward_prefetch.ipynb) is about that.
#
# ## What a retry costs
#
# Count how often the simulated allocator asks the GPU for memory, and how often it gives some back, in five
# steps.

# %% jupyter={"source_hidden": true}
Table(
    ["batch size", "cudaMalloc", "cudaFree"],
    [[size, plain[size].num_device_alloc, plain[size].num_device_free] for size in (22, 24, 26)],
)

# %% [markdown]
# Without retries each segment is requested once, and none goes back. With retries segments go back and forth,
# and each `cudaFree` waits until the GPU has finished its work. A simulation cannot say how many seconds that
# takes. The author of
# the videos measured it in 2022, on a vision transformer of 1.986 billion parameters under ZeRO-2. These are
# his numbers.

# %% tags=["numbers-of-2022"]
of_2022 = {16: (5.4604, 0, 93.83), 17: (7.2645, 9, 94.79)}    # batch size: s/step, retries, % of memory
speed = {size: size / seconds for size, (seconds, _, _) in of_2022.items()}

# %% jupyter={"source_hidden": true}
Table(
    ["batch size", "s per step, mean", "retries in five steps", "memory used, %", "images/s"],
    [[size, *numbers, round(speed[size], 3)] for size, numbers in of_2022.items()],
)

# %% [markdown]
# With one image more, and one percent more of the memory, the mean step took 33% longer: batch size 16 trains
# 25% more images per second. The 9 retries are those of five steps together. The picture in his lesson shows
# each step: the first one took 5.91 s, and the four with retries from 7.2 to 8.4 s.
#
# ## Two ways to choose a batch size
#
# Back to the simulated GPU. The usual way ends at the largest batch size that raises no error. Tools that
# search automatically look for the same thing. For example, accelerate's `find_executable_batch_size`
# takes 0.9 times the batch size after each out-of-memory error, until there is none.

# %%
runs = [size for size in sizes if plain[size].regime != "out of memory"]
fits = [size for size in sizes if plain[size].regime == "fits"]

automatic = 32
while plain[automatic].regime == "out of memory":
    automatic = int(0.9 * automatic)


# %% jupyter={"source_hidden": true}
found = {
    "the largest that runs": max(runs),
    "0.9 times, from 32 on": automatic,
    "the largest that fits": max(fits),
}
Table(
    ["way", "batch size", "retries in five steps"],
    [[way, size, plain[size].num_alloc_retries] for way, size in found.items()],
)

# %% tags=["check"]
assert max(fits) < automatic <= max(runs)
assert plain[22].num_device_free == 0 < plain[24].num_device_free
assert 1.25 < speed[16] / speed[17] < 1.26
print("Checked: both usual ways end among the retries, where memory goes back to the GPU.")

# %% [markdown]
# Both usual ways end among the retries, and neither would notice. The counter has to be part of the search.
#
# ## Your turn 1 · Search for the batch size
#
# Write the search. `trial(batch_size)` runs five steps on the simulated GPU and returns the number of
# retries in them; where the memory runs out it raises `torch.OutOfMemoryError`. The answer lies between 16,
# which always fits, and 32. Return the largest batch size without a retry, after **at most
# six trials**. Your search is run on four GPUs of different sizes.
#
# Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# Keep two numbers: the largest size known to fit, and the smallest size known not to. Try the middle of the
# two, until they are neighbours. Two things can tell that a size does not fit.
#
# </details>

# %% tags=["exercise"]
def my_search(trial):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
replays = {}


def replay(size, limit):
    if (size, limit) not in replays:
        replays[size, limit] = simulate_allocator(between(size), limit_gib=limit)
    return replays[size, limit]


def score_search(search):
    """Search on four simulated GPUs."""
    wrong, most, history = 0, 0, {}
    for limit in (1.73, 1.45, 1.6, 2.2):
        tried = history[limit] = []

        def trial(size, limit=limit, tried=tried):
            tried.append(size)
            result = replay(size, limit)
            if result.out_of_memory:
                raise torch.OutOfMemoryError(str(result.out_of_memory))
            return result.num_alloc_retries

        found = search(trial)
        if found is None:
            return None
        best = max(size for size in range(16, 33) if replay(size, limit).regime == "fits")
        wrong, most = wrong + bool(found != best), max(most, len(tried))
    return {
        "GPUs with a wrong batch size": wrong,
        "trials, at most": most,
        "curve": history[1.73],
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_search(my_search)",
    {
        "GPUs with a wrong batch size": exactly(
            0, otherwise="The size is not the largest without a retry: do retries count as a failure, too?"
        ),
        "trials, at most": at_most(6, otherwise="Six trials are enough if each halves what is left."),
    },
    on_ranks=False,
)

# %% tags=["solution"] turn=1
def my_search(trial):
    good, bad = 16, 33
    while bad - good > 1:
        size = (good + bad) // 2
        try:
            fits = trial(size) == 0
        except torch.OutOfMemoryError:
            fits = False
        good, bad = (size, bad) if fits else (good, size)
    return good

# %% tags=["wrong"] turn=1
def my_search(trial):                           # looks only for errors
    good, bad = 16, 33
    while bad - good > 1:
        size = (good + bad) // 2
        try:
            trial(size)
            good = size
        except torch.OutOfMemoryError:
            bad = size
    return good

# %% tags=["wrong"] turn=1
def my_search(trial):                           # one after the other
    size = 16
    while size < 32 and trial(size + 1) == 0:
        size += 1
    return size

# %% tags=["wrong"] turn=1
def my_search(trial):                           # the usual way
    size = 32
    while True:
        try:
            trial(size)
            return size
        except torch.OutOfMemoryError:  # noqa: PERF203
            size = int(0.9 * size)

# %% tags=["wrong"] turn=1
def my_search(trial):                           # a constant
    return 23

# %% jupyter={"source_hidden": true}
searches = {"target": run_solution(5, 1)[0]["curve"]}
if mine := yours(1, "curve"):
    searches["yours"] = mine[0]
colors = dict(zip(order, (plots.RANK_COLORS[2], plots.RANK_COLORS[1], plots.RANK_COLORS[5])))
fig, panels = plots.figure(len(searches), width=4.2 * len(searches) + 0.6, height=2.6)
for axes, (title, tried) in zip(panels, searches.items()):
    axes.plot(range(1, len(tried) + 1), tried, color=plots.FAINT)
    for regime in order:
        points = [(n, s) for n, s in enumerate(tried, 1) if replay(s, LIMIT_GIB).regime == regime]
        axes.plot(*zip(*points) if points else ([], []), "o", color=colors[regime], label=regime)
    axes.set(title=title, xlabel="trial", ylim=(15, 33), xticks=range(1, len(tried) + 1))
panels[0].set_ylabel("batch size")
marks, names = panels[0].get_legend_handles_labels()
fig.legend(marks, names, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
plots.show(fig, alt=f"The batch size of each trial, and its regime: {', '.join(searches)}.")

# %% [markdown]
# This is the search on the GPU with 1.73 GiB: it halves what is left with each trial.
#
# ## The same with `find_batch_size`
#
# `find_batch_size` knows no upper end. It doubles the batch size until a trial fails, then halves the
# distance. A trial fails on an out-of-memory error, **and on retries** that have not ceased in its last two
# steps. Of the sizes that pass it takes the fastest, and of those that are equally fast within the noise the
# largest. The next cell is folded: it makes a device out of the simulation. The clock of that device is
# invented: every step takes a second, as if a larger batch cost nothing. That is the best case for large
# batches.

# %% jupyter={"source_hidden": true}
from fsdp_utils import find_batch_size
from fsdp_utils.memory.device_stats import Reading


class SimulatedGPU:
    """Runs a recorded step in no time, and tells what the simulated allocator did."""

    name, kind, total, remark = "simulated GPU", "allocator", int(LIMIT_GIB * GIB), "a simulation"

    def __init__(self):
        self.seconds, self.retries = 0, 0

    def step(self, batch_size):
        self.result = plain[batch_size]
        if self.result.out_of_memory:
            raise torch.OutOfMemoryError(str(self.result.out_of_memory))
        self.seconds += 1
        self.retries += self.result.retries_by_step[-1]

    def reset(self):
        self.retries = 0

    def read(self):
        return Reading(max(self.result.reserved), max(self.result.allocated), None, self.retries, 0)

    def synchronize(self):
        pass

    def empty_cache(self):
        pass

    def now(self):
        return self.seconds


gpu = SimulatedGPU()

# %%
search = find_batch_size(gpu.step, device=gpu, start=16)
print(search)

# %% tags=["check"]
assert search.best == max(fits)
print("Checked: the search ends at the largest batch size that fits.")

# %% [markdown]
# 16 fits, 32 does not, 24 has retries, and so the search ends at 23. It never had to try 25 and 26. (The 4
# retries of batch size 24 are those of a trial's last two steps: the simulated device repeats the fifth
# recorded step, which has two. Retries that cease before these are accepted.)
#
# ## In a real loop, on the ranks
#
# `find_batch_size` has a companion, `Memory_Maximizer`, which watches the memory of a training loop. Use both
# on real training, on the ranks that were started at the beginning. A small transformer
# learns to tell the handwritten digits of scikit-learn apart. It reads an image of 8 by 8 pixels row by row.
# The next cell is folded; it defines `build()`, which makes the model, and `shard(model)`, which shards it as
# above.

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                                  # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.rows, self.place = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=256, dropout=0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):                                           # f32[batch, 8, 8]
        x = self.rows(x) + self.place                               # f32[batch, 8, width]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))                                 # f32[batch, 10]


def build():
    torch.manual_seed(0)
    return Reader().to(device)


def shard(model):
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)             # ZeRO-2
    return fully_shard(model)


# %% [markdown]
# The loop is an ordinary one. The argument `watch` may be a `Memory_Maximizer`; after each step the loop
# tells it how many samples this rank has trained on.

# %%
# %%ranks
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32, device=device).view(-1, 8, 8)   # f32[1797, 8, 8]
labels = torch.tensor(labels, device=device)                                            # i64[1797]


def train(model, *, watch=None, rank=rank, world=world):
    """Twenty steps of 24 samples; the loss of each, as the mean over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = torch.zeros(20, device=device)
    for step in range(20):
        mine = torch.arange(24 * step, 24 * step + 24, device=device).chunk(world)[rank]
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
        if watch:
            watch.update(samples=len(mine))
    if world > 1:
        dist.all_reduce(losses)                                     # the sum over the ranks
    return losses.tolist()


alone = train(build(), rank=0, world=1)
print(f"one process: loss {alone[0]:.4f} at the first step, {alone[-1]:.4f} at the last")

# %% [markdown]
# The sharded model must reproduce these losses. It trains under `Memory_Maximizer`, which reports at the end:

# %% tags=["nbval-ignore-output"]
# %%ranks
from fsdp_utils import Memory_Maximizer

model = shard(build())
watch = Memory_Maximizer()
watch.start()
sharded = train(model, watch=watch)
report = watch.stop()                                               # all ranks together; rank 0 prints

# %% [markdown]
# Which memory is this? If the first row says **resident**, you are on a CPU. Then it is what the system
# holds in RAM for the whole process, Python and PyTorch's libraries included. It says little about the
# model. Retries are "not applicable", because a CPU has no caching allocator. If the row says
# **reserved**, you are on a GPU. Then it is the number of this lesson, and `retries` is the counter to
# watch.
#
# On either, the report covers all ranks and names the fullest: that rank limits all others. Seconds and
# bytes differ from run to run. The losses and the number of steps must not differ:

# %% tags=["watched"]
# %%ranks
torch.testing.assert_close(sharded, alone, rtol=1e-4, atol=1e-4)
assert len(report.ranks) == world
assert report.steps == 20
on_cpu = device.type == "cpu"
assert (report.num_alloc_retries is None) == on_cpu
print(f"sharded and watched: loss {sharded[0]:.4f} at the first step, {sharded[-1]:.4f} at the last")
print("steps counted:", report.steps, "· retries:", report.num_alloc_retries)

# %% [markdown]
# The losses are those of one process. Watching changes nothing, and neither does sharding. `None` retries
# means "this device does not count them", which is not the same as 0.
#
# ## The search, on the ranks
#
# `find_batch_size` takes a function that trains one step with a given number of samples. Its steps really
# train, so give it a model of its own. On a CPU it wants a limit, because the system kills a process that
# takes too much memory.

# %% tags=["nbval-ignore-output"]
# %%ranks
from fsdp_utils import find_batch_size

trial_model = shard(build())
optimizer = torch.optim.AdamW(trial_model.parameters())


def step(batch_size):
    x = torch.randn(batch_size, 8, 8, device=device)                # f32[batch, 8, 8]
    y = torch.randint(10, (batch_size,), device=device)             # i64[batch]
    F.cross_entropy(trial_model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


search = find_batch_size(step, start=4, limit=32)
print(search)

# %% [markdown]
# (On a CPU the column `reserved GiB` is resident memory again.) As a rule the column `samples/s` grows: each
# step has a fixed cost, and more samples share it. Once the device is busy all the time, a larger batch gains
# little. Which line is best depends on your machine. On every machine all ranks have the same answer:

# %%
bests = ranks.get("search.best")
tried = ranks.get("[trial.batch_size for trial in search.trials]")
assert len(set(bests)) == 1
assert all(sizes_of_rank == tried[0] for sizes_of_rank in tried)
print("tried on every rank:", tried[0])

# %% [markdown]
# ## Your turn 2 · One answer for all ranks
#
# Ranks do not fill their memory equally: one may run out of memory, or have a retry, where the others do not.
# If each rank decided for itself, the ranks would end with different batch sizes, and a rank that tries one
# size more than the others would wait for them in its first collective. Write a trial that gives the same
# answer on all ranks. `step(batch_size)` runs this rank's step and returns its retries, or raises
# `torch.OutOfMemoryError`. Return True if no rank ran out of memory and no rank had a retry, and otherwise
# False, on every rank. Every rank must reach your collective.
#
# (This `step` contains no collective. In a real one the other ranks would wait in the collective that the
# failing rank does not reach, so `find_batch_size` reports the failure to them.)
#
# Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# Turn what this rank saw into a number, 1 for a failure, and add the numbers up with `dist.all_reduce` after
# the `try`, not in it.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_trial(step, batch_size):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together

def score_trial(trial):
    """Judge five batch sizes: 4 fits, at 5 one rank runs out, at 6 one has retries, 7 and 8 fail on all."""

    def step(size):
        if (size == 5 and rank == world - 1) or size == 7:
            raise torch.OutOfMemoryError("simulated")
        return {6: 2 if rank == 0 else 0, 8: 1}.get(size, 0)

    verdicts = []
    for size in (4, 5, 6, 7, 8):
        verdict, parted = run_together(trial, step, size)
        if verdict is None:
            return {"problem": parted} if parted else None
        verdicts.append(verdict)
    everyone = [None] * world
    dist.all_gather_object(everyone, [bool(verdict) for verdict in verdicts])
    right = [True, False, False, False, False]
    return {
        "batch sizes on which ranks disagree": sum(len(set(column)) > 1 for column in zip(*everyone)),
        "batch sizes judged wrongly, on all ranks": sum(
            len(set(column)) == 1 and column[0] != wanted for column, wanted in zip(zip(*everyone), right)
        ),
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_trial(my_trial)",
    {
        "batch sizes on which ranks disagree": exactly(
            0, otherwise="Ranks have different answers: the answer needs what every rank has seen."
        ),
        "batch sizes judged wrongly, on all ranks": exactly(
            0, otherwise="A failure or a retry of one rank must fail the batch size, and nothing else."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_trial(step, batch_size):
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
    except torch.OutOfMemoryError:
        failed += 1
    dist.all_reduce(failed)
    return failed.item() == 0

# %% tags=["wrong"] turn=2
# %%ranks
def my_trial(step, batch_size):                 # each rank for itself
    try:
        return step(batch_size) == 0
    except torch.OutOfMemoryError:
        return False

# %% tags=["wrong"] turn=2
# %%ranks
def my_trial(step, batch_size):                 # retries do not count
    failed = torch.zeros(1, device=device)
    try:
        step(batch_size)
    except torch.OutOfMemoryError:
        failed += 1
    dist.all_reduce(failed)
    return failed.item() == 0

# %% tags=["wrong"] turn=2
# %%ranks
def my_trial(step, batch_size):                 # the collective in the try: not every rank calls it
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
        dist.all_reduce(failed)
    except torch.OutOfMemoryError:
        return False
    return failed.item() == 0

# %% tags=["wrong"] turn=2
# %%ranks
def my_trial(step, batch_size):                 # rank 0 decides
    failed = torch.zeros(1, device=device)
    try:
        failed += step(batch_size) > 0
    except torch.OutOfMemoryError:
        failed += 1
    dist.broadcast(failed, src=0)
    return failed.item() == 0

# %% tags=["check"]
try_answers(5)

# %% [markdown]
# ## Expandable segments
#
# Since 2023 PyTorch has an allocator that loses less. With `PYTORCH_ALLOC_CONF=expandable_segments:True` (the
# older name of the variable is `PYTORCH_CUDA_ALLOC_CONF`), set before the program starts, there is one
# segment for each stream and size class (small and large tensors), and it grows page by page. Where the free
# space at its end is too small for a tensor, it is extended. On a retry free pages go back one by one, not
# only whole segments.
#
# Predict: does the zone of retries vanish, or does it move?
#
# <details><summary>Answer</summary>
#
# It moves. Less memory is lost between the tensors, so a larger batch fits. But the streams still do not
# share pages, so the cache can still pass the limit.
#
# </details>
#
# **A simulation**, of the same traces under the same limit.

# %% tags=["expandable"]
expandable = {
    size: simulate_allocator(traces[size], limit_gib=LIMIT_GIB, expandable_segments=True) for size in sizes
}

# %% jupyter={"source_hidden": true}
Table(
    ["batch size", "default", "expandable segments"],
    [[size, plain[size].regime, expandable[size].regime] for size in sizes[2:]],
)

# %% tags=["check"]
fits_expandable = [size for size in sizes if expandable[size].regime == "fits"]
assert max(fits_expandable) == 24 > max(fits)
assert all(order.index(expandable[size].regime) <= order.index(plain[size].regime) for size in sizes)
assert "retries" in {result.regime for result in expandable.values()}
runs_a_little_above = simulate_allocator(traces[27], limit_gib=LIMIT_GIB + 0.02, expandable_segments=True)
assert runs_a_little_above.regime == "retries"
assert simulate_allocator(traces[27], limit_gib=LIMIT_GIB + 0.02).regime == "out of memory"
print("Checked: 24 fits with expandable segments; with 1.75 GiB 27 runs with them, and not without.")

# %% jupyter={"source_hidden": true}
fig, panels = plots.figure(2, width=9.0, height=3.4)
for axes, (title, results) in zip(panels, {"default": plain, "expandable segments": expandable}.items()):
    for place, result in enumerate(results.values()):
        axes.bar(place, result.peak_reserved_gib, color=colors[result.regime], width=0.8)
        note = "OOM" if result.out_of_memory else str(result.num_alloc_retries)
        axes.text(place, LIMIT_GIB + 0.04, note, ha="center")
    axes.axhline(LIMIT_GIB, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(title=f"simulated: {title}", xlabel="batch size", ylim=(0, 2))
    axes.tick_params(length=0)
panels[0].set_ylabel("peak reserved, GiB")
for regime in order:
    panels[0].bar(0, 0, color=colors[regime], label=regime)
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="Simulated peak of reserved memory, its regime by batch size, for both allocators.")

# %% [markdown]
# The number on each bar is the number of retries in five steps. With expandable segments batch size 24 fits
# too; from 25 on there are retries. Both run out of memory at 27. That is not so under every limit: with 1.75
# GiB, 27 runs with expandable segments, with retries, and does not run without them. So switch them on, and
# still watch the counter.
#
# ## When it goes wrong
#
# - **The step time varies, and memory is nearly full.** There are retries: look at
#   `torch.cuda.memory_stats()["num_alloc_retries"]` before and after some steps. Take a smaller batch, or
#   expandable segments. “The batch-size curve” shows the zone.
# - **Out of memory, with gigabytes “reserved but unallocated” in the message.** The cache is in pieces that
#   do not serve the request. Try expandable segments.
# - **Out of memory, and you do not know what fills the memory.** Record a snapshot on the GPU and drop the
#   file on [pytorch.org/memory_viz](https://pytorch.org/memory_viz), which shows each tensor with the line
#   that allocated it:
#
#   ```python
#   torch.cuda.memory._record_memory_history(max_entries=100_000)
#   ...                                         # two or three steps
#   torch.cuda.memory._dump_snapshot(f"memory-of-rank-{dist.get_rank()}.pickle")
#   ```
#
#   `AllocationTrace.from_snapshot` reads the same data, so that you can replay your own step with another
#   limit or with expandable segments.
# - **One rank runs out of memory, and the others hang.** They wait in a collective that it does not reach. A
#   search must have the same answer on all ranks: turn 2.
# - **`torch.cuda.empty_cache()` in each step makes training slower.** It gives the whole cache back, as a
#   retry does. Leave it out.
#
# ## Claims, then and now
#
# The table shows what the videos claimed beside what the cells above found.

# %% jupyter={"source_hidden": true}
lesson.claims(
    5,
    {
        "not-just-below-oom": f"Yes, in a simulation: {max(runs)} is the largest batch size of those tried "
        f"that runs, with retries in each step. {max(fits)} is the largest without.",
        "quarter-more-throughput": "The arithmetic is right: 16 / 5.4604 s is "
        f"{100 * (speed[16] / speed[17] - 1):.2f}% more than 17 / 7.2645 s. "
        "Seconds of a GPU are not for a CPU to say.",
        "oom-at-24": "Not consistent: the table of the same lesson says that 18 ran out of memory. "
        f"In our simulation {min(set(sizes) - set(runs))} does, of another model on a smaller GPU.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Allocated is what tensors occupy. Reserved is what PyTorch has asked the GPU for, and it counts against
#   the size of the GPU.
# - When a request fails, the allocator gives its cache back and asks again: a retry. No error shows it, and
#   it slows the step down.
# - As the batch grows, training fits, then retries, then runs out of memory, in this order.
# - "Just below out of memory" lies among the retries. Take the fastest batch size without a retry, on all
#   ranks: `find_batch_size` does.
# - Expandable segments move the zone of retries up. They do not remove it.
#
# ## Next
#
# Here the strategy was ZeRO-2. In [lesson 6](06_sharding_strategies.ipynb) you compare the sharding
# strategies: what each of them keeps, and what it sends.
#
# [← lesson 4](04_backward_prefetch.ipynb) · [lesson 6 →](06_sharding_strategies.ipynb)

# %% [markdown]
# # 5 · Maximising throughput
#
# The usual advice is: raise the batch size until memory runs out, then take one step back. In this lesson
# you see why that is one step too few. Just below "out of memory" lies a zone where training still runs,
# but the allocator has to give memory back and ask again, in every step. The best batch size lies below
# that zone.

# %% [markdown] tags=["card"]
# learn:
# - what *reserved* and *allocated* mean, and what PyTorch's caching allocator does
# - what a cudaMalloc retry is, and why FSDP's three streams bring it about
# - to find the batch size below the retries, with `Memory_Maximizer` and `find_batch_size`
# - what `expandable_segments` changes
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU: what needs one is simulated,
#   and called so'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 20 minutes to read
# video: '[Maximising throughput](https://www.loom.com/share/2dd1bb59468640df876578835603d0a7),
#   2022. Since then: `Memory_Maximizer` looks at all ranks and forgets earlier trials,
#   and PyTorch has expandable segments.'

# %%
from fsdp_utils.lessons import lesson
from fsdp_utils.notebook import ranks

# real ranks, for the second half of the lesson
ranks.start(preload=["torch.distributed.fsdp", "torch._dynamo", "sklearn.datasets"])

# %% [markdown]
# ## Reserved and allocated
#
# Asking a GPU for memory (`cudaMalloc`) takes time, and giving it back (`cudaFree`) makes the program
# wait for the GPU. So PyTorch does neither for each tensor. Its **caching allocator** asks for large
# segments, and cuts tensors out of them. When a tensor dies, its place goes into a cache for later
# tensors. The GPU gets nothing back.
#
# So there are two numbers. **Allocated** is what living tensors occupy. **Reserved** is what PyTorch has
# asked the GPU for: allocated plus cache. Of the two, reserved is what counts against the size of the GPU.
#
# A CPU has no such allocator. But its rules are in PyTorch's source
# (`c10/cuda/CUDACachingAllocator.cpp`), and `fsdp_utils.allocator` replays them. First record which
# tensors live when. These are real tensors.

# %%
import torch
from fsdp_utils import record_allocations

MIB, GIB = 2**20, 2**30

with record_allocations() as trace:
    a = torch.empty(60 * MIB, dtype=torch.uint8)        # u8[60 MiB]
    b = torch.empty(30 * MIB, dtype=torch.uint8)        # u8[30 MiB]
    del a
    c = torch.empty(62 * MIB, dtype=torch.uint8)        # u8[62 MiB]

[f"{event.kind} {event.size // MIB} MiB" for event in trace.events]

# %% [markdown]
# Now replay it. **This is a simulation:** no GPU takes part.

# %%
from fsdp_utils import simulate_allocator


def show(result):
    for event, allocated, reserved in zip(trace.events, result.allocated, result.reserved):
        does = f"{event.kind} {event.size // MIB} MiB"
        print(f"{does:12}  allocated {allocated // MIB:3} MiB  reserved {reserved // MIB:3} MiB")


large_gpu = simulate_allocator(trace)
show(large_gpu)

# %% [markdown]
# The third line is the one to look at: 60 MiB are freed, and reserved stays. The last line needs 62 MiB,
# and the cached place has only 60. So the allocator asks for 62 more. At the end 92 MiB are in use and 152
# are reserved.
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
print("retries:", small_gpu.num_alloc_retries)
assert (small_gpu.regime, small_gpu.reserved[-1] // MIB) == ("retries", 92)

# %% [markdown]
# One retry, and nothing else tells you of it: no error, no warning. But `cudaFree` waits until the GPU
# has finished its work, and the cache that was just given back must be asked for again. If that happens
# in each step, each step is slower.
#
# ## A real FSDP step, recorded
#
# Now to training. The model is a small vision transformer. It is sharded with `fully_shard` and
# `reshard_after_forward=False`: a block gathered for forward stays whole until its backward. This strategy
# is called ZeRO-2. Lesson 6 compares it with others.

# %%
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
# The recording plays one rank of eight. Its process group is PyTorch's `fake` one, which makes all the
# calls and sends nothing. Under `FakeTensorMode` tensors have shapes and no numbers, so a model that
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
    """Three training steps of one rank of eight."""
    model = SmallViT(width)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with record_allocations(model, optimizer) as trace:
        for _ in range(3):
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
print(f"{len(real.events)} events with real tensors, {len(fake.events)} with fake ones")
assert real.events == fake.events

# %% [markdown]
# The same events, in the same order, of the same sizes.
#
# Now the wide model, at growing batch sizes. A step makes the same tensors at each of them. Some have the
# same size, too, and the others grow evenly with the batch. So the recordings of 16 and 32 should tell what
# lies between. Do they? Record 24 as well, and compare.

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


sizes = [16, 20, 22, 23, 24, 25, 26, 28, 32]
traces = {size: between(size) for size in sizes}
assert traces[24].events == middle                                          # each event, each size

for size in (16, 24, 26, 32):
    print(f"batch size {size:2}: tensors need {traces[size].peak_gib:.2f} GiB at most")

# %% [markdown]
# These are sizes of tensors, and nothing is simulated yet. Memory grows with the batch, as activations
# do.
#
# ## Predict
#
# Say that PyTorch may use 1.75 GiB. (A small limit for a small model.) The tensors of batch size 24 need
# 1.54 GiB. Does it fit? And 26, which needs a tenth of a GiB more?
#
# <details><summary>Answer</summary>
#
# Both run, and both have retries. The tensors would fit, but the allocator cannot place them without
# giving its cache back. The next cell shows it.
#
# </details>
#
# ## The batch-size curve
#
# Replay each trace under the limit. **A simulation again.** The numbers are the simulated allocator's,
# for a GPU of which PyTorch may use 1.75 GiB.

# %% tags=["regimes"]
LIMIT_GIB = 1.75
plain = {size: simulate_allocator(traces[size], limit_gib=LIMIT_GIB) for size in sizes}

for size, result in plain.items():
    print(f"batch size {size:2}: {result.regime:13}  retries in each step: {result.retries_by_step}")

order = ["fits", "retries", "out of memory"]
regimes = [result.regime for result in plain.values()]
assert set(regimes) == set(order)                                   # all three are there ...
assert regimes == sorted(regimes, key=order.index)                  # ... and in this order

# %% [markdown]
# Three regimes, in this order: it fits, it runs with retries, it runs out of memory. In the middle one the
# retries do not stop after the first step. How long do they go on? Put `range(8)` into `record`: then 25
# and 26 have retries in each of the eight steps, while those of 24, at the edge, end after the third.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import plots

fig, panels = plots.figure(3, width=10.0, height=3.4)
for axes, size in zip(panels, (20, 25, 28)):
    plain[size].plot(axes)
    axes.set_title(f"simulated, batch size {size}: {plain[size].regime}", fontsize=9)
    axes.set(ylim=(0, 2), ylabel="", xticks=[])
    axes.get_legend().remove()
panels[0].set_ylabel("GiB")
marks, _ = panels[2].get_legend_handles_labels()                    # all of them occur there
names = ["reserved", "allocated", "limit", "retry", "out of memory"]
fig.legend(marks, names, loc="outside lower center", ncols=5, frameon=False)
plots.show(fig, alt="Simulated memory over three steps: it fits, it retries, it runs out.")

# %% [markdown]
# The line is allocated, the area is reserved, the dashed line is the limit. The dotted lines begin a step.
# On the left, reserved soon reaches its height and stays: from then on nobody asks the GPU for anything. In
# the middle each red mark is a retry: the area drops, because the cache is given back, and rises again. On
# the right even that was not enough: at the red line the memory has run out.
#
# ## Why just below the limit?
#
# At batch size 24 the tensors need 1.54 of 1.75 GiB. Where is the rest? FSDP2 works in several CUDA
# **streams**, queues of work that run side by side. One computes, one gathers, one reduces. The allocator
# keeps a cache for each stream, and a cached place of one stream does not serve another.
#
# So put all tensors of the same trace on one stream, and replay it.

# %%
streams = sorted({event.stream for event in traces[24].events})
one_stream = AllocationTrace([replace(event, stream=0) for event in traces[24].events])

print(f"streams {streams}:", simulate_allocator(traces[24]))
print("one stream:       ", simulate_allocator(one_stream))
assert plain[24].regime == "retries"
assert simulate_allocator(one_stream, limit_gib=LIMIT_GIB).regime == "fits"

# %% [markdown]
# The same tensors, and 1.55 GiB allocated in both. (A little more than the tensors need, because the
# allocator rounds each size up.) But with three streams the allocator would like to reserve 1.78 GiB, above
# our limit, and with one stream 1.68. So the limit is passed by the *cache*, before the tensors reach it.
# That is where these retries come from. FSDP needs the streams: they let it gather the next block while it
# computes. Lesson 4 is about that.
#
# ## What a retry costs
#
# Count how often the simulated allocator asks the GPU for memory and gives some back, in three steps.

# %%
for size in (22, 24, 26):
    result = plain[size]
    print(f"batch size {size}: {result.num_device_alloc:3} cudaMalloc, {result.num_device_free:3} cudaFree")
assert plain[22].num_device_free == 0 < plain[24].num_device_free

# %% [markdown]
# Without retries, the segments are asked for once, and none goes back. With retries they go back and forth,
# and the GPU has to be idle while they do. How many seconds that takes, a simulation cannot say. The author
# of the videos measured it in 2022, on a vision transformer of 1.986 billion parameters under ZeRO-2. These
# are his numbers.

# %% tags=["numbers-of-2022"]
of_2022 = {16: (5.4604, 0, 93.83), 17: (7.2645, 9, 94.79)}          # batch size: s/step, retries, % of memory
speed = {}
for size, (seconds, retries, percent) in of_2022.items():
    speed[size] = size / seconds
    print(f"batch size {size}: {seconds} s, {retries} retries, {percent}% full, {speed[size]:.3f} images/s")
print(f"batch size 16 trains {100 * (speed[16] / speed[17] - 1):.2f}% more images per second")
assert 1.25 < speed[16] / speed[17] < 1.26

# %% [markdown]
# One image more, one percent more memory, and the step took 33% longer. The larger batch is the slower
# one. (Where did it run out of memory? The text of that lesson says at batch size 24. Its own table says
# 18.)
#
# ## The usual way, and ours
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

print(f"the largest that runs:  {max(runs)}, with {plain[max(runs)].num_alloc_retries} retries in 3 steps")
print(f"0.9 times, from 32 on:  {automatic}, with {plain[automatic].num_alloc_retries} retries")
print(f"the largest that fits:  {max(fits)}, with {plain[max(fits)].num_alloc_retries} retries")
assert max(fits) < automatic <= max(runs)

# %% [markdown]
# Both usual ways end among the retries, and neither would notice. The counter has to be part of the
# search.
#
# `find_batch_size` does that. It doubles the batch size until a trial fails, then halves the distance. A
# trial fails on an out-of-memory error, **and on a retry**. Of the others it takes the fastest, and of those
# that are equally fast within the noise the largest. It works on any device with five methods, so you can
# watch it on the simulated one. Its clock is made up: every step takes a second, as if a larger batch cost
# nothing. That is the best case for large batches.

# %%
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
search = find_batch_size(gpu.step, device=gpu, start=16)
print(search)
assert search.best == max(fits)

# %% [markdown]
# 16 fits, 32 does not, 24 has retries (each of its steps here is the third one recorded), and so it closes
# in on 23. It never had to try 25 and 26.
#
# ## In a real loop, on the ranks
#
# Now both tools on real training, on the ranks that were started at the beginning. A small transformer
# learns to tell the handwritten digits of scikit-learn apart. It reads an image of 8 by 8 pixels row by row.

# %%
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
# The loop is an ordinary one. If there is a watch, it is told after each step how many samples this rank
# has trained on.

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
# That is the yardstick. Now sharded, under `Memory_Maximizer`: four calls, one of them in the loop.

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
# bytes differ from run to run. What must not differ is this.

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
# (On a CPU the column `reserved GiB` is resident memory again.) The column `samples/s` grows: each step has
# a fixed cost, and more samples share it. The smaller the part of that cost, the less a larger batch gains:
# once the device is busy all the time, the last bit of memory buys little, retries or not. Which line is
# best depends on your machine. What holds on every machine: all ranks have the same answer.

# %%
bests = ranks.get("search.best")
tried = ranks.get("[trial.batch_size for trial in search.trials]")
assert len(set(bests)) == 1
assert bests[0] in tried[0]
print("tried on every rank:", tried[0])
assert all(sizes_of_rank == tried[0] for sizes_of_rank in tried)

# %% [markdown]
# ## Expandable segments
#
# Since 2023 PyTorch can do better. With `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, set before the
# program starts, there is one segment for each stream and size class, and it grows page by page. Free space
# at its end that is too small can grow. On a retry single pages go back, not only whole segments.
#
# Predict: does the zone of retries vanish, or does it move?
#
# <details><summary>Answer</summary>
#
# It moves. Less memory is lost between the tensors, so a larger batch fits. But the streams still do not
# share pages, and a limit is a limit.
#
# </details>
#
# **A simulation**, of the same traces under the same limit.

# %% tags=["expandable"]
expandable = {
    size: simulate_allocator(traces[size], limit_gib=LIMIT_GIB, expandable_segments=True) for size in sizes
}
for size in sizes[3:]:
    print(f"batch size {size}: {plain[size].regime:13}  expandable: {expandable[size].regime}")

fits_expandable = [size for size in sizes if expandable[size].regime == "fits"]
assert max(fits_expandable) > max(fits)
assert all(order.index(expandable[size].regime) <= order.index(plain[size].regime) for size in sizes)
assert "retries" in {result.regime for result in expandable.values()}

# %% jupyter={"source_hidden": true}
colors = dict(zip(order, (plots.RANK_COLORS[2], plots.RANK_COLORS[1], plots.RANK_COLORS[5])))
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
# The number on each bar is the number of retries in three steps. With expandable segments batch size 24
# fits too. Then the retries begin, and out of memory comes at the same place as before. So switch it on,
# and still watch the counter.
#
# ## Claims, then and now
#
# What was claimed, beside what the cells above have found.

# %% jupyter={"source_hidden": true}
lesson.claims(
    5,
    {
        "not-just-below-oom": f"Yes, in a simulation: {max(runs)} is the largest batch size of those tried "
        f"that runs, with retries in each step. {max(fits)} is the largest without.",
        "quarter-more-throughput": "The arithmetic holds: 16 / 5.4604 s is "
        f"{100 * (speed[16] / speed[17] - 1):.2f}% more than 17 / 7.2645 s. "
        "Seconds of a GPU are not for a CPU to say.",
        "oom-at-24": "Not consistent: the table of the same lesson says that 18 ran out of memory. "
        f"In our simulation {min(set(sizes) - set(runs))} does, of another model on a smaller GPU.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. More throughput.** Two batch sizes and their seconds per step. By how many percent does the first
# train more samples per second than the second?

# %%
def percent_more(batch, seconds, other_batch, other_seconds):
    return None  # your line here


gains = {(16, 5.0, 16, 10.0): 100.0, (16, 5.4604, 17, 7.2645): 25.213839, (4, 5.5594, 16, 5.4604): -75.445192}
lesson.check(percent_more, gains)

# %% [markdown]
# **2. A segment.** The cache is empty, and a tensor of `tensor_mib` MiB comes. How many MiB does the
# allocator ask the GPU for? Its rules: up to 1 MiB, a segment of 2. Below 10 MiB, a segment of 20. From 10
# MiB on, the tensor's own size, rounded up to a multiple of 2.

# %%
def segment_mib(tensor_mib):
    return None  # your lines here


segments = {(0.5,): 2, (1,): 2, (1.5,): 20, (9,): 20, (10,): 10, (62,): 62, (73.5,): 74}
lesson.check(segment_mib, segments)

# %% [markdown]
# **3. The best of the trials.** Each trial is (batch size, seconds per step, retries). Which batch size
# would you train with?

# %%
def best_batch_size(*trials):
    return None  # your lines here


trials = {
    ((4, 5.5594, 0), (16, 5.4604, 0), (17, 7.2645, 9)): 16,
    ((8, 1.0, 0), (16, 1.5, 0), (32, 3.5, 0)): 16,
    ((8, 1.0, 0), (16, 1.5, 3)): 8,
}
lesson.check(best_batch_size, trials)

# %% [markdown]
# ## Summary
#
# - Allocated is what tensors occupy. Reserved is what PyTorch has asked the GPU for, and what counts.
# - When a request fails, the allocator gives its cache back and asks again: a retry. It is silent and slow.
# - As the batch grows, training fits, then retries, then runs out of memory, in this order.
# - "Just below out of memory" lies among the retries. Take the fastest batch size without a retry.
# - `Memory_Maximizer` shows the counter on all ranks. `find_batch_size` searches with it.
# - Expandable segments move the zone up. They do not remove it.
#
# ## Next
#
# Here the strategy was ZeRO-2. In [lesson 6](06_sharding_strategies.ipynb) you compare the sharding
# strategies: what each of them keeps, and what it sends.
#
# [← lesson 4](04_backward_prefetch.ipynb) · [lesson 6 →](06_sharding_strategies.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def percent_more(batch, seconds, other_batch, other_seconds):
    return 100 * ((batch / seconds) / (other_batch / other_seconds) - 1)


lesson.check(percent_more, gains, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def segment_mib(tensor_mib):
    if tensor_mib <= 1:
        return 2
    if tensor_mib < 10:
        return 20
    return int(-(-tensor_mib // 2) * 2)  # rounded up


for (mib,), asked in segments.items():      # the simulated allocator agrees
    with record_allocations() as trace:
        tensor = torch.empty(int(mib * MIB), dtype=torch.uint8)
    assert simulate_allocator(trace).reserved == [asked * MIB]
lesson.check(segment_mib, segments, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def best_batch_size(*trials):
    return max((size / seconds, size) for size, seconds, retries in trials if retries == 0)[1]


lesson.check(best_batch_size, trials, strict=True)

# %% [markdown]
# # 11 · The rate limiter
#
# The CPU tells the GPU what to do, and does not wait until it is done. So it can run far ahead, and reserve
# memory for layers whose turn is long in coming. FSDP1 has a brake against that: `limit_all_gathers`. In this
# lesson you watch it at work, replay what it prevents, and see why `fully_shard` has no such option.

# %% [markdown] tags=["card"]
# learn:
# - what the CPU thread runs ahead of, and why that takes memory
# - the queue behind `limit_all_gathers`, event by event
# - why two all-gathers in flight are enough
# - why FSDP2 needs no limiter
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a quarter of a minute to run on 2 cores (AMD EPYC) · 15 minutes to read
# video: '[Rate limiter](https://www.loom.com/share/903330e463334f12912a31c333708960), 2022. 4 minutes.
#   Since then: the limiter is on by default in FSDP1, and gone in FSDP2.'

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## The idea
#
# A line of PyTorch code on a GPU does not compute. It *enqueues* a kernel on a **stream**, a queue that the
# GPU works off in order, and returns at once. FSDP uses several streams, among them one for computation and
# one for all-gathers. What waits for what is settled on the GPU.
#
# Memory is different. When Python asks for a tensor, the allocator hands out a block *now*, although the
# kernel that fills it will run later. So the question of this lesson is: **how many units have their memory
# already, while the GPU still computes with the first?**
#
# No GPU is needed to follow the bookkeeping. A **replay** is enough: a calculation of what would start
# when, from four numbers that we choose. It is a simulation, not a measurement. Time is counted in
# computations of one unit.

# %%
from dataclasses import dataclass


@dataclass
class Replay:
    """When each unit of a forward pass got its memory, was gathered, and was computed with."""

    memory: list    # the CPU issues the all-gather, and the allocator hands out the block
    gather: list    # (start, end) on the stream of all-gathers
    compute: list   # (start, end) on the stream of computation

    @property
    def seconds(self):
        return self.compute[-1][1]

    def alive(self):
        """How many units have memory when each unit gets its own? It is free again when compute ends."""
        ends = [end for _, end in self.compute]
        return [unit + 1 - sum(end <= now for end in ends[:unit]) for unit, now in enumerate(self.memory)]


def replay(units=8, *, limit=None, compute_s=1.0, gather_s=0.6, issue_s=0.05):
    """A forward pass in which the CPU takes `issue_s` to issue the work of one unit."""
    cpu = gathered = computed = 0.0
    result = Replay([], [], [])
    for unit in range(units):
        if limit is not None and unit >= limit:
            cpu = max(cpu, result.compute[unit - limit][1])     # the brake: wait for its memory
        result.memory.append(cpu)
        cpu += issue_s
        start = max(cpu, gathered)                              # one all-gather after the other
        gathered = start + gather_s
        result.gather.append((start, gathered))
        start = max(gathered, computed)                         # a computation waits for its own all-gather
        computed = start + compute_s
        result.compute.append((start, computed))
    return result


free = replay()
print("units that hold memory, each time one more gets some:", free.alive())
assert free.alive() == list(range(1, 9))

# %% [markdown]
# All eight! The CPU has issued all its work within 0.4 units of time, before the first computation is over.
# By then every unit has its memory: the full parameters of the whole model are allocated on each rank.
# (Gradients and the optimizer's state stay sharded.)
#
# ## Predict
#
# Now with a brake: before the CPU issues an all-gather, it waits until at most one other unit still holds
# memory. How many units hold memory at once? And how much longer does the forward pass take?
#
# <details><summary>Answer</summary>
#
# Two: the one that computes, and the next one, whose all-gather runs at the same time. It takes no longer at
# all, as long as an all-gather fits into the time of one computation. The cells below show both.
#
# </details>

# %% tags=["replay"]
limited = replay(limit=2)
print("without limit:", max(free.alive()), f"units alive, {free.seconds:.2f} units of time")
print("limit of two: ", max(limited.alive()), f"units alive, {limited.seconds:.2f} units of time")
assert max(limited.alive()) == 2
assert abs(limited.seconds - free.seconds) < 1e-9

# %% jupyter={"source_hidden": true}
def timelines(replays):
    fig, panels = plots.figure(len(replays), width=9.6, height=2.8)
    for axes, (title, run) in zip(panels, replays.items()):
        for unit in range(len(run.memory)):
            color = plots.RANK_COLORS[unit]
            held = (run.memory[unit], run.compute[unit][1])
            for row, (start, end) in enumerate([run.gather[unit], run.compute[unit]]):
                axes.barh(row, end - start, left=start, height=0.8, color=color, edgecolor=plots.CARD)
            axes.barh(2.2 + 0.35 * unit, held[1] - held[0], left=held[0], height=0.28, color=color)
        axes.set(title=title, ylim=(5.2, -0.6), xlim=(0, 1.02 * run.seconds), xlabel="time, in computations")
        axes.set_yticks([0, 1, 3.4], ["all-gather", "compute", "memory held"] if axes is panels[0] else [])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return plots.show(fig, alt="Replayed streams and the time that each unit holds memory.")


timelines({"replay without limit": free, "replay with a limit of two": limited})

# %% [markdown]
# One colour for each unit. On the left all eight bars of memory begin almost at once. On the right each
# begins when the unit two before it is done, like stairs. The two upper rows are the work. Computation ends
# at the same time on both sides.
#
# ## Why two?

# %%
for limit in (1, 2, 3, 4):
    run = replay(limit=limit)
    print(f"limit {limit}: {max(run.alive())} units alive, {run.seconds:.2f} units of time")
assert replay(limit=1).seconds > 1.5 * replay(limit=2).seconds
assert replay(limit=3).seconds == replay(limit=2).seconds

# %% [markdown]
# With one, nothing overlaps: gather, compute, gather, compute. Two is enough for one all-gather to run behind
# one computation. Three takes more memory and gains nothing here. In PyTorch's source the two is called
# "empirically chosen" (`_FreeEventQueue` in `torch/distributed/fsdp/_limiter_utils.py`).
#
# The brake is not always free. It holds the *CPU*, so the next all-gather starts later by what the CPU
# needs to issue it. If an all-gather takes just as long as a computation, that shows.

# %%
for gather_s in (0.6, 0.9, 1.0, 1.3):
    ratio = replay(limit=2, gather_s=gather_s).seconds / replay(gather_s=gather_s).seconds
    print(f"all-gather of {gather_s:.2f} computations: {ratio - 1:+.1%} of time with the limit")
slowest = replay(limit=2, gather_s=1.0).seconds / replay(gather_s=1.0).seconds
assert 1.01 < slowest < 1.05

# %% [markdown]
# Nothing, or 1.7%. These percentages are the replay's, from numbers that we chose. What a GPU says will
# stand in the table at the end, once it is recorded.
#
# ## The real queue
#
# Now PyTorch itself. Before each all-gather, FSDP1 asks a queue whether it has to wait (`_unshard` in
# `_runtime_utils.py`). After a unit is freed, it puts an **event** into the queue (`_reshard`). An event is a
# mark in a stream that the CPU can wait for. We listen to both, and to the all-gathers.

# %%
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS


class Listener(TorchDispatchMode):
    """Notes, in the order in which the CPU comes to them: waits, all-gathers, and units that are freed."""

    def __init__(self, queue):
        super().__init__()
        self.log, self.freed = [], []
        self.dequeue, self.enqueue = queue.dequeue_if_needed, queue.enqueue
        queue.dequeue_if_needed, queue.enqueue = self.on_dequeue, self.on_enqueue

    def on_dequeue(self):
        event = self.dequeue()
        if event is not None:
            self.log.append(f"wait({self.freed.index(event)})")
        return event

    def on_enqueue(self, event):
        self.log.append(f"free({len(self.freed)})")
        self.freed.append(event)
        self.enqueue(event)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ALL_GATHERS:
            self.log.append("gather")
        return func(*args, **(kwargs or {}))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).to(device)


def fsdp1(limit):
    layers = [FSDP(layer, limit_all_gathers=limit, device_id=device) for layer in build()]
    return FSDP(nn.Sequential(*layers), limit_all_gathers=limit, device_id=device)


def batch(step, rank=rank, world=world):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 32, generator=generator)                # f32[24, 32]
    return x.chunk(world)[rank].to(device)                      # f32[24 / world, 32]


model = fsdp1(limit=True)
listener = Listener(model._free_event_queue)                    # the root's queue serves all its units
with listener:
    output = model(batch(0))
forward = list(listener.log)
print(*forward, sep="\n")

# %% [markdown]
# Read it from top to bottom. The first two all-gathers go out without waiting. From the third on, each one
# waits for the unit that was freed two before it. So in forward at most two are in flight.
#
# `wait(0)` is a call of `event.synchronize()`. On a GPU it blocks the CPU until the computation stream has
# passed that mark. On the CPU there are no streams, the event is a `torch.cpu.Event`, and its `synchronize`
# returns at once.

# %% tags=["queue"]
# %%ranks
assert forward.index("wait(0)") == 4
assert forward == ["gather", "free(0)", "gather", "free(1)"] + [
    line for unit in range(2, 6) for line in (f"wait({unit - 2})", "gather", f"free({unit})")
]
event = type(listener.freed[0])
print(f"events are of the type {event.__module__}.{event.__qualname__}")
print("in flight at most:", model._free_event_queue._max_num_inflight_all_gathers)

# %% [markdown]
# Backward goes on with the same queue, in which forward has left two events. Backward prefetches: it
# gathers the next unit before the present one is freed (lesson 4). So after one wait two all-gathers go
# out. From then on there is a wait before each.

# %%
# %%ranks
with listener:
    output.sum().backward()
print(*listener.log[len(forward) :], sep="\n")
held, most = 0, {"forward": 0, "backward": 0}
for number, line in enumerate(listener.log):
    phase = "forward" if number < len(forward) else "backward"
    held += (line == "gather") - line.startswith("wait")
    most[phase] = max(most[phase], held)
print("gathered, and their end not yet waited for, at most:", most)
assert most == {"forward": 2, "backward": 3}

# %% [markdown]
# The cell counts what the CPU has not *waited* for: a GPU that lags may still hold that memory. In forward
# that makes two units. In backward it can be three, for the next unit is gathered before the present one is
# freed. Without a limit it could be all of them.

# %% [markdown]
# ## Without the limiter
#
# What is different when it is off?

# %%
# %%ranks
unlimited = fsdp1(limit=False)
silent = Listener(unlimited._free_event_queue)
with silent:
    unlimited(batch(0)).sum().backward()
assert set(silent.log) == {"gather"}
assert silent.log.count("gather") == listener.log.count("gather")
print(f"{len(silent.log)} all_gathers, as with the limiter; no waits, and no events to wait for")

# %% [markdown]
# The same all-gathers, and nobody counts what is free. On a CPU it makes no other difference, because a CPU
# computes each line before it comes to the next: it cannot run ahead of itself. In the order of the
# program, FSDP1 holds as much with the limiter as without it. FSDP2's full parameters take as much, too; the
# buffers that it gathers into come on top:

# %% tags=["order"]
# %%ranks
from torch.distributed.fsdp import fully_shard

from fsdp_utils.lessons.meter import Meter


def fsdp2():
    model = build()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


unit_bytes = sum(p.nbytes for p in nn.Linear(32, 32).parameters())
peaks = {}
models = {"FSDP1, limit": fsdp1(True), "FSDP1, no limit": fsdp1(False), "FSDP2": fsdp2()}
for name, sharded in models.items():
    with Meter(sharded.parameters()) as meter:
        sharded(batch(0)).sum().backward()
    full, buffers = meter.peak_whole_bytes / unit_bytes, meter.peak_gather_bytes / unit_bytes
    peaks[name] = round(full, 1), round(buffers, 1)
    print(f"{name:16} {full:.1f} units of full parameters at the peak, {buffers:.1f} with buffers")
assert peaks["FSDP1, limit"] == peaks["FSDP1, no limit"]
assert max(full for full, _ in peaks.values()) < 2.2
assert 2.9 < peaks["FSDP2"][1] < 3.3

# %% [markdown]
# Two units of full parameters each time, at most. So the order of the program is not the problem. The problem
# is that on a GPU, FSDP1's memory does *not* follow the order of the program.
#
# ## Why FSDP1's memory lags behind
#
# A unit's memory is handed out for the stream of all-gathers and used by the stream of computation. When
# Python frees it, the computation may not have run yet. FSDP1 marks the block with `record_stream`
# (`_free_unsharded_flat_param` in `_flat_param.py`): the allocator may hand it out again only after the GPU
# has passed that point. If the CPU is ahead, the GPU has not passed it, and the next all-gather gets
# *another* block. That is the replay on the left. The limiter makes the CPU wait until the block is free.
#
# When the memory is full, the allocator frees its cache, with the GPU standing still, and tries again: a
# `cudaMalloc` retry (lesson 5). So a limiter that makes the CPU wait a little can make training faster.
#
# ## Why FSDP2 needs none
#
# `fully_shard` takes another way, without `record_stream` and without making the CPU wait:
#
# - An all-gather writes into a buffer that belongs to a stream of FSDP's own. It is then copied out into
#   the parameters, which belong to the stream of computation (`foreach_all_gather_copy_out`). So each block
#   is freed and handed out again *within one stream*, where order is guaranteed by the queue itself.
# - Before the buffer is used again, the streams of the all-gathers (one copies the shards in, one sends)
#   wait for the copy, on the GPU: `_wait_all_gather_streams_on_event`, which calls `wait_event`. One stream
#   waits for another. The CPU goes on.
#
# So the allocator can hand out a block in the order of the program, however far ahead the CPU is. What the
# cell above has counted in that order is therefore what FSDP2 holds on a GPU. PyTorch's
# [documentation](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and
# [RFC](https://github.com/pytorch/pytorch/issues/114299) tell the design. The functions named here say so
# themselves:

# %%
# %%ranks
import inspect

from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

assert "record_stream" in inspect.getsource(FlatParamHandle._free_unsharded_flat_param)
for module in (_fsdp_collectives, _fsdp_param, _fsdp_param_group):
    assert "record_stream(" not in inspect.getsource(module)
group, context = _fsdp_param_group.FSDPParamGroup, _fsdp_param_group.FSDPCommContext
wait = getattr(group, "_wait_all_gather_streams_on_event", None) or context.wait_all_gather_streams_on_event
assert "wait_event" in inspect.getsource(wait)                  # the context's in later torch

default = inspect.signature(FSDP).parameters["limit_all_gathers"].default
print("FSDP1: limit_all_gathers is", default, "by default")
options = inspect.signature(fully_shard).parameters
print("FSDP2: limit_all_gathers is an option:", "limit_all_gathers" in options)

# %% [markdown]
# ## Proof
#
# A limiter decides when something happens, never what. Five steps, against one process with all samples.

# %% tags=["equality"]
# %%ranks
def train(model, rank=rank, world=world):
    """The loss of each step, as the mean over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = torch.zeros(5, device=device)
    for step in range(5):
        x = batch(step, rank, world)
        loss = F.mse_loss(model(x), x)                          # learn to return the input
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist()


alone = train(build(), rank=0, world=1)
ways = {"one process": alone, "FSDP1, limit": train(fsdp1(True)), "FSDP1, no limit": train(fsdp1(False))}
ways["FSDP2"] = train(fsdp2())
for name, losses in ways.items():
    print(f"{name:16} step 1: {losses[0]:.4f}   step 5: {losses[-1]:.4f}")
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
assert ways["FSDP1, limit"] == ways["FSDP1, no limit"]

# %% [markdown]
# With and without the limiter the losses are equal to the last bit.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
most = ranks.get("most")[0]
lesson.claims(
    11,
    {
        "limiter-two": f"In forward, yes: {most['forward']}. In backward {most['backward']}: the next unit "
        "is gathered before the present one is freed.",
        "limiter-slowdown": f"In the replay between nothing and {slowest - 1:.1%}, for the times that we "
        "chose. Seconds are for a GPU to say.",
        "limiter-memory": f"In the replay {max(limited.alive())} of {len(free.memory)} units hold memory "
        f"instead of {max(free.alive())}. How much of all memory that is depends on the model.",
        "limiter-reinvested": "Not for a CPU to say. [Lesson 2](02_activation_checkpointing.ipynb) shows "
        "what freed memory buys.",
        "limiter-retries": "Not for a CPU to say: retries are the CUDA allocator's.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Who waits for whom?** All-gathers are counted from 0. For which unit's memory does all-gather number
# `index` wait, with a limit? -1 if it does not wait.

# %%
def waits_for(index, limit):
    return None  # your line here


waits = {(0, 2): -1, (1, 2): -1, (2, 2): 0, (7, 2): 5, (7, 3): 4}
lesson.check(waits_for, waits)

# %% [markdown]
# **2. In GiB.** A model has `blocks` blocks of `millions` million parameters each, gathered in bf16. The CPU
# is far ahead. How many GiB do the gathered blocks hold? `limit` may be None.

# %%
def gathered_gib(blocks, millions, limit):
    return None  # your line here


gathered = {(32, 202, None): 12.040138, (32, 202, 2): 0.752509, (1, 202, 2): 0.376254}
lesson.check(gathered_gib, gathered)

# %% [markdown]
# **3. A slow CPU.** The replay's CPU needs 0.05 to issue a unit. Small kernels can make it slower than the
# GPU. How many of eight units hold memory at the most *without* a limit, if issuing one takes `issue_s`?

# %%
def alive_at_most(issue_s):
    return None  # your line here


slow_cpus = {(0.05,): 8, (0.5,): 6, (2.0,): 2}
lesson.check(alive_at_most, slow_cpus)

# %% [markdown]
# ## Summary
#
# - The CPU enqueues and goes on. Memory is handed out when it enqueues, not when the GPU computes.
# - FSDP1 frees with `record_stream`: a block comes back only after the GPU has passed that point.
# - `limit_all_gathers` makes the CPU wait for the unit freed two before. It is on by default. Leave it on.
# - Two are enough, because one all-gather at a time has to run behind one computation.
# - FSDP2 keeps each block within one stream and lets streams wait for each other, so it needs no limiter.
#
# ## Next
#
# So far each rank began with the whole model, and sharded it then. In
# [lesson 12](12_a_model_too_big_for_one_rank.ipynb) the model does not fit on one rank at all.
#
# [← lesson 10](10_end_to_end.ipynb) · [lesson 12 →](12_a_model_too_big_for_one_rank.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def waits_for(index, limit):
    return max(index - limit, -1)


lesson.check(waits_for, waits, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def gathered_gib(blocks, millions, limit):
    return min(blocks, limit or blocks) * millions * 1e6 * 2 / 2**30


lesson.check(gathered_gib, gathered, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def alive_at_most(issue_s):
    return max(replay(issue_s=issue_s).alive())


lesson.check(alive_at_most, slow_cpus, strict=True)

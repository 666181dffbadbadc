# %% [markdown]
# # 11 · The rate limiter
#
# The CPU tells the GPU what to do, and does not wait until it is done. So the CPU can run far ahead, and
# allocate memory for layers that the GPU will reach much later. FSDP1 limits this with `limit_all_gathers`.
# In this lesson you watch the limiter at work, write one yourself, and see why `fully_shard` (FSDP2) has no
# such option.

# %% [markdown] tags=["card"]
# learn:
# - what the CPU thread runs ahead of, and why that takes memory
# - the queue behind `limit_all_gathers`, event by event
# - why a limit of two is enough
# - when the allocator may hand out a block again, and why FSDP2 needs no limiter
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a quarter of a minute to run on 2 cores (AMD EPYC) · 20 minutes to read
# video: '[Rate limiter](https://www.loom.com/share/903330e463334f12912a31c333708960), 2022. 4 minutes.
#   Since then: the limiter is on by default in FSDP1, and gone in FSDP2.'

# %% [markdown]
# **The question of this lesson:** while the GPU computes with the first layer, for how many layers has the
# CPU allocated memory?

# %% jupyter={"source_hidden": true}
from dataclasses import dataclass

from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks


@dataclass
class Replay:
    """When each unit of a forward pass got its memory, was gathered, and was computed with."""

    memory: list    # when the CPU issues the all-gather, and the allocator hands out the memory
    gather: list    # (start, end) on the stream of all-gathers
    compute: list   # (start, end) on the stream of computation

    @property
    def time(self):
        return self.compute[-1][1]

    def most_alive(self):
        """The most units that have memory at once. A unit's memory is free when its computation ends."""
        ends = [end for _, end in self.compute]
        return max(unit + 1 - sum(end <= now for end in ends[:unit]) for unit, now in enumerate(self.memory))


def timelines(replays):
    """One panel for each replay: the two streams, and below them the memory that each unit holds."""
    fig, panels = plots.figure(len(replays), width=min(9.6, 3.9 * len(replays) + 1.8), height=2.8)
    for axes, (title, run) in zip(panels, replays.items()):
        for unit in range(len(run.memory)):
            color = plots.RANK_COLORS[unit]
            held = (run.memory[unit], run.compute[unit][1])
            for row, (start, end) in enumerate([run.gather[unit], run.compute[unit]]):
                axes.barh(row, end - start, left=start, height=0.8, color=color, edgecolor=plots.CARD)
            axes.barh(2.2 + 0.35 * unit, held[1] - held[0], left=held[0], height=0.28, color=color)
        low = 2.2 + 0.35 * len(run.memory)
        axes.set(title=title, ylim=(low, -0.6), xlim=(0, 1.02 * run.time), xlabel="time, in computations")
        names = ["all-gather", "compute", "memory held"] if axes is panels[0] else []
        axes.set_yticks([0, 1, (2.2 + low) / 2 - 0.2], names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return plots.show(fig, alt="Streams of a GPU over time, and the time that each unit holds memory.")


drawn = Replay(
    memory=[0.05 * unit for unit in range(4)],
    gather=[(0.05 + 0.6 * unit, 0.65 + 0.6 * unit) for unit in range(4)],
    compute=[(0.65 + unit, 1.65 + unit) for unit in range(4)],
)
timelines({"four units, no limit: a drawing": drawn})

# %% [markdown]
# The drawing shows a forward pass on one GPU. Each colour is a **unit**: a layer whose parameters FSDP
# gathers together. The two upper rows are the work of the GPU: it gathers one unit after the other, and
# computes with each unit when that unit is complete. The rows below show from when to when each unit's full
# parameters hold memory. All four begin at nearly the same time, although the GPU computes with one unit
# at a time.
#
# ## In your own code
#
# With FSDP2 there is nothing to set. With FSDP1, leave `limit_all_gathers=True`, which is the default. What
# you can do is look for the damage. When the GPU's memory is full, the allocator waits for the GPU, gives
# unused memory back, and tries again. PyTorch counts these **retries**. The script below prints the counter;
# start it with `torchrun --nproc-per-node 4 train.py`. Without a GPU there is no such allocator, and the
# script prints `no GPU` in place of the counter.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# torch.manual_seed(0)
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh)                      # no limit_all_gathers here: see below
# optimizer = torch.optim.AdamW(model.parameters())
# for step in range(5):
#     loss = model(torch.randn(32, 256, device=device)).square().mean()
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     retries = torch.cuda.memory_stats()["num_alloc_retries"] if device == "cuda" else "no GPU"
#     print(f"step {step + 1}: loss {loss.item():.4f}, retries so far: {retries}")
# dist.destroy_process_group()
# ```
#
# A counter that still grows after the first steps says that memory is too tight.
# [Lesson 5](05_maximising_throughput.ipynb) shows what retries cost.
#
# ## Streams and memory
#
# On a GPU, a line of PyTorch code does not compute. It *enqueues* a kernel on a **stream**, a queue that the
# GPU works off in order, and returns at once. FSDP uses several streams, among them one for computation and
# one for all-gathers. One stream can wait for another; the CPU does not have to.
#
# Memory is different. When Python asks for a tensor, the allocator hands out memory *now*, although the
# kernel that fills the tensor runs later.
#
# No GPU is needed to follow this. The cell below is a **replay**: it computes what would start when. It is a
# simulation, not a measurement. Time is counted in computations of one unit, and the other times are chosen:
# an all-gather takes 0.6, and the CPU takes 0.05 to issue the work of a unit.

# %%
def replay(waits, *, gather_s=0.6, issue_s=0.05):
    """A forward pass. waits: for each unit, the unit whose end its all-gather waits for, or None."""
    cpu = gathered = computed = 0.0
    run = Replay([], [], [])
    for wait in waits:
        if wait is not None:
            cpu = max(cpu, run.compute[wait][1])                # the limiter
        run.memory.append(cpu)                                  # memory is handed out when the CPU asks
        cpu += issue_s
        start = max(cpu, gathered)                              # one all-gather after the other
        gathered = start + gather_s
        run.gather.append((start, gathered))
        start = max(gathered, computed)                         # a unit is computed with when it is complete
        computed = start + 1.0
        run.compute.append((start, computed))
    return run


# %% [markdown]
# Without a limiter the CPU waits for nothing: `replay([None] * 8)`.
#
# **Predict before you go on.** There are eight units. How many hold memory at once? Now let the CPU wait
# before each all-gather until at most one other unit holds memory. How many are there then, and how much
# longer does the forward pass take?
#
# <details><summary>Answer</summary>
#
# Without a limiter all eight. With it two: the unit that computes, and the next one, whose all-gather runs at
# the same time. With the times above the forward pass takes no longer, because an all-gather is shorter than
# a computation. The next cells show both.
#
# </details>

# %% tags=["replay"]
def limit_of(n, units=8):
    """Before the all-gather of unit n, the CPU waits for unit 0; before unit n + 1 for unit 1; and so on."""
    return [unit - n if unit >= n else None for unit in range(units)]


free, limited = replay([None] * 8), replay(limit_of(2))

# %% jupyter={"source_hidden": true}
timelines({"replay without limit": free, "replay with a limit of two": limited})

# %% [markdown]
# On the left all eight bars of memory begin almost at once. The CPU has issued all work before the first
# computation is over, and by then the full parameters of the whole model are allocated. On the right the
# third bar begins when the first unit's computation ends, the fourth when the second's ends, and so on: at no
# time are there more than two. Computation ends at the same time on both sides.

# %% tags=["check"]
assert (free.most_alive(), limited.most_alive()) == (8, 2)
assert free.memory[-1] + 0.05 < free.compute[0][1]
assert abs(limited.time - free.time) < 1e-9
print("Checked: eight units hold memory without a limit, two with it; both take the same time.")

# %% [markdown]
# ## Why two?
#
# Here are other limits, in the same replay.

# %%
runs = {"no limit": free} | {limit: replay(limit_of(limit)) for limit in (1, 2, 3, 4)}

# %% jupyter={"source_hidden": true}
Table(
    ["limit", "units that hold memory, at most", "time, in computations"],
    [[str(limit), run.most_alive(), f"{run.time:.2f}"] for limit, run in runs.items()],
)

# %% [markdown]
# With a limit of one nothing overlaps: gather, compute, gather, compute. Two is enough for one all-gather to
# run beside one computation. Three takes more memory and gains nothing here. PyTorch's source has the same
# number, "empirically chosen" (`_FreeEventQueue` in `torch/distributed/fsdp/_limiter_utils.py`).
#
# The limiter is not always free. It holds the *CPU*, so the next all-gather starts later by the time that
# the CPU takes to issue it. When does that cost time? The next figure tries all-gathers of different lengths,
# with a CPU that takes 0.05 to issue a unit, and with a slower one that takes 0.2.

# %%
def added(gather_s, issue_s):
    """What the limit of two adds to the time of the forward pass, as a share of it."""
    times = {"gather_s": gather_s, "issue_s": issue_s}
    return replay(limit_of(2), **times).time / replay([None] * 8, **times).time - 1


lengths = [step / 50 for step in range(10, 101)]
longer = {issue_s: [added(gather_s, issue_s) for gather_s in lengths] for issue_s in (0.05, 0.2)}

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=6.6, height=2.5)
for index, (issue_s, shares) in enumerate(longer.items()):
    label = f"CPU: {issue_s} for a unit"
    axes.plot(lengths, [100 * share for share in shares], color=plots.RANK_COLORS[index], label=label)
axes.set(xlabel="an all-gather takes, in computations", ylabel="time added, %", ylim=(-0.3, 9))
axes.legend()
plots.show(fig, alt="What a limit of two adds to a forward pass: nothing, except near equal lengths.")

# %% [markdown]
# Only where an all-gather takes about as long as a computation. If it is much shorter, its late start is
# hidden behind the computation; if it is much longer, the CPU's wait is over before the link is free. These
# percentages come from times that we chose; a GPU has others.

# %% tags=["check"]
assert runs[1].time > 1.5 * runs[2].time
assert runs[2].time == runs[3].time == runs[4].time == free.time
slowest = {issue_s: max(shares) for issue_s, shares in longer.items()}
assert 0.016 < slowest[0.05] < 0.018
assert 0.064 < slowest[0.2] < 0.067
for shares in longer.values():
    assert max(share for length, share in zip(lengths, shares) if abs(length - 1) > 0.4) < 1e-9
print("Checked: a limit of one takes half as long again, three and four gain nothing.")

# %% [markdown]
# ## The real queue
#
# Now PyTorch's own limiter, on the ranks.

# %%
ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import inspect
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_utils.lessons.meter import ALL_GATHERS, Meter

os.environ["KINETO_LOG_LEVEL"] = "99"                 # else the profiler prints when it starts and stops
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# The model is six equal layers, and each layer is a unit.

# %%
# %%ranks
def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).to(device)


def fsdp1(limit):
    layers = [FSDP(layer, limit_all_gathers=limit, device_id=device) for layer in build()]
    return FSDP(nn.Sequential(*layers), limit_all_gathers=limit, device_id=device)


def batch(step, rank=rank, world=world):
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(step))      # f32[24, 32]
    return x.chunk(world)[rank].to(device)                                      # f32[24 / world, 32]


# %% [markdown]
# FSDP1 has one queue for all units of a model. After FSDP1 has freed a unit, it puts an **event** into the
# queue (`_reshard` in `_runtime_utils.py`). An event is a mark in a stream that the CPU can wait for. Before
# each all-gather, FSDP1 asks the queue for an event to wait for (`_unshard`). That is the whole limiter.
#
# A folded cell defines `Listener`. It notes, in the order in which the CPU comes to them, the all-gathers,
# the units that are freed, and the events that are waited for.

# %% jupyter={"source_hidden": true}
# %%ranks
class Marked:
    """An event with the number of the unit that was freed before it; notes when somebody waits for it."""

    def __init__(self, event, number, log):
        self.event, self.number, self.log = event, number, log

    def synchronize(self):
        self.log.append(("wait", self.number))
        self.event.synchronize()


class Listener(TorchDispatchMode):
    """Notes all-gathers, frees and waits, in the order of the program."""

    def __init__(self, queue):
        super().__init__()
        self.log, self.events = [], []
        self.enqueue, queue.enqueue = queue.enqueue, self.on_enqueue

    def on_enqueue(self, event):
        self.log.append(("free", len(self.events)))
        self.events.append(event)
        self.enqueue(Marked(event, len(self.events) - 1, self.log))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ALL_GATHERS:
            self.log.append(("gather", sum(what == "gather" for what, _ in self.log)))
        return func(*args, **(kwargs or {}))


# %%
# %%ranks
model = fsdp1(limit=True)
listener = Listener(model._free_event_queue)                    # the root's queue serves all its units
with listener:
    output = model(batch(0))
forward = list(listener.log)

# %% jupyter={"source_hidden": true}
def by_gather(log):
    """One row for each all-gather: what is waited for before it, and freed before the next one."""
    rows = []
    waited = []
    for what, number in log:
        if what == "wait":
            waited.append(number)
        elif what == "gather":
            rows.append([str(number), ", ".join(f"event {n}" for n in waited) or "-", []])
            waited = []
        elif rows:
            rows[-1][2].append(number)
    return [[number, wait, ", ".join(f"event {n}" for n in freed) or "-"] for number, wait, freed in rows]


Table(
    ["all-gather", "before it the CPU waits for", "after it: a unit is freed, and puts into the queue"],
    by_gather(ranks.get("forward")[0]),
)

# %% [markdown]
# Read it row by row. The first two all-gathers go out without waiting. From the third on, each one waits for
# the unit that was freed two before it. This is the limit of two from the replay. (Only a unit that is freed
# puts an event into the queue. With `SHARD_GRAD_OP` forward frees nothing, so the limiter cannot bound what
# forward gathers.)
#
# To wait is a call of `event.synchronize()`. On a GPU it blocks the CPU until the computation stream has
# passed the mark. On the CPU there are no streams to wait for: the event is a `torch.cpu.Event`, and its
# `synchronize` returns at once.
#
# ## Two, or three?
#
# Backward, and then the next step, go on with the same queue. How many units may hold memory there? Count
# those that are gathered and whose event the CPU has not yet waited for: the GPU may lag behind, so it may
# still use them.

# %%
# %%ranks
with listener:
    output.sum().backward()                                     # the backward pass of step 1
    model(batch(1)).sum().backward()                            # step 2

held, after_gather = 0, []
for what, _ in listener.log:
    held += (what == "gather") - (what == "wait")
    if what == "gather":
        after_gather.append(held)

# %% jupyter={"source_hidden": true}
after_gather = ranks.get("after_gather")[0]
passes = ["step 1: forward", "backward", "step 2: forward", "backward"]
fig, (axes,) = plots.figure(width=7.6, height=2.3)
for number, units in enumerate(after_gather):
    axes.bar(number, units, width=0.8, color=plots.RANK_COLORS[number // 6])
for index, name in enumerate(passes):
    axes.text(6 * index + 2.5, 3.35, name, ha="center", fontsize=9)
axes.set(xlabel="all-gather", ylabel="units that\nmay hold memory", ylim=(0, 3.9), yticks=range(4))
axes.set_xticks(range(0, 24, 6))
plots.show(fig, alt="Units that may hold memory after each all-gather: two in the first forward, then three.")

# %% [markdown]
# Two in the first forward pass, and three from the second all-gather of backward on. In backward, FSDP1 by
# default gathers the next unit before it frees the present one ([lesson 4](04_backward_prefetch.ipynb)).
# When backward begins there are two events in the queue. The first all-gather takes one, the second
# all-gather finds a single event, which is fewer than the limit, and goes out at once. After that each
# all-gather takes one event and each freed unit adds one, so the number stays at three, in the forward pass
# of the next step too. Without a limit it could be all six.

# %% tags=["check", "queue"]
# %%ranks
assert forward == [("gather", 0), ("free", 0), ("gather", 1), ("free", 1)] + [
    event for unit in range(2, 6) for event in (("wait", unit - 2), ("gather", unit), ("free", unit))
]
assert [what for what, _ in listener.log[len(forward) :][:4]] == ["wait", "gather", "gather", "free"]
assert after_gather == [1, 2, 2, 2, 2, 2, 2] + [3] * 17
assert model._free_event_queue._max_num_inflight_all_gathers == 2
assert on_gpu or type(listener.events[0]) is torch.cpu.Event
print("Checked: the events of the first forward pass; two units at most there, three from backward on.")

# %% [markdown]
# ## Your turn 1 · A limiter
#
# Write the queue. FSDP1 calls `enqueue(event)` after it has freed a unit, and `dequeue_if_needed()` before
# each all-gather. What `dequeue_if_needed` returns is waited for; with `None` FSDP1 goes on at once. At most
# `limit` units may hold memory, and the CPU should wait no longer than that takes.
#
# A folded cell replaces FSDP1's queue with yours, runs a forward pass on the ranks with limits of two and of
# three, and notes the waits. Edit the next cell, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# An event in the list stands for a unit that was freed in the program and may still be in use on the GPU.
# The all-gather that comes next adds one unit. Which event marks the end of the unit that the GPU finishes
# first?
#
# </details>

# %% tags=["exercise"]
# %%ranks
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):                   # a unit was freed
        pass                                    # your line here

    def dequeue_if_needed(self):                # an all-gather comes next
        return None                             # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def waits_of(log):
    """For each all-gather, the last unit that the CPU has waited for since the all-gather before."""
    waits, last = [], None
    for what, unit in log:
        if what == "wait":
            last = unit if last is None else max(last, unit)
        elif what == "gather":
            waits.append(last)
            last = None
    return waits


def count(waits):
    """The most units that may hold memory, and the all-gathers that need not wait for the unit before."""
    done, alive, beside = -1, 0, 0              # done: the last unit that the CPU knows to be over
    for unit, wait in enumerate(waits):
        done = done if wait is None else max(done, wait)
        alive = max(alive, unit - done)
        beside += unit > 0 and done < unit - 1
    return alive, beside


def score_queue(kind):
    """Forward passes with the reader's queue."""
    waits = {}
    for limit in (2, 3):
        model = fsdp1(limit=True)
        queue = model._free_event_queue = kind(limit)
        with Listener(queue) as listener:
            model(batch(0))
        waits[limit] = waits_of(listener.log)
    (alive, beside), (alive_3, _) = count(waits[2]), count(waits[3])
    return {
        "units that may hold memory, limit of two": alive,
        "units that may hold memory, limit of three": alive_3,
        "all-gathers that can run beside a computation": beside,
        "waits": waits[2],
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_queue(MyQueue)",
    {
        "units that may hold memory, limit of two": exactly(
            2,
            otherwise="With a limit of two, the CPU should wait once `limit` events are in the queue, and "
            "each event should leave the queue when it is returned.",
        ),
        "units that may hold memory, limit of three": exactly(
            3, otherwise="The number of units should follow from `limit`: with three it should be three."
        ),
        "all-gathers that can run beside a computation": exactly(
            5,
            otherwise="Some all-gathers wait for the unit just before them, so nothing can run beside its "
            "computation: wait for the oldest event, and for one at a time.",
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events.pop(0) if len(self.events) >= self.limit else None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # waits for the newest
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events.pop() if len(self.events) >= self.limit else None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # one too late
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events.pop(0) if len(self.events) > self.limit else None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # does not know its limit
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events.pop(0) if len(self.events) >= 2 else None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # waits for each unit as soon as it is freed
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        event.synchronize()

    def dequeue_if_needed(self):
        return None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # the first event stays in the queue
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events[0] if len(self.events) >= self.limit else None

# %% tags=["wrong"] turn=1
# %%ranks
class MyQueue:                                  # collects, and never waits
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return None

# %% jupyter={"source_hidden": true}
shown = {"target": replay(run_solution(11, 1)[0]["waits"])}
if mine := yours(1, "waits"):
    shown["yours"] = replay(mine[0])
timelines(shown)

# %% [markdown]
# The figure replays the waits of the target, which is the run of the folded solution, with the times of the
# replay above. When your queue waits, run the cell with the figure again: your run appears beside the target.
#
# ## Without the limiter
#
# What changes on the CPU when the limiter is off? A CPU computes each line before it comes to the next, so it
# cannot run ahead of itself. In the *order of the program*, then, how much is gathered at once? The meter
# counts it, in units.

# %%
# %%ranks
def fsdp2():
    model = build()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


peaks = {}
models = {"FSDP1, limit": fsdp1(True), "FSDP1, no limit": fsdp1(False), "FSDP2": fsdp2()}
for name, sharded in models.items():
    with Meter(sharded.parameters()) as meter:
        sharded(batch(0)).sum().backward()
    peaks[name] = meter.all_gathers, meter.peak_whole_bytes, meter.peak_gather_bytes

# %% tags=["order"] jupyter={"source_hidden": true}
unit_bytes = 4 * (32 * 32 + 32)
Table(
    ["one step", "all-gathers", "units of full parameters at the peak", "with all-gather buffers"],
    [
        [name, gathers, f"{full / unit_bytes:.1f}", f"{buffers / unit_bytes:.1f}"]
        for name, (gathers, full, buffers) in ranks.get("peaks")[0].items()
    ],
    note="Buffers: those that FSDP2 gathers into, before it copies each parameter out of them.",
)

# %% [markdown]
# In the order of the program, FSDP1 holds at most two units of full parameters, with and without the limiter.
# FSDP2 has two at most as well, and three when its buffers are counted. So the program never asks for more.
# The problem is that on a GPU, FSDP1's memory does *not* follow the order of the program.

# %% tags=["check"]
# %%ranks
unit_bytes = sum(p.nbytes for p in nn.Linear(32, 32).parameters())
unlimited = fsdp1(limit=False)
with Listener(unlimited._free_event_queue) as silent:
    unlimited(batch(0)).sum().backward()
assert {what for what, _ in silent.log} == {"gather"}
assert peaks["FSDP1, limit"] == peaks["FSDP1, no limit"]
assert all(1.9 < full / unit_bytes < 2.2 for _, full, _ in peaks.values())
assert 2.9 < peaks["FSDP2"][2] / unit_bytes < 3.3
print("Checked: without the limiter no event is made; two units at the peak, three with FSDP2's buffers.")

# %% [markdown]
# ## Why FSDP1's memory lags behind
#
# The allocator's cache holds the memory of each stream in **blocks** of its own. A block that Python has
# freed may be handed out again to the *same* stream at once: the stream works in order, so the old use comes
# before the new one, however late the GPU is. For *another* stream there is no such order.
#
# FSDP1 allocates a unit's full parameters on the stream of the all-gathers, and computes with them on the
# stream of computation. When Python frees the unit, the computation may not have run yet. So FSDP1 marks the
# block with `record_stream` (`_free_unsharded_flat_param` in `_flat_param.py`): the allocator keeps the block
# back until the GPU has passed that point of the other stream. When the CPU is ahead, the next all-gather
# gets *another* block. FSDP2 arranges its memory in another way:

# %% jupyter={"source_hidden": true}
few = replay([None] * 4)
gathers, computes, done = [], [], 0.05              # FSDP2: the stream of all-gathers waits, not the CPU
for unit in range(4):
    start = max(done, computes[unit - 2][0]) if unit > 1 else done      # for the copy-out two units before
    done = start + 0.6
    gathers.append((start, done))
    begin = max(done, computes[-1][1] if computes else 0)
    computes.append((begin, begin + 1.0))

fig, panels = plots.figure(2, width=9.4, height=2.5)
for unit in range(4):
    color = plots.RANK_COLORS[unit]
    freed = few.memory[unit] + 0.05
    held = (few.memory[unit], few.compute[unit][1])
    panels[0].barh(unit, held[1] - held[0], left=held[0], height=0.7, color=color)
    panels[0].plot([freed, freed], [unit - 0.42, unit + 0.42], color=plots.INK, linewidth=1.5)
    held = (gathers[unit][0], computes[unit][0])                        # from copy-in to copy-out
    panels[1].barh(unit % 2, held[1] - held[0], left=held[0], height=0.7, color=color)
    panels[1].barh(2, 1.0, left=computes[unit][0], height=0.7, color=color, edgecolor=plots.CARD)
panels[0].set(title="FSDP1, no limit: four blocks", ylim=(3.6, -0.6))
panels[0].set_yticks(range(4), [f"unit {unit}" for unit in range(4)])
panels[1].set(title="FSDP2: three blocks", ylim=(3.6, -0.6))
panels[1].set_yticks(range(3), ["buffer", "buffer", "parameters"])
for axes in panels:
    axes.set(xlim=(0, 4.8), xlabel="time, in computations")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Blocks over time: FSDP1 needs one for each unit, FSDP2 uses three again and again.")

# %% [markdown]
# Each row is a block of memory, and its colour says which of four units uses it; drawn with the times of the
# replay. On the left a black mark shows when Python frees the block: almost at once, and long before the GPU
# is done with it. Until then `record_stream` holds the block back, so each unit needs its own. FSDP1's
# limiter makes the CPU wait until an old block can be handed out. (When the memory is full, the allocator
# itself waits for all marked blocks, gives its unused blocks back, and tries again: a retry. So a limiter
# that makes the CPU wait a little can make training faster.)
#
# ## Why FSDP2 needs no limiter
#
# On the right of the figure, three blocks serve all units, one after the other.

# %% jupyter={"source_hidden": true}
Table(
    ["", "FSDP1", "FSDP2"],
    [
        ["an all-gather writes into", "the full parameters", "a buffer"],
        ["full parameters belong to", "the stream of all-gathers", "the stream of computation"],
        ["used on another stream", "the full parameters", "the buffer"],
        ["kept apart by", "record_stream: the block is held back", "wait_event: the buffer's stream waits"],
        ["who waits", "the CPU, with the limiter", "a stream, on the GPU"],
    ],
)

# %% [markdown]
# FSDP2 gathers into a buffer, and the stream of computation copies the parameters out of it, into memory of
# its own. Only the buffer is used on another stream. Before FSDP2 drops a buffer, it lets the streams of the
# all-gathers wait for that copy (`_wait_all_gather_streams_on_event`). The CPU goes on. So the allocator can
# hand out blocks in the order of the program, however far ahead the CPU is, and the bytes that the meter has
# counted in that order are what gathered parameters and their buffers take on a GPU. PyTorch's
# [documentation](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) gives the same
# reason: avoiding `record_stream` makes memory deterministic, and does not require blocking the CPU as
# FSDP1's limiter does.

# %% tags=["check"]
# %%ranks
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

assert "record_stream" in inspect.getsource(FlatParamHandle._free_unsharded_flat_param)
for module in (_fsdp_collectives, _fsdp_param, _fsdp_param_group):
    assert "record_stream(" not in inspect.getsource(module)
group, context = _fsdp_param_group.FSDPParamGroup, _fsdp_param_group.FSDPCommContext
wait = getattr(group, "_wait_all_gather_streams_on_event", None) or context.wait_all_gather_streams_on_event
assert "wait_event" in inspect.getsource(wait)                  # the context's in later torch
assert inspect.signature(FSDP).parameters["limit_all_gathers"].default is True
assert "limit_all_gathers" not in inspect.signature(fully_shard).parameters
print("Checked: record_stream is in FSDP1 and not in FSDP2, which lets streams wait; FSDP1's limiter is on.")

# %% [markdown]
# ## Your turn 2 · When may a block be handed out again?
#
# Write the rule of the allocator. An all-gather or a copy-out asks for memory for a `stream`, and the CPU
# asks at the time `now`. Return a block of the list that this stream may have, or `None`: then the allocator
# has to get a new one from the GPU. A block has three fields:
#
# - `stream`: the stream for which it was first handed out.
# - `in_use`: whether Python still holds a tensor in it.
# - `marked_until`: when the GPU has passed the use on another stream that `record_stream` has marked; 0 if
#   nothing was marked.
#
# A folded cell runs the forward pass of eight units with your rule, three times: as FSDP1 without a limit, as
# FSDP1 with a limit of two, and as FSDP2. For FSDP2 the parameters of a unit count as one block. It counts
# the blocks that the allocator needs, and those that were handed out while they could still be in use. Edit
# the next cell, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Three conditions must hold for a block, one for each field. Take the first block for which they do.
#
# </details>

# %% tags=["exercise"]
def my_rule(blocks, stream, now):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
@dataclass
class Block:
    stream: str
    in_use: bool = True
    marked_until: float = 0.0


class Allocator:
    """Hands out blocks by a rule, and counts those that may still be in use."""

    def __init__(self, rule):
        self.rule, self.blocks, self.reserved = rule, [], []
        self.early = 0

    def hand_out(self, stream, now):
        block = self.rule(list(self.blocks), stream, now)
        if block is None:
            block = Block(stream)
            self.blocks.append(block)
        elif not any(block is one for one in self.blocks):
            raise TypeError(f"the rule should return one of the blocks, or None; it has returned {block!r}")
        else:
            self.early += block.in_use or block.stream != stream or block.marked_until > now
        block.in_use, block.marked_until = True, 0.0
        return block


def as_fsdp1(rule, run):
    allocator = Allocator(rule)
    for unit, now in enumerate(run.memory):
        block = allocator.hand_out("all-gathers", now)
        block.in_use, block.marked_until = False, run.compute[unit][1]      # freed, with record_stream
        allocator.reserved.append(len(allocator.blocks))
    return allocator


def as_fsdp2(rule, run):
    allocator, before = Allocator(rule), None
    for now in run.memory:
        buffer = allocator.hand_out("all-gathers", now)
        if before is not None:
            before.in_use = False                                           # its stream has waited
        parameters = allocator.hand_out("computation", now)
        allocator.reserved.append(len(allocator.blocks))
        parameters.in_use = False                                           # freed after forward
        before = buffer
    return allocator


def score_rule(rule):
    """Three forward passes by the rule."""
    ran = {
        "FSDP1, no limit": as_fsdp1(rule, free),
        "FSDP1, limit of two": as_fsdp1(rule, limited),
        "FSDP2, no limit": as_fsdp2(rule, free),
    }
    result = {f"blocks, {name}": len(allocator.blocks) for name, allocator in ran.items()}
    result["handed out too early"] = sum(allocator.early for allocator in ran.values())
    result["curves"] = {name: allocator.reserved for name, allocator in ran.items()}
    return result

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_rule(my_rule)",
    {
        "blocks, FSDP1, no limit": exactly(
            8, otherwise="Without a limit no marked block is free in time, so FSDP1 needs eight."
        ),
        "blocks, FSDP1, limit of two": at_most(
            2, otherwise="With the limiter the block of the unit two before is free just `now`: use it."
        ),
        "blocks, FSDP2, no limit": at_most(
            3,
            otherwise="FSDP2 marks nothing: a block that is not in use may go to its own stream at once. "
            "Then two buffers and one block of parameters are enough.",
        ),
        "handed out too early": exactly(
            0,
            otherwise="A block went out while the GPU could still use it: look at its stream, at whether "
            "Python holds it, and at its mark.",
        ),
    },
    on_ranks=False,
)

# %% tags=["solution"] turn=2
def my_rule(blocks, stream, now):
    for block in blocks:
        if block.stream == stream and not block.in_use and block.marked_until <= now:
            return block
    return None

# %% tags=["wrong"] turn=2
def my_rule(blocks, stream, now):               # ignores record_stream
    return next((b for b in blocks if b.stream == stream and not b.in_use), None)

# %% tags=["wrong"] turn=2
def my_rule(blocks, stream, now):               # any stream's
    return next((b for b in blocks if not b.in_use and b.marked_until <= now), None)

# %% tags=["wrong"] turn=2
def my_rule(blocks, stream, now):               # what Python still holds
    return next((b for b in blocks if b.stream == stream and b.marked_until <= now), None)

# %% tags=["wrong"] turn=2
def my_rule(blocks, stream, now):               # marked blocks only
    own = [b for b in blocks if b.stream == stream and not b.in_use]
    return next((b for b in own if 0 < b.marked_until <= now), None)

# %% tags=["wrong"] turn=2
def my_rule(blocks, stream, now):               # a moment too late
    return next((b for b in blocks if b.stream == stream and not b.in_use and b.marked_until < now), None)

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.0, height=2.8)
for index, (name, reserved) in enumerate(run_solution(11, 2)[0]["curves"].items()):
    units = range(1, len(reserved) + 1)
    axes.plot(units, reserved, color=plots.RANK_COLORS[index], linewidth=2.5, marker="o", label=name)
axes.set(xlabel="units that the CPU has issued", ylabel="blocks reserved", ylim=(0, 8.6), title="target")
axes.legend()
plots.show(fig, alt="Blocks that the allocator has reserved after each unit: 8, 2 and 3 in the end.")

# %% [markdown]
# The figure is the run of the folded solution. FSDP1 without a limit reserves a block for each unit, as long
# as the CPU is ahead. With the limiter it is two blocks, and the CPU waits. FSDP2 stays at three without any
# wait: two buffers and one unit's parameters, the number that the meter has counted.

# %% tags=["check"]
try_answers(11)

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

# %% jupyter={"source_hidden": true}
plots.losses(ranks.get("ways")[0])

# %% [markdown]
# All four curves lie on each other. With and without the limiter the losses are equal to the last bit.

# %% tags=["check"]
# %%ranks
for losses in ways.values():
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
assert ways["FSDP1, limit"] == ways["FSDP1, no limit"]
print("Checked: the losses of one process; with and without the limiter the same to the last bit.")

# %% [markdown]
# ## When it goes wrong
#
# In a profile of FSDP1 you may see gaps in which the CPU issues nothing. Are they the limiter's? It has a
# name of its own in the profile:

# %%
# %%ranks
from torch.profiler import ProfilerActivity, profile

with profile(activities=[ProfilerActivity.CPU]) as profiled:
    fsdp1(limit=True)(batch(0))
gaps = [event.name for event in profiled.events() if "rate_limiter" in event.name]

print(f"{gaps[0]}: {len(gaps)} times in one forward pass")

# %% [markdown]
# Four waits for six all-gathers, as in the table of the real queue.
#
# What you see, why, and what helps:
#
# - **`FullyShardedDataParallel.rate_limiter` takes long in a profile.** This is the limiter: the CPU waits
#   for a unit's memory. While the GPU is busy all the time, it costs nothing. If the GPU is idle after each
#   wait, the CPU is the bottleneck, and with memory to spare you can try `limit_all_gathers=False`.
# - **FSDP1's reserved memory, or `num_alloc_retries`, is much higher than expected.** Look for
#   `limit_all_gathers=False` in the program.
# - **`fully_shard() got an unexpected keyword argument 'limit_all_gathers'`.** FSDP2 has no limiter. Leave
#   the argument out; [lesson 13](13_from_fsdp1_to_fsdp2.ipynb) lists what became of the others.
# - **FSDP2 holds more units than three.** The program asks for it: explicit prefetching of several units, or
#   `unshard()` long before its use. No limiter would help, for that is the order of the program
#   ([lesson 4](04_backward_prefetch.ipynb)).
# - **FSDP2's memory lags behind all the same**, with `unshard(async_op=True)` or tensor parallelism, on an
#   older PyTorch. There NCCL's collectives with `async_op=True` call `record_stream` themselves
#   ([issue 147168](https://github.com/pytorch/pytorch/issues/147168)). Set the environment variable
#   `TORCH_NCCL_AVOID_RECORD_STREAMS=1`.

# %% tags=["check"]
# %%ranks
assert gaps == ["FullyShardedDataParallel.rate_limiter"] * 4
told = ""
try:
    fully_shard(build(), limit_all_gathers=True)
except TypeError as error:
    told = str(error)
assert "got an unexpected keyword argument 'limit_all_gathers'" in told
print("Checked: four waits in the profile; FSDP2 refuses the argument.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    11,
    {
        "limiter-two": f"In the first forward pass, yes: {max(after_gather[:6])}. From backward on "
        f"{max(after_gather)}: the next unit is gathered before the present one is freed, and the queue "
        "never catches up.",
        "limiter-slowdown": f"In the replay between nothing and {slowest[0.05]:.1%} with a quick CPU, "
        f"{slowest[0.2]:.1%} with a slow one, for times that we chose. Seconds are for a GPU to say.",
        "limiter-memory": f"In the replay {limited.most_alive()} of {len(free.memory)} units hold memory "
        f"instead of {free.most_alive()}. How much of all memory that is depends on the model.",
        "limiter-reinvested": "Not for a CPU to say. [Lesson 2](02_activation_checkpointing.ipynb) shows "
        "what freed memory buys.",
        "limiter-retries": "Not for a CPU to say: retries are the CUDA allocator's.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - The CPU enqueues and goes on. Memory is handed out when the CPU asks, not when the GPU computes.
# - FSDP1 frees with `record_stream`: a block comes back only after the GPU has passed that point.
# - `limit_all_gathers` makes the CPU wait for a unit freed two or three before. It is on by default; leave it
#   on.
# - A limit of two is enough, because one all-gather at a time has to run beside one computation.
# - FSDP2 frees and reuses each block on one stream and lets streams wait for each other. So it needs no
#   limiter.
#
# ## Next
#
# So far each rank began with the whole model, and sharded it then. In
# [lesson 12](12_a_model_too_big_for_one_rank.ipynb) the model does not fit on one rank at all.
#
# [← lesson 10](10_end_to_end.ipynb) · [lesson 12 →](12_a_model_too_big_for_one_rank.ipynb)

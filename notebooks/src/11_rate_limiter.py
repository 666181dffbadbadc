# %% [markdown]
# # 11 · The rate limiter
#
# Why did FSDP1 need a rate limiter, and why does `fully_shard` (FSDP2) have none? **There is no limit on
# all-gathers for you to set:** FSDP2 lets the GPU's streams wait for each other, so the CPU may run ahead
# without taking more memory; FSDP1 makes the CPU wait, with `limit_all_gathers=True`, which is its default.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

EVERY_UNIT, TWO_BUFFERS = [0, 1, 2, 3], [0, 1, 0, 1]


def blocks_over_time(panels):
    """One panel for each way: a row for each block of memory, a bar while a unit uses the block."""
    fig, axes_of = plots.figure(len(panels), width=9.4, height=2.3)
    for axes, (title, (rows, names, starts, ends)) in zip(axes_of, panels.items()):
        for number, (row, start, end) in enumerate(zip(rows, starts, ends)):
            color = plots.RANK_COLORS[number % 4]
            axes.barh(row, end - start, left=start, height=0.7, color=color, edgecolor=plots.CARD)
        axes.set(title=title, ylim=(3.6, -0.6), xlim=(0, 4.8), xlabel="time, in computations of one unit")
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return plots.show(fig, alt="Blocks over time: FSDP1 without a limit uses four, FSDP2 three.")


done = [1.65, 2.65, 3.65, 4.65]                  # when the GPU has computed with each of four units
blocks_over_time({
    "FSDP1 without a limit: four blocks": (
        EVERY_UNIT, [f"block {unit}" for unit in EVERY_UNIT], [0, 0.05, 0.1, 0.15], done,
    ),
    "FSDP2: three blocks": (
        TWO_BUFFERS + [2] * 4, ["buffer", "buffer", "parameters"],
        [0.05, 0.65, 1.25, 1.85, *(end - 1 for end in done)], [*(end - 1 for end in done), *done],
    ),
})

# %% [markdown]
# A drawing of one forward pass on a GPU. Each colour is a *unit*, a layer whose parameters FSDP gathers
# together. FSDP1 without a limiter holds memory for all units from the moment the CPU asks. FSDP2's CPU asks
# as early, but is given the same three blocks again and again; its bars show when the GPU uses them.

# %% tags=["card"]
lesson.card(
    11,
    learn="what the CPU runs ahead of, and what `limit_all_gathers` and FSDP2 do about it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 12, 10),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It counts how often the CPU waits for
# the limiter in one step of training.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
# from torch.distributed.fsdp import fully_shard
# from torch.profiler import ProfilerActivity, profile
#
# on_gpu = torch.cuda.is_available()
# dist.init_process_group("nccl" if on_gpu else "gloo")
# device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
# if on_gpu:
#     torch.cuda.set_device(device)
# mesh = init_device_mesh(device.type, (dist.get_world_size(),))   # without it a Mac would take its GPU
#
#
# def fsdp1(layers, limit):
#     options = {"limit_all_gathers": limit, "device_id": device}
#     return FSDP(nn.Sequential(*[FSDP(layer, **options) for layer in layers]), **options)
#
#
# def fsdp2(layers, limit):                                    # has no such option
#     for layer in layers:
#         fully_shard(layer, mesh=mesh)
#     return fully_shard(nn.Sequential(*layers), mesh=mesh)
#
#
# ways = [("FSDP1", fsdp1, True), ("FSDP1, no limit", fsdp1, False), ("FSDP2", fsdp2, None)]
# for name, shard, limit in ways:
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = shard([nn.Linear(256, 256, device=device) for _ in range(8)], limit)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(3):
#         with profile(activities=[ProfilerActivity.CPU]) as profiled:
#             model(torch.randn(32, 256, device=device)).square().mean().backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     waits = sum("rate_limiter" in event.name for event in profiled.events())
#     if dist.get_rank() == 0:
#         print(f"{name:15} {waits:2} waits of the CPU in a step")
# dist.destroy_process_group()
# ```
# ```text
# FSDP1           16 waits of the CPU in a step
# FSDP1, no limit  0 waits of the CPU in a step
# FSDP2            0 waits of the CPU in a step
# ```
#
# With eight units a step has sixteen all-gathers, and in FSDP1 the CPU waits before each of them from the
# second step on. On a CPU these waits end at once. On a GPU each lasts until the GPU has finished with a unit
# that was freed earlier. FSDP2 has no limiter to wait for, so its 0 is no measurement.
#
# ## The CPU runs ahead
#
# On a GPU, a line of PyTorch code does not compute. It puts a kernel into a **stream**, a queue that the GPU
# runs in order, and returns. FSDP computes on one stream and gathers on another. Memory is different: the
# allocator hands out memory *when Python asks*, although the kernel that fills it runs later.
#
# The next cell is a simulation: it calculates what would start when. Its unit of time is the computation of
# one unit; the CPU takes 0.05 to issue a unit's work. With a limit of `n`, the CPU waits before each
# all-gather for the unit that is `n` before it.

# %% tags=["replay"]
from fsdp_utils.lessons.tables import Table


def forward(limit, gather=0.6, issue=0.05, units=8):
    """Return the most units that hold memory at once, and the time of a forward pass."""
    cpu = gathered = 0.0
    ends, most = [], 0                                          # when the GPU is done with each unit
    for unit in range(units):
        if limit and unit >= limit:
            cpu = max(cpu, ends[unit - limit])                  # the limiter
        most = max(most, unit + 1 - sum(end <= cpu for end in ends))
        cpu += issue
        gathered = max(cpu, gathered) + gather                  # one all-gather after the other
        ends.append(max(gathered, ends[-1] if ends else 0.0) + 1.0)
    return most, ends[-1]


lengths = [step / 20 for step in range(2, 41)]                  # of an all-gather: 0.1 to 2 computations
rows = []
for limit in (None, 1, 2, 3, 4):
    added = {gather: forward(limit, gather)[1] / forward(None, gather)[1] - 1 for gather in lengths}
    slow = [gather for gather in lengths if added[gather] > 1e-9]
    where = " to ".join(map(str, sorted({slow[0], slow[-1]}))) if slow else "nowhere"
    rows.append([str(limit or "none"), forward(limit)[0], f"{max(added.values()):.1%}", where])
Table(["limit", "units in memory", "time added, at most", "with all-gathers of"], rows)

# %% [markdown]
# Without a limit all eight units hold memory at once: the CPU has issued everything before the GPU has
# finished with the first unit. A limit of one allows no overlap of gathering and computing. A limit of two is
# enough for one all-gather beside one computation. In this simulation it costs time only where an all-gather
# takes about as long as a computation, because the next all-gather is issued late by 0.05. A limit of three
# gains that back and takes one more unit of memory.

# %% [markdown]
# ## FSDP1's queue
#
# After FSDP1 has freed a unit, it records an **event** on the stream of computation, a mark that is reached
# when the GPU has finished all work before it, and puts the event into a queue (`_reshard` in
# `torch/distributed/fsdp/_runtime_utils.py`). Before each all-gather it asks the queue for an event to wait
# for (`_unshard`). The queue returns one as soon as it holds two, a number that the source calls "empirically
# chosen". `Watched` stands between FSDP1 and the queue, and counts the units that may hold memory: those
# gathered, less those that the CPU has waited for.

# %%
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def build():
    torch.manual_seed(0)
    layers = [FSDP(nn.Linear(32, 32).to(device), device_id=device) for _ in range(6)]
    return FSDP(nn.Sequential(*layers), device_id=device)


class Watched:
    """FSDP1's queue, with a count of the units that may hold memory after each all-gather."""

    def __init__(self, queue):
        self.queue, self.freed, self.gathers, self.over, self.counts = queue, 0, 0, 0, []

    def dequeue_if_needed(self):                                # an all-gather comes next
        self.count()
        self.gathers += 1
        return self.queue.dequeue_if_needed()

    def enqueue(self, event):                                   # a unit was freed
        self.count()
        self.freed += 1
        self.queue.enqueue(Mark(event, self.freed, self))

    def count(self):
        if len(self.counts) < self.gathers:
            self.counts.append(self.gathers - self.over)


class Mark:
    """An event: the first `number` units are over once the CPU has waited for it."""

    def __init__(self, event, number, watched):
        self.event, self.number, self.watched = event, number, watched

    def synchronize(self):
        self.event.synchronize()
        self.watched.over = max(self.watched.over, self.number)


# %% tags=["queue"]
# %%ranks
model = build()
watched = model._free_event_queue = Watched(model._free_event_queue)
for _ in range(2):
    loss = model(torch.randn(8, 32, device=device)).sum()
    loss.backward()
watched.count()
if dist.get_rank() == 0:
    for step in range(2):
        forward, backward = watched.counts[12 * step :][:6], watched.counts[12 * step + 6 :][:6]
        print(f"step {step + 1}: units that may hold memory in forward {forward}, in backward {backward}")

# %% [markdown]
# Two in the first forward pass, then three: in backward FSDP1 by default gathers the next unit before it
# frees the present one, so one all-gather goes without a wait, and no later wait makes up for it. From the
# second step on, forward is the row with a limit of three above. With `SHARD_GRAD_OP` forward frees nothing,
# so the limiter cannot bound what forward gathers.
#
# ## Your turn 1 · Write the limiter
#
# Write the queue. FSDP1 calls `enqueue(event)` after it has freed a unit, and `dequeue_if_needed()` before
# each all-gather. FSDP1 waits for the event that `dequeue_if_needed` returns; with `None` it goes on at once.
# At most `limit` units may hold memory, and an all-gather should be able to run beside a computation. The
# turn puts your queue into FSDP1 and counts one forward pass of six units, with a limit of two and of three.

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import exactly, turn


def counts(kind, limit):
    model = build()
    watched = model._free_event_queue = Watched(kind(limit))
    model(torch.randn(8, 32, device=device))
    watched.count()
    return watched.counts


LATE = "The CPU waits too seldom: it should wait for one event as soon as `limit` events are in the queue."
EARLY = "The CPU waits for too new a unit: wait for the oldest event, and not before the queue is full."


from types import SimpleNamespace


@turn(1, {
    "units in memory, limit of two": exactly(2, less=EARLY, more=LATE),
    "units in memory, limit of three": exactly(
        3,
        less="With a limit of three the CPU waits too early: either the number does not come from `limit`, "
        "or it waits for a newer event than the oldest.",
        more="With a limit of three more units hold memory: the CPU waits too seldom.",
    ),
    "all-gathers that can run beside a computation": exactly(5, less=EARLY),
    "waited for with three events and a limit of two": exactly(
        "the oldest", "Backward leaves more events than the limit: with these the CPU has to wait, too, for the oldest."
    ),
})
def score_queue(MyQueue):
    two, three = counts(MyQueue, 2), counts(MyQueue, 3)
    queue, waited = MyQueue(2), []
    for name in ("the oldest", "the middle one", "the newest"):
        queue.enqueue(SimpleNamespace(name=name, synchronize=lambda name=name: waited.append(name)))
    returned = queue.dequeue_if_needed()
    return {
        "units in memory, limit of two": max(two),
        "units in memory, limit of three": max(three),
        "all-gathers that can run beside a computation": sum(count >= 2 for count in two),
        "waited for with three events and a limit of two": [*waited, getattr(returned, "name", "nothing")][0],
    }


# %%
# %%turn 1
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):                   # a unit was freed
        pass                                    # your line here

    def dequeue_if_needed(self):                # an all-gather comes next
        return None                             # your lines here


# %% tags=["solution"] turn=1
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):
        return self.events.pop(0) if len(self.events) >= self.limit else None

# %% tags=["right"] turn=1
from collections import deque
class MyQueue(deque):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit
    def enqueue(self, event):
        self.append(event)
    def dequeue_if_needed(self):
        if len(self) >= self.limit:
            return self.popleft()

# %% tags=["right"] turn=1
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue
class MyQueue(_FreeEventQueue):
    def __init__(self, limit):
        super().__init__()
        self._max_num_inflight_all_gathers = limit

# %% tags=["right"] turn=1
import queue
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, queue.SimpleQueue()
    def enqueue(self, event):
        self.events.put(event)
    def dequeue_if_needed(self):
        if self.events.qsize() < self.limit:
            return None
        self.events.get().synchronize()         # waits here and not in FSDP1
        return None

# %% tags=["wrong"] turn=1 says="more events than the limit"
class MyQueue:
    def __init__(self, limit):
        self.limit, self.events = limit, []

    def enqueue(self, event):
        self.events.append(event)

    def dequeue_if_needed(self):                # never again once there are more
        return self.events.pop(0) if len(self.events) == self.limit else None

# %% tags=["wrong"] turn=1 says="wait for the oldest event"
class MyQueue(list):                            # waits for the newest
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop() if len(self) >= self.limit else None

# %% tags=["wrong"] turn=1 says="waits too seldom"
class MyQueue(list):                            # one too late
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop(0) if len(self) > self.limit else None

# %% tags=["wrong"] turn=1 says="does not come from `limit`"
class MyQueue(list):                            # does not know its limit
    def __init__(self, limit):
        pass
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop(0) if len(self) >= 2 else None

# %% tags=["wrong"] turn=1 says="not before the queue is full"
class MyQueue:                                  # waits for each unit as soon as it is freed
    def __init__(self, limit):
        pass
    def enqueue(self, event):
        event.synchronize()
    def dequeue_if_needed(self):
        return None

# %% tags=["wrong"] turn=1 says="waits too seldom"
class MyQueue(list):                            # collects, and never waits
    def __init__(self, limit):
        pass
    def enqueue(self, event):
        self.append(event)
    def dequeue_if_needed(self):
        return None

# %% [markdown]
# ## Why FSDP2 needs none
#
# The allocator gives a block that Python has freed to the next request on the stream it was allocated on, at
# once: that stream works in order. It does not know that *another* stream still reads the block. FSDP1
# allocates a unit's full parameters on the stream of all-gathers and uses them on the stream of computation,
# so on freeing it calls `record_stream` (`_free_unsharded_flat_param`): the allocator holds the block back
# until the GPU has passed that use. The CPU is ahead, so the next all-gather gets another block. FSDP1's
# limiter makes the CPU wait until an old one is back.
#
# FSDP2 gathers into a buffer, and the stream of computation copies the parameters out of it into memory of
# that stream. Of the gathered memory only the buffer crosses streams. Before FSDP2 drops a buffer, it makes
# the *streams* of all-gathers wait for the copy (`_wait_all_gather_streams_on_event`), and the CPU goes on.
# So the next all-gather may get the dropped buffer at once, before the GPU has run the copy. Memory depends
# on the order of the calls alone, not on how far the CPU is ahead.

# %% tags=["order"]
# %%ranks
import inspect

from torch.distributed.fsdp import _flat_param, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

fsdp1, fsdp2 = [_flat_param], [_fsdp_collectives, _fsdp_param, _fsdp_param_group]
for call in ("record_stream(", "wait_event("):
    times = [sum(inspect.getsource(module).count(call) for module in modules) for modules in (fsdp1, fsdp2)]
    print(f"{call.rstrip('('):13} FSDP1's _flat_param.py: {times[0]}, three files of FSDP2: {times[1]}")

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
assert inspect.signature(FSDP).parameters["limit_all_gathers"].default is True
try:
    fully_shard(nn.Linear(8, 8), limit_all_gathers=True)
except TypeError as error:
    assert "got an unexpected keyword argument 'limit_all_gathers'" in str(error)

# %% [markdown]
# ## Your turn 2 · Let a stream wait, not the CPU
#
# Write FSDP2's rule for the forward pass. Unit `n` is gathered into buffer `n % 2`. When it has been gathered
# and the computation before it is over, it is copied out of the buffer. `waits_for(unit)` returns the unit
# whose copy-out the stream of all-gathers waits for before it gathers `unit`, or `None`. The turn simulates
# eight units, with all-gathers of 0.3, 0.6, 1 and 1.6 computations and copies of 0.1. No buffer may be
# overwritten before it was copied out, and the pass should take no longer than two buffers require.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


def simulate(rule, gather):
    """Return the buffers that are overwritten too early, and the time of a forward pass."""
    ready, copied, done, overwritten = 0.05, [], 0.0, 0         # copied: when each unit is out of its buffer
    for unit in range(8):
        wait = rule(unit)
        if wait is not None and not 0 <= wait < unit:
            raise NotYet(f"`waits_for({unit})` returned {wait}: expected None, or a unit before {unit}.")
        start = ready if wait is None else max(ready, copied[wait])
        overwritten += unit > 1 and start < copied[unit - 2]
        ready = start + gather
        copied.append(max(ready, done) + 0.1)
        done = copied[-1] + 1.0
    return overwritten, done


@turn(2, {
    "buffers overwritten before they were copied out": exactly(
        0, more="A buffer is filled while it still holds an older unit: wait for the unit in that buffer."
    ),
    "times as long as it must take": at_most(
        1.001, "All-gathers wait longer than they need to: the unit just before is in the other buffer."
    ),
}, returns=False)
def score_rule(waits_for):
    lengths = (0.3, 0.6, 1.0, 1.6)
    runs = [simulate(waits_for, gather) for gather in lengths]
    best = [simulate(lambda unit: unit - 2 if unit > 1 else None, gather)[1] for gather in lengths]
    return {
        "buffers overwritten before they were copied out": sum(overwritten for overwritten, _ in runs),
        "times as long as it must take": max(time / least for (_, time), least in zip(runs, best)),
    }


# %%
# %%turn 2
def waits_for(unit):                            # 0 to 7; two buffers
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def waits_for(unit):
    return unit - 2 if unit > 1 else None

# %% tags=["right"] turn=2
def waits_for(unit):
    return [None, None, *range(6)][unit]

# %% tags=["right"] turn=2
import numpy as np
waits_for = dict(zip(range(8), [None, None, *np.arange(6)])).get

# %% tags=["right"] turn=2
def waits_for(unit):
    older = [other for other in range(unit) if other % 2 == unit % 2]
    return max(older, default=None)

# %% tags=["wrong"] turn=2 says="the unit just before is in the other buffer"
def waits_for(unit):
    return unit - 1 if unit else None

# %% tags=["wrong"] turn=2 says="wait for the unit in that buffer"
def waits_for(unit):
    return unit - 3 if unit > 2 else None

# %% tags=["wrong"] turn=2 says="expected None, or a unit before 0"
def waits_for(unit):
    return unit - 2

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `FullyShardedDataParallel.rate_limiter` takes long in a profile of FSDP1 | the CPU waits for a unit's memory | nothing while the GPU is busy; if the GPU is idle after each wait and memory is left, try `limit_all_gathers=False` |
# | FSDP1's reserved memory or `num_alloc_retries` is high | `limit_all_gathers=False`, among other causes ([lesson 5](05_maximising_throughput.ipynb)) | leave the default |
# | `got an unexpected keyword argument 'limit_all_gathers'` | FSDP2 has no limiter | leave it out; [lesson 13](13_from_fsdp1_to_fsdp2.ipynb) has the others |
# | FSDP2 holds more than three blocks | the root unit, which by default stays gathered from forward to backward; `reshard_after_forward=False`, a long prefetch list or an early `unshard()` | put large layers into units of their own; a shorter list: [lesson 4](04_backward_prefetch.ipynb) |
#
# ## The rule
#
# FSDP2: no limit to set for all-gathers. FSDP1: leave `limit_all_gathers=True`, and look at the order of the
# program if memory is still high.
#
# [← lesson 10](10_end_to_end.ipynb) · [lesson 12 →](12_a_model_too_big_for_one_rank.ipynb)

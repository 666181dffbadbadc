# %% [markdown]
# # 11 · The rate limiter
#
# Why did FSDP1 need a rate limiter, and why does `fully_shard` (FSDP2) have none? **A CPU that runs ahead of
# the GPU makes FSDP1 allocate the parameters of many layers at once, so FSDP1 makes the CPU wait
# (`limit_all_gathers=True`, its default). FSDP2 makes the GPU's all-gathers wait instead and reuses the same
# memory, however far ahead the CPU is. So under FSDP2 there is nothing for you to set.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

four, two, done = [0, 1, 2, 3], [0, 1, 0, 1], [1.65, 2.65, 3.65, 4.65]     # done: when the GPU is, with each unit
begun, early, late = [end - 1 for end in done], [0.05, 0.65, 1.25, 1.85], [0.05, 0.65, 1.7, 2.7]
at_once, limited, buffers = [0, 0.05, 0.1, 0.15], [0, 0.05, 1.65, 2.65], ["buffer 0", "buffer 1", "parameters"]
panels = {       # when the CPU asks; rows; from when to when a row is taken; bars: row, unit, start, end
    "FSDP1, no limit: four blocks": (
        at_once, [f"block {n}" for n in four], [*zip(at_once, done)], [*zip(four, four, early, done)],
    ),
    "FSDP1, limit of two: two blocks": (
        limited, ["block 0", "block 1"], [(0, 3.65), (0.05, 4.65)], [*zip(two, four, late, done)],
    ),
    "FSDP2: three blocks": (
        at_once, buffers, [(0, 2.65), (0.05, 3.65), (0, 4.65)],
        [*zip(two, four, early, begun), *zip([2] * 4, four, begun, done)],
    ),
}
fig, axes_of = plots.figure(len(panels), width=9.8, height=2.3)
for axes, (title, (asks, names, taken, bars)) in zip(axes_of, panels.items()):
    axes.plot(asks, [-1] * 4, "|", color=plots.INK, markersize=11, markeredgewidth=1.3)
    for row, (start, end) in enumerate(taken):
        axes.barh(row, end - start, left=start, height=0.8, color=plots.FAINT)
    for row, unit, start, end in bars:
        axes.barh(row, end - start, left=start, height=0.6, color=plots.RANK_COLORS[unit])
        axes.text((start + end) / 2, row, unit, ha="center", va="center", color=[plots.INK, "white"][unit == 0])
    axes.set(title=title, ylim=(3.6, -1.6), xlim=(-0.1, 4.8), xlabel="time, in computations of one unit")
    axes.set_yticks([-1, *range(len(names))], ["CPU asks", *names])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Memory over time: FSDP1 takes four blocks, or two with its limiter; FSDP2 takes three.")

# %% [markdown]
# A drawing of one forward pass on a GPU. A **unit**, 0 to 3, is a layer whose parameters FSDP gathers
# together; a **block** is GPU memory as large as a unit. A stroke: the CPU asks for a unit's all-gather. Grey:
# the block is taken. Colour: a unit is in it. All three ways end at the same time, but in the middle the CPU
# waits. FSDP2 gathers into a **buffer** and copies the parameters into a third block (the drawing leaves out
# the copy's time).

# %% tags=["card"]
lesson.card(
    11,
    learn="what the CPU runs ahead of, and what `limit_all_gathers` and FSDP2 do about it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 11, 14),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py` (with one process FSDP1 shards nothing). It
# counts three kinds of call in forward and backward of the third step.
#
# ```python
# from collections import Counter
#
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, fully_shard
# from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
#
# device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
# dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
# if device.type == "cuda":
#     torch.cuda.set_device(device)
# torch.set_default_device(device)
# mesh = init_device_mesh(device.type, (dist.get_world_size(),))    # without it a Mac would take its GPU
# calls = Counter()
#
#
# def count(name, owner, function):                                 # from here on each call is counted
#     def counted(*args, call=getattr(owner, function)):
#         calls[name] += 1
#         return call(*args)
#     setattr(owner, function, counted)
#
#
# count("record_stream", _flat_param, "_no_dispatch_record_stream")
# count("waits of the CPU", getattr(torch, device.type).Event, "synchronize")
# count("waits of a stream", FSDPParamGroup, "_wait_all_gather_streams_on_event")
#
#
# def fsdp1(module, limit=True):
#     return FullyShardedDataParallel(module, device_id=device, limit_all_gathers=limit)
#
#
# ways = {"FSDP1": fsdp1, "FSDP1, no limit": lambda m: fsdp1(m, False), "FSDP2": lambda m: fully_shard(m, mesh=mesh)}
# for name, shard in ways.items():
#     torch.manual_seed(0)                                          # the same weights on every rank
#     model = shard(nn.Sequential(*[shard(nn.Linear(256, 256)) for _ in range(8)]))
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                        # other samples on each rank
#     for step in range(3):
#         calls.clear()
#         model(torch.randn(32, 256)).square().mean().backward()
#         told = [f"{calls[what]:2} {what}" for what in ("record_stream", "waits of the CPU", "waits of a stream")]
#         optimizer.step()
#         optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         print(f"{name:16}" + ", ".join(told))
# dist.destroy_process_group()
# ```
# ```text
# FSDP1           16 record_stream, 16 waits of the CPU,  0 waits of a stream
# FSDP1, no limit 16 record_stream,  0 waits of the CPU,  0 waits of a stream
# FSDP2            0 record_stream,  0 waits of the CPU, 15 waits of a stream
# ```
#
# Eight units make sixteen all-gathers in a step. FSDP1 calls `record_stream` for each unit that it frees, which
# keeps the unit's block taken until the GPU has used it. With the limiter the CPU also waits before each
# all-gather. FSDP2 makes a *stream* of the GPU wait instead, 15 times (a sixteenth wait, at the end of forward,
# goes through another function). The CPU's waits are counted for all three ways; the other two functions
# belong to FSDP1 or to FSDP2 alone. On a CPU all these waits end at once: the script shows who waits. How long,
# and how many GiB that saves, only a GPU could show; neither was measured.
#
# ## The CPU runs ahead
#
# On a GPU, a line of PyTorch code does not compute. It puts a kernel into a **stream**, a queue that the GPU
# runs in order, and returns. FSDP computes on one stream and gathers on others, so that both run at the same
# time. Memory is different: the allocator hands out memory *when Python asks*, although the kernel that fills
# it runs later. A CPU that is eight units ahead has taken the memory of eight units. A layer of Llama 3 8B
# takes 0.44 GB in bf16, and all 32 at once 14 GB, which FSDP is there to avoid. If the GPU has no room,
# PyTorch stops to give cached memory back (a **retry**, [lesson 5](05_maximising_throughput.ipynb)) or runs
# out of memory.
#
# The next cell simulates one forward pass of eight units. Its unit of time is the computation of one unit, and
# all-gathers take 0.1 to 2 of it. With a limit of `n`, the CPU asks for a unit only when the unit `n` before
# it has been computed.

# %% tags=["replay"]
from fsdp_utils.lessons.tables import Table


def simulate(limit, gather, issue, units=8):
    """Return the most units that hold memory at once, and the time of a forward pass."""
    cpu = gathered = 0.0
    ends, most = [], 0                                          # when the GPU is done with each unit
    for unit in range(units):
        if limit and unit >= limit:
            cpu = max(cpu, ends[unit - limit])                  # the limiter
        most = max(most, unit + 1 - sum(end <= cpu for end in ends))
        cpu += issue                                            # the CPU issues a unit's work
        gathered = max(cpu, gathered) + gather                  # one all-gather after the other
        ends.append(max(gathered, ends[-1] if ends else 0.0) + 1.0)
    return most, ends[-1]


lengths, rows = [step / 20 for step in range(2, 41)], []        # of an all-gather
for issue in (0.05, 0.2, 0.5, 1.0):
    free = [simulate(None, gather, issue) for gather in lengths]
    row = [str(issue), str(max(most for most, _ in free))]
    for limit in (1, 2, 3):
        added = [simulate(limit, gather, issue)[1] / time - 1 for gather, (_, time) in zip(lengths, free)]
        row.append(f"{max(added):.1%}")
    rows.append(row)
Table(["CPU's time for a unit", "units in memory, no limit", "time added: limit 1", "limit 2", "limit 3"], rows)

# %% [markdown]
# Each percentage is the largest over all lengths of all-gathers. A limit of one allows no all-gather beside a
# computation. A limit of two allows one, but the CPU issues it only after its wait. In this simulation that
# costs time where an all-gather takes about as long as a computation: at most 1.7% if the CPU is fast, 30% if
# it is as slow as the GPU. A limit of three costs nothing in any row, and takes one more unit of memory.
#
# ## Why FSDP1's blocks do not come back, and FSDP2's do
#
# The allocator gives a block that Python has freed to the next request on the stream it was allocated on, at
# once: that stream works in order. It does not know that *another* stream still reads the block. FSDP1
# allocates a unit's full parameters on the stream of all-gathers and uses them on the stream of computation,
# so on freeing it calls `record_stream`: the allocator holds the block back until the GPU has passed that
# use. The CPU is ahead, so the next all-gather gets another block. FSDP1's limiter makes the CPU wait until an
# old one is back.
#
# FSDP2 gathers into a buffer, and the stream of computation copies the parameters out of it into memory of
# that stream. Of the gathered memory only the buffer crosses streams. Before FSDP2 drops a buffer, it makes
# the *streams* that fill buffers wait for the copy, and the CPU goes on. So a later all-gather may get the
# dropped buffer at once, before the GPU has run the copy. Memory depends on the order of the calls alone, not
# on how far the CPU is ahead. The price is a copy of each unit, and a third block. FSDP1's limiter begins with
# two, but does not stay there.
#
# ## FSDP1's queue
#
# After FSDP1 has freed a unit, it records an **event** on the stream of computation, a mark that is reached
# when the GPU has finished all work before it, and puts the event into a queue. Before each all-gather it
# asks the queue for an event to wait for (`_reshard` and `_unshard` in
# `torch/distributed/fsdp/_runtime_utils.py`). The queue returns one as soon as it holds two. The next cell
# trains six units for two steps. `units_in_memory`, from the folded cell, counts the units that have been
# gathered, less those that the CPU has waited for.

# %%
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Mark:
    """An event: the first `number` units that were freed are over once the CPU has waited for it."""

    def __init__(self, event, number, watched):
        self.event, self.number, self.watched = event, number, watched

    def synchronize(self):
        self.event.synchronize()
        self.watched.over = max(self.watched.over, self.number)


class Watched:
    """A queue between FSDP1 and another one, which waits in FSDP1's place and counts after each all-gather."""

    def __init__(self, queue):
        self.queue, self.freed, self.over, self.counts = queue, 0, 0, []

    def enqueue(self, event):                                   # a unit was freed
        self.freed += 1
        self.queue.enqueue(Mark(event, self.freed, self))

    def dequeue_if_needed(self):                                # an all-gather comes next
        if event := self.queue.dequeue_if_needed():
            if not isinstance(event, Mark):
                raise NotYet(f"`dequeue_if_needed` returned a {type(event).__name__}: expected an event or None.")
            event.synchronize()
        self.counts.append(len(self.counts) + 1 - self.over)


def units_in_memory(queue, steps=1):
    """Train six units under FSDP1 with this queue, or its own; count after each all-gather."""
    torch.manual_seed(0)
    layers = [FSDP(nn.Linear(32, 32).to(device), device_id=device) for _ in range(6)]
    model = FSDP(nn.Sequential(*layers), device_id=device)
    watched = model._free_event_queue = Watched(model._free_event_queue if queue is None else queue)
    for _ in range(steps):
        model(torch.randn(8, 32, device=device)).sum().backward()
    return watched.counts


# %% tags=["queue"]
# %%ranks
counts = units_in_memory(None, steps=2)                         # with FSDP1's own queue
if dist.get_rank() == 0:
    for step in (1, 2):
        forward, backward, counts = counts[:6], counts[6:12], counts[12:]
        print(f"step {step}: units that may hold memory in forward {forward}, in backward {backward}")

# %% [markdown]
# Torch's documentation promises "only *two* consecutive FSDP instances". That holds in the first forward pass;
# then there are three. In backward FSDP1 by default gathers the next unit before it frees the present one, so
# one all-gather goes without a wait, and no later wait makes up for it. So from the second step on FSDP1 takes
# as many blocks as FSDP2, and its forward is the column "limit 3" above.
#
# ## Your turn 1 · Write the limiter
#
# Write the queue. FSDP1 calls `enqueue(event)` after it has freed a unit and `dequeue_if_needed()` before each
# all-gather. It waits for the event that comes back; with `None` it goes on at once. In the first forward
# pass at most `limit` units may hold memory, and an all-gather should be able to run beside a computation.
# Backward leaves more than `limit` events in the queue: with a limit of two, the second forward pass may hold
# three units, like FSDP1's, or fewer. The turn counts with your queue in FSDP1.

# %% jupyter={"source_hidden": true}
# %%ranks
LATE = "The CPU waits too seldom: as soon as `limit` events are queued, take the oldest out and return it."
EARLY = "The CPU waits too early, or for too new an event: wait for the oldest once `limit` are queued."


@turn(1, {
    "units in memory, limit of two": exactly(2, less=EARLY, more=LATE),
    "units in memory, limit of three": exactly(
        3,
        less="With a limit of three the CPU waits too early: either the number does not come from `limit`, "
        "or it waits for a newer event than the oldest.",
        more=LATE,
    ),
    "all-gathers that can run beside a computation": exactly(5, less=EARLY),
    "units in memory, limit of two, second step's forward": at_most(
        3, "Backward leaves more events than `limit` in the queue: the CPU has to wait then, too."
    ),
})
def score_queue(MyQueue):
    two, three = units_in_memory(MyQueue(2), steps=2), units_in_memory(MyQueue(3))
    first, second = two[:6], two[12:18]
    return {
        "units in memory, limit of two": max(first),
        "units in memory, limit of three": max(three[:6]),
        "all-gathers that can run beside a computation": sum(count >= 2 for count in first),
        "units in memory, limit of two, second step's forward": max(second) if max(first) == 2 else None,
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
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue
class MyQueue(_FreeEventQueue):
    def __init__(self, limit):
        super().__init__()
        self._max_num_inflight_all_gathers = limit

# %% tags=["right"] turn=1
class MyQueue(list):                            # catches up after backward: fewer units than FSDP1's
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        event = None
        while len(self) >= self.limit:
            event = self.pop(0)
        return event

# %% tags=["right"] turn=1
class MyQueue(list):                            # keeps every event
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self[-self.limit] if len(self) >= self.limit else None

# %% tags=["right"] turn=1
from collections import deque
class MyQueue:                                  # loses the oldest events of backward
    def __init__(self, limit):
        self.events = deque(maxlen=limit)
    def enqueue(self, event):
        self.events.append(event)
    def dequeue_if_needed(self):
        if len(self.events) == self.events.maxlen:
            self.events.popleft().synchronize()     # waits here and not in FSDP1

# %% tags=["wrong"] turn=1 says="more events than `limit`"
class MyQueue(list):                            # waits never again once there are more
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop(0) if len(self) == self.limit else None

# %% tags=["wrong"] turn=1 says="too new an event"
class MyQueue(list):                            # waits for the newest
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop() if len(self) >= self.limit else None

# %% tags=["wrong"] turn=1 says="does not come from `limit`"
class MyQueue(list):                            # does not know its limit
    def __init__(self, limit):
        pass
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop(0) if len(self) >= 2 else None

# %% tags=["wrong"] turn=1 says="take the oldest out"
class MyQueue(list):                            # never takes an event out
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self[0] if len(self) >= self.limit else None

# %% tags=["wrong"] turn=1 says="waits too early"
class MyQueue(list):                            # one too early
    def __init__(self, limit):
        self.limit = limit
    enqueue = list.append
    def dequeue_if_needed(self):
        return self.pop(0) if len(self) >= self.limit - 1 else None

# %% tags=["wrong"] turn=1 says="expected an event or None"
class MyQueue(list):                            # the number of events in place of an event
    def __init__(self, limit):
        pass
    enqueue = list.append
    def dequeue_if_needed(self):
        return len(self)

# %% [markdown]
# ## Your turn 2 · Let the GPU wait, not the CPU
#
# Write FSDP2's forward pass of eight units. `gpu` simulates a stream of all-gathers and one of computation:
#
# - `gpu.gather(unit)` takes a buffer and gathers into it.
# - `gpu.compute(unit)` waits for that all-gather, copies the unit out of the buffer and computes. It returns
#   the **event of the copy**.
# - `gpu.free(unit)` drops the unit's buffer, and the next `gather` gets it *at once*.
# - `gpu.gathers_wait_for(event)` makes all later all-gathers wait; `gpu.cpu_waits_for(event)` is FSDP1's way.
#
# Manage with two buffers, overwrite none before it was copied out, never let the CPU wait, and take no longer
# than the stub, which frees nothing. All-gathers take 0.3, 0.6, 1 and 1.6 computations, copies 0.1.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


class Gpu:
    """A GPU whose work is timed as it is issued. An event is the time at which the GPU reaches it."""

    def __init__(self, length):
        self.length, self.cpu, self.gathers, self.computes = length, 0.0, 0.0, 0.0   # when each is done so far
        self.held, self.dropped, self.read_until, self.done = {}, [], [], []         # buffers, and units
        self.waits = self.overwritten = 0

    def gather(self, unit):
        if not self.dropped:
            self.dropped.append(len(self.read_until))
            self.read_until.append(0.0)
        self.cpu += 0.05
        buffer, start = self.dropped.pop(), max(self.cpu, self.gathers)
        self.overwritten += start < self.read_until[buffer]
        self.gathers = start + self.length
        self.held[unit] = buffer, self.gathers

    def compute(self, unit):
        buffer, ready = self.has_buffer(unit, "compute")
        self.read_until[buffer] = copied = max(self.computes, ready) + 0.1
        self.computes = copied + 1.0
        self.done.append(unit)
        return copied

    def free(self, unit):
        self.dropped.append(self.has_buffer(unit, "free")[0])
        del self.held[unit]

    def gathers_wait_for(self, event):
        self.gathers = max(self.gathers, self.is_event(event))

    def cpu_waits_for(self, event):
        self.cpu, self.waits = max(self.cpu, self.is_event(event)), self.waits + 1

    def has_buffer(self, unit, call):
        if unit not in self.held:
            raise NotYet(f"`gpu.{call}({unit})`: unit {unit} has no buffer. Gather first, compute, then free.")
        return self.held[unit]

    def is_event(self, event):
        if not isinstance(event, float):
            raise NotYet(f"You wait for {event!r}: expected an event, which is what `gpu.compute` returns.")
        return event


@turn(2, {
    "buffers": at_most(2, "Buffers pile up: free a unit's buffer one unit later."),
    "buffers overwritten before they were copied out": exactly(
        0, more="A buffer is filled while it still holds an older unit: let the all-gathers wait for its copy."
    ),
    "waits of the CPU": exactly(0, more="The CPU waits, as under FSDP1: let the all-gathers wait for the event."),
    "times as long as the stub": exactly(
        1, more="An all-gather waits for the unit just before it: free a buffer after the next `gather`, not before."
    ),
}, returns=False)
def score_forward(fsdp2_forward):
    runs = [(Gpu(length), Gpu(length)) for length in (0.3, 0.6, 1.0, 1.6)]
    for gpu, stub in runs:
        fsdp2_forward(gpu)
        for unit in range(8):
            stub.gather(unit)
            stub.compute(unit)
        if gpu.done != stub.done:
            raise NotYet("Compute with units 0 to 7, each once and in order.")
    return {
        "buffers": max(len(gpu.read_until) for gpu, _ in runs),
        "buffers overwritten before they were copied out": sum(gpu.overwritten for gpu, _ in runs),
        "waits of the CPU": sum(gpu.waits for gpu, _ in runs),
        "times as long as the stub": round(max(gpu.computes / stub.computes for gpu, stub in runs), 3),
    }


# %%
# %%turn 2
def fsdp2_forward(gpu):
    for unit in range(8):
        gpu.gather(unit)
        gpu.compute(unit)                       # your lines around these two


# %% tags=["solution"] turn=2
def fsdp2_forward(gpu):
    copied = {}
    for unit in range(8):
        gpu.gather(unit)                        # while the unit before may still lie in the other buffer
        if unit:
            gpu.gathers_wait_for(copied[unit - 1])
            gpu.free(unit - 1)
        copied[unit] = gpu.compute(unit)

# %% tags=["right"] turn=2
def fsdp2_forward(gpu):
    copied = []
    for unit in range(8):
        if unit >= 2:
            gpu.free(unit - 2)
            gpu.gathers_wait_for(copied[-2])
        gpu.gather(unit)
        copied.append(gpu.compute(unit))

# %% tags=["right"] turn=2
from collections import deque
def fsdp2_forward(gpu):
    held = deque()
    for unit in range(8):
        gpu.gather(unit)
        if held:
            older, event = held.popleft()
            gpu.gathers_wait_for(event)
            gpu.free(older)
        held.append((unit, gpu.compute(unit)))

# %% tags=["right"] turn=2
def fsdp2_forward(gpu):                         # gathers one unit ahead
    gpu.gather(0)
    for unit in range(8):
        if unit < 7:
            gpu.gather(unit + 1)
        gpu.gathers_wait_for(gpu.compute(unit))
        gpu.free(unit)

# %% tags=["wrong"] turn=2 says="Buffers pile up"
def fsdp2_forward(gpu):
    for unit in range(8):
        gpu.gather(unit)
        gpu.compute(unit)

# %% tags=["wrong"] turn=2 says="still holds an older unit"
def fsdp2_forward(gpu):                         # nothing waits
    for unit in range(8):
        gpu.gather(unit)
        gpu.compute(unit)
        gpu.free(unit)

# %% tags=["wrong"] turn=2 says="The CPU waits"
def fsdp2_forward(gpu):                         # FSDP1's way
    copied = []
    for unit in range(8):
        if unit >= 2:
            gpu.cpu_waits_for(copied[unit - 2])
            gpu.free(unit - 2)
        gpu.gather(unit)
        copied.append(gpu.compute(unit))

# %% tags=["wrong"] turn=2 says="just before it"
def fsdp2_forward(gpu):                         # one buffer
    for unit in range(8):
        gpu.gather(unit)
        gpu.gathers_wait_for(gpu.compute(unit))
        gpu.free(unit)

# %% tags=["wrong"] turn=2 says="Gather first, compute, then free"
def fsdp2_forward(gpu):
    for unit in range(8):
        gpu.gather(unit)
        gpu.free(unit)
        gpu.compute(unit)

# %% tags=["wrong"] turn=2 says="You wait for 0: expected an event"
def fsdp2_forward(gpu):
    for unit in range(8):
        gpu.gather(unit)
        gpu.gathers_wait_for(unit)
        gpu.compute(unit)

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `FullyShardedDataParallel.rate_limiter` takes long in a profile of FSDP1 | the CPU waits for a unit's memory | nothing while the GPU is busy; else the rule below |
# | FSDP1's reserved memory or `num_alloc_retries` (how many retries) is high | `limit_all_gathers=False`; `SHARD_GRAD_OP`, which keeps parameters until backward, so that the limiter cannot bound forward; or something else | set `limit_all_gathers=True`; if it was on: [lesson 5](05_maximising_throughput.ipynb) |
# | `got an unexpected keyword argument 'limit_all_gathers'` | FSDP2 has no limiter | leave it out ([lesson 13](13_from_fsdp1_to_fsdp2.ipynb)) |
# | FSDP2 holds more than three units at once | in backward, always: full gradients and what is being reduced. Else a large root unit, which stays gathered until backward; `reshard_after_forward=False`; a long prefetch list | smaller units, large layers in their own; a shorter list ([lesson 4](04_backward_prefetch.ipynb)) |
#
# ## The rule
#
# FSDP2: no limit to set for all-gathers; memory does not depend on how far ahead the CPU is. FSDP1: leave
# `limit_all_gathers=True`; try `False` only if the GPU idles after the waits and memory is left.
#
# [← lesson 10](10_end_to_end.ipynb) · [lesson 12 →](12_a_model_too_big_for_one_rank.ipynb)

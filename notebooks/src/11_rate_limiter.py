# %% [markdown]
# # 11 · The rate limiter
#
# Why did FSDP1 need a rate limiter, and why does `fully_shard` (FSDP2) have none? **A CPU that runs ahead of
# the GPU makes FSDP1 allocate the parameters of many layers at once, so FSDP1 makes the CPU wait
# (`limit_all_gathers=True`, its default). FSDP2 makes the GPU's all-gathers wait instead and reuses the same
# memory, however far ahead the CPU is. So no all-gather needs a limit from you, and the GPU goes on when
# the CPU pauses.**
#
# Read on if you port a config with `limit_all_gathers`, or see `FullyShardedDataParallel.rate_limiter` in a profile.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Patch

from fsdp_utils.lessons import lesson, plots

units, done = range(6), [1.3, 2.3, 3.3, 4.3, 5.3, 6.3]          # done: when the GPU has computed each unit
begun, ahead = [end - 1 for end in done], [0, 0.1, 0.2, 0.3, 0.4, 3.18]
early, buffered, late = [0, 0.3, 0.6, 0.9, 1.2, 3.1], [0, 0.3, 0.6, *begun[1:4]], [0, 0.3, 0.6, 1.3, 2.3, 5.9]
end_late = [*done[:5], 7.2]
ways = {  # memory; its bars: row, unit, start, end; all-gathers; ends; requests; pause; waits: row, start, end, cause
    "FSDP1, no limiter: five blocks": (
        [f"block {n}" for n in range(5)], [*zip([0, 1, 2, 3, 4, 0], units, early, done)], early, done, ahead, 0.5, [],
    ),
    "FSDP1: three blocks": (
        [f"block {n}" for n in range(3)], [*zip([0, 1, 2] * 2, units, late, end_late)], late, end_late,
        [0, 0.1, 0.2, 1.36, 2.36, 5.98], 3.3, [(0, 0.35, 1.3, 2), (0, 1.43, 2.3, 2), (0, 2.43, 3.3, 2)],
    ),
    "FSDP2: three blocks": (
        ["buffer 0", "buffer 1", "parameters"],
        [*zip([0, 1] * 3, units, buffered, begun), *zip([2] * 6, units, begun, done)], buffered, done, ahead, 0.5,
        [(1, 0.9, 1.3, 4), (1, 1.6, 2.3, 3), (1, 3.1, 3.3, 4)],
    ),
}
fig, axes_of = plots.figure(len(ways), width=10.6, height=3.1)
for axes, (title, (memory, held, gathers, ends, requests, pause, waits)) in zip(axes_of, ways.items()):
    for row in range(len(memory)):
        last = max(end for at, _, _, end in held if at == row)
        axes.barh(row + 3, last, height=0.9, color=plots.FAINT)
    bars = [(at + 3, unit, start, end) for at, unit, start, end in held]
    bars += [(1, unit, start, start + 0.3) for unit, start in enumerate(gathers)]
    bars += [(2, unit, end - 1, end) for unit, end in enumerate(ends)]
    for row, unit, start, end in bars:
        axes.barh(row, end - start, left=start, height=0.65, color=plots.RANK_COLORS[unit])
        axes.text((start + end) / 2, row, unit, ha="center", va="center", color=[plots.INK, "white"][unit == 0])
    wait = {"height": 0.65, "color": "white", "edgecolor": plots.INK, "hatch": "////"}
    for row, start, end, cause in waits:
        waiting = axes.barh(row, end - start, left=start, **wait)
        arrow = {"arrowstyle": "->", "color": plots.INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (end, row + 0.35), (end, cause - 0.1), arrowprops=arrow)
    (request,) = axes.plot(requests, [0] * 6, "|", color=plots.INK, markersize=11, markeredgewidth=1.5)
    axes.barh(0, 2.6, left=pause, height=0.65, color=plots.INK)
    axes.text(pause + 1.3, 0, "pause", ha="center", va="center", color="white")
    if gathers is late:
        axes.text(5.75, 2, "hole", ha="center", va="center")
    axes.set(title=title, ylim=(7.6, -0.6), xlim=(-0.1, 7.3), xlabel="time, in computations of one unit")
    axes.set_yticks(range(3 + len(memory)), ["CPU", "all-gathers", "computation", *memory])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
legend = {
    "the CPU requests an all-gather": request,
    "wait; the arrow comes from what ends it": waiting[0],
    "block is taken; coloured: a unit is in it": Patch(color=plots.FAINT),
}
fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="A pause of the CPU stops the GPU under FSDP1 with its limiter, but not under FSDP2.")

# %% [markdown]
# A drawing of a forward pass of six **units**, layers whose parameters FSDP gathers together; a **block** is GPU
# memory for one unit. Before unit 5 the CPU pauses for 2.6. FSDP1's limiter has kept it close to the GPU, which runs
# out of work. FSDP2 gathers into a **buffer** and copies the parameters out of it (not drawn); only its
# *all-gathers* wait, until a buffer was copied.

# %% tags=["card"]
lesson.card(
    11,
    learn="what the CPU runs ahead of, and what `limit_all_gathers` and FSDP2 do about it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 11, 11),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py` (two ranks or more). It counts how often the CPU
# waits for the GPU in each of three steps; such a wait calls `Event.synchronize`.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
#
# device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
# dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
# if device.type == "cuda":
#     torch.cuda.set_device(device)
# torch.set_default_device(device)
# mesh = init_device_mesh(device.type, (dist.get_world_size(),))
# rows, width = (4096, 4096) if device.type == "cuda" else (32, 256)  # a GPU gets more work
# Event, waits = getattr(torch, device.type).Event, [0]
#
#
# def wait(event, synchronize=Event.synchronize):
#     waits[-1] += 1
#     synchronize(event)
#
#
# def fsdp1(module, limit=True):
#     return FullyShardedDataParallel(module, device_id=device, limit_all_gathers=limit)
#
#
# Event.synchronize = wait                                          # from here on each wait is counted
# ways = {"FSDP1": fsdp1, "FSDP1, no limiter": lambda m: fsdp1(m, False), "FSDP2": lambda m: fully_shard(m, mesh=mesh)}
# for name, shard in ways.items():
#     torch.manual_seed(0)                                          # the same weights on every rank
#     model = shard(nn.Sequential(*[shard(nn.Linear(width, width)) for _ in range(8)]))
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                        # other samples on each rank
#     waits.clear()
#     for step in range(3):
#         waits.append(0)
#         if device.type == "cuda":
#             torch.cuda.reset_peak_memory_stats()
#         model(torch.randn(rows, width)).square().mean().backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     told = f"{name:17} waits of the CPU in each step: {waits}"
#     if device.type == "cuda":                                     # peaks in MiB
#         stats = torch.cuda.memory_stats()
#         told += "".join(f", {kind} {stats[kind + '_bytes.all.peak'] >> 20}" for kind in ("active", "allocated"))
#     if dist.get_rank() == 0:
#         print(told)
# dist.destroy_process_group()
# ```
# ```text
# FSDP1             waits of the CPU in each step: [13, 16, 16]
# FSDP1, no limiter waits of the CPU in each step: [0, 0, 0]
# FSDP2             waits of the CPU in each step: [0, 0, 0]
# ```
#
# Eight units make sixteen all-gathers in a step, and each wait gives the memory of one unit back. In the first step
# FSDP1 waits 13 times, so up to 16 - 13 = 3 units hold memory; then it waits before each all-gather, and three it
# stays. On a CPU the waits end at once: the output shows who waits, not for how long.
#
# On GPUs the script also prints two peaks of memory. Both fall when Python frees a tensor, except for FSDP1's
# parameters: `record_stream` (next section) keeps them `active` until the GPU has finished with them. A user of FSDP1
# whose memory ran out (7B parameters, 16 A100) [measured](https://github.com/pytorch/pytorch/issues/104509)
# 7.3 s a step without the limiter and 46 **retries**, in which PyTorch stops to give cached memory back; with it
# 5.0 s and none. A LLaMA of 7B had none without it.
#
# ## Why FSDP1's blocks do not come back
#
# On a GPU, a line of PyTorch code does not compute. It puts a kernel into a **stream**, a queue that the GPU
# runs in order, and returns. FSDP computes on one stream and gathers on others, so that both run at the same
# time. But the allocator hands out memory *when Python asks*, although the kernel that fills it runs later.
#
# A block that Python has freed goes to the next request on the stream it was allocated on, at once: that stream
# works in order. The allocator does not know that *another* stream still reads the block. FSDP1 allocates a
# unit's parameters on the stream of all-gathers and uses them on the stream of computation, so on freeing them it
# calls `record_stream`: the allocator holds the block back until the GPU has passed that use. A CPU that is ahead
# gets another block for the next all-gather, at worst for each of the 32 layers of Llama 3 8B: 13 GiB in bf16.
#
# FSDP2 gathers into a buffer, and the stream of computation copies the parameters into memory of that stream.
# Only the buffer crosses streams. Before FSDP2 drops a buffer, it makes the *streams* that fill buffers wait for the
# copy, and the CPU goes on. So a later all-gather may get the buffer at once, before the GPU has run the copy.
# Memory depends on the order of the calls alone. The price is a copy of each unit, not more blocks: in training
# FSDP1 takes three, too (below).
#
# FSDP1's streams could wait as well, for a unit's computation in place of a copy. That was
# [proposed](https://github.com/pytorch/pytorch/pull/108234) in 2023; the CPU still waits in torch 2.13.
#
# The table is measured: the peak of `active` memory and the time of a forward pass through 32 units of 256 MiB in
# bf16, without gradients. One H200 is one rank of 64, whose all-gathers allocate but send nothing (torch 2.11).

# %% tags=["on-a-gpu"] jupyter={"source_hidden": true}
from fsdp_utils.lessons import recorded
from fsdp_utils.lessons.tables import Table

measured = {row["setting"]: row for row in recorded.load("fsdp1")["results"]["rows"]}
ways, sizes, rows = ("FSDP1", "FSDP1, no limit", "FSDP2"), (256, 4096, 16384), []
for way in ways:
    runs = [measured[f"{way}, {size} tokens"] for size in sizes]
    rows.append([way, *(f"{run['peak_active_gib']:.2f} GiB, {1e3 * run['seconds']:.0f} ms" for run in runs)])
held = {way: [round(measured[f"{way}, {size} tokens"]["peak_active_gib"] * 4) for size in sizes] for way in ways}
assert held["FSDP1, no limit"] == [blocks + more for blocks, more in zip(held["FSDP1"], (0, 7, 7))]
assert held["FSDP2"] == [3 * held["FSDP1"][0], *held["FSDP1"][1:]]
Table(["on one H200", *(f"{size:,} tokens" for size in sizes)], rows)

# %% [markdown]
# With 256 tokens the CPU is the slower one. FSDP1 then holds one block in any case; that it took longer with the
# limiter is one run, which doesn't show why.
# With more tokens the CPU gets ahead, and without the limiter FSDP1 holds seven blocks more (1.75 GiB). **FSDP2 holds
# as much as FSDP1 with its limiter once the CPU is ahead, three blocks, and always three.**
#
# ## What the wait costs
#
# The next cell simulates a forward pass of 32 units, in computations of one unit. All-gathers take 0.5 each (alike),
# 0.2 and 1.6 in turn, or either at random (mean of 200 draws); the CPU works 0.2 for each unit. In the last two
# columns they are alike, and the CPU pauses once in the middle. **Lost** is the time over a pass without limit
# and pause. FSDP2's copies are left out.

# %% tags=["replay"]
import random


def simulate(limit, gathers, pause=0.0, fsdp2=False):
    """Return the most units that hold memory at once, and the time of a forward pass."""
    cpu = gathered = 0.0
    starts, ends, most = [], [0.0], 0                           # of the computation of each unit
    for unit, gather in enumerate(gathers):
        cpu += pause * (unit == 16)
        if limit and unit >= limit:
            cpu = max(cpu, ends[unit + 1 - limit])              # FSDP1's limiter: the CPU waits
        if fsdp2 and unit >= 2:
            gathered = max(gathered, starts[unit - 2])          # FSDP2: all-gathers wait for the copy
        most = max(most, unit + 1 - sum(end <= cpu for end in ends[1:]))
        gathered = max(cpu, gathered) + gather                  # one all-gather after the other
        starts.append(max(cpu, gathered, ends[-1]))
        cpu += 0.2                                              # the CPU issues the unit's kernels
        ends.append(max(starts[-1] + 1.0, cpu))
    return most, ends[-1]


draw = random.Random(0)
alike, in_turn = [0.5] * 32, [0.2, 1.6] * 16
draws = [[draw.choice((0.2, 1.6)) for _ in alike] for _ in range(200)]


def lost(limit, gathers, pause=0.0, fsdp2=False):
    """Return the time that a forward pass takes longer than without limit and pause."""
    return simulate(limit, gathers, pause, fsdp2)[1] - simulate(None, gathers)[1]


rows = []
for name, limit in {"FSDP1, limit 2": 2, "FSDP1, limit 3": 3, "FSDP1, no limit": None, "FSDP2": None}.items():
    two = name == "FSDP2"
    uneven = [sum(lost(limit, gathers, fsdp2=two) for gathers in some) / len(some) for some in ([in_turn], draws)]
    losses = [lost(limit, alike, fsdp2=two), *uneven, lost(limit, alike, 3.0, two)]
    hidden = max(step / 10 for step in range(200) if lost(limit, alike, step / 10, two) < 1e-9)
    units = 3 if two else simulate(limit, alike)[0]             # FSDP2: two buffers and the parameters
    rows.append([name, units, *[abs(round(loss, 1)) for loss in losses], hidden])
lost_if = [f"lost: {when}" for when in ("alike", "in turn", "at random", "pause of 3")]
head = ["", "units in memory", *lost_if, "longest pause without loss"]
Table(head, rows)

# %% [markdown]
# **FSDP2 holds as little as a limit of three and loses no more to uneven all-gathers, but its CPU may pause as
# long as without a limit (12.8 is its lead in the middle).** FSDP1's limit is two in the first forward pass, later
# three (below). Torch's documentation suggests `limit_all_gathers=False` for "CPU-bound workloads with low memory
# pressure": the third row loses nothing, but holds 27 units.
#
# ## FSDP1's queue
#
# After FSDP1 has freed a unit, it puts an **event** into a queue, a mark on the stream of computation that is
# reached when the GPU has finished all work before it. Before an all-gather it waits for an event of the queue.
# The next cell trains six units for two steps. `units_in_memory`, from the folded cell, counts the units gathered,
# less those that the CPU has waited for.

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
    """Train six units under FSDP1 with this queue, or its own; count after each all-gather.

    The root has no parameters: FSDP1 asks the queue for a unit that is still gathered, too, which would count here.
    """
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
# The documentation's "only *two* consecutive FSDP instances" holds in the first forward pass, which leaves two
# events in the queue. In backward FSDP1 gathers the next unit before it frees the present one, so one all-gather
# goes without a wait: three units, three events left. A root with parameters of its own comes on top, as FSDP1 keeps
# it from forward to backward.
#
# ## Your turn 1 · Write the limiter
#
# FSDP1 calls `enqueue(event)` after it has freed a unit and `dequeue_if_needed()` before each all-gather. It waits
# for the event that comes back; with `None` it goes on at once. In the first forward pass exactly `limit` units
# should hold memory. With a limit of two, the second forward pass may hold three, as under FSDP1's own queue.

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
# Write FSDP2's forward pass of eight units on a simulated GPU, which has a stream of all-gathers and one of
# computation.
#
# - `gpu.gather(unit)` takes a buffer and gathers into it.
# - `gpu.compute(unit)` waits for that all-gather, copies the unit out of the buffer and computes. It returns
#   the **event of the copy**.
# - `gpu.free(unit)` drops the unit's buffer, and the next `gather` gets it *at once*.
# - `gpu.gathers_wait_for(event)` makes all later all-gathers wait; `gpu.cpu_waits_for(event)` is FSDP1's way.
#
# The stub takes eight buffers. FSDP1's way takes two, and its CPU waits six times. Manage with two and no wait of
# the CPU, overwrite no buffer before it was copied out, and take no longer than the stub. (All-gathers take 0.3
# to 1.6 computations; the worst case counts.)

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
        if unit not in range(8):
            raise NotYet(f"`gpu.{call}({unit})`: there is no unit {unit}, only 0 to 7.")
        if unit not in self.held:
            raise NotYet(f"`gpu.{call}({unit})`: unit {unit} has no buffer. Gather first, compute, then free.")
        return self.held[unit]

    def is_event(self, event):
        if not isinstance(event, float):
            raise NotYet(f"You wait for {event!r}: expected an event, which is what `gpu.compute` returns.")
        return event


@turn(2, {
    "buffers": at_most(2, "Buffers pile up: free a unit's buffer right after the next unit's `gather`."),
    "buffers overwritten before they were copied out": exactly(
        0, more="A buffer is filled while it still holds an older unit: let the all-gathers wait for its copy."
    ),
    "waits of the CPU": exactly(0, more="The CPU waits, as under FSDP1: let the all-gathers wait for the event."),
    "times as long as the stub": exactly(
        1,
        more="An all-gather waits for the copy of the unit just before it: after `gather(unit)`, wait for the copy "
        "of `unit - 1`, then free `unit - 1`.",
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
        "buffers overwritten before they were copied out": max(gpu.overwritten for gpu, _ in runs),
        "waits of the CPU": max(gpu.waits for gpu, _ in runs),
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

# %% tags=["wrong"] turn=2 says="right after the next unit's"
def fsdp2_forward(gpu):                         # one unit too late: three buffers
    copied = []
    for unit in range(8):
        gpu.gather(unit)
        if unit >= 2:
            gpu.gathers_wait_for(copied[unit - 2])
            gpu.free(unit - 2)
        copied.append(gpu.compute(unit))

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

# %% tags=["wrong"] turn=2 says="there is no unit 8"
def fsdp2_forward(gpu):
    for unit in range(8):
        gpu.gather(unit)
        gpu.gathers_wait_for(gpu.compute(unit))
        gpu.free(unit + 1 if unit == 7 else unit)

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
# | `FullyShardedDataParallel.rate_limiter` takes long in a profile of FSDP1 | the CPU waits for memory | nothing while the GPU is busy; else the rule below |
# | FSDP1's reserved memory or `num_alloc_retries` is high | `limit_all_gathers=False`; `SHARD_GRAD_OP`, which keeps parameters until backward; or other tensors | set `limit_all_gathers=True`; `FULL_SHARD`, which frees after forward; if you have both: [lesson 5](05_maximising_throughput.ipynb) |
# | FSDP2 holds the memory of more than three units | normal in backward: two of parameters, and gradients. Else a large root unit, `reshard_after_forward=False` or a long prefetch list | `fully_shard` embedding and head; `reshard_after_forward=True`; a shorter list ([lesson 4](04_backward_prefetch.ipynb)) |
# | FSDP2 with tensor parallelism takes more than FSDP1 did | NCCL's asynchronous collectives called `record_stream`, too ([torchtitan 735](https://github.com/pytorch/torchtitan/issues/735)) | `TORCH_NCCL_AVOID_RECORD_STREAMS=1`; not needed after torch 2.7 ([the change](https://github.com/pytorch/pytorch/pull/150398)) |
#
# ## The rule
#
# FSDP2: all-gathers need no limit. FSDP1: leave `limit_all_gathers=True`; try `False` only if the GPU idles after
# the waits and memory is left.
#
# [← lesson 10](10_end_to_end.ipynb) · [lesson 12 →](12_a_model_too_big_for_one_rank.ipynb)

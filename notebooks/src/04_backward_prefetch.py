# %% [markdown]
# # 4 · Backward prefetch
#
# FSDP has to gather each unit before it can compute with it. It can ask for the next unit early, while it
# still computes with the present one: it *prefetches*. In this lesson you record in which order FSDP really
# issues its all-gathers under each setting, write a prefetch of your own, and replay what the order is worth.

# %% [markdown] tags=["card"]
# learn:
# - the order of all-gathers under FSDP2, and under FSDP1's `None`, `BACKWARD_POST` and `BACKWARD_PRE`
# - how to write a backward prefetch with `unshard` and a hook
# - how to prefetch more than one unit ahead, and the first unit of a step
# - when prefetching saves time, and what it costs in memory, buffers included
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: '[Backward prefetch](https://www.loom.com/share/21a465d89c6144f09d6a2e3d55824f1e), 2022. Since
#   then: FSDP2 prefetches in backward by itself, as `BACKWARD_PRE` did, and takes lists of modules for
#   more.'

# %% [markdown]
# **The question of this lesson:** a GPU can send and compute at the same time. In which order must FSDP issue
# its work, so that the GPU computes while it sends?

# %% jupyter={"source_hidden": true}
from IPython.display import display

from fsdp_utils.collectives.replay import replay as replay_events
from fsdp_utils.collectives.events import StepEvent
from fsdp_utils.lessons import lesson, plots

KINDS = {"AG": "all_gather", "mm": "compute", "RS": "reduce_scatter"}


def drawing(order, title, alt):
    """The backward pass of three blocks, issued in this order: 2 ms to compute, 0.5 ms for a collective."""
    left = {kind: ["2", "1", "0"] for kind in KINDS}
    events = []
    for place, letters in enumerate(order.split()):
        nbytes = 0 if letters == "mm" else 2**20
        what = (KINDS[letters], left[letters].pop(0), "backward")
        events.append(StepEvent(place, *what, bytes_in=nbytes, bytes_out=nbytes, ranks=(0, 1)))
    drawn = replay_events(events, units=["0", "1", "2"], compute_s=1e-3, link_gib_s=1000 / 1024)
    display(plots.show(drawn.plot(title=title, until=9e-3), alt=alt))


drawing("AG mm RS AG mm RS AG mm RS", "without prefetching (a drawing)", "Gaps between the computations.")
drawing("AG AG mm RS AG mm RS mm RS", "each unit asked for one block early (a drawing)", "No gaps.")

# %% [markdown]
# Both drawings show the backward pass of three blocks, each one a unit, on two lanes. Above is what the GPU
# computes, below what it sends: all-gathers are plain, reduce-scatters hatched. Backward begins with the last
# block, 2. In the upper drawing the GPU computes nothing while it sends the gradients of one block and
# gathers the next. In the lower drawing the next block is there already.
#
# ## In your own code
#
# `fully_shard` prefetches one unit ahead in backward without being asked. The lines with NOTE ask for more:
# two units ahead in both passes, and the first unit while the batch is still being prepared. Save it as
# `train.py` and start it with `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none.
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
# torch.manual_seed(0)                                      # the same weights on every rank
# model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh)
# blocks = list(model)
# for i, block in enumerate(blocks):
#     block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])                # NOTE
#     block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])     # NOTE: the nearest first
# optimizer = torch.optim.AdamW(model.parameters())
# for step in range(10):
#     blocks[0].unshard(async_op=True)                      # NOTE: it is gathered while you load the batch
#     x = torch.randn(32, 256, device=device)               # your data
#     model(x).square().mean().backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# Whether these lines pay off, and what they cost, is what the rest of the lesson measures.
#
# **What is live here, and what is not.** The *order* in which FSDP issues its work and the *bytes* are
# recorded on real ranks. The *time lines* with overlap are a **replay**: a calculation from that order and
# from durations that we choose. On a CPU with gloo next to nothing overlaps, so this machine cannot measure
# what prefetching saves.
#
# ## Four ranks

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import itertools
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, inner=256):
        super().__init__()
        self.up, self.down = nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x):                                       # f32[batch, 64]
        return x + self.down(F.gelu(self.up(x)))                # f32[batch, 64]


def blocks(sizes=(256,) * 4):
    torch.manual_seed(0)
    return [Block(inner).to(device) for inner in sizes]


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 64, generator=generator).chunk(world)[rank].to(device)  # f32[24 / world, 64]


# %% [markdown]
# The model is four equal blocks, each a unit. The folded cell above defines `Block`, and two functions:
# `blocks()` builds four blocks with the same weights on every rank, and `batch()` returns this rank's
# samples.

# %%
# %%ranks
def fsdp2(sizes=(256,) * 4, **options):
    layers = blocks(sizes)
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(nn.Sequential(*layers), **options)


def step(model):
    loss = model(batch()).square().mean()
    loss.backward()
    return loss.item()


# %% [markdown]
# ## Record one step
#
# `record_collectives` is put around a step. It records every collective of this process, and, from FSDP's
# own hooks, which unit each one is for and when a unit computes.

# %% tags=["record"]
# %%ranks
from fsdp_utils import record_collectives


def record(model):
    step(model)                                                 # the first step also sets FSDP up
    with record_collectives(model) as trace:
        step(model)
    return trace


trace = record(fsdp2())

# %% jupyter={"source_hidden": true}
# %%ranks
def by_phase(trace):
    """For each kind of collective and phase: how many, and KiB of the full tensors."""
    rows = {}
    for event in trace.collectives:
        count, nbytes = rows.get((event.kind, event.phase), (0, 0))
        rows[event.kind, event.phase] = count + 1, nbytes + event.bytes
    return [[*key, count, round(nbytes / 1024)] for key, (count, nbytes) in rows.items()]


# %% jupyter={"source_hidden": true}
Table(["collective", "phase", "count", "KiB, all units"], ranks.get("by_phase(trace)")[0])

# %% [markdown]
# Each of the four units is gathered twice and reduced once. The model around the blocks has no parameters
# of its own, so it gathers nothing. The figure shows when each collective ran.

# %% jupyter={"source_hidden": true}
live = ranks.get("trace")[0]
plots.show(live.plot(), alt="One step as recorded on rank 0: no two bars at the same time.")

# %% [markdown]
# The colours are the blocks, 0 to 3. On a CPU each bar stands alone: gather, compute, gather, compute. With
# gloo, FSDP2's all-gather blocks the program until it has finished. (The computations are thin lines, because
# the blocks are tiny.)

# %% tags=["check"]
# %%ranks
kinds = trace.bytes_by_kind()
assert kinds["all_gather"] == 2 * kinds["reduce_scatter"]       # forward and backward
padding = kinds["reduce_scatter"] - sum(trace.unit_bytes.values())
assert padding == 0 or (64 % world and padding > 0)             # on 3 ranks, 64 rows are padded to 66
timed = [e for e in trace.events if e.seconds]
spans = sorted((e.start, e.start + e.seconds) for e in timed)
overlap = sum(max(0.0, end - later) for (_, end), (later, _) in itertools.pairwise(spans))
assert on_gpu or overlap <= 0.05 * sum(end - start for start, end in spans)     # a GPU's streams do overlap
print("Checked: twice as many bytes gathered as reduced; less than 5% of the time overlaps on a CPU.")

# %% [markdown]
# On a GPU the program only *issues* work. The GPU runs it later, in several **streams**: queues that it works
# off side by side. Computation has one stream, communication others. But the all-gathers and reduce-scatters
# of one process group run one after the other, in the order in which they were issued. So an all-gather that
# is issued after a reduce-scatter has to wait for it. That is why the order matters.
#
# ## Where does the next all-gather go?
#
# In backward each block needs three things: its all-gather (`AG`), its computation (`mm`, for matrix
# multiplication), and the reduce-scatter of its gradients (`RS`). FSDP1, the older API, lets you choose where
# the next block's `AG` goes. Its setting `None` issues `AG mm RS AG mm RS …`.
#
# **Predict before you go on.** Where does the next `AG` go if FSDP asks for it after the computation of the
# present block (`BACKWARD_POST`)? Where, if it asks before (`BACKWARD_PRE`)?
#
# <details><summary>Answer</summary>
#
# After: `AG mm AG RS mm AG RS …`, between computation and reduce-scatter. Before: `AG AG mm RS AG mm RS …`,
# so that the next block is on its way while the present one computes.
#
# </details>

# %% tags=["orders"]
# %%ranks
def fsdp1(backward_prefetch=None, **options):
    options = dict(backward_prefetch=backward_prefetch, device_id=device, **options)
    return FSDP(nn.Sequential(*(FSDP(block, **options) for block in blocks())), **options)


def order(trace, phase):
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "compute": "mm"}
    return " ".join(letters[e.kind] for e in trace.events if e.phase == phase and e.kind in letters)


traces = {
    "None": record(fsdp1(None)),
    "POST": record(fsdp1(BackwardPrefetch.BACKWARD_POST)),
    "PRE": record(fsdp1(BackwardPrefetch.BACKWARD_PRE)),
    "FSDP2": trace,
}

# %% jupyter={"source_hidden": true}
def orders(*names, phases=("forward", "backward")):
    """A table of recorded orders."""
    rows = [ranks.get(f"[order(traces[{name!r}], phase) for phase in {phases}]")[0] for name in names]
    return Table(["setting", *phases], [[name, *row] for name, row in zip(names, rows)])


orders("None", "POST", "PRE", "FSDP2", phases=("backward",))

# %% [markdown]
# The first three rows are FSDP1's settings. FSDP2 has no such setting, and issues the order of
# `BACKWARD_PRE`, which is also FSDP1's default. With `None`, each all-gather but the first stands behind a
# reduce-scatter and in front of the computation that needs it. So no computation is left to hide it behind.

# %% tags=["fsdp2", "check"]
# %%ranks
traces["FSDP2, kept"] = record(fsdp2(reshard_after_forward=False))
assert order(traces["None"], "backward") == "AG mm RS AG mm RS AG mm RS AG mm RS"
assert order(traces["POST"], "backward") == "AG mm AG RS mm AG RS mm AG RS mm RS"
assert order(traces["PRE"], "backward") == "AG AG mm RS AG mm RS AG mm RS mm RS"
assert order(traces["FSDP2"], "backward") == order(traces["PRE"], "backward")
assert order(traces["FSDP2, kept"], "backward") == "mm RS mm RS mm RS mm RS"
for recorded in traces.values():
    assert order(recorded, "forward") == "AG mm AG mm AG mm AG mm"
print("Checked: FSDP2 and BACKWARD_PRE issue the same order; in forward all settings issue AG mm AG mm …")

# %% [markdown]
# How does FSDP know which block comes next? It notes the order in which the units end their forward pass,
# and goes through it in reverse in the backward pass.
#
# ## Your turn 1 · Write the prefetch
#
# Here is FSDP2 with its own prefetching switched off. The trick: `set_modules_to_backward_prefetch` takes a
# list of modules, which replaces FSDP2's own choice. A block that names itself asks for nothing new, because
# it is gathered already.

# %%
# %%ranks
def without_prefetch():
    model = fsdp2()
    for block in model:
        block.set_modules_to_backward_prefetch([block])
    return model


print(order(record(without_prefetch()), "backward"))

# %% [markdown]
# Write `BACKWARD_PRE` for this model, with hooks: functions that autograd calls in the backward pass. You
# write `hook_of(blocks, i)`, which returns such a function. Autograd calls it with `grad`, the gradient of
# the output of block `i`. At that moment block `i` has been gathered, and its backward pass is about to
# begin. Ask for the block that is needed next.
#
# `block.unshard(async_op=True)` starts the all-gather of a block and returns at once. FSDP waits for it when
# the block is used. Without `async_op=True` the call waits itself. Edit the next cell, then run it and the
# folded cells below it.
#
# <details><summary>Hint</summary>
#
# Backward goes from the last block to the first, so block `i` is followed by block `i - 1`. And block 0? The
# hook must return `None`: what it returns replaces the gradient.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def hook_of(blocks, i):
    return None                                 # your lines here; return a function of one argument, grad


# %% jupyter={"source_hidden": true}
# %%ranks
def asked_early(hook_of):
    """Record a step with these hooks."""
    model = without_prefetch()
    layers, waited, late = list(model), [], []
    if any(hook_of(layers, i) is None for i in range(len(layers))):
        return None
    step(model)
    trace = None

    def install(i, block):
        hook, unshard = hook_of(layers, i), block.unshard
        block.register_forward_hook(lambda module, args, y: y.register_hook(hook) and None)

        def watched(async_op=False):
            waited.append(not async_op)
            return unshard(async_op=async_op)

        block.unshard = watched

        def half_done(*_):                      # the gradient of `up`'s output is there, half of the block
            asked = {e.module for e in trace.events if (e.kind, e.phase) == ("all_gather", "backward")}
            late.append(i > 0 and str(i - 1) not in asked)

        block.up.register_forward_hook(lambda module, args, y: y.register_hook(half_done) and None)

    for i, block in enumerate(layers):
        install(i, block)
    with record_collectives(model) as trace:
        step(model)
    return {
        "blocks that computed before the next one was asked for": sum(late),
        "all-gathers in one step": sum(e.kind == "all_gather" for e in trace.events),
        "blocks complete at once": trace.peak_units,
        "calls of unshard that waited": sum(waited),
        "trace": trace,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "asked_early(hook_of)",
    {
        "blocks that computed before the next one was asked for": exactly(
            0, otherwise="A block computes while nothing is on its way. Block i is followed by block i - 1."
        ),
        "all-gathers in one step": exactly(
            8,
            otherwise="Each block should be gathered twice in a step. One is gathered that is not needed: "
            "blocks[-1] is the last block.",
        ),
        "blocks complete at once": at_most(
            2, otherwise="Ask for the next block alone: more than two are complete at the same time."
        ),
        "calls of unshard that waited": exactly(
            0, otherwise="Without async_op=True, unshard waits for the all-gather, and nothing overlaps."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def hook_of(blocks, i):
    def hook(grad):
        if i > 0:
            blocks[i - 1].unshard(async_op=True)

    return hook

# %% tags=["wrong"] turn=1
# %%ranks
def hook_of(blocks, i):
    return lambda grad: None

# %% tags=["wrong"] turn=1
# %%ranks
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard(async_op=True) and None

# %% tags=["wrong"] turn=1
# %%ranks
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard() if i > 0 else None

# %% tags=["wrong"] turn=1
# %%ranks
def hook_of(blocks, i):
    return lambda grad: blocks[min(i + 1, 3)].unshard(async_op=True) and None

# %% tags=["wrong"] turn=1
# %%ranks
def hook_of(blocks, i):
    def hook(grad):
        for block in blocks[max(0, i - 2) : i][::-1]:
            block.unshard(async_op=True)

    return hook

# %% [markdown]
# %% jupyter={"source_hidden": true}
lines = {"nothing asked early": ranks.get("traces['None']")[0], "target": run_solution(4, 1)[0]["trace"]}
if mine := yours(1, "trace"):
    lines["yours"] = mine[0]
for name, line in lines.items():
    sent = next(event.sent_bytes for event in line.collectives)
    backward = [event for event in line.events if event.phase == "backward"]
    speed = sent / 2**30 / 0.5e-3                               # GiB/s: a collective takes 0.5 ms
    run = replay_events(backward, units=list(line.unit_bytes), compute_s=1e-3, link_gib_s=speed)
    drawn = run.plot(title=f"backward, replayed: {name}", until=12.5e-3)
    display(plots.show(drawn, alt=f"Backward, replayed: {name}."))

# %% [markdown]
# The figures show the order on the two lanes of the drawings at the top. When your hooks work, run the cell
# again: your time line appears below the two.
#
# ## More than one block ahead
#
# FSDP2 takes a list for each direction: the modules to ask for when this one begins to compute. Here each
# block names the next two.

# %% tags=["explicit"]
# %%ranks
def two_ahead(model):
    blocks = list(model)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])     # the nearest first
    return model


traces["FSDP2, two ahead"] = record(two_ahead(fsdp2()))

# %% jupyter={"source_hidden": true}
orders("FSDP2", "FSDP2, two ahead")

# %% [markdown]
# With two ahead, three all-gathers stand before the first computation, and one more behind it. By
# itself FSDP2 issues nothing early in forward. There it relies on the GPU's streams: no reduce-scatter is
# in the way, so the all-gather of the next block can run beside a computation that was issued before it.
# [FSDP's notes](https://docs.pytorch.org/docs/stable/notes/fsdp.html) call that *implicit* prefetching, and
# *explicit* what is issued early.
#
# ## The first all-gather
#
# At the start of a step no computation of the model is there to hide an all-gather. But something else may
# be: loading the batch, moving it to the GPU. So ask for the first block before that.

# %%
# %%ranks
model = fsdp2()
step(model)
with record_collectives(model) as first:
    model[0].unshard(async_op=True)                 # asks for block 0, and returns at once
    x = batch()                                     # meanwhile, what has to be done before the forward pass
    model(x).square().mean().backward()
print("before forward:", order(first, "other"), "  forward:", order(first, "forward"))

# %% tags=["check"]
# %%ranks
early = next(event for event in first.events if event.kind == "all_gather")
assert (early.module, early.phase) == ("0", "other")
assert sum(event.kind == "all_gather" for event in first.events) == 8
assert order(traces["FSDP2, two ahead"], "forward") == "AG AG AG mm AG mm mm mm"
assert order(traces["FSDP2, two ahead"], "backward") == "AG AG AG mm RS AG mm RS mm RS mm RS"
print("Checked: the first all-gather of the step is block 0's, before forward; there are 8, as without.")

# %% [markdown]
# ## FSDP1: forward prefetch
#
# (If you use FSDP2 alone, you can go on to [What it costs](#What-it-costs).) With `forward_prefetch=True`
# FSDP1 assumes that each step runs the units in the order of the first step, and asks for the next one early
# in forward, too.

# %% tags=["forward", "both"]
# %%ranks
traces["forward_prefetch"] = record(fsdp1(None, forward_prefetch=True))
traces["both"] = record(fsdp1(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True))

# %% jupyter={"source_hidden": true}
orders("None", "forward_prefetch", "PRE", "both")

# %% [markdown]
# The rows come in pairs: "forward_prefetch" is `None` with `forward_prefetch=True`, and "both" is
# `BACKWARD_PRE` with it. In forward the next all-gather stands before the computation, as promised. But
# backward has changed too, in both pairs. Each reduce-scatter but the last comes one block later. (The last
# `mm` of these two rows is block 0 again, which only copies its gradients into one flat tensor.)
#
# Why? In backward, autograd first runs what was created *last* in forward. FSDP1 creates the views of a
# unit's parameters when it gathers the unit. With forward prefetch, the views of block 3 are created *before*
# block 2 computes. So in backward, autograd computes block 2 before it comes to the gradients of block 3's
# views, and the reduce-scatter of block 3 needs these. The option's documentation does not mention it.

# %% tags=["check"]
# %%ranks
assert order(traces["forward_prefetch"], "forward") == "AG AG mm AG mm AG mm mm"
assert order(traces["forward_prefetch"], "backward") == "AG mm AG mm RS AG mm RS AG mm RS mm RS"
assert order(traces["both"], "forward") == order(traces["forward_prefetch"], "forward")
assert order(traces["both"], "backward") == "AG AG mm AG mm RS AG mm RS mm RS mm RS"
print("Checked: with forward_prefetch each reduce-scatter but the last is issued one block later.")

# %% [markdown]
# ## What it costs
#
# A unit that is gathered early takes memory early. Count bytes, with the meter of
# [lesson 0](00_fsdp_from_scratch.ipynb): full parameters, and the buffers that FSDP2 gathers into.

# %% tags=["memory"]
# %%ranks
from fsdp_utils.lessons.meter import Meter

block_bytes = sum(p.nbytes for p in Block().parameters())


def measured(model):
    """The most bytes in forward and in backward, in blocks: full parameters, and these with buffers."""
    model.zero_grad()
    with Meter(model.parameters()) as meter:
        loss = model(batch()).square().mean()
        until = len(meter.gather_bytes)
        loss.backward()
    both = (meter.whole_bytes, meter.gather_bytes)
    return [round(max(part) / block_bytes, 1) for b in both for part in (b[:until], b[until:])]


def in_blocks(model):
    """The least of three steps: gloo's own thread may let go of a buffer a little late."""
    step(model)
    return [min(peaks) for peaks in zip(*(measured(model) for _ in range(3)))]


# %% jupyter={"source_hidden": true}
# %%ranks
held = {
    "FSDP1, None": in_blocks(fsdp1(None)),
    "FSDP1, PRE": in_blocks(fsdp1(BackwardPrefetch.BACKWARD_PRE)),
    "FSDP1, forward_prefetch": in_blocks(fsdp1(None, forward_prefetch=True)),
    "FSDP1, both": in_blocks(fsdp1(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True)),
    "FSDP2": in_blocks(fsdp2()),
    "FSDP2, two ahead": in_blocks(two_ahead(fsdp2())),
    "FSDP2, kept": in_blocks(fsdp2(reshard_after_forward=False)),
}

# %% jupyter={"source_hidden": true}
Table(
    ["peak, in blocks", "forward", "backward", "forward, with buffers", "backward, with buffers"],
    [[way, *peaks] for way, peaks in ranks.get("held")[0].items()],
    note="“kept” is reshard_after_forward=False: units stay gathered from forward to backward.",
)

# %% [markdown]
# In backward, `BACKWARD_PRE` and FSDP2 hold one block more than `None`, whatever the size of the model. With
# 32 equal blocks that is a thirty-second of the full parameters.
#
# In forward, FSDP2 holds three blocks' worth of bytes although one block is gathered: it gathers into a
# buffer, copies the parameters out, and keeps the buffer until the next unit has been copied out. So its
# peak of parameters and buffers is in forward, and two blocks ahead makes it four. ("kept" has two buffers on
# top of its four blocks.) FSDP1 gathers straight into the parameters.
#
# Gradients come on top: those of the block that computes are complete until they are reduced, and with
# `forward_prefetch` those of two blocks. The table counts in the order in which the program issues its work.
# On a GPU the program runs ahead of the GPU, and FSDP1 could then have more blocks allocated than the table
# says. Its rate limiter is there to bound that ([lesson 11](11_rate_limiter.ipynb)).

# %% tags=["check"]
# %%ranks
peaks = {name: recorded.peak_units for name, recorded in traces.items()}
assert (peaks["None"], peaks["POST"], peaks["PRE"], peaks["FSDP2"]) == (1, 1, 2, 2)
assert (peaks["forward_prefetch"], peaks["both"]) == (2, 3)
assert (peaks["FSDP2, two ahead"], peaks["FSDP2, kept"]) == (3, 4)
wanted = {"FSDP1, None": [1, 1, 1, 1], "FSDP1, PRE": [1, 2, 1, 2], "FSDP1, both": [2, 3, 2, 3]}
wanted |= {"FSDP2": [1, 2, 3, 2], "FSDP2, two ahead": [3, 3, 4, 3]}
for way, blocks_held in wanted.items():
    assert all(abs(a - b) <= 0.04 * b for a, b in zip(held[way], blocks_held))      # padding, on 3 ranks
print("Checked: the peaks in units as recorded, and in bytes with and without buffers.")

# %% [markdown]
# ## The replay
#
# What is each order worth in time? Put the recorded order on two streams, one for computation and one for
# communication. **This is a simulation**, with these rules:
#
# - The program issues everything in the recorded order, at once.
# - Each stream works in that order. A block computes once it is gathered. A reduce-scatter waits for the
#   computation before it.
# - A block takes 1 ms in forward and 2 ms in backward, a collective 0.5 ms.
# - An all-gather waits until the GPU has finished with the unit freed two before it. This is the rule of
#   FSDP1's rate limiter. FSDP2 has other waits instead. A check below replays its orders without the rule,
#   and gets the same times.

# %%
traces = ranks.get("traces")[0]


def replay(name, collective_ms, **options):
    """Replay a trace with collectives that take so long; all units are equally large."""
    sent = next(event.sent_bytes for event in traces[name].collectives)
    speed = sent / 2**30 / (collective_ms / 1e3)                                # GiB/s
    return traces[name].replay(compute_s=1e-3, link_gib_s=speed, **options)


replays = {name: replay(name, 0.5) for name in traces}

# %% jupyter={"source_hidden": true}
Table(
    ["replay", "ms a step", "of these, only sending"],
    [[name, f"{1e3 * r.step_s:.1f}", f"{1e3 * r.exposed_s:.1f}"] for name, r in replays.items()],
    note="Rows that do not name FSDP2 are FSDP1's settings.",
)

# %% [markdown]
# - Without prefetching (`None`) a step takes 16 ms. With `PRE` it takes 13: 12 ms of computation, the first
#   all-gather and the last reduce-scatter. The first can hide behind the loading of the batch, as above. The
#   last could only hide behind the optimizer, which waits for it.
# - `POST` is as fast as `PRE` here, because the program of this replay issues everything at once. What counts
#   then is that the next all-gather stands before the reduce-scatter. On a slow CPU, further down, `POST`
#   loses.
# - `forward_prefetch` alone saves half a millisecond, and saves it in backward. The first of the three gaps
#   of `None`, 1 ms each, is closed, because no reduce-scatter stands before that all-gather any more. But two
#   reduce-scatters are left for the end instead of one. Together with `PRE`, which has no gaps to close, only
#   this half millisecond more is left.
# - A second block ahead saves nothing here: one is enough to close the gaps. In your turn 2 it is not.
# - "kept" gathers nothing in backward, and takes as long as `PRE`: prefetching hides all of backward's
#   all-gathers. (The first of them runs beside the end of the forward pass.)

# %% tags=["replay", "check"]
wanted = {"None": 16, "PRE": 13, "POST": 13, "FSDP2": 13, "FSDP2, two ahead": 13, "both": 13.5}
wanted["forward_prefetch"] = 15.5
for name, ms in wanted.items():
    assert abs(1e3 * replays[name].step_s - ms) < 1e-3
for name in ("FSDP2", "FSDP2, two ahead"):
    assert abs(replay(name, 0.5, limit_units=None).step_s - replays[name].step_s) < 1e-9
print("Checked: the times above, and FSDP2's also without the rule of the rate limiter.")

# %% [markdown]
# Both replays, one above the other on one time axis. Press ▶, or ▶| to go from event to event; hover over a
# bar to read what it is. Below its streams each run shows what rank 0 holds of each block: from its own shard
# to the full parameters and back, and below them the gradients (hatched), until only the shard's are left.

# %%
from fsdp_utils.collectives import play

play({"replay: backward_prefetch=None": replays["None"], "replay: BACKWARD_PRE, and FSDP2": replays["PRE"]})

# %% [markdown]
# In the upper run there are gaps in the computation of backward. In each of them a reduce-scatter and the
# next all-gather run one after the other. In the lower one the next all-gather has run already.

# %% [markdown]
# ## When does it help?
#
# It depends on how long a collective takes beside a computation. Sweep that in the replay, from a link that
# is far faster than the computation to one that is far slower.

# %% tags=["sweep"]
ratios = [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0]
saved = {ratio: replay("None", ratio).step_s / replay("PRE", ratio).step_s - 1 for ratio in ratios}

# %% jupyter={"source_hidden": true}
import numpy as np

fig, (times, gains) = plots.figure(2, width=9.6, height=3.0)
grid = np.geomspace(0.05, 8, 40)
for name, color in (("None", plots.RANK_COLORS[5]), ("PRE", plots.RANK_COLORS[0])):
    times.plot(grid, [1e3 * replay(name, ratio).step_s for ratio in grid], color=color, label=name)
times.plot(grid, [12 * r for r in grid], color=plots.INK, linestyle=":", label="communication alone")
times.axhline(12, color=plots.INK, linestyle="--", label="computation alone")
times.set(xscale="log", yscale="log", xlabel="a collective, in forward computations", ylabel="ms a step")
times.set_title("replay: a step")
times.legend()
faster = [100 * (replay("None", ratio).step_s / replay("PRE", ratio).step_s - 1) for ratio in grid]
gains.plot(grid, faster, color=plots.RANK_COLORS[0])
gains.set(xscale="log", xlabel="a collective, in forward computations", ylabel="% faster", ylim=(0, None))
gains.set_title("replay: PRE against None")
plots.show(fig, alt="Step time in the replay, and what prefetching gains, against the time of a collective.")

# %% [markdown]
# On the left communication takes next to no time, so there is little to hide. On the right the link is the
# limit: communication alone takes longer than computation. There prefetching saves the same 8 ms in each
# step, all of backward's computation, but the steps get longer, so the share falls slowly: at four times
# still 17%. It is largest in the middle, where communication and computation take about equally long.
#
# So "up to 13% faster", as measured in 2022, is what one model on one machine gave. The replay passes 13% on
# its way up, and again on its way down.

# %% tags=["check"]
best = max(saved, key=saved.get)
assert saved[0.05] < 0.05
assert 0.2 < best < 4
assert saved[8.0] < saved[best] / 2
assert 0.16 < saved[4.0] < 0.18
for ratio in (2.0, 4.0, 8.0):
    assert abs(replay("None", ratio).step_s - replay("PRE", ratio).step_s - 8e-3) < 1e-6
print("Checked: 8 ms from twice a forward computation on; 17% at four times; the largest share between.")

# %% [markdown]
# Try it yourself. The first slider is the time of a collective, beside the 1 ms that a block computes in
# forward: a link that is half as fast takes twice as long. The second is the time that the CPU takes to
# issue the forward pass of a block, as in *A slow CPU* further down. Every number is a replay of an order
# that was recorded on this page. A column higher than 40 ms is cut there.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.sliders import Axis, Point, Stack, explore


def replayed_step(collective_ms, issue_ms, name):
    run = replay(name, collective_ms, issue_s=issue_ms / 1e3)
    step, computing, sending = (1e3 * s for s in (run.step_s, run.compute_s, run.exposed_s))
    alone = 1e3 * replay("FSDP2", collective_ms, issue_s=issue_ms / 1e3).step_s
    return Point(
        [computing, sending, max(step - computing - sending, 0.0)],
        [100 * (step / alone - 1), run.peak_units],
        "replay of the order that was recorded on rank 0",
    )


explore(
    "replay: one step of four blocks",
    [Axis("a collective takes", ratios, "ms", start=3),
     Axis("the CPU issues a block in", [0, 0.6, 1.2], "ms"), Axis("setting", list(traces), start=2)],
    Stack("a step", "ms", {"something computes": plots.RANK_COLORS[0], "only sends": plots.RANK_COLORS[5],
                           "neither": plots.FAINT}, upto=40),
    replayed_step,
    scalars={"longer than FSDP2": "%", "blocks complete at once": "blocks"},
    over="setting",
)

# %% [markdown]
# ## Your turn 2 · Blocks of different sizes
#
# Real models are not made of equal blocks. In this one, every other block is four times as large as its
# neighbours: it takes four times as long to gather, and four times as long to compute. While a small block
# computes, there is not enough time to gather the large one that is needed next. In the replay the backward
# pass computes for 30 ms. FSDP2's own prefetching, one block ahead, adds 14 ms in which the GPU only sends.
# Hide as much of that as you can, with at most three blocks complete at once.
#
# `my_prefetch(blocks)` gets the list of the model's six blocks and returns a dictionary with one list for
# each block: `{block: [blocks to ask for in backward, in this order]}`. Edit the next cell, then run it and
# the folded cells below it.
#
# <details><summary>Hint</summary>
#
# The all-gather of a large block should be issued while the large block before it computes. In backward,
# which two blocks come after block `i`? And which of the two is needed first? Near block 0 there are fewer.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_prefetch(blocks):
    return None                                 # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.collectives.replay import replay

SIZES = (1024, 256) * 3


def uneven(prefetch):
    """Record a model of uneven blocks with these lists and replay it."""
    model = fsdp2(SIZES)
    lists = prefetch(list(model))
    if lists is None:
        return None
    for block, ahead in lists.items():
        block.set_modules_to_backward_prefetch(list(ahead))
    trace = record(model)
    small = trace.unit_bytes["1"]
    seconds = {unit: 1e-3 * nbytes / small for unit, nbytes in trace.unit_bytes.items()}    # 1 ms and 4 ms
    sent = next(e.sent_bytes for e in trace.collectives if e.module == "1" and e.kind == "all_gather")
    backward = [event for event in trace.events if event.phase == "backward"]
    speed = sent / 2**30 / 0.8e-3                                                           # GiB/s
    units = list(trace.unit_bytes)
    replayed = replay(backward, units=units, compute_s=seconds, link_gib_s=speed, limit_units=None)
    return {
        "ms in which it only sends": round(1e3 * replayed.exposed_s, 1),
        "blocks complete at once": trace.peak_units,
        "all-gathers in one step": sum(e.kind == "all_gather" for e in trace.events),
        "replay": replayed,
    }


by_itself = uneven(lambda blocks: {})

# %% jupyter={"source_hidden": true}
turn(
    2,
    "uneven(my_prefetch)",
    {
        "ms in which it only sends": at_most(
            5.3,
            otherwise="Some all-gather could start earlier: while a large block computes, ask for the next "
            "large one too. And ask first for the block that is needed first.",
        ),
        "blocks complete at once": at_most(
            3, otherwise="More than three blocks are complete at once: look fewer blocks ahead."
        ),
        "all-gathers in one step": exactly(
            12, otherwise="A block is gathered that backward has finished with: name blocks before block i."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: blocks[max(0, i - 2) : i][::-1] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: blocks[max(0, i - 1) : i] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: blocks[max(0, i - 3) : i][::-1] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: blocks[i + 1 : i + 3] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: blocks[max(0, i - 2) : i] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2
# %%ranks
def my_prefetch(blocks):
    return {block: [blocks[i - 2]] for i, block in enumerate(blocks) if i > 1}

# %% jupyter={"source_hidden": true}
uneven_runs = {"FSDP2 by itself": ranks.get("by_itself")[0]["replay"]}
uneven_runs["target"] = run_solution(4, 2)[0]["replay"]
if mine := yours(2, "replay"):
    uneven_runs["yours"] = mine[0]
longest = max(run.step_s for run in uneven_runs.values())
for name, run in uneven_runs.items():
    drawn = run.plot(title=f"replay of the backward pass: {name}", until=longest)
    display(plots.show(drawn, alt=f"Replay of the backward pass: {name}."))

# %% [markdown]
# What is left in the target's time line are the first all-gather, a part of the second, for which block 5 is
# too small, and the last reduce-scatter. When your lists work, run the cell with the figures again: your time
# line appears below the two.

# %% tags=["check"]
try_answers(4)
assert abs(ranks.get("by_itself")[0]["ms in which it only sends"] - 14) < 0.2

# %% [markdown]
# ## A slow CPU
#
# So far the program issued everything at once. Now let the CPU take some time to issue the work of a block:
# `issue_s` in forward, twice that in backward. A block takes the GPU 1 ms, a collective 0.9 ms.

# %% tags=["cpu"]
def forward_ms(name, issue_ms):
    spans = replay(name, 0.9, issue_s=issue_ms / 1e3).spans
    return 1e3 * max(span.end for span in spans if span.event.phase == "forward")


issue_times = (0.0, 1.0, 1.2, 1.5, 2.0)
forward = {ms: (forward_ms("None", ms), forward_ms("forward_prefetch", ms)) for ms in issue_times}
settings = ("None", "POST", "PRE")
steps = {ms: [1e3 * replay(n, 0.9, issue_s=ms / 1e3).step_s for n in settings] for ms in issue_times}

# %% jupyter={"source_hidden": true}
Table(
    ["ms to issue a block", "forward", "forward, forward_prefetch", "step, None", "step, POST", "step, PRE"],
    [[ms, *(f"{t:.1f}" for t in (*forward[ms], *steps[ms]))] for ms in issue_times],
    note="Replayed, in ms.",
)

# %% [markdown]
# As long as the CPU is not slower than the GPU (the first two rows), `forward_prefetch` saves nothing: the
# all-gather of the next block is issued early enough anyway. It saves something when the CPU is a little
# slower than the GPU. When the CPU takes twice as long, the GPU waits for the CPU in any order.
#
# A CPU that is a little slower also shows why `BACKWARD_PRE` is preferred to `BACKWARD_POST`, at 1.2 ms 15.3
# against 15.8: POST issues the all-gather only after the computation.

# %% tags=["check"]
gain = {ms: plain - early for ms, (plain, early) in forward.items()}
assert max(abs(gain[0.0]), abs(gain[1.0]), abs(gain[2.0])) < 1e-6
assert max(gain.values()) > 0.3
none_ms, post_ms, pre_ms = steps[1.2]
assert pre_ms < post_ms - 0.3 < none_ms
print("Checked: forward_prefetch gains nothing at 0, 1 and 2 ms; at 1.2 ms PRE is faster than POST.")

# %% [markdown]
# ## On a GPU
#
# What prefetching saves in seconds takes at least two GPUs with a link between them. On
# one GPU there is nothing to send, so this lesson has no number for it rather than a wrong one. If you start
# the lesson where there are several, `record_collectives` sets events in the GPU's streams, which tell when
# the GPU ran what was issued. That has been tested with events made by hand, and has not run on a GPU yet.
#
# ## Proof
#
# Prefetching decides *when* a unit is gathered. It does not change what is computed, as long as all ranks ask
# in the same order. Here are four steps under each setting, and one process with all samples.

# %% tags=["equality"]
# %%ranks
def train(model, alone=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = torch.zeros(4, device=device)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(24, 64, generator=generator)                            # f32[24, 64]
        x = (x if alone else x.chunk(world)[rank]).to(device)                   # f32[24 / world, 64]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach() / (1 if alone else world)
    if not alone:
        dist.all_reduce(losses)
    return losses.tolist()


ways = {
    "one process": train(nn.Sequential(*blocks()), alone=True),
    "FSDP1, None": train(fsdp1(None)),
    "FSDP1, POST": train(fsdp1(BackwardPrefetch.BACKWARD_POST)),
    "FSDP1, PRE": train(fsdp1(BackwardPrefetch.BACKWARD_PRE)),
    "FSDP1, forward_prefetch": train(fsdp1(None, forward_prefetch=True)),
    "FSDP2": train(fsdp2()),
    "FSDP2, two ahead": train(two_ahead(fsdp2())),
}

# %% jupyter={"source_hidden": true}
def losses_of(ways):
    return Table(
        ["loss at step", "1", "2", "3", "4"],
        [[way, *(f"{loss:.4f}" for loss in losses)] for way, losses in ways.items()],
    )


losses_of(ranks.get("ways")[0])

# %% tags=["check"]
# %%ranks
for losses in ways.values():
    torch.testing.assert_close(losses, ways["one process"], rtol=1e-4, atol=1e-6)
of_fsdp1 = [losses for way, losses in ways.items() if way.startswith("FSDP1")]
assert all(losses == of_fsdp1[0] for losses in of_fsdp1)
assert ways["FSDP2"] == ways["FSDP2, two ahead"]
print("Checked: FSDP1's losses are equal to the last bit under all settings, and so are FSDP2's.")

# %% [markdown]
# ## When it goes wrong
#
# Collectives are paired by the order in which ranks issue them, not by what they are meant for. Prefetch
# lists decide this order. So what happens if rank 0 has another list than the others?

# %%
# %%ranks
def other_lists_on_rank_0(model):
    blocks = list(model)
    for i, block in enumerate(blocks):
        before = blocks[max(0, i - 2) : i]
        block.set_modules_to_backward_prefetch(before if rank == 0 else before[::-1])
    return model


parted = train(other_lists_on_rank_0(fsdp2()))

# %% jupyter={"source_hidden": true}
losses_of({"FSDP2": ranks.get("ways['FSDP2']")[0], "other lists on rank 0": ranks.get("parted")[0]})

# %% [markdown]
# No error, and another training: the first loss is right, since forward is as before. In backward rank 0
# gave its shard of block 1 to an all-gather in which the others gave theirs of block 2. The two blocks have
# the same size, so the backend did not notice. With blocks of different sizes gloo ends a rank's process with
# an error. NCCL does not compare sizes: expect a hang, or wrong numbers. `TORCH_DISTRIBUTED_DEBUG=DETAIL` has
# PyTorch compare them first ([lesson 3](03_full_state_dict.ipynb)).
#
# What you see, why, and what helps:
#
# - **The loss differs from one process's from the second step on**, as above. Build the lists from the
#   model's own order, by the same code on every rank.
# - **Out of memory since you prefetch.** Each block ahead is one more block of full parameters. Look at the
#   table of peaks above, and prefetch fewer.
# - **A block is gathered three times in a step.** A list names a block that backward has finished with. It
#   is gathered for nothing, and what was gathered stays in memory until backward is over. Turn 2 counts
#   all-gathers for this reason.
# - **The profiler shows gaps in backward with FSDP2, too.** Either the link is the limit, the right end of
#   the sweep above, or blocks are uneven, as in turn 2. On recent versions of PyTorch
#   `model.set_separate_reduce_scatter_group()` (experimental, in 2.13) lets all-gathers overtake
#   reduce-scatters.

# %% tags=["check"]
# %%ranks
assert abs(parted[0] - ways["FSDP2"][0]) < 1e-6
assert abs(parted[1] - ways["FSDP2"][1]) > 1e-4
print("Checked: the first loss is the same, the second is not.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
peaks = ranks.get("peaks")[0]
lesson.claims(
    4,
    {
        "pre-13-percent": f"In the replay {min(saved.values()):.1%} to {max(saved.values()):.1%} faster, by "
        f"the speed of the link. Memory: {peaks['PRE']} units complete at once instead of {peaks['None']}.",
        "pre-2-to-10-percent": f"In the replay {min(saved.values()):.1%} to {max(saved.values()):.1%}, "
        "see above.",
        "none-no-overlap": f"Backward has none: in the replay {1e3 * replays['None'].exposed_s:.1f} ms of "
        f"the step only send, with BACKWARD_PRE {1e3 * replays['PRE'].exposed_s:.1f}. Forward overlaps with "
        "any setting.",
        "forward-prefetch-cpu": f"Yes: in the replay it saves {abs(gain[0.0]):.1f} ms of forward when the "
        f"CPU is fast, and {gain[1.2]:.1f} ms when the CPU is a little slower than the GPU.",
        "fsdp2-backward": "Yes: the recorded order is that of BACKWARD_PRE.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Collectives of one process group run in the order of issue. Prefetching changes this order, and how many
#   units are complete at once. It does not change what is computed.
# - FSDP2 issues the next block's all-gather before the present block's backward pass, as FSDP1's
#   `BACKWARD_PRE` does. It costs one more block of parameters in backward.
# - For more, give FSDP2 lists of modules, the same on all ranks, and ask for the first block with
#   `unshard(async_op=True)`. Lists pay off where blocks are uneven, or where the CPU is a little slower than
#   the GPU.
# - The gain is largest where communication and computation take about equally long.
#
# ## Next
#
# Prefetching pays for speed with a little memory. How much of a GPU's memory should a batch fill, and why not
# all of it? That is [lesson 5](05_maximising_throughput.ipynb).
#
# [← lesson 3](03_full_state_dict.ipynb) · [lesson 5 →](05_maximising_throughput.ipynb)

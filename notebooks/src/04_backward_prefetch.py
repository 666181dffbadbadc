# %% [markdown]
# # 4 · Backward prefetch
#
# Under FSDP a GPU must gather a block's parameters before the block can compute. Does the GPU wait for that
# communication, and do you have to do anything about it?
#
# **The GPU computes meanwhile, and FSDP2's default is enough.** In backward it starts the next block's
# all-gather before it computes the present block. In the example below the GPU then communicates without computing
# for 1 ms of a step instead of 4. The price is the memory of nearly one more block.
#
# A list of your own is mostly worth it where large and small blocks alternate. With this one the large block
# `i` asks for the next two blocks before it computes in backward:
#
# ```python
# blocks = model.layers
# blocks[i].set_modules_to_backward_prefetch([blocks[i - 1], blocks[i - 2]])    # for i >= 2
# ```

# %% jupyter={"source_hidden": true}
from fsdp_utils.collectives.events import StepEvent
from fsdp_utils.collectives.plot import timelines
from fsdp_utils.collectives.replay import replay as replay_events
from fsdp_utils.lessons import lesson, plots

KINDS = {"AG": "all_gather", "mm": "compute", "RS": "reduce_scatter"}
UNITS = ["block 0", "block 1", "block 2"]

def drawn(order):
    """The backward pass of three blocks, issued in this order: 2 ms to compute, 0.5 ms for a collective."""
    left = {kind: reversed(UNITS) for kind in KINDS}
    events = []
    for place, letters in enumerate(order.split()):
        nbytes = 0 if letters == "mm" else 2**20
        what = (KINDS[letters], next(left[letters]), "backward")
        events.append(StepEvent(place, *what, bytes_in=nbytes, bytes_out=nbytes, ranks=(0, 1)))
    return replay_events(events, units=UNITS, compute_s=1e-3, link_gib_s=1000 / 1024).running

panels = {
    "without prefetching": drawn("AG mm RS AG mm RS AG mm RS"),
    "each block gathered while the block before it computes": drawn("AG AG mm RS AG mm RS mm RS"),
}
plots.show(timelines(panels, UNITS, until=9e-3), alt="Above, gaps between the computations; below, none.")

# %% [markdown]
# Both panels draw the same work, the backward pass of three blocks, which begins with the last one, block 2.
# The plain bars on the lower lane are all-gathers, the hatched ones reduce-scatters, which average the
# gradients.
#
# Look at the gaps on the upper lane. In the first panel the GPU computes nothing between two blocks: it sends
# the gradients of one block, then gathers the next. In the second panel block 1 was gathered while block 2
# computed: it was **prefetched**. The gaps have gone.

# %% tags=["card"]
lesson.card(
    4,
    learn="read the order in which FSDP issues its work, see what it hides, and know when to change it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 18, 19),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then run `torchrun --nproc-per-node 4 train.py`. It trains four equal blocks in three
# ways: with prefetching off, with FSDP2's default, and with the next two blocks gathered early. Look at `build`:
# `set_modules_to_backward_prefetch` takes the list of blocks whose all-gathers are to start before this block
# computes in backward. A list that names only the block itself turns prefetching off, since that block has been
# gathered already; an empty list would restore the default.
#
# None of this belongs in your code. On a CPU almost nothing overlaps, so the script doesn't measure times. It
# records the order in which FSDP2 issues its work, and a **replay** calculates from that order how long a GPU would
# take, if a block computes for 1 ms in forward and 2 ms in backward, and each collective takes 0.5 ms. All times in
# this lesson are replayed.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# LETTERS = {"all_gather": "AG", "compute": "mm", "reduce_scatter": "RS"}
#
# def build(ahead):
#     torch.manual_seed(0)                                     # the same weights on every rank
#     blocks = [nn.Linear(256, 256, device=device) for _ in range(4)]
#     for block in blocks:
#         fully_shard(block, mesh=mesh)
#     for i, block in enumerate(blocks):
#         if ahead is not None:                                # None: leave it to FSDP2
#             earlier = blocks[max(0, i - ahead) : i][::-1]    # backward goes from the last to the first
#             block.set_modules_to_backward_prefetch(earlier or [block])
#     return fully_shard(nn.Sequential(*blocks), mesh=mesh)
#
# for name, ahead in {"off": 0, "default": None, "two ahead": 2}.items():
#     model = build(ahead)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(3):
#         with record_collectives(model) as trace:
#             model(torch.randn(32, 256, device=device)).square().mean().backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     order = [LETTERS[e.kind] for e in trace.events if e.phase == "backward" and e.kind in LETTERS]
#     link = trace.collectives[0].sent_bytes / 2**30 / 0.5e-3  # GiB/s at which a collective takes 0.5 ms
#     run = trace.replay(compute_s=1e-3, link_gib_s=link, limit_units=None, limit_reduces=1)   # FSDP2's limits
#     if dist.get_rank() == 0:
#         ms, exposed = 1e3 * run.step_s, 1e3 * run.exposed_s
#         print(f"{name:9} {ms:.1f} ms, exposed {exposed:.1f}, full {trace.peak_units} |", *order)
# dist.destroy_process_group()
# ```
# ```text
# off       16.0 ms, exposed 4.0, full 1 | AG mm RS AG mm RS AG mm RS AG mm RS
# default   13.0 ms, exposed 1.0, full 2 | AG AG mm RS AG mm RS AG mm RS mm RS
# two ahead 13.0 ms, exposed 1.0, full 3 | AG AG AG mm RS AG mm RS mm RS mm RS
# ```
#
# Read a row from the left. The first number is the time of a step, forward and backward. In all three rows the
# GPU computes for 12 ms, because each of four blocks takes 1 ms in forward and 2 in backward. The rest is
# **exposed** communication: time in which the GPU sends and computes nothing.
#
# `full` is the largest number of blocks that are gathered at the same time, which is what prefetching costs.
# The second block ahead saves nothing here, and keeps a third block in memory.
#
# The letters are the backward pass in the order in which FSDP2 issued it: `AG` is an all-gather, `mm` the
# computation of a block (matrix multiplications), `RS` a reduce-scatter.
#
# ## The order is what counts
#
# `ranks.start()` starts four processes behind this notebook; a cell that begins with `%%ranks` runs in all of
# them. The blocks are now the feed-forward part of a transformer. `ahead(model, count)` sets lists as the script
# did, and with `forward` also lists for the forward pass.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

class Block(nn.Module):
    def __init__(self, inner=256):
        super().__init__()
        self.up, self.down = nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x):                                       # f32[batch, 64]
        return x + self.down(nn.functional.gelu(self.up(x)))    # f32[batch, 64]

def build(sizes=(256,) * 4):
    torch.manual_seed(0)
    blocks = [Block(inner).to(device) for inner in sizes]
    for block in blocks:
        fully_shard(block)
    return fully_shard(nn.Sequential(*blocks))

def ahead(model, count, forward=0):
    """Ask for so many blocks early, in backward and in forward."""
    blocks = list(model)
    for i, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1] or [block])
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + forward])
    return model

# %%
# %%ranks
def step(model):
    samples = torch.randn(24, 64, generator=torch.Generator().manual_seed(rank)).to(device)
    loss = model(samples).square().mean()
    loss.backward()
    return loss.item()

def record(model):
    step(model)                                             # the first step also sets FSDP up
    model.zero_grad()
    with record_collectives(model) as trace:
        step(model)
    return trace

def order(trace, phase="backward"):
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "compute": "mm"}
    return " ".join(letters[e.kind] for e in trace.events if e.phase == phase and e.kind in letters)

# %% [markdown]
# `record` records the second step of a model, and `order` turns the recording into letters. In the table, does
# each `AG` stand before or behind the `mm` and the `RS` of the block that is computed before it?

# %%
# %%ranks
traces = {
    "off": record(ahead(build(), 0)),
    "default": record(build()),
    "two ahead": record(ahead(build(), 2)),
    "two ahead, forward too": record(ahead(build(), 2, forward=2)),
}
orders = {name: [order(trace, "forward"), order(trace)] for name, trace in traces.items()}

# %%
orders = ranks.get("orders")[0]
assert orders["off"][1] == "AG mm RS AG mm RS AG mm RS AG mm RS"
assert orders["default"] == ["AG mm AG mm AG mm AG mm", "AG AG mm RS AG mm RS AG mm RS mm RS"]
Table(["prefetching", "forward", "backward"], [[name, *found] for name, found in orders.items()])

# %% [markdown]
# Your program only *issues* work to a GPU, which puts it into queues, the **streams**: one for computation,
# others for communication. Work in different streams runs at the same time, unless one piece has to wait for
# another. Four rules say what waits:
#
# 1. An `mm` waits for the `AG` of its own block.
# 2. An `RS` waits for the `mm` before it, which computes the gradients that it sends.
# 3. Collectives wait for each other: by default FSDP2 sends all of them through one process group, which runs
#    them one at a time, **in the order of issue**.
# 4. Before each `RS` the GPU copies the block's gradients into a buffer. By default there is one
#    (`limit_reduces=1` in the script), so the copy, and the `mm` behind it, waits for the previous `RS`. That
#    costs nothing here, but does in turn 2.
#
# Now follow "off" in backward, `AG mm RS AG mm`. The second `AG` stands in the queue behind the first `RS`, so
# it can't begin until the first `mm` has ended. The second `mm` needs that `AG`, so the GPU computes nothing
# during both collectives. Four blocks have three such gaps, each of 1 ms.
#
# The fourth millisecond is at the ends of the step: the first `AG` of forward has no `mm` to run beside, and
# neither has the last `RS`. (The first `AG` of backward runs beside the last `mm` of forward.)
#
# In the row "default" the second `AG` stands before the first `mm`, so it runs beside that `mm`, and the `RS`
# of that block runs beside the next `mm`. All three gaps close; only the two ends, 1 ms, are left. FSDP2 can
# do so because it notes the order in which the blocks finish forward, and goes through it in reverse.
#
# **In forward nothing has to be issued early.** There is no `RS` in the way. The CPU issues an `mm`, returns
# at once, and issues the next `AG`, which then runs beside that `mm`. PyTorch calls this *implicit
# prefetching*. It only works while the CPU is ahead of the GPU; a line that makes the CPU wait for the GPU,
# such as `.item()` or printing a tensor, undoes it.

# %% jupyter={"source_hidden": true}
# %%ranks
# the way of 2022: FSDP1's three settings, the same four blocks
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def fsdp1(setting):
    torch.manual_seed(0)
    options = {"backward_prefetch": setting, "device_id": device}
    return FSDP(nn.Sequential(*[FSDP(Block().to(device), **options) for _ in range(4)]), **options)

POST, PRE = BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_PRE
of_fsdp1 = {str(setting): order(record(fsdp1(setting))) for setting in (None, POST, PRE)}
assert of_fsdp1[str(None)] == orders["off"][1]
assert of_fsdp1[str(PRE)] == orders["default"][1]
assert of_fsdp1[str(POST)] == "AG mm AG RS mm AG RS mm AG RS mm RS"

# %% [markdown]
# FSDP1 has an option for this, `backward_prefetch`. On the same blocks, `None` gives the order "off", and FSDP1's
# default, `BACKWARD_PRE`, the order of FSDP2's default (asserted in the folded cell).
#
# ## When does it save time?
#
# In the script the default made a step 23% faster (16 ms over 13), but the 0.5 ms of a collective were assumed.
# The next cells replay recorded orders with faster and slower collectives. In `uneven` every other block is
# larger, and takes that much longer to gather and to compute.

# %%
# %%ranks
uneven = {}
for factor in (1, 2, 4, 8):
    sizes = (256 * factor, 256) * 3                         # six blocks
    uneven[factor] = {"default": record(build(sizes)), "two ahead": record(ahead(build(sizes), 2))}
    model = build(sizes)
    for i in (2, 4):                                        # lists for large blocks only
        model[i].set_modules_to_backward_prefetch([model[i - 1], model[i - 2]])
    uneven[factor]["large"] = record(model)

# %% tags=["sweep", "replay", "cpu", "fsdp2"]
import numpy as np

def speeds(trace, collective_ms, alike=False):
    """Block 1 computes for 1 ms in forward, others in proportion to their bytes or alike."""
    small = trace.unit_bytes["1"]
    seconds = {unit: 1e-3 * (1 if alike else nbytes / small) for unit, nbytes in trace.unit_bytes.items()}
    sent = next(e.sent_bytes for e in trace.collectives if e.module == "1" and e.kind == "all_gather")
    return {"compute_s": seconds, "link_gib_s": sent / 2**30 / (collective_ms / 1e3), "limit_units": None}

def step_ms(trace, collective_ms, issue_ms=0.0, alike=False, buffers=1):
    rates = speeds(trace, collective_ms, alike)
    return 1e3 * trace.replay(**rates, issue_s=issue_ms / 1e3, limit_reduces=buffers).step_s

equal, uneven = ranks.get("traces")[0], ranks.get("uneven")[0]
ratios, issue_times = np.geomspace(0.05, 8, 41), [0.0, 1.2, 2.0]

def faster(traces, new, old, *how):
    """How much faster one way is than another, in %, over the sweep."""
    return [100 * (step_ms(traces[old], r, *how) / step_ms(traces[new], r, *how) - 1) for r in ratios]

# %% jupyter={"source_hidden": true}
fig, (left, right) = plots.figure(2, width=9.6, height=3.2)
for issue_ms, color in zip(issue_times, plots.RANK_COLORS):
    left.plot(ratios, faster(equal, "default", "off", issue_ms), color=color, label=f"CPU issues a block in {issue_ms:g} ms")
gains = {factor: faster(traces, "two ahead", "default") for factor, traces in uneven.items()}
for (factor, gain), color in zip(gains.items(), plots.RANK_COLORS):
    right.plot(ratios, gain, color=color, label="equal blocks" if factor == 1 else f"every other block {factor} x")
for axes, title in ((left, "default against off (replay)"), (right, "two ahead against default (replay)")):
    axes.set(title=title, ylabel="% faster", xscale="log", xlabel="collective / forward pass, of a small block", ylim=(-2, 65))
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.legend(loc="upper left")
plots.show(fig, alt="What prefetching saves in the replay, over the time of a collective.")

# %% jupyter={"source_hidden": true} tags=["check"]
saved = dict(zip(ratios, faster(equal, "default", "off")))
assert abs(step_ms(equal["off"], 0.5) / step_ms(equal["default"], 0.5) - 16 / 13) < 1e-3
assert round(max(saved.values())) == 42
assert 0.7 < max(saved, key=saved.get) < 1.5
assert max(map(abs, faster(equal, "default", "off", 2.0)[:22])) < 1e-6    # up to a ratio of 0.7
for issue_ms in issue_times:
    assert min(faster(equal, "default", "off", issue_ms)) > -1e-6
    assert max(map(abs, faster(equal, "two ahead, forward too", "two ahead", issue_ms))) < 1e-6
between = [r for r, gain in zip(ratios, gains[1]) if gain > 1e-6]
assert 0.9 < min(between) < max(between) < 2
assert min(map(min, gains.values())) > -1e-6
assert max(gains[1]) < 4
assert all(12 < max(gains[factor]) < 18 for factor in (2, 4, 8))
two_buffers = [faster(uneven[factor], "large", "default", 0.0, False, 2) for factor in (2, 4, 8)]
assert [round(max(gain)) for gain in two_buffers] == [17, 27, 31]
for alike, least, most, loss in ((False, 11.5, 18, 1), (True, 5, 14.5, 3.1)):
    for factor in (2, 4, 8):
        of_all, of_large = (faster(uneven[factor], way, "default", 0.0, alike) for way in ("two ahead", "large"))
        assert least < max(of_large) < most
        assert max(of_all) - max(of_large) < loss
        assert min(of_large) > -1e-6

# %% [markdown]
# **Left: the default never loses.** The GPU computes a block's forward pass in 1 ms; each line is a CPU that
# takes so long to issue it. The blue line shows the script's 23% at 0.5, and 42% where a collective takes about
# as long as the forward pass. Further left there's less communication to hide; further right it alone takes
# longer than computation, and no order hides it all. With a slow CPU and a fast link there's no gain: the GPU
# waits for the CPU anyway, and communication fits into these pauses.
#
# **Right: with equal blocks leave the default alone.** A second block ahead gains less than 4%, in a narrow
# range. Where every other block is larger it gains 12 to 18% at best, because a small block computes too
# briefly to hide the gather of the large block that backward needs next.
#
# Lists for the large blocks alone, as at the top of this page, reach the same. A second buffer (rule 4),
# `model.set_reduce_scatter_max_input_buffers(2)`, saves more; it is experimental in PyTorch 2.13.
#
# **Lists for forward,** `set_modules_to_forward_prefetch`, change nothing in the left panel, where the CPU never
# waits for the GPU. If yours does inside a block, such a list issues the next `AG` before that wait, which may
# help (not measured here).
#
# **Where does your job stand on this axis?** In bf16 a block of P parameters gathers 2P bytes, and its forward
# pass takes about 2P FLOPs per token. P cancels, and the position is F / (T · B): your GPU reaches F FLOP/s,
# takes T tokens through one forward pass, and gathers B bytes/s. If F is 4·10¹⁴ and B is 5·10¹⁰, between hosts
# (both assumed), T = 8,000 tokens put you at 1.
#
# More tokens move you to the left: if much communication is exposed in spite of the default, first raise the
# batch. Accumulating gradients doesn't help, as by default each small batch gathers again.
#
# ## What it costs
#
# A block that is gathered early holds its memory early. In the folded cell `peak` counts the bytes of all tensors
# during backward with the `Meter` of [lesson 0](00_fsdp_from_scratch.ipynb), for eight blocks and one sample, so
# that activations hardly count.

# %% jupyter={"source_hidden": true} tags=["memory"]
# %%ranks
from fsdp_utils.lessons.meter import Meter

def peak(model):
    """The most bytes of all tensors during backward, in blocks."""
    samples = torch.ones(1, 64, device=device)
    model(samples).sum().backward()
    model.zero_grad()
    with Meter(model.parameters()) as meter:
        loss = model(samples).sum()
        forward = len(meter.tensor_bytes)
        loss.backward()
    return max(meter.tensor_bytes[forward:]) / sum(p.numel() * p.element_size() for p in model[0].parameters())

EIGHT = (256,) * 8
ways = {"off": lambda: ahead(build(EIGHT), 0), "default": lambda: build(EIGHT), "two ahead": lambda: ahead(build(EIGHT), 2)}
full = {name: record(make()).peak_units for name, make in ways.items()}
peaks = {name: min(peak(make()) for _ in range(3)) for name, make in ways.items()}    # gloo may free a buffer late

# %%
full, peaks = ranks.get("full")[0], ranks.get("peaks")
least = {name: min(found[name] for found in peaks) for name in full}
more = {name: round(least[name] - least["off"], 1) for name in full}
assert all(abs(more[name] - (1 - 1 / len(peaks)) * (full[name] - 1)) < 0.15 for name in full)
Table(["prefetching", "full blocks at once", "peak in backward, blocks more than off"],
      [[name, full[name], more[name]] for name in full])

# %% [markdown]
# Each block ahead keeps one more block full, and the peak grows by nearly one block. For Llama 3 8B,
# with 218 million parameters in a block, that's 0.4 GiB in bf16.
#
# ## How do you see it in your own job?
#
# Profile one step, after a few others, and open the file in [Perfetto](https://ui.perfetto.dev):
#
# ```python
# from torch.profiler import profile
#
# with profile() as prof:
#     loss = model(batch).sum()                     # your training step
#     loss.backward()
# if dist.get_rank() == 0:
#     prof.export_chrome_trace("trace.json")
# ```
#
# First look at the CPU's row. Inside `FSDP::pre_backward (layers.3)` there should be
# `FSDP::backward_prefetch for layers.2`: the all-gather is issued before layer 3 computes. (With your own lists
# the all-gather comes after `FSDP::pre_backward`, not inside.)
#
# Then look at the GPU's streams. The NCCL kernels, `ncclDevKernel_AllGather…` and
# `ncclDevKernel_ReduceScatter…`, should lie beside matrix multiplications; where the stream of computation is
# empty below one of them, it is exposed. (This page was run on CPUs, so it shows no such trace.)
#
# Gaps at the two ends of a step are normal. The first can be filled: `model[0].unshard(async_op=True)` after
# `optimizer.step()` starts the first all-gather while you load the batch.
#
# ## Your turn 1 · Write the prefetch
#
# Write FSDP2's default yourself, for a model whose own prefetching is off. Autograd can call a function of
# yours, a *hook*, when backward arrives at a tensor. Yours is called when block `i` has been gathered and is
# about to compute its backward pass.
#
# - `hook_of(blocks, i)` gets all blocks in the order of forward, and returns the hook of block `i`.
# - The hook takes one argument, `grad`. It starts the all-gather of the block that backward needs next, and
#   returns `None` (autograd would take anything else as the gradient).
# - `block.unshard(async_op=True)` starts an all-gather and returns at once.
#
# <details><summary>Hint</summary>
#
# Backward goes from the last block to the first. What comes after block 0?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

@turn(1, {
    "blocks that computed before the next one was asked for": exactly(
        0, "A block computes while nothing is on its way: block i is followed by block i - 1."
    ),
    "all-gathers in one step": exactly(
        8, more="A block is gathered that nobody needs any more (blocks[-1] is the last block).",
        less="Each block is gathered twice in a step, once in each direction.",
    ),
    "full blocks at once": at_most(2, "More than two blocks are full at once: ask for the next block alone."),
    "calls of unshard that waited": exactly(0, "The hook waits for the all-gather, so nothing overlaps: use async_op=True, and no wait()."),
}, returns=False)
def score_hooks(hook_of):
    def without_result(hook):
        if not callable(hook):
            raise NotYet("Return a function of one argument from `hook_of`, for every block.")

        def called(grad):
            if hook(grad) is not None:
                raise NotYet("The hook returned something, which autograd takes as the gradient: return None.")

        return called

    model = ahead(build(), 0)
    layers, hooks, waited, late = list(model), [], [], []
    step(model)
    model.zero_grad()

    def at_block(i):
        def begins(module, inputs, output):
            output.register_hook(hooks[i])

        def half_done(module, inputs, output):              # block i has computed half of its backward pass
            def check(grad):
                asked = {e.module for e in trace.events if (e.kind, e.phase) == ("all_gather", "backward")}
                late.append(i > 0 and str(i - 1) not in asked)

            output.register_hook(check)

        unshard = layers[i].unshard

        def watched(async_op=False):
            handle = unshard(async_op=async_op)
            waited.append(not async_op)
            if handle is not None:
                wait = handle.wait
                handle.wait = lambda: (waited.append(True), wait())[1]
            return handle

        layers[i].register_forward_hook(begins)
        layers[i].up.register_forward_hook(half_done)
        layers[i].unshard = watched

    for i in range(len(layers)):
        at_block(i)
    hooks += [without_result(hook_of(layers, i)) for i in range(len(layers))]
    if waited:
        raise NotYet("`hook_of` itself called unshard: put the call into the function that it returns.")
    with record_collectives(model) as trace:
        step(model)
    return {
        "blocks that computed before the next one was asked for": sum(late),
        "all-gathers in one step": sum(e.kind == "all_gather" for e in trace.events),
        "full blocks at once": trace.peak_units,
        "calls of unshard that waited": sum(waited),
    }

# %%
# %%turn 1
def hook_of(blocks, i):                         # all blocks in the order of forward, and the number of one
    return None                                 # your lines here: return a function of grad

# %% tags=["solution"] turn=1
def hook_of(blocks, i):
    def hook(grad):
        if i > 0:
            blocks[i - 1].unshard(async_op=True)

    return hook

# %% tags=["right"] turn=1
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard(True) and None if i else None

# %% tags=["right"] turn=1
import functools

def ask(block, grad):
    if block is not None:
        block.unshard(async_op=True)

def hook_of(blocks, i):
    return functools.partial(ask, blocks[i - 1] if i > 0 else None)

# %% tags=["right"] turn=1
class Ask:
    def __init__(self, blocks):
        self.blocks = blocks

    def __call__(self, grad):
        for block in self.blocks:
            block.unshard(async_op=True)

def hook_of(blocks, i):
    return Ask(blocks[max(0, i - 1) : i])

# %% tags=["wrong"] turn=1 says="nothing is on its way"
def hook_of(blocks, i):
    return lambda grad: None

# %% tags=["wrong"] turn=1 says="put the call into the function that it returns"
def hook_of(blocks, i):
    if i > 0:
        blocks[i - 1].unshard(async_op=True)
    return lambda grad: None

# %% tags=["wrong"] turn=1 says="The hook returned something"
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard(async_op=True) if i else None

# %% tags=["wrong"] turn=1 says="nobody needs any more"
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard(async_op=True) and None

# %% tags=["wrong"] turn=1 says="use async_op=True"
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard() if i > 0 else None

# %% tags=["wrong"] turn=1 says="no wait()"
def hook_of(blocks, i):
    return lambda grad: blocks[i - 1].unshard(async_op=True).wait() if i > 0 else None

# %% tags=["wrong"] turn=1 says="More than two blocks"
def hook_of(blocks, i):
    def hook(grad):
        for block in blocks[max(0, i - 2) : i][::-1]:
            block.unshard(async_op=True)

    return hook

# %% [markdown]
# ## Your turn 2 · Uneven blocks
#
# This is the model of the sweep in which every other block is four times as large: blocks 0, 2 and 4. In backward
# a small block computes for 2 ms and its collective takes 0.8 ms; for a large one that's 8 and 3.2 ms. The
# picture replays the default, with 14 ms exposed. Look at the two long gaps.

# %% jupyter={"source_hidden": true}
def backward_of(trace, buffers):
    events = [event for event in trace.events if event.phase == "backward"]
    return replay_events(events, units=list(trace.unit_bytes), **speeds(trace, 0.8), limit_reduces=buffers)

runs = [backward_of(uneven[4][way], buffers) for way, buffers in (("default", 1), ("large", 1), ("large", 2))]
assert np.allclose([1e3 * run.exposed_s for run in runs], [14, 7.6, 5.2], atol=0.1)
panels = {"blocks 5 to 0 in backward, FSDP2's default (replay)": runs[0].running}
plots.show(timelines(panels, runs[0].units), alt="Two long gaps, before blocks 2 and 0 compute.")

# %% [markdown]
# Reduce the 14 ms to 7.6, with lists for at most three blocks and at most three blocks full at once. (Rule 4
# accounts for 2.4 of the 7.6: with a second buffer the same lists leave 5.2.)
#
# `my_lists(blocks)` gets the six blocks in the order of forward. It returns a dictionary of lists,
# `{block: [blocks to gather before it computes in backward]}`. A block without a list keeps the default.
#
# <details><summary>Hint</summary>
#
# The gather of a large block should begin while the large block before it, in backward, computes.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from collections.abc import Mapping

from fsdp_utils.collectives.replay import replay

@turn(2, {
    "ms of exposed communication": at_most(7.6, "A large block's all-gather could start earlier: which block computes long enough?"),
    "blocks with a list": at_most(3, "Small blocks have lists, too: which ones compute long enough to hide two?"),
    "full blocks at once": at_most(3, "More than three blocks are full at once: look fewer blocks ahead."),
    "all-gathers in one step": exactly(
        12, more="A block is gathered that backward has finished with: name blocks before block i.",
    ),
})
def score_lists(my_lists):
    model = build((1024, 256) * 3)
    lists = my_lists(list(model))
    if not isinstance(lists, Mapping):
        raise NotYet("Return a dictionary from each block to a list of blocks.")
    if any(not isinstance(block, nn.Module) for key, early in lists.items() for block in (key, *early)):
        raise NotYet("Name blocks, not their numbers: blocks[4].")
    for block, early in lists.items():
        block.set_modules_to_backward_prefetch(list(early))
    trace = record(model)
    small = trace.unit_bytes["1"]
    sent = next(e.sent_bytes for e in trace.collectives if e.module == "1" and e.kind == "all_gather")
    run = replay(
        [event for event in trace.events if event.phase == "backward"],
        units=list(trace.unit_bytes),
        compute_s={unit: 1e-3 * nbytes / small for unit, nbytes in trace.unit_bytes.items()},
        link_gib_s=sent / 2**30 / 0.8e-3,
        limit_units=None,
        limit_reduces=1,
    )
    return {
        "ms of exposed communication": round(1e3 * run.exposed_s, 1),
        "blocks with a list": sum(len(list(early)) > 0 for early in lists.values()),
        "full blocks at once": trace.peak_units,
        "all-gathers in one step": sum(e.kind == "all_gather" for e in trace.events),
    }

# %%
# %%turn 2
def my_lists(blocks):                           # the six blocks; 0, 2 and 4 are large
    return None                                 # your lines here: {block: [first, second], ...}

# %% tags=["solution"] turn=2
def my_lists(blocks):
    return {blocks[4]: [blocks[3], blocks[2]], blocks[2]: [blocks[1], blocks[0]]}

# %% tags=["right"] turn=2
def my_lists(blocks):                           # tuples, in backward's order, by size
    backward = blocks[::-1]
    large = max(block.up.out_features for block in blocks)
    return {b: tuple(backward[i + 1 : i + 3]) for i, b in enumerate(backward) if b.up.out_features == large}

# %% tags=["right"] turn=2
def my_lists(blocks):                           # every block has an entry; the small ones have no list
    return {block: [] if i % 2 else blocks[max(0, i - 2) : i][::-1] for i, block in enumerate(blocks)}

# %% tags=["right"] turn=2
import numpy as np

def my_lists(blocks):
    return {blocks[i]: [blocks[i - 1], blocks[i - 2]] for i in np.arange(len(blocks) - 2, 0, -2)}

# %% tags=["wrong"] turn=2 says="could start earlier"
def my_lists(blocks):
    return {block: blocks[max(0, i - 1) : i] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2 says="which block computes long enough?"
def my_lists(blocks):
    return {blocks[5]: [blocks[4], blocks[3]], blocks[3]: [blocks[2], blocks[1]]}

# %% tags=["wrong"] turn=2 says="look fewer blocks ahead"
def my_lists(blocks):
    return {blocks[i]: blocks[max(0, i - 3) : i][::-1] for i in (5, 4, 2)}

# %% tags=["wrong"] turn=2 says="Name blocks, not their numbers"
def my_lists(blocks):
    return {4: [3, 2], 2: [1, 0]}

# %% tags=["wrong"] turn=2 says="has finished with"
def my_lists(blocks):
    return {block: blocks[i + 1 : i + 3] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2 says="Small blocks have lists, too"
def my_lists(blocks):
    return {block: blocks[max(0, i - 2) : i][::-1] for i, block in enumerate(blocks)}

# %% [markdown]
# ## When it goes wrong
#
# The ranks pair their collectives by the order of issue, and lists change that order, so all ranks must have the
# same lists. In the next cell rank 0 names the two blocks of each list in the other order. Compare its losses
# with those under the default.

# %%
# %%ranks
def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        losses.append(step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses

def other_lists_on_rank_0(model):
    blocks = list(model)
    for i, block in enumerate(blocks):
        earlier = blocks[max(0, i - 2) : i]
        block.set_modules_to_backward_prefetch(earlier if rank == 0 else earlier[::-1])
    return model

same, parted = train(build()), train(other_lists_on_rank_0(build()))

# %%
same, parted = ranks.get("same")[0], ranks.get("parted")[0]
assert abs(same[0] - parted[0]) < 1e-6
assert abs(same[1] - parted[1]) > 1e-4
Table(
    ["loss of rank 0 at step", "1", "2", "3"],
    [[name, *(f"{loss:.3f}" for loss in found)] for name, found in
     {"the default on all ranks": same, "other lists on rank 0": parted}.items()],
)

# %% [markdown]
# No rank raised an error. The first loss is the same, because forward doesn't use these lists. In backward rank 0
# gave its shard of one block to an all-gather to which the others gave their shards of another. So both blocks
# computed with wrong parameters, and the loss is wrong from step 2 on. If blocks differ in size, such a
# collective may also fail or hang.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | losses differ from the second step on, no error | lists differ between ranks | the same lists everywhere; `check_in_step` ([lesson 15](15_when_it_hangs.ipynb)) names the line where ranks part |
# | out of memory since you set lists | each further block ahead is one more full block | fewer blocks ahead |
# | gaps in backward, default on | the link is the limit, or blocks are uneven | more tokens per forward pass; send less ([lesson 6](06_sharding_strategies.ipynb)); lists as in turn 2 |
# | the GPU computes nothing until a reduce-scatter ends | rule 4: `FSDP::post_backward_rs_wait` | a second buffer, `set_reduce_scatter_max_input_buffers(2)` |
# | a block is gathered three times in a step | a list names a block that backward has finished with, such as `blocks[-1]` | name earlier blocks only |
# | no overlap in forward | the GPU waits for the CPU | no `.item()` in forward; larger blocks or batches; `torch.compile` |
#
# ## The rule
#
# Leave prefetching to FSDP2, and look for exposed communication in a profile. If large and small blocks
# alternate, let each large one ask for the next two, the same on every rank.
#
# [← lesson 3](03_full_state_dict.ipynb) · [lesson 5 →](05_maximising_throughput.ipynb)

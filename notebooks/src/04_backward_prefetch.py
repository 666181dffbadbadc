# %% [markdown]
# # 4 · Backward prefetch
#
# Is the communication of FSDP hidden behind computation, and do you have to do anything for it? **FSDP2's
# default is enough:** in backward it asks for the next unit before it computes with the present one. Lists of
# your own pay only where units differ in size, as in turn 2.

# %% jupyter={"source_hidden": true}
from IPython.display import display

from fsdp_utils.collectives.events import StepEvent
from fsdp_utils.collectives.replay import replay as replay_events
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
# A drawing of the backward pass of three blocks, each a *unit*, whose parameters FSDP gathers together. The
# upper lane is what the GPU computes, the lower lane what it sends: all-gathers are plain, reduce-scatters of
# gradients are hatched. Backward begins with the last block, 2. In the first drawing the GPU computes nothing
# while it sends. In the second the next block has been gathered when it is needed: it was **prefetched**.

# %% tags=["card"]
lesson.card(
    4,
    learn="read the order in which FSDP issues its work, and know when to change it",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 9, 19),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It records the order of a backward pass
# with prefetching off, with FSDP2's default, and with two blocks ahead. On a CPU almost nothing overlaps, so
# the times are a **replay**: a calculation from the recorded order, in which a block computes for 1 ms in
# forward and 2 ms in backward, and a collective takes 0.5 ms.
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
#
# def build(ahead):
#     torch.manual_seed(0)                                     # the same weights on every rank
#     blocks = [nn.Linear(256, 256, device=device) for _ in range(4)]
#     for block in blocks:
#         fully_shard(block, mesh=mesh)
#     for i, block in enumerate(blocks):
#         if ahead is not None:                                # None: leave it to FSDP2
#             earlier = blocks[max(0, i - ahead) : i][::-1]    # the nearest first
#             block.set_modules_to_backward_prefetch(earlier or [block])    # [] would mean: FSDP2's default
#     return fully_shard(nn.Sequential(*blocks), mesh=mesh)
#
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
#     link = trace.collectives[0].sent_bytes / 2**30 / 0.5e-3  # GiB/s: a collective takes 0.5 ms
#     run = trace.replay(compute_s=1e-3, link_gib_s=link, limit_units=None, limit_reduces=1)
#     if dist.get_rank() == 0:
#         print(f"{name:9} {1e3 * run.step_s:.1f} ms a step, {trace.peak_units} full blocks,", *order)
# dist.destroy_process_group()
# ```
# ```text
# off       16.0 ms a step, 1 full blocks, AG mm RS AG mm RS AG mm RS AG mm RS
# default   13.0 ms a step, 2 full blocks, AG AG mm RS AG mm RS AG mm RS mm RS
# two ahead 13.0 ms a step, 3 full blocks, AG AG AG mm RS AG mm RS mm RS mm RS
# ```
#
# `AG` is an all-gather, `mm` the computation of a block (matrix multiplications), `RS` a reduce-scatter. The
# default saves 3 ms of 16. It holds two full blocks instead of one, and yet the peak of these bytes is the
# same (below). Two blocks ahead saves nothing more and holds a third. The rest of this lesson explains these
# three lines.
#
# ## The order is what counts

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
# A GPU works off what the program issues in **streams**, queues that run side by side: one for computation,
# others for communication. But a process group runs its collectives one after the other, in the order of
# issue. With prefetching off, each `AG` of backward but the first stands behind an `RS`, which waits for the
# computation before it, and in front of the `mm` that needs it. So nothing is left to hide it behind. FSDP2
# notes the order in which units finish forward and goes through it in reverse: with the default the next `AG`
# stands before the present `mm`, and runs beside it.
#
# **In forward nothing is issued early, and nothing has to be.** No `RS` is in the way: the CPU issues `mm`,
# returns at once, and issues the next `AG`, which runs beside that `mm`. PyTorch's documentation calls this
# *implicit* prefetching. It needs a CPU that is faster than the GPU. If your profiler's trace shows no
# overlap in forward, the GPU waits for the CPU: remove what makes the CPU wait (`.item()`, printing a
# tensor), or use larger units or batches.

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
# FSDP1 has a setting, `backward_prefetch`. The folded cell records it on the same blocks: `None` is the order
# "off", `BACKWARD_PRE`, its default, is FSDP2's. `BACKWARD_POST` puts the next `AG` between `mm` and `RS`.
#
# ## When does it save time?
#
# That depends on how long a collective takes beside a computation. The next cell replays the recorded orders
# over a sweep: a collective takes 0.05 to 8 times as long as a block's forward pass, and the CPU takes 0 to 2
# ms to issue the forward pass of a block, which takes 1 ms, and twice that for its backward pass. `uneven` is
# a second model, in which every other block is four times as large, to gather and to compute.

# %%
# %%ranks
UNEVEN = (1024, 256) * 3
uneven = {"default": record(build(UNEVEN)), "two ahead": record(ahead(build(UNEVEN), 2))}

# %% tags=["sweep", "replay", "cpu", "fsdp2"]
import numpy as np


def step_ms(trace, collective_ms, issue_ms=0.0):
    """Replay a step: block 1 computes for 1 ms in forward, others in proportion to their bytes."""
    small = trace.unit_bytes["1"]
    seconds = {unit: 1e-3 * nbytes / small for unit, nbytes in trace.unit_bytes.items()}
    sent = next(e.sent_bytes for e in trace.collectives if e.module == "1" and e.kind == "all_gather")
    link = sent / 2**30 / (collective_ms / 1e3)             # GiB/s
    run = trace.replay(compute_s=seconds, link_gib_s=link, issue_s=issue_ms / 1e3, limit_units=None, limit_reduces=1)
    return 1e3 * run.step_s


equal, uneven = ranks.get("traces")[0], ranks.get("uneven")[0]
ratios, issue_times = np.geomspace(0.05, 8, 41), [0.0, 1.2, 2.0]


def faster(traces, new, old, issue_ms=0.0):
    """How much faster one way is than another, in %, over the sweep."""
    return [100 * (step_ms(traces[old], r, issue_ms) / step_ms(traces[new], r, issue_ms) - 1) for r in ratios]


fig, (left, right) = plots.figure(2, width=9.6, height=3.0)
for issue_ms, color in zip(issue_times, plots.RANK_COLORS):
    saved = faster(equal, "default", "off", issue_ms)
    left.plot(ratios, saved, color=color, label=f"CPU issues a block in {issue_ms:g} ms")
    forward = faster(equal, "two ahead, forward too", "two ahead", issue_ms)
    assert min(saved) > -1e-6
    assert max(map(abs, forward)) < 1e-6
more = {name: faster(traces, "two ahead", "default") for name, traces in {"equal": equal, "uneven": uneven}.items()}
for (name, saved), color in zip(more.items(), plots.RANK_COLORS):
    right.plot(ratios, saved, color=color, label=f"{name} blocks")
left.set(title="replay: default against off", ylabel="% faster")
right.set(title="replay: two ahead against default, CPU in 0 ms")
for axes in (left, right):
    axes.set(xscale="log", xlabel="a collective, in forward computations", ylim=(-2, 70))
    axes.legend(loc="upper left")
plots.show(fig, alt="What prefetching saves in the replay, over the time of a collective.")

# %% jupyter={"source_hidden": true} tags=["check"]
saved = dict(zip(ratios, faster(equal, "default", "off")))
assert saved[ratios[0]] < 5
assert 40 < max(saved.values()) < 50
assert 0.7 < max(saved, key=saved.get) < 1.5
assert max(faster(equal, "default", "off", 2.0)) < 40
between = [r for r, gain in zip(ratios, more["equal"]) if gain > 1e-6]
assert min(between) > 1
assert max(between) < 2
assert max(more["equal"]) < 10
assert 13 < max(more["uneven"]) < 17
assert max(map(abs, faster(equal, "default", "off", 2.0)[:22])) < 1e-6
assert ratios[21] > 0.7

# %% [markdown]
# Left: the default never loses. It saves most where a collective takes about as long as a block's forward
# pass. With a fast link there is little to hide, and with a slow one communication alone takes longer than
# computation. A slow CPU hides the gain: at 2 ms a block it saves nothing up to 1 ms a collective. Right:
# with equal blocks a second block ahead changes nothing outside a narrow range. With uneven ones it gains up
# to a seventh: while a small block computes, there is no time to gather a large one. Lists for forward
# changed nothing at any point, with equal blocks (asserted in the cell).
#
# **Where is your job on this axis?** In bf16 a block of P parameters gathers 2P bytes, and its forward takes
# about 2P FLOPs per token. So P cancels: the position is (FLOP/s that you reach) / (tokens per rank x bytes/s
# of the link). At 4·10¹⁴ FLOP/s and 4,096 tokens: 0.3 with 3.5·10¹¹ bytes/s inside of a host, 2 with 5·10¹⁰
# between hosts.
#
# ## What it costs
#
# A unit that is gathered early holds memory early. `Meter` of [lesson 0](00_fsdp_from_scratch.ipynb) counts
# the bytes of full parameters, and of the buffers that FSDP2 gathers into.

# %% tags=["memory"]
# %%ranks
from fsdp_utils.lessons.meter import Meter


def peaks(model):
    """The most bytes of full parameters and buffers in forward and in backward, in blocks."""
    step(model)
    model.zero_grad()
    with Meter(model.parameters()) as meter:
        loss = model(torch.randn(24, 64, device=device)).square().mean()
        until = len(meter.gather_bytes)
        loss.backward()
    block = sum(p.numel() * p.element_size() for p in model[0].parameters())
    return [round(max(part) / block, 1) for part in (meter.gather_bytes[:until], meter.gather_bytes[until:])]


def steadily(make):                                         # gloo's thread may free a buffer a little late
    return [min(found) for found in zip(*(peaks(make()) for _ in range(3)))]


held = {
    "off": steadily(lambda: ahead(build(), 0)),
    "default": steadily(build),
    "two ahead": steadily(lambda: ahead(build(), 2)),
    "two ahead, forward too": steadily(lambda: ahead(build(), 2, forward=2)),
}

# %%
Table(["peak, in blocks", "forward", "backward"], [[name, *found] for name, found in ranks.get("held")[0].items()])

# %% [markdown]
# FSDP2 gathers a unit into a buffer and then copies its parameters out of it. So even with prefetching off
# there are two blocks' worth of bytes in backward, the buffer and the parameters, and **the default adds
# nothing to this peak**, but it holds the next buffer while the present block computes. With the gradients
# that are not reduced yet, which the table does not count, the peak of backward grows by one block. A second
# block ahead costs one block more, whatever the size of the model. In forward these bytes are the parameters,
# their buffer, and the buffer of the unit before, which FSDP2 frees only after the copy.
#
# **The first all-gather of a step** has no computation of the model beside it.
# `model[0].unshard(async_op=True)` before you load the batch starts it early. On a GPU it then runs while the
# batch is loaded.
#
# ## Your turn 1 · Write the prefetch
#
# Here the model's own prefetching is off. Write it with hooks, functions that autograd calls in backward:
# `hook_of(blocks, i)` returns a function of one argument, `grad`. Autograd calls it when block `i` has been
# gathered and is about to compute its backward pass. Ask there for the block that is needed next.
# `block.unshard(async_op=True)` starts an all-gather and returns at once. The hook returns `None`: anything
# else would replace the gradient.
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
    model = ahead(build(), 0)
    layers, waited, late = list(model), [], []
    hooks = []
    step(model)
    model.zero_grad()
    trace = None

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
    hooks += [hook_of(layers, i) for i in range(len(layers))]
    if not all(map(callable, hooks)):
        raise NotYet("Return a function of one argument from `hook_of`, for every block.")
    with record_collectives(model) as trace:
        step(model)
    gathers = sum(e.kind == "all_gather" for e in trace.events)
    return {
        "blocks that computed before the next one was asked for": sum(late),
        "all-gathers in one step": gathers,
        "full blocks at once": trace.peak_units,
        "calls of unshard that waited": sum(waited),
    }


# %%
# %%turn 1
def hook_of(blocks, i):
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
# The uneven model of the sweep: while a small block computes, there is no time to gather the large one that
# is next. In the replay of its backward pass, with 0.8 ms for a small block's collective, the default leaves
# 14 ms in which the GPU only sends, beside 30 ms of computation. Hide as much as you can, with at most three
# full blocks at once.
#
# `my_lists(blocks)` gets the model's six blocks in their order and returns a dictionary with one list per
# block: `{block: [blocks to ask for in backward, in this order]}`.
#
# <details><summary>Hint</summary>
#
# The all-gather of a large block should be issued while the large block before it computes. In backward,
# which blocks compute for longer than others?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from collections.abc import Mapping

from fsdp_utils.collectives.replay import replay


@turn(2, {
    "ms in which the GPU only sends": at_most(
        7.7, "An all-gather could start earlier: look two blocks ahead."
    ),
    "blocks with a list": at_most(3, "Small blocks have lists, too: which ones compute long enough to hide two?"),
    "full blocks at once": at_most(3, "More than three blocks are full at once: look fewer blocks ahead."),
    "all-gathers in one step": exactly(
        12, more="A block is gathered that backward has finished with: name blocks before block i.",
    ),
})
def score_lists(my_lists):
    model = build(UNEVEN)
    lists = my_lists(list(model))
    if not isinstance(lists, Mapping):
        raise NotYet("Return a dictionary from each block to a list of blocks.")
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
        "ms in which the GPU only sends": round(1e3 * run.exposed_s, 1),
        "blocks with a list": sum(len(list(early)) > 0 for early in lists.values()),
        "full blocks at once": trace.peak_units,
        "all-gathers in one step": sum(e.kind == "all_gather" for e in trace.events),
    }


# %%
# %%turn 2
def my_lists(blocks):
    return None                                 # your lines here


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

# %% tags=["wrong"] turn=2 says="look fewer blocks ahead"
def my_lists(blocks):
    return {blocks[i]: blocks[max(0, i - 3) : i][::-1] for i in (5, 4, 2)}

# %% tags=["wrong"] turn=2 says="has finished with"
def my_lists(blocks):
    return {block: blocks[i + 1 : i + 3] for i, block in enumerate(blocks)}

# %% tags=["wrong"] turn=2 says="Small blocks have lists, too"
def my_lists(blocks):
    return {block: blocks[max(0, i - 2) : i][::-1] for i, block in enumerate(blocks)}

# %% [markdown]
# ## When it goes wrong
#
# Ranks pair collectives by the order of issue, and prefetch lists decide that order. Here rank 0 has other
# lists than the others.

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
     {"the same lists on all ranks": same, "other lists on rank 0": parted}.items()],
)

# %% [markdown]
# No error, and another training: rank 0 gave its shard of one block to an all-gather in which the others gave
# theirs of another block.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | losses differ from the second step on, no error (blocks of one size; others make the collective fail, hang or mix bytes) | lists that differ between ranks | build the lists by the same code on every rank; `check_in_step` ([lesson 15](15_when_it_hangs.ipynb)) names the line |
# | out of memory since you prefetch more | each block beyond the default is one more full block | fewer blocks ahead |
# | a unit has three all-gathers in a step | a list names a unit that backward has finished with | name earlier units, the nearest first |
# | gaps in backward although the default is on | the link is the limit, or units are uneven | a strategy that sends less ([lesson 6](06_sharding_strategies.ipynb)); lists as in turn 2; the experimental `model.set_separate_reduce_scatter_group()` and `set_reduce_scatter_max_input_buffers(2)` |
# | no overlap in forward | the GPU waits for the CPU | larger units or batches, `torch.compile` |
#
# ## The rule
#
# Leave prefetching to FSDP2. If your units differ in size, as dense and mixture-of-experts blocks in turn,
# let each large one ask for the next two, the nearest first, the same on every rank.
#
# [← lesson 3](03_full_state_dict.ipynb) · [lesson 5 →](05_maximising_throughput.ipynb)

# %% [markdown]
# # 4 · Backward prefetch
#
# FSDP has to gather each unit before it can compute with it. It can ask for the next unit early, while it
# still computes with this one: it *prefetches*. In this lesson you record in which order FSDP really issues
# its all-gathers under each setting, and replay what that order is worth.

# %% [markdown] tags=["card"]
# learn:
# - the order of all-gathers under `backward_prefetch=None`, `BACKWARD_POST` and `BACKWARD_PRE`
# - what `forward_prefetch` is for, and what it does to the backward pass
# - what FSDP2 does by itself, and how to tell it to do more
# - when prefetching saves time at all, and what it costs in memory
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb) · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: half a minute to run on 2 cores (AMD EPYC) · 20 minutes to read
# video: '[Backward prefetch](https://www.loom.com/share/21a465d89c6144f09d6a2e3d55824f1e), 2022. Since
#   then: FSDP2 prefetches in backward by itself, as `BACKWARD_PRE` did, and takes lists of modules for
#   more.'

# %% [markdown]
# **What is live here, and what is not.** The *order* in which FSDP issues its work is recorded from real
# ranks. The *time lines* with overlap are a **replay**: a calculation from that order and from durations that
# we choose. On a CPU with gloo nothing overlaps, so this machine cannot measure what prefetching saves.

# %%
from IPython.display import Image

from fsdp_utils.lessons import lesson, plots
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import itertools
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                       # f32[batch, 64]
        return x + self.down(F.gelu(self.up(x)))                # f32[batch, 64]


def blocks(seed=0):
    torch.manual_seed(seed)
    return [Block().to(device) for _ in range(4)]


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 64, generator=generator).chunk(world)[rank].to(device)  # f32[24 / world, 64]


# %% [markdown]
# ## Record one step
#
# `record_collectives` is put around a step. It listens to all collectives of the process, wherever they come
# from, and to FSDP's own hooks, so that it can say which unit each of them is for.

# %% tags=["record"]
# %%ranks
def step(model):
    loss = model(batch()).square().mean()
    loss.backward()
    return loss.item()


def fsdp2(**options):
    layers = blocks()
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(nn.Sequential(*layers), **options)


def record(model):
    step(model)                                                 # the first step also sets FSDP up
    with record_collectives(model) as trace:
        step(model)
    return trace


# %%
# %%ranks
trace = record(fsdp2())

# %%
# %%ranks 0
print(trace.summary())
kinds = trace.bytes_by_kind()
assert kinds["all_gather"] == 2 * kinds["reduce_scatter"]       # forward and backward
padding = kinds["reduce_scatter"] - sum(trace.unit_bytes.values())
assert padding == 0 or (64 % world and padding > 0)             # on 3 ranks, 64 rows are padded to 66

# %% [markdown]
# Four units, each gathered twice and reduced once. Of four ranks each sends three quarters of the bytes, as
# no rank has to be sent what it has. The root has no parameters of its own, so it is no unit. And this is
# when each of them ran:

# %%
live = ranks.get("trace")[0]
plots.show(live.plot(), alt="One step as recorded on rank 0: no two bars at the same time.")

# %% [markdown]
# The colours are the blocks, 0 to 3. Computing is a thin line, for the blocks are tiny: what they compute
# takes next to no time beside the sending. Each bar stands alone: gather, compute, gather, compute. A CPU
# works off each line before it comes to the next, and gloo's all-gather is waited for where it is issued.

# %%
# %%ranks
timed = [e for e in trace.events if e.seconds]
spans = sorted((e.start, e.start + e.seconds) for e in timed)
overlap = sum(max(0.0, end - later) for (_, end), (later, _) in itertools.pairwise(spans))
busy = sum(end - start for start, end in spans)
assert on_gpu or overlap <= 0.05 * busy                         # a GPU's streams do overlap

# %% [markdown]
# On a GPU the *order* of these lines matters all the more. The CPU only *issues* work, computation and
# communication run on streams of their own, queues that are worked off side by side, and the all-gathers and
# reduce-scatters of one process group go one after the other, in the order in which they were issued. An
# all-gather that is issued behind a reduce-scatter has to wait for it.
#
# ## Predict
#
# In backward, each block needs three things: its all-gather (`AG`), its computation (`mm`), and the
# reduce-scatter of its gradients (`RS`). Without prefetching the order is `AG mm RS AG mm RS` and so on.
# Where does the next `AG` go if FSDP prefetches *after* the computation, and where if *before*?
#
# <details><summary>Answer</summary>
#
# After (`BACKWARD_POST`): `AG mm AG RS mm AG RS …`, between computation and reduce-scatter. Before
# (`BACKWARD_PRE`): `AG AG mm RS AG mm RS …`, so that it can run while the block computes. The next cell
# records it.
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
}
for name, recorded in traces.items():
    print(f"{name:5}", order(recorded, "backward"))
assert order(traces["None"], "backward") == "AG mm RS AG mm RS AG mm RS AG mm RS"
assert order(traces["POST"], "backward") == "AG mm AG RS mm AG RS mm AG RS mm RS"
assert order(traces["PRE"], "backward") == "AG AG mm RS AG mm RS AG mm RS mm RS"
for recorded in traces.values():
    assert order(recorded, "forward") == "AG mm AG mm AG mm AG mm"

# %% [markdown]
# Forward is the same in all three. There, nobody knows yet which unit comes next: FSDP learns the order from
# the forward pass, and uses it, reversed, in backward.
#
# ## Forward prefetch
#
# With `forward_prefetch=True` FSDP1 takes the order of the *first* step for granted from then on.

# %% tags=["forward"]
# %%ranks
traces["forward_prefetch"] = record(fsdp1(None, forward_prefetch=True))
print("forward ", order(traces["forward_prefetch"], "forward"))
print("backward", order(traces["forward_prefetch"], "backward"))
assert order(traces["forward_prefetch"], "forward") == "AG AG mm AG mm AG mm mm"
assert order(traces["forward_prefetch"], "backward") == "AG mm AG mm RS AG mm RS AG mm RS mm RS"

# %% [markdown]
# The next all-gather stands before the computation, as promised. But look at backward: it has changed too,
# although `backward_prefetch` is `None`. Each reduce-scatter but the last comes one block later. (Block 0
# has two `mm`: after the reduce-scatter only its own gradients are laid together.)
#
# Why? Autograd works off what was made *last* first. FSDP1 makes the views of a unit's parameters when it
# gathers the unit. With forward prefetch, the views of block 3 are made *before* block 2 computes. So in
# backward, autograd computes block 2 before it comes to the gradients of block 3's views, and these are what
# the reduce-scatter waits for. The option's documentation does not mention it. It is visible only in the
# recorded order.
#
# `None` is there to see one thing at a time: FSDP1's default is `BACKWARD_PRE`. The two together:

# %% tags=["both"]
# %%ranks
traces["both"] = record(fsdp1(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True))
print("backward", order(traces["both"], "backward"))
assert order(traces["both"], "forward") == order(traces["forward_prefetch"], "forward")
assert order(traces["both"], "backward") == "AG AG mm AG mm RS AG mm RS mm RS mm RS"

# %% [markdown]
# ## FSDP2
#
# `fully_shard` has no option for backward. It prefetches by itself, one block ahead:

# %% tags=["fsdp2"]
# %%ranks
traces["FSDP2"] = trace
traces["FSDP2, kept"] = record(fsdp2(reshard_after_forward=False))
for name in ("FSDP2", "FSDP2, kept"):
    print(f"{name:12}", order(traces[name], "backward"))
assert order(traces["FSDP2"], "backward") == order(traces["PRE"], "backward")
assert order(traces["FSDP2"], "forward") == "AG mm AG mm AG mm AG mm"
assert order(traces["FSDP2, kept"], "backward") == "mm RS mm RS mm RS mm RS"

# %% [markdown]
# The same order as `BACKWARD_PRE`. With `reshard_after_forward=False` the units stay whole after forward, so
# there is nothing to gather in backward.
#
# In forward it issues nothing early: there it relies on the GPU's streams, on which an all-gather can
# overtake a computation that was issued before it. [FSDP's
# notes](https://docs.pytorch.org/docs/stable/notes/fsdp.html) call that *implicit* prefetching, and
# *explicit* what is issued early. To prefetch more, say what: each module is given the list of modules to
# gather early, which takes the place of what FSDP2 would do by itself.

# %% tags=["explicit"]
# %%ranks
explicit = fsdp2()
for i, block in enumerate(explicit):
    block.set_modules_to_forward_prefetch(list(explicit[i + 1 : i + 3]))    # the next two
    before = list(explicit[max(0, i - 2) : i])
    block.set_modules_to_backward_prefetch(before[::-1])                    # the two before, the last first
traces["FSDP2, explicit"] = record(explicit)
print("forward ", order(traces["FSDP2, explicit"], "forward"))
print("backward", order(traces["FSDP2, explicit"], "backward"))
assert order(traces["FSDP2, explicit"], "forward") == "AG AG AG mm AG mm mm mm"
assert order(traces["FSDP2, explicit"], "backward") == "AG AG AG mm RS AG mm RS mm RS mm RS"

# %% [markdown]
# ## What it costs
#
# A unit that is gathered early takes memory early. Count the units whose parameters are whole at once, in the
# recorded order:

# %% tags=["memory"]
# %%ranks 0
for name, recorded in traces.items():
    print(f"{name:16} units whole at once: {recorded.peak_units}")
peaks = {name: recorded.peak_units for name, recorded in traces.items()}
assert (peaks["None"], peaks["POST"], peaks["PRE"], peaks["FSDP2"]) == (1, 1, 2, 2)
assert (peaks["forward_prefetch"], peaks["FSDP2, explicit"], peaks["FSDP2, kept"]) == (2, 3, 4)
assert peaks["both"] == 3

# %% [markdown]
# `BACKWARD_PRE` costs one more unit, whatever the size of the model. With 32 blocks that is a thirty-second
# of the whole model's parameters, and on 8 ranks a quarter of what a rank holds of them at rest; activations
# usually take far more. The gradients of the block that computes are whole too, until they are reduced. With
# `forward_prefetch` that is one block later, so there the gradients of two blocks are.
#
# This is the order of the program. On a GPU, FSDP1's memory can lag behind it, which is what its rate limiter
# is for ([lesson 11](11_rate_limiter.ipynb)).
#
# ## The replay
#
# Now put the recorded order on two streams, one for computation and one for communication. **This is a
# simulation.** Its rules: the CPU issues in the recorded order; each stream works in that order; a block
# computes once it is gathered; a reduce-scatter waits for the computation before it; an all-gather waits
# until the GPU is done with the last but one of the units freed before it, as FSDP1's rate limiter has it.
# (FSDP2 has no such limiter. Here it changes none of FSDP2's times.) Its durations are ours: a block takes
# 1 ms in forward and 2 ms in backward, a collective 0.5 ms.

# %%
traces = {name: ranks.get("traces")[0][name] for name in
          ("None", "POST", "PRE", "forward_prefetch", "both", "FSDP2", "FSDP2, explicit", "FSDP2, kept")}
GIB = 2**30


def replay(name, collective_ms, **options):
    """Replay a trace with collectives that take so long; all units are equally large."""
    sent = next(event.sent_bytes for event in traces[name].collectives)
    speed = sent / GIB / (collective_ms / 1e3)
    return traces[name].replay(compute_s=1e-3, link_gib_s=speed, **options)


peaks = {name: trace.peak_units for name, trace in traces.items()}
replays = {name: replay(name, 0.5) for name in traces}
for name, result in replays.items():
    print(f"{name:16} {1e3 * result.step_s:.1f} ms a step; in {1e3 * result.exposed_s:.1f} ms it only sends")

# %% tags=["replay"]
assert abs(replays["None"].step_s - 16e-3) < 1e-6
assert abs(replays["PRE"].step_s - 13e-3) < 1e-6
assert abs(replays["FSDP2"].step_s - replays["PRE"].step_s) < 1e-9
assert abs(replays["POST"].step_s - replays["PRE"].step_s) < 1e-9
assert abs(replays["both"].step_s - 13.5e-3) < 1e-6
assert abs(replays["forward_prefetch"].step_s - 15.5e-3) < 1e-6
assert abs(replays["FSDP2, explicit"].step_s - replays["FSDP2"].step_s) < 1e-9
for name in ("FSDP2", "FSDP2, explicit"):
    assert replay(name, 0.5, limit_units=None).step_s == replays[name].step_s

# %% [markdown]
# Without prefetching, the step takes 16 ms. With it, 13: the 12 ms of computation, the first all-gather and
# the last reduce-scatter. These two nobody can hide. `forward_prefetch` gains half a millisecond, and in
# backward: its late reduce-scatters make one of three gaps smaller. Together with `BACKWARD_PRE` ("both") it
# costs half a millisecond: two reduce-scatters are left for the end. A second block ahead gains nothing: one
# is enough to fill the gaps.
#
# `BACKWARD_POST` is as fast as `BACKWARD_PRE` here. The CPU of this replay takes no time to issue work, so it
# is far ahead. Then even an all-gather that is issued *after* a computation can run beside it. What counts is
# that it stands *before the reduce-scatter*. Further down the CPU gets slower.

# %% jupyter={"source_hidden": true}
until = replays["None"].step_s
none = replays["None"].plot(title="replay: backward_prefetch=None", until=until)
plots.show(none, alt="Replay without prefetching: gaps in the computation of backward.")

# %% jupyter={"source_hidden": true}
pre = replays["PRE"].plot(title="replay: BACKWARD_PRE", until=until)
plots.show(pre, alt="Replay with BACKWARD_PRE: no gaps.")

# %% [markdown]
# In the upper picture there are gaps in the computation of backward. In each of them a reduce-scatter and the
# next all-gather run one after the other. In the lower one the next all-gather has run already.
#
# ## The same as films
#
# One film for each setting, drawn from the recorded order and the replayed times. Above: what rank 0 holds of
# each unit, from its own shard to the whole, and its gradients. A dark border means that it computes. Below:
# the two streams up to that moment. All films last equally long, so you see who is done first. FSDP2's own
# film would be that of `BACKWARD_PRE`.

# %% jupyter={"source_hidden": true}
def film(name, title):
    picture = replays[name].animate(title=f"replay of one step: {title}", frames=25, until=until)
    return Image(picture, format="png", alt=f"Film of one replayed step: {title}.")


film("None", "backward_prefetch=None")

# %% jupyter={"source_hidden": true}
film("POST", "BACKWARD_POST")

# %% jupyter={"source_hidden": true}
film("PRE", "BACKWARD_PRE")

# %% jupyter={"source_hidden": true}
film("forward_prefetch", "forward_prefetch=True, backward_prefetch=None")

# %% jupyter={"source_hidden": true}
film("FSDP2, explicit", "FSDP2, two blocks ahead")

# %% [markdown]
# ## When does it help at all?
#
# It depends on how long a collective takes beside a computation. Sweep that in the replay, from a link that
# is far faster than the computation to one that is far slower.

# %% tags=["sweep"]
ratios = [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0]
saved = {}
for ratio in ratios:
    saved[ratio] = replay("None", ratio).step_s / replay("PRE", ratio).step_s - 1
    print(f"a collective takes {ratio:4} of a forward computation: PRE is {saved[ratio]:5.1%} faster")
assert saved[0.05] < 0.05
best = max(saved, key=saved.get)
assert 0.2 < best < 4
assert saved[8.0] < saved[best] / 2
for ratio in (2.0, 4.0, 8.0):
    assert abs(replay("None", ratio).step_s - replay("PRE", ratio).step_s - 8e-3) < 1e-6

# %% jupyter={"source_hidden": true}
import numpy as np

fig, (axes,) = plots.figure(width=7.5, height=3.0)
grid = np.geomspace(0.05, 8, 40)
for name, color in (("None", plots.RANK_COLORS[5]), ("PRE", plots.RANK_COLORS[0])):
    axes.plot(grid, [1e3 * replay(name, ratio).step_s for ratio in grid], color=color, label=name)
axes.plot(grid, [12 * r for r in grid], color=plots.INK, linestyle=":", label="communication alone")
axes.axhline(12, color=plots.INK, linestyle="--", label="computation alone")
axes.set(xscale="log", yscale="log", xlabel="a collective, in forward computations", ylabel="ms a step")
axes.set_title("replay: a step with and without prefetching")
axes.legend()
plots.show(fig, alt="Step time in the replay against the time of a collective.")

# %% [markdown]
# On the left there is nothing to hide: communication takes no time. On the right computation is what hides,
# behind communication: prefetching saves the same 8 ms of backward in each step, but the steps get longer. In
# the middle, where both take about the same time, it saves the largest part.
#
# So "up to 13% faster", as measured in 2022, is what one model on one machine gave. The replay passes 13% on
# its way up, and again on its way down.
#
# ## A slow CPU
#
# So far the CPU was always ahead. Now let it take `issue_s` to issue the kernels of one block in forward, and
# twice that in backward. A block takes the GPU 1 ms, a collective 0.9 ms.

# %% tags=["cpu"]
def forward_ms(name, issue_ms):
    spans = replay(name, 0.9, issue_s=issue_ms / 1e3).spans
    return 1e3 * max(span.end for span in spans if span.event.phase == "forward")


gain = {}
for issue_ms in (0.0, 1.0, 1.2, 1.5, 2.0):
    plain, early = forward_ms("None", issue_ms), forward_ms("forward_prefetch", issue_ms)
    gain[issue_ms] = plain - early
    print(f"issuing takes {issue_ms} ms: forward {plain:.1f} ms, with forward_prefetch {early:.1f} ms")
assert max(abs(gain[0.0]), abs(gain[1.0])) < 1e-6
assert max(gain.values()) > 0.3
assert abs(gain[2.0]) < 1e-6

slow = {name: 1e3 * replay(name, 0.9, issue_s=1.2e-3).step_s for name in ("None", "POST", "PRE")}
print("issuing takes 1.2 ms:", ", ".join(f"{name} {ms:.1f} ms a step" for name, ms in slow.items()))
assert slow["PRE"] < slow["POST"] - 0.3 < slow["None"]

# %% [markdown]
# As long as the CPU is ahead, `forward_prefetch` saves nothing: the all-gather of the next block is issued
# early enough anyway. It saves something when the CPU is somewhat slower than the GPU. When the CPU is much
# slower, the GPU waits for the CPU in any order, and there is nothing to save again.
#
# A CPU that is somewhat slower also shows why `BACKWARD_PRE` is preferred to `BACKWARD_POST`, whose
# all-gather is issued only after the computation.
#
# ## On a GPU
#
# *Not recorded yet.* What prefetching saves in seconds takes at least two GPUs with a link between them. On
# one GPU there is nothing to send, so this lesson has no number for it rather than a wrong one. If you start
# the lesson where there are several, `record_collectives` reads from PyTorch's profiler when a GPU ran what
# was issued. That reading has been tested on the CPU and on records made by hand, and has not run on a GPU
# yet.
#
# ## Proof
#
# Prefetching decides *when* a unit is gathered, never what is computed. Four steps under each setting,
# against one process with all samples:

# %% tags=["equality"]
# %%ranks
def train(model, alone=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()                                                       # `explicit` has some already
    losses = torch.zeros(4, device=device)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(24, 64, generator=generator)                            # f32[24, 64]
        x = (x if alone else x.chunk(world)[rank]).to(device)                   # f32[24 / world, 64]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach()
    if not alone:
        dist.all_reduce(losses)
        losses /= world
    return losses.tolist()


ways = {
    "one process": train(nn.Sequential(*blocks()), alone=True),
    "None": train(fsdp1(None)),
    "POST": train(fsdp1(BackwardPrefetch.BACKWARD_POST)),
    "PRE": train(fsdp1(BackwardPrefetch.BACKWARD_PRE)),
    "forward_prefetch": train(fsdp1(None, forward_prefetch=True)),
    "FSDP2": train(fsdp2()),
    "FSDP2, explicit": train(explicit),
}
for name, losses in ways.items():
    print(f"{name:16} {losses[0]:.4f} -> {losses[-1]:.4f}")
    torch.testing.assert_close(losses, ways["one process"], rtol=1e-4, atol=1e-6)
assert ways["None"] == ways["POST"] == ways["PRE"] == ways["forward_prefetch"]
assert ways["FSDP2"] == ways["FSDP2, explicit"]

# %% [markdown]
# Under all settings of FSDP1 the losses are equal to the last bit, and so are both of FSDP2.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    4,
    {
        "pre-13-percent": f"In the replay {min(saved.values()):.1%} to {max(saved.values()):.1%} faster, by "
        f"the speed of the link. Memory: {peaks['PRE']} units whole at once instead of {peaks['None']}.",
        "pre-2-to-10-percent": f"In the replay {min(saved.values()):.1%} to {max(saved.values()):.1%}, "
        "see above.",
        "none-no-overlap": f"In the replay {1e3 * replays['None'].exposed_s:.1f} ms of the step only send, "
        f"with BACKWARD_PRE {1e3 * replays['PRE'].exposed_s:.1f}. Forward overlaps with any setting.",
        "forward-prefetch-cpu": f"Yes: in the replay it saves {abs(gain[0.0]):.1f} ms when the CPU is fast, "
        f"and {gain[1.2]:.1f} ms of forward when the CPU is a little slower than the GPU.",
        "fsdp2-backward": "Yes: the recorded order is that of BACKWARD_PRE.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Write the order.** The backward pass of `n` blocks under `BACKWARD_PRE`, in letters.

# %%
def order_pre(n):
    return None  # your line here


orders = {(1,): "AG mm RS", (2,): "AG AG mm RS mm RS", (4,): "AG AG mm RS AG mm RS AG mm RS mm RS"}
lesson.check(order_pre, orders)

# %% [markdown]
# **2. How much memory is that?** A model of `billions` billion parameters in `n` equal blocks, gathered in
# bf16. How many GiB more does `BACKWARD_PRE` hold than `None`?

# %%
def more_gib(billions, n):
    return None  # your line here


gib = {(7, 32): 0.407454, (70, 80): 1.629815}
lesson.check(more_gib, gib)

# %% [markdown]
# **3. Nothing to hide behind.** From which ratio on, of a collective to a forward computation, does the
# replayed step with `BACKWARD_PRE` of this model take more time to send than to compute? There are 12
# collectives in a step.

# %%
balance = None  # your line here
lesson.check(balance, 1.0)

# %% [markdown]
# ## Summary
#
# - Prefetching changes the order in which collectives are issued, and how many units are whole at once. It
#   changes nothing that is computed.
# - `BACKWARD_PRE` puts the next all-gather before the computation, `BACKWARD_POST` before the reduce-scatter.
# - FSDP2 does what `BACKWARD_PRE` does, by itself. For more, give it lists of modules.
# - `BACKWARD_PRE` costs the memory of one more whole unit.
# - It helps where computation and communication take about equally long.
# - On a CPU with gloo it changes the order alone. Seconds are for GPUs with a link between them to say.
#
# ## Next
#
# Prefetching pays for speed with a little memory. How much of a GPU's memory should a batch fill, and why not
# all of it? That is [lesson 5](05_maximising_throughput.ipynb).
#
# [← lesson 3](03_full_state_dict.ipynb) · [lesson 5 →](05_maximising_throughput.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def order_pre(n):
    return " ".join(["AG"] + ["AG mm RS"] * (n - 1) + ["mm RS"])


lesson.check(order_pre, orders, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def more_gib(billions, n):
    return billions * 1e9 / n * 2 / 2**30


lesson.check(more_gib, gib, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
computing, collectives = 4 * (1 + 2), len(traces["PRE"].collectives)
balance = computing / collectives
lesson.check(balance, 1.0, strict=True)

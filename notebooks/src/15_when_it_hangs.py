# %% [markdown]
# # 15 · When it hangs, and when it lies
#
# A training stands still, or its numbers are wrong, and no error says why: on which line do the ranks part?
# **Run it under `check_in_step`**: at the first collective that is not the same on all ranks it names the
# line of each rank, on rank 0's stderr, and each rank raises it at its next collective. Then go back to a
# checkpoint from before.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

ROWS = [["gather A", "gather B", "sum losses"], ["gather A", "gather B", "sum losses"],
        ["gather A", "count spikes", "gather B"], ["gather A", "gather B", None]]
fig, (axes,) = plots.figure(width=7.2, height=2.1)
for rank, calls in enumerate(ROWS):
    for place, call in enumerate(calls):
        odd = call != ROWS[0][place]
        look = {"edgecolor": plots.RANK_COLORS[5], "linewidth": 2.5} if odd else {"edgecolor": plots.FAINT}
        axes.barh(rank, 0.92, left=place - 0.46, height=0.62, facecolor=plots.CARD if odd else plots.FAINT, **look)
        axes.text(place, rank, call or "no call", ha="center", va="center", fontsize=8)
axes.set(ylim=(3.6, -0.6), xlim=(-0.6, 2.6))
axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
axes.set_xticks(range(3), ["call 1", "call 2", "call 3"])
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="Three calls of four ranks: rank 2 parts at call 2, and rank 3 makes no call 3.")

# %% [markdown]
# A drawing. Within a process group, calls are paired by their order: the second call of a rank is paired with
# the second call of every other rank, whatever it means there. Rank 2 parts at call 2, and everything after
# it is paired wrongly. Rank 3 makes no third call, so the others wait for it.

# %% tags=["card"]
lesson.card(
    15,
    learn="find the line on which ranks part, and gradients that are wrong although they don't",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    ranks="4 on the CPU, because some of them are ended (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 14, 20),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. A rank whose loss is high counts a
# spike; the others add up their losses. Every rank calls one `all_reduce` of one number.
#
# ```python
# from contextlib import nullcontext
#
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils import check_in_step
# from fsdp_utils.collectives import OutOfStep
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
#
#
# def train():
#     torch.manual_seed(0)
#     model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=device) for _ in range(3)])
#     for part in [*model, model]:
#         fully_shard(part, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(5):
#         outlier = step == 3 and dist.get_rank() == 1
#         x = torch.randn(8, 64, device=device) * (50 if outlier else 1)
#         loss = model(x).square().mean()
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         total, spikes = loss.detach(), torch.ones((), device=device)
#         if loss > 1:
#             dist.all_reduce(spikes)
#         else:
#             dist.all_reduce(total)
#         if dist.get_rank() == 0:
#             print(f"step {step}: sum of losses {total.item():.2f}")
#
#
# for checked in (False, True):
#     try:
#         with check_in_step() if checked else nullcontext():
#             train()
#     except OutOfStep as error:
#         if dist.get_rank() == 0:
#             print(error)
# dist.destroy_process_group()
# ```
# ```text
# step 0: sum of losses 0.18
# step 1: sum of losses 0.15
# step 2: sum of losses 0.15
# step 3: sum of losses 1.10
# step 4: sum of losses 0.13
# step 0: sum of losses 0.18
# step 1: sum of losses 0.15
# step 2: sum of losses 0.15
# step 3: sum of losses 1.10
# step 4: sum of losses 0.13
# the ranks part at collective 40 of all ranks.
#   ranks 0, 2, 3: all_reduce of float32[] by SUM, at train.py:36 `dist.all_reduce(total)`
#   rank 1: all_reduce of float32[] by SUM, at train.py:34 `dist.all_reduce(spikes)`
# If different lines are right here, use check_in_step(by_line=False).
# ```
#
# Step 3 is a lie: rank 0 prints the sum of three losses and of one spike. Nothing raises an error, unless the
# loop runs under `check_in_step`. It names the call and both lines, and it stops every rank.
#
# ## Five mistakes
#
# Each of these programs is an ordinary piece of training code with one mistake. `attempt(program)` (folded)
# starts new ranks, calls `program(mesh)` on each, with collectives that wait 1.5 seconds at most, and returns
# what each rank returned or raised.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")                       # for the turns; `attempt` starts ranks of its own

# %%
import linecache
import os
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_utils import check_in_step, run_on_ranks
from fsdp_utils.lessons.tables import Table


class Model(nn.Module):                         # three blocks and a head; one of the blocks may be left out
    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.head = nn.Linear(8, 2)

    def forward(self, x, left_out=None):        # f32[batch, 8]
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else x + block(x)[:, :8]
        return self.head(x)                     # f32[batch, 2]


def sharded(mesh, widths=(8, 8, 8)):
    model = Model(widths)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    return model


def early_stop(mesh):                           # 1: leaves the loop on a local loss
    model = sharded(mesh)
    for step in range(4):
        model(torch.ones(2, 8)).sum().backward()
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:  # `loss < target`, say
            break


def unequal_batches(mesh):                      # 2: rank 0 has one batch more
    model = sharded(mesh)
    for _ in range(4 if dist.get_rank() == 0 else 3):
        model(torch.ones(2, 8)).sum().backward()


def save_on_rank_0(mesh):                       # 3: a gather under `if rank == 0`
    model = sharded(mesh)
    if dist.get_rank() == 0:
        torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, "never.pt")


def branch_on_loss(mesh):                       # 4: the script's
    loss = torch.tensor([2.0 if dist.get_rank() == 0 else 0.5])
    time.sleep(0.2)                             # stands for the step
    if loss > 1.0:
        spikes = torch.ones(1)
        dist.all_reduce(spikes, group=mesh.get_group())
        return f"{spikes.item():.1f} spikes"
    dist.all_reduce(loss, group=mesh.get_group())
    return f"a sum of losses of {loss.item():.1f}"


def own_generator(mesh, widths=(8, 8, 8)):      # 5: stochastic depth, drawn from another seed on each rank
    model, rows = sharded(mesh, widths), {}
    for number, block in enumerate(model.blocks):
        nn.init.constant_(block.weight, number)
        block.register_forward_pre_hook(lambda block, _, n=number: rows.update({n: block.weight[:, 0].tolist()}))
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.ones(4, 8), left_out=torch.randint(3, (1,), generator=generator).item())
    mixed = [number for number, found in rows.items() if set(found) != {float(number)}]
    return f"weights of two blocks in block {mixed[0]}" if mixed else "right weights"


# %% jupyter={"source_hidden": true}
LIMIT_S, WORLD = 1.5, len(ranks.get("0"))


def one_rank(program, cells, check):
    """Run the program on this rank; return what it returned, or its error."""
    linecache.cache.update(cells)               # so that the line of a cell can be shown
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    dist.barrier()                              # all start together
    try:
        with check_in_step() if check else nullcontext():
            said = program(DeviceMesh.from_group(group, "cpu")) or "no error here"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said                                 # run_on_ranks keeps this rank until all have returned


def attempt(program, check=False):
    """Run a program on new ranks; return what each of them returned or raised."""
    cells = {name: lines for name, lines in linecache.cache.items() if "ipykernel" in name}
    try:
        return run_on_ranks(one_rank, program, cells, check, world_size=WORLD, timeout=30)
    except RuntimeError as error:               # a rank was ended
        return [str(error).partition(" (")[0].removeprefix("run_on_ranks: ")] * WORLD


def in_words(found):
    """What came of a program, in a few words."""
    waiting = [rank for rank, said in enumerate(found) if "Timed out" in said or "closed" in said]
    if waiting:
        return f"hangs: {len(waiting)} of {WORLD} ranks wait for a call that never comes"
    return "; ".join(dict.fromkeys(found))


# %%
def other_sizes(mesh):                          # 5 again, with blocks of different sizes
    return own_generator(mesh, widths=(8, 16, 24))


PROGRAMS = [early_stop, unequal_batches, save_on_rank_0, branch_on_loss, own_generator, other_sizes]
without = {program.__name__: attempt(program) for program in PROGRAMS}
hangs = [name for name, found in without.items() if in_words(found).startswith("hangs")]
assert hangs == ["early_stop", "unequal_batches", "save_on_rank_0"]
assert "weights of two blocks" in in_words(without["own_generator"])
Table(["program", "without a check"], [[name, in_words(found)] for name, found in without.items()])

# %% [markdown]
# Which of the three you get, a hang, a lie or an abort, depends on sizes and on what the ranks call next, and
# not on the kind of mistake. In `own_generator` the ranks gather different blocks at the same time, and get
# weights that are glued together from two of them. With other sizes gloo ends a rank that receives more than
# it has room for. (A rank that receives *less* gets no error from gloo.) NCCL does not compare sizes at all.
#
# The time-out of a real job is 10 minutes with NCCL and 30 minutes with gloo, unless you pass `timeout=` to
# `init_process_group`. Its message does not name the rank that is to blame.
#
# ## `check_in_step` on each
#
# A thread on each rank publishes the rank's calls in the process group's store, twice a second, and rank 0
# compares them: kind, dtype, shape, reduce operation, the FSDP unit, and the line.

# %%
checked = {program.__name__: attempt(program, check=True) for program in PROGRAMS[:5]}
for name, found in checked.items():
    report = next(said for said in found if "OutOfStep" in said)
    print(name, report.strip(), sep="\n", end="\n\n")

# %% [markdown]
# All five, the two lies among them. (The sixth, `other_sizes`, may be ended by gloo before the ranks are
# compared.) Rank 0 prints the report to stderr within about two seconds. With gloo, a rank that already waits
# inside a collective raises it when its wait ends, at the latest at the time-out. With NCCL the watchdog ends
# the process at the time-out, so read rank 0's stderr. Where a rank only stands still, it is reported after
# 10 seconds, and nothing is raised. Set `timeout=` to some minutes.
#
# **What it cannot see:** wrong values in equal calls from the same line; send, recv and `monitored_barrier`;
# different lines of `broadcast`, `reduce`, `gather` and `scatter`; collectives of threads that the program
# starts; and a rank that gloo ends first because too many bytes came, as in `other_sizes`. It ends a
# *correct* program whose ranks call equal collectives from different lines, unless you pass `by_line=False`.
# And it reports up to two seconds late, so the steps between the parting and the error have computed with
# mixed data. **Afterwards, go back to a checkpoint from before.**
#
# It costs 1 to 3% of a step of 20 to 45 ms with 23 collectives (`benchmarks/in_step.py`, two CPU ranks):
# measure it at your size before you leave it on.
#
# ## Your turn 1 · Who parts?
#
# Write the comparison. `calls` is the list of what this rank has called, each call as a text.
# `who_parts(calls)` returns two things, on every rank the same: the number of the first call at which the
# ranks differ, counted from 1, and a dictionary from each text to the list of the ranks that have it. A rank
# that has called less has the text `"nothing"` there: `3, {"reduce 1": [0, 1, 2], "nothing": [3]}`. If all
# lists are equal: `0, {}`.
#
# <details><summary>Hint</summary>
#
# `dist.all_gather_object(everyone, calls)` fills a list `everyone = [None] * world` on each rank.
# `itertools.zip_longest` takes a `fillvalue`.
#
# </details>

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn


@turn(1, {
    "the last rank calls something else": exactly(
        "right", lambda found: f"Expected call 3, with the ranks of each text in a list; found {found}."
    ),
    "the last rank calls less": exactly(
        "right", lambda found: f'A list that has ended counts as "nothing" (`zip` stops too soon); found {found}.'
    ),
    "all are equal": exactly("right", lambda found: f"Equal lists have no such call: `0, {{}}`; found {found}."),
    "rank 0 has one call more": exactly(
        "right", lambda found: f"The first call differs already: return the first such call; found {found}."
    ),
})
def score_parts(who_parts):
    plain = ["gather 0", "gather 1", "reduce 1", "reduce 0"]
    others, last = list(range(world - 1)), world - 1
    cases = {
        "the last rank calls something else": (
            [*plain[:2], "all_reduce", plain[3]] if rank == last else plain,
            (3, {"reduce 1": others, "all_reduce": [last]}),
        ),
        "the last rank calls less": (
            plain[:3] if rank == last else plain, (4, {"reduce 0": others, "nothing": [last]})
        ),
        "all are equal": (plain, (0, {})),
        "rank 0 has one call more": (
            ["barrier", *plain] if rank == 0 else plain,
            (1, {"barrier": [0], "gather 0": list(range(1, world))}),
        ),
    }
    found = {}
    for name, (calls, expected) in cases.items():
        answer = who_parts(list(calls))
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise NotYet("Return a number and a dictionary: `number, {text: [ranks]}`.")
        answer = (int(answer[0]), {text: sorted(map(int, who)) for text, who in answer[1].items()})
        found[name] = "right" if answer == expected else f"`{answer[0]}, {answer[1]}`"
    return found


# %%
# %%turn 1
def who_parts(calls):
    return None                                 # your lines here: number, {text: [ranks]}


# %% tags=["solution"] turn=1
from itertools import zip_longest

def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip_longest(*everyone, fillvalue="nothing"), start=1):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["right"] turn=1
import numpy as np

def who_parts(calls):                           # a list, and NumPy's integers
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    most = max(map(len, everyone))
    table = np.array([one + ["nothing"] * (most - len(one)) for one in everyone])
    parted = np.flatnonzero((table != table[0]).any(0))
    if not len(parted):
        return [0, {}]
    column = table[:, parted[0]]
    return [parted[0] + 1, {str(text): np.flatnonzero(column == text) for text in set(column)}]

# %% tags=["right"] turn=1
def who_parts(calls):                           # rank 0 compares, and tells the others
    everyone = [None] * world if rank == 0 else None
    dist.gather_object(calls, everyone)
    found = [(0, {})]
    for place in range(max(map(len, everyone)) if rank == 0 else 0):
        who = {}
        for r, one in enumerate(everyone):
            who.setdefault(one[place] if place < len(one) else "nothing", []).append(r)
        if len(who) > 1:
            found = [(place + 1, who)]
            break
    dist.broadcast_object_list(found, src=0)
    return found[0]

# %% tags=["right"] turn=1
def who_parts(calls):                           # one object collective for each place
    place = 0
    while True:
        texts = [None] * world
        dist.all_gather_object(texts, calls[place] if place < len(calls) else "nothing")
        if set(texts) == {"nothing"}:
            return 0, {}
        place += 1
        if len(set(texts)) > 1:
            return place, {text: tuple(r for r, one in enumerate(texts) if one == text) for text in texts}

# %% tags=["wrong"] turn=1 says="`zip` stops too soon"
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip(*everyone), start=1):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["wrong"] turn=1 says="Expected call 3"
from itertools import zip_longest

def who_parts(calls):                           # counts from 0
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip_longest(*everyone, fillvalue="nothing")):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["wrong"] turn=1 says="Expected call 3"
def who_parts(calls):
    return 0, {}

# %% tags=["wrong"] turn=1 says="Return a number and a dictionary"
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    return everyone

# %% tags=["wrong"] turn=1 says="no such call on ranks"
def who_parts(calls):
    everyone = [None] * world
    if rank == 0:
        dist.all_gather_object(everyone, calls)
    return 0, {}

# %% [markdown]
# ## Lies without a wrong collective
#
# Ranks can be in step and have wrong gradients. One comparison finds that: **one step against one process**.
# Take the full gradients of one step on all ranks, and those of one process with all samples. Compare
# gradients, or `exp_avg` of AdamW, and not losses: AdamW hides a factor in all gradients.

# %%
# %%ranks
def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def fsdp(model):
    mesh = init_device_mesh("cpu", (world,))
    for part in [model[0], model[2], model]:
        fully_shard(part, mesh=mesh)
    return model


torch.manual_seed(1)
inputs, targets = torch.randn(12 * world, 8), torch.randn(12 * world, 1)  # f32[12 * world, ...]


def loss_of(model, rows):
    return (model(inputs[rows]) - targets[rows]).square().mean()


def step_error(model, rows):
    """How far a step's gradients are from those of one process: 0.1 is a tenth of the largest one."""
    loss_of(model, rows).backward()
    alone = build()
    loss_of(alone, torch.arange(12 * world)).backward()
    worst = torch.zeros(1)
    for parameter, right in zip(model.parameters(), alone.parameters()):
        found = torch.zeros_like(right) if parameter.grad is None else parameter.grad.full_tensor()
        worst = torch.maximum(worst, (found - right.grad).abs().max() / right.grad.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)   # the same on all ranks
    return worst.item()


rows = torch.arange(12 * world)
equal = rows.chunk(world)[rank]
unequal = rows[: 11 * world + 1] if rank == 0 else rows[11 * world + rank :][:1]
no_sync = fsdp(build())
no_sync.set_requires_gradient_sync(False)       # for accumulation, and never set back
errors = {
    "right": step_error(fsdp(build()), equal),
    "each rank starts from its own weights": step_error(fsdp(build(seed=rank)), equal),
    "all ranks take the same samples": step_error(fsdp(build()), rows[:12]),
    "a mean of means over unequal shares": step_error(fsdp(build()), unequal),
    "gradient sync left off": step_error(no_sync, equal),
}

# %%
errors = ranks.get("errors")[0]
assert errors.pop("right") < 1e-5
assert min(errors.values()) > 0.1
Table(["the mistake, with FSDP2", "error of the gradients"], [[name, f"{e:.2f}"] for name, e in errors.items()])

# %% [markdown]
# A right step is equal up to rounding. Each of the others is off, in some parameter, by at least that
# parameter's largest gradient, and none raises an error. With the sync left off, the sharded gradients are
# never written: the error is 1.00, and the model does not learn.
#
# ## Your turn 2 · Stop together
#
# Mend mistake 1. Write `should_stop(loss, target)`: `loss` is this rank's loss, a float. All ranks stop
# together, when the mean of their losses is below the target. A NaN on one rank must not stop the training.

# %% jupyter={"source_hidden": true}
# %%ranks
def ranks_that_stop(should_stop, losses):
    everyone = [None] * world
    dist.all_gather_object(everyone, bool(should_stop(losses[rank], 1.0)))
    return sum(everyone)


@turn(2, {
    "ranks that stop, all losses 0.5": exactly(world, less="All losses are below the target: all should stop."),
    "ranks that stop, one loss of 0.5 and the others 2": exactly(
        0, lambda n: "A rank whose own loss is low stops alone, and the others would wait for it." if n < world
        else "All ranks stop although the mean is above the target: is it a mean, and of all losses?"
    ),
    "ranks that stop, one loss of 2 and the others 0.1": exactly(
        world, lambda n: "The mean is below the target, and no rank stops: is it a mean, or a sum or a maximum?"
        if n == 0 else "Only ranks whose own loss is low stop, and wait for nobody: decide by the mean."
    ),
    "ranks that stop, one loss is NaN": exactly(0, more="A NaN on one rank has stopped ranks."),
})
def score_stop(should_stop):
    ways = {
        "all losses 0.5": [0.5] * world,
        "one loss of 0.5 and the others 2": [0.5] + [2.0] * (world - 1),
        "one loss of 2 and the others 0.1": [2.0 if world > 2 else 1.5] + [0.1] * (world - 1),
        "one loss is NaN": [float("nan")] + [0.5] * (world - 1),
    }
    return {f"ranks that stop, {name}": ranks_that_stop(should_stop, way) for name, way in ways.items()}


# %%
# %%turn 2
def should_stop(loss, target):                  # float, float -> bool
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def should_stop(loss, target):
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    return (mean / world < target).item()

# %% tags=["right"] turn=2
import numpy as np

def should_stop(loss, target):
    losses = [None] * world
    dist.all_gather_object(losses, loss)
    return np.mean(losses) < target             # NumPy's bool

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional

def should_stop(loss, target):
    return functional.all_reduce(torch.tensor([loss]), "sum", dist.group.WORLD)[0] < target * world

# %% tags=["right"] turn=2
def should_stop(loss, target):                  # rank 0 decides
    losses = [torch.zeros(()) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.tensor(loss), losses)
    stop = torch.tensor(bool(sum(losses) / world < target) if rank == 0 else False)
    dist.broadcast(stop, src=0)
    return stop

# %% tags=["wrong"] turn=2 says="stops alone"
def should_stop(loss, target):
    return loss < target

# %% tags=["wrong"] turn=2 says="a sum or a maximum"
def should_stop(loss, target):                  # a sum
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return (total < target).item()

# %% tags=["wrong"] turn=2 says="is it a mean, and of all losses"
def should_stop(loss, target):                  # the lowest decides
    lowest = torch.tensor(loss)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return (lowest < target).item()

# %% tags=["wrong"] turn=2 says="Each would wait for the others"
def should_stop(loss, target):
    mean = torch.tensor(loss)
    if loss < target:
        dist.all_reduce(mean)
    return (mean / world < target).item()

# %% tags=["wrong"] turn=2 says="A NaN on one rank has stopped"
def should_stop(loss, target):
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    return not (mean / world >= target).item()

# %% [markdown]
# ## A job that hangs now
#
# | tool | tells you | does not see |
# |:--|:--|:--|
# | `py-spy dump --pid PID` on each rank, or `faulthandler.dump_traceback_later(240)` in each step of the program | the line on which each rank stands; read the odd one out first | where they parted; with NCCL, what the GPU waits for |
# | NCCL's flight recorder: the watchdog writes one file per rank at a time-out (`TORCH_FR_DUMP_TEMP_FILE` is the prefix of their names), `torchfrtrace DIR` compares them | the last collectives of each rank, with their stacks | units and data |
# | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | kinds and shapes that differ, and a missing rank, before the call is issued | equal calls that mean different things |
# | `dist.monitored_barrier` (gloo) | the first rank that did not come (`wait_all_ranks=True`: all of them) | where it is |
#
# ## One command
#
# `python -m fsdp_utils doctor --steps 5 train.py` runs a script that nobody changed on two ranks for five
# optimizer steps, and says what is wrong. Of the script above it says, among others:
#
# ```text
# error: ranks_part. The ranks call different collectives
#   seen    the ranks part at collective 39 of all ranks.
#   rank 0: all_reduce of float32[] by SUM, at train.py:36 `dist.all_reduce(total)`
#   rank 1: all_reduce of float32[] by SUM, at train.py:34 `dist.all_reduce(spikes)`
# ```
#
# It knows [42 faults](answers.md#findings-of-the-doctor), and each is tested on a script that has it and on
# one that has not. It sees no more than the steps that it runs.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | nothing moves, GPUs at 100% | NCCL's kernels wait for a rank | `py-spy` on all ranks; next time `check_in_step` |
# | `Timed out waiting`, `Watchdog caught collective operation timeout` | the same, after the limit | as above; the rank that reports it has waited |
# | `Connection closed by peer` | another rank has ended | the first error in *its* output |
# | `Received data size doesn't match expected size` | ranks are in different collectives | `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which compares before the call |
# | it hangs in the last step of an epoch | unequal numbers of batches | `DistributedSampler` gives each rank as many; a `DataLoader`'s `drop_last=True` over unequal parts does not |
#
# ## The rule
#
# What decides on a collective must be equal on all ranks. Run under `check_in_step` with a short `timeout`,
# and compare one step with one process before a long run.
#
# [← lesson 14](14_plan_before_you_rent.ipynb) · [lesson 16 →](16_two_dimensions.ipynb)

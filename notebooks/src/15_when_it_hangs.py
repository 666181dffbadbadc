# %% [markdown]
# # 15 · When it hangs, and when it lies
#
# Your job has stood still for ten minutes with all GPUs at 100%. Or it runs, but a logged number can't be right. No
# error says why. Both can come from one mistake: some rank called another collective than the rest. Which rank
# was it, and on which line? **Put `with check_in_step():` from `fsdp_utils` around the training loop. At the first
# collective that isn't the same on all ranks, rank 0 prints the line of each rank, and each rank raises an error.
# Fix that line, and restart from a checkpoint that is older than the mistake.** If the calls agree and the gradients
# are wrong all the same, [compare one step with one process](#Lies-without-a-wrong-collective).

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

ROWS = [["gather A", "gather B", "sum losses"], ["gather A", "gather B", "sum losses"],
        ["gather A", "count spikes", "gather B"], ["gather A", "gather B", None]]
SAID = ["", "", "one call more: from call 2 on,\npaired with the wrong call", "has left the loop:\nthe others wait for it"]
fig, (axes,) = plots.figure(width=9.2, height=2.1)
for rank, calls in enumerate(ROWS):
    for place, call in enumerate(calls):
        odd = call != ROWS[0][place]
        look = {"edgecolor": plots.RANK_COLORS[5], "linewidth": 2.5} if odd else {"edgecolor": plots.FAINT}
        axes.barh(rank, 0.92, left=place - 0.46, height=0.62, facecolor=plots.CARD if odd else plots.FAINT, **look)
        axes.text(place, rank, call or "no call", ha="center", va="center", fontsize=8)
    axes.text(2.6, rank, SAID[rank], va="center", fontsize=8)
axes.set(ylim=(3.6, -0.6), xlim=(-0.6, 3.6))
axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
axes.set_xticks(range(3), ["call 1", "call 2", "call 3"])
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="Three calls of four ranks: rank 2 parts at call 2, and rank 3 makes no call 3.")

# %% [markdown]
# The drawing shows why one mistake has two faces. A collective does not say what it is for. Within a process
# group, calls are paired by order alone: the second call of one rank meets the second call of every other rank.
# Rank 2 has called one thing more, "count spikes", and it meets "gather B" of the others. We say that the ranks
# **part** at call 2. From there on, every call of rank 2 is paired with a wrong one. Where kinds and sizes happen to
# match, nobody notices, and the result is a lie. Rank 3 has left the loop, but the others need it for call 3, so
# they wait: a hang.

# %% tags=["card"]
lesson.card(
    15,
    learn="find the line on which ranks part, and gradients that are wrong although the ranks never part",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    ranks="4 on the CPU, because some of them are ended (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 19, 20),
)

# %% [markdown]
# ## The script
#
# The mistake in this script is an `if` that decides from this rank's own loss which number to add up over the
# ranks: a rank with a high loss counts a spike, the others add up their losses. To provoke it, rank 1 gets
# a batch that is 50 times too large in step 3. The loop runs twice, the second time under `check_in_step`.
# In the output, compare step 3 with its neighbours before you read on. Save it as `train.py`, then run
# `torchrun --nproc-per-node 4 train.py`.
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
# Each loss is 0.03 to 0.05, so four of them add up to 0.13 to 0.18. In step 3, rank 1 took the other branch. But
# both branches call `all_reduce` on one float32 number, so the calls fit, and rank 0 printed 1.10: three losses,
# 0.10, plus rank 1's count of one. No error was raised, and the training went on.
#
# The second run prints the same lie, and then names it. One step makes ten calls: each of the three `Linear`
# layers is gathered for forward and again for backward, and its gradient is reduce-scattered, which makes nine;
# the tenth is the `all_reduce`. So **collective 40** is the last call of the fourth step, step 3. Ranks 0, 2 and 3
# made it on line 36, and rank 1 on line 34. (`float32[]` is a tensor without dimensions, one number.) The report
# came after step 4 because the calls are compared twice a second, and these steps take milliseconds.
#
# The lines show the cure: every rank makes the same call and brings both numbers. With these lines in place of the
# branch, step 3 prints 65.48, the sum of all four losses.
#
# ```python
# sums = torch.stack([loss.detach(), (loss > 1).float()])
# dist.all_reduce(sums)
# total, spikes = sums
# ```
#
# ## Five mistakes
#
# The next visible cell has five ordinary pieces of training code, each with one mistake. Guess for each whether it
# hangs or lies. They use two functions of the folded cell: `sharded(mesh)` is a small FSDP2 model of three blocks
# and a head, and `weights_used(model)` says whether each block has computed with its own weights.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")                       # for the turns; `attempt` starts ranks of its own

# %% jupyter={"source_hidden": true}
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

LIMIT_S, WORLD = 1.5, len(ranks.get("0"))


class Model(nn.Module):                         # three blocks and a head; one of the blocks may be left out
    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.head = nn.Linear(8, 4)

    def forward(self, x, left_out=None):        # f32[batch, 8]
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else x + block(x)[:, :8]
        return self.head(x)                     # f32[batch, 4]


def sharded(mesh, widths=(8, 8, 8)):
    """Build the model under FSDP2; all weights of block n are n, and `used` has those it computes with."""
    model = Model(widths)
    model.used = {}
    for number, block in enumerate(model.blocks):
        nn.init.constant_(block.weight, number)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    for number, block in enumerate(model.blocks):

        def note(block, _, number=number):
            model.used[number] = block.weight[:, 0].tolist()

        block.register_forward_pre_hook(note)
    return model


def weights_used(model):
    """Say whether a block has computed with weights that are not its own."""
    mixed = [number for number, found in model.used.items() if set(found) != {float(number)}]
    return f"weights of two blocks in block {mixed[0]}" if mixed else "right weights"


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


CURES = {
    "early_stop": "stop on a number that all ranks have: turn 2",
    "unequal_batches": "equally many batches on each rank: DistributedSampler",
    "save_on_rank_0": "gather on all ranks, write on rank 0",
    "branch_on_loss": "one call with both numbers, as above",
    "own_generator": "one seed on all ranks, for all that decides which layer runs",
    "other_sizes": "the same",
}


# %%
def early_stop(mesh):                           # 1: one rank leaves the loop because its own loss is low
    model = sharded(mesh)
    for step in range(4):
        model(torch.ones(2, 8)).sum().backward()
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:   # stands for `loss < target`
            break


def unequal_batches(mesh):                      # 2: rank 0's loader has one batch more
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


def own_generator(mesh, widths=(8, 8, 8)):      # 5: stochastic depth: each rank draws which block to leave out
    model = sharded(mesh, widths)
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.ones(4, 8), left_out=torch.randint(3, (1,), generator=generator).item())
    return weights_used(model)


def other_sizes(mesh):                          # 5 again, with blocks of different sizes
    return own_generator(mesh, widths=(8, 16, 24))


# %% [markdown]
# `attempt(program)` (folded) runs a program on new ranks, where a collective waits at most 1.5 seconds, and returns
# what each rank returned or raised. First without a check. Read the middle column: three programs hang, two go on
# with wrong numbers, and one loses a process.

# %%
PROGRAMS = [early_stop, unequal_batches, save_on_rank_0, branch_on_loss, own_generator, other_sizes]
without = {program.__name__: attempt(program) for program in PROGRAMS}
hangs = [name for name, found in without.items() if in_words(found).startswith("hangs")]
assert hangs == ["early_stop", "unequal_batches", "save_on_rank_0"]
assert "weights of two blocks" in in_words(without["own_generator"])
Table(["program", "without a check", "cure"], [[name, in_words(found), CURES[name]] for name, found in without.items()])

# %% [markdown]
# `branch_on_loss` is the script's lie again: 2.5 is rank 0's count, 1, plus three losses of 0.5, and rank 0 calls
# it spikes.
#
# `own_generator` is worse, because the lie goes into the model. Each rank leaves out one block, so all make the same
# *number* of calls, of the same size, and nobody waits. But at call 2, after the root's, ranks 0, 1 and 3 gather
# block 0, while rank 2, which leaves that one out, gathers block 1. Each gets three shards of block 0 and one of
# block 1, and computes with them. In `other_sizes` only the sizes differ: a rank receives more bytes than it has room
# for, and gloo ends its process. (Of fewer bytes gloo says nothing. NCCL's documentation calls unequal sizes
# [undefined behaviour](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html).)
#
# So the symptom does not tell you the mistake: whether it's a hang, a lie or an abort depends on the calls that
# happen to meet. Nor does the error that ends a hang. It comes after 10 minutes with NCCL and 30 with gloo, unless
# you pass `timeout=` to `init_process_group`, and it comes from the ranks that *waited*, not from the one to blame.
#
# ## `check_in_step` on each
#
# `check_in_step` compares the calls while your program runs. It writes down each call of a rank: kind, dtype, shape,
# reduce operation, FSDP2's unit, and your line. Twice a second a thread puts the new ones into the process group's
# store, through which the ranks once found each other, and rank 0 compares. No collective is added.
#
# The next cell runs the five programs under it. Read the first line of each report: *part* means that different
# calls met, *waits* that a rank will not come. Then look for the rank that stands alone.

# %%
checked = {program.__name__: attempt(program, check=True) for program in PROGRAMS[:5]}
for name, found in checked.items():
    report = next(said for said in found if "OutOfStep" in said)
    print(name, report.strip(), sep="\n", end="\n\n")

# %% [markdown]
# It found all five, the two lies among them. Take the first report. A step of this model makes 11 calls: the root
# (which holds the head) and three blocks are gathered in forward, the blocks again in backward, and the gradients of
# all four are reduce-scattered. Three steps are 33 calls, so call 34 begins step four: three ranks gather the root,
# and rank 3 *has left the block*, the `with` block. A shape is what the rank gives: 9 numbers are its quarter of the
# head's 36, 18 its quarter of a block, and 72 the full gradient of a block. In the last report all ranks stand on
# one line, in the model's `forward`; what differs is the unit, `blocks.0` or `blocks.1`. (FSDP1 and DDP are watched
# too, without names of units.)
#
# In your program:
#
# ```python
# dist.init_process_group("nccl", timeout=timedelta(minutes=5))     # longer than your longest save or compilation
# with check_in_step():
#     for batch in loader:
#         train_step(batch)
# ```
#
# **What then happens.** Rank 0 prints the report to stderr within about two seconds, and each rank raises
# `OutOfStep` at its next collective. With gloo, a rank that is already waiting raises it when the wait ends, at the
# latest at the time-out. With NCCL, PyTorch's watchdog thread ends such a process at the time-out, so read rank 0's
# stderr. A rank that is late but still in the block may be slow: rank 0 reports it after 10 seconds, and nothing
# is raised.
#
# **Why an older checkpoint.** Until the report came, the ranks computed with mixed data, and a checkpoint of that
# time contains the result.
#
# **What it costs.** On two CPU ranks, with 23 collectives in a step of 20 to 66 ms, a step took 1 to 5% longer
# (`benchmarks/in_step.py`). It was not measured on GPUs: use it for the first steps of new code, and measure before
# you leave it on for good.
#
# **What it cannot see.** It compares calls, not values. It skips `send`, `recv`, `monitored_barrier` and
# collectives from threads that your program starts; of `broadcast`, `reduce`, `gather` and `scatter` it compares no
# lines; and gloo may end a rank first, as in `other_sizes`. It can also be too strict: a *correct* program may
# make one call from two lines. `check_in_step(by_line=False)` accepts that, but misses the script's lie, whose
# calls differ in nothing else.
#
# ## Your turn 1 · Who parts?
#
# Write the comparison, so that every rank knows the result.
#
# - **Given:** `calls`, a list of strings: what this rank has called, in order. Also `rank`, `world` and `dist`.
# - **Return,** on every rank the same: the number of the first call at which the ranks differ, counted from 1; and
#   a dictionary from each string found there to the list of ranks that have it. A rank whose list has ended has
#   `"nothing"` there. If all lists are equal, return `0, {}`.
# - **Example:** ranks 0 to 2 have `"reduce 1"` as their third call, and rank 3 has called only two: return
#   `3, {"reduce 1": [0, 1, 2], "nothing": [3]}`.
#
# <details><summary>Hint</summary>
#
# `dist.all_gather_object(everyone, calls)` fills a list `everyone = [None] * world` on each rank.
# `itertools.zip_longest(*lists, fillvalue=...)` goes through several lists at once until the longest ends.
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
        "right", lambda found: f"Expected call 3, with the ranks of each string in a list; found {found}."
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
            raise NotYet("Return a number and a dictionary: `number, {string: [ranks]}`.")
        answer = (int(answer[0]), {text: sorted(map(int, who)) for text, who in answer[1].items()})
        found[name] = "right" if answer == expected else f"`{answer[0]}, {answer[1]}`"
    return found


# %%
# %%turn 1
def who_parts(calls):                           # list of str: what this rank has called
    # bring the lists of all ranks together, then go through them call by call
    return None                                 # your lines here: number, {string: [ranks]}


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
# Ranks can make the same calls and still have wrong gradients, for example because they all read the same samples.
# `check_in_step` says nothing then. One test finds such mistakes: **compare one step with one process.** Take a
# small configuration of your model that one process can train, in float32 and without dropout. Let all ranks run
# backward, each on its share of a batch, and gather the gradients with `full_tensor()`. Then let one process with
# the same initial weights run backward on the whole batch. The two must agree up to rounding.
#
# Compare gradients, not losses. AdamW divides each gradient by a running mean of its size, so if all gradients are
# twice too large, the weights hardly notice, and the loss curve looks right.
#
# `step_error` in the visible cell is that test, for you to copy; the lines below it try one right model and four
# wrong ones. The helpers are folded: `build(seed)` makes the model, `fsdp(model)` shards it, and `loss_of(model,
# rows)` is the mean loss over these rows of the batch.

# %% jupyter={"source_hidden": true}
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


# %%
# %%ranks
def step_error(model, rows):
    """How far the gradients are from those of one process, as a part of the largest in the same parameter."""
    loss_of(model, rows).backward()
    alone = build()                             # the same seed, so the same initial weights
    loss_of(alone, torch.arange(12 * world)).backward()
    worst = torch.zeros(1)
    for parameter, right in zip(model.parameters(), alone.parameters()):
        found = torch.zeros_like(right) if parameter.grad is None else parameter.grad.full_tensor()
        worst = torch.maximum(worst, (found - right.grad).abs().max() / right.grad.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)   # the same on all ranks
    return worst.item()


rows = torch.arange(12 * world)
equal = rows.chunk(world)[rank]                 # 12 samples on each rank
unequal = rows[: 11 * world + 1] if rank == 0 else rows[11 * world + rank :][:1]    # of 4 ranks: 45, 1, 1 and 1
no_sync = fsdp(build())
no_sync.set_requires_gradient_sync(False)       # for gradient accumulation, and never set back
errors = {
    "none": step_error(fsdp(build()), equal),
    "each rank starts from its own weights": step_error(fsdp(build(seed=rank)), equal),
    "all ranks take the same samples": step_error(fsdp(build()), rows[:12]),
    "a mean of means over unequal shares": step_error(fsdp(build()), unequal),
    "gradient sync left off": step_error(no_sync, equal),
}

# %% jupyter={"source_hidden": true}
errors, cures = ranks.get("errors")[0], {
    "none": "",
    "each rank starts from its own weights": "seed all ranks alike before the model, or load one file",
    "all ranks take the same samples": "DistributedSampler, or a seed per rank after the model",
    "a mean of means over unequal shares": "weigh each loss by its share of the samples, times the ranks",
    "gradient sync left off": "switch it on before the last backward of a step",
}
assert errors["none"] < 1e-5
assert min(error for name, error in errors.items() if name != "none") > 0.1
Table(["the mistake, with FSDP2", "error", "cure"], [[name, f"{e:.2f}", cures[name]] for name, e in errors.items()])

# %% [markdown]
# Without a mistake the error is 0.00 (below 1e-5, rounded for the table). At 1.00, a gradient in some parameter is
# off by as much as that parameter's largest. None of the mistakes raised an error.
#
# - **1.92:** `fully_shard` does not copy rank 0's weights to the others, as DDP does. Each rank keeps its rows of
#   *its* weights, so the model is glued together from four.
# - **5.43:** four ranks computed the same gradient of 12 samples, and 36 samples were never used.
# - **10.12:** FSDP averages over *ranks*. Rank 0 has 45 samples and the others one each, so each lone
#   sample counts a quarter, where one process gives it a 48th.
# - **1.00:** with the sync off, FSDP2 never writes the sharded gradients. The optimizer finds none, and nothing is
#   learned.
#
# The sizes belong to this small model; what counts is how far they are from rounding.
#
# ## Your turn 2 · Stop together
#
# Mend mistake 1, `early_stop`: write the function that decides whether the loop ends.
#
# - **Given:** `loss`, the loss of this rank, and `target`, which is the same on all ranks. Both are floats.
# - **Return** True or False, the same on every rank: whether the *mean* of all ranks' losses is below the target. A
#   NaN on one rank is not below any target, so then no rank may stop.
#
# <details><summary>Hint</summary>
#
# `dist.all_reduce` adds up a tensor over the ranks, in place. A comparison with NaN is False.
#
# </details>

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
def should_stop(loss, target):                  # this rank's loss, the target of all: floats
    # first the mean of all ranks' losses, then the comparison
    return None                                 # your lines here: the same True or False on every rank


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
# You can't add `check_in_step` to a job that already stands. **Look before you kill it:** the stacks go with the
# processes. `py-spy` needs nothing in your program. Dump the stack of every rank, and read the one that stands
# elsewhere than the rest. With NCCL the Python line can mislead, because the CPU runs ahead of the GPU and stops
# where it first needs a result, such as at `.item()`. The other tools are for the next run.
#
# | tool | tells you | does not see |
# |:--|:--|:--|
# | `py-spy dump --pid PID`, for each rank | the line on which each rank stands | where they parted; what the GPU waits for |
# | `faulthandler.dump_traceback_later(240)`, called in each step | the same, once a step has taken 240 s | the same |
# | NCCL's flight recorder: at a time-out each rank writes a file (name: `TORCH_FR_DUMP_TEMP_FILE` plus the rank); `torchfrtrace DIR` compares them | the last collectives of each rank, with their stacks | units and values |
# | the variable `TORCH_DISTRIBUTED_DEBUG=DETAIL` | before each call: a missing rank, other kinds or shapes | equal calls that mean different things |
#
# DETAIL is for when you can't install `fsdp_utils`. It puts a barrier before each call, and names the rank in hangs
# and the shapes in `other_sizes`; but our script prints its 1.10 as before.
#
# ## One command
#
# The last tool needs no change in your code. The **doctor** runs a script on two ranks of this machine, under
# `check_in_step` and other checks, and says what is wrong. It watches three optimizer steps unless you ask for more,
# and our outlier comes in the fourth:
#
# ```sh
# python -m fsdp_utils doctor --steps 5 train.py
# ```
#
# Of the script above it says, among others:
#
# ```text
# error: ranks_part. The ranks call different collectives
#   seen    the ranks part at collective 39 of all ranks.
#   rank 0: all_reduce of float32[] by SUM, at train.py:36 `dist.all_reduce(total)`
#   rank 1: all_reduce of float32[] by SUM, at train.py:34 `dist.all_reduce(spikes)`
# ```
#
# (The doctor counts from the second collective on, so its 39 is our 40.) Below that it prints what the mistake costs,
# the cure, and the lesson to read. It exits with 1 if it has found an error or a warning, so CI can run it. It looks
# for [42 faults](answers.md#findings-of-the-doctor), such as equal samples on all ranks; each is tested on a script
# that has it and on one that has not. It sees nothing of later steps.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | nothing moves, GPUs at 100% | NCCL's kernels wait for a rank | `py-spy` on all ranks; next time `check_in_step` |
# | `Timed out waiting`, `Watchdog caught collective operation timeout` | the same, after the limit | as above; the rank that reports it has waited |
# | `Connection closed by peer` | another rank has ended | the first error in *its* output |
# | `Received data size doesn't match expected size` | ranks are in different collectives | `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which compares before the call |
# | it hangs in the last step of an epoch | unequal numbers of batches | `DistributedSampler` gives all ranks equally many samples; `drop_last=True` over parts of unequal length need not |
#
# ## The rule
#
# Whatever decides on a collective must be equal on all ranks. Run new code under `check_in_step` with a short
# `timeout`, and compare one step with one process before a long run.
#
# [← lesson 14](14_plan_before_you_rent.ipynb) · [lesson 16 →](16_two_dimensions.ipynb)

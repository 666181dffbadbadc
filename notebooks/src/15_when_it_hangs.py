# %% [markdown]
# # 15 · When it hangs, and when it lies
#
# Your job has made no progress for ten minutes, with its GPUs at 100%. Or it runs, but a logged number can't be
# right. No error says why. Both can come from one mistake: one rank called a different collective from the rest, or
# none. Which rank was it, and on which line? **Put `with check_in_step():` from `fsdp_utils` around the training
# loop. Rank 0 prints the line of each rank: within about two seconds of a collective that differs, or once others
# wait for a rank that has left the loop; after ten seconds where a rank is only late. Fix that line.**
#
# | what you see | what to do |
# |:--|:--|
# | the job hangs now | [`py-spy` on every rank](#A-job-that-hangs-now), before you kill it |
# | it may hang again, or a logged number is wrong | run it under `check_in_step`, as below |
# | `check_in_step` is silent, and the loss is worse than on one GPU | [compare the gradients of one step with one process](#Wrong-gradients-although-all-calls-agree) |

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

STEP = ["gather", "reduce", "sum\nlosses"]
plots.calls(
    {
        "a lie: call 3 of rank 1 differs": [STEP, [*STEP[:2], "count\nspikes"], STEP, STEP],
        "a hang: rank 3 has left the loop": [STEP, STEP, STEP, [*STEP[:2], "no call"]],
    },
    first=[1, 1],
    alt="Three calls of four ranks, twice: rank 1 counts spikes in call 3, and rank 3 makes no call 3.",
)

# %% [markdown]
# A collective doesn't say what it is for. Within a process group, calls are paired by order alone: the third call of one
# rank meets the third call of every other. On the left, "count spikes" of rank 1 meets "sum losses" of the others: the
# ranks **part** at call 3 (PyTorch calls it a *desync* or a *collective mismatch*). As kinds and sizes match, nothing
# raises an error, and the sum is wrong: a lie. On the right, the others need rank 3 for call 3, so they wait: a hang.

# %% tags=["card"]
lesson.card(
    15,
    learn="find the line on which ranks part, and gradients that are wrong although the ranks never part",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    ranks="4 on the CPU, because some of them are ended (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 20, 18),
)

# %% [markdown]
# ## The script
#
# The mistake in this script is an `if` that decides from this rank's own loss which number to add up over the
# ranks: a rank with a high loss counts a spike, the others add up their losses. To provoke it, rank 1 gets
# a batch that is 50 times too large in step 3. The loop runs twice, the second time under `check_in_step`. Save it as
# `train.py`, run `torchrun --nproc-per-node 4 train.py`, and compare step 3 of the output with those before it.
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
#     for step in range(4):
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
# step 0: sum of losses 0.18
# step 1: sum of losses 0.15
# step 2: sum of losses 0.15
# step 3: sum of losses 1.10
# the ranks part at collective 40 of all ranks.
#   ranks 0, 2, 3: all_reduce of float32[] by SUM, at train.py:36 `dist.all_reduce(total)`
#   rank 1: all_reduce of float32[] by SUM, at train.py:34 `dist.all_reduce(spikes)`
# If different lines are right here, use check_in_step(by_line=False).
# ```
#
# Without the outlier a loss is 0.03 to 0.05, and four of them add up to 0.15 to 0.18. Rank 1's loss in step 3 is
# 65.38, so it took the other branch. But both branches call `all_reduce` on one float32 number, so the calls fit, and
# rank 0 printed 1.10: three losses, 0.10, plus rank 1's count of one.
#
# The second run prints the same lie, and then the report (on a terminal twice: `check_in_step` prints it to stderr,
# and the script the error). One step makes ten calls: each of the three `Linear` layers is gathered for forward and
# again for backward, and its gradient is reduce-scattered, which makes nine; the tenth is the `all_reduce`. So
# **collective 40** is the last call of the fourth step, step 3. ("Of all ranks" names the process group, since each
# group counts its own calls; `float32[]` is one number.) Ranks 0, 2 and 3 made it on line 36, and rank 1 on line 34.
# The report came after the last step because the calls are compared twice a second, and these steps take milliseconds.
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
# The next visible cell has five ordinary pieces of training code, each with one mistake, the last in two sizes. Guess
# for each whether it hangs, lies or aborts. They use two functions of the folded cell: `sharded(mesh)` is a small
# FSDP2 model of three blocks and a head, in which every weight of block n is n; `weights_used(model)` says whether
# each block has computed with its own weights.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")                       # for the turns; `attempt` starts ranks of its own

# %% jupyter={"source_hidden": true}
import linecache
import os
import re
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_utils import check_in_step, record_collectives, run_on_ranks
from fsdp_utils.distributed.agreement import by_ranks
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
    waiting = [rank for rank, said in enumerate(found) if re.search("Timed out|closed|reset by", said)]
    if waiting:
        return f"hangs: {len(waiting)} of {WORLD} ranks wait for a call that never comes"
    return "; ".join(by_ranks([[said] for said in found]))

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
# what each rank returned or raised. A rank that has finished is kept alive; where it exits, gloo ends the wait of the
# others at once, with `Connection closed by peer`. First without a check. Read the middle column: three programs hang,
# two go on with wrong numbers, and one loses a process.

# %%
PROGRAMS = {                                    # with their cures
    early_stop: "stop on a number that all ranks have: turn 2",
    unequal_batches: "equally many batches on each rank: DistributedSampler",
    save_on_rank_0: "gather on all ranks, write on rank 0",
    branch_on_loss: "one call with both numbers, as above",
    own_generator: "one seed on all ranks, for all that decides which layer runs",
    other_sizes: "the same",
}
without = {program: in_words(attempt(program)) for program in PROGRAMS}
assert [program for program in without if "hangs" in without[program]] == [early_stop, unequal_batches, save_on_rank_0]
assert "weights of two blocks" in without[own_generator]
Table(["program", "without a check", "cure"], [[p.__name__, without[p], cure] for p, cure in PROGRAMS.items()])

# %% [markdown]
# `branch_on_loss` is the script's lie again: 2.5 is rank 0's count, 1, plus three losses of 0.5. `own_generator` is worse,
# because the lie goes into the model. Each rank leaves out one block, so all make the same *number* of calls, of the same
# size, and nobody waits. But rank 2 has left out block 0: while the others gather that one, it gathers block 1. Each gets
# three shards of block 0 and one of block 1, and computes with them. In `other_sizes` a rank receives more bytes than it
# has room for, and gloo ends its process. (NCCL calls unequal sizes
# [undefined behaviour](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html).)
#
# So the symptom does not tell you the mistake: it depends on the calls that happen to meet. Nor does the error that
# ends a hang. It comes after 10 minutes with NCCL and 30 with gloo, unless you pass `timeout=` to
# `init_process_group`, and from the ranks that *waited*: in `early_stop` the three innocent ones, in `save_on_rank_0`
# the one with the mistake.
#
# ## `check_in_step` on each
#
# `check_in_step` writes down each call of a rank: kind, dtype, shape, reduce operation, FSDP2's unit, and your line. Twice
# a second a thread puts the new ones into the process group's store, through which the ranks once found each other, and
# rank 0 compares. No collective is added.
#
# The next cell runs the five programs under it and prints three of the reports. In the first line of each, *waits*
# means that a rank has not made this call (it never will if it *has left the block*), and *part* that different calls
# met. Look for the rank that differs.

# %%
checked = {program.__name__: attempt(program, check=True) for program in [*PROGRAMS][:5]}
reports = {name: next(said for said in found if "OutOfStep" in said).strip() for name, found in checked.items()}
for name in ("early_stop", "branch_on_loss", "own_generator"):
    print(name, reports[name], sep="\n", end="\n\n")

# %% [markdown]
# Which calls were these? A step of this model makes 11: the root (which holds the head) and three blocks are gathered in
# forward, the blocks again in backward, and the gradients of all four are reduce-scattered. The figure has `early_stop`
# from its third step on, and the first calls of `own_generator`. Look at the outlined boxes.

# %% jupyter={"source_hidden": true}
def one_step(mesh):
    model = sharded(mesh)
    with record_collectives(model) as trace:
        model(torch.ones(2, 8)).sum().backward()
    verbs = {"all_gather": "gather", "reduce_scatter": "reduce"}
    return [f"{verbs[e.kind]}\n{e.module.strip('()')}" for e in trace.events if e.kind in verbs]

def parsed(report):
    """The number of the collective in a report, and what it says of each rank."""
    did = {}
    for who, text in re.findall(r"^  ranks? ([\d, ]+): (.*)$", report, re.MULTILINE):
        did |= {int(rank): text for rank in who.split(",")}
    return int(re.search(r"collective (\d+)", report)[1]), [did[rank] for rank in range(WORLD)]

step = attempt(one_step)[0]
waits, early = parsed(reports["early_stop"])
parts, own = parsed(reports["own_generator"])
assert (waits, len(step)) == (34, 11)
plots.calls(
    {
        "early_stop, from its third step on": [[*step, "no call" if "has left" in did else step[0]] for did in early],
        "own_generator": [[*step[: parts - 1], "gather\n" + re.search(r"blocks\.\d", did)[0]] for did in own],
    },
    first=[waits - len(step), 1],
    alt="Calls 23 to 34 of early_stop, of which rank 3 lacks the last, and calls 1 and 2 of own_generator: rank 2 differs in 2.",
)

# %% [markdown]
# In `early_stop`, three steps are 33 calls; then rank 3 *has left the block*, the `with` block, and call 34 belongs to a
# step that it doesn't take. So a wait shows the *last* call of the rank that left, and the cause comes after that line:
# here the `break`, two lines below. In `own_generator` all ranks are on one line, in `forward` of the folded `Model`;
# what differs is the FSDP unit. The table has all five: in two hangs, the odd rank is the one that *calls*.

# %% jupyter={"source_hidden": true}
rows = []
for name, report in reports.items():
    number, did = parsed(report)
    alone = min(range(WORLD), key=lambda rank: (did.count(did[rank]), "has left" not in did[rank]))
    line = re.search(r"`(.*)`", did[alone])[1]
    there = ("after " if "has left" in did[alone] else "") + (line if len(line) < 70 else line[:60] + " …")
    rows.append([name, "part" if "part" in report.splitlines()[0] else "wait", number, f"rank {alone}", there])
Table(["program", "the ranks", "at collective", "odd rank", "its line"], rows)

# %% [markdown]
# It found all five, the two lies among them. In your program (FSDP1 and DDP are watched, too):
#
# ```python
# dist.init_process_group("nccl", timeout=timedelta(minutes=5))     # longer than your longest save or compilation
# with check_in_step():
#     for batch in loader:
#         train_step(batch)
# ```
#
# - **What then happens.** Rank 0 prints the report to stderr, and each rank raises `OutOfStep` at its next collective.
#   With gloo, a rank that is already waiting raises it when the wait ends, at the latest at the time-out. With NCCL,
#   PyTorch's watchdog thread ends such a process at the time-out, so read rank 0's stderr. A rank that is late but still
#   in the block may be slow: rank 0 reports it after 10 seconds, and nothing is raised.
# - **Which checkpoint.** Where ranks *part* in calls that carry weights or gradients, a checkpoint written since then
#   contains mixed data: take an older one. After a *wait*, or a wrong number in the log alone, keep the newest.
# - **What it costs.** `benchmarks/in_step.py` measures it on two CPU ranks, and fails above 5% of a step. On GPUs it was
#   not measured: do so before you leave it on for good.
# - **What it cannot see.** It compares calls, not values, and skips the kinds that `help(check_in_step)` lists, such as
#   `send` and `recv`. It can also be too strict: a *correct* program may make one call from two lines.
#   `check_in_step(by_line=False)` accepts that, but misses the script's lie, whose calls differ in nothing else.
#
# ## A job that hangs now
#
# You can't add `check_in_step` to a job that already hangs. **Look before you kill it:** the stacks are lost with the
# processes. In `nvidia-smi`, suspect an idle GPU first: its rank waits in no NCCL call. `py-spy` (`pip install
# py-spy`) needs only the right to trace your program: `sudo`, or in a container `--cap-add SYS_PTRACE`. Dump the
# stack of every rank, and look for the rank whose stack differs. With NCCL the Python line can mislead, because the
# CPU runs ahead of the GPU and stops where it first needs a result, such as at `.item()`.
#
# | you see | look with | you learn |
# |:--|:--|:--|
# | it hangs, and the processes live | `py-spy dump --pid PID`, for each PID that `pgrep -f train.py` prints | the line on which each rank is now; not where they parted |
# | `Watchdog caught collective operation timeout` | NCCL's flight recorder: each rank writes a file at the time-out (`TORCH_FR_DUMP_TEMP_FILE` plus the rank); then `torchfrtrace DIR --allow-incomplete-ranks --print_stack_trace`, with all files in DIR | the last collectives of each rank, with their stacks; not units and values |
# | `Timed out waiting`, `Received data size doesn't match expected size` | `check_in_step`; without `fsdp_utils`, `TORCH_DISTRIBUTED_DEBUG=DETAIL`: a barrier (`monitored_barrier`) before most calls (with gloo, not before a `full_tensor()`) | after the time-out, the missing ranks; other kinds or shapes; not the script's lie |
# | `Connection closed by peer`, `Connection reset by peer` | the output of the rank that has ended | the first error is there; this rank has only waited |
# | it hangs in the last step of an epoch | the number of batches on each rank | whether they are equal: `DistributedSampler` gives all ranks equally many; `drop_last=True` over unequal parts need not |
#
# `python -m fsdp_utils doctor --steps 5 train.py` needs no change in your code: it runs five steps on two ranks of
# this machine, under `check_in_step` and other checks, and looks for [42 faults](answers.md#findings-of-the-doctor).
# It numbers the script's call 39, not 40. An error or a warning makes it exit with 1, so CI can run it.
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
from fsdp_utils.distributed.agreement import rank_names
from fsdp_utils.lessons.together import gather_scores
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

PLAIN, OTHERS, LAST = ["gather 0", "gather 1", "reduce 1", "reduce 0"], list(range(world - 1)), world - 1
CASES = {                                       # what this rank calls, and the right result
    "the last rank calls something else": (
        [*PLAIN[:2], "all_reduce", PLAIN[3]] if rank == LAST else PLAIN, (3, {"reduce 1": OTHERS, "all_reduce": [LAST]})
    ),
    "the last rank calls less": (PLAIN[: 4 - (rank == LAST)], (4, {"reduce 0": OTHERS, "nothing": [LAST]})),
    "all are equal": (PLAIN, (0, {})),
    "rank 0 has one call more": (["barrier"] * (rank == 0) + PLAIN, (1, {"barrier": [0], "gather 0": [*range(1, world)]})),
}
told = []                                       # what the first wrong result says about the code

def read(answer):
    """The number and the dictionary of an answer, or the sentence that it has none."""
    try:
        number, who = answer
        return int(number), {text: sorted(map(int, on)) for text, on in who.items()}
    except (TypeError, ValueError, AttributeError):
        return "Return a number and a dictionary that goes from each string to the list of its ranks."

def sentence(answers, wrong, expected):
    """Name the mistake: some ranks only, the number, or the dictionary."""
    (number, who), (right_number, right_who) = answers[wrong[0]], expected
    if len(wrong) < world:
        return f"Not all ranks have the result, it is wrong on {rank_names(wrong)}: bring it to every rank."
    if not right_who:
        return "Equal lists have no such call: return `0, {}`."
    if who and number == right_number - 1:
        return "The number is one too low: the first call is number 1."
    if "nothing" in right_who and not number:
        return 'A list that has ended counts as "nothing" (`zip` stops too soon).'
    if number != right_number:
        return f"Expected call {right_number}, the first at which the ranks differ; found {number}."
    if lacks := [f'"{text}"' for text in right_who if text not in who]:
        return f"The number is right, but the dictionary lacks {', '.join(lacks)}, which another rank has there."
    return f"The number is right, and the dictionary should be `{right_who}`."

@turn(1, {name: exactly("right", lambda _: told[0]) for name in CASES})
def score_parts(who_parts):
    found = {}
    told.clear()
    for name, (calls, expected) in CASES.items():
        answers = gather_scores(read(who_parts(list(calls))))
        if unread := [answer for answer in answers if isinstance(answer, str)]:
            raise NotYet(unread[0])
        wrong = [r for r in range(world) if answers[r] != expected]
        found[name] = "right"
        if wrong:
            told.append(sentence(answers, wrong, expected))
            found[name] = "`{}, {}`".format(*answers[wrong[0]])
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
    for number in np.flatnonzero((table != table[0]).any(0)):
        column = table[:, number]
        return [number + 1, {str(text): np.flatnonzero(column == text) for text in set(column)}]
    return [0, {}]

# %% tags=["right"] turn=1
from itertools import zip_longest
def who_parts(calls):                           # rank 0 compares, and tells the others
    everyone, found = [None] * world if rank == 0 else None, [(0, {})]
    dist.gather_object(calls, everyone)
    for number, texts in enumerate(zip_longest(*everyone or [], fillvalue="nothing"), start=1):
        if len(set(texts)) > 1 and not found[0][0]:
            found = [(number, {text: [r for r in range(world) if texts[r] == text] for text in texts})]
    dist.broadcast_object_list(found, src=0)
    return found[0]

# %% tags=["right"] turn=1
from itertools import count
def who_parts(calls):                           # one object collective for each place
    texts = [None] * world
    for place in count():
        dist.all_gather_object(texts, calls[place] if place < len(calls) else "nothing")
        if len(set(texts)) > 1:
            return place + 1, {text: tuple(r for r, one in enumerate(texts) if one == text) for text in texts}
        if texts[0] == "nothing":
            return 0, {}

# %% tags=["wrong"] turn=1 says="`zip` stops too soon"
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip(*everyone), start=1):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["wrong"] turn=1 says="The number is one too low"
def who_parts(calls):                           # counts from 0
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip(*everyone)):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["wrong"] turn=1 says="Expected call 3"
def who_parts(calls):
    return 0, {}

# %% tags=["wrong"] turn=1 says="Not all ranks have the result"
def who_parts(calls):                           # rank 0 keeps it
    everyone = [None] * world if rank == 0 else None
    dist.gather_object(calls, everyone)
    for number in range(1, 4 if rank == 0 else 0):
        texts = [one[number - 1] for one in everyone]
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}

# %% tags=["wrong"] turn=1 says="the dictionary lacks "
def who_parts(calls):                           # this rank's string alone
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip(*everyone), start=1):
        if len(set(texts)) > 1:
            return number, {texts[rank]: [r for r in range(world) if texts[r] == texts[rank]]}
    return 0, {}

# %% tags=["wrong"] turn=1 says="from each string to the list of its ranks"
def who_parts(calls):                           # the dictionary turned round
    return 3, {0: "reduce 1", 3: "all_reduce"}

# %% tags=["wrong"] turn=1 says="no such call on ranks"
def who_parts(calls):
    everyone = [None] * world
    if rank == 0:
        dist.all_gather_object(everyone, calls)
    return 0, {}

# %% [markdown]
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
ALONE = "A rank whose own loss is low stops alone, and the others would wait for it."
WAYS = {                                        # the losses, and how many ranks stop
    "all losses 0.5": ([0.5] * world, exactly(world, less="All losses are below the target: all should stop.")),
    "one loss of 0.5 and the others 2": ([0.5] + [2.0] * (world - 1), exactly(
        0, lambda n: ALONE if n < world else "All ranks stop although the mean is above the target: is it a mean, "
        "and of all losses?"
    )),
    "one loss of 2 and the others 0.1": ([2.0 if world > 2 else 1.5] + [0.1] * (world - 1), exactly(
        world, lambda n: "The mean is below the target, and no rank stops: is it a mean, or a sum or a maximum?"
        if n == 0 else "Only ranks whose own loss is low stop, and wait for nobody: decide by the mean."
    )),
    "one loss of 9 and the others 0.5": ([9.0] + [0.5] * (world - 1), exactly(
        0, lambda n: ALONE if n < world else "Is it a mean? One large loss counts, too."
    )),
    "one loss is NaN": ([float("nan")] + [0.5] * (world - 1), exactly(0, more="A NaN on one rank has stopped ranks.")),
}

@turn(2, {f"ranks that stop, {name}": goal for name, (_, goal) in WAYS.items()})
def score_stop(should_stop):
    return {
        f"ranks that stop, {name}": sum(gather_scores(bool(should_stop(losses[rank], 1.0))))
        for name, (losses, _) in WAYS.items()
    }

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

# %% tags=["wrong"] turn=2 says="no such call on ranks"
def should_stop(loss, target):
    mean = torch.tensor(loss)
    if loss < target:
        dist.all_reduce(mean)
    return (mean / world < target).item()

# %% tags=["wrong"] turn=2 says="One large loss counts"
def should_stop(loss, target):                  # the majority decides
    votes = torch.tensor(float(loss < target))
    dist.all_reduce(votes)
    return (votes > world / 2).item()

# %% tags=["wrong"] turn=2 says="A NaN on one rank has stopped"
def should_stop(loss, target):
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    return not (mean / world >= target).item()

# %% [markdown]
# ## Wrong gradients although all calls agree
#
# Come here when `check_in_step` is silent, and the loss is worse than on one GPU, for example because all ranks read the
# same samples. One test finds such mistakes: **compare one step with one process.** Let all ranks run backward, each on an
# equal share of a batch, and gather the gradients with `full_tensor()`. Then let one process with the same initial weights
# run backward on the whole batch. The two must agree up to rounding in a small configuration of your model, in float32,
# without dropout and batch statistics, with a loss that is a mean over samples; else a *correct* program differs, too.
#
# Compare gradients, not losses. AdamW divides each gradient by the root of a running mean of its square. If all
# gradients are twice too large and you don't clip them, the weights take almost the same path (`eps` isn't scaled),
# and the loss curve looks right.
#
# `step_error` in the next visible cell is this test, for you to copy. In the lesson's script you would call it so:
#
# ```python
# alone = copy.deepcopy(model)                       # before fully_shard
# ...
# batch = torch.randn(8 * dist.get_world_size(), 64, device=device)   # drawn alike on all ranks
# mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
# print(step_error(model, alone, lambda model, x: model(x).square().mean(), mine, batch))     # below 1e-5
# ```
#
# In your program, `mine` is what your loader gives this rank, and `everything` the same batch read by one process.
# Frozen and unused parameters count with a gradient of 0. The lines below the function try one correct model and four
# with a mistake. `build(seed)`, `fsdp(model)` and `loss_of(model, rows)`, the mean loss over these rows, are folded.

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
def step_error(model, alone, loss_of, mine, everything):
    """Return how far gradients are, at most, from those of one process, as a part of the parameter's largest.

    `alone` is the model without FSDP2, with equal weights; `loss_of(model, batch)` is a mean over the samples of
    `mine`, this rank's share, or of `everything`. Call it once, before training: `grad` must be None."""
    loss_of(model, mine).backward()
    loss_of(alone, everything).backward()
    errors = []
    for parameter, right in zip(model.parameters(), alone.parameters()):
        found = torch.zeros_like(right) if parameter.grad is None else parameter.grad.full_tensor()
        expected = torch.zeros_like(right) if right.grad is None else right.grad  # frozen: 0
        errors.append((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()

rows = torch.arange(12 * world)
equal = rows.chunk(world)[rank]                 # 12 samples on each rank
unequal = rows[: 11 * world + 1] if rank == 0 else rows[11 * world + rank :][:1]    # of 4 ranks: 45, 1, 1 and 1
no_sync = fsdp(build())
no_sync.set_requires_gradient_sync(False)       # for gradient accumulation, and never set back
errors = {
    "none": step_error(fsdp(build()), build(), loss_of, equal, rows),
    "each rank starts from its own weights": step_error(fsdp(build(seed=rank)), build(), loss_of, equal, rows),
    "all ranks take the same samples": step_error(fsdp(build()), build(), loss_of, rows[:12], rows),
    "a mean of means over unequal shares": step_error(fsdp(build()), build(), loss_of, unequal, rows),
    "gradient sync left off": step_error(no_sync, build(), loss_of, equal, rows),
}

# %% jupyter={"source_hidden": true}
errors, cures = ranks.get("errors")[0], [
    "",
    "seed all ranks alike before the model, or load one file",
    "DistributedSampler, or a seed per rank after the model",
    "weigh each loss by its share of the samples, times the ranks",
    "switch it on before the last backward of a step",
]
assert errors["none"] < 1e-5
assert min(error for name, error in errors.items() if name != "none") > 0.1
Table(["the mistake, with FSDP2", "error", "cure"], [[name, f"{e:.2f}", cure] for (name, e), cure in zip(errors.items(), cures)])

# %% [markdown]
# Without a mistake the error is 0.00 (below 1e-5, rounded). At 1.00, some gradient is off by as much as the largest of its
# parameter. None of the mistakes raised an error.
#
# - **1.92:** `fully_shard` doesn't copy rank 0's weights to the others, as DDP does: each rank shards *its* weights.
# - **5.43:** four ranks computed the same gradient of 12 samples, and 36 samples were never used.
# - **10.12:** FSDP averages over *ranks*: of 45, 1, 1 and 1 samples, a lone one weighs a quarter instead of a 48th.
# - **1.00:** with the sync off, FSDP2 never writes the sharded gradients, so the optimizer finds none.
#
# ## The rule
#
# Whatever decides on a collective must be equal on all ranks. Run new code under `check_in_step`, with a `timeout` of a
# few minutes, and compare one step with one process before a long run.
#
# [← lesson 14](14_plan_before_you_rent.ipynb) · [lesson 16 →](16_two_dimensions.ipynb)

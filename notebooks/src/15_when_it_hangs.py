# %% [markdown]
# # 15 · When it hangs, and when it lies
#
# A distributed program fails in three ways: it is aborted, it hangs, or it goes on with wrong numbers. All
# three come from ordinary lines of code. In this lesson you make five such mistakes on real ranks, find the
# line of each with PyTorch's tools and with one of this library, and hold gradients against one process.

# %% [markdown] tags=["card"]
# learn:
# - why a single mistake aborts, hangs or mixes up data, depending on what the ranks call next
# - how to find the line on which ranks part, with six tools, and what each of them does not see
# - how `check_in_step` watches a training for that, and what it costs
# - which mistakes leave wrong gradients without an error, and a check that finds those of this lesson
# needs: '[lesson 3](03_full_state_dict.ipynb): collectives are paired by order · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: 'none: the [video series](../videos.md) ends with lesson 11'

# %% [markdown]
# **The question of this lesson:** a training stands still, or its loss is wrong, and no error says why. Which
# line is it?

# Ranks that hang are of no further use, so the mistakes do not run on the ranks of this notebook.
# `attempt(program)` starts new ranks and calls `program(mesh)` on each, with collectives that wait 2.5
# seconds at most. (In a real job the limit is 10 minutes with NCCL and 30 minutes with gloo, unless you set
# `timeout`.) It returns one dictionary for each rank: the `result` of the program or the text of its
# `error`, the `seconds` that it took, and the `calls`: every collective, written to a file before it is
# issued. `debug=True`, `check=True` and `look=f` switch on a tool instead of the record of calls.
# `sharded(mesh)` makes a model of three blocks and a head, with an FSDP unit for each block; the root unit
# has the head. All of this is in the folded cells.

# %%
from fsdp_utils.notebook import ranks

ranks.start(device="cpu")  # for the turns; also where there are GPUs: this lesson hangs on purpose

# %% jupyter={"source_hidden": true}
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import check_in_step, record_collectives, run_on_ranks
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import exactly, try_answers, turn

WORLD = len(ranks.get("0"))
LAST = WORLD - 1


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(8, width)

    def forward(self, x):  # f32[batch, 8]
        return x + self.up(x)[:, :8]  # f32[batch, 8]


class Model(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(8, 2)

    def forward(self, x, left_out=None):  # f32[batch, 8]
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else block(x)
        return self.head(x)  # f32[batch, 2]


def sharded(mesh, widths=(8, 8, 8)):
    torch.manual_seed(0)
    model = Model(widths)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    return model

# %% jupyter={"source_hidden": true}
import json
import linecache
import os
import re
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from fsdp_utils.collectives.c10d_hooks import listen_to_calls
from fsdp_utils.torch_internals.fsdp import fsdp2_unit_of_frame

LIMIT_S = 2.5


def hold(folder, began):
    """Keep this rank until all ranks are done, or for a second after the limit."""
    done = dist.FileStore(str(folder / "done"), WORLD)
    done.add("ranks", 1)
    while done.add("ranks", 0) < WORLD and time.monotonic() - began < LIMIT_S + 1:
        time.sleep(0.02)


def note_in(folder, group):
    """Return a listener that writes each call to a file before it is issued."""
    file = (folder / f"calls{dist.get_rank()}").open("w", buffering=1)

    def note(call, issue):
        if call.group == group:
            frame, unit = sys._getframe(), None
            while frame is not None and unit is None:
                if frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
                    unit = fsdp2_unit_of_frame(frame)
                frame = frame.f_back
            unit = "a tensor" if unit is None else unit.replace("blocks.", "block ") or "root"
            print(json.dumps({"kind": call.kind, "unit": unit, "bytes": call.bytes_in}), file=file)
        return issue()

    return note


def one_rank(program, folder, cells, debug, look, check):
    """Run the program on this rank; its stderr goes to a file."""
    linecache.cache.update(cells)
    os.dup2(os.open(folder / f"stderr{dist.get_rank()}", os.O_WRONLY | os.O_CREAT), 2)
    dist.set_debug_level(dist.DebugLevel.DETAIL if debug else dist.DebugLevel.OFF)
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    found = {"result": None, "error": "", "seen": None}
    if look is not None:
        threading.Timer(1.8, lambda: found.update(seen=look())).start()
    began = time.monotonic()
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        noted = nullcontext() if debug or look or check else listen_to_calls(note_in(folder, group))
        with check_in_step() if check else nullcontext(), noted:
            found["result"] = program(mesh)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - began
    hold(folder, began)
    dist.destroy_process_group(group)  # the others need not wait for this rank
    return found


def attempt(program, *, debug=False, look=None, check=False):
    """Run a program on new ranks; return each rank's result, or its error.

    Args:
        program: gets a mesh of all ranks.
        debug: whether TORCH_DISTRIBUTED_DEBUG=DETAIL is on.
        look: is called on each rank after 1.8 seconds, in another thread; its result is in "seen".
        check: whether check_in_step is on.
    """
    cells = {name: lines for name, lines in linecache.cache.items() if "ipykernel" in name}
    folder = Path(tempfile.mkdtemp())
    try:
        settings = (program, folder, cells, debug, look, check)
        found = run_on_ranks(one_rank, *settings, world_size=WORLD, timeout=60)
    except RuntimeError as error:
        said = "".join(file.read_text() for file in sorted(folder.glob("stderr*")))
        ended = {"result": None, "error": f"{error}\n{said}", "seen": None, "seconds": 0.0}
        found = [dict(ended) for _ in range(WORLD)]
    for rank, one in enumerate(found):
        file = folder / f"calls{rank}"
        one["calls"] = [json.loads(line) for line in file.open()] if file.exists() else []
    return found


def first_words(error):
    """Return the part of a message that is the same in each run."""
    known = [
        r"Received data size doesn't match expected size",
        r"Detected mismatch between collectives on ranks",
        r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
        r"successfully reached monitoredBarrier, but received errors",
        r"Timed out waiting",
        r"Connection closed by peer",
    ]
    return next((match[0] for text in known if (match := re.search(text, error))), error[:60])


from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fsdp_utils.lessons import plots

OTHER = plots.RANK_COLORS[5]  # a pair of calls that differ


def color_of(unit):
    return plots.RANK_COLORS[int(unit[-1])] if unit.startswith("block") else plots.FAINT


def box(axes, left, row, width, text, color, *, waits=False):
    look = {"linestyle": "--", "facecolor": plots.CARD} if color is None else {"facecolor": color}
    axes.barh(row, width, left=left, height=0.6, edgecolor=plots.FAINT, alpha=0.45, **look)
    if waits:
        axes.barh(row, width, left=left, height=0.6, edgecolor=OTHER, facecolor="none", linewidth=2.5)
    axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=8, linespacing=1.0)


def draw_calls(axes, title, found, *, columns=5, sizes=False):
    """Draw the last collectives of each rank: a row for each rank, the pairs above each other."""
    calls = [one["calls"] for one in found]
    most = max(map(len, calls))
    first = max(0, most - columns)
    for number in range(first, most):
        before = None
        for rank, called in enumerate(calls):
            x = number - first
            call = called[number] if number < len(called) else None
            if call is None:
                box(axes, x - 0.46, rank, 0.92, "no call", None)
            else:
                size = f", {call['bytes']} B" if sizes else ""
                text, alone = f"{call['kind']}\n{call['unit']}{size}", number >= min(map(len, calls))
                box(axes, x - 0.46, rank, 0.92, text, color_of(call["unit"]), waits=alone)
            if before and call:
                color, thickness = (plots.INK, 1) if before == call else (OTHER, 4)
                axes.plot([x, x], [rank - 0.7, rank - 0.3], color=color, linewidth=thickness)
            before = call
    axes.set_title(title)
    axes.set_xticks(range(most - first), [f"call {number + 1}" for number in range(first, most)])
    axes.set(ylim=(WORLD - 0.6, -0.4), xlim=(-0.5, most - first - 0.5))
    axes.set_yticks(range(WORLD), [f"rank {rank}" for rank in range(WORLD)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def finished(fig, alt, *, hang):
    kinds = [Line2D([], [], color=plots.INK, label="a pair of equal calls")]
    if hang:
        kinds.append(Patch(facecolor="none", edgecolor=OTHER, linewidth=2.5, label="waits for a rank"))
    else:
        kinds.append(Line2D([], [], color=OTHER, linewidth=4, label="a pair of different calls"))
    fig.legend(handles=kinds, loc="outside lower center", ncols=2, frameon=False)
    return plots.show(fig, alt=alt)


def show_calls(runs, *, width=8.6, hang=True, **how):
    fig, panels = plots.figure(len(runs), width=width, height=0.52 * WORLD + 0.9)
    for axes, (title, found) in zip(panels, runs.items()):
        draw_calls(axes, title, found, **how)
    alt = f"The collectives of each rank, paired by their order: {', '.join(runs)}."
    return finished(fig, alt, hang=hang)


def show_weights(found):
    """Draw the calls of each rank, and from which blocks the rows of the gathered weights come."""
    fig, (left, right) = plots.figure(2, width=9.4, height=0.52 * WORLD + 0.9)
    draw_calls(left, "what each rank calls", found)
    for rank, one in enumerate(found):
        for place, (called, rows) in enumerate(one["result"].items()):
            for row, block in enumerate(rows):
                color = plots.RANK_COLORS[int(block)]
                right.barh(rank, 0.98, left=9 * place + row, height=0.6, color=color, alpha=0.45)
            right.text(9 * place + 4, rank, f"used as block {called}", ha="center", va="center", fontsize=8)
    right.set(ylim=(WORLD - 0.6, -0.4), xticks=[], yticks=[])
    right.set_title("rows of the weights, in the colour of their block")
    right.spines[:].set_visible(False)
    return finished(fig, "Calls of each rank, and the weights they get: some are of two blocks.", hang=False)


# %% [markdown]
# ## It hangs: a call without a partner
#
# Mistake 1, **an early stop** on the local loss: in the third step, the last rank has reached the target and
# leaves the loop.


# %%
def early_stop(mesh):
    model = sharded(mesh)
    for step in range(4):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        if step == 2 and dist.get_rank() == LAST:  # `loss < target`, say
            break


stopped_early = attempt(early_stop)

# %% jupyter={"source_hidden": true}
show_calls({"the last calls of early_stop": stopped_early})

# %% [markdown]
# A column is one collective, as the ranks called it. Collectives carry no label: the 34th call of a rank is
# paired with the 34th call of every other rank. The last rank has made 33, so the others wait in the first
# gather of the next step, for a call that never comes.
#
# Two more mistakes that hang:
#
# - Mistake 2, **a sampler of unequal length**: rank 0 has one batch more than the others.
# - Mistake 3, **`if rank == 0` around the state dict**: rank 0 writes the file, but the gather needs all
#   ranks.


# %%
def unequal_batches(mesh):
    model = sharded(mesh)
    for _ in range(4 if dist.get_rank() == 0 else 3):
        model(torch.ones(2, 8)).sum().backward()


def save_on_rank_0(mesh):
    model = sharded(mesh)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, "never.pt")


hangs = {"early_stop": stopped_early}
hangs |= {program.__name__: attempt(program) for program in (unequal_batches, save_on_rank_0)}

# %% jupyter={"source_hidden": true}
show_calls({name: hangs[name] for name in ("unequal_batches", "save_on_rank_0")}, columns=3)

# %% tags=["nbval-ignore-output"]
print("rank 0 of unequal_batches, after 2.5 seconds:")
print(hangs["unequal_batches"][0]["error"])

# %% [markdown]
# With gloo, a rank that waits gets this error at the time-out: here after 2.5 seconds, in a job with the
# default limit after 30 minutes. Where another rank gave up first and ended, the error is `Connection
# closed by peer` instead. With NCCL, the watchdog ends the process after 10 minutes. Which rank is missing,
# and what it did instead, is not in the message. So set a shorter limit first, `timeout` of
# `init_process_group`: five minutes are plenty where no rank does long work alone.

# %% [markdown]
# ## It lies: equal calls, other data
#
# Mistake 4, **a branch on the local loss**. A rank whose loss is high counts a spike. All others add up their
# losses. Every rank calls one `all_reduce` of one number.


# %%
def branch_on_loss(mesh):
    loss = torch.tensor([2.0 if dist.get_rank() == 0 else 0.5])  # f32[1], of this rank's own samples
    if loss > 1.0:
        spikes = torch.ones(1)
        dist.all_reduce(spikes, group=mesh.get_group())
        return "number of spikes", spikes.item()
    dist.all_reduce(loss, group=mesh.get_group())
    return "sum of losses", loss.item()


mixed = attempt(branch_on_loss)

for rank, one in enumerate(mixed):
    print(f"rank {rank}:", *one["result"])

# %% [markdown]
# All ranks get the same number: rank 0's one spike plus the other ranks' losses, 0.5 each. It is neither the
# number of spikes (1) nor the sum of all losses.
#
# Mistake 5, **a generator that differs**. In stochastic depth, each step leaves out a block that is drawn at
# random. Here each rank draws from a generator of its own. FSDP gathers a block when it is called, so the
# ranks gather different blocks. To see what they get, each block's weight is filled with the block's number
# before it is sharded.


# %%
def own_generator(mesh, widths=(8, 8, 8)):
    model, gathered = sharded(mesh, widths), {}

    def note(number):
        return lambda up, _: gathered.update({number: up.weight[:, 0].tolist()})

    for number, block in enumerate(model.blocks):
        nn.init.constant_(block.up.weight, number)
        block.up.register_forward_pre_hook(note(number))
    generator = torch.Generator().manual_seed(dist.get_rank())  # should be the same on all ranks
    model(torch.ones(4, 8), left_out=torch.randint(3, (1,), generator=generator).item())
    return gathered


drawn = attempt(own_generator)

# %% jupyter={"source_hidden": true}
show_weights(drawn)

# %% [markdown]
# On the left, thick lines are pairs of different calls. On the right is what these gathers return: weights
# glued together from pieces of two blocks. There is no error, since all blocks have equal sizes. Every rank
# leaves out one block, so even the number of collectives is equal.
#
# ## It aborts: other sizes
#
# The program is the one of mistake 5, but the blocks have different widths now.


# %%
def other_widths(mesh):
    return own_generator(mesh, widths=(8, 16, 24))


aborted = attempt(other_widths)
print("a rank was ended by SIGABRT:", "SIGABRT" in aborted[0]["error"])
print("gloo:", first_words(aborted[0]["error"]))

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
show_calls({"other_widths, up to the abort": aborted}, width=6.4, hang=False, sizes=True)

# %% [markdown]
# Where the line is thick, the sizes differ. A rank received more bytes than it had room for, and gloo ended
# its process at once. That is the lucky case: a rank that receives *fewer* bytes than it expects gets no
# error from gloo, and the rest of its tensor stays as it was. NCCL does not compare sizes. What follows there
# is undefined, and is often a hang.

# %% tags=["check"]
assert {one["result"][1] for one in mixed} == {1.0 + 0.5 * LAST}
assert "SIGABRT" in aborted[0]["error"]
assert any(set(rows) != {called} for one in drawn for called, rows in one["result"].items())
assert all(not one["error"] for one in (*mixed, *drawn))
for found in hangs.values():
    assert any("Timed out" in one["error"] for one in found)
    assert max(one["seconds"] for one in found) < 15
print("Checked: one mistake aborts, two go on with wrong data, three wait for the time-out.")

# %% [markdown]
# ## Tools 1 and 2: stacks, and the flight recorder
#
# Where does each rank stand? Python's `faulthandler` writes the stacks of all threads:
# `faulthandler.dump_traceback_later(240)` does so if a step takes four minutes. From outside, `py-spy dump
# --pid PID` shows the same of a process that has no such line.
#
# What did it call before? torch's flight recorder keeps the last 2,000 collectives of each process in a ring
# buffer, with the Python stack of each. With NCCL the watchdog writes it to a file at a time-out, and the
# command `torchfrtrace` compares the files of all ranks. gloo's calls are recorded too (seen in torch 2.13),
# but no watchdog writes them, so this cell asks for them.
#
# `attempt(..., look=f)` calls `f` on every rank after 1.8 seconds, from another thread, while the ranks hang.


# %%
def stacks():
    import faulthandler

    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def flight_record():
    import pickle

    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    return [entry for entry in record["entries"] if entry["process_group"][1] != "default_pg"]


looked = attempt(early_stop, look=lambda: (stacks(), flight_record()))


# %% jupyter={"source_hidden": true}
HELPERS = ("stacks", "hold", "one_rank", "<lambda>")


def own_line(text):
    """Return the innermost line of a dump that is in a cell, without the folded helpers."""
    found = re.findall(r'File "([^"]*ipykernel_[^"]*)", line (\d+) in (\w+)', text)
    lines = [(file, int(line), name) for file, line, name in found if name not in HELPERS]
    lines = [linecache.getline(file, line).strip() for file, line, name in lines]
    return next((line for line in lines if "look()" not in line), "has left the program")


def line_of(frames):
    """Return the innermost line of a stack that is in a cell."""
    frame = next(frame for frame in frames if "ipykernel" in frame["filename"])
    return linecache.getline(frame["filename"], frame["line"]).strip()


Table(
    ["rank", "stack: stands on the line", "recorder: calls", "the last one", "on the line"],
    [
        [rank, own_line(stack), len(calls), last["profiling_name"], line_of(last["frames"])]
        for rank, (stack, calls) in enumerate(one["seen"] for one in looked)
        for last in calls[-1:]
    ],
)

# %% [markdown]
# The stacks: all ranks but the last one stand on the line that calls the model. The last one has left the
# program: it is the one they wait for. In a dump of many ranks, read the odd one out first. What stacks do
# not show is why the ranks parted, if that was several calls ago. And with NCCL a call returns before the GPU
# has run it, so the stack shows where the CPU waits (often in `.item()` or `synchronize`), which may be many
# lines after the collective that hangs.
#
# The recorder: the last rank has called one collective less. Its last one comes from the backward pass
# before. (gloo runs a reduce-scatter as an all-reduce, and records that.) What the recorder does not have is
# the data, and the unit that a call was for.
#
# <details><summary>The switches of NCCL (not run here: they take GPUs)</summary>
#
# - `TORCH_NCCL_DUMP_ON_TIMEOUT`: write the flight recorder to a file at a time-out. On by default in current
#   versions; set it to 1 in older ones.
# - `TORCH_FR_BUFFER_SIZE=20000`: keep more calls. (Older versions read `TORCH_NCCL_TRACE_BUFFER_SIZE`, and
#   their default may be 0, which means off.)
# - `TORCH_NCCL_ASYNC_ERROR_HANDLING`, on by default: the watchdog ends the process at a time-out, because a
#   kernel cannot be interrupted.
# - `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`: how long the watchdog itself may hang before the process is ended.
# - `TORCH_NCCL_BLOCKING_WAIT=1`: `wait` blocks the CPU until the collective is over, and raises at the
#   time-out, on the line that waits.
# - `TORCH_NCCL_DESYNC_DEBUG=1`: at a time-out, report which rank is behind in which collective.
#
# </details>


# %% [markdown]
# ## Tool 3: `monitored_barrier`
#
# A barrier that names who did not come. Put it where you suspect the hang, with a limit of its own. It exists
# for gloo only; with NCCL, make a second group: `dist.new_group(backend="gloo")`.


# %%
def barrier_after(mesh):
    if dist.get_rank() == LAST:
        time.sleep(2.0)  # this rank comes late
    dist.monitored_barrier(mesh.get_group(), timeout=timedelta(seconds=1))


told = attempt(barrier_after)
print("rank 0:", first_words(told[0]["error"]))

# %% [markdown]
# Rank 0 is told which rank did not come. It names the first such rank only; `wait_all_ranks=True` names all.
# The barrier does not say where the missing rank is, and it sees nothing of the calls in between.
#
# ## Tool 4: `TORCH_DISTRIBUTED_DEBUG=DETAIL`
#
# With this environment variable, torch compares every collective before it is issued: first a monitored
# barrier, then the kind, and the shapes, types and devices of the tensors. (On the ranks here the
# same is switched on by `dist.set_debug_level`.) It makes every call slower, so use it to find a fault.

# %%
detail = {
    program.__name__: attempt(program, debug=True)
    for program in (branch_on_loss, own_generator, other_widths, early_stop)
}


# %% jupyter={"source_hidden": true}
def said(found):
    """What one rank at least was told; the most telling message."""
    words = [first_words(one["error"]) for one in found if one["error"]]
    telling = [word for word in words if "mismatch" in word or "failed" in word]
    return (telling or words or ["nothing"])[0]


Table(["mistake", "DETAIL says"], [[name, said(found)] for name, found in detail.items()])

# %% [markdown]
# The abort has become an error with both calls in it, and a missing rank is named. DETAIL does not see the
# two lies: their kinds, shapes and types are equal.
# %% [markdown]
# ## Tool 5: two recordings side by side
#
# The generator of mistake 5 left no error behind. `record_collectives` records what each rank calls, with the
# FSDP unit that the call is for. It sends nothing.


# %%
def recorded(mesh):
    model = sharded(mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with record_collectives(model) as trace:
        model(torch.ones(4, 8), left_out=torch.randint(3, (1,), generator=generator).item())
    return [f"{event.kind} {event.module}" for event in trace.events if event.kind == "all_gather"]


for rank, one in enumerate(attempt(recorded)):
    print(f"rank {rank}:", *one["result"], sep="   ")

# %% [markdown]
# These are the pairs of the figure of mistake 5, as text. Here the notebook printed the lists after the
# program had ended. In a hang the program does not end, and somebody has to compare the lists meanwhile.
#
# ## Your turn 1 · Who parts?
#
# Write the comparison yourself. `calls` is the list of what this rank has called, each call as a text.
# `who_parts(calls)` returns two things: the number of the first call at which the texts of the ranks
# differ, counted from 1, and a dictionary from each text to the list of the ranks that have it. A rank that
# has called less has the text `"nothing"` there: `3, {"reduce 1": [0, 1, 2], "nothing": [3]}`. If all lists
# are equal, return `0, {}`. Every rank returns the same.
#
# Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# `dist.all_gather_object(everyone, calls)` fills a list `everyone = [None] * world` on each rank. The lists
# may have different lengths: `itertools.zip_longest` takes a `fillvalue`.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from itertools import zip_longest

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world = dist.get_rank(), dist.get_world_size()


# %% tags=["exercise"]
# %%ranks
def who_parts(calls):
    return None  # your lines here: number, {text: [ranks]}


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together

def score_parts(who_parts):
    """Four cases: a rank with another call, one with a call less, equal lists, the first rank differs."""
    plain = ["gather 0", "gather 1", "reduce 1", "reduce 0"]
    others, last = list(range(world - 1)), world - 1
    other = [*plain[:2], "all_reduce", plain[3]] if rank == last else plain
    shorter = plain[:3] if rank == last else plain
    first = ["barrier", *plain] if rank == 0 else plain
    found = []
    for calls in (other, shorter, plain, first):
        answer, parted = run_together(who_parts, list(calls))
        if answer is None:
            return {"problem": parted} if parted else None
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], dict):
            return {"problem": "Return a number and a dictionary: `number, {text: [ranks]}`."}
        found.append((answer[0], {text: list(who) for text, who in answer[1].items()}))
    return {
        "the last rank calls something else": found[0] == (3, {"reduce 1": others, "all_reduce": [last]}),
        "the last rank calls less": found[1] == (4, {"reduce 0": others, "nothing": [last]}),
        "all are equal": found[2] == (0, {}),
        "rank 0 has one call more": found[3] == (1, {"barrier": [0], "gather 0": list(range(1, world))}),
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_parts(who_parts)",
    {
        "the last rank calls something else": exactly(
            True, otherwise="Expected call 3, with the ranks of each text in a list, on every rank."
        ),
        "the last rank calls less": exactly(
            True, otherwise='A list that has ended counts as "nothing": `zip` stops at the shortest list.'
        ),
        "all are equal": exactly(True, otherwise="Equal lists have no call at which ranks part: `0, {}`."),
        "rank 0 has one call more": exactly(
            True, otherwise="The first call differs already. Return the first such call, and count from 1."
        ),
    },
)


# %% tags=["solution"] turn=1
# %%ranks
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip_longest(*everyone, fillvalue="nothing"), start=1):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}


# %% tags=["wrong"] turn=1
# %%ranks
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip(*everyone), start=1):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}


# %% tags=["wrong"] turn=1
# %%ranks
def who_parts(calls):
    everyone = [None] * world
    dist.all_gather_object(everyone, calls)
    for number, texts in enumerate(zip_longest(*everyone, fillvalue="nothing")):
        if len(set(texts)) > 1:
            return number, {text: [r for r in range(world) if texts[r] == text] for text in texts}
    return 0, {}


# %% tags=["wrong"] turn=1
# %%ranks
def who_parts(calls):
    return 0, {}

# %% [markdown]
# ## Tool 6: `check_in_step`
#
# `check_in_step` is your function for a whole training. On each rank it records every collective except send
# and recv: kind, dtype, shape, reduce operation, root, unit and line. It publishes the new calls twice a
# second in the process group's store, and rank 0 compares them. Its threads go on while the program hangs. It
# compares *units* too, and *lines* except those of broadcast, reduce, gather and scatter, which one rank may
# call on a line of its own. So it sees the two lies: mistake 4 by its lines, here in a loop of many steps,
# and mistake 5 by its units.


# %%
def spikes_in_a_loop(mesh):
    for step in range(1000):
        loss = torch.tensor([2.0 if step == 20 and dist.get_rank() == 0 else 0.5])
        if loss > 1.0:
            dist.all_reduce(torch.ones(1), group=mesh.get_group())  # spikes
        else:
            dist.all_reduce(loss, group=mesh.get_group())  # losses
        time.sleep(0.005)


lies = attempt(spikes_in_a_loop, check=True)
print(lies[0]["error"])

# %%
drawn_checked = attempt(own_generator, check=True)
print(drawn_checked[0]["error"])

# %%
stopped = attempt(early_stop, check=True)
print(stopped[-1]["error"])

# %% [markdown]
# The report names the number of the call, the unit, the line on each rank, and the rank that others wait
# for. All ranks raise it. A rank that already waits inside a collective raises it when its wait ends: when
# a peer has gone, or at the time-out. A rank that is only late is reported once after `after_s`, and
# nothing is raised. Steps that ran between the parting and the error may have computed with mixed data: go
# back to a checkpoint from before.
#
# It does not see wrong values, nor equal calls from the same line that mean different things. Nor does it
# watch send and recv: a send that nobody receives shows only in the collectives after it. And it ends a
# correct program whose ranks call equal collectives from different lines, unless you pass `by_line=False`.
#
# What does it cost? On an AMD EPYC it added 10 µs to each collective. A step of 20 ms with 23 collectives
# takes 0.24 ms longer, which is 1.2%. Two runs of `benchmarks/in_step.py` on two busy cores found 0.1% and
# 1.5% of a step of 45 ms, with 23 collectives. At that price you can leave it on in a program whose ranks
# call from the same lines.


# %% tags=["check"]
for found in (lies, drawn_checked, stopped):
    assert all("OutOfStep" in one["error"] for one in found), [one["error"] for one in found]
    assert max(one["seconds"] for one in found) < 15
assert "part at collective 21 of all ranks" in lies[0]["error"]
assert f"waits for rank {LAST}" in stopped[-1]["error"]
assert "failed to pass" in told[0]["error"]
assert not any(one["error"] for name in ("branch_on_loss", "own_generator") for one in detail[name])
counts = [len(one["seen"][1]) for one in looked]
assert counts[-1] == min(counts) < max(counts)
print("Checked: DETAIL misses both lies; check_in_step names the call and raises on all ranks.")

# %% [markdown]
# ## In your own code
#
# A training that says where it hangs. Save the script as `train.py` and start it with
# `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none.
#
# ```python
# import faulthandler
# from datetime import timedelta
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from fsdp_utils import check_in_step
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=5))
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.manual_seed(0)
# model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
# for part in [*model, model]:
#     fully_shard(part, mesh=init_device_mesh(device, (dist.get_world_size(),)))
# optimizer = torch.optim.AdamW(model.parameters())
# with check_in_step(after_s=60):  # says where ranks part, and who is waited for
#     for step in range(10):
#         faulthandler.dump_traceback_later(240)  # stacks, before the time-out ends the job
#         loss = model(torch.randn(8, 64, device=device)).square().mean()
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
# faulthandler.cancel_dump_traceback_later()
# dist.destroy_process_group()
# ```
#
# `dump_traceback_later` is set below the time-out of the process group: at the time-out a rank gives up,
# and its stack no longer shows where it waited.

# %% [markdown]
# ## Which tool when?
#
# | tool | tells you | does not see |
# |---|---|---|
# | 1 stacks | the line on which each rank stands now | where they parted; with NCCL, what the GPU waits for |
# | 2 flight recorder | the last calls of each rank, with lines | units and data |
# | 3 `monitored_barrier` | which rank did not come | where it is; the calls in between |
# | 4 DETAIL | kinds and shapes that differ, a missing rank | equal calls that mean different things |
# | 5 `record_collectives` | all calls of a block, with units | nothing is compared for you |
# | 6 `check_in_step` | the call at which ranks part, by unit and line | send, recv, wrong values |
#
# A job that hangs now: tool 1, from outside. A fault that you can repeat: tool 4, then 6. A job that has not
# failed yet: a time-out, and tool 6 left on (with `by_line=False` if its ranks call from different lines).

# %% [markdown]
# ## Lies without a wrong collective
#
# In the next mistakes the ranks are in step, and the gradients are wrong. None of the tools above can see
# that. A comparison from end to end does: **one step against one process**. Take the full gradients of one
# step on all ranks, and those of one process with all samples. Compare gradients, not losses: AdamW hides a
# factor in all gradients, as [lesson 0](00_fsdp_from_scratch.ipynb) showed.
#
# A folded cell has a small model and 12 samples for each rank. `build(seed)` makes the model, `fsdp(model)`
# shards it, `sample_losses(model, rows)` gives one loss for each sample, `equal_rows()` says which samples
# are this rank's, and `one_process()` returns the gradients of one process. The check itself is short:

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.nn.parallel import DistributedDataParallel as DDP


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


def sample_losses(model, rows):
    return (model(inputs[rows]) - targets[rows]).square().squeeze(1)  # f32[rows]


def equal_rows():
    return torch.arange(12 * world).chunk(world)[rank]


def one_process(rows=None):
    model = build()
    sample_losses(model, torch.arange(12 * world) if rows is None else rows).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


# %%
# %%ranks
def step_error(model, expected=None):
    """How far the gradients of a step are from those of one process: 0.1 is a tenth of the largest one."""
    expected, worst = expected or one_process(), torch.zeros(1)
    for parameter, right in zip(model.parameters(), expected):
        found = parameter.grad
        if found is None:  # the step left none
            found = torch.zeros_like(right)
        full = found.full_tensor() if hasattr(found, "full_tensor") else found
        worst = torch.maximum(worst, (full - right).abs().max() / right.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)  # the same on all ranks
    return worst.item()


# %% [markdown]
# First a right step, and two wrong ones: ranks that start from different weights, and a mean of means over
# unequal shares of the samples.


# %%
# %%ranks
def right():
    model = fsdp(build())
    sample_losses(model, equal_rows()).mean().backward()
    return model


def replicas_differ():
    model = fsdp(build(seed=rank))  # each rank's shard is of another model
    sample_losses(model, equal_rows()).mean().backward()
    return model


def unequal_shares():
    model = fsdp(build())
    rows = torch.arange(12 * world)
    mine = rows[: 11 * world + 1] if rank == 0 else rows[11 * world + rank :][:1]
    sample_losses(model, mine).mean().backward()  # a mean of means
    return model


errors = {way.__name__: step_error(way()) for way in (right, replicas_differ, unequal_shares)}


# %% [markdown]
# Next, three mistakes with the gradients' reduction: a sum where a mean should be, FSDP2's gradient sync left
# off, and DDP's `no_sync` left on.


# %%
# %%ranks
def sum_for_mean():
    model = fsdp(build())
    for unit in (model[0], model[2], model):
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)  # what gloo did by itself before torch 2.9
    sample_losses(model, equal_rows()).mean().backward()
    return model


def sync_left_off():
    model = fsdp(build())
    model.set_requires_gradient_sync(False)  # for accumulation, and never set back
    sample_losses(model, equal_rows()).mean().backward()
    return model


def no_sync_left_on():
    model = DDP(build())
    with model.no_sync():
        sample_losses(model, equal_rows()).mean().backward()
    return model


# %% [markdown]
# The last lie is about clipping: each rank scales its gradients by the norm of *its own shards*, so every
# rank scales by another factor. A folded cell clips both sides of the comparison to a norm of 0.1.


# %%
# %%ranks
def norm_of_shards(gradients):
    return nn.utils.get_total_norm([gradient.to_local() for gradient in gradients])


def full_norm(gradients):
    return nn.utils.get_total_norm(gradients).full_tensor()  # of DTensors: over all ranks


# %% jupyter={"source_hidden": true}
# %%ranks
def clipped(norm_of):
    """The error after clipping, where the norm is computed by a function of the gradients."""
    model, expected = right(), one_process()
    gradients = [parameter.grad for parameter in model.parameters()]
    for some, norm in ((gradients, norm_of(gradients)), (expected, nn.utils.get_total_norm(expected))):
        for gradient in some:
            gradient.mul_(0.1 / norm)
    return step_error(model, expected)


errors |= {way.__name__: step_error(way()) for way in (sum_for_mean, sync_left_off, no_sync_left_on)}
errors |= {"clip by the norm of shards": clipped(norm_of_shards), "clip by the full norm": clipped(full_norm)}

# %% jupyter={"source_hidden": true}
errors = ranks.get("errors")[0]
Table(
    ["one step", "error of the gradients"],
    [
        [name.replace("_", " "), "0" if error < 1e-5 else f"{error:.2f}"]
        for name, error in sorted(errors.items(), key=lambda item: item[1] > 1e-5)
    ],
    note="Against one process; 1.00 is as much as the largest gradient of a parameter.",
)

# %% [markdown]
# No step raised an error. The two right ones agree with one process up to rounding, the others are far off.
# With a sum in place of a mean, the gradients are too large by a factor of the number of ranks: the error is
# that number less 1. With `set_requires_gradient_sync(False)` the sharded gradients are never written: the
# error is 1.00, and the loss never changes.

# %% tags=["check"]
assert errors["right"] < 1e-5
assert errors["clip by the full norm"] < 1e-5
assert abs(errors["sum_for_mean"] - (WORLD - 1)) < 1e-3
assert errors["sync_left_off"] == 1.0
wrong = [error for name, error in errors.items() if name not in ("right", "clip by the full norm")]
assert min(wrong) > 0.01
print("Checked: the check finds all six lies, and passes both right ways.")

# %% [markdown]
# ## Your turn 2 · A loss over unequal batches
#
# The last batch is seldom full, and texts have different lengths, so ranks have unequal numbers of samples or
# tokens. Each rank's mean weighs its samples by its own number, and FSDP then takes the mean of the means.
#
# Write `loss_of(losses)`. It gets the losses of this rank's samples, `f32[n]`, where `n` differs between the
# ranks and may be 0. It returns the number on which `backward` is called. After FSDP's mean over the ranks,
# the gradients have to be those of one process that takes the mean over all samples of all ranks.
#
# Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# One process divides the sum of all losses by the number of all samples. FSDP divides by the number of ranks,
# which you have to undo. The number of all samples is an `all_reduce` away.
#
# </details>


# %% tags=["exercise"]
# %%ranks
def loss_of(losses):  # f32[n] -> f32[]
    return None  # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def score_loss(loss_of):
    """Are the gradients right, for three ways to share samples?"""
    rows, right = torch.arange(12 * world), {}
    unequal = [rows[:5], *rows[5 : 4 + world].chunk(world - 1)]  # one sample on each rank but rank 0
    absent = [rows[:7], *[rows[:0]] * (world - 1)]
    ways = {"equal": rows.chunk(world), "unequal": unequal, "nothing on other ranks": absent}
    for name, shares in ways.items():
        mine = shares[rank]
        model = fsdp(build())
        loss, parted = run_together(loss_of, sample_losses(model, mine))
        if loss is None:
            return {"problem": parted} if parted else None
        number = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
        fine = [None if not number else bool(loss.isfinite())] * world
        dist.all_gather_object(fine, fine[rank])
        if None in fine:
            problem = "Return a tensor of one number that requires grad, also where a rank has no samples: "
            return {"problem": problem + "the sum of no losses is such a 0."}
        if not all(fine):
            right[name] = "not finite"
            continue
        loss.backward()
        right[name] = step_error(model, one_process(torch.cat(list(shares)))) < 1e-4
    return {f"gradients are right: {name}": found for name, found in right.items()}

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_loss(loss_of)",
    {
        "gradients are right: equal": exactly(
            True, otherwise="With equal shares a mean is right already: is the result off by a factor?"
        ),
        "gradients are right: unequal": exactly(
            True, otherwise="With unequal shares it is not: divide by the number of samples of all ranks."
        ),
        "gradients are right: nothing on other ranks": exactly(
            True, otherwise="A rank without samples has to give 0, not the mean of nothing, which is nan."
        ),
    },
)


# %% tags=["solution"] turn=2
# %%ranks
def loss_of(losses):
    samples = torch.tensor(float(len(losses)))
    dist.all_reduce(samples)  # of all ranks
    return losses.sum() * world / samples  # FSDP divides by world


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):
    return losses.mean()


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):
    samples = torch.tensor(float(len(losses)))
    dist.all_reduce(samples)
    return losses.sum() / samples


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):  # a rank without samples leaves before the collective
    if len(losses) == 0:
        return losses.sum()
    samples = torch.tensor(float(len(losses)))
    dist.all_reduce(samples)
    return losses.sum() * world / samples


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):  # a rank without samples has no gradient
    samples = torch.tensor(float(len(losses)))
    dist.all_reduce(samples)
    return losses.sum() * world / samples if len(losses) else torch.tensor(0.0)


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):  # nan on a rank without samples; the gradients are right
    samples = torch.tensor(float(len(losses)))
    dist.all_reduce(samples)
    return losses.mean() * len(losses) * world / samples


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):
    return losses.sum() / 12


# %% tags=["wrong"] turn=2
# %%ranks
def loss_of(losses):
    return losses.detach().sum()

# %% tags=["check"]
try_answers(15)

# %% [markdown]
# Gradient accumulation has the same trap: the mean over microbatches of unequal size. Count the samples of
# the whole step first.

# %% [markdown]
# ## When it goes wrong
#
# What you see, why, and what helps:
#
# - **Nothing moves, GPUs at 100%, no message.** NCCL kernels wait for a rank. `py-spy dump --pid PID` for all
#   ranks of a host: the odd one out is the one to look at. Next time, run under `check_in_step`.
# - **`Timed out waiting`, `Watchdog caught collective operation timeout`.** The same hang, after the limit.
#   The rank that reports it is one that waited, not the one that is to blame.
# - **`Connection closed by peer`.** Another rank has ended. Look for the first error in *its* output.
# - **`Received data size doesn't match expected size`.** Ranks are in different collectives: run once with
#   `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
# - **It hangs in the last step of an epoch.** The ranks have unequal numbers of batches. `DistributedSampler`
#   gives each rank as many samples, by repeating some, or by leaving some out with its own `drop_last=True`.
#   The `drop_last=True` of a `DataLoader` over unequal parts keeps the numbers of batches unequal.
# - **It hangs at a checkpoint.** A collective under `if rank == 0`, or under a condition on a local number:
#   [lesson 3](03_full_state_dict.ipynb).
# - **The loss is plausible and worse than on one GPU.** Take one step against one process.
#
# ## Takeaways
#
# - Collectives are paired by order. One call too few aborts, hangs or mixes up data; which of the three is
#   decided by sizes and by what comes next.
# - What decides on a collective must have the same value on all ranks: the loss, the number of batches, the
#   generator, the wish to stop.
# - DETAIL sees kinds and shapes, stacks and the flight recorder see where ranks stand, and `check_in_step`
#   also sees equal calls from different lines.
# - Give every wait a limit: `timeout=` of the process group, and below it
#   `faulthandler.dump_traceback_later`.
# - No tool for hangs reports a wrong gradient. One step against one process does.
#
# ## Next
#
# When FSDP alone is no longer enough, [lesson 16](16_two_dimensions.ipynb) adds a second dimension, tensor
# parallelism.
#
# [← lesson 14](14_plan_before_you_rent.ipynb) · [lesson 16 →](16_two_dimensions.ipynb)

# %% [markdown]
# # 10 · End to end
#
# The lessons so far each showed one thing. A training program needs them all at once, and something more: it
# must not lose work. Here you read the program `fsdp_utils.train` in small pieces, start it with torchrun,
# kill one of its ranks, and go on with another number of ranks. The loss curve will have no seam.

# %% [markdown] tags=["card"]
# learn:
# - what a training step needs besides forward and backward, so that ranks can be exchanged for accumulation
# - how to evaluate on ranks that do not divide the samples, without a hang
# - what dies with a killed rank, and what does not
# - how to resume on another number of ranks, without a seam in the metrics
# - what to change for a model of yours
# needs: '[lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) · no GPU'
# ranks: programs of 1, of 3 and then of 2 ranks, started by torchrun. With `FSDP_RANKS=2` of 1, 2 and 1.
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: '[End to end](https://www.loom.com/share/fbd5cb0aefca41ff9bb6f6c291e75ec8), 2022. Since then: the
#   parts have changed as the lessons before this one say.'

# %%
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from IPython.display import Markdown, display

from fsdp_utils import run_on_ranks, shard
from fsdp_utils.train import config, data, loop, watchdog
from fsdp_utils.lessons import lesson, plots, recorded

world = min(3, int(os.environ.get("FSDP_RANKS", 4)))
fewer = world - 1
folder = Path(tempfile.mkdtemp())
os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun would set it, with a warning


def source(*functions):
    """The program's own lines."""
    return Markdown("\n\n".join(f"```python\n{inspect.getsource(function)}```" for function in functions))


# %% [markdown]
# ## What it trains
#
# The program takes a transformers configuration, a pretrained folder, a folder of text, or, as here, a
# function of yours: it gives tensors by name, and makes a model whose forward returns a tuple or dict with a
# `.loss`. This one writes sums, `07+35=042`, and learns to complete them.

# %%
sums = '''
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from types import SimpleNamespace
from typing import NamedTuple


class Output(NamedTuple):        # FSDP looks into tuples and dicts for tensors, not into any object
    loss: Tensor


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 128)

    def forward(self, input_ids, labels):
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        x = self.token(input_ids) + self.place.weight[:length]
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def build():
    torch.manual_seed(0)
    return Decoder()


def sums():
    texts = [f"{a:02}+{b:02}={a + b:03}" for a in range(0, 100, 3) for b in range(0, 100, 4)]
    tokens = torch.tensor([list(text.encode()) for text in texts])      # i64[850, 9]
    labels = tokens.masked_fill(torch.arange(9) < 6, -100)              # only what stands after the "="
    test = torch.arange(len(tokens)) % 12 == 11                         # 70 sums that it never trains on
    return SimpleNamespace(
        train={"input_ids": tokens[~test], "labels": labels[~test]},
        test={"input_ids": tokens[test], "labels": labels[test]},
        predicts_next=True,
        build=build,
    )
'''
(folder / "sums.py").write_text(sums)

settings = """
data: {source: "sums:sums", batch_size: 24}
optim: {lr: 0.003, warmup: 5}
steps: 40
save_every: 10
eval_every: 20
"""
# GPUs, where there is one for each rank
device = "auto" if torch.accelerator.is_available() and torch.accelerator.device_count() >= world else "cpu"
(folder / "run.yaml").write_text(settings + f"parallel: {{device: {device}}}")
sys.path.insert(0, str(folder))

# %% [markdown]
# The settings are dataclasses. From YAML and the command line each is checked before a step is made, and what
# is wrong is told once, the same on every rank.

# %%
def refused(*arguments):
    try:
        config.parse(["--config", str(folder / "run.yaml"), "--out", "x", *arguments])
    except config.ConfigError as error:
        print(error)
    else:
        raise AssertionError("it was accepted")


refused("--stepz", "100")
refused("--optim.lr", "fast")
refused("--optim.warmup", "41")

# %% [markdown]
# ## One step
#
# **Predict:** the loss of a batch is a mean. Each rank computes the mean of its own samples, and FSDP
# averages the gradients over the ranks. When is that *not* the gradient of the whole batch's mean?
#
# <details><summary>Answer</summary>
#
# When ranks have unequally many labels: a mean of means weighs each label of a rank with few of them more.
# The same holds for micro-batches, the parts that a rank computes one after the other before the optimizer's
# step ([lesson 6](06_sharding_strategies.ipynb) calls it gradient accumulation). So the program counts the
# labels of the whole batch first, and each part of the loss is a part of one sum. (Their number costs no wait
# of its own after the first step: it comes with the sum of the losses of the step before.)
#
# </details>

# %%
source(loop._batch, loop._step)

# %% [markdown]
# Four things in it are easily missed:
#
# - `set_requires_gradient_sync`: gradients are summed between ranks once, after the last micro-batch.
# - The norm is that of the whole gradient: under FSDP2 gradients are DTensors, and `get_total_norm` gives
#   one. All ranks see the same number, so if it is NaN all stop at the same step.
# - Dropout's random numbers and the learning rate follow from the number of the step. Nothing of them needs
#   to be saved.
# - The samples follow from how many were seen before: the position in the data is one number.

# %%
source(loop.learning_rate, data.rows_at)

# %% [markdown]
# ### Clipping, measured
#
# Under FSDP1 `nn.utils.clip_grad_norm_` sees this rank's part alone, and each rank clips by another norm.

# %% tags=["clip"]
def norms():
    sys.path.insert(0, str(folder))
    import sums
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.nn.utils import clip_grad_norm_

    def gradients(wrap):
        model = wrap(sums.build())
        model(**{name: tensor[:4] for name, tensor in sums.sums().train.items()}).loss.backward()
        return model

    model = gradients(lambda model: FSDP(model, device_id=torch.device("cpu")))
    fsdp1_utils = clip_grad_norm_(model.parameters(), 1e9).item()
    fsdp1_own = model.clip_grad_norm_(1e9).item()
    fsdp2_utils = clip_grad_norm_(gradients(shard).parameters(), 1e9).full_tensor().item()
    plain = clip_grad_norm_(gradients(lambda model: model).parameters(), 1e9).item()
    return fsdp1_utils, fsdp1_own, fsdp2_utils, plain


by_rank = run_on_ranks(norms, world_size=2)
names = ["FSDP1, nn.utils", "FSDP1, its own", "FSDP2, nn.utils", "one process"]
for name, values in zip(names, zip(*by_rank)):
    print(f"{name:16} rank 0: {values[0]:.3f}   rank 1: {values[1]:.3f}")
(utils_0, own, fsdp2, plain), (utils_1, *_) = by_rank
assert abs(own - plain) < 1e-4 * plain
assert abs(fsdp2 - plain) < 1e-4 * plain
assert abs(utils_0 - utils_1) > 0.01 * plain
assert max(utils_0, utils_1) < plain

# %% [markdown]
# The squares of the first line's two norms add up to the square of the right one: each rank has seen its own
# part. FSDP1's own method, and `nn.utils` with FSDP2, give what one process has.
#
# ## Evaluation on ranks that do not divide the samples
#
# There are 70 test samples. Each forward gathers parameters from all ranks, so a rank with one batch less
# leaves the others waiting. In the program all ranks run equally many batches, and what is run twice counts
# once.

# %%
source(loop._evaluate)

# %% [markdown]
# ## Start it, and watch
#
# In a terminal it would be `torchrun --standalone --nproc-per-node 3 -m fsdp_utils.train --config run.yaml
# --out runs/a`. Rank 0 writes a line to `metrics.jsonl` at each step; `watch` reads them as they come.
#
# The first run is undisturbed, and has a single rank: what comes later is held against an unsharded run. It
# starts here, and runs while you read on.

# %%
def start(out, ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = ["-m", "fsdp_utils.train", "--config", str(folder / "run.yaml"), "--out", str(folder / out)]
    log = (folder / f"{out}.log").open("w")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.Popen([*command, *program, *arguments], stdout=log, stderr=log, env=env)


def metrics(out, name="loss"):
    file = folder / out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(line["step"], line[name]) for line in found if name in line]


def watch(out, process, until=40, limit_s=100):
    """Shows the last line until the program ends, or has come to a step."""
    page, limit = display(Markdown("starting"), display_id=True), time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < limit:
        if lines := metrics(out):
            page.update(Markdown(f"step {lines[-1][0]}: loss {lines[-1][1]:.2f}"))
            if until < 40 and lines[-1][0] >= until:
                break
        time.sleep(0.05)
    assert time.monotonic() < limit, (folder / f"{out}.log").read_text()[-2000:]
    page.update(Markdown(f"past step {until}" if until < 40 else "the program has ended"))


undisturbed = start("whole", 1)

# %% [markdown]
# ## Kill a rank
#
# The second run is the same one, on three ranks. After step 15 its rank 1 gets SIGKILL, which no process
# can catch: what a host's out-of-memory killer sends, and what a power failure amounts to.

# %%
running = start("killed", world)
watch("killed", running, until=15)
processes = psutil.Process(running.pid).children(recursive=True)
victim = next(process for process in processes if process.environ().get("RANK") == "1")
victim.send_signal(signal.SIGKILL)
code = running.wait(60)
log = (folder / "killed.log").read_text()
root = log[log.index("Root Cause") :]
print("torchrun's exit code:", code)
print(*re.findall(r"rank +: \d+|exitcode +: -?\d+", root), sep="\n")
assert code != 0
assert "rank      : 1 " in root
assert "exitcode  : -9" in root
before = metrics("killed")
assert 15 <= before[-1][0] < 40

# %% [markdown]
# The peers of the dead rank fail too, in their next collective: its connections are closed. torchrun names
# the *first* failure as the root cause. The program helps it: a rank whose error may be an echo waits two
# seconds before it reports.
#
# With `--max-restarts 3` torchrun would now start all ranks anew. On torch 2.13 that needs more than the
# flag. The ranks meet through a key-value store of torchrun's, which outlives them. So gloo finds the
# addresses of the dead there and cannot connect (`Gloo connectFullMesh failed`;
# [PyTorch issue 135712](https://github.com/pytorch/pytorch/issues/135712) tells the same of nccl). A program
# can be spared that by `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Ours takes a part of the store that nobody
# used before:

# %%
from fsdp_utils.train import group

source(group.fresh_store)

# %% [markdown]
# ## Go on, with one rank less
#
# Nothing else than to start it again. It finds its newest whole checkpoint, takes out of the metrics what
# came after it, and goes on with the sample after the last. 24 samples a step are 8 for each of three ranks
# and 12 for each of two. It also profiles its step 30.

# %%
running = start("killed", fewer, "--profile_step", "30")
watch("killed", running)
assert running.wait(60) == 0, (folder / "killed.log").read_text()[-2000:]
events = [json.loads(line) for line in (folder / "killed" / "events.jsonl").read_text().splitlines()]
starts = [event for event in events if event["event"] == "started"]
print("started with", " and then ".join(f"{event['world_size']} ranks" for event in starts))
assert [event["world_size"] for event in starts] == [world, fewer]
went_on_at = starts[1]["step"]
assert went_on_at in range(10, before[-1][0] + 1, 10)  # a checkpoint's step

# %% [markdown]
# Is there a seam? Each step has one line, and each loss is that of the undisturbed single rank, up to the
# order in which fp32 numbers were added.

# %% tags=["seam"]
assert undisturbed.wait(60) == 0, (folder / "whole.log").read_text()[-2000:]
whole, resumed = metrics("whole"), metrics("killed")
print(f"undisturbed: {len(whole)} steps, loss {whole[0][1]:.1f} -> {whole[-1][1]:.1f}")
assert [step for step, _ in whole] == list(range(1, 41))
assert whole[-1][1] < 0.6 * whole[0][1]
assert [step for step, _ in resumed] == list(range(1, 41))
differences = [abs(a - b) / b for (_, a), (_, b) in zip(resumed, whole)]
print("steps that are missing or told twice: none")
print("largest difference between the losses: below 0.1%")
assert max(differences) < 1e-3

evaluated, expected = metrics("killed", "eval_loss"), metrics("whole", "eval_loss")
assert [step for step, _ in evaluated] == [step for step, _ in expected] == [20, 40]
assert all(abs(a - b) < 1e-3 * b for (_, a), (_, b) in zip(evaluated, expected))

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure()
axes.plot(*zip(*whole), color="0.75", linewidth=5, label="undisturbed, 1 rank")
axes.plot(*zip(*resumed[:went_on_at]), color=plots.RANK_COLORS[0], label=f"{world} ranks")
axes.plot(*zip(*resumed[went_on_at - 1 :]), color=plots.RANK_COLORS[1], label=f"{fewer} ranks")
axes.plot(*before[-1], "x", color=plots.INK, markersize=9, label="rank 1 killed")
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend(frameon=False)
plots.show(fig, alt="The loss of a run, killed and resumed on fewer ranks, lies on the undisturbed one.")

# %% [markdown]
# The second line begins at the checkpoint that the program found, before the cross. The steps between the two
# were done again, with the same losses.
#
# ## One step under the profiler
#
# `--profile_step 30` made rank 0 write a trace, for [Perfetto](https://ui.perfetto.dev). Here is where the
# step went, by name; on a GPU its kernels would be there too.

# %% tags=["nbval-ignore-output"]
trace = json.loads((folder / "killed" / "trace-step-30.json").read_text())["traceEvents"]
spans = [event for event in trace if event.get("cat") in ("cpu_op", "user_annotation") and "dur" in event]
by_name = {}
for event in spans:
    by_name.setdefault(event["name"], []).append(event["dur"] / 1e3)
for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:12]:
    print(f"{sum(times):8.2f} ms  {len(times):4} x  {name[:70]}")
if fewer > 1:
    assert any("all_gather" in name for name in by_name)
    assert any("reduce_scatter" in name for name in by_name)

# %% [markdown]
# Spans lie within each other, so they do not add up to the step. On this small model most of it is the ranks'
# waiting for each other.
#
# ## What else can end a run
#
# - **The scheduler.** SIGTERM, or SIGUSR1 by `sbatch --signal`, sets a note. At the end of a step the ranks
#   agree on it, save, and leave with exit code 75.
# - **NaN.** The norm of the gradient shows it on every rank before the optimizer has used it. The error
#   names the step, and the rank and samples whose loss it was.
# - **A hang.** A thread on each rank tells the others where it is. If one does not move for `hang_s`, all
#   that can speak write their stacks, end those of their host that cannot, and the run fails, which torchrun
#   can mend.

# %%
source(watchdog.check_finite)

# %% [markdown]
# Does it lose work? `benchmarks/chaos.py` does all that to one run, in random order, and damages its newest
# checkpoint besides. The run has to end by itself, with the losses of a run that nobody disturbed.

# %% jupyter={"source_hidden": true}
chaos = recorded.load("chaos")["results"]
header = "| what was done | times | steps done twice, at most | s until it trained again, at most |"
lines = [header, "|:--|--:|--:|--:|"]
for kind in sorted({fault["kind"] for fault in chaos["faults"]}):
    faults = [fault for fault in chaos["faults"] if fault["kind"] == kind]
    again, seconds = (max(fault[key] for fault in faults) for key in ("repeated", "seconds"))
    lines.append(f"| {kind} | {len(faults)} | {again} | {seconds:.0f} |")
assert chaos["losses"] == chaos["undisturbed_losses"]
equal = f"\n\nThe losses of all {len(chaos['losses'])} steps are those of the undisturbed run, bit for bit. "
Markdown("\n".join(lines) + equal + recorded.caption("chaos").data)

# %% [markdown]
# A checkpoint is made every five steps. Steps are done twice where the newest one was cut short, so that the
# run went back to the one before, and where a fault came between two saves: more than five of them if the
# save before had found the disk full. A rank that is stopped (SIGSTOP) counts as hanging after 20 s. The
# ranks' start is in all of the times, on two cores.
#
# ## What to change for your model
#
# | you have | you write |
# |---|---|
# | a transformers configuration | `--model.config folder --data.source texts/` |
# | pretrained weights | `--model.pretrained folder`: what `save_pretrained` wrote |
# | a model of your own | a function like `sums`, and `--data.source module:function` |
# | GPUs | nothing; for speed `--parallel.precision bf16 --parallel.compile inductor` |
# | too little memory | `--data.micro_batch 4`, then `--parallel.recompute true` |
# | several hosts | `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:port ...` |
#
# ## Beyond one machine
#
# The program does not change; what changes is who starts its ranks, and who starts them again.
#
# | you have | use | when a rank dies |
# |---|---|---|
# | a few hosts that you log in to | `torchrun`, static | all end; started again, it goes on |
# | hosts that fail, a run nobody watches | `torchrun`, elastic | all ranks are started again by torchrun |
# | a cluster with Slurm | `sbatch examples/train.sbatch` | the same; when its time is over, it queues again |
# | a notebook here, ranks elsewhere | `ranks.start(8, profile="hosts")` | the cell says so; start again |
#
# **Static**: the same command on each host, with its number; all meet at an address of the first. The
# run's directory is one that all hosts see. With gloo, `GLOO_SOCKET_IFNAME` names the network interface
# between them; for nccl it is `NCCL_SOCKET_IFNAME`.
#
# ```sh
# torchrun --nnodes=2 --node-rank=0 --master-addr=10.77.0.1 --master-port=29400 --nproc-per-node=8 \
#     -m fsdp_utils.train --config run.yaml --out runs/a     # on the second host: --node-rank=1
# ```
#
# **Elastic**: no host has a number, and torchrun starts all ranks again, up to `--max-restarts` times.
#
# ```sh
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29500 \
#     --rdzv-id=run1 --max-restarts=3 -m fsdp_utils.train --config run.yaml --out runs/a
# ```
#
# A host that does not know its address by its own name is told it with `--local-addr=10.77.0.2`; the one
# of the endpoint also gets `--rdzv-conf=is_host=1`. `tests/test_train_hosts.py` runs both forms on two
# hosts made of network namespaces, kills a rank in the elastic one, and compares the losses.
#
# When one rank has failed, torchrun sends SIGTERM to the others, and kills after 30 s those that are still
# there. A rank that is stopped hears nothing, so the program does not wait for that: its siblings end it.
# When torchrun itself gets SIGTERM, it waits for `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` seconds, 30 unless you set
# it: set it to more than a save takes.
#
# **Slurm**: the file starts the elastic form on every node.
#
# ```sh
# sbatch --nodes=2 --gpus-per-node=8 examples/train.sbatch --config run.yaml --out runs/a
# scancel JOB      # saves a checkpoint and ends
# ```
#
# `#SBATCH --signal=B:USR1@300` sends SIGUSR1 to the script 300 s before the time is over. The script
# passes it on as SIGTERM, the ranks agree on a step, save it and leave with exit code 75; then the script
# calls `scontrol requeue`. The script decides, and not the exit code, as torchrun ends with 1 after SIGTERM,
# whatever its ranks end with. `tests/test_train_slurm.py` does all this in a Slurm of one node.
#
# **From a notebook**: `ipython profile create hosts --parallel`, and in its `ipcluster_config.py`
#
# ```python
# c.Cluster.engine_launcher_class = "ssh"
# c.Cluster.controller_ip = "10.0.0.1"  # where the other hosts reach this one
# c.SSHEngineSetLauncher.engines = {"10.0.0.1": 4, "10.0.0.2": 4}
# c.SSHLauncher.remote_python = "/the/same/python/there"
# ```
#
# Then `%%ranks` cells run there as they do here. What differs: a rank that dies is not replaced, its exit
# code is known on its host only, and files that a cell opens are those of its host.
# `tests/test_ranks_hosts.py` runs it over SSH between this machine and a namespace that plays a second host.
# ipyparallel has a launcher for Slurm, too, which we have not tried.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    10,
    {
        "space-time-resumed": f"{world} ranks, and {fewer} after the kill: losses within 0.1%.",
        "clip-fsdp": "Under FSDP1 each rank has another norm. Under FSDP2 `nn.utils` is right.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. How many micro-batches?** A rank has `own` samples and may compute at most `most` at once. The parts
# must be equal. Give the smallest number of parts.

# %%
def parts(own, most):
    return None  # your line here


wanted = {(12, 12): 1, (12, 5): 3, (7, 6): 7, (8, 3): 4}
lesson.check(parts, wanted)

# %% [markdown]
# **2. How many forwards?** `n` test samples, `size` at a time on each of `ranks`. How many forwards must
# every rank run, so that none waits for ever?

# %%
def forwards(n, size, ranks):
    return None  # your line here


counts = {(70, 6, 4): 3, (70, 8, 3): 3, (72, 6, 4): 3, (73, 6, 4): 4}
lesson.check(forwards, counts)

# %% [markdown]
# **3. What does a kill cost?** Saved every `every` steps, killed after step `k`, the save of the newest step
# still on its way when `pending` is true. How many steps are done again?

# %%
def again(k, every, pending):
    return None  # your line here


costs = {(27, 10, False): 7, (20, 10, True): 10, (20, 10, False): 0, (9, 10, False): 9}
lesson.check(again, costs)

# %% [markdown]
# ## Summary
#
# - A loss that is a sum over the labels of the whole batch makes ranks and accumulation steps exchangeable.
# - What follows from the number of the step (rate, samples, dropout) needs no saving, and leaves no seam.
# - Ranks must agree: on the step at which they stop, on how many batches they evaluate, on what is refused.
# - A dead rank ends the run. The checkpoint, and a start on whatever ranks there are, take it up again.

# %%
shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# [Lesson 11](11_rate_limiter.ipynb) asks how far the CPU may run ahead of the GPU.
#
# [← lesson 9](09_child_tuning.ipynb) · [lesson 11 →](11_rate_limiter.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def parts(own, most):
    return next(count for count in range(1, own + 1) if own % count == 0 and own // count <= most)


lesson.check(parts, wanted, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def forwards(n, size, ranks):
    return -(-n // (size * ranks))


lesson.check(forwards, counts, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def again(k, every, pending):
    newest = k // every * every - (every if pending and k % every == 0 else 0)
    return k - max(0, newest)


lesson.check(again, costs, strict=True)

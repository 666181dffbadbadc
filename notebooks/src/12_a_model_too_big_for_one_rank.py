# %% [markdown]
# # 12 · A model too big for one rank
#
# FSDP shards a model. But who builds the model that is sharded, and where? In most scripts every rank does,
# whole, in the memory of its host. In this lesson no rank has to: the model is built without memory, and a
# folder from the hub is read straight into shards. On the way lies a trap that makes a model wrong without
# an error.

# %% [markdown] tags=["card"]
# learn:
# - how to build a model of 405 billion parameters in this notebook, on the meta device
# - what `to_empty` leaves in buffers, and how to notice
# - the host memory of each rank for four ways to load, measured
# - what CPU offload moves out of a GPU, and what stays
# - what 7B to 405B need, from loading to the optimizer
# needs: '[lesson 3](03_full_state_dict.ipynb) · no GPU'
# ranks: '4 on this machine, on the CPU, as host memory is what is measured. 2 or 3
#   work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.notebook import ranks

ranks.start(device="cpu", preload=["transformers.models.llama.modeling_llama"])    # slow to import

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# %% [markdown]
# ## The idea
#
# A tensor on the **meta device** has a shape and a dtype, and no memory. A model that is built under
# `torch.device("meta")` is complete but for its values. So it can be built and wrapped on any machine, and
# gets memory only when it is sharded: each rank asks for its shard, and no more.
#
# Here are four Llamas, in the memory of this notebook.

# %% tags=["meta"]
import psutil


def on_meta(hidden, inner, layers, heads, kv_heads, vocabulary):
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


shapes = {                                        # as in their config.json
    "7B": (4096, 11008, 32, 32, 32, 32000),       # Llama 2
    "13B": (5120, 13824, 40, 40, 40, 32000),
    "70B": (8192, 28672, 80, 64, 8, 32000),
    "405B": (16384, 53248, 126, 128, 8, 128256),  # Llama 3.1
}
before = psutil.Process().memory_info().rss
models = {name: on_meta(*shape) for name, shape in shapes.items()}
grown_gb = (psutil.Process().memory_info().rss - before) / 1e9
numbers = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
blocks = {name: sum(p.numel() for p in model.model.layers[0].parameters()) for name, model in models.items()}
for name, number in numbers.items():
    print(f"{name:>5} {number / 1e9:7.2f} billion parameters, {4 * number / 1e9:6,.0f} GB in fp32")
assert all(p.is_meta for model in models.values() for p in model.parameters())
assert grown_gb < 0.5
del models

# %% [markdown]
# Almost two terabytes of parameters, and this process has grown by less than half a gigabyte: what Python
# needs to describe them.
#
# ## Predict
#
# A host has 8 GPUs, so it runs 8 ranks. Each loads the 70B model in fp32 before it is sharded.
#
# 1. How much memory does the host need?
# 2. How much if only rank 0 loads it, and sends it?
# 3. Can it be done with less?
#
# <details><summary>Answers</summary>
#
# 1. 70 · 4 · 8 GB: over two terabytes. That is the number in the Hugging Face blog.
# 2. An eighth: 280 GB for rank 0, and on GPUs next to nothing for the others.
# 3. Yes. Nobody needs more than its shard, and a file can be read in pieces.
#
# </details>
#
# ## A model that has learned something
#
# First a small Llama, so that we notice whether what was loaded is right. Rank 0 trains it for some steps to
# write dates as numbers, and saves it the way models lie on the hub: `config.json` and `model.safetensors`.

# %%
# %%ranks
import gc
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import shard
from fsdp_utils.lessons import tasks

transformers.utils.logging.disable_progress_bar()
rank, world = dist.get_rank(), dist.get_world_size()
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = Path(shared[0])
task = tasks.dates_llama()

# %% tags=["nbval-ignore-output"]
# %%ranks
if rank == 0:
    learner = task.build()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3)
    for step in range(40):
        learner(**task.batch(step, size=12)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learner.save_pretrained(folder / "dates")
    del learner, optimizer
dist.barrier()                                                       # the folder is there


@torch.no_grad()
def test_loss(model):
    return model(**task.test).loss.item()


expected = test_loss(LlamaForCausalLM.from_pretrained(folder / "dates"))
print(f"loss on dates that it has not seen: {expected:.1f}")

# %% [markdown]
# ## The trap
#
# Now the way that tutorials show. Build on meta, shard, `to_empty`, then load: rank 0 reads the file, and
# `broadcast_from_rank0` sends one tensor after the other, as in [lesson 3](03_full_state_dict.ipynb).
#
# `to_empty` gives memory with whatever was in it. That cannot be shown, because it is another thing each
# time. So we ask PyTorch for the mode in which it fills such memory with NaN.

# %% tags=["trap"]
# %%ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharded_on_meta(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return shard(model)                                              # fully_shard: each block, then the model


def from_one_file(name, model):
    state = load_file(folder / name / "model.safetensors") if rank == 0 else {}
    set_model_state_dict(model, state, options=from_rank_0)          # on ALL ranks


torch.use_deterministic_algorithms(True)                             # fills what is empty with NaN
model = sharded_on_meta("dates")
model.to_empty(device="cpu")
torch.use_deterministic_algorithms(False)
from_one_file("dates", model)                                        # no error: every key has come
with_nan = test_loss(model)
print(f"loss: {with_nan:.1f}, instead of {expected:.1f}")
assert with_nan != with_nan                                          # NaN

# %% [markdown]
# Every parameter is right. What is NaN?

# %%
# %%ranks
def not_saved(model):
    return [name for name, _ in model.named_buffers() if name not in model.state_dict()]


saved_nan = [name for name, t in model.state_dict().items() if t.isnan().any().item()]
other_nan = [name for name in not_saved(model) if model.get_buffer(name).isnan().any()]
print("NaN in what was saved:    ", saved_nan)
print("NaN in what was not saved:", other_nan)
assert saved_nan == []
assert other_nan == not_saved(model)

# %% [markdown]
# The frequencies of the rotary position embedding. They are a **buffer** that is registered with
# `persistent=False`: computed when the module is built, and not saved. On meta nothing was computed. No file
# holds them, no key is missing, and so nobody complains.
#
# NaN would be lucky: it is seen at once. Memory that comes fresh from the system is full of zeros.

# %% tags=["nbval-ignore-output", "zeros"]
# %%ranks
for name in not_saved(model):
    model.get_buffer(name).zero_()
with_zeros = test_loss(model)
print(f"loss: {with_zeros:.1f}, instead of {expected:.1f}")
assert with_zeros > 1.1 * expected

# %% [markdown]
# Such a model trains, and its losses look sensible. But its rotary embedding turns nothing: attention does
# not see how far apart two words are. (Only the causal mask still tells it something about their order.) The
# Distributed Training Guide, chapter 4, had this line from January to October 2025, because FSDP1 calls
# `reset_parameters()` after `to_empty`:
#
# ```python
# LlamaRotaryEmbedding.reset_parameters = lambda _: None
# ```
#
# It silences FSDP1's error for a module without `reset_parameters`. The mend is a `reset_parameters` that
# computes the buffer, as the guide has now. For a model of transformers, `_init_weights` does so:

# %%
# %%ranks
for module in model.modules():
    if any(True for _ in module.buffers(recurse=False)):
        model._init_weights(module)
print(f"loss: {test_loss(model):.1f}")
assert test_loss(model) == expected
del model

# %% [markdown]
# ## Host memory, measured
#
# Four ways to the same shards. For memory to matter the model has to be larger, though it is still a tiny
# one: random weights this time.

# %%
# %%ranks
if rank == 0:
    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, vocab_size=4096
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "larger")
dist.barrier()
whole = (folder / "larger" / "model.safetensors").stat().st_size     # bytes; the header is a few KB of it
print(f"{whole / 2**20:.0f} MiB")

# %% [markdown]
# Each way is a function that returns the sharded model. The first is what a script does that was written for
# one GPU: a whole model on each rank, filled from the file. The second is transformers' own function for it.
# The third is the way of the trap, with its buffers computed. The fourth is `load_pretrained` of
# `fsdp_utils`. It takes a model that is sharded and still on meta, and a folder as it lies on the hub, gives
# memory to this rank's shards alone, and reads into each shard its rows of the file.

# %% tags=["ways"]
# %%ranks
from fsdp_utils import load_pretrained


def compute_buffers(model):
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)


def each_rank_all(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    compute_buffers(model)
    model.load_state_dict(load_file(folder / name / "model.safetensors"))
    return shard(model)


def each_rank_from_pretrained(name):
    return shard(LlamaForCausalLM.from_pretrained(folder / name))


def rank_0_and_broadcast(name):
    model = sharded_on_meta(name)
    model.to_empty(device="cpu")
    compute_buffers(model)
    from_one_file(name, model)
    return model


def each_rank_its_part(name):
    model = sharded_on_meta(name)
    load_pretrained(folder / name, model)                            # instead of to_empty
    return model


ways = {
    "each rank, all of it": each_rank_all,
    "each rank, from_pretrained": each_rank_from_pretrained,
    "rank 0, and broadcast": rank_0_and_broadcast,
    "load_pretrained": each_rank_its_part,
}

# %% [markdown]
# A thread looks, every few milliseconds, at the memory that the system counts for this process.

# %% tags=["loading"]
# %%ranks
import ctypes


class Host:
    """Memory of this process over time, in models, above what it was at the beginning."""

    def __enter__(self):
        self.trim()
        self.before, self.began, self.curve = psutil.Process().memory_info().rss, time.perf_counter(), []
        self.over, self.thread = threading.Event(), threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def trim(self):
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)                                      # what was freed goes back to the system

    def watch(self):
        process = psutil.Process()
        while not self.over.wait(0.003):
            held = process.memory_info().rss - self.before
            self.curve.append((time.perf_counter() - self.began, held / whole))

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


curves, sums = {}, {}
for name, way in ways.items():
    dist.barrier()
    with Host() as host:
        model = way("larger")
        host.trim()
        time.sleep(0.05)                                             # a moment to see what stays
    curves[name] = host.curve
    sums[name] = [p.to_local().double().sum().item() for p in model.parameters()]
    held = sum(p.to_local().nbytes for p in model.parameters()) / whole
    biggest = max(p.numel() * 4 for p in model.parameters()) / whole
    del model
assert all(some == sums["load_pretrained"] for some in sums.values())     # the same shards
print(f"each rank holds {held:.2f} of the model in the end; the largest tensor is {biggest:.2f} of it")

# %% jupyter={"source_hidden": true}
names, curves = ranks.get("list(ways)")[0], ranks.get("curves")
world = len(curves)
peaks = {name: [max(held for _, held in of_rank[name]) for of_rank in curves] for name in names}
longest = max(curve[-1][0] for of_rank in curves for curve in of_rank.values())
fig, panels = plots.figure(len(peaks), width=9.6, height=2.7)
for axes, name in zip(panels, peaks):
    for rank in reversed(range(world)):
        seconds, held = zip(*curves[rank][name])
        axes.plot(seconds, held, color=plots.RANK_COLORS[rank], linewidth=1.8, label=f"rank {rank}")
    axes.axhline(1 / world, color=plots.INK, linestyle=":", linewidth=0.9)
    axes.axhline(1, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set(xlabel="seconds", xlim=(0, longest), ylim=(0, 2.8))
    axes.set_yticks([0, 1, 2] if axes is panels[0] else [])
    axes.set_title(name, fontsize=9)
    others = max(peaks[name][1:])
    text = f"peak {peaks[name][0]:.2f} on rank 0\n{others:.2f} on others"
    axes.text(0.04, 0.97, text, transform=axes.transAxes, va="top", fontsize=8)
panels[0].set_ylabel("memory, in models")
handles, labels = panels[0].get_legend_handles_labels()
fig.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=world, frameon=False)
plots.show(fig, alt="Host memory of each rank over time, for four ways to load the same model.")

# %% [markdown]
# Dashed: one whole model. Dotted: a shard, which is all that a rank needs in the end.
#
# - *All of it*: the model's memory and the file's, on every rank. On one host these add up.
# - `from_pretrained` of transformers 5 maps the file instead of copying it. What counts here are pages of the
#   file, and those the ranks of one host share.
# - *Rank 0*: one rank pays, and the others hold their shard and a few tensors on their way.
# - `load_pretrained`: nobody pays.

# %%
shard_share = ranks.get("held")[0]
tensor_share = ranks.get("biggest")[0]
limit = 1.3 * shard_share + tensor_share
assert min(peaks["each rank, all of it"]) > 1.5
assert peaks["rank 0, and broadcast"][0] > 1
assert max(peaks["rank 0, and broadcast"][1:]) < 0.5 + shard_share
assert all(0.9 * shard_share < peak < limit for peak in peaks["load_pretrained"])
print("load_pretrained: no rank needs more than 1.3 shards and a tensor")

# %% [markdown]
# How much of the file has a rank read? Linux counts it.

# %%
# %%ranks
if hasattr(psutil.Process, "io_counters"):
    model = sharded_on_meta("larger")
    before = psutil.Process().io_counters().read_chars
    load_pretrained(folder / "larger", model)
    read = (psutil.Process().io_counters().read_chars - before) / whole
    print(f"read {read:.2f} of the file")
    assert abs(read - 1 / world) < 0.03
    del model

# %% [markdown]
# ## What `load_pretrained` refuses
#
# It looks at all names, shapes and dtypes before it touches the model, on every rank, and all ranks raise the
# same error. Here is a model with one block less, and in another dtype.

# %%
# %%ranks
from fsdp_utils import CheckpointError


def told(call):
    try:
        call()
    except CheckpointError as error:
        print(str(error).replace(str(folder), "..."))                # the folder has another name each time


config = LlamaConfig.from_pretrained(folder / "dates")
config.num_hidden_layers = 5
with torch.device("meta"):
    other = shard(LlamaForCausalLM(config).bfloat16())
told(lambda: load_pretrained(folder / "dates", other))

# %% [markdown]
# `cast=True` converts, `ignore=["model.layers.5.*"]` leaves tensors of the file aside; both have to be said.
# A download that was cut short:

# %%
# %%ranks
if rank == 0:
    content = (folder / "dates" / "model.safetensors").read_bytes()
    (folder / "cut").mkdir()
    (folder / "cut" / "model.safetensors").write_bytes(content[:-1000])
dist.barrier()
told(lambda: load_pretrained(folder / "cut", sharded_on_meta("dates")))

# %% [markdown]
# And the trap. Llama's frequencies it computes as above. Where nothing computes a buffer it says so, instead
# of going on with what `to_empty` has left:

# %% tags=["refused"]
# %%ranks
from safetensors.torch import save_file


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("rates", 0.5 ** torch.arange(8.0), persistent=False)


if rank == 0:
    (folder / "decay").mkdir()
    save_file({"weight": torch.ones(8)}, folder / "decay" / "model.safetensors")
dist.barrier()


def decay():
    with torch.device("meta"):
        model = Decay()
    return torch.distributed.fsdp.fully_shard(model)


told(lambda: load_pretrained(folder / "decay", decay()))
Decay.reset_parameters = lambda self: None                           # the line from the guide
told(lambda: load_pretrained(folder / "decay", decay()))
Decay.reset_parameters = lambda self: self.rates.copy_(0.5 ** torch.arange(8.0))
model = decay()
load_pretrained(folder / "decay", model)
print("rates:", model.rates[:3].tolist())

# %% [markdown]
# ## CPU offload: valley and peak
#
# When even the shards do not fit, FSDP2 can keep them on the host: `CPUOffloadPolicy`. A block's shards go to
# the GPU for its all-gather, its sharded gradients come back, and the optimizer works on the CPU. What
# **stays** on the GPU are gathered blocks and activations.
#
# The Distributed Training Guide measures this by two numbers: what a GPU holds between two steps, the
# **valley**, and the most that it holds during one, the **peak**. This machine has one memory, so nothing can
# be seen to move. But we can count what would lie where. `Meter` sees each tensor that is alive; those at
# rest between two steps (shards, Adam's averages, and the gradients until somebody drops them) are the ones
# that offload puts on the host.

# %% tags=["offload"]
# %%ranks
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_utils.lessons.meter import Meter


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**task.batch(step, rank=rank, world_size=world)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / world)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return losses.tolist(), optimizer


def offloaded(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))  # pinning is for copies to a GPU
    load_pretrained(folder / name, model, device="cpu")
    return model


model = offloaded("dates")
offload_losses, optimizer = train(model)

averages = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
optimizer.zero_grad()                                                # drops the gradients of the last step
first_gradient = []                                                  # after so many operations it is there
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda _: first_gradient.append(len(meter.tensor_bytes)))
with Meter([*model.parameters(), *averages]) as meter:
    model(**task.batch(3, rank=rank, world_size=world)).loss.backward()
    optimizer.step()
kept = meter.held_bytes                                              # weights and averages
rest = kept + sum(p.grad.to_local().nbytes for p in model.parameters())
end, peak = meter.tensor_bytes[-1], meter.peak_tensor_bytes
for name, held in {"weights and averages": kept, "with gradients": rest}.items():
    print(f"{name:20} {held * world / sum(p.numel() for p in model.parameters()):.0f} bytes for a parameter")
assert (end - rest) < 0.2 * rest                                     # after a step little else is alive
assert peak > 2 * rest
assert meter.tensor_bytes.index(peak) < first_gradient[0]            # so the peak has no gradients

# %% jupyter={"source_hidden": true}
kept, rest, end, peak = ranks.get("(kept, rest, end, peak)")[0]
amounts = {
    "valley": (end, end - rest),
    "peak": (peak, peak - kept),
}
fig, panels = plots.figure(2, width=7.5, height=1.7)
for axes, (name, (off, on)) in zip(panels, amounts.items()):
    for row, nbytes in enumerate((off, on)):
        axes.barh(row, nbytes / 2**20, color=plots.RANK_COLORS[row], height=0.7)
        axes.text(nbytes / 2**20, row, f"  {nbytes / 2**20:.2f} MiB", va="center")
    axes.set(xlim=(0, 1.35 * peak / 2**20), ylim=(1.6, -0.6), xticks=[])
    axes.set_yticks(range(2), ["offload off", "offload on"] if axes is panels[0] else [])
    axes.tick_params(length=0)
    axes.set_title(f"{name}, on a GPU (counted)")
plots.show(fig, alt="Bytes on a GPU at a step's valley and peak, with and without CPU offload, counted.")

# %% [markdown]
# The valley all but vanishes. The peak goes down by less: it comes before the step's first gradient, so only
# weights and averages are there to be moved. The rest of it are mostly activations, which offload does not
# touch. [Lesson 2](02_activation_checkpointing.ipynb) does.
#
# The guide has measured a valley of 8 GB and a peak of 74 GB without offload, and 1.4 GB and 68.7 GB with it,
# for 7B on 8 GPUs. Does that fit?
# In bf16 throughout, weights and two averages are 6 bytes for each parameter, and gradients 2 more:

# %% tags=["guide"]
valley_gb, peak_gb = (each * numbers["7B"] / 8 / 1e9 for each in (8, 6))    # bytes each, over 8 ranks
print(f"calculated: the valley shrinks by {valley_gb:.1f} GB, the peak by {peak_gb:.1f} GB")
print(f"the guide's valley shrank by {8 - 1.4:.1f} GB, its peak by {74 - 68.7:.1f} GB")
assert abs(valley_gb - (8 - 1.4)) < 0.5                              # 8 and 74 are rounded to 1 GB
assert abs(peak_gb - (74 - 68.7)) < 0.5

# %% [markdown]
# Both do, as far as one can tell: the guide's 8 and 74 are rounded to 1 GB, so that each of its differences
# may be off by 0.5 GB. What this machine cannot show is the price:
# every shard crosses the bus for each all-gather, every gradient on its way back, and Adam runs at the speed
# of the host's memory.
#
# ## What 7B to 405B need
#
# Without offload, each rank holds at rest its part of four things: weights, gradients and Adam's two
# averages. With weights in fp32 and bf16 for computation, as in [lesson 7](07_mixed_precision.ipynb), these
# are 16 bytes for each parameter. While it computes, gathered blocks in bf16 come on top. With FSDP2 the most
# of them is in the forward pass, and takes as many bytes as three blocks: the parameters of the block in use,
# and two buffers of all-gathers ([lesson 4](04_backward_prefetch.ipynb)). First the formula against the small
# model:

# %% tags=["formula"]
def rank_gb(parameters, block, ranks, weight=4, gradient=4, optimizer=8, compute=2):
    """At rest, and gathered on top, in GB. Without activations, and without what lies outside of blocks."""
    return parameters * (weight + gradient + optimizer) / ranks / 1e9, 3 * block * compute / 1e9


# %%
# %%ranks
at_rest = [*model.parameters(), *(p.grad for p in model.parameters()), *averages]
with Meter(at_rest) as meter:
    model(**task.batch(4, rank=rank, world_size=world)).loss.backward()
outside = sum(p.numel() for name, p in model.named_parameters() if ".layers." not in name)
block = sum(p.numel() for p in model.model.layers[0].parameters())
measured = meter.held_bytes, meter.peak_gather_bytes - 4 * outside   # the root's own stay gathered
parameters = sum(p.numel() for p in model.parameters())

# %%
parameters, block = ranks.get("(parameters, block)")[0]
rest_gb, gathered_gb = rank_gb(parameters, block, world, compute=4)  # the small model computes in fp32
for rest, whole in ranks.get("measured"):
    assert abs(rest / 1e9 / rest_gb - 1) < 0.05                      # rows do not divide evenly by 3
    assert abs(whole / 1e9 / gathered_gb - 1) < 0.05
print(f"by the formula {rest_gb * 1e6:,.0f} kB at rest and {gathered_gb * 1e6:,.0f} kB gathered: within 5%")

# %%
from fsdp_utils.planner import GPUS

for name, number in numbers.items():
    texts = []
    for count in (8, 64, 512):
        rest, gathered = rank_gb(number, blocks[name], count)
        texts.append(f"{rest:6.1f} + {gathered:4.1f} GB on {count:3}")
    print(f"{name:>5}  {'   '.join(texts)}")
H100, H200 = (GPUS[name].usable_gib * 2**30 / 1e9 for name in ("H100", "H200"))  # GB that CUDA offers
assert rank_gb(numbers["405B"], blocks["405B"], 8)[0] > H200         # not on 8 H200
assert sum(rank_gb(numbers["405B"], blocks["405B"], 64)) < H200

# %% jupyter={"source_hidden": true}
fig, (axes,) = plots.figure(width=7.5, height=2.8)
for column, count in enumerate((8, 64, 512)):
    for row, name in enumerate(numbers):
        rest, gathered = rank_gb(numbers[name], blocks[name], count)
        color, label = plots.RANK_COLORS[column], f"{count} ranks" if row == 0 else None
        axes.plot(rest + gathered, row, "o", markersize=9, color=color, label=label)
        axes.text(
            rest + gathered, row - 0.28, f"{rest + gathered:,.0f}", ha="center", va="center", fontsize=8,
            bbox={"facecolor": plots.CARD, "linewidth": 0, "pad": 0.4},
        )
for gb, text, side in ((H100, 'H100 of "80 GB": ', "right"), (H200, 'H200 of "141 GB": ', "left")):
    axes.axvline(gb, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.text(gb, 3.75, f" {text}{gb:.0f} ", ha=side, fontsize=8)
axes.set_yticks(range(len(numbers)), list(numbers))
axes.set(xscale="log", xlabel="GB on each rank, on a log scale", xlim=(0.2, 3000), ylim=(4, -0.7))
axes.set_title("weights, gradients, Adam, gathered blocks: calculated")
fig.legend(loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="GB that each rank needs without activations, for 7B to 405B on 8, 64 and 512 ranks.")

# %% [markdown]
# These are lower bounds: activations come on top, the full gradients of a block before they are reduced, and
# what lies outside of the blocks. [Lesson
# 14](14_plan_before_you_rent.ipynb) simulates them too. And loading? A host with 8 ranks, in fp32:

# %% tags=["need"]
host_gb = {name: 4 * number / 1e9 for name, number in numbers.items()}     # the model, once
for name, gb in host_gb.items():
    print(f"{name:>5}  each rank, all of it {8 * gb:7,.0f} GB   rank 0 and broadcast {gb:5,.0f} GB")
assert abs(8 * host_gb["70B"] / (8 * 4 * 70) - 1) < 0.02             # the Hugging Face blog's 70 * 4 * 8

# %% [markdown]
# With `load_pretrained` onto GPUs there is no third column: each rank reads through a buffer of 16 MiB, or of
# one row of a tensor if that is larger. If the shards stay on the host, as with CPU offload, all ranks
# together hold the model once.
#
# ## Proof
#
# Two steps of training on the small model, after each way to load it: against one process that has the
# whole model, and the whole batch.

# %% tags=["nbval-ignore-output", "equality"]
# %%ranks
whole_losses = [None] * 2
if rank == 0:
    alone = LlamaForCausalLM.from_pretrained(folder / "dates")
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        loss = alone(**task.batch(step)).loss
        loss.backward()
        optimizer.step()
        whole_losses[step] = loss.item()
dist.broadcast_object_list(whole_losses, src=0)

losses = {name: train(way("dates"))[0] for name, way in ways.items()}
losses["load_pretrained, CPU offload"] = offload_losses
for name, some in {**losses, "one process": whole_losses}.items():
    print(f"{name:28} step 1: {some[0]:.2f}   step 2: {some[1]:.2f}")
    assert some == losses["load_pretrained"] or name == "one process"
torch.testing.assert_close(losses["load_pretrained"], whole_losses, rtol=1e-3, atol=1e-3)

# %% [markdown]
# The five sharded runs are equal to the last bit, and one process agrees within the order of additions.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    12,
    {
        "all-ranks-2tb": f"Calculated: {8 * host_gb['70B'] / 1000:.1f} TB for 70B. Measured on a small one: "
        "more than the whole of it on every rank.",
        "rank-0-peak": "Rank 0 held more than the whole model, the others less than half of it above their "
        f"shard. 7B in fp32 are {4 * numbers['7B'] / 1e9:.0f} GB, so 1506 MB "
        "are hardly more than a process with PyTorch.",
        "monolith-rank-0": "As with rank 0 and a broadcast above: rank 0 holds the whole, the others do not. "
        "With `load_pretrained` none does.",
        "reset-nothing": "Rotary frequencies uninitialised: no error. The loss is NaN, or at least a tenth "
        "too high where the memory is zeros.",
        "offload-valley": f"Calculated for bf16: the valley shrinks by {valley_gb:.1f} GB, the guide's by "
        f"6.6 GB; the peak by {peak_gb:.1f} GB, the guide's by 5.3 GB. Counted on a small model: the peak "
        "has no gradients to move, and activations stay.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. The host.** A host runs `ranks` ranks that load a model of `billions` parameters with `nbytes` each.
# How many GB does it need if each rank loads all of it, and if rank 0 alone does? As a pair.

# %%
def host_needs(billions, nbytes, ranks):
    return None  # your line here


hosts = {(70, 4, 8): (2240, 280), (7, 2, 8): (112, 14), (405, 2, 4): (3240, 810)}
lesson.check(host_needs, hosts)

# %% [markdown]
# **2. Which rows?** FSDP2 cuts a tensor along its rows like `torch.chunk`: all parts have the same number of
# rows, rounded up, and the last ones what is left. At which row does the part of `rank` begin, and how many
# rows has it? `load_pretrained` reads just these.

# %%
def rows_of(rows, ranks, rank):
    return None  # your lines here


parts = {(8, 4, 1): (2, 2), (10, 4, 2): (6, 3), (10, 4, 3): (9, 1), (5, 4, 3): (5, 0)}
lesson.check(rows_of, parts)

# %% [markdown]
# **3. What no file holds.** Write `unsaved`: the names of a model's buffers that are not in its state dict.
# Buffers are saved by default, such as BatchNorm's running mean; with `persistent=False` they are not. The
# function is called with a Llama on meta that also has a BatchNorm.

# %%
def unsaved(model):
    return None  # your line here


example = on_meta(64, 128, 1, 4, 4, 32)
example.norm = torch.nn.BatchNorm1d(8, device="meta")
names = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
lesson.check(unsaved(example), names)

# %% [markdown]
# ## Summary
#
# - On the meta device a model of any size can be built and wrapped. It has no values, buffers included.
# - `to_empty` leaves anything in them. Parameters are loaded; buffers that are not saved have to be computed.
# - Loading on every rank takes the model once per rank. Rank 0 and a broadcast take it once.
# - `load_pretrained` reads a folder of safetensors straight into shards: each rank its part, and no more.
# - CPU offload takes what is at rest out of the GPU. Gathered blocks and activations stay.
# - 16 bytes for each parameter, over all ranks, is where planning begins.

# %%
# %%ranks
import shutil

dist.barrier()
if rank == 0:
    shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# Most of these lessons show FSDP1 beside FSDP2. [Lesson 13](13_from_fsdp1_to_fsdp2.ipynb) moves a whole
# project from the one to the other. How sharded training is saved is
# [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# [← lesson 11](11_rate_limiter.ipynb) · [lesson 13 →](13_from_fsdp1_to_fsdp2.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def host_needs(billions, nbytes, ranks):
    return billions * nbytes * ranks, billions * nbytes


lesson.check(host_needs, hosts, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def rows_of(rows, ranks, rank):
    size = -(-rows // ranks)
    start = min(size * rank, rows)
    return start, min(size, rows - start)


lesson.check(rows_of, parts, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def unsaved(model):
    return [name for name, _ in model.named_buffers() if name not in model.state_dict()]


lesson.check(unsaved(example), names, strict=True)

# %% [markdown]
# # 12 · A model too big for one rank
#
# FSDP shards a model. But who builds the model that is sharded, and where? In many scripts every rank builds
# all of it, in the memory of its host. In this lesson no rank does: the model is built without memory, and a
# folder from the Hugging Face hub is read straight into shards. On the way lies a trap that makes a model
# wrong without an error. The end of the lesson asks what to do when even the shards do not fit.

# %% [markdown] tags=["card"]
# learn:
# - how to build a model of 405 billion parameters in this notebook, on the meta device
# - what `to_empty` leaves in buffers, how to notice, and how to mend it
# - the host memory of each rank for four ways to load, measured
# - how to move a checkpoint from rank 0 to all shards, one tensor at a time
# - which of 7B to 405B fit on how many GPUs, and what CPU offload moves out of a GPU
# needs: '[lesson 3](03_full_state_dict.ipynb) · no GPU'
# ranks: '4 on this machine, on the CPU, as host memory is what is measured. 2 or 3
#   work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read

# %% [markdown]
# **The question of this lesson:** a model does not fit into the memory of one rank. How do its shards get
# their values?

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn
from fsdp_utils.notebook import ranks

HELD = {
    "each rank loads all of it": [4, 4, 4, 4],
    "rank 0 loads, then sends": [4, 0, 0, 0],
    "each rank reads its part": [0, 0, 0, 0],
}
fig, panels = plots.figure(len(HELD), width=9.4, height=2.1)
for axes, (title, pieces) in zip(panels, HELD.items()):
    for r, loaded in enumerate(pieces):
        for piece in range(4):
            color = plots.RANK_COLORS[piece] if loaded or piece == r else plots.FAINT
            axes.add_patch(Rectangle((1.15 * r, 3 - piece), 0.95, 0.9, color=color))
        axes.text(1.15 * r + 0.47, -0.5, f"rank {r}", ha="center", fontsize=8)
    axes.set(title=title, xlim=(-0.1, 4.6), ylim=(-0.8, 4.1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="What each of four ranks holds while it loads, for three ways to load a model.")

# %% [markdown]
# The drawing shows what four ranks hold while a model is loaded. A column is a rank, and each colour is one
# quarter of the model. In the end each rank needs only its own quarter. In the first way every rank holds
# everything for a while, in the second way rank 0 does, and in the third way nobody does.
#
# ## In your own code
#
# This script loads a checkpoint that only rank 0 can see. Save it as `train.py`, and start it with
# `torchrun --nproc-per-node 4 train.py`. Every word in its comments is explained below.
#
# ```python
# from pathlib import Path
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# build = lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
# file = Path(__file__).with_name("model.pt")
# if dist.get_rank() == 0:
#     torch.save(build().state_dict(), file)            # stands for the checkpoint that you have
# with torch.device("meta"):
#     model = build()                                   # shapes, and no memory
# for part in [*model, model]:
#     fully_shard(part, mesh=mesh)
# model.to_empty(device=device)                         # memory for this rank's shards, and no values
# state = torch.load(file, mmap=True) if dist.get_rank() == 0 else {}
# options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# set_model_state_dict(model, state, options=options)   # on ALL ranks; buffers that no file holds: see below
# dist.destroy_process_group()
# ```
#
# `mmap=True` maps the file instead of reading it, so rank 0 loads a tensor when it is needed. For a folder of
# safetensors that every rank can see, `load_pretrained` of `fsdp_utils` does without rank 0; it is measured
# below.
#
# ## How much host memory?
#
# **Predict before you go on.** A host has 8 GPUs, so it runs 8 ranks. Each loads the 70B model in fp32 before
# the model is sharded.
#
# 1. How much memory does the host need?
# 2. How much if only rank 0 loads the model, and sends it?
# 3. Can it be done with less?
#
# <details><summary>Answers</summary>
#
# 1. 70 · 4 · 8 GB: over two terabytes. That is the number in the Hugging Face blog.
# 2. An eighth: 280 GB for rank 0. The shards are on the GPUs.
# 3. Yes. No rank needs more than its shards, and a file can be read in pieces.
#
# </details>

# %%
ranks.start(device="cpu", preload=["transformers.models.llama.modeling_llama"])    # slow to import

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# %% [markdown]
# ## The meta device
#
# A tensor on the **meta device** has a shape and a dtype, and no memory. A model that is built under
# `torch.device("meta")` is complete except for its values. So it can be built and sharded on any machine, and
# gets memory only afterwards: each rank asks for the memory of its shards alone.
#
# Here are four Llamas, in the memory of this notebook.

# %%
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


# %% tags=["meta"]
import psutil

shapes = {                                        # as in their config.json
    "7B": (4096, 11008, 32, 32, 32, 32000),       # Llama 2
    "13B": (5120, 13824, 40, 40, 40, 32000),
    "70B": (8192, 28672, 80, 64, 8, 32000),
    "405B": (16384, 53248, 126, 128, 8, 128256),  # Llama 3.1
}
before = psutil.Process().memory_info().rss
models = {name: on_meta(*shape) for name, shape in shapes.items()}
grown_gb = (psutil.Process().memory_info().rss - before) / 1e9

# %% tags=["need"] jupyter={"source_hidden": true}
numbers = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
blocks = {name: sum(p.numel() for p in model.model.layers[0].parameters()) for name, model in models.items()}
host_gb = {name: 4 * number / 1e9 for name, number in numbers.items()}     # the model in fp32, once
Table(
    ["Llama", "billions of parameters", "GB in fp32", "GB, if each of 8 ranks loads it"],
    [[name, f"{numbers[name] / 1e9:.2f}", round(gb), round(8 * gb)] for name, gb in host_gb.items()],
)

# %% [markdown]
# These models are almost two terabytes of parameters together. This process has grown by less than half a
# gigabyte: the memory that Python needs to describe them. The last column answers the first question above:
# what a host with 8 ranks needs if every rank loads the complete model.

# %% tags=["check"]
assert all(p.is_meta for model in models.values() for p in model.parameters())
assert grown_gb < 0.5
assert 1.9e12 < 4 * sum(numbers.values()) < 2e12
assert abs(8 * host_gb["70B"] / (8 * 4 * 70) - 1) < 0.02             # the Hugging Face blog's 70 * 4 * 8
del models
print("Checked: almost 2 TB of parameters on meta, less than half a gigabyte of memory.")

# %% [markdown]
# ## A model that has learned something
#
# First a small Llama, so that we notice whether what was loaded is right. A folded cell lets rank 0 train it
# for 40 steps to write dates as numbers, and saves it as models are stored on the hub: `config.json` and
# `model.safetensors`.

# %% jupyter={"source_hidden": true}
# %%ranks
import ctypes
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import CheckpointError, load_pretrained, shard
from fsdp_utils.lessons import tasks
from fsdp_utils.lessons.meter import Meter

transformers.utils.logging.disable_progress_bar()
rank, world = dist.get_rank(), dist.get_world_size()
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = Path(shared[0])
task = tasks.dates_llama()

# %% jupyter={"source_hidden": true}
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

# %% tags=["nbval-ignore-output"]
# %%ranks
@torch.no_grad()
def test_loss(model):
    return model(**task.test).loss.item()


right = LlamaForCausalLM.from_pretrained(folder / "dates")
expected = test_loss(right)
print(f"loss on dates that it has not seen: {expected:.1f}")

# %% [markdown]
# ## The trap
#
# Now the way that tutorials show. Build on meta, shard, and call `to_empty`, which gives memory to all that
# is on meta: the shards, and whatever else the model holds. Then load: rank 0 reads the file, and
# `broadcast_from_rank0` sends one tensor after the other, as in [lesson 3](03_full_state_dict.ipynb).
# (`shard` of `fsdp_utils` calls `fully_shard` on each block, then on the model.)

# %%
# %%ranks
def sharded_on_meta(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return shard(model)


def from_one_file(name, model):
    state = load_file(folder / name / "model.safetensors") if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)              # on ALL ranks


# %% [markdown]
# `to_empty` gives memory with whatever was in it, which is different each time. To make it visible, we ask
# PyTorch for the mode in which it fills such memory with NaN.

# %% tags=["trap"]
# %%ranks
torch.use_deterministic_algorithms(True)                             # fills empty memory with NaN
model = sharded_on_meta("dates")
model.to_empty(device="cpu")
torch.use_deterministic_algorithms(False)
from_one_file("dates", model)                                        # no error: every key was there
with_nan = test_loss(model)

# %% [markdown]
# Nothing complains. Which tensors of the model hold NaN now? A model has parameters and **buffers**: tensors
# that are not trained. A buffer that is registered with `persistent=False` is not saved.

# %%
# %%ranks
def not_saved(model):
    return [name for name, _ in model.named_buffers() if name not in model.state_dict()]


saved_nan = [name for name, t in model.state_dict().items() if t.isnan().any().item()]
other_nan = [name for name in not_saved(model) if model.get_buffer(name).isnan().any()]
print(f"NaN in {len(saved_nan)} tensors that were saved, and in these that were not: {', '.join(other_nan)}")

# %% [markdown]
# Every parameter is loaded. What is NaN are the frequencies of the rotary position embedding, and so is the
# loss. The frequencies are computed when the module is built, and not saved. On meta nothing was computed. No
# file holds them, so no key is missing.
#
# NaN would be lucky, because it is seen at once. Memory that comes fresh from the operating system is full of
# zeros. What if the frequencies are zeros?

# %% tags=["zeros"]
# %%ranks
for name in not_saved(model):
    model.get_buffer(name).zero_()
with_zeros = test_loss(model)

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
expected, with_zeros = ranks.get("(expected, with_zeros)")[0]
Table(
    ["the buffers that were not saved", "loss"],
    [["computed", f"{expected:.1f}"], ["NaN", "NaN"], ["zeros", f"{with_zeros:.1f}"]],
)

# %% [markdown]
# With zeros the loss is a number, and looks sensible if you do not know the right one. But the rotary
# embedding turns nothing: attention does not see how far apart two words are. (Only the causal mask still
# tells it something about their order.)
#
# The Distributed Training Guide, chapter 4, had this line from January to October 2025, because FSDP1 calls
# `reset_parameters()` after `to_empty`:
#
# ```python
# LlamaRotaryEmbedding.reset_parameters = lambda _: None
# ```
#
# It silences FSDP1's error for a module without `reset_parameters`, and leaves the buffer as `to_empty` made
# it. What the method has to do is compute the buffer, as the guide's does now.

# %% tags=["check"]
# %%ranks
assert with_nan != with_nan                                          # NaN
assert saved_nan == []
assert other_nan == not_saved(model) != []
assert with_zeros > 1.1 * expected
print("Checked: NaN in all buffers that are not saved, and only there; zeros: a loss more than 10% too high.")

# %% [markdown]
# ## Your turn 1 · Compute what no file holds
#
# A model of transformers can compute the initial values of one of its modules:
# `model._init_weights(module)` sets the parameters and buffers that belong to this module itself. Write a
# function that mends a model *after* it was loaded. It should compute the buffers that were not saved, and
# leave everything that was loaded as it is.
#
# A folded cell calls it on the model above, with two modules more: another rotary embedding, and a
# `BatchNorm1d`, whose running mean is a buffer that *is* saved. Edit the next cell, then run it and the
# folded cells below it.
#
# <details><summary>Hint</summary>
#
# `not_saved(model)` gives names such as `model.rotary_emb.inv_freq`. `model.get_submodule("a.b")` gives the
# module of that name, and `name.rpartition(".")[0]` is the name without its last part.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_mend(model):
    pass                                        # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
def here(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_any_rank(happened):
    """True on all ranks if it has happened on one of them."""
    flag = torch.tensor(float(bool(happened)))
    dist.all_reduce(flag)
    return bool(flag)


def with_extras(model):
    """The model with a second rotary embedding, and with a BatchNorm whose running mean was loaded."""
    model.second_rotary = type(model.model.rotary_emb)(model.config)
    model.statistics = nn.BatchNorm1d(8)
    model.statistics.running_mean.fill_(3.0)
    return model


def score_mend(mend):
    """Load as in the trap, mend, and compare; None where nothing was done."""
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    from_one_file("dates", model)
    model, reference = with_extras(model), with_extras(LlamaForCausalLM.from_pretrained(folder / "dates"))
    for name in not_saved(model):
        model.get_buffer(name).zero_()
    before = {name: here(tensor).clone() for name, tensor in model.state_dict().items()}
    raised = False
    try:
        with torch.no_grad():
            mend(model)
    except Exception as error:                  # the reader's own code: whatever it raises
        print(f"my_mend raises {type(error).__name__}: {error}")
        raised = True
    changed = sum(not torch.equal(here(t), before[name]) for name, t in model.state_dict().items())
    buffers = not_saved(reference)
    wrong = sum(not torch.equal(model.get_buffer(name), reference.get_buffer(name)) for name in buffers)
    mended = changed > 0 or any(model.get_buffer(name).any().item() for name in buffers)
    written = bool(mend.__code__.co_names)      # the empty stub uses no name
    if on_any_rank(raised) or not on_any_rank(mended or written):
        return None
    return {
        "buffers with wrong values, of those not saved": wrong,
        "loaded tensors that have changed": changed,
        "the loss is the expected one": abs(test_loss(model) - expected) < 1e-3,
    }


result = score_mend(my_mend)

# %% jupyter={"source_hidden": true}
turn(
    1,
    ranks.get("result"),
    {
        "buffers with wrong values, of those not saved": exactly(
            0,
            otherwise="Some buffers were not computed: every rank should call _init_weights with each module "
            "(the module, not its name) that holds a buffer of not_saved(model).",
        ),
        "loaded tensors that have changed": exactly(
            0,
            otherwise="What was loaded is gone: _init_weights also resets parameters and saved buffers. Call "
            "it only for modules that hold a buffer of not_saved(model).",
        ),
        "the loss is the expected one": exactly(True, otherwise="The loss is not that of the saved model."),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_mend(model):
    for name in not_saved(model):
        module = model.get_submodule(name.rpartition(".")[0])
        model._init_weights(module)


result = score_mend(my_mend)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # all modules
    for module in model.modules():
        model._init_weights(module)


result = score_mend(my_mend)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # all modules with buffers, saved ones too
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)


result = score_mend(my_mend)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # one module by its name
    model._init_weights(model.model.rotary_emb)


result = score_mend(my_mend)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # any number but zero
    for name in not_saved(model):
        model.get_buffer(name).fill_(1.0)


result = score_mend(my_mend)

# %% [markdown]
# It is safer to compute buffers *before* loading, while there is nothing to lose: then a module that has both
# parameters and such a buffer may be reset as a whole. `load_pretrained` computes them too, and refuses a
# model with a buffer that it cannot compute.
#
# ## Host memory, measured
#
# Four ways to the same shards. For memory to matter the model has to be larger; this one has random weights.

# %% jupyter={"source_hidden": true}
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
# Each way is a function that returns the sharded model. The first two are what a script does that was written
# for one GPU: a complete model on each rank, filled from the file, or by transformers' own function for it.

# %%
# %%ranks
def compute_buffers(model):                                          # before loading, so nothing is lost
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


# %% [markdown]
# The third is the way of the trap, with its buffers computed. The fourth is `load_pretrained` of
# `fsdp_utils`. It takes a model that is sharded and still on meta, and a folder of safetensors. It gives
# memory to this rank's shards alone, and reads from the file the rows that belong to them.

# %% tags=["ways"]
# %%ranks
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
# A folded cell runs the four. Meanwhile a thread looks, every few milliseconds, at the memory that the system
# counts for this process. Some of it may be pages of a file that is **mapped** into memory. The ranks of a
# host share such pages, and the system drops them when memory is short. The rest is the rank's **own**.

# %% tags=["loading"] jupyter={"source_hidden": true}
# %%ranks
class Host:
    """Memory of this process over time, in models, above what it was: all of it, and its own."""

    def __enter__(self):
        self.trim()
        self.before, self.began, self.curve = self.held(), time.perf_counter(), []
        try:
            Path("/proc/self/clear_refs").write_text("5")            # Linux: forget the highest value so far
            self.kept_by_system = True
        except OSError:
            self.kept_by_system = False
        self.over, self.thread = threading.Event(), threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def trim(self):
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)                                      # what was freed goes back to the system

    def held(self):
        counted = psutil.Process().memory_info()
        return counted.rss, counted.rss - getattr(counted, "shared", 0)     # shared: pages of files, on Linux

    def watch(self):
        while not self.over.wait(0.003):
            held = [(now - before) / whole for now, before in zip(self.held(), self.before)]
            self.curve.append((time.perf_counter() - self.began, *held))

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.peak, self.own_peak = (max(column) for column in list(zip(*self.curve))[1:])
        if self.kept_by_system:
            status = Path("/proc/self/status").read_text().split()
            self.peak = (1024 * int(status[status.index("VmHWM:") + 1]) - self.before[0]) / whole


curves, peaks, own_peaks, sums = {}, {}, {}, {}
for name, way in ways.items():
    dist.barrier()
    with Host() as host:
        model = way("larger")
        host.trim()
        time.sleep(0.05)                                             # a moment to see what stays
    curves[name], peaks[name], own_peaks[name] = host.curve, host.peak, host.own_peak
    sums[name] = [p.to_local().double().sum().item() for p in model.parameters()]
    held = sum(p.to_local().nbytes for p in model.parameters()) / whole
    biggest = max(p.numel() * 4 for p in model.parameters()) / whole
    del model

# %% jupyter={"source_hidden": true}
names, curves = ranks.get("list(ways)")[0], ranks.get("curves")
world = len(curves)
peaks = {name: [of_rank[name] for of_rank in ranks.get("peaks")] for name in names}
own_peaks = {name: [of_rank[name] for of_rank in ranks.get("own_peaks")] for name in names}
longest = max(curve[-1][0] for of_rank in curves for curve in of_rank.values())
fig, panels = plots.figure(len(peaks), width=9.6, height=2.7)
for axes, name in zip(panels, peaks):
    for rank in reversed(range(world)):
        seconds, held, own = zip(*curves[rank][name])
        color = plots.RANK_COLORS[rank]
        axes.plot(seconds, held, color=color, linewidth=0.9, alpha=0.6)
        axes.plot(seconds, own, color=color, linewidth=2.0, label=f"rank {rank}")
    axes.axhline(1 / world, color=plots.INK, linestyle=":", linewidth=0.9)
    axes.axhline(1, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set(xlabel="seconds", xlim=(0, longest), ylim=(0, 2.8))
    axes.set_yticks([0, 1, 2] if axes is panels[0] else [])
    axes.set_title(name, fontsize=9)
    rank_0, others = own_peaks[name][0], max(own_peaks[name][1:])
    text = f"own: {rank_0:.2f} on rank 0,\n{others:.2f} on others"
    axes.text(0.04, 0.97, text, transform=axes.transAxes, va="top", fontsize=8)
panels[0].set_ylabel("memory, in models")
handles, labels = panels[0].get_legend_handles_labels()
fig.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=world, frameon=False)
plots.show(fig, alt="Host memory of each rank over time, for four ways to load the same model.")

# %% [markdown]
# A thick line is a rank's own memory; a thin one is what the system counts, with the pages of the file.
# Dashed is one complete model. Dotted is a shard, which is all that a rank needs in the end.
#
# - *All of it*: every rank owns a complete model. On one host these add up. The pages of the file come on
#   top, because safetensors maps it.
# - `from_pretrained` of transformers 5 uses the mapped file as the model's parameters, so a rank owns no
#   complete model.
# - *Rank 0*: rank 0 goes through the complete file, in mapped pages. The others hold their shards and a few
#   tensors on their way.
# - `load_pretrained`: no rank holds more than its shards and a buffer, of either kind.
#
# So a file that is mapped costs a rank little of its own memory. A checkpoint that is not mapped
# (`torch.load` without `mmap=True`) or has to be converted costs a complete model on each rank that reads it;
# in turn 2 you avoid that.
#
# How much of the file has a rank read? Linux counts it.

# %%
# %%ranks
read = None
if hasattr(psutil.Process, "io_counters"):
    model = sharded_on_meta("larger")
    before = psutil.Process().io_counters().read_chars
    load_pretrained(folder / "larger", model)
    read = (psutil.Process().io_counters().read_chars - before) / whole
    print(f"read by load_pretrained: {read:.2f} of the file")
    del model

# %% [markdown]
# Each rank has read its part of the file, and hardly more. The memory it reads through holds 16 MiB, or one
# row of a tensor if that is larger. So onto GPUs, `load_pretrained` takes a host hardly any memory, whatever
# the size of the model.

# %% tags=["check"]
shares = [share for share in ranks.get("read") if share is not None]
shard_share, tensor_share = ranks.get("held")[0], ranks.get("biggest")[0]
limit = 1.3 * shard_share + tensor_share
assert min(peaks["each rank, all of it"]) > 1.5
assert min(own_peaks["each rank, all of it"]) > 0.9
if shares:                                                           # Linux counts pages of files apart
    assert max(own_peaks["each rank, from_pretrained"]) < limit
    assert max(own_peaks["rank 0, and broadcast"]) < 0.5 + shard_share
assert peaks["rank 0, and broadcast"][0] > 1
assert max(peaks["rank 0, and broadcast"][1:]) < 0.5 + shard_share
assert all(0.9 * shard_share < peak < limit for peak in peaks["load_pretrained"])
assert all(all(some == sums["load_pretrained"] for some in sums.values()) for sums in ranks.get("sums"))
assert all(abs(share - 1 / world) < 0.03 for share in shares)
print("Checked: the same shards in all ways; load_pretrained needs at most 1.3 shards and a tensor.")

# %% [markdown]
# ## Your turn 2 · From rank 0, one tensor at a time
#
# Sometimes only rank 0 can see the checkpoint: it lies on that host's disk, or must be converted first. Write
# a load in which *no* rank holds more than a few tensors besides its shards, rank 0 included.
#
# Your function gets a sharded model that has memory and no values, and `read(name)`, which reads one tensor
# from the file. Only rank 0 may call `read`. A parameter of the model is a DTensor: `parameter.shape` is the
# shape of the complete tensor, and `parameter.to_local()` is this rank's shard, which you can fill with
# `copy_`. `fully_shard` cuts by rows, as `tensor.chunk(world)` does. Autograd is switched off.
#
# A folded cell counts the bytes of all tensors that are alive on each rank while your function runs, besides
# the shards. The model is the small Llama again, whose largest tensor is 4% of it. The target is at most a
# quarter of the model. Edit the next cell, then run it and the folded cells below it.
#
# <details><summary>Hint</summary>
#
# Every rank goes through `model.named_parameters()` in the same order. For each parameter rank 0 has the
# complete tensor and the others have an empty one, `torch.empty(parameter.shape)`. (`empty_like(parameter)`
# would be a DTensor again, and `dist.broadcast` refuses those.) `dist.broadcast(tensor, src=0)` fills it on
# all ranks.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_load(model, read):
    pass                                        # your lines here


# %% jupyter={"source_hidden": true}
# %%ranks
model_bytes = sum(p.nbytes for p in right.parameters())
reference = [p.to_local().detach().clone() for p in each_rank_its_part("dates").parameters()]


def score_load(load):
    """Load by the reader's function under a meter; None where nothing was loaded."""
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    shards = [p.to_local().detach().fill_(-7.0) for p in model.parameters()]
    reads = []

    def read(name):
        reads.append(name)
        with _disable_current_modes(), safe_open(folder / "dates" / "model.safetensors", "pt") as file:
            tensor = file.get_tensor(name)
        return tensor.clone()                   # under the meter, so that it counts

    with Meter(model.parameters()) as meter, torch.no_grad():
        load(model, read)                       # if it raises, the ranks end the others' waiting
    if not on_any_rank(reads or any((shard != -7.0).any().item() for shard in shards)):
        return None
    curve = [100 * (nbytes - meter.held_bytes) / model_bytes for nbytes in meter.tensor_bytes]
    shards = [p.to_local() for p in model.parameters()]
    return {
        "parameters with wrong values": sum(not torch.equal(a, b) for a, b in zip(shards, reference)),
        "held besides the shards, % of the model": round(max(curve, default=0)),
        "reads on ranks other than 0": len(reads) if rank > 0 else 0,
        "curve": curve[:: len(curve) // 400 + 1],
    }


result = None
result = score_load(my_load)

# %% jupyter={"source_hidden": true}
turn(
    2,
    ranks.get("result"),
    {
        "parameters with wrong values": exactly(
            0, otherwise="Some shards hold other values than their rows of the file: which rows are a rank's?"
        ),
        "held besides the shards, % of the model": at_most(
            25, otherwise="A rank holds many tensors at once: read, send and let go of one before the next."
        ),
        "reads on ranks other than 0": exactly(
            0, otherwise="Only rank 0 sees the file here; the others must get the tensors from rank 0."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def my_load(model, read):
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full.chunk(world)[rank])


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # rank 0 reads everything first
    names = [name for name, _ in model.named_parameters()]
    state = {name: read(name) for name in names} if rank == 0 else {}
    for name, parameter in model.named_parameters():
        full = state[name] if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full.chunk(world)[rank])


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # a full state dict on rank 0
    state = {name: read(name) for name, _ in model.named_parameters()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # sends everything, then fills the shards
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(state[name], src=0)
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(state[name].chunk(world)[rank])


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # each rank reads for itself
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(read(name).chunk(world)[rank])


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # the first rows on every rank
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full[: len(parameter.to_local())])


result = score_load(my_load)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # fills rank 0's shards alone
    for name, parameter in model.named_parameters():
        if rank == 0:
            parameter.to_local().copy_(read(name).chunk(world)[0])


result = score_load(my_load)

# %% tags=["check"]
try_answers(12)

# %% jupyter={"source_hidden": true}
# %%ranks
def everything_first(model, read):
    state = {name: read(name) for name, _ in model.named_parameters()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


all_at_once = score_load(everything_first)

# %% jupyter={"source_hidden": true}
curves = {
    "a state dict on rank 0": ranks.get("all_at_once['curve']"),
    "target": [by_rank["curve"] for by_rank in run_solution(12, 2)],
}
if ranks.get("result is not None")[0]:
    curves["yours"] = ranks.get("result['curve']")
fig, panels = plots.figure(len(curves), width=3.1 * len(curves) + 0.6, height=2.6)
for axes, (title, by_rank) in zip(panels, curves.items()):
    for r in reversed(range(min(2, len(by_rank)))):
        axes.plot(by_rank[r], color=plots.RANK_COLORS[r], linewidth=1.8, label=f"rank {r}")
    axes.axhline(100, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set(title=title, ylim=(0, 140), xticks=[], xlabel="operations of the load")
    axes.set_yticks([0, 50, 100] if axes is panels[0] else [])
    axes.text(0.03, 0.9, f"peak on rank 0: {max(by_rank[0]):.0f}%", transform=axes.transAxes)
panels[0].set_ylabel("besides the shards, % of model")
panels[-1].legend(loc="center right")
plots.show(fig, alt="What ranks 0 and 1 hold besides their shards: a state dict, or one tensor at a time.")

# %% [markdown]
# In the first panel rank 0 reads a state dict first, the complete model, and gives it to
# `set_model_state_dict`. The second panel is the run of the folded solution: never more than a tensor or two.
# (A state dict that is mapped from a file, as in the script at the top, is read in pieces too.) When your
# function works, run the cell with the figure again, and your run appears beside the two.
#
# ## What `load_pretrained` refuses
#
# `load_pretrained` looks at all names, shapes and dtypes before it touches the model, on every rank, and all
# ranks raise the same error. Here is a model with one block less, and in another dtype.

# %% jupyter={"source_hidden": true}
# %%ranks
def told(call):
    """Print the error that the call raises, without the name of the folder, which differs each time."""
    try:
        call()
    except CheckpointError as error:
        print(str(error).replace(str(folder), "..."))


# %%
# %%ranks
config = LlamaConfig.from_pretrained(folder / "dates")
config.num_hidden_layers = 5
with torch.device("meta"):
    other = shard(LlamaForCausalLM(config).bfloat16())
told(lambda: load_pretrained(folder / "dates", other))

# %% [markdown]
# `cast=True` converts, and `ignore=["model.layers.5.*"]` leaves tensors of the file aside; you have to say
# both.
#
# And the trap. For Llama's frequencies `load_pretrained` calls `_init_weights`, as you did. Here is a module
# of our own with a buffer that is not saved, and a `reset_parameters` that does nothing, like the line from
# the guide:

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    (folder / "decay").mkdir()
    save_file({"weight": torch.ones(8)}, folder / "decay" / "model.safetensors")
dist.barrier()

# %% tags=["refused"]
# %%ranks
class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("rates", 0.5 ** torch.arange(8.0), persistent=False)


def decay():
    with torch.device("meta"):
        model = Decay()
    return torch.distributed.fsdp.fully_shard(model)


Decay.reset_parameters = lambda self: None
told(lambda: load_pretrained(folder / "decay", decay()))

# %% tags=["check"]
# %%ranks
Decay.reset_parameters = lambda self: self.rates.copy_(0.5 ** torch.arange(8.0))
model = decay()
load_pretrained(folder / "decay", model)
assert model.rates[:3].tolist() == [1.0, 0.5, 0.25]
assert round(100 * max(p.nbytes for p in right.parameters()) / model_bytes) == 4     # as turn 2 says
print("Checked: with a reset_parameters that computes the rates, the model is loaded.")

# %% [markdown]
# ## Do the shards fit?
#
# The model is loaded. Can it be trained? Between two steps each rank holds its part of four things: weights,
# gradients and Adam's two averages. With weights in fp32 and bf16 for computation, as in
# [lesson 7](07_mixed_precision.ipynb), these are 16 bytes for each parameter. While the rank computes,
# gathered blocks in bf16 come on top. With FSDP2 they take the most in the forward pass, as many bytes as
# three blocks: the parameters of the block in use, and two buffers of all-gathers
# ([lesson 11](11_rate_limiter.ipynb)).

# %% tags=["formula"]
def rank_gb(parameters, block, ranks, weight=4, gradient=4, optimizer=8, compute=2):
    """At rest, and gathered on top, in GB. Without activations, and without what lies outside of blocks."""
    return parameters * (weight + gradient + optimizer) / ranks / 1e9, 3 * block * compute / 1e9


# %% jupyter={"source_hidden": true}
from fsdp_utils.planner import GPUS

COUNTS = (8, 64, 512)
needs = {name: [rank_gb(numbers[name], blocks[name], count) for count in COUNTS] for name in numbers}
H100, H200 = (GPUS[name].usable_gib * 2**30 / 1e9 for name in ("H100", "H200"))  # GB that CUDA offers
fig, (axes,) = plots.figure(width=7.5, height=2.8)
for column, count in enumerate(COUNTS):
    for row, of_counts in enumerate(needs.values()):
        rest, gathered = of_counts[column]
        color, label = plots.RANK_COLORS[column], f"{count} ranks" if row == 0 else None
        axes.plot(rest + gathered, row, "o", markersize=7, color=color, label=label)
        axes.text(
            rest + gathered, row - 0.36, f"{rest + gathered:,.0f}", ha="center", va="center", fontsize=8,
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
# A point to the right of a dashed line does not fit on that GPU. 405B on 8 ranks fits on neither, and needs
# more than five times what an H200 has; on 64 ranks it fits on an H200. These are lower bounds: activations
# come on top, the full gradients of a block before they are reduced, and what lies outside of the blocks.
# [Lesson 14](14_plan_before_you_rent.ipynb) simulates them too.
#
# More GPUs make the shards smaller. What if there are none?
#
# ## CPU offload: valley and peak
#
# FSDP2 can keep the shards on the host: `CPUOffloadPolicy`. A block's shards are copied to the GPU for its
# all-gather, its sharded gradients are copied back, and the optimizer works on the CPU. What **stays** on the
# GPU are gathered blocks, their full gradients until they are reduced, and activations.

# %%
# %%ranks
def offloaded(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))  # pinning is for copies to a GPU
    load_pretrained(folder / name, model, device="cpu")
    return model


# %% [markdown]
# The Distributed Training Guide measures offload by two numbers: what a GPU holds between two steps, the
# **valley**, and the most that it holds during a step, the **peak**. This machine has one memory, so nothing
# can be seen to move. But we can count what would be where. `Meter` sees each tensor that is alive. Those at
# rest between two steps (shards, Adam's averages, and the gradients until they are dropped) are the ones that
# offload keeps on the host.

# %% tags=["offload"] jupyter={"source_hidden": true}
# %%ranks
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
# weights and averages are there to be moved. The rest of the peak is mostly activations, which offload does
# not touch. [Lesson 2](02_activation_checkpointing.ipynb) does.
#
# The guide has measured a valley of 8 GB and a peak of 74 GB without offload, and 1.4 GB and 68.7 GB with it,
# for 7B on 8 GPUs. Does that fit? In bf16 throughout, weights and two averages are 6 bytes for each
# parameter, and gradients 2 more:

# %% tags=["guide"]
valley_gb, peak_gb = (each * numbers["7B"] / 8 / 1e9 for each in (8, 6))    # bytes each, over 8 ranks

# %% jupyter={"source_hidden": true}
Table(
    ["offload takes away, GB", "calculated", "by the guide's numbers"],
    [
        ["from the valley", f"{valley_gb:.1f}", f"{8 - 1.4:.1f}"],
        ["from the peak", f"{peak_gb:.1f}", f"{74 - 68.7:.1f}"],
    ],
)

# %% [markdown]
# Both fit, as far as one can tell: the guide's 8 and 74 are rounded to 1 GB, so each of its differences may
# be off by 0.5 GB. What this machine cannot show is the price. Every shard crosses the bus for each
# all-gather, every gradient crosses it on its way back, and Adam runs at the speed of the host's memory.

# %% tags=["check"]
# %%ranks
parameters = sum(p.numel() for p in model.parameters())
assert round(kept * world / parameters) == 12                        # weights and averages, bytes each
assert round(rest * world / parameters) == 16                        # with gradients
assert (end - rest) < 0.2 * rest                                     # after a step little else is alive
assert peak > 2 * rest
assert meter.tensor_bytes.index(peak) < first_gradient[0]            # so the peak has no gradients
print("Checked: at rest 12 bytes for a parameter, 16 with gradients; the peak comes before the gradients.")

# %% tags=["check"]
# %%ranks
at_rest = [*model.parameters(), *(p.grad for p in model.parameters()), *averages]
with Meter(at_rest) as meter:
    model(**task.batch(4, rank=rank, world_size=world)).loss.backward()
outside = sum(p.numel() for name, p in model.named_parameters() if ".layers." not in name)
block = sum(p.numel() for p in model.model.layers[0].parameters())
measured = meter.held_bytes, meter.peak_gather_bytes - 4 * outside   # the root's own stay gathered

# %% tags=["check"]
parameters, block, world = ranks.get("(parameters, block, world)")[0]
by_formula = rank_gb(parameters, block, world, compute=4)            # the small model computes in fp32
for at_rest, gathered in ranks.get("measured"):
    assert abs(at_rest / 1e9 / by_formula[0] - 1) < 0.05             # rows do not divide evenly by 3
    assert abs(gathered / 1e9 / by_formula[1] - 1) < 0.05
assert needs["405B"][0][0] > 5 * H200                                # not on 8 H200
assert H100 < sum(needs["405B"][1]) < H200
print("Checked: the formula within 5% of the meter; 405B does not fit on 8 H200, and fits on 64.")

# %% tags=["check"]
assert abs(valley_gb - (8 - 1.4)) < 0.5                              # 8 and 74 are rounded to 1 GB
assert abs(peak_gb - (74 - 68.7)) < 0.5
print("Checked: both differences are within 0.5 GB of the guide's.")

# %% [markdown]
# ## Proof
#
# Two steps of training on the small model, after each way to load it, against one process that holds the
# complete model and sees all samples.

# %% jupyter={"source_hidden": true}
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

# %% tags=["equality"]
# %%ranks
losses = {name: train(way("dates"))[0] for name, way in ways.items()}
losses["load_pretrained, CPU offload"] = offload_losses
losses["one process"] = whole_losses

# %% [markdown]
# The five sharded runs are equal to the last bit. One process differs only by rounding, because the same
# numbers are added up in another order.

# %% tags=["check"]
# %%ranks
for name, some in losses.items():
    assert some == losses["load_pretrained"] or name == "one process"
torch.testing.assert_close(losses["load_pretrained"], whole_losses, rtol=1e-3, atol=1e-3)
print("Checked: two steps have the same losses in all five ways to load, and in one process up to rounding.")

# %% [markdown]
# ## When it goes wrong
#
# A mistake that raises no error: the names in the file are not those of the model, and `strict=False` lets
# them pass. Here each name begins with `module.`, as in a file that was saved from a DDP model. The memory is
# filled with NaN again, so that we see what gets values.

# %%
# %%ranks
def load_other_names(strict):
    torch.use_deterministic_algorithms(True)                         # fills empty memory with NaN
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    state = load_file(folder / "dates" / "model.safetensors") if rank == 0 else {}
    state = {f"module.{name}": tensor for name, tensor in state.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    return model, set_model_state_dict(model, state, options=options)


model, keys = load_other_names(strict=False)
without = sum(here(p).isnan().all().item() for p in model.parameters())
reported = len(keys.missing_keys), len(keys.unexpected_keys), without

# %% jupyter={"source_hidden": true}
parameters = ranks.get("len(reference)")[0]
Table(
    ["rank", "missing keys, as returned", "unexpected keys, as returned", "parameters without values"],
    [[str(r), *one[:2], f"{one[2]} of {parameters}"] for r, one in enumerate(ranks.get("reported"))],
)

# %% [markdown]
# Not one parameter has got a value, and no rank reports a missing key. Only rank 0 reports unexpected ones.
# With `strict=True`, the default, every rank raises an error.
#
# What you see, why, and what helps:
#
# - **The loaded model is as bad as one that has learned nothing.** No name has matched, as above. Leave
#   `strict` as it is, and rename the keys of the file.
# - **The loss is NaN, or a little too high, from the first step on.** A buffer that is not saved was never
#   computed: the trap. Mend it as in turn 1, and compare the loss of the loaded model with a known one.
# - **`Cannot copy out of meta tensor; no data!`** A model on meta was moved with `.to(device)`. Use
#   `to_empty`, then load.
# - **The host kills a rank while it loads (out of memory).** Every rank loads everything, so the host holds
#   the model once per rank. Load on rank 0 and broadcast, or use `load_pretrained`.
# - **A rank hangs in loading.** Rank 0 calls `set_model_state_dict` inside `if rank == 0`. All ranks must
#   call it, the others with an empty dict ([lesson 3](03_full_state_dict.ipynb)).

# %% tags=["check"]
# %%ranks
assert reported == (0, len(reference) if rank == 0 else 0, len(reference))
strict_error = ""
try:
    load_other_names(strict=True)
except RuntimeError as error:
    strict_error = str(error)
assert "Missing key(s) in state_dict" in strict_error
meta_error = ""
try:
    with torch.device("meta"):
        LlamaForCausalLM(config).to("cpu")
except NotImplementedError as error:
    meta_error = str(error)
assert "Cannot copy out of meta tensor; no data!" in meta_error
print("Checked: no parameter has a value and no key is missing; strict=True raises on every rank.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    12,
    {
        "all-ranks-2tb": f"Calculated: {8 * host_gb['70B'] / 1000:.1f} TB for 70B. Measured on a small one: "
        "every rank owns the whole model, and maps the file besides.",
        "rank-0-peak": "The system counted more than the whole model on rank 0, most of it pages of the "
        "mapped file, and on the others less than half of it above their "
        f"shard. 7B in fp32 are {4 * numbers['7B'] / 1e9:.0f} GB, so 1506 MB "
        "are hardly more than a process with PyTorch.",
        "monolith-rank-0": "As with rank 0 and a broadcast above: rank 0 reads the whole file, the others do "
        "not. With `load_pretrained` no rank does.",
        "reset-nothing": "Rotary frequencies uninitialised: no error. The loss is NaN, or at least a tenth "
        "too high where the memory is zeros.",
        "offload-valley": f"Calculated for bf16: the valley shrinks by {valley_gb:.1f} GB, the guide's by "
        f"6.6 GB; the peak by {peak_gb:.1f} GB, the guide's by 5.3 GB. Counted on a small model: the peak "
        "has no gradients to move, and activations stay.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - On the meta device a model of any size can be built and sharded. It has no values, buffers included.
# - `to_empty` leaves anything in them. Parameters are loaded; buffers that are not saved must be computed.
# - A complete model on every rank takes host memory once per rank, and a state dict on rank 0 takes it once.
#   Tensor by tensor, from a mapped file or with `load_pretrained`, no rank owns the complete model.
# - CPU offload moves what is at rest out of the GPU. Gathered blocks and activations stay.
# - 16 bytes for each parameter, divided by the number of ranks, is what a rank holds between two steps with
#   Adam and fp32 weights.

# %% jupyter={"source_hidden": true}
# %%ranks
import shutil

dist.barrier()
if rank == 0:
    shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# Most of these lessons show FSDP1 beside FSDP2. [Lesson 13](13_from_fsdp1_to_fsdp2.ipynb) moves a complete
# project from FSDP1 to FSDP2. How sharded training is saved is
# [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb).
#
# [← lesson 11](11_rate_limiter.ipynb) · [lesson 13 →](13_from_fsdp1_to_fsdp2.ipynb)

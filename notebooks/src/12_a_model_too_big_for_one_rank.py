# %% [markdown]
# # 12 · A model too big for one rank
#
# FSDP shards a model. But who builds the model that is sharded, and where? In many scripts every rank builds
# all of it, in the memory of its host. In this lesson no rank does: the model is built without memory, gets
# memory for its shards alone, and then its values. On the way lies a trap that makes a model wrong without an
# error.

# %% [markdown] tags=["card"]
# learn:
# - how to build a model of 405 billion parameters in this notebook, on the meta device
# - what `to_empty` leaves in buffers, how to notice, and how to mend it
# - the host memory of each rank for four ways to load, measured
# - how to move a checkpoint from rank 0 to all shards, one tensor at a time
# - how a load that gives no value to any parameter goes unnoticed
# needs: '[lesson 3](03_full_state_dict.ipynb) · no GPU'
# ranks: '4 on this machine, on the CPU, as host memory is what is measured. 2 or 3
#   work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read

# %% [markdown]
# **The question of this lesson:** a model does not fit into the memory of one rank. How do its shards get
# their values?

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

HELD = {
    "each rank loads all of it": [4, 4, 4, 4],
    "rank 0 loads, then sends": [4, 0, 0, 0],
    "each rank reads its part": [0, 0, 0, 0],
}
fig, panels = plots.figure(len(HELD), width=9.4, height=2.0)
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
# The drawing shows what four ranks hold at the most while a model is loaded. A column is a rank, and each
# colour is one quarter of the model. In the end each rank needs its own quarter alone. On the left every rank
# holds everything for a while, in the middle rank 0 does, and on the right nobody does. Further down you
# measure these three, and write one of your own.
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
# model.to_empty(device=device)                         # memory for the shards, no values
# state = torch.load(file, mmap=True) if dist.get_rank() == 0 else {}
# options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# set_model_state_dict(model, state, options=options)   # ALL ranks; buffers: see the trap
# dist.destroy_process_group()
# ```
#
# The script answers the question in three steps, and the lesson takes them in turn: build shapes without
# memory, give memory to the shards, and give them their values. `mmap=True` **maps** the file into memory
# instead of reading it: the system reads a tensor when rank 0 first uses it. For a folder of safetensors that
# every rank can see, `load_pretrained` of `fsdp_utils` does steps two and three without rank 0.
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
# 1. 70 · 4 · 8 GB: over two terabytes. A Hugging Face blog post on Llama 2 70B gives the same number.
# 2. An eighth: 280 GB for rank 0. The shards are on the GPUs.
# 3. Yes. In the end no rank holds more than its shards, and a file can be read in pieces.
#
# </details>

# %%
ranks.start(device="cpu", preload=["transformers.models.llama.modeling_llama"])    # slow to import

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# %% [markdown]
# ## Step 1: shapes without memory
#
# A tensor on the **meta device** has a shape and a dtype, and no memory. A model that is built under
# `torch.device("meta")` is complete except for its values. So any machine can build it and shard it, however
# large it is. Here are four Llamas in the memory of this notebook.

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
host_gb = {name: 4 * number / 1e9 for name, number in numbers.items()}     # the model in fp32, once
Table(
    ["Llama", "billions of parameters", "GB in fp32", "GB, if each of 8 ranks loads it"],
    [[name, f"{numbers[name] / 1e9:.2f}", round(gb), round(8 * gb)] for name, gb in host_gb.items()],
)

# %% [markdown]
# These are almost two terabytes of parameters. This process has grown by less than half a gigabyte: the
# memory that Python needs to describe them. The last column answers the first question above: what a host
# with 8 ranks needs if every rank loads the complete model.

# %% tags=["check"]
assert all(p.is_meta for model in models.values() for p in model.parameters())
assert grown_gb < 0.5
assert 1.9e12 < 4 * sum(numbers.values()) < 2e12
assert abs(8 * host_gb["70B"] / (8 * 4 * 70) - 1) < 0.02             # the Hugging Face blog's 70 * 4 * 8
del models
print("Checked: almost 2 TB of parameters on meta, less than half a gigabyte of memory.")

# %% [markdown]
# ## Step 2: memory without values, and a trap
#
# To notice whether what was loaded is right, we need a model that has learned something. Folded cells let
# rank 0 train a small Llama for 40 steps to write dates as numbers, and save it as models are stored on the
# hub: `config.json` and `model.safetensors`.

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

from fsdp_utils import load_pretrained, shard
from fsdp_utils.lessons import tasks
from fsdp_utils.lessons.meter import Meter
from fsdp_utils.lessons.together import run_together

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
print(f"loss of the saved model on dates that it has not seen: {expected:.1f}")

# %% [markdown]
# Now the way that tutorials show. Build on meta and shard. Call `to_empty`, which gives new memory to the
# shard of every parameter, and to every **buffer**: a tensor of the model that is not trained. Then load:
# rank 0 reads the file, and `broadcast_from_rank0` sends one tensor after the other, as in
# [lesson 3](03_full_state_dict.ipynb). (`shard` of `fsdp_utils` calls `fully_shard` on each block, then on
# the model.)

# %%
# %%ranks
def sharded_on_meta(name):
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return shard(model)


def file_on_rank_0(name):
    return load_file(folder / name / "model.safetensors") if rank == 0 else {}


def send(model, state, strict=True):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    return set_model_state_dict(model, state, options=options)       # on ALL ranks


# %% [markdown]
# `to_empty` leaves in the memory whatever was there before, which is different each time. To make it visible,
# we ask PyTorch for the mode in which it fills such memory with NaN. After each step, `look` notes for each
# tensor of the model whether it has no memory, NaN, or values.

# %% jupyter={"source_hidden": true}
# %%ranks
def here(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def look(model):
    """For each parameter, then for each buffer: has it no memory, anything in it, or values?"""

    def has(tensor):
        part = here(tensor.detach())
        return "no memory" if part.is_meta else "anything" if part.isnan().any() else "values"

    return [has(p) for p in model.parameters()], [has(b) for b in model.buffers()]


# %% tags=["trap"]
# %%ranks
stages = {}
torch.use_deterministic_algorithms(True)                             # fills empty memory with NaN
model = sharded_on_meta("dates")
stages["built on meta, sharded"] = look(model)
model.to_empty(device="cpu")
stages["after to_empty"] = look(model)
torch.use_deterministic_algorithms(False)
send(model, file_on_rank_0("dates"))                                 # no error: every key was there
stages["loaded"] = look(model)
with_nan = test_loss(model)

# %% jupyter={"source_hidden": true}
LOOKS = {
    "no memory": {"facecolor": plots.CARD, "edgecolor": plots.INK, "linewidth": 0.8},
    "anything": {"facecolor": plots.CARD, "edgecolor": plots.RANK_COLORS[5], "hatch": "//////"},
    "values": {"facecolor": plots.RANK_COLORS[0], "edgecolor": plots.RANK_COLORS[0]},
}
stages = ranks.get("stages")[0]
fig, panels = plots.figure(len(stages), width=9.4, height=2.3)
for axes, (title, (parameters, buffers)) in zip(panels, stages.items()):
    squares = [(i % 15, i // 15, kind) for i, kind in enumerate(parameters)]
    squares += [(i, 6.4, kind) for i, kind in enumerate(buffers)]
    for x, y, kind in squares:
        axes.add_patch(Rectangle((x, y), 0.8, 0.8, **LOOKS[kind]))
    axes.text(0, -0.5, f"{len(parameters)} parameters", fontsize=8)
    axes.text(0, 5.9, f"{len(buffers)} buffers", fontsize=8)
    axes.set(title=title, xlim=(-0.3, 15.1), ylim=(7.5, -1.8), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
words = {"no memory": "no memory", "anything": "undefined values (here NaN)", "values": "values"}
handles = [Rectangle((0, 0), 1, 1, **LOOKS[kind], label=text) for kind, text in words.items()]
fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
plots.show(fig, alt="Parameters and buffers of rank 0: without memory, then undefined, then loaded or not.")

# %% [markdown]
# Each square is a tensor of the model on rank 0. Loading has raised no error and has given values to every
# parameter. Two tensors still hold what `to_empty` left there. Which?

# %%
# %%ranks
def not_saved(model):
    return [name for name, _ in model.named_buffers() if name not in model.state_dict()]


print(", ".join(not_saved(model)))

# %% [markdown]
# These two buffers hold the frequencies of the rotary position embedding. They are computed when the module
# is built, and on meta nothing is computed. They are registered with `persistent=False`, so they are not
# saved. No file holds them, so no key is missing.
#
# NaN would be lucky, because the loss is NaN at once. But memory that comes fresh from the operating system
# is full of zeros. What if the frequencies are zeros?

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
# The Distributed Training Guide, chapter 4, was in this trap from January to October 2025. Without a
# `param_init_fn`, FSDP1 calls `to_empty`, then `reset_parameters()`, on each module on meta that has tensors
# of its own, and raises an error where there is no such method. The guide gave the module one that does
# nothing:
#
# ```python
# LlamaRotaryEmbedding.reset_parameters = lambda _: None
# ```
#
# The error was gone, and the buffer stayed as `to_empty` had made it. The method has to compute the buffer,
# as the guide's does now.

# %% tags=["check"]
# %%ranks
built, emptied, loaded = stages.values()
assert [set(kinds) for kinds in built] == [{"no memory"}, {"no memory"}]
assert [set(kinds) for kinds in emptied] == [{"anything"}, {"anything"}]
assert [set(kinds) for kinds in loaded] == [{"values"}, {"anything"}]
assert with_nan != with_nan                                          # NaN
assert [name for name, _ in model.named_buffers()] == not_saved(model) != []
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
def with_extras(model):
    """The model with a second rotary embedding, and with a BatchNorm whose running mean was loaded."""
    model.second_rotary = type(model.model.rotary_emb)(model.config)
    model.statistics = nn.BatchNorm1d(8)
    model.statistics.running_mean.fill_(3.0)
    return model


def score_mend(mend):
    """Load as in the trap, mend, and compare."""
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    send(model, file_on_rank_0("dates"))
    model, reference = with_extras(model), with_extras(LlamaForCausalLM.from_pretrained(folder / "dates"))
    for name in not_saved(model):
        model.get_buffer(name).zero_()
    before = {name: here(tensor).clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            _, problem = run_together(lambda: (mend(model), 1))     # what one rank raises, all of them hear
    except Exception as error:                  # the reader's own code: whatever it raises
        problem = f"Rank {rank} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}."
    if "second_rotary" in problem:
        problem += " This model has two modules more than the saved one: see the task."
    if problem:
        return {"problem": problem}
    changed = sum(not torch.equal(here(t), before[name]) for name, t in model.state_dict().items())
    buffers = not_saved(reference)
    wrong = sum(not torch.equal(model.get_buffer(name), reference.get_buffer(name)) for name in buffers)
    return {
        "buffers with wrong values, of those not saved": wrong,
        "loaded tensors that have changed": changed,
        "the loss is the expected one": abs(test_loss(model) - expected) < 1e-3,
    }

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score_mend(my_mend)",
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

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # all modules
    for module in model.modules():
        model._init_weights(module)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # all modules with buffers, saved ones too
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # one module by its name
    model._init_weights(model.model.rotary_emb)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # the name instead of the module
    for name in not_saved(model):
        model._init_weights(name)

# %% tags=["wrong"] turn=1
# %%ranks
def my_mend(model):                             # any number but zero
    for name in not_saved(model):
        model.get_buffer(name).fill_(1.0)

# %% [markdown]
# It is safer to compute buffers *before* loading. Then `_init_weights` may reset whole modules, because
# loading overwrites everything that is in the file. The rest of this lesson does so.
#
# ## Step 3: values, and the host memory that they take
#
# For memory to matter, the model has to be larger. This one has random weights.

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
print(f"the file: {whole / 2**20:.0f} MiB")

# %% [markdown]
# Each way to load is a function that returns the sharded model. First the left panel of the drawing at the
# top: what a script does that was written for one GPU.

# %%
# %%ranks
def each_rank_all(name):
    config = LlamaConfig.from_pretrained(folder / name)
    model = LlamaForCausalLM(config)                                 # all of it, in memory
    model.load_state_dict(load_file(folder / name / "model.safetensors"))
    return shard(model)


# %% [markdown]
# Then the middle panel: the steps above, with the buffers computed. There are two ways to have the state dict
# on rank 0. `load_file` of safetensors maps the file. A loader that does not map, such as `torch.load`
# without `mmap=True`, reads all of it first; here a copy stands for that.

# %%
# %%ranks
def compute_buffers(model):                                          # before loading, so nothing is lost
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)


def rank_0_sends(name, state):
    model = sharded_on_meta(name)
    model.to_empty(device="cpu")
    compute_buffers(model)
    send(model, state)
    return model


def rank_0_maps(name):
    return rank_0_sends(name, file_on_rank_0(name))


def rank_0_loads(name):
    return rank_0_sends(name, {key: tensor.clone() for key, tensor in file_on_rank_0(name).items()})


# %% [markdown]
# Last the right panel, `load_pretrained` of `fsdp_utils`. It takes a model that is sharded and still on meta,
# and a folder of safetensors. It gives memory to this rank's shards, reads from the file the rows that belong
# to them, and computes the buffers that no file holds.

# %% tags=["ways"]
# %%ranks
def each_rank_its_part(name):
    model = sharded_on_meta(name)
    load_pretrained(folder / name, model)                            # instead of to_empty
    return model


def each_rank_from_pretrained(name):                                 # of transformers, for comparison
    return shard(LlamaForCausalLM.from_pretrained(folder / name))


ways = {
    "each rank loads all of it": each_rank_all,
    "rank 0 loads, then sends": rank_0_loads,
    "rank 0 maps, then sends": rank_0_maps,
    "each rank reads its part": each_rank_its_part,
    "from_pretrained": each_rank_from_pretrained,
}

# %% [markdown]
# A folded cell runs them. Meanwhile a thread looks, every few milliseconds, at the memory that the system
# counts for this process as its **own**. Pages of a mapped file are counted apart: the ranks of a host share
# them, and the system drops them when memory is short.

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
drawn = [name for name in names if name != "from_pretrained"]
longest = max(curves[rank][name][-1][0] for rank in range(world) for name in drawn)
fig, panels = plots.figure(len(drawn), width=9.6, height=2.7)
for axes, name in zip(panels, drawn):
    for rank in reversed(range(world)):
        seconds, _, own = zip(*curves[rank][name])
        axes.plot(seconds, own, color=plots.RANK_COLORS[rank], linewidth=1.8, label=f"rank {rank}")
    axes.axhline(1 / world, color=plots.INK, linestyle=":", linewidth=0.9)
    axes.axhline(1, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set(xlabel="seconds", xlim=(0, longest), ylim=(0, 1.95))
    axes.set_yticks([0, 1] if axes is panels[0] else [])
    axes.set_title(name, fontsize=9)
    rank_0, others = own_peaks[name][0], max(own_peaks[name][1:])
    text = f"peak: {rank_0:.2f} on rank 0,\n{others:.2f} on the others"
    axes.text(0.04, 0.97, text, transform=axes.transAxes, va="top", fontsize=8)
panels[0].set_ylabel("own memory, in models")
handles, labels = panels[0].get_legend_handles_labels()
fig.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=world, frameon=False)
plots.show(fig, alt="Own host memory of each rank over time, for four ways to load the same model.")

# %% [markdown]
# Dashed is one complete model. Dotted is a shard, which is all that a rank needs in the end.
#
# - *Each rank loads all of it*: every rank owns a complete model, and on one host these add up.
# - *Rank 0 loads*: rank 0 owns a complete model besides its shards. The others hold their shards and the few
#   tensors that are on their way.
# - *Rank 0 maps*: rank 0 goes through the complete file too, but owns hardly more than the others. This works
#   where the file can be mapped, and not where it has to be converted first. Turn 2 is about that case.
# - *Each rank reads its part*: no rank holds more than its shards and a small buffer.
#
# Not drawn is `from_pretrained` of transformers 5 on each rank. It uses the mapped file as the model's
# parameters, so a rank owns no complete model either.
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
# Each rank has read its part of the file, and hardly more. Its read buffer is 16 MiB, or one row of a tensor
# if that is larger. If the shards are on GPUs, this buffer is nearly all the host memory that
# `load_pretrained` needs, whatever the size of the model.

# %% tags=["check"]
shares = [share for share in ranks.get("read") if share is not None]
shard_share, tensor_share = ranks.get("held")[0], ranks.get("biggest")[0]
limit = 1.3 * shard_share + tensor_share
_, loads, maps, mine, _ = names
assert min(own_peaks["each rank loads all of it"]) > 0.9
assert own_peaks[loads][0] > 0.9 + shard_share
assert peaks[maps][0] > 1
assert max(peaks[loads][1:] + peaks[maps][1:]) < 0.5 + shard_share
assert all(0.9 * shard_share < peak < limit for peak in peaks[mine])
if shares:                                                           # Linux counts pages of files apart
    assert max(own_peaks["from_pretrained"]) < limit
    assert own_peaks[maps][0] < 0.5 + shard_share
assert all(all(some == sums[mine] for some in sums.values()) for sums in ranks.get("sums"))
assert all(abs(share - 1 / world) < 0.03 for share in shares)
print("Checked: the same shards in all ways; load_pretrained needs at most 1.3 shards and a tensor.")

# %% [markdown]
# ## Your turn 2 · From rank 0, one tensor at a time
#
# Sometimes only rank 0 can see the checkpoint, and it has to be converted, so it cannot be mapped. Write a
# load in which *no* rank holds more than a few tensors besides its shards, rank 0 included.
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
    """Load by the reader's function under a meter."""
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.to_local().detach().fill_(-7.0)
    reads = []

    def read(name):
        reads.append(name)
        with _disable_current_modes(), safe_open(folder / "dates" / "model.safetensors", "pt") as file:
            tensor = file.get_tensor(name)
        return tensor.clone()                   # under the meter, so that it counts

    try:
        with Meter(model.parameters()) as meter, torch.no_grad():
            _, problem = run_together(load, model, read)    # no rank waits for a call that another lacks
    except Exception as error:                  # the reader's own code: whatever it raises
        problem = f"Rank {rank} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}."
    if "DTensor" in problem or "meta tensors" in problem:
        problem += " A parameter is a DTensor: send plain tensors, and fill parameter.to_local()."
    if problem:
        return {"problem": problem}
    curve = [100 * (nbytes - meter.held_bytes) / model_bytes for nbytes in meter.tensor_bytes]
    shards = [p.to_local() for p in model.parameters()]
    return {
        "parameters with wrong values": sum(not torch.equal(a, b) for a, b in zip(shards, reference)),
        "held besides the shards, % of the model": round(max(curve, default=0)),
        "reads on ranks other than 0": len(reads) if rank > 0 else 0,
        "curve": curve[:: len(curve) // 400 + 1],
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_load(my_load)",
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

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # rank 0 reads everything first
    names = [name for name, _ in model.named_parameters()]
    state = {name: read(name) for name in names} if rank == 0 else {}
    for name, parameter in model.named_parameters():
        full = state[name] if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full.chunk(world)[rank])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # a full state dict on rank 0
    state = {name: read(name) for name, _ in model.named_parameters()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # sends everything, then fills the shards
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(state[name], src=0)
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(state[name].chunk(world)[rank])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # each rank reads for itself
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(read(name).chunk(world)[rank])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # the first rows on every rank
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full[: len(parameter.to_local())])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # fills rank 0's shards alone
    for name, parameter in model.named_parameters():
        if rank == 0:
            parameter.to_local().copy_(read(name).chunk(world)[0])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # rank 0 sends, and nobody receives
    for name, parameter in model.named_parameters():
        if rank == 0:
            full = read(name)
            dist.broadcast(full, src=0)
            parameter.to_local().copy_(full.chunk(world)[rank])

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # a complete tensor into a DTensor
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.copy_(full)

# %% tags=["wrong"] turn=2
# %%ranks
def my_load(model, read):                       # dist.broadcast of a DTensor
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty_like(parameter)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full.chunk(world)[rank])

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
if mine := yours(2, "curve"):
    curves["yours"] = mine
fig, panels = plots.figure(len(curves), width=3.1 * len(curves) + 0.6, height=2.6)
for axes, (title, by_rank) in zip(panels, curves.items()):
    for r in reversed(range(min(2, len(by_rank)))):
        axes.plot(by_rank[r], color=plots.RANK_COLORS[r], linewidth=1.6 + 1.8 * r, label=f"rank {r}")
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
# When your function works, run the cell with the figure again, and your run appears beside the two.
#
# ## Do all ways give the same model?
#
# Two steps of training on the small model, after each way to load, against one process that holds the
# complete model and sees all samples.

# %% jupyter={"source_hidden": true}
# %%ranks
def train(model, rank=rank, world=world, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**task.batch(step, rank=rank, world_size=world)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / world)
    losses = torch.stack(losses)
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist()


def with_cpu_offload(name):                     # what the last section says of it
    config = LlamaConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))  # pinning is for copies to a GPU
    load_pretrained(folder / name, model, device="cpu")
    return model


# %% tags=["equality"]
# %%ranks
losses = {name: train(way("dates")) for name, way in ways.items()}
losses["one process"] = train(LlamaForCausalLM.from_pretrained(folder / "dates"), rank=0, world=1)

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
Table(
    ["", "loss, step 1", "loss, step 2"],
    [[name, *(f"{loss:.6f}" for loss in some)] for name, some in ranks.get("losses")[0].items()],
)

# %% [markdown]
# Compare the rows: the sharded runs are equal to the last bit. One process may differ by rounding, because
# the same numbers are added up in another order. (The two steps have different samples, so the second loss
# need not be lower.)

# %% tags=["check"]
# %%ranks
for name, some in losses.items():
    assert some == losses["each rank reads its part"] or name == "one process"
assert train(with_cpu_offload("dates")) == losses["each rank reads its part"]
torch.testing.assert_close(losses["each rank reads its part"], losses["one process"], rtol=1e-3, atol=1e-3)
print("Checked: two steps have the same losses in all five ways to load, and in one process up to rounding.")

# %% [markdown]
# ## When it goes wrong
#
# Here is a mistake that may raise no error: the names in the file are not those of the model. Each name
# begins with `module.`, as in a file that was saved from a DDP model. We load it three times: by
# `set_model_state_dict` with `strict=False`, by the same with `strict=True` (the default), and by
# `load_pretrained`. `to_empty` fills the memory with NaN again, so that we see what gets values.

# %% jupyter={"source_hidden": true}
# %%ranks
if rank == 0:
    (folder / "renamed").mkdir()
    (folder / "decay").mkdir()
    renamed = {f"module.{name}": tensor for name, tensor in file_on_rank_0("dates").items()}
    save_file(renamed, folder / "renamed" / "model.safetensors")
    save_file({"weight": torch.ones(8)}, folder / "decay" / "model.safetensors")
dist.barrier()

# %%
# %%ranks
def load_renamed(strict):
    torch.use_deterministic_algorithms(True)                         # fills empty memory with NaN
    model = sharded_on_meta("dates")
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    return model, send(model, file_on_rank_0("renamed"), strict=strict)


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error).replace(str(folder), "...")


model, keys = load_renamed(strict=False)
nan = sum(here(p).isnan().all().item() for p in model.parameters())
reported = len(keys.missing_keys), len(keys.unexpected_keys), nan
strict_error = error_of(lambda: load_renamed(strict=True))
own_error = error_of(lambda: load_pretrained(folder / "renamed", sharded_on_meta("dates")))

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown

parameters = ranks.get("len(reference)")[0]
(missing, _, nan), (kind, text) = ranks.get("reported")[1], ranks.get("own_error")[0]
first = text.splitlines()[1].strip()
Table(
    ["load", "what rank 1 gets"],
    [
        ["strict=False", f"no error, {missing} missing keys; {nan} of {parameters} parameters are NaN"],
        ["strict=True", f"{ranks.get('strict_error')[1][0]}: Missing key(s) in state_dict: …"],
        ["load_pretrained", f"{kind}: {first} …"],
    ],
)

# %% jupyter={"source_hidden": true}
Markdown(f"<details><summary>All that load_pretrained says</summary>\n\n```text\n{text}\n```\n\n</details>")

# %% [markdown]
# With `strict=False` not one parameter has got a value, and rank 1 is told of no missing key. (Rank 0 is told
# of unexpected ones.) The two others raise an error on every rank. `load_pretrained` compares names, shapes
# and dtypes before it touches the model.
#
# What you see, why, and what helps:
#
# - **The loaded model is as bad as one that has learned nothing.** No name has matched, as above. Leave
#   `strict` as it is, and rename the keys of the file.
# - **The loss is NaN, or too high, from the first step on.** A buffer that is not saved was never
#   computed: the trap. Mend it as in turn 1, and compare the loss of the loaded model with a known one.
#   `load_pretrained` refuses a model with such a buffer that it cannot compute.
# - **`Cannot copy out of meta tensor; no data!`** A model on meta was moved with `.to(device)`. Use
#   `to_empty`, then load.
# - **The host kills a rank while it loads (out of memory).** Every rank loads everything, so the host holds
#   the model once per rank. Load on rank 0 and broadcast, or use `load_pretrained`.
# - **A rank hangs in loading.** Rank 0 calls `set_model_state_dict` inside `if rank == 0`. All ranks must
#   call it, the others with an empty dict ([lesson 3](03_full_state_dict.ipynb)).
# - **All is loaded, and the GPU runs out of memory in the first step.** The shards fit, but gradients, the
#   optimizer's state, gathered blocks and activations come on top.
#   [Lesson 14](14_plan_before_you_rent.ipynb) calculates them before you rent. More GPUs make the shards
#   smaller. Without more GPUs, **CPU offload** (`offload_policy=CPUOffloadPolicy()` of `fully_shard`, and
#   `load_pretrained(…, device="cpu")`) keeps shards, their gradients and the optimizer's state in host
#   memory; copies between host and GPU make each step slower. The Distributed Training Guide reports what
#   this saves per GPU for 7B on 8 GPUs: 8 GB between steps become 1.4, and a peak of 74 GB becomes 68.7. The
#   last check below calculates both differences.

# %% tags=["refused", "check"]
# %%ranks
assert reported == (0, len(reference) if rank == 0 else 0, len(reference))
assert strict_error[0] == "RuntimeError"
assert "Missing key(s) in state_dict" in strict_error[1]
assert own_error[0] == "CheckpointError"
assert "expected by the model" in own_error[1].splitlines()[1]
with torch.device("meta"):
    on_meta = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "dates"))
assert "Cannot copy out of meta tensor; no data!" in error_of(lambda: on_meta.to("cpu"))[1]


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("rates", 0.5 ** torch.arange(8.0), persistent=False)


def load_decay(reset):
    Decay.reset_parameters = reset
    with torch.device("meta"):
        model = Decay()
    load_pretrained(folder / "decay", torch.distributed.fsdp.fully_shard(model))
    return model


assert "found nothing that computes rates of Decay" in error_of(lambda: load_decay(lambda self: None))[1]
assert load_decay(lambda self: self.rates.copy_(0.5 ** torch.arange(8.0))).rates[2] == 0.25
print("Checked: strict=False reports no missing key and gives no parameter a value; the others raise errors.")

# %% tags=["guide", "check"]
valley_gb, peak_gb = (each * numbers["7B"] / 8 / 1e9 for each in (8, 6))    # bytes each, over 8 ranks
assert abs(valley_gb - (8 - 1.4)) < 0.5                              # 8 and 74 are rounded to 1 GB
assert abs(peak_gb - (74 - 68.7)) < 0.5
print("Checked: what CPU offload should take away in bf16 is within 0.5 GB of the guide's differences.")

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
lesson.claims(
    12,
    {
        "all-ranks-2tb": f"Calculated: {8 * host_gb['70B'] / 1000:.1f} TB for 70B. Measured on a small one: "
        "every rank owns the complete model.",
        "rank-0-peak": "Rank 0 owned more than a complete model, the others less than half of one "
        f"above their shard. 7B in fp32 are {4 * numbers['7B'] / 1e9:.0f} GB, so 1506 MB are hardly more "
        "than a process with PyTorch.",
        "monolith-rank-0": "As when rank 0 loads, then sends: the others do not read the file. With "
        "`load_pretrained` no rank reads all of it.",
        "reset-nothing": "Rotary frequencies uninitialised: no error. The loss is NaN, or at least a tenth "
        "too high where the memory is zeros.",
        "offload-valley": f"Calculated for bf16, in which weights, gradients and two averages are 8 bytes "
        f"for each parameter: {valley_gb:.1f} GB less between steps (the guide: 6.6). At a peak before "
        f"the first gradient 6 bytes: {peak_gb:.1f} GB less (the guide: 5.3). Not measured here.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Shapes, memory, values: build on meta, shard, `to_empty`, load. No rank needs the complete model.
# - `to_empty` leaves anything in memory. Loading fills parameters; buffers that are not saved must be
#   computed, and nothing reports it if they are not.
# - A complete model on every rank takes host memory once per rank, and a state dict on rank 0 takes it once.
#   Tensor by tensor, from a mapped file or with `load_pretrained`, no rank owns the complete model.
# - Keep `strict=True`, and compare the loss of the loaded model with a known one.

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

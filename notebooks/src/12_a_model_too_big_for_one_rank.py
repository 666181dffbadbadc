# %% [markdown]
# # 12 · A model too big for one rank
#
# Llama 2 70B takes 257 GiB in float32. If each of the 8 ranks of a host builds and loads all of it, the host
# needs 2 TiB of memory before FSDP has cut anything. How do the shards get their values, if no rank can hold
# the complete model?
#
# **Let each rank read only its own rows of the file.** A model of transformers does so in
# `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...))`. Any other model you build on the
# meta device, where tensors have no memory, then shard, then fill from the file.

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

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
# The drawing shows what four ranks hold at the worst moment of loading, apart from the tensor that is on its
# way. A column is a rank, and each colour is a quarter of the rows of every tensor. In the end each rank needs
# only its own quarter: all other colour has to fit for a moment, and is then thrown away. (In the middle, rank 0
# needs its quarter beside the complete model.) Three ways need no more than a shard. Which is yours?
#
# | your model | your way | the cost |
# |:--|:--|:--|
# | of transformers (run with 5.23) | `from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=world))`: it comes sharded, with another `dtype=` too | transformers chooses the units and the mesh |
# | of transformers, your own units; safetensors in the dtype that you train in | `from_pretrained(folder)`, then `fully_shard` (FSDP2), which moves one unit after the other to the GPU | on GPUs, each rank reads the complete file |
# | any other | meta, `fully_shard`, `load_pretrained(folder, model)` | the file must be readable by parts, as safetensors is |
#
# For the first two rows, only [the chart](#The-memory-that-each-way-takes) remains to be read; the rest of the lesson
# shows the third and its traps.

# %% tags=["card"]
lesson.card(
    12,
    learn="build a model of any size without memory, load it into shards, and see that nothing is missing",
    needs="[lesson 1](01_transformer_wrapper.ipynb)",
    ranks="4 on the CPU, because host memory is measured (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 20, 24),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It loads the same file in two ways: into a
# model that every rank has built completely (the left panel), and into one that was built on meta (the right
# panel). `load_pretrained` of `fsdp_utils` does all that is left to do after sharding. You need not adopt it:
# [below](#Which-rows-are-mine?), five lines of PyTorch and safetensors do the same for this model.
#
# ```python
# import tempfile
#
# import torch
# import torch.distributed as dist
# from safetensors.torch import load_file
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# from fsdp_utils import load_pretrained
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))     # without it a Mac would take its GPU
# config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
# folder = [tempfile.mkdtemp()]                                 # a folder that every rank can see
# dist.broadcast_object_list(folder, src=0)
# if dist.get_rank() == 0:
#     torch.manual_seed(0)
#     LlamaForCausalLM(config).save_pretrained(folder[0])       # stands for the checkpoint that you have
# dist.barrier()
#
# shards = {}
# for place in ("cpu", "meta"):
#     with torch.device(place):
#         model = LlamaForCausalLM(config)                      # on meta: shapes, no memory
#     if place == "cpu":
#         model.load_state_dict(load_file(f"{folder[0]}/model.safetensors"))
#     held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
#     for part in [*model.model.layers, model]:
#         fully_shard(part, mesh=mesh)
#     if place == "meta":
#         load_pretrained(folder[0], model)                     # on all ranks: each reads its own rows
#     shards[place] = [p.to_local().clone() for p in model.parameters()]
#     after = sum(shard.nbytes for shard in shards[place])
#     optimizer = torch.optim.AdamW(model.parameters())         # afterwards: load_pretrained makes new ones
#     torch.manual_seed(1 + dist.get_rank())                    # other samples on each rank
#     ids = torch.randint(64, (4, 30), device=device)
#     loss = model(input_ids=ids, labels=ids).loss
#     loss.backward()
#     optimizer.step()
#     if dist.get_rank() == 0:
#         print(f"on {place}: {held / 2**20:.2f} MiB before sharding, {after / 2**20:.2f} after; loss {loss:.3f}")
# if dist.get_rank() == 0:
#     print("both ways loaded the same shards:", all(map(torch.equal, *shards.values())))
# dist.destroy_process_group()
# ```
# ```text
# on cpu: 1.03 MiB before sharding, 0.26 after; loss 4.181
# on meta: 0.00 MiB before sharding, 0.26 after; loss 4.181
# both ways loaded the same shards: True
# ```
#
# The first number is what rank 0 holds of the parameters before `fully_shard`: the complete model if it was
# built on the CPU, nothing if it was built on meta. The second is a quarter of the model either way. The last line
# compares rank 0's shards, bit by bit, as they were loaded.
#
# ## Shapes without memory
#
# A tensor on the **meta device** has a shape and a dtype, but no memory and so no values. The constructor of
# a model runs as usual, only nothing is allocated or computed. So this notebook can build a model of 405 billion
# parameters. In the table, look at the last column: a complete float32 copy for each of a host's 8 ranks.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(device="cpu", preload=["transformers.models.llama.modeling_llama"])    # slow to import

# %% tags=["need"]
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {                                        # from each model's config.json, in the order of `names`
    "Llama 2 7B": (4096, 11008, 32, 32, 32, 32000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32000),
    "Llama 3.1 405B": (16384, 53248, 126, 128, 8, 128256),
}
names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
names += ("vocab_size",)
before, rows = psutil.Process().memory_info().rss, []
for name, shape in SHAPES.items():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(names, shape))))
    parameters = sum(p.numel() for p in model.parameters())
    rows.append([name, f"{parameters / 1e9:.1f}", round(4 * parameters / 2**30), round(32 * parameters / 2**30)])
assert psutil.Process().memory_info().rss - before < 2**29
Table(["model", "billions of parameters", "GiB in float32", "GiB if each of 8 ranks loads it"], rows)

# %% [markdown]
# Building all three has cost this process less than half a GiB, for the Python objects of the modules.
#
# ## Memory without values, and a trap
#
# A tensor on meta cannot be trained, so the shards need memory. `model.to_empty(device=...)` allocates it,
# and leaves in it whatever was there before. After `fully_shard` a parameter is a **DTensor**: its `shape` is
# the complete one, but `to_empty` allocates only this rank's shard, which `parameter.to_local()` returns.
# `to_empty` does the same for every **buffer**, a tensor that belongs to the model but is not trained.
#
# Then the values have to come. In the next cells rank 0 reads the file, and `set_model_state_dict` with
# `broadcast_from_rank0=True` sends one tensor after the other, of which each rank keeps its rows. To see what is
# missing afterwards, we make PyTorch fill memory without values with NaN, and count. The file holds a small Llama;
# a folded cell has trained it to write dates as numbers, and defines `test_loss(model)`, its loss on test data.

# %%
# %%ranks
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from fsdp_utils import load_pretrained

rank, world = dist.get_rank(), dist.get_world_size()

# %% jupyter={"source_hidden": true}
# %%ranks
import tempfile
import warnings
from pathlib import Path

import transformers

from fsdp_utils.lessons import tasks

warnings.filterwarnings("ignore", "DTensor random operators")    # it warns on the CPU: see random values
transformers.utils.logging.disable_progress_bar()
place = [tempfile.TemporaryDirectory() if rank == 0 else None]
shared = [place[0].name if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder, task = Path(shared[0]), tasks.dates_llama()
if rank == 0:
    learner = task.build()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3)
    for step in range(40):
        learner(**task.batch(step, size=12)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learner.save_pretrained(folder / "dates")
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4096)).save_pretrained(folder / "larger")
dist.barrier()

@torch.no_grad()
def test_loss(model):
    return model(**task.test).loss.item()

# %% tags=["trap"]
# %%ranks
def by_block(model):
    for part in [*model.model.layers, model]:
        fully_shard(part)
    return model


def on_meta(name):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / name))
    return by_block(model)


def send(model, name, **options):                                # call it on ALL ranks
    state = load_file(folder / name / "model.safetensors") if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **options)
    return set_model_state_dict(model, state, options=options)


def nan(tensors):
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return f"{sum(bool(t.isnan().any()) for t in local)} of {len(local)}"


torch.use_deterministic_algorithms(True)                         # fills empty memory with NaN
model = on_meta("dates")
model.to_empty(device="cpu")
print(f"to_empty: NaN in {nan(model.parameters())} parameters, {nan(model.buffers())} buffers")
send(model, "dates")                                             # no error: every key is there
print(f"loaded:   NaN in {nan(model.parameters())} parameters, {nan(model.buffers())} buffers")
torch.use_deterministic_algorithms(False)
print("not in the file:", ", ".join(n for n, _ in model.named_buffers() if n not in model.state_dict()))

# %% [markdown]
# After `to_empty` all 57 parameters and both buffers are NaN: nothing has a value yet. Loading has filled the
# parameters, raised no error, and left both buffers as they were.
#
# These two are frequencies of the rotary position embedding, which the constructor would have computed. They are
# registered with `persistent=False`, so they are in no file and in no `state_dict`, and no check for missing keys
# finds them.
#
# NaN would be lucky, because the loss would be NaN at once. Memory fresh from the operating system is full of
# zeros instead, and on a GPU anything may be there. So we set both buffers to zero and compare `test_loss` with
# that of a model that was loaded the ordinary way:

# %% tags=["zeros", "nbval-ignore-output"]
# %%ranks
right = LlamaForCausalLM.from_pretrained(folder / "dates")
for buffer in model.buffers():
    buffer.zero_()
losses = {"right": test_loss(right), "frequencies of zero": test_loss(model)}
print({name: round(loss, 1) for name, loss in losses.items()})
assert losses["frequencies of zero"] > 1.1 * losses["right"]

# %% [markdown]
# The second loss is too high but not absurd: you would think that the model needs more training. With frequencies
# of zero nothing is rotated, so attention cannot tell how far apart two tokens are. It happens to experts: the
# [Distributed Training Guide](https://github.com/LambdaLabsML/distributed-training-guide) had this fault in its
# FSDP chapter from August 2024 to October 2025.
#
# The cure is to compute such buffers **after `to_empty` and before loading**: earlier there is no memory for them,
# and loading then overwrites everything that is in the file. So it does no harm to initialise a whole module,
# though random numbers for billions of parameters, drawn to be overwritten, cost time. What computes the buffers?
#
# - A model of transformers 5 has `model._init_weights(module)`. It initialises the module's own parameters
#   and the buffers that it knows, among them rotary frequencies.
# - A module of your own needs a method `reset_parameters`, called by its constructor and again by you. FSDP1
#   calls it on modules that are on meta, and `load_pretrained` on modules with unsaved buffers. Here is one:

# %%
# %%ranks
class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.register_buffer("rates", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):                                  # everything that __init__ would have computed
        nn.init.ones_(self.weight)
        self.rates.copy_(0.5 ** torch.arange(8.0))


with torch.device("meta"):
    module = Decay()
module.to_empty(device="cpu").reset_parameters()
print(module.rates.tolist()[:4])

# %% [markdown]
# ## Your turn 1 · Before you load
#
# **Write `prepare(model)`**, which makes a model on meta ready to be loaded. The model is a Llama, sharded by
# block. Your function gives it memory on `"cpu"` and computes all buffers with `persistent=False`; it returns
# nothing. The turn then loads the model's file with `send`, and compares buffers and loss with those of a model
# that was built the ordinary way.
#
# Do not rely on names: this Llama has a second rotary embedding elsewhere, and a `BatchNorm1d`, whose buffers are
# persistent and so in the file.
#
# <details><summary>Hint</summary>
#
# `model.modules()` gives all modules; `module.buffers(recurse=False)` gives the buffers of one module itself.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import at_most, exactly, turn

def with_extras(model):
    model.second_rotary = type(model.model.rotary_emb)(model.config)
    model.statistics = nn.BatchNorm1d(8)
    return model

def unsaved(model):
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}

right_loss, right_buffers = losses["right"], unsaved(with_extras(right))
if rank == 0:
    right.save_pretrained(folder / "extras")
dist.barrier()

@turn(1, {
    "tensors still on meta": exactly(0, "Some tensors have no memory: call `model.to_empty(device=\"cpu\")`."),
    "unsaved buffers with wrong values": exactly(
        0,
        "Some buffers hold what `to_empty` left: compute them after `to_empty`, in every module that has one.",
    ),
    "the loss is that of the saved model": exactly(True, "The loss is not that of the saved model."),
}, returns=False)
def score_prepare(prepare):
    with torch.device("meta"):
        model = with_extras(LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "dates")))
    by_block(model)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            prepare(model)
    finally:
        torch.use_deterministic_algorithms(False)
    meta = sum(t.is_meta for t in [*model.parameters(), *model.buffers()])
    if meta:
        return {"tensors still on meta": meta}
    send(model, "extras")
    wrong = sum(not torch.equal(buffer, right_buffers[name]) for name, buffer in unsaved(model).items())
    loss = test_loss(model)
    return {
        "tensors still on meta": 0,
        "unsaved buffers with wrong values": wrong,
        "the loss is that of the saved model": None if wrong else abs(loss - right_loss) < 1e-3,
    }

# %%
# %%turn 1
def prepare(model):
    return None                                 # your lines here: memory on "cpu", then the unsaved buffers


# %% tags=["solution"] turn=1
def prepare(model):
    model.to_empty(device="cpu")
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)

# %% tags=["right"] turn=1
def prepare(model):
    model.to_empty(device=torch.device("cpu"))
    for module in model.modules():              # all of them: loading overwrites what is in the file
        model._init_weights(module)

# %% tags=["right"] turn=1
def prepare(model):
    model.to_empty(device="cpu").apply(model._init_weights)
    return model

# %% tags=["right"] turn=1
def prepare(model):
    model.to_empty(device="cpu")
    for name in [n for n, _ in model.named_buffers() if n not in model.state_dict()]:
        model._init_weights(model.get_submodule(name.rpartition(".")[0]))

# %% tags=["wrong"] turn=1 says="what `to_empty` left"
def prepare(model):
    model.to_empty(device="cpu")

# %% tags=["wrong"] turn=1 says="in every module that has one"
def prepare(model):                             # one module by its name
    model.to_empty(device="cpu")
    model._init_weights(model.model.rotary_emb)

# %% tags=["wrong"] turn=1 says="compute them after `to_empty`"
def prepare(model):                             # the wrong order
    model.apply(model._init_weights)
    model.to_empty(device="cpu")

# %% tags=["wrong"] turn=1 says="have no memory"
def prepare(model):
    for module in model.modules():
        model._init_weights(module)

# %% [markdown]
# ## The memory that each way takes
#
# Now we measure the drawing and the table, with a file of 186 MiB. A folded function, `peak_of`, watches the memory
# that a process owns and returns its largest growth as a share of the model. Pages of a **mapped** file, whose bytes
# the system reads as they are touched, do not count: all processes of a host share one copy, and the system can
# drop it when memory is short.

# %% jupyter={"source_hidden": true}
# %%ranks
import ctypes
import gc
import threading

import psutil

whole = (folder / "larger" / "model.safetensors").stat().st_size

def own():
    counted = psutil.Process().memory_info()
    return counted.rss - getattr(counted, "shared", 0)           # shared: pages of files, on Linux

def peak_of(way):
    """The most own memory that a way adds, in complete models."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)                                      # what was freed goes back to the system
    dist.barrier()
    before, seen, over = own(), [], threading.Event()

    def watch():
        while not over.wait(0.003):
            seen.append(own())

    thread = threading.Thread(target=watch)
    thread.start()
    way()
    over.set()
    thread.join()
    return (max(seen) - before) / whole

# %% tags=["loading"]
# %%ranks
def every_rank_loads():
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "larger"))
    model.load_state_dict(load_file(folder / "larger" / "model.safetensors"))
    return by_block(model)


def rank_0_sends(convert=False):
    model = on_meta("larger")
    model.to_empty(device="cpu").model.rotary_emb.apply(model._init_weights)
    state = load_file(folder / "larger" / "model.safetensors") if rank == 0 else {}
    if convert:
        state = {name: tensor.clone() for name, tensor in state.items()}   # as if to another dtype
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


larger, config = folder / "larger", DistributedConfig(fsdp_size=world)
ways = {
    "every rank loads": every_rank_loads,
    "from_pretrained, fully_shard": lambda: by_block(LlamaForCausalLM.from_pretrained(larger)),
    "distributed_config": lambda: LlamaForCausalLM.from_pretrained(larger, distributed_config=config),
    "rank 0 sends, mapped": rank_0_sends,
    "rank 0 sends, converted": lambda: rank_0_sends(convert=True),
    "each rank reads": lambda: load_pretrained(larger, on_meta("larger")),   # instead of to_empty, buffers and send
}
if torch.accelerator.is_available():
    del ways["distributed_config"]                               # it would take the GPU
peaks = {name: peak_of(way) for name, way in ways.items()}

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
found = ranks.get("peaks")
world = len(found)
shard = 1.3 / world + 0.15
assert min(one["every rank loads"] for one in found) > 0.9
assert max(max(one["each rank reads"], one.get("distributed_config", 0)) for one in found) < shard
if hasattr(psutil.Process().memory_info(), "shared"):            # Linux tells pages of files apart
    assert max(one["from_pretrained, fully_shard"] for one in found) < shard
    assert found[0]["rank 0 sends, mapped"] < 0.9
sent = [one["rank 0 sends, converted"] for one in found]
assert sent[0] > 0.9 + 1 / world > max(sent[1:]) + 0.3
names, (fig, panels) = list(found[0]), plots.figure(2, width=9.0, height=2.9)
for axes, title, of in zip(panels, ("rank 0", "the other ranks"), (found[:1], found[1:])):
    for row, name in enumerate(names):
        peak = max(one[name] for one in of)
        axes.barh(row, peak, height=0.6, color=plots.RANK_COLORS[0])
        kept = ": pages of the file" if name == "distributed_config" else ""
        axes.text(max(peak, 1 / world) + 0.02, row, f"{peak:.2f}{kept}", va="center")
    axes.axvline(1 / world, color=plots.INK, linestyle="--", linewidth=0.8)
    axes.set(title=f"{title}: own memory at the peak", xlabel="complete models; dashed: one shard", xlim=(0, 1.5))
    axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
    axes.invert_yaxis()
plots.show(fig, alt="Peak of a process's own memory in complete models, for six ways to load a model.")

# %% [markdown]
# The dashed line is a shard, 0.25 of the model. From top to bottom:
#
# - *Every rank loads*: each rank owns a complete model, and on one host these add up.
# - *`from_pretrained`, then `fully_shard`*: the parameters are pages of the mapped file, out of which `fully_shard`
#   copies the shard. With another `dtype=` each rank owns a converted copy of the complete model; after
#   `.to("cuda")` its GPU holds all of it.
# - *`distributed_config`*: transformers cuts while it reads, even if it converts. The bar is near 0, because
#   the shards are still pages of the file; a rank owns them once the optimizer has changed them. You get
#   transformers' units (here the embedding, each block, and the final norm with the head), a mesh of all ranks, and
#   mixed precision only as `fsdp_mixed_precision=True`: parameters in bfloat16, reductions in float32.
# - *Rank 0 sends*: while the file is mapped, rank 0 owns little. If it converts the tensors, or loads a pickle
#   that is not mapped, it owns a complete model beside its shard. The others hold a shard and a tensor or two, on
#   the GPU if the shards are there.
# - *Each rank reads*: nobody owns more than a shard and a small buffer, no weights are sent, and each row is
#   read once. All ranks must see the file, and it must be readable by parts: safetensors, or a checkpoint of
#   `torch.distributed.checkpoint` ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)).
#   `load_pretrained(..., cast=True)` also converts, for example bfloat16 to float32.
#
# ## Which rows are mine?
#
# `fully_shard` cuts dim 0 as `torch.chunk` does: each rank gets `rows / ranks`, rounded up, until none are left.
# Look at the last rank, if five rows are cut for four ranks:

# %%
# %%ranks
small = fully_shard(nn.Linear(8, 5))
print(f"Linear(8, 5): {tuple(small.weight.to_local().shape)} here,", end=" ")
print(f"and torch.chunk gives {len(torch.empty(5, 8).chunk(world))} pieces for {world} ranks")

# %% [markdown]
# Rank 3 holds a shard of shape (0, 8). This is right, but `full.chunk(world)` gives three pieces only, so
# `full.chunk(world)[3]` raises an `IndexError` on that rank, while the others go on into the next collective
# and wait. A slice is safe, because beyond the end it is empty. On a mesh of one dimension the right panel
# of the drawing is then five lines of PyTorch and safetensors (with HSDP or tensor parallel the rows are others,
# and `load_pretrained` finds them):

# %%
# %%ranks
model = on_meta("dates")
model.to_empty(device="cpu")
model._init_weights(model.model.rotary_emb)                      # the only module with unsaved buffers
with safe_open(folder / "dates" / "model.safetensors", "pt") as file, torch.no_grad():
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // world)                   # divided and rounded up
        part = file.get_slice(name)[rank * rows : (rank + 1) * rows]
        parameter.to_local().copy_(part)
print(f"read by hand: the loss is right: {abs(test_loss(model) - losses['right']) < 1e-3}")

# %% [markdown]
# `load_pretrained` adds what a real checkpoint needs: several files, names and shapes compared before anything is
# changed, buffers, and the same error on all ranks where one rank fails.
#
# ## Your turn 2 · From rank 0, one tensor at a time
#
# Now only rank 0 can see the checkpoint, and it is bfloat16, while the model trains in float32.
#
# **Write `load(model, read)`**, which fills the shards so that *no* rank, not even rank 0, holds more than a
# few complete tensors at a time. You are given
#
# - `model`: sharded by block, with memory and without values; one of its parameters has five rows;
# - `read(name)`: returns the complete tensor of that name, in bfloat16; only rank 0 may call it;
# - `rank`, `world` and `dist`, as in all cells above. Autograd is off.
#
# Return nothing. The turn compares every shard with its rows of the file, and counts the bytes of all tensors that
# are alive while your function runs: at most a quarter of the model, beside the shards.
#
# <details><summary>Hint</summary>
#
# Every rank goes through `model.named_parameters()` in the same order. Rank 0 has the complete tensor, the
# others an empty one, which `dist.broadcast(tensor, src=0)` fills. Both need the same dtype: rank 0's
# `.to(parameter.dtype)`, and `torch.empty(parameter.shape, dtype=parameter.dtype)` on the others.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_utils.lessons.meter import Meter

def with_five_rows(model):
    model.few = nn.Linear(8, 5, bias=False)
    return model

FIVE_ROWS = torch.arange(40.0).reshape(5, 8)

@turn(2, {
    "parameters with values that the file lacks": exactly(
        0,
        "Some values stand nowhere in the file: a shard was not filled, or rank 0 sent bfloat16 and the others "
        "received into float32. Convert on rank 0, and give `torch.empty` the same dtype.",
    ),
    "parameters with rows of another rank": exactly(
        0, "Some shards hold other values than their rows of the file: which rows are this rank's?"
    ),
    "held beside the shards, % of the model": at_most(
        25, "A rank holds many tensors at once: read, send and let go of one before the next."
    ),
    "reads on ranks other than 0": exactly(0, "Only rank 0 sees the file; the others get tensors from rank 0."),
}, returns=False)
def score_load(load):
    with torch.device("meta"):
        model = with_five_rows(LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "dates")))
    by_block(model).to_empty(device="cpu")
    reads = []

    def read(name):
        reads.append(name)
        with _disable_current_modes(), safe_open(folder / "dates" / "model.safetensors", "pt") as file:
            tensor = FIVE_ROWS if name.startswith("few") else file.get_tensor(name)
        return tensor.to(torch.bfloat16, copy=True)                # under the meter, so that it counts

    with Meter(model.parameters()) as meter, torch.no_grad():
        load(model, read)
    whole = {**load_file(folder / "dates" / "model.safetensors"), "few.weight": FIVE_ROWS}
    nowhere, others = 0, 0
    for name, p in model.named_parameters():
        rows, full = -(-p.shape[0] // world), whole[name].bfloat16().float()
        nowhere += not torch.isin(p.to_local(), full).all()
        others += not torch.equal(p.to_local(), full[rank * rows : (rank + 1) * rows])
    held = max(meter.tensor_bytes, default=0) - meter.held_bytes
    return {
        "parameters with values that the file lacks": nowhere,
        "parameters with rows of another rank": None if nowhere else others,
        "held beside the shards, % of the model": round(100 * held / sum(t.nbytes for t in whole.values())),
        "reads on ranks other than 0": len(reads) if rank else 0,
    }

# %%
# %%turn 2
def load(model, read):
    return None                                 # your lines here: every rank goes through the parameters


# %% tags=["solution"] turn=2
from torch.distributed.tensor import distribute_tensor

def load(model, read):
    for name, parameter in model.named_parameters():
        if rank == 0:
            full = read(name).to(parameter.dtype)
        else:
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))

# %% tags=["right"] turn=2
def load(model, read):
    for name, parameter in model.named_parameters():
        full = read(name).float() if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        rows = -(-len(full) // world)
        parameter.to_local().copy_(full[rank * rows : (rank + 1) * rows])

# %% tags=["right"] turn=2
def load(model, read):
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape, dtype=torch.bfloat16)
        dist.broadcast(full, src=0)             # half the bytes; copy_ converts
        pieces = full.chunk(world)
        if rank < len(pieces):
            parameter.to_local().copy_(pieces[rank])

# %% tags=["right"] turn=2
def load(model, read):                          # torch's own, one name at a time
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for name, _ in model.named_parameters():
        set_model_state_dict(model, {name: read(name)} if rank == 0 else {}, options=options)

# %% tags=["wrong"] turn=2 says="give `torch.empty` the same dtype"
from torch.distributed.tensor import distribute_tensor
def load(model, read):                          # bfloat16 into float32: no error
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))

# %% tags=["wrong"] turn=2 says="which rows are this rank's"
def load(model, read):                          # as if every rank's shard were as long as this one
    for name, parameter in model.named_parameters():
        full = read(name).float() if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        local = parameter.to_local()
        local.copy_(full[rank * len(local) : (rank + 1) * len(local)])

# %% tags=["wrong"] turn=2 says="holds many tensors at once"
def load(model, read):                          # rank 0 reads everything first
    state = {name: read(name) for name, _ in model.named_parameters()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)

# %% tags=["wrong"] turn=2 says="Only rank 0 sees the file"
def load(model, read):                          # each rank reads for itself
    for name, parameter in model.named_parameters():
        full = read(name)
        rows = -(-len(full) // world)
        parameter.to_local().copy_(full[rank * rows : (rank + 1) * rows])

# %% tags=["wrong"] turn=2 says="A rank would wait for ever: broadcast"
def load(model, read):                          # rank 0 sends, and nobody receives
    for name, parameter in model.named_parameters():
        if rank == 0:
            dist.broadcast(read(name), src=0)

# %% [markdown]
# The solution's `distribute_tensor` cuts on rank 0 and sends each rank its own rows only; `dist.broadcast`
# sends all rows to all ranks and is as right. Were the dtypes not equal, gloo would raise nothing, and the others
# would hold wrong numbers.
#
# ## No checkpoint: random values
#
# To train from scratch, keep the order and initialise every module instead of loading
# (`model.apply(model._init_weights)`, or your own `reset_parameters`). The trap is the seed, because each rank
# draws the numbers of its own shard. Here two ranks compare the rows that they drew:

# %%
# %%ranks
for how, seed in {"the same seed": 0, "a seed per rank": rank}.items():
    with torch.device("meta"):
        linear = nn.Linear(8, 8)
    fully_shard(linear).to_empty(device="cpu")
    torch.manual_seed(seed)
    linear.reset_parameters()
    first, second = linear.weight.full_tensor().chunk(world)[:2]
    print(f"{how}: ranks 0 and 1 drew equal rows: {torch.equal(first, second)}")

# %% [markdown]
# On CPU ranks, equal seeds give equal rows: the weight is one piece, repeated. Give each *shard* a seed of its own
# (under HSDP, ranks that hold the same rows need the same one). On a GPU set one seed on all ranks: by torch 2.13's
# source, DTensor then takes each shard's numbers from its own place in one common stream.
#
# ## When it goes wrong
#
# The quietest mistake is `strict=False` with a file of other names, for example one saved from DDP, with `module.`
# before each name. We fill a model with sevens, load such a file, and count the parameters that are still seven:

# %% tags=["refused"]
# %%ranks
if rank == 0:
    (folder / "renamed").mkdir(exist_ok=True)
    state = {f"module.{n}": t for n, t in load_file(folder / "dates" / "model.safetensors").items()}
    save_file(state, folder / "renamed" / "model.safetensors")
model = on_meta("dates").to_empty(device="cpu")
for parameter in model.parameters():
    nn.init.constant_(parameter, 7.0)
keys = send(model, "renamed", strict=False)
untouched = sum(bool((p.to_local() == 7).all()) for p in model.parameters())
print(f"strict=False: {untouched} parameters untouched, {len(keys.missing_keys)} missing keys reported")

# %% [markdown]
# Nothing was loaded, and no key was reported as missing: with `broadcast_from_rank0`, torch puts the model's own
# values in the place of what the file lacks. With `strict=True`, the default, every rank raises
# `Missing key(s) in state_dict`.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | a loaded model is as bad as an untrained one, no error | no name has matched, under `strict=False` with `broadcast_from_rank0` | leave `strict=True`, rename the keys |
# | the loss is NaN or too high from the first step | a buffer that no file holds was never computed | turn 1; compare with a known loss |
# | `Cannot copy out of meta tensor; no data!` | `.to(device)` on a model on meta; or, in the forward, a buffer that is still there | `to_empty`, buffers, load |
# | a head that shared the embedding's tensor is no longer tied to it | `to_empty` before `fully_shard` makes a tensor for each of the two names | shard first, both in one unit, or tie again before you shard |
# | the host kills a rank while it loads | every rank loads the complete model | the rule below |
# | a rank hangs in loading | `set_model_state_dict` under `if rank == 0` | call it on ALL ranks, on the others with `{}` |
#
# If the GPU runs out of memory in the first step, [lesson 14](14_plan_before_you_rent.ipynb) computes what does not
# fit. CPU offload (`CPUOffloadPolicy`) trades time for memory ([how much](answers.md#what-does-cpu-offload-cost)).
#
# ## The rule
#
# A model of transformers: `from_pretrained` with `distributed_config`; or, for units of your own and a file in the
# dtype that you train in, `from_pretrained`, then `fully_shard`. Any other: meta, shard, `to_empty`, buffers, load,
# in this order and with `strict=True`; `load_pretrained` does the last three. Build the optimizer afterwards, and
# compare one loss with a known one.
#
# [← lesson 11](11_rate_limiter.ipynb) · [lesson 13 →](13_from_fsdp1_to_fsdp2.ipynb)

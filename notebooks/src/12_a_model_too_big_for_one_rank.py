# %% [markdown]
# # 12 · A model too big for one rank
#
# A model of 70 billion parameters takes 257 GiB in float32. If each of the 8 ranks of a host builds and loads
# all of it, the host needs 2 TiB of memory before FSDP has cut anything. How do the shards get their values,
# if no rank can hold the complete model? **Build the model on the meta device, where tensors have no memory.
# Shard it, allocate memory for the shards, compute the buffers that no file holds, then let each rank read
# its own rows.**

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
# The drawing shows what four ranks hold at the worst moment of loading, apart from the one tensor that is on
# its way. A column is a rank, and each colour is a quarter of the model. In the end each rank needs only its
# own quarter: all other colour has to fit for a moment, and is then thrown away.
#
# You need this lesson when the left panel does not fit: one complete model for each rank of a host exceeds the
# host's memory. If it fits, build and load as you always did, then call `fully_shard` (FSDP2, as everywhere in
# this lesson). Leave the model on the CPU until then, because `fully_shard` moves one unit after the other to
# the GPU and cuts it there; after `model.to("cuda")` the GPU holds all of it at once.

# %% tags=["card"]
lesson.card(
    12,
    learn="build a model of any size without memory, load it into shards, and see that nothing is missing",
    needs="[lesson 1](01_transformer_wrapper.ipynb)",
    ranks="4 on the CPU, because host memory is measured (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 19, 25),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It loads the same file in two ways:
# into a model that every rank has built completely (the left panel), and into one that was built on meta (the
# right panel). `load_pretrained` of `fsdp_utils` does all that is left to do after sharding. Further below you
# see each of its steps in plain PyTorch.
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
#     shards = sum(p.to_local().nbytes for p in model.parameters())
#     optimizer = torch.optim.AdamW(model.parameters())         # after loading: the parameters are new objects
#     torch.manual_seed(1 + dist.get_rank())                    # other samples on each rank
#     ids = torch.randint(64, (4, 30), device=device)
#     loss = model(input_ids=ids, labels=ids).loss
#     loss.backward()
#     optimizer.step()
#     if dist.get_rank() == 0:
#         print(f"on {place}: {held / 2**20:.2f} MiB before sharding, {shards / 2**20:.2f} after; loss {loss:.3f}")
# dist.destroy_process_group()
# ```
# ```text
# on cpu: 1.03 MiB before sharding, 0.26 after; loss 4.181
# on meta: 0.00 MiB before sharding, 0.26 after; loss 4.181
# ```
#
# The first number is what rank 0 holds of the parameters before `fully_shard`: the complete model, 1.03 MiB,
# if it was built on the CPU, and nothing if it was built on meta. The second number is the same for both: a
# quarter of the model on each of four ranks. The loss on rank 0's samples shows that both ways loaded the
# same weights. Look at its third decimal: the model is untrained, so *any* initial weights give about
# ln 64 = 4.16, and seeds 1 to 4 in place of 0 gave 4.169 to 4.176.
#
# ## Shapes without memory
#
# A tensor on the **meta device** has a shape and a dtype, but no memory and so no values. The constructor of
# a model runs as usual, only nothing is allocated and nothing is computed. That is why this notebook can
# build a model of 405 billion parameters. In the table, look at the last column: what a host needs if each of
# its 8 ranks holds a complete float32 copy.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(device="cpu", preload=["transformers.models.llama.modeling_llama"])    # slow to import

# %% tags=["need"]
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {                                        # as in their config.json; layers, heads, key-value heads
    "Llama 2 7B": (4096, 11008, 32, 32, 32, 32000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32000),
    "Llama 3.1 405B": (16384, 53248, 126, 128, 8, 128256),
}
names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
names += ["num_key_value_heads", "vocab_size"]
before, rows = psutil.Process().memory_info().rss, []
for name, shape in SHAPES.items():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(names, shape))))
    parameters = sum(p.numel() for p in model.parameters())
    rows.append([name, f"{parameters / 1e9:.1f}", round(4 * parameters / 2**30), round(32 * parameters / 2**30)])
assert psutil.Process().memory_info().rss - before < 2**29
Table(["model", "billions of parameters", "GiB in float32", "GiB if each of 8 ranks loads it"], rows)

# %% [markdown]
# Building all three models has cost this process less than half a GiB, for the Python objects that describe
# the modules. In bfloat16 the last two columns are half as large: 70 billion parameters then still need 1 TiB.
#
# ## Memory without values, and a trap
#
# On meta there is nothing to train, so the shards need memory. `model.to_empty(device=...)` allocates it,
# and leaves in it whatever was there before. After `fully_shard` a parameter is a **DTensor**: its `shape` is
# the complete one, but `to_empty` allocates only this rank's shard, which `parameter.to_local()` returns.
# `to_empty` does the same for every **buffer**, a tensor that belongs to the model but is not trained.
#
# Then the values have to come. The next cells do what most tutorials do: rank 0 reads the file, and
# `set_model_state_dict` with `broadcast_from_rank0=True` sends one tensor after the other, of which each rank
# keeps its rows. To see what is still missing afterwards, we make PyTorch fill memory without values with
# NaN, and count. The file holds a small Llama; a folded cell has trained it to write dates as numbers.

# %%
# %%ranks
import tempfile
import threading
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import load_pretrained
from fsdp_utils.lessons import tasks

rank, world = dist.get_rank(), dist.get_world_size()

# %% jupyter={"source_hidden": true}
# %%ranks
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
# These two hold the frequencies of the rotary position embedding. The constructor computes them from the
# config, but on meta nothing is computed. The model registers them with `persistent=False`, so they are in
# no file and in no `state_dict`, and no check for missing keys can find them.
#
# NaN would be lucky, because the loss would be NaN in the first step. Memory that comes fresh from the
# operating system is full of zeros instead, and on a GPU anything may be there. So we set both buffers to
# zero and compare the loss on test data with that of a model that was loaded the ordinary way:

# %% tags=["zeros", "nbval-ignore-output"]
# %%ranks
right = LlamaForCausalLM.from_pretrained(folder / "dates")
for buffer in model.buffers():
    buffer.zero_()
losses = {"right": test_loss(right), "frequencies of zero": test_loss(model)}
print({name: round(loss, 1) for name, loss in losses.items()})
assert losses["frequencies of zero"] > 1.1 * losses["right"]

# %% [markdown]
# The second loss is too high, yet it looks like a loss: you would take this model for one that needs more
# training. With frequencies of zero nothing is rotated, so attention cannot tell how far apart two tokens
# are. It happens to experts: the
# [Distributed Training Guide](https://github.com/LambdaLabsML/distributed-training-guide) had this fault from
# January to October 2025.
#
# The cure is to compute such buffers **after `to_empty` and before loading**: before `to_empty` there is no
# memory for them, and loading afterwards overwrites everything that is in the file. You may therefore
# initialise whole modules, parameters and all. Who computes depends on the model:
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
# `rates` has the values that the constructor would have computed: 1, and half as much at each step.
#
# ## Your turn 1 · Before you load
#
# **Write `prepare(model)`**, which makes a model on meta ready to be loaded. The model is a Llama, sharded by
# block. Your function gives it memory on `"cpu"` and computes all buffers that no file holds; it returns
# nothing. The turn then loads the file with `send`, and compares buffers and loss with those of
# `from_pretrained`.
#
# So that one module's name is not enough, the model has two modules more: a second rotary embedding, and a
# `BatchNorm1d`, whose buffers are persistent.
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
    send(model, "dates", strict=False)
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
# ## Values: three ways, and the memory that they take
#
# Now we measure the drawing, with a file of 186 MiB. A folded function, `peak_of`, watches the memory that the
# operating system counts as the process's own, and returns its largest growth as a share of the model. Pages
# of a mapped file are not in it: the system keeps one copy of them for all processes of a host, and can drop
# it when memory is short.

# %% jupyter={"source_hidden": true}
# %%ranks
import ctypes
import gc

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


def from_pretrained():
    return by_block(LlamaForCausalLM.from_pretrained(folder / "larger"))


def rank_0_sends():
    model = on_meta("larger")
    model.to_empty(device="cpu").apply(model._init_weights)
    file = folder / "larger" / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def each_rank_reads():
    load_pretrained(folder / "larger", on_meta("larger"))        # instead of to_empty, buffers and send


ways = (every_rank_loads, from_pretrained, rank_0_sends, each_rank_reads)
peaks = {way.__name__: peak_of(way) for way in ways}

# %% tags=["nbval-ignore-output"]
found = ranks.get("peaks")
world = len(found)
every, mapped, sends, reads = found[0]
assert min(one[every] for one in found) > 0.9
if hasattr(psutil.Process().memory_info(), "shared"):            # Linux tells pages of files apart
    assert max(one[mapped] for one in found) < 1.3 / world + 0.15
assert found[0][sends] > 0.9 + 1 / world > max(one[sends] for one in found[1:]) + 0.3
assert max(one[reads] for one in found) < 1.3 / world + 0.15
plots.amounts({
    "rank 0": {way: {"own memory at the peak": found[0][way]} for way in found[0]},
    "other ranks": {way: {"own memory at the peak": max(one[way] for one in found[1:])} for way in found[0]},
}, unit="complete models", alt="Peak of a process's own memory, for four ways to load a model.")

# %% [markdown]
# From top to bottom, where a shard is 0.25 of the model:
#
# - *Every rank loads*: each rank owns a complete model, and on one host these add up.
# - *`from_pretrained`* of transformers 5, on the CPU and in the dtype of a safetensors file, copies nothing:
#   the parameters are pages of the mapped file, out of which `fully_shard` copies the shard. Where this applies
#   to you, stay with it. It ends where something is converted: with another `dtype=` each rank owns a
#   converted copy of the complete model, and with `.to("cuda")` its GPU holds all of it.
# - *Rank 0 sends*: rank 0 owns a complete model beside its shard, because here it copies each tensor, as it
#   must if they are converted or come from a pickle that is not mapped. (Without the `clone()` the mapped file
#   leaves rank 0 at a shard, too.) It sends the complete model to each other rank, one tensor at a time, so
#   they hold a shard and a tensor or two. `accelerate` calls this `fsdp_cpu_ram_efficient_loading`.
# - *Each rank reads*: nobody owns more than a shard and a small buffer, no weights are sent, and each row is
#   read once. The price is a file that every rank can see and that can be read by parts: safetensors here, or a
#   checkpoint of `torch.distributed.checkpoint`
#   ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)).
#
# If the file is bfloat16 and you train in float32, build the model in float32 and call
# `load_pretrained(..., cast=True)`: each rank converts its own part as it reads.
#
# ## Which rows are mine?
#
# To read its part, a rank has to know which rows it holds. `fully_shard` cuts dim 0 as `torch.chunk` does:
# each rank gets `rows / ranks`, rounded up, until none are left. Look at the last rank, if five rows are cut
# for four ranks:

# %%
# %%ranks
small = fully_shard(nn.Linear(8, 5))
print(f"Linear(8, 5): {tuple(small.weight.to_local().shape)} here,", end=" ")
print(f"and torch.chunk gives {len(torch.empty(5, 8).chunk(world))} pieces for {world} ranks")

# %% [markdown]
# Rank 3 holds a shard of shape (0, 8). This is right, but `full.chunk(world)` gives three pieces only, so
# `full.chunk(world)[3]` raises an `IndexError` on that rank, while the others go on into the next collective
# and wait. A slice is safe, because beyond the end it is empty. With it, the right panel of the drawing is
# five lines of PyTorch and safetensors:

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
# `load_pretrained` adds what a real checkpoint needs: several files, names and shapes that are compared before
# anything is changed, buffers, and the same error on all ranks where one rank fails.
#
# ## Your turn 2 · From rank 0, one tensor at a time
#
# Now only rank 0 can see the checkpoint, and the tensors have to be converted, so they cannot be mapped.
#
# **Write `load(model, read)`**, which fills the shards so that *no* rank, not even rank 0, holds more than a
# few complete tensors at a time. You are given
#
# - `model`: sharded by block, with memory and without values; one of its parameters has five rows;
# - `read(name)`: returns the complete tensor of that name; only rank 0 may call it;
# - `rank`, `world` and `dist`, as in all cells above. Autograd is off.
#
# Return nothing. The turn compares every shard with its rows of the file, and counts the bytes of all tensors
# that are alive while your function runs: at most a quarter of the model, beside the shards.
#
# <details><summary>Hint</summary>
#
# Every rank goes through `model.named_parameters()` in the same order. Rank 0 has the complete tensor, the
# others an empty one, `torch.empty(parameter.shape)`. `dist.broadcast(tensor, src=0)` fills it on all ranks.
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
    "parameters with wrong values": exactly(
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
        return tensor.clone()                   # under the meter, so that it counts

    with Meter(model.parameters()) as meter, torch.no_grad():
        load(model, read)
    with safe_open(folder / "dates" / "model.safetensors", "pt") as file:
        whole = {n: FIVE_ROWS if n.startswith("few") else file.get_tensor(n) for n, _ in model.named_parameters()}
    wrong = 0
    for name, p in model.named_parameters():
        rows = -(-p.shape[0] // world)
        wrong += not torch.equal(p.to_local(), whole[name][rank * rows : (rank + 1) * rows])
    held = max(meter.tensor_bytes, default=0) - meter.held_bytes
    return {
        "parameters with wrong values": wrong,
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
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))

# %% tags=["right"] turn=2
def load(model, read):
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        rows = -(-len(full) // world)
        parameter.to_local().copy_(full[rank * rows : (rank + 1) * rows])

# %% tags=["right"] turn=2
def load(model, read):
    for name, parameter in model.named_parameters():
        full = [read(name) if rank == 0 else torch.empty(parameter.shape)]
        dist.broadcast(full[0], src=0)
        pieces = full[0].chunk(world)
        if rank < len(pieces):
            parameter.to_local().copy_(pieces[rank])

# %% tags=["right"] turn=2
def load(model, read):                          # torch's own, one name at a time
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for name, _ in model.named_parameters():
        set_model_state_dict(model, {name: read(name)} if rank == 0 else {}, options=options)

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

# %% tags=["wrong"] turn=2 says="which rows are this rank's"
def load(model, read):                          # the first rows on every rank
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.to_local().copy_(full[: len(parameter.to_local())])

# %% tags=["wrong"] turn=2 says="A rank would wait for ever: broadcast"
def load(model, read):                          # rank 0 sends, and nobody receives
    for name, parameter in model.named_parameters():
        if rank == 0:
            dist.broadcast(read(name), src=0)

# %% tags=["wrong"] turn=2 says="mixed torch.Tensor and DTensor"
def load(model, read):                          # a complete tensor into a DTensor
    for name, parameter in model.named_parameters():
        full = read(name) if rank == 0 else torch.empty(parameter.shape)
        dist.broadcast(full, src=0)
        parameter.copy_(full)

# %% [markdown]
# The solution's `distribute_tensor` cuts on rank 0 and sends each rank its own rows only; `dist.broadcast`
# sends all rows to all ranks and is as right.
#
# ## No checkpoint: random values
#
# To train from scratch, keep the order and leave out loading: meta, shard, `to_empty`, then initialise every
# module (`model.apply(model._init_weights)`, or your own `reset_parameters`). The trap is the seed, because
# each rank draws the numbers of its own shard. The next cell initialises a sharded `Linear`, first with one
# seed on all ranks, then with a seed per rank, and compares the shards of ranks 0 and 1.

# %%
# %%ranks
warnings.filterwarnings("ignore", "DTensor random operators")    # torch warns, see below
for how, seed in {"the same seed": 0, "a seed per rank": rank}.items():
    with torch.device("meta"):
        linear = nn.Linear(8, 8)
    fully_shard(linear).to_empty(device="cpu")
    torch.manual_seed(seed)
    linear.reset_parameters()
    first, second = linear.weight.full_tensor().chunk(world)[:2]
    print(f"{how}: ranks 0 and 1 drew equal rows: {torch.equal(first, second)}")

# %% [markdown]
# On CPU ranks, equal seeds give equal rows: the weight is one piece, repeated. So give each rank a seed of its
# own here. On a GPU set the same seed on all ranks instead: by torch 2.13's source, DTensor then takes each
# shard's numbers from its own place in one common stream. On the CPU it only warns "DTensor random operators
# may not have complete support on cpu device mesh", which the cell hides.
#
# ## When it goes wrong
#
# The quietest mistake is `strict=False` with a file whose names are not those of the model, for example one
# that was saved from DDP and has `module.` before each name. We fill a model with sevens, load such a file,
# and count the parameters that are still seven:

# %% tags=["refused"]
# %%ranks
if rank == 0:
    (folder / "renamed").mkdir(exist_ok=True)
    state = load_file(folder / "dates" / "model.safetensors")
    save_file({f"module.{n}": t for n, t in state.items()}, folder / "renamed" / "model.safetensors")
dist.barrier()
model = on_meta("dates")
model.to_empty(device="cpu")
for parameter in model.parameters():
    nn.init.constant_(parameter, 7.0)
keys = send(model, "renamed", strict=False)
untouched = sum(bool((p.to_local() == 7).all()) for p in model.parameters())
print(f"strict=False: {untouched} parameters untouched, {len(keys.missing_keys)} missing keys reported")

# %% [markdown]
# Nothing was loaded, and no key was reported as missing: with `broadcast_from_rank0`, torch puts the model's
# own values in the place of what the file lacks. With `strict=True`, the default, the same call raises
# `Missing key(s) in state_dict` on every rank.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | a loaded model is as bad as an untrained one, no error | no name has matched, under `strict=False` with `broadcast_from_rank0` | leave `strict=True`, rename the keys |
# | the loss is NaN or too high from the first step | a buffer that no file holds was never computed | turn 1; compare with a known loss |
# | `Cannot copy out of meta tensor; no data!` | `.to(device)` on a model on meta | `to_empty`, buffers, load |
# | the head is no longer tied to the embedding | `to_empty` before `fully_shard` makes a tensor for each name | shard first, both in one unit, or tie again before you shard |
# | the host kills a rank while it loads | every rank loads the complete model | load on rank 0 and send, or `load_pretrained` |
# | a rank hangs in loading | `set_model_state_dict` under `if rank == 0` | call it on ALL ranks, on the others with `{}` |
#
# If loading succeeds and the GPU runs out of memory in the first step, then gradients, optimizer state,
# gathered blocks and activations do not fit beside the shards; [lesson 14](14_plan_before_you_rent.ipynb)
# computes them in advance. More ranks make shards smaller. CPU offload (`CPUOffloadPolicy`) keeps shards,
# gradients and optimizer state in host memory, and you pay with time: for a Llama of 0.95 billion parameters
# on one H200 (torch 2.11), the peak fell from 25.5 to 14.9 GiB, and a step took 3.5 times as long
# ([the run](answers.md#what-does-cpu-offload-cost)).
#
# ## The rule
#
# If `from_pretrained` can map the file, use it, and shard. Else meta, shard, `to_empty`, buffers, load: in this
# order, with `strict=True`; `load_pretrained` does the last three. Build the optimizer afterwards, and compare
# one loss with a known one.
#
# [← lesson 11](11_rate_limiter.ipynb) · [lesson 13 →](13_from_fsdp1_to_fsdp2.ipynb)

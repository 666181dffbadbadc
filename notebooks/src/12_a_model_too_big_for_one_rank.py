# %% [markdown]
# # 12 · A model too big for one rank
#
# How do the shards of a model get their values, if no rank can hold the complete model? **Build it on the
# meta device, shard it, give memory to the shards, compute the buffers that no file holds, then let each rank
# read its part.**

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
# A drawing of the most that four ranks hold while a model is loaded, apart from the one tensor that is on its
# way. A column is a rank, and each colour is one quarter of the model. In the end each rank needs its own
# quarter alone.

# %% tags=["card"]
lesson.card(
    12,
    learn="build a model of any size without memory, and load it into shards without a silent fault",
    needs="[lesson 1](01_transformer_wrapper.ipynb)",
    ranks="4 on the CPU, because host memory is measured (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 15, 27),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It loads the same files in two ways, and
# trains one step after each.
#
# ```python
# import tempfile
#
# import torch
# import torch.distributed as dist
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
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
# folder = [tempfile.mkdtemp()]                                # a folder that every rank can see
# dist.broadcast_object_list(folder, src=0)
# if dist.get_rank() == 0:
#     torch.manual_seed(0)
#     LlamaForCausalLM(config).save_pretrained(folder[0])      # stands for the checkpoint that you have
# dist.barrier()
#
# for way in ("built on every rank", "built on meta"):
#     if way == "built on every rank":
#         model = LlamaForCausalLM.from_pretrained(folder[0]).to(device)
#     else:
#         with torch.device("meta"):
#             model = LlamaForCausalLM(config)                 # shapes, and no memory
#     held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
#     for part in [*model.model.layers, model]:
#         fully_shard(part, mesh=mesh)
#     if way == "built on meta":
#         load_pretrained(folder[0], model)                    # each rank reads its part, and computes buffers
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     ids = torch.randint(64, (4, 30), device=device)
#     loss = model(input_ids=ids, labels=ids).loss
#     loss.backward()
#     optimizer.step()
#     dist.all_reduce(loss := loss.detach())
#     shards = sum(p.to_local().nbytes for p in model.parameters())
#     if dist.get_rank() == 0:
#         loss = loss.item() / dist.get_world_size()
#         print(f"{way}: held {held / 2**20:.2f} MiB before sharding, {shards / 2**20:.2f} after; loss {loss:.2f}")
# dist.destroy_process_group()
# ```
# ```text
# built on every rank: held 1.03 MiB before sharding, 0.26 after; loss 4.17
# built on meta: held 0.00 MiB before sharding, 0.26 after; loss 4.17
# ```
#
# The loss is the same. Built on meta, the model held nothing before it was sharded, and a quarter of itself
# afterwards.
#
# ## Shapes without memory
#
# A tensor on the **meta device** has a shape and a dtype, and no memory. So this notebook can build a model
# of 405 billion parameters.

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
# This process has grown by less than half a GiB: the memory that Python needs to describe the modules. The
# last column is what a host needs if each of its 8 ranks owns a complete float32 copy; in bfloat16 it is
# half.
#
# ## Memory without values, and a trap
#
# `model.to_empty(device=...)` gives memory to every shard and to every **buffer**, a tensor of the model that
# is not trained. It leaves in that memory whatever was there before. To see it, we let PyTorch fill such
# memory with NaN, then load the way most tutorials do: rank 0 reads the file, and `broadcast_from_rank0`
# sends one tensor after the other. A folded cell has trained a small Llama to write dates as numbers and has
# saved it.

# %%
# %%ranks
import tempfile
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import load_pretrained, shard
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
def on_meta(name):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / name))
    return shard(model)                                          # fully_shard on each block, then on the model


def send(model, name, **options):                                # on ALL ranks
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
send(model, "dates")                                             # no error: every key was there
print(f"loaded:   NaN in {nan(model.parameters())} parameters, {nan(model.buffers())} buffers")
torch.use_deterministic_algorithms(False)
print("not in the file:", ", ".join(n for n, _ in model.named_buffers() if n not in model.state_dict()))

# %% [markdown]
# Two buffers hold the frequencies of the rotary position embedding. They are computed when the module is
# built, and on meta nothing is computed. They are registered with `persistent=False`, so no file holds them,
# and no key is missing. NaN would be lucky, because the loss is NaN at once. Host memory that comes fresh
# from the operating system is full of zeros (on a GPU anything may be there):

# %% tags=["zeros", "nbval-ignore-output"]
# %%ranks
right = LlamaForCausalLM.from_pretrained(folder / "dates")
for buffer in model.buffers():
    buffer.zero_()
losses = {"right": test_loss(right), "frequencies of zero": test_loss(model)}
print({name: round(loss, 1) for name, loss in losses.items()})
assert losses["frequencies of zero"] > 1.1 * losses["right"]

# %% [markdown]
# A loss that looks sensible, from a model whose attention does not see how far apart two tokens are. The
# Distributed Training Guide was in this trap until October 2025: it silenced FSDP1's complaint about the
# module with `LlamaRotaryEmbedding.reset_parameters = lambda _: None`.
#
# Compute such buffers **after `to_empty` and before loading**. Loading then overwrites everything that is in
# the file, so whole modules may be initialised. In transformers 5, `model._init_weights(module)` sets a
# module's own parameters and the buffers that it knows, such as rotary frequencies. For a module of your own,
# write `reset_parameters`, which FSDP1 calls, and `load_pretrained` for modules with unsaved buffers:

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
# Write `prepare(model)`. It gets a Llama that is sharded and still on meta, and has to give it memory on
# `"cpu"` and compute all buffers that no file holds. The turn loads the file afterwards, as above, and
# compares with `from_pretrained`. Its model has two modules more: a second rotary embedding, and a
# `BatchNorm1d`, whose buffers *are* saved.
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
    shard(model)
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
    return None                                 # your lines here


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
# Now the three ways of the drawing, with a file of 186 MiB. A thread looks every 3 ms at the memory that the
# system counts as the process's own. Pages of a mapped file are counted apart: the ranks of a host share
# them.

# %%
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
    return shard(model)


def rank_0_sends():
    model = on_meta("larger")
    model.to_empty(device="cpu").apply(model._init_weights)
    file = folder / "larger" / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def each_rank_reads_its_part():
    load_pretrained(folder / "larger", on_meta("larger"))        # instead of to_empty, buffers and send


peaks = {way.__name__: peak_of(way) for way in (every_rank_loads, rank_0_sends, each_rank_reads_its_part)}

# %% tags=["nbval-ignore-output"]
found = ranks.get("peaks")
world = len(found)
every, sends, reads = found[0]
assert min(one[every] for one in found) > 0.9
assert found[0][sends] > 0.9 + 1 / world > max(one[sends] for one in found[1:]) + 0.3
assert max(one[reads] for one in found) < 1.3 / world + 0.15
plots.amounts({
    "own memory, rank 0": {way: {"peak": found[0][way]} for way in found[0]},
    "own memory, the other ranks": {way: {"peak": max(one[way] for one in found[1:])} for way in found[0]},
}, unit="models", alt="Peak of a process's own memory: every rank loads, rank 0 sends, each reads its part.")

# %% [markdown]
# - *Every rank loads*: each rank owns a complete model, and on one host these add up.
# - *Rank 0 sends*: rank 0 owns a complete model beside its shards. Where the file can be mapped and needs no
#   conversion (safetensors, or `torch.load(..., mmap=True)`), the copy can be avoided.
# - *Each rank reads its part*: nobody owns more than the shards and a small buffer. This needs a file that every
#   rank can see.
#
# A dtype other than the file's costs memory, too: `from_pretrained(..., dtype=...)` with another dtype than
# the file's makes each rank own a converted copy of the complete model. If the file is bfloat16 and the model
# should train in float32, build it in float32 and call `load_pretrained(..., cast=True)`: each rank converts
# its part as it reads. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` then computes in bfloat16; it never
# changes the dtype of the shards.
#
# ## Rows that are not there
#
# `fully_shard` cuts dim 0 as `torch.chunk` does. Where a parameter has few rows, the last ranks get none.

# %%
# %%ranks
small = fully_shard(nn.Linear(8, 5))
print(f"Linear(8, 5): {tuple(small.weight.to_local().shape)} here,", end=" ")
print(f"and torch.chunk gives {len(torch.empty(5, 8).chunk(world))} pieces for {world} ranks")

# %% [markdown]
# On four ranks rank 3 holds an empty tensor of shape (0, 8), and `full.chunk(world)[3]` raises an
# `IndexError` on that rank alone, while the others go on into the next collective. `distribute_tensor`,
# `set_model_state_dict` and `load_pretrained` know about empty shards.
#
# ## Your turn 2 · From rank 0, one tensor at a time
#
# Only rank 0 can see the checkpoint, and it has to be converted, so it cannot be mapped. Write a load in
# which *no* rank holds more than a few tensors beside its shards. Your function gets a sharded model that has
# memory and no values, and `read(name)`, which only rank 0 may call. A parameter is a DTensor:
# `parameter.shape` is the shape of the complete tensor, and `parameter.to_local()` this rank's shard, which
# `copy_` can fill. One of the parameters has five rows. The turn counts the bytes of all tensors alive while
# your function runs: at most a quarter of the model may be held beside the shards. Autograd is off.
#
# <details><summary>Hint</summary>
#
# Every rank goes through `model.named_parameters()` in the same order. Rank 0 has the complete tensor, the
# others an empty one, `torch.empty(parameter.shape)`. `dist.broadcast(tensor, src=0)` fills it on all ranks.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from safetensors import safe_open
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
    for part in [*model.model.layers, model]:
        fully_shard(part)
    model.to_empty(device="cpu")
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
    return None                                 # your lines here


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
# ## When it goes wrong
#
# The quietest mistake: the names in the file are not those of the model, as in a file saved from a DDP model.

# %% tags=["refused"]
# %%ranks
from safetensors.torch import save_file

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
# | you see | cause | cure |
# |:--|:--|:--|
# | a loaded model is as bad as an untrained one, no error | no name has matched, under `strict=False` with `broadcast_from_rank0` | leave `strict=True`, rename the keys |
# | the loss is NaN or too high from the first step | a buffer that no file holds was never computed | turn 1; compare with a known loss |
# | `Cannot copy out of meta tensor; no data!` | `.to(device)` on a model on meta | `to_empty`, buffers, load |
# | the host kills a rank while it loads | every rank loads the complete model | load on rank 0 and send, or `load_pretrained` |
# | a rank hangs in loading | `set_model_state_dict` under `if rank == 0` | call it on ALL ranks, on the others with `{}` |
#
# If everything is loaded and the GPU runs out of memory in the first step, gradients, optimizer state,
# gathered blocks and activations did not fit: [lesson 14](14_plan_before_you_rent.ipynb). More ranks make
# shards smaller. CPU offload (`CPUOffloadPolicy`) keeps shards, gradients and optimizer state in host memory:
# shards go to the GPU to be gathered, gradients come back, and the optimizer's step runs on the CPU.
#
# ## The rule
#
# Meta, shard, `to_empty`, buffers, load: in this order, with `strict=True`; `load_pretrained` does the last
# three. Then compare one loss with a known one.
#
# [← lesson 11](11_rate_limiter.ipynb) · [lesson 13 →](13_from_fsdp1_to_fsdp2.ipynb)

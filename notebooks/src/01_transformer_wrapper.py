# %% [markdown]
# # 1 · The transformer wrapper
#
# In lesson 0 each layer was a unit, because there were only four. A real model has hundreds of modules.
# Which of them should be units? For a transformer the short answer is: its blocks. In this lesson you see
# what each other answer costs, and write two answers of your own.

# %% [markdown] tags=["card"]
# learn:
# - 'what the choice of units decides: memory at the peak, number of collectives, bytes sent'
# - how to find the block class of T5, Llama, GPT-2, ViT and others
# - how to shard by block, with FSDP2 and with FSDP1
# - three mistakes that raise no error, and how to have them found
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb): ranks, shards, units, all_gather · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read
# video: '[Transformer wrapper](https://www.loom.com/share/2cc2633fa69940789f7f886cbe1fef79), 2022. Since
#   then: FSDP2 has no wrapping policy. You call `fully_shard` on each block, then on the model.'

# %% [markdown]
# **The question of this lesson:** the same model, the same bytes in its shards, and four ways to choose the
# units. How much of the model does a rank hold at each moment of a training step?
#
# ## In your own code
#
# `fully_shard` on each block, then on the model. Save it as `train.py` and start it with
# `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# torch.manual_seed(0)                                  # the same weights on every rank
# config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=6)
# model = LlamaForCausalLM(config)
# for part in [*model.model.layers, model]:             # each block is a unit; the root takes the rest
#     fully_shard(part, mesh=mesh)
# optimizer = torch.optim.AdamW(model.parameters())     # after sharding
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# for step in range(5):
#     ids = torch.randint(64, (4, 30), device=device)   # your data
#     model(input_ids=ids, labels=ids).loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
# dist.destroy_process_group()
# ```
#
# `fsdp_utils.shard(model)` does the same without naming the blocks: it looks for their class first.
#
# ## Four ranks

# %%
from fsdp_utils.lessons import lesson, plots
from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import Goal, at_most, exactly, run_solution, try_answers, turn, yours
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch._dynamo", "transformers.models.llama.modeling_llama"])   # slow to import

# %%
# %%ranks
import functools
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_utils.lessons import tasks

rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                    # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# `tasks` holds the small models of these lessons and the data that they learn from. They are real models
# of the transformers library with few and narrow layers, so no download is needed. The first one is a
# Llama.

# %%
# %%ranks
def numel(module):
    return sum(p.numel() for p in module.parameters())


dates = tasks.dates_llama()
model = dates.build()
names = ("model.embed_tokens", "model.layers.0", "model.layers", "model.norm", "lm_head")
parts = [(name, type(part).__name__, numel(part)) for name in names if (part := model.get_submodule(name))]
parts.append(("the model", type(model).__name__, numel(model)))

# %% jupyter={"source_hidden": true}
parts = ranks.get("parts")[0]
Table(["module", "class", "parameters"], parts)

# %% [markdown]
# ## The idea
#
# A **unit** is what FSDP gathers, uses and frees in one piece. How large the units are is your choice. It
# decides how much of the model a rank holds at once, how often the ranks talk, and how many bytes they send.
#
# A transformer is a stack of **blocks**, all built alike: attention, then a feed-forward network.
# Here the block is the class `LlamaDecoderLayer`, six times. Nearly all parameters are in the blocks. The
# few others, in the embedding, the last norm and the head, belong to the **root** unit, which is the unit
# of the model itself.
#
# Here are four ways to choose. "One unit" calls `fully_shard` on the model alone. "By size" makes a unit of
# each module that is large enough, and "wrong class" of each module of one class; both are loops around
# `fully_shard`, written out in the next cell. "By block" is `shard` from `fsdp_utils`, which finds the blocks
# by itself.

# %%
# %%ranks
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from fsdp_utils import shard


def by_class(model, kind):
    """Each module of this class is a unit. The root takes what is left over."""
    for module in list(model.modules()):
        if isinstance(module, kind):
            fully_shard(module)
    return fully_shard(model)


def by_size(model, least):
    """From the inside out: a module is a unit if it has `least` parameters that no unit inside it has."""

    def left_over(module):
        rest = sum(p.numel() for p in module.parameters(recurse=False))
        rest += sum(left_over(child) for child in module.children())
        if rest < least or module is model or isinstance(module, nn.ModuleList):
            return rest
        fully_shard(module)
        return 0

    left_over(model)
    return fully_shard(model)


# %%
# %%ranks
ways = {
    "one unit": fully_shard,
    "by size": lambda model: by_size(model, least=12_000),
    "by block": shard,
    "wrong class": lambda model: by_class(model, LlamaMLP),
}
wrapped = {way: wrap(dates.build().to(device)) for way, wrap in ways.items()}

# %% jupyter={"source_hidden": true}
# %%ranks
def unit_sizes(model):
    """Elements in each unit, the root's first. No unit here lies inside another, but for the root."""
    inner = [numel(unit) for unit in model.modules() if isinstance(unit, FSDPModule) and unit is not model]
    return [numel(model) - sum(inner), *inner]


sizes = [(way, unit_sizes(model)) for way, model in wrapped.items()]

# %% jupyter={"source_hidden": true}
plots.units(dict(ranks.get("sizes")[0]))

# %% [markdown]
# One bar is the whole model, and each piece of it a unit. By size, most units are single weight matrices.
# In the fourth way somebody has named the feed-forward network, `LlamaMLP`, in place of the block. The
# attention beside it is in no unit of its own, so it belongs to the root.
#
# **Predict before you go on.**
#
# 1. Which way keeps the most full parameters in memory at once? Which one sends the fewest bytes?
# 2. By block: what is complete at the worst moment? The root and one block? More?
#
# <details><summary>Answers</summary>
#
# 1. One unit, both times. Everything is gathered at once, so everything is complete at once. But the root
#   is not freed after the forward pass, so it is gathered only once in a step. All other units are
#   gathered twice.
# 2. The root and two blocks. In the backward pass FSDP gathers the next block while it computes with the
#   present one.
#
# </details>
#
# ## Measure
#
# The meter of lesson 0 looks at one training step of each.

# %% tags=["measure"]
# %%ranks
from fsdp_utils.lessons.meter import Meter

batch = dates.batch(0, size=3 * world, rank=rank, world_size=world, device=device)     # ids: i64[3, 30]


def measure(model):
    """One forward and backward pass under the meter."""
    model(**batch).loss.backward()          # not this one: in its first pass FSDP sets itself up
    model.zero_grad()
    with Meter(model.parameters()) as meter:
        model(**batch).loss.backward()
    return meter


meters = {way: measure(model) for way, model in wrapped.items()}

# %% jupyter={"source_hidden": true}
# %%ranks
def measured(meters):
    """By way: all-gathers, MiB gathered; full parameters at the peak, without buffers and with them."""
    whole_model = 4 * numel(dates.build())                                                  # bytes
    return [
        (
            way,
            meter.all_gathers,
            round(meter.gathered_bytes / 2**20, 1),
            f"{meter.peak_whole_bytes / whole_model:.0%}",
            f"{meter.peak_gather_bytes / whole_model:.0%}",
        )
        for way, meter in meters.items()
    ]


whole_model = 4 * numel(dates.build())

# %% jupyter={"source_hidden": true}
HEAD = ["", "all_gathers", "MiB gathered", "full parameters at the peak", "with buffers"]
NOTE = "Shares of the model's parameters. Buffers are those of all-gathers."
Table(HEAD, ranks.get("measured(meters)")[0], note=NOTE)

# %% [markdown]
# Row by row:
#
# - **One unit** has the whole model at once. `fully_shard` gathers into a buffer and copies the parameters
#   out of it, and this buffer has the size of the model too.
# - **By size** has the least at once, and by far the most collectives.
# - **By block** has a third of the model at once, in the backward pass: the root and two of six blocks. With
#   buffers it has half, in the forward pass: the root, one block, and two buffers of the size of a block. The
#   deeper the model, the smaller the share of a few blocks; a table below has real models.
# - **The wrong class** has as many units as by block, and needs half as much again: the attention of all
#   six blocks is in the root, so it stays gathered from the forward pass to the end of the backward pass.
#
# By size and by block gather nearly the same bytes, twice the model but for the root. What is in the root is
# gathered once, so the first way gathers half as much. (The gradients, which the table does not count, go
# through one reduce-scatter for each unit: the size of the model in all four ways.)

# %% tags=["check"]
# %%ranks 0
block, root = numel(model.model.layers[0]), dict(sizes)["by block"][0]
share = {way: meter.peak_whole_bytes / whole_model for way, meter in meters.items()}
assert meters["one unit"].all_gathers == 1
assert meters["by block"].all_gathers == 2 * 6 + 1          # each block twice, the root once
assert meters["by size"].all_gathers == 2 * (len(dict(sizes)["by size"]) - 1) + 1
assert share["by size"] < share["by block"] < share["wrong class"] < share["one unit"]
assert 1 <= share["one unit"] < 66 / 64                      # three ranks pad 64 rows to 66
assert 1 <= share["by block"] * whole_model / (4 * (root + 2 * block)) < 1.05
assert 1.4 < share["wrong class"] / share["by block"] < 1.6
print("Checked: the numbers of all-gathers, the order of the peaks, the root and two blocks at the peak.")

# %% jupyter={"source_hidden": true}
whole_bytes = dict(ranks.get("[(way, meter.whole_bytes) for way, meter in meters.items()]")[0])
plots.alive(whole_bytes, whole_model=ranks.get("whole_model")[0])

# %% [markdown]
# The same step, operation by operation. About the first third of each panel is the forward pass, the rest
# the backward pass. By block you can count the blocks: one at a time forward, two at a time backward.
#
# ## What a whole step holds
#
# Full parameters are not all that fills the memory. Now let the meter look at a complete step, optimizer
# included: shards, gradients, AdamW's averages, buffers and activations. For comparison, one process that
# shards nothing does the same.

# %%
# %%ranks
def measure_step(model):
    """The most bytes of tensors of all kinds in one complete training step, after a first one."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        with Meter([*model.parameters(), *state]) as meter:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_tensor_bytes


peaks = {way: measure_step(wrap(dates.build().to(device))) for way, wrap in ways.items()}
peaks["one process"] = measure_step(dates.build().to(device))

# %% jupyter={"source_hidden": true}
mib = {way: peak / 2**20 for way, peak in ranks.get("peaks")[0].items()}
peaks = {way: {"all tensors at their peak": peak} for way, peak in mib.items()}
plots.amounts({"memory of one rank": peaks}, unit="MiB")

# %% [markdown]
# The order of the four ways is the same. The bars differ less than the full parameters did, because about
# 3 MiB of each bar are activations, which the choice of units does not change
# ([lesson 2](02_activation_checkpointing.ipynb) does). With four ranks even one unit needs less than one
# process, because three quarters of the optimizer state are on the other ranks. With two ranks one unit needs
# more than one process: all parameters, all gradients and a buffer of the same size are there at once in the
# backward pass, and only half of the optimizer state is on the other rank.

# %% tags=["check"]
assert 1.2 * mib["by block"] < mib["one unit"]
assert mib["by size"] < mib["by block"] < mib["wrong class"] < mib["one unit"]
if len(ranks.get("rank")) != 3:
    assert (mib["one unit"] < mib["one process"]) == (len(ranks.get("rank")) > 2)
print("Checked: by size < by block < wrong class < one unit, and one process where the text has it.")

# %% [markdown]
# ## Why not the smallest units, then?
#
# Because each collective has a cost of its own, before the first byte is sent. Gather the same 4 MiB in one
# call, then in 256.

# %% tags=["nbval-ignore-output"]
# %%ranks
import time


def seconds_to_gather(calls, mib=4):
    shard = torch.ones(mib * 2**18 // world // calls, device=device)            # f32, 4 bytes each
    whole = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(whole, shard)                                               # the first call sets up
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_gather(whole, shard)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


once, often = seconds_to_gather(1), seconds_to_gather(256)
assert often > 3 * once             # a wide margin: other programs run on this machine too
if rank == 0:
    print(f"4 MiB in one call: {1000 * once:.0f} ms, in 256 calls: {1000 * often:.0f} ms")

# %% [markdown]
# The same bytes take many times as long. A block of a real model, with millions of parameters, is large
# enough that the start of its collectives hardly counts. And it is small enough, as one of dozens, that two
# of them fit in memory at once. Activation checkpointing
# ([lesson 2](02_activation_checkpointing.ipynb)) and prefetching
# ([lesson 4](04_backward_prefetch.ipynb)) work with blocks as well.

# %% [markdown]
# ## Your turn 1 · Fewer, larger units
#
# Each collective has a cost of its own, and by block this Llama has 13 all-gathers in a step. Write
# `my_units`, which shards the Llama so that a step has at most 7 all-gathers, while at most 70% of the model
# is complete at once.
#
# `fully_shard` takes a module or a list of modules. A list becomes one unit. The blocks are in
# `model.model.layers`. Edit the next cell, then run it and the three folded cells below it.
#
# <details><summary>Hint</summary>
#
# Seven all-gathers are three units that are gathered twice, and the root. Six blocks make three pairs. The
# modules of a unit should run one after the other, since the unit is gathered before the first of them and
# freed after the last.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def my_units(model):
    return None                     # your lines here; return the model


# %% jupyter={"source_hidden": true}
# %%ranks
def score(wrap):
    """Shard a Llama in this way and measure one step."""
    model = wrap(dates.build().to(device))
    if model is None:
        return None
    losses = train_few(model)
    meter = measure(model)
    return {
        "all-gathers in one step": meter.all_gathers,
        "full parameters at the peak, %": 100 * meter.peak_whole_bytes / whole_model,
        "losses that differ from one process's": sum(
            not abs(a - b) <= 1e-4 for a, b in zip(losses, few_alone)
        ),
        "curve": meter.whole_bytes,
    }


def train_few(model, alone=False):
    """The losses of five steps; each rank has its own samples, or alone all of them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(5, device=device)
    for step in range(5):
        who = {} if alone else {"rank": rank, "world_size": world}
        loss = model(**dates.batch(step, device=device, **who)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / (1 if alone else world)
    if not alone:
        dist.all_reduce(losses)
    return losses.tolist()


few_alone = train_few(dates.build().to(device), alone=True)

# %% jupyter={"source_hidden": true}
turn(
    1,
    "score(my_units)",
    {
        "all-gathers in one step": at_most(
            7, otherwise="There are more units than three beside the root, or the root holds no parameters."
        ),
        "full parameters at the peak, %": at_most(
            70, otherwise="Too much is complete at once: two neighbouring units and the root should be 68%."
        ),
        "losses that differ from one process's": exactly(
            0, otherwise="The losses differ from those of one process: is each parameter in a unit?"
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def my_units(model):
    blocks = list(model.model.layers)
    for first, second in zip(blocks[::2], blocks[1::2]):
        fully_shard([first, second])
    return fully_shard(model)

# %% tags=["wrong"] turn=1
# %%ranks
def my_units(model):
    return shard(model)

# %% tags=["wrong"] turn=1
# %%ranks
def my_units(model):
    return fully_shard(model)

# %% tags=["wrong"] turn=1
# %%ranks
def my_units(model):
    fully_shard(list(model.model.layers))
    return fully_shard(model)

# %% tags=["wrong"] turn=1
# %%ranks
def my_units(model):
    blocks = list(model.model.layers)
    fully_shard(blocks[:3])
    fully_shard(blocks[3:])
    return fully_shard(model)

# %% jupyter={"source_hidden": true}
curves = {"by block": whole_bytes["by block"], "target": run_solution(1, 1)[0]["curve"]}
if mine := yours(1, "curve"):
    curves["yours"] = mine[0]
plots.alive(curves, whole_model=ranks.get("whole_model")[0])

# %% [markdown]
# Larger units mean fewer and larger collectives, and a higher peak. That can pay off where blocks are so
# small that starting a collective takes longer than sending its bytes.
#
# ## The way of 2022: FSDP1 and its policies
#
# FSDP1 takes a rule, `auto_wrap_policy`, and wraps the modules itself, from the inside out. The video is
# about the rule for transformers, new at that time. You name the block class.

# %% tags=["fsdp1"]
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

policies = {
    "one unit": None,
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=12_000),
    "by block": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    "wrong class": ModuleWrapPolicy({LlamaMLP}),
}
wrapped1 = {
    way: FSDP(dates.build(), auto_wrap_policy=policy, device_id=device) for way, policy in policies.items()
}
meters1 = {way: measure(model) for way, model in wrapped1.items()}

# %% jupyter={"source_hidden": true}
Table(HEAD, ranks.get("measured(meters1)")[0], note=NOTE)

# %% [markdown]
# FSDP1 makes the same units as the loops above, with as many collectives and nearly the same peaks. One
# thing differs: FSDP1 gathers a unit into one flat tensor, and the parameters are views of it. There is no
# second buffer to copy out of, so the last two columns are equal.

# %% [markdown]
# ## Which class is the block?
#
# You can look for it by hand: print the model, and find what is repeated and holds both attention and
# feed-forward network. Or you ask `transformer_block_classes`. The models here have their real sizes, but
# they are built on the meta device, where tensors have no memory.

# %% tags=["block-class"]
# %%ranks
import transformers

from fsdp_utils import transformer_block_classes

LLAMA3 = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
families = {
    "Llama-2-7B": (transformers.LlamaForCausalLM, transformers.LlamaConfig()),
    "Llama-3-8B": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA3)),
    "T5-small": (transformers.T5ForConditionalGeneration, transformers.T5Config()),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
    "ViT-base": (transformers.ViTForImageClassification, transformers.ViTConfig()),
}
listed = sorted(transformers.ViTForImageClassification._no_split_modules)

# %% jupyter={"source_hidden": true}
# %%ranks
found = []
for name, (kind, config) in families.items():
    with torch.device("meta"):
        model = kind(config)
    (block_class,) = transformer_block_classes(model)
    blocks = sorted(numel(module) for module in model.modules() if isinstance(module, block_class))
    root = numel(model) - sum(blocks)
    peak = (root + sum(blocks[-2:])) / numel(model)
    in_root = root / numel(model)
    found.append((name, numel(model), block_class.__name__, len(blocks), f"{in_root:.0%}", f"{peak:.0%}"))

# %% jupyter={"source_hidden": true}
Table(
    ["model", "parameters", "block class", "blocks", "in the root", "root and two blocks"],
    ranks.get("found")[0],
)

# %% [markdown]
# The last two columns are computed from the sizes, not measured: the root, and the root with the two largest
# blocks, as shares of all parameters. The more blocks, the smaller the share of two. In T5, GPT-2 and
# Llama-3-8B the embedding weighs heavily, and it is in the root.
#
# ## Embedding and head
#
# A root that holds a large embedding and a large head keeps both gathered from the forward pass to the end
# of the backward pass. Where the two are separate matrices, make units of them as well: the embedding, and
# the last norm with the head. Here is a Llama with a large vocabulary, sharded in both ways.

# %%
# %%ranks
large = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}


def build_large():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**large, num_attention_heads=4, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).to(device)


def with_ends(model):
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head])
    return shard(model)                             # the blocks, and the root for what is left


whole_large = 4 * numel(build_large())
two_ways = {"by block": shard, "and both ends": with_ends}
ends = {way: measure(wrap(build_large())) for way, wrap in two_ways.items()}

# %% jupyter={"source_hidden": true}
ends = ranks.get("[(w, m.all_gathers, m.peak_whole_bytes, m.peak_gather_bytes) for w, m in ends.items()]")[0]
whole_large = ranks.get("whole_large")[0]
Table(
    [HEAD[0], HEAD[1], *HEAD[3:]],
    [
        [way, gathers, f"{full / whole_large:.0%}", f"{buffers / whole_large:.0%}"]
        for way, gathers, full, buffers in ends
    ],
    note=NOTE,
)

# %% [markdown]
# With units for both ends the peak falls from 71% of the model to 57%, and with buffers from 128% to 64%.
# The price is three all-gathers more: each end is gathered twice, and nothing is left for the root to gather.
# (The head is freed after the forward pass and gathered again at once for the backward pass.
# `reshard_after_forward=False` for this unit spares that gather.)

# %% tags=["check"]
# %%ranks 0
assert ends["and both ends"].peak_whole_bytes < 0.8 * ends["by block"].peak_whole_bytes
print("Checked: units for both ends lower the peak of this model by more than a fifth.")

# %% [markdown]
# ## Train a ViT
#
# Does all this leave the training as it was? First a vision transformer, on the digits of lesson 0. One
# loop serves the rest of the lesson.

# %%
# %%ranks
def train(task, model, rank=rank, world=world):
    """Fifteen steps; the loss of each, as the mean over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)      # NOTE: after sharding, see below
    losses = torch.zeros(15, device=device)
    for step in range(15):
        batch = task.batch(step, rank=rank, world_size=world, device=device)    # 24 / world samples
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / world
    if world > 1:
        dist.all_reduce(losses)                                     # the sum over the ranks
    return losses.tolist()


digits = tasks.digits_vit()
vit_alone = train(digits, digits.build().to(device), rank=0, world=1)

vit = shard(digits.build().to(device))
vit_sharded = train(digits, vit)
print(f"one process: loss {vit_alone[0]:.4f} at the first step, {vit_alone[-1]:.4f} at the last")
print(f"by block:    loss {vit_sharded[0]:.4f} at the first step, {vit_sharded[-1]:.4f} at the last")
torch.testing.assert_close(vit_sharded, vit_alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# Sharded by block, the ViT has the losses of one process. Has it learned anything about digits that it never
# saw?

# %%
# %%ranks
print(f"right on {digits.accuracy(vit, device=device):.0%} of {len(digits.test['labels'])} test images")
assert digits.accuracy(vit, device=device) > 0.5        # guessing would be right on a tenth

# %% [markdown]
# It has: guessing would be right on 10%. Fifteen steps are few.
#
# ## Train a T5
#
# T5 has an encoder and a decoder, and both are stacks of the same class, `T5Block`. The task is to read a
# date as people write it and to write it as a computer does.

# %%
# %%ranks
for source, answer in tasks.date_pairs()[0][:3]:
    print(f"{source:>20}  ->  {answer}")

# %% [markdown]
# One thing first. A T5 block passes on a view, the attention bias, to the next block. PyTorch warns about
# views that leave a unit: where an operation writes into such a view, FSDP's hook on it is lost, and with the
# hook the gather for the backward pass. T5 does not write into this view, so the next cell switches the
# warning off.

# %%
# %%ranks
import warnings

warnings.filterwarnings("ignore", message=".*returned a view tensor")

spelled = tasks.dates_t5()
t5_alone = train(spelled, spelled.build().to(device), rank=0, world=1)

t5 = shard(spelled.build().to(device))
t5_sharded = train(spelled, t5)
print(f"one process: loss {t5_alone[0]:.4f} at the first step, {t5_alone[-1]:.4f} at the last")
print(f"by block:    loss {t5_sharded[0]:.4f} at the first step, {t5_sharded[-1]:.4f} at the last")
torch.testing.assert_close(t5_sharded, t5_alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The T5, too, has the losses of one process. Now the same with FSDP1: `transformer_block_classes` finds the
# block classes, for FSDP1's own policy.

# %%
# %%ranks
from fsdp_utils import transformer_block_classes

t5 = spelled.build()
policy = ModuleWrapPolicy(transformer_block_classes(t5))
t5_fsdp1 = train(spelled, FSDP(t5, auto_wrap_policy=policy, device_id=device))
print(f"FSDP1:       loss {t5_fsdp1[0]:.4f} at the first step, {t5_fsdp1[-1]:.4f} at the last")
torch.testing.assert_close(t5_fsdp1, t5_alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## When it goes wrong: tied weights
#
# In T5 one matrix does three jobs. It embeds the words for the encoder, embeds them for the decoder, and
# turns the result back into words. Such weights are called **tied**.

# %%
# %%ranks
t5 = spelled.build()
print(t5.lm_head.weight is t5.shared.weight, t5.encoder.embed_tokens.weight is t5.shared.weight)

# %% [markdown]
# Now wrap this T5 by size, with FSDP1. It runs, and it learns.

# %% tags=["tied"]
# %%ranks
from fsdp_utils import check_sharding

policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50_000)
t5_untied = FSDP(spelled.build(), auto_wrap_policy=policy, device_id=device)
untied = train(spelled, t5_untied)

# %% jupyter={"source_hidden": true}
t5_alone, untied = ranks.get("t5_alone")[0], ranks.get("untied")[0]
steps = [1, 2, 4, 8, 15]
Table(
    ["loss at step", *map(str, steps)],
    [
        ["one process", *(f"{t5_alone[step - 1]:.3f}" for step in steps)],
        ["FSDP1, by size", *(f"{untied[step - 1]:.3f}" for step in steps)],
    ],
)

# %% [markdown]
# The first loss is right. From the second step on this is another model: the matrix is in two units, one
# copy in each, and each copy learns by itself. There is no error and no warning, and the loss looks healthy.
# The policy for transformers avoids this, as its docstring says: the embeddings and the head are outside of
# the blocks, so they stay together in the root.
#
# `check_sharding` looks for such mistakes.

# %%
# %%ranks
for problem in check_sharding(t5_untied):
    print("-", problem.split(":")[0])

# %% tags=["check"]
# %%ranks 0
assert abs(untied[0] - t5_alone[0]) < 1e-4
assert max(abs(a - b) for a, b in zip(untied, t5_alone)) > 2e-3
assert check_sharding(shard(spelled.build().to(device))) == []
print("Checked: the first loss is equal, later ones are not; shard(model) has no such problem.")

# %% [markdown]
# With FSDP2 the mistake can be made too, by a call of `fully_shard` on a module that shares its weights.
# PyTorch 2.13 refuses, at the first forward pass.

# %%
# %%ranks
t5 = spelled.build().to(device)
fully_shard(t5.lm_head)
fully_shard(t5)
try:
    t5(**spelled.batch(0, rank=rank, world_size=world, device=device))
except ValueError as error:
    print(error)

# %% [markdown]
# So leave tied modules to the root, as `shard` does.
#
# ## When it goes wrong: the wrong class
#
# Neither "one unit" nor "wrong class" raised an error above. A policy with a class that the model does not
# have raises none either: no module matches, and everything is one unit.

# %%
# %%ranks
from transformers.models.t5.modeling_t5 import T5Block

no_match = FSDP(dates.build(), auto_wrap_policy=ModuleWrapPolicy({T5Block}), device_id=device)     # a Llama!
found = {name: check_sharding(model) for name, model in {"no match": no_match, **wrapped}.items()}
for name in ("no match", "wrong class"):
    for problem in found[name]:
        print(f"{name}: {problem}")

# %% tags=["check"]
# %%ranks 0
assert len(found["no match"]) == len(found["wrong class"]) == 1
assert found["by block"] == []
print("Checked: one problem each, and none by block.")

# %% [markdown]
# ## When it goes wrong: the optimizer came too early
#
# Sharding gives the model new parameters. An optimizer that was built before keeps the old ones, which
# nobody uses any more.

# %%
# %%ranks
vit = digits.build().to(device)
optimizer = torch.optim.AdamW(vit.parameters(), lr=2e-3)       # too early
shard(vit)

some_digits = digits.batch(0, rank=rank, world_size=world, device=device)
losses = []
for _ in range(3):                                              # the same samples, three times
    loss = vit(**some_digits).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    losses.append(loss.item() / world)
print("loss:", "  ".join(f"{loss:.4f}" for loss in losses))
for problem in check_sharding(vit, optimizer):
    print("-", problem)
assert losses[0] == losses[1] == losses[2]

# %% [markdown]
# Three steps, and the loss does not move. Shard first, then build the optimizer.

# %% [markdown]
# ## Your turn 2 · Shard a GPT-2 by hand
#
# Shard this GPT-2 with `fully_shard` alone, without `shard`: each block a unit, and the rest where it is
# safe. Its blocks are in `model.transformer.h`, and its embedding is tied to its head. Edit the next cell,
# then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# Which module holds both the embedding and the head? Only the model itself. What you do not make a unit is
# left to the root.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def shard_by_hand(model):
    return None                     # your lines here; return the model


# %% jupyter={"source_hidden": true}
# %%ranks
GPT2 = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}


def build_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval().to(device)


def score_gpt2(shard):
    model = shard(build_gpt2())
    if model is None:
        return None
    ids = torch.arange(16, device=device)[None]
    expected = build_gpt2()(input_ids=ids, labels=ids).loss
    with Meter(model.parameters()) as meter:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {
        "all-gathers in one step": meter.all_gathers,
        "problems that check_sharding finds": len(check_sharding(model)),
        "the loss of one process": torch.allclose(loss, expected, atol=1e-5),
    }

# %% jupyter={"source_hidden": true}
turn(
    2,
    "score_gpt2(shard_by_hand)",
    {
        "all-gathers in one step": Goal(
            "at least 9",
            lambda found: found >= 2 * 4 + 1,
            otherwise="With a unit for each of the four blocks and one for the root there are nine.",
        ),
        "problems that check_sharding finds": exactly(
            0, otherwise="Print check_sharding(model): it says what is wrong."
        ),
        "the loss of one process": exactly(True, otherwise="The loss differs from one process's."),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def shard_by_hand(model):
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)       # the embedding and the head stay together, in the root

# %% tags=["wrong"] turn=2
# %%ranks
def shard_by_hand(model):
    fully_shard(list(model.transformer.h))
    return fully_shard(model)

# %% tags=["wrong"] turn=2
# %%ranks
def shard_by_hand(model):
    return fully_shard(model)

# %% tags=["wrong"] turn=2 raises="share"
# %%ranks
def shard_by_hand(model):
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model.lm_head)
    return fully_shard(model)

# %% tags=["check"]
try_answers(1)

# %% [markdown]
# ## Proof
#
# One process, FSDP2 and FSDP1: wrapping by block does not change what is learned.

# %% jupyter={"source_hidden": true}
# %%ranks
for losses in (t5_sharded, t5_fsdp1):
    torch.testing.assert_close(losses, t5_alone, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(vit_sharded, vit_alone, rtol=1e-4, atol=1e-4)

# %% jupyter={"source_hidden": true}
plots.losses(
    {
        "T5, one process": ranks.get("t5_alone")[0],
        "by block, FSDP2": ranks.get("t5_sharded")[0],
        "by block, FSDP1": ranks.get("t5_fsdp1")[0],
    }
)

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
gathers = ranks.get("{way: meter.all_gathers for way, meter in meters1.items()}")[0]
whole = ranks.get("{way: meter.peak_whole_bytes / whole_model for way, meter in meters1.items()}")[0]
at_rest = ranks.get("sum(p.numel() for p in wrapped1['one unit'].parameters()) * 4 / whole_model")[0]
listed = ranks.get("listed")[0]
lesson.claims(
    1,
    {
        "faster": "Not measured: speed takes several GPUs. A CPU can show the causes: "
        f"{gathers['by block']} all_gathers in a step, by size {gathers['by size']}; "
        f"{whole['by block']:.0%} of the model complete at once, as one unit {whole['one unit']:.0%}.",
        "communication-efficient": f"In the number of collectives, {gathers['by block']} instead of "
        f"{gathers['by size']} by size. The bytes are nearly the same.",
        "one-unit-is-ddp": f"Not so. Between steps a rank holds {at_rest:.0%} of the parameters, and always "
        f"as small a part of the optimizer state; under DDP all of both. In forward and backward "
        f"{whole['one unit']:.0%} of the parameters are there, as with DDP.",
        "one-at-a-time": "Not quite. The root and two blocks are: "
        f"{whole['by block']:.0%} of this model with 6 blocks.",
        "no-split": f"It is a list, and not of blocks alone: for ViT {' and '.join(listed)}. "
        "`transformer_block_classes` takes those that are repeated.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - The unit decides how much of the model a rank holds at once, and how often the ranks talk.
# - For transformers the block is the usual unit: at the worst moment the root and two blocks are complete.
#   With the buffers of `fully_shard` it is three blocks.
# - `shard(model)` finds the block classes itself. FSDP1 takes them as
#   `auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model))`. A large embedding and a large head
#   are worth units of their own.
# - Leave tied weights to the root, and build the optimizer after sharding. `check_sharding` finds what was
#   forgotten.
#
# ## Next
#
# Full parameters are under control now. The next thing to fill the memory is the activations, and what to
# do about them is called activation checkpointing: [lesson 2](02_activation_checkpointing.ipynb).
#
# [← lesson 0](00_fsdp_from_scratch.ipynb) · [lesson 2 →](02_activation_checkpointing.ipynb)

# %% [markdown]
# # 1 · The transformer wrapper
#
# In lesson 0 each layer was a unit, because there were only four. A real model has hundreds of modules.
# Which of them should be units? For a transformer the answer is short: its blocks. In this lesson you see
# what each other answer costs.

# %% [markdown] tags=["card"]
# learn:
# - 'what the choice of units decides: memory at the peak, number of collectives, bytes sent'
# - how to find the block class of T5, Llama, GPT-2, ViT and others
# - how to shard by block, with FSDP2 and with FSDP1
# - three mistakes that raise no error, and how to have them found
# needs: '[lesson 0](00_fsdp_from_scratch.ipynb): ranks, shards, units, all_gather · no GPU'
# ranks: '4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab.'
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read
# video: '[Transformer wrapper](https://www.loom.com/share/2cc2633fa69940789f7f886cbe1fef79), 2022. Since
#   then: FSDP2 has no wrapping policy. You call `fully_shard` on each block, then on the model.'

# %% [markdown]
# ## Four ranks

# %%
from fsdp_utils.lessons import lesson, plots
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
# `tasks` holds the small models of these lessons, and the data that they learn from. They are real models
# of the transformers library with few and narrow layers, so no download is needed. The first one is a
# Llama.

# %%
# %%ranks
def numel(module):
    return sum(p.numel() for p in module.parameters())


dates = tasks.dates_llama()
model = dates.build()
for name in ("model.embed_tokens", "model.layers", "model.layers.0", "model.norm", "lm_head"):
    module = model.get_submodule(name)
    print(f"{name:20} {type(module).__name__:18} {numel(module):8,} parameters")
print(f"{'the model':20} {type(model).__name__:18} {numel(model):8,} parameters")

# %% [markdown]
# ## The idea
#
# A **unit** is what FSDP gathers, uses and frees in one piece. How large the units are is your choice. It
# decides how much of the model is whole at once, how often the ranks talk, and how many bytes they send.
#
# A transformer is a stack of **blocks**, all built alike: attention, then a feed-forward network.
# Here it is the class `LlamaDecoderLayer`, six times. Nearly all parameters are in the blocks. The few
# others, embeddings, the last norm and the head, belong to the **root** unit, the one of the model itself.
#
# Here are four ways to choose. `shard` comes from `fsdp_utils`: it finds the blocks, calls `fully_shard` on
# each, then on the model. The other two loops are written out.

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
# The wrong class is the feed-forward network `LlamaMLP`: the attention beside it is in no unit of its own,
# so it falls to the root.
#
# ## Predict
#
# 1. Which way has the most of the model whole at once? Which one sends the fewest bytes?
# 2. By block: how much is whole at the worst moment? The root and one block? More?
#
# <details><summary>Answers</summary>
#
# 1. One unit, both times. Everything is gathered at once, so everything is whole at once. But the root is
#   not freed after the forward pass, so it is gathered only once in a step. All others are gathered twice.
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


def show(meters, whole_model):
    print(f"{'':12} all_gathers  gathered  whole at the peak")
    for way, meter in meters.items():
        peak = meter.peak_whole_bytes / whole_model
        print(f"{way:12} {meter.all_gathers:8} {meter.gathered_bytes / 2**20:9.1f} MiB {peak:12.0%}")


whole_model = 4 * numel(model)                                                  # bytes
meters = {way: measure(model) for way, model in wrapped.items()}
show(meters, whole_model)

# %% [markdown]
# Row by row:
#
# - **One unit** has all of the model whole. Sharding then saves memory between the steps, and nothing
#   during one.
# - **By size** has the least whole at once, and by far the most collectives.
# - **By block** has a third whole. That is the root and two of six blocks. A model of 32 blocks would have
#   a tenth.
# - **The wrong class** has as many units as by block, and needs half as much again: the attention of all
#   six blocks stays whole all the time.
#
# By size and by block send the same bytes, twice the model. What is in the root is sent once, so the first
# way sends half as much.

# %%
# %%ranks
block, root = numel(model.model.layers[0]), dict(sizes)["by block"][0]
assert meters["one unit"].all_gathers == 1
assert meters["by block"].all_gathers == 2 * 6 + 1          # each block twice, the root once
assert meters["by size"].all_gathers > 3 * meters["by block"].all_gathers
assert 1 <= meters["one unit"].peak_whole_bytes / whole_model < 1.05
assert 1 <= meters["by block"].peak_whole_bytes / (4 * (root + 2 * block)) < 1.05
assert meters["wrong class"].peak_whole_bytes > 1.3 * meters["by block"].peak_whole_bytes

# %% jupyter={"source_hidden": true}
whole_bytes = dict(ranks.get("[(way, meter.whole_bytes) for way, meter in meters.items()]")[0])
plots.alive(whole_bytes, whole_model=ranks.get("whole_model")[0])

# %% [markdown]
# The same step, operation by operation. About the first third of each panel is the forward pass, the rest
# the backward pass. By block you can count the blocks: one at a time forward, two at a time backward.
#
# Whole parameters are not all that fills the memory. Add the shards, the gradients, the buffers of the
# collectives and the activations.

# %% jupyter={"source_hidden": true}
peaks = dict(ranks.get("[(way, meter.peak_tensor_bytes / 2**20) for way, meter in meters.items()]")[0])
assert peaks["one unit"] > 1.2 * peaks["by block"]
plots.memory_per_rank({way: {"all tensors at their peak": mib} for way, mib in peaks.items()}, unit="MiB")

# %% [markdown]
# The order is the same. In proportion the differences are smaller, because the shards and activations are
# the same in all four. But one unit costs even more than its parameters: its gradients too are whole at once
# before they are reduced.
#
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
assert often > 3 * once
if rank == 0:
    print(f"4 MiB in one call: {1000 * once:.0f} ms, in 256 calls: {1000 * often:.0f} ms")

# %% [markdown]
# The same bytes, and many times as long. A block is large enough for its collectives to be worth their
# start, and small enough for two of them not to hurt. It is also what activation checkpointing ([lesson
# 2](02_activation_checkpointing.ipynb)) and prefetching ([lesson 4](04_backward_prefetch.ipynb)) work with.
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
show(meters1, whole_model)
for way in ways:
    assert meters1[way].all_gathers == meters[way].all_gathers
    assert 0.85 < meters1[way].peak_whole_bytes / meters[way].peak_whole_bytes < 1.05

# %% [markdown]
# FSDP1 makes the same units as our loops, with as many collectives. What was true of wrapping in 2022 is
# true today.
#
# ## Which class is the block?
#
# You can look for it by hand: print the model, and find what is repeated and holds both attention and
# feed-forward network. Or you ask `transformer_block_classes`. The models here have their real sizes, but
# they are built on the meta device, where tensors have no memory.

# %% tags=["block-class"]
# %%ranks
import transformers

from fsdp_utils import transformer_block_classes

families = {
    "Llama-2-7B": (transformers.LlamaForCausalLM, transformers.LlamaConfig()),
    "T5-small": (transformers.T5ForConditionalGeneration, transformers.T5Config()),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
    "ViT-base": (transformers.ViTForImageClassification, transformers.ViTConfig()),
}
print(f"{'':11} {'parameters':>13}  {'block class':18} blocks  whole at the peak")
for name, (kind, config) in families.items():
    with torch.device("meta"):
        model = kind(config)
    (block_class,) = transformer_block_classes(model)
    blocks = sorted(numel(module) for module in model.modules() if isinstance(module, block_class))
    root = numel(model) - sum(blocks)
    peak = (root + sum(blocks[-2:])) / numel(model)
    print(f"{name:11} {numel(model):13,}  {block_class.__name__:18} {len(blocks):6} {peak:18.0%}")
listed = sorted(transformers.ViTForImageClassification._no_split_modules)

# %% [markdown]
# The last column is worked out, not measured: the root and the two largest blocks, as found above. The more
# blocks, the smaller the share of two: deep models gain most. In T5 and GPT-2 the embeddings weigh heavily,
# and they are in the root.
#
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
# The losses of one process. And has it learned anything about digits that it never saw?

# %%
# %%ranks
print(f"right on {digits.accuracy(vit, device=device):.0%} of {len(digits.test['labels'])} test images")
assert digits.accuracy(vit, device=device) > 0.5        # guessing would be right on a tenth

# %% [markdown]
# It has, after 15 steps.
#
# ## Train a T5
#
# T5 has an encoder and a decoder, and both are stacks of the same class, `T5Block`. The task is to read a
# date as people write it and to write it as a computer does. No date of the test occurs in training, in any
# spelling.

# %%
# %%ranks
for source, answer in tasks.date_pairs()[0][:3]:
    print(f"{source:>20}  ->  {answer}")

# %% [markdown]
# One thing first. A T5 block hands a view from block to block, the attention bias. PyTorch warns about
# views that leave a unit, because FSDP loses sight of them once an operation writes into them. T5 never
# does that, so the warning is put aside.

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
# Again the losses of one process. And the same with FSDP1: `wrap_policy` finds the block class and makes
# the policy for transformers out of it.

# %%
# %%ranks
from fsdp_utils import wrap_policy

t5 = spelled.build()
t5_fsdp1 = train(spelled, FSDP(t5, auto_wrap_policy=wrap_policy(t5), device_id=device))
print(f"FSDP1:       loss {t5_fsdp1[0]:.4f} at the first step, {t5_fsdp1[-1]:.4f} at the last")
torch.testing.assert_close(t5_fsdp1, t5_alone, rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## First trap: tied weights
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
for step in (0, 1, 7, 14):
    print(f"step {step + 1:2}   one process {t5_alone[step]:.3f}   FSDP1 by size {untied[step]:.3f}")
assert abs(untied[0] - t5_alone[0]) < 1e-4
assert max(abs(a - b) for a, b in zip(untied, t5_alone)) > 2e-3

# %% [markdown]
# The first loss is right. From the second on the model is another one: the matrix is in two units, a
# copy in each, and each copy learns by itself. No error, no warning, and a loss that looks healthy. This is
# why the transformer policy was made: it leaves shared weights together in the root.
#
# `check_sharding` looks for this.

# %%
# %%ranks
for problem in check_sharding(t5_untied):
    print("-", problem.split(":")[0])
assert check_sharding(shard(spelled.build().to(device))) == []

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
# ## Second trap: the wrong class
#
# Neither "one unit" nor "wrong class" raised an error above. A policy with a class that the model does not
# have raises none either: no module matches, and everything is one unit.

# %%
# %%ranks
from transformers.models.t5.modeling_t5 import T5Block

no_match = FSDP(dates.build(), auto_wrap_policy=ModuleWrapPolicy({T5Block}), device_id=device)     # a Llama!
for name, model in {"no match": no_match, "wrong class": wrapped["wrong class"]}.items():
    for problem in check_sharding(model):
        print(f"{name}: {problem}")
assert len(check_sharding(no_match)) == len(check_sharding(wrapped["wrong class"])) == 1
assert check_sharding(wrapped["by block"]) == []

# %% [markdown]
# ## Third trap: the optimizer came too early
#
# Sharding gives the model new parameters. An optimizer that was built before keeps the old ones, which
# nobody uses any more.

# %%
# %%ranks
vit = digits.build().to(device)
optimizer = torch.optim.AdamW(vit.parameters(), lr=2e-3)       # too early
shard(vit)

batch = digits.batch(0, rank=rank, world_size=world, device=device)
losses = []
for _ in range(3):                                              # the same samples, three times
    loss = vit(**batch).loss
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
#
# ## Proof
#
# All ways to train a model on one page. Wrapping by block never changes what is learned.

# %%
# %%ranks
for name, alone, others in (
    ("ViT", vit_alone, {"by block (FSDP2)": vit_sharded}),
    ("T5", t5_alone, {"by block (FSDP2)": t5_sharded, "by block (FSDP1)": t5_fsdp1}),
):
    for way, losses in {"one process": alone, **others}.items():
        print(f"{name:4} {way:17} first {losses[0]:.4f}   tenth {losses[9]:.4f}   last {losses[-1]:.4f}")
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)

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
        f"{whole['by block']:.0%} of the model whole at once, as one unit {whole['one unit']:.0%}.",
        "communication-efficient": f"In the number of collectives, {gathers['by block']} instead of "
        f"{gathers['by size']} by size. The bytes are the same.",
        "one-unit-is-ddp": f"Not so. Between steps a rank holds {at_rest:.0%} of the parameters, under DDP "
        f"all of them. During a step it is as with DDP: {whole['one unit']:.0%} are whole.",
        "one-at-a-time": "Not quite. The root and two blocks are: "
        f"{whole['by block']:.0%} of this model with 6 blocks.",
        "no-split": f"It is a list, and not of blocks alone: for ViT {' and '.join(listed)}. "
        "`transformer_block_classes` takes those that are repeated.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. Count the collectives.** A model has so many blocks, each is a unit, and the root is not freed after
# the forward pass. How many all_gathers does a training step take?

# %%
def all_gathers(blocks):
    return None  # your line here


gathers = {(6,): 13, (32,): 65, (0,): 1}
lesson.check(all_gathers, gathers)

# %% [markdown]
# **2. The worst moment.** How many GiB of float32 parameters are whole at once, by block? The sizes are
# numbers of parameters; all blocks are equal. The last case is Llama-2-7B.

# %%
def whole_gib(root, block, blocks):
    return None  # your lines here


worst = {(0, 2**28, 1): 1.0, (0, 2**28, 10): 2.0, (262_148_096, 202_383_360, 32): 2.4844513}
lesson.check(whole_gib, worst)

# %% [markdown]
# **3. GPT-2 by hand.** Shard this GPT-2 with `fully_shard` alone, so that `check_sharding` has nothing to
# say. Its blocks are in `model.transformer.h`, and its embedding is tied to its head.

# %%
# %%ranks
def shard_by_hand(model):
    return None  # your lines here; return the model


gpt2_config = transformers.GPT2Config(
    n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=64, bos_token_id=0, eos_token_id=0
)
answer = shard_by_hand(transformers.GPT2LMHeadModel(gpt2_config).to(device))
problems = None if answer is None else check_sharding(answer)

# %%
lesson.check(ranks.get("problems")[0], [])

# %% [markdown]
# ## Summary
#
# - The unit decides how much of the model is whole at once, and how often the ranks talk.
# - By block is the right size for transformers: at the worst moment the root and two blocks are whole.
# - `shard(model)` for FSDP2, `auto_wrap_policy=wrap_policy(model)` for FSDP1: both find the block class
#   themselves.
# - Leave tied weights to the root, and build the optimizer after sharding. `check_sharding` finds what was
#   forgotten.
#
# ## Next
#
# Whole parameters are under control now. The next thing to fill the memory is the activations, and what to
# do about them is called activation checkpointing: [lesson 2](02_activation_checkpointing.ipynb).
#
# [← lesson 0](00_fsdp_from_scratch.ipynb) · [lesson 2 →](02_activation_checkpointing.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def all_gathers(blocks):
    return 2 * blocks + 1


lesson.check(all_gathers, gathers, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def whole_gib(root, block, blocks):
    return 4 * (root + block * min(2, blocks)) / 2**30


lesson.check(whole_gib, worst, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
# %%ranks
def shard_by_hand(model):
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)       # the embedding and the head stay together, in the root


answer = shard_by_hand(transformers.GPT2LMHeadModel(gpt2_config).to(device))
problems = None if answer is None else check_sharding(answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
lesson.check(ranks.get("problems")[0], [], strict=True)

# %% [markdown]
# # 9 · Child fine-tuning: freeze, adapt or mask
#
# You fine-tune a pretrained model and leave most of its weights unchanged. What does that save under FSDP2?
#
# - **Adapters, small trained layers beside frozen ones, save almost all gradients and AdamW states.**
# - **Training nothing in the lower blocks also saves work, because backward stops at the lowest trained weight.** The
#   blocks below need no second all-gather, no backward and, without activation checkpointing, no activations.
# - **A mask on the gradients, called child tuning, saves neither memory nor communication.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WAYS = {  # the width that is trained in each of six blocks; adapters are drawn too wide
    "all weights": [1] * 6,
    "the last two blocks": [0] * 4 + [1] * 2,
    "adapters": [0.12] * 6,
    "adapters in the last two": [0] * 4 + [0.12] * 2,
}
SHARES = {  # % of all weights; a cell below holds them against a run
    "kept": ("gradients, AdamW states", [100, 34, 2, 1]),
    "moved": ("gathered + reduced", [100, 61, 68, 51]),
    "activations": ("activations", [100, 34, 72, 25]),
    "MFLOP": ("FLOPs", [100, 56, 67, 44]),
}
places = ["block 0 (input)", *(f"block {n}" for n in range(1, 5)), "block 5 (loss)"]
fig, _ = plots.figure(width=9.4, height=4.0)
fig.clear()
for column, ((title, blocks), upper, lower) in enumerate(zip(WAYS.items(), *fig.subplots(2, 4, height_ratios=[3, 2]))):
    upper.barh(range(6), 1, height=0.8, color=plots.FAINT)
    upper.barh(range(6), blocks, height=0.8, color=plots.RANK_COLORS[0])
    lowest = next(block for block, trained in enumerate(blocks) if trained)
    upper.annotate("", (1.1, lowest - 0.5), (1.1, 5.5), arrowprops={"arrowstyle": "->", "color": plots.RANK_COLORS[1]})
    if lowest:
        upper.text(1.04, lowest - 1, "↺", va="center", color=plots.RANK_COLORS[1])
    upper.set(title=title, xlim=(0, 1.25), xticks=[])
    upper.set_yticks(range(6), [""] * 6 if column else places)
    values = [shares[column] for _, shares in SHARES.values()]
    lower.barh(range(4), values, height=0.7, color=plots.RANK_COLORS[0])
    for row, value in enumerate(values):
        lower.text(value + 3, row, f"{value}%", va="center", fontsize=8)
    lower.set(xlim=(0, 135), xticks=[])
    lower.set_yticks(range(4), [""] * 4 if column else [name for name, _ in SHARES.values()])
    lower.invert_yaxis()
    for axes in (upper, lower):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
plots.show(fig, alt="Four ways to fine-tune six blocks: what is trained, how far backward goes, and what a step costs.")

# %% [markdown]
# Each column is a way to fine-tune a small Llama of six blocks, each an FSDP2 unit. Blue weights are trained, grey ones
# frozen (adapters are drawn too wide). The arrow is backward: from the loss down to the lowest trained
# weight, it gathers every block again. FSDP2 also prefetches the block at ↺, which backward never uses.
#
# The bars are the measured costs of a step in float32, without activation checkpointing. Compare columns 2 and 3:
# adapters remove almost all gradients, the short arrow two thirds of the activations. Column 4 has both.

# %% tags=["card"]
lesson.card(
    9,
    learn="what freezing, adapters and masks each save under FSDP2, and what they cost",
    needs="[lesson 1](01_transformer_wrapper.ipynb)",
    minutes=(1, 17, 14),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. For each of the four
# ways it prints the KiB of gradients and AdamW states that rank 0 keeps, and the KiB of complete tensors that one step
# gathers and reduces. (With PEFT, transformers 5.23 adds a harmless `FutureWarning`.)
#
# ```python
# import torch
# import torch.distributed as dist
# from peft import LoraConfig, get_peft_model
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
#
# for way in ("all weights", "last two", "adapters", "adapters, last two"):
#     torch.manual_seed(0)
#     model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device)    # your pretrained model
#     blocks = model.model.layers
#     if way == "last two":
#         for part in [model.model.embed_tokens, *blocks[:4]]:
#             part.requires_grad_(False)
#     if "adapters" in way:                                    # PEFT adds them in place, and freezes the rest
#         where = [4, 5] if "two" in way else None             # None: in every block
#         get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=where))
#     for part in [*blocks, model]:
#         fully_shard(part, mesh=mesh)
#     trained = [p for p in model.parameters() if p.requires_grad]
#     optimizer = torch.optim.AdamW(trained, lr=1e-3)
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(3):
#         ids = torch.randint(64, (4, 30), device=device)      # your data
#         optimizer.zero_grad()
#         with record_collectives(model) as trace:             # notes every collective of this step
#             model(input_ids=ids, labels=ids).loss.backward()
#         optimizer.step()
#     kept = [p.grad for p in trained]
#     kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
#     kept, moved = sum(t.to_local().nbytes for t in kept) / 2**10, trace.bytes_by_kind()
#     gathers, reduces = moved["all_gather"] / 2**10, moved["reduce_scatter"] / 2**10
#     if dist.get_rank() == 0:
#         print(f"{way:18}: keeps {kept:5,.0f} KiB, gathers {gathers:5,.0f}, reduces {reduces:5,.0f}, "
#               f"together {gathers + reduces:5,.0f}")
# dist.destroy_process_group()
# ```
# ```text
# all weights       : keeps 1,178 KiB, gathers 3,110, reduces 1,571, together 4,682
# last two          : keeps   397 KiB, gathers 2,341, reduces   529, together 2,870
# adapters          : keeps    18 KiB, gathers 3,158, reduces    24, together 3,182
# adapters, last two: keeps     6 KiB, gathers 2,357, reduces     8, together 2,365
# ```
#
# The first line follows from the model's size, 1,571 KiB in float32:
#
# - A step **reduces** one gradient for each weight: 1,571 KiB.
# - Rank 0 **keeps** a quarter of this gradient and of AdamW's two moments: 3 · 1,571 / 4 = 1,178.
# - Forward **gathers** the complete model, backward the six blocks again, 256.5 KiB each: 3,110. (Embedding, norm and
#   head belong to the root unit, which FSDP2 does not free after forward.)
#
# In the second line a third of the model is trained (the last two blocks, the final norm and the head), so a third
# is kept and reduced. Backward gathers three blocks fewer.
#
# The adapters are 24 KiB, so almost nothing is kept or reduced. But backward gathers every block again; with
# adapters in the last two blocks, only three.
#
# ## Where you freeze decides what you save
#
# A frozen parameter has no gradient, so FSDP2 has nothing to reduce, and AdamW keeps no moments for it. FSDP2 decides
# this for each parameter, so one unit may hold frozen and trained ones. The weights themselves stay sharded, and
# forward gathers them as before. You may freeze before `fully_shard` or after it.
#
# The rest depends on *where* you freeze. The gradient passes through every block between the loss and the lowest
# trained parameter, so backward needs these blocks' weights, trained or not. Below that parameter it stops.
# The next cells freeze the embedding and then one block after the other from below, or the head and the final norm and
# then the blocks from above. `one_step` takes the script's step and measures activations and FLOPs, too.

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama", "peft", "sklearn.datasets"])    # slow to import

# %% jupyter={"source_hidden": true}
# %%ranks
import copy
import warnings

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import ChildTuningAdamW, fisher_mask, record_collectives

torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")    # PEFT asks transformers for it
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
SAMPLES = torch.randint(64, (4, 30), generator=torch.Generator().manual_seed(rank)).to(device)    # this rank's


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).to(device)


def local(tensor):                              # the part of it that this rank holds
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def activations(model):
    """KiB that forward keeps for backward, without the weights; before sharding."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=SAMPLES, labels=SAMPLES)
    return sum(storage.nbytes() for storage in kept.values()) / 2**10

# %%
# %%ranks
def one_step(model, make_optimizer=torch.optim.AdamW, **options):
    """Shard a model, take one step, and count; bytes in KiB."""
    held = activations(model)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=mesh, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    with record_collectives(model) as trace, FlopCounterMode(display=False) as flops:
        model(input_ids=SAMPLES, labels=SAMPLES).loss.backward()
    optimizer.step()
    kept = [p.grad for p in trained]
    kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": sum(local(p).nbytes for p in model.parameters()) / 2**10,
        "kept": sum(local(t).nbytes for t in kept) / 2**10,
        "activations": held,
        "moved": sum(event.bytes for event in trace.events) / 2**10,
        "gathered again": sum(e.kind == "all_gather" and e.phase == "backward" for e in trace.events),
        "MFLOP": flops.get_total_flops() / 1e6,
    }


# %% tags=["freezing"]
# %%ranks
def frozen(count, above=False):
    """The Llama with one of its ends and `count` blocks frozen."""
    model = llama()
    inner = model.model
    ends, blocks = [inner.embed_tokens], list(inner.layers)
    if above:
        ends, blocks = [model.lm_head, inner.norm], blocks[::-1]
    for module in ends + blocks[:count]:
        module.requires_grad_(False)
    return model


from_below = [one_step(frozen(count)) for count in range(7)]
from_above = [one_step(frozen(count, above=True)) for count in range(7)]

# %% jupyter={"source_hidden": true}
below, above = ranks.get("(from_below, from_above)")[0]
fig, panels = plots.figure(4, width=9.4, height=2.5)
shown = {"kept": "gradients, AdamW states, KiB", "activations": "activations, KiB",
         "gathered again": "gathers in backward", "MFLOP": "MFLOP of a step"}
for axes, (what, title) in zip(panels, shown.items()):
    axes.plot([f[what] for f in above], color=plots.RANK_COLORS[1], linewidth=5, label="from above, head first")
    axes.plot([f[what] for f in below], color=plots.RANK_COLORS[0], marker="o", label="from below, embedding first")
    axes.set(title=title, xlabel="frozen blocks, and one end", ylim=(0, None), xticks=range(7))
panels[3].legend(loc="lower left", fontsize=7)
plots.show(fig, alt="Kept bytes, activations, gathers in backward and FLOPs, by the number of frozen blocks.")

# %% tags=["check"] jupyter={"source_hidden": true}
assert [f["gathered again"] for f in below] == [6, 6, 5, 4, 3, 2, 1]
assert {f["gathered again"] for f in above[:6]} == {6}
assert above[5]["MFLOP"] > 1.2 * below[5]["MFLOP"]
assert above[4]["activations"] > 0.7 * above[0]["activations"]

# %% [markdown]
# In the first panel the lines lie on each other: for gradients and AdamW states it makes no difference where you
# freeze. In the other three it does. A block frozen **from below** (blue) also saves its activations, its second
# gather and its whole backward. A block frozen **from above** (orange) saves, of these, only the FLOPs of its own
# weights' gradients and the inputs of its linear layers, which only those need. The gradient still passes through
# it to the blocks below. If accuracy allows, freeze from below.
#
# Why does the first frozen block save no gather? While backward works on a block, FSDP2 already gathers the next
# one below, to hide the communication, even where backward is about to stop.
#
# **To check your own run**, count the gathers in backward as `one_step` does. With the default
# `reshard_after_forward`, expect one for each block down to the lowest trained one, and one more if a block lies below.
# Tied embeddings and transformers' checkpointing silently send backward further: see [the end](#When-it-goes-wrong).
#
# ## What adapters save, and what they gather
#
# [LoRA](https://arxiv.org/abs/2106.09685), the most common adapter, freezes a linear layer *W* and adds a multiple of
# `B(A(x))` to its output. *A* maps *x* down to *r* numbers and *B* maps them back up. Only *A* and *B*
# are trained: here *r* is 4, on two layers of each block. *B* begins with zeros, so the model begins as it was.
# PEFT puts adapters into every block unless you name some, so backward goes all the way down. With
# `layers_to_transform=[4, 5]` it stops as early as with four frozen blocks.
#
# Are the gathers necessary? The *base*, the frozen pretrained weights, never changes, so each rank could keep a full
# copy: `fully_shard` neither shards nor gathers what is in `ignored_params`. The next cell measures the four ways,
# adapters with the base ignored, and each way's activations under transformers' activation checkpointing.

# %%
# %%ranks
def adapted(blocks=None):
    model = llama()
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=blocks))
    return model


ways = {"all weights": llama, "last two blocks": lambda: frozen(4), "adapters": adapted,
        "adapters, last two blocks": lambda: adapted([4, 5]), "adapters, base ignored": adapted}
found = {}
for way, make in ways.items():
    model = make()
    base = {p for p in model.parameters() if not p.requires_grad}
    found[way] = one_step(model, ignored_params=base if "ignored" in way else None)
    model = make()                              # adapters first, then checkpointing
    model.config.use_cache = False
    model.activation_checkpointing_enable()
    model.disable_input_require_grads()
    found[way]["checkpointed"] = activations(model)

# %%
from fsdp_utils.lessons.tables import Table

found = ranks.get("found")[0]
kinds = {"weights": "weights", "kept": "gradients, AdamW states", "activations": "activations",
         "checkpointed": "the same, checkpointed", "moved": "gathered + reduced"}
Table(["KiB on rank 0", *kinds.values()], [[way, *(round(f[kind]) for kind in kinds)] for way, f in found.items()])

# %% tags=["check"] jupyter={"source_hidden": true}
first, *_ = list(found.values())
for kind, (_, shares) in SHARES.items():
    assert [round(100 * f[kind] / first[kind]) for f in list(found.values())[:4]] == shares
masked, once = ranks.get("(one_step(llama(), ChildTuningAdamW), one_step(adapted(), reshard_after_forward=False))")[0]
assert masked == {kind: first[kind] for kind in masked}
assert (once["gathered again"], round(once["moved"])) == (0, 1619)
assert [round(f["checkpointed"]) for f in found.values()] == [302, 301, 241, 241, 241]
assert ranks.get("len(model.get_input_embeddings()._forward_hooks)")[0] == 0

# %% [markdown]
# Checkpointing keeps each block's input, whatever is trained: 302 KiB for all weights, 301 for the last two blocks.
# Freezing the lower blocks still saves FLOPs and gathers. Choose by what you lack:
#
# | what you lack | way | what you pay |
# |:--|:--|:--|
# | nothing: everything fits | train all weights | 16 bytes per parameter in float32 (weight, gradient, two moments), shared by all ranks |
# | memory for gradients and AdamW | adapters in all blocks | most activations stay; perhaps accuracy |
# | compute, or (without checkpointing) activation memory | freeze the lower blocks | perhaps accuracy |
# | gradient memory, activation memory and bandwidth | adapters, in the upper blocks only | perhaps accuracy, not measured here |
# | training samples | a mask: its paper finds less overfitting, the measurement below no gain | no savings; *p* to choose; mode F also draws a random number per weight and step |
#
# With the base ignored, only the adapters move: 24 KiB, gathered in forward and in backward, then reduced. A
# middle way, `reshard_after_forward=False`, keeps the gathered blocks until backward: adapters then move 1,619 KiB
# instead of 3,182, but after forward each rank holds the whole model.
#
# Computed for a real size: Llama 3 8B on 8 ranks, without activations. It has 8.03 billion weights. The 1.05 billion of
# the root unit are gathered once, the others twice, in bfloat16; gradients are reduced in float32. Of each, 7/8 cross
# a rank's link.
#
# | | GiB on each rank | GiB gathered + reduced | at 25 GB/s per rank | at 400 GB/s |
# |:--|--:|--:|--:|--:|
# | all weights, float32, with gradients and AdamW | 15.0 | 28 + 30 | 2.17 s | 0.14 s |
# | adapters, base in float32 (bfloat16) | 3.7 (1.9) | 28 | 1.05 s | 0.07 s |
# | adapters, bfloat16 base ignored | 15.0 | adapters only | | |
#
# **Shard the frozen weights, unless they fit whole and the gathers take longer than the computation that could hide
# them.** If you ignore them, move them to the GPU and cast them yourself: neither `fully_shard` nor a
# `MixedPrecisionPolicy` touches them. [Lesson 17](17_fine_tune_three_ways.ipynb) fine-tunes with PEFT, and saves the adapters alone.
#
# ## Your turn 1 · Which frozen weights stay whole?
#
# The model has adapters in its last two blocks. A step moves 2,365 KiB, and each of 4 ranks holds 395 KiB of weights.
#
# **Goal:** a step moves at most 1,400 KiB, and each rank holds at most 800 KiB of weights.
#
# **Write** `whole(model)`. It returns the frozen parameters, in a list or a set, that each rank keeps complete; they
# become `ignored_params`. The blocks are `model.model.layers`, the adapters in them have `requires_grad`.
#
# <details><summary>Hint</summary>
#
# A block takes 256.5 KiB, of which each rank has a quarter already, so there is room for two. Which blocks are
# gathered in forward *and* in backward, because the gradient passes through them?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
import re

from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@turn(1, {
    "adapters that no rank reduces": exactly(
        0, "You keep adapters out of FSDP2 as well, so no one averages their gradients and the ranks would train "
        "different models: leave out what has `requires_grad`."
    ),
    "KiB of weights on each rank": at_most(
        round(1067 / world + 533), "More is kept whole than fits: there is room for two blocks."
    ),
    "KiB moved in a step": at_most(
        1400, lambda n: "Nothing large is kept whole: return the parameters of whole blocks." if n > 2300 else
        "Use all the room for blocks that forward and backward both gather. The lower blocks are gathered in forward "
        "alone, and where block 3 is kept whole, block 2 is gathered ahead in its place."
    ),
})
def score_whole(whole):
    model = adapted([4, 5])
    adapters = {p for p in model.parameters() if p.requires_grad}
    answer = whole(model)
    try:
        kept = set(answer)
    except TypeError:
        raise NotYet("Return the parameters in a list or a set.") from None
    if not kept <= set(model.parameters()):
        raise NotYet("Return parameters of the model, such as `list(module.parameters())`, not names or modules.")
    trained = len(kept & adapters)
    found = {} if trained else one_step(model, ignored_params=kept)
    return {
        "adapters that no rank reduces": trained,
        "KiB of weights on each rank": found.get("weights"),
        "KiB moved in a step": found.get("moved"),
    }


# %%
# %%turn 1
def whole(model):                               # with adapters in blocks 4 and 5, not yet sharded
    # Which blocks are gathered twice? Of their parameters, return the frozen ones.
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def whole(model):
    return [p for block in model.model.layers[4:] for p in block.parameters() if not p.requires_grad]

# %% tags=["right"] turn=1
def whole(model):                               # by name; a set
    return {p for name, p in model.named_parameters() if re.search(r"layers\.[45]\.", name) and "lora" not in name}

# %% tags=["right"] turn=1
def whole(model):                               # the matrices alone; a generator
    for name, p in model.named_parameters():
        if ("layers.4." in name or "layers.5." in name) and p.numel() > 1000 and not p.requires_grad:
            yield p

# %% tags=["right"] turn=1
def whole(model):                               # an iterator
    return filter(lambda p: not p.requires_grad, model.model.layers[4:].parameters())

# %% tags=["wrong"] turn=1 says="leave out what has `requires_grad`"
def whole(model):                               # the adapters, too
    return [p for block in model.model.layers[4:] for p in block.parameters()]

# %% tags=["wrong"] turn=1 says="gathered in forward alone"
def whole(model):                               # the lowest blocks
    return list(model.model.layers[:2].parameters())

# %% tags=["wrong"] turn=1 says="block 2 is gathered ahead in its place"
def whole(model):                               # block 3 instead of block 4
    return [p for n in (3, 5) for p in model.model.layers[n].parameters() if not p.requires_grad]

# %% tags=["wrong"] turn=1 says="More is kept whole than fits"
def whole(model):                               # the whole base
    return [p for p in model.parameters() if not p.requires_grad]

# %% tags=["wrong"] turn=1 says="Nothing large is kept whole"
def whole(model):                               # the root unit
    return [model.model.embed_tokens.weight, model.lm_head.weight]

# %% tags=["wrong"] turn=1 says="not names or modules"
def whole(model):
    return [name for name, p in model.named_parameters() if "layers.4" in name or "layers.5" in name]

# %% tags=["wrong"] turn=1 says="in a list or a set"
def whole(model):
    return len(model.model.layers)

# %% [markdown]
# ## Masks: what still moves
#
# [Child tuning](https://arxiv.org/abs/2109.05687) multiplies each gradient by a mask of zeros and ones before AdamW
# sees it. It was proposed against overfitting. `ChildTuningAdamW` has both of the paper's modes:
#
# - **F** ("task-free") draws a new mask at each step. An element of a gradient is kept with probability *p*, and
#   divided by *p*, so that its mean stays the same.
# - **D** ("task-driven") chooses one mask before training: `fisher_mask` adds up each weight's squared gradients of single
#   samples (an estimate of its **Fisher information**), and keeps the fraction *p* of all weights with the largest sums.
#
# The mask comes after backward, when all gradients have been computed, reduced and stored. So with
# `ChildTuningAdamW` the script would print its first line again.
#
# Under FSDP2 each rank masks its own shard. Mode F draws from the seed, the step and the element's place in the
# unsharded model, so with FSDP2's default cut any number of ranks has the same masks, without communication.
# Mode D needs one threshold for all ranks (turn 2). The gradient that `fisher_mask` squares is the mean over
# the ranks: to square the gradients of single samples, give all ranks the same one.
#
# Does a masked weight at least stay where it is? Of 1,000 weights whose gradients are all 1, the cell keeps 30% and
# counts how many the second of two steps moves. If masked weights stayed, that would be about 300.

# %%
# %%ranks 0
def moved_by_step_2(optimizer_class, mask=1, **options):
    p = nn.Parameter(torch.ones(1000))
    optimizer = optimizer_class([("p", p)], **options)
    for _ in range(2):
        p.grad = torch.ones(1000) * mask
        before = p.detach().clone()
        optimizer.step()
    return int((p != before).sum())


AdamW, mask = torch.optim.AdamW, torch.arange(1000) < 300    # True: is trained
mode_d = {"mode": "task", "gradient_mask": {"p": mask}}
moved = {
    "mode F, p = 0.3": moved_by_step_2(ChildTuningAdamW, reserve_p=0.3),
    "mode D": moved_by_step_2(ChildTuningAdamW, **mode_d),
    "mode D, weight_decay=0.1": moved_by_step_2(ChildTuningAdamW, weight_decay=0.1, **mode_d),
    "p.grad *= mask, then torch's AdamW": moved_by_step_2(AdamW, mask),
    "p.grad *= mask, weight_decay=0": moved_by_step_2(AdamW, mask, weight_decay=0),
}

# %%
moved = ranks.get("moved if rank == 0 else None")[0]
assert list(moved.values())[1:] == [300, 1000, 1000, 300]
assert 460 < moved["mode F, p = 0.3"] < 560
Table(["masked by", "of 1,000 weights, moved by step 2"], list(moved.items()))

# %% [markdown]
# Three rows exceed 300, for two reasons. In mode F, a weight that was kept in step 1 and is masked in step 2 goes on
# moving by its momentum: 30% + 70% · 30%, about half. And no mask on gradients stops weight decay, which torch's AdamW
# has by default, `ChildTuningAdamW` not. If masked weights must stay as they are, use mode D without weight decay.
#
# ## Your turn 2 · One threshold for all ranks
#
# Each rank has the squared gradients of its shard, `squares`, numbers from 0 to 1. Of all ranks' elements together, the
# fraction `keep` with the largest squares is to be trained. No rank may collect the squares: for billions of weights
# they would not fit.
#
# **Goal:** each rank keeps the right elements, and collectives move at most 4 KiB (the squares of 4 ranks are 43).
#
# **Write** `my_mask(squares, keep)`, which returns a bool for each of this rank's elements.
#
# <details><summary>Hint</summary>
#
# Guess a threshold. Which one number per rank tells you whether it is too low or too high for all of them?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
@turn(2, {
    "wrong elements on this rank": at_most(
        1, "A rank keeps others than the largest of all ranks together: is the threshold the same on all ranks, and "
        "do you count the elements of all?"
    ),
    "KiB moved": at_most(4, "The ranks exchange too much: exchange counts, not squares."),
})
def score_mask(my_mask):
    everyone = [torch.rand(2000 + 500 * r, generator=torch.Generator().manual_seed(r)) / (r + 1) for r in range(world)]
    squares = everyone[rank].to(device)
    with record_collectives(fully_shard(nn.Linear(8, 8, device=device), mesh=mesh)) as trace:
        mask = my_mask(squares.clone(), 0.3)
    if not isinstance(mask, torch.Tensor) or mask.shape != squares.shape:
        raise NotYet("Return one bool for each element of `squares`, such as `squares > threshold`.")
    together = torch.cat(everyone).sort(descending=True).values
    right = squares >= together[round(0.3 * len(together)) - 1].item()
    return {
        "wrong elements on this rank": int((mask != right).sum()),
        "KiB moved": round(sum(event.bytes for event in trace.events) / 2**10, 2),
    }


# %%
# %%turn 2
def my_mask(squares, keep):                     # f32[n], another n on each rank -> bool[n]
    # Find one threshold for all ranks; dist.all_reduce(tensor) adds up a tensor over the ranks, in place.
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def my_mask(squares, keep):
    low, high = 0.0, 1.0
    for _ in range(30):                         # halve the interval that holds the threshold
        middle = (low + high) / 2
        excess = (squares > middle).sum() - keep * len(squares)
        dist.all_reduce(excess)
        low, high = (middle, high) if excess > 0 else (low, middle)
    return squares > high

# %% tags=["right"] turn=2
def my_mask(squares, keep):                     # ten parts instead of two
    total, low = torch.tensor(len(squares), device=device), 0
    dist.all_reduce(total)
    for digit in range(1, 9):
        edges = low + torch.arange(1, 11, dtype=torch.float64, device=device) / 10**digit
        above = (squares[:, None] > edges).sum(0)
        dist.all_reduce(above)
        low += int((above > keep * total).sum()) / 10**digit
    return squares > low

# %% tags=["right"] turn=2
def my_mask(squares, keep):                     # positive floats are in the order of their bits
    bits, threshold = squares.view(torch.int32), 0
    for bit in reversed(range(30)):
        excess = (bits >= threshold + 2**bit).sum() - keep * len(squares)
        dist.all_reduce(excess)
        threshold += 2**bit * bool(excess > 0)
    return bits >= threshold

# %% tags=["right"] turn=2
def my_mask(squares, keep):                     # numbers for bools
    threshold = 0.0
    for n in range(1, 31):
        excess = ((squares > threshold + 2**-n).float() - keep).sum()
        dist.all_reduce(excess)
        threshold += 2**-n * float(excess > 0)
    return (squares > threshold).float()

# %% tags=["wrong"] turn=2 says="is the threshold the same on all ranks"
def my_mask(squares, keep):                     # each rank its own
    return squares >= squares.quantile(1 - keep)

# %% tags=["wrong"] turn=2 says="keeps others than the largest"
def my_mask(squares, keep):                     # the mean of the ranks' thresholds
    threshold = squares.quantile(1 - keep)
    dist.all_reduce(threshold)
    return squares >= threshold / world

# %% tags=["wrong"] turn=2 says="exchange counts, not squares"
def my_mask(squares, keep):
    everyone = [None] * world
    dist.all_gather_object(everyone, squares.tolist())
    return squares >= torch.tensor([x for one in everyone for x in one]).quantile(1 - keep).to(device)

# %% tags=["wrong"] turn=2 says="one bool for each element"
def my_mask(squares, keep):                     # places
    return squares.topk(int(keep * len(squares))).indices

# %% [markdown]
# ## What does each way cost in accuracy?
#
# A small unsharded model learns scikit-learn's digits 0 to 4, images of 8 by 8 pixels. Then it gets a new head and is
# fine-tuned for 100 steps on **40 images** of the digits 5 to 9: all weights, both masks with *p* = 0.3, the last two
# of three layers, and adapters with *r* = 4 beside the new head, each at five learning rates with eight seeds.
# `fine_tuned` returns the percentage of about 500 unseen images that are recognised.

# %% jupyter={"source_hidden": true}
# %%ranks
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
old, new = labels < 5, labels >= 5
LABELS = 40


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def learn(model, optimizer, x, y, steps, generator):
    for _ in range(steps):
        chosen = torch.randint(len(x), (16,), generator=generator)
        optimizer.zero_grad()
        loss_fn(model, (x[chosen], y[chosen])).backward()
        optimizer.step()


torch.manual_seed(0)
pretrained = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
adamw = torch.optim.AdamW(pretrained.parameters(), lr=3e-3)
learn(pretrained, adamw, images[old], labels[old], 400, torch.Generator().manual_seed(0))

# %%
# %%ranks
def optimizer_for(way, model, samples, seed, lr):
    named = list(model.named_parameters())
    if way == "mode F":
        return ChildTuningAdamW(named, lr=lr, reserve_p=0.3, seed=seed)
    if way == "mode D":                         # the squares of single images
        return ChildTuningAdamW(named, lr=lr, mode="task", gradient_mask=fisher_mask(model, samples, loss_fn, keep=0.3))
    return torch.optim.AdamW(named, lr=lr, weight_decay=0.0, fused=True)    # fused: faster


def fine_tuned(way, seed, lr):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(int(new.sum()), generator=generator)
    x, y = images[new][order], labels[new][order] - 5
    model = copy.deepcopy(pretrained)
    torch.manual_seed(seed)
    model[-1].reset_parameters()                # a new head
    if way == "last two layers":
        model[0].requires_grad_(False)
    if way == "adapters":                       # on both hidden layers; the new head is trained as it is
        get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], modules_to_save=["4"]))
    samples = [(x[i : i + 1], y[i : i + 1]) for i in range(LABELS)]
    learn(model, optimizer_for(way, model, samples, seed, lr), x[:LABELS], y[:LABELS], 100, generator)
    with torch.no_grad():
        return 100 * (model(x[400:]).argmax(1) == y[400:]).float().mean().item()


# %% tags=["task"]
# %%ranks
RATES, SEEDS = [0.01 * 0.3 ** (n / 2) for n in (1, 0, -1, -2, -3)], 8
WAYS = ("all weights", "mode F", "mode D", "last two layers", "adapters")
mine = {(w, lr, s): fine_tuned(w, s, lr) for w in WAYS for lr in RATES for s in range(rank, SEEDS, world)}

# %% jupyter={"source_hidden": true}
import statistics

RATES, SEEDS, WAYS = ranks.get("(RATES, SEEDS, WAYS)")[0]
right = {key: value for found in ranks.get("mine") for key, value in found.items()}    # the ranks share the seeds
mean = {way: [sum(right[way, lr, s] for s in range(SEEDS)) / SEEDS for lr in RATES] for way in WAYS}
best = {way: RATES[mean[way].index(max(mean[way]))] for way in WAYS}
assert all(RATES[0] < lr < RATES[-1] for lr in best.values())
rows = [["all weights", f"{max(mean['all weights']):.1f}%", ""]]
for way in WAYS[1:]:                            # seed by seed, each way at its best rate; 2.365: Student's t
    points = [right[way, best[way], s] - right[WAYS[0], best[WAYS[0]], s] for s in range(SEEDS)]
    gain, half = statistics.mean(points), 2.365 * statistics.stdev(points) / SEEDS**0.5
    assert {"mode F": abs(gain) < half, "mode D": half / 2 < -gain < 2 * half}.get(way, gain + half < 0)
    rows.append([way, f"{max(mean[way]):.1f}%", f"{gain:+.1f} ± {half:.1f}"])

every, masked = mean["all weights"], mean["mode F"]
assert all(abs(masked[n + 1] - every[n]) < 1 for n in (0, 1))
assert all(masked[n + 1] < every[n] - 1 for n in (2, 3))

fig, panels = plots.figure(2, width=9.4, height=3.2)
looks = [{"color": c, "marker": m} for c, m in zip(plots.RANK_COLORS, "os^D")]
for way, look in zip(WAYS, [{"color": plots.FAINT, "linewidth": 7}, *looks]):
    panels[0].plot(RATES, mean[way], label=way, **look)
    if way in ("all weights", "mode F"):
        panels[1].plot([lr * (0.3**0.5 if way == "mode F" else 1) for lr in RATES], mean[way], **look)
labels = ("learning rate", "learning rate, in mode F times √p")
for axes, label, lowest in zip(panels, labels, (54, 78)):
    axes.set(xscale="log", xlabel=label, ylim=(lowest, 92))
    axes.set_xticks(RATES, [f"{lr:.2g}" for lr in RATES])
    axes.minorticks_off()
panels[0].set_ylabel("% of unseen images right")
panels[0].legend(loc="lower left")
plots.show(fig, alt="Accuracy by learning rate of five ways; over √p times the rate, mode F begins on all weights.")

# %% tags=["nbval-ignore-output"]
Table(["at its best rate", "right", "points against all weights, 95%"], rows)

# %% [markdown]
# **Left:** look at the tops, which the table compares seed by seed (± is a 95% interval). Mode F is level with all
# weights. Mode D is behind by about the spread of the seeds, the frozen first layer and the adapters by more.
# Each best rate was chosen on these same images, so all percentages are slightly optimistic.
#
# **Right:** up to its best rate, mode F falls on all weights at √*p* times the rate. AdamW steps by the learning rate
# times the mean of *g*, divided by the root of the mean of *g*². Mode F makes *g* into *g*/*p* with
# probability *p*, else into 0: the mean stays, the mean square becomes *p* · (*g*/*p*)² = *g*²/*p*, and the step gets √*p*
# times as long. At higher rates mode F is behind even so. Give each way its own rate.
#
# Don't carry these points over to a language model. There, the LoRA paper reports adapters on a par with full
# fine-tuning; [a later study](https://arxiv.org/abs/2405.09673) finds them behind on code and mathematics at small
# *r*. Child tuning's abstract reports gains of 1.5 to 8.6 points on average over four pretrained models.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the lower blocks are frozen, but backward gathers all of them | tied embeddings: the head that you train *is* the embedding at the bottom | freeze the head, too |
# | the same, with transformers' activation checkpointing (5.23) | it makes the embedding's output require gradients (`enable_input_require_grads`) | in this order: adapters, `activation_checkpointing_enable()`, `disable_input_require_grads()`, with `use_reentrant=False` |
# | `FSDP expects uniform original parameter dtype` | *trained* parameters of two dtypes in one unit, such as float32 adapters beside a trained bfloat16 norm | cast them, or make the adapters units |
# | memory did not fall with LoRA | a base weight has a `p.grad`: it is only left out of the optimizer. If it has none: activations, most of which LoRA keeps | `requires_grad_(False)`; against activations, checkpointing or adapters in the upper blocks only |
# | `mode "task" finds its masks by name` | `ChildTuningAdamW` got `model.parameters()`, or a mask names a parameter that it lacks | pass `model.named_parameters()` |
#
# ## The rule
#
# Train adapters, in the upper blocks only if accuracy allows, or freeze from below, and shard the frozen weights.
# Do not mask to save anything. Compare accuracies at each way's best rate.
#
# [← lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) · [lesson 10 →](10_end_to_end.ipynb)

# %% [markdown]
# # 9 · Child fine-tuning
#
# You fine-tune a pretrained model. Which of its weights may stay unchanged: frozen ones, all but small adapters,
# or those under a mask? **Freeze with `requires_grad=False`, or train adapters: FSDP2 then keeps and reduces no
# gradients for the rest. Both can cost accuracy, so compare them on your task. A mask on the gradients, which is
# called child tuning, saves no memory and no communication.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WAYS = {  # for each of six blocks: the share that is trained, and whether backward gathers it again
    "all weights": [(1, True)] * 6,
    "the last two blocks": [(0, False)] * 3 + [(0, True)] + [(1, True)] * 2,
    "adapters": [(0.12, True)] * 6,
    "masked": [(1, True)] * 6,
}
places = ["block 0 (input)", *(f"block {n}" for n in range(1, 5)), "block 5 (loss)"]
fig, panels = plots.figure(4, width=9.4, height=2.4)
for axes, (title, blocks) in zip(panels, WAYS.items()):
    for block, (trained, again) in enumerate(blocks):
        axes.barh(block, 1, height=0.8, color=plots.FAINT)
        hatch = {"hatch": "////", "edgecolor": plots.CARD, "linewidth": 0} if title == "masked" else {}
        axes.barh(block, trained, height=0.8, color=plots.RANK_COLORS[0], **hatch)
        axes.text(1.04, block, "↺" if again else "", va="center")
    axes.set(title=title, xlim=(0, 1.2), xticks=[])
    axes.set_yticks(range(6), places if axes is panels[0] else [""] * 6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Six blocks in four ways to fine-tune: which part is trained, what is gathered again.")

# %% [markdown]
# The drawing shows four ways to fine-tune a model of six blocks, each an FSDP2 unit. Blue weights are trained: they
# have gradients and AdamW's two running averages. Grey weights are frozen and have neither. Hatched means that a
# mask sets a part of each gradient to zero. ↺ marks a block that backward gathers a second time. Look at where
# ↺ is missing: only freezing the lower blocks lets backward stop early. (Adapters are drawn far too wide. Why
# block 3 is gathered, although nothing in it is trained, is explained below.)

# %% tags=["card"]
lesson.card(
    9,
    learn="what freezing, adapters and masks each save under FSDP2, and what they cost",
    needs="[lesson 1](01_transformer_wrapper.ipynb)",
    minutes=(1, 17, 25),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same Llama in the four ways. For
# each it prints what rank 0 keeps for the trained weights, and what one step gathers and reduces.
#
# ```python
# import torch
# import torch.distributed as dist
# from peft import LoraConfig, get_peft_model
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# from fsdp_utils import ChildTuningAdamW, record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
#
# for way in ("all weights", "last two", "adapters", "masked"):
#     torch.manual_seed(0)
#     model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device)    # your pretrained model
#     blocks = model.model.layers
#     if way == "last two":
#         model.requires_grad_(False)
#         for part in [*blocks[4:], model.model.norm, model.lm_head]:
#             part.requires_grad_(True)
#     if way == "adapters":                                    # PEFT adds them in place, and freezes the rest
#         get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
#     for part in [*blocks, model]:
#         fully_shard(part, mesh=mesh)
#     trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
#     optimizer = (ChildTuningAdamW if way == "masked" else torch.optim.AdamW)(trained, lr=1e-3)
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(3):
#         ids = torch.randint(64, (4, 30), device=device)      # your data
#         optimizer.zero_grad()
#         with record_collectives(model) as trace:
#             model(input_ids=ids, labels=ids).loss.backward()
#         optimizer.step()
#     kept = [p.grad for _, p in trained]
#     kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
#     kept, moved = sum(t.to_local().nbytes for t in kept) / 2**10, trace.bytes_by_kind()
#     gathered, reduced = moved["all_gather"] / 2**10, moved["reduce_scatter"] / 2**10
#     if dist.get_rank() == 0:
#         print(f"{way:11}: keeps {kept:5,.0f} KiB, gathers {gathered:5,.0f} KiB, reduces {reduced:5,.0f} KiB")
# dist.destroy_process_group()
# ```
# ```text
# all weights: keeps 1,178 KiB, gathers 3,110 KiB, reduces 1,571 KiB
# last two   : keeps   397 KiB, gathers 2,341 KiB, reduces   529 KiB
# adapters   : keeps    18 KiB, gathers 3,158 KiB, reduces    24 KiB
# masked     : keeps 1,178 KiB, gathers 3,110 KiB, reduces 1,571 KiB
# ```
#
# The model takes 1,571 KiB in float32, and with all weights trained it **reduces** a gradient for each of them.
# It **keeps** that gradient and two averages, three tensors of which rank 0 has a quarter: 3 · 1,571 / 4 = 1,178.
# It **gathers** the complete model in forward, and in backward the six blocks again, 256.5 KiB each, together 3,110.
#
# The other rows follow. The last two blocks, the final norm and the head are 529 KiB, a third of the model, so a
# third is kept and reduced, and backward gathers three blocks fewer. The adapters are 24 KiB: little is kept and
# reduced, but nothing less is gathered, and the adapters on top. The mask changes nothing. Hence the choice:
#
# | what you lack | way | what you gain here | what you pay |
# |:--|:--|:--|:--|
# | nothing: everything fits | train all weights | the accuracy to compare with | 16 bytes per parameter in float32 |
# | memory for gradients and AdamW | adapters | 98% less of them | as many gathers, perhaps accuracy |
# | fast links, compute or memory for activations | freeze lower blocks | with four of six: 25% fewer bytes gathered, 44% fewer FLOPs, a third of the activations | perhaps accuracy |
# | training samples | a mask | perhaps less overfitting | one more setting to tune, no savings |
#
# ## Where you freeze decides what you save
#
# A frozen parameter has no gradient, so FSDP2 has nothing to reduce, and AdamW skips it and makes no averages for
# it. FSDP2 decides this for each parameter, so one unit may hold frozen and trained ones. The weights themselves
# stay sharded, and forward gathers them as before. You may freeze before `fully_shard` or after it.
#
# What else you save depends on *where* you freeze. Backward starts at the loss and works down to the lowest
# parameter that is trained. It needs the weights of every block on that way, trained or not, because the gradient
# has to pass through them. Below that parameter nothing remains to be computed, so backward stops.
#
# The next cells freeze one block after the other, once from below (first the embedding, then block 0 upwards) and
# once from above (first the head and the final norm, then block 5 downwards). Two helpers are folded:
# `llama(trains)` builds the script's model and trains the parameters for whose name `trains` returns True;
# `activations(model)` adds up what forward keeps for backward, apart from weights.

# %%
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama", "peft", "sklearn.datasets"])    # slow to import

# %%
# %%ranks
import copy
import re
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

# %% jupyter={"source_hidden": true}
# %%ranks
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")    # PEFT asks transformers for it
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
SAMPLES = torch.randint(64, (4, 30), generator=torch.Generator().manual_seed(rank)).to(device)    # this rank's


def llama(trains):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(trains(name)))
    return model


def part(tensor):
    """What this rank holds of a tensor."""
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
def one_step(model, **options):
    """Shard a model, take one step, and count; bytes in KiB."""
    held = activations(model)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=mesh, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    with record_collectives(model) as trace, FlopCounterMode(display=False) as flops:
        model(input_ids=SAMPLES, labels=SAMPLES).loss.backward()
    optimizer.step()
    kept = [p.grad for p in trained]
    kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gathers = [event for event in trace.events if event.kind == "all_gather"]
    return {
        "weights": sum(part(p).nbytes for p in model.parameters()) / 2**10,
        "kept": sum(part(t).nbytes for t in kept) / 2**10,
        "activations": held,
        "gathered": sum(event.bytes for event in gathers) / 2**10,
        "gathered again": sum(event.phase == "backward" for event in gathers),
        "MFLOP": flops.get_total_flops() / 1e6,
    }


# %% tags=["freezing"]
# %%ranks
def place(name):                                # 0: embedding; 1 to 6: blocks 0 to 5; 7: final norm and head
    block = re.search(r"layers\.(\d)\.", name)
    return int(block[1]) + 1 if block else 0 if "embed" in name else 7


from_below = [one_step(llama(lambda name, k=k: place(name) > k)) for k in range(7)]    # k blocks, embedding
from_above = [one_step(llama(lambda name, k=k: place(name) < 7 - k)) for k in range(7)]

# %% jupyter={"source_hidden": true}
below, above = ranks.get("(from_below, from_above)")[0]
fig, panels = plots.figure(4, width=9.4, height=2.5)
shown = {"kept": "gradients, averages, KiB", "activations": "activations, KiB", "gathered again": "gathers in backward",
         "MFLOP": "MFLOP of a step"}
for axes, (what, title) in zip(panels, shown.items()):
    axes.plot([f[what] for f in above], color=plots.RANK_COLORS[1], linewidth=5, label="frozen from above")
    axes.plot([f[what] for f in below], color=plots.RANK_COLORS[0], marker="o", label="frozen from below")
    axes.set(title=title, xlabel="frozen blocks", ylim=(0, None), xticks=range(7))
panels[2].legend(loc="lower left", fontsize=7)
plots.show(fig, alt="Kept bytes, activations, gathers in backward and FLOPs, by the number of frozen blocks.")

# %% tags=["check"] jupyter={"source_hidden": true}
assert [f["gathered again"] for f in below] == [6, 6, 5, 4, 3, 2, 1]
assert {f["gathered again"] for f in above[:6]} == {6}
assert above[5]["MFLOP"] > 1.2 * below[5]["MFLOP"]
assert 0.555 < below[4]["MFLOP"] / below[0]["MFLOP"] < 0.565
assert below[4]["activations"] < 0.36 * below[0]["activations"]
assert above[4]["activations"] > 0.7 * above[0]["activations"]

# %% [markdown]
# In the first panel the lines lie on each other: for gradients and averages it makes no difference where you
# freeze. In the other three it does. A block frozen **from below** (blue) also saves its activations, its second
# gather and its whole backward. A block frozen **from above** (orange) only saves the FLOPs of its own weights'
# gradients and some activations, because the gradient still passes through it to the blocks below. So if the
# early layers are good enough for your task, freeze from below.
#
# Why does the first frozen block save no gather? While backward works on a block, FSDP2 already gathers the next
# one below, to hide the communication. It does so even where backward is about to stop, so one block is gathered
# for nothing. In the drawing that is block 3.
#
# **To check your own run**, count the gathers in backward as `one_step` does: there should be one for each block
# down to the lowest trained one, and one more. Tied embeddings and transformers' activation checkpointing both send
# backward further down, without a word: see [the table at the end](#When-it-goes-wrong).
#
# ## What adapters save, and what they gather
#
# [LoRA](https://arxiv.org/abs/2106.09685), the most common adapter, freezes a linear layer *W* and adds `B(A(x))`,
# times a constant, to its output. *A* maps *x* down to *r* numbers and *B* maps them back up. Only *A* and *B*
# are trained: here *r* is 4, on two layers of each block. *B* begins with zeros, so the model begins as it was.
#
# The lowest adapters are in block 0, so backward goes all the way down and gathers every block again. Are these
# gathers necessary? Frozen weights never change, so each rank could keep them complete, and nobody would
# have to gather them: `fully_shard` leaves the parameters in `ignored_params` as they are. The next cell trains all
# weights, then adapters with the frozen base sharded, then with the base ignored.

# %%
# %%ranks
found = {}
for way in ("all weights", "adapters, base sharded", "adapters, base ignored"):
    model = llama(lambda name: True)
    if "adapters" in way:
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))    # freezes the rest
    frozen = {p for p in model.parameters() if not p.requires_grad}
    found[way] = one_step(model, ignored_params=frozen if "ignored" in way else None)

# %%
from fsdp_utils.lessons.tables import Table

found = ranks.get("found")[0]
assert found["adapters, base ignored"]["weights"] > 1.9 * found["adapters, base sharded"]["weights"]
kinds = {"weights": "weights", "kept": "gradients and averages", "activations": "activations", "gathered": "gathered"}
rows = [[way, *(round(f[kind]) for kind in kinds)] for way, f in found.items()]
Table(["KiB on rank 0", *kinds.values()], rows)

# %% [markdown]
# From the first row to the second, gradients and averages all but vanish; most activations stay, because backward
# still needs them. From the second to the third, the weights take four times the memory, and only the adapters
# are gathered: 24 KiB, twice. So ignoring buys communication with memory.
#
# Now for a model of real size, on 8 ranks. Llama 3 8B in float32 takes 15 GiB on each rank for weights, gradients and
# averages. With adapters, the weights remain: 3.7 GiB, or 1.9 if the base is in bfloat16. (FSDP2 asks for one
# dtype per unit only among *trained* parameters, so its adapters may be float32.) Then every step gathers 28 GiB, the
# model once and its blocks again. Ignored, that base takes 15 GiB on each rank. **Shard the frozen weights,
# unless they fit whole and the links are slow.** If you ignore them, move them to the GPU and cast them
# yourself: neither `fully_shard` nor a `MixedPrecisionPolicy` touches them.
#
# [Lesson 17](17_fine_tune_three_ways.ipynb) fine-tunes with PEFT, and saves the adapters alone.
#
# ## Your turn 1 · Freeze for a slow link
#
# **Goal:** your link is slow, so backward may gather no more than 4 blocks. Train as many parameters as that
# allows: at most 206,000 of the 402,240 may be frozen.
#
# **Write** `trains(name)`, which returns True if the parameter of that name is to be trained. The names are those of
# transformers: `model.embed_tokens.weight`, `model.layers.5.self_attn.q_proj.weight` (blocks are numbered from 0, at
# the input), `model.norm.weight` and `lm_head.weight`.
#
# <details><summary>Hint</summary>
#
# Which is the lowest block that may be trained? One of the 4 gathers is the one for nothing.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@turn(1, {
    "blocks that backward gathers": at_most(
        4, lambda n: "Backward goes down to the lowest parameter that is trained, and gathers every block on "
        "its way: something is trained too far down."
    ),
    "frozen parameters": at_most(
        206_000, "Too much is frozen: the topmost blocks can be trained without more gathers."
    ),
}, returns=False)
def score_trains(trains):
    model = llama(trains)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if frozen == sum(p.numel() for p in model.parameters()):
        raise NotYet("Nothing is trained: is a `return` missing, or does no name match?")
    return {"blocks that backward gathers": one_step(model)["gathered again"], "frozen parameters": frozen}


# %%
# %%turn 1
def trains(name):                               # called for each parameter, from the embedding to the head
    # Return True for the head, the final norm and the blocks that you train, else False.
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def trains(name):
    return any(part in name for part in ("layers.3.", "layers.4.", "layers.5.", "model.norm", "lm_head"))

# %% tags=["right"] turn=1
import numpy as np

def trains(name):                               # NumPy's bool; the last norm and the head stay frozen
    numbers = np.array([int(word) for word in name.split(".") if word.isdigit()])
    return (numbers >= 3).any()

# %% tags=["right"] turn=1
def trains(name):                               # a match for a bool
    return re.match(r"model\.layers\.[345]|lm_head", name)

# %% tags=["right"] turn=1
frozen = {"embed_tokens", "0", "1", "2"}

def trains(name):
    return frozen.isdisjoint(name.split("."))

# %% tags=["wrong"] turn=1 says="trained too far down"
def trains(name):                               # the lowest instead of the highest
    return "layers.0." in name or "layers.1." in name

# %% tags=["wrong"] turn=1 says="trained too far down"
def trains(name):
    return "layers.0." not in name

# %% tags=["wrong"] turn=1 says="Too much is frozen"
def trains(name):                               # the script's last two blocks
    return any(part in name for part in ("layers.4.", "layers.5.", "model.norm", "lm_head"))

# %% tags=["wrong"] turn=1 says="trained too far down"
def trains(name):                               # the norms of all blocks, too
    return any(part in name for part in ("layers.4.", "layers.5.", "norm"))

# %% tags=["wrong"] turn=1 says="Nothing is trained"
def trains(name):
    return name.startswith("layers.5")

# %% [markdown]
# ## Masks: what still moves
#
# [Child tuning](https://arxiv.org/abs/2109.05687) trains a part of the weights, a "child network", in another way:
# it multiplies each gradient by a mask of zeros and ones before AdamW sees it. It was proposed against overfitting
# on small data sets. `ChildTuningAdamW` replaces AdamW and has both of the paper's modes:
#
# - **F** ("task-free") draws a new mask at each step. An element of a gradient is kept with probability *p*, and
#   divided by *p*, so that its mean stays the same.
# - **D** ("task-driven") chooses one mask before training: `fisher_mask` adds up each weight's squared gradients on
#   the task (its **Fisher information**), and keeps the fraction *p* of all weights with the largest sums.
#
# The mask comes after backward, when all gradients have been computed, reduced and stored. That is why the script's
# last row equals its first. But does a masked weight at least stay where it is? The cell takes two steps with
# 1,000 weights whose gradients are all 1, keeps 30% of them, and counts how many weights the second step moves.
# If masked weights stayed, that would be about 300.

# %%
# %%ranks 0
mask = torch.arange(1000) < 300                 # True: is trained


def moved_by_step_2(make_optimizer, mask=1):
    p = nn.Parameter(torch.ones(1000))
    optimizer = make_optimizer([("p", p)])
    for _ in range(2):
        p.grad = torch.ones(1000) * mask
        before = p.detach().clone()
        optimizer.step()
    return int((p != before).sum())


AdamW, fixed = torch.optim.AdamW, {"mode": "task", "gradient_mask": {"p": mask}}
moved = {
    "mode F, p = 0.3": moved_by_step_2(lambda named: ChildTuningAdamW(named, reserve_p=0.3)),
    "mode D": moved_by_step_2(lambda named: ChildTuningAdamW(named, **fixed)),
    "mode D, weight_decay=0.1": moved_by_step_2(lambda named: ChildTuningAdamW(named, weight_decay=0.1, **fixed)),
    "p.grad *= mask, then torch's AdamW": moved_by_step_2(AdamW, mask),
    "p.grad *= mask, weight_decay=0": moved_by_step_2(lambda named: AdamW(named, weight_decay=0), mask),
}

# %%
moved = ranks.get("moved if rank == 0 else None")[0]
assert list(moved.values())[1:] == [300, 1000, 1000, 300]
assert 460 < moved["mode F, p = 0.3"] < 560
Table(["masked by", "of 1,000 weights, moved by step 2"], list(moved.items()))

# %% [markdown]
# Three rows exceed 300, for two reasons. In mode F, a weight that was kept in step 1 and is masked in step 2 goes on
# moving by its momentum: 30% + 70% · 30%, about half. And weight decay is no part of the gradient, so no mask on
# gradients stops it. torch's AdamW decays by default, `ChildTuningAdamW` does not. If masked weights must stay as
# they are, use mode D without weight decay.
#
# **On several ranks** a mask must not depend on how the model is cut, or another number of ranks would train another
# model. `ChildTuningAdamW` therefore draws each element from the seed, the step and the element's place in the unsharded
# model. The cell compares the mask of a model before and after sharding:

# %%
# %%ranks
def drawn_mask(model):
    named = list(model.named_parameters())
    optimizer = ChildTuningAdamW(named, betas=(0.0, 0.0), seed=0)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()                            # without momentum, exp_avg is the masked gradient
    return [optimizer.state[p]["exp_avg"] != 0 for _, p in named]


model = llama(lambda name: True)
alone = drawn_mask(model)
for unit in [*model.model.layers, model]:
    fully_shard(unit, mesh=mesh)
differ = sum((a != b.full_tensor()).sum().item() for a, b in zip(alone, drawn_mask(model)))
print(f"{differ} of {sum(a.numel() for a in alone):,} elements differ")
assert differ == 0

# %% [markdown]
# ## Your turn 2 · One threshold for all ranks
#
# Mode D keeps the largest squared gradients *of the whole model*, but each rank has only the squares of its own
# shard. `fisher_mask` finds the common threshold; here you do.
#
# **Goal:** together, the ranks keep the fraction `keep` of all elements, the largest ones. Don't gather the squares,
# those of a large model would not fit: each rank may receive 4 KiB.
#
# **Write** `my_mask(squares, keep)`. `squares` is this rank's 1-D tensor of numbers between 0 and 1; ranks have different
# numbers of them. Return this rank's mask: a bool for each square, True if it is kept.
#
# <details><summary>Hint</summary>
#
# Halve an interval, at first from 0 to 1: count the elements above its middle, and add up the counts of all
# ranks by `dist.all_reduce`. Thirty halvings are enough.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.collectives.c10d_hooks import listen_to_calls


def of_all(number, op=dist.ReduceOp.SUM):
    number = torch.as_tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(number, op)
    return number.item()


@turn(2, {
    "fraction of all elements that is kept": exactly(
        0.3, less="Fewer than `keep` of all elements are kept: is the count one over all ranks?",
        more="More than `keep` of all elements are kept: is the count one over all ranks?",
    ),
    "every kept square is larger than every square left out": exactly(
        True, "Some rank keeps squares that are smaller than what another leaves out: the threshold must be the "
        "same on all ranks, and the larger squares must be those above it."
    ),
    "KiB received": at_most(4, "The ranks exchange too much: exchange counts, not squares."),
})
def score_mask(my_mask):
    size = 2000 + 500 * rank
    generator = torch.Generator().manual_seed(rank)
    squares = (torch.rand(size, generator=generator, dtype=torch.float64) / (rank + 1)).float().to(device)
    received = []

    def note(call, issue):
        received.append(call.bytes_out)
        return issue()

    with listen_to_calls(note):
        mask = my_mask(squares.clone(), 0.3)
    mask = torch.as_tensor(mask, device=device)
    if mask.shape != squares.shape or mask.dtype != torch.bool:
        raise NotYet("Return one bool for each element of `squares`, such as `squares > threshold`.")
    least = squares[mask].min().item() if mask.any() else 2.0
    most = squares[~mask].max().item() if not mask.all() else -1.0
    return {
        "fraction of all elements that is kept": round(of_all(mask.sum()) / of_all(size), 3),
        "every kept square is larger than every square left out":
            of_all(least, dist.ReduceOp.MIN) > of_all(most, dist.ReduceOp.MAX),
        "KiB received": sum(received) / 2**10,
    }


# %%
# %%turn 2
def my_mask(squares, keep):                     # f32[n], another n on each rank -> bool[n]
    # How many elements do all ranks have? How many of all are above a threshold?
    return None                                 # your lines here: squares > threshold


# %% tags=["solution"] turn=2
def my_mask(squares, keep):
    total = torch.tensor(float(len(squares)), device=squares.device)
    dist.all_reduce(total)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        above = (squares > middle).sum().float()
        dist.all_reduce(above)
        low, high = (middle, high) if above > keep * total else (low, middle)
    return squares > high

# %% tags=["right"] turn=2
def my_mask(squares, keep):                     # counts in 100 ranges, again within the range of the threshold
    low, high, wanted = 0.0, 1.0, None
    for _ in range(4):
        counts = torch.histc(squares, 100, low, high)
        if wanted is None:
            total = counts.sum()
            dist.all_reduce(total)
            wanted = keep * total
        dist.all_reduce(counts)
        above = counts.flip(0).cumsum(0)
        i = int((above >= wanted).nonzero()[0])
        wanted = wanted - (above[i - 1] if i else 0)
        low, high = high - (i + 1) * (high - low) / 100, high - i * (high - low) / 100
    return squares > low

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional

def my_mask(squares, keep):                     # functional collectives; a list
    def count(t):
        return functional.all_reduce((squares > t).sum().reshape(1), "sum", dist.group.WORLD).item()

    total, step, threshold = count(-1.0), 0.5, 0.5
    for _ in range(28):
        step /= 2
        threshold += step if count(threshold) > keep * total else -step
    return (squares > threshold).tolist()

# %% tags=["right"] turn=2
from torch.distributed.tensor import DTensor, Partial

def my_mask(squares, keep):                     # DTensor adds up the counts
    def above(t):
        return DTensor.from_local((squares > t).sum(), mesh, [Partial()]).full_tensor().item()

    low, high = 0.0, 1.0
    while high - low > 1e-8:
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > keep * above(-1.0) else (low, middle)
    return (squares > high).numpy() if squares.device.type == "cpu" else squares > high

# %% tags=["wrong"] turn=2 says="the threshold must be the same on all ranks"
def my_mask(squares, keep):                     # each rank its own
    return squares >= squares.quantile(1 - keep)

# %% tags=["wrong"] turn=2 says="is the count one over all ranks"
def my_mask(squares, keep):                     # the mean of the ranks' thresholds
    threshold = squares.quantile(1 - keep)
    dist.all_reduce(threshold)
    return squares >= threshold / world

# %% tags=["wrong"] turn=2 says="exchange counts, not squares"
def my_mask(squares, keep):
    everything = [None] * world
    dist.all_gather_object(everything, squares.tolist())
    values = torch.tensor([value for each in everything for value in each])
    return squares > values.sort(descending=True).values[round(keep * len(values))]

# %% tags=["wrong"] turn=2 says="one bool for each element"
def my_mask(squares, keep):                     # the places of the largest, not a mask
    return squares.topk(round(keep * len(squares))).indices

# %% [markdown]
# `fisher_mask` does the same with 65,536 intervals instead of two, so it needs few collectives. Note what it squares:
# under FSDP a gradient is already the *mean* over the ranks. For the squares of single samples, give all ranks the
# same sample, one in each batch.
#
# ## What does each way cost in accuracy?
#
# Bytes are half of the answer. A small unsharded model learns scikit-learn's digits 0 to 4, real images of 8 by
# 8 pixels. Then it gets a new head and is fine-tuned for 100 steps on **40 images** of the digits 5 to 9, in five
# ways: all weights, both masks with *p* = 0.3, the last two of its three layers, and adapters with *r* = 4 beside the new
# head. Different ways want different learning rates, so each gets five, and twelve seeds for each of them.
# `fine_tuned` returns the percentage of about 500 unseen images that are recognised; the training loop `learn` is folded.

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
RATES, SEEDS = (1e-3, 3e-3, 1e-2, 2e-2, 1e-1), 12


def measure(ways):                              # the ranks share the seeds
    mine = {(w, lr, s): fine_tuned(w, s, lr) for w in ways for lr in RATES for s in range(rank, SEEDS, world)}
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    return {key: value for each in everyone for key, value in each.items()}


right = measure(["all weights", "mode F", "mode D"])

# %%
# %%ranks
right |= measure(["last two layers", "adapters"])

# %% jupyter={"source_hidden": true}
right, RATES, SEEDS = ranks.get("(right, RATES, SEEDS)")[0]
WAYS = list(dict.fromkeys(way for way, *_ in right))
mean = {way: [sum(right[way, lr, s] for s in range(SEEDS)) / SEEDS for lr in RATES] for way in WAYS}
best = {way: RATES[mean[way].index(max(mean[way]))] for way in WAYS}
fig, (axes,) = plots.figure(width=7.5, height=3.0)
looks = [{"color": plots.FAINT, "linewidth": 7}]
looks += [{"color": color, "marker": marker} for color, marker in zip(plots.RANK_COLORS, "os^D")]
for way, look in zip(WAYS, looks):
    axes.plot(RATES, mean[way], label=way, **look)
axes.set(xscale="log", xlabel="learning rate", ylabel="% of unseen images right", ylim=(60, 92))
axes.set_xticks(RATES, [f"{lr:g}" for lr in RATES])
axes.minorticks_off()
axes.legend(loc="lower center")
plots.show(fig, alt="Accuracy by learning rate of five ways: all weights and mode F reach the same best, the others less.")

# %%
import statistics

rows = []
for way in WAYS[1:]:                            # seed by seed, each way at its best rate; 2.201: Student's t
    points = [right[way, best[way], s] - right[WAYS[0], best[WAYS[0]], s] for s in range(SEEDS)]
    gain, half = statistics.mean(points), 2.201 * statistics.stdev(points) / SEEDS**0.5
    assert abs(gain) < half if way == "mode F" else gain + half < 0
    rows.append([way, f"{max(mean[way]):.0f}%", f"{gain:+.1f} ± {half:.1f}"])
assert all(RATES[0] < lr < RATES[-1] for lr in best.values())
Table(["at its best rate", "right", "points against all weights, 95%"], rows, note=f"all weights: {max(mean[WAYS[0]]):.0f}%")

# %% [markdown]
# First look at the **tops** of the curves, which the table compares seed by seed (± is a 95% interval). Mode F is level
# with all weights. Mode D, the frozen first layer and the adapters are behind by more than the spread of the seeds
# explains. So here every way that holds weights fixed has a price.
#
# Then look at the **ends**. At 0.001 both masks are far behind all weights, at 0.1 far ahead: mode F takes shorter
# steps, and in mode D fewer weights move. (The adapters' last point lies below the frame.) Compared at one rate
# only, you could show either. That is why each way needs its own. (The best was chosen by the same test images,
# which flatters all five.)
#
# This is one small task with one small model, one *p*, one *r* and 100 steps, so don't carry its points over to a language
# model. There, the LoRA paper reports adapters on a par with full fine-tuning or better; [a later
# study](https://arxiv.org/abs/2405.09673) finds them clearly behind on code and mathematics at the usual small *r*.
# Child tuning's paper reports averages over four GLUE tasks: against all weights, F and D gain 0.87 and 1.50 points
# with BERT, -0.09 and 0.51 with RoBERTa, 6.27 and 8.60 with ELECTRA.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the lower blocks are frozen, but backward gathers all of them | tied embeddings: the head that you train *is* the embedding at the bottom | freeze the head, too |
# | the same, with transformers' activation checkpointing (5.23) | it makes the embedding's output require gradients (`enable_input_require_grads`) | `model.disable_input_require_grads()` afterwards, if `use_reentrant` is False |
# | `has both parameters with requires_grad=True and False` (or `Must flatten tensors with uniform …`) | FSDP1, and a unit with frozen and trained parameters | FSDP2, or `use_orig_params=True`. FSDP1 then still reduces the gradient of the whole unit: give frozen modules units of their own |
# | `FSDP expects uniform original parameter dtype` | *trained* parameters of two dtypes in one unit, such as float32 adapters beside a trained bfloat16 norm | cast them, or make the adapters units |
# | `attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'` | a unit that was wholly frozen in its first forward and is unfrozen later, under a `MixedPrecisionPolicy` (without one, FSDP2 lets you unfreeze; add the parameters to the optimizer) | shard a fresh model with the new choice, and load the weights |
# | memory did not fall with LoRA | the base is not frozen, only left out of the optimizer: its gradients are computed, reduced and kept | `requires_grad_(False)`, and look at `p.grad` of a base weight |
# | `mode "task" finds its masks by name` | `ChildTuningAdamW` got `model.parameters()` | pass `model.named_parameters()` |
#
# ## The rule
#
# Freeze from below, or train adapters; shard the frozen weights, too, unless they fit whole and the links are slow.
# Do not mask to save anything. Compare the accuracy of every way with that of all weights, each at its best rate.
#
# [← lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb) · [lesson 10 →](10_end_to_end.ipynb)

# %% [markdown]
# # 2 · Activation checkpointing
#
# FSDP shards weights, gradients and optimizer state. It does not shard the **activations**: what the forward pass
# leaves in memory for the backward pass. They grow with every sample and every token of your batch. What does it cost
# not to keep them?
#
# A checkpoint around a block keeps the block's input alone. The backward pass runs the block's forward a second time
# to get the rest back.
#
# **Put each block into a checkpoint, then shard it: `fully_shard(checkpoint_wrapper(block))`.** On an H200 a Llama's
# peak fell from 25.5 to 15.1 GiB, and its step took 28% longer. Six kinds of blocks below cost 23 to 33% more FLOPs.
#
# Use it when a step doesn't fit, or when you want a larger batch or longer sequences than fit now.
#
# The drawing shows a model of six blocks between its forward and its backward pass. What is coloured is in memory;
# what is grey was freed and will be computed again.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WAYS = {"no checkpoint": lambda i: True, "every second block": lambda i: i % 2, "every block": lambda i: False}
fig, (axes,) = plots.figure(width=8.0, height=1.9)
for row, kept in enumerate(WAYS.values()):
    for block in range(6):
        axes.barh(row, 0.9, left=block, height=0.7, color=plots.FAINT)
        axes.barh(row, 0.9 if kept(block) else 0.09, left=block, height=0.7, color=plots.RANK_COLORS[row])
axes.set_yticks(range(3), list(WAYS))
axes.set_xticks([i + 0.45 for i in range(6)], [f"block {i}" for i in range(6)])
axes.set(xlim=(-0.1, 6), ylim=(2.5, -0.5))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="What is kept until backward without checkpoints and with two kinds of them.")

# %% tags=["card"]
lesson.card(
    2,
    learn="see what autograd keeps, choose what to compute again, and put the checkpoint in the right place",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 18, 27),
)

# %% [markdown]
# ## The script
#
# The script trains the drawing's model in its three ways, under FSDP2, and prints what each keeps and computes.
# Autograd calls `keep` with each tensor that it saves for the backward pass, and the script adds up their bytes on
# rank 0. `FlopCounterMode` counts FLOPs: the multiplications and additions of a step's matrix products.
#
# Guess before you look: a backward pass takes about twice the FLOPs of a forward pass. How many more does a step take
# when each block runs forward twice? Save the script as `train.py`, then `torchrun --nproc-per-node 4 train.py`.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.autograd.graph import saved_tensors_hooks
# from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
# from torch.distributed.fsdp import fully_shard
# from torch.utils.flop_counter import FlopCounterMode
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = dist.init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# kept = {}                                                         # bytes that autograd keeps, by address
#
#
# def keep(tensor):
#     if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):    # weights stay anyway
#         kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
#     return tensor
#
#
# def train(wrapped):
#     torch.manual_seed(0)                                          # the same weights on every rank
#     model = nn.Sequential()
#     for index in range(6):
#         block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
#         model.append(fully_shard(checkpoint_wrapper(block) if index in wrapped else block, mesh=mesh))
#     fully_shard(model, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                        # other samples on each rank
#     for step in range(3):
#         kept.clear()
#         with saved_tensors_hooks(keep, lambda tensor: tensor), FlopCounterMode(display=False) as flops:
#             loss = model(torch.randn(6, 64, 64, device=device)).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     return sum(kept.values()) / 2**20, flops.get_total_flops(), loss.item()
#
#
# for name, wrapped in {"no checkpoint": (), "every second": (0, 2, 4), "every block": range(6)}.items():
#     mib, flops, loss = train(wrapped)
#     plain = plain if wrapped else flops
#     if dist.get_rank() == 0:
#         print(f"{name:13}  {mib:.2f} MiB kept, FLOPs {flops / plain - 1:+.0%}, loss {loss:.3f}")
# dist.destroy_process_group()
# ```
# ```text
# no checkpoint  6.91 MiB kept, FLOPs +0%, loss 1.172
# every second   3.79 MiB kept, FLOPs +11%, loss 1.172
# every block    0.66 MiB kept, FLOPs +22%, loss 1.172
# ```
#
# Each of six checkpoints frees 1.04 MiB and adds 3.7% to the FLOPs. The losses are equal: a checkpoint changes when
# numbers are computed, not which numbers.
#
# In your own model, replace each block: `layers[i] = fully_shard(checkpoint_wrapper(layers[i]))`, and at the end
# `fully_shard(model)`. The wrapper leaves the names in `state_dict()` as they are, but `named_parameters()` of the
# model shows its prefix `_checkpoint_wrapped_module.`, so look there if you choose weight decay by exact names.
#
# Two other ways do the same: `shard(model, checkpointing="full")` of `fsdp_utils`, and for models of transformers
# (5.23) `model.gradient_checkpointing_enable({"use_reentrant": False})` before `fully_shard`. Use only one of them.
#
# ## What autograd keeps
#
# Why can so much go? The backward pass of `y = x @ w` needs `x` and `w`. The weight exists anyway, so what has to be
# kept is the input: of each product, each norm, each `gelu`. The next cell writes a transformer's block out and asks
# autograd what it saves. Find each row of the table below in `forward`.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])                     # slow to import

# %%
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                                               # f32[batch, tokens, width]
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                            # each f32[batch, heads, tokens, 16]
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))           # f32[batch, tokens, width]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

kept = {}                                                               # as in the script

def keep(tensor):
    if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor

torch.manual_seed(rank)
x = torch.randn(24 // world, 64, 64, device=device, requires_grad=True)     # f32[24 / world, tokens, width]
with saved_tensors_hooks(keep, lambda tensor: tensor):
    Block().to(device)(x)

# %%
x_bytes, kept = ranks.get("x.nbytes")[0], ranks.get("list(kept.values())")[0]
ON_CPU = [
    *(("the block's input", "norm1"), ("result of norm1", "qkv"), ("queries, keys and values", "attention")),
    *(("result of attention", "out"), ("x after attention", "norm2"), ("result of norm2", "up")),
    *(("result of up", "gelu"), ("result of gelu", "down")),
]
large = [nbytes / x_bytes for nbytes in kept if nbytes >= x_bytes]
labels = ON_CPU if len(large) == len(ON_CPU) else [("", "")] * len(large)   # a GPU's attention may keep others
Table(
    ["tensor", "kept for the backward of", "times the input"],
    [[*label, f"{times:.2f}"] for label, times in zip(labels, large)],
    note=f"With {len(kept) - len(large)} small ones (of norms and softmax) {sum(kept) / x_bytes:.2f} times the block's input.",
)

# %% [markdown]
# One block keeps 16 times the size of its own input. Half of that is the wide middle of the feed-forward network,
# before and after `gelu`. And every row below the first can be computed from the first. That is the whole idea of a
# checkpoint: keep the block's input, free the rest, and run the block's forward once more when the backward pass
# arrives at it.
#
# ## What the second forward costs
#
# Forward is a third of a step's FLOPs, so running it a second time should add a third. In the script it added 22%,
# because PyTorch stops the second forward as soon as it has every tensor that backward needs (**early stop**). Look at
# the last line of `Block`: `down` is followed by an addition alone, backward never asks for its result, and so the
# second forward ends before it.
#
# How much that spares depends on what follows the last product. A norm needs its input and a dropout keeps its mask;
# both come after the product, so the whole block runs again. The next table compares six kinds of blocks (`measure`
# runs a step). Compare its second row with the third and fourth: the same layer, with one argument changed.

# %% jupyter={"source_hidden": true}
# %%ranks
# FlopCounterMode of PyTorch 2.13 does not count attention on the CPU, unless it is told how.
from functools import partial
from types import SimpleNamespace

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_utils.lessons.meter import Meter

aten = torch.ops.aten
on_cpu = "_scaled_dot_product_flash_attention_for_cpu"
COUNTED = {
    getattr(aten, on_cpu): lambda *shapes, **__: sdpa_flop_count(*shapes[:3]),
    getattr(aten, on_cpu + "_backward"): lambda *shapes, **__: sdpa_backward_flop_count(*shapes[:4]),
}

# %%
# %%ranks
def measure(blocks, run):
    """Measure a step: bytes kept, bytes over the step, FLOPs and gradients."""
    weights = [p for block in blocks for p in block.parameters()]
    flops = FlopCounterMode(display=False, custom_mapping=COUNTED)
    with Meter(weights, device=device) as meter, flops:
        flops.mod_tracker.__exit__()                            # its hooks on modules forbid autograd.grad
        loss = run(blocks)
        kept = meter.tensor_bytes[-1] - meter.held_bytes
        loss.backward()
    course = [nbytes - meter.held_bytes for nbytes in meter.tensor_bytes]
    gradients = [None if p.grad is None else p.grad.clone() for p in weights]
    return SimpleNamespace(kept=kept, course=course, flops=flops.get_total_flops(), gradients=gradients)

def through(blocks, **options):
    """The mean square of what comes out of the blocks."""
    y = x
    for block in blocks:
        y = block(y, **options)
    return (y[0] if isinstance(y, tuple) else y).square().mean()

def six(make, wrap=lambda block, index: block):
    """Six blocks with the same weights each time."""
    torch.manual_seed(0)
    blocks = [make().to(device) for _ in range(6)]
    return [wrap(block, index) for index, block in enumerate(blocks)]

def cost(make, run=through):
    """Share of activations that checkpoints keep, and FLOPs that they add, in %."""
    plain = measure(six(make), run)
    full = measure(six(make, lambda block, index: checkpoint_wrapper(block)), run)
    return [round(100 * full.kept / plain.kept, 1), round(100 * (full.flops / plain.flops - 1), 1)]

# %% tags=["full"]
# %%ranks
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

encoder = partial(nn.TransformerEncoderLayer, 64, 4, 256, batch_first=True)
llama = LlamaConfig(hidden_size=64, intermediate_size=176, num_attention_heads=4)
gpt2 = GPT2Config(n_embd=64, n_head=4)
llama._attn_implementation = gpt2._attn_implementation = "sdpa"

through_llama = partial(through, position_embeddings=LlamaRotaryEmbedding(llama)(x, torch.arange(64, device=device)[None]))
costs = {
    "the Block above": cost(Block),
    "TransformerEncoderLayer, norm_first, no dropout": cost(partial(encoder, dropout=0.0, norm_first=True)),
    "TransformerEncoderLayer, norm_first, dropout 0.1": cost(partial(encoder, norm_first=True)),
    "TransformerEncoderLayer, norm last, no dropout": cost(partial(encoder, dropout=0.0)),
    "Llama's layer": cost(partial(LlamaDecoderLayer, llama, 0), through_llama),
    "GPT-2's block, dropout 0.1": cost(partial(GPT2Block, gpt2, 0)),
}

# %%
costs = ranks.get("costs")[0]
Table(["six blocks of", "activations kept, %", "extra FLOPs, %"], [[name, *found] for name, found in costs.items()])

# %% [markdown]
# The layer that ends in an addition costs 23% (the script printed 22%, as on a CPU its counter leaves attention out;
# `measure` counts it). With a dropout or a norm at its end it costs 33%. Llama's layer ends in an addition, too, but
# its last product is a smaller part of it, so early stop spares less. The blocks with dropout keep a smaller share
# because without checkpoints they keep far more: the masks, and the whole matrix of attention weights (on a CPU
# attention with dropout takes another kernel).
#
# What has to fit into a GPU is not what is kept between the passes, but the peak. The next cell follows the bytes of
# activations and gradients from operation to operation. In its figure, look at how high each curve gets.

# %%
# %%ranks
plain = measure(six(Block), through)
full = measure(six(Block, lambda block, index: checkpoint_wrapper(block)), through)
pairs = measure([checkpoint_wrapper(nn.Sequential(*six(Block)[i : i + 2])) for i in (0, 2, 4)], through)

# %%
courses = dict(zip(["no checkpoint", "every block"], ranks.get("plain.course, full.course")[0]))
fig, panels = plots.figure(2, width=8.5, height=2.6)
for axes, color, (name, course) in zip(panels, plots.RANK_COLORS[::2], courses.items()):
    course = [nbytes / 2**20 for nbytes in course]
    axes.fill_between(range(len(course)), course, color=color, linewidth=0)
    axes.set(title=f"{name}: peak {max(course):.1f} MiB", xlabel="operations of one step", xticks=[], ylim=(0, 11))
panels[0].set_ylabel("activations and\ngradients, MiB")
plots.show(fig, alt="Bytes alive over one step: a hill without checkpoints, a saw with them.")

# %% [markdown]
# Without checkpoints the curve is a hill: forward piles up, backward takes away. With checkpoints, forward stays
# low, and each large tooth is one block that is computed again and freed. What remains at the right end are
# gradients. The bytes kept fell to 7%, but the peak only to 32%, because at the highest tooth one block's
# activations and most of the gradients are there. (This is one rank alone; under FSDP each unit's gradients are
# sharded.)
#
# ## Selective: choose by operation
#
# Not all activations cost the same to compute again. The result of a matrix product is expensive; the result of
# `gelu` or of a norm is cheap, and takes as many bytes. So a checkpoint accepts a **policy**: a function that it
# asks, for each operation of the block, whether to save the result. The block has five expensive operations, four
# products and attention. The next cells try all 32 ways to save some of them (`saving` builds the policy), and
# beside them the coarser choice, a checkpoint around every k-th block.

# %%
# %%ranks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION = {getattr(aten, f"_scaled_dot_product_{kernel}").default for kernel in KERNELS}
WEIGHTS = {(64, 192): "qkv", (64, 64): "out", (64, 256): "up", (256, 64): "down"}

def saving(names):
    """The policy that saves the results of these operations."""

    def policy(context, operation, *args, **kwargs):
        if operation in ATTENTION:
            return SAVE if "attention" in names else RECOMPUTE
        is_linear = operation is aten.addmm.default             # args: bias, input, weight
        return SAVE if is_linear and WEIGHTS[tuple(args[2].shape)] in names else RECOMPUTE

    return policy

def under(policy, every=1):
    """A step in which every so-many-th block has a checkpoint with this policy."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    def wrap(block, index):
        return block if index % every else checkpoint_wrapper(block, context_fn=contexts)
    return measure(six(Block, wrap), through)

def share(step):
    """Activations kept and extra FLOPs, in %."""
    return 100 * step.kept / plain.kept, 100 * (step.flops / plain.flops - 1)

# %% tags=["selective"]
# %%ranks 0
from itertools import combinations

FIVE = ("qkv", "attention", "out", "up", "down")
swept = {names: share(under(saving(names))) for count in range(6) for names in combinations(FIVE, count)}
by_block = {every: share(under(saving(()), every)) for every in (1, 2, 3, 6)}

# %% jupyter={"source_hidden": true}
swept, by_block = ranks.get("rank == 0 and (swept, by_block)")[0]
fig, (axes,) = plots.figure(width=7.5, height=3.2)
axes.scatter(*zip(*swept.values()), s=16, color=plots.RANK_COLORS[0], label="32 policies")
axes.plot(*zip(*by_block.values(), (100, 0)), "o:", color=plots.RANK_COLORS[1], label="every 1st, 2nd, 3rd, 6th block")
for names, place in {("attention",): (3, 10), ("qkv", "attention", "out", "up"): (30, 2.5), ("down",): (20, 25)}.items():
    arrow = {"arrowstyle": "-", "color": plots.INK, "linewidth": 0.7, "shrinkA": 0}
    axes.annotate("saves " + ", ".join(names), swept[names], xytext=place, fontsize=8, arrowprops=arrow)
axes.set(xlabel="activations kept, %", ylabel="extra FLOPs, %", xlim=(0, 105), ylim=(-1.5, 28))
axes.legend()
plots.show(fig, alt="Policies and every k-th block, by activations kept and extra FLOPs.")

# %% jupyter={"source_hidden": true} tags=["check"]
slope = by_block[1][1] / (100 - by_block[1][0])                        # every k-th block lies on a line
assert all(abs(flops - slope * (100 - kept)) < 0.1 for kept, flops in by_block.values())
without_down = {names: found for names, found in swept.items() if names and "down" not in names}
assert all(flops < slope * (100 - kept) for kept, flops in without_down.values())
assert all(abs(swept[(*names, "down")][1] - flops) < 0.01 for names, (_, flops) in without_down.items())

# %% [markdown]
# Lower left is better. Checkpoints around every k-th block lie on a straight line, because each frees and costs the
# same. Each policy that saves something, and not `down`, lies below the line: fewer FLOPs for the same memory. Four
# saved results bring the extra FLOPs to zero, with 63% kept. Saving `down` is a waste, as early stop never
# computes it again.
#
# ## What a GPU says
#
# FLOPs are not seconds: the second forward also runs norms and `gelu` again, which take time and aren't counted. So
# here is a Llama of 0.95 billion parameters on one H200, under PyTorch 2.11, in bf16, with sequences of 2,048 tokens.
# Compare the times in a column. Two ways are new: compiled blocks, and activations that are sent to the CPU's memory
# until backward (`torch.autograd.graph.save_on_cpu(pin_memory=True)`).

# %% jupyter={"source_hidden": true} tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded

OF_4 = {"as it is": "none, eager", "checkpointing of each block": "full, eager", "selective checkpointing": "selective, eager"}
OF_4 |= {"activations to the CPU": "none, eager, activations to the CPU", "blocks compiled": "none, compiled"}
OF_4["blocks checkpointed and compiled"] = "full, compiled"
found = {row["setting"]: row for part in ("costs", "selective") for row in recorded.load(part)["results"]["rows"]}
found |= {f"{way}, batch of 4": found[name] for name, way in OF_4.items()}
peak = {way: row["peak_allocated_gib"] for way, row in found.items() if ", batch of " in way}
took = {way: f"{found[way]['step_s'] / found[f'none, eager, batch of {way[-1]}']['step_s']:.2f}" for way in peak}
Table(
    ["checkpoints", "GiB at the peak, 4 sequences", "time of a step, 2 sequences", "4 sequences", "8 sequences"],
    [[way, f"{peak[four]:.1f}" if (four := f"{way}, batch of 4") in peak else "·",
      *(took.get(f"{way}, batch of {batch}", "·") for batch in (2, 4, 8))] for way in [*OF_4.values(), "selective, compiled"]],
    note='Times: multiples of the first row\'s; "·": not measured. Full: every block. Selective: every block, but attention and '
         'every second matrix product are saved, as by shard(model, checkpointing="selective").')

# %% jupyter={"source_hidden": true} tags=["check"]
at_rest = 16 * (16 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2 * 32000 * 2048 + 2048) / 2**30     # bytes of the Llama
assert [f"{at_rest:.1f}", at_rest < min(peak.values())] == ["14.2", True]
none, full = ((peak[f"{way}, eager, batch of 8"] - peak[f"{way}, eager, batch of 4"]) / 4 for way in ("none", "full"))
assert [f"{none:.1f}", f"{full:.1f}", f"{none / full:.0f}"] == ["3.6", "0.7", "5"]
told = {"full, eager, batch of 4": "1.28", "full, compiled, batch of 4": "0.89", "full, eager, batch of 8": "1.26"}
told |= {"selective, eager, batch of 8": "1.29", "selective, compiled, batch of 2": "0.95"}
told |= {"none, eager, activations to the CPU, batch of 4": "6.60", "none, compiled, batch of 2": "0.94"}
assert {way: took[way] for way in told} == told

# %% [markdown]
# Weights, gradients and optimizer state take 16 bytes for each parameter, 14.2 GiB (one GPU shards nothing), so no
# checkpoint brings the peak below that. A checkpoint around every block comes close, for 28% more time.
#
# What you gain is room for a batch. From four to eight sequences, the peak grew by 3.6 GiB for each sequence without
# checkpoints and by 0.7 GiB with them: the same memory holds five times as many more.
#
# Compile the blocks, too: checkpointed and compiled, a step of 4 sequences took less time (0.89) than with neither. The
# compiler also chooses what to keep (22.2 GiB instead of 25.5; less if you set
# `torch._functorch.config.activation_memory_budget` below 1), but the checkpoint frees much more.
#
# **In eager mode, selective checkpointing was slower here than full, although it computes less again.** Its policy is
# Python that runs for every operation of every step, so a larger batch narrows the gap: 1.29 against 1.26 with 8
# sequences. In compiled blocks the policy is asked only while they are compiled: selective (0.95 with 2 sequences) took
# hardly longer than no checkpoint (0.94).
#
# Offloading took 6.6 times as long: `save_on_cpu` copies on the stream that computes, so while a tensor travels
# nothing else runs.
#
# ## The checkpoint goes inside the unit
#
# Two things now happen around a block: FSDP gathers its weights, and the checkpoint runs it again. Lesson 0 counted
# two all-gathers for each unit, one in forward and one in backward. Does the second forward need a third? And which
# tensor is the "input" that is kept?
#
# The next cells try four orders under FSDP2, measured by the folded function `order`. The blocks compute in bf16, and
# FSDP casts their results to float32 (`output_dtype`). So the first row keeps 8 times the input instead of 16. Look at
# the rows "inside" and "outside".

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
unit = partial(fully_shard, mp_policy=bf16)

def order(wrap, pairs=False):
    """All-gathers of a step of six blocks, and what each block adds to what is kept, times its input."""
    kept = {}
    for count in (2, 6):
        blocks = six(Block, wrap)[:count]
        if pairs:
            blocks = [checkpoint_wrapper(nn.Sequential(*blocks[i : i + 2])) for i in range(0, count, 2)]
        model = fully_shard(nn.Sequential(*blocks))
        for _ in range(2):                                      # the first step sets FSDP up
            with Meter([*model.parameters(), x], device=device) as meter:
                loss = model(x).sum()
                kept[count] = meter.tensor_bytes[-1] - meter.held_bytes - meter.gather_bytes[-1]
                loss.backward()
            model.zero_grad()
            x.grad = None
    return [meter.all_gathers, round((kept[6] - kept[2]) / 4 / x.nbytes, 1)]

# %% tags=["order"]
# %%ranks
orders = {
    "no checkpoint": order(lambda block, index: unit(block)),
    "inside: fully_shard(checkpoint_wrapper(block))": order(lambda block, index: unit(checkpoint_wrapper(block))),
    "outside: checkpoint_wrapper(fully_shard(block))": order(lambda block, index: checkpoint_wrapper(unit(block))),
    "one checkpoint around two units": order(lambda block, index: unit(block), pairs=True),
}

# %%
orders = ranks.get("orders")[0]
Table(["six blocks, FSDP2", "all-gathers", "kept per block, times its input"], [[name, *found] for name, found in orders.items()])

# %% jupyter={"source_hidden": true} tags=["check"]
assert [found[0] for found in orders.values()] == [12] * 4
assert [found[1] for found in orders.values()][1:] == [0.5, 1.0, 0.5]
peaks = [max(course) / 2**20 for course in ranks.get("full.course, pairs.course")[0]]
assert [f"{peak:.1f}" for peak in peaks] == ["3.0", "4.3"]

# %% [markdown]
# Twelve gathers are two for each block, in every row: a checkpoint costs FLOPs, but no gathers. (What a block itself
# sends, as under tensor parallelism, is sent again.) The order does change what is kept. FSDP casts a unit's input to
# bf16 just before the unit runs; a checkpoint inside sees the input after that cast, one outside sees it before:
# **twice the bytes**. (Where blocks return bf16, as with `output_dtype` left at None, both keep the same.)
#
# The last row keeps as little as "inside", and yet it is worse: a checkpoint around two blocks runs both again
# before the backward pass of the second can begin, so the activations of two blocks are there at once. In the figure
# of the peaks, such pairs raise 3.0 to 4.3 MiB. Hence one checkpoint in one unit. `torch.compile` goes between the
# two: `block = checkpoint_wrapper(block)`, `block.compile()`, `fully_shard(block)`.

# %% jupyter={"source_hidden": true}
# %%ranks
# The way of 2022: FSDP1 first, then apply_activation_checkpointing, which puts its wrapper inside the units. A
# reentrant checkpoint (use_reentrant=True, the older kind) outside of FSDP1's units gathers each block a third time.
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

reentrant = partial(checkpoint_wrapper, checkpoint_impl=checkpoints.CheckpointImpl.REENTRANT)
fsdp1 = partial(FSDP, device_id=device)
inside = fsdp1(nn.Sequential(*six(Block, lambda block, index: fsdp1(block))))
checkpoints.apply_activation_checkpointing(inside, reentrant, check_fn=lambda part: isinstance(part, Block))
outside = fsdp1(nn.Sequential(*six(Block, lambda block, index: reentrant(fsdp1(block)))))
for model, gathers in [(inside, 12), (outside, 18)]:
    for _ in range(2):
        with Meter(model.parameters()) as meter:
            model(x).square().mean().backward()
    assert meter.all_gathers == gathers

# %% [markdown]
# ## Your turn 1 · Write the checkpoint
#
# **Goal.** A checkpoint of your own: `my_checkpoint(block, x)` returns `block(x)`, keeps nothing but `x` until the
# backward pass, and runs the block a second time there.
#
# **Given.** `saved_tensors_hooks(store, fetch)`, from the script. Autograd calls `store(tensor)` for each tensor
# that it wants to keep, and keeps what `store` returns instead. In the backward pass it calls `fetch` with that, and
# expects the tensor back.
#
# **Measured.** Are the gradients right, is at most 8% kept (torch's checkpoint keeps 7.2%), and does each block run
# exactly twice?
#
# <details><summary>Hint</summary>
#
# Let `store` return a number: 0, 1, 2, … When the first number is fetched, run the block again under a second pair
# of hooks that collects its tensors in a list: they come in the same order. Autograd is off in the backward pass;
# `with torch.enable_grad():` switches it on. Without hooks: a `torch.autograd.Function` that saves `x`, and whose
# `backward` runs the block and calls `.backward(grad)` on the result.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

class Checkpointed(nn.Module):
    """A block under the reader's checkpoint; it counts how often the block runs, and when autograd was off."""

    def __init__(self, block, checkpoint):
        super().__init__()
        self.block, self.checkpoint, self.recorded = block, checkpoint, []
        block.register_forward_pre_hook(lambda *_: self.recorded.append(torch.is_grad_enabled()))

    def forward(self, x):
        return self.checkpoint(self.block, x)

def wrong_gradients(step):
    """How many gradients differ from those without a checkpoint."""
    pairs = zip(step.gradients, plain.gradients, strict=True)
    return sum(mine is None or not torch.allclose(mine, right, rtol=1e-4, atol=1e-6) for mine, right in pairs)

@turn(1, {
    "gradients that differ": exactly(0, "The second forward must give the same tensors in the same order, and the gradient must reach x."),
    "activations kept, %": at_most(8, "More than the blocks' inputs is kept until backward: what does `store` return?"),
    "runs of a block in one step":
        exactly(2, less="The block never runs again.", more="The block runs again for each tensor: collect all in one run."),
})
def score_checkpoint(my_checkpoint):
    blocks = six(Block, lambda block, index: Checkpointed(block, my_checkpoint))
    if not isinstance(blocks[0](x), torch.Tensor):
        raise NotYet("Return the block's output.")
    try:
        through(blocks).backward()
    except IndexError:
        if all(blocks[-1].recorded):
            raise
        raise NotYet("The second run kept nothing: autograd is off there, until `torch.enable_grad()`.") from None
    step = measure(six(Block, lambda block, index: Checkpointed(block, my_checkpoint)), through)
    return {
        "gradients that differ": wrong_gradients(step),
        "activations kept, %": round(100 * step.kept / plain.kept, 1),
        "runs of a block in one step": len(blocks[1].recorded),
    }

# %%
# %%turn 1
def my_checkpoint(block, x):                            # f32[batch, tokens, width] -> the same
    # store(tensor): return something small in the tensor's place
    # fetch(small): run block(x) again, once; return the tensor that belongs to it
    # then return block(x), run under saved_tensors_hooks(store, fetch)
    return None                                         # your lines here

# %% tags=["solution"] turn=1
import functools
import itertools

def my_checkpoint(block, x):
    numbers = itertools.count()

    @functools.cache                                    # the block runs again once
    def again():
        tensors = []
        with torch.enable_grad(), saved_tensors_hooks(lambda t: tensors.append(t.detach()), lambda _: None):
            block(x)
        return tensors

    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: again()[number]):
        return block(x)

# %% tags=["right"] turn=1
from torch.utils.checkpoint import checkpoint
def my_checkpoint(block, x):                            # torch's own
    return checkpoint(block, x, use_reentrant=False)

# %% tags=["right"] turn=1
class Recompute(torch.autograd.Function):               # an operation with a backward of its own
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(grad)
        return x.grad, None

def my_checkpoint(block, x):
    return Recompute.apply(x, block)

# %% tags=["right"] turn=1
def my_checkpoint(block, x):                            # a copy of x, and keys that are no numbers
    keys, again = [], {}

    def fetch(key):
        if not again:
            kept = []
            with torch.enable_grad(), saved_tensors_hooks(kept.append, lambda _: None):
                block(x.detach().requires_grad_())
            again.update(zip(keys, kept))
        return again[key]

    with saved_tensors_hooks(lambda tensor: keys.append(f"tensor {len(keys)}") or keys[-1], fetch):
        return block(x)

# %% tags=["wrong"] turn=1 says="More than the blocks' inputs"
def my_checkpoint(block, x):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return block(x)

# %% tags=["wrong"] turn=1 says="for each tensor"
def my_checkpoint(block, x):
    numbers = iter(range(99))

    def fetch(number):
        again = []
        with torch.enable_grad(), saved_tensors_hooks(again.append, lambda _: None):
            block(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), fetch):
        return block(x)

# %% tags=["wrong"] turn=1 says="autograd is off there"
def my_checkpoint(block, x):                            # autograd is off in the second run
    numbers, again = iter(range(99)), []

    def fetch(number):
        if not again:
            with saved_tensors_hooks(again.append, lambda _: None):
                block(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), fetch):
        return block(x)

# %% tags=["wrong"] turn=1 says="must reach x"
def my_checkpoint(block, x):                            # the gradient stops at the block's input
    return checkpoint_wrapper(block)(x.detach().requires_grad_())

# %% [markdown]
# ## Your turn 2 · A policy under a budget
#
# **Goal.** A checkpoint around every second block keeps 54% of the activations and adds 12% to the FLOPs. Write
# `my_policy`, which for no more FLOPs keeps at most 33%.
#
# **Given.** The table: what saving one result adds to the 7.2% that are kept anyway, and what it takes off the 23.3%
# of extra FLOPs. For several results both add up.

# %%
SHAPES = {"qkv": "(64, 192)", "attention": "", "out": "(64, 64)", "up": "(64, 256)", "down": "(256, 64)"}
base = swept[()]
rows = [(name, shape, *swept[name,]) for name, shape in SHAPES.items()]
Table(
    ["operation", "shape of args[2]", "saving it keeps, %", "and spares FLOPs, %"],
    [[name, shape, f"+{kept - base[0]:.1f}", f"{base[1] - flops:.1f}"] for name, shape, kept, flops in rows],
    note=f"With nothing saved: {base[0]:.1f}% kept, {base[1]:.1f}% more FLOPs.",
)

# %% [markdown]
# **Return** `SAVE` or `RECOMPUTE` for each operation with which your policy is called. `aten.addmm.default` is the
# product in an `nn.Linear` with a bias (without one, as in Llama, it is `aten.mm.default`). Its arguments are bias,
# input and transposed weight. Attention is whatever is in `ATTENTION`.

# %% jupyter={"source_hidden": true}
# %%ranks
@turn(2, {
    "activations kept, %": at_most(33, "Too much is saved: add up the third column, and what is kept anyway."),
    "extra FLOPs of a step, %": at_most(12, "Too much is recomputed: spare 11.3% or more."),
    "gradients that differ": exactly(0, "The gradients differ from those without checkpoints."),
})
def score_policy(my_policy):
    if not isinstance(my_policy(None, aten.gelu.default, x), CheckpointPolicy):
        raise NotYet("Return SAVE or RECOMPUTE for every operation.")
    step = under(my_policy)
    kept, flops = share(step)
    return {
        "activations kept, %": round(kept, 1),
        "extra FLOPs of a step, %": round(flops, 1),
        "gradients that differ": wrong_gradients(step),
    }

# %%
# %%turn 2
def my_policy(context, operation, *args, **kwargs):
    # choose rows of the table; return SAVE for these operations, RECOMPUTE for all others
    return None                                         # your lines here

# %% tags=["solution"] turn=2
def my_policy(context, operation, *args, **kwargs):
    is_qkv = operation is aten.addmm.default and args[2].shape == (64, 192)
    return SAVE if is_qkv or operation in ATTENTION else RECOMPUTE

# %% tags=["right"] turn=2
my_policy = saving({"attention", "qkv"})

# %% tags=["right"] turn=2
def my_policy(context, operation, *args, **kwargs):     # by name, and by the width of the result
    if "scaled_dot_product" in str(operation):
        return CheckpointPolicy.PREFER_SAVE
    qkv = "addmm" in str(operation) and args[2].size(1) == 192
    return CheckpointPolicy.MUST_SAVE if qkv else CheckpointPolicy.MUST_RECOMPUTE

# %% tags=["right"] turn=2
def my_policy(context, operation, *args, **kwargs):
    products = [aten.addmm.default, *ATTENTION]
    chosen = operation in products and (operation in ATTENTION or tuple(args[2].shape) in [(64, 192)])
    return {True: SAVE, False: RECOMPUTE}[chosen]

# %% tags=["wrong"] turn=2 says="Too much is saved"
my_policy = saving({"attention", "up"})

# %% tags=["wrong"] turn=2 says="Too much is recomputed"
my_policy = saving({"attention", "out"})

# %% tags=["wrong"] turn=2 says="Return SAVE or RECOMPUTE"
def my_policy(context, operation, *args, **kwargs):
    return operation in ATTENTION

# %% [markdown]
# ## When it goes wrong
#
# Most mistakes here raise no error. So check three things after you add checkpoints: `print(model)` shows
# `FSDPCheckpointWrapper` for each block (if you wrapped it by `checkpoint_wrapper`),
# `torch.cuda.max_memory_allocated()` falls, and the first losses agree with those without checkpoints.
#
# The losses differ when the second forward computes something else than the first. Dropout draws random numbers, so
# `checkpoint_wrapper` restores the generator's state before it runs a block again, unless somebody switches that
# off. The next cell tries both in a block that ends in dropout.

# %%
# %%ranks 0
def gradients(wrap):
    torch.manual_seed(0)
    block = nn.Sequential(Block(), nn.Dropout(0.2)).to(device)
    wrap(block)(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in block.parameters()])

right = gradients(lambda block: block)
for name, options in {"the default": {}, "preserve_rng_state=False": {"preserve_rng_state": False}}.items():
    error = (gradients(partial(checkpoint_wrapper, **options)) - right).norm() / right.norm()
    print(f"{name}: error of the gradients {'none' if error == 0 else 'more than 10%' if error > 0.1 else error}")

# %% [markdown]
# The second line is training with wrong gradients, without a message. You may have it without knowing: Accelerate
# 1.15 wraps blocks with `preserve_rng_state=False` where its FSDP2 plugin does the activation checkpointing
# (`fsdp2_apply_ac`). In a model with dropout, wrap the blocks yourself.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `CheckpointError: … Recomputed values for the following tensors have different metadata` | the second forward took another path: a counter, a cache, random numbers that change a shape | make the block depend on its input alone; `determinism_check="none"` only silences the check |
# | a worse loss, no error | dropout without the generator's state | leave `preserve_rng_state` at its default |
# | memory does not fall | nothing was wrapped (`apply_activation_checkpointing` is silent when `check_fn` matches no module), or the peak is elsewhere: the logits of a large vocabulary | `print(model)`; a smaller batch shows whether the peak depends on activations at all |
# | more memory in backward than expected | one checkpoint spans several units, or lies outside of a bf16 unit whose input is float32 | one checkpoint inside each unit |
#
# ## The rule
#
# Checkpoint inside, FSDP outside, one in one: `fully_shard(checkpoint_wrapper(block))`. Is memory left? In compiled
# blocks, save matrix products and attention by a policy; in eager mode time a policy against fewer checkpoints
# first.
#
# [← lesson 1](01_transformer_wrapper.ipynb) · [lesson 3 →](03_full_state_dict.ipynb)

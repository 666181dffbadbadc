# %% [markdown]
# # 2 · Activation checkpointing
#
# What do you pay for the memory of activations? **A checkpoint around each block keeps 3 to 11% of them and
# costs 23 to 33% more FLOPs**; your block decides which. Put it inside the unit:
# `fully_shard(checkpoint_wrapper(block))`.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WAYS = {"no checkpoint": lambda i: True, "every second block": lambda i: i % 2, "every block": lambda i: False}
fig, (axes,) = plots.figure(width=7.5, height=1.9)
for row, kept in enumerate(WAYS.values()):
    for block in range(6):
        axes.barh(row, 0.9, left=block, height=0.7, color=plots.FAINT)
        axes.barh(row, 0.9 if kept(block) else 0.09, left=block, height=0.7, color=plots.RANK_COLORS[row])
axes.set_yticks(range(3), list(WAYS))
axes.set_xticks([i + 0.45 for i in range(6)], [f"block {i}" for i in range(6)])
axes.set(ylim=(2.5, -0.5))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="What is kept until backward without checkpoints and with two kinds of them.")

# %% [markdown]
# A drawing of a model of six blocks. What is coloured stays in memory from the forward pass to the backward
# pass. What is grey is thrown away and computed again: of a block with a checkpoint, only its input stays.

# %% tags=["card"]
lesson.card(
    2,
    learn="see what autograd keeps, choose what to compute again, and put the checkpoint in the right place",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb)",
    minutes=(1, 14, 27),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It counts the bytes that autograd keeps
# for the backward pass on rank 0, and the FLOPs (multiplications and additions) of matrix products in a step.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.autograd.graph import saved_tensors_hooks
# from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.utils.flop_counter import FlopCounterMode
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
# options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
#
#
# def train(every):
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256, **options) for _ in range(6)])
#     for index in range(6):
#         if every and index % every == 0:
#             model[index] = checkpoint_wrapper(model[index])  # inside
#         fully_shard(model[index], mesh=mesh)                 # outside
#     fully_shard(model, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(3):
#         kept = {}                                            # by address: bytes of what autograd keeps
#
#         def keep(tensor):
#             if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
#                 kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
#             return tensor
#
#         with FlopCounterMode(display=False) as flops:
#             with saved_tensors_hooks(keep, lambda tensor: tensor):
#                 loss = model(torch.randn(6, 64, 64)).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     return sum(kept.values()) / 2**20, flops.get_total_flops(), loss.item()
#
#
# for name, every in {"no checkpoint": 0, "every second": 2, "every block": 1}.items():
#     mib, flops, loss = train(every)
#     plain = flops if every == 0 else plain
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
# The losses are equal: a checkpoint changes when numbers are computed, not which. A tenth of the bytes stays,
# for 22% more FLOPs. (On a CPU this counter leaves attention out; below it is counted.) `checkpoint_wrapper`
# changes no name in `state_dict()`. The underscore in `_checkpoint` says that the module is private;
# torchtitan imports it all the same. The public function below it is
# `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, which you call in your model's
# `forward`.
#
# ## What autograd keeps
#
# The backward pass of `y = x @ w` needs `x` and `w`. The weights exist anyway. **Activations** are kept for
# the backward pass alone, and FSDP does not shard them: each rank holds those of its own samples. Here is a
# block of a transformer, written out so that you can see each tensor.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["torch._dynamo", "transformers.models.llama.modeling_llama"])    # slow to import

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


def saved_by(module, *inputs, **options):
    """What autograd keeps while the module runs: for each piece of memory, a shape and its bytes."""
    kept = {}

    def look(tensor):
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = list(tensor.shape), tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        output = module(*inputs, **options)
    return list(kept.values()), output


torch.manual_seed(rank)
x = torch.randn(24 // world, 64, 64, device=device, requires_grad=True)     # f32[24 / world, tokens, width]
kept, _ = saved_by(Block().to(device), x)

# %%
x_bytes, kept = ranks.get("x.nbytes")[0], ranks.get("kept")[0]
ON_CPU = [
    "the block's input",
    *("mean in norm1", "1 / deviation in norm1", "result of norm1, for qkv"),
    *("queries, keys and values, for attention", "sums of the softmax in attention"),
    *("result of attention, for out", "x after attention, for norm2"),
    *("mean in norm2", "1 / deviation in norm2", "result of norm2, for up"),
    *("result of up, for gelu", "result of gelu, for down"),
]
labels = ON_CPU if len(kept) == len(ON_CPU) else [""] * len(kept)           # a GPU's attention keeps others
times = sum(nbytes for _, nbytes in kept) / x_bytes
Table(
    ["tensor", "shape", "times the input"],
    [[label, str(shape), f"{nbytes / x_bytes:.2f}"] for label, (shape, nbytes) in zip(labels, kept)],
    note=f"In all {times:.2f} times the size of the block's input.",
)

# %% [markdown]
# One block keeps 16 times the size of its own input. Half of that is the wide middle of the feed-forward
# network, before and after `gelu`. All of it follows from the block's input. So a checkpoint keeps the input
# alone, and when the backward pass arrives it runs the block's forward once more.
#
# ## What the second forward costs
#
# A backward pass takes about twice the FLOPs of a forward pass, so one more forward should cost a third. It
# costs less where only an addition follows the block's last matrix product: the backward pass never needs
# that product's result, and PyTorch stops the second forward before it (**early stop**). A norm keeps its
# input and a dropout its mask, both made after the product: then the whole block runs again. `cost` (folded)
# measures a step of one rank with and without checkpoints, attention included.

# %% jupyter={"source_hidden": true}
# %%ranks
# FlopCounterMode of PyTorch 2.13 does not count attention on the CPU, unless it is told how.
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


def through(blocks):
    """The mean square of what comes out of the blocks."""
    y = x
    for block in blocks:
        y = block(y)
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
from functools import partial

from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

encoder = partial(nn.TransformerEncoderLayer, 64, 4, 256, batch_first=True)
llama = LlamaConfig(hidden_size=64, intermediate_size=176, num_attention_heads=4)
gpt2 = GPT2Config(n_embd=64, n_head=4)
llama._attn_implementation = gpt2._attn_implementation = "sdpa"


def through_llama(blocks):
    y, places = x, LlamaRotaryEmbedding(llama)(x, torch.arange(64, device=device)[None])
    for block in blocks:
        y = block(y, position_embeddings=places)
    return y.square().mean()


costs = {
    "the Block above: nothing after the last product": cost(Block),
    "TransformerEncoderLayer, norm_first, no dropout": cost(partial(encoder, dropout=0.0, norm_first=True)),
    "TransformerEncoderLayer, norm_first, dropout 0.1": cost(partial(encoder, norm_first=True)),
    "TransformerEncoderLayer, norm last, no dropout": cost(partial(encoder, dropout=0.0)),
    "Llama's layer": cost(partial(LlamaDecoderLayer, llama, 0), through_llama),
    "GPT-2's block, dropout 0.1": cost(partial(GPT2Block, gpt2, 0)),
}

# %%
costs = ranks.get("costs")[0]
Table(["six blocks of", "kept, %", "extra FLOPs, %"], [[name, *found] for name, found in costs.items()])

# %% [markdown]
# The second, third and fourth rows are one layer with one argument changed: ending in an addition 23%, in a
# dropout or a norm 33%. Llama's layer ends in an addition, too, but its last product is a smaller part of it.
# (With dropout less is kept in percent, because without checkpoints its masks are kept, too.) FLOPs are not
# seconds: norms and `gelu` run again as well, are limited by memory, and are not counted. And with longer
# sequences attention takes a larger share.
#
# What falls is not only what is kept. The next figure shows the activations and gradients that are alive,
# operation by operation.

# %%
# %%ranks
plain = measure(six(Block), through)
full = measure(six(Block, lambda block, index: checkpoint_wrapper(block)), through)

# %%
courses = dict(zip(["no checkpoint", "a checkpoint around each block"], ranks.get("plain.course, full.course")[0]))
fig, panels = plots.figure(2, width=8.5, height=2.6)
for axes, color, (name, course) in zip(panels, plots.RANK_COLORS, courses.items()):
    course = [nbytes / 2**20 for nbytes in course]
    axes.fill_between(range(len(course)), course, color=color, linewidth=0)
    axes.set(title=f"{name}: peak {max(course):.1f} MiB", xlabel="operations of one step", xticks=[], ylim=(0, 11))
panels[0].set_ylabel("activations and\ngradients, MiB")
plots.show(fig, alt="Bytes alive over one step: a hill without checkpoints, a saw with them.")

# %% [markdown]
# With checkpoints, forward stays low. In backward one block at a time is computed again and freed, while the
# gradients of the weights grow underneath. Kept bytes fall to 7%, the peak only to 32%: at the peak the
# activations of one block and most of the gradients are there. (Under FSDP gradients are sharded, unit by
# unit.)
#
# ## Selective: choose by operation
#
# The result of a matrix product is expensive to compute again. The results of `gelu` and of a norm are cheap
# and take as many bytes. A **policy** is asked for each operation of the block whether to save its result or
# to compute it again. The next cell sweeps all 32 choices among the block's five expensive operations.

# %%
# %%ranks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
ATTENTION = {                                                   # one kernel for each kind of machine
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
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
choices = [names for count in range(6) for names in combinations(FIVE, count)]
swept = {names: share(under(saving(names))) for names in choices}
by_block = {every: share(under(saving(()), every)) for every in (1, 2, 3, 6)}

# %%
swept, by_block = ranks.get("rank == 0 and (swept, by_block)")[0]
fig, (axes,) = plots.figure(width=7.0, height=3.2)
axes.scatter(*zip(*swept.values()), s=16, color=plots.RANK_COLORS[0], label="32 policies")
axes.plot(*zip(*by_block.values(), (100, 0)), "o:", color=plots.RANK_COLORS[1], label="every 1st, 2nd, 3rd, 6th block")
for names in [("attention",), ("qkv", "attention", "out", "up")]:
    axes.annotate(" + ".join(names), swept[names], xytext=(-4, -9), textcoords="offset points", fontsize=8, ha="right")
axes.set(xlabel="activations kept, %", ylabel="extra FLOPs, %", xlim=(0, 105), ylim=(-1.5, 26))
axes.legend()
plots.show(fig, alt="Policies and every k-th block, by activations kept and extra FLOPs.")

# %% jupyter={"source_hidden": true} tags=["check"]
def line(kept):
    return by_block[1][1] * (100 - kept) / (100 - by_block[1][0])      # every k-th block lies on it
assert all(abs(flops - line(kept)) < 0.1 for kept, flops in by_block.values())
without_down = [names for names in swept if names and "down" not in names]
assert all(swept[names][1] < line(swept[names][0]) for names in without_down)
assert all(abs(swept[(*names, "down")][1] - swept[names][1]) < 0.01 for names in without_down)

# %% [markdown]
# Checkpoints around every k-th block lie on a straight line. Each policy that saves something, and not
# `down`, lies below it: fewer FLOPs for the same memory. Saving `down` spares nothing, because early stop
# never computes it again.
#
# ## What a GPU says
#
# FLOPs are not seconds. The next table is one Llama of 0.95 billion parameters on an H200, in bf16, with four
# sequences of 2,048 tokens a step. Activations can also go to the CPU's memory
# (`torch.autograd.graph.save_on_cpu(pin_memory=True)`, or `offload_wrapper`, beside `checkpoint_wrapper`), over
# a bus that was measured at 51 GiB/s.

# %% tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded

on_h200 = {row["setting"]: row for row in recorded.load("costs")["results"]["rows"]}
NAMES = {
    "as it is": "no checkpoint", "checkpointing of each block": "every block", "selective checkpointing": "selective *",
    "activations to the CPU": "all activations to the CPU",
    "blocks compiled": "no checkpoint, compiled", "blocks checkpointed and compiled": "every block, compiled",
}
seconds = {name: on_h200[name]["step_s"] / on_h200["as it is"]["step_s"] for name in NAMES}
assert [f"{ratio:.2f}" for ratio in seconds.values()] == ["1.00", "1.28", "1.54", "6.60", "0.74", "0.89"]
Table(["block", "GiB at the peak", "time of a step"],
      [[told, f"{on_h200[name]['peak_allocated_gib']:.1f}", f"{seconds[name]:.2f}"] for name, told in NAMES.items()])

# %% jupyter={"source_hidden": true} tags=["check"]
assert round(on_h200["copy from the CPU"]["gib_s"]) == 51
at_rest = 16 * (16 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2 * 32000 * 2048 + 2048) / 2**30     # bytes of the Llama
assert f"{at_rest:.1f}" == "14.2"
assert all(on_h200[name]["peak_allocated_gib"] > at_rest for name in NAMES)
sweep = {row["setting"]: row["step_s"] for row in recorded.load("selective")["results"]["rows"]}
assert all(sweep[f"selective, eager, batch of {n}"] > sweep[f"full, eager, batch of {n}"] for n in (2, 8))
assert sweep["selective, compiled, batch of 2"] < 1.02 * sweep["none, compiled, batch of 2"]
assert sweep["full, compiled, batch of 2"] > 1.1 * sweep["none, compiled, batch of 2"]

# %% [markdown]
# After backward, weights, gradients and optimizer state take 14.2 GiB, 16 bytes for each parameter: no
# checkpoint goes below that. A checkpoint of every block cost 28% here, and compiling the blocks pays for
# it. **Selective checkpointing** (*: attention and every second product are kept) **was slower than full,
# though it computes less again**, with 2, 4 and 8 sequences: its policy is Python that runs for each
# operation. In compiled blocks, where it does not run, selective cost 2% and full 11% with 2 sequences.
# Offload waits for the bus.
#
# ## The checkpoint goes inside the unit
#
# Two things happen around a block: FSDP gathers its weights, and the checkpoint runs it again. The next cell
# tries four orders under FSDP2. Blocks compute in bf16 and return float32 (`output_dtype`), as with a
# residual in float32.

# %% tags=["order"]
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
unit = partial(fully_shard, mp_policy=bf16)


def sharded_step(wrap, pairs, count):
    """All-gathers of a step, bytes of full parameters in backward, and of what is kept between the passes."""
    blocks = six(Block, wrap)[:count]
    if pairs:
        blocks = [checkpoint_wrapper(nn.Sequential(*blocks[i : i + 2])) for i in range(0, count, 2)]
    model = fully_shard(nn.Sequential(*blocks))
    for _ in range(2):                                          # the first step sets FSDP up
        with Meter([*model.parameters(), x], device=device) as meter:
            loss = model(x).sum()
            until = len(meter.whole_bytes)
            loss.backward()
        model.zero_grad()
        x.grad = None
    kept = meter.tensor_bytes[until - 1] - meter.held_bytes - meter.gather_bytes[until - 1]
    return meter.all_gathers, max(meter.whole_bytes[until:]), kept


def order(wrap, pairs=False):
    gathers, whole, kept = sharded_step(wrap, pairs, 6)
    per_block = (kept - sharded_step(wrap, pairs, 2)[2]) / 4    # what four more blocks add
    block = sum(p.numel() for p in Block().parameters()) * 2    # in bf16
    return [gathers, round(whole / block, 1), round(per_block / x.nbytes, 1)]


orders = {
    "no checkpoint": order(lambda block, index: unit(block)),
    "inside: `fully_shard(checkpoint_wrapper(block))`": order(lambda block, index: unit(checkpoint_wrapper(block))),
    "outside: `checkpoint_wrapper(fully_shard(block))`": order(lambda block, index: checkpoint_wrapper(unit(block))),
    "one checkpoint around two units": order(lambda block, index: unit(block), pairs=True),
}

# %%
orders = ranks.get("orders")[0]
Table(
    ["FSDP2", "all-gathers", "full blocks in backward", "kept per block, times its input"],
    [[name.replace("`", ""), *found] for name, found in orders.items()],
)

# %% jupyter={"source_hidden": true} tags=["check"]
assert [found[0] for found in orders.values()] == [12] * 4
assert [found[1] for found in orders.values()] == [2] * 4
assert [found[2] for found in orders.values()][1:3] == [0.5, 1.0]

# %% [markdown]
# Twelve gathers are two for each block: no order gathers more often. But FSDP casts a unit's input to bf16
# just before its forward. A checkpoint inside keeps the input after that cast, one outside keeps it before:
# **twice the bytes**, where blocks return float32. With `output_dtype` left at None they return bf16, and
# both orders keep the same. And a checkpoint around two units runs both before the backward pass of the
# second: the activations of two blocks at once. So: one checkpoint in one unit.

# %% jupyter={"source_hidden": true}
# %%ranks
# the way of 2022: FSDP1 first, then apply_activation_checkpointing, which puts its wrapper inside the units
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

reentrant = partial(checkpoint_wrapper, checkpoint_impl=checkpoints.CheckpointImpl.REENTRANT)
fsdp1 = partial(FSDP, device_id=device)
inside = fsdp1(nn.Sequential(*six(Block, lambda block, index: fsdp1(block))))
checkpoints.apply_activation_checkpointing(inside, reentrant, check_fn=lambda part: isinstance(part, Block))
outside = fsdp1(nn.Sequential(*six(Block, lambda block, index: reentrant(fsdp1(block)))))
gathers = []
for model in (inside, outside):
    for _ in range(2):
        with Meter(model.parameters()) as meter:
            model(x).square().mean().backward()
    gathers.append(meter.all_gathers)
assert gathers == [12, 18]

# %% [markdown]
# With FSDP1, as in 2022, the calls come the other way round: FSDP first, then
# `apply_activation_checkpointing(model, check_fn=...)`, which puts its wrapper inside the units. A reentrant
# checkpoint (`use_reentrant=True`, the older kind) outside of FSDP1's units gathers each block a third time
# (the folded cell).
#
# ## With `torch.compile`
#
# The compiler sees forward and backward together and decides what to keep. The next cell compiles the block
# above, and Llama's feed-forward, on rank 0. The backend `aot_eager_decomp_partition` uses the default one's
# decompositions and partitioner and runs PyTorch's own kernels, so that this cell needs no C++ compiler.

# %% tags=["compile"]
# %%ranks 0
import torch._functorch.config as planner
from transformers.models.llama.modeling_llama import LlamaMLP


def kept_by(part, how, budget=1.0):
    torch.compiler.reset()
    with planner.patch(activation_memory_budget=budget):
        kept, _ = saved_by(how(part), x)
    return round(sum(nbytes for _, nbytes in kept) / x.nbytes, 1)


torch.manual_seed(0)
compiled = partial(torch.compile, backend="aot_eager_decomp_partition")
kept = {}
for name, part in {"the Block above": Block().to(device), "Llama's feed-forward": LlamaMLP(llama).to(device)}.items():
    ways = [lambda part: part, compiled, lambda part: compiled(checkpoint_wrapper(part))]
    kept[name] = [*(kept_by(part, how) for how in ways), kept_by(part, compiled, budget=0.5)]

# %%
kept = ranks.get("rank == 0 and kept")[0]
assert kept["the Block above"][0] == kept["the Block above"][1]
assert kept["Llama's feed-forward"][1] < 0.8 * kept["Llama's feed-forward"][0]
Table(
    ["kept, times the input", "eager", "compiled", "checkpoint, compiled", "compiled, budget 0.5"],
    [[name, *found] for name, found in kept.items()],
)

# %% [markdown]
# In this table the compiler never keeps more than autograd: of the block above it keeps as much, of Llama's
# feed-forward a quarter less, because `silu(gate)` is cheap to compute again. (What a matrix product of the
# backward pass reads, such as the result of `gelu`, it keeps.) It honours a checkpoint. And with
# `torch._functorch.config.activation_memory_budget = 0.5` it chooses by itself what to compute again, with no
# checkpoint written anywhere. From the inside out: `block = checkpoint_wrapper(block)`, `block.compile()`,
# `fully_shard(block)`.
#
# ## Your turn 1 · Write the checkpoint
#
# `checkpoint_wrapper` works with the hooks that you saw in the script. `store` is called with each tensor
# that autograd wants to keep, and returns what is kept in its place. `fetch` gets that back in the backward
# pass and returns the tensor. Write `my_checkpoint(block, x)`: it returns the block's output, keeps nothing
# but `x`, and runs the block once more when the first tensor is fetched.
#
# <details><summary>Hint</summary>
#
# Let `store` return a number: 0, 1, 2, … In the second forward autograd keeps the same tensors in the same
# order, so another pair of hooks can collect them in a list. Autograd is off in the backward pass: `with
# torch.enable_grad():` switches it on.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


class Checkpointed(nn.Module):
    """A block under the reader's checkpoint; it counts how often the block runs."""

    def __init__(self, block, checkpoint):
        super().__init__()
        self.block, self.checkpoint, self.runs = block, checkpoint, 0
        block.register_forward_pre_hook(lambda *_: setattr(self, "runs", self.runs + 1))

    def forward(self, x):
        return self.checkpoint(self.block, x)


def wrong_gradients(step):
    """How many gradients differ from those without a checkpoint."""
    pairs = zip(step.gradients, plain.gradients, strict=True)
    return sum(mine is None or not torch.allclose(mine, right, rtol=1e-4, atol=1e-6) for mine, right in pairs)


@turn(1, {
    "gradients that differ": exactly(0, "The second forward must give the same tensors in the same order, and the gradient must reach x."),
    "activations kept, %": at_most(8, "More than the blocks' inputs is kept until backward: what does `store` return?"),
    "runs of a block in one step": exactly(
        2, less="The block never runs again.", more="The block runs again for each tensor: collect all in one run."
    ),
})
def score_checkpoint(my_checkpoint):
    blocks = six(Block, lambda block, index: Checkpointed(block, my_checkpoint))
    if not isinstance(blocks[0](x), torch.Tensor):
        raise NotYet("Return the block's output.")
    through(blocks).backward()
    step = measure(six(Block, lambda block, index: Checkpointed(block, my_checkpoint)), through)
    return {
        "gradients that differ": wrong_gradients(step),
        "activations kept, %": round(100 * step.kept / plain.kept, 1),
        "runs of a block in one step": blocks[1].runs,
    }


# %%
# %%turn 1
def my_checkpoint(block, x):                            # f32[batch, tokens, width] -> the same
    return None                                         # your lines here


# %% tags=["solution"] turn=1
import itertools

def my_checkpoint(block, x):
    numbers, again = itertools.count(), []

    def collect(tensor):
        again.append(tensor.detach())
        return None

    def fetch(number):
        if not again:
            with torch.enable_grad(), saved_tensors_hooks(collect, lambda _: None):
                block(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), fetch):
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
def my_checkpoint(block, x):                            # a dictionary, and the order of the calls of store
    count, again = [], {}

    def store(tensor):
        count.append(None)
        return len(count)

    def fetch(key):
        if not again:
            def keep(tensor):
                again[len(again) + 1] = tensor
                return tensor

            with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
                block(x.detach().requires_grad_())
        return again[key]

    with saved_tensors_hooks(store, fetch):
        return block(x)

# %% tags=["wrong"] turn=1 says="More than the blocks' inputs"
def my_checkpoint(block, x):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return block(x)

# %% tags=["wrong"] turn=1 says="for each tensor"
import itertools

def my_checkpoint(block, x):
    numbers = itertools.count()

    def fetch(number):
        again = []
        with torch.enable_grad(), saved_tensors_hooks(again.append, lambda _: None):
            block(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), fetch):
        return block(x)

# %% tags=["wrong"] turn=1 says="list index out of range"
import itertools

def my_checkpoint(block, x):                            # autograd is off in the second run
    numbers, again = itertools.count(), []

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
# A GPU has room for 33% of the activations. Write a policy that keeps no more and adds at most 12% to the
# FLOPs of a step. (Every second block keeps 54% and adds 12%.) The table shows what saving one operation
# costs and spares, from the sweep.

# %%
SHAPES = {"qkv": "(64, 192)", "attention": "", "out": "(64, 64)", "up": "(64, 256)", "down": "(256, 64)"}
base = swept[()]
Table(
    ["operation", "shape of its weight", "saving it keeps, %", "and spares FLOPs, %"],
    [
        [name, shape, f"+{swept[name,][0] - base[0]:.1f}", f"{base[1] - swept[name,][1]:.1f}"]
        for name, shape in SHAPES.items()
    ],
    note=f"With nothing saved: {base[0]:.1f}% kept, {base[1]:.1f}% more FLOPs.",
)

# %% [markdown]
# `my_policy` is called with each operation and its arguments. For `aten.addmm.default`, the product in an
# `nn.Linear`, they are bias, input and weight, so `args[2].shape` is the shape in the table. Attention is
# `operation in ATTENTION`. Return `SAVE` or `RECOMPUTE`.

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
    return None                                         # your lines here: SAVE or RECOMPUTE


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

# %% tags=["wrong"] turn=2 says="Too much is recomputed"
def my_policy(context, operation, *args, **kwargs):
    return RECOMPUTE

# %% tags=["wrong"] turn=2 says="Return SAVE or RECOMPUTE"
def my_policy(context, operation, *args, **kwargs):
    return operation in ATTENTION

# %% [markdown]
# ## When it goes wrong
#
# A checkpoint is right only if the second forward computes what the first one did. Dropout draws random
# numbers, so `checkpoint` restores the state of their generator, unless somebody switches that off.

# %%
# %%ranks
class Dropped(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.2)


def gradients(wrap):
    torch.manual_seed(0)
    block = Dropped().to(device)
    wrap(block)(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in block.parameters()])


right = gradients(lambda block: block)
wraps = {"the default": checkpoint_wrapper, "not restored": partial(checkpoint_wrapper, preserve_rng_state=False)}
apart = {name: ((gradients(wrap) - right).norm() / right.norm()).item() for name, wrap in wraps.items()}

# %%
apart = ranks.get("apart")[0]
assert apart["the default"] == 0
assert apart["not restored"] > 0.1
Table(
    ["dropout 0.2 under a checkpoint", "error of the gradients"],
    [[name, "none" if far == 0 else "more than 10%"] for name, far in apart.items()],
)

# %% [markdown]
# No error is raised. Accelerate's FSDP2 wraps blocks with `preserve_rng_state=False` (1.15,
# `fsdp2_apply_ac`), so with it and dropout the gradients are wrong in this way.
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `CheckpointError: … Recomputed values for the following tensors have different metadata` | the second forward took another path: random numbers that change a shape, a counter, a cache | make the block depend on its input alone; `determinism_check="none"` only silences the check |
# | a worse loss, no error | dropout without the generator's state | leave `preserve_rng_state` at its default |
# | memory does not fall | no module was wrapped (`apply_activation_checkpointing` is silent when `check_fn` matches nothing), or the peak is elsewhere: logits of a large vocabulary | print the model and look for `CheckpointWrapper` |
# | more memory in backward than expected | one checkpoint spans several units, or lies outside of a bf16 unit whose input is float32 | one checkpoint inside each unit |
#
# ## The rule
#
# Checkpoint inside, FSDP outside, one in one: `fully_shard(checkpoint_wrapper(block))`. If a step has room to
# spare, save matrix products by a policy before you drop checkpoints from whole blocks.
#
# [← lesson 1](01_transformer_wrapper.ipynb) · [lesson 3 →](03_full_state_dict.ipynb)

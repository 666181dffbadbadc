# %% [markdown]
# # 22 · Fewer bits
#
# Which bytes of a sharded model can be 8 or 4 bits? **Store frozen weights in 4 bits: since torch 2.12 FSDP2
# shards and gathers plain `uint8` parameters. Keep the shards of trained weights in float32. If the GPU waits for
# communication, first reduce gradients in bf16, then try all-gathers in 8 bits, and time a step with each.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

LANES = [
    ("trained", 0, ["float32 shard\n4 bytes", "codes, scales\n1 byte", "all ranks' codes\n1 byte", "bf16 weight\n2 bytes"],
     ["encode", "all-gather", "decode"], "reshard frees both"),
    ("frozen", 1, ["codes, scales\n½ byte", "all ranks' codes\n½ byte", "bf16 weight\n2 bytes"],
     ["all-gather", "decode"], "autograd keeps the weight,\nunless blocks are checkpointed"),
]  # fmt: skip
fig, (axes,) = plots.figure(width=9.2, height=1.9)
for row, (name, first, boxes, arrows, end) in enumerate(LANES):
    color, step = plots.RANK_COLORS[row], 2.4
    axes.text(-1.0, -row, name, ha="right", va="center", weight="bold")
    for column, text in enumerate(boxes, first):
        box = {"boxstyle": "round", "facecolor": color, "alpha": 0.25, "edgecolor": color}
        axes.text(step * column, -row, text, ha="center", va="center", bbox=box, fontsize=8)
    for column, text in enumerate(arrows, first):
        begin, stop = (step * column + 0.85, -row), (step * (column + 1) - 0.85, -row)
        axes.annotate("", stop, begin, arrowprops={"arrowstyle": "->"})
        axes.text(step * (column + 0.5), 0.08 - row, text, ha="center", va="bottom", fontsize=8)
    axes.text(step * 3 + 0.95, -row, end, va="center", fontsize=8)
axes.set(xlim=(-1.9, 11.0), ylim=(-1.45, 0.45))
axes.axis("off")
plots.show(fig, alt="Trained: 4 bytes are encoded to 1, gathered, decoded to 2. Frozen: half a byte is gathered, decoded to 2.")

# %% [markdown]
# The figure counts bytes for each weight, without scales.
#
# | your weights | what to do | what it costs |
# |:--|:--|:--|
# | frozen, beside trained adapters (QLoRA) | store 4 bits, with a scale for each 64 weights | a rounding error of 11%; decoded in forward and, under activation checkpointing, in backward |
# | trained, all-gathers hidden behind computation | gather in bf16 | a rounding error of 0.2% |
# | trained, the GPU waits for all-gathers | send int8, with a scale for each 64 weights (matrices with rows that divide by the ranks; leave biases and norms) | a rounding error of 0.6%; coded and decoded for each gather |
# | trained, with matrix products in float8 | send float8, with one scale for all ranks | a rounding error of 2.7%; an all-reduce of scales |
#
# The rounding error is the norm of the errors over the norm of the weights, measured below: bf16's on a trained model,
# the others' on normally distributed weights.

# %% tags=["card"]
lesson.card(
    22,
    learn="keep frozen weights in 4 bits, gather trained weights in 8, and see what either costs in error",
    needs="[lesson 4](04_backward_prefetch.ipynb), [lesson 7](07_mixed_precision.ipynb), "
    "[lesson 9](09_child_tuning.ipynb)",
    minutes=(1, 42, 19),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. A layer has a frozen weight and an
# adapter, two small trained matrices whose product is added to the weight ([lesson
# 9](09_child_tuning.ipynb)). The script stores the frozen weight in bf16, then in 4 bits. `pack` divides each
# row by a **scale** and rounds to a **code** from 1 to 15. Two codes share a byte, so the parameter is
# `uint8`; `unpack` turns codes and scales back into weights. `fsdp_utils` only counts the bytes gathered.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# mesh = init_device_mesh(device, (dist.get_world_size(),))   # without it a Mac would take its GPU
#
#
# def pack(weight):                                           # f32[256, 256] -> u8[256, 128], bf16[256, 1]
#     scales = weight.abs().amax(1, keepdim=True) / 7
#     codes = ((weight / scales).round() + 8).to(torch.uint8)
#     return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
#
#
# def unpack(codes, scales):                                  # -> bf16[256, 256]
#     return (torch.stack([codes & 15, codes >> 4], -1).flatten(1).bfloat16() - 8) * scales
#
#
# class Layer(nn.Module):
#     def __init__(self, *frozen):                            # a bf16 weight, or codes and their scales
#         super().__init__()
#         self.frozen = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in frozen)
#         self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)
#
#     def forward(self, x):
#         weight = unpack(*self.frozen) if len(self.frozen) == 2 else self.frozen[0]
#         return x @ weight.T + self.up(self.down(x))
#
#
# for bits in (16, 4):
#     torch.manual_seed(0)                                    # the same weights on every rank
#     weight = torch.randn(256, 256) / 16
#     wanted = weight + torch.randn(256, 4) @ torch.randn(4, 256) / 32    # what the adapter should learn
#     model = Layer(*pack(weight)) if bits == 4 else Layer(weight.bfloat16())
#     fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
#     optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], lr=0.02)
#     torch.manual_seed(1 + dist.get_rank())                  # other samples on each rank
#     for step in range(100):
#         x = torch.randn(64, 256)
#         with record_collectives(model) as trace:
#             loss = (model(x).float() - x @ wanted.T).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     held = sum(part.to_local().nbytes for part in model.frozen) / 1024
#     gathered = trace.bytes_by_kind().get("all_gather", 0) / 1024
#     if dist.get_rank() == 0:
#         print(f"{bits:2} bits: a rank holds {held:4.1f} KiB, gathers {gathered:5.1f} KiB, loss {loss.item():.3f}")
# dist.destroy_process_group()
# ```
# ```text
# 16 bits: a rank holds 32.0 KiB, gathers 132.0 KiB, loss 0.001
#  4 bits: a rank holds  8.1 KiB, gathers  36.5 KiB, loss 0.017
# ```
#
# **Held**: a quarter of the 65,536 frozen weights, 32 KiB in bf16; in 4 bits 8 KiB, and 0.1 of scales.
# **Gathered**: four times that, and the adapter, 4 KiB in bf16; once a step, as the root is not resharded after
# forward (a block would be gathered twice). **Loss**: in 4 bits 0.017 remains, the frozen
# weight's rounding error, which an adapter of rank 4 cannot undo. For large models,
# [QLoRA](https://arxiv.org/abs/2305.14314) reports the quality of 16 bits with NF4, whose levels are denser
# around 0, and a higher perplexity with even steps.
#
# For a large model take the `pack` and `unpack` that solve turn 1, with a scale for each 64 weights (in this script: loss
# 0.013), and `fully_shard(checkpoint_wrapper(block))` for each block ([lesson 2](02_activation_checkpointing.ipynb)).
# In the script `x` has no gradient, so the frozen weight is not kept for backward. In a model, **without
# checkpointing each rank keeps in bf16 all frozen layers after the first adapter**: where a layer's input has a
# gradient, autograd keeps the decoded weight of `x @ weight.T` until backward, 128 KiB for such a layer beside a
# shard of 8.1 KiB. A weight stored in bf16 does not do so: `reshard` frees the storage that autograd refers to.
#
# ## Which storage FSDP shards
#
# FSDP2 shards each parameter by itself. Since torch 2.12 (read in its source; run here: 2.13) `uint8` may stand beside
# a float32 adapter, and a policy casts only floating-point parameters. torch 2.11 raises in `fully_shard` ([issue
# 177844](https://github.com/pytorch/pytorch/issues/177844)). FSDP1 lays all parameters of a unit end to end, so they
# need one floating-point dtype. Hence bitsandbytes'
# [`bnb_4bit_quant_storage=torch.bfloat16`](https://huggingface.co/docs/bitsandbytes/main/en/fsdp_qlora): the same
# bytes, read as bf16. `sharded4` (folded) compares an output with the unsharded layer's.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
bf16 = torch.bfloat16


def pack(weight):
    scales = weight.abs().amax(1, keepdim=True) / 7
    codes = ((weight / scales).round() + 8).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()


def unpack(codes, scales):
    return (torch.stack([codes & 15, codes >> 4], -1).flatten(1).bfloat16() - 8) * scales


class Layer(nn.Module):                                         # as in the script, computed in float32
    def __init__(self, stored=torch.uint8, adapter=bf16):
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        weight, down, up = (torch.randn(n, 256, generator=numbers).to(device) for n in (256, 4, 4))
        self.down, self.up = (nn.Parameter(part.bfloat16().to(adapter)) for part in (down, up))
        codes, scales = pack(weight)
        self.codes = nn.Parameter(codes.view(stored), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x):                                       # f32[batch, 256], computed in float32
        weight = unpack(self.codes.view(torch.uint8), self.scales).float()
        return x @ weight.T + x @ self.down.float().T @ self.up.float()


def sharded4(version, stored, adapter, policy):                 # the policy is FSDP2's
    """Run a step; say what comes of it."""
    stored, adapter, policy = (name and getattr(torch, name) for name in (stored, adapter, policy))
    x = torch.ones(2, 256, device=device)
    wanted, model = Layer()(x), Layer(stored, adapter)
    try:
        if version == 1:
            model = FSDP(model, device_id=device, use_orig_params=True)
        else:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(policy, cast_forward_inputs=False))
        found = model(x)
        found.sum().backward()
    except ValueError as error:
        return str(error)
    return "right" if torch.allclose(found, wanted) else "wrong output, no error"


# %% tags=["storage"]
# %%ranks
ways = [                                                        # FSDP, codes stored as, adapter, param_dtype
    (1, "uint8", "bfloat16", None), (1, "bfloat16", "bfloat16", None),
    (2, "uint8", "bfloat16", None), (2, "uint8", "float32", "bfloat16"),
    (2, "bfloat16", "bfloat16", "bfloat16"), (2, "bfloat16", "bfloat16", "float16"),
]  # fmt: skip
happens = [sharded4(*way) for way in ways]

# %% jupyter={"source_hidden": true}
ways, happens = ranks.get("ways")[0], ranks.get("happens")[0]
assert happens[0] == "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.uint8"
assert happens[1:] == ["right", "right", "right", "right", "wrong output, no error"]
rows = [[f"FSDP{way[0]}", *(name or "-" for name in way[1:]), found] for way, found in zip(ways, happens)]
Table(["", "codes stored as", "adapter", "policy's param_dtype", "what happens"], rows)

# %% [markdown]
# The last row fails **silently**: codes stored as bf16 are cast to fp16 *as numbers*. Where codes have a
# floating-point dtype, make `param_dtype` the same.
#
# ## How many weights share a scale
#
# A large weight makes its scale large, and all weights that share the scale are rounded more coarsely. `rounded`
# divides a matrix into **blocks**, each with a scale, and rounds. The float8 here, e4m3, has 4 bits of exponent and 3
# of mantissa. The folded cell puts large weights among normally distributed ones, and sweeps their size; the error is
# that of all *other* weights.

# %%
import torch


def rounded(w, kind, block):
    parts = w.view(-1, block)
    largest = parts.abs().amax(1, keepdim=True)
    if kind == "float8":
        scale = largest / 448                                   # e4m3's largest number
        return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).view_as(w)
    scale = largest / {"int8": 127, "int4": 7}[kind]
    return ((parts / scale).round() * scale).view_as(w)

# %% jupyter={"source_hidden": true}
def error(largest, kind, block, count):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(256 * 256, generator=generator)
    large = torch.randperm(len(w), generator=generator)[:count]
    w[large] = largest
    off = rounded(w, kind, block) - w
    off[large] = w[large] = 0
    return 100 * (off.norm() / w.norm()).item()


sizes, kinds, whole = [5, 10, 20, 40, 80, 160, 320, 640], ["float8", "int8", "int4"], 256 * 256
fig, panels = plots.figure(2, width=9.2, height=2.9)
sweeps = []
for axes, (count, title) in zip(panels, [(1, "one large weight"), (66, "one in a thousand")]):
    sweep = {(kind, block): [error(s, kind, block, count) for s in sizes] for kind in kinds for block in (64, whole)}
    sweeps.append(sweep)
    for (kind, block), found in list(sweep.items())[1:]:            # float8 in blocks is like float8 with one scale
        style = {"color": plots.RANK_COLORS[kinds.index(kind)], "linestyle": "-" if block == 64 else "--"}
        label = f"{kind}, {'blocks of 64' if block == 64 else 'one scale'}"
        axes.loglog(sizes, found, marker="o", markersize=3, label=label, **style)
    axes.set(title=title, ylim=(0.4, 130), xlabel="large weight, in standard deviations")
    axes.set_xticks(sizes, sizes)
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
panels[0].set_ylabel("error of the others, %")
panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
one, many = sweeps
assert all(2.45 < found < 2.7 for sweep in sweeps for block in (64, whole) for found in sweep["float8", block])
assert [round(one["int8", 64][i], 1) for i in (0, 6, 7)] == [0.6, 2.3, 3.1]             # 5, 320, 640
assert [round(many["int8", 64][i], 1) for i in (1, 3, 4)] == [0.8, 2.3, 4.5]            # 10, 40, 80
assert all(10.5 < found < 11.5 for found in one["int4", 64])
assert [round(many["int4", 64][i]) for i in (1, 4)] == [15, 27]
assert (round(one["int8", whole][4]), round(one["int4", whole][0])) == (18, 21)
plots.show(fig, alt="Rounding error over the size of large weights: float8 with one scale, int8 and int4 with and without blocks.")

# %% [markdown]
# - **Four bits need blocks.** With one scale the error is 21% at the first point; in blocks of 64 it is 11%, as one
#   large weight spoils only one block of 1,024. With one in a thousand the error is 15% at ten standard deviations,
#   and 27% at eighty. A bf16 scale for each 64 weights costs a quarter of a bit.
# - **Int8 in blocks has the smallest error**, up to 320 standard deviations with one large weight, and up to 40 with
#   one in a thousand. With one scale it is 18% at eighty.
# - **Float8 gets by with one scale**: each number has its own exponent. The error stays at 2.5 to 2.7% here.
#
# `(w.abs() > 15 * w.abs().median()).float().mean()` is the share of weights above ten standard deviations of the
# others. If it is near 0.001, compare 4 bits with 16 on your loss first.
#
# ## Your turn 1 · Pack four bits in blocks
#
# Write `pack(weight)`, from `f32[256, 256]` to two tensors, the codes and their scales, and `unpack(codes, scales)`,
# back to `[256, 256]`. Four weights are 40; the others have a standard deviation of 1. Use at most 4.5 bits for each
# weight, scales included. The error of the others may be at most 14%; with the script's scale for each row of 256 it
# is 18%. Both tensors become frozen parameters under `fully_shard` with
# `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, and `unpack` gets what it gathers. Hint:
# `weight.view(256, 4, 64)` has blocks of 64 in its last dimension.

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

CAST = "FSDP2 changes the codes: the policy casts floating-point parameters. Keep them in uint8, or view them as param_dtype."


def distance(w, exact):
    return ((w.float() - exact).norm() / exact.norm()).item()


@turn(1, {
    "bits for each weight": at_most(4.5, "Too many bits: two codes share a byte, and 64 weights a scale."),
    "has negative weights": exactly(True, "Negative weights are lost: add 8 to the codes in `pack`; in `unpack` make them floats, then subtract it."),
    "error without large weights, %": at_most(18, "`unpack` does not give back what `pack` got: look at rounding, codes from 0 to 15, the offset of 8, the shift, and the order of the two codes in a byte."),
    "error beside large weights, %": at_most(14, "One large weight spoils too many others: use smaller blocks, each with a scale, or make 0 one of the levels."),
    "change under FSDP2, %": at_most(1, CAST),
})
def score_pack(pack, unpack):
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    with_large = w.clone()
    with_large[[3, 70, 130, 200], [5, 90, 140, 210]] = 40       # each in a row and a column of its own
    ordinary = with_large < 40
    packed = pack(with_large.clone())
    if not isinstance(packed, tuple | list) or [isinstance(part, torch.Tensor) for part in packed] != [True, True]:
        raise NotYet("`pack` has to return two tensors, the codes and their scales.")
    codes, scales = packed
    plain, again = unpack(codes, scales), unpack(*pack(w.clone()))
    if plain.shape != w.shape:
        raise NotYet(f"`unpack` has to return {list(w.shape)}, found {list(plain.shape)}.")
    undone, beside = 100 * distance(again, w), 100 * distance(plain[ordinary], w[ordinary])
    frozen = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in packed)
    fully_shard(frozen, mp_policy=MixedPrecisionPolicy(bf16)).unshard()
    try:
        change = 100 * distance(unpack(*(part.detach() for part in frozen))[ordinary], plain[ordinary].float())
    except RuntimeError:                                        # such as shapes that do not fit any more
        change = math.inf
    negative = again.min().item() < 0                           # after the first mistake nothing else is measured
    return {
        "bits for each weight": 8 * (codes.nbytes + scales.nbytes) / w.numel(),
        "has negative weights": negative,
        "error without large weights, %": undone if negative else None,
        "error beside large weights, %": beside if negative and undone <= 18 else None,
        "change under FSDP2, %": change if negative and undone <= 18 and beside <= 14 else None,
    }


def beside(size):
    """Score the script's functions with blocks of this size."""
    return [*score_pack(lambda w: pack(w.view(-1, size)), lambda *p: unpack(*p).view(256, 256)).values()][3:]


assert beside(64)[0] < 14 < beside(128)[0]
assert [round(beside(256)[0]), beside(64)[1], beside(256)[1]] == [18, 0, None]      # of FSDP2 nothing is said


# %%
# %%turn 1
def pack(weight):                                               # f32[256, 256] -> codes, scales
    return None                                                 # your lines here


def unpack(codes, scales):                                      # -> [256, 256]
    return None                                                 # your lines here


# %% tags=["solution"] turn=1
def pack(weight):                                               # any matrix, in blocks of 64 columns
    blocks = weight.unflatten(1, (-1, 64))
    scales = blocks.abs().amax(2, keepdim=True) / 7
    codes = ((blocks / scales).round() + 8).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
def unpack(codes, scales):                                      # -> bf16
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1).unflatten(1, (-1, 64))
    return ((pairs.bfloat16() - 8) * scales).flatten(1)

# %% tags=["right"] turn=1
def pack(weight):                                               # from the least to the largest
    blocks = weight.view(-1, 64)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    codes = ((blocks - low) / (high - low) * 15).round().to(torch.uint8)
    return codes[:, :32] + 16 * codes[:, 32:], torch.cat([low, (high - low) / 15], 1).bfloat16()
def unpack(codes, scales):
    low, step = scales.float().split(1, 1)
    return (torch.cat([codes % 16, codes // 16], 1) * step + low).view(256, 256)

# %% tags=["right"] turn=1
def pack(weight):                                               # blocks of 32, flat
    blocks = weight.reshape(-1, 32)
    scales = (blocks.abs().amax(1) / 7).bfloat16()
    codes = (blocks / scales.float()[:, None]).round().clamp(-8, 7).add(8).to(torch.uint8).flatten()
    return [(codes[0::2] << 4) + codes[1::2], scales]
def unpack(codes, scales):
    both = torch.stack([codes >> 4, codes & 15], 1).reshape(-1, 32)
    return ((both.to(torch.float32) - 8) * scales.float()[:, None]).reshape(256, 256)

# %% tags=["right"] turn=1
LEVELS = torch.linspace(-1, 1, 16, device=device).sign() * torch.linspace(-1, 1, 16, device=device).abs() ** 1.3
def pack(weight):                                               # levels denser around 0
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = ((blocks / scales)[..., None] - LEVELS).abs().argmin(-1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales
def unpack(codes, scales):
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(-1, 64)
    return (LEVELS[pairs.long()] * scales).view(256, 256)

# %% tags=["wrong"] turn=1 says="One large weight spoils too many"
def pack(weight):                                               # a scale for each column
    scales = weight.abs().amax(0, keepdim=True) / 7
    codes = ((weight / scales).round() + 8).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: (torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - 8) * scales.float()

# %% tags=["wrong"] turn=1 says="make 0 one of the levels"
def pack(weight):                                               # even levels around 0, without 0
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7.5
    codes = (blocks / scales + 7.5).round().clamp(0, 15).to(torch.uint8).view(256, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: ((torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64) - 7.5) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="has to return two tensors"
pack, unpack = (lambda weight: weight.bfloat16()), (lambda codes: codes)

# %% tags=["wrong"] turn=1 says="two codes share a byte"
def pack(weight):                                               # a byte for each
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7
    return ((blocks / scales).round() + 8).to(torch.uint8), scales.bfloat16()
unpack = lambda codes, scales: ((codes.float() - 8) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="Negative weights are lost"
def pack(weight):
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 15
    codes = (blocks / scales).round().clamp(0, 15).to(torch.uint8).view(256, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: (torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="make them floats, then subtract"
def pack(weight):                                               # uint8 - 8 wraps
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7
    codes = ((blocks / scales).round() + 8).to(torch.uint8).view(256, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: ((torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64) - 8) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="does not give back what `pack` got"
def pack(weight):                                               # cut off instead of rounded
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7
    codes = (blocks / scales + 8).to(torch.uint8).view(256, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: ((torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64).float() - 8) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="the offset of 8"
def pack(weight):                                               # 8 is subtracted, but not added
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7
    codes = (blocks / scales).round().to(torch.int8).view(torch.uint8).view(256, 256)
    return codes[:, ::2] & 15 | codes[:, 1::2] << 4, scales.bfloat16()
unpack = lambda codes, scales: ((torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64).float() - 8) * scales.float()).view(256, 256)

# %% tags=["wrong"] turn=1 says="the policy casts floating-point parameters"
def pack(weight):                                               # stored as fp16
    scales = (blocks := weight.view(256, 4, 64)).abs().amax(2, keepdim=True) / 7
    codes = ((blocks / scales).round() + 8).to(torch.uint8).view(256, 256)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float16), scales.bfloat16()
def unpack(codes, scales):
    codes = codes.view(torch.uint8)
    return ((torch.stack([codes & 15, codes >> 4], -1).view(256, 4, 64).float() - 8) * scales.float()).view(256, 256)

# %% [markdown]
# ## Eight bits on the wire
#
# A trained weight keeps float32 shards, as the optimizer adds small changes. In a step FSDP2 sends 8 bytes for it:
# 2 in each of two bf16 gathers, 4 in a float32 reduction. This section makes a gather 1 byte: 6 in all.
# `reduce_dtype=torch.bfloat16` also makes it 6, without any decoding, if your loss bears it ([lesson
# 7](07_mixed_precision.ipynb)).
#
# ### When it pays
#
# Only where the GPU waits for all-gathers: slow links, small batches. An 8-bit gather sends 1 byte less for each
# weight, and decodes on the stream that computes: **where nothing overlaps with a gather, `Float8` and `Int8` below
# gain between hosts (50 GB/s) and lose within an NVLink host (450 GB/s), unless `torch.compile` makes one kernel of the
# decoding** (calculated for an H100's 3,350 GB/s: decoding moves 23 bytes per weight in `Float8`, 15 in `Int8`, so they
# break even at links of 146 and 223 GB/s). Where computation hides most of the bf16 gather, decoding costs more than the
# wire saves between hosts, too.
#
# ### Two hooks of a weight
#
# For float8 in your own code take torchao ("In a real model", below); these classes show what such hooks do. In each
# gather FSDP2 (not FSDP1) calls two methods of a weight, its **hooks**: `fsdp_pre_all_gather` on the shard returns
# the tensors to send, and anything that the second hook needs (here a scale, or None); `fsdp_post_all_gather` makes
# the weight from both, in the policy's `param_dtype`. `reshard` frees the gathered tensors, and what the second hook
# names in a tuple.
#
# Both classes derive from `Hooked` (folded), a `torch.Tensor` around a float32 tensor, `inner`. Its
# `__torch_dispatch__` gets each operation on such a tensor; the results of those in its `KEEP` become `Hooked` again.

# %% jupyter={"source_hidden": true}
# %%ranks
aten, E4M3 = torch.ops.aten, torch.float8_e4m3fn
KEEP = {aten.detach.default, aten.new_zeros.default, aten.slice.Tensor, aten.view.default}


class Hooked(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_subclass(cls, inner)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Hooked, lambda shard: shard.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, out) if func in KEEP else out


# %%
# %%ranks
class Int8(Hooked):                                             # in blocks of 64
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        blocks = self.inner.unflatten(1, (-1, 64))
        scales = (blocks.abs().amax(2, keepdim=True).clamp(min=1e-12) / 127).bfloat16()
        return ((blocks / scales).round().clamp(-127, 127).to(torch.int8), scales), None

    def fsdp_post_all_gather(self, gathered, _, param_dtype, *, out=None):
        codes, scales = gathered
        full = (codes * scales.float()).flatten(1).to(param_dtype)
        if out is None:                                         # the first time
            return full, (full,)                                # the weight, and what reshard frees
        out.data.copy_(full)                                    # later


class Float8(Hooked):
    def find_scale(self, mesh):
        scale = self.inner.abs().max().clamp(min=1e-12) / 448
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())       # one for all ranks
        return scale

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self.find_scale(mesh)
        padding = math.ceil(outer_size[0] / mesh.size()) - len(self.inner)
        codes = nn.functional.pad(self.inner / scale, (0, 0, 0, padding)).to(E4M3)
        return (codes.view(torch.uint8),), scale                # gloo cannot send float8

    def fsdp_post_all_gather(self, gathered, scale, param_dtype, *, out=None):
        full = (gathered[0].view(E4M3).float() * scale).to(param_dtype)
        if out is None:
            return full, (full,)
        out.data.copy_(full[: len(out)])                        # without rows of padding

# %% [markdown]
# `train` gives both weights of a small model a class before `fully_shard`, and trains for 40 steps. The model has to
# be on its device by then: a later `model.to(...)` does not convert `inner`, or drops the class (`model.to("meta")`).
# Rank 0's rows begin four times as large as the others. Two more classes (folded) show what goes wrong: `OwnScale`
# without the all-reduce, `NothingToFree` with an empty tuple.

# %%
# %%ranks
def train(kind, dtype=bf16):
    torch.manual_seed(0)
    layers = [nn.Linear(192, 384, bias=False), nn.Tanh(), nn.Linear(384, 192, bias=False)]
    for layer in layers[::2]:
        weight = layer.weight.detach().to(device)
        weight[: len(weight) // world] *= 4                     # rank 0's rows
        layer.weight = nn.Parameter(kind(weight))
        layer.register_forward_hook(keep_weight)                # runs before FSDP frees the weight
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)
    for step in range(40):
        x = torch.randn(16, 192, device=device)
        with record_collectives(model) as trace:
            loss = (model(x).float() - x).square().mean()
            loss.backward()
        found = compare(layers[0])
        optimizer.step()
        optimizer.zero_grad()
    return trace.bytes_by_kind(), loss.item(), *found

# %% jupyter={"source_hidden": true} tags=["hooks"]
# %%ranks
class OwnScale(Float8):
    def find_scale(self, mesh):
        return self.inner.abs().max() / 448


class NothingToFree(Float8):
    def fsdp_post_all_gather(self, *gathered, out=None):
        made = super().fsdp_post_all_gather(*gathered, out=out)
        return made and (made[0], ())


def keep_weight(layer, *_):
    layer.seen = [layer.weight.detach(), layer.weight.detach().clone()]


def compare(layer):
    gathered, copy = layer.seen
    return distance(copy, layer.weight.full_tensor().detach()), gathered.untyped_storage().size() / copy.nbytes


ways = {"float32": (torch.Tensor.detach, torch.float32), "bf16": (torch.Tensor.detach,)}
ways |= {kind.__name__: (kind,) for kind in (Float8, Int8, OwnScale, NothingToFree)}
trained = {name: train(*way) for name, way in ways.items()}

# %% jupyter={"source_hidden": true}
trained = ranks.get("trained")
rows, worst = [], {name: max(of_rank[name][2] for of_rank in trained) for name in trained[0]}
for name, (sent, loss, _, left) in trained[0].items():
    kib = [sent[kind] / 1024 for kind in ("all_gather", "reduce_scatter")]
    rows.append([name, *kib, f"{100 * worst[name]:.2g}%", f"{left:.0%}", f"{loss:.2f}"])
assert [row[1] for row in rows] == [1152, 576, 288, 297, 288, 288]
assert {row[2] for row in rows} == {576}
assert [row[4] for row in rows] == [*["0%"] * 5, "100%"]
assert worst["Int8"] < 0.006 < worst["Float8"] < 0.03 < 0.5 < worst["OwnScale"]
losses = [loss for _, loss, _, _ in trained[0].values()]
assert max(losses[:4]) < 1.03 * min(losses[:4]) < losses[4]
Table(["", "KiB gathered", "KiB reduced", "error of a gathered weight, worst rank", "left in memory", "loss, rank 0"], rows)

# %% [markdown]
# Both 8-bit ways halve the bytes of bf16's gathers (int8's scales add 3%), and this small model learns as well.
# Gradients are reduced in float32, so all that is sent shrinks by a quarter, from 1,152 to 864 KiB.
#
# **All ranks must decode with the same scale.** In `OwnScale` rank 0's is the largest, so it reads the
# others' rows too large, and they read its rows too small: each rank computes with a different model, and
# nothing raises.
#
# **8-bit gathers save no memory.** After the copy-out FSDP2 holds the code (1 byte) beside the decoded weight (2)
# until `reshard`, where a bf16 gather holds 2 bytes; the buffer of the next unit's all-gather has 1 byte instead of 2.
# While these classes decode a weight, from the second time on they hold 6 (`Int8`) to 8 bytes (`Float8`) more per
# weight of that tensor: mind a large embedding. With an empty tuple decoded weights stay.
#
# **Leave biases and norms as they are**: both classes take matrices. All ranks must send equally many bytes,
# so `Float8` pads to the rows of rank 0. Without padding only the ranks with fewer rows raise, and the others
# wait. A rank without rows (9 rows on 4 ranks are 3, 3, 3, 0) raises even with it: an empty shard has no
# maximum. `Int8` takes columns that are a multiple of 64, and cannot pad: torch checks that each tensor that a hook
# with these arguments returns has the shape of the padded shard, which scales do not have.
#
# ## Your turn 2 · One all-reduce for all scales
#
# `Float8` sends an all-reduce for each weight and gather: four in a step of `train`. Weights change only in
# `optimizer.step()`, or when you load or edit them, so one all-reduce for all weights after that is enough. Write
# `find_scales(parameters)`: it gets the model's sharded weights and returns their scales, each a tensor of one
# number: the largest absolute value of the *whole* weight, divided by 448 (no weight is all zeros, so no clamp). Send
# **one** collective. `p.to_local().inner` is this rank's shard of `p`, in float32.

# %% jupyter={"source_hidden": true}
# %%ranks
def weights(rows, columns):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    w[: rows // world] *= 4                                     # rank 0's rows
    return w.to(device)


@turn(2, {
    "collectives": exactly(1, less="No rank knows the others' maxima: each has a scale of its own.",
                           more="Put the maxima of all weights into one tensor, and reduce it once."),
    "scales that are too small": exactly(0, "Weights overflow: a scale is below the largest absolute value of all ranks / 448."),
    "scales that are sums over ranks": exactly(0, "`all_reduce` sums unless it is told `dist.ReduceOp.MAX`."),
    "scales that are too large": exactly(0, "Bits are lost: a scale is above its own weight's maximum / 448."),
})
def score_scales(find_scales):
    exact = [weights(64, 32), 0.01 * weights(32, 64), -3 * weights(40, 16).abs()]
    model = fully_shard(nn.ParameterList(nn.Parameter(Float8(w.clone())) for w in exact))
    with record_collectives(model) as trace, torch.no_grad():
        scales = find_scales(list(model.parameters()))
    scales = list(scales) if isinstance(scales, torch.Tensor) and scales.ndim else scales
    if not isinstance(scales, list | tuple) or len(scales) != len(exact):
        raise NotYet(f"Return a list of {len(exact)} scales, one for each weight.")
    wrong = torch.zeros(3, len(exact), device=device)           # too small, too large, a sum
    for column, (found, w) in enumerate(zip(scales, exact)):
        maxima = torch.stack([rows.abs().max() for rows in w.chunk(world)])
        ratio, of_sum = float(found) * 448 / maxima.max(), float(found) * 448 / maxima.sum()
        wrong[:, column] = torch.tensor([ratio < 0.999, ratio > 1.001, ratio > 1.001 and abs(of_sum - 1) < 0.001])
    dist.all_reduce(wrong, dist.ReduceOp.MAX)                   # on any rank
    small, large, sums = wrong.sum(1).int().tolist()
    counts = {"too small": small, "sums over ranks": sums, "too large": large - sums}
    return {"collectives": len(trace.collectives)} | {f"scales that are {name}": count for name, count in counts.items()}


# %%
# %%turn 2
def find_scales(parameters):
    return None                                                 # your lines here


# %% tags=["solution"] turn=2
def find_scales(parameters):
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list(largest / 448)

# %% tags=["right"] turn=2
def find_scales(parameters):                                    # divide first
    scales = torch.stack([p.to_local().inner.abs().max() / 448 for p in parameters])
    dist.all_reduce(scales, dist.ReduceOp.MAX)
    return scales                                               # as one tensor

# %% tags=["right"] turn=2
def find_scales(parameters):                                    # gather the maxima
    own = torch.stack([p.to_local().inner.abs().amax() for p in parameters])
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    return list(torch.stack(everyone).amax(0) / torch.finfo(E4M3).max)

# %% tags=["right"] turn=2
def find_scales(parameters):                                    # as norms
    norms = torch.stack([torch.linalg.vector_norm(p.to_local().inner, math.inf) for p in parameters])
    dist.all_reduce(norms, op=dist.ReduceOp.MAX)
    return norms.div(448).unbind()

# %% tags=["wrong"] turn=2 says="a scale of its own"
def find_scales(parameters):
    return [p.to_local().inner.abs().max() / 448 for p in parameters]

# %% tags=["wrong"] turn=2 says="reduce it once"
def find_scales(parameters):                                    # one for each
    largest = [p.to_local().inner.abs().max() for p in parameters]
    [dist.all_reduce(one, dist.ReduceOp.MAX) for one in largest]
    return [one / 448 for one in largest]

# %% tags=["wrong"] turn=2 says="Weights overflow"
def find_scales(parameters):                                    # without abs
    largest = torch.stack([p.to_local().inner.max() for p in parameters])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list(largest / 448)

# %% tags=["wrong"] turn=2 says="sums unless it is told"
def find_scales(parameters):
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters])
    dist.all_reduce(largest)
    return list(largest / 448)

# %% tags=["wrong"] turn=2 says="Bits are lost"
def find_scales(parameters):                                    # one for the model
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [largest / 448 for _ in parameters]

# %% [markdown]
# With this class in place of `Float8`, forward and backward send no all-reduce. Run the loop before the first step and
# after each `optimizer.step()`; `parameters` is `list(model.parameters())`.
#
# ```python
# class Scaled(Float8):
#     find_scale = lambda self, mesh: self.scale
#
# with torch.no_grad():
#     for parameter, scale in zip(parameters, find_scales(parameters)):
#         parameter._local_tensor.scale = scale               # on `to_local()` it would be lost
# ```
#
# ## In a real model
#
# torchao's names for what you saw by hand, from its documentation; not run here.
#
# | you want | torchao |
# |:--|:--|
# | frozen 4-bit weights under FSDP2 | [`to_nf4`](https://github.com/pytorch/ao/pull/4256) from `torchao.quantization`, as in torchtune's QLoRA ([issue 1029](https://github.com/meta-pytorch/torchtune/issues/1029)); it keeps the codes for backward, not the weight ([tutorial](https://github.com/meta-pytorch/torchtune/pull/693)) |
# | float8 gathers and products | [`convert_to_float8_training`](https://docs.pytorch.org/ao/stable/api_ref_float8.html), before `fully_shard`, with `Float8LinearConfig(enable_fsdp_float8_all_gather=True)` |
# | turn 2's single all-reduce | [`precompute_float8_dynamic_scale_for_fsdp(model)`](https://docs.pytorch.org/ao/stable/generated/torchao.float8.precompute_float8_dynamic_scale_for_fsdp.html) after each `optimizer.step()` |
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `only Tensors of floating point dtype can require gradients` in `fully_shard` | integer parameters under FSDP2 in torch 2.11 or older | torch 2.12 or newer |
# | the same in forward, or `Expected 1 all_gather_output, got 2` | hooks and an integer `reshard_after_forward` ([lesson 6](06_sharding_strategies.ipynb)) | `reshard_after_forward=True` |
# | `Must flatten tensors with uniform dtype`, `Cannot flatten integer dtype tensors` | FSDP1 and integers, or adapters in another dtype than the codes | FSDP2; or codes stored in the adapters' dtype |
# | bitsandbytes under FSDP2: a loss of 0, NaN, or all 4-bit weights on each rank | shards of `Params4bit` lose its scales ([issue 3983](https://github.com/huggingface/accelerate/issues/3983)); accelerate leaves `uint8` ones whole ([pull 3987](https://github.com/huggingface/accelerate/pull/3987)) | codes and scales as plain parameters, or torchao's `to_nf4` |
# | float8: a poor loss, or ranks differ on the same batch | a scale for each rank | all-reduce it, with MAX |
# | `must return all-gather inputs with the padded sharded size`, or a hang | a hook without padding, or `Int8` | pad; one scale for the weight |
# | `Unsupported global` in `dcp.load` | the checkpoint names the class of the shards | `save_distributed` and `load_distributed` of `fsdp_utils`, or `torch.serialization.safe_globals([Float8])` |
# | `Expected out tensor to have dtype`, or gathers of 2 bytes again | `load_state_dict(assign=True)` or `to_empty` replaced the `Float8` shards by plain ones, or `KEEP` lacks `new_zeros` or `slice`, with which `fully_shard` makes them | load without `assign`; make `Float8` of weights that are on their device; complete `KEEP` |
# | memory as with bf16 weights | decoded weights stay: in autograd, in a cache, or as the hook's tuple was empty | activation checkpointing; no cache; name in the tuple what the hook made |
#
# ## The rule
#
# Frozen weights: 4 bits in blocks, as plain `uint8` parameters, layers checkpointed. Trained weights: float32
# shards; 8 bits on the wire only if the GPU waits for all-gathers, gradients are already reduced in bf16 (if your loss
# bears it), and a timed step is faster: int8 in blocks, or float8 with one scale where products are in float8, too.
#
# [← lesson 21](21_long_sequences.ipynb)

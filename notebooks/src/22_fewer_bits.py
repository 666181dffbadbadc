# %% [markdown]
# # 22 · Fewer bits
#
# Which bytes of a sharded model can be 8 or 4 bits? **What is frozen: store it in 4 bits; FSDP2 shards and
# gathers plain `uint8` parameters. What is trained: keep its shards in float32. Where all-gathers are
# exposed, gather in 8 bits, with one scale that all ranks agree on.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

WAYS = {"bf16 gathers": (4, 2), "float8 gathers": (4, 1), "frozen, 4 bits": (0.5, 0.5)}
fig, panels = plots.figure(2, width=7.5, height=1.7)
for column, (axes, title) in enumerate(zip(panels, ["at rest, in shards", "on the wire, in an all-gather"])):
    for row, sizes in enumerate(WAYS.values()):
        axes.barh(row, sizes[column], height=0.6, color=plots.RANK_COLORS[row])
        axes.text(sizes[column] + 0.08, row, f"{sizes[column]:g}", va="center")
    axes.set(title=title, xlim=(0, 4.6), ylim=(2.6, -0.6))
    axes.set_xticks([])
    axes.set_yticks(range(3), list(WAYS) if column == 0 else ["", "", ""])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Bytes per weight at rest and on the wire: 4 and 2, with float8 4 and 1, frozen half and half.")

# %% [markdown]
# A drawing: bytes for each weight. Scales are left out, and so are a trained weight's gradient (4 bytes) and
# AdamW states (8 bytes). Eight-bit *optimizer states* are in [lesson 19](19_whole_matrix_optimizers.ipynb).

# %% tags=["card"]
lesson.card(
    22,
    learn="gather trained weights in 8 bits, keep frozen weights in 4, and see what either costs in error",
    needs="[lesson 7](07_mixed_precision.ipynb)",
    minutes=(1, 20, 20),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. `Float8` is a weight with two methods
# that FSDP2 looks for: one makes the bytes to gather, one turns gathered bytes into the weight. The rest of
# the class wraps a float32 tensor, `inner`. `fully_shard` splits, pads and copies a weight; after these
# operations (`KEEP`) the result must be a `Float8` again, or the shard has no hooks. Any other operation
# returns a plain tensor.
#
# ```python
# import math
#
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.utils._pytree import tree_map_only
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# mesh = init_device_mesh(device, (dist.get_world_size(),))   # without it a Mac would take its GPU
# aten, E4M3 = torch.ops.aten, torch.float8_e4m3fn            # 1 sign, 4 exponent, 3 mantissa bits
# KEEP = {aten.detach.default, aten.split.Tensor, aten.new_zeros.default, aten.slice.Tensor}
# KEEP |= {aten.view.default, aten.copy_.default}             # what fully_shard does to a weight
#
#
# class Float8(torch.Tensor):                                 # float32 at rest
#     @staticmethod
#     def __new__(cls, inner):
#         return torch.Tensor._make_subclass(cls, inner)
#
#     def __init__(self, inner):
#         self.inner = inner
#
#     @classmethod
#     def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
#         args, kwargs = tree_map_only(cls, lambda shard: shard.inner, (args, kwargs or {}))
#         out = func(*args, **kwargs)
#         return tree_map_only(torch.Tensor, cls, out) if func in KEEP else out
#
#     def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
#         scale = self.inner.abs().max().clamp(min=1e-12) / torch.finfo(E4M3).max
#         dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())       # one for all ranks
#         padding = math.ceil(outer_size[0] / mesh.size()) - len(self.inner)
#         codes = nn.functional.pad(self.inner / scale, (0, 0, 0, padding)).to(E4M3)
#         return (codes.view(torch.uint8),), scale            # gloo cannot send float8
#
#     def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
#         full = (outputs[0].view(E4M3).float() * scale).to(param_dtype)
#         if out is None:                                     # the first time
#             return full, (full,)                            # the weight, and what reshard frees
#         out.data.copy_(full[: len(out)])
#
#
# def train(gathers):
#     torch.manual_seed(0)                                    # the same weights on every rank
#     layers = [nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False)]
#     model = nn.Sequential(*layers)
#     if gathers == "float8":
#         for layer in layers[::2]:
#             layer.weight = nn.Parameter(Float8(layer.weight.detach()))
#     dtype = torch.float32 if gathers == "float32" else torch.bfloat16
#     fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
#     optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
#     torch.manual_seed(1 + dist.get_rank())                  # other samples on each rank
#     for step in range(40):
#         x = torch.randn(16, 64)
#         with record_collectives(model) as trace:
#             loss = (model(x).float() - x).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     return trace.bytes_by_kind(), loss.item()               # rank 0 prints its own
#
#
# for gathers in ("float32", "bf16", "float8"):
#     sent, loss = train(gathers)
#     if dist.get_rank() == 0:
#         kib = [f"{sent[kind] / 1024:4.0f} KiB" for kind in ("all_gather", "reduce_scatter")]
#         print(f"{gathers:7}: gathered {kib[0]}, reduced {kib[1]}, loss {loss:.3f}")
# dist.destroy_process_group()
# ```
# ```text
# float32: gathered  128 KiB, reduced  128 KiB, loss 0.024
# bf16   : gathered   64 KiB, reduced  128 KiB, loss 0.024
# float8 : gathered   32 KiB, reduced  128 KiB, loss 0.025
# ```
#
# Float8 halves the gathered bytes of bf16, and this small model learns about as well, which says nothing
# about a large one. The hooks are for all-gathers alone: gradients are computed in bf16 and reduced in
# float32, as the policy says. FSDP1 has no such hooks.
#
# ## What the two hooks must do
#
# Without a **scale** small weights would become 0: the smallest positive number of this format, e4m3, is
# about 0.002. The scale maps the largest weight to 448, e4m3's largest number. The next cell has the script's
# class again, with two parts moved into methods, and two subclasses that each break one of them.

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

# %%
# %%ranks
aten, E4M3 = torch.ops.aten, torch.float8_e4m3fn
KEEP = {aten.detach.default, aten.split.Tensor, aten.new_zeros.default, aten.slice.Tensor}
KEEP |= {aten.view.default, aten.copy_.default}


class Float8(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_subclass(cls, inner)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Float8, lambda shard: shard.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, out) if func in KEEP else out

    def find_scale(self, mesh):
        scale = self.inner.abs().max().clamp(min=1e-12) / torch.finfo(E4M3).max
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return scale

    def to_free(self, full):
        return (full,)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self.find_scale(mesh)
        padding = math.ceil(outer_size[0] / mesh.size()) - len(self.inner)
        codes = nn.functional.pad(self.inner / scale, (0, 0, 0, padding)).to(E4M3)
        return (codes.view(torch.uint8),), scale

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        full = (outputs[0].view(E4M3).float() * scale).to(param_dtype)
        if out is None:
            return full, self.to_free(full)
        out.data.copy_(full[: len(out)])


class OwnScale(Float8):
    def find_scale(self, mesh):                                 # no agreement
        return self.inner.abs().max() / torch.finfo(E4M3).max


class NothingToFree(Float8):
    def to_free(self, full):                                    # return full, ()
        return ()

# %% [markdown]
# `trial` (folded) runs one forward pass with weights whose first rows, rank 0's, are four times as large as
# the rest, and compares the gathered weights with the exact ones.

# %% jupyter={"source_hidden": true}
# %%ranks
def weights(rows=64, columns=256):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    w[: rows // world] *= 4
    return w.to(device)


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def distance(w, exact):
    return ((w - exact).norm() / exact.norm()).item()


def trial(kind, rows=64):
    """Run a forward pass; return the error of the weights, and the bytes left and gathered over the exact ones."""
    exact, seen = weights(rows), []
    layer = linear(kind(exact.clone()))
    layer.register_forward_hook(lambda module, *_: seen.extend([module.weight.detach(), module.weight.clone()]))
    model = fully_shard(nn.Sequential(fully_shard(layer)))              # its hooks come after this one
    with record_collectives(model) as trace:
        model(torch.ones(1, 256, device=device))
    error = distance(seen[1], exact)
    assert layer.weight.full_tensor().equal(exact)              # the shards keep all their bits
    left = seen[0].untyped_storage().size()
    return [error, left / exact.nbytes, trace.bytes_by_kind()["all_gather"] / exact.nbytes]

# %% tags=["hooks"]
# %%ranks
hooks = {kind.__name__: trial(kind) for kind in (Float8, OwnScale, NothingToFree)}
uneven = trial(Float8, rows=4 * world + 1)[0]

# %%
hooks, uneven = ranks.get("hooks"), ranks.get("uneven")[0]
assert all(found["Float8"][0] < 0.03 for found in hooks)
assert uneven < 0.03
assert max(found["OwnScale"][0] for found in hooks) > 0.5
assert [round(left) for _, left, _ in hooks[0].values()] == [0, 0, 1]
worst = {name: max(100 * found[name][0] for found in hooks) for name in hooks[0]}
Table(
    ["", "error of the weights, worst rank", "of the full weights left after forward"],
    [[name, f"{worst[name]:.1f}%", f"{hooks[0][name][1]:.0%}"] for name in worst],
)

# %% [markdown]
# **The scale belongs to the whole weight.** If each rank takes its own, the ranks multiply gathered codes
# with different numbers: each rank computes with a different model, and nothing raises. **The tuple names
# what `reshard` frees.** If it is empty, all decoded weights stay on each rank after the first forward pass:
# only gradients and optimizer states are still sharded. A cache of quantised weights does the same:
# Transformer Engine kept one until backward ([issue
# 2681](https://github.com/NVIDIA/TransformerEngine/issues/2681)).
#
# **Pad to the rows of rank 0.** `fsdp_pre_all_gather` gets the shard without padding, and all ranks must give
# equally many bytes. Without padding only the ranks with fewer rows raise, and the others wait. The same
# happens if a rank has no rows (9 rows on 4 ranks are 3, 3, 3, 0): this class's `max()` raises there.
#
# The price is memory: a gathered weight takes 1 byte for its code and 2 decoded, instead of 2, and float32
# copies of one weight exist while it is decoded. A float8 matrix product would take the codes as they are.
#
# **Shards, optimizer and checkpoint stay in float32.** The next cell trains with float8 gathers, saves, and
# loads into a model that knows nothing of `Float8`.

# %%
# %%ranks
import shutil
import tempfile

from fsdp_utils import load_distributed, save_distributed


def two_layers(kind):
    return fully_shard(nn.Sequential(linear(kind(weights(64))), linear(kind(weights(256, 64)))))


trained, plain = two_layers(Float8), two_layers(lambda w: 0 * w)
optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
for _ in range(3):
    trained(torch.ones(1, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
save_distributed(folder[0], trained, step=3)
load_distributed(folder[0], plain)
same = all(p.full_tensor().equal(q.full_tensor()) for p, q in zip(trained.parameters(), plain.parameters()))
if rank == 0:
    print("the same weights without Float8:", same)

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
from contextlib import suppress

import torch.distributed.checkpoint as dcp

assert same
one = torch.ones(1, 256, device=device)                         # gathered again, after the steps
assert distance(trained(one).detach(), plain(one).detach()) < 0.1
zeros = two_layers(lambda w: 0 * w)
dcp.save(trained.state_dict(), checkpoint_id=folder[0] + "/plain")
try:
    dcp.load(zeros.state_dict(), checkpoint_id=folder[0] + "/plain")
    raise AssertionError("torch's own checkpoint loads without the class")
except dcp.api.CheckpointException as error:
    assert "Unsupported global: GLOBAL" in str(error)
with torch.serialization.safe_globals([Float8]):
    dcp.load(zeros.state_dict(), checkpoint_id=folder[0] + "/plain")
assert all(p.full_tensor().equal(q.full_tensor()) for p, q in zip(trained.parameters(), zeros.parameters()))
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
mixed = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)).to(device))
with suppress(AssertionError):                                  # two trainable dtypes
    mixed(torch.ones(1, 8, device=device))
    raise RuntimeError("expected uniform dtypes")

# %% [markdown]
# torch's own `dcp.save` pickles the class, and `dcp.load` refuses it: load under
# `torch.serialization.safe_globals([Float8])`.
#
# ## When it pays
#
# Most of float8's gain is in products, not in gathers: "typically 80% comes from fp8 compute and 20% comes from
# the fp8 all gather" ([issue 687](https://github.com/pytorch/torchtitan/issues/687)). A CPU cannot time this.
# The next table is one product on an H200, of `rows` by 8,192 with 8,192 by 8,192. In float8 it first finds a
# scale for each matrix and casts it, compiled.

# %% tags=["on-a-gpu"]
from fsdp_utils.lessons import recorded

found = {row["setting"]: row.get("tflop_s") for row in recorded.load("costs")["results"]["rows"]}
table, gains = [], []
for rows in (1024, 4096, 16384):
    bf16, float8 = (found[f"{kind}, {rows} rows"] for kind in ("bf16", "float8"))
    gains.append(round(float8 / bf16, 2))
    table.append([f"{rows:,}", f"{bf16:.0f}", f"{float8:.0f}", f"{float8 / bf16:.2f}"])
assert gains == [0.71, 0.98, 1.53]
Table(["rows", "bf16, TFLOP/s", "float8 with casts", "ratio"], table)

# %% [markdown]
# Rows are the tokens of a rank. With few of them the casts cost more than the product gains.
#
# - **Gathers.** Fewer bytes save time only where all-gathers are exposed ([lesson
#   4](04_backward_prefetch.ipynb)): slow links, small batches. A user with 64 GPUs saw no clear gain ([issue
#   653](https://github.com/pytorch/torchtitan/issues/653)).
# - **Libraries.** torchao's `Float8Linear` does both. It had an option for float8 gathers alone, as in the
#   script, and deleted it as too complex for code that nobody used yet ([pull
#   1451](https://github.com/pytorch/ao/pull/1451)). In May 2026 a maintainer of torchtitan called its float8
#   all-gather deprecated ([pull 3105](https://github.com/pytorch/torchtitan/pull/3105)); FSDP2's hooks
#   remain.
#
# ## Your turn 1 · One all-reduce for all scales
#
# The script's class sends one tiny all-reduce for each weight and gather. Weights change only in
# `optimizer.step()`, so one for all of them after each step is enough. Write `find_scales(parameters)`: it
# gets the model's sharded weights and returns a list of scales, each a tensor of one number: the largest
# absolute value of the *whole* weight, divided by 448 (none here is all zeros, so no clamp). Send **one**
# collective. `p.to_local().inner` is this rank's shard of `p`, in float32. torchao's
# `precompute_float8_dynamic_scale_for_fsdp` does this and stores each scale on its weight, where
# `fsdp_pre_all_gather` finds it.
#
# <details><summary>Hint</summary>
#
# `torch.stack` makes one tensor of many maxima, and a list of its rows is what to return.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@turn(1, {
    "collectives": exactly(
        1, less="No rank knows the others' maxima: each has a scale of its own.",
        more="Put the maxima of all weights into one tensor, and reduce it once.",
    ),
    "scales that are too small": exactly(0, "Weights overflow: a scale is below the largest absolute value of all ranks / 448."),
    "scales that are too large": exactly(0, "Bits are lost: a scale is above its own weight's maximum / 448."),
})
def score_scales(find_scales):
    exact = [weights(64, 32), 0.01 * weights(32, 64), -3 * weights(40, 16).abs()]
    model = fully_shard(nn.Sequential(*[linear(Float8(w.clone())) for w in exact]))
    with record_collectives(model) as trace, torch.no_grad():
        scales = find_scales(list(model.parameters()))
    if not isinstance(scales, list | tuple) or len(scales) != len(exact):
        raise NotYet(f"Return a list of {len(exact)} scales, one for each weight.")
    ratios = [float(s) * 448 / w.abs().max().item() for s, w in zip(scales, exact)]
    wrong = torch.tensor([[r < 0.999 for r in ratios], [r > 1.001 for r in ratios]], device=device).sum(1)
    dist.all_reduce(wrong)
    return {
        "collectives": len(trace.collectives),
        "scales that are too small": wrong[0].item(),
        "scales that are too large": wrong[1].item(),
    }


# %%
# %%turn 1
def find_scales(parameters):
    return None                                                 # your lines here


# %% tags=["solution"] turn=1
def find_scales(parameters):
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list(largest / 448)

# %% tags=["right"] turn=1
def find_scales(parameters):                                    # divide first
    scales = torch.zeros(len(parameters), device=device)
    for number, p in enumerate(parameters):
        scales[number] = p.to_local().inner.abs().max() / 448
    dist.all_reduce(scales, dist.ReduceOp.MAX)
    return list(scales)

# %% tags=["right"] turn=1
def find_scales(parameters):                                    # gather the maxima
    own = torch.stack([p.to_local().inner.abs().amax() for p in parameters])
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    return list(torch.stack(everyone).amax(0) / torch.finfo(E4M3).max)

# %% tags=["right"] turn=1
def find_scales(parameters):                                    # as norms
    norms = torch.stack([torch.linalg.vector_norm(p.to_local().inner, math.inf) for p in parameters])
    dist.all_reduce(norms, op=dist.ReduceOp.MAX)
    return norms.div(448).unbind()

# %% tags=["wrong"] turn=1 says="a scale of its own"
def find_scales(parameters):
    return [p.to_local().inner.abs().max() / 448 for p in parameters]

# %% tags=["wrong"] turn=1 says="reduce it once"
def find_scales(parameters):                                    # one for each
    largest = [p.to_local().inner.abs().max() for p in parameters]
    for one in largest:
        dist.all_reduce(one, dist.ReduceOp.MAX)
    return [one / 448 for one in largest]

# %% tags=["wrong"] turn=1 says="Weights overflow"
def find_scales(parameters):                                    # without abs
    largest = torch.stack([p.to_local().inner.max() for p in parameters])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list(largest / 448)

# %% tags=["wrong"] turn=1 says="Bits are lost"
def find_scales(parameters):                                    # one for the model
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [largest / 448 for _ in parameters]

# %% tags=["wrong"] turn=1 says="Bits are lost"
def find_scales(parameters):                                    # a sum
    largest = torch.stack([p.to_local().inner.abs().max() for p in parameters])
    dist.all_reduce(largest)
    return list(largest / 448)

# %% [markdown]
# ## Which 8 bits, and when 4
#
# One large weight can spoil a scale that others share. The next cell sweeps its size in a matrix of ordinary
# weights, and rounds with one scale for all, or with one for each **block** of 64.

# %%
import torch


def rounded(w, kind, block):
    parts = w.view(-1, block)
    largest = parts.abs().amax(1, keepdim=True)
    if kind == "float8":
        scale = largest / 448
        return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).view_as(w)
    scale = largest / {"int8": 127, "int4": 7}[kind]
    return ((parts / scale).round() * scale).view_as(w)


def error(largest, kind, block, count=1):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(256 * 256, generator=generator)
    large = torch.randperm(len(w), generator=generator)[:count]
    w[large] = largest
    off = rounded(w, kind, block) - w
    off[large] = w[large] = 0
    return 100 * (off.norm() / w.norm()).item()                                 # of the ordinary weights


sizes, kinds = [5, 10, 20, 40, 80, 160, 320], ["float8", "int8", "int4"]
sweep = {(kind, block): [error(s, kind, block) for s in sizes] for kind in kinds for block in (64, 256 * 256)}

# %% jupyter={"source_hidden": true}
assert all(2 < found < 3 for block in (64, 65536) for found in sweep["float8", block])
assert max(sweep["int8", 64]) < 2.5 < 18 < sweep["int8", 65536][4] < 19
assert sweep["int8", 65536][1] < 2.5 < sweep["int8", 65536][2]
assert max(sweep["int4", 64]) < 12 < 90 < sweep["int4", 65536][-1]
many = [round(error(80, *how, count=66), 1) for how in (("int8", 64), ("int4", 64), ("float8", 256 * 256))]
assert many == [4.5, 26.7, 2.7]
fig, (axes,) = plots.figure(width=7.5, height=2.6)
for (kind, block), found in sweep.items():
    style = {"color": plots.RANK_COLORS[kinds.index(kind)], "linestyle": "-" if block == 64 else "--"}
    label = f"{kind}, {'blocks of 64' if block == 64 else 'one scale'}"
    axes.loglog(sizes, found, marker="o", markersize=3, label=label, **style)
axes.set(xlabel="the one large weight, in standard deviations of the others", ylabel="error of the others, %")
axes.set_xticks(sizes, sizes)
axes.set_yticks([1, 10, 100], ["1", "10", "100"])
axes.minorticks_off()
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plots.show(fig, alt="Rounding error over the size of one large weight: float8, int8, int4, with and without blocks.")

# %% [markdown]
# Each float8 number has an exponent, so one scale is enough: 2.7% over the whole sweep. Integers have even
# steps, and a large weight makes them wide: int8 with one scale is better than float8 up to ten standard
# deviations, and 18% off at eighty. **With one large weight, int8 in blocks is the most accurate of the
# six**, but the ranks then gather a scale for each block, too. Float8 needs one number, and a float8 matrix
# product takes its codes: hence the script. **Four bits need blocks**, and are 11% off even so. A bf16 scale
# for each 64 weights costs a quarter of a bit per weight.
#
# Blocks help while large weights are rare. With 66 of size eighty at random places, one weight in a thousand,
# int8 in blocks is 4.5% off and int4 27%; float8 with one scale stays at 2.7%. Count yours first.
#
# ## Frozen weights in 4 bits
#
# An adapter is two small trained matrices whose product is added to a frozen weight ([lesson
# 9](09_child_tuning.ipynb)). [QLoRA](https://arxiv.org/abs/2305.14314) trains adapters beside a frozen model
# in 4 bits, and reports the same quality as in 16 with NF4, whose levels are denser around 0; with even
# steps, as here, it reports a higher perplexity. None of that is measured here. Two codes share a byte, so
# the parameter is `uint8`. `Linear4` decodes its weight in forward, and adds an adapter.

# %%
# %%ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

bf16, fp16 = torch.bfloat16, torch.float16


class Linear4(nn.Module):
    """64 columns of 4 bits in blocks of 64, and an adapter of rank 4."""

    def __init__(self, stored=torch.uint8, adapter=bf16):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        codes = torch.randint(256, (64, 32), dtype=torch.uint8, generator=g).to(device)
        self.down = nn.Parameter(torch.randn(4, 64, generator=g).to(device, adapter))
        self.codes = nn.Parameter(codes.view(stored), requires_grad=False)
        self.scales = nn.Parameter(torch.full((64, 1), 0.125, dtype=bf16, device=device), requires_grad=False)
        self.up = nn.Parameter(torch.zeros(64, 4, dtype=adapter, device=device))

    def forward(self, x):                                       # f32[batch, 64]
        codes = self.codes.view(torch.uint8)
        w = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - 7.5
        if w.shape[1] != 64:
            return x * math.nan                                 # the codes are no longer bytes
        return x @ (w * self.scales.float()).T + x @ self.down.float().T @ self.up.float().T

# %% [markdown]
# `sharded4` shards it under FSDP1 or FSDP2, runs forward and backward, and compares the output with the
# unsharded layer's.

# %%
# %%ranks
def sharded4(version, stored=torch.uint8, adapter=bf16, policy=None):
    """Run a step; say what comes of it."""
    x = torch.ones(2, 64, device=device)
    wanted, model = Linear4()(x), Linear4(stored, adapter)
    try:
        if version == 1:
            mixed = policy and MixedPrecision(policy, cast_forward_inputs=False, cast_root_forward_inputs=False)
            model = FSDP(model, device_id=device, use_orig_params=True, mixed_precision=mixed)
        else:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(policy, cast_forward_inputs=False))
        with record_collectives(model) as trace:
            found = model(x)
            found.sum().backward()
    except ValueError as error:
        return [str(error), ""]
    sent = sum(event.bytes for event in trace.collectives if event.kind == "all_gather")
    return ["right" if torch.allclose(found, wanted) else "wrong output, no error", sent]


# %% tags=["storage"]
# %%ranks
ways = {
    "FSDP1, uint8": sharded4(1),
    "FSDP1, stored as bf16": sharded4(1, bf16),
    "FSDP1, stored as bf16, float32 adapter": sharded4(1, bf16, adapter=torch.float32),
    "FSDP1, stored as bf16, policy fp16": sharded4(1, bf16, policy=fp16),
    "FSDP2, uint8": sharded4(2),
    "FSDP2, uint8, float32 adapter, policy bf16": sharded4(2, adapter=torch.float32, policy=bf16),
    "FSDP2, stored as bf16, policy fp16": sharded4(2, bf16, policy=fp16),
}

# %%
ways = ranks.get("ways")[0]
outcomes = [words for words, _ in ways.values()]
assert outcomes[0] == "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.uint8"
assert outcomes[1] == outcomes[4] == outcomes[5] == "right"
assert outcomes[2] == "Must flatten tensors with uniform dtype but got torch.float32 and torch.bfloat16"
assert outcomes[3] == outcomes[6] == "wrong output, no error"
assert ways["FSDP2, uint8"] == ways["FSDP2, uint8, float32 adapter, policy bf16"]
if 64 % len(ranks.get("rank")) == 0:                                # no padding
    assert ways["FSDP2, uint8"][1] == 64 * 64 // 2 + 2 * 64 + 2 * (4 * 64 + 64 * 4)
Table(["", "what happens", "bytes gathered"], [[name, *found] for name, found in ways.items()])

# %% [markdown]
# FSDP1 lays all parameters of a unit end to end, so they need one floating-point dtype (`Cannot flatten
# integer dtype tensors` if the codes come first). Hence bitsandbytes'
# [`bnb_4bit_quant_storage=torch.bfloat16`](https://huggingface.co/docs/bitsandbytes/main/en/fsdp_qlora): the
# same bytes under another name, and adapters in that dtype, too. bitsandbytes' 8-bit weights have no such
# setting, so FSDP1 cannot shard them ([peft issue 2833](https://github.com/huggingface/peft/issues/2833)).
#
# FSDP2 shards each parameter by itself: `uint8` beside a float32 adapter works, and a policy casts only
# floating-point parameters. Of the 3,200 bytes 2,048 are the 4,096 frozen weights; in bf16 they would be
# 8,192.
#
# **This is for plain parameters, as in `Linear4`.** bitsandbytes' `Params4bit` keeps its scales in an
# attribute, which the shards under FSDP2 do not have ([accelerate issue
# 3983](https://github.com/huggingface/accelerate/issues/3983): a loss of 0, gradients of NaN). Since [pull
# 3987](https://github.com/huggingface/accelerate/pull/3987) accelerate does not shard those in `uint8`: each
# rank holds all of them.
#
# Rows 4 and 7 fail **silently**: codes that call themselves bf16 are cast to fp16 *as numbers*. Where codes
# have a floating-point dtype, make `param_dtype` the same.
#
#
#
# ## Your turn 2 · Pack four bits
#
# Write `pack(weight)`, from `f32[64, 256]` to two tensors, the codes and their scales, and `unpack(codes,
# scales)`, back to `[64, 256]`. At most 4.5 bits for each weight, scales included. One weight of the matrix
# is 40; the others have a standard deviation of 1. Both tensors become frozen parameters of a module under
# `fully_shard` with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, and `unpack` gets what it gathers.
#
# <details><summary>Hint</summary>
#
# Blocks of 64, a scale of largest / 7, `round`, plus 8: four bits. `codes[:, ::2] | codes[:, 1::2] << 4` is a
# byte.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
CAST = "The codes change when they are gathered: the policy casts floating-point parameters. Keep them in uint8."


class Frozen(nn.Module):
    def __init__(self, codes, scales, unpack):
        super().__init__()
        self.codes, self.scales = (nn.Parameter(t, requires_grad=False) for t in (codes, scales))
        self.unpack = unpack

    def forward(self):
        return self.unpack(self.codes.detach(), self.scales.detach())


@turn(2, {
    "bits for each weight": at_most(4.5, "Too many bits: two codes share a byte, and 64 weights a scale."),
    "has negative weights": exactly(True, "Negative weights are lost: shift the codes, such as by 8."),
    "error of ordinary weights, %": at_most(14, "The one large weight spoils the others: give each block a scale. Or unpack does not undo pack."),
    "error under FSDP2, %": at_most(15, CAST),
})
def score_pack(pack, unpack):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(device)
    w[3, 5] = 40
    codes, scales = pack(w.clone())
    plain = unpack(codes, scales)
    if plain.shape != w.shape:
        raise NotYet(f"`unpack` has to return {list(w.shape)}, found {list(plain.shape)}.")
    model = fully_shard(Frozen(codes, scales, unpack), mp_policy=MixedPrecisionPolicy(bf16))
    ordinary = w.abs() < 10
    try:
        gathered = 100 * distance(model().float()[ordinary], w[ordinary])
    except RuntimeError:                                        # such as shapes that do not fit any more
        gathered = math.inf
    return {
        "bits for each weight": 8 * (codes.nbytes + scales.nbytes) / w.numel(),
        "has negative weights": plain.min().item() < 0,
        "error of ordinary weights, %": round(100 * distance(plain.float()[ordinary], w[ordinary]), 1),
        "error under FSDP2, %": round(gathered, 1) if math.isfinite(gathered) else math.inf,
    }


# %%
# %%turn 2
def pack(weight):                                               # f32[64, 256] -> codes, scales
    return None                                                 # your lines here


def unpack(codes, scales):                                      # -> [64, 256]
    return None                                                 # your lines here


# %% tags=["solution"] turn=2
def pack(weight):
    blocks = weight.view(64, 4, 64)
    scales = blocks.abs().amax(2, keepdim=True) / 7
    codes = ((blocks / scales).round() + 8).to(torch.uint8).view(64, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()

def unpack(codes, scales):
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(64, 4, 64)
    return ((pairs.float() - 8) * scales.float()).view(64, 256)

# %% tags=["right"] turn=2
def pack(weight):                                               # from the least to the largest
    blocks = weight.view(-1, 64)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    codes = ((blocks - low) / (high - low) * 15).round().to(torch.uint8)
    return codes[:, :32] + 16 * codes[:, 32:], torch.cat([low, (high - low) / 15], 1).bfloat16()

def unpack(codes, scales):
    low, step = scales.float().split(1, 1)
    return (torch.cat([codes % 16, codes // 16], 1) * step + low).view(64, 256)

# %% tags=["right"] turn=2
def pack(weight):                                               # blocks of 32, flat
    blocks = weight.reshape(-1, 32)
    scales = (blocks.abs().amax(1) / 7).bfloat16()
    codes = (blocks / scales.float()[:, None]).round().clamp(-8, 7).add(8).to(torch.uint8).flatten()
    return (codes[0::2] << 4) + codes[1::2], scales

def unpack(codes, scales):
    both = torch.stack([codes >> 4, codes & 15], 1).reshape(-1, 32)
    return ((both.to(torch.float32) - 8) * scales.float()[:, None]).reshape(64, 256)

# %% tags=["right"] turn=2
LEVELS = torch.linspace(-1, 1, 16, device=device).sign() * torch.linspace(-1, 1, 16, device=device).abs() ** 1.3

def pack(weight):                                               # levels denser around 0
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = ((blocks / scales)[..., None] - LEVELS).abs().argmin(-1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales

def unpack(codes, scales):
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(-1, 64)
    return (LEVELS[pairs.long()] * scales).view(64, 256)

# %% tags=["wrong"] turn=2 says="spoils the others"
def pack(weight):                                               # one scale
    scales = weight.abs().max().view(1) / 7
    codes = ((weight / scales).round() + 8).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales

def unpack(codes, scales):
    return (torch.stack([codes & 15, codes >> 4], -1).view(64, 256).float() - 8) * scales

# %% tags=["wrong"] turn=2 says="two codes share a byte"
def pack(weight):                                               # a byte for each
    blocks = weight.view(64, 4, 64)
    scales = blocks.abs().amax(2, keepdim=True) / 7
    return ((blocks / scales).round() + 8).to(torch.uint8), scales.bfloat16()

def unpack(codes, scales):
    return ((codes.float() - 8) * scales.float()).view(64, 256)

# %% tags=["wrong"] turn=2 says="Negative weights are lost"
def pack(weight):
    blocks = weight.view(64, 4, 64)
    scales = blocks.abs().amax(2, keepdim=True) / 15
    codes = (blocks / scales).round().clamp(0, 15).to(torch.uint8).view(64, 256)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.bfloat16()

def unpack(codes, scales):
    return (torch.stack([codes & 15, codes >> 4], -1).view(64, 4, 64) * scales.float()).view(64, 256)

# %% tags=["wrong"] turn=2 says="the policy casts floating-point parameters"
def pack(weight):                                               # stored as fp16
    blocks = weight.view(64, 4, 64)
    scales = blocks.abs().amax(2, keepdim=True) / 7
    codes = ((blocks / scales).round() + 8).to(torch.uint8).view(64, 256)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float16), scales.bfloat16()

def unpack(codes, scales):
    codes = codes.view(torch.uint8)
    return ((torch.stack([codes & 15, codes >> 4], -1).view(64, 4, 64).float() - 8) * scales.float()).view(64, 256)

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `Must flatten tensors with uniform dtype`, `Cannot flatten integer dtype tensors` | FSDP1 and integers, or adapters in another dtype | FSDP2 and plain parameters; or 4 bits with a storage dtype, and adapters in it |
# | bitsandbytes under FSDP2: a loss of 0, NaN, or each rank holds all 4-bit weights | shards of `Params4bit` lose its scales; accelerate leaves `uint8` ones whole | codes and scales as plain parameters |
# | wrong outputs since fp16 | codes stored as bf16 and cast | storage dtype = `param_dtype`, or `uint8` under FSDP2 |
# | `FSDP expects uniform original parameter dtype` (FSDP2) | two dtypes of *trainable* parameters in a unit | one dtype for all adapters |
# | float8: a poor loss, or ranks differ on the same batch | a scale for each rank | all-reduce it, with MAX |
# | `must return all-gather inputs with the padded sharded size`, or a hang | a hook without padding | pad to rank 0's rows |
# | `modified by an inplace operation` in backward, `a leaf Variable that requires grad` in forward | the hook wrote into `out` itself | `out.data.copy_` |
# | `Invalid scalar type` | gloo and float8 | send `codes.view(torch.uint8)` |
# | `Unsupported global` in `dcp.load` | the shards were saved as `Float8` | `torch.serialization.safe_globals([Float8])` |
# | memory as without FSDP | quantised or decoded weights are cached | name what the hook made in its tuple; keep no other cache |
# | no faster | all-gathers were hidden; casts and all-reduces cost more; with float8 products, these are small | measure exposed communication first |
#
# ## The rule
#
# Frozen: 4 bits in blocks, as plain `uint8` parameters, under FSDP2. Trained: float32 shards; 8 bits on the
# wire if communication is exposed, with one scale from all ranks.
#
# [← lesson 21](21_long_sequences.ipynb)

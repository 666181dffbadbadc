# %% [markdown]
# # 16 · Two dimensions
#
# When is FSDP alone not enough? **When there are fewer samples than ranks, or when one gathered layer or the
# activations of one sample don't fit on a rank. Then add tensor parallelism within each host, and keep FSDP
# between hosts.**

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.2, height=2.5)
arrow = {"arrowstyle": "->", "color": plots.INK}
axes.add_patch(Rectangle((0, 1.2), 1.3, 1.6, color=plots.FAINT))
axes.text(0.65, 2.0, "input,\non both", ha="center", va="center", fontsize=9)
PARTS = ("half of\nup's rows", "half of the\nactivations", "half of down's\ncolumns", "a summand of\nthe output")
for r, color in enumerate(plots.RANK_COLORS[:2]):
    low = 2.2 - 1.8 * r
    middle = low + 0.7
    axes.text(1.75, low + 1.52, f"rank {r}", fontsize=8)
    for place, text in enumerate(PARTS):
        left = 2.0 + 2.3 * place
        dark = place in (0, 2)
        fill = {"facecolor": color, "alpha": 1 if dark else 0.3, "linewidth": 0}
        axes.add_patch(Rectangle((left, low), 1.8, 1.4, **fill))
        look = {"color": "white", "fontweight": "bold"} if dark else {"color": plots.INK}
        axes.text(left + 0.9, middle, text, ha="center", va="center", fontsize=8, **look)
        begin = (left - 0.46, middle) if place else (1.34, 2.0)
        axes.annotate("", (left - 0.04, middle), begin, arrowprops=arrow)
    axes.annotate("", (11.3, 2.0), (10.74, middle), arrowprops=arrow)
axes.text(11.4, 2.0, "all-reduce:\nthe output,\non both", va="center", fontsize=9)
axes.set(xlim=(-0.1, 13.2), ylim=(0.2, 4.0), xticks=[], yticks=[], title="an MLP on two ranks")
axes.spines[:].set_visible(False)
plots.show(fig, alt="Two ranks: each has half of up's rows and of down's columns; the outputs are added.")

# %% [markdown]
# A drawing of **tensor parallelism**. Under FSDP a rank gathers the full weights to compute. Here it computes
# with its part of them: with half of the rows of the first matrix, `up`, and half of the columns of the
# second, `down`. No weight is sent. One all-reduce adds the two summands of the output, and in backward
# another adds the gradients of the input.

# %% tags=["card"]
lesson.card(
    16,
    learn="combine FSDP with tensor parallelism on one mesh, count what each sends, and say when it pays",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 6](06_sharding_strategies.ipynb)",
    ranks="4 on the CPU, always: a mesh of two by two needs them",
    minutes=(1, 18, 18),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It runs the same batch on two meshes:
# four ranks of FSDP, and two rows of two ranks. The two ranks of a row compute together, on the same samples.
#
# ```python
# from collections import OrderedDict
#
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# world, names = dist.get_world_size(), ("fsdp", "tp")
# meshes = [init_device_mesh(device, (world // tp, tp), mesh_dim_names=names) for tp in (1, 2)]
#
#
# def block():
#     up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
#     return nn.Sequential(OrderedDict(norm=nn.RMSNorm(64), up=up, gelu=nn.GELU(), down=down))
#
#
# for samples in (64, 8, 2):                                      # of all ranks together
#     for mesh in meshes:
#         torch.manual_seed(0)                                    # the same weights on every rank
#         model = nn.Sequential(*[block() for _ in range(4)]).to(device)
#         for part in model:                                      # first tensor parallelism, then FSDP
#             if mesh["tp"].size() > 1:
#                 parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
#             fully_shard(part, mesh=mesh["fsdp"])
#         fully_shard(model, mesh=mesh["fsdp"])
#         rows, answer = mesh["fsdp"].size(), "not every rank has a sample"
#         if samples >= rows:                                     # the place along "fsdp" chooses the samples
#             x = torch.randn(samples, 16, 64).chunk(rows)[mesh.get_local_rank("fsdp")].to(device)
#             with record_collectives(model) as trace:
#                 loss = (model(x) - x.flip(-1)).square().mean()
#                 loss.backward()
#             dist.all_reduce(loss := loss.detach())
#             sent = {name: f"{n / 1024:.0f} KiB" for name, n in trace.sent_bytes_by_dimension().items()}
#             answer = f"each rank sends {sent}, loss {loss.item() / world:.3f}"
#         if dist.get_rank() == 0:
#             print(f"{samples} samples, mesh {tuple(mesh.shape)}: {answer}")
# dist.destroy_process_group()
# ```
# ```text
# 64 samples, mesh (4, 1): each rank sends {'fsdp': '1154 KiB'}, loss 1.032
# 64 samples, mesh (2, 2): each rank sends {'fsdp': '386 KiB', 'tp': '1024 KiB'}, loss 1.032
# 8 samples, mesh (4, 1): each rank sends {'fsdp': '1154 KiB'}, loss 1.002
# 8 samples, mesh (2, 2): each rank sends {'fsdp': '386 KiB', 'tp': '128 KiB'}, loss 1.002
# 2 samples, mesh (4, 1): not every rank has a sample
# 2 samples, mesh (2, 2): each rank sends {'fsdp': '386 KiB', 'tp': '32 KiB'}, loss 1.016
# ```
#
# The loss is the same on both meshes. What FSDP sends, 1,154 KiB, does not depend on the batch. With tensor
# parallelism it is a third of that, and the bytes along "tp" grow with the batch: at 64 samples the mesh
# sends more than FSDP alone, at 8 less than half. With 2 samples FSDP alone has no work for two of the ranks,
# and the mesh has work for all. (For a step of training add the optimizer. `clip_grad_norm_` needs the norms
# in the plan, too: see "When it goes wrong".)
#
# ## Where each weight lies
#
# A **mesh** arranges the ranks in rows and columns, and each **dimension** of it has a name. Here a row is a
# group along "tp" and a column a group along "fsdp". `parallelize_module` cuts the weights along "tp", by a
# plan: `ColwiseParallel` cuts the outputs of a linear layer, `RowwiseParallel` its inputs. (The names are
# those of papers that write `x @ A`. `nn.Linear` stores the transpose, so `ColwiseParallel` cuts the *rows*
# of `weight`.) Then `fully_shard` shards along "fsdp" what is left. In a DTensor the **placements** say how
# it is cut, one for each dimension of its mesh.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(4, device="cpu", preload=["torch.distributed.fsdp", "torch.distributed.tensor.parallel"])

# %%
# %%ranks
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module,
)

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
one, two, four = [init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("fsdp", "tp")) for tp in (1, 2, 4)]
TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def block():
    up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
    return nn.Sequential(OrderedDict(norm=nn.RMSNorm(64), up=up, gelu=nn.GELU(), down=down))


def cut(mesh, plan=TENSOR, model=None):                     # the first step
    torch.manual_seed(0)
    model = model or nn.Sequential(*[block() for _ in range(4)])
    for part in model if mesh["tp"].size() > 1 else []:
        parallelize_module(part, mesh["tp"], plan)
    return model


def shard(mesh, model):                                     # the second step
    for part in [*model, model]:
        fully_shard(part, mesh=mesh["fsdp"])
    return model


# %% tags=["placements"]
# %%ranks
def placed(model):
    found = {}
    for name in ("norm", "up", "down"):
        weight = model[0].get_submodule(name).weight
        if isinstance(weight, DTensor):
            found[name] = f"{', '.join(map(str, weight.placements))}: {tuple(weight.to_local().shape)}"
        else:
            found[name] = f"not cut: {tuple(weight.shape)}"
    return found


alone, first, both = placed(shard(one, cut(one))), placed(cut(two)), placed(shard(two, cut(two)))

# %%
alone, first, both = ranks.get("(alone, first, both)")[0]
Table(
    ["weight", "FSDP on four ranks", "2 x 2, cut along tp", "2 x 2, then sharded along fsdp"],
    [[name, alone[name], first[name], both[name]] for name in both],
    note="Placements and the shape that a rank holds. S(0): cut along dimension 0, between rows.",
)

# %% [markdown]
# After both steps a rank holds a quarter of `up` and of `down`, as under FSDP alone. The placements stand in
# the order of the mesh: first "fsdp", then "tp". The norm is on "fsdp" alone: the plan doesn't name it, so
# both ranks of a row compute it, and each holds half of it. Which rows and columns does each rank have? The
# next figure shows it: each weight is filled with the numbers 0, 1, 2, ... before it is cut, and each rank
# tells which ones it has.

# %% jupyter={"source_hidden": true}
# %%ranks
import logging
import warnings

warnings.filterwarnings("ignore", "FSDP2-wrapped module")   # see "When it goes wrong"
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def marked():
    model = nn.Sequential(block())
    for parameter in model.parameters():
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape)
    return model


def held(mesh):
    model = shard(mesh, cut(mesh, model=marked()))
    return {name: model[0].get_submodule(name).weight.to_local().flatten().int() for name in ("up", "down")}


cuts = {"FSDP": held(one), "2 x 2": held(two)}

# %% jupyter={"source_hidden": true}
import torch

cuts = ranks.get("cuts")
fig, panels = plots.figure(4, width=8.4, height=2.7)
owners = {}
for axes, (way, name) in zip(panels, [(way, name) for way in cuts[0] for name in ("up", "down")]):
    rows, columns = (256, 64) if name == "up" else (64, 256)
    owner = torch.full((rows * columns,), -1)
    for r, of_rank in enumerate(cuts):
        owner[of_rank[way][name].long()] = r
    owners[way, name] = owner = owner.view(rows, columns)
    for r in range(4):
        ys, xs = torch.where(owner == r)
        top, left, high, wide = ys.min().item(), xs.min().item(), len(ys.unique()), len(xs.unique())
        axes.add_patch(Rectangle((left, top), wide, high, facecolor=plots.RANK_COLORS[r], edgecolor="white"))
        axes.text(left + wide / 2, top + high / 2, r, ha="center", va="center", color="white", fontsize=9)
    axes.set(title=f"{way}: {name}\n{rows} x {columns}", xlim=(0, 256), ylim=(256, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
assert owners["2 x 2", "up"][:, 0].unique_consecutive().tolist() == [0, 2, 1, 3]
assert [owners["2 x 2", "down"][y, x].item() for y in (0, 63) for x in (0, 255)] == [0, 1, 2, 3]
plots.show(fig, alt="Which rank holds which rows and columns of two weights: FSDP, and a 2 x 2 mesh.")

# %% [markdown]
# On the mesh, "tp" cuts first. Of `up`, ranks 0 and 2 have the upper half, because both have place 0 along
# "tp", and FSDP shares this half between them. So the order from above is 0, 2, 1, 3, and PyTorch writes the
# placement along "fsdp" as `_S`, for `_StridedShard`. Of `down`, "tp" has cut the columns and FSDP the rows.
#
# Attention is cut in the same way: `q`, `k` and `v` as `up`, so that a rank has some of the heads, and the
# output projection as `down`. The number of heads, and of key and value heads, has to be divisible by the
# ranks along "tp".
#
# ## The mesh at work
#
# Now run forward and backward, and list what rank 0 issues for one block.

# %% tags=["mesh"]
# %%ranks
def run(mesh, plan=TENSOR, samples=8, model=None):
    model = model or shard(mesh, cut(mesh, plan))
    rows = mesh["fsdp"].size()
    x = torch.randn(samples, 16, 64, generator=torch.Generator().manual_seed(1))
    x = x.chunk(rows)[mesh.get_local_rank("fsdp")]          # the ranks of a row have the same samples
    with record_collectives(model) as trace:
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
    dist.all_reduce(loss := loss.detach() / world)
    return loss.item(), trace


loss, trace = run(two)
events = [e for e in trace.events if e.phase == "forward"][:5]
events += [e for e in trace.events if e.phase == "backward"][-5:]

# %%
Table(
    ["phase", "what", "along", "ranks", "KiB of the full tensor"],
    [
        [e.phase, e.kind, e.dimension, ", ".join(map(str, e.ranks)), f"{e.bytes / 1024:.2f}" if e.is_collective else ""]
        for e in ranks.get("events")[0]
    ],
    note="The first block. Its all-gather in backward comes earlier, beside the computation of the next block.",
)

# %% [markdown]
# Along "fsdp", ranks 0 and 2 gather the block: 64.25 KiB, which is half of `up`, half of `down` and the norm.
# In a step no rank has a full matrix. Along "tp", ranks 0 and 1 add their outputs in the middle of forward,
# and the gradients of the input in backward. The computation after such an all-reduce needs its result, so it
# **waits**. FSDP gathers weights, which are known before, and nothing waits for reduced gradients until the
# optimizer: both can run beside the computation of another block.
#
# ## What is sent along each dimension
#
# The next cell runs the script's model over a sweep of batches on three meshes.

# %% tags=["dimensions"]
# %%ranks
sizes = (2, 4, 8, 16, 32, 64, 128)
meshes = {"(4, 1)": one, "(2, 2)": two, "(1, 4)": four}
sent = {
    name: {n: run(mesh, samples=n)[1].sent_bytes_by_dimension() for n in sizes if n >= mesh["fsdp"].size()}
    for name, mesh in meshes.items()
}

# %%
sent, sizes = ranks.get("(sent, sizes)")[0]
fig, (axes,) = plots.figure(width=7.4, height=2.9)
for (name, found), color in zip(sent.items(), plots.RANK_COLORS):
    for label, dimensions, style in ((f"mesh {name}", ("fsdp", "tp"), "o-"), (None, ("fsdp",), ":")):
        kib = [sum(of.get(dimension, 0) for dimension in dimensions) / 1024 for of in found.values()]
        axes.plot(list(found), kib, style, color=color, label=label)
axes.set_xscale("log", base=2)
axes.set(xlabel="samples of all ranks together", ylabel="KiB that a rank sends", ylim=(-60, 2600))
axes.set_xticks(sizes, [str(n) for n in sizes])
axes.legend(title="dotted: along fsdp")
plots.show(fig, alt="Bytes sent against samples: flat under FSDP alone, growing with tensor parallelism.")

# %% jupyter={"source_hidden": true} tags=["check"]
for tp, found in zip((1, 2, 4), sent.values()):
    rows = 4 // tp
    for n, of in found.items():
        unit = 4 * (8 * 64**2 / tp + 64)
        assert of.get("fsdp", 0) == (rows - 1) / rows * 3 * 4 * unit
        assert of.get("tp", 0) == (tp - 1) / tp * 2 * 2 * 4 * (n * 16 // rows) * 64 * 4
least = [min((name for name in sent if n in sent[name]), key=lambda name: sum(sent[name][n].values())) for n in sizes]
assert least == ["(1, 4)"] * 3 + ["(2, 2)"] * 2 + ["(4, 1)"] * 2

# %% [markdown]
# - **Along "fsdp"** the bytes go with the **parameters**: two gathers and one reduce-scatter of each unit. Half of
#   each matrix, among two ranks instead of four, makes a third: half of a half travels, instead of three quarters.
# - **Along "tp"** the bytes go with the **tokens**: for each MLP two all-reduces of tokens x width numbers, with the
#   tokens of a row. How wide the MLP is inside does not matter.
#
# So fewer tokens favour more ranks along "tp": up to 8 samples the mesh (1, 4) sends least, at 16 and 32 (2,
# 2), at 64 and more FSDP alone. FSDP alone begins at 4 samples, one for each rank. But bytes are not time
# yet.
#
# ## Activations: sequence parallelism
#
# On the mesh a rank computes with twice as many samples as under FSDP alone. How much memory do their
# activations take? Outside of the MLP they are not cut: both ranks of a row hold the same ones. **Sequence
# parallelism** cuts these, too. Between the MLPs each rank has its part of the tokens (`Shard(1)`: dimension
# 1 is the sequence). An all-gather before `up` collects them, and a reduce-scatter after `down` takes the
# place of the all-reduce. `kept_bytes`, in the folded cell, counts what autograd keeps from forward for
# backward, without weights.

# %% jupyter={"source_hidden": true}
# %%ranks
def local(tensor):
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if hasattr(tensor, "wait") else tensor         # a collective may still be running


def kept_bytes(mesh, model):
    kept = {}

    def pack(tensor):
        mine = local(tensor)
        if mine.untyped_storage().data_ptr() not in {local(p).untyped_storage().data_ptr() for p in model.parameters()}:
            kept[mine.untyped_storage().data_ptr()] = mine              # held: no other gets its place
        return tensor

    x = torch.ones(8, 16, 64).chunk(mesh["fsdp"].size())[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# %% tags=["sequence"]
# %%ranks
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {                                                    # cut the tokens at the beginning, gather them at the end
    "0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
    "3": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
}


def sequence():
    return shard(two, parallelize_module(cut(two, SEQUENCE), two["tp"], ENDS))


ways = {
    "FSDP on four ranks": (one, lambda: shard(one, cut(one))),
    "2 x 2, tensor": (two, lambda: shard(two, cut(two))),
    "2 x 2, tensor and sequence": (two, sequence),
}
table, traces = [], {}
for name, (mesh, make) in ways.items():
    loss, traces[name] = run(mesh, model=make())
    along = traces[name].sent_bytes_by_dimension()
    table.append([name, round(loss, 4), round(kept_bytes(mesh, make()) / 1024), round(along.get("tp", 0) / 1024)])

# %%
Table(["8 samples", "loss", "KiB of activations on a rank", "KiB sent along tp"], ranks.get("table")[0])

# %% [markdown]
# With the tensor plan alone the activations grow by a quarter, because a rank computes with twice the samples
# and only the inside of the MLP is cut. With sequence parallelism 9% more than under FSDP alone remain: the
# tokens gathered before each `up`, which autograd keeps. The blocks send the same 128 KiB as before: a ring's
# all-reduce is a reduce-scatter and an all-gather, which are done at different places here. Of the other 9
# KiB, 8 gather the output at the end and 1 is for the gradients of the norms, because each rank has seen its
# own tokens only. (An embedding and a head go into the plan as well; PyTorch's `loss_parallel` then computes
# the loss without gathering the logits.)

# %% [markdown]
# ## Does it make a step faster?
#
# **A calculation**, with assumptions that you can change: bf16, blocks of 12 x width² parameters with
# attention (four all-reduces), hosts of eight ranks that share the link of their host ([lesson
# 6](06_sharding_strategies.ipynb)), 400 TFLOP/s per rank, 300 GiB/s within a host; FSDP's bytes hide behind
# computation and those of tensor parallelism don't; no latency. The cell compares three ways: FSDP on all
# ranks, HYBRID_SHARD (a full set of shards on each host), and "tp" of 8 with FSDP between hosts.

# %% tags=["scale"]
GIB = 2**30


def seconds(tokens, link, width=4096, flops=4e14, fast=300 * GIB, tp_between=False):
    """One block of one step, by way; tokens are those of the batch divided by all ranks, link is a host's bytes/s."""
    unit, compute = 2 * 12 * width**2, 6 * 12 * width**2 * tokens / flops
    activations = 4 * 2 * 7 / 8 * 2 * width * 8 * tokens            # four all-reduces of a row's tokens
    within = max(compute, 3 * unit / link) + activations / fast     # eight rings share the link: 8 x 3 unit / 8
    between = max(compute, 3 * unit / 8 / fast) + 8 * activations / link
    return {
        "FSDP": max(compute, 3 * unit / link),                      # one ring: 3 units leave a host
        "HYBRID_SHARD": max(compute, 3 * unit * 7 / 8 / fast, 2 * unit / link),
        "FSDP x tp": between if tp_between else within,
    }


def of_fsdp(tokens):
    """The seconds of each way in parts of FSDP's, with a link of 40 GiB/s."""
    found = seconds(tokens, 40 * GIB)
    return [f"{took / found['FSDP']:.2f}" for took in found.values()]


Table(["tokens per rank", "FSDP", "HYBRID_SHARD", "FSDP x tp of 8"], [[n, *of_fsdp(n)] for n in (512, 4096, 16384)])

# %% jupyter={"source_hidden": true} tags=["check"]
from itertools import product

tokens = [2 ** (7 + i / 4) for i in range(33)]                      # 128 to 32,768
links = [5 * 2 ** (i / 4) for i in range(17)]                       # 5 to 80 GiB/s
hidden = open_places = 0
for t, link, width, flops in product(tokens, links, (2048, 4096, 8192), (2e14, 4e14, 8e14)):
    found = seconds(t, link * GIB, width, flops)
    assert found["FSDP x tp"] > found["FSDP"]
    if t >= flops / (link * GIB):
        hidden += 1
        assert found["FSDP"] == min(found.values())
    else:
        open_places += 1
        assert found["HYBRID_SHARD"] < found["FSDP"]
    across = seconds(t, link * GIB, width, flops, tp_between=True)
    assert t < 1024 or across["FSDP x tp"] > found["FSDP x tp"]
assert (hidden, open_places) == (750, 4299)

# %% [markdown]
# The table has width 4,096 and a link of 40 GiB/s. From 9,300 tokens per rank on, FSDP's bytes are hidden
# there: tokens per rank = FLOP/s / (bytes/s). The same was calculated for 128 to 32,768 tokens per rank,
# links of 5 to 80 GiB/s, widths of 2,048 to 8,192 and 200 to 800 TFLOP/s, 5,049 places in all:
#
# - **FSDP x tp was slower than FSDP alone at every place.** Each rank of a host sends an eighth, but the eight
#   share the link, so the same bytes cross it, and the waits along "tp" come on top.
# - **HYBRID_SHARD was faster than FSDP at all 4,299 places where those bytes are not hidden**, if a replica fits on
#   a host: two units cross the link in place of three. A replica takes 16 bytes for each parameter with AdamW in
#   float32, besides activations.
# - **"tp" between hosts and FSDP within them** was slower than the other way round at every place with 1,024 tokens
#   or more per rank.
#
# So tensor parallelism is for what FSDP cannot do: fewer samples than ranks, and layers or activations too
# large for a rank. Latency is not in the calculation: a ring over all ranks is eight times as long as one
# over hosts. Measure on your cluster. Pipeline and context parallelism ([lesson 21](21_long_sequences.ipynb))
# also use more ranks than samples.
#
# ## Your turn 1 · An MLP in four parts
#
# Do by hand what the plan does, over all four ranks. `my_parts` gets the full weights (`up` is f32[256, 64],
# `down` f32[64, 256]) and returns a pair: what the rank at this place (0 to 3) keeps of each. `my_mlp`
# computes `F.linear(F.gelu(F.linear(x, up)), down)` from these parts. Every rank has the same `x`, f32[8,
# 64], and has to get the full output. Kept and sent bytes are counted.
#
# <details><summary>Hint</summary>
#
# `F.linear(x, weight)` has one output for each *row* of the weight, and one input for each *column*. GELU
# needs complete hidden activations: which cut of `up` gives them? Which cut of `down` can work with these
# alone?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.collectives.c10d_hooks import listen_to_calls
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@turn(1, {
    "KiB of weights kept": at_most(32, "Both matrices have 128 KiB: a rank should keep a quarter of each."),
    "ranks that have a summand of the output only": exactly(0, "Each rank has its summand of the output: add them up."),
    "error of the output, %": at_most(
        0.1, "Not the full MLP's output. GELU of a sum is not the sum of GELUs: each hidden activation has to be "
        "complete before it, and `down` needs the columns of the same activations."
    ),
    "KiB passed to collectives": at_most(2, "The output has 2 KiB: sum it once. Send neither weights nor hidden activations."),
})
def score_mlp(my_parts, my_mlp):
    generator = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(size, generator=generator) / 8 for size in ((256, 64), (64, 256), (8, 64)))
    kept = my_parts(up.clone(), down.clone(), rank, world)
    if not isinstance(kept, tuple | list) or len(kept) != 2 or not all(isinstance(p, torch.Tensor) for p in kept):
        raise NotYet("Return a pair of two tensors from `my_parts`.")
    kept, calls = [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in kept], []

    def listen(call, issue):
        calls.append(call.bytes_in)
        return issue()

    with listen_to_calls(listen):
        output = my_mlp(x.clone(), *kept)
    output = local(output.full_tensor() if isinstance(output, DTensor) else output)
    right = F.linear(F.gelu(F.linear(x, up)), down)
    if output.shape != right.shape:
        raise NotYet(f"The output has the shape {tuple(output.shape)} instead of (8, 64).")

    def error(found):
        return round(100 * ((found - right).norm() / right.norm()).item(), 2)

    dist.all_reduce(total := output.detach().clone())
    summand = error(total) < 0.1
    return {
        "KiB of weights kept": sum(p.nbytes for p in kept) / 1024,
        "ranks that have a summand of the output only": world if summand else 0,
        "error of the output, %": None if summand else error(output.detach()),
        "KiB passed to collectives": sum(calls) / 1024,
    }


# %%
# %%turn 1
def my_parts(up, down, place, world):
    return None                                         # your lines here: part_of_up, part_of_down


def my_mlp(x, part_of_up, part_of_down):
    return None                                         # your lines here


# %% tags=["solution"] turn=1
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world, dim=1)[place]

def my_mlp(x, part_of_up, part_of_down):
    output = F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)
    dist.all_reduce(output)
    return output

# %% tags=["right"] turn=1
from torch.distributed import _functional_collectives as functional

def my_parts(up, down, place, world):                   # every fourth activation, in a list
    return [up[place::world], down[:, place::world]]

def my_mlp(x, part_of_up, part_of_down):
    return functional.all_reduce(F.gelu(x @ part_of_up.T) @ part_of_down.T, "sum", dist.group.WORLD)

# %% tags=["right"] turn=1
from torch.distributed.tensor import distribute_tensor

def my_parts(up, down, place, world):                   # DTensors
    mesh = four["tp"]
    return distribute_tensor(up, mesh, [Shard(0)]), distribute_tensor(down, mesh, [Shard(1)])

def my_mlp(x, part_of_up, part_of_down):
    mesh = four["tp"]
    x = DTensor.from_local(x, mesh, [Replicate()])
    up, down = DTensor.from_local(part_of_up, mesh, [Shard(0)]), DTensor.from_local(part_of_down, mesh, [Shard(1)])
    return F.linear(F.gelu(F.linear(x, up)), down)

# %% tags=["right"] turn=1
import numpy as np

def my_parts(up, down, place, world):                   # NumPy's numbers
    rows = np.array_split(np.arange(len(up)), world)[place]
    return up[rows], down[:, rows]

def my_mlp(x, part_of_up, part_of_down):
    pieces = [F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)]
    dist.all_reduce_coalesced(pieces)
    return pieces[0]

# %% tags=["wrong"] turn=1 says="add them up"
def my_parts(up, down, place, world):
    return up.chunk(world)[place], down.chunk(world, dim=1)[place]

def my_mlp(x, part_of_up, part_of_down):
    return F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)

# %% tags=["wrong"] turn=1 says="complete before it"
def my_parts(up, down, place, world):                   # up by columns: sums of hidden activations
    return up.chunk(world, dim=1)[place], down.chunk(world, dim=1)[place]

def my_mlp(x, part_of_up, part_of_down):
    hidden = F.gelu(x.chunk(world, dim=1)[rank] @ part_of_up.T)
    output = hidden.chunk(world, dim=1)[rank] @ part_of_down.T
    dist.all_reduce(output)
    return output

# %% tags=["wrong"] turn=1 says="Send neither weights"
def my_parts(up, down, place, world):                   # FSDP by hand
    return up.chunk(world)[place], down.chunk(world)[place]

def my_mlp(x, part_of_up, part_of_down):
    full = [torch.empty(256, 64), torch.empty(64, 256)]
    for out, part in zip(full, (part_of_up, part_of_down)):
        dist.all_gather_into_tensor(out, part.contiguous())
    return F.linear(F.gelu(F.linear(x, full[0])), full[1])

# %% tags=["wrong"] turn=1 says="a quarter of each"
def my_parts(up, down, place, world):
    return up, down

def my_mlp(x, part_of_up, part_of_down):
    return F.linear(F.gelu(F.linear(x, part_of_up)), part_of_down)

# %% [markdown]
# ## Your turn 2 · Lay the mesh over the hosts
#
# `init_device_mesh` fills the mesh with the ranks in order. That is right where ranks are numbered host by
# host. Some launchers deal them out in turn (Slurm's `--distribution=cyclic`): rank 0 on host 0, rank 1 on
# host 1, rank 2 on host 0 again. Write `my_mesh`: it gets the host of each rank, such as `[0, 1, 0, 1]`, and
# returns the rows of the mesh as lists of ranks. All ranks of a host should compute together. Your mesh for
# `[0, 1, 0, 1]` runs forward and backward on the real ranks with 64 samples, and what leaves these imagined
# hosts is counted. Your meshes for other hosts are only looked at.
#
# <details><summary>Hint</summary>
#
# A row is a group along "tp". Which ranks belong in one row, if what is sent along "tp" should stay within a
# host?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
CASES = ([0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3], [1, 0, 0, 1, 1, 0, 0, 1])


def as_rows(answer, count):
    try:
        rows = [[int(member) for member in row] for row in answer]
    except (TypeError, ValueError):
        raise NotYet("Return rows: lists of ranks, such as [[0, 1], [2, 3]].") from None
    if sorted(member for row in rows for member in row) != list(range(count)) or len({len(row) for row in rows}) != 1:
        raise NotYet(f"Rows of equal length are needed in which each of {count} ranks stands once, found {rows}.")
    return rows


@turn(2, {
    "hosts [0, 1, 0, 1]: rows that cross hosts": exactly(0, "What is sent along “tp” leaves the host, and is waited for."),
    "other hosts: rows that cross hosts": exactly(0, "For other hosts some of your rows have ranks of more than one."),
    "meshes whose rows are not a complete host": exactly(
        0, "A row has other than all ranks of one host. With fewer, FSDP sends more in collectives that cross hosts."
    ),
    "KiB sent in collectives that cross hosts": at_most(390, "More than FSDP's part of half a model leaves the host."),
})
def score_mesh(my_mesh):
    laid = [as_rows(my_mesh(list(hosts)), len(hosts)) for hosts in CASES]
    crossing = [sum(len({hosts[r] for r in row}) > 1 for row in rows) for hosts, rows in zip(CASES, laid)]
    partial = [any(len(row) != hosts.count(hosts[row[0]]) for row in rows) for hosts, rows in zip(CASES, laid)]
    _, trace = run(DeviceMesh("cpu", laid[0], mesh_dim_names=("fsdp", "tp")), samples=64)
    left = sum(e.sent_bytes for e in trace.collectives if len({CASES[0][r] for r in e.ranks}) > 1)
    return {
        "hosts [0, 1, 0, 1]: rows that cross hosts": crossing[0],
        "other hosts: rows that cross hosts": sum(crossing[1:]),
        "meshes whose rows are not a complete host": sum(partial),
        "KiB sent in collectives that cross hosts": round(left / 1024),
    }


# %%
# %%turn 2
def my_mesh(host_of):                                   # such as [0, 1, 0, 1]
    return None                                         # your lines here: rows, such as [[0, 1], [2, 3]]


# %% tags=["solution"] turn=2
def my_mesh(host_of):
    return [[r for r, host in enumerate(host_of) if host == wanted] for wanted in sorted(set(host_of))]

# %% tags=["right"] turn=2
import numpy as np

def my_mesh(host_of):                                   # an array
    return np.argsort(host_of, kind="stable").reshape(len(set(host_of)), -1)

# %% tags=["right"] turn=2
def my_mesh(host_of):                                   # tuples, hosts in the order of their first rank
    rows = {}
    for r, host in enumerate(host_of):
        rows[host] = (*rows.get(host, ()), r)
    return tuple(rows.values())

# %% tags=["right"] turn=2
def my_mesh(host_of):                                   # a tensor
    return torch.stack([torch.nonzero(torch.tensor(host_of) == host).flatten() for host in set(host_of)])

# %% tags=["wrong"] turn=2 says="and is waited for"
def my_mesh(host_of):                                   # the ranks in order
    half = len(host_of) // 2
    return [list(range(half)), list(range(half, len(host_of)))]

# %% tags=["wrong"] turn=2 says="FSDP sends more in collectives that cross hosts"
def my_mesh(host_of):                                   # no tensor parallelism
    return [[r] for r in range(len(host_of))]

# %% tags=["wrong"] turn=2 says="For other hosts some of your rows"
def my_mesh(host_of):                                   # right for hosts that are dealt out to two, and there alone
    return [list(range(0, len(host_of), 2)), list(range(1, len(host_of), 2))]

# %% tags=["wrong"] turn=2 says="stands once"
def my_mesh(host_of):
    return [[0, 2], [1, 3]]

# %% tags=["wrong"] turn=2 says="Return rows"
def my_mesh(host_of):
    return [0, 2, 1, 3]

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | losses look right, but differ from a single-process run from the first step on; no error | the ranks of a row have different samples: a sampler that knows only `rank` and `world` | give it the place along "fsdp" and the size of "fsdp" |
# | `Cannot distribute a DTensor with device mesh … to a different device mesh` | `fully_shard` came first | `parallelize_module` first |
# | `Cannot concatenate overlapping meshes`, or `Invariant encountered: value was None when it should not be` | `fully_shard` got the whole mesh, or none | `mesh=mesh["fsdp"]`, of the mesh whose "tp" the model is on |
# | `All operands in aten.stack.default must have the same mesh`, in `clip_grad_norm_` | some parameters are in the plan and others, such as the norms, are not | put all modules with parameters into the plan: the sequence plan above does |
# | `unflatten: Provided sizes [4, 16] don't multiply up to the size of dim 2 (32)` | the forward pass names the number of heads, and a rank has half of them | `unflatten(-1, (-1, 16))` |
#
# PyTorch also warns that a module "returned a view tensor": the output of `RowwiseParallel` is one. The
# warning concerns code that writes into it in place (`x += y`).

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
def clip(model):
    run(two, model=model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def message(mistake, *args, **options):
    try:
        mistake(*args, **options)
    except Exception as error:
        return str(error)
    return "no error"


assert "Cannot distribute a DTensor with device mesh" in message(cut, two, TENSOR, shard(one, cut(one)))
assert "Cannot concatenate overlapping meshes" in message(fully_shard, cut(two)[0], mesh=two)
assert "value was None when it should not be" in message(fully_shard, cut(two)[0])
assert "All operands in aten.stack.default must have the same mesh" in message(clip, shard(two, cut(two)))
assert message(clip, sequence()) == "no error"
queries = parallelize_module(nn.Linear(64, 64), two["tp"], ColwiseParallel())(torch.ones(2, 3, 64))
assert "don't multiply up to the size of dim 2 (32)" in message(queries.unflatten, -1, (4, 16))
x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1)).chunk(4)[rank]     # by rank: wrong
dist.all_reduce(mixed := (shard(two, cut(two))(x) - x.flip(-1)).square().mean().detach() / world)
assert abs(mixed.item() - run(two)[0]) > 1e-3

# %% [markdown]
# ## The rule
#
# First `parallelize_module` on `mesh["tp"]`, within a host; then `fully_shard` on `mesh["fsdp"]`; the ranks
# of a row get the same samples. Use it where samples or memory run out.
#
# [← lesson 15](15_when_it_hangs.ipynb) · [lesson 17 →](17_fine_tune_three_ways.ipynb)

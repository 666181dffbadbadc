# %% [markdown]
# # 16 · Two dimensions
#
# When do you put tensor parallelism beside FSDP, and what does each of them send? **Add it when one sample
# per rank is too much: the batch has fewer samples than ranks, or one sample does not fit on a rank. Ranks
# of one host then compute each sample together and send activations; FSDP sends weights and gradients
# between such groups.**

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, (axes,) = plots.figure(width=9.2, height=4.6)
arrow = {"arrowstyle": "<->", "color": plots.INK}


def card(x, y, r, samples, *weights):
    axes.text(x, y + 2.12, f"rank {r}, samples {samples}")
    for (left, low, wide, high), areas in zip(((x, y, 0.5, 2), (x + 1, y + 0.75, 2, 0.5)), weights):
        for (right, down, w, h), alpha in zip(((0, 0, 1, 1), *areas), (0.08, 0.3, 1)):
            corner = left + right * wide, low + (1 - down - h) * high
            look = {"color": plots.RANK_COLORS[r], "alpha": alpha, "linewidth": 0}
            axes.add_patch(Rectangle(corner, w * wide, h * high, **look))


for r in range(4):
    row, place = divmod(r, 2)
    card(0, 8.4 - 2.8 * r, r, f"{2 * r + 1} and {2 * r + 2}", *[((0, 0, 1, 1), (0, r / 4, 1, 1 / 4))] * 2)
    up = (0, place / 2, 1, 1 / 2), (0, place / 2 + row / 4, 1, 1 / 4)
    down = (place / 2, 0, 1 / 2, 1), (place / 2, row / 2, 1 / 2, 1 / 2)
    card(6.2 + 5.4 * place, 7 - 5.6 * row, r, f"{4 * row + 1} to {4 * row + 4}", up, down)
for x, low, high in (3.5, 0.6, 9.8), (7.3, 3.9, 6.7), (12.7, 3.9, 6.7):
    axes.annotate("", (x, low), (x, high), arrowprops=arrow)
    axes.text(x + 0.15, 5.2, "fsdp: weights,\ngradients", va="center")
for y in (2.4, 8):
    axes.annotate("", (11.4, y), (9.5, y), arrowprops=arrow)
    axes.text(10.45, y + 0.2, "tp: activations", ha="center")
for x, y, text in (0.6, 8.4, "up"), (1, 8.7, "down"), (6.8, 7, "up"), (7.2, 7.3, "down"):
    axes.text(x, y, text, style="italic")
for x, text in (1.5, "FSDP alone"), (10.4, "FSDP and tensor parallelism, on a mesh of 2 x 2"):
    axes.text(x, 11.2, text, ha="center", fontweight="bold")
axes.set(xlim=(-0.1, 15), ylim=(-0.1, 11.6), xticks=[], yticks=[])
axes.spines[:].set_visible(False)
plots.show(fig, alt="What each of 4 ranks keeps and computes with: FSDP alone, and on a mesh of 2 x 2.")

# %% [markdown]
# Two linear layers, `up` and `down`, on four ranks, and a batch of eight samples. Dark is the piece of a
# weight that a rank keeps; light is what FSDP adds to it while the rank computes. Left, FSDP alone: each
# rank gathers the full weights and computes two samples of its own. Right, the ranks stand in a grid, a
# **mesh**, of two rows. The two ranks of a row compute the same four samples together, each with half of
# every weight (the palest half never comes to the rank): this is **tensor parallelism**, "tp" for short.
# The two ranks of a column gather each other's pieces: this is FSDP.

# %% tags=["card"]
lesson.card(
    16,
    learn="decide when FSDP needs tensor parallelism, build both on one mesh, and count what each sends",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 6](06_sharding_strategies.ipynb)",
    ranks="4 on the CPU, always: a mesh of two by two needs them",
    minutes=(1, 18, 20),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none. It trains
# a model with FSDP alone (tp 1) and with rows of two ranks (tp 2), at three sizes of the batch.
#
# ```python
# import torch
# import torch.distributed as dist
# import torch.nn.functional as F
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
# meshes = {tp: init_device_mesh(device, (world // tp, tp), mesh_dim_names=names) for tp in (1, 2)}
#
#
# class Block(nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.norm = nn.RMSNorm(64)
#         self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
#
#     def forward(self, x):
#         return x + self.down(F.gelu(self.up(self.norm(x))))
#
#
# def train(mesh, samples):                               # samples: of all ranks together
#     groups, group = mesh["fsdp"].size(), mesh.get_local_rank("fsdp")
#     if samples < groups:
#         return "some ranks have no sample"
#     torch.manual_seed(0)                                # the same weights on every rank
#     model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
#     for block in model:
#         if mesh["tp"].size() > 1:                       # first tensor parallelism, then FSDP
#             parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
#         fully_shard(block, mesh=mesh["fsdp"])
#     fully_shard(model, mesh=mesh["fsdp"])
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
#     for step in range(3):                               # the ranks of a row get the same samples
#         x = torch.randn(samples, 16, 64).chunk(groups)[group].to(device)
#         with record_collectives(model) as trace:
#             loss = (model(x) - x.flip(-1)).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     dist.all_reduce(loss := loss.detach() / world)
#     sent = {name: f"{n / 1024:.0f} KiB" for name, n in trace.sent_bytes_by_dimension().items()}
#     return f"loss {loss.item():.3f}, each rank sends {sent}"
#
#
# for samples in (64, 8, 2):
#     for tp, mesh in meshes.items():
#         told = train(mesh, samples)
#         if dist.get_rank() == 0:
#             print(f"{samples} samples, tp {tp}: {told}")
# dist.destroy_process_group()
# ```
# ```text
# 64 samples, tp 1: loss 0.776, each rank sends {'fsdp': '1154 KiB'}
# 64 samples, tp 2: loss 0.776, each rank sends {'fsdp': '386 KiB', 'tp': '1024 KiB'}
# 8 samples, tp 1: loss 0.983, each rank sends {'fsdp': '1154 KiB'}
# 8 samples, tp 2: loss 0.983, each rank sends {'fsdp': '386 KiB', 'tp': '128 KiB'}
# 2 samples, tp 1: some ranks have no sample
# 2 samples, tp 2: loss 1.195, each rank sends {'fsdp': '386 KiB', 'tp': '32 KiB'}
# ```
#
# The losses agree: both ways train the same model. The bytes are calculated from the recorded collectives,
# for rings. What FSDP sends does not depend on the batch, and with rows of two it is a third. What tensor
# parallelism sends is in proportion to the batch: at 64 samples the two together send more than FSDP alone,
# at 8 less than half. With 2 samples FSDP alone leaves two ranks without work, and the mesh uses all four.
# (A `DistributedSampler` gives a row its samples by `num_replicas=mesh["fsdp"].size()` and
# `rank=mesh.get_local_rank("fsdp")`.)
#
# ## How two ranks share a sample
# ```text
# rank 0: x → upper rows of up → h[..., :128] → GELU → left columns of down  → y0 ┐
#                                                                                 ├ all-reduce → y0 + y1, on both
# rank 1: x → lower rows of up → h[..., 128:] → GELU → right columns of down → y1 ┘
# ```
#
# Each *row* of `up` makes one hidden activation. A rank with half of the rows computes half of the hidden
# activations `h`, each of them complete, so it can apply GELU. Each *column* of `down` multiplies one
# hidden activation. With the columns for its own half a rank computes a **partial sum** of the output, and
# an all-reduce adds the two. Backward does the same at the other end: each rank has a partial sum of the
# gradient of `x`, and an all-reduce adds them.
#
# In the script the dictionary passed to `parallelize_module` is the **plan**: names of layers, and how to
# cut each. `ColwiseParallel` cuts a layer by its outputs, `RowwiseParallel` by its inputs. (The names are
# those of papers that write `x @ A`. `nn.Linear` stores the transpose, so `ColwiseParallel` cuts the *rows*
# of `weight`.) Attention is cut in the same way: `q`, `k` and `v` like `up`, which gives each rank some of
# the heads, and the output projection like `down`.
#
# ## Where each weight lies
#
# `init_device_mesh` puts ranks 0 and 1 into the first row of the mesh, 2 and 3 into the second, and gives
# each **dimension** a name: `mesh["tp"]` is a rank's row, `mesh["fsdp"]` its column. `parallelize_module`
# divides a weight among the ranks of a row, and `fully_shard` then divides each part among the ranks of a
# column. The result is a DTensor, a tensor that knows where its pieces are. Its **placements** say how it
# is cut, one for each dimension: `S(0)` is a cut between rows of the weight, `S(1)` between columns. Both
# calls also take a model on the meta device ([lesson 12](12_a_model_too_big_for_one_rank.ipynb)), so no
# rank has to hold the full model first.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(4, device="cpu", preload=["torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama"])

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module,
)

from fsdp_utils import record_collectives
from fsdp_utils.lessons.tables import Table

rank, world = dist.get_rank(), dist.get_world_size()
one, two, four = [init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("fsdp", "tp")) for tp in (1, 2, 4)]
TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def cut(mesh, plan=TENSOR, blocks=4):                       # tensor parallelism
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    for block in model if mesh["tp"].size() > 1 else []:
        parallelize_module(block, mesh["tp"], plan)
    return model


def shard(mesh, model):                                     # then FSDP
    for part in [*model, model]:
        fully_shard(part, mesh=mesh["fsdp"])
    return model


# %% tags=["placements"]
# %%ranks
def placed(weight):
    if not isinstance(weight, DTensor):
        return f"not cut: {tuple(weight.shape)}"
    return f"{', '.join(map(str, weight.placements))}: {tuple(weight.to_local().shape)}"


alone, first, both = shard(one, cut(one))[0], cut(two)[0], shard(two, cut(two))[0]
names = ["norm.weight", "up.weight", "down.weight"]
Table(
    ["weight", "FSDP alone", "2 x 2: cut along tp", "2 x 2: then sharded along fsdp"],
    [[name, *[placed(block.get_parameter(name)) for block in (alone, first, both)]] for name in names],
    note="The placements, and the shape of what a rank holds.",
)

# %%
# %%ranks
full, row, place = cut(one)[0], *two.get_coordinate()       # rank 2 is in row 1, at place 0
assert torch.equal(both.up.weight.to_local(), full.up.weight.chunk(2)[place].chunk(2)[row])
assert torch.equal(both.down.weight.to_local(), full.down.weight.chunk(2, dim=1)[place].chunk(2)[row])

# %% [markdown]
# The placements stand in the order of the mesh, "fsdp" before "tp". On the mesh, too, a rank keeps a
# quarter of `up` and of `down`: of weights, gradients and optimizer state it holds no less than under FSDP
# alone. The plan doesn't name the norm, so both ranks of a row compute it, and only FSDP shards it. `_S`,
# for `_StridedShard`, says that "tp" cut the rows before FSDP did, as the assertions spell out: from above,
# the quarters of `up` are those of ranks 0, 2, 1 and 3. `full_tensor()` and checkpoints know this. What
# `save_distributed` ([lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)) writes on this mesh
# loads under FSDP alone.
#
# ## The mesh at work
#
# These are the collectives of one block in forward and backward, with 8 samples, as rank 0 issues them:

# %% tags=["mesh"]
# %%ranks
def run(mesh, model, samples=8):
    groups, group = mesh["fsdp"].size(), mesh.get_local_rank("fsdp")
    x = torch.randn(samples, 16, 64, generator=torch.Generator().manual_seed(1)).chunk(groups)[group]
    with record_collectives(model) as trace:
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
    return loss.detach(), trace


loss, trace = run(two, shard(two, cut(two, blocks=1)))
events = [(e.phase, e.kind, e.dimension, str(e.ranks), e.bytes / 1024) for e in trace.collectives]

# %%
Table(["phase", "collective", "along", "ranks", "KiB gathered or reduced"], ranks.get("events")[0])

# %% [markdown]
# Along "fsdp", ranks 0 and 2 gather 64.25 KiB: half of `up`, half of `down`, and the norm. They gather them
# again for backward, and reduce the gradients. In forward and backward no rank has a full matrix. Along
# "tp", ranks 0 and 1 add the output in forward and the gradient of the input in backward, each 4 samples x
# 16 tokens x 64 numbers.
#
# The two dimensions differ in **who waits**. While a GPU computes a block, FSDP gathers the weights of the
# next ([lesson 4](04_backward_prefetch.ipynb)), and only the optimizer needs the reduced gradients. An
# all-reduce along "tp" stands between one layer and the next: in eager mode nothing hides its bytes. So
# "tp" belongs on the fastest links, within a host. `init_device_mesh` puts it there if "tp" is the last
# dimension and divides the ranks of a host, and ranks are numbered host by host, as torchrun numbers them.
#
# ## What each dimension sends
#
# The script's model again, with more batches and on three meshes. (4, 1) has four ranks along "fsdp", one
# along "tp":

# %% tags=["dimensions"]
# %%ranks
sizes = (2, 4, 8, 16, 32, 64, 128)
meshes = {"(4, 1)": one, "(2, 2)": two, "(1, 4)": four}
sent = {
    name: {n: run(mesh, shard(mesh, cut(mesh)), n)[1].sent_bytes_by_dimension() for n in sizes if n >= mesh.shape[0]}
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
        assert of.get("fsdp", 0) == (rows - 1) / rows * 3 * 4 * 4 * (8 * 64**2 / tp + 64)
        assert of.get("tp", 0) == (tp - 1) / tp * 2 * 2 * 4 * (n * 16 // rows) * 64 * 4
least = [min((name for name in sent if n in sent[name]), key=lambda name: sum(sent[name][n].values())) for n in sizes]
assert least == ["(1, 4)"] * 3 + ["(2, 2)"] * 2 + ["(4, 1)"] * 2
gain = [(2 * hosts - 1) / 2 / (hosts - 1) for hosts in (2, 3, 4, 8, 32)]     # on the link of a host with two ranks
assert [round(g, 2) for g in gain] == [1.5, 1.25, 1.17, 1.07, 1.02]

# %% [markdown]
# - **Along "fsdp" go parameters and gradients**: two gathers and one reduce-scatter of each block. Of what
#   n ranks gather or reduce, each sends (n - 1) / n: among four ranks 3/4 of the weights, among two 1/2 of
#   half the weights, a third.
# - **Along "tp" go tokens**: for each MLP two all-reduces of tokens x width numbers. How wide the MLP is
#   inside does not matter.
#
# So fewer samples favour "tp": up to 8 the mesh (1, 4) sends least, at 16 and 32 (2, 2), from 64 on FSDP
# alone. In a wider model the lines cross at more tokens, because weights grow with the square of the width
# and activations with the width.
#
# The link *between hosts* gains less than a rank does, because the ranks of a host share it. Take two hosts
# of two ranks, and collectives that travel in rings: the two columns of the mesh send 2 x 385.5 = 771 KiB
# across, FSDP's one ring 1,154. With more hosts the two come closer. What relieves that link is
# HYBRID_SHARD ([lesson 6](06_sharding_strategies.ipynb)).
#
# ## What one sample needs
#
# Under FSDP alone a rank computes at least one sample, with the full weights of at least one unit of
# `fully_shard`, here a block. Tensor parallelism goes below that. It divides the gathered weights, and the
# activations between `up` and `down`. The other activations are the same on all ranks of a row. **Sequence
# parallelism** divides those, too: before `up` and after `down` each rank has some of the tokens, and "tp"
# has to divide their number. An all-gather before `up` collects them; a reduce-scatter after `down` adds
# the partial sums and leaves each rank the result for its tokens. In the plan `Shard(1)` is dimension 1 of
# `x`, the tokens.

# %% tags=["sequence"]
# %%ranks
import warnings

warnings.filterwarnings("ignore", "FSDP2-wrapped module")   # about writing in place into the model's output
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
SPLIT = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
JOIN = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())


def sequence(mesh):                                         # divide the tokens before block 0, join them after block 3
    return parallelize_module(cut(mesh, SEQUENCE), mesh["tp"], {"0": SPLIT, "3": JOIN})


def local(tensor):
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if hasattr(tensor, "wait") else tensor     # a collective may still be running


def kept_kib(model):                                        # by autograd, from forward for backward, of one sample
    kept, weights = {}, {local(p).untyped_storage().data_ptr() for p in model.parameters()}

    def look(tensor):
        storage = local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage                  # FSDP empties those of gathered weights
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        model(torch.ones(1, 16, 64))
    return round(sum(storage.nbytes() for place, storage in kept.items() if place not in weights) / 1024)


ways = [
    ("(4, 1), FSDP alone", one, cut), ("(2, 2), tensor", two, cut), ("(2, 2), tensor and sequence", two, sequence),
    ("(1, 4), tensor", four, cut), ("(1, 4), tensor and sequence", four, sequence),
]
table, along = [], {}
for way, mesh, make in ways:
    block_kib = sum(local(p).nbytes for p in make(mesh)[0].parameters()) / 1024
    table.append([way, block_kib, kept_kib(shard(mesh, make(mesh)))])
    loss, trace = run(mesh, shard(mesh, make(mesh)))
    along[way] = loss.item(), trace.sent_bytes_by_dimension().get("tp", 0) / 1024
Table(["mesh and plan", "KiB of a block's weights while it computes", "KiB of activations of one sample"], table)

# %% jupyter={"source_hidden": true} tags=["check"]
assert [row[1:] for row in ranks.get("table")[0]] == [[128.25, 172], [64.25, 108], [64.25, 94], [32.25, 76], [32.25, 55]]
losses = [sum(of_rank[way][0] for of_rank in ranks.get("along")) / 4 for way in ranks.get("along")[0]]
assert max(losses) - min(losses) < 1e-4                     # the same model, however it is divided
along = {way: kib for way, (_, kib) in ranks.get("along")[0].items()}
assert [along["(2, 2), tensor"], along["(2, 2), tensor and sequence"]] == [128, 128 + 8 + 1]

# %% [markdown]
# With sequence parallelism on four ranks each rank keeps 55 KiB of a sample's activations instead of 172.
# It is more than a quarter because autograd keeps the tokens gathered before each `up`. The blocks send as
# many activations as before: a ring's all-reduce is a reduce-scatter and an all-gather, here at two
# different points. An all-reduce of each norm's gradient, 64 numbers, comes on top. (Embedding and head can
# go into the plan as well. PyTorch's `loss_parallel` then computes the loss from logits that stay cut by
# vocabulary.)
#
# **For the same batch, this saves no activations.** A row of two ranks has the samples of both: on (2, 2) a
# rank holds 2 x 94 = 188 KiB where it holds 172 under FSDP alone. What tensor parallelism makes smaller is
# the *smallest* batch.
#
# ## Which mesh?
#
# | your job | what to do |
# |:--|:--|
# | the batch has a sample for each rank, and it fits | FSDP alone |
# | the same, but steps wait for the link between hosts | HYBRID_SHARD, if each host can hold all of the model's state ([lesson 6](06_sharding_strategies.ipynb)) |
# | one sample does not fit | activation checkpointing ([lesson 2](02_activation_checkpointing.ipynb)); then "tp" of 2, 4 or 8 within a host, with sequence parallelism |
# | the batch has fewer samples than ranks | "tp" of at least ranks / samples, within a host |
# | a host has too few ranks for that | context parallelism ([lesson 21](21_long_sequences.ipynb)) or pipeline parallelism |
#
# For scale, calculated for bf16, full activation checkpointing (a block keeps only its input) and one
# sample of 8,192 tokens: Llama-3-70B gathers blocks of 1.6 GiB and keeps 80 inputs, 10 GiB. On 64 GPUs of
# 80 GB the shards take another 16 GiB (16 bytes per parameter), and there is room for the logits.
# Llama-3.1-405B gathers blocks of 5.9 GiB and keeps 126 inputs, 31.5 GiB; gradients, logits and the shards
# come on top. And its batches had 2,048 such samples on 16,384 GPUs: Meta used a "tp" of 8 and 16 pipeline
# stages ([Llama 3, table 4](https://arxiv.org/abs/2407.21783)).
#
# PyTorch's [tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) gives one more
# reason: beyond 128 or 256 GPUs latency dominates FSDP's rings, and a "tp" of 8 makes them eight times
# shorter. Nothing in this lesson was timed on GPUs. Whether a step becomes faster you have to measure on
# yours.
#
# ## Your turn 1 · An MLP in four parts
#
# Do by hand what the plan does, over all four ranks. `my_parts` gets the full weights (`up` is f32[256, 64],
# `down` f32[64, 256]) and returns a pair: what the rank at this place (0 to 3) keeps of each. `my_mlp`
# computes `F.linear(F.gelu(F.linear(x, up)), down)` from these parts. Every rank has the same `x`, f32[8,
# 64], and has to return the full output. The bytes kept and the bytes passed to collectives are counted.
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
    "ranks that return a partial sum only": exactly(0, "Each rank returns its partial sum of the output: add them up."),
    "error of the output, %": at_most(
        0.1, "Not the full MLP's output. GELU of a sum is not the sum of GELUs: each hidden activation has to be "
        "complete before it, and `down` needs the columns of the same activations."
    ),
    "KiB passed to collectives": at_most(
        2, "The output has 2 KiB: sum it once. Send neither weights nor hidden activations."
    ),
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
    partial = error(total) < 0.1
    return {
        "KiB of weights kept": sum(p.nbytes for p in kept) / 1024,
        "ranks that return a partial sum only": world if partial else 0,
        "error of the output, %": None if partial else error(output.detach()),
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
# ## Your turn 2 · A plan for Llama
#
# Write the plan for a block of transformers' Llama: names within the block, and a style for each. Its
# linear layers are `q_proj`, `k_proj`, `v_proj` and `o_proj` of `self_attn`, and `gate_proj`, `up_proj` and
# `down_proj` of `mlp`, which computes `down(silu(gate(x)) * up(x))`. All seven should be cut. A rank should
# send no more than two all-reduces in forward and two in backward, 32 KiB each way.
#
# The plan that comes to mind first sends 80 KiB in backward. A `ColwiseParallel` layer that gets a plain
# tensor adds up the gradient of its input in an all-reduce of its own: that makes three for `q`, `k` and
# `v`, and two for `gate` and `up`. The style `PrepareModuleInput` turns the input of a *module* into a
# DTensor, once for all layers that read it. Each rank then adds their gradients, and one all-reduce
# completes the sum.
#
# <details><summary>Hint</summary>
#
# A style for `mlp` stands in the plan beside those for its layers. Its `input_layouts` and
# `desired_input_layouts` are both `Replicate()`: every rank has all of `x` and needs it. The block calls
# `mlp(x)` but `self_attn(hidden_states=x, ...)`. For keyword arguments there are `input_kwarg_layouts` and
# `desired_input_kwarg_layouts`, which are dictionaries.
#
# </details>

# %%
# %%ranks
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama_step(mesh, plan):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SIZES))
    block = model.model.layers[0]
    parallelize_module(block, mesh["tp"], plan)
    weights = [part.weight for part in block.modules() if isinstance(part, nn.Linear)]
    uncut = [w for w in weights if not isinstance(w, DTensor) or not w.placements[0].is_shard()]
    for part in (block, model):
        fully_shard(part, mesh=mesh["fsdp"])
    ids = torch.randint(64, (8, 16)).chunk(mesh["fsdp"].size())[mesh.get_local_rank("fsdp")]
    with record_collectives(model) as trace:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    dist.all_reduce(loss := loss.detach())
    sums = [e for e in trace.collectives if e.dimension == "tp"]
    kib = [sum(e.sent_bytes for e in sums if e.phase == phase) / 1024 for phase in ("forward", "backward")]
    return len(uncut), loss.item(), *kib


# %% jupyter={"source_hidden": true}
# %%ranks
right_loss = llama_step(one, {})[1]


@turn(2, {
    "linear layers that are not cut": exactly(0, "A layer that is not cut is computed in full on every rank of a row. Plan names are those within the block, such as `mlp.up_proj`."),
    "error of the loss, %": at_most(0.01, "The loss is not that of FSDP alone."),
    "KiB sent along tp in forward": at_most(32, "Forward gathers the output of a layer. Leave it in parts: the next layer can work with them if it is cut by its inputs."),
    "KiB sent along tp in backward": at_most(32, "Gradients of one input are summed several times: make the input of `self_attn`, and of `mlp`, one DTensor for all layers that read it."),
})
def score_plan(my_plan):
    plan = my_plan()
    if not isinstance(plan, dict):
        raise NotYet("Return a dictionary: names of layers, and a style for each.")
    try:
        uncut, loss, forward, backward = llama_step(two, plan)
    except ValueError as error:
        raise NotYet(
            f"The block does not run: {error} The block passes `hidden_states` to `self_attn` by keyword: name its "
            "layout in `input_kwarg_layouts` and `desired_input_kwarg_layouts`."
        ) from None
    except RuntimeError as error:
        raise NotYet(
            f"The block does not run: {str(error).splitlines()[0]}. A layer that gets parts of its input has to be cut "
            "by its inputs, one that gets all of it by its outputs."
        ) from None
    return {
        "linear layers that are not cut": uncut,
        "error of the loss, %": round(100 * abs(loss / right_loss - 1), 3),
        "KiB sent along tp in forward": None if uncut else forward,
        "KiB sent along tp in backward": None if uncut or forward > 32 else backward,
    }


# %%
# %%turn 2
def my_plan():
    return None                                         # your lines here: {"mlp.up_proj": ...}


# %% tags=["solution"] turn=2
def my_plan():
    everywhere = Replicate()
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    return {
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
        "mlp": PrepareModuleInput(input_layouts=everywhere, desired_input_layouts=everywhere),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": everywhere}, desired_input_kwarg_layouts={"hidden_states": everywhere}
        ),
    }

# %% tags=["right"] turn=2
def my_plan():                                          # patterns; the norms give out DTensors
    norm = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
    )
    return {
        "*_layernorm": norm,
        "self_attn.[qkv]_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(),
    }

# %% tags=["right"] turn=2
from torch.distributed.tensor.parallel import ParallelStyle

class Once(ParallelStyle):                              # a style of one's own
    def _apply(self, module, mesh):
        def hook(module, args, kwargs):
            args = [DTensor.from_local(x, mesh, [Replicate()]) for x in args]
            if "hidden_states" in kwargs:
                kwargs["hidden_states"] = DTensor.from_local(kwargs["hidden_states"], mesh, [Replicate()])
            return tuple(args), kwargs

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

def my_plan():
    names = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    cuts = {
        f"{module}.{name}_proj": RowwiseParallel() if name in ("o", "down") else ColwiseParallel()
        for module, layers in names.items() for name in layers
    }
    return cuts | {module: Once() for module in names}

# %% tags=["right"] turn=2
from torch.distributed.tensor.parallel import PrepareModuleInputOutput

def my_plan():                                          # all layouts are named
    all_of_it = (Replicate(),)
    inputs, given = {"input_layouts": all_of_it, "desired_input_layouts": all_of_it}, {"hidden_states": Replicate()}
    plan = {f"{name}_proj": ColwiseParallel() for name in ("self_attn.[qkv]", "mlp.gate", "mlp.up")}
    plan |= {f"{name}_proj": RowwiseParallel(output_layouts=Replicate()) for name in ("self_attn.o", "mlp.down")}
    plan["mlp"] = PrepareModuleInputOutput(**inputs, output_layouts=all_of_it, desired_output_layouts=all_of_it)
    return plan | {"self_attn": PrepareModuleInput(input_kwarg_layouts=given, desired_input_kwarg_layouts=given)}

# %% tags=["wrong"] turn=2 says="summed several times"
def my_plan():                                          # the plan that comes to mind
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    return plan | {
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()
    }

# %% tags=["wrong"] turn=2 says="not cut"
def my_plan():                                          # the MLP alone
    return {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}

# %% tags=["wrong"] turn=2 says="gathers the output"
def my_plan():                                          # every layer by its outputs
    names = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    return {name: ColwiseParallel(output_layouts=Replicate()) for name in names}

# %% tags=["wrong"] turn=2 says="cut by its inputs"
def my_plan():                                          # down is forgotten
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    return plan | {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | no error, but the loss differs between the ranks of a row | they have different samples, or different seeds for a dropout outside the cut layers | sampler and seed by `mesh.get_local_rank("fsdp")`, and `mesh["fsdp"].size()` in place of the world size; a dropout between `up` and `down` then has the same mask on both halves |
# | `Parallelize plan key '…' could not be resolved`, a warning | the plan names no such layer, and that layer is not cut | names as in `named_modules()` of the module that you pass |
# | `Cannot distribute a DTensor with device mesh … to a different device mesh` | `fully_shard` came first | `parallelize_module` first |
# | `Cannot concatenate overlapping meshes`, or `Invariant encountered: value was None when it should not be` | `fully_shard` got the whole mesh, or none | `mesh=mesh["fsdp"]` |
# | `All operands in aten.stack.default must have the same mesh`, in `clip_grad_norm_` | some parameters are in the plan and others, such as the norms, are not | [clip by mesh](answers.md#operands-on-two-meshes), or name every layer with parameters in the plan: norms, embedding and head |
# | `shape '[2, 3, 4, 16]' is invalid for input of size 192` | your attention names the number of all heads, and a rank has some of them | `view(2, 3, -1, 16)`; "tp" has to divide the heads of `q` and of `k` and `v` |
# | steps are slow | ranks are not numbered host by host (Slurm's `--distribution=cyclic`), so rows of the mesh cross hosts | `DeviceMesh("cuda", [[0, 2], [1, 3]], mesh_dim_names=("fsdp", "tp"))`: each row is one host |

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
import logging
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def message(mistake, *args, **options):
    try:
        mistake(*args, **options)
    except Exception as error:
        return str(error)
    return "no error"


def clip(make):
    model = shard(two, make(two))
    run(two, model)
    return message(nn.utils.clip_grad_norm_, model.parameters(), 1.0)


def losses_of_a_row(x):
    dist.all_gather_object(losses := [0, 0], shard(two, cut(two))(x).square().mean().item(), group=two["tp"].get_group())
    return losses


assert "Cannot distribute a DTensor with device mesh" in message(parallelize_module, shard(one, cut(one))[0], two["tp"], TENSOR)
assert "Cannot concatenate overlapping meshes" in message(fully_shard, cut(two)[0], mesh=two)
assert "value was None when it should not be" in message(fully_shard, cut(two)[0])
assert "All operands in aten.stack.default must have the same mesh" in clip(cut)
assert clip(sequence) == "no error"
queries = parallelize_module(nn.Linear(64, 64), two["tp"], ColwiseParallel())(torch.ones(2, 3, 64))
assert message(queries.view, 2, 3, 4, 16) == "shape '[2, 3, 4, 16]' is invalid for input of size 192"
x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1))
spread = [max(losses) - min(losses) for losses in map(losses_of_a_row, (x.chunk(2)[row], x.chunk(4)[rank]))]
assert spread[0] < 1e-6 < 1e-4 < spread[1]                  # the second with the samples of FSDP alone: wrong
plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
assert llama_step(two, plan)[2:] == (32, 80)                # the plan that comes to mind first

# %% [markdown]
# ## The rule
#
# FSDP alone, while the batch has a sample for each rank and it fits. Else `parallelize_module` on
# `mesh["tp"]`, within a host, then `fully_shard` on `mesh["fsdp"]`, with the same samples for the ranks of
# a row. For many models of transformers `config.base_model_tp_plan` names the layers to cut, and by which
# side.
#
# [← lesson 15](15_when_it_hangs.ipynb) · [lesson 17 →](17_fine_tune_three_ways.ipynb)

# %% [markdown]
# # 20 · Experts
#
# In a mixture of experts (MoE), a block has many feed-forward networks, the experts, and each token uses a
# few of them. Who gathers an expert, and where is it computed? **Under FSDP every rank gathers all experts of
# a block, also those that its tokens don't use: where a block's experts fit into memory about four times (five,
# if a loop computes them), keep them in one parameter and make the block the unit. Where they don't, or gathering
# takes too long, give each rank some of the experts and send it their tokens: expert parallelism.**

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

from fsdp_utils.lessons import lesson, plots

fig, panels = plots.figure(2, width=9.2, height=2.7)
arrow = {"arrowstyle": "->", "linewidth": 1.6}
TITLES = ("FSDP: weights travel, tokens stay", "expert parallelism: tokens travel, experts stay")
for side, (axes, title) in enumerate(zip(panels, TITLES)):
    for r in range(2):
        low = 1.5 - 1.5 * r
        axes.text(-0.1, low + 0.5, f"rank {r}", ha="right", va="center")
        for place, expert in enumerate((0, 1, 0, 1)):
            axes.add_patch(Rectangle((0.15 + 0.3 * place, low + 0.35), 0.22, 0.3, color=plots.RANK_COLORS[expert]))
        for expert in range(2) if side == 0 else [r]:
            left, color = 2.7 + 1.35 * expert, plots.RANK_COLORS[expert]
            axes.add_patch(Rectangle((left, low), 1.2, 1, facecolor=color, alpha=1 if expert == r else 0.35))
            look = {"color": "white" if expert == r else plots.INK, "fontweight": "bold", "fontsize": 8}
            axes.text(left + 0.6, low + 0.5, f"expert {expert}", ha="center", va="center", **look)
    if side == 0:
        axes.annotate("", (3.3, 1.02), (3.3, 1.48), arrowprops=arrow)
        axes.annotate("", (4.65, 1.48), (4.65, 1.02), arrowprops=arrow)
    else:
        axes.annotate("", (4.0, 0.6), (1.4, 1.85), arrowprops={**arrow, "color": plots.RANK_COLORS[1]})
        axes.annotate("", (2.65, 1.8), (1.4, 0.65), arrowprops={**arrow, "color": plots.RANK_COLORS[0]})
    axes.set(title=title, xlim=(-0.9, 5.4), ylim=(-0.1, 2.6), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
plots.show(fig, alt="FSDP gathers both experts on both ranks; expert parallelism sends tokens to their expert.")

# %% [markdown]
# A drawing. Squares are tokens, in the colour of the expert that the **router**, a small linear layer,
# chooses for them. Each rank stores some of the experts (dark); under FSDP it gathers the others for the time in
# which it computes.

# %% tags=["card"]
lesson.card(
    20,
    learn="train a mixture of experts under FSDP without mixing up experts, and divide experts among ranks",
    needs="lessons [1](01_transformer_wrapper.ipynb), [15](15_when_it_hangs.ipynb); then [16](16_two_dimensions.ipynb)",
    ranks="4 on the CPU (2 or 3 work: set `FSDP_RANKS`)",
    minutes=(1, 40, 20),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. Each rank reads samples of one domain,
# so that all tokens of rank 0 choose expert 0, and so on. Three ways to shard are compared with one process
# that has all samples.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# rank, world = dist.get_rank(), dist.get_world_size()
# mesh = init_device_mesh(device, (world,))                    # without it a Mac would take its GPU
#
#
# class MoE(nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.router = nn.Linear(48, world, bias=False)       # as many experts as ranks, here alone
#         self.experts = nn.ModuleList([nn.Linear(48, 48) for _ in range(world)])
#         nn.init.eye_(self.router.weight)                     # a large feature e chooses expert e
#
#     def forward(self, x):                                    # f32[tokens, 48]
#         weight, chosen = self.router(x).softmax(-1).max(-1)  # one expert for each token
#         out = torch.zeros_like(x)
#         for e in chosen.unique().tolist():                   # experts without tokens are left out
#             out[chosen == e] = self.experts[e](x[chosen == e])
#         return x + weight[:, None] * out
#
#
# for name, each, unused in [("each expert a unit", 1, 0), ("the block a unit", 0, 0), ("zeros for unused", 0, 1)]:
#     torch.manual_seed(0)
#     model, alone, x = MoE(), MoE(), torch.randn(world, 16, 48)
#     x[range(world), :, range(world)] += 9                    # the domain of each rank
#     alone.load_state_dict(model.state_dict())
#     right = alone(x.flatten(0, 1))                           # one process, all samples
#     right.square().mean().backward()
#     for part in [*model.experts, model] if each else [model]:
#         fully_shard(part, mesh=mesh)
#     model.set_reduce_scatter_unused_params(bool(unused))
#     out = model(x[rank])
#     out.square().mean().backward()
#     gradient = model.experts[rank].weight.grad.to_local()    # this rank's rows of its own expert
#     pairs = (out, right.chunk(world)[rank]), (gradient, alone.experts[rank].weight.grad.chunk(world)[rank])
#     errors = [((found - wanted).norm() / wanted.norm()).item() for found, wanted in pairs]
#     if rank == 0:
#         print(f"{name:19} output off by {errors[0]:.2f}, gradient of expert 0 off by {errors[1]:.2f}")
# dist.destroy_process_group()
# ```
# ```text
# each expert a unit  output off by 0.62, gradient of expert 0 off by 2.07
# the block a unit    output off by 0.00, gradient of expert 0 off by 1.98
# zeros for unused    output off by 0.00, gradient of expert 0 off by 0.00
# ```
#
# No line raises an error. "Off by 1.00" means: as far away as the right value is large. The first way computes
# with wrong weights, the second with right weights and trains with wrong gradients. Only the third equals one
# process.
#
# ## Why the weights were mixed
#
# A process group pairs its ranks' collectives by order ([lesson 15](15_when_it_hangs.ipynb)). If each expert
# is a unit, rank 0 gathers expert 0 while rank 1 gathers expert 1. Both issue one all-gather of the same
# size, so the two calls are paired, and each rank sends its rows of *its* expert. The next cell fills expert
# `e` with the number `e` and shows from which expert each row comes that a rank computes with.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(device="cpu", preload=["torch.distributed.fsdp", "torch.distributed.checkpoint"])

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single      # private; differentiable in torch 2.13
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
everyone = init_device_mesh("cpu", (world,))


class Apart(nn.Module):                                     # a module for each expert
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(48, 48, bias=False) for _ in range(world)])

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            out[chosen == e] = self.experts[e](x[chosen == e])
        return out

# %% tags=["glued"]
# %%ranks
token, mine, seen = torch.full((1, 48), 1 / 48), torch.tensor([rank]), {}   # a mean over each row
for name in ("each expert a unit", "the block a unit"):
    model = Apart()
    for e, expert in enumerate(model.experts):
        nn.init.constant_(expert.weight, e)
    for part in [*model.experts, model] if name.startswith("each") else [model]:
        fully_shard(part, mesh=everyone)
    seen[name] = model(token, mine)[0].round().int().tolist()

# %% jupyter={"source_hidden": true}
seen = ranks.get("seen")
fig, panels = plots.figure(2, width=8.4, height=2.4)
for axes, way in zip(panels, seen[0]):
    for r, found in enumerate(seen):
        for row, expert in enumerate(found[way]):
            axes.barh(r, 1.02, left=row, height=0.72, color=plots.RANK_COLORS[expert])
    axes.set(title=way, xlim=(0, 48), ylim=(len(seen) - 0.4, -0.6), xlabel="rows of the weight that it computes with")
    axes.set_yticks(range(len(seen)), [f"rank {r} calls expert {r}" for r in range(len(seen))] if axes is panels[0] else [])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
chunks = [r for r in range(len(seen)) for _ in range(48 // len(seen))]
assert all(found["each expert a unit"] == chunks for found in seen)
assert all(set(found["the block a unit"]) == {r} for r, found in enumerate(seen))
plots.show(fig, alt="With a unit for each expert, each rank computes with rows of all experts.")

# %% [markdown]
# Rows 0 to 11 are from expert 0, the next from expert 1, and so on: every rank computes with the same
# mixture, and none with its expert. In backward the same happens to the gradients. `check_in_step` ([lesson
# 15](15_when_it_hangs.ipynb)) reports the first such call with the unit of each rank: `rank 0: all_gather …,
# for experts.0`.
#
# With the block as the unit, all ranks gather all experts, and the output is right. The gradients still go
# wrong: FSDP2 puts into its reduce-scatter the parameters of the unit that **got a gradient**. On rank 0 that
# is expert 0 alone, on rank 1 expert 1, and buffers of the same size are added up. `check_in_step` does not
# see this one: both ranks reduce the same unit, with the same number of bytes. Where the ranks use different
# *numbers* of experts, the sizes differ as well: the training hangs, or gloo ends it with an error. FSDP1, whose
# unit is one flat parameter, had only the first trap: so a model that trained rightly under FSDP1 can go wrong
# under FSDP2.
#
# ## Three ways to give every expert a gradient
#
# - **`model.set_reduce_scatter_unused_params(True)`** after `fully_shard` (FSDP2, as of torch 2.13): a
#   parameter without a gradient joins with zeros. Units of single experts stay wrong: their all-gathers are
#   still mixed.
# - **One parameter for all experts**, `f32[experts, in, out]`: each rank has a gradient for all of it. `unbind`
#   it once before the loop: each index, as in `weight[e]`, would make a gradient of the full size. At the peak
#   of backward a loop holds two such gradients, `F.grouped_mm` (below) one. Transformers 5 keeps the experts of
#   Mixtral, Qwen3-MoE and others in two such parameters, so `fsdp_utils.shard(model)` is right as it is. In
#   version 4 each expert was a module: set the switch.
# - A third way, which also mends units of single experts, is turn 1.
#
# Of the first two, prefer one parameter: nothing has to be remembered. In both, an expert that no rank uses has
# a gradient of zero, not None: AdamW still decays it, and moves it by its momentum.

# %%
# %%ranks
class Together(nn.Module):                                  # one parameter for all experts
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(world, 48, 48) / 7)

    def forward(self, x, chosen):
        out, experts = torch.zeros_like(x), self.weight.unbind()
        for e in chosen.unique().tolist():
            out[chosen == e] = x[chosen == e] @ experts[e]
        return out

# %% tags=["ways"] jupyter={"source_hidden": true}
# %%ranks
import logging

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # silences DTensor's advice


def errors(out, right, model, alone):
    largest = max(p.grad.norm() for p in alone.parameters() if p.grad is not None)
    worst = [(out - right).norm() / right.norm()]
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        found, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (mine, theirs))
        wanted = distribute_tensor(wanted, everyone, [Shard(0)])
        worst.append((found.to_local() - wanted.to_local()).norm() / largest)
    worst = torch.stack([worst[0], max(worst[1:])]).detach()
    dist.all_reduce(worst, dist.ReduceOp.MAX)               # the same on all ranks
    return worst.tolist()


def compare(make, yours=None, each=False, unused=False, choose=lambda r: torch.full((16,), r)):
    """The largest errors of output and gradients; rank r's tokens choose experts choose(r)."""
    torch.manual_seed(0)
    alone, model, x = make(), (yours or make)(), torch.randn(world, 16, 48)
    model.load_state_dict(alone.state_dict())
    right = alone(x.flatten(0, 1), torch.cat([choose(r) for r in range(world)]))
    right.square().mean().backward()
    for part in [*model.experts, model] if each else [model]:
        fully_shard(part, mesh=everyone, reshard_after_forward=False)       # one gather is enough here
    model.set_reduce_scatter_unused_params(unused)
    out = model(x[rank], choose(rank))
    out.square().mean().backward()
    return errors(out, right.chunk(world)[rank], model, alone)


glued, half = compare(Apart, each=True), compare(Apart)     # each expert a unit, the block a unit
assert min(glued[0], glued[1], half[1]) > 0.3
assert half[0] < 1e-6
assert max(*compare(Apart, unused=True), *compare(Together)) < 1e-5         # the first two ways

# %% [markdown]
# ## Your turn 1 · Leave nobody waiting
#
# A model comes with each expert as a unit, and you may not change the units. Write `my_experts(x, chosen,
# experts)`: `x` is f32[tokens, 48], `chosen` i64[tokens] has the expert of each token, and `experts` is the
# list of modules. It returns f32[tokens, 48], each token computed by its expert, so that output and gradients
# are right on every rank, whatever the tokens choose. Three routings are tried: rank `r` chooses expert `r` for
# all tokens, all ranks choose expert 0, and tokens that mix all experts. The rows that the experts compute are
# counted.
#
# <details><summary>Hint</summary>
#
# Every rank has to call every expert that some rank uses, in the same order, and each of these calls has to be
# part of the output. How many rows does a call need?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


@turn(1, {
    "error of the output, %": at_most(
        0.1, "The output is not that of each token's expert. Where the ranks don't call the same experts in the same "
        "order, a rank computes with rows of another expert. A dummy row must add zero."
    ),
    "its error where tokens mix experts, %": at_most(
        0.1, "The output is right where a rank's tokens choose one expert, and wrong where they mix: the rows have "
        "to be in the order of the tokens, row `i` from expert `chosen[i]`."
    ),
    "error of the gradients, %": at_most(
        0.1, "The output is right and the gradients are not: an expert whose result is not in the output gets no "
        "backward on this rank, and the ranks' reduce-scatters are paired wrongly."
    ),
    "rows computed, for 16 tokens": at_most(
        16 + world, "Too many rows: each expert should compute only the tokens that chose it (one spare row each is allowed)."
    ),
})
def score_experts(my_experts):
    rows, found = [], []

    class Yours(Apart):
        def forward(self, x, chosen):
            counted = [e.register_forward_hook(lambda *call: rows.append(len(call[2]))) for e in self.experts]
            out = my_experts(x.clone(), chosen, self.experts)
            if not isinstance(out, torch.Tensor) or out.shape != x.shape:
                raise NotYet("Return a tensor f32[tokens, 48].")
            if not out.requires_grad:
                raise NotYet("The output needs gradients: compute it without `detach()` or `no_grad()`.")
            for hook in counted:
                hook.remove()
            return out

    most, one = 0, lambda r: torch.full((16,), r)
    for choose in (one, lambda r: one(0), lambda r: (torch.arange(16) + r) % world):
        rows.clear()
        found.append(compare(Apart, Yours, each=True, choose=choose))
        most = max(most, sum(rows))
    (*single, mixed), gradients = ([round(100 * error, 2) for error in errors] for errors in zip(*found))
    return {
        "error of the output, %": max(single),
        "its error where tokens mix experts, %": mixed if max(single) < 0.1 else None,
        "error of the gradients, %": max(gradients) if max(*single, mixed) < 0.1 else None,
        "rows computed, for 16 tokens": most,
    }


# %%
# %%turn 1
def my_experts(x, chosen, experts):
    return None                                 # your lines here


# %% tags=["solution"] turn=1
def my_experts(x, chosen, experts):
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):        # also with no tokens
        out[chosen == e] = expert(x[chosen == e])
    return out

# %% tags=["right"] turn=1
def my_experts(x, chosen, experts):             # sorted, in pieces of any length
    order = chosen.argsort(stable=True)
    pieces = x[order].split(chosen.bincount(minlength=len(experts)).tolist())
    return torch.cat([expert(piece) for expert, piece in zip(experts, pieces)])[order.argsort()]

# %% tags=["right"] turn=1
def my_experts(x, chosen, experts):             # a dummy row, times zero
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        if (chosen == e).any():
            out = out.masked_scatter((chosen == e)[:, None], expert(x[chosen == e]))
        else:
            out = out + 0 * expert(x[:1]).sum()
    return out

# %% tags=["right"] turn=1
def my_experts(x, chosen, experts):             # from the last expert to the first
    out = torch.zeros_like(x)
    for e in reversed(range(len(experts))):
        index = (chosen == e).nonzero().flatten()
        out = out.index_add(0, index, experts[e](x[index]))
    return out

# %% tags=["wrong"] turn=1 says="in the same order"
def my_experts(x, chosen, experts):             # unused ones left out
    out = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        out[chosen == e] = experts[e](x[chosen == e])
    return out

# %% tags=["wrong"] turn=1 says="in the order of the tokens"
def my_experts(x, chosen, experts):             # rows in the order of the experts
    return torch.cat([expert(x[chosen == e]) for e, expert in enumerate(experts)])

# %% tags=["wrong"] turn=1 says="A dummy row must add zero"
def my_experts(x, chosen, experts):             # a dummy row, not times zero
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        at = (chosen == e).nonzero().flatten()
        out = out.index_add(0, at, expert(x[at])) if len(at) else out + expert(x[:1])
    return out

# %% tags=["wrong"] turn=1 says="without `detach()`"
def my_experts(x, chosen, experts):
    return sum((chosen == e)[:, None] * expert(x) for e, expert in enumerate(experts)).detach()

# %% tags=["wrong"] turn=1 says="not in the output"
def my_experts(x, chosen, experts):             # a dummy whose result is thrown away
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        y = expert(x[chosen == e] if (chosen == e).any() else x[:1])
        if (chosen == e).any():
            out[chosen == e] = y
    return out

# %% tags=["wrong"] turn=1 says="only the tokens that chose it"
def my_experts(x, chosen, experts):             # every expert computes everything
    return sum((chosen == e)[:, None] * expert(x) for e, expert in enumerate(experts))

# %% [markdown]
# ## More ranks than experts
#
# One parameter `f32[experts, in, out]` is cut along dimension 0 by default: between experts. With fewer experts
# than ranks, some ranks get none of it and the all-gather sends padding. `shard_placement_fn` chooses another
# dimension; its size has to be a multiple of the number of ranks.

# %% tags=["few"]
# %%ranks
few = world // 2                                            # half as many experts as ranks
rows = []
for placement in (Shard(0), Shard(1)):
    block = Together()
    block.weight = nn.Parameter(torch.randn(few, 48, 48))
    fully_shard(block, mesh=everyone, shard_placement_fn={block.weight: placement}.get)
    with record_collectives(block) as trace:
        block(torch.ones(8, 48), torch.zeros(8).long()).sum().backward()
    held = [None] * world
    dist.all_gather_object(held, block.weight.to_local().nbytes / 1024)
    rows.append([str(placement), ", ".join(f"{kib:g}" for kib in held), round(sum(e.sent_bytes for e in trace.collectives) / 1024)])

# %%
rows = ranks.get("rows")[0]
assert rows[0][2] > rows[1][2]
Table(["placement", "KiB that each rank holds", "KiB that a rank sends"], rows)

# %% [markdown]
# `Shard(1)` gives each rank the same share and sends no padding, for one more copy at each collective.
#
# ## Send the tokens instead
#
# With the block as the unit, a rank holds *all* of its experts at once. In **expert parallelism** (EP) each rank
# keeps `experts / ep` of them, and the tokens travel: an all-to-all brings each row to the rank that holds its
# expert, and another brings the result back. The rest of the model stays under FSDP on all ranks. The mesh has
# two dimensions, as in lesson 16: `distribute_tensor` divides the experts along "ep", then `fully_shard(experts)`
# shards each rank's part along "fsdp", inside `fully_shard(layer)` on all ranks. The next cell shows the parts.
# To train, take code that others maintain: [torchtitan](https://github.com/pytorch/torchtitan) has FSDP2 with
# expert parallelism, and so has transformers, with `DistributedConfig(fsdp_size=…, ep_size=…)`.

# %% tags=["parallel"]
# %%ranks
EXPERTS = 12


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 48, 96) / 7)
        self.down = nn.Parameter(torch.randn(EXPERTS, 96, 48) / 10)

    def forward(self, rows, expert):                        # expert: which of those on this rank
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        self.held = (up.nbytes + down.nbytes) / 1024
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=len(up)).cumsum(0).int()
        hidden = F.gelu(F.grouped_mm(rows[order], up, offs=ends))           # one product for each expert
        return F.grouped_mm(hidden, down, offs=ends)[order.argsort()]


class MoE(nn.Module):
    ep = None                                               # the mesh's dimension "ep"

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(48, EXPERTS, bias=False), Experts()

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        if self.ep is None:
            return x + weight[:, None] * self.experts(x, chosen)
        here = EXPERTS // self.ep.size()
        order = chosen.argsort(stable=True)                 # by expert, and so by the rank that has it
        to = chosen.bincount(minlength=EXPERTS).view(-1, here).sum(1)       # rows for each rank
        by = all_to_all_single(to, None, None, self.ep)     # rows from each rank
        to, by = to.tolist(), by.tolist()
        rows, which = (all_to_all_single(t[order], by, to, self.ep) for t in (x, chosen))
        out = all_to_all_single(self.experts(rows, which % here), to, by, self.ep)
        return x + weight[:, None] * out[order.argsort()]


def parallel(ep, divide=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(MoE(), MoE())
    mesh = init_device_mesh(everyone.device_type, (world // ep, ep), mesh_dim_names=("fsdp", "ep"))
    for layer in model:
        if ep > 1:
            layer.ep, experts = mesh["ep"], layer.experts
            for name, w in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(distribute_tensor(w.detach(), mesh["ep"], [Shard(0)])))
            fully_shard(experts, mesh=mesh["fsdp"])         # a unit of its own, on a mesh of its own
            if divide:
                experts.set_gradient_divide_factor(world)
                experts.set_force_sum_reduction_for_comms(world > ep)       # for gloo
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)

# %% [markdown]
# `F.grouped_mm` computes `rows[a:b] @ weight[e]` for all experts in one call; `ends` says where the rows of
# each expert end. `to` and `by` count the rows for and from each rank; `% here` makes an expert's number one of
# this rank's. The backward of `all_to_all_single` sends the gradients back. The next cell compares with one
# process.

# %% tags=["sizes"]
# %%ranks
def run(model, tokens=64):
    x = torch.randn(world * tokens, 48, generator=torch.Generator().manual_seed(1))
    with record_collectives(model) as trace:
        model(x.chunk(world)[rank]).square().mean().backward()
    return sum(e.sent_bytes for e in trace.collectives) / 1024


torch.manual_seed(0)
alone = nn.Sequential(MoE(), MoE())
alone(torch.randn(world * 64, 48, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def times_right(model):                                     # the gradients of experts, by those of one process
    found = model[1].experts.up.grad.full_tensor().flatten()
    right = alone[1].experts.up.grad.flatten()
    return (found @ right / (right @ right)).item()


sizes, rows = [n for n in (1, 2, 3, 4) if world % n == 0], []
for ep in sizes:
    without, model = parallel(ep, divide=False), parallel(ep)
    run(without)
    sent = run(model)
    row = [ep, f"{world // ep} x {ep}", round(model[1].experts.held), round(sent)]
    rows.append([*row, f"{times_right(without):.2f}", f"{times_right(model):.2f}"])

# %%
rows = ranks.get("rows")[0]
assert [row[4] for row in rows] == [f"{row[0]:.2f}" for row in rows]
assert [row[5] for row in rows] == ["1.00"] * len(rows)
HEAD = ["EP", "mesh", "KiB of experts held for a layer", "KiB sent", "gradients, by default", "divided by all ranks"]
Table(HEAD, rows, note="The gradients of experts, as multiples of those in one process.")

# %% [markdown]
# With EP = 4 a rank never holds another rank's experts, and 64 tokens per rank make far fewer bytes than the
# weights. But without `set_gradient_divide_factor` the experts train with **gradients EP times too large**,
# and no error says so. The reason: tokens of the ranks of its "ep" group have come to the expert, so its
# gradient is a sum over their losses. FSDP takes the mean over the mesh that it was given, "fsdp", which has
# only `world / ep` ranks. The factor is the number of all ranks, whatever EP is. On gloo it also needs
# `set_force_sum_reduction_for_comms(True)`, except where "fsdp" has one rank: there torch 2.13 would divide
# twice. AdamW's steps hide a constant factor; the norm by which you clip does not.
#
# ## Your turn 2 · One norm over two meshes
#
# `clip_grad_norm_` needs the norm of all gradients, and raises an error here ([an open
# issue](https://github.com/pytorch/pytorch/issues/180346)), because the router's gradients are on `everyone`
# and those of the experts on ("fsdp", "ep"). Write `my_norm(gradients)`: it gets the list of all gradients,
# DTensors on two meshes, and returns their 2-norm, the same number on every rank. Don't gather the
# gradients: bytes are counted. With this norm you clip the parameters of one mesh at a time:
#
# ```python
# for mesh in dict.fromkeys(p.device_mesh for p in model.parameters()):
#     own = [p for p in model.parameters() if p.device_mesh == mesh]
#     torch.nn.utils.clip_grads_with_norm_(own, max_norm=1.0, total_norm=torch.as_tensor(norm))
# ```
#
# <details><summary>Hint</summary>
#
# `torch.nn.utils.get_total_norm` takes gradients of one mesh (`gradient.device_mesh`) and returns a DTensor;
# `full_tensor()` makes a number of it. Not a `set` of meshes: its order differs between processes. How do two
# norms combine?
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._pytree import tree_leaves

from fsdp_utils.collectives.c10d_hooks import listen_to_calls


@turn(2, {
    "ranks with another norm than rank 0": exactly(0, "The ranks differ: each has the norm of its own shards only."),
    "norm, times the right one": exactly(
        1.0, less="Too small: the gradients of one mesh, or some shards, are left out, it is divided by the ranks, "
        "or the root is missing.",
        more="Too large: a norm is a root of a sum of squares, so add the squares and not the norms; and count "
        "each shard once."
    ),
    "KiB passed to collectives": at_most(4, "Gradients are gathered. A norm needs one number from each rank."),
})
def score_norm(my_norm):
    ep = max(n for n in sizes if n < world or world < 4)
    model = parallel(ep)
    run(model)
    gradients = [p.grad for p in model.parameters()]
    right = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()

    def sent(call):
        numbers = [f"{t.sum():.3g}" for t in tree_leaves(call.given) if t.is_floating_point()]
        return call.group.group_name, numbers, call.bytes_in

    calls = [], []
    try:
        for other, seen in enumerate(calls):                # a set of the meshes begins with the one, then the other
            for mesh in (gradient.device_mesh for gradient in gradients):
                mesh._hash = 1 + ((mesh == everyone) ^ other)
            with listen_to_calls(lambda call, issue, seen=seen: seen.append(sent(call)) or issue()):
                norm = my_norm(list(gradients))
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    finally:
        for gradient in gradients:
            gradient.device_mesh._hash = None               # torch computes it again
    if calls[0] != calls[1]:
        raise NotYet("The order of your collectives is that of a `set` of meshes. It differs between processes, so under "
                     "torchrun ranks wait in collectives of different meshes. Take the keys of a dict.")
    try:
        norm = float(norm)
    except (TypeError, ValueError):
        raise NotYet("Return one number.") from None
    norms = [None] * world
    dist.all_gather_object(norms, round(norm / right, 3))
    others = sum(found != norms[0] for found in norms)
    return {
        "ranks with another norm than rank 0": others,
        "norm, times the right one": None if others else norms[0],
        "KiB passed to collectives": sum(size for _, _, size in calls[0]) / 1024,
    }


# %%
# %%turn 2
def my_norm(gradients):                         # DTensors on two meshes
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def my_norm(gradients):
    meshes = {}
    for gradient in gradients:
        meshes.setdefault(gradient.device_mesh, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(some).full_tensor() for some in meshes.values()]
    return torch.stack(norms).norm()

# %% tags=["right"] turn=2
def my_norm(gradients):                         # every shard is on one rank alone: sum their squares
    total = torch.stack([gradient.to_local().square().sum() for gradient in gradients]).sum()
    dist.all_reduce(total)
    return total.sqrt().item()

# %% tags=["right"] turn=2
import math

def my_norm(gradients):                         # one number for each gradient
    return math.hypot(*[gradient.norm().full_tensor().item() for gradient in gradients])

# %% tags=["right"] turn=2
def my_norm(gradients):                         # objects
    everyone_s = [None] * world
    dist.all_gather_object(everyone_s, sum(g.to_local().double().square().sum().item() for g in gradients))
    return sum(everyone_s) ** 0.5

# %% tags=["wrong"] turn=2 says="its own shards only"
def my_norm(gradients):
    return torch.stack([gradient.to_local().norm() for gradient in gradients]).norm()

# %% tags=["wrong"] turn=2 says="add the squares and not the norms"
def my_norm(gradients):
    norms = [gradient.norm().full_tensor() for gradient in gradients]
    return sum(norms)

# %% tags=["wrong"] turn=2 says="the gradients of one mesh"
def my_norm(gradients):                         # the first mesh alone
    first = [gradient for gradient in gradients if gradient.device_mesh == gradients[0].device_mesh]
    return torch.nn.utils.get_total_norm(first).full_tensor()

# %% tags=["wrong"] turn=2 says="the root is missing"
def my_norm(gradients):
    return sum(gradient.norm().full_tensor() ** 2 for gradient in gradients)

# %% tags=["wrong"] turn=2 says="divided by the ranks"
def my_norm(gradients):                         # the mean over the ranks
    total = torch.stack([gradient.to_local().square().sum() for gradient in gradients]).sum()
    dist.all_reduce(total)
    return (total / world).sqrt()

# %% tags=["wrong"] turn=2 says="a `set` of meshes"
def my_norm(gradients):
    total = 0
    for mesh in {gradient.device_mesh for gradient in gradients}:
        some = [gradient for gradient in gradients if gradient.device_mesh == mesh]
        total = total + torch.nn.utils.get_total_norm(some).full_tensor() ** 2
    return total.sqrt()

# %% tags=["wrong"] turn=2 says="Gradients are gathered"
def my_norm(gradients):
    return torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()

# %% [markdown]
# ## Does EP always send less?
#
# A sweep over tokens, counted as if the rows spread evenly over the ranks:

# %% tags=["tokens"]
# %%ranks
swept = {ep: {} for ep in sizes}
for ep in sizes:
    for tokens in (64, 256, 1024, 2048, 4096):
        swept[ep][tokens] = run(parallel(ep), tokens)

# %% jupyter={"source_hidden": true}
swept = ranks.get("swept")[0]
fig, (axes,) = plots.figure(width=6.4, height=2.9)
for color, (ep, found) in zip(plots.RANK_COLORS, swept.items()):
    label = "FSDP alone" if ep == 1 else f"EP = {ep}"
    axes.plot(list(found), [kib / 1024 for kib in found.values()], marker="o", color=color, label=label)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(list(found), [f"{tokens:,}" for tokens in found])
axes.set_yticks([0.125, 0.5, 2, 8], ["1/8", "1/2", "2", "8"])
axes.set(xlabel="tokens of each rank", ylabel="MiB that a rank sends in a step")
axes.legend()
most = max(swept)
assert (3 * 2 * 12 * 96 / 4, 3 * 3 * 8 * 14336 / (4 * 2)) == (1728, 129024)
assert swept[1][64] == swept[1][4096]
assert swept[most][64] < swept[1][64] < swept[most][4096]
plots.show(fig, alt="What a rank sends against tokens: flat under FSDP alone, growing with EP.")

# %% [markdown]
# FSDP alone sends the same at any batch; EP sends rows in proportion to the tokens, beside what "fsdp" still
# gathers. The lines cross at about 2,000 tokens per rank. **Calculated**, in one dtype and without recomputation
# in backward: FSDP sends each weight three times, EP each row four times. At any EP size, both send the same at
#
# > tokens per rank = 3 x matrices x experts x inner width / (4 x experts per token)
#
# That is 3 x 2 x 12 x 96 / 4 = 1,728 here (more in the figure: the first layer's input needs no gradient),
# and 129,024 for Mixtral 8x7B (3 matrices, 8 experts, width 14,336, 2 experts per token). Bytes are not time:
# FSDP's gathers can run beside computation, while each all-to-all here is waited for. So keep "ep" within a
# host where you can, and measure.
#
# ## Balance
#
# A rank with popular experts gets more rows, and the other ranks wait for it. The next cell balances by a bias,
# [without a loss of its own](https://arxiv.org/abs/2408.15664): after each step the bias of an expert with many
# tokens goes down. The bias decides the choice only: a token's weight comes from the scores without it.

# %% tags=["balance"]
# %%ranks
torch.manual_seed(0)
router = torch.randn(EXPERTS, 48) / 7
torch.manual_seed(1 + rank)
scores = (torch.randn(4096, 48) + 0.5 * torch.randn(48)) @ router.T         # each rank's domain has its favourites
rows = []
for name, own in {"the counts of all ranks": False, "each rank's own counts": True}.items():
    bias, busiest = torch.zeros(EXPERTS), []
    for _ in range(60):
        mine = (scores + bias).argmax(-1).bincount(minlength=EXPERTS).float()
        dist.all_reduce(total := mine.clone())
        busiest.append((total.max() / total.mean()).item())
        seen = mine if own else total
        bias += 0.03 * (seen.mean() - seen).sign()
    biases = [torch.empty(EXPERTS) for _ in range(world)]
    dist.all_gather(biases, bias)
    first, last = ((scores + biases[r]).argmax(-1) for r in (0, -1))
    last_above = max(step for step, times in enumerate(busiest) if times >= 1.2)
    rows.append([name, round(busiest[0], 1), last_above + 1, round(100 * (first != last).float().mean().item())])

# %%
rows = ranks.get("rows")[0]
assert rows[0][1] > 1.3
assert rows[0][2] < 60
assert rows[1][3] > 5
HEAD = ["bias from", "tokens of the busiest expert / mean", "steps until it stays below 1.2", "% routed otherwise"]
Table(HEAD, rows, note="Routed otherwise: tokens of rank 0 for which the last rank's bias chooses another expert.")

# %% [markdown]
# The bias is a **buffer**, and FSDP does not synchronise buffers. From each rank's own counts it balances as
# well, in two to three times the steps, but it differs between ranks: the same token is routed otherwise there,
# and `save_distributed` refuses to save the bias. So sum the counts over all ranks.
#
# ## Checkpoint with another EP size
#
# The experts are DTensors on the mesh, so a checkpoint knows where each piece belongs. The next cell saves a
# model with each EP size, loads it with each, and goes on.

# %% tags=["saved"]
# %%ranks
import tempfile

from fsdp_utils import load_distributed, save_distributed

place = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(place)
tokens = torch.randn(64, 48)                                # other ones on each rank


def steps(model, optimizer, count=2):
    for _ in range(count):
        (loss := model(tokens).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    return loss / world


gaps = []
for saved in sizes:
    model = parallel(saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    save_distributed(f"{place[0]}/{saved}", model, optimizer, step=2).wait()
    wanted = steps(model, optimizer)                        # the loss in the fourth step
    for loaded in sizes:
        model = parallel(loaded, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load_distributed(f"{place[0]}/{saved}", model, optimizer)
        gaps.append((steps(model, optimizer) - wanted).abs().item())

# %% jupyter={"source_hidden": true}
import shutil

gaps = ranks.get("gaps")[0]
shutil.rmtree(ranks.get("place[0]")[0])
assert max(gaps) < 1e-6
print(f"{len(gaps)} pairs of EP sizes: the losses after loading differ by less than 0.000001.")

# %% [markdown]
# Don't keep experts as plain tensors, `nn.Parameter(w.chunk(ep)[r])`: each rank then has other experts under the
# same name, and `save_distributed` refuses to save them.
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | no error, and outputs or gradients that differ from one process | experts that are left out on some ranks: weights or gradients of different experts are mixed | one 3-D parameter, or `set_reduce_scatter_unused_params(True)`; the block is the unit |
# | it hangs, or a rank ends with `Received data size doesn't match expected size` and others with `Connection reset by peer` | the same, in the first step in which the ranks use different numbers of experts | the same |
# | `All operands in aten.stack.default must have the same mesh`, in `clip_grad_norm_` | parameters on two meshes | a norm for each mesh, as in turn 2 |
# | expert gradients EP times too large | FSDP's mean is over "fsdp" alone | `set_gradient_divide_factor(world)` |
# | `Cannot use ReduceOp.PREMUL_SUM with Gloo` | that factor, on gloo | `set_force_sum_reduction_for_comms(True)` |
# | expert gradients `world` times too small, EP = all ranks | both calls: torch 2.13 divides twice where the mesh "fsdp" has one rank | only the first call there, and no reduction in float16 |
# | `FSDP does not support uneven sharding on dim 1` | the size of dimension 1 is not a multiple of the number of ranks | another dimension |

# %% [markdown]
# ## The rule
#
# Every rank gathers every expert of a block, and every expert gets a gradient on every rank: one parameter,
# one unit. If experts move to the ranks instead, divide their gradients by the number of all ranks, and take one
# norm and one count over all ranks.
#
# [← lesson 19](19_whole_matrix_optimizers.ipynb) · [lesson 21 →](21_long_sequences.ipynb)

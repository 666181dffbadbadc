# %% [markdown]
# # 19 · Optimizers that need the whole matrix
#
# Which optimizers are right on shards? **Those that treat each element by itself, such as AdamW and SGD:
# leave them as they are. One that multiplies matrices, such as Muon, needs each matrix whole: give every
# matrix one owner rank. All shards of a matrix go to its owner, which computes once and sends the results
# back.**

# %% jupyter={"source_hidden": true}
from matplotlib.patches import Patch

from fsdp_utils.lessons import lesson, plots

RANKS = range(4)
fig, panels = plots.figure(3, width=9.0, height=2.3)
for axes, title in zip(panels, ("at rest, and for AdamW", "gathered: all compute all", "owners: each computes one")):
    for rank in RANKS:
        for matrix in RANKS:
            whole = title.startswith("gathered") or (title.startswith("owners") and rank == matrix)
            shard = title.startswith("at rest") or whole
            axes.barh(rank, 0.86, left=matrix, height=0.8, color=plots.FAINT)
            if shard:
                y, height = (rank, 0.8) if whole else (rank - 0.3 + 0.2 * rank, 0.2)
                axes.barh(y, 0.86, left=matrix, height=height, color=plots.RANK_COLORS[matrix])
    axes.set(title=title, ylim=(3.6, -0.6))
    axes.set_yticks(RANKS, [f"rank {rank}" for rank in RANKS] if axes is panels[0] else [""] * 4)
    axes.set_xticks([matrix + 0.43 for matrix in RANKS], [f"matrix {matrix}" for matrix in RANKS], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Four matrices on four ranks: sharded, gathered on every rank, and with one owner each.")

# %% [markdown]
# A drawing of four matrices on four ranks. What a rank holds of a matrix is coloured. AdamW works on the
# shards at rest. Gathered, every rank computes every matrix, one after another. With owners, each rank holds
# and computes one whole matrix.

# %% tags=["card"]
lesson.card(
    19,
    learn="tell which optimizers may see shards, run Muon with one owner per matrix, and save 8-bit states",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)",
    minutes=(1, 22, 28),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It takes one optimizer step on shards
# and the same step in one process, and compares the weights. **Muon** sets all singular values of a matrix's
# momentum to about 1 and steps along the result. A shard of rows has other singular values than the matrix.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.set_default_device(device)
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
#
#
# def step(optimizer_class, sharded=True, on_shards=False):
#     torch.manual_seed(0)                                     # the same weights and samples on every rank
#     model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(3)])
#     x, y = torch.randn(2, 1920, 96)
#     if sharded:
#         for part in [*model, model]:
#             fully_shard(part, mesh=mesh)
#         own = slice(dist.get_rank(), None, dist.get_world_size())
#         x, y = x[own], y[own]                                # other samples on each rank
#     (model(x) - y).square().mean().backward()
#     weights = list(model.parameters())
#     if on_shards:                                            # the mistake
#         weights = [nn.Parameter(weight.detach().to_local()) for weight in weights]
#         for shard, weight in zip(weights, model.parameters()):
#             shard.grad = weight.grad.to_local()
#     if not sharded:
#         optimizer_class(weights, lr=0.01).step()
#         return torch.cat(weights)
#     with record_collectives(model) as trace:
#         optimizer_class(weights, lr=0.01).step()
#     count = sum(event.is_collective for event in trace.events)
#     return torch.cat([weight.full_tensor() for weight in model.parameters()]), count
#
#
# torch.manual_seed(0)
# begin = torch.cat([nn.Linear(96, 96, bias=False).weight for _ in range(3)])
# AdamW, Muon = torch.optim.AdamW, torch.optim.Muon
# for name, (kind, on_shards) in {"AdamW": (AdamW, 0), "Muon": (Muon, 0), "Muon on each shard": (Muon, 1)}.items():
#     alone = step(kind, sharded=False)
#     found, count = step(kind, on_shards=on_shards)
#     error = (found - alone).norm() / (alone - begin).norm()
#     if dist.get_rank() == 0:
#         print(f"{name:18}  {count:2} collectives, the step is off by {error:.1f}")
# dist.destroy_process_group()
# ```
# ```text
# AdamW                0 collectives, the step is off by 0.0
# Muon                48 collectives, the step is off by 0.0
# Muon on each shard   0 collectives, the step is off by 0.8
# ```
#
# "Off by 0.8" is 80% of the length of the right step, and there is no error message. `torch.optim.Muon` on
# the parameters of `fully_shard` is right up to bf16's rounding and pays with 48 collectives for three
# matrices. All of this is about FSDP2, whose parameters are DTensors; a cell below is about FSDP1.
#
# ## Which optimizers may see shards
#
# All of `torch.optim` but `SparseAdam`, three steps each in float64, under FSDP2 against one process.
# `training` (folded) trains two matrices; 96 rows divide among 2, 3 and 4 ranks, 53 do not.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start(preload=["transformers.models.llama.modeling_llama"])

# %% jupyter={"source_hidden": true}
# %%ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def apart(found, right):
    """How far the found tensors are from the right ones, as a share of the right ones' length."""
    found, right = (torch.cat([full(one).flatten() for one in some]) for some in (found, right))
    return ((found - right).norm() / right.norm()).item()


def training(optimizer_class, rows, sharded):
    """Train two matrices for three steps; return their change, and the collectives of a step by kind."""
    torch.manual_seed(0)
    options = {"bias": False, "dtype": torch.float64, "device": device}
    model = nn.Sequential(nn.Linear(96, rows, **options), nn.Tanh(), nn.Linear(rows, 96, **options))
    x = torch.randn(60 * world, 96, dtype=torch.float64).to(device)
    before = [weight.detach().clone() for weight in model.parameters()]
    if sharded:
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        x = x.chunk(world)[rank]
    optimizer = optimizer_class(model.parameters(), lr=0.01)

    def loss():
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    kinds = []
    for _ in range(3):
        if optimizer_class is torch.optim.LBFGS:
            optimizer.step(loss)
            continue
        loss()
        if not sharded:
            optimizer.step()
            continue
        with record_collectives(model) as trace:
            optimizer.step()
        kinds = [event.kind for event in trace.events if event.is_collective]
    return [full(weight) - begin for weight, begin in zip(model.parameters(), before)], kinds


# %%
# %%ranks
def verdict(optimizer_class, rows):
    alone, _ = training(optimizer_class, rows, sharded=False)
    try:
        found, kinds = training(optimizer_class, rows, sharded=True)
    except RuntimeError:                                    # of a DTensor's operation, the same on every rank
        return "raises"
    error = apart(found, alone)
    told = "equal" if error < 1e-8 else f"off by {error:.1f}"
    return told + (f", {len(kinds)} collectives" if kinds else "")


every = [one for one in vars(torch.optim).values() if isinstance(one, type) and one is not torch.optim.Optimizer]
every = sorted((one for one in every if one is not torch.optim.SparseAdam), key=lambda one: one.__name__)
told = {one.__name__: [verdict(one, rows) for rows in (96, 53)] for one in every}

# %%
told, rows = ranks.get("told")[0], {}
for name, found in told.items():
    rows.setdefault(tuple(found), []).append(name)
assert "AdamW" in rows["equal", "equal"]
assert told["Adafactor"] == told["Rprop"] == ["raises", "raises"]
Table(
    ["torch.optim", "96 rows", "53 rows"],
    [[", ".join(names), *found] for found, names in sorted(rows.items(), key=lambda row: -len(row[1]))],
)

# %% [markdown]
# The optimizers of the first row are **element-wise**: each new weight follows from its own gradient and
# state.
#
# - Rprop is element-wise, too, but it and Adafactor (means of rows and columns) write in place in a way that
#   DTensor refuses: `in-place operations that require placement changes are not supported`.
# - LBFGS (collectives not counted) flattens all parameters into one vector, which DTensor does only if the
#   rows divide among the ranks. It also compares losses, and here each rank has its own: return the mean over
#   ranks.
# - `Muon` needs whole matrices and runs: DTensor sends what each product lacks. "Off by 0.0" is less than 5%:
#   bf16.
#
# With `p.to_local()` DTensor is bypassed and nothing is sent: the script's third line.
#
# ## What the 48 collectives send
#
# Muon's iteration is named after Newton and Schulz: a norm, then three products, five times, in bf16. On a
# square matrix each of these 16 operations costs one collective, so three matrices make 48:

# %%
# %%ranks
def newton_schulz(matrix):                                  # [rows, columns] -> bf16[rows, columns]
    if matrix.size(0) > matrix.size(1):
        return newton_schulz(matrix.T).T                    # the smaller of the two squares
    x = matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


# %% [markdown]
# Given a DTensor, each product here of a square or wide row-sharded matrix gathers a factor; a tall one also
# all-reduces and reduce-scatters partial products. Three ways to do the same for as many matrices as
# there are ranks: `by_dtensor` calls the function above on DTensors, `gathered` gathers each matrix once and
# computes it on every rank, `owned` gives each matrix an owner (both folded: leave them closed, they are the
# solutions of your turns). `measure` (folded) counts what a rank sends at least, around a ring, and its own
# share of the FLOPs.

# %% jupyter={"source_hidden": true}
# %%ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

counted = fully_shard(nn.Linear(8, 8, device=device), mesh=mesh)        # record_collectives asks for a model


class LocalFlops(TorchDispatchMode):
    """Count the FLOPs of this rank's own products, below DTensor."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented                                       # DTensor turns it into local operations
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


def sharded(shapes, seed=0):
    """Random matrices, in full and cut by rows as FSDP2 cuts them."""
    torch.manual_seed(seed)
    whole = [torch.randn(shape).to(device) for shape in shapes]
    return whole, [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole]


def by_dtensor(matrices):
    return [newton_schulz(matrix) for matrix in matrices]


def gathered(matrices):
    return [
        distribute_tensor(newton_schulz(matrix.bfloat16().full_tensor()), mesh, [Shard(0)], src_data_rank=None)
        for matrix in matrices
    ]


def owned(matrices):
    shards = torch.stack([matrix.to_local() for matrix in matrices]).bfloat16()
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)
    dist.all_to_all_single(shards, newton_schulz(mine.flatten(0, 1)).contiguous())
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]


def measure(way, shape):
    """Collectives, KiB sent by a rank, FLOPs in matrices, and error of a way to treat `world` matrices."""
    whole, matrices = sharded([shape] * world)
    with LocalFlops() as one:
        right = [newton_schulz(matrix) for matrix in whole]
    with record_collectives(counted) as trace, LocalFlops() as flops:
        found = way(matrices)
    sent = [event.sent_bytes for event in trace.events if event.is_collective]
    return len(sent), round(sum(sent) / 1024), round(flops.total / (one.total / world), 2), apart(found, right)


# %%
# %%ranks
SHAPES, WAYS = {"tall": (192, 48), "square": (96, 96), "wide": (48, 192)}, (by_dtensor, gathered, owned)
cost = {(name, way.__name__): measure(way, shape) for name, shape in SHAPES.items() for way in WAYS}

# %%
cost, world = ranks.get("cost, world")[0]
fig, panels = plots.figure(3, width=9.0, height=2.6)
shapes, ways = ["tall", "square", "wide"], ["by_dtensor", "gathered", "owned"]
for axes, place, title in zip(panels, range(3), ("collectives", "KiB sent by a rank", "a rank's FLOPs, in matrices")):
    for row, shape in enumerate(shapes):
        for column, way in enumerate(ways):
            value, y = cost[shape, way][place], row + 0.27 * (column - 1)
            axes.barh(y, value, height=0.25, color=plots.RANK_COLORS[column])
            axes.text(value, y, f" {value:g}", va="center", fontsize=8)
    axes.set(title=title, ylim=(2.6, -0.6), xticks=[])
    axes.set_yticks(range(3), shapes if axes is panels[0] else [""] * 3)
    axes.margins(x=0.2)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
fig.legend(handles=[Patch(color=c, label=w) for c, w in zip(plots.RANK_COLORS, ways)], loc="outside lower center", ncols=3)
assert all(cost[shape, "owned"][0] == 2 and cost[shape, "owned"][2] == 1 for shape in shapes)
assert all(abs(cost[shape, "owned"][1] - cost[shape, "gathered"][1] * 2 / world) <= 1 for shape in shapes)
assert 0.01 < cost["tall", "by_dtensor"][3] < 0.1
assert max(cost[shape, way][3] for shape in shapes for way in ways[1:]) < 0.001
assert all(11 <= cost[shape, "by_dtensor"][1] / cost[shape, "gathered"][1] <= 15 for shape in shapes)
plots.show(fig, alt="Collectives, KiB and FLOPs of three ways, for tall, square and wide matrices.")

# %% [markdown]
# Owners win: two collectives for the whole batch of matrices, 2/n of the bytes of `gathered` on n ranks, and
# the FLOPs of one matrix. `by_dtensor` shares FLOPs, too, but sends 11 to 15 times as much as `gathered` at
# these sizes (`torch.optim.Muon`, which fuses sums into products, sends less for the tall matrix). It also
# adds partial sums that are rounded to bf16: a tall matrix's result is off by 1 to 10%.
# The other two give what one process gives. Momentum and weights stay sharded throughout.
#
# `owned` stacks the shards, so batch matrices by shape. In a batch of fewer matrices
# than ranks some ranks compute nothing. For GPUs, VeOmni does it this way, with uneven shards, too
# ([#973](https://github.com/ByteDance-Seed/VeOmni/pull/973); not run here).
#
# ## Shampoo: choose blocks that no cut can touch
#
# Shampoo multiplies a gradient from both sides by the inverse fourth roots of `L = G Gᵀ` and `R = Gᵀ G`,
# summed up over the steps. To keep `L` small it is used on blocks of the matrix. A block of rows that lies on
# one rank needs no communication. But which blocks? If "the shard" is the block, the number of ranks is a
# hyperparameter.

# %%
# %%ranks
def inverse_root(square):
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp(min=1e-6) ** -0.25 @ vectors.T


def shampoo(gradient, block):                               # first step: L and R of each block of rows
    return torch.cat([inverse_root(g @ g.T) @ g @ inverse_root(g.T @ g) for g in gradient.split(block)])


(whole,), (matrix,) = sharded([(96, 64)])
rows_of_blocks = {"the shard": 96 // world, "8 rows": 8, "12 rows": 12, "24 rows": 24, "36 rows": 36}
off = {
    name: apart(
        [DTensor.from_local(shampoo(matrix.to_local(), block), mesh, [Shard(0)])],
        [shampoo(whole, 96 if name == "the shard" else block)],     # of one rank, all rows are the shard
    )
    for name, block in rows_of_blocks.items()
}

# %%
off = ranks.get("off")[0]
for name, error in off.items():
    divides = name != "the shard" and 96 // world % int(name.split()[0]) == 0
    assert (error < 1e-4) == divides, name
Table(
    ["a block is", *off],
    [["off from one process by", *(f"{error:.2f}" for error in off.values())]],
    note=f"{world} ranks; a shard has {96 // world} of 96 rows.",
)

# %% [markdown]
# Blocks of a fixed size that divides every shard give the step of one process, and nothing is sent. Other
# blocks are cut by the ranks: another number of ranks is another optimizer, and nothing warns you.
#
# ## 8-bit states
#
# AdamW's two moments in float32 take 8 bytes per parameter. 8-bit optimizers store 8-bit codes and one scale
# for each block of values. A step needs no more than the block, so shards are no problem if no cut goes
# through a block. The **checkpoint** is: `codes` and `scales` have other shapes than the parameter. Momentum
# in 8 bits, with blocks along each row, in DTensor operations throughout:

# %%
# %%ranks
class Momentum8bit(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, block=32):
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state, momentum = self.state[weight], weight.grad
                if state:
                    momentum = momentum + 0.9 * (state["codes"] * state["scales"]).flatten(1)
                blocks = momentum.unflatten(1, (-1, group["block"]))    # along a row: no cut of rows touches them
                state["scales"] = blocks.abs().amax(-1, keepdim=True) / 127 + 1e-12
                state["codes"] = (blocks / state["scales"]).round().to(torch.int8)
                weight.sub_(momentum, alpha=group["lr"])


class PlainMomentum8bit(Momentum8bit):                      # for one step: its states are plain tensors of this rank
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state.update({name: value.to_local() for name, value in state.items()})


# %% [markdown]
# `saved_by(way, kind)` trains a step, saves the optimizer, loads it into a new one, and says what came back.

# %% jupyter={"source_hidden": true}
# %%ranks
import shutil
import tempfile

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fsdp_utils import CheckpointError, load_distributed, save_distributed


def trained(kind, steps):
    torch.manual_seed(0)
    model = nn.Linear(96, 96, bias=False, device=device)
    fully_shard(model, mesh=mesh)
    optimizer = kind(model.parameters())
    torch.manual_seed(1 + rank)
    for _ in range(steps):
        model(torch.randn(8, 96).to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_by(way, kind):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    (model, optimizer), (new_model, new) = trained(kind, 1), trained(kind, 0)
    try:
        if way == "save_distributed":
            save_distributed(folders[0], model, optimizer, step=1)
            load_distributed(folders[0], new_model, new)
        else:
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folders[0])
            state = get_optimizer_state_dict(new_model, new)
            dcp.load({"optimizer": state}, checkpoint_id=folders[0])
            set_optimizer_state_dict(new_model, new, state)
    except CheckpointError as error:
        return "refused: " + str(error).partition(": ")[2].partition(", found")[0]
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])
    there, back = optimizer.state[model.weight], new.state[new_model.weight]
    right = all(torch.equal(local(there[name]).float(), local(back[name]).float()) for name in there)
    everyone = [None] * world
    dist.all_gather_object(everyone, right)
    codes = str(back["codes"].dtype).removeprefix("torch.")
    return f"right on {sum(everyone)} of {world} ranks, codes in {codes}"


# %%
# %%ranks
ways = {"PyTorch's": "dcp", "save_distributed": "save_distributed"}
came_back = {(name, kind.__name__): saved_by(way, kind) for name, way in ways.items() for kind in (PlainMomentum8bit, Momentum8bit)}
state = trained(Momentum8bit, 1)[1].state
bytes_8bit = sum(tensor.to_local().nbytes for one in state.values() for tensor in one.values())
bytes_fp32 = sum(weight.to_local().nbytes for weight in state)

# %%
came_back, share = ranks.get("came_back, bytes_8bit / bytes_fp32")[0]
assert f"right on {world} " not in came_back["PyTorch's", "PlainMomentum8bit"]
assert came_back["PyTorch's", "Momentum8bit"].endswith("float32")
assert came_back["save_distributed", "Momentum8bit"].endswith(f"of {world} ranks, codes in int8")
Table(
    ["saved by", "states", "what came back"],
    [[way, {"Momentum8bit": "DTensors"}.get(kind, "plain tensors"), found] for (way, kind), found in came_back.items()],
    note=f"The states take {share:.0%} of the bytes that they take in float32.",
)

# %% [markdown]
# A plain tensor counts as the same on all ranks, so `dcp` stores one rank's codes and one rank's scales,
# maybe of two different ranks, and every rank loads them, without an error where all shards have one size.
# `save_distributed` refuses. DTensors come back right both ways; `Optimizer.load_state_dict`, which PyTorch's
# way calls, converts each state but `step` to the parameter's dtype
# (`_process_value_according_to_param_policy`), here float32, so the codes take four times their bytes until
# the next step. Because scales belong to pieces of rows, any number of ranks can load them.
#
# Two maintained libraries, not run here: bitsandbytes' scales are no DTensors; issues report an assertion
# when its states are saved under FSDP2
# ([#1732](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1732)) and an illegal memory access
# ([#1633](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633)). torchao's `AdamW8bit` keeps
# DTensors, and `dcp` saves them. Whether it quantizes a state depends on the size of the shard, so another
# number of ranks may be another approximation ([#4912](https://github.com/pytorch/ao/issues/4912)).
#
# ## Two optimizers, groups and offloaded states
#
# Muon is for the matrices inside the blocks. Embeddings, the head and norms go to AdamW. Build the groups
# after `fully_shard`, by name and `ndim`: under FSDP2 a parameter keeps its name and its full shape.

# %%
# %%ranks
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_utils import shard

torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
model = shard(LlamaForCausalLM(config).to(device), mesh=mesh)
named = dict(model.named_parameters())
hidden = {name: p for name, p in named.items() if p.ndim == 2 and ".layers." in name}
ends = {name: p for name, p in named.items() if p.ndim == 2 and name not in hidden}
norms = {name: p for name, p in named.items() if p.ndim == 1}
muon = torch.optim.Muon(hidden.values(), lr=0.003, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW([
    {"params": ends.values(), "lr": 0.003},
    {"params": norms.values(), "lr": 0.001, "weight_decay": 0.0},
])

# %% [markdown]
# One `step()` of each per batch; one call saves both: `save_distributed(folder, model, [muon, adamw],
# step=…)`. The states of `adamw` alone may lie in host memory between steps (`CPUOffloadPolicy` takes
# parameters and gradients along, for each module that you pass it to). Two hooks move them; on a CPU nothing
# moves.

# %%
# %%ranks
def moved_to(place):
    def hook(optimizer, args, kwargs):
        for state in optimizer.state.values():
            state.update({name: tensor.to(place) for name, tensor in state.items() if name != "step"})
    return hook


adamw.register_step_pre_hook(moved_to(device))
adamw.register_step_post_hook(moved_to("cpu"))
before = {name: full(p).clone() for name, p in named.items()}
ids = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(rank)).to(device)
model(input_ids=ids, labels=ids).loss.backward()
for optimizer in (muon, adamw):
    optimizer.step()

# %% jupyter={"source_hidden": true}
# %%ranks
moved = {name: (full(p) - before[name]).abs().max().item() for name, p in named.items()}
groups = {"Muon: hidden matrices": hidden, "AdamW: embedding and head": ends, "AdamW: norms": norms}
rows = [[name, len(some), f"{max(map(moved.get, some)):.3f}"] for name, some in groups.items()]
assert not any(state[name].to_local().is_cuda for state in adamw.state.values() for name in ("exp_avg", "exp_avg_sq"))

# %%
rows = ranks.get("rows")[0]
assert [row[2] for row in rows[1:]] == ["0.003", "0.001"]
Table(["group", "parameters", "largest change of a weight in step 1"], rows)

# %% [markdown]
# AdamW's first step changes a weight that has a gradient by about its learning rate, so the table shows that
# each group has its own. Muon scales its rate by the matrix's shape, and takes the full one from the DTensor.

# %% [markdown]
# The folded cell asserts three errors of the table below: FSDP1's flat parameters, matrices with fewer rows
# than ranks, and sharded beside ignored parameters.

# %% jupyter={"source_hidden": true}
# %%ranks
import warnings

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def raises(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    flat = [FSDP(nn.Linear(8, 8, device=device), use_orig_params=keep, device_id=device) for keep in (False, True)]
assert all(p.ndim == 1 for one in flat for p in one.parameters())
assert "only supports 2D parameters" in raises(lambda: torch.optim.Muon(flat[1].parameters()))

few = fully_shard(nn.Linear(8, 1, bias=False, device=device), mesh=mesh)
few(torch.randn(4, 8, device=device)).sum().backward()
assert "placement changes" in raises(torch.optim.Muon(few.parameters()).step)

part = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
fully_shard(part, mesh=mesh, ignored_params=set(part[0].parameters()))
part(torch.randn(4, 8, device=device)).sum().backward()
for way in ({"foreach": True}, {"fused": True}):
    assert "got mixed torch.Tensor and DTensor" in raises(torch.optim.AdamW(part.parameters(), **way).step)
    apart_groups = [{"params": one.parameters()} for one in part]
    assert raises(torch.optim.AdamW(apart_groups, **way).step) == "no error"
assert "got mixed torch.Tensor and DTensor" in raises(lambda: nn.utils.clip_grad_norm_(part.parameters(), 1.0))

before, batch = sharded([(96, 96)] * world)                    # one step by owners, as below, and torch's
batch, gradients = [nn.Parameter(matrix) for matrix in batch], sharded([(96, 96)] * world, seed=1)[1]
with torch.no_grad():
    momentum = [torch.zeros_like(g).lerp_(g, 0.05) for g in gradients]
    updates = owned([g.lerp(m, 0.95) for g, m in zip(gradients, momentum)])
    mine = [p.mul(1 - 0.02 * 0.1).add_(update, alpha=-0.02) for p, update in zip(batch, updates)]
for p, g in zip(batch, gradients):
    p.grad = g
torch.optim.Muon(batch, lr=0.02).step()
steps = [[full(p) - old for p, old in zip(some, before)] for some in (mine, batch)]
assert apart(*steps) < 0.05

# %% [markdown]
# ## Your turn 1 · Gather once
#
# `matrices` is a list of DTensors, sharded by rows; one of them has 50 rows, which do not divide among 3 or 4
# ranks. Write `gather_once(matrices)`: it returns a list of DTensors, `newton_schulz` of each, sharded as
# they came, with one all-gather per matrix, in bf16.
#
# <details><summary>Hint</summary>
#
# `.full_tensor()` gathers. `distribute_tensor` cuts; by default it scatters rank 0's tensor to all ranks,
# with `src_data_rank=None` each rank cuts its own and nothing is sent. `DTensor.from_local` takes all shards
# to be of one size unless you pass `shape` and `stride`.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn

once = newton_schulz                                        # newton_schulz counts its runs in the turns
runs = []


def newton_schulz(matrix):
    runs.append(matrix.shape)
    return once(matrix)


def attempt(answer, shapes):
    """Run an answer; return its results, what is right, and what a rank sent beside the matrices in bf16."""
    whole, matrices = sharded(shapes, seed=3)
    right = [once(matrix) for matrix in whole]
    runs.clear()
    with record_collectives(counted) as trace:
        found = answer(list(matrices))
    if not isinstance(found, list | tuple) or not all(isinstance(one, DTensor) for one in found):
        raise NotYet("Return a list of DTensors, one for each matrix.")
    if len(found) != len(right) or [one.shape for one in found] != [one.shape for one in right]:
        raise NotYet("Return as many DTensors as there are matrices, of the same shapes and in the same order.")
    events = [event for event in trace.events if event.is_collective]
    bytes_bf16 = sum(2 * matrix.numel() for matrix in whole) * (world - 1) / world
    return found, right, events, sum(event.sent_bytes for event in events) / bytes_bf16


@turn(1, {
    "results sharded by rows": exactly(3, "A result is whole on each rank: cut it the way its matrix was cut."),
    "largest error": at_most(0.1, "Newton-Schulz ran on a part of a matrix, or a rank keeps other rows of the result than its own."),
    "all-gathers": at_most(3, "Newton-Schulz ran on a DTensor: every product gathers again. Gather before it."),
    "other collectives": exactly(0, more="Every rank has the whole result already, so cutting it must send nothing: see `src_data_rank`."),
    "sent, times an all-gather of each in bf16": at_most(1.2, "More is sent than the matrices in bf16: convert before you gather."),
})
def score_once(gather_once):
    found, right, events, sent = attempt(gather_once, [(48, 64), (50, 64), (96, 24)])
    gathers = sum(event.kind == "all_gather" for event in events)
    return {
        "results sharded by rows": sum(one.placements == (Shard(0),) for one in found),
        "largest error": round(max(apart([one], [two]) for one, two in zip(found, right)), 2),
        "all-gathers": gathers,
        "other collectives": len(events) - gathers,
        "sent, times an all-gather of each in bf16": round(sent, 1),
    }


# %%
# %%turn 1
def gather_once(matrices):                                  # list of DTensors -> list of DTensors
    return None                                             # your lines here


# %% tags=["solution"] turn=1
def gather_once(matrices):
    results = []
    for matrix in matrices:
        whole = newton_schulz(matrix.bfloat16().full_tensor())
        results.append(distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None))
    return results

# %% tags=["right"] turn=1
def gather_once(matrices):                                  # redistribute, there and back
    results = []
    for matrix in matrices:
        whole = matrix.to(torch.bfloat16).redistribute(placements=[Replicate()]).to_local()
        whole = DTensor.from_local(newton_schulz(whole), mesh, [Replicate()], run_check=False)
        results.append(whole.redistribute(placements=[Shard(0)]))
    return results

# %% tags=["right"] turn=1
def gather_once(matrices):                                  # this rank's rows, as torch.chunk cuts them
    def one(matrix):
        whole = newton_schulz(matrix.bfloat16().full_tensor()).contiguous()
        own = whole.chunk(world)[rank].contiguous()
        return DTensor.from_local(own, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    return list(map(one, matrices))

# %% tags=["right"] turn=1
def gather_once(matrices):                                  # by hand: an all-gather of padded shards
    results = []
    for matrix in matrices:
        rows = -(-matrix.size(0) // world)
        mine = torch.zeros(rows, matrix.size(1), dtype=torch.bfloat16, device=device)
        mine[: len(matrix.to_local())] = matrix.to_local()
        whole = torch.empty(rows * world, matrix.size(1), dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(whole, mine)
        whole = newton_schulz(whole[: matrix.size(0)]).float().contiguous()
        results.append(DTensor.from_local(
            whole.chunk(world)[rank], mesh, [Shard(0)], shape=matrix.shape, stride=matrix.stride()
        ))
    return results

# %% tags=["wrong"] turn=1 says="cutting it must send nothing"
def gather_once(matrices):
    return [distribute_tensor(newton_schulz(m.bfloat16().full_tensor()), mesh, [Shard(0)]) for m in matrices]

# %% tags=["wrong"] turn=1 says="convert before you gather"
def gather_once(matrices):
    return [distribute_tensor(newton_schulz(m.full_tensor()), mesh, [Shard(0)], src_data_rank=None) for m in matrices]

# %% tags=["wrong"] turn=1 says="Gather before it"
def gather_once(matrices):
    return [newton_schulz(matrix.bfloat16()).redistribute(placements=[Shard(0)]) for matrix in matrices]

# %% tags=["wrong"] turn=1 says="ran on a part of a matrix"
def gather_once(matrices):
    return [
        DTensor.from_local(newton_schulz(m.to_local()).contiguous(), mesh, [Shard(0)], shape=m.shape, stride=m.stride())
        for m in matrices
    ]

# %% tags=["wrong"] turn=1 says="whole on each rank"
def gather_once(matrices):
    return [DTensor.from_local(newton_schulz(m.bfloat16().full_tensor()), mesh, [Replicate()], run_check=False) for m in matrices]

# %% [markdown]
# ## Your turn 2 · One owner each
#
# Now there are as many matrices of one shape as ranks, with rows that divide. Write `with_owners(matrices)`:
# rank r runs `newton_schulz` once, on the whole `matrices[r]`, and every rank gets its rows of every result.
# A rank sends no more than its shards to the owners, and rows of its result back, in bf16.
#
# <details><summary>Hint</summary>
#
# `dist.all_to_all_single(output, input)` cuts `input` along its first dimension into as many parts as there
# are ranks and sends part r to rank r; `output` has the parts that came, in the order of the ranks.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
@turn(2, {
    "results sharded by rows": exactly(world, "A result is whole on each rank: only its rows belong there."),
    "of its own matrix, under another's index": exactly(0, more="A rank returns rows of its own matrix in place of another's: send each rank its rows of the result."),
    "largest error": at_most(0.1, "Newton-Schulz ran on a part, or on shards that are not put together by rows, in the order of the ranks."),
    "runs of newton_schulz on a rank": exactly(1, less="A rank owns no matrix.", more="A rank computes more than its own matrix."),
    "sent, times an all-gather of one in bf16": at_most(2.1, "More is sent than shards to the owners and back, in bf16."),
})
def score_owners(with_owners):
    found, right, _, sent = attempt(with_owners, [(8 * world, 64)] * world)
    rows = [one.to_local().double() for one in found]
    parts = [part.double() for part in right[rank].chunk(world)]            # the result that this rank owns
    strays = sum(
        any(part.shape == one.shape and (part - one).norm() < 0.1 * part.norm() for part in parts)
        for index, one in enumerate(rows) if index != rank
    )
    return {
        "results sharded by rows": sum(one.placements == (Shard(0),) for one in found),
        "of its own matrix, under another's index": strays,
        "largest error": round(max(apart([one], [two]) for one, two in zip(found, right)), 2),
        "runs of newton_schulz on a rank": len(runs),
        "sent, times an all-gather of one in bf16": round(sent * world, 1),
    }


# %%
# %%turn 2
def with_owners(matrices):                                  # list of DTensors -> list of DTensors
    return None                                             # your lines here


# %% tags=["solution"] turn=2
def with_owners(matrices):
    shards = torch.stack([matrix.to_local() for matrix in matrices]).bfloat16()     # [owner, rows, columns]
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)                                            # [from rank, rows, columns]
    result = newton_schulz(mine.flatten(0, 1)).contiguous()
    dist.all_to_all_single(shards, result.unflatten(0, (world, -1)))                # [of matrix, rows, columns]
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]

# %% tags=["right"] turn=2
def with_owners(matrices):                                  # lists of tensors
    shards = [matrix.to_local().bfloat16() for matrix in matrices]
    mine = [torch.empty_like(shard) for shard in shards]
    dist.all_to_all(mine, shards)
    parts = [part.contiguous() for part in newton_schulz(torch.cat(mine)).chunk(world)]
    dist.all_to_all(shards, parts)
    return [DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for shard in shards]

# %% tags=["right"] turn=2
def with_owners(matrices):                                  # a gather and a scatter for each owner
    results = []
    for owner, matrix in enumerate(matrices):
        shard = matrix.to_local().bfloat16().contiguous()
        parts = [torch.empty_like(shard) for _ in range(world)] if rank == owner else None
        dist.gather(shard, parts, dst=owner)
        if rank == owner:
            parts = [part.contiguous() for part in newton_schulz(torch.cat(parts)).chunk(world)]
        mine = torch.empty_like(shard)
        dist.scatter(mine, parts, src=owner)
        results.append(DTensor.from_local(mine, mesh, [Shard(0)]))
    return results

# %% tags=["right"] turn=2
from torch.distributed._functional_collectives import all_to_all_single

def with_owners(matrices):                                  # functional collectives, and float32 at the end
    shards = torch.cat([matrix.to_local() for matrix in matrices]).bfloat16()
    mine = all_to_all_single(shards, None, None, mesh.get_group())
    back = all_to_all_single(newton_schulz(mine + 0).contiguous(), None, None, mesh.get_group())
    return [DTensor.from_local(part.float().contiguous(), mesh, [Shard(0)]) for part in (back + 0).chunk(world)]

# %% tags=["wrong"] turn=2 says="more than its own matrix"
def with_owners(matrices):                                  # every rank computes all
    wholes = [newton_schulz(matrix.bfloat16().full_tensor()) for matrix in matrices]
    return [distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for whole in wholes]

# %% tags=["wrong"] turn=2 says="in place of another's"
def with_owners(matrices):                                  # nothing is sent back
    shards = torch.stack([matrix.to_local() for matrix in matrices]).bfloat16()
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)
    parts = newton_schulz(mine.flatten(0, 1)).contiguous().chunk(world)
    return [DTensor.from_local(part, mesh, [Shard(0)]) for part in parts]

# %% tags=["wrong"] turn=2 says="shards to the owners and back, in bf16"
def with_owners(matrices):                                  # float32 is sent
    shards = torch.stack([matrix.to_local() for matrix in matrices])
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)
    dist.all_to_all_single(shards, newton_schulz(mine.flatten(0, 1)).float().contiguous())
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]

# %% tags=["wrong"] turn=2 says="not put together by rows"
def with_owners(matrices):                                  # shards side by side
    shards = torch.stack([matrix.to_local() for matrix in matrices]).bfloat16()
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)
    result = newton_schulz(torch.cat(list(mine), dim=1))
    dist.all_to_all_single(shards, torch.stack(result.chunk(world, dim=1)).contiguous())
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]

# %% [markdown]
# In an optimizer, `momentum` is a dict of DTensors like the weights, and `batch` has as many weights of one
# shape as there are ranks. This is `torch.optim.Muon`'s step for square matrices (but for bf16's rounding):
#
# ```python
# for p in batch:
#     momentum[p].lerp_(p.grad, 0.05)
# updates = with_owners([p.grad.lerp(momentum[p], 0.95) for p in batch])
# for p, update in zip(batch, updates):                      # under torch.no_grad()
#     p.mul_(1 - lr * 0.1).add_(update, alpha=-lr)
# ```
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the loss falls slowly, or Newton-Schulz gives `inf` or `nan` ([Moonlight #27](https://github.com/MoonshotAI/Moonlight/issues/27)) | a matrix optimizer got shards (`p.to_local()`) | compare three steps with one process; owners or `full_tensor()` |
# | `Muon only supports 2D parameters` | a bias, norm or convolution in its list; or FSDP1: its parameters are flat, also with `use_orig_params=True` | give those to AdamW; FSDP2 |
# | Muon: `in-place operations that require placement changes are not supported` | a matrix with fewer rows than ranks | give it to AdamW |
# | `got mixed torch.Tensor and DTensor` in `_foreach_…` or `_fused_adamw_` | `ignored_params` in one group with sharded ones | a group for each, and all-reduce the ignored gradients yourself; `clip_grad_norm_` raises, too: combine the two `get_total_norm`, then `clip_grads_with_norm_` on each with the combined norm |
# | with offloaded units the step is slow | parameters on CPU and GPU: the default falls back to a loop ([#187615](https://github.com/pytorch/pytorch/issues/187615)) | pass `fused=True` or `foreach=True`: both group by device |
# | 8-bit states differ after a resume | plain states: every rank loaded the one copy that was stored | DTensor states, or `save_distributed`, which refuses |
#
# ## The rule
#
# Compare three steps on the ranks with one process before you trust an optimizer on shards. Element-wise:
# leave it. Whole matrices: one owner each. States: DTensors, in blocks that no cut touches.
#
# [← lesson 18](18_beyond_forward_and_backward.ipynb) · [lesson 20 →](20_experts.ipynb)

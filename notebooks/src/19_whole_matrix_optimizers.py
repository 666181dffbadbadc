# %% [markdown]
# # 19 · Optimizers that need the whole matrix
#
# Which optimizers are right on shards? **Those that treat each element by itself, such as AdamW and SGD: leave
# them as they are. One that multiplies matrices, such as Muon, needs each matrix whole: give every matrix one
# owner rank. All shards of a matrix go to its owner, which computes once and sends the results back.**

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
                left, width = (matrix, 0.86) if whole else (matrix + 0.215 * rank, 0.215)
                axes.barh(rank, width, left=left, height=0.8, color=plots.RANK_COLORS[matrix])
    axes.set(title=title, ylim=(3.6, -0.6))
    axes.set_yticks(RANKS, [f"rank {rank}" for rank in RANKS] if axes is panels[0] else [""] * 4)
    axes.set_xticks([matrix + 0.43 for matrix in RANKS], [f"matrix {matrix}" for matrix in RANKS], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Four matrices on four ranks: sharded, gathered on every rank, and with one owner each.")

# %% [markdown]
# A drawing of four matrices on four ranks. What a rank holds of a matrix is coloured. AdamW works on the
# shards at rest. Gathered, every rank holds and computes everything. With owners, each rank holds and computes
# one whole matrix.

# %% tags=["card"]
lesson.card(
    19,
    learn="tell which optimizers may see shards, run Muon with one owner per matrix, and save 8-bit states",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)",
    minutes=(1, 10, 25),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It takes one optimizer step on shards and
# the same step in one process, and compares the weights. **Muon** replaces the gradient of a weight matrix by
# the nearest matrix whose singular values are all about 1.
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
# "Off by 0.8" is 80% of the length of the right step, and there is no error message. `torch.optim.Muon` on the
# parameters of `fully_shard` is right and pays with 48 collectives for three matrices. All of this is about
# FSDP2, whose parameters are DTensors; FSDP1 has a folded cell below.
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
# The first row is **element-wise**: each new weight follows from its own gradient and its own state. The other
# five are not. LBFGS flattens all parameters into one vector, which a DTensor does only if its rows divide
# among the ranks. Adafactor and Rprop raise `in-place operations that require placement changes are not
# supported`. Of the optimizers that need the whole matrix, `Muon` runs: DTensor finds what each product
# needs and sends it. Written for plain tensors and given `p.to_local()`, it would not.
#
# ## What the 48 collectives send
#
# Muon's iteration is named after Newton and Schulz. It is three products, five times, in bf16:

# %%
# %%ranks
def newton_schulz(matrix):                                  # [rows, columns] -> bf16[rows, columns]
    if matrix.size(0) > matrix.size(1):
        return newton_schulz(matrix.T).T                    # the smaller of the two squares
    x = matrix.bfloat16()
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


# %% [markdown]
# Given a DTensor, each product of a row-sharded matrix gathers a factor; for a tall matrix the small square is
# added up in an all-reduce instead. Three ways to do the same for as many matrices as there are ranks:
# `by_dtensor` calls the function above on DTensors, `gathered` gathers each matrix once and computes it on
# every rank, `owned` gives each matrix an owner (both folded; they are your turns). `measure` (folded) counts
# what a rank sends at least, around a ring, and its own share of the FLOPs.

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
whole, _ = sharded(SHAPES.values())
mixed = [matrix[:, torch.randperm(matrix.size(1)).to(device)] for matrix in whole]      # the same, in another order
noise = max(apart([newton_schulz(b) @ b.bfloat16().T], [newton_schulz(a) @ a.bfloat16().T]) for a, b in zip(whole, mixed))

# %%
cost, noise, world = *ranks.get("cost, noise")[0], len(ranks.get("0"))
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
assert all(cost[shape, "by_dtensor"][1] > 2 * cost[shape, "gathered"][1] for shape in shapes)
plots.show(fig, alt="Collectives, KiB and FLOPs of three ways, for tall, square and wide matrices.")

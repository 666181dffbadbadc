# %% [markdown]
# # 19 · Optimizers that need the whole matrix
#
# Which optimizers are right on shards, and what do I do with one that needs the whole matrix? **AdamW, SGD and
# all others that treat each element by itself are right on any shard: leave them as they are (by default Rprop
# alone raises on `fully_shard`'s parameters). Give `torch.optim.Muon` these parameters, never their local parts:
# its step is right, but it sends a square matrix 15 times, a large one 20 to 25 times. Give each matrix one owner
# rank, as `OwnedMuon` below does, and a step takes two collectives for each parameter group.**

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

RANKS = range(4)
fig, panels = plots.figure(3, width=9.0, height=2.3)
for axes, title in zip(panels, ("at rest, and for AdamW", "gathered: all compute all", "owners: each computes one")):
    for rank in RANKS:
        for matrix in RANKS:
            whole = title.startswith("gathered") or (title.startswith("owners") and rank == matrix)
            axes.barh(rank, 0.86, left=matrix, height=0.8, color=plots.FAINT)
            if title.startswith("at rest") or whole:
                y, height = (rank, 0.8) if whole else (rank - 0.3 + 0.2 * rank, 0.2)
                axes.barh(y, 0.86, left=matrix, height=height, color=plots.RANK_COLORS[matrix])
    axes.set(title=title, ylim=(3.6, -0.6))
    axes.set_yticks(RANKS, [f"rank {rank}" for rank in RANKS] if axes is panels[0] else [""] * 4)
    axes.set_xticks([matrix + 0.43 for matrix in RANKS], [f"gradient {matrix}" for matrix in RANKS], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
plots.show(fig, alt="Gradients of four matrices on four ranks: sharded, gathered on every rank, and with one owner each.")

# %% [markdown]
# A drawing of the gradients of four weight matrices on four ranks; the part that a rank holds is coloured. With
# owners, the pieces of a gradient go to its owner, and rows of the step come back; the weights stay where they are.

# %% tags=["card"]
lesson.card(
    19,
    learn="tell which optimizers may see shards, run Muon with one owner per matrix, and save 8-bit states",
    needs="[lesson 0](00_fsdp_from_scratch.ipynb), [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb)",
    minutes=(1, 38, 30),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It takes one optimizer step on shards
# and the same step in one process, and compares the weights. **Muon** mixes each weight matrix's gradient
# with a running mean of its gradients. It then brings all but the smallest singular values of that matrix
# near 1 (0.5 to 1.5), so that the step is about as long in every direction. A shard has other singular values.
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
# def step(optimizer_class, sharded=True, plain=False):
#     torch.manual_seed(0)                                     # the same weights and samples on every rank
#     model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(3)])
#     before = torch.cat([weight.detach() for weight in model.parameters()])
#     x, y = torch.randn(2, 1920, 96)
#     if sharded:
#         for part in [*model, model]:
#             fully_shard(part, mesh=mesh)
#         own = slice(dist.get_rank(), None, dist.get_world_size())
#         x, y = x[own], y[own]                                # other samples on each rank
#     (model(x) - y).square().mean().backward()
#     weights = list(model.parameters())
#     if plain:                                                # the mistake: local parts, as plain tensors
#         weights = [nn.Parameter(weight.detach().to_local()) for weight in weights]
#         for shard, weight in zip(weights, model.parameters()):
#             shard.grad = weight.grad.to_local()
#     optimizer = optimizer_class(weights, lr=0.01)
#     if not sharded:
#         optimizer.step()
#         return torch.cat(weights) - before
#     with record_collectives(model) as trace:
#         optimizer.step()
#     return torch.cat([weight.full_tensor() for weight in model.parameters()]) - before, len(trace.collectives)
#
#
# AdamW, Muon = torch.optim.AdamW, torch.optim.Muon
# runs = {"AdamW": (AdamW, False), "Muon on plain shards": (Muon, True), "Muon on fully_shard's": (Muon, False)}
# for name, (kind, plain) in runs.items():
#     right = step(kind, sharded=False)                        # one process, all samples
#     found, count = step(kind, plain=plain)
#     error = (found - right).norm() / right.norm()
#     if dist.get_rank() == 0:
#         print(f"{name:22} {count:2} collectives, the step is off by {error:.1f}")
# dist.destroy_process_group()
# ```
# ```text
# AdamW                   0 collectives, the step is off by 0.0
# Muon on plain shards    0 collectives, the step is off by 0.8
# Muon on fully_shard's  48 collectives, the step is off by 0.0
# ```
#
# "Off by 0.8" is 80% of the length of the right step, and nothing raises. Plain shards come from
# `p.to_local()`. The parameters of `fully_shard` are DTensors: they know the whole matrix's shape, and an
# operation that needs more than the local rows fetches it. That makes the last line right, and it costs 48
# collectives for three matrices. This lesson turns the 48 into 2.
#
# ## What one new weight depends on
#
# An optimizer is right on plain shards if all that a new weight depends on lies on that weight's rank. To see
# it, change one element of the gradient and look which weights change, in one process:

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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_utils import record_collectives, shard

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (world,))
counted = fully_shard(nn.Linear(8, 8, device=device), mesh=mesh)        # record_collectives asks for a model


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def apart(found, right):
    """How far the found tensors are from the right ones, as a share of the right ones' length."""
    found, right = (torch.cat([full(one).flatten() for one in some]) for some in (found, right))
    return ((found - right).norm() / right.norm()).item()

# %%
# %%ranks
def reach(optimizer_class):
    """Return which of 24 x 24 weights change when one element of the gradient does: bool[24, 24]."""
    def weights(change):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(24, 24))
        optimizer = optimizer_class([weight], lr=0.1)
        for _ in range(2):                                  # the second step sees the state that the first left
            weight.grad = torch.randn(24, 24)
            weight.grad[8, 12] += change
            optimizer.step()
        return weight.detach()
    return weights(change=10.0) != weights(change=0.0)


reached = {kind.__name__: reach(kind) for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon)}

# %%
reached = ranks.get("reached")[0]
assert [int(changed.sum()) for changed in reached.values()] == [1, 576, 576]
fig, panels = plots.figure(len(reached), width=9.0, height=2.7)
for axes, (name, changed) in zip(panels, reached.items()):
    axes.imshow(changed, cmap="Blues", vmin=0, vmax=1.3)
    axes.hlines([5.5, 11.5, 17.5], -0.5, 23.5, color=plots.RANK_COLORS[1])              # four ranks, six rows each
    axes.set(title=f"{name}: {int(changed.sum())} of {changed.numel()}", xticks=[], yticks=[])
plots.show(fig, alt=f"Weights that change with one element of the gradient, for {', '.join(reached)}.")

# %% [markdown]
# Blue are the weights that changed, orange the cuts between four ranks. AdamW is **element-wise**: a new
# weight depends on its own gradient and state alone, and no cut can come between. Adafactor (means of rows
# and columns, and the update's norm) and Muon carry one element into the whole matrix, across every cut.
#
# As DTensors the parameters can fetch what is missing. Do they? All of `torch.optim` but `SparseAdam`, three
# steps each in float64 under FSDP2 against one process; 96 rows divide among 2, 3 and 4 ranks, 53 do not:

# %%
# %%ranks
def change(optimizer_class, rows, sharded):
    """Return how three steps change two matrices."""
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
        return value                                        # LBFGS may stop by it: give it the ranks' mean
    for _ in range(3):
        optimizer.step(loss)
    return [full(weight) - begin for weight, begin in zip(model.parameters(), before)]


def verdict(optimizer_class, rows):
    try:
        error = apart(change(optimizer_class, rows, sharded=True), change(optimizer_class, rows, sharded=False))
    except RuntimeError:                                    # of a DTensor's operation, the same on every rank
        return "raises"
    return "equal" if error < 1e-8 else "equal up to bf16" if error < 0.05 else f"off by {error:.1f}"


names = {name for name, one in vars(torch.optim).items() if isinstance(one, type)} - {"Optimizer", "SparseAdam"}
told = {name: [verdict(getattr(torch.optim, name), rows) for rows in (96, 53)] for name in sorted(names)}

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
# - The first row is element-wise. So is Rprop, but it and Adafactor write in place in a way that DTensor
#   refuses: `in-place operations that require placement changes are not supported`. With `foreach=True`, the
#   default on GPUs, Rprop says that `aten._foreach_copy_.default` has no `sharding strategy registered`.
# - LBFGS flattens all parameters into one vector, which DTensor does only if the rows divide among the ranks.
# - Muon computes in bf16, so two orders of summation differ by a percent or so.
#
# Nothing in this table is wrong without an error. On plain shards, as `to_local()` makes them, it happens. Of
# optimizers elsewhere, Lion is element-wise; LARS and LAMB take the norm of a whole matrix; SOAP and Shampoo
# multiply matrices. For yours, ask a function:
#
# ## Your turn 1 · Is it right on plain shards?
#
# Write `right_on_shards(optimizer_class)`: True if the optimizer, made by `optimizer_class([parameter],
# lr=0.01)`, takes the same steps on a shard of rows as on the whole matrix, False if not. No process group
# is needed: make a matrix; a shard is a slice of it, a plain tensor.
#
# <details><summary>Hint</summary>
#
# Two parameters, two optimizers, and the same gradients for the rows that both have. Some optimizers take the
# right first step and go wrong later. Two programs differ by rounding; a wrong step differs by percents.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, at_most, exactly, turn


class ColumnMomentum(torch.optim.Optimizer):                # in codes of 4 bits, with one scale for each column
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in [weight for weight in self.param_groups[0]["params"] if weight.grad is not None]:
            momentum = weight.grad + 0.9 * self.state[weight].get("momentum", 0)
            scales = momentum.abs().amax(0) / 7 + 1e-12
            self.state[weight]["momentum"] = (momentum / scales).round() * scales
            weight.sub_(momentum, alpha=self.param_groups[0]["lr"])


def on_slices(kind, params, lr):
    optimizer = kind(params, lr=lr)
    if any(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"]):
        raise NotYet("The optimizer got a DTensor, which fetches other rows: a shard here is a slice, a plain tensor.")
    return optimizer


@turn(1, {
    "element-wise ones, accepted": exactly(4, "An element-wise optimizer was refused: its shard must have the rows and the gradients that it is compared with. (Rprop sees only a gradient's sign; the class's name tells nothing.)"),
    "Muon and Adafactor, refused": exactly(2, "Muon or Adafactor was accepted: the two parameters share memory, or the tolerance is larger than a step."),
    "one that errs from step 2 on, refused": exactly(1, "An optimizer with momentum in few bits, one scale for each column, was accepted: take three steps, with random gradients, on a shard of rows, and compare to within 1e-4."),
})
def score_right(right_on_shards):
    found, optim = {}, torch.optim
    for name, kinds in {
        "element-wise ones, accepted": (optim.SGD, optim.AdamW, optim.Adagrad, optim.Rprop),
        "Muon and Adafactor, refused": (optim.Muon, optim.Adafactor),
        "one that errs from step 2 on, refused": (ColumnMomentum,),
    }.items():
        told = [right_on_shards(lambda params, lr, kind=kind: on_slices(kind, params, lr)) for kind in kinds]  # no names
        if any(str(one) not in ("True", "False", "tensor(True)", "tensor(False)") for one in told):
            raise NotYet("Return True or False.")
        found[name] = sum(bool(one) == ("accepted" in name) for one in told)
    if not any(found.values()):
        raise NotYet("All seven answers are inverted: return True where the steps are the same.")
    return found

# %%
# %%turn 1
def right_on_shards(optimizer_class):                       # class -> bool
    return None                                             # your lines here

# %% tags=["solution"] turn=1
def right_on_shards(optimizer_class):
    matrix, gradients, trained = torch.randn(96, 48), torch.randn(3, 96, 48), []
    for rows in (slice(0, 96), slice(24, 48)):              # the matrix, a shard
        weight = nn.Parameter(matrix[rows].clone())
        optimizer = optimizer_class([weight], lr=0.01)
        for gradient in gradients:
            weight.grad = gradient[rows].clone()
            optimizer.step()
        trained.append(weight.detach())
    whole, shard = trained
    return torch.allclose(whole[24:48], shard, atol=1e-4)

# %% tags=["right"] turn=1
def right_on_shards(optimizer_class):                       # all shards, put together
    def train(parts, gradients):
        parts = [nn.Parameter(part.clone()) for part in parts]
        optimizers = [optimizer_class([part], lr=0.01) for part in parts]
        for gradient in gradients:
            for part, piece, optimizer in zip(parts, gradient.chunk(len(parts)), optimizers):
                part.grad = piece.clone()
                optimizer.step()
        return torch.cat([part.detach() for part in parts])
    matrix, gradients = torch.randn(64, 32), torch.randn(5, 64, 32)
    return torch.allclose(train([matrix], gradients), train(matrix.chunk(4), gradients), atol=1e-5)

# %% tags=["right"] turn=1
def right_on_shards(optimizer_class):                       # what far gradients change: no shard at all
    def rows(scale):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(32, 16))
        optimizer = optimizer_class([weight], lr=0.01)
        for _ in range(3):
            weight.grad = torch.cat([torch.randn(16, 16), scale * torch.randn(16, 16)])
            optimizer.step()
        return weight.detach()[:16]
    return torch.equal(rows(1.0), rows(20.0))

# %% tags=["right"] turn=1
def right_on_shards(optimizer_class):                       # gradients of a loss, this rank's rows
    def train(matrix, targets):
        weight = nn.Parameter(matrix.clone())
        optimizer = optimizer_class([weight], lr=0.01)
        for target in targets:
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
        return weight.detach()
    matrix, targets = torch.randn(96, 32).double(), torch.randn(4, 96, 32).double()
    shard = train(matrix.chunk(world)[rank], [target.chunk(world)[rank] for target in targets])
    return (shard - train(matrix, targets).chunk(world)[rank]).abs().max() < 1e-4

# %% tags=["wrong"] turn=1 says="on a shard of rows"
def right_on_shards(optimizer_class):                       # a shard of columns
    matrix, gradients, trained = torch.randn(96, 48), torch.randn(3, 96, 48), []
    for columns in (slice(48), slice(12)):
        weight = nn.Parameter(matrix[:, columns].clone())
        optimizer = optimizer_class([weight], lr=0.01)
        for weight.grad in gradients[:, :, columns].clone():
            optimizer.step()
        trained.append(weight.detach()[:, :12])
    return torch.allclose(*trained, atol=1e-4)

# %% tags=["wrong"] turn=1 says="only a gradient's sign"
def right_on_shards(optimizer_class):                       # Rprop: a larger gradient of the same sign
    return reach(optimizer_class).sum() == 1

# %% tags=["wrong"] turn=1 says="the class's name tells nothing"
def right_on_shards(optimizer_class):                       # by name
    return optimizer_class.__name__ in ("SGD", "AdamW", "Adagrad", "Rprop")

# %% tags=["wrong"] turn=1 says="inverted"
def right_on_shards(optimizer_class):                       # True for those that need the matrix
    return reach(optimizer_class).sum() > 1

# %% tags=["wrong"] turn=1 says="a slice, a plain tensor"
def right_on_shards(optimizer_class):                       # DTensors
    weight = nn.Parameter(distribute_tensor(torch.randn(96, 48), mesh, [Shard(0)]))
    return optimizer_class([weight], lr=0.01).step() is None

# %% tags=["wrong"] turn=1 says="the rows and the gradients"
def right_on_shards(optimizer_class):                       # no gradient for the shard
    matrix, gradients = torch.randn(96, 48), torch.randn(3, 96, 48)
    whole, shard = nn.Parameter(matrix.clone()), nn.Parameter(matrix[:24].clone())
    for weight in (whole, shard):
        optimizer = optimizer_class([weight], lr=0.01)
        for whole.grad in gradients:
            optimizer.step()
    return torch.allclose(whole[:24], shard, atol=1e-4)

# %% tags=["wrong"] turn=1 says="take three steps"
def right_on_shards(optimizer_class):                       # one step
    matrix, gradient, trained = torch.randn(96, 48), torch.randn(96, 48), []
    for rows in (slice(96), slice(24)):
        weight = nn.Parameter(matrix[rows].clone())
        weight.grad = gradient[rows].clone()
        optimizer_class([weight], lr=0.01).step()
        trained.append(weight.detach()[:24])
    return torch.allclose(*trained, atol=1e-4)

# %% tags=["wrong"] turn=1 says="share memory"
def right_on_shards(optimizer_class):                       # the shard is a view of the matrix
    matrix, gradients = torch.randn(96, 48), torch.randn(3, 96, 48)
    for rows in (slice(96), slice(24)):
        weight = nn.Parameter(matrix[rows])
        optimizer = optimizer_class([weight], lr=0.01)
        for weight.grad in gradients[:, rows].clone():
            optimizer.step()
    return torch.allclose(matrix[:24], weight)

# %% tags=["wrong"] turn=1 says="the rows and the gradients"
def right_on_shards(optimizer_class):                       # each has gradients of its own
    matrix, trained = torch.randn(96, 48), []
    for rows in (slice(96), slice(24)):
        weight = nn.Parameter(matrix[rows].clone())
        optimizer = optimizer_class([weight], lr=0.01)
        for weight.grad in torch.randn(3, 96, 48)[:, rows]:
            optimizer.step()
        trained.append(weight.detach()[:24])
    return torch.allclose(*trained, atol=1e-4)

# %% [markdown]
# ## Where the 48 collectives come from
#
# Muon's iteration, by Newton and Schulz, is a norm and then five times three products, in bf16. On a DTensor
# that is cut by rows an operation that needs other rows fetches them, and for a square matrix that is each of
# the 16. What is sent depends on the shape:

# %%
# %%ranks
def sharded(*shape):
    return distribute_tensor(torch.randn(shape).to(device), mesh, [Shard(0)])


def sent_by_muon(*shape):                                   # collectives, and KiB that a rank sends around a ring
    weight = nn.Parameter(sharded(*shape))
    weight.grad = sharded(*shape)
    with record_collectives(counted) as trace:              # it asks for an FSDP model; any will do
        torch.optim.Muon([weight]).step()
    return len(trace.collectives), sum(event.sent_bytes for event in trace.collectives) / 1024


muon_sent = {shape: sent_by_muon(*shape) for shape in [(96, 96), (512, 512), (53, 96), (128, 512), (512, 128)]}

# %%
(muon_sent, world), rows = ranks.get("muon_sent, world")[0], []
for (height, width), (count, kib) in muon_sent.items():
    one_gather = 2 * height * width * (world - 1) / world / 1024
    rows.append([f"{height} x {width}", count, round(kib / one_gather)])
assert all(11 <= count <= 16 and 5 <= times <= 15 for _, count, times in rows)
Table(["matrix", "collectives", "bytes sent, times one all-gather in bf16"], rows)

# %% [markdown]
# 640 x 640 sends as often as 512; a square of 768 took **26 collectives** and the bytes of 30 all-gathers (measured
# once, on four CPU ranks). Ten of the 26 are all-to-alls, which DTensor replaces by all-gathers on CPU ranks. GPUs
# do all-to-alls: calculated, they send the bytes of 20 + 10 / ranks all-gathers. The simplest mend gathers each
# matrix once, before the iteration:

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


def gathered(matrices):                                     # list of DTensors, cut by rows -> the same in bf16
    wholes = [newton_schulz(matrix.bfloat16().full_tensor()) for matrix in matrices]
    # src_data_rank=None: each rank cuts its own copy; by default rank 0 scatters its own to all
    return [distribute_tensor(one, m.device_mesh, [Shard(0)], src_data_rank=None) for one, m in zip(wholes, matrices)]

# %% [markdown]
# Now every rank computes every matrix. Is that too much? Of a square matrix with m rows Newton-Schulz takes
# 30 m³ FLOPs, and forward and backward take 6 m² for each token. So it adds 5 m / tokens to the work on this
# matrix. The tokens are one rank's in a step if every rank computes the matrix, and all ranks' if one does.
# Calculated for 8,192 tokens a rank and step:
#
# | m | every rank computes it | one of 8 ranks | one of 64 ranks |
# |--:|--:|--:|--:|
# | 768 | 47% | 6% | 1% |
# | 2,048 | 125% | 16% | 2% |
# | 8,192 | 500% | 62% | 8% |
#
# From m = 1,639 on the gathered iteration takes more FLOPs than the training of the matrix. Hence owners:
# rank r computes matrix r. On more than two ranks they also send less.
#
# ## Your turn 2 · One owner each
#
# `matrices` are DTensors, cut by rows: as many as there are ranks, of one shape, with rows that divide. Write
# `with_owners(matrices)`: rank r runs `newton_schulz` once, on the whole `matrices[r]`, and the function
# returns all results as DTensors, cut as they came. A rank sends no more than its shards to the owners, and
# rows of its result back, in bf16.
#
# <details><summary>Hint</summary>
#
# `dist.all_to_all_single(output, input)` cuts `input` along its first dimension into as many parts as there
# are ranks and sends part r to rank r; `output` has the parts that came, in the order of the ranks.
# `DTensor.from_local(rows, mesh, [Shard(0)])` makes a DTensor of each rank's rows.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
once, runs = newton_schulz, []                              # newton_schulz counts its runs


def newton_schulz(matrix):
    runs.append(matrix.shape)
    return once(matrix)


@turn(2, {
    "results sharded by rows": exactly(world, "A result is whole on each rank: only its rows belong there."),
    "of its own matrix, under another's index": exactly(0, more="A rank returns rows of its own matrix in place of another's: send each rank its rows of the result."),
    "largest error": at_most(0.1, "Newton-Schulz ran on a part, or on shards that are not put together by rows, in the order of the ranks; or each rank called `full_tensor()` of another matrix: the ranks' calls are paired by order."),
    "runs of newton_schulz on a rank": exactly(1, less="A rank owns no matrix.", more="A rank computes more than its own matrix."),
    "sent, times an all-gather of one in bf16": at_most(2.1, "More is sent than shards to the owners and back, in bf16. (From rows to columns, DTensor's `redistribute` gathers on CPU ranks: use `all_to_all_single`.)"),
})
def score_owners(with_owners):
    torch.manual_seed(3)
    matrices = [sharded(8 * world, 64) for _ in range(world)]
    whole = [matrix.full_tensor() for matrix in matrices]
    right = [once(matrix) for matrix in whole]
    runs.clear()
    with record_collectives(counted) as trace:
        found = with_owners(matrices)
    if not isinstance(found, list | tuple) or not all(isinstance(one, DTensor) for one in found):
        raise NotYet("Return a list of DTensors, one for each matrix.")
    if [one.shape for one in found] != [one.shape for one in right]:
        raise NotYet("Return as many DTensors as there are matrices, of the same shapes and in the same order.")
    parts = [part.double() for part in right[rank].chunk(world)]            # the result that this rank owns
    rows = [one.to_local().double() for index, one in enumerate(found) if index != rank]
    strays = sum(any(one.shape == part.shape and (part - one).norm() < 0.1 * part.norm() for part in parts) for one in rows)
    sent = sum(event.sent_bytes for event in trace.collectives)
    return {
        "results sharded by rows": sum(one.placements == (Shard(0),) for one in found),
        "of its own matrix, under another's index": strays,
        "largest error": round(max(apart([one], [two]) for one, two in zip(found, right)), 2),
        "runs of newton_schulz on a rank": len(runs),
        "sent, times an all-gather of one in bf16": round(sent / (2 * whole[0].numel() * (world - 1) / world), 1),
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

# %% tags=["wrong"] turn=2 says="the ranks' calls are paired by order"
def with_owners(matrices):                                  # each rank gathers its own matrix
    rows = list(newton_schulz(matrices[rank].bfloat16().full_tensor()).chunk(world))
    shards = [torch.empty_like(part) for part in rows]
    dist.all_to_all(shards, rows)
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]

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

# %% tags=["wrong"] turn=2 says="`redistribute` gathers on CPU ranks"
def with_owners(matrices):                                  # on GPUs an all-to-all each way
    side_by_side = torch.cat([matrix.to_local() for matrix in matrices], dim=1).bfloat16()
    mine = DTensor.from_local(side_by_side, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]).to_local()
    result = DTensor.from_local(newton_schulz(mine), mesh, [Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
    return [DTensor.from_local(part.contiguous(), mesh, [Shard(0)]) for part in result.chunk(world, dim=1)]

# %% tags=["wrong"] turn=2 says="not put together by rows"
def with_owners(matrices):                                  # shards side by side
    shards = torch.stack([matrix.to_local() for matrix in matrices]).bfloat16()
    mine = torch.empty_like(shards)
    dist.all_to_all_single(mine, shards)
    result = newton_schulz(torch.cat(list(mine), dim=1))
    dist.all_to_all_single(shards, torch.stack(result.chunk(world, dim=1)).contiguous())
    return [DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards]

# %% [markdown]
# ## A Muon to take home
#
# `owned` takes any list of matrices, also with rows that do not divide: matrix i belongs to rank i modulo the
# ranks (so sort the list by size first), and all travel in the same two collectives. For a file of yours, copy
# the cell with the first `newton_schulz` too, both without their line `%%ranks`, and begin with `import torch`,
# `import torch.distributed as dist` and `from torch.distributed.tensor import DTensor, Shard, distribute_tensor`.

# %%
# %%ranks
def on_each_rank(matrix, world):                            # elements of the matrix that each rank holds
    rows = [len(part) for part in torch.arange(matrix.size(0)).chunk(world)]
    return [count * matrix.size(1) for count in rows + [0] * (world - len(rows))]


def owned(matrices):                                        # list of DTensors, cut by rows -> the same in bf16
    mesh = matrices[0].device_mesh
    if any((matrix.device_mesh, matrix.placements) != (mesh, (Shard(0),)) for matrix in matrices):
        raise ValueError("owned: expected matrices cut by rows, on one mesh of one dimension")
    rank, world, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    # Shards to the owners. out: by owner and then by matrix; got: by the rank that sent it, then by matrix.
    order = [i for owner in range(world) for i in range(owner, len(matrices), world)]
    shards = [matrices[i].to_local().bfloat16().flatten() for i in order]
    mine = matrices[rank::world]
    sizes = [on_each_rank(matrix, world) for matrix in mine]
    to = [sum(m.to_local().numel() for m in matrices[owner::world]) for owner in range(world)]
    come = [sum(size[source] for size in sizes) for source in range(world)]
    out = torch.cat(shards)
    got = out.new_empty(sum(come))
    dist.all_to_all_single(got, out, come, to, group=group)
    # Compute each own matrix, put together from its rows.
    pieces = got.split([size[source] for source in range(world) for size in sizes])
    wholes = [torch.cat(pieces[i :: len(mine)]).view(matrix.shape) for i, matrix in enumerate(mine)]
    results = [newton_schulz(whole).flatten().split(size) for whole, size in zip(wholes, sizes)]
    # Rows of the results back, the same way.
    back = torch.cat([got[:0], *(result[source] for source in range(world) for result in results)])
    dist.all_to_all_single(out, back, to, come, group=group)
    parts = dict(zip(order, out.split([len(shard) for shard in shards])))
    return [
        DTensor.from_local(parts[i].view(-1, m.size(1)), mesh, [Shard(0)], shape=m.shape, stride=m.stride())
        for i, m in enumerate(matrices)
    ]


class OwnedMuon(torch.optim.Optimizer):
    way = staticmethod(owned)

    def __init__(self, params, lr=1e-3, momentum=0.95, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None           # a trainer may run forward and backward in it
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            updates, lr, beta = [], group["lr"], group["momentum"]
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)         # a DTensor, as the weight is
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - beta)
                updates.append(weight.grad.lerp(momentum, beta))
            for weight, update in zip(weights, self.way(updates) if updates else []):
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * max(1, weight.size(0) / weight.size(1)) ** 0.5)
        return loss


class GatheredMuon(OwnedMuon):                              # to compare
    way = staticmethod(gathered)

# %% [markdown]
# `weight.add_` scales the learning rate by the full matrix's shape, as torch's Muon does by default. Does the
# class do what `torch.optim.Muon` does in one process? Three steps of a small Llama. Muon is for the matrices
# inside the blocks; embeddings, the head and norms go to AdamW. Build the groups after sharding, by name.

# %%
# %%ranks
from transformers import LlamaConfig, LlamaForCausalLM


def trained(muon_class, on_ranks=True):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 56, "intermediate_size": 90, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(device)
    ids = torch.randint(96, (4 * world, 16)).to(device)
    if on_ranks:
        shard(model, mesh=mesh)
        ids = ids.chunk(world)[rank]
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    hidden.sort(key=lambda p: p.numel())                    # so that the owners share the large ones
    ends = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." not in name]
    norms = {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.001, "weight_decay": 0.0}
    muon, adamw = muon_class(hidden, lr=0.02), torch.optim.AdamW([{"params": ends, "lr": 0.003}, norms])
    before = [full(p).clone() for p in hidden]
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        with record_collectives(counted) as trace:
            muon.step()
        adamw.step()
        model.zero_grad()
    sent = [event.sent_bytes for event in trace.collectives]
    return [full(p) - begin for p, begin in zip(hidden, before)], len(sent), round(sum(sent) / 1024)


right, *_ = trained(torch.optim.Muon, on_ranks=False)
muons = {}
for kind in (torch.optim.Muon, GatheredMuon, OwnedMuon):
    moved, *sent = trained(kind)
    muons[kind.__name__] = *sent, apart(moved, right)

# %%
muons = ranks.get("muons")[0]
assert [muons[name][0] for name in ("GatheredMuon", "OwnedMuon")] == [14, 2]
head = ["14 matrices", "collectives of a step", "KiB sent by a rank", "off from one process by"]
Table(head, [[name, count, kib, f"{error:.2f}"] for name, (count, kib, error) in muons.items()])

# %% [markdown]
# All three take the steps of one process but for bf16's rounding. On four ranks the class sends a twentieth of
# what `torch.optim.Muon` sends. Its momentum is a DTensor, so `save_distributed(folder, model, [muon, adamw],
# step=…)` saves both optimizers, for any number of ranks. A group for each block bounds the memory that a step
# takes, at two collectives a group. Matrices that are not cut by rows, or lie on two mesh dimensions, raise an
# error. On GPUs (not run here) `Muon` of [microsoft/dion](https://github.com/microsoft/dion) and torchtitan's
# `DistributedMuon` ([#4060](https://github.com/pytorch/torchtitan/pull/4060)) hide all-to-alls behind computation.
#
# ## Between one element and the matrix: blocks
#
# **8-bit optimizers** store a state as 8-bit codes with one scale for each block of values, and Shampoo may
# compute with blocks of a large matrix. They are right on plain shards if no cut goes through a block: blocks
# along a row are right; turn 1's 4-bit momentum, whose blocks are whole columns, is not. With "the block is my
# shard", another number of ranks is another optimizer, and nothing warns you. Choose blocks whose rows
# divide the shard's for every number of ranks that you may use.
#
# ## 8-bit states in a checkpoint
#
# The **checkpoint** needs care, too: codes and scales are often plain tensors of a rank. Momentum in 8 bits,
# saved and loaded on two ranks, with shards of one size (measured by tests/test_optimizer_states.py):
#
# | saved by | states are plain tensors of each rank | states are DTensors |
# |:--|:--|:--|
# | torch.distributed.checkpoint | **no error, wrong values** on one rank or more | right, but codes come back in float32 |
# | `save_distributed` | refused | right, codes in int8 |
#
# PyTorch takes a plain tensor to be the same on all ranks, stores one rank's, and every rank loads it. Its
# `Optimizer.load_state_dict` converts each state but `step` to the dtype of a floating-point parameter. Not run
# here: bitsandbytes' kernels know no DTensors, and issues report errors under FSDP2, in the step
# ([#1633](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633)) and in the save
# ([#1732](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1732)). torchao's `AdamW8bit` keeps
# DTensors; which states it quantizes depends on the shards' size ([#4912](https://github.com/pytorch/ao/issues/4912)).
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | the loss falls slowly, without an error | a matrix optimizer got shards (`p.to_local()`) | turn 1's function tells whether the optimizer may see shards; owners or `full_tensor()` mend it |
# | `Muon only supports 2D parameters` | a bias, norm or convolution in its list; or FSDP1: its parameters are flat, also with `use_orig_params=True` | give those to AdamW; FSDP2 |
# | `in-place operations that require placement changes are not supported` | Adafactor or Rprop on DTensors; or Muon on a matrix with fewer rows than ranks | AdamW; or an owner for the matrix |
# | `got mixed torch.Tensor and DTensor` in `_foreach_…` or `_fused_adamw_` | `ignored_params` in one group with sharded ones | a group for each, and all-reduce the ignored gradients yourself |
# | 8-bit states differ after a resume | plain states: every rank loaded the one copy that was stored | DTensor states, or `save_distributed`, which refuses |
#
# ## The rule
#
# Element-wise: leave it. A block: no cut through it. The whole matrix: one owner each. Before you trust an
# optimizer on shards, plain or DTensors, compare three steps with one process.
#
# [← lesson 18](18_beyond_forward_and_backward.ipynb) · [lesson 20 →](20_experts.ipynb)

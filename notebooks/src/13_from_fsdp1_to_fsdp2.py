# %% [markdown]
# # 13 · From FSDP1 to FSDP2
#
# What do you write with `fully_shard` (FSDP2) for what you have in `FullyShardedDataParallel` (FSDP1), and
# where are the two **not** the same? Look names up in the first table below, then check your program against
# the second: **unused parameters, accumulation, frozen layers, BatchNorm, padding and the optimizer's state
# differ**. PyTorch's [tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html) calls
# FSDP1 deprecated. If you never used FSDP1, skip this lesson.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

SIZES = {"norm": 96, "up.weight": 9216, "up.bias": 192, "down.weight": 9216, "down.bias": 48}
total, end = sum(SIZES.values()), 0
fig, (axes,) = plots.figure(width=8.5, height=2.2)


def quarters(row, left, size):
    for owner in range(4):
        axes.barh(row, size / 4, left=left + owner * size / 4, height=0.55, color=plots.RANK_COLORS[owner])


quarters(0, 0, total)
for name, size in SIZES.items():
    quarters(1, end, size)
    if size > 1000:
        axes.text(end + size / 2, 0.5, name, ha="center", va="center", fontsize=8)
    end += size
    axes.plot([end, end], [-0.35, 1.35], color=plots.INK, linewidth=0.8)
axes.set_yticks([0, 1], ["FSDP1: one flat parameter", "FSDP2: each parameter"])
axes.set(ylim=(1.5, -0.5), xlabel=f"the {total:,} numbers of a block; a colour is the rank that holds them")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plots.show(fig, alt="FSDP1 cuts the parameters of a block, laid end to end, in four; FSDP2 each of them.")

# %% [markdown]
# A drawing of one block on four ranks. FSDP1 lays the parameters end to end and cuts this **flat parameter**
# into four shards. FSDP2 cuts each parameter into four, so a shard belongs to one parameter and keeps its
# name. Most of the differences below follow from that.

# %% tags=["card"]
lesson.card(
    13,
    learn="translate a program from FSDP1 to FSDP2, and know where the training changes",
    needs="lesson [1](01_transformer_wrapper.ipynb), or a program that uses FSDP1",
    minutes=(1, 15, 26),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same model with both. Each
# block has one layer, `spare`, that its forward does not use.
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.fsdp.wrap import ModuleWrapPolicy
#
# from fsdp_utils import record_collectives
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# mesh = init_device_mesh(device, (dist.get_world_size(),))    # without it a Mac would take its GPU
#
#
# class Block(nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.used, self.spare = (nn.Linear(256, 256, bias=False, device=device) for _ in range(2))
#
#     def forward(self, x):                                    # f32[batch, 256]
#         return x + self.used(x)
#
#
# def fsdp1(model):
#     return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device(device))
#
#
# def fsdp2(model):
#     for part in [*model, model]:                             # in place: the model keeps its class and names
#         fully_shard(part, mesh=mesh)
#     return model
#
#
# for name, shard in {"FSDP1": fsdp1, "FSDP2": fsdp2}.items():
#     torch.manual_seed(0)                                     # the same weights on every rank
#     model = shard(nn.Sequential(*[Block() for _ in range(3)]))
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=10.0)
#     torch.manual_seed(1 + dist.get_rank())                   # other samples on each rank
#     for step in range(5):
#         with record_collectives(model) as trace:
#             loss = model(torch.randn(8, 256, device=device)).square().mean()
#             loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     sent = {kind: nbytes // 1024 for kind, nbytes in trace.bytes_by_kind().items()}
#     with FSDP.summon_full_params(model) if name == "FSDP1" else torch.no_grad():
#         spare = model.get_submodule("0").spare.weight
#         spare = spare.full_tensor() if name == "FSDP2" else spare
#         if dist.get_rank() == 0:
#             print(f"{name}: loss {loss.item():.4f}, KiB {sent}, spare {spare.abs().mean():.4f}")
# dist.destroy_process_group()
# ```
# ```text
# FSDP1: loss 2.1102, KiB {'all_gather': 3072, 'reduce_scatter': 1536}, spare 0.0297
# FSDP2: loss 2.1102, KiB {'all_gather': 3072, 'reduce_scatter': 768}, spare 0.0313
# ```
#
# The losses are equal, and so are the gathers. But FSDP1 reduces a gradient of the whole flat parameter, with
# zeros for `spare`, and AdamW decays `spare` (0.0313 before; `weight_decay` is a thousand times the default,
# so that five steps show it), because a gradient of zeros is a gradient. FSDP2 leaves out what has none; if
# ranks differ in what they use, call `model.set_reduce_scatter_unused_params(True)`, or their reduce-scatters
# do not match.
#
# ## One table, by FSDP1's name
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `FSDP(model, auto_wrap_policy=…)` | `fully_shard` on each block, then on the model, in place ([lesson 1](01_transformer_wrapper.ipynb)) |
# | `FULL_SHARD`, `SHARD_GRAD_OP` | nothing (the default keeps the root gathered after forward, as FSDP1 does); `reshard_after_forward=False` on each call: it is not passed on |
# | `HYBRID_SHARD`, `_HYBRID_SHARD_ZERO2` | a 2-D mesh, with the two values above ([lesson 6](06_sharding_strategies.ipynb)) |
# | `NO_SHARD` | `DistributedDataParallel` |
# | `process_group=`, `device_mesh=`; `device_id=` | `mesh=`; `torch.cuda.set_device` before |
# | `mixed_precision=MixedPrecision(…)` | `mp_policy=MixedPrecisionPolicy(…)` on each call; buffers: cast them yourself ([lesson 7](07_mixed_precision.ipynb)) |
# | `cpu_offload=` | `offload_policy=CPUOffloadPolicy()` |
# | `sync_module_states=`, `param_init_fn=` | meta device, `to_empty`, then load or initialise ([lesson 12](12_a_model_too_big_for_one_rank.ipynb)) |
# | `backward_prefetch=BACKWARD_PRE`; `BACKWARD_POST` | nothing: the default; no counterpart ([lesson 4](04_backward_prefetch.ipynb)) |
# | `backward_prefetch=None` | `unit.set_modules_to_backward_prefetch([unit])` on each unit |
# | `forward_prefetch=`; `limit_all_gathers=` | `set_modules_to_forward_prefetch`; nothing ([lesson 11](11_rate_limiter.ipynb)) |
# | `ignored_modules=`, `ignored_states=` | `ignored_params=`, a set |
# | `use_orig_params=True` | nothing: parameters keep their names |
# | `no_sync()` | `set_requires_gradient_sync(False)`, and see below |
# | `model.clip_grad_norm_(1.0)` | `nn.utils.clip_grad_norm_(model.parameters(), 1.0)` ([lesson 10](10_end_to_end.ipynb)) |
# | `apply_activation_checkpointing` after FSDP | `checkpoint_wrapper` before `fully_shard` ([lesson 2](02_activation_checkpointing.ipynb)) |
# | `state_dict_type`, `FullStateDictConfig` | `get_model_state_dict` with `StateDictOptions` ([lesson 3](03_full_state_dict.ipynb)) |
# | `optim_state_dict`, `…_to_load` | `get_optimizer_state_dict`, `set_optimizer_state_dict` |
# | `summon_full_params` | `parameter.full_tensor()`: a copy, changes to it are lost; edit the shards ([lesson 18](18_beyond_forward_and_backward.ipynb)) |
# | `summon_full_params(model, recurse=False, writeback=False)` around a method other than `forward` (it works under `no_grad`, though PyTorch's documentation excludes a forward there) | `register_fsdp_forward_method(model, "generate")` |
# | `ShardedGradScaler`; `isinstance(m, FSDP)` | `torch.amp.GradScaler`; `isinstance(m, FSDPModule)` |
#
# ## Where they are not the same: the list
#
# | in your program | FSDP1 | FSDP2 | so |
# |:--|:--|:--|:--|
# | parameters that forward does not use | gradients of zeros: reduced, decayed | no gradient | nothing, if all ranks use the same ones |
# | parameters frozen within a unit | zeros are reduced | left out | nothing |
# | accumulation under `SHARD_GRAD_OP` | `no_sync()` keeps the weights, too | two methods | call both |
# | accumulation in bf16 | added up in bf16 | added up in `reduce_dtype` | 4 bytes a number until they are reduced |
# | BatchNorm in a bf16 unit | float32 by itself | raises | no policy for its block, or a unit of its own |
# | a first dimension of 1 | hardly padded | padded to the ranks | `shard_placement_fn` |
# | the optimizer's full state dict | a shared `step`, unless `use_orig_params=True` | counts too fast | clone each `step` |
#
# ## What is updated and sent
#
# The next cells count the KiB that a step gathers and reduces in six settings, with both, on four blocks.
# Read the table beneath them first.

# %%
from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_utils import record_collectives

rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
warnings.simplefilter("ignore")                         # FSDP1 warns that some of its functions are deprecated


class Block(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                               # f32[batch, 48]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(prepare=lambda model: model):
    torch.manual_seed(0)
    return prepare(nn.Sequential(nn.Linear(24, 48), *[Block() for _ in range(4)], nn.Linear(48, 24)).to(device))


def fsdp1(model, **options):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options)


def fsdp2(model, **options):
    for block in model[1:5]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step(model, number):
    """Forward and backward of this rank's share of 24 samples."""
    random = torch.Generator().manual_seed(number)
    x = torch.randn(24, 24, generator=random).chunk(world)[rank].to(device)
    loss = (model(x).float() - x.roll(1, dims=-1)).square().mean()
    loss.backward()
    return loss.detach()


def sent(model, run=lambda model: step(model, 0)):
    """KiB gathered and reduced in the second of two runs; the first sets FSDP up."""
    run(model)
    model.zero_grad()
    with record_collectives(model) as trace:
        run(model)
    kib = {kind: nbytes / 1024 for kind, nbytes in trace.bytes_by_kind().items()}
    return [round(kib.get("all_gather", 0)), round(kib.get("reduce_scatter", 0))]


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".up." not in name
    return model


def two_batches(model):
    with model.no_sync():
        step(model, 0)
    step(model, 1)


def two_batches_2(model, reshard=True):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        if not reshard:
            model.set_reshard_after_backward(last)
        step(model, number)


def with_odd(model):                                    # as ViT's table of positions, f32[1, 197, width]
    model[1].register_parameter("position", nn.Parameter(torch.zeros(1, 197, 48, device=device)))
    model[1].register_forward_pre_hook(lambda block, args: (args[0] + block.position.mean(),))
    return model


grad_op = ShardingStrategy.SHARD_GRAD_OP
pairs = {
    "FULL_SHARD": (sent(fsdp1(build())), sent(fsdp2(build()))),
    "`up` of each block frozen": (sent(fsdp1(build(freeze), use_orig_params=True)), sent(fsdp2(build(freeze)))),
    "two batches, FULL_SHARD, no_sync": (sent(fsdp1(build()), two_batches), sent(fsdp2(build()), two_batches_2)),
    "two batches, SHARD_GRAD_OP, no_sync": (
        sent(fsdp1(build(), sharding_strategy=grad_op), two_batches),
        sent(fsdp2(build(), reshard_after_forward=False), two_batches_2),
    ),
    "the same, with set_reshard_after_backward": (
        sent(fsdp1(build(), sharding_strategy=grad_op), two_batches),
        sent(fsdp2(build(), reshard_after_forward=False), lambda model: two_batches_2(model, reshard=False)),
    ),
    "a parameter of shape [1, 197, 48]": (sent(fsdp1(build(with_odd))), sent(fsdp2(build(with_odd)))),
}

# %% tags=["equality", "accumulation"]
pairs, world = ranks.get("pairs")[0], len(ranks.get("rank"))
Table(
    ["setting", "gathered, KiB: FSDP1", "FSDP2", "reduced, KiB: FSDP1", "FSDP2"],
    [[name.replace("`", ""), one[0], two[0], one[1], two[1]] for name, (one, two) in pairs.items()],
)

# %% jupyter={"source_hidden": true} tags=["check"]
same, frozen, full, kept, fixed, odd = pairs.values()
assert same[0] == same[1]
assert full[0] == full[1]
assert fixed[0] == fixed[1]
assert frozen[1][1] < 0.6 * frozen[0][1]
assert kept[1][0] > 1.9 * kept[0][0]
assert odd[1][0] > odd[0][0] + 36 * (world - 1)
assert odd[1][1] > odd[0][1] + 36 * (world - 1)

# %% [markdown]
# - **Frozen layers within a unit.** FSDP1 needs `use_orig_params=True` for them and reduces zeros in their
#   place. FSDP2 leaves them out.
# - **`no_sync()` under `SHARD_GRAD_OP`** does two things: no gradients are reduced, and the gathered
#   parameters are kept for the next batch. FSDP2 has a method for each, and you need both.
# - **Padding.** FSDP1 pads the flat parameter by a few numbers. FSDP2 pads dimension 0 of each parameter to a
#   multiple of the ranks: a first dimension of 1 is gathered as many times as there are ranks. Shard such
#   a parameter on another dimension: `shard_placement_fn`, or `shard()` of `fsdp_utils`.
#
# With the same two methods FSDP2 can do what DeepSpeed calls **ZeRO-1** (only the optimizer's state is
# sharded over a step): `reshard_after_forward=False`, and both off until the last micro-batch.
#
# ## Numbers and errors
#
# With `param_dtype=bfloat16` and `reduce_dtype=float32`, gradients of batches that are not reduced yet are
# added up: in bfloat16 under FSDP1, in float32 under FSDP2. The next cell sweeps the number of batches and
# shows the error of the gradient beside one process in float32.

# %%
# %%ranks
from contextlib import nullcontext

DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def accumulation_error(number, wrapper):
    """The error of a gradient of so many batches, in %."""
    torch.manual_seed(0)
    alone, model = nn.Linear(64, 64, bias=False).to(device), nn.Linear(64, 64, bias=False).to(device)
    model.load_state_dict(alone.state_dict())
    if wrapper == "FSDP1":
        model = FSDP(model, device_id=device, mixed_precision=MixedPrecision(**DTYPES))
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**DTYPES))
    for place in range(number):
        samples = torch.randn(8 * world, 64, generator=torch.Generator().manual_seed(place)).to(device)
        (alone(samples).square().mean()).backward()
        last = place == number - 1
        if wrapper == "FSDP2":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if wrapper == "FSDP1" and not last else nullcontext():
            model(samples.chunk(world)[rank]).float().square().mean().backward()
    if wrapper == "FSDP2":
        found = model.weight.grad.full_tensor().flatten()
    else:
        shard = next(model.parameters()).grad
        found = torch.cat([torch.empty_like(shard) for _ in range(world)])
        dist.all_gather_into_tensor(found, shard)
    right = alone.weight.grad.flatten()
    return 100 * ((found[: len(right)] - right).norm() / right.norm()).item()


counts = (2, 8, 32, 128)
errors = {wrapper: [accumulation_error(number, wrapper) for number in counts] for wrapper in ("FSDP1", "FSDP2")}

# %%
errors = ranks.get("errors")[0]
one, two = errors["FSDP1"], errors["FSDP2"]
assert all(a > b for a, b in zip(one, two))
assert one[-1] > 2.5 * two[-1]
Table(
    ["error of the gradient, %, batches", *map(str, ranks.get("counts")[0])],
    [[name, *(f"{error:.1f}" for error in found)] for name, found in errors.items()],
)

# %% [markdown]
# FSDP1's error grows from 2 to 128 batches, FSDP2's does not. The price: FSDP2's sums take 4 bytes a number,
# whole on each rank, until they are reduced. The next cell tries two more programs.

# %%
# %%ranks
def tried(program, wrapper):
    """What a program says in the end."""
    try:
        return program(wrapper) or "runs"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).split(', need')[0]}"


def norm_layer(wrapper):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(device)
    if wrapper == "FSDP1":
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy(set()), device_id=device, mixed_precision=MixedPrecision(**DTYPES))
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**DTYPES))
    model(torch.randn(4, 8, device=device)).sum().backward()


def ignored(wrapper):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    left_out = set(model[1].parameters())
    if wrapper == "FSDP1":
        model = FSDP(model, ignored_states=list(left_out), use_orig_params=True, device_id=device)
    else:
        fully_shard(model, ignored_params=left_out)
    model(torch.randn(4, 8, device=device)).sum().backward()
    model.clip_grad_norm_(1.0) if wrapper == "FSDP1" else nn.utils.clip_grad_norm_(model.parameters(), 1.0)


programs = {"BatchNorm in a bf16 unit": norm_layer, "ignored parameters, then clipping": ignored}
said = {name: [tried(program, wrapper) for wrapper in ("FSDP1", "FSDP2")] for name, program in programs.items()}

# %%
said = ranks.get("said")[0]
assert [found[0] for found in said.values()] == ["runs", "runs"]
assert all("Error" in found[1] for found in said.values())
Table(["program", "FSDP1", "FSDP2"], [[name, *found] for name, found in said.items()])

# %% [markdown]
# With an `auto_wrap_policy` FSDP1 makes BatchNorm a unit of its own in float32. Under FSDP2 give its block no
# policy, or make it a unit of its own first, in float32. For the second: FSDP reduces no gradient of an
# ignored parameter, so reduce those yourself. Then take `nn.utils.get_total_norm` of each list of gradients,
# combine the two norms, and give the result to `nn.utils.clip_grads_with_norm_` for each list.
#
# ## Moving a run
#
# `save_distributed` takes models in FSDP1 and FSDP2, and writes each parameter, and its optimizer's state,
# under its name. Full and sharded state dicts of the *model* carry over, too. The full state dict of the
# *optimizer* does not as it is:

# %% tags=["optimizer"]
# %%ranks
import io

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)


def train(model, optimizer, numbers):
    for number in numbers:
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()


old = fsdp1(build())
old_optimizer = torch.optim.AdamW(old.parameters(), lr=1e-2)
train(old, old_optimizer, range(3))
weights, file = get_model_state_dict(old, options=FULL), io.BytesIO()       # on all ranks
torch.save(get_optimizer_state_dict(old, old_optimizer, options=FULL), file)


def loaded():
    """The optimizer's state, read from the file."""
    file.seek(0)
    return torch.load(file)


def counts_after(state):
    """Load into FSDP2, train three steps more, and return AdamW's counts of steps."""
    model = fsdp2(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_model_state_dict(model, weights, options=FULL)
    set_optimizer_state_dict(model, optimizer, state, options=FULL)
    train(model, optimizer, range(3, 6))
    return sorted({int(values["step"]) for values in optimizer.state.values()})


counts_found = counts_after(loaded())

# %%
found = ranks.get("counts_found")[0]
assert max(found) > 6
print("after six steps AdamW of FSDP2 counts:", *found)

# %% [markdown]
# FSDP1 counts steps once for each flat parameter. In its full state dict all parameters of a unit share this
# tensor, `torch.save` keeps it shared, and in FSDP2 each of them adds 1 to it: 3 + 3 · 6 parameters of a
# block = 21, 3 + 3 · 4 of the root = 15. The bias correction of AdamW is then wrong, without an error. Turn 2
# mends it. (Old files in `LOCAL_STATE_DICT` hold pieces of flat parameters. Read them with FSDP1 on as many
# ranks as have saved them, then save with `save_distributed`.)
#
# **A framework's config file.** `translate` takes the config of Accelerate, Composer, DeepSpeed or
# transformers' `Trainer`, and says what each key is in FSDP2 (`python -m fsdp_utils translate FILE`).

# %% tags=["translate"]
from fsdp_utils.migration import translate

print(translate({
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_backward_prefetch": "BACKWARD_POST",
    },
}))

# %% [markdown]
# ## Your turn 1 · Translate a training step
#
# Here is a step in FSDP1. Write both functions with `fully_shard`. `build()` gives the model, and
# `step(model, 0)` and `step(model, 1)` run forward and backward on two batches. Both programs should gather
# each unit once in a step.

# %%
# %%ranks
def old_model():
    dtypes = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp1(build(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=dtypes)


def old_step(model, optimizer):
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


# %% jupyter={"source_hidden": true}
# %%ranks
from torch.distributed.tensor import DTensor

from fsdp_utils.lessons.your_turn import NotYet, exactly, turn


def run_steps(make, take):
    """Four steps: their norms, the loss after them, and what the last one sent."""
    model = make()
    if not isinstance(model, nn.Module):
        raise NotYet("Return the model from `my_model`.")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    for number in range(4):
        with record_collectives(model) if number == 3 else nullcontext() as trace:
            norm = take(model, optimizer)
        if norm is None:
            raise NotYet("Return the norm of the gradients from `my_step`.")
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    loss = step(model, 2)
    dist.all_reduce(loss)
    of_kind = {kind: [e.bytes for e in trace.collectives if e.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    counts = [count for sizes in of_kind.values() for count in (len(sizes), round(sum(sizes) / 1024))]
    return norms, loss.item() / world, counts


old_norms, old_loss, (GATHERS, GATHERED, SCATTERS, REDUCED) = run_steps(old_model, old_step)


@turn(1, {
    "all-gathers in a step": exactly(
        GATHERS, less="Parameters are never freed, and the model computes with its old weights.",
        more="Parameters are freed too early: gather each unit once in a step.",
    ),
    "reduce-scatters in a step": exactly(SCATTERS, "Gradients should be reduced once for each unit and step."),
    "reduced KiB": exactly(REDUCED, less="Gradients are reduced in bf16: `reduce_dtype`.", more="More is reduced than once."),
    "gathered KiB": exactly(GATHERED, less="Something is not gathered.", more="More bytes than in bf16, once for each parameter."),
    "norms that differ": exactly(0, "The norm is not that of both batches, over all ranks, before clipping."),
    "the loss at the end agrees": exactly(True, "The trained model differs: are the gradients clipped before the step?"),
})
def score_steps(my_model, my_step):
    norms, loss, (gathers, gathered, scatters, reduced) = run_steps(my_model, my_step)
    return {
        "all-gathers in a step": gathers,
        "reduce-scatters in a step": scatters,
        "reduced KiB": reduced,
        "gathered KiB": gathered,
        "norms that differ": sum(not abs(a - b) <= 0.02 * a for a, b in zip(old_norms, norms)),
        "the loss at the end agrees": abs(old_loss - loss) < 0.01 * old_loss,
    }


# %%
# %%turn 1
def my_model():
    return None                                 # your lines here: the sharded model


def my_step(model, optimizer):
    return None                                 # your lines here: the norm of the gradients


# %% tags=["solution"] turn=1
def my_model():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(build(), mp_policy=policy, reshard_after_forward=False)

def my_step(model, optimizer):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["right"] turn=1
def my_model():                                 # each call by hand
    model, policy = build(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in [*model[1:5], model]:
        fully_shard(part, mp_policy=policy, reshard_after_forward=False)
    return model

def my_step(model, optimizer):
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, 1)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor().item()

# %% tags=["right"] turn=1
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):                  # the norm by hand, from the shards
    for number in range(2):
        for switch in (model.set_requires_gradient_sync, model.set_reshard_after_backward):
            switch(number == 1)
        step(model, number)
    square = sum(p.grad.to_local().square().sum() for p in model.parameters())
    dist.all_reduce(square)
    for p in model.parameters():
        p.grad.to_local().mul_((0.1 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    return square.sqrt()

# %% tags=["right"] turn=1
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):                  # the last batch's setting is made unit by unit
    for number, last in enumerate([False, True]):
        for unit in [model, *model[1:5]]:
            unit.set_requires_gradient_sync(last, recurse=False)
            unit.set_reshard_after_backward(last, recurse=False)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="freed too early"
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="once for each unit and step"
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):
    for number in (0, 1):
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="never freed"
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):
    model.set_reshard_after_backward(False)
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="More bytes than in bf16"
def my_model():
    return fsdp2(build(), reshard_after_forward=False)

def my_step(model, optimizer):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="reduced in bf16"
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=False)

def my_step(model, optimizer):
    for number, last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        step(model, number)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm

# %% tags=["wrong"] turn=1 says="no_sync"
def my_model():
    return fsdp2(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=False)

def my_step(model, optimizer):
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

# %% [markdown]
# ## Your turn 2 · Mend the optimizer's state
#
# Write `mended(state)`: it gets the state that was loaded from the file and returns one with which AdamW goes
# on as it should: three steps were made with FSDP1, three more follow with FSDP2. `state["state"]` maps each
# parameter's name to `{"step": …, "exp_avg": …, "exp_avg_sq": …}`.

# %% jupyter={"source_hidden": true}
# %%ranks
def after(state):
    model = fsdp2(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_model_state_dict(model, weights, options=FULL)
    set_optimizer_state_dict(model, optimizer, state, options=FULL)
    train(model, optimizer, range(3, 6))
    loss = step(model, 6)
    dist.all_reduce(loss)
    return {int(values["step"]) for values in optimizer.state.values()}, loss.item() / world


train(old, old_optimizer, range(3, 6))
right_loss = step(old, 6)
dist.all_reduce(right_loss)


@turn(2, {
    "parameters whose tensor of steps is shared": exactly(
        0, "Parameters still share one tensor of steps, and each of them adds 1 to it."
    ),
    "largest count of steps after three more": exactly(
        6, less="The count of the first three steps is lost.", more="A count goes up more than once in a step."
    ),
    "the loss is that of FSDP1": exactly(True, "The averages, exp_avg and exp_avg_sq, are not what was saved."),
})
def score_state(mended):
    state = mended(loaded())
    if not isinstance(state, dict) or "state" not in state:
        raise NotYet("Return the whole dictionary, with `state` and `param_groups`.")
    kept = [values["step"] for values in state["state"].values() if isinstance(values["step"], torch.Tensor)]
    shared = len(kept) - len({step.untyped_storage().data_ptr() for step in kept})
    counts, loss = after(state)
    return {
        "parameters whose tensor of steps is shared": shared,
        "largest count of steps after three more": max(counts),
        "the loss is that of FSDP1": abs(loss - right_loss.item() / world) < 1e-4,
    }


# %%
# %%turn 2
def mended(state):
    return None                                         # your lines here


# %% tags=["solution"] turn=2
def mended(state):
    for values in state["state"].values():
        values["step"] = values["step"].clone()
    return state

# %% tags=["right"] turn=2
def mended(state):                                      # a new dictionary
    entries = {name: {**values, "step": torch.tensor(float(values["step"]))} for name, values in state["state"].items()}
    return {**state, "state": entries}

# %% tags=["right"] turn=2
from torch.utils._pytree import tree_map_only

def mended(state):                                      # clones every tensor
    return tree_map_only(torch.Tensor, torch.clone, state)

# %% tags=["right"] turn=2
import copy

def mended(state):                                      # one deepcopy for each parameter
    return {**state, "state": {name: copy.deepcopy(values) for name, values in state["state"].items()}}

# %% tags=["wrong"] turn=2 says="still share one tensor"
import copy

def mended(state):                                      # one deepcopy keeps what is shared
    return copy.deepcopy(state)

# %% tags=["wrong"] turn=2 says="is lost"
def mended(state):
    for values in state["state"].values():
        values["step"] = torch.zeros(())
    return state

# %% tags=["wrong"] turn=2 says="are not what was saved"
def mended(state):
    for values in state["state"].values():
        values["step"] = values["step"].clone()
        values["exp_avg"] = torch.zeros_like(values["exp_avg"])
    return state

# %% tags=["wrong"] turn=2 says="Return the whole dictionary"
def mended(state):
    return {name: values["step"].clone() for name, values in state["state"].items()}

# %% [markdown]
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `'FSDPSequential' object has no attribute 'no_sync'` (or `clip_grad_norm_`, `summon_full_params`) | a method of FSDP1 | the first table |
# | more all-gathers than before | accumulation under `SHARD_GRAD_OP`, or only the root got `reshard_after_forward=False` | `set_reshard_after_backward`; the argument on each call |
# | the loss does not fall, the norm is 0, no error | `set_reshard_after_backward(False)` still held for the last batch: the old gathered weights stay | set it to True before the last batch of a step |
# | `unsupported format string passed to DTensor.__format__` | the norm is a DTensor | `norm.full_tensor().item()` |
# | `mat1 and mat2 must have the same dtype` | `mp_policy` was given to the root alone | give it to each call |
# | `Missing key in checkpoint state_dict` | the old checkpoint is a `LOCAL_STATE_DICT` | move it while you still have FSDP1 |
#
# ## The rule
#
# Translate by the table. Then check for unused and frozen parameters, accumulation, BatchNorm and odd shapes,
# and clone each `step` of the optimizer's state.
#
# [← lesson 12](12_a_model_too_big_for_one_rank.ipynb) · [lesson 14 →](14_plan_before_you_rent.ipynb)

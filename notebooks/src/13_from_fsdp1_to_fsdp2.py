# %% [markdown]
# # 13 · From FSDP1 to FSDP2
#
# You have a program that trains with `FullyShardedDataParallel`, or a config file that makes Accelerate,
# Composer or DeepSpeed do it. What do you write with `fully_shard`, and is the training still the same? Here
# each idea of the lessons before stands in both ways of writing, and each pair has to give the same losses.

# %% [markdown] tags=["card"]
# learn:
# - each argument of FSDP1, and what you write for it in FSDP2
# - which of the two ways of writing sends the same bytes, and which only the same result
# - what settings of Accelerate, Composer and DeepSpeed become, by hand and by a function
# - how a checkpoint in LOCAL_STATE_DICT is moved
# needs: lessons [0](00_fsdp_from_scratch.ipynb) to [12](12_a_model_too_big_for_one_rank.ipynb), or a program
#   that uses FSDP1 · no GPU
# ranks: 4 on this machine. With `FSDP_RANKS=2` or 3 what needs two hosts is left out.
# takes: a minute to run on 2 cores (AMD EPYC) · 25 minutes to read

# %%
import tempfile
from pathlib import Path

from fsdp_utils.lessons import lesson
from fsdp_utils.notebook import ranks

ranks.start()

# %%
# %%ranks
import inspect
import shutil
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_utils import record_collectives

warnings.simplefilter("ignore", FutureWarning)          # several ways of FSDP1 are deprecated, as we know
rank, world = dist.get_rank(), dist.get_world_size()
on_gpu = torch.cuda.is_available()                      # ranks on the CPU see no GPU
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## The model, and what "the same" means
#
# All sizes divide by 24, so that no rank pads, be there 2, 3, 4 or 8 of them. Otherwise FSDP1, which pads a
# unit, and FSDP2, which pads each parameter, would send a few bytes more or less.

# %%
# %%ranks
class Block(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):                               # f32[batch, 48]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.stem = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 24)

    def forward(self, x):                               # f32[batch, 24]
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)                             # f32[batch, 24]


def build(seed=0):
    torch.manual_seed(seed)
    return Model().to(device)


def batch(step, rank=rank, world=world):
    random = torch.Generator().manual_seed(step)
    labels = torch.randint(24, (24,), generator=random)                         # i64[24]
    x = F.one_hot(labels, 24) + 0.5 * torch.randn(24, 24, generator=random)     # f32[24, 24]
    return x.chunk(world)[rank].to(device), labels.chunk(world)[rank].to(device)


def step(model, number, rank=rank, world=world):
    x, labels = batch(number, rank, world)
    loss = F.cross_entropy(model(x).float(), labels)
    loss.backward()
    return loss.detach()


def train(model, steps=3, rank=rank, world=world, clip=None):
    """The loss of each step, as the mean over the ranks, and the trace of the last step."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = torch.zeros(steps, device=device)
    for number in range(steps):
        watched = world > 1 and number == steps - 1
        with record_collectives(model) if watched else nullcontext() as trace:
            losses[number] = step(model, number, rank, world) / world
        if clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(losses)
    return losses.tolist(), trace


alone, _ = train(build(), rank=0, world=1)
print("one process:", *(f"{loss:.4f}" for loss in alone))

# %% [markdown]
# Both ways of writing, each as one would find it in a program. FSDP1 takes everything as arguments of one
# class, and wraps. FSDP2 is a function that you call on each unit, and then on the model.

# %%
# %%ranks
def fsdp1(model=None, **options):
    policy = ModuleWrapPolicy({Block})
    model = build() if model is None else model
    return FSDP(model, auto_wrap_policy=policy, device_id=device, **options)


def fsdp2(model=None, reshard_after_forward=True, **options):
    model = build() if model is None else model
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, **options)                # the root has a default of its own: kept


# %% [markdown]
# `compare` trains both and puts them beside the unsharded run. "The same" means: the losses agree within the
# rounding of float32, and in each kind of collective a rank sends the same number of bytes.

# %%
# %%ranks
compared, traces = {}, {}


def compare(idea, one, two, wanted=None, rtol=1e-4, same_bytes=True, clip=(None, None)):
    (losses1, trace1), (losses2, trace2) = train(one, clip=clip[0]), train(two, clip=clip[1])
    wanted = alone if wanted is None else wanted
    torch.testing.assert_close(losses1, wanted, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(losses2, wanted, rtol=rtol, atol=1e-5)
    sent1, sent2 = trace1.bytes_by_kind(), trace2.bytes_by_kind()
    compared[idea] = (losses1[-1], losses2[-1], sum(sent1.values()) / 1024, sum(sent2.values()) / 1024)
    print(f"{idea}: last loss {losses1[-1]:.4f} and {losses2[-1]:.4f}, wanted {wanted[-1]:.4f}")
    print("    FSDP1:", *(f"{kind} {size / 1024:.1f} KiB" for kind, size in sorted(sent1.items())))
    print("    FSDP2:", *(f"{kind} {size / 1024:.1f} KiB" for kind, size in sorted(sent2.items())))
    assert (sent1 == sent2) == same_bytes
    traces[idea] = trace1, trace2


# %% [markdown]
# ## Predict
#
# Which of these changes the number of bytes that a step sends, when a program goes from FSDP1 to FSDP2: the
# wrapping, the prefetching, the strategy, mixed precision, activation checkpointing, layers frozen within a
# block that is trained?
#
# <details><summary>Answer</summary>
#
# Only the frozen layers do, and to the better: FSDP1 reduces the gradient of a unit's whole flat parameter,
# frozen parts included. (A unit that is frozen as a whole sends no gradients in either, as in lesson 9.) All
# others send the same, byte for byte. You will see it below.
#
# </details>
#
# ## Wrapping and prefetching (lessons 1, 4 and 11)
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `auto_wrap_policy=` | call `fully_shard` on each block, then on the model |
# | `backward_prefetch=` | as `BACKWARD_PRE` by default; others by `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=` | none: not needed |
# | `use_orig_params=`, `device_id=` | none: names and shapes are kept; the mesh says which device |

# %% tags=["wrapping"]
# %%ranks
compare("wrapping", fsdp1(backward_prefetch=BackwardPrefetch.BACKWARD_PRE, limit_all_gathers=True), fsdp2())

orders = [[w for w in trace.order("backward") if "compute" not in w] for trace in traces["wrapping"]]
print("backward, both:", *(w.replace("all_gather", "AG").replace("reduce_scatter", "RS") for w in orders[1]))
assert orders[0] == orders[1]

gone = {"auto_wrap_policy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"}
gone |= {"sync_module_states", "param_init_fn", "device_id"}
assert gone <= set(inspect.signature(FSDP).parameters)
assert not gone & set(inspect.signature(fully_shard).parameters)

# %% [markdown]
# The same collectives in the same order. The last two lines of the cell hold the table against the two
# signatures: what FSDP2 is said to lack is an argument there and none here.
#
# ## Strategies (lesson 6)
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `FULL_SHARD` | `reshard_after_forward=True` |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | `HYBRID_SHARD` | a 2-D mesh: copies, and the ranks that share one |
# | `_HYBRID_SHARD_ZERO2` | the same, with `reshard_after_forward=False` |
# | `NO_SHARD` | none: `DistributedDataParallel` |
# | `no_sync()` | `set_requires_gradient_sync(False)` |

# %% tags=["strategies"]
# %%ranks
compare(
    "FULL_SHARD",
    fsdp1(sharding_strategy=ShardingStrategy.FULL_SHARD),
    fsdp2(reshard_after_forward=True),
)
compare(
    "SHARD_GRAD_OP",
    fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    fsdp2(reshard_after_forward=False),
)
hybrid = world == 4
if hybrid:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(
        "HYBRID_SHARD",
        fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh),
        fsdp2(mesh=mesh),
    )

# %% [markdown]
# With gradient accumulation only the last of several small batches reduces its gradients. (Parameters are
# gathered for each of them, in both ways of writing.)

# %% tags=["accumulation"]
# %%ranks
def accumulated(model, quietly):
    """The gradients of two batches, added up; only the second is reduced."""
    quietly(model, lambda: step(model, 0))
    step(model, 1)
    norm = sum((p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).square().sum()
               for p in model.parameters())
    if isinstance(model, FSDP):
        dist.all_reduce(norm)                           # each rank has a shard of the gradients
    return norm.sqrt().item()


def no_sync(model, compute):
    with model.no_sync():
        compute()


def without_gradient_sync(model, compute):
    model.set_requires_gradient_sync(False)
    compute()
    model.set_requires_gradient_sync(True)


plain = build()
for number in (0, 1):
    step(plain, number, rank=0, world=1)
wanted = torch.stack([p.grad.square().sum() for p in plain.parameters()]).sum().sqrt().item()
one, two = accumulated(fsdp1(), no_sync), accumulated(fsdp2(), without_gradient_sync)
print(f"norm of the gradients of two batches: {one:.4f} and {two:.4f}, one process {wanted:.4f}")
torch.testing.assert_close([one, two], [wanted, wanted], rtol=1e-4, atol=0)

# %% [markdown]
# ## Mixed precision (lesson 7)
#
# | FSDP1, `MixedPrecision` | FSDP2, `MixedPrecisionPolicy` |
# |:--|:--|
# | `param_dtype`, `reduce_dtype` | the same |
# | `buffer_dtype` | none: cast buffers yourself |
# | `cast_root_forward_inputs`, for the root | `cast_forward_inputs`, for every unit |
# | `keep_low_precision_grads` | none: gradients have the dtype of the shards |

# %% tags=["precision"]
# %%ranks
dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
one, two = fsdp1(mixed_precision=MixedPrecision(**dtypes)), fsdp2(mp_policy=MixedPrecisionPolicy(**dtypes))
compare("bf16", one, two, rtol=2e-2)                    # against fp32: so far is bf16 from it
assert abs(compared["bf16"][0] - compared["bf16"][1]) < 1e-3
then, now = (set(inspect.signature(kind).parameters) for kind in (MixedPrecision, MixedPrecisionPolicy))
print("not in FSDP2:", *sorted(then - now), "· new:", *sorted(now - then))

# %% [markdown]
# Against float32 the losses may differ by 2%, for bf16 has less than three digits. Against each other the two
# ways may differ by a thousandth.
#
# ## Activation checkpointing (lesson 2)
#
# With FSDP1 the order was: FSDP first, then `apply_activation_checkpointing`, which goes inside the units.
# With FSDP2 you wrap the block in `checkpoint_wrapper`, and give `fully_shard` the wrapper.

# %% tags=["checkpointing"]
# %%ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def checkpointed1():
    model = fsdp1()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def checkpointed2():
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return fsdp2(model)


compare("checkpointing", checkpointed1(), checkpointed2())

# %% [markdown]
# ## Clipping (lesson 10)
#
# FSDP1 has a method, because a rank sees only its part of the flat gradients. FSDP2's gradients are DTensors,
# and PyTorch's own function takes the norm over all ranks.

# %% tags=["clipping"]
# %%ranks
def clip1(model):
    return model.clip_grad_norm_(0.1)


def clip2(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


clipped_alone, _ = train(build(), rank=0, world=1, clip=clip2)
compare("clipping", fsdp1(), fsdp2(), wanted=clipped_alone, clip=(clip1, clip2))

model = fsdp1()
step(model, 0)
own_norm = clip2(model)                                 # FSDP2's way, on FSDP1: wrong
norms = [torch.zeros_like(own_norm) for _ in range(world)]
dist.all_gather(norms, own_norm)
print("FSDP2's way under FSDP1, norm on each rank:", *(f"{norm:.3f}" for norm in norms))
assert len({round(norm.item(), 4) for norm in norms}) > 1
assert max(abs(c - a) for c, a in zip(clipped_alone, alone)) > 1e-3      # it does something

# %% [markdown]
# ## Freezing (lesson 9)
#
# FSDP1 can freeze single parameters with `use_orig_params=True`. In FSDP2 nothing is needed.

# %% tags=["freezing"]
# %%ranks
def frozen():
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".up." not in name
    return model


frozen_alone, _ = train(frozen(), rank=0, world=1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)        # FSDP1: gradients need the memory of all parameters
    one = fsdp1(frozen(), use_orig_params=True)
compare("freezing", one, fsdp2(frozen()), wanted=frozen_alone, same_bytes=False)
assert compared["freezing"][3] < 0.9 * compared["freezing"][2]

# %% [markdown]
# The same losses, fewer bytes: FSDP1 reduces a gradient of the whole flat parameter, with zeros for what is
# frozen. FSDP2 leaves the frozen parameters out of the reduce-scatter.
#
# ## Rank 0 has the weights (lesson 12)
#
# In FSDP1 `sync_module_states` sends rank 0's weights to all ranks before they are sharded: each unit is
# whole on each rank for that time. On CPUs it refuses, so there we write what it does: a broadcast. In FSDP2
# *all* ranks build the model on the meta device, shard it, and then get their shards of rank 0's weights.

# %% tags=["meta"]
# %%ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)


def from_rank0_1():
    model = build(seed=rank)                                    # right on rank 0 alone
    if on_gpu:
        return fsdp1(model, sync_module_states=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    return fsdp1(model)


def from_rank0_2():
    full = build().state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = Model()
    model = fsdp2(model)
    model.to_empty(device=device)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=from_rank0)       # on ALL ranks
    return model


compare("from rank 0", from_rank0_1(), from_rank0_2())

# %% [markdown]
# ## State dicts (lessons 3 and 8)
#
# | FSDP1 | FSDP2 |
# |:--|:--|
# | `FULL_STATE_DICT` | `get_state_dict` with `full_state_dict=True` |
# | `SHARDED_STATE_DICT` | `get_state_dict`, then `torch.distributed.checkpoint.save` |
# | `LOCAL_STATE_DICT` | none |
# | `full_optim_state_dict`, `scatter_full_optim_state_dict` | `get_state_dict`, `set_state_dict` |
# | `summon_full_params` | `full_tensor()` of a parameter |

# %% tags=["state"]
# %%ranks
model1, model2 = fsdp1(), fsdp2()
train(model1), train(model2)
with FSDP.state_dict_type(model1, StateDictType.FULL_STATE_DICT):
    full1 = model1.state_dict()                                 # on ALL ranks
full2 = get_model_state_dict(model2, options=StateDictOptions(full_state_dict=True))
assert list(full1) == list(full2)
torch.testing.assert_close(full1, full2, rtol=1e-4, atol=1e-5)
print(f"{len(full1)} entries, the same names and values")

# %% [markdown]
# So a file with a full state dict of FSDP1 is a file for FSDP2, and for the model without any FSDP.
#
# ### LOCAL_STATE_DICT has to be moved
#
# That format holds pieces of flat parameters, without names. Only FSDP1 can read it, wrapped as it was when
# it was saved, best on as many ranks (lesson 8 shows how else it fails). So it is moved in two steps, while
# FSDP1 is still there: read it the old way, save the model with `save_distributed`. No function is needed for
# that: `save_distributed` takes models in FSDP1 too, and what it writes has names.

# %% tags=["local"]
# %%ranks
import torch.distributed.checkpoint as dcp

from fsdp_utils import load_distributed, save_distributed

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
folder = Path(shared[0])

with FSDP.state_dict_type(model1, StateDictType.LOCAL_STATE_DICT):
    dcp.save(model1.state_dict(), checkpoint_id=folder / "old")         # what you may have from then

old = fsdp1(build(seed=1))                                              # 1. read it the old way
with FSDP.state_dict_type(old, StateDictType.LOCAL_STATE_DICT):
    state = old.state_dict()
    dcp.load(state, checkpoint_id=folder / "old")
    old.load_state_dict(state)
save_distributed(folder / "new", old, step=4)                           # 2. save it with names

moved = fsdp2(build(seed=1))                                            # from here on FSDP2
load_distributed(folder / "new", moved)
full = get_model_state_dict(moved, options=StateDictOptions(full_state_dict=True))
torch.testing.assert_close(full, full1, rtol=0, atol=0)
entries = dcp.FileSystemReader(folder / "old").read_metadata().state_dict_metadata
print("in the old checkpoint:", *sorted(entries)[:2])
print("in the new one: names of parameters, and the values to the last bit")

# %% [markdown]
# The optimizer is not in it, because the video's code never saved it: AdamW starts anew. The new checkpoint
# loads on any number of ranks (lesson 8), and into a model that is not sharded:

# %%
# %%ranks
plain = build(seed=1)
load_distributed(folder / "new", plain)
torch.testing.assert_close(dict(plain.state_dict()), full1, rtol=0, atol=0)
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
print("the same values in a model without FSDP")

# %% [markdown]
# ## Config files
#
# Many programs never write FSDP's arguments, for a framework does. The function `translate` reads the config
# file of Accelerate, Composer (or LLM Foundry) or DeepSpeed, and says what became of each key. Here is a file
# as `accelerate config` writes it:

# %% tags=["translate"]
from fsdp_utils.migration import translate

accelerate_yaml = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_use_orig_params: true
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: LOCAL_STATE_DICT
"""
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "default_config.yaml"
    file.write_text(accelerate_yaml)
    found = translate(file)
print(found)

# %% [markdown]
# A key with an exclamation mark has no counterpart, and the text says why. Nothing is dropped in silence.
# Each row also names its source, in `found.rows`. And this is what to write:

# %%
print(found.code())

# %% [markdown]
# A key that it does not know is an error: a setting that is silently dropped changes the training.

# %% tags=["raises-exception"]
translate({"zero_optimization": {"stage": 3, "offload_parm": {"device": "cpu"}}})

# %% [markdown]
# ## The table, checked
#
# What is called how? Each row below asks for one thing, in the words of each framework that has them.

# %%
# %%ranks
def accelerate(mixed_precision="no", **settings):
    settings = {f"fsdp_{key}": value for key, value in settings.items()}
    settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    settings["fsdp_transformer_layer_cls_to_wrap"] = "Block"
    return {"distributed_type": "FSDP", "mixed_precision": mixed_precision, "fsdp_config": settings}


def composer(precision="fp32", **settings):
    return {"precision": precision, "parallelism_config": {"fsdp": settings}}


def deepspeed(stage=3, above=None, **settings):
    return {"zero_optimization": {"stage": stage, **settings}, **(above or {})}


bf16 = torch.bfloat16
bf16_on = {"bf16": {"enabled": True}}
asked = {
    # what for: (the settings in each framework, the same in FSDP1)
    "cut all": (
        [accelerate(sharding_strategy="FULL_SHARD"), composer(sharding_strategy="FULL_SHARD"), deepspeed(3)],
        {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    ),
    "keep parameters whole until backward": (
        [
            accelerate(sharding_strategy="SHARD_GRAD_OP"),
            composer(sharding_strategy="SHARD_GRAD_OP"),
            deepspeed(2),
        ],
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ),
    "cut nothing": (
        [accelerate(sharding_strategy="NO_SHARD"), composer(sharding_strategy="NO_SHARD"), deepspeed(0)],
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ),
    "compute and reduce in bf16": (
        [accelerate("bf16"), composer("amp_bf16", mixed_precision="PURE"), deepspeed(above=bf16_on)],
        {"mixed_precision": MixedPrecision(param_dtype=bf16, reduce_dtype=bf16)},
    ),
    "compute in bf16, reduce in fp32": (
        [composer("amp_bf16"), deepspeed(above={**bf16_on, "communication_data_type": "fp32"})],
        {"mixed_precision": MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32)},
    ),
    "recompute activations": (
        [accelerate(activation_checkpointing=True), composer(activation_checkpointing=True)],
        {"checkpointed": True},
    ),
    "copies of two ranks each": (
        [
            composer(data_parallel_shard_degree=2, data_parallel_replicate_degree=-1),
            deepspeed(mics_shard_size=2),
        ],
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if hybrid else None,
    ),
    "gather again among two ranks": ([deepspeed(zero_hpz_partition_size=2)], None),
    "offload to host memory": ([deepspeed(offload_param={"device": "cpu", "pin_memory": False})], None),
}

# %% [markdown]
# For each row: the frameworks' settings have to be translated into the same code. That code is *run*, and so
# is FSDP1 with the old setting. What FSDP1 has not, or cannot do on a CPU, is held against one process alone.

# %% tags=["table"]
# %%ranks
from fsdp_utils.migration import translate


def by_translation(code):
    names = {}
    exec(code, names)                                   # defines shard_model
    return names["shard_model"](build())


def by_fsdp1(options):
    if "checkpointed" in options:
        return checkpointed1()
    if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        options = {**options, "device_mesh": mesh}
    return fsdp1(**options)


found = []
for what, (configs, options) in asked.items():
    translations = [translate(config) for config in configs]
    for translation in translations:
        translation.blocks = ("Block",)                 # Accelerate names the class, the others find it
    codes = {translation.code() for translation in translations}
    assert len(codes) == 1, what
    needs_two_hosts = "two ranks" in what
    if needs_two_hosts and not hybrid:
        found.append((what, translations, "not run: takes 4 ranks"))
        continue
    new, new_trace = train(by_translation(*codes))
    low = translations[0].param_dtype is not None
    torch.testing.assert_close(new, alone, rtol=2e-2 if low else 1e-4, atol=1e-5)
    verdict = "losses of one process"
    if options is not None:
        old, old_trace = train(by_fsdp1(options))
        torch.testing.assert_close(new, old, rtol=1e-2 if low else 1e-4, atol=1e-5)
        assert new_trace.bytes_by_kind() == old_trace.bytes_by_kind(), what
        verdict = "losses and bytes of FSDP1"
    found.append((what, translations, verdict))
print(len(found), "rows")

# %% jupyter={"source_hidden": true}
from IPython.display import Markdown


def setting(translation):
    """The settings without which it would be another translation."""
    shown = []
    for row in translation.rows:
        section, _, key = row.key.rpartition(".")
        plain = key in ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "distributed_type")
        if not plain and (key, row.value) not in (("mixed_precision", "no"), ("precision", "fp32")):
            shown.append(f"`{section if key == 'enabled' else key}: {row.value}`")
    return ", ".join(shown)


def in_fsdp2(translation):
    if translation.ddp:
        return "`DistributedDataParallel`"
    words = [f"`reshard_after_forward={translation.reshard_after_forward}`"]
    if translation.shard_size:
        words.append(f"2-D mesh (copies, {translation.shard_size})")
    if translation.param_dtype:
        words.append(f"`MixedPrecisionPolicy({translation.param_dtype}, {translation.reduce_dtype})`")
    if translation.checkpointing:
        words.append("`checkpoint_wrapper`")
    if translation.offload:
        words.append("`CPUOffloadPolicy`")
    return ", ".join(words)


lines = ["| to | Accelerate | Composer | DeepSpeed | FSDP2 | checked here |", "|:--" * 6 + "|"]
for what, translations, verdict in ranks.get("found")[0]:
    by = {translation.framework: setting(translation) for translation in translations}
    cells = [by.get(name, "") for name in ("Accelerate", "Composer", "DeepSpeed")]
    lines.append(" | ".join([f"| {what}", *cells, in_fsdp2(translations[0]), f"{verdict} |"]))
Markdown("\n".join(lines))

# %% [markdown]
# "Losses and bytes" were measured in the cell above, on this CPU, with FSDP1 set by hand as the framework's
# source sets it: neither Composer nor DeepSpeed runs here. DeepSpeed has an implementation of its own, so its
# bytes are not FSDP's; what is checked is that the FSDP2 program is the ZeRO stage that FSDP1 had for it. The
# correspondence itself is that of
# [PyTorch's developers](https://github.com/pytorch/torchtitan/blob/00293cb7d0a8916b1401d694edc6f0002e99fd5c/docs/fsdp.md)
# and of [Accelerate's](https://huggingface.co/docs/accelerate/v1.15.0/en/concept_guides/fsdp_and_deepspeed).
# Offloading frees memory of a GPU; on a CPU only its losses can be seen.
#
# Two rows deserve a word. `accelerate to-fsdp2` writes `fsdp_reshard_after_forward: true` for `HYBRID_SHARD`
# and `false` for `NO_SHARD`: the second dimension of the mesh is gone, and a model that was not sharded gets
# sharded. And DeepSpeed's stage 1 cuts the optimizer's state alone, for which FSDP2 has nothing; the
# translation takes stage 2 and says so.

# %%
for row in translate({"zero_optimization": {"stage": 1}}).rows:
    print(f"{row.key}: {row.fsdp2} (counterpart: {row.has_counterpart})")

# %% [markdown]
# ## Proof
#
# All pairs once more: last loss and KiB of a step, FSDP1 and FSDP2.

# %% tags=["equality"]
# %%ranks
if rank == 0:
    print(f"{'':14}  FSDP1   FSDP2   FSDP1 KiB  FSDP2 KiB")
    for idea, (loss1, loss2, kib1, kib2) in compared.items():
        print(f"{idea:14} {loss1:.4f}  {loss2:.4f} {kib1:11.1f} {kib2:10.1f}")
for idea, (loss1, loss2, kib1, kib2) in compared.items():
    assert abs(loss1 - loss2) < (1e-2 if idea == "bf16" else 1e-4), idea
    assert kib1 == kib2 or idea == "freezing"

# %% [markdown]
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
for zero in ({"offload_param": {"device": "nvme"}}, {"zero_quantized_weights": True}, {"stage": 1}):
    assert translate({"zero_optimization": {"stage": 3, **zero}}).without_counterpart
kib2, world = ranks.get("compared['wrapping'][3]")[0], ranks.get("rank")
lesson.claims(
    13,
    {
        "fsdp2-lower-peak": "The same losses. The peak is for GPUs to say: what FSDP2 changed is how streams "
        "share memory, and a CPU has none.",
        "always-backward-pre": "The same all-gathers and reduce-scatters in the same order as FSDP1 with "
        f"`BACKWARD_PRE`, and {kib2:.0f} KiB as there. That is the default today: "
        "`set_modules_to_backward_prefetch` changes it.",
        "space-time": f"Yes: two batches of {24 // len(world)} on each of {len(world)} ranks, added up, give "
        "the gradients of two batches of 24 in one process.",
        "everything-deepspeed": "No. `translate` finds no counterpart for offloading to NVMe, for quantized "
        "communication, nor for ZeRO-1.",
    },
)

# %% [markdown]
# ## Exercises
#
# **1. By hand.** What is `reshard_after_forward` for each of FSDP1's strategies? `"DDP"` where it is DDP.

# %%
def reshard(strategy):
    return None  # your line here


strategies = {
    ("FULL_SHARD",): True,
    ("SHARD_GRAD_OP",): False,
    ("HYBRID_SHARD",): True,
    ("_HYBRID_SHARD_ZERO2",): False,
    ("NO_SHARD",): "DDP",
}
lesson.check(reshard, strategies)

# %% [markdown]
# **2. The mesh.** A config says `HYBRID_SHARD`, with so many processes on so many machines. The shape of the
# mesh?

# %%
def mesh_shape(num_processes, num_machines):
    return None  # your line here


shapes = {(16, 2): (2, 8), (8, 1): (1, 8), (64, 16): (16, 4)}
lesson.check(mesh_shape, shapes)

# %% [markdown]
# **3. The norm.** `nn.utils.clip_grad_norm_` under FSDP1 finds another norm on each rank: that of its shards.
# What is the norm of all gradients, from those of the ranks?

# %%
def whole_norm(norms):
    return None  # your line here


norms = {((3.0, 4.0),): 5.0, ((1.0, 1.0, 1.0, 1.0),): 2.0}
lesson.check(whole_norm, norms)

# %% [markdown]
# ## Summary
#
# - Same losses and, with the same units, the same bytes sent. How long memory is held on a GPU differs
#   (lesson 11).
# - Some arguments of FSDP1 are gone because nothing is left to choose (`use_orig_params`,
#   `limit_all_gathers`). Others became calls: strategy and groups are `reshard_after_forward` and the mesh,
#   prefetching has two methods.
# - Freezing needs nothing, and sends less where a unit is frozen in part.
# - Clip with PyTorch's own function. Under FSDP1 the same line is wrong, and silent.
# - Full and sharded state dicts carry over. Move LOCAL_STATE_DICT while FSDP1 is still there to read it.
# - `translate` reads the config files of three frameworks, and names what has no counterpart.
#
# ## Next
#
# So far everything ran on this machine. How much memory and time would it take on GPUs that you do not
# have? [Lesson 14](14_plan_before_you_rent.ipynb) plans before you rent.
#
# [← lesson 12](12_a_model_too_big_for_one_rank.ipynb) · [lesson 14 →](14_plan_before_you_rent.ipynb)

# %% [markdown]
# ## Solutions
#
# Folded until you open them. They run like all other cells, so their checks have to pass.

# %% tags=["solution"] jupyter={"source_hidden": true}
def reshard(strategy):
    return "DDP" if strategy == "NO_SHARD" else strategy in ("FULL_SHARD", "HYBRID_SHARD")


lesson.check(reshard, strategies, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def mesh_shape(num_processes, num_machines):
    return num_machines, num_processes // num_machines


lesson.check(mesh_shape, shapes, strict=True)

# %% tags=["solution"] jupyter={"source_hidden": true}
def whole_norm(norms):
    return sum(norm**2 for norm in norms) ** 0.5


lesson.check(whole_norm, norms, strict=True)

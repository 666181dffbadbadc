"""The messages of fsdp_utils/answers/messages.yaml, each raised on two CPU ranks by the code of a cell.

A cell has the id of its entry. tests/answers_ranks.py runs what stands before the first cell, then the cell,
until it has raised, warned or logged the message, and then the cure's code with the cell's variables. With
`script`, its file has that name: some messages are FSDP's only where the text names it. With `fresh`, the
cure runs in another process group, as the cell spoils its own; `seconds` is the time limit of its own.
To add one, copy a short one.
"""
# ruff: noqa: B018, E402  (each cell is a program by itself; the last line of many is what raises)

import contextlib
import copy
import datetime
import functools
import io
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sd
import torch.distributed.tensor.parallel as tp
import transformers
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,  # noqa: F401  for a cure
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,  # noqa: F401  for a cure
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

from tests.trainers import forget

FSDP = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
fsdp2_plugin = functools.partial(FullyShardedDataParallelPlugin, fsdp_version=2)
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
tokens = torch.arange(8).reshape(2, 4)


def blocks(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


model = blocks()  # another one for each cell


def half_frozen() -> nn.Sequential:
    model = blocks()
    model[0].requires_grad_(False)
    return model


def fsdp1_units() -> Any:
    return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))


def sharded(model: nn.Module | None = None, **options: Any) -> Any:
    model = blocks() if model is None else model
    for child in model.children():
        if next(child.parameters(), None) is not None:
            fully_shard(child, **options)
    return fully_shard(model, **options)


class Net(nn.Module):
    """These parts, which `forward` calls."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self.function(self, *args, **options)


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Words(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, tokens: Tensor) -> Tensor:
        return self.forward(tokens).argmax(-1)


def stepped(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of a model that has made a step."""
    optimizer = kind(model.parameters(), **options)
    model(x).sum().backward()
    optimizer.step()
    return optimizer


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def accelerator() -> Any:
    """Accelerate with FSDP2 on CPU ranks; by itself it takes FSDP's settings only on an accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    forget()
    one = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = fsdp2_plugin()
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return one


def arguments(**more: Any) -> Any:
    forget()
    given = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": [], **more}
    return transformers.TrainingArguments(**given)


# ---- FSDP1 -----------------------------------------------------------------------------------------------

# %% uniform-requires-grad
model = half_frozen()
FSDP(model, use_orig_params=False)

# %% mixed-requires-grad-in-unit
model = nn.Sequential(half_frozen())
FSDP(nn.Sequential(half_frozen()), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)

# %% cannot-flatten-integer-dtype
model.register_parameter("packed", nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False))
FSDP(model)

# %% uniform-dtype
model[1].to(torch.bfloat16)
FSDP(model)

# %% weight-must-be-2d
model = FSDP(Words(), use_orig_params=True)
model(tokens)
model.module.embedding(tokens)

# %% unscale-fp16-gradients
half = sharded(blocks().half())
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.AdamW(half.parameters())
scaler.scale(half(x.half()).float().sum()).backward()
scaler.unscale_(optimizer)


# %% writeback-shape-changes seconds=2 fresh
def grow(embedding: nn.Embedding) -> None:
    embedding.weight = nn.Parameter(torch.zeros(18, 8))


wrapped = FSDP(Words(), use_orig_params=True)
grow(wrapped.module.embedding)
model = Words()
wrapped(tokens)

# %% fsdp1-clip-on-inner
model = fsdp1_units()
model(x).sum().backward()
model.module[0].clip_grad_norm_(1.0)


# %% fsdp1-training-state
def forward(net: Net, x: Tensor) -> Tensor:
    with net.roots[0].no_sync() if net.roots else contextlib.nullcontext():
        return net.linear(x)


model, wrong = (FSDP(Net(forward, linear=nn.Linear(8, 8), roots=[])) for _ in range(2))
wrong.module.roots.append(wrong)
wrong(x)

# %% fsdp1-no-sync-on-inner
model = fsdp1_units()
model(x)
with model.module[0].no_sync():
    pass

# %% fsdp1-already-applied
partly = nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8))
FSDP(partly, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

# %% fsdp1-assumes-key
model = FSDP(blocks())
with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
    state = model.state_dict()
    del state["1.weight"]
    model.load_state_dict(state, strict=False)

# %% fsdp1-state-dict-type-deprecated
model = FSDP(blocks())
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    model.state_dict()

# %% no-shard-deprecated
FSDP(copy.deepcopy(model), sharding_strategy=ShardingStrategy.NO_SHARD)

# %% world-size-is-one
alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
FSDP(blocks(), process_group=alone)

# ---- FSDP2 -----------------------------------------------------------------------------------------------

# %% shared-with-another-group
model, apart = Words(tied=True), Words(tied=True)
for part in (apart.embedding, apart.head, apart):
    fully_shard(part)
apart(tokens)

# %% mesh-of-one-or-two-dimensions
mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
fully_shard(blocks(), mesh=mesh)

# %% scalar-parameters
model = Scaled(torch.tensor(1.0))
fully_shard(model)

# %% non-contiguous-parameters
model, wrong = nn.Linear(8, 4), nn.Linear(8, 4)
for one in (model, wrong):
    one.weight = nn.Parameter(torch.randn(8, 4).T)
fully_shard(wrong)

# %% uniform-original-dtype
model[1].to(torch.bfloat16)
fully_shard(copy.deepcopy(model))(x)

# %% still-on-meta
with torch.device("meta"):
    model, wrong = sharded(), sharded()
weights = blocks().state_dict() if dist.get_rank() == 0 else {}
wrong(x)

# %% root-forward-first
model, wrong = sharded(), sharded()
wrong[0](x)
wrong(x)

# %% called-submodule-of-sharded
model = sharded()
model(x)
model[0].forward(x)

# %% load-plain-into-dtensor
weights = blocks().state_dict()
model = sharded()
model.load_state_dict(weights)

# %% plain-operand
parameter, mask = sharded(blocks(1))[0].weight, torch.ones(8, 8)
parameter.grad = distribute_tensor(mask, parameter.device_mesh, parameter.placements)
parameter.grad.mul_(mask)

# %% foreach-mixed
model, partly = Scaled(torch.ones(8)), Scaled(torch.ones(8))
fully_shard(partly.linear)
partly(x).sum().backward()
nn.utils.clip_grad_norm_(partly.parameters(), 1.0)

# %% kept-unsharded-tensor
model = sharded()
model.unshard()
model[0].unshard()
weight = model[0].weight
model[0].reshard()
weight.t()

# %% data-not-allocated
model = sharded()
model(x)
model[0].unshard()
weight = model[0].weight
model[0].reshard()
weight.softmax(-1)


# %% grad-dtype-after-unfreezing
def make(frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return sharded(half_frozen() if frozen else blocks(), mp_policy=policy)


model = make(frozen=True)
model(x).sum().backward()
model[0].requires_grad_(True)
model(x).sum().backward()

# %% format-of-dtensor
model = sharded()
model(x).sum().backward()
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
print(f"norm {norm:.3f}")

# %% no-sync-of-fsdp2
model, micro_batches = sharded(), [x, x]
with model.no_sync():
    pass

# %% clip-grad-norm-of-fsdp2
model = sharded()
model(x).sum().backward()
model.clip_grad_norm_(1.0)

# %% summon-full-params-of-fsdp2
model = sharded()
model.summon_full_params(model)

# %% dtypes-under-fsdp-policy script=train_fsdp.py
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
model, wrong = (nn.Sequential(nn.Linear(8, 8), blocks(1)) for _ in range(2))
fully_shard(wrong[1])
fully_shard(wrong, mp_policy=policy)
wrong(x)

# %% already-applied
fully_shard(model[0])
fully_shard(model[0])

# %% nonfinite-norm
model = sharded()
(model(x).sum() * float("inf")).backward()
optimizer = torch.optim.AdamW(model.parameters())
nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

# %% no-inf-checks
model = sharded()
scaler = torch.amp.GradScaler("cpu")
model(x).sum().backward()
early = torch.optim.AdamW(blocks().parameters())  # the parameters before sharding
scaler.scale(model(x).sum()).backward()
scaler.step(early)


# %% buffer-on-meta
def shifted() -> Net:
    shift = nn.Buffer(torch.arange(8.0), persistent=False)
    return Net(lambda net, x: net.linear(x) + net.shift, linear=nn.Linear(8, 8), shift=shift)


with torch.device("meta"):
    model, wrong = fully_shard(shifted()), fully_shard(shifted())
weights = shifted().state_dict()
wrong.linear.to_empty(device="cpu")
wrong(x)

# %% copy-out-of-meta
with torch.device("meta"):
    model = blocks()
sharded(model)
model.to("cpu")

# %% full-tensor-of-a-gathered-root
model = sharded(Words().head)
with torch.no_grad():
    model(x)
model.weight.full_tensor()

# %% premul-sum-with-gloo
model, wrong = fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8))
for one in (model, wrong):
    one.set_gradient_divide_factor(8)
wrong(x).sum().backward()

# %% in-place-changes-placement
model = fully_shard(nn.Linear(8, 1, bias=False))
model(x).sum().backward()
torch.optim.Muon(model.parameters()).step()

# ---- meshes and tensor parallel --------------------------------------------------------------------------

# %% mesh-names-invalid
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
mesh["dp"]

# %% mesh-slice-without-names
mesh = init_device_mesh("cpu", (1, 2))
mesh["shard"]

# %% meshes-without-common-root
split = blocks()
tp.parallelize_module(
    split,
    init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
    {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()},
)
fully_shard(split, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

# %% operands-on-two-meshes
one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=one), fully_shard(nn.Linear(8, 8), mesh=two))
model(x).sum().backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)

# %% different-meshes-pointwise
one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
a = distribute_tensor(torch.ones(8, 8), one, [Shard(0)])
b = distribute_tensor(torch.ones(8, 8), two, [Replicate(), Shard(0)])
a + b

# %% colwise-only-linear
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})

# %% plan-key-unresolved
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = Words()
tp.parallelize_module(model, mesh, {"layers.*": tp.ColwiseParallel()})


# %% heads-under-tensor-parallel script=tensor_parallel.py
def forward(net: Net, x: Tensor) -> Tensor:
    return net.out(net.q(x).view(len(x), net.heads, 4).flatten(1))


mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = Net(forward, heads=2, q=nn.Linear(8, 8), out=nn.Linear(8, 8))
tp.parallelize_module(model, mesh, {"q": tp.ColwiseParallel(), "out": tp.RowwiseParallel()})
model(x)

# %% sharding-propagation-failed
model = sharded()
weight = model[0].weight.detach()
weight[weight > 0]

# ---- process groups --------------------------------------------------------------------------------------

# %% no-backend-for-device
gpus = dist.new_group(backend="cuda:gloo")
dist.all_reduce(torch.ones(2), group=gpus)

# %% unknown-backend
dist.new_group(backend="gluu")

# %% output-same-type
shard_ = torch.ones(2, dtype=torch.bfloat16)
dist.all_gather_into_tensor(torch.empty(4), shard_)

# %% group-not-initialized fresh
dist.destroy_process_group()
dist.barrier()

# %% rank-expected fresh
dist.destroy_process_group()
with mock.patch.dict(os.environ):
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo")

# %% address-in-use
first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)

# %% client-socket-timed-out
master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=datetime.timedelta(seconds=1))

# %% gloo-timed-out seconds=1 fresh
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))
else:
    raise RuntimeError("this rank left")

# %% connection-closed-by-peer fresh
if dist.get_rank() == 1:
    dist.destroy_process_group()
    raise ValueError("the error to look for")
time.sleep(0.5)  # until the other rank has closed its connections
dist.all_reduce(torch.ones(2))

# %% connect-full-mesh fresh
rank, limit = dist.get_rank(), datetime.timedelta(seconds=3)
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
port = [server.port if server else 0]
dist.broadcast_object_list(port)
store = server or dist.TCPStore("127.0.0.1", port[0], timeout=limit)
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    raise RuntimeError("this rank died")
# rank 0 comes again and finds the address that rank 1 had
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)

# %% invalid-scalar-type
eight = torch.ones(2).to(torch.float8_e4m3fn)
dist.all_reduce(eight)

# ---- state dicts and checkpoints -------------------------------------------------------------------------

# %% full-state-dict-must-be-true
model = sharded()
weights = blocks().state_dict() if dist.get_rank() == 0 else {}
sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(broadcast_from_rank0=True))

# %% missing-key-in-checkpoint
folder = shared_folder()
dcp.save(sd.get_model_state_dict(sharded(blocks(1))), checkpoint_id=folder)
model = sharded(blocks(2))
state = sd.get_model_state_dict(model)
dcp.load(state, checkpoint_id=folder)


# %% size-mismatch-in-checkpoint
def sharded_words(model: Words) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


folder, grown = shared_folder(), Words()
dcp.save(sd.get_model_state_dict(sharded_words(Words())), checkpoint_id=folder)
grown.embedding = nn.Embedding(18, 8)
dcp.load(sd.get_model_state_dict(sharded_words(grown)), checkpoint_id=folder)

# %% checkpoint-already-exists
folder = shared_folder()
state = sd.get_model_state_dict(sharded())
dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))
dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))

# %% async-save-needs-cpu
folder = shared_folder()
state = sd.get_model_state_dict(sharded())
gpus = dist.new_group(backend="cuda:gloo")
dcp.async_save(state, checkpoint_id=folder, process_group=gpus)

# %% missing-optimizer-state
model = sharded(half_frozen())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
model(x).sum().backward()
optimizer.step()
saved = sd.get_optimizer_state_dict(model, optimizer)
model = sharded()
optimizer = torch.optim.AdamW(model.parameters())
sd.set_optimizer_state_dict(model, optimizer, saved)

# %% single-process-assumed fresh
folder = shared_folder()
dist.destroy_process_group()
dcp.save({"weight": torch.ones(2)}, checkpoint_id=f"{folder}/{os.getpid()}")

# %% no-metadata
folder = shared_folder()
dcp.save({"model": sd.get_model_state_dict(sharded())}, checkpoint_id=f"{folder}/step_10")
model = sharded()
dcp.load({"model": sd.get_model_state_dict(model)}, checkpoint_id=folder)

# %% optim-state-dict-empty
model = sharded()
optimizer = torch.optim.AdamW(model.parameters())
saved = sd.get_optimizer_state_dict(model, optimizer)
sd.set_optimizer_state_dict(model, optimizer, {})

# %% optimizer-size-of-tensor
accumulating = FSDP(blocks(1))
optimizer = stepped(accumulating, foreach=False)
optimizer.zero_grad()
with accumulating.no_sync():
    accumulating(x).sum().backward()
with pytest.raises(RuntimeError, match=r"The size of tensor a \(\d+\) must match the size of tensor b"):
    optimizer.step()

saved = stepped(nn.Linear(8, 4)).state_dict()  # of the rows of one rank
model = blocks(1)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
optimizer.load_state_dict(saved)
model(x).sum().backward()
optimizer.step()


# %% optimizer-gradients-of-another-dtype
def make() -> tuple[Any, torch.optim.Optimizer]:
    model = FSDP(blocks(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    return model, torch.optim.AdamW(model.parameters())


model, optimizer = make()
with model.no_sync():
    model(x).sum().backward()
optimizer.step()

# %% parameter-group-size
model = sharded()
saved = torch.optim.AdamW(model.parameters()).state_dict()
decay = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}])
optimizer.load_state_dict(saved)

# %% key-prefix-fsdp1
model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8), use_orig_params=True)), use_orig_params=True)
with FullyShardedDataParallel.summon_full_params(model):
    saved = {name: p.detach().clone() for name, p in nn.Module.named_parameters(model)}
model = blocks(1)
model.load_state_dict(saved)

# %% key-prefix-compile
saved = torch.compile(blocks(), backend="eager").state_dict()
model.load_state_dict(saved)

# %% key-prefix-checkpoint-wrapper
saved = {
    f"{i}._checkpoint_wrapped_module.{n}": t
    for i in range(2)
    for n, t in nn.Linear(8, 8).state_dict().items()
}
model.load_state_dict(saved)

# %% key-prefix-ddp
saved = nn.parallel.DistributedDataParallel(blocks()).state_dict()
model.load_state_dict(saved)

# ---- activation checkpointing ----------------------------------------------------------------------------

# %% recomputed-metadata
linear, rows = nn.Linear(8, 8), iter((4, 3))
block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
checkpoint(lambda x: linear(x[: next(rows)]).relu(), x, use_reentrant=False).sum().backward()

# %% different-number-saved
linear, cache = nn.Linear(8, 8), []


def cached(x: Tensor) -> Tensor:
    if not cache:
        cache.append(linear(x).exp())
    return cache[0] * x


block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
checkpoint(cached, x.clone().requires_grad_(), use_reentrant=False).sum().backward()

# %% use-reentrant-explicit
block = nn.Linear(8, 8)
checkpoint(block, x.clone().requires_grad_())

# ---- Accelerate, transformers, peft ----------------------------------------------------------------------

# %% accelerate-no-layer-class
model = Words()
plugin = fsdp2_plugin(
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
plugin.set_auto_wrap_policy(model)

# %% accelerate-prepare-together
accelerator_ = accelerator()
accelerator_.prepare(model)

# %% accelerate-clip-value
accelerator_ = accelerator()
model, _ = accelerator_.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator_.backward(model(x).sum())
accelerator_.clip_grad_value_(model.parameters(), 1.0)

# %% trainer-fsdp-alone fresh
if not torch.accelerator.is_available():  # where the ranks are joined only if the CPU is asked for
    with pytest.raises(ValueError, match="Using fsdp only works in distributed training"):
        transformers.Trainer(blocks(), arguments(fsdp=True, use_cpu=False))
with mock.patch.dict(os.environ):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    transformers.Trainer(blocks(), arguments(fsdp=True))

# %% no-rng-file
trainer = transformers.Trainer(blocks(), arguments())
transformers.utils.logging.set_verbosity_info()
trainer._load_rng_state(tempfile.mkdtemp())
transformers.utils.logging.set_verbosity_warning()

# %% no-grad-fn
block = nn.Linear(8, 8)
checkpoint(block, x, use_reentrant=True).sum().backward()

# %% device-map-auto
accelerator_, model, mapped = accelerator(), blocks(), blocks()
mapped.hf_device_map = {"0": 0, "1": 1}  # what from_pretrained(device_map="auto") leaves on two GPUs
accelerator_.prepare(mapped, torch.optim.AdamW(mapped.parameters()))

# %% fsdp1-is-root
make = fsdp1_units
model = make()
model.module[0](x)
model(x)

# %% fsdp1-forward-under-inference-mode
model = FSDP(blocks())
with torch.inference_mode():
    model(x)
model(x)

# %% fsdp1-hybrid-mesh-of-two
mesh = init_device_mesh("cpu", (2,))
FSDP(blocks(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)

# %% fsdp1-group-and-mesh
model, mesh = blocks(), init_device_mesh("cpu", (2,))
FSDP(model, device_mesh=mesh, process_group=dist.group.WORLD)

# %% fsdp1-local-state-dict-with-mesh
model = FSDP(blocks(), device_mesh=init_device_mesh("cpu", (2,)))
with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
    model.state_dict()

# %% fsdp1-homogeneous-value
inner = FSDP(nn.Linear(8, 8), use_orig_params=True)
model = FSDP(nn.Sequential(inner, nn.Linear(8, 8)), use_orig_params=False)
model(x)

# %% fsdp1-summon-on-rank0
model = FSDP(blocks())
with FullyShardedDataParallel.summon_full_params(model, rank0_only=True):
    pass

# %% fsdp1-optimizer-state-keys
model = FSDP(blocks(), use_orig_params=True)
optimizer = stepped(model)
FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {})

# %% mesh-dim-needed
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
mesh.get_group()

# %% placements-and-mesh
mesh, weight = init_device_mesh("cpu", (1, 2)), torch.ones(4, 4)
distribute_tensor(weight, mesh, [Shard(0)])

# %% distributed-twice
mesh, model = init_device_mesh("cpu", (2,)), blocks()
tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})

# %% model-state-dict-empty
weights, model = blocks().state_dict(), sharded()
sd.set_model_state_dict(model, {})

# %% empty-shard-in-checkpoint
model = FSDP(blocks(), use_orig_params=True)
pieces = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
blocks().load_state_dict(pieces)

# %% fsdp1-saved-after-freeing
model = FSDP(blocks())
with FullyShardedDataParallel.summon_full_params(model):
    taken = {name: parameter.detach() for name, parameter in model.module.named_parameters()}
path = f"{shared_folder()}/{dist.get_rank()}.pt"
torch.save(taken, path)
torch.load(path)

# %% gradient-on-another-device
parameter = sharded()[0].weight
parameter.grad = torch.ones(8, 8, device="meta")


# %% view-of-output-changed-in-place
def forward(net: Net, x: Tensor, in_place: bool) -> Tensor:
    y = net.view(x)
    if in_place:
        y += 1
    return net.head(y.relu() if in_place else (y + 1).relu())


def adding() -> Net:
    view = Net(lambda net, x: net.linear(x)[None][0], linear=nn.Linear(8, 8))
    return Net(forward, view=view, head=nn.Linear(8, 8))


model, wrong = sharded(adding()), sharded(adding())
wrong(x.clone().requires_grad_(), in_place=True).sum().backward()

# %% none-of-the-inputs-require-grad
block = nn.Linear(8, 8)
checkpoint(block, x, use_reentrant=True)

# ---- FSDP1, states of a step -----------------------------------------------------------------------------


# %% fsdp1-backward-outside-of-a-step
class Loss(nn.Module):
    def __init__(self, *, optimizes: bool = False) -> None:
        super().__init__()
        self.linear, self.optimizes = nn.Linear(8, 8), optimizes

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).sum()
        if self.optimizes:
            loss.backward()
        return loss


model = FSDP(Loss(optimizes=True))
model(x)

# %% fsdp1-post-backward-hook-state
make = fsdp1_units
model = make()
loss = model(x).sum()
model.module[0].requires_grad_(False)
loss.backward()

# %% fsdp1-view-of-flat-parameter
model = FSDP(Words(), use_orig_params=False)
model(tokens).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
model.module.embedding(tokens)

# %% fsdp1-weight-is-flat script=train_fsdp.py
model = FSDP(blocks(), use_orig_params=True)
model(x)
model.module[0](x)


# %% dora-under-fsdp1
def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(blocks(), LoraConfig(target_modules=["0"], use_dora=True))


def trained_layer(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or (isinstance(module, nn.Linear) and module.weight.requires_grad)


FSDP(adapted(), auto_wrap_policy=trained_layer, use_orig_params=True)(x)


# %% fsdp1-assumes-in-state-dict
def leave_out(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
    del state[f"{prefix}weight"]


model, wrong = FSDP(blocks()), FSDP(blocks())
hook = wrong.module[1].register_state_dict_post_hook(leave_out)
sd.get_model_state_dict(wrong, options=sd.StateDictOptions(full_state_dict=True))


# %% fsdp1-failed-to-clone
def full(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")  # what a full GPU raises here


model = FSDP(blocks())
with (
    mock.patch.object(Tensor, "clone", full),
    FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT),
):
    model.state_dict()


# %% fsdp1-reset-parameters-on-meta
def make() -> nn.Module:
    with torch.device("meta"):
        scale = Net(lambda net, x: x * net.weight, weight=nn.Parameter(torch.ones(8)))
        return nn.Sequential(scale, nn.Linear(8, 8))


model = make()
FSDP(make())

# %% fsdp1-called-while-gathered
model, wrong = (FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)))) for _ in range(2))
with FullyShardedDataParallel.summon_full_params(wrong):
    wrong(x)

# %% fsdp1-full-state-into-shards
weights, model = blocks().state_dict(), FSDP(blocks(), use_orig_params=True)
model.module.load_state_dict(weights)

# ---- FSDP2, more -----------------------------------------------------------------------------------------

# %% module-of-fsdp2
model = sharded()
_ = model.module

# %% sharded-under-inference-mode
model = sharded()
with torch.inference_mode():
    model(x)
model(x).sum().backward()

# %% optimizer-state-is-plain
plain = blocks()
of_plain = stepped(plain)
options = sd.StateDictOptions(full_state_dict=True)
full = sd.get_optimizer_state_dict(plain, of_plain, options=options)
model = sharded()
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(of_plain.state_dict())
model(x).sum().backward()
optimizer.step()

# %% gradient-of-another-size
parameter, full = sharded()[0].weight, torch.ones(8, 8)
nn.Parameter(torch.ones(8)).grad = torch.ones(4)

# %% parameter-replaced-after-sharding
model = fully_shard(Words())
model.embedding.weight = nn.Parameter(torch.randn(18, 8))
model(tokens)

# %% safetensors-of-dtensors
from safetensors.torch import save_file

model, folder = sharded(), tempfile.mkdtemp()
save_file(model.state_dict(), f"{folder}/model.safetensors")


# %% changed-in-place-under-fsdp script=train_fsdp.py
class Scaled(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 8), in_place
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        self.scale = self.scale.mul_(0.9) if self.in_place else self.scale * 0.9
        return y


model = sharded(Scaled(in_place=True))
(model(x) + model(x)).sum().backward()


# %% expected-scalar-type-under-fsdp script=train_fsdp.py
class Mixing(nn.Module):
    def __init__(self, *, cast: bool) -> None:
        super().__init__()
        self.linear, self.cast = nn.Linear(8, 8), cast
        self.register_buffer("mixture", torch.ones(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)[:, None]
        return torch.bmm(y, self.mixture.to(y.dtype) if self.cast else self.mixture)


model = sharded(Mixing(cast=False), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
model(x)

# ---- process groups, more --------------------------------------------------------------------------------

# %% collectives-differ fresh
level = dist.get_debug_level()
dist.set_debug_level(dist.DebugLevel.DETAIL)
try:
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
finally:
    dist.set_debug_level(level)
dist.all_reduce(torch.ones(4 + dist.get_rank()), group=group)

# %% store-wait-timeout
second = datetime.timedelta(seconds=1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=second)
store.get("something")

# %% clients-joined
second = datetime.timedelta(seconds=1)
dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=second)

# %% store-is-gone
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
del store
client.get("something")

# ---- checkpoints, more -----------------------------------------------------------------------------------

# %% distcp-is-missing
folder, state = shared_folder(), {"weight": torch.ones(8)}
dcp.save(state, checkpoint_id=folder)
if dist.get_rank() == 0:
    for file in Path(folder).glob("*.distcp"):
        file.unlink()
dist.barrier()
dcp.load(state, checkpoint_id=folder)

# %% size-mismatch-in-sharded-load
weights, model = Words().state_dict(), Words()
model.embedding = nn.Embedding(18, 8)
fully_shard(model)
sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(full_state_dict=True))

# %% objects-out-of-step
if dist.get_rank() == 0:
    dist.broadcast(torch.tensor([-5]), 0)
else:
    dist.broadcast_object_list([None], 0)
raise RuntimeError("the other rank")


# %% fsdp1-forward-order-between-ranks
def forward(net: Net, x: Tensor, order: tuple[int, ...] = (0, 1)) -> Tensor:
    return functools.reduce(lambda x, i: net.units[i](x), order, x)


model = FSDP(Net(forward, units=nn.ModuleList(FSDP(nn.Linear(8, 8)) for _ in range(2))))
with contextlib.ExitStack() as stack:
    stack.callback(dist.set_debug_level, dist.get_debug_level())
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrong = FSDP(Net(forward, units=nn.ModuleList(FSDP(nn.Linear(8, 8)) for _ in range(2))))
    wrong(x, (0, 1) if dist.get_rank() == 0 else (1, 0))


# %% fsdp1-forward-order-between-iterations
def forward(net: Net, x: Tensor, order: tuple[int, ...] = (0, 1)) -> Tensor:
    return functools.reduce(lambda x, i: net.units[i](x), order, x)


with contextlib.ExitStack() as stack:
    stack.callback(dist.set_debug_level, dist.get_debug_level())
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = FSDP(Net(forward, units=nn.ModuleList(FSDP(nn.Linear(8, 8)) for _ in range(2))))
    for order in ((0, 1), (1, 0)):
        model(x, order).sum().backward()

# %% monitored-barrier fresh
if dist.get_rank() == 0:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))
raise RuntimeError("the other rank")


# %% attribute-of-ddp
class Classifier(nn.Sequential):
    classes = 8

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))


model = nn.parallel.DistributedDataParallel(Classifier())
model.classes

# %% size-of-tensor-in-broadcast
weights, model = Words().state_dict(), Words()
model.embedding = nn.Embedding(18, 8)
fully_shard(model)
options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
sd.set_model_state_dict(model, weights, options=options)


# %% weights-only-load
class Settings:
    """Of a library, in a checkpoint."""


Settings.__module__ = "settings"
with mock.patch.dict("sys.modules", {"settings": mock.Mock(Settings=Settings)}):
    file = f"{tempfile.mkdtemp()}/rng_state_0.pth"
    torch.save({"settings": Settings()}, file)
torch.load(file)

# ---- Accelerate, transformers, Lightning, more -----------------------------------------------------------

# %% accelerate-optimizer-not-switched
accelerator_, model = accelerator(), blocks()
optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(8))])
accelerator_.prepare(model, optimizer)


# %% accelerate-params4bit
class Params4bit(nn.Parameter):
    """Stands for bitsandbytes' class, which Accelerate knows by its name."""


accelerator_, model = accelerator(), blocks()
model.packed = Params4bit(torch.ones(8, dtype=torch.uint8), requires_grad=False)
trained = [p for p in model.parameters() if p.requires_grad]
accelerator_.prepare(model, torch.optim.AdamW(trained))
warnings.warn("so that every rank has a text: the main process alone warns", stacklevel=1)

# %% trainer-checkpoint-of-fsdp
trainer, folder = transformers.Trainer(blocks(), arguments()), shared_folder()
(Path(folder) / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
trainer._load_from_checkpoint(folder)

# %% trainer-no-valid-checkpoint
trainer, folder = transformers.Trainer(blocks(), arguments()), tempfile.mkdtemp()
trainer._load_from_checkpoint(folder)

# %% lightning-clip-by-norm
from lightning.pytorch.plugins.precision import FSDPPrecision

FSDPPrecision("32-true").clip_grad_by_norm()

# %% lightning-optimizer-before-model
from lightning.fabric.strategies import FSDPStrategy

strategy = FSDPStrategy(use_orig_params=False)
strategy.setup_optimizer(torch.optim.AdamW(blocks().parameters()))

# %% fsdp1-names-do-not-fit
weights, model = blocks().state_dict(), FSDP(blocks())
model.load_state_dict({f"model.{name}": tensor for name, tensor in weights.items()})

# %% device-mesh-of-a-plain-tensor
model.register_buffer("steps", torch.zeros(1))
fully_shard(model)
_ = [tensor.device_mesh for tensor in model.state_dict().values()]

# %% sharded-module-cannot-be-cast
model = sharded()
reference = weakref.ref(model[0].weight)
model.to(torch.bfloat16)

# %% optimizer-got-no-parameters
model = sharded().requires_grad_(False)
of_fsdp = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
del of_fsdp

# %% tensors-share-memory
from safetensors.torch import save_file

model, folder = Words(tied=True), tempfile.mkdtemp()
save_file(model.state_dict(), f"{folder}/model.safetensors")

# %% fsdp1-nothing-is-sharded
model = FSDP(blocks(), sharding_strategy=ShardingStrategy.NO_SHARD)
with FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True):
    pass


# %% fsdp1-summon-during-forward
def forward(net: Net, x: Tensor) -> Tensor:
    with FullyShardedDataParallel.summon_full_params(wrong):
        return net.linear(x)


model, wrong = FSDP(blocks()), FSDP(Net(forward, linear=nn.Linear(8, 8)))
wrong(x)

# %% fsdp1-optimizer-of-other-parameters
optimizer = torch.optim.AdamW(model.parameters())
sd.get_optimizer_state_dict(FSDP(model, use_orig_params=False), optimizer)


# %% fsdp1-optimizer-state-of-several-dtypes
class Packed(torch.optim.Optimizer):
    """Keeps its state in two dtypes, as optimizers of 8 bits do."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"moment": torch.zeros_like(p), "scale": torch.ones_like(p, dtype=torch.bfloat16)}


packed = functools.partial(stepped, kind=Packed, defaults={})
model = FSDP(blocks(), use_orig_params=True)
FullyShardedDataParallel.optim_state_dict(model, packed(model))

# %% fsdp1-optimizer-state-of-unused-unit
model = FSDP(Net(lambda net, x: net.text(x), text=FSDP(nn.Linear(8, 8)), vision=FSDP(nn.Linear(8, 8))))
optimizer = stepped(model)
saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
saved["state"] |= {"vision.weight": {}, "vision.bias": {}}  # names without a state
FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)


# %% fsdp1-group-over-tensor-parallel
def parallel() -> nn.Module:
    return tp.parallelize_module(blocks(1), mesh["tensor"], {"0": tp.ColwiseParallel()})


mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
FSDP(parallel(), process_group=mesh["data"].get_group())(x)

# %% compile-of-fsdp1
model, backend = blocks(), "eager"
wrapped = FSDP(blocks())
torch.compile(lambda x: wrapped(x), backend=backend, fullgraph=True)(x)  # without it, a graph break

# %% broadcast-of-sharded-state seconds=2 fresh
model = sharded()
options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
sd.set_model_state_dict(model, model.state_dict(), options=options)


# %% quantization-state-of-a-dtensor
def with_state(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
    state[f"{prefix}weight.absmax"] = torch.ones(1)  # as bitsandbytes' Linear4bit does


model[0].register_state_dict_post_hook(with_state)
fully_shard(model)
sd.get_model_state_dict(model)

# %% unscaled-twice
model = sharded()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
scaler.scale(model(x).sum()).backward()
scaler.unscale_(optimizer)
scaler.unscale_(optimizer)

# %% no-nccl-built-in fresh
dist.new_group(backend="nccl")

# %% distribute-to-another-mesh
t = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
other = init_device_mesh("cpu", (1, 2))
distribute_tensor(t, other, [Replicate(), Shard(0)])

# %% lightning-no-model-in-state
from lightning.fabric.strategies import FSDPStrategy

strategy, folder = FSDPStrategy(), shared_folder()
strategy.save_checkpoint(f"{folder}/plain", {"model": blocks()})

# %% lightning-no-valid-checkpoint
from lightning.fabric.strategies import FSDPStrategy

strategy, folder = FSDPStrategy(), shared_folder()
strategy.load_checkpoint(folder, {"model": FSDP(blocks())})

# %% accelerate-one-model
accelerator_, trained, frozen = accelerator(), blocks(), blocks()
accelerator_.prepare(trained, frozen, torch.optim.AdamW(trained.parameters()))

# %% accelerate-parallelism-size
from accelerate.parallelism_config import ParallelismConfig

accelerator_ = accelerator()
ParallelismConfig(dp_shard_size=4)._validate_accelerator(accelerator_)

# ---- by raise sites --------------------------------------------------------------------------------------

# %% fsdp1-state-dict-types-differ
model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8)))
FullyShardedDataParallel.set_state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT)
FullyShardedDataParallel.get_state_dict_type(model)

# %% fsdp1-optimizer-state-of-another-shape
model = FSDP(blocks(), use_orig_params=False)
optimizer = stepped(model)
state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
wrong = copy.deepcopy(state)
for one in wrong["state"].values():
    one["exp_avg"] = torch.ones(3)
FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, wrong)

# %% several-roots
model, wrong = blocks(), blocks()
fully_shard([wrong[0], wrong[1]])
wrong[0](x)

# %% checkpoint-without-id
model, folder = sharded(), shared_folder()
dcp.save(model.state_dict())

# %% optimizer-state-that-cannot-be-flattened
model = sharded()
optimizer = stepped(model)
optimizer.state[model[0].weight]["kind"] = "matrix"
options = sd.StateDictOptions(flatten_optimizer_state_dict=True)
sd.get_optimizer_state_dict(model, optimizer, options=options)

# %% rank-not-in-group
groups = [dist.new_group([rank]) for rank in range(2)]
rank = dist.get_rank()
dist.broadcast(torch.ones(1), src=1 - rank, group=groups[rank])

# %% reentrant-checkpoint-with-grad
block, inputs = blocks(), x.clone().requires_grad_()
torch.autograd.grad(checkpoint(block, inputs, use_reentrant=True).sum(), inputs)

# %% ddp-models-differ fresh
nn.parallel.DistributedDataParallel(blocks(1 + dist.get_rank()))

# %% accelerate-quantized-on-another-device
accelerator_, model = accelerator(), blocks()
model.is_loaded_in_4bit, model.hf_device_map = True, {"": "cuda:1"}
accelerator_.prepare_model(model)

# %% accelerate-sync-module-states
from accelerate.utils import load_fsdp_model

plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
accelerator_, model, folder = accelerator(), blocks(), tempfile.mkdtemp()
accelerator_.state.fsdp_plugin = plugin
torch.save(model.state_dict(), f"{folder}/pytorch_model_fsdp.bin")
load_fsdp_model(plugin, accelerator_, model, folder)

# %% accelerate-unknown-keys
from accelerate.commands.config.config_args import ClusterConfig

file = Path(tempfile.mkdtemp()) / "config.yaml"
file.write_text("distributed_type: FSDP\nfsdp_sharding: 1\n")
ClusterConfig.from_yaml_file(file)

# %% accelerate-cpu-offload-of-another-version
from torch.distributed.fsdp import CPUOffload

fsdp2_plugin(cpu_offload=CPUOffload(True))

# %% accelerate-ram-efficient-alone
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env


def arguments(sync_module_states: bool) -> Any:
    line = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --use_fsdp train.py"
    options = launch_command_parser().parse_args(line.split())
    options.fsdp_cpu_ram_efficient_loading = True  # as a config of Accelerate has them
    options.fsdp_sync_module_states = sync_module_states
    return options


prepare_multi_gpu_env(arguments(sync_module_states=False))

# %% accelerate-save-meta
accelerator_, folder = accelerator(), tempfile.mkdtemp()
with torch.device("meta"):
    accelerator_.save_model(blocks(), folder)

# %% trainer-quantized
model, args = blocks(), arguments()
model.is_quantized = True
transformers.Trainer(model, args)

# %% lightning-fsdp-on-cpu
from lightning.fabric import Fabric

Fabric(strategy="fsdp", accelerator="cpu")

# %% lightning-original-parameters
from lightning.fabric.strategies import FSDPStrategy

FSDPStrategy(use_orig_params=False).setup_module_and_optimizers(model, [])

# %% lightning-several-models
from lightning.fabric.strategies import FSDPStrategy

strategy, folder = FSDPStrategy(), shared_folder()
models = {"student": FSDP(blocks()), "teacher": FSDP(blocks())}
strategy.save_checkpoint(f"{folder}/two", models)

# %% lightning-fsdp1-under-model-parallel
from lightning.fabric.strategies import ModelParallelStrategy

strategy = ModelParallelStrategy(lambda model, mesh: model)
strategy.setup_module(FSDP(blocks()))


# %% unused-parameters-ddp-or-fsdp script=train_fsdp.py fresh
class Partly(Words):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.embedding(tokens))


model = nn.parallel.DistributedDataParallel(Partly())
for _ in range(2):
    model(tokens).sum().backward()


# %% ddp-ready-twice fresh
def forward(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.block, checkpoint(net.block, x, use_reentrant=True), use_reentrant=True)


inputs, block = x.clone().requires_grad_(), blocks()
twice = Net(forward, block=nn.Linear(8, 8))
model = nn.parallel.DistributedDataParallel(twice, find_unused_parameters=True)
model(inputs).sum().backward()


# %% checkpoint-exception
class Failing(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise OSError("no space left")


folder, state = shared_folder(), sharded().state_dict()
dcp.save(state, checkpoint_id=folder, planner=Failing())

# %% fsdp-needs-an-accelerator
FullyShardedDataParallel(model)

# %% fsdp1-sync-module-states-on-cpu
FSDP(model, sync_module_states=True)

# %% fsdp1-manual-hybrid
FSDP(blocks(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)

# %% deepcopy-unsupported
model = sharded()
copy.deepcopy(model)

# %% containers-without-forward
model = Words()
fully_shard(model.blocks)

# %% hsdp-mesh-without-names
fully_shard(blocks(), mesh=init_device_mesh("cpu", (1, 2)))

# %% reshard-factor
fully_shard(blocks(), reshard_after_forward=3)

# %% uneven-sharding-on-dim
model = nn.Linear(7, 4)
fully_shard(nn.Linear(7, 4), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))

# %% generate-mixed
model = fully_shard(Words())
model.generate(tokens)

# %% limit-all-gathers-of-fsdp2
fully_shard(blocks(), limit_all_gathers=True)

# %% no-such-forward-method
model = fully_shard(Words())
register_fsdp_forward_method(model, "sample")

# %% pickle-fsdp-module
model = sharded()
torch.save(model, io.BytesIO())

# %% full-tensor-of-a-plain-tensor
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
[tensor.full_tensor() for tensor in model.state_dict().values()]

# %% muon-two-dimensions
model = sharded()
torch.optim.Muon(model.parameters())

# %% mesh-bigger-than-world
init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

# %% mesh-names-and-shape
init_device_mesh("cpu", (2,), mesh_dim_names=("replicate", "shard"))

# %% no-sharding-strategy
model = sharded()
torch.renorm(model[0].weight.detach(), 2, 0, 1.0)

# %% initialized-twice
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

# %% trainer-unknown-option
arguments(fsdp="full_shard hybrid")

# %% fsdp1-mixed-precision-policy
FSDP(
    blocks(),
    mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
)

# %% ignored-params-of-fsdp1
FSDP(model, ignored_params=set(model[0].parameters()))

# %% fsdp1-state-dict-type-none
model = FSDP(blocks())
FullyShardedDataParallel.set_state_dict_type(model, None)

# %% group-size-and-world-size
dist.new_subgroups(3)

# %% fsdp1-gradients-of-gradients
FSDP(blocks())(x).square().sum().backward(create_graph=True)

# %% arguments-of-fsdp1
fully_shard(blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

# %% cannot-import-from-fsdp
exec("from torch.distributed.fsdp import name_of_a_newer_torch")

# %% integer-parameter-with-gradient
fully_shard(nn.ParameterList([nn.Parameter(torch.ones(8, 8, dtype=torch.uint8))]))

# %% numpy-of-dtensor
model = sharded()
model[0].weight.detach().numpy()

# %% collective-of-dtensor
model = sharded()
dist.broadcast(model[0].weight, 0)

# %% collective-without-a-kernel
torch.ops.fsdp.all_gather_copy_in([torch.ones(4).to_sparse()], torch.ones(8), [4], 4, 0)

# %% arguments-of-another-torch
FSDP(blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))

# %% redistribute-to-partial
model = sharded()
model[0].weight.redistribute(placements=[Partial()])

# %% sharding-strategy-by-number
ShardingStrategy(0)

# %% sharding-strategy-as-text
FSDP(blocks(), sharding_strategy="FULL_SHARD")

# %% fsdp1-ignored-twice
FSDP(model, ignored_modules=[model[0]], ignored_states=[model[0]])

# %% reshard-after-forward-as-text
fully_shard(blocks(), reshard_after_forward="FULL_SHARD")

# %% prefetch-of-unsharded-modules
model = sharded()
fully_shard(blocks()).set_modules_to_forward_prefetch([nn.Linear(8, 8)])

# %% collective-of-a-number
dist.all_reduce(1.5)

# %% ddp-nothing-to-train
model = blocks().requires_grad_(False)
nn.parallel.DistributedDataParallel(model)

# %% accelerate-no-device
FullyShardedDataParallelPlugin(sync_module_states=True)

# %% accelerate-plugin-of-another-version
fsdp2_plugin().save_model

# %% accelerate-local-state-dict
fsdp2_plugin(state_dict_type="LOCAL_STATE_DICT")

# %% accelerate-reshard-string
fsdp2_plugin(reshard_after_forward="FULL_SHARD")

# %% accelerate-forward-prefetch
fsdp2_plugin(forward_prefetch=True)

# %% trainer-two-checkpointings
transformers.Trainer(
    blocks(),
    arguments(fsdp=True, fsdp_config={"activation_checkpointing": True}, activation_checkpointing=True),
)

# %% accelerate-reshard-bool
FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=True)

# %% accelerate-auto-wrap-policy
fsdp2_plugin(auto_wrap_policy="always")

# %% accelerator-without-fsdp
from accelerate import Accelerator

Accelerator(cpu=True).state.fsdp_plugin

# %% accelerate-size-of-units
fsdp2_plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=100000000.0)

# %% trainer-option-of-fsdp1
arguments(fsdp="hybrid_shard")

# %% torch-without-cuda
torch.zeros(1, device="cuda")

# %% deserialize-on-missing-gpu
file = io.BytesIO()
with mock.patch("torch.serialization.location_tag", return_value="cuda:3"):
    torch.save(torch.ones(2), file)
file.seek(0)
torch.load(io.BytesIO(file.getvalue()))

# %% file-cannot-be-written
state = {"weight": torch.zeros(100_000)}
torch.save(state, "/dev/full")

# %% safetensors-header
import safetensors.torch

state = {"weight": torch.ones(100)}
path = Path(tempfile.mkdtemp()) / "model.safetensors"
safetensors.torch.save_file(state, path)
path.write_bytes(path.read_bytes()[:200])
safetensors.torch.load_file(path)

# %% trainer-bf16-without-gpu
transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), bf16=True)

# %% network-interface-unknown
os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
dist.new_group(backend="gloo")

# %% mesh-without-this-rank
meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
fully_shard(blocks(), mesh=meshes[1 - dist.get_rank()])

# %% fsdp1-policy-of-names
FSDP(blocks(), auto_wrap_policy=ModuleWrapPolicy({"Linear"}))

# %% fsdp1-ignored-of-another-kind
FSDP(blocks(), ignored_states=["0.weight"])


# %% fsdp1-child-is-wrapped
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


from torch.distributed.fsdp.wrap import always_wrap_policy

block = nn.Sequential(nn.Linear(8, 8))
FSDP(nn.ModuleList([nn.Sequential(block), nn.Sequential(block)]), auto_wrap_policy=always_wrap_policy)


# %% gradients-of-two-dtypes
def forward(net: Net, x: Tensor, both: bool) -> Tensor:
    return net.second(net.first(x)) if both else net.first(x)


def make() -> Any:
    model = Net(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


model = make()
for both in (False, True):
    model.set_requires_gradient_sync(both)
    model(x, both).sum().backward()

# %% accelerate-full-state-without-parameter
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

one, model, full = accelerator(), sharded(), {}
with mock.patch("accelerate.Accelerator.is_main_process", True):
    fsdp2_load_full_state_dict(one, model, full)

# %% too-many-open-files
import resource
import socket

few, (_, hard) = len(list(Path("/proc/self/fd").iterdir())) + 20, resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
sockets = [socket.socket() for _ in range(few)]

# %% accelerate-nothing-left-to-shard
from accelerate.parallelism_config import ParallelismConfig

one = accelerator()
ParallelismConfig(tp_size=2)._validate_accelerator(one)

# %% fsdp1-state-dict-config-of-another-kind
from torch.distributed.fsdp import ShardedStateDictConfig

model = FSDP(blocks())
FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())


# %% adapter-of-experts-is-flat
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy


def adapted() -> Any:
    """A layer after experts, both with LoRA."""
    experts = Net(lambda net, x: x @ net.weight.sum(0), weight=nn.Parameter(torch.randn(4, 8, 8)))
    base = Net(lambda net, x: net.linear(net.experts(x)), experts=experts, linear=nn.Linear(8, 8))
    config = LoraConfig(r=2, target_modules=["linear"], target_parameters=["experts.weight"])
    return get_peft_model(base, config)


model = adapted()
FSDP(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), use_orig_params=True)(x)


# %% quantization-state-in-a-state-dict
class Params4bit(nn.Parameter):
    """Stands for bitsandbytes' class."""


def with_absmax(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
    state[f"{prefix}weight.absmax"] = torch.ones(1)


model[0].weight = Params4bit(model[0].weight.detach(), requires_grad=False)
model[0].register_state_dict_post_hook(with_absmax)
model = FSDP(model, use_orig_params=True)
sd.get_model_state_dict(model)


# %% parameter-assigned-as-tensor
def forward(net: Net, x: Tensor) -> Tensor:
    bias, net.linear.bias = net.linear.bias, None
    output = net.linear(x)
    net.linear.bias = bias
    return output + bias


FSDP(Net(forward, linear=nn.Linear(8, 8)), use_orig_params=True)(x)


# %% input-changed-in-place
def forward(net: Net, x: Tensor) -> Tensor:
    x += 1
    return net.linear(x)


fully_shard(Net(forward, linear=nn.Linear(8, 8)))(x.clone().requires_grad_() * 2)

# %% output-is-a-view
model = fully_shard(Net(lambda net, x: net.linear(x).unsqueeze(0), linear=nn.Linear(8, 8)))
model(x)

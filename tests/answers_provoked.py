"""Raises each message of fsdp_utils/answers/messages.yaml on two CPU ranks, then runs the entry's cure.

A function has the name of its entry, with `_` for `-`, and ends by raising the message. The code of the cure
then runs with the function's local variables. A function whose message is a warning, or a line of a log,
returns `locals()`. A message that a single call raises is a row of ONE_CALL. To add one, copy a short one.
"""
# ruff: noqa: F841  (a variable that is not used here is one for the cure)

import contextlib
import copy
import datetime
import functools
import io
import logging
import os
import tempfile
import time
import traceback
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
from torch.distributed.device_mesh import init_device_mesh
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

Names = dict[str, Any]
PROVOKED: dict[str, tuple[Callable[[], Names | None], float, bool]] = {}  # by id: see `provoked`
FSDP = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
fsdp2_plugin = functools.partial(FullyShardedDataParallelPlugin, fsdp_version=2)


def provoked(
    function: Callable[[], Names | None] | None = None, *, seconds: float = 30, fresh: bool = False
) -> Any:
    """Enter a function into the table.

    Args:
        seconds: time limit of its process group.
        fresh: run the cure in another group, as this one is spoilt.
    """
    if function is None:
        return functools.partial(provoked, seconds=seconds, fresh=fresh)
    PROVOKED[function.__name__.replace("_", "-")] = function, seconds, fresh
    return function


def message_of(function: Callable[[], Names | None]) -> tuple[str, Names]:
    """Return what the function raises, warns and logs, and its names by then."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    every = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    loggers = [logging.root, *(logger for logger in every if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    # FSDP1 also prints the stack
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            names, raised = function() or {}, ""
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            (_, _), (frame, _), *_ = traceback.walk_tb(
                error.__traceback__
            )  # of this function, and of that one
            names, raised = dict(frame.f_locals), "".join(traceback.format_exception(error))
    for logger in loggers:
        logger.removeHandler(handler)
    text = log.getvalue() + "".join(f"{one.category.__name__}: {one.message}\n" for one in warned) + raised
    assert text, "nothing was raised, warned or logged"
    return text, names


def run_one(name: str, code: str, folder: str) -> tuple[str, str]:
    """Raise a message on this rank and run its cure; return the message, and what went wrong, mostly ""."""
    function, seconds, fresh = PROVOKED[name]
    rank, size = dist.get_rank(), dist.get_world_size()

    store = dist.FileStore(f"{folder}/{name}", size)

    def together(label: str, value: str = "") -> list[str]:
        store.set(f"{label}{rank}", value)
        return [store.get(f"{label}{one}").decode() for one in range(size)]

    def group(label: str, limit: float) -> None:
        together(f"before {label}")  # the other rank has left what it did before
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(label, store),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=limit),
        )
        together(f"in {label}")

    torch.manual_seed(0)
    text, wrong, names = "", "", {}
    group("message", seconds)
    try:
        text, names = message_of(function)
    except Exception:
        wrong = traceback.format_exc()
    if any(together("raised", wrong)):
        return text, wrong or "the other rank failed"
    if fresh:
        group("cure", 30)
    try:
        exec(compile(code, f"cure of {name}", "exec"), {**globals(), **names})
    except Exception:
        wrong = traceback.format_exc()
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]
    return text, wrong


def run_all(wanted: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Run each (id, code of the cure) on this rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return {name: run_one(name, code, folder[0]) for name, code in wanted}


# ---- models ----------------------------------------------------------------------------------------------


def blocks(count: int = 2, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def sharded(model: nn.Module | None = None, **options: Any) -> Any:
    model = blocks() if model is None else model
    for child in model.children():
        if next(child.parameters(), None) is not None:
            fully_shard(child, **options)
    return fully_shard(model, **options)


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
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).argmax(-1)


x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
tokens = torch.arange(8).reshape(2, 4)


# ---- FSDP1 -----------------------------------------------------------------------------------------------


@provoked
def uniform_requires_grad() -> None:
    model = blocks()
    model[0].requires_grad_(False)
    FSDP(model, use_orig_params=False)


@provoked
def mixed_requires_grad_in_unit() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(blocks())
        model[0][0].requires_grad_(False)
        return model

    model = make()
    FSDP(make(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)


@provoked
def cannot_flatten_integer_dtype() -> None:
    model = blocks()
    model.register_parameter("packed", nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False))
    FSDP(model)


@provoked
def uniform_dtype() -> None:
    model = blocks()
    model[1].to(torch.bfloat16)
    FSDP(model)


@provoked
def weight_must_be_2d() -> None:
    model = FSDP(Words(), use_orig_params=True)
    model(tokens)
    model.module.embedding(tokens)


@provoked
def unscale_fp16_gradients() -> None:
    half = sharded(blocks().half())
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(half.parameters())
    scaler.scale(half(x.half()).float().sum()).backward()
    model = blocks()
    scaler.unscale_(optimizer)


@provoked(seconds=2, fresh=True)
def writeback_shape_changes() -> None:
    def grow(embedding: nn.Embedding) -> None:
        embedding.weight = nn.Parameter(torch.zeros(18, 8))

    wrapped = FSDP(Words(), use_orig_params=True)
    grow(wrapped.module.embedding)
    model = Words()
    wrapped(tokens)


@provoked
def fsdp1_clip_on_inner() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))
    model(x).sum().backward()
    model.module[0].clip_grad_norm_(1.0)


@provoked
def fsdp1_training_state() -> None:
    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.roots = nn.Linear(8, 8), list[Any]()

        def forward(self, x: Tensor) -> Tensor:
            with self.roots[0].no_sync() if self.roots else contextlib.nullcontext():
                return self.linear(x)

    model, wrong = FSDP(Accumulating()), FSDP(Accumulating())
    wrong.module.roots.append(wrong)
    wrong(x)


@provoked
def fsdp1_no_sync_on_inner() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))
    model(x)
    with model.module[0].no_sync():
        pass


@provoked
def fsdp1_already_applied() -> None:
    partly = nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8))
    model = blocks()
    FSDP(partly, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@provoked
def fsdp1_assumes_key() -> Names:
    model = FSDP(blocks())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        del state["1.weight"]
        model.load_state_dict(state, strict=False)
    return locals()


@provoked
def fsdp1_state_dict_type_deprecated() -> Names:
    model = FSDP(blocks())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()
    return locals()


@provoked
def no_shard_deprecated() -> Names:
    model = blocks()
    FSDP(copy.deepcopy(model), sharding_strategy=ShardingStrategy.NO_SHARD)
    return locals()


@provoked
def world_size_is_one() -> Names:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = blocks()
    FSDP(blocks(), process_group=alone)
    return locals()


# ---- FSDP2 -----------------------------------------------------------------------------------------------


@provoked
def shared_with_another_group() -> None:
    model, apart = Words(tied=True), Words(tied=True)
    for part in (apart.embedding, apart.head, apart):
        fully_shard(part)
    apart(tokens)


@provoked
def mesh_of_one_or_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    model = blocks()
    fully_shard(blocks(), mesh=mesh)


@provoked
def scalar_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = Scaled(torch.tensor(1.0))
    fully_shard(model)


@provoked
def non_contiguous_parameters() -> None:
    def make() -> nn.Linear:
        model = nn.Linear(8, 4)
        model.weight = nn.Parameter(torch.randn(8, 4).T)
        return model

    model = make()
    fully_shard(make())


@provoked
def uniform_original_dtype() -> None:
    model = blocks()
    model[1].to(torch.bfloat16)
    fully_shard(copy.deepcopy(model))(x)


@provoked
def still_on_meta() -> None:
    def make() -> Any:
        with torch.device("meta"):
            return sharded(blocks())

    model = make()
    weights = blocks().state_dict() if dist.get_rank() == 0 else {}
    make()(x)


@provoked
def root_forward_first() -> None:
    model, wrong = sharded(), sharded()
    wrong[0](x)
    wrong(x)


@provoked
def called_submodule_of_sharded() -> None:
    model = sharded()
    model(x)
    model[0].forward(x)


@provoked
def load_plain_into_dtensor() -> None:
    weights = blocks().state_dict()
    model = sharded()
    model.load_state_dict(weights)


@provoked
def plain_operand() -> None:
    parameter, mask = sharded(blocks(1))[0].weight, torch.ones(8, 8)
    parameter.grad = distribute_tensor(mask, parameter.device_mesh, parameter.placements)
    parameter.grad.mul_(mask)


@provoked
def foreach_mixed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    partly = Scaled()
    fully_shard(partly.linear)
    partly(x).sum().backward()
    model = Scaled()
    nn.utils.clip_grad_norm_(partly.parameters(), 1.0)


@provoked
def kept_unsharded_tensor() -> None:
    model = sharded()
    model.unshard()
    model[0].unshard()
    weight = model[0].weight
    model[0].reshard()
    weight.t()


@provoked
def data_not_allocated() -> None:
    model = sharded()
    model(x)
    model[0].unshard()
    weight = model[0].weight
    model[0].reshard()
    weight.softmax(-1)


@provoked
def grad_dtype_after_unfreezing() -> None:
    def make(frozen: bool) -> nn.Module:
        torch.manual_seed(0)
        model = blocks()
        model[0].requires_grad_(not frozen)
        return sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    model = make(frozen=True)
    model(x).sum().backward()
    model[0].requires_grad_(True)
    model(x).sum().backward()


@provoked
def format_of_dtensor() -> None:
    model = sharded()
    model(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(f"norm {norm:.3f}")


@provoked
def no_sync_of_fsdp2() -> None:
    model = sharded()
    micro_batches = [x, x]
    with model.no_sync():
        pass


@provoked
def clip_grad_norm_of_fsdp2() -> None:
    model = sharded()
    model(x).sum().backward()
    model.clip_grad_norm_(1.0)


@provoked
def summon_full_params_of_fsdp2() -> None:
    model = sharded()
    with model.summon_full_params(model):
        pass


@provoked
def dtypes_under_fsdp_policy() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))

    model, wrong = make(), make()
    fully_shard(wrong[1])
    fully_shard(wrong, mp_policy=policy)
    wrong(x)


@provoked
def already_applied() -> None:
    model = blocks()
    fully_shard(model[0])
    fully_shard(model[0])


@provoked
def nonfinite_norm() -> None:
    model = sharded()
    (model(x).sum() * float("inf")).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@provoked
def no_inf_checks() -> None:
    model = sharded()
    scaler = torch.amp.GradScaler("cpu")
    model(x).sum().backward()
    early = torch.optim.AdamW(blocks().parameters())  # the parameters before sharding
    scaler.scale(model(x).sum()).backward()
    scaler.step(early)


@provoked
def buffer_on_meta() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shift", torch.arange(8.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.shift

    with torch.device("meta"):
        model, wrong = fully_shard(Shifted()), fully_shard(Shifted())
    weights = Shifted().state_dict()
    wrong.linear.to_empty(device="cpu")
    wrong(x)


@provoked
def copy_out_of_meta() -> None:
    with torch.device("meta"):
        model = blocks()
    sharded(model)
    model.to("cpu")


@provoked
def full_tensor_of_a_gathered_root() -> None:
    model = sharded(Words().head)
    with torch.no_grad():
        model(x)
    model.weight.full_tensor()


@provoked
def premul_sum_with_gloo() -> None:
    model, wrong = fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8))
    for one in (model, wrong):
        one.set_gradient_divide_factor(8)
    wrong(x).sum().backward()


@provoked
def muon_fewer_rows_than_ranks() -> None:
    model = fully_shard(nn.Linear(8, 1, bias=False))
    model(x).sum().backward()
    torch.optim.Muon(model.parameters()).step()


# ---- meshes and tensor parallel --------------------------------------------------------------------------


@provoked
def mesh_names_invalid() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    mesh["dp"]


@provoked
def mesh_slice_without_names() -> None:
    mesh = init_device_mesh("cpu", (1, 2))
    mesh["shard"]


@provoked
def meshes_without_common_root() -> None:
    split = blocks()
    tp.parallelize_module(
        split,
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()},
    )
    model = blocks()
    fully_shard(split, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


@provoked
def operands_on_two_meshes() -> None:
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=one), fully_shard(nn.Linear(8, 8), mesh=two))
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@provoked
def different_meshes_pointwise() -> None:
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    a = distribute_tensor(torch.ones(8, 8), one, [Shard(0)])
    b = distribute_tensor(torch.ones(8, 8), two, [Replicate(), Shard(0)])
    a + b


@provoked
def colwise_only_linear() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})


@provoked
def plan_key_unresolved() -> Names:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Words()
    tp.parallelize_module(model, mesh, {"layers.*": tp.ColwiseParallel()})
    return locals()


@provoked
def heads_under_tensor_parallel() -> None:
    class Attention(nn.Module):
        def __init__(self, heads: int = 2) -> None:
            super().__init__()
            self.heads, self.qkv, self.out = heads, nn.Linear(8, 24), nn.Linear(8, 8)
            self.q = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(x.shape[0], self.heads, 4)
            return self.out(q.flatten(1))

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Attention()
    tp.parallelize_module(model, mesh, {"q": tp.ColwiseParallel(), "out": tp.RowwiseParallel()})
    model(x)


@provoked
def sharding_propagation_failed() -> None:
    model = sharded()
    weight = model[0].weight.detach()
    weight[weight > 0]


# ---- process groups --------------------------------------------------------------------------------------


@provoked
def no_backend_for_device() -> None:
    gpus = dist.new_group(backend="cuda:gloo")
    dist.all_reduce(torch.ones(2), group=gpus)


@provoked
def output_same_type() -> None:
    shard_ = torch.ones(2, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(torch.empty(4), shard_)


@provoked(fresh=True)
def group_not_initialized() -> None:
    dist.destroy_process_group()
    try:
        dist.barrier()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@provoked(fresh=True)
def rank_expected() -> None:
    kept = os.environ.pop("RANK", "0")
    dist.destroy_process_group()
    try:
        dist.init_process_group("gloo")
    finally:
        os.environ["RANK"] = kept
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@provoked
def address_in_use() -> None:
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)


@provoked
def client_socket_timed_out() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=datetime.timedelta(seconds=1))


@provoked(seconds=1, fresh=True)
def gloo_timed_out() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        raise RuntimeError("this rank left")


@provoked(fresh=True)
def connection_closed_by_peer() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise ValueError("the error to look for")
    time.sleep(0.5)  # until the other rank has closed its connections
    dist.all_reduce(torch.ones(2))


@provoked(fresh=True)
def connect_full_mesh() -> None:
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
    try:
        if rank == 1:
            raise RuntimeError("this rank died")
        # rank 0 comes again and finds the address that rank 1 had
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    finally:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@provoked
def invalid_scalar_type() -> None:
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    dist.all_reduce(eight)


# ---- state dicts and checkpoints -------------------------------------------------------------------------


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


@provoked
def full_state_dict_must_be_true() -> None:
    model = sharded()
    weights = blocks().state_dict() if dist.get_rank() == 0 else {}
    sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(broadcast_from_rank0=True))


@provoked
def missing_key_in_checkpoint() -> None:
    folder = shared_folder()
    dcp.save(sd.get_model_state_dict(sharded(blocks(1))), checkpoint_id=folder)
    model = sharded(blocks(2))
    state = sd.get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)


@provoked
def size_mismatch_in_checkpoint() -> None:
    folder = shared_folder()
    dcp.save(sd.get_model_state_dict(sharded_words(Words())), checkpoint_id=folder)
    grown = Words()
    grown.embedding = nn.Embedding(18, 8)
    dcp.load(sd.get_model_state_dict(sharded_words(grown)), checkpoint_id=folder)


def sharded_words(model: Words) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@provoked
def checkpoint_already_exists() -> None:
    folder = shared_folder()
    state = sd.get_model_state_dict(sharded())
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))


@provoked
def async_save_needs_cpu() -> None:
    folder = shared_folder()
    state = sd.get_model_state_dict(sharded())
    gpus = dist.new_group(backend="cuda:gloo")
    dcp.async_save(state, checkpoint_id=folder, process_group=gpus)


@provoked
def missing_optimizer_state() -> None:
    def make(frozen: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = blocks()
        model[0].requires_grad_(not frozen)
        model = sharded(model)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = make(frozen=True)
    model(x).sum().backward()
    optimizer.step()
    saved = sd.get_optimizer_state_dict(model, optimizer)
    model, optimizer = make(frozen=False)
    sd.set_optimizer_state_dict(model, optimizer, saved)


@provoked(fresh=True)
def single_process_assumed() -> Names:
    folder = shared_folder()
    dist.destroy_process_group()
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=f"{folder}/{os.getpid()}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return locals()


@provoked
def no_metadata() -> None:
    folder = shared_folder()
    dcp.save({"model": sd.get_model_state_dict(sharded())}, checkpoint_id=f"{folder}/step_10")
    model = sharded()
    dcp.load({"model": sd.get_model_state_dict(model)}, checkpoint_id=folder)


@provoked
def optim_state_dict_empty() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = sd.get_optimizer_state_dict(model, optimizer)
    sd.set_optimizer_state_dict(model, optimizer, {})


@provoked
def optimizer_size_of_tensor() -> None:
    accumulating = FSDP(blocks(1, 4))
    optimizer = torch.optim.AdamW(accumulating.parameters(), foreach=False)
    accumulating(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with accumulating.no_sync():
        accumulating(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(\d+\) must match the size of tensor b"):
        optimizer.step()

    model = blocks(1, 4)
    local = nn.Linear(4, 2)  # the rows of one rank
    optimizer = torch.optim.AdamW(local.parameters())
    local(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.load_state_dict(saved)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@provoked
def optimizer_gradients_of_another_dtype() -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = FSDP(blocks(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    with model.no_sync():
        model(x).sum().backward()
    optimizer.step()


@provoked
def parameter_group_size() -> None:
    model = sharded()
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}])
    optimizer.load_state_dict(saved)


@provoked
def key_prefix_fsdp1() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8), use_orig_params=True)), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        saved = {name: p.detach().clone() for name, p in nn.Module.named_parameters(model)}
    model = blocks(1)
    model.load_state_dict(saved)


@provoked
def key_prefix_compile() -> None:
    saved = torch.compile(blocks(), backend="eager").state_dict()
    model = blocks()
    model.load_state_dict(saved)


@provoked
def key_prefix_checkpoint_wrapper() -> None:
    saved = {
        f"{i}._checkpoint_wrapped_module.{n}": t
        for i in range(2)
        for n, t in nn.Linear(8, 8).state_dict().items()
    }
    model = blocks()
    model.load_state_dict(saved)


@provoked
def key_prefix_ddp() -> None:
    saved = nn.parallel.DistributedDataParallel(blocks()).state_dict()
    model = blocks()
    model.load_state_dict(saved)


# ---- activation checkpointing ----------------------------------------------------------------------------


@provoked
def recomputed_metadata() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x[: 5 - self.calls]).relu()

    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    checkpoint(Cut(), x, use_reentrant=False).sum().backward()


@provoked
def different_number_saved() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = self.linear(x).exp()
            return self.cache * x

    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    checkpoint(Cached(), x.clone().requires_grad_(), use_reentrant=False).sum().backward()


@provoked
def use_reentrant_explicit() -> Names:
    block = nn.Linear(8, 8)
    checkpoint(block, x.clone().requires_grad_())
    return locals()


# ---- Accelerate, transformers, peft ----------------------------------------------------------------------


@provoked
def accelerate_no_layer_class() -> None:
    model = Words()
    plugin = fsdp2_plugin(
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    plugin.set_auto_wrap_policy(model)


def accelerator() -> Any:
    """Accelerate with FSDP2 on CPU ranks; by itself it takes FSDP's settings only on an accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tests.trainers import forget

    forget()
    one = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = fsdp2_plugin()
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return one


@provoked
def accelerate_prepare_together() -> None:
    accelerator_ = accelerator()
    model = blocks()
    accelerator_.prepare(model)


@provoked
def accelerate_clip_value() -> None:
    accelerator_ = accelerator()
    model = blocks()
    model, _ = accelerator_.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator_.backward(model(x).sum())
    accelerator_.clip_grad_value_(model.parameters(), 1.0)


def arguments(**more: Any) -> Any:
    from tests.trainers import forget

    forget()
    given = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": [], **more}
    return transformers.TrainingArguments(**given)


@provoked(fresh=True)
def trainer_fsdp_alone() -> None:
    if not torch.accelerator.is_available():  # where the ranks are joined only if the CPU is asked for
        with pytest.raises(ValueError, match="Using fsdp only works in distributed training"):
            transformers.Trainer(blocks(), arguments(fsdp=True, use_cpu=False))
    kept = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    try:
        transformers.Trainer(blocks(), arguments(fsdp=True))
    finally:
        os.environ.update(kept)


@provoked
def no_rng_file() -> Names:
    trainer = transformers.Trainer(blocks(), arguments())
    transformers.utils.logging.set_verbosity_info()
    trainer._load_rng_state(tempfile.mkdtemp())
    transformers.utils.logging.set_verbosity_warning()
    return locals()


@provoked
def no_grad_fn() -> None:
    block = nn.Linear(8, 8)
    checkpoint(block, x, use_reentrant=True).sum().backward()


@provoked
def device_map_auto() -> None:
    accelerator_, model, mapped = accelerator(), blocks(), blocks()
    mapped.hf_device_map = {"0": 0, "1": 1}  # what from_pretrained(device_map="auto") leaves on two GPUs
    accelerator_.prepare(mapped, torch.optim.AdamW(mapped.parameters()))


@provoked
def fsdp1_is_root() -> None:
    def make() -> Any:
        return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))

    model = make()
    model.module[0](x)
    model(x)


@provoked
def fsdp1_forward_under_inference_mode() -> None:
    model = FSDP(blocks())
    with torch.inference_mode():
        model(x)
    model(x)


@provoked
def fsdp1_hybrid_mesh_of_two() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = blocks()
    FSDP(blocks(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@provoked
def fsdp1_group_and_mesh() -> None:
    model, mesh = blocks(), init_device_mesh("cpu", (2,))
    FSDP(model, device_mesh=mesh, process_group=dist.group.WORLD)


@provoked
def fsdp1_local_state_dict_with_mesh() -> None:
    model = FSDP(blocks(), device_mesh=init_device_mesh("cpu", (2,)))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


@provoked
def fsdp1_homogeneous_value() -> None:
    inner = FSDP(nn.Linear(8, 8), use_orig_params=True)
    model = FSDP(nn.Sequential(inner, nn.Linear(8, 8)), use_orig_params=False)
    model(x)


@provoked
def fsdp1_summon_on_rank0() -> None:
    model = FSDP(blocks())
    with FullyShardedDataParallel.summon_full_params(model, rank0_only=True):
        pass


@provoked
def fsdp1_optimizer_state_keys() -> None:
    model = FSDP(blocks(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {})


@provoked
def mesh_dim_needed() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    mesh.get_group()


@provoked
def placements_and_mesh() -> None:
    mesh, weight = init_device_mesh("cpu", (1, 2)), torch.ones(4, 4)
    distribute_tensor(weight, mesh, [Shard(0)])


@provoked
def distributed_twice() -> None:
    mesh, model = init_device_mesh("cpu", (2,)), blocks()
    tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
    tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})


@provoked
def model_state_dict_empty() -> None:
    weights, model = blocks().state_dict(), sharded()
    sd.set_model_state_dict(model, {})


@provoked
def empty_shard_in_checkpoint() -> None:
    model = FSDP(blocks(), use_orig_params=True)
    pieces = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
    blocks().load_state_dict(pieces)


@provoked
def gradient_on_another_device() -> None:
    parameter = sharded()[0].weight
    parameter.grad = torch.ones(8, 8, device="meta")


@provoked
def view_of_output_changed_in_place() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[None][0]

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.view, self.head = View(), nn.Linear(8, 8)

        def forward(self, x: Tensor, in_place: bool) -> Tensor:
            y = self.view(x)
            if in_place:
                y += 1
            return self.head(y.relu() if in_place else (y + 1).relu())

    model, wrong = sharded(Adding()), sharded(Adding())
    wrong(x.clone().requires_grad_(), in_place=True).sum().backward()


@provoked
def none_of_the_inputs_require_grad() -> Names:
    block = nn.Linear(8, 8)
    checkpoint(block, x, use_reentrant=True)
    return locals()


# ---- FSDP1, states of a step -----------------------------------------------------------------------------


@provoked
def fsdp1_backward_outside_of_a_step() -> None:
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


@provoked
def fsdp1_post_backward_hook_state() -> None:
    def make() -> Any:
        return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))

    model = make()
    loss = model(x).sum()
    model.module[0].requires_grad_(False)
    loss.backward()


@provoked
def fsdp1_view_of_flat_parameter() -> None:
    model = FSDP(Words(), use_orig_params=False)
    model(tokens).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.module.embedding(tokens)


@provoked
def fsdp1_weight_is_flat() -> None:
    model = FSDP(blocks(), use_orig_params=True)
    model(x)
    model.module[0](x)


@provoked
def fsdp1_assumes_in_state_dict() -> None:
    def leave_out(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        del state[f"{prefix}weight"]

    model, wrong = FSDP(blocks()), FSDP(blocks())
    hook = wrong.module[1].register_state_dict_post_hook(leave_out)
    sd.get_model_state_dict(wrong, options=sd.StateDictOptions(full_state_dict=True))


@provoked
def fsdp1_failed_to_clone() -> Names:
    def full(_: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")  # what a full GPU raises here

    model = FSDP(blocks())
    with (
        mock.patch.object(Tensor, "clone", full),
        FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT),
    ):
        model.state_dict()
    return locals()


@provoked
def fsdp1_reset_parameters_on_meta() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(Scale(), nn.Linear(8, 8))

    model = make()
    FSDP(make())


@provoked
def fsdp1_called_while_gathered() -> None:
    model, wrong = (FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)))) for _ in range(2))  # noqa: RUF059
    with FullyShardedDataParallel.summon_full_params(wrong):
        wrong(x)


@provoked
def fsdp1_full_state_into_shards() -> None:
    weights, model = blocks().state_dict(), FSDP(blocks(), use_orig_params=True)
    model.module.load_state_dict(weights)


# ---- FSDP2, more -----------------------------------------------------------------------------------------


@provoked
def module_of_fsdp2() -> None:
    model = sharded()
    _ = model.module


@provoked
def sharded_under_inference_mode() -> None:
    model = sharded()
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()


@provoked
def optimizer_state_is_plain() -> None:
    plain = blocks()
    of_plain = torch.optim.AdamW(plain.parameters())
    plain(x).sum().backward()
    of_plain.step()
    options = sd.StateDictOptions(full_state_dict=True)
    full = sd.get_optimizer_state_dict(plain, of_plain, options=options)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(of_plain.state_dict())
    model(x).sum().backward()
    optimizer.step()


@provoked
def gradient_of_another_size() -> None:
    parameter, full = sharded()[0].weight, torch.ones(8, 8)
    nn.Parameter(torch.ones(8)).grad = torch.ones(4)


@provoked
def parameter_replaced_after_sharding() -> None:
    model = fully_shard(Words())
    model.embedding.weight = nn.Parameter(torch.randn(18, 8))
    model(tokens)


@provoked
def safetensors_of_dtensors() -> None:
    from safetensors.torch import save_file

    model, folder = sharded(), tempfile.mkdtemp()
    save_file(model.state_dict(), f"{folder}/model.safetensors")


@provoked
def changed_in_place_under_fsdp() -> None:
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


@provoked
def expected_scalar_type_under_fsdp() -> None:
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


@provoked(fresh=True)
def collectives_differ() -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    finally:
        dist.set_debug_level(level)
    dist.all_reduce(torch.ones(4 + dist.get_rank()), group=group)


@provoked
def store_wait_timeout() -> None:
    second = datetime.timedelta(seconds=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=second)
    store.get("something")


@provoked
def clients_joined() -> None:
    second = datetime.timedelta(seconds=1)
    dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=second)


@provoked
def store_is_gone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    del store
    client.get("something")


# ---- checkpoints, more -----------------------------------------------------------------------------------


@provoked
def distcp_is_missing() -> None:
    folder, state = shared_folder(), {"weight": torch.ones(8)}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        for file in Path(folder).glob("*.distcp"):
            file.unlink()
    dist.barrier()
    dcp.load(state, checkpoint_id=folder)


@provoked
def size_mismatch_in_sharded_load() -> None:
    weights, model = Words().state_dict(), Words()
    model.embedding = nn.Embedding(18, 8)
    fully_shard(model)
    sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(full_state_dict=True))


# ---- Accelerate, transformers, Lightning, more -----------------------------------------------------------


@provoked
def accelerate_optimizer_not_switched() -> None:
    accelerator_, model = accelerator(), blocks()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(8))])
    accelerator_.prepare(model, optimizer)


@provoked
def accelerate_params4bit() -> Names:
    class Params4bit(nn.Parameter):
        """Stands for bitsandbytes' class, which Accelerate knows by its name."""

    accelerator_, model = accelerator(), blocks()
    model.packed = Params4bit(torch.ones(8, dtype=torch.uint8), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    accelerator_.prepare(model, torch.optim.AdamW(trained))
    warnings.warn("so that every rank has a text: the main process alone warns", stacklevel=1)
    return locals()


@provoked
def trainer_checkpoint_of_fsdp() -> None:
    trainer, folder = transformers.Trainer(blocks(), arguments()), shared_folder()
    (Path(folder) / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
    trainer._load_from_checkpoint(folder)


@provoked
def trainer_no_valid_checkpoint() -> None:
    trainer, folder = transformers.Trainer(blocks(), arguments()), tempfile.mkdtemp()
    trainer._load_from_checkpoint(folder)


@provoked
def lightning_clip_by_norm() -> None:
    from lightning.pytorch.plugins.precision import FSDPPrecision

    FSDPPrecision("32-true").clip_grad_by_norm()


@provoked
def lightning_optimizer_before_model() -> None:
    from lightning.fabric.strategies import FSDPStrategy

    strategy = FSDPStrategy(use_orig_params=False)
    strategy.setup_optimizer(torch.optim.AdamW(blocks().parameters()))


@provoked
def fsdp1_names_do_not_fit() -> None:
    weights, model = blocks().state_dict(), FSDP(blocks())
    model.load_state_dict({f"model.{name}": tensor for name, tensor in weights.items()})


@provoked
def device_mesh_of_a_plain_tensor() -> None:
    model = blocks()
    model.register_buffer("steps", torch.zeros(1))
    fully_shard(model)
    _ = [tensor.device_mesh for tensor in model.state_dict().values()]


@provoked
def sharded_module_cannot_be_cast() -> None:
    model = sharded()
    reference = weakref.ref(model[0].weight)
    model.to(torch.bfloat16)


@provoked
def optimizer_got_no_parameters() -> None:
    model = sharded().requires_grad_(False)
    of_fsdp = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    del of_fsdp


@provoked
def tensors_share_memory() -> None:
    from safetensors.torch import save_file

    model, folder = Words(tied=True), tempfile.mkdtemp()
    save_file(model.state_dict(), f"{folder}/model.safetensors")


@provoked
def fsdp1_nothing_is_sharded() -> None:
    model = FSDP(blocks(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True):
        pass


@provoked
def fsdp1_summon_during_forward() -> None:
    class Summoning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with FullyShardedDataParallel.summon_full_params(wrong):
                return self.linear(x)

    model, wrong = FSDP(blocks()), FSDP(Summoning())
    wrong(x)


@provoked
def fsdp1_optimizer_of_other_parameters() -> None:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    sd.get_optimizer_state_dict(FSDP(model, use_orig_params=False), optimizer)


class Packed(torch.optim.Optimizer):
    """Keeps its state in two dtypes, as optimizers of 8 bits do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"moment": torch.zeros_like(p), "scale": torch.ones_like(p, dtype=torch.bfloat16)}


@provoked
def fsdp1_optimizer_state_of_several_dtypes() -> None:
    def packed(model: nn.Module) -> Packed:
        optimizer = Packed(model)
        model(x).sum().backward()
        optimizer.step()
        return optimizer

    model = FSDP(blocks(), use_orig_params=True)
    FullyShardedDataParallel.optim_state_dict(model, packed(model))


@provoked
def fsdp1_optimizer_state_of_unused_unit() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.text(x)

    model = FSDP(Partly())
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    saved["state"] |= {"vision.weight": {}, "vision.bias": {}}  # names without a state
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)


@provoked
def fsdp1_group_over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))

    def parallel() -> nn.Module:
        return tp.parallelize_module(
            nn.Sequential(nn.Linear(8, 8)), mesh["tensor"], {"0": tp.ColwiseParallel()}
        )

    FSDP(parallel(), process_group=mesh["data"].get_group())(x)


@provoked
def compile_of_fsdp1() -> None:
    model, backend = blocks(), "eager"
    wrapped = FSDP(blocks())
    torch.compile(lambda x: wrapped(x), backend=backend, fullgraph=True)(x)  # without it, a graph break


@provoked(seconds=2, fresh=True)
def broadcast_of_sharded_state() -> None:
    model = sharded()
    options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sd.set_model_state_dict(model, model.state_dict(), options=options)


@provoked
def quantization_state_of_a_dtensor() -> None:
    def with_state(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        state[f"{prefix}weight.absmax"] = torch.ones(1)  # as bitsandbytes' Linear4bit does

    model = blocks()
    model[0].register_state_dict_post_hook(with_state)
    fully_shard(model)
    sd.get_model_state_dict(model)


@provoked
def unscaled_twice() -> None:
    model = sharded()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


@provoked(fresh=True)
def no_nccl_built_in() -> None:
    dist.new_group(backend="nccl")


@provoked
def distribute_to_another_mesh() -> None:
    t = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    other = init_device_mesh("cpu", (1, 2))
    distribute_tensor(t, other, [Replicate(), Shard(0)])


@provoked
def lightning_no_model_in_state() -> None:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    strategy.save_checkpoint(f"{folder}/plain", {"model": blocks()})


@provoked
def lightning_no_valid_checkpoint() -> None:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    strategy.load_checkpoint(folder, {"model": FSDP(blocks())})


@provoked
def accelerate_one_model() -> None:
    accelerator_, trained, frozen = accelerator(), blocks(), blocks()
    accelerator_.prepare(trained, frozen, torch.optim.AdamW(trained.parameters()))


@provoked
def accelerate_parallelism_size() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    accelerator_ = accelerator()
    ParallelismConfig(dp_shard_size=4)._validate_accelerator(accelerator_)


# ---- by raise sites --------------------------------------------------------------------------------------


@provoked
def fsdp1_state_dict_types_differ() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8)))
    FullyShardedDataParallel.set_state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT)
    FullyShardedDataParallel.get_state_dict_type(model)


@provoked
def fsdp1_optimizer_state_of_another_shape() -> None:
    model = FSDP(blocks(), use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    wrong = copy.deepcopy(state)
    for one in wrong["state"].values():
        one["exp_avg"] = torch.ones(3)
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, wrong)


@provoked
def several_roots() -> None:
    model, wrong = blocks(), blocks()
    fully_shard([wrong[0], wrong[1]])
    wrong[0](x)


@provoked
def checkpoint_without_id() -> None:
    model, folder = sharded(), shared_folder()
    dcp.save(model.state_dict())


@provoked
def optimizer_state_that_cannot_be_flattened() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["kind"] = "matrix"
    sd.get_optimizer_state_dict(
        model, optimizer, options=sd.StateDictOptions(flatten_optimizer_state_dict=True)
    )


@provoked
def rank_not_in_group() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    dist.broadcast(torch.ones(1), src=1 - rank, group=groups[rank])


@provoked
def reentrant_checkpoint_with_grad() -> None:
    block, inputs = blocks(), x.clone().requires_grad_()
    torch.autograd.grad(checkpoint(block, inputs, use_reentrant=True).sum(), inputs)


@provoked(fresh=True)
def ddp_models_differ() -> None:
    nn.parallel.DistributedDataParallel(blocks(1 + dist.get_rank()))


@provoked
def accelerate_quantized_on_another_device() -> None:
    accelerator_, model = accelerator(), blocks()
    model.is_loaded_in_4bit, model.hf_device_map = True, {"": "cuda:1"}
    accelerator_.prepare_model(model)


@provoked
def accelerate_sync_module_states() -> None:
    from accelerate.utils import load_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
    accelerator_, model, folder = accelerator(), blocks(), tempfile.mkdtemp()
    accelerator_.state.fsdp_plugin = plugin
    torch.save(model.state_dict(), f"{folder}/pytorch_model_fsdp.bin")
    load_fsdp_model(plugin, accelerator_, model, folder)


@provoked
def accelerate_unknown_keys() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    file = Path(tempfile.mkdtemp()) / "config.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_sharding: 1\n")
    ClusterConfig.from_yaml_file(file)


@provoked
def accelerate_cpu_offload_of_another_version() -> None:
    from torch.distributed.fsdp import CPUOffload

    fsdp2_plugin(cpu_offload=CPUOffload(True))


@provoked
def accelerate_ram_efficient_alone() -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    def arguments(sync_module_states: bool) -> Any:
        line = [
            "--num_processes",
            "2",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        options = launch_command_parser().parse_args([*line, "--use_fsdp", "train.py"])
        options.fsdp_cpu_ram_efficient_loading = True  # as a config of Accelerate has them
        options.fsdp_sync_module_states = sync_module_states
        return options

    prepare_multi_gpu_env(arguments(sync_module_states=False))


@provoked
def accelerate_save_meta() -> None:
    accelerator_, folder = accelerator(), tempfile.mkdtemp()
    with torch.device("meta"):
        accelerator_.save_model(blocks(), folder)


@provoked
def trainer_quantized() -> None:
    model, args = blocks(), arguments()
    model.is_quantized = True
    transformers.Trainer(model, args)


@provoked
def lightning_fsdp_on_cpu() -> None:
    from lightning.fabric import Fabric

    Fabric(strategy="fsdp", accelerator="cpu")


@provoked
def lightning_original_parameters() -> None:
    from lightning.fabric.strategies import FSDPStrategy

    model = blocks()
    FSDPStrategy(use_orig_params=False).setup_module_and_optimizers(model, [])


@provoked
def lightning_several_models() -> None:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    models = {"student": FSDP(blocks()), "teacher": FSDP(blocks())}
    strategy.save_checkpoint(f"{folder}/two", models)


@provoked
def lightning_fsdp1_under_model_parallel() -> None:
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda model, mesh: model)
    strategy.setup_module(FSDP(blocks()))


@provoked(fresh=True)
def unused_parameters_ddp_or_fsdp() -> None:
    class Partly(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[0](self.embedding(tokens))

    model = nn.parallel.DistributedDataParallel(Partly())
    for _ in range(2):
        model(tokens).sum().backward()


@provoked(fresh=True)
def ddp_ready_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=True), use_reentrant=True)

    inputs, block = x.clone().requires_grad_(), blocks()
    model = nn.parallel.DistributedDataParallel(Twice(), find_unused_parameters=True)
    model(inputs).sum().backward()


@provoked
def checkpoint_exception() -> None:
    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise OSError("no space left")

    folder, state = shared_folder(), sharded().state_dict()
    dcp.save(state, checkpoint_id=folder, planner=Failing())


# ---- one call --------------------------------------------------------------------------------------------


def raise_by(make: Callable[[], Any], call: Callable[[Any], object]) -> None:
    model = make()
    call(model)


# By id: what makes the `model` that the cure speaks of, and the call that raises the message.
ONE_CALL: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "fsdp-needs-an-accelerator": (blocks, FullyShardedDataParallel),
    "fsdp1-sync-module-states-on-cpu": (blocks, lambda model: FSDP(model, sync_module_states=True)),
    "fsdp1-manual-hybrid": (
        blocks,
        lambda model: FSDP(blocks(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    ),
    "deepcopy-unsupported": (sharded, copy.deepcopy),
    "containers-without-forward": (Words, lambda model: fully_shard(model.blocks)),
    "hsdp-mesh-without-names": (
        blocks,
        lambda model: fully_shard(blocks(), mesh=init_device_mesh("cpu", (1, 2))),
    ),
    "reshard-factor": (blocks, lambda model: fully_shard(blocks(), reshard_after_forward=3)),
    "uneven-sharding-on-dim": (
        lambda: nn.Linear(7, 4),
        lambda model: fully_shard(
            nn.Linear(7, 4), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)
        ),
    ),
    "generate-mixed": (lambda: fully_shard(Words()), lambda model: model.generate(tokens)),
    "limit-all-gathers-of-fsdp2": (blocks, lambda model: fully_shard(blocks(), limit_all_gathers=True)),
    "no-such-forward-method": (
        lambda: fully_shard(Words()),
        lambda model: register_fsdp_forward_method(model, "sample"),
    ),
    "pickle-fsdp-module": (sharded, lambda model: torch.save(model, io.BytesIO())),
    "full-tensor-of-a-plain-tensor": (
        lambda: fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))),
        lambda model: [tensor.full_tensor() for tensor in model.state_dict().values()],
    ),
    "muon-two-dimensions": (sharded, lambda model: torch.optim.Muon(model.parameters())),
    "mesh-bigger-than-world": (
        blocks,
        lambda model: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ),
    "mesh-names-and-shape": (
        blocks,
        lambda model: init_device_mesh("cpu", (2,), mesh_dim_names=("replicate", "shard")),
    ),
    "no-sharding-strategy": (sharded, lambda model: torch.renorm(model[0].weight.detach(), 2, 0, 1.0)),
    "initialized-twice": (
        blocks,
        lambda model: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
    ),
    "trainer-unknown-option": (blocks, lambda model: arguments(fsdp="full_shard hybrid")),
    "fsdp1-mixed-precision-policy": (
        blocks,
        lambda model: FSDP(
            blocks(),
            mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        ),
    ),
    "ignored-params-of-fsdp1": (blocks, lambda model: FSDP(model, ignored_params=set(model[0].parameters()))),
    "fsdp1-state-dict-type-none": (
        lambda: FSDP(blocks()),
        lambda model: FullyShardedDataParallel.set_state_dict_type(model, None),
    ),
    "group-size-and-world-size": (blocks, lambda model: dist.new_subgroups(3)),
    "fsdp1-gradients-of-gradients": (
        blocks,
        lambda model: FSDP(blocks())(x).square().sum().backward(create_graph=True),
    ),
    "arguments-of-fsdp1": (
        blocks,
        lambda model: fully_shard(blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    ),
    "cannot-import-from-fsdp": (
        blocks,
        lambda model: exec("from torch.distributed.fsdp import name_of_a_newer_torch"),
    ),
    "integer-parameter-with-gradient": (
        blocks,
        lambda model: fully_shard(nn.ParameterList([nn.Parameter(torch.ones(8, 8, dtype=torch.uint8))])),
    ),
    "numpy-of-dtensor": (sharded, lambda model: model[0].weight.detach().numpy()),
    "collective-of-dtensor": (sharded, lambda model: dist.broadcast(model[0].weight, 0)),
    "collective-without-a-kernel": (
        blocks,
        lambda model: torch.ops.fsdp.all_gather_copy_in(
            [torch.ones(4).to_sparse()], torch.ones(8), [4], 4, 0
        ),
    ),
    "arguments-of-another-torch": (
        blocks,
        lambda model: FSDP(blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    ),
    "redistribute-to-partial": (sharded, lambda model: model[0].weight.redistribute(placements=[Partial()])),
    "sharding-strategy-by-number": (blocks, lambda model: ShardingStrategy(0)),
    "sharding-strategy-as-text": (blocks, lambda model: FSDP(blocks(), sharding_strategy="FULL_SHARD")),
    "fsdp1-ignored-twice": (
        blocks,
        lambda model: FSDP(model, ignored_modules=[model[0]], ignored_states=[model[0]]),
    ),
    "reshard-after-forward-as-text": (
        blocks,
        lambda model: fully_shard(blocks(), reshard_after_forward="FULL_SHARD"),
    ),
    "prefetch-of-unsharded-modules": (
        sharded,
        lambda model: fully_shard(blocks()).set_modules_to_forward_prefetch([nn.Linear(8, 8)]),
    ),
    "collective-of-a-number": (blocks, lambda model: dist.all_reduce(1.5)),
    "ddp-nothing-to-train": (lambda: blocks().requires_grad_(False), nn.parallel.DistributedDataParallel),
    "accelerate-no-device": (blocks, lambda model: FullyShardedDataParallelPlugin(sync_module_states=True)),
    "accelerate-plugin-of-another-version": (blocks, lambda model: fsdp2_plugin().save_model),
    "accelerate-local-state-dict": (blocks, lambda model: fsdp2_plugin(state_dict_type="LOCAL_STATE_DICT")),
    "accelerate-reshard-string": (blocks, lambda model: fsdp2_plugin(reshard_after_forward="FULL_SHARD")),
    "accelerate-forward-prefetch": (blocks, lambda model: fsdp2_plugin(forward_prefetch=True)),
    "trainer-two-checkpointings": (
        blocks,
        lambda model: transformers.Trainer(
            blocks(),
            arguments(
                fsdp=True, fsdp_config={"activation_checkpointing": True}, activation_checkpointing=True
            ),
        ),
    ),
    "accelerate-reshard-bool": (
        blocks,
        lambda model: FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=True),
    ),
    "accelerate-auto-wrap-policy": (blocks, lambda model: fsdp2_plugin(auto_wrap_policy="always")),
    "accelerate-size-of-units": (
        blocks,
        lambda model: fsdp2_plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1e8),
    ),
    "trainer-option-of-fsdp1": (blocks, lambda model: arguments(fsdp="hybrid_shard")),
}
PROVOKED |= {name: (functools.partial(raise_by, *row), 30, False) for name, row in ONE_CALL.items()}


# ---- what ends the process -------------------------------------------------------------------------------


def differing_sizes() -> None:
    dist.all_reduce(torch.ones(2 + 1000 * dist.get_rank()))


def run_code(code: str) -> None:
    exec(compile(code, "cure", "exec"), dict(globals()))

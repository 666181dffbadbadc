"""Raises each message of fsdp_utils/answers/messages.yaml on two CPU ranks, then runs the entry's cure.

A function has the name of its entry, with `_` for `-`. It raises the message under `with message:` and
returns the names that the cure's code uses. To add one, copy a short one.
"""

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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sd
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,  # noqa: F401  for a cure
    FullyShardedDataParallel,
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
PROVOKED: dict[str, tuple[Callable[..., Names], float]] = {}  # by id: the function and the group's time limit
FSDP = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


class Message:
    """Collects what its block raises, warns and logs, and fails where that is nothing."""

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> None:
        self._warned = warnings.catch_warnings(record=True)
        self._warnings = self._warned.__enter__()
        warnings.simplefilter("always")
        self._log = io.StringIO()
        self._handler = logging.StreamHandler(self._log)
        every = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
        self._loggers = [logging.root, *(logger for logger in every if not logger.propagate)]
        for logger in self._loggers:
            logger.addHandler(self._handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> bool:
        self._warned.__exit__(None, None, None)
        for logger in self._loggers:
            logger.removeHandler(self._handler)
        self.text += self._log.getvalue() + "".join(
            f"{one.category.__name__}: {one.message}\n" for one in self._warnings
        )
        if error is not None:
            self.text += "".join(traceback.format_exception(error))
        assert self.text, "nothing was raised, warned or logged"
        return not isinstance(error, KeyboardInterrupt | SystemExit)


def provoked(function: Callable[..., Names] | None = None, *, seconds: float = 30) -> Any:
    """Enter a function into the table; `seconds` is the time limit of its process group."""
    if function is None:
        return functools.partial(provoked, seconds=seconds)
    PROVOKED[function.__name__.replace("_", "-")] = function, seconds
    return function


def run_one(name: str, code: str, folder: str) -> tuple[str, str]:
    """Raise a message on this rank and run its cure; return the message, and what went wrong, mostly ""."""
    function, seconds = PROVOKED[name]
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
    message, wrong, found = Message(), "", {}
    group("message", seconds)
    try:
        found = function(message)
    except Exception:
        wrong = traceback.format_exc()
    if any(together("raised", wrong)):
        return message.text, wrong or "the other rank failed"
    if found.pop("fresh", False):
        group("cure", 30)
    try:
        exec(compile(code, f"cure of {name}", "exec"), {**globals(), **found})
    except Exception:
        wrong = traceback.format_exc()
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]
    return message.text, wrong


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
def uniform_requires_grad(message: Message) -> Names:
    model = blocks()
    model[0].requires_grad_(False)
    with message:
        FSDP(model, use_orig_params=False)
    return locals()


@provoked
def mixed_requires_grad_in_unit(message: Message) -> Names:
    def make() -> nn.Module:
        model = nn.Sequential(blocks())
        model[0][0].requires_grad_(False)
        return model

    with message:
        FSDP(make(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)
    model = make()
    return locals()


@provoked
def cannot_flatten_integer_dtype(message: Message) -> Names:
    model = blocks()
    model.register_parameter("packed", nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False))
    with message:
        FSDP(model)
    return locals()


@provoked
def uniform_dtype(message: Message) -> Names:
    model = blocks()
    model[1].to(torch.bfloat16)
    with message:
        FSDP(model)
    return locals()


@provoked
def weight_must_be_2d(message: Message) -> Names:
    model = FSDP(Words(), use_orig_params=True)
    model(tokens)
    with message:
        model.module.embedding(tokens)
    return locals()


@provoked
def unscale_fp16_gradients(message: Message) -> Names:
    half = sharded(blocks().half())
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(half.parameters())
    scaler.scale(half(x.half()).float().sum()).backward()
    with message:
        scaler.unscale_(optimizer)
    model = blocks()
    return locals()


@provoked
def fsdp_needs_an_accelerator(message: Message) -> Names:
    model = blocks()
    with message:
        FullyShardedDataParallel(model)
    return locals()


@provoked(seconds=2)
def writeback_shape_changes(message: Message) -> Names:
    def grow(embedding: nn.Embedding) -> None:
        embedding.weight = nn.Parameter(torch.zeros(18, 8))

    model = FSDP(Words(), use_orig_params=True)
    grow(model.module.embedding)
    with message:
        model(tokens)
    model = Words()
    return {"fresh": True, **locals()}


@provoked
def fsdp1_clip_on_inner(message: Message) -> Names:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))
    model(x).sum().backward()
    with message:
        model.module[0].clip_grad_norm_(1.0)
    return locals()


@provoked
def fsdp1_training_state(message: Message) -> Names:
    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with roots[0].no_sync() if roots else contextlib.nullcontext():
                return self.linear(x)

    roots: list[Any] = []
    model = FSDP(Accumulating())
    roots.append(model)
    with message, contextlib.redirect_stderr(io.StringIO()):  # FSDP1 also prints the stack
        model(x)
    roots.clear()
    model = FSDP(Accumulating())
    return locals()


@provoked
def fsdp1_no_sync_on_inner(message: Message) -> Names:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))
    model(x)
    with message, model.module[0].no_sync():
        pass
    return locals()


@provoked
def fsdp1_already_applied(message: Message) -> Names:
    model = nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8))
    with message:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = blocks()
    return locals()


@provoked
def fsdp1_sync_module_states_on_cpu(message: Message) -> Names:
    model = blocks()
    with message:
        FSDP(model, sync_module_states=True)
    return locals()


@provoked
def fsdp1_manual_hybrid(message: Message) -> Names:
    with message:
        FSDP(blocks(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = blocks()
    return locals()


@provoked
def fsdp1_assumes_key(message: Message) -> Names:
    model = FSDP(blocks())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        del state["1.weight"]
        with message:
            model.load_state_dict(state, strict=False)
    return locals()


@provoked
def fsdp1_state_dict_type_deprecated(message: Message) -> Names:
    model = FSDP(blocks())
    with message, FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.state_dict()
    model = FSDP(blocks())
    return locals()


@provoked
def no_shard_deprecated(message: Message) -> Names:
    model = blocks()
    with message:
        FSDP(copy.deepcopy(model), sharding_strategy=ShardingStrategy.NO_SHARD)
    return locals()


@provoked
def world_size_is_one(message: Message) -> Names:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with message:
        FSDP(blocks(), process_group=alone)
    model = blocks()
    return locals()


# ---- FSDP2 -----------------------------------------------------------------------------------------------


@provoked
def deepcopy_unsupported(message: Message) -> Names:
    model = sharded()
    with message:
        copy.deepcopy(model)
    return locals()


@provoked
def shared_with_another_group(message: Message) -> Names:
    model = Words(tied=True)
    fully_shard(model.embedding)
    fully_shard(model.head)
    fully_shard(model)
    with message:
        model(tokens)
    model = Words(tied=True)
    return locals()


@provoked
def containers_without_forward(message: Message) -> Names:
    model = Words()
    with message:
        fully_shard(model.blocks)
    return locals()


@provoked
def mesh_of_one_or_two_dimensions(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    model = blocks()
    with message:
        fully_shard(blocks(), mesh=mesh)
    return locals()


@provoked
def hsdp_mesh_without_names(message: Message) -> Names:
    model = blocks()
    with message:
        fully_shard(blocks(), mesh=init_device_mesh("cpu", (1, 2)))
    return locals()


@provoked
def reshard_factor(message: Message) -> Names:
    model = blocks()
    with message:
        fully_shard(blocks(), reshard_after_forward=3)
    return locals()


@provoked
def scalar_parameters(message: Message) -> Names:
    class Scaled(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = Scaled(torch.tensor(1.0))
    with message:
        fully_shard(model)
    return locals()


@provoked
def non_contiguous_parameters(message: Message) -> Names:
    def make() -> nn.Linear:
        model = nn.Linear(8, 4)
        model.weight = nn.Parameter(torch.randn(8, 4).T)
        return model

    with message:
        fully_shard(make())
    model = make()
    return locals()


@provoked
def uneven_sharding_on_dim(message: Message) -> Names:
    model = nn.Linear(7, 4)
    with message:
        fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    model = nn.Linear(7, 4)
    return locals()


@provoked
def uniform_original_dtype(message: Message) -> Names:
    model = blocks()
    model[1].to(torch.bfloat16)
    fully_shard(model)
    with message:
        model(x)
    model = blocks()
    model[1].to(torch.bfloat16)
    return locals()


@provoked
def still_on_meta(message: Message) -> Names:
    def make() -> Any:
        with torch.device("meta"):
            return sharded(blocks())

    with message:
        make()(x)
    model = make()
    weights = blocks().state_dict() if dist.get_rank() == 0 else {}
    return locals()


@provoked
def root_forward_first(message: Message) -> Names:
    model = sharded()
    model[0](x)
    with message:
        model(x)
    model = sharded()
    return locals()


@provoked
def called_submodule_of_sharded(message: Message) -> Names:
    model = sharded()
    model(x)
    with message:
        model[0].forward(x)
    return locals()


@provoked
def generate_mixed(message: Message) -> Names:
    model = fully_shard(Words())
    with message:
        model.generate(tokens)
    return locals()


@provoked
def load_plain_into_dtensor(message: Message) -> Names:
    weights = blocks().state_dict()
    model = sharded()
    with message:
        model.load_state_dict(weights)
    return locals()


@provoked
def plain_operand(message: Message) -> Names:
    model = sharded()
    model(x).sum().backward()
    mask = torch.ones(8, 8)
    with message:
        model[0].weight.grad.mul_(mask)
    parameter = model[0].weight
    return locals()


@provoked
def foreach_mixed(message: Message) -> Names:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = Scaled()
    fully_shard(model.linear)
    model(x).sum().backward()
    with message:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model = Scaled()
    return locals()


@provoked
def kept_unsharded_tensor(message: Message) -> Names:
    model = sharded()
    model.unshard()
    model[0].unshard()
    weight = model[0].weight
    model[0].reshard()
    with message:
        weight.t()
    return locals()


@provoked
def data_not_allocated(message: Message) -> Names:
    model = sharded()
    model(x)
    model[0].unshard()
    weight = model[0].weight
    model[0].reshard()
    with message:
        weight.softmax(-1)
    return locals()


@provoked
def grad_dtype_after_unfreezing(message: Message) -> Names:
    def make(frozen: bool) -> nn.Module:
        torch.manual_seed(0)
        model = blocks()
        model[0].requires_grad_(not frozen)
        return sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    model = make(frozen=True)
    model(x).sum().backward()
    model[0].requires_grad_(True)
    with message:
        model(x).sum().backward()
    return locals()


@provoked
def format_of_dtensor(message: Message) -> Names:
    model = sharded()
    model(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with message:
        print(f"norm {norm:.3f}")
    return locals()


@provoked
def no_sync_of_fsdp2(message: Message) -> Names:
    model = sharded()
    micro_batches = [x, x]
    with message, model.no_sync():
        pass
    return locals()


@provoked
def clip_grad_norm_of_fsdp2(message: Message) -> Names:
    model = sharded()
    model(x).sum().backward()
    with message:
        model.clip_grad_norm_(1.0)
    return locals()


@provoked
def summon_full_params_of_fsdp2(message: Message) -> Names:
    model = sharded()
    with message, model.summon_full_params(model):
        pass
    return locals()


@provoked
def limit_all_gathers_of_fsdp2(message: Message) -> Names:
    model = blocks()
    with message:
        fully_shard(blocks(), limit_all_gathers=True)
    return locals()


@provoked
def dtypes_under_fsdp_policy(message: Message) -> Names:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))

    model = make()
    fully_shard(model[1])
    fully_shard(model, mp_policy=policy)
    with message:
        model(x)
    model = make()
    return locals()


@provoked
def already_applied(message: Message) -> Names:
    model = blocks()
    fully_shard(model[0])
    with message:
        fully_shard(model[0])
    return locals()


@provoked
def no_such_forward_method(message: Message) -> Names:
    model = fully_shard(Words())
    with message:
        register_fsdp_forward_method(model, "sample")
    return locals()


@provoked
def nonfinite_norm(message: Message) -> Names:
    model = sharded()
    (model(x).sum() * float("inf")).backward()
    with message:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return locals()


@provoked
def no_inf_checks(message: Message) -> Names:
    model = sharded()
    scaler = torch.amp.GradScaler("cpu")
    model(x).sum().backward()
    early = torch.optim.AdamW(blocks().parameters())  # the parameters before sharding
    with message:
        scaler.scale(model(x).sum()).backward()
        scaler.step(early)
    return locals()


@provoked
def pickle_fsdp_module(message: Message) -> Names:
    model = sharded()
    with message:
        torch.save(model, io.BytesIO())
    return locals()


@provoked
def buffer_on_meta(message: Message) -> Names:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shift", torch.arange(8.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.shift

    def make() -> Any:
        with torch.device("meta"):
            return fully_shard(Shifted())

    model = make()
    model.linear.to_empty(device="cpu")
    with message:
        model(x)
    model, weights = make(), Shifted().state_dict()
    return locals()


@provoked
def copy_out_of_meta(message: Message) -> Names:
    with torch.device("meta"):
        model = blocks()
    sharded(model)
    with message:
        model.to("cpu")
    return locals()


@provoked
def full_tensor_of_a_plain_tensor(message: Message) -> Names:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with message:
        [tensor.full_tensor() for tensor in model.state_dict().values()]
    return locals()


@provoked
def full_tensor_of_a_gathered_root(message: Message) -> Names:
    model = sharded(Words().head)
    with torch.no_grad():
        model(x)
    with message:
        model.weight.full_tensor()
    return locals()


@provoked
def premul_sum_with_gloo(message: Message) -> Names:
    model = fully_shard(nn.Linear(8, 8))
    model.set_gradient_divide_factor(8)
    with message:
        model(x).sum().backward()
    model = fully_shard(nn.Linear(8, 8))
    model.set_gradient_divide_factor(8)
    return locals()


@provoked
def muon_two_dimensions(message: Message) -> Names:
    model = sharded()
    with message:
        torch.optim.Muon(model.parameters())
    return locals()


@provoked
def muon_fewer_rows_than_ranks(message: Message) -> Names:
    model = fully_shard(nn.Linear(8, 1, bias=False))
    model(x).sum().backward()
    with message:
        torch.optim.Muon(model.parameters()).step()
    return locals()


# ---- meshes and tensor parallel --------------------------------------------------------------------------


@provoked
def mesh_bigger_than_world(message: Message) -> Names:
    with message:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return locals()


@provoked
def mesh_names_invalid(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with message:
        mesh["dp"]
    return locals()


@provoked
def mesh_slice_without_names(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (1, 2))
    with message:
        mesh["shard"]
    return locals()


@provoked
def mesh_names_and_shape(message: Message) -> Names:
    with message:
        init_device_mesh("cpu", (2,), mesh_dim_names=("replicate", "shard"))
    return locals()


@provoked
def meshes_without_common_root(message: Message) -> Names:
    model = blocks()
    tp.parallelize_module(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        {"0": tp.ColwiseParallel(), "1": tp.RowwiseParallel()},
    )
    with message:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model = blocks()
    return locals()


@provoked
def operands_on_two_meshes(message: Message) -> Names:
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=one), fully_shard(nn.Linear(8, 8), mesh=two))
    model(x).sum().backward()
    with message:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return locals()


@provoked
def different_meshes_pointwise(message: Message) -> Names:
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    a = distribute_tensor(torch.ones(8, 8), one, [Shard(0)])
    b = distribute_tensor(torch.ones(8, 8), two, [Replicate(), Shard(0)])
    with message:
        a + b
    return locals()


@provoked
def colwise_only_linear(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    with message:
        tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
    return locals()


@provoked
def plan_key_unresolved(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Words()
    with message:
        tp.parallelize_module(model, mesh, {"layers.*": tp.ColwiseParallel()})
    return locals()


@provoked
def heads_under_tensor_parallel(message: Message) -> Names:
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
    with message:
        model(x)
    return locals()


@provoked
def no_sharding_strategy(message: Message) -> Names:
    model = sharded()
    with message:
        torch.renorm(model[0].weight.detach(), 2, 0, 1.0)
    return locals()


@provoked
def sharding_propagation_failed(message: Message) -> Names:
    model = sharded()
    weight = model[0].weight.detach()
    with message:
        weight[weight > 0]
    return locals()


# ---- process groups --------------------------------------------------------------------------------------


@provoked
def no_backend_for_device(message: Message) -> Names:
    gpus = dist.new_group(backend="cuda:gloo")
    with message:
        dist.all_reduce(torch.ones(2), group=gpus)
    return locals()


@provoked
def output_same_type(message: Message) -> Names:
    shard_ = torch.ones(2, dtype=torch.bfloat16)
    with message:
        dist.all_gather_into_tensor(torch.empty(4), shard_)
    return locals()


@provoked
def group_not_initialized(message: Message) -> Names:
    dist.destroy_process_group()
    try:
        with message:
            dist.barrier()
    finally:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return {"fresh": True, **locals()}


@provoked
def rank_expected(message: Message) -> Names:
    kept = os.environ.pop("RANK", None)
    dist.destroy_process_group()
    try:
        with message:
            dist.init_process_group("gloo")
    finally:
        os.environ["RANK"] = kept or str(0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"fresh": True, **locals()}


@provoked
def initialized_twice(message: Message) -> Names:
    with message:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return locals()


@provoked
def address_in_use(message: Message) -> Names:
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with message:
        dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)
    return locals()


@provoked
def client_socket_timed_out(message: Message) -> Names:
    with message:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=datetime.timedelta(seconds=1))
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return locals()


@provoked(seconds=1)
def gloo_timed_out(message: Message) -> Names:
    with message:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            raise RuntimeError("this rank left")
    return {"fresh": True, **locals()}


@provoked
def connection_closed_by_peer(message: Message) -> Names:
    with message:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            raise ValueError("the error to look for")
        time.sleep(0.5)  # until the other rank has closed its connections
        dist.all_reduce(torch.ones(2))
    return {"fresh": True, **locals()}


@provoked
def connect_full_mesh(message: Message) -> Names:
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
        with message:  # rank 0 comes again and finds the address that rank 1 had
            if rank == 1:
                raise RuntimeError("this rank died")
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    finally:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"fresh": True, **locals()}


@provoked
def invalid_scalar_type(message: Message) -> Names:
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    with message:
        dist.all_reduce(eight)
    return locals()


# ---- state dicts and checkpoints -------------------------------------------------------------------------


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


@provoked
def full_state_dict_must_be_true(message: Message) -> Names:
    model = sharded()
    weights = blocks().state_dict() if dist.get_rank() == 0 else {}
    with message:
        sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(broadcast_from_rank0=True))
    return locals()


@provoked
def missing_key_in_checkpoint(message: Message) -> Names:
    folder = shared_folder()
    dcp.save(sd.get_model_state_dict(sharded(blocks(1))), checkpoint_id=folder)
    model = sharded(blocks(2))
    state = sd.get_model_state_dict(model)
    with message:
        dcp.load(state, checkpoint_id=folder)
    return locals()


@provoked
def size_mismatch_in_checkpoint(message: Message) -> Names:
    folder = shared_folder()
    dcp.save(sd.get_model_state_dict(sharded_words(Words())), checkpoint_id=folder)
    grown = Words()
    grown.embedding = nn.Embedding(18, 8)
    with message:
        dcp.load(sd.get_model_state_dict(sharded_words(grown)), checkpoint_id=folder)
    return locals()


def sharded_words(model: Words) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@provoked
def checkpoint_already_exists(message: Message) -> Names:
    folder = shared_folder()
    state = sd.get_model_state_dict(sharded())
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))
    with message:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))
    return locals()


@provoked
def async_save_needs_cpu(message: Message) -> Names:
    folder = shared_folder()
    state = sd.get_model_state_dict(sharded())
    gpus = dist.new_group(backend="cuda:gloo")
    with message:
        dcp.async_save(state, checkpoint_id=folder, process_group=gpus)
    return locals()


@provoked
def missing_optimizer_state(message: Message) -> Names:
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
    with message:
        sd.set_optimizer_state_dict(model, optimizer, saved)
    return locals()


@provoked
def single_process_assumed(message: Message) -> Names:
    folder = shared_folder()
    dist.destroy_process_group()
    try:
        with message:
            dcp.save({"weight": torch.ones(2)}, checkpoint_id=f"{folder}/{os.getpid()}")
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"fresh": True, **locals()}


@provoked
def no_metadata(message: Message) -> Names:
    folder = shared_folder()
    dcp.save({"model": sd.get_model_state_dict(sharded())}, checkpoint_id=f"{folder}/step_10")
    model = sharded()
    with message:
        dcp.load({"model": sd.get_model_state_dict(model)}, checkpoint_id=folder)
    return locals()


@provoked
def optim_state_dict_empty(message: Message) -> Names:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = sd.get_optimizer_state_dict(model, optimizer)
    with message:
        sd.set_optimizer_state_dict(model, optimizer, {})
    return locals()


@provoked
def optimizer_size_of_tensor(message: Message) -> Names:
    model = blocks(1, 4)
    local = nn.Linear(4, 2)  # the rows of one rank
    optimizer = torch.optim.AdamW(local.parameters())
    local(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.load_state_dict(saved)
    model(torch.ones(1, 4)).sum().backward()
    with message:
        optimizer.step()
    return locals()


@provoked
def parameter_group_size(message: Message) -> Names:
    model = sharded()
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}])
    with message:
        optimizer.load_state_dict(saved)
    return locals()


@provoked
def key_prefix_fsdp1(message: Message) -> Names:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8), use_orig_params=True)), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        saved = {name: p.detach().clone() for name, p in nn.Module.named_parameters(model)}
    model = blocks(1)
    with message:
        model.load_state_dict(saved)
    return locals()


@provoked
def key_prefix_compile(message: Message) -> Names:
    saved = torch.compile(blocks(), backend="eager").state_dict()
    model = blocks()
    with message:
        model.load_state_dict(saved)
    return locals()


@provoked
def key_prefix_checkpoint_wrapper(message: Message) -> Names:
    saved = {
        f"{i}._checkpoint_wrapped_module.{n}": t
        for i in range(2)
        for n, t in nn.Linear(8, 8).state_dict().items()
    }
    model = blocks()
    with message:
        model.load_state_dict(saved)
    return locals()


@provoked
def key_prefix_ddp(message: Message) -> Names:
    saved = nn.parallel.DistributedDataParallel(blocks()).state_dict()
    model = blocks()
    with message:
        model.load_state_dict(saved)
    return locals()


# ---- activation checkpointing ----------------------------------------------------------------------------


@provoked
def recomputed_metadata(message: Message) -> Names:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x[: 5 - self.calls]).relu()

    with message:
        checkpoint(Cut(), x, use_reentrant=False).sum().backward()
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return locals()


@provoked
def different_number_saved(message: Message) -> Names:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = self.linear(x).exp()
            return self.cache * x

    with message:
        checkpoint(Cached(), x.clone().requires_grad_(), use_reentrant=False).sum().backward()
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return locals()


@provoked
def use_reentrant_explicit(message: Message) -> Names:
    block = nn.Linear(8, 8)
    with message:
        checkpoint(block, x.clone().requires_grad_())
    return locals()


# ---- Accelerate, transformers, peft ----------------------------------------------------------------------


@provoked
def accelerate_no_layer_class(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    model = Words()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    with message:
        plugin.set_auto_wrap_policy(model)
    return locals()


@provoked
def accelerate_local_state_dict(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    return locals()


@provoked
def accelerate_reshard_string(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward="FULL_SHARD")
    return locals()


@provoked
def accelerate_forward_prefetch(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)
    return locals()


def accelerator() -> Any:
    """Accelerate with FSDP2 on CPU ranks; by itself it takes FSDP's settings only on an accelerator."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tests.trainers import forget

    forget()
    one = Accelerator(cpu=True)
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    AcceleratorState().distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return one


@provoked
def accelerate_prepare_together(message: Message) -> Names:
    accelerator_ = accelerator()
    model = blocks()
    with message:
        accelerator_.prepare(model)
    return locals()


@provoked
def accelerate_clip_value(message: Message) -> Names:
    accelerator_ = accelerator()
    model = blocks()
    model, optimizer = accelerator_.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator_.backward(model(x).sum())
    with message:
        accelerator_.clip_grad_value_(model.parameters(), 1.0)
    return locals()


def arguments(**more: Any) -> Any:
    import transformers

    from tests.trainers import forget

    forget()
    given = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": [], **more}
    return transformers.TrainingArguments(**given)


@provoked
def trainer_fsdp_alone(message: Message) -> Names:
    import transformers

    kept = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    with message:
        transformers.Trainer(blocks(), arguments(fsdp=True))
    os.environ.update(kept)
    if not torch.accelerator.is_available():
        with message:
            transformers.Trainer(blocks(), arguments(fsdp=True, use_cpu=False))
    return {"fresh": True, **locals()}


@provoked
def trainer_two_checkpointings(message: Message) -> Names:
    import transformers

    with message:
        transformers.Trainer(
            blocks(),
            arguments(
                fsdp=True, fsdp_config={"activation_checkpointing": True}, activation_checkpointing=True
            ),
        )
    return locals()


@provoked
def trainer_unknown_option(message: Message) -> Names:
    with message:
        arguments(fsdp="full_shard hybrid")
    return locals()


@provoked
def no_rng_file(message: Message) -> Names:
    import transformers

    trainer = transformers.Trainer(blocks(), arguments())
    transformers.utils.logging.set_verbosity_info()
    with message:
        trainer._load_rng_state(tempfile.mkdtemp())
    transformers.utils.logging.set_verbosity_warning()
    return locals()


@provoked
def no_grad_fn(message: Message) -> Names:
    block = nn.Linear(8, 8)
    with message:
        checkpoint(block, x, use_reentrant=True).sum().backward()
    return locals()


@provoked
def device_map_auto(message: Message) -> Names:
    accelerator_ = accelerator()
    model = blocks()
    model.hf_device_map = {"0": 0, "1": 1}  # what from_pretrained(device_map="auto") leaves on two GPUs
    with message:
        accelerator_.prepare(model, torch.optim.AdamW(model.parameters()))
    model = blocks()
    return locals()


@provoked
def fsdp1_is_root(message: Message) -> Names:
    def make() -> Any:
        return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))

    model = make()
    model.module[0](x)
    with message:
        model(x)
    return locals()


@provoked
def fsdp1_forward_under_inference_mode(message: Message) -> Names:
    model = FSDP(blocks())
    with torch.inference_mode():
        model(x)
    with message, contextlib.redirect_stderr(io.StringIO()):  # FSDP1 also prints the stack
        model(x)
    return locals()


@provoked
def fsdp1_mixed_precision_policy(message: Message) -> Names:
    with message:
        FSDP(
            blocks(),
            mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    model = blocks()
    return locals()


@provoked
def ignored_params_of_fsdp1(message: Message) -> Names:
    model = blocks()
    with message:
        FSDP(model, ignored_params=set(model[0].parameters()))
    return locals()


@provoked
def fsdp1_hybrid_mesh_of_two(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (2,))
    with message:
        FSDP(blocks(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = blocks()
    return locals()


@provoked
def fsdp1_group_and_mesh(message: Message) -> Names:
    model, mesh = blocks(), init_device_mesh("cpu", (2,))
    with message:
        FSDP(model, device_mesh=mesh, process_group=dist.group.WORLD)
    return locals()


@provoked
def fsdp1_state_dict_type_none(message: Message) -> Names:
    model = FSDP(blocks())
    with message:
        FullyShardedDataParallel.set_state_dict_type(model, None)
    return locals()


@provoked
def fsdp1_local_state_dict_with_mesh(message: Message) -> Names:
    model = FSDP(blocks(), device_mesh=init_device_mesh("cpu", (2,)))
    kind = StateDictType.LOCAL_STATE_DICT
    with message, FullyShardedDataParallel.state_dict_type(model, kind):
        model.state_dict()
    model = FSDP(blocks(), device_mesh=init_device_mesh("cpu", (2,)))
    return locals()


@provoked
def fsdp1_homogeneous_value(message: Message) -> Names:
    inner = FSDP(nn.Linear(8, 8), use_orig_params=True)
    model = FSDP(nn.Sequential(inner, nn.Linear(8, 8)), use_orig_params=False)
    with message:
        model(x)
    return locals()


@provoked
def fsdp1_summon_on_rank0(message: Message) -> Names:
    model = FSDP(blocks())
    with message, FullyShardedDataParallel.summon_full_params(model, rank0_only=True):
        pass
    return locals()


@provoked
def fsdp1_optimizer_state_keys(message: Message) -> Names:
    model = FSDP(blocks(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    with message:
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {})
    return locals()


@provoked
def group_size_and_world_size(message: Message) -> Names:
    model = blocks()
    with message:
        dist.new_subgroups(3)
    return locals()


@provoked
def mesh_dim_needed(message: Message) -> Names:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with message:
        mesh.get_group()
    return locals()


@provoked
def placements_and_mesh(message: Message) -> Names:
    mesh, weight = init_device_mesh("cpu", (1, 2)), torch.ones(4, 4)
    with message:
        distribute_tensor(weight, mesh, [Shard(0)])
    return locals()


@provoked
def distributed_twice(message: Message) -> Names:
    mesh, model = init_device_mesh("cpu", (2,)), blocks()
    tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
    with message:
        tp.parallelize_module(model, mesh, {"0": tp.ColwiseParallel()})
    return locals()


@provoked
def model_state_dict_empty(message: Message) -> Names:
    weights, model = blocks().state_dict(), sharded()
    with message:
        sd.set_model_state_dict(model, {})
    return locals()


@provoked
def empty_shard_in_checkpoint(message: Message) -> Names:
    model = FSDP(blocks(), use_orig_params=True)
    pieces = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
    with message:
        blocks().load_state_dict(pieces)
    return locals()


@provoked
def gradient_on_another_device(message: Message) -> Names:
    parameter = sharded()[0].weight
    with message:
        parameter.grad = torch.ones(8, 8, device="meta")
    return locals()


@provoked
def view_of_output_changed_in_place(message: Message) -> Names:
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

    model = sharded(Adding())
    with message:
        model(x.clone().requires_grad_(), in_place=True).sum().backward()
    model = sharded(Adding())
    return locals()


@provoked
def none_of_the_inputs_require_grad(message: Message) -> Names:
    block = nn.Linear(8, 8)
    with message:
        checkpoint(block, x, use_reentrant=True)
    return locals()


# ---- FSDP1, states of a step -----------------------------------------------------------------------------


@provoked
def fsdp1_backward_outside_of_a_step(message: Message) -> Names:
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
    with message, contextlib.redirect_stderr(io.StringIO()):  # FSDP1 also prints the stack
        model(x)
    return locals()


@provoked
def fsdp1_post_backward_hook_state(message: Message) -> Names:
    def make() -> Any:
        return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), FSDP(nn.Linear(8, 8))))

    model = make()
    loss = model(x).sum()
    model.module[0].requires_grad_(False)
    with message, contextlib.redirect_stderr(io.StringIO()):
        loss.backward()
    return locals()


@provoked
def fsdp1_view_of_flat_parameter(message: Message) -> Names:
    model = FSDP(Words(), use_orig_params=False)
    model(tokens).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with message:
        model.module.embedding(tokens)
    return locals()


@provoked
def fsdp1_weight_is_flat(message: Message) -> Names:
    model = FSDP(blocks(), use_orig_params=True)
    model(x)
    with message:
        model.module[0](x)
    return locals()


@provoked
def fsdp1_assumes_in_state_dict(message: Message) -> Names:
    def leave_out(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        del state[f"{prefix}weight"]

    model = FSDP(blocks())
    hook = model.module[1].register_state_dict_post_hook(leave_out)
    with message:
        sd.get_model_state_dict(model, options=sd.StateDictOptions(full_state_dict=True))
    model = FSDP(blocks())
    return locals()


@provoked
def fsdp1_failed_to_clone(message: Message) -> Names:
    def full(_: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")  # what a full GPU raises here

    model, clone = FSDP(blocks()), Tensor.clone
    Tensor.clone = full
    try:
        with message, FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.state_dict()
    finally:
        Tensor.clone = clone
    model = FSDP(blocks())
    return locals()


@provoked
def fsdp1_gradients_of_gradients(message: Message) -> Names:
    with message:
        FSDP(blocks())(x).square().sum().backward(create_graph=True)
    return locals()


@provoked
def fsdp1_reset_parameters_on_meta(message: Message) -> Names:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(Scale(), nn.Linear(8, 8))

    with message:
        FSDP(make())
    model = make()
    return locals()


@provoked
def fsdp1_called_while_gathered(message: Message) -> Names:
    def make() -> Any:
        return FSDP(nn.Sequential(FSDP(nn.Linear(8, 8))))

    model = make()
    with (
        message,
        contextlib.redirect_stderr(io.StringIO()),
        FullyShardedDataParallel.summon_full_params(model),
    ):
        model(x)
    model = make()
    return locals()


@provoked
def fsdp1_full_state_into_shards(message: Message) -> Names:
    weights, model = blocks().state_dict(), FSDP(blocks(), use_orig_params=True)
    with message:
        model.module.load_state_dict(weights)
    return locals()


# ---- FSDP2, more -----------------------------------------------------------------------------------------


@provoked
def module_of_fsdp2(message: Message) -> Names:
    model = sharded()
    with message:
        _ = model.module
    return locals()


@provoked
def arguments_of_fsdp1(message: Message) -> Names:
    with message:
        fully_shard(blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = blocks()
    return locals()


@provoked
def cannot_import_from_fsdp(message: Message) -> Names:
    with message:
        exec("from torch.distributed.fsdp import name_of_a_newer_torch")
    return locals()


@provoked
def sharded_under_inference_mode(message: Message) -> Names:
    model = sharded()
    with torch.inference_mode():
        model(x)
    with message:
        model(x).sum().backward()
    return locals()


@provoked
def optimizer_state_is_plain(message: Message) -> Names:
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
    with message:
        optimizer.step()
    return locals()


@provoked
def gradient_of_another_size(message: Message) -> Names:
    with message:
        nn.Parameter(torch.ones(8)).grad = torch.ones(4)
    parameter, full = sharded()[0].weight, torch.ones(8, 8)
    return locals()


@provoked
def parameter_replaced_after_sharding(message: Message) -> Names:
    model = fully_shard(Words())
    model.embedding.weight = nn.Parameter(torch.randn(18, 8))
    with message:
        model(tokens)
    return locals()


@provoked
def safetensors_of_dtensors(message: Message) -> Names:
    from safetensors.torch import save_file

    model, folder = sharded(), tempfile.mkdtemp()
    with message:
        save_file(model.state_dict(), f"{folder}/model.safetensors")
    return locals()


@provoked
def changed_in_place_under_fsdp(message: Message) -> Names:
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
    with message:
        (model(x) + model(x)).sum().backward()
    return locals()


@provoked
def expected_scalar_type_under_fsdp(message: Message) -> Names:
    class Mixing(nn.Module):
        def __init__(self, *, cast: bool) -> None:
            super().__init__()
            self.linear, self.cast = nn.Linear(8, 8), cast
            self.register_buffer("mixture", torch.ones(4, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)[:, None]
            return torch.bmm(y, self.mixture.to(y.dtype) if self.cast else self.mixture)

    model = sharded(Mixing(cast=False), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with message:
        model(x)
    return locals()


@provoked
def integer_parameter_with_gradient(message: Message) -> Names:
    model = blocks()
    with message:
        fully_shard(nn.ParameterList([nn.Parameter(torch.ones(8, 8, dtype=torch.uint8))]))
    return locals()


@provoked
def numpy_of_dtensor(message: Message) -> Names:
    model = sharded()
    with message:
        model[0].weight.detach().numpy()
    return locals()


@provoked
def collective_of_dtensor(message: Message) -> Names:
    model = sharded()
    with message:
        dist.broadcast(model[0].weight, 0)
    return locals()


@provoked
def collective_without_a_kernel(message: Message) -> Names:
    with message:
        torch.ops.fsdp.all_gather_copy_in([torch.ones(4).to_sparse()], torch.ones(8), [4], 4, 0)
    return locals()


# ---- process groups, more --------------------------------------------------------------------------------


@provoked
def collectives_differ(message: Message) -> Names:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    finally:
        dist.set_debug_level(level)
    with message:
        dist.all_reduce(torch.ones(4 + dist.get_rank()), group=group)
    return {"fresh": True, **locals()}


@provoked
def store_wait_timeout(message: Message) -> Names:
    second = datetime.timedelta(seconds=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=second)
    with message:
        store.get("something")
    return locals()


@provoked
def clients_joined(message: Message) -> Names:
    second = datetime.timedelta(seconds=1)
    with message:
        dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=second)
    return locals()


@provoked
def store_is_gone(message: Message) -> Names:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    del store
    with message:
        client.get("something")
    return locals()


# ---- checkpoints, more -----------------------------------------------------------------------------------


@provoked
def distcp_is_missing(message: Message) -> Names:
    folder, state = shared_folder(), {"weight": torch.ones(8)}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        for file in Path(folder).glob("*.distcp"):
            file.unlink()
    dist.barrier()
    with message:
        dcp.load(state, checkpoint_id=folder)
    return locals()


@provoked
def size_mismatch_in_sharded_load(message: Message) -> Names:
    weights, model = Words().state_dict(), Words()
    model.embedding = nn.Embedding(18, 8)
    fully_shard(model)
    with message:
        sd.set_model_state_dict(model, weights, options=sd.StateDictOptions(full_state_dict=True))
    return locals()


# ---- Accelerate, transformers, Lightning, more -----------------------------------------------------------


@provoked
def accelerate_optimizer_not_switched(message: Message) -> Names:
    accelerator_, model = accelerator(), blocks()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(8))])
    with message:
        accelerator_.prepare(model, optimizer)
    return locals()


@provoked
def accelerate_params4bit(message: Message) -> Names:
    class Params4bit(nn.Parameter):
        """Stands for bitsandbytes' class, which Accelerate knows by its name."""

    accelerator_, model = accelerator(), blocks()
    model.packed = Params4bit(torch.ones(8, dtype=torch.uint8), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    with message:
        accelerator_.prepare(model, torch.optim.AdamW(trained))
        warnings.warn("so that every rank has a text: the main process alone warns", stacklevel=1)
    return locals()


@provoked
def accelerate_reshard_bool(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=True)
    return locals()


@provoked
def trainer_checkpoint_of_fsdp(message: Message) -> Names:
    import transformers

    trainer, folder = transformers.Trainer(blocks(), arguments()), shared_folder()
    (Path(folder) / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
    with message:
        trainer._load_from_checkpoint(folder)
    return locals()


@provoked
def lightning_clip_by_norm(message: Message) -> Names:
    from lightning.pytorch.plugins.precision import FSDPPrecision

    with message:
        FSDPPrecision("32-true").clip_grad_by_norm()
    return locals()


@provoked
def lightning_optimizer_before_model(message: Message) -> Names:
    from lightning.fabric.strategies import FSDPStrategy

    strategy = FSDPStrategy(use_orig_params=False)
    with message:
        strategy.setup_optimizer(torch.optim.AdamW(blocks().parameters()))
    return locals()


@provoked
def fsdp1_names_do_not_fit(message: Message) -> Names:
    weights, model = blocks().state_dict(), FSDP(blocks())
    with message:
        model.load_state_dict({f"model.{name}": tensor for name, tensor in weights.items()})
    return locals()


@provoked
def arguments_of_another_torch(message: Message) -> Names:
    with message:
        FSDP(blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    return locals()


@provoked
def device_mesh_of_a_plain_tensor(message: Message) -> Names:
    model = blocks()
    model.register_buffer("steps", torch.zeros(1))
    fully_shard(model)
    with message:
        _ = [tensor.device_mesh for tensor in model.state_dict().values()]
    return locals()


@provoked
def sharded_module_cannot_be_cast(message: Message) -> Names:
    model = sharded()
    reference = weakref.ref(model[0].weight)
    with message:
        model.to(torch.bfloat16)
    return {"reference": reference}


@provoked
def redistribute_to_partial(message: Message) -> Names:
    model = sharded()
    with message:
        model[0].weight.redistribute(placements=[Partial()])
    return locals()


@provoked
def optimizer_got_no_parameters(message: Message) -> Names:
    model = sharded().requires_grad_(False)
    with message:
        of_fsdp = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        del of_fsdp
    return locals()


@provoked
def tensors_share_memory(message: Message) -> Names:
    from safetensors.torch import save_file

    model, folder = Words(tied=True), tempfile.mkdtemp()
    with message:
        save_file(model.state_dict(), f"{folder}/model.safetensors")
    return locals()


@provoked
def fsdp1_nothing_is_sharded(message: Message) -> Names:
    model = FSDP(blocks(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with message, FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True):
        pass
    return locals()


@provoked
def sharding_strategy_by_number(message: Message) -> Names:
    with message:
        ShardingStrategy(0)
    return locals()


@provoked
def sharding_strategy_as_text(message: Message) -> Names:
    with message:
        FSDP(blocks(), sharding_strategy="FULL_SHARD")
    return locals()


@provoked
def fsdp1_summon_during_forward(message: Message) -> Names:
    class Summoning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with FullyShardedDataParallel.summon_full_params(roots[0]):
                return self.linear(x)

    model = FSDP(Summoning())
    roots = [model]
    with message, contextlib.redirect_stderr(io.StringIO()):
        model(x)
    model = FSDP(blocks())
    return locals()


@provoked
def fsdp1_optimizer_of_other_parameters(message: Message) -> Names:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    with message:
        sd.get_optimizer_state_dict(FSDP(model, use_orig_params=False), optimizer)
    return {}


@provoked
def quantization_state_of_a_dtensor(message: Message) -> Names:
    def with_state(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        state[f"{prefix}weight.absmax"] = torch.ones(1)  # as bitsandbytes' Linear4bit does

    model = blocks()
    model[0].register_state_dict_post_hook(with_state)
    fully_shard(model)
    with message:
        sd.get_model_state_dict(model)
    return locals()


@provoked
def unscaled_twice(message: Message) -> Names:
    model = sharded()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    with message:
        scaler.unscale_(optimizer)
    return locals()


@provoked
def no_nccl_built_in(message: Message) -> Names:
    with message:
        dist.new_group(backend="nccl")
    return {"fresh": True}


@provoked
def distribute_to_another_mesh(message: Message) -> Names:
    t = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    other = init_device_mesh("cpu", (1, 2))
    with message:
        distribute_tensor(t, other, [Replicate(), Shard(0)])
    return locals()


@provoked
def lightning_no_model_in_state(message: Message) -> Names:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    with message:
        strategy.save_checkpoint(f"{folder}/plain", {"model": blocks()})
    return locals()


@provoked
def lightning_no_valid_checkpoint(message: Message) -> Names:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    with message:
        strategy.load_checkpoint(folder, {"model": FSDP(blocks())})
    return locals()


@provoked
def accelerate_one_model(message: Message) -> Names:
    accelerator_, trained, frozen = accelerator(), blocks(), blocks()
    with message:
        accelerator_.prepare(trained, frozen, torch.optim.AdamW(trained.parameters()))
    return locals()


@provoked
def accelerate_parallelism_size(message: Message) -> Names:
    from accelerate.parallelism_config import ParallelismConfig

    accelerator_ = accelerator()
    with message:
        ParallelismConfig(dp_shard_size=4)._validate_accelerator(accelerator_)
    return locals()


# ---- by raise sites --------------------------------------------------------------------------------------


@provoked
def fsdp1_state_dict_types_differ(message: Message) -> Names:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 8)), nn.Linear(8, 8)))
    FullyShardedDataParallel.set_state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT)
    with message:
        FullyShardedDataParallel.get_state_dict_type(model)
    return locals()


@provoked
def fsdp1_ignored_twice(message: Message) -> Names:
    model = blocks()
    with message:
        FSDP(model, ignored_modules=[model[0]], ignored_states=[model[0]])
    return locals()


@provoked
def fsdp1_optimizer_state_of_another_shape(message: Message) -> Names:
    model = FSDP(blocks(), use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    wrong = copy.deepcopy(state)
    for one in wrong["state"].values():
        one["exp_avg"] = torch.ones(3)
    with message:
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, wrong)
    return locals()


@provoked
def several_roots(message: Message) -> Names:
    model = blocks()
    fully_shard([model[0], model[1]])
    with message:
        model[0](x)
    model = blocks()
    return locals()


@provoked
def reshard_after_forward_as_text(message: Message) -> Names:
    with message:
        fully_shard(blocks(), reshard_after_forward="FULL_SHARD")
    model = blocks()
    return locals()


@provoked
def prefetch_of_unsharded_modules(message: Message) -> Names:
    model = fully_shard(blocks())
    with message:
        model.set_modules_to_forward_prefetch([model[0]])
    model = sharded()
    return locals()


@provoked
def checkpoint_without_id(message: Message) -> Names:
    model, folder = sharded(), shared_folder()
    with message:
        dcp.save(model.state_dict())
    return locals()


@provoked
def optimizer_state_that_cannot_be_flattened(message: Message) -> Names:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["kind"] = "matrix"
    with message:
        sd.get_optimizer_state_dict(
            model, optimizer, options=sd.StateDictOptions(flatten_optimizer_state_dict=True)
        )
    return locals()


@provoked
def rank_not_in_group(message: Message) -> Names:
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    with message:
        dist.broadcast(torch.ones(1), src=1 - rank, group=groups[rank])
    return locals()


@provoked
def collective_of_a_number(message: Message) -> Names:
    with message:
        dist.all_reduce(1.5)
    return locals()


@provoked
def reentrant_checkpoint_with_grad(message: Message) -> Names:
    block, inputs = blocks(), x.clone().requires_grad_()
    with message:
        torch.autograd.grad(checkpoint(block, inputs, use_reentrant=True).sum(), inputs)
    return locals()


@provoked
def ddp_nothing_to_train(message: Message) -> Names:
    model = blocks().requires_grad_(False)
    with message:
        nn.parallel.DistributedDataParallel(model)
    return locals()


@provoked
def ddp_models_differ(message: Message) -> Names:
    with message:
        nn.parallel.DistributedDataParallel(blocks(1 + dist.get_rank()))
    return {"fresh": True}


@provoked
def accelerate_quantized_on_another_device(message: Message) -> Names:
    accelerator_, model = accelerator(), blocks()
    model.is_loaded_in_4bit, model.hf_device_map = True, {"": "cuda:1"}
    with message:
        accelerator_.prepare_model(model)
    return locals()


@provoked
def accelerate_sync_module_states(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import load_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
    accelerator_, model, folder = accelerator(), blocks(), tempfile.mkdtemp()
    accelerator_.state.fsdp_plugin = plugin
    with message:
        load_fsdp_model(plugin, accelerator_, model, folder)
    torch.save(model.state_dict(), f"{folder}/pytorch_model_fsdp.bin")
    return locals()


@provoked
def accelerate_unknown_keys(message: Message) -> Names:
    from accelerate.commands.config.config_args import ClusterConfig

    file = Path(tempfile.mkdtemp()) / "config.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_sharding: 1\n")
    with message:
        ClusterConfig.from_yaml_file(file)
    return locals()


@provoked
def accelerate_cpu_offload_of_another_version(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffload

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=CPUOffload(True))
    return locals()


@provoked
def accelerate_save_meta(message: Message) -> Names:
    accelerator_, folder = accelerator(), tempfile.mkdtemp()
    with message, torch.device("meta"):
        accelerator_.save_model(blocks(), folder)
    return locals()


@provoked
def accelerate_auto_wrap_policy(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="always")
    return locals()


@provoked
def trainer_quantized(message: Message) -> Names:
    import transformers

    model, args = blocks(), arguments()
    model.is_quantized = True
    with message:
        transformers.Trainer(model, args)
    return locals()


@provoked
def trainer_option_of_fsdp1(message: Message) -> Names:
    with message:
        arguments(fsdp="hybrid_shard")
    return locals()


@provoked
def lightning_fsdp_on_cpu(message: Message) -> Names:
    from lightning.fabric import Fabric

    with message:
        Fabric(strategy="fsdp", accelerator="cpu")
    return locals()


@provoked
def lightning_original_parameters(message: Message) -> Names:
    from lightning.fabric.strategies import FSDPStrategy

    model = blocks()
    with message:
        FSDPStrategy(use_orig_params=False).setup_module_and_optimizers(model, [])
    return locals()


@provoked
def lightning_several_models(message: Message) -> Names:
    from lightning.fabric.strategies import FSDPStrategy

    strategy, folder = FSDPStrategy(), shared_folder()
    models = {"student": FSDP(blocks()), "teacher": FSDP(blocks())}
    with message:
        strategy.save_checkpoint(f"{folder}/two", models)
    return locals()


@provoked
def lightning_fsdp1_under_model_parallel(message: Message) -> Names:
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda model, mesh: model)
    with message:
        strategy.setup_module(FSDP(blocks()))
    return locals()


@provoked
def unused_parameters_ddp_or_fsdp(message: Message) -> Names:
    class Partly(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[0](self.embedding(tokens))

    model = nn.parallel.DistributedDataParallel(Partly())
    with message:
        for _ in range(2):
            model(tokens).sum().backward()
    return {"fresh": True, **locals()}


@provoked
def ddp_ready_twice(message: Message) -> Names:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=True), use_reentrant=True)

    inputs, block = x.clone().requires_grad_(), blocks()
    model = nn.parallel.DistributedDataParallel(Twice(), find_unused_parameters=True)
    with message:
        model(inputs).sum().backward()
    return {"fresh": True, **locals()}


@provoked
def accelerate_size_of_units(message: Message) -> Names:
    from accelerate import FullyShardedDataParallelPlugin

    with message:
        FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1e8)
    return locals()


@provoked
def checkpoint_exception(message: Message) -> Names:
    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise OSError("no space left")

    folder, state = shared_folder(), sharded().state_dict()
    with message:
        dcp.save(state, checkpoint_id=folder, planner=Failing())
    return locals()


# ---- what ends the process -------------------------------------------------------------------------------


def differing_sizes() -> None:
    dist.all_reduce(torch.ones(2 + 1000 * dist.get_rank()))


def run_code(code: str) -> None:
    exec(compile(code, "cure", "exec"), dict(globals()))

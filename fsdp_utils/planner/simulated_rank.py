"""Two training steps of one rank out of many, on tensors without memory: what is allocated, done and sent?"""

import gc
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_utils.planner import work_items
from fsdp_utils.planner.batch import LOSSES_OF_LOGITS, Inputs, batch_of, loss_and_output, running
from fsdp_utils.planner.models import Source, build
from fsdp_utils.planner.recorder import recording_steps
from fsdp_utils.planner.work_items import Recording
from fsdp_utils.sharding.blocks import transformer_block_classes
from fsdp_utils.sharding.checkpointing import selective
from fsdp_utils.sharding.units import find_units
from fsdp_utils.sharding.wrapping import shard
from fsdp_utils.torch_internals.groups import fake_store
from fsdp_utils.torch_internals.names import (
    FakeTensorMode,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    fsdp1_lazy_init,
    place,
)
from fsdp_utils.torch_internals.runtime import storage_id

STRATEGIES = ("full", "grad_op", "hybrid")
APIS = ("fsdp2", "fsdp1")
# by name: dtype of the parameters at rest, of the computation, of the reduction of gradients
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None, None),
    "bf16": (None, torch.bfloat16, None),
    "bf16_reduce_fp32": (None, torch.bfloat16, torch.float32),
    "pure_bf16": (torch.bfloat16, None, None),
    "pure_bf16_reduce_fp32": (torch.bfloat16, torch.bfloat16, torch.float32),
}
CHECKPOINTING = ("none", "full", "selective", "every_2", "every_3", "every_4")
ATTENTION = ("sdpa", "flash", "flash1", "flash3", "eager")
LOSSES = (*LOSSES_OF_LOGITS, "compiled", "chunked", "fused")
HELD_OUTPUTS = ("none", "logits", "logits_and_cache", "fp32_logits", "fp32_logits_and_cache")
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw_bf16": partial(torch.optim.AdamW, fused=True),
    "adamw_8bit": partial(torch.optim.AdamW, fused=True),
    "adamw_one_by_one": partial(torch.optim.AdamW, foreach=False),
    # DTensor has no fused SGD; foreach, the default on a GPU, changes parameters in place and takes as much
    "sgd": partial(torch.optim.SGD, foreach=False),
    "sgd_momentum": partial(torch.optim.SGD, momentum=0.9, foreach=False),
}


@dataclass(frozen=True)
class Setting:
    """How the job is to be run."""

    world_size: int  # among which FSDP shares the parameters
    batch_size: int  # of one rank, in one micro-batch
    seq_len: int | None
    strategy: str
    api: str
    precision: str
    checkpointing: str
    optimizer: str
    ranks_per_host: int
    micro_batches: int = 1
    no_sync: bool = False  # gradients are reduced in the last micro-batch alone
    attention: str = "sdpa"
    loss: str = "full"
    compiled: bool = False  # each block
    activation_offload: bool = False
    tensor_parallel: int = 1  # GPUs that share each unit
    held_output: str = "none"


def record_one_rank(source: Source, setting: Setting, blocks: int | None, inputs: Inputs | None) -> Recording:
    """Rank 0's recording, with so many blocks of each stack; None for all.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "plan: there is a process group already, and the simulation needs one of its own. Plan before "
            "init_process_group(), or after destroy_process_group()."
        )
    with _fake_group(setting.world_size):
        mesh = mesh_of(setting)
        # an error gets a sentence from `models.running`, and no traceback before it
        log = logging.getLogger("torch._subclasses.fake_tensor")
        with (
            FakeTensorMode(),
            _as_on_a_gpu(),
            no_collection(),
            patch.object(log, "disabled", True),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returned a view: no matter here
            return run_steps(source, setting, blocks, inputs, mesh)


def run_steps(
    source: Source, setting: Setting, blocks: int | None, inputs: Inputs | None, mesh: DeviceMesh
) -> Recording:
    """Two training steps of this rank, recorded; on real tensors too, where no mode makes them fake."""
    model = _sharded(build(source, blocks, PRECISIONS[setting.precision][0]), setting, mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"plan: expected parameters that need a gradient, found none in {source.name}")
    optimizer = OPTIMIZERS[setting.optimizer](trained)
    units = sorted((unit.name for unit in find_units(model)), key=len, reverse=True)
    held: list[Any] = []
    with recording_steps(model, setting.ranks_per_host) as recorder:
        for tensors, category in (
            (model.named_parameters(), work_items.PARAMETERS),
            (model.named_buffers(), work_items.BUFFERS),
        ):
            for name, tensor in tensors:
                plain = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
                unit = next((unit for unit in units if plain.startswith(f"{unit}.")), work_items.ROOT)
                recorder.existing(tensor, category, unit)
        for _ in range(2):
            recorder.begin_step()
            # a third micro-batch allocates what the second does; `roofline` adds its time
            for micro_batch in range(min(setting.micro_batches, 2)):
                last = micro_batch + 1 == min(setting.micro_batches, 2)
                if micro_batch:
                    recorder.begin_micro_batch()
                with _synchronizing(model, last or not setting.no_sync):
                    with recorder.making(work_items.INPUTS):
                        batch = batch_of(source, model, setting.batch_size, setting.seq_len, inputs)
                    with running(source, "forward pass"):
                        loss, output = loss_and_output(model, batch, setting.loss, setting.held_output)
                    recorder.phase("other")
                    # a loop that writes `output = model(batch)` holds the output before this one until here
                    held[:] = [output]
                    del output
                    recorder.phase("backward")
                    with running(source, "backward pass"):
                        loss.backward()
                recorder.phase("other")
                recorder.now_for((_local(p.grad) for p in model.parameters()), work_items.GRADIENTS)
                del batch, loss
            recorder.phase("optimizer")
            optimizer.step()
            recorder.now_for(tree_leaves(dict(optimizer.state)), work_items.OPTIMIZER)
            recorder.phase("other")
            optimizer.zero_grad()
        return recorder.finish()


@contextmanager
def _synchronizing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Reduce gradients in backward, or keep those of whole units until a later micro-batch."""
    if isinstance(model, FullyShardedDataParallel):
        with nullcontext() if wanted else model.no_sync():
            yield
    else:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(wanted)
        yield


def _sharded(model: nn.Module, setting: Setting, mesh: DeviceMesh) -> nn.Module:
    _, compute, reduce = PRECISIONS[setting.precision]
    blocks = tuple(transformer_block_classes(model))
    if setting.api == "fsdp2":
        _checkpoint(model, setting, blocks)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce) if compute else None
        return shard(model, mesh=mesh, strategy=setting.strategy, mp_policy=policy)
    kinds = {
        "full": ShardingStrategy.FULL_SHARD,
        "grad_op": ShardingStrategy.SHARD_GRAD_OP,
        "hybrid": ShardingStrategy.HYBRID_SHARD,
    }
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=kinds[setting.strategy],
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=reduce) if compute else None,
    )
    _checkpoint(model, setting, blocks)  # after the wrapping, so that it goes inside each unit
    fsdp1_lazy_init(model, model)  # else the first forward does it, in one go for all units
    return model


def _checkpoint(model: nn.Module, setting: Setting, blocks: tuple[type[nn.Module], ...]) -> None:
    """Wrap the blocks that are computed again.

    A compiled block without checkpointing keeps what its matrix products give: the partitioner of
    torch.compile finds that it costs less to compute the rest again in backward, within fused kernels.
    """
    checkpointing = setting.checkpointing
    if checkpointing == "none" and not setting.compiled:
        return
    options: dict[str, Any] = {"preserve_rng_state": False}
    if checkpointing in ("selective", "none"):
        options["context_fn"] = selective(every_other=checkpointing == "selective")
    every = int(checkpointing.removeprefix("every_")) if checkpointing.startswith("every_") else 1
    count = itertools.count()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, **options),
        check_fn=lambda module: isinstance(module, blocks) and next(count) % every == 0,
    )


def mesh_of(setting: Setting) -> DeviceMesh:
    if setting.strategy != "hybrid":
        return init_device_mesh("cpu", (setting.world_size,))
    hosts = setting.world_size // setting.ranks_per_host
    return init_device_mesh("cpu", (hosts, setting.ranks_per_host), mesh_dim_names=("replicate", "shard"))


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Do what takes the memory that it takes on a GPU, and does not take longer with more ranks."""
    attention = F.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
        # the CPU has no flash attention with dropout, and would keep the whole matrix
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        kwargs.pop("dropout_p", None)
        return attention(*args, **kwargs)

    def first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        # FSDP2 takes a chunk for each rank, of which this rank needs the first
        length = min(-(-tensor.size(dim) // num_chunks), tensor.size(dim))
        return [tensor.narrow(dim, 0, length)] * num_chunks

    # transformers reads from the positions whether a row holds one text or several, and builds the whole mask
    # where it cannot read; on a GPU it sees one text, and leaves the mask to the kernel
    masks = sys.modules.get("transformers.masking_utils")
    reads = hasattr(masks, "find_packed_sequence_indices")
    with (
        patch.object(masks, "find_packed_sequence_indices", lambda *_: None) if reads else nullcontext(),
        patch.object(F, "scaled_dot_product_attention", without_dropout),
        patch.object(*place("fsdp2_chunks"), first_chunk),
        # FSDP1 asks by the address of the data, which a fake tensor has not
        patch.object(*place("fsdp1_is_allocated"), lambda tensor: tensor.untyped_storage().nbytes() > 0),
        patch.object(*place("fsdp1_same_storage"), lambda a, b: _storage(a) == _storage(b)),
    ):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """What is freed is freed when its last reference goes, not when Python looks for cycles.

    It also saves time: what a plan makes is kept, some 100,000 entries, and to look through it is in vain.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return storage_id(local.untyped_storage())

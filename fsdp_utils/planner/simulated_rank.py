"""Record two training steps of one rank out of many, on tensors without memory."""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_utils.planner import work_items
from fsdp_utils.planner.models import Inputs, Source, batch_of, build, in_words
from fsdp_utils.planner.recorder import recording_steps, storage_of
from fsdp_utils.planner.work_items import Label, Recording
from fsdp_utils.sharding.blocks import transformer_blocks
from fsdp_utils.sharding.checkpointing import every_nth, selective
from fsdp_utils.sharding.units import find_units
from fsdp_utils.sharding.wrapping import shard
from fsdp_utils.torch_internals.groups import fake_store
from fsdp_utils.torch_internals.names import FakeTensorMode, fsdp1_lazy_init, place


@dataclass(frozen=True)
class Setting:
    """The arguments of `plan` that say how the job is run."""

    world_size: int
    batch_size: int
    seq_len: int | None
    strategy: str
    mp_policy: MixedPrecisionPolicy | None
    checkpointing: str | int | None
    micro_batches: int
    no_sync: bool
    compiled: bool
    offload: bool
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    inputs: Inputs | None
    shard: Callable[[nn.Module, DeviceMesh], nn.Module] | None
    ranks_per_host: int


def record_one_rank(source: Source, setting: Setting, blocks: int | None) -> Recording:
    """Return rank 0's recording, with so many blocks of each stack; None for all."""
    if dist.is_initialized():
        raise RuntimeError(
            "plan: there is a process group already, and the simulation needs another one. Plan before "
            "init_process_group(), or after destroy_process_group()."
        )
    dist.init_process_group("fake", rank=0, world_size=setting.world_size, store=fake_store())
    # an error gets a sentence from `in_words`, and no traceback before it
    log = logging.getLogger("torch._subclasses.fake_tensor")
    hosts, is_hybrid = setting.world_size // setting.ranks_per_host, setting.strategy == "hybrid"
    shape = (hosts, setting.ranks_per_host) if is_hybrid else (setting.world_size,)
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard") if is_hybrid else None)
        with FakeTensorMode(), _as_on_a_gpu(), patch.object(log, "disabled", True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returned a view: no matter here
            return _run_steps(source, setting, _sharded(build(source, blocks), setting, mesh))
    finally:
        dist.destroy_process_group()


def _run_steps(source: Source, setting: Setting, model: Any) -> Recording:
    is_fsdp2: bool = isinstance(model, FSDPModule)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"plan: expected parameters that need a gradient, found none in {source.name}")
    optimizer = setting.optimizer(trained)
    batch_per_rank = setting.batch_size // (setting.world_size * setting.micro_batches)
    batches = min(setting.micro_batches, 2)  # a third is as the second; `roofline` adds its time
    units = sorted((unit.name for unit in find_units(model)), key=len, reverse=True)
    with recording_steps(model, setting.ranks_per_host) as recorder:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            plain = name.replace("_fsdp_wrapped_module.", "")
            unit = next((unit for unit in units if plain.startswith(f"{unit}.")), work_items.ROOT)
            is_parameter = isinstance(tensor, nn.Parameter)
            recorder.label = Label("start", unit)
            recorder.observe(tensor, "before the steps")
            recorder.now_for([tensor], work_items.PARAMETERS if is_parameter else work_items.BUFFERS)
        for micro_batch in [*range(batches), *range(batches)]:  # two steps
            last = micro_batch + 1 == batches
            recorder.begin_batch(micro_batch)
            keeps = setting.no_sync and not last  # gradients of full units, until a later micro-batch
            if is_fsdp2:
                model.set_requires_gradient_sync(not keeps)
            with model.no_sync() if keeps and not is_fsdp2 else nullcontext():
                with in_words(f"a batch for {source.name}"):
                    make = setting.inputs or partial(batch_of, source)
                    batch = make(batch_per_rank, setting.seq_len)
                recorder.now_for(tree_leaves(batch), work_items.INPUTS)
                with in_words(f"the forward pass of {source.name}"):
                    loss = setting.loss(model, batch)
                recorder.phase("backward")
                with in_words(f"the backward pass of {source.name}"):
                    loss.backward()
            recorder.phase("other")
            recorder.now_for((p.grad for p in model.parameters()), work_items.GRADIENTS)
            del batch, loss
            if last:
                recorder.phase("optimizer")
                optimizer.step()
                recorder.now_for(tree_leaves(dict(optimizer.state)), work_items.OPTIMIZER)
                recorder.phase("other")
                optimizer.zero_grad()
        return recorder.finished()


def _sharded(model: nn.Module, setting: Setting, mesh: DeviceMesh) -> nn.Module:
    try:
        if setting.checkpointing is not None or setting.compiled:
            _compute_again(model, setting.checkpointing)
        if setting.shard is None:
            return shard(model, mesh=mesh, strategy=setting.strategy, mp_policy=setting.mp_policy)
    except ValueError as error:
        raise ValueError(f"plan: {error}") from error
    model = setting.shard(model, mesh)
    if isinstance(model, FullyShardedDataParallel):
        fsdp1_lazy_init(model, model)  # else the first forward does it, in one go for all units
    elif not isinstance(model, FSDPModule):
        raise ValueError(f"plan: expected shard to give a sharded model, found {type(model).__name__}")
    return model


def _compute_again(model: nn.Module, checkpointing: str | int | None) -> None:
    """Checkpoint the blocks, also in eval mode. None is for compiled blocks, which keep what their matrix
    products give: the partitioner of torch.compile computes the rest again in backward, within fused kernels.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if checkpointing in ("selective", None):
        options["context_fn"] = selective(every_other=checkpointing is not None)
    for block in [*transformer_blocks(model).values()][:: every_nth(checkpointing or "full")]:
        block.forward = partial(_without_cache, partial(checkpoint, block.forward, **options))


def _without_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leave out a cache of transformers, as its own checkpointing does: the block would fill it twice."""
    return forward(*args, **{n: value for n, value in kwargs.items() if not hasattr(value, "get_seq_length")})


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Replace what takes other memory on a CPU than on a GPU, or longer with more ranks."""
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
        patch.object(*place("fsdp1_same_storage"), lambda a, b: storage_of(a) == storage_of(b)),
    ):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Free memory when its last reference goes, not when Python looks for cycles. This also saves time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

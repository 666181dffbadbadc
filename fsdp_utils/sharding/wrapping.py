"""Choose the FSDP units of a model and wrap it.

A unit is what FSDP gathers, computes and frees in one piece. For a transformer the right unit is the block:
gathered one after the other, only a block or two hold full parameters at a time. `blocks.py` finds the
blocks, `checks.py` finds mistakes in the wrapping.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.sharding.blocks import by_shared_parameters, outermost, transformer_block_classes
from fsdp_utils.sharding.checks import check_sharding
from fsdp_utils.sharding.names import plain_name

__all__ = ["check_sharding", "shard", "transformer_block_classes", "wrap_policy"]

# What FSDP1 and DeepSpeed call the strategies
_SPELLINGS = {
    "FULL_SHARD": "full",
    "zero3": "full",
    "SHARD_GRAD_OP": "grad_op",
    "zero2": "grad_op",
    "HYBRID_SHARD": "hybrid",
}


def strategy_named(spelling: str) -> str:
    """ "full", "grad_op" or "hybrid" for that spelling; anything else unchanged."""
    return _SPELLINGS.get(spelling, spelling) if isinstance(spelling, str) else spelling


def wrap_policy(model: nn.Module) -> ModuleWrapPolicy:
    """Make each transformer block an FSDP1 unit.

    Args:
        model: before it is wrapped.

    Returns:
        FSDP1's policy, with the classes of `transformer_block_classes`.

    Raises:
        ValueError: the model has no transformer blocks.

    Example::

        model = FullyShardedDataParallel(model, auto_wrap_policy=wrap_policy(model))
    """
    return ModuleWrapPolicy(transformer_block_classes(model))


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "full",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Call fully_shard on each transformer block, then on the model.

    Build the optimizer after this call. Blocks that share a parameter become one unit; a block that shares
    one with the rest of the model (tied weights) stays in the root's unit.

    Args:
        model: changed in place.
        mesh: 1-D, or for "hybrid" 2-D with named dimensions (replicate, shard). None is 1-D over all ranks.
        strategy: "full": parameters are freed after a block's forward and gathered again in backward.
            "grad_op": they stay until backward. "hybrid": as "full" within the mesh's second dimension,
            replicated over the first. FSDP1's names ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD") and
            DeepSpeed's ("zero3", "zero2") mean the same.
        mp_policy: mixed precision, for every unit.
        offload_policy: CPUOffloadPolicy(...), for every unit.

    Returns:
        The model. Each parameter is now a DTensor with its full shape, split along dimension 0 over the mesh.

    Raises:
        ValueError: the strategy is unknown or does not go with the mesh; the model has no transformer blocks,
            is sharded already, or has parameters that FSDP2 cannot shard. The model is unchanged then.
        RuntimeError: there is no process group; this torch trains FSDP2 wrongly on ranks without a GPU.

    Example::

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train_step(batch)
    """
    strategy = strategy_named(strategy)
    if strategy not in ("full", "grad_op", "hybrid"):
        raise ValueError(
            f'shard: expected strategy "full", "grad_op" or "hybrid" (or {", ".join(_SPELLINGS)}), '
            f"found {strategy!r}"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "shard: there is no process group. Start the program with torchrun and call "
            "torch.distributed.init_process_group(), or use run_on_ranks."
        )
    if (found := 1 if mesh is None else mesh.ndim) != (expected := 2 if strategy == "hybrid" else 1):
        raise ValueError(
            f'shard: strategy "{strategy}" expects a {expected}-D mesh, found a {found}-D one. For "hybrid": '
            'init_device_mesh(device_type, (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard")).'
        )
    mesh = _all_ranks() if mesh is None else mesh
    _refuse_gloo_that_adds(mesh)
    options: dict[str, Any] = {"mesh": mesh}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy

    blocks = [block for _, block in outermost(model, tuple(transformer_block_classes(model)))]
    _refuse_what_fully_shard_refuses(model, blocks)
    for unit in _group_blocks(model, blocks):
        fully_shard(unit, reshard_after_forward=strategy != "grad_op", **options)
    if strategy == "grad_op":
        options["reshard_after_forward"] = False  # else torch's default, which is the same for a root
    fully_shard(model, **options)
    return model


def _all_ranks() -> DeviceMesh:
    # By the backend, as gloo ranks may run on a machine that has a GPU.
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    return init_device_mesh("cpu" if accelerator is None else accelerator.type, (dist.get_world_size(),))


def _refuse_gloo_that_adds(mesh: DeviceMesh) -> None:
    # Source: https://github.com/pytorch/pytorch/issues/162338. Seen in torch 2.7.1 and 2.8.0, not in 2.9.1.
    if torch.__version__ < "2.9" and "gloo" in {str(dist.get_backend(one)) for one in mesh.get_all_groups()}:
        raise RuntimeError(
            "shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later, found "
            f"{torch.__version__}. Its gloo adds gradients up where FSDP2 asks for their mean. Install a "
            "later torch, or train with FullyShardedDataParallel."
        )


def _group_blocks(model: nn.Module, blocks: list[nn.Module]) -> list[Any]:
    """The blocks, grouped so that no two units share a parameter, nor one with what stays in the root."""

    def outside(module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in blocks:
                yield from outside(child)

    in_root = set(outside(model))
    units = [
        modules for modules, parameters in by_shared_parameters(blocks) if parameters.isdisjoint(in_root)
    ]
    return [modules[0] if len(modules) == 1 else modules for modules in units]


def _refuse_what_fully_shard_refuses(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Check before anything is changed: fully_shard would raise after some blocks were sharded already."""
    for name, module in model.named_modules():
        where = plain_name(name) or "the model"
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            raise ValueError(
                f"shard: {where} is wrapped in {type(module).__name__} already. Give shard the model without."
            )
        if isinstance(module, FSDPModule) and (module is model or module in blocks):
            raise ValueError(
                f"shard: {where} is an FSDP unit already. shard makes every block and the model a unit: "
                "call it once, and fully_shard before it on other modules only."
            )
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward:
        raise ValueError(
            f"shard: expected a model with a forward, found a {type(model).__name__}. Give shard the module "
            "that calls the blocks."
        )
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for problem, names, mend in (
        (
            "scalar parameters, which have no dimension to shard",
            [name for name, p in parameters.items() if p.dim() == 0],
            "Give each the shape (1,)",
        ),
        (
            "parameters that are not contiguous",
            [name for name, p in parameters.items() if p.dim() and not p.is_contiguous()],
            "Assign nn.Parameter(p.detach().contiguous())",
        ),
    ):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"shard: FSDP2 takes no {problem}; found {shown}. {mend}. Nothing was changed.")

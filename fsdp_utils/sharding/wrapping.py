"""Choose the FSDP units of a model and wrap it.

A unit is what FSDP gathers, computes and frees in one piece. For a transformer the right unit is the block:
gathered one after the other, only a block or two hold full parameters at a time. `blocks.py` finds the
blocks, `checks.py` finds mistakes in the wrapping.
"""

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any, Literal

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
from torch.nn.parallel import DistributedDataParallel

from fsdp_utils.sharding.blocks import by_shared_parameters, outermost, transformer_block_classes
from fsdp_utils.sharding.checkpointing import compute_again, is_count, refuse_checkpointing
from fsdp_utils.sharding.copies import make_equal
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.placements import placement_fn
from fsdp_utils.sharding.scalars import keep_equal

__all__ = ["shard", "transformer_block_classes"]

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


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "full",
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    checkpointing: Literal["full", "selective"] | int | None = None,
    ranks_per_host: int | None = None,
    reshard_after_forward: int | None = None,
    prefetch: int | None = None,
    ignored_params: Set[nn.Parameter] = frozenset(),
    sync_replicas: bool = False,
) -> nn.Module:
    """Call fully_shard on each transformer block, then on the model.

    Build the optimizer after this call. Blocks that share a parameter become one unit; a block that shares
    one with the rest of the model (tied weights) stays in the root's unit. Scalar parameters, which FSDP2
    cannot shard, stay on each rank in full; their gradients are averaged in backward.

    Embedding, last norm and head stay in the root's unit, which is held in full for the whole step: a loss
    that is fused with the head reads its weight without calling it. Where they are large and your loss calls
    the head, give fully_shard the embedding, and then [norm, head], before. Modules that are units already
    stay units.

    A parameter is cut between rows, along dimension 0, if that gives each rank its share to within 5% of
    padding. Else, as for 8 experts on 32 ranks, it is cut along the first dimension that the ranks divide;
    torch then makes a second copy of it for a moment at each all-gather, and of its gradient. One
    that has no such dimension stays cut between rows, with padding (a bias of 5 on 8 ranks: three ranks hold
    nothing of it), unless such padding takes over a MiB and half of a rank's share of the model: that is
    refused.

    Args:
        model: changed in place.
        mesh: 1-D, or for "hybrid" 2-D with named dimensions (replicate, shard). None is all ranks.
        strategy: "full": parameters are freed after a block's forward and gathered again in backward.
            "grad_op": they stay until backward. "hybrid": as "full" within the mesh's second dimension,
            replicated over the first. FSDP1's names ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD") and
            DeepSpeed's ("zero3", "zero2") mean the same.
        mp_policy: mixed precision, for every unit; output_dtype for the model's output alone, as norm
            and head compute in param_dtype.
        offload_policy: CPUOffloadPolicy(...), for every unit.
        checkpointing: compute activations of blocks again in backward, inside each unit, with the same random
            numbers; while a block trains (`block.training`), and without a cache of keys and values. "full":
            of every block. "selective": of every block, but keep the results of attention and of every other
            matrix product. n: of every n-th block, from the first on. torch.compile may be applied to the
            blocks before this call or after it.
        ranks_per_host: for "hybrid" without a mesh: shards are split over that many ranks.
        reshard_after_forward: after a block's forward each rank keeps 1/n of the block instead of its shard,
            so that backward gathers it within n ranks, which stand next to each other (on a host). n divides
            the number of ranks that share the shards. All parameters are then cut between rows, as FSDP2
            asks.
        prefetch: each block asks for the next n blocks in forward, and for the n before it in backward, in
            the order in which they stand in the model. None leaves it to FSDP2, which prefetches one block
            in backward.
        ignored_params: of this model. They are left as they are: not sharded, not moved, their gradients not
            averaged.
        sync_replicas: give all replicas the parameters of the first one, and all ranks the buffers of the
            first rank. Without it, "hybrid" compares the replicas' shards by hash, and a difference is an
            error. Tensors on the meta device, sparse and quantized ones are left out; so is all of it where
            the mesh does not have all ranks.

    Returns:
        The model. Each parameter, but scalars and ignored ones, is now a DTensor with its full shape, split
        along one dimension over the mesh (see above). Names are those of the model before.

    Raises:
        ValueError: the strategy is unknown or does not go with the mesh; a number does not fit the ranks or
            the strategy; the model has no transformer blocks, is sharded or checkpointed already, or has
            parameters that FSDP2 cannot shard, or not evenly. The model is unchanged then.
        TypeError: a policy, the mesh or ignored_params is none. The model is unchanged then.
        RuntimeError: there is no process group; this torch trains FSDP2 wrongly on ranks without a GPU; or,
            on every rank, replicas hold other values (the model is sharded then: build it anew).

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
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(f"shard: expected mesh to be a DeviceMesh, found {mesh!r}")
    if not isinstance(ignored_params, Set):
        raise TypeError(
            "shard: expected ignored_params to be a set of parameters, found a "
            f"{type(ignored_params).__name__}"
        )
    mesh = _mesh(mesh, strategy, ranks_per_host)
    _refuse_numbers(mesh, strategy, reshard_after_forward, prefetch)
    _refuse_gloo_that_adds(mesh)
    options: dict[str, Any] = {"mesh": mesh}
    for name, policy, expected in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if policy is None:
            continue
        if not isinstance(policy, expected):
            raise TypeError(f"shard: expected {name} to be a {expected.__name__}, found {policy!r}")
        options[name] = policy

    blocks = [block for _, block in outermost(model, tuple(transformer_block_classes(model)))]
    _refuse_what_fully_shard_refuses(model, blocks, ignored_params)
    scalars = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 0 and parameter not in ignored_params
    }
    if ignored := {*ignored_params, *scalars.values()}:
        options["ignored_params"] = ignored
    options["shard_placement_fn"] = placement_fn(
        {plain_name(name): p for name, p in model.named_parameters() if p not in ignored},
        mesh.size(mesh.ndim - 1),
        only_rows="" if reshard_after_forward is None else "reshard_after_forward=n needs whole rows",
    )
    if checkpointing is not None:
        refuse_checkpointing(model, checkpointing)
        compute_again(blocks, checkpointing)
    after_forward = strategy != "grad_op" if reshard_after_forward is None else reshard_after_forward
    units = _group_blocks(model, blocks, ignored)
    of_blocks = dict(options)
    if mp_policy is not None:
        of_blocks["mp_policy"] = replace(mp_policy, output_dtype=None)
    for unit in units:
        fully_shard(unit[0] if len(unit) == 1 else unit, reshard_after_forward=after_forward, **of_blocks)
    if strategy == "grad_op":
        options["reshard_after_forward"] = False  # else torch's default, which is the same for a root
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_gather_what_can_train, prepend=True)
    if prefetch is not None:
        _prefetch([unit[0] for unit in units], prefetch)
    if scalars:
        keep_equal(model, scalars, mesh)
    make_equal(model, mesh, sync=sync_replicas)
    return model


def _mesh(mesh: DeviceMesh | None, strategy: str, ranks_per_host: int | None) -> DeviceMesh:
    hybrid = strategy == "hybrid"
    if ranks_per_host is not None and (mesh is not None or not hybrid):
        raise ValueError(
            f'shard: ranks_per_host is for strategy "hybrid" without a mesh, found strategy "{strategy}" and '
            f"{'no' if mesh is None else 'a'} mesh"
        )
    if mesh is not None or (hybrid and ranks_per_host is None):
        if (found := 1 if mesh is None else mesh.ndim) != (expected := 2 if hybrid else 1):
            raise ValueError(
                f'shard: strategy "{strategy}" expects a {expected}-D mesh, found a {found}-D one. For '
                '"hybrid": ranks_per_host=8, or mesh=init_device_mesh(device_type, (hosts, ranks_per_host), '
                'mesh_dim_names=("replicate", "shard")).'
            )
        assert mesh is not None
        return mesh
    # By the backend, as gloo ranks may run on a machine that has a GPU.
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    device, world_size = "cpu" if accelerator is None else accelerator.type, dist.get_world_size()
    if ranks_per_host is None:
        return init_device_mesh(device, (world_size,))
    if not is_count(ranks_per_host) or world_size % ranks_per_host:
        raise ValueError(
            f"shard: expected ranks_per_host to divide the {world_size} ranks, found {ranks_per_host!r}"
        )
    shape = (world_size // ranks_per_host, ranks_per_host)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def _refuse_numbers(mesh: DeviceMesh, strategy: str, reshard_after_forward: Any, prefetch: Any) -> None:
    ranks = mesh.size(mesh.ndim - 1)
    if reshard_after_forward is not None:
        if strategy == "grad_op":
            raise ValueError(
                'shard: strategy "grad_op" keeps the full parameters after forward; for '
                'reshard_after_forward expected "full" or "hybrid"'
            )
        n = reshard_after_forward
        if not is_count(n) or ranks % n or n in (1, ranks):
            raise ValueError(
                f"shard: expected reshard_after_forward to divide the {ranks} ranks that share the shards, "
                f"and to be neither 1 nor {ranks}, found {n!r}"
            )
    if prefetch is not None and not is_count(prefetch):
        raise ValueError(f"shard: expected prefetch to be a number of blocks from 1 on, found {prefetch!r}")


def _prefetch(units: list[Any], ahead: int) -> None:
    """Each asks for those that run after it, in the order in which they stand in the model."""
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, place - ahead) : place][::-1])


def _gather_what_can_train(unit: Any, _: Any) -> None:
    """Under torch.inference_mode, gather the unit before FSDP2 does.

    FSDP2 makes the memory for the full parameters once, at the first gather. If that is in inference mode,
    no training can use it, and parameters that are cut along another dimension than 0 cannot be gathered.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            unit.unshard()


def _refuse_gloo_that_adds(mesh: DeviceMesh) -> None:
    # Source: https://github.com/pytorch/pytorch/issues/162338. Seen in torch 2.7.1 and 2.8.0, not in 2.9.1.
    if torch.__version__ < "2.9" and "gloo" in {str(dist.get_backend(one)) for one in mesh.get_all_groups()}:
        raise RuntimeError(
            "shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later, found "
            f"{torch.__version__}. Its gloo adds gradients up where FSDP2 asks for their mean. Install a "
            "later torch, or train with FullyShardedDataParallel."
        )


def _group_blocks(
    model: nn.Module, blocks: list[nn.Module], ignored: Set[nn.Parameter]
) -> list[list[nn.Module]]:
    """The blocks, grouped so that no two units share a parameter, nor one with what stays in the root."""

    def outside(module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in blocks:
                yield from outside(child)

    in_root = set(outside(model)) - ignored
    groups = by_shared_parameters(blocks, ignored=ignored)
    return [modules for modules, parameters in groups if parameters.isdisjoint(in_root)]


def _refuse_what_fully_shard_refuses(
    model: nn.Module, blocks: list[nn.Module], ignored: Set[nn.Parameter]
) -> None:
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
    parameters = dict(model.named_parameters())
    if strangers := ignored - set(parameters.values()):
        raise ValueError(
            f"shard: {len(strangers)} of the {len(ignored)} ignored_params are not parameters of this model. "
            "Nothing was changed."
        )
    names = [
        plain_name(name)
        for name, parameter in parameters.items()
        if parameter not in ignored and not parameter.is_contiguous()
    ]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"shard: FSDP2 takes no parameters that are not contiguous; found {shown}. Assign "
            "nn.Parameter(p.detach().contiguous()). Nothing was changed."
        )

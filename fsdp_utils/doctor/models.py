"""Find the models that a script trains, and describe how they are sharded and what a rank holds of them."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_utils.sharding.blocks import transformer_blocks
from fsdp_utils.sharding.checks import check_sharding, params
from fsdp_utils.sharding.local_part import local
from fsdp_utils.sharding.names import plain_name
from fsdp_utils.sharding.units import ROOT, Unit, find_units, parameter_sizes
from fsdp_utils.torch_internals.fsdp import fsdp1_replicas, fsdp2_is_root
from fsdp_utils.torch_internals.names import WRAPPED

_SAMPLE = 4096  # elements of a tensor that are hashed, or whose norm is taken


class Models:
    """The models of a script: the outermost modules that hold FSDP or DDP modules."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers  # that have stepped; the caller adds to them
        self.roots: list[nn.Module] = []
        self.blocks: list[tuple[str, nn.Module]] = []
        self.trained_blocks: list[tuple[str, list[Any]]] = []  # the parameters of each that are trained
        self.left_out: dict[Any, str] = {}  # trainable parameters that no optimizer has

    def find(self) -> None:
        """Find the models among all objects of this process."""
        found = [one for one in gc.get_objects() if issubclass(type(one), nn.Module | Optimizer)]
        modules = [one for one in found if issubclass(type(one), nn.Module)]
        held = {p for one in found if issubclass(type(one), Optimizer) for p in params(one)}
        inner = {child for one in modules for child in one.children()}
        outer = sorted((one for one in modules if one not in inner), key=lambda one: type(one).__name__)
        wrapped = (FSDPModule, FSDP1, DDP)
        self.roots = [root for root in outer if any(isinstance(one, wrapped) for one in root.modules())]
        named = ((p, name) for root in self.roots for name, p in root.named_parameters())
        self.left_out = {p: plain_name(name) for p, name in named if p.requires_grad and p not in held}
        self.blocks = [block for root in self.roots for block in _blocks(root)]
        trained = [(n, [p for p in one.parameters() if p in held and p.numel()]) for n, one in self.blocks]
        self.trained_blocks = [(name, some) for name, some in trained if some]

    def problems(self) -> list[str]:
        """Return what check_sharding says of each model with its optimizer."""
        said = []
        for root in self.roots:
            own = [one for one in self.optimizers if not {*root.parameters()}.isdisjoint(params(one))]
            if own or len(self.roots) == 1:
                said += check_sharding(root, (own or self.optimizers)[0])
        return said

    def describe(self, world_size: int, ties: list[list[str]], reduced: dict[Any, bool]) -> dict[str, Any]:
        """Return the facts that do not change from step to step.

        ties: names of one parameter before FSDP1 wrapped it; reduced: whether a parameter that DDP wrapped
        required a gradient then.
        """
        modules = [(name, one) for root in self.roots for name, one in root.named_modules()]
        held = {p for one in self.optimizers for p in params(one)}
        named = {p: plain_name(name) for root in self.roots for name, p in root.named_parameters()}
        at_hand = {*named, *held}  # an optimizer may hold float32 copies of the model's parameters
        sharded = [p for p in named if isinstance(p, DTensor)]
        ddp = {p for _, one in modules if isinstance(one, DDP) for p in one.parameters()}
        by_root = [parameter_sizes(root, find_units(root, also_empty=True)) for root in self.roots]
        units = {unit: own for of_root in by_root for unit, own in of_root.items() if unit}
        elements = sum(size for of_root in by_root for own in of_root.values() for size in own.values())
        unit_of = {name: unit.name for unit, own in units.items() for name in own}
        fsdp1: dict[Any, int] = {one.modules[0]: sum(own.values()) for one, own in units.items() if one.fsdp1}
        states = [value for one in self.optimizers for value in tree_leaves([*one.state.values()])]
        tensors = {
            "parameters": at_hand,
            "gradients": [p.grad for p in at_hand if p.grad is not None],
            "optimizer states": [one for one in states if isinstance(one, Tensor)],
        }
        around = [(name, dict(one.named_children()).get(WRAPPED[1])) for name, one in modules]
        inside = tuple(f"{name}." for name, _ in self.blocks)
        trained = [p.numel() for p in (*sharded, *ddp) if p.requires_grad]
        trained += [size for one, size in fsdp1.items() if any(p.requires_grad for p in one.parameters())]
        return {
            "peers": world_size > 1,
            "plain": not self.roots,
            "ddp": bool(ddp),
            "units": [(unit.name, unit.nbytes, _dtypes(unit)) for unit in units],
            "elements": elements or sum(p.numel() for p in held),
            "trained": sum(trained),
            "left_out": [*self.left_out.values()],
            "optimizers": [type(one).__name__ for one in self.optimizers],
            "bytes": {name: sum(local(one).nbytes for one in some) for name, some in tensors.items()},
            "blocks": len(self.blocks),
            "parts": [unit.nbytes for unit in units if unit.name.startswith(inside)],
            # whether all ranks share all parameters, cut along one dimension
            "by_data": all(
                p.device_mesh.size() == world_size and sum(one.is_shard() for one in p.placements) < 2
                for p in sharded
            ),
            "hybrid_fsdp1": any(map(fsdp1_replicas, fsdp1)),
            "tied_units": [
                " and ".join(names) for names in ties if len({unit_of.get(name, ROOT) for name in names}) > 1
            ],
            "checkpoint_order": [
                plain_name(name) or ROOT for name, one in around if isinstance(one, FSDPModule | FSDP1)
            ],
            "forward_of_part": [
                plain_name(name)
                for root in self.roots
                if isinstance(root, FSDPModule)
                for name, one in root.named_modules()
                if name and isinstance(one, FSDPModule) and fsdp2_is_root(one)
            ],
            "ddp_unfrozen": [
                name
                for p, name in named.items()
                if reduced.get(p) is False and p in held and p.grad is not None
            ],
            "frozen_adapters": [name for root in self.roots for name in _frozen_adapters(root)],
            "drops": any(isinstance(one, nn.Dropout) and one.p and one.training for _, one in modules),
            # Accelerate and the Trainer set it
            "fsdp_is_missing": os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not units,
        }


def _frozen_adapters(root: nn.Module) -> list[str]:
    """Name the parameters of peft's adapters if all are frozen, in a model that is not."""
    layers = [(name, getattr(one, "adapter_layer_names", ())) for name, one in root.named_modules()]
    begins = tuple(f"{name}.{layer}." for name, names in layers for layer in names)
    adapters = [name for name, _ in root.named_parameters() if name.startswith(begins)]
    trained = [name for name, p in root.named_parameters() if p.requires_grad]
    return [*map(plain_name, adapters)] if trained and {*adapters}.isdisjoint(trained) else []


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the transformer blocks by name."""
    try:
        blocks = transformer_blocks(module)
    except ValueError:  # no block is repeated
        return
    for name, block in blocks.items():
        if _is_network(block):
            yield from _blocks(block, plain_name(prefix, name))
        else:
            yield plain_name(prefix, name), block


def _is_network(module: nn.Module) -> bool:
    """Say whether a repeated module is a network with a list of units of its own."""
    lists = [[*one] for one in module.modules() if isinstance(one, nn.ModuleList)]
    return any(isinstance(one, FSDPModule | FSDP1) for some in lists for one in some)


@torch.no_grad()
def norms(some: list[Any]) -> list[float]:
    """Return the norms of the beginnings of the parameters' gradients on this rank."""
    parts = [local(p.grad).flatten()[:_SAMPLE] for p in some if p.grad is not None]
    return torch.stack([part.float().norm() for part in parts]).tolist() if parts else []


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Hash the beginning of a tensor on this rank; "" if it has one value all over."""
    part = local(tensor.detach()).flatten()[:_SAMPLE].cpu()
    if not bool((part != part[:1]).any()):
        return ""
    return hashlib.sha256(part.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _dtypes(unit: Unit) -> str:
    """Name the dtypes of its parameters at rest."""
    held = [p for module in unit.modules for p in module.parameters() if p.requires_grad]
    return ", ".join(sorted({str(p.dtype) for p in held})) or "frozen"

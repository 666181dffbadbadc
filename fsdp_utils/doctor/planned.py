"""Plan a script's training for other GPUs: its model without memory, sharded as the script sharded it."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_utils.planner import Plan, plan
from fsdp_utils.planner.models import own_loss
from fsdp_utils.torch_internals.runtime import has_compiled

_NOTE = """\
  Left out: what is computed outside of the model, such as a loss of its logits; autocast; and what is
  set by methods after fully_shard, such as set_requires_gradient_sync."""


class Planned:
    """What a plan takes from a run: copies of what is sharded, how it is sharded, and a batch."""

    def __init__(self) -> None:
        self.root: Any = None  # the script's model
        self.optimizer: Any = None
        self._batch: Any = None  # positional and named arguments of a forward pass that trains
        self._copies: dict[nn.Module, nn.Module] = {}  # of what is sharded
        self._calls: list[tuple[list[nn.Module], set[Any], dict[str, Any]]] = []  # copies, ignored, options
        self._mesh: Any = None

    def shard(self, modules: Any, mesh: Any = None, ignored_params: Any = None, **options: Any) -> None:
        """Remember the arguments of `fully_shard`, and copy the modules without their memory."""
        several = tree_leaves(modules)
        memo = self._copy(several)
        ignored = {memo[id(one)] for one in ignored_params or () if id(one) in memo}
        self._calls.append(([self._copies[one] for one in several], ignored, options))
        self._mesh = mesh

    def _copy(self, modules: list[nn.Module]) -> dict[int, Any]:
        """Copy modules, with the earlier copies of what is sharded in them; return deepcopy's memo."""
        memo: dict[int, Any] = {id(one): copied for one, copied in self._copies.items()}
        sharded = {tensor for one in self._copies for tensor in one.parameters()}
        for tensor in [one for module in modules for one in (*module.parameters(), *module.buffers())]:
            if isinstance(tensor, DTensor) and tensor not in sharded:
                raise ValueError("tensor parallel, and models that cannot be copied, are not simulated")
            memo[id(tensor)] = _on_meta(tensor)
        self._copies |= {one: copy.deepcopy(one, memo) for one in modules}
        return memo

    def forward(self, args: Any, kwargs: Any) -> None:
        """Remember the arguments of a forward pass that trains, without their memory."""
        self._batch = tree_map_only(Tensor, _on_meta, (args, kwargs))

    def text(self, gpu: str, world_size: int, micro_batches: int) -> str:
        """Return the plan for these ranks, each with the script's batch, or why there is none.

        Ends the process group of the script.
        """
        try:
            return f"{self._plan(gpu, world_size, micro_batches)}\n{_NOTE}"
        except Exception as error:  # such as one of the model's own code
            return f"No plan: {str(error).removeprefix('plan: ') or type(error).__name__}"

    def _plan(self, gpu: str, world_size: int, micro_batches: int) -> Plan:
        tensors = [one for one in tree_leaves(self._batch) if isinstance(one, Tensor)]
        if not self._calls or not tensors:
            raise ValueError("it takes one model, cut by fully_shard, and the forward of its second step")
        if self.root not in self._copies:
            self._copy([self.root])
        if dist.is_initialized():
            dist.destroy_process_group()
        first, model = tensors[0], self._copies[self.root]
        asked = {name: value for _, _, options in self._calls for name, value in options.items()}
        kind, defaults = type(self.optimizer), self.optimizer.defaults
        given = {name: defaults[name] for name in inspect.signature(kind).parameters if name in defaults}
        return plan(
            model,
            world_size=world_size,
            batch_size=first.shape[0] * world_size * micro_batches,
            seq_len=first.shape[1] if first.ndim == 2 and not first.is_floating_point() else None,
            strategy="hybrid" if self._mesh is not None and self._mesh.ndim == 2 else "full",
            gpu=gpu,
            mp_policy=asked.get("mp_policy"),
            micro_batches=micro_batches,
            compiled=has_compiled(),
            offload=isinstance(asked.get("offload_policy"), CPUOffloadPolicy),
            optimizer=partial(kind, **given),
            loss=lambda model, batch: own_loss(partial(model, **batch[1]), batch[0]),  # pyright: ignore
            inputs=lambda *_: tree_map_only(
                Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), self._batch
            ),
            shard=partial(self._shard, model),
        )

    def _shard(self, whole: nn.Module, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard a copy of the whole model as the script did; it may have fewer blocks."""
        names: dict[Any, str] = {
            one: name for name, one in (*whole.named_modules(), *whole.named_parameters())
        }
        here: dict[str, Any] = dict((*model.named_modules(), *model.named_parameters()))
        for modules, ignored, options in self._calls:
            own, left_out = (
                [here[names[one]] for one in some if names.get(one) in here] for some in (modules, ignored)
            )
            if own:
                options = {name: value for name, value in options.items() if name != "offload_policy"}
                fully_shard(own, mesh=mesh, ignored_params={*left_out}, **options)
        return model


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

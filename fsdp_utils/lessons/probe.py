"""Bytes that a rank holds and sends at the same moments of any training, whoever wrote its loop."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_utils.collectives import CollectiveTrace, record_collectives
from fsdp_utils.lessons.meter import Meter


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class Probe:
    """Watches the first optimizer that steps inside of the `with` block.

    After its second step the probe counts what this rank holds; it records the third step; in the fourth it
    counts the full parameters that are there at once.

    The model may be sharded later, in place.

    Example::

        with Probe(model) as probe:
            train(model)
        print(probe.held, probe.sent("all_gather"))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, 0
        self.held = [0, 0, 0]  # bytes of parameters, gradients, and what the optimizer keeps of each element
        self.optimizer: Optimizer | None = None  # the one that was found
        self.trace: CollectiveTrace | None = None  # of the third step, if FSDP2 shards the model
        self._meter = Meter()
        self._now = ExitStack()

    def __enter__(self) -> "Probe":
        self._hooks = [register_optimizer_step_pre_hook(self._found)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._now.close()

    def _found(self, optimizer: Optimizer, *_: Any) -> None:
        if self.optimizer is None:
            self.optimizer = optimizer
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self.step += 1
        self._now.close()
        if self.step == 2:
            parameters = list(self.model.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            state = [t for of_one in optimizer.state.values() for t in of_one.values()]
            kept = [t for t in state if torch.is_tensor(t) and t.numel() > 1]  # not the count of steps
            self.held = [sum(t.nbytes for t in local(ts)) for ts in (parameters, gradients, kept)]
            if isinstance(self.model, FSDPModule):
                self.trace = self._now.enter_context(record_collectives(self.model))
        elif self.step == 3:
            self._now.enter_context(self._meter)

    def sent(self, kind: str) -> int:
        """Return the bytes that "all_gather" produced or "reduce_scatter" took in during the third step."""
        events = self.trace.collectives if self.trace is not None else []
        return sum(event.bytes for event in events if event.kind == kind and event.module)

    def row(self) -> list[int]:
        """Return the bytes held (three), gathered, reduced, and of full parameters at once."""
        sent = [self.sent("all_gather"), self.sent("reduce_scatter")]
        return [*self.held, *sent, self._meter.peak_whole_bytes]

"""Fine-tune a part of each gradient: child tuning, under FSDP too."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from fsdp_utils.child_tuning.fixed_mask import Masks, assign, lay_out
from fsdp_utils.child_tuning.masked_step import MaskedGradients
from fsdp_utils.child_tuning.random_masks import threshold
from fsdp_utils.sharding.local_part import local, places
from fsdp_utils.torch_internals.names import disable_dynamo, foreach_add_, fused_adamw_
from fsdp_utils.torch_internals.runtime import collect_adamw

__all__ = ["ChildTuningAdamW"]

_ADAMWS = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "amsgrad",
    "lr",
    "weight_decay",
    "eps",
    "maximize",
)


class ChildTuningAdamW(AdamW):
    """AdamW for child tuning: each step lets only a part of each gradient through.

    Mode "taskfree" (the paper's F) keeps each element of each gradient with probability reserve_p, drawn
    anew at each step, and divides what it keeps by reserve_p, so that the gradient is right on average. Mode
    "task" (D) keeps the elements of a mask that `fisher_mask` has found, always the same ones. Mode None, and
    reserve_p=1 in mode "taskfree", is torch.optim.AdamW with the same arguments, bit for bit.

    Mode "taskfree" shortens AdamW's steps. What is kept is divided by reserve_p, so the first moment stays
    and the second grows by 1 / reserve_p on average: where a gradient changes slowly, a step is about
    sqrt(reserve_p) as long. Compare with AdamW at several learning rates.

    What is masked is the gradient, as in the paper. So in mode "taskfree" momentum moves a weight also at
    steps at which its gradient was masked; and weight decay moves masked weights in both modes. A gradient
    that is not finite spoils the weight in mode "task" even if it is masked.

    The mask is a function of seed, step and the element's place in the whole model. So replicas stay equal
    whatever their ranks' seeds are, a resumed run goes on as it would have gone on, and nobody else's random
    numbers change. With FSDP2 as `fully_shard` shards (along the first dimension), and with FSDP1 and
    use_orig_params=True, the masks are those of the unsharded model, on any number of ranks. Tensors that are
    split along another dimension (as `shard` splits those with few rows), FSDP1's flat parameters, and
    parameters in another memory format than the contiguous one have masks of their own.

    step() leaves every p.grad as it is, and refuses sparse ones. In mode "taskfree" it takes scratch memory
    for each parameter group: 4 to 8 bytes for each element of its largest parameter, or of a sixteenth of all
    on a CPU, and 32 to 64 MiB on a GPU. Mode "task" keeps the masks, a byte for each weight, and
    makes the second moment of a masked weight infinite, so that AdamW's own kernel does not move it. So the
    masks are part of the state, as are mode, reserve_p, seed and the number of steps, and a state dict brings
    its own. The state of AdamW itself brings none: then the masks that were given apply. Before AdamW goes on
    from a state of mode "task", set its infinite second moments to 0.

    Args:
        params: as for AdamW. Mode "task" needs names: model.named_parameters(), or groups of them.
        lr, betas, eps: as for AdamW. lr, weight_decay and reserve_p may differ between groups.
        weight_decay: as for AdamW; but the default is 0, and not AdamW's 0.01.
        reserve_p: the fraction that is kept, in (0, 1]; only for mode "taskfree".
        mode: "taskfree", "task" or None.
        gradient_mask: for mode "task": by parameter name what to keep, as bools: this rank's part of them or
            the whole. The gradients of parameters that it does not name pass as they are. A mask belongs to a
            place in the parameter groups: Accelerate's prepare may put shards in the places of the
            parameters before the first step.
        seed: the same on all ranks.

    Raises:
        ValueError: reserve_p is not in (0, 1]; mode is unknown; mode "task" without a mask or without names;
            the mask names no parameter, or has another shape.

    Source: Xu et al. 2021, "Raise a Child in Large Language Model" (arXiv 2109.05687).

    Example::

        optimizer = ChildTuningAdamW(model.parameters(), lr=1e-4, reserve_p=0.3)
        model(batch).mean().backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        reserve_p: float = 0.3,
        mode: Literal["taskfree", "task"] | None = "taskfree",
        gradient_mask: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in ("taskfree", "task", None):
            raise ValueError(f'ChildTuningAdamW: expected mode "taskfree", "task" or None, found {mode!r}')
        if mode == "task" and not gradient_mask:
            raise ValueError(
                'ChildTuningAdamW: mode "task" expects gradient_mask, found none. Make one with '
                'fisher_mask(model, batches, loss_fn), or use mode="taskfree".'
            )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.defaults.update(reserve_p=reserve_p, mode=mode, seed=seed, mask_step=0)
        self._masks: Masks = assign(gradient_mask or {}, self.param_groups) if mode == "task" else {}
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # neither AdamW's constructor nor its state has our settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            threshold(group["reserve_p"])  # raises if it is out of range
        self._firsts: dict[int, int] = {}
        self._planned: dict[Any, tuple[Any, MaskedGradients]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_masks": self._masks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's; masks, mode, reserve_p and seed are those of the state, where it has them."""
        super().load_state_dict(state_dict)
        if not all("mode" in group for group in state_dict["param_groups"]):  # AdamW's own
            for state in self.state.values():  # the state's owner may go on with these tensors
                state["exp_avg_sq"] = state["exp_avg_sq"].clone()
            self._mask_moments(self._masks)

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; closure and result are as for AdamW."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        without = [where for where in self._masks if not self._state_at(where)]
        for number, group in enumerate(self.param_groups):
            group["mask_step"] += 1
            lists: Any = [[] for _ in range(6)]
            has_complex = collect_adamw(self, group, lists)
            if group["mode"] is None or (group["mode"] == "taskfree" and group["reserve_p"] == 1):
                settings: dict[str, Any] = {name: group[name] for name in _ADAMWS}
                beta1, beta2 = group["betas"]
                adamw(*lists, has_complex=has_complex, beta1=beta1, beta2=beta2, **settings)
            elif lists[0]:
                self._mask_moments(without)
                self._masked_step(number, group, lists)
        return loss

    def _masked_step(self, number: int, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        if group["amsgrad"] or group["maximize"]:  # given in a group, or loaded
            raise ValueError(
                f"ChildTuningAdamW: expected amsgrad and maximize off, found one on in parameter group "
                f"{number}. Use torch.optim.AdamW for it."
            )
        steps = lists[5]
        # one tensor for all: of a number, each addition on the CPU would make a tensor of its own
        foreach_add_(steps, torch.ones((), device=steps[0].device), alpha=1.0)
        parts, grads, *moments = ([local(t) for t in column] for column in lists[:4])
        grads = [
            grad if _is_laid_out_as(p, grad) else torch.empty_like(p).copy_(grad)
            for p, grad in zip(parts, grads, strict=True)
        ]
        if not all(
            _is_laid_out_as(p, moment) for column in moments for p, moment in zip(parts, column, strict=True)
        ):
            raise ValueError(
                "ChildTuningAdamW: expected moments of the parameters' dtypes and memory formats, found "
                "others. Make the parameters contiguous, or load the state of parameters like these."
            )
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, part in enumerate(parts):
            alike.setdefault((part.dtype, part.device), []).append(i)
        for (dtype, device), chosen in alike.items():
            tensors = [[column[i] for i in chosen] for column in (parts, grads, *moments)]
            at = [steps[i] for i in chosen]
            if (
                device.type != "cpu" and at[0].device.type == "cpu"
            ):  # where AdamW keeps them unless it is fused
                at = list(torch.stack(at).to(device, torch.float32, non_blocking=True).unbind())
            if group["mode"] == "task":
                _fused_adamw(group, tensors, at)
                continue
            bound, kept = threshold(group["reserve_p"])
            divisor = torch.full((), kept, dtype=torch.float32, device=device)
            masks = self._masks_of((number, dtype, device), [lists[0][i] for i in chosen], tensors[0])
            masked = masks.of(tensors[1], seed=group["seed"], step=group["mask_step"], bound=bound)
            for batch, grads_of_batch in zip(masks.batches, masked, strict=True):
                own = [[column[i] for i in batch] for column in (tensors[0], tensors[2], tensors[3], at)]
                _fused_adamw(group, [own[0], grads_of_batch, own[1], own[2]], own[3], divisor)

    def _masks_of(self, key: Any, params: list[Tensor], parts: list[Tensor]) -> MaskedGradients:
        """The random masks of these parameters of a group, remembered between steps."""
        these = [(id(p), part.numel()) for p, part in zip(params, parts, strict=True)]
        known, masks = self._planned.get(key, (None, None))
        if masks is None or known != these:
            if any(id(p) not in self._firsts for p in params):  # the first step, or they were replaced
                everything = [p for group in self.param_groups for p in group["params"]]
                following = 0
                for p, place in zip(everything, places(everything), strict=True):
                    self._firsts[id(p)] = following + place.offset
                    following += place.shape.numel()
            masks = MaskedGradients(parts, [self._firsts[id(p)] for p in params])
            self._planned[key] = these, masks
        return masks

    def _state_at(self, where: tuple[int, int]) -> dict[str, Any]:
        number, position = where
        return self.state.get(self.param_groups[number]["params"][position], {})

    def _mask_moments(self, where: Iterable[tuple[int, int]]) -> None:
        """Make the second moments of masked weights infinite, where there are moments by now."""
        for number, position in where:
            group, state = self.param_groups[number], self._state_at((number, position))
            if state and group["mode"] == "task":
                p, name = group["params"][position], group["param_names"][position]
                kept = lay_out(name, self._masks[number, position], p, *places([p]))
                local(state["exp_avg_sq"]).masked_fill_(kept == 0, torch.inf)
                self._masks[number, position] = kept


def _is_laid_out_as(p: Tensor, other: Tensor) -> bool:
    """Has it the parameter's dtype and memory format? AdamW's kernel takes both for granted."""
    if p.dtype != other.dtype:
        return False
    return (p.is_contiguous() and other.is_contiguous()) or p.stride() == other.stride()


def _fused_adamw(
    group: dict[str, Any], tensors: list[list[Tensor]], steps: list[Tensor], divisor: Tensor | None = None
) -> None:
    """AdamW in one pass, on params, grads and moments. It divides the grads by the divisor, in place."""
    params, grads, averages, squares = tensors
    settings: Any = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "eps": group["eps"]}
    beta1, beta2 = group["betas"]
    if group["mode"] == "task":
        beta2 = max(beta2, torch.finfo(torch.float32).tiny)  # 0 times infinity is no number
    settings |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False, "grad_scale": divisor}
    fused_adamw_(params, grads, averages, squares, [], steps, **settings)

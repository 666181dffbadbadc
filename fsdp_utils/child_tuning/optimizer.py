"""Fine-tune a part of each gradient: child tuning, under FSDP too."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import AdamW, adamw

from fsdp_utils.child_tuning.fisher import fisher_mask
from fsdp_utils.child_tuning.fixed_mask import Masks, assigned, decay_kept, follow, held, hold
from fsdp_utils.child_tuning.fused_kernel import fused_adamw, laid_out_as, steps_on
from fsdp_utils.child_tuning.masked_step import Plan, Scratch
from fsdp_utils.sharding.local_part import as_dtensor, local, places
from fsdp_utils.torch_internals.names import disable_dynamo, foreach_add_
from fsdp_utils.torch_internals.runtime import collect_adamw

__all__ = ["ChildTuningAdamW", "fisher_mask"]

MASK = "gradient_mask"  # its key in a saved state, where it travels and is sharded as the parameter
_OWN = ("reserve_p", "mode", "seed", "freeze_masked", "mask_step")  # what each group has besides AdamW's


class ChildTuningAdamW(AdamW):
    """AdamW for child tuning: each step lets only a part of each gradient through.

    Mode "taskfree" (the paper's F) keeps each element of each gradient with probability reserve_p, drawn
    anew at each step, and divides what it keeps by reserve_p, so that the gradient is right on average. Mode
    "task" (D) keeps the elements of a mask that `fisher_mask` has found, always the same ones. Mode None, and
    reserve_p=1 in mode "taskfree", is torch.optim.AdamW with the same arguments, bit for bit.

    What is masked is the gradient, as in the paper. So in mode "taskfree" momentum moves a weight also at
    steps at which its gradient was masked; and weight decay moves masked weights in both modes.
    freeze_masked=True stops that in mode "task": then masked weights stay as they are. In mode "task" old
    momentum, from a loaded state of AdamW, does not move them either; but a gradient that is not finite
    spoils the weight even if it is masked.

    The mask is a function of seed, step and the element's place in the whole model, whatever its memory
    format. So replicas stay equal whatever their ranks' seeds are, a resumed run goes on as it would have
    gone on, and nobody else's random numbers change. With FSDP2 as `fully_shard` shards (along the first
    dimension), and with FSDP1 and use_orig_params=True, the masks are those of the unsharded model, on any
    number of ranks. Tensors that are split along another dimension (as `shard` splits those with few rows),
    and FSDP1's flat parameters, have other masks than in the unsharded model, and so have channels_last
    parameters under FSDP1, which flattens them in the order of their memory; for the first of these, masks
    change with the number of ranks.

    step() leaves every p.grad as it is, takes a sparse gradient for the dense one that it stands for, and in
    mode "taskfree" needs scratch memory: on a CPU an eighth of the parameters (0.3 MiB if that is more), on a
    GPU up to 32 MiB for fp32, 40 MiB for bf16 and fp16, and 80 MiB for fp64. In this mode a channels_last
    parameter is copied while it is stepped, with its gradient and moments; in every mode all gradients whose
    dtype is not their parameter's (`grad_dtype`) are copied. Mode "task" needs none: there
    the second moment of a masked weight is infinite, so that AdamW's own kernel does not move it, and `state`
    has averages of its gradients that nothing reads. In state_dict(), and so in checkpoints, both moments of
    such a weight are 0, and mode, reserve_p, seed, the number of steps and the masks are there; a mask takes
    as much as a moment, because FSDP1 saves nothing smaller. To load into mode "task", build the optimizer
    with a mask of ones: the loaded one replaces it. Under torch.compile, step() runs uncompiled. On a CPU a
    step of mode "taskfree" takes about 1.5 times as long as AdamW's with its fused kernel, one of mode "task"
    as long (benchmarks/child_tuning.py).

    Args:
        params: as for AdamW. Mode "task" needs names: model.named_parameters(), or groups of them.
        lr, betas, eps: as for AdamW. lr, weight_decay and reserve_p may differ between groups.
        weight_decay: as for AdamW; but the default is 0, and not AdamW's 0.01.
        reserve_p: the fraction that is kept, in (0, 1]; only for mode "taskfree". Steps become shorter: what
            is kept is divided by reserve_p, so the first moment stays and the second grows by 1 / reserve_p
            on average. Where a gradient changes slowly, a step is about sqrt(reserve_p) as long as AdamW's.
            Compare with AdamW at several rates.
        mode: "taskfree", "task" or None.
        gradient_mask: for mode "task": by parameter name what to keep, as bools: this rank's part of them or
            the whole. The gradients of parameters that it does not name pass as they are. A mask belongs to a
            place in the parameter groups: where Accelerate's prepare puts shards in the places of the
            parameters, before the first step, the masks are sharded likewise.
        seed: the same on all ranks.
        freeze_masked: in mode "task", also keep weight decay from masked weights.
        fused: as for AdamW, where nothing is masked. Masked steps always use the fused kernel.

    Raises:
        ValueError: reserve_p is not in (0, 1]; mode is unknown; mode "task" without a mask or without names;
            the mask names no parameter, or has another shape; freeze_masked in another mode than "task".

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
        freeze_masked: bool = False,
        fused: bool | None = None,
    ) -> None:
        if mode not in ("taskfree", "task", None):
            raise ValueError(f'ChildTuningAdamW: expected mode "taskfree", "task" or None, found {mode!r}')
        if type(seed) is not int:
            raise ValueError(f"ChildTuningAdamW: expected a whole number as seed, found {seed!r}")
        if mode == "task" and not gradient_mask:
            raise ValueError(
                'ChildTuningAdamW: mode "task" expects gradient_mask, found none. Make one with '
                'fisher_mask(model, batches, loss_fn), or use mode="taskfree".'
            )
        if freeze_masked and mode != "task":
            raise ValueError(f'ChildTuningAdamW: freeze_masked needs mode "task", found mode {mode!r}.')
        self._own = dict(zip(_OWN, (reserve_p, mode, seed, freeze_masked, 0), strict=True))
        self._masks: Masks = {}
        self._forget()
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)
        self._step_supports_amp_scaling = False  # a gradient scaler unscales before the step
        if mode == "task":
            assert gradient_mask is not None
            self._masks = assigned(gradient_mask, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As AdamW's; the group may have a reserve_p of its own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, value in self._own.items():
            group.setdefault(name, value)
        if not 0 < group["reserve_p"] <= 1:
            raise ValueError(f"ChildTuningAdamW: expected reserve_p in (0, 1], found {group['reserve_p']}")
        self._forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # AdamW's own state has none of this
            for name, value in self._own.items():
                group.setdefault(name, value)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_own": self._own, "_masks": self._masks}

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's, with the masks of mode "task" as zeros and ones of the parameters' type.

        Both moments of a weight that is held are 0 there, as if its gradients had been.
        """
        self._hold()
        found = super().state_dict()
        numbers = {
            p: number
            for own, group in zip(self.param_groups, found["param_groups"], strict=True)
            for p, number in zip(own["params"], group["params"], strict=True)
        }
        for _, p, state in self._with_masks():
            square = local(state["exp_avg_sq"])
            is_held = held(square)
            local(state["exp_avg"]).masked_fill_(is_held, 0)  # no step reads it
            found["state"][numbers[p]] = {
                **state,
                "exp_avg_sq": _sharded_as(p, square.masked_fill(is_held, 0)),
                MASK: _sharded_as(p, (~is_held).to(square.dtype)),
            }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's; masks, mode, reserve_p and seed are those of the state, where it has them."""
        self._hold()
        for where, p, state in self._with_masks():
            self._masks[where] = _sharded_as(p, ~held(local(state["exp_avg_sq"])))
        super().load_state_dict(state_dict)

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: as for AdamW.

        Returns:
            What closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        follow(self._masks, self.param_groups, self.state)
        with _dense(self.param_groups):
            for number, group in enumerate(self.param_groups):
                self._step(number, group)
        return loss

    def _step(self, number: int, group: dict[str, Any]) -> None:
        for name in ("maximize", "amsgrad"):  # in a group that was given, or in a loaded state of AdamW
            if group[name]:
                raise ValueError(
                    f"ChildTuningAdamW: expected {name} off, found it on in parameter group {number}. It has "
                    "no such setting; take torch.optim.AdamW."
                )
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        params, grads, exp_avgs, exp_avg_sqs, none, steps = lists
        has_complex = collect_adamw(self, group, lists)
        for i, (grad, p) in enumerate(zip(grads, params, strict=True)):
            if grad.dtype != p.dtype:  # p.grad_dtype allows it, and no kernel of AdamW takes it
                grads[i] = grad.to(p.dtype)
        group["mask_step"] += 1
        if group["mode"] is None or (group["mode"] == "taskfree" and group["reserve_p"] == 1):
            adamw(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                none,
                steps,
                foreach=group["foreach"],
                fused=group["fused"],
                has_complex=has_complex,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        elif has_complex:
            raise ValueError(
                f"ChildTuningAdamW: expected real parameters, found complex ones in group {number}. "
                "AdamW's fused kernel, which masked steps use, takes none: use mode=None for their group."
            )
        elif params:
            # one tensor for all: of a number, each addition on the CPU would make a tensor of its own
            foreach_add_(steps, torch.ones((), device=steps[0].device), alpha=1.0)
            if group["mode"] == "task" and self._hold():
                exp_avg_sqs = [self.state[p]["exp_avg_sq"] for p in params]
            lists = [params, grads, exp_avgs, exp_avg_sqs]
            if any(isinstance(p, DTensor) for p in params):
                lists = [[local(t) for t in column] for column in lists]
            lists[1] = laid_out_as(lists[0], lists[1])
            for column, name in ((2, "exp_avg"), (3, "exp_avg_sq")):
                lists[column] = self._moments_laid_out(name, params, lists[0], lists[column])
            if group["mode"] == "task":
                _step_held(group, lists, steps)
            else:
                for plan in self._plans(number, params, lists[0]):
                    plan.run(group, (lists[0], lists[1], lists[2], lists[3]), steps)

    def _moments_laid_out(
        self, name: str, params: list[Tensor], parts: list[Tensor], moments: list[Tensor]
    ) -> list[Tensor]:
        """The moments in memory as the parameters are, as the kernel takes them.

        Not so are those of a state that was saved from another memory format, and of masks that were given.
        """
        found = laid_out_as(parts, moments)
        for p, moment, own in zip(params, moments, found, strict=True):
            if own is not moment:
                self.state[p][name] = _sharded_as(p, own)
        return found

    # ---- the masks of mode "task" ------------------------------------------------------------------

    def _with_masks(self) -> Iterator[tuple[tuple[int, int], Tensor, dict[str, Any]]]:
        """The parameters in mode "task" that have moments: where each is in the groups, and its state."""
        for number, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if group["mode"] == "task" and self.state.get(p):
                    yield (number, position), p, self.state[p]

    def _hold(self) -> bool:
        """Move masks that were given or loaded into the moments that exist; return whether there were any."""
        found = False
        for where, p, state in self._with_masks():
            given, loaded = self._masks.get(where), state.pop(MASK, None)
            if (mask := given if loaded is None else loaded) is not None:
                state["exp_avg_sq"] = _sharded_as(p, hold(local(state["exp_avg_sq"]), local(mask)))
                self._masks[where] = None
                found = True
        return found

    # ---- remembered between steps ------------------------------------------------------------------

    def _plans(self, number: int, params: list[Tensor], parts: list[Tensor]) -> list[Plan]:
        """How the elements of these parameters of a group pass through the scratch memory."""
        key = [(id(p), part.numel()) for p, part in zip(params, parts, strict=True)]
        known, plans = self._planned.get(number, (None, []))
        if known != key:
            if any(id(p) not in self._first for p in params):  # the first step, or they were replaced
                self._first = self._numbered()
            plans = [
                Plan(
                    chosen,
                    parts,
                    [self._first[id(params[i])] for i in chosen],
                    self._scratch_for(like),
                )
                for like, alike in _alike(parts).items()
                for chosen in _one_by_one_if_strided(alike, parts)
            ]
            self._planned[number] = key, plans
        return plans

    def _numbered(self) -> dict[int, int]:
        """By the id of each parameter, the number of this rank's first element among those of the model."""
        params = [p for group in self.param_groups for p in group["params"]]
        first, following = {}, 0
        for p, place in zip(params, places(params), strict=True):
            first[id(p)] = following + place.offset
            following += place.shape.numel()
        self._elements = following
        return first

    def _scratch_for(self, like: tuple[torch.dtype, torch.device]) -> Scratch:
        """Memory for gradients of this dtype on this device; an eighth of what such parameters take here."""
        if like not in self._scratch:
            parts = [local(p) for group in self.param_groups for p in group["params"]]
            size = sum(part.nbytes for part in parts if (part.dtype, part.device) == like)
            self._scratch[like] = Scratch(*like, size // 8, self._elements)
        return self._scratch[like]

    def _forget(self) -> None:
        self._planned: dict[int, tuple[Any, list[Plan]]] = {}
        self._first: dict[int, int] = {}
        self._elements = 0
        self._scratch: dict[tuple[torch.dtype, torch.device], Scratch] = {}


def _alike(parts: list[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """Positions of the tensors, by dtype and device."""
    groups: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault((part.dtype, part.device), []).append(i)
    return groups


def _one_by_one_if_strided(alike: list[int], parts: list[Tensor]) -> list[list[int]]:
    """The positions of contiguous tensors, and each other one by itself: it is copied while it is stepped."""
    contiguous = [i for i in alike if parts[i].is_contiguous()]
    return [contiguous] * bool(contiguous) + [[i] for i in alike if not parts[i].is_contiguous()]


def _step_held(group: dict[str, Any], lists: list[list[Tensor]], steps: list[Tensor]) -> None:
    """A step in mode "task". The lists hold parameters, gradients and both moments; local ones."""
    decay, (beta1, beta2) = group["weight_decay"], group["betas"]
    betas = beta1, max(beta2, torch.finfo(torch.float32).tiny)  # 0 times infinity is no number
    for (_, device), chosen in _alike(lists[0]).items():
        params, grads, exp_avgs, exp_avg_sqs = ([column[i] for i in chosen] for column in lists)
        at = steps_on(device, [steps[i] for i in chosen])
        if group["freeze_masked"] and decay:
            decay_kept(params, exp_avg_sqs, float(group["lr"]) * decay)
        tensors = params, grads, exp_avgs, exp_avg_sqs
        fused_adamw({**group, "betas": betas}, tensors, at, 0.0 if group["freeze_masked"] else decay)


def _sharded_as(p: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor, as the whole if the parameter is distributed."""
    return as_dtensor(part, p) if isinstance(p, DTensor) else part


@contextmanager
def _dense(groups: list[dict[str, Any]]) -> Iterator[None]:
    """With dense gradients where they are sparse; afterwards each p.grad is what it was."""
    with_grads = (p for group in groups for p in group["params"] if p.grad is not None)
    sparse = {p: p.grad for p in with_grads if p.grad.is_sparse}
    try:
        for p, grad in sparse.items():
            p.grad = grad.to_dense()
        yield
    finally:
        for p, grad in sparse.items():
            p.grad = grad

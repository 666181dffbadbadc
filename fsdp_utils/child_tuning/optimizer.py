"""AdamW that lets only a part of each gradient through."""

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import AdamW, adamw

from fsdp_utils.child_tuning.random_masks import MaskedGradients, threshold
from fsdp_utils.sharding.local_part import Piece, local, local_chunk, pieces
from fsdp_utils.sharding.names import plain_name, some_names
from fsdp_utils.torch_internals.names import disable_dynamo, foreach_add_, fused_adamw_
from fsdp_utils.torch_internals.runtime import collect_adamw

_FLAGS = ("amsgrad", "maximize")
_SETTINGS = ("foreach", "fused", "capturable", "differentiable", "lr", "weight_decay", "eps", *_FLAGS)


class ChildTuningAdamW(AdamW):
    """AdamW for child tuning: each step lets only a part of each gradient through.

    Mode "taskfree" (the paper's F) keeps each element of a gradient with probability reserve_p, drawn anew at
    each step, and divides it by reserve_p; steps get shorter than AdamW's, down to sqrt(reserve_p) times as
    long. Mode "task" (D) always keeps the elements of one mask, such as `fisher_mask` finds. Mode None, and
    "taskfree" with reserve_p=1, is torch.optim.AdamW bit for bit.

    p.grad stays as it is. In mode "taskfree" momentum also moves weights whose gradient is masked; weight
    decay moves masked weights in both modes; a gradient that is not finite spoils even a weight that mode
    "task" masks. A random mask depends on seed, step and the element's place in the unsharded model, on any
    number of ranks. Tensors split along another dimension than the first, and FSDP1's flat parameters and
    those in channels_last, have masks that differ from those of one process.

    Mode "taskfree" takes 4 to 8 bytes for each element of a group's largest parameter, or of a sixteenth of
    all on a CPU, and 32 to 64 MiB on a GPU. Mode "task" makes the second moments of masked weights infinite.
    A state dict brings masks, mode, reserve_p, seed and number of steps; to one of AdamW, those given apply.

    Args:
        params: as for AdamW. Mode "task" needs names: model.named_parameters(), or groups of them.
        lr, betas, eps, weight_decay: as for AdamW, but without weight decay by default.
        reserve_p: the fraction that mode "taskfree" keeps, in (0, 1]; groups may have their own.
        mode: "taskfree", "task" or None.
        gradient_mask: for mode "task": by parameter name what to keep, as bools: this rank's part or the
            whole. The gradients of parameters that it does not name pass as they are.
        seed: the same on all ranks.

    Raises:
        ValueError: reserve_p or mode is unknown; mode "task" without a mask or without names; the mask names
            no parameter, or has another shape.

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
        self.__setstate__({})
        given = gradient_mask if mode == "task" and gradient_mask else {}
        self._masks = {plain_name(name): mask for name, mask in given.items()}
        everything = self._each()
        known = [piece.name for *_, own in everything for piece in own]
        if (unknown := self._masks.keys() - {*known}) and all(name.startswith("module.") for name in known):
            self._masks = {f"module.{name}": mask for name, mask in self._masks.items()}  # under DDP
            unknown = {name for name in unknown if f"module.{name}" not in known}
        if unknown:
            raise ValueError(
                'ChildTuningAdamW: mode "task" finds its masks by name. gradient_mask names '
                f"{some_names(sorted(unknown))}, which the optimizer does not have. Give it "
                f"model.named_parameters(), and masks with names such as {known[0] or 'head.weight'}."
            )
        for _, p, own in everything if given else ():
            self._kept(p, own)  # raises if a mask does not fit

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # neither AdamW's constructor nor its state has our settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            threshold(group["reserve_p"])  # raises if it is out of range
        self._planned: dict[Any, tuple[Any, MaskedGradients]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_masks": self._masks}

    def _each(self) -> list[tuple[dict[str, Any], Tensor, list[Piece]]]:
        """Return group, parameter, and what this rank holds of it, for each parameter."""
        each = [
            (group, name, p)
            for group in self.param_groups
            for name, p in zip(group.get("param_names", repeat("")), group["params"], strict=False)
        ]
        found = pieces([(name, p) for _, name, p in each])
        return [(group, p, own) for (group, _, p), own in zip(each, found, strict=True)]

    def _kept(self, p: Tensor, own: list[Piece]) -> Tensor:
        """Return what the masks keep of this rank's part, in its shape."""
        part = local(p)
        kept = torch.ones(part.numel(), dtype=torch.bool, device=part.device)
        for piece in own:
            if piece.name in self._masks:
                mask = _cut(self._masks[piece.name], p, piece)
                kept[piece.start : piece.start + piece.numel] = mask.reshape(-1)
        return kept.view(part.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW's; masks, mode, reserve_p and seed are those of the state, where it has them."""
        super().load_state_dict(state_dict)
        of_adamw = not all("mode" in group for group in state_dict["param_groups"])
        for p, state in self.state.items():
            for name in state.keys() - {"step"} if not isinstance(p, DTensor) else ():
                state[name] = _laid_out(state[name], p)
            if of_adamw and state:
                state["exp_avg_sq"] = state["exp_avg_sq"].clone()  # its owner may go on with it
        if of_adamw:
            self._mask_moments()

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; closure and result are as for AdamW."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            group["mask_step"] += 1
            lists: list[Any] = [[] for _ in range(6)]
            states = sum(map(bool, self.state.values()))
            has_complex = collect_adamw(self, group, lists)
            if group["mode"] == "task" and sum(map(bool, self.state.values())) > states:
                self._mask_moments(only_new=True)
            if group["mode"] == "task" or (group["mode"] == "taskfree" and group["reserve_p"] != 1):
                if lists[0]:
                    self._masked_step(number, group, lists)
                continue
            beta1, beta2 = group["betas"]
            settings: dict[str, Any] = {name: group[name] for name in _SETTINGS}
            adamw(*lists, has_complex=has_complex, beta1=beta1, beta2=beta2, **settings)
        return loss

    def _masked_step(self, number: int, group: dict[str, Any], lists: list[list[Any]]) -> None:
        ids = [id(p) for p in lists[0]]
        lists = [[local(t) for t in column] for column in lists]
        # one tensor for all: with a number, each addition on the CPU would make another tensor
        foreach_add_(lists[5], torch.ones((), device=lists[5][0].device), alpha=1.0)
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, part in enumerate(lists[0]):
            alike.setdefault((part.dtype, part.device), []).append(i)
        bound, fraction = threshold(group["reserve_p"])
        settings: Any = {name: group[name] for name in ("weight_decay", "eps", *_FLAGS)}
        settings |= {"lr": float(group["lr"]), "beta1": group["betas"][0]}
        settings["beta2"] = max(group["betas"][1], torch.finfo(torch.float32).tiny)  # 0 * infinity is NaN
        for (dtype, device), chosen in alike.items():
            own = [[column[i] for i in chosen] if column else [] for column in lists]
            if device.type != "cpu" and own[5][0].device.type == "cpu":  # as AdamW keeps steps unless fused
                own[5] = list(torch.stack(own[5]).to(device, torch.float32, non_blocking=True).unbind())
            batches, masked = [list(range(len(chosen)))], iter([own[1]])
            if group["mode"] == "taskfree":
                settings["grad_scale"] = torch.full((), fraction, dtype=torch.float32, device=device)
                known, masks = self._planned.get((number, dtype, device), (None, None))
                these = [(ids[i], lists[0][i].numel()) for i in chosen]
                if masks is None or known != these:
                    first_of = self._first_elements()
                    masks = MaskedGradients(own[0], [first_of.get(ids[i], 0) for i in chosen])
                    self._planned[number, dtype, device] = these, masks
                batches = masks.batches
                masked = masks.of(own[1], seed=group["seed"], step=group["mask_step"], bound=bound)
            for batch, grads in zip(batches, masked, strict=True):
                params, _, *others = ([column[i] for i in batch] if column else [] for column in own)
                grads = [_laid_out(grad, p) for p, grad in zip(params, grads, strict=True)]
                fused_adamw_(params, grads, *others, **settings)

    def _first_elements(self) -> dict[int, int]:
        """Return by a parameter's id the number of its part's first element among those of the model."""
        first_of, before = dict[int, int](), 0
        for _, p, own in self._each():
            for piece in own:
                if piece.numel:
                    first_of.setdefault(id(p), before + piece.offset - piece.start)
                before += piece.shape.numel()
        return first_of

    def _mask_moments(self, only_new: bool = False) -> None:
        """Make the second moments of masked weights infinite, where there are moments by now."""
        for group, p, own in self._each():
            state = self.state.get(p)
            if state and group["mode"] == "task" and not (only_new and state["step"] > 0):
                local(state["exp_avg_sq"]).masked_fill_(~self._kept(p, own), torch.inf)


def _cut(mask: Tensor, p: Tensor, piece: Piece) -> Tensor:
    """Return the mask of a piece."""
    if isinstance(p, DTensor) and mask.shape == p.shape:
        if isinstance(mask, DTensor):
            return local(mask.redistribute(p.device_mesh, p.placements))
        return mask[tuple(slice(at, at + n) for at, n in zip(*local_chunk(p), strict=True))]
    if not isinstance(mask, DTensor):
        if mask.shape == piece.shape:
            if piece.strides:
                laid_out = mask.new_empty_strided(piece.shape, piece.strides).copy_(mask)
                mask = laid_out.as_strided((mask.numel(),), (1,))
            return mask.reshape(-1)[piece.offset : piece.offset + piece.numel]
        if mask.numel() == piece.numel and mask.shape in (local(p).shape, (piece.numel,)):
            return mask
    raise ValueError(
        f"ChildTuningAdamW: gradient_mask[{piece.name!r}]: expected shape {tuple(piece.shape)}, or this "
        f"rank's part of it, found {tuple(mask.shape)}"
    )


def _laid_out(tensor: Tensor, p: Tensor) -> Tensor:
    """Return it in the parameter's dtype and memory format: AdamW's kernel takes both for granted."""
    if tensor.stride() == p.stride() and tensor.dtype == p.dtype:
        return tensor
    copy = torch.empty_like(p)
    if copy.stride() != p.stride():
        raise ValueError(
            f"ChildTuningAdamW: expected parameters without gaps in memory, found one of shape "
            f"{tuple(p.shape)} with strides {p.stride()}. Make the parameters contiguous."
        )
    return copy.copy_(tensor)

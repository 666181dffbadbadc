"""AdamW's fused kernel, as child tuning calls it: on the tensors themselves, whatever holds them."""

from typing import Any

import torch
from torch import Tensor

from fsdp_utils.torch_internals.names import fused_adamw_


def fused_adamw(
    group: dict[str, Any],
    tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
    steps: list[Tensor],
    weight_decay: float,
    divisor: Tensor | None = None,
) -> None:
    """One step of AdamW with the settings of `group`.

    Args:
        group: lr, betas and eps.
        tensors: parameters, gradients and both moments, alike in dtype, device and layout.
        steps: for each parameter how many steps it has taken, with this one; on the same device.
        weight_decay: that of this step.
        divisor: of the gradients, fp32; the kernel writes the quotients over them.
    """
    params, grads, exp_avgs, exp_avg_sqs = tensors
    fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        amsgrad=False,
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
        grad_scale=divisor,
        found_inf=None,
    )


def row(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, over the same memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(params: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Gradients or moments, in memory as the parameters are: copies where they are not.

    Raises:
        ValueError: a parameter's elements do not fill its memory.
    """
    found = list(tensors)
    for i, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
        if param.is_contiguous() and tensor.is_contiguous():
            continue
        own = torch.empty_like(param)
        if own.stride() != param.stride():  # AdamW's kernel would write over what lies between
            raise ValueError(
                "ChildTuningAdamW: expected parameters whose elements fill their memory, found one of shape "
                f"{tuple(param.shape)} with strides {param.stride()}: a part of a larger tensor. Make it one "
                "of its own: nn.Parameter(tensor.contiguous())."
            )
        if tensor.stride() != param.stride():
            found[i] = own.copy_(tensor)
    return found


def steps_on(device: torch.device, steps: list[Tensor]) -> list[Tensor]:
    """The counts of steps where the kernel reads them: AdamW keeps them on the CPU unless it is fused."""
    if device.type == "cpu" or steps[0].device.type != "cpu":
        return steps
    # all in one copy, for which nobody waits
    return list(torch.stack(steps).to(device, torch.float32, non_blocking=True).unbind())

"""Activation checkpointing of blocks, inside their FSDP units."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_utils.sharding.names import unwrapped

# The dispatcher's names. A linear layer is mm, with a bias addmm; experts are one _grouped_mm.
_PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default"}
_KEPT = {
    *_PRODUCTS,
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "flex_attention",
    "aten.max.default",  # float8 finds its scales with it
}


def selective(*, every_other: bool = True) -> Callable[[], Any]:
    """Keep the results of attention and of matrix products (every other one); compute the rest again.

    Source: torchtitan/distributed/activation_checkpoint.py as of 2025, which counts only mm as a product.
    """

    def contexts() -> Any:
        products = {False: 0, True: 0}

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if str(func) in _PRODUCTS and every_other:
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if str(func) in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def every_nth(checkpointing: str | int) -> int:
    """Return n, where every n-th block is to be computed again."""
    every = 1 if checkpointing in ("full", "selective") else checkpointing
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            'shard: expected checkpointing to be None, "full", "selective" or a number n from 1 on (every '
            f"n-th block), found {checkpointing!r}"
        )
    return every


def compute_again(blocks: Sequence[nn.Module], checkpointing: str | int) -> None:
    """Replace the forward of each block, or of every n-th; inside fully_shard's hooks, which gather once."""
    every = every_nth(checkpointing)
    options = {"context_fn": selective()} if checkpointing == "selective" else {}
    for place, block in enumerate(list(dict.fromkeys(map(unwrapped, blocks)))[::every]):
        block.forward = _computed_again(block, options, first=place == 0)


def _computed_again(block: nn.Module, options: dict[str, Any], first: bool) -> Callable[..., Any]:
    forward = block.forward

    def without_cache(value: Any) -> Any:
        """Leave out a cache of transformers, as its own checkpointing does: it would be filled twice."""
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if first and value.get_seq_length():
            raise ValueError(
                "A block with activation checkpointing takes no past_key_values that hold tokens already (as "
                "of prefix tuning): it would add to them again in backward. Call shard without checkpointing."
            )
        return None

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        kwargs = {name: without_cache(value) for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        # The block's own keywords stay apart: checkpoint has some of the same names, such as debug.
        compute = partial(forward, **kwargs)
        return checkpoint(compute, *map(without_cache, args), use_reentrant=False, **options)

    return checkpointed

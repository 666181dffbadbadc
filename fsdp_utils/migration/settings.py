"""The settings that all three have under one name or another, noted in the translation and told in words."""

from typing import Any

from fsdp_utils.migration.keys import Lost, Same, Words, is_on, one_of
from fsdp_utils.migration.translation import HOST, Translation

# FSDP1's, in the order of the numbers by which Accelerate names them too
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def strategy(value: Any, translation: Translation) -> Words:
    """One of FSDP1's strategies, by name or by number.

    Source: https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md
    """
    by_number = {str(number): name for number, name in enumerate(STRATEGIES, start=1)}
    name = one_of(by_number.get(str(value), str(value).lstrip("_")), STRATEGIES)
    if name == "NO_SHARD":
        translation.ddp = True
        return Same("DistributedDataParallel: fully_shard always shards, and NO_SHARD is deprecated")
    translation.reshard_after_forward = name in ("FULL_SHARD", "HYBRID_SHARD")
    words = f"reshard_after_forward={translation.reshard_after_forward}"
    if name.startswith("HYBRID"):
        translation.shard_size = translation.shard_size or HOST
        words += " and a 2-D mesh (copies, ranks that share one)"
    return Same(words)


def precision(param: str, reduce: str, translation: Translation) -> Words:
    """Computing in `param` and adding up gradients in `reduce`, with the model itself in fp32."""
    if param == reduce == "float32":
        return Same("nothing: without mp_policy all stays as it is")
    # fp16's small gradients become 0 unless the loss is scaled
    scaler = "; torch.amp.GradScaler scales the loss" if param == "float16" else ""
    if translation.ddp:
        words = "DistributedDataParallel has no such policy: torch.autocast around the forward pass"
        return Lost(f"{words}{scaler}")
    translation.param_dtype, translation.reduce_dtype = param, reduce
    dtypes = f"param_dtype=torch.{param}, reduce_dtype=torch.{reduce}"
    return Same(f"MixedPrecisionPolicy({dtypes}); buffers keep their dtype: cast them yourself{scaler}")


def offload(on: bool, translation: Translation, *, pin_memory: bool = True) -> Words:
    """Parameters, gradients and optimizer state in host memory."""
    if not on:
        return Same("nothing: not offloaded")
    if translation.ddp:
        return Lost("DistributedDataParallel does not offload")
    translation.offload, translation.pin_memory = True, pin_memory
    pinned = "" if pin_memory else "pin_memory=False"
    return Same(f"CPUOffloadPolicy({pinned}), for parameters, gradients and optimizer state")


def checkpointing(value: Any, translation: Translation) -> Words:
    """Each block's activations computed again in backward."""
    translation.checkpointing = is_on(value)
    return Same(
        "checkpoint_wrapper around each block, before fully_shard" if is_on(value) else "nothing: it is off"
    )


def state_dict(value: Any, translation: Translation) -> Words:
    """FULL, SHARDED or LOCAL, with or without _STATE_DICT."""
    kind = one_of(str(value).upper().removesuffix("_STATE_DICT"), ("FULL", "SHARDED", "LOCAL"))
    translation.state_dict = "full" if kind == "FULL" else "sharded"
    if kind == "FULL":
        return Same("get_state_dict with StateDictOptions(full_state_dict=True, cpu_offload=True)")
    if kind == "LOCAL":
        return Lost(
            "no flat parameters, so no local state dict: get_state_dict and DCP, sharded by parameter"
        )
    return Same("get_state_dict and torch.distributed.checkpoint.save")

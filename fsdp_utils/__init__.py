"""Tools for training with PyTorch FSDP, and what its lessons stand on.

Every public name is importable from here; the module that holds it (and torch
with it) is loaded only when the name is first used.
"""

from fsdp_utils._lazy import loader

__version__ = "0.1.0"

# public name -> the module that holds it
_MODULE_OF = {
    "record_allocations": "allocator",
    "simulate_allocator": "allocator",
    "BatchSizeSearch": "memory",
    "find_batch_size": "memory",
    "Bf16Support": "precision",
    "bf16_support": "precision",
    "ChildTuningAdamW": "child_tuning",
    "fisher_mask": "child_tuning",
    "CheckpointDamagedError": "checkpoint",
    "CheckpointError": "checkpoint",
    "CheckpointNotFoundError": "checkpoint",
    "LoadedState": "checkpoint",
    "PerRank": "checkpoint",
    "checkpoints": "checkpoint",
    "export_safetensors": "pretrained",
    "load_distributed": "checkpoint",
    "load_pretrained": "pretrained",
    "save_distributed": "checkpoint",
    "verify_checkpoint": "checkpoint",
    "OutOfStep": "collectives",
    "check_in_step": "collectives",
    "record_collectives": "collectives",
    "get_local_rank": "distributed",
    "get_rank": "distributed",
    "get_world_size": "distributed",
    "rank0_first": "distributed",
    "run_on_ranks": "distributed",
    "sampler": "distributed",
    "MemoryReport": "memory",
    "Memory_Maximizer": "memory",
    "translate": "migration",
    "Plan": "planner",
    "plan": "planner",
    "search": "planner",
    "check_sharding": "sharding",
    "shard": "sharding",
    "transformer_block_classes": "sharding",
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll] -- checkers read __init__.pyi


__getattr__ = loader(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

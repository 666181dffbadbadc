"""Accelerate and transformers' Trainer with FSDP2 on CPU ranks, where both would take DDP by themselves."""

from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def _shard(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    accelerator.state.fsdp_plugin = plugin
    # in both: with the first alone, gradients would be reduced after each micro-batch
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def accelerator_on_cpus(block: str) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[block]
    )
    _shard(accelerator, plugin)
    return accelerator


class TrainerOnCpus(transformers.Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        settings: dict[str, Any] = self.args.fsdp_plugin_args or {}
        _shard(self.accelerator, FullyShardedDataParallelPlugin(**settings))
        self.is_fsdp_enabled = True

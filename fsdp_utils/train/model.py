"""Builds the model and applies compilation, activation checkpointing and sharding."""

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils._extras import need
from fsdp_utils.distributed.identity import get_world_size
from fsdp_utils.pretrained import load_pretrained
from fsdp_utils.sharding import shard, transformer_block_classes
from fsdp_utils.train.config import ConfigError, TrainConfig
from fsdp_utils.train.data import Data, spread


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """Build the model in fp32 on the CPU, with the same weights on every rank; on meta if pretrained."""
    source = config.model.pretrained or config.model.config
    if source is None:
        if data.build is None:
            raise ConfigError("expected model.config or model.pretrained, as the data brings no model along")
        return data.build()
    setting = "model.pretrained" if config.model.pretrained else "model.config"
    transformers = need("transformers", "train")
    try:
        settings = transformers.AutoConfig.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, settings.architectures[0])._from_config
        parts = [settings, *(getattr(settings, name, None) for name in settings.sub_configs)]
        used = [str(getattr(part, "_attn_implementation", None)) for part in parts]
        if there := [name for name in used if "/" in name]:
            raise ValueError(f"code to be downloaded and run: {there[0]}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{setting} {source!r}: expected a config.json whose architectures name a model of transformers, "
            f"found {error}"
        ) from error
    _check_tokens(settings, data)
    torch.manual_seed(config.seed % 2**63)
    with torch.device("meta" if config.model.pretrained else "cpu"):
        return kind(settings, dtype=torch.float32)


def _check_tokens(settings: Any, data: Data) -> None:
    """Raise ConfigError where samples have tokens that the model has no embedding for; looks at some."""
    tokens = [sample["input_ids"] for sample in spread(data.train) if "input_ids" in sample]
    needed = max((int(ids.max()) + 1 for ids in tokens), default=0)
    if (there := getattr(settings.get_text_config(), "vocab_size", needed)) < needed:
        raise ConfigError(
            f"data.source: expected samples for a model with vocab_size of {there}, found one that needs "
            f"{needed}"
        )


def parallelize(model: Any, config: TrainConfig, device: torch.device) -> nn.Module:
    """Compile each block, let it recompute, and shard it; the model ends on the device, with its weights."""
    settings, shape = config.parallel, (get_world_size(),)
    if settings.strategy == "hybrid":
        of_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
        shape = (get_world_size() // of_a_host, of_a_host)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # it is for generating text, and would be saved beside each block
    blocks = tuple(transformer_block_classes(model)) if settings.compile is not None else ()
    for block in [module for module in model.modules() if isinstance(module, blocks)]:
        block.compile(backend=settings.compile)
    if config.model.pretrained is None:
        model.to(device)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(
        model,
        mesh=mesh,
        strategy=settings.strategy,
        mp_policy=half if settings.precision == "bf16" else None,
        checkpointing="full" if settings.recompute else None,
    )
    if config.model.pretrained is not None:
        load_pretrained(config.model.pretrained, model, cast=True)
    return model

"""From a configuration to a model on its ranks: built, recomputing, compiled, sharded, in this order."""

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils._extras import need
from fsdp_utils.checkpoint import load_pretrained
from fsdp_utils.distributed import get_world_size
from fsdp_utils.train_config import ConfigError, ModelConfig, TrainConfig, mesh_shape
from fsdp_utils.train_data import Data
from fsdp_utils.wrapping import shard, transformer_block_classes

__all__ = ["NAMED", "build_model", "flops_per_token", "parallelize"]

# A few Llamas by name: to try the program, and to measure it.
_TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
NAMED = {
    "llama-tiny": {"vocab_size": 256, **_TINY},
    "llama-small": {"vocab_size": 256, **_SMALL},
    "llama-1b": _1B,
}

# Dense bf16, in TFLOP/s, by a part of the device's name. Source: NVIDIA's data sheets (H100: SXM).
_PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0, "A100": 312.0}


def build_model(config: ModelConfig, data: Data, seed: int) -> nn.Module:
    """The model in fp32 on the CPU, with the same weights on every rank; on meta where it is pretrained.

    Raises:
        ConfigError: there is no such configuration or folder, or nothing says which model.
    """
    if config.pretrained is None and config.config is None:
        if data.build is None:
            raise ConfigError("expected model.config or model.pretrained, as the data brings no model along")
        return data.build()
    if config.pretrained is not None:
        kind, settings = _transformers_config(config.pretrained, "model.pretrained")
        with torch.device("meta"):  # no rank ever holds the whole of it: parallelize fills its shards
            return kind._from_config(settings, dtype=torch.float32)
    assert config.config is not None
    kind, settings = _transformers_config(config.config, "model.config")
    torch.manual_seed(seed)
    return kind._from_config(settings, dtype=torch.float32)


def _transformers_config(source: str, setting: str) -> tuple[Any, Any]:
    transformers = need("transformers", "train")

    path, named = Path(source), cast("dict[str, Any]", NAMED.get(source))
    if named and setting == "model.config":
        return transformers.LlamaForCausalLM, transformers.LlamaConfig(**named)
    if not (path.is_file() or (path / "config.json").is_file()):
        names = f" or one of {', '.join(NAMED)}" if setting == "model.config" else ""
        raise ConfigError(
            f"{setting}: expected a config.json or a folder with one{names}, found {source!r} is none"
        )
    try:
        settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{setting} {source!r}: {error}") from error
    name = (getattr(settings, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if name else None
    if kind is None:
        raise ConfigError(
            f'{setting} {source!r}: expected "architectures" to name a model of transformers, found {name!r}'
        )
    return kind, settings


def parallelize(model: Any, config: TrainConfig, device: torch.device) -> nn.Module:
    """Make each block recompute, compile it and shard it; the model ends on the device, with its weights.

    Raises:
        CheckpointError: the pretrained folder does not hold this model.
        ConfigError: the ranks do not fill the mesh that the strategy asks for.
    """
    settings, world_size = config.parallel, get_world_size()
    shape = mesh_shape(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # it is for generating text, and would be saved beside each block
    blocks = tuple(transformer_block_classes(model))
    if settings.recompute:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            apply_activation_checkpointing,
            checkpoint_wrapper,
        )

        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda module: isinstance(module, blocks),
        )
    if settings.compile is not None:
        for module in model.modules():
            if isinstance(module, blocks):
                module.compile(backend=settings.compile)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if config.model.pretrained is None:
        model.to(device)
    shard(
        model,
        mesh=mesh,
        strategy=settings.strategy,
        mp_policy=half if settings.precision == "bf16" else None,
    )
    if config.model.pretrained is not None:
        load_pretrained(config.model.pretrained, model, cast=True)
    return model


def flops_per_token(model: Any, seq_len: int) -> float | None:
    """What a decoder computes for one token, forward and backward; None where the formula does not apply.

    Args:
        model: sharded or not.
        seq_len: tokens in a sample.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B: 6 for each parameter that multiplies,
        and 12 * layers * hidden size * tokens for attention. Looking up an embedding multiplies nothing.
    """
    config = getattr(model, "config", None)
    layers, hidden = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if layers is None or hidden is None:
        return None
    embedding = model.get_input_embeddings().weight
    tied = getattr(config, "tie_word_embeddings", False)
    multiplying = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
    return 6.0 * multiplying + 12.0 * layers * hidden * seq_len


def peak_flops(device: torch.device, peak_tflops: float | None) -> float | None:
    """What the device can compute in a second at most, in bf16; None where that is not known."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)

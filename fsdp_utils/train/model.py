"""Builds the model and applies activation checkpointing, compilation and sharding, in this order."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils._extras import need
from fsdp_utils.distributed.identity import get_world_size
from fsdp_utils.planner import gpus
from fsdp_utils.pretrained import load_pretrained
from fsdp_utils.sharding.wrapping import shard, transformer_block_classes
from fsdp_utils.train.config import ConfigError, ModelConfig, TrainConfig, mesh_shape
from fsdp_utils.train.data import Data, check_ids

__all__ = ["NAMED", "build_model", "check_data", "flops_per_token", "parallelize", "peak_flops", "throughput"]

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

_MOST_BYTES, _MOST_LAYERS = 1_000_000, 1_000  # of a config.json: ten times what any model has


def build_model(config: ModelConfig, data: Data, seed: int) -> nn.Module:
    """The model in fp32 on the CPU, with the same weights on every rank; on meta where it is pretrained.

    Raises:
        ConfigError: there is no such configuration or folder, or nothing says which model.
    """
    if config.pretrained is None and config.config is None:
        if data.build is None:
            raise ConfigError("expected model.config or model.pretrained, as the data brings no model along")
        return data.build()
    setting, source = "model.config", config.config
    if config.pretrained is not None:
        setting, source = "model.pretrained", config.pretrained
    assert source is not None
    try:
        kind, settings = _transformers_config(source, setting)
        with torch.device("meta"):
            model = kind._from_config(settings, dtype=torch.float32)
        _check_room(model, ranks=get_world_size() if config.pretrained else 1)
        if config.pretrained is not None:
            return model  # no rank ever holds the whole of it: parallelize fills its shards
        torch.manual_seed(seed)
        return kind._from_config(settings, dtype=torch.float32)
    except ConfigError as error:
        raise ConfigError(f"{setting} {source!r}: {error}") from error
    except Exception as error:  # a config.json can make transformers raise anything
        found = str(error).strip().partition("\n")[0]
        if "custom code" in found:
            found += " None is run here: name a function that builds the model in data.source."
        raise ConfigError(
            f"{setting} {source!r}: transformers makes no model of it: {type(error).__name__}: {found}"
        ) from error


def check_data(model: Any, data: Data, seq_len: int) -> None:
    """Refuse a folder's samples that a model of transformers cannot take; each rank reads a share of them.

    Raises:
        ConfigError: seq_len is beyond the model's positions, or this rank finds an id beyond its vocabulary.
    """
    config: Any = getattr(model, "config", None)
    if not data.files or not hasattr(config, "get_text_config"):
        return
    config = config.get_text_config()
    # None or -1 where any length will do, as for Mamba, T5 and XLNet
    positions = getattr(config, "max_position_embeddings", None) or -1
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1  # RoBERTa counts from there
    if 0 < positions < seq_len and not getattr(config, "alibi", False):
        raise ConfigError(
            f"data.seq_len: expected at most the model's {positions} positions, found {seq_len}. Lower it; "
            "where the positions are rotary, max_position_embeddings of its config.json may be raised instead"
        )
    if (vocabulary := getattr(config, "vocab_size", None)) is not None:
        check_ids(data.files, vocabulary)


def _transformers_config(source: str, setting: str) -> tuple[Any, Any]:
    transformers = need("transformers", "train")
    path, named = Path(source), cast("dict[str, Any]", NAMED.get(source))
    if named and setting == "model.config":
        return transformers.LlamaForCausalLM, transformers.LlamaConfig(**named)
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        names = f" or one of {', '.join(NAMED)}" if setting == "model.config" else ""
        raise ConfigError(f"expected a config.json or a folder with one{names}, found none")
    if file.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"expected a file of at most {_MOST_BYTES:,} bytes, found {file.stat().st_size:,}")
    content = json.loads(file.read_text(encoding="utf-8"))
    _check_harmless(content)
    settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    name = (getattr(settings, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ConfigError(f'expected "architectures" to name a model of transformers, found {name!r}')
    return kind, settings


def _check_harmless(content: Any) -> None:
    """Refuse what would run other people's code, or take minutes and gigabytes before it fails.

    Args:
        content: of a config.json, or of a part of it.

    Raises:
        ConfigError: names the entry.
    """
    if not isinstance(content, dict):
        return
    heads, shared = (content.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise ConfigError(
            f"expected num_key_value_heads to divide num_attention_heads ({heads}), found {shared}"
        )
    for key, value in content.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise ConfigError(f"expected {key} to be part of transformers, found {value!r}, to be downloaded")
        if "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ConfigError(f"expected {key} to be at most {_MOST_LAYERS:,}, found {value:,}")
        _check_harmless(value)


def _check_room(model: nn.Module, ranks: int) -> None:
    size, room = 4 * sum(p.numel() for p in model.parameters()) / ranks, psutil.virtual_memory().total
    if size > room:
        found = f"{size / 2**30:.1f} GiB for each rank"
        raise ConfigError(f"expected weights that fit into this host's {room / 2**30:.1f} GiB, found {found}")


def parallelize(model: Any, config: TrainConfig, device: torch.device) -> nn.Module:
    """Compile each block, let it recompute, and shard it; the model ends on the device, with its weights.

    Raises:
        CheckpointError: the pretrained folder does not hold this model.
        ConfigError: the ranks do not fill the mesh that the strategy asks for.
    """
    settings, world_size = config.parallel, get_world_size()
    shape = mesh_shape(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # it is for generating text, and would be saved beside each block
    blocks = tuple(transformer_block_classes(model))
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
        checkpointing="full" if settings.recompute else None,
    )
    if config.model.pretrained is not None:
        load_pretrained(config.model.pretrained, model, cast=True)
    return model


def flops_per_token(model: Any, seq_len: int) -> float | None:
    """The FLOPs of a decoder for one token, forward and backward; None where the formula does not apply.

    Args:
        model: sharded or not.
        seq_len: tokens in a sample.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B: 6 for each parameter that multiplies,
        and 12 * layers * heads * their size * tokens for attention. Looking up an embedding multiplies
        nothing, nor do norms and biases.
    """
    config = getattr(model, "config", None)
    layers, hidden, heads = (
        getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if layers is None or hidden is None or not heads:
        return None
    attending = heads * (getattr(config, "head_dim", None) or hidden // heads)
    looked_up = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    multiplying = sum(p.numel() for p in model.parameters() if p.ndim > 1) - looked_up
    if getattr(config, "tie_word_embeddings", False):
        multiplying += model.get_input_embeddings().weight.numel()
    return 6.0 * multiplying + 12.0 * layers * attending * seq_len


def peak_flops(device: torch.device, peak_tflops: float | None) -> float | None:
    """The device's peak rate in bf16, FLOP/s; None where it is not known."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return gpus.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def throughput(
    config: TrainConfig, model: nn.Module, data: Data, device: torch.device
) -> Callable[[float], dict[str, float | None]]:
    """From the seconds of a step to samples/s, tokens/s and MFU (the part of the devices' peak)."""
    sample, samples = data.train[torch.zeros(1, dtype=torch.int64)], config.data.batch_size
    tokens = sample["input_ids"].numel() * samples if "input_ids" in sample else None
    flops = flops_per_token(model, sample["input_ids"].numel()) if tokens and data.predicts_next else None
    peak = get_world_size() * (peak_flops(device, config.peak_tflops) or 0)

    def measure(seconds: float) -> dict[str, float | None]:
        return {
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens / seconds if tokens else None,
            "mfu": flops * tokens / seconds / peak if flops and tokens and peak else None,
        }

    return measure

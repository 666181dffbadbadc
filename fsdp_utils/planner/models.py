"""A model that has shapes and no memory, with its repeated blocks cut down to a few."""

import copy
import json
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fsdp_utils._extras import need
from fsdp_utils.sharding.blocks import outermost, transformer_block_classes
from fsdp_utils.torch_internals.runtime import own_buffers, own_children, own_parameters, set_children

MOST_MODULES = 15_000  # of a model that is built here; Llama 3.1 405B has 1,900
MOST_LAYERS = 10_000  # in a config.json: transformers makes lists of that length
MOST_LABELS = 1_000_000
MOST_BYTES = 16 * 1024 * 1024  # of a config.json


@dataclass
class Source:
    """What is planned for, as often as it has to be built.

    Args:
        name: of its class.
        build: makes the model; called inside FakeTensorMode or on "meta".
        stacks: lists of blocks that are all alike: their name, and how many there are.
        parameters: of the whole model.
        blocks: of all kinds.
        unlike: in what the model differs from a dense decoder all of whose parameters are trained.
    """

    name: str
    build: Callable[[], nn.Module]
    config: Any = None
    stacks: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    blocks: int = 0
    unlike: list[str] = field(default_factory=list)


def source_of(model: Any, *, attention: str = "sdpa", tensor_parallel: int = 1) -> Source:
    """Where to get the model from.

    Args:
        model: an nn.Module, a function that builds one, a transformers config, a folder with a config.json,
            or a model id of the hub.
        attention: "eager" for the whole matrix of attention; else what transformers takes.
        tensor_parallel: among how many GPUs heads, MLP and vocabulary are divided.

    Raises:
        ValueError: it is none of these, or cannot be built without memory.
    """
    is_config = hasattr(model, "model_type") and not isinstance(model, type)
    if callable(model) and not isinstance(model, nn.Module) and not is_config:
        model = _call(model)
    if isinstance(model, nn.Module):
        if attention == "eager" or tensor_parallel > 1:
            asked = 'attention="eager"' if attention == "eager" else "tensor_parallel"
            raise ValueError(
                f"plan: {asked} expects a transformers config, which it changes; found a model that is built"
            )
        source = Source(type(model).__name__, lambda: model, getattr(model, "config", None))
        _refuse_quantization(source.config)
        _look_at(source, model)
        return source
    config = _config(model) if isinstance(model, str | PathLike) else model
    if not hasattr(config, "model_type"):
        raise ValueError(
            "plan: expected a torch.nn.Module, a function that builds one, a transformers config or a folder "
            f"with a config.json, found {type(model).__name__}"
        )
    _refuse_quantization(config)
    source = _of_config(config, attention)
    if tensor_parallel > 1:
        parameters = source.parameters
        source = _of_config(_divided(config, tensor_parallel), attention)
        source.parameters = parameters
    return source


def _call(builder: Callable[[], Any]) -> nn.Module:
    """Build the model on "meta", where it takes no memory."""
    try:
        with torch.device("meta"):
            model = builder()
    except Exception as error:
        raise ValueError(
            'plan: the function could not build its model on "meta", without memory: '
            f"{first_line(error).rstrip('.')}. Expected a function of no arguments that loads no weights"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"plan: expected a function that gives an nn.Module, found {type(model).__name__}")
    return model


def _refuse_quantization(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "plan: does not simulate quantized weights, and the config has a quantization_config. Delete "
            "it to plan "
            "the training of the model as it is without"
        )


def _divided(config: Any, gpus: int) -> Any:
    """The config of what one of several GPUs has under tensor parallelism."""
    config = copy.deepcopy(config)
    heads = getattr(config, "num_attention_heads", None)
    if not hasattr(config, "head_dim") or not heads:
        raise ValueError(
            f"plan: tensor_parallel expects a config with head_dim, such as LlamaConfig, found "
            f"{type(config).__name__}"
        )
    config.head_dim = config.head_dim or config.hidden_size // heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value % gpus:
            raise ValueError(
                f"plan: expected {name} that {gpus} GPUs of tensor_parallel can share, found {value}"
            )
        setattr(config, name, value // gpus)
    config.vocab_size = -(-config.vocab_size // gpus)
    return config


def build(source: Source, blocks: int | None, dtype: torch.dtype | None) -> nn.Module:
    """The model with fake parameters, inside a FakeTensorMode.

    Args:
        blocks: how many of each stack to keep; None keeps all.
        dtype: of all floating-point parameters and buffers; None leaves them as they are.
    """
    whole = source.build()
    with _cut(whole, source.stacks, blocks) if blocks else nullcontext():
        memo: dict[int, Any] = {}
        for tensor in [*whole.parameters(), *whole.buffers()]:
            memo[id(tensor)] = _fake(tensor, dtype)
        try:
            return copy.deepcopy(whole, memo)
        except Exception as error:
            raise ValueError(
                f"plan: {source.name} could not be copied without its memory: {first_line(error)}"
            ) from error


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".split("\n")[0]


# ---- from a configuration ----------------------------------------------------------------------------


HUB_TIMEOUT_S = 3


def _config(named: str | PathLike[str]) -> Any:
    path = Path(named)
    if (path / "config.json").exists():
        return _read(path)
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(named)):
        raise ValueError(f"plan: expected a folder with a config.json, found none at {path}")
    cached = need("huggingface_hub", "train").try_to_load_from_cache(str(named), "config.json")
    if isinstance(cached, str):
        return _read(Path(cached).parent)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(_from_hub(str(named)))
        return _read(Path(folder))


def _read(folder: Path) -> Any:
    AutoConfig = need("transformers", "train").AutoConfig
    try:
        _check_file(folder / "config.json")
        # never the code that the folder brings, and no question whether to run it
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("plan: "):
            raise
        todo = ""
        if isinstance(error, ValueError) and "custom code" in str(error):
            todo = " The planner runs no code of a folder: build the model yourself, and plan that."
        raise ValueError(
            f"plan: transformers cannot read {folder / 'config.json'}: expected the JSON of a configuration, "
            f"found {first_line(error)}{todo}"
        ) from error


def _from_hub(name: str) -> bytes:
    """The config.json of a model, asked for once: huggingface_hub itself tries for half a minute.

    Raises:
        ValueError: the hub cannot be reached, or does not give it.
    """
    hub = need("huggingface_hub", "train")
    try:
        if hub.constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        url = hub.hf_hub_url(name, "config.json")
        request = urllib.request.Request(url, headers=hub.utils.build_hf_headers())
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as reply:
            return reply.read(MOST_BYTES + 1)
    except Exception as error:
        raise ValueError(
            f"plan: {name} is no folder, is not in the cache of the hub, and could not be fetched "
            f"({first_line(error)}). Get its config.json on a machine that reaches the hub: hf download "
            f"{name} "
            "config.json --local-dir FOLDER; then plan FOLDER"
        ) from error


def _check_file(file: Path) -> None:
    """Refuse what would make transformers write lists of gigabytes.

    Raises:
        ValueError: the file is too large or no JSON, or a number of layers or labels is too high.
    """
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"plan: {file}: expected at most {MOST_BYTES:,} bytes, found {size:,}")
    sections = [json.loads(file.read_text(encoding="utf-8"))]
    while sections:
        section = sections.pop()
        for key, value in section.items() if isinstance(section, dict) else ():
            sections.append(value)
            if not key.endswith(("layers", "n_layer", "num_labels")) and key not in ("depth", "depths"):
                continue
            most = MOST_LABELS if key == "num_labels" else MOST_LAYERS
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > most:
                    raise ValueError(f"plan: {file}: {key}: expected at most {most:,}, found {number:,}")


def _of_config(config: Any, attention: str) -> Source:
    config = copy.deepcopy(config)
    config.use_cache = False
    _without_kernels(config)
    if attention == "eager":
        config._attn_implementation = "eager"
    try:
        whole = _Built(_maker(config))
        with _few_modules(config):
            model = whole()
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("plan: "):
            raise
        raise ValueError(
            f'plan: a {config.model_type} model could not be built on "meta", without memory: expected a '
            f"configuration whose values make a model, found {first_line(error)}"
        ) from error
    source = Source(type(model).__name__, whole, config)
    _look_at(source, model)
    return source


def _without_kernels(config: Any) -> None:
    """Attention as torch has it: a config can also name a kernel that would be downloaded, and run."""
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            _without_kernels(inner)
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config._attn_implementation = None  # transformers chooses: sdpa, where the model has it


@contextmanager
def _few_modules(config: Any) -> Iterator[None]:
    """Refuse to build a model of more modules than any has: 100,000 layers take 4 GB and 100 s."""
    count = 0

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            layers = getattr(config, "num_hidden_layers", "unknown")
            raise ValueError(
                f"plan: expected a model of at most {MOST_MODULES:,} modules, found more. Is its number of "
                f"layers right? It is {layers}"
            )

    hook = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _maker(config: Any) -> Callable[[], nn.Module]:
    import transformers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    for name in getattr(config, "architectures", None) or ():
        # a model, and not whatever else in transformers can be called
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return lambda: cls._from_config(config)
    autos = (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        AutoModelForImageClassification,
    )
    # many an encoder-decoder could be a decoder alone, too
    for auto in autos[1:] if getattr(config, "is_encoder_decoder", False) else autos:
        if type(config) in auto._model_mapping:
            return lambda: auto.from_config(config, trust_remote_code=False)
    return lambda: transformers.AutoModel.from_config(config, trust_remote_code=False)


class _Built:
    """Builds once, on "meta"."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make, self._model = make, None

    def __call__(self) -> nn.Module:
        if self._model is None:
            from transformers.initialization import no_init_weights

            with torch.device("meta"), no_init_weights():
                self._model = self._make()
            tie = getattr(self._model, "tie_weights", None)  # left out where no weights are initialised
            if tie is not None:
                tie()
        return self._model


# ---- blocks that are alike ---------------------------------------------------------------------------


def _look_at(source: Source, model: nn.Module) -> None:
    source.parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        classes = tuple(transformer_block_classes(model))
    except ValueError as error:
        raise ValueError(f"plan: {error}") from error
    stacks: dict[str, list[nn.Module]] = {}
    blocks = list(outermost(model, classes))
    source.blocks = len(blocks)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        source.unlike.append("frozen parameters")
    if any(parameter.ndim > 2 for _, block in blocks for parameter in block.parameters()):
        source.unlike.append("experts or convolutions in its blocks")
    for name, block in blocks:
        parent, _, index = name.rpartition(".")
        if index.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential):
            stacks.setdefault(parent, []).append(block)
    source.stacks = {
        name: len(blocks)
        for name, blocks in stacks.items()
        if len(blocks) == len(own_children(model.get_submodule(name)))
        and all(_signature(block) == _signature(blocks[0]) for block in blocks[1:])
    }


def _signature(block: nn.Module) -> list[Any]:
    """All that tells two blocks apart, except their number."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and "idx" not in key and "layer_id" not in key
        }
        shapes = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
            if tensor is not None
        ]
        found.append((name, type(module), plain, shapes))
    return found


@contextmanager
def _cut(model: nn.Module, stacks: dict[str, int], blocks: int) -> Iterator[None]:
    """For a time, each stack has only its first blocks."""
    kept = {name: own_children(model.get_submodule(name)) for name in stacks}
    try:
        for name, modules in kept.items():
            set_children(model.get_submodule(name), dict(list(modules.items())[:blocks]))
        yield
    finally:
        for name, modules in kept.items():
            set_children(model.get_submodule(name), modules)


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake

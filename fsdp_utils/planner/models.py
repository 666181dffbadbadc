"""A model that has shapes and no memory, with its repeated blocks cut down to a few, and its batch."""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_utils._extras import need
from fsdp_utils.sharding.blocks import transformer_blocks, unwrapped
from fsdp_utils.torch_internals.runtime import own_buffers, own_children, own_parameters, set_children

MOST_LAYERS = 10_000  # in a config.json: transformers makes lists of that length
Inputs = Callable[[int, int | None], Any]


@dataclass
class Source:
    """A model to plan for, on "meta" or as the caller gave it, and its blocks."""

    model: nn.Module
    stacks: dict[str, int]  # lists of blocks that are all alike: their name, and how many there are
    blocks: int  # their number, all kinds together
    unlike: list[str]  # in what the model differs from a dense decoder all of whose parameters are trained

    @property
    def name(self) -> str:
        return type(self.model).__name__


def source_of(model: Any) -> Source:
    """Build a model on "meta", where it is not built yet, and find its blocks."""
    if isinstance(model, str | PathLike):
        model = _read(Path(model))
    if hasattr(model, "model_type") and not isinstance(model, type | nn.Module):
        model = _of_config(model)
    elif callable(model) and not isinstance(model, nn.Module):
        model = _on_meta(model)
    if not isinstance(model, nn.Module):
        raise ValueError(
            "plan: expected a torch.nn.Module, a function that builds one, a transformers config or a folder "
            f"with a config.json, found {type(model).__name__}"
        )
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError("plan: does not simulate quantized weights; delete the config's quantization_config")
    try:
        blocks = list(transformer_blocks(model).items())
    except ValueError as error:
        raise ValueError(f"plan: {error}") from error
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    large = any(parameter.ndim > 2 for _, block in blocks for parameter in block.parameters())
    unlike = ["frozen parameters"] * frozen + ["experts or convolutions in its blocks"] * large
    return Source(model, _stacks(model, blocks), len(blocks), unlike)


def build(source: Source, blocks: int | None) -> nn.Module:
    """Copy the model with fake parameters, and so many blocks of each stack; called in a FakeTensorMode."""
    lists = [source.model.get_submodule(name) for name in source.stacks]
    kept = [own_children(modules) for modules in lists]
    memo: dict[int, Any] = {}
    try:
        for modules, children in zip(lists, kept, strict=True):
            set_children(modules, dict(list(children.items())[:blocks]))
        for tensor in [*source.model.parameters(), *source.model.buffers()]:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        with in_words(f"to copy {source.name} without its memory"):
            return copy.deepcopy(source.model, memo)
    finally:
        for modules, children in zip(lists, kept, strict=True):
            set_children(modules, children)


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn an error of the model's own code into one sentence; the first error stays its cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("plan: "):
            raise
        text = f"{type(error).__name__}: {str(error).strip() or 'no message'}".split("\n")[0].rstrip(".")
        raise ValueError(f"plan: {what} failed: {text}. Does it run with these sizes, on a CPU?") from error


def _on_meta(builder: Callable[[], Any]) -> Any:
    with in_words('to build the model on "meta", without memory,'), torch.device("meta"):
        return builder()


def _read(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.exists():
        raise ValueError(f"plan: expected a folder with a config.json, found none at {folder}")
    AutoConfig = need("transformers", "train").AutoConfig
    with in_words(f"to read {file}"):
        for key, value in json.loads(file.read_text(encoding="utf-8")).items():
            if key.endswith(("layers", "n_layer")) and isinstance(value, int) and value > MOST_LAYERS:
                raise ValueError(f"plan: {file}: {key}: expected at most {MOST_LAYERS:,}, found {value:,}")
        # never the code that the folder brings, and no question whether to run it
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _of_config(config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    config.use_cache = False
    _without_kernels(config)
    with no_init_weights():
        model = _on_meta(lambda: _built(config))
    model.tie_weights()  # left out where no weights are initialised
    return model


def _without_kernels(config: Any) -> None:
    """Keep torch's attention: a config can also name a kernel that would be downloaded, and run."""
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            _without_kernels(inner)
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config._attn_implementation = None  # transformers chooses: sdpa, where the model has it


def _built(config: Any) -> nn.Module:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        # a model, and not whatever else in transformers can be called
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls._from_config(config)
    autos = ["AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"]
    # many an encoder-decoder could be a decoder alone, too
    for name in autos[1:] if getattr(config, "is_encoder_decoder", False) else autos:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config, trust_remote_code=False)
    return transformers.AutoModel.from_config(config, trust_remote_code=False)


def _stacks(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> dict[str, int]:
    """Find the lists of blocks that are all alike, and how many blocks each has."""
    stacks: dict[str, list[nn.Module]] = {}
    for name, block in blocks:
        parent, _, index = name.rpartition(".")
        if index.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential):
            stacks.setdefault(parent, []).append(block)
    return {
        name: len(blocks)
        for name, blocks in stacks.items()
        if len(blocks) == len(own_children(model.get_submodule(name)))
        and all(_signature(block) == _signature(blocks[0]) for block in blocks[1:])
    }


def _signature(block: nn.Module) -> list[Any]:
    """List all that tells two blocks apart, except their number."""
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


def batch_of(source: Source, batch_per_rank: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Make one rank's batch for a model of transformers; called inside a FakeTensorMode."""
    parameters = inspect.signature(unwrapped(source.model).forward).parameters
    config = getattr(source.model, "config", None)
    if "pixel_values" in parameters and "input_ids" not in parameters and config is not None:
        side = config.image_size
        sides = (side, side) if isinstance(side, int) else side
        pixels = torch.zeros(batch_per_rank, getattr(config, "num_channels", 3), *sides)
        labels = {"labels": torch.zeros(batch_per_rank, dtype=torch.long)} if "labels" in parameters else {}
        return {"pixel_values": pixels, **labels}
    if "input_ids" not in parameters:
        raise ValueError(
            f"plan: does not know what to call {source.name} with. Give inputs=lambda batch_per_rank, "
            "seq_len: ..., which returns a tensor, a tuple or a dict, of one rank's batch."
        )
    if not seq_len:
        raise ValueError(f"plan: {source.name} reads tokens; expected seq_len, found {seq_len!r}")
    tokens = torch.zeros(batch_per_rank, seq_len, dtype=torch.long)
    # an encoder-decoder reads as many tokens on both sides
    names = [name for name in ("input_ids", "decoder_input_ids", "labels") if name in parameters]
    return dict.fromkeys(names, tokens)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the model's own loss if it has one, otherwise the mean of its output."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise ValueError(f"plan: {type(model).__name__} returns nothing that needs a gradient")
    return tensors[0].float().mean()

"""A model that has shapes and no memory, with its repeated blocks cut down to a few, and its batch."""

import copy
import inspect
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
from fsdp_utils.torch_internals.runtime import own_buffers, own_parameters

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
    memo: dict[int, Any] = {}
    for tensor in [*source.model.parameters(), *source.model.buffers()]:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    cut = source.stacks if blocks else {}
    for name in cut:  # what goes is not copied
        left_out = list(source.model.get_submodule(name).children())[blocks:]
        memo |= dict.fromkeys(map(id, left_out), nn.Identity())
    with in_words(f"to copy {source.name} without its memory"):
        model = copy.deepcopy(source.model, memo)
    for name in cut:
        del model.get_submodule(name)[blocks:]  # pyright: ignore[reportIndexIssue]
    return model


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
        # never the code that the folder brings, and no question whether to run it
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _of_config(config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    config.use_cache = False
    # A config can also name a kernel that would be downloaded, and run. None: transformers chooses sdpa where
    # the model has it; for inner configs, too.
    config._attn_implementation = "eager" if config._attn_implementation == "eager" else None
    with no_init_weights():
        model = _on_meta(lambda: _built(config))
    model.tie_weights()  # left out where no weights are initialised
    return model


def _built(config: Any) -> nn.Module:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        # a model, and not whatever else in transformers can be called
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls._from_config(config)
    # many an encoder-decoder could be a decoder alone, too
    reads = getattr(config, "is_encoder_decoder", False)
    auto = transformers.AutoModelForSeq2SeqLM if reads else transformers.AutoModelForCausalLM
    return auto.from_config(config, trust_remote_code=False)


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
        if len(blocks) == len(model.get_submodule(name))  # pyright: ignore[reportArgumentType]
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

"""What one rank's step is called with, and the loss that it computes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_utils.planner.models import Source, first_line
from fsdp_utils.sharding.blocks import unwrapped

LOSSES_OF_LOGITS = ("full", "shifted", "half")  # from the logits of all tokens, which the model can return
Inputs = Callable[[int, int | None], Any]


def batch_of(
    source: Source, model: nn.Module, batch_size: int, seq_len: int | None, inputs: Inputs | None
) -> Any:
    """What one rank's step is called with; inside a FakeTensorMode."""
    if inputs is not None:
        with _in_words(f"inputs({batch_size}, {seq_len})"):
            return inputs(batch_size, seq_len)
    with _in_words(f"a batch of {batch_size} for {source.name}"):
        return _batch_of(source, model, batch_size, seq_len)


def _batch_of(source: Source, model: nn.Module, batch_size: int, seq_len: int | None) -> Any:
    parameters = inspect.signature(unwrapped(model).forward).parameters
    if "input_ids" in parameters:
        if not seq_len:
            raise ValueError(f"plan: {source.name} reads tokens; expected seq_len, found {seq_len!r}")
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
        batch = {"input_ids": tokens}
        # an encoder-decoder reads as many tokens on both sides
        if "decoder_input_ids" in parameters:
            batch["decoder_input_ids"] = tokens
        return {**batch, "labels": tokens} if "labels" in parameters else batch
    if "pixel_values" in parameters and source.config is not None:
        side = source.config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        pixels = torch.zeros(batch_size, getattr(source.config, "num_channels", 3), height, width)
        labels = {"labels": torch.zeros(batch_size, dtype=torch.long)} if "labels" in parameters else {}
        return {"pixel_values": pixels, **labels}
    if "input_features" in parameters and "decoder_input_ids" in parameters and source.config is not None:
        if not seq_len:
            raise ValueError(f"plan: {source.name} writes tokens; expected seq_len, found {seq_len!r}")
        # of speech: two frames for each position of the encoder
        frames = 2 * source.config.max_source_positions
        sound = torch.zeros(batch_size, source.config.num_mel_bins, frames)
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
        return {"input_features": sound, "decoder_input_ids": tokens, "labels": tokens}
    raise ValueError(
        f"plan: does not know what to call {source.name} with. Give inputs=lambda batch_size, seq_len: ..., "
        "which returns a tensor, a tuple or a dict, of one rank's batch."
    )


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss if it has one, otherwise the mean of its output."""
    return loss_and_output(model, batch)[0]


def loss_and_output(
    model: nn.Module, batch: Any, loss: str = "full", held_output: str = "none"
) -> tuple[torch.Tensor, Any]:
    """The loss, and what the training loop keeps of the model's output; see `plan` and `_own_loss`."""
    if loss == "full" and held_output == "none":
        return _models_loss(model, batch), None
    kept: list[Any] = []
    with _own_loss(model, batch, loss, held_output, kept):
        return model(**batch), kept


def _models_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise ValueError(f"plan: {type(model).__name__} returns nothing that needs a gradient")
    return tensors[0].float().mean()


@contextmanager
def _own_loss(model: nn.Module, batch: Any, loss: str, held_output: str, kept: list[Any]) -> Iterator[None]:
    """Make the model return a loss that is computed here, as other code than transformers computes it.

    "full": as transformers, from logits in fp32. "shifted": as transformers 4.44, which copied the
    logits of all tokens but the last. "half": `F.cross_entropy` of the logits as they are, in the dtype of
    computation, which the log-probabilities and their gradients then have, too.
    "compiled": logits in the dtype of computation, as torch.compile leaves them or a kernel that takes the
    loss of them. "chunked": eight parts, each computed again in backward (torchtune's default number).
    "fused": in as many parts as the vocabulary is larger than the hidden size, and gradients are computed in
    forward, as liger_kernel/ops/fused_linear_cross_entropy.py does.

    Args:
        held_output: which part of the output goes to `kept`.
        kept: is filled in forward.

    Raises:
        ValueError: the model has no head over a vocabulary and no body before it.
    """
    whole: Any = unwrapped(model)
    if hasattr(whole, "get_base_model"):  # peft's, around a model whose modules hold the adapters
        whole = whole.get_base_model()
    body: Any = getattr(whole, "base_model", None)
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if not (isinstance(batch, dict) and "labels" in batch and isinstance(head, nn.Linear)) or body is whole:
        asked, default = f'loss="{loss}"', 'loss="full"'
        if loss == "full":
            asked, default = f'held_output="{held_output}"', 'held_output="none"'
        raise ValueError(
            f"plan: {asked} expects a model of transformers with a head over a vocabulary, such as "
            f"LlamaForCausalLM, found {type(whole).__name__}; expected {default}"
        )

    def forward(labels: torch.Tensor, **others: Any) -> torch.Tensor:
        if held_output.endswith("_and_cache"):
            kept.append(_kept_cache())
            others.update(past_key_values=kept[0], use_cache=True)
        hidden = body(**others)[0]
        if loss in LOSSES_OF_LOGITS:
            logits = F.linear(hidden, head.weight)
            if held_output.startswith("fp32_logits"):
                logits = logits.float()
            if held_output != "none":
                kept.append(logits)
            if loss != "half":
                logits = logits.float()
            if loss == "shifted":
                logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        hidden, targets = hidden.flatten(0, 1), labels.flatten()
        ratio = -(-head.out_features // head.in_features)
        parts = min(8 if loss == "chunked" else ratio, len(targets))
        if loss == "compiled":
            return _LossOfLogits.apply(F.linear(hidden, head.weight))
        if loss == "fused":
            return _FusedLoss.apply(hidden, head.weight, targets, parts)
        losses = [
            checkpoint(_summed_loss, h, head.weight, t, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.chunk(parts), targets.chunk(parts), strict=True)
        ]
        return torch.stack(losses).sum() / len(targets)

    with patch.object(whole, "forward", forward):
        yield


def _kept_cache() -> Any:
    """A cache for one forward pass, as transformers returns it where use_cache is on.

    A checkpoint that computes a block again finds the block's keys and values there, and adds none.
    """
    from transformers import DynamicCache

    class Cache(DynamicCache):
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]]

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.kept.setdefault(layer_idx, (key_states, value_states))
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

    cache = Cache()
    cache.kept = {}
    return cache


def _summed_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


class _LossOfLogits(torch.autograd.Function):
    """The loss in one kernel, which reads the logits and makes no copy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> Any:
        ctx.save_for_backward(logits)
        return logits.sum(dtype=torch.float32) / len(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0].to(ctx.saved_tensors[0].dtype)


class _FusedLoss(torch.autograd.Function):
    """The loss of a linear head, which keeps gradients instead of logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, parts: int
    ) -> Any:
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        length, total = -(-len(targets) // parts), torch.zeros((), device=hidden.device)
        for begin in range(0, len(targets), length):
            part = hidden[begin : begin + length]
            logits = part @ weight.t()
            total = total + logits[:, 0].float().sum()
            of_hidden[begin : begin + length] = logits @ weight
            of_weight += logits.t() @ part
        ctx.save_for_backward(of_hidden, of_weight)
        return total / len(targets)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(gradients[0]), of_weight.mul_(gradients[0]), None, None


@contextmanager
def running(source: Source, what: str) -> Iterator[None]:
    """Turn an error of the model's own code into a sentence; the first error stays its cause."""
    with _in_words(f"the {what} of {source.name}"):
        yield


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("plan: "):
            raise
        text = first_line(error).rstrip(".")
        raise ValueError(f"plan: {what} failed: {text}. Does it run with these sizes, on a CPU?") from error

"""Published training runs, and what the planner says of each. Reads notebooks/published.yaml.

`predict` turns a row into the call of `plan` that a reader of its source would make. Rows whose split is
"held_out" are for checking alone: tools/fit_planner.py never sees them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_utils import plan, transformer_block_classes
from fsdp_utils.planner import GPU, GPUS, Plan
from fsdp_utils.planner.efficiency import of_gpu

FILE = Path(__file__).parents[1] / "notebooks" / "published.yaml"
# torchtitan's team ran on an H100 with slower memory that may draw 500 W instead of 700
_H100_500W = replace(GPUS["H100"], name="H100-500W", usable_gib=95.04, memory_gb_s=2400)
_GPUS = {
    "A100-SXM-80GB": GPUS["A100-80"],
    "A100-SXM-40GB": GPUS["A100-40"],
    "H100-SXM-80GB": GPUS["H100"],
    "H100-SXM-96GB-HBM2e (500 W)": _H100_500W,
    "H200-SXM-141GB": GPUS["H200"],
}
_FSDP1 = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}
_LOSSES = {  # by a part of what the row says
    "under torch.compile": "compiled",
    "FlashAttention": "compiled",
    "of bf16 logits": "half",
    "on a shifted copy": "shifted",
    "CEWithChunkedOutputLoss": "chunked",
}
# FlashAttention-1 reaches that part of what FlashAttention-2 does: its paper says 1.7 to 3.0 times as fast
FLASH_1 = 0.6


@dataclass(frozen=True)
class Prediction:
    """A published run beside its plan."""

    row: dict[str, Any]  # as in the file
    plan: Plan
    speed: float | None  # predicted tokens/s and GPU divided by the published; None where none was published
    memory: float | None  # the same for the peak memory, allocated or (also where unknown) reserved

    @property
    def not_comparable(self) -> str:
        """Why the published peak memory is not what the planner predicts; empty where it is."""
        peak = self.row["published"]["peak_memory"] or {}
        return peak.get("not_comparable", "")

    @property
    def is_wrongly_said(self) -> bool:
        """A run that went is said not to fit, or one that ran out of memory is said to; "tight" is
        neither."""
        ran = self.row["published"]["outcome"] == "ran"
        return self.plan.verdict == ("does not fit" if ran else "fits")


def _rows(split: str | None) -> list[dict[str, Any]]:
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [
        {**row, "expandable_segments": data["sources"][row["source"]].get("expandable_segments", False)}
        for row in data["rows"]
        if split in (None, row["split"])
    ]


def rows(split: str | None = None) -> list[dict[str, Any]]:
    """The rows that count: of one split, "fit" or "held_out", or of both."""
    return [row for row in _rows(split) if not row.get("exclude_from_fit")]


def left_out(split: str) -> dict[str, int]:
    """How many rows of a split do not count, by reason."""
    return dict(Counter(row["exclude_from_fit"] for row in _rows(split) if row.get("exclude_from_fit")))


def predict_all(split: str | None = None) -> tuple[list[Prediction], list[str]]:
    """The predictions of `rows`, and which of these the planner cannot simulate, with its reason."""
    predictions, refused = [], []
    for row in rows(split):
        try:
            predictions.append(predict(row))
        except ValueError as error:  # noqa: PERF203 (a row more or less)
            refused.append(f"{row['id']}: {error}")
    return predictions, refused


def predict(row: dict[str, Any]) -> Prediction:
    """Plan a row.

    Raises:
        ValueError: a setting is none that the planner has; says which.
    """
    found = plan(_config(row), **_options(row))
    published, usable = row["published"], row["usable"]
    speed = memory = None
    if "speed" in usable and published["tokens_per_s_per_gpu"]:
        assert found.tokens_per_s is not None
        speed = found.tokens_per_s / row["world_size"] / published["tokens_per_s_per_gpu"]
    if "memory" in usable and published["peak_memory"]:
        peak = published["peak_memory"]
        allocated = peak["kind"] == "allocated"
        memory = (found.peak_allocated_gib if allocated else found.peak_reserved_gib) / peak["gib"]
    return Prediction(row, found, speed, memory)


def _config(row: dict[str, Any]) -> Any:
    model = row["model"]
    options = {
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": bool(model["tied_embeddings"]),
        "dtype": row["param_storage_dtype"],
    }
    sizes = [model[name] for name in ("hidden_size", "intermediate_size", "layers", "heads")]
    if model["mlp"].startswith("swiglu"):
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        options |= {"num_key_value_heads": model["kv_heads"], **dict(zip(names, sizes, strict=True))}
        return transformers.LlamaConfig(**options)
    if model["mlp"].startswith("gelu"):  # MPT: with learned positions, it is a GPT-2 of other sizes
        names = ("n_embd", "n_inner", "n_layer", "n_head")
        return transformers.GPT2Config(
            **dict(zip(names, sizes, strict=True)),
            n_positions=row["sequence_length"],
            activation_function="gelu",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
            **options,
        )
    raise _unknown("MLP", model["mlp"])


def _options(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("float8", "activation_cpu_offload"):
        if row[name]:
            raise _unknown("setting", name)
    if row["tensor_parallel"] > 1:
        raise _unknown("setting", "tensor parallelism")
    gpu, policy = _gpu(row), _policy(row)
    loss = next((loss for part, loss in _LOSSES.items() if part in row["loss"]), "full")
    options: dict[str, Any] = {
        "world_size": row["world_size"],
        "batch_size": row["batch_per_gpu"] * row["accumulation"] * row["world_size"],
        "seq_len": row["sequence_length"],
        "strategy": row["sharding"],
        "gpu": gpu,
        "mp_policy": policy,
        "checkpointing": _checkpointing(row["activation_checkpointing"]),
        "offload": row["cpu_offload"],
        "micro_batches": row["accumulation"],
        "no_sync": row["accumulation"] > 1 and row.get("accumulation_sync") == "last micro batch only",
        "compiled": row["compile"],
        "ranks_per_host": row["ranks_per_host"],
        "expandable_segments": row["expandable_segments"],
    }
    if row["framework"] == "fsdp1":
        options["shard"] = _with_fsdp1(row["sharding"], policy)
    if (loss, row.get("held_output", "none")) != ("full", "none"):
        options["loss"] = OwnLoss(loss, row.get("held_output", "none"))
    if row["attention"].startswith("triton"):
        reached = of_gpu(gpu.name)
        options["efficiency"] = replace(reached, attention=FLASH_1 * reached.attention)
    return options


def _policy(row: dict[str, Any]) -> MixedPrecisionPolicy | None:
    reduced = getattr(torch, row["reduce_dtype"])
    if row["param_storage_dtype"] == row["reduce_dtype"] == "bfloat16":
        return None
    return MixedPrecisionPolicy(torch.bfloat16, None if reduced == torch.bfloat16 else reduced)


def _with_fsdp1(
    strategy: str, policy: MixedPrecisionPolicy | None
) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=_FSDP1[strategy],
            mixed_precision=policy and MixedPrecision(policy.param_dtype, policy.reduce_dtype),
        )

    return shard


def _gpu(row: dict[str, Any]) -> GPU:
    """The GPU, with the network between hosts where its speed is published."""
    if row["gpu"] not in _GPUS:
        raise _unknown("GPU", row["gpu"])
    gpu, links = _GPUS[row["gpu"]], row["links"]
    if "p5.48xlarge" in links:
        return replace(gpu, network_gb_s=400)
    speed = re.search(r"(\d+) Gb/s", links)
    if speed is None or "not stated" in links:
        return gpu
    return replace(gpu, network_gb_s=int(speed[1]) / 8 * (8 if "per GPU" in links else 1))


def _checkpointing(text: str) -> str | int | None:
    share = re.search(r"\(p = ([\d.]+)\)", text)
    if share:  # of the blocks
        for every in (1, 2, 3, 4):
            if abs(float(share[1]) - 1 / every) <= 0.05:
                return every
        raise _unknown("share of checkpointed blocks", share[1])
    if "every 2nd block" in text:
        return 2
    return "selective" if "per-op" in text else {"none": None, "full": "full"}[text]


def _unknown(what: str, found: str) -> ValueError:
    return ValueError(f"published: the planner does not simulate this {what}: {found}")


# ---- the losses of other programs ------------------------------------------------------------------------


@dataclass
class OwnLoss:
    """The loss as other code than transformers computes it, for `plan(loss=...)`.

    Kinds: "full": from logits in fp32. "shifted": transformers 4.44, which copied the logits of all tokens
    but the last. "half": of the logits in the dtype of computation. "compiled": in one kernel. "chunked":
    eight parts, each computed again in backward (torchtune). `held` is what the training loop still holds of
    the output during backward, as after `output = model(**batch)` without `del output`: "none", "logits",
    "fp32_logits" or "fp32_logits_and_cache" (also each block's keys and values).
    """

    kind: str
    held: str
    output: list[Any] = field(default_factory=list)

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        whole: Any = model.module if isinstance(model, FullyShardedDataParallel) else model
        head, kept = whole.get_output_embeddings(), []

        def forward(labels: torch.Tensor, **others: Any) -> torch.Tensor:
            with _cached(whole, ("k_proj", "v_proj") if self.held.endswith("_and_cache") else ()) as cache:
                kept.append(cache)
                hidden = whole.base_model(**others)[0]
            if self.kind == "chunked":
                return _chunked(hidden.flatten(0, 1), head.weight, labels.flatten())
            if self.kind == "compiled":
                return _LossOfLogits.apply(F.linear(hidden.flatten(0, 1), head.weight))
            logits = F.linear(hidden, head.weight)
            if self.held.startswith("fp32_logits"):
                logits = logits.float()
            if self.held != "none":
                kept.append(logits)
            if self.kind != "half":
                logits = logits.float()
            if self.kind == "shifted":
                logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        with patch.object(whole, "forward", forward):
            loss = model(**batch)
        self.output = kept
        return loss


def _chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    def summed(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    losses = [
        checkpoint(summed, h, t, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.chunk(8), targets.chunk(8), strict=True)
    ]
    return torch.stack(losses).sum() / len(targets)


class _LossOfLogits(torch.autograd.Function):
    """The loss in one kernel, which reads the logits and makes no copy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> Any:
        ctx.save_for_backward(logits)
        return logits.sum(dtype=torch.float32) / len(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0].to(ctx.saved_tensors[0].dtype)


@contextmanager
def _cached(model: nn.Module, layers: tuple[str, ...]) -> Iterator[dict[nn.Module, torch.Tensor]]:
    """Hold keys and values, as transformers' cache does; a checkpoint around each block leaves them there."""
    kept: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        kept[module] = output

    hooks = [one.register_forward_hook(keep) for name, one in model.named_modules() if name.endswith(layers)]
    yield kept
    for hook in hooks:
        hook.remove()

"""Published training runs, and what the planner says of each. Reads notebooks/published.yaml.

`predict` turns a row into the call of `plan` that a reader of its source would make. Rows whose split is
"held_out" are for checking alone: tools/fit_planner.py never sees them.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_utils._extras import need
from fsdp_utils.lessons.lesson import NOTEBOOKS
from fsdp_utils.planner import GPU, GPUS, Plan, plan

# torchtitan's team ran on an H100 with slower memory that may draw 500 W instead of 700
_H100_500W = replace(GPUS["H100"], name="H100-500W", usable_gib=95.04, memory_gb_s=2400)
_GPUS = {
    "A100-SXM-80GB": GPUS["A100-80"],
    "A100-SXM-40GB": GPUS["A100-40"],
    "H100-SXM-80GB": GPUS["H100"],
    "H100-SXM-96GB-HBM2e (500 W)": _H100_500W,
    "H200-SXM-141GB": GPUS["H200"],
}
_PRECISIONS = {  # by the dtype of the parameters at rest and of the reduction
    ("float32", "bfloat16"): "bf16",
    ("float32", "float32"): "bf16_reduce_fp32",
    ("bfloat16", "bfloat16"): "pure_bf16",
    ("bfloat16", "float32"): "pure_bf16_reduce_fp32",
}
_LOSSES = {  # by a part of what the row says
    "under torch.compile": "compiled",
    "FlashAttention": "compiled",
    "of bf16 logits": "half",
    "on a shifted copy": "shifted",
    "CEWithChunkedOutputLoss": "chunked",
}


@dataclass(frozen=True)
class Prediction:
    """A published run beside its plan.

    Args:
        row: as in the file.
        plan: what is predicted.
        speed: predicted tokens/s and GPU divided by the published; None where none was published.
        memory: the same for the peak memory, of the published kind: allocated or reserved; reserved where the
            source does not say which.
    """

    row: dict[str, Any]
    plan: Plan
    speed: float | None
    memory: float | None

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


def rows(split: str | None = None, *, file: Path = NOTEBOOKS / "published.yaml") -> list[dict[str, Any]]:
    """The rows that count: of one split, "fit" or "held_out", or of both."""
    data = need("yaml", "notebooks").safe_load(file.read_text(encoding="utf-8"))
    return [
        {**row, "expandable_segments": data["sources"][row["source"]].get("expandable_segments", False)}
        for row in data["rows"]
        if split in (None, row["split"]) and not row.get("exclude_from_fit")
    ]


def predict_all(split: str | None = None) -> tuple[list[Prediction], list[str]]:
    """The predictions of `rows`, and which of these the planner cannot simulate, with its reason."""
    predictions, refused = [], []

    def one(row: dict[str, Any]) -> None:
        try:
            predictions.append(predict(row))
        except ValueError as error:
            refused.append(f"{row['id']}: {error}")

    for row in rows(split):
        one(row)
    return predictions, refused


def predict(row: dict[str, Any]) -> Prediction:
    """Plan a row.

    Raises:
        ValueError: a setting is none that the planner has; says which.
    """
    found = plan(_config(row["model"], row["sequence_length"]), **_options(row))
    published, usable = row["published"], row["usable"]
    speed = memory = None
    if "speed" in usable and published["tokens_per_s_per_gpu"]:
        assert found.tokens_per_s is not None
        speed = found.tokens_per_s / found.gpus / published["tokens_per_s_per_gpu"]
    if "memory" in usable and published["peak_memory"]:
        peak = published["peak_memory"]
        allocated = peak["kind"] == "allocated"
        memory = (found.peak_allocated_gib if allocated else found.peak_reserved_gib) / peak["gib"]
    return Prediction(row, found, speed, memory)


def _config(model: dict[str, Any], length: int) -> Any:
    import transformers

    sizes = {"vocab_size": model["vocab_size"], "tie_word_embeddings": bool(model["tied_embeddings"])}
    if model["mlp"].startswith("swiglu"):
        return transformers.LlamaConfig(
            hidden_size=model["hidden_size"],
            intermediate_size=model["intermediate_size"],
            num_hidden_layers=model["layers"],
            num_attention_heads=model["heads"],
            num_key_value_heads=model["kv_heads"],
            **sizes,
        )
    if model["mlp"].startswith("gelu"):  # MPT: with learned positions, it is a GPT-2 of other sizes
        return transformers.GPT2Config(
            n_embd=model["hidden_size"],
            n_inner=model["intermediate_size"],
            n_layer=model["layers"],
            n_head=model["heads"],
            n_positions=length,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            **sizes,
        )
    raise _unknown("MLP", model["mlp"])


def _options(row: dict[str, Any]) -> dict[str, Any]:
    dtypes = (row["param_storage_dtype"], row["reduce_dtype"])
    if dtypes not in _PRECISIONS:
        raise _unknown("precision", ", ".join(dtypes))
    if row["float8"]:
        raise _unknown("precision", "float8")
    shared = row["tensor_parallel"]
    return {
        "world_size": row["world_size"],
        "batch_size": row["batch_per_gpu"] * row["accumulation"] * row["world_size"] // shared,
        "seq_len": row["sequence_length"],
        "strategy": row["sharding"],
        "gpu": _gpu(row),
        "api": row["framework"],
        "precision": _PRECISIONS[dtypes],
        "checkpointing": _checkpointing(row["activation_checkpointing"]),
        "optimizer": "adamw",
        "offload": row["cpu_offload"],
        "micro_batches": row["accumulation"],
        "no_sync": row["accumulation"] > 1 and row.get("accumulation_sync") == "last micro batch only",
        "attention": {"sdpa": "sdpa", "eager": "eager", "triton": "flash1"}.get(
            row["attention"].split()[0], "flash"
        ),
        "loss": next((loss for part, loss in _LOSSES.items() if part in row["loss"]), "full"),
        "held_output": row.get("held_output", "none"),
        "compiled": row["compile"],
        "activation_offload": row["activation_cpu_offload"],
        "tensor_parallel": shared,
        "ranks_per_host": row["ranks_per_host"],
        "expandable_segments": row["expandable_segments"],
    }


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


def _checkpointing(text: str) -> str:
    share = re.search(r"\(p = ([\d.]+)\)", text)
    if share:  # of the blocks
        for name, part in {"full": 1.0, "every_2": 0.5, "every_3": 0.33, "every_4": 0.25}.items():
            if abs(float(share[1]) - part) <= 0.05:
                return name
        raise _unknown("share of checkpointed blocks", share[1])
    if "every 2nd block" in text:
        return "every_2"
    return "selective" if "per-op" in text else text


def _unknown(what: str, found: str) -> ValueError:
    return ValueError(f"published: the planner does not simulate this {what}: {found}")

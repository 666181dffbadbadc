"""Compare training programs: small models, and a Trainer that shards on CPU ranks."""

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from fsdp_utils.lessons import tasks


def small(name: str) -> PreTrainedModel:
    """Build a small Llama, BERT or T5 without dropout, with the same random weights on every rank."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))
    if name == "BERT":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 64}
        return BertForTokenClassification(BertConfig(vocab_size=64, num_attention_heads=4, **sizes))
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 3, "num_heads": 4}
    sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))


def save_base(folder: str, *, steps: int = 60) -> None:
    """Begin to train a Llama of three blocks to write dates in digits; save it as on the hub.

    Longer, or with a larger learning rate, the last bits of another CPU's kernels grow into other losses.
    """
    base: Any
    base, dates = tasks.dates_llama().build(), tasks.dates_llama()
    del base.model.layers[3:]
    base.config.num_hidden_layers = 3
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-3)
    for step in range(steps):
        base(**dates.batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    base.save_pretrained(folder)


class TrainerOnCpus(Trainer):
    """A Trainer that shards on CPU ranks, as Accelerate makes it do on accelerators alone."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, then switch FSDP2 on if the ranks are CPU processes."""
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if self.args.fsdp and state.distributed_type == DistributedType.MULTI_CPU:
            given: Any = self.args.fsdp_plugin_args
            plugin = FullyShardedDataParallelPlugin(**given)
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.fsdp_plugin, self.is_fsdp_enabled = plugin, True
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def run_trainer(
    model: PreTrainedModel,
    rows: Sequence[dict[str, torch.Tensor]],
    *,
    kind: type[Trainer] = TrainerOnCpus,
    policy: MixedPrecisionPolicy | None = None,
    resume: str | None = None,
    **arguments: Any,
) -> list[tuple[float, float]]:
    """Train on the rows in their order, by a Trainer of this kind.

    Args:
        policy: replaces the one that Accelerate makes of `bf16=True`.
        resume: the folder of the checkpoint to continue from.
        arguments: of TrainingArguments; `fsdp` is True if it isn't among them.

    Returns:
        Loss and norm of the gradient before clipping, of each step.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # what the last Trainer has left in this process
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)
    given: Any = {"fsdp": True, "use_cpu": not torch.cuda.is_available(), "save_strategy": "no"}
    given |= {"ddp_find_unused_parameters": False}  # without FSDP: True would search, and warn
    given |= {"train_sampling_strategy": "sequential", "logging_steps": 1, "disable_tqdm": True, **arguments}
    trainer: Any = kind(model, TrainingArguments(**given), train_dataset=cast("Any", rows))
    trainer.remove_callback(PrinterCallback)  # it prints what log_history holds
    if policy is not None:
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    trainer.train(resume_from_checkpoint=resume)
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]

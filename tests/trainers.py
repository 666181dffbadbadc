"""What the tests of integrations share: a tiny language model, and transformers' Trainer on CPU ranks."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

KINDS = ("ddp", "fsdp2")


def llama(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 16, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


class TrainerOnCpus(transformers.Trainer):
    """FSDP2 on CPU ranks. Accelerate drops fsdp=True there, without a message: it then trains with DDP."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True
        # in both: with the first alone, gradients would be reduced after each micro-batch
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def forget() -> None:
    """Accelerate keeps one state per process: a second Trainer in it begins without."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


def trainer_of(kind: str, folder: Path, model: nn.Module | None = None, **more: Any) -> transformers.Trainer:
    """A Trainer that does not save, with two micro-batches in a step."""
    forget()
    for_trainer = {name: more.pop(name) for name in ("callbacks", "optimizer_cls_and_kwargs") if name in more}
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 0.01,
        **({"fsdp": True} if kind == "fsdp2" else {"ddp_find_unused_parameters": False}),
    }
    args = transformers.TrainingArguments(**(settings | more))
    trainer_class = TrainerOnCpus if kind == "fsdp2" else transformers.Trainer
    trainer = trainer_class(
        model=llama() if model is None else model, args=args, train_dataset=rows(), **for_trainer
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def sharded(model: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in model.parameters())

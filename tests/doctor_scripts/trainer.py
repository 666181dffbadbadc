"""transformers' Trainer with FSDP2 on CPU ranks, where it would take DDP by itself."""

from pathlib import Path
from typing import Any

import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from common import VOCABULARY, counting, start
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments


class TrainerOnCpus(transformers.Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        settings: dict[str, Any] = self.args.fsdp_plugin_args or {}
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
        # in both: with the first alone, gradients would be reduced after each micro-batch
        state, kind = self.accelerator.state, DistributedType.FSDP
        state.distributed_type = PartialState().distributed_type = kind
        self.is_fsdp_enabled = True


start()
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY))
blocks = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}
# fault one_unit: wrapping = {"auto_wrap_policy": "NO_WRAP"}
wrapping = blocks
arguments = TrainingArguments(
    output_dir=str(Path(__file__).parent),
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=6,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    fsdp="full_shard",
    fsdp_config=wrapping,
)
samples = [{"input_ids": row, "labels": row} for row in counting(64)]
TrainerOnCpus(model=model, args=arguments, train_dataset=samples).train()

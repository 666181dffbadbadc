"""Trainer with NO_WRAP: all decoder layers are one unit; Accelerate splits off embedding and head only.

See fairscale#1050.
"""

import tempfile

from common import counting, run, start
from common_accelerate import TrainerOnCpus
from common_transformers import small_llama
from transformers import TrainingArguments


def main(faulty: bool) -> None:
    start()
    model = small_llama(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    wrapping = (
        {"auto_wrap_policy": "NO_WRAP"}
        if faulty
        else {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
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
        TrainerOnCpus(model=model, args=args, train_dataset=samples).train()


run(main)

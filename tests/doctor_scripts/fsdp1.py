"""FSDP1 with tied weights, checkpointed blocks, and checkpoints on rank 0."""

from pathlib import Path

import torch
from common import CPU, Block, Decoder, counting, next_token_loss, say, start
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

rank, _ = start(seconds=8)
decoder = Decoder()
decoder.head.weight = decoder.embedding.weight
# fault tied_units: units = {Block, nn.Embedding}
# fault one_unit: units = {nn.TransformerEncoderLayer}
units: set[type[nn.Module]] = {Block}
# fault bf16_reduce: precision = MixedPrecision(param_dtype=torch.bfloat16)
precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
options = {"auto_wrap_policy": ModuleWrapPolicy(units), "device_id": CPU}
# fault tied_units: model = FSDP(decoder, **options)
model = FSDP(decoder, mixed_precision=precision, use_orig_params=True, **options)
# fault checkpoint_order: checkpointed = lambda module: isinstance(module, FSDP) and module is not model
checkpointed = lambda module: isinstance(module, Block)  # noqa: E731
apply_activation_checkpointing(model, check_fn=checkpointed)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, tokens in enumerate(counting(32, seed=rank).split(4)):
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    # fault local_clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        # fault rank0_state_dict: state = model.state_dict() if rank == 0 else None
        state = model.state_dict()
    if rank == 0:
        torch.save(state, Path(__file__).with_name("model.pt"))
    say(step, loss)

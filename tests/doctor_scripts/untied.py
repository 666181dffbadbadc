"""to_empty unties head and embedding, and nothing ties them again (verl#7834)."""

import torch
from common import run, sharded, start, train
from common_transformers import small_llama
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


def main(faulty: bool) -> None:
    start()
    state = small_llama(tied=True).state_dict()
    with torch.device("meta"):
        model = small_llama(tied=True)
    model.to_empty(device="cpu")
    if not faulty:
        model.tie_weights()
    sharded(model, model.model.layers)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is in no state dict
    train(model, loss_of=lambda tokens: model(input_ids=tokens, labels=tokens).loss)


run(main)

"""to_empty unties head and embedding, and nothing ties them again (verl#7834)."""

import torch
from common import counting, cpu_mesh, run, say, start
from common_transformers import small_llama
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh, options = cpu_mesh(), StateDictOptions(full_state_dict=True)
    state = small_llama(tied=True).state_dict()
    with torch.device("meta"):
        model = small_llama(tied=True)
    model.to_empty(device="cpu")
    if not faulty:
        model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, state, options=options)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is in no state dict
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)

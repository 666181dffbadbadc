"""The data set shifts the labels by one, and the model shifts them again (transformers#44642)."""

import torch
from common import IGNORED, counting, cpu_mesh, run, say, start
from common_transformers import small_llama
from torch.distributed.fsdp import fully_shard


def main(faulty: bool) -> None:
    rank, _ = start()
    mesh = cpu_mesh()
    model = small_llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, tokens in enumerate(counting(32, seed=rank).split(4)):
        inputs = tokens[:, :-1]
        labels = (tokens[:, 1:] if faulty else inputs).clone()
        labels[:, :2] = IGNORED  # a prompt
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)


if __name__ == "__main__":
    run(main)

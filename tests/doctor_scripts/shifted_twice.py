"""The data set shifts the labels by one, and the model shifts them again (transformers#44642)."""

from common import IGNORED, run, sharded, start, train
from common_transformers import small_llama
from torch import Tensor


def main(faulty: bool) -> None:
    start()
    model = small_llama()
    sharded(model, model.model.layers)

    def loss_of(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        labels = (tokens[:, 1:] if faulty else inputs).clone()
        labels[:, :2] = IGNORED  # a prompt
        return model(input_ids=inputs, labels=labels).loss

    train(model, loss_of=loss_of)


run(main)

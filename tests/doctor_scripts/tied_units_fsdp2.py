"""Embedding and head share one weight but are two units (lingua#84, Automodel#2213)."""

from common import Decoder, run, sharded, start, train


def main(faulty: bool) -> None:
    start()
    model = Decoder()
    model.head.weight = model.embedding.weight
    apart: list = [model.embedding, model.head]
    together: list = [[model.embedding, model.norm, model.head]]
    train(sharded(model, [*model.blocks, *(apart if faulty else together)]), limit=1.0)


run(main)

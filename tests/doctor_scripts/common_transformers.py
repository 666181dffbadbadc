"""A small Llama of transformers."""

from common import VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(*, tied: bool = False, **sizes: int) -> LlamaForCausalLM:
    """Build two layers; tied: the head has the embedding's weight."""
    given = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{**given, **sizes}, vocab_size=VOCABULARY, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)

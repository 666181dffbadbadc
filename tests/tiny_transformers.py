"""Tiny models of many families of transformers, made from their configurations alone: no hub, no download."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.sharded import Tiny

VOCABULARY = 32
LENGTH = 8


def tokens() -> torch.Tensor:
    return torch.arange(3, 3 + 2 * LENGTH).reshape(2, LENGTH) % VOCABULARY


def text() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens()}


def image() -> dict[str, Any]:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def labelled() -> dict[str, Any]:
    return {**image(), "labels": torch.tensor([0, 1])}


def sound() -> dict[str, Any]:
    return {"input_values": torch.linspace(-1, 1, 800).reshape(2, 400), "labels": tokens()[:, :4]}


def spectrogram() -> dict[str, Any]:
    return {"input_features": torch.linspace(-1, 1, 2 * 4 * 40).reshape(2, 4, 40), "labels": tokens()}


def family(
    name: str, head: str, batch: Callable[[], dict[str, Any]], blocks: set[str], number: int, **sizes: Any
) -> Tiny:
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}{head}")
    blocks = {name.removesuffix("Vision") + block for block in blocks}
    return Tiny(lambda: model(config(**sizes)), batch, blocks, number)


HIDDEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1, **WORDS},
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 32),
}
LENGTH_64 = {"max_position_embeddings": 64}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
VISION = {"image_size": 16, "patch_size": 4}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
CLIP = "ModelWithProjection"
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
FRAMES = {"num_mel_bins": 4, "max_source_positions": 20, "max_target_positions": 20}


def decoder(name: str, **more: Any) -> Tiny:
    sizes = {**HIDDEN, **WORDS, "num_key_value_heads": 2, "head_dim": 8, **more}
    return family(name, "ForCausalLM", text, {"DecoderLayer"}, 3, **sizes)


def seq2seq(name: str, batch: Callable[[], dict[str, Any]], **more: Any) -> Tiny:
    blocks = {"EncoderLayer", "DecoderLayer"}
    return family(name, "ForConditionalGeneration", batch, blocks, 4, **BART, **more)


TINY: dict[str, Tiny] = {
    # decoders
    "llama": decoder("Llama"),
    "qwen3, tied": decoder("Qwen3", tie_word_embeddings=True),
    "gemma2": decoder("Gemma2"),
    "gpt2": family("GPT2", "LMHeadModel", text, {"Block"}, 3, **GPT2, **WORDS),
    # mixtures of experts: the block, not the expert
    "mixtral": decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    # encoders
    "bert": family("Bert", "ForMaskedLM", text, {"Layer"}, 3, **HIDDEN, **WORDS, **LENGTH_64),
    # encoder-decoders
    "t5": family("T5", "ForConditionalGeneration", text, {"Block"}, 4, **T5, **WORDS),
    "bart": seq2seq("Bart", text, **LENGTH_64),
    # vision
    "vit": family("ViT", "ForImageClassification", labelled, {"Layer"}, 3, **VISION, **HIDDEN),
    "swin": family("Swin", "ForImageClassification", labelled, {"Stage"}, 2, **VISION, **SWIN),
    "clip": family("CLIPVision", CLIP, image, {"EncoderLayer"}, 3, **VISION, **HIDDEN, projection_dim=8),
    # audio
    "wav2vec2": family(
        "Wav2Vec2", "ForCTC", sound, {"EncoderLayer"}, 3, **HIDDEN, **WORDS, **CONVOLUTIONS, **POSITIONS
    ),
    "whisper": seq2seq("Whisper", spectrogram, **FRAMES),
}

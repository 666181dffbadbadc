"""Tiny models of many families of transformers, made from their configurations alone: no hub, no download."""

from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.sharded import Tiny

VOCABULARY = 32
LENGTH = 8
HIDDEN = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens() -> torch.Tensor:
    return torch.arange(3, 3 + 2 * LENGTH).reshape(2, LENGTH) % VOCABULARY


def text() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens()}


def image() -> dict[str, Any]:
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def decoder(name: str, **more: Any) -> Tiny:
    def make() -> nn.Module:
        config = getattr(tf, f"{name}Config")(
            **HIDDEN,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **more,
        )
        return getattr(tf, f"{name}ForCausalLM")(config)

    return Tiny(make, text, {f"{name}DecoderLayer"}, 3)


def encoder(name: str, **more: Any) -> Tiny:
    def make() -> nn.Module:
        config = getattr(tf, f"{name}Config")(
            **HIDDEN,
            **NO_DROPOUT,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            pad_token_id=0,
            **more,
        )
        return getattr(tf, f"{name}ForMaskedLM")(config)

    return Tiny(make, text, {f"{name}Layer"}, 3)


BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}
TINY: dict[str, Tiny] = {
    # decoders
    "llama": decoder("Llama"),
    "qwen3, tied": decoder("Qwen3", tie_word_embeddings=True),
    "gemma2": decoder("Gemma2"),
    "gpt2": Tiny(
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=64,
                n_embd=16,
                n_layer=3,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        text,
        {"GPT2Block"},
        3,
    ),
    # mixtures of experts: the block, not the expert
    "mixtral": decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    # encoders
    "bert": encoder("Bert"),
    # encoder-decoders
    "t5": Tiny(
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
            )
        ),
        text,
        {"T5Block"},
        4,
    ),
    "bart": Tiny(
        lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART, max_position_embeddings=64)),
        text,
        {"BartEncoderLayer", "BartDecoderLayer"},
        4,
    ),
    # vision
    "vit": Tiny(
        lambda: tf.ViTForImageClassification(tf.ViTConfig(**VISION, **HIDDEN, **NO_DROPOUT)),
        image,
        {"ViTLayer"},
        3,
    ),
    "swin": Tiny(
        lambda: tf.SwinForImageClassification(
            tf.SwinConfig(
                **VISION,
                embed_dim=8,
                depths=[1, 1],
                num_heads=[1, 2],
                window_size=2,
                drop_path_rate=0.0,
            )
        ),
        image,
        {"SwinStage"},
        2,
    ),
    "clip": Tiny(
        lambda: tf.CLIPVisionModelWithProjection(
            tf.CLIPVisionConfig(**HIDDEN, image_size=16, patch_size=4, projection_dim=8)
        ),
        lambda: {"pixel_values": image()["pixel_values"]},
        {"CLIPEncoderLayer"},
        3,
    ),
    # audio
    "wav2vec2": Tiny(
        lambda: tf.Wav2Vec2ForCTC(
            tf.Wav2Vec2Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                conv_dim=(8, 8),
                conv_stride=(5, 4),
                conv_kernel=(10, 4),
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                feat_proj_dropout=0.0,
                final_dropout=0.0,
                layerdrop=0.0,
                apply_spec_augment=False,
                pad_token_id=0,
            )
        ),
        lambda: {"input_values": torch.linspace(-1, 1, 800).reshape(2, 400), "labels": tokens()[:, :4]},
        {"Wav2Vec2EncoderLayer"},
        3,
    ),
    "whisper": Tiny(
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(**BART, num_mel_bins=4, max_source_positions=20, max_target_positions=20)
        ),
        lambda: {"input_features": torch.linspace(-1, 1, 2 * 4 * 40).reshape(2, 4, 40), "labels": tokens()},
        {"WhisperEncoderLayer", "WhisperDecoderLayer"},
        4,
    ),
}

"""Hostile configurations are refused in a sentence; a token's operations and a GPU's rate are right."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from fsdp_utils.train.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from fsdp_utils.train.data import Data, TensorRows
from fsdp_utils.train.model import build_model, flops_per_token, peak_flops, throughput

DATA = Data(TensorRows({}), TensorRows({}), True)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path(__file__).with_name("ran").write_text("")
Path("{mark}").write_text("ran")
class Mine(PretrainedConfig):
    model_type = "mine"
"""


def folder_of(path: Path, content: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "transformers makes no model of it"),
        (" " * 2_000_000 + "{}", "expected a file of at most 1,000,000 bytes, found 2,000,002"),
        ({"architectures": ["logging"]}, "expected .architectures. to name a model .*'logging'"),
        ({"architectures": ["AutoModel"]}, "expected .architectures. to name a model .*'AutoModel'"),
        ({"architectures": "LlamaForCausalLM"}, "expected .architectures. .*found 'L'"),
        ({"architectures": [["x"]]}, "expected .architectures."),
        ({"architectures": None}, "expected .architectures. .*found None"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers to be at most 1,000, found 100,000"),
        ({"text_config": {"n_layers": 10**9}}, "n_layers to be at most 1,000, found 1,000,000,000"),
        ({"num_key_value_heads": 3}, "to divide num_attention_heads .4., found 3"),
        ({"num_key_value_heads": 0}, "to divide num_attention_heads .4., found 0"),
        ({"hidden_size": "wide"}, "no model of it"),
        ({"vocab_size": -5}, "no model of it"),
        ({"vocab_size": 10**12}, "expected weights that fit into this host's .* GiB, found"),
        ({"intermediate_size": 10**30}, "no model of it|expected weights that fit"),
        ({"model_type": "nothing"}, "no model of it: ValueError"),
        ({"model_type": ["llama"]}, "no model of it"),
        (
            {"attn_implementation": "evil/kernel"},
            "attn_implementation .* found 'evil/kernel', to be",
        ),
        ({"attn_implementation": "nothing"}, "no model of it"),
    ],
)
def test_a_hostile_configuration_is_refused_in_one_sentence(tmp_path: Path, changes: Any, told: str) -> None:
    content = {**LLAMA, **changes} if isinstance(changes, dict) else changes
    begun = time.perf_counter()
    for name in ("config", "pretrained"):
        with pytest.raises(ConfigError) as caught:
            build_model(ModelConfig(**{name: str(folder_of(tmp_path / "m", content))}), DATA, 0)
        text = str(caught.value)
        assert text.startswith(f"model.{name} ")
        assert re.search(told, text)
        assert "\n" not in text
    assert time.perf_counter() - begun < 20


def test_a_folder_s_code_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    folder = folder_of(tmp_path / "m", {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}})
    (folder / "code.py").write_text(CODE.format(mark=mark))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for name in ("config", "pretrained"):
        with pytest.raises(ConfigError, match=r"custom code.*None is run here"):
            build_model(ModelConfig(**{name: str(folder)}), DATA, 0)
    assert not mark.exists()


def test_a_good_configuration_is_built_alike_by_everybody(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", LLAMA)
    one, two = (build_model(ModelConfig(config=str(folder)), DATA, 3) for _ in range(2))
    other = build_model(ModelConfig(config=str(folder / "config.json")), DATA, 4)
    weights = [model.get_input_embeddings().weight for model in (one, two, other)]  # type: ignore[operator]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    empty = build_model(ModelConfig(pretrained=str(folder)), DATA, 3)
    assert {p.device.type for p in empty.parameters()} == {"meta"}


# ---- operations and rates --------------------------------------------------------------------------


SMALL: dict[str, Any] = {"vocab_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"hidden_size": 32, "intermediate_size": 80, "attn_implementation": "eager"}
GPT2: dict[str, Any] = {"vocab_size": 96, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_inner": 80}
GPT2 |= {"n_positions": 64, "attn_implementation": "eager"}
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    ),
    "llama, few heads": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    ),
    "llama, wide heads": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, head_dim=16)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, num_key_value_heads=4)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [16, 64])
def test_a_token_s_operations_are_those_that_torch_counts(kind: str, length: int) -> None:
    model = KINDS[kind]()
    tokens = torch.arange(length)[None] % 96
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    found = flops_per_token(model, length)
    assert found is not None
    assert found == pytest.approx(counter.get_total_flops() / length, rel=0.01)


def test_a_model_without_layers_has_no_known_number_of_operations() -> None:
    assert flops_per_token(torch.nn.Linear(3, 3), 16) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_a_gpu_s_rate_is_that_of_its_variant(
    monkeypatch: pytest.MonkeyPatch, name: str, tflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), None) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(torch.device("cuda", 0), 7.0) == 7e12
    assert peak_flops(torch.device("cpu"), None) is None


def test_throughput_is_told_of_the_whole_batch() -> None:
    """A batch of 4 samples of 16 tokens in half a second, on one rank of 0.001 TFLOP/s."""
    rows = TensorRows({"input_ids": torch.zeros(8, 16, dtype=torch.int64)})
    model, device = KINDS["llama"](), torch.device("cpu")
    config = TrainConfig("x", DataConfig("x", batch_size=4), peak_tflops=0.001)
    told = throughput(config, model, Data(rows, rows, True), device)(0.5)
    flops = flops_per_token(model, 16) or 0
    assert told == pytest.approx({"samples_per_s": 8, "tokens_per_s": 128, "mfu": flops * 128 / 1e9})
    told = throughput(config, model, Data(rows, rows, False), device)(0.5)  # no decoder
    assert told == {"samples_per_s": 8, "tokens_per_s": 128, "mfu": None}
    images = TensorRows({"pixels": torch.zeros(8, 3)})
    told = throughput(config, model, Data(images, images, True), device)(0.5)
    assert told == {"samples_per_s": 8, "tokens_per_s": None, "mfu": None}

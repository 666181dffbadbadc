"""plan and its command: a sentence for input that makes no plan; a folder's code is never run."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaConfig

from fsdp_utils import plan
from fsdp_utils.planner.__main__ import main
from tests.blocks import Block
from tests.on_ranks import fake_group
from tests.planner_net import SIZES, Net, tokens

LLAMA = LlamaConfig(**SIZES, vocab_size=128)


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.generator = (number for number in range(3))


QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (LLAMA, {"gpu": "H1000"}, "expected gpu out of A10, A100-40"),
        (LLAMA, {"strategy": "zero9"}, 'expected strategy "full", "grad_op" or "hybrid", found'),
        (LLAMA, {"world_size": "8"}, "expected world_size to be a whole number from 1 on, found '8'"),
        (LLAMA, {"world_size": 12, "batch_size": 12}, "multiples of 8, the ranks_per_host, found 12"),
        (LLAMA, {"batch_size": 20}, "16 ranks in 1 micro-batches can share, such as 32, found 20"),
        (LLAMA, {"seq_len": None}, "reads tokens; expected seq_len, found None"),
        (LLAMA, {"seq_len": 2**61}, "a batch for LlamaForCausalLM failed: RuntimeError: Storage size"),
        (LLAMA, {"gpu": "T4"}, "a T4 does not compute in bf16"),
        (LlamaConfig(**SIZES, num_key_value_heads=3), {}, "the forward pass of LlamaForCausalLM failed"),
        (LlamaConfig(**SIZES, **QUANTIZED), {}, "does not simulate quantized weights"),
        (Net(), {}, "does not know what to call Net with"),
        (Net().requires_grad_(False), {"inputs": tokens}, "expected parameters that need a gradient"),
        (nn.Linear(2, 2), {}, "found no transformer blocks"),
        (Stubborn(), {}, "to copy Stubborn without its memory failed"),
        ("nowhere", {}, "a folder with a config.json, found none at nowhere"),
        (7, {}, "a transformers config or a folder with a config.json, found int"),
        (lambda: 1 / 0, {}, 'to build the model on "meta", without memory, failed: ZeroDivisionError'),
    ],
)
def test_bad_input_gets_one_sentence(model: Any, options: dict[str, Any], sentence: str) -> None:
    options = {"world_size": 16, "batch_size": 16, "seq_len": 32, **options}
    with pytest.raises(ValueError, match="plan: ") as error:
        plan(model, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("plan: ") == 1


def test_a_process_group_in_the_way_is_named() -> None:
    with fake_group(2), pytest.raises(RuntimeError, match="there is a process group already"):
        plan(Net(), world_size=2, batch_size=2, inputs=tokens)


# ---- what a folder brings with it ----------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class Evil(LlamaForCausalLM):
    config_class = EvilConfig
"""
ITS_CODE = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "evil"}, 2),  # transformers does not know it
        ({"model_type": "llama", "architectures": ["Evil"]}, 0),
        ({"model_type": "llama", "architectures": ["pipeline", "Trainer", "logging"]}, 0),  # no models
        ({"model_type": "llama", "attn_implementation": "somebody/kernel"}, 0),  # not loaded
    ],
)
def test_the_planner_runs_no_code_of_a_folder(
    config: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    (folder / "config.json").write_text(json.dumps({**SIZES, **config, "auto_map": ITS_CODE}))
    assert main([str(folder), "--world-size", "2", "--batch-size", "2", "--seq-len", "16"]) == code
    assert asked == []
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "modules").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ('{"model_type": "nobody\'s"}', "config.json failed: "),
        ("{", "config.json failed: "),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    config: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main([str(tmp_path), "--world-size", "2", "--batch-size", "2", "--seq-len", "16"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_the_command_plans(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    LLAMA.save_pretrained(tmp_path)
    options = ["--seq-len", "16", "--gpu", "t4", "--fp32", "--strategy", "grad_op", "--checkpointing", "full"]
    options += ["--micro-batches", "2", "--compiled"]
    assert main([str(tmp_path), "--world-size", "2", "--batch-size", "4", *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "on 2 T4: fits (simulated) grad_op, computes in float32, activation checkpointing full" in printed
    assert "batch 4 of 16 tokens, 2 micro_batches, compiled memory" in printed
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--world-size", "2"])

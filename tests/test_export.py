"""export_safetensors: read by transformers; LoRA adapters, trained under FSDP2, are read by peft."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_utils import CheckpointError, export_safetensors, run_on_ranks, save_distributed, shard
from tests.trainers import llama

pytestmark = [
    # a property of transformers 5.23 that peft 0.21 reads
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]

LORA: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 5},
        "bias": "none",
    },
    "embedding": {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]},
    "conv1d": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
}


def base_of(name: str) -> Any:
    if name != "conv1d":
        return llama()
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    )


def lora_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=7, **LORA[name])
    model = peft.get_peft_model(base_of(name), config)
    for param_name, param in model.named_parameters():
        if "lora_" in param_name:
            torch.nn.init.normal_(param)  # B is zero at first
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 9).reshape(1, 6)).logits


def trained(name: str, folder: Path) -> Tensor:
    """One step with FSDP2, saved."""
    model = shard(lora_of(name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    tokens = torch.arange(3, 9).reshape(1, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    save_distributed(folder, model, optimizer, step=1)
    return logits(model)


def save_all(folder: Path) -> dict[str, Tensor]:
    for name in ("plain", "conv1d"):
        save_distributed(folder / "base" / name, shard(base_of(name)), step=1)
    return {name: trained(name, folder / name) for name in LORA}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Two models, and one with each kind of adapters with what it computes."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_on_ranks(save_all, folder)[0]


def test_transformers_reads_what_is_exported(saved: tuple[Path, Any], tmp_path: Path) -> None:
    for name in ("plain", "conv1d"):  # the second has tied weights
        expected = base_of(name)
        out = export_safetensors(saved[0] / "base" / name, tmp_path / name)
        found = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert type(found) is type(expected)
        assert torch.equal(logits(found), logits(expected.eval()))


@pytest.mark.parametrize("name", LORA)
def test_an_adapter_trained_under_fsdp_is_read_by_peft(
    name: str, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    alone = export_safetensors(saved[0] / name, tmp_path / "alone", adapter_only=True)
    files = sorted(file.name for file in alone.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    with_peft = peft.PeftModel.from_pretrained(base_of(name), alone)
    torch.testing.assert_close(logits(with_peft), saved[1][name])
    with_peft.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = load_file(alone / "adapter_model.safetensors")
    assert {key: one.shape for key, one in theirs.items()} == {key: one.shape for key, one in ours.items()}


@pytest.mark.parametrize(
    ("options", "adapter_only", "said"),
    [
        ({}, False, r"expected a model without adapters, found default.*merge_and_unload\(\)"),
        ({"bias": "all"}, True, "found.*bias='all'.*merge_and_unload"),
        ({"init_lora_weights": "pissa"}, True, "found init_lora_weights='pissa'"),
        (None, True, "one LoRA adapter by peft, found no adapter"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    options: dict[str, Any] | None, adapter_only: bool, said: str, tmp_path: Path
) -> None:
    model = llama()
    if options is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, **options))
    save_distributed(tmp_path / "run", model, step=1)
    with pytest.raises(CheckpointError, match=said):
        export_safetensors(tmp_path / "run", tmp_path / "out", adapter_only=adapter_only)
    assert not (tmp_path / "out").exists()

"""export_safetensors: read by transformers; LoRA adapters, trained under FSDP2, are read by peft."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_utils import CheckpointError, export_safetensors, save_distributed, shard
from fsdp_utils.integrations.transformers import CheckpointCallback
from tests.sharded import TwoRanks
from tests.trainers import llama, trainer_of

pytestmark = [
    # a property of transformers 5.23 that peft 0.21 reads
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]

SMALL = 2000 / 2**30  # GiB of a file
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
}


def base_of(name: str) -> Any:
    if name != "conv1d":
        return llama()
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    )


def save_base(folder: Path) -> None:
    for name in ("plain", "conv1d"):
        save_distributed(folder / name, shard(base_of(name)), step=1)


def test_transformers_reads_what_is_exported(two_ranks: TwoRanks, tmp_path: Path) -> None:
    two_ranks(save_base, tmp_path)
    for name, limit in (("plain", SMALL), ("conv1d", 4.0), ("conv1d", SMALL)):  # the second has tied weights
        expected = base_of(name)
        out = export_safetensors(tmp_path / name, tmp_path / f"{name} {limit}", shard_gib=limit)
        assert (len(list(out.glob("*.safetensors"))) > 1) == (limit < 1)
        found = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert type(found) is type(expected)
        assert torch.equal(logits(found), logits(expected.eval()))


def lora_of(name: str) -> nn.Module:
    options = LORA.get(name, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True})
    torch.manual_seed(1)
    model = peft.get_peft_model(
        base_of(name), peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=7, **options)
    )
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
    save_distributed(folder / "run", model, optimizer, step=1)
    return logits(model)


@pytest.mark.parametrize("name", [*LORA, "conv1d"])
def test_an_adapter_trained_under_fsdp_is_read_by_peft(
    name: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    expected, _ = two_ranks(trained, name, tmp_path)
    alone = export_safetensors(tmp_path / "run", tmp_path / "alone", adapter_only=True)
    files = sorted(file.name for file in alone.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    with_peft = peft.PeftModel.from_pretrained(base_of(name), alone)
    torch.testing.assert_close(logits(with_peft), expected)
    with_peft.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = load_file(alone / "adapter_model.safetensors")
    assert {key: one.shape for key, one in theirs.items()} == {key: one.shape for key, one in ours.items()}


def trained_by_trainer(folder: Path, resume: bool) -> Tensor:
    trainer = trainer_of(
        "fsdp2", folder / "own", lora_of("plain"), max_steps=4, save_strategy="steps", save_steps=2
    )
    checkpoints = CheckpointCallback(trainer, folder / "run")
    trainer.train(resume_from_checkpoint=checkpoints.newest() if resume else None)
    return logits(trainer.model)


def test_adapters_that_a_trainer_saved_without_their_base_are_resumed_and_exported(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    expected, _ = two_ranks(trained_by_trainer, tmp_path, False)
    shutil.rmtree(next((tmp_path / "run").glob("*step-4")))
    resumed, _ = two_ranks(trained_by_trainer, tmp_path, True)
    assert torch.equal(resumed, expected)
    export_safetensors(tmp_path / "run", tmp_path / "alone", adapter_only=True)
    with_peft = peft.PeftModel.from_pretrained(base_of("plain"), tmp_path / "alone")
    torch.testing.assert_close(logits(with_peft), expected)


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


def test_an_export_that_cannot_name_its_weights_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, replace = tmp_path / "out", Path.replace

    def fails_for_weights(path: Path, target: Path) -> Path:
        if target.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        return replace(path, target)

    save_distributed(tmp_path / "run", llama(), step=1)
    export_safetensors(tmp_path / "run", out)
    assert (out / "model.safetensors").exists()
    monkeypatch.setattr(Path, "replace", fails_for_weights)
    with pytest.raises(CheckpointError, match="No space left"):
        export_safetensors(tmp_path / "run", out)
    assert not (out / "model.safetensors").exists()  # the old one, beside the new config.json

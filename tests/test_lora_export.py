"""LoRA adapters, trained under FSDP2: exported alone and merged, then read by peft and transformers."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_utils import CheckpointError, export_safetensors, save_distributed, save_full, shard
from fsdp_utils.checkpoint import save
from fsdp_utils.checkpoint.__main__ import main
from fsdp_utils.integrations.transformers import CheckpointCallback
from fsdp_utils.pretrained import lora
from tests.sharded import HandWritten, TwoRanks
from tests.trainers import llama, trainer_of

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
}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    )


def base_of(name: str) -> nn.Module:
    return gpt2() if name == "conv1d" else llama()


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
    """One step with FSDP2, saved in both formats."""
    model = shard(lora_of(name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    tokens = torch.arange(3, 9).reshape(1, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    save_distributed(folder / "run", model, optimizer, step=1)
    save_full(folder / "full.pt", model)
    return logits(model)


@pytest.mark.parametrize("name", [*LORA, "conv1d"])
def test_an_adapter_trained_under_fsdp_is_exported_for_peft_and_merged(
    name: str, two_ranks: TwoRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = two_ranks(trained, name, tmp_path)
    monkeypatch.setattr(lora, "_ROWS", 3)  # which divides no matrix here
    for source in ("run", "full.pt"):
        alone, whole = tmp_path / f"{source}-alone", tmp_path / f"{source}-whole"
        export_safetensors(tmp_path / source, alone, adapter_only=True)
        export_safetensors(tmp_path / source, whole)

        assert sorted(file.name for file in alone.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        with_peft = peft.PeftModel.from_pretrained(base_of(name), alone)
        torch.testing.assert_close(logits(with_peft), expected)
        with_peft.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
        theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
        ours = load_file(alone / "adapter_model.safetensors")
        assert {key: tensor.shape for key, tensor in theirs.items()} == {
            key: tensor.shape for key, tensor in ours.items()
        }

        kind = transformers.AutoModelForCausalLM
        merged, info = kind.from_pretrained(whole, output_loading_info=True)
        assert type(merged) is type(base_of(name))
        assert {key: list(found) for key, found in info.items() if found} == {}
        torch.testing.assert_close(logits(merged), expected)
        reference = with_peft.merge_and_unload().state_dict()
        for key, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, reference[key], rtol=1e-6, atol=1e-7)


def trained_by_trainer(folder: Path, resume: bool) -> Tensor:
    trainer = trainer_of(
        "fsdp2", folder / "own", lora_of("plain"), max_steps=4, save_strategy="steps", save_steps=2
    )
    checkpoints = CheckpointCallback(trainer, folder / "run", ignore_frozen_params=True)
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
    with pytest.raises(CheckpointError, match="and the weight that they are added to, found"):
        export_safetensors(tmp_path / "run", tmp_path / "merged")


def test_the_command_exports_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_full(tmp_path / "full.pt", lora_of("plain"))
    assert main(["export", str(tmp_path / "full.pt"), str(tmp_path / "out"), "--adapter-only"]) == 0
    assert "out: 8 tensors" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_weights_in_bf16_are_merged_as_peft_does(tmp_path: Path) -> None:
    model = lora_of("plain").to(torch.bfloat16)
    save_full(tmp_path / "full.pt", model)
    export_safetensors(tmp_path / "full.pt", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`", "ignore:Model has .tie_word_embeddings"
)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_tied_weights_of_which_an_adapter_changes_one_are_exported_as_trained(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def base() -> nn.Module:
        config = llama().config
        config.tie_word_embeddings = True  # type: ignore[union-attr]
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)  # type: ignore[arg-type]

    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, **options))  # type: ignore[arg-type]
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param)
    save_full(tmp_path / "full.pt", model)
    export_safetensors(tmp_path / "full.pt", tmp_path / "alone", adapter_only=True)
    export_safetensors(tmp_path / "full.pt", tmp_path / "merged")
    with_peft = peft.PeftModel.from_pretrained(base(), tmp_path / "alone")  # type: ignore[arg-type]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(with_peft), logits(model))
    torch.testing.assert_close(logits(merged), logits(model))
    assert merged.config.tie_word_embeddings == ("ensure_weight_tying" in options)


@pytest.mark.parametrize(
    ("options", "adapter_only", "said"),
    [
        ({"use_dora": True}, False, "found one with use_dora. Merge with peft"),
        (
            {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
            False,
            "found one with alora_invocation_tokens",
        ),
        ({"lora_bias": True}, False, r"q_proj.*expected two matrices of LoRA.*lora_B.default.bias"),
        ({"bias": "all"}, True, "found bias='all'.*export the merged model"),
        ({"init_lora_weights": "pissa"}, True, "found init_lora_weights='pissa', which changes them"),
        (None, True, "one LoRA adapter by peft, found no adapter"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    options: dict[str, Any] | None, adapter_only: bool, said: str, tmp_path: Path
) -> None:
    model = llama()
    if options is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, **options))
    save_full(tmp_path / "full.pt", model)
    with pytest.raises(CheckpointError, match=said):
        export_safetensors(tmp_path / "full.pt", tmp_path / "out", adapter_only=adapter_only)


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": "seven"},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"(": 1}},
        {"peft_type": None},
        ["no", "dict"],
    ],
)
def test_a_forged_configuration_of_an_adapter_is_refused(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora_of("plain")
    whole = save._plain_adapter(model.peft_config["default"], model)
    forged = {**whole, **change} if isinstance(change, dict) else change
    monkeypatch.setattr(save, "_plain_adapter", lambda adapter, base: forged)
    save_full(tmp_path / "full.pt", model)
    with pytest.raises(CheckpointError, match=r"expected the (configuration|checkpoint)"):
        export_safetensors(tmp_path / "full.pt", tmp_path / "out")


def test_a_model_that_is_not_of_transformers_is_exported_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(HandWritten(), peft.LoraConfig(target_modules=r".*mlp.[02]", r=2))
    for param in model.parameters():
        torch.nn.init.normal_(param)
    save_full(tmp_path / "full.pt", model)
    export_safetensors(tmp_path / "full.pt", tmp_path / "out", adapter_only=True)
    export_safetensors(tmp_path / "full.pt", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert (tmp_path / "out" / "adapter_config.json").exists()
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], tensor)

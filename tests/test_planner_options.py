"""plan: what each option of a job does to memory and time, and which options do not go together."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    ViTConfig,
    WhisperConfig,
)

from fsdp_utils import plan, run_on_ranks
from fsdp_utils.planner import GPUS, Plan, efficiency, work_items
from fsdp_utils.planner.__main__ import main
from fsdp_utils.planner.models import source_of
from fsdp_utils.planner.simulated_rank import record_one_rank
from tests.planner_net import Block, Net, tokens

VOCABULARY = 8192  # large beside the hidden size, so that the logits are the peak
SMALL = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA = LlamaConfig(**SMALL, intermediate_size=128, vocab_size=VOCABULARY)
DEEP = LlamaConfig(**{**SMALL, "num_hidden_layers": 8}, intermediate_size=256, vocab_size=64)
BATCH, LENGTH = 2, 256


def planned(config: Any = LLAMA, **options: Any) -> Plan:
    options = {"world_size": 8, "batch_size": 8 * BATCH, "seq_len": LENGTH, **options}
    return plan(config, **options)


def most(found: Plan, category: str) -> float:
    """Bytes of one category at its own peak, in the second step."""
    return max(m.gib.get(category, 0.0) for m in found.moments if m.step == 2) * 2**30


def max_of(found: Plan, phase: str) -> float:
    """Bytes at the peak of a phase of the second step."""
    return max(m.total_gib for m in found.moments if m.step == 2 and m.label.phase == phase) * 2**30


# ---- gradient accumulation -----------------------------------------------------------------------------


def test_micro_batches_take_the_memory_of_one_and_the_time_of_all() -> None:
    one = planned()
    four = planned(batch_size=4 * 8 * BATCH, micro_batches=4)
    two = planned(batch_size=2 * 8 * BATCH, micro_batches=2)
    assert four.peak_allocated_gib == two.peak_allocated_gib
    grown = (four.peak_allocated_gib - one.peak_allocated_gib) * 2**30
    assert 0 <= grown <= most(one, work_items.GRADIENTS)
    assert four.timing.model_flop == 4 * one.timing.model_flop
    assert four.step_s == pytest.approx(two.step_s + 2 * (two.step_s - one.step_s), rel=0.1)


def test_without_synchronisation_whole_gradients_are_kept_and_less_is_sent() -> None:
    batches = {"batch_size": 16 * BATCH, "micro_batches": 2, "precision": "fp32"}
    slow = dataclasses.replace(GPUS["H100"], link_gb_s=0.1)
    synchronized, kept = planned(DEEP, **batches, gpu=slow), planned(DEEP, **batches, gpu=slow, no_sync=True)
    assert most(kept, work_items.WHOLE_GRADIENTS) == pytest.approx(4 * kept.parameters, rel=0.01)
    assert most(synchronized, work_items.WHOLE_GRADIENTS) < most(kept, work_items.WHOLE_GRADIENTS) / 3
    assert kept.timing.exposed_s < 0.9 * synchronized.timing.exposed_s


# ---- what is kept for backward -------------------------------------------------------------------------


def test_checkpointing_keeps_less_the_more_it_computes_again() -> None:
    names = ("none", "every_2", "selective", "full")
    found = {name: planned(DEEP, checkpointing=name) for name in names}
    kept = [most(found[name], work_items.ACTIVATIONS) for name in names]
    assert kept[0] > kept[1] > kept[3]
    assert kept[0] > kept[2] > kept[3]
    computed = [sum_of_flop(found[name]) for name in names]
    assert computed[0] < computed[1] < computed[3]
    assert computed[0] < computed[2] < computed[3]


def sum_of_flop(found: Plan) -> float:
    """Seconds of computation, on a GPU whose memory is as fast as one likes."""
    return plan_again(found, dataclasses.replace(found.gpu, memory_gb_s=10**9)).timing.compute_s


def plan_again(found: Plan, gpu: Any) -> Plan:
    return planned(DEEP, checkpointing=found.setting.checkpointing, gpu=gpu)


def test_offloaded_activations_leave_the_gpu_and_cost_the_time_of_their_copies() -> None:
    here, there = planned(DEEP), planned(DEEP, activation_offload=True)
    slow = dataclasses.replace(GPUS["H100"], host_link_gb_s=0.001)
    assert most(there, work_items.ACTIVATIONS) < 0.8 * most(here, work_items.ACTIVATIONS)
    assert planned(DEEP, activation_offload=True, gpu=slow).step_s > 10 * there.step_s
    assert there.step_s == here.step_s
    for category in work_items.AT_REST:
        assert most(there, category) == most(here, category)


# ---- kernels -------------------------------------------------------------------------------------------


def test_eager_attention_has_the_whole_matrix() -> None:
    one_block = BATCH * 4 * 1024 * 1024 * 2  # samples, heads, tokens by tokens, bf16
    fused, eager = planned(seq_len=1024), planned(seq_len=1024, attention="eager")
    grown = most(eager, work_items.ACTIVATIONS) - most(fused, work_items.ACTIVATIONS)
    assert grown >= 6 * one_block
    assert eager.step_s > fused.step_s
    assert planned(seq_len=1024, attention="flash3").step_s <= fused.step_s


@pytest.mark.parametrize(
    ("loss", "share"), [("compiled", 0.5), ("chunked", 1 / 8), ("fused", 64 / VOCABULARY)]
)
def test_other_losses_never_have_all_logits_in_fp32(loss: str, share: float) -> None:
    logits = BATCH * LENGTH * VOCABULARY * 4
    whole, less = planned(), planned(loss=loss)
    saved = (whole.peak_allocated_gib - less.peak_allocated_gib) * 2**30
    assert saved > (1 - share) * 1.5 * logits  # the logits and their gradient
    if loss != "chunked":
        assert less.timing.model_flop >= whole.timing.model_flop


def test_a_loss_in_half_precision_has_logits_and_their_gradients_in_it() -> None:
    logits = BATCH * LENGTH * VOCABULARY * 2  # in bf16
    saved = (planned().peak_allocated_gib - planned(loss="half").peak_allocated_gib) * 2**30
    # at the peak: log-probabilities and two gradients
    assert saved == pytest.approx(3 * (2 * logits - logits), rel=0.01)


@pytest.mark.parametrize(
    ("loss", "held", "bytes_each"), [("full", "logits", 2), ("full", "fp32_logits", 4), ("half", "logits", 2)]
)
def test_logits_that_the_loop_holds_are_there_in_backward(loss: str, held: str, bytes_each: int) -> None:
    logits = BATCH * LENGTH * VOCABULARY * bytes_each
    freed, kept = planned(loss=loss), planned(loss=loss, held_output=held)
    grown = (kept.peak_allocated_gib - freed.peak_allocated_gib) * 2**30
    assert grown == pytest.approx(logits, rel=0.01)


def test_a_loss_of_shifted_logits_takes_a_copy_of_them() -> None:
    copy = BATCH * (LENGTH - 1) * VOCABULARY * 4
    held = [planned(loss=loss, held_output="fp32_logits") for loss in ("full", "shifted")]
    in_forward = [max_of(found, "forward") for found in held]
    assert in_forward[1] - in_forward[0] == pytest.approx(copy, rel=0.01)


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_keys_and_values_are_held_until_the_next_forward_pass_has_returned(checkpointing: str) -> None:
    """Of two steps at the end of a forward pass; with checkpointing, nothing else would keep the newer."""
    keys_and_values = 2 * BATCH * LENGTH * SMALL["hidden_size"] * 2 * SMALL["num_hidden_layers"]
    logits, cache = (
        planned(held_output=f"logits{suffix}", checkpointing=checkpointing) for suffix in ("", "_and_cache")
    )
    grown = max_of(cache, "forward") - max_of(logits, "forward")
    caches = 2 if checkpointing == "full" else 1  # without it, backward needs the newer one anyway
    assert grown == pytest.approx(caches * keys_and_values, rel=0.05)
    at_the_start = [
        next(m.total_gib for m in found.moments if m.step == 2) * 2**30 for found in (logits, cache)
    ]
    assert at_the_start[1] - at_the_start[0] == pytest.approx(keys_and_values, rel=0.05)


def test_held_output_of_all_blocks_is_that_of_four_written_out() -> None:
    options: dict[str, Any] = {"held_output": "fp32_logits_and_cache", "loss": "shifted"}
    few, all_run = planned(**options), planned(**options, whole=True)
    assert few.peak_allocated_gib == pytest.approx(all_run.peak_allocated_gib, rel=1e-6)
    assert not any("do not repeat" in note for note in few.notes)


def test_compiled_blocks_keep_less_and_take_less_time() -> None:
    eager, compiled = planned(), planned(compiled=True)
    assert most(compiled, work_items.ACTIVATIONS) < most(eager, work_items.ACTIVATIONS)
    assert compiled.timing.compute_s < eager.timing.compute_s
    assert "published compiled runs" in str(compiled).replace("\n            ", " ")


@pytest.mark.parametrize(
    ("optimizer", "nbytes"), [("adamw", 8), ("adamw_bf16", 4), ("adamw_8bit", 2 * (1 + 4 / 256))]
)
@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_the_optimizers_state_has_its_bytes(optimizer: str, nbytes: float, precision: str) -> None:
    found = planned(optimizer=optimizer, precision=precision)
    if (optimizer, precision) == ("adamw", "pure_bf16"):
        nbytes = 4
    expected = nbytes * found.parameters / 8
    assert found.at_rest[work_items.OPTIMIZER] * 2**30 == pytest.approx(expected, rel=0.03)


# ---- tensor parallelism ----------------------------------------------------------------------------------


def test_gpus_of_tensor_parallelism_share_each_unit() -> None:
    alone, shared = planned(), planned(tensor_parallel=4, batch_size=2 * BATCH)
    assert shared.gpus == alone.gpus == 8
    assert shared.parameters == alone.parameters
    assert most(shared, work_items.GATHERED) == pytest.approx(most(alone, work_items.GATHERED) / 4, rel=0.05)
    # a quarter of each unit, shared by two ranks instead of eight
    assert shared.at_rest["parameters"] == pytest.approx(alone.at_rest["parameters"], rel=0.05)
    assert "on 8 H100" in str(shared)
    assert shared.timing.exposed_s > alone.timing.exposed_s


def sizes_of_two_dimensions() -> tuple[dict[str, tuple[int, ...]], int]:
    """What a rank of a 2 x 2 mesh holds: shapes after tensor parallelism, and bytes after FSDP."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = LlamaForCausalLM(LLAMA)
    across, along = ColwiseParallel, RowwiseParallel
    block = {f"self_attn.{name}_proj": across() for name in "qkv"} | {"self_attn.o_proj": along()}
    block |= {"mlp.gate_proj": across(), "mlp.up_proj": across(), "mlp.down_proj": along()}
    for layer in model.model.layers:
        parallelize_module(layer, square["tp"], block)
    outer = {"model.embed_tokens": along(input_layouts=Replicate()), "lm_head": across()}
    parallelize_module(model, square["tp"], outer)
    local = {
        name: tuple((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in model.named_parameters()
    }
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=square["fsdp"])
    return local, sum(p.to_local().nbytes for p in model.parameters())


def test_sizes_of_tensor_parallelism_are_those_that_real_ranks_hold() -> None:
    halved = source_of(LLAMA, tensor_parallel=2).build()
    expected = {name: tuple(parameter.shape) for name, parameter in halved.named_parameters()}
    assert expected["model.embed_tokens.weight"] == (VOCABULARY // 2, 64)
    found = planned(world_size=4, tensor_parallel=2, ranks_per_host=2, precision="fp32")
    for local, nbytes in run_on_ranks(sizes_of_two_dimensions, world_size=4, timeout=100):
        assert local == expected
        assert nbytes == round(found.at_rest["parameters"] * 2**30)


# ---- what does not go together ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (LLAMA, {"offload": "no"}, "expected offload to be True or False, found 'no'"),
        (LLAMA, {"compiled": 1}, "expected compiled to be True or False, found 1"),
        (LLAMA, {"no_sync": True}, "no_sync expects micro_batches of 2 or more, found 1"),
        (LLAMA, {"micro_batches": 0}, "expected micro_batches from 1 on, found 0"),
        (LLAMA, {"micro_batches": 3}, "8 ranks in 3 micro-batches can share, such as 24, found 16"),
        (LLAMA, {"tensor_parallel": 3}, "tensor_parallel to divide the 8 ranks of a host, found 3"),
        (
            LLAMA,
            {"tensor_parallel": 8},
            "num_attention_heads that 8 GPUs of tensor_parallel can share, found 4",
        ),
        (LLAMA, {"loss": "liger"}, "expected loss out of full, shifted, half, compiled, chunked, fused"),
        (
            LLAMA,
            {"held_output": "all"},
            "expected held_output out of none, logits, logits_and_cache, fp32_logits",
        ),
        (
            LLAMA,
            {"held_output": "logits", "loss": "fused"},
            "held_output expects a loss out of full, shifted, half, found 'fused'",
        ),
        (
            LLAMA,
            {"held_output": "fp32_logits", "loss": "half"},
            'loss "half" is of logits in the dtype of computation',
        ),
        (LLAMA, {"attention": "xformers"}, "expected attention out of sdpa, flash, flash1, flash3, eager"),
        (LLAMA, {"checkpointing": 2}, "expected checkpointing out of none, full, selective, every_2"),
        (
            LLAMA,
            {"compiled": True, "activation_offload": True},
            "activation_offload is not simulated together",
        ),
        (
            GPT2Config(n_layer=5, n_head=4, n_embd=64),
            {"tensor_parallel": 2},
            "expects a config with head_dim",
        ),
        (Net(), {"attention": "eager", "inputs": tokens}, 'attention="eager" expects a transformers config'),
        (
            Net(),
            {"loss": "fused", "inputs": tokens},
            'loss="fused" expects a model of transformers with a head',
        ),
        (
            Net(),
            {"held_output": "logits", "inputs": tokens},
            'held_output="logits" expects a model of transformers with a head',
        ),
        (
            LlamaConfig(**SMALL, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            {},
            "does not simulate quantized weights",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    config: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match="plan: ") as error:
        planned(config, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_many_blocks_that_do_not_repeat_are_refused() -> None:
    model = Net()
    model.first = nn.ModuleList(Block(8 + number % 2) for number in range(501))
    with pytest.raises(ValueError, match="expected at most 500 blocks that do not repeat, found 501 in Net"):
        plan(model, world_size=2, batch_size=2, inputs=tokens)


# ---- which models ----------------------------------------------------------------------------------------

HALVES = {"encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        T5Config(d_model=64, num_layers=6, vocab_size=256),
        BartConfig(d_model=64, vocab_size=256, **HALVES, **HEADS),
        WhisperConfig(d_model=64, vocab_size=256, pad_token_id=0, max_source_positions=50, **HALVES, **HEADS),
        ViTConfig(hidden_size=64, num_attention_heads=4, intermediate_size=128, image_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_other_models_than_decoders_are_planned(config: Any) -> None:
    found = planned(config, world_size=2, batch_size=2, seq_len=16)
    assert found.model.endswith(("ForConditionalGeneration", "ForImageClassification"))
    assert found.at_rest["parameters"] == pytest.approx(4 * found.parameters / 2 / 2**30, rel=0.05)


def test_weights_that_are_tied_are_held_once() -> None:
    tied = LlamaConfig(**SMALL, intermediate_size=128, vocab_size=VOCABULARY, tie_word_embeddings=True)
    assert planned().parameters - planned(tied).parameters == VOCABULARY * 64


def test_a_causal_mask_is_left_to_the_kernel() -> None:
    recording = record_one_rank(source_of(LLAMA), planned().setting, 2, None)
    items = [item for _, found in recording for item in found]
    attention = [item for item in items if isinstance(item, work_items.Work) and item.attention]
    assert len(attention) == 2 * 2 * 2  # steps, blocks, forward and backward
    assert all(item.masked == item.flop // 2 for item in attention)
    of_masks = {"aten.le.Tensor", "aten.bitwise_and.Tensor"}
    assert not [item for item in items if isinstance(item, work_items.Alloc) and item.name in of_masks]


def test_a_model_of_the_hub_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "config.json"
    LLAMA.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *names: asked.append(names) or str(folder)
    )
    assert planned("org/name").peak_allocated_gib == planned().peak_allocated_gib
    assert asked == [("org/name", "config.json")]


def test_a_model_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: Any, timeout: float) -> Any:
        asked.append((request.full_url, timeout))
        return io.BytesIO(LLAMA.to_json_string().encode())

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert planned("org/name").peak_allocated_gib == planned().peak_allocated_gib
    assert asked == [("https://huggingface.co/org/name/resolve/main/config.json", 3)]


@pytest.mark.parametrize("offline", [True, False])
def test_a_model_that_the_hub_does_not_give_is_refused_with_the_way_to_get_it(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", nobody)
    with pytest.raises(
        ValueError, match=r"hf download org/name config\.json --local-dir FOLDER; then plan FOLDER"
    ):
        planned("org/name")


# ---- what is said ----------------------------------------------------------------------------------------


def test_tight_spans_the_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "MEMORY_RANGE", (0.9, 1.2))
    found = planned()
    for available, verdict in ((13.0, "fits"), (11.9, "tight"), (7.3, "tight"), (7.1, "does not fit")):
        sized = dataclasses.replace(
            found, peak_allocated_gib=8.0, peak_reserved_gib=10.0, available_gib=available
        )
        assert sized.verdict == verdict
        assert sized.fits == (available >= 10)
        assert sized.headroom_gib == pytest.approx(available - 10)
        assert f": {verdict} (simulated)" in str(sized)


def test_the_picture_shows_the_limit_and_names_the_phases() -> None:
    found = planned(gpu=dataclasses.replace(GPUS["T4"], usable_gib=2.05), precision="fp32")
    axes = found.plot()
    assert "one training step" in axes.get_xlabel()
    assert "GiB" in axes.get_ylabel()
    texts = {text.get_text().strip() for text in axes.texts}
    assert {"forward", "backward", "optimizer, zero_grad"} == texts
    (limit,) = [line for line in axes.lines if str(line.get_label()).startswith("T4: ")]
    assert limit.get_ydata()[0] == found.available_gib  # pyright: ignore


def test_the_command_prints_json_and_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    LLAMA.save_pretrained(tmp_path)
    sizes = [str(tmp_path), "--seq-len", "16"]
    assert main([*sizes, "--world-size", "2", "--batch-size", "4", "--micro-batches", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "fits"
    assert printed["setting"]["micro_batches"] == 2
    assert printed["step_s_range"][0] < printed["step_s"] < printed["step_s_range"][1]
    assert main([*sizes, "--search", "2", "--batch-size", "4"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 5  # the head, and a line for each setting
    assert "selective" not in shown.err
    for line in shown.err.splitlines():
        assert line in shown.out
    assert main([*sizes, "--search", "2", "--batch-size", "4", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(json.loads(shown.out)["tried"]) == 4

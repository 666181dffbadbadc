"""plan: four blocks stand for all exactly, real ranks hold what it says, and bad input gets a sentence."""

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

import nbformat
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen3MoeConfig,
)

from benchmarks.gpu_parts import planner as recorded_planner
from fsdp_utils import plan, run_on_ranks, search
from fsdp_utils.allocator.simulate import simulate_allocator
from fsdp_utils.lessons.published import predict, rows
from fsdp_utils.planner import GPUS, Plan, peak_flops, work_items
from fsdp_utils.planner.efficiency import accuracy
from fsdp_utils.planner.extrapolation import RECORDED, extend
from fsdp_utils.planner.memory import trace_of
from fsdp_utils.planner.models import source_of
from fsdp_utils.planner.planning import recorded
from fsdp_utils.planner.roofline import collective_s
from fsdp_utils.planner.simulated_rank import record_one_rank
from fsdp_utils.planner.work_items import Recording, Send
from tests.planner_net import (
    RANKS,
    REAL,
    SETTING,
    Block,
    Net,
    most_by_category,
    tokens,
    train_really,
)

LESSON = Path(__file__).parents[1] / "notebooks" / "14_plan_before_you_rent.ipynb"
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)
SMALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama, checkpointed": (LLAMA, {"checkpointing": "full"}),
    "one list of blocks, FSDP1": (Net(first=7), {"api": "fsdp1"}),
    "two lists, FSDP1, checkpointed": (Net(first=5, second=6), {"api": "fsdp1", "checkpointing": "full"}),
    "two lists, ZeRO-2": (Net(first=6, second=5), {"strategy": "grad_op", "optimizer": "adamw_one_by_one"}),
    "one list, selective, two micro-batches": (
        Net(first=6),
        {"checkpointing": "selective", "micro_batches": 2, "no_sync": True},
    ),
    "one list, hybrid": (
        Net(first=6),
        {"strategy": "hybrid", "precision": "fp32", "optimizer": "sgd_momentum"},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_four_blocks_written_out_are_what_all_blocks_do(name: str) -> None:
    model, options = SMALL[name]
    source, setting = source_of(model), dataclasses.replace(SETTING, **options)
    inputs = tokens if isinstance(model, Net) else None
    assert min(source.stacks.values()) > RECORDED
    written = extend(record_one_rank(source, setting, RECORDED, inputs), source.stacks)
    ran = record_one_rank(source, setting, None, inputs)
    assert events_of(written) == events_of(ran)
    assert most_by_category(written) == most_by_category(ran)
    assert sends_of(written) == sends_of(ran)
    peaks = [simulate_allocator(trace_of(each)).peak_reserved_gib for each in (written, ran)]
    assert peaks[0] == peaks[1] > 0


def events_of(recording: Recording) -> list[tuple]:
    return [(event.kind, event.size, event.stream, event.name) for event in trace_of(recording).events]


def sends_of(recording: Recording) -> list[Send]:
    return [entry for _, entries in recording for entry in entries if isinstance(entry, Send)]


# ---- real ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def really() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    return run_on_ranks(train_really, world_size=RANKS, timeout=100)[0]


@pytest.mark.parametrize("name", REAL)
def test_a_real_rank_holds_what_the_simulated_one_holds(name: str, really: Any) -> None:
    simulated = most_by_category(recorded(source_of(Net()), REAL[name], tokens)[0])
    for category, size in really[0][name].items():
        # gloo reduces in a copy of its own, which NCCL does not make
        if category != work_items.REDUCE_BUFFERS:
            assert simulated[category] == pytest.approx(size, rel=0.03, abs=64 / 2**30), category


def test_what_is_at_rest_on_a_real_rank_is_what_the_plan_says(really: Any) -> None:
    planned = plan(Net(), world_size=RANKS, batch_size=2 * RANKS, inputs=tokens)
    for category, size in really[1].items():
        assert planned.at_rest[category] == pytest.approx(size, rel=0.03), category
    whole = sum(p.numel() for p in Net().parameters()) * 4 / 2**30
    assert really[1][work_items.PARAMETERS] > 1.01 * whole / RANKS  # rank 0 has more than its part


# ---- what a plan says --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(LLAMA, world_size=16, batch_size=16, seq_len=32, gpu="A100-80")


def test_a_plan_tells_memory_by_category_and_by_moment(planned: Plan) -> None:
    assert planned.fits
    assert planned.advice == []
    assert sum(planned.breakdown.values()) == pytest.approx(planned.peak_allocated_gib)
    assert (
        planned.peak_allocated_gib
        <= planned.peak_reserved_gib
        <= planned.available_gib
        == GPUS["A100-80"].usable_gib - 2
    )
    assert planned.parameters == sum(p.numel() for p in LlamaForCausalLM(LLAMA).parameters())
    assert {moment.label.phase for moment in planned.moments} == {"forward", "backward", "optimizer", "other"}
    in_forward = [m for m in planned.moments if m.label.phase == "forward" and m.step == 2]
    assert all(m.gib[work_items.GATHERED] > 0 for m in in_forward[:-1])
    assert all(
        work_items.REDUCE_BUFFERS not in m.gib and work_items.WHOLE_GRADIENTS not in m.gib for m in in_forward
    )
    assert 0 < planned.timing.exposed_s < planned.step_s
    assert planned.tokens_per_s == pytest.approx(16 * 32 / planned.step_s)
    assert "simulated" in str(planned)


def test_the_operations_of_a_model_are_three_times_those_of_forward(planned: Plan) -> None:
    sizes = {name: p.numel() for name, p in LlamaForCausalLM(LLAMA).named_parameters()}
    in_products = sum(n for name, n in sizes.items() if "proj" in name or "lm_head" in name)
    attention = 5 * 2 * 2 * 32 * 32 * 64  # blocks, two products, multiply and add, tokens by tokens, width
    assert planned.timing.model_flop == 3 * (2 * in_products * 32 + attention)


MOE = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5, "vocab_size": 96}
EXPERTS: dict[str, tuple[Any, int, int, int]] = {  # config, experts, of which a token has, width of attention
    "Mixtral": (
        MixtralConfig(**MOE, hidden_size=64, intermediate_size=96, num_local_experts=8),
        8, 2, 64 + 64,
    ),
    "Qwen3-MoE": (
        Qwen3MoeConfig(**MOE, hidden_size=64, head_dim=32, moe_intermediate_size=48, num_experts=16),
        16, 8, 128 + 128,
    ),
    "DeepSeek-V3": (
        DeepseekV3Config(
            **{**MOE, "num_key_value_heads": 4}, hidden_size=64, intermediate_size=96, n_routed_experts=16,
            moe_intermediate_size=48, q_lora_rank=32, kv_lora_rank=32, n_group=4, topk_group=4,
        ),
        16, 8, 4 * (128 + 64 + 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_operations_of_experts_are_those_of_the_active_parameters(name: str, checkpointing: str) -> None:
    config, experts, chosen, width = EXPERTS[name]
    planned = plan(config, world_size=2, batch_size=4, seq_len=32, checkpointing=checkpointing)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    active = 0.0
    for parameter_name, p in model.named_parameters():
        if p.ndim > 1 and "embed_tokens" not in parameter_name:
            active += p.numel() * (chosen / experts if p.ndim == 3 else 1)
    attention = 3 * 2 * config.num_hidden_layers * 2 * 32 * 32 * width
    assert planned.timing.model_flop == pytest.approx(6 * active * 2 * 32 + attention, rel=0.05)
    assert planned.step_s_range is None
    assert "has experts or convolutions in its blocks" in planned.notes[-1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_of_a_model_wrapped_for_lora_the_adapters_alone_are_trained() -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])

    def build() -> nn.Module:
        return peft.get_peft_model(LlamaForCausalLM(LLAMA), adapters)

    options = {"world_size": 2, "batch_size": 2, "seq_len": 32, "precision": "fp32"}
    planned, all_trained = plan(build, **options), plan(LLAMA, **options)
    model = build()
    gib = {flag: sum(p.numel() * 4 for p in model.parameters() if p.requires_grad is flag) / 2**30
           for flag in (True, False)}  # fmt: skip
    assert planned.at_rest == pytest.approx(
        {"parameters": sum(gib.values()) / 2, "gradients": gib[True] / 2, "optimizer state": gib[True]},
        rel=0.03,
    )
    # no product for the gradient of a frozen matrix
    assert 0.6 < planned.timing.model_flop / all_trained.timing.model_flop < 0.75
    assert planned.unlike == ["precision fp32", "frozen parameters"]
    assert plan(build, **options, loss="half").peak_allocated_gib > 0


@torch.library.custom_op("planner_test::product", mutates_args=())
def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one @ other


product.register_fake(lambda one, other: one.new_empty(one.shape[0], other.shape[1]))
product.register_autograd(
    lambda ctx, grad: (product(grad, ctx.saved_tensors[1].t()), product(ctx.saved_tensors[0].t(), grad)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_no_speed_is_predicted_where_a_product_is_not_counted() -> None:
    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(product(x, self.up.weight.t()))

    def build() -> nn.Module:
        model = Net(first=0)
        model.first.extend(Own(32) for _ in range(5))
        return model

    planned = plan(build, world_size=2, batch_size=2, inputs=tokens)
    assert planned.uncounted == ["planner_test.product"]
    with pytest.raises(ValueError, match=r"no speed is predicted: the operations of planner_test\.product"):
        assert planned.step_s
    printed = planned.to_dict()
    assert printed["step_s"] is printed["mfu"] is None
    assert printed["peak_allocated_gib"] > 0
    assert "speed     no speed is predicted" in str(planned)
    asked: dict[str, Any] = {"world_sizes": [2], "batch_per_rank": [1], "inputs": tokens}
    asked["checkpointing"] = ["none"]
    found = search(build, **asked)
    assert found.best is not None
    assert "-  " in str(found).splitlines()[1]
    with pytest.raises(ValueError, match=r"search: expected a model whose time is known"):
        search(build, samples_per_s=1.0, **asked)


@pytest.mark.parametrize(
    "moves",
    [
        lambda x, weight: F.prelu(x, weight[0]),
        lambda x, weight: F.binary_cross_entropy_with_logits(x, x * 2, reduction="none"),
        lambda x, weight: F.smooth_l1_loss(x, x * 2, reduction="none"),
        lambda x, weight: F.layer_norm(x, x.shape[-2:], x[0] if x.ndim > 2 else x),
    ],
)
def test_an_operator_of_torch_that_multiplies_no_matrices_raises_no_alarm(moves: Any) -> None:
    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return moves(super().forward(x), self.up.weight)

    def build() -> nn.Module:
        model = Net(first=0)
        model.first.extend(Own(32) for _ in range(5))
        return model

    assert not plan(build, world_size=2, batch_size=2, inputs=tokens).uncounted


def test_a_slow_network_is_seen() -> None:
    slow = dataclasses.replace(GPUS["A100-80"], network_gb_s=0.05)
    one, other = (plan(Net(), world_size=16, batch_size=16, inputs=tokens, gpu=g) for g in ("A100-80", slow))
    assert other.step_s > 2 * one.step_s
    assert other.peak_allocated_gib == one.peak_allocated_gib


def test_a_model_that_does_not_fit_gets_advice() -> None:
    small = dataclasses.replace(GPUS["T4"], usable_gib=2.001)
    found = search(
        Net(), world_sizes=[2], gpu=small, batch_per_rank=[512], strategies=["full"], checkpointing=["none"],
        precision="fp32", inputs=tokens,
    )  # fmt: skip
    assert found.best is None
    (tried,) = found.tried
    assert not tried.fits
    assert len(tried.advice) == 5
    assert "MiB do not shrink with more ranks: " in tried.advice[-1]
    for part in (work_items.ACTIVATIONS, work_items.TEMPORARIES):
        assert f"{1024 * tried.breakdown[part]:.1f} MiB of {part}" in tried.advice[-1]
    assert "twice the ranks halve them, but the rest alone is too much" in " ".join(tried.advice)
    assert "none of 1 settings" in str(found)


def test_the_search_ends_at_the_fewest_gpus_that_will_do() -> None:
    options = {"batch_per_rank": [1, 2], "strategies": ["full"], "checkpointing": ["none"], "inputs": tokens}
    found = search(Net(), world_sizes=[2, 1], **options)
    assert found.best is not None
    assert [p.setting.world_size for p in found.tried] == [1, 1]
    assert found.best.samples_per_s == max(p.samples_per_s for p in found.tried)


def test_what_is_offloaded_lies_on_the_host() -> None:
    options = {"world_size": 4, "batch_size": 4, "inputs": tokens}
    kept, offloaded = plan(Net(), **options), plan(Net(), **options, offload=True)
    assert offloaded.host_gib == pytest.approx(sum(kept.at_rest.values()))
    assert offloaded.peak_allocated_gib < kept.peak_allocated_gib
    assert not set(work_items.AT_REST) & set(offloaded.breakdown)


def test_the_model_of_the_caller_stays_as_it_was() -> None:
    model = Net()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    plan(model, world_size=2, batch_size=2, inputs=tokens)
    assert len(model.first) == 5
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        torch.testing.assert_close(parameter, before[name][1])


def test_a_ring_takes_its_bytes_and_its_hops() -> None:
    h100 = GPUS["H100"]
    within = Send("all_gather", "x", 8 * 10**9, 8, 8)
    assert collective_s(within, h100, 8) == pytest.approx(7e9 / 450e9 + 8.4e-6 + 7 * 3.4e-6)
    between = Send("all_gather", "x", 16 * 10**9, 16, 8)
    assert collective_s(between, h100, 8) == pytest.approx(15e9 / 400e9 + 8.4e-6 + 14 * 3.4e-6 + 9.6e-6)
    of_hosts = Send("all_reduce", "x", 2 * 10**9, 2, 1)  # seven other rings share the cards
    assert collective_s(of_hosts, h100, 8) == pytest.approx(2e9 / 50e9 + 8.4e-6 + 2 * 9.6e-6)
    assert collective_s(Send("all_gather", "x", 10**9, 1, 1), h100, 1) == 0
    pair = Send("all_gather", "x", 2 * 10**9, 2, 2)  # each pair of eight MI300X has a link of its own
    assert collective_s(pair, GPUS["MI300X"], 2) == pytest.approx(1e9 / 64e9 + 8.4e-6 + 3.4e-6)


def test_blocks_that_differ_are_all_simulated() -> None:
    model = Net()
    model.first[3].up = nn.Linear(32, 128, bias=False)
    assert source_of(model).stacks == {}
    planned = plan(model, world_size=2, batch_size=2, inputs=tokens)
    assert {m.label.unit for m in planned.moments} >= {f"first.{i}" for i in range(5)}


def test_the_error_is_stated(tmp_path: Path) -> None:
    file = tmp_path / "planner.json"
    published = accuracy(file=file)
    assert re.fullmatch(r"of \d+ published eager runs, 80% took [\d.]+ to [\d.]+ times the .*", published)
    assert "published compiled runs" in accuracy(compiled=True, file=file)
    file.write_text(json.dumps(recording(step_error=0.1)))
    assert accuracy(file=file) == (
        f"{published}; error over 3 settings of one rank on one made-up GPU, median: "
        "allocated 2% (worst 4%), reserved 5% (worst 5%), step time 10% (worst 90%)"
    )


def test_an_error_is_stated_for_plans_like_the_published_runs_alone() -> None:
    fitted = {}
    for row in rows("fit"):
        kind = (row["gpu"], row["param_storage_dtype"], row["reduce_dtype"], row["attention"].split()[0])
        short = {"sequence_length": 64, "batch_per_gpu": 1, "activation_checkpointing": "full"}
        small = {**row["model"], "hidden_size": 64, "intermediate_size": 96, "layers": 4, "vocab_size": 96}
        fitted[kind] = {**row, **short, "model": {**small, "heads": 4, "kv_heads": 4}}
    for row in fitted.values():
        planned = predict(row).plan
        assert planned.unlike == []
        assert "published" in planned.notes[-1]
        assert planned.step_s_range is not None
        assert "likely" in str(planned)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    bert = BertConfig(**sizes, vocab_size=96, architectures=["BertForMaskedLM"])
    like_an_h100 = dataclasses.replace(GPUS["H100"], half_tflops=500)
    others: list[tuple[str, Any, dict[str, Any]]] = [
        ("gpu L40S", LLAMA, {"gpu": "L40S"}),
        ("gpu H100", LLAMA, {"gpu": like_an_h100}),
        ("tensor_parallel 2", LLAMA, {"tensor_parallel": 2}),
        ("precision fp32", LLAMA, {"precision": "fp32"}),
        ("offload True", LLAMA, {"offload": True}),
        ("a model without fused causal attention", bert, {}),
    ]
    for differs, config, options in others:
        planned = plan(config, world_size=4, batch_size=4, seq_len=32, **options)
        assert planned.unlike == [differs]
        assert planned.notes[-1].endswith(f"none of the published runs that tell plan's error has {differs}")
        assert planned.step_s_range is planned.to_dict()["step_s_range"] is None
        assert "likely" not in str(planned)


def recording(step_error: float) -> dict[str, Any]:
    """Not a measurement: made up in the form that the recorder gives it."""
    names = dict(zip(recorded_planner.NAMES, recorded_planner.SETTINGS[0], strict=True))
    done = []
    for allocated, step in ((1.0, 1.0), (1.02, 1 + step_error), (0.96, 1.9)):
        predicted = {"peak_allocated_gib": allocated, "peak_reserved_gib": 2.1, "step_s": step}
        measured = {"peak_allocated_gib": 1.0, "peak_reserved_gib": 2.0, "step_s": 1.0}
        done.append((names, {"predicted": {"published rates": predicted}, "measured": measured}))
    return {
        "device": "made-up GPU",
        "torch": torch.__version__,
        "date": "2000-01-01",
        "group": "",
        "results": recorded_planner.summarize(done),
    }


def test_the_lesson_shows_a_recording_and_holds_it_against_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = next(
        cell.source
        for cell in nbformat.read(LESSON, as_version=4).cells
        if "recordings" in cell.metadata.get("tags", ())
    )
    show = ast.parse(cell).body.pop()
    assert isinstance(show, ast.Expr)

    def run(found: dict[str, Any] | None) -> str:
        monkeypatch.setattr("fsdp_utils.lessons.recorded.load", lambda *_, **__: found)
        names: dict[str, Any] = {}
        exec(cell, names)
        return eval(compile(ast.Expression(show.value), "lesson 14", "eval"), names).data

    assert "Not recorded yet" in run(None)
    page = run(recording(step_error=0.19))
    assert page.count("llama 1B, 4, 2048, full, bf16, none") == 3
    assert "1.02 / 1.00" in page
    assert "step time: 19% in the median (limit 20%), 90% at worst" in page
    assert "Recorded on made-up GPU" in page
    with pytest.raises(AssertionError, match="step time"):
        run(recording(step_error=0.21))


SOLD_WITH_GIB = {
    "A10": 24,
    "A100-40": 40,
    "A100-80": 80,
    "H100": 80,
    "H100-NVL": 94,
    "H100-PCIe": 80,
    "H200-NVL": 141,
    "H200": 141,
    "B200": 180,
    "L4": 24,
    "T4": 16,
    "L40S": 48,
    "A6000": 48,
    "RTX-4090": 24,
    "RTX-5090": 32,
    "MI300X": 192,
}


def test_every_gpu_says_where_its_numbers_are_from() -> None:
    assert set(GPUS) == set(SOLD_WITH_GIB)
    for gpu in GPUS.values():
        assert 0.9 * SOLD_WITH_GIB[gpu.name] < gpu.usable_gib < SOLD_WITH_GIB[gpu.name]
        for what in ("usable: ", "rates and links: ", "network: "):
            assert what in gpu.source
        assert gpu.half_tflops > gpu.fp32_tflops > 0
        assert gpu.reached_tflops is None or gpu.reached_tflops < gpu.half_tflops


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
    ],
)
def test_the_peak_rate_is_found_by_the_name_of_the_device(device_name: str, tflops: float | None) -> None:
    assert peak_flops(device_name) == (tflops and tflops * 1e12)

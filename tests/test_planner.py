"""plan: four blocks stand for all exactly, each option does its part. Lesson 14 asks real ranks."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, T5Config

from fsdp_utils import plan
from fsdp_utils.planner import COLORS, GPUS, Efficiency, Plan
from tests.blocks import Block
from tests.planner_net import SIZES, Net, tokens, with_fsdp1

VOCABULARY = 4096  # large beside the hidden size, so that the logits are the peak
SMALL = {**SIZES, "num_hidden_layers": 2}  # where the number of blocks is not the point
LLAMA = LlamaConfig(**SMALL, vocab_size=VOCABULARY)
DEEP = LlamaConfig(**{**SIZES, "num_hidden_layers": 7}, vocab_size=64)
BATCH, LENGTH, WORLD = 2, 128, 8


def planned(config: Any = LLAMA, **options: Any) -> Plan:
    micro_batches = options.get("micro_batches", 1)
    options = {"world_size": WORLD, "batch_size": WORLD * BATCH * micro_batches, "seq_len": LENGTH, **options}
    return plan(config, **options)


plain = functools.cache(planned)  # for what several tests compare with


def most(found: Plan, category: str) -> float:
    """Bytes of one category at its own peak, in the second step."""
    return max(m.gib.get(category, 0.0) for m in found.moments if m.step == 2) * 2**30


# ---- four blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (DEEP, {"checkpointing": "full"}),
        (Net(first=5, second=6), {"shard": with_fsdp1, "inputs": tokens}),
        (Net(first=6), {"checkpointing": "selective", "micro_batches": 2, "no_sync": True, "inputs": tokens}),
        (Net(first=6), {"strategy": "hybrid", "ranks_per_host": 4, "mp_policy": None, "inputs": tokens}),
    ],
)
def test_four_blocks_written_out_are_what_all_blocks_do(
    model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = planned(model, **options)
    monkeypatch.setattr("fsdp_utils.planner.planning.RECORDED", 100)  # so many blocks are all run
    ran = planned(model, **options)
    assert not any("do not repeat" in note for note in few.notes)
    assert (few.peak_allocated_gib, few.breakdown) == (ran.peak_allocated_gib, ran.breakdown)
    assert few.peak_reserved_gib == ran.peak_reserved_gib > 0
    assert [most(few, category) for category in COLORS] == [most(ran, category) for category in COLORS]
    assert few.timing.model_flop == ran.timing.model_flop
    events, of_all = ([s.event for s in each.timing.replay.spans] for each in (few, ran))
    assert [e for e in events if e.phase != "optimizer"] == [e for e in of_all if e.phase != "optimizer"]


# ---- what a plan says --------------------------------------------------------------------------------


def test_a_plan_tells_memory_by_category_and_by_moment_and_time() -> None:
    found = plain()
    assert sum(found.breakdown.values()) == pytest.approx(found.peak_allocated_gib)
    assert found.peak_allocated_gib <= found.peak_reserved_gib <= found.available_gib
    assert found.available_gib == GPUS["H100"].usable_gib - 2
    assert found.parameters == sum(p.numel() for p in LlamaForCausalLM(LLAMA).parameters())
    assert {moment.label.phase for moment in found.moments} == {"forward", "backward", "optimizer", "other"}
    in_forward = [m for m in found.moments if m.label.phase == "forward" and m.step == 2]
    assert all(m.gib["gathered parameters"] > 0 for m in in_forward[:-1])
    assert not any({"buffers of reductions", "whole gradients"} & set(m.gib) for m in in_forward)
    # the time is an estimate with its range beside a roofline
    assert 0 < found.timing.exposed_s < found.step_s
    assert found.step_s_bound < found.step_s
    assert found.tokens_per_s == pytest.approx(WORLD * BATCH * LENGTH / found.step_s)
    assert found.step_s_range is not None
    low, high = found.step_s_range
    assert low < found.step_s < high
    text = f"{found.step_s:.3g} s, likely {low:.3g} to {high:.3g}; {found.step_s_bound:.3g} by the GPU's"
    assert text in str(found)


def test_tight_spans_the_error_of_memory_and_what_is_too_much_gets_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdp_utils.planner.efficiency.MEMORY_RANGE", (0.9, 1.2))
    for available, verdict in ((13.0, "fits"), (11.9, "tight"), (7.3, "tight"), (7.1, "does not fit")):
        moments = [dataclasses.replace(plain().peak, gib={"activations": 7.0, "parameters": 1.0})]
        sizes = {"peak_reserved_gib": 10.0, "available_gib": available}
        sized = dataclasses.replace(plain(), moments=moments, **sizes)
        assert sized.verdict == verdict
        assert sized.fits == (available >= 10)
        assert f": {verdict} (simulated)" in str(sized)
        assert sized.headroom_gib == available - 10
        parts = [float(text.split()[0]) for text in sized.advice[1:]]
        assert parts == sorted(parts, reverse=True)
        assert bool(parts) is not sized.fits


# ---- operations ----------------------------------------------------------------------------------------


def test_the_operations_of_a_model_are_three_times_those_of_forward() -> None:
    sizes = {name: p.numel() for name, p in LlamaForCausalLM(LLAMA).named_parameters()}
    in_products = sum(n for name, n in sizes.items() if "proj" in name or "lm_head" in name)
    attention = 2 * 2 * 2 * LENGTH**2 * 64  # blocks, two products, multiply and add, tokens by tokens, width
    flop = 3 * BATCH * (2 * in_products * LENGTH + attention)
    assert plain().timing.model_flop == flop
    assert plain(checkpointing="full").timing.model_flop == flop


MOE: dict[str, Any] = {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 32}
QWEN = Qwen3MoeConfig(**SMALL, **MOE, moe_intermediate_size=48, num_experts=16)


def test_the_operations_of_experts_are_those_of_the_active_parameters() -> None:
    found = plan(QWEN, world_size=2, batch_size=4, seq_len=32, checkpointing="full")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(QWEN)
    active = 0.0
    for name, p in model.named_parameters():
        if p.ndim > 1 and "embed_tokens" not in name:
            active += p.numel() * (8 / 16 if p.ndim == 3 else 1)  # a token has 8 of the 16 experts
    attention = 3 * 2 * QWEN.num_hidden_layers * 2 * 32 * 32 * (128 + 128)
    assert found.timing.model_flop == pytest.approx(6 * active * 2 * 32 + attention, rel=0.05)
    assert found.unlike == ["experts or convolutions in its blocks"]


@torch.library.custom_op("planner_test::product", mutates_args=())
def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one @ other


product.register_fake(lambda one, other: one.new_empty(one.shape[0], other.shape[1]))
product.register_autograd(
    lambda ctx, grad: (product(grad, ctx.saved_tensors[1].t()), product(ctx.saved_tensors[0].t(), grad)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class WithOwnProduct(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x = F.layer_norm(F.prelu(x, self.up.weight[0]), x.shape[-1:])  # these multiply no matrices
        return x + product(x, self.up.weight[:32])


def test_no_speed_is_predicted_where_a_product_is_not_counted() -> None:
    found = plan(Net(block=WithOwnProduct), world_size=2, batch_size=2, inputs=tokens)
    assert found.uncounted == ["planner_test.product"]
    assert math.isnan(found.step_s)
    assert math.isnan(found.samples_per_s)
    assert found.peak_allocated_gib > 0
    assert "the operations of planner_test.product are not counted" in found.notes[0]
    assert "speed     " not in str(found)


# ---- what is sent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "seconds"),
    [
        (8, lambda nbytes: 7 / 8 * nbytes / 450e9 + 8.4e-6 + 7 * 3.4e-6),
        (16, lambda nbytes: 15 / 16 * nbytes / 400e9 + 8.4e-6 + 14 * 3.4e-6 + 9.6e-6),
    ],
)
def test_a_ring_takes_its_bytes_and_its_hops(world: int, seconds: Callable[[int], float]) -> None:
    gpu = dataclasses.replace(GPUS["H100"], memory_gb_s=1e15)  # so that copies take no time
    whole = Efficiency(matmul=1.0, attention=1.0, link=1.0, network=1.0)
    options: dict[str, Any] = {"world_size": world, "batch_size": world, "inputs": tokens}
    found = plan(Net(), **options, gpu=gpu, efficiency=whole)
    events = [span.event for span in found.timing.replay.spans]
    gathers = {event.module: event.seconds for event in events if event.kind == "all_gather"}
    nbytes = 2 * sum(p.numel() for p in Block(32).parameters())
    assert gathers["first.2"] == pytest.approx(seconds(nbytes), rel=1e-3)


# ---- each option ---------------------------------------------------------------------------------------


def test_micro_batches_take_the_memory_of_one_and_the_time_of_all() -> None:
    one, two, four = plain(), planned(micro_batches=2), planned(micro_batches=4)
    assert four.peak_allocated_gib == two.peak_allocated_gib
    grown = (four.peak_allocated_gib - one.peak_allocated_gib) * 2**30
    assert 0 <= grown <= most(one, "gradients")
    assert four.timing.model_flop == 4 * one.timing.model_flop
    assert four.step_s == pytest.approx(two.step_s + 2 * (two.step_s - one.step_s), rel=0.1)


@pytest.mark.parametrize("shard", [None, with_fsdp1])
def test_without_synchronisation_whole_gradients_are_kept_and_less_is_sent(shard: Any) -> None:
    slow = dataclasses.replace(GPUS["H100"], link_gb_s=0.1)
    options: dict[str, Any] = {"gpu": slow, "micro_batches": 2, "shard": shard, "inputs": tokens}
    options |= {"mp_policy": None} if shard is None else {}
    synchronized, kept = (planned(Net(), **options, no_sync=flag) for flag in (False, True))
    whole = (4 if shard is None else 2) * kept.parameters
    assert most(kept, "whole gradients") == pytest.approx(whole, rel=0.1)
    assert most(synchronized, "whole gradients") < most(kept, "whole gradients") / 2
    assert kept.timing.exposed_s < 0.95 * synchronized.timing.exposed_s


def test_checkpointing_keeps_less_the_more_it_computes_again() -> None:
    fast = dataclasses.replace(GPUS["H100"], memory_gb_s=10**9)  # so that products alone take time
    config = LlamaConfig(**SMALL, vocab_size=64)
    found = {name: planned(config, checkpointing=name, gpu=fast) for name in (None, 2, "selective", "full")}
    kept = {name: most(each, "activations") for name, each in found.items()}
    computed = {name: each.timing.compute_s for name, each in found.items()}
    for some in (2, "selective"):
        assert kept[None] > kept[some] > kept["full"]
        assert computed[None] < computed[some] < computed["full"]


def test_blocks_that_are_computed_again_fill_no_cache() -> None:
    """As under transformers' own checkpointing and `shard`: else each block would fill it twice."""
    without = plain(checkpointing="full")
    asks = planned(
        functools.partial(LlamaForCausalLM, LLAMA),
        checkpointing="full",
        loss=lambda model, batch: model(**batch, use_cache=True).loss,
    )
    assert (asks.peak_allocated_gib, asks.breakdown) == (without.peak_allocated_gib, without.breakdown)


def test_compiled_blocks_keep_less_and_take_less_time() -> None:
    eager, compiled = plain(), planned(compiled=True)
    assert most(compiled, "activations") < most(eager, "activations")
    assert compiled.timing.compute_s < eager.timing.compute_s
    assert "published compiled runs" in compiled.notes[-1]


def test_eager_attention_has_the_whole_matrix() -> None:
    one_block = BATCH * 4 * LENGTH**2 * 2  # samples, heads, tokens by tokens, bf16
    with_matrix = planned(LlamaConfig(**SMALL, vocab_size=VOCABULARY, attn_implementation="eager"))
    assert most(with_matrix, "activations") - most(plain(), "activations") >= 2 * one_block
    assert with_matrix.step_s > plain().step_s
    assert with_matrix.unlike == ["a model without fused causal attention"]


@pytest.mark.parametrize(
    ("config", "optimizer", "parameter", "state"),
    [  # bytes of a parameter, and of its optimizer state
        (LlamaConfig(**SMALL, vocab_size=64, dtype="bfloat16"), torch.optim.AdamW, 2, 4),
        (Net(first=2), functools.partial(torch.optim.SGD, lr=0.1), 4, 0),
    ],
)
def test_the_optimizer_state_has_its_bytes(config: Any, optimizer: Any, parameter: int, state: int) -> None:
    found = planned(config, optimizer=optimizer, inputs=tokens if isinstance(config, Net) else None)
    mine = found.parameters / WORLD / 2**30
    assert found.at_rest["parameters"] == pytest.approx(parameter * mine, rel=0.05)
    assert found.at_rest["optimizer state"] == pytest.approx(state * mine, rel=0.05)


def test_what_is_offloaded_lies_on_the_host() -> None:
    options = {"world_size": 4, "batch_size": 4, "inputs": tokens}
    kept, offloaded = plan(Net(first=2), **options), plan(Net(first=2), **options, offload=True)
    assert offloaded.host_gib == pytest.approx(sum(kept.at_rest.values()))
    assert offloaded.peak_allocated_gib < kept.peak_allocated_gib
    assert not {"parameters", "gradients", "optimizer state"} & set(offloaded.breakdown)
    assert offloaded.unlike[0] == "offload"


# ---- which models ----------------------------------------------------------------------------------------


def test_an_encoder_decoder_is_planned() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, vocab_size=256)
    found = planned(config, world_size=2, batch_size=2, seq_len=16)
    assert found.unlike == ["a model without fused causal attention"]
    assert found.model == "T5ForConditionalGeneration"
    assert found.at_rest["parameters"] == pytest.approx(4 * found.parameters / 2 / 2**30, rel=0.05)


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state() -> None:
    small = LlamaConfig(**SMALL, vocab_size=64)

    def build() -> nn.Module:
        model = LlamaForCausalLM(small)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        return model

    options: dict[str, Any] = {"world_size": 2, "batch_size": 2, "seq_len": 32, "mp_policy": None}
    found, all_trained = plan(build, **options), plan(small, **options)
    parameters = list(build().parameters())
    frozen, trained = (
        sum(p.numel() * 4 for p in parameters if p.requires_grad is flag) / 2**30 for flag in (False, True)
    )
    assert found.at_rest == pytest.approx(
        {"parameters": (frozen + trained) / 2, "gradients": trained / 2, "optimizer state": trained}, rel=0.03
    )
    # no product for the gradient of a frozen matrix
    assert 0.6 < found.timing.model_flop / all_trained.timing.model_flop < 0.75
    assert found.unlike == ["computation in float32", "frozen parameters"]


@pytest.mark.parametrize("shard", [None, with_fsdp1])
def test_a_root_without_parameters_gathers_nothing(shard: Any) -> None:
    model = nn.Sequential(nn.Sequential(*(Block(32) for _ in range(2))))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"world_size": 2, "batch_size": 2, "mp_policy": policy, "shard": shard}
    found = plan(model, **options, inputs=lambda batch, _: torch.zeros(batch, 32))
    assert found.at_rest["parameters"] == pytest.approx(4 * found.parameters / 2 / 2**30, rel=0.03)
    in_forward = [m for m in found.moments if m.label.phase == "forward" and m.step == 2]
    assert not any("gathered parameters" in m.gib for m in in_forward if m.label.unit == "(root)")
    assert any("gathered parameters" in m.gib for m in in_forward)


def test_blocks_that_differ_are_all_simulated_and_the_callers_model_stays_as_it_was() -> None:
    model = Net()
    model.first[3].up = nn.Linear(32, 128, bias=False)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    found = plan(model, world_size=2, batch_size=2, inputs=tokens, checkpointing="full")
    assert found.notes[0] == "all blocks were simulated, because they do not repeat"
    assert {m.label.unit for m in found.moments} >= {f"first.{i}" for i in range(5)}
    assert "forward" not in vars(model.first[0])
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        torch.testing.assert_close(parameter, before[name][1])


# ---- how far off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differs", "options"),
    [
        ("", {"gpu": dataclasses.replace(GPUS["H100"], name="mine", network_gb_s=50)}),
        ("gpu L40S", {"gpu": "L40S"}),
        ("gpu H100", {"gpu": dataclasses.replace(GPUS["H100"], half_tflops=500)}),
    ],
)
def test_an_error_is_stated_for_plans_like_the_published_runs_alone(
    differs: str, options: dict[str, Any]
) -> None:
    found = plan(LlamaConfig(**SMALL, vocab_size=64), world_size=4, batch_size=4, seq_len=32, **options)
    assert found.unlike == ([differs] if differs else [])
    assert (found.step_s_range is None) == bool(differs)
    assert ("likely" in str(found)) == (not differs)
    if differs:
        assert found.notes[-1].endswith(f"none of the published runs that tell plan's error has {differs}")
    else:
        assert "published eager runs, 80% took" in found.notes[-1]

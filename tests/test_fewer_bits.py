"""Hold what lesson 22 says of its classes and no cell shows: padding, checkpoints, memory, lost hooks."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_utils import load_distributed, record_collectives, save_distributed
from tests.on_ranks import Together, on_ranks

on_two = Together(2)
(LESSON,) = (Path(__file__).parent.parent / "notebooks/src").glob("22_*.py")
SOURCE = LESSON.read_text(encoding="utf-8")


def lesson() -> ModuleType:
    """Return a module with the classes of the script and of the lesson's cell about 8 bits."""
    (script,) = re.findall(r"^# def pack\(.*?(?=^# for bits)", SOURCE, re.MULTILINE | re.DOTALL)
    (cells,) = re.findall(r"^aten, E4M3 =.*?(?=^# %% \[markdown)", SOURCE, re.MULTILINE | re.DOTALL)
    imports = "import math, torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    imports += "from torch.utils._pytree import tree_map_only\n"
    module = sys.modules["lesson_22"] = ModuleType("lesson_22")
    exec(imports + re.sub(r"^# ?", "", script, flags=re.MULTILINE) + cells, module.__dict__)
    return module


def sharded(weight: torch.Tensor, dtype: torch.dtype | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype))


def test_autograd_keeps_the_decoded_weight_of_a_layer_unless_it_is_checkpointed() -> None:
    module = lesson()
    layer = module.Layer(*module.pack(torch.randn(256, 256))).bfloat16()

    def kept(layer: nn.Module, *, requires_grad: bool) -> int:
        """Return the bytes of decoded weights that are kept for backward."""
        found: list[torch.Tensor] = []
        x = torch.ones(2, 256, dtype=torch.bfloat16, requires_grad=requires_grad)
        with saved_tensors_hooks(found.append, lambda _: torch.empty(0)):
            layer(x)
        return sum(t.nbytes for t in found if t.shape == (256, 256))

    assert kept(layer, requires_grad=True) == 128 * 1024
    assert kept(layer, requires_grad=False) == 0
    assert kept(checkpoint_wrapper(layer), requires_grad=True) == 0


def test_the_script_with_the_solution_of_turn_1_has_the_loss_that_the_lesson_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import test_series  # here: no rank needs what it imports

    code, _ = test_series.script(LESSON.stem)
    (solution,) = re.findall(r'tags=\["solution"\] turn=1\n(.*?)\n# %%', SOURCE, re.DOTALL)
    own = re.compile(r"^def pack\(.*?(?=^class Layer)", re.MULTILINE | re.DOTALL)
    assert len(own.findall(code)) == 1
    monkeypatch.chdir(tmp_path)
    printed = test_series.printed(own.sub(lambda _: solution + "\n\n", code))
    assert " 4 bits: a rank holds  8.5 KiB, gathers  38.0 KiB, loss 0.013\n" in printed
    assert "(in this script: loss 0.013)" in SOURCE.replace("\n# ", " ")


def test_a_float8_product_and_its_casts_are_as_fast_as_the_answer_says() -> None:
    from fsdp_utils.lessons import recorded  # here: no rank needs what it imports

    found = {row["setting"]: row.get("tflop_s") for row in recorded.load("costs")["results"]["rows"]}
    ratios = [found[f"float8, {rows} rows"] / found[f"bf16, {rows} rows"] for rows in (1024, 4096, 16384)]
    answers = (LESSON.parents[1] / "answers.md").read_text(encoding="utf-8")
    said = "{:.2f} of bf16's speed with 1,024 rows, {:.2f} with 4,096 and {:.2f} with 16,384"
    assert said.format(*ratios) in answers


@on_two
def test_a_gather_changes_no_bit_pattern_of_bf16() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 256)
    for dtype in (None, torch.bfloat16):
        layer = nn.Linear(256, 256, bias=False, device="meta", dtype=torch.bfloat16)
        layer.weight = nn.Parameter(patterns.view(torch.bfloat16).clone(), requires_grad=False)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype)).unshard()
        assert layer.weight.view(torch.int16).equal(patterns)


@on_two
def test_a_shard_that_is_no_hooked_one_any_more_is_gathered_in_param_dtype_without_an_error() -> None:
    weight = torch.randn(64, 64)
    for name in ("aten.new_zeros.default", "aten.slice.Tensor"):
        module = lesson()
        module.KEEP.remove(*[operation for operation in module.KEEP if str(operation) == name])
        layer = sharded(module.Float8(weight.clone()), torch.bfloat16)
        with record_collectives(layer) as trace:
            layer(torch.ones(1, 64))
        assert trace.bytes_by_kind() == {"all_gather": 2 * weight.numel()}


@on_two
def test_scales_that_turn_2_finds_take_the_all_reduces_out_of_the_step() -> None:
    module = lesson()
    (solution,) = re.findall(r'tags=\["solution"\] turn=2\n(.*?)\n# %%', SOURCE, re.DOTALL)
    (block,) = re.findall(r"^# class Scaled.*?(?=^# ```)", SOURCE, re.MULTILINE | re.DOTALL)
    kind, loop = re.sub(r"^# ?", "", block, flags=re.MULTILINE).split("\n\n")
    exec(f"{solution}\n{kind}", module.__dict__)
    weights = [torch.randn(64, 32), torch.randn(32, 64)]
    layers = [sharded(module.Scaled(weight.clone()), torch.bfloat16) for weight in weights]
    model = fully_shard(nn.Sequential(*layers))
    module.parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        module.parameters[0].to_local().scale = torch.ones(())
    assert not hasattr(module.parameters[0].to_local(), "scale")
    for _ in range(3):
        exec(loop, module.__dict__)
        with record_collectives(model) as trace:
            model(torch.ones(1, 32)).float().square().mean().backward()
        assert [e.kind for e in trace.collectives].count("all_gather") == 4
        assert {e.kind for e in trace.collectives} == {"all_gather", "reduce_scatter"}
        optimizer.step()
        optimizer.zero_grad()
    exec(loop, module.__dict__)
    for layer in layers:
        exact = layer.weight.full_tensor().detach()
        layer.unshard()
        assert (layer.weight - exact).norm() < 0.03 * exact.norm()


@on_two
def test_float8_pads_and_int8_cannot() -> None:
    module, weight = lesson(), torch.randn(9, 64)
    layer = sharded(module.Float8(weight.clone()))
    for _ in range(2):  # the second gather writes into the first one's weight
        layer(torch.ones(1, 64))
        assert (layer.weight - weight).norm() < 0.03 * weight.norm()
        layer.reshard()
    uneven = sharded(module.Int8(weight.clone()))
    if torch.distributed.get_rank() == 1:  # rank 0 has no padding, and would wait
        with pytest.raises(AssertionError, match="all-gather inputs with the padded sharded size"):
            uneven(torch.ones(1, 64))


@on_ranks(4)
def test_hooks_refuse_a_reshard_to_some_of_the_ranks() -> None:
    module, x = lesson(), torch.ones(1, 64)
    messages = {
        module.Int8: "Expected 1 all_gather_output, got 2",
        module.Float8: "only Tensors of floating point dtype can require gradients",
    }
    for kind, message in messages.items():
        for shards, raises in ((True, False), (2, True)):
            layer = nn.Linear(64, 64, bias=False, device="meta")
            layer.weight = nn.Parameter(kind(torch.randn(64, 64)))
            model = nn.Sequential(fully_shard(layer, reshard_after_forward=shards))
            fully_shard(model)  # so that the layer is not the root, which is not resharded after forward
            if raises:
                with pytest.raises((AssertionError, RuntimeError), match=message):
                    model(x)
            else:
                model(x).sum().backward()


@on_ranks()
def test_float8_shards_are_saved_in_float32_and_dcp_load_wants_to_know_the_class(tmp_path: Path) -> None:
    module, weight = lesson(), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    saved, plain, loaded = (sharded(w) for w in (module.Float8(weight), 0 * weight, 0 * weight))
    save_distributed(tmp_path / "ours", saved, step=1)
    load_distributed(tmp_path / "ours", plain)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "torchs")
    with pytest.raises(dcp.api.CheckpointException, match="Unsupported global: GLOBAL"):
        dcp.load(loaded.state_dict(), checkpoint_id=tmp_path / "torchs")
    with torch.serialization.safe_globals([module.Float8]):
        dcp.load(loaded.state_dict(), checkpoint_id=tmp_path / "torchs")
    assert all(model.weight.full_tensor().equal(weight) for model in (plain, loaded))


@on_two
def test_plain_shards_in_place_of_float8_lose_the_hooks() -> None:
    module, weight, x = lesson(), torch.randn(64, 64), torch.ones(1, 64)
    before, after, plain = (sharded(w) for w in (module.Float8(weight), module.Float8(weight), 0 * weight))
    state = plain.state_dict()
    after(x)
    after.reshard()
    after.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        after(x)
    before.load_state_dict(state, assign=True)
    with record_collectives(before) as trace:
        before(x)
    assert trace.bytes_by_kind() == {"all_gather": 4 * weight.numel()}


def test_a_model_that_is_converted_later_does_not_convert_inner() -> None:
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(lesson().Float8(layer.weight.detach()))
    layer.double()
    assert (layer.weight.dtype, layer.weight.inner.dtype) == (torch.float64, torch.float32)
    layer.to("meta")
    assert type(layer.weight) is nn.Parameter


def test_where_decoding_breaks_even_is_calculated() -> None:
    assert "links of {} and {} GB/s".format(*(round(3350 / moved) for moved in (23, 15))) in SOURCE.replace(
        "\n# ", " "
    )

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


def test_a_float8_product_and_its_casts_are_as_fast_as_the_lesson_says() -> None:
    from fsdp_utils.lessons import recorded  # here: no rank needs what it imports

    found = {row["setting"]: row.get("tflop_s") for row in recorded.load("costs")["results"]["rows"]}
    ratios = [found[f"float8, {rows} rows"] / found[f"bf16, {rows} rows"] for rows in (1024, 4096, 16384)]
    assert "{:.2f}, {:.2f} and {:.2f} times as fast".format(*ratios) in SOURCE.replace("\n# ", " ")


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

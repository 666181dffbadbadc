"""Which modules become units, and every way to wrap a model wrongly; on models written by hand."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from fsdp_utils import check_sharding, run_on_ranks, shard, transformer_block_classes
from fsdp_utils.sharding import wrapping
from tests.sharded import (
    HAND_WRITTEN,
    Block,
    HandWritten,
    Outcome,
    TwoRanks,
    assert_same,
    assert_same_fsdp1,
    compare,
    compare_fsdp1,
    fsdp1,
    hand_written_batch,
    one_problem,
    whole,
)

# ---- transformer_block_classes -------------------------------------------------------------------------


def test_the_layers_of_torchs_own_transformer_are_found() -> None:
    model = nn.Transformer(16, 2, num_encoder_layers=2, num_decoder_layers=2, batch_first=True)
    assert transformer_block_classes(model) == {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}


def test_the_outermost_repeated_class_is_the_block_of_a_hand_written_model() -> None:
    assert transformer_block_classes(HandWritten()) == {Block}


def test_blocks_may_hold_their_parameters_themselves_and_stand_in_a_dict() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

    layers = nn.ModuleDict({str(number): Scale() for number in range(2)})
    assert transformer_block_classes(nn.ModuleDict({"layers": layers, "head": nn.Linear(8, 8)})) == {Scale}


def test_a_block_that_stands_beside_the_list_is_a_block_too() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Block(), Block()])

    model = HandWritten()
    model.blocks = nn.ModuleList([Routed(), Routed()])
    model.last = Routed()
    assert transformer_block_classes(model) == {Routed}


def test_what_is_repeated_without_parameters_is_no_block() -> None:
    class Activation(nn.Module):
        pass

    with pytest.raises(ValueError, match=r"found no transformer blocks"):
        transformer_block_classes(nn.ModuleList([Activation(), Activation()]))


def test_they_are_found_on_the_meta_device_and_under_wrappers() -> None:
    with torch.device("meta"):
        model = HandWritten()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert transformer_block_classes(model) == {Block}
    assert transformer_block_classes(torch.compile(model, backend="eager")) == {Block}


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.ModuleList([Block()])],
    ids=["a layer", "plain layers", "only one"],
)
def test_a_model_without_blocks_is_refused_with_what_to_do(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__}: found no transformer blocks.*fully_shard"
    ):
        transformer_block_classes(model)


# ---- shard: equal to the unsharded model -------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["full", "grad_op"])
def test_a_sharded_hand_written_model_has_them_too(two_ranks: TwoRanks, strategy: str, tied: bool) -> None:
    def fn() -> Outcome:
        return compare(lambda: HandWritten(tied=tied), hand_written_batch, strategy=strategy)

    for outcome in two_ranks(fn):
        assert_same(outcome, units=4)


def test_torchs_own_transformer_has_them_too(two_ranks: TwoRanks) -> None:
    def make() -> nn.Module:
        return nn.Transformer(
            16, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32, batch_first=True
        )

    def batch() -> dict[str, Any]:
        x = torch.linspace(-1, 1, 2 * 4 * 16).reshape(2, 4, 16)
        return {"src": x, "tgt": x.flip(0)}

    for outcome in two_ranks(lambda: compare(make, batch)):
        assert_same(outcome, units=5)


def test_hybrid_shards_within_a_host_and_replicates_over_hosts() -> None:
    def fn() -> tuple[Outcome, list[str]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        outcome = compare(HandWritten, hand_written_batch, mesh=mesh, strategy="hybrid")
        model = shard(HandWritten(), mesh=mesh, strategy="hybrid")
        return outcome, [str(parameter.placements) for parameter in model.parameters()]

    for outcome, placements in run_on_ranks(fn, world_size=4):
        assert_same(outcome, units=4)
        assert set(placements) == {"(Replicate(), Shard(dim=0))"}


def test_the_strategy_decides_what_stays_gathered_after_forward(two_ranks: TwoRanks) -> None:
    def fn(strategy: str) -> list[bool]:
        model = shard(HandWritten(), strategy=strategy)
        model(**hand_written_batch())
        return [isinstance(parameter, DTensor) for parameter in model.blocks.parameters()]

    for freed in ("full", "FULL_SHARD", "zero3"):
        assert all(all(sharded) for sharded in two_ranks(fn, freed))
    for kept in ("grad_op", "SHARD_GRAD_OP", "zero2"):
        assert not any(any(sharded) for sharded in two_ranks(fn, kept))


def test_the_strategy_holds_for_a_model_inside_another_fsdp_model_too(two_ranks: TwoRanks) -> None:
    """Its own unit is no root then: torch's default would free it after forward."""

    def fn(strategy: str) -> bool:
        model = HandWritten()
        outer = fully_shard(nn.Sequential(shard(model, strategy=strategy)))
        outer(**{"input": hand_written_batch()["x"]})
        return isinstance(model.embedding.weight, DTensor)

    assert two_ranks(fn, "full") == [True, True]
    assert two_ranks(fn, "grad_op") == [False, False]


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda")])
def test_on_a_machine_with_a_gpu_the_backend_decides_where_the_model_is(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(wrapping, "init_device_mesh", lambda *arguments: arguments)
    assert wrapping._mesh(None, "full", None) == (device, (8,))


def test_frozen_parameters_stay_frozen_and_the_rest_trains(two_ranks: TwoRanks) -> None:
    def make() -> nn.Module:
        model = HandWritten()
        for block in model.blocks[:2]:
            block.mlp[0].requires_grad_(False)  # a unit with both kinds
        return model

    for outcome in two_ranks(lambda: compare(make, hand_written_batch)):
        assert_same(outcome, units=4)


def test_policies_reach_every_unit(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[set[torch.dtype], set[torch.dtype], list[str]]:
        model = shard(
            HandWritten(),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
        seen: set[torch.dtype] = set()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda module, _, output: seen.update({module.weight.dtype, output.dtype})
                )
        model(**hand_written_batch())[0].sum().backward()
        offload = {
            type(unit._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
            for unit in model.modules()
            if isinstance(unit, FSDPModule)
        }
        return seen, {parameter.dtype for parameter in model.parameters()}, sorted(offload)

    for compute, kept, offload in two_ranks(fn):
        assert compute == {torch.bfloat16}
        assert kept == {torch.float32}
        assert offload == ["CPUOffloadPolicy"]


def test_blocks_that_share_a_parameter_are_one_unit_and_those_that_share_with_the_root_are_none(
    two_ranks: TwoRanks,
) -> None:
    def make() -> nn.Module:
        model = HandWritten()
        model.blocks.extend([Block(), Block()])  # five
        model.blocks[0].mlp[0].weight = model.blocks[2].mlp[0].weight
        model.blocks[1].mlp[0].weight = model.blocks[4].mlp[0].weight
        model.blocks[4].mlp[2].bias = model.head[0].bias
        return model

    def fn() -> tuple[Outcome, list[set[str]]]:
        outcome = compare(make, hand_written_batch)
        model = shard(make())
        by_state: dict[Any, set[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                by_state.setdefault(module._get_fsdp_state(), set()).add(name)
        return outcome, list(by_state.values())

    for outcome, units in two_ranks(fn):
        assert (outcome.loss, outcome.differing, outcome.unsharded) == (
            pytest.approx(outcome.plain_loss),
            [],
            [],
        )
        assert {frozenset(unit) for unit in units} == {
            frozenset({"blocks.0", "blocks.2"}),
            frozenset({"blocks.3"}),
            frozenset({""}),
        }


def test_a_checkpointed_block_is_sharded_with_its_wrapper(two_ranks: TwoRanks) -> None:
    def make() -> nn.Module:
        model = HandWritten()
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    def fn() -> tuple[Outcome, list[str]]:
        units = [
            type(module).__name__ for module in shard(make()).modules() if isinstance(module, FSDPModule)
        ]
        return compare(make, hand_written_batch), units

    for outcome, units in two_ranks(fn):
        assert_same(outcome, units=4)
        assert units == ["FSDPHandWritten", *["FSDPCheckpointWrapper"] * 3]


def test_the_policy_makes_each_block_a_unit_of_fsdp1(two_ranks: TwoRanks) -> None:
    for outcomes in two_ranks(lambda: compare_fsdp1(HAND_WRITTEN)):
        assert_same_fsdp1(outcomes, HAND_WRITTEN)


# ---- shard: what it refuses ------------------------------------------------------------------------------


def test_shard_refuses_what_it_cannot_do_with_what_to_do(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        flat = init_device_mesh("cpu", (2,))
        square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        messages = []
        for options in (
            {"strategy": "NO_SHARD"},
            {"strategy": ["full"]},
            {"strategy": "HYBRID_SHARD"},
            {"strategy": "hybrid", "mesh": flat},
            {"strategy": "full", "mesh": square},
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 the messages are compared below
                shard(HandWritten(), **options)
            messages.append(str(caught.value))
        return messages

    for unknown, no_name, no_mesh, flat, square in two_ranks(fn):
        assert unknown == (
            'shard: expected strategy "full", "grad_op" or "hybrid" (or FULL_SHARD, zero3, '
            "SHARD_GRAD_OP, zero2, HYBRID_SHARD), found 'NO_SHARD'"
        )
        assert no_name.endswith("found ['full']")
        assert no_mesh == flat
        assert flat.startswith('shard: strategy "hybrid" expects a 2-D mesh, found a 1-D one.')
        assert "init_device_mesh" in flat
        assert square.startswith('shard: strategy "full" expects a 1-D mesh, found a 2-D one.')


def transposed(*blocks: int) -> nn.Module:
    model = HandWritten()
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    for block in blocks:
        model.blocks[block].extra = nn.Parameter(torch.ones(4, 6).t())
    return model


def one_block_sharded() -> nn.Module:
    model = HandWritten()
    fully_shard(model.blocks[1])
    return model


UNSHARDABLE = {
    "twice": (lambda: shard(HandWritten()), "the model is an FSDP unit already.*call it once"),
    "a block": (one_block_sharded, r"blocks\.1 is an FSDP unit already.*on other modules only"),
    "only the root": (lambda: fully_shard(HandWritten()), "the model is an FSDP unit already"),
    "FSDP1": (lambda: fsdp1(HandWritten()), "the model is wrapped in FullyShardedDataParallel already"),
    "DDP inside": (
        lambda: nn.ModuleDict({"net": nn.parallel.DistributedDataParallel(HandWritten())}),
        "net is wrapped in DistributedDataParallel already",
    ),
    "no forward": (lambda: HandWritten().blocks, "expected a model with a forward, found a ModuleList"),
    "transposed": (lambda: transposed(2), r"not contiguous; found blocks\.2\.extra\. Assign"),
    "three": (lambda: transposed(0, 1, 2), r"blocks\.1\.extra, blocks\.2\.extra\. Assign"),
    "four": (
        lambda: transposed(0, 1, 2, 3),
        r"found blocks\.0\.extra, blocks\.1\.extra, blocks\.2\.extra and 1 more\. .*Nothing was changed",
    ),
}


def refusals() -> dict[str, tuple[str, bool]]:
    """What shard says of each, and whether it left the model as it was."""
    found = {}
    for name, (make, _) in UNSHARDABLE.items():
        model = make()
        before = [(type(module), list(module._parameters.values())) for module in model.modules()]
        with pytest.raises(ValueError, match=r"^shard: ") as caught:
            shard(model)
        after = [(type(module), list(module._parameters.values())) for module in model.modules()]
        same = all(
            cls is new_cls and all(p is q for p, q in zip(parameters, new, strict=True))
            for (cls, parameters), (new_cls, new) in zip(before, after, strict=True)
        )
        found[name] = str(caught.value), same
    return found


def test_what_cannot_be_sharded_is_refused_before_anything_changes(two_ranks: TwoRanks) -> None:
    first, second = two_ranks(refusals)
    assert first == second
    for name, (_, words) in UNSHARDABLE.items():
        message, same = first[name]
        assert re.search(words, message), message
        assert same, name


class Listed(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class Uncalled(nn.Module):
    """Has another method than forward, as register_fsdp_forward_method takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Listed([Block(), Block()])


def test_a_list_with_a_forward_and_a_module_without_one_are_sharded(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        return [check_sharding(shard(model)) for model in (Listed([Block(), Block()]), Uncalled())]

    assert two_ranks(fn) == [[[], []]] * 2


def test_other_modules_than_blocks_may_be_units_already(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        fully_shard(model.embedding)
        fully_shard(model.blocks[0].mlp)
        return check_sharding(shard(model))

    assert two_ranks(fn) == [[], []]


def test_shard_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"no process group.*torchrun.*run_on_ranks"):
        shard(HandWritten())


def sharded_in(version: str) -> str:
    """What shard says on this rank where torch is of that version; "" if nothing."""
    torch.__version__ = TorchVersion(version)
    try:
        shard(HandWritten())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_torch_whose_gloo_adds_gradients_up_is_refused(two_ranks: TwoRanks) -> None:
    assert two_ranks(sharded_in, "2.9.0") == ["", ""]
    for refused in two_ranks(sharded_in, "2.8.0+cu128"):
        assert refused.startswith("shard: on ranks that talk through gloo, FSDP2 expects torch 2.9 or later")
        assert "found 2.8.0+cu128" in refused


def test_an_older_torch_may_shard_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0"))
    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    mesh: Any = SimpleNamespace(get_all_groups=lambda: ["nccl"])
    wrapping._refuse_gloo_that_adds(mesh)
    mesh = SimpleNamespace(get_all_groups=lambda: ["nccl", "gloo"])
    with pytest.raises(RuntimeError, match=r"expects torch 2\.9 or later"):
        wrapping._refuse_gloo_that_adds(mesh)


# ---- check_sharding --------------------------------------------------------------------------------------


def test_a_model_that_is_not_sharded_is_told_so() -> None:
    assert check_sharding(HandWritten()) == [
        "The model is not sharded: no module in it is an FSDP unit. Call shard(model), or fully_shard."
    ]


def test_a_model_in_ddp_is_no_problem(two_ranks: TwoRanks) -> None:
    assert two_ranks(lambda: check_sharding(nn.parallel.DistributedDataParallel(HandWritten()))) == [[], []]


def test_only_the_root_is_a_unit(two_ranks: TwoRanks) -> None:
    def with_fsdp2() -> list[str]:
        return check_sharding(fully_shard(HandWritten()))

    def with_fsdp1() -> list[str]:
        return check_sharding(fsdp1(HandWritten(), use_orig_params=True))

    message = one_problem(two_ranks, with_fsdp2)
    assert message.startswith("Only the root is a unit")
    assert "saves memory only on the optimizer's state, and between the steps" in message
    assert message.endswith("Call fully_shard on each Block before the model, or shard(model) instead.")
    message = one_problem(two_ranks, with_fsdp1)
    assert message.startswith("Only the root is a unit")
    assert message.endswith(
        "Pass auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)) to FSDP."
    )


def test_where_nothing_is_a_block_it_is_said_of_parts(two_ranks: TwoRanks) -> None:
    message = one_problem(two_ranks, lambda: check_sharding(fully_shard(nn.Linear(4, 4))))
    assert message.endswith("Call fully_shard on each part before the model, or shard(model) instead.")
    message = one_problem(two_ranks, lambda: check_sharding(fsdp1(nn.Linear(4, 4))))
    assert message.endswith("Pass auto_wrap_policy=a policy to FSDP.")


def test_the_root_was_forgotten(two_ranks: TwoRanks) -> None:
    def with_fsdp2() -> list[str]:
        model = HandWritten()
        for block in model.blocks:
            fully_shard(block)
        return check_sharding(model)

    def with_fsdp1() -> list[str]:
        model = HandWritten()
        for number, block in enumerate(model.blocks):
            model.blocks[number] = fsdp1(block)
        return check_sharding(model)

    for fn, what_to_do in ((with_fsdp2, "Call fully_shard(model)"), (with_fsdp1, "Wrap the whole model")):
        message = one_problem(two_ranks, fn)
        assert message.startswith("4 parameters are in no unit (such as embedding.weight)")
        assert what_to_do in message


def test_the_class_that_was_wrapped_is_not_the_blocks(two_ranks: TwoRanks) -> None:
    def with_fsdp2() -> list[str]:
        model = HandWritten()
        fully_shard(model.embedding)
        return check_sharding(fully_shard(model))

    def with_fsdp1() -> list[str]:
        return check_sharding(fsdp1(HandWritten(), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding})))

    for fn in (with_fsdp2, with_fsdp1):
        message = one_problem(two_ranks, fn)
        assert message.startswith("3 of 3 blocks (Block) are not units, such as blocks.0")
        assert "it was not theirs" in message


def test_one_block_was_left_out(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        for block in model.blocks[:2]:
            fully_shard(block)
        return check_sharding(fully_shard(model))

    assert one_problem(two_ranks, fn).startswith("1 of 3 blocks (Block) are not units, such as blocks.2")


def test_finer_and_coarser_units_than_blocks_are_no_problem(two_ranks: TwoRanks) -> None:
    def finer() -> list[str]:
        model = HandWritten()
        for block in model.blocks:
            fully_shard(block.mlp)
        return check_sharding(fully_shard(model))

    def coarser() -> list[str]:
        model = HandWritten()
        model.blocks.append(Block())
        fully_shard(list(model.blocks[:2]))  # half of the blocks' parameters
        fully_shard(list(model.blocks[2:]))
        return check_sharding(fully_shard(model))

    assert two_ranks(finer) == two_ranks(coarser) == [[], []]


def test_several_blocks_are_in_one_unit(two_ranks: TwoRanks) -> None:
    def with_fsdp2() -> list[str]:
        model = HandWritten()
        fully_shard(list(model.blocks[:2]))
        fully_shard(model.blocks[2])
        return check_sharding(fully_shard(model))

    def with_fsdp1() -> list[str]:
        model = HandWritten()
        model.blocks = fsdp1(nn.Sequential(*model.blocks))
        return check_sharding(fsdp1(model))

    message = one_problem(two_ranks, with_fsdp2)
    assert message.startswith(
        "2 of 3 blocks (Block) are in one unit (blocks.0, blocks.1), which gathers 67% of all"
    )
    assert message.endswith("Call fully_shard on each Block before the model, or shard(model) instead.")
    message = one_problem(two_ranks, with_fsdp1)
    assert message.startswith("3 of 3 blocks (Block) are in one unit (blocks), which gathers 100% of all")
    assert message.endswith(
        "Pass auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)) to FSDP."
    )


def test_blocks_that_share_a_parameter_are_rightly_in_one_unit(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        for block in model.blocks[1:]:
            block.mlp[0].weight = model.blocks[0].mlp[0].weight
        return check_sharding(shard(model))

    assert two_ranks(fn) == [[], []]


class Part(nn.Module):
    """Two parameters of as many elements as asked for."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(first, 1, bias=False), nn.Linear(second, 1, bias=False)


class Other(Part):
    pass


@pytest.mark.parametrize(("elements", "found"), [(50, {Part, Other}), (49, {Part})])
def test_a_repeated_class_with_a_tenth_of_the_parameters_is_a_block_and_with_less_is_none(
    elements: int, found: set[type]
) -> None:
    large, small = [Part(200, 250), Part(200, 250)], [Other(elements - 9, 9), Other(elements - 9, 9)]
    model = nn.ModuleDict({"large": nn.ModuleList(large), "small": nn.ModuleList(small)})
    assert transformer_block_classes(model) == found  # 2 * 450 and 2 * elements


@pytest.mark.parametrize(("left_out", "problems"), [(100, 0), (101, 1)])
def test_a_block_of_which_a_tenth_is_left_to_the_root_is_a_unit_and_with_more_is_none(
    two_ranks: TwoRanks, left_out: int, problems: int
) -> None:
    def fn() -> list[str]:
        model = nn.Sequential(Part(900, left_out), Part(900, left_out))
        for part in model:
            fully_shard(part.first)
        return check_sharding(fully_shard(model))

    for found in two_ranks(fn):
        assert len(found) == problems
        assert all(problem.startswith("2 of 2 blocks (Part) are not units, such as 0:") for problem in found)


@pytest.mark.parametrize(("in_root", "problems"), [(200, 0), (201, 1)])
def test_half_of_the_parameters_may_be_in_the_root_and_no_more(
    two_ranks: TwoRanks, in_root: int, problems: int
) -> None:
    def fn() -> list[str]:
        model = nn.Sequential(Part(50, 50), Part(50, 50), nn.Linear(in_root, 1, bias=False))
        return check_sharding(shard(model))

    for found in two_ranks(fn):
        assert len(found) == problems
        assert all(problem.startswith("50% of the parameters are in the root") for problem in found)


@pytest.mark.parametrize(("in_one", "problems"), [(200, 0), (201, 1)])
def test_half_of_the_blocks_may_be_in_one_unit_and_no_more(
    two_ranks: TwoRanks, in_one: int, problems: int
) -> None:
    def fn() -> list[str]:
        model = nn.Sequential(Part(60, 40), Part(in_one - 150, 50), Part(60, 40), Part(60, 40))
        fully_shard([model[0], model[1]])
        for block in model[2:]:
            fully_shard(block)
        return check_sharding(fully_shard(model))

    for found in two_ranks(fn):
        assert len(found) == problems
        assert all(problem.startswith("2 of 4 blocks (Part) are in one unit (0, 1),") for problem in found)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_most_parameters_are_left_in_the_root(two_ranks: TwoRanks, use_orig_params: bool) -> None:
    def with_fsdp2() -> list[str]:
        return check_sharding(shard(HandWritten(vocabulary=1000)))

    def with_fsdp1() -> list[str]:
        model = HandWritten(vocabulary=1000)
        return check_sharding(
            fsdp1(
                model,
                auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)),
                use_orig_params=use_orig_params,
            )
        )

    # root: 2 * 1000 * 8 + 8 * 8 + 8 = 16072; blocks: 3 * (2 * 8 * 32 + 32 + 8) = 1656
    for fn in (with_fsdp2, with_fsdp1):
        message = one_problem(two_ranks, fn)
        assert message.startswith("91% of the parameters are in the root's unit")
        assert "the largest is embedding.weight" in message


def test_a_unit_of_fsdp1_mixes_frozen_and_trained_parameters(two_ranks: TwoRanks) -> None:
    def mixed() -> HandWritten:
        model = HandWritten()
        model.blocks[1].mlp[0].requires_grad_(False)
        return model

    def with_fsdp1() -> list[str]:
        model = mixed()
        with pytest.warns(UserWarning, match="gradient memory usage will be higher"):  # torch's own
            model = fsdp1(
                model,
                auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)),
                use_orig_params=True,
            )
        problems = check_sharding(model)
        model(**hand_written_batch())[0].sum().backward()
        flat = model.module.blocks[1]._handle.flat_param
        assert flat.grad.shape == flat.shape  # what the message says: a gradient for the frozen ones, too
        return problems

    message = one_problem(two_ranks, with_fsdp1)
    assert message.startswith("The unit blocks.1 mixes 2 frozen parameters with 2 trained ones")
    assert two_ranks(lambda: check_sharding(shard(mixed()))) == [[], []]


def test_a_unit_of_fsdp1_that_is_wholly_frozen_is_no_problem(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        model.blocks[1].requires_grad_(False)
        return check_sharding(
            fsdp1(
                model,
                auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)),
                use_orig_params=True,
            )
        )

    assert two_ranks(fn) == [[], []]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changed the model."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(**hand_written_batch())[0].square().sum().backward()
    optimizer.step()
    changed = [not torch.equal(whole(a), whole(b)) for a, b in zip(before, model.parameters(), strict=True)]
    return any(changed)


def test_the_optimizer_holds_parameters_from_before_sharding(two_ranks: TwoRanks) -> None:
    def with_fsdp2() -> list[str]:
        model = HandWritten()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model)
        problems = check_sharding(model, optimizer)
        assert not train_step(model, optimizer)  # what the message says
        return problems

    def with_fsdp1() -> list[str]:
        model = HandWritten()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = fsdp1(model, auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)))
        problems = check_sharding(model, optimizer)
        assert not train_step(model, optimizer)
        return problems

    for fn in (with_fsdp2, with_fsdp1):
        message = one_problem(two_ranks, fn)
        assert message.startswith("The optimizer holds 16 parameters that are not in the model")
        assert "Build the optimizer after sharding" in message


def test_an_optimizer_of_the_sharded_parameters_is_no_problem_at_any_time(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        model = shard(HandWritten(), strategy="grad_op")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        problems = [check_sharding(model, optimizer)]
        output = model(**hand_written_batch())[0]
        problems.append(check_sharding(model, optimizer))  # here all parameters are gathered
        output.sum().backward()
        problems.append(check_sharding(model, optimizer))
        assert train_step(model, optimizer)
        return problems

    def before_fsdp1_with_the_original_parameters() -> list[list[str]]:
        model = HandWritten()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = fsdp1(
            model, auto_wrap_policy=ModuleWrapPolicy(transformer_block_classes(model)), use_orig_params=True
        )
        return [check_sharding(model, optimizer)] * train_step(model, optimizer)

    assert two_ranks(fn) == [[[], [], []]] * 2
    assert two_ranks(before_fsdp1_with_the_original_parameters) == [[[]]] * 2


def test_a_sharded_model_inside_a_training_wrapper_is_no_problem(two_ranks: TwoRanks) -> None:
    class Task(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    def fn() -> tuple[list[str], list[str]]:
        policy = ModuleWrapPolicy(transformer_block_classes(HandWritten()))
        return check_sharding(Task(shard(HandWritten()))), check_sharding(
            Task(fsdp1(HandWritten(), auto_wrap_policy=policy))
        )

    assert two_ranks(fn) == [([], [])] * 2


def test_a_problem_is_seen_through_a_training_wrapper_and_not_made_up_for_two_models_in_it(
    two_ranks: TwoRanks,
) -> None:
    def fn() -> tuple[list[str], list[str]]:
        top_heavy = shard(HandWritten(vocabulary=1000))  # most parameters in its root's unit
        alone = check_sharding(nn.ModuleDict({"model": top_heavy}))
        return alone, check_sharding(nn.ModuleDict({"model": top_heavy, "teacher": shard(HandWritten())}))

    for alone, with_teacher in two_ranks(fn):
        assert len(alone) == 1
        assert alone[0].startswith("91% of the parameters are in the root's unit")
        assert with_teacher == []


def test_an_optimizer_that_trains_another_model_too_is_no_problem(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model, probe = shard(HandWritten()), nn.Linear(8, 8)
        return check_sharding(model, torch.optim.SGD([*model.parameters(), *probe.parameters()], lr=0.1))

    assert two_ranks(fn) == [[], []]


def test_several_problems_are_all_told(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return check_sharding(fully_shard(model), optimizer)

    for problems in two_ranks(fn):
        assert [problem.split()[0] for problem in problems] == ["Only", "The"]

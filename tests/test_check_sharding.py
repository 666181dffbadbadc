"""check_sharding: the mistakes that it finds, what it says of them, and that it is silent on right models."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_utils import ChildTuningAdamW, check_sharding, shard, transformer_block_classes
from tests.on_ranks import Together, case
from tests.sharded import HandWritten, fsdp1, hand_written_batch, whole

on_two = Together(2)


def fsdp1_by_block(model: nn.Module, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy(transformer_block_classes(model))
    return fsdp1(model, auto_wrap_policy=policy, **options)


def hybrid(**options: Any) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return shard(HandWritten(), strategy="hybrid", mesh=mesh, **options)


def units(model: nn.Module, *parts: Any) -> Any:
    """The model with these parts as units, and then itself; a part is a module or a list of them."""
    for part in parts:
        fully_shard(part)
    return fully_shard(model)


# ---- the choice of units ----


def without_root(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = HandWritten()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return model


def layers_only() -> nn.Module:
    return nn.Sequential(*[fully_shard(nn.Linear(8, 8)) for _ in range(3)])


def embedding_only() -> nn.Module:
    model = HandWritten()
    return units(model, model.embedding)


def all_but_one() -> nn.Module:
    model = HandWritten()
    return units(model, *model.blocks[:2])


def finer() -> nn.Module:
    model = HandWritten()
    return units(model, *(block.mlp for block in model.blocks))


def two_in_one() -> nn.Module:
    model = HandWritten()
    return units(model, list(model.blocks[:2]), model.blocks[2])


def sharing() -> nn.Module:
    model = HandWritten()
    for block in model.blocks[1:]:
        block.mlp[0].weight = model.blocks[0].mlp[0].weight
    return shard(model)


def top_heavy() -> HandWritten:
    # root: 2 * 1000 * 8 + 8 * 8 + 8 = 16072; blocks: 3 * (2 * 8 * 32 + 32 + 8) = 1656
    return HandWritten(vocabulary=1000)


CALL_SHARD = r"Call fully_shard on each Block before the model, or shard\(model\) instead\.$"
GIVE_POLICY = r"Pass auto_wrap_policy=ModuleWrapPolicy\(transformer_block_classes\(model\)\) to FSDP\.$"
ONLY_ROOT = r"^100% of the parameters are in one unit, \(root\), so that each rank holds them .*blocks\.0.*"
NO_UNITS = r"^3 of 3 blocks \(Block\) are not units, such as blocks\.0.*"
FORGOTTEN = r"^4 parameters are in no unit \(such as embedding\.weight\).*"
TOP_HEAVY = r"^91% of the parameters are in one unit, \(root\), .*the largest is embedding.weight"
# The model, and what is said of it.
UNITS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "not sharded": (HandWritten, [r"^The model is not sharded.*Call shard\(model\), or fully_shard\.$"]),
    "DDP": (lambda: DDP(HandWritten()), []),
    "by block": (lambda: fsdp1_by_block(HandWritten(), use_orig_params=True), []),
    "only the root": (lambda: fully_shard(HandWritten()), [ONLY_ROOT + CALL_SHARD]),
    "only the root, FSDP1": (lambda: fsdp1(HandWritten(), use_orig_params=True), [ONLY_ROOT + GIVE_POLICY]),
    "no root": (lambda: without_root(fully_shard), [FORGOTTEN + r"Call fully_shard\(model\)"]),
    "no root, FSDP1": (lambda: without_root(fsdp1), [FORGOTTEN + "Wrap the whole model"]),
    "layers without the model": (
        layers_only,
        [r"^3 units, such as 0, lie in no other one.*Call fully_shard\(model\)"],
    ),
    "another class": (embedding_only, [NO_UNITS + CALL_SHARD]),
    "one block left out": (all_but_one, [r"^1 of 3 blocks \(Block\) are not units, such as blocks\.2"]),
    "finer": (finer, []),
    "two in one": (
        two_in_one,
        [r"^56% of the parameters are in one unit, blocks\.0, blocks\.1, .*" + CALL_SHARD],
    ),
    "blocks that share a parameter": (sharing, [ONLY_ROOT + "Make its module a unit too, before the root"]),
    "top-heavy": (lambda: shard(top_heavy()), [TOP_HEAVY]),
    "inside a training wrapper": (lambda: nn.ModuleDict({"model": shard(HandWritten())}), []),
    "one in a list": (
        lambda: nn.ModuleList([fully_shard(nn.Linear(8, 8))]),
        [r"^100% of the parameters are in one unit, 0, "],
    ),
    "with a teacher": (
        lambda: nn.ModuleDict({"model": shard(top_heavy()), "teacher": shard(HandWritten())}),
        [],
    ),
}


@on_two
def test_units_are_chosen_well() -> None:
    for name, (make, expected) in UNITS.items():
        with case(name):
            assert_said(check_sharding(make()), expected)


def assert_said(problems: list[str], expected: list[str]) -> None:
    assert len(problems) == len(expected), problems
    for problem, words in zip(problems, expected, strict=True):
        assert re.search(words, problem), problem


# ---- the optimizer ----


def changes(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changed the model."""
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    model(**hand_written_batch())[0].square().sum().backward()
    optimizer.step()
    return any(not torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


STRANGERS = "^The optimizer holds {} parameters that are not the sharded model's.*after sharding"


@on_two
def test_an_optimizer_from_before_sharding() -> None:
    for wrap in (shard, fsdp1_by_block):
        model = HandWritten()
        optimizer = sgd(model)
        assert_said(check_sharding(model := wrap(model), optimizer), [STRANGERS.format(16)])
        assert not changes(model, optimizer)  # what the message says


@on_two
def test_an_optimizer_of_gathered_parameters() -> None:
    """After an evaluation the root stays gathered, and model.parameters() gives what is freed later."""
    model = shard(HandWritten())
    with torch.no_grad():
        model(**hand_written_batch())
    early = sgd(model)
    model.reshard()
    optimizer = sgd(model)
    assert_said(check_sharding(model, early), [STRANGERS.format(4)])
    assert check_sharding(model, optimizer) == []
    weight = whole(model.embedding.weight.detach()).clone()
    model(**hand_written_batch())[0].square().sum().backward()
    early.step()  # what the message says
    assert torch.equal(whole(model.embedding.weight.detach()), weight)
    optimizer.step()
    assert not torch.equal(whole(model.embedding.weight.detach()), weight)


@on_two
def test_the_right_optimizer_is_no_problem_at_any_time() -> None:
    model = shard(HandWritten(), strategy="grad_op")
    optimizer = sgd(model)
    assert check_sharding(model, optimizer) == []
    output = model(**hand_written_batch())[0]
    assert check_sharding(model, optimizer) == []  # here all parameters are gathered
    output.sum().backward()
    assert changes(model, optimizer)
    assert check_sharding(model, sgd(model, nn.Linear(8, 8))) == []  # which trains another one too
    both = [*model.parameters(), *shard(HandWritten()).parameters()]
    matrices = torch.optim.SGD([parameter for parameter in both if parameter.dim() == 2], lr=0.1)
    assert check_sharding(model, matrices) == []
    original = HandWritten()
    optimizer = sgd(original)
    assert check_sharding(fsdp1_by_block(original, use_orig_params=True), optimizer) == []


class WithMasters(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None: ...


@on_two
def test_parameters_in_bf16_without_masters() -> None:
    held = r"^4 trainable parameters are held in bfloat16 \(such as 0\.weight\), and {} keeps no float32"
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    nn.init.normal_(model[0].weight, std=0.02)
    units(model, *model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for optimizer in (adamw, ChildTuningAdamW(model.parameters())):
        assert_said(check_sharding(model, optimizer), [held.format(type(optimizer).__name__)])
    assert check_sharding(model, WithMasters(model.parameters())) == check_sharding(model) == []
    before = whole(model[0].weight.detach()).clone()
    model(torch.randn(8, 64).bfloat16()).square().sum().backward()
    adamw.step()
    assert (whole(model[0].weight.detach()) == before).float().mean() > 0.8  # "most weights never move"
    model.requires_grad_(False)
    assert check_sharding(model, adamw) == []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mixed = shard(HandWritten(), strategy="grad_op", mp_policy=policy)
    adamw = torch.optim.AdamW(mixed.parameters())
    mixed(**hand_written_batch())  # now the model holds gathered parameters in bf16
    assert check_sharding(mixed, adamw) == []


# ---- gradient sync ----


@on_two
def test_gradient_sync_that_was_left_off() -> None:
    def assert_off(model: nn.Module, units: int) -> None:
        mend = r"model\.set_requires_gradient_sync\(True\)"
        off = rf"^Gradient sync is off in {units} units \(such as \(root\)\): .*{mend}"
        assert_said(check_sharding(model), [off])

    model: Any = shard(HandWritten())
    model.set_requires_gradient_sync(False)
    assert_off(model, 4)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)  # there are no replicas
    assert check_sharding(model) == []
    replicated = hybrid()
    replicated.set_requires_all_reduce(False)
    assert_off(replicated, 4)
    for wrapped, count in ((fsdp1_by_block(HandWritten()), 4), (DDP(HandWritten()), 1)):
        with wrapped.no_sync():  # type: ignore[operator]
            assert_off(wrapped, count)
        assert check_sharding(wrapped) == []


@on_two
def test_fsdp1_with_shard_groups_of_one_rank_does_not_sync() -> None:
    """https://github.com/volcengine/verl/issues/7493"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        model = fsdp1_by_block(HandWritten(), sharding_strategy=strategy, device_mesh=mesh)
    for wrapped, said in (
        (model, ["^Replicas of a parameter differ.* FSDP1's HYBRID_SHARD"]),
        (hybrid(), []),
    ):
        assert check_sharding(wrapped) == []
        wrapped(hand_written_batch()["x"] + dist.get_rank())[0].square().sum().backward()
        sgd(wrapped).step()
        assert_said(check_sharding(wrapped), said)


# ---- copies that differ between ranks ----


@on_two
def test_replicas_that_differ_are_named() -> None:
    for make, name in ((hybrid, "embedding.weight"), (lambda: DDP(HandWritten()), "module.embedding.weight")):
        model = make()
        with torch.no_grad():
            parameter = next(model.parameters())
            parameter[0, 0] = float("nan")  # which equals itself here
            assert check_sharding(model) == []
            if dist.get_rank() == 1:  # what an xor or a sum of the elements does not see
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.copy_(-own.flip(0))
        said = f"^Replicas of a parameter differ between ranks: '{name}' on rank 1 differs from rank 0. Build"
        assert_said(check_sharding(model), [said])


@on_two
def test_buffers_and_ignored_parameters_that_differ_are_named() -> None:
    torch.manual_seed(dist.get_rank())  # shards of two seeds make up one model
    model = HandWritten()
    model.head[0] = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8))
    model.head[0][0].extra = ignored = nn.Parameter(torch.zeros(2))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params={ignored})
    assert check_sharding(model) == []
    ignored.data.add_(dist.get_rank())
    differ = "^Replicas of a parameter differ between ranks: 'head.0.0.extra' on rank 1"
    assert_said(check_sharding(model), [differ])
    ignored.data.zero_()
    model.head[0][0](torch.randn(4, 8))
    differ = "^Buffers differ between ranks: 'head.0.0.running_mean' on .*SyncBatchNorm"
    assert_said(check_sharding(model), [differ])
    model = DDP(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)))
    model(torch.randn(4, 8) + dist.get_rank())  # the next forward begins with rank 0's statistics
    assert check_sharding(model) == []
    named = HandWritten()
    for number, name in enumerate("ab" if dist.get_rank() else "bac"):
        named.register_buffer(name, torch.full((2,), float(number)))
    named.register_buffer("shape", torch.zeros((2, 2) if dist.get_rank() else (4,)))
    differ = "'a' on rank 1 .*'b' on rank 1 .*'shape' on rank 1 differs from rank 0"
    assert_said(check_sharding(shard(named)), [differ])


@on_two
def test_correct_programs_raise_no_alarm() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    alone: Any = HandWritten()  # each rank trains a model of its own
    alone.register_buffer("own", torch.full((2,), float(rank)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "shard"))["shard"]
    assert check_sharding(shard(alone, mesh=mesh)) == []
    odd = hybrid()
    odd.register_buffer("sparse", torch.eye(2).to_sparse())
    odd.register_buffer("freed", torch.zeros(9))
    odd.freed.untyped_storage().resize_(0)
    with torch.inference_mode():
        assert check_sharding(odd) == []


@on_two
def test_a_rank_that_checks_alone_is_told_so_and_does_not_hang() -> None:
    model = shard(HandWritten())
    if dist.get_rank() == 0:
        start = time.monotonic()
        assert check_sharding(model) == []  # nothing to compare: no waiting
        model.register_buffer("own", torch.zeros(2))
        alone = "were not compared .*only rank 0 after 5 s; missing: rank 1. Call it on every rank"
        assert_said(check_sharding(model), [alone])
        assert time.monotonic() - start < 30
    else:
        model.register_buffer("own", torch.zeros(2))
    dist.barrier()
    assert check_sharding(model) == []

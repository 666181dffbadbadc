"""Copies that ranks hold of the same values: compared by check_sharding and shard."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from fsdp_utils import ChildTuningAdamW, check_sharding, run_on_ranks, shard
from tests.sharded import Block, HandWritten, TwoRanks, fsdp1, hand_written_batch, whole


def hybrid_mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def hybrid(**options: Any) -> nn.Module:
    return shard(HandWritten(), strategy="hybrid", mesh=hybrid_mesh(2, 1), **options)


def ddp() -> nn.Module:
    return DDP(HandWritten())


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """Of other samples on each rank."""
    model(hand_written_batch()["x"] + dist.get_rank())[0].square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def change_rank_1(model: nn.Module, change: Callable[[torch.Tensor], Any] = torch.Tensor.neg_) -> None:
    """In one parameter, so that what a sum or an xor says of it stays the same, if asked for."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameter = next(model.parameters())
            change(parameter.to_local() if hasattr(parameter, "to_local") else parameter)


def refusal(call: Callable[[], Any]) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


# ---- shard -----------------------------------------------------------------------------------------------


def replicas_of_two_seeds(sync: bool) -> Any:
    torch.manual_seed(dist.get_rank() // 2)
    model = HandWritten()
    model.register_buffer("own", torch.full((2,), float(dist.get_rank())))
    options: dict[str, Any] = {"strategy": "hybrid", "ranks_per_host": 2}
    if not sync:
        return refusal(lambda: shard(model, **options))
    shard(model, sync_replicas=True, **options)
    return {name: whole(value) for name, value in model.state_dict().items()}, check_sharding(model)


def test_replicas_of_other_seeds_are_refused_on_every_rank() -> None:
    errors, seconds = zip(*run_on_ranks(replicas_of_two_seeds, False, world_size=4), strict=True)
    assert len(set(errors)) == 1
    assert "'embedding.weight' on ranks 2, 3 differs from ranks 0, 1" in errors[0]
    assert "; and 13 more. Build the model with one seed" in errors[0]
    assert "sync_replicas=True" in errors[0]
    assert max(seconds) < 5


def test_replicas_of_other_seeds_get_the_first_ones_values() -> None:
    torch.manual_seed(0)
    expected = HandWritten().state_dict() | {"own": torch.zeros(2)}
    for values, problems in run_on_ranks(replicas_of_two_seeds, True, world_size=4):
        assert problems == []
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_ranks_without_values_are_not_compared_and_get_none(two_ranks: TwoRanks) -> None:
    """As where only rank 0 has loaded the weights, which are broadcast after sharding."""

    def fn() -> tuple[int, str]:
        def model() -> nn.Module:
            with torch.device("meta" if dist.get_rank() else "cpu"):
                return HandWritten()

        mesh = hybrid_mesh(2, 1)
        sharded = shard(model(), strategy="hybrid", mesh=mesh)
        return len(list(sharded.parameters())), refusal(
            lambda: shard(model(), strategy="hybrid", mesh=mesh, sync_replicas=True)
        )[0]

    (number, error), (_, same) = two_ranks(fn)
    assert number == 16
    assert error == same
    assert "the same number of parameters and buffers with values" in error


def test_buffers_of_any_layout_are_broadcast_by_name(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[list[Any], list[str], str]:
        rank = dist.get_rank()
        buffers = {
            "conjugated": torch.full((2,), rank + 1j).conj(),
            "negated": torch.full((2,), rank + 1j).conj().imag,
            "expanded": torch.full((2, 1), rank).expand(2, 3),
            "sparse": torch.eye(2).to_sparse(),
        }
        model = HandWritten()
        for name in sorted(buffers, reverse=bool(rank)):  # in another order on rank 1
            model.register_buffer(name, buffers[name])
        shard(model, sync_replicas=True)
        found = [model.get_buffer(name).tolist() for name in ("conjugated", "negated", "expanded")]
        other = HandWritten()
        other.register_buffer("own", torch.zeros(2 + rank))
        return found, check_sharding(model), refusal(lambda: shard(other, sync_replicas=True))[0]

    (found, problems, error), second = two_ranks(fn)
    assert (found, problems, error) == second
    assert found == [[-1j, -1j], [-1.0, -1.0], [[0, 0, 0], [0, 0, 0]]]
    assert problems == []
    assert "expected the same names, dtypes and shapes of parameters and buffers" in error


# ---- check_sharding --------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Tensor], Any], str]] = {
    "hybrid, signs": (
        hybrid,
        torch.Tensor.neg_,
        "Replicas of a parameter differ: 'embedding.weight' on rank 1",
    ),
    "hybrid, order": (
        hybrid,
        lambda value: value.copy_(value.flip(0).clone()),
        "Replicas of a parameter differ: 'embedding.weight' on rank 1 differs from rank 0. ",
    ),
    "DDP": (ddp, torch.Tensor.neg_, "Replicas of a parameter differ: 'module.embedding.weight' on rank 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_replicas_that_differ_are_named(two_ranks: TwoRanks, name: str) -> None:
    make, change, expected = FAULTS[name]

    def fn() -> tuple[list[str], list[str]]:
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            next(model.parameters())[0, 0] = float("nan")  # which equals itself here
        before = check_sharding(model)
        change_rank_1(model, change)
        return before, check_sharding(model)

    for before, after in two_ranks(fn):
        assert before == []
        assert len(after) == 1
        assert after[0].startswith(expected)


def test_buffers_and_ignored_parameters_that_differ_are_named(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        torch.manual_seed(dist.get_rank())  # shards of two seeds make up one model
        model = HandWritten()
        model.head[0] = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8))
        model.head[0][0].extra = nn.Parameter(torch.zeros(2))
        ignored = {model.head[0][0].extra}
        shard(model, ignored_params=ignored)
        found = [check_sharding(model)]
        next(iter(ignored)).data.add_(dist.get_rank())
        found.append(check_sharding(model))
        next(iter(ignored)).data.zero_()
        model.head[0][0](torch.randn(4, 8))
        return [*found, check_sharding(model)]

    def with_ddp() -> list[str]:
        model = DDP(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)))
        model(torch.randn(4, 8) + dist.get_rank())  # the next forward begins with rank 0's statistics
        return check_sharding(model)

    first, second = two_ranks(fn)
    assert first == second
    nothing, (ignored,), (statistics,) = first
    assert nothing == []
    assert ignored.startswith(
        "Parameters that nothing shards differ between ranks: 'head.0.0.extra' on rank 1 differs"
    )
    assert statistics.startswith("Buffers differ between ranks: 'head.0.0.running_mean' on rank 1")
    assert "FSDP does not synchronise buffers" in statistics
    assert statistics.endswith(
        "before evaluating and saving (for batch norm's statistics: use nn.SyncBatchNorm)."
    )
    assert two_ranks(with_ddp) == [[], []]


def test_a_rank_that_checks_alone_is_told_so_and_does_not_hang(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[list[str], float, list[str]]:
        model = shard(HandWritten())
        plain = (
            check_sharding(model) if dist.get_rank() == 0 else []
        )  # nothing to compare, nothing to wait for
        model.register_buffer("own", torch.zeros(2))
        start = time.monotonic()
        alone = check_sharding(model) if dist.get_rank() == 0 else []
        seconds = time.monotonic() - start
        dist.barrier()
        return plain + alone, seconds, check_sharding(model)

    (alone, seconds, together), (_, _, same) = two_ranks(fn)
    assert len(alone) == 1
    assert "were not compared between the ranks" in alone[0]
    assert "found only rank 0 after 5 s; missing: rank 1. Call it on every rank" in alone[0]
    assert seconds < 10
    assert together == same == []


class Slow(torch.Tensor):
    def detach(self) -> torch.Tensor:
        time.sleep(6)
        return super().detach()


def test_correct_programs_raise_no_alarm(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        alone: Any = HandWritten()  # each rank trains a model of its own
        alone.register_buffer("own", torch.full((2,), float(rank)))
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "shard"))["shard"]
        shard(alone, mesh=mesh)
        odd: Any = hybrid(sync_replicas=True)
        odd.register_buffer("sparse", torch.eye(2).to_sparse())
        odd.register_buffer("freed", torch.zeros(9))
        odd.freed.untyped_storage().resize_(0)
        found = [check_sharding(alone), check_sharding(odd)]
        with torch.inference_mode():
            found.append(check_sharding(odd))
        with ThreadPoolExecutor(4) as threads:
            found += threads.map(check_sharding, [odd] * 8)
        if rank:  # where it takes longer to hash
            odd.register_buffer("slow", torch.zeros(2).as_subclass(Slow))
        return [*found, check_sharding(odd)]

    assert two_ranks(fn) == [[[]] * 12] * 2


def test_buffers_are_compared_by_name(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        for number, name in enumerate("ab" if dist.get_rank() else "bac"):
            model.register_buffer(name, torch.full((2,), float(number)))
        model.register_buffer("shape", torch.zeros((2, 2) if dist.get_rank() else (4,)))
        return check_sharding(shard(model))

    for (problem,) in two_ranks(fn):
        for name in ("a", "b", "shape"):
            assert f"'{name}' on rank 1 differs from rank 0" in problem


# ---- check_sharding: gradients and updates ---------------------------------------------------------------


def test_gradient_sync_that_was_left_off_is_named(two_ranks: TwoRanks) -> None:
    def fn() -> list[list[str]]:
        model: Any = shard(HandWritten())
        model.set_requires_gradient_sync(False)
        found = [check_sharding(model)]
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)  # there are no replicas
        found.append(check_sharding(model))
        replicated: Any = hybrid(sync_replicas=True)
        replicated.set_requires_all_reduce(False)
        found.append(check_sharding(replicated))
        for wrapped in (fsdp1(HandWritten(), auto_wrap_policy=ModuleWrapPolicy({Block})), ddp()):
            with wrapped.no_sync():  # type: ignore[operator]
                found.append(check_sharding(wrapped))
            found.append(check_sharding(wrapped))
        return found

    fsdp2, no_replicas, all_reduce, in_fsdp1, after, in_ddp, after_ddp = two_ranks(fn)[0]
    assert no_replicas == after == after_ddp == []
    for (message,), count in ((fsdp2, 4), (all_reduce, 4), (in_fsdp1, 4), (in_ddp, 1)):
        assert message.startswith(f"Gradient sync is off in {count} units (such as (root)): ")
        assert "model.set_requires_gradient_sync(True)" in message


def test_fsdp1_with_shard_groups_of_one_rank_does_not_sync(two_ranks: TwoRanks) -> None:
    """https://github.com/volcengine/verl/issues/7493"""

    def fn(use_fsdp1: bool) -> tuple[list[str], list[str]]:
        torch.manual_seed(0)
        if use_fsdp1:
            with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
                model: nn.Module = fsdp1(
                    HandWritten(),
                    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                    auto_wrap_policy=ModuleWrapPolicy({Block}),
                    device_mesh=hybrid_mesh(2, 1),
                )
        else:
            model = hybrid()
        before = check_sharding(model)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return before, check_sharding(model)

    for before, (*first, differ) in two_ranks(fn, True):
        assert first == before
        assert before[0].startswith("HYBRID_SHARD over groups of one rank in 4 FSDP1 units")
        assert differ.startswith("Replicas of a parameter differ")  # what the message says
    assert two_ranks(fn, False) == [([], [])] * 2  # and what it advises


class WithMasters(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None: ...


def test_parameters_in_bf16_without_masters_are_named(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[list[list[str]], float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
        nn.init.normal_(model[0].weight, std=0.02)
        for part in (*model, model):
            fully_shard(part)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
        others: list[Any] = [ChildTuningAdamW(model.parameters()), WithMasters(model.parameters())]
        found = [check_sharding(model, one) for one in (adamw, *others, None)]
        before = whole(model[0].weight.detach()).clone()
        model(torch.randn(8, 64).bfloat16()).square().sum().backward()
        adamw.step()
        unmoved = (whole(model[0].weight.detach()) == before).float().mean().item()
        model.requires_grad_(False)
        found.append(check_sharding(model, adamw))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        mixed = shard(HandWritten(), strategy="grad_op", mp_policy=policy)
        adamw = torch.optim.AdamW(mixed.parameters())
        mixed(**hand_written_batch())  # now the model holds gathered parameters in bf16
        found.append(check_sharding(mixed, adamw))
        return found, unmoved

    for (adamw, child, *others), unmoved in two_ranks(fn):
        assert others == [[], [], [], []]
        assert adamw[0].startswith(
            "4 trainable parameters are held in bfloat16 (such as 0.weight), and AdamW keeps"
        )
        assert "and ChildTuningAdamW keeps no float32 copy" in child[0]
        assert unmoved > 0.8  # "most weights never move"

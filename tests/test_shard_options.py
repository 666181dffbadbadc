"""What shard takes besides a model: scalars, ignored parameters, hosts, groups after forward, prefetching."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_utils import check_sharding, load_distributed, run_on_ranks, save_distributed, shard
from fsdp_utils.collectives import record_collectives
from tests.sharded import Block, HandWritten, TwoRanks, compare, hand_written_batch, loss_of, whole


class Scaled(nn.Module):
    """Scalars in the blocks and in the root, as CLIP's logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for block in self.blocks:
            block.scale = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()  # AdamW divides by gradients, some of which are nearly 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.scale
        return x * self.scale


def samples() -> torch.Tensor:
    """f64[4 ranks, 2 micro-batches, 3 samples, 8]."""
    return torch.randn(4, 2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(model: nn.Module, batches: torch.Tensor, steps: int = 2) -> tuple[list[float], dict[str, Any]]:
    """The gradient norms of some clipped steps with accumulation, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for _ in range(steps):
        for batch in batches:
            (model(batch).square().mean() / len(batches)).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: whole(p).detach() for name, p in model.named_parameters()}


def in_one_process(world_size: int) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    return trained(Scaled(), samples()[:world_size].transpose(0, 1).flatten(1, 2))


def trained_with_scalars(on_meta: bool, **options: Any) -> tuple[list[float], dict[str, Any], list[str]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Scaled()
    if on_meta:
        values = model.state_dict()
        with torch.device("meta"):
            model = Scaled()
        shard(model, **options).to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            value = values[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)
    else:
        if rank:
            model.scale.data += rank  # the first rank's value is the one that counts
        shard(model, **options)
    norms, after = trained(model, samples()[rank])
    return norms, after, check_sharding(model)


def assert_trained_as_in_one_process(outcomes: list[Any]) -> None:
    norms, parameters = in_one_process(len(outcomes))
    for found_norms, found, problems in outcomes:
        assert found_norms == pytest.approx(norms, rel=1e-9)
        assert problems == []
        for name, expected in parameters.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("on_meta", [False, True])
def test_scalars_train_as_in_one_process(two_ranks: TwoRanks, on_meta: bool) -> None:
    assert_trained_as_in_one_process(two_ranks(trained_with_scalars, on_meta))


def test_scalars_train_as_in_one_process_on_two_hosts() -> None:
    fn = partial(trained_with_scalars, False, strategy="hybrid", ranks_per_host=2)
    assert_trained_as_in_one_process(run_on_ranks(fn, world_size=4))


def test_a_scalar_that_was_frozen_trains_on_all_ranks_alike(two_ranks: TwoRanks) -> None:
    def fn() -> float:
        torch.manual_seed(0)
        model = Scaled()
        model.scale.requires_grad_(False)
        shard(model)
        model(samples()[dist.get_rank(), 0]).sum().backward()
        assert model.scale.grad is None
        model.scale.requires_grad_(True)
        model(samples()[dist.get_rank(), 0]).sum().backward()
        return model.scale.grad.item()

    first, second = two_ranks(fn)
    assert first == second


def test_scalars_are_saved_and_loaded(two_ranks: TwoRanks, tmp_path: Any) -> None:
    def fn() -> list[float]:
        model = shard(Scaled())
        with torch.no_grad():
            model.scale.fill_(5.0)
        save_distributed(tmp_path / "saved", model, step=1)
        other = shard(Scaled())
        load_distributed(tmp_path / "saved", other)
        return [p.item() for p in other.parameters() if not isinstance(p, DTensor)]

    assert two_ranks(fn) == [[5.0, *[pytest.approx(0.7)] * 3]] * 2


def test_ignored_parameters_are_left_as_they_are(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[list[str], float, bool]:
        model = HandWritten()
        kept = model.blocks[1].mlp[0].weight
        shard(model, ignored_params={kept})
        plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        batch = {"x": hand_written_batch()["x"] + dist.get_rank()}
        loss_of(model(**batch)).backward()
        return plain, kept.grad.sum().item(), model.blocks[1].mlp[0].weight is kept

    (names, first, same), (_, second, _) = two_ranks(fn)
    assert names == ["blocks.1.mlp.0.weight"]
    assert first != second  # each rank's own gradient
    assert same


def test_parameters_of_another_model_cannot_be_ignored(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[str, bool]:
        model = HandWritten()
        with pytest.raises(ValueError, match="1 of the 1 ignored_params are not parameters") as caught:
            shard(model, ignored_params={nn.Parameter(torch.ones(2))})
        return str(caught.value), any(isinstance(p, DTensor) for p in model.parameters())

    for message, changed in two_ranks(fn):
        assert message.startswith("shard: ")
        assert not changed


def test_a_block_may_ignore_what_it_shares_with_the_root(two_ranks: TwoRanks) -> None:
    def fn() -> list[str]:
        model = HandWritten()
        model.blocks[0].shared = model.head[0].weight
        shard(model, ignored_params={model.head[0].weight})
        return [type(block).__name__ for block in model.blocks]

    assert two_ranks(fn) == [["FSDPBlock"] * 3] * 2


def gathers(trained: bool, **options: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Each all_gather of a step after the first: the unit, the pass, and the ranks that took part."""
    torch.manual_seed(0)
    model = shard(HandWritten(), **options)
    batch = hand_written_batch()
    loss_of(model(**batch)).backward()
    with record_collectives(model) as trace:
        loss_of(model(**batch)).backward()
    if trained:
        assert compare(HandWritten, hand_written_batch, **options).differing == []
    return [(event.module, event.phase, event.ranks) for event in trace.events if event.kind == "all_gather"]


def of_blocks(found: list[tuple[str, str, tuple[int, ...]]], phase: str) -> list[tuple[str, int]]:
    return [(name, len(ranks)) for name, when, ranks in found if when == phase and name.startswith("blocks")]


def test_after_forward_a_block_is_kept_by_few_ranks() -> None:
    """2 of 4: backward gathers within pairs, which stand next to each other."""
    by_rank = run_on_ranks(partial(gathers, True, reshard_after_forward=2), world_size=4)
    assert of_blocks(by_rank[0], "forward") == [(f"blocks.{i}", 4) for i in (0, 1, 2)]
    for rank, found in enumerate(by_rank):
        pair = (0, 1) if rank < 2 else (2, 3)
        backward = [(name, ranks) for name, phase, ranks in found if phase == "backward"]
        # the last block was not given back yet
        assert set(backward) == {(f"blocks.{i}", pair) for i in (0, 1)} | set(backward[:1])
        assert {ranks for _, ranks in backward} == {pair}


def test_hybrid_needs_no_mesh_where_it_knows_the_ranks_per_host() -> None:
    def fn() -> tuple[list[str], list[list[int]]]:
        model = shard(HandWritten(), strategy="hybrid", ranks_per_host=2)
        weight = model.blocks[0].mlp[0].weight
        return list(weight.device_mesh.mesh_dim_names), weight.device_mesh.mesh.tolist()

    assert run_on_ranks(fn, world_size=4) == [(["replicate", "shard"], [[0, 1], [2, 3]])] * 4


def test_blocks_are_asked_for_ahead(two_ranks: TwoRanks) -> None:
    def order(prefetch: int | None) -> list[str]:
        """The order of issue of what is gathered (g) and what is computed (c), by block."""
        model = shard(HandWritten(), prefetch=prefetch)
        batch = hand_written_batch()
        loss_of(model(**batch)).backward()
        with record_collectives(model) as trace:
            loss_of(model(**batch)).backward()
        return [
            ("g" if event.kind == "all_gather" else "c") + event.module[-1]
            for event in trace.events
            if event.kind in ("all_gather", "compute") and event.module.startswith("blocks")
        ]

    expected = {
        None: "g0 c0 g1 c1 g2 c2 | g2 g1 c2 g0 c1 c0",  # FSDP2 by itself: one ahead, in backward alone
        1: "g0 g1 c0 g2 c1 c2 | g2 g1 c2 g0 c1 c0",
        2: "g0 g1 g2 c0 c1 c2 | g2 g1 g0 c2 c1 c0",
    }
    for prefetch, events in expected.items():
        assert two_ranks(order, prefetch) == [events.replace("| ", "").split()] * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks_per_host": 2}, ValueError, 'ranks_per_host is for strategy "hybrid" without a mesh'),
        ({"strategy": "hybrid", "ranks_per_host": 3}, ValueError, "to divide the 2 ranks, found 3"),
        ({"strategy": "hybrid", "ranks_per_host": True}, ValueError, "found True"),
        ({"reshard_after_forward": 2}, ValueError, "neither 1 nor 2, found 2"),
        ({"reshard_after_forward": 3}, ValueError, "found 3"),
        ({"reshard_after_forward": False}, ValueError, "found False"),
        ({"strategy": "grad_op", "reshard_after_forward": 2}, ValueError, '"grad_op" keeps the full'),
        ({"prefetch": 0}, ValueError, "expected prefetch to be a number of blocks from 1 on, found 0"),
        ({"prefetch": "all"}, ValueError, "found 'all'"),
        ({"mp_policy": torch.bfloat16}, TypeError, "expected mp_policy to be a MixedPrecisionPolicy"),
        ({"offload_policy": True}, TypeError, "expected offload_policy to be a OffloadPolicy"),
        ({"mesh": (2,)}, TypeError, "expected mesh to be a DeviceMesh, found (2,)"),
        (
            {"ignored_params": []},
            TypeError,
            "expected ignored_params to be a set of parameters, found a list",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    two_ranks: TwoRanks, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    def fn() -> bool:
        model = HandWritten()
        with pytest.raises(error, match=re.escape(words)):
            shard(model, **options)
        return any(isinstance(p, DTensor) for p in model.parameters())

    assert two_ranks(fn) == [False, False]


def test_an_optimizer_of_gathered_parameters_is_named(two_ranks: TwoRanks) -> None:
    """After an evaluation the root stays gathered, and model.parameters() gives what is freed later."""

    def fn() -> tuple[list[str], list[str], bool]:
        torch.manual_seed(0)
        model = shard(HandWritten())
        with torch.no_grad():
            model(**hand_written_batch())
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        model.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        problems = check_sharding(model, early), check_sharding(model, optimizer)
        before = whole(model.embedding.weight.detach()).clone()
        loss_of(model(**hand_written_batch())).backward()
        early.step()  # what the message says
        assert torch.equal(whole(model.embedding.weight.detach()), before)
        optimizer.step()
        return *problems, torch.equal(whole(model.embedding.weight.detach()), before)

    for problems, none, same in two_ranks(fn):
        (problem,) = problems
        assert problem.startswith("The optimizer holds 4 gathered parameters")
        assert none == []
        assert not same


def test_output_dtype_is_that_of_the_models_output(two_ranks: TwoRanks) -> None:
    def fn() -> tuple[torch.dtype, torch.dtype]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        model = shard(HandWritten(), mp_policy=policy)
        inner = []
        model.head.register_forward_pre_hook(lambda _, args: inner.append(args[0].dtype))
        (output,) = model(**hand_written_batch())
        output.sum().backward()
        return inner[0], output.dtype

    assert two_ranks(fn) == [(torch.bfloat16, torch.float32)] * 2

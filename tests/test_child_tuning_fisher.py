"""fisher_mask: the largest fraction of all weights, the same ones on any number of ranks."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_utils import ChildTuningAdamW, fisher_mask, run_on_ranks
from tests.children import WRAPPERS, Net, batch, loss_of, net
from tests.sharded import TwoRanks

BATCHES = [batch(number) for number in range(3)]


def squared_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The definition, in a few lines."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in BATCHES:
        model.zero_grad()
        loss_of(model, one).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad**2
    return {name: value.detach() for name, value in total.items()}


def test_it_keeps_the_largest_squared_gradients_of_the_whole_model() -> None:
    expected = squared_gradients(net())
    for keep in (0.05, 0.3, 0.95):
        mask = fisher_mask(net(), BATCHES, loss_of, keep=keep)
        kept = torch.cat([expected[name][mask[name]] for name in expected])
        left = torch.cat([expected[name][~mask[name]] for name in expected])
        assert kept.min() >= left.max()
        assert kept.numel() == round(keep * (kept.numel() + left.numel()))


@pytest.mark.parametrize("scale", [2.0**66, 2.0**-90])
def test_a_large_or_a_small_loss_selects_the_same_weights(scale: float) -> None:
    """In fp32 the squares of its gradients are infinite, or 0."""
    expected = fisher_mask(net(), BATCHES, loss_of)
    found = fisher_mask(net(), BATCHES, lambda model, one: loss_of(model, one) * scale)
    assert all(torch.equal(found[name], mask) for name, mask in expected.items())


def test_parameters_without_gradients_are_left_out_or_come_last() -> None:
    model = net()
    model.embed.weight.requires_grad_(False)
    mask = fisher_mask(model, BATCHES, loss_of, keep=0.5)
    assert "embed.weight" not in mask
    assert all(p.grad is None for p in model.parameters())
    unused = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    mask = fisher_mask(unused, [torch.ones(2, 3)], lambda m, x: m["used"](x).square().sum(), keep=0.4)
    assert not mask["unused.weight"].any()


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_ties_are_resolved_to_the_exact_fraction(keep: float) -> None:
    model = nn.Linear(100, 100)
    mask = fisher_mask(model, [torch.ones(1, 100)], lambda m, x: m(x).sum(), keep=keep)  # all gradients are 1
    assert sum(int(part.sum()) for part in mask.values()) == round(keep * 10100)


def whole_mask(wrapper: str) -> dict[str, Tensor]:
    """As the plain model has it, put together from all ranks' parts."""
    model = net(wrapper)
    mask = fisher_mask(model, BATCHES, loss_of)
    ChildTuningAdamW(model.named_parameters(), mode="task", gradient_mask=mask).step()  # it fits
    whole = {}
    for name, part in mask.items():
        assert part.dtype == torch.bool
        if isinstance(part, DTensor):
            assert part.placements == model.get_parameter(name).placements
            whole[name] = part.full_tensor()
        elif "fsdp1" in wrapper:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, part)
            whole[name] = torch.cat(parts).view(Net().get_parameter(name).shape)
        else:
            whole[name] = part
    return whole


def ties_on_ranks() -> int:
    model: Any = fully_shard(
        nn.Linear(7, 11), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    )
    mask = fisher_mask(model, [torch.ones(1, 7)], lambda m, x: m(x).sum(), keep=0.3)
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, [m.to_local().sum().item() for m in mask.values()])
    assert parts[:2] == parts[2:]  # replicas select alike
    return sum(map(sum, parts[:2]))


def on_four() -> tuple[dict[str, dict[str, Tensor]], int]:
    return {wrapper: whole_mask(wrapper) for wrapper in WRAPPERS}, ties_on_ranks()


def test_any_number_of_ranks_selects_the_same_weights_and_the_exact_fraction_of_ties() -> None:
    alone = whole_mask("plain")
    values = squared_gradients(net())
    bound = torch.cat([values[name][alone[name]] for name in alone]).min()
    for by_wrapper, ties in run_on_ranks(on_four, world_size=4):
        assert ties == round(0.3 * 88)
        for wrapper, found in by_wrapper.items():
            assert found.keys() == alone.keys()
            for name in alone:
                differ = alone[name] != found[name]
                # ties, up to the rounding of the mean over ranks
                assert torch.all((values[name][differ] - bound).abs() <= 1e-5 * bound), (wrapper, name)
            assert sum(int(m.sum()) for m in found.values()) == sum(int(m.sum()) for m in alone.values())


# ---- mistakes ------------------------------------------------------------------------------------------


def test_no_fraction_no_batches_and_nothing_to_train() -> None:
    for keep in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"expected keep in \(0, 1\]"):
            fisher_mask(net(), BATCHES, loss_of, keep=keep)
    with pytest.raises(ValueError, match="expected batches to compute gradients on, found none"):
        fisher_mask(net(), [], loss_of)
    with pytest.raises(ValueError, match="no parameter"):
        fisher_mask(net().requires_grad_(False), BATCHES, loss_of)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    model = nn.ModuleDict({"good": nn.Linear(2, 2), "bad": nn.Linear(2, 2)})

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model["good"](x).sum() + (0 * model["bad"](x)).sqrt().sum()

    with pytest.raises(
        ValueError, match=r"expected finite gradients, found others in bad\.weight, bad\.bias\. "
    ):
        fisher_mask(model, [torch.ones(1, 2)], loss_fn)


def refused() -> list[tuple[str, float]]:
    found = []
    for model, counts, keep in (
        (net("ddp"), (3, 3), (0.2, 0.6)),
        (net("fsdp2"), (2, 3), (0.3, 0.3)),
        (net("fsdp2"), (0, 0), (0.3, 0.3)),
    ):
        began = time.monotonic()
        with pytest.raises(ValueError, match="fisher_mask: expected") as error:
            fisher_mask(model, BATCHES[: counts[dist.get_rank()]], loss_of, keep=keep[dist.get_rank()])
        found.append((str(error.value), time.monotonic() - began))
    return found


def test_what_differs_between_ranks_ends_on_all_of_them(two_ranks: TwoRanks) -> None:
    words = (
        "fisher_mask: expected the same keep on all ranks, found rank 0: 0.2; rank 1: 0.6",
        "found 1 of 2 ranks with more than 2",
        "found none",
    )
    for (first, seconds), (second, _), said in zip(*two_ranks(refused), words, strict=True):
        assert first == second
        assert said in first
        assert seconds < 20

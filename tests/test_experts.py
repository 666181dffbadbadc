"""What FSDP does with a mixture of experts: the statements of lesson 20 that it does not measure itself."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_utils import check_in_step, run_on_ranks, save_distributed
from fsdp_utils.lessons.meter import Meter
from tests.on_ranks import Together, on_ranks

on_two = Together(2)


class Mixture(nn.Module):
    """Two experts, of which only those with tokens are called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            out[chosen == e] = self.experts[e](x[chosen == e])
        return out


def largest_error(fsdp1: bool, each: bool) -> float:
    """How far this rank's gradients are from one process's, where rank r uses expert r alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone, model, x = Mixture(), Mixture(), torch.randn(world, 4, 8)
    model.load_state_dict(alone.state_dict())
    alone(x.flatten(0, 1), torch.arange(world).repeat_interleave(4)).square().mean().backward()
    right = [expert.weight.grad for expert in alone.experts]
    if not fsdp1:
        for part in [*model.experts, model] if each else [model]:
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
        model(x[rank], torch.full((4,), rank)).square().mean().backward()
        found = model.experts[rank].weight.grad.to_local()
        return ((found - right[rank].chunk(world)[rank]).norm() / right[rank].norm()).item()
    wrap = partial(FSDP1, use_orig_params=True, device_id=torch.device("cpu"))
    for e in range(world if each else 0):
        model.experts[e] = wrap(model.experts[e])
    wrapped = wrap(model)
    wrapped(x[rank], torch.full((4,), rank)).square().mean().backward()
    with FSDP1.summon_full_params(wrapped, with_grads=True):
        found = [parameter.grad for parameter in wrapped.parameters()]
    return max(((f - r).norm() / r.norm()).item() for f, r in zip(found, right, strict=True))


@on_two
def test_experts_are_mixed_up_by_fsdp2_and_by_fsdp1_where_they_are_units() -> None:
    assert largest_error(fsdp1=True, each=True) > 0.3
    assert largest_error(fsdp1=False, each=True) > 0.3
    assert largest_error(fsdp1=True, each=False) < 1e-5
    with check_in_step():  # silent, as lesson 20 says: both ranks reduce the same unit, and as many bytes
        assert largest_error(fsdp1=False, each=False) > 0.3


def glued_in_step() -> None:
    torch.manual_seed(0)
    model, mesh = Mixture(), init_device_mesh("cpu", (2,))
    for part in [*model.experts, model]:
        fully_shard(part, mesh=mesh)
    with check_in_step():
        model(torch.ones(4, 8), torch.full((4,), dist.get_rank()))


def test_check_in_step_names_the_expert_that_each_rank_gathers() -> None:
    with pytest.raises(Exception, match="the ranks part") as raised:
        run_on_ranks(glued_in_step)
    for rank in range(2):
        (line,) = [line for line in str(raised.value).splitlines() if f"rank {rank}: all_gather" in line]
        assert f"for experts.{rank}," in line


def divided(
    mesh_size: int, factor: float, force_sum: bool, reduce_dtype: torch.dtype | None = None
) -> float | str:
    """The gradient of a weight, times that without a factor, on a mesh of one or two ranks."""
    mesh = init_device_mesh("cpu", (2 // mesh_size, mesh_size), mesh_dim_names=("other", "fsdp"))["fsdp"]
    gradients = []
    for own in (None, factor):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        if own:
            model.set_gradient_divide_factor(own)
            model.set_force_sum_reduction_for_comms(force_sum)
        try:
            model(torch.ones(1, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
        gradients.append(model.weight.grad.to_local().sum())
    return (gradients[1] / gradients[0]).item()


@on_two
def test_a_factor_on_gloo_needs_sums_and_with_one_rank_sums_divide_twice() -> None:
    """In torch 2.13. If the last one is 0.5 in a later torch, the table of lesson 20 has a row too many."""
    assert "Cannot use ReduceOp.PREMUL_SUM with Gloo" in str(divided(2, 4.0, False))
    assert divided(2, 4.0, True) == 0.5
    assert divided(1, 2.0, False) == 0.5
    assert divided(1, 2.0, True) == 0.25
    assert divided(1, 2.0, False, torch.float16) == 0.25


@on_ranks()
def test_a_save_of_experts_that_differ_by_rank_says_what_to_make_of_them(tmp_path: Path) -> None:
    model, one = Mixture(), "If each rank has experts of its own, make them one DTensor over their mesh"
    own = nn.init.constant_(model.experts[0].weight, dist.get_rank())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={own})
    with pytest.raises(Exception, match=one):
        save_distributed(tmp_path, model, step=1)


def test_at_the_peak_of_backward_a_loop_holds_two_gradients_of_all_experts_and_grouped_mm_one() -> None:
    peaks = []
    for is_loop in (True, False):
        weight, x = torch.randn(8, 128, 128, requires_grad=True), torch.randn(16, 128)
        with Meter([weight]) as meter:
            if is_loop:
                y = torch.cat([rows @ own for rows, own in zip(x.chunk(8), weight.unbind(), strict=True)])
            else:
                y = F.grouped_mm(x, weight, offs=torch.arange(2, 17, 2, dtype=torch.int32))
            y.square().sum().backward()
        peaks.append((meter.peak_tensor_bytes - weight.nbytes) / weight.nbytes)
    assert [round(peak, 1) for peak in peaks] == [2.0, 1.0]

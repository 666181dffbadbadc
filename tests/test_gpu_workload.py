"""What the recordings train on is finite: the fake group's gradients are written, and others are refused."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from benchmarks.gpu_parts import memory, mixed_precision, planner, rate_limiter, workload
from fsdp_utils import run_on_ranks

CPU = torch.device("cpu")


def in_the_fake_group(reduce_scatter: Any, part: Any) -> tuple[list[float], str]:
    """On a rank of its own: what reduce_scatter writes once the group is joined; what a setting raises."""

    def on_rank() -> tuple[list[float], str]:
        dist.destroy_process_group()
        for name in workload.REDUCE_SCATTER if reduce_scatter is not None else ():
            setattr(dist, name, reduce_scatter)
        workload.join_fake_group(CPU)
        output = torch.full((2,), math.nan)
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        call(output, torch.arange(2.0 * workload.RANKS))
        try:
            part.measure(part.settings(True, [])[0], CPU, True)
        except ValueError as error:
            return output.tolist(), str(error)
        return output.tolist(), ""

    return run_on_ranks(on_rank, world_size=1)[0]


def writes_nothing(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """As the fake group of torch 2.11."""


def writes_infinity(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    output.detach().fill_(math.inf)


@pytest.mark.parametrize("reduce_scatter", [None, writes_nothing])
def test_reduce_scatter_of_the_fake_group_writes_the_ranks_part_of_its_input(reduce_scatter: Any) -> None:
    assert in_the_fake_group(reduce_scatter, mixed_precision) == ([0.0, 1.0], "")


@pytest.mark.parametrize("part", [mixed_precision, memory, planner, rate_limiter], ids=lambda p: p.__name__)
def test_a_setting_whose_gradients_are_not_finite_fails(part: Any) -> None:
    _, error = in_the_fake_group(writes_infinity, part)
    assert error.startswith("the gradients of ")
    assert "parameters are not finite" in error


def test_the_first_parameter_whose_gradient_is_not_finite_is_named() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            loss = (self.good(x) + torch.log(0 * self.bad(x))).sum()
            return type("Output", (), {"loss": loss})

    message = r"the gradients of 1 parameters are not finite, the first is bad\.weight"
    with pytest.raises(ValueError, match=message):
        workload.refuse_infinite_gradients(Wrong(), {"x": torch.ones(1, 2)})

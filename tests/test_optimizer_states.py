"""Optimizers on shards: 8-bit states in checkpoints, states in host memory, the FLOPs of Muon's iteration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from fsdp_utils import load_distributed, record_collectives, run_on_ranks, save_distributed
from fsdp_utils.checkpoint import CheckpointError


class Momentum8bit(torch.optim.Optimizer):
    """Momentum in codes of 8 bits, with one scale for each 32 values of a row."""

    def __init__(self, params: Any, *, plain: bool) -> None:
        super().__init__(params, {"plain": plain})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                blocks = weight.grad.unflatten(1, (-1, 32))
                scales = blocks.abs().amax(-1, keepdim=True) / 127 + 1e-12
                states = {"codes": (blocks / scales).round().to(torch.int8), "scales": scales}
                if group["plain"]:
                    states = {name: state.to_local() for name, state in states.items()}
                self.state[weight].update(states)
                weight.sub_(weight.grad, alpha=0.1)


def trained(optimizer_class: Any, steps: int, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model)
    optimizer = optimizer_class(model.parameters(), **options)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def came_back(folder: str, by: str, plain: bool) -> tuple[bool, torch.dtype]:
    """Save the states of a step, load them; return whether this rank's are right, and the codes' dtype."""
    model, optimizer = trained(Momentum8bit, 1, plain=plain)
    other_model, other = trained(Momentum8bit, 0, plain=plain)
    if by == "save_distributed":
        save_distributed(folder, model, optimizer, step=1)
        load_distributed(folder, other_model, other)
    else:
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        state = get_optimizer_state_dict(other_model, other)
        dcp.load({"optimizer": state}, checkpoint_id=folder)
        set_optimizer_state_dict(other_model, other, state)
    there, back = optimizer.state[model.weight], other.state[other_model.weight]
    pairs = [[full(state[name]) for state in (there, back)] for name in there]
    return all(torch.equal(*pair) for pair in pairs), back["codes"].dtype


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()


def test_8bit_states_that_are_dtensors_come_back_right_from_both(tmp_path: Path) -> None:
    for by, dtype in (("save_distributed", torch.int8), ("dcp", torch.float32)):
        found = run_on_ranks(came_back, str(tmp_path / by), by, False, world_size=2)
        assert found == [(True, dtype)] * 2


def test_plain_8bit_states_are_refused_by_save_distributed_and_mixed_up_by_dcp(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="on all ranks"):
        run_on_ranks(came_back, str(tmp_path / "ours"), "save_distributed", True, world_size=2)
    found = run_on_ranks(came_back, str(tmp_path / "dcp"), "dcp", True, world_size=2)
    assert [right for right, _ in found] != [True, True]


def states_in_host_memory() -> tuple[bool, list[str]]:
    """Move AdamW's states before and after its steps; return whether it trains as without, and the moves."""
    moves: list[str] = []

    def moved_to(place: str) -> Any:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for state in optimizer.state.values():
                state.update({name: tensor.to(place) for name, tensor in state.items() if name != "step"})
                moves.append(place)

        return hook

    plain, _ = trained(torch.optim.AdamW, 3)

    def with_hooks(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params)
        optimizer.register_step_pre_hook(moved_to("cpu"))
        optimizer.register_step_post_hook(moved_to("cpu"))
        return optimizer

    hooked, _ = trained(with_hooks, 3)
    return torch.equal(full(plain.weight), full(hooked.weight)), moves


def test_hooks_of_an_optimizer_may_move_its_states_around_each_step() -> None:
    (same, moves), _ = run_on_ranks(states_in_host_memory, world_size=2)
    assert same
    assert len(moves) == 5  # before the first step there is no state


@pytest.mark.parametrize("rows", [64, 96])
def test_a_step_of_muon_on_a_square_matrix_takes_30_cubes_of_its_rows_in_flops(rows: int) -> None:
    weight = nn.Parameter(torch.randn(rows, rows))
    weight.grad = torch.randn(rows, rows)
    with FlopCounterMode(display=False) as flops:
        torch.optim.Muon([weight]).step()
    assert flops.get_total_flops() == 30 * rows**3


def collectives_of_muon(rows: int) -> int:
    """Count the collectives of a step of torch's Muon on one square matrix, cut by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    counted = nn.Linear(8, 8)
    fully_shard(counted, mesh=mesh)  # record_collectives asks for a model
    weight = nn.Parameter(distribute_tensor(torch.randn(rows, rows), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.randn(rows, rows), mesh, [Shard(0)])
    with record_collectives(counted) as trace:
        torch.optim.Muon([weight]).step()
    return len(trace.collectives)


def test_dtensor_needs_more_collectives_for_a_large_matrix() -> None:
    assert run_on_ranks(collectives_of_muon, 96, world_size=3)[0] == 16
    assert run_on_ranks(collectives_of_muon, 1024, world_size=3)[0] == 26


def errors_of_mixed_parameters() -> dict[str, str]:
    """Return what an optimizer or a call raises, by its name; "" where it raises nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, ignored_params=set(model[0].parameters()))
    model(torch.randn(4, 8)).sum().backward()
    groups = [{"params": list(layer.parameters())} for layer in model]
    flat = FSDP(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))
    calls = {
        "foreach": lambda: torch.optim.AdamW(model.parameters(), foreach=True).step(),
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True).step(),
        "foreach, grouped": lambda: torch.optim.AdamW(groups, foreach=True).step(),
        "fused, grouped": lambda: torch.optim.AdamW(groups, fused=True).step(),
        "Muon, FSDP1": lambda: torch.optim.Muon(flat.parameters()),
    }
    return {name: error_of(call) for name, call in calls.items()}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_a_group_for_sharded_and_one_for_ignored_parameters_and_no_muon_for_flat_ones() -> None:
    found = run_on_ranks(errors_of_mixed_parameters, world_size=2)[0]
    for way in ("foreach", "fused"):
        assert "got mixed torch.Tensor and DTensor" in found[way]
        assert found[f"{way}, grouped"] == ""
    assert "Muon only supports 2D parameters" in found["Muon, FSDP1"]

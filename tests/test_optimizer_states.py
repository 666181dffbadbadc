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

from fsdp_utils import run_on_ranks
from tests.on_ranks import on_ranks


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


def came_back(folder: str, plain: bool) -> tuple[bool, torch.dtype]:
    """Save the states of a step with DCP, load them; whether this rank's are right, and the codes' dtype."""
    model, optimizer = trained(Momentum8bit, 1, plain=plain)
    other_model, other = trained(Momentum8bit, 0, plain=plain)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    state = get_optimizer_state_dict(other_model, other)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(other_model, other, state)
    there, back = optimizer.state[model.weight], other.state[other_model.weight]
    pairs = [[full(state[name]) for state in (there, back)] for name in there]
    return all(torch.equal(*pair) for pair in pairs), back["codes"].dtype


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@on_ranks()
def test_which_states_dcp_mixes_up_and_which_groups_and_parameters_optimizers_refuse(tmp_path: Path) -> None:
    """tests/test_checkpoint_optimizers.py has both for save_distributed."""
    assert came_back(str(tmp_path / "sharded"), False) == (True, torch.float32)
    right = [False, False]
    dist.all_gather_object(right, came_back(str(tmp_path / "plain"), True)[0])
    assert right != [True, True]

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, ignored_params=set(model[0].parameters()))
    model(torch.randn(4, 8)).sum().backward()
    groups = [{"params": list(layer.parameters())} for layer in model]
    for way in ("foreach", "fused"):
        mixed = error_of(lambda way=way: torch.optim.AdamW(model.parameters(), **{way: True}).step())
        assert "got mixed torch.Tensor and DTensor" in mixed
        assert error_of(lambda way=way: torch.optim.AdamW(groups, **{way: True}).step()) == ""
    flat = FSDP(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))
    muon = error_of(lambda: torch.optim.Muon(flat.parameters()))
    assert "Muon only supports 2D parameters" in muon


@on_ranks()
def test_hooks_of_an_optimizer_may_move_its_states_around_each_step() -> None:
    moves: list[str] = []

    def move(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state.update({name: tensor.to("cpu") for name, tensor in state.items() if name != "step"})
            moves.append("cpu")

    def with_hooks(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params)
        optimizer.register_step_pre_hook(move)
        optimizer.register_step_post_hook(move)
        return optimizer

    plain, hooked = (trained(one, 3)[0] for one in (torch.optim.AdamW, with_hooks))
    assert torch.equal(full(plain.weight), full(hooked.weight))
    assert len(moves) == 5  # before the first step there is no state


@pytest.mark.parametrize("rows", [64, 96])
def test_a_step_of_muon_on_a_square_matrix_takes_30_cubes_of_its_rows_in_flops(rows: int) -> None:
    weight = nn.Parameter(torch.randn(rows, rows))
    weight.grad = torch.randn(rows, rows)
    with FlopCounterMode(display=False) as flops:
        torch.optim.Muon([weight]).step()
    assert flops.get_total_flops() == 30 * rows**3


def test_what_is_written_to_pieces_of_a_split_dtensor_is_lost() -> None:
    def moved() -> float:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(torch.ones(24, 24), mesh, [Shard(0)])
        for piece in weight.split(6):
            piece.sub_(1)
        return weight.full_tensor().min().item()

    assert run_on_ranks(moved, world_size=2) == [1.0, 1.0]

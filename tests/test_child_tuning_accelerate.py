"""Masks of ChildTuningAdamW when somebody else replaces the parameters in its groups, as Accelerate does."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_utils import ChildTuningAdamW
from tests.children import batch, loss_of, net, on_ranks, train, weights
from tests.sharded import TwoRanks


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(p.shape, generator=generator) < 0.5 for n, p in model.named_parameters()}


def optimizer_of(model: nn.Module, mode: Literal["task", "taskfree"]) -> ChildTuningAdamW:
    given: dict[str, Any] = {"gradient_mask": masks_of(model)} if mode == "task" else {}
    return ChildTuningAdamW(model.named_parameters(), lr=0.05, weight_decay=0.1, mode=mode, **given)


def trained_by_accelerate(mode: Literal["task", "taskfree"]) -> tuple[dict[str, Tensor], list[str]]:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On a CPU Accelerate does not choose FSDP by itself; its prepare is the same there.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model, mode))
    for number in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch(number)))
        optimizer.step()
    return weights(model), [type(p).__name__ for p in optimizer.param_groups[0]["params"]]


def trained_by_accelerate_in_each_mode() -> dict[str, tuple[dict[str, Tensor], list[str]]]:
    return {mode: trained_by_accelerate(mode) for mode in ("task", "taskfree")}


def test_the_masks_follow_the_parameters_through_accelerates_prepare() -> None:
    # on ranks of their own: Accelerate's state belongs to the whole process
    first, second = on_ranks(trained_by_accelerate_in_each_mode, world_size=2)
    for mode in ("task", "taskfree"):
        model = net()
        train(model, optimizer_of(model, mode), range(3))
        for found, kinds in (first[mode], second[mode]):
            assert set(kinds) == {"DTensor"}
            for name, expected in weights(model).items():
                torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def replaced(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Other tensors of the same values in the places of the parameters, with their gradients."""
    new = []
    for group in optimizer.param_groups:
        for position, p in enumerate(group["params"]):
            other = nn.Parameter(p.detach().clone())
            other.grad = torch.ones_like(other)
            group["params"][position] = other
            new.append(other)
    return new


def two_parameters(mode: Literal["task", "taskfree"] = "task") -> tuple[ChildTuningAdamW, dict[str, Tensor]]:
    torch.manual_seed(0)
    masks = {"first": torch.arange(6) % 2 == 0, "second": torch.arange(8).view(2, 4) % 3 == 0}
    params = {name: nn.Parameter(torch.randn(mask.shape)) for name, mask in masks.items()}
    for p in params.values():
        p.grad = torch.ones_like(p)
    given: dict[str, Any] = {"gradient_mask": masks} if mode == "task" else {}
    return ChildTuningAdamW(list(params.items()), lr=0.1, betas=(0.0, 0.0), mode=mode, **given), masks


def test_masks_belong_to_places_and_not_to_tensors() -> None:
    optimizer, masks = two_parameters()
    new = replaced(optimizer)
    before = [p.detach().clone() for p in new]
    optimizer.step()
    for p, began, mask in zip(new, before, masks.values(), strict=True):
        assert torch.equal(p != began, mask)


def test_random_masks_are_those_of_the_places_after_parameters_were_replaced() -> None:
    optimizer, twin = two_parameters("taskfree")[0], two_parameters("taskfree")[0]
    for stepped in (optimizer, twin, twin):
        stepped.step()
    optimizer.state.clear()
    new = replaced(optimizer)
    optimizer.step()
    for p, other in zip(new, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], twin.state[other]["exp_avg"])


def test_parameters_replaced_after_a_step_are_refused() -> None:
    optimizer, _ = two_parameters()
    optimizer.step()
    replaced(optimizer)
    with pytest.raises(RuntimeError, match=r"first was replaced.*its mask and moments are lost"):
        optimizer.step()


def test_a_saved_state_brings_the_masks_of_replaced_parameters_back() -> None:
    optimizer, masks = two_parameters()
    optimizer.step()
    saved = optimizer.state_dict()
    new = replaced(optimizer)
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in new]
    optimizer.step()
    for p, began, mask in zip(new, before, masks.values(), strict=True):
        assert torch.equal(p != began, mask)


def test_a_mask_whose_parameter_is_gone_is_refused() -> None:
    optimizer, _ = two_parameters()
    del optimizer.param_groups[0]["params"][1]
    with pytest.raises(ValueError, match=r"the mask of second matches no parameter.*has only 1 now"):
        optimizer.step()


def test_a_mask_whose_parameter_is_gone_with_its_name_is_refused_by_its_place() -> None:
    optimizer, _ = two_parameters()
    for entry in ("params", "param_names"):
        del optimizer.param_groups[0][entry][1]
    with pytest.raises(ValueError, match="the mask of parameter 1 of group 0 matches no parameter"):
        optimizer.step()


def test_a_mask_whose_parameter_has_another_shape_now_is_refused() -> None:
    optimizer, _ = two_parameters()
    optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(ValueError, match=r"gradient_mask\['first'\]: expected shape \(2, 4\).*found \(6,\)"):
        optimizer.step()


def test_a_mask_for_two_parameters_of_one_name_is_refused() -> None:
    twins = [{"params": [("p", nn.Parameter(torch.ones(2)))]} for _ in range(2)]
    with pytest.raises(ValueError, match="names p, and two parameters of the optimizer are called so"):
        ChildTuningAdamW(twins, mode="task", gradient_mask={"p": torch.ones(2)})


def sharded_otherwise() -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(4, 6)
    p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    mask = torch.arange(24).view(4, 6) % 5 == 0
    optimizer = ChildTuningAdamW([("p", p)], lr=0.1, mode="task", gradient_mask={"p": mask})
    other: Any = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    other.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    optimizer.param_groups[0]["params"][0] = other
    optimizer.step()
    assert isinstance(other, DTensor)
    return other.full_tensor() != whole, mask


def test_a_mask_is_sharded_again_as_its_parameter_is(two_ranks: TwoRanks) -> None:
    for moved, mask in two_ranks(sharded_otherwise):
        assert torch.equal(moved, mask)

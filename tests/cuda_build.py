"""What a mesh of GPUs does to sharding and to checkpoints, with a CUDA build of PyTorch and no GPU.

    python -m pytest tests/cuda_build.py

The GPUs are imagined: a `fake` process group of eight ranks, and fake tensors on "cuda", which have a device,
a shape and no memory. This shows which device a tensor is on and what is planned for it; no kernel runs.
`make test` leaves this file out, as its PyTorch is a CPU build on most machines.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_utils import shard
from fsdp_utils.checkpoint import asynchronous
from fsdp_utils.checkpoint.state import Snapshot

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None, reason="this is a CPU build of PyTorch: it has no CUDA tensors"
    ),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU: python benchmarks/gpu.py smoke uses it"
    ),
]

RANKS, RANK = 8, 3
NO_MEMORY = FakeTensorMode()  # what is made under it has a device and a shape; plans are made outside of it
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Rank 3 of 8, on GPUs that do not exist."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # it asks for the driver
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    try:
        yield init_device_mesh("cuda", (RANKS,))
    finally:
        asynchronous._buffers.clear()
        dist.destroy_process_group()


@pytest.fixture
def snapshot(mesh: DeviceMesh) -> Snapshot:
    """Of two blocks of 16 x 16 and an AdamW that has taken a step, sharded over the mesh."""
    with NO_MEMORY:
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        shard(model, mesh=mesh)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return Snapshot.take(model, optimizer)


def staged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with NO_MEMORY:
        return asynchronous.stage(tensors)


def test_shards_of_model_and_optimizer_are_on_the_gpu(snapshot: Snapshot) -> None:
    sharded = {key: tensor for key, tensor in snapshot.tensors.items() if isinstance(tensor, DTensor)}
    steps = {key for key in snapshot.tensors if key.endswith(".step")}
    assert sharded.keys() | steps == snapshot.tensors.keys()
    assert len(steps) == 4
    weights = [tensor for key, tensor in sharded.items() if "weight" in key]
    assert len(weights) == 2 * 3  # the weight and its two moments, of each block
    for weight in weights:
        assert (weight.device, weight.placements) == (CUDA, (Shard(0),))
        assert (weight.shape, weight.to_local().shape) == ((16, 16), (2, 16))


def test_from_local_moves_to_the_meshs_device_and_a_dtensor_made_directly_does_not(mesh: DeviceMesh) -> None:
    """Why `asynchronous` calls DTensor's constructor: its copies are to stay in CPU memory."""
    with NO_MEMORY:
        local = torch.empty(2, 4, device="cpu")
        moved = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert moved.to_local().device == CUDA
    kept: Any = DTensor(local, moved._spec, requires_grad=False)  # type: ignore[call-arg]
    assert (kept.device, kept.to_local().device) == (CPU, CPU)
    assert (kept.shape, kept.placements, kept.device_mesh) == ((16, 4), (Shard(0),), mesh)


def test_staged_tensors_are_in_cpu_memory_and_sharded_as_they_were(snapshot: Snapshot) -> None:
    copies = staged(snapshot.tensors)
    assert copies.keys() == snapshot.tensors.keys()
    for key, tensor in snapshot.tensors.items():
        copy = copies[key]
        assert (copy.device, copy.shape, copy.dtype) == (CPU, tensor.shape, tensor.dtype), key
        if isinstance(tensor, DTensor):
            assert isinstance(copy, DTensor), key
            assert (copy.placements, copy.device_mesh) == (tensor.placements, tensor.device_mesh), key


def _chunks(plan: SavePlan) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of what a rank writes, by name."""
    return {
        item.index.fqn: (tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in plan.items
        if item.tensor_data is not None
    }


@pytest.mark.parametrize("where", ["on the GPU", "staged"])
def test_a_save_is_planned_alike_for_the_gpus_tensors_and_for_their_copies(
    where: str, snapshot: Snapshot
) -> None:
    tensors = snapshot.tensors if where == "on the GPU" else staged(snapshot.tensors)
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=False)
    chunks = _chunks(planner.create_local_plan())
    assert chunks["model.0.linear.weight"] == ((2 * RANK, 0), (2, 16))
    assert chunks["model.1.linear.bias"] == ((2 * RANK,), (2,))
    assert chunks["optimizer.state.1.linear.weight.exp_avg"] == ((2 * RANK, 0), (2, 16))


def test_each_rank_reads_its_own_rows_of_a_checkpoint(mesh: DeviceMesh, snapshot: Snapshot) -> None:
    saver, reader = DefaultSavePlanner(), DefaultLoadPlanner()
    whole = {"w": torch.empty(16, 16, device="cpu")}
    saver.set_up_planner(whole, is_coordinator=True)
    _, metadata = saver.create_global_plan([saver.create_local_plan()])
    sharded = {"w": snapshot.tensors["model.0.linear.weight"]}
    reader.set_up_planner(sharded, metadata, is_coordinator=False)
    (item,) = reader.create_local_plan().items
    assert (tuple(item.storage_offsets), tuple(item.lengths)) == ((2 * RANK, 0), (2, 16))


def test_a_replicated_tensor_is_staged_whole(mesh: DeviceMesh) -> None:
    with NO_MEMORY:
        whole = torch.empty(5, device="cuda")
        replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    copy: Any = staged({"w": replicated})["w"]
    assert (copy.device, copy.to_local().shape, copy.placements) == (CPU, (5,), (Replicate(),))

"""What a mesh of GPUs does to sharding, with a CUDA build of PyTorch and no GPU.

    python -m pytest tests/cuda_build.py

The GPUs are imagined: a `fake` process group of eight ranks, and fake tensors on "cuda", which have a device,
a shape and no memory. This shows which device a tensor is on and which part of it; no kernel runs.
`make test` leaves this file out, as its PyTorch is a CPU build on most machines.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_utils import shard

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
        dist.destroy_process_group()


def test_shards_of_model_and_optimizer_are_on_the_gpu(mesh: DeviceMesh) -> None:
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
    for parameter in model.parameters():
        moments = [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
        for tensor in (parameter, *moments):
            assert isinstance(tensor, DTensor)
            assert (tensor.device, tensor.placements) == (CUDA, (Shard(0),))
            assert tensor.shape == (16, 16)[: tensor.ndim]
            assert tensor.to_local().shape == (2, 16)[: tensor.ndim]


def test_from_local_moves_to_the_meshs_device_and_a_dtensor_made_directly_does_not(mesh: DeviceMesh) -> None:
    """Why `asynchronous` calls DTensor's constructor: its copies are to stay in CPU memory."""
    with NO_MEMORY:
        local = torch.empty(2, 4, device="cpu")
        moved = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert moved.to_local().device == CUDA
    kept: Any = DTensor(local, moved._spec, requires_grad=False)  # type: ignore[call-arg]
    assert (kept.device, kept.to_local().device) == (CPU, CPU)
    assert (kept.shape, kept.placements, kept.device_mesh) == ((16, 4), (Shard(0),), mesh)

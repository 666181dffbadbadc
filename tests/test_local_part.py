"""Which part of a parameter a rank holds, by dimension and by position in the flattened parameter."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, empty

from fsdp_utils.sharding.local_part import local, local_chunk, pieces
from fsdp_utils.torch_internals.groups import fake_store


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=fake_store())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_1_of_4")
@pytest.mark.parametrize(
    ("mesh", "placements", "wanted"),
    [
        ([0, 1, 2, 3], [Shard(0)], ((2, 0), (2, 6))),
        ([0, 1, 2, 3], [Shard(1)], ((0, 2), (7, 2))),
        ([0, 1, 2, 3], [Replicate()], ((0, 0), (7, 6))),
        ([[0, 1], [2, 3]], [Replicate(), Shard(0)], ((4, 0), (3, 6))),
        ([[0, 1], [2, 3]], [Shard(0), Shard(1)], ((0, 3), (4, 3))),
        ([2, 3], [Shard(0)], ((0, 0), (0, 0))),  # this rank is not in it
    ],
)
def test_chunk_of_a_dtensor_is_what_the_rank_holds(mesh: list, placements: list, wanted: tuple) -> None:
    tensor = empty(7, 6, device_mesh=DeviceMesh("cpu", mesh), placements=placements)
    offsets, sizes = local_chunk(tensor)
    assert (offsets, sizes) == wanted
    assert local(tensor).numel() == sizes[0] * sizes[1]
    ((piece,),) = pieces([("", tensor)])
    assert (piece.shape, piece.numel) == (tensor.shape, local(tensor).numel())
    if placements == [Shard(0)]:
        assert piece.offset == 6 * offsets[0]


def test_a_plain_tensor_is_its_own_chunk() -> None:
    assert local_chunk(torch.ones(2, 3)) == ((0, 0), (2, 3))
    assert local_chunk(torch.ones(())) == ((), ())


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_summand_is_no_part() -> None:
    tensor = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1, 2, 3]), [Partial()])
    with pytest.raises(ValueError, match="artial"):
        local_chunk(tensor)


@pytest.mark.usefixtures("rank_1_of_4")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning")
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_pieces_in_the_flat_parameter_of_fsdp1(strategy: ShardingStrategy, views: bool) -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))  # 15 + 3 + 6 elements
    device = torch.device("cpu")
    unit = FSDP1(net, sharding_strategy=strategy, use_orig_params=views, device_id=device)
    params = list(unit.parameters())
    found = pieces(list(unit.named_parameters()))
    if views:
        places = [(piece.offset, piece.numel) for (piece,) in found]
        assert places == (
            [(0, 15), (0, 3), (0, 6)]
            if strategy == ShardingStrategy.NO_SHARD
            else [(piece.offset, param.numel()) for (piece,), param in zip(found, params, strict=True)]
        )
        assert [piece.shape for (piece,) in found] == [(3, 5), (3,), (2, 3)]
        return
    (inside,) = found
    held = [(piece.offset, piece.start, piece.numel) for piece in inside]
    assert [piece.name for piece in inside] == ["0.weight", "0.bias", "1.weight"]
    if strategy == ShardingStrategy.NO_SHARD:
        assert held == [(0, 0, 15), (0, 15, 3), (0, 18, 6)]
    else:  # elements 6 to 11 of 24
        assert held == [(6, 0, 6), (0, 0, 0), (0, 0, 0)]

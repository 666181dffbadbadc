"""The files of a checkpoint: every dtype, shape and value comes back as it was, or is refused at the save."""

import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_utils import (
    CheckpointError,
    load_distributed,
    run_on_ranks,
    save_distributed,
    verify_checkpoint,
)
from fsdp_utils.checkpoint import checkpoints

FILE = "rank-00000.safetensors"


def saved(home: str | Path, **state: Any) -> Path:
    """A checkpoint of one process, of a model whose parameters are all 1."""
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    return save_distributed(home, model, step=1, state=state).wait()


# ---- what comes back ---------------------------------------------------------------------------------------


NAMED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
UNNAMED = [torch.complex128, torch.float8_e8m0fnu]  # safetensors' reader for torch has no name for these


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # in dcp.load without a group
def test_tensors_of_every_dtype_and_shape_come_back_and_plain_readers_read_them(tmp_path: Path) -> None:
    tensors = {
        str(dtype).removeprefix("torch."): torch.tensor([[1, 0, 3], [4, 5, 6]]).float().to(dtype)
        for dtype in NAMED + UNNAMED
    }
    pair = torch.complex(torch.arange(3.0), torch.ones(3))
    tensors |= {
        "number": torch.tensor(3.5),
        "complex number": torch.tensor(3.5j, dtype=torch.complex128),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "column": torch.arange(12.0).view(3, 4)[:, 1],
        "conjugate": pair.conj(),
        "negative": pair.conj().imag,
        "expanded": torch.ones(1).expand(4),
    }
    path = saved(tmp_path / "run", **tensors)
    loaded = load_distributed(tmp_path / "run", nn.Linear(3, 2))
    for name, tensor in tensors.items():
        tensor = tensor.resolve_conj().resolve_neg()
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(loaded[name]) == bits(tensor), name
    with safe_open(path / FILE, "pt") as file:
        for name in tensors.keys() - {str(dtype).removeprefix("torch.") for dtype in UNNAMED}:
            if name != "complex number":
                assert torch.equal(file.get_tensor(f"state.{name}"), loaded[name]), name
    target = {"model.weight": torch.zeros(2, 3), "state.transposed": torch.zeros(4, 3)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(target["model.weight"], torch.ones(2, 3))
    assert torch.equal(target["state.transposed"], tensors["transposed"])


VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [True, 1, 2**80, -(2**70), 0.1, -0.0, 5e-324, 1.5 + 2j],
    "not finite": [math.inf, -math.inf],
    "text": ["", "ä\n", "\ud800", "!"],
    "bytes": [b"", b"\x00\xff", bytearray(b"1")],
    "tuples": ((), (1, (2, [3])), torch.Size([2, 3])),
    "sets": [set(), {1, "a", (2,)}, frozenset({None})],
    "dicts": [{}, {1: "a", (2, None): {"b": True}}, {"!": "tuple", "value": []}],
    "kinds of dicts": [OrderedDict(b=1, a=2), Counter([30, 80, 80]), Counter()],
    "of torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "of NumPy": [np.float32(1.5), np.int64(3), np.bool_(True), np.float64(-0.0)],
}


@pytest.mark.parametrize("what", VALUES)
def test_values_come_back_as_they_were(what: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", value=VALUES[what])
    found = load_distributed(tmp_path / "run", nn.Linear(3, 2))["value"]
    assert found == VALUES[what]
    assert what == "sets" or repr(found) == repr(VALUES[what])  # 0.0 equals -0.0, and 1 equals True
    assert type(found) is type(VALUES[what])


def test_every_bit_of_a_float_and_of_an_array_comes_back(tmp_path: Path) -> None:
    (nan,) = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))
    generator: Any = np.random.RandomState(3).get_state()
    saved(tmp_path / "run", nan=nan, generator=generator, big=np.arange(3, dtype=">f4").reshape(3, 1))
    loaded = load_distributed(tmp_path / "run", nn.Linear(3, 2))
    assert struct.pack(">d", loaded["nan"]).hex() == "7ff8000000000123"
    assert np.array_equal(loaded["generator"][1], generator[1])
    assert (loaded["big"].dtype.str, loaded["big"].shape) == (">f4", (3, 1))


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, Any] = {
    "an object": object(),
    "a function": len,
    "a named tuple": np.linalg.svd(np.eye(2)),
    "an array of objects": np.array([None]),
    "a large array": np.zeros(1 << 20),
    "a list in itself": endless(),
    "a tensor on meta": torch.empty(2, device="meta"),
    "a sparse tensor": torch.ones(2).to_sparse(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_come_back_is_refused_by_name_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.outer.*: expected"):
        saved(tmp_path / "run", outer={"inner": REFUSED[what]})
    assert checkpoints(tmp_path / "run") == {}
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


# ---- meshes ------------------------------------------------------------------------------------------------


PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "rows and columns": [Shard(0), Shard(1)],
    "last": [Shard(2), Shard(2)],
    "rows twice": [Shard(0), Shard(0)],
    "copies": [Replicate(), Replicate()],
}


def on_a_mesh(shape: tuple[int, ...], values: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", shape)
    whole = torch.arange(5 * 7 * 3.0).view(5, 7, 3) if values else torch.zeros(5, 7, 3)
    return {name: distribute_tensor(whole, mesh, where) for name, where in PLACEMENTS.items()}


class Parts(nn.Module):
    def __init__(self, shape: tuple[int, ...], values: bool) -> None:
        super().__init__()
        for name, tensor in on_a_mesh(shape, values).items():
            self.register_parameter(name.replace(" ", "_"), nn.Parameter(tensor))


def save_parts(home: Path, shape: tuple[int, ...]) -> None:
    save_distributed(home, Parts(shape, True), step=1).wait()


def load_parts(home: Path, shape: tuple[int, ...]) -> list[bool]:
    model = Parts(shape, False)
    load_distributed(home, model)
    whole = torch.arange(5 * 7 * 3.0).view(5, 7, 3)
    params: list[Any] = list(model.parameters())
    return [torch.equal(param.full_tensor(), whole) for param in params]


def test_uneven_parts_on_one_mesh_are_loaded_on_another(tmp_path: Path) -> None:
    run_on_ranks(save_parts, tmp_path, (2, 2), world_size=4)
    verify_checkpoint(tmp_path)
    sizes = [path.stat().st_size for path in checkpoints(tmp_path)[1].glob("rank-*")]
    assert sum(sizes) < len(PLACEMENTS) * 420 + 4 * 2000, "a part that two ranks hold is written once"
    for shape in ((1, 3), (2, 1)):
        for found in run_on_ranks(load_parts, tmp_path, shape, world_size=math.prod(shape)):
            assert all(found)

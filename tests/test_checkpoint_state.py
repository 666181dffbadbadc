"""The state of a checkpoint: values and tensors come back as they were, objects are loaded in place."""

import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_utils import CheckpointError, load_distributed, run_on_ranks, save_distributed
from fsdp_utils.checkpoint import PerRank
from tests.checkpoints import assert_told, build, outcome, rank, refusals, whole, wholes

# ---- values ------------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Of the same types and bits, however deep."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return repr(one) == repr(other) if isinstance(one, complex) else one == other


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


VALUES: dict[str, Any] = {
    "none and truth": [None, True, False, 0, 1],
    "integers": [2**63, -(2**63) - 1, 2**200, -1],
    "floats": [0.1 + 0.2, -0.0, 5e-324, 1.7e308, float("inf"), -float("inf"), float("nan")],
    "another nan": struct.unpack("d", struct.pack("Q", 0xFFF8_0000_0000_BEEF))[0],
    "complex": [1j, complex(-0.0, float("inf"))],
    "text": ["", "ü\0\n\ud800", '{"!": 1}', b"\0\xff", bytearray(b"x")],
    "nested": ([], (), {}, ((1,), [(2, [3])]), {"": {"a.b/c": (None,)}}),
    "keys": {1: "a", "1": "b", (1, "x"): "c", None: 0, 2.5: "d", b"k": 2},
    "like the codec's own": {"!": "tuple", "value": [1]},
    "sets": [{3, 1, "a"}, frozenset({(1, 2)}), set()],
    "dicts": [OrderedDict([("b", 1), ("a", 2)]), Counter("abca"), OrderedDict()],
    "torch's": [torch.float8_e4m3fn, torch.Size([2, 0]), torch.device("cpu"), torch.device("cuda", 1)],
    "numpy's numbers": [np.float64(-0.0), np.float16("nan"), np.int32(-7), np.uint64(2**63), np.bool_(True)],
    "numpy's arrays": [np.arange(6, dtype="<i2").reshape(2, 3).T, np.array(1.5), np.ones((0, 2), ">f8")],
    "generators": [random.getstate(), np.random.RandomState(3).get_state(), torch.get_rng_state()],
    "numpy's generator": np.random.default_rng(5).bit_generator.state,
}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
COMPLEX = torch.tensor([1 + 2j, -3 - 0j])
TENSORS: dict[str, Tensor] = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "conjugated": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "one number": torch.tensor(-0.0),
    "empty": torch.empty(0, 3),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every other": torch.arange(8)[1::2],
}


class Buffers(nn.Module):
    """TENSORS as buffers, and values as extra state."""

    def __init__(self, filled: bool) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.ones(2))
        self.extra = VALUES if filled else {}
        for number, tensor in enumerate(TENSORS.values()):
            self.register_buffer(
                f"b{number}", tensor.detach() if filled else torch.zeros_like(tensor.detach())
            )

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_small_tensors_do_not_shift_large_ones(tmp_path: Path) -> None:
    """Copies from a file to memory take longer where both begin at other multiples of 64 bytes."""
    state = {"a": torch.ones(1), "b": torch.ones(16), "c": torch.ones(3), "d": torch.ones(32)}
    save = save_distributed(tmp_path, nn.Linear(16, 16, bias=False), step=1, state=state)
    content = (save.wait() / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = {key: 8 + length + one["data_offsets"][0] for key, one in header.items() if key[:2] != "__"}
    assert [begins[key] % 64 for key in ("model.weight", "state.b", "state.d")] == [0, 0, 0]


def test_values_and_tensors_come_back_with_every_bit(tmp_path: Path) -> None:
    """In the state, in per_rank, in a model and in its optimizer."""
    model, into = Buffers(filled=True), Buffers(filled=False)
    optimizers = [torch.optim.SGD(one.parameters()) for one in (model, into)]
    held = {**VALUES, **TENSORS, "objects": [{"deep": [TENSORS, (torch.ones(1),)]}]}
    optimizers[0].state[model.param] = held
    optimizers[0].param_groups[0]["note"] = VALUES
    save = save_distributed(tmp_path, model, optimizers[0], step=1, state=held, per_rank={"own": held})
    with safe_open(save.wait() / "rank-00000.safetensors", "pt") as file:  # a plain reader
        for name, tensor in TENSORS.items():
            assert same(file.get_tensor(f"state.{name}"), tensor), name
    found = load_distributed(tmp_path, into, optimizers[1])
    for name, value in held.items():
        assert same(found[name], value), name
        assert same(found["own"][name], value), name
        assert same(optimizers[1].state[into.param][name], value), name
    for name, value in VALUES.items():
        assert same(into.extra[name], value), name
        assert same(optimizers[1].param_groups[0]["note"][name], value), name
    for number, (name, tensor) in enumerate(TENSORS.items()):
        assert same(into.get_buffer(f"b{number}"), tensor), name


class Custom:
    pass


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state here")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


Pair = namedtuple("Pair", "first second")
ONE = torch.ones(1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([ONE]), 2)
UNSAVABLE: dict[str, tuple[Any, str]] = {
    "an object": (Custom(), r"x: expected full tensors.*found a \S+\.Custom.* Save what it consists of"),
    "with a state": ([SCHEDULER], r"x\.0: .*StepLR.*such as its \.state_dict\(\)"),
    "no dict": ({"x": defaultdict(list)}, r"x\.x: .*defaultdict.*such as .*dict\(it\)"),
    "named tuple": (Pair(1, 2), r"x: .*Pair"),
    "large array": (np.ones(1 << 18), r"x: .*numpy\.ndarray.*torch\.from_numpy\(it\)"),
    "complex128": (torch.ones(2, dtype=torch.complex128), r"x: .*found a Tensor of torch\.complex128"),
    "sparse": (torch.eye(2).to_sparse(), r"x: "),
    "on meta": (torch.ones(2, device="meta"), r"x: "),
    "fails": (Broken(), r"'x': state_dict\(\) of Broken failed: RuntimeError: no state here"),
    "one name": ({"a": {"b.c": ONE}, "a.b": {"c": ONE}}, r"x\.a\.b\.c: expected one tensor .*found two"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_could_not_be_read_back_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value, words = UNSAVABLE[name]
    for given, prefix in (("state", r"state\."), ("per_rank", r"per_rank\.0\.")):
        match = prefix + words if words[0] == "x" else words
        with pytest.raises(CheckpointError, match=match):
            save_distributed(tmp_path, nn.Linear(2, 2), step=1, **{given: {"x": value}})
    assert not list(tmp_path.glob("*-step-*"))


STEP = "expected step to be a whole number of at least 0, found"
KEEP = "expected keep to be a whole number of at least 1, or None, found"
MAPPING = "to be a mapping from names to values"
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *(({"step": step}, STEP) for step in (True, 1.0, None, -1)),
    *(({"step": 1, "keep": keep}, KEEP) for keep in (True, 0, 2.0)),
    *(({"step": 1, name: [("a", 1)]}, MAPPING) for name in ("state", "per_rank")),
    ({"step": 1, "state": {"x": 1}, "per_rank": {"x": 2}}, r"found \['x'\] in state and in per_rank"),
]


@pytest.mark.parametrize(("options", "words"), ARGUMENTS)
def test_other_arguments_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        save_distributed(tmp_path, nn.Linear(2, 2), **options)
    assert not list(tmp_path.iterdir())


def test_a_name_may_be_that_of_an_argument_or_none_in_python(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"model": 1, "optimizer": ONE, "state": 5, "my.name": 7, "": 8, "!": 9, "a/../b": torch.ones(2)}
    save_distributed(tmp_path, model, step=3, state=state)
    assert same(dict(load_distributed(tmp_path, model)), {"step": 3, **state})
    save_distributed(tmp_path, model, step=4, state={"step": "mine"})
    assert load_distributed(tmp_path, model) == {"step": "mine"}
    save_distributed(tmp_path, model, step=4, state={1: ONE})  # type: ignore[dict-item]
    assert same(dict(load_distributed(tmp_path, model)), {"step": 4, 1: ONE})
    save_distributed(tmp_path, model, step=5, per_rank={"!": ONE})
    assert same(load_distributed(tmp_path, model)["!"], ONE)


# ---- what differs between ranks, and objects ---------------------------------------------------------------


class Loader:
    """A data loader that knows its place: another one on each rank."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "rng": torch.full((2,), self.place)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.place < 0:
            raise KeyError("broken")
        self.place = state_dict["place"]


def with_objects(seed: int) -> tuple[Any, Any, Any]:
    model, optimizer = build("fsdp2", seed=seed)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def of_rank(number: int) -> tuple[int, Tensor]:
    return number, torch.full((number + 1,), number)


def save_objects(folder: Path) -> dict[str, Any]:
    model, optimizer, scheduler = with_objects(0)
    optimizer.step()
    for _ in range(4):
        scheduler.step()
    scale = model.blocks[0].scale.fill_(rank())
    per_rank = {"data": Loader(10 + rank()), "own": of_rank(rank()), "blocks.0.scale": scale}
    save_distributed(folder, model, optimizer, step=1, state={"scheduler": scheduler}, per_rank=per_rank)
    return scheduler.state_dict()


def load_objects(folder: Path, expected: dict[str, Any]) -> None:
    model, optimizer, scheduler = with_objects(1)
    loader = Loader()
    found = load_distributed(folder, model, optimizer, state={"scheduler": scheduler, "data": loader})
    assert scheduler.state_dict() == found["scheduler"] == expected
    assert loader.place == found["data"]["place"] == 10 + rank()
    assert same(found["own"], of_rank(rank()))
    assert found["blocks.0.scale"].tolist() == [rank()] * 3
    assert model.blocks[0].scale.tolist() == [0] * 3, "the model's part has those of rank 0"


def load_on_others(folder: Path) -> None:
    model, optimizer, scheduler = with_objects(1)
    before = wholes(model, optimizer)
    error = outcome(lambda: load_distributed(folder, model, optimizer, state={"data": Loader()})).error
    assert "state 'data': expected one state in the checkpoint, found one of each rank" in str(error)
    assert all(torch.equal(value, before[name]) for name, value in wholes(model, optimizer).items())
    found = load_distributed(folder, model, optimizer, state={"scheduler": scheduler})
    assert scheduler.last_epoch == 4
    assert isinstance(found["data"], PerRank)
    assert [one["place"] for one in found["data"]] == [10, 11]
    assert same(list(found["own"]), [of_rank(number) for number in range(2)])


def test_objects_are_loaded_in_place_and_values_of_ranks_come_back_to_them(tmp_path: Path) -> None:
    expected = run_on_ranks(save_objects, tmp_path)[0]
    run_on_ranks(load_objects, tmp_path, expected)
    run_on_ranks(load_on_others, tmp_path, world_size=3)


def wrong_calls(folder: Path) -> dict[str, str | None]:
    model, _, scheduler = with_objects(0)
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    one = torch.tensor([1 + 1j])
    copies = [DTensor.from_local(torch.full((2,), float(rank())), mesh, [Replicate()], run_check=False)]
    save_distributed(folder, model, step=1, state={"data": Loader(1)})
    (with_extra := Buffers(filled=True)).extra = {"a": ONE * rank()}
    told = refusals({"extra": lambda: save_distributed(folder / "x", with_extra, step=1)})
    save_distributed(folder / "extra", with_extra, step=1, per_rank={"_extra_state": with_extra.extra})
    states: dict[str, dict[str, Any]] = {
        "value": {"a": 1, "b": {"x": rank()}},
        "bit": {"b": one.conj() if rank() else one},
        "tensor": {"b": [torch.full((2,), rank())]},
        "broken": {"data": Broken() if rank() else Loader()},
        "partial": {"b": [DTensor.from_local(torch.ones(2), mesh, [Partial()])]},
        "copies": {"b": copies},
    }
    given: dict[str, Any] = {
        "missing": {"scheduler": scheduler},
        "differs": {"data": Loader()} if rank() else {},
        "raises": {"data": Loader(-rank())},
    }
    saves = {k: lambda v=v: save_distributed(folder / "x", model, step=1, state=v) for k, v in states.items()}
    own = {"own part": lambda: save_distributed(folder / "x", model, step=1, per_rank={"b": part})}
    loads = {k: lambda v=v: load_distributed(folder, model, state=v) for k, v in given.items()}
    return told | refusals({**saves, **own, **loads})


def test_what_cannot_be_saved_or_loaded_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    expected = {
        "extra": ("_extra_state", "on all ranks", "rank 1", "goes into per_rank="),
        "copies": "found that 'state.b.0' on rank 1 differs from rank 0",
        "value": ("state['b']['x'] on all ranks", "rank 1", "per_rank"),
        "bit": ("state.b", "rank 1", "per_rank"),
        "tensor": ("state.b.0", "rank 1", "per_rank"),
        "broken": ("rank 1", "no state here"),
        "partial": ("state.b.0: expected one contiguous part of the tensor on each rank, found P(sum)",),
        "own part": ("per_rank.", "b: expected a tensor of this rank, found a DTensor"),
        "missing": (
            "state 'scheduler': expected one state in the checkpoint, found none",
            "has ['data']",
        ),
        "differs": ("expected the same state on all ranks",),
        "raises": ("rank 1: state 'data': load_state_dict() of Loader failed", "may be partly loaded"),
    }
    assert_told(run_on_ranks(wrong_calls, tmp_path), expected)
    assert not list((tmp_path / "x").glob("*-step-*"))


# ---- sharded tensors ---------------------------------------------------------------------------------------

ROWS = 5  # do not divide among 2, 3 or 4 ranks
PLACEMENTS: dict[str, list[Any]] = {
    "rows and columns": [Shard(0), Shard(1)],
    "columns and rows": [Shard(1), Shard(0)],
    "rows twice": [Shard(0), Shard(0)],
    "columns of copies": [Replicate(), Shard(1)],
    "copies of columns": [Shard(1), Replicate()],
    "from the end": [Shard(-1), Replicate()],
    "copies": [Replicate(), Replicate()],
}


def numbers(start: int) -> Tensor:
    return torch.arange(float(4 * ROWS)).reshape(ROWS, 4) + start


def linear(columns: bool, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, ROWS, bias=False), nn.BatchNorm1d(ROWS))
    if not dist.is_initialized():
        return model
    return fully_shard(
        model, shard_placement_fn=lambda param: Shard(1) if columns and param.dim() == 2 else None
    )


def save_trees(folder: Path) -> None:
    """Of averages, a second optimizer, a second model, and tensors of all placements."""
    model = linear(columns=False)
    mesh = init_device_mesh("cpu", (2, 2))
    average = distribute_tensor(numbers(0), mesh, [Replicate(), Shard(0)])
    state: dict[str, Any] = {
        "average": {"module.0.weight": average, "decay": 0.9},
        "second": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": average + 100}},
            "groups": [{"lr": 1}],
        },
        "own": ([average], (average, 7)),
        "model": linear(columns=True, seed=5),
        "by place": {name: distribute_tensor(numbers(1), mesh, some) for name, some in PLACEMENTS.items()},
    }
    save = save_distributed(folder, model, step=1, state=state, asynchronous=True)
    average.to_local().zero_()  # what was given may change
    assert state["average"]["module.0.weight"] is average, "the caller's state was changed"
    save.wait()


def load_trees(folder: Path, columns: bool) -> list[str]:
    """What came back otherwise than it was saved, or not as the model is sharded."""
    model, second = linear(columns), linear(columns, seed=6)
    found = load_distributed(folder, model, state={"model": second})
    weight, wrong = model[0].weight, []
    average = found["average"].pop("module.0.weight")
    tensors = {
        "average": (average, numbers(0)),
        "moment": (found["second"]["state"][0].pop("exp_avg"), numbers(100)),
        "list": (found["own"][0].pop(), numbers(0)),
        "tuple": (found["own"][1][0], numbers(0)),
        **{name: (found["by place"][name], numbers(1)) for name in PLACEMENTS},
    }
    for name, (tensor, expected) in tensors.items():
        if not torch.equal(whole(tensor), expected):
            wrong.append(f"{name}: other values")
        if isinstance(tensor, DTensor) != isinstance(weight, DTensor):
            wrong.append(f"{name}: {type(tensor).__name__}")
    if isinstance(weight, DTensor) and average.placements != weight.placements:
        wrong.append(f"the average is not sharded as the model: {average.placements}")
    rest = [found["average"], found["second"], found["own"][1][1]]
    if not same(
        rest, [{"decay": 0.9}, {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 1}]}, 7]
    ):
        wrong.append(f"{rest}")
    expected = wholes(linear(columns, seed=5))
    return wrong + [name for name, value in wholes(second).items() if not torch.equal(value, expected[name])]


def test_sharded_tensors_in_the_state_come_back_as_the_model_is_sharded(tmp_path: Path) -> None:
    run_on_ranks(save_trees, tmp_path, world_size=4)
    for ranks, columns in ((2, True), (3, False)):
        assert run_on_ranks(load_trees, tmp_path, columns, world_size=ranks) == [[]] * ranks
    assert load_trees(tmp_path, False) == []

"""The state of a checkpoint: values and tensors come back as they were, objects are loaded in place."""

import json
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_utils import CheckpointError, load_distributed, save_distributed
from fsdp_utils.checkpoint import PerRank
from tests.checkpoints import assert_told, build, outcome, played, rank, refusals, wholes

Happened = tuple[Path, dict[str, list[Any]]]  # a folder, and what each scene returned by rank
pytestmark = pytest.mark.timeout(300)

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
    return repr(one) == repr(other) if isinstance(one, float) else one == other


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


VALUES: dict[str, Any] = {
    "none and truth": [None, True, False, 0, 1],
    "integers": [2**63, -(2**63) - 1, 2**200, -1],
    "floats": [0.1 + 0.2, -0.0, 5e-324, 1.7e308, float("inf"), -float("inf"), float("nan")],
    "text": ["", "ü\0\n\ud800", '{"!": 1}', b"\0\xff"],
    "nested": ([], (), {}, ((1,), [(2, [3])]), {"": {"a.b/c": (None,)}}),
    "keys": {1: "a", "1": "b", (1, "x"): "c", None: 0, 2.5: "d", b"k": 2},
    "like the codec's own": {"!": "tuple", "value": [1]},
    "sets": [{3, 1, "a"}, frozenset({(1, 2)}), set()],
    "dicts": [OrderedDict([("b", 1), ("a", 2)]), Counter("abca"), OrderedDict()],
    "torch's": [torch.float8_e4m3fn, torch.Size([2, 0]), torch.device("cpu"), torch.device("cuda", 1)],
    "numpy's numbers": [np.float64(-0.0), np.float16("nan"), np.int32(-7), np.uint64(2**63), np.bool_(True)],
    "numpy's arrays": [
        np.arange(6, dtype="<i2").reshape(2, 3).T,
        np.array(1.5),
        np.ones((0, 2)),
        np.arange(4)[::-1],
    ],
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
UNSAVABLE: list[tuple[Any, str]] = [
    (Custom(), r"x: expected full tensors.*found a \S+\.Custom.* Save what it consists of"),
    ([SCHEDULER], r"x\.0: .*StepLR.*such as its \.state_dict\(\)"),
    ({"x": defaultdict(list)}, r"x\.x: .*defaultdict.*such as .*dict\(it\)"),
    (Pair(1, 2), r"x: .*Pair"),
    (np.array([None]), r"x: .*numpy\.ndarray.*"),
    (torch.ones(2, dtype=torch.complex128), r"x: .*found a Tensor of torch\.complex128"),
    (torch.eye(2).to_sparse(), r"x: "),
    (torch.ones(2, device="meta"), r"x: "),
    (Broken(), r"'x': state_dict\(\) of Broken failed: RuntimeError: no state here"),
    ({"a": {"b.c": ONE}, "a.b": {"c": ONE}}, r"x\.a\.b\.c: expected one tensor .*found two"),
]


STEP = "expected step to be a whole number of at least 0, found"
KEEP = "expected keep to be a whole number of at least 1, or None, found"
MAPPING = "to be a mapping from names to values"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"step": step}, STEP) for step in (True, 1.0, None, -1)),
    *(({"keep": keep}, KEEP) for keep in (True, 0, 2.0)),
    *(({name: [("a", 1)]}, MAPPING) for name in ("state", "per_rank")),
    ({"state": {"x": 1}, "per_rank": {"x": 2}}, r"found \['x'\] in state and in per_rank"),
    ({"state": {"x": [Custom()]}}, r"state\.x\.0: expected full tensors"),
    ({"per_rank": {"x": [Custom()]}}, r"per_rank\.0\.x\.0: expected full tensors"),
    *(({name: {"x": value}}, words) for name in ("state", "per_rank") for value, words in UNSAVABLE),
]


def test_what_could_not_be_read_back_and_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    for options, words in REFUSED:
        with pytest.raises(CheckpointError, match=words):
            save_distributed(tmp_path, nn.Linear(2, 2), **{"step": 1, **options})
    assert not list(tmp_path.iterdir())


def test_a_name_may_be_that_of_an_argument_or_none_in_python(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"model": 1, "optimizer": ONE, "my.name": 7, "": 8, "!": 9, "a/../b": torch.ones(2)}
    save_distributed(tmp_path, model, step=3, state=state, per_rank={"step": "mine"})
    assert same(dict(load_distributed(tmp_path, model)), {"step": "mine", **state})


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


def save_and_load_objects(folder: Path) -> None:
    model, optimizer, scheduler = with_objects(0)
    optimizer.step()
    for _ in range(4):
        scheduler.step()
    scale = model.blocks[0].scale.fill_(rank())
    per_rank = {"data": Loader(10 + rank()), "own": of_rank(rank()), "blocks.0.scale": scale}
    state = {"scheduler": scheduler}
    save_distributed(folder / "objects", model, optimizer, step=1, state=state, per_rank=per_rank)
    expected = scheduler.state_dict()
    model, optimizer, scheduler = with_objects(1)
    objects = {"scheduler": scheduler, "data": Loader()}
    found = load_distributed(folder / "objects", model, optimizer, state=objects)
    assert scheduler.state_dict() == found["scheduler"] == expected
    assert objects["data"].place == found["data"]["place"] == 10 + rank()
    assert same(found["own"], of_rank(rank()))
    assert found["blocks.0.scale"].tolist() == [rank()] * 3
    assert model.blocks[0].scale.tolist() == [0] * 3, "the model's part has those of rank 0"


def load_objects_on_others(folder: Path) -> str:
    model, optimizer, scheduler = with_objects(1)
    before = wholes(model, optimizer)
    told = outcome(lambda: load_distributed(folder / "objects", model, optimizer, state={"data": Loader()}))
    assert all(torch.equal(value, before[name]) for name, value in wholes(model, optimizer).items())
    found = load_distributed(folder / "objects", model, optimizer, state={"scheduler": scheduler})
    assert scheduler.last_epoch == 4
    assert isinstance(found["data"], PerRank)
    assert [one["place"] for one in found["data"]] == [10, 11]
    assert same(list(found["own"]), [of_rank(number) for number in range(2)])
    return str(told.error)


def test_objects_are_loaded_in_place_and_values_of_ranks_come_back_to_them(happened: Happened) -> None:
    """The ranks that save and load them assert the rest."""
    for told in happened[1]["load_objects_on_others"]:
        assert "state 'data': expected one state in the checkpoint, found one of each rank" in told


def wrong_calls(folder: Path) -> dict[str, str | None]:
    model, _, scheduler = with_objects(0)
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    copies = [DTensor.from_local(torch.full((2,), float(rank())), mesh, [Replicate()], run_check=False)]
    save_distributed(folder / "wrong", model, step=1, state={"data": Loader(1)})
    (with_extra := Buffers(filled=True)).extra = {"a": ONE * rank()}
    told = refusals({"extra": lambda: save_distributed(folder / "x", with_extra, step=1)})
    save_distributed(folder / "extra", with_extra, step=1, per_rank={"_extra_state": with_extra.extra})
    states: dict[str, dict[str, Any]] = {
        "value": {"a": 1, "b": {"x": rank()}},
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
    loads = {k: lambda v=v: load_distributed(folder / "wrong", model, state=v) for k, v in given.items()}
    return told | refusals({**saves, **own, **loads})


def test_what_cannot_be_saved_or_loaded_is_the_same_error_on_all_ranks(happened: Happened) -> None:
    folder, found = happened
    expected = {
        "extra": ("_extra_state", "on all ranks", "rank 1", "goes into per_rank="),
        "copies": "found that 'state.b.0' on rank 1 differs from rank 0",
        "value": ("['state']['b']['x'] on all ranks", "rank 1", "per_rank"),
        "tensor": ("state.b.0", "rank 1", "per_rank"),
        "broken": ("rank 1", "no state here"),
        "partial": ("state.b.0: expected one contiguous part of the tensor on each rank, found P(sum)",),
        "own part": ("per_rank.", "b: expected a plain tensor in per_rank="),
        "missing": "state 'scheduler': expected one state in the checkpoint, found none",
        "differs": ("expected the same state on all ranks",),
        "raises": ("rank 1: state 'data': load_state_dict() of Loader failed", "may be partly loaded"),
    }
    assert_told(found["wrong_calls"], expected)
    assert not list((folder / "x").glob("*-step-*"))


# ---- all that happens on ranks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    folder = tmp_path_factory.mktemp("state")
    return folder, {
        **played([save_and_load_objects, wrong_calls], folder),
        **played([load_objects_on_others], folder, world_size=3),
    }

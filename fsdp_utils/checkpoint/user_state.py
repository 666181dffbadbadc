"""The user's state: plain data that is read without running code, sharded tensors, objects with a state."""

import ctypes
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from fsdp_utils.checkpoint.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from fsdp_utils.checkpoint.safe_pickle import check_archive, check_key
from fsdp_utils.sharding.local_part import local
from fsdp_utils.torch_internals.names import ShardedTensor


class PerRank(list[Any]):
    """The values that one name in the state had on each rank, in the order of the ranks that saved them.

    `load_distributed` and `load_full` return it where the values differed and the number of ranks is another
    one now: the program decides what its ranks make of them.

    Example::

        rng = load_distributed("run", model, optimizer)["rng"]
        if isinstance(rng, PerRank):
            print(f"saved by {len(rng)} ranks")  # saved by 2 ranks
            rng = rng[get_rank() % len(rng)]
        torch.set_rng_state(rng)
    """


class LoadedState(dict[str, Any]):
    """The state that a load returns, by name, and what of the model it did not load.

    Attributes:
        missing_keys: names in the model that were not loaded, and are as they were.
        unexpected_keys: names in the checkpoint that were left aside.

    Example::

        model.score = nn.Linear(8, 2)
        loaded = load_distributed("run", model, strict=False)
        print("start anew:", loaded.missing_keys)
    """

    def __init__(self, state: Mapping[str, Any], missing_keys: list[str], unexpected_keys: list[str]) -> None:
        super().__init__(state)
        self.missing_keys, self.unexpected_keys = missing_keys, unexpected_keys


def pack(value: Any, what: str) -> bytes:
    """Serialise plain data; refuse what could not be read back without running code."""
    try:
        return _packed(value)
    except Exception as error:
        where, culprit = _culprit(value)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        raise CheckpointError(
            f"{what}: expected tensors, numbers, strings, None, and lists, tuples, sets and dicts of them, "
            f"found {kind}{where and f' at {where}'}, which cannot be read back safely ({reason(error)})."
            + _remedy(culprit)
        ) from error


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    unpack(buffer.getvalue())
    return buffer.getvalue()


def view(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor. Valid as long as the tensor exists."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def unpack(data: bytes) -> Any:
    """Read plain data without running anything."""
    check_archive(io.BytesIO(data))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def reason(error: Exception) -> str:
    """Pick the line of torch.load's error that says what it met; the others advise to trust the file."""
    lines = str(error).splitlines()
    met = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    found = (line.split("WeightsUnpickler error: ")[-1].split(". ")[0].strip() for line in met + lines)
    return next(filter(None, found), type(error).__name__)


def _culprit(value: Any, where: str = "") -> tuple[str, Any]:
    """Find the first part of a value that cannot be packed: where it is, and the part."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{where}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set):
        parts = [(f"{where}[{index}]", part) for index, part in enumerate(value)]
    return next((_culprit(part, path) for path, part in parts if not _can_be_packed(part)), (where, value))


def _can_be_packed(value: Any) -> bool:
    try:
        _packed(value)
    except Exception:
        return False
    return True


def _remedy(culprit: Any) -> str:
    if hasattr(culprit, "state_dict"):
        return " Save its .state_dict(), and give that to its load_state_dict() after loading"
    if type(culprit).__module__ == "numpy":
        scalar = hasattr(culprit, "item") and getattr(culprit, "shape", None) == ()
        return " Save its .item()" if scalar else " Save torch.from_numpy(array), or its .tolist()"
    return " Save what it consists of"


def digest(value: Any) -> str:
    """Hash plain data: equal for equal values on any rank. (Pickles of equal values can differ.)"""

    def lines(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield "{"
            for key, part in value.items():
                yield repr(key)
                yield from lines(part)
            yield "}"
        elif isinstance(value, list | tuple):
            yield type(value).__name__
            for part in value:
                yield from lines(part)
            yield "]"
        elif isinstance(value, Tensor):
            data = local(value).detach().cpu().contiguous()  # a DTensor has no address
            yield f"{value.dtype}{list(value.shape)}{blake3(view(data)).hexdigest()}"
        elif isinstance(value, set | frozenset):
            yield f"{type(value).__name__}{sorted(map(repr, value))}"
        else:
            yield f"{type(value).__name__} {value!r}"

    return blake3("\n".join(lines(value)).encode()).hexdigest()


# ---- sharded tensors: an average of the weights, the state of a second optimizer --------------------


STATE = "state."

# Flat name of a tensor -> its path in the state, and the dimension that each dimension of its mesh shards
# (None: replicated).
Places = dict[str, tuple[tuple[Any, ...], list[int | None]]]


class StateToSave:
    """The state that save_distributed or save_full was given, taken apart by take_out().

    Args:
        given: what was given as `state=`, which may be anything.
        named: what was given by keyword.
    """

    def __init__(self, given: Any, named: Mapping[str, Any]) -> None:
        self._given, self._named = given, named
        self.plain: dict[str, Any] = {}  # with None instead of DTensors
        self.tensors: dict[str, Tensor] = {}  # the DTensors, by flat name
        self.places: Places = {}

    def take_out(self) -> None:
        """Ask the objects for their state_dict(), and take the DTensors out.

        Raises:
            CheckpointError: the names cannot be told apart, or a tensor is sharded in a way that cannot be
                saved here.
        """
        given = named_values(self._given)
        if twice := sorted(given.keys() & self._named.keys()):
            raise CheckpointError(
                f"expected each name in the state once, found {twice} by keyword and in state="
            )
        for name, value in {**given, **self._named}.items():
            if isinstance(value, Stateful):
                check_stateful(name, value)
                value = value.state_dict()
            self.plain[name] = self._plain(value, (name,))

    def _plain(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, DTensor):
            key = STATE + ".".join(map(str, path))
            if key in self.tensors:
                raise CheckpointError(f"two sharded tensors in the state have the name {key!r}")
            self.tensors[key], self.places[key] = value.detach(), (path, _sharded_dims(value, path))
            return None
        if isinstance(value, ShardedTensor):
            raise CheckpointError(
                f"state {_shown(path)}: expected a whole tensor or a DTensor, found a ShardedTensor of "
                "FSDP1, of which each rank has one part. Gather it first, or use FSDP2 (fully_shard)"
            )
        if not holds_sharded(value):
            return value
        if isinstance(value, Mapping):
            return {key: self._plain(part, (*path, key)) for key, part in value.items()}
        if hasattr(value, "_fields"):
            raise CheckpointError(
                f"state {_shown(path)}: expected sharded tensors in lists, tuples and dicts, found a named "
                f"tuple, {type(value).__name__}, which cannot be read back safely. Save its ._asdict()"
            )
        return type(value)(self._plain(part, (*path, index)) for index, part in enumerate(value))


def named_values(state: Any) -> dict[str, Any]:
    """Return what was given as `state=`, {} for None.

    Raises:
        CheckpointError: it is no mapping from names.
    """
    if state is None:
        return {}
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        found = f"the names {list(state)[:5]}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise CheckpointError(
            f'expected state to be a mapping from names to values, such as {{"epoch": 3}}, found {found}'
        )
    return dict(state)


def check_stateful(name: str, value: Any) -> None:
    """Refuse an object whose state_dict() is a collective.

    Raises:
        CheckpointError: it is a model in FSDP1.
    """
    if isinstance(value, nn.Module) and any(isinstance(module, FSDP1) for module in value.modules()):
        raise CheckpointError(
            f"state {name!r}: expected an object whose state_dict() involves no other rank, found a model in "
            "FSDP1. Save it as a model, in a directory of its own, or use FSDP2 (fully_shard)"
        )


class StateToLoad:
    """The objects that load_distributed or load_full was given, to be loaded in place."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._objects: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Check the objects, and return their names.

        Raises:
            CheckpointError: one of them cannot be loaded in place.
        """
        self._objects = named_values(self._given)
        for name, value in self._objects.items():
            if not isinstance(value, Stateful):
                raise CheckpointError(
                    f"state {name!r}: expected an object with state_dict() and load_state_dict(), found a "
                    f"{type(value).__name__}. What is no such object comes back in the dict that is returned"
                )
            check_stateful(name, value)
        return sorted(self._objects)

    def check(self, saved: Mapping[str, Any]) -> None:
        """Check before anything is loaded that the checkpoint holds a state for each object.

        Raises:
            CheckpointError: it does not.
        """
        for name in self._objects:
            if name not in saved:
                raise CheckpointMismatchError(
                    f"state {name!r}: expected in the checkpoint, which holds {sorted(saved)[:10]}. Leave it "
                    "out of state= if it is to start anew"
                )
            if isinstance(saved[name], PerRank):
                raise CheckpointMismatchError(
                    f"state {name!r}: expected one value, found one for each of {len(saved[name])} ranks, "
                    "which are not as many as now. Leave it out of state=, and decide which rank goes on "
                    "from which of the values in the dict that is returned"
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Call load_state_dict() of each object.

        Raises:
            CheckpointError: it failed.
        """
        name = ""
        try:
            for name, value in self._objects.items():
                value.load_state_dict(saved[name])
        except Exception as error:
            raise CheckpointError(
                f"state {name!r}: load_state_dict() of {type(self._objects[name]).__name__} failed: "
                f"{type(error).__name__}: {error}"
            ) from error


def insert_sharded(state: dict[str, Any], tensors: Mapping[str, Tensor], places: Places) -> dict[str, Any]:
    """Put sharded tensors back where StateToSave.take_out() found them.

    Raises:
        CheckpointError: the state has no such place.
    """

    def put(value: Any, path: tuple[Any, ...], tensor: Tensor) -> Any:
        if isinstance(value, PerRank):
            return PerRank(put(part, path, tensor) for part in value)
        if not path:
            return tensor
        if isinstance(value, Mapping):
            return {**value, path[0]: put(value[path[0]], path[1:], tensor)}
        if not isinstance(value, list | tuple) or path[0] not in range(len(value)):
            raise TypeError(f"a {type(value).__name__}")
        return type(value)(
            put(part, path[1:], tensor) if index == path[0] else part for index, part in enumerate(value)
        )

    key = ""
    try:
        for key, (path, _) in places.items():
            check_key(path)  # forged, its hash might take without end
            if not path:
                raise TypeError("no path")
            state = put(state, path, tensors[key])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"expected a place in the saved state for {key!r:.200}, found {type(error).__name__}: "
            f"{error!s:.200}: the checkpoint is damaged or forged"
        ) from error
    return state


def _sharded_dims(tensor: DTensor, path: tuple[Any, ...]) -> list[int | None]:
    for placement in tensor.placements:
        if placement.is_partial():
            raise CheckpointError(
                f"state {_shown(path)}: expected a DTensor with placements Shard and Replicate, found "
                f"{placement}. Save its full_tensor()"
            )
    # FSDP2 over tensor parallelism has a placement of its own, which shards a dimension too.
    return [getattr(placement, "dim", None) for placement in tensor.placements]


def holds_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(holds_sharded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_sharded, value))
    return isinstance(value, DTensor | ShardedTensor)


def _shown(path: tuple[Any, ...]) -> str:
    return repr(path[0]) + "".join(f"[{key!r}]" for key in path[1:])

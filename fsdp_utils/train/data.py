"""The samples of each step, as a function of the seed and of how many samples were seen before.

So the position in the data is one number, the same for any number of ranks: a run that is resumed on more or
fewer ranks continues with the sample after the last.

Files of token ids are read piece by piece, and refused where they have changed since the run began.
"""

import importlib
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp_utils._extras import need
from fsdp_utils.distributed.identity import get_rank, get_world_size
from fsdp_utils.train.config import ConfigError, DataConfig
from fsdp_utils.train.group import on_rank_0, same_on_all

__all__ = [
    "Data",
    "DataError",
    "Rows",
    "TokenFile",
    "check_ids",
    "fingerprint",
    "load_data",
    "must_be_the_same",
    "rows_at",
]

_BLOCK, _BLOCKS = 16_384, 16  # what of a larger file is hashed: as many blocks, spread evenly
_IDS = 2**20  # token ids that are checked at once: they stay in a CPU's cache
IGNORED = -100  # a label that the loss of transformers' models leaves out


class DataError(RuntimeError):
    """The data changed during the run. Raised on the rank that read it; the checkpoints are from before."""


class TokenFile:
    """An array of token ids that lies in a file. `file[3:7]` reads those.

    It is read, and not mapped into memory: where a mapped file is cut short, the kernel ends the process by
    SIGBUS, without a word.

    Args:
        path: the file.
        dtype: of an id, a numpy dtype.
        offset: where in the file they begin, in bytes.
        count: how many there are.
    """

    def __init__(self, path: Path, dtype: Any, offset: int, count: int) -> None:
        self._path, self.dtype, self._offset, self._count = path, dtype, offset, count
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._seen = self._stat()
        self._fingerprint = self._hash()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Any:
        """A numpy array of the ids in `place`.

        Raises:
            DataError: the file has other content than when it was opened.
        """
        if self._stat() != self._seen:
            self._must_be_the_same()
        start, stop, _ = place.indices(self._count)
        size = (stop - start) * self.dtype.itemsize
        content = self._read(self._offset + start * self.dtype.itemsize, size)
        if len(content) != size:
            self._must_be_the_same()
            raise DataError(f"{self._path}: expected {size} bytes to read, found {len(content)}")
        return np.frombuffer(content, dtype=self.dtype)

    def fingerprint(self) -> str:
        """Of the content that the file had when it was opened."""
        return self._fingerprint

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _hash(self) -> str:
        return fingerprint(self._read, self._seen[0])

    def _read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._file, count, start)
        except OSError as error:
            raise DataError(f"{self._path} can no longer be read: {error}") from error

    def _must_be_the_same(self) -> None:
        before, self._seen = self._fingerprint, self._stat()
        after = self._hash()
        if after != before:
            raise DataError(
                f"{self._path} changed while the run was reading it: expected {before}, found {after}. Bring "
                "the file back and start again; to train on other data, begin another run with another --out."
            )


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Size and hash of some content: of all of it up to 256 KiB, of more than that of 16 blocks in it.

    So it notices another file, or one written anew, in no time; it need not notice a single other byte.

    Args:
        read: from a start and a count to the bytes there.
        size: how many there are.
    """
    digest = blake2b(digest_size=8)
    if size <= _BLOCK * _BLOCKS:
        digest.update(read(0, size))
    else:
        for i in range(_BLOCKS):
            digest.update(read((size - _BLOCK) * i // (_BLOCKS - 1), _BLOCK))
    return f"{size:,} bytes with hash {digest.hexdigest()}"


def fingerprint_of_array(array: Any) -> str:
    """As of a file, of the content of a numpy array in one dimension."""
    content = array.view("uint8")
    return fingerprint(lambda start, count: content[start : start + count].tobytes(), len(content))


class Rows(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor) -> dict[str, Tensor]: ...


class TensorRows:
    """Samples in tensors, one in each row."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __getitem__(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: tensor[rows] for name, tensor in self._tensors.items()}


class TokenRows:
    """Samples of `length` consecutive tokens of a file each."""

    def __init__(self, files: list[Any], length: int, places: Tensor | None = None) -> None:
        self._files, self._length = files, length  # of token ids: TokenFiles, or arrays in one dimension
        if places is None:
            counts = [len(file) // length for file in files]
            starts = torch.cat([torch.arange(count) * length for count in counts])
            numbers = torch.repeat_interleave(torch.arange(len(files)), torch.tensor(counts))
            places = torch.stack([numbers, starts], dim=1)
        self._places = places  # i64[samples, 2]: which file, and where in it

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, rows: Tensor) -> dict[str, Tensor]:
        stretches = [
            np.asarray(self._files[number][start : start + self._length], dtype=np.int64)
            for number, start in self._places[rows].tolist()
        ]
        tokens = torch.from_numpy(np.stack(stretches))  # i64[rows, length]
        return {"input_ids": tokens, "labels": tokens}

    def split(self, held_out: float) -> tuple["TokenRows", "TokenRows"]:
        """Return the samples for training and, evenly spread, the fraction `held_out` for evaluation."""
        total = len(self)
        count = min(max(round(held_out * total), 1), total - 1) if held_out else 0
        test = (torch.arange(total + 1) * count // total).diff() > 0  # true `count` times
        return (
            TokenRows(self._files, self._length, self._places[~test]),
            TokenRows(self._files, self._length, self._places[test]),
        )


@dataclass(frozen=True)
class Data:
    """The samples of a run.

    Attributes:
        train, test: the samples; test may be empty.
        predicts_next: whether the logits at a position are about the label after it (decoders).
        build: makes the model that goes with the data, with the same weights on every rank.
        identity: what tells these training samples from others: sizes and hashes, by the name of a part.
        files: of a folder: token ids by the name of their file.
    """

    train: Rows
    test: Rows
    predicts_next: bool
    build: Callable[[], torch.nn.Module] | None = None
    identity: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)

    def predictions(self, batch: Mapping[str, Tensor]) -> int:
        """The number of labels over which a batch's loss is a mean."""
        labels = batch["labels"]
        if self.predicts_next:
            labels = labels[:, 1:]
        return int((labels != IGNORED).sum())


def load_data(config: DataConfig) -> Data:
    """The data that the configuration names.

    Raises:
        ConfigError: there is no such function or folder, or not enough in it.
    """
    folder = Path(config.source)
    if folder.is_dir():
        data = _from_folder(folder, config)
    elif ":" in config.source:
        data = _from_function(config.source)
    else:
        raise ConfigError(f'data.source: expected a folder or "module:function", found {config.source!r}')
    if len(data.train) < config.batch_size:
        raise ConfigError(
            f"data.source {config.source!r}: expected at least data.batch_size ({config.batch_size}) samples "
            f"to train on, found {len(data.train)}"
        )
    return data


def _from_function(source: str) -> Data:
    module, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # ":f" and ".x:f" are no names
        raise ConfigError(f"data.source {source!r}: expected a function to import: {error}") from error
    task = function()
    for part in ("train", "test"):
        tensors = getattr(task, part, None)
        shapes = {k: tuple(getattr(t, "shape", ())) for k, t in tensors.items()} if tensors else {}
        if "labels" not in shapes or len({shape[:1] for shape in shapes.values()} | {()}) != 2:
            raise ConfigError(
                f"data.source {source!r}: expected .{part} of what it returns to be a dict of tensors by "
                f"name, with labels among them, and one row for each sample in all; found shapes {shapes}"
            )
    identity = {
        name: fingerprint_of_array(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in task.train.items()
    }
    return Data(
        TensorRows(task.train),
        TensorRows(task.test),
        getattr(task, "predicts_next", False),
        getattr(task, "build", None),
        identity,
    )


def _from_folder(folder: Path, config: DataConfig) -> Data:
    paths = [*sorted(folder.glob("*.npy")), *sorted(folder.glob("*.txt"))]
    tokenizer = None
    if config.tokenizer is not None and any(path.suffix == ".txt" for path in paths):
        tokenizer = _tokenizer(config.tokenizer)
    files, identity = {}, {}
    for path in paths:
        try:
            if path.suffix == ".npy":
                file = _token_file(path)
            elif tokenizer is None:
                file = TokenFile(path, np.dtype(np.uint8), 0, path.stat().st_size)
            else:
                text = path.read_text(encoding="utf-8")
                file = np.asarray(tokenizer(text)["input_ids"], dtype=np.uint32)
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"data.source {folder}: cannot read {path.name}: {error}") from error
        files[path.name] = file
        identity[path.name] = (
            file.fingerprint() if isinstance(file, TokenFile) else fingerprint_of_array(file)
        )
    if sum(len(file) // config.seq_len for file in files.values()) == 0:
        raise ConfigError(
            f"data.source {folder}: expected .npy or .txt files with a stretch of data.seq_len "
            f"({config.seq_len}) tokens, found {len(files)} files and none so long"
        )
    train, test = TokenRows([*files.values()], config.seq_len).split(config.held_out)
    identity["samples, by data.seq_len and data.held_out"] = f"{len(train):,} to train on"
    return Data(train, test, predicts_next=True, identity=identity, files=files)


def check_ids(files: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse token ids beyond the `vocabulary` of a model. Each rank reads its share of the files.

    Raises:
        ConfigError: names a file and the position of an id in it; on the rank that read it.
    """
    for name, ids in files.items():
        if ids.dtype.kind == "u" and np.iinfo(ids.dtype).max < vocabulary:
            continue  # such as bytes
        for start in range(get_rank() * _IDS, len(ids), get_world_size() * _IDS):
            piece = ids[start : start + _IDS]
            if piece.max() >= vocabulary or piece.min() < 0:
                at = int(((piece >= vocabulary) | (piece < 0)).argmax())
                raise ConfigError(
                    f"data.source, {name}: expected token ids from 0 to {vocabulary - 1}, which the model's "
                    f"vocabulary has, found {piece[at]} at position {start + at}"
                )


def _token_file(path: Path) -> TokenFile:
    mapped = np.lib.format.open_memmap(path, mode="r")  # reads and checks the header
    if mapped.ndim != 1 or not np.issubdtype(mapped.dtype, np.integer):
        raise ValueError(f"expected token ids in one dimension, found {mapped.dtype}{list(mapped.shape)}")
    return TokenFile(path, mapped.dtype, mapped.offset, len(mapped))


def _tokenizer(folder: str) -> Any:
    AutoTokenizer = need("transformers", "train").AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a hostile folder can raise anything
        raise ConfigError(f"data.tokenizer {folder!r}: {type(error).__name__}: {error}") from error


def must_be_the_same(data: Data, before: dict[str, str] | None) -> None:
    """Refuse data other than the run has trained on so far, on any rank: the position means nothing in it.

    Args:
        data: this rank's.
        before: the identity that the checkpoint holds; None where there is none: then rank 0's data counts.

    Raises:
        ConfigError: names what differs; the same on every rank.
    """
    expected = on_rank_0(lambda: before or data.identity)

    def compare() -> None:
        for name in sorted(expected.keys() | data.identity.keys()):
            wanted, found = expected.get(name, "nothing"), data.identity.get(name, "nothing")
            if wanted != found:
                whose = "the checkpoint has it" if before else "rank 0 has it"
                raise ConfigError(
                    f"data.source, {name}: expected {wanted}, as {whose}, found {found}. Restore it; to "
                    "train on other data, begin a run with another --out."
                )

    same_on_all(compare)


def rows_at(position: int, count: int, total: int, seed: int) -> Tensor:
    """The numbers of the next samples: i64[count]. Each epoch goes through all of them in a new order.

    Args:
        position: how many samples were seen before, by all ranks together.
        count: how many are wanted; they may lie in two epochs.
        total: how many samples there are.
    """
    taken: list[Tensor] = []
    while count:
        epoch, start = divmod(position, total)
        taken.append(_order(total, seed, epoch)[start : start + count])
        position += len(taken[-1])
        count -= len(taken[-1])
    return torch.cat(taken)


@lru_cache(maxsize=2)
def _order(total: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(total, generator=generator)

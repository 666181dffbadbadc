"""One tensor in a file of many: written as torch.save does, found, and read in part into its place."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_utils import CheckpointError, load_distributed, save_distributed
from fsdp_utils.checkpoint.manifest import ALGORITHM, hash_file
from fsdp_utils.checkpoint.reader import Item, KnownHeads, Part, find_bytes, read_region
from fsdp_utils.checkpoint.writer import HashingFile
from fsdp_utils.torch_internals.runtime import write_archive

TENSORS = [
    torch.arange(30, dtype=torch.float32).reshape(5, 6),
    torch.arange(30, dtype=torch.float32).reshape(6, 5).t(),  # not contiguous
    torch.arange(7).to(torch.bfloat16),
    torch.tensor(3.0),
    torch.empty(0, 4),
]


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    file, items = HashingFile(tmp_path / "file"), []
    for number, tensor in enumerate(TENSORS):
        begin = file.tell()
        write_archive(tensor.contiguous(), file)
        length = file.tell() - begin
        items.append(Item(tmp_path / "file", begin, length, str(number), tensor.dtype, tensor.shape))
    written = file.finish()
    assert written == {"bytes": (tmp_path / "file").stat().st_size, ALGORITHM: hash_file(tmp_path / "file")}
    return items


def test_plain_torch_load_reads_it(items: list[Item]) -> None:
    data = items[0].path.read_bytes()
    for item, tensor in zip(items, TENSORS, strict=True):
        part = io.BytesIO(data[item.offset : item.offset + item.length])
        assert torch.equal(torch.load(part, weights_only=True), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_region_is_read_into_any_dtype(items: list[Item], dtype: torch.dtype) -> None:
    known: KnownHeads = {}
    with items[0].path.open("rb", buffering=0) as file:
        for item, tensor in zip(items, TENSORS, strict=True):
            begin = find_bytes(item, file, known)
            for index in range(tensor.dim() + 1):  # all of it, and the last two along each dimension
                offsets, lengths = [0] * tensor.dim(), list(tensor.shape)
                if index:
                    offsets[index - 1] = max(0, lengths[index - 1] - 2)
                    lengths[index - 1] -= offsets[index - 1]
                target = torch.full(lengths, -1.0, dtype=dtype)
                read_region(item, begin, file, torch.Size(offsets), torch.Size(lengths), target)
                expected = tensor
                for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                    expected = expected.narrow(dim, offset, length)
                assert torch.equal(target, expected.to(dtype))


def test_another_tensor_than_expected_is_named(items: list[Item]) -> None:
    with items[0].path.open("rb", buffering=0) as file:
        for wrong in (
            items[0]._replace(shape=torch.Size([6, 5])),
            items[0]._replace(dtype=torch.int32),
            items[0]._replace(offset=items[0].offset + 1),
            items[0]._replace(length=items[0].length - 1),
        ):
            with pytest.raises(CheckpointError, match=rf"file: expected 0 as {wrong.dtype} .*, found \S+"):
                find_bytes(wrong, file, {})
        part = Part(file, items[1].offset, items[1].length)
        assert part.read() == items[1].path.read_bytes()[items[1].offset :][: items[1].length]


def test_a_state_is_loaded_into_the_optimizers_own_tensors_unless_they_are_shared(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = optimizer.state[model.weight]
    own = state["momentum_buffer"] = torch.full((3, 3), 2.0)
    save_distributed(tmp_path, model, optimizer, step=1)
    weight = model.weight.detach().clone()

    own.zero_()
    load_distributed(tmp_path, model, optimizer)
    assert optimizer.state[model.weight]["momentum_buffer"].data_ptr() == own.data_ptr()
    assert (own == 2).all()

    optimizer.state[model.weight]["momentum_buffer"] = model.weight.data  # as no optimizer should
    load_distributed(tmp_path, model, optimizer)
    assert torch.equal(model.weight, weight)
    assert (optimizer.state[model.weight]["momentum_buffer"] == 2).all()

"""Checkpoints behind a URL, where there is no rename: on several ranks in a shared store, and in memory."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from torch import nn

from fsdp_utils import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    checkpoints,
    export_safetensors,
    latest_step,
    load_distributed,
    load_full,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint import save
from fsdp_utils.checkpoint.__main__ import main
from tests.checkpoints import Data, Outcome, build, outcome, rank, train
from tests.sharded import TwoRanks

pytest.importorskip("upath")  # which the extra [remote] installs
from tests.bucket import Bucket


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in this process's memory, where nothing is."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield "memory://store/run"
    store.clear()


def save_and_go_on(url: str, asynchronous: bool) -> list[float]:
    model, optimizer = build("fsdp2")
    data = Data()
    train(model, optimizer, data, 2)
    assert checkpoints(url) == {}  # each process remembers an older listing from here on
    more = {"data": data.generator.get_state(), "own": rank()}
    save_distributed(url, model, optimizer, step=2, state=more, keep=1, asynchronous=asynchronous).wait()
    assert latest_step(url) == 2
    return train(model, optimizer, data, 2)


def resume(url: str) -> tuple[list[float], Any]:
    model, optimizer = build("fsdp2", seed=1)
    data = Data()
    state = load_distributed(url, model, optimizer)
    data.generator.set_state(state["data"])
    return train(model, optimizer, data, 2), state["own"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_bit_by_bit(tmp_path: Path, asynchronous: bool, two_ranks: TwoRanks) -> None:
    url = f"bucket://{tmp_path}/run"
    losses_of = two_ranks(save_and_go_on, url, asynchronous)
    assert two_ranks(resume, url) == [(losses, rank) for rank, losses in enumerate(losses_of)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["000001-step-2"]
    assert not list(tmp_path.rglob(".begun"))


def test_another_number_of_ranks_loads_it(tmp_path: Path, two_ranks: TwoRanks) -> None:
    url = f"bucket://{tmp_path}/run"
    expected = two_ranks(save_and_go_on, url, False)[0]
    for losses, own in run_on_ranks(resume, url, world_size=3):
        torch.testing.assert_close(losses, expected)
        assert list(own) == [0, 1]


def test_what_was_cut_short_is_no_checkpoint_and_goes_with_the_next_but_one(tmp_path: Path) -> None:
    url, model = f"bucket://{tmp_path}/run", nn.Linear(2, 2)
    save_distributed(url, model, step=1)
    cut = tmp_path / "run" / "000002-step-2"  # what a program leaves that is killed
    cut.mkdir()
    (cut / "__0_0.distcp").write_bytes(b"half")
    assert list(checkpoints(url)) == [1]
    assert load_distributed(url, model)["step"] == 1
    with pytest.raises(CheckpointNotFoundError, match=r"step 2, found those of steps 1$"):
        load_distributed(url, model, step=2)
    assert save_distributed(url, model, step=3, keep=2).wait().name == "000003-step-3"
    assert not cut.exists()
    save_distributed(url, model, step=4, keep=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["000004-step-4"]


def failing_save(url: str, name: str) -> Outcome:
    with patch.object(Bucket, "fails", name):
        return outcome(lambda: save_distributed(url, build("fsdp2")[0], step=1))


@pytest.mark.parametrize("name", [".begun", "__1_0.distcp", ".metadata", "manifest.json"])
def test_a_store_that_fails_leaves_nothing_behind(tmp_path: Path, name: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks(failing_save, f"bucket://{tmp_path}/run", name)
    assert first.error == second.error
    assert first.error is not None
    assert "BucketError: quota exceeded" in first.error
    assert not list(tmp_path.rglob("*step*"))


def test_memory_that_each_rank_has_for_itself_is_refused(two_ranks: TwoRanks) -> None:
    def fn() -> Outcome:
        with patch.object(save, "_SHARED_WAIT_S", 0.1):
            return outcome(lambda: save_distributed("memory://store/run", build("fsdp2")[0], step=1))

    for found in two_ranks(fn):
        assert "it is not shared between the hosts" in str(found.error)


def test_one_process_and_memory(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 3)
    path = save_distributed(memory, model, step=5, state={"epoch": 2}).wait()
    assert str(path) == f"{memory}/000001-step-5"
    other = nn.Linear(2, 3)
    assert load_distributed(memory, other) == {"epoch": 2, "step": 5}
    assert torch.equal(other.weight, model.weight)
    verify_checkpoint(memory)

    export_safetensors(memory, tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    for arguments in (["list", memory], ["inspect", memory, "--step", "5"], ["verify", memory]):
        assert main([*arguments, "--json"]) == 0
        assert memory in json.dumps(json.loads(capsys.readouterr().out))

    damaged = path / "__0_0.distcp"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointDamagedError, match="it is not what was saved"):
        load_distributed(memory, other)
    damaged.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"expected a file of \d+ bytes, found none"):
        verify_checkpoint(memory)


def test_a_file_url_is_the_plain_path(tmp_path: Path) -> None:
    assert (
        save_distributed(f"file://{tmp_path}/run", nn.Linear(2, 2), step=1).wait().parent == tmp_path / "run"
    )
    assert latest_step(tmp_path / "run") == latest_step(f"local://{tmp_path}/run") == 1


def test_what_is_no_place_for_checkpoints_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="expected a URL as a string, found a Path"):
        save_distributed(Path("memory://store/run"), model, step=1)
    with pytest.raises(CheckpointError, match=r"expected a URL that fsspec can open, found: .*nonsense"):
        save_distributed("nonsense://store/run", model, step=1)
    for call in (save_full, load_full):
        with pytest.raises(
            CheckpointError, match=f"{call.__name__}: expected the path of a file, found the URL"
        ):
            call("memory://store/one.pt", model)
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fsdp_utils\[remote\]'"):
        latest_step("memory://store/run")
    assert list(tmp_path.iterdir()) == []

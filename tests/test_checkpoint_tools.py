"""Without a training program: list, verify, inspect and export, on the command line and from Python."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from fsdp_utils import run_on_ranks, save_distributed
from tests.checkpoints import Data, build, train, wholes


def save_two(folder: Path) -> dict[str, torch.Tensor]:
    (model, optimizer), data = build("fsdp2"), Data()
    train(model, optimizer, data, 2)
    for step in (1, 2):
        save_distributed(folder / "run", model, optimizer, step=step, state={"epoch": 1})
    return wholes(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder / "run", run_on_ranks(save_two, folder)[0]


@pytest.fixture
def run(saved: tuple[Path, Any]) -> Path:
    return saved[0]


class Said(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`python -m fsdp_utils.checkpoint`, in this process."""

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["checkpoint", *map(str, arguments)])
        monkeypatch.delitem(sys.modules, "fsdp_utils.checkpoint.__main__", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("fsdp_utils.checkpoint", run_name="__main__")
        assert isinstance(ended.value.code, int)
        out, err = capsys.readouterr()
        return Said(ended.value.code, out, err)

    return call


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in model.safetensors, read by the library of that name."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


# ---- what is there -----------------------------------------------------------------------------------------


def test_the_manifest_says_what_is_in_the_checkpoint_and_no_file_where_it_was_written(run: Path) -> None:
    checkpoint = run / "000002-step-2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    expected = {"format": 4, "step": 2, "world_size": 2, "torch": torch.__version__, "model": "Net"}
    expected |= {"optimizer": "AdamW", "tied": {"head.weight": "embed.weight"}}
    assert {key: manifest[key] for key in expected} == expected
    assert {path.name for path in checkpoint.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        assert entry == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
        assert run.parent.name.encode() not in data


def test_list_shows_every_checkpoint_of_a_directory(run: Path, tmp_path: Path, command: Command) -> None:
    said = command("list", run)
    first, second = said.out.splitlines()
    assert (said.code, first.split()[:2], second.split()[:2]) == (0, ["step", "1"], ["step", "2"])
    assert " 2 ranks " in second
    assert second.endswith(str(run / "000002-step-2"))
    saved_at = json.loads((run / "000002-step-2" / "manifest.json").read_text())["saved_at"]
    assert second.split()[2] == saved_at
    assert float(second.split()[5]) > 1
    assert second.split()[6] == "KiB"

    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "000001-step-1" / "manifest.json").write_text("{")
    said = command("list", tmp_path / "run")
    assert said.code == 1
    assert ["  damaged  " in line for line in said.out.splitlines()] == [True, False]
    assert said.err.startswith("CheckpointError: ")


def test_inspect_shows_the_tensors_of_the_last_checkpoint_or_of_a_step(run: Path, command: Command) -> None:
    said = command("inspect", run)
    lines = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line}
    for name in ("model.embed.weight", "optimizer.embed.weight.exp_avg"):
        assert lines[name] == ["float32", "11", "x", "6", "264", "bytes"]
    assert (lines["step:"], lines["world_size:"]) == (["2"], ["2"])
    assert lines["tied:"] == ["head.weight", "=", "embed.weight"]
    assert (lines["model:"], lines["optimizer:"]) == (["Net"], ["AdamW"])
    first = command("inspect", run, "--step", 1).out
    assert "000001-step-1" in first
    assert re.search(r"^step: +1$", first, re.MULTILINE)


def test_verify_takes_a_directory_a_checkpoint_or_a_step(run: Path, command: Command) -> None:
    for arguments in ([run], [run / "000001-step-1"], [run, "--step", 2]):
        said = command("verify", *arguments)
        assert (said.code, said.err) == (0, "")
        assert "every byte is what was saved" in said.out


def test_what_is_wrong_ends_with_1_and_one_line(run: Path, tmp_path: Path, command: Command) -> None:
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "000002-step-2" / "rank-00000.safetensors").write_text("{")
    for arguments, told in (
        (["verify", damaged], f"{damaged}/000002-step-2/rank-00000.safetensors: expected"),
        (["export", damaged, tmp_path / "out"], f"{damaged}/000002-step-2/rank-00000.safetensors: expected"),
        (["verify", tmp_path / "none"], f"{tmp_path}/none: expected"),
        (["inspect", tmp_path], f"{tmp_path}: expected"),
        (["list", "s3://bucket/run"], "expected the path"),
        (["inspect", run, "--step", 9], "expected a checkpoint of step 9, found those of steps 1, 2"),
    ):
        said = command(*arguments)
        assert (said.code, said.out) == (1, "")
        assert said.err.startswith("CheckpointError: ")
        assert told in said.err
    assert not (tmp_path / "out").exists()


# ---- export ------------------------------------------------------------------------------------------------


def test_the_model_is_exported_without_what_is_tied(
    saved: tuple[Path, Any], tmp_path: Path, command: Command
) -> None:
    run, expected = saved
    for arguments in ([run], [run / "000001-step-1"], [run, "--step", 2]):
        source, *options = arguments
        said = command("export", source, tmp_path / "out", *options)
        assert (said.code, said.out.startswith(f"{tmp_path}/out: ")) == (0, True)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
        found = read(tmp_path / "out")
        assert found.keys() == expected.keys() - {"head.weight"}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

"""Without a training program: verify, inspect and export, from Python and from the command line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_utils import (
    CheckpointError,
    export_safetensors,
    run_on_ranks,
    save_distributed,
    save_full,
    verify_checkpoint,
)
from fsdp_utils.checkpoint.__main__ import main
from fsdp_utils.checkpoint.manifest import read_manifest
from fsdp_utils.checkpoint.metadata import read_any_metadata, specs
from fsdp_utils.checkpoint.writer import without_process_group_warning
from tests.checkpoints import Data, build, train
from tests.sharded import TwoRanks

safetensors = pytest.importorskip("safetensors")


def save_both(folder: Path) -> list[str]:
    (model, optimizer), data = build("fsdp2"), Data()
    train(model, optimizer, data, 2)
    for step in (1, 2):
        save_distributed(folder / "d", model, optimizer, step=step, epoch=1)
    save_full(folder / "one.pt", model, optimizer, epoch=1)
    dcp.save({"model": tensors_of(get_model_state_dict(model))}, checkpoint_id=folder / "plain")
    return [name for name, _ in model.named_parameters()]


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_both, folder)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the folder's safetensors files, read by the library of that name."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return tensors


# ---- verify and inspect ----------------------------------------------------------------------------------


def test_verify_goes_through_every_checkpoint_and_says_how_far_it_is(saved: Path) -> None:
    for path in (saved / "d", saved / "d" / "000001-step-1", saved / "one.pt"):
        seen: list[int] = []
        verify_checkpoint(path, progress=seen.append)
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        hashed = sum(file.stat().st_size for file in files if file.name != "manifest.json")
        assert hashed - 300 < sum(seen) <= hashed  # all but what holds the hash itself


def test_the_manifest_says_what_is_in_the_checkpoint(saved: Path) -> None:
    checkpoint = saved / "d" / "000002-step-2"
    manifest = read_manifest(checkpoint)
    assert manifest["step"] == 2
    assert manifest["world_size"] == 2
    assert manifest["torch"] == torch.__version__
    assert manifest["model"] == "Net"
    assert manifest["optimizer"] == "AdamW"
    assert manifest["tied"] == {"head.weight": "embed.weight"}
    assert manifest["tensors"]["model.embed.weight"] == {"dtype": "float32", "shape": [11, 6]}
    assert {path.name for path in checkpoint.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        assert entry == {"bytes": len(data), "blake3": blake3(data).hexdigest()}


def test_no_file_tells_where_it_was_written(saved: Path) -> None:
    where = saved.name.encode()  # a pickled path is a list of such names
    assert where in (saved / "plain" / ".metadata").read_bytes()  # so it would be seen
    for file in (saved / "d").rglob("*"):
        assert not file.is_file() or where not in file.read_bytes(), file.name


def test_inspect_shows_tensors_and_where_they_come_from(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved / "d")]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line}
    assert lines["model.embed.weight"] == ["float32", "11", "x", "6", "264", "bytes"]
    assert lines["optimizer.state.embed.weight.exp_avg"] == ["float32", "11", "x", "6", "264", "bytes"]
    assert lines["step:"] == ["2"]
    assert lines["world_size:"] == ["2"]
    assert lines["tied:"] == ["head.weight", "=", "embed.weight"]
    whole = shown.split("\n\n")[0]

    assert main(["inspect", str(saved / "one.pt")]) == 0
    assert capsys.readouterr().out.split("\n\n")[0] == whole, "the file holds something else"
    assert main(["inspect", str(saved / "plain")]) == 0
    assert "manifest:" in capsys.readouterr().out


def test_list_shows_every_checkpoint_of_a_directory(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(saved / "d")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["step", "1"]
    assert second.split()[:2] == ["step", "2"]
    assert " 2 ranks " in second
    assert second.endswith(str(saved / "d" / "000002-step-2"))
    assert main(["list", str(saved / "d"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [one["step"] for one in found] == [1, 2]
    assert all(one["bytes"] > 1000 and one["model"] == "Net" and one["saved_at"] for one in found)
    assert main(["list", str(saved / "plain")]) == 0
    assert "plain DCP" in capsys.readouterr().out


def test_list_names_a_damaged_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved / "d", tmp_path / "d")
    (tmp_path / "d" / "000001-step-1" / "manifest.json").write_text("{")
    assert main(["list", str(tmp_path / "d")]) == 1
    said = capsys.readouterr()
    assert "  damaged  " in said.out.splitlines()[0]
    assert "  damaged  " not in said.out.splitlines()[1]
    assert said.err.startswith("CheckpointError: ")


def test_a_step_of_the_directory_is_chosen(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved / "d"), "--step", "1"]) == 0
    assert "000001-step-1" in capsys.readouterr().out
    assert main(["inspect", str(saved / "d"), "--step", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["world_size"]) == (1, 2)
    assert found["tensors"]["model.embed.weight"] == {"dtype": "float32", "shape": [11, 6]}
    assert main(["verify", str(saved / "d"), "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] is True
    out = tmp_path / "out"
    assert main(["export", str(saved / "d"), str(out), "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(read(out))
    assert main(["inspect", str(saved / "d"), "--step", "9"]) == 1
    assert "expected a checkpoint of step 9, found those of steps 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["-1", "0", "nan", "inf", "4GiB"])
def test_a_size_that_no_file_can_have_is_refused(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path), str(tmp_path / "out"), "--shard-gib", size])
    assert ended.value.code == 2
    assert f"--shard-gib: expected a number above 0, found {size}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_line_ends_with_1_and_one_line_when_something_is_wrong(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.pt").write_bytes((saved / "one.pt").read_bytes()[:-1])
    for arguments in (
        ["verify", str(tmp_path / "cut.pt")],
        ["verify", str(tmp_path / "none")],
        ["inspect", str(tmp_path)],
        ["inspect", str(tmp_path / "none")],
        ["export", str(tmp_path / "cut.pt"), str(tmp_path / "out")],
    ):
        assert main(arguments) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"CheckpointError: {arguments[1]}"), said.err
    assert not (tmp_path / "out").exists()


def test_the_commands_run_as_a_program(saved: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "fsdp_utils.checkpoint"]
    done = subprocess.run([*run, "verify", saved / "d"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "every byte is what was saved" in done.stdout
    done = subprocess.run(
        [*run, "export", saved / "d", tmp_path / "out"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "model.safetensors").exists()


# ---- export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d", "d/000001-step-1", "one.pt", "plain"])
def test_every_kind_of_checkpoint_is_exported_alike(name: str, saved: Path, tmp_path: Path) -> None:
    expected = tensors_of(torch.load(saved / "one.pt", weights_only=True)["model"])
    export_safetensors(saved / name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = read(tmp_path)
    tied = set() if name == "plain" else {"head.weight"}  # which plain DCP does not know of
    assert found.keys() == expected.keys() - tied
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_large_models_are_cut_into_files_with_an_index(saved: Path, tmp_path: Path) -> None:
    export_safetensors(saved / "d", tmp_path, shard_gib=600 / 2**30)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    found = read(tmp_path)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 (it is no dict)


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    data = bytearray((saved / "one.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="expected blake3"):
        export_safetensors(tmp_path / "flipped.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_safetensors_does_not_have_is_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))
    save_distributed(tmp_path / "d", model, step=1)
    with pytest.raises(CheckpointError, match=r"found \{'spectrum': torch\.complex64\}"):
        export_safetensors(tmp_path / "d", tmp_path / "out")


def small_transformers() -> dict[str, Callable[[], Any]]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=48, num_key_value_heads=2)
        ),
        "gpt2, tied": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        ),
    }


def save_transformers(folder: Path) -> None:
    for name, make in small_transformers().items():
        torch.manual_seed(0)
        model = make()
        fully_shard(model)
        save_distributed(folder / name / "d", model, step=1)
        save_full(folder / name / "one.pt", model)


@pytest.mark.timeout(400)  # the imports of transformers take most of it
def test_transformers_reads_what_is_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run_on_ranks(save_transformers, tmp_path, timeout=200)
    words = torch.arange(8).reshape(1, 8)
    for name, source, limit in (
        ("llama", "d", 9000 / 2**30),
        ("gpt2, tied", "d", 4.0),
        ("gpt2, tied", "one.pt", 9000 / 2**30),
    ):
        torch.manual_seed(0)
        expected = small_transformers()[name]().eval()
        out = export_safetensors(tmp_path / name / source, tmp_path / f"{name} {source}", shard_gib=limit)
        assert (len(list(out.glob("*.safetensors"))) > 1) == (limit < 1)
        found = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert type(found) is type(expected)
        with torch.no_grad():
            assert torch.equal(found(words).logits, expected(words).logits)


# ---- descriptions that the ranks have written for themselves -------------------------------------------


def save_without_collectives(folder: Path) -> None:
    model = nn.Linear(4, 6)
    nn.init.constant_(model.weight, 3.0)
    fully_shard(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, use_collectives=False)
    dist.barrier()


@pytest.mark.skipif(
    "use_collectives" not in signature(dcp.save).parameters, reason="this torch writes no such checkpoint"
)
def test_a_checkpoint_with_a_description_of_each_rank_is_read(two_ranks: TwoRanks, tmp_path: Path) -> None:
    two_ranks(save_without_collectives, tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()
    assert specs(read_any_metadata(tmp_path / "c"))["model.weight"] == (torch.float32, torch.Size([6, 4]))
    export_safetensors(tmp_path / "c", tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["weight"], torch.full((6, 4), 3.0))


def test_no_warning_is_given_without_a_process_group(tmp_path: Path) -> None:
    with without_process_group_warning():
        save_distributed(tmp_path, nn.Linear(2, 2), step=1)
    save_distributed(tmp_path, nn.Linear(2, 2), step=2)  # warnings are errors here

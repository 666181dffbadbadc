"""Data that changes: under a run, and between one start of a run and the next."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from fsdp_utils.train.data import DataError, TokenFile, fingerprint, load_data, rows_at
from fsdp_utils.train.loop import train
from tests.training_runs import configured, metrics

ROOT = Path(__file__).resolve().parent.parent


def folder_of(path: Path, count: int = 4000) -> Path:
    path.mkdir()
    np.save(path / "a.npy", np.random.default_rng(0).integers(0, 256, count, dtype=np.uint16))
    (path / "b.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    return path


def config_for(source: Path, **changes: Any) -> DataConfig:
    return DataConfig(str(source), **{"batch_size": 2, "seq_len": 10, **changes})


# ---- under a run -----------------------------------------------------------------------------------


def read_after(path: str, change: str) -> str:
    """On a rank: what reading gives after a change, as it may end the process."""
    rows = load_data(config_for(Path(path).parent)).train
    last = torch.tensor([399 - 20])  # in a.npy
    before = rows[last]["input_ids"]
    file = Path(path)
    stat = file.stat()
    if change == "cut short":
        os.truncate(file, 1000)
    elif change == "written anew":
        file.write_bytes(file.read_bytes()[:128] + bytes(8000))
    elif change == "touched":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif (
        change == "replaced"
    ):  # by another file of the same name: this one is still there for who has it open
        Path(f"{file}.new").write_bytes(b"")
        Path(f"{file}.new").replace(file)
    try:
        assert torch.equal(rows[last]["input_ids"], before)
    except DataError as error:
        return str(error)
    return "as before"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("cut short", "changed while the run was reading it: expected 8,128 bytes .*, found 1,000 bytes"),
        ("written anew", "changed while .* expected 8,128 bytes with hash .*, found 8,128 bytes with hash"),
        ("touched", "as before"),
        ("replaced", "as before"),
    ],
)
def test_a_file_that_changes_under_a_run_is_told_by_its_name(tmp_path: Path, change: str, told: str) -> None:
    source = folder_of(tmp_path / "data")
    (found,) = run_on_ranks(read_after, str(source / "a.npy"), change, world_size=1)
    if told != "as before":
        assert found.startswith(str(source / "a.npy"))
        assert "another --out" in found
    assert re.search(told, found)


PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from fsdp_utils.train import loop

def cut():
    while not Path("run/metrics.jsonl").exists() or '"step": 3,' not in Path("run/metrics.jsonl").read_text():
        time.sleep(0.005)
    os.truncate("data/a.npy", 1000)

threading.Thread(target=cut, daemon=True).start()
sys.exit(loop.main(["--config", "run.yaml"]))
"""


def test_the_program_ends_in_one_sentence_and_not_by_a_signal(tmp_path: Path) -> None:
    folder_of(tmp_path / "data")
    (tmp_path / "data" / "b.txt").unlink()
    (tmp_path / "run.yaml").write_text(
        "out: run\nsteps: 10000\nsave_every: 2\ndata: {source: data, batch_size: 4, seq_len: 16}\n"
        "model: {config: llama-tiny}\nparallel: {device: cpu}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rank 0: DataError: data/a.npy changed while the run was reading it")
    assert committed(tmp_path / "run" / "checkpoints")[-1].step >= 2


# ---- between starts --------------------------------------------------------------------------------


def resumed(out: Path, source: Path) -> dict[str, str]:
    """What a run of two ranks says, started again, by what was done to its data."""

    def start(own: Path = source, **changes: Any) -> str:
        config = TrainConfig(
            str(out), config_for(own, **changes), ModelConfig("llama-tiny"), steps=steps, save_every=1
        )
        try:
            train(config)
        except ConfigError as error:
            return str(error)
        return "trained"

    def on_rank_0(act: Any) -> None:
        if get_rank() == 0:
            act()
        torch.distributed.barrier()

    steps, found = 2, {}
    found["first"] = start()
    steps = 3
    file, more = source / "a.npy", source / "c.npy"
    good, bad = file.read_bytes(), folder_of(source.parent / f"other{get_rank()}", 4001)
    found["seq_len"] = start(seq_len=20)
    found["held_out"] = start(held_out=0.5)
    on_rank_0(lambda: file.write_bytes(good[:128] + bytes(8000)))
    found["rewritten"] = start()
    on_rank_0(lambda: file.write_bytes(good))
    on_rank_0(lambda: np.save(more, np.arange(5)))
    found["more"] = start()
    on_rank_0(more.unlink)
    found["rank 1"] = start(source if get_rank() == 0 else bad)
    found["again"] = start()
    out = out / "fresh"
    found["rank 1 at first"] = start(source if get_rank() == 0 else bad)
    return found


def test_other_data_is_refused_by_name_when_a_run_goes_on(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data")
    first, second = run_on_ranks(resumed, tmp_path / "run", source, world_size=2)
    assert first == second
    assert first["first"] == first["again"] == "trained"
    for scene, told in {
        "seq_len": "data.source, samples, by data.seq_len and data.held_out: expected 464 to train on, as",
        "held_out": "data.held_out: expected 464 to train on, as the checkpoint has it, found 244",
        "rewritten": "data.source, a.npy: expected 8,128 bytes with hash ",
        "more": "data.source, c.npy: expected nothing, as the checkpoint has it, found 168 bytes",
        "rank 1": "rank 1: data.source, a.npy: expected 8,128 bytes with hash ",
        "rank 1 at first": "rank 1: data.source, a.npy: expected 8,128 bytes with hash ",
    }.items():
        assert told in first[scene], scene
    assert "as rank 0 has it, found 8,130 bytes" in first["rank 1 at first"]
    assert list(metrics(tmp_path / "run")) == [1, 2, 3]


def on_another_task(out: Path) -> str:
    train(configured(out, steps=2))
    with pytest.raises(ConfigError) as caught:
        train(configured(out, "poisoned", steps=4))
    return str(caught.value)


def test_other_tensors_of_a_function_are_refused_too(tmp_path: Path) -> None:
    (told,) = run_on_ranks(on_another_task, tmp_path, world_size=1)
    assert told.startswith("data.source, input_ids: expected 1,152 bytes with hash ")


# ---- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", b"garbage", "cannot read a.npy"),
        ("a.npy", b"", "cannot read a.npy"),
        ("a.npy", b"PK\x03\x04garbage", "cannot read a.npy"),
        ("a.npy", np.arange(6.0), r"a.npy: expected token ids in one dimension, found float64\[6\]"),
        ("a.npy", np.arange(6).reshape(2, 3), r"a.npy: expected .* found int64\[2, 3\]"),
        ("a.npy", np.array([{}]), "cannot read a.npy"),
        ("a.txt", b"\xff\xfe\xfd" * 100, "cannot read a.txt: 'utf-8' codec can't decode"),
    ],
)
def test_a_file_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Any, told: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content, allow_pickle=True)
    monkeypatch.setattr(
        "fsdp_utils.train.data._tokenizer", lambda folder: None if name == "a.npy" else str.split
    )
    with pytest.raises(ConfigError, match=f"data.source .*{told}"):
        load_data(DataConfig(str(tmp_path), tokenizer="any", seq_len=2))


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"data\.tokenizer .*nowhere"):
        load_data(DataConfig(str(tmp_path), tokenizer=str(tmp_path / "nowhere")))


def test_a_fingerprint_sees_size_ends_and_whatever_is_spread(tmp_path: Path) -> None:
    def of(content: bytes) -> str:
        return fingerprint(lambda start, count: content[start : start + count], len(content))

    small, large = bytes(1000), bytes(10_000_000)
    assert of(small) == of(bytes(1000)) != of(bytes(1001))
    assert of(small) != of(bytes(500) + b"x" + bytes(499))
    assert of(large) == of(bytes(10_000_000)) != of(bytes(9_999_999))
    assert of(large) != of(b"x" + large[1:])
    assert of(large) != of(large[1:] + b"x")
    assert of(large) != of(large[:5_000_000] + b"x" * 700_000 + large[5_700_000:])  # as 16 blocks lie
    (tmp_path / "large").write_bytes(large)
    file = TokenFile(tmp_path / "large", np.dtype(np.uint8), 0, len(large))
    assert file.fingerprint() == of(large)


def test_less_than_was_asked_for_is_never_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(50))
    file = TokenFile(tmp_path / "a", np.dtype(np.uint8), 0, 100)
    assert file[40:50].tolist() == [0] * 10
    with pytest.raises(DataError, match="a: expected 20 bytes to read, found 10"):
        file[40:60]


def test_as_many_samples_as_a_batch_has_are_enough(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.uint16))
    assert len(load_data(DataConfig(str(tmp_path), batch_size=4, seq_len=10, held_out=0.0)).train) == 4
    with pytest.raises(ConfigError, match=r"at least data.batch_size \(5\) samples to train on, found 4"):
        load_data(DataConfig(str(tmp_path), batch_size=5, seq_len=10, held_out=0.0))


def test_half_of_the_samples_are_left_to_train_on_however_much_is_held_out(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    data = load_data(DataConfig(str(tmp_path), batch_size=1, seq_len=10, held_out=0.9))
    assert (len(data.train), len(data.test)) == (5, 5)


def test_no_epoch_of_one_seed_is_one_of_the_next_seed() -> None:
    orders = [tuple(rows_at(20 * epoch, 20, 20, seed).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_what_a_checkpoint_says_of_the_data_can_be_read(tmp_path: Path) -> None:
    data = load_data(config_for(folder_of(tmp_path / "data")))
    assert json.loads(json.dumps(data.identity)) == data.identity
    assert list(data.identity) == ["a.npy", "b.txt", "samples, by data.seq_len and data.held_out"]

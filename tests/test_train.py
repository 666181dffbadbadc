"""The training program: the same run however the ranks divide it, stopped, resumed, damaged or refused."""

import contextlib
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import chaos
from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.checkpoint import CheckpointError
from fsdp_utils.checkpoint.manifest import committed
from fsdp_utils.train.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    mesh_shape,
    micro_batches,
    parse,
)
from fsdp_utils.train.data import load_data, rows_at
from fsdp_utils.train.loop import Progress, learning_rate, train
from fsdp_utils.train.metrics import RunLog
from fsdp_utils.train.watchdog import NotFinite
from tests import tiny_training
from tests.training_runs import STEPS, configured, events, metrics, run

# ---- what a run is told ----------------------------------------------------------------------------


def test_the_command_line_overrules_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "out: a\nsteps: 3\ndata: {source: x, batch_size: 4}\noptim: {lr: 0.1, betas: [0.5, 0.6]}\n"
    )
    config = parse(["--config", str(file), "--steps", "5", "--parallel.strategy", "grad_op"])
    assert (config.steps, config.data.batch_size, config.optim.betas) == (5, 4, (0.5, 0.6))
    assert config.parallel.strategy == "grad_op"


GOOD = ["--out", "a", "--data.source", "x"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*GOOD, "--stepz", "3"], "--stepz"),
        ([*GOOD, "--steps", "many"], "steps.*int.*many"),
        ([*GOOD, "--parallel.strategy", "half"], "full.*half"),
        ([*GOOD, "--optim.warmup", "101"], r"warmup.*from 0 to steps \(100\).*101"),
        ([*GOOD, "--optim.clip", "-1"], "optim.clip.*greater than 0.*-1"),
        ([*GOOD, "--model.config", "a", "--model.pretrained", "b"], "model.config and model.pretrained"),
        (["--data.source", "x"], "required: out"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_bad_configuration_is_named(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(told, re.DOTALL)):
        parse(arguments)


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, micro_batch=3)
    assert micro_batches(config, 1) == (4, 2)  # the largest equal parts of at most 3
    assert micro_batches(config, 4) == (1, 2)
    with pytest.raises(ConfigError, match="multiple of the 3 ranks, found 8; 9 is one"):
        micro_batches(config, 3)
    config.parallel.strategy = "hybrid"
    assert mesh_shape(config, 8, host_ranks=4) == (2, 4)
    with pytest.raises(ConfigError, match="multiple of 4 ranks, found 6"):
        mesh_shape(config, 6, host_ranks=4)


def test_missing_data_is_named(tmp_path: Path) -> None:
    for source, told in [
        ("nowhere", 'a folder or "module:function", found'),
        ("tests.tiny_training:nothing", "no attribute 'nothing'"),
        (str(tmp_path), "no.*0 files|found 0 files"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_data(DataConfig(source))
    with pytest.raises(ConfigError, match=r"at least data.batch_size \(25\).*found 24"):
        load_data(DataConfig("tests.tiny_training:counting", batch_size=25))


def test_the_rate_warms_up_and_falls() -> None:
    config = OptimConfig(lr=1.0, warmup=2, decay="linear", min_lr=0.1)
    assert [learning_rate(step, config, 6) for step in range(6)] == pytest.approx(
        [0.5, 1, 1, 0.775, 0.55, 0.325]
    )


# ---- data ------------------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once_however_it_is_cut() -> None:
    at_once = rows_at(0, 30, 10, seed=1)
    in_parts = torch.cat([rows_at(start, 6, 10, seed=1) for start in range(0, 30, 6)])
    assert torch.equal(at_once, in_parts)
    epochs = at_once.view(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert not torch.equal(epochs[0], epochs[1])


def test_a_folder_of_text_and_tokens(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    text = "the quick brown fox jumps over the lazy dog"  # 43 bytes
    (tmp_path / "b.txt").write_text(text)
    np.save(tmp_path / "a.npy", np.arange(25, dtype=np.uint16))
    data = load_data(DataConfig(str(tmp_path), batch_size=2, seq_len=10, held_out=0.25))
    assert (len(data.train), len(data.test)) == (
        5,
        1,
    )  # 2 stretches of tokens and 4 of text; every 4th is held out
    assert data.train[torch.tensor([1])]["input_ids"].tolist() == [list(range(10, 20))]
    assert bytes(data.train[torch.tensor([2])]["labels"][0].tolist()).decode() == text[:10]
    assert data.predictions(data.train[torch.tensor([0, 1])]) == 18


# ---- what is written --------------------------------------------------------------------------------


@pytest.mark.skipif(not chaos.can_fill_a_disk(), reason="it takes root to fill a disk of its own")
def test_a_full_disk_costs_no_line_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "disk"
    with chaos.small_disk(out):
        run_log = RunLog(out, step=0, steps=999, tensorboard=False)
        with chaos.full_disk(out):
            for step in range(1, 400):  # more than what is left of a block
                run_log.metrics(step, loss=0.5)
            run_log.durable()
            assert len((out / "metrics.jsonl").read_text().splitlines()) < 399
        run_log.metrics(400, loss=0.5)
        assert metrics(out) == dict.fromkeys(range(1, 401), 0.5)
        with chaos.full_disk(out):
            for step in range(401, 800):
                run_log.metrics(step, loss=0.5)
            run_log.close()
        told = capsys.readouterr().err
        assert told.count("No space left on device; the run goes on") == 1
        assert '"step": 799' in told.partition("never written:")[2]
        RunLog(out, step=800, steps=999, tensorboard=False).close()
        assert 400 < len(metrics(out)) < 799  # whole lines, to which others can be added

        run_log = RunLog(out, step=799, steps=999, tensorboard=False)
        with chaos.full_disk(out), contextlib.suppress(OSError), (out / "log").open("w", buffering=1) as log:
            monkeypatch.setattr(sys, "stderr", log)  # as sbatch's file is that lies beside the run
            for step in range(800, 999):
                run_log.metrics(step, loss=0.5)
            monkeypatch.undo()
        run_log.close()
        assert 998 in metrics(out)


# ---- runs ------------------------------------------------------------------------------------------


def test_ranks_times_accumulation_gives_the_same_losses(tmp_path: Path) -> None:
    """Space-time equivalence: 8 samples a step as 1 rank x 4 micro-batches, 2 x 2 and 4 x 1.

    The same numbers are added up in another order, so the losses agree to fp32's rounding and not to the bit.
    """
    losses, evaluated = {}, {}
    for world_size in (1, 2, 4):
        out = tmp_path / str(world_size)
        losses[world_size] = run_on_ranks(
            partial(run, micro_batch=2, save_every=STEPS), out, world_size=world_size
        )[0]
        evaluated[world_size] = metrics(out, "eval_loss")
        assert micro_batches(configured(out, micro_batch=2), world_size) == (4 // world_size, 2)
    assert losses[1][STEPS] < losses[1][1] / 2  # it does learn
    for world_size in (2, 4):
        assert losses[world_size] == pytest.approx(losses[1], rel=1e-4)
        assert evaluated[world_size] == pytest.approx(evaluated[1], rel=1e-4)


def scenes(out: Path) -> dict[str, Any]:
    """On two ranks: a whole run, one that is stopped, damage, and what is refused."""
    found: dict[str, Any] = {"whole": run(out / "whole")}

    # rank 1 alone gets the signal, after its third step
    os.environ.update(
        FAULTS="3:SIGUSR1", METRICS=str(out / "stopped" / "metrics.jsonl"), TORCHELASTIC_RESTART_COUNT="0"
    )
    found["stopped"] = train(configured(out / "stopped", "faulty"))

    newest = committed(out / "whole" / "checkpoints")[-1].path
    dist.barrier()
    if get_rank() == 0:
        file = min(newest.glob("*.distcp"))
        os.truncate(file, file.stat().st_size // 2)
    dist.barrier()
    found["after damage"] = run(out / "whole")

    def failure(kind: type[Exception], config: TrainConfig) -> str:
        with pytest.raises(kind) as caught:
            train(config)
        return str(caught.value)

    found["NaN"] = failure(NotFinite, configured(out / "nan", "poisoned"))
    found["another model"] = failure(CheckpointError, configured(out / "whole", "wider", steps=2 * STEPS))
    # what only one rank can see
    source = "counting" if get_rank() == 0 else "nothing"
    found["no data on rank 1"] = failure(ConfigError, configured(out / "no data", source))
    run(out / "untrained", lr=1e-12, steps=3)
    found["evaluated"] = metrics(out / "untrained", "eval_loss")
    found["from files"] = from_files(out)
    return found


def from_files(out: Path) -> dict[str, Any]:
    """Text and a pretrained folder, in bf16, with masks and recomputing, resumed; the model's own loss."""
    import transformers

    folder, text = out / "pretrained", out / "text"
    if get_rank() == 0:
        small: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **small))
        model.save_pretrained(folder, max_shard_size="20KB")
        text.mkdir()
        (text / "a.txt").write_text(Path(__file__).read_text())
    dist.barrier()
    config = configured(out / "files", steps=3, name="child_tuning", tensorboard=True)
    config.data = DataConfig(str(text), batch_size=8, seq_len=16)
    config.model = ModelConfig(pretrained=str(folder))
    config.parallel = ParallelConfig(precision="bf16", recompute=True)
    train(config)
    config.steps = 6
    train(config)
    rows = load_data(config.data).train
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    first = rows[rows_at(0, 8, len(rows), config.seed)]
    return {"losses": metrics(out / "files"), "first": model(**first).loss.item()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("runs")
    return run_on_ranks(scenes, out, world_size=2), out


Told = tuple[list[dict[str, Any]], Path]


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_saves_it(told: Told) -> None:
    by_rank, out = told
    first, second = (each["stopped"] for each in by_rank)
    assert first == second == Progress(first.step, 8 * first.step, "SIGUSR1")
    assert 3 <= first.step < STEPS
    assert committed(out / "stopped" / "checkpoints")[-1].step == first.step
    assert events(out / "stopped")[-1] == "stopped"


def test_a_stopped_run_goes_on_without_a_seam_on_another_number_of_ranks(told: Told) -> None:
    """Also after lines of steps that came after the checkpoint, as a killed run leaves them."""
    by_rank, out = told
    stopped = by_rank[0]["stopped"].step
    with (out / "stopped" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {stopped + 1}, "loss": 99}}\n{{"step": {stopped + 2}, "lo')
    resumed = run_on_ranks(run, out / "stopped", world_size=1)[0]
    assert list(resumed) == list(range(1, STEPS + 1))
    assert resumed == pytest.approx(by_rank[0]["whole"], rel=1e-4)


def test_a_damaged_newest_checkpoint_is_passed_over(told: Told) -> None:
    by_rank, out = told
    assert by_rank[0]["after damage"] == by_rank[0]["whole"]  # the same ranks: to the bit
    assert events(out / "whole").count("damaged") == 1
    assert "expected" in (out / "whole" / "events.jsonl").read_text()
    assert len([*(out / "whole" / "checkpoints").glob("damaged-*")]) == 1


def test_what_is_refused_is_refused_alike_on_all_ranks(told: Told) -> None:
    by_rank, out = told
    for scene in ("NaN", "another model", "no data on rank 1"):
        assert by_rank[0][scene] == by_rank[1][scene]
    found = by_rank[0]
    assert "head.bias" in found["another model"]
    assert found["no data on rank 1"].startswith("rank 1: data.source")
    # sample 5 is the bad one: its rank is named, and the checkpoints are from before
    named = re.search(
        r"step (\d+): the gradient's norm is nan; the loss of rank (\d) is nan .samples ([\d, ]+)",
        found["NaN"],
    )
    assert named
    step, rank, samples = int(named[1]), int(named[2]), [int(sample) for sample in named[3].split(", ")]
    assert 5 in samples
    assert samples == rows_at(8 * (step - 1), 8, 24, seed=0).view(2, 4)[rank].tolist()
    assert max((one.step for one in committed(out / "nan" / "checkpoints")), default=0) < step


def test_every_test_sample_counts_once_on_ranks_that_do_not_divide_them(told: Told) -> None:
    """7 samples on 2 ranks, 4 at a time, with labels left out, against the unsharded model."""
    task = tiny_training.counting()
    expected = tiny_training.build()(**task.test).loss.item()
    assert told[0][0]["evaluated"][3] == pytest.approx(expected, rel=1e-5)


def test_text_and_a_pretrained_folder_in_bf16_are_resumed_and_told_to_tensorboard(told: Told) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    by_rank, out = told
    found = by_rank[0]["from files"]
    assert list(found["losses"]) == list(range(1, 7))
    assert found["losses"][1] == pytest.approx(found["first"], rel=2e-3)  # in bf16
    assert found["losses"][1] != found["first"]
    assert found["losses"][6] < found["losses"][1]
    events = EventAccumulator(str(out / "files" / "tensorboard")).Reload()
    assert {each.step: each.value for each in events.Scalars("loss")} == pytest.approx(found["losses"])
    assert [each.step for each in events.Scalars("eval_loss")] == [3, 6]


def test_child_tuning_recomputing_and_compiled(tmp_path: Path) -> None:
    """Masks change what is learned; recomputing and a compiler's backend do not."""

    def runs() -> list[dict[int, float]]:
        plain = {"steps": 3, "name": "child_tuning"}
        return [
            run(tmp_path / "plain", steps=3),
            run(tmp_path / "child", **plain),
            run(tmp_path / "recomputed", **plain, parallel=ParallelConfig("grad_op", recompute=True)),
            run(tmp_path / "compiled", **plain, parallel=ParallelConfig("hybrid", 1, compile="eager")),
        ]

    plain, child, recomputed, compiled = run_on_ranks(runs, world_size=2)[0]
    assert child[1] == plain[1]
    assert child[3] != plain[3]
    assert recomputed == pytest.approx(child, rel=1e-5)
    assert compiled == pytest.approx(child, rel=1e-5)

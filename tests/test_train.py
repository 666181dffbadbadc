"""What a run computes is right, however its ranks divide it and wherever it was interrupted."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils.flop_counter import FlopCounterMode

from fsdp_utils import ChildTuningAdamW, checkpoints, get_rank, run_on_ranks
from fsdp_utils.train import rows_at
from tests import tiny_training
from tests.training_runs import STEPS, alone, events, metrics, run, saved_optimizer

SMALL: dict[str, Any] = {"vocab_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"hidden_size": 32, "intermediate_size": 80}

# ---- the samples -----------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once_however_it_is_cut() -> None:
    at_once = rows_at(0, 30, 10, seed=1)
    in_parts = torch.cat([rows_at(start, 6, 10, seed=1) for start in range(0, 30, 6)])
    assert torch.equal(at_once, in_parts)
    assert all(sorted(epoch) == list(range(10)) for epoch in at_once.view(3, 10).tolist())


def test_no_epoch_of_one_seed_is_one_of_the_next_seed() -> None:
    orders = [tuple(rows_at(20 * epoch, 20, 20, seed).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


# ---- on one rank, two and four ---------------------------------------------------------------------


def first_loss(task: tiny_training.Counting) -> float:
    """Of the unsharded model."""
    rows = rows_at(0, 8, 24, seed=0)
    return tiny_training.build()(**{name: tensor[rows] for name, tensor in task.train.items()}).loss.item()


def test_ranks_times_accumulation_gives_the_same_losses(tmp_path: Path) -> None:
    """Space-time equivalence: 8 samples a step as 1 rank x 4 micro-batches, 2 x 2 and 4 x 1.

    The same numbers are added up in another order, so the losses agree to fp32's rounding and not to the bit.
    """
    few = {"micro_batch": 3, "save_every": STEPS}  # 3 do not divide the batch, 2 do

    def on_ranks(out: Path) -> dict[int, float]:
        return run(out, "pairs", **few)

    one = alone(tmp_path / "1", "pairs", **few)
    assert one[1] == pytest.approx(first_loss(tiny_training.counting()), rel=1e-5)
    assert one[STEPS] < one[1] / 2  # it does learn
    for world_size in (2, 4):
        out = tmp_path / str(world_size)
        assert run_on_ranks(on_ranks, out, world_size=world_size)[0] == pytest.approx(one, rel=1e-4)
        assert metrics(out, "eval_loss") == pytest.approx(metrics(tmp_path / "1", "eval_loss"), rel=1e-4)


def runs(out: Path) -> dict[str, Any]:
    """On two ranks. Of `gaps` with one sample in a micro-batch, whole micro-batches lack labels."""
    few = {"steps": 6, "save_every": 6, "eval_every": 2}
    child = {"steps": 3, "save_every": 3, "name": "child_tuning"}

    def drawn(name: str, steps: int, seed: int = 0) -> list[float]:
        tiny_training.Drawing.drawn.clear()
        run(out / name, "drawing", steps=steps, seed=seed)
        return tiny_training.Drawing.drawn[:]

    return {
        "gaps": run(out / "gaps", "gaps", **few),
        "gaps, parted": run(out / "parted", "gaps", micro_batch=1, **few),
        "gaps, divided": run(out / "divided", "gaps_divided", micro_batch=1, **few),
        "unlabelled": run(out / "unlabelled", "unlabelled", **few),
        "untrained": run(out / "untrained", lr=1e-12, steps=3),
        "adamw": run(out / "adamw", steps=3, save_every=3),
        "child": run(out / "child", **child),
        "recomputed": run(out / "recomputed", **child, strategy="grad_op", recompute=True, profile_step=3),
        "compiled": run(out / "compiled", **child, strategy="hybrid", shard_ranks=1, compile="eager"),
        "drawn": [drawn("draws", 4), drawn("other draws", 4, seed=1)],
        "drawn again": [drawn("two draws", 2), drawn("two draws", 4)],
        "from files": from_files(out),
    }


def from_files(out: Path) -> dict[str, float]:
    """Tokens, text and a pretrained folder, in bf16, resumed; and what the model itself says of the samples.

    Their 10 and 20 samples are one after the other; of 30, evenly spread, 9 are held out.
    """
    folder, text = out / "pretrained", out / "text"
    if get_rank() == 0:
        text.mkdir()
        np.save(text / "a.npy", np.random.default_rng(0).integers(0, 256, 165, dtype=np.uint16))
        (text / "b.txt").write_text(" ".join(map(str, range(200)))[: 20 * 16 + 9])
        config = transformers.LlamaConfig(**{**SMALL, "vocab_size": 256}, initializer_range=0.3)
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="50KB")
    dist.barrier()
    settings = {"pretrained": str(folder), "seq_len": 16, "held_out": 0.3, "precision": "bf16"}
    settings |= {"lr": 1e-12, "tensorboard": True, "name": "child_tuning"}
    run(out / "files", str(text), steps=3, **settings)
    run(out / "files", str(text), steps=6, **settings)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    files = [np.load(text / "a.npy")[:160], np.frombuffer((text / "b.txt").read_bytes(), np.uint8)[:320]]
    rows = torch.from_numpy(np.concatenate(files).astype(np.int64)).view(30, 16)
    held_out = torch.arange(31).mul(9).div(30, rounding_mode="floor").diff() > 0
    first = rows[~held_out][rows_at(0, 8, 21, seed=0)]
    parts = {"loss": first, "eval_loss": rows[held_out]}
    return {name: model(input_ids=ids, labels=ids).loss.item() for name, ids in parts.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("runs")
    return run_on_ranks(runs, out, world_size=2, timeout=100), out


Told = tuple[list[dict[str, Any]], Path]


def test_samples_without_labels_change_nothing_however_the_batch_is_divided(told: Told) -> None:
    found = told[0][0]
    assert found["gaps"][1] == pytest.approx(first_loss(tiny_training.gaps()), rel=1e-5)
    assert len(found["gaps"]) == 6
    for way in ("gaps, parted", "gaps, divided"):
        assert found[way] == pytest.approx(found["gaps"], rel=1e-4)


def test_without_any_label_there_is_no_loss_and_a_run_ends_well(told: Told) -> None:
    (found, _), out = told
    assert found["unlabelled"] == {}
    assert metrics(out / "unlabelled", "norm") == dict.fromkeys(range(1, 7), 0.0)
    assert metrics(out / "parted", "eval_loss") == {}  # no sample of its test has a label
    for name in ("unlabelled", "parted"):
        assert len(events(out / name, "finished")) == 1


def test_every_test_sample_counts_once_on_ranks_that_do_not_divide_them(told: Told) -> None:
    """7 samples on 2 ranks, 4 at a time, with labels left out, against the unsharded model."""
    expected = tiny_training.build()(**tiny_training.counting().test).loss.item()
    assert metrics(told[1] / "untrained", "eval_loss")[3] == pytest.approx(expected, rel=1e-5)


def test_masks_change_what_is_learned_and_recomputing_and_a_compiler_do_not(told: Told) -> None:
    found = told[0][0]
    assert found["child"][1] == found["adamw"][1]
    assert found["child"][3] != found["adamw"][3]
    assert found["recomputed"] == pytest.approx(found["child"], rel=1e-5)
    assert found["compiled"] == pytest.approx(found["child"], rel=1e-5)


def test_the_step_that_is_asked_for_is_profiled_on_rank_0(told: Told) -> None:
    (trace,) = told[1].glob("*/trace-*")
    assert trace.relative_to(told[1]) == Path("recomputed/trace-step-3.json")
    assert "traceEvents" in json.loads(trace.read_text())


def test_random_numbers_differ_between_ranks_steps_and_seeds_and_are_the_same_resumed(told: Told) -> None:
    numbers = [number for found in told[0] for part in found["drawn"] for number in part]
    assert len(numbers) == len(set(numbers)) == 2 * 2 * 4
    for found in told[0]:
        first, second = found["drawn again"]
        assert first + second == found["drawn"][0]


def test_files_and_a_pretrained_folder_in_bf16_are_resumed_and_told_to_tensorboard(told: Told) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (found, _), out = told
    events = EventAccumulator(str(out / "files" / "tensorboard")).Reload()
    for name, step in (("loss", 1), ("eval_loss", 3)):
        by_step = metrics(out / "files", name)
        assert by_step[step] == pytest.approx(found["from files"][name], rel=2e-3)
        assert by_step[step] != found["from files"][name]
        assert {each.step: each.value for each in events.Scalars(name)} == pytest.approx(by_step)
    assert list(metrics(out / "files")) == [1, 2, 3, 4, 5, 6]


def test_what_is_written_is_json(told: Told) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = [line for file in told[1].glob("*/*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) > 80
    for line in lines:
        json.loads(line, parse_constant=refuse)


# ---- the optimizer ---------------------------------------------------------------------------------


def test_the_rate_warms_up_and_falls_and_is_logged_at_every_second_step_and_the_last(tmp_path: Path) -> None:
    rate = {"lr": 1.0, "warmup": 2, "decay": "linear", "min_lr": 0.1}
    alone(tmp_path / "all", steps=6, **rate)
    assert metrics(tmp_path / "all", "lr") == pytest.approx({1: 0.5, 2: 1, 3: 1, 4: 0.775, 5: 0.55, 6: 0.325})
    alone(tmp_path / "some", steps=5, log_every=2, **rate)
    assert list(metrics(tmp_path / "some")) == [2, 4, 5]


def test_the_gradient_is_clipped_to_the_norm_and_its_own_norm_is_told(tmp_path: Path) -> None:
    norms = {}
    for clip in (None, 1e3, 0.01):
        out = tmp_path / str(clip)
        alone(out, steps=2, warmup=0, lr=1e-12, betas=(0.0, 0.0), clip=clip)
        means = [state["exp_avg"] for state in saved_optimizer(out).state.values()]  # of the last gradient
        norms[clip] = metrics(out, "norm")[2], float(torch.nn.utils.get_total_norm(means))
    assert norms[None] == pytest.approx((norms[None][0],) * 2) == norms[1e3]
    assert norms[0.01] == pytest.approx((norms[None][0], 0.01), rel=1e-4)


def test_changed_settings_of_the_optimizer_hold_from_there_on_and_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    alone(tmp_path, steps=2)
    alone(tmp_path, steps=2)
    assert "other settings" not in capfd.readouterr().err
    alone(tmp_path, steps=4, weight_decay=0.0, betas=(0.5, 0.6), lr=0.5, clip=None)
    assert (
        "from step 2 on with other settings than before: optim.betas (0.9, 0.95) -> (0.5, 0.6), "
        "optim.clip 1.0 -> None, optim.lr 0.01 -> 0.5, optim.weight_decay 0.1 -> 0.0, steps 2 -> 4\n"
    ) in capfd.readouterr().err
    (group,) = saved_optimizer(tmp_path).param_groups
    assert (group["weight_decay"], tuple(group["betas"])) == (0.0, (0.5, 0.6))

    alone(tmp_path / "child", steps=2, name="child_tuning")
    alone(tmp_path / "child", steps=4, name="child_tuning", reserve_p=0.9, weight_decay=0.3)
    (group,) = saved_optimizer(tmp_path / "child", ChildTuningAdamW).param_groups
    assert (group["reserve_p"], group["weight_decay"], tuple(group["betas"])) == (0.9, 0.3, (0.9, 0.95))


def test_every_seed_of_64_bits_is_one(tmp_path: Path) -> None:
    first, second = (alone(tmp_path / str(seed), seed=seed, steps=2) for seed in (2**63 - 1, -(2**63)))
    assert first[1] != second[1]  # other samples


# ---- saved -----------------------------------------------------------------------------------------


def test_each_save_is_told_and_the_last_step_is_saved_once(tmp_path: Path) -> None:
    for _ in range(2):
        alone(tmp_path, steps=5, keep=2)
        assert [event["step"] for event in events(tmp_path, "saved")] == [2, 4, 5]
        assert list(checkpoints(tmp_path / "checkpoints")) == [4, 5]
    alone(tmp_path, steps=6, keep=2)
    assert list(checkpoints(tmp_path / "checkpoints")) == [5, 6]


def test_a_failed_last_evaluation_leaves_the_last_step_saved_and_is_made_up_for(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        alone(tmp_path / "bad", "bad_test", steps=6, eval_every=100)
    assert list(checkpoints(tmp_path / "bad" / "checkpoints"))[-1] == 6
    mended = alone(tmp_path / "bad", steps=6, eval_every=100)
    assert list(mended) == [1, 2, 3, 4, 5, 6]  # nothing was trained again
    assert len(events(tmp_path / "bad", "finished")) == 1
    alone(tmp_path / "good", steps=6, eval_every=100)
    assert metrics(tmp_path / "bad", "eval_loss") == metrics(tmp_path / "good", "eval_loss")


LINES = [b'{"step": 1, "loss": 3.0}', b'{"step": 2, "loss": 2.0}', b'{"step": 2, "eval_loss": 2.5}']
LATER = b'{"step": 3, "loss": 1.0}\n{"step": 4, "lo'


@pytest.mark.parametrize(
    ("content", "line", "left"),
    [
        (b"\n".join([*LINES, b""]), None, LINES),
        (b"\n".join([*LINES, b'{"st']), None, LINES),
        (b"\n".join([*LINES, LATER]), None, LINES),
        (b"".join(bytes([i]) for i in range(256)) * 9, 1, []),
        (b"\n".join([LINES[0], b"[1, 2]", *LINES[1:], LATER]), 2, LINES),
        (b"\n".join([LINES[0], b'{"loss": 1.0}', *LINES[1:], b""]), 2, LINES),
        (b"\n".join([*LINES, b"[" * 100_000, b""]), 4, LINES),
    ],
)
def test_lines_of_later_steps_are_taken_out_and_what_no_run_wrote_is_set_aside(
    two_steps: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    content: bytes,
    line: int | None,
    left: list[bytes],
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two_steps, out)
    (out / "metrics.jsonl").write_bytes(content)
    alone(out, steps=3, eval_every=9)
    found = (out / "metrics.jsonl").read_bytes().splitlines()
    assert found[: len(left)] == left
    assert {json.loads(each)["step"] for each in found[len(left) :]} == {3}
    told = f'metrics.jsonl: expected each line to be JSON with "step", line {line} is not'
    assert (told in capfd.readouterr().err) == (line is not None)
    aside = [file.read_bytes() for file in out.glob("metrics.jsonl.damaged-*")]
    assert aside == ([content] if line else [])  # no byte of it is lost
    assert [event["step"] for event in events(out, "started")] == [0, 2]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two steps")
    alone(out, steps=2, eval_every=9)
    return out


# ---- operations and rates --------------------------------------------------------------------------

GPT2: dict[str, Any] = {"vocab_size": 96, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_inner": 80}


@pytest.mark.parametrize(
    ("kind", "settings", "length"),
    [
        ("Llama", SMALL, 64),
        ("Llama", SMALL, 16),
        ("Llama", {**SMALL, "tie_word_embeddings": True}, 64),
        ("Llama", {**SMALL, "num_key_value_heads": 2}, 16),
        ("Llama", {**SMALL, "head_dim": 16}, 64),
        ("Qwen2", {**SMALL, "num_key_value_heads": 4}, 16),
        ("GPTNeoX", SMALL, 64),
        ("GPT2", GPT2, 64),
    ],
)
def test_the_operations_behind_the_mfu_are_those_that_torch_counts(
    tmp_path: Path, kind: str, settings: dict[str, Any], length: int
) -> None:
    name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**settings, architectures=[name])
    config.save_pretrained(tmp_path / "model")
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    tokens = torch.arange(length)[None] % 96
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()

    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.arange(4 * length) % 96)
    settings = {"config": str(tmp_path / "model"), "peak_tflops": 1e-3, "batch_size": 2, "held_out": 0}
    alone(tmp_path / "run", str(tmp_path / "data"), steps=2, seq_len=length, **settings)
    rates = [
        metrics(tmp_path / "run", name)[2] for name in ("mfu", "samples_per_s", "tokens_per_s", "seconds")
    ]
    assert rates[1] == pytest.approx(2 / rates[3])
    assert rates[2] == pytest.approx(length * rates[1])
    assert rates[0] * 1e9 / rates[2] == pytest.approx(counter.get_total_flops() / length, rel=0.01)


def test_of_a_model_without_layers_there_is_no_mfu(tmp_path: Path) -> None:
    alone(tmp_path, steps=2, peak_tflops=1.0)
    assert list(metrics(tmp_path, "tokens_per_s")) == [1, 2]
    assert metrics(tmp_path, "mfu") == {}

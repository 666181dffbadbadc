"""Configurations that nobody should have written: each is one ConfigError, at once."""

import re
import time
from pathlib import Path

import pytest

from fsdp_utils.train.config import ConfigError, DataConfig, TrainConfig, check_ranges, parse

GOOD = "out: a\ndata: {source: x}\n"
BOMB = "\n".join(
    ["a0: &a0 [x, x, x]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))]
)


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def refusal(arguments: list[str]) -> str:
    begun = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert time.perf_counter() - begun < 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (BOMB, "c.yaml, line 7: expected at most 1,048,576 characters with all aliases"),
        (GOOD + "optim:\n" + indented(BOMB), "c.yaml, line 10.*aliases"),
        (GOOD + "steps: |\n" + indented(BOMB), "c.yaml, line 7.*aliases"),  # YAML in a text
        (GOOD + "optim:\n  lr: |\n" + indented(indented(BOMB)), "c.yaml, line 7.*aliases"),
        ("out: " + "[" * 5000, "c.yaml.*at most 50 deep"),
        ("#" * 300_000, "c.yaml.*at most 262,144 characters"),
        ("out: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        (b"out: \xff\xfe\n", "UTF-8"),
        (b"out: a\0b\n", "control characters"),
        (GOOD + 'optim: "\\0"\n', "expected text without a NUL"),
        (GOOD + "steps: null\n", "expected steps to have a value, found null"),
        (GOOD + "optim: {lr: null}\n", r"expected optim\.lr to have a value, found null"),
        ("out: null\ndata: {source: x}\n", "expected out to have a value|required: out"),
        ("out: ''\ndata: {source: x}\n", "expected out to be the name of a directory"),
        ("out: s3://a/b\ndata: {source: x}\n", "expected out to be a directory .what is beside"),
        (GOOD + "seed: 9999999999999999999999\n", "expected seed to be a number of 64 bits.*999"),
        (GOOD + "hang_s: .inf\n", "expected hang_s to be finite, found inf"),
        (GOOD + "timeout_s: 1e9\n", "expected timeout_s to be at most 1000000, found 1000000000"),
        (GOOD + "optim: {lr: .nan}\n", r"optim\.lr to be greater than 0, found nan"),
        (GOOD + "optim: {weight_decay: .nan}\n", r"optim\.weight_decay to be finite, found nan"),
        (GOOD + "optim: {weight_decay: -0.1}\n", r"optim\.weight_decay to be at least 0, found -0.1"),
        (GOOD + "optim: {betas: [0.9, 1.0]}\n", r"optim\.betas to be two numbers from 0 to 1"),
        (GOOD + "profile_step: 0\n", "profile_step to be at least 1"),
        (GOOD + "steps: 0\n", "steps to be at least 1, found 0"),
        (GOOD + "peak_tflops: 0\n", "peak_tflops to be greater than 0, found 0"),
        (GOOD + "optim: {reserve_p: 0.0}\n", r"optim\.reserve_p to be greater than 0 and at most 1, found 0"),
        (
            GOOD + "optim: {reserve_p: 1.01}\n",
            r"optim\.reserve_p to be .* at most 1, found 1",
        ),
        (GOOD + "optim: {min_lr: 1.01}\n", r"optim\.min_lr to be from 0 to 1, found 1"),
        (GOOD + "optim: {warmup: -1}\n", r"optim\.warmup to be from 0 to steps .100., found -1"),
        ("[1, 2]", "Unexpected config"),
        ("", "Unexpected config"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, content: str | bytes, told: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(told, refusal(["--config", str(file)]), re.DOTALL)


def test_a_bomb_elsewhere_is_refused_too(tmp_path: Path) -> None:
    good = ["--out=a", "--data.source=x"]
    (tmp_path / "optim.yaml").write_text(BOMB)
    (tmp_path / "inner.yaml").write_text("lr: |\n" + indented(BOMB))
    assert re.search(r"--optim\.lr, line 7.*aliases", refusal([*good, f"--optim.lr={BOMB}"]))
    assert re.search("line 7.*aliases", refusal([*good, "--optim.lr", BOMB]))
    for name in ("optim", "inner"):
        told = refusal([*good, f"--optim={tmp_path}/{name}.yaml"])
        assert re.search("line 7.*aliases", told, re.DOTALL)


def test_aliases_in_measure_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("out: &name a\ndata: {source: *name}\noptim: {lr: 1e-4, betas: [0.5, 0.6]}\nseed: -7\n")
    config = parse(["--config", str(file), "--data.tokenizer", "a: b: *c"])  # a text that is no YAML
    assert (config.data.source, config.data.tokenizer, config.seed) == ("a", "a: b: *c", -7)
    assert (config.optim.lr, config.optim.betas) == (1e-4, (0.5, 0.6))


def test_the_ends_of_each_range_are_in_it() -> None:
    least = ["--steps=1", "--optim.min_lr=0", "--data.held_out=0", "--optim.weight_decay=0", "--keep=1"]
    most = [
        "--optim.min_lr=1",
        "--data.held_out=1",
        "--optim.reserve_p=1",
        "--optim.warmup=100",
        "--timeout_s=1e6",
    ]
    for arguments in (least, most, [f"--seed={2**63 - 1}"], [f"--seed={-(2**63)}"]):
        parse(["--out=a", "--data.source=x", *arguments])


def test_a_configuration_from_python_is_checked_alike() -> None:
    check_ranges(TrainConfig("a", DataConfig("x")))
    for config, name in [
        (TrainConfig("a", DataConfig("x", batch_size=None)), r"data\.batch_size"),  # type: ignore[arg-type]
        (TrainConfig("a", DataConfig("x"), seed=2**63), "seed"),
    ]:
        with pytest.raises(ConfigError, match=f"expected {name} to"):
            check_ranges(config)

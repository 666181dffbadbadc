"""What a run cannot train, or would train wrongly, is refused in one sentence, the same on every rank."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from fsdp_utils import get_rank, run_on_ranks
from fsdp_utils.train import ConfigError, parse, train
from tests.training_runs import alone, configured, metrics, program, refusal

# ---- settings --------------------------------------------------------------------------------------

GOOD = "out: a\ndata: {source: x}\n"
ARGUMENTS = ["--out=a", "--data.source=x"]
BOMB = "\n".join(
    ["a0: &a0 [x, x, x]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))]
)


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def refused(*arguments: str) -> str:
    begun = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        parse([*arguments])
    assert time.perf_counter() - begun < 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (BOMB, "c.yaml, line 7: expected at most 1,048,576 characters with all aliases"),
        (GOOD + "optim:\n  lr: |\n" + indented(indented(BOMB)), "c.yaml, line 7.*aliases"),  # YAML in a text
        ("out: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        (b"out: \xff\xfe\n", "UTF-8"),
        (b"out: a\0b\n", "control characters"),
        (GOOD + 'optim: "\\0"\n', "expected text without a NUL"),
        (GOOD + "steps: null\n", "expected steps to have a value, found null"),
        (GOOD + "optim: {lr: null}\n", r"expected optim\.lr to have a value, found null"),
        ("out: null\ndata: {source: x}\n", "expected out to have a value|required: out"),
        ("out: ''\ndata: {source: x}\n", "expected out to be the name of a directory"),
        *(
            (f"out: {out}\ndata: {{source: x}}\n", f"out to be a directory .no URL.*, found '{out}'")
            for out in ("s3://a/b", "s3:/a/b", "file://localhost/a", "hdfs:/a", "~/runs", "~you/runs")
        ),
        ("[1, 2]", "Unexpected config"),
        ("", "Unexpected config"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, content: str | bytes, told: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(told, refused("--config", str(file)), re.DOTALL)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--stepz=3", "--stepz"),
        ("--st=3", "unrecognized arguments: --st=3"),
        ("--steps=many", "steps.*int.*many"),
        ("--steps=0", "steps to be at least 1, found 0"),
        ("--parallel.strategy=half", "full.*half"),
        ("--config=nowhere.yaml", "nowhere.yaml"),
        ("--data.seq_len=1", r"data\.seq_len to be at least 2, .* found 1"),
        ("--data.held_out=1.0", r"data\.held_out to be from 0 to 1, without 1, found 1"),
        ("--seed=9999999999999999999999", "expected seed to be a number of 64 bits.*999"),
        ("--hang_s=.inf", "expected hang_s to be finite, found inf"),
        ("--timeout_s=1e9", "expected timeout_s to be at most 1000000, found 1000000000"),
        ("--profile_step=0", "profile_step to be at least 1"),
        ("--peak_tflops=0", "peak_tflops to be greater than 0, found 0"),
        ("--optim.lr=.nan", r"optim\.lr to be greater than 0, found nan"),
        ("--optim.clip=-1", "optim.clip.*greater than 0.*-1"),
        ("--optim.weight_decay=-0.1", r"optim\.weight_decay to be at least 0, found -0.1"),
        ("--optim.betas=[0.9, 1.0]", r"optim\.betas to be two numbers from 0 to 1"),
        ("--optim.reserve_p=0.0", r"optim\.reserve_p to be greater than 0 and at most 1, found 0"),
        ("--optim.min_lr=1.01", r"optim\.min_lr to be from 0 to 1, found 1"),
        ("--optim.warmup=101", r"warmup.*from 0 to steps .100., found 101"),
        (f"--optim.lr={BOMB}", r"--optim\.lr, line 7.*aliases"),
        ("--optim={}/inner.yaml", "line 7.*aliases"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, argument: str, told: str) -> None:
    (tmp_path / "inner.yaml").write_text("lr: |\n" + indented(BOMB))
    assert re.search(told, refused(*ARGUMENTS, argument.replace("{}", str(tmp_path))), re.DOTALL)


def test_what_is_missing_or_stands_against_another_is_named() -> None:
    assert "required: out" in refused("--data.source=x")
    both = refused(*ARGUMENTS, "--model.config=a", "--model.pretrained=b")
    assert "model.config and model.pretrained to be left out" in both


def test_the_command_line_overrules_yaml_which_may_have_aliases(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "out: &name a\nsteps: 3\ndata: {source: *name}\noptim: {lr: 1e-4, betas: [0.5, 0.6]}\nseed: -7\n"
    )
    config = parse(["--config", str(file), "--steps", "5", "--data.tokenizer", "a: b: *c"])  # not YAML
    assert (config.data.source, config.data.tokenizer, config.seed) == ("a", "a: b: *c", -7)
    assert (config.steps, config.optim.lr, config.optim.betas) == (5, 1e-4, (0.5, 0.6))


def test_the_ends_of_each_range_are_in_it() -> None:
    least = ["--steps=1", "--optim.min_lr=0", "--data.held_out=0", "--optim.weight_decay=0", "--keep=1"]
    most = ["--optim.min_lr=1", "--data.held_out=0.999", "--optim.reserve_p=1", "--optim.warmup=100"]
    for arguments in (least, [*most, "--timeout_s=1e6"], [f"--seed={2**63 - 1}"], [f"--seed={-(2**63)}"]):
        parse([*ARGUMENTS, *arguments])


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.write_text("mine")
    if kind == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ".lock").symlink_to(other)
    assert refusal(out).startswith("out: expected a directory to write to, found")
    assert {file.read_text() for file in (other, out) if file.is_file()} == {"mine"}


# ---- devices ---------------------------------------------------------------------------------------


def imagine(monkeypatch: pytest.MonkeyPatch, gpus: int, environment: dict[str, str]) -> list[torch.device]:
    """A host with that many GPUs, and a rank that was started with these variables: the device it takes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    return taken


@pytest.mark.parametrize(
    ("gpus", "local", "index"),
    [
        (4, {"LOCAL_RANK": "3"}, 3),
        (4, {"SLURM_LOCALID": "3"}, 3),
        (1, {"SLURM_LOCALID": "3"}, 0),  # srun --gpus-per-task=1
        (1, {}, 0),
        (2, {"LOCAL_RANK": "2"}, None),
        (2, {"SLURM_LOCALID": "5"}, None),
    ],
)
def test_a_rank_has_the_device_that_is_its_own_and_without_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    gpus: int,
    local: dict[str, str],
    index: int | None,
) -> None:
    taken = imagine(monkeypatch, gpus, local)
    if index is not None:
        with pytest.raises((RuntimeError, AssertionError)):  # this build of torch has no such device
            program("--out=x", "--data.source=x")
        assert taken == [torch.device("cuda", index)]
        return
    assert program("--out=x", "--data.source=x") == 2
    told = f"parallel.device: expected a cuda device for each rank of a host, found {gpus} and rank"
    assert f"ConfigError: {told}" in capfd.readouterr().err


def test_ranks_of_srun_alone_are_told_to_take_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    imagine(monkeypatch, 0, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"})
    assert program("--out=x", "--data.source=x") == 2
    told = capfd.readouterr().err
    assert "expected torchrun to have started the 2 ranks, found RANK, WORLD_SIZE, MASTER_ADDR" in told


# ---- data ------------------------------------------------------------------------------------------


def tokens(path: Path, ids: Any, name: str = "a.npy") -> Path:
    """A folder with a file of token ids."""
    path.mkdir(parents=True, exist_ok=True)
    np.save(path / name, ids, allow_pickle=True)
    return path


@pytest.mark.parametrize(
    ("source", "settings", "told"),
    [
        ("/nowhere", {}, 'data.source: expected a folder or "module:function", found'),
        ("nothing", {}, "data.source .*: expected a function to import: .*no attribute 'nothing'"),
        (":f", {}, "data.source ':f': expected a function to import"),
        ("no_labels", {}, "data.source .* labels among them, .* found shapes {'x': .8, 2.}"),
        ("uneven", {}, "data.source .* one row for each sample in all; found shapes .*8.* .*7"),
        (str(Path(__file__).parent / "data"), {}, "data.source .*found 0 files and none so long"),
        ("counting", {"batch_size": 25}, r"data.source .* at least data.batch_size \(25\).*found 24"),
        ("counting", {"batch_size": None}, "configuration: expected data.batch_size to have a value"),
        ("counting", {"seed": 2**63}, "configuration: expected seed to be"),
    ],
)
def test_settings_and_data_are_checked_from_python_too(
    tmp_path: Path, source: str, settings: dict[str, Any], told: str
) -> None:
    assert re.match(told, refusal(tmp_path, source, **settings))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", b"garbage", "cannot read a.npy"),
        ("a.npy", b"", "cannot read a.npy"),
        ("a.npy", np.arange(6.0), r"a.npy: expected token ids in one dimension, found float64\[6\]"),
        ("a.npy", np.arange(6).reshape(2, 3), r"a.npy: expected .* found int64\[2, 3\]"),
        ("a.npy", np.array([{}]), "cannot read a.npy"),
        ("a.txt", b"\xff\xfe\xfd" * 100, "cannot read a.txt: 'utf-8' codec can't decode"),
        ("a.txt", b"one two three four five six", r"data.batch_size \(8\) samples to train on, found 2"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_named(
    tmp_path: Path, name: str, content: Any, told: str
) -> None:
    folder, words = tmp_path / "data", tmp_path / "words"
    if isinstance(content, bytes):
        folder.mkdir()
        (folder / name).write_bytes(content)
    else:
        tokens(folder, content)
    tokenizer = Tokenizer(WordLevel({"?": 0, "one": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(words)
    settings = {"tokenizer": str(words), "seq_len": 2, "held_out": 0.3}
    assert re.search(f"^data.source .*{told}", refusal(tmp_path / "run", str(folder), **settings))


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    told = refusal(tmp_path / "run", str(tmp_path), tokenizer=str(tmp_path / "nowhere"))
    assert re.search(r"^data\.tokenizer .*nowhere", told)


@pytest.mark.parametrize(
    ("held_out", "left"), [(0, 100), (0.001, 99), (0.05, 95), (0.3, 70), (0.5, 50), (0.9, 10), (0.999, 1)]
)
def test_as_much_is_held_out_as_was_asked_for_and_a_batch_needs_as_many(
    tmp_path: Path, held_out: float, left: int
) -> None:
    source, settings = str(tokens(tmp_path / "data", np.arange(1000))), {"seq_len": 10, "held_out": held_out}
    told = refusal(tmp_path / "run", source, batch_size=left + 1, **settings)
    assert f"at least data.batch_size ({left + 1}) samples to train on, found {left}" in told
    told = refusal(tmp_path / "run", source, batch_size=left, **settings)
    assert told == "expected model.config or model.pretrained, as the data brings no model along"


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    alone(tmp_path / "tensors", steps=2)
    told = refusal(tmp_path / "tensors", "poisoned", steps=4)
    assert told.startswith("data.source, input_ids: expected 1,152 bytes with hash ")
    ids = np.arange(400_000, dtype=np.uint16) % 256
    source = tokens(tmp_path / "data", ids)
    settings = {"config": "llama-tiny", "seq_len": 8, "held_out": 0.0, "eval_every": 99}
    alone(tmp_path / "large", str(source), steps=2, **settings)
    ids[170_000:220_000] ^= 1
    tokens(source, ids)
    told = refusal(tmp_path / "large", str(source), steps=4, **settings)
    assert told.startswith("data.source, a.npy: expected 800,128 bytes with hash ")


# ---- models ----------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path("{mark}").write_text("ran")
class Mine(PretrainedConfig):
    model_type = "mine"
"""


def model_folder(path: Path, content: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "transformers makes no model of it"),
        (" " * 2_000_000 + "{}", "expected a file of at most 1,000,000 bytes, found 2,000,002"),
        ({"architectures": ["logging"]}, "expected .architectures. to name a model .*'logging'"),
        ({"architectures": "LlamaForCausalLM"}, "expected .architectures. .*found 'L'"),
        ({"architectures": None}, "expected .architectures. .*found None"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers to be at most 1,000, found 100,000"),
        ({"text_config": {"n_layers": 10**9}}, "n_layers to be at most 1,000, found 1,000,000,000"),
        ({"num_key_value_heads": 3}, "to divide num_attention_heads .4., found 3"),
        ({"hidden_size": "wide"}, "no model of it"),
        ({"vocab_size": -5}, "no model of it"),
        ({"vocab_size": 10**12}, "expected weights that fit into this host's .* GiB, found"),
        ({"intermediate_size": 10**30}, "no model of it|expected weights that fit"),
        ({"model_type": "nothing"}, "no model of it: ValueError"),
        ({"attn_implementation": "evil/kernel"}, "attn_implementation .* found 'evil/kernel', to be"),
        ({"attn_implementation": "nothing"}, "no model of it"),
    ],
)
def test_a_hostile_configuration_is_refused_in_one_sentence(tmp_path: Path, changes: Any, told: str) -> None:
    folder = model_folder(tmp_path / "m", {**LLAMA, **changes} if isinstance(changes, dict) else changes)
    begun = time.perf_counter()
    for name in ("config", "pretrained"):
        text = refusal(tmp_path / "run", **{name: folder})
        assert text.startswith(f"model.{name} ")
        assert re.search(told, text)
        assert "\n" not in text
    assert time.perf_counter() - begun < 20


def test_a_folder_s_code_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m", {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}})
    Path(folder, "code.py").write_text(CODE.format(mark=tmp_path / "mark"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for name in ("config", "pretrained"):
        assert re.search("custom code.*None is run here", refusal(tmp_path / "run", **{name: folder}))
    assert not (tmp_path / "mark").exists()


# ---- on two ranks ----------------------------------------------------------------------------------


def starts(out: Path) -> dict[str, str]:
    """What a run says on a rank, by what was wrong with it."""

    def start(name: str, source: str | Path = "counting", **settings: Any) -> str:
        config = configured(out / name, str(source), steps=steps, save_every=1, **settings)
        try:
            train(config)
        except ConfigError as error:
            return str(error)
        return "trained"

    def on_rank_0(act: Any) -> None:
        if get_rank() == 0:
            act()
        dist.barrier()

    own, steps = get_rank(), 2
    found = {
        "no data on rank 1": start("a", "counting" if own == 0 else "nothing"),
        "other settings": start("a", seed=own, micro_batch=(4, 2)[own]),
        "9 samples": start("a", batch_size=9),
        "hybrid": start("a", strategy="hybrid", shard_ranks=4),
    }
    tiny = {"config": "llama-tiny", "batch_size": 2, "seq_len": 10}
    for name in ("negative", "byte", "large"):
        found[name] = start("a", out / name, **tiny)
    found["positions"] = start("a", out / "good", **{**tiny, "seq_len": 2049})
    found["RoBERTa"] = start("a", out / "good", **{**tiny, "config": str(out / "roberta"), "seq_len": 511})
    found["Mamba"] = start("b", out / "good", **{**tiny, "config": str(out / "mamba"), "seq_len": 2049})

    source, bad = out / "data", tokens(out / f"other {own}", np.arange(4001) % 256)
    found["first"] = start("run", source, **tiny)
    steps = 3
    found["seq_len"] = start("run", source, **{**tiny, "seq_len": 20})
    found["held_out"] = start("run", source, **tiny, held_out=0.5)
    file = source / "a.npy"
    good = file.read_bytes()
    on_rank_0(lambda: file.write_bytes(good[:128] + bytes(len(good) - 128)))
    found["rewritten"] = start("run", source, **tiny)
    on_rank_0(lambda: file.write_bytes(good))
    on_rank_0(lambda: tokens(source, np.arange(5), "c.npy"))
    found["more"] = start("run", source, **tiny)
    on_rank_0((source / "c.npy").unlink)
    found["rank 1"] = start("run", source if own == 0 else bad, **tiny)
    found["again"] = start("run", source, **tiny)
    found["rank 1 at first"] = start("fresh", source if own == 0 else bad, **tiny)
    return found


def test_what_is_refused_is_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    """Also what one of them alone can see; each checks its share of the token ids."""
    ids = np.full(2**20 + 20, 255, dtype=np.int64)
    tokens(tmp_path / "good", ids[:8200])
    ids[17] = -1
    tokens(tmp_path / "negative", ids[:100])
    tokens(tmp_path / "byte", ids[:100].clip(-1, 99).astype(np.int8))
    tokens(tmp_path / "large", np.append(ids[18:], 256).astype(np.uint16))
    tokens(tmp_path / "data", np.arange(4000, dtype=np.uint16) % 256)
    model_folder(tmp_path / "roberta", {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta"})
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 2}
    model_folder(tmp_path / "mamba", {**mamba, "hidden_size": 8, "vocab_size": 256, "num_hidden_layers": 1})
    first, second = run_on_ranks(starts, tmp_path, world_size=2, timeout=100)
    assert first == second
    assert {first.pop(scene) for scene in ("Mamba", "first", "again")} == {"trained"}
    beyond = "data.source, a.npy: expected token ids from 0 to 255, which the model's vocabulary has, found "
    for scene, told in {
        "no data on rank 1": "rank 1: data.source 'tests.tiny_training:nothing'",
        "other settings": "rank 1: configuration: expected the same settings on all ranks",
        "9 samples": "expected data.batch_size to be a multiple of the 2 ranks, found 9; 10 is one",
        "hybrid": 'strategy "hybrid" with 4 ranks in a replica (parallel.shard_ranks, or the ranks of a',
        "negative": f"rank 0: {beyond}-1 at position 17",
        "byte": f"rank 0: {beyond}-1 at position 17",
        "large": f"rank 1: {beyond}256 at position {2**20 + 2}",
        "positions": "data.seq_len: expected at most the model's 2048 positions, found 2049",
        "RoBERTa": "data.seq_len: expected at most the model's 510 positions, found 511",
        "seq_len": "data.source, samples, by data.seq_len and data.held_out: expected 380 to train on, as",
        "held_out": "data.held_out: expected 380 to train on, as the checkpoint has it, found 200",
        "rewritten": "data.source, a.npy: expected 8,128 bytes with hash ",
        "more": "data.source, c.npy: expected nothing, as the checkpoint has it, found 168 bytes",
        "rank 1": "rank 1: data.source, a.npy: expected 8,128 bytes with hash ",
        "rank 1 at first": "rank 1: data.source, a.npy: expected 8,128 bytes with hash ",
    }.items():
        assert told in first.pop(scene), scene
    assert first == {}
    assert list(metrics(tmp_path / "run")) == [1, 2, 3]

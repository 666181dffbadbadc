"""plan and its command: what is printed, and a sentence for bad or hostile input, whose code is not run."""

import dataclasses
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, ViTConfig

from fsdp_utils import plan, search
from fsdp_utils.planner import Plan, work_items
from fsdp_utils.planner.__main__ import main
from tests.planner_net import Block, Net, WithoutRoot, of_width, tokens

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
LLAMA = LlamaConfig(**SIZES)
OWN_GPU = json.dumps(
    {
        "name": "RTX-3090",
        "usable_gib": 23.5,
        "memory_gb_s": 936,
        "half_tflops": 71,
        "fp32_tflops": 35.6,
        "link": "PCIe",
        "link_gb_s": 32,
        "host_link_gb_s": 32,
        "network_gb_s": 12.5,
    }
)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(LLAMA, world_size=16, batch_size=16, seq_len=32, gpu="A100-80")


def test_sizes_are_printed_in_a_unit_that_shows_them(planned: Plan) -> None:
    assert planned.peak_reserved_gib < 0.1
    text = str(planned)
    allocated = f"{planned.peak_allocated_gib * 1024:.2f} MiB allocated"
    assert f"{planned.parameters / 1e6:.2f} million parameters, on 16 A100-80" in text
    assert f"{allocated}, {planned.peak_reserved_gib * 1024:.2f} reserved of 77 GiB; at the peak" in text
    assert f"{max(planned.breakdown.values()) * 1024:8.2f}  " in text
    large = dataclasses.replace(planned, peak_allocated_gib=2.5, peak_reserved_gib=3.0, parameters=7 * 10**9)
    assert "7.00 billion parameters" in str(large)
    assert "memory    2.50 GiB allocated, 3.00 reserved of 77; at the peak" in str(large)


def test_a_step_is_an_estimate_with_its_range_beside_a_roofline(planned: Plan) -> None:
    low, high = planned.step_s_range
    assert low < planned.step_s < high
    assert planned.step_s_bound < planned.step_s
    assert f"{planned.step_s:.3g} s, likely {low:.3g} to {high:.3g}; {planned.step_s_bound:.3g} by" in str(
        planned
    )


# ---- bad input ---------------------------------------------------------------------------------------


@contextmanager
def soon() -> Iterator[None]:
    """Within 5 seconds and 1 GiB."""
    began, had_kib = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - had_kib < 1024**2


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.generator = (number for number in range(3))


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (LLAMA, {"gpu": "H1000"}, "expected gpu out of A10, A100-40"),
        (LLAMA, {"strategy": "zero9"}, "expected strategy out of full, grad_op, hybrid, found 'zero9'"),
        (LLAMA, {"world_size": 5000, "batch_size": 5000}, "a world_size from 1 to 4096, found 5000"),
        (LLAMA, {"batch_size": 20}, "a batch_size that 16 ranks can share, such as 32, found 20"),
        (LLAMA, {"world_size": 12, "batch_size": 12}, "multiples of 8, the ranks_per_host, found 12"),
        (LLAMA, {"gpu": "T4"}, "a T4 does not compute in bf16"),
        (LLAMA, {"seq_len": None}, "reads tokens; expected seq_len, found None"),
        (LLAMA, {"seq_len": -16}, "expected a seq_len from 1 on, or None, found -16"),
        (LLAMA, {"seq_len": "16"}, "expected seq_len to be a whole number below 2**62, found '16'"),
        (LLAMA, {"seq_len": 2**62}, "expected seq_len to be a whole number below 2**62, found 4611686"),
        (LLAMA, {"world_size": "8"}, "expected world_size to be a whole number below 2**62, found '8'"),
        (LLAMA, {"world_size": True}, "expected world_size to be a whole number below 2**62, found True"),
        (LLAMA, {"batch_size": 16.0}, "expected batch_size to be a whole number below 2**62, found 16.0"),
        (LLAMA, {"ranks_per_host": None}, "expected ranks_per_host to be a whole number below 2**62"),
        (LLAMA, {"ranks_per_host": 0}, "expected ranks_per_host from 1 on, found 0"),
        (LLAMA, {"overhead_gib": float("nan")}, "expected overhead_gib to be a number of GiB, found nan"),
        (
            LlamaConfig(**{**SIZES, "num_key_value_heads": 3}),
            {},
            "the forward pass of LlamaForCausalLM failed",
        ),
        (LlamaConfig(**{**SIZES, "vocab_size": 0}), {}, "the forward pass of LlamaForCausalLM failed"),
        (LlamaConfig(**{**SIZES, "num_hidden_layers": 0}), {}, "found no transformer blocks"),
        (
            LlamaConfig(**{**SIZES, "num_hidden_layers": 100_000}),
            {},
            "Is its number of layers right? It is 100000",
        ),
        (LLAMA, {"seq_len": 2**61}, "a batch of 1 for LlamaForCausalLM failed: RuntimeError: Storage size"),
        (LLAMA, {"batch_size": 2**60}, "for LlamaForCausalLM failed: RuntimeError: Storage size"),
        (LLAMA, {"seq_len": 2**31, "attention": "eager"}, "the forward pass of LlamaForCausalLM failed"),
        (Net(), {"inputs": lambda *_: 1 / 0}, "inputs(1, 32) failed: ZeroDivisionError"),
        (Net(), {"inputs": lambda *_: None}, "the forward pass of Net failed: TypeError"),
        (Net().requires_grad_(False), {"inputs": tokens}, "expected parameters that need a gradient"),
        (LlamaConfig(hidden_size=64, vocab_size=-1), {}, 'could not be built on "meta"'),
        (nn.Linear(2, 2), {}, "found no transformer blocks"),
        (Net(), {}, "does not know what to call Net with"),
        (Stubborn(), {}, "could not be copied without its memory"),
        ("nowhere", {}, "a folder with a config.json, found none at nowhere"),
        (7, {}, "a transformers config or a folder with a config.json, found int"),
        (lambda: 7, {}, "expected a function that gives an nn.Module, found int"),
        (lambda: 1 / 0, {}, 'could not build its model on "meta", without memory: ZeroDivisionError'),
        (LlamaConfig, {}, "expected a function that gives an nn.Module, found LlamaConfig"),
        (LLAMA, {"gpu": "{"}, "expected a JSON object with name, usable_gib, memory_gb_s, half_tflops"),
        (LLAMA, {"gpu": '{"name": "mine"}'}, "missing 8 required positional arguments: 'usable_gib'"),
        (LLAMA, {"gpu": OWN_GPU.replace("936", "0")}, "expected memory_gb_s of a GPU to be a number above 0"),
        (LLAMA, {"gpu": OWN_GPU.replace("PCIe", "SLI")}, "expected link of a GPU out of NVLink, PCIe, Inf"),
        (
            LLAMA,
            {"gpu": OWN_GPU.replace('"RTX-3090"', "5")},
            "expected name of a GPU to be a text of one line",
        ),
        (LLAMA, {"gpu": OWN_GPU.replace("RTX-3090", "")}, "expected name of a GPU to be a text of one line"),
        (LLAMA, {"gpu": OWN_GPU.replace("936", "9" * 400)}, "expected memory_gb_s of a GPU to be a number"),
        (LLAMA, {"gpu": OWN_GPU[:-1] + ', "bf16": "false"}'}, "expected bf16 of a GPU to be True or False"),
    ],
)
def test_bad_input_gets_one_sentence(model: Any, options: dict[str, Any], sentence: str) -> None:
    options = {"world_size": 16, "batch_size": 16, "seq_len": 32, **options}
    with soon(), pytest.raises(ValueError, match="plan: ") as error:
        plan(model, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("plan: ") == 1


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_root_without_parameters_gathers_nothing(api: str) -> None:
    planned = plan(
        WithoutRoot(), world_size=2, batch_size=2, precision="bf16_reduce_fp32", api=api, inputs=of_width
    )
    parameters = sum(p.numel() for p in WithoutRoot().parameters())
    assert planned.at_rest[work_items.PARAMETERS] == pytest.approx(4 * parameters / 2 / 2**30, rel=0.03)
    in_forward = [m for m in planned.moments if m.label.phase == "forward" and m.step == 2]
    assert all(work_items.GATHERED not in m.gib for m in in_forward if m.label.unit == "(root)")
    assert any(work_items.GATHERED in m.gib for m in in_forward)


# ---- what a folder brings with it ----------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class Evil(LlamaForCausalLM):
    config_class = EvilConfig
"""
ITS_CODE = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "evil"}, 2),  # transformers does not know it
        ({"model_type": "llama", "architectures": ["Evil"]}, 0),
        ({"model_type": "llama", "architectures": ["pipeline", "Trainer", "logging"]}, 0),  # no models
    ],
)
def test_the_planner_runs_no_code_of_a_folder(
    config: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    (folder / "config.json").write_text(json.dumps({**SIZES, **config, "auto_map": ITS_CODE}))
    assert main([str(folder), "--world-size", "2", "--batch-size", "2", "--seq-len", "16"]) == code
    assert asked == []
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "modules").exists()


@pytest.mark.parametrize("kernel", ["somebody/kernel", "flash_attention_2"])
def test_no_kernel_that_a_config_names_is_loaded(kernel: str, tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "llama", "attn_implementation": kernel}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = plan(str(tmp_path), world_size=2, batch_size=2, seq_len=32)
    assert (
        planned.peak_allocated_gib == plan(LLAMA, world_size=2, batch_size=2, seq_len=32).peak_allocated_gib
    )


def test_a_process_group_in_the_way_is_named() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(RuntimeError, match="there is a process group already"):
            plan(Net(), world_size=2, batch_size=2, inputs=tokens)
    finally:
        torch.distributed.destroy_process_group()


def test_the_command_plans_and_searches(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    LLAMA.save_pretrained(tmp_path)
    sizes = ["--seq-len", "16", "--gpu", "a10"]
    assert main([str(tmp_path), "--world-size", "2", "--batch-size", "2", *sizes]) == 0
    assert "on 2 A10: fits (simulated)" in capsys.readouterr().out
    assert main([str(tmp_path), "--world-size", "2", "--batch-size", "2", *sizes, "--gpu", OWN_GPU]) == 0
    printed = capsys.readouterr().out
    assert "on 2 RTX-3090: fits (simulated)" in printed
    assert "reserved of 22 GiB" in printed


def test_the_command_searches_with_what_is_given(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    LLAMA.save_pretrained(tmp_path)
    sizes = ["--seq-len", "16", "--search", "4", "2", "--batch-size", "12"]
    assert main([str(tmp_path), *sizes, "--strategy", "grad_op", "--checkpointing", "full"]) == 0
    printed = capsys.readouterr().out
    assert "the cheapest of 1 settings tried" in printed
    assert "fsdp2, grad_op, bf16, activation checkpointing full, adamw, batch 12 of 16 tokens" in printed
    assert "on 2 H100" in printed


def test_the_search_tries_batches_that_ranks_and_micro_batches_share(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    LLAMA.save_pretrained(tmp_path)
    only = ["--seq-len", "16", "--strategy", "full", "--checkpointing", "none", "--json"]
    options = ["--search", "4", "--micro-batches", "2", "--tensor-parallel", "2", *only]
    assert main([str(tmp_path), *options]) == 0
    tried = json.loads(capsys.readouterr().out)["tried"]
    assert [one["batch_size"] for one in tried] == [4, 8, 16, 32]  # of 2 ranks in 2 micro-batches
    assert main([str(tmp_path), "--search", "2", "--samples-per-s", "1e12", "--batch-size", "2", *only]) == 1


def test_tokens_per_s_are_not_asked_of_a_model_without_tokens() -> None:
    with pytest.raises(ValueError, match="expected samples_per_s, as the model reads no tokens"):
        search(
            ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32),
            world_sizes=[2],
            batch_size=2,
            tokens_per_s=1.0,
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--world-size 2 --batch-size 3", "a batch_size that 2 ranks can share, such as 4, found 3"),
        ("--world-size 2 --batch-size 2 --gpu H1000", "expected gpu out of A10, A100-40"),
        ("--world-size 2 --batch-size 2 --strategy zero9", "expected strategy out of full, grad_op, hybrid"),
        ("--search 2 --gpu H1000", "expected gpu out of A10, A100-40"),
        ("--search 12", "multiples of 8, the ranks_per_host, found 12"),
        ("--search 2 --batch-size 3", "a batch_size that 2 ranks can share, such as 4, found 3"),
        ("--search 2 --strategy zero9", "expected strategy out of full, grad_op, hybrid"),
        ("--search 2 --tokens-per-s nan", "search: expected tokens_per_s to be a number above 0"),
        ("--search 2 --samples-per-s -1", "search: expected samples_per_s to be a number above 0"),
    ],
)
def test_the_command_answers_bad_input_with_one_sentence(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    LLAMA.save_pretrained(tmp_path)
    assert main([str(tmp_path), "--seq-len", "16", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ('{"model_type": "llama", "hidden_size": 64, "vocab_size": -1}', 'could not be built on "meta"'),
        ('{"model_type": "nobody\'s"}', "transformers cannot read"),
        ("{", "expected the JSON of a configuration, found"),
        (None, "a folder with a config.json, found none"),
        ("[" * 100_000, "transformers cannot read"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "expected at most 10,000, found 1,000,000,000",
        ),
        ('{"model_type": "t5", "num_decoder_layers": 20000}', "num_decoder_layers: expected at most 10,000"),
        ('{"model_type": "vit", "num_labels": 1000000000}', "num_labels: expected at most 1,000,000"),
        ('{"model_type": "swin", "depths": [2, 20000]}', "depths: expected at most 10,000, found 20,000"),
        ('{"model_type": "llama", "architectures": 5}', 'could not be built on "meta"'),
        (" " * (16 * 1024**2 + 1), "expected at most 16,777,216 bytes"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_folder(
    config: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with soon():
        assert main([str(tmp_path), "--world-size", "2", "--batch-size", "2", "--seq-len", "16"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert sentence in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "expected --world-size and --batch-size, or --search"),
        ("--search 2 --world-size 2", "expected --world-size or --search, found both"),
        ("--world-size 2 --batch-size 2 --tokens-per-s 9", "expected --tokens-per-s with --search alone"),
        ("--world-size 2 --batch-size 2 --samples-per-s 9", "expected --samples-per-s with --search alone"),
    ],
)
def test_the_command_refuses_options_that_do_not_go_together(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *arguments.split()])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err

"""The command lines: one list of all, versions, help and JSON, and what is said of a missing package."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdp_utils
from fsdp_utils import bf16
from fsdp_utils.__main__ import main
from fsdp_utils._commands import COMMANDS, VERSION, run
from fsdp_utils.checkpoint.__main__ import main as checkpoint
from fsdp_utils.migration.__main__ import main as migration
from fsdp_utils.planner import simulated_rank
from fsdp_utils.planner.__main__ import CHOICES
from fsdp_utils.planner.__main__ import main as planner

ROOT = Path(__file__).resolve().parent.parent
ZERO = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
MAINS: dict[str, Any] = {
    "bf16": bf16.main,
    "checkpoint": checkpoint,
    "planner": planner,
    "translate": migration,
}


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


# ---- all of them


def test_every_command_line_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == COMMANDS.keys()
    rooms = {f"fsdp_utils.{path.parent.name}" for path in (ROOT / "fsdp_utils").glob("*/__main__.py")}
    assert rooms | {"fsdp_utils.bf16"} == {module for module, _ in COMMANDS.values()}
    for name, (_, text) in COMMANDS.items():
        assert f"{name:12}{text}" in listed


def test_a_command_runs_by_both_of_its_names(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO))
    by_list, by_module = python("fsdp_utils", "translate", file), python("fsdp_utils.migration", file)
    assert (by_list.returncode, by_list.stderr) == (0, "")
    assert by_list.stdout == by_module.stdout
    assert python("fsdp_utils", "translate", tmp_path / "none.json").returncode == 2
    early = python("fsdp_utils", "--json", "translate", file)
    assert early.returncode == 2
    assert "--json lists the commands; for translate it stands behind the command" in early.stderr
    unknown = python("fsdp_utils", "deploy")
    assert unknown.returncode == 2
    assert "argument COMMAND: invalid choice: 'deploy'" in unknown.stderr


@pytest.mark.parametrize("name", ["", *MAINS])
def test_each_has_a_version_and_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = MAINS.get(name, main)
    with pytest.raises(SystemExit) as ended:
        command(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == VERSION == f"fsdp_utils {fsdp_utils.__version__}"
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in (line for line in shown.splitlines() if line.startswith("  --")):
        assert len(option.split()) > 1, f"{name}: {option} is not explained"


def test_the_training_program_has_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp_utils.train.config import parse

    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == VERSION


def test_a_missing_package_is_one_sentence_that_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run(lambda: migration([str(tmp_path / "a.yaml")])) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs yaml, which is not installed. Install it: pip install 'fsdp_utils[notebooks]'" in said

    for name, package, extra in (("train", "jsonargparse", "train"), ("planner", "transformers", "train")):
        code = (
            f"import runpy, sys; sys.modules[{package!r}] = None; "
            f"sys.argv = ['x', {name!r}, *sys.argv[1:]]; runpy.run_module('fsdp_utils', run_name='__main__')"
        )
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        arguments = {
            "train": ["--out", tmp_path],
            "planner": [tmp_path, "--world-size", "2", "--batch-size", "2"],
        }
        command = [sys.executable, "-c", code, *map(str, arguments[name])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert (
            f"needs {package}, which is not installed. Install it: pip install 'fsdp_utils[{extra}]'"
            in done.stderr
        )

    def broken() -> int:
        raise ModuleNotFoundError("No module named 'torch'")

    with pytest.raises(ModuleNotFoundError):
        run(broken)


# ---- translate


def test_translate_prints_table_and_code_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO))
    assert migration([str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("DeepSpeed to FSDP2\n")
    assert "! bf16.enabled" in shown
    assert migration([str(file), "--code"]) == 0
    code = capsys.readouterr().out
    assert shown.endswith(f"\n\n{code}")
    compile(code, "code", "exec")
    given = ["--given", "bf16.enabled=true", "--given", "train_batch_size=64"]
    assert migration([str(file), "--json", "--framework", "deepspeed", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["param_dtype"], found["without_counterpart"]) == ("bfloat16", [])
    assert {row["key"]: row["value"] for row in found["rows"]}["train_batch_size"] == 64
    assert "MixedPrecisionPolicy" in found["code"]


def test_translate_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 4}}')
    for arguments in (["a.json"], ["none.json"], ["a.toml"], ["a.json", "--given", "x=1"]):
        assert migration([str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
    with pytest.raises(SystemExit):
        migration([str(tmp_path / "a.json"), "--given", "x"])
    assert "expected KEY=VALUE, found 'x'" in capsys.readouterr().err


# ---- planner


def test_the_help_of_the_planner_explains_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "--strategy": simulated_rank.STRATEGIES,
        "--api": simulated_rank.APIS,
        "--precision": simulated_rank.PRECISIONS,
        "--checkpointing": simulated_rank.CHECKPOINTING,
        "--optimizer": simulated_rank.OPTIMIZERS,
        "--attention": simulated_rank.ATTENTION,
        "--loss": simulated_rank.LOSSES,
        "--held-output": simulated_rank.HELD_OUTPUTS,
    }
    assert {flag: set(choices) for flag, choices in CHOICES.items()} == {
        flag: set(choices) for flag, choices in asked.items()
    }


# ---- bf16


def test_bf16_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = bf16.main(["--device", "cpu", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"] is (code == 0)
    assert {"compute", "network", "reasons", "device"} < answer.keys()

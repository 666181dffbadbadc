"""The command lines: one list of all, versions, help and JSON, and what is said of a missing package."""

import faulthandler
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_utils

ROOT = Path(__file__).resolve().parent.parent
ZERO = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
VERSION = f"fsdp_utils {fsdp_utils.__version__}"
COMMANDS = ("bf16", "checkpoint", "doctor", "explain", "planner", "train", "translate")
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`python -m fsdp_utils ARGUMENTS` in this process: its exit code, stdout and stderr."""

    def run(*arguments: str | Path, module: str = "fsdp_utils") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        faulthandler.cancel_dump_traceback_later()  # this process goes on after a failed training
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return run


def test_every_command_line_is_listed(command: Callable[..., Any]) -> None:
    code, listed, _ = command()
    assert code == 0
    commands = json.loads(command("--json")[1])
    assert tuple(commands) == COMMANDS
    rooms = {f"fsdp_utils.{path.parent.name}" for path in (ROOT / "fsdp_utils").glob("*/__main__.py")}
    assert rooms | {"fsdp_utils.bf16"} == {each["module"] for each in commands.values()}
    for name, each in commands.items():
        assert f"{name:12}{each['help']}" in listed


def test_a_command_runs_by_both_of_its_names(tmp_path: Path, command: Callable[..., Any]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO))
    by_list = command("translate", file)
    assert by_list == command(file, module="fsdp_utils.migration")
    assert (by_list[0], by_list[2]) == (0, "")
    code, _, said = command("--json", "translate", file)
    assert code == 2
    assert "--json lists the commands; for translate it stands behind the command" in said
    assert "argument COMMAND: invalid choice: 'deploy'" in command("deploy")[2]


@pytest.mark.parametrize("names", [[], *([name] for name in COMMANDS)])
def test_each_has_a_version_and_explains_its_options(names: list[str], command: Callable[..., Any]) -> None:
    assert command(*names, "--version")[:2] == (0, f"{VERSION}\n")
    for subcommand in ([], ["list", "run"]) if names == ["checkpoint"] else ([],):
        assert command(*names, *subcommand, "--hel")[0] == 2  # no option can be abbreviated
    code, shown, _ = command(*names, "--help")
    assert code == 0
    for option in (line for line in shown.splitlines() if line.startswith("  --")):
        assert len(option.split()) > 1, f"{names}: {option} is not explained"


def test_translate_prints_table_and_code_or_refuses_in_one_line(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO))
    code, shown, _ = command("translate", file)
    program = command("translate", file, "--code")[1]
    assert code == 0
    assert shown.startswith("DeepSpeed to FSDP2\n")
    assert "! bf16.enabled" in shown
    assert shown.endswith(f"\n\n{program}")
    compile(program, "code", "exec")
    shown = command("translate", file, "--given", "bf16.enabled=true", "--given", "train_batch_size=64")[1]
    assert "= 64" in shown
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16" in shown
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 4}}')
    for arguments in (["a.json"], ["none.json"], ["a.toml"], ["a.json", "--given", "x=1"]):
        code, shown, said = command("translate", tmp_path / arguments[0], *arguments[1:])
        assert (code, shown, said.count("\n")) == (2, "", 1)
    assert "expected KEY=VALUE, found 'x'" in command("translate", file, "--given", "x")[2]


def test_bf16_prints_json(command: Callable[..., Any]) -> None:
    code, shown, _ = command("bf16", "--device", "cpu", "--json")
    answer = json.loads(shown)
    assert answer["ready"] is (code == 0)
    assert {"compute", "network", "reasons", "device"} < answer.keys()

"""The doctor: each fault of doctor_scripts is found by its name, and nothing where there is no fault."""

import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_utils import plan, run_on_ranks
from fsdp_utils.doctor import findings_table, page
from tests.doctor_ranks import SCRIPTS, examine

FAULT = re.compile(r" *# fault (\w+): (.*)")
RIGHT = sorted(file.stem for file in SCRIPTS.glob("*.py") if file.stem != "common")
TEXTS = {name: (SCRIPTS / f"{name}.py").read_text(encoding="utf-8") for name in RIGHT}
FAULTS = [(name, fault) for name in RIGHT for fault in dict(FAULT.findall(TEXTS[name]))]
# in which nothing else may be found
ALONE = {("fsdp2", "bf16_masters"), ("fsdp2_micro_batches", "optimizer_before_shard")}
STEPS = 2
AT_ONCE = 3


def script(name: str, fault: str, folder: Path) -> Path:
    """Write a script with a fault, "" for none, in place of the line of code after its comment."""
    lines, given = [], {}
    for line in TEXTS[name].splitlines():
        if found := FAULT.match(line):
            given[found[1]] = found[2]
        else:
            code = given.get(fault, line.lstrip())
            line, given = line[: len(line) - len(line.lstrip())] + code, {}
        lines.append(line)
    file = folder / f"{name}_{fault}" / f"{name}.py"
    file.parent.mkdir()
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


Runs = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """`result(name, fault)`: of a script. Those that are asked for are begun, a few at once."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("scripts")
    with ThreadPoolExecutor(AT_ONCE) as pool:

        @functools.cache
        def begun(name: str, fault: str) -> "Future[dict[str, Any]]":
            ranks, options = 4 if name == "fsdp1_hybrid" else 2, (f"--steps={STEPS}",)
            return pool.submit(examine, script(name, fault, folder), ranks=ranks, options=options)

        for params in [each for each in asked if "name" in each]:
            begun(params["name"], params.get("fault", ""))
        yield lambda name, fault: begun(name, fault).result()


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_is_found_by_its_name_and_no_other_error(name: str, fault: str, result: Runs) -> None:
    found = {one["id"]: one for one in result(name, fault)["findings"]}
    assert fault in found
    assert {one["id"] for one in found.values() if one["severity"] == "error"} <= {fault}
    assert all(one["evidence"] for one in found.values())
    assert re.match(rf"at (common|{name})\.py:\d+ `.+`$|in backward$", found[fault]["place"])
    if (name, fault) in ALONE:
        assert [*found] == [fault]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_where_there_is_no_fault(name: str, result: Runs) -> None:
    found = result(name, "")
    assert [(one["id"], one["evidence"]) for one in found["findings"]] == []
    for rank in found["ranks"]:
        assert (rank["ended"], len(rank["seen"]), rank["unseen"]) == ("stopped", STEPS, [])


def test_one_rank_is_not_asked_for_what_takes_two(tmp_path: Path) -> None:
    alone = examine(script("fsdp2", "same_samples", tmp_path), ranks=1, options=("--steps=2",))
    assert alone["findings"] == []


def test_each_finding_of_the_table_has_a_fault() -> None:
    assert {fault for _, fault in FAULTS} == {one["id"] for one in findings_table()}


MODEL = """
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.bias = nn.Linear(64, 256), nn.Linear(256, 64), nn.Parameter(torch.ones(64))
    def forward(self, x):
        return x + self.down(self.up(x).relu()) + self.bias.to(x.dtype)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(64, 10)
    def forward(self, x, *, scale):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale

def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model.blocks[i], mesh=mesh, mp_policy=policy, ignored_params={block.bias})
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
"""
TRAINING = """
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = shard(Model(), init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for _ in range(4):
    for _ in range(2):
        model(torch.randn(8, 64), scale=0.5).square().mean().backward()
    optimizer.step()
"""


def test_a_plan_for_other_gpus_has_the_model_as_the_script_shards_it(tmp_path: Path) -> None:
    """Blocks that are replaced while they are sharded, ignored parameters, named inputs, micro-batches."""
    train = tmp_path / "train.py"
    train.write_text(MODEL + TRAINING)
    options = ("--gpu=A100-80", "--world-size=16", "--fail-on=never")
    found = examine(train, options=options)["ranks"][0]["plan"]
    own: dict[str, Any] = {}
    exec(MODEL, own)
    planned = plan(
        own["Model"],
        world_size=16,
        batch_size=8 * 16 * 2,
        gpu="A100-80",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        micro_batches=2,
        optimizer=lambda some: torch.optim.AdamW(some, foreach=False),
        loss=lambda model, x: model(x, scale=0.5).float().mean(),
        inputs=lambda batch_size, _: torch.zeros(batch_size, 64),
        shard=own["shard"],
    )
    assert found.startswith(str(planned)), f"{found}\n{planned}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shard(Model(), init", "nn.parallel.DistributedDataParallel(Model()) #"),
        ("optimizer =", "teacher = shard(Model(), init_device_mesh('cpu', (2,)))\noptimizer ="),
    ],
)
def test_what_cannot_be_planned_is_said(old: str, new: str, tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(MODEL + TRAINING.replace(old, new))
    found = examine(train, options=("--gpu=H100", "--fail-on=never"))["ranks"][0]["plan"]
    assert found == "No plan: it takes one model, cut by fully_shard, and the forward of its second step"


def test_an_exception_of_one_rank_is_told_as_such(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    fails = "optimizer.step()\n    1 / torch.distributed.get_rank()"
    train.write_text(MODEL + TRAINING.replace("optimizer.step()", fails))
    found = examine(train)
    assert "ranks_part" not in [one["id"] for one in found["findings"]]
    assert "ZeroDivisionError" in found["ranks"][0]["ended"]


# Writes the losses of all ranks as bits.
LOSSES = """
import common
def say(step, loss):
    with open({to!r} + f".{{common.dist.get_rank()}}", "a") as file:
        print(step, loss.item().hex(), file=file)
common.say = say
"""


def test_the_training_is_not_changed(tmp_path: Path) -> None:
    """By losses of all ranks, under dropout, with activations that are measured and checkpointed."""
    scripts = {}
    for to in ("alone", "watched"):
        (tmp_path / f"of_{to}").mkdir()
        scripts[to] = script("long_sequences", "", tmp_path / f"of_{to}")
        text = LOSSES.format(to=str(tmp_path / to)) + scripts[to].read_text()
        scripts[to].write_text(text + "\ndist.destroy_process_group()\n")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, alone = str(store.port), str(scripts["alone"])

    def on_rank() -> None:
        torch.distributed.destroy_process_group()
        sys.path.append(str(SCRIPTS))
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update(agent, MASTER_PORT=port)
        runpy.run_path(alone, run_name="__main__")

    run_on_ranks(on_rank, world_size=2)
    examine(scripts["watched"], options=("--steps=3",))
    for rank in range(2):
        watched = (tmp_path / f"watched.{rank}").read_text().splitlines()
        assert len(watched) == 3
        assert watched == (tmp_path / f"alone.{rank}").read_text().splitlines()[:3]


def test_the_page_says_what_is_trained_and_held(result: Runs) -> None:
    """Under DDP a rank holds all; with float32 copies, no optimizer has the model's own parameters."""
    copies = page(result("ddp_masters", ""))
    assert "\nRequire gradients: 627,840 of 627,840 parameters\nNot in AdamW: 40 of their tensors" in copies
    held = "3.59 MiB of parameters + 2.4 MiB of gradients + 4.79 MiB of optimizer states = 10.8 MiB"
    assert f"\nRank 0 holds {held}\n" in copies
    adapters = page(result("adapters", ""))
    assert "\nTrained by SGD: 24,704 of 454,272 parameters\n" in adapters
    assert "\nNo finding.\nNot looked at: evaluation, what is saved, resuming, the learning-rate" in adapters


def test_the_script_of_lesson_15_has_the_finding_that_the_lesson_names(tmp_path: Path) -> None:
    (source,) = (SCRIPTS.parents[1] / "notebooks" / "src").glob("15_*.py")
    (code,) = re.findall(r"# ```python\n(?=# from contextlib)(.*?)# ```", source.read_text(), re.S)
    (tmp_path / "train.py").write_text(re.sub("(?m)^# ?", "", code))
    shown = page(examine(tmp_path / "train.py", options=("--steps=5",)))
    assert re.search(r"\nerror: ranks_part\..*?collective 39\b", shown, re.S)


def test_the_command_prints_a_page_and_its_exit_code_counts(tmp_path: Path) -> None:
    faulty, file = script("fsdp2", "same_samples", tmp_path), tmp_path / "report.html"
    command = [sys.executable, "-m", "fsdp_utils", "doctor", "--steps=2", f"--html={file}", str(faulty)]
    env = {**os.environ, "PYTHONPATH": f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 1, done.stderr
    assert "2 ranks, 2 optimizer steps: rank 0 stopped; rank 1 stopped" in done.stdout
    assert "\nerror: same_samples. Ranks train on the same samples\n" in done.stdout
    assert "step 0: loss" in done.stderr
    html = file.read_text(encoding="utf-8")
    words = {*re.findall(r"[\w.]+", done.stdout)}
    assert words <= {*re.findall(r"[\w.]+", unescape(html))}  # the same content
    assert 'name="color-scheme" content="light dark"' in html
    assert not re.search(r"<script|<link|src=|https?:", html)  # self-contained


def test_an_exception_is_explained_with_the_line_of_each_rank(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("raise ValueError('Cannot flatten integer dtype tensors')\n")
    result = examine(train)
    shown = page(result)
    assert "Message: Cannot flatten integer dtype tensors" in shown
    for rank in range(2):
        assert f"rank {rank} stood at train.py:1 `raise ValueError" in shown


def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("import time\n\ntime.sleep(1000)\n")
    result = examine(train, options=("--timeout=2",))
    assert [one["ended"] for one in result["ranks"]] == ["hang", "hang"]
    assert result["ranks"][1]["places"]["stood"] == "at train.py:3 `time.sleep(1000)`"

"""The doctor: each fault of doctor_scripts is found by its name, and nothing in the right twins."""

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
from tests.doctor_ranks import examine

SCRIPTS = Path(__file__).with_name("doctor_scripts")
FOUR = {"few_rows_experts", "hybrid_not_synced"}  # scripts for four ranks
NAMES = [file.stem for file in sorted(SCRIPTS.glob("*.py")) if not file.stem.startswith(("common", "__"))]
OTHERS = {"forward_skips_root": "forward_of_part"}  # a script with another name than its finding
ALONE = {"bf16_masters", "optimizer_before_shard_warm_up"}  # in which nothing else may be found
STEPS = 2
AT_ONCE = 3
TABLE = findings_table()


def finding_of(name: str) -> str:
    return OTHERS.get(name) or next(one["id"] for one in TABLE if name.startswith(one["id"]))


Runs = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """`result(name, mode)`: of a script in a mode. Those that are asked for are begun, a few at once."""
    asked = {item.name for item in request.session.items}
    modes = {
        "fault": test_a_fault_is_found_by_its_name_and_no_other_error,
        "right": test_nothing_is_found_in_the_right_twin,
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:

        @functools.cache
        def begun(name: str, mode: str) -> "Future[dict[str, Any]]":
            ranks, options = 4 if name in FOUR else 2, (f"--steps={STEPS}",)
            return pool.submit(examine, SCRIPTS / f"{name}.py", mode, ranks=ranks, options=options)

        for name in NAMES:
            for mode, test in modes.items():
                if f"{test.__name__}[{name}]" in asked:
                    begun(name, mode)
        yield lambda name, mode: begun(name, mode).result()


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_by_its_name_and_no_other_error(name: str, result: Runs) -> None:
    found = result(name, "fault")["findings"]
    assert finding_of(name) in {one["id"] for one in found}
    assert {one["id"] for one in found if one["severity"] == "error"} <= {finding_of(name)}
    assert all(one["evidence"] for one in found)
    if name in ALONE:
        assert [one["id"] for one in found] == [finding_of(name)]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_the_right_twin(name: str, result: Runs) -> None:
    found = result(name, "right")
    assert [(one["id"], one["evidence"]) for one in found["findings"]] == []
    for rank in found["ranks"]:
        assert (rank["ended"], len(rank["seen"])) == ("stopped", STEPS)
        assert rank["unseen"] == []


def test_one_rank_is_not_asked_for_what_takes_two() -> None:
    script = SCRIPTS / "same_samples_seed.py"
    assert examine(script, "fault", ranks=1, options=("--steps=2",))["findings"] == []


def test_each_finding_of_the_table_has_a_script() -> None:
    assert {finding_of(name) for name in NAMES} == {one["id"] for one in TABLE}


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
    script = tmp_path / "train.py"
    script.write_text(MODEL + TRAINING)
    options = ("--gpu=A100-80", "--world-size=16", "--fail-on=never")
    found = examine(script, options=options)["ranks"][0]["plan"]
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


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        MODEL + TRAINING.replace("shard(Model(), init", "nn.parallel.DistributedDataParallel(Model()) #")
    )
    found = examine(script, options=("--gpu=H100", "--fail-on=never"))["ranks"][0]["plan"]
    assert found == "No plan: it takes a model cut by fully_shard, and the forward pass of its second step"


# A script that runs one of doctor_scripts, and writes the losses of all ranks as bits.
LOSSES = """
import runpy, sys
sys.path.insert(0, {folder!r})
import common
def say(step, loss, *_):
    with open({to!r} + f".{{common.dist.get_rank()}}", "a") as file:
        print(step, loss.item().hex(), file=file)
common.say = say
sys.argv[1:] = ["right"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["dropout_rng", "big_activation"])
def test_the_training_is_not_changed(name: str, tmp_path: Path) -> None:
    """By losses of all ranks, under dropout, and where the activations of a block are measured."""
    scripts = {}
    for to in ("alone", "watched"):
        scripts[to] = tmp_path / f"{to}.py"
        paths = {"folder": str(SCRIPTS), "script": str(SCRIPTS / f"{name}.py"), "to": str(tmp_path / to)}
        scripts[to].write_text(LOSSES.format(**paths))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, script = str(store.port), str(scripts["alone"])

    def on_rank() -> None:
        torch.distributed.destroy_process_group()
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update(agent, MASTER_PORT=port)
        runpy.run_path(script, run_name="__main__")

    run_on_ranks(on_rank, world_size=2)
    examine(scripts["watched"], options=("--steps=4",))
    for rank in range(2):
        watched = (tmp_path / f"watched.{rank}").read_text().splitlines()
        assert len(watched) == 4
        assert watched == (tmp_path / f"alone.{rank}").read_text().splitlines()[:4]


def test_the_page_says_what_is_trained_and_held(result: Runs) -> None:
    """Under DDP a rank holds all; with float32 copies, no optimizer has the model's own parameters."""
    copies = page(result("bf16_reduce_ddp", "right"))
    assert "\nRequire gradients: 627,840 of 627,840 parameters\nNot in AdamW: 40 of their tensors" in copies
    assert "; but 40 others, perhaps float32 copies of them\n" in copies
    held = "3.59 MiB of parameters + 2.4 MiB of gradients + 4.79 MiB of optimizer states = 10.8 MiB"
    assert f"\nRank 0 holds {held}\n" in copies
    assert f": {627_840 * 16 / 2**20:.3g} MiB on rank 0\n" in copies
    adapters = page(result("frozen_adapters", "right"))
    assert "\nTrained by SGD: 28,800 of 656,640 parameters\nRank 0" in adapters
    assert (
        "\nNo finding.\nNot looked at: evaluation, what is saved, resuming, the learning-rate schedule, "
        in adapters
    )
    by_rule = (28_800 * 16 + (656_640 - 28_800) * 4) / 2**20
    assert f": {by_rule:.3g} MiB on rank 0\n" in adapters


def test_the_script_of_lesson_15_has_the_finding_that_the_lesson_names(tmp_path: Path) -> None:
    (source,) = (SCRIPTS.parent.parent / "notebooks" / "src").glob("15_*.py")
    (code,) = re.findall(r"# ```python\n(?=# from contextlib)(.*?)# ```", source.read_text(), re.S)
    (tmp_path / "train.py").write_text(re.sub("(?m)^# ?", "", code))
    shown = page(examine(tmp_path / "train.py", options=("--steps=5",)))
    assert re.search(r"\nerror: ranks_part\..*?collective 39\b", shown, re.S)


def test_the_command_prints_a_page_and_its_exit_code_counts(tmp_path: Path) -> None:
    script, file = str(SCRIPTS / "same_samples_seed.py"), tmp_path / "report.html"
    command = [sys.executable, "-m", "fsdp_utils", "doctor", "--steps=2", f"--html={file}", script]
    done = subprocess.run([*command, "fault"], capture_output=True, text=True, timeout=100)
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
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('Cannot flatten integer dtype tensors')\n")
    result = examine(script)
    shown = page(result)
    assert "Message: Cannot flatten integer dtype tensors" in shown
    for rank in range(2):
        assert f"rank {rank} stood at train.py:1 `raise ValueError" in shown


def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\ntime.sleep(1000)\n")
    result = examine(script, options=("--timeout=2",))
    assert [one["ended"] for one in result["ranks"]] == ["hang", "hang"]
    assert result["ranks"][1]["places"]["stood"] == "at train.py:3 `time.sleep(1000)`"

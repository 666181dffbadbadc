"""The reference shows an example of every public name, and every example runs.

The rule: each public function, exception and class has an example in its docstring. A class needs none where
an example on the same page holds an instance of it, as that of `plan` holds a `Plan`.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import linecache
import os
import re
import textwrap
import traceback
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import fsdp_utils
from tests.notebook_kernel import Notebook
from tests.sharded import Block, fsdp1

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp_utils"
# one process runs these, without a process group; two ranks run all others
ALONE = {
    *["CheckpointError", "GPU", "Efficiency", "PerRank", "TranslationError", "export_safetensors", "plan"],
    *["record_allocations", "run_on_ranks", "simulate_allocator", "translate", "verify_checkpoint"],
    *["transformers.MemoryCallback", "transformers.CheckpointCallback"],  # which take seconds to import
}
# an example that continues another one, with its variables and its files
GOES_ON = {
    **dict.fromkeys(["CheckpointDamagedError", "CheckpointError", "LoadedState"], "save_distributed"),
    **dict.fromkeys(["checkpoints", "export_safetensors"], "save_distributed"),
    **dict.fromkeys(["load_distributed", "verify_checkpoint"], "save_distributed"),
    **dict.fromkeys(["Replay", "play"], "record_collectives"),
    "simulate_allocator": "record_allocations",
}


class Told(NamedTuple):
    """What came of an example."""

    problem: str  # "" where it ran and printed what its comments say
    classes: frozenset[type]  # of the values that its variables held


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # i64[batch, length] -> f32[batch, length, 16]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).relu()  # no view: torch warns of one


# ---- what the reference lists, and its examples ----------------------------------------------------------


@functools.cache
def listed() -> dict[str, tuple[str, Any]]:
    """By the name in the reference: its page, and the object."""
    found = {}
    for page in sorted((ROOT / "book" / "reference").glob("*.rst")):
        text = page.read_text()
        for name in re.findall(r"^\.\. (?:auto(?:class|exception|function)|py:data):: ([\w.]+)", text, re.M):
            module, _, last = name.rpartition(".")
            found[name] = page.stem, getattr(importlib.import_module(module), last)
        for module in re.findall(r"^\.\. automodule:: (\S+)\n +:members:", text, re.M):
            for last, thing in vars(importlib.import_module(module)).items():
                if getattr(thing, "__module__", "") == module and not last.startswith("_"):
                    found[f"{module}.{last}"] = page.stem, thing
    return found


def example_of(thing: Any) -> str:
    """The code of the example in a docstring, "" where there is none."""
    found = re.search(r"^Example::\n\n((?: {4}.*\n|\n)+)", inspect.cleandoc(thing.__doc__ or "") + "\n", re.M)
    return textwrap.dedent(found[1]).strip() if found else ""


@functools.cache
def public_names() -> dict[str, Any]:
    """By its full name, what fsdp_utils and its rooms make public; train's interface is its command line."""
    rooms = [path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "train"]
    modules = [fsdp_utils, *(importlib.import_module(f"fsdp_utils.{room}") for room in rooms)]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in getattr(module, "__all__", [])
    }


# `make test` installs it; elsewhere its example does not run
LIGHTNING = [f"fsdp_utils.integrations.lightning.{name}Callback" for name in ("Memory", "Checkpoint")]
MISSING = [] if find_spec("lightning") else LIGHTNING


@functools.cache
def examples() -> dict[str, str]:
    found = {name: example_of(thing) for name, (_, thing) in listed().items() if name not in MISSING}
    return {name: text for name, text in found.items() if text}


def difference(source: str, printed: str) -> str:
    """Says so where the code has printed something else than the comments after print() or below it say.

    "..." in a comment stands for any text.
    """
    said, below = [], False
    for line in source.splitlines():
        code, comment = (text.strip() for text in f"{line}  # ".split("# ")[:2])
        below = code.startswith("print(") or (below and not code)
        said += [comment] if below and comment else []
    pattern = ".*".join(map(re.escape, "\n".join(said).split("...")))
    lines = "\n".join(line.strip() for line in printed.splitlines())
    if not pattern or re.fullmatch(pattern, lines, re.DOTALL):
        return ""
    return f"{source}\nprinted {printed!r}, not what its comment says\n"


# ---- running them ----------------------------------------------------------------------------------------


def run(source: str, names: dict[str, Any], *, compare: bool = True) -> Told:
    """Run an example, one statement after the other, and compare what each prints with its comments."""
    lines, statements = source.splitlines(), ast.parse(source).body
    ends = [statement.lineno - 1 for statement in statements[1:]]
    problem = ""
    try:
        for statement, end in zip(statements, [*ends, len(lines)], strict=True):
            code = "\n".join(lines[statement.lineno - 1 : end])
            printed = StringIO()
            with contextlib.redirect_stdout(printed):
                if isinstance(statement, ast.Expr):
                    names["_"] = eval(code, names)
                else:
                    exec(compile(code, "example.py", "exec"), names)
            problem += difference(code, printed.getvalue()) if compare else ""
    except Exception:
        problem += traceback.format_exc()
    held = (value for name, value in names.items() if name != "__builtins__")
    return Told(
        problem, frozenset(type(value) for value in held if type(value).__module__.startswith("fsdp_"))
    )


def around(name: str) -> dict[str, Any]:
    """The variables that an example finds."""
    torch.manual_seed(0)
    model = Transformer()
    dataset: Any = torch.randint(16, (32, 6))
    if dist.is_initialized() and listed()[name][0] not in ("sharding", "pretrained"):
        fsdp_utils.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(fsdp_utils.get_rank())

    def train_step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    names = {
        **{public.rpartition(".")[2]: value for public, value in public_names().items()},
        listed()[name][1].__name__: listed()[name][1],
        "__name__": "__main__",
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "train_step": train_step,
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=4, sampler=fsdp_utils.sampler(dataset)),
        "batch": dataset[:4],
        "random_batch": lambda batch_size: torch.randint(16, (batch_size, 6)),
        "tokenize": lambda file: torch.zeros(len(file)),
        "loss": 2.5,
        "step": 7,
        "epoch": 3,
        **{"dataclasses": dataclasses, "dist": dist, "nn": nn, "torch": torch},
        **{thing.__name__: thing for thing in (DataLoader, MixedPrecisionPolicy, Path, Transformer)},
        "FullyShardedDataParallel": fsdp1,  # told the device, without which FSDP1 expects a GPU
    }
    more = MORE.get(name, MORE.get(name.rpartition(".")[2], ""))
    linecache.cache["train.py"] = (len(more), None, more.splitlines(keepends=True), "train.py")
    exec(compile(more, "train.py", "exec"), names)
    return names


TRAINER = """
from transformers import Trainer, TrainingArguments
from tests import trainers
trainers.forget()
model, rows = trainers.llama(), trainers.rows(8)
args = TrainingArguments(
    "own", use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to=[], disable_tqdm=True
)
"""
# what single examples find besides, by the last part of the name or all of it
MORE = {
    "fsdp_utils.integrations.transformers.MemoryCallback": TRAINER + "args.save_strategy = 'no'",
    "fsdp_utils.integrations.transformers.CheckpointCallback": TRAINER,
    **dict.fromkeys(
        LIGHTNING,
        """
from lightning.pytorch import Trainer
from tests.test_integrations_lightning import Blocks, loader, quiet_options
model, loader, options = Blocks(sharded=False), loader(), quiet_options()
""",
    ),
    **dict.fromkeys(
        ["GPU", "Efficiency"],
        "from fsdp_utils.planner import GPUS, Efficiency; import transformers\n"
        "config = transformers.LlamaConfig()",
    ),
    "plan": "from transformers import LlamaConfig",
    "translate": 'Path("ds_config.json").write_text(\'{"zero_optimization": {"stage": 3}}\')',
    "load_pretrained": """
from safetensors.torch import save_file
if get_rank() == 0:
    Path("exported").mkdir()
    save_file(model.state_dict(), "exported/model.safetensors")
dist.barrier()
""",
    "OutOfStep": """
def train_step(batch):
    x, op = torch.ones(8), dist.ReduceOp.MAX if get_rank() else dist.ReduceOp.SUM
    dist.all_reduce(x, op)
""",
}


def run_all(names: list[str], folder: Path) -> dict[str, Told]:
    """Run examples in this process, each in a directory of its own, which the ranks share."""
    told, here = {}, Path.cwd()
    for name in names:
        last = name.rpartition(".")[2]
        place = folder / name.removeprefix("fsdp_utils.")
        place.mkdir(exist_ok=True)
        os.chdir(place)
        variables = around(name)
        if last in GOES_ON:
            (before,) = (name for name in examples() if name.endswith(f".{GOES_ON[last]}"))
            run(examples()[before], variables)
        if last in ("CheckpointDamagedError", "CheckpointError"):
            for file in Path("run").rglob("rank-*.safetensors"):
                os.truncate(file, 100)
        told[name] = run(examples()[name], variables, compare=fsdp_utils.get_rank() == 0)
    os.chdir(here)
    return told


IN_CELLS = {  # by the notebook's function: the cell before its example
    "start": "from fsdp_utils.notebook import ranks",
    "get": "%%ranks\nimport os, torch\nloss = torch.tensor(float(os.environ['RANK']))",
    "run": "%%ranks\nrank = int(os.environ['RANK'])",
    "stop": "",
}


def run_in_notebook() -> dict[str, Told]:
    """Run the examples of `ranks` as cells of one notebook."""
    notebook, told = Notebook(), {}
    try:
        for last, before in IN_CELLS.items():
            name = f"fsdp_utils.notebook.ranks.{last}"
            problem = notebook.run(before).error
            reply = notebook.run(examples()[name])
            problem += reply.error + difference(examples()[name], reply.text)
            told[name] = Told(problem, frozenset())
    finally:
        notebook.close()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What came of each example, by name."""
    folder = tmp_path_factory.mktemp("examples")
    found = run_in_notebook()
    by_process: dict[bool, list[str]] = {True: [], False: []}
    for name in examples().keys() - found.keys():
        by_process[name.endswith(tuple(f".{last}" for last in ALONE))].append(name)
    first, second = fsdp_utils.run_on_ranks(run_all, sorted(by_process[False]), folder, timeout=100)
    for name, on_first in first.items():
        found[name] = Told(on_first.problem or second[name].problem, on_first.classes)
    # what two ranks have saved is loaded by one process
    (folder / "checkpoint.PerRank").symlink_to(folder / "save_distributed", target_is_directory=True)
    return found | run_all(sorted(by_process[True]), folder)


# ---- the tests -------------------------------------------------------------------------------------------


def test_the_reference_lists_every_public_name() -> None:
    assert len(public_names()) > 27
    things = [thing for _, thing in listed().values()]
    assert [name for name, thing in public_names().items() if not any(thing is one for one in things)] == []


def test_every_public_name_has_an_example(told: dict[str, Told]) -> None:
    without = [
        name
        for name, (page, thing) in listed().items()
        if not example_of(thing)
        and callable(thing)
        and not any(thing in one.classes for other, one in told.items() if listed()[other][0] == page)
    ]
    assert without == []


def test_every_example_runs_and_prints_what_it_says(told: dict[str, Told]) -> None:
    assert told.keys() == examples().keys()
    assert [one.problem for one in told.values() if one.problem] == []


def test_a_wrong_example_is_found() -> None:
    assert run("x = 1\nprint(x)  # 1", {}).problem == ""
    assert "printed '1\\n'" in run("x = 1\nprint(x)  # 2", {}).problem
    assert "NameError" in run("train()", {}).problem

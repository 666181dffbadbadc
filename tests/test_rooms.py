"""The rooms of fsdp_utils: imports go down only, each room says what it is for, no public name is lost."""

import ast
import subprocess
import sys

import pytest

import fsdp_utils
from tools.draw_imports import BEGIN, PACKAGE, PAGE, drawing, imports, modules, reachable, room, room_imports

# A room imports only rooms of a lower level.
LEVEL = {
    "torch_internals": 0,
    "distributed": 1,
    "sharding": 2,
    **dict.fromkeys(
        ["memory", "allocator", "checkpoint", "collectives", "child_tuning", "precision", "migration"], 3
    ),
    **dict.fromkeys(["pretrained", "planner"], 4),
    **dict.fromkeys(["train", "integrations"], 5),
    "notebook": 6,
    "lessons": 7,
}
# What people import: a name may be added, none may go.
PUBLIC = [
    "BatchSizeSearch",
    "Bf16Support",
    "CheckpointError",
    "ChildTuningAdamW",
    "MemoryReport",
    "Memory_Maximizer",
    "OutOfStep",
    "PerRank",
    "Plan",
    "bf16_support",
    "check_in_step",
    "check_sharding",
    "export_safetensors",
    "find_batch_size",
    "fisher_mask",
    "get_local_rank",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "load_distributed",
    "load_full",
    "load_pretrained",
    "plan",
    "rank0_first",
    "record_allocations",
    "record_collectives",
    "run_on_ranks",
    "sampler",
    "save_distributed",
    "save_full",
    "search",
    "shard",
    "simulate_allocator",
    "transformer_block_classes",
    "translate",
    "verify_checkpoint",
    "wrap_policy",
]
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def test_a_room_imports_only_rooms_below_it() -> None:
    upwards = []
    names = modules()
    for name, file in names.items():
        if room(name) not in LEVEL or file.stem == "__main__":
            continue
        for other in imports(file, names):
            here, there = room(name), room(other)
            if there != here and LEVEL.get(there, -1) >= LEVEL[here]:
                upwards.append(f"{name} imports {other}")
    assert upwards == []


def test_every_room_has_a_level_and_there_is_no_circle() -> None:
    assert set(ROOMS) <= set(LEVEL)
    graph = room_imports()
    assert [name for name in graph if name in reachable(graph, name)] == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_in_five_lines_what_it_is_for(name: str) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert said is not None
    assert 1 <= len(said.splitlines()) <= 6


def test_no_public_name_is_lost() -> None:
    assert set(PUBLIC) <= set(fsdp_utils.__all__)
    assert [name for name in fsdp_utils.__all__ if getattr(fsdp_utils, name) is None] == []


def test_importing_the_library_imports_no_torch() -> None:
    code = "import sys, fsdp_utils; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_contributing_shows_the_imports_as_they_are() -> None:
    assert drawing() == PAGE.read_text().partition(BEGIN)[2].partition("<!--")[0]

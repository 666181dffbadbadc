"""Runs the cells of answers_provoked.py, and the cures of their messages, on the ranks that there are."""

import contextlib
import datetime
import functools
import io
import logging
import os
import re
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PROGRAMS = Path(__file__).with_name("answers_provoked.py")
TEXT = PROGRAMS.read_text(encoding="utf-8")


class Cell(NamedTuple):
    code: str
    script: str  # what its file is called: some messages mean this only where the text also names FSDP
    seconds: float  # time limit of its process group
    fresh: bool  # run the cure in another group, as this one is spoilt


CELLS = {
    name: Cell(code, script or "train.py", float(seconds or 30), bool(fresh))
    for name, script, seconds, fresh, code in re.findall(
        r"^# %% (\S+)(?: script=(\S+))?(?: seconds=([\d.]+))?( fresh)?\n(.*?)(?=^# %% |\Z)",
        TEXT,
        re.MULTILINE | re.DOTALL,
    )
}


@functools.cache
def shared_names() -> dict[str, Any]:
    """What all cells, and all cures, find: what stands before the first cell."""
    names: dict[str, Any] = {"__name__": "answers"}
    exec(compile(TEXT.split("\n# %% ", 1)[0], PROGRAMS, "exec"), names)
    return names


def message_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return what the cell raises, warns and logs, as a script, and its variables by then."""
    script = Path(tempfile.mkdtemp(), CELLS[name].script)
    script.write_text(CELLS[name].code, encoding="utf-8")
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    names = dict(shared_names())
    names["model"] = names["blocks"]()
    every = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    loggers = [logging.root, *(logger for logger in every if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    raised = ""
    # FSDP1 also prints the stack
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            exec(compile(CELLS[name].code, script, "exec"), names)
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            raised = "".join(traceback.format_exception(error))
    for logger in loggers:
        logger.removeHandler(handler)
    text = log.getvalue() + "".join(f"{one.category.__name__}: {one.message}\n" for one in warned) + raised
    assert text, "nothing was raised, warned or logged"
    return text, names


def run_one(name: str, cure: str, folder: str) -> tuple[str, str]:
    """Raise a message on this rank and run its cure; return the message, and what went wrong, mostly ""."""
    cell, rank, size = CELLS[name], dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(f"{folder}/{name}", size)

    def together(label: str, value: str = "") -> list[str]:
        store.set(f"{label}{rank}", value)
        return [store.get(f"{label}{one}").decode() for one in range(size)]

    def group(label: str, limit: float) -> None:
        together(f"before {label}")  # the other rank has left what it did before
        if not dist.is_initialized():  # only with a group can torch forget how many a rank has made
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(label, store),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=limit),
        )
        together(f"in {label}")

    torch.manual_seed(0)
    text, wrong, names = "", "", {}
    group("message", cell.seconds)
    try:
        text, names = message_of(name)
    except Exception:
        wrong = traceback.format_exc()
    if any(together("raised", wrong)):
        return text, wrong or "the other rank failed"
    if cell.fresh:
        group("cure", 30)
    try:
        exec(compile(cure, f"cure of {name}", "exec"), names)
    except Exception:
        wrong = traceback.format_exc()
    return text, wrong


def run_all(wanted: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Run each (id, code of the cure) on this rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    found = {}
    for name, cure in wanted:
        with mock.patch.dict(os.environ):
            found[name] = run_one(name, cure, folder[0])
    return found

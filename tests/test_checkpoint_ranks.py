"""Whatever goes wrong in a save or a load: the same words on every rank, soon, and the next save is well."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import export_safetensors, load_distributed, save_distributed, verify_checkpoint
from fsdp_utils.checkpoint import CheckpointError, CheckpointNotFoundError, Save, checkpoints
from tests.checkpoints import Data, Outcome, build, fingerprint, outcome, played, rank, train
from tests.sharded import TwoRanks

WAIT_S = 0.5


def told(outcomes: list[Outcome], pattern: str) -> None:
    """The same error on every rank, soon, with that text."""
    assert outcomes[0].error is not None
    assert all(one.error == outcomes[0].error for one in outcomes), outcomes
    assert re.search(pattern, outcomes[0].error), outcomes[0].error
    assert max(one.seconds for one in outcomes) < 10


def only(folder: Path, *steps: int) -> None:
    """These checkpoints are there, whole, and nothing else."""
    assert list(checkpoints(folder)) == list(steps)
    assert len(list(folder.iterdir())) == len(steps), f"something was left behind: {list(folder.iterdir())}"
    if steps:
        verify_checkpoint(folder)


Happened = tuple[Path, dict[str, list[Any]]]  # a folder, and what each scene returned by rank

# ---- ranks that want something else ------------------------------------------------------------------------


def differs(*by_rank: dict[str, Any]) -> Callable[[Path, Any, int], object]:
    return lambda f, m, r: save_distributed(f, m[0], **{"step": 2, **by_rank[r]})


Calls = dict[str, tuple[Callable[[Path, Any, int], object], str]]  # of folder, (model, optimizer), rank
CALLS: Calls = {
    "step": (differs({}, {"step": 3}), "same step on all ranks.* rank 0: 2; rank 1: 3"),
    "keep": (differs({"keep": 0}, {"keep": 1}), "rank 0: expected keep to be a whole number .*, found 0"),
    "asynchronous": (differs({"asynchronous": True}, {}), "same asynchronous .* rank 0: true; rank 1: false"),
    "names": (differs({"state": {"of_0": 1}}, {"state": {"of_1": 1}}), "names in state.*of_0.*of_1"),
    "state": (
        differs({"state": {"x": 1}}, {"state": {"x": [1, object()]}}),
        r"rank 1: state\.x\.1: expected full tensors.*found a .*object",
    ),
    "directory": (
        lambda f, m, r: save_distributed(f / f"d{r}", m[0], step=2),
        "^save_distributed: expected the same directory on all ranks, found rank 0: ",
    ),
    "optimizer": (
        lambda f, m, r: save_distributed(f, *(m if r else m[:1]), step=2),
        'same optimizer on all ranks, found rank 0: null; rank 1: "AdamW"',
    ),
    "model": (
        lambda f, m, r: save_distributed(f, build("none", width=5)[0] if r else m[0], step=2),
        "same model on all ranks, found rank 0: ",
    ),
    "loaded step": (
        lambda f, m, r: load_distributed(f, m[0], step=1 if r else "latest"),
        '^load_distributed: expected the same step on all ranks, found rank 0: "latest"; rank 1: 1',
    ),
    "call": (
        lambda f, m, r: load_distributed(f, m[0]) if r else save_distributed(f, m[0], step=2),
        'same call on all ranks, found rank 0: "save_distributed"; rank 1: "load_distributed"',
    ),
    "an optimizer made before wrapping": (
        lambda f, m, r: save_distributed(f, m[0], torch.optim.SGD(build("none")[0].parameters()), step=2),
        "Make the optimizer after the model is wrapped",
    ),
}


def disagree(folder: Path) -> dict[str, Outcome]:
    folder = folder / "disagree"
    held = build("fsdp2")
    before = fingerprint(*held)
    save_distributed(folder, *held, step=1)  # before the first step it takes none
    found = {name: outcome(lambda call=call: call(folder, held, rank())) for name, (call, _) in CALLS.items()}
    assert fingerprint(*held) == before
    save_distributed(folder, *held, step=9)  # they have found together again
    return found


def test_ranks_that_disagree_are_told_about_what(happened: Happened) -> None:
    folder, found = happened
    for about, (_, words) in CALLS.items():
        told([outcomes[about] for outcomes in found["disagree"]], words)
    only(folder / "disagree", 1, 9)


# ---- ranks that do not come --------------------------------------------------------------------------------


def save_if_best(folder: Path) -> list[Outcome]:
    """The loss of each rank's own batch decides on that rank whether to save; at step 3 rank 1 comes late."""
    folder = folder / "save_if_best"
    model, _ = build("fsdp2")
    best, found = float("inf"), []
    for step, losses in enumerate([(3.0, 3.0), (2.0, 3.5), (2.5, 2.5), (1.0, 1.0), (0.5, 0.5)]):
        if losses[rank()] < best:
            best = losses[rank()]
            if (step, rank()) == (3, 1):
                dist.barrier()  # rank 0 has given up by then
            wait_s = 30.0 if step in (0, 4) else WAIT_S
            found.append(outcome(partial(save_distributed, folder, model, step=step, wait_s=wait_s)))
            if (step, rank()) == (3, 0):
                dist.barrier()
        dist.barrier()
    return found


def test_a_rank_that_does_not_come_or_comes_late_is_named_and_the_next_save_is_well(
    happened: Happened,
) -> None:
    folder, found = happened
    for me, (both, alone, late, again) in enumerate(found["save_if_best"]):
        assert both.error is again.error is None
        for one in (alone, late):
            told([one], f"^save_distributed: .* found only rank {me} after 0.5 s; missing: rank {1 - me}")
    only(folder / "save_if_best", 0, 4)


# ---- a failure on one rank ---------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(5, "Input/output error", "the disk")


FAILURES: list[tuple[int, Any, str]] = [(1, os, "fsync"), (0, Path, "rename")]  # on which rank, and of what


def fail_in_the_middle(folder: Path) -> list[Outcome]:
    folder, found = folder / "fail_in_the_middle", []
    model = fully_shard(nn.Linear(256, 1024))  # 1 MiB
    save_distributed(folder, model, step=0)
    for step, (where, owner, name) in enumerate(FAILURES, 1):
        for asynchronous in (False, True):
            save = partial(save_distributed, folder, model, step=step, asynchronous=asynchronous)
            with patch.object(owner, name, fail) if rank() == where else nullcontext():
                found.append(outcome(lambda save=save: save().wait()))
            dist.barrier()
        save().wait()
    return found


def test_a_failure_on_one_rank_is_told_by_all(happened: Happened) -> None:
    folder, found = happened
    by_failure = list(zip(*found["fail_in_the_middle"], strict=True))
    for (where, *_), outcomes in zip([one for one in FAILURES for _ in range(2)], by_failure, strict=True):
        told(list(outcomes), f"rank {where}: .*Input/output error")
    only(folder / "fail_in_the_middle", *range(len(FAILURES) + 1))


# ---- what ranks send each other ----------------------------------------------------------------------------


def count_object_collectives(folder: Path) -> int:
    """Of the second save; the first one connects the ranks."""
    folder = folder / "count_object_collectives"
    model, optimizer = build("fsdp2")
    train(model, optimizer, Data(), 1)
    save_distributed(folder, model, optimizer, step=1)
    names = [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]
    with ExitStack() as patches:
        counted = [patches.enter_context(patch.object(dist, n, wraps=getattr(dist, n))) for n in names]
        save_distributed(folder, model, optimizer, step=2, state={"epoch": 1}, per_rank={"own": rank()})
    return sum(one.call_count for one in counted)


def test_a_save_needs_at_most_four_object_collectives(happened: Happened) -> None:
    first, second = happened[1]["count_object_collectives"]
    assert 0 < first == second <= 4


# ---- asynchronous saves ------------------------------------------------------------------------------------


@contextmanager
def held() -> Iterator[threading.Event]:
    """No save commits before the event is set."""
    going, rename = threading.Event(), Path.rename
    with patch.object(Path, "rename", lambda *paths, **how: (going.wait(20), rename(*paths, **how))[1]):
        yield going


def save_and_train(folder: Path) -> list[bool]:
    folder = folder / "save_and_train"
    right = []
    for kind in ("fsdp2", "fsdp1", "ddp"):
        (model, optimizer), data = build(kind), Data()
        train(model, optimizer, data, 2)
        with held() as going:
            state = {"data": data.generator.get_state()}
            save = save_distributed(folder / kind, model, optimizer, step=2, state=state, asynchronous=True)
            expected = train(model, optimizer, data, 3)
            right.append(not save.done())
            dist.barrier()  # rank 0 alone commits, and must not before the others have looked
            going.set()
            right.append(save.wait() == folder / kind / "000001-step-2")
        (model, optimizer), data = build(kind, seed=1), Data()
        data.generator.set_state(load_distributed(folder / kind, model, optimizer)["data"])
        right.append(train(model, optimizer, data, 3) == expected)
    return right


def test_training_goes_on_while_it_is_saved(happened: Happened) -> None:
    assert happened[1]["save_and_train"] == [[True] * 9] * 2


def break_in_flight(folder: Path) -> list[Outcome]:
    folder = folder / "break_in_flight"
    model, _ = build("fsdp2")

    def broken() -> Save:
        with patch.object(Path, "rename", fail):
            save = save_distributed(folder, model, step=1, asynchronous=True)
            while not save.done():
                time.sleep(0.01)
        return save

    found, save = [], broken()
    found.append(outcome(lambda: save_distributed(folder, model, step=2)))
    found.append(outcome(save.wait))  # as often as it is asked
    broken()
    found.append(outcome(lambda: load_distributed(folder, model)))
    save = broken()
    found += [outcome(save.wait) for _ in range(2)]
    save_distributed(folder, model, step=3)  # told once
    return found


def test_an_error_is_told_by_wait_or_by_the_next_call_once_on_every_rank(happened: Happened) -> None:
    folder, found = happened
    for number, by_rank in enumerate(zip(*found["break_in_flight"], strict=True)):
        told(list(by_rank), "rank 0: .*Input/output error")
        after = "the asynchronous save before this call failed" in (by_rank[0].error or "")
        assert after == (number in (0, 2))
    only(folder / "break_in_flight", 3)


SCRIPT = """
    import sys, torch
    from pathlib import Path
    from fsdp_utils import save_distributed

    def fail(*_, **__): raise OSError(5, "Input/output error", "the disk")

    save_distributed(sys.argv[1], torch.nn.Linear(400, 1000), step=1, asynchronous=True).wait()
    Path.rename = fail
    save_distributed(sys.argv[1], torch.nn.Linear(400, 1000), step=2, asynchronous=True)
"""


def test_a_program_that_ends_waits_for_its_save_and_tells_its_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert re.fullmatch(r"CheckpointError in an asynchronous save: .*Input/output error.*\n", done.stderr)
    only(tmp_path, 1)


def destroy_in_flight(folder: Path) -> Outcome:
    """Rank 1 destroys the process group before the save has committed."""
    model, _ = build("fsdp2")
    with held() as going:
        save = save_distributed(folder, model, step=1, asynchronous=True)
        dist.barrier()
        if rank():
            dist.destroy_process_group()
        going.set()
        return outcome(save.wait)


def test_destroying_the_process_group_too_early_does_not_hang_and_leaves_whole_checkpoints(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    for one in two_ranks(destroy_in_flight, tmp_path):
        assert one.seconds < 10
        assert one.error is None or "call .wait() before destroy_process_group()" in one.error
    for path in checkpoints(tmp_path).values():  # rank 0 may have committed; what is there is whole
        verify_checkpoint(path)


# ---- file systems ------------------------------------------------------------------------------------------

_CLONE_NEWNS, _MS_REC_PRIVATE, _MS_RDONLY, _MS_REMOUNT = 0x00020000, 0x4000 | 0x40000, 1, 32
LIBC = ctypes.CDLL(None, use_errno=True)


def own_file_system(path: Path) -> bool:
    """From here on this process alone sees another, empty file system at path. As root."""
    if LIBC.unshare(_CLONE_NEWNS) != 0:
        return False
    LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    return LIBC.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, b"size=8m") == 0


def use_apart(folder: Path) -> tuple[bool, list[Outcome]]:
    """Rank 1 sees another directory, and then another checkpoint under the same name."""
    model, _ = build("fsdp2")
    home, other = folder / "home", folder / "other"
    save_distributed(home, model, step=1)
    save_distributed(other, build("fsdp2", seed=1)[0], step=1)
    alone = own_file_system(home) if rank() == 1 else True
    before = fingerprint(model)
    found = [
        outcome(lambda: save_distributed(home, model, step=2)),
        outcome(lambda: load_distributed(home, model)),
    ]
    if rank() == 1:
        shutil.copytree(other, home, dirs_exist_ok=True)
    dist.barrier()
    found.append(outcome(lambda: load_distributed(home, model)))
    assert fingerprint(model) == before
    return alone, found


def test_a_directory_that_is_not_shared_between_the_ranks_is_noticed(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    (_, first), (alone, second) = two_ranks(use_apart, tmp_path)
    if not alone:
        pytest.skip("needs the right to mount")
    seen = "expected a directory that all ranks see, .*not shared"
    texts = (seen, seen, "on all ranks")
    for one, other, text in zip(first, second, texts, strict=True):
        told([one, other], text)
    only(tmp_path / "home", 1)


@contextmanager
def disk(size: str) -> Iterator[Path]:
    """A file system of that size."""
    path = Path(tempfile.mkdtemp())
    if LIBC.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip("needs the right to mount")
    try:
        yield path
    finally:
        LIBC.umount2(str(path).encode(), 2)
        shutil.rmtree(path, ignore_errors=True)


def fill_up(folder: Path) -> list[Outcome]:
    """A first save fits, a second does not, and a third does when there is room again."""
    model = fully_shard(nn.Linear(256, 1024))  # 1 MiB
    found = [outcome(partial(save_distributed, folder, model, step=step)) for step in (1, 2)]
    if rank() == 0:
        shutil.rmtree(folder / "000001-step-1")
    dist.barrier()
    return [*found, outcome(partial(save_distributed, folder, model, step=3))]


def test_a_full_disk_leaves_the_checkpoint_before_it(two_ranks: TwoRanks) -> None:
    with disk("1700k") as folder:
        first, second = two_ranks(fill_up, folder)
        assert first[0].error is first[2].error is None
        told([first[1], second[1]], rf"{folder}/.*No space left on device")
        only(folder, 3)


def save_nowhere(folders: list[Path]) -> list[Outcome]:
    model, _ = build("fsdp2")
    return [outcome(partial(save_distributed, folder, model, step=1)) for folder in folders]


def test_a_place_where_nothing_can_be_written_is_named_with_the_reason(two_ranks: TwoRanks) -> None:
    with disk("1m") as folder:
        places = {
            Path("/proc/run/a"): "/proc/run/a: .* create /proc/run, found No such file",
            Path("/dev/null"): "/dev/null",
        }
        if LIBC.mount(b"none", str(folder).encode(), None, _MS_REMOUNT | _MS_RDONLY, None) == 0:
            places[folder] = rf"{folder}.*Read-only file system"
            places[folder / "a" / "b"] = rf"{folder}/a.*Read-only file system"
        by_rank = two_ranks(save_nowhere, list(places))
        for by_place, text in zip(zip(*by_rank, strict=True), places.values(), strict=True):
            told(list(by_place), text)


def test_a_listing_that_fails_is_an_error_and_never_no_checkpoint(tmp_path: Path) -> None:
    """Taken for none, a save would begin again with the first number."""
    save_distributed(tmp_path / "run", model := nn.Linear(2, 2), step=1)
    calls: list[Callable[[], object]] = [
        lambda: checkpoints(tmp_path / "run"),
        lambda: load_distributed(tmp_path / "run", model),
        lambda: verify_checkpoint(tmp_path / "run"),
        lambda: save_distributed(tmp_path / "run", model, step=2, keep=1),
    ]
    with patch.object(os, "listdir", fail), patch.object(os, "scandir", fail):
        for call in calls:
            with pytest.raises(CheckpointError, match=r"run: expected .*found Input/output error") as caught:
                call()
            assert not isinstance(caught.value, CheckpointNotFoundError)
    only(tmp_path / "run", 1)


PLACES: dict[Any, str] = {
    "s3://bucket/run": "URL",
    Path("s3://bucket/run"): "URL",
    "~/run": "expanduser",
    None: "as text or a Path, found",
}


def test_what_is_no_place_for_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, here = nn.Linear(2, 2), tmp_path / "here"
    saved = save_distributed(tmp_path / "run", model, step=1).wait()
    here.mkdir()
    monkeypatch.chdir(here)
    for place, words in PLACES.items():
        for call in (
            lambda place=place: save_distributed(place, model, step=1),
            lambda place=place: load_distributed(place, model),
            lambda place=place: export_safetensors(saved, place),
            lambda place=place: checkpoints(place),
        ):
            with pytest.raises(CheckpointError, match=words):
                call()
    assert list(here.iterdir()) == []
    save_distributed("run:1", model, step=1)  # a name like others
    assert [path.name for path in here.iterdir()] == ["run:1"]


def test_nothing_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    """A load takes the path of a checkpoint, too; a save into it would be damage."""
    model = nn.Linear(2, 2)
    path = save_distributed(tmp_path, model, step=1).wait()
    for call in (lambda: save_distributed(path, model, step=2), lambda: export_safetensors(path, path)):
        with pytest.raises(CheckpointError, match=r"step-1: expected a directory .*found a checkpoint"):
            call()
    verify_checkpoint(tmp_path)


# ---- which are kept ----------------------------------------------------------------------------------------


def save_often(folder: Path) -> list[list[int]]:
    """Twelve saves with keep=2, while another thread looks at what is committed."""
    folder = folder / "save_often"
    model, _ = build("fsdp2")
    seen, over = set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.add(tuple(checkpoints(folder)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(12):
            for param in model.parameters():
                nn.init.constant_(param, step)
            save_distributed(folder, model, step=step, keep=2, asynchronous=step % 3 == 0)
        load_distributed(folder, model, step=10)
    finally:
        over.set()
        watcher.join()
    assert all((param.full_tensor() == 10).all() for param in model.parameters())
    return [list(steps) for steps in seen]


def test_many_saves_keep_two_and_never_fewer(happened: Happened) -> None:
    folder, found = happened
    only(folder / "save_often", 10, 11)
    seen, _ = found["save_often"]
    # the one before is deleted after the new one is there: never fewer than two from the second save on
    assert all(len(steps) in (2, 3) for steps in seen if steps and steps[-1] > 0), seen


def test_the_latest_is_the_one_saved_last_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    model, home = nn.Linear(2, 2), tmp_path / "run"
    assert checkpoints(home) == {}
    home.mkdir()
    assert checkpoints(str(home)) == {}
    paths = [save_distributed(home, model, step=step, state={"at": step}).wait() for step in (10, 20, 30)]
    load_distributed(home, model, step=10)
    again = save_distributed(home, model, step=20, state={"at": "again"}, keep=3).wait()  # on another branch
    (home / ".saving-x-000009-step-99").mkdir()
    assert load_distributed(home, model) == {"at": "again", "step": 20}
    assert load_distributed(home, model, step=20)["at"] == "again"
    assert list(checkpoints(home).items()) == [(30, paths[2]), (20, again)]
    assert sorted(path.name for path in home.iterdir() if path.name[0] != ".") == [
        "000002-step-20",
        "000003-step-30",
        "000004-step-20",
    ]


# ---- most of it happens in one launch of two ranks ---------------------------------------------------------


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Happened:
    folder = tmp_path_factory.mktemp("scenes")
    scenes = [disagree, save_if_best, fail_in_the_middle, count_object_collectives, save_and_train]
    return folder, played([*scenes, break_in_flight, save_often], folder)

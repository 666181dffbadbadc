"""What ranks do wrong when they save or load ends in words on every rank, soon, and never in a hang."""

import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_utils import CheckpointError, load_distributed, load_full, run_on_ranks, save_distributed, save_full
from fsdp_utils.checkpoint import full as full_module
from fsdp_utils.checkpoint import load as load_module
from fsdp_utils.checkpoint.manifest import committed
from tests.checkpoints import Outcome, build, fingerprint, outcome, rank
from tests.sharded import TwoRanks

WAIT_S = 0.5


def told(outcomes: list[Outcome], text: str) -> None:
    """The same error on every rank, soon, with that text."""
    assert outcomes[0].error is not None
    assert all(one.error == outcomes[0].error for one in outcomes), outcomes
    assert text in outcomes[0].error, outcomes[0].error
    assert max(one.seconds for one in outcomes) < 10


def disagree(folder: Path) -> dict[str, Outcome]:
    (model, optimizer), found = build("fsdp2"), {}
    save_distributed(folder / "d", model, optimizer, step=1)
    save_full(folder / "f", model, optimizer)
    before = fingerprint(model, optimizer)
    me = rank()
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: save_distributed(folder / "d", model, step=2 + me),
        "directory": lambda: save_distributed(folder / f"d{me}", model, step=2),
        "keep": lambda: save_distributed(folder / "d", model, step=2, keep=1 + me),
        "asynchronous": lambda: save_distributed(folder / "d", model, step=2, asynchronous=me == 0),
        "optimizer": lambda: save_distributed(folder / "d", model, optimizer if me else None, step=2),
        "state": lambda: save_distributed(folder / "d", model, step=2, **{f"of_{me}": 1}),
        "model": lambda: save_distributed(
            folder / "d", build("none", width=4 + me)[0] if me else model, step=2
        ),
        "path": lambda: save_full(folder / f"f{me}", model),
        "loaded step": lambda: load_distributed(folder / "d", model, step=1 if me else "latest"),
        "loaded path": lambda: load_full(folder / ("f" if me else "g"), model),
        "call": lambda: load_full(folder / "f", model) if me else save_full(folder / "f", model),
        "bad argument on one rank": lambda: save_distributed(folder / "d", model, step=2, keep=me),
        "bad state on one rank": lambda: save_distributed(
            folder / "d", model, step=2, x=[1, object()] if me else 1
        ),
    }
    for name, call in calls.items():
        found[name] = outcome(call)
    assert fingerprint(model, optimizer) == before
    save_distributed(folder / "d", model, optimizer, step=9)  # they have found together again
    return found


DISAGREEMENTS = {
    "step": "save_distributed: expected the same step on all ranks, found rank 0: 2; rank 1: 3",
    "directory": "save_distributed: expected the same directory on all ranks, found rank 0: ",
    "keep": "expected the same keep on all ranks, found rank 0: 1; rank 1: 2",
    "asynchronous": "expected the same asynchronous on all ranks, found rank 0: true; rank 1: false",
    "optimizer": 'expected the same optimizer on all ranks, found rank 0: null; rank 1: "AdamW"',
    "state": 'expected the same state on all ranks, found rank 0: ["of_0"]; rank 1: ["of_1"]',
    "model": "expected the same model on all ranks, found rank 0: ",
    "path": "save_full: expected the same path on all ranks, found rank 0: ",
    "loaded step": 'load_distributed: expected the same step on all ranks, found rank 0: "latest"; rank 1: 1',
    "loaded path": "load_full: expected the same path on all ranks, found rank 0: ",
    "call": 'expected the same call on all ranks, found rank 0: "save_full"; rank 1: "load_full"',
    "bad argument on one rank": "rank 0: expected keep to be a whole number of at least 1, or None, found 0",
    "bad state on one rank": "rank 1: state 'x': expected tensors, numbers, ",
}


@pytest.fixture(scope="module")
def disagreements(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Outcome]]]:
    folder = tmp_path_factory.mktemp("disagreements")
    return folder, run_on_ranks(disagree, folder)


@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_about_what(
    about: str, disagreements: tuple[Path, list[dict[str, Outcome]]]
) -> None:
    folder, found = disagreements
    told([outcomes[about] for outcomes in found], DISAGREEMENTS[about])
    assert [one.step for one in committed(folder / "d")] == [1, 9]
    assert sorted(path.name for path in folder.iterdir()) == ["d", "f"], "something was left behind"


def save_if_best(folder: Path) -> list[Outcome]:
    """The loss of each rank's own batch decides on that rank whether to save."""
    model, optimizer = build("fsdp2")
    best, found = float("inf"), []
    for step, losses in enumerate([(3.0, 3.0), (2.0, 3.5), (2.5, 2.5), (1.0, 1.0)]):
        if losses[rank()] < best:
            best = losses[rank()]
            found.append(
                outcome(
                    lambda step=step: save_distributed(folder, model, optimizer, step=step, wait_s=WAIT_S)
                )
            )
        dist.barrier()
    return found


def test_saving_if_best_by_each_ranks_own_loss_names_the_missing_rank(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(save_if_best, tmp_path)
    # step 0: both; step 1: only rank 0; step 2: only rank 1; step 3: both
    assert [one.error is None for one in first] == [True, False, True]
    assert [one.error is None for one in second] == [True, False, True]
    told([first[1]], "expected all 2 ranks to enter it, found only rank 0 after 0.5 s; missing: rank 1")
    told([second[1]], "expected all 2 ranks to enter it, found only rank 1 after 0.5 s; missing: rank 0")
    assert [one.step for one in committed(tmp_path)] == [0, 3]


@pytest.mark.parametrize("call", ["save_distributed", "load_distributed", "save_full", "load_full"])
def test_a_call_on_one_rank_only_names_the_missing_rank(
    call: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    def alone(folder: Path) -> tuple[Outcome | None, bool]:
        model, optimizer = build("fsdp2")
        calls: dict[str, Callable[[], object]] = {
            "save_distributed": lambda: save_distributed(folder / "d", model, step=1, wait_s=WAIT_S),
            "load_distributed": lambda: load_distributed(folder / "d", model, optimizer, wait_s=WAIT_S),
            "save_full": lambda: save_full(folder / "f", model, wait_s=WAIT_S),
            "load_full": lambda: load_full(folder / "f", model, optimizer, wait_s=WAIT_S),
        }
        before = fingerprint(model, optimizer)
        found = outcome(calls[call]) if rank() == 0 else None
        return found, fingerprint(model, optimizer) == before

    (found, unchanged), _ = two_ranks(alone, tmp_path)
    assert found is not None
    told([found], f"{call}: expected all 2 ranks to enter it, found only rank 0 after 0.5 s; missing: rank 1")
    assert unchanged
    assert not list(tmp_path.iterdir())


def come_late(folder: Path) -> list[Outcome]:
    model, _ = build("fsdp2")
    found = []
    for step in range(2):
        if step == 0 and rank() == 1:
            time.sleep(3 * WAIT_S)  # rank 0 has given up by then
        found.append(outcome(lambda step=step: save_distributed(folder, model, step=step, wait_s=WAIT_S)))
        dist.barrier()
    return found


def test_a_rank_that_comes_too_late_waits_in_vain_and_the_next_save_is_well(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(come_late, tmp_path)
    told([first[0]], "missing: rank 1")
    told([second[0]], "missing: rank 0")
    assert [first[1].error, second[1].error] == [None, None]


def fail_in_the_middle(folder: Path) -> list[Outcome]:
    """One rank fails where nobody expects it: in a hook of its model."""
    model, _ = build("fsdp2")
    before = outcome(lambda: save_distributed(folder, model, step=1))

    def hook(*_: Any) -> None:
        raise MemoryError("not enough for the state dict")

    handle = model.register_state_dict_post_hook(hook) if rank() == 1 else None
    during = outcome(lambda: save_distributed(folder, model, step=2))
    if handle is not None:
        handle.remove()
    return [before, during, outcome(lambda: save_distributed(folder, model, step=3))]


def test_an_exception_on_one_rank_reaches_all(two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(fail_in_the_middle, tmp_path)
    told(
        [first[1], second[1]], "rank 1 failed, or lost a rank that did: MemoryError: not enough for the state"
    )
    assert [first[2].error, second[2].error] == [None, None]
    assert [one.step for one in committed(tmp_path)] == [1, 3]
    assert len(list(tmp_path.iterdir())) == 2, "something was left behind"


# ---- a directory that is not shared ----------------------------------------------------------------------

_CLONE_NEWNS, _MS_REC_PRIVATE, _MS_RDONLY, _MS_REMOUNT = 0x00020000, 0x4000 | 0x40000, 1, 32


def own_file_system(path: Path) -> bool:
    """From here on this process alone sees another, empty file system at path. Linux, as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.name != "posix" or not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    return libc.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, b"size=8m") == 0


def save_apart(folder: Path) -> tuple[bool, list[Outcome]]:
    model, _ = build("fsdp2")
    before = outcome(lambda: save_distributed(folder, model, step=1))
    alone = own_file_system(folder) if rank() == 1 else True
    return alone, [
        before,
        outcome(lambda: save_distributed(folder, model, step=2)),
        outcome(lambda: load_distributed(folder, model)),
    ]


def test_a_directory_that_is_not_shared_between_the_ranks_is_noticed(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    (_, first), (alone, second) = two_ranks(save_apart, tmp_path)
    if not alone:
        pytest.skip("needs the right to mount")
    told(
        [first[1], second[1]],
        "expected the directory that rank 0 writes to, found another one: it is not shared",
    )
    told([first[2], second[2]], "expected the directory that rank 0 sees, found none: it is not shared")
    assert [one.step for one in committed(tmp_path)] == [1]
    assert len(list(tmp_path.iterdir())) == 1, "something was left behind"


# ---- nowhere to write ------------------------------------------------------------------------------------


@contextmanager
def small_disk(size: str) -> Iterator[Path | None]:
    """A file system of that size, or None without the right to mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = Path(tempfile.mkdtemp())
    mounted = (
        hasattr(libc, "mount")
        and libc.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0
    )
    try:
        yield path if mounted else None
    finally:
        if mounted:
            libc.umount2(str(path).encode(), 2)
        shutil.rmtree(path, ignore_errors=True)


def fill_up(folder: Path, full: bool, asynchronous: bool) -> list[Outcome]:
    """A first save fits, a second does not."""
    model = torch.nn.Linear(256, 1024)  # 1 MiB
    fully_shard(model)
    if full:
        return [
            outcome(lambda step=step: save_full(folder / f"{step}.pt", model, step=step)) for step in (1, 2)
        ]
    return [
        outcome(
            lambda step=step: save_distributed(folder, model, step=step, asynchronous=asynchronous).wait()
        )
        for step in (1, 2)
    ]


@pytest.mark.parametrize("how", ["distributed", "asynchronous", "full"])
def test_a_full_disk_leaves_the_checkpoint_before_it(how: str, two_ranks: TwoRanks) -> None:
    with small_disk("1700k") as disk:
        if disk is None:
            pytest.skip("needs the right to mount")
        first, second = two_ranks(fill_up, disk, how == "full", how == "asynchronous")
        assert first[0].error is None
        told([first[1], second[1]], "No space left on device: '")
        assert f"'{disk}/" in (first[1].error or ""), "the file is not named"
        assert len(list(disk.iterdir())) == 1, "something was left behind"
        model = torch.nn.Linear(256, 1024)
        state = load_full(disk / "1.pt", model) if how == "full" else load_distributed(disk, model)
        assert state["step"] == 1


def limit_file_size(folder: Path, how: str) -> list[Outcome]:
    import resource
    import signal

    model = torch.nn.Linear(256, 1024)
    fully_shard(model)
    save: Callable[[int], object] = lambda step: (  # noqa: E731
        save_full(folder / f"{step}.pt", model, step=step)
        if how == "full"
        else save_distributed(folder, model, step=step)
    )
    before = outcome(lambda: save(1))
    if rank() == (0 if how == "full" else 1):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return [before, outcome(lambda: save(2))]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
@pytest.mark.parametrize("how", ["distributed", "full"])
def test_a_quota_of_one_rank_is_told_by_all(how: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    first, second = two_ranks(limit_file_size, tmp_path, how)
    assert first[0].error is None
    told(
        [first[1], second[1]],
        f"rank {0 if how == 'full' else 1}: OSError: [Errno 27] File too large: '{tmp_path}",
    )
    assert len(list(tmp_path.iterdir())) == 1, "something was left behind"


@contextmanager
def read_only() -> Iterator[Path | None]:
    """A directory in which nobody can write, or None for a root that may not mount."""
    with small_disk("1m") as disk:
        if disk is not None:
            remounted = ctypes.CDLL(None).mount(
                b"none", str(disk).encode(), None, _MS_REMOUNT | _MS_RDONLY, None
            )
            yield disk if remounted == 0 else None
        elif os.geteuid() == 0:
            yield None
        else:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder).chmod(0o555)
                yield Path(folder)
                Path(folder).chmod(0o755)


def save_nowhere(folder: Path, how: str) -> Outcome:
    model, _ = build("fsdp2")
    if how == "full":
        return outcome(lambda: save_full(folder / "one.pt", model))
    return outcome(lambda: save_distributed(folder, model, step=1))


@pytest.mark.skipif(os.name == "nt", reason="a directory on Windows cannot be made read-only like this")
@pytest.mark.parametrize("how", ["distributed", "full"])
def test_a_read_only_directory_is_named(how: str, two_ranks: TwoRanks) -> None:
    with read_only() as folder:
        if folder is None:
            pytest.skip("root may write anywhere, and needs the right to mount what is read-only")
        found = two_ranks(save_nowhere, folder, how)
        told(found, f"'{folder}/.saving-")
        told(
            found, "Permission denied" if "Permission" in (found[0].error or "") else "Read-only file system"
        )


# ---- which are kept --------------------------------------------------------------------------------------


def save_often(folder: Path) -> list[list[int]]:
    """60 saves with keep=2, while another thread looks at what is committed."""
    model, _ = build("fsdp2")
    seen, over = set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.add(tuple(one.step for one in committed(folder)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(60):
            for param in model.parameters():
                torch.nn.init.constant_(param, step)
            save_distributed(folder, model, step=step, keep=2, asynchronous=step % 3 == 0)
        load_distributed(folder, model, step=58)
    finally:
        over.set()
        watcher.join()
    assert all((param.full_tensor() == 58).all() for param in model.parameters())
    return [list(steps) for steps in seen]


def test_sixty_saves_keep_two_and_never_fewer(two_ranks: TwoRanks, tmp_path: Path) -> None:
    seen = two_ranks(save_often, tmp_path)[0]
    assert [one.step for one in committed(tmp_path)] == [58, 59]
    assert len(list(tmp_path.iterdir())) == 2, "something was left behind"
    # the one before is deleted after the new one is there: never fewer than two from the second save on
    assert all(len(steps) in (2, 3) for steps in seen if steps and steps[-1] > 0), seen


def test_the_latest_is_the_one_saved_last_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (10, 20, 30):
        save_distributed(tmp_path, model, step=step, at=step)
    load_distributed(tmp_path, model, step=10)
    save_distributed(tmp_path, model, step=20, at="again", keep=3)  # on another branch, from step 10
    assert load_distributed(tmp_path, model)["at"] == "again"
    assert load_distributed(tmp_path, model, step=20)["at"] == "again"
    assert [(one.commit, one.step) for one in committed(tmp_path)] == [(2, 20), (3, 30), (4, 20)]


def test_what_cannot_be_read_back_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"state 'rng': expected tensors.* found numpy.ndarray at \[1\]"
    ):
        save_distributed(tmp_path, torch.nn.Linear(2, 2), step=1, rng=("MT", torch.ones(2).numpy()))
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_was_made_before_wrapping_is_noticed(two_ranks: TwoRanks, tmp_path: Path) -> None:
    def save_both(folder: Path) -> list[Outcome]:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model)
        return [
            outcome(lambda: save_distributed(folder / "d", model, optimizer, step=1)),
            outcome(lambda: save_full(folder / "f", model, optimizer)),
        ]

    for found in zip(*two_ranks(save_both, tmp_path), strict=True):
        told(list(found), "Make the optimizer after the model is wrapped")


def load_apart(folder: Path) -> tuple[bool, Outcome, bool]:
    """Rank 1 sees another checkpoint under the same name, as after a copy to a disk of its own."""
    for name, seed in (("seen", 0), ("other", 1)):
        save_distributed(folder / name, build("fsdp2", seed=seed)[0], step=1)
    alone = True
    if rank() == 1 and (alone := own_file_system(folder / "seen")):
        shutil.copytree(folder / "other", folder / "seen", dirs_exist_ok=True)
    model, _ = build("fsdp2", seed=2)
    before = fingerprint(model)
    found = outcome(lambda: load_distributed(folder / "seen", model))
    return alone, found, fingerprint(model) == before


def test_another_checkpoint_under_the_same_name_on_one_rank_is_noticed(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    (_, first, unchanged), (alone, second, unchanged_too) = two_ranks(load_apart, tmp_path)
    if not alone:
        pytest.skip("needs the right to mount")
    told([first, second], "manifest.json: expected the same file on all ranks, found others on ranks [1]")
    assert unchanged
    assert unchanged_too


def fail_to_restore(folder: Path, full: bool) -> Outcome:
    """Rank 1 fails when all that ranks do together is done."""
    model, optimizer = build("fsdp2")
    if full:
        save_full(folder / "f", model, optimizer)
    else:
        save_distributed(folder / "d", model, optimizer, step=1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "the device")

    if rank() == 1:
        (full_module if full else load_module).restore_optimizers = fail
    return outcome(
        lambda: (
            load_full(folder / "f", model, optimizer)
            if full
            else load_distributed(folder / "d", model, optimizer)
        )
    )


@pytest.mark.parametrize("full", [False, True], ids=["distributed", "full"])
def test_no_rank_goes_on_with_what_another_one_failed_to_restore(
    full: bool, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    found = two_ranks(fail_to_restore, tmp_path, full)
    told(found, "Input/output error")
    told(found, "The model may be partly loaded: do not go on with it.")

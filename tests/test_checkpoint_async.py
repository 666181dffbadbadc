"""Asynchronous saves: what they save is what was there when they were called, and their errors are heard."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_utils import CheckpointError, load_distributed, save_distributed, save_full, verify_checkpoint
from fsdp_utils.checkpoint import Save
from fsdp_utils.checkpoint import save as save_module
from fsdp_utils.checkpoint.manifest import committed
from tests.checkpoints import Data, Outcome, build, fingerprint, outcome, rank, train
from tests.sharded import TwoRanks


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_training_goes_on_while_it_is_saved(kind: str, two_ranks: TwoRanks, tmp_path: Path) -> None:
    def save_and_train(folder: Path) -> tuple[bool, list[float], list[float]]:
        (model, optimizer), data = build(kind), Data()
        train(model, optimizer, data, 2)
        going = threading.Event()
        commit = save_module.commit
        # Only when the training has gone on is the checkpoint committed, so that the two do overlap.
        save_module.commit = lambda *paths: (going.wait(20), commit(*paths))
        save = save_distributed(
            folder, model, optimizer, step=2, data=data.generator.get_state(), asynchronous=True
        )
        expected = train(model, optimizer, data, 3)
        was_done = save.done()
        going.set()
        assert save.wait() == folder / "000001-step-2"
        (model, optimizer), data = build(kind, seed=1), Data()
        data.generator.set_state(load_distributed(folder, model, optimizer)["data"])
        return was_done, expected, train(model, optimizer, data, 3)

    for was_done, expected, found in two_ranks(save_and_train, tmp_path):
        assert not was_done
        assert found == expected
    verify_checkpoint(tmp_path)


def test_one_save_is_in_flight_and_the_next_call_waits_for_it(two_ranks: TwoRanks, tmp_path: Path) -> None:
    def save_thrice(folder: Path) -> list[tuple[int, ...]]:
        model, _ = build("fsdp2")
        seen, commit = [], save_module.commit

        def slow(*paths: Path) -> None:
            time.sleep(0.2)
            commit(*paths)

        save_module.commit = slow
        for step in range(3):
            save_distributed(folder, model, step=step, asynchronous=True)
            dist.barrier()
            seen.append(tuple(one.step for one in committed(folder)))
        load_distributed(folder, model)
        seen.append(tuple(one.step for one in committed(folder)))
        return seen

    assert two_ranks(save_thrice, tmp_path)[0] == [(), (0,), (0, 1), (0, 1, 2)]


def break_in_flight(folder: Path) -> list[Any]:
    """The directory disappears while it is written to."""
    model, _ = build("fsdp2")
    before = fingerprint(model)
    finish = save_module.write_manifest

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "the disk")

    found = []
    for then in (
        lambda: save_distributed(folder, model, step=9),
        lambda: load_distributed(folder, model),
        lambda: save_full(folder / "f", model),
    ):
        save_module.write_manifest = fail
        save = save_distributed(folder, model, step=1, asynchronous=True)
        while not save.done():
            time.sleep(0.01)
        save_module.write_manifest = finish
        found.append(outcome(then))
    save_module.write_manifest = fail
    save = save_distributed(folder, model, step=1, asynchronous=True)
    found.append(outcome(save.wait))
    save_module.write_manifest = finish
    found.append(outcome(lambda: save_distributed(folder, model, step=3)))  # told once
    assert fingerprint(model) == before
    return found


def test_an_error_is_told_by_wait_or_by_the_next_call_once_on_every_rank(
    two_ranks: TwoRanks, tmp_path: Path
) -> None:
    first, second = two_ranks(break_in_flight, tmp_path)
    for one, other in zip(first[:4], second[:4], strict=True):
        assert one.error == other.error
        assert "rank 0: OSError: [Errno 5] Input/output error: 'the disk'" in one.error
    for one in first[:3]:
        assert "the asynchronous save before this call failed" in one.error
    assert first[4].error is None
    assert second[4].error is None
    assert [one.step for one in committed(tmp_path)] == [3]
    assert len(list(tmp_path.iterdir())) == 1, "something was left behind"


SCRIPT = """
    import sys, torch
    from pathlib import Path
    from fsdp_utils import save_distributed
    from fsdp_utils.checkpoint import save

    if sys.argv[2] == "fails":
        def fail(*_): raise OSError(5, "Input/output error", "the disk")
        save.write_manifest = fail
    save_distributed(Path(sys.argv[1]), torch.nn.Linear(400, 1000), step=1, asynchronous=True)
"""


@pytest.mark.parametrize("how", ["is well", "fails"])
def test_a_program_that_ends_waits_for_its_save_and_tells_its_error(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), tmp_path, how],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0
    if how == "is well":
        assert done.stderr == ""
        verify_checkpoint(tmp_path)
        assert [one.step for one in committed(tmp_path)] == [1]
    else:
        assert "CheckpointError in an asynchronous save" in done.stderr
        assert "OSError: [Errno 5] Input/output error: 'the disk'" in done.stderr
        assert not list(tmp_path.iterdir())


def destroy_in_flight(folder: Path, before: str) -> Outcome:
    """Destroy the process group when the save is about to write, or about to commit what is written."""
    model, _ = build("fsdp2")
    going = threading.Event()
    place, name = {"writing": (save_module, "_write"), "committing": (save_module, "commit")}[before]
    then = getattr(place, name)
    setattr(place, name, lambda *args, **kwargs: (going.wait(20), then(*args, **kwargs))[1])
    save = save_distributed(folder, model, step=1, asynchronous=True)
    dist.barrier()
    dist.destroy_process_group()
    going.set()
    return outcome(save.wait)


@pytest.mark.parametrize("before", ["writing", "committing"])
def test_destroying_the_process_group_too_early_is_told_and_does_not_hang(
    before: str, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    found = two_ranks(destroy_in_flight, tmp_path, before)
    for one in found:
        assert one.error is not None
        assert "call .wait() before destroy_process_group()" in one.error
        assert one.seconds < 10
    # rank 0 may have committed before it noticed; what is there is whole
    for one in committed(tmp_path):
        verify_checkpoint(one.path)


def leave_in_flight(folder: Path, asynchronous: bool) -> str | None:
    """Rank 1 leaves the save when it is about to write, as a rank does that ends too early."""
    model, _ = build("fsdp2")
    if rank() == 1:
        save_module._write = lambda ranks, *_: ranks.close()  # type: ignore[assignment]
    error = outcome(lambda: save_distributed(folder, model, step=1, asynchronous=asynchronous).wait()).error
    dist.barrier()
    return error


@pytest.mark.parametrize("asynchronous", [True, False])
def test_where_a_rank_is_lost_in_the_background_it_is_said_that_it_may_have_ended_too_early(
    asynchronous: bool, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    error = two_ranks(leave_in_flight, tmp_path, asynchronous)[0]
    assert error is not None
    assert "lost a rank" in error or "that rank is gone" in error
    hint = ". If it has only ended too early: call .wait() before destroy_process_group()"
    assert (hint in error) == asynchronous


def test_every_wait_for_a_failed_save_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "the disk")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "write_manifest", fail)
        save = save_distributed(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True)
        for _ in range(3):
            with pytest.raises(CheckpointError, match="Input/output error"):
                save.wait()
        heard = save_distributed(tmp_path, nn.Linear(2, 2), step=2, asynchronous=True)
        while not heard.done():
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="the asynchronous save before this call failed"):
        save_distributed(tmp_path, nn.Linear(2, 2), step=3)
    with pytest.raises(CheckpointError, match="Input/output error"):  # told by the call before this one
        heard.wait()
    save_distributed(tmp_path, nn.Linear(2, 2), step=4)
    assert [one.step for one in committed(tmp_path)] == [4]


def test_no_exception_in_the_thread_of_a_save_is_lost(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    save = Save(tmp_path / "never", interrupted, asynchronous=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="KeyboardInterrupt"):
            save.wait()


def test_a_save_that_gets_no_thread_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("save "):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    save = save_distributed(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True)
    assert save.done()
    assert save.wait(1) == tmp_path / "000001-step-1"


def test_waiting_can_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    commit = save_module.commit
    monkeypatch.setattr(save_module, "commit", lambda *paths: (going.wait(20), commit(*paths)))
    save = save_distributed(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True)
    with pytest.raises(TimeoutError, match=r"000001-step-1 is still being saved after 0\.01 s"):
        save.wait(0.01)
    going.set()
    save.wait()


def test_a_buffer_is_used_again_and_not_seen_by_the_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    for step in range(3):
        torch.nn.init.constant_(model.weight, step)
        save = save_distributed(tmp_path, model, step=step, asynchronous=True)
        torch.nn.init.constant_(model.weight, 100)
        save.wait()
        assert (model.weight == 100).all()
        load_distributed(tmp_path, model)
        assert (model.weight == step).all()


def test_an_error_of_the_last_save_does_not_hide_in_a_finished_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected step to be a whole number"):
        save_distributed(tmp_path, nn.Linear(2, 2), step=-1, asynchronous=True)
    assert rank() == 0
    save_distributed(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True).wait()

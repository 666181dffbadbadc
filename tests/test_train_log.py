"""What a run makes of the files that it finds: its own, cut short, and those that are not a run's."""

import json
from pathlib import Path

import pytest

from fsdp_utils.train.metrics import RunLog

LINES = [b'{"step": 1, "loss": 3.0}', b'{"step": 2, "loss": 2.0}', b'{"step": 2, "eval_loss": 2.5}']
LATER = b'{"step": 3, "loss": 1.0}'


def go_on(out: Path) -> tuple[list[bytes], list[bytes]]:
    """Go on from step 2 and write a line of step 3: metrics.jsonl after that, and what was set aside."""
    log = RunLog(out, step=2, steps=9, tensorboard=False)
    log.metrics(3, loss=1.5)
    log.close()
    aside = [file.read_bytes() for file in out.glob("metrics.jsonl.damaged-*")]
    return (out / "metrics.jsonl").read_bytes().splitlines(), aside


@pytest.mark.parametrize("cut_short", [b"", b'{"st', LATER + b'\n{"step": 4, "lo'])
def test_lines_of_later_steps_and_one_cut_short_are_taken_out(tmp_path: Path, cut_short: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*LINES, cut_short]))
    assert go_on(tmp_path) == ([*LINES, b'{"step": 3, "loss": 1.5}'], [])


@pytest.mark.parametrize(
    ("content", "line", "left"),
    [
        (b"garbage", 1, []),
        (b"\0" * 4096, 1, []),
        (b"".join(bytes([i]) for i in range(256)) * 9, 1, []),
        (b"\n".join([LINES[0], b"[1, 2]", *LINES[1:], b""]), 2, LINES),
        (b"\n".join([LINES[0], b'{"loss": 1.0}', *LINES[1:], b""]), 2, LINES),
        (b"\n".join([LINES[0], b'{"step": "2"}', *LINES[1:], LATER, b""]), 2, LINES),
        (b"\n".join([*LINES, b"[" * 100_000, b""]), 4, LINES),
        (b"\n".join([*LINES, b"\xff\xfe"]), 4, LINES),
    ],
)
def test_what_is_not_a_runs_is_set_aside_and_no_byte_of_it_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, line: int, left: list[bytes]
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert go_on(tmp_path) == ([*left, b'{"step": 3, "loss": 1.5}'], [content])
    told = capsys.readouterr().err
    assert f'metrics.jsonl: expected each line to be JSON with "step", line {line} is not' in told
    assert "damaged-" in told


def test_what_could_be_read_is_in_the_new_file_at_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*LINES, b"[]", b""]))
    log = RunLog(tmp_path, step=2, steps=9, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == LINES
    log.close()


def test_events_are_never_taken_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "started", "step": 7}\nmine\n')
    log = RunLog(tmp_path, step=2, steps=9, tensorboard=False)
    log.event("finished")
    log.close()
    lines = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines == ["started", "finished"]
    (aside,) = tmp_path.glob("events.jsonl.damaged-*")
    assert b"mine" in aside.read_bytes()


def test_it_knows_what_was_told_of_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*LINES, b""]))
    for step, told in [(2, True), (1, False), (3, False)]:  # step 1 takes the lines of step 2 out
        if step == 3:
            (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*LINES, b""]))
        log = RunLog(tmp_path, step=step, steps=9, tensorboard=False)
        assert log.has("eval_loss") is told
        log.close()


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path, step=0, steps=9, tensorboard=False)
    log.metrics(1, loss=float("nan"), norm=float("inf"), lr=0.5, mfu=None)
    log.metrics(2)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": null, "norm": null, "lr": 0.5}\n'
    )

"""Attacks in child processes with limits, many in each; one that hangs or dies is replaced by a new one."""

import logging
import multiprocessing
import random
import re
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

SURVIVED, REFUSED = "survived", "refused in words"
WRONG, RAW, HANG, MEMORY, CODE = "silently wrong", "raw error", "hang", "memory", "code executed"
FAILED = (WRONG, RAW, HANG, MEMORY, CODE)

LIMIT_S = 30.0  # for one attack on a busy machine; nearly all take less than a tenth of a second
START_S = 240.0  # for a child to import what it attacks
MOST_BYTES = 2**30  # that an attack may make the process take
_BACKSTOP_BYTES = 4 * 2**30  # beyond which the system gives it none

_PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn")
# what Python itself says when a value is not what a program takes it for
_RAW_WORDS = re.compile(
    r"invalid literal for|could not convert|not enough values to unpack|too many values to unpack|"
    r"is not in list|math domain error|embedded null|codec can't|Exceeds the limit|must be str|object is not"
)


class Verdict(NamedTuple):
    outcome: str
    text: str = ""
    peer: str = ""  # how another program ended on the same file


class Attack(NamedTuple):
    """One kind of attack. Everything in it is a function of a module, as it goes to other processes."""

    name: str
    # once, in a child: puts what is attacked into the folder; True in the short form
    prepare: Callable[[Path, bool], None]
    attack: Callable[[Path, random.Random], Verdict]
    long: int  # how many in the long form
    quick: int  # and in the short one
    peer: str = ""  # its name


class Report(NamedTuple):
    name: str
    outcomes: Counter[str]
    peer: str
    peers: Counter[str]
    failures: list[str]  # number and text of each


def judge(
    call: Callable[[], Any], refusals: tuple[type[Exception], ...], right: Callable[[Any], str]
) -> Verdict:
    """How a call on something hostile ends.

    Args:
        refusals: the exceptions that are documented for it.
        right: what is wrong with what the call returned; nothing if it is right.
    """
    try:
        result = call()
    except refusals as error:
        text = f"{type(error).__name__}: {error}"
        if _RAW_WORDS.search(text) and "expected" not in text:
            return Verdict(RAW, text[:500])
        return Verdict(REFUSED, text[:500])
    except MemoryError:
        return Verdict(MEMORY, traceback.format_exc(limit=-3)[-800:])
    except BaseException as error:
        kind = MEMORY if "can't allocate memory" in str(error) else RAW
        with suppress(BaseException):
            return Verdict(kind, "".join(traceback.format_exception(error, limit=-3))[-800:])
        return Verdict(kind, f"a {type(error).__name__} that cannot be shown")
    problem = right(result)
    return Verdict(WRONG, problem) if problem else Verdict(SURVIVED)


def run(attack: Attack, folder: Path, *, quick: bool, seed: int = 0, limit_s: float = LIMIT_S) -> Report:
    """All attacks of a kind."""
    left = list(range(attack.quick if quick else attack.long))
    report = Report(attack.name, Counter(), attack.peer, Counter(), [])
    folder.mkdir(parents=True)
    prepared = False
    while left:
        ours, theirs = context().Pipe()
        child = context().Process(target=_work, args=(attack, folder, prepared, quick, left, seed, theirs))
        child.start()
        theirs.close()
        number, limit = -1, START_S  # until it says that it has begun
        try:
            while ours.poll(limit):
                said = ours.recv()
                if isinstance(said, int):
                    number, limit, prepared = said, limit_s, True
                else:
                    _count(report, left.pop(0), said)
                if not left:
                    break
            else:
                if number < 0:
                    raise RuntimeError(f"{attack.name}: nothing was attacked within {START_S:g} s")
                _count(report, left.pop(0), Verdict(HANG, f"longer than {limit_s:g} s"))
        except EOFError:
            child.join(10)
            if number < 0:
                raise RuntimeError(f"{attack.name}: the child could not begin: {child.exitcode}") from None
            _count(report, left.pop(0), Verdict(RAW, f"the process died: exit code {child.exitcode}"))
        finally:
            child.kill()
            child.join(10)
            ours.close()
    return report


def context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "fsdp_utils.checkpoint"])
    return made


def _count(report: Report, number: int, verdict: Verdict) -> None:
    report.outcomes[verdict.outcome] += 1
    if verdict.peer:
        report.peers[verdict.peer] += 1
    if verdict.outcome in FAILED:
        report.failures.append(f"{report.name} {number}: {verdict.outcome}: {verdict.text}")


def _work(
    attack: Attack,
    folder: Path,
    prepared: bool,
    quick: bool,
    numbers: Iterable[int],
    seed: int,
    pipe: Connection,
) -> None:
    import torch

    torch.set_num_threads(1)
    logging.disable()  # plain DCP logs every error
    # Memory that nobody has written to holds NaN then, and so does what is made of it.
    torch.use_deterministic_algorithms(True)
    if not prepared:
        attack.prepare(folder, quick)
    started: list[str] = []
    sys.addaudithook(lambda event, _: started.append(event) if event in _PROGRAMS else None)
    most = _status("VmSize") + _BACKSTOP_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in numbers:
        pipe.send(number)
        started.clear()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew: proc(5)
        before = _status("VmRSS")
        verdict = attack.attack(folder, random.Random(f"{attack.name}/{seed}/{number}"))
        taken = _status("VmHWM") - before
        if started or (folder / "canary").exists():
            verdict = Verdict(CODE, f"{started or 'the command in the file'}: {verdict.text}", verdict.peer)
            (folder / "canary").unlink(missing_ok=True)
        elif taken > MOST_BYTES:
            verdict = Verdict(MEMORY, f"{taken / 2**30:.1f} GiB: {verdict.text}", verdict.peer)
        pipe.send(verdict)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

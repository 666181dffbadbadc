"""Can a training run be made to lose work? Random faults, one after the other, while it trains.

fsdp_utils.train runs under torchrun with restarts. At random steps a rank is killed (SIGKILL), all ranks are
asked to stop (SIGTERM), a rank is halted (SIGSTOP), the disk is full at a save, or the newest checkpoint is
cut short and a rank killed. The run has to end by itself, with the losses of a run that nobody disturbed.

    python benchmarks/chaos.py                       # 4 ranks, 25 faults; Linux
    python benchmarks/chaos.py --ranks 2 --faults 5 --steps 60
    python benchmarks/chaos.py --record              # writes notebooks/recorded/chaos.json for lesson 10, too
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe, keep, limits, options, table
from fsdp_utils import checkpoints

DISK_FULL, CUT_SHORT = "disk full", "checkpoint cut short"
KINDS = ("SIGKILL of a rank", "SIGTERM of all ranks", "SIGSTOP of a rank", DISK_FULL, CUT_SHORT)
SAVE_EVERY = 5
HANG_S = 20.0  # a rank that has not moved for so long hangs
ENDED_S = 5.0  # for the ranks that hang to have told it and ended
START_S = 90.0  # for the ranks to start, import and load, on a busy machine
LIMIT_S = HANG_S + ENDED_S + START_S  # for the run to go on after a fault
DISK_MIB = 64
SOURCE = "fsdp_utils.lessons.tasks:dates_llama"  # what is trained, and on what


@dataclass
class Fault:
    """What was done to the run, and what came of it."""

    kind: str  # one of KINDS, or a signal and "checkpoint cut short" together
    at_step: int  # how far the run was, by its metrics
    saved: int  # the newest whole checkpoint then
    resumed: int | None  # the step that it went on from; None where it was not interrupted
    seconds: float  # until it trained again

    @property
    def repeated(self) -> int:
        """Steps that had to be done again."""
        return 0 if self.resumed is None else max(0, self.at_step - self.resumed)


class Run:
    """A training run under torchrun, and what it tells of itself."""

    def __init__(
        self, out: Path, ranks: int, steps: int, restarts: int, hang_s: float, source: str = SOURCE
    ) -> None:
        self.out = out
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "-m", "fsdp_utils.train", f"--out={out}"]
        command += [f"--steps={steps}", f"--data.source={source}", f"--save_every={SAVE_EVERY}"]
        command += [f"--eval_every={steps}", "--keep=3", f"--hang_s={hang_s}", "--parallel.device=cpu"]
        out.mkdir(parents=True, exist_ok=True)
        with (out / "log").open("w") as log:
            self.torchrun = subprocess.Popen(
                command,
                # with the old store, ranks that are started again would find the addresses of the dead
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in _lines(self.out / "events.jsonl") if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in _lines(self.out / "metrics.jsonl") if "loss" in line}

    def step(self) -> int:
        return max(self.losses(), default=0)

    def checkpoints(self) -> dict[int, Path]:
        return checkpoints(self.out / "checkpoints")

    def ranks(self) -> list[int]:
        """The processes that torchrun runs now."""
        return [child.pid for child in psutil.Process(self.torchrun.pid).children()]

    def until(self, ready: Callable[[], bool], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            if self.torchrun.poll() is not None:
                raise RuntimeError(f"the run ended before {what}:\n{(self.out / 'log').read_text()[-3000:]}")
            if time.monotonic() > end:
                log = (self.out / "log").read_text()[-3000:]
                raise TimeoutError(f"the run stood for more than {limit_s:.0f} s before {what}:\n{log}")
            time.sleep(0.05)

    def end(self) -> None:
        """Kill whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.torchrun.pid, signal.SIGKILL)
        for pid in self.ranks() if self.torchrun.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may just be written to, or not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


# --- the faults ------------------------------------------------------------------------------------------


def cause(kind: str, run: Run, draw: random.Random) -> Fault:
    """Do it, and wait until the run trains again."""
    begun, started, at_step = time.monotonic(), len(run.events("started")), run.step()
    saved = max(run.checkpoints(), default=0)
    if kind == DISK_FULL:
        with full_disk(run.out / "checkpoints"):
            failed = len(run.events("failed to save"))
            run.until(lambda: len(run.events("failed to save")) > failed, LIMIT_S, "a save failed")
        return Fault(kind, at_step, saved, None, time.monotonic() - begun)
    if CUT_SHORT in kind:
        *before, newest = run.checkpoints()
        saved = max(before, default=0)
        largest = max(run.checkpoints()[newest].iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    number = next((one for one in (signal.SIGTERM, signal.SIGSTOP) if one.name in kind), signal.SIGKILL)
    pids = run.ranks()
    for pid in pids if number == signal.SIGTERM else [draw.choice(pids)]:
        os.kill(pid, number)
    run.until(lambda: len(run.events("started")) > started, LIMIT_S, f"it went on after {kind}")
    resumed = run.events("started")[-1]["step"]
    run.until(lambda: run.step() > resumed, LIMIT_S, f"a step after {kind}")
    return Fault(kind, at_step, saved, resumed, time.monotonic() - begun)


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """No space is left on the file system of that directory, which `small_disk` has made."""
    filler = directory / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))
            file.flush()
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of DISK_MIB at that directory, in memory."""
    directory.mkdir(parents=True)
    size = f"size={DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=30)


def can_fill_a_disk() -> bool:
    """Whether this user may mount a file system that is then filled."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "try"):
                return True
        except (subprocess.SubprocessError, OSError):
            return False


# --- the run ---------------------------------------------------------------------------------------------


def disturb(
    folder: Path,
    ranks: int,
    steps: int,
    kinds: list[str],
    seed: int,
    hang_s: float = HANG_S,
    source: str = SOURCE,
) -> tuple[list[Fault], dict[int, float], list[dict[str, Any]]]:
    """Train with those faults, each at a step drawn from the seed: the faults, losses by step, events."""
    draw = random.Random(seed)
    when = sorted(draw.sample(range(2 * SAVE_EVERY, steps - SAVE_EVERY), len(kinds)))
    out = folder / "disturbed"
    disk = small_disk(out / "checkpoints") if DISK_FULL in kinds else contextlib.nullcontext()
    with disk:
        run = Run(out, ranks, steps, 2 * len(kinds), hang_s, source)
        try:
            faults = []
            for kind, step in zip(kinds, when, strict=True):

                def there(step: int = step, cuts: bool = CUT_SHORT in kind) -> bool:
                    """A save that is still under way would become the newest after the cut."""
                    at = run.step()
                    return at >= step and (
                        not cuts or max(run.checkpoints(), default=0) == at - at % SAVE_EVERY
                    )

                run.until(there, START_S + LIMIT_S, f"step {step}")
                faults.append(cause(kind, run, draw))
                print(f"step {faults[-1].at_step}: {kind}, {faults[-1].seconds:.1f} s", flush=True)
            _wait(run)
            return faults, run.losses(), run.events("damaged") + run.events("finished")
        finally:
            run.end()


def undisturbed(folder: Path, ranks: int, steps: int, source: str = SOURCE) -> dict[int, float]:
    """The losses of the same run without faults."""
    run = Run(folder / "undisturbed", ranks, steps, 0, HANG_S, source)
    try:
        _wait(run)
        return run.losses()
    finally:
        run.end()


def _wait(run: Run) -> None:
    """Until the run has ended by itself; it may not stand still for longer than the limit."""
    seen, since = -1, time.monotonic()
    while run.torchrun.poll() is None:
        if run.step() != seen:
            seen, since = run.step(), time.monotonic()
        if time.monotonic() - since > LIMIT_S:
            raise TimeoutError(f"the run stood still at step {seen} for more than {LIMIT_S:.0f} s")
        time.sleep(0.1)
    if run.torchrun.returncode:
        code, log = run.torchrun.returncode, (run.out / "log").read_text()[-3000:]
        raise RuntimeError(f"the run ended with exit code {code}:\n{log}")


def kinds_for(count: int, seed: int) -> list[str]:
    """That many faults in random order, each kind equally often; no full disk where none can be made."""
    kinds = [kind for kind in KINDS if kind != DISK_FULL or can_fill_a_disk()]
    chosen = [kinds[i % len(kinds)] for i in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


def checks(faults: list[Fault], losses: dict[int, float], wanted: dict[int, float]) -> dict[str, bool]:
    """What has to hold, in words."""
    last = max(wanted)
    interrupted = [fault for fault in faults if fault.resumed is not None]
    behind = [fault for fault in interrupted if (fault.resumed or 0) < fault.saved]
    slowest = max(fault.seconds for fault in faults)
    apart = max(abs(losses.get(step, float("inf")) - loss) for step, loss in wanted.items())
    end = abs(losses.get(last, float("inf")) - wanted[last])
    return {
        f"the final loss differs from an undisturbed run's by {end:.1e} (limit 1e-6)": end <= 1e-6,
        f"the losses of all {last} steps differ by at most {apart:.1e} (limit 1e-6)": apart <= 1e-6,
        f"{len(behind)} of {len(interrupted)} restarts went behind the last checkpoint (limit 0)": not behind,
        f"the longest stop was {slowest:.1f} s (limit {LIMIT_S:.0f} s)": slowest <= LIMIT_S,
    }


def show(faults: list[Fault]) -> str:
    """By kind: how often, the steps that were done again, and how long it took to train again."""
    rows = []
    for kind in KINDS:
        if some := sorted((fault for fault in faults if fault.kind == kind), key=lambda fault: fault.seconds):
            middle, last = some[len(some) // 2].seconds, some[-1].seconds
            repeated = max(fault.repeated for fault in some)
            rows.append([kind, len(some), repeated, f"{middle:.1f}", f"{last:.1f}"])
    return table(["fault", "times", "steps again, at most", "s to train again", "at most"], rows)


def main() -> int:
    asked = options(__doc__, ranks=4, faults=25, steps=250, seed=0, record=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(describe())
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        begun = time.monotonic()
        wanted = undisturbed(Path(folder), asked.ranks, asked.steps)
        between = time.monotonic()
        end = f"final loss {wanted[max(wanted)]:.6f}"
        print(f"undisturbed: {asked.steps} steps in {between - begun:.0f} s, {end}")
        kinds = kinds_for(asked.faults, asked.seed)
        faults, losses, events = disturb(Path(folder), asked.ranks, asked.steps, kinds, asked.seed)
        took = time.monotonic() - between
    print(f"with {len(faults)} faults: {took:.0f} s, final loss {losses[max(losses)]:.6f}\n\n{show(faults)}")
    held = checks(faults, losses, wanted)
    if asked.record:
        settings = {name: getattr(asked, name) for name in ("ranks", "steps", "seed")}
        settings |= {"save_every": SAVE_EVERY, "hang_s": HANG_S, "limit_s": LIMIT_S}
        results = {
            "faults": [{**asdict(fault), "repeated": fault.repeated} for fault in faults],
            "losses": [losses[step] for step in sorted(losses)],
            "undisturbed_losses": [wanted[step] for step in sorted(wanted)],
            "seconds": {"undisturbed": between - begun, "disturbed": took},
            "damaged_checkpoints_passed_over": sum(event["event"] == "damaged" for event in events),
            "limits": held,
        }
        group = f"{asked.ranks} ranks on one host, gloo, torchrun with restarts"
        keep("chaos", __doc__, group=group, settings=settings, results=results)
    return limits(held)


if __name__ == "__main__":
    sys.exit(main())

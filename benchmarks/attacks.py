"""Does damage get through? Bits that flip in a checkpoint, headers that were forged, saves cut short.

    python benchmarks/attacks.py                    # 500 flips, 50 kills, 200 forged headers; Linux
    python benchmarks/attacks.py --quick            # a few of each

Each attack runs in a forked child that may take 30 seconds. It is survived (what was loaded is what was
saved), refused in words (CheckpointError, nothing changed), or failed: another error, a hang, something
silently wrong. The peer is plain DCP on a flip in its own files. Exits with 1 if any failed.
"""

import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.machine import describe, options, table
from fsdp_utils import (
    CheckpointError,
    checkpoints,
    load_distributed,
    load_pretrained,
    run_on_ranks,
    save_distributed,
    verify_checkpoint,
)

SURVIVED, REFUSED, WRONG, RAW, HANG = "survived", "refused", "silently wrong", "raw error", "hang"
STEP, LIMIT_S = 3, 30.0
STATE = {"data": [1, 2, 3], "pair": (1, 2.5, None)}
Outcome = tuple[str, str]  # one of the words above, and what happened


def model_and_optimizer(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every number of the model, and of its optimizer's state, is that value."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill(model, optimizer, value)
    return model, optimizer


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    for param in model.parameters():
        param.fill_(value)
        moments = {name: torch.full_like(param, value) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(value), **moments}


def holds(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> bool:
    tensors = [one for param in model.parameters() for one in (param, *optimizer.state[param].values())]
    return all(bool((one == value).all()) for one in tensors)


# ---- flips -----------------------------------------------------------------------------------------------


def save_all(folder: Path) -> None:
    """On two ranks, so that each tensor has two chunks and there is a file of every kind."""
    model, _ = model_and_optimizer(2.0)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill(model, optimizer, 2.0)
    own = {"rank": dist.get_rank()}
    save_distributed(folder / "home", model, optimizer, step=STEP, state=STATE, per_rank=own)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "plain")


def flip_bit(chance: random.Random, path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    path.write_bytes(changed)


def flip(folder: Path, chance: random.Random) -> Outcome:
    """Flip one bit of one file; the load refuses, and leaves model and optimizer as they were."""
    shutil.copytree(folder / "home", scratch := folder / "scratch")
    flip_bit(chance, path := chance.choice(sorted(checkpoints(scratch)[STEP].iterdir())))
    model, optimizer = model_and_optimizer(1.0)
    try:
        loaded = load_distributed(scratch, model, optimizer)
    except CheckpointError as error:
        return (REFUSED if holds(model, optimizer, 1.0) else WRONG), f"{path.name}: {error}"
    right = holds(model, optimizer, 2.0) and all(loaded[name] == value for name, value in STATE.items())
    return (SURVIVED if right else WRONG), f"{path.name}: was loaded"


def flip_in_plain_dcp(folder: Path, chance: random.Random) -> Outcome:
    shutil.copytree(folder / "plain", scratch := folder / "scratch")
    flip_bit(chance, chance.choice(sorted(scratch.iterdir())))
    model, _ = model_and_optimizer(1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"model": model.state_dict()}, checkpoint_id=scratch)
    except BaseException as error:
        return REFUSED, str(error)
    right = all(bool((param == 2.0).all()) for param in model.parameters())
    return (SURVIVED if right else WRONG), "was loaded"


# ---- folders of safetensors ------------------------------------------------------------------------------


def forge(folder: Path, chance: random.Random) -> Outcome:
    """Change the header or the length of a safetensors file: what its own library refuses is refused."""
    (scratch := folder / "scratch").mkdir()
    model, _ = model_and_optimizer(2.0)
    save_file(model.state_dict(), path := scratch / "model.safetensors", {"format": "pt"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    one, other = (header[chance.choice([name for name in header if name[0] != "_"])] for _ in range(2))
    changes: list[Callable[[], object]] = [
        lambda: one.update(data_offsets=other["data_offsets"]),  # two tensors over the same bytes
        lambda: one.update(data_offsets=[place + chance.choice((-8, 4)) for place in one["data_offsets"]]),
        lambda: one.update(shape=[2**32, 2**32], data_offsets=[0, 0]),  # the product, in 64 bits
        lambda: one.update(dtype=chance.choice(("F64", "x", None, 3))),
        lambda: one.update(shape=chance.choice((-1, [-1], "x", [True], [], [10**30]))),
        lambda: one.pop(chance.choice(sorted(one))),
    ]
    chance.choice(changes)()
    text = json.dumps(header).encode()
    said = len(text) + chance.choice((0, 0, 0, 1, -1, 2**62))
    path.write_bytes(said.to_bytes(8, "little") + text + rest + bytes(chance.choice((0, 0, 1))))
    model, _ = model_and_optimizer(1.0)
    try:
        load_pretrained(scratch, model)
    except CheckpointError as error:
        right = all(bool((param == 1.0).all()) for param in model.parameters())
        return (REFUSED if right else WRONG), str(error)
    wanted = load_file(path)  # an error of the library is a raw error here
    same = all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    return (SURVIVED if same else WRONG), "was loaded"


# ---- kills -----------------------------------------------------------------------------------------------


def save_on(folder: Path, asynchronous: bool, first: int, pipe: Connection) -> None:
    """Save step after step, until it is killed."""
    model, optimizer = nn.Linear(512, 1024), None
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(first, first + 10_000):
        fill(model, optimizer, step)
        pipe.send(("begins", step))
        save = save_distributed(folder, model, optimizer, step=step, keep=2, asynchronous=asynchronous)
        save.wait()
        pipe.send(("saved", step))


def kill(folder: Path, chance: random.Random) -> Outcome:
    """Kill a program anywhere in its second save, and again: what was saved before is there, whole."""
    fork, home = multiprocessing.get_context("fork"), folder / "killed"
    last = max(checkpoints(home), default=0)
    ours, theirs = fork.Pipe(duplex=False)
    saver = fork.Process(target=save_on, args=(home, chance.random() < 0.3, last + 1, theirs))
    saver.start()
    theirs.close()
    heard: list[tuple[str, int]] = []
    begun = time.monotonic()
    while [word for word, _ in heard].count("begins") < 2:
        begun = time.monotonic()
        heard.append(ours.recv())
    time.sleep(chance.uniform(0.0, 1.1) * (time.monotonic() - begun + 0.02))
    saver.kill()
    saver.join()
    try:
        while ours.poll(0.2):
            heard.append(ours.recv())
    except EOFError:
        pass
    told = max((step for word, step in heard if word == "saved"), default=last)
    verify_checkpoint(home)
    model = nn.Linear(512, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = load_distributed(home, model, optimizer)["step"]
    whole = told <= found <= told + 1 and holds(model, optimizer, found)
    return (SURVIVED if whole else WRONG), f"step {told} was saved, found {found}"


# ---- all of them -----------------------------------------------------------------------------------------

Attack = Callable[[Path, random.Random], Outcome]
ATTACKS: dict[str, tuple[Attack, int, int]] = {  # how many in the long form and in the short one
    "bit flips": (flip, 500, 6),
    "  plain DCP": (flip_in_plain_dcp, 500, 2),
    "forged safetensors": (forge, 200, 20),
    "kills in saves": (kill, 50, 2),
}


def in_a_child(attack: Attack, folder: Path, seed: str) -> Outcome:
    """Fork: this process has a single thread, and has imported all that is needed."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        logging.disable()  # plain DCP logs every error
        os.setsid()
        try:
            theirs.send(attack(folder, random.Random(seed)))
        except BaseException as error:
            theirs.send((RAW, f"{type(error).__name__}: {error}"))

    child = fork.Process(target=work)
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else (HANG, f"longer than {LIMIT_S:g} s")
    except EOFError:
        return RAW, "the process died"
    finally:
        if child.is_alive():
            try:
                os.killpg(child.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                child.kill()
        child.join()
        shutil.rmtree(folder / "scratch", ignore_errors=True)


def run(*, quick: bool, seed: int = 0) -> tuple[dict[str, Counter[str]], list[str]]:
    """Make all attacks; returns the outcomes by kind of attack, and the failures in words."""
    outcomes: dict[str, Counter[str]] = {}
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_on_ranks(save_all, folder, timeout=120)
        for name, (attack, long, short) in ATTACKS.items():
            outcomes[name] = Counter()
            for number in range(short if quick else long):
                word, text = in_a_child(attack, folder, f"{seed}/{number}")
                outcomes[name][word] += 1
                if word not in (SURVIVED, REFUSED) and attack is not flip_in_plain_dcp:
                    failures.append(f"{name} {number}: {word}: {text}")
    return outcomes, failures


def main(arguments: list[str] | None = None) -> int:
    asked = options(__doc__, arguments, quick=False, seed=0)
    if not sys.platform.startswith("linux"):
        print("attacks.py needs Linux: it forks and sends SIGKILL", file=sys.stderr)
        return 0
    start = time.monotonic()
    outcomes, failures = run(quick=asked.quick, seed=asked.seed)
    words = (SURVIVED, REFUSED, WRONG, RAW, HANG)
    print(describe())
    rows = [[name, found.total(), *(found[word] for word in words)] for name, found in outcomes.items()]
    print(table(["attack", "tried", *words], rows))
    print(f"{time.monotonic() - start:.0f} s, seed {asked.seed}")
    print(*failures[:20], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

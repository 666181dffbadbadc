"""The figure of the first page: a step under three wrappings, replayed on an assumed GPU."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_utils import record_collectives, run_on_ranks
from fsdp_utils.collectives import CollectiveTrace, Replay, play

WIDTH, RANKS = 128, 4
MODEL_BYTES = 4 * 16 * WIDTH**2  # four blocks of four matrices
FORWARD_S, SEND_S, BEGIN_S = 800e-6, 400e-6, 50e-6  # of the model, of the model, of each collective
WRAPPINGS = "one unit", "a unit for each block", "units too small"


def record(wrapping: str) -> CollectiveTrace:
    """Train a model of four equal blocks on this rank, and record the second step."""
    matrices = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)]
    blocks = [nn.Sequential(*matrices[i : i + 4]) for i in range(0, 16, 4)]
    model = nn.Sequential(*blocks)
    for unit in ([], blocks, matrices)[WRAPPINGS.index(wrapping)]:
        fully_shard(unit)
    fully_shard(model)
    model(torch.randn(8, WIDTH)).square().mean().backward()  # the first step also sets FSDP up
    with record_collectives(model) as trace:
        model(torch.randn(8, WIDTH)).square().mean().backward()
    return trace


def on_a_gpu(trace: CollectiveTrace, begin_s: float = BEGIN_S) -> Replay:
    """Replay a trace: each event takes as long as its bytes say, and a collective `begin_s` besides."""
    names = {"(root)": "model"}  # the player shows no root; here it is empty, or all there is
    events = [
        replace(e, seconds=begin_s + SEND_S * e.bytes / MODEL_BYTES, module=names.get(e.module, e.module))
        for e in trace.events
    ]
    sizes = {names.get(unit, unit): size for unit, size in trace.unit_bytes.items()}
    seconds = {unit: FORWARD_S * size / MODEL_BYTES for unit, size in sizes.items()}
    return replace(trace, events=events, unit_bytes=sizes).replay(compute_s=seconds, limit_reduces=1)


def gathered(run: Replay) -> float:
    """Return the largest part of the model that is gathered, or being gathered, at once."""
    held, most = {"": 0}, 0
    for span in sorted(run.spans, key=lambda span: (span.start, span.event.order)):
        if span.event.kind in ("all_gather", "free"):
            held[span.event.module] = span.event.bytes  # 0 where it is freed
        most = max(most, sum(held.values()))
    return most / MODEL_BYTES


def html() -> str:
    """Record the three steps; return the player and, beneath it, what the three take."""
    runs = {name: on_a_gpu(run_on_ranks(record, name, world_size=RANKS)[0]) for name in WRAPPINGS}
    rows = [
        f"<tr><td>{n}<td>{1e3 * run.step_s:.2f} ms<td>{100 * gathered(run):g}%" for n, run in runs.items()
    ]
    head = "<tr><th>wrapping<th>a step takes<th>of the weights, a rank holds at most"
    player = play(runs, choose=True)._repr_mimebundle_()["text/html"]
    return f"{player}\n<table class='table'>{head}{''.join(rows)}</table>\n"

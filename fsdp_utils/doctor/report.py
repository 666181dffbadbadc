"""Show the facts and the findings of a run, as text or as HTML."""

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from fsdp_utils.answers import explain
from fsdp_utils.doctor.findings import Facts

_MIB = 2**20
_BLIND = (
    "Not looked at: evaluation, what is saved, resuming, the learning-rate schedule, what the loss means. "
    "Not seen: the time of communication that computation does not hide, which takes a GPU; later steps"
)
_HTML = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>
pre {{ font: 15px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }}
pre {{ max-width: 110ch; margin: 2em auto; padding: 0 1em }}
.error {{ color: #e5484d }} .warning {{ color: #b87503 }}
</style><pre>{text}</pre></html>
"""


def page(result: dict[str, Any], *, html: bool = False) -> str:
    """Return the page: what is trained, what it holds and sends, what is wrong, what was not seen.

    `result` is what `python -m fsdp_utils doctor --json` prints. The HTML needs no other file.

    Example::

        from dataclasses import asdict
        from fsdp_utils.doctor.findings import Facts

        ranks = [asdict(Facts(rank=0, world_size=1, ended="finished"))]
        result = {"script": "train.py", "ranks": ranks, "findings": []}
        print(page(result).splitlines()[0])
        # train.py on 1 rank, 0 optimizer steps: rank 0 finished
    """
    lines = []
    for heading, rows in _parts(result):
        width = max((len(label) for label, _ in rows), default=0) + 2
        lines += [heading, *(f"  {label:<{width}}{text}" for label, text in rows)]
        lines += [""] * bool(rows)
    text = "\n".join(lines)
    if not html:
        return text
    text = re.sub(r"(?m)^(error|warning): .*", r'<b class="\1">\g<0></b>', escape(text))
    return _HTML.format(title=escape(f"doctor: {result['script']}"), text=text)


def _parts(result: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the parts of the page: a heading, and rows of a label and a text; code has no label."""
    ranks, found = [Facts(**one) for one in result["ranks"]], result["findings"]
    first, model = ranks[0], ranks[0].model
    ends = "; ".join(f"rank {one.rank} {one.ended if len(one.ended) < 10 else 'failed'}" for one in ranks)
    size, steps = first.world_size, len(first.seen)
    counts = f"{size} rank{'s' * (size != 1)}, {steps} optimizer step{'s' * (steps != 1)}"
    yield f"{result['script']} on {counts}: {ends}", []
    if model:
        by, left_out = ", ".join(model["optimizers"]), model["left_out"]
        trained = f"{model['trained']:,} of {model['elements']:,}"
        if model["plain"]:
            trained, by = f"{model['elements']:,}", f"{by}, without FSDP or DDP"
        units = [(name, f"{size / _MIB:.3g} MiB, {words}") for name, size, words in model["units"]]
        yield f"{'Require gradients' if left_out else f'Trained by {by}'}: {trained} parameters", units
        if model["fsdp_is_missing"]:
            yield "Accelerate was asked for FSDP, but shards nothing: it does so on accelerators alone", []
        if left_out:
            yield f"Not in {by}: {len(left_out)} of their tensors, such as {left_out[0]}", []
        held = " + ".join(f"{size / _MIB:.3g} MiB of {name}" for name, size in model["bytes"].items())
        yield f"Rank 0 holds {held} = {sum(model['bytes'].values()) / _MIB:.3g} MiB", []
    if first.seen:
        sizes: dict[str, list[int]] = {}
        for kind, size in first.seen[-1].get("calls", []):
            sizes.setdefault(kind, []).append(size)
        sent = ", ".join(f"{len(all_)} {kind} of {sum(all_) / _MIB:.3g} MiB" for kind, all_ in sizes.items())
        yield f"Step {steps} sent {sent or 'nothing'}", []
    if first.plan:
        yield first.plan, []
    yield f"Findings: {len(found)}" if found else "No finding.", []
    for one in found:
        rows = [("seen", one["evidence"]), ("at", one["place"].removeprefix("at "))]
        rows += [("costs", one["costs"]), ("cure", one["cure"])]
        rows += [("", line) for line in one.get("code", "").splitlines()]
        rows += [("lesson", str(one["lesson"]))]
        yield f"{one['severity']}: {one['id']}. {one['title']}", [row for row in rows if row[1]]
    yield from ((f"rank {r.rank} stood {r.places['stood']}", []) for r in ranks if "stood" in r.places)
    for text in dict.fromkeys(one.ended for one in ranks if one.ended.startswith("Traceback")):
        shown = [text.rstrip(), *(str(answer) for answer in explain(text)[:1])]
        yield "The error:", [("", line) for part in shown for line in part.splitlines()]
    yield "; ".join([_BLIND, *dict.fromkeys(first.unseen)]) + ".", []

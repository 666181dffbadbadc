"""Show the facts and the findings of a run as text."""

from collections import Counter
from typing import Any

from fsdp_utils.answers import explain
from fsdp_utils.doctor.findings import Facts

_MIB = 2**20
_BLIND = "Not seen: the time of communication that computation does not hide, which takes a GPU; later steps"


def page(result: dict[str, Any]) -> str:
    """Return the page: what is trained, what it holds and sends, what is wrong, what was not seen.

    `result` is what `python -m fsdp_utils doctor --json` prints.

    Example::

        from dataclasses import asdict
        from fsdp_utils.doctor.findings import Facts

        ranks = [asdict(Facts(rank=0, world_size=1, ended="finished"))]
        result = {"script": "train.py", "ranks": ranks, "findings": []}
        print(page(result).splitlines()[0])
        # train.py on 1 ranks, 0 optimizer steps: rank 0 finished
    """
    ranks, found = [Facts(**one) for one in result["ranks"]], result["findings"]
    first = ranks[0]
    ends = "; ".join(f"rank {one.rank} {one.ended if len(one.ended) < 10 else 'failed'}" for one in ranks)
    lines = [f"{result['script']} on {first.world_size} ranks, {len(first.seen)} optimizer steps: {ends}"]
    if model := first.model:
        held = ", ".join(f"{name} {size / _MIB:.3g} MiB" for name, size in model["bytes"].items())
        share = model["elements"] * 16 / first.world_size / _MIB
        elements, by = f"{model['trained']:,} of {model['elements']:,}", ", ".join(model["optimizers"])
        lines += [f"Trained: {elements} parameters by {by}"]
        lines += [f"  {name}: {size / _MIB:.3g} MiB, {words}" for name, size, words in model["units"]]
        lines += [f"Rank 0 holds {held}; 16 bytes a parameter would be {share:.3g} MiB on each rank"]
    if first.seen:
        sizes: Counter[str] = Counter()
        for kind, size in first.seen[-1].get("calls", []):
            sizes[kind] += size
        numbers = Counter(kind for kind, _ in first.seen[-1].get("calls", []))
        sent = ", ".join(f"{numbers[kind]} {kind} of {size / _MIB:.3g} MiB" for kind, size in sizes.items())
        lines += [f"Step {len(first.seen)} sent {sent or 'nothing'}"]
    lines += ["", f"Findings: {len(found)}" if found else "No finding."]
    for one in found:
        code = [f"          {line}" for line in one.get("code", "").splitlines()]
        lines += [f"{one['severity']}: {one['id']}. {one['title']}", f"  seen    {one['evidence']}"]
        lines += [f"  at      {one['place'].removeprefix('at ')}"] * bool(one["place"])
        lines += [
            f"  costs   {one['costs']}",
            f"  cure    {one['cure']}",
            *code,
            f"  lesson  {one['lesson']}",
            "",
        ]
    for one in ranks:
        if "stood" in one.places:
            lines.append(f"rank {one.rank} stood {one.places['stood']}")
    for text in dict.fromkeys(one.ended for one in ranks if one.ended.startswith("Traceback")):
        lines += [text.rstrip(), *(str(answer) for answer in explain(text)[:1])]
    return "\n".join([*lines, "", "; ".join([_BLIND, *dict.fromkeys(first.unseen)]) + "."])

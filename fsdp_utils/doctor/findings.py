"""Judge the facts of all ranks: a row of findings.yaml is found by a method, or lists, with its name."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("findings.yaml")
SEVERITIES = ("error", "warning", "advice")  # worst first
_TOKENS = 4  # forwards of growing or single tokens, without gradients, are a generation
_LARGE = 16 * 2**20  # bytes: larger parts of a block may be units
_ACTIVATIONS = 4 * 2**20  # bytes: less needs no checkpointing
_SAME = 1.01  # factors and numbers of labels that differ less are equal
_OTHERS = "parameters that are not the sharded model's"  # the optimizer has
_GATHERS = ("state_dict", "full_tensor", "summon_full_params", "StateDictOptions")


@dataclass
class Facts:
    """What one rank has seen, in values that JSON can hold.

    Each of `seen` is an optimizer step, as lists by name:
        calls: kind and bytes. reduced: elements of gradients. told: single numbers communicated. backwards:
        for each, how many were reduced before. in_ddp: a 1 for each forward of a DDP module. means: how often
        one line ran backward on a mean, and its name. inputs: their hashes and shapes, of each forward.
        labels: how many each mean was over. norm: that clip_grad_norm_ returned, if it is this rank's.
        scaled: gradients at the step, relative to after backward; bystanders: of parameters that no optimizer
        has. idle: blocks whose trained parameters have no gradient. bad: units whose gradients were NaN or
        infinite before the reduction. bad_after: such parameters after it. tokens: shapes of inputs without
        gradients. outside: all-gathers then. used, gathered: units, in order. Under the name of a finding:
        what its sentence is filled in with.
    """

    rank: int
    world_size: int
    ended: str = ""  # "stopped", "finished", "hang" or a traceback
    report: str = ""  # of check_in_step
    seen: list[dict[str, list[Any]]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # lines of the script
    loaders: list[int] = field(default_factory=list)  # batches of each DataLoader before the first step
    saved: list[str] = field(default_factory=list)  # files that torch.save wrote, after their host
    unseen: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # sentences of check_sharding
    kept: int = 0  # bytes of activations of one block
    first: dict[str, str] = field(default_factory=dict)  # hashes of parameters as they were sharded
    model: dict[str, Any] = field(default_factory=dict)  # see Models.describe
    plan: str = ""  # for --gpu


@functools.cache
def findings_table() -> list[dict[str, Any]]:
    """Return the rows of findings.yaml.

    Example::

        print(findings_table()[0]["id"])  # one_unit
    """
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def judge_step(step: dict[str, list[Any]], facts: Facts) -> None:
    """Add what a rank finds by itself to one of its steps."""
    model = facts.model
    reduced, backwards, trained = step["reduced"], step["backwards"], model["trained"]
    times, by_hand = len(backwards), sum(size for kind, size in step["calls"] if kind == "all_reduce")
    if times and model["peers"] and trained and not reduced and by_hand < 2 * trained:
        step["ddp_bypassed" if model["ddp"] and not step["in_ddp"] else "sync_off"] = [times]
    elif times and model["peers"] and reduced and backwards[-1] == len(reduced):
        step["last_unsynced"] = [times]
    elif times > 1 and sum(reduced) > 0.9 * times * trained > 0:
        step["sync_each_micro_batch"] = [times]
    scale, other = _scale(step["scaled"]), _scale(step["bystanders"])
    for count, node in step["means"] if step["scaled"] else ():
        if not 0 < scale * count < _SAME:  # else they were divided, or clipped to less
            step["undivided_losses"] += [count, node]
    has_others = any(_OTHERS in one for one in facts.problems)  # it should have those that it leaves out
    if scale < 1 / _SAME and max(scale, other) < _SAME * min(scale, other) and not has_others:
        step["clip_of_all"] = [scale, len(model["left_out"]), model["left_out"][0]]
    pairs = ((a, b) for a, b in pairwise(step["tokens"]) if len(a) == len(b) > 1)
    tokens = sum(b[1] in (1, a[1] + 1) for a, b in pairs)
    if tokens >= _TOKENS and len(step["outside"]) >= tokens:
        step["gathers_per_token"] = [tokens, len(step["outside"])]
    used, gathered = ([*dict.fromkeys(step[name])] for name in ("used", "gathered"))
    orders = zip(
        [one for one in used if one in gathered], [one for one in gathered if one in used], strict=True
    )
    step["cold_prefetch"] = [name for pair in orders if pair[0] != pair[1] for name in pair]


def judge(ranks: list[Facts]) -> list[dict[str, Any]]:
    """Return the rows of what is wrong, worst first, with the evidence and the script's line."""
    evidence, found = Evidence(ranks), []
    said = [*dict.fromkeys(sentence for facts in ranks for sentence in facts.problems)]
    said += [facts.ended.strip().splitlines()[-1] for facts in ranks if facts.ended.startswith("Traceback")]
    for row in findings_table():
        shown = [*evidence.of(row)]
        shown += [one for one in said if any(words in one for words in row.get("says", []))]
        if shown:
            places = [facts.places[row["at"]] for facts in ranks if row["at"] in facts.places]
            found.append({**row, "evidence": shown[0], "place": "".join(places[:1])})
    return sorted(found, key=lambda one: SEVERITIES.index(one["severity"]))


class Evidence:
    """A method with the name of a finding yields sentences, or what its row's sentence is filled in with."""

    def __init__(self, ranks: list[Facts]) -> None:
        self._ranks, self._model = ranks, ranks[0].model
        self._all = f"ranks 0 to {len(ranks) - 1}"

    def of(self, row: dict[str, Any]) -> Iterator[str]:
        """Yield the evidence of a row, from its method, or from lists in the model and in rank 0's steps."""
        if not all(self._model.get(need) for need in row.get("needs", [])):
            return
        if method := getattr(self, row["id"], None):
            yield from (one if isinstance(one, str) else row["seen"].format(*one) for one in method())
        for number, some in enumerate(facts.get(row["id"]) for facts in (self._model, *self._ranks[0].seen)):
            if some and not method:
                yield row["seen"].format(*some, step=number, count=len(some))

    def _each(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield the number of each step that all ranks have taken, and what each rank did in it, by name."""
        for number, steps in enumerate(zip(*(facts.seen for facts in self._ranks), strict=False), 1):
            yield number, *([step.get(name, []) for step in steps] for name in names)

    def _is_apart(self, *findings: str) -> bool:
        return any(
            step.get(one) for step in self._ranks[0].seen for one in ("sync_off", "ddp_bypassed", *findings)
        )

    def _said(self, words: str) -> list[str]:
        """Return the sentences of check_sharding with these words."""
        return [one for one in self._ranks[0].problems if words in one]

    def _reports(self, *words: str) -> list[str]:
        """Return check_in_step's reports in which one of the words is."""
        return [one.report for one in self._ranks if one.report and any(word in one.report for word in words)]

    def one_unit(self) -> list[str]:
        is_alone = len(self._model.get("units", [])) == 1  # else an embedding may hold most of a small model
        return self._said("of the parameters are in one unit") if is_alone else []

    def small_units(self) -> Iterator[Any]:
        parts, blocks = self._model.get("parts", []), self._model.get("blocks", 0)
        if len(parts) >= 2 * blocks > 0 and statistics.mean(parts) < _LARGE:
            yield len(parts), blocks, statistics.mean(parts) / 2**20

    def ranks_alone(self) -> Iterator[Any]:
        steps = [step for facts in self._ranks for step in facts.seen]
        if steps and all(one.get("backwards") and not one.get("calls") for one in steps):
            yield (self._all,)

    def no_gradient(self) -> Iterator[Any]:
        idle = [{*step.get("idle", [])} for facts in self._ranks for step in facts.seen]
        never = sorted(set.intersection(*idle)) if len(idle) > len(self._ranks) else []
        if never and not self._is_apart():
            yield len(never), self._model["blocks"], never[0]

    def different_init(self) -> Iterator[Any]:
        first = [facts.first for facts in self._ranks]
        differ = [name for name in first[0] if len({one[name] for one in first if name in one}) > 1]
        if differ:
            yield len(differ), differ[0], self._all

    def same_samples(self, *, in_stream: bool = False) -> Iterator[Any]:
        places = self._ranks[0].places
        inputs = [[one for step in facts.seen for one in step.get("inputs", [])] for facts in self._ranks]
        if in_stream == ("stream" in places and "loader" not in places):
            yield from self._shared([[str(one)] if one else [] for one in inputs])

    def same_stream(self) -> Iterator[Any]:
        return self.same_samples(in_stream=True)

    def same_input(self) -> Iterator[Any]:
        """A value for each sample that is new in each forward, and equal on ranks that differ in another."""
        forwards = (ranks for _, steps in self._each("inputs") for ranks in zip(*steps, strict=False))
        tensors = [*zip(*(zip(*ranks, strict=False) for ranks in forwards), strict=False)]
        differ = [one[0][0][1][:1] for one in tensors if all(len({*map(str, some)}) > 1 for some in one)]
        for one in tensors:
            said, shapes = zip(*(some[0] for some in one), strict=True)
            is_same = all(len({*map(str, some)}) == 1 for some in one) and shapes.count(shapes[0]) == len(one)
            if is_same and all(said) and len({*said}) == len(one) > 1 and shapes[0][:1] in differ:
                yield shapes[0], self._all

    def same_file(self) -> Iterator[Any]:
        return self._shared([facts.saved for facts in self._ranks])

    def _shared(self, had: list[list[str]]) -> Iterator[tuple[str, str]]:
        """Yield what several ranks had, and their names."""
        # It imports torch, which showing a page need not.
        from fsdp_utils.distributed.agreement import rank_names

        for one in dict.fromkeys(one for some in had for one in some):
            ranks = [facts.rank for facts, some in zip(self._ranks, had, strict=True) if one in some]
            if len(ranks) > 1:
                yield one, rank_names(ranks)

    def unequal_samples(self) -> Iterator[Any]:
        for lengths in zip(*(facts.loaders for facts in self._ranks), strict=False):
            if len({*lengths}) > 1:
                yield ", ".join(map(str, lengths)), self._all
        if not self._reports(*_GATHERS):
            yield from self._reports("has left the block")

    def rank0_state_dict(self) -> list[str]:
        return self._reports(*_GATHERS)

    def ranks_part(self) -> list[str]:
        return [] if self._reports(*_GATHERS, "left the block") else self._reports("")  # by an exception

    def unweighted_loss(self) -> Iterator[Any]:
        for number, steps, told in self._each("labels", "told"):
            labels = [sum(one) for one in steps]
            weighs = any({*map(float, (*one, sum(one)))} & {*told[rank]} for rank, one in enumerate(steps))
            if min(labels) and max(labels) > _SAME * min(labels) and not weighs:
                yield number, self._all, ", ".join(map(str, labels)), max(labels) / min(labels)

    def local_clip(self) -> Iterator[Any]:
        # where gradients are not reduced, and in models that differ, each rank has a norm of its own
        is_apart = self._is_apart("last_unsynced") or self._said("Replicas of a parameter")
        for number, scaled, norms in self._each("scaled", "norm"):
            for what, found in ("factors", [*map(_scale, scaled)]), ("norms", [*map(sum, norms)]):
                if all(found) and max(found) > _SAME * min(found) and not is_apart:
                    yield number, self._all, f"{what} of {', '.join(f'{one:.3g}' for one in found)}"

    def hybrid_not_synced(self) -> list[str]:
        return self._said("Replicas of a parameter") if self._model.get("hybrid_fsdp1") else []

    def replicas_differ(self) -> list[str]:
        other = self._model.get("ddp_unfrozen") or self._is_apart("last_unsynced") or self.hybrid_not_synced()
        return [] if other else self._said("Replicas of a parameter")

    def big_activation(self) -> Iterator[Any]:
        kept, shards = self._ranks[0].kept, sum(self._model.get("bytes", {}).values())
        if shards and kept > max(shards, _ACTIVATIONS):
            yield kept / 2**20, shards / 2**20

    def bad_gradients(self) -> Iterator[Any]:
        for name in ("bad", "bad_after"):  # before the reduction, which gives them to all ranks, and after it
            for number, steps in self._each(name):
                yield from ((number, rank, bad[0]) for rank, bad in enumerate(steps) if bad)


def _scale(factors: list[float]) -> float:
    """Return the factor that all gradients were scaled by, 0 if there is none."""
    return statistics.median(factors) if factors and max(factors) < _SAME * min(factors) else 0.0

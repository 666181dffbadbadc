"""Judge the facts of all ranks, by the rows of findings.yaml and the methods of `Evidence`."""

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
_GATHERS = ("state_dict", "full_tensor", "summon_full_params", "StateDictOptions")


@dataclass
class Facts:
    """What one rank has seen, in values that JSON can hold.

    Each of `seen` is an optimizer step, as lists by name:
        calls: kind and bytes. reduced: dtype and elements of gradients. told: single numbers communicated.
        backwards: a 1 for each. before_last: the number of `reduced` before the last of these. in_ddp: a 1
        for each forward of a DDP module. means: how often one line ran backward on a mean, and its name.
        inputs: their hashes, of each forward. labels: how many each mean was over.
        scaled: gradients at the step, relative to after backward; bystanders: of parameters that no optimizer
        has. idle: blocks whose trained parameters have no gradient. bad: units whose gradients were NaN or
        infinite before the reduction. bad_after: such parameters after it. tokens: shapes of inputs without
        gradients. outside: all-gathers then. used, gathered: units, in order. Under the name of a finding:
        what the sentence of its row is filled in with.
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


def judge(ranks: list[Facts]) -> list[dict[str, Any]]:
    """Return the rows of what is wrong, worst first, with the evidence and the script's line."""
    evidence, found = Evidence(ranks), []
    said = [*dict.fromkeys(sentence for facts in ranks for sentence in facts.problems)]
    said += [facts.ended.strip().splitlines()[-1] for facts in ranks if facts.ended.startswith("Traceback")]
    for row in findings_table():
        own = getattr(evidence, row["id"], None)
        shown = [*(own() if own else evidence.listed(row))]
        shown += [one for one in said if any(words in one for words in row.get("says", []))]
        if shown:
            places = [facts.places[row["at"]] for facts in ranks if row["at"] in facts.places]
            found.append({**row, "evidence": shown[0], "place": "".join(places[:1])})
    return sorted(found, key=lambda one: SEVERITIES.index(one["severity"]))


class Evidence:
    """Each public method but `listed` yields the evidence of the finding with its name, if there is any."""

    def __init__(self, ranks: list[Facts]) -> None:
        self._ranks, self._model = ranks, ranks[0].model
        self._all = f"ranks 0 to {len(ranks) - 1}"

    def _each(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield the number of each step that all ranks have taken, and what each rank did in it, by name."""
        for number, steps in enumerate(zip(*(facts.seen for facts in self._ranks), strict=False), 1):
            yield number, *([step.get(name, []) for step in steps] for name in names)

    def listed(self, row: dict[str, Any]) -> Iterator[str]:
        """Yield the row's sentence, where the model or a step has a list under the finding's name."""
        lists = [(number, steps[0]) for number, steps in self._each(row["id"])]
        for number, some in [(0, self._model.get(row["id"])), *lists]:
            if some:
                yield row["seen"].format(*some, step=number, count=len(some))

    def _said(self, *words: str) -> Iterator[str]:
        """Yield the sentences of check_sharding in which one of the words is."""
        return (one for one in self._ranks[0].problems if any(word in one for word in words))

    def _reports(self, *words: str) -> Iterator[str]:
        """Yield check_in_step's report where one of the words is in it."""
        reports = (facts.report for facts in self._ranks if facts.report)
        return (report for report in reports if any(word in report for word in words))

    def one_unit(self) -> Iterator[str]:
        if len(self._model.get("units", [])) == 1:  # else an embedding may hold most of a small model
            yield from self._said("of the parameters are in one unit")

    def small_units(self) -> Iterator[str]:
        parts, blocks = self._model.get("parts", []), self._model.get("blocks", 0)
        if len(parts) >= 2 * blocks > 0 and statistics.mean(parts) < _LARGE:
            mean = statistics.mean(parts) / 2**20
            yield f"{len(parts)} units lie inside {blocks} blocks, of {mean:.3g} MiB in the mean."

    def bf16_reduce(self) -> Iterator[str]:
        for number, steps in self._each("reduced"):
            for dtype, elements in steps[0]:
                if dtype in ("bfloat16", "float16") and self._model.get("by_data"):
                    yield f"Step {number} reduced gradients in {dtype}, {elements:,} elements in one call."

    def ranks_alone(self) -> Iterator[str]:
        steps = [step for facts in self._ranks for step in facts.seen]
        is_plain = not self._model.get("wrapped", True) and len(self._ranks) > 1
        if is_plain and steps and all(one.get("backwards") and not one.get("calls") for one in steps):
            yield f"In all steps {self._all} ran backward and sent each other nothing."

    def sync_off(self) -> Iterator[str]:
        yield from self._unsynced(False)

    def ddp_bypassed(self) -> Iterator[str]:
        yield from self._unsynced(True)

    def _unsynced(self, *bypassed: bool) -> Iterator[str]:
        if len(self._ranks) == 1:  # there is nobody to reduce with
            return
        for number, reduced, backwards, in_ddp in self._each("reduced", "backwards", "in_ddp"):
            is_bypassed = bool(self._model.get("ddp")) and not any(in_ddp)
            is_asked = not bypassed or is_bypassed in bypassed
            if is_asked and self._model.get("trained") and backwards[0] and not any(reduced):
                how = ", without a forward of the DDP model itself" * is_bypassed
                yield f"Step {number} ran backward and reduced no gradients over the ranks{how}."

    def last_unsynced(self) -> Iterator[str]:
        for number, (reduced, *_), (before_last, *_) in self._each("reduced", "before_last"):
            if len(self._ranks) > 1 and reduced and before_last == [len(reduced)]:
                yield f"The last backward of step {number} reduced no gradients, and one before it did."

    def sync_each_micro_batch(self) -> Iterator[str]:
        for number, reduced, backwards in self._each("reduced", "backwards"):
            times, trained = len(backwards[0]), self._model.get("trained", 0)
            all_ = sum(elements for _, elements in reduced[0])
            if self._model.get("by_data") and times > 1 and all_ > 0.9 * times * trained > 0:
                yield f"Step {number} ran backward {times} times and reduced each time."

    def undivided_losses(self) -> Iterator[str]:
        for number, means, scaled in self._each("means", "scaled"):
            for times, node in means[0]:
                # else they were divided, or clipped to less
                if scaled[0] and not 0 < _scale(scaled[0]) * times < _SAME:
                    yield (
                        f"Step {number} ran backward {times} times on one line, each on a mean ({node}): "
                        f"the gradients are {times} times those of the mean over all samples."
                    )

    def no_gradient(self) -> Iterator[str]:
        idle = [{*step.get("idle", [])} for facts in self._ranks for step in facts.seen]
        never = sorted(set.intersection(*idle)) if len(idle) > len(self._ranks) else []
        if never and not [*self._unsynced()]:
            blocks = f"{len(never)} of {self._model.get('blocks')} blocks, such as {never[0]}"
            yield f"In no step a trained parameter of {blocks}, got a gradient."

    def different_init(self) -> Iterator[str]:
        first = [facts.first for facts in self._ranks]
        differ = [name for name in first[0] if len({one[name] for one in first if name in one}) > 1]
        if differ and self._model.get("by_data"):
            yield (
                f"{len(differ)} parameters, such as {differ[0]}, were not equal on {self._all} when "
                "fully_shard cut them, and nothing has replaced them before the first step."
            )

    def same_samples(self) -> Iterator[str]:
        yield from self._same(stream=False)

    def same_stream(self) -> Iterator[str]:
        yield from self._same(stream=True)

    def _same(self, *, stream: bool) -> Iterator[str]:
        places = self._ranks[0].places
        if stream != ("stream" in places and "loader" not in places):
            return
        inputs = [[one for step in facts.seen for one in step.get("inputs", [])] for facts in self._ranks]
        if self._model.get("by_data"):
            for _, same in self._shared([[str(one)] if one else [] for one in inputs]):
                yield f"In each step {same} gave the model equal inputs."

    def same_file(self) -> Iterator[str]:
        for file, same in self._shared([facts.saved for facts in self._ranks]):
            yield f"torch.save wrote {file} on {same}."

    def _shared(self, had: list[list[str]]) -> Iterator[tuple[str, str]]:
        """Yield what several ranks had, and their names."""
        # It imports torch, which showing a page need not.
        from fsdp_utils.distributed.agreement import rank_names

        for one in dict.fromkeys(one for some in had for one in some):
            ranks = [facts.rank for facts, some in zip(self._ranks, had, strict=True) if one in some]
            if len(ranks) > 1:
                yield one, rank_names(ranks)

    def unequal_samples(self) -> Iterator[str]:
        for lengths in zip(*(facts.loaders for facts in self._ranks), strict=False):
            if len({*lengths}) > 1:
                yield f"A DataLoader has {', '.join(map(str, lengths))} batches on {self._all}."
        if not [*self._reports(*_GATHERS)]:
            yield from self._reports("has left the block")

    def rank0_state_dict(self) -> Iterator[str]:
        yield from self._reports(*_GATHERS)

    def ranks_part(self) -> Iterator[str]:
        if not [*self._reports(*_GATHERS, "has left the block")]:
            yield from self._reports("")

    def unweighted_loss(self) -> Iterator[str]:
        for number, steps, told in self._each("labels", "told"):
            labels = [sum(one) for one in steps]
            weighs = any({*map(float, (*one, sum(one)))} & {*told[rank]} for rank, one in enumerate(steps))
            if min(labels) and max(labels) > _SAME * min(labels) and not weighs:
                ratio, counts = max(labels) / min(labels), ", ".join(map(str, labels))
                yield (
                    f"In step {number} the means of {self._all} were over {counts} labels: a label weighs up "
                    f"to {ratio:.2g} times as much as one of another rank."
                )

    def local_clip(self) -> Iterator[str]:
        if [*self._unsynced()]:  # each rank has a norm of its own then
            return
        for number, steps in self._each("scaled"):
            scales = [*map(_scale, steps)]
            if all(scales) and max(scales) > _SAME * min(scales):
                factors = ", ".join(f"{scale:.3g}" for scale in scales)
                yield f"Before step {number} {self._all} scaled their gradients by {factors}."

    def clip_of_all(self) -> Iterator[str]:
        if [*self._said("parameters that are not the sharded model's")]:  # which the optimizer should have
            return
        for number, *both in self._each("scaled", "bystanders"):
            scale, other = (_scale(steps[0]) for steps in both)
            if scale < 1 / _SAME and max(scale, other) < _SAME * min(scale, other):
                left_out = self._model["left_out"]
                yield (
                    f"Before step {number} gradients of {len(left_out)} parameters that no optimizer trains, "
                    f"such as {left_out[0]}, were scaled by {scale:.3g} together with the trained ones."
                )

    def hybrid_not_synced(self) -> Iterator[str]:
        yield from self._differing(hybrid=True)

    def replicas_differ(self) -> Iterator[str]:
        yield from self._differing(hybrid=False)

    def _differing(self, *, hybrid: bool) -> Iterator[str]:
        other = self._model.get("ddp_unfrozen") or [*self._unsynced(), *self.last_unsynced()]
        if self._model.get("hybrid_fsdp1") == hybrid and not other:
            yield from self._said("Replicas of a parameter")

    def dropout_rng(self) -> Iterator[str]:
        if "without_rng" in self._ranks[0].places and self._model.get("drops"):
            yield "A checkpoint has preserve_rng_state=False, and the model has dropout."

    def big_activation(self) -> Iterator[str]:
        kept, shards = self._ranks[0].kept, sum(self._model.get("bytes", {}).values())
        if shards and kept > max(shards, _ACTIVATIONS):
            yield (
                f"Autograd keeps {kept / 2**20:.0f} MiB of one block; parameters, gradients and optimizer "
                f"states of rank 0 are {shards / 2**20:.3g} MiB."
            )

    def bad_gradients(self) -> Iterator[str]:
        for name in ("bad", "bad_after"):  # before the reduction, which gives them to all ranks, and after it
            for number, steps in self._each(name):
                for rank, bad in enumerate(steps):
                    if bad:
                        yield f"Step {number} took NaN or infinite gradients of rank {rank}: {bad[0]}."

    def gathers_per_token(self) -> Iterator[str]:
        for number, (shapes, *_), (outside, *_) in self._each("tokens", "outside"):
            pairs = ((a, b) for a, b in pairwise(shapes) if len(a) == len(b) > 1)
            tokens = sum(b[1] in (1, a[1] + 1) for a, b in pairs)
            if tokens >= _TOKENS and len(outside) >= tokens:
                yield f"Around step {number}, {tokens} tokens took {len(outside)} all-gathers."

    def cold_prefetch(self) -> Iterator[str]:
        for number, (used, *_), (gathered, *_) in self._each("used", "gathered"):
            a = [one for one in dict.fromkeys(used) if one in gathered]
            b = [one for one in dict.fromkeys(gathered) if one in used]
            if unequal := [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]]:
                yield f"Step {number} used {unequal[0][0]} next, and gathered {unequal[0][1]} before it."


def _scale(factors: list[float]) -> float:
    """Return the factor that all gradients were scaled by, 0 if there is none."""
    return statistics.median(factors) if factors and max(factors) < _SAME * min(factors) else 0.0

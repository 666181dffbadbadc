"""The replay, held against schedules that were worked out by hand, its figures, and the file for Perfetto."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_utils.collectives import CollectiveTrace, StepEvent

GIB = 2**30
BETWEEN, WITHIN = "between hosts", "within a host"


def gather(unit: str, phase: str) -> StepEvent:
    """Two ranks: each sends half a GiB."""
    return StepEvent(0, "all_gather", unit, phase, GIB // 2, GIB, (0, 1), WITHIN, 0.0, 0.3)


def reduce(unit: str) -> StepEvent:
    return StepEvent(0, "reduce_scatter", unit, "backward", GIB, GIB // 2, (0, 1), WITHIN, 0.0, 0.3)


def compute(unit: str, phase: str, seconds: float = 0.1) -> StepEvent:
    return StepEvent(0, "compute", unit, phase, seconds=seconds)


def free(unit: str, phase: str) -> StepEvent:
    return StepEvent(0, "free", unit, phase, seconds=0.0)


def trace_of(events: list[StepEvent]) -> CollectiveTrace:
    units = dict.fromkeys("abcd", GIB)
    return CollectiveTrace(0, 2, units, [replace(event, order=i) for i, event in enumerate(events)])


def backward(order: str) -> CollectiveTrace:
    """A backward pass of two units, a and b, in letters: A gathers a, m computes, f frees, R reduces."""
    makes = {"A": gather, "m": compute, "f": free, "R": lambda unit, _: reduce(unit)}
    return trace_of([makes[word[0]](word[1], "backward") for word in order.split()])


def lanes(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


NONE = "Ab mb fb Rb Aa ma fa Ra"
POST = "Ab mb fb Aa Rb ma fa Ra"
PRE = "Ab Aa mb fb Rb ma fa Ra"


def test_without_prefetch_the_next_gather_waits_for_the_reduce():
    # compute 2 x 1 s in backward; each collective 0.5 GiB at 1 GiB/s = 0.5 s
    result = backward(NONE).replay(compute_s=1.0, link_gib_s=1.0)
    #       Ab 0-0.5, mb 0.5-2.5, Rb 2.5-3, Aa 3-3.5, ma 3.5-5.5, Ra 5.5-6
    assert result.step_s == pytest.approx(6.0)
    assert result.exposed_s == pytest.approx(2.0)
    assert result.compute_s == pytest.approx(4.0)


def test_what_the_model_sends_holds_up_its_computation_and_nothing_else():
    trace = backward("Ab Aa mb mb fb Rb ma fa Ra")
    where = "backward", GIB, GIB, (0, 1), BETWEEN
    tensor_parallel = StepEvent(0, "all_reduce", "", *where, seconds=0.1, dimension="tp")
    trace = trace_of([*trace.events[:3], tensor_parallel, *trace.events[3:]])
    speeds = {WITHIN: 0.25, BETWEEN: 1.0}
    result = trace.replay(compute_s=1.0, link_gib_s=speeds)
    # gathers 2 s each, computation 2 s for each unit, what the model sends 1 s:
    # Ab 0-2, mb 2-4, tp 4-5 although Aa 2-4 and nothing of FSDP runs; mb, its second part, takes none;
    # ma 5-7 beside Rb 5-7; Ra 7-9
    spans = {f"{s.event.kind} {s.event.module}": (s.start, s.end) for s in result.spans}
    assert spans["all_reduce "] == (4.0, 5.0)
    assert spans["compute a"] == (5.0, 7.0)
    assert result.step_s == pytest.approx(9.0)
    assert result.exposed_s == pytest.approx(2.0 + 1.0 + 2.0)
    # a gather that takes longer than that does not hold it up
    slow = trace.replay(compute_s=1.0, link_gib_s={**speeds, WITHIN: 0.1})
    assert next(s.start for s in slow.spans if s.event.dimension == "tp") == pytest.approx(7.0)
    assert lanes(trace.plot()) == ["compute", "communication", "tp"]


@pytest.mark.parametrize("order", [POST, PRE])
def test_with_prefetch_the_next_gather_runs_behind_computation(order):
    # Ab 0-0.5, Aa 0.5-1, mb 0.5-2.5, Rb 2.5-3 beside ma 2.5-4.5, Ra 4.5-5
    result = backward(order).replay(compute_s=1.0, link_gib_s=1.0)
    assert result.step_s == pytest.approx(5.0)
    assert result.exposed_s == pytest.approx(1.0)


def test_a_slow_cpu_issues_late_what_stands_behind_a_computation():
    # In backward, a computation takes 0.5 s, and its issue 2 s: it ends with its issue. A collective: 0.5 s.
    def starts(order: str) -> dict[str, float]:
        result = backward(order).replay(compute_s=0.25, link_gib_s=1.0, issue_s=1.0)
        assert result.step_s == pytest.approx(4.5)
        assert result.compute_s == pytest.approx(3.5 if order == PRE else 3.0)  # from the first kernel on
        return {word: span.start for word, span in zip(order.split(), result.spans, strict=True)}

    post, pre = starts(POST), starts(PRE)
    assert [post[word] for word in ("Ab", "mb", "Aa", "Rb", "ma")] == pytest.approx([0, 0.5, 2, 2.5, 2.5])
    assert [pre[word] for word in ("Ab", "Aa", "mb", "Rb", "ma")] == pytest.approx([0, 0.5, 0.5, 2, 2])


def test_the_limit_holds_back_a_gather_until_a_unit_is_done():
    events = [
        event
        for unit in "abcd"
        for event in (gather(unit, "forward"), compute(unit, "forward"), free(unit, "forward"))
    ]
    # gathers of 0.5 s, computations of 1 s; with a limit c waits for a, d for b
    for limit, starts in ((2, [0, 0.5, 1.5, 2.5]), (None, [0, 0.5, 1, 1.5])):
        run = trace_of(events).replay(compute_s=1.0, link_gib_s=1.0, limit_units=limit)
        assert [s.start for s in run.spans if s.event.kind == "all_gather"] == pytest.approx(starts)


def test_the_limit_of_reduces_holds_back_the_computation_after_the_second_one():
    # computations of 1 s, collectives of 2 s: gathers until 6, Rc 6-8, Rb 8-10; a is there at 6
    trace = backward("Ac Ab Aa mc fc Rc mb fb Rb ma fa Ra")
    for limit, start in ((None, 6), (2, 6), (1, 8)):  # with 1 it waits for Rc
        run = trace.replay(compute_s=0.5, link_gib_s=0.25, limit_reduces=limit)
        assert [s.start for s in run.spans if s.event.kind == "compute"] == pytest.approx([2, 4, start])
        assert run.step_s == pytest.approx(12)


def test_durations_by_name_by_link_and_as_recorded():
    trace = backward(NONE)
    trace.events[4] = replace(trace.events[4], link=BETWEEN)  # the gather of a

    def lengths(**options: Any) -> list[float]:
        return [round(span.end - span.start, 3) for span in trace.replay(**options).spans]

    by_name = lengths(compute_s={"a": 1.0}, link_gib_s={WITHIN: 1.0, BETWEEN: 0.1})
    assert by_name == [0.5, 0.0, 0.0, 0.5, 5.0, 2.0, 0.0, 0.5]
    assert lengths() == [0.3, 0.1, 0, 0.3, 0.3, 0.1, 0, 0.3]


def bucket(number: int, nbytes: int) -> StepEvent:
    return StepEvent(0, "all_reduce", f"bucket {number}", "backward", nbytes, nbytes, (0, 1), WITHIN)


def computing(events: list[StepEvent], compute_s) -> list[float]:
    """Seconds of each computation in the replay."""
    spans = trace_of(events).replay(compute_s=compute_s, link_gib_s=1.0).spans
    return [round(span.end - span.start, 6) for span in spans if span.event.kind == "compute"]


def test_ddp_computes_for_each_bucket_as_long_as_its_bytes_say():
    root = compute("(root)", "backward")
    step = [
        compute("(root)", "forward"),
        *(root, bucket(0, GIB)),
        *(root, bucket(1, GIB // 2), bucket(2, GIB // 2)),
        *(root, bucket(3, 2 * GIB)),
        root,
    ]
    assert computing(step * 2, {"(root)": 1.0}) == [1.0, 0.5, 0.5, 1.0, 0.0] * 2


def test_a_head_and_an_embedding_share_the_time_of_their_unit():
    forward = [compute(unit, "forward") for unit in ("a", "b", "a")]
    backward = [compute(unit, "backward") for unit in ("a", "b", "a")]
    assert computing([*forward, *backward] * 2, 1.0) == [0.5, 1.0, 0.5, 1.0, 2.0, 1.0] * 2


def test_a_duration_that_nobody_has_seen_is_not_made_up():
    trace = backward(NONE)
    trace.events[3].seconds = None
    with pytest.raises(ValueError, match=r"for event 3 \(reduce_scatter b\). Give link_gib_s"):
        trace.replay()
    assert trace.replay(link_gib_s=1.0).step_s > 0


def test_figures_show_every_bar_in_its_lane():
    trace = backward(PRE)
    recorded = trace.plot()
    assert lanes(recorded) == ["compute", "communication"]
    assert len(recorded.axes[0].patches) == 6
    bars = recorded.axes[0].patches
    assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(300)  # ms
    assert len({bar.get_facecolor() for bar in bars}) == 2  # one colour for each unit


# ---- the file for Perfetto, held against the Trace Event Format ------------------------------------------

EVENTS = [
    StepEvent(0, "all_gather", "b", "forward", 8, 16, (0, 1), "within a host", 0.0, 0.5, "fsdp"),
    StepEvent(1, "all_gather", "a", "forward", 4, 8, (0, 1), "within a host", 0.25, 0.5, "fsdp"),
    StepEvent(2, "compute", "b", "forward", start=0.5, seconds=1.0),
    StepEvent(3, "free", "b", "forward", start=1.5, seconds=0.0),
    StepEvent(4, "recv", "", "other", 0, 4, (0, 1), "within a host", 1.5, None),
]


def written(tmp_path: Path, *ranks: int) -> list[dict]:
    first, *others = (CollectiveTrace(rank, 2, {"a": 8, "b": 16}, list(EVENTS)) for rank in ranks)
    first.to_perfetto(tmp_path / "trace.json", *others)
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_ranks_are_processes_and_kinds_threads(tmp_path: Path):
    events = written(tmp_path, 0, 1)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["all_gather", "all_gather", "compute", "free"]  # two that overlap have two threads


def test_times_are_microseconds_and_bytes_are_told(tmp_path: Path):
    events = [event for event in written(tmp_path, 0) if event["ph"] != "M"]
    assert [(e["ph"], e["name"], e["ts"], e.get("dur")) for e in events] == [
        ("X", "all_gather b", 0.0, 5e5),
        ("X", "all_gather a", 2.5e5, 5e5),
        ("X", "compute b", 5e5, 1e6),
        ("i", "free b", 1.5e6, None),  # and no recv: its end was not seen
    ]
    told = events[0]["args"]
    assert (told["bytes in"], told["bytes out"], told["bytes sent at least"]) == (8, 16, 8.0)
    assert (told["unit"], told["ranks"], told["mesh dimension"]) == ("b", [0, 1], "fsdp")
    ends: dict[int, float] = {}
    for event in events:  # what the format asks of a thread
        assert event["ts"] >= ends.get(event["tid"], 0.0)
        ends[event["tid"]] = event["ts"] + event.get("dur", 0.0)

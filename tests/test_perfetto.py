"""The file for Perfetto, held against the Trace Event Format."""

import json
from pathlib import Path

from fsdp_utils.collectives import CollectiveTrace, StepEvent

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

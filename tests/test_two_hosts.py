"""The two hosts of benchmarks/two_hosts.py are real: what leaves one is what the recorder counts."""

import subprocess

import pytest

from benchmarks import two_hosts
from fsdp_utils.collectives import StepEvent


@pytest.fixture
def result() -> dict[str, dict]:
    """As it was once measured at 50 Mbit/s, rounded."""
    seconds = {"DDP": (4.4, 24.0), "FULL_SHARD": (9.3, 48.0), "HYBRID_SHARD": (3.0, 16.0)}
    return {
        strategy: {"step_s": step_s, "wire_mib": mib * 1.003, "recorded_mib": mib, "losses": [2.5, 2.4]}
        for strategy, (step_s, mib) in seconds.items()
    }


def collective(kind: str, ranks: tuple[int, ...]) -> StepEvent:
    return StepEvent(0, kind, "layer", "forward", bytes_in=400, bytes_out=400, ranks=ranks)


def test_around_a_ring_only_the_last_rank_of_a_host_sends_to_the_other() -> None:
    gather = collective("all_gather", (0, 1, 2, 3))
    assert [two_hosts.crossing(gather, rank) for rank in range(4)] == [0, 300, 0, 300]
    assert two_hosts.crossing(collective("all_gather", (0, 1)), 1) == 0


def test_gloo_sends_twice_as_much_for_a_reduce_scatter_and_pairs_across_hosts_all_they_have() -> None:
    assert two_hosts.crossing(collective("reduce_scatter", (0, 1, 2, 3)), 3) == 600
    assert [two_hosts.crossing(collective("all_reduce", (1, 3)), rank) for rank in (1, 3)] == [400, 400]


def test_what_the_bytes_predict_is_held_against_the_time(result: dict[str, dict]) -> None:
    assert list(two_hosts.checks(50, result).values()) == [True, True, True]


@pytest.mark.parametrize(
    ("strategy", "field", "value", "broken"),
    [("HYBRID_SHARD", "step_s", 5.0, 0), ("DDP", "wire_mib", 26.0, 1), ("DDP", "losses", [2.5, 2.3], 2)],
)
def test_a_limit_that_is_broken_is_reported(
    result: dict[str, dict], strategy: str, field: str, value: object, broken: int
) -> None:
    result[strategy][field] = value
    assert [i for i, held in enumerate(two_hosts.checks(50, result).values()) if not held] == [broken]


needs_namespaces = pytest.mark.skipif(
    two_hosts.why_not() is not None, reason=f"two hosts: {two_hosts.why_not()}"
)


def hosts() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@needs_namespaces
def test_the_links_counter_and_the_recorder_agree_and_nothing_is_left_behind() -> None:
    result = two_hosts.summarize(two_hosts.measure(None, 0.0, steps=1))
    for strategy, measured in result.items():
        assert measured["wire_mib"] == pytest.approx(measured["recorded_mib"], rel=0.05), strategy
    losses = [measured["losses"] for measured in result.values()]
    assert max(losses) == pytest.approx(min(losses))
    assert f"fsdp{two_hosts.os.getpid()}" not in hosts()

"""The two hosts of benchmarks/two_hosts.py are real: what leaves one is what the recorder counts."""

import subprocess

import pytest

from benchmarks import two_hosts
from fsdp_utils.collectives import StepEvent


def collective(kind: str, ranks: tuple[int, ...]) -> StepEvent:
    return StepEvent(0, kind, "layer", "forward", bytes_in=400, bytes_out=400, ranks=ranks)


def test_around_a_ring_only_the_last_rank_of_a_host_sends_to_the_other() -> None:
    gather = collective("all_gather", (0, 1, 2, 3))
    assert [two_hosts.crossing(gather, rank) for rank in range(4)] == [0, 300, 0, 300]
    assert two_hosts.crossing(collective("all_gather", (0, 1)), 1) == 0


def test_gloo_sends_twice_as_much_for_a_reduce_scatter_and_pairs_across_hosts_all_they_have() -> None:
    assert two_hosts.crossing(collective("reduce_scatter", (0, 1, 2, 3)), 3) == 600
    assert [two_hosts.crossing(collective("all_reduce", (1, 3)), rank) for rank in (1, 3)] == [400, 400]


needs_namespaces = pytest.mark.skipif(
    two_hosts.why_not() is not None, reason=f"two hosts: {two_hosts.why_not()}"
)


def hosts() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@needs_namespaces
def test_the_links_counter_and_the_recorder_agree_and_nothing_is_left_behind() -> None:
    result = two_hosts.summarize(two_hosts.measure(None, steps=1))
    for strategy, measured in result.items():
        assert measured["wire_mib"] == pytest.approx(measured["recorded_mib"], rel=0.05), strategy
    losses = [measured["losses"] for measured in result.values()]
    assert max(losses) == pytest.approx(min(losses))
    assert f"fsdp{two_hosts.os.getpid()}" not in hosts()

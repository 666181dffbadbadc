"""The short form of benchmarks/attacks.py: no damage gets through."""

import sys

import pytest

from benchmarks import attacks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and sends SIGKILL")
@pytest.mark.timeout(300)  # a quarter of a minute on idle cores, most of it imports
def test_nothing_gets_through() -> None:
    outcomes, failures = attacks.run(quick=True)
    assert failures == []
    assert outcomes["bit flips"] == {attacks.REFUSED: attacks.ATTACKS["bit flips"][2]}
    assert outcomes["kills in saves"] == {attacks.SURVIVED: attacks.ATTACKS["kills in saves"][2]}
    assert outcomes["forged safetensors"].total() == attacks.ATTACKS["forged safetensors"][2]

"""The simulated allocator follows the rules of c10/cuda/CUDACachingAllocator.cpp."""

import random
from typing import Any

import pytest

from fsdp_utils.allocator import AllocationEvent, AllocationTrace, simulate_allocator

MIB = 2**20


def replay(*actions: tuple[str, float] | str, streams: dict[str, int] | None = None, **options: Any) -> Any:
    """Simulate ("a", 5), "a": allocate a of 5 MiB, free a."""
    trace = AllocationTrace()
    held: dict[str, tuple[Any, ...]] = {}
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            name, size = action
            held[name] = number, int(size * MIB), name, (streams or {}).get(name, 0)
            trace.events.append(AllocationEvent("alloc", *held[name]))
        else:
            trace.events.append(AllocationEvent("free", *held.pop(action)))
    if "limit_mib" in options:
        options["limit_gib"] = options.pop("limit_mib") / 1024
    return simulate_allocator(trace, **options)


def mib(sizes: list[int]) -> list[float]:
    return [size / MIB for size in sizes]


@pytest.mark.parametrize(
    ("actions", "options", "reserved"),
    [
        ([("a", 1 / MIB), ("b", 513 / MIB)], {}, [2, 2]),  # small requests share a segment of 2 MiB
        ([("a", 1)], {}, [2]),  # 1 MiB is small ...
        ([("a", 1 + 1 / MIB)], {}, [20]),  # ... and anything more is large
        ([("a", 9), ("b", 9), ("c", 9)], {}, [20, 20, 40]),  # below 10 MiB they share segments of 20 MiB
        ([("a", 10), ("b", 11), ("c", 12.5)], {}, [10, 22, 36]),  # from there on each gets one, of 2n MiB
        # the smallest block that fits: b takes the 30 MiB block and leaves the one of 60 to c
        ([("x", 60), ("y", 30), "x", "y", ("b", 28), ("c", 60)], {}, [60, 90, 90, 90, 90, 90]),
        # free neighbours merge within a segment, but segments do not
        ([("x", 40), "x", ("a", 20), ("b", 20), "a", "b", ("c", 40)], {}, [40] * 7),
        ([("a", 20), ("b", 20), "a", "b", ("c", 40)], {}, [20, 40, 40, 40, 80]),
        # neither streams nor pools share
        ([("a", 50), "a", ("b", 50)], {"streams": {"b": 1}}, [50, 50, 100]),
        ([("a", 20), "a", ("b", 1)], {}, [20, 20, 22]),
        # expandable segments map pages of 20 MiB and join them; small ones have 2 MiB
        ([("a", 30), ("b", 30), "a", "b", ("c", 60)], {"expandable_segments": True}, [40, 60, 60, 60, 60]),
        ([("a", 0.75), ("b", 0.75), ("c", 0.75)], {"expandable_segments": True}, [2, 2, 4]),
        # a gap that was left is filled before the segment grows
        (
            [("a", 20), ("x", 60), ("b", 20), "x", ("c", 80), "c", ("d", 60)],
            {"expandable_segments": True, "limit_mib": 120},
            [20, 80, 100, 100, 120, 120, 120],
        ),
    ],
)
def test_what_a_request_reserves(actions: list, options: dict, reserved: list[int]) -> None:
    assert mib(replay(*actions, **options).reserved) == reserved


def test_a_remainder_of_up_to_1_mib_is_not_cut_off_and_a_freed_block_is_reused() -> None:
    assert mib(replay(("a", 11), ("b", 10.5)).allocated) == [12, 22.5]
    assert mib(replay(("a", 1 / MIB), ("b", 513 / MIB)).allocated) == [512 / MIB, 1536 / MIB]
    assert mib(replay(("a", 50), "a", ("b", 30), ("c", 20)).allocated) == [50, 0, 30, 50]


@pytest.mark.parametrize(
    ("actions", "options", "reserved"),
    [
        # whole cached segments are given back, those of other streams too
        ([("a", 60), ("b", 30), "a", ("c", 62)], {"limit_mib": 100}, [60, 90, 90, 92]),
        ([("a", 50), "a", ("b", 60)], {"limit_mib": 100, "streams": {"b": 1}}, [50, 50, 60]),
        # a occupies page 0 and half of 1; x pages 1 (half) to 5; b the rest: 3 whole free pages can move
        (
            [("a", 30), ("x", 80), ("b", 10), "x", ("c", 100)],
            {"limit_mib": 160, "expandable_segments": True},
            [40, 120, 120, 120, 160],
        ),
    ],
)
def test_at_the_limit_the_cache_is_given_back_and_the_request_is_retried(
    actions: list, options: dict, reserved: list[int]
) -> None:
    result = replay(*actions, **options)
    assert (result.regime, result.retries) == ("retries", [len(actions) - 1])
    assert mib(result.reserved) == reserved


def test_a_segment_of_which_a_part_is_used_cannot_be_given_back() -> None:
    actions = (("x", 60), "x", ("a", 20), ("b", 62))
    assert replay(*actions, limit_mib=130).regime == "fits"
    result = replay(*actions, limit_mib=100)
    assert result.regime == "out of memory"
    assert result.num_alloc_retries == 1
    oom = result.out_of_memory
    assert oom is not None
    assert (oom.name, oom.event, oom.step) == ("b", 3, 0)
    assert (oom.requested_gib, oom.allocated_gib, oom.reserved_gib) == (62 / 1024, 20 / 1024, 60 / 1024)
    assert "b asked for 0.061 GiB" in str(result)


def test_expandable_segments_avoid_the_slivers_of_a_growing_batch() -> None:
    """The case that PyTorch's note on expandable segments describes: batch sizes N and then N + 1."""
    actions: list[tuple[str, float] | str] = []
    for batch in (10, 11):
        sizes = {f"{batch}.{i}": batch * (12 if i % 2 else 3) for i in range(20)}
        actions += [*sizes.items(), *sizes]
    plain, expandable = replay(*actions), replay(*actions, expandable_segments=True)
    assert plain.peak_reserved_gib > 1.3 * plain.peak_allocated_gib
    assert expandable.peak_reserved_gib < 1.02 * plain.peak_allocated_gib


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_books_balance_after_every_event(expandable_segments: bool) -> None:
    rng = random.Random(0)
    live: dict[str, float] = {}
    actions: list[tuple[str, float] | str] = []
    asked: list[float] = []
    for number in range(3000):
        if live and rng.random() < 0.48:
            actions.append(name := rng.choice([*live]))
            del live[name]
        else:
            live[str(number)] = int(2 ** rng.uniform(0, 25)) / MIB
            actions.append((str(number), live[str(number)]))
        asked.append(sum(live.values()))
    streams = {str(number): rng.randrange(2) for number in range(3000)}
    options = {"streams": streams, "expandable_segments": expandable_segments}
    result = replay(*actions, *live, **options)
    for wanted, allocated, reserved in zip(asked, mib(result.allocated), mib(result.reserved), strict=False):
        assert wanted <= allocated <= reserved
    assert result.allocated[-1] == 0

    most = max(mib(result.reserved))
    # all that was freed has become whole again, or it could not be given back for a block of that size
    pages = most // 20 * 20
    whole = replay(*actions, *live, ("all", pages), **options, limit_mib=most)
    assert (whole.regime, mib(whole.allocated)[-1]) == ("retries", pages)
    limited = replay(*actions, **options, limit_mib=most / 2)
    assert limited.regime == "out of memory"
    assert max(mib(limited.reserved)) <= most / 2


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="expected a positive limit_gib, found 0"):
        simulate_allocator(AllocationTrace(), limit_gib=0)


def test_the_plot_marks_limit_steps_retries_and_the_end() -> None:
    axes = pytest.importorskip("matplotlib.axes")
    pytest.importorskip("matplotlib").use("agg")
    ax = replay(("x", 60), "x", ("a", 20), ("b", 62), limit_mib=100).plot()
    assert isinstance(ax, axes.Axes)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["reserved", "allocated", "limit", "retry (1)", "out of memory"]
    assert "simulated" in ax.get_title()

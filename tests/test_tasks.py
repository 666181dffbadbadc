"""The task is seeded, split without leakage and cut fairly among ranks."""

import torch

from fsdp_utils.lessons import tasks

TASK = tasks.dates_llama()


def test_every_build_has_the_same_weights_and_leaves_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, other = TASK.build(), TASK.build()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_dates_are_spelled_in_three_ways_all_on_one_side_of_the_split() -> None:
    train, test = tasks.date_pairs()
    assert not {answer for _, answer in train} & {answer for _, answer in test}
    assert len(test) == 3 * len({answer for _, answer in test}) == 3 * tasks.DATES_FOR_TEST
    for source, answer in train[:300]:
        year, month, day = answer.split("-")
        for part in (year, str(int(day)), tasks.MONTHS[int(month) - 1][:3]):
            assert part in source
        assert len(source) <= tasks.LONGEST_SPELLING


def test_an_epoch_shows_every_sample_at_most_once_and_the_next_in_another_order() -> None:
    count = len(TASK.train["labels"])
    steps = count // tasks.BATCH
    indexed = tasks.Task(TASK.build, {"row": torch.arange(count)}, {})
    first, second = (torch.cat([indexed.batch(i + n)["row"] for i in range(steps)]) for n in (0, steps))
    assert len(first.unique()) == len(first) == steps * tasks.BATCH
    assert not torch.equal(first, second)

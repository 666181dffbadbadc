"""Tests whose body runs on ranks, where each rank asserts, and process groups of one real rank."""

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_utils import run_on_ranks


def on_ranks(
    world_size: int = 2, *, timeout: float = 60
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test, with its fixtures, on each of so many ranks; fail as the first rank does."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(**fixtures: Any) -> None:
            run_on_ranks(functools.partial(test, **fixtures), world_size=world_size, timeout=timeout)

        return on_each

    return decorate


@contextmanager
def case(name: object) -> Iterator[None]:
    """Name the case of a table in the failure of an assertion about it."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"case {name!r}: {error}") from error


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def one_rank(backend: str = "gloo") -> Iterator[dist.ProcessGroup]:
    """Make this process the only rank of a process group."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Together:
    """Decorates tests whose bodies run on the same ranks; the first test starts them for all."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._bodies: list[Callable[[], None]] = []

    def __call__(self, test: Callable[[], None]) -> Callable[[], None]:
        self._bodies.append(test)

        def passes() -> None:
            if test.__name__ in self._errors:
                raise AssertionError(self._errors[test.__name__])

        passes.__name__ = test.__name__
        return passes

    @functools.cached_property
    def _errors(self) -> dict[str, str]:
        """By test, the traceback of the first rank that failed."""
        bodies = {body.__name__: body for body in self._bodies}
        by_rank = run_on_ranks(_errors_of, bodies, world_size=self._world_size, timeout=100)
        return {name: text for errors in by_rank[::-1] for name, text in errors.items()}


def _errors_of(bodies: dict[str, Callable[[], None]]) -> dict[str, str]:
    errors = {}
    for name, body in bodies.items():
        torch.manual_seed(0)
        try:
            body()
        except Exception:  # the next test runs all the same
            errors[name] = traceback.format_exc()
    return errors

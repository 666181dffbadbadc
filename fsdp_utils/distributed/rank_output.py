"""The caller's standard output and standard error, on their way to a rank."""

import os
import sys
from contextlib import suppress
from typing import Any

if sys.platform != "win32":  # where ranks are spawned, which inherit the caller's own
    from multiprocessing.reduction import DupFd


class Output:
    """Pickled where a rank is started, unpickled on the rank.

    A forked rank would write to where the fork server's output went when the server was started; the
    caller may have redirected its own since (pytest's capfd does).
    """

    def __init__(self, received: dict[int, Any] | None = None) -> None:
        self._received = received

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, ({number: DupFd(number) for number in (1, 2) if _is_open(number)},)

    def take(self) -> None:
        """From here on, write to where the caller does."""
        for number, received in (self._received or {}).items():
            descriptor = received.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False

"""A call in a thread of its own, with its result or its exception.

Not concurrent.futures: its executors refuse work once the program is ending, which is when a last
asynchronous save
may still have some.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """Begins at once."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._fn())
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is over, well or not."""
        self._thread.join()

    def result(self) -> T:
        """Wait for it; what it returned, or raise what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]

"""One run at a time in a directory: a lock that the system releases when its owner ends, however it ends."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from fsdp_utils.train.config import ConfigError

__all__ = ["RunLock"]

_PATIENCE_S = 5.0  # for the ranks of the start before to have ended, on another host perhaps
_POLL_S = 0.05


class RunLock:
    """Rank 0 holds the file `.lock` of the run's directory as long as the run goes on.

    A lock of fcntl.lockf: it belongs to the process, and not to children that outlive it, and ends with it,
    also by SIGKILL. What is in the file is only for people to read.

    Args:
        directory: the run's; it is made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".lock"
        self._file: int | None = None
        self.warning: str | None = None  # why the directory could not be locked

    def take(self) -> None:
        """Become the owner. Where the file system has no locks, go on without, and leave a warning.

        Raises:
            ConfigError: another run is going on in the directory, or it cannot be written to.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(
                f"out: expected a directory to write to, found {str(self._path.parent)!r} is none: {error}"
            ) from error
        limit = time.monotonic() + _PATIENCE_S
        while not self._try():
            if time.monotonic() > limit:
                owner = self._owner()
                self._close()
                raise ConfigError(
                    f"out: expected a directory in which no other run is going on, found {self._path.parent} "
                    f"is in use by {owner}. End that run first, or choose another --out."
                )
            time.sleep(_POLL_S)

    def _try(self) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as error:
            self.warning = (
                f"{self._path} cannot be locked here ({error.strerror}), so a second run in this directory "
                "would not be noticed: see to it that there is none"
            )
            return True
        with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
            about = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(about).encode(), 0)
        return True

    def _owner(self) -> str:
        assert self._file is not None
        try:
            about = json.loads(os.pread(self._file, 4096, 0))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
            return f"process {about['process']} on {about['host']}, since {since}"
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            return f"a process that {self._path.name} does not name"

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._close()  # and with it the lock

"""A stand-in for an object store, in a local directory that several processes share: bucket://.

It has what a store lacks: no rename, no directory without a file. And each process keeps the listings that it
has seen, until it is told to look again.
"""

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from upath import UPath, registry


class BucketError(Exception):
    """Such as the packages behind fsspec raise: no OSError."""


class Bucket(LocalFileSystem):
    protocol = "bucket"
    fails = ""  # files whose name ends so cannot be written; set on the class

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True)
        self._names: dict[str, list[str]] = {}

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path not in self._names:
            self._names[path] = super().ls(path, detail=False)
        return [self.info(name) for name in self._names[path]] if detail else self._names[path]

    def exists(self, path: str, **options: Any) -> bool:
        names = self._names.get(str(Path(path).parent))
        return super().exists(path) if names is None else path in names

    def invalidate_cache(self, path: str | None = None) -> None:
        self._names.clear()

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        raise BucketError("a store has no directories to make")

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        raise BucketError("a store renames nothing")

    rename = move = mv_file = mv

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if Bucket.fails and mode != "rb" and path.endswith(Bucket.fails):
            raise BucketError("quota exceeded")
        return super()._open(path, mode, **options)


class BucketPath(UPath):
    """As the paths of other stores are; universal_pathlib warns of one that it has no class for."""


fsspec.register_implementation("bucket", Bucket, clobber=True)
registry.register_implementation("bucket", BucketPath, clobber=True)

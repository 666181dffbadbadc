"""Have operations of torch pass through functions in Python for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fsdp_utils.torch_internals.names import DispatchKey, dispatch_library

# Gets the operation's arguments, and a function that runs it and whose result is to be returned.
Around = Callable[[tuple[Any, ...], Callable[[], Any]], Any]
_KEY = "BackendSelect"


class Kernels:
    """Kernels in torch's dispatcher, under the key BackendSelect, until `close`.

    That key comes after autograd's and before those of the backends, has no kernel of its own for operations
    on given tensors, and is looked at in every thread. Other operations cost no more than before.

    Args:
        namespace: Of the operations, such as "c10d".
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library: Any = dispatch_library("IMPL", namespace, _KEY, __file__, 0)

    def add(self, names: Iterable[str], around: Callable[[str], Around]) -> None:
        """Have operations pass by; those that this torch does not have are left out.

        Args:
            names: Of the operations, without the namespace.
            around: Gives, for a name, what its calls pass through.
        """
        for name in names:
            if redispatch := _redispatch(self._namespace, name):
                self._library.impl(name, _KEY, _kernel(redispatch, around(name)), True)

    def close(self) -> None:
        """Leave no kernel behind."""
        self._library.reset()


@functools.cache
def _redispatch(namespace: str, name: str) -> Callable[..., Any] | None:
    operation = getattr(getattr(torch.ops, namespace), name, None)
    return operation and operation.default.redispatch


def _kernel(redispatch: Callable[..., Any], around: Around) -> Callable[..., Any]:
    selected = DispatchKey.BackendSelect

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return around(args, lambda: redispatch(keys.remove(selected), *args, **kwargs))

    return kernel

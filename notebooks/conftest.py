"""Lets nbval run cells as JupyterLab does, and compare what they leave on the page.

By itself nbval
- compares everything that a cell ever printed: it passes over clear_output and over updates of a
  display, which is how cells under %%ranks show output while it comes;
- keeps cells out of the history, so that all of them are In[1] and a final ";" hides nothing;
- gives up when a kernel is silent for 5 s between its reply and its last output.
"""

import os
from collections import deque
from typing import Any

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

from tools.build_lessons import KERNEL_ENV

OUTPUT_TIMEOUT_S = 60
OUTPUTS = ("display_data", "execute_result", "stream", "error")

Message = dict[str, Any]


def settle(messages: list[Message]) -> list[Message]:
    """The kernel's messages for one cell, less those that were cleared, with displays as last updated."""
    page: list[Message] = []
    others: list[Message] = []
    clear_first = False
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            clear_first = content["wait"]
            if not clear_first:
                page.clear()
        elif kind == "update_display_data":
            for shown in page:
                if display_id(shown) == display_id(message):
                    shown["content"].update(data=content["data"], metadata=content["metadata"])
        elif kind in OUTPUTS:
            if clear_first:
                page.clear()
                clear_first = False
            page.append(message)
        else:
            others.append(message)
    return [*others[:-1], *page, *others[-1:]]  # the last one says that the cell is done


def display_id(message: Message) -> str | None:
    return (message["content"].get("transient") or {}).get("display_id")


plain_get_message = RunningKernel.get_message


def get_settled_message(self: RunningKernel, stream: str, timeout: float | None = None) -> Message:
    """Stands in for nbval's own: a cell's messages come once the cell is done, and settled."""
    if stream != "iopub":
        return plain_get_message(self, stream, timeout=timeout)
    come, settled = self.__dict__.setdefault("come", []), self.__dict__.setdefault("settled", deque())
    while not settled:
        come.append(plain_get_message(self, stream, timeout=timeout))
        if come[-1]["content"].get("execution_state") == "idle":
            settled.extend(settle(come))
            come.clear()
    return settled.popleft()


def execute_with_history(self: RunningKernel, cell_input: str, allow_stdin: bool | None = None) -> str:
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def pytest_configure() -> None:
    os.environ.update(KERNEL_ENV)
    RunningKernel.execute_cell_input = execute_with_history
    RunningKernel.get_message = get_settled_message


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, IPyNbCell):
        item.output_timeout = OUTPUT_TIMEOUT_S

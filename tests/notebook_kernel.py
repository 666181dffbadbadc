"""A Jupyter kernel under a test: run cells in it as a front end does, interrupt it, kill it."""

import time
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

LIMIT_S = 90
IMPORTS = """%%ranks
import os, signal, time, torch, torch.distributed as dist
rank = dist.get_rank(); x = torch.ones(1)
"""
WHOLE = """%%ranks
import torch, torch.distributed as dist
x = torch.ones(1); dist.all_reduce(x); print(x.item())
"""


@dataclass
class Reply:
    """The output of a cell, as a reader sees it at the end."""

    text: str = ""
    images: int = 0
    error: str = ""  # "" or name: message
    traceback: str = ""
    value: str = ""
    shown: str = ""  # what it displayed, as text
    streamed: list[str] = field(default_factory=list)  # pieces of text in the order of their arrival
    cleared: bool = False
    seconds: float = 0.0


class Notebook:
    """A kernel; `close()` it."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, source: str, *, interrupt_after: float | None = None, watched: bool = False) -> Reply:
        """Run a cell for at most LIMIT_S; a person who watches it is a front end that takes input."""
        began, reply = time.monotonic(), Reply()
        message = self.client.execute(source, allow_stdin=watched)
        while True:
            if interrupt_after is not None and time.monotonic() - began > interrupt_after:
                self.manager.interrupt_kernel()
                began, interrupt_after = time.monotonic(), None  # seconds count from the interrupt
            if time.monotonic() - began > LIMIT_S:
                raise TimeoutError(f"the cell was not over after {LIMIT_S} s: {source}")
            try:
                output = self.client.get_iopub_msg(timeout=0.05)
            except Empty:
                continue
            if output["parent_header"].get("msg_id") != message:
                continue
            if self._take(output["msg_type"], output["content"], reply):
                break
        self.client.get_shell_msg(timeout=10)
        reply.seconds = time.monotonic() - began
        return reply

    @staticmethod
    def _take(kind: str, content: dict[str, Any], reply: Reply) -> bool:
        """Add one message to the reply; true when the cell is over."""
        if kind == "stream":
            reply.streamed.append(content["text"])
            reply.text += content["text"]
        elif kind == "clear_output":
            reply.text, reply.cleared = "", True
        elif kind == "display_data":
            reply.images += "image/png" in content["data"]
            reply.shown += content["data"].get("text/plain", "")
        elif kind == "execute_result":
            reply.value = content["data"]["text/plain"]
        elif kind == "error":
            reply.error = f"{content['ename']}: {content['evalue']}"
            reply.traceback = "\n".join(content["traceback"])
        return kind == "status" and content["execution_state"] == "idle"

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()

"""The events of a recorded step, and when each of them ran."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, FREE = "compute", "free"
BUCKET = "bucket "  # and its number: what DDP reduces at once
WITHIN, BETWEEN = "within a host", "between hosts"


@dataclass
class StepEvent:
    """One thing that this rank issued.

    Of kind "compute" is what was computed between two other events for one module, and "free" is when
    gathered parameters were freed; the others are collectives: "all_gather", "reduce_scatter", ...
    """

    order: int  #: place in the order of issue, from 0
    kind: str
    module: str  #: the FSDP unit, "(root)", "bucket 0", ... for the gradients of DDP, "" for none
    phase: str  #: "forward", "backward", "optimizer" or "other"
    bytes_in: int = 0  #: what this rank gave to the collective, padding included
    bytes_out: int = 0  #: what it got
    ranks: tuple[int, ...] = ()  #: global ranks that took part
    link: str = ""  #: "within a host" or "between hosts"; "" where nothing was sent
    start: float = 0.0  #: seconds since the recording began; on a GPU not in the order of issue
    #: None for a collective whose end was not seen. gloo tells no end of a reduce-scatter, a send or a
    #: receive: what is not FSDP's own lasts until the model's next event.
    seconds: float | None = None
    dimension: str = ""  #: of the mesh, whose ranks took part, such as "fsdp" or "tp"; "" for none

    @property
    def is_collective(self) -> bool:
        """Did ranks communicate?"""
        return self.kind not in (COMPUTE, FREE)

    @property
    def is_of_the_model(self) -> bool:
        """Did the model itself communicate, as under tensor parallelism, and not FSDP or DDP?"""
        return self.is_collective and not self.module and self.phase in ("forward", "backward")

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor, which an all-gather gives and a reduce-scatter or an all-reduce takes."""
        return max(self.bytes_in, self.bytes_out)

    @property
    def sent_bytes(self) -> float:
        """The least bytes that this rank has to send, around a ring; the mean over the ranks if they differ.

        (n - 1) / n of `bytes` for n ranks, and twice that for an all-reduce.

        Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if not self.ranks or self.kind == "recv":
            return 0.0
        if self.kind == "send":
            return float(self.bytes_in)
        rounds = 2 if self.kind == "all_reduce" else 1
        full = self.bytes
        if self.kind in ("gather", "scatter"):  # the root's other side is a part
            full = min(self.bytes_in, self.bytes_out) or full
        return rounds * (len(self.ranks) - 1) * full / len(self.ranks)


@dataclass(frozen=True)
class Span:
    """When an event ran, or runs in a replay, in seconds since that began; equal for what was freed."""

    event: StepEvent
    start: float
    end: float

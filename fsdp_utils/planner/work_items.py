"""The items of a recording: memory, work and messages of one rank, in the order of the program."""

from typing import Any, NamedTuple

from fsdp_utils.sharding.units import ROOT

# what memory is used for
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
BUFFERS, INPUTS = "buffers", "inputs"
GATHERED, GATHER_BUFFERS = "gathered parameters", "buffers of all-gathers"
WHOLE_GRADIENTS, REDUCE_BUFFERS = "whole gradients", "buffers of reductions"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
AT_REST = (PARAMETERS, GRADIENTS, OPTIMIZER)  # sharded; on the host, if they are offloaded


class Label(NamedTuple):
    """When: "start", "forward", "backward", "optimizer" or "other"; and for which FSDP unit."""

    phase: str
    unit: str = ROOT


class Alloc(NamedTuple):
    """A block of memory is allocated for a category."""

    block: Any  # its number; in a recording that is extended, its place
    size: int  # bytes
    stream: int
    category: str


class Free(NamedTuple):
    """A block of memory is freed."""

    block: Any


class Work(NamedTuple):
    """One kernel: operations of matrix products, and the bytes that it reads and writes."""

    flop: int
    masked: int  # the part of them that causal attention leaves out
    half: bool  # in 16 bits
    nbytes: int
    stream: int
    attention: bool = False  # in one fused kernel
    again: bool = False  # in forward once already; a checkpoint repeats it in backward
    uncounted: str = ""  # the operator, where it seems to multiply matrices and no formula counts it


class Send(NamedTuple):
    """One collective."""

    kind: str
    unit: str
    nbytes: int  # the full tensor's
    ranks: int
    ranks_per_host: int  # that take part


class Gone(NamedTuple):
    """The gathered parameters of a unit are freed."""

    unit: str


class Begin(NamedTuple):
    """A micro-batch begins: the first of a step, or its second."""

    micro_batch: int


Recording = list[tuple[Label, list[Any]]]  # items, cut where the label changes

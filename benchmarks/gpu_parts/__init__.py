"""What only a GPU can show, one module per recording. `benchmarks/gpu.py` runs them.

A part is a module with
- a docstring, whose first line is the question that the recording answers;
- `USES`: the files, besides itself, whose change makes its recording older than its code;
- `GROUP`: how one GPU stands for a job of many ranks; None where there is no such job;
- `settings(tiny, done)`: what is to be measured, as dicts for JSON; may grow with what is done;
- `measure(setting, device, tiny)`: the numbers for one setting; it begins with nothing allocated;
- `summarize(done)`: what lessons quote, from what is done;
- `environment(setting)`, where needed: variables that must stand when the process starts.
`done` is a list of pairs (setting, result).
"""

from typing import Any

# in the order in which --all records them: the smoke checks, then what lessons need most
NAMES = (
    "smoke",
    "train",
    "planner",
    "memory",
    "rate_limiter",
    "maximizer_overhead",
    "mixed_precision",
    "child_tuning",
    "activation_checkpointing",
    "allocator",
)

Setting = dict[str, Any]
Result = dict[str, Any]
Done = list[tuple[Setting, Result]]

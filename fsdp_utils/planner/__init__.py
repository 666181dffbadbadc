"""Predict memory and time on GPUs that you don't have: `plan`.

gpus.py lists the GPUs with their rates and memory, efficiency.py what training reaches of the rates.
models.py builds a small model without memory, recorder.py records a simulated rank's step, memory.py and
roofline.py make bytes and seconds of it.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Run a training script for a few steps on ranks, and say what is wrong with it.

watch.py runs the script and listens to it on each rank; models.py describes the models that it trains;
findings.py judges these facts of all ranks, by the table findings.yaml; report.py shows the result;
__main__.py is `python -m fsdp_utils doctor`.
"""

from fsdp_utils._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

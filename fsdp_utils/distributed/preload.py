"""Imported first by the server that ranks are forked from."""

import gc
import os
import signal

# The imports to come make no garbage, and a collection takes a second. The ranks switch it on again.
gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the kernel's whole process group
# Counting GPUs must not initialise CUDA here: a process that has done so cannot fork.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

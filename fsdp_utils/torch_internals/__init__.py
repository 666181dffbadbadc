"""Every private name of torch that fsdp_utils uses, what for, and why no public one serves.

No other room names one: what a new torch breaks, it breaks here; tests/test_torch_internals.py says which.
names.py: classes and functions; groups.py: process groups; fsdp.py: what FSDP1 and FSDP2 hold; runtime.py:
tensors, modules, autograd, profiler, compiler, devices. All of it imports torch only when it is used.
"""

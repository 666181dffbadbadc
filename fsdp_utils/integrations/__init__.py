"""Callbacks for the trainers of others: one module for each trainer, which imports the trainer's package.

`fsdp_utils.integrations.transformers` is for transformers' `Trainer`, `fsdp_utils.integrations.lightning`
for Lightning's; state.py is what both save. A loop with Accelerate needs none: it calls the library itself.
"""

"""Callbacks for the trainers of others: transformers' `Trainer` and Lightning's.

Import them from the trainer's module, which imports its package: `fsdp_utils.integrations.transformers` and
`fsdp_utils.integrations.lightning`. A loop with Accelerate needs none: it calls the library itself.
"""

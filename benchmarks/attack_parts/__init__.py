"""The parts of attacks.py: what is attacked, how, and how the outcome is told."""

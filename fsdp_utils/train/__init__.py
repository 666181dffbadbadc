"""A training program that does not lose work: FSDP2 from a laptop to a cluster.

`torchrun ... -m fsdp_utils.train --config run.yaml --out runs/a` trains, saves while it trains, and resumes
by itself. Composes the other rooms; none of them imports it. Needs the extra [train].
"""

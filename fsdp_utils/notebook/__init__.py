"""Real ranks in a notebook: cells under `%%ranks` run on every rank.

`from fsdp_utils.notebook import ranks`, then `ranks.start(4)`. Needs the extra [notebooks].
"""

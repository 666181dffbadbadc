"""Real ranks in a notebook: cells under `%%ranks` run on every rank.

`from fsdp_utils.notebook import ranks`, then `ranks.start(4)`. Needs the extra [notebooks]. cell.py runs a
cell on all ranks from the notebook's side, engine.py on the side of a rank; output.py merges what the ranks
print.
"""

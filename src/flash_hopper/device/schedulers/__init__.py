"""How persistent CTAs find their next output tile.

`numbering.py` hands out tile numbers; `source.py` finds the tile of a number, in a dense batch by `geometry/tiles.py` or in a
ragged one by its table, and is the scheduler warp; `mailbox.py` carries tiles from that warp to the others.
"""

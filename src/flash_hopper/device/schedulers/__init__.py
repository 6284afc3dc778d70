"""How persistent CTAs find their next output tile.

A scheduler hands out tile numbers; `geometry/tiles.py` says which tile a number is; `mailbox.py` carries coordinates
from the producer warp to the consumers. A new scheduler is a class with `first`, `request` and `resolve`.
"""

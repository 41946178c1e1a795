"""Tasks, and what is done with a network's outputs: classes, boxes, masks, tiles.

Must not know files.
"""

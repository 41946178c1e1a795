"""Tasks: turning a network's outputs into classes, boxes, masks, tiles. Must not know files."""

"""The page at `GET /`. It asks the same routes as every other client, and loads nothing from another host."""

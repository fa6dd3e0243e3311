"""The page at / and the snapshots of the engine that it draws."""

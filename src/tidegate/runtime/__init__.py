"""What runs around the engine: the two drivers and the background loops, all of the I/O and none of the rules."""

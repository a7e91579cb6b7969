"""Names of cells after a reset: a number that takes the place of the sequence wherever a cell is stored.

A reset gives the cells of a subject new names, so that what was counted under the old ones cannot come back. It
concerns the cells that may hold counts from before it: those up to the one after the running cell, because clocks of
nodes differ. Later cells begin empty and keep the sequence as their name. So all nodes agree again when the reset is
forgotten, and a subject that was never reset is stored as it always was.

A generation is the time of the reset in Unix ms, or one more than the one before. The name of a cell is negative then:
no clock gives such a sequence. It holds the generation and the distance to the last cell that the reset concerns.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RESET_NAME", "cell_name", "cell_of", "reset_expires_at_ms"]

# The name under which the ledger keeps the reset itself: its count is the generation.
RESET_NAME: Final = -1
# Cells that a reset concerns. A decision needs two and a clock may be wrong by some; older ones count in nothing.
CELLS: Final = 16


def cell_name(sequence: int, generation: int, duration_ms: int) -> int:
    """How the cell of `sequence` is stored, of a subject that was last reset in `generation` (0: never)."""
    if generation == 0:
        return sequence
    behind = generation // duration_ms + 1 - sequence
    return -(generation * CELLS + behind) if 0 <= behind < CELLS else sequence


def cell_of(name: int, duration_ms: int) -> tuple[int, int]:
    """The sequence and the generation of a stored cell; 0 when no reset concerns it."""
    if name >= 0:
        return name, 0
    generation = -name // CELLS
    return generation // duration_ms + 1 - -name % CELLS, generation


def reset_expires_at_ms(generation: int, duration_ms: int) -> int:
    """From then on no cell that the reset concerns counts any more, not even at the origin."""
    return (generation // duration_ms + 4) * duration_ms

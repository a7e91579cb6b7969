"""A bounded memory that workspaces share, so that none of them can use up another's."""

from __future__ import annotations

from typing import Final, final

__all__ = ["MemoryBudget"]


@final
class MemoryBudget:
    """How much is taken, in bytes by estimate: by all workspaces, and by each.

    A workspace may hold as much as is still free: alone, half of it; and whatever the others hold, a part is left for
    it.
    """

    __slots__ = ("_by_workspace", "_bytes_max", "bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max: Final[int] = bytes_max
        self._by_workspace: dict[str, int] = {}
        self.bytes: int = 0

    def allows(self, workspace: str, needed: int) -> bool:
        """Whether the workspace may take this too: no more than is free then."""
        held = self._by_workspace.get(workspace, 0)
        return held + needed <= self._bytes_max - self.bytes - needed

    def take(self, workspace: str, taken: int) -> None:
        """Take so much, or give it back if it is negative."""
        self.bytes += taken
        left = self._by_workspace.get(workspace, 0) + taken
        if left > 0:
            self._by_workspace[workspace] = left
        else:
            self._by_workspace.pop(workspace, None)

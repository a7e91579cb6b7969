"""Rounds in which all that is compared takes turns, and figures as medians with their range."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from statistics import median

__all__ = ["Figures", "in_turns"]


class Figures(list[float]):
    """One figure, round by round."""

    def over(self, other: Sequence[float]) -> Figures:
        """Round by round, because a disturbance in a round affects both."""
        return Figures(mine / theirs for mine, theirs in zip(self, other, strict=True))

    def minus(self, other: Sequence[float]) -> Figures:
        return Figures(mine - theirs for mine, theirs in zip(self, other, strict=True))

    @property
    def middle(self) -> float:
        return median(self)

    def shown(self, digits: int = 0) -> str:
        """The median and the range, for people."""
        return f"{median(self):,.{digits}f} ({min(self):,.{digits}f} to {max(self):,.{digits}f})"


def in_turns(names: Collection[str], rounds: int) -> Iterator[str]:
    """Each name once per round; every other round in reverse order, so that the order favours none."""
    for number in range(rounds):
        yield from list(names) if number % 2 == 0 else reversed(list(names))

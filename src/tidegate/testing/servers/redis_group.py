"""Several Redis processes that form one service, with the methods of a single server.

A method is applied to every member, in the order in which they start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tidegate.testing.servers.process import START_TIMEOUT_S, wait_until
from tidegate.testing.servers.redis import RedisServer
from tidegate.testing.servers.resp import RedisReplyError


class RedisGroup(ABC):
    """Use `members` to kill, freeze or restart single processes."""

    @property
    @abstractmethod
    def members(self) -> Sequence[RedisServer]:
        """Every process of the group, in the order in which they start."""

    @abstractmethod
    def _assemble(self) -> None:
        """Form one service of members that run for the first time."""

    @abstractmethod
    def _is_whole(self) -> bool:
        """Whether the members agree that the service is complete."""

    @property
    def is_running(self) -> bool:
        """Whether every member runs."""
        return all(member.is_running for member in self.members)

    def start(self) -> Self:
        is_first = not any(member.has_served for member in self.members)
        try:
            for member in self.members:
                member.start()
            if is_first:
                self._assemble()
            self._wait_whole()
        except BaseException:
            if is_first:
                self.close()
            raise
        return self

    def stop(self) -> None:
        for member in reversed(self.members):
            member.stop()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def restart(self, *, empty: bool = False) -> Self:
        """Restart all members at their ports. Membership is kept, data only if not `empty`."""
        for member in self.members:
            member.restart(empty=empty)
        self._wait_whole()
        return self

    def freeze(self) -> None:
        for member in self.members:
            member.freeze()

    def thaw(self) -> None:
        for member in self.members:
            member.thaw()

    def recover(self) -> None:
        """Thaw and start members as needed, and return when the service is complete again."""
        for member in self.members:
            member.recover()
        self._wait_whole()

    def close(self) -> None:
        for member in reversed(self.members):
            member.close()

    def _wait_whole(self) -> None:
        def is_whole() -> bool:
            try:
                return self._is_whole()
            except (OSError, RedisReplyError):  # a member is still loading, or changes its role
                return False

        wait_until(is_whole, timeout_s=START_TIMEOUT_S, what=f"{type(self).__name__} to be complete")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

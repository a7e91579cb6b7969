"""Redis Sentinel: finds the master. Asks all sentinels at once and takes the answer that most of them give."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tidegate.adapters.redis.link import ConnectionOptions, connect, greet
from tidegate.adapters.redis.settings import Address, RedisSettings
from tidegate.adapters.redis.wire import ReplyError, pack
from tidegate.errors import ConfigurationError, DependencyUnavailable

__all__ = ["Sentinels"]

# Sentinels that are slower than the first one by more than this are ignored. Without waiting, one that was cut off
# and still names the old master could win every time.
VOTE_WAIT_S: Final = 0.1


class Sentinels:
    """The sentinels of a URL, asked again for every connection."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._options = ConnectionOptions(
            settings.tls, settings.sentinel_username, settings.sentinel_password, db=0
        )

    async def find(self) -> Address:
        """The address of the master, by vote. The caller brings the time limit."""
        asked = [asyncio.ensure_future(self._ask(sentinel)) for sentinel in self._settings.hosts]
        try:
            waiting = set(asked)
            while waiting:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(one.done() and one.exception() is None for one in asked):
                    break
            if waiting:
                await asyncio.wait(waiting, timeout=VOTE_WAIT_S)
            return self._elected(asked)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _elected(self, asked: Sequence[asyncio.Future[Address | None]]) -> Address:
        failures = [error for one in asked if one.done() and (error := one.exception()) is not None]
        votes = Counter(one.result() for one in asked if one.done() and one.exception() is None)
        unknown = votes.pop(None, 0)
        if votes:
            elected = votes.most_common(1)[0][0]
            assert elected is not None
            return elected
        if unknown:
            raise ConfigurationError(
                f"{self._settings.shown}: the sentinels know no service named {self._settings.service!r}; "
                "the path of the URL is the name that their configuration gives the master"
            )
        for failure in failures:
            if isinstance(failure, ConfigurationError):
                raise failure
        reasons = "; ".join(str(failure) for failure in failures)
        raise DependencyUnavailable(f"no sentinel answers: {reasons}")

    async def _ask(self, sentinel: Address) -> Address | None:
        """What one sentinel says: the master's address, None if it does not know the service."""
        wire = await connect(sentinel, self._options)
        try:
            greeting = await greet(wire, self._options)
            if greeting.mode != "sentinel":
                raise ConfigurationError(
                    f"{wire.shown}: is not a sentinel but a server in {greeting.mode} mode; give the addresses of "
                    "sentinels, or use redis://"
                )
            command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._settings.service)
            (reply,) = await wire.send(pack(command), 1)
            if isinstance(reply, ReplyError):
                raise DependencyUnavailable(f"{wire.shown}: {reply}")
            if not isinstance(reply, list) or len(reply) != 2:
                return None
            host, port = reply
            return host.decode(), int(port)
        except (UnicodeDecodeError, ValueError) as error:
            raise DependencyUnavailable(f"{wire.shown}: {error}") from error
        finally:
            wire.abort()

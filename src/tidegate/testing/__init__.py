"""For tests of Tidegate, and of what is built on it: a clock that obeys, origins and ledgers that fail on command or
remember what they were asked, real servers, and a proxy that hurts.

The pytest fixtures are a plugin of their own: `pytest_plugins = ["tidegate.testing.fixtures"]`.
"""

from tidegate.testing.clock import ManualClock
from tidegate.testing.faults import FailingLedger, FailingOrigin, TrackingLedger, TrackingOrigin
from tidegate.testing.limiters import make_async_limiter, make_limiter
from tidegate.testing.proxy import FaultProxy, Faults, ProxyStatistics
from tidegate.testing.servers import (
    MariaDBServer,
    MissingBinary,
    PostgresServer,
    RedisCluster,
    RedisReplyError,
    RedisSentinel,
    RedisServer,
    ServerError,
    ServerProcess,
    wait_until,
)

__all__ = [
    "FailingLedger",
    "FailingOrigin",
    "FaultProxy",
    "Faults",
    "ManualClock",
    "MariaDBServer",
    "MissingBinary",
    "PostgresServer",
    "ProxyStatistics",
    "RedisCluster",
    "RedisReplyError",
    "RedisSentinel",
    "RedisServer",
    "ServerError",
    "ServerProcess",
    "TrackingLedger",
    "TrackingOrigin",
    "make_async_limiter",
    "make_limiter",
    "wait_until",
]

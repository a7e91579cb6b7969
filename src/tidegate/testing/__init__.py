"""For tests of Tidegate, and of what is built on it: a clock that obeys, origins and ledgers that fail on command or
remember what they were asked, real servers, and a proxy that hurts.

The pytest fixtures are a plugin of their own: `pytest_plugins = ["tidegate.testing.fixtures"]`.
"""

from tidegate.testing.clock import ManualClock
from tidegate.testing.doubles import (
    AllowingLimiter,
    AsyncAllowingLimiter,
    AsyncDenyingLimiter,
    AsyncFailingLimiter,
    DenyingLimiter,
    FailingLimiter,
    advance_to_reset,
    advance_until_empty,
    consumed,
)
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
    "AllowingLimiter",
    "AsyncAllowingLimiter",
    "AsyncDenyingLimiter",
    "AsyncFailingLimiter",
    "DenyingLimiter",
    "FailingLedger",
    "FailingLimiter",
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
    "advance_to_reset",
    "advance_until_empty",
    "consumed",
    "make_async_limiter",
    "make_limiter",
    "wait_until",
]

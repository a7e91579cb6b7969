"""Tools for tests of Tidegate and of applications that use it: a manual clock, wrappers that inject faults or record
calls of an origin or ledger, real servers, and a TCP proxy that injects network faults.

None of these needs pytest. The pytest fixtures (`pytest_plugins = ["tidegate.testing.fixtures"]`) and the contract
suites (`tidegate.testing.contracts`) need `pip install 'tidegate[testing]'`.
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
    MySQLServer,
    PostgresServer,
    RedisCluster,
    RedisReplyError,
    RedisSentinel,
    RedisServer,
    ServerError,
    ServerProcess,
    ValkeyServer,
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
    "MySQLServer",
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
    "ValkeyServer",
    "advance_to_reset",
    "advance_until_empty",
    "consumed",
    "make_async_limiter",
    "make_limiter",
    "wait_until",
]

"""For tests of Tidegate, and of what is built on it: real servers, and a proxy that hurts.

The pytest fixtures are a plugin of their own: `pytest_plugins = ["tidegate.testing.fixtures"]`.
"""

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
    "FaultProxy",
    "Faults",
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
    "wait_until",
]

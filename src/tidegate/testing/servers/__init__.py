"""Real servers for tests and benchmarks: each is started here, can fail in the same few ways, and is cleaned up.

    with RedisServer() as redis:
        redis.freeze()

Verbs of all: start, stop, kill, restart(empty=False), freeze, thaw, recover, close. Only the standard library and
the servers' own programs are needed.
"""

from tidegate.testing.servers.mariadb import MariaDBServer
from tidegate.testing.servers.mysql import MySQLServer
from tidegate.testing.servers.postgres import PostgresServer
from tidegate.testing.servers.process import MissingBinary, ServerError, ServerProcess, wait_until
from tidegate.testing.servers.redis import RedisServer, ValkeyServer
from tidegate.testing.servers.redis_cluster import RedisCluster
from tidegate.testing.servers.redis_sentinel import RedisSentinel
from tidegate.testing.servers.resp import RedisReplyError

__all__ = [
    "MariaDBServer",
    "MissingBinary",
    "MySQLServer",
    "PostgresServer",
    "RedisCluster",
    "RedisReplyError",
    "RedisSentinel",
    "RedisServer",
    "ServerError",
    "ServerProcess",
    "ValkeyServer",
    "wait_until",
]

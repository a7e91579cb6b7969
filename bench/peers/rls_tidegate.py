"""The rate limit service of Tidegate alone, embedded or with a Redis: `rls_tidegate.py RULES [REDIS_URL]`.

The garbage collector is set as `tidegate serve` sets it.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from pathlib import Path

import uvloop

from tidegate import AsyncLimiter
from tidegate.server.http1.listener import bind
from tidegate.server.process.service import GC_THRESHOLDS
from tidegate.server.rls.rules_watch import RulesWatch
from tidegate.server.rls.serve import RlsServer


async def main(rules: str, origin: str | None = None) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    limiter = AsyncLimiter() if origin is None else AsyncLimiter(region="bench", origin=origin)
    async with limiter:
        server = RlsServer(limiter, RulesWatch(Path(rules)))
        await server.start(bind("127.0.0.1", 0, shared=False))
        gc.collect()
        gc.freeze()
        print(f"listening on http://127.0.0.1:{server.port}", flush=True)
        await stop.wait()
        await server.stop(1.0)


if __name__ == "__main__":
    gc.set_threshold(*GC_THRESHOLDS)
    uvloop.run(main(*sys.argv[1:]))

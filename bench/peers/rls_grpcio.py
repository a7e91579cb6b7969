"""grpcio with a trivial handler: the same constant answer to every call, and no decision at all."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

PATH = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
ANSWER = b"\x08\x01\x12\x02\x08\x01"


class Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpcio has no annotations
    """Bytes in, bytes out: no protobuf."""

    def service(self, details: Any) -> Any:
        if details.method != PATH:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: ANSWER)


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    server.stop(None)


if __name__ == "__main__":
    main()

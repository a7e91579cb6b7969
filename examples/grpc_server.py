"""A gRPC server whose methods have limits. The messages are plain bytes, to need no generated code."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tidegate.integrations import Rule
from tidegate.integrations.grpc import RateLimitInterceptor


def send(request: bytes, context: Any) -> bytes:
    return b"sent " + request


def make_server(address: str) -> tuple[Any, int]:
    limits = RateLimitInterceptor(Rule("2/minute", path="/mail.Mailer/Send"), "1000/hour")
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[limits])
    methods = {"Send": grpc.unary_unary_rpc_method_handler(send)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("mail.Mailer", methods),))
    return server, server.add_insecure_port(address)


if __name__ == "__main__":
    server, _ = make_server("127.0.0.1:50051")
    server.start()
    server.wait_for_termination()

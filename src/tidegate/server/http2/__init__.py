"""Unary gRPC over HTTP/2 on `asyncio.Protocol`, in cleartext (prior knowledge) and over TLS (ALPN `h2`).

`frames` and `headers` know bytes, `grpc` knows calls and statuses, `connection` puts them together, `listener` owns
sockets. Nothing here knows about rate limits: a method turns the bytes of a request message into the bytes of a
response message, at once or as a coroutine (docs/adr/0014-own-http2.md).
"""

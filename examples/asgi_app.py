"""Any ASGI application, without a framework."""

from typing import Any

from tidegate.integrations import Rule
from tidegate.integrations.asgi import RateLimitMiddleware


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


app = RateLimitMiddleware(hello, Rule("2/minute", path="/emails"), "1000/hour")

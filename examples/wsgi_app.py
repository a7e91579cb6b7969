"""Any WSGI application, without a framework."""

from collections.abc import Iterable
from typing import Any

from tidegate.integrations import Rule
from tidegate.integrations.wsgi import RateLimitMiddleware


def hello(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


app = RateLimitMiddleware(hello, Rule("2/minute", path="/emails"), "1000/hour")

"""Quart: the ASGI middleware is enough."""

from quart import Quart

from tidegate.integrations import Rule
from tidegate.integrations.asgi import RateLimitMiddleware

app = Quart(__name__)
app.asgi_app = RateLimitMiddleware(app.asgi_app, Rule("2/minute", path="/emails"))  # type: ignore[method-assign,arg-type,assignment]


@app.get("/emails")
async def emails() -> str:
    return "hello"

"""Litestar: a limit for the application, and a guard at a handler."""

from litestar import Litestar, get

from tidegate.integrations import Rule
from tidegate.integrations.litestar import RateLimitPlugin, limited


@get("/emails", guards=[limited("2/minute")])
async def emails() -> str:
    return "hello"


app = Litestar([emails], plugins=[RateLimitPlugin(Rule("1000/hour", namespace="all"))])

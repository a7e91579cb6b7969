"""Starlette: a limit for the application, and one for an endpoint."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tidegate.integrations import Rule
from tidegate.integrations.starlette import install, limited


@limited("2/minute")
async def emails(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def index(request: Request) -> PlainTextResponse:
    return PlainTextResponse("welcome")


app = Starlette(routes=[Route("/", index), Route("/emails", emails)])
install(app, Rule("1000/hour", namespace="all"))

"""aiohttp: a limit for the application, and one for a handler."""

from aiohttp import web

from tidegate.integrations import Rule
from tidegate.integrations.aiohttp import install, limited


@limited("2/minute")
async def emails(request: web.Request) -> web.Response:
    return web.Response(text="hello")


def main(argv: list[str] | None = None) -> web.Application:
    app = web.Application()
    install(app, Rule("1000/hour", namespace="all"))
    app.router.add_get("/emails", emails)
    return app

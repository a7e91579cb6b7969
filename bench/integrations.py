"""What rate limits add to a request: each integration against its bare framework, and against other limiters.

Applications are called in this process, without an HTTP server. Figures are CPU time of the whole process per request,
with background threads and without the time spent waiting for Redis. All variants of a framework take turns; shown
are medians with their range. Every limit is one per hour and address that is never used up; every variant keeps its
defaults (Tidegate writes header fields on every answer, the others write none).
"""

# No `from __future__ import annotations`: FastAPI could not resolve names that a function has imported.
import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import tidegate
from bench.machine import name_peers
from bench.turns import Figures, in_turns
from tidegate.testing import RedisServer

QUOTA = "1000000000/hour"
REQUESTS = 400
ROUNDS = 13
PEERS = ("slowapi", "fastapi-limiter", "flask-limiter", "django-ratelimit")

Call = Callable[[], Any]
AsyncCall = Callable[[], Awaitable[Any]]

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/mail",
    "raw_path": b"/mail",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"example.com"), (b"user-agent", b"bench"), (b"accept", b"*/*")],
    "client": ("203.0.113.7", 5000),
    "server": ("127.0.0.1", 80),
    "extensions": {},
}


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def asgi_call(app: Any) -> AsyncCall:
    """One request to an ASGI application, checked to be a 200."""
    status = 0

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    async def call() -> None:
        await app({**SCOPE, "state": {}}, receive, send)
        if status != 200:
            raise SystemExit(f"answered {status}")

    return call


def wsgi_call(app: Any) -> Call:
    """One request to a WSGI application, checked to be a 200."""
    from io import BytesIO

    status = ""

    def start_response(line: str, headers: Any, error: Any = None) -> None:
        nonlocal status
        status = line

    def call() -> None:
        environ = {
            "REQUEST_METHOD": "GET",
            "SCRIPT_NAME": "",
            "PATH_INFO": "/mail",
            "QUERY_STRING": "",
            "SERVER_NAME": "example.com",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": "example.com",
            "HTTP_USER_AGENT": "bench",
            "REMOTE_ADDR": "203.0.113.7",
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(),
            "wsgi.errors": sys.stderr,
        }
        answer = app(environ, start_response)
        b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        if not status.startswith("200"):
            raise SystemExit(f"answered {status}")

    return call


# -- the applications


def fastapi_variants(url: str, region: str) -> dict[str, Any]:
    from fastapi import Depends, FastAPI, Request
    from fastapi_limiter.depends import RateLimiter
    from pyrate_limiter import Duration, Rate
    from pyrate_limiter import Limiter as PyrateLimiter
    from slowapi import Limiter as SlowLimiter
    from slowapi.util import get_remote_address

    from tidegate.integrations.fastapi import install, limited

    bare, ours, slow, fast = FastAPI(), FastAPI(), FastAPI(), FastAPI()
    install(ours, limiter=async_limiter(url, region))
    slowapi = SlowLimiter(key_func=get_remote_address, storage_uri=url or "memory://")
    slow.state.limiter = slowapi
    rate = Rate(10**9, Duration.HOUR)
    bucket: Any = rate
    if url:
        from pyrate_limiter import RedisBucket
        from redis import Redis

        bucket = RedisBucket.init([rate], Redis.from_url(url), "bench")
    peer = RateLimiter(limiter=PyrateLimiter(bucket))

    @bare.get("/mail")
    async def bare_mail(request: Request) -> dict[str, str]:
        return {"mail": "sent"}

    @ours.get("/mail", dependencies=[Depends(limited(QUOTA))])
    async def our_mail(request: Request) -> dict[str, str]:
        return {"mail": "sent"}

    @slow.get("/mail")
    @slowapi.limit(QUOTA)
    async def slow_mail(request: Request) -> dict[str, str]:
        return {"mail": "sent"}

    @fast.get("/mail", dependencies=[Depends(peer)])
    async def fast_mail(request: Request) -> dict[str, str]:
        return {"mail": "sent"}

    return {"bare": bare, "Tidegate": ours, "slowapi": slow, "fastapi-limiter": fast}


def starlette_variants(url: str, region: str) -> dict[str, Any]:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from tidegate.integrations.starlette import install, limited

    async def mail(request: Request) -> PlainTextResponse:
        return PlainTextResponse("sent")

    bare = Starlette(routes=[Route("/mail", mail)])
    ours = Starlette(routes=[Route("/mail", limited(QUOTA)(mail))])
    install(ours, limiter=async_limiter(url, region))
    return {"bare": bare, "Tidegate": ours}


def litestar_variants(url: str, region: str) -> dict[str, Any]:
    from litestar import Litestar, get

    from tidegate.integrations.litestar import RateLimitPlugin, limited

    @get("/mail")
    async def mail() -> str:
        return "sent"

    @get("/mail", guards=[limited(QUOTA)])
    async def limited_mail() -> str:
        return "sent"

    plugin = RateLimitPlugin(limiter=async_limiter(url, region))
    return {
        "bare": Litestar([mail], openapi_config=None),
        "Tidegate": Litestar([limited_mail], plugins=[plugin], openapi_config=None),
    }


def asgi_variants(url: str, region: str) -> dict[str, Any]:
    from tidegate.integrations.asgi import RateLimitMiddleware

    async def mail(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"sent"})

    return {"bare": mail, "Tidegate": RateLimitMiddleware(mail, QUOTA, limiter=async_limiter(url, region))}


def aiohttp_calls(url: str, region: str) -> dict[str, AsyncCall]:
    """Routing, middleware, handler and header fields of aiohttp, with a request without a socket."""
    from aiohttp import web
    from aiohttp.test_utils import make_mocked_request

    from tidegate.integrations.aiohttp import install, limited

    async def mail(request: web.Request) -> web.Response:
        return web.Response(text="sent")

    bare, ours = web.Application(), web.Application()
    install(ours, limiter=async_limiter(url, region))
    bare.router.add_get("/mail", mail)
    ours.router.add_get("/mail", limited(QUOTA, by=lambda request: "203.0.113.7")(mail))

    def call_of(app: web.Application) -> AsyncCall:
        app.freeze()
        request = make_mocked_request(
            "GET", "/mail", app=app
        )  # created once: its mocks cost more than everything else

        async def call() -> None:
            response = await app._handle(request)
            await response.prepare(request)
            if response.status != 200:
                raise SystemExit(f"answered {response.status}")

        return call

    return {"bare": call_of(bare), "Tidegate": call_of(ours)}


def wsgi_variants(url: str, region: str) -> dict[str, Any]:
    from tidegate.integrations.wsgi import RateLimitMiddleware

    def mail(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"sent"]

    return {"bare": mail, "Tidegate": RateLimitMiddleware(mail, QUOTA, limiter=limiter(url, region))}


def flask_variants(url: str, region: str) -> dict[str, Any]:
    from flask import Flask
    from flask_limiter import Limiter as FlaskLimiter
    from flask_limiter.util import get_remote_address

    from tidegate.integrations.flask import install, limited

    bare, ours, peer = Flask("bare"), Flask("ours"), Flask("peer")
    install(ours, limiter=limiter(url, region))
    flask_limiter = FlaskLimiter(get_remote_address, app=peer, storage_uri=url or "memory://")

    @bare.get("/mail")
    def bare_mail() -> str:
        return "sent"

    @ours.get("/mail")
    @limited(QUOTA)
    def our_mail() -> str:
        return "sent"

    @peer.get("/mail")
    @flask_limiter.limit(QUOTA)
    def peer_mail() -> str:
        return "sent"

    return {"bare": bare, "Tidegate": ours, "flask-limiter": peer}


def django_variants(url: str, region: str) -> dict[str, Any]:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(SECRET_KEY="bench", ALLOWED_HOSTS=["*"], ROOT_URLCONF="bench", LOGGING_CONFIG=None)
        django.setup()
    from types import ModuleType

    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpRequest, HttpResponse
    from django.test import override_settings
    from django.urls import path
    from django_ratelimit.decorators import ratelimit

    from tidegate.integrations.django import limited

    def mail(request: HttpRequest) -> HttpResponse:
        return HttpResponse("sent")

    @limited(QUOTA)
    def our_mail(request: HttpRequest) -> HttpResponse:
        return HttpResponse("sent")

    @ratelimit(key="ip", rate="1000000000/h", block=True)
    def peer_mail(request: HttpRequest) -> HttpResponse:
        return HttpResponse("sent")

    backend = "redis.RedisCache" if url else "locmem.LocMemCache"
    cache = {"BACKEND": f"django.core.cache.backends.{backend}", "LOCATION": url}
    settings.CACHES = {"default": cache}
    from django.core.cache import caches

    caches.settings = caches.configure_settings(None)
    if hasattr(caches._connections, "default"):
        del caches["default"]
    apps: dict[str, Any] = {}
    for name, view in (("bare", mail), ("Tidegate", our_mail), ("django-ratelimit", peer_mail)):
        urls = ModuleType(f"bench_urls_{name}_{bool(url)}")
        urls.urlpatterns = [path("mail", view, name="mail")]  # type: ignore[attr-defined]  # a module made here
        sys.modules[urls.__name__] = urls
        middleware = ["tidegate.integrations.django.RateLimitMiddleware"] if name == "Tidegate" else []
        with override_settings(
            MIDDLEWARE=middleware, TIDEGATE_RULES=[], TIDEGATE_LIMITER=limiter(url, region)
        ):
            handler = WSGIHandler()
        apps[name] = with_urls(handler, urls.__name__)
    return apps


def with_urls(handler: Any, urls: str) -> Any:
    """Every variant has the same path: the URLs are chosen per request, which costs all of them the same."""
    inner = handler._middleware_chain

    def choose(request: Any) -> Any:
        request.urlconf = urls
        return inner(request)

    handler._middleware_chain = choose
    return handler


def grpc_calls(url: str, region: str) -> dict[str, Call]:
    """A method's function with and without the interceptor: gRPC's own work is not measured."""
    import grpc

    from tidegate.integrations.grpc import RateLimitInterceptor

    class Details:
        method = "/mail.Mailer/Send"

    class Context:
        def peer(self) -> str:
            return "ipv4:203.0.113.7:5000"

        def set_trailing_metadata(self, metadata: Any) -> None:
            pass

    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    interceptor = RateLimitInterceptor(QUOTA, limiter=limiter(url, region))
    details, context = Details(), Context()
    return {
        "bare": lambda: handler.unary_unary(b"mail", context),
        "Tidegate": lambda: interceptor.intercept_service(lambda _: handler, details).unary_unary(
            b"mail", context
        ),
    }


# -- limiters, started, and stopped at the end

STOPPING = ExitStack()
STARTED: list[tidegate.AsyncLimiter] = []


def limiter(url: str, region: str) -> tidegate.Limiter:
    made = tidegate.Limiter(region=region, origin=url) if url else tidegate.Limiter()
    return STOPPING.enter_context(made)


def async_limiter(url: str, region: str) -> tidegate.AsyncLimiter:
    made = tidegate.AsyncLimiter(region=region, origin=url) if url else tidegate.AsyncLimiter()
    STARTED.append(made)
    return made


# -- measuring


def measure(calls: dict[str, Call]) -> dict[str, Figures]:
    """CPU microseconds of this process per call, in turns."""
    found = {name: Figures() for name in calls}
    for name in in_turns(calls, ROUNDS):
        call = calls[name]
        gc.collect()
        started = time.process_time_ns()
        for _ in range(REQUESTS):
            call()
        found[name].append((time.process_time_ns() - started) / REQUESTS / 1000)
    return found


async def measure_async(calls: dict[str, AsyncCall]) -> dict[str, Figures]:
    found = {name: Figures() for name in calls}
    for each in STARTED:
        await each.start()
    for name in in_turns(calls, ROUNDS):
        call = calls[name]
        gc.collect()
        started = time.process_time_ns()
        for _ in range(REQUESTS):
            await call()
            await asyncio.sleep(0)  # a server's loop has a turn between two requests
        found[name].append((time.process_time_ns() - started) / REQUESTS / 1000)
    for each in STARTED:
        await each.stop()
    STARTED.clear()
    return found


ASYNC = {
    "FastAPI": fastapi_variants,
    "Starlette": starlette_variants,
    "Litestar": litestar_variants,
    "ASGI": asgi_variants,
}
SYNC = {"Flask": flask_variants, "Django": django_variants, "WSGI": wsgi_variants}


def figures(url: str) -> dict[str, dict[str, Figures]]:
    found: dict[str, dict[str, Figures]] = {}
    for name, variants in ASYNC.items():
        apps = variants(url, "bench")
        found[name] = asyncio.run(measure_async({one: asgi_call(app) for one, app in apps.items()}))
    found["aiohttp"] = asyncio.run(measure_async(aiohttp_calls(url, "bench")))
    for name, variants in SYNC.items():
        found[name] = measure({one: wsgi_call(app) for one, app in variants(url, "bench").items()})
    found["gRPC"] = measure(grpc_calls(url, "bench"))
    STOPPING.close()
    return found


def show(title: str, found: dict[str, dict[str, Figures]]) -> int:
    print(f"\n### {title}\n")
    print(
        "| framework | bare, µs | Tidegate adds, µs | others add, µs | requests per CPU second, bare / Tidegate |"
    )
    print("|---|---|---|---|---|")
    worse = 0
    for name, times in found.items():
        bare = times["bare"]
        added = {one: cpu.minus(bare) for one, cpu in times.items() if one != "bare"}
        ours = added.pop("Tidegate")
        others = ", ".join(
            f"{one} {cpu.shown(1)}, {cpu.middle / max(ours.middle, 0.1):.1f} ×" for one, cpu in added.items()
        )
        worse += sum(cpu.middle <= ours.middle for cpu in added.values())
        rates = f"{1e6 / bare.middle:,.0f} / {1e6 / times['Tidegate'].middle:,.0f}"
        print(f"| {name} | {bare.shown(1)} | {ours.shown(1)} | {others} | {rates} |")
    return worse


def main() -> int:
    """Measure and print; fails if any other limiter adds less."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    name_peers(PEERS)
    worse = show("Embedded", figures(""))
    with RedisServer() as redis:
        worse += show("With Redis", figures(redis.url))
    if worse:
        print(f"\n{worse} of the other limiters add no more than Tidegate")
    return worse

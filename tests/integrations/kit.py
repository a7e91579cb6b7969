"""Shared by the tests of all integrations: limiters with a clock that the test moves, and a loop guard."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import tidegate
from tidegate import AsyncLimiter, Limit, Limiter
from tidegate.testing import ManualClock, make_async_limiter, make_limiter

# The start of a cell of every duration up to a day.
START_MS = 1_800_057_600_000


def manual_limiter(clock: ManualClock, **options: Any) -> Limiter:
    return make_limiter(clock=clock, **options)


def manual_async_limiter(clock: ManualClock, **options: Any) -> AsyncLimiter:
    return make_async_limiter(clock=clock, **options)


def manual_clock() -> ManualClock:
    return ManualClock(START_MS)


def consumed(limiter: Limiter | AsyncLimiter, quota: str, namespace: str, identifier: str) -> int:
    """How much counts for an identifier now."""
    limit = Limit(quota, namespace=namespace)
    found = limiter.peek(limit, identifier)
    if asyncio.iscoroutine(found):
        found = asyncio.run(found)
    return found.effective


async def lifespan(app: Any) -> tuple[Callable[[str], None], AsyncIterator[str]]:
    """The lifespan protocol with an application: what is sent to it, and what it sends."""
    to_send: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    said: asyncio.Queue[str] = asyncio.Queue()

    async def send(message: Any) -> None:
        said.put_nowait(message["type"])

    async def run() -> None:
        try:
            await app({"type": "lifespan"}, to_send.get, send)
        except Exception as error:  # noqa: BLE001  # what a server does: note it and go on
            said.put_nowait(repr(error))

    task = asyncio.create_task(run())

    async def answers() -> AsyncIterator[str]:
        while not task.done() or not said.empty():
            yield await said.get()

    return lambda kind: to_send.put_nowait({"type": kind}), answers()


class LoopBlocked(AssertionError):
    """Something blocked the thread of a running event loop."""


STANDARD = str(Path(threading.__file__).parent)
OURS = str(Path(tidegate.__file__).parent)


def _is_ours() -> bool:
    """Whether the caller, behind the standard library, is Tidegate: frameworks start threads on their loop."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((STANDARD, "<")) or "site-packages" in file:
            return file.startswith(OURS)
        frame = frame.f_back
    return False


def _guarded(
    real: Callable[..., Any], name: str, is_blocking: Callable[..., bool], found: list[str]
) -> Callable[..., Any]:
    def guard(*args: Any, **kwargs: Any) -> Any:
        if is_blocking(*args, **kwargs) and _is_ours():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                found.append(name)
                raise LoopBlocked(f"{name} was called on the thread of a running event loop")
        return real(*args, **kwargs)

    return guard


@contextmanager
def no_blocking() -> Iterator[None]:
    """Every call of ours that can block a thread raises, if an event loop is running in that thread."""
    found: list[str] = []

    def always(*args: Any, **kwargs: Any) -> bool:
        return True

    def unset(event: threading.Event, timeout: float | None = None) -> bool:
        return not event.is_set() and timeout != 0

    def pending(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
        return not future.done() and timeout != 0

    def blocking(sock: socket.socket, *args: Any) -> bool:
        return sock.gettimeout() != 0

    with ExitStack() as patches:
        for owner, name, is_blocking in (
            (time, "sleep", always),
            (threading.Event, "wait", unset),
            (threading.Condition, "wait", always),
            (threading.Thread, "join", always),
            (concurrent.futures.Future, "result", pending),
            (socket.socket, "connect", blocking),
            (socket.socket, "recv", blocking),
            (socket.socket, "sendall", blocking),
        ):
            guard = _guarded(getattr(owner, name), f"{owner.__name__}.{name}", is_blocking, found)
            patches.enter_context(patch.object(owner, name, guard))
        yield
    # A framework may have turned the error into a 500.
    assert not found, f"blocked the event loop: {found}"

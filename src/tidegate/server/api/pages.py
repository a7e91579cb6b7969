"""The pages beside the API: / leads to the others; /livez, /readyz, /metrics for operators; /openapi.json, /docs and
/docs/errors for developers.

Live means that the process answers. Ready means that it can judge requests: it knows keys, and it is not stopping. A
dependency that is down makes a node degraded, not unready: decisions continue from memory, and to take all nodes out of
service because their database is down would turn a small outage into a large one.

Pages have no script and load nothing. Their links are relative, so that they work under any prefix.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, partial
from hmac import compare_digest
from html import escape
from typing import Any, Final

import msgspec

from tidegate import __version__
from tidegate.runtime.statistics import Health
from tidegate.server.api import openapi
from tidegate.server.api.problems import Problem, problems_by_suffix
from tidegate.server.messages import JSON_LINE, Answer, Head, Refuse, Route
from tidegate.telemetry.metrics import Snapshot
from tidegate.telemetry.prometheus import CONTENT_TYPE, render

# The path of `error.type`: the page is also on this server, not only at the address in the type.
ERRORS_PATH: Final = "/docs/errors"

HTML_LINES: Final = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\n"
)

TEXT_LINES: Final = b"content-type: text/plain; charset=utf-8\r\ncache-control: no-store\r\n"
BEARER_LINE: Final = b"www-authenticate: Bearer\r\n"
METRICS_LINES: Final = f"content-type: {CONTENT_TYPE}\r\ncache-control: no-store\r\n".encode("ascii")

# Writing the metrics takes a quarter of a millisecond and more, and a server without `metrics_token` does it for
# everyone who sends 34 bytes: all that ask within this time get the same page, which is written after they asked.
METRICS_INTERVAL_S: Final = 0.01

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #0a7c8c; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 56rem; margin: 0 auto; padding: 2rem 1.25rem 6rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
code, pre { font: 0.875em/1.5 ui-monospace, monospace; background: var(--soft); border-radius: 4px; }
code { padding: 0.1em 0.35em; } pre { padding: 0.9rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top;
padding: 0.4rem 0.75rem 0.4rem 0; border-bottom: 1px solid var(--line); }
.method { color: var(--accent); font-weight: 700; } a { color: var(--accent); } .soft { opacity: 0.75; }
"""


def ready_lines(is_ready: bool, dependencies: Sequence[Health], *, is_public: bool = False) -> str:
    """One line for the node and one for each dependency: its name, its state, and unless `is_public` the reason."""
    degraded = [dependency for dependency in dependencies if not dependency.ok]
    state = "not ready" if not is_ready else "degraded" if degraded else "ready"
    lines = [f"{state}: tidegate"]
    for name, ok, detail in ((each.name, each.ok, each.detail) for each in dependencies):
        reason = "" if is_public else f": {' '.join(detail.split())}"
        lines.append(f"{'ok' if ok else 'degraded'}: {name}{reason}")
    return "\n".join(lines) + "\n"


class Pages:
    """The pages. `is_ready`, `dependencies` and `snapshots` come from the service that assembled everything."""

    def __init__(
        self,
        is_ready: Callable[[], bool],
        dependencies: Callable[[], Sequence[Health]],
        snapshots: Callable[[], Awaitable[Sequence[Snapshot]]],
        refuse: Refuse,
        metrics_token: str | None = None,
        *,
        has_console: bool = False,
        has_check: bool = False,
    ) -> None:
        self._is_ready = is_ready
        self._dependencies = dependencies
        self._snapshots = snapshots
        self._refuse = refuse
        self._has_console = has_console
        self._has_check = has_check
        self._credentials = None if metrics_token is None else f"Bearer {metrics_token}".encode()
        # The next page of metrics, which has not been begun, and when it may begin, in the time of the loop.
        self._next_metrics: asyncio.Task[bytes] | None = None
        self._next_metrics_s = 0.0

    def _is_operator(self, head: Head) -> bool:
        """Whether the request has the token: what follows may name users of a database and identifiers of callers."""
        return self._credentials is not None and compare_digest(self._credentials, head.authorization or b"")

    def routes(self) -> list[Route]:
        problems = problems_by_suffix()
        errors = {ERRORS_PATH: partial(render_errors, "Errors", problems, ERRORS_PATH)}
        for suffix, rows in problems.items():
            path = f"{ERRORS_PATH}/{suffix}"
            errors[path] = partial(render_errors, rows[0].title, {suffix: rows}, path)
        return [
            Route("GET", "/", "index", self.index),
            Route("GET", "/livez", "livez", self.livez, is_probe=True),
            Route("GET", "/readyz", "readyz", self.readyz, is_probe=True),
            Route("GET", "/metrics", "metrics", self.metrics),
            Route("GET", "/openapi.json", "openapi", self.openapi),
            Route("GET", "/docs", "docs", self.docs),
            *(Route("GET", path, "docs", partial(self.errors, cache(page))) for path, page in errors.items()),
        ]

    def index(self, head: Head, _body: bytes) -> Answer:
        """Browsers get a page with links, other clients the same as JSON."""
        links = {"console": "console"} if self._has_console else {}
        links |= {"docs": "docs", "errors": ERRORS_PATH[1:], "openapi": "openapi.json"}
        links |= {"ready": "readyz", "metrics": "metrics"}
        if b"text/html" in head.accept.lower():
            return 200, HTML_LINES, render_index(links)
        document = {"name": "tidegate", "version": __version__, "links": links}
        return 200, JSON_LINE, msgspec.json.encode(document)

    def livez(self, _head: Head, _body: bytes) -> Answer:
        return 200, TEXT_LINES, b"ok\n"

    def readyz(self, head: Head, _body: bytes) -> Answer:
        is_ready = self._is_ready()
        text = ready_lines(is_ready, self._dependencies(), is_public=not self._is_operator(head))
        return 200 if is_ready else 503, TEXT_LINES, text.encode()

    def metrics(self, head: Head, _body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
        if self._credentials is not None and not self._is_operator(head):
            return self._refuse(401, "The token of metrics_token is needed.", head.accept, lines=BEARER_LINE)

        return self._metrics()

    async def _metrics(self) -> Answer:
        task = self._next_metrics
        if task is None:
            task = self._next_metrics = asyncio.get_running_loop().create_task(self._write_metrics())
        # A client that disconnects does not cancel the page of others.
        return 200, METRICS_LINES, await asyncio.shield(task)

    async def _write_metrics(self) -> bytes:
        loop = asyncio.get_running_loop()
        pause_s = self._next_metrics_s - loop.time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._next_metrics = None
        self._next_metrics_s = loop.time() + METRICS_INTERVAL_S
        return render(await self._snapshots(), is_public=self._credentials is None)

    def openapi(self, _head: Head, _body: bytes) -> Answer:
        return 200, JSON_LINE, openapi_document(self._has_check)

    def docs(self, _head: Head, _body: bytes) -> Answer:
        return 200, HTML_LINES, docs_document(self._has_check)

    def errors(self, page: Callable[[], bytes], _head: Head, _body: bytes) -> Answer:
        return 200, HTML_LINES, page()


@cache
def openapi_document(has_check: bool) -> bytes:
    """Made for the first request: most processes never need it."""
    return msgspec.json.encode(openapi.document(has_check=has_check))


@cache
def docs_document(has_check: bool) -> bytes:
    return render_docs(openapi.document(has_check=has_check))


INDEX_TEXTS: Final = {
    "console": "The console: who is being limited right now, and why",
    "docs": "The API",
    "errors": "What errors mean",
    "openapi": "The API as an OpenAPI document",
    "ready": "Is this server ready?",
    "metrics": "Metrics for Prometheus",
}


def render_index(links: Mapping[str, str]) -> bytes:
    """The page at /."""
    rows = [
        f'<li><a href="{escape(link)}">{escape(INDEX_TEXTS[name])}</a></li>' for name, link in links.items()
    ]
    title = f"Tidegate {__version__}"
    return "\n".join([*_head(title), "<ul>", *rows, "</ul></body></html>"]).encode()


def render_docs(document: Mapping[str, Any]) -> bytes:
    """The OpenAPI document as a page, at /docs."""
    return "\n".join(_lines(document)).encode()


def render_errors(title: str, problems: Mapping[str, Sequence[Problem]], path: str) -> bytes:
    """The page at `path` about these errors, by the path of their types."""
    return "\n".join(_error_lines(title, problems, "../" * (path.count("/") - 1))).encode()


def _head(title: str) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield from _head(f"{info['title']} {info['version']}")
    yield f"<p>{escape(info['description'])}</p>"
    yield '<p class="soft">Send <code>Authorization: Bearer KEY</code> with every call. '
    yield 'The same as data: <a href="openapi.json">openapi.json</a>. '
    yield f'What errors mean: <a href="{ERRORS_PATH[1:]}">{ERRORS_PATH}</a>.</p><ul>'
    for path in document["paths"]:
        yield f'<li><a href="#{escape(path)}"><code>{escape(path)}</code></a></li>'
    yield "</ul>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(document, path, method, operation)
    yield "</body></html>"


def _error_lines(title: str, problems: Mapping[str, Sequence[Problem]], up: str) -> Iterator[str]:
    yield from _head(title)
    yield f'<p class="soft"><a href="{up}docs">The API</a>'
    yield f' · <a href="{up}{ERRORS_PATH[1:]}">all errors</a></p>'
    if len(problems) > 1:
        yield "<table>"
        for suffix, rows in problems.items():
            statuses = ", ".join(str(row.status) for row in rows)
            link = f'<a href="#{escape(suffix)}"><code>{escape(suffix)}</code></a>'
            yield f"<tr><td><code>{statuses}</code></td><td>{link}</td></tr>"
        yield "</table>"
    for suffix, rows in problems.items():
        yield f'<h2 id="{escape(suffix)}">{escape(suffix)}</h2>'
        for row in rows:
            yield f'<h3><span class="method">{row.status}</span> {escape(row.title)}</h3>'
            yield f"<p>{_prose(row.when)}</p><p><strong>What to do.</strong> {_prose(row.remedy)}</p>"
        yield f'<p class="soft"><code>type</code>: <code>{escape(rows[0].type)}</code></p>'
    yield "</body></html>"


def _operation(
    document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    yield f'<h2 id="{escape(path)}"><span class="method">{method.upper()}</span> {escape(path)}</h2>'
    yield f"<p><strong>{escape(operation['summary'])}.</strong> {_prose(operation.get('description', ''))}</p>"
    parameters = operation.get("parameters")
    if parameters is not None:
        rows = {each["name"]: {**each["schema"], "description": each["description"]} for each in parameters}
        yield "<h3>Query</h3>" + _fields(document, {"type": "object", "properties": rows})
    body = operation.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        yield "<h3>Body</h3>" + _fields(document, schema)
        example = json.dumps(_example(document, schema), indent=2)
        yield f"<pre>{escape(example)}</pre>"
    yield "<h3>Answers</h3><table>"
    for status, response in operation["responses"].items():
        yield f"<tr><td><code>{escape(status)}</code></td><td>{_prose(response['description'])}</td></tr>"
    yield "</table>"
    content = operation["responses"]["200"].get("content")
    if content is not None:
        example = json.dumps(_example(document, content["application/json"]["schema"]), indent=2)
        yield f"<pre>{escape(example)}</pre>"


def _prose(text: str) -> str:
    """Backquotes become code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _resolve(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    resolved = _resolve(document, schema)
    if resolved["type"] == "array":
        bounds = f"{resolved['minItems']} to {resolved['maxItems']}"
        return f"<p>A list of {bounds} items, each of them:</p>" + _fields(document, resolved["items"])
    rows = []
    for name, field in resolved["properties"].items():
        bounds = ", ".join(
            f"{keyword} {field[keyword]}"
            for keyword in ("minLength", "maxLength", "minimum", "maximum", "default")
            if keyword in field
        )
        needed = "required" if name in resolved.get("required", ()) else "optional"
        rows.append(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(field['type'])}, {needed}</td>"
            f"<td>{_prose(field.get('description', ''))} <span class='soft'>{escape(bounds)}</span></td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


EXAMPLES: Final[Mapping[str, Any]] = {
    "namespace": "email.send",
    "identifier": "user_123",
    "limit": 100,
    "duration": 60000,
    "cost": 1,
    "remaining": 99,
    "reset": 1767225660000,
    "used": 40,
    "own": 7,
    "regional": 20,
    "foreign": 12,
    "carried": 3,
    "reserved": 5,
    "region": "nyc",
    "count": 12,
    "age": 2600,
    "regionalAge": 4,
    "globalAge": 180,
    "requestId": "req_4fXk2Jq9Z",
    "overrideId": "rlor_7Yb1Qm3Tz",
    "cursor": "rlor_8Kd0Wn5Rv",
    "success": True,
    "passed": True,
    "hasMore": True,
    "repeated": False,
    "confirmed": True,
    "reservationId": "rlrs_kqJ1bmljb3I",
    "expires": 1767225720000,
    "life": 120000,
    "exceeded": True,
    "shadow": True,
    "message": "OK",
}


def _example(document: Mapping[str, Any], schema: Mapping[str, Any], name: str = "") -> Any:
    resolved = _resolve(document, schema)
    if name in EXAMPLES and resolved["type"] not in ("object", "array"):
        return EXAMPLES[name]
    if resolved["type"] == "object":
        return {key: _example(document, field, key) for key, field in resolved.get("properties", {}).items()}
    return [_example(document, resolved["items"], name.removesuffix("s"))]

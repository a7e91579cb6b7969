"""The OpenAPI document and the error table as pages for people: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from tidegate.server.api.problems import Problem

__all__ = ["ERRORS_PATH", "HEADERS", "render", "render_errors"]

# The path of `error.type`: whoever reads one may ask the server at hand instead of the address in it.
ERRORS_PATH: Final = "/docs/errors"

HEADERS: Final = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\n"
)

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


def render(document: Mapping[str, Any]) -> bytes:
    """The page."""
    return "\n".join(_lines(document)).encode()


def render_errors(title: str, problems: Mapping[str, Sequence[Problem]]) -> bytes:
    """A page about errors, by the path of their types: about all of them, or about one."""
    return "\n".join(_error_lines(title, problems)).encode()


def _head(title: str) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield from _head(f"{info['title']} {info['version']}")
    yield f"<p>{escape(info['description'])}</p>"
    yield '<p class="soft">Send <code>Authorization: Bearer KEY</code> with every call. '
    yield 'The same as data: <a href="/openapi.json">/openapi.json</a>. '
    yield f'What errors mean: <a href="{ERRORS_PATH}">{ERRORS_PATH}</a>.</p><ul>'
    for path in document["paths"]:
        yield f'<li><a href="#{escape(path)}"><code>{escape(path)}</code></a></li>'
    yield "</ul>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(document, path, method, operation)
    yield "</body></html>"


def _error_lines(title: str, problems: Mapping[str, Sequence[Problem]]) -> Iterator[str]:
    yield from _head(title)
    yield '<p class="soft"><a href="/docs">The API</a>'
    yield f' · <a href="{ERRORS_PATH}">all errors</a></p>'
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
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    example = json.dumps(_example(document, schema), indent=2)
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
    "requestId": "req_4fXk2Jq9Z",
    "overrideId": "rlor_7Yb1Qm3Tz",
    "cursor": "rlor_8Kd0Wn5Rv",
    "success": True,
    "passed": True,
    "hasMore": True,
    "message": "OK",
}


def _example(document: Mapping[str, Any], schema: Mapping[str, Any], name: str = "") -> Any:
    resolved = _resolve(document, schema)
    if name in EXAMPLES and resolved["type"] not in ("object", "array"):
        return EXAMPLES[name]
    if resolved["type"] == "object":
        return {key: _example(document, field, key) for key, field in resolved.get("properties", {}).items()}
    return [_example(document, resolved["items"])]

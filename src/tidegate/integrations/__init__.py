"""Tidegate in web frameworks, RPC servers and HTTP clients.

One module per framework (`tidegate.integrations.fastapi`, `.flask`, `.django`, …), each a thin layer over
`tidegate.integrations.rate_limits`. What an application writes is the same everywhere:

    from tidegate.integrations import Rule, ip, user

    per_caller = Rule("10/second; 1000/hour", by=user | ip)
    uploads = Rule("5/minute", path="/uploads/*", methods="POST", by=ip)

This package imports no framework.
"""

from tidegate.integrations.answers import Answers, Denial, Outcome, problem_json
from tidegate.integrations.callers import Key, Proxies, api_key, header, ip, session, user
from tidegate.integrations.rules import Rule

__all__ = [
    "Answers",
    "Denial",
    "Key",
    "Outcome",
    "Proxies",
    "Rule",
    "api_key",
    "header",
    "ip",
    "problem_json",
    "session",
    "user",
]

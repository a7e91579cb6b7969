"""requests: an adapter that keeps a session within a quota.

    session = requests.Session()
    session.mount("https://api.example.com/", RateLimitAdapter("10/second; 1000/hour"))

Requests wait for room, at most `timeout` seconds; then `LimitExceeded` is raised, and nothing was sent or counted. By
default each host has a quota of its own.
"""

from __future__ import annotations

from typing import Any

import requests
from requests.adapters import HTTPAdapter

from tidegate.integrations.outgoing import Outgoing
from tidegate.integrations.rules import LimitsLike

__all__ = ["RateLimitAdapter"]


class RateLimitAdapter(HTTPAdapter):
    """Options: `by`, `cost`, `namespace`, `timeout`, `limiter`; `adapter` has those of `HTTPAdapter`."""

    def __init__(self, limits: LimitsLike, *, adapter: dict[str, Any] | None = None, **options: Any) -> None:
        self._outgoing = Outgoing(limits, **options)
        super().__init__(**(adapter or {}))

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        self._outgoing.admit(request)
        return super().send(request, *args, **kwargs)

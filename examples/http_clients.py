"""Clients that keep within the quota of a service that they call: they wait until a request fits, or raise."""

import httpx
import requests

from tidegate import LimitExceeded
from tidegate.integrations.httpx import RateLimitTransport
from tidegate.integrations.requests import RateLimitAdapter


def fetch(url: str, times: int) -> int:
    """How many of these requests the quota allows without waiting."""
    sent = 0
    with httpx.Client(transport=RateLimitTransport("2/hour", timeout=0)) as client:
        for _ in range(times):
            try:
                client.get(url)
            except LimitExceeded:
                break
            sent += 1
    return sent


def patient_session() -> requests.Session:
    """Waits up to 30 seconds until it fits."""
    session = requests.Session()
    session.mount("https://", RateLimitAdapter("10/second; 1000/hour", timeout=30))
    return session

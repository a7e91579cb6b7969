"""The scripts that run inside Redis, and the commands that load them."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from tidegate.adapters.redis.wire import pack

__all__ = [
    "CREDIT_SCRIPT",
    "CREDIT_SHA",
    "LEASE_SCRIPT",
    "LEASE_SHA",
    "LOAD_SCRIPTS",
    "LOAD_SCRIPTS_PACKED",
    "MERGE_SCRIPT",
    "MERGE_SHA",
    "RESERVE_SCRIPT",
    "RESERVE_SHA",
    "RESETS_SCRIPT",
    "RESETS_SHA",
    "SHARE_SCRIPT",
    "SHARE_SHA",
]


def _read(name: str) -> str:
    return files("tidegate.adapters.redis").joinpath(name).read_text("utf-8")


def _sha(script: str) -> bytes:
    """The name by which Redis knows a loaded script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


MERGE_SCRIPT: Final = _read("merge.lua")
CREDIT_SCRIPT: Final = _read("records.lua") + _read("credit.lua")
SHARE_SCRIPT: Final = _read("records.lua") + _read("share.lua")
RESERVE_SCRIPT: Final = _read("records.lua") + _read("reserve.lua")
LEASE_SCRIPT: Final = _read("lease.lua")
RESETS_SCRIPT: Final = _read("records.lua") + _read("resets.lua")
MERGE_SHA: Final = _sha(MERGE_SCRIPT)
CREDIT_SHA: Final = _sha(CREDIT_SCRIPT)
SHARE_SHA: Final = _sha(SHARE_SCRIPT)
LEASE_SHA: Final = _sha(LEASE_SCRIPT)
RESERVE_SHA: Final = _sha(RESERVE_SCRIPT)
RESETS_SHA: Final = _sha(RESETS_SCRIPT)
LOAD_SCRIPTS: Final = tuple(
    ("SCRIPT", "LOAD", script)
    for script in (MERGE_SCRIPT, CREDIT_SCRIPT, SHARE_SCRIPT, LEASE_SCRIPT, RESERVE_SCRIPT, RESETS_SCRIPT)
)
LOAD_SCRIPTS_PACKED: Final = tuple(pack(command) for command in LOAD_SCRIPTS)

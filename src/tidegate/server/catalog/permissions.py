"""What a root key may carry: the forms of a permission, in one place.

Two forms grant something. `ratelimit.SCOPE.ACTION` for all namespaces (`*`) or for one, by its id; and an URN that lets
a key read one override and nothing else. The server compares permissions letter by letter and never parses them. A key
may carry other strings as well, such as the permissions of another service: they are stored and grant nothing here,
and whoever makes the key is told so.
"""

from __future__ import annotations

import re
from typing import Final

from tidegate.errors import InvalidInput

__all__ = [
    "ACTIONS",
    "ALL",
    "PERMISSIONS_MAX",
    "PERMISSION_LENGTH_MAX",
    "checked_permissions",
    "override_urn",
    "why_without_effect",
]

# The actions that operations ask for.
ACTIONS: Final = ("limit", "create_namespace", "set_override", "read_override", "delete_override")
# Everything that the API can do.
ALL: Final = tuple(f"ratelimit.*.{action}" for action in ACTIONS)

# As long as any name; a permission holds one at most.
PERMISSION_LENGTH_MAX: Final = 512
# Every node holds every key in memory, and the smallest column that they are stored in takes 16 MB as JSON.
PERMISSIONS_MAX: Final = 1_000

NAMESPACE_ID: Final = re.compile(r"rlns_[0-9A-Za-z]{1,64}")
URN: Final = re.compile(r"urn:tidegate:ratelimit:rlns_[0-9A-Za-z]{1,64}:override:rlor_[0-9A-Za-z]{1,64}")
FIELD: Final = "permissions"


def override_urn(namespace_id: str, override_id: str) -> str:
    """The permission to read this one override and nothing else."""
    return f"urn:tidegate:ratelimit:{namespace_id}:override:{override_id}"


def checked_permissions(text: str) -> tuple[str, ...]:
    """The permissions in `A,B`, each once and in their order; `all` stands for those of the whole API.

    Whatever can be stored and printed is taken, whether it grants something or not. `InvalidInput` for the rest.
    """
    wanted: dict[str, None] = {}
    for part in text.split(","):
        permission = part.strip()
        if not permission:
            continue
        if len(permission) > PERMISSION_LENGTH_MAX:
            raise InvalidInput(FIELD, permission, f"at most {PERMISSION_LENGTH_MAX} characters each")
        if not permission.isprintable():
            raise InvalidInput(FIELD, permission, "printable characters only")
        wanted.update(dict.fromkeys(ALL if permission == "all" else (permission,)))
    if len(wanted) > PERMISSIONS_MAX:
        raise InvalidInput(FIELD, len(wanted), f"at most {PERMISSIONS_MAX} of them")
    return tuple(wanted)


def why_without_effect(permission: str) -> str | None:
    """Why no operation will ever ask for `permission`, and which form would grant something; None if one may."""
    if permission.startswith("urn:"):
        if URN.fullmatch(permission) is not None:
            return None
        form = override_urn("NAMESPACE_ID", "OVERRIDE_ID")
        step = "`tidegate namespaces list` and `tidegate overrides list` show the ids"
        return f"the URN of an override is {form}; {step}"
    # A namespace's name may hold dots. It is no scope, but is told so.
    head, _, rest = permission.partition(".")
    scope, _, action = rest.rpartition(".")
    if head != "ratelimit" or not scope:
        return "what grants something is ratelimit.SCOPE.ACTION, or the URN of an override"
    if action not in ACTIONS:
        return f"the ACTION at its end grants something if it is one of {', '.join(ACTIONS)}"
    if action == "create_namespace" and scope != "*":
        return "what does not exist yet has no id: ratelimit.*.create_namespace"
    if scope != "*" and NAMESPACE_ID.fullmatch(scope) is None:
        step = "`tidegate namespaces list` shows the ids"
        return f"the SCOPE is * or a namespace's id, rlns_…, not its name; {step}"
    return None

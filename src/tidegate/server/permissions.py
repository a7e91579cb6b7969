"""What a root key may carry: the forms of a permission, in one place.

Two forms. `ratelimit.SCOPE.ACTION` for all namespaces (`*`) or for one, by its id; and an URN that lets a key read one
override and nothing else. The server compares permissions letter by letter and never parses them: only what is
written well here can ever match, so that the rest is refused when the key is made, with the reason.
"""

from __future__ import annotations

import re
from typing import Final

from tidegate.errors import InvalidInput

__all__ = ["ACTIONS", "ALL", "ALL_ACTIONS", "checked_permission", "override_urn"]

# The actions that operations ask for.
ACTIONS: Final = ("limit", "create_namespace", "set_override", "read_override", "delete_override")
# Named by the API and asked for by none of its operations: keys of other systems carry them.
ALL_ACTIONS: Final = (*ACTIONS, "read_namespace", "update_namespace", "delete_namespace", "list_overrides")
# Everything that the API can do.
ALL: Final = tuple(f"ratelimit.*.{action}" for action in ACTIONS)

NAMESPACE_ID: Final = re.compile(r"rlns_[0-9A-Za-z]{1,64}")
URN: Final = re.compile(r"urn:tidegate:ratelimit:rlns_[0-9A-Za-z]{1,64}:override:rlor_[0-9A-Za-z]{1,64}")
FIELD: Final = "permissions"


def override_urn(namespace_id: str, override_id: str) -> str:
    """The permission to read this one override and nothing else."""
    return f"urn:tidegate:ratelimit:{namespace_id}:override:{override_id}"


def checked_permission(text: str) -> str:
    """`text`, if the server can ever ask for it; `InvalidInput` with the next step otherwise."""
    if text.startswith("urn:"):
        if URN.fullmatch(text) is None:
            form = override_urn("NAMESPACE_ID", "OVERRIDE_ID")
            step = "`tidegate namespaces list` and `tidegate overrides list` show the ids"
            raise InvalidInput(FIELD, text, f"{form}; {step}")
        return text
    # A namespace's name may hold dots. It is no scope, but is told so.
    head, _, rest = text.partition(".")
    scope, _, action = rest.rpartition(".")
    if head != "ratelimit" or not scope:
        raise InvalidInput(FIELD, text, "ratelimit.SCOPE.ACTION, or all, or the URN of an override")
    if action not in ALL_ACTIONS:
        raise InvalidInput(FIELD, text, f"an ACTION at its end that is one of {', '.join(ALL_ACTIONS)}")
    if scope != "*" and NAMESPACE_ID.fullmatch(scope) is None:
        step = "`tidegate namespaces list` shows the ids"
        raise InvalidInput(
            FIELD, text, f"a SCOPE that is * or a namespace's id, rlns_…, not its name; {step}"
        )
    if action == "create_namespace" and scope != "*":
        raise InvalidInput(FIELD, text, "ratelimit.*.create_namespace: what does not exist yet has no id")
    return text

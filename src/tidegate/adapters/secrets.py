"""Hides secrets in text that is shown: logs, errors, `tidegate config show`. The only module that does it.

Laws: masking never raises, takes time linear in the text, and would rather hide too much than too little. What is a
secret: Tidegate keys (`tg_…`), whatever follows `Bearer` or `Basic`, the value of an Authorization header and of
fields named password, secret, token and the like, the password of a URL, and every literal that the caller names.
`mask` is for any text; `mask_url` is for a string that as a whole is meant to be a URL, also a malformed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

__all__ = ["MASK", "Masker", "mask", "mask_url", "url_password"]

MASK: Final = "****"

FIELD_NAMES: Final = r"x-api-key|api[-_]?key|root[-_]?key|password|passwd|pwd|secret|token"

# What stands between a name and its value in headers, JSON, reprs of dicts and of header tuples, key=value text.
SEPARATOR: Final = r"[\\\"']*\s*(?:[:=]\s*|,\s*(?=b?\\*[\"']))(?:b(?=\\*[\"']))?"

# A quoted value ends at its closing quote, or at the end of a text that was cut off.
QUOTED: Final = r"\\*\"(?:\\.|[^\"\\])*|\\*'(?:\\.|[^'\\])*"
BARE: Final = r"[^\s\"'\\,;<>\[\](){}]+"

PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    # An Authorization header: unquoted, all of the line, since schemes such as Digest hold spaces and commas.
    (re.compile(rf"(?is)(authorization{SEPARATOR})(?:{QUOTED}|[^\r\n]+)"), rf"\g<1>{MASK}"),
    (re.compile(rf"(?is)((?:{FIELD_NAMES}){SEPARATOR})(?:{QUOTED}|{BARE})"), rf"\g<1>{MASK}"),
    (re.compile(rf"(?i)((?:bearer|basic)(?:\s|%20|\+|\\+[nrt])+){BARE}"), rf"\g<1>{MASK}"),
    # Options of a URL: ?sslpass=, &redis_auth=.
    (re.compile(r"(?i)([?&][^=&#?\s]*(?:pass|auth)[^=&#?\s]*=)[^&#\s\"']*"), rf"\g<1>{MASK}"),
    # A key of Tidegate anywhere, also with its underscore percent- or JSON-escaped.
    (re.compile(r"(?i)tg(?:_|%5f|\\+u005f|\\+x5f)[a-z0-9_%.~\-]{4,}"), f"tg_{MASK}"),
)

# Cheap test whether any pattern can match at all: most log lines hold none of these.
SUSPECT: Final = re.compile(
    rf"(?i)tg(?:_|%5f|\\+u005f|\\+x5f)|://|%3a%2f%2f|bearer|basic|authorization|{FIELD_NAMES}"
)

LINE: Final = re.compile(r"[^\r\n]+")
# The "@" after the mask of a URL, so that the text before it contains no "@" of this URL.
MASKED_URL: Final = re.compile(rf"(?<=:{re.escape(MASK)})@")
URL_USER: Final = re.compile(r"(?i)(?:://|%3a%2f%2f)(?:(?!%3a|%40)[^:/?#@])*")
# Databases that accept a user without a password: by its certificate, its address or a socket. Anywhere else what
# stands alone before the "@" may be a token.
USER_SCHEMES: Final = frozenset({"mysql", "mariadb", "postgres", "postgresql"})
SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(?:://|%3[aA]%2[fF]%2[fF])")
SCHEME_BEFORE: Final = re.compile(r"(?i)([a-z][a-z0-9+.\-]*)$")
# Where the user of a URL ends and a password begins. Some escape the colon as well.
PASSWORD_FOLLOWS: Final = re.compile(r"(?i):|%3a")
# Characters that no user name contains, so that something else was meant.
NOT_IN_USER: Final = frozenset("/?#@")
# An option whose name has escapes is not one of ours. A value ends at the next "&": what follows a "#" or ";"
# may be the rest of it.
SECRET_OPTION: Final = re.compile(r"(?i)([?&;#][^=&;#]*(?:pass|pwd|secret|token|auth|cred|%)[^=&;#]*=)[^&]*")


def mask_url(url: str) -> str:
    """`url` without its secrets. Hides too much rather than too little.

    The last "@" ends the password, because an "@" in a password is often not encoded. A user without a password stays
    where a database accepts one, so that a command with the URL can be pasted.
    """
    match = SCHEME.match(url)
    start = match.end() if match else 0
    end = url.rfind("@")
    if end >= start:
        user, *password = PASSWORD_FOLLOWS.split(url[start:end], maxsplit=1)
        if password:
            hidden = f"{user}:{MASK}"
        elif match and match.group(1).lower() in USER_SCHEMES and NOT_IN_USER.isdisjoint(user):
            hidden = user
        else:
            hidden = MASK
        url = url[:start] + hidden + url[end:]
    return SECRET_OPTION.sub(rf"\g<1>{MASK}", url)


def _mask_urls_in(line: re.Match[str]) -> str:
    """Hide passwords of URLs in one line. A message may contain URLs that are masked already: those end a search."""
    return "@".join([_mask_url_in(part) for part in MASKED_URL.split(line.group())])


def _mask_url_in(text: str) -> str:
    """Hide the password of a URL, which may have other text around it, by the rules of `mask_url`.

    A password may contain spaces, so everything from the first one to the last "@" is hidden, with what stands between
    several URLs.
    """
    end = max(text.rfind("@"), text.lower().rfind("%40"))
    if end < 0:
        return text
    for user in URL_USER.finditer(text, 0, end):
        rest = text[user.end() : user.end() + 3].lower()
        if rest.startswith(":") or rest == "%3a":
            return f"{text[: user.end()]}:{MASK}{text[end:]}"
        if user.end() == end:
            scheme = SCHEME_BEFORE.search(text, 0, user.start())
            if scheme is None or scheme.group().lower() not in USER_SCHEMES:
                return f"{text[: user.start()]}://{MASK}{text[end:]}"
    return text


class Masker:
    """Masks by pattern, and the given literal secrets in every spelling in which a URL may contain them."""

    def __init__(self, literals: Iterable[str] = ()) -> None:
        spellings: set[str] = set()
        for literal in literals:
            # Shorter ones would blank out ordinary words; a secret of three letters protects nothing.
            if len(literal) >= 4:
                for plain in (literal, unquote(literal)):
                    spellings |= {plain, quote(plain, safe=""), quote(plain), repr(plain)[1:-1]}
                    spellings.add(plain.encode("unicode_escape").decode("ascii"))
        longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._literals = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        if self._literals is not None:
            text = self._literals.sub(MASK, text)
        if SUSPECT.search(text) is None:
            return text
        if "://" in text or "%3a%2f%2f" in text.lower():
            text = LINE.sub(_mask_urls_in, text)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return text


mask: Final = Masker()
"""Masking by pattern alone."""


def url_password(url: str) -> str | None:
    """The password inside a URL, as written; None without one. Tolerates unencoded `@`, `/`, `#` and spaces in it."""
    match = re.match(r"(?is)[a-z][a-z0-9+.\-]*://[^:/?#@]*:(.*)@", url)
    return match.group(1) if match is not None and match.group(1) else None

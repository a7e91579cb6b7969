"""Masking must also work on arbitrary text."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tidegate.adapters.secrets import MASK, Masker, mask, mask_url, url_password
from tidegate.server.process.config import SETTINGS

KEY = "tg_3ZdkJ8vQw0sXbN5"
PASSWORD = "hunter2-S3cret"
# The parts that the patterns look for, to be combined in any order.
FRAGMENTS = (
    "tg_abcd",
    "password",
    "=",
    ":",
    "Bearer",
    '"',
    "'",
    "\\",
    "redis://",
    "u",
    "@",
    "b",
    ",",
    "%3a%2f%2f",
    "?",
    "&",
    "x",
    "authorization",
    "%40",
    " ",
    "\n",
)


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        f"key={KEY}",
        f"'{KEY}'",
        f"({KEY})",
        f"x{KEY}x",
        KEY.upper(),
        KEY.replace("_", "%5F"),
        KEY.replace("_", "\\u005f"),
        KEY.replace("_", "\\\\u005F"),
        KEY.replace("_", "\\x5f"),
        f"https://host/path?key={KEY}&x=1",
        f"{KEY},{KEY};{KEY}",
        f"tg_tg_{KEY}",
        f"Bearer {KEY}",
        f"\N{ZERO WIDTH SPACE}{KEY}",
    ],
)
def test_a_key_is_hidden_however_it_is_written(text: str) -> None:
    assert "3ZdkJ8vQw0sXbN5".lower() not in mask(text).lower()


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PASSWORD}",
        f"authorization:bearer {PASSWORD}",
        f"AUTHORIZATION : {PASSWORD}",
        f"Proxy-Authorization: Basic {PASSWORD}",
        f"Authorization: Digest username=u, response={PASSWORD}",
        f'Authorization: Digest username="u", response="{PASSWORD}"',
        f"{{'Authorization': 'Token {PASSWORD}'}}",
        f'{{"authorization": "Custom scheme with spaces {PASSWORD}"}}',
        f'{{\\"authorization\\": \\"{PASSWORD}\\"}}',
        f"[(b'host', b'x'), (b'authorization', b'{PASSWORD}')]",
        f"[('authorization', '{PASSWORD}')]",
        f"headers=Headers({{'x-api-key': '{PASSWORD}'}})",
        f"Bearer\t{PASSWORD}",
        f"bearer%20{PASSWORD}",
        f"b'GET / HTTP/1.1\\r\\nAuthorization: {PASSWORD}\\r\\n'",
        f"GET / HTTP/1.1\r\nAuthorization: {PASSWORD}\r\nHost: x",
        f"curl -H 'Authorization: Bearer {PASSWORD}' http://host/",
        f"REDIS_PASSWORD={PASSWORD}",
        f"password = {PASSWORD}",
        f"password='{PASSWORD} with spaces {PASSWORD}'",
        f'"password": "a\\"quote {PASSWORD}"',
        f"db_password:{PASSWORD}",
        f"--token={PASSWORD}",
        f"client_secret={PASSWORD}&grant_type=x",
        f"connect(host='h', password='{PASSWORD}')",
        f"password='{PASSWORD}",
    ],
)
def test_a_credential_is_hidden_by_its_scheme_or_its_name(text: str) -> None:
    assert PASSWORD not in mask(text)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@host:6379/0",
        f"redis://user:{PASSWORD}@host",
        f"redis://{PASSWORD}@host",
        f"rediss+cluster://user:{PASSWORD}@a:1,b:2",
        f"mysql://root:{PASSWORD}@h:3306/db?charset=utf8",
        f"postgres://u:{PASSWORD}@[::1]:5432/db",
        f"POSTGRESQL://u:{PASSWORD}@h/db",
        f"mysql://u:p@ss{PASSWORD}@h/db",
        f"mysql://u:p/ss#{PASSWORD}?x@h/db",
        f'mysql://u:"{PASSWORD}"@h/db',
        f"mysql://u:{PASSWORD}%40x@h/db",
        f"({PASSWORD[:0]}redis://u:{PASSWORD}@h)",
        f"redis://h:6379,redis://u:{PASSWORD}@h2",
        f"redis://h/0,redis://u:{PASSWORD}@h2",
        quote(f"mysql://u:{PASSWORD}@h/db", safe=""),
        f"postgres://h/db?sslpassword={PASSWORD}",
        f"redis://h?auth={PASSWORD}",
        f"1redis://u:{PASSWORD}@h",
        f"redis://u:a b {PASSWORD}@h",
        f"redis://:{PASSWORD} c@h",
        f"redis://my user:{PASSWORD} c d@h",
        f"redis://us%20er:{PASSWORD}@h",
        f"redis://u:6379 {PASSWORD}@h",
    ],
)
def test_the_password_of_a_url_is_hidden(url: str) -> None:
    for text in (url, f"cannot reach {url}: refused", repr(url), f'{{"url":"{url}"}}', f"a\n{url}\nb"):
        assert PASSWORD not in mask(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://root:pw@db.internal:3306/tidegate", f"mysql://root:{MASK}@db.internal:3306/tidegate"),
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("postgres://reader@h/db", "postgres://reader@h/db"),
        ("http://127.0.0.1:8080/v2/liveness", "http://127.0.0.1:8080/v2/liveness"),
        ("identifier user_12 denied, 5 of 10", "identifier user_12 denied, 5 of 10"),
        ("sqlite:///data/tidegate.db", "sqlite:///data/tidegate.db"),
    ],
)
def test_text_that_is_not_a_secret_stays_readable(url: str, shown: str) -> None:
    assert mask(url) == shown


passwords = st.text(min_size=4, max_size=40) | st.lists(
    st.sampled_from(
        ["a", "Z", "7", " ", "@", "/", "#", "?", ":", "%", "&", "'", '"', "\\", "\n", "\t", "://", "%40"]
    ),
    min_size=4,
    max_size=12,
).map("".join)


@given(passwords, st.sampled_from(["", "user", "my user", "us%20er"]))
def test_a_password_of_any_characters_is_hidden_wherever_a_url_is_shown(password: str, user: str) -> None:
    hosts = "host.example:6379/0"
    url = f"redis://{user}:{password}@{hosts}"
    assume(password not in f"cannot reach 'redis://{user}:{MASK}@{hosts}': refused")
    setting = next(each for each in SETTINGS if each.path == "origin")
    for shown in (mask_url(url), setting.show(url)):
        assert password not in shown
        assert MASK in shown
    assert url_password(url) == password
    if not {"\n", "\r"} & set(password):
        assert password not in mask(f"cannot reach {url!s}: refused")
    for spelled in (url, repr(url), quote(url, safe="")):
        assert password not in Masker([password])(f"cannot reach {spelled}: refused")


@given(st.text(max_size=40), st.text(max_size=40), st.text("abcXYZ0189_-", min_size=8, max_size=40))
def test_a_key_is_hidden_in_any_surroundings(before: str, after: str, secret: str) -> None:
    assert f"tg_{secret}" not in mask(f"{before} tg_{secret} {after}")


@given(st.text("abcXYZ0189:@/?#'\"\\%&=.,;", min_size=4, max_size=30))
def test_a_literal_secret_is_hidden_in_every_encoding(secret: str) -> None:
    masker = Masker([secret])
    for spelled in (secret, quote(secret, safe=""), quote(secret), repr(secret), str({"x": secret})):
        assert secret not in masker(f"<{spelled}>")
    assert quote(secret, safe="") not in masker(f"<{quote(secret, safe='')}>")


@given(st.lists(st.sampled_from(FRAGMENTS)).map("".join) | st.text(max_size=300))
def test_masking_takes_any_text_and_leaves_no_key_in_it(text: str) -> None:
    assert "tg_abcd" not in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "a://",
        "redis://a:",
        "bearer ",
        "password",
        "password=",
        "authorization: ",
        "tg_",
        "\\",
        "token='",
        "?pass",
        "@",
        "%40",
    ],
)
def test_the_time_of_masking_is_linear_in_the_text(text: str) -> None:
    # A quadratic pattern would need minutes for this, and the time limit of the test run would end it.
    hostile = text * (400_000 // len(text))
    assert isinstance(mask(hostile + "://" + hostile + "@"), str)


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("mysql://u:pw@h/db", "pw"),
        ("redis://:p@ss@h", "p@ss"),
        ("redis://u:p a s s@h", "p a s s"),
        ("redis://h:6379", None),
        ("mysql://u:@h", None),
        ("sqlite:///x.db", None),
    ],
)
def test_the_password_inside_a_url_is_found(url: str, password: str | None) -> None:
    assert url_password(url) == password

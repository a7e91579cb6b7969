from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.server.harness import Reply, TidegateServer, Workspace
from tidegate.server.api.problems import Refusal
from tidegate.server.api.schema import Doubt, decode_limit, decode_multi_limit

T = TypeVar("T")
VALID = b'{"namespace":"api","identifier":"user","limit":10,"duration":60000}'


def settled(decode: Callable[[bytes], T], body: bytes) -> T:
    """Parse as for a known caller."""
    try:
        return decode(body)
    except Doubt as doubt:
        found: T = doubt.settle()
        return found


def refused(reply: Reply) -> str:
    assert (reply.status, reply.problem) == (400, "unkey/application/invalid_input")
    assert reply.error["errors"], "it says what is wrong"
    return str(reply.error["errors"][0]["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"true",
        b"7",
        b'"text"',
        b"[]",
        b"{}",
        b"{}{}",
        VALID + b"x",
        VALID[:-1],
        b"\xef\xbb\xbf" + VALID,
        VALID.replace(b"10", b"010"),
        VALID.replace(b"10", b"+10"),
        VALID.replace(b"10", b"0x10"),
        VALID.replace(b"10", b"NaN"),
        VALID.replace(b"10", b"Infinity"),
        VALID.replace(b"10", b"10.5"),
        VALID.replace(b"10", b"1e-1"),
        VALID.replace(b"10", b"1e400"),
        VALID.replace(b"10", b"1e999999999"),
        VALID.replace(b"10", b"1e-999999999"),
        VALID.replace(b"10", b"1e99999999999999999999"),
        VALID.replace(b"10", b"-1e-99999999999999999999"),
        VALID.replace(b"10", b"9223372036854775808.0"),
        VALID.replace(b'"user"', b'"us\ner"'),
        VALID.replace(b'"user"', b'"us\\qer"'),
        VALID.replace(b'"', b"'"),
    ],
)
def test_what_is_not_a_body_of_this_operation_is_a_400(workspace: Workspace, body: bytes) -> None:
    refused(workspace.call("limit", body))


@pytest.mark.parametrize("number", [b"10.0", b"1e1", b"1.0E+1", b"100e-1"])
def test_a_number_that_is_whole_is_an_integer_however_it_is_written(
    workspace: Workspace, number: bytes
) -> None:
    assert workspace.call("limit", VALID.replace(b"10", number)).data["limit"] == 10
    assert (
        workspace.call("multiLimit", b"[" + VALID.replace(b"10", number) + b"]").data["limits"][0]["limit"]
        == 10
    )
    exact = workspace.call("limit", VALID.replace(b"10", b"9.223372036854775807e18"))
    assert exact.data["limit"] == 2**63 - 1
    look = VALID[:-1] + b',"cost":0e50}'
    assert workspace.call("limit", look).data["remaining"] == workspace.call("limit", look).data["remaining"]
    twice = VALID.replace(b"10", number)[:-1] + b',"limit":10}'
    assert "twice" in refused(workspace.call("limit", twice))
    refused(workspace.call("limit", VALID.replace(b"10", number).replace(b"user", b"\\ud800")))
    refused(workspace.call("limit", VALID.replace(b"10", number).replace(b"user", b"\xff")))


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc0\x80",
        b"\\ud800",
        b"\\ud800\\u0041",
        b"\\udc00",
    ],
)
def test_invalid_utf_8_and_lone_surrogates_are_a_400(workspace: Workspace, text: bytes) -> None:
    refused(workspace.call("limit", VALID.replace(b"user", text)))


@pytest.mark.parametrize(
    "digits", [b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 40, b"9" * 100_000]
)
def test_integers_beyond_64_bits_are_a_400(workspace: Workspace, digits: bytes) -> None:
    refused(workspace.call("limit", VALID.replace(b"10", digits)))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"namespace":', b'[{"x":['])
@pytest.mark.parametrize("operation", ["limit", "multiLimit"])
def test_deep_json_is_a_400_and_no_crash(workspace: Workspace, operation: str, opening: bytes) -> None:
    refused(workspace.call(operation, opening * 200_000))
    refused(workspace.call(operation, b'{"namespace":"a","identifier":' + opening * 5_000))
    assert workspace.limit().status == 200


@pytest.mark.parametrize("size", [70_000, 9_000_000])
@pytest.mark.parametrize("end", [b'":1}', b'":1', b'":1}x'])
def test_an_answer_never_repeats_a_long_key_of_the_body(workspace: Workspace, size: int, end: bytes) -> None:
    for start in (b'{"', b'{"namespace":"a","'):
        reply = workspace.call("limit", start + b"k" * size + end)
        refused(reply)
        assert len(reply.body) < 5_000
        reply = workspace.call("limit", start + b"k" * (size % 60_000) + end)
        refused(reply)
        assert len(reply.body) < 5_000


@pytest.mark.parametrize("decode", [decode_limit, decode_multi_limit])
def test_more_strings_than_a_valid_body_can_hold_are_refused_without_decoding_them(
    decode: Callable[[bytes], object],
) -> None:
    most = 1_024 + 14 if decode is decode_limit else 100 * (1_024 + 14)
    # Malformed only at its end: decoding it would find that.
    just, over = (b"[" + b'""' * (marks // 2) + b" " * 70_000 for marks in (most, most + 2))
    with pytest.raises(Refusal) as taken:
        decode(just)
    with pytest.raises(Refusal) as counted:
        decode(over)
    assert taken.value.errors is not None
    assert counted.value.errors is not None
    assert "more strings" not in taken.value.errors[0].message
    assert "more strings" in counted.value.errors[0].message
    assert "at most 100 items" in str(counted.value.errors[0].fix)


def test_the_largest_bodies_that_are_valid_are_taken() -> None:
    name = '"' * 512
    fields = {"namespace": name, "identifier": name, "limit": 1, "duration": 1_000, "cost": 1}
    one = json.dumps(fields).encode()
    assert len(settled(decode_multi_limit, b"[" + b",".join([one] * 100) + b"]")) == 100
    assert settled(decode_limit, one.ljust(100_000)).namespace == name
    for escaped in ("\U0001f600" * 512, "\x01" * 512):
        body = json.dumps(fields | {"namespace": escaped, "identifier": escaped}).encode()
        assert settled(decode_multi_limit, b"[" + b",".join([body] * 100) + b"]")[99].identifier == escaped


def test_wide_json_is_a_400_and_names_a_few_of_its_faults(workspace: Workspace) -> None:
    narrow = b"{" + b",".join(b'"field_%d":1' % number for number in range(3_000)) + b"}"
    reply = workspace.call("limit", narrow)
    refused(reply)
    assert len(reply.error["errors"]) == 20
    wide = b"{" + b",".join(b'"field_%d":1' % number for number in range(400_000)) + b"}"
    refused(workspace.call("limit", wide))
    refused(workspace.call("multiLimit", b"[" + b",".join([VALID] * 100_000) + b"]"))
    refused(workspace.call("limit", VALID.replace(b"user", b"x" * 9_000_000)))


@pytest.mark.parametrize(
    "body",
    [
        VALID[:-1] + b',"limit":10}',
        VALID[:-1] + b',"limit":11}',
        VALID[:-1] + b',"li\\u006dit":11}',
        b'{"namespace":"x",' + VALID[1:],
        VALID[:-1] + b',"cost":1,"cost":1}',
        VALID.replace(b'"user"', b'"quo\\"te"')[:-1] + b',"limit":11}',
        VALID[:-1] + b" , \n\t" + b'"limit"  :  11}',
        VALID[:-1] + b',"limit":10' * 100_000 + b"}",
    ],
)
def test_a_duplicate_key_is_a_400(workspace: Workspace, body: bytes) -> None:
    assert "twice" in refused(workspace.call("limit", body))


def test_duplicate_keys_are_found_in_every_operation(workspace: Workspace) -> None:
    workspace.limit("api")
    pair = b'"namespace":"api","identifier":"x"'
    for operation, body in (
        ("multiLimit", b"[" + VALID + b"," + VALID[:-1] + b',"limit":10}]'),
        ("setOverride", b"{" + pair + b',"limit":1,"duration":1000,"limit":2}'),
        ("getOverride", b"{" + pair + b',"identifier":"y"}'),
        ("deleteOverride", b"{" + pair + b',"identifier":"y"}'),
        ("listOverrides", b'{"namespace":"api","limit":1,"limit":2}'),
    ):
        assert "twice" in refused(workspace.call(operation, body)), operation


@pytest.mark.parametrize("name", ['a"b', '""', '"' * 512, "a\\b", "a:b", '{"limit":1,"limit":2}'])
def test_strings_that_look_like_keys_are_only_strings(workspace: Workspace, name: str) -> None:
    assert workspace.limit(name, name).status == 200
    assert (
        settled(
            decode_limit,
            json.dumps(
                {"namespace": name, "identifier": name, "limit": 1, "duration": 1_000, "cost": 2}
            ).encode(),
        ).identifier
        == name
    )


def test_whitespace_up_to_the_bound_of_the_body_is_not_a_fault(
    server: TidegateServer, workspace: Workspace
) -> None:
    bound = 10_485_760
    padded = b" " * (bound - len(VALID)) + VALID
    assert workspace.call("limit", padded).status == 200
    reply = workspace.call("limit", b" " + padded)
    assert (reply.status, reply.problem) == (413, "user/bad_request/request_body_too_large")
    assert reply.error["title"] == "Request Entity Too Large"


def test_a_hundred_items_with_quotes_in_their_names_are_parsed_a_second_time_only_for_duplicates() -> None:
    item = VALID.replace(b"user", b'\\"' * 512)
    assert len(settled(decode_multi_limit, b"[" + b",".join([item] * 100) + b"]")) == 100
    with pytest.raises(Refusal):
        settled(decode_multi_limit, b"[" + b",".join([item] * 99 + [item[:-1] + b',"limit":1}']) + b"]")

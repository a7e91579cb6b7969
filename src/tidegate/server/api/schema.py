"""The bodies of the operations: their types, their bounds, and explanations of what is wrong with a body.

The structs are the only source: msgspec decodes with them, /openapi.json shows the schemas made from them, and the
explanations are found by reading the same schemas. Decoding is the hot path. What it cannot settle is a `Doubt`: a
second, slower look, which is bounded and only for callers that are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidegate.core.model import DURATION_MS_MAX as OVERRIDE_DURATION_MS_MAX
from tidegate.server.api.problems import INVALID_INPUT, FieldError, Refusal

INT64_MAX: Final = 2**63 - 1
DURATION_MS_MIN: Final = 1_000
DURATION_MS_MAX: Final = 2_592_000_000
ITEMS_MAX: Final = 100
# Limits of one reservation, and its longest life: a day.
RESERVED_MAX: Final = 20
LIFE_MS_MAX: Final = 86_400_000
# An id names its counters: 20 identifiers of 512 characters of four bytes fit.
RESERVATION_ID_MAX: Final = 65_536
PAGE_MAX: Final = 100
PAGE_DEFAULT: Final = 10

# A body that msgspec refuses is parsed again with the slower parser of the standard library, up to this size. A larger
# one gets msgspec's one-line reason.
REPARSED_BYTES_MAX: Final = 65_536
# Objects and numbers with a point or an exponent, each of which calls Python code, in a body that is parsed again. A
# valid one has at most 101 and 300.
REPARSED_PARTS_MAX: Final = 500
# Two names of 512 characters hold at most this many quotation marks, besides those around keys and values.
NAME_QUOTES_MAX: Final = 1_024
OBJECT_QUOTES_MAX: Final = 14 + NAME_QUOTES_MAX
# msgspec's reason may quote a key of the body, and a key may be as long as a body.
REASON_LENGTH_MAX: Final = 200
# A large body may be wrong in thousands of places. The answer lists at most this many.
ERRORS_MAX: Final = 20

TWICE: Final = FieldError("/", "a property is given twice", "Give each property once.")
TOO_MUCH: Final = FieldError(
    "/",
    "the body has more strings than a valid one: a property is given twice, a name is too long, or items are too many",
    f"Send at most {ITEMS_MAX} items, each property once, and names of at most 512 characters.",
)

Name = Annotated[str, Meta(min_length=1, max_length=512)]
ExistingNamespace = Annotated[Name, Meta(description="Id or name of an existing namespace.")]
Cost = Annotated[
    int, Meta(ge=0, le=INT64_MAX, description="How much this call consumes; 0 checks without consuming.")
]
Life = Annotated[
    int,
    Meta(ge=1_000, le=LIFE_MS_MAX),
    Meta(description="For how long, in milliseconds; without it, the shortest `duration` (at most a day)."),
]
ReservationId = Annotated[
    str,
    Meta(pattern="^rlrs_[A-Za-z0-9_-]+$", max_length=RESERVATION_ID_MAX),
    Meta(description="From the response of `reserve`. An id that `reserve` has not returned is a 404."),
]
Shadow = Annotated[bool, Meta(description="Count and report, deny nothing.")]
PageSize = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="Items on a page.")]
Cursor = Annotated[str, Meta(description="From `pagination.cursor` of the page before.")]


class CounterBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`usage` and `reset`: one counter, and the limit that judges it."""

    namespace: Annotated[
        Name, Meta(description="Id or name of the namespace. `limit` creates an unknown one on first use.")
    ]
    identifier: Annotated[
        Name, Meta(description="What to limit: a user, a key, an address. Case-sensitive; any characters.")
    ]
    limit: Annotated[
        int,
        Meta(
            ge=1, le=INT64_MAX, description="How much is allowed in one window, unless an override applies."
        ),
    ]
    duration: Annotated[
        int, Meta(ge=DURATION_MS_MIN, le=DURATION_MS_MAX, description="Length of the window in milliseconds.")
    ]


class LimitBody(CounterBody, gc=False, forbid_unknown_fields=True):
    """`limit`, and one item of `multiLimit`."""

    cost: Annotated[Cost, Meta(extra_json_schema={"default": 1})] | UnsetType = UNSET


class ReserveBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`reserve`."""

    limits: Annotated[
        list[LimitBody],
        Meta(min_length=1, max_length=RESERVED_MAX),
        Meta(description="Bodies of `limit`; `cost` is the estimate. All are reserved, or none."),
    ]
    life: Life | UnsetType = UNSET

    @property
    def objects(self) -> int:
        return len(self.limits)


class SettleBody(msgspec.Struct, gc=False, forbid_unknown_fields=True, rename="camel"):
    """`settle`."""

    reservation_id: ReservationId
    costs: Annotated[
        list[Annotated[int, Meta(ge=0, le=INT64_MAX)]],
        Meta(min_length=1, max_length=RESERVED_MAX),
        Meta(
            description="What was used: one number for all limits of the reservation, or one for each, in their order."
        ),
    ]


class ReleaseBody(msgspec.Struct, gc=False, forbid_unknown_fields=True, rename="camel"):
    """`release`."""

    reservation_id: ReservationId


class SetOverrideBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`setOverride`."""

    namespace: ExistingNamespace
    identifier: Annotated[
        Name, Meta(description="An identifier, or a pattern in which `*` matches any characters.")
    ]
    limit: Annotated[int, Meta(ge=0, le=INT64_MAX, description="The limit to apply; 0 blocks.")]
    duration: Annotated[
        int,
        Meta(ge=DURATION_MS_MIN, le=OVERRIDE_DURATION_MS_MAX),
        Meta(description="Length of the window in milliseconds, up to a hundred years."),
    ]
    shadow: Annotated[Shadow, Meta(extra_json_schema={"default": False})] | UnsetType = UNSET


class OverrideBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`getOverride` and `deleteOverride`."""

    namespace: ExistingNamespace
    identifier: Annotated[Name, Meta(description="The identifier or pattern of the override.")]


class ListOverridesBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`listOverrides`."""

    namespace: ExistingNamespace
    limit: Annotated[PageSize, Meta(extra_json_schema={"default": PAGE_DEFAULT})] | UnsetType = UNSET
    cursor: Cursor | UnsetType = UNSET


MultiLimitBody = Annotated[list[LimitBody], Meta(min_length=1, max_length=ITEMS_MAX)]

BODIES: Final = (
    *(LimitBody, CounterBody, ReserveBody, SettleBody, ReleaseBody),
    *(SetOverrideBody, OverrideBody, ListOverridesBody, MultiLimitBody),
)
(*_, _multi_limit_schema), SCHEMAS = msgspec.json.schema_components(
    BODIES, ref_template="#/components/schemas/{name}"
)
SCHEMAS["MultiLimitBody"] = _multi_limit_schema


def quotes_of(body: object) -> int:
    """The number of quotation marks in a body if no key comes twice and no string holds one."""
    if isinstance(body, str):
        return 2
    if isinstance(body, list):
        return sum(map(quotes_of, body))
    if not isinstance(body, msgspec.Struct):
        return 0
    values = [getattr(body, name) for name in body.__struct_fields__]
    return sum(2 + quotes_of(value) for value in values if value is not UNSET)


def quotes_of_batch(items: list[LimitBody]) -> int:
    """`quotes_of` in less time: each item has two string values and four or five keys."""
    return 14 * len(items) - 2 * [item.cost for item in items].count(UNSET)


T = TypeVar("T")


class Doubt(Exception, Generic[T]):
    """msgspec alone cannot say whether a body is valid. `settle` can, in several times the time."""

    def __init__(self, refusal: Refusal | None, settle: Callable[[], T]) -> None:
        """`refusal`: for a caller who is not known; None if the body is valid as far as msgspec can see."""
        super().__init__()
        self.refusal = refusal
        self.settle = settle


class BodyDecoder(Generic[T]):
    """From bytes to the checked body of one operation, or a `Refusal`, or a `Doubt`."""

    def __init__(
        self,
        operation: str,
        body_type: Any,
        *,
        quotes: Callable[[T], int] = quotes_of,
        quotes_max: int = OBJECT_QUOTES_MAX,
        schema: str = "",
    ) -> None:
        """`quotes_max`: how many quotation marks a valid body can hold in all; `schema`: the name of its schema, if it
        differs from that of the type."""
        self._operation = operation
        self._type = body_type
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(body_type).decode
        self._schema = schema or body_type.__name__
        self._quotes = quotes
        self._quotes_max = quotes_max

    def __call__(self, data: bytes) -> T:
        # msgspec checks the length of a list after it has made all items, and blocks the loop meanwhile. Counting takes
        # a tenth of the time.
        if len(data) > REPARSED_BYTES_MAX and data.count(b'"') > self._quotes_max:
            raise self._refusal([TOO_MUCH])
        try:
            body = self._decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise self.doubt(data, str(error)) from None
        # JSON does not define what a key that comes twice means, and parsers differ: the value that a proxy has checked
        # may not be the one that is used here. So it is refused. Counting quotation marks is enough for ordinary
        # bodies, at the price of one memchr; only a body whose strings hold one is parsed again.
        excess = data.count(b'"') - self._quotes(body)
        if excess == 0:
            return body
        objects = len(body) if isinstance(body, list) else getattr(body, "objects", 1)
        # If the names cannot hold so many, a key comes twice: no large body is parsed again.
        if excess > NAME_QUOTES_MAX * objects:
            raise self._refusal([TWICE])
        raise Doubt(None, lambda: self._without_duplicates(data, body))

    def _without_duplicates(self, data: bytes, body: T) -> T:
        try:
            json.loads(data, object_pairs_hook=_unique)
        except _Duplicate:
            raise self._refusal([TWICE]) from None
        return body

    def doubt(self, data: bytes, reason: str) -> Doubt[T] | Refusal:
        """About a body that msgspec refuses: `5.0` is an integer in JSON Schema."""
        if len(reason) > REASON_LENGTH_MAX:
            reason = reason[: REASON_LENGTH_MAX - 3] + "..."
        refusal = self._refusal([FieldError("/", reason)])
        if len(data) > REPARSED_BYTES_MAX:
            return refusal
        return Doubt(refusal, lambda: self._decode_again(data, reason))

    def _decode_again(self, data: bytes, reason: str) -> T:
        parts = _Parts()
        try:
            document = json.loads(
                data.decode("utf-8"), parse_float=parts.number, object_pairs_hook=parts.unique
            )
            json.dumps(document, ensure_ascii=False).encode("utf-8")  # no lone surrogates in it
        except _Duplicate:
            raise self._refusal([TWICE]) from None
        except _TooMany:
            raise self._refusal([FieldError("/", reason)]) from None
        except (ValueError, RecursionError):
            error = FieldError(
                "/", f"the body is not valid JSON: {reason}", "Send one JSON document in UTF-8."
            )
            raise self._refusal([error]) from None
        try:
            body: T = msgspec.convert(document, self._type)
        except msgspec.ValidationError:
            found = islice(violations(SCHEMAS[self._schema], document, "", ""), ERRORS_MAX)
            raise self._refusal(list(found) or [FieldError("/", reason)]) from None
        return body

    def _refusal(self, errors: list[FieldError]) -> Refusal:
        detail = f"POST request body for '/v2/ratelimit.{self._operation}' failed to validate schema"
        return Refusal(INVALID_INPUT, detail, errors=errors)


class _Duplicate(Exception):
    pass


class _TooMany(Exception):
    pass


class _Parts:
    """Bounds what one body calls of the functions below."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = REPARSED_PARTS_MAX

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMany

    def number(self, text: str) -> int | float:
        self._spend()
        return _number(text)

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._spend()
        return _unique(pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Duplicate
    return found


def _number(text: str) -> int | float:
    """A number with a point or an exponent: an int if it is exactly one."""
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return float("nan")  # an exponent of more than 18 digits: outside every bound
    # Far beyond 64 bits it is outside every bound, and as an int it could fill the memory.
    if not exact or (abs(exact.adjusted()) < 30 and exact == exact.to_integral_value()):
        return int(exact)
    return float(exact)


TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}
# The keywords of the lower and the upper bound, and how they read.
BOUNDS: Final = {
    "array": ("minItems", "maxItems", "have", " items"),
    "string": ("minLength", "maxLength", "have", " characters"),
    "integer": ("minimum", "maximum", "be", ""),
}


def violations(schema: Mapping[str, Any], value: Any, path: str, where: str) -> Iterator[FieldError]:
    """What is wrong with `value`, by the part of JSON Schema that the schemas here use."""
    if (reference := schema.get("$ref")) is not None:
        yield from violations(SCHEMAS[reference.rpartition("/")[2]], value, path, where)
        return
    kind = schema["type"]
    named = where or "the body"
    if not TYPES[kind](value):
        yield FieldError(f"{path}/type", f"{named} must be of type {kind}")
        return
    if kind in BOUNDS:
        low, high, verb, unit = BOUNDS[kind]
        size = value if kind == "integer" else len(value)
        if low in schema and size < schema[low]:
            yield FieldError(f"{path}/{low}", f"{named} must {verb} at least {schema[low]}{unit}")
        if high in schema and size > schema[high]:
            yield FieldError(f"{path}/{high}", f"{named} must {verb} at most {schema[high]}{unit}")
    if kind == "object":
        yield from _object_violations(schema, value, path, where)
    elif kind == "array":
        for index, item in enumerate(value[: schema["maxItems"]]):
            yield from violations(schema["items"], item, f"{path}/items", f"item {index}")
    elif "pattern" in schema and re.search(schema["pattern"], value) is None:
        yield FieldError(f"{path}/pattern", f"{named} must match {schema['pattern']}")


def _object_violations(
    schema: Mapping[str, Any], value: Mapping[str, Any], path: str, where: str
) -> Iterator[FieldError]:
    prefix = f"{where}: " if where else ""
    properties = schema["properties"]
    for name in schema["required"]:
        if name not in value:
            yield FieldError(f"{path}/required", f"{prefix}property {name!r} is missing", f"Add {name!r}.")
    for name, item in value.items():
        if name in properties:
            yield from violations(properties[name], item, f"{path}/properties/{name}", f"{prefix}{name!r}")
        else:
            shown = name if len(name) <= 64 else name[:61] + "..."
            yield FieldError(
                f"{path}/additionalProperties", f"{prefix}property {shown!r} is unknown", f"Remove {shown!r}."
            )


decode_limit_plain: Final = msgspec.json.Decoder(LimitBody).decode
"""As msgspec decodes: a property that comes twice is not noticed."""
_limit_decoder: Final = BodyDecoder[LimitBody]("limit", LimitBody)


def decode_limit(data: bytes) -> LimitBody:
    """`BodyDecoder` with its usual case first: two string values and four or five keys."""
    if len(data) <= REPARSED_BYTES_MAX:
        try:
            body = decode_limit_plain(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise _limit_decoder.doubt(data, str(error)) from None
        if data.count(b'"') == (12 if body.cost is UNSET else 14):
            return body
    return _limit_decoder(data)


decode_multi_limit_plain: Final[Callable[[bytes], list[LimitBody]]] = msgspec.json.Decoder(
    MultiLimitBody
).decode
decode_multi_limit: Final = BodyDecoder[list[LimitBody]](
    "multiLimit",
    MultiLimitBody,
    quotes=quotes_of_batch,
    quotes_max=ITEMS_MAX * OBJECT_QUOTES_MAX,
    schema="MultiLimitBody",
)
decode_usage: Final = BodyDecoder[CounterBody]("usage", CounterBody)
decode_reset: Final = BodyDecoder[CounterBody]("reset", CounterBody)
decode_reserve: Final = BodyDecoder[ReserveBody](
    "reserve", ReserveBody, quotes_max=4 + RESERVED_MAX * OBJECT_QUOTES_MAX
)
decode_settle: Final = BodyDecoder[SettleBody]("settle", SettleBody)
decode_release: Final = BodyDecoder[ReleaseBody]("release", ReleaseBody)
decode_set_override: Final = BodyDecoder[SetOverrideBody]("setOverride", SetOverrideBody)
decode_get_override: Final = BodyDecoder[OverrideBody]("getOverride", OverrideBody)
decode_delete_override: Final = BodyDecoder[OverrideBody]("deleteOverride", OverrideBody)
# A cursor has no bound.
decode_list_overrides: Final = BodyDecoder[ListOverridesBody](
    "listOverrides", ListOverridesBody, quotes_max=INT64_MAX
)

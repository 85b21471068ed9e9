"""What pydantic and zod write by default is kept to: their values are taken, and others are not."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import pytest
from icehouse_server.structured_output.schema.references import UnusableSchema
from icehouse_server.structured_output.schema.rewriter import rewritten
from jsonschema import Draft202012Validator
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from tests.fixtures.schemas.held import TAG, held, held_call

ZOD = json.loads((pathlib.Path(__file__).parents[3] / "fixtures/schemas/zod.json").read_text("utf-8"))[
    "schemas"
]
UUID1, UUID4 = '"a8098c1a-f86e-11da-bd1a-00112444be1e"', '"550e8400-e29b-41d4-a716-446655440000"'


class Coast(enum.Enum):
    WEST = "west"
    EAST = "east"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "wolf"]
    name: str


class Node(pydantic.BaseModel):
    value: int
    next: Node | None = None


class Tree(pydantic.BaseModel):
    left: Tree | Coast
    right: list[Tree] = []


T = TypeVar("T")


class Box(pydantic.BaseModel, Generic[T]):
    held: T


class Area(pydantic.BaseModel):
    width: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.width**2


class Row(NamedTuple):
    a: int
    b: str = "x"


class Cost(TypedDict, total=False):
    amount: typing.Required[int]
    note: str


@dataclasses.dataclass
class Place:
    name: Annotated[str, Field(max_length=3, description="short", examples=["a"], deprecated=True)]
    coast: Coast = Coast.WEST


COLOUR = {"type": "string", "format": "color", "x-palette": [1]}
PET = Annotated[Cat | Dog, Field(discriminator="kind")]
TAGGED_PET = Annotated[
    Annotated[Cat, pydantic.Tag("a")] | Annotated[Dog, pydantic.Tag("b")],
    pydantic.Discriminator(lambda value: "a" if value["kind"] == "cat" else "b"),
]

TYPES: list[tuple[Any, list[str], list[str]]] = [
    (int, ["-7", "0"], ["1.5", '"1"', "null"]),
    (pydantic.StrictInt, ["1"], ["true"]),
    (pydantic.PositiveInt, ["1"], ["0"]),
    (pydantic.NegativeFloat, ["-0.5"], ["0", "1"]),
    (pydantic.FiniteFloat, ["1e3"], ["NaN", "Infinity"]),
    (Annotated[int, Field(ge=-(2**63), le=2**63 - 1, multiple_of=5)], ["10"], ["11"]),
    (Annotated[int, Field(ge=0, lt=2**64)], ["18"], ["-1"]),
    (Annotated[float, Field(gt=1, lt=2)], ["1.5"], ["1", "2"]),
    (bool, ["true"], ["1"]),
    (None, ["null"], ["0"]),
    (complex, ['"1+2j"'], ["1"]),
    (decimal.Decimal, ["1.5", '"1.5"'], ["null"]),
    (Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)], ["1.5", '"1.5"'], ["null"]),
    (Annotated[decimal.Decimal, Field(gt=1, multiple_of=0.5)], ["1.5"], ["1.2", "0.5"]),
    (str, ['"é🧊"'], ["1"]),
    (Annotated[str, Field(pattern=r"^\d{2}/[a-z]+$")], ['"12/ab"'], ['"1/ab"']),
    (pydantic.constr(min_length=2, max_length=3, strip_whitespace=True, to_upper=True), ['"ab"'], ['"a"']),
    (Annotated[str, pydantic.WithJsonSchema(COLOUR)], ['"red"'], ["1"]),
    (bytes, ['"ab"'], ["1"]),
    (pydantic.conbytes(min_length=2), ['"ab"'], ['"a"']),
    (pydantic.SecretStr, ['"ab"'], ["1"]),
    (pydantic.SecretBytes, ['"ab"'], ["1"]),
    (re.Pattern, ['"a+"'], ["1"]),
    (pydantic.Base64Bytes, ['"YQ=="', '""'], ['"a"', '"YQ="']),
    (pydantic.Base64Str, ['"YWI="'], ['"a"']),
    (pydantic.Base64UrlBytes, ['"_-8="'], ['"+w=="']),
    (pydantic.Json, [r'"{\"a\": 1}"'], ["{}"]),
    (pydantic.Json[list[int]], ['"[1]"'], ["[1]"]),
    (datetime.datetime, ['"2024-05-01T10:20:30Z"'], ['"2024-05-01"', '"2024-13-01T10:20:30Z"']),
    (pydantic.AwareDatetime, ['"2024-05-01T10:20:30+02:00"'], ['"now"']),
    (pydantic.PastDate, ['"2024-05-01"'], ['"2024-02-30"']),
    (datetime.time, ['"10:20:30Z"'], ['"25:00:00Z"']),
    (datetime.timedelta, ['"P1DT2H"'], ['"P"', "5"]),
    (uuid.UUID, [UUID1], ['"550e8400"']),
    (pydantic.UUID1, [UUID1], [UUID4]),
    (pydantic.UUID4, [UUID4], [UUID1]),
    (pydantic.UUID7, ['"01890a5d-ac96-774b-bcce-b302099a8057"'], [UUID4]),
    (ipaddress.IPv4Address, ['"192.168.0.1"'], ['"300.1.1.1"']),
    (ipaddress.IPv6Address, ['"::1"'], ['"g::"']),
    (ipaddress.IPv4Network, ['"10.0.0.0/8"', '"10.0.0.1"'], ['"10.0.0.0/33"']),
    (ipaddress.IPv4Interface, ['"10.0.0.1/8"'], ['"10.0.0"']),
    (ipaddress.IPv6Network, ['"2001:db8::/32"'], ["1"]),
    (ipaddress.IPv6Interface, ['"2001:db8::1/32"'], ["1"]),
    (pydantic.IPvAnyAddress, ['"::1"', '"1.2.3.4"'], ["1.5"]),
    (pydantic.IPvAnyNetwork, ['"10.0.0.0/8"'], ["1.5"]),
    (pydantic.AnyUrl, ['"ftp://a.b/c"'], ['"no url"']),
    (pydantic.HttpUrl, ['"https://a.example/b?c=d#e"'], ['"no url"']),
    (pydantic.PostgresDsn, ['"postgres://a:b@c:5432/d"'], ["1"]),
    (pydantic.MongoDsn, ['"mongodb://a:1,b:2/c"'], ["1"]),
    (pathlib.Path, ['"a/b.c"'], ["1"]),
    (pydantic.NewPath, ['"/no-such-place"'], ["1"]),
    (pydantic.ByteSize, ["5", '"5 MiB"'], ["-1"]),
    (list[int], ["[]", "[1, 2]"], ['["a"]']),
    (pydantic.conlist(int, min_length=1, max_length=2), ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    (set[int], ["[]", "[1, 2]"], ['["a"]']),
    (pydantic.conset(int, min_length=1), ["[1]"], ["[]"]),
    (frozenset[Coast], ['["west"]'], ['["north"]']),
    (tuple[int, str], ['[1, "a"]'], ["[1]", '[1, "a", 2]', '["a", 1]']),
    (tuple[int, ...], ["[]", "[1, 2]"], ['["a"]']),
    (tuple[()], ["[]"], ["[1]"]),
    (Row, ["[1]", '[1, "a"]'], ["[]", '[1, "a", 2]']),
    (collections.deque[int], ["[1]"], ['["a"]']),
    (typing.Sequence[int], ["[1]"], ['["a"]']),
    (dict[str, int], ["{}", '{"a": 1, "b c": 2}'], ['{"a": "x"}']),
    (dict[Literal["a", "b"], int], ["{}", '{"a": 1}', '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "x"}']),
    (Annotated[dict[Literal["a", "b"], int], Field(min_length=1)], ['{"b": 1}'], ["{}", '{"c": 1}']),
    (dict[Literal["a", "b"], list[Node]], ['{"b": [{"value": 1}]}'], ['{"b": [{}]}', '{"c": []}']),
    (dict[Coast, int], ['{"west": 1}'], ['{"north": 1}']),
    (dict[Level, int], ['{"1": 1}'], ['{"3": 1}', '{"LOW": 1}']),
    (dict[int, str], ['{"1": "x"}'], ['{"1": 1}']),
    (dict[bool, str], ['{"true": "x"}'], ['{"true": 1}']),
    (dict[uuid.UUID, int], [f"{{{UUID4}: 1}}"], ['{"a": 1}']),
    (dict[pydantic.UUID4, int], [f"{{{UUID4}: 1}}"], [f"{{{UUID1}: 1}}"]),
    (dict[datetime.date, int], ['{"2024-05-01": 1}'], ['{"2024-13-01": 1}']),
    (dict[pydantic.HttpUrl, int], ['{"http://a.b/": 1}'], ['{"http://a.b/": "x"}']),
    (dict[pydantic.constr(pattern="^x-"), int], ["{}", '{"x-a": 1}'], ['{"a": 1}', '{"x-a": "b"}']),  # type: ignore[misc]
    (dict[pydantic.constr(min_length=2, max_length=3), int], ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),  # type: ignore[misc]
    (Annotated[dict[str, int], Field(min_length=1, max_length=2)], ['{"a": 1}'], ["{}"]),
    (dict[str, Any], ['{"a": [{"b": null}]}'], ["[]"]),
    (collections.Counter[str], ['{"a": 1}'], ['{"a": "b"}']),
    (Literal["a", 1, None], ['"a"', "1", "null"], ['"b"', "2"]),
    (Coast, ['"west"'], ['"north"']),
    (Level, ["1"], ["3", '"1"']),
    (int | None, ["1", "null"], ['"a"']),
    (Cat | Dog, ['{"kind": "wolf", "name": "a"}'], ['{"kind": "wolf", "lives": 1}']),
    (PET, ['{"kind": "cat", "lives": 9}', '{"kind": "dog", "name": "a"}'], ['{"kind": "cat", "name": "a"}']),
    (list[PET], ['[{"kind": "cat", "lives": 9}]'], ['[{"kind": "fish"}]']),
    (TAGGED_PET, ['{"kind": "cat", "lives": 9}'], ['{"kind": "cat", "name": "a"}']),
    (Node, ['{"value": 1, "next": {"value": 2, "next": null}}'], ['{"value": 1, "next": {}}', '{"valu": 1}']),
    (Tree, ['{"left": {"left": "west"}, "right": [{"left": "east"}]}'], ['{"left": 1}', '{"right": []}']),
    (Box[int], ['{"held": 1}'], ['{"held": "a"}', "{}"]),
    (list[Box[list[Box[int]]]], ['[{"held": [{"held": 1}]}]'], ['[{"held": [1]}]']),
    (Area, ['{"width": 2}'], ['{"width": "a"}']),
    (Cost, ['{"amount": 1}', '{"amount": 1, "note": "a"}'], ['{"note": "a"}', '{"amount": 1, "more": 1}']),
    (
        Place,
        ['{"name": "a"}', '{"name": "a", "coast": "east"}'],
        ['{"name": "abcd"}', '{"name": "a", "x": 1}'],
    ),
    (pydantic.RootModel[list[int]], ["[1]"], ['["a"]']),
    (Any, ["null", '[{"a": 1}]'], ["nul"]),
    (pydantic.JsonValue, ['{"a": [1]}'], ["{"]),
]


@pytest.mark.parametrize(("output_type", "good", "bad"), TYPES, ids=lambda value: str(value)[:60])
def test_values_of_a_python_type_are_taken_and_others_are_not(
    output_type: Any, good: list[str], bad: list[str]
) -> None:
    adapter = pydantic.TypeAdapter(output_type)
    schema = adapter.json_schema()
    grammar, call = held(schema), held_call(schema)
    for text in good:
        adapter.validate_json(text)
        assert grammar.takes(text) and call.takes(text.join(TAG)), text
    for text in bad:
        assert not grammar.takes(text) and not call.takes(text.join(TAG)), text


@pytest.mark.parametrize("output_type", [each for each, _, _ in TYPES], ids=lambda value: str(value)[:60])
def test_what_pydantic_writes_of_what_it_gives_is_kept_to_as_well(output_type: Any) -> None:
    schema = pydantic.TypeAdapter(output_type).json_schema(mode="serialization")
    assert not held(schema).takes("nothing of JSON")


def test_a_computed_field_is_among_the_fields_of_what_is_given() -> None:
    grammar = held(pydantic.TypeAdapter(Area).json_schema(mode="serialization"))
    assert grammar.takes('{"width": 2, "area": 4}') and not grammar.takes('{"width": 2}')


def test_a_name_with_a_pattern_and_a_length_is_refused_with_its_place() -> None:
    keys: Any = pydantic.constr(min_length=2, pattern="^x")
    schema = pydantic.TypeAdapter(list[dict[keys, int]]).json_schema()
    with pytest.raises(UnusableSchema) as refused:
        rewritten(schema)
    assert refused.value.position == "/items/propertyNames"


@pytest.mark.parametrize("entry", ZOD, ids=lambda entry: entry["name"][:60])
def test_values_of_a_schema_of_zod_are_taken_and_others_are_not(entry: dict[str, Any]) -> None:
    if entry["name"] == "zod 3 nan":
        # Nothing matches it, and the server says so.
        assert rewritten(entry["schema"]).schema == {"allOf": [False]}
        return
    grammar = held(entry["schema"])
    texts = {key: [json.dumps(v, ensure_ascii=False) for v in entry[key]] for key in ("valid", "invalid")}
    assert [text for text in texts["valid"] if not grammar.takes(text)] == []
    assert [text for text in texts["invalid"] if grammar.takes(text)] == []
    call = held_call(entry["schema"])
    assert texts["valid"] and all(call.takes(text.join(TAG)) for text in texts["valid"])


READABLE = [entry for entry in ZOD if r"\\p{" not in json.dumps(entry)]
"""What Python's own regular expressions read too."""


@pytest.mark.parametrize("entry", READABLE, ids=lambda entry: entry["name"][:60])
def test_the_rewritten_schema_takes_nothing_that_the_schema_does_not(entry: dict[str, Any]) -> None:
    schema = rewritten(entry["schema"])
    values = [value for each in ZOD for value in (*each["valid"], *each["invalid"])]
    old, new = Draft202012Validator(_as_of_2020(entry["schema"])), Draft202012Validator(schema.schema)
    if all(place.endswith("/format") for place in schema.unenforced):
        assert [value for value in values if new.is_valid(value) and not old.is_valid(value)] == []


def _as_of_2020(schema: Any) -> Any:
    """Return a schema of draft 7 with tuples as draft 2020-12 has them."""
    if isinstance(schema, list):
        return [_as_of_2020(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("items"), list):
        schema = {**schema, "prefixItems": schema["items"], "items": schema.get("additionalItems", True)}
    return {key: _as_of_2020(value) for key, value in schema.items() if key != "$schema"}

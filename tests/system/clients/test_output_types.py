"""Output types of the Python client: what a type's schema lets through is what is read into it."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict, assert_type

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st
from icehouse.v1.inference_service_pb2 import GenerateRequest
from icehouse_client import AsyncClient, Client, FinishReason, Limits, OutputError, formats, schema_of
from icehouse_client.json_forms import Mismatch, spelled
from icehouse_client.output_types import read_json
from icehouse_server.domain.events import Delta, Event, Finished
from icehouse_server.domain.events import FinishReason as EngineFinishReason
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.response_format import JsonObject, JsonSchema
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from tests.fixtures.output_types import ANY_JSON, mutated, types
from tests.fixtures.rpc.fake_engine import started, usage_of
from tests.system.clients.test_python_client import threaded
from tests.unit.rpc.conftest import RunningServer

BYTES = LLTokenizer("byte")
FEW = hypothesis.settings(max_examples=60)

Metres = NewType("Metres", float)


class Coast(enum.Enum):
    WEST = "west"
    EAST = "east"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    name: Annotated[str, Limits(max_length=30)]
    coast: Coast
    height: Metres | None = None


class Cost(TypedDict):
    amount: int
    currency: NotRequired[Literal["NOK", "EUR"]]


@dataclasses.dataclass
class Trip:
    start: Place
    stops: list[Place]
    costs: dict[str, Cost]
    span: tuple[int, str]
    notes: Sequence[str] = ()
    is_done: bool = dataclasses.field(default=False, kw_only=True)
    length_km: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if len(self.stops) > 3:
            raise ValueError("a trip has three stops at most")


@dataclasses.dataclass
class Branch:
    name: str
    branches: list[Branch]
    parent: Branch | None = None


class Leg(pydantic.BaseModel):
    to: Coast
    day: datetime.date


class Journey(pydantic.BaseModel):
    legs: list[Leg]
    title: str = pydantic.Field(default="", alias="Title", max_length=5)


BERGEN = {"name": "Bergen", "coast": "west"}
TRIP = {"start": BERGEN, "stops": [BERGEN | {"height": 3}], "costs": {"x": {"amount": 5}}, "span": [1, "d"]}
JOURNEY = '{"legs": [{"to": "east", "day": "2024-05-01"}], "Title": "May"}'


def fits(value: object, output_type: object) -> bool:
    try:
        read_json(json.dumps(value), output_type)
    except Mismatch:
        return False
    return True


def plain(value: Any) -> Any:
    """Return what was read as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_held(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether the server's grammar of a schema lets a text through."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@FEW
@hypothesis.given(st.data())
def test_what_fits_a_schema_is_what_can_be_read(data: st.DataObject) -> None:
    output_type, values = data.draw(types())
    schema = schema_of(output_type)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    fitting = data.draw(values)
    assert validator.is_valid(fitting) and fits(fitting, output_type)
    for value in (mutated(fitting, data.draw), data.draw(ANY_JSON)):
        assert validator.is_valid(value) == fits(value, output_type), value


@FEW
@hypothesis.given(st.data())
def test_nothing_of_a_value_is_lost(data: st.DataObject) -> None:
    output_type, values = data.draw(types())
    value = data.draw(values)
    read = plain(read_json(json.dumps(value), output_type))
    assert _without_defaults(read, value) == value


def _without_defaults(read: Any, value: Any) -> Any:
    """Return what was read without the properties that were not there."""
    if isinstance(value, dict):
        return {name: _without_defaults(read[name], item) for name, item in value.items()}
    if isinstance(value, list):
        assert len(read) == len(value)
        return [_without_defaults(*pair) for pair in zip(read, value, strict=True)]
    return read


def test_a_type_of_everything_is_read() -> None:
    bergen = Place("Bergen", Coast.WEST)
    read = read_json(json.dumps(TRIP | {"notes": ["dry"], "is_done": True}), Trip)
    stops = [Place("Bergen", Coast.WEST, Metres(3.0))]
    assert read == Trip(bergen, stops, {"x": {"amount": 5}}, (1, "d"), ["dry"], is_done=True)
    assert read_json(json.dumps(TRIP), Trip).notes == ()


def test_a_schema_has_the_fields_in_their_order_and_nothing_beside_them() -> None:
    assert json.dumps(schema_of(Place)) == json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 30},
                "coast": {"enum": ["west", "east"]},
                "height": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
            "required": ["name", "coast"],
            "additionalProperties": False,
        }
    )


def test_the_servers_grammar_takes_the_schemas() -> None:
    assert is_held(json.dumps(TRIP), schema_of(Trip))
    assert not is_held(json.dumps(TRIP | {"more": 1}), schema_of(Trip))
    assert is_held('{"name": "a", "branches": [{"name": "b", "branches": []}]}', schema_of(Branch))
    assert is_held(JOURNEY, schema_of(Journey))
    assert not is_held('{"legs": [], "more": 1}', schema_of(Journey))
    assert is_held(f"[{JOURNEY}, null]", schema_of(list[Journey | None]))


def test_a_type_within_itself_refers_to_its_definition() -> None:
    assert schema_of(Branch)["$ref"] == "#/$defs/Branch"
    text = '{"name": "a", "branches": [{"name": "b", "branches": []}]}'
    assert read_json(text, Branch) == Branch("a", [Branch("b", [])])
    deep = '{"name": "a", "branches": [' * 2000 + "]}" * 2000
    with pytest.raises(Mismatch, match="nested too deeply"):
        read_json(deep, Branch)


def test_a_model_of_pydantic_brings_its_schema_and_validates() -> None:
    may = Journey(legs=[Leg(to=Coast.EAST, day=datetime.date(2024, 5, 1))], Title="May")
    assert read_json(JOURNEY, Journey) == may
    assert read_json(f"[{JOURNEY}]", list[Journey]) == [may]
    schema = schema_of(dict[str, Journey])
    assert schema["$defs"]["Journey.Leg"]["additionalProperties"] is False
    Draft202012Validator(schema).validate({"x": json.loads(JOURNEY)})
    with pytest.raises(Mismatch, match="at most 5 characters"):
        read_json(JOURNEY.replace("May", "Summer"), Journey)


def test_pydantic_is_not_imported() -> None:
    program = (
        "import dataclasses, sys, icehouse_client\n"
        "kind = dataclasses.make_dataclass('Kind', [('count', int)])\n"
        "assert icehouse_client.schema_of(kind)['required'] == ['count']\n"
        "assert 'pydantic' not in sys.modules"
    )
    client = Path(sys.modules[Client.__module__].__file__ or "").parents[1]
    protos = Path(sys.modules[GenerateRequest.__module__].__file__ or "").parents[2]
    path = {"PYTHONPATH": f"{client}:{protos}"}
    subprocess.run([sys.executable, "-c", program], check=True, env=path, timeout=60)


@pytest.mark.parametrize(
    ("changed", "path", "problem"),
    [
        pytest.param({"start": {"name": "Oslo"}}, "start.coast", "it is missing", id="missing"),
        pytest.param({"more": 1}, "more", "no such property", id="unknown"),
        pytest.param({"stops": [BERGEN, 7]}, "stops[1]", "a number, not an object", id="item"),
        pytest.param({"stops": [BERGEN] * 4}, "", "three stops at most", id="the type's own check"),
        pytest.param({"costs": {"x": {"amount": "5"}}}, "costs.x.amount", "not of type integer", id="value"),
        pytest.param({"span": [1]}, "span", "a list of 1, not a list of 2", id="tuple"),
        pytest.param({"start": BERGEN | {"height": "3"}}, "start.height", "number and it is", id="union"),
        pytest.param({"start": BERGEN | {"name": "o" * 31}}, "start.name", "is 31, and must be", id="limit"),
        pytest.param({"start": BERGEN | {"coast": "x"}}, "start.coast", 'none of "west", "east"', id="enum"),
        pytest.param({"length_km": 2.0}, "length_km", "no such property", id="a field that is not given"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(Mismatch, match=problem) as caught:
        read_json(json.dumps(TRIP | changed), Trip)
    assert spelled(caught.value.path) == path


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "1" * 5000, "{} {}"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(Mismatch, match="it is not JSON"):
        read_json(text, Any)


@dataclasses.dataclass
class Wish:
    days: list[dict[str, datetime.date]]


@dataclasses.dataclass
class Hidden:
    given: dataclasses.InitVar[int]


class Called(pydantic.BaseModel):
    made: Callable[[int], int]


class Empty(enum.Enum):
    pass


@pytest.mark.parametrize(
    ("output_type", "problem"),
    [
        (Wish, r"Wish\.days\[\]\{\}: date has no JSON schema"),
        (list[Wish], r"list\[.*\]\[\]\.days"),
        (Hidden, r"Hidden\.given: Hidden\(\) takes it"),
        (Called, "Called: "),
        (dict[int, str], "has no JSON schema"),
        (list, "list has no JSON schema"),
        (object, "object has no JSON schema"),
        (tuple[()], "has no JSON schema"),
        (Empty, "Empty has no JSON schema"),
        (Literal[b"x"], "b'x' is no constant"),
        (Annotated[str, Limits(maximum=3)], "maximum is no limit of JSON's string"),
        (Annotated[Place, Limits(max_length=3)], "Limits are for str, int, float and lists"),
        (dataclasses.make_dataclass("Lost", [("where", "Nowhere")]), "Lost: name 'Nowhere' is not defined"),
    ],
)
def test_a_type_without_a_schema_is_refused_with_the_fields_path(output_type: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        schema_of(output_type)


def test_limits_are_numbers_that_can_be() -> None:
    for wrong in ({"maximum": float("inf")}, {"min_length": -1}):
        with pytest.raises(ValueError, match="must be"):
            Limits(**wrong)  # type: ignore[arg-type]


def says(text: str, reason: EngineFinishReason = EngineFinishReason.STOP_TOKEN) -> Any:
    def script(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        yield Delta(text, (5,))
        yield Finished(reason, None, usage_of(request, output_token_count=1))

    return script


async def test_an_output_is_held_to_the_types_schema_and_read_into_it(served: RunningServer) -> None:
    served.engine.script = says(json.dumps(BERGEN))

    def use(client: Client) -> None:
        place = client.generate_json("Hi", Place, max_output_tokens=9)
        assert_type(place, Place)
        with client.stream("Hi", response_format=formats.json_schema(schema_of(Place))) as stream:
            list(stream)
        found = stream.reply.decode(Place)
        assert_type(found, Place)
        assert place == found == Place("Bergen", Coast.WEST)
        table = client.generate_json("Hi", dict[str, str], response_format=formats.json_object())
        assert_type(table, dict[str, str])
        assert table == BERGEN

    await threaded(served, use)
    form = JsonSchema(json.dumps(schema_of(Place)))
    assert served.grammars.compiled == [form, form, JsonObject()], "a form of the caller's own is kept"


async def test_also_on_an_event_loop(served: RunningServer) -> None:
    served.engine.script = says('{"amount": 5}')
    async with AsyncClient(served.server.address) as client:
        cost = await client.generate_json("Hi", Cost)
        assert_type(cost, Cost)
        assert cost == {"amount": 5}
        with pytest.raises(OutputError) as caught:
            await client.generate_json("Hi", Place | None)
    assert caught.value.path == "name" and caught.value.text == '{"amount": 5}'


async def test_an_output_that_does_not_fit_is_in_the_error(served: RunningServer) -> None:
    def use(client: Client) -> None:
        served.engine.script = says('{"name": "Ber', EngineFinishReason.LENGTH)
        with pytest.raises(OutputError, match="ended with LENGTH before") as cut:
            client.generate_json("Hi", Place)
        assert cut.value.text == '{"name": "Ber' and cut.value.completion.usage.output_tokens == 1
        assert cut.value.completion.finish_reason is FinishReason.LENGTH
        served.engine.script = says('{"name": "Bergen"}')
        with pytest.raises(OutputError, match="does not fit Place at coast: it is missing") as other:
            client.generate_json("Hi", Place)
        assert (other.value.text, other.value.path) == ('{"name": "Bergen"}', "coast")
        served.engine.script = says("no")
        with pytest.raises(OutputError, match="not JSON"):
            client.generate("Hi").json()

    await threaded(served, use)


async def test_a_type_without_a_schema_is_refused_before_any_call(served: RunningServer) -> None:
    def use(client: Client) -> None:
        with pytest.raises(TypeError, match=r"Wish\.days"):
            client.generate_json("Hi", Wish)
        with pytest.raises(TypeError, match="did you mean 'max_output_tokens'"):
            client.generate_json("Hi", Place, max_tokens=3)  # type: ignore[call-overload]

    await threaded(served, use)
    assert served.engine.submitted == []

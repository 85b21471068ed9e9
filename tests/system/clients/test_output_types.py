"""Output types of the Python client: outputs are held to a type's schema and read into it."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, assert_type

import pydantic
import pytest
from icehouse.v1.inference_service_pb2 import GenerateRequest
from icehouse_client import AsyncClient, Client, FinishReason, OutputError, formats, schema_of
from icehouse_client.output_types import Mismatch, read_json
from icehouse_server.domain.events import Delta, Event, Finished
from icehouse_server.domain.events import FinishReason as EngineFinishReason
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.response_format import JsonObject, JsonSchema
from jsonschema import Draft202012Validator
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import started, usage_of
from tests.fixtures.schemas.held import held
from tests.system.clients.test_python_client import threaded
from tests.unit.rpc.conftest import RunningServer


class Coast(enum.Enum):
    WEST = "west"
    EAST = "east"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    name: Annotated[str, pydantic.Field(max_length=30)]
    coast: Coast
    height: float | None = None


class Cost(TypedDict):
    amount: int
    currency: NotRequired[Literal["NOK", "EUR"]]


@dataclasses.dataclass
class Trip:
    start: Place
    stops: list[Place]
    costs: dict[str, Cost]
    span: tuple[int, str]
    is_done: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.stops) > 3:
            raise ValueError("a trip has three stops at most")


@dataclasses.dataclass
class Branch:
    name: str
    branches: list[Branch]


class Leg(pydantic.BaseModel):
    to: Coast
    day: datetime.date


class Journey(pydantic.BaseModel):
    legs: list[Leg]
    title: str = pydantic.Field(default="", alias="Title", max_length=5)


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


BERGEN = {"name": "Bergen", "coast": "west"}
TRIP = {"start": BERGEN, "stops": [BERGEN | {"height": 3}], "costs": {"x": {"amount": 5}}, "span": [1, "d"]}
JOURNEY = '{"legs": [{"to": "east", "day": "2024-05-01"}], "Title": "May"}'
BRANCH = '{"name": "a", "branches": [{"name": "b", "branches": []}]}'
VALUES = [
    (json.dumps(TRIP), Trip),
    (BRANCH, Branch),
    (JOURNEY, Journey),
    (f"[{JOURNEY}, null]", list[Journey | None]),
    ('{"amount": 5, "currency": "NOK"}', Cost),
    ('"x"', Literal["x", 1]),
]


def is_held(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether the server's grammar of a schema lets a text through."""
    return held(schema).takes(text)


@pytest.mark.parametrize(("text", "output_type"), VALUES)
def test_a_value_of_a_type_passes_its_schema_and_the_servers_grammar(text: str, output_type: Any) -> None:
    schema = schema_of(output_type)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(text))
    assert is_held(text, schema)
    assert pydantic.TypeAdapter(output_type).dump_python(read_json(text, output_type), by_alias=True)


def test_a_type_of_everything_is_read() -> None:
    bergen = Place("Bergen", Coast.WEST)
    read = read_json(json.dumps(TRIP | {"is_done": True}), Trip)
    stops = [Place("Bergen", Coast.WEST, 3.0)]
    assert read == Trip(bergen, stops, {"x": {"amount": 5}}, (1, "d"), is_done=True)
    may = Journey(legs=[Leg(to=Coast.EAST, day=datetime.date(2024, 5, 1))], Title="May")
    assert read_json(JOURNEY, Journey) == may
    assert read_json(BRANCH, Branch) == Branch("a", [Branch("b", [])])


def test_objects_have_nothing_beside_their_fields_unless_the_type_says_so() -> None:
    assert not is_held(json.dumps(TRIP | {"more": 1}), schema_of(Trip))
    assert not is_held(json.dumps(TRIP | {"start": BERGEN | {"more": 1}}), schema_of(Trip))
    assert not is_held('{"legs": [], "more": 1}', schema_of(Journey))
    assert is_held('{"name": "a", "more": 1}', schema_of(Open))
    assert is_held('{"more": 1}', schema_of(dict[str, int]))


def test_pydantic_is_imported_only_for_a_type() -> None:
    program = (
        "import sys, icehouse_client\n"
        "assert 'pydantic' not in sys.modules\n"
        "sys.modules['pydantic'] = None\n"
        "try: icehouse_client.schema_of(int)\n"
        "except ImportError as error: assert 'pip install pydantic' in str(error)\n"
        "else: raise SystemExit('read without pydantic')"
    )
    client = Path(sys.modules[Client.__module__].__file__ or "").parents[1]
    protos = Path(sys.modules[GenerateRequest.__module__].__file__ or "").parents[2]
    path = {"PYTHONPATH": f"{client}:{protos}"}
    subprocess.run([sys.executable, "-c", program], check=True, env=path, timeout=BOUND_S)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        pytest.param({"start": {"name": "Oslo"}}, r"start\.coast\n", id="missing"),
        pytest.param({"stops": [BERGEN, 7]}, r"stops\.1\n", id="item"),
        pytest.param({"stops": [BERGEN] * 4}, "three stops at most", id="the type's own check"),
        pytest.param({"costs": {"x": {"amount": "much"}}}, r"costs\.x\.amount\n", id="value"),
        pytest.param({"start": BERGEN | {"name": "o" * 31}}, "at most 30 characters", id="limit"),
        pytest.param({"start": BERGEN | {"coast": "x"}}, "should be 'west' or 'east'", id="enum"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(Mismatch, match=problem):
        read_json(json.dumps(TRIP | changed), Trip)


@pytest.mark.parametrize("text", ["", "{", '{"name": "a", "branches": [' * 2000 + "]}" * 2000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(Mismatch):
        read_json(text, Branch)


@dataclasses.dataclass
class Wish:
    made: list[Callable[[int], int]]


class Unknown:
    pass


@pytest.mark.parametrize(
    "output_type",
    [Wish, list[Wish], Unknown, dataclasses.make_dataclass("Lost", [("where", "Nowhere")])],
)
def test_a_type_without_a_schema_is_refused(output_type: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON schema: "):
        schema_of(output_type)


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


async def test_the_reply_tells_what_of_the_schema_was_not_enforced(served: RunningServer) -> None:
    def use(client: Client) -> None:
        form = formats.json_schema(schema_of(set[int]))
        with client.stream("Hi", response_format=form) as stream:
            list(stream)
        for told in (client.generate("Hi", response_format=form), stream.reply, stream.started):
            assert told is not None and told.unenforced_keywords == ("/a/uniqueItems",)
        assert client.generate("Hi").unenforced_keywords == ()

    await threaded(served, use)


async def test_also_on_an_event_loop(served: RunningServer) -> None:
    served.engine.script = says('{"amount": 5}')
    async with AsyncClient(served.server.address) as client:
        cost = await client.generate_json("Hi", Cost)
        assert_type(cost, Cost)
        assert cost == {"amount": 5}
        with pytest.raises(OutputError) as caught:
            await client.generate_json("Hi", Place | None)
    assert caught.value.text == '{"amount": 5}'


async def test_an_output_that_does_not_fit_is_in_the_error(served: RunningServer) -> None:
    def use(client: Client) -> None:
        served.engine.script = says('{"name": "Ber', EngineFinishReason.LENGTH)
        with pytest.raises(OutputError, match="ended with LENGTH before") as cut:
            client.generate_json("Hi", Place)
        assert cut.value.text == '{"name": "Ber' and cut.value.completion.usage.output_tokens == 1
        assert cut.value.completion.finish_reason is FinishReason.LENGTH
        served.engine.script = says('{"name": "Bergen"}')
        with pytest.raises(OutputError, match=r"does not fit Place: [^$]*coast\n") as other:
            client.generate_json("Hi", Place)
        assert other.value.text == '{"name": "Bergen"}'
        served.engine.script = says("no")
        with pytest.raises(OutputError, match="not JSON"):
            client.generate("Hi").json()

    await threaded(served, use)


async def test_a_type_without_a_schema_is_refused_before_any_call(served: RunningServer) -> None:
    def use(client: Client) -> None:
        with pytest.raises(TypeError, match="Wish has no JSON schema"):
            client.generate_json("Hi", Wish)
        with pytest.raises(TypeError, match="did you mean 'max_output_tokens'"):
            client.generate_json("Hi", Place, max_tokens=3)  # type: ignore[call-overload]

    await threaded(served, use)
    assert served.engine.submitted == []

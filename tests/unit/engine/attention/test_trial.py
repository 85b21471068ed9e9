"""The trial lets kernels through that are right, and finds each kind of fault."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.gpu.kernels import Language
from icehouse_server.engine.attention.gpu.launch import GpuAttention
from icehouse_server.engine.attention.port import PoolShape, TokenPlaces
from icehouse_server.engine.kv import backend_choice
from icehouse_server.engine.kv.backend_choice import Geometry, kernels_for, prove

from tests.fixtures.steps import whole
from tests.unit.engine.attention.emulation import HEADER, Emulation

SHAPE = PoolShape(5, 2, 64, 16, mx.float32)
HEADS = 4


@pytest.mark.parametrize(
    ("shape", "has_sinks"),
    [(SHAPE, False), (PoolShape(1, 2, 64, 64, mx.bfloat16), True)],
)
def test_kernels_are_proved(shape: PoolShape, has_sinks: bool, emulation: Emulation) -> None:
    kernels = GpuAttention(emulation.make_kernel, Language(header=HEADER))
    why = whole(prove(shape, HEADS, backend=kernels, reference=GatherAttention(), has_sinks=has_sinks))
    assert why == ""
    assert {"icehouse_attend", "icehouse_attend_split"} <= set(emulation.launches)


class _Faulty(GatherAttention):
    """One of its verbs gets other arguments than those that it is given."""

    def __init__(self, verb: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        right = getattr(self, verb)

        def wrong(*places: Any, **named: Any) -> Any:
            names = {
                "write": ("pool", "keys", "values", "places"),
                "attend": ("pool", "queries", "places", "call", "new"),
            }
            given = dict(zip(names.get(verb, ("pool", "places")), places, strict=False)) | named
            if (new := given.pop("new", None)) is not None:
                keys, values = new
                self.write(given["pool"], keys, values, given["places"], layer=given["call"].layer)
            return right(**change(given))

        setattr(self, verb, wrong)


def _a_token_before(places: TokenPlaces) -> TokenPlaces:
    return dataclasses.replace(places, positions=np.maximum(places.positions - 1, 0))


def _calling(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: given | {"call": dataclasses.replace(given["call"], **changed)}


@pytest.mark.parametrize(
    ("verb", "change", "said"),
    [
        ("write", lambda given: given | {"layer": 0}, "pages"),
        ("write", lambda given: given | {"values": given["keys"]}, "pages"),
        ("attend", _calling(layer=0), "off by"),
        ("attend", lambda given: given | {"places": _a_token_before(given["places"])}, "off by"),
        ("attend", _calling(window=None), "window 24"),
        ("attend", _calling(sinks=None), "sinks"),
        ("attend", _calling(scale=1.0), "off by"),
        ("attend", lambda given: given | {"queries": given["queries"] * np.nan}, "nan"),
        ("gather_row", lambda given: given | {"first_token": given["first_token"] + 1}, "pages"),
    ],
)
def test_faults_are_found(verb: str, change: Callable[[dict[str, Any]], dict[str, Any]], said: str) -> None:
    faulty = _Faulty(verb, change)
    why = whole(prove(SHAPE, HEADS, backend=faulty, reference=GatherAttention(), has_sinks=True))
    assert said in why


class _NotCompiled(GatherAttention):
    def attend(self, *_: Any, **__: Any) -> mx.array:
        raise RuntimeError("no such instruction")


def test_kernels_that_do_not_compile_are_not_used() -> None:
    why = whole(prove(SHAPE, HEADS, backend=_NotCompiled(), reference=GatherAttention()))
    assert why == "attention over pages failed: no such instruction"


def test_a_cpu_has_a_way_of_its_own() -> None:
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("there is a GPU here")
    chosen = whole(kernels_for(SHAPE, query_head_count=HEADS, has_sinks=True, proved={}))
    assert isinstance(chosen, CpuAttention)


def test_what_is_proved_is_not_tried_again_nor_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: dict[Geometry, int] = {}
    first = whole(kernels_for(SHAPE, query_head_count=HEADS, has_sinks=False, proved=proved))
    assert first is not None
    tried: list[PoolShape] = []

    def refuse(shape: PoolShape, *_: Any, **__: Any) -> Generator[None, None, str]:
        tried.append(shape)
        yield
        return "not this time"

    monkeypatch.setattr(backend_choice, "prove", refuse)
    again = whole(kernels_for(SHAPE, query_head_count=HEADS, has_sinks=False, proved=proved))
    assert type(again) is type(first)
    assert again is not first, "what one model has not written yet is none of another's business"
    other = dataclasses.replace(SHAPE, page_token_count=2 * SHAPE.page_token_count)
    assert whole(kernels_for(other, query_head_count=HEADS, has_sinks=False, proved=proved)) is None
    assert set(tried) == {other}


@pytest.mark.parametrize("page_token_count", [1, 2, 8])
def test_blocks_of_few_tokens_have_small_pages(page_token_count: int, emulation: Emulation) -> None:
    shape = dataclasses.replace(SHAPE, page_token_count=page_token_count)
    kernels = GpuAttention(emulation.make_kernel, Language(header=HEADER))
    assert [
        whole(prove(shape, HEADS, backend=backend, reference=GatherAttention(), has_sinks=True))
        for backend in (CpuAttention(), kernels)
    ] == ["", ""]


def test_others_go_on_between_the_parts_of_a_trial() -> None:
    """But not between the passes of what is tried, which would hide a wait that is missing."""
    seen: list[str] = []

    class Watched(GatherAttention):
        def __init__(self, name: str) -> None:
            self._name = name

        def attend(self, *given: Any, **named: Any) -> mx.array:
            seen.append(self._name)
            return super().attend(*given, **named)

    steps = prove(SHAPE, HEADS, backend=Watched("tried"), reference=Watched("known"))
    for _ in steps:
        seen.append("others")
    runs = [name for name, _ in itertools.groupby(seen)]
    assert [name for name in runs if name != "others"] == ["known"] * 3 + ["tried"], "three passes"
    assert runs == ["others"] + ["known", "others"] * 3 + ["tried", "others"]

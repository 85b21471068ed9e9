"""The form an output must have: what to give as `response_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from icehouse.v1 import response_format_pb2

from icehouse_client.texts import names_bad_texts

ResponseFormat = response_format_pb2.ResponseFormat


@names_bad_texts
def json_schema(schema: str | Mapping[str, Any], *, compact: bool = False) -> ResponseFormat:
    """One JSON value that validates; a mapping keeps its order, which is the order of the properties.

    `compact` leaves no white space between the tokens of JSON.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return ResponseFormat(json_schema=text, compact=compact)


def json_object(*, compact: bool = False) -> ResponseFormat:
    """Any one JSON object."""
    return ResponseFormat(json_object=response_format_pb2.JsonObjectFormat(), compact=compact)


@names_bad_texts
def regex(pattern: str) -> ResponseFormat:
    """Text that the pattern (Rust's syntax) matches as a whole."""
    return ResponseFormat(regex=pattern)


@names_bad_texts
def lark(grammar: str) -> ResponseFormat:
    """Text of a grammar in llguidance's dialect of Lark, whose rule is `start`."""
    return ResponseFormat(lark=grammar)


@names_bad_texts
def choice(*texts: str) -> ResponseFormat:
    """One of these texts, in full."""
    return ResponseFormat(choice=response_format_pb2.ChoiceFormat(texts=texts))

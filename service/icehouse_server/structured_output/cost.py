"""Cost of a form: what is short to write and long to compile; `multipleOf` builds that many states.

A divisor of 1,000,003 took 5 s and 290 MB, one of 10,000,019 more than a minute (llguidance 1.9.1,
x86-64), and nothing can stop it; so divisors are added up before anything is compiled.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Iterator, Mapping
from typing import Any

from icehouse_server.errors import InvalidRequest, Reason

MULTIPLE_SUM_LIMIT = 100_000
"""Divisors of one form, added up; this much takes 0.4 s."""

_KEY = "multipleOf"
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_IN_TEXT = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')


def check_multiples(schema: Any, *, field: str) -> None:
    """Refuse a schema whose divisors are too large together."""
    _check(_in_schema(schema), field=field)


def check_multiples_in_text(text: str, *, field: str) -> None:
    """Refuse a Lark grammar whose `%json` parts have divisors that are too large together."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    _check((found[1] for found in _IN_TEXT.finditer(plain)), field=field)


def _check(numbers: Iterator[str], *, field: str) -> None:
    total = sum(_states(number) for number in numbers)
    if total > MULTIPLE_SUM_LIMIT:
        raise InvalidRequest(
            Reason.GRAMMAR_TOO_COMPLEX,
            f"the numbers of multipleOf in {field} add up to {total:.6g}, without their decimal points; the "
            f"limit is {MULTIPLE_SUM_LIMIT}; leave multipleOf out and check the answer",
            field=field,
            metadata={"multiple_sum": f"{total:.6g}", "multiple_sum_limit": MULTIPLE_SUM_LIMIT},
        )


def _in_schema(schema: Any) -> Iterator[str]:
    remaining = [schema]
    while remaining:
        part = remaining.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get(_KEY), int | float):
                yield str(part[_KEY])
            remaining.extend(part.values())
        elif isinstance(part, list):
            remaining.extend(part)


def _states(number: str) -> float:
    """Return a number's digits without its decimal point; what is no number costs nothing."""
    try:
        value = decimal.Decimal(number).copy_abs()  # `abs` would round, and raise where that overflows
    except decimal.InvalidOperation:
        return 0.0
    if not value.is_finite():
        return 0.0
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "a finite number"
    whole = decimal.Decimal((0, digits, 0)) if exponent < 0 else value
    return float(whole)

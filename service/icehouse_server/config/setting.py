"""Setting: its default, range and help, declared once, beside the field that it fills.

Its kind follows from the field's type and the end of its name, such as a unit. Flags, environment variables,
TOML keys, `icehouse config` and docs/settings.md are derived from these declarations.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
import typing
from typing import Any

from icehouse_server.errors import ConfigError, Reason

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SECTIONS_IN_FLAGS = ("group", "http", "kv_events", "log", "tenant")
_GREATEST = (1 << 63) - 1
_SHOWN_LIMIT = 200
_PATH_NAME = re.compile(r"[A-Za-z0-9._:\-]{1,64}")
_PATH_LIMIT = 64

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?\s*$", re.IGNORECASE)
_UNIT_BYTES = {
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SWITCH_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPath:
    """A folder, and the name that callers use for it."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


Value = str | int | float | bool | tuple[NamedPath, ...] | tuple[str, ...] | None


class SettingKind(enum.Enum):
    """What a setting holds and how its text is read. Help shows these words as a flag's value."""

    TEXT = "TEXT"
    PATH = "PATH"
    COUNT = "N"
    """A whole number."""
    SECONDS = "SECONDS"
    MILLISECONDS = "MS"
    RATIO = "0..1"
    NUMBER = "X"
    BYTES = "SIZE"
    """A whole number of bytes; "4GiB" and "500 MB" are read too."""
    SWITCH = "SWITCH"
    CHOICE = "CHOICE"
    """Help shows the choices themselves."""
    NAMED_PATHS = "NAME=PATH,…"
    """Named folders: a TOML table, or "name=folder,name=folder"."""
    NAMES = "NAME,…"
    """A list of texts, or "name,name"."""


_KIND_OF_ENDING = {
    "_bytes": SettingKind.BYTES,
    "_byte_limit": SettingKind.BYTES,
    "_s": SettingKind.SECONDS,
    "_ms": SettingKind.MILLISECONDS,
    "_ratio": SettingKind.RATIO,
    "_file": SettingKind.PATH,
    "_path": SettingKind.PATH,
    "directory": SettingKind.PATH,
}
_NUMBERS = (
    SettingKind.COUNT,
    SettingKind.BYTES,
    SettingKind.SECONDS,
    SettingKind.MILLISECONDS,
    SettingKind.RATIO,
    SettingKind.NUMBER,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting. `section` and `name` come from the dataclass that declares it."""

    section: str
    name: str
    kind: SettingKind
    default: Value
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str | int, ...]
    flag_override: str | None

    @property
    def optional(self) -> bool:
        return self.default is None

    @property
    def key(self) -> str:
        """`section.name`, as messages and `icehouse config` call it."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Its command-line flag; a switch also has `--no-...`."""
        if self.flag_override is not None:
            return self.flag_override
        name = f"{self.section}_{self.name}" if self.section in _SECTIONS_IN_FLAGS else self.name
        return "--" + name.removesuffix("_enabled").replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable. The section is not repeated: ICEHOUSE_MODEL, ICEHOUSE_MODEL_NAME."""
        rest = self.name.removeprefix(self.section).removeprefix("_")
        return "_".join(part for part in ("ICEHOUSE", self.section, rest) if part).upper()

    def parse(self, raw: object, *, source: str) -> Value:
        """Return `raw` (text from a flag or variable, or a TOML value) as this setting's value.

        Raises ConfigError naming the setting, the source, the value and what is allowed.
        """
        if raw == "" and self.optional:
            return None
        shown = raw
        try:
            value = shown = _read(raw, self.kind)
            self._check_range(value)
        except ValueError as error:
            raise ConfigError(
                Reason.CONFIG_INVALID,
                f"{self.key} = {_shown(shown)} (from {source}) {error}",
                field=self.key,
                metadata={"value": _shown(shown), "source": source, "allowed": self.range_text},
            ) from None
        return value

    def _check_range(self, value: Value) -> None:
        if isinstance(value, int) and abs(value) > _GREATEST:
            raise ValueError("is a number of more than 64 bits")
        if self.choices and value not in self.choices:
            raise ValueError(f"is not one of {', '.join(map(str, self.choices))}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            below = self.minimum is not None and not value >= self.minimum
            above = self.maximum is not None and not value <= self.maximum
            if below or above:
                raise ValueError(f"is outside {self.range_text}")

    @property
    def range_text(self) -> str:
        """The allowed values in words; empty if every value of the kind is allowed."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        low = "" if self.minimum is None else _number_text(self.minimum)
        high = "" if self.maximum is None else _number_text(self.maximum)
        if low and high:
            return f"{low} to {high}"
        return f"{low} or more" if low else f"{high} or less" if high else ""


def _read(raw: object, kind: SettingKind) -> Value:
    """Return a text or TOML value as one of this kind; raises ValueError, whose text follows the value."""
    match kind:
        case SettingKind.TEXT | SettingKind.PATH | SettingKind.CHOICE:
            if not isinstance(raw, str) or not raw.strip():
                raise ValueError("is not a string")
            return _expanded(raw) if kind is SettingKind.PATH else raw
        case SettingKind.SWITCH:
            switch = raw if isinstance(raw, bool) else _SWITCH_WORDS.get(str(raw).strip().lower())
            if switch is None:
                raise ValueError("is not true or false")
            return switch
        case SettingKind.BYTES:
            return _read_bytes(raw)
        case SettingKind.NAMED_PATHS:
            return _read_named_paths(raw)
        case SettingKind.NAMES:
            return _read_names(raw)
        case _:
            assert kind in _NUMBERS, kind
            return _read_number(raw, is_whole=kind is SettingKind.COUNT)


def _read_number(raw: object, *, is_whole: bool) -> int | float:
    complaint = "is not a whole number" if is_whole else "is not a number"
    if isinstance(raw, bool) or not isinstance(raw, str | int if is_whole else str | int | float):
        raise ValueError(complaint)
    try:
        number = int(raw) if is_whole else float(raw)
    except OverflowError:
        number = math.inf
    except ValueError:
        raise ValueError(complaint) from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _read_bytes(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    found = _SIZE.match(raw) if isinstance(raw, str) else None
    size = math.inf if found is None else float(found[1]) * _UNIT_BYTES[(found[2] or "b").lower()]
    if not math.isfinite(size):
        raise ValueError('is not a size; write bytes, "500MB" or "4GiB"')
    return int(size)


def _read_named_paths(raw: object) -> tuple[NamedPath, ...]:
    if isinstance(raw, tuple):
        return raw
    if isinstance(raw, dict):
        pairs = [(str(name), path) for name, path in raw.items()]
    elif isinstance(raw, str):
        parts = [part.partition("=") for part in names_in(raw)]
        pairs = [(name.strip(), path.strip()) for name, _, path in parts]
    else:
        raise ValueError("is neither a table of folders nor a string such as name=folder,name=folder")
    if len(pairs) > _PATH_LIMIT:
        raise ValueError(f"names {len(pairs)} folders; the limit is {_PATH_LIMIT}")
    named: dict[str, NamedPath] = {}
    for name, path in pairs:
        if _PATH_NAME.fullmatch(name) is None:
            raise ValueError(f"has the name {name!r}; names are 1 to 64 of A-Z a-z 0-9 . _ : -")
        if name in named:
            raise ValueError(f"names {name!r} twice")
        if not isinstance(path, str) or not path:
            raise ValueError(f"names no folder for {name!r}; write name=folder")
        named[name] = NamedPath(name, _expanded(path))
    return tuple(named.values())


def _expanded(path: str) -> str:
    """Return a path with `~` replaced by the home folder; raise ValueError if it cannot be a path."""
    if "\0" in path:
        raise ValueError("has a zero byte, which no path may have")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("begins with the home folder of a user who does not exist")
    return expanded


def _read_names(raw: object) -> tuple[str, ...]:
    names = names_in(raw) if isinstance(raw, str) else raw
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("is not a list of names")
    if len(set(names)) < len(names):
        raise ValueError("has a name twice")
    return tuple(names)


def _shown(raw: object) -> str:
    """Return a value as messages show it: on one line, and shortened if it is very long."""
    try:
        text = repr(raw)
    except ValueError:
        # Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_LIMIT else f"{text[:_SHOWN_LIMIT]}…"


def _number_text(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def setting(
    default: Value,
    help: str,
    *,
    kind: SettingKind | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str | int, ...] = (),
    flag: str | None = None,
) -> Any:
    """Declare a section's field. `help` says what it does, and what 0 or no value means.

    Numbers are at least 0 unless `minimum` says otherwise.
    """
    facts = {"default": default, "help": help, "kind": kind, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata={**facts, "choices": choices, "flag_override": flag})


def settings_of(section: str, owner: type[Any]) -> tuple[Setting, ...]:
    """Return the declarations of one section's dataclass, in order."""
    types = typing.get_type_hints(owner)
    return tuple(_declared(section, field, types[field.name]) for field in dataclasses.fields(owner))


def _declared(section: str, field: dataclasses.Field[Any], type_: object) -> Setting:
    facts = dict(field.metadata)
    kind = facts.pop("kind") or _kind_of(field.name, type_, has_choices=bool(facts["choices"]))
    if facts["minimum"] is None and kind in _NUMBERS:
        facts["minimum"] = 0
    return Setting(section=section, name=field.name, kind=kind, **facts)


def _kind_of(name: str, type_: object, *, has_choices: bool) -> SettingKind:
    by_name = (kind for ending, kind in _KIND_OF_ENDING.items() if name.endswith(ending))
    if type_ is bool:
        return SettingKind.SWITCH
    if type_ in (str, str | None):
        return SettingKind.CHOICE if has_choices else next(by_name, SettingKind.TEXT)
    if type_ in (int, int | None, float):
        return next(by_name, SettingKind.COUNT)
    return SettingKind.NAMES if type_ == tuple[str, ...] else SettingKind.NAMED_PATHS


def names_in(text: str | None, separator: str = ",") -> tuple[str, ...]:
    """Return the items of a list in a text, without surrounding white space and empty items."""
    return tuple(name for part in (text or "").split(separator) if (name := part.strip()))

"""API reference: a page for each file of protos/, made of its descriptors and comments; for docs/api."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from protos.generate import describe_with_comments

# Field numbers of FileDescriptorProto and its parts, which a comment's place is made of.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS = _VALUES = _METHODS = 2
_SYNTAX = 12

_Path = tuple[int, ...]
_WELL_KNOWN = ".google.protobuf."
_WELL_KNOWN_PAGE = "https://protobuf.dev/reference/protobuf/google.protobuf/"
_SCALARS = {
    value.number: name.removeprefix("TYPE_").lower()
    for name, value in FieldDescriptorProto.Type.DESCRIPTOR.values_by_name.items()
}
_CODE = re.compile(r"(`[^`]*`)")


class Reference:
    """The API's files with the pages they become. Types of the API link to where they are described."""

    def __init__(self, files: list[FileDescriptorProto]) -> None:
        self._files = files
        self._homes: dict[str, str] = {}
        for file in files:
            names = [message.name for message in file.message_type] + [enum.name for enum in file.enum_type]
            self._homes |= {f".{file.package}.{name}": _page_name(file) for name in names}

    def pages(self) -> Mapping[str, str]:
        """Return the pages' text by their names in docs/api."""
        return {"index.md": self._index(), **{_page_name(file): self._page(file) for file in self._files}}

    def _index(self) -> str:
        lines = ["# API reference", "", _HOW_TO_READ, ""]
        for file in self._files:
            for service in file.service:
                lines += [f"## {service.name}", "", "| method | what it does |", "|---|---|"]
                for index, method in enumerate(service.method):
                    place = (_SERVICES, list(file.service).index(service), _METHODS, index)
                    first = re.split(r"(?<=[.:]) ", _cell(_comments(file).get(place, "")))[0].rstrip(":")
                    link = f"[{method.name}]({_page_name(file)}#{_slug(f'{service.name}.{method.name}')})"
                    lines.append(f"| {link} | {first} |")
                lines.append("")
        lines += ["## Files", "", "| file | what it is about |", "|---|---|"]
        lines += [f"| [{file.name}]({_page_name(file)}) | {_title(file)} |" for file in self._files]
        return "\n".join([*lines, "", _NOTE]) + "\n"

    def _page(self, file: FileDescriptorProto) -> str:
        services = [part for i, s in enumerate(file.service) for part in self._service(file, s, i)]
        messages = [part for i, m in enumerate(file.message_type) for part in self._message(file, m, i)]
        enums = [part for i, e in enumerate(file.enum_type) for part in _enum(file, e, i)]
        lines = [f"# {PurePosixPath(file.name).name}", "", _title(file), "", *services, *messages, *enums]
        return "\n".join(lines).rstrip() + f"\n\n{_NOTE_OF_FILE.format(file.name)}\n"

    def _service(
        self, file: FileDescriptorProto, service: ServiceDescriptorProto, index: int
    ) -> Iterator[str]:
        comments = _comments(file)
        yield from (f"## {service.name}", "", _prose(comments.get((_SERVICES, index), "")), "")
        for number, method in enumerate(service.method):
            answer = ("stream of " if method.server_streaming else "") + self._type(method.output_type, file)
            asked = ("stream of " if method.client_streaming else "") + self._type(method.input_type, file)
            yield from (f"### {service.name}.{method.name}", "", f"{asked} → {answer}", "")
            yield from (_prose(comments.get((_SERVICES, index, _METHODS, number), "")), "")

    def _message(self, file: FileDescriptorProto, message: DescriptorProto, index: int) -> Iterator[str]:
        assert not message.enum_type, f"{message.name} has an enum of its own"
        comments = _comments(file)
        yield from (f"## {message.name}", "", _prose(comments.get((_MESSAGES, index), "")), "")
        if not message.field:
            yield from ("No fields.", "")
            return
        yield from ("| field | type | meaning |", "|---|---|---|")
        for number, field in enumerate(message.field):
            meaning = _cell(comments.get((_MESSAGES, index, _FIELDS, number), ""))
            kind = self._field_type(message, field, file)
            yield f"| `{field.name}` = {field.number} | {kind} | {meaning} |"
        yield ""

    def _field_type(
        self, message: DescriptorProto, field: FieldDescriptorProto, file: FileDescriptorProto
    ) -> str:
        entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        if entry := entries.get(field.type_name.rpartition(".")[2]):
            key, value = (self._field_type(message, part, file) for part in entry.field)
            return f"map of {key} to {value}"
        name = self._type(field.type_name, file) if field.type_name else _SCALARS[field.type]
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        if field.proto3_optional:
            return f"optional {name}"
        if field.HasField("oneof_index"):
            return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return name

    def _type(self, full_name: str, file: FileDescriptorProto) -> str:
        name = full_name.rpartition(".")[2]
        if full_name.startswith(_WELL_KNOWN):
            return f"[{name}]({_WELL_KNOWN_PAGE}#{_slug(name)})"
        home = self._homes.get(full_name)
        if home is None:
            return f"`{full_name.lstrip('.')}`"
        return f"[{name}]({'' if home == _page_name(file) else home}#{_slug(name)})"


def pages() -> Mapping[str, str]:
    """Return every page of docs/api by its name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "api.binpb"
        wanted = set(describe_with_comments(path))
        described = FileDescriptorSet.FromString(path.read_bytes())
    return Reference([file for file in described.file if file.name in wanted]).pages()


def _enum(file: FileDescriptorProto, enum: EnumDescriptorProto, index: int) -> Iterator[str]:
    comments = _comments(file)
    yield from (f"## {enum.name}", "", _prose(comments.get((_ENUMS, index), "")), "")
    yield from ("| value | meaning |", "|---|---|")
    for number, value in enumerate(enum.value):
        meaning = _cell(comments.get((_ENUMS, index, _VALUES, number), ""))
        yield f"| `{value.name}` = {value.number} | {meaning} |"
    yield ""


@functools.lru_cache(maxsize=1)
def _commented(name: str, text: bytes) -> Mapping[_Path, str]:
    locations = FileDescriptorProto.FromString(text).source_code_info.location
    found = {tuple(place.path): place.leading_comments for place in locations if place.leading_comments}
    assert found, f"{name} has no comments"
    return found


def _comments(file: FileDescriptorProto) -> Mapping[_Path, str]:
    """Return the comments of a file by what they stand above."""
    return _commented(file.name, file.SerializeToString())


def _title(file: FileDescriptorProto) -> str:
    return _cell(_comments(file)[(_SYNTAX,)])


def _page_name(file: FileDescriptorProto) -> str:
    return f"{PurePosixPath(file.name).stem}.md"


def _slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _paragraphs(comment: str) -> list[str]:
    """Return a comment's paragraphs, each on one line, with what HTML would take for its own escaped."""
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", comment)]
    return ["".join(_escaped(piece) for piece in _CODE.split(part)) for part in found if part]


def _escaped(piece: str) -> str:
    if piece.startswith("`"):
        return piece
    return re.sub(r"([<>*_\[\]])", r"\\\1", piece)


def _prose(comment: str) -> str:
    return "\n\n".join(_paragraphs(comment))


def _cell(comment: str) -> str:
    return "<br>".join(_paragraphs(comment)).replace("|", "\\|")


_NOTE = "`make gen` writes these pages from the comments of `protos/`."
_NOTE_OF_FILE = "`make gen` writes this page from `protos/{}`."
_HOW_TO_READ = (
    "Package `icehouse.v1`. A scalar field is `optional` where its zero is a legal value that differs from "
    "leaving the field out; everywhere else zero, false or empty means the default. See also calls with "
    "grpcurl ([Every call by hand](../grpcurl.md)), refusals ([Reasons](../errors.md)), and each method's "
    "limits and deadlines ([Methods](../methods.md))."
)

"""Conversations and tools: from messages to domain data. Every error names its field. Pure functions."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from icehouse.v1 import prompt_pb2, tool_pb2

from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    ImageDetail,
    ImageSource,
    PlacedImage,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    with_result_images_in_user_turns,
)
from icehouse_server.domain.model import ModelInfo
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.field_checks import check_token_ids, shown
from icehouse_server.rpc.messages.proto_map import enum_of
from icehouse_server.text.values.literals import uniform

_ROLES = {
    value.number: value.name.removeprefix("ROLE_").lower()
    for value in prompt_pb2.Role.DESCRIPTOR.values
    if value.number
}
"""Names of the API's roles in templates."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_NAME_WANTED = "1 to 128 of A-Z a-z 0-9 _ . -"
"""Names of tools, and of roles that only a template knows."""
MESSAGE_COUNT_LIMIT = 4096
PART_COUNT_LIMIT = 256
"""Most parts, and most tool calls, of one message."""
TOOL_COUNT_LIMIT = 128
TOOL_BYTES_LIMIT = 1 << 20
"""Most characters of all tools; parsing a megabyte of JSON holds the GIL for some 20 ms."""

_SHOWING_ROLES = ("user", "tool")
_CHAT, _TOOL, _CHOICE = Reason.CHAT_INVALID, Reason.TOOL_INVALID, Reason.TOOL_CHOICE_INVALID


def conversation_of(
    chat: prompt_pb2.ChatPrompt,
    *,
    tools: Sequence[tool_pb2.Tool],
    choice: tool_pb2.ToolChoice | None,
    info: ModelInfo,
    answers_in_json: bool = False,
) -> Conversation:
    """Return the conversation; raises InvalidRequest."""
    if not info.has_chat_template:
        raise InvalidRequest(
            Reason.CHAT_TEMPLATE_MISSING,
            f"the model {info.model_id!r} has no chat template; send `text` or `tokens` instead",
            field="prompt.chat",
        )
    if not chat.messages:
        raise _invalid(_CHAT, "the conversation has no messages; send at least one", "prompt.chat.messages")
    _check_count(len(chat.messages), MESSAGE_COUNT_LIMIT, what="messages", field="prompt.chat.messages")
    messages = tuple(_message_of(message, index, info) for index, message in enumerate(chat.messages))
    offered = tools_of(tools)
    conversation = Conversation(
        messages=with_result_images_in_user_turns(messages),
        tools=offered,
        tool_choice=_choice_of(choice, offered),
        template_arguments=_arguments_of(chat.template_arguments),
        adds_generation_prompt=(
            chat.add_generation_prompt
            if chat.HasField("add_generation_prompt")
            else not chat.continue_final_message
        ),
        continues_final_message=chat.continue_final_message,
        answers_in_json=answers_in_json,
    )
    _check_end(conversation)
    return conversation


def is_stable(chat: prompt_pb2.ChatPrompt, *, default: bool) -> bool:
    """Whether the prompt must stay stable across turns; raises InvalidRequest for an unknown form."""
    if chat.form not in prompt_pb2.PromptForm.values():
        complaint = f"is {int(chat.form)}; it is not a PromptForm of this API version"
        _refuse(_CHAT, "prompt.chat.form", complaint)
    return chat.form == prompt_pb2.PROMPT_FORM_STABLE or (default and not chat.form)


def check_no_tools(tools: Sequence[tool_pb2.Tool], choice: tool_pb2.ToolChoice | None) -> None:
    """Refuse tools or a tool choice if the prompt is not a conversation."""
    if tools:
        message = f"{len(tools)} tools are offered, but the prompt is not a conversation; send `chat`"
        raise _invalid(_TOOL, message, "prompt.tools")
    _choice_of(choice, ())


def tools_of(protos: Sequence[tool_pb2.Tool]) -> tuple[Tool, ...]:
    """Return the tools on offer; raises InvalidRequest."""
    if len(protos) > TOOL_COUNT_LIMIT:
        message = f"{len(protos)} tools are offered; the limit is {TOOL_COUNT_LIMIT}"
        facts = {"tool_count": len(protos), "tool_count_limit": TOOL_COUNT_LIMIT}
        raise InvalidRequest(Reason.TOOL_INVALID, message, field="prompt.tools", metadata=facts)
    size = sum(len(proto.parameters_json) + len(proto.description) for proto in protos)
    if size > TOOL_BYTES_LIMIT:
        message = f"the tools on offer have {size} characters; the limit is {TOOL_BYTES_LIMIT}"
        facts = {"size_bytes": size, "limit_bytes": TOOL_BYTES_LIMIT}
        raise InvalidRequest(Reason.TOOL_INVALID, message, field="prompt.tools", metadata=facts)
    tools: dict[str, Tool] = {}
    for index, proto in enumerate(protos):
        field = f"prompt.tools[{index}]"
        if _NAME_PATTERN.fullmatch(proto.name) is None:
            _refuse(_TOOL, f"{field}.name", f"is {shown(proto.name)}; it must be {_NAME_WANTED}")
        if proto.name in tools:
            complaint = f"is {proto.name!r}, and so is an earlier tool's; names are unique"
            _refuse(_TOOL, f"{field}.name", complaint)
        schema = _schema_of(proto, field)
        tools[proto.name] = Tool(
            proto.name,
            proto.description,
            schema,
            is_strict=proto.strict,
            is_found_later=proto.found_later,
            sent_index=index,
        )
    return tuple(tools.values())


def _schema_of(proto: tool_pb2.Tool, field: str) -> Mapping[str, Any]:
    if not proto.parameters_json:
        return {"type": "object", "properties": {}}
    try:
        return _object_of(proto.parameters_json)
    except ValueError as error:
        _refuse(_TOOL, f"{field}.parameters_json", f"{error}; send a JSON schema")


def _choice_of(proto: tool_pb2.ToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if proto is None:
        return ToolChoice()
    mode = enum_of(proto.mode, tool_pb2.ToolChoiceMode, ToolMode, unset=ToolMode.AUTO)
    if mode is None:
        _refuse(_CHOICE, "tool_choice.mode", f"is {int(proto.mode)}; it is not a ToolChoiceMode of this API")
    offered_names = {tool.name for tool in tools}
    for index, name in enumerate(proto.allowed):
        if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
            wanted = "TOOL_CHOICE_MODE_AUTO or TOOL_CHOICE_MODE_REQUIRED"
            _refuse(_CHOICE, "tool_choice.allowed", f"is set; it needs the mode {wanted}")
        if name not in offered_names:
            complaint = f"is {shown(name)}; it is not one of the tools offered"
            _refuse(_CHOICE, f"tool_choice.allowed[{index}]", complaint)
    is_parallel = proto.parallel_tool_calls or not proto.HasField("parallel_tool_calls")
    if mode is not ToolMode.NAMED:
        if proto.name:
            complaint = f"is {shown(proto.name)}; it needs the mode TOOL_CHOICE_MODE_NAMED"
            _refuse(_CHOICE, "tool_choice.name", complaint)
        if mode is ToolMode.REQUIRED and not tools:
            message = "a tool call is required, but no tool is offered; send `tools`"
            raise _invalid(_CHOICE, message, "tool_choice.mode")
        return ToolChoice(mode, allowed=frozenset(proto.allowed), is_parallel=is_parallel)
    if proto.name not in offered_names:
        offered = shown(", ".join(tool.name for tool in tools)) if tools else "none"
        complaint = f"is {shown(proto.name)}; it is not one of the tools offered: {offered}"
        _refuse(_CHOICE, "tool_choice.name", complaint)
    return ToolChoice(mode, proto.name, is_parallel=is_parallel)


def _message_of(message: prompt_pb2.ChatMessage, index: int, info: ModelInfo) -> ChatMessage:
    field = f"prompt.chat.messages[{index}]"
    role = _role_of(message, field)
    content, images = _content_of(message, role, field, info)
    for name in ("reasoning", "tool_calls", "token_ids"):
        if role != "assistant" and getattr(message, name):
            _refuse(_CHAT, f"{field}.{name}", f"is only for ROLE_ASSISTANT, not {role!r}")
    if role != "tool" and message.tool_call_id:
        _refuse(_CHAT, f"{field}.tool_call_id", f"is only for ROLE_TOOL, not {role!r}")
    _check_count(len(message.tool_calls), PART_COUNT_LIMIT, what="calls", field=f"{field}.tool_calls")
    limit = info.context_token_limit
    _check_count(len(message.token_ids), limit, what="tokens", field=f"{field}.token_ids")
    check_token_ids(message.token_ids, info, field=f"{field}.token_ids")
    return ChatMessage(
        role=role,
        content=content,
        images=images,
        name=message.name or None,
        reasoning=message.reasoning,
        tool_calls=tuple(
            _call_of(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id,
        token_ids=tuple(message.token_ids),
        sent_index=index,
    )


def _role_of(message: prompt_pb2.ChatMessage, field: str) -> str:
    """Return the role's name in templates; raises InvalidRequest if there is none, two or an unknown one."""
    name = message.role_name
    if message.role:
        if name:
            complaint = f"{field} has `role` and `role_name`; send one of them"
            raise _invalid(_CHAT, complaint, f"{field}.role_name")
        if message.role not in _ROLES:
            _refuse(_CHAT, f"{field}.role", f"is {int(message.role)}; it is not a Role of this API version")
        return _ROLES[message.role]
    if not name:
        raise _invalid(_CHAT, f"{field} has no role; set `role`", f"{field}.role")
    if name in _ROLES.values():
        _refuse(_CHAT, f"{field}.role_name", f"is {name!r}; send ROLE_{name.upper()} as `role` instead")
    if _NAME_PATTERN.fullmatch(name) is None:
        _refuse(_CHAT, f"{field}.role_name", f"is {shown(name)}; it must be {_NAME_WANTED}")
    return name


def _content_of(
    message: prompt_pb2.ChatMessage, role: str, field: str, info: ModelInfo
) -> tuple[str, tuple[PlacedImage, ...]]:
    """Return a message's text, and its images with their positions in the text."""
    if not message.parts:
        return message.content, ()
    if message.content:
        raise _invalid(_CHAT, f"{field} has `content` and `parts`; send one of them", f"{field}.parts")
    _check_count(len(message.parts), PART_COUNT_LIMIT, what="parts", field=f"{field}.parts")
    text = ""
    images: list[PlacedImage] = []
    for index, part in enumerate(message.parts):
        kind, part_field = part.WhichOneof("part"), f"{field}.parts[{index}]"
        if kind == "text":
            text += part.text
        elif kind == "image":
            images.append(PlacedImage(len(text), _image_of(part.image, role, info, f"{part_field}.image")))
        else:
            _refuse(_CHAT, part_field, "has neither text nor an image")
    return text, tuple(images)


def _image_of(image: prompt_pb2.ImagePart, role: str, info: ModelInfo, field: str) -> ImageSource:
    if not info.sees_images:
        raise InvalidRequest(
            Reason.IMAGES_UNSUPPORTED,
            f"{field} is an image; the model {info.model_id!r} ({info.architecture}) {info.image_refusal}",
            field=field,
            metadata={"architecture": info.architecture},
        )
    if role not in _SHOWING_ROLES:
        _refuse(_CHAT, field, f"is in a turn of {role!r}; images are only for ROLE_USER and ROLE_TOOL")
    detail = enum_of(image.detail, prompt_pb2.ImageDetail, ImageDetail, unset=ImageDetail.AUTO)
    if detail is None:
        number = int(image.detail)
        raise _bad_image(
            f"{field}.detail is {number}; it is not an ImageDetail of this API", f"{field}.detail"
        )
    source = image.WhichOneof("source")
    if source == "data" and image.data:
        return ImageSource(image.data, image.media_type, field, detail=detail)
    if source == "uri" and image.uri[:5].lower() == "data:":
        return _from_data_uri(image, field, detail)
    if source == "uri" and image.uri:
        return ImageSource(b"", image.media_type, field, image.uri, detail)
    raise _bad_image(f"{field} has neither data nor a URI", f"{field}.uri" if source == "uri" else field)


def _from_data_uri(image: prompt_pb2.ImagePart, field: str, detail: ImageDetail) -> ImageSource:
    """Return the file in a data URI (RFC 2397); base64 is read as leniently as browsers do."""
    uri_field = f"{field}.uri"
    head, comma, body = image.uri.partition(",")
    media_type, *options = head[len("data:") :].split(";")
    if not comma or not options or options[-1].strip().lower() != "base64":
        shape = "data:image/png;base64,..."
        raise _bad_image(f"{uri_field} is {shown(image.uri[:40])}; it must be {shape}", uri_field)
    try:
        data = _from_base64(body)
    except ValueError as error:  # a letter outside base64's alphabet, or not even ASCII
        raise _bad_image(f"{uri_field} is not base64: {error}", uri_field) from None
    if not data:
        raise _bad_image(f"{uri_field} has no data behind its comma", uri_field)
    return ImageSource(data, image.media_type or media_type.strip(), field, detail=detail)


def _from_base64(text: str) -> bytes:
    """Return the bytes; accepts line breaks and missing padding."""
    if "%" in text:
        text = urllib.parse.unquote(text, errors="strict")
    encoded = b"".join(text.encode("ascii").split())
    if b"=" not in encoded:
        encoded += b"=" * (-len(encoded) % 4)
    return base64.b64decode(encoded, validate=True)


def _call_of(call: tool_pb2.ToolCall, field: str) -> ToolCall:
    if not call.name:
        _refuse(_CHAT, f"{field}.name", "is empty; a call must name its tool")
    made = ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json or "{}")
    try:
        _object_of(made.arguments_json)
    except _NoObject:
        return made  # a model wrote it, so it may be malformed
    except ValueError as error:
        _refuse(_CHAT, f"{field}.arguments_json", str(error))
    return made


def _arguments_of(struct: Struct) -> dict[str, Any]:
    """Return the template's arguments, sorted, since a Struct's keys have no order."""
    try:
        arguments = uniform(MessageToDict(struct))
    except ValueError:
        complaint = "has a number that is not finite, which JSON does not allow"
        _refuse(_CHAT, "prompt.chat.template_arguments", complaint)
    assert isinstance(arguments, dict), "a Struct is an object"
    return arguments


def _check_count(count: int, limit: int, *, what: str, field: str) -> None:
    if count > limit:
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            f"{field} has {count} {what}; the limit is {limit}",
            field=field,
            metadata={"field": field, "count": count, "limit": limit},
        )


def _check_end(conversation: Conversation) -> None:
    """Refuse options for the prompt's end that contradict each other."""
    last = conversation.messages[-1]
    if conversation.continues_final_message:
        field = "prompt.chat.continue_final_message"
        if conversation.adds_generation_prompt:
            message = "add_generation_prompt and continue_final_message are both set"
            raise _invalid(_CHAT, message, field)
        if last.role != "assistant" or not (last.content or last.reasoning) or last.tool_calls:
            message = f"the last message, of {last.role!r}, cannot be continued; it must be an assistant's "
            message += "with content or reasoning and without tool calls"
            raise _invalid(_CHAT, message, field)
    if conversation.tool_choice.is_forced and not conversation.adds_generation_prompt:
        message = "a call is forced, but the prompt does not end with a new turn"
        facts = {"field": "tool_choice.mode"}
        raise InvalidRequest(Reason.TOOL_CHOICE_INVALID, message, field=facts["field"], metadata=facts)


class _NoObject(ValueError):
    """A text that is not a JSON object."""


def _object_of(text: str) -> dict[str, Any]:
    """Return the JSON object; raises ValueError, which says what the text is instead."""
    try:
        parsed = json.loads(text)
        # JSON can contain half of a surrogate pair, which cannot be encoded.
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise _NoObject(f"is not JSON: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise ValueError("contains half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise _NoObject(f"is not a JSON object but a {type(parsed).__name__}")
    return parsed


def _invalid(reason: Reason, message: str, field: str) -> InvalidRequest:
    return InvalidRequest(reason, message, field=field, metadata={"field": field})


def _refuse(reason: Reason, field: str, complaint: str) -> NoReturn:
    raise _invalid(reason, f"{field} {complaint}", field) from None


def _bad_image(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(Reason.IMAGE_INVALID, message, field=field)

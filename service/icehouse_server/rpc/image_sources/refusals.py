"""Refusals of images that a request names: the part at fault, and nothing of what was found there."""

from __future__ import annotations

from icehouse_server.errors import InvalidRequest, Reason, SourceUnreachable


def refused(field: str, complaint: str, **facts: object) -> InvalidRequest:
    """Return the error of an image that is never read."""
    message = f"the image of {field} {complaint}"
    return InvalidRequest(Reason.IMAGE_INVALID, message, field=field, metadata=facts)


def too_long(field: str, limit_bytes: int) -> InvalidRequest:
    """Return the error of an image that was read up to the limit."""
    complaint = f"has more than {limit_bytes} bytes, the most that an image may have"
    return refused(field, complaint, limit_bytes=limit_bytes)


def unreachable(field: str, complaint: str, **facts: object) -> SourceUnreachable:
    """Return the error of an image that its host does not give now."""
    message = f"the image of {field} {complaint}"
    return SourceUnreachable(Reason.IMAGE_UNREACHABLE, message, field=field, metadata=facts)

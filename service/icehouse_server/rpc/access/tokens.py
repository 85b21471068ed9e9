"""Bearer tokens: hashed in a file, compared in constant time, read again when the file changes.

SHA-256 is enough: a token is 32 random bytes, which nobody can guess. A slow hash such as scrypt would cost
every call 50 ms of CPU.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import hmac
import re
import secrets
from pathlib import Path

from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import Reason, StartError
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.small_file import read_small_file

TOKEN_PREFIX = "icehouse_"
"""Lets scanners of repositories and logs recognise tokens."""

TOKEN_COUNT_LIMIT = 1000
"""A limit, because each call is compared with every token."""

TENANT_PATTERN = re.compile(r"[A-Za-z0-9._:/@\-]{1,128}")

_HASH_PATTERN = re.compile(r"[0-9a-f]{64}")
_NEVER = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class AccessToken:
    """One line of the file. `expire_time` is `Clock.wall`."""

    digest: bytes
    caller: Caller
    expire_time: float = _NEVER


def new_token() -> str:
    """Return a new token: 32 bytes from the system's random generator."""
    return TOKEN_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode("ascii")


def digest_of(token: str) -> bytes:
    """Return the hash that is stored for a token."""
    return hashlib.sha256(token.encode("utf-8")).digest()


def line_of(token: str, *, tenant: str, role: CallerRole, expire_date: datetime.date | None) -> str:
    """Return the file's line for `token`. `expire_date` is its last valid day (UTC)."""
    expires = "" if expire_date is None else f" expires={expire_date.isoformat()}"
    return f"sha256={digest_of(token).hex()} tenant={tenant} role={role.value}{expires}"


class TokenFile:
    """The tokens of one file. `refresh` reads it, on any thread; `find` is for the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: bytes | None = None
        self._tokens: tuple[AccessToken, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    def refresh(self) -> bool:
        """Read the file again; True if it has changed.

        Raises StartError for a file that cannot be used, and then keeps the previous tokens.
        """
        try:
            file = read_small_file(self._path)
        except OSError as error:
            raise self._error(error.strerror or "it cannot be read") from error
        if file.mode & 0o022:
            raise self._error("users other than its owner may write it; run chmod 600 on it")
        content = file.content
        if content == self._content:
            return False
        self._tokens = self._parse(content)
        self._content = content
        return True

    def find(self, token: str, *, now: float) -> Caller | None:
        """Return whose token this is; None if it is unknown or has expired at wall time `now`."""
        wanted = digest_of(token)
        found = None
        # Never stop early, so that the time taken says nothing about the tokens.
        for known in self._tokens:
            if hmac.compare_digest(known.digest, wanted):
                found = known
        return found.caller if found is not None and now < found.expire_time else None

    def _parse(self, content: bytes) -> tuple[AccessToken, ...]:
        tokens: dict[bytes, AccessToken] = {}
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                token = _token_of(line)
            except ValueError as error:
                raise self._error(f"line {number}: {error}") from error
            if token.digest in tokens:
                raise self._error(f"line {number}: this token is already listed above")
            tokens[token.digest] = token
        if len(tokens) > TOKEN_COUNT_LIMIT:
            raise self._error(f"it has {len(tokens)} tokens, the limit is {TOKEN_COUNT_LIMIT}")
        return tuple(tokens.values())

    def _error(self, what: str) -> StartError:
        return StartError(
            Reason.TOKENS_INVALID,
            f"the token file {self._path} cannot be used: {what}",
            metadata={"file": self._path},
        )


def _token_of(line: str) -> AccessToken:
    parts = dict(part.partition("=")[::2] for part in line.split())
    unknown = parts.keys() - {"sha256", "tenant", "role", "expires"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is not one of sha256, tenant, role, expires")
    digest, tenant = parts.get("sha256", ""), parts.get("tenant", "")
    if _HASH_PATTERN.fullmatch(digest) is None:
        raise ValueError("sha256= must have 64 hex digits; `icehouse token new` writes such a line")
    if TENANT_PATTERN.fullmatch(tenant) is None:
        raise ValueError("tenant= must have 1 to 128 of A-Z a-z 0-9 . _ : / @ -")
    role = CallerRole(parts.get("role", CallerRole.TENANT.value))
    return AccessToken(
        bytes.fromhex(digest), Caller(Tenant(tenant), role), _expire_time_of(parts.get("expires"))
    )


def _expire_time_of(text: str | None) -> float:
    if text is None:
        return _NEVER
    last_day = datetime.date.fromisoformat(text)
    if last_day == datetime.date.max:
        # 9999-12-31, which some use for never: there is no day after it.
        return _NEVER
    end = datetime.datetime.combine(last_day, datetime.time(), tzinfo=datetime.UTC)
    return (end + datetime.timedelta(days=1)).timestamp()

"""Who calls: proved by a certificate or a token, never by what the request says."""

from __future__ import annotations

import contextvars
import dataclasses
import enum

from service.domain.ids import Tenant
from service.errors import Forbidden, Reason


class Role(enum.StrEnum):
    """What a caller may do."""

    TENANT = "tenant"
    """Run its own prompts and command its own blocks."""
    OPERATOR = "operator"
    """Act for every tenant and command the whole cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """One identity. `tenant` is None while nobody has to prove who they are."""

    tenant: Tenant | None
    role: Role

    def require_operator(self, what: str) -> None:
        """Raise Forbidden unless this is an operator; `what` is a sentence's beginning."""
        if self.role is not Role.OPERATOR:
            raise Forbidden(
                Reason.OPERATOR_ONLY,
                f"{what} concerns every tenant and is left to operators; {self.tenant!r} is none",
                metadata={"tenant": self.tenant, "role": self.role.value},
            )


UNPROVED = Caller(None, Role.OPERATOR)
"""Everyone, where the configuration asks for no credentials."""

current: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=UNPROVED)
"""Set by the door for the task of one call, before its message is read."""

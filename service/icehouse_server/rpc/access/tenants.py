"""Tenant accounts: what each tenant runs, what it has used, and when its share is used up.

Counted at the edge, where every request begins and ends. The number of accounts is bounded: names that
callers make up displace the accounts that have been idle longest.

Tokens per minute are a bucket that fills steadily. A request reserves its prompt and all the output it may
ask for, so that many requests at once cannot overdraw it. The unused part goes back when the request ends. A
request for more than a whole bucket is admitted when the bucket is full. It then owes the rest, and later
requests wait until that is paid.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from icehouse_server.clock import Clock
from icehouse_server.config import TenantConfig
from icehouse_server.domain.events import Delta, Event, Finished, Started
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.stats import TenantUse
from icehouse_server.engine.core.refusals import too_many_completions
from icehouse_server.errors import InvalidRequest, Overloaded, Reason

ACCOUNT_LIMIT = 1024
"""Accounts that are kept. Only idle ones are dropped, so a busy server may have more for a while."""

WAITING_RETRY_S = 1.0


@dataclasses.dataclass(slots=True)
class TenantAccount:
    """One tenant's numbers since the account was opened, and its token budget."""

    use: TenantUse
    budget: TokenBudget | None

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and no tokens are owed."""
        owes = self.budget is not None and self.budget.level < self.budget.limit
        return not (self.use.waiting_count or self.use.running_count or owes)


class TenantRequest:
    """One request from its submission to its end."""

    def __init__(self, account: TenantAccount, request: GenerationRequest) -> None:
        self._account = account
        self._prompt_token_count = len(request.prompt_token_ids)
        self.reserved_token_count = self._prompt_token_count + request.max_output_tokens
        self._output_token_count = 0
        self._has_started = False
        account.use.waiting_count += 1
        account.use.accepted_total += 1
        account.use.prompt_token_total += self._prompt_token_count

    def note(self, event: Event) -> None:
        if isinstance(event, Started) and not self._has_started:
            self._has_started = True
            self._account.use.waiting_count -= 1
            self._account.use.running_count += 1
            self._account.use.cached_token_total += event.cache.cached_token_count
        elif isinstance(event, Delta):
            self._output_token_count += len(event.token_ids)
        elif isinstance(event, Finished):
            self._output_token_count = event.usage.output_token_count

    def end(self) -> None:
        """Close the request. If it has started, its prompt and output are charged."""
        if self._has_started:
            self._account.use.running_count -= 1
        else:
            self._account.use.waiting_count -= 1
        self._account.use.output_token_total += self._output_token_count
        if self._account.budget is not None:
            used = self._prompt_token_count + self._output_token_count if self._has_started else 0
            self._account.budget.give_back(self.reserved_token_count - used)


class Tenants:
    """All accounts. Owned by the event loop."""

    def __init__(self, limits: TenantConfig, *, running_limit: int, clock: Clock) -> None:
        self.limits = limits
        self.running_limit = running_limit
        """Concurrent requests of one tenant, by the engine's own count; 0 is unlimited."""
        self._clock = clock
        self._accounts: OrderedDict[Tenant, TenantAccount] = OrderedDict()

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(tuple(self._accounts.values()))

    def uses(self) -> tuple[TenantUse, ...]:
        return tuple(dataclasses.replace(account.use) for account in self)

    def total(self) -> TenantUse:
        """Return how many requests of all tenants wait and run."""
        return TenantUse(
            DEFAULT_TENANT,
            waiting_count=sum(account.use.waiting_count for account in self),
            running_count=sum(account.use.running_count for account in self),
        )

    def use_of(self, tenant: Tenant) -> TenantUse:
        """Return what one tenant runs and has used; nothing if it has no account."""
        account = self._accounts.get(tenant)
        return TenantUse(tenant) if account is None else dataclasses.replace(account.use)

    @contextlib.contextmanager
    def staying(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[TenantRequest, ...]]:
        """Count requests of one tenant until the block ends; raises Overloaded if the tenant's share is used
        up, and InvalidRequest for more requests than could ever fit."""
        account = self._account(requests[0].tenant)
        try:
            self._check(account, requests)
        except (Overloaded, InvalidRequest):
            account.use.refused_total += 1
            raise
        stays = tuple(TenantRequest(account, request) for request in requests)
        if account.budget is not None:
            account.budget.reserve(sum(stay.reserved_token_count for stay in stays))
        try:
            yield stays
        finally:
            for stay in stays:
                stay.end()

    def charge(self, tenant: Tenant, token_count: int) -> None:
        """Charge tokens for which no request runs; raises Overloaded if the tenant's share is used up.

        0 only checks, before work whose token count is known only afterwards.
        """
        if not self.limits.tokens_per_minute:
            return
        account = self._account(tenant)
        assert account.budget is not None, "there is a rate"
        try:
            self._check_budget(account, max(1, token_count))
        except Overloaded:
            account.use.refused_total += 1
            raise
        account.budget.reserve(token_count)

    def _account(self, tenant: Tenant) -> TenantAccount:
        account = self._accounts.get(tenant)
        if account is None:
            rate = self.limits.tokens_per_minute
            budget = TokenBudget(tokens_per_minute=rate, clock=self._clock) if rate else None
            account = self._accounts[tenant] = TenantAccount(TenantUse(tenant), budget)
            self._forget_idle()
        self._accounts.move_to_end(tenant)
        return account

    def _forget_idle(self) -> None:
        excess = len(self._accounts) - ACCOUNT_LIMIT
        if excess <= 0:
            return
        newest = next(reversed(self._accounts))
        idle = [name for name, account in self._accounts.items() if account.is_idle and name != newest]
        for name in idle[:excess]:
            del self._accounts[name]

    def _check(self, account: TenantAccount, requests: Sequence[GenerationRequest]) -> None:
        limit = self.limits.waiting_limit
        if limit and len(requests) > limit:
            raise too_many_completions(len(requests), limit)
        tenant, waiting_count = account.use.tenant, account.use.waiting_count
        if limit and waiting_count + len(requests) > limit:
            raise Overloaded(
                Reason.TENANT_QUEUE_FULL,
                f"{waiting_count} requests of {_named(tenant)} wait, which is its limit; "
                "try again when one has started",
                retry_after_s=WAITING_RETRY_S,
                metadata={"tenant": tenant, "waiting_count": waiting_count, "waiting_limit": limit},
            )
        wanted = sum(len(request.prompt_token_ids) + request.max_output_tokens for request in requests)
        self._check_budget(account, wanted)

    def _check_budget(self, account: TenantAccount, wanted: int) -> None:
        if account.budget is None:
            return
        tenant = account.use.tenant
        wait_s = account.budget.wait_s(wanted)
        if wait_s > 0.0:
            raise Overloaded(
                Reason.TOKEN_RATE_EXCEEDED,
                f"{_named(tenant)} may use {account.budget.limit} tokens per minute and has "
                f"{account.budget.level} left; this request may use {wanted}; try again in {wait_s:.1f} s, "
                "or ask for less output",
                retry_after_s=wait_s,
                metadata={
                    "tenant": tenant,
                    "tokens_per_minute": account.budget.limit,
                    "tokens_left": account.budget.level,
                    "tokens_wanted": wanted,
                },
            )


def _named(tenant: Tenant) -> str:
    return f"tenant {tenant!r}" if tenant else "the default tenant"


_MINUTE_S = 60.0


class TokenBudget:
    """One tenant's bucket. Owned by the event loop."""

    def __init__(self, *, tokens_per_minute: int, clock: Clock) -> None:
        assert tokens_per_minute > 0
        self.limit = tokens_per_minute
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._level_time = clock.monotonic()

    @property
    def level(self) -> int:
        """Tokens in the bucket now; negative while more were used than have come back."""
        self._fill()
        return int(self._level)

    def wait_s(self, token_count: int) -> float:
        """Return how long to wait until this many tokens may be reserved; 0 for now."""
        self._fill()
        missing = min(token_count, self.limit) - self._level
        return max(0.0, missing * _MINUTE_S / self.limit)

    def reserve(self, token_count: int) -> None:
        """Take tokens out; the level may become negative."""
        self._fill()
        self._level -= token_count

    def give_back(self, token_count: int) -> None:
        self._fill()
        self._level = min(self.limit, self._level + token_count)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        gained = (now - self._level_time) * self.limit / _MINUTE_S
        self._level = min(self.limit, self._level + gained)
        self._level_time = now

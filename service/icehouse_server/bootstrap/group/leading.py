"""Leading: what makes the engine of rank 0 lead a group, and what all ranks must have alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from icehouse_server.clock import Clock
from icehouse_server.config import Config, SecurityConfig
from icehouse_server.config.load import environment, named_ranks
from icehouse_server.domain.model import EngineState
from icehouse_server.engine.core.refusals import rank_lost
from icehouse_server.engine.runner.identity.fingerprint import ModelFingerprint
from icehouse_server.engine.runner.model_loader import ModelSource, sees_images
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.errors import ConfigError, IcehouseError, Reason, model_invalid
from icehouse_server.group.channel import ChannelTls, GroupServer
from icehouse_server.group.ending import FOLLOWERS_END_S, leave_later
from icehouse_server.group.leader_runner import LeaderRunner
from icehouse_server.group.leader_tier import LeaderTier
from icehouse_server.group.membership import Membership, membership_of, rank_fingerprint, releases
from icehouse_server.group.order_log import OrderLog
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.listen_address import check_control_address
from icehouse_server.storage.api import ColdTier, Outcome

_Post = Callable[[Outcome], object]


def find_membership(config: Config) -> Membership | None:
    """Return the group that the settings name; None without one. Raises ConfigError, or StartError for a
    channel that others could read."""
    if config.group.hosts is None:
        return None
    membership = membership_of(
        config.group.hosts,
        rank=config.group.rank,
        launched_as=environment().get("MLX_RANK"),
        control=config.group.control,
    )
    check_control_address(membership.control, config.security)
    return membership


def check_shardable(model: ModelSource, config: Config) -> None:
    """Raise ConfigError or ModelError for what a group does not serve."""
    for key, is_set in (
        ("models", bool(config.models)),
        ("model.draft_model", config.model.draft_model is not None),
        ("model.adapters", bool(config.model.adapters)),
        ("model.adapter_path", config.model.adapter_path is not None),
        ("cache.shared_url", config.cache.shared_url is not None),
        # Each directory has a secret of its own in its blocks' names, which are rank 0's everywhere.
        ("cache.key_file", config.cache.key_file is not None),
        ("cache.key_command", config.cache.key_command is not None),
    ):
        if is_set:
            raise ConfigError(
                Reason.CONFIG_INVALID, f"{key} is set, which a group does not serve; leave it out", field=key
            )
    if sees_images(model.path):
        raise model_invalid(f"the model in {model.path} sees images, which a group does not serve")


class LeaderParts:
    """What makes an engine rank 0's."""

    def __init__(
        self,
        membership: Membership,
        config: Config,
        *,
        memory_limit_bytes: int,
        clock: Clock,
        router: Router,
    ) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self.membership = membership
        self.rank = Rank(lambda: named_ranks(membership.ring, membership.rank))
        self._security = config.security
        self._clock = clock
        self._router = router
        self._log = OrderLog(membership.world)
        self._tier: LeaderTier | None = None
        self._server: GroupServer | None = None
        self.lost: IcehouseError | None = None
        """Why the group is broken. The engine may know nothing of it, and end in order."""

    def start(self, facts: dict[str, str]) -> None:
        """Listen for the others. Raises StartError."""
        self._server = GroupServer(
            self.membership,
            facts,
            self._log,
            clock=self._clock,
            tier=lambda: self._tier,
            on_lost=self._lost,
            tls=tls_of(self._security),
            memory_limit_bytes=self._memory_limit_bytes,
        )
        self._server.start()

    def leading(self, runner: ModelRunner) -> LeaderRunner:
        """Return the runner that the others repeat."""
        assert self._server is not None
        return LeaderRunner(runner, self._log, clock=self._clock, wait_for_all=self._server.wait_for_all)

    def open_tier(self, open_own: Callable[[_Post], ColdTier | None], post: _Post) -> ColdTier | None:
        """Return the tiers of all ranks as one. `open_own` opens rank 0's; None without an SSD tier."""
        tier = LeaderTier(self._log, followers=self.membership.followers, post=post)
        own = open_own(tier.take)
        if own is None:
            return None
        tier.own, self._tier = own, tier
        return tier

    def call_off(self) -> None:
        """Wait for no more ranks."""
        if self._server is not None:
            self._server.call_off()

    def stop(self) -> None:
        """Wait until the others have ended in order."""
        if self._server is not None:
            self._server.stop(timeout_s=FOLLOWERS_END_S)

    def _lost(self, detail: str) -> None:
        # Why may name folders of that machine, so only the log says it.
        self.lost = rank_lost(detail.partition(":")[0])
        self._router.state_changed(EngineState.FAILED, self.lost)
        leave_later(1)


def group_facts(config: Config, fingerprint: ModelFingerprint, *, dtype: str) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    return {
        **releases(),
        "the model": fingerprint.value.hex()[:16],
        "dtype": dtype or "stored",
        "cache.block_token_count": str(config.cache.block_token_count),
        "cache.kv_bits": str(config.cache.kv_bits),
        "cache.ssd_enabled": str(config.cache.has_ssd),
        "engine.attention": config.engine.attention,
    }


def with_rank(fingerprint: ModelFingerprint, membership: Membership) -> ModelFingerprint:
    """Return the fingerprint of a rank's part of the model."""
    rank = f"{membership.rank} of {membership.world}"
    return dataclasses.replace(
        fingerprint,
        value=rank_fingerprint(fingerprint.value, membership),
        details={**fingerprint.details, "rank": rank},
    )


def tls_of(security: SecurityConfig) -> ChannelTls | None:
    """Return the certificates of a rank, for both ends of the channel; None for plain text."""
    if security.tls_certificate is None or security.tls_key is None or security.tls_client_ca is None:
        return None
    paths = (security.tls_certificate, security.tls_key, security.tls_client_ca)
    return ChannelTls(*(Path(path).expanduser().read_bytes() for path in paths))

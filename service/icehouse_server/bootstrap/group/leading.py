"""Leading: what makes rank 0's engine lead a group, and what must be equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from icehouse_server.clock import Clock
from icehouse_server.config import Config, SecurityConfig
from icehouse_server.config.load import environment, has_rdma, named_ranks
from icehouse_server.device import Device
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import EngineStats, GroupStats, RankState, RankStats, RankTierStats
from icehouse_server.engine.core.refusals import rank_lost
from icehouse_server.engine.runner.identity.fingerprint import ModelFingerprint, read_json
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
from icehouse_server.rpc.access.credentials import Certificates
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.listen_address import check_control_address, check_rank_free
from icehouse_server.storage.api import ColdTier, Outcome, hang_detail

_Post = Callable[[Outcome], object]


def find_membership(config: Config) -> Membership | None:
    """Return the group that the settings name; None without one. Raises ConfigError, also for what a group
    does not serve, and StartError for a channel that others could read and for unusable certificates."""
    if config.group.hosts is None:
        return None
    membership = membership_of(
        config.group.hosts,
        rank=config.group.rank,
        launched_as=environment().get("MLX_RANK"),
        control=config.group.control,
    )
    _check_served(config)
    check_control_address(membership.control, config.security)
    # Here because reading the model may take minutes: report a bad certificate before that.
    tls_of(config.security)
    return membership


def own_membership(config: Config) -> Membership | None:
    """Return the group of which this process is a rank, as `find_membership` does. Also raises StartError if
    it cannot listen for the other ranks."""
    membership = find_membership(config)
    if membership is None:
        return None
    if not has_rdma():
        for address in membership.ring[membership.rank]:
            check_rank_free(address)
    if membership.rank == 0:
        check_rank_free(membership.control)
    return membership


def _check_served(config: Config) -> None:
    """Raise ConfigError for settings that a group does not support."""
    for key, is_set in (
        ("models", bool(config.models)),
        ("model.draft_model", config.model.draft_model is not None),
        ("cache.shared_url", config.cache.shared_url is not None),
    ):
        if is_set:
            raise ConfigError(
                Reason.CONFIG_INVALID, f"{key} is set, which a group does not serve; leave it out", field=key
            )


def check_shardable(model: ModelSource, config: Config) -> None:
    """Raise ModelError for a model that a group does not serve."""
    if sees_images(model.path):
        raise model_invalid(f"the model in {model.path} reads images, which a group does not serve")
    paths = [named.path for named in config.model.adapters]
    for path in (*paths, *filter(None, [config.model.adapter_path])):
        config_file = Path(path) / "adapter_config.json"
        if read_json(config_file).get("fine_tune_type") == "dora":
            raise model_invalid(
                f"the adapter in {path} is a DoRA adapter, which needs the norms of whole rows, but a rank "
                "has only parts of them; serve it on one machine, or train it as LoRA"
            )


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
        """Why the group is broken. The engine may not know, and end normally."""

    def open_channel(self, facts: dict[str, str]) -> None:
        """Create the channel, which does not listen yet. `facts` must be equal on all ranks."""
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

    def listen(self) -> None:
        """Let the other ranks join. Raises StartError. Signal handlers must be set by then: the ranks that
        have joined shut down cleanly only if rank 0 does."""
        assert self._server is not None
        self._server.start()

    def leading(self, runner: ModelRunner) -> LeaderRunner:
        """Return the runner that the other ranks repeat."""
        assert self._server is not None
        return LeaderRunner(runner, self._log, clock=self._clock, wait_for_all=self._server.wait_for_all)

    def open_tier(self, open_own: Callable[[_Post], ColdTier | None], post: _Post) -> ColdTier | None:
        """Return the tiers of all ranks as one, or None without an SSD tier. `open_own` opens rank 0's."""
        tier = LeaderTier(self._log, followers=self.membership.followers, post=post)
        own = open_own(tier.take)
        if own is None:
            return None
        tier.own, self._tier = own, tier
        return tier

    def stats(self, engine: EngineStats | None, cache: CacheStats | None) -> GroupStats:
        """Return the numbers of all ranks; those of rank 0 come from its engine and its cache. Any thread."""
        assert self._server is not None
        membership, tier = self.membership, self._tier
        own = RankStats(
            0,
            membership.host(0),
            RankState.LOADING if engine is None else RankState.READY,
            order_total=self._log.order_count,
            active_memory_bytes=0 if engine is None else engine.active_memory_bytes,
            memory_limit_bytes=self._memory_limit_bytes,
            ssd=None if cache is None or tier is None else RankTierStats.of(cache),
        )
        if own.ssd is not None and tier is not None:
            writes_off = cache.disk.writes_off_detail if cache is not None and cache.disk is not None else ""
            own = dataclasses.replace(own, ssd_trouble=hang_detail(tier.own) or writes_off)
        return GroupStats(membership.world, (own, *self._server.ranks()))

    def call_off(self) -> None:
        """Stop waiting for ranks."""
        if self._server is not None:
            self._server.call_off()

    def stop(self) -> None:
        """Wait until the other ranks have shut down cleanly."""
        if self._server is not None:
            self._server.stop(timeout_s=FOLLOWERS_END_S)

    def _lost(self, detail: str) -> None:
        # The detail may name folders of that machine, so only the log has it.
        self.lost = rank_lost(detail.partition(":")[0])
        self._router.state_changed(EngineState.FAILED, self.lost)
        leave_later(1)


def group_facts(
    config: Config, fingerprint: ModelFingerprint, source: ModelSource, *, device: Device, key_id: str
) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    adapters = [f"{adapter.name}={adapter.digest.hex()[:16]}" for adapter in source.adapters]
    return {
        **known_facts(config, device),
        "the model": fingerprint.value.hex()[:16],
        "model.adapters": ",".join(adapters),
        "dtype": source.dtype or "stored",
        "the key of the cache": key_id,
    }


def known_facts(config: Config, device: Device) -> dict[str, str]:
    """Return those of the facts that can be known without reading the model. Devices of different kinds round
    differently and warm up with different passes."""
    return {
        **releases(),
        "the kind of device": device.backend.value,
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
    """Return a rank's certificates for both ends of the channel; None for plain text. Raises StartError."""
    if security.tls_certificate is None or security.tls_key is None or security.tls_client_ca is None:
        return None
    certificates = Certificates(security.tls_certificate, security.tls_key, client_ca=security.tls_client_ca)
    return ChannelTls(*certificates.read())

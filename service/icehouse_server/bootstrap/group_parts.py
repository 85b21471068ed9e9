"""Group parts: rank 0 of a tensor-parallel group, and what the other ranks run instead of a server."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.bootstrap.cache_parts import fingerprint_of, open_digests, open_ssd
from icehouse_server.clock import Clock
from icehouse_server.config import Config, SecurityConfig
from icehouse_server.device import Device
from icehouse_server.domain.model import EngineState
from icehouse_server.engine.runner.identity.fingerprint import ModelFingerprint
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer, sees_images
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.errors import ConfigError, IcehouseError, Reason, model_invalid
from icehouse_server.group.channel import GroupClient, GroupServer
from icehouse_server.group.follower import Follower
from icehouse_server.group.leader_runner import LeaderRunner, rank_lost
from icehouse_server.group.leader_tier import LeaderTier
from icehouse_server.group.membership import (
    Membership,
    membership_of,
    rank_fingerprint,
    releases,
)
from icehouse_server.group.order_log import OrderLog
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.listen_address import check_control_address
from icehouse_server.storage.api import ColdTier, Outcome

_Post = Callable[[Outcome], object]

_log = logging.getLogger("icehouse.boot")

_LEAVE_S = 2.0
"""After a rank was lost: callers are told by then, and the inference thread may wait for it for ever."""
_FOLLOWERS_END_S = 25.0


def find_membership(config: Config) -> Membership | None:
    """Return the group that the settings name; None without one. Raises ConfigError, or StartError for a
    channel that others could read."""
    if config.group.hosts is None:
        return None
    membership = membership_of(config.group.hosts, rank=config.group.rank, control=config.group.control)
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
    ):
        if is_set:
            raise ConfigError(
                Reason.CONFIG_INVALID, f"{key} is set, which a group does not serve; leave it out", field=key
            )
    if sees_images(model.path):
        raise model_invalid(f"the model in {model.path} sees images, which a group does not serve")


class LeaderParts:
    """What makes an engine rank 0's."""

    def __init__(self, membership: Membership, config: Config, *, clock: Clock, router: Router) -> None:
        self.membership = membership
        self.rank = Rank(membership.join)
        self._security = config.security
        self._clock = clock
        self._router = router
        self._log = OrderLog(membership.world)
        self._tier: LeaderTier | None = None
        self._server: GroupServer | None = None

    def start(self, facts: dict[str, str]) -> None:
        """Listen for the others. Raises StartError."""
        self._server = GroupServer(
            self.membership,
            facts,
            self._log,
            clock=self._clock,
            on_report=self._reported,
            on_lost=self._lost,
            credentials=_server_credentials(self._security),
        )
        self._server.start()

    def leading(self, runner: ModelRunner) -> LeaderRunner:
        """Return the runner that the others repeat."""
        assert self._server is not None
        return LeaderRunner(runner, self._log, wait_for_all=self._server.wait_for_all)

    def open_tier(self, open_own: Callable[[_Post], ColdTier | None], post: _Post) -> ColdTier | None:
        """Return the tiers of all ranks as one. `open_own` opens rank 0's; None without an SSD tier."""
        tier = LeaderTier(self._log, followers=self.membership.followers, post=post)
        own = open_own(tier.take)
        if own is None:
            return None
        tier.own, self._tier = own, tier
        return tier

    def stop(self) -> None:
        """Wait until the others have ended in order."""
        if self._server is not None:
            self._server.stop(timeout_s=_FOLLOWERS_END_S)

    def _reported(self, rank: int, report: group.FollowRequest) -> None:
        if self._tier is not None:
            self._tier.report(rank, report)

    def _lost(self, detail: str) -> None:
        self._router.state_changed(EngineState.FAILED, rank_lost(detail))
        _leave_later(1)


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


def follow(
    config: Config,
    membership: Membership,
    *,
    model: ModelSource,
    settings: RunnerSettings,
    device: Device,
    clock: Clock,
) -> None:
    """Follow rank 0 until it ends the group. Raises IcehouseError; ends the process where the group
    breaks."""
    check_shardable(model, config)
    digests = open_digests(config.cache, clock)
    whole = fingerprint_of(model.path, config, dtype=model.dtype, digests=digests)
    part = with_rank(whole, membership)
    runner = ModelRunner(
        source=model,
        tokenizer=load_tokenizer(model),
        settings=settings,
        clock=clock,
        rank=Rank(membership.join),
    )
    client = GroupClient(
        membership,
        group_facts(config, whole, dtype=model.dtype),
        credentials=_channel_credentials(config.security),
    )
    follower = Follower(runner, fingerprint=part.value, clock=clock, report=client.report)
    ssd = open_ssd(config.cache, device=device, clock=clock)
    if ssd is None:
        client.report(group.FollowRequest(stored=group.Stored(is_last=True)))
    else:
        follower.tier = ssd.tiers.open(part.value, part.details, follower.take)
        ssd.tiers.start()
    _wait_for_end_on_signals(config.server.drain_grace_s + _FOLLOWERS_END_S)
    orders: queue.SimpleQueue[group.Order | IcehouseError] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(client, orders), name="group-orders", daemon=True).start()
    _carry_out(follower, client, orders)
    if ssd is not None and follower.tier is not None:
        follower.tier.join(timeout_s=_FOLLOWERS_END_S)
        ssd.tiers.close(deadline_time=clock.monotonic())
        ssd.tiers.join(timeout_s=_LEAVE_S)
    client.close()
    _log.info("group_ended", extra={"rank": membership.rank})
    _leave_later(0)


def _receive(client: GroupClient, orders: queue.SimpleQueue[group.Order | IcehouseError]) -> None:
    """Hand orders to the inference thread; where rank 0 is gone that one may wait for it for ever."""
    is_ending = False
    try:
        for order in client.orders():
            is_ending = order.HasField("end")
            orders.put(order)
    except IcehouseError as error:
        orders.put(error)
        return
    except grpc.RpcError as error:
        _log.error("rank_0_lost", extra={"detail": repr(error)})
    if not is_ending:
        os._exit(1)


def _carry_out(
    follower: Follower, client: GroupClient, orders: queue.SimpleQueue[group.Order | IcehouseError]
) -> None:
    """Do as rank 0 does, on this thread, until it ends. Raises IcehouseError."""
    try:
        while not follower.has_ended:
            order = orders.get()
            if isinstance(order, IcehouseError):
                raise order
            if order.HasField("begin"):
                client.send(group.FollowRequest(joining=group.Joining()))
                follower.load()
                _log.info("rank_loaded")
            else:
                follower.carry_out(order)
    except Exception as error:  # rank 0 is told, and the group ends
        detail = error.message if isinstance(error, IcehouseError) else repr(error)
        client.report(group.FollowRequest(failed=group.Failed(detail=detail)))
        _leave_later(1)
        raise


def _wait_for_end_on_signals(grace_s: float) -> None:
    """Let rank 0 end the group after a signal, for so long; a second one ends this rank at once."""
    told = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()
        _log.info(
            "group_end_awaited", extra={"detail": "rank 0 ends the group; a second signal ends at once"}
        )
        _leave_later(1, after_s=grace_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _leave_later(code: int, *, after_s: float = _LEAVE_S) -> None:
    """End the process soon, whatever MLX's threads still wait for."""
    timer = threading.Timer(after_s, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def _server_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    if security.tls_certificate is None or security.tls_key is None or security.tls_client_ca is None:
        return None
    pair = (_read(security.tls_key), _read(security.tls_certificate))
    return grpc.ssl_server_credentials(
        [pair], root_certificates=_read(security.tls_client_ca), require_client_auth=True
    )


def _channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    if security.tls_certificate is None or security.tls_key is None or security.tls_client_ca is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(security.tls_client_ca),
        private_key=_read(security.tls_key),
        certificate_chain=_read(security.tls_certificate),
    )


def _read(path: str) -> bytes:
    return Path(path).expanduser().read_bytes()

"""Follower parts: what a machine of a group runs instead of a server, unless it is rank 0."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import NoReturn

from icehouse_server.bootstrap.cache_parts import (
    SsdParts,
    fingerprint_of,
    key_id_of,
    open_digests,
    with_key,
)
from icehouse_server.bootstrap.composition import runner_settings
from icehouse_server.bootstrap.group.leading import check_shardable, group_facts, tls_of, with_rank
from icehouse_server.bootstrap.machine import weights_dtype
from icehouse_server.bootstrap.model_source import ServedModels, model_source, suited
from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.config.load import named_ranks
from icehouse_server.device import Device
from icehouse_server.engine.runner.model_loader import load_tokenizer
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.group.channel import GroupClient
from icehouse_server.group.ending import FOLLOWERS_END_S, LEAVE_S, leave, leave_later
from icehouse_server.group.follower import Follower
from icehouse_server.group.follower_loop import FollowerLoop
from icehouse_server.group.membership import Membership

_log = logging.getLogger("icehouse.boot")


def follow(
    config: Config,
    membership: Membership,
    *,
    models: ServedModels,
    ssd: SsdParts | None,
    device: Device,
    clock: Clock,
) -> NoReturn:
    """Follow rank 0 until it ends the group, on the main thread. Raises IcehouseError."""
    check_shardable(models.model, config)
    config = suited(config, models.model)
    source = model_source(config, models.model, dtype=weights_dtype(config.model, device))
    fingerprint = fingerprint_of(
        source.path, config, dtype=source.dtype, digests=open_digests(config.cache, clock)
    )
    settings = runner_settings(config, device)
    runner = ModelRunner(
        source=source,
        tokenizer=load_tokenizer(source),
        settings=settings,
        clock=clock,
        rank=Rank(lambda: named_ranks(membership.ring, membership.rank)),
    )
    part = with_key(with_rank(fingerprint, membership), None if ssd is None else ssd.cipher)
    facts = group_facts(config, fingerprint, source, device=device, key_id=key_id_of(ssd))
    client = GroupClient(
        membership, facts, tls=tls_of(config.security), memory_limit_bytes=settings.memory_limit_bytes
    )
    follower = Follower(runner, fingerprint=part.value, clock=clock, report=client.report)
    if ssd is not None:
        follower.tier = ssd.tiers.open(part.value, part.details, follower.take)
        ssd.tiers.start()
    loop = FollowerLoop(follower, client)
    _stop_on_signal(loop, grace_s=config.server.drain_grace_s + FOLLOWERS_END_S)
    loop.run()
    if ssd is not None and follower.tier is not None:
        follower.tier.join(timeout_s=FOLLOWERS_END_S)
        ssd.tiers.close(deadline_time=clock.monotonic() + LEAVE_S)
        ssd.tiers.join(timeout_s=LEAVE_S)
    loop.close()
    _log.info("group_ended", extra={"rank": membership.rank})
    leave(0)


def _stop_on_signal(loop: FollowerLoop, *, grace_s: float) -> None:
    """After a signal, let rank 0 end the group if it has begun; this rank ends after `grace_s` at the latest.
    A second signal ends it at once."""
    told = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()
        if loop.stop():
            return
        _log.info("group_end_awaited", extra={"detail": "a second signal ends at once"})
        leave_later(1, after_s=grace_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

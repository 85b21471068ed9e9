"""Leading: what must be alike on all ranks, and the numbers of rank 0 beside the others'."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.bootstrap.group.leading import LeaderParts, find_membership, group_facts, own_membership
from icehouse_server.config import Config, SecurityConfig
from icehouse_server.config.sections import GroupConfig
from icehouse_server.device import Backend, Device
from icehouse_server.domain.cache_stats import CacheStats, DiskStats, SpillStats, TierStats
from icehouse_server.domain.stats import EngineStats, RankState
from icehouse_server.engine.runner.identity.fingerprint import ModelFingerprint
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.errors import Reason, StartError
from icehouse_server.group.membership import Membership, difference
from icehouse_server.storage.api import STALL_LIMIT_S

from tests.fixtures.rpc.authority import Authority
from tests.fixtures.storage.blocks import FINGERPRINT
from tests.fixtures.storage.memory_tier import MemoryTier
from tests.fixtures.storage.storage_thread import ManualClock
from tests.system.mesh.envoy import free_ports

ENGINE = EngineStats(active_memory_bytes=5)
CACHE = CacheStats(
    ssd=TierStats(block_count=2, size_bytes=3),
    spill=SpillStats(persisted_block_total=4),
    disk=DiskStats(),
)


def test_ranks_of_different_kinds_of_device_do_not_fit() -> None:
    code: Any = None
    fingerprint = ModelFingerprint(FINGERPRINT, {}, code)
    source = ModelSource(Path("model"), "tiny")
    facts = [
        group_facts(Config(), fingerprint, source, device=Device(name, backend), key_id="")
        for name, backend in (("M4", Backend.METAL), ("M3", Backend.METAL), ("H100", Backend.CUDA))
    ]
    assert difference(facts[0], facts[1]) == ""
    told = difference(facts[0], facts[2])
    assert told == "the kind of device is cuda there and metal on rank 0"


@pytest.mark.parametrize(
    ("broken", "content", "told"),
    [
        ("server.pem", None, "server.pem cannot be used: No such file or directory"),
        ("server.pem", b"x", "it cannot be loaded with the key .*server.key"),
        ("server.key", None, "server.key cannot be used: No such file or directory"),
        ("server.key", b"", "it cannot be loaded with the key .*server.key"),
        ("ca.pem", None, "ca.pem cannot be used: No such file or directory"),
        ("ca.pem", b"x", "ca.pem cannot be used: it has no CA certificate"),
    ],
)
def test_certificates_that_cannot_be_used_are_told_before_the_model_is_read(
    tmp_path: Path, broken: str, content: bytes | None, told: str
) -> None:
    authority = Authority()
    authority.write_server(tmp_path)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "hosts.json").write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    security = SecurityConfig(**{name: str(tmp_path / file) for name, file in files.items()})  # type: ignore[arg-type]
    config = Config(security=security, group=GroupConfig(hosts=str(tmp_path / "hosts.json"), rank=1))
    assert find_membership(config) is not None
    (tmp_path / broken).unlink()
    if content is not None:
        (tmp_path / broken).write_bytes(content)
    with pytest.raises(StartError, match=told) as refused:
        find_membership(config)
    assert refused.value.reason is Reason.CERTIFICATE_INVALID


@pytest.mark.parametrize(
    ("rank", "taken"),
    [(0, 0), (1, 1), (0, 2)],
    ids=["rank 0 of the ring", "rank 1 of the ring", "the channel"],
)
def test_an_address_that_is_taken_is_told_before_the_model_is_read(
    tmp_path: Path, rank: int, taken: int
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    (tmp_path / "hosts.json").write_text(json.dumps([[address] for address in addresses[:2]]))
    config = Config(group=GroupConfig(str(tmp_path / "hosts.json"), rank, addresses[2]))
    assert own_membership(config) is not None
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(addresses[taken].rpartition(":")[2])))
        other.listen()
        with pytest.raises(StartError, match=f"{addresses[taken]}: {os.strerror(errno.EADDRINUSE)}"):
            own_membership(config)
        others = Config(group=GroupConfig(str(tmp_path / "hosts.json"), 1 - rank, "127.0.0.1:1"))
        assert find_membership(others) is not None


def test_a_rank_that_does_not_have_its_address_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text('[["192.0.2.1:5000"], ["127.0.0.1:5001"]]')
    config = Config(group=GroupConfig(str(tmp_path / "hosts.json"), 0, "127.0.0.1:5002"))
    with pytest.raises(StartError, match=f"5000: {os.strerror(errno.EADDRNOTAVAIL)}"):
        own_membership(config)


@pytest.fixture
def parts() -> Iterator[LeaderParts]:
    ring = (("127.0.0.1:5000",), ("127.0.0.1:5001",))
    membership = Membership(0, ring, f"127.0.0.1:{free_ports(1)[0]}")
    router: Any = None
    made = LeaderParts(membership, Config(), memory_limit_bytes=7, clock=ManualClock(), router=router)
    made.open_channel({})
    yield made
    assert made._server is not None
    made._server.stop(timeout_s=0)


def test_no_rank_can_join_before_rank_0_hears_signals(parts: LeaderParts) -> None:
    host, port = parts.membership.control.split(":")
    with socket.socket() as early, socket.socket() as late:
        assert early.connect_ex((host, int(port))) == errno.ECONNREFUSED
        parts.listen()
        assert late.connect_ex((host, int(port))) == 0


def test_rank_0_is_the_first_of_them(parts: LeaderParts) -> None:
    loading = parts.stats(None, None)
    assert loading.rank_count == 2
    assert [(rank.rank, rank.state) for rank in loading.ranks] == [
        (0, RankState.LOADING),
        (1, RankState.MISSING),
    ]
    parts.open_tier(lambda post: MemoryTier(clock=ManualClock(), post=post), post=lambda outcome: None)
    own = parts.stats(ENGINE, CACHE).ranks[0]
    assert (own.state, own.active_memory_bytes, own.memory_limit_bytes) == (RankState.READY, 5, 7)
    assert own.ssd is not None
    assert (own.ssd.block_count, own.ssd.size_bytes, own.ssd.written_block_total) == (2, 3, 4)
    assert own.report_age_s is None and own.behind_order_count == 0


def test_without_an_ssd_tier_rank_0_has_none(parts: LeaderParts) -> None:
    assert parts.stats(ENGINE, CACHE).ranks[0].ssd is None


def test_trouble_is_told_of_the_rank_that_has_it(parts: LeaderParts) -> None:
    own = MemoryTier(clock=ManualClock(), post=lambda outcome: None)
    tier: Any = parts.open_tier(lambda post: own, post=lambda outcome: None)
    tier.report(1, group.FollowRequest(heartbeat=group.Heartbeat(stall_s=2 * STALL_LIMIT_S)))
    assert tier.stall_s == 2 * STALL_LIMIT_S
    assert parts.stats(ENGINE, CACHE).ranks[0].ssd_trouble == ""
    full = dataclasses.replace(CACHE, disk=DiskStats(writes_off_detail="it is full"))
    assert parts.stats(ENGINE, full).ranks[0].ssd_trouble == "it is full"
    own.stall_s = STALL_LIMIT_S
    assert "The disk does not answer" in parts.stats(ENGINE, full).ranks[0].ssd_trouble

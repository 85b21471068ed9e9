"""Numbers of each rank of a group of two: in GetStats and at /metrics, after a spill and after a restart."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
from icehouse.v1 import server_service_pb2, server_service_pb2_grpc
from icehouse.v1.group_stats_pb2 import RankState, RankStats
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.group.rank_group import RankGroup
from tests.system.mesh.envoy import free_ports

pytestmark = pytest.mark.group

PROMPT = tuple(range(5, 85))
Ranks = Sequence[RankStats]


def ranks_once(group: RankGroup, is_so: Callable[[Ranks], bool]) -> Ranks:
    """Return the ranks of the first look at which something is so; fails where it is not in time."""
    request = server_service_pb2.WatchStatsRequest()
    request.interval.FromMilliseconds(100)
    with grpc.insecure_channel(group.serving.address) as channel:
        watch = server_service_pb2_grpc.ServerServiceStub(channel).WatchStats(request, timeout=BOUND_S)
        for response in watch:
            found = response.stats.group
            assert found.rank_count == len(found.ranks) == 2
            if is_so(found.ranks):
                watch.cancel()
                return found.ranks
    raise AssertionError("the server stopped telling")


def scraped(port: int) -> dict[str, dict[str, float]]:
    """Return each metric of ranks, by rank."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if "_rank_" in sample.name]
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.labels.get("icehouse_state", "ready") == "ready":
            found.setdefault(sample.name, {})[sample.labels["icehouse_rank"]] = sample.value
    return found


def have_done_alike(ranks: Ranks) -> bool:
    zero, one = ranks
    return zero.order_total == one.order_total and one.behind_order_count == 0


def test_each_ranks_numbers_are_seen_after_a_spill_and_after_a_restart(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    (port,) = free_ports(1)
    with RankGroup(folder, tmp_path, rank_options={0: ("--metrics-port", str(port))}) as group:
        group.serving.wait_until_serving()
        group.ask(PROMPT)

        def are_written(ranks: Ranks) -> bool:
            counts = {rank.ssd.written_block_total for rank in ranks}
            return len(counts) == 1 and 0 not in counts and have_done_alike(ranks)

        zero, one = ranks_once(group, are_written)
        assert [zero.rank, one.rank] == [0, 1]
        assert zero.state == one.state == RankState.RANK_STATE_READY
        assert one.ssd.block_count == one.ssd.written_block_total == zero.ssd.block_count
        assert one.ssd.written_byte_total == zero.ssd.written_byte_total > 0
        assert one.host == "127.0.0.1" and one.memory_limit_bytes == 1 << 30
        assert one.HasField("report_age") and not zero.HasField("report_age")
        assert not zero.ssd_trouble and not one.ssd_trouble
        assert one.ssd.read_byte_total == 0

        group.restart()
        assert group.ask(PROMPT).cache.ssd_tokens > 0

        def are_read_and_scraped(ranks: Ranks) -> bool:
            read = scraped(port).get("icehouse_rank_ssd_read_bytes_total", {})
            return all(rank.ssd.read_byte_total == read.get(str(rank.rank)) for rank in ranks) and all(
                rank.ssd.read_byte_total for rank in ranks
            )

        zero, one = ranks_once(group, are_read_and_scraped)
        assert one.ssd.read_byte_total == zero.ssd.read_byte_total
        assert one.ssd.block_count >= zero.ssd.block_count > 0
        found = scraped(port)
        assert found["icehouse_rank_state"] == {"0": 1, "1": 1}
        assert found["icehouse_rank_ssd_blocks"]["1"] > 0
        assert found["icehouse_rank_orders_total"]["1"] > 0
        assert set(found["icehouse_rank_report_age_seconds"]) == {"1"}

"""Load watch: how busy one tenant keeps the server, or all do, looked at once for all who subscribed to it.

Owned by the event loop. One task looks while there are subscribers, and wakes those whose load has changed;
all of them now and then, so that none is silent for long. A subscriber that has nothing to say costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.domain.ids import Tenant
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.kv_events.source import KvEventSource

TICK_S = 0.1
"""How often loads are looked at."""
HEARTBEAT_S = 0.5
"""All are woken so often; who has been silent for so long then says so, which is within a second."""

Load = Callable[[], worker.SchedulerLoad]


class LoadWatch:
    """The load of one scope, as it was at the latest tick."""

    def __init__(self, read: Load) -> None:
        self._read = read
        self.load = read()
        self.subscriber_count = 0

    def look(self) -> bool:
        """Look again; whether it has changed."""
        load, self.load = self.load, self._read()
        return bool(load != self.load)


class LoadWatches:
    """One for each scope that somebody subscribed to: a tenant, or None for all."""

    def __init__(self, source: KvEventSource) -> None:
        self._source = source
        self._of: dict[Tenant | None, LoadWatch] = {}
        self._beat_time = 0.0
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, scope: Tenant | None, read: Load) -> Iterator[LoadWatch]:
        """Keep the scope's load up to date until the block ends."""
        watch = self._of.get(scope)
        if watch is None:
            watch = self._of[scope] = LoadWatch(read)
        watch.subscriber_count += 1
        if self._task is None:
            self._task = background.start(self._run(), name="kv-event-loads")
        try:
            yield watch
        finally:
            watch.subscriber_count -= 1
            if not watch.subscriber_count:
                del self._of[scope]
            if not self._of and self._task is not None:
                self._task.cancel()
                self._task = None

    def tick(self) -> None:
        """Look at each load once, and wake whoever has something to say."""
        source, now = self._source, self._source.clock.monotonic()
        is_beat = now - self._beat_time >= HEARTBEAT_S or source.left_ready.is_set()
        if is_beat:
            self._beat_time = now
        for scope, watch in self._of.items():
            if watch.look() or is_beat:
                source.feed.channel_of(scope).wake()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()


class LoadRecords:
    """Of one stream, numbered: all there is at first and by themselves, beside events what routing needs."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sample = 0
        self._last: worker.SchedulerLoad | None = None

    def beside_events(self) -> common.EngineLoad:
        """Return the record for a batch of events."""
        return self._numbered(self._load(), is_whole=not self._sample)

    def alone(self, *, is_due: bool) -> common.EngineLoad | None:
        """Return a record for a batch without events; None where nothing has changed and none is due."""
        load = self._load()
        if not is_due and load == self._last:
            return None
        record = self._numbered(load, is_whole=True)
        record.load_only = True
        return record

    def _numbered(self, load: worker.SchedulerLoad, *, is_whole: bool) -> common.EngineLoad:
        self._sample += 1
        self._last = load
        record = common.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            # Cached blocks give way to requests, so all that is counted is in use.
            active_token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            sample=self._sample,
        )
        if is_whole:
            record.cache_hit_rate = load.cache_hit_rate
            record.num_used_tokens = load.num_used_tokens
            record.max_total_num_tokens = load.max_total_num_tokens
        return record

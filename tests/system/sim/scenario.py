"""Scenario of one seed: what clients, the disk and fate do to a server, and the checks of every step."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import (
    CacheCommand,
    EndSession,
    EvictBlocks,
    Explain,
    ListKnown,
    ListStored,
    Pin,
    Unpin,
    Verify,
)
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import NO_ADAPTER, BlockHash, CacheScope, RequestId, Tenant
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import Cancel, QueryStats, Submit
from icehouse_server.engine.core.refusals import cancelled_by_client
from icehouse_server.storage.storage_settings import Codec
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.known_blocks import removal_of
from tests.fixtures.storage.ciphers import CIPHER
from tests.fixtures.storage.faults import Crash
from tests.system.sim.archives import ArchiveCarrier
from tests.system.sim.checks import (
    check_agreement,
    check_counters,
    check_disk,
    check_pins_agree,
    check_ram,
    check_rest,
)
from tests.system.sim.clock import SimClock
from tests.system.sim.commands import CommandIssuer
from tests.system.sim.disk import SimDisk, lose_last_transactions, rot
from tests.system.sim.event_watch import EventWatch
from tests.system.sim.images import closed, drawn_image, ids_and_spans, untorn, words
from tests.system.sim.ledger import Ledger, Promise
from tests.system.sim.model import ALPHABET, CONTEXT_TOKEN_LIMIT, reference_reply
from tests.system.sim.neighbour import Neighbour
from tests.system.sim.object_store import FickleStore
from tests.system.sim.pinning import PinWatch
from tests.system.sim.server import Life, SimServer
from tests.system.sim.session_watch import PARENTS, SessionWatch
from tests.system.sim.setup import ADAPTER_DIGESTS, draw_quotas, make_setup
from tests.unit.storage.local.test_crash import check_is_clean

_USES = (CacheUse.READ_WRITE,) * 7 + (CacheUse.READ_ONLY, CacheUse.WRITE_ONLY, CacheUse.OFF)
_TENANTS = (Tenant(""), Tenant(""), Tenant("other"))
_ADAPTERS = (NO_ADAPTER, NO_ADAPTER, NO_ADAPTER, *ADAPTER_DIGESTS)
_SESSIONS = ("", "", "one", "one", "two", "three")
_KILL_SHARE = 0.35
"""Share of unordered ends in which only the process is killed; in the others power is lost."""
PIECES_SEED = 2_000_000
"""From here on evictions come in slices, as the Evict call sends them."""
IMAGES_SEED = 3_000_000
"""From here on prompts have images."""
NAMES_SEED = 4_000_000
"""From here on many processes end between a file's rename and the folder's sync; prompts have no images."""
HANGS_SEED = 5_000_000
"""From here on the disk hangs now and then; prompts have no images and names are synced."""
PLANES_SEED = 6_000_000
"""From here on blocks are stored in byte planes; prompts have no images and names are synced."""
ARCHIVES_SEED = 7_000_000
"""From here on prompts are exported and imported as well."""
SHARED_SEED = 8_000_000
"""From here on the SSD tier has an object store behind it, which sometimes fails and lies, and which another
server uses too; blocks are stored raw, prompts have no images, names are synced, no disk hangs."""
_RECOVERY_S = 130.0
"""Longer than a write gate stays closed."""


class SimulationFailed(AssertionError):
    """A check of a scenario failed; the message says how to replay it."""


class Scenario:
    """The story of one seed below one folder. `play` raises `SimulationFailed`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.dice = random.Random(seed)
        setup = make_setup(self.dice)
        # Separate dice, so that adapters leave everything else in older stories as it was.
        self._adapter_dice = random.Random(-(10**6) - seed)
        self._sharing_dice = random.Random(-2 * 10**6 - seed)
        self._kill_dice = random.Random(-3 * 10**6 - seed)
        self._image_dice = random.Random(-4 * 10**6 - seed)
        self._name_dice = random.Random(-5 * 10**6 - seed)
        self._hang_dice = random.Random(-6 * 10**6 - seed)
        self._pin_dice = random.Random(-7 * 10**6 - seed)
        self._session_dice = random.Random(-8 * 10**6 - seed)
        self._archive_dice = random.Random(-9 * 10**6 - seed)
        self.setup = dataclasses.replace(
            setup,
            quotas=draw_quotas(setup, random.Random(-1 - seed)),
            has_shared_prefixes=self._sharing_dice.random() < 0.4,
            session_checkpoint_limit=self._session_dice.choice((2, 2, 3, 8)),
            session_limit=self._session_dice.choice((2, 4096, 4096)),
            cipher=CIPHER if seed % 4 == 3 else None,
            codec=Codec.PLANES if PLANES_SEED <= seed < SHARED_SEED else Codec.RAW,
        )
        self.ledger = Ledger()
        self.clock = SimClock()
        self._neighbour: Neighbour | None = None
        if seed >= SHARED_SEED:
            store = FickleStore(random.Random(-9 * 10**6 - seed), self.setup.cipher)
            self.setup = dataclasses.replace(self.setup, store=store)
            self._neighbour = Neighbour(self.setup, folder, clock=self.clock, ledger=self.ledger)
        self._folder = folder
        self._live: dict[RequestId, Promise] = {}
        self._commands = CommandIssuer(self.ledger, self._say)
        self._pins = PinWatch(self.ledger)
        self._archives = ArchiveCarrier(self.ledger, self._archive_dice, self._say, self._step_both)
        stems = [bytes(self.dice.choices(ALPHABET, k=40)) for _ in range(2)]
        self._texts: list[TokenKeys] = [tuple(stem) for stem in stems]
        self._life = Life(number=0, model=0, directory=folder / "life-0", mtime_ns=10**18)
        self._event_dice = random.Random(-3 * 10**6 - seed)
        self._pieces: list[BlockHash] = []
        """Blocks that a removal in pieces has yet to remove."""
        self._served = self._new_server(None)
        self._events = EventWatch(self._served, self.ledger, self._event_dice)
        self._sessions = SessionWatch(self._served, self.ledger)

    @property
    def seen(self) -> Counter[str]:
        """What happened, by name."""
        return self.ledger.seen

    def play(self, action_count: int = 70) -> None:
        """Play and check the whole story."""
        try:
            self._open()
            for _ in range(action_count):
                self._act()
            self._end()
        except (AssertionError, Exception) as error:
            story = "\n".join(self.log[-40:])
            raise SimulationFailed(
                f"seed {self.seed}: {type(error).__name__}: {error}\n"
                f"play it again with ICEHOUSE_SIM_SEED={self.seed}; {self.setup}\n{story}"
            ) from error
        finally:
            self._served.disk.has_crashed = True
            self._served.disk.release()
            self._served.end_traffic()

    def _new_server(self, disk: SimDisk | None) -> SimServer:
        return SimServer(
            self.setup, self._life, clock=self.clock, ledger=self.ledger, dice=self.dice, disk=disk
        )

    def _say(self, text: str) -> None:
        self.log.append(f"{self.clock.now:9.4f} {text}")

    def _act(self) -> None:
        action = self.dice.choices(*zip(*self._actions(), strict=True))[0]
        if HANGS_SEED <= self.seed < ARCHIVES_SEED and self._hang_dice.random() < 0.15:
            action = self._hang_dice.choice((self._hang, self._hang, self._hang, self._pass_time))
        if ARCHIVES_SEED <= self.seed < SHARED_SEED and self._archive_dice.random() < 0.15:
            action = self._archive_dice.choice((self._export, self._import))
        if self._neighbour is not None and self._archive_dice.random() < 0.06:
            action = self._have_the_neighbour_answer
        try:
            action()
            if self._served.disk.has_crashed:
                raise Crash  # It was raised in a task of an event loop, which did not report it.
            self._check()
        except Crash:
            self._die("in the middle of a step")

    def _actions(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self._submit, 24),
            (self._step_engine, 34),
            (self._step_storage, 16),
            (self._cancel, 4),
            (self._pass_time, 3),
            (self._order, 8),
            (lambda: self._commands.ask_stats(self._served), 2),
            (self._rot, 6),
            (self._disturb_disk, 4),
            (self._rest, 2),
            (self._power_cut, 2),
            (self._restart, 2),
            (self._squeeze, 5 if self.setup.memory_limit_bytes else 0),
            (self._break_storage, 1 if self.seed % 8 == 0 else 0),
        ]

    # What clients do.

    def _submit(self) -> None:
        for _ in range(self.dice.choice((1, 1, 2, 4))):
            self._submit_one()

    def _submit_one(self, **changes: Any) -> None:
        promise = self._promise(**changes)
        request = promise.request
        self._live[request.request_id] = promise
        self._say(
            f"submit {request.request_id} {words(promise.keys)} +{request.max_output_tokens} "
            f"{request.cache_use.name} {request.scope} {request.shared_scope}"
        )
        assert self._served.mailbox.offer(Submit(request))

    def _have_the_neighbour_answer(self) -> None:
        assert self._neighbour is not None
        promise = self._promise(cache_use=CacheUse.READ_WRITE, deadline_time=None)
        request = promise.request
        self._say(f"the neighbour answers {request.request_id} {words(promise.keys)} {request.scope}")
        self._neighbour.answer(promise)
        # The neighbour's caller comes here with the next turn.
        following = {
            "prompt_token_ids": promise.history[: CONTEXT_TOKEN_LIMIT - 1],
            "tenant": request.tenant,
            "adapter": request.adapter,
            "cache_use": CacheUse.READ_WRITE,
        }
        # This model computes so fast that lookups would never be worth it.
        self._served.cache.rates.prefill_tokens_per_s = 0.0
        self._submit_one(**following)
        if self._archive_dice.random() < 0.4:
            self._served.come_to_rest()
            self._pins.is_excused = True
            self._commands.give(self._served, removal_of(self._served.cache, promise.history, request.scope))
            self._served.cache.rates.prefill_tokens_per_s = 0.0
            self._submit_one(**following)

    def _promise(self, **changes: Any) -> Promise:
        """Draw a request, with these changes, and compute its reply."""
        keys = self._prompt()
        prompt, images = ids_and_spans(keys)
        request = GenerationRequest(
            request_id=RequestId(f"r{len(self.ledger.promises)}"),
            prompt_token_ids=prompt,
            images=images,
            max_output_tokens=self.dice.choice((0, 1, 3, 8, 14, 100)),
            sampling=SamplingParams(seed=self.dice.choice((0, 0, 0, 1))),
            stop=self.dice.choice(((), (), ("ab",), ("dcb", "aa"))),
            arrival_time=self.clock.monotonic(),
            deadline_time=self.clock.now + self.dice.choice((0.002, 0.01))
            if self.dice.random() < 0.1
            else None,
            cache_use=self.dice.choice(_USES),
            tenant=self.dice.choice(_TENANTS),
            adapter=self._adapter_dice.choice(_ADAPTERS),
            shared_tenant=self._shared_tenant(),
            priority=self.dice.choice((0, 0, 1)),
            session_id=self._session_dice.choice(_SESSIONS),
            ends_session=self._session_dice.random() < 0.1,
        )
        parent = PARENTS.get(request.session_id, "")
        request = dataclasses.replace(request, parent_session_id=parent, **changes)
        promise = Promise(
            request, reference_reply(self.setup.specs[self._life.model], request), self._life.model
        )
        self.ledger.promises.append(promise)
        self._texts.append(promise.history)
        return promise

    def _shared_tenant(self) -> Tenant | None:
        """Return the tenant, perhaps its own, whose prompts a request may also start from."""
        named = self.setup.has_shared_prefixes and self._sharing_dice.random() < 0.6
        return self._sharing_dice.choice(_TENANTS) if named else None

    def _prompt(self) -> TokenKeys:
        """Return a prompt that begins like a known one and continues at random."""
        text = self.dice.choice(self._texts[-12:] if self.dice.random() < 0.7 else self._texts)
        kept = text[: self.dice.randint(0, len(text))] if self.dice.random() < 0.6 else text
        more = bytes(self.dice.choices(ALPHABET, k=self.dice.choice((0, 0, 1, 2, 5, 9))))
        shown = untorn(kept) + self._image()
        limit = CONTEXT_TOKEN_LIMIT - 1
        prompt = closed(untorn((shown + tuple(more))[:limit]), limit=limit)
        return prompt or tuple(self.dice.choices(ALPHABET, k=1))

    def _image(self) -> TokenKeys:
        has_one = IMAGES_SEED <= self.seed < NAMES_SEED and self._image_dice.random() < 0.4
        return drawn_image(self._image_dice) if has_one else ()

    def _cancel(self) -> None:
        if self._live:
            name = self.dice.choice(list(self._live))
            self._say(f"cancel {name}")
            self._served.mailbox.post(Cancel(name, cancelled_by_client()))

    def _order(self) -> None:
        text = self.dice.choice(self._texts)
        scope = CacheScope(self.dice.choice(_TENANTS), self._adapter_dice.choice(_ADAPTERS))
        orders: tuple[CacheCommand, ...] = (
            Explain(text, scope),
            Pin(text, scope),
            Pin(text[:12], scope),
            Unpin(text, scope),
            ListKnown(text, scope),
            ListKnown(text[:8], scope),
            ListKnown(None),
            Verify(),
            ListStored(block_limit=2),
        )
        order = self.dice.choice(orders)
        if isinstance(order, Pin) and self.seed >= PIECES_SEED and self._pin_dice.random() < 0.5:
            order = dataclasses.replace(order, ttl_s=self._pin_dice.choice((0.01, 0.1)))
        if isinstance(order, ListKnown):
            order = self._removal(order)
        if self._session_dice.random() < 0.3:
            order = EndSession(self._session_dice.choice(_SESSIONS[2:]), scope.tenant)
        self._pins.is_excused |= isinstance(order, Unpin | EvictBlocks)
        self._commands.give(self._served, order)

    def _removal(self, asked: ListKnown) -> CacheCommand:
        """Return a command to evict all known blocks, or the next piece of a removal in pieces."""
        whole = removal_of(self._served.cache, asked.prompt_token_ids, asked.scope)
        if self.seed < PIECES_SEED:
            return whole
        if not self._pieces:
            self._pieces = list(whole.block_hashes)
            if self._sharing_dice.random() < 0.3:
                return asked
        count = self._sharing_dice.choice((1, 2, 5, 100))
        piece, self._pieces = self._pieces[:count], self._pieces[count:]
        return EvictBlocks(tuple(piece))

    def _export(self) -> None:
        kept = [each for each in self.ledger.promises if each.writes and each.model == self._life.model]
        if kept:
            promise = self._archive_dice.choice(kept[-12:])
            self._archives.export(self._served, promise.history, promise.request.scope)

    def _import(self) -> None:
        if self._archive_dice.random() < 0.5:
            # Otherwise most imported blocks are there already.
            self._pins.is_excused = True
            self._commands.give(self._served, removal_of(self._served.cache))
        self._archives.adopt(self._served, self._archive_dice.choice(_TENANTS))

    # What time does.

    def _step_engine(self) -> None:
        for _ in range(self.dice.choice((1, 2, 6, 25))):
            self._step_engine_once()

    def _step_engine_once(self) -> None:
        self._served.step_engine()
        self._pins.look(self._served)
        self._events.look()
        check_ram(self._served)

    def _step_both(self) -> None:
        self._step_engine_once()
        self._served.step_storage()

    def _step_storage(self) -> None:
        for _ in range(self.dice.choice((1, 1, 3, 12))):
            self._served.step_storage()

    def _pass_time(self) -> None:
        seconds = self.dice.choice((0.005, 1.5, 10.0, 90_000.0))
        self._say(f"{seconds} s pass")
        self.clock.now += seconds

    def _rest(self) -> None:
        """Let everything settle, undisturbed, and check all accounts."""
        self._say("rest")
        served = self._served
        served.disk.room_bytes = served.disk.fail_in = None
        served.budget.limit_bytes = self.setup.memory_limit_bytes
        if served.is_hanging:
            served.come_to_rest()
            self._collect_ends()
            assert not self._live, f"requests that wait for a disk that hangs: {list(self._live)}"
            self.ledger.seen["rest beside a hang"] += 1
            served.go_on()
        for _ in range(3):
            served.come_to_rest()
            self.clock.now += _RECOVERY_S
        served.come_to_rest()
        self._check()
        check_rest(served)
        check_agreement(served)
        self._events.check()
        if not self.ledger.io_errors(served):
            check_pins_agree(served)
        if served.storage is not None and not served.is_storage_dead:
            assert served.store.is_open, "the directory was never opened again"
            if not served.store.report.clean and not self.ledger.damaged:
                check_is_clean(self._life.directory)
        assert not self._live, f"requests that never ended: {list(self._live)}"
        assert self._commands.open_count == 0, f"{self._commands.open_count} orders were never answered"
        self._check_totals()

    def _check_totals(self) -> None:
        served = self._served
        answers: list[tuple[EngineStats, CacheStats | None]] = []
        served.mailbox.post(QueryStats(lambda engine, cache: answers.append((engine, cache))))
        served.come_to_rest()
        ((engine, cache),) = answers
        storage = self.ledger.last_stats if cache is not None and cache.ssd is not None else None
        assert cache is not None
        check_counters(served, engine, cache, storage)
        self.ledger.seen["parked"] += engine.parked_total
        self.ledger.seen["written behind"] += cache.spill.behind_block_total
        self.ledger.seen["evicted from RAM"] += cache.ram.evicted_block_total
        if storage is not None:
            assert storage.ssd is not None
            self.ledger.seen["evicted from SSD"] += storage.ssd.evicted_block_total
            for drop in storage.spill.drops:
                self.ledger.seen[f"drop {drop.cause.name}"] += drop.block_total

    # What fate does.

    def _rot(self) -> None:
        done = rot(self._served.disk, self.dice) if self._served.storage is not None else None
        if done is not None:
            self._say(f"rot {done.what} {[name[:8] for name in done.before]}")
            self.ledger.seen[f"rot {done.what}"] += 1
            self.ledger.note_rot(done)

    def _disturb_disk(self) -> None:
        disk = self._served.disk
        what = self.dice.choice(("full", "space", "io", "io", "power"))
        self._say(f"disk: {what}")
        if what == "full":
            disk.room_bytes = self.dice.choice((0, 500, 3_000))
        elif what == "space":
            disk.room_bytes = None
        elif what == "io":
            disk.fail_in = self.dice.randint(1, 25)
        else:
            disk.crash_in = self.dice.randint(1, 40)
            disk.crashes_before = self.dice.random() < 0.5

    def _hang(self) -> None:
        """Make the disk hang, or answer again."""
        served = self._served
        if served.storage is None or served.is_storage_dead:
            return
        what = self._hang_dice.choice(("reads", "reads", "store", "neither"))
        self._say(f"the disk hangs: {what}")
        self.ledger.seen[f"hang {what}"] += 1
        if what == "reads":
            served.reads_hang = True
        elif what == "store":
            served.hang_store()
        else:
            served.go_on()

    def _break_storage(self) -> None:
        if self._served.storage is not None and not self._served.is_storage_dead:
            self._say("the storage thread breaks")
            self._served.kill_storage()

    def _squeeze(self) -> None:
        """Let another process of the machine take memory, or give it back."""
        limit_bytes = self.dice.choice((self.setup.memory_limit_bytes, 2_500, 1_500, 1_000))
        self._say(f"memory limit {limit_bytes}")
        self._served.budget.limit_bytes = limit_bytes

    def _power_cut(self) -> None:
        self._die("between two steps")

    def _die(self, where: str) -> None:
        """Lose everything in memory and start again from the disk; if power is lost too, without changes that
        were not durable."""
        served, ledger = self._served, self.ledger
        is_kill = self._kill_dice.random() < _KILL_SHARE
        self._say(f"{'the process is killed' if is_kill else 'the power goes'} {where}")
        ledger.seen["kill" if is_kill else "crash"] += 1
        self._settle_ends()
        if served.storage is not None and served.store.is_open:
            ledger.may_be_gone |= ledger.committed.keys() - {record.hash for record in served.store.index}
        directory = self._folder / f"life-{self._life.number + 1}"
        served.die(directory, is_kill=is_kill)
        if self.dice.random() < 0.3 and not is_kill:
            manifest = Path(StorePaths(str(directory)).manifest)
            if lose_last_transactions(manifest, self.dice.randint(1, 3)):
                ledger.has_lost_rows = True
                ledger.seen["lost rows"] += 1
                self._say("the last rows are lost")
        self._begin_life(directory, disk=served.disk if is_kill else None)

    def _restart(self) -> None:
        self._say("restart in order")
        served = self._served
        served.disk.room_bytes = None
        served.stop(grace_s=self.dice.choice((0.0, 0.01, 5.0)), flush_s=self.dice.choice((0.0, 0.1, 60.0)))
        self.ledger.seen["restart"] += 1
        self._pins.check_before_restart(served)
        self._collect_ends()
        assert not self._live, f"a restart left requests without an end: {list(self._live)}"
        self._begin_life(self._life.directory, disk=served.disk)

    def _begin_life(self, directory: Path, *, disk: SimDisk | None) -> None:
        self.ledger.io_error_count += self._served.disk.failed_count
        self._live.clear()
        self.ledger.ordered_away.clear()
        self._commands.begin_life()
        self._pins.begin_life()
        model = self._life.model if self.dice.random() < 0.8 else 1 - self._life.model
        self._life = Life(self._life.number + 1, model, directory, self._served.disk.mtime_ns)
        self._served = self._new_server(disk)
        self._events = EventWatch(self._served, self.ledger, self._event_dice)
        self._sessions = SessionWatch(self._served, self.ledger)
        if self.dice.random() < 0.1:
            self._served.disk.crash_in = self.dice.randint(1, 40)
        self._say(f"life {self._life.number} with model {model}")
        self._open()

    def _open(self) -> None:
        try:
            self._served.open()
        except Crash:
            self._die("while opening")
            return
        if NAMES_SEED <= self.seed < HANGS_SEED and self._name_dice.random() < 0.6:
            self._served.disk.crash_verb = "fsync_dir"

    # What must hold.

    def _end(self) -> None:
        """Rest, restart, and repeat all requests: the blocks that survived must still be right."""
        self._served.disk.keep_power()
        self._rest()
        self._served.disk.keep_power()
        self._restart()
        self._served.disk.keep_power()
        self._rest()
        for promise in self.ledger.promises[-6:]:
            self._texts.append(promise.history)
            self._submit_one()
        self._rest()

    def _check(self) -> None:
        self._collect_ends()
        check_ram(self._served)
        if self._served.storage is not None:
            check_disk(self._served)
        if isinstance(self.setup.store, FickleStore):
            assert not self.setup.store.complaints, self.setup.store.complaints

    def _collect_ends(self) -> None:
        for name in list(self._live):
            if self._served.recorder.end_of(name) is not None:
                promise, events = self._live.pop(name), self._served.recorder.events[name]
                self._say(f"  told {name} in {len(events)} events, at the end {events[-1]!r:.300}")
                self.ledger.check_end(promise, events)

    def _settle_ends(self) -> None:
        """Check the replies that were sent before the process ended, too."""
        self._collect_ends()
        self._live.clear()

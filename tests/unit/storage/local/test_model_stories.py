"""Stories of several models in one directory, and kills, against a plain list of what must be there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import BlockPersisted, BlocksLoaded, StorageClosed, StorageFailure, Ticket
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.model_house import ModelHouse, OneModel, names_of

FINGERPRINTS = [Fingerprint(bytes([number]) * 32) for number in (1, 2, 3)]
BLOCKS = {
    fingerprint: [make_block(fingerprint=fingerprint, seed=seed, head_count=256) for seed in range(12)]
    for fingerprint in FINGERPRINTS
}
ALL = {block.header.hash: block for blocks in BLOCKS.values() for block in blocks}
STEPS = 300
Put = tuple[BlockHash, Ticket[BlockPersisted]]


class Story:
    """One directory and its models. `order` is every stored block of all models, the next to go first."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        size_bytes = next(iter(ALL.values())).size_bytes
        self.how = {"limit_bytes": LOG_ALLOWANCE_BYTES + 120_000 + 14 * size_bytes}
        self.directory = directory
        self.house = ModelHouse(directory, **self.how)
        self.models: dict[Fingerprint, OneModel] = {}
        self.order: list[BlockHash] = []
        self.pinned: set[BlockHash] = set()
        self.evicted_count = 0

    def play(self) -> None:
        for _ in range(STEPS):
            self.house.clock.advance(1.0)
            closed = [each for each in FINGERPRINTS if each not in self.models]
            if closed and (not self.models or self.dice.random() < 0.15):
                fingerprint = self.dice.choice(closed)
                self.models[fingerprint] = self.house.open(fingerprint)
            else:
                act = self.dice.choices(
                    (
                        self.put,
                        self.touch,
                        self.demote,
                        self.load,
                        self.pin,
                        self.delete,
                        self.close,
                        self.kill,
                    ),
                    (10, 3, 1, 3, 1, 1, 1, 0.5),
                )[0]
                act(self.dice.choice(list(self.models)))
            self.check()

    def use(self, names: list[BlockHash]) -> None:
        """Note a use of what is stored, in this order."""
        for name in names:
            if name in self.order:
                self.order.remove(name)
                self.order.append(name)

    def stored(self) -> set[BlockHash]:
        return {record.hash for record in self.house.tiers._store.index}

    def some(self, fingerprint: Fingerprint) -> list[HostBlock]:
        return self.dice.sample(BLOCKS[fingerprint], self.dice.randint(1, 4))

    def new(self, fingerprint: Fingerprint) -> list[HostBlock]:
        return [block for block in self.some(fingerprint) if block.header.hash not in self.order]

    def put(self, fingerprint: Fingerprint) -> None:
        """Put new blocks of some open models, and settle after all of them; then one that may be there."""
        tickets: list[Put] = []
        for other in self.dice.choices(list(self.models), k=self.dice.randint(1, 3)):
            put = [name for name, _ in tickets]
            fresh = [block for block in self.new(other) if block.header.hash not in put]
            tickets += [(block.header.hash, self.models[other].tier.put(block)) for block in fresh]
        self.house.settle()
        self.note_written(tickets)
        again = self.dice.choice(BLOCKS[fingerprint])
        (done,) = self.models[fingerprint].put(again)
        if again.header.hash in self.order:
            assert isinstance(done, BlockPersisted) and done.record.hash == again.header.hash
        else:
            self.note_written([(again.header.hash, Ticket(done))])

    def note_written(self, tickets: list[Put]) -> None:
        """What left for the limit is the beginning of the list, less what is pinned; what came was told."""
        gone = [name for name in self.order if name not in self.stored()]
        may_go = [name for name in self.order if name not in self.pinned]
        assert gone == may_go[: len(gone)], "something went before its time"
        self.order = [name for name in self.order if name not in gone]
        self.evicted_count += len(gone)
        for name, ticket in tickets:
            is_stored = name in self.stored()
            if isinstance(ticket.outcome, StorageFailure):
                assert ticket.outcome.cause is SpillDropCause.DISK_FULL and self.pinned and not is_stored
            assert not is_stored or isinstance(ticket.outcome, BlockPersisted), (
                "its ticket comes with its row"
            )
            if is_stored:
                self.order.append(name)

    def touch(self, fingerprint: Fingerprint) -> None:
        names = list(names_of(self.some(fingerprint)))
        assert self.models[fingerprint].tier.touch(tuple(names))
        self.use(names)

    def demote(self, fingerprint: Fingerprint) -> None:
        names = [name for name in names_of(self.some(fingerprint)) if name in self.order]
        assert self.models[fingerprint].tier.demote(tuple(names))
        for name in names:
            self.order.remove(name)
            self.order.insert(0, name)

    def load(self, fingerprint: Fingerprint) -> None:
        model = self.models[fingerprint]
        for block in self.some(fingerprint):
            loaded = model.ask(model.tier.get_into(*plan([block])))
            assert isinstance(loaded, BlocksLoaded) == (block.header.hash in self.order)
            if isinstance(loaded, BlocksLoaded):
                assert_holds(loaded, [block])

    def pin(self, fingerprint: Fingerprint) -> None:
        model, names = self.models[fingerprint], names_of(self.some(fingerprint)[:2])
        end_time = self.dice.choice((UNTIL_UNPINNED, NOT_PINNED, NOT_PINNED))
        missing = model.ask(model.tier.pin(names, end_time))
        assert missing == tuple(name for name in names if name not in self.order)
        self.pinned = (self.pinned | set(names)) & set(self.order) if end_time else self.pinned - set(names)

    def delete(self, fingerprint: Fingerprint) -> None:
        model, names = self.models[fingerprint], names_of(self.some(fingerprint)[:2])
        purged = model.ask(model.tier.delete(names))
        assert purged.block_count == len(set(names) & set(self.order))
        self.order = [name for name in self.order if name not in names]
        self.pinned -= set(names)

    def close(self, fingerprint: Fingerprint) -> None:
        """Close one in the middle of what it put; sometimes all, in order, and begin again."""
        model = self.models.pop(fingerprint)
        tickets = [(block.header.hash, model.tier.put(block)) for block in self.new(fingerprint)]
        model.tier.close(deadline_time=self.house.clock.monotonic() + 10.0)
        self.house.settle()
        assert model.posted[-1] == StorageClosed(was_clean=True)
        self.note_written(tickets)
        if self.dice.random() < 0.3:
            self.house.close()
            for each in self.models.values():
                assert each.posted[-1] == StorageClosed(was_clean=True)
            self.begin_again()
            assert self.house.tiers._store.report.clean

    def kill(self, fingerprint: Fingerprint) -> None:
        """The process is gone after a few steps of its work."""
        tier = self.models[fingerprint].tier
        tickets = [(block.header.hash, tier.put(block)) for block in self.new(fingerprint)]
        for _ in range(self.dice.randint(0, 6)):
            self.house.tiers.step()
        self.note_written(tickets)
        self.house.die()
        self.begin_again()
        report = self.house.tiers._store.report
        assert (report.adopted_count, report.quarantined_count, report.row_deleted_count) == (0, 0, 0)

    def begin_again(self) -> None:
        """Another process has the directory; it may have forgotten the newest uses, and what was demoted."""
        clock = self.house.clock
        self.house = ModelHouse(self.directory, **self.how)
        self.house.clock.now_s = clock.now_s
        was = list(self.models)
        self.models = {fingerprint: self.house.open(fingerprint) for fingerprint in was}
        self.house.settle()
        index = self.house.tiers._store.index
        assert self.stored() == set(self.order), "a restart loses nothing and brings nothing back"
        self.order = sorted(self.order, key=lambda name: index._uses[name])

    def check(self) -> None:
        """All know the same: the list, the index, the files, and each open model for itself."""
        self.house.settle()
        assert self.stored() == set(self.order)
        for fingerprint in FINGERPRINTS:
            own = {name for name in self.order if ALL[name].header.fingerprint == fingerprint}
            assert self.house.files_of(fingerprint) == {f"{name.hex()}.safetensors" for name in own}
            if fingerprint in self.models:
                assert self.models[fingerprint].known == own
        assert all(model.tier.queue_space_bytes == 1 << 24 for model in self.models.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_story(tmp_path: Path, seed: int) -> None:
    story = Story(tmp_path, seed)
    story.play()
    story.house.close()
    assert story.evicted_count > 10

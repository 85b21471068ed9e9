"""Reach of a few names: every statement of the followed packages that they may come to run.

From a name to the statement that binds it, from there to the names that the statement uses, through imports
into other modules. A module that is used as a whole (`from . import llama`) counts whole; a module that is
imported and not used, or for its effects alone, does not. Names that are made at run time (`getattr`,
`importlib`) are not seen: who asks names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from icehouse_server.engine.runner.identity.source import (
    EVERY_NAME,
    Import,
    Source,
    Stamp,
    Statement,
    digest_of,
    read_source,
)


class Reach:
    """What was reached so far; `follow` adds to it. Raises UnreadableSource."""

    def __init__(
        self, packages: Collection[str], *, given: Iterable[Source] = (), without: Collection[Import] = ()
    ) -> None:
        """`given` are modules that no import finds, `without` names that are not followed."""
        self._packages = packages
        self._sources: dict[str, Source | None] = {source.name: source for source in given}
        self._statements: dict[str, set[Statement]] = {}
        self._imports: dict[str, set[str]] = {}
        self._seen: set[Import] = set(without)

    def follow(self, roots: Iterable[Import]) -> None:
        """Add all that these names reach."""
        waiting = list(roots)
        while waiting:
            wanted = waiting.pop()
            if wanted in self._seen:
                continue
            self._seen.add(wanted)
            source = self._source(wanted.module)
            if source is not None:
                waiting += self._reach(source, wanted.name)

    def digests(self) -> dict[str, str]:
        """Return the digest of what was reached, by module."""
        found = {}
        for name, statements in sorted(self._statements.items()):
            source = self._sources[name]
            assert source is not None, name
            texts = [statement.text for statement in source.statements if statement in statements]
            texts += sorted(self._imports[name])
            if texts:
                found[name] = digest_of(texts)
        return found

    def names(self) -> frozenset[Import]:
        """Return what the reached statements bind."""
        return frozenset(
            Import(module, name)
            for module, statements in self._statements.items()
            for statement in statements
            for name in statement.binds
        )

    def stamps(self) -> dict[str, Stamp]:
        """Return what the files of the reached modules were when they were read."""
        sources = {name: self._sources[name] for name in self._statements}
        return {name: source.stamp for name, source in sources.items() if source and source.stamp}

    def _source(self, module: str) -> Source | None:
        if module not in self._sources:
            is_followed = module.partition(".")[0] in self._packages
            self._sources[module] = read_source(module) if is_followed else None
        return self._sources[module]

    def _reach(self, source: Source, name: str) -> list[Import]:
        """Add what one name of a module stands for; return what that needs."""
        found: list[Import] = []
        if source.name not in self._statements:
            self._statements[source.name], self._imports[source.name] = set(), set()
            found += self._add(source, [s for s in source.statements if s.is_effect])
        if name in ("", EVERY_NAME):
            found += self._add(source, source.statements)
            if source.is_package or name == EVERY_NAME:
                # What a package hands on; `import a.b` is there for its effects.
                found += [Import(source.name, bound) for bound, target in source.imports if target.name]
            return found
        bound = [statement for statement in source.statements if name in statement.binds]
        imported = [target for alias, target in source.imports if alias == name]
        if bound or imported:
            self._imports[source.name] |= {f"{name}={target.module}:{target.name}" for target in imported}
            return found + self._add(source, bound) + imported
        if source.is_package and self._source(f"{source.name}.{name}") is not None:
            return [*found, Import(f"{source.name}.{name}")]
        stars = [Import(target.module, name) for _, target in source.imports if target.name == EVERY_NAME]
        lazy = [s for s in source.statements if "__getattr__" in s.binds]
        return found + stars + self._add(source, lazy)

    def _add(self, source: Source, statements: Sequence[Statement]) -> list[Import]:
        needed: list[Import] = []
        for statement in statements:
            if statement not in self._statements[source.name]:
                self._statements[source.name].add(statement)
                needed += [Import(source.name, name) for name in statement.uses]
                needed += statement.imports
        return needed

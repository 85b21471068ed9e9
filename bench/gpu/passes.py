"""A server that notes each of its passes: `python -m bench.gpu.passes serve …`, and what the notes say.

A note has when the pass was asked for, how long the call took, how long the device took for the pass whose
time is told (a server that runs ahead tells it a pass later), how many tokens were drawn, and the tokens of
each chunk. The file is that of the environment variable; a note costs some microseconds a pass.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.replies import quantile

FILE_VARIABLE = "BENCH_PASSES_FILE"
_USUAL_COUNT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One pass. Times are the machine's monotonic clock and durations, in seconds."""

    began_time_s: float
    call_s: float
    device_s: float
    drawn_count: int
    chunks: tuple[int, ...]
    """Tokens of each piece of a prompt."""


def read_passes(file: Path, *, since_s: float, until_s: float) -> list[Pass]:
    """Return the passes that a server began in a stretch of time."""
    if not file.exists():
        return []
    found: list[Pass] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        began_s, call_s, device_s, drawn_count, chunks = json.loads(line)
        if since_s <= began_s <= until_s:
            found.append(Pass(began_s, call_s, device_s, drawn_count, tuple(chunks)))
    return found


def describe(passes: Sequence[Pass]) -> list[str]:
    """Return lines on the passes: those of rows alone, those with prompts, and the lengths of chunks."""
    alone = [each for each in passes if not each.chunks]
    mixed = [each for each in passes if each.chunks]
    lines = [_line("of rows alone", alone), _line("with prompts", mixed)]
    if mixed:
        sums = [sum(each.chunks) for each in mixed]
        counts = [len(each.chunks) for each in mixed]
        lines.append(
            f"prompt tokens a pass: {min(sums)} to {max(sums)}, p50 {quantile(sums, 0.5):.0f}; "
            f"chunks a pass: {min(counts)} to {max(counts)}, p50 {quantile(counts, 0.5):.0f}"
        )
        lengths = collections.Counter(length for each in mixed for length in each.chunks)
        usual = ", ".join(f"{length} x {n}" for length, n in lengths.most_common(_USUAL_COUNT))
        lines.append(f"{len(lengths)} lengths of chunks, most often {usual}")
    return lines


def _line(what: str, passes: Sequence[Pass]) -> str:
    if not passes:
        return f"no passes {what}"
    # The device's time is told a pass later, and none where nothing was waited for.
    device = [each.device_s for each in passes if each.device_s]
    call = [each.call_s for each in passes]
    drawn = [each.drawn_count for each in passes]
    return (
        f"{len(passes)} passes {what}: call p50 {_ms(call, 0.5)} p95 {_ms(call, 0.95)} ms, device p50 "
        f"{_ms(device, 0.5)} p95 {_ms(device, 0.95)} ms, {sum(call):.2f} s in all; drawn p50 "
        f"{quantile(drawn, 0.5):.0f}, most {max(drawn)}"
    )


def _ms(values: Iterable[float], share: float) -> str:
    return f"{1000 * quantile(list(values), share):.2f}"


def note_passes(file: Path) -> None:
    """Have every pass of this process noted in `file`."""
    from icehouse_server.engine.runner.runner import ModelRunner

    own_run = ModelRunner.run
    notes = file.open("a", buffering=1, encoding="utf-8")

    def run(self: Any, chunks: Sequence[Any], **options: Any) -> Any:
        began_s = time.perf_counter()
        result = own_run(self, chunks, **options)
        call_s = time.perf_counter() - began_s
        lengths = [len(chunk.token_ids) for chunk in chunks]
        note = [began_s, round(call_s, 6), round(result.elapsed_s, 6), len(result.drawn), lengths]
        notes.write(json.dumps(note) + "\n")
        return result

    ModelRunner.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    from icehouse_server.bootstrap.imports.openblas import load_openblas
    from icehouse_server.cli.main import main

    load_openblas()
    note_passes(Path(os.environ[FILE_VARIABLE]))
    main()

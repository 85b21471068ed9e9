"""Agents' sessions played against a fleet: texts of the planned sizes, real answers in the next prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fleet.chat import Answer, ChatFailed, chat
from bench.fleet.fleet import Fleet
from bench.fleet.sessions import Session, Shape
from bench.grpc_clients import Client
from bench.prompts import short_prompts
from bench.replies import quantile

_SAMPLE_SENTENCES = 50
_ANSWER_ALLOWANCE = 1.5
"""Answers that are not the tokens that their text has again, and what a template puts around a turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """How many workers, and how the gateway chooses."""

    name: str
    worker_count: int
    policy: str


ONE = Arrangement("1 worker", 1, "round_robin")
AWARE = Arrangement("2, cache-aware", 2, "cache_aware")
TURNS = Arrangement("2, round robin", 2, "round_robin")


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What came of all sessions in one arrangement. Times in seconds."""

    arrangement: str
    request_count: int
    failures: tuple[str, ...]
    """Why sessions broke off; what came of the others is not comparable then."""
    prompt_token_count: int
    cached_token_count: int
    ttft_p50_s: float
    ttft_p95_s: float
    duration_s: float
    accepted: dict[str, int]
    """Requests by worker."""
    prefill_tokens_per_s: float
    """As the busiest worker measured it."""
    output_tokens_per_s: float
    written_bytes: int = 0
    """In the workers' directories once they had stopped."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens reused, of all prompt tokens."""
        return self.cached_token_count / max(1, self.prompt_token_count)


class Texts:
    """Texts of wanted lengths in a model's tokens; each key has its own from the first character on."""

    def __init__(self, characters_per_token: float) -> None:
        self._characters_per_token = characters_per_token

    @classmethod
    async def of(cls, client: Client) -> Texts:
        """Measure the length of a server's tokens."""
        sample = " ".join(short_prompts(_SAMPLE_SENTENCES, seed=0))
        return cls(len(sample) / len(await client.tokenize(sample)))

    def text(self, token_count: int, *, key: int) -> str:
        """Return text of about so many tokens."""
        size = max(1, round(token_count * self._characters_per_token))
        sentence_count = 2 + size // 60
        return f"{key} {' '.join(short_prompts(sentence_count, seed=key))}"[:size]


def fitting(sessions: Sequence[Session], shape: Shape, *, context_token_limit: int) -> list[Session]:
    """Return the sessions without the turns that a model's context has no room for."""
    cut = []
    for session in sessions:
        room = float(context_token_limit - shape.agent_token_count)
        turns = []
        for turn in session.turns:
            room -= turn.input_token_count + _ANSWER_ALLOWANCE * turn.output_token_count + 16
            if room < 0:
                break
            turns.append(turn)
        cut.append(dataclasses.replace(session, turns=tuple(turns)))
    return cut


async def play(
    fleet: Fleet,
    sessions: Sequence[Session],
    shape: Shape,
    texts: Texts,
    *,
    arrangement: Arrangement,
    open_count: int,
) -> Played:
    """Play all sessions, so many at once, each turn as soon as the one before it is answered."""
    waiting = list(enumerate(sessions))[::-1]
    answers: list[Answer] = []
    failures: list[str] = []

    async def play_in_turn() -> None:
        while waiting:
            number, session = waiting.pop()
            try:
                await _play_one(fleet, session, number, shape, texts, answers)
            except (ChatFailed, OSError) as error:
                failures.append(f"session {number}: {type(error).__name__}: {error}")

    began = time.monotonic()
    await asyncio.gather(*(play_in_turn() for _ in range(open_count)))
    duration_s = time.monotonic() - began
    stats = {worker.name: worker.stats().engine for worker in fleet.workers}
    ttfts_s = [answer.ttft_s for answer in answers]
    return Played(
        arrangement=arrangement.name,
        request_count=len(answers),
        failures=tuple(failures),
        prompt_token_count=sum(answer.prompt_token_count for answer in answers),
        cached_token_count=sum(answer.cached_token_count for answer in answers),
        ttft_p50_s=quantile(ttfts_s, 0.5),
        ttft_p95_s=quantile(ttfts_s, 0.95),
        duration_s=duration_s,
        accepted={name: engine.accepted_total for name, engine in stats.items()},
        prefill_tokens_per_s=max(engine.prefill_tokens_per_second for engine in stats.values()),
        output_tokens_per_s=sum(answer.output_token_count for answer in answers) / duration_s,
    )


async def _play_one(
    fleet: Fleet, session: Session, number: int, shape: Shape, texts: Texts, answers: list[Answer]
) -> None:
    """Play one session; its answers are added as they come."""
    said = [{"role": "system", "content": texts.text(shape.agent_token_count, key=session.agent)}]
    for index, turn in enumerate(session.turns):
        key = 1_000_000 * (number + 1) + index
        said.append({"role": "user", "content": texts.text(turn.input_token_count, key=key)})
        answer = await chat(
            fleet.gateway.url,
            model=fleet.model_id,
            messages=said,
            max_output_tokens=turn.output_token_count,
            options={"ignore_eos": True},
        )
        said.append({"role": "assistant", "content": answer.text})
        answers.append(answer)


def directory_bytes(folder: Path) -> int:
    """Return the size of all files in a worker's directory."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

"""Sampling options, log probabilities and several completions in the Python client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from icehouse_client import AsyncClient, Client, Completion, TokenLogprobs, TopLogprob
from icehouse_server.domain.events import Delta, Event, PrefillProgress
from icehouse_server.domain.request import GenerationRequest, Logprob, LogprobsWanted
from icehouse_server.domain.request import TokenLogprobs as Told
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.rpc.fake_engine import finished, started
from tests.system.clients.test_python_client import threaded
from tests.unit.rpc.conftest import SEED, RunningServer

ENTRY = Told(5, -0.5, 2, (Logprob(9, -0.25),), (Logprob(8, -4.0),), 3)
READ = TokenLogprobs(5, -0.5, 2, "<5>", (TopLogprob(9, -0.25, "<9>"),), (TopLogprob(8, -4.0, "<8>"),), 3)


def telling(request: GenerationRequest) -> Iterable[Event]:
    """Script: two pieces that name the seed, with log probabilities where asked for."""
    yield started(request)
    wanted = request.logprobs
    yield PrefillProgress(1, 2, (ENTRY,) if wanted and wanted.of_prompt else ())
    for piece in (f"{request.sampling.seed}", "!"):
        yield Delta(piece, (5,), (ENTRY,) if wanted else ())
    yield finished(request, output_token_count=2)


async def test_every_sampling_option_arrives(served: RunningServer) -> None:
    def use(client: Client) -> None:
        client.generate(
            "Hi",
            temperature=0.5,
            xtc_probability=0.25,
            xtc_threshold=0.2,
            repetition_penalty=1.5,
            repetition_window=1,
            presence_penalty=-0.5,
            presence_window=2,
            frequency_penalty=0.75,
            frequency_window=3,
            logit_bias={9: 1.0, 3: -100.0},
            bad_words=["no"],
            bad_token_sequences=[[5, 6]],
            min_output_tokens=2,
            ignore_end_tokens=True,
            seed=1,
        )
        client.generate("Hi", max_output_tokens=1)

    await threaded(served, use)
    full, plain = served.engine.submitted
    assert full.sampling == SamplingParams(
        temperature=0.5,
        xtc_probability=0.25,
        xtc_threshold=0.2,
        repetition_penalty=1.5,
        repetition_window=1,
        presence_penalty=-0.5,
        presence_window=2,
        frequency_penalty=0.75,
        frequency_window=3,
        logit_bias=((3, -100.0), (9, 1.0)),
        banned=((5, 6), tuple(b"no"), tuple(b" no")),
        min_output_token_count=2,
        ignores_end_tokens=True,
        seed=1,
    )
    assert plain.sampling == SamplingParams(seed=SEED) and plain.logprobs is None


async def test_log_probabilities_come_back(served: RunningServer) -> None:
    served.engine.script = telling

    def use(client: Client) -> Any:
        whole = client.generate("Hi", logprobs=1, prompt_logprobs=True)
        with client.stream("Hi", logprobs=1, prompt_logprobs=True, request_id=whole.request_id) as stream:
            assert list(stream) == [f"{SEED}", "!"]
        client.generate("Hi", logprobs=0)
        client.generate("Hi", prompt_logprobs=True)
        client.generate("Hi", logprob_token_ids=[8])
        return whole, stream.reply

    whole, streamed = await threaded(served, use)
    assert whole.logprobs == (READ, READ) and whole.prompt_logprobs == (READ,)
    assert streamed == whole
    _, _, bare, of_prompt, asked = served.engine.submitted
    assert bare.logprobs == LogprobsWanted() and of_prompt.logprobs == LogprobsWanted(of_prompt=True)
    assert asked.logprobs == LogprobsWanted(token_ids=(8,))


async def test_several_completions_are_listed(served: RunningServer) -> None:
    served.engine.script = telling

    def use(client: Client) -> Any:
        whole = client.generate("Hi", completions=3, temperature=1)
        plain = client.generate("Hi", completions=1)
        with client.stream("Hi", completions=3, temperature=1, request_id=whole.request_id) as stream:
            assert list(stream) == [f"{SEED}", "!"], "the first one's text"
        with client.stream("Hi", completions=2, temperature=1) as both:
            pieces = list(both.indexed())
        return whole, plain, stream.reply, pieces

    whole, plain, streamed, pieces = await threaded(served, use)
    assert [completion.text for completion in whole.completions] == [f"{SEED + i}!" for i in range(3)]
    assert [completion.seed for completion in whole.completions] == [SEED, SEED + 1, SEED + 2]
    assert all(type(completion) is Completion for completion in whole.completions)
    assert (whole.text, whole.seed) == (f"{SEED}!", SEED)
    assert len(plain.completions) == 1
    assert streamed == whole
    assert sorted(pieces) == sorted([(0, f"{SEED}"), (0, "!"), (1, f"{SEED + 1}"), (1, "!")])


async def test_the_asyncio_client_does_the_same(served: RunningServer) -> None:
    served.engine.script = telling
    async with AsyncClient(served.server.address) as client:
        async with client.stream("Hi", completions=2, temperature=1) as stream:
            with pytest.raises(ValueError, match="not ended"):
                _ = stream.reply
            assert [text async for text in stream] == [f"{SEED}", "!"]
        assert [completion.text for completion in stream.reply.completions] == [f"{SEED}!", f"{SEED + 1}!"]

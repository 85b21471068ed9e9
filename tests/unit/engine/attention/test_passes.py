"""Whole models over pages, by the GPU's kernels run as C++: rows draw what they draw by themselves."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.engine.attention.gpu.kernels import Language
from icehouse_server.engine.attention.gpu.launch import GpuAttention
from icehouse_server.engine.kv.pool import PassClock
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.attention.emulation import HEADER, Emulation
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of
from tests.unit.engine.runner.forward.test_pages import paging_of


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss"])
def test_tokens_are_those_of_the_row_alone(architecture: str, emulation: Emulation) -> None:
    """Chunks and guesses too, in sliding windows and with sinks."""
    model = build(architecture)
    forward = ForwardPass(model, dataclasses.replace(examine(model), layer_count=0))
    kernels = GpuAttention(emulation.make_kernel, Language(header=HEADER))
    paging = paging_of(model, forward, PassClock(), make_attention=lambda: kernels)
    forward.page(paging)
    assert paging.groups
    guests = []
    for number, length in enumerate((37, 12, 205, 1)):
        prompt = prompt_of(length, number)
        tokens, logits = alone(model, prompt, 12)
        guests.append(
            Guest(prompt, tokens, logits, Row(paging.caches(make_prompt_cache(model))), list(prompt))
        )
    emulation.launches.clear()
    Company(forward, seed=1, guesses=True, make_caches=None).run(guests)
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    assert max(guest.farthest for guest in guests) < 2e-3
    assert "icehouse_merge" in {name.removesuffix("_sinks") for name in emulation.launches}

"""How much a pass asks of MLX grows with its rows only where attention is by row.

Kernels are stood in for, one primitive a launch: what is counted is the graph, on any machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.attention.gpu.kernels import CUDA
from icehouse_server.engine.attention.gpu.launch import GpuAttention
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner.forward.splits import Attention

from bench.step.primitives import counted_primitives
from bench.step.stand_ins import make_kernel
from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of

FEW, MANY = 1, 64


def primitive_growth(folder: Path, attention: Attention) -> float:
    """Return the primitives of a pass of many decoding rows, of those of a pass of few."""
    few, many = (_primitives_of_a_pass(folder, attention, row_count=count) for count in (FEW, MANY))
    return many / few


def _primitives_of_a_pass(folder: Path, attention: Attention, *, row_count: int) -> int:
    kernels = GpuAttention(make_kernel, CUDA)
    runner = runner_of(folder, is_pipelined=True, attention=attention, kernels=kernels)
    chunks = []
    for number in range(row_count):
        prompt = (5, 6, 7 + number)
        runner.open(SequenceId(number))
        row = DecodeRow(SamplingParams(), prompt_token_ids=prompt)
        chunks.append(Chunk(SequenceId(number), prompt, row=row))
    runner.run(chunks)
    for _ in range(2):
        runner.run([])
    with counted_primitives() as counts:
        runner.run([])
    runner.close()
    return sum(counts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path, "qwen3")


def test_a_pass_of_64_rows_asks_no_more_of_mlx_than_one_of_one_row(folder: Path) -> None:
    assert primitive_growth(folder, Attention.AUTO) <= 1.05


def test_by_row_it_grows_with_the_rows(folder: Path) -> None:
    assert primitive_growth(folder, Attention.ROWS) > 5

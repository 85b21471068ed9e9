"""The engine that the benches compare with starts as the server does, and answers."""

from __future__ import annotations

from pathlib import Path

from bench.engine_process import EngineProcess
from tests.fixtures.models import tiny_model_dir


def test_each_prompt_gets_its_tokens(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model", "llama")
    log = tmp_path / "log"
    with EngineProcess(
        model_path=folder, dtype="float32", log_file=log, ignores_end_tokens=True, answer_timeout_s=120
    ) as engine:
        replies = engine.generate([[5, 6, 7], [8, 9]], max_output_tokens=4)
        alone = engine.alone([5, 6, 7], max_output_tokens=4)
    assert [len(reply.token_ids) for reply in replies] == [4, 4], log.read_text()
    assert [token for token, _ in alone] == list(replies[0].token_ids)

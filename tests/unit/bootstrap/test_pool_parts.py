"""Several models: what each is called, that none is called like another, and what each will take."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.bootstrap.composition import CPU_DEFAULTS
from icehouse_server.bootstrap.model_source import served_name
from icehouse_server.bootstrap.pool_parts import check_names
from icehouse_server.config import ModelConfig
from icehouse_server.errors import ConfigError
from icehouse_server.pool.places import ModelTerms
from icehouse_server.rpc.access.caller import UNPROVED

from tests.fixtures.models import tiny_model_dir
from tests.system.models.pool_server import entry, pool_server


def test_a_model_is_called_as_it_is_once_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert served_name(ModelConfig(model=str(tmp_path / "mine"))) == "mine"
    assert served_name(ModelConfig(model=str(tmp_path / "absent"))) == "absent"
    assert served_name(ModelConfig(model="org/name")) == "org/name"
    assert served_name(ModelConfig(model="demo")) == "smollm2-135m-instruct"
    assert served_name(ModelConfig(model="org/name", model_name="short")) == "short"


@pytest.mark.parametrize(
    "terms",
    [
        [ModelTerms("a"), ModelTerms("a")],
        [ModelTerms("a"), ModelTerms("b", aliases=("a",))],
        [ModelTerms("a", aliases=("c",)), ModelTerms("b", aliases=("c",))],
        [ModelTerms("a", aliases=("a",))],
    ],
)
def test_a_name_is_one_models(terms: list[ModelTerms]) -> None:
    with pytest.raises(ConfigError, match="give each a `model_name`"):
        check_names(terms)
    check_names([ModelTerms("a", aliases=("b",)), ModelTerms("c")])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_a_model_takes_is_known_before_it_is_loaded(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Where weights are widened, their files are smaller."""
    folder = tiny_model_dir(tmp_path, architecture, dtype)
    async with pool_server(tmp_path / "blocks", [entry(folder, dtype="float32")]) as served:
        needs = served.pool._opener.locate(architecture)
        info = served.pool.find("", UNPROVED).info
    assert info is not None
    assert 0.9 * info.resident_bytes <= needs.weight_bytes <= 1.2 * info.resident_bytes
    assert needs.run_bytes >= CPU_DEFAULTS.prefill_chunk_token_count * info.kv_bytes_per_token

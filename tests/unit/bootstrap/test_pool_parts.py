"""Names of several models: what each is called, and that none is called like another."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.bootstrap.model_source import served_name
from icehouse_server.bootstrap.pool_parts import check_names
from icehouse_server.config import ModelConfig
from icehouse_server.errors import ConfigError
from icehouse_server.pool.model_pool import ModelTerms


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

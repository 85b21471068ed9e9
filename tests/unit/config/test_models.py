"""Tables [[models]]: what they may say, what they leave out, and what contradicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.config import LoadedConfig, load_config
from icehouse_server.config.setting import NamedPath
from icehouse_server.errors import ConfigError


def loaded(folder: Path, text: str, **given: object) -> LoadedConfig:
    file = folder / "icehouse.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(flags=given, environ={}, file=file)


def test_each_table_is_a_model_and_what_it_leaves_out_is_as_in_the_sections(tmp_path: Path) -> None:
    text = """
        [model]
        dtype = "float32"
        model_name = "not theirs"
        [cache]
        kv_bits = 8
        [[models]]
        model = "org/one"
        aliases = ["a", "b"]
        pinned = true
        [models.adapters]
        legal = "./legal"
        [[models]]
        model = "two"
        model_name = "second"
        dtype = "float16"
        kv_bits = 4
        aliases = "c, d"
        ttl_s = 60
    """
    config = loaded(tmp_path, text).config
    one, two = config.models
    assert (one.model, one.model_name, one.dtype, one.kv_bits) == ("org/one", None, "float32", 8)
    assert (one.aliases, one.pinned, one.ttl_s) == (("a", "b"), True, 0.0)
    assert one.adapters == (NamedPath("legal", "./legal"),)
    assert (two.model_name, two.dtype, two.kv_bits, two.ttl_s) == ("second", "float16", 4, 60.0)
    assert two.aliases == ("c", "d") and not two.adapters
    assert config.of_model(two).cache.kv_bits == 4 and config.of_model(two).model is two


def test_without_tables_there_is_the_one_model(tmp_path: Path) -> None:
    assert loaded(tmp_path, '[model]\nmodel = "one"').config.models == ()


def test_what_the_command_line_says_replaces_the_tables(tmp_path: Path) -> None:
    text = '[[models]]\nmodel = "one"\n[[models]]\nmodel = "two"'
    one = loaded(tmp_path, text, **{"model.model": "three"}).config
    assert (one.model.model, one.models) == ("three", ())
    several = load_config(environ={}, file=tmp_path / "icehouse.toml", models=("four", "five")).config
    assert [model.model for model in several.models] == ["four", "five"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[models]]\nname = 'x'", "unknown key 'name'"),
        ("[[models]]\nmodel_nam = 'x'", "did you mean 'model_name'"),
        ("[[models]]\npinned = true", "has no `model`"),
        ("[[models]]\nmodel = 3", "models.model = 3"),
        ("[[models]]\nmodel = 'x'\nttl_s = -1", "models.ttl_s = -1"),
        ("[[models]]\nmodel = 'x'\naliases = [1]", "is not a list of names"),
        ("[[models]]\nmodel = 'x'\naliases = 'a,a'", "has a name twice"),
        ("[models]\nmodel = 'x'", "must be tables"),
        ("models = [1]", "must be tables"),
        ("[[models]]\nmodel = 'x'\nadapter_path = 'a'\nadapters = 'b=c'", "both set"),
        ("[[models]]\nmodel = 'x'\ntenants = ['t']", "callers need no credentials"),
        ("[[models]]\nmodel = 'x'\nworker_port = 1", "set fleet.worker_enabled"),
        (
            "[server]\nport = 5\n[fleet]\nworker_enabled = true\n[[models]]\nmodel = 'x'\nworker_port = 5",
            "= 5 is also another port",
        ),
        (
            "[kv_events]\nzmq_topic = 't'\n[[models]]\nmodel = 'x'\n[[models]]\nmodel = 'y'",
            "each has its own topic",
        ),
        ("[[models]]\nmodel = 'x'\n" * 65, "the limit is 64"),
    ],
)
def test_a_wrong_table_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert complaint in caught.value.message

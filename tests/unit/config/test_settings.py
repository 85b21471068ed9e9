"""Each setting is declared once, completely, and reachable under names that do not clash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.config import SETTINGS, Config
from icehouse_server.config.setting import Setting, SettingKind
from icehouse_server.errors import ConfigError


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.key)
def test_every_setting_has_help_and_a_default_that_it_would_accept(setting: Setting) -> None:
    assert setting.help.endswith(".") and setting.help[0].isupper(), "help is one sentence"
    assert getattr(getattr(Config(), setting.section), setting.name) == setting.default
    if setting.default is not None:
        assert setting.parse(setting.default, source="default") == setting.default
    assert setting.choices or setting.kind is not SettingKind.CHOICE


def test_names_are_unique() -> None:
    for names in ([s.flag for s in SETTINGS], [s.variable for s in SETTINGS], [s.key for s in SETTINGS]):
        assert len(set(names)) == len(SETTINGS)


def test_units_are_in_the_names() -> None:
    endings = {SettingKind.SECONDS: "_s", SettingKind.MILLISECONDS: "_ms"}
    wrong = [s.key for s in SETTINGS if s.kind in endings and not s.name.endswith(endings[s.kind])]
    assert wrong == []


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_but_never_breaks(text: str) -> None:
    for setting in SETTINGS:
        try:
            value = setting.parse(text, source="test")
        except ConfigError as error:
            assert setting.key in error.message
        else:
            assert value is None or isinstance(value, str | int | float | tuple)

"""Where values come from, which source wins, and what is refused in which words."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from icehouse_server.config import SETTINGS, CacheConfig, Config, load_config
from icehouse_server.config.setting import SettingKind
from icehouse_server.errors import ConfigError, Reason


def write(folder: Path, text: str) -> Path:
    file = folder / "icehouse.toml"
    file.write_text(text)
    return file


def refusal(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"environ": {}, **sources})
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_sources_everything_is_default() -> None:
    loaded = load_config(environ={})
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nport = 1\nhost = 'file'\n[log]\nlevel = 'debug'\n")
    loaded = load_config(
        flags={"server.port": "3", "server.uds": None},
        environ={"ICEHOUSE_SERVER_PORT": "2", "ICEHOUSE_SERVER_HOST": "variable"},
        file=file,
    )
    assert (loaded.config.server.port, loaded.config.server.host) == (3, "variable")
    assert loaded.config.log.level == "debug"
    assert loaded.sources["server.port"] == "--port"
    assert loaded.sources["server.host"] == "ICEHOUSE_SERVER_HOST"
    assert loaded.sources["log.level"] == str(file)
    assert loaded.sources["cache.ram_bytes"] == "default"


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    file = write(tmp_path, "[model]\nmodel = 'org/name'\n")
    assert load_config(environ={"ICEHOUSE_CONFIG": str(file)}).config.model.model == "org/name"


def test_the_section_is_not_said_twice_in_a_variable() -> None:
    loaded = load_config(environ={"ICEHOUSE_MODEL": "a/b", "ICEHOUSE_MODEL_NAME": "c"})
    assert (loaded.config.model.model, loaded.config.model.model_name) == ("a/b", "c")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), ("4GiB", 4 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("2k", None)],
)
def test_sizes_have_units(text: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        assert "is not a size" in refusal(flags={"cache.ram_bytes": text})
    else:
        assert load_config(flags={"cache.ram_bytes": text}, environ={}).config.cache.ram_bytes == size_bytes


@pytest.mark.parametrize(("word", "on"), [("on", True), ("False", False), ("1", True), ("no", False)])
def test_switches_have_words(word: str, on: bool) -> None:
    assert load_config(environ={"ICEHOUSE_CACHE_ENABLED": word}).config.cache.enabled is on


def test_an_empty_text_takes_an_optional_setting_away(tmp_path: Path) -> None:
    environ = {"ICEHOUSE_SERVER_UDS": "/run/icehouse.sock"}
    assert load_config(environ=environ).config.server.uds == "/run/icehouse.sock"
    assert load_config(flags={"server.uds": ""}, environ=environ).config.server.uds is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"server.port": "70000"}, ["server.port", "70000", "--port", "0 to 65535"]),
        ({"server.port": "1e3"}, ["not a whole number"]),
        ({"server.host": " "}, ["not a string"]),
        ({"server.drain_grace_s": "nan"}, ["not a finite number"]),
        ({"server.drain_grace_s": "-1"}, ["0 or more"]),
        ({"model.dtype": "int8"}, ["not one of auto, bfloat16"]),
        ({"cache.enabled": "perhaps"}, ["not true or false"]),
        ({"cache.kv_bits": "5"}, ["cache.kv_bits = 5", "0, 2, 3, 4, 6, 8"]),
        ({"cache.kv_group_size": "48"}, ["32, 64, 128"]),
        ({"cache.checkpoint_interval_tokens": "300"}, ["300", "not a multiple", "256"]),
        ({"engine.prefill_chunk_token_count": "300"}, ["300", "neither divides", "256"]),
        ({"server.max_output_tokens_limit": "10"}, ["256", "more than", "10"]),
        ({"server.uds": "/" + "x" * 110}, ["103 bytes"]),
    ],
)
def test_what_is_out_of_range_is_named_with_its_limit(flags: dict[str, str], words: list[str]) -> None:
    message = refusal(flags=flags)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", ["key 'prot'", "[server]", "did you mean 'port'?"]),
        ("[sever]\nport = 1", ["section [sever]", "did you mean 'server'?"]),
        ("port = 1", ["section [port]"]),
        ("server = 1", ["must be a section"]),
        ("[server]\nport = '1", ["not valid TOML"]),
        ("[server]\nport = true", ["not a whole number"]),
        ("[server]\nport = 1.5", ["not a whole number"]),
        ("[cache]\nenabled = 'maybe'", ["not true or false"]),
        ("[cache]\nram_bytes = 1.5", ["not a size"]),
        ("[model]\nmodel = 7", ["not a string"]),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(file=write(tmp_path, text))
    assert [word for word in words if word not in message] == []
    assert "icehouse.toml" in message or "must be a section" in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ICEHOUSE_SERVER_PRT", "'ICEHOUSE_SERVER_PORT'"),
        ("ICEHOUSE_PORT", "'ICEHOUSE_SERVER_PORT' or 'ICEHOUSE_HTTP_PORT'"),
        ("ICEHOUSE_RAM_BYTES", "'ICEHOUSE_TENANT_RAM_BYTES' or 'ICEHOUSE_CACHE_RAM_BYTES'"),
        ("ICEHOUSE_CLIENT_ADRESS", "'ICEHOUSE_CLIENT_ADDRESS'"),
    ],
)
def test_an_unknown_variable_is_named_with_the_one_that_may_be_meant(variable: str, meant: str) -> None:
    assert f"unknown environment variable {variable}; did you mean {meant}?" in refusal(
        environ={variable: "1"}
    )


@pytest.mark.parametrize("variable", ["ICEHOUSE_FOO", "ICEHOUSE_", "ICEHOUSE_VERSION", "ICEHOUSE_DEBUG"])
def test_an_unknown_variable_that_is_near_to_none_says_where_all_are(variable: str) -> None:
    message = refusal(environ={variable: "1"})
    assert "did you mean" not in message
    assert "`icehouse config` lists all settings, `icehouse serve --help-all` says what they do" in message


def test_other_peoples_variables_are_none_of_our_business() -> None:
    assert load_config(environ={"ICE": "1", "HOME": "/"}).config == Config()


def service_links(name: str) -> dict[str, str]:
    """Return what Kubernetes puts into the environment of a pod beside a ClusterIP Service."""
    port = f"{name}_PORT_50051_TCP"
    return {
        f"{name}_SERVICE_HOST": "10.96.3.7",
        f"{name}_SERVICE_PORT": "50051",
        f"{name}_SERVICE_PORT_GRPC": "50051",
        f"{name}_PORT": "tcp://10.96.3.7:50051",
        port: "tcp://10.96.3.7:50051",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "50051",
        f"{port}_ADDR": "10.96.3.7",
    }


@pytest.mark.parametrize(
    "name", ["ICEHOUSE", "ICEHOUSE_GRPC", "ICEHOUSE_SERVER", "ICEHOUSE_TELEMETRY_METRICS"]
)
def test_services_of_a_kubernetes_namespace_set_nothing(name: str) -> None:
    assert load_config(environ=service_links(name)).config == Config()


def test_a_variable_of_the_pod_counts_beside_a_service_of_its_name() -> None:
    environ = service_links("ICEHOUSE_SERVER") | {"ICEHOUSE_SERVER_PORT": "7"}
    assert load_config(environ=environ).config.server.port == 7


@pytest.mark.parametrize(
    "variable", ["ICEHOUSE_SERVR_PORT", "ICEHOUSE_PRT", "ICEHOUSE_PORT_X_TCP", "ICEHOUSE_SERVICE_HOSTS"]
)
def test_a_misspelt_variable_is_still_named_beside_a_service(variable: str) -> None:
    assert variable in refusal(environ=service_links("ICEHOUSE") | {variable: "1"})


def test_a_chunk_may_divide_the_block_or_be_a_multiple() -> None:
    for chunk in ("64", "256", "1024"):
        flags = {"engine.prefill_chunk_token_count": chunk}
        assert load_config(flags=flags, environ={}).config.engine.prefill_chunk_token_count == int(chunk)


def test_the_block_directory_has_a_default_and_knows_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CacheConfig().block_directory.is_relative_to(tmp_path)
    assert CacheConfig().block_directory.parts[-2:] == ("icehouse", "blocks")


def test_every_path_knows_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [setting for setting in SETTINGS if setting.kind in (SettingKind.PATH, SettingKind.NAMED_PATHS)]
    for path in paths:
        name = "" if path.kind is SettingKind.PATH else "mine="
        for home in ("~/x", f"{tmp_path}/x"):
            assert str(path.parse(f"{name}{home}", source="a flag")).count(f"{tmp_path}/x"), path.key
    assert {"model.adapter_path", "model.adapters", "cache.key_file"} <= {path.key for path in paths}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"security.tls_certificate": "c"}, "security.tls_key"),
        ({"security.tls_key": "k"}, "security.tls_certificate"),
        ({"security.tls_client_ca": "a"}, "security.tls_client_ca"),
        ({"security.operators": "spiffe://x"}, "security.operators"),
    ],
)
def test_half_of_a_security_is_refused(settings: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=settings, environ={})
    assert caught.value.field == named


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"http.aliases": "gpt-5"}, "http.aliases"),
        ({"http.aliases": "a=b,=c"}, "http.aliases"),
        ({"http.port": 50051}, "http.port"),
    ],
)
def test_an_http_front_that_contradicts_itself_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=settings, environ={})
    assert caught.value.field == named


def test_the_http_front_has_a_table_of_its_own(tmp_path: Path) -> None:
    text = '[http]\nport = 8000\naliases = "gpt-5=tiny, fast = my=adapter"\ntemperature = 0.7\n'
    http = load_config(
        environ={"ICEHOUSE_HTTP_ALLOW_ORIGINS": "http://a, *"}, file=write(tmp_path, text)
    ).config.http
    assert (http.port, http.temperature) == (8000, 0.7)
    assert http.alias_pairs == (("gpt-5", "tiny"), ("fast", "my=adapter"))
    assert http.origins == ("http://a", "*")
    # On a Unix socket the server has no port to share.
    assert load_config(flags={"http.port": 50051, "server.uds": "/s"}, environ={}).config.http.port == 50051


def test_operators_are_read_as_a_list() -> None:
    config = load_config(
        flags={
            "security.tls_certificate": "c",
            "security.tls_key": "k",
            "security.tls_client_ca": "a",
            "security.operators": "spiffe://x/ops, ops.corp.example,",
        },
        environ={},
    ).config.security
    assert config.operator_names == {"spiffe://x/ops", "ops.corp.example"}
    assert config.authenticates


def _adapters(text: str | None = None, *, table: str = "", tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "icehouse.toml"
    file.write_text(table)
    environ = {} if text is None else {"ICEHOUSE_MODEL_ADAPTERS": text}
    return tuple(map(str, load_config(environ=environ, file=file).config.model.adapters))


def test_adapters_are_a_table_in_the_file_and_a_list_elsewhere(tmp_path: Path) -> None:
    table = '[model.adapters]\nsql = "/a/b, c"\n"chat.v2" = "/d=e"\n'
    assert _adapters(table=table, tmp_path=tmp_path) == ("sql=/a/b, c", "chat.v2=/d=e")
    assert _adapters("sql=/a, chat=/b=c ,", tmp_path=tmp_path) == ("sql=/a", "chat=/b=c")
    assert _adapters(tmp_path=tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/a", "has the name '/a'"),
        ("sql", "names no folder for 'sql'"),
        ("sql=/a,sql=/b", "names 'sql' twice"),
        ("=/a", "has the name ''"),
        ("a b=/a", "has the name 'a b'"),
        (",".join(f"a{i}=/a" for i in range(65)), "names 65 folders; the limit is 64"),
    ],
)
def test_adapters_that_cannot_be_told_apart_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        _adapters(text, tmp_path=tmp_path)
    assert refused.value.field == "model.adapters"


def test_an_adapter_for_all_and_adapters_to_choose_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be stacked"):
        _adapters(table='[model]\nadapter_path = "/a"\nadapters = { sql = "/b" }\n', tmp_path=tmp_path)


BIG = "9" * 400
TEXTS = st.sampled_from(
    ("", "~nobody-of-this-name/x", "4GiB", f"{BIG} GiB", BIG, "-1", "nan", "a=b", "a\nb")
) | st.text(max_size=20)
SCALARS = TEXTS | st.integers() | st.just(10**400) | st.floats() | st.booleans() | st.dates()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


def read_or_refused(**sources: object) -> None:
    """Whatever the sources hold, the settings are read, or one line says which is wrong."""
    try:
        loaded = load_config(**{"environ": {}, **sources})
    except ConfigError as error:
        assert error.reason is Reason.CONFIG_INVALID and "\n" not in error.message, error.message
    else:
        assert set(loaded.sources) == {setting.key for setting in SETTINGS}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "icehouse.toml"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(setting="server.port", value=10**400)
@example(setting="server.drain_grace_s", value=10**400)
@example(setting="cache.ram_bytes", value=f"{BIG} GiB")
@given(setting=st.sampled_from([setting.key for setting in SETTINGS]), value=TREES)
def test_any_value_of_the_file_is_read_or_refused(file: Path, setting: str, value: object) -> None:
    section, _, name = setting.partition(".")
    file.write_text(f"[{section}]\n{name} = {toml_of(value)}\n", encoding="utf-8")
    read_or_refused(file=file)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(text=b"[" * 100_000)
@example(text=b"[server]\nport = " + b"[" * 100_000)
@example(text=b"[server]\nport = " + b"9" * 5000)
@example(text=b"[server]\nport = 0x" + b"f" * 5000)
@example(text=b"[cache]\nram_bytes = 0x" + b"f" * 5000)
@example(text=b'"a\\nb" = 1')
@given(
    text=st.binary(max_size=60) | st.text(alphabet="[]server.pot=\n\"'{}#0x1,-", max_size=60).map(str.encode)
)
def test_any_bytes_of_a_file_are_read_or_refused(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    read_or_refused(file=file)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    environ=st.dictionaries(
        st.sampled_from([setting.variable for setting in SETTINGS])
        | st.text(alphabet="ICEHOUS_RVPT0", max_size=12).map("ICEHOUSE_".__add__),
        TEXTS,
        max_size=3,
    )
)
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    read_or_refused(environ=environ)


def test_a_config_file_of_nobody_s_home_is_named() -> None:
    assert "~nobody-of-this-name" in refusal(file=Path("~nobody-of-this-name/icehouse.toml"))


def toml_of(value: object) -> str:
    """Return a value as TOML writes it; integers in hexadecimal, which may be of any length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return hex(value) if value >= 0 else f"-{-value}"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(letter):08x}" for letter in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_of(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    return str(value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("~nobody-here/x", "begins with the home folder of a user who does not exist"),
        ("a\0b", "has a zero byte"),
    ],
)
def test_what_can_be_no_path_is_named_whichever_setting_has_it(path: str, told: str) -> None:
    paths = [setting for setting in SETTINGS if setting.kind in (SettingKind.PATH, SettingKind.NAMED_PATHS)]
    assert len(paths) > 8
    for setting in paths:
        value = f"one={path}" if setting.kind is SettingKind.NAMED_PATHS else path
        assert f"{setting.key} = {value!r} (from {setting.flag}) {told}" in refusal(
            flags={setting.key: value}
        )

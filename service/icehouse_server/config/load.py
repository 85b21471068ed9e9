"""Configuration loader: merges flags, environment and file into a validated `Config`, and notes each source.

Precedence: flag, then environment variable, then file, then default. Only this module and `user_paths` read
the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from icehouse_server.config.edge import SecurityConfig
from icehouse_server.config.sections import (
    MODEL_SETTINGS,
    MODELS,
    SECTIONS,
    SETTINGS,
    CacheConfig,
    Config,
    PooledModelConfig,
)
from icehouse_server.errors import ConfigError, Reason
from icehouse_server.small_file import read_small_file

FILE_VARIABLE = "ICEHOUSE_CONFIG"
"""The variable that names the TOML file, like `--config`."""


CLIENT_VARIABLES = tuple(
    f"ICEHOUSE_CLIENT_{name}" for name in ("ADDRESS", "TOKEN_FILE", "TLS", "CA", "CERTIFICATE", "KEY")
)
"""Variables of the commands that ask a running server; these are not settings of the server."""

_MODEL_LIMIT = 64
"""Most models of one server."""

_OTHER_VARIABLES = (FILE_VARIABLE, *CLIENT_VARIABLES)

_PREFIX = "ICEHOUSE_"

_ALL_SETTINGS = "`icehouse config` lists all settings, `icehouse serve --help-all` says what they do"

_SERVICE_LINK = r"SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective configuration, and the source of each value by `section.name`."""

    config: Config
    sources: Mapping[str, str]


def environment() -> Mapping[str, str]:
    """Return the process's environment. The composition root passes it on; no other module reads it."""
    return os.environ


def enlarge_attention_plan_cache() -> None:
    """Let MLX cache more of the plans that attention on CUDA needs, one for each shape: building one takes 50
    ms, and by default MLX keeps 64. Call this before MLX is imported."""
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "512")


def has_rdma() -> bool:
    """Return whether `mlx.launch --backend jaccl` started this process, so MLX connects ranks without IP."""
    return "MLX_JACCL_COORDINATOR" in os.environ


@contextlib.contextmanager
def named_ranks(ring: Sequence[Sequence[str]], rank: int) -> Iterator[str]:
    """Tell MLX the addresses of a group's ranks, and which one this process is, while it joins them; yield
    MLX's backend for that. `mlx.launch --backend jaccl` (RDMA over Thunderbolt) has told MLX already."""
    if has_rdma():
        yield "jaccl"
        return
    with tempfile.NamedTemporaryFile("w", prefix="icehouse-ring-", suffix=".json") as file:
        json.dump([list(addresses) for addresses in ring], file)
        file.flush()
        os.environ.update(MLX_HOSTFILE=file.name, MLX_RANK=str(rank))
        yield "ring"


def load_config(
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    models: Sequence[str] = (),
) -> LoadedConfig:
    """Merge the sources and validate once.

    `flags` maps `section.name` to what the command line gave (None: not given). `environ` is the process's
    environment by default; `file` wins over its ICEHOUSE_CONFIG. `models` are several models from the command
    line, which replace the file's. Raises ConfigError for an unknown key or variable, a value of the wrong
    kind or range, and values that contradict each other.
    """
    environ = _without_service_links(environment() if environ is None else environ)
    flags = flags or {}
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    _refuse_unknown_variables(environ)
    from_file, tables = ({}, []) if file is None else _read_file(file)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    sources: dict[str, str] = {}
    for setting in SETTINGS:
        given = (
            (setting.flag, flags.get(setting.key)),
            (setting.variable, environ.get(setting.variable)),
            (str(file), from_file.get(setting.key)),
        )
        source, raw = next((each for each in given if each[1] is not None), ("default", None))
        value = setting.default if raw is None else setting.parse(raw, source=source)
        values[setting.section][setting.name] = value
        sources[setting.key] = source
    if models or flags.get("model.model") is not None:
        tables = [{"model": model} for model in models]
    shared = {**values["model"], "model_name": None, "kv_bits": values["cache"]["kv_bits"]}
    config = Config(
        **{name: owner(**values[name]) for name, owner in SECTIONS.items()},
        models=tuple(_pooled(table, shared, source=str(file)) for table in tables),
    )
    for field, what in _contradictions(config):
        raise _invalid(f"{field} {what}", field=field)
    return LoadedConfig(config=config, sources=sources)


def _pooled(table: Mapping[str, object], shared: Mapping[str, Any], *, source: str) -> PooledModelConfig:
    """Return the model of one table [[models]]; `shared` has the values that it leaves out."""
    known = {s.name: s for s in MODEL_SETTINGS}
    for name in table:
        if name not in known:
            raise _unknown(f"key {name!r} in [[{MODELS}]] of {source}", name, [*known])
    if "model" not in table:
        raise _invalid(f"a table [[{MODELS}]] of {source} has no `model`; set it", field="models.model")
    given = {name: known[name].parse(raw, source=source) for name, raw in table.items()}
    return PooledModelConfig(**{**shared, **given})


def _read_file(file: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Return the values of the file's sections, and its [[models]] tables."""
    try:
        document = tomllib.loads(read_small_file(file.expanduser()).content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # The file is not TOML or UTF-8, has a number with too many digits, or nests tables too deep.
        raise _invalid(f"the config file {file} is not valid TOML: {error}", field="config") from error
    except (OSError, RuntimeError) as error:
        # RuntimeError: the path names the home folder of a user who does not exist.
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise _invalid(
            f"cannot read the config file {file}: {why}; check --config", field="config"
        ) from error
    known = {s.key for s in SETTINGS}
    found: dict[str, object] = {}
    tables = document.pop(MODELS, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(f"{MODELS} in {file} must be tables: [[{MODELS}]]", field=MODELS)
    for section, table in document.items():
        if section not in SECTIONS:
            raise _unknown(f"section [{repr(section)[1:-1]}] in {file}", section, [*SECTIONS])
        if not isinstance(table, dict):
            raise _invalid(
                f"{section} in {file} is a value, but must be a section: [{section}]", field=section
            )
        for name, value in table.items():
            if f"{section}.{name}" not in known:
                names = [s.name for s in SETTINGS if s.section == section]
                raise _unknown(f"key {name!r} in section [{section}] of {file}", name, names)
            found[f"{section}.{name}"] = value
    return found, tables


def _without_service_links(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables without those that Kubernetes adds for Services named `icehouse`, `icehouse-…`.

    Each Service NAME has a NAME_SERVICE_HOST. One named `icehouse-server` even sets the variable of a
    setting, to a URL; if the pod itself sets that variable, it is not a URL and stays.
    """
    hosts = [v for v in environ if v.startswith("ICEHOUSE_") and v.endswith("_SERVICE_HOST")]
    if not hosts:
        return environ
    names = "|".join(re.escape(host.removesuffix("_SERVICE_HOST")) for host in hosts)
    link = re.compile(f"({names})_({_SERVICE_LINK})")
    settings = {s.variable for s in SETTINGS}
    return {
        variable: value
        for variable, value in environ.items()
        if not link.fullmatch(variable) or (variable in settings and "://" not in value)
    }


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {s.variable for s in SETTINGS} | set(_OTHER_VARIABLES)
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            raise _unknown(f"environment variable {variable}", variable, _names_of(known))


def _names_of(variables: Iterable[str]) -> dict[str, list[str]]:
    """Return the variables by the names that people use: without common prefix, and without the section."""
    names: dict[str, list[str]] = {}
    for setting in SETTINGS:
        names.setdefault(setting.key.partition(".")[2].upper(), []).append(setting.variable)
    return names | {variable.removeprefix(_PREFIX): [variable] for variable in variables}


def _contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that others contradict, and what is wrong with it."""
    block, chunk = config.cache.block_token_count, config.engine.prefill_chunk_token_count
    if chunk and chunk % block and block % chunk:
        yield (
            "engine.prefill_chunk_token_count",
            f"= {chunk} neither divides cache.block_token_count = {block} nor is a multiple of it",
        )
    interval = config.cache.checkpoint_interval_tokens
    if interval % block:
        what = f"= {interval} is not a multiple of cache.block_token_count = {block}"
        yield "cache.checkpoint_interval_tokens", what
    if config.model.adapter_path is not None and config.model.adapters:
        yield (
            "model.adapters",
            "and model.adapter_path are both set: adapters cannot be stacked; list both in "
            "model.adapters and let requests choose",
        )
    yield from _wrong_models(config)
    default, limit = config.server.default_max_output_tokens, config.server.max_output_tokens_limit
    if default > limit:
        what = f"= {default} is more than server.max_output_tokens_limit = {limit}"
        yield "server.default_max_output_tokens", what
    if config.cache.key_file is not None and config.cache.key_command is not None:
        yield "cache.key_command", "and cache.key_file are both set; the key comes from one of them"
    yield from _half_sharing(config.cache)
    # sockaddr_un has 108 bytes on Linux and 104 on macOS, including the terminating zero.
    if config.server.uds is not None and len(os.fsencode(config.server.uds)) > 103:
        what = f"= {config.server.uds!r} is longer than the 103 bytes that a socket path may have"
        yield "server.uds", what
    page = config.telemetry
    if page.status_page_enabled and page.metrics_port is None:
        yield "telemetry.metrics_port", "is not set, but telemetry.status_page_enabled needs it"
    if page.status_page_text_enabled and not page.status_page_enabled:
        what = "is off, and telemetry.status_page_text_enabled shows text on that page"
        yield "telemetry.status_page_enabled", what
    yield from _half_security(config.security)
    try:
        _ = config.http.alias_pairs
    except ValueError as error:
        yield "http.aliases", f"is wrong: {error}"
    if config.server.uds is None and config.http.port and config.http.port == config.server.port:
        yield "http.port", f"and server.port are both {config.http.port}; HTTP and gRPC need different ports"


def _wrong_models(config: Config) -> Iterator[tuple[str, str]]:
    if len(config.models) > _MODEL_LIMIT:
        yield MODELS, f"are {len(config.models)}; the limit is {_MODEL_LIMIT}"
    for model in config.models:
        if model.adapter_path is not None and model.adapters:
            yield (
                "models.adapters",
                f"and adapter_path are both set for {model.model!r}; list both in adapters",
            )
        if model.tenants and not config.security.authenticates:
            yield "models.tenants", "are set, but callers need no credentials; set security.token_file"
    if config.worker_ports and not config.fleet.worker_enabled:
        yield "models.worker_port", "is set, but gateways are not served; set fleet.worker_enabled"
    ports = [port for port in (config.server.port, *config.worker_ports, config.http.port) if port]
    for port in config.worker_ports:
        if ports.count(port) > 1:
            yield "models.worker_port", f"= {port} is also another port; each needs its own"
    if len(config.models) > 1 and config.kv_events.zmq_topic is not None:
        yield "kv_events.zmq_topic", "is set, but with several models each has its own topic; leave it out"


def _half_sharing(cache: CacheConfig) -> Iterator[tuple[str, str]]:
    if cache.shared_url is None:
        return
    if not cache.has_ssd:
        yield (
            "cache.shared_url",
            "is set without an SSD tier: blocks go to and come from the object store as files of that "
            "tier; leave cache.ssd_enabled on",
        )
    if any(char in cache.shared_url for char in "@?#"):
        yield (
            "cache.shared_url",
            "has more than a bucket and a path; credentials and options belong in the environment, under the "
            "provider's names",
        )


def _half_security(security: SecurityConfig) -> Iterator[tuple[str, str]]:
    if (security.tls_certificate is None) != (security.tls_key is None):
        missing = "tls_key" if security.tls_key is None else "tls_certificate"
        yield f"security.{missing}", "is missing: TLS needs a certificate and its key"
    if security.tls_client_ca is not None and security.tls_certificate is None:
        yield (
            "security.tls_client_ca",
            "is set without security.tls_certificate: clients can show certificates only over TLS",
        )
    if security.operators is not None and security.tls_client_ca is None:
        yield (
            "security.operators",
            "names certificates, but security.tls_client_ca is not set; with tokens the role is in the "
            "token's line",
        )


def _unknown(what: str, word: str, known: Sequence[str] | Mapping[str, Sequence[str]]) -> ConfigError:
    """Return the error for an unknown word, with known ones that may be meant; a mapping has them by name."""
    found = difflib.get_close_matches(word.removeprefix(_PREFIX), sorted(known), n=1, cutoff=0.7)
    meant = [each for name in found for each in (known[name] if isinstance(known, Mapping) else [name])]
    hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else _ALL_SETTINGS
    return _invalid(f"unknown {what}; {hint}", field=word)


def _invalid(message: str, *, field: str) -> ConfigError:
    return ConfigError(Reason.CONFIG_INVALID, message, field=field)

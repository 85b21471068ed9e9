"""Command line options derived from the declared settings, so that none is written twice.

`icehouse config`: the effective settings and where each came from.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from icehouse_client.cli.console import AsJson, out, print_json
from icehouse_client.cli.figures import size_text
from icehouse_client.cli.main import PlainCommand
from icehouse_client.cli.option_groups import with_groups
from typer.core import TyperOption

from icehouse_server.config import SETTINGS, LoadedConfig, load_config
from icehouse_server.config.sections import MODEL_SETTINGS, MODELS
from icehouse_server.config.setting import Setting, SettingKind

_PANELS = {
    "server": "Server",
    "connection": "Connections",
    "http": "HTTP",
    "security": "Security",
    "tenant": "Tenants",
    "model": "Model",
    "engine": "Engine",
    "cache": "Prefix cache",
    "fleet": "Fleet",
    "group": "Group of machines",
    "kv_events": "KV events",
    "telemetry": "Telemetry",
    "log": "Log",
}

OFTEN_SET: Mapping[str, tuple[str, ...]] = {
    "Model": ("model.model", "engine.memory_limit_bytes"),
    "Addresses and callers": ("server.host", "server.port", "http.port", "security.token_file"),
    "Prefix cache": ("cache.ram_bytes", "cache.ssd_bytes", "cache.directory"),
    "Fleet and monitoring": (
        *("fleet.worker_enabled", "telemetry.metrics_port", "telemetry.status_page_enabled"),
    ),
}
"""Settings that `--help` shows, by group; `--help-all` shows all of them."""

_OFTEN_SET_PANELS = {key: panel for panel, keys in OFTEN_SET.items() for key in keys}

_SHOWS_ALL = "icehouse_server.cli.flags.shows_all"


class SettingsCommand(PlainCommand):
    """A command with an option for every setting: its help is one screen unless all of it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: common settings, or all with their variables. Shells complete all of them."""
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        settings = {_parameter_name(s): s for s in SETTINGS}
        options = [p for p in self.params if isinstance(p, TyperOption) and p.name in settings]
        shown = [(option, settings[option.name or ""], option.help) for option in options]
        for option, setting, text in shown:
            is_said_before = setting.key == _MODEL_KEY and any(p.name == "model" for p in self.params)
            option.hidden = not shows_all and (is_said_before or setting.key not in _OFTEN_SET_PANELS)
            option.help = f"{text} (env: {setting.variable})" if shows_all else text
            often = _OFTEN_SET_PANELS.get(setting.key, "")
            option.rich_help_panel = _PANELS[setting.section] if shows_all else often
        try:
            super().format_help(ctx, formatter)
        finally:
            for option, _, text in shown:
                option.hidden, option.help = False, text


def with_settings(command: Callable[..., None], *, takes_model: bool = False) -> Callable[..., None]:
    """Give `command` an option for every setting, and `--config`, in place of its parameter `loaded`.

    It is called with the merged, validated configuration. With `takes_model` the model can also be given
    without its flag, and there can be several.
    """

    def loaded_of(**given: Any) -> LoadedConfig:
        file = given.pop("config")
        given.pop("help_all")
        models: Sequence[str] = given.pop("model", None) or ()
        flags = {s.key: given[_parameter_name(s)] for s in SETTINGS}
        if models and flags[_MODEL_KEY] is not None:
            raise typer.BadParameter("the model is given twice, as MODEL and with --model; give it once")
        if len(models) == 1:
            flags[_MODEL_KEY], models = models[0], ()
        return load_config(flags=flags, file=file, models=models)

    parameters = [_config_parameter(), *(_parameter(s) for s in _ordered()), _help_all_parameter()]
    if takes_model:
        parameters.insert(0, _model_parameter())
    loaded_of.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_groups(loaded=loaded_of)(command)


_MODEL_KEY = "model.model"


def _parameter_name(setting: Setting) -> str:
    return setting.key.replace(".", "_")


def _ordered() -> list[Setting]:
    """Return the settings, the common ones first, in the order of their groups."""
    often = list(_OFTEN_SET_PANELS)
    return sorted(SETTINGS, key=lambda s: often.index(s.key) if s.key in often else len(often))


def _show_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        context.meta[_SHOWS_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _help_all_parameter() -> inspect.Parameter:
    option = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every setting.")
    return _keyword("help_all", Annotated[bool, option], default=False)


def _model_parameter() -> inspect.Parameter:
    (setting,) = [s for s in SETTINGS if s.key == _MODEL_KEY]
    text = f"{_help_text(setting)} Several are served by name, each loaded when it is first requested."
    argument = typer.Argument(metavar="MODEL…", help=text, show_default=False)
    return _keyword("model", Annotated[list[str] | None, argument])


def _config_parameter() -> inspect.Parameter:
    text = "TOML file with a table per section of these settings."
    return _keyword("config", Annotated[Path | None, typer.Option("--config", metavar="FILE", help=text)])


def _keyword(name: str, annotation: Any, *, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(setting: Setting) -> inspect.Parameter:
    # Always text options: `Setting.parse` reads flags, variables and files alike.
    switch = setting.kind is SettingKind.SWITCH
    name = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if switch else setting.flag
    option = typer.Option(
        name,
        metavar=None if switch else "|".join(map(str, setting.choices)) or setting.kind.value,
        help=_help_text(setting),
        show_default=False,
    )
    return _keyword(_parameter_name(setting), Annotated[bool | None if switch else str | None, option])


def _help_text(setting: Setting) -> str:
    has_default = setting.default not in (None, ())
    return (
        f"{setting.help} (default: {value_text(setting, setting.default)})" if has_default else setting.help
    )


def value_text(setting: Setting, value: object) -> str:
    """Return a value of this setting for people: "32 GiB", "on", "none"."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if setting.kind is SettingKind.BYTES and isinstance(value, int) and value:
        return size_text(value)
    if setting.kind is SettingKind.SWITCH:
        return "on" if value else "off"
    unit = {SettingKind.SECONDS: " s", SettingKind.MILLISECONDS: " ms"}.get(setting.kind, "")
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def show_config(loaded: LoadedConfig, as_json: AsJson = False) -> None:
    """Print the effective settings and where each came from."""
    values = {setting: attrgetter(setting.key)(loaded.config) for setting in SETTINGS}
    if as_json:
        told = {s.key: {"value": v, "source": loaded.sources[s.key]} for s, v in values.items()}
        models = [dataclasses.asdict(model) for model in loaded.config.models]
        print_json({**told, MODELS: models} if models else told)
        return
    rows = [(s.key, value_text(s, v), loaded.sources[s.key]) for s, v in values.items()]
    for number, model in enumerate(loaded.config.models):
        own = {s: getattr(model, s.name) for s in MODEL_SETTINGS}
        rows += [(f"{MODELS}[{number}].{s.name}", value_text(s, v), MODELS) for s, v in own.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, source in rows:
        line = f"{key:{widths[0]}}  {value:{widths[1]}}  {source}"
        out.print(line, markup=False, style="dim" if source == "default" else "bold")

"""HTTP settings: where OpenAI's and Anthropic's HTTP APIs listen, and what their callers may do."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import MIB, SettingKind, names_in, setting


@dataclasses.dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP front that `serve` runs beside the server; none without a port."""

    port: int | None = setting(
        None,
        "TCP port of OpenAI's and Anthropic's HTTP APIs; 0 lets the system choose a free one. Default: no "
        "HTTP.",
        maximum=65535,
    )
    host: str = setting(
        "127.0.0.1",
        "Address of the HTTP APIs. One that other machines reach needs TLS and tokens, and then speaks "
        "HTTPS with the server's certificate.",
    )
    aliases: str | None = setting(
        None, "More names for the model and its adapters, comma-separated: gpt-5=qwen3-4b,fast=my-adapter."
    )
    strict_models: bool = setting(
        False, "Refuse names of models that are not served; otherwise the model answers to any name."
    )
    temperature: float | None = setting(
        None,
        "Temperature of requests that set none. Default: greedy.",
        kind=SettingKind.NUMBER,
    )
    exact_prompts: bool = setting(
        False,
        "Give the model each conversation exactly as it was sent. Otherwise lines that change with every "
        "request are removed, tools are sorted, and earlier replies stay as they were generated.",
    )
    allow_origins: str | None = setting(
        None, "Origins, comma-separated, whose web pages may call; * is every origin. Default: no web page."
    )
    names: str | None = setting(
        None,
        "Host names, comma-separated, that the HTTP APIs answer to, such as gpu-1.internal, beside "
        "addresses, localhost and http.host. Requests for other names get 421, so that no web page can call "
        "under a name of its own. `*` allows any. HTTPS needs none: its certificate has the names.",
    )
    max_body_bytes: int = setting(32 * MIB, "Maximum size of a request's body.", minimum=1024)
    body_memory_bytes: int = setting(
        256 * MIB,
        "Memory for the bodies of all requests until they are answered; more are refused with status 503.",
        minimum=MIB,
    )

    @property
    def alias_pairs(self) -> tuple[tuple[str, str], ...]:
        """Each alias and the model or adapter that it stands for; raises ValueError for half a pair."""
        pairs = []
        for part in names_in(self.aliases):
            name, _, model = (word.strip() for word in part.partition("="))
            if not (name and model):
                raise ValueError(f"{part!r} is not NAME=MODEL")
            pairs.append((name, model))
        return tuple(pairs)

    @property
    def origins(self) -> tuple[str, ...]:
        return names_in(self.allow_origins)

    @property
    def own_names(self) -> tuple[str, ...]:
        return names_in(self.names)

"""Settings of what operators look at: metrics, traces, load reports."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import setting


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What the server tells of itself beside its log. All of it is off unless asked for."""

    metrics_port: int | None = setting(
        None,
        "Port of the Prometheus endpoint; 0 lets the system choose a free one. Default: no endpoint.",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address of the Prometheus endpoint; by default only this machine can connect."
    )
    metrics_names: str | None = setting(
        None,
        "Host names, comma-separated, that the Prometheus endpoint and the status page answer to, such as "
        "gpu-1.internal, beside addresses, localhost and metrics_host. Requests for other names get 421, "
        "so that no web page can read them under a name of its own. `*` allows any.",
    )
    status_page_enabled: bool = setting(
        False,
        "Show a status page at / of the Prometheus endpoint: tiers, hit rate, times to first token, shared "
        "prefixes without their text, slow requests.",
    )
    status_page_text_enabled: bool = setting(
        False,
        "Show on the status page how the text of each shared prefix begins. That shows parts of prompts and "
        "outputs of every tenant to whoever reaches the port, which asks for no credentials. Refused "
        "beyond loopback without allow_insecure_public.",
    )
    traces_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that receives spans over OTLP/gRPC, such as "
        "http://localhost:4317. Default: none.",
    )
    traces_sample_ratio: float = setting(
        1.0,
        "Share of the traces begun here that are kept; a client's own decision is followed.",
        minimum=0,
        maximum=1,
    )
    load_report_enabled: bool = setting(
        False, "Send the server's load to balancers, in an ORCA trailer of every call."
    )
    sample_interval_s: float = setting(
        1.0, "How often the engine is sampled for metrics and load reports.", minimum=0.1
    )

    @property
    def own_names(self) -> tuple[str, ...]:
        """`metrics_names` one by one."""
        names = (name.strip() for name in (self.metrics_names or "").split(","))
        return tuple(name for name in names if name)

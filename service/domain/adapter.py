"""A LoRA adapter that is served beside the model it was trained on."""

from __future__ import annotations

import dataclasses

from service.domain.ids import AdapterDigest, AdapterName


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One loaded adapter, as `ModelService` shows it."""

    name: AdapterName
    """The name callers use in `adapter`."""
    kind: str
    """`fine_tune_type` of its adapter_config.json: "lora", "dora" or "full"."""
    digest: AdapterDigest
    parameter_count: int
    weight_bytes: int
    """What it takes beside the model's weights, which are not held twice."""

"""Two servers of two models each behind one gateway: requests find the model they name, and its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.fleet.gateway import PACKAGES, GatewayProcess, missing_packages
from tests.fixtures.models import tiny_model_dir
from tests.system.crash.crashing_server import ServerProcess
from tests.system.fleet.conftest import BLOCK, until
from tests.system.mesh.envoy import free_ports

pytestmark = pytest.mark.fleet

NAMES = ("tiny-llama", "tiny-qwen")
_TEXT = "and the quick brown fox jumped over it " * 8


class ServedPair:
    """A gateway, and the ports of each model's workers behind it."""

    def __init__(self, gateway: GatewayProcess, ports: dict[str, list[int]]) -> None:
        import openai

        self.gateway = gateway
        self.ports = ports
        self._client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        """Close its client's connections."""
        self._client.close()

    def listed(self) -> set[str]:
        return {model.id for model in self._client.models.list().data}

    def complete(self, model: str, text: str) -> Any:
        return self._client.completions.create(model=model, prompt=text, temperature=0, max_tokens=8)

    def known_blocks(self, model: str) -> float:
        """Return how many blocks of a model the gateway knows."""
        return sum(self.gateway.metric("smg_kv_index_blocks", worker_port=port) for port in self.ports[model])


def _config(folder: Path, models: dict[str, Path], ports: tuple[int, ...]) -> Path:
    """Write the settings of one server, whose models have these ports for the gateway."""
    tables = [
        f'[[models]]\nmodel = "{models[name]}"\nmodel_name = "{name}"\nworker_port = {port}\n'
        for name, port in zip(NAMES, ports, strict=True)
    ]
    path = folder / f"{ports[0]}.toml"
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    if missing := missing_packages((*PACKAGES, "openai")):
        pytest.skip(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    folder = tmp_path_factory.mktemp("several")
    kinds = zip(NAMES, ("llama", "qwen3"), strict=True)
    models = {name: tiny_model_dir(folder, kind, name=name) for name, kind in kinds}
    ports: dict[str, list[int]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            own, *of_models = free_ports(3)
            settings = ("--config", str(_config(folder, models, tuple(of_models))), "--worker")
            cache = ("--block-token-count", str(BLOCK), "--min-prefix-token-count", "0")
            server = ServerProcess(
                model=(),
                directory=folder / f"blocks-{own}",
                log=folder / f"{own}.log",
                options=(*settings, *cache, "--no-restore-or-recompute"),
                port=own,
            )
            stack.enter_context(server).wait_until_serving()
            for name, port in zip(NAMES, of_models, strict=True):
                ports[name].append(port)
        worker_ports = [port for each in ports.values() for port in each]
        gateway = GatewayProcess(
            worker_ports=worker_ports, log=folder / "gateway.log", options=("--policy", "cache_aware")
        )
        stack.enter_context(gateway)
        stack.callback(gateway.kill)
        gateway.wait_until_healthy(len(worker_ports))
        served = ServedPair(gateway, ports)
        stack.callback(served.close)
        yield served


def test_the_gateway_lists_both_and_each_answers_by_its_name(pair: ServedPair) -> None:
    assert pair.listed() == set(NAMES)
    texts = {name: pair.complete(name, "Once upon a time").choices[0].text for name in NAMES}
    assert texts[NAMES[0]] != texts[NAMES[1]]


def test_a_prompt_goes_to_the_server_that_has_its_blocks_for_that_model(pair: ServedPair) -> None:
    for name in NAMES:
        before = pair.known_blocks(name)
        first = pair.complete(name, f"{name}: {_TEXT}")
        whole = first.usage.prompt_tokens // BLOCK
        until(lambda name=name, count=before + whole: pair.known_blocks(name) >= count)  # type: ignore[misc]
        for _ in range(3):
            usage = pair.complete(name, f"{name}: {_TEXT}").usage
            assert usage.prompt_tokens_details.cached_tokens >= (usage.prompt_tokens - 1) // BLOCK * BLOCK

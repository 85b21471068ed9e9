"""What Kubernetes and Compose are told: it fits their schemas, and names only what the server has."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from icehouse_client.channel import SERVICE as INFERENCE_SERVICE
from icehouse_server.cli.main import app
from icehouse_server.config import SETTINGS, Config, load_config
from icehouse_server.config.load import CLIENT_VARIABLES
from icehouse_server.telemetry.metrics_table import METRICS
from typer.testing import CliRunner

from tests.fixtures.kubernetes.schemas import complaints, compose_complaints
from tests.system.deploy.test_observability import VALUES
from tests.system.deploy.test_running import IMAGES, assert_starts_the_server, instructions, stop_budget_s
from tests.tidy.tree import ROOT

FOLDER = ROOT / "deploy/kubernetes"
RENDERED = ROOT / "tests/fixtures/kubernetes/rendered.yaml"
"""Everything, patches included, as kustomize makes it: `kubectl kustomize deploy/kubernetes`."""
COMPOSE = ROOT / "deploy/compose/compose.yaml"
PAGE = ROOT / "docs/kubernetes.md"

Thing = dict[str, Any]


def read(path: Path) -> list[Thing]:
    return [thing for thing in yaml.safe_load_all(path.read_text(encoding="utf-8")) if thing]


def base() -> list[Thing]:
    (kustomization,) = read(FOLDER / "base/kustomization.yaml")
    return [thing for name in kustomization["resources"] for thing in read(FOLDER / "base" / name)]


THINGS = {"base": base(), "all": read(RENDERED)}
each_way = pytest.mark.parametrize("way", list(THINGS))


def of_kind(way: str, kind: str) -> list[Thing]:
    return [thing for thing in THINGS[way] if thing["kind"] == kind]


def the(way: str, kind: str) -> Thing:
    (thing,) = of_kind(way, kind)
    return thing


def pod_of(way: str) -> Thing:
    spec: Thing = the(way, "StatefulSet")["spec"]["template"]["spec"]
    return spec


def container_of(way: str) -> Thing:
    (container,) = pod_of(way)["containers"]
    found: Thing = container
    return found


def ports_of(way: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(way)["ports"]}


def config_of(way: str) -> Config:
    environ = {entry["name"]: entry["value"] for entry in container_of(way)["env"]}
    return load_config(environ=environ).config


def probes_of(way: str) -> Iterator[Thing]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield container_of(way)[name]


@each_way
def test_every_object_fits_its_schema(way: str) -> None:
    assert {thing["kind"]: complaints(thing) for thing in THINGS[way] if complaints(thing)} == {}


def test_the_schemas_find_what_kubernetes_would_refuse() -> None:
    broken = copy.deepcopy(the("all", "StatefulSet"))
    broken["spec"]["template"]["spec"]["enableServiceLink"] = False
    broken["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["port"] = "grpc"
    assert len(complaints(broken)) == 2
    pool = copy.deepcopy(the("all", "InferencePool"))
    pool["spec"]["appProtocol"] = "h2c"
    del pool["spec"]["selector"]
    assert len(complaints(pool)) == 2
    monitor = copy.deepcopy(the("all", "PodMonitor"))
    monitor["spec"]["podMetricsEndpoints"][0]["every"] = "15s"
    assert len(complaints(monitor)) == 1
    assert compose_complaints({"services": {"a": {"imag": "b"}}}) != []


def test_the_rendered_file_is_what_kustomize_makes() -> None:
    tool = shutil.which("kustomize")
    command = [tool, "build"] if tool else [shutil.which("kubectl"), "kustomize"]
    if command[0] is None:
        pytest.skip("neither kustomize nor kubectl is here")
    done = subprocess.run([*command, str(FOLDER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert made == THINGS["all"], f"run `kubectl kustomize deploy/kubernetes > {RENDERED.relative_to(ROOT)}`"


def test_every_file_is_part_of_a_kustomization() -> None:
    for kustomization in FOLDER.rglob("kustomization.yaml"):
        (said,) = read(kustomization)
        named = [*said.get("resources", ()), *said.get("components", ())]
        named += [patch["path"] for patch in said.get("patches", ())]
        named += [file for made in said.get("configMapGenerator", ()) for file in made["files"]]
        here = {path.name for path in kustomization.parent.iterdir()} - {"kustomization.yaml"}
        assert set(named) == here, kustomization


@each_way
def test_the_environment_is_a_configuration_that_starts(way: str) -> None:
    container, config = container_of(way), config_of(way)
    own = {setting.variable for setting in SETTINGS} | set(CLIENT_VARIABLES)
    named = {entry["name"] for entry in container["env"] if entry["name"].startswith("ICEHOUSE_")}
    assert named <= own
    assert config.server.host == config.telemetry.metrics_host == "0.0.0.0"
    assert ports_of(way) == {"grpc": config.server.port, "metrics": config.telemetry.metrics_port}
    assert config.security.authenticates and config.fleet.worker_enabled
    # Exactly one of them: TLS, or somebody who says that something else protects it.
    assert (
        (config.security.tls_certificate is None) is config.security.allow_insecure_public is (way == "all")
    )
    assert_starts_the_server(["icehouse", *container["args"]])
    assert {entry["name"]: entry["value"] for entry in container["env"]}["ICEHOUSE_CLIENT_ADDRESS"] == (
        f"localhost:{config.server.port}"
    )


@each_way
def test_every_port_is_one_of_the_container(way: str) -> None:
    ports = ports_of(way)
    for service in of_kind(way, "Service"):
        assert [(p["name"], p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [
            ("grpc", ports["grpc"], "grpc")
        ]
    for rule in the(way, "NetworkPolicy")["spec"]["ingress"]:
        assert rule["from"] and {port["port"] for port in rule["ports"]} <= set(ports)
    for probe in probes_of(way):
        if way == "base":
            # The kubelet's gRPC probes speak no TLS.
            assert probe["exec"]["command"] == ["icehouse", "health"] and "grpc" not in probe
        else:
            assert probe["grpc"]["port"] == ports["grpc"] and "exec" not in probe
            assert probe["grpc"].get("service") in (INFERENCE_SERVICE, None)
    if way == "all":
        assert the(way, "InferencePool")["spec"]["targetPorts"] == [{"number": ports["grpc"]}]
        assert the(way, "InferencePool")["spec"]["appProtocol"] == "kubernetes.io/h2c"
        assert [e["port"] for e in the(way, "PodMonitor")["spec"]["podMetricsEndpoints"]] == ["metrics"]


@each_way
def test_selectors_find_the_workers_and_names_agree(way: str) -> None:
    workers = the(way, "StatefulSet")
    labels = workers["spec"]["template"]["metadata"]["labels"].items()
    selectors = [workers["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in of_kind(way, "Service")]
    selectors += [the(way, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
    selectors += [the(way, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    selectors += [c["labelSelector"]["matchLabels"] for c in pod_of(way)["topologySpreadConstraints"]]
    if way == "all":
        selectors += [
            the(way, kind)["spec"]["selector"]["matchLabels"] for kind in ("InferencePool", "PodMonitor")
        ]
        picker = the(way, "InferencePool")["spec"]["endpointPickerRef"]
        assert picker["name"] == the(way, "ConfigMap")["metadata"]["name"]
    assert all(selector and selector.items() <= labels for selector in selectors)
    headless = [
        s["metadata"]["name"] for s in of_kind(way, "Service") if s["spec"].get("clusterIP") == "None"
    ]
    assert headless == [workers["spec"]["serviceName"]] and len(of_kind(way, "Service")) == 2


@each_way
def test_a_worker_may_do_little_and_keeps_what_it_computed(way: str) -> None:
    pod, container = pod_of(way), container_of(way)
    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    (user,) = {dict(instructions(image))["USER"] for image in IMAGES}
    assert pod["securityContext"]["runAsUser"] == int(user) and pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (
        pod["terminationGracePeriodSeconds"]
        > stop_budget_s() + (container["lifecycle"]["preStop"]["sleep"]["seconds"])
    )
    claims = {
        c["metadata"]["name"]: c["spec"] for c in the(way, "StatefulSet")["spec"]["volumeClaimTemplates"]
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == {*claims, *volumes}
    size_gib = int(claims["cache"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    config = config_of(way)
    assert size_gib << 30 >= config.cache.ssd_bytes * 1.5 + config.cache.free_space_floor_bytes
    # What is read from a Secret lies in one, and what is written is on a volume.
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    for variable, value in variables.items():
        if value.startswith("/etc/icehouse/"):
            folder = str(Path(value).parent)
            assert mounts[folder]["readOnly"] and "secret" in volumes[mounts[folder]["name"]], variable
    for variable in ("XDG_CACHE_HOME", "HF_HOME", "TMPDIR"):
        assert any(Path(variables[variable]).is_relative_to(path) for path in mounts), variable


def test_no_image_says_who_may_do_without_what() -> None:
    for image in IMAGES:
        # What a gateway's worker needs is in it.
        assert "fleet" in re.findall(r"'\.\[([a-z,]+)\]'", image.read_text())[0].split(",")
        assert "ICEHOUSE_SECURITY" not in dict(instructions(image))["ENV"]
        assert "insecure" not in " ".join(rest for _, rest in instructions(image)).lower()


def test_the_picker_reads_gauges_that_we_export() -> None:
    settings = yaml.safe_load(the("all", "ConfigMap")["data"]["endpoint-picker.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in settings["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = the("all", "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine["name"]
    known = {metric.prometheus_name for metric in METRICS}
    specs = [value for key, value in engine.items() if key.endswith("Spec") and value]
    assert len(specs) >= 2
    for spec in specs:
        found = re.fullmatch(r"(\w+)(?:{(\w+)=(\w+)})?", spec)
        assert found is not None and found[1] in known, spec
        assert found[2] is None or found[3] in VALUES[found[1], found[2]], spec
    named = [plugin["pluginRef"] for plugin in settings["requestHandler"]["parsers"]]
    named += [
        plugin["pluginRef"] for profile in settings["schedulingProfiles"] for plugin in profile["plugins"]
    ]
    for source in settings["dataLayer"]["sources"]:
        named += [source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])]
    assert set(named) <= set(plugins)


def test_the_compose_file_starts_two_workers_and_shows_the_gateway_to_this_machine_only() -> None:
    (compose,) = read(COMPOSE)
    assert compose_complaints(compose) == []
    services = compose["services"]
    workers = {name: service for name, service in services.items() if name.startswith("worker")}
    assert len(workers) == 2 and set(services) - set(workers) == {"gateway"}
    assert len({worker["volumes"][0].partition(":")[0] for worker in workers.values()}) == 2
    (image,) = [dict(instructions(path)) for path in IMAGES if path.name == "Dockerfile.cpu"]
    baked = dict(word.split("=", 1) for word in image["ENV"].split() if word.startswith("ICEHOUSE_"))
    for worker in workers.values():
        assert "ports" not in worker and worker["networks"] == ["workers"]
        config = load_config(environ={**baked, **worker["environment"]}).config
        assert config.server.host == "0.0.0.0" and config.security.allow_insecure_public
        assert config.fleet.worker_enabled
        assert_starts_the_server(["icehouse", *worker["command"]])
        assert worker["healthcheck"]["test"] == ["CMD", "icehouse", "health"]
        assert int(worker["stop_grace_period"].removesuffix("s")) > stop_budget_s()
        assert Path(COMPOSE.parent, worker["build"]["context"], worker["build"]["dockerfile"]).is_file()
        assert worker["read_only"] and worker["cap_drop"] == ["ALL"]
    gateway = services["gateway"]
    assert (COMPOSE.parent / gateway["build"]["dockerfile"]).is_file()
    urls = [word for word in gateway["command"] if word.startswith("grpc://")]
    assert urls == [f"grpc://{name}:{Config().server.port}" for name in workers]
    (published,) = gateway["ports"]
    assert (
        published.startswith("127.0.0.1:") and f"--port={published.rpartition(':')[2]}" in gateway["command"]
    )


def page_commands() -> list[list[str]]:
    """Return the shell commands of the page, one list of words each."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_pages_commands_name_what_is_there() -> None:
    commands = page_commands()
    assert {words[0] for words in commands} == {"docker", "openssl", "icehouse", "kubectl"}
    assert any(words[:3] == ["kubectl", "apply", "-k"] for words in commands)
    for words in commands:
        for word in words:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), words
        if words[:3] == ["kubectl", "apply", "-k"]:
            assert (ROOT / words[3] / "kustomization.yaml").is_file()
        if words[:3] == ["kubectl", "rollout", "status"]:
            assert words[3] == f"statefulset/{the('base', 'StatefulSet')['metadata']['name']}"
    secrets = {words[4]: set(words[5:]) for words in commands if words[:3] == ["kubectl", "create", "secret"]}
    for volume in pod_of("base")["volumes"]:
        if "secret" in volume:
            files = {
                word.removeprefix("--from-file=").partition("=")[0]
                for word in secrets[volume["secret"]["secretName"]]
            }
            wanted = {
                Path(entry["value"]).name
                for entry in container_of("base")["env"]
                if entry["value"].startswith(f"/etc/icehouse/{volume['name']}/")
            }
            assert wanted <= files


def test_the_pages_certificate_is_for_the_services_and_the_probes(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    (command,) = [words for words in page_commands() if words[0] == "openssl"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    named = set(names.get_values_for_type(x509.DNSName))
    services = {service["metadata"]["name"] for service in of_kind("base", "Service")}
    (headless,) = services & {the("base", "StatefulSet")["spec"]["serviceName"]}
    assert {"localhost", f"*.{headless}", *(services - {headless})} <= named
    serialization.load_pem_private_key((tmp_path / "tls.key").read_bytes(), password=None)


def test_the_pages_token_command_prints_a_token_and_its_line() -> None:
    (command,) = [words for words in page_commands() if words[0] == "icehouse"]
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0 and "tenant=agents" in done.output


def test_the_pages_overlay_is_a_kustomization() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    overlay = yaml.safe_load(text)
    patch = yaml.safe_load(overlay["patches"][0]["patch"])
    workers = the("base", "StatefulSet")
    assert (patch["kind"], patch["metadata"]["name"]) == ("StatefulSet", workers["metadata"]["name"])
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == container_of("base")["name"]
    assert {entry["name"] for entry in container["env"]} <= {setting.variable for setting in SETTINGS}
    assert overlay["images"][0]["name"] == container_of("base")["image"]
    (named,) = overlay["resources"]
    assert (ROOT / "overlay" / named).resolve() == FOLDER / "base"


def test_commands_of_the_program_exist() -> None:
    command: Any = typer.main.get_command(app)
    assert {"health", "serve", "token"} <= set(command.commands)

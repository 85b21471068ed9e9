"""Each check's verdict, and that its advice says what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from icehouse_server.bootstrap.group.leading import known_facts
from icehouse_server.cli import doctor
from icehouse_server.cli.doctor import CheckResult, CheckVerdict
from icehouse_server.config import (
    CacheConfig,
    Config,
    ConnectionConfig,
    EngineConfig,
    GroupConfig,
    HttpConfig,
    ModelConfig,
    SecurityConfig,
    ServerConfig,
)
from icehouse_server.device import Backend, Device, find_device
from icehouse_server.rpc import own_server

from tests.fixtures.models.chat_templates import HEADERS, THINKING, write_family
from tests.fixtures.storage.blocks import make_chain
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.system.mesh.envoy import free_ports
from tests.unit.group.served import serving
from tests.unit.rpc.conftest import running


def with_model(name: object) -> Config:
    return Config(model=ModelConfig(model=str(name)))


def test_a_free_port_is_ok_and_a_taken_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "_TIMEOUT_S", 0.1)  # nobody answers there
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        config = Config(server=ServerConfig(port=port))
        taken.listen()
        check = doctor.check_address(config)
        assert check.verdict is CheckVerdict.FAIL and str(port) in check.detail and "--port" in check.advice
    assert doctor.check_address(config).verdict is CheckVerdict.OK


def test_files_of_credentials_are_read_as_the_server_reads_them(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    config = Config(security=SecurityConfig(token_file=str(tokens)))
    check = doctor.check_access(config)
    assert check.verdict is CheckVerdict.FAIL and "cannot be used: No such file or directory" in check.detail
    tokens.touch(mode=0o600)
    assert doctor.check_access(config).detail == "callers need a token"
    assert doctor.check_access(Config()).detail == "callers need no credentials"


def test_an_adapter_is_looked_for_beside_its_model(tmp_path: Path) -> None:
    missing = Config(model=ModelConfig(adapter_path=str(tmp_path / "missing")))
    check = doctor.check_model(missing)
    assert check.verdict is CheckVerdict.FAIL and "missing/adapter_config.json cannot be read" in check.detail


def test_a_group_is_checked_from_each_of_its_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    assert doctor.check_group(Config()).verdict is CheckVerdict.OK
    assert doctor.check_group(Config(group=GroupConfig(hosts=str(hosts)))).verdict is CheckVerdict.FAIL
    hosts.write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    address = f"127.0.0.1:{free_ports(1)[0]}"
    first, second = ranks_of(hosts, address)
    assert doctor.check_group(first).detail == f"rank 0 of 2, 127.0.0.1; the others connect to {address}"
    away = doctor.check_group(second)
    assert away.verdict is CheckVerdict.WARN and address in away.detail and "rank 0" in away.detail
    hosts.write_text('[["127.0.0.1:1"], ["nowhere.invalid:2"]]')
    unknown = doctor.check_group(second)
    assert unknown.verdict is CheckVerdict.FAIL and "nowhere.invalid" in unknown.detail
    hosts.write_text('[["127.0.0.1:1"], ["192.0.2.7:2"]]')
    elsewhere = doctor.check_group(second)
    assert elsewhere.verdict is CheckVerdict.FAIL
    assert "this machine, rank 1, does not have the address 192.0.2.7" in elsewhere.detail


def ranks_of(hosts: Path, control: str) -> tuple[Config, Config]:
    """Return the settings of both ranks of a group."""
    first, second = (
        Config(group=GroupConfig(hosts=str(hosts), rank=rank, control=control)) for rank in (0, 1)
    )
    return first, second


def test_a_rank_is_compared_with_rank_0_and_the_link_measured(tmp_path: Path) -> None:
    hosts, clock = tmp_path / "hosts.json", ManualClock()
    hosts.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    facts = known_facts(Config(), find_device())
    with serving(facts=facts) as served:
        _, second = ranks_of(hosts, served.control)
        fine = doctor.check_group(second)
        assert fine.verdict is CheckVerdict.OK
        assert "/s with messages of 512 KiB" in fine.detail and "clocks agree within" in fine.detail
        other = dataclasses.replace(second, cache=CacheConfig(block_token_count=64))
        misfit = doctor.check_group(other)
        assert misfit.verdict is CheckVerdict.FAIL and "cache.block_token_count is 64 there" in misfit.detail
        hosts.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5002"]]')
        assert "the file of hosts is 127.0.0.1:5000 127.0.0.1:5002 there" in doctor.check_group(second).detail
        hosts.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    with serving(facts=facts, clock=clock) as served:
        _, second = ranks_of(hosts, served.control)
        late = doctor.check_group(second)
        assert late.verdict is CheckVerdict.WARN
        assert "its clock is" in late.detail and "behind this one" in late.detail and "NTP" in late.advice
    with serving(facts={**facts, "the kind of device": "another"}) as served:
        _, second = ranks_of(hosts, served.control)
        assert "the kind of device is" in doctor.check_group(second).detail


@pytest.mark.parametrize("ready", [True, False])
async def test_a_server_of_ours_has_the_port_and_the_cache_directory(tmp_path: Path, ready: bool) -> None:
    """`systemctl start icehouse && icehouse doctor` ends well."""
    with StorageThread(tmp_path / "cache"):
        async with running(ready=ready) as served:
            port = int(served.server.address.rpartition(":")[2])
            config = Config(
                server=ServerConfig(port=port),
                cache=CacheConfig(directory=str(tmp_path / "cache"), ssd_bytes=1 << 30),
            )
            address = await asyncio.to_thread(doctor.check_address, config)
            cache = await asyncio.to_thread(doctor.check_cache, config)
    assert address.verdict is (CheckVerdict.OK if ready else CheckVerdict.WARN)
    assert "your server" in address.detail
    assert cache.verdict is CheckVerdict.OK and f"process {os.getpid()}" in cache.detail


class _Answers(BaseHTTPRequestHandler):
    """An HTTP server of which nobody knows whose it is."""

    answer = b"{}"

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output for the test."""


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (b'{"status": "NOT_SERVING"}', CheckVerdict.OK),
        (b"[1]", CheckVerdict.FAIL),
        (b"<p>", CheckVerdict.FAIL),
    ],
)
def test_the_http_port_is_free_ours_or_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, verdict: CheckVerdict
) -> None:
    monkeypatch.setattr(_Answers, "answer", answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as taken:
        config = Config(http=HttpConfig(port=taken.server_port))
        serving = threading.Thread(target=taken.serve_forever)
        serving.start()
        try:
            check = doctor.check_http(config)
        finally:
            taken.shutdown()
            serving.join()
    assert check.verdict is verdict and str(config.http.port) in check.detail
    assert doctor.check_http(config).verdict is CheckVerdict.OK
    assert "--http-port" in doctor.check_http(Config()).detail


async def test_a_socket_of_ours_and_one_of_somebody_else(tmp_path: Path) -> None:
    config = Config(server=ServerConfig(uds=str(tmp_path / "s")))
    async with running(uds=str(tmp_path / "s")):
        assert (await asyncio.to_thread(doctor.check_address, config)).verdict is CheckVerdict.OK
    (tmp_path / "s").touch()
    assert doctor.check_address(config).verdict is CheckVerdict.FAIL


def test_a_pipe_in_the_place_of_the_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    config = Config(cache=CacheConfig(directory=str(tmp_path), ssd_bytes=1 << 30))
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "lock")
    assert "process" not in doctor.check_cache(config).detail


def test_more_connections_than_files_may_be_open_are_told() -> None:
    assert doctor.check_files(Config()).verdict is CheckVerdict.OK
    check = doctor.check_files(Config(connection=ConnectionConfig(connection_limit=1 << 40)))
    assert check.verdict is CheckVerdict.WARN and "--connection-limit" in check.advice


def test_a_socket_needs_a_folder(tmp_path: Path) -> None:
    good = Config(server=ServerConfig(uds=str(tmp_path / "a.sock")))
    bad = Config(server=ServerConfig(uds=str(tmp_path / "absent" / "a.sock")))
    assert doctor.check_address(good).verdict is CheckVerdict.OK
    assert doctor.check_address(bad).verdict is CheckVerdict.FAIL


def test_a_model_folder_needs_its_files(tmp_path: Path) -> None:
    assert "mlx_lm.convert" in doctor.check_model(with_model(tmp_path)).advice
    (tmp_path / "config.json").write_text("{}")
    assert "download" in doctor.check_model(with_model(tmp_path)).advice
    (tmp_path / "model.safetensors").touch()
    nameless = doctor.check_model(with_model(tmp_path))
    assert nameless.verdict is CheckVerdict.FAIL and "no model_type" in nameless.detail
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert doctor.check_model(with_model(tmp_path)).verdict is CheckVerdict.OK
    for absent in ("./absent", "~no-such-user/model"):
        assert doctor.check_model(with_model(absent)).verdict is CheckVerdict.FAIL
    assert doctor.check_model(with_model("org/name")).verdict is CheckVerdict.OK


def test_a_folder_of_nobodys_home_is_none() -> None:
    nobodys = with_model("~no-such-user/model")
    assert "once the model is downloaded" in doctor.check_replies(nobodys).detail
    assert doctor.check_memory(nobodys).verdict is not CheckVerdict.FAIL


def test_weights_beyond_the_memory_fail(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 2000)
    config = dataclasses.replace(with_model(tmp_path), engine=EngineConfig(memory_limit_bytes=1000))
    check = doctor.check_memory(config)
    assert check.verdict is CheckVerdict.FAIL and "serve a smaller model" in check.advice
    assert doctor.check_memory(with_model(tmp_path)).verdict is not CheckVerdict.FAIL


def test_how_replies_are_read_is_told_with_what_it_was_found_by(tmp_path: Path) -> None:
    assert doctor.check_replies(with_model("org/name")).verdict is CheckVerdict.OK
    folder = write_family(tmp_path / "thinking", THINKING)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    check = doctor.check_replies(with_model(folder))
    assert (
        check.verdict is CheckVerdict.OK
        and "calls as hermes: the chat template writes calls so" in check.detail
    )
    strange = dataclasses.replace(
        HEADERS, template="{{ messages[0].content }}", tokens=(("<qzthink>", True),)
    )
    folder = write_family(tmp_path / "strange", strange)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    check = doctor.check_replies(with_model(folder))
    assert check.verdict is CheckVerdict.WARN and "<qzthink>" in check.advice
    (folder / "tokenizer.json").write_text("{")
    assert doctor.check_replies(with_model(folder)).verdict is CheckVerdict.FAIL


@pytest.mark.parametrize("missing", ["mlx_vlm", "PIL"])
def test_a_model_that_sees_needs_the_extra(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, object] = {"mlx_vlm": object(), "PIL": object()}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    (tmp_path / "model.safetensors").touch()
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "smolvlm", "vision_config": {}}')
    assert doctor.check_model(with_model(tmp_path)).verdict is CheckVerdict.OK
    del found[missing]
    whole = doctor.check_model(with_model(tmp_path))
    assert whole.verdict is CheckVerdict.FAIL and "pip install -e '.[vision]'" in whole.advice
    config.write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    images = doctor.check_model(with_model(tmp_path))
    assert images.verdict is CheckVerdict.WARN and "pip install -e '.[vision]'" in images.advice


@pytest.mark.parametrize("is_built", [True, False])
def test_a_demo_model_is_here_or_can_be_had(monkeypatch: pytest.MonkeyPatch, is_built: bool) -> None:
    monkeypatch.setattr(doctor, "is_built", lambda model: is_built)
    check = doctor.check_model(with_model("demo-gemma"))
    assert check.verdict is CheckVerdict.OK and ("built at the first start" in check.detail) is not is_built


def test_missing_openblas_is_a_warning_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(doctor, "find_openblas", lambda: None)
    check = doctor.check_blas(Config())
    assert check.verdict is CheckVerdict.WARN and "libopenblas0-pthread" in check.advice
    monkeypatch.setattr(doctor, "find_openblas", lambda: Path("/lib/libopenblas.so.0"))
    monkeypatch.setattr(doctor, "openblas_loaded", lambda: False)
    assert doctor.check_blas(Config()).verdict is CheckVerdict.OK
    assert doctor.check_blas(Config(engine=EngineConfig(preload_enabled=False))).verdict is CheckVerdict.WARN


@pytest.mark.parametrize(
    ("looks_like_cpu", "backend"),
    [
        pytest.param(False, Backend.METAL, id="a Mac"),
        pytest.param(False, Backend.CPU, id="a Mac without Metal, whose system has a BLAS"),
        pytest.param(True, Backend.CUDA, id="MLX built with CUDA from source"),
    ],
)
def test_a_gpu_needs_no_openblas(
    looks_like_cpu: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "runs_on_cpu", lambda: looks_like_cpu)
    monkeypatch.setattr(doctor, "find_device", lambda: Device("X", backend))
    monkeypatch.setattr(doctor, "find_openblas", lambda: None)
    assert doctor.check_blas(Config()).verdict is CheckVerdict.OK


def test_a_mac_without_metal_is_told_about_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(doctor, "find_device", lambda: Device("M4", Backend.CPU))
    check = doctor.check_device(Config())
    assert check.verdict is CheckVerdict.WARN and "Dockerfile.macos-notes" in check.advice


def test_mlx_that_cannot_be_loaded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Device:
        raise ImportError("libmlx.so: not found")

    monkeypatch.setattr(doctor, "find_device", broken)
    check = doctor.check_device(Config())
    assert check.verdict is CheckVerdict.FAIL and "libmlx.so" in check.detail


def test_a_small_disk_is_a_warning_and_a_file_in_the_way_fails(tmp_path: Path) -> None:
    huge = CacheConfig(directory=str(tmp_path / "kv"), ssd_bytes=1 << 60)
    assert doctor.check_disk(Config(cache=huge)).verdict is CheckVerdict.WARN
    (tmp_path / "file").touch()
    inside_a_file = CacheConfig(directory=str(tmp_path / "file" / "kv"))
    assert doctor.check_disk(Config(cache=inside_a_file)).verdict is CheckVerdict.FAIL
    off = dataclasses.replace(huge, ssd_enabled=False)
    assert doctor.check_disk(Config(cache=off)).verdict is CheckVerdict.OK


def test_a_cache_directory_tells_its_owner_and_how_it_was_left(tmp_path: Path) -> None:
    config = Config(cache=CacheConfig(directory=str(tmp_path / "cache"), ssd_bytes=1 << 30))
    assert "created at the first start" in doctor.check_cache(config).detail
    with StorageThread(tmp_path / "cache") as served:
        served.spill(*make_chain(2))
        check = doctor.check_cache(config)
        # Of a server that listens elsewhere than these settings say: nothing is wrong with it.
        assert check.verdict is CheckVerdict.WARN and f"process {os.getpid()}" in check.detail
        assert "its own --cache-directory" in check.advice
    check = doctor.check_cache(config)
    assert check.verdict is CheckVerdict.OK and "of 1 GiB used" in check.detail
    (tmp_path / "cache" / "clean.json").unlink()
    check = doctor.check_cache(config)
    assert check.verdict is CheckVerdict.WARN and "not closed cleanly" in check.detail
    (tmp_path / "cache" / "quarantine" / "a").touch()
    assert "1 damaged files set aside" in doctor.check_cache(config).detail
    (tmp_path / "cache").chmod(0o755)
    assert "chmod 700" in doctor.check_cache(config).advice


def test_without_an_ssd_tier_there_is_no_directory_to_tell_of(tmp_path: Path) -> None:
    for off in (CacheConfig(enabled=False), CacheConfig(ssd_enabled=False)):
        assert doctor.check_cache(Config(cache=off)).detail == "the SSD tier is off"


def test_one_failure_makes_the_whole_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "a": CheckResult(CheckVerdict.OK, "fine"),
        "b": CheckResult(CheckVerdict.WARN, "hm [x]", "do this"),
    }
    monkeypatch.setattr(doctor, "CHECKS", {n: lambda config, a=a: a for n, a in answers.items()})
    assert doctor.doctor(Config())
    shown = capsys.readouterr().out
    assert "hm [x]" in shown and "do this" in shown
    monkeypatch.setattr(
        doctor, "CHECKS", {"c": lambda config: CheckResult(CheckVerdict.FAIL, "bad", "mend it")}
    )
    assert not doctor.doctor(Config())

"""`icehouse doctor`: is this machine ready to serve? One line per question, with what to do."""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import functools
import importlib.metadata
import os
import platform
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from icehouse_client.cli.console import expanded, out, print_json
from icehouse_client.cli.figures import size_text
from rich.markup import escape

from icehouse_server.bootstrap.encryption import find_cipher
from icehouse_server.bootstrap.group.leading import find_membership, known_facts, tls_of
from icehouse_server.bootstrap.imports.openblas import find_openblas, openblas_loaded, runs_on_cpu
from icehouse_server.bootstrap.machine import allow_open_files, memory_limit, wanted_file_count, weights_dtype
from icehouse_server.bootstrap.model_source import check_adapters, find_reply_format, find_sight
from icehouse_server.bootstrap.room import MachineResources, existing_folder, folder_size
from icehouse_server.clock import SystemClock
from icehouse_server.config import Config
from icehouse_server.demo.build import is_built
from icehouse_server.demo.models import DEMO_MODELS
from icehouse_server.device import Device, find_device
from icehouse_server.domain.model import Sight
from icehouse_server.errors import IcehouseError, ModelError, Reason, StartError, extra_command
from icehouse_server.group.channel import ChannelBroken
from icehouse_server.group.link_check import MESSAGE_BYTES, check_link
from icehouse_server.group.membership import Membership
from icehouse_server.rpc.access.credentials import check_secrets
from icehouse_server.rpc.listen_address import check_free, listen_for_http
from icehouse_server.rpc.own_server import OwnServer, find_own_server, is_own_http
from icehouse_server.storage.files import Files, read_text
from icehouse_server.storage.store_paths import StorePaths


class CheckVerdict(enum.StrEnum):
    """How a check ended. FAIL means that `icehouse serve` would not start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found; `advice` says what to do unless all is well."""

    verdict: CheckVerdict
    detail: str
    advice: str = ""


_ok = functools.partial(CheckResult, CheckVerdict.OK)
_warn = functools.partial(CheckResult, CheckVerdict.WARN)
_fail = functools.partial(CheckResult, CheckVerdict.FAIL)


def _refused(error: IcehouseError) -> CheckResult:
    """Return why a server would not start; its own message ends with what to do."""
    what, _, advice = error.message.partition("; ")
    return _fail(what, advice)


_SKEW_LIMIT_S = 1.0
"""Largest clock difference between two machines of a group."""
_MEMORY_WANTED_BYTES = 4 << 30
_PACKAGES = ("mlx", "mlx-lm", "grpcio", "safetensors", "sqlite-utils")


def doctor(config: Config, *, as_json: bool = False) -> bool:
    """Print every check; return whether `icehouse serve` could start with this configuration."""
    first, *others = [config.of_model(model) for model in config.models] or [config]
    answers = {name: check(first) for name, check in CHECKS.items()}
    answers |= {f"model {number}": check_model(each) for number, each in enumerate(others, 2)}
    is_ready = all(answer.verdict is not CheckVerdict.FAIL for answer in answers.values())
    if as_json:
        print_json([{"name": name, **dataclasses.asdict(answer)} for name, answer in answers.items()])
        return is_ready
    styles = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "bold red"}
    for name, answer in answers.items():
        out.print(f"[{styles[answer.verdict]}]{answer.verdict:4}[/]  {name:9} {escape(answer.detail)}")
        if answer.advice:
            out.print(f"      {'':9} -> {escape(answer.advice)}")
    return is_ready


def check_versions(config: Config) -> CheckResult:
    """Python and the packages that matter."""
    found = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    missing = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    detail = ", ".join(found)
    if missing:
        advice = f"missing {', '.join(missing)}; reinstall Icehouse, see docs/start.md"
        return _fail(detail, advice)
    return _ok(detail)


def check_device(config: Config) -> CheckResult:
    """Can MLX be loaded, and what does it run on?"""
    try:
        device = find_device()
    except ImportError as error:
        return _fail(f"MLX cannot be loaded: {error}", "pip install --force-reinstall mlx")
    kind = "GPU" if device.is_gpu else "CPU"
    memory = f", {size_text(device.memory_bytes)}" if device.memory_bytes else ""
    if sys.platform == "darwin" and not device.is_gpu:
        advice = "Metal is not visible; run natively, not in a container (see Dockerfile.macos-notes)"
        return _warn(f"{kind}: {device.name}{memory}", advice)
    return _ok(f"{kind}: {device.name}{memory}")


def check_memory(config: Config) -> CheckResult:
    """Is there enough memory for a model and its KV?"""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    detail = f"{size_text(total)} of main memory"
    name = config.model.model
    folder = DEMO_MODELS[name].folder if name in DEMO_MODELS else expanded(name)
    try:
        device = _device()
        limit_bytes = memory_limit(config.engine.memory_limit_bytes, device) if device else sys.maxsize
        dtype = weights_dtype(config.model, device) if device else ""
        MachineResources(memory_limit_bytes=limit_bytes).check(name, folder_size(folder, dtype=dtype))
    except StartError as error:
        return _refused(error)
    if total < _MEMORY_WANTED_BYTES:
        advice = (
            f"the demo model needs about {size_text(_MEMORY_WANTED_BYTES)}; shorter prompts will still run"
        )
        return _warn(detail, advice)
    return _ok(detail)


def _device() -> Device | None:
    try:
        return find_device()
    except ImportError:  # another check reports that
        return None


def check_files(config: Config) -> CheckResult:
    """Does the system allow as many open connections as the settings?"""
    wanted = wanted_file_count(connection_limit=config.connection.connection_limit)
    allowed = allow_open_files(wanted)
    detail = f"at most {allowed} open files and sockets, {wanted} needed"
    if allowed < wanted:
        advice = "raise the hard limit (ulimit -Hn, LimitNOFILE=) or lower --connection-limit"
        return _warn(detail, advice)
    return _ok(detail)


def check_blas(config: Config) -> CheckResult:
    """Linux on the CPU is some 6 times faster at prefill with OpenBLAS."""
    device = _device()
    if not runs_on_cpu() or (device is not None and device.is_gpu):
        return _ok("not needed: MLX has a fast matrix multiplication here")
    library = find_openblas()
    if library is None:
        advice = "install OpenBLAS for about 6 times faster prefill: apt-get install libopenblas0-pthread"
        return _warn("OpenBLAS is not installed; MLX uses its slow reference BLAS", advice)
    if not config.engine.preload_enabled and not openblas_loaded():
        return _warn(f"{library}, but preloading is off", "drop --no-preload")
    return _ok(f"{library}, preloaded by serve and demo; weights load as float32")


def check_model(config: Config) -> CheckResult:
    """Is the model there, or can it be fetched?"""
    try:
        check_adapters(config.model)
    except ModelError as error:
        return _fail(error.message, "name a folder that mlx_lm.lora made")
    name = config.model.model
    if name in DEMO_MODELS:
        demo = DEMO_MODELS[name]
        is_here = (
            f"in {demo.folder}" if is_built(demo) else "downloaded with pip and built at the first start"
        )
        return _ok(f"{name}, {is_here}")
    folder = expanded(name)
    if not folder.is_dir():
        if "/" in name and not name.startswith((".", "/", "~")):
            return _ok(f"{name} will be looked up on the hub at the start")
        return _fail(f"no folder at {name}", "name a folder with an MLX model, or demo")
    if not (folder / "config.json").is_file():
        return _fail(f"{folder} has no config.json", "convert it with mlx_lm.convert")
    if not any(folder.glob("model*.safetensors")):
        return _fail(f"{folder} has no model*.safetensors", "complete the download")
    return _check_sight(folder)


def _check_sight(folder: Path) -> CheckResult:
    """Is the package that reads images installed for a model that sees?"""
    try:
        sight = find_sight(folder)
    except ModelError as error:
        return _fail(error.message, "convert it with mlx_lm.convert")
    if sight is Sight.UNREADABLE:
        detail = f"{folder} has a vision tower and needs mlx-vlm, which is not installed"
        return _fail(detail, extra_command("vision"))
    if sight is Sight.TEXT_ONLY:
        detail = f"{folder}; mlx-vlm is not installed: text will be served, images refused"
        return _warn(detail, extra_command("vision"))
    return _ok(str(folder))


def check_replies(config: Config) -> CheckResult:
    """How would reasoning and calls in replies be parsed, and how is that known?"""
    folder = expanded(config.model.model)
    if not (folder / "config.json").is_file():
        return _ok("known once the model is downloaded")
    try:
        format = find_reply_format(folder)
    except ModelError as error:
        return _fail(error.message, "complete the download")
    if format is None:
        return _ok("the model has no chat template")
    detail = "; ".join(format.evidence) or "text only: reasoning and tool calls are not recognized"
    if format.unread_markers:
        advice = f"{' '.join(format.unread_markers)} are not recognized and may appear in replies"
        return _warn(detail, advice)
    return _ok(detail)


def check_address(config: Config) -> CheckResult:
    """Is the port free, or does our server have it?"""
    try:
        check_free(config.server)
    except StartError as error:
        return _check_listener(config, error)
    if config.server.uds is not None:
        folder = Path(config.server.uds).parent
        if folder.is_dir() and os.access(folder, os.W_OK):
            return _ok(f"unix:{config.server.uds}")
        return _fail(f"cannot create a socket in {folder}", "choose another --uds")
    return _ok(f"{_shown_address(config)} is free")


def _check_listener(config: Config, taken: StartError) -> CheckResult:
    """Is our server listening there?"""
    found, address = find_own_server(config.server, config.security), _shown_address(config)
    if found is OwnServer.RUNNING:
        return _ok(f"{address}: your server is running")
    if found is OwnServer.NOT_SERVING:
        advice = "its model may still be loading; icehouse health shows when it is serving"
        return _warn(f"{address}: your server is not serving", advice)
    advice = "stop what listens there, or choose another --port (0 picks a free one) or --uds"
    return _fail(taken.message.partition(";")[0], advice)


def check_access(config: Config) -> CheckResult:
    """Can the token and certificate files be used?"""
    security = config.security
    try:
        check_secrets(security)
    except StartError as error:
        return _refused(error)
    asked = [
        what
        for what, file in (("a token", security.token_file), ("a certificate", security.tls_client_ca))
        if file
    ]
    return _ok(f"callers need {' and '.join(asked) or 'no credentials'}")


def check_http(config: Config) -> CheckResult:
    """Is the port of the HTTP APIs free, or does our server have it?"""
    http = config.http
    if http.port is None:
        return _ok("off; --http-port 8000 offers OpenAI's and Anthropic's APIs")
    address = f"{http.host}:{http.port}"
    try:
        listen_for_http(http, config.security).close()
    except StartError as error:
        if error.reason is Reason.ADDRESS_IN_USE and is_own_http(http, config.security):
            return _ok(f"{address}: your server answers there")
        return _refused(error)
    return _ok(f"{address} is free")


def check_group(config: Config) -> CheckResult:
    """Are the other machines of the group there?"""
    try:
        membership = find_membership(config)
    except IcehouseError as error:
        return _refused(error)
    if membership is None:
        return _ok("none; --group serves one model on several machines")
    hosts = [membership.host(rank).strip("[]") for rank in range(membership.world)]
    for rank, host in enumerate(hosts):
        try:
            family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            if rank == membership.rank:
                with socket.socket(family, kind) as own:
                    own.bind(address)
        except socket.gaierror:
            return _fail(f"cannot resolve the address {host} of rank {rank}", "correct the file of hosts")
        except OSError as error:
            return _fail(
                f"this machine, rank {rank}, does not have the address {host}: {error}",
                "correct the file of hosts, or --group-rank",
            )
    shown = f"rank {membership.rank} of {membership.world}, {hosts[membership.rank]}"
    if membership.rank == 0:
        return _ok(f"{shown}; the others connect to {membership.control}")
    return _check_link(config, membership, shown)


def _check_link(config: Config, membership: Membership, shown: str) -> CheckResult:
    """Does rank 0 have the same versions, settings and time, and how fast is the connection?"""
    device = _device()
    facts = {} if device is None else known_facts(config, device)
    try:
        link = check_link(membership, facts, tls=tls_of(config.security), clock=SystemClock())
    except ChannelBroken as error:
        return _warn(
            f"{shown}; rank 0 does not answer at {membership.control}: {error}",
            "start it, and check whether a firewall blocks this machine",
        )
    except StartError as error:
        return _refused(error)
    if link.difference:
        return _fail(f"{shown} differs from rank 0: {link.difference}", "make both the same")
    shown += (
        f"; rank 0 answers at {membership.control} in {1000 * link.round_trip_s:.2f} ms, "
        f"{size_text(round(link.bytes_per_s))}/s with messages of {size_text(MESSAGE_BYTES)} both ways on "
        "the group's own channel (MLX's connections are not measured)"
    )
    if not abs(link.skew_s) <= _SKEW_LIMIT_S + link.round_trip_s:
        ahead = "ahead of" if link.skew_s > 0 else "behind"
        return _warn(
            f"{shown}; its clock is {abs(link.skew_s):.1f} s {ahead} this one",
            "synchronize both with NTP: expiring pins and log lines use each machine's own clock",
        )
    return _ok(f"{shown}; clocks agree within {1000 * (abs(link.skew_s) + link.round_trip_s / 2):.1f} ms")


def _shown_address(config: Config) -> str:
    server = config.server
    return f"{server.host}:{server.port}" if server.uds is None else f"unix:{server.uds}"


def check_disk(config: Config) -> CheckResult:
    """Is there space for the SSD tier, and may we write there?"""
    if not config.cache.has_ssd:
        return _ok("the SSD tier is off")
    folder = config.cache.block_directory
    existing = existing_folder(folder)
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        return _fail(f"{existing} is not writable", "choose another --cache-directory")
    free_bytes = shutil.disk_usage(existing).free
    wanted_bytes = config.cache.ssd_bytes + config.cache.free_space_floor_bytes
    detail = f"{size_text(free_bytes)} free, SSD tier up to {size_text(config.cache.ssd_bytes)}"
    if free_bytes + _size_bytes(folder) < wanted_bytes:
        advice = "the SSD tier will be smaller than its limit; lower --ssd-bytes or free some space"
        return _warn(detail, advice)
    return _ok(detail)


def check_cache(config: Config) -> CheckResult:
    """Who uses the cache directory, how full is it, was it closed cleanly, is anything in it damaged?"""
    folder = config.cache.block_directory
    if not config.cache.has_ssd:
        return _ok("the SSD tier is off")
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return _ok(f"{folder}: created at the first start")
    store = StorePaths(str(folder))
    used = f"{size_text(_size_bytes(folder))} of {size_text(config.cache.ssd_bytes)} used"
    owner = _owner(store)
    if owner is not None and find_own_server(config.server, config.security) is not OwnServer.ABSENT:
        used += f", in use by the running server (process {owner})"
    elif owner is not None:
        # Only our servers take that lock, so one of them runs and listens elsewhere than these settings say.
        detail = (
            f"{folder}: {used}, in use by process {owner}, which does not listen at {_shown_address(config)}"
        )
        advice = "give its --port to check that one; another server needs its own --cache-directory"
        return _warn(detail, advice)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        advice = f"its files contain prompts: chmod 700 {folder}"
        return _warn(f"{folder}: {used}, open to other users", advice)
    damaged_count = _entry_count(store.quarantine)
    if damaged_count:
        advice = "they are never used but take up space; icehouse cache purge --all removes everything"
        return _warn(f"{folder}: {used}, {damaged_count} damaged files set aside", advice)
    if owner is None and os.path.exists(store.manifest) and not os.path.exists(store.clean_mark):
        advice = "harmless: the next start checks every file; icehouse cache check does so now"
        return _warn(f"{folder}: {used}, not closed cleanly last time", advice)
    return _ok(f"{folder}: {used}")


def check_encryption(config: Config) -> CheckResult:
    """Are blocks encrypted, and does the key open the existing ones?"""
    cache = config.cache
    if not cache.has_ssd:
        return _ok("the SSD tier is off")
    if not cache.is_encrypted:
        return _ok("blocks are not encrypted; only their owner can read them")
    folder = cache.block_directory
    try:
        cipher = find_cipher(cache, Files())
    except StartError as error:
        return _fail(error.message, "see docs/at-rest.md")
    if cipher is None and os.path.exists(StorePaths(str(folder)).data_keys):
        advice = "the cache would start empty beside blocks of another key; did you mean that key?"
        return _warn(f"the key opens no data key in {folder}", advice)
    key = f"data key {cipher.key_id.hex()}" if cipher else "the first start creates its data key"
    return _ok(f"blocks are encrypted (AES-256-GCM), {key}")


def _owner(store: StorePaths) -> str | None:
    """Return the process id that the lock's holder wrote down; None if nobody holds the lock."""
    files = Files()
    try:
        lock = files.open(store.lock)
        try:
            # A shared lock, released at once, so that two doctors do not disturb each other.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_text(files, store.lock, limit_bytes=64).strip() or "unknown"
        finally:
            files.close(lock)
    except OSError:
        return None
    return None


def _size_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`; files that vanish meanwhile do not count."""
    total_bytes = 0
    for folder_path, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(folder_path, name)).st_size
            except FileNotFoundError:
                continue
    return total_bytes


def _entry_count(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


CHECKS: Mapping[str, Callable[[Config], CheckResult]] = {
    "versions": check_versions,
    "device": check_device,
    "memory": check_memory,
    "files": check_files,
    "blas": check_blas,
    "model": check_model,
    "replies": check_replies,
    "address": check_address,
    "access": check_access,
    "http": check_http,
    "group": check_group,
    "disk": check_disk,
    "cache": check_cache,
    "at rest": check_encryption,
}

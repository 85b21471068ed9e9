"""`icehouse key new | change`: the key that blocks on SSD are encrypted with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from icehouse_client.cli.console import AsJson, out, show
from icehouse_client.cli.main import CommandLine

from icehouse_server.bootstrap.encryption import key_of_command, key_of_file, new_key_text, read_master_key
from icehouse_server.config import load_config
from icehouse_server.errors import ConfigError, Reason, StartError, StorageError

app = CommandLine()


@app.command()
def new(as_json: AsJson = False) -> None:
    """Print a new random key, to keep in a private file or a keychain."""
    made = new_key_text()
    show({"key": made}, made, as_json=as_json)


@app.command()
def change(
    new_key_file: Annotated[Path | None, typer.Option(help="File with the new key.")] = None,
    new_key_command: Annotated[str | None, typer.Option(help="Command that prints the new key.")] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--cache-directory", help="The SSD tier's folder (default: the configured one)."),
    ] = None,
    key_file: Annotated[
        str | None, typer.Option("--cache-key-file", help="File with the current key.")
    ] = None,
    key_command: Annotated[
        str | None, typer.Option("--cache-key-command", help="Command that prints the current key.")
    ] = None,
) -> None:
    """Replace the cache's configured key with a new one. Blocks are not rewritten and stay readable."""
    from icehouse_server.bootstrap.encryption import encryption
    from icehouse_server.storage.files import Files
    from icehouse_server.storage.local.directory.lock import take_lock
    from icehouse_server.storage.store_paths import StorePaths

    new_key = _new_key(new_key_file, new_key_command)
    flags = {"cache.directory": directory, "cache.key_file": key_file, "cache.key_command": key_command}
    given = {key: str(value) for key, value in flags.items() if value is not None}
    cache = load_config(flags=given).config.cache
    old_key = read_master_key(cache)
    if old_key is None:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            "no key is configured; give the current one with --cache-key-file or --cache-key-command",
            field="cache.key_file",
        )
    data_keys = encryption()
    files, paths = Files(), StorePaths(str(cache.block_directory.absolute()))
    try:
        lock = take_lock(files, paths)
        try:
            count = data_keys.rewrap(files, paths, old_master_key=old_key, new_master_key=new_key)
        finally:
            files.close(lock)
    except OSError as error:
        raise StorageError(
            Reason.STORE_UNUSABLE,
            f"the key of {paths.root} was not changed: {error}; the current key still opens the cache",
            metadata={"directory": paths.root},
        ) from error
    if count == 0:
        raise StartError(
            Reason.CACHE_KEY_INVALID,
            f"the current key opens no data key in {paths.root}; nothing was changed",
            metadata={"directory": paths.root},
        )
    out.print(f"the new key opens {paths.root} now ({count} data keys); configure it before the next start")


def _new_key(file: Path | None, command: str | None) -> bytes:
    if file is not None and command is None:
        return key_of_file(file)
    if command is not None and file is None:
        return key_of_command(command)
    raise typer.BadParameter("give the new key with either --new-key-file or --new-key-command")

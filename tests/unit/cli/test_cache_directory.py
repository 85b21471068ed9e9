"""`icehouse cache …` on a directory, with and without a server on it."""

from __future__ import annotations

import json
import os

import pytest
from icehouse_server.cli.cache_directory import app
from icehouse_server.errors import NotFound, Reason, StartError
from icehouse_server.storage.storage_settings import Codec
from typer.testing import CliRunner

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.storage_thread import StorageThread


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.fixture
def directory(tmp_path):
    with StorageThread(tmp_path / "cache") as served:
        served.spill(*make_chain(3, checkpoint=True))
    return str(tmp_path / "cache")


def test_ls_shows_blocks_newest_use_first(directory):
    code, text = run("ls", "--cache-directory", directory, "--json")
    assert code == 0
    assert [item["hash"] for item in json.loads(text)] == [
        block.header.hash.hex() for block in reversed(make_chain(3))
    ]
    code, text = run("ls", "--cache-directory", directory, "--limit", "1")
    assert code == 0 and "1 of 3 blocks" in text


def test_blocks_in_byte_planes_are_inspected_and_verified(tmp_path):
    block = make_block(row_width=64, has_values=True)
    directory = str(tmp_path / "cache")
    with StorageThread(directory, codec=Codec.PLANES) as served:
        served.spill(block)
    name = block.header.hash.hex()
    kv = json.loads(run("inspect", name, "--cache-directory", directory, "--json")[1])["regions"][0]
    assert kv["stored_bytes"] < kv["size_bytes"] == block.regions[0].size_bytes
    assert "in byte planes of" in run("inspect", name, "--cache-directory", directory)[1]
    assert run("verify", "--cache-directory", directory)[0] == 0
    path = StorageThread(directory).path(block)
    with open(path, "r+b") as file:
        file.seek(-40, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-40, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert run("verify", "--cache-directory", directory)[0] == 1


def test_ls_of_a_directory_that_is_not_there(tmp_path):
    code, text = run("ls", "--cache-directory", str(tmp_path / "none"), "--json")
    assert (code, json.loads(text)) == (0, [])
    assert not (tmp_path / "none").exists()


def test_inspect_names_regions_and_keeps_the_prompt_to_itself(directory):
    block = make_chain(3, checkpoint=True)[1]
    code, text = run("inspect", block.header.hash.hex()[:12], "--cache-directory", directory, "--json")
    facts = json.loads(text)
    assert code == 0 and "token_ids" not in facts
    assert [region["kind"] for region in facts["regions"]] == ["kv", "window", "checkpoint"]
    assert facts["model"] == {"architecture": "test"}
    _, for_people = run("inspect", block.header.hash.hex()[:12], "--cache-directory", directory)
    assert "model: architecture  test" in for_people
    _, text = run(
        "inspect", block.header.hash.hex(), "--cache-directory", directory, "--json", "--show-tokens"
    )
    assert json.loads(text)["token_ids"] == list(block.header.token_ids)
    with pytest.raises(NotFound):
        run("inspect", "zz", "--cache-directory", directory)


def test_check_tells_and_changes_nothing(directory):
    assert run("check", "--cache-directory", directory)[0] == 0
    served = StorageThread(directory)
    victim, other = make_chain(3)[:2]
    os.truncate(served.path(victim), 40)
    os.unlink(served.path(other))
    for _ in range(2):
        code, text = run("check", "--cache-directory", directory, "--json")
        found = sorted(item["finding"] for item in json.loads(text)["discrepancies"])
        assert (code, found) == (1, ["file of a row, not valid", "row without file"])


def test_a_files_name_cannot_command_the_terminal(directory):
    for name in (b"\x1b[31mred", b"two\nlines", "\u202eright to left".encode(), b"\xff"):
        os.close(os.open(os.fsencode(directory) + b"/blocks/" + name, os.O_CREAT | os.O_WRONLY))
    code, text = run("check", "--cache-directory", directory)
    assert code == 0 and "red" in text
    assert not set(text) & {"\x1b", "\u202e"} and "\nlines" not in text


def test_check_does_not_complain_about_what_is_harmless(directory):
    path = StorageThread(directory).path(make_chain(3)[0])
    os.utime(path, ns=(1, 1))
    with open(os.path.dirname(path) + "/notes", "w") as file:
        file.write("mine")
    code, text = run("check", "--cache-directory", directory)
    assert code == 0 and "file we did not name" in text and "time or inode changed" in text


def test_verify_reads_every_byte(directory):
    assert run("verify", "--cache-directory", directory)[0] == 0
    victim = make_chain(3)[2]
    path = StorageThread(directory).path(victim)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    code, text = run("verify", "--cache-directory", directory, "--json")
    answer = json.loads(text)
    assert code == 1 and answer["blocks"] == 3
    assert [(item["hash"], item["damage"]) for item in answer["damaged"]] == [
        (victim.header.hash.hex(), "checksum")
    ]


def test_purge_needs_a_choice_and_no_server(directory):
    assert run("purge", "--cache-directory", directory, "--yes")[0] == 2
    with StorageThread(directory):
        assert run("ls", "--cache-directory", directory)[0] == 0
        with pytest.raises(StartError) as caught:
            run("purge", "--cache-directory", directory, "--all", "--yes")
        assert caught.value.reason is Reason.STORE_LOCKED
    block = make_chain(3)[2]
    code, text = run(
        "purge", "--cache-directory", directory, "--block", block.header.hash.hex(), "--yes", "--json"
    )
    assert code == 0 and json.loads(text)["removed"] == 1
    assert run("purge", "--cache-directory", directory, "--all", "--yes")[0] == 0
    assert json.loads(run("ls", "--cache-directory", directory, "--json")[1]) == []
    assert run("check", "--cache-directory", directory)[0] == 0


def test_purge_asks_first(directory):
    result = CliRunner().invoke(app, ["purge", "--cache-directory", directory, "--all"], input="n\n")
    assert result.exit_code == 1
    unasked = CliRunner().invoke(app, ["purge", "--cache-directory", directory, "--all"])
    assert unasked.exit_code == 2 and "pass --yes" in unasked.stderr and "Aborted" not in unasked.stderr
    assert len(json.loads(run("ls", "--cache-directory", directory, "--json")[1])) == 3


def test_purge_by_age(directory):
    # The house's clock stands in 1970, so every block is old; none is older than the epoch.
    assert (
        json.loads(
            run("purge", "--cache-directory", directory, "--unused-days", "1e6", "--yes", "--json")[1]
        )["removed"]
        == 0
    )
    assert (
        json.loads(run("purge", "--cache-directory", directory, "--unused-days", "30", "--yes", "--json")[1])[
            "removed"
        ]
        == 3
    )

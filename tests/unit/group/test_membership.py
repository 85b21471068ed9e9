"""Which machines are a group: both forms of MLX's files, each wrong one, and what must be equal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.errors import ConfigError, Reason
from icehouse_server.group.membership import (
    Membership,
    difference,
    membership_of,
    rank_fingerprint,
    releases,
)

RING = [["10.0.0.1:5000", "10.0.1.1:5000"], ["10.0.0.2:5001"], ["[fe80::1]:5002"]]
LAUNCHED = [{"ssh": "one", "ips": ["10.0.0.1"]}, {"ssh": "two", "ips": ["10.0.0.2", "10.0.1.2"]}]


def read(
    folder: Path,
    content: Any,
    *,
    rank: int | None = 0,
    launched_as: str | None = None,
    control: str | None = None,
) -> Membership:
    file = folder / "hosts.json"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return membership_of(str(file), rank=rank, launched_as=launched_as, control=control)


def test_the_rings_form(tmp_path: Path) -> None:
    group = read(tmp_path, RING, rank=2)
    assert (group.rank, group.world, list(group.followers)) == (2, 3, [1, 2])
    assert group.ring == tuple(map(tuple, RING))
    assert group.control == "10.0.0.1:32322"
    assert [group.host(rank) for rank in range(3)] == ["10.0.0.1", "10.0.0.2", "[fe80::1]"]


def test_the_launchers_form(tmp_path: Path) -> None:
    group = read(tmp_path, LAUNCHED, rank=1, control="10.0.9.1:7")
    assert group.ring == (("10.0.0.1:32323",), ("10.0.0.2:32324",))
    assert group.control == "10.0.9.1:7"


def test_the_launcher_names_the_rank_where_nobody_does(tmp_path: Path) -> None:
    assert read(tmp_path, RING, rank=None, launched_as="2").rank == 2
    assert read(tmp_path, RING, rank=0, launched_as="2").rank == 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("", "is not valid JSON: Expecting value"),
        (b"\xff\xfe", "is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "is not valid JSON: it is nested too deeply"),
        ("7", "does not contain a list of hosts"),
        ("null", "does not contain a list of hosts"),
        ({"hosts": RING}, "does not contain a list of hosts"),
        ([], "names 0 hosts"),
        ([["10.0.0.1:5000"]], "names 1 hosts"),
        ([[], ["10.0.0.1:5000"]], r"host 0, \[\], is neither"),
        ([["10.0.0.1"], ["10.0.0.2"]], "host 0, .* is neither"),
        ([["10.0.0.1:5"], ["10.0.0.2:x"]], "host 1, .* is neither"),
        ([[":5000"], ["10.0.0.2:5"]], "host 0, .* is neither"),
        ([["10.0.0.1:99999"], ["10.0.0.2:5"]], "host 0, .* is neither"),
        ([["10.0.0.1:\u00b2"], ["10.0.0.2:5"]], "host 0, .* is neither"),
        ([["10.0.0.1:" + "9" * 5000], ["10.0.0.2:5"]], "host 0, .* is neither"),
        (["10.0.0.1:5000", "10.0.0.2:5000"], "host 0, .* is neither"),
        ([[5000], [5001]], "host 0, .* is neither"),
        ([{"ssh": "one"}, {"ssh": "two"}], "host 0, .* is neither"),
        ([{"ssh": "one", "ips": []}, {"ssh": "two", "ips": []}], "host 0, .* is neither"),
        ([{"ips": [5]}, {"ips": [6]}], "host 0, .* is neither"),
        ([{"ips": "10.0.0.1"}, {"ips": "10.0.0.2"}], "host 0, .* is neither"),
        ([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.1:5000"]], "names 10.0.0.1:5000 twice"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        read(tmp_path, content)
    assert refused.value.reason is Reason.CONFIG_INVALID
    assert str(tmp_path) in refused.value.message
    assert len(refused.value.message) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none", "cannot be read: No such file or directory"),
        (".", "cannot be read: it is not a plain file"),
        ("pipe", "cannot be read: it is not a plain file"),
        ("huge", "cannot be read: it has more than"),
        ("link", "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_of_hosts_is_told_in_plain_words(tmp_path: Path, name: str, told: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(b" " * (2 << 20))
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(ConfigError, match=told):
        membership_of(str(tmp_path / name), rank=0, launched_as=None, control=None)


def test_the_home_of_nobody_is_told_in_plain_words() -> None:
    with pytest.raises(ConfigError, match="cannot be read: Could not determine home directory"):
        membership_of("~nobody-here/hosts.json", rank=0, launched_as=None, control=None)


@pytest.mark.parametrize("control", ["10.0.0.1", "10.0.0.1:", ":7", "10.0.0.1:x", "10.0.0.1:65536", ""])
def test_what_is_no_address_of_the_channel_is_refused(tmp_path: Path, control: str) -> None:
    with pytest.raises(ConfigError, match=f"group.control = '{control}' is not host:port"):
        read(tmp_path, RING, control=control)


@pytest.mark.parametrize(
    ("rank", "launched_as"),
    [(None, None), (None, "x"), (None, "-1"), (None, "\u00b2"), (3, None), (None, "3"), (None, "9" * 5000)],
)
def test_a_rank_that_is_none_is_refused(tmp_path: Path, rank: int | None, launched_as: str | None) -> None:
    with pytest.raises(ConfigError, match="which of the 3 hosts is this"):
        read(tmp_path, RING, rank=rank, launched_as=launched_as)


def test_every_rank_of_every_world_has_a_fingerprint_of_its_own() -> None:
    ring = (("a:1",), ("b:2",), ("c:3",))
    members = [Membership(rank, ring[:world], "a:1") for world in (2, 3) for rank in range(world)]
    models = [Fingerprint(bytes([n]) * 32) for n in range(2)]
    prints = {rank_fingerprint(model, member) for model in models for member in members}
    assert len(prints) == len(models) * len(members)


def test_the_first_fact_that_differs_is_named() -> None:
    ours = releases()
    assert set(ours) == {"icehouse", "mlx", "mlx-lm"}
    assert difference(ours, dict(ours)) == ""
    assert difference(ours, {**ours, "mlx": "0.1"}) == f"mlx is 0.1 there and {ours['mlx']} on rank 0"
    assert difference(ours, {**ours, "a": "1"}) == "a is 1 there and nothing on rank 0"
    assert difference({**ours, "a": "1"}, ours) == "a is nothing there and 1 on rank 0"

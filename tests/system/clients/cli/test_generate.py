"""`icehouse generate`: text and cost, and servers that ask who calls or cannot be reached."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from icehouse_server.config import SecurityConfig
from icehouse_server.domain.chat import ImageSource, ImageTexts
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from tests.fixtures.rpc.authority import Authority, dns
from tests.fixtures.rpc.fake_engine import MODEL_INFO, hanging
from tests.fixtures.terminal import invoke, written
from tests.unit.rpc.conftest import SEED, running


def token_of(folder: Path) -> str:
    """Write a token, and beside it the server's file `tokens` that knows it; return the token's file."""
    token = new_token()
    line = line_of(token, tenant="boss", role=CallerRole.OPERATOR, expire_date=None)
    written(folder, "tokens", f"{line}\n".encode())
    return written(folder, "own", f"{token}\n".encode())


async def test_text_is_printed_with_its_cost() -> None:
    async with running() as served:
        ask = ["generate", "Hi", "--max-output-tokens", "2", "--address", served.server.address]
        told, quiet = await invoke(*ask), await invoke(*ask, "--quiet")
        piped = await invoke("generate", "-", *ask[2:], "--json", input="Hi there")
    facts = json.loads(piped.stdout)
    assert (facts["text"], facts["finish_reason"], facts["usage"]["prompt_tokens"]) == (" w0 w1", "LENGTH", 8)
    assert (facts["model"], facts["seed"], facts["reuse_limit"]) == ("tiny", SEED, "DIVERGED")
    assert told.exit_code == 0 and told.stdout == " w0 w1\n"
    assert "2 tokens at" in told.stderr
    assert (quiet.stdout, quiet.stderr) == (" w0 w1\n", "")


async def test_a_suffix_makes_text_the_prefix_of_a_gap() -> None:
    async with running() as served:
        ask = ["--address", served.server.address]
        filled = await invoke("generate", "a", "--suffix", "b", "--max-output-tokens", "1", *ask)
        ended = await invoke("generate", "-", "--suffix", "", *ask, "--max-output-tokens", "1", input="a\n")
        listed = await invoke("tokenize", "a", "--suffix", "b", "--ids", *ask)
        refusals = [
            await invoke("generate", *words, "--suffix", "b", *ask)
            for words in (("Hi", "--chat"), ("--tokens", "1,2"), ("Hi", "--system", "Be brief."))
        ]
    first, second = served.engine.submitted
    assert first.prompt_token_ids == (256, 97, 257, 98, 258)
    assert second.prompt_token_ids == (256, 97, 10, 257, 258)
    assert (filled.exit_code, ended.exit_code) == (0, 0)
    assert listed.stdout == "256,97,257,98,258\n"
    for refused in refusals:
        assert refused.exit_code == 2 and "--suffix needs a TEXT" in refused.output


@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)], ids=lambda c: c[0])
async def test_a_budget_of_reasoning_is_asked_for(command: tuple[str, ...]) -> None:
    async with running() as served:
        ask = (*command, "--address", served.server.address, "--max-reasoning-tokens")
        closed = await invoke(*ask, "0", input="Hi\n")
        negative = await invoke(*ask, "-1")
    # The model of this server tells no reasoning from its answer, and says so of the option.
    assert closed.exit_code == 1 and "max_reasoning_tokens" in closed.output
    assert negative.exit_code == 2 and "--max-reasoning-tokens" in negative.output


class Images:
    """Keeps what was shown."""

    texts = ImageTexts("", (), ())

    pixel_bytes = ()

    def read_next(self) -> int:
        raise AssertionError("there is nothing to decode")

    def open(self, sources: Sequence[ImageSource]) -> Images:
        self.shown = [(source.data, source.detail.name) for source in sources]
        return self

    def spans(self, token_ids: Sequence[int]) -> tuple[()]:
        return ()


async def test_pictures_are_shown_with_the_text(tmp_path: Path) -> None:
    images = Images()
    files = [written(tmp_path, name, name.encode()) for name in ("one.png", "two.gif")]
    info = dataclasses.replace(MODEL_INFO, sees_images=True)
    async with running(info=info, images=images) as served:
        ask = ["--image", files[0], "--image", files[1], "--address", served.server.address]
        told = await invoke("generate", "What?", *ask)
        shown = images.shown
        short = await invoke("generate", "What?", "--image-detail", "low", *ask)
        wrong = await invoke("generate", "What?", "--image-detail", "most", *ask)
        without = await invoke("generate", *ask, "--tokens", "1,2")
        missing = await invoke("generate", "What?", "--image", str(tmp_path / "none.png"), *ask[4:])
    assert told.exit_code == 0 and shown == [(b"one.png", "AUTO"), (b"two.gif", "AUTO")]
    assert short.exit_code == 0 and images.shown == [(b"one.png", "LOW"), (b"two.gif", "LOW")]
    assert wrong.exit_code == 2 and "--image-detail" in wrong.output
    assert without.exit_code == 2 and "--image needs TEXT" in without.stderr
    assert missing.exit_code != 0 and "none.png cannot be read" in str(missing.exception)


@pytest.mark.parametrize("command", [("generate", "Hi", "--quiet"), ("top", "--once")], ids=lambda c: c[0])
async def test_a_server_with_mutual_tls_is_asked_with_a_certificate(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    authority = Authority()
    certificate, key = authority.write_server(tmp_path)
    own, own_key = authority.issue("me", dns("me.example"))
    ca = written(tmp_path, "ca.pem", authority.pem)
    shown = ("--certificate", written(tmp_path, "me.pem", own), "--key", written(tmp_path, "me.key", own_key))
    security = SecurityConfig(
        tls_certificate=str(certificate), tls_key=str(key), tls_client_ca=ca, operators="me.example"
    )
    async with running(security=security) as served:
        ask = (*command, "--address", served.server.address, "--ca", ca)
        known, unknown = await invoke(*ask, *shown), await invoke(*ask)
        by_environment = await invoke(
            *command,
            environ={
                "ICEHOUSE_CLIENT_ADDRESS": served.server.address,
                "ICEHOUSE_CLIENT_CA": ca,
                "ICEHOUSE_CLIENT_CERTIFICATE": shown[1],
                "ICEHOUSE_CLIENT_KEY": shown[3],
            },
        )
    assert (known.exit_code, by_environment.exit_code) == (0, 0), known.output + by_environment.output
    assert unknown.exit_code == 1 and "--certificate and --key" in unknown.output


@pytest.mark.parametrize("command", [("generate", "Hi", "--quiet"), ("top", "--once")], ids=lambda c: c[0])
async def test_a_server_with_tokens_is_asked_with_one(tmp_path: Path, command: tuple[str, ...]) -> None:
    own = token_of(tmp_path)
    async with running(security=SecurityConfig(token_file=str(tmp_path / "tokens"))) as served:
        ask = (*command, "--address", served.server.address)
        known, unknown = await invoke(*ask, "--token", own), await invoke(*ask)
        by_environment = await invoke(*ask, environ={"ICEHOUSE_CLIENT_TOKEN_FILE": own})
    assert (known.exit_code, by_environment.exit_code) == (0, 0), known.output + by_environment.output
    assert unknown.exit_code == 1 and "UNAUTHENTICATED" in unknown.output


async def test_a_disagreement_on_tls_is_told_from_a_server_that_is_not_there(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.write_server(tmp_path)
    other = written(tmp_path, "other.pem", Authority("another").pem)
    security = SecurityConfig(tls_certificate=str(certificate), tls_key=str(key))
    async with running(security=security) as served:
        ask = ("generate", "Hi", "--address", served.server.address)
        plain, public, wrong = (
            await invoke(*ask),
            await invoke(*ask, "--tls"),
            await invoke(*ask, "--ca", other),
        )
    async with running() as served:
        needless = await invoke("generate", "Hi", "--tls", "--address", served.server.address)
        no_pem = await invoke(
            *("generate", "Hi", "--ca", written(tmp_path, "no.pem", b"{}")),
            "--address",
            served.server.address,
        )
    nameless = await invoke("generate", "Hi", "--address", "nosuch.invalid:1")
    nobody = await invoke("generate", "Hi", "--address", "127.0.0.1:1")
    assert "needs --ca (or --tls)" in plain.output
    for disagreeing in (public, wrong, needless):
        assert "do not agree on TLS" in disagreeing.output and "--ca" in disagreeing.output
    assert "not a PEM file" in no_pem.output
    assert "cannot be resolved; an --address is host:port" in nameless.output
    assert "start one with `icehouse serve`" in nobody.output
    codes = {result.exit_code for result in (plain, public, wrong, needless, no_pem, nameless, nobody)}
    assert codes == {1}


async def test_a_deadline_that_passes_says_what_to_do() -> None:
    async with running() as served:
        served.engine.script = hanging
        late = await invoke("generate", "Hi", "--timeout-s", "0.2", "--address", served.server.address)
    assert late.exit_code == 1 and "raise --timeout-s" in late.stderr

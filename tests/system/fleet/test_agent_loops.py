"""An agent's loop of five tool turns through the gateway, with OpenAI's and Anthropic's own clients.

The models of five families follow a script; the gateway reads what they write and renders the history. The
workers tell how much of a prompt was reused: the gateway tells OpenAI's clients the same,
Anthropic's nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.chat.agent_loop import FAMILIES, QUESTION, SYSTEM, TOOLS, AgentFamily
from tests.fixtures.chat.gpt_oss import FILE_NAME, vocabulary_file, write_gpt_oss
from tests.system.fleet.conftest import BLOCK, MODEL, Fleet, fleet_of, until

pytestmark = pytest.mark.fleet

LEAST_REUSED = 0.9
BILLING = "x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={checksum};"
# The gateway ends a call of this family at the first such mark, wherever it stands.
OTHER_MARK = {"glm": "</function>"}
PARSERS = {
    "hermes": ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3"),
    "glm": ("--tool-call-parser", "glm47_moe", "--reasoning-parser", "glm45"),
    "kimi": ("--tool-call-parser", "kimik2"),
    "deepseek-v3.1": ("--tool-call-parser", "deepseek31"),
    # Of gpt-oss everything is known to the gateway, from the name of its architecture.
    "harmony": (),
}
"""The gateway's options for each family."""


@dataclasses.dataclass
class Agents:
    """A fleet whose model is one of a family."""

    family: AgentFamily
    fleet: Fleet

    def measured(self, ask: Callable[[], Any]) -> tuple[Any, float]:
        """Return what is answered, and the part of its prompt that the workers did not compute."""
        before, known_count = self._totals(), self.fleet.known_blocks()
        answer = ask()
        prompt, cached = (after - earlier for after, earlier in zip(self._totals(), before, strict=True))
        new_count = prompt // BLOCK - cached // BLOCK
        until(lambda: self.fleet.known_blocks() >= known_count + new_count)
        return answer, cached / prompt

    def _totals(self) -> tuple[int, int]:
        stats = [self.fleet.stats(port) for port in self.fleet.workers]
        return sum(one.prompt_token_total for one in stats), sum(one.cached_token_total for one in stats)


@pytest.fixture(scope="module")
def agents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    family = FAMILIES[name]
    family = dataclasses.replace(family, mark=OTHER_MARK.get(name, "</tool_call>"))

    def make_model(parent: Path) -> Path:
        if name == "harmony":
            return write_gpt_oss(parent / "model", family.template)
        return family.write(parent / "model")

    with pytest.MonkeyPatch.context() as patch:
        (folder / FILE_NAME).write_bytes(vocabulary_file())
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        with fleet_of(
            folder, make_model=make_model, script=family.script, gateway_options=PARSERS[name]
        ) as fleet:
            yield Agents(family, fleet)


def check_reuse(shares: list[float]) -> None:
    """Assert that every prompt but the first was reused."""
    print("reused:", [round(share, 3) for share in shares])
    assert len(shares) > 5 and min(shares[1:]) > LEAST_REUSED, shares


def anthropic_tools() -> list[dict[str, Any]]:
    """Return the tools in Anthropic's words."""
    return [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in TOOLS
    ]


@pytest.mark.parametrize("agents", PARSERS, indirect=True)
def test_with_openais_client(agents: Agents) -> None:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    said: list[Any] = [{"role": "system", "content": f"For OpenAI. {SYSTEM}"}]
    said.append({"role": "user", "content": QUESTION})
    shares = []
    with agents.fleet.openai() as client:
        ask = functools.partial(
            client.chat.completions.create, model=MODEL, messages=said, tools=tools, temperature=0
        )
        for turn in agents.family.turns:
            answer, share = agents.measured(ask)
            [choice] = answer.choices
            calls = choice.message.tool_calls or []
            read = tuple((call.function.name, json.loads(call.function.arguments)) for call in calls)
            assert (read, (choice.message.content or "").strip()) == (turn.calls, turn.said)
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            told = answer.usage.prompt_tokens_details
            assert (told.cached_tokens if told else 0) / answer.usage.prompt_tokens == share
            shares.append(share)
            said.append(choice.message.model_dump(exclude_none=True))
            for call, result in zip(calls, turn.results, strict=True):
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check_reuse(shares)


# SMG reads gpt-oss for OpenAI's clients only.
@pytest.mark.parametrize("agents", [name for name in PARSERS if name != "harmony"], indirect=True)
def test_with_anthropics_client(agents: Agents) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"system": f"For Anthropic. {SYSTEM}", "max_tokens": 1500}
    if agents.family.thinks:
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    shares = []
    with agents.fleet.anthropic() as client:

        def ask() -> Any:
            with client.messages.stream(
                model=MODEL,
                messages=said,
                tools=anthropic_tools(),
                extra_body={"temperature": 0},
                **options,
            ) as stream:
                return stream.get_final_message()

        for turn in agents.family.turns:
            answer, share = agents.measured(ask)
            # The gateway gives blank texts and takes none.
            blocks = [block for block in answer.content if block.type != "text" or block.text.strip()]
            calls = [block for block in blocks if block.type == "tool_use"]
            assert tuple((call.name, call.input) for call in calls) == turn.calls
            assert "".join(block.text for block in blocks if block.type == "text").strip() == turn.said
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            shares.append(share)
            content = [block.model_dump(exclude_none=True) for block in blocks]
            said.append({"role": "assistant", "content": content})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": result}
                for call, result in zip(calls, turn.results, strict=True)
            ]
            said.append({"role": "user", "content": results})
    check_reuse(shares)


@pytest.mark.parametrize("is_normalized", [True, False], ids=["normalized", "as_sent"])
def test_a_billing_line_that_changes_costs_nothing_where_prompts_are_normalized(
    tmp_path: Path, is_normalized: bool
) -> None:
    # Its tools come before the system's turn.
    family = FAMILIES["glm"]
    options = ("--normalized-prompts", "*") if is_normalized else ()

    def make_model(parent: Path) -> Path:
        return family.write(parent / "model")

    with (
        fleet_of(tmp_path, make_model=make_model, worker_options=options) as fleet,
        fleet.anthropic() as client,
    ):
        shares = []
        for checksum in ("a1b2c", "93f0e"):
            texts = (BILLING.format(checksum=checksum), SYSTEM)
            ask = functools.partial(
                client.messages.create,
                model=MODEL,
                max_tokens=4,
                system=[{"type": "text", "text": text} for text in texts],
                tools=anthropic_tools(),
                messages=[{"role": "user", "content": QUESTION}],
            )
            shares.append(Agents(family, fleet).measured(ask)[1])
    assert shares[0] == 0 and (shares[1] > LEAST_REUSED) == is_normalized, shares

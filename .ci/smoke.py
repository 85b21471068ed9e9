"""Smoke test from outside: the pages' blocks marked `run: grpcurl`, then wrong inputs, against a live server.

Usage: python .ci/smoke.py [--grpcurl PATH]. Starts `icehouse serve` with the demo model on a free
loopback port, finds the services by reflection alone, stops the server and wants exit code 0.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import numpy as np
from icehouse_server.cli.local.child_server import serving
from icehouse_server.demo.build import ensure_demo_model
from icehouse_server.demo.models import SMOLLM2
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SHOWN_ADDRESS = "localhost:50051"
CALL_TIMEOUT_S = 120

# What the answer of each method that is shown must contain.
EXPECTED = {
    "InferenceService/Generate": '"text"',
    "InferenceService/Stream": '"finished"',
    "InferenceService/Tokenize": '"Hello"',
    "InferenceService/CacheStats": '"cache"',
    "CacheService/Warm": '"done"',
    "CacheService/Explain": "REUSE_LIMIT_DIVERGED",
    "CacheService/Pin": '"block_count": 1',
    "CacheService/Unpin": '"block_count": 1',
    "CacheService/Evict": '"ram_block_count": "1"',
    "CacheService/Verify": '"duration"',
    "CacheService/EvictAll": '"done"',
    "ServerService/GetStats": '"engine"',
    "ServerService/WatchStats": '"stats"',
    "ModelService/ListModels": '"name": "poetry"',
    "EmbeddingService/Embed": '"values"',
    "RerankService/Rerank": '"log_odds"',
    "Health/Check": "SERVING",
    "list": "icehouse.v1.InferenceService",
}

# What the answer to a line with these words must contain besides.
EXPECTED_TOO = {
    "tool_choice": '"name": "get_weather"',
    '"chat"': '"finished"',
    '"speculation"': '"accepted_draft_tokens"',
    '"logprobs"': '"prompt_logprobs"',
    '"completions"': '"index": 2',
    '"adapter"': '"finish_reason"',
}

# grpcurl's exit code when -max-time ended the call; a stream without an end has no other way to end.
DEADLINE_EXIT_CODE = 64 + 4
ENDLESS = "ServerService/WatchStats"

GENERATE = "icehouse.v1.InferenceService/Generate"

# Request, and the status and reason that must come back. Two prompts at once are not among them: grpcurl
# keeps only the last of a oneof, so the server never sees both (tests/unit/rpc sends them over the wire).
WRONG: tuple[tuple[str, dict[str, object], str, str], ...] = (
    ("no prompt", {}, "InvalidArgument", "PROMPT_MISSING"),
    ("empty prompt", {"prompt": {"text": ""}}, "InvalidArgument", "PROMPT_EMPTY"),
    (
        "negative length",
        {"prompt": {"text": "a"}, "max_output_tokens": -1},
        "InvalidArgument",
        "PARAMETER_OUT_OF_RANGE",
    ),
    (
        "cold",
        {"prompt": {"text": "a"}, "sampling": {"temperature": -1}},
        "InvalidArgument",
        "PARAMETER_OUT_OF_RANGE",
    ),
    (
        "NaN",
        {"prompt": {"text": "a"}, "sampling": {"temperature": "NaN"}},
        "InvalidArgument",
        "PARAMETER_OUT_OF_RANGE",
    ),
    ("no drafter", {"prompt": {"text": "a"}, "speculation": {}}, "InvalidArgument", "PARAMETER_OUT_OF_RANGE"),
    ("too many outputs", {"prompt": {"text": "a"}, "completions": 1000}, "InvalidArgument", "completions"),
    (
        "too much told",
        {"prompt": {"text": "a"}, "logprobs": {"top_count": 21}},
        "InvalidArgument",
        "logprobs.top_count",
    ),
    (
        "no schema",
        {"prompt": {"text": "a"}, "response_format": {"json_schema": "{"}},
        "InvalidArgument",
        "FORMAT_INVALID",
    ),
    (
        "wrong schema",
        {
            "prompt": {"text": "a"},
            "response_format": {"json_schema": '{"properties":{"a":{"type":"strin"}}}'},
        },
        "InvalidArgument",
        "/properties/a",
    ),
    ("unknown adapter", {"prompt": {"text": "a", "adapter": "prose"}}, "NotFound", "ADAPTER_NOT_FOUND"),
    ("unknown model", {"prompt": {"text": "a"}, "model": "none"}, "NotFound", "MODEL_NOT_FOUND"),
    ("token outside", {"prompt": {"tokens": {"ids": [1 << 30]}}}, "InvalidArgument", "TOKEN_OUT_OF_RANGE"),
    ("too long", {"prompt": {"tokens": {"ids": [5] * 40_000}}}, "InvalidArgument", "PROMPT_TOO_LONG"),
    ("empty chat", {"prompt": {"chat": {"messages": []}}}, "InvalidArgument", "CHAT_INVALID"),
    (
        "tools beside text",
        {"prompt": {"text": "a", "tools": [{"name": "f"}]}},
        "InvalidArgument",
        "TOOL_INVALID",
    ),
    (
        "unknown tool",
        {
            "prompt": {"chat": {"messages": [{"role": "ROLE_USER", "content": "a"}]}},
            "tool_choice": {"mode": 4, "name": "f"},
        },
        "InvalidArgument",
        "TOOL_CHOICE_INVALID",
    ),
    ("100 MB", {"prompt": {"text": "a" * 100_000_000}}, "ResourceExhausted", ""),
)


class Smoke:
    """Runs calls and counts what went wrong."""

    def __init__(self, *, grpcurl: str, address: str) -> None:
        self._grpcurl = grpcurl
        self._address = address
        self.failure_count = 0

    def pages(self) -> None:
        """Run every call of the marked blocks, with this server's address in place of the written one."""
        readme, others = grpcurl_commands(README), []
        for page in sorted((ROOT / "docs").rglob("*.md")):
            others += grpcurl_commands(page)
        self._check("the README has a grpcurl line", bool(readme), "found none")
        methods = {name for name in EXPECTED for command in others if command.rstrip().endswith(name)}
        lacking = sorted(set(EXPECTED) - methods)
        self._check("the pages show every method", not lacking, f"not {', '.join(lacking)}")
        for command in [*readme, *others]:
            self._run_shown(command)

    def _run_shown(self, command: str) -> None:
        line = command.replace(SHOWN_ADDRESS, self._address).replace("grpcurl", self._grpcurl, 1)
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=CALL_TIMEOUT_S)
        method = next((name for name in EXPECTED if command.rstrip().endswith(name)), None)
        wanted = EXPECTED[method] if method else ""
        code = DEADLINE_EXIT_CODE if method == ENDLESS else 0
        besides = [answer for words, answer in EXPECTED_TOO.items() if words in command]
        good = method is not None and done.returncode == code
        good = good and all(text in done.stdout for text in (wanted, *besides))
        good = good and has_its_form(command, done.stdout)
        self._check(command.replace("\n", " ")[:110], good, done.stdout[-500:] + done.stderr[-500:])

    def wrong_inputs(self) -> None:
        """Send what must be refused."""
        for name, request, code, reason in WRONG:
            done = self._call(request)
            good = done.returncode != 0 and f"Code: {code}" in done.stderr and reason in done.stderr
            self._check(f"refused: {name} -> {code} {reason}", good, (done.stdout + done.stderr)[-800:])

    def top(self) -> None:
        """Look at the server as an operator would."""
        command = [
            sys.executable,
            "-m",
            "icehouse_server.cli.main",
            "top",
            "--once",
            "--address",
            self._address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S)
        good = done.returncode == 0 and "decoding" in done.stdout and "slowest" in done.stdout
        self._check("icehouse top shows it", good, (done.stdout + done.stderr)[-800:])

    def still_alive(self) -> None:
        """After all of it the server answers."""
        done = self._call({"prompt": {"text": "The capital of France is"}, "max_output_tokens": 4})
        self._check("the server lives on", done.returncode == 0 and '"text"' in done.stdout, done.stderr)

    def _call(self, request: dict[str, object]) -> subprocess.CompletedProcess[str]:
        command = [self._grpcurl, "-plaintext", "-d", "@", self._address, GENERATE]
        return subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=CALL_TIMEOUT_S
        )

    def _check(self, name: str, good: bool, details: str) -> None:
        print(f"  {'ok  ' if good else 'FAIL'} {name}", flush=True)
        if not good:
            self.failure_count += 1
            print(f"       {details}")


def has_its_form(command: str, answer: str) -> bool:
    """Whether the answer to a request with a response format is of that form; true for any other."""
    found = re.search("-d '(.*?)'", command, re.DOTALL)
    form = json.loads(found[1]).get("response_format", {}) if found else {}
    if not form:
        return True
    text = json.loads(answer)["text"]
    if "choice" in form:
        return text in form["choice"]["texts"]
    try:
        jsonschema.validate(json.loads(text), json.loads(form["json_schema"]))
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        print(f"       {error}")
        return False
    return True


def grpcurl_commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks that are marked for this, continued ones joined.

    That no call stands in another block is tested (`tests/unit/docs/test_marks.py`); those with images run in
    `make test-docs`, against a model that sees.
    """
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- run: grpcurl -->\n```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def write_adapter(folder: Path, model_folder: Path) -> Path:
    """Write an adapter of the demo model, of one layer and random, as mlx-lm's training would."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    layer = f"model.layers.{config['num_hidden_layers'] - 1}.self_attn.q_proj"
    random = np.random.default_rng(0)
    shapes = {
        "lora_a": (config["hidden_size"], 4),
        "lora_b": (4, config["num_attention_heads"] * config["head_dim"]),
    }
    folder.mkdir()
    save_file(
        {f"{layer}.{name}": random.standard_normal(s, np.float32) / 40 for name, s in shapes.items()},
        folder / "adapters.safetensors",
    )
    parameters = {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    written = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


def main() -> int:
    """Run everything; the exit code says whether all went well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpcurl", default=shutil.which("grpcurl"))
    grpcurl = parser.parse_args().grpcurl
    if grpcurl is None:
        print("grpcurl is not here; install it with", file=sys.stderr)
        print("  go install github.com/fullstorydev/grpcurl/cmd/grpcurl@latest", file=sys.stderr)
        return 1
    model_folder = ensure_demo_model(SMOLLM2)
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(
            "starting a server",
            scratch=Path(scratch),
            model=SMOLLM2.name,
            options=["--adapters", f"poetry={write_adapter(Path(scratch) / 'poetry', model_folder)}"],
        ) as (_, address),
    ):
        smoke = Smoke(grpcurl=grpcurl, address=address)
        smoke.pages()
        smoke.wrong_inputs()
        smoke.top()
        smoke.still_alive()
    print(f"  server stopped with exit code 0; {smoke.failure_count} failures")
    return 1 if smoke.failure_count else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a command imports: those that only talk to a server start without the model's libraries."""

import os
import subprocess
import sys

import pytest

HEAVY = {"mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "llguidance"}

_RUN = """
import sys
from icehouse_server.cli import main
sys.argv = ["icehouse", *sys.argv[1:]]
try:
    main.main()
except SystemExit as end:
    code = end.code
print("\\n", code or 0, " ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("serve", "--help"), 0),
        (("version",), 0),
        (("config",), 0),
        (("token", "new", "--tenant", "t"), 0),
        (("cache", "ls", "--cache-directory", "/nowhere"), 0),
        # Nobody answers at this port: the commands get as far as the call.
        (("generate", "hello", "--address", "127.0.0.1:1"), 1),
        (("explain", "hello", "--address", "127.0.0.1:1"), 1),
        (("top", "--once", "--address", "127.0.0.1:1"), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_it_imports_neither_mlx_nor_transformers(arguments: tuple[str, ...], code: int) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments], env=environ, capture_output=True, text=True, check=True
    )
    found_code, *imported = done.stdout.strip().rpartition("\n")[2].split()
    assert int(found_code) == code, done.stderr
    assert "icehouse_server" in imported
    assert HEAVY & set(imported) == set()

"""Command line of the front: what cannot be is refused in a line, with exit code 2."""

from __future__ import annotations

import pytest
from icehouse_http.command import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--address", "http://localhost:1"), "the address 'http://localhost:1' is a URL"),
        (("--address", ""), "the address '' has no port"),
        (("--ca-file", "/nowhere"), "/nowhere cannot be read (No such file"),
        (("--ca-file", "~no-such-user/file"), "~no-such-user/file cannot be read"),
        (("--tls-certificate", "/nowhere", "--tls-key", "/nowhere"), "/nowhere cannot be read"),
        (("--tls-certificate", __file__), "go together"),
        (("--tls-certificate", __file__, "--tls-key", __file__), "are not PEM files"),
        (("--port", "65536"), "'65536' is not a number from 0 to 65535"),
        (("--port", "-1"), "'-1' is not a number"),
        (("--port", "http"), "'http' is not a number"),
        (("--fd", "987654"), "'987654' is not an inherited socket"),
        (("--fd", "0"), "'0' is not an inherited socket"),
        (("--grace-s", "nan"), "'nan' is not a number"),
        (("--temperature", "-1"), "'-1' is not a number"),
        (("--max-body-bytes", "0"), "'0' is not a number"),
        (("--body-memory-bytes", "1.5"), "'1.5' is not a number"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2 and words in capsys.readouterr().err

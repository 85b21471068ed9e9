"""Tests: `unit` mirrors the server module by module, `system` tries it whole, `tidy` reads its source."""

import os

# Servers of this tree are on this machine, whatever proxy the environment names for others.
for _name in ("no_proxy", "NO_PROXY"):
    _known = os.environ.get(_name, "")
    os.environ[_name] = f"{_known},localhost,127.0.0.1,::1".removeprefix(",")

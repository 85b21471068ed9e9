"""Benchmarks that print ratios within one run and draw plots into `bench/out/`; never part of the tests.

`throughput` (make bench): what callers wait for, server against in-process engine (`cases`).
`gpu` (make bench CASE=gpu): the same on a GPU, with models of real shapes.
`step` (make bench CASE=step): the host's time for a pass.
`step.profile` (make bench CASE=profile): where one step's time goes.
`lone` (make bench CASE=lone): cold time to first token of a lone prompt, compared with the engine.
`cache` (make bench CASE=cache): the prefix cache cold, from RAM, and from SSD after a restart.
`shared` (make bench CASE=shared): a prompt that only the object store has, on a second server.
`http.measure` (make bench CASE=http): what the HTTP front costs, against gRPC.
`http.attacks` (make bench CASE=httpattacks): what a hostile caller of the front does to another one.
`load` (make bench CASE=load): latency of a server under sustained load.
`agents` (make bench CASE=agents): eviction policies, and a server, under replayed sessions of agents.
"""

import os

# Reach the benches' servers on this machine without the environment's proxy.
for _name in ("no_proxy", "NO_PROXY"):
    _known = os.environ.get(_name, "")
    os.environ[_name] = f"{_known},localhost,127.0.0.1,::1".removeprefix(",")

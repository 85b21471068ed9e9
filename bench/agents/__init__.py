"""`make bench CASE=agents`: traces of agents' sessions, replayed against rules of eviction and a real server.

A trace becomes one stream of requests (`trace`, `readers`, `generator`). `simulation` plays it against a
model of the two tiers under many rules; `live` sends it to `icehouse serve`.
"""

"""Where a step's time goes on the host.

`python -m bench.step` (make bench CASE=step): the host's milliseconds of a pass, whole engine steps against
`BatchGenerator.next()`, and how many primitives a pass has. `bench.step.profile` (make bench CASE=profile):
the phases of one step.
"""

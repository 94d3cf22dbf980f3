"""A discrete-event simulator that drives the very functions production uses (docs/reproduction.md).

``scenario`` (what is simulated) → ``failures`` and ``workload`` (one trace, drawn once, the same for all policies) →
``cluster`` (the event loop and the account of each job) under each of ``policies`` → ``figures`` → JSON, table, page.
"""

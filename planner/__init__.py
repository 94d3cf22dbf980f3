"""Pure policies, shared schemas, the thin control plane, the simulator and the front door of Planaria.

Nothing in this package imports torch, celery, vllm, megatron or lm_eval; only :mod:`planner.cli`
loads the other rooms, and it does so lazily.
"""

__version__ = "0.1.0"

"""A self-healing Megatron-core pretraining job: trainer, checkpoints, detection, agent, supervisor."""

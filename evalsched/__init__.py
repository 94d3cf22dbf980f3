"""The evaluation scheduler: lm-eval requests recorded, cut into shards, run by vLLM through Celery, scored by replay."""

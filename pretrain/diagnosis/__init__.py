"""From log lines to the root cause: reading, rules, retrieval and, when configured, a language model.

The pipeline follows Acme's failure diagnosis (NSDI'24, section 6.1): routine lines are dropped, rules name the root,
retrieval answers where no rule fires, and only then a model is asked.
"""

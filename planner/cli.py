"""The front door: ``planaria``. Each command loads its room only when it runs, so that ``--help`` stays instant."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from planner import __version__
from planner.errors import ExitCode, PlanariaError, one_line

app = typer.Typer(
    name="planaria",
    help="Self-healing LLM pretraining and evaluation of every checkpoint, sharing one cost-aware allocator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
checkpoint_app = typer.Typer(help="Published checkpoints: list, verify, export.", no_args_is_help=True)
tasks_app = typer.Typer(help="Benchmark tasks: what is runnable now, what needs preparing.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(tasks_app, name="tasks")

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]
Url = Annotated[str | None, typer.Option("--url", help="Redis URL of the cluster.", envvar="PLANARIA_URL")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder of the stack's state.", envvar="PLANARIA_STATE_DIR")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key.sub=value.", metavar="KEY=VALUE")]


class ReportFormat(StrEnum):
    """How a report is printed."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def _call(target: str, **arguments: Any) -> None:
    """Load ``module:function`` and run it; its return value, if an int, is the exit code."""
    code = _load(target)(**arguments)
    if isinstance(code, int) and code != 0:
        raise typer.Exit(int(code))


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _check_tasks(names: list[str], where: str) -> None:
    """Refuse unknown evaluation tasks; handed to the training room, which never imports the evaluation room."""
    _load("evalsched.task_names:refuse_unknown")(names, where)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"planaria {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Shared options."""


# ------------------------------------------------------------------------------------------ the local stack


@app.command()
def demo(state_dir: StateDir = None, json_: Json = False) -> None:
    """The whole story on this machine in a few minutes; ends with a report path."""
    _call("pretrain.demo:run", state_dir=state_dir, json_output=json_)


@app.command()
def up(
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Slots of the local agent.")] = None,
    state_dir: StateDir = None,
    url: Url = None,
    dashboard: Annotated[bool, typer.Option("--dashboard/--no-dashboard", help="Start the dashboard too.")] = True,
    json_: Json = False,
) -> None:
    """Start a local stack: Redis, coordinator, one agent, dashboard."""
    _call("planner.stack:up_command", slots=slots, state_dir=state_dir, url=url, dashboard=dashboard, json_output=json_)


@app.command()
def down(state_dir: StateDir = None) -> None:
    """End the local stack; leaves no process, no port, no file in shared memory."""
    _call("planner.stack:down_command", state_dir=state_dir)


# ------------------------------------------------------------------------------------------ jobs


@app.command()
def submit(
    config: Path,
    set_: Set = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job ends; the exit code is the job's.")] = False,
    state_dir: StateDir = None,
    url: Url = None,
) -> None:
    """Submit a pretraining config; prints the job id."""
    _call(
        "pretrain.commands:submit", config=config, overrides=set_ or [], wait=wait, state_dir=state_dir, url=url,
        check_tasks=_check_tasks,
    )  # fmt: skip


@app.command()
def run(
    config: Path,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Slots of the local agent.")] = None,
    state_dir: StateDir = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Up, submit, wait and down in one go."""
    _call(
        "pretrain.commands:run",
        config=config,
        slots=slots,
        state_dir=state_dir,
        overrides=set_ or [],
        json_output=json_,
        check_tasks=_check_tasks,
    )


@app.command()
def status(
    job: Annotated[str | None, typer.Argument()] = None,
    json_: Json = False,
    state_dir: StateDir = None,
    url: Url = None,
) -> None:
    """Jobs, slots and evaluation, now."""
    _call("planner.status:status_command", job=job, json_output=json_, state_dir=state_dir, url=url)


@app.command()
def logs(job: str, state_dir: StateDir = None, url: Url = None) -> None:
    """The logs of a job's ranks and its events, in order of time."""
    _call("pretrain.commands:logs", job=job, state_dir=state_dir, url=url)


@app.command()
def cancel(job: str, state_dir: StateDir = None, url: Url = None) -> None:
    """End a job; its published checkpoints stay."""
    _call("pretrain.commands:cancel", job=job, state_dir=state_dir, url=url)


@app.command()
def pause(job: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Publish a job's state and give its slots back until it is resumed."""
    _call("pretrain.commands:pause", job=job, state_dir=state_dir, url=url)


@app.command()
def resume(job: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Go on with a paused job."""
    _call("pretrain.commands:resume", job=job, state_dir=state_dir, url=url)


# ------------------------------------------------------------------------------------------ processes


@app.command()
def agent(
    redis: Annotated[
        str | None, typer.Option("--redis", help="Redis URL of the cluster.", envvar="PLANARIA_URL")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Name of this node; the host name when left out.")] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Slots to offer; the GPUs, or 3 on a CPU-only host.")
    ] = None,
    address: Annotated[
        str, typer.Option("--address", help="Address that other nodes reach this one at.")
    ] = "127.0.0.1",
    state_dir: StateDir = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="File with the cluster secret.", envvar="PLANARIA_SECRET_FILE")
    ] = None,
) -> None:
    """Add this host to a cluster as a node."""
    _call(
        "pretrain.agent:agent_command",
        url=redis,
        node=node,
        slots=slots,
        address=address,
        state_dir=state_dir,
        secret_file=secret_file,
    )


@app.command()
def worker(
    kind: Annotated[str, typer.Option("--kind", help="infer or metric.")] = "infer",
    name: Annotated[str | None, typer.Option("--name", help="Name of this worker.")] = None,
    slots: Annotated[
        str | None, typer.Option("--slots", help="Slots it owns, comma-separated; its own when left out.")
    ] = None,
    state_dir: StateDir = None,
    url: Url = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="File with the cluster secret.", envvar="PLANARIA_SECRET_FILE")
    ] = None,
) -> None:
    """Start an evaluation worker by hand or from a batch system; it brings its own slots."""
    _call(
        "evalsched.worker:worker_command",
        kind=kind,
        name=name,
        slots=slots,
        state_dir=state_dir,
        url=url,
        secret_file=secret_file,
    )


@app.command()
def coordinator(state_dir: StateDir = None, url: Url = None) -> None:
    """The cluster's three loops: allocator, job supervisor, evaluation scheduler. A second one stands by."""
    _call(
        "planner.coordinator:coordinator_command",
        state_dir=state_dir,
        url=url,
        load=_load,
    )


@app.command()
def dashboard(
    port: Annotated[int, typer.Option("--port", help="Port on loopback; 0 takes a free one.")] = 0,
    state_dir: StateDir = None,
    url: Url = None,
) -> None:
    """A read-only page of jobs, slots and evaluation."""
    _call("planner.dashboard:dashboard_command", port=port, state_dir=state_dir, url=url)


# ------------------------------------------------------------------------------------------ evaluation


@app.command(name="eval")
def eval_(
    model_dir: Path,
    tasks: Annotated[str, typer.Option("--tasks", help="lm-eval task names, comma-separated.")],
    limit: Annotated[float | None, typer.Option("--limit", help="Documents per task; below 1 a fraction.")] = None,
    num_fewshot: Annotated[int | None, typer.Option("--num-fewshot", min=0, help="Few-shot examples.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Inference workers.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", help="Folder of results.json and samples.")] = None,
    include_path: Annotated[Path | None, typer.Option("--include-path", help="Folder with more task files.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict/--compat", help="Flag what lm-eval scores wrongly in silence, or reproduce it.")
    ] = True,
    exact: Annotated[bool, typer.Option("--exact", help="Bitwise equal responses whatever the batch.")] = False,
    samples: Annotated[str | None, typer.Option("--samples", help="JSON: task to list of document ids.")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Use the tokenizer's chat template.")
    ] = False,
    system_instruction: Annotated[str | None, typer.Option("--system-instruction", help="System prompt.")] = None,
    fewshot_as_multiturn: Annotated[
        bool, typer.Option("--fewshot-as-multiturn", help="Few-shot examples as turns.")
    ] = False,
    gen_kwargs: Annotated[str | None, typer.Option("--gen-kwargs", help="Generation settings: key=value,…")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Few-shot seed.")] = 1234,
    state_dir: StateDir = None,
    json_: Json = False,
) -> None:
    """lm-eval's numbers to the last digit, sharded and resumable."""
    _call(
        "evalsched.commands:eval_command",
        model_dir=model_dir, tasks=tasks, limit=limit, num_fewshot=num_fewshot, workers=workers, output=output,
        include_path=include_path, strict=strict, exact=exact, samples=samples, apply_chat_template=apply_chat_template,
        system_instruction=system_instruction, fewshot_as_multiturn=fewshot_as_multiturn, gen_kwargs=gen_kwargs,
        seed=seed, state_dir=state_dir, json_output=json_,
    )  # fmt: skip


@app.command()
def watch(
    directory: Path,
    tasks: Annotated[str, typer.Option("--tasks", help="lm-eval task names, comma-separated.")],
    limit: Annotated[float | None, typer.Option("--limit", help="Documents per task; below 1 a fraction.")] = None,
    order: Annotated[str, typer.Option("--order", help="newest (first) or oldest (first).")] = "newest",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Inference workers.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder of the results; beside each checkpoint when left out.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option("--include-path", help="Folder with more task files.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Evaluate what is there and stop.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Evaluate each checkpoint that appears in a directory, Megatron or Hugging Face layout."""
    _call(
        "evalsched.watch_command:watch_command", directory=directory, tasks=tasks, limit=limit, order=order,
        workers=workers, output=output, include_path=include_path, once=once, state_dir=state_dir,
    )  # fmt: skip


@app.command()
def report(
    job_or_dir: str,
    format_: Annotated[ReportFormat, typer.Option("--format", help="How to print it.")] = ReportFormat.MD,
    state_dir: StateDir = None,
    url: Url = None,
) -> None:
    """The report of a job or of a results folder."""
    _call(
        "evalsched.report_command:report_command",
        job_or_dir=job_or_dir,
        format_=format_.value,
        state_dir=state_dir,
        url=url,
    )


@app.command()
def retry(trial: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Put a failed trial back into the queue."""
    _call("evalsched.report_command:retry_command", trial=trial, state_dir=state_dir, url=url)


@tasks_app.command("list")
def tasks_list(json_: Json = False) -> None:
    """What is runnable now, what needs preparing, and how."""
    _call("evalsched.benchmarks:list_command", json_output=json_)


@tasks_app.command("show")
def tasks_show(
    task: str,
    model: Annotated[Path, typer.Option("--model", help="Model directory whose tokenizer is used.")],
    document: Annotated[int, typer.Option("--document", help="Number of the document.")] = 0,
    num_fewshot: Annotated[int | None, typer.Option("--num-fewshot", min=0, help="Few-shot examples.")] = None,
    include_path: Annotated[Path | None, typer.Option("--include-path", help="Folder with more task files.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Use the chat template.")] = False,
    json_: Json = False,
) -> None:
    """The tokens of a document's prompts, as the engine gets them."""
    _call(
        "evalsched.show_command:show_command", task=task, model=model, document=document, num_fewshot=num_fewshot,
        include_path=include_path, apply_chat_template=apply_chat_template, json_output=json_,
    )  # fmt: skip


@tasks_app.command("prepare")
def tasks_prepare(
    names: Annotated[list[str] | None, typer.Argument(help="Tasks to prepare; all when left out.")] = None,
) -> None:
    """Build offline tasks from installed packages into the user's cache."""
    _call("evalsched.benchmarks:prepare_command", names=names or [])


# ------------------------------------------------------------------------------------------ checkpoints


@checkpoint_app.command("list")
def checkpoint_list(directory: Path, json_: Json = False) -> None:
    """Published checkpoints of a directory."""
    _call("pretrain.checkpoint_commands:list_command", directory=directory, json_output=json_)


@checkpoint_app.command("verify")
def checkpoint_verify(directory: Path, json_: Json = False) -> None:
    """Check every byte of a checkpoint against its manifest."""
    _call("pretrain.checkpoint_commands:verify_command", directory=directory, json_output=json_)


@checkpoint_app.command("export")
def checkpoint_export(
    directory: Path,
    output: Annotated[Path | None, typer.Option("--output", help="Where; beside the checkpoint when left out.")] = None,
) -> None:
    """Write the Hugging Face export of a published checkpoint."""
    _call("pretrain.checkpoint_commands:export_command", directory=directory, output=output)


# ------------------------------------------------------------------------------------------ the operator


@app.command()
def plan(
    clusters: Annotated[list[Path], typer.Argument(metavar="CLUSTER.yaml...")],
    json_: Json = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the runner-up plans too.")] = False,
) -> None:
    """The optimal slots per job, priced and explained."""
    _call("planner.plan_command:plan_command", paths=clusters, json_output=json_, explain=explain)


@app.command()
def simulate(
    scenario: Path,
    json_: Json = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed instead of the scenario's.")] = None,
) -> None:
    """Run the production policies against a simulated cluster."""
    _call("planner.simulate_command:simulate_command", path=scenario, json_output=json_, html=html, seed=seed)


@app.command()
def diagnose(
    log_files: Annotated[list[Path], typer.Argument(metavar="LOG...")],
    json_: Json = False,
    one_job: Annotated[
        bool, typer.Option("--one-job", help="The files are one job's logs: one verdict, clocks aligned.")
    ] = False,
) -> None:
    """From a wall of log lines to the root cause, the node and the action."""
    _call("pretrain.diagnosis.command:diagnose_command", paths=log_files, json_output=json_, one_job=one_job)


@app.command()
def nodecheck(json_: Json = False, state_dir: StateDir = None, url: Url = None) -> None:
    """Two rounds of all-gather and matmul that find a dead or slow node or a bad link."""
    _call("pretrain.nodecheck:nodecheck_command", json_output=json_, state_dir=state_dir, url=url)


@app.command()
def nodes(json_: Json = False, state_dir: StateDir = None, url: Url = None) -> None:
    """The cluster's nodes and their health."""
    _call("planner.status:nodes_command", json_output=json_, state_dir=state_dir, url=url)


@app.command()
def drain(node: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Move all work off a node and keep new work away."""
    _call("planner.status:drain_command", node=node, state_dir=state_dir, url=url)


@app.command()
def cordon(node: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Keep new work away from a node; what runs there stays."""
    _call("planner.status:cordon_command", node=node, state_dir=state_dir, url=url)


@app.command()
def uncordon(node: str, state_dir: StateDir = None, url: Url = None) -> None:
    """Let a node take work again."""
    _call("planner.status:uncordon_command", node=node, state_dir=state_dir, url=url)


def main() -> None:
    """Entry point: errors raised on purpose are one line on stderr and their own exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign gets "?", not a traceback
    try:
        app()
    except PlanariaError as error:
        print(f"planaria: {one_line(error)}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        print("planaria: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(int(ExitCode.FAILED))


if __name__ == "__main__":
    main()

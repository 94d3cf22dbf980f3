"""Runs evaluations to their end over whatever workers there are: the core of the scheduler and of ``planaria eval``.

One thread calls :meth:`Conductor.tick` several times a second. What takes long (hashing, recording, scoring) runs in
threads beside it and only returns values. Responses are written to the ledger before anything is concluded from
them, so that a conductor that is killed at any instant repeats at most what was in flight.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from evalsched.dispatches import Dispatches
from evalsched.estimates import Estimates
from evalsched.finishing import (
    check_shard,
    expect_end,
    note_check,
    record_somewhere,
    say_skipped,
    score_early,
    score_run,
    score_somewhere,
)
from evalsched.inbox import Heard, Inbox
from evalsched.ledger import Ledger
from evalsched.messages import Answers, Ended, Left, ModelRef
from evalsched.metric_desk import MetricDesk
from evalsched.roster import Roster, stands_still
from evalsched.runs import Identified, OutShard, Prepared, Run, RunSpec, WaitingShard, identify, prepare
from evalsched.scoring import ScoreJob, ScoreOutcome
from evalsched.shards import take
from evalsched.types import Response, digest_of
from planner.errors import BadInputError, FencedError, MissingServiceError, PlanariaError, one_line
from planner.events import Action, TrialState
from planner.packing import DEPTH, MAX_ATTEMPTS, OutView, WorkerView, assign
from planner.store import ClusterStore
from planner.worker_table import WorkerTable

log = logging.getLogger("planaria.evaluation")

PROGRESS_SHARE = 0.25
"""An attempt that answered so much of its shard is not counted as a failed one."""
SWAP_SECONDS = 1.0
"""What another checkpoint costs a worker that holds one."""
LAST_WORD_SECONDS = 2.0
"""How long a run whose requests are all answered waits for its shards to say that they ended."""
_READ_ROUNDS = 8
"""Most pieces of answers that one tick takes in, some 200,000 responses."""


class Conductor:
    """Evaluation runs, workers and what is out between them.

    Args:
        store: cluster store (a private one for ``planaria eval``), with the secret.
        ledger: writable; the one writer.
        app: Celery application on the same Redis.
        device: what the workers' engines run on.
        kill_worker: ends a worker that hangs.
        scorer: scores a run whose responses are all in; by default on a metric worker, or else in a subprocess.
        stage: brings a model into the memory of nodes that are likely to run it, before they have a worker.
    """

    def __init__(
        self,
        store: ClusterStore,
        ledger: Ledger,
        app: Any,
        *,
        device: str = "cpu",
        kill_worker: Callable[[str, str], None] = lambda worker, reason: None,
        scorer: Callable[[ScoreJob], ScoreOutcome] | None = None,
        stage: Callable[[ModelRef], None] = lambda model: None,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.table = WorkerTable(store.link.call)
        self.runs: dict[str, Run] = {}
        self.dispatches = Dispatches(self.table, app)
        self.roster = Roster(self.table)
        self.estimates = Estimates(ledger, device)
        self.expected_workers = 1
        self._device = device
        self._kill = kill_worker
        self.desk = MetricDesk(self.table, self.dispatches.post, lambda: self.roster.metric())
        self._scorer = scorer
        self._stage = stage
        self._inbox = Inbox(store, self.desk, self.runs, self.out)
        self._work: dict[str, Future[Any]] = {}
        self._recording = threading.Lock()

    # ------------------------------------------------------------------ runs

    def add(self, spec: RunSpec) -> Run:
        """Take an evaluation on; one that is under way already is returned as it is."""
        run = self.runs.get(spec.id)
        if run is None:
            self.estimates.learn_beside()
            run = Run(spec, spec.id)
            self.runs[spec.id] = run
            self.table.put_run(spec.id, spec.to_json())
            self._begin(run)
        return run

    def restore(self) -> None:
        """Take up what an earlier conductor left: its runs, and the shards that live workers still have."""
        self.dispatches.restore()
        for record in self.table.runs().values():
            self.add(RunSpec.from_json(record))

    def retry(self, name: str) -> Run:
        """Put a failed run back into the queue; ``name`` is its id or the number of one of its trials.

        Raises:
            BadInputError: no run of that name failed.
        """
        for run in self.runs.values():
            trials = {str(trial.id) for trial in run.prepared.trials.values()} if run.prepared else set()
            if (name == run.id or name in trials) and (run.state is TrialState.FAILED or run.failed):
                self._forgive(run)
                fresh = Run(run.spec, run.id)
                self.runs[run.id] = fresh
                self.table.put_run(run.id, run.spec.to_json())
                self._begin(fresh)
                return fresh
        raise BadInputError(f"trial {name}: no failed trial of that name; see planaria status --json")

    def skip(self, run: Run, reason: str, now: float) -> bool:
        """Leave a run out of which nothing was run yet; False where that is too late."""
        if run.over or run.begun or run.state is TrialState.SCORING or self.dispatches.of_run(run.id):
            return False
        run.ended = now
        self._set_state(run, TrialState.SKIPPED, reason)
        self.table.drop_run(run.id)
        in_background(say_skipped, run, reason)
        return True

    def _forgive(self, run: Run) -> None:
        mine = [row["id"] for row in self.ledger.failed_shards() if row["payload"].get("run") == run.id]
        self.ledger.forgive(mine)
        for trial in run.prepared.trials.values() if run.prepared else ():
            wrong = [one.id for one in self.ledger.responses_of(trial.id) if one.error is not None]
            self.ledger.forget_responses(trial.id, wrong)

    def _begin(self, run: Run) -> None:
        self._submit(run, self._identify, run.spec)

    def _identify(self, spec: RunSpec) -> Identified:
        return identify(spec, self._device)

    def _prepare(self, spec: RunSpec, model: Identified) -> Prepared:
        with self._recording:  # the next checkpoint's requests are the same, and then found in the cache
            found = prepare(spec, model, self.ledger, lambda job: record_somewhere(self.desk, job, spec.id))
        self.estimates.wait_for_learning()
        return found

    def _submit(self, run: Run, function: Callable[..., Any], *arguments: Any) -> None:
        self._work[run.id] = in_background(function, *arguments)

    def _set_state(self, run: Run, state: TrialState, reason: str = "") -> None:
        old, run.state, run.reason = run.state, state, reason
        for trial in run.prepared.trials.values() if run.prepared else ():
            if state is TrialState.DONE and trial.task in run.failed:
                self.ledger.set_trial_state(trial.id, TrialState.FAILED, run.failed[trial.task])
            else:
                self.ledger.set_trial_state(trial.id, state, reason)
        self.store.tell(
            Action.TRIAL_STATE, job=run.spec.job, old=old.value, new=state.value, reason=reason, run=run.id,
            step=run.spec.step, model=run.spec.model, tasks=list(run.spec.settings.tasks), failed=dict(run.failed),
        )  # fmt: skip

    # ------------------------------------------------------------------ the tick

    def tick(self, now: float) -> None:
        """One round: answers in, finished work on, workers watched, shards out. ``now``: wall clock, seconds."""
        self._collect(now)
        self._finish_work(now)
        self._watch(now)
        self._warm_newcomers()
        self._feed(now)
        self.estimates.flush(self.ledger, now)

    @property
    def out(self) -> dict[str, OutShard]:
        """Dispatches that are out, by id."""
        return self.dispatches.out

    @property
    def idle(self) -> bool:
        """Whether every run is over."""
        return all(run.over for run in self.runs.values())

    def close(self) -> None:
        """Give up what runs beside the ticks; nothing is lost by it."""
        self.desk.close()

    # ------------------------------------------------------------------ answers

    def _collect(self, now: float) -> None:
        """Read what workers said; write it down; only then act on it."""
        for _ in range(_READ_ROUNDS):
            batch = self._inbox.read()
            if batch is None:
                return
            try:
                self._write_down(batch.heard)
            except MissingServiceError as error:
                log.warning("action=ledger.away reason=%s", error)  # the stream keeps them; the next tick tries again
                return
            for message, responses in batch.heard:
                self._act(message, responses, now)
            self._inbox.passed(batch)

    def _write_down(self, heard: Sequence[Heard]) -> None:
        by_worker: dict[str, dict[int, list[Response]]] = {}
        for message, responses in heard:
            run = self.runs.get(message.run) if isinstance(message, Answers) else None
            if run is None or run.prepared is None or not isinstance(message, Answers):
                continue
            if self.out[message.dispatch].check:
                continue
            for response in responses:
                trial = run.prepared.trials.get(response.id.task)
                if trial is not None:
                    by_worker.setdefault(message.worker, {}).setdefault(trial.id, []).append(response)
        for worker, found in by_worker.items():
            self.ledger.put_responses(found, worker)

    def _act(self, message: Answers | Ended | Left, responses: Sequence[Response], now: float) -> None:
        if isinstance(message, Left):
            self.worker_gone(message.worker, message.reason, now, orderly=True)
            return
        out = self.out.get(message.dispatch)
        if out is None:
            return
        run = self.runs.get(out.run)
        if run is None or run.over:
            self.dispatches.drop([message.dispatch])
        elif isinstance(message, Ended):
            self._note_end(run, out, message, now)
        elif out.check:
            note_check(run, list(responses))
        else:
            run.answered((one.id for one in responses), now)

    def _note_end(self, run: Run, out: OutShard, message: Ended, now: float) -> None:
        self.dispatches.drop([out.dispatch])
        if message.load_seconds > 1:
            run.timings["load_seconds"] = run.timings.get("load_seconds", 0.0) + message.load_seconds
        if out.check:
            if message.outcome != "done":
                run.check = {"problem": message.reason or message.outcome}
            run.check_sent = True
            return
        if message.outcome == "done":
            run.pace.shard((one.id for one in out.shard.requests), message.seconds)
            run.recut(self.expected_workers)
            self.estimates.shard_ended(run, out, message)
            run.timings["engine_seconds"] = run.timings.get("engine_seconds", 0.0) + message.seconds
            self.store.tell(
                Action.SHARD_COMPLETED, job=run.spec.job, run=run.id, shard=out.shard.id, worker=out.worker,
                seconds=message.seconds, estimate=out.shard.seconds, load_seconds=message.load_seconds,
                requests=len(out.shard.requests),
            )  # fmt: skip
            run.take_back(out, now, count=True)  # nothing, unless a worker left requests out
        elif message.outcome == "failed":
            self._failed(run, out, message.reason, now)
        else:
            run.take_back(out, now, count=False)

    def _failed(self, run: Run, out: OutShard, reason: str, now: float) -> None:
        """A counted attempt; after three, the shard is kept aside and its tasks fail."""
        if out.check:
            run.check, run.check_sent = {"problem": reason}, True
            return
        if self.dispatches.copies(out):
            return
        answered = sum(one.id not in run.open for one in out.shard.requests)
        if answered >= PROGRESS_SHARE * len(out.shard.requests):
            # It got somewhere this time: what kills whoever runs it comes first next time, and is counted then.
            reached = f"{reason}; the rest of its shard goes on"
            self.store.tell(
                Action.SHARD_FAILED, job=run.spec.job, reason=reached, run=run.id, shard=out.shard.id,
                worker=out.worker, attempts=out.attempts,
            )  # fmt: skip
            run.take_back(out, now, count=False)
            return
        name = digest_of([run.id, out.shard.id])
        attempts = self.ledger.count_attempt(name, reason, {"run": run.id, "tasks": list(out.shard.tasks)})
        self.store.tell(
            Action.SHARD_FAILED, job=run.spec.job, reason=reason, run=run.id, shard=out.shard.id, worker=out.worker,
            attempts=attempts,
        )  # fmt: skip
        out.attempts = attempts - 1
        if attempts < MAX_ATTEMPTS:
            run.take_back(out, now, count=True)
            self._narrow(run, out.shard.id)
            return
        self.ledger.quarantine(name)
        tasks = {one.task for one in out.shard.requests if one.id in run.open}
        text = f"a shard failed {attempts} times, last: {reason}"
        self.store.tell(
            Action.SHARD_QUARANTINED, job=run.spec.job, reason=text, run=run.id, shard=out.shard.id,
            tasks=sorted(tasks),
        )  # fmt: skip
        run.fail_task(tasks, text)

    def _narrow(self, run: Run, shard_id: str) -> None:
        """A shard of several tasks that failed is tried again task by task, so that one cannot fail the others."""
        held = run.waiting.get(shard_id)
        if held is None or len(held.shard.tasks) < 2:
            return
        del run.waiting[shard_id]
        for task in held.shard.tasks:
            requests = tuple(one for one in held.shard.requests if one.task == task)
            part = replace(
                held.shard,
                id=digest_of([shard_id, task]),
                requests=requests,
                seconds=held.shard.seconds * len(requests) / len(held.shard.requests),
            )
            run.waiting[part.id] = replace(held, shard=part)

    # ------------------------------------------------------------------ work beside the ticks

    def _finish_work(self, now: float) -> None:
        for run in list(self.runs.values()):
            future = self._work.get(run.id)
            if future is not None and future.done():
                del self._work[run.id]
                self._take_result(run, future, now)
            elif future is None and not run.over:
                self._advance(run, now)
            if run.state is TrialState.RUNNING:
                for task in run.early_tasks():  # a long metric overlaps with the other tasks' inference
                    run.early[task] = in_background(score_early, run, self.ledger, self._scorer_of(run), task)

    def _take_result(self, run: Run, future: Future[Any], now: float) -> None:
        if run.over:
            return  # it was left out meanwhile
        try:
            result = future.result()
        except FencedError:
            raise
        except MissingServiceError as error:
            log.warning("action=run.waits run=%s reason=%s", run.id, error)
            self._begin(run)
            return
        except PlanariaError as error:
            self._give_up(run, error, now)
            return
        except Exception as error:
            log.exception("action=run.failed run=%s", run.id)
            self._give_up(run, error, now)
            return
        if isinstance(result, Identified):
            self._identified(run, result)
        elif isinstance(result, Prepared):
            self._prepared(run, result, now)
        elif isinstance(result, ScoreOutcome):
            self._scored(run, result, now)

    def _give_up(self, run: Run, error: BaseException, now: float) -> None:
        run.error, run.ended = error, now
        self.dispatches.drop_run(run.id)
        self._set_state(run, TrialState.FAILED, one_line(error))
        self.table.drop_run(run.id)

    def _identified(self, run: Run, model: Identified) -> None:
        run.model = model
        self._set_state(run, TrialState.RECORDING)
        if model.ref.stage:
            self._stage(model.ref)
        self._warm(run, self.live())
        self._submit(run, self._prepare, run.spec, model)

    def _warm_newcomers(self) -> None:
        """Workers that came up while requests are being recorded load the model meanwhile."""
        run = next((one for one in self.runs.values() if one.state is TrialState.RECORDING and one.model), None)
        if run is not None:
            self._warm(run, [worker for worker in self.live() if self.roster.model_of(worker) is None])

    def _warm(self, run: Run, workers: Sequence[str]) -> None:
        """Let those of ``workers`` that are idle load a run's model."""
        assert run.model is not None
        busy = {one.worker for one in self.out.values()}
        for worker in workers:
            if worker not in busy:
                self.roster.sent_model[worker] = run.model.ref.digest
                self.dispatches.warm(run, worker)

    def _prepared(self, run: Run, found: Prepared, now: float) -> None:
        run.prepared = found
        out = {
            request.id: one
            for one in self.out.values()
            if one.run == run.id and not one.check
            for request in one.shard.requests
        }
        run.predictor = self.estimates.predictor(run)
        run.tails = self.estimates.tails(found.recording)
        costs = {request.id: run.predictor.seconds(request) for request in found.open}
        run.open = set(costs)
        run.longest = max(costs.values(), default=0.0)
        run.left = Counter(one.task for one in costs)
        run.keeping = frozenset(
            one.task for one in found.recording.tasks if one.unsafe_code or one.sandboxed or one.judged
        )
        todo = [request for request in found.open if request.id not in out] if out else found.open
        run.pace.begin(costs, learned=bool(run.predictor.shard.weights))
        run.cut(todo, self.expected_workers)
        expect_end(run)
        run.timings["record_seconds"] = found.recording.seconds
        run.began = now
        self._quarantined_before(run)
        self._set_state(run, TrialState.RUNNING)

    def _quarantined_before(self, run: Run) -> None:
        """Shards that an earlier conductor kept aside stay aside."""
        names = {digest_of([run.id, name]): name for name in run.waiting}
        for row in self.ledger.failed_shards():
            name = names.get(row["id"])
            if row["quarantined"] and row["payload"].get("run") == run.id:
                # By its tasks: better estimates may have cut the requests otherwise this time.
                tasks = set(row["payload"].get("tasks", ())) & run.tails.keys()
                run.fail_task(tasks, f"a shard failed {row['attempts']} times, last: {row['reason']}")
            elif name in run.waiting:
                run.waiting[name].attempts = row["attempts"]

    def _advance(self, run: Run, now: float) -> None:
        """Move a run whose shards are through on: to the check, to scoring."""
        if run.state is not TrialState.RUNNING or run.open or run.waiting:
            return
        if any(not one.check for one in self.dispatches.of_run(run.id)):
            run.settled = run.settled or now
            if now - run.settled < LAST_WORD_SECONDS:
                return  # the last shard's end comes just after its last answers
            self.dispatches.drop_run(run.id, checks=False)  # second copies of what is answered
        if run.pace.total > 0 and run.check is None and not run.check_sent and self._send_check(run, now):
            return
        if self.dispatches.of_run(run.id):
            return
        run.timings["run_seconds"] = now - run.began
        self._set_state(run, TrialState.SCORING)
        self._submit(run, self._score, run)

    # ------------------------------------------------------------------ the end of a run

    def _send_check(self, run: Run, now: float) -> bool:
        """Have a worker that holds the model run a sample singly; False where that cannot be."""
        digest = run.model.ref.digest if run.model else None
        live = [worker for worker in self.live() if self.roster.model_of(worker) == digest]
        shard = check_shard(run)
        if not live or shard is None:
            return False
        run.check_sent = True
        return self._dispatch(run, WaitingShard(shard=shard), live[0], now, check=True)

    def _score(self, run: Run) -> ScoreOutcome:
        wait(run.early.values())  # what they leave is used here
        return score_run(run, self.ledger, self._scorer_of(run), self.estimates.calibration())

    def _scorer_of(self, run: Run) -> Callable[[ScoreJob], ScoreOutcome]:
        return self._scorer or (lambda job: score_somewhere(self.desk, job, run.id))

    def _scored(self, run: Run, outcome: ScoreOutcome, now: float) -> None:
        run.outcome, run.ended = outcome, now
        self.estimates.scored(run, run.timings.get("score_seconds", 0.0))
        self._set_state(run, TrialState.DONE)
        self.store.tell(
            Action.REPORT_PUBLISHED, job=run.spec.job, run=run.id, step=run.spec.step, path=outcome.results,
            failed=dict(run.failed),
        )  # fmt: skip
        self.table.drop_run(run.id)

    # ------------------------------------------------------------------ workers

    @property
    def served(self) -> set[str]:
        """Workers that were ready at least once."""
        return self.roster.served

    def live(self) -> list[str]:
        """Workers that take shards, by name."""
        return self.roster.live()

    def _watch(self, now: float) -> None:
        """Find workers that are silent, deaf or stuck; their shards go elsewhere at once."""
        oldest: dict[str, float] = {}
        for one in self.out.values():
            oldest[one.worker] = min(one.sent, oldest.get(one.worker, one.sent))
        for missing in [*self.roster.refresh(oldest), *self.roster.deaf(oldest, now)]:
            self._kill(missing.worker, missing.reason)
            self.worker_gone(missing.worker, missing.reason, now)
        self.estimates.look_at(self.roster.records, self.runs)
        for record in list(self.roster.records.values()):
            out = self.out.get(record.facts.get("dispatch") or "")
            if out is None:
                continue
            out.begun = out.begun or now
            still = stands_still(record, out.begun, out.shard.seconds, now)
            if still is not None:
                reason = f"its engine made no step for {still:.0f} s"
                self._kill(record.worker, reason)
                self.worker_gone(record.worker, reason, now)

    def worker_gone(self, worker: str, reason: str, now: float, *, orderly: bool = False) -> None:
        """A worker is gone: what it had begun is a counted attempt (unless it left in order), the rest just waits."""
        if not self.roster.give_up(worker):
            return
        self.estimates.forget(worker)
        mine = self.dispatches.of_worker(worker)
        begun = {one.dispatch for one in mine if not orderly and self.table.claimed(one.dispatch)}
        self.dispatches.drop([one.dispatch for one in mine])
        for one in mine:
            run = self.runs.get(one.run)
            if run is None or run.over:
                continue
            if one.dispatch in begun:
                self._failed(run, one, f"worker {worker} died: {reason}", now)
            elif one.check:
                run.check, run.check_sent = {"problem": f"worker {worker} is gone"}, True
            elif not self.dispatches.copies(one):
                run.take_back(one, now, count=False)
        self.dispatches.forget_queue(worker)
        self.store.tell(Action.WORKER_EXITED, reason=reason, worker=worker, orderly=orderly, shards=len(mine))

    # ------------------------------------------------------------------ sending

    def _feed(self, now: float) -> None:
        runs = [run for run in self.runs.values() if run.state is TrialState.RUNNING and run.waiting]
        live = self.live()
        if not live:
            return
        views = [self._worker_view(name) for name in live]
        if all(len(view.out) >= DEPTH for view in views):
            return
        names: dict[str, str] = {}  # a shard of which a piece was sent goes on under another id
        for chosen in assign([run.view() for run in runs], views, now):
            run = self.runs[chosen.run]
            if chosen.second_copy:
                self._send_copy(run, chosen.shard, chosen.worker, now)
                continue
            waiting = run.waiting.pop(names.get(chosen.shard, chosen.shard), None)
            if waiting is None:
                continue  # its atoms gave fewer pieces than were planned
            if chosen.seconds is not None:
                head, rest = take(waiting.shard, run.cost, chosen.seconds, scope=run.id)
                if rest is not None:
                    run.wait(rest)
                    names[chosen.shard] = rest.id
                    waiting = replace(waiting, shard=head)
            if not self._dispatch(run, waiting, chosen.worker, now):
                run.waiting[waiting.shard.id] = waiting
                return

    def _worker_view(self, worker: str) -> WorkerView:
        mine = tuple(
            OutView(
                run=one.run, shard=one.shard.id, seconds=one.shard.seconds, begun=one.begun,
                copies=2 if one.check else self.dispatches.copies(one), high=one.high,
            )
            for one in self.dispatches.of_worker(worker)
        )  # fmt: skip
        return WorkerView(
            worker=worker, model=self.roster.model_of(worker), out=mine, speed=self.estimates.speeds.of(worker),
            load_seconds=SWAP_SECONDS, group=self.roster.sent_group.get(worker, ""),
        )  # fmt: skip

    def _send_copy(self, run: Run, shard_id: str, worker: str, now: float) -> None:
        """Run a straggler's unanswered rest a second time; whoever answers first is believed."""
        for one in list(self.out.values()):
            left = tuple(request for request in one.shard.requests if request.id in run.open)
            if one.run == run.id and one.shard.id == shard_id and left:
                shard = replace(one.shard, requests=left)
                self._dispatch(run, WaitingShard(shard=shard, attempts=one.attempts), worker, now)
                return

    def _dispatch(self, run: Run, waiting: WaitingShard, worker: str, now: float, *, check: bool = False) -> bool:
        assert run.model is not None
        out = self.dispatches.send(run, waiting, worker, now, check=check)
        if out is None:
            return False
        self.estimates.send(run, out)
        self.roster.sent_model[worker] = run.model.ref.digest
        self.roster.sent_group[worker] = waiting.group
        return True


def in_background(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call ``function`` in a thread of its own that never keeps the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever takes the result decides
            future.set_exception(error)

    threading.Thread(target=run, name="evaluation", daemon=True).start()
    return future

"""From a :class:`planner.messages.RankSpec` to a trainer that is ready to run: the one place that knows all parts."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from planner import manifest
from planner.errors import BadInputError
from planner.events import Action
from planner.messages import RankCheckpoint, RankNote, RankPhase, RankSpec, RankStep
from planner.pretrain_config import PretrainConfig
from pretrain import (
    data,
    device,
    healing,
    hf_import,
    model,
    optimizer,
    parallel,
    peer,
    published,
    recovery,
    regroup,
    snapshot,
    tokenizer,
)
from pretrain.channel import Channel
from pretrain.checkpoint import Parts
from pretrain.collective import Membership
from pretrain.data import Corpus, Samples
from pretrain.faults import Injector
from pretrain.handover import HandedOverCheckpoints, Placement, find_placement
from pretrain.job_folder import checkpoint_folder
from pretrain.order import SampleOrder
from pretrain.parallel import Layout
from pretrain.published import Fence
from pretrain.reform import Orders, Reformer, Waiting
from pretrain.remote import RemoteCheckpoints
from pretrain.saving import PublishedCheckpoints
from pretrain.snapshot_state import shards_optimizer
from pretrain.snapshots import memory_dir, open_snapshots
from pretrain.state import TrainState
from pretrain.step import Machine
from pretrain.tokenizer import Tokenizer
from pretrain.trainer import SaveRetry, StopRequest, Trainer
from pretrain.validation import Validation


@dataclass(frozen=True)
class _Text:
    tokenizer: Tokenizer
    corpus: Corpus
    samples: Samples


def cache_folder(job_folder: Path) -> Path:
    """Where token indices are kept: one folder for all jobs of a state directory."""
    state_dir = job_folder.parent.parent if job_folder.parent.name == "jobs" else job_folder
    return state_dir / "cache"


def assemble(spec: RankSpec, channel: Channel) -> Trainer:
    """Read the data, join the other ranks, build the model and load its state, from disk or from a peer.

    Raises:
        BadInputError: data, tokenizer or layout cannot work; found before the other ranks are waited for.
        MissingServiceError: the rendezvous store does not answer.
        GivenUpError: there are checkpoints, and none can be used.
        DismissedError: it was to join a running job, and is not needed any more.
    """
    where = device.prepare(spec.device)
    torch.set_num_threads(spec.threads)
    text = _prepare_text(spec.config, Path(spec.job_folder))
    reformer = Reformer(spec, Orders(), {}, spec.rank)
    if spec.joining:
        return _join_running(spec, channel, text, where, reformer)
    layout = parallel.layout(spec.rank, spec.world_size, spec.config.parallel.tensor, spec.config.parallel.pipeline)
    membership = Membership(spec.incarnation)
    with membership.joining():
        parallel.join(
            layout,
            store_host=spec.store_host,
            store_port=spec.store_port,
            prefix=f"{spec.job}/{spec.incarnation}",
            bind_address=spec.bind_address,
        )
    _same_data_everywhere(text.corpus.train.digest)
    built = _Built(spec, channel, text, where, layout, membership, reformer)
    state = _load(spec, built, channel, text.corpus.train.digest)
    return built.trainer(state)


def _join_running(spec: RankSpec, channel: Channel, text: _Text, where: torch.device, reformer: Reformer) -> Trainer:
    """Prepared: say so, wait for the order, and join the running ranks with the state that a peer sends."""
    waiting = Waiting(reformer.orders, spec.rank, channel)
    channel.listen(waiting.on_agent)
    _warm_up()
    channel.send(RankPhase(phase="ready", step=0, time=time.time()))
    order = reformer.await_order(spec.incarnation, None)
    layout = reformer.layout_of(order)
    channel.rename(order.incarnation, layout.rank)
    membership = Membership(order.incarnation)
    waiting.watch(membership, layout)
    reformer.connect(order, layout, membership)
    spec = spec.model_copy(update={"incarnation": order.incarnation, "rank": layout.rank})
    built = _Built(spec, channel, text, where, layout, membership, reformer)
    built.injector.forget(order.fired_faults)
    trainer = built.trainer(built.checkpoints.parts.state)
    channel.listen(trainer.on_agent)
    for message in waiting.kept:
        trainer.on_agent(message)
    healing.enter(trainer, order, newcomer=True)
    return trainer


def _warm_up() -> None:
    """What a process does once and late (the first optimizer loads torch's compiler stack): now, while nobody waits."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    warm = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    warm.step()


class _Built:
    """The parts of a rank whose groups are in place: model, optimizer, checkpoints, snapshots."""

    def __init__(
        self,
        spec: RankSpec,
        channel: Channel,
        text: _Text,
        where: torch.device,
        layout: Layout,
        membership: Membership,
        reformer: Reformer,
    ) -> None:
        config = spec.config
        parallel.seed_generators(config.seed)
        vocabulary = model.padded_vocabulary(text.tokenizer.size, config.parallel.tensor)
        built = model.build(config, vocabulary)
        if config.start_from is not None:
            hf_import.load_weights(Path(config.start_from).expanduser(), built, config.model)
        chunk = model.wrap(built)
        optim = optimizer.build_optimizer(config, [chunk])
        reformer.installed = regroup.present()
        self.spec, self.channel, self.text, self.reformer = spec, channel, text, reformer
        self.injector = Injector(config.faults, spec.fired_faults, spec.origin_rank, channel.send)
        self.order = SampleOrder(text.samples.count, config.seed)
        fresh = TrainState(seed=config.seed, incarnation=spec.incarnation, data_digest=text.corpus.train.digest)
        self.machine = Machine(
            layout, chunk, optim, text.samples, self.order.index, self.injector, where, membership=membership
        )
        self.sharded = shards_optimizer(optim)
        self.saved_step = 0
        self.placement = None if spec.joining else self._placement(layout)
        if self.placement is not None:
            spec = spec.model_copy(update={"lease_token": self.placement.token})
        self.checkpoints = open_checkpoints(
            spec, Parts(model=chunk, optimizer=optim, state=fresh, config=config, vocabulary=vocabulary),
            channel, self.injector,
        )  # fmt: skip
        if isinstance(self.checkpoints, HandedOverCheckpoints):
            self.checkpoints.placement = self.placement

    def trainer(self, state: TrainState) -> Trainer:
        """The trainer that begins with ``state`` (collective among the ranks that start together)."""
        spec, machine, checkpoints = self.spec, self.machine, self.checkpoints
        healable = spec.agent_socket is not None and regroup.can_swap(machine.chunk)
        healable = healable and spec.config.health.heal_in_place
        placement = self.placement
        snapshots = open_snapshots(
            checkpoints.parts,
            machine.layout,
            fence=checkpoints.fence,
            tell=self.channel.send,
            memory=_memory(spec),
            first_replica_here=placement is not None and placement.copies,
            own_memory=spec.memory_dir is None,
        )
        traffic: dict[str, Any] = {}
        if isinstance(checkpoints, HandedOverCheckpoints):
            checkpoints.snapshots = snapshots
            if spec.peers and checkpoints.memory is not None:
                traffic["traffic"] = peer.TrafficFlags(checkpoints.memory / peer.FLAGS, spec.config.workers.max).busy
            if placement is not None:
                checkpoints.take_over(state.step)

        def on_reformed(layout: Layout, incarnation: int) -> None:
            now = self._placement(layout)
            checkpoints.fence = Fence(spec.job, incarnation, now.token)
            snapshots.reformed(layout, checkpoints.fence, first_here=now.copies)
            kept = True
            if isinstance(checkpoints, HandedOverCheckpoints):
                checkpoints.placement = now
                kept = checkpoints.take_over(trainer.state.step)
            checkpoints.claim()
            if not kept:  # the copy died with its rank: save again at this step's end, or the next one's
                trainer.facts.saved.pop(trainer.state.step, None)
                trainer.retry = SaveRetry(at_step=trainer.state.step)

        trainer = Trainer(
            config=spec.config,
            incarnation=spec.incarnation,
            machine=machine,
            schedule=optimizer.build_schedule(spec.config, machine.optimizer),
            order=self.order,
            state=state,
            channel=self.channel,
            checkpoints=checkpoints,
            validation=_validation(spec.config, self.text.corpus, machine.device),
            stop=StopRequest(),
            job_folder=Path(spec.job_folder),
            snapshots=snapshots,
            reformer=self.reformer if healable else None,
            on_reformed=on_reformed,
            parts=checkpoints.parts,
            saved_step=self.saved_step,
            **traffic,
        )
        return trainer

    def _placement(self, layout: Layout) -> Placement:
        node = f"{platform.node()} {self.spec.bind_address} {_memory(self.spec)}"
        memory = self.spec.memory_dir is not None
        return find_placement(layout, node, memory=memory, token=self.spec.lease_token, sharded=self.sharded)


def _memory(spec: RankSpec) -> Path | None:
    """The node's folder in host memory; None where nobody named one: then there is no snapshot tier."""
    return Path(spec.memory_dir) if spec.memory_dir is not None else memory_dir()


def open_checkpoints(spec: RankSpec, parts: Parts, channel: Channel, injector: Injector) -> PublishedCheckpoints:
    """The durable tier of a rank: by the node's persister where its agent gave memory, else by the ranks."""
    common: dict[str, Any] = {
        "folder": checkpoint_folder(spec.config, Path(spec.job_folder)),
        "fence": Fence(spec.job, spec.incarnation, spec.lease_token),
        "parts": parts,
        "channel": channel,
        "injector": injector,
    }
    where = spec.config.checkpoint.dir or ""
    memory = snapshot.job_dir(Path(spec.memory_dir), spec.job) if spec.memory_dir is not None else None
    if "://" in where:
        if spec.agent_socket is None:
            raise BadInputError(f"checkpoint.dir {where}: a URL needs an agent with host memory; name a folder")
        common["folder"] = Path(spec.job_folder) / "fetched"
        return RemoteCheckpoints(**common, memory=memory, url=where)
    if spec.agent_socket is None:
        return PublishedCheckpoints(**common)
    return HandedOverCheckpoints(**common, memory=memory)


def _prepare_text(config: PretrainConfig, job_folder: Path) -> _Text:
    tokens = tokenizer.load(config.tokenizer)
    corpus = data.prepare(config.data, tokens, cache_folder(job_folder))
    samples = Samples(corpus.train, config.model.seq_length)
    if samples.count < 1:
        raise BadInputError(
            f"data.train: {corpus.train.tokens} tokens are too few for one sample of model.seq_length "
            f"{config.model.seq_length}; give more text or a shorter sequence"
        )
    return _Text(tokens, corpus, samples)


def _validation(config: PretrainConfig, corpus: Corpus, where: torch.device) -> Validation | None:
    if corpus.valid is None:
        return None
    samples = Samples(corpus.valid, config.model.seq_length)
    return Validation(samples, config.batch.micro, where) if samples.count else None


def _same_data_everywhere(digest: str) -> None:
    """Refuse nodes whose files differ: their ranks would mean different text by the same sample ids (collective)."""
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise BadInputError(
            f"data.train: ranks {odd} see other text than rank 0; give every node the same files and tokenizer"
        )


def _load(spec: RankSpec, built: _Built, channel: Channel, digest: str) -> TrainState:
    """Claim the checkpoints and go on from the nearest newest state; the fresh state where there is none."""
    channel.send(RankPhase(phase="load", step=0, time=time.time()))
    checkpoints = built.checkpoints
    checkpoints.claim()
    resume = checkpoints.find(spec.resume)
    _drop_void(spec, checkpoints.folder, resume, channel)
    state = None if spec.exact_resume else _from_memory(spec, checkpoints, resume, channel)
    built.saved_step = _step_of(resume)
    if state is None and resume is None:
        state = checkpoints.parts.state
    elif state is None:
        assert resume is not None
        state = checkpoints.resume(resume)
        built.saved_step = state.step
    _skip(spec, state, built.order, channel)
    _say_unheard(spec, state, channel)
    if state.data_digest != digest:
        if spec.rank == 0:
            reason = (
                "the training text is not that of the checkpoint; the sample order goes on over the new text"
                f" (digest {digest[:12]}, was {state.data_digest[:12]})"
            )
            channel.send(RankNote(action=Action.CHECKPOINT_LOADED.value, reason=reason, time=time.time()))
        state.data_digest = digest
    return state


def _say_unheard(spec: RankSpec, state: TrainState, channel: Channel) -> None:
    """Steps of the state that was loaded which nobody may have heard of; the supervisor knows which it lacks.

    A state that another job left says nothing of this one.
    """
    if spec.rank == 0:
        for one in state.unheard:
            if one.get("job") == Path(spec.job_folder).name:
                step = {name: value for name, value in one.items() if name != "job"}
                channel.send(RankStep.model_validate(step | {"late": True}))
    state.unheard = []


def _drop_void(spec: RankSpec, folder: Path, resume: Path | None, channel: Channel) -> None:
    """After a roll-back: no checkpoint of the bad stretch stays (rank 0; the folder is claimed)."""
    if spec.rank != 0 or not spec.exact_resume:
        return
    for step, path in published.drop_void(folder, _step_of(resume), spec.state_since):
        reason = "a roll-back made it void"
        channel.send(RankCheckpoint(what="deleted", step=step, path=str(path), reason=reason, time=time.time()))


def _skip(spec: RankSpec, state: TrainState, order: SampleOrder, channel: Channel) -> None:
    """Leave out the samples of the bad stretch, once: state of later incarnations has left them out already."""
    if state.incarnation >= spec.state_since or state.consumed_samples >= spec.skip_to:
        return
    ids = [order.at(position) for position in range(state.consumed_samples, spec.skip_to)]
    state.skipped.extend(ids)
    state.consumed_samples = spec.skip_to
    if spec.rank == 0:
        details = {"step": state.step, "ids": sorted(ids), "verdict": "rolled back"}
        reason = f"a roll-back leaves out {len(ids)} samples after step {state.step}"
        channel.send(RankNote(action=Action.SAMPLES_SKIPPED.value, reason=reason, details=details, time=time.time()))


def _step_of(resume: Path | None) -> int:
    parsed = manifest.parse_step_dir(resume.name) if resume is not None else None
    return parsed[0] if parsed else 0


def _from_memory(
    spec: RankSpec, checkpoints: PublishedCheckpoints, resume: Path | None, channel: Channel
) -> TrainState | None:
    """The state of a snapshot that outlived its rank, where it is as new as the published one (collective)."""
    memory = _memory(spec)
    folder = snapshot.job_dir(memory, spec.job) if memory is not None else None
    began = time.monotonic()
    if memory is not None:
        _bring_from_peers(spec, checkpoints, memory, _step_of(resume), channel)
    dist.barrier()  # all see what one of them fetched
    newer_than = max(0, _step_of(resume) - 1)
    recovered = recovery.from_snapshots(
        checkpoints.parts, folder, newer_than=newer_than, at_most=spec.known_step, since=spec.state_since
    )
    if dist.get_rank() == 0:
        for one in recovered.refused:
            channel.send(
                _told("refused", one.candidate.step, time.monotonic() - began, f"{one.candidate}: {one.reason}")
            )
        if recovered.chosen is not None:
            channel.send(_told("loaded", recovered.chosen.step, time.monotonic() - began, recovered.reason))
    return checkpoints.parts.state if recovered.chosen is not None else None


def _bring_from_peers(
    spec: RankSpec, checkpoints: PublishedCheckpoints, memory: Path, published_step: int, channel: Channel
) -> None:
    """Once per node: where other nodes' memory holds newer state than this node and the durable tier, fetch it."""
    place = checkpoints.placement if isinstance(checkpoints, HandedOverCheckpoints) else None
    if place is not None and place.first:
        own = [found.step for found in snapshot.find(snapshot.job_dir(memory, spec.job)) if found.complete]
        newest = max([published_step, *own])
        brought = peer.bring_newest(memory, spec.peers, job=spec.job, token=spec.token, newer_than=newest)
        for line in brought.trouble:  # a keeper that died with its node is no news: into this rank's log
            print(f"snapshots of other nodes: {line}", file=sys.stderr, flush=True)
        if brought.step is not None:
            reason = f"step {brought.step} came from the memory of {', '.join(brought.sources)}"
            channel.send(RankNote(action=Action.SNAPSHOT_FETCHED.value, reason=reason, time=time.time()))


def _told(what: Literal["refused", "loaded"], step: int, seconds: float, reason: str) -> RankCheckpoint:
    return RankCheckpoint(what=what, step=step, seconds=seconds, reason=reason, time=time.time())

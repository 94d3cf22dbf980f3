"""Every row of the two papers' error tables, and how a detection finds its row."""

from __future__ import annotations

import pytest

from planner.severity import TABLE, Category, Detection, Method, Severity, classify, name_exception, root_cause

EXCEPTION = Method.EXCEPTION_PROPAGATION

UNICRON = [
    ("lost_connection", "SEV1", "node_health"),
    ("exited_abnormally", "SEV2", "process_supervision"),
    ("connection_error", "SEV3", "exception_propagation"),
    ("illegal_memory_access", "SEV2", "exception_propagation"),
    ("ecc_error", "SEV1", "exception_propagation"),
    ("invalid_dma_mapping", "SEV1", "exception_propagation"),
    ("cuda_error", "SEV2", "exception_propagation"),
    ("nvlink_error", "SEV1", "exception_propagation"),
    ("gpu_driver_error", "SEV1", "exception_propagation"),
    ("network_error", "SEV3", "exception_propagation"),
    ("other_software_error", "SEV2", "exception_propagation"),
    ("nccl_timeout", "SEV3", "online_statistics"),
    ("link_flapping", "SEV3", "online_statistics"),
    ("task_hang", "SEV2", "online_statistics"),
]

ACME = {
    "infrastructure": "nvlink_error cuda_error node_failure ecc_error network_error connection_error storage_error "
    "nccl_timeout nccl_remote_error",
    "framework": "dataloader_killed attribute_error out_of_memory runtime_error assertion_error value_error "
    "zero_division model_loading_error dataset_loading_error",
    "script": "file_not_found os_error type_error name_error permission_error import_error key_error syntax_error "
    "argument_error called_process_error index_error",
}

MORE = "illegal_memory_access invalid_dma_mapping gpu_driver_error link_flapping gpu_lost task_hang host_out_of_memory "
MORE += "preempted loss_spike nan_loss checkpoint_corrupt disk_full address_in_use unknown"


@pytest.mark.parametrize(("name", "severity", "method"), UNICRON)
def test_unicron_row(name: str, severity: str, method: str) -> None:
    row = TABLE[name]
    assert (row.severity, row.method, row.paper) == (severity, method, "unicron")


@pytest.mark.parametrize(
    ("category", "name"), [(category, name) for category, names in ACME.items() for name in names.split()]
)
def test_acme_row(category: str, name: str) -> None:
    row = TABLE[name]
    assert row.category == category
    assert row.paper == "unicron" or row.why, "a severity that no paper gives says why"


def test_acme_has_29_classes_and_every_other_class_has_a_row() -> None:
    assert sum(len(names.split()) for names in ACME.values()) == 29
    assert set(MORE.split()) <= TABLE.keys()


@pytest.mark.parametrize("name", ["syntax_error", "import_error", "file_not_found", "permission_error", "disk_full"])
def test_what_a_restart_cannot_cure_stops(name: str) -> None:
    assert TABLE[name].severity is Severity.STOP
    assert TABLE[name].category is Category.SCRIPT


SAID = [
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "illegal_memory_access"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "ecc_error"),
    ("RuntimeError", "NVRM: Xid (PCI:0000:41:00): 74, NVLink: fatal error detected", "nvlink_error"),
    ("RuntimeError", "NVRM: GPU at PCI:0000:41:00 has fallen off the bus", "gpu_lost"),
    ("RuntimeError", "CUDA error: invalid DMA mapping", "invalid_dma_mapping"),
    ("RuntimeError", "CUDA error: unspecified launch failure", "cuda_error"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
    ("DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "nccl_timeout"),
    ("DistBackendError", "NCCL error: ncclRemoteError: remote process exited", "nccl_remote_error"),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5", "connection_error"),
    ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:72] Timed out waiting 1800000ms for recv", "nccl_timeout"),
    ("ConnectionRefusedError", "[Errno 111] Connection refused", "connection_error"),
    ("OSError", "[Errno 98] Address already in use", "address_in_use"),
    ("OSError", "[Errno 28] No space left on device", "disk_full"),
    ("OSError", "[Errno 5] Input/output error", "storage_error"),
    ("OSError", "[Errno 101] Network is unreachable", "network_error"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", "dataloader_killed"),
    ("ValueError", "could not convert", "value_error"),
    ("mypackage.Strange", "what", "other_software_error"),
    ("RuntimeError", "shape mismatch", "runtime_error"),
]


@pytest.mark.parametrize(("type_name", "message", "name"), SAID)
def test_exceptions_find_their_row_by_their_own_words(type_name: str, message: str, name: str) -> None:
    assert name_exception(type_name, message) == name


def test_detections_find_their_row() -> None:
    assert classify(Detection(method=Method.NODE_HEALTH)).severity is Severity.SEV1
    killed = classify(Detection(method=Method.PROCESS_SUPERVISION, exit_code=-9))
    assert (killed.name, killed.severity, killed.reason) == ("exited_abnormally", Severity.SEV2, "ended by signal 9")
    assert classify(Detection(method=Method.ONLINE_STATISTICS)).name == "task_hang"
    assert classify(Detection(method=Method.ONLINE_STATISTICS, collective="reduce")).severity is Severity.SEV3
    assert (
        classify(Detection(method=Method.NODE_HEALTH, message="Xid 79: GPU has fallen off the bus")).name == "gpu_lost"
    )


def test_a_diagnosis_wins_unless_it_knows_nothing() -> None:
    seen = Detection(method=EXCEPTION, exception_type="RuntimeError", message="shape mismatch")
    assert classify(seen, "ecc_error").severity is Severity.SEV1
    for empty in ("unknown", "none", "no such class", None):
        assert classify(seen, empty).name == "runtime_error"


def test_the_root_is_never_a_cascade_if_there_is_anything_else() -> None:
    echo = Detection(
        method=EXCEPTION,
        rank=0,
        exception_type="RuntimeError",
        message="Connection closed by peer",
        collective="reduce",
        time=1.0,
    )
    cause = Detection(method=Method.PROCESS_SUPERVISION, rank=1, exit_code=-9, time=1.2)
    found = [(item, classify(item)) for item in (echo, cause)]
    assert found[0][1].cascade
    assert root_cause(found)[0].rank == 1
    assert root_cause(found[:1])[0].rank == 0
    with pytest.raises(ValueError, match="at least one"):
        root_cause([])

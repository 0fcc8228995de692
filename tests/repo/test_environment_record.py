"""The environment record names what a later reader needs to repeat a run."""

from __future__ import annotations

import datetime
import json
import platform

from surefoot.storage.run_folder import environment_record

AGREED = {
    "test", "success", "timestamp", "duration_s", "platform", "python", "torch", "cuda_available", "mps_available",
    "memory_total_gb", "memory_available_gb", "versions", "git",
}  # fmt: skip


def test_the_record_has_the_agreed_fields_and_is_json() -> None:
    record = json.loads(json.dumps(environment_record(torch=True), allow_nan=False))
    assert record.keys() >= AGREED
    assert record["success"] is True
    assert datetime.datetime.fromisoformat(record["timestamp"]).tzinfo is not None
    assert record["duration_s"] >= 0
    assert record["python"] == platform.python_version()
    assert record["torch"].startswith("2.")
    assert isinstance(record["cuda_available"], bool)
    assert isinstance(record["mps_available"], bool)
    assert record["versions"]["surefoot"]
    assert record["memory_total_gb"] > 0.5
    if platform.system() == "Linux":
        assert 0 < record["memory_available_gb"] <= record["memory_total_gb"]

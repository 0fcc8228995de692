"""The environment record names what a later reader needs to repeat a run."""

from __future__ import annotations

import json
import platform

from surefoot.store.environment import environment_record


def test_the_record_has_the_agreed_fields_and_is_json() -> None:
    record = json.loads(json.dumps(environment_record(), allow_nan=False))
    assert {"platform", "python", "torch", "cuda_available", "mps_available", "versions", "git"} <= record.keys()
    assert record["python"] == platform.python_version()
    assert record["versions"]["surefoot"]
    assert 0 < record["memory_available_gb"] <= record["memory_total_gb"]

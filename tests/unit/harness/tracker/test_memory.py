"""Who is asked for device memory, in which order, and what a silent one means."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from surefoot.harness.tracker import memory
from surefoot.harness.tracker.memory import DefaultMonitor, Reading

PAGE = """# HELP ray_node_gram_used GPU memory
ray_node_gram_used{GpuIndex="0",ip="10.0.0.1"} 100.0
ray_node_gram_used{GpuIndex="1",GpuDeviceName="x",ip="10.0.0.1"} 2500.5
ray_node_mem_used{ip="10.0.0.1"} 999999.0
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    """A page of metrics, served as a Ray node does."""
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def cluster(monkeypatch: pytest.MonkeyPatch, *ports: int, up: bool = True) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": port} for port in ports]
    dead = {"Alive": False, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": 1}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: up, nodes=lambda: [dead, *nodes]))


def test_every_gpu_of_every_living_node_is_read(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    cluster(monkeypatch, port, port)
    reading = memory.read_ray()
    assert reading is not None
    assert reading.devices == {"node0.gpu0": 100.0, "node0.gpu1": 2500.5, "node1.gpu0": 100.0, "node1.gpu1": 2500.5}


def test_one_silent_node_makes_the_maximum_unknown(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    from surefoot.harness.distributed import free_port

    cluster(monkeypatch, port, free_port())
    assert memory.read_ray() is None


def test_a_cluster_is_asked_and_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, up=False)
    assert memory.read_ray() is None
    monkeypatch.delitem(sys.modules, "ray")
    assert memory.read_ray() is None
    assert "ray" not in sys.modules


def fake_torch(monkeypatch: pytest.MonkeyPatch, *, used: bool) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: used, device_count=lambda: 2,
        max_memory_allocated=lambda i: (i + 1) * 2**20,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def test_torch_tells_its_allocators_peak_only_after_it_used_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, used=False)
    assert memory.read_torch() is None
    fake_torch(monkeypatch, used=True)
    assert memory.read_torch() == Reading("torch, peak of this process", {"gpu0": 1.0, "gpu1": 2.0})


@pytest.mark.parametrize(
    ("script", "devices"),
    [
        ("echo 512; echo 1024", {"gpu0": 512.0, "gpu1": 1024.0}),
        ("echo 512; echo '[N/A]'", None),
        ("echo broken; exit 9", None),
    ],
)
def test_nvidia_smi_is_read_or_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, devices: dict[str, float] | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    reading = memory.read_nvidia_smi()
    assert (reading.devices if reading else None) == devices


def test_without_any_reader_there_is_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert DefaultMonitor().read() is None
    assert memory.gpu_names() == []


def test_the_first_reader_with_a_device_speaks() -> None:
    empty, full = Reading("a", {}), Reading("b", {"gpu0": 1.0})
    assert DefaultMonitor([lambda: None, lambda: empty, lambda: full]).read() is full

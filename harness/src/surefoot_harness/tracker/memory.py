"""How much device memory is in use: a small seam with a few ready-made readers.

Promises   None means "nobody can say", never zero; a reading names its source, because a sample is not a peak.
Never      imports torch or ray, starts a cluster, or initialises CUDA: it only asks what is already running.

A reader is a function that gives MiB per device, or None:

    ray         used memory of every GPU of the cluster, as sampled by its nodes
    torch       peak of this process's allocator since it started: a true peak, of this process only
    nvidia-smi  used memory of this machine's GPUs now, other people's processes included
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MIB = 2**20
_GAUGE = re.compile(r"^ray_node_gram_used\{([^}\n]*)\}[ \t]+(\S+)", flags=re.MULTILINE)
SCRAPE_S = 5.0
"""How long one node may take for its numbers."""


@dataclass(frozen=True, slots=True)
class Reading:
    """MiB per device, and who said so.

    Example:
        >>> Reading("nvidia-smi, sampled", {"gpu0": 512.0, "gpu1": 700.0}).highest
        700.0
    """

    source: str
    devices: Mapping[str, float]

    @property
    def highest(self) -> float | None:
        """The largest of all devices, or None without any."""
        return max(self.devices.values(), default=None)


class MemoryMonitor(Protocol):
    """What the `memory_monitor` fixture gives; override that fixture to bring your own."""

    def read(self) -> Reading | None:
        """Memory per device now, or None when nobody can say."""
        ...


class DefaultMonitor:
    """Asks Ray, then torch, then nvidia-smi; the first that has an answer speaks."""

    def __init__(self, readers: Sequence[Callable[[], Reading | None]] | None = None) -> None:
        self._readers = readers if readers is not None else (read_ray, read_torch, read_nvidia_smi)

    def read(self) -> Reading | None:
        """The first reading that holds a device."""
        for reader in self._readers:
            reading = reader()
            if reading is not None and reading.devices:
                return reading
        return None


def read_ray() -> Reading | None:
    """GPU memory of all nodes of the Ray cluster that this process is connected to.

    One silent node makes it None: the maximum over the rest would look like the maximum over all.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    devices: dict[str, float] = {}
    for number, node in enumerate(node for node in ray.nodes() if node.get("Alive")):
        text = _scrape(node)
        if text is None:
            return None
        devices |= {f"node{number}.{name}": value for name, value in ray_gauges(text).items()}
    return Reading("ray, sampled by its nodes", devices)


def ray_gauges(text: str) -> dict[str, float]:
    """GPU index to MiB, from the metrics page of one Ray node.

    Example:
        >>> ray_gauges('ray_node_gram_used{GpuIndex="1",ip="10.0.0.2"} 512.0')
        {'gpu1': 512.0}
    """
    found: dict[str, float] = {}
    for labels, value in _GAUGE.findall(text):
        index = re.search(r'GpuIndex="(\d+)"', labels)
        found[f"gpu{index[1] if index else len(found)}"] = float(value)
    return found


def read_torch() -> Reading | None:
    """Peak of torch's CUDA allocator in this process, if torch is loaded and has used CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    count = torch.cuda.device_count()
    peaks = {f"gpu{i}": torch.cuda.max_memory_allocated(i) / MIB for i in range(count)}
    return Reading("torch, peak of this process", peaks)


def read_nvidia_smi() -> Reading | None:
    """Used memory of this machine's GPUs, if nvidia-smi is there."""
    rows = _nvidia_smi("memory.used")
    if rows is None:
        return None
    try:
        return Reading("nvidia-smi, sampled", {f"gpu{i}": float(row) for i, row in enumerate(rows)})
    except ValueError:
        return None  # a device that answers "[N/A]": the maximum is not known


def gpu_names() -> list[str]:
    """Name of each GPU of this machine; empty without any."""
    return _nvidia_smi("name") or []


def _nvidia_smi(field: str) -> list[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else None


def _scrape(node: Mapping[str, Any]) -> str | None:
    import http.client  # slow to load, and few sessions have a cluster

    from surefoot_harness.system.connections import DeadlineConnection
    from surefoot_harness.system.signals import Deadline

    try:
        host, port = str(node.get("NodeManagerAddress")), int(str(node.get("MetricsExportPort")))
        with contextlib.closing(DeadlineConnection(host, port, Deadline(SCRAPE_S).ends)) as line:
            line.request("GET", "/metrics")
            with contextlib.closing(line.getresponse()) as answer:
                return answer.read(20_000_000).decode("utf-8", "replace") if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None

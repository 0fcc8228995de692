"""A private cluster keeps strangers out, attaches to nobody, and takes everything with it when it goes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from command import surefoot
from ray_kit import TINY, environment, left_after, wait_for

from surefoot.errors import SecurityError
from surefoot.runtime.ray import cluster as ray_cluster
from surefoot.runtime.ray import reaper

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RAN = ["runtime.kind=ray", *TINY, "max_steps=1"]

CLUSTER = """
import json, os, signal, sys
from surefoot.runtime.ray.cluster import Cluster
cluster = Cluster(None, processes=1)
import ray
gcs = ray.get_runtime_context().gcs_address
there = {"pid": os.getpid(), "gcs": gcs, "folder": str(cluster.folder), "mode": oct(os.stat(cluster.folder).st_mode & 0o777),
         "mark": cluster.mark, "token": os.environ.get("RAY_AUTH_TOKEN"), "namespace": cluster.namespace,
         "nodes": len(ray.nodes()), "markers": int(ray.cluster_resources().get("decoy", 0))}
print(json.dumps(there), flush=True)
sys.stdin.readline()
cluster.close()
"""
STRANGER = """
import os, sys
import ray
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host  # or it would knock at the host's own address, where nobody is
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    print("in:", ray.get(ray.remote(lambda: 41 + 1).remote(), timeout=20))
except BaseException as error:
    print("refused:", type(error).__name__, str(error)[:300])
os._exit(0)
"""


@contextlib.contextmanager
def cluster(
    script: str = CLUSTER, begin: Sequence[str] = (sys.executable,), **env: str
) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A private cluster in a process of its own, and what that says of it."""
    process = subprocess.Popen(
        [*begin, "-c", script], env=environment(**env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("{"), "".join(process.communicate())
        yield json.loads(line), process
    finally:
        process.communicate("\n", timeout=120)


@pytest.fixture(scope="module")
def decoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Somebody else's cluster, without a token, that every `address="auto"` would find."""
    pytest.importorskip("ray", reason="needs the ray extra")
    folder = tempfile.mkdtemp(prefix="decoy-")
    script = f"""
import json, sys, ray
found = ray.init(address="local", resources={{"decoy": 1}}, include_dashboard=False, num_cpus=1, _temp_dir={folder!r},
                 object_store_memory=80 * 2**20, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
print(json.dumps({{"gcs": found.address_info["gcs_address"]}}), flush=True)
sys.stdin.readline()
ray.shutdown()
"""
    with cluster(script, RAY_AUTH_MODE="disabled") as (there, _):
        yield there["gcs"]
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def private(decoy: str) -> Iterator[dict[str, str]]:
    """Ours, started while the decoy is alive and the environment points at it."""
    with cluster(RAY_ADDRESS=decoy, RAY_AUTH_MODE="disabled") as (there, _):
        yield there


@pytest.fixture(scope="module")
def strangers(private: dict[str, str], decoy: str) -> dict[str, str]:
    """What three clients heard, all at once: Ray tries for twenty seconds before it gives up."""
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    asked = {
        name: subprocess.Popen(
            [sys.executable, "-c", STRANGER, address], env=environment(**entries), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for name, address, entries in (
            ("no token", private["gcs"], {"RAY_AUTH_MODE": "disabled"}), ("wrong token", private["gcs"], wrong),
            ("decoy", decoy, {"RAY_AUTH_MODE": "disabled"}),
        )
    }  # fmt: skip
    return {name: process.communicate(timeout=180)[0] for name, process in asked.items()}


def test_a_decoy_that_ray_address_names_is_never_attached_to(private: dict[str, str], decoy: str) -> None:
    assert private["gcs"] != decoy
    assert private["markers"] == 0
    assert private["nodes"] == 1
    assert private["mark"] in private["namespace"]


def test_its_folder_is_the_owners_alone_and_the_token_is_not_left_in_the_environment(private: dict[str, str]) -> None:
    assert private["mode"] == "0o700"
    assert private["token"] is None


def listening(pids: Iterable[int]) -> set[str]:
    """Addresses on which these processes wait for others."""
    inodes, rows = set(), {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it may be gone
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
            inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
            for name in ("tcp", "tcp6"):
                lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
                rows |= {words[9]: words[1] for words in map(str.split, lines) if words[3] == "0A"}
    return {_address(rows[inode].partition(":")[0]) for inode in inodes & rows.keys()}


def _address(text: str) -> str:
    """The kernel writes words of 32 bits, each in the machine's own order."""
    raw = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw).removeprefix("::ffff:")


def of_cluster(there: dict[str, str]) -> set[str]:
    return listening([int(there["pid"]), *reaper.marked(f"{reaper.MARK}={there['mark']}".encode())])


def test_everything_that_listens_does_so_on_loopback(private: dict[str, str]) -> None:
    """On a host that has another address; where there is none, the test below makes one."""
    assert of_cluster(private) == {"127.0.0.1"}


ELSEWHERE = "10.77.0.1"
HOST = f"ip link set lo up && ip addr add {ELSEWHERE}/32 dev lo && ip route add default dev lo src {ELSEWHERE}"
PLANT = """
from surefoot.runtime.ray import cluster as ray_cluster
import contextlib
ray_cluster._on_loopback = contextlib.nullcontext
ray_cluster._refuse_other_address = lambda: None
"""


@pytest.mark.nightly
@pytest.mark.parametrize("planted", [False, True], ids=["ours", "planted"])
def test_a_host_with_an_address_of_its_own_shows_no_door_there(planted: bool) -> None:
    """In a network namespace whose host has another address than loopback, as nearly every host does."""
    pytest.importorskip("ray", reason="needs the ray extra")
    inside = ["unshare", "--net", "--map-root-user", "sh", "-c"]
    with contextlib.suppress(OSError):
        if subprocess.run([*inside, HOST], capture_output=True, check=False).returncode == 0:
            begin = [*inside, f'{HOST} && exec "$0" "$@"', sys.executable]
            with cluster(PLANT * planted + CLUSTER, begin=begin) as (there, _):
                give_up = time.monotonic() + 20  # Ray's agents begin to listen one after the other
                while (found := of_cluster(there)) != {"::", ELSEWHERE} and planted and time.monotonic() < give_up:
                    time.sleep(0.2)
            assert found == {"::", ELSEWHERE} if planted else found == {"127.0.0.1"}
            return
    pytest.skip("no network namespace with an address can be made here (unshare, ip)")


def test_planted_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that cannot be kept on loopback is not taken for one that is."""
    ray = pytest.importorskip("ray", reason="needs the ray extra")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: ELSEWHERE)
    with pytest.raises(SecurityError, match=r"took 10\.77\.0\.1 for its address"):
        ray_cluster._refuse_other_address()


@pytest.mark.parametrize("who", ["no token", "wrong token"])
def test_a_client_without_the_token_is_refused(strangers: dict[str, str], who: str) -> None:
    assert "refused:" in strangers[who], strangers[who]
    assert "in:" not in strangers[who]


def test_planted_a_cluster_without_a_token_lets_everybody_in(strangers: dict[str, str]) -> None:
    """Teeth: the same stranger, at a cluster that asks for nothing."""
    assert "in: 42" in strangers["decoy"]


def test_when_its_process_closes_it_nothing_is_left(private: dict[str, str]) -> None:
    with cluster() as (there, process):
        mark = f"{reaper.MARK}={there['mark']}".encode()
        assert reaper.marked(mark), "its processes carry the mark"
    assert process.returncode == 0
    assert left_after(mark, 5.0) == []
    assert not Path(there["folder"]).exists()


STRAY = CLUSTER.replace(
    "print(json",
    "import subprocess\n"
    "nowhere = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)\n"
    f"marked = {{**os.environ, {reaper.MARK!r}: cluster.mark}}\n"
    "subprocess.Popen(['sleep', '300'], start_new_session=True, env=marked, **nowhere)\n"
    "print(json",
)
"""With a process that Ray knows nothing of, as something inside an actor may leave one."""


@pytest.mark.parametrize("reaped", [True, False], ids=["with the reaper", "planted: without it"])
def test_what_ray_does_not_know_of_ends_with_a_killed_driver_because_of_the_reaper(reaped: bool) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    careless = "import surefoot.runtime.ray.cluster as ours\nours._start_reaper = lambda *args: None\n"
    with cluster(STRAY if reaped else careless + STRAY) as (there, process):
        process.kill()
        process.wait()
        mark = f"{reaper.MARK}={there['mark']}".encode()
        left = left_after(mark, 5.0)
    reaper.end_marked(mark, there["folder"], os.getpid())
    shutil.rmtree(there["folder"], ignore_errors=True)
    assert (left == []) is reaped


def test_signals_to_everybody_do_not_keep_the_reaper_from_its_work(tmp_path: Path) -> None:
    """SIGINT and SIGTERM to the whole group, then the pipe closes: marked processes end, even one that hides."""
    mark, folder = "0123456789abcdef", tmp_path / "cluster"
    folder.mkdir()
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={},
    )  # fmt: skip
    assert watcher.stdout is not None
    assert watcher.stdin is not None
    assert watcher.stdout.readline() == reaper.READY
    hiding = subprocess.Popen(
        ["sh", "-c", "trap '' TERM INT HUP; sleep 600 & sleep 600"], env={**os.environ, reaper.MARK: mark},
        start_new_session=True,
    )  # fmt: skip
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        for number in (2, 15, 1):
            watcher.send_signal(number)
        wait_for(lambda: len(reaper.marked(f"{reaper.MARK}={mark}".encode())) == 3, "three marked processes")
        watcher.stdin.close()
        assert watcher.wait(30) == 0
        assert hiding.wait(10) == -9
        assert reaper.marked(f"{reaper.MARK}={mark}".encode()) == []
        assert not folder.exists()
        assert bystander.poll() is None
    finally:
        for process in (hiding, bystander):
            process.kill()
            process.wait()
        watcher.stdout.close()


@pytest.mark.parametrize("blind", [False, True], ids=["by its open files", "planted: by the mark alone"])
def test_a_process_that_wrote_its_title_over_its_mark_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: bool
) -> None:
    """As Ray's agents do. The driver's own child with a file open there is left alone."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    if blind:
        monkeypatch.setattr(reaper, "holding", lambda folder: [])
    with (folder / "agent.out").open("w") as log:
        own = subprocess.Popen(["sleep", "600"], stdout=log, env={})
        starter = f"sleep 600 > {folder}/raylet.out 2>&1 & echo $!"
        orphan = int(
            subprocess.run(
                ["sh", "-c", starter], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
            ).stdout
        )
    try:
        ended = reaper.end_marked(b"SUREFOOT_FLEET_MARK=nobody", str(folder), os.getpid())
        assert (orphan in ended) is not blind
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, 9)


@pytest.mark.config_key("runtime.address")
def test_a_cluster_by_address_is_joined_only_with_a_token(tmp_path: Path) -> None:
    refused = surefoot("train", *RAN, "runtime.address=127.0.0.1:1", cwd=tmp_path)
    assert refused.code == 5, refused.out + refused.err
    assert "RAY_AUTH_TOKEN" in refused.err
    assert not refused.run.exists(), "a start that is refused leaves no folder"

"""Code that runs only inside a Ray actor counts, for each test that the actor served."""

from __future__ import annotations

from pathlib import Path

import pytest
from affected_kit import Toy

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FILES = {
    "far.py": "def g():\n    return 1\n\n\ndef h():\n    return 1\n\n\ndef other():\n    return 1\n",
    "conftest.py": """
import pytest
import ray


@ray.remote
class Actor:
    def call(self, name):
        import far
        return {"g": far.g, "h": far.h}[name]()


@pytest.fixture(scope="session")
def actor():
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield Actor.remote()
    ray.shutdown()
""",
    "test_ray.py": """
import ray


def test_g(actor):
    assert ray.get(actor.call.remote("g")) == 1


def test_h(actor):
    assert ray.get(actor.call.remote("h")) == 1


def test_g_again(actor):
    assert ray.get(actor.call.remote("g")) == 1


def test_none():
    import far
    assert far.other() == 1
""",
}


@pytest.mark.turns(2)
def test_an_edit_inside_an_actor_chooses_the_tests_it_served(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    toy = Toy(tmp_path, FILES)
    first = toy.pytest()
    assert first.code == 0, first.text
    assert toy.affected() == {}
    toy.edit("far.py", "def g():\n    return 1", "def g():\n    return 2")
    assert toy.affected() == {"test_g": "failed", "test_g_again": "failed"}

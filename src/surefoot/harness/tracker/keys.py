"""Names of tests in a results file: `module::function[parameters]`, never two tests under one name.

The module is the file's name without folder, as in `test_policy::test_loss[bf16]`. Where two files share that name,
both are written with their folders, `unit.a.test_policy::...`; should even that clash, the node id itself is the key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath


def keys(node_ids: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Node id to key, and a note for every name that had to be made longer.

    Example:
        >>> keys(["tests/a/test_x.py::test_f[1]"])[0]
        {'tests/a/test_x.py::test_f[1]': 'test_x::test_f[1]'}
    """
    ids = sorted(set(node_ids))
    names, notes = _modules({_file(node_id) for node_id in ids})
    return {node_id: printable(names[_file(node_id)] + _rest(node_id)) for node_id in ids}, notes


def printable(text: str) -> str:
    """Text that UTF-8 can hold: a file name that is no text is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _modules(files: set[str]) -> tuple[dict[str, str], list[str]]:
    """A name for each file: the shortest of its forms that no other file has."""
    form = dict.fromkeys(sorted(files), 0)
    notes: list[str] = []
    while True:
        owners = defaultdict(list)
        for file, number in form.items():
            owners[_forms(file)[number]].append(file)
        clashes = {name: group for name, group in owners.items() if len(group) > 1}
        if not clashes:
            return {group[0]: name for name, group in owners.items()}, notes
        for name, group in clashes.items():
            notes.append(printable(f"{name} names {len(group)} files ({', '.join(group)}): their keys carry more"))
            form |= {file: min(form[file] + 1, 2) for file in group}


def _forms(file: str) -> tuple[str, str, str]:
    return PurePosixPath(file).stem, file.removesuffix(".py").replace("/", "."), file


def _file(node_id: str) -> str:
    return node_id.partition("::")[0]


def _rest(node_id: str) -> str:
    _, mark, rest = node_id.partition("::")
    return mark + rest

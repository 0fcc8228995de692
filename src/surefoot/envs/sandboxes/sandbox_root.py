"""The empty root: what contained code sees of the file system.

Owns       the order of mounts: a fresh root, read-only views of the runtime, three devices, a scratch folder of
           limited size.
Promises   nothing of the host can be reached by name but what was asked for, and that read-only unless the caller asked
           for a folder to write in; no /proc, no /sys.
Never      runs outside a mount namespace of its own: the first thing it does is to cut itself off from the host's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from surefoot.envs.sandboxes import sandbox_kernel as kernel

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_OLD = "/.host"
_BASE = "/tmp"  # noqa: S108 - only a place to stand on; it is covered at once, in a mount namespace of our own
_INODES_PER_MB = 64
_SEALED = kernel.MS_RDONLY | kernel.MS_NOSUID


def build(views: Sequence[str], scratch_mb: int, owner: int, writable: Sequence[str] = ()) -> None:
    """Swap the root of this mount namespace for one that holds `views`, the devices and a scratch folder.

    Args:
        writable: further views, on top of the others, in which files can be made but no programs started.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1k,mode=0755")
    os.chdir(_BASE)
    os.mkdir(_OLD[1:], 0o700)
    kernel.pivot_root(".", _OLD[1:])
    os.chdir("/")
    for view in views:
        _show(view, _SEALED | kernel.MS_NODEV)
    for folder in writable:
        _show(folder, kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, on_top=True)
    for device in DEVICES:
        _show(device, _SEALED | kernel.MS_NOEXEC)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    os.mkdir(SCRATCH, 0o755)
    if not os.path.lexists(_BASE):
        os.symlink(SCRATCH, _BASE)
    os.symlink(SCRATCH, "/dev/shm")  # noqa: S108 - named semaphores live there; here they count as scratch
    kernel.set_flags("/", _SEALED | kernel.MS_NODEV)
    options = f"size={scratch_mb}m,nr_inodes={scratch_mb * _INODES_PER_MB},mode=0700,uid={owner},gid={owner}"
    kernel.mount("scratch", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    os.chdir(SCRATCH)


def write_files(files: Mapping[str, bytes]) -> None:
    """Put the caller's files into the scratch folder. Names were checked by the caller's side."""
    for name, content in files.items():
        path = os.path.join(SCRATCH, name)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _show(path: str, flags: int, *, on_top: bool = False) -> None:
    """The host's file or folder under its own name, with all that is mounted below it; the flags go for all of it."""
    source = _OLD + path
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, 0o755, exist_ok=on_top)  # it may be part of another view, which this one covers
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    kernel.mount(source, path, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.set_flags(path, flags, below=True)

"""Ways out of the sandbox, as small programs. Each says TRIED before it tries, and GOT when it got out.

A probe that never said TRIED proves nothing. `{name}` stands for something that the test put on the host.
"""

from __future__ import annotations

PREAMBLE = """
import ctypes, errno, fcntl, os, resource, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def got(what):
    print("GOT", what, flush=True)
print("TRIED", flush=True)
"""

FILES = {
    "a secret file of the host": "got(open({secret!r}).read())",
    "the answers of the grader": "got(open({answers!r}).read())",
    "an ssh key in the user's home": "got(open({home!r} + '/.ssh/id_rsa').read())",
    "the repository": "got(os.listdir({repository!r}))",
    "the environment": "got(os.environ['SUREFOOT_SECRET'])",
    "the environment of other processes": "got(open('/proc/1/environ', 'rb').read())",
    "the memory of this process's parent": "got(open(f'/proc/{{os.getppid()}}/mem', 'rb'))",
    "the list of processes": "got(os.listdir('/proc'))",
    "the list of users": "got(open('/etc/passwd').read())",
    "the kernel's files": "got(os.listdir('/sys'))",
    "the host's root, by its former name": "got(os.listdir('/.host'))",
    "the host's root, by dots": "assert os.path.samefile('/', '/../..'), 'out'\ngot(open('/../../' + {secret!r}).read())",
    "a link that leads out": "os.symlink({folder!r}, 'out')\ngot(os.listdir('out'))",
    "a link that changes while it is followed": """
os.mkdir('in'); open('in/file', 'w').write('mine')
def swap():
    for number in range(300):
        os.symlink({folder!r} if number % 2 else 'in', 'new'); os.rename('new', 'link')
thread = threading.Thread(target=swap); thread.start()
over = False
while not over:
    over = not thread.is_alive()  # the last look is at the link as it stays: it leads out
    try:
        if 'secret.txt' in os.listdir('link'):
            got('followed')
    except OSError:
        pass
""",
    "a hard link to the runtime": "os.link(os.__file__, '/scratch/os.py')\ngot(os.stat('/scratch/os.py'))",
    "a device node": "os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))\ngot(os.open('disk', os.O_RDONLY))",
    "the host's devices": "got([os.open(each, os.O_RDWR) for each in ('/dev/mem', '/dev/kmsg', '/dev/tty')])",
    "any further device": "got(set(os.listdir('/dev')) - {{'null', 'zero', 'urandom', 'shm'}} or 1 / 0)",
    "the root folder, to write": "got(open('/mine', 'w'))",
    "the system's programs, to write": "got(open('/usr/bin/mine', 'w'))",
    "the running Python, to write": "got(open(os.path.dirname(os.__file__) + '/mine.py', 'w'))",
    "the mode of a program": "os.chmod(sys.executable, 0o777)\ngot('changed')",
    "a program of its own": """
import shutil
shutil.copy('/bin/true', 'mine'); os.chmod('mine', 0o755); got(subprocess.run(['./mine']).returncode)
""",
    "a setuid program": """
import shutil
shutil.copy('/bin/true', 'mine'); os.chmod('mine', 0o4755)
got(subprocess.run(['./mine']).returncode)
""",
    "what an earlier program left": "got(open('/scratch/left').read())",
    "descriptors of the parent": """
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
got([number for number in range(3, 1024) if is_open(number)] or 1 / 0)
""",
}

NETWORK = {
    "a server on this machine": "got(socket.create_connection(('127.0.0.1', {port}), 2))",
    "a name from DNS": "got(socket.getaddrinfo('localhost.localdomain.example', 80))",
    "a datagram": "got(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})))",
    "a local socket, by path": "s = socket.socket(socket.AF_UNIX); s.connect({local!r}); got(s)",
    "a local socket, abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + {abstract!r}); got(s)",
    "raw packets": "got(socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))",
    "the kernel's routing socket": "got(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))",
    "the kernel's crypto socket": "got(socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))",
    "the hypervisor's socket": "got(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))",
    "a pair that is not local": "got(socket.socketpair(socket.AF_INET))",
}

POWERS = {
    "to be root": "os.setuid(0)\ngot(os.getuid())",
    "to be in other groups": "os.setgroups([0])\ngot(os.getgroups())",
    "all capabilities": """
import struct
header, full = struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24
got(libc.syscall(126 if os.uname().machine == 'x86_64' else 91, header, full) == 0 or 1 / 0)
""",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))\ngot('raised')",
    "the limits of the first process": "resource.prlimit(1, resource.RLIMIT_AS, (1, 1))\ngot('starved')",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))\ngot('real time')",
    "to go first": "os.setpriority(os.PRIO_PROCESS, 0, -20)\ngot('first')",
    "locked memory": "got(libc.mlockall(3) == 0 or 1 / 0)",
    "to type into a terminal": "fcntl.ioctl(0, 0x5412, b'x')\ngot('typed')",
    "to signal a process of the host": "os.kill({victim}, 9)\ngot('signalled')",
    "a core dump": "resource.setrlimit(resource.RLIMIT_CORE, (2**20, 2**20))\ngot('dumps')",
}

CALLS = {
    # name: (x86_64, aarch64, arguments); 9999 is a call that no kernel has
    "ptrace": (101, 117, (16, 1, 0, 0)), "process_vm_readv": (310, 270, (1, 0, 0, 0, 0, 0)),
    "pidfd_getfd": (438, 438, (0, 0, 0)), "kcmp": (312, 272, (1, 1, 0, 0, 0)), "mount": (165, 40, (0, 0, 0, 0, 0)),
    "umount2": (166, 39, (0, 0)), "pivot_root": (155, 41, (0, 0)), "chroot": (161, 51, (0,)),
    "unshare a user namespace": (272, 97, (0x10000000,)), "setns": (308, 268, (0, 0)), "open_tree": (428, 428, (-100, 0, 1)),
    "fsopen": (430, 430, (0, 0)), "move_mount": (429, 429, (0, 0, 0, 0, 0)), "mount_setattr": (442, 442, (0, 0, 0, 0, 0)),
    "open_by_handle_at": (304, 265, (0, 0, 0)), "keyctl": (250, 219, (0, -3, 0)), "add_key": (248, 217, (0, 0, 0, 0, 0)),
    "bpf": (321, 280, (0, 0, 0)), "perf_event_open": (298, 241, (0, 0, -1, -1, 0)), "userfaultfd": (323, 282, (0,)),
    "io_uring_setup": (425, 425, (1, 0)), "kexec_load": (246, 104, (0, 0, 0, 0)),
    "kexec_file_load": (320, 294, (-1, -1, 0, 0, 0)), "init_module": (175, 105, (0, 0, 0)),
    "finit_module": (313, 273, (-1, 0, 0)), "delete_module": (176, 106, (0, 0)), "reboot": (169, 142, (0, 0, 0, 0)),
    "swapon": (167, 224, (0, 0)), "acct": (163, 89, (0,)), "settimeofday": (164, 170, (0, 0)),
    "clock_settime": (227, 112, (0, 0)), "syslog": (103, 116, (10, 0, 0)), "quotactl": (179, 60, (0, 0, 0, 0)),
    "memfd_create": (319, 279, (0, 0)), "shmget": (29, 194, (0, 4096, 0o1600)), "msgget": (68, 186, (0, 0o1600)),
    "semget": (64, 190, (0, 1, 0o1600)), "mq_open": (240, 180, (0, 0, 0, 0)), "personality": (135, 92, (0xFFFFFFFF,)),
    "sethostname": (170, 161, (0, 0)), "fanotify_init": (300, 262, (0, 0)), "move_pages": (279, 239, (0, 0, 0, 0, 0, 0)),
    "clone a user namespace": (56, 220, (0x10000011, 0, 0, 0, 0)), "clone3": (435, 435, (0, 0)), "statmount": (457, 457, (0, 0, 0, 0)),
    "a call from the future": (9999, 9999, ()),
}  # fmt: skip
"""A call is refused when the answer is EPERM or ENOSYS; anything else says that the kernel looked at it."""

CALL_PROGRAM = """
machine = os.uname().machine
for name, (x86, arm, arguments) in {calls!r}.items():
    print("TRIED", name, flush=True)
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(x86 if machine == 'x86_64' else arm), *map(ctypes.c_long, arguments))
    if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        got(f"{{name}} {{result}} {{errno.errorcode.get(ctypes.get_errno())}}")
    if result == 0 and name.startswith('clone '):
        os._exit(0)
"""

WITHOUT_SANDBOX = (
    "a secret file of the host", "the answers of the grader", "an ssh key in the user's home", "the repository",
    "the environment", "the list of processes", "the list of users", "a link that leads out",
    "a link that changes while it is followed", "a program of its own", "a server on this machine", "a datagram",
    "a local socket, by path", "a local socket, abstract", "the kernel's routing socket", "to signal a process of the host",
)  # fmt: skip
"""Probes that must succeed where nothing contains them: a probe that cannot succeed proves nothing."""

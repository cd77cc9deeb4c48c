"""What a script may try once it has a Python without rules, and a host to try it on."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

SECRET = "the-secret-of-the-host"


class Host:
    """Things on this machine that are none of a script's business."""

    def __init__(self, directory: Path) -> None:
        self.secret = directory / "secret.txt"
        self.secret.write_text(SECRET)
        self.module = directory / "planted.py"
        self.module.write_text(f"SECRET = {SECRET!r}\n")
        self.precious = directory / "precious.txt"
        self.precious.write_text("precious")
        self.marker = directory / "marker"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0wink-{os.urandom(8).hex()}")
        self.abstract.listen()
        for listener in (self.tcp, self.udp, self.abstract):
            listener.setblocking(False)
        self.victim = subprocess.Popen(["sleep", "600"])

    def names(self) -> dict[str, object]:
        """What an attack calls these things."""
        return {
            "SECRET_PATH": str(self.secret),
            "MODULE_PATH": str(self.module),
            "PRECIOUS": str(self.precious),
            "MARKER": str(self.marker),
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname().decode("latin-1"),
            "VICTIM": self.victim.pid,
            "HOST": os.getpid(),
        }

    def damage(self, said: str, patience: float = 0.0) -> list[str]:
        """Return what an attack has achieved; ``said`` is all that came out of it.

        Where it has to be something, ``patience`` is how long a killed process may take to end.
        """
        done: list[str] = []
        if SECRET in said or "ESCAPED" in said:
            done.append("it got to what it wanted")
        if self.marker.exists() or self.marker.is_symlink():
            done.append("it wrote")
        if not self.precious.exists() or self.precious.read_text() != "precious":
            done.append("it changed a file")
        for name in ("tcp", "udp", "abstract"):
            listener: socket.socket = getattr(self, name)
            with contextlib.suppress(BlockingIOError):
                if name == "udp":
                    listener.recv(100)
                else:
                    listener.accept()[0].close()
                done.append(f"it connected over {name}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.victim.wait(0.1 if done else patience)
            done.append("it killed a process")
        return done

    def close(self) -> None:
        for listener in (self.tcp, self.udp, self.abstract):
            listener.close()
        self.victim.kill()
        self.victim.wait()


ATTACKS = {
    "open": "print(open(SECRET_PATH).read())",
    "os.open": "import os\nprint(os.read(os.open(SECRET_PATH, 0), 100))",
    "libc open": """
import ctypes
libc = ctypes.CDLL(None)
room = ctypes.create_string_buffer(100)
libc.read(libc.open(SECRET_PATH.encode(), 0), room, 100)
print(room.value)
""",
    "import of a file": """
import importlib.machinery
print(importlib.machinery.SourceFileLoader("planted", MODULE_PATH).load_module().SECRET)
""",
    "listing": "import os\nif os.listdir(os.path.dirname(SECRET_PATH)): print('ESCAPED')",
    "stat": "import os\nif os.stat(SECRET_PATH): print('ESCAPED')",
    "readlink": "import os\nif os.readlink('/proc/self/exe'): print('ESCAPED')",
    "environment of the host": """
print('ESCAPED' if b'PATH=' in open(f'/proc/{HOST}/environ', 'rb').read() else '')
""",
    "own memory file": "print('ESCAPED' if open('/proc/self/mem', 'rb') else '')",
    "write": "open(MARKER, 'w').write('x')",
    "append": "open(PRECIOUS, 'a').write('x')",
    "mkdir": "import os\nos.mkdir(MARKER)",
    "symlink": "import os\nos.symlink('/', MARKER)",
    "hard link": "import os\nos.link(SECRET_PATH, MARKER)",
    "rename": "import os\nos.rename(PRECIOUS, MARKER)",
    "unlink": "import os\nos.unlink(PRECIOUS)",
    "truncate": "import os\nos.truncate(PRECIOUS, 0)",
    "fifo": "import os\nos.mkfifo(MARKER)",
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', TCP))",
    "udp": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))
""",
    "abstract socket": """
import socket
socket.socket(socket.AF_UNIX).connect(ABSTRACT.encode('latin-1'))
""",
    "pair of sockets": "import socket\nif socket.socketpair(): print('ESCAPED')",
    "os.system": "import os\nos.system(f'touch {MARKER}')",
    "libc system": "import ctypes\nctypes.CDLL(None).system(f'touch {MARKER}'.encode())",
    "subprocess": "import subprocess\nsubprocess.run(['touch', MARKER])",
    "posix_spawn": "import os\nos.waitpid(os.posix_spawn('/bin/touch', ['touch', MARKER], {}), 0)",
    "exec": "import os\nos.execv('/bin/touch', ['touch', MARKER])",
    "fork": "import os\nif os.fork() == 0:\n    os._exit(0)\nprint('ESCAPED')",
    "thread": """
import threading
thread = threading.Thread(target=print, args=('ESCAPED',))
thread.start()
thread.join()
""",
    "program in memory": """
import os
fd = os.memfd_create('x')
os.write(fd, open('/bin/touch', 'rb').read())
os.execve(fd, ['touch', MARKER], {})
""",
    "kill": "import os, signal\nos.kill(VICTIM, signal.SIGKILL)",
    "look at another process": "import os\nos.kill(VICTIM, 0)\nprint('ESCAPED')",
    "libc kill": "import ctypes\nctypes.CDLL(None).kill(VICTIM, 9)",
    "handle on a process": "import os\nif os.pidfd_open(VICTIM): print('ESCAPED')",
    "pipe": "import os\nif os.pipe(): print('ESCAPED')",
    "duplicate of the channel": "import os\nif os.dup(0): print('ESCAPED')",
    "shared memory": """
import ctypes
print('ESCAPED' if ctypes.CDLL(None).shmget(0, 4096, 0o1600) != -1 else '')
""",
    "eventfd": "import os\nif os.eventfd(0): print('ESCAPED')",
    "io_uring": """
import ctypes
room = ctypes.create_string_buffer(200)
print('ESCAPED' if ctypes.CDLL(None).syscall(425, 1, room) >= 0 else '')
""",
    "more memory": """
import resource
most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, most)
print('ESCAPED')
""",
    "another directory": "import os\nos.chdir('/')\nprint('ESCAPED')",
    "who is there": "import os\nif os.uname().nodename: print('ESCAPED')",
    "priority": "import os\nos.nice(0)\nprint('ESCAPED')",
}
"""Plain Python, by what it is after. Each does harm in a Python that is not locked up."""

PRIVILEGED = {
    "ptrace": """
import ctypes
print('ESCAPED' if ctypes.CDLL(None).ptrace(16, VICTIM, 0, 0) == 0 else '')
""",
    "memory of another process": """
import ctypes
class Piece(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
room = ctypes.create_string_buffer(8)
start = int(open(f'/proc/{VICTIM}/maps').readline().split('-')[0], 16)
ours, theirs = Piece(ctypes.addressof(room), 8), Piece(start, 8)
read = ctypes.CDLL(None).process_vm_readv
read.restype = ctypes.c_ssize_t
print('ESCAPED' if read(VICTIM, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 8 else '')
""",
    "mount": """
import ctypes, os
ctypes.CDLL(None).unshare(0x20000)
os.mkdir(MARKER)
mounted = ctypes.CDLL(None).mount(b'none', MARKER.encode(), b'tmpfs', 0, None)
print('ESCAPED' if mounted == 0 else '')
""",
    "namespace": """
import ctypes
print('ESCAPED' if ctypes.CDLL(None).unshare(0x20000) == 0 else '')
""",
    "device": "import os, stat\nos.mknod(MARKER, stat.S_IFCHR | 0o600, os.makedev(1, 3))",
    "chroot": "import os\nos.chroot('/')\nprint('ESCAPED')",
    "another user": "import os\nos.setuid(os.getuid())\nprint('ESCAPED')",
    "name of the machine": """
import socket
socket.sethostname(socket.gethostname())
print('ESCAPED')
""",
}
"""What root could do outside."""

ESCAPES = {
    "class": "().__class__.__base__.__subclasses__()",
    "mro": "str.mro()",
    "format": "'{0.__class__.__base__}'.format(1)",
    "format_map": "'{x.__class__}'.format_map({'x': 1})",
    "format of the type": "str.format('{0.__class__}', 1)",
    "f-string": "f'{().__class__.__base__.__subclasses__()}'",
    "f-string with a nested attribute": "f'{().__class__!r:>{10}}'",
    "object of an attribute error": """
try:
    f'{(1).missing.__class__}'
except AttributeError as error:
    found = error.obj
found.__class__.__subclasses__()
""",
    "frame of a generator": "(x for x in [1]).gi_frame.f_back.f_globals",
    "traceback of an error": """
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
frame.f_globals['__builtins__']
""",
    "traceback by with_traceback": """
try:
    1 / 0
except ZeroDivisionError as error:
    again = error.with_traceback(None)
again.__traceback__
""",
    "globals of a function": "open.__globals__['os'].listdir('/')",
    "globals of the file functions": "read_file.__globals__['os'].listdir('/')",
    "builtins": "__builtins__['open'](SECRET_PATH).read()",
    "import": "import os\nos.listdir('/')",
    "__import__": "__import__('os').listdir('/')",
    "import from": "from os import listdir\nlistdir('/')",
    "import of ctypes": "import ctypes",
    "eval": "eval('open')(SECRET_PATH)",
    "exec": "exec('import os')",
    "getattr": "getattr((), '__class__')",
    "type": "type('X', (object,), {})",
    "lambda's code": "(lambda: 0).__code__",
    "tampering with a function's body": """
def innocent():
    return 1
innocent.__body__[0].value = None
innocent()
""",
    "the interpreter through a function": """
def innocent():
    return 1
innocent.__asteval__.node_handlers
""",
    "attributes of a function": """
def innocent():
    return 1
[each for each in dir(innocent)]
innocent.__init__
""",
    "a subclass": "class Mine(str):\n    pass",
    "a decorator": "@print\ndef f():\n    return 1",
    "matching a class": "match 1:\n    case int(__class__=c):\n        print(c)",
    "assignment expression": "(found := ().__class__)",
    "deleting attributes": "del open.__code__",
    "setting attributes": "open.__code__ = print",
    "print's own": "print.__self__.symtable",
    "what print writes to": "print('x', file=open.__self__)",
    "modules inside of modules": "import json\njson.codecs.builtins.open(SECRET_PATH).read()",
    "a module's private names": "import random\nrandom._os.listdir('/')",
    "attributes through functools": "import functools\nfunctools.reduce.__self__",
    "loader of a module": "import json\njson.__loader__.get_data(SECRET_PATH)",
    "file of the host": "open(SECRET_PATH).read()",
    "file of the host by a way up": "open('../../../../../../../..' + SECRET_PATH).read()",
    "file descriptor": "open(0).read()",
    "exit": "raise SystemExit(0)",
    "open for writing": "open(MARKER, 'w').write('x')",
}
"""What is known to have been tried on interpreters like this one, or on this one."""

# operator.attrgetter looks up what the interpreter would refuse.
BYPASS = """
import operator
for each in operator.attrgetter('__class__.__base__.__subclasses__')(())():
    if operator.attrgetter('__name__')(each) == '_wrap_close':
        scope = operator.attrgetter('__init__.__globals__')(each)
modules = operator.attrgetter('modules')(scope['sys'])
operator.attrgetter('exec')(modules['builtins'])(PLAIN, {})
"""
"""Escapes from the interpreter for good, and runs plain Python in its process."""

NUMPY = {
    "fromfile": "fromfile(SECRET_PATH, dtype='uint8').tobytes()",
    "loadtxt": "loadtxt(SECRET_PATH, dtype=str)",
    "genfromtxt": "genfromtxt(SECRET_PATH, dtype=str)",
    "fromregex": "fromregex(SECRET_PATH, '(.*)', [('text', 'U99')])",
    "tofile": "array([1, 2, 3]).tofile(MARKER)",
    "dump": "array([1, 2, 3]).dump(MARKER)",
    "module": "import numpy\nnumpy.f2py.os.listdir('/')",
    "save": "import numpy\nnumpy.save(MARKER, numpy.zeros(3))",
    "memmap": "import numpy\nnumpy.memmap(SECRET_PATH, mode='r').tobytes()",
    "pickle": "import numpy\nnumpy.load(SECRET_PATH, allow_pickle=True)",
}

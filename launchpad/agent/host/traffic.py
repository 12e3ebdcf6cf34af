"""Knows the TCP connections, and the bytes that they have carried, which /proc/PID/io leaves out: by sock_diag(7)."""

import _socket
import contextlib
import os
import struct

from ...named import NamedTuple

_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_INFO = 2  # INET_DIAG_INFO, a struct tcp_info
_CONNECTED = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_PORT_AT = 6  # in struct inet_diag_msg: that of the other end, in network byte order
_MESSAGE_BYTES = 72  # struct inet_diag_msg; its last field is the inode
_BYTES_AT = 120  # in struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received (Linux 4.1)

# The kernel answers at once; this is for one that doesn't know the request.
_SECONDS = 0.5


class Connection(NamedTuple):
    """A TCP connection."""

    carried: int  # bytes, sent and received
    port: int  # of the other end


def by_socket() -> dict[str, Connection]:
    """The connections of this network namespace, by the link of their descriptors.

    Empty if the kernel doesn't tell.
    """
    found: dict[str, Connection] = {}
    try:
        kernel = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 4)  # NETLINK_SOCK_DIAG
        with contextlib.closing(kernel):
            kernel.settimeout(_SECONDS)
            for family in (_socket.AF_INET, _socket.AF_INET6):
                wanted = struct.pack("=BBBxI48x", family, _socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED)
                size = _HEADER.size + len(wanted)
                kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + wanted)
                while _take(kernel.recv(1 << 16), found):
                    pass
    except (OSError, struct.error):
        pass
    return found


def _take(data: bytes, found: dict[str, Connection]) -> bool:
    """Read some messages of an answer. Returns whether there are more to come."""
    while len(data) >= _HEADER.size:
        size, kind, _, _, _ = _HEADER.unpack_from(data)
        if kind in (_ERROR, _DONE) or size < _HEADER.size:
            return False
        message, data = data[_HEADER.size : size], data[(size + 3) & ~3 :]
        port = struct.unpack_from("!H", message, _PORT_AT)[0]
        inode = struct.unpack_from("=I", message, _MESSAGE_BYTES - 4)[0]
        attributes = message[_MESSAGE_BYTES:]
        while len(attributes) >= _ATTRIBUTE.size:
            length, attribute = _ATTRIBUTE.unpack_from(attributes)
            if attribute == _INFO and length >= _ATTRIBUTE.size + _BYTES_AT + 16:
                sent, received = struct.unpack_from("=QQ", attributes, _ATTRIBUTE.size + _BYTES_AT)
                found[f"socket:[{inode}]"] = Connection(sent + received, port)
            attributes = attributes[max(4, (length + 3) & ~3) :]
    return True


def of(pid: int, sockets: dict[str, Connection]) -> int:
    """The bytes of a process's connections; `sockets` comes from `by_socket`."""
    links = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:  # it has just been closed
                continue
    except OSError:  # the process is gone, or another user's
        pass
    return sum(sockets[link].carried for link in links & sockets.keys())

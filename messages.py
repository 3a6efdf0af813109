"""Messages between machines: JSON of a bounded size, and nothing else is understood.

Whoever sends anything else, or too slowly, is a stranger to be dropped.
"""

import json
import select
import socket
import struct
import time

# Before each message, so that a stranger is known at once.
MAGIC = b'TWRS'
MAX_BYTES = 1 << 16


def send(connection, **message):
    """Sends a message; raises OSError."""
    data = json.dumps(message).encode()
    if len(data) > MAX_BYTES:
        raise ValueError('a message of %d bytes' % len(data))
    connection.sendall(MAGIC + struct.pack('>I', len(data)) + data)


def receive(connection, seconds):
    """Returns the next message, a dict.

    Args:
      connection: a socket.
      seconds: how long the whole message may take.

    Raises:
      OSError: the connection is broken, or nothing came in time.
      ValueError: it is not one of ours.
    """
    deadline = time.monotonic() + seconds
    head = _receive_bytes(connection, len(MAGIC) + 4, deadline)
    (size,) = struct.unpack('>I', head[len(MAGIC) :])
    if head[: len(MAGIC)] != MAGIC or size > MAX_BYTES:
        raise ValueError('not one of our messages')
    try:
        message = json.loads(_receive_bytes(connection, size, deadline).decode())
    except RecursionError:  # brackets without end
        message = None
    if not isinstance(message, dict):
        raise ValueError('not one of our messages')
    return message


def _receive_bytes(connection, size, deadline):
    data = b''
    while len(data) < size:
        # Not by the socket's own limit, which another thread's send goes by.
        left = max(0, deadline - time.monotonic())
        if not select.select([connection], [], [], left)[0]:
            raise socket.timeout('nothing came for too long')
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError('its connection is closed')
        data += part
    return data

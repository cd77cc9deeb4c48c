"""Serving over HTTP to this machine."""

from __future__ import annotations

import socket

from weakincentives.core.serving import listen


def test_an_answer_does_not_wait_for_the_clients_acknowledgement():
    """Nagle's algorithm would hold back the second part of every short answer for 40 ms."""
    with listen() as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

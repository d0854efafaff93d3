"""A port that is kept for a server which is still starting."""

import socket

import pytest

from benchmarks.server_process import reserved_port


def test_only_a_server_that_reuses_addresses_gets_a_reserved_port() -> None:
    with reserved_port() as port, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"x")
            accepted, _ = server.accept()
            assert accepted.recv(1) == b"x"
            accepted.close()


def test_a_reserved_port_is_nobody_elses() -> None:
    with reserved_port() as first, reserved_port() as second:
        assert first != second

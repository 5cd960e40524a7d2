"""Tries to connect to a listener."""

import socket


def attack(argument):
    with socket.socket() as channel:
        channel.connect(("127.0.0.1", int(argument)))
        channel.sendall(b"escaped")
    return "escaped"

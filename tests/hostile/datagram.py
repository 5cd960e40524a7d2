"""Tries to send a datagram, and to resolve a host name."""

import socket


def attack(argument):
    made = 0
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as channel:
                made += 1
                channel.sendto(b"escaped", ("127.0.0.1", int(argument)))
        except OSError:
            continue
    try:
        socket.getaddrinfo(b"localhost", 80)
        made += 1
    except OSError:
        pass
    return f"made {made}"

"""Two network namespaces that stand for two hosts, each with a cable of its own to the bus; needs root on Linux."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from envbus.bus.embedded import find_nats_server

PORT = 4222


class TwoHosts:
    """The hosts ``one`` and ``two``; the bus and the test are on a third, this one."""

    def __init__(self) -> None:
        self.tag = secrets.token_hex(2)
        self.net = f"198.18.{secrets.randbelow(256)}"
        self.address = f"nats://{self.net}.1:{PORT}"

    def space(self, host: str) -> str:
        return f"envbus-{self.tag}-{host}"

    def inside(self, host: str) -> list[str]:
        """What a command on that host begins with."""
        return ["ip", "netns", "exec", self.space(host)]

    def lay_cables(self) -> None:
        for number, host in enumerate(("one", "two")):
            here, there = f"{self.net}.{number * 4 + 1}", f"{self.net}.{number * 4 + 2}"
            space, near, far = self.space(host), f"eb{self.tag}{number}h", f"eb{self.tag}{number}n"
            ip("netns", "add", space)
            ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
            ip("address", "add", f"{here}/30", "dev", near)
            ip("link", "set", near, "up")
            ip("-n", space, "address", "add", f"{there}/30", "dev", far)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", far, "up")
            ip("-n", space, "route", "add", "default", "via", here)
        # While the second cable is unplugged its packets go nowhere, not out by this host's default route.
        ip("route", "add", "unreachable", f"{self.net}.4/30", "metric", "9999")

    def remove(self) -> None:
        for host in ("one", "two"):  # the cables go with them
            subprocess.run(["ip", "netns", "delete", self.space(host)], capture_output=True)
        subprocess.run(["ip", "route", "delete", "unreachable", f"{self.net}.4/30"], capture_output=True)

    @contextlib.contextmanager
    def second_unplugged(self) -> Iterator[None]:
        """As if the second host's cable were pulled: no packet and no reset gets through."""
        ip("link", "set", f"eb{self.tag}1h", "down")
        try:
            yield
        finally:
            ip("link", "set", f"eb{self.tag}1h", "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Lay cables and start the bus; skips the test where this is not allowed."""
    if shutil.which("ip") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no ip command; Debian has it in iproute2")
    hosts = TwoHosts()
    try:
        try:
            hosts.lay_cables()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        nats = subprocess.Popen(
            [find_nats_server(), "-a", f"{hosts.net}.1", "-p", str(PORT)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_port(f"{hosts.net}.1")
            yield hosts
        finally:
            nats.kill()
            nats.wait(20)
    finally:
        hosts.remove()


def wait_for_port(host: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, PORT), 1):
            return
        assert time.monotonic() < deadline, "nats-server does not start"
        time.sleep(0.05)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

"""
Several nodes: when one of them is gone, the run ends on the others as well.

A launcher ends the processes of its own node alone. Those of other nodes would wait in a collective for the group's
timeout of two hours: a node without power closes no connection, and it was not tried what NCCL makes of a closed one.
So each process holds a connection to the main process. The kernels probe it, and a busy process is not taken for dead.
"""

import contextlib
import os
import socket
import sys
import threading
import time

import torch

QUIET, EVERY, COUNT = 10, 5, 3  # seconds until a kernel probes, seconds between probes, and how many must be lost
connections = []


def watch(accelerator):
    """Ends this process with exit code 1 once another node is gone. Call it on every process."""
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1 or connections:
        return
    with contextlib.suppress(OSError):
        connect(accelerator)
    # Where a firewall keeps some processes from connecting, none is watched.
    if not accelerator.gather(torch.tensor([len(connections)], device=accelerator.device)).all():
        connections.clear()
        if accelerator.is_main_process:
            print("note: the processes cannot watch each other: a dead node is noticed after two hours", flush=True)
        return
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", QUIET), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", COUNT)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=listen, args=[connection], daemon=True).start()


def connect(accelerator):
    """Fills `connections`: on the main process one to each other process, and there the one to the main process."""
    if accelerator.is_main_process:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
            server.settimeout(60)
            torch.distributed.broadcast_object_list([server.getsockname()[1]])
            made = [server.accept()[0] for _ in range(accelerator.num_processes - 1)]
    else:
        port = [None]
        torch.distributed.broadcast_object_list(port)
        made = [socket.create_connection((os.environ["MASTER_ADDR"], *port), timeout=60)]
        made[0].settimeout(None)
    connections.extend(made)


def listen(connection):
    """Waits until the other process takes its leave. If it is gone without that, this process ends."""
    address = connection.getpeername()[0].removeprefix("::ffff:")
    with contextlib.suppress(OSError):
        if connection.recv(1):
            return
    time.sleep(5)  # A process that has its own error to tell ends by itself.
    what = f"the process at {address} or its node is gone; unless its log names a fault, --resume goes on"
    print(f"error: {what}", file=sys.stderr, flush=True)
    os._exit(1)


def take_leave():
    """Tells the others that this process ends as it should."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(b".")

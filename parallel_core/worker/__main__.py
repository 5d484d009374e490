"""A rank's process: `python -m parallel_core.worker CONFIG`, started by `launch` and by nobody else."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback

from ..protocol import encode_frame
from .bootstrap import RankConfig, say_hello, tie_to_parent, watch_socket


def main(argument: str) -> int:
    """Runs until the controller says shutdown or goes away."""
    config = RankConfig.from_json(json.loads(argument))
    tie_to_parent(config)
    sock = socket.socket(fileno=config.socket)
    watch_socket(sock)
    say_hello(sock, config)
    try:
        from .loop import serve  # imports torch and diffusers: seconds

        return serve(sock, config)
    except Exception as error:
        failure = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "device": "+".join(config.devices),
            "when": time.monotonic(),
        }
        sock.sendall(encode_frame({"event": "failed", "error": failure}))
        raise


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Native libraries' exit handlers (gloo, NCCL, CUDA) have nothing left to save and now and then hang.
    os._exit(code)

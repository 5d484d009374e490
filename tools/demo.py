"""`make demo`: one picture from a real ComfyUI with this package in it, from start to stop.

Starts a server from the developer environment, queues tools/demo_api.json, shows what happens, and
copies the picture to output/. Knows the workflow only as nodes with titles; its one change is the `devices` input.

Run with .dev/venv's Python: ``.dev/venv/bin/python -m tools.demo [--devices cpu:2]``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from . import dev_env
from .comfy_client import ComfyClient, ComfyError, ComfyServer, Event, Outcome, exit_on_sigterm

WORKFLOW = dev_env.ROOT / "tools" / "demo_api.json"
OUTPUT = dev_env.ROOT / "output"
_CONFIG_NODE = "PD_ParallelConfig"
_CPU_DEVICES = "cpu:2"


class Screen:
    """Progress in a terminal: one line that is rewritten, or plain lines where the output is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._open = False

    def line(self, text: str) -> None:
        """A line that stays."""
        self._close()
        self._stream.write(text + "\n")
        self._stream.flush()

    def update(self, text: str) -> None:
        """A line that the next one replaces (in a terminal)."""
        if not self._live:
            self.line(text)
            return
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + text[:width])
        self._stream.flush()
        self._open = True

    def _close(self) -> None:
        if self._open:
            self._stream.write("\r\x1b[K")
            self._open = False


class Follower:
    """Turns a prompt's events into lines on the screen."""

    def __init__(self, prompt: dict[str, Any], screen: Screen) -> None:
        self._prompt = prompt
        self._screen = screen
        self._node = ""
        self._texts: dict[str, str] = {}
        self._started = time.monotonic()

    def __call__(self, event: Event) -> None:
        if event.kind == "executing" and event.data.get("node"):
            self._node = str(event.data["node"])
            self._screen.update(self.title(self._node))
        elif event.kind == "progress":
            self._screen.update(self._bar(int(event.data["value"]), int(event.data["max"])))
        elif event.kind == "progress_text":
            self._say(event.data["node"], event.data["text"])

    def _say(self, node_id: str, text: str) -> None:
        if self._texts.get(node_id) != text:  # a node may send the same text more than once
            self._texts[node_id] = text
            for line in text.splitlines():
                self._screen.line(f"  {self.title(node_id)}: {line}")

    def title(self, node_id: str) -> str:
        """The node's title in the workflow."""
        node = self._prompt.get(node_id, {})
        return str(node.get("_meta", {}).get("title") or node.get("class_type", f"node {node_id}"))

    def _bar(self, value: int, maximum: int) -> str:
        filled = 30 * value // max(1, maximum)
        seconds = time.monotonic() - self._started
        return f"{self.title(self._node)} [{'#' * filled}{'.' * (30 - filled)}] {value}/{maximum}  {seconds:.1f} s"


def gpu_count(python: Path) -> int:
    """How many GPUs ComfyUI's torch sees."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def choose_devices(wanted: str, screen: Screen) -> tuple[str, bool]:
    """The `devices` for the config node, and whether ComfyUI itself is to run on the CPU."""
    if wanted.startswith("cpu"):
        return wanted, True
    gpus = gpu_count(dev_env.PYTHON)
    if gpus == 0 and wanted == "all":
        screen.line(f"no GPU here: {_CPU_DEVICES} instead")
        return _CPU_DEVICES, True
    return wanted, gpus == 0


def load_prompt(devices: str) -> dict[str, Any]:
    """The shipped workflow with `devices` set in its config node."""
    prompt: dict[str, Any] = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    configs = [node for node in prompt.values() if node["class_type"] == _CONFIG_NODE]
    if not configs:
        raise ComfyError(f"{WORKFLOW} has no {_CONFIG_NODE} node")
    for node in configs:
        node["inputs"]["devices"] = devices
    return prompt


def save_images(client: ComfyClient, outcome: Outcome) -> list[Path]:
    """Copy what the workflow made to output/."""
    OUTPUT.mkdir(exist_ok=True)
    paths = []
    for image in outcome.images():
        path = OUTPUT / image["filename"]
        path.write_bytes(client.fetch_image(image))
        paths.append(path)
    return paths


def demo(devices: str, screen: Screen) -> int:
    """Returns the exit code."""
    devices, cpu = choose_devices(devices, screen)
    prompt = load_prompt(devices)
    dev_env.link_package()
    started = time.monotonic()
    server = ComfyServer(
        dev_env.COMFYUI, dev_env.BASE, python=dev_env.PYTHON, cpu=cpu, log_path=dev_env.DEV / "demo.log"
    )
    screen.update("starting ComfyUI ...")
    with server, server.client() as client:
        screen.line(f"ComfyUI is up at {server.url} ({time.monotonic() - started:.0f} s); its log: {server.log_path}")
        screen.line(f"queueing {WORKFLOW.relative_to(dev_env.ROOT)} on {devices}")
        queued = time.monotonic()
        outcome = client.run(prompt, on_progress=Follower(prompt, screen), timeout=900)
        if outcome.status != "success":
            screen.line(f"FAILED ({outcome.status}): {outcome.error_text or 'see the log'}")
            return 1
        paths = save_images(client, outcome)
        if not paths:
            screen.line(f"FAILED: the workflow ended without a picture; see {server.log_path}")
            return 1
        screen.line(f"done in {time.monotonic() - queued:.1f} s")
        for path in paths:
            screen.line(f"the picture: {path}")
    screen.line("ComfyUI is stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the demo; whatever happens, the server is stopped."""
    parser = argparse.ArgumentParser(description="One picture from ComfyUI with Parallel Diffusion.")
    parser.add_argument("--devices", default=_CPU_DEVICES, help='"cpu:2" (two CPU ranks), "all", "0,1", GPU UUIDs')
    options = parser.parse_args(argv)
    screen = Screen(sys.stdout)
    exit_on_sigterm()
    try:
        return demo(options.devices, screen)
    except (ComfyError, TimeoutError, OSError, subprocess.CalledProcessError) as error:
        screen.line(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        screen.line("stopped")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

"""The developer's tools: the steps of the environment, the ComfyUI client and the demo's screen.

The client is tried against fake_comfyui.py, which answers in tenths of a second; tests/comfyui uses the real one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import comfy_server, demo, dev_env
from tools.comfy_client import ComfyClient, ComfyError, ComfyServer, Event, PromptRejected, ServerDied


def one_node(kind: str) -> dict[str, object]:
    return {"1": {"class_type": kind, "inputs": {}}}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a tree")
    shutil.copy(Path(__file__).parent / "fake_comfyui.py", folder / "main.py")
    return folder


@pytest.fixture(scope="module")
def server(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    with ComfyServer(tree, tmp_path_factory.mktemp("a base")) as server:
        yield server


@pytest.fixture
def client(server: ComfyServer) -> Iterator[ComfyClient]:
    with server.client() as client:
        yield client


def test_a_prompt_gives_its_outputs_and_texts(client: ComfyClient) -> None:
    seen: list[str] = []
    outcome = client.run(one_node("ok"), on_progress=lambda event: seen.append(event.kind))
    assert outcome.status == "success" and outcome.error is None
    assert outcome.texts == {"1": ["two ranks"]}
    assert seen == ["executing", "progress", "progress_text", "execution_success"]
    assert client.fetch_image(outcome.images()[0]) == b"x.png"


def test_events_after_the_end_of_a_prompt_do_not_end_the_next_one(client: ComfyClient) -> None:
    outcomes = [client.run(one_node(kind)) for kind in ("ok", "error", "ok")]
    assert [outcome.status for outcome in outcomes] == ["success", "error", "success"]
    assert outcomes[1].error_text == "node 1 (error): ValueError: no"


def test_a_prompt_without_events_is_found_in_the_history(client: ComfyClient) -> None:
    assert client.run(one_node("quiet")).status == "success"


def test_interrupt(client: ComfyClient) -> None:
    def stop(event: Event) -> None:
        if event.kind == "progress":
            client.interrupt()

    assert client.run(one_node("endless"), on_progress=stop).status == "interrupted"


def test_a_refused_prompt_tells_node_and_input(client: ComfyClient) -> None:
    with pytest.raises(PromptRejected, match=r"node 1 \(bad\): Value 0 smaller than min of 1: steps") as caught:
        client.queue(one_node("bad"))
    assert list(caught.value.node_errors) == ["1"] and caught.value.prompt_id is None


def test_an_unknown_route_tells_the_code(client: ComfyClient) -> None:
    with pytest.raises(ComfyError, match="GET /nothing: HTTP 404"):
        client.get("/nothing")


def test_the_death_of_the_server_ends_the_wait(tree: Path, tmp_path: Path) -> None:
    with ComfyServer(tree, tmp_path) as server, server.client() as client:
        with pytest.raises(ServerDied, match="SIGKILL"):
            client.run(one_node("die"))
        with pytest.raises(ServerDied, match="SIGKILL"):
            client.queue(one_node("ok"))


def test_a_prompt_that_takes_too_long(tree: Path, tmp_path: Path) -> None:
    with ComfyServer(tree, tmp_path) as server, server.client() as client:
        with pytest.raises(TimeoutError, match="did not end within 0.1 s"):
            client.run(one_node("endless"), timeout=0.1)


def test_a_server_that_ends_while_starting_shows_its_log(tree: Path, tmp_path: Path) -> None:
    server = ComfyServer(tree, tmp_path, env={"FAKE_COMFYUI": "broken"})
    with pytest.raises(ServerDied, match=r"(?s)exit code 1.*cannot import torch"):
        server.start()
    assert server.process is None


def test_a_port_in_use_is_named(server: ComfyServer, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ComfyError, match=f"port {server.port} is in use"):
        ComfyServer(tree, tmp_path, port=server.port).start()
    assert server.alive()


def test_stop_ends_a_server_that_ignores_sigterm(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy_server, "_STOP_S", 0.2)
    server = ComfyServer(tree, tmp_path, env={"FAKE_COMFYUI": "stubborn"}).start()
    process = server.process
    assert process is not None
    server.stop()
    assert process.returncode == -signal.SIGKILL
    server.stop()  # a second stop does nothing


def test_a_stopped_server_starts_again_on_its_port(tree: Path, tmp_path: Path) -> None:
    server = ComfyServer(tree, tmp_path)
    for _ in range(2):
        with server, server.client() as client:
            assert client.run(one_node("ok")).status == "success"
        assert server.pid is None


def test_clients_close_their_thread(server: ComfyServer) -> None:
    with server.client() as client:
        client.run(one_node("ok"))
        assert any(thread.name.startswith("comfy-events") for thread in threading.enumerate())
    assert not any(client.client_id[:8] in thread.name for thread in threading.enumerate())


def test_comfyuis_requirements_keep_torchsde_and_leave_out_what_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["comfyui-frontend-package==1.32.9", "torch", "torchsde", "torchvision", "torchaudio", "numpy>=1.25.0"]
    lines += ["transformers>=4.50.3", "tokenizers>=0.13.3", "", "#non essential dependencies:", "pydantic~=2.0"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    monkeypatch.setattr(dev_env, "COMFYUI", tmp_path)
    assert dev_env.comfyui_requirements() == ["torchsde", "numpy>=1.25.0", "tokenizers>=0.13.3", "pydantic~=2.0"]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """set_up() with three steps a, b, c that only note their names; b depends on the value in the file `b`."""
    names: list[str] = []
    (tmp_path / "b").write_text("1")

    def steps() -> list[object]:
        keys = {"a": 1, "b": (tmp_path / "b").read_text(), "c": 1}
        return [(name, name, lambda name=name: names.append(name), key) for name, key in keys.items()]

    monkeypatch.setattr(dev_env, "DEV", tmp_path)
    monkeypatch.setattr(dev_env, "steps", steps)
    monkeypatch.setattr(dev_env, "link_package", lambda: None)
    monkeypatch.setattr(dev_env, "run", lambda *command: None)
    return names


def test_steps_run_once(ran: list[str]) -> None:
    dev_env.set_up()
    dev_env.set_up()
    assert ran == ["a", "b", "c"]


def test_a_changed_step_and_those_after_it_run_again(ran: list[str], tmp_path: Path) -> None:
    dev_env.set_up()
    ran.clear()
    (tmp_path / "b").write_text("2")
    dev_env.set_up()
    assert ran == ["b", "c"]


def test_a_failed_step_leaves_no_stamp(ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise dev_env.SetupError("exit code 1 from: pip")

    good = dev_env.steps
    monkeypatch.setattr(dev_env, "steps", lambda: [*good()[:1], ("b", "b", fail, "1"), *good()[2:]])
    assert dev_env.main() == 1
    monkeypatch.setattr(dev_env, "steps", good)
    assert dev_env.main() == 0
    assert ran == ["a", "b", "c"]


def test_the_package_is_linked_once_and_again_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base" / "custom_nodes").mkdir(parents=True)
    link = tmp_path / "base" / "custom_nodes" / dev_env.PACKAGE_NAME
    link.symlink_to(tmp_path / "an old place")
    monkeypatch.setattr(dev_env, "BASE", tmp_path / "base")
    dev_env.link_package()
    dev_env.link_package()
    assert link.resolve() == dev_env.ROOT


def workflow(tmp_path: Path, *classes: str) -> Path:
    path = tmp_path / "demo_api.json"
    path.write_text(json.dumps({str(i): {"class_type": name, "inputs": {}} for i, name in enumerate(classes)}))
    return path


def test_the_demo_sets_devices_in_the_config_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WORKFLOW", workflow(tmp_path, "PD_ParallelConfig", "KSampler"))
    prompt = demo.load_prompt("cpu:4")
    assert prompt["0"]["inputs"] == {"devices": "cpu:4"} and prompt["1"]["inputs"] == {}


def test_the_demo_needs_a_config_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WORKFLOW", workflow(tmp_path, "KSampler"))
    with pytest.raises(ComfyError, match="has no PD_ParallelConfig node"):
        demo.load_prompt("cpu:2")


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [
        ("cpu:2", 8, ("cpu:2", True)),
        ("all", 2, ("all", False)),
        ("all", 0, ("cpu:2", True)),
        ("0,1", 2, ("0,1", False)),
        ("0,1", 0, ("0,1", True)),  # the node says what is wrong with it
    ],
)
def test_comfyui_runs_on_the_cpu_only_where_it_must(
    wanted: str, gpus: int, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "gpu_count", lambda python: gpus)
    assert demo.choose_devices(wanted, demo.Screen(io.StringIO())) == expected


EVENTS = [
    Event("executing", {"node": "1"}),
    Event("progress", {"node": "1", "value": 15, "max": 20}),
    Event("progress_text", {"node": "1", "text": "rank 0: 1.5 s"}),
    Event("progress_text", {"node": "1", "text": "rank 0: 1.5 s"}),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    follower = demo.Follower({"1": {"class_type": "KSampler", "_meta": {"title": "Sampler"}}}, demo.Screen(stream))
    for event in EVENTS:
        follower(event)
    return stream.getvalue()


def test_plain_lines_where_the_output_is_no_terminal() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert lines[0] == "Sampler"
    assert lines[1].startswith("Sampler [######################........] 15/20")
    assert lines[2:] == ["  Sampler: rank 0: 1.5 s"]  # the same text twice is shown once


def test_one_line_that_is_rewritten_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    text = shown(Terminal())
    assert text.count("\n") == 1 and text.endswith("  Sampler: rank 0: 1.5 s\n")
    assert "15/20" not in text  # cut at the terminal's width instead of wrapping

"""A stand-in for ComfyUI's main.py that test_dev_tools.py starts: the routes and events, in real ComfyUI's order.

Prompts are {"1": {"class_type": KIND}}: "ok", "error", "die" (kills the server), "quiet" (ends without any event),
"endless" (until interrupted), "bad" (refused). FAKE_COMFYUI=broken ends at once; =stubborn ignores SIGTERM.
"""

import asyncio
import os
import signal
import struct
import sys

from aiohttp import web

sockets = {}
history = {}
interrupted = asyncio.Event()


async def send(client_id, kind, **data):
    await sockets[client_id].send_json({"type": kind, "data": data})


def record(prompt_id, status, *messages):
    history[prompt_id] = {
        "outputs": {"1": {"images": [{"filename": "x.png", "subfolder": "", "type": "output"}]}},
        "status": {"status_str": status, "completed": status == "success", "messages": list(messages)},
    }


async def execute(client_id, prompt_id, kind):
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "quiet":
        return record(prompt_id, "success")
    await send(client_id, "executing", node="1", prompt_id=prompt_id)
    await send(client_id, "progress", value=1, max=2, node="1", prompt_id=prompt_id)
    await sockets[client_id].send_bytes(struct.pack(">II", 3, 1) + b"1" + b"two ranks")
    if kind == "endless":
        await interrupted.wait()
        await send(client_id, "execution_interrupted", prompt_id=prompt_id)
        return record(prompt_id, "error", ("execution_interrupted", {"prompt_id": prompt_id}))
    if kind == "error":
        error = {"prompt_id": prompt_id, "node_id": "1", "node_type": "error", "exception_message": "no\n"}
        error["exception_type"] = "ValueError"
        await send(client_id, "execution_error", **error)
        await asyncio.sleep(0.05)  # real ComfyUI writes its history after the event
        return record(prompt_id, "error", ("execution_error", error))
    await send(client_id, "execution_success", prompt_id=prompt_id)
    await asyncio.sleep(0.05)
    record(prompt_id, "success")
    await send(client_id, "executing", node=None, prompt_id=prompt_id)


async def websocket(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    sockets[request.query["clientId"]] = socket
    async for _ in socket:
        pass
    return socket


async def prompt(request):
    body = await request.json()
    kind = body["prompt"]["1"]["class_type"]
    if kind == "bad":
        problem = {"type": "value_smaller_than_min", "message": "Value 0 smaller than min of 1", "details": "steps"}
        error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation"}
        node_errors = {"1": {"class_type": "bad", "errors": [problem]}}
        return web.json_response({"error": error, "node_errors": node_errors}, status=400)
    prompt_id = f"p{len(history)}-{kind}"
    request.app["tasks"].append(asyncio.create_task(execute(body["client_id"], prompt_id, kind)))
    return web.json_response({"prompt_id": prompt_id, "number": 1, "node_errors": {}})


async def interrupt(request):
    interrupted.set()
    return web.Response()


async def main(port):
    app = web.Application()
    app["tasks"] = []
    app.router.add_get("/ws", websocket)
    app.router.add_post("/prompt", prompt)
    app.router.add_post("/interrupt", interrupt)
    app.router.add_get("/system_stats", lambda request: web.json_response({"system": {"argv": sys.argv}}))
    app.router.add_get("/view", lambda request: web.Response(body=request.query["filename"].encode()))

    async def show(request):
        prompt_id = request.match_info["prompt_id"]
        return web.json_response({prompt_id: history[prompt_id]} if prompt_id in history else {})

    app.router.add_get("/history/{prompt_id}", show)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if os.environ.get("FAKE_COMFYUI") == "broken":
    raise SystemExit("cannot import torch")
if os.environ.get("FAKE_COMFYUI") == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))

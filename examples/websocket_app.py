"""Websockets: limits for new connections, and for the messages that clients send."""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from tidegate.integrations import Rule
from tidegate.integrations.fastapi import install

app = FastAPI()
install(app, Rule("10/minute", namespace="connections"), messages=Rule("2/minute", namespace="messages"))


@app.websocket("/echo")
async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect:
        pass

"""The floor of P13: a Flask endpoint that does nothing, on the gunicorn that the API runs on."""

from __future__ import annotations

from flask import Flask

app = Flask(__name__)


@app.get("/v1/keys/<identity>")
def key(identity: str) -> dict[str, str]:
    """Answers with what it was asked for."""
    return {"id": identity}

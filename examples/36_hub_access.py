"""Give people and programs the access that they need: projects, roles and tokens of a hub.

python examples/36_hub_access.py
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from skyward.testing.hub import HubServer


def call(url: str, token: str, method: str, path: str, **body: Any) -> Any:
    """Call a route of the hub's API and return its answer, or the sentence that says why not."""
    request = urllib.request.Request(url + path, method=method, data=json.dumps(body).encode() if body else None)
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)["error"]["message"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, HubServer(Path(folder)) as server:
        url, owner = server.url, server.token
        call(url, owner, "POST", "/v1/projects", name="vision")
        link = call(url, owner, "POST", "/v1/users", name="grace")["link"]
        print("grace signs in once by", link.replace(url, "").partition("=")[0] + "=...")
        call(url, owner, "POST", "/v1/projects/vision/members", user="grace", role="researcher")

        # A program has an account of its own, and a token that reads one project.
        call(url, owner, "POST", "/v1/users", name="report-bot", is_service=True)
        call(url, owner, "POST", "/v1/projects/vision/members", user="report-bot", role="viewer")
        token = call(url, owner, "POST", "/v1/tokens", name="reports", user="report-bot", project="vision")
        print("report-bot reads:", len(call(url, token["token"], "GET", "/v1/runs")["runs"]), "runs")
        print("report-bot writes:", call(url, token["token"], "POST", "/v1/runs", name="mine"))

        call(url, owner, "DELETE", f"/v1/tokens/{token['id']}")
        print("revoked:", call(url, token["token"], "GET", "/v1/runs"))
        changes = [entry["action"] for entry in call(url, owner, "GET", "/v1/audit")["audit"]]
        print("audit:", ", ".join(changes[:3]))


if __name__ == "__main__":
    main()

"""Artifacts over both APIs: written, listed, read in parts, and never shown as pages of the hub."""

from __future__ import annotations

import httpx
import pytest

API = "/api/2.0/mlflow-artifacts/artifacts"


@pytest.fixture
def run_id(owner: httpx.Client) -> str:
    return str(owner.post("/v1/runs", json={}).raise_for_status().json()["id"])


def test_artifact_of_mlflows_client_is_read_by_both_apis(owner: httpx.Client, run_id: str) -> None:
    body = b"<script>alert(1)</script>" * 1000
    owner.put(f"{API}/0/{run_id}/artifacts/sub/d=1.html", content=body).raise_for_status()
    for path in (f"{API}/0/{run_id}/artifacts/sub/d=1.html", f"/v1/runs/{run_id}/artifacts/sub/d=1.html"):
        answer = owner.get(path)
        assert answer.content == body
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment;")
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_folders_are_listed_as_mlflow_lists_them(owner: httpx.Client, run_id: str) -> None:
    for key in ("a.txt", "sub/b.txt", "sub/deep/c.txt"):
        owner.post(f"/v1/runs/{run_id}/artifacts", params={"key": key}, content=b"x").raise_for_status()
    listed = owner.get("/api/2.0/mlflow/artifacts/list", params={"run_id": run_id, "path": "sub"}).json()
    assert [(file["path"], file["is_dir"]) for file in listed["files"]] == [("sub/b.txt", False), ("sub/deep", True)]
    below = owner.get(API, params={"path": f"0/{run_id}/artifacts/sub"}).json()
    assert [file["path"] for file in below["files"]] == ["b.txt", "deep"]


def test_range_gives_a_part(owner: httpx.Client, run_id: str) -> None:
    owner.post(f"/v1/runs/{run_id}/artifacts", params={"key": "n"}, content=b"0123456789").raise_for_status()
    path = f"/v1/runs/{run_id}/artifacts/n"
    for wanted, part, shown in (
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=8-", b"89", "bytes 8-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
    ):
        answer = owner.get(path, headers={"Range": wanted})
        assert (answer.status_code, answer.content, answer.headers["content-range"]) == (206, part, shown)
    assert owner.get(path, headers={"Range": "bytes=10-"}).status_code == 416


@pytest.mark.parametrize(
    "key",
    ["..%2Fx", "%2e%2e/x", "a%2F..%2F..%2Fx", "%252e%252e%252fx", "..;/x", "a%5C..%5Cx", "%00", "%2Fetc%2Fpasswd"],
)
def test_names_that_lead_out_are_refused_or_are_just_names(owner: httpx.Client, run_id: str, key: str) -> None:
    put = owner.put(f"{API}/0/{run_id}/artifacts/{key}", content=b"x")
    got = owner.get(f"{API}/0/{run_id}/artifacts/{key}")
    assert (put.status_code, got.status_code) in {(400, 400), (200, 200), (404, 404), (405, 404)}, (key, put.text)
    assert b"root:" not in got.content

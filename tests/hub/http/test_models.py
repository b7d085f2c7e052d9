"""Registered models, as `/v1` shows them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.hub.http.test_mlflow_registry import good, make_version

MOMENTS = ("created_at", "updated_at")


def shown(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"/v1/models{path}", params=query).raise_for_status().json()
    return answer


def test_model_is_shown_with_its_aliases_and_newest_versions(owner: httpx.Client) -> None:
    tags = [{"key": "team", "value": "vision"}]
    good(owner, "POST", "registered-models/create", {"name": "shown", "tags": tags, "description": "of digits"})
    runs = [make_version(owner, "shown")[1] for _ in range(2)]
    good(owner, "POST", "registered-models/alias", {"name": "shown", "alias": "champion", "version": "2"})
    model = shown(owner, "/shown")
    assert model["created_at"] <= model["updated_at"]
    (latest,) = model.pop("latest")
    assert {name: value for name, value in model.items() if name not in MOMENTS} == {
        "name": "shown",
        "description": "of digits",
        "owner": "owner",
        "tags": {"team": "vision"},
        "aliases": {"champion": 2},
    }
    assert {name: value for name, value in latest.items() if name not in MOMENTS} == {
        "name": "shown",
        "version": 2,
        "stage": "none",
        "source": f"runs:/{runs[1]}/model",
        "location": f"runs:/{runs[1]}/model",
        "run_id": runs[1],
        "run_link": "",
        "description": "",
        "owner": "owner",
        "tags": {},
        "aliases": ["champion"],
    }
    assert shown(owner, "/shown/versions/2") == latest
    versions = shown(owner, "/shown/versions", order_by="version_number DESC")["versions"]
    assert versions == [latest, shown(owner, "/shown/versions/1")]


def test_models_and_versions_are_searched_page_by_page(owner: httpx.Client) -> None:
    for name in ("paged-a", "paged-b", "other"):
        good(owner, "POST", "registered-models/create", {"name": name})
        make_version(owner, name)
    make_version(owner, "paged-a")
    first = shown(owner, "", filter="name LIKE 'paged-%'", limit=1)
    second = shown(owner, "", filter="name LIKE 'paged-%'", limit=1, page_token=first["next_page_token"])
    assert [model["name"] for page in (first, second) for model in page["models"]] == ["paged-a", "paged-b"]
    assert second["next_page_token"] is None
    first = shown(owner, "/paged-a/versions", limit=1, order_by="version_number ASC")
    token = first["next_page_token"]
    second = shown(owner, "/paged-a/versions", limit=1, order_by="version_number ASC", page_token=token)
    assert [version["version"] for page in (first, second) for version in page["versions"]] == [1, 2]
    assert shown(owner, "/paged-a/versions", filter="name = 'other'")["versions"] == []


def test_prompts_are_no_models_but_are_found_by_name(owner: httpx.Client) -> None:
    tag = {"key": "mlflow.prompt.is_prompt", "value": "true"}
    good(owner, "POST", "registered-models/create", {"name": "prompt"})
    make_version(owner, "prompt")
    good(owner, "POST", "registered-models/set-tag", {"name": "prompt", **tag})
    assert "prompt" not in {model["name"] for model in shown(owner, "")["models"]}
    assert [version["version"] for version in shown(owner, "/prompt/versions")["versions"]] == [1]


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/nobody", 404, "name"),
        ("/nobody/versions", 404, "name"),
        ("/nobody/versions/1", 404, "version"),
        ("/a%3Ab", 400, "name"),
        ("/nobody/versions/first", 400, "version"),
        ("?filter=foo%20%3D%20'x'", 400, "filter"),
        ("?page_token=x", 400, "page_token"),
        ("?limit=0", 400, "limit"),
    ],
)
def test_mistakes_name_their_field(owner: httpx.Client, path: str, status: int, field: str) -> None:
    answer = owner.get(f"/v1/models{path}")
    assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), answer.json()

"""The report of a run: the contents of the page, which is well formed and self-contained whatever the logs hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from skyward.errors import UsageError
from skyward.training import report
from skyward.training.reporting.comparison import labels_of
from skyward.training.reporting.records import Points
from skyward.training.reporting.smoothing import smoothed

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Parser that refuses tags that are left open or closed twice. It keeps texts by the tag that they are in."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str]] = []
        self.scripts = 0
        self.feed(html)
        self.close()
        assert self.open == []
        self.svgs = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
        for svg in self.svgs:
            ElementTree.fromstring(svg)  # as XML, which forgives nothing
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
        assert found is not None
        self.data: list[dict[str, Any]] = json.loads(found[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def chart(self, line: str) -> dict[str, Any]:
        """Return the chart that has this line."""
        return next(each for each in self.data if any(s["name"] == line for s in each.get("series", [])))


def page(run_dir: Path) -> Page:
    return Page(report(run_dir).read_text(encoding="utf-8"))


def log(folder: Path, records: list[dict[str, Any]], name: str = "trainer_logs.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(records))


def step(at: int, **values: Any) -> dict[str, Any]:
    return {"timestamp": 1.79e9 + at, "global_step": at, "epoch": at / 100, **values}


def test_a_run_with_our_loggers_has_its_curves_memory_norms_and_tables(tmp_path: Path) -> None:
    """Run a real training with the loggers that write the files."""
    from skyward.training import GradNormLogger, JsonLogger, ParameterNormLogger, PeakMemory, WeightNormLogger
    from tests.training.probes.small_run import SmallRun

    loggers = [WeightNormLogger(), PeakMemory(), JsonLogger(experiment="a small one"), GradNormLogger()]
    run = SmallRun(tmp_path, [*loggers, ParameterNormLogger()], max_steps=8).train()
    found = page(tmp_path)
    loss = found.chart("loss")
    assert {each["name"]: each["points"] for each in loss["series"]} == {
        "loss": [[at + 1, value] for at, value in enumerate(run.losses)],
        "eval_loss": [[at, run.losses[at - 1]] for at in (2, 4, 6, 8)],
    }
    titles = found.texts["h3"]
    assert titles[:2] == ["Loss", "Weight norm"]
    assert titles[-4:] == [
        titles[-4],
        "Gradient norms",
        "Parameter norms",
        "Spectral norms",
    ]
    assert ("Peak" in titles[-4]) is ("rank" in titles[-4]) is True
    gradients = next(each for each in found.data if each["kind"] == "heat")
    assert gradients["steps"] == [2, 4, 6, 8]
    assert set(gradients["names"]) == {name for name, _ in run.model.named_parameters()}
    assert gradients["values"][gradients["names"].index("head.bias")][0] == pytest.approx(
        run.gradients[2]["head.bias"], rel=1e-3
    )
    assert len(found.svgs) == len(found.data) == len(titles)
    assert "a small one" in found.texts["td"]
    assert found.texts["h2"] == ["Curves", "Memory", "Norms", "Evaluations", "Metrics", "The run"]


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    log(tmp_path, [step(1, loss=1.0)])
    html = report(tmp_path).read_text()
    found = Page(html)
    assert not {name for name, _ in found.attributes} & {"src", "href", "srcset", "action", "xlink:href"}
    for word in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in html


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script><blink a=\"'&"
    folder = tmp_path / "<i>run"
    log(
        folder,
        [
            step(0, experiment=nasty, **{f"fact {nasty}": {"deep": nasty}}),
            step(1, loss=1.0, **{nasty: 2.0, f"eval_{nasty}": 3.0}),
            step(2, loss=1.0, **{f"list {nasty}": [1, 2]}),
            step(2, train_runtime=1.0, note=nasty),
        ],
    )
    log(folder, [step(2, grad_norms={nasty: 1.0, "b": 2.0})], "gradient_norms.json")
    found = page(folder)  # well formed
    assert found.scripts == 2
    assert "blink" not in found.texts
    assert "a" not in {name for name, _ in found.attributes}
    assert found.chart(nasty)["series"][0]["points"] == [[1, 2.0]]


def test_the_page_of_a_killed_run_says_so(tmp_path: Path) -> None:
    log(tmp_path / "logs", [step(at, loss=1 / at) for at in range(1, 4)])
    assert "No end is recorded" in "".join(page(tmp_path).texts["p"])
    log(tmp_path / "logs", [step(1, loss=1.0), step(1, train_runtime=90.0, train_loss=1.0)])
    found = page(tmp_path / "logs")
    assert "The run ended." in "".join(found.texts["p"])
    assert found.texts["h1"] == [tmp_path.name]
    assert "1 min 30 s" in found.texts["b"]


def test_a_loss_that_was_not_finite_is_a_gap_and_is_reported(tmp_path: Path) -> None:
    log(tmp_path, [step(at, loss=None if at == 2 else 1.0 * at) for at in range(1, 5)])
    found = page(tmp_path)
    assert found.chart("loss")["series"][0]["points"] == [[1, 1.0], [2, None], [3, 3.0], [4, 4.0]]
    line = ElementTree.fromstring(found.svgs[0]).find("path")
    assert line is not None
    assert line.attrib["d"].count("M") == 2
    assert "Not finite at some steps: loss." in found.texts["p"]


def test_a_long_line_keeps_its_spikes(tmp_path: Path) -> None:
    log(tmp_path, [step(at, grad_norm=100.0 if at == 7777 else 1.0) for at in range(1, 20_001)])
    (series, _) = page(tmp_path).chart("grad_norm")["series"]
    assert len(series["points"]) <= 1200
    assert [7777, 100.0] in series["points"]
    assert [each for each, _ in series["points"]] == sorted({each for each, _ in series["points"]})


def test_a_long_loss_has_a_smooth_line_beside_it(tmp_path: Path) -> None:
    log(tmp_path, [step(at, loss=2.0) for at in range(1, 101)])
    names = [each["name"] for each in page(tmp_path).chart("loss")["series"]]
    assert names == ["loss", "loss, smoothed"]
    smoothed = page(tmp_path).chart("loss")["series"][1]["points"]
    assert all(value == pytest.approx(2.0) for _, value in smoothed)


def test_smoothing_is_centred_and_skips_gaps() -> None:
    straight: Points = {at: 5.0 - 0.01 * at for at in range(400)}
    assert smoothed(straight) == pytest.approx(straight)  # a mean of the past would lie above it
    noisy: Points = {at: 1.0 + (-1) ** at * 0.5 for at in range(400)}
    assert all(value == pytest.approx(1.0, abs=0.1) for value in smoothed(noisy).values())
    assert smoothed({**straight, 7: None})[7] is None
    assert smoothed({1: -1e308, 2: 1e308, 3: 1e308}).keys() == {1, 2, 3}


def test_the_best_evaluation_is_marked_in_chart_table_and_tile(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.5, 30: 1.5, 40: 2.0}
    log(tmp_path, [step(at, eval_loss=loss, eval_accuracy=1 / loss, eval_odd=loss) for at, loss in losses.items()])
    html = report(tmp_path).read_text()
    assert html.count('class="ring') == 2  # nobody knows what is better for eval_odd
    assert "best: 1.5 at step 20" in html
    assert html.count('<td class="best">1.5</td>') == 1
    assert "best eval_loss, at step 20" in html


def test_a_page_has_the_runs_arguments_versions_and_machine(tmp_path: Path) -> None:
    log(tmp_path, [step(1, loss=1.0)])
    info = {"arguments": {"seed": "<7>"}, "versions": {"torch": "2.13"}, "machine": {"host": "gpu-1"}}
    (tmp_path / "run_info.json").write_text(json.dumps(info))
    found = page(tmp_path)
    assert found.texts["summary"] == ["Arguments (1)", "Versions (1)", "Machine (1)"]
    assert {"<7>", "2.13", "gpu-1"} <= set(found.texts["td"])
    (tmp_path / "run_info.json").write_text('{"arguments": 3')
    assert any("run_info.json cannot be read" in each for each in page(tmp_path).texts["p"])


def test_several_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    for name, rate, steps in (("a", 0.1, 100), ("b", 0.2, 80)):
        log(tmp_path / name, [step(at, loss=1 / at, eval_loss=rate + 1 / at) for at in range(1, steps + 1)])
        (tmp_path / name / "run_info.json").write_text(json.dumps({"arguments": {"rate": str(rate), "seed": "1"}}))
    file = report(tmp_path / "a", tmp_path / "b")
    assert file == tmp_path / "a" / "comparison.html"
    found = Page(file.read_text())
    assert [line["name"] for line in found.chart("a")["series"]] == ["a", "a, smoothed", "b", "b, smoothed"]
    assert found.texts["h2"] == ["Runs", "Curves", "Differences"]
    assert [text for text in found.texts["td"] if text in ("rate", "0.1", "0.2", "seed")] == ["rate", "0.1", "0.2"]
    assert any("1 fact is the same" in each for each in found.texts["p"])


def test_runs_are_named_by_the_ends_of_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "run" / "logs", tmp_path / "y" / "run"]
    assert labels_of(paths) == ["x/run", "y/run"]
    assert labels_of([tmp_path, tmp_path]) == [f"{tmp_path.name} (1)", f"{tmp_path.name} (2)"]
    with pytest.raises(UsageError, match="9 runs are too many for one page"):
        report(*[tmp_path] * 9)


def test_many_ranks_are_shown_by_their_spread(tmp_path: Path) -> None:
    log(tmp_path, [step(at, loss=1.0, peak_mem_allocated=[rank * 2**30 for rank in range(64)]) for at in (1, 2)])
    found = page(tmp_path)
    series = found.chart("largest of 64 ranks")["series"]
    assert [each["points"][0][1] / 2**30 for each in series] == [63, 32, 0]
    assert "63 GiB" in found.texts["td"]


def test_a_model_of_many_parameters_says_which_are_shown(tmp_path: Path) -> None:
    log(tmp_path, [step(1, loss=1.0)])
    norms = {f"layer{at}": float(at + 1) for at in range(900)}
    log(tmp_path, [step(at, norms=norms) for at in range(1, 301)], "parameter_norms.json")
    found = page(tmp_path)
    (heat,) = (each for each in found.data if each["kind"] == "heat")
    assert (len(heat["names"]), len(heat["steps"]), heat["steps"][0], heat["steps"][-1]) == (400, 100, 1, 300)
    assert any("the first 400 of 900 parameters" in each for each in found.texts["p"])
    assert (tmp_path / "report.html").stat().st_size < 3e6


@pytest.mark.parametrize("values", [{}, {"loss": 0.0}, {"loss": -1e300}, {"loss": 1e-320}, {"loss": 12345678.9}])
def test_any_numbers_make_a_page(tmp_path: Path, values: dict[str, float]) -> None:
    log(tmp_path, [step(0, **values), step(0, **values)])
    page(tmp_path)
    log(tmp_path, [step(1, **values), step(10**9, **values, odd="text", flag=True, nothing=None)])
    page(tmp_path)


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    tmp_path.joinpath("trainer_logs.json").write_text(f'[\n{json.dumps(step(1, loss=1.0))},\n{{"global_st')
    found = page(tmp_path)
    assert found.chart("loss")["series"][0]["points"] == [[1, 1.0]]
    assert any(each.startswith("trainer_logs.json is damaged") for each in found.texts["p"])


def test_without_our_logs_the_history_of_huggingfaces_trainer_is_read(tmp_path: Path) -> None:
    history = [{"step": 5, "epoch": 0.5, "loss": 2.0}, {"step": 10, "epoch": 1.0, "eval_loss": 1.5}]
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    found = page(tmp_path)
    assert [each["name"] for each in found.chart("loss")["series"]] == ["loss", "eval_loss"]
    assert any("checkpoint-10" in each for each in found.texts["p"])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^run_dir=.*: has no trainer_logs.json"):
        report(tmp_path)
    with pytest.raises(UsageError, match="is not a folder; pass the folder of a run"):
        report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_to_the_given_path_and_nothing_else_is_left(tmp_path: Path) -> None:
    log(tmp_path / "run", [step(1, loss=1.0)])
    assert report(tmp_path / "run", to=tmp_path / "pages" / "a.html") == tmp_path / "pages" / "a.html"
    assert [each.name for each in (tmp_path / "pages").iterdir()] == ["a.html"]
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["trainer_logs.json"]


def test_the_command_writes_the_page_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from skyward.cli import main

    log(tmp_path, [step(1, loss=1.0)])
    assert main(["train", "report", str(tmp_path)]) == 0
    assert main(["train", "report", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "report.html"), str(tmp_path / "a.html")]
    log(tmp_path / "other", [step(1, loss=2.0)])
    assert main(["train", "report", str(tmp_path), str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'comparison.html'}\n"
    assert main(["train", "report", str(tmp_path / "nowhere")]) == 1
    assert "is not a folder; pass the folder of a run" in capsys.readouterr().err


def test_the_command_finds_a_listening_run_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    from skyward.cli import main
    from skyward.training.control.endpoint import Endpoint, announce, claim, withdraw

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log(tmp_path / "out", [step(1, loss=1.0)])
    claim("job-1")
    endpoint = Endpoint(
        job_id="job-1", host="127.0.0.1", port=1, pid=os.getpid(), started_at=0.0, logging_dir=str(tmp_path / "out")
    )
    announce(endpoint, None)
    try:
        assert main(["train", "report", "job-1"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'out' / 'report.html'}\n"
        assert main(["train", "report", "job-2"]) == 1
    finally:
        withdraw("job-1")

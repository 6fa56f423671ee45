"""The page without a browser: what is in it, how large it is, and who may ask for it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page_runs import HOSTILE, federation, tiny

from command_line import fedpews
from fedpews.experiment import Experiment
from fedpews.report.collect import CURVES, collect
from fedpews.report.html import HOST, as_script, serve, write_report
from fedpews.report.runs import find_runs
from fedpews.results.masks import Ownership
from fedpews.results.records import summarize
from fedpews.running import run
from fedpews.tasks.names import Goal


def document(page: Path) -> dict[str, Any]:
    script = re.search(r'<script type="application/json" id="document">(.*?)</script>', page.read_text())
    assert script is not None
    data: dict[str, Any] = json.loads(script[1])
    return data


def write_large(folder: Path, method: str, seeds: int, rounds: int, clients: int, neurons: int) -> None:
    """A run's folder as a large run would leave it."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    records = [
        {
            "seed": seed,
            "round": t,
            "phase": "warmup" if t <= 100 else "train",
            **{key: float(draw.random()) for key in CURVES},
            "client_accuracy": draw.random(clients).tolist(),
            "bytes_up": 10**6,
            "bytes_down": 10**6,
            "seconds": 0.5,
        }
        for t in range(1, rounds + 1)
        for seed in range(seeds)
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    owned = [
        Ownership.of(seed, t, range(clients), draw.random((clients, neurons)) < 0.5, [[3] * 32] * 4, clients)
        for t in range(1, 101)
        for seed in range(seeds)
    ]
    (folder / "neurons.jsonl").write_text("".join(json.dumps(each.record()) + "\n" for each in owned))
    layers = [{"name": f"hidden.{i}", "start": i * neurons // 4, "size": neurons // 4} for i in range(4)]
    about = {"clients": clients, "client_names": [], "class_names": [], "counts": [[10] * 10] * clients}
    (folder / "federation.json").write_text(json.dumps(about | {"layers": layers, "data": "x"}))
    experiment = Experiment(rounds=rounds, seeds=list(range(seeds)), method={"name": "fedavg"})
    (folder / "config.toml").write_text(experiment.to_toml())
    (folder / "summary.json").write_text(json.dumps(summarize(records, method, Goal(value=0.9))))


def test_six_runs_of_five_seeds_and_500_rounds_fit_in_two_megabytes(tmp_path: Path) -> None:
    for number in range(6):
        write_large(tmp_path / str(number), f"m{number}", seeds=5, rounds=500, clients=20, neurons=256)

    page = write_report([tmp_path], tmp_path / "report.html")

    assert page.stat().st_size < 2_000_000
    assert all(len(each["rounds"]) == 500 for each in document(page)["runs"])


def test_a_longer_run_is_thinned_and_that_is_said(tmp_path: Path) -> None:
    write_large(tmp_path / "a", "a", seeds=5, rounds=5000, clients=3, neurons=16)

    data = collect(find_runs([tmp_path]))

    rounds = data["runs"][0]["rounds"]
    assert (rounds[0], rounds[-1]) == (1, 5000)
    assert len(rounds) < 5000
    assert any(f"every {rounds[1] - rounds[0]}th round" in note for note in data["notes"])


def test_masks_that_are_too_many_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    write_large(tmp_path / "a", "a", seeds=3, rounds=100, clients=200, neurons=1024)

    page = write_report([tmp_path / "a"], tmp_path / "report.html")

    masks = document(page)["runs"][0]["masks"]
    assert page.stat().st_size < 2_000_000
    assert masks["note"].startswith(f"The page holds the masks of {len(masks['rounds'])} rounds of seed 0")
    assert masks["rounds"][-1]["round"] == 100


def test_curves_on_the_page_are_those_of_the_run(runs_folder: Path, tmp_path: Path) -> None:
    data = document(write_report([runs_folder], tmp_path / "report.html"))

    for shown, run_ in zip(data["runs"], find_runs([runs_folder]), strict=True):
        assert shown["summary"] == json.loads((runs_folder / shown["label"] / "summary.json").read_text())
        for index, rows in enumerate(run_.by_seed.values()):
            for key in ("accuracy", "loss", "update_cosine"):
                values = np.frombuffer(b64decode(shown["curves"][key][index]), "<f4")
                assert values == pytest.approx([record[key] for record in rows], rel=1e-6)


def test_the_page_asks_nobody_for_anything(runs_folder: Path, tmp_path: Path) -> None:
    text = write_report([runs_folder], tmp_path / "report.html").read_text()

    assert not re.search(r'(src|href)="(?!#)', text)
    assert "connect-src 'none'" in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",  # the name of a language
        "https://github.com/leeoniya/uPlot",  # in the comment that its licence asks to keep
    }


def test_names_cannot_leave_the_document(hostile_folder: Path, tmp_path: Path) -> None:
    page = write_report([hostile_folder], tmp_path / "report.html")

    text = page.read_text()
    assert HOSTILE not in text
    assert "<b id=bad>" not in text
    assert text.count("</script>") == 2
    assert document(page)["runs"][0]["clients"]["names"][0] == HOSTILE


def test_names_of_sites_cannot_leave_the_document(hostile_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hostile_folder, tmp_path / "run"))
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record["sites"] = {HOSTILE: {"accuracy": 0.5, "loss": 1.0, "samples": 10}}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report([folder], tmp_path / "report.html")
    assert HOSTILE not in page.read_text()
    assert page.read_text().count("</script>") == 2


def test_json_in_a_script_holds_no_markup() -> None:
    text = as_script({"a": "</script><!--&", "b": "\u2028"})

    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--&", "b": "\u2028"}


def test_what_is_vendored_is_what_its_checksums_say() -> None:
    folder = files("fedpews.report") / "page" / "vendor"

    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_server_without_the_clients_data_does_not_call_two_sites_too_many(tmp_path: Path) -> None:
    run(tiny(seeds=[0]), clients=federation(), out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    gone = ("client_accuracy",)
    kept = [{key: value for key, value in line.items() if key not in gone} for line in lines]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    # what vouches for the records of before
    (tmp_path / "SHA256SUMS").unlink()
    shutil.rmtree(tmp_path / "checkpoint")
    about = json.loads((tmp_path / "federation.json").read_text())
    (tmp_path / "federation.json").write_text(json.dumps(about | {"counts": None}))

    clients = collect(find_runs([tmp_path]))["runs"][0]["clients"]

    assert clients["missing"].startswith("The server does not have the clients' data here")


def test_a_run_of_an_older_version_still_has_its_page(runs_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(
        runs_folder / "fedavg+pews", tmp_path / "old", ignore=shutil.ignore_patterns("checkpoint")
    )
    for name in ("neurons.jsonl", "federation.json", "SHA256SUMS"):
        (tmp_path / "old" / name).unlink()

    data = collect(find_runs([tmp_path / "old"]))

    assert data["federations"] == []
    assert data["runs"][0]["clients"]["names"] == ["client 0", "client 1", "client 2"]


def test_a_run_of_several_methods_prints_the_path_of_its_one_page_last(tmp_path: Path) -> None:
    settings = ["--rounds", "2", "--seeds", "0", "--set", "train.steps=1", "--set", "runtime.engine=eager"]
    methods = ["--method", "fedavg", "--method", "fedavg+pews"]

    done = fedpews("run", "synthetic-3.2k", *methods, *settings, "--out", str(tmp_path / "both"))

    assert done.code == 0, done.stderr
    page = tmp_path / "both" / "report.html"
    assert done.stdout.splitlines()[-1] == f"look at {page}"
    assert [each["label"] for each in document(page)["runs"]] == ["fedavg", "fedavg+pews"]


def test_run_itself_draws_nothing(runs_folder: Path) -> None:
    assert not list(runs_folder.glob("**/*.html"))


@pytest.fixture
def watched(runs_folder: Path) -> Iterator[int]:
    server = serve([runs_folder])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    response = answer.status, answer.read(), answer.headers
    connection.close()
    return response


def test_a_watched_folder_has_two_addresses_and_no_other(watched: int) -> None:
    assert ask(watched, "/")[0] == 200
    assert ask(watched, "/data.json")[0] == 200
    assert ask(watched, "/favicon.ico")[:2] == (204, b"")  # asked for by browsers, and no error of the page's
    for path in (
        "/config.toml",
        "/../config.toml",
        "/fedavg/summary.json",
        "//etc/passwd",
        "/%2e%2e/x",
        "/?a=1",
    ):
        assert ask(watched, path)[0] == 404, path


def test_a_watched_folder_can_only_be_read(watched: int) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(watched, "/", method)[0] == 501


def test_a_page_of_another_site_cannot_ask_the_watcher(watched: int) -> None:
    assert ask(watched, "/data.json", Host="evil.example")[0] == 403


def test_what_has_not_changed_is_not_sent_again(watched: int) -> None:
    tag = ask(watched, "/data.json")[2]["ETag"]

    assert ask(watched, "/data.json", If_None_Match=tag)[:2] == (304, b"")


def test_before_the_first_round_the_watcher_waits(tmp_path: Path) -> None:
    server = serve([tmp_path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert b"No run has finished its first round yet" in ask(server.server_port, "/")[1]
        assert ask(server.server_port, "/data.json")[0] == 204
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_in_use_is_said_and_exit_2(watched: int, runs_folder: Path) -> None:
    done = fedpews("watch", str(runs_folder), "--port", str(watched))

    assert done.code == 2
    assert "--port 0" in done.stderr


def test_every_client_is_shown_by_the_metric_that_counts_on_its_own_test_samples(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def site(samples: int) -> dict[str, Any]:
        x = torch.randn(samples + 4, 3, generator=generator)
        return {"train": (x[4:], x[4:].sum(1)), "test": (x[:4], x[:4].sum(1))}

    result = run(clients=[site(12), site(9)], task="regression", method="fedavg", rounds=3, out=tmp_path)
    shown = collect(find_runs([tmp_path]))
    clients = shown["runs"][0]["clients"]
    metric = shown["key"]
    assert metric == "mae"
    assert not shown["higher"]
    assert clients["own"]
    assert clients["final"] == pytest.approx(result.rounds[-1]["client_metrics"][metric])
    for number, packed in enumerate(clients["values"]):
        values = [record["client_metrics"][metric][number] for record in result.rounds]
        assert np.frombuffer(b64decode(packed), "<f4") == pytest.approx(values, rel=1e-4)

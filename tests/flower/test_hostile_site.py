"""A site that was approved and turns hostile: what it claims, sends and repeats is bounded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from memory_grid import Handler, MemoryGrid, site_handler
from test_engine import experiment, journal, outcomes, write

from fedpews import server
from fedpews.build import schedule
from fedpews.engines.eager import batch_sizes
from fedpews.errors import RunFailed
from fedpews.flower.app import serve
from fedpews.flower.deploy.keys import fingerprint, make_site_key
from fedpews.flower.logs import without_traceback
from fedpews.flower.messages import MOST_BYTES, pack, read_request, reply_content
from fedpews.flower.roster import KnownSite, KnownSites, TooFewSites
from fedpews.flower.site import Site
from fedpews.methods.contract import Upload
from fedpews.methods.wire import decode_download, decode_upload, encode_upload
from fedpews.results.records import read_rounds

CLAIM = 10**9
HOSTILE = 2
NOTHING = {"partition": None, "train_per_class": None, "test_per_class": None}
LOADER = """import torch
def load():
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed({site}))
    y = torch.arange(20) % 4
    return [(x, y)], (x[:10], y[:10])
"""


@dataclass
class Scene:
    """Three sites with 20 samples and 10 test samples each; the server has none."""

    config: Path
    honest: dict[int, Handler]
    site: Site  # the hostile one, to make what it sends

    def forge(self, message: Message, reply: Message, change: Callable[[Upload], Upload]) -> Message:
        """The reply with its upload changed."""
        (sent,) = read_request(message.content).downloads
        upload = decode_upload(self.site.net, reply.content["seed-0"]["payload"].data)
        content = RecordDict(dict(reply.content.items()))
        content["seed-0"] = pack(encode_upload(self.site.net, change(upload)))
        assert decode_download(self.site.net, sent.data).round == upload.round
        return Message(content, reply_to=message)

    def multiplied(self, message: Message, factor: float) -> Callable[[Upload], Upload]:
        (sent,) = read_request(message.content).downloads
        old = decode_download(self.site.net, sent.data).params
        return lambda upload: replace(
            upload, params={name: old[name] + factor * (v - old[name]) for name, v in upload.params.items()}
        )

    def claiming(self, samples: int, factor: float = 1.0) -> Handler:
        """A site that declares other samples than it has, and multiplies its change."""
        steps = len(batch_sizes(samples, schedule(self.site.experiment), self.site.net.least_batch))

        def handle(message: Message) -> Message | None:
            reply = self.honest[HOSTILE](message)
            assert reply is not None
            if message.metadata.message_type == MessageType.QUERY and "hello" in reply.content:
                facts = dict(reply.content["hello"]) | {"samples": samples}
                return Message(RecordDict({"hello": ConfigRecord(facts)}), reply_to=message)
            if message.metadata.message_type == MessageType.TRAIN:
                larger = self.multiplied(message, factor)
                return self.forge(
                    message, reply, lambda upload: replace(larger(upload), samples=samples, steps=steps)
                )
            return reply

        return handle


def scene(tmp_path: Path, method: str = "fedavg", rounds: int = 2, **changes: Any) -> Scene:
    flower = {"input_shape": [5], "classes": 4, **changes.pop("flower", {})}
    made = experiment(
        data={"name": "sites", "clients": 3, **NOTHING},
        method={"name": method},
        rounds=rounds,
        flower=flower,
        **changes,
    )
    config = write(tmp_path / "experiment.toml", made)
    settings = {}
    for site in range(3):
        (tmp_path / f"clinic{site}.py").write_text(LOADER.format(site=site))
        settings[site] = {"data": f"{tmp_path}/clinic{site}.py:load"}
    honest = {site: site_handler(config, tmp_path / "state", site, **settings[site]) for site in range(3)}
    own = {"site": HOSTILE, "state-dir": str(tmp_path / "spare"), **settings[HOSTILE]}
    return Scene(config, honest, Site(config, own))


def why(folder: Path, line: int, site: int = HOSTILE) -> str:
    return str(journal(folder)[line]["sites"][str(site)]["why"])


def test_a_forged_sample_count_buys_no_larger_change(tmp_path: Path, grid: MemoryGrid) -> None:
    """10⁹ claimed samples once explained a change of −200,000 times an honest one."""
    made = scene(tmp_path)
    grid.nodes = made.honest | {HOSTILE: made.claiming(CLAIM, factor=-200_000)}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert outcomes(tmp_path / "run") == [{"0": "accepted", "1": "accepted", "2": "refused"}] * 2
    assert "times the round's median" in why(tmp_path / "run", 0)


def test_claimed_samples_weigh_at_most_ten_times_the_median_of_the_others(
    tmp_path: Path, grid: MemoryGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[list[int]] = []
    average_of = server.average_of

    def record(net: Any, uploads: Any, weighting: str) -> Any:
        weighed.append([upload.samples for upload in uploads])
        return average_of(net, uploads, weighting)

    monkeypatch.setattr(server, "average_of", record)
    made = scene(tmp_path, rounds=1, train={"weighting": "samples"})
    grid.nodes = made.honest | {HOSTILE: made.claiming(CLAIM)}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert weighed == [[20, 20, 200]]
    said = (tmp_path / "run" / "sites.log").read_text()
    assert f"site-2 declares {CLAIM} samples and counts as 200, 10 times the median of the others" in said


def test_the_roster_says_how_many_samples_a_site_may_declare(tmp_path: Path, grid: MemoryGrid) -> None:
    made = scene(tmp_path, rounds=1)
    keys = [make_site_key(tmp_path / "keys", site)[1].read_bytes() for site in range(3)]
    sites = [KnownSite(site, f"clinic-{site}", fingerprint(key), 20) for site, key in enumerate(keys)]
    KnownSites(tuple(sites)).write(tmp_path / "roster.toml")
    assert KnownSites.read(tmp_path / "roster.toml").sites == tuple(sites)
    grid.nodes, grid.keys = made.honest | {HOSTILE: made.claiming(21)}, dict(enumerate(keys))
    serve(made.config, grid, {"out": str(tmp_path / "run"), "roster": str(tmp_path / "roster.toml")})
    assert outcomes(tmp_path / "run") == [{"0": "accepted", "1": "accepted", "2": "absent"}]
    assert "it declares 21 samples, and the roster has 20 for clinic-2" in why(tmp_path / "run", 0)


def test_where_the_server_has_the_data_a_site_can_claim_no_other_number(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    config = write(tmp_path / "experiment.toml", experiment(rounds=1, flower={"min_sites": 1}))
    honest = site_handler(config, tmp_path / "state", 1)

    def claims(message: Message) -> Message | None:
        reply = honest(message)
        if reply is not None and "hello" in reply.content:
            facts = dict(reply.content["hello"]) | {"samples": CLAIM}
            return Message(RecordDict({"hello": ConfigRecord(facts)}), reply_to=message)
        return reply

    grid.nodes = {0: site_handler(config, tmp_path / "state", 0), 1: claims}
    serve(config, grid, {"out": str(tmp_path / "run")})
    assert "and the server knows that it has 60" in why(tmp_path / "run", 0, 1)


def test_claimed_test_samples_weigh_at_most_ten_times_the_median_of_the_others(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    made = scene(tmp_path, rounds=1)

    def claims(message: Message) -> Message | None:
        reply = made.honest[HOSTILE](message)
        if reply is not None and "hello" in reply.content:
            facts = dict(reply.content["hello"]) | {"test_samples": CLAIM}
            return Message(RecordDict({"hello": ConfigRecord(facts)}), reply_to=message)
        if message.metadata.message_type == MessageType.EVALUATE:
            wrong = {"loss": 0.0, "weight": CLAIM, "correct": [0], "seen": [CLAIM]}
            sums = {name: torch.as_tensor(value) for name, value in wrong.items()}
            return Message(reply_content({}, {"test": {0: sums}}), reply_to=message)
        return reply

    grid.nodes = made.honest | {HOSTILE: claims}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    (record,) = read_rounds(tmp_path / "run")
    others = [record["sites"][f"site-{site}"]["accuracy"] for site in (0, 1)]
    # 10 samples each, and 10 times as many of the third, all wrong
    assert record["accuracy"] == pytest.approx(10 * sum(others) / 120)


def poisoned(made: Scene, number: int) -> Handler:
    """A site whose change of one round is 10¹³ times too large."""

    def handle(message: Message) -> Message | None:
        reply = made.honest[HOSTILE](message)
        is_train = message.metadata.message_type == MessageType.TRAIN
        if reply is None or not is_train or read_request(message.content).round != number:
            return reply
        return made.forge(message, reply, made.multiplied(message, 1e13))

    return handle


@pytest.mark.parametrize("every", [1, 4])
def test_the_poisoned_round_is_named_and_one_command_goes_on_before_it_without_the_site(
    every: int, tmp_path: Path, grid: MemoryGrid
) -> None:
    """The sites cannot evaluate its model, or diverge in the round after it; the checkpoint before it is used."""
    limits = {"norm_multiple": "inf", "attempts": 1, "max_failures": 0}
    made = scene(tmp_path, rounds=4, flower=limits, runtime={"evaluate_every": every})
    grid.nodes = made.honest | {HOSTILE: poisoned(made, 2)}
    out = str(tmp_path / "run")
    with pytest.raises(
        TooFewSites, match=r"made in round 2, where the upload of site-2 was .*e\+1\d times"
    ) as failure:
        serve(made.config, grid, {"out": out})
    assert "--resume --before 2 --without site-2" in str(failure.value)
    again = MemoryGrid()
    again.nodes = grid.nodes
    serve(made.config, again, {"out": out, "resume": True, "before": 2, "without": "site-2"})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1, 2, 3, 4]
    assert outcomes(tmp_path / "run")[-3:] == [{"0": "accepted", "1": "accepted"}] * 3
    assert all(record["loss"] < 10 for record in read_rounds(tmp_path / "run") if "loss" in record)


def test_a_run_that_fails_in_one_line_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr.test")
    logger.addFilter(without_traceback)
    for error in (RunFailed("too few sites"), ZeroDivisionError("a fault")):
        try:
            raise error
        except (RunFailed, ZeroDivisionError):
            logger.error("ServerApp raised an exception", exc_info=sys.exc_info())
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]


def padded(handler: Handler, kind: str, size: int) -> Handler:
    """A site that adds so many bytes to its replies of a kind."""

    def handle(message: Message) -> Message | None:
        reply = handler(message)
        if reply is None or message.metadata.message_type != kind:
            return reply
        content = RecordDict(dict(reply.content.items()))
        content["more"] = ConfigRecord({"more": b"0" * size})
        return Message(content, reply_to=message)

    return handle


@pytest.mark.parametrize(
    ("kind", "size", "method", "said"),
    [
        ("query", MOST_BYTES["hello"], "fedavg", "does not say which site it is: its answer has"),
        ("evaluate", 200_000, "fedavg", "site-2 did not evaluate: its answer has"),
        (
            "evaluate.personal",
            MOST_BYTES["personal"],
            "fedper",
            "site 2 did not evaluate its own model: its answer",
        ),
        ("train", 200_000, "fedavg", "2 failed: its answer has"),
    ],
)
def test_no_reply_of_any_kind_is_larger_than_an_honest_one(
    kind: str, size: int, method: str, said: str, tmp_path: Path, grid: MemoryGrid
) -> None:
    made = scene(tmp_path, method, rounds=1)
    grid.nodes = made.honest | {HOSTILE: padded(made.honest[HOSTILE], kind, size)}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert said in (tmp_path / "run" / "sites.log").read_text()


def test_a_site_that_answers_the_final_model_with_a_flood_is_not_said_to_have_it(
    tmp_path: Path, grid: MemoryGrid, caplog: pytest.LogCaptureFixture
) -> None:
    made = scene(tmp_path, rounds=1)
    grid.nodes = made.honest | {HOSTILE: padded(made.honest[HOSTILE], "query.final", MOST_BYTES["final"])}
    with caplog.at_level(logging.INFO, "flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert "the final model is at site-0, site-1" in caplog.messages


@pytest.mark.parametrize("value", [1e300, -0.5, 1.5])
def test_a_personal_accuracy_is_between_0_and_1(value: float, tmp_path: Path, grid: MemoryGrid) -> None:
    made = scene(tmp_path, "fedper", rounds=1)

    def lies(message: Message) -> Message | None:
        if message.metadata.message_type == "evaluate.personal":
            return Message(RecordDict({"personal": ConfigRecord({"value": value})}), reply_to=message)
        return made.honest[HOSTILE](message)

    grid.nodes = made.honest | {HOSTILE: lies}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert f"{value!r} is no accuracy" in (tmp_path / "run" / "sites.log").read_text()


@pytest.mark.parametrize("owned", [True, False])
def test_a_mask_that_owns_everything_or_nothing_leaves_a_finite_model(
    owned: bool, tmp_path: Path, grid: MemoryGrid
) -> None:
    made = scene(tmp_path, "fedavg+pews", warmup={"rounds": 2})

    def handle(message: Message) -> Message | None:
        reply = made.honest[HOSTILE](message)
        if reply is None or message.metadata.message_type != MessageType.TRAIN:
            return reply

        def claim(upload: Upload) -> Upload:
            assert upload.neurons is not None
            return replace(upload, neurons=torch.full_like(upload.neurons, owned))

        return made.forge(message, reply, claim)

    grid.nodes = made.honest | {HOSTILE: handle}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert [record["round"] for record in read_rounds(tmp_path / "run")] == [1, 2]
    assert outcomes(tmp_path / "run")[0]["2"] in ("accepted", "refused")
    assert all(record["loss"] < 10 for record in read_rounds(tmp_path / "run") if "loss" in record)


def test_an_upload_of_an_earlier_round_is_refused_when_it_is_sent_again(
    tmp_path: Path, grid: MemoryGrid
) -> None:
    made = scene(tmp_path)
    first: list[ArrayRecord] = []

    def replays(message: Message) -> Message | None:
        reply = made.honest[HOSTILE](message)
        if reply is None or message.metadata.message_type != MessageType.TRAIN:
            return reply
        first.append(reply.content["seed-0"])
        content = RecordDict(dict(reply.content.items()))
        content["seed-0"] = first[0]
        return Message(content, reply_to=message)

    grid.nodes = made.honest | {HOSTILE: replays}
    serve(made.config, grid, {"out": str(tmp_path / "run")})
    assert [line["2"] for line in outcomes(tmp_path / "run")] == ["accepted", "refused"]
    assert "it is of round 1, not 2" in why(tmp_path / "run", 1)

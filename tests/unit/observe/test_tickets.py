"""Reading the journal of tickets: its columns, and the index beside it, say what plain JSON says line by line."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.data import Ledger, Ticket
from paceline.observe.monitor import RunRecorder
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record import tickets
from paceline.observe.record.tickets import Tickets
from paceline.observe.web.overview import FolderWatcher, RunWatcher, run_state
from paceline.observe.web.runs import Runs
from paceline.runtime import session
from recorded_runs import Told

DAMAGED = [b"garbage", b"", b"[]", b'{"number": 1.5}', b'{"number": 1} {"number": 2}', b'{"number": 3, "env": "\xff"}']


class Plain:
    """The slow way: every whole line on its own."""

    def __init__(self, data: bytes) -> None:
        self.lines: list[dict] = []
        self.damaged: list[int] = []
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                told = json.loads(line)
                assert isinstance(told["number"], int)
                self.lines.append(told)
            except (ValueError, TypeError, AssertionError):
                self.damaged.append(number)

    def find(self, **wanted: str) -> list[dict]:
        last = {line["number"]: line for line in self.lines}
        newest = [last[number] for number in sorted(last, reverse=True)]
        return [line for line in newest if all(line.get(key) == value for key, value in wanted.items())]

    def agrees(self, tickets: Tickets) -> None:
        for wanted in ({}, {"state": "dropped"}, {"state": "dropped", "reason": "stale"}, {"env": "nobody's"}):
            rows = self.find(**wanted)
            assert tickets.find(**wanted, limit=None).rows == rows
            assert tickets.find(**wanted, offset=1, limit=2).rows == rows[1:3]
            assert tickets.find(**wanted, limit=0).total == len(rows)
        for number in {line["number"] for line in self.lines}:
            assert tickets.history(number) == [line for line in self.lines if line["number"] == number]
        assert tickets.states() == Counter(line["state"] for line in self.find())
        dropped = {reason: sum(many for _, many in steps) for reason, steps in tickets.dropped().items()}
        assert dropped == Counter(line.get("reason", "") for line in self.lines if line["state"] == "dropped")
        told = tickets.problems()
        assert len(told) == bool(self.damaged)
        if self.damaged:
            many = f"{len(self.damaged)} lines are" if len(self.damaged) > 1 else "a line is"
            assert told == [f"tickets.jsonl: {many} no ticket's and left out, the first is line {self.damaged[0]}"]


def opened(folder: Path, worth: int = 1) -> Tickets:
    return Tickets(RunDirectory(folder), worth)


def index(folder: Path) -> Path:
    return folder / ".tickets.index"


def journal(seed: int, tickets: int = 12) -> bytes:
    """What a ledger writes of so many tickets."""
    records: list[dict] = []
    ledger = Ledger(records.append)
    for number in range(tickets):
        ticket = Ticket(number, ("words", "sums")[(number + seed) % 2], 0, number, number * 7 % 5)
        ledger.draw(ticket)
        ledger.start()
        if (number + seed) % 3 == 0:
            ledger.drop(ticket, ("stale", "zero_advantage")[number % 2])
        elif number < tickets - 2:
            ledger.buffer(ticket)
            ledger.train(ticket, number // 2 + 1, 4)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_the_journal_of_a_real_run_reads_as_plain_json_does(tmp_path):
    config = RunConfig(
        runs=str(tmp_path),
        steps=3,
        batch_size=8,
        group_size=4,
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=0),
    )
    folder = session.train(config).directory
    plain = Plain((folder / "tickets.jsonl").read_bytes())
    assert {"in flight", "buffered", "trained"} <= {line["state"] for line in plain.lines}
    for reader in (opened(folder), opened(folder)):  # the second begins where the first stopped
        plain.agrees(reader)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 5),
    spoilt=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(DAMAGED)), max_size=4),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
    worth=st.sampled_from([1, 5, 1000]),
)
def test_however_the_journal_grows_and_whatever_is_damaged_its_answers_are_those_of_plain_json(
    tmp_path_factory, seed, spoilt, cuts, worth
):
    folder = tmp_path_factory.mktemp("grows")
    lines = journal(seed).splitlines()
    for place, line in spoilt:
        lines.insert(min(place, len(lines)), line)
    data = b"\n".join(lines) + b"\n"
    reader = opened(folder, worth)
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    for start, end in itertools.pairwise(places):  # cut anywhere: half a line is not there yet
        with (folder / "tickets.jsonl").open("ab") as file:
            file.write(data[start:end])
        Plain(data[:end]).agrees(reader)
        Plain(data[:end]).agrees(opened(folder, worth))


def test_what_was_read_is_not_read_again_nor_in_a_copy(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "tickets.jsonl").write_bytes(journal(0))
    opened(here).find()
    shutil.copytree(here, there)
    last = b'{"number": 99, "env": "", "epoch": 0, "draw": 0, "row": 0, "state": "in flight"}\n'
    parsed, read = tickets.parse_lines, []
    monkeypatch.setattr(tickets, "parse_lines", lambda data, names: read.append(data) or parsed(data, names))
    for folder in (here, there):
        with (folder / "tickets.jsonl").open("ab") as file:
            file.write(last)
        Plain(journal(0) + last).agrees(opened(folder))
    assert read == [last, last]


def test_few_lines_leave_nothing_beside_them(tmp_path):
    (tmp_path / "tickets.jsonl").write_bytes(journal(0))
    opened(tmp_path, worth=1000).find()
    assert not index(tmp_path).exists()


def cut_short(folder: Path) -> None:
    index(folder).write_bytes(index(folder).read_bytes()[:-1])


def garbled(folder: Path) -> None:
    index(folder).write_bytes(b"\x00" * 300 + b"\n")


def names_gone(folder: Path) -> None:
    head, _, lines = index(folder).read_bytes().partition(b"\n")
    told = json.loads(head) | {"names": [""]}
    index(folder).write_bytes(json.dumps(told).encode() + b"\n" + lines)


def of_another_file(folder: Path) -> None:
    """It only ends as the first did."""
    old = (folder / "tickets.jsonl").read_bytes()
    (folder / "tickets.jsonl").write_bytes(old.replace(b"words", b"chess", 1))


def rewritten(folder: Path) -> None:
    (folder / "tickets.jsonl").write_bytes(journal(1, 80))


def shorter(folder: Path) -> None:
    data = (folder / "tickets.jsonl").read_bytes()
    (folder / "tickets.jsonl").write_bytes(data[: len(data) // 2])


def gone(folder: Path) -> None:
    (folder / "tickets.jsonl").write_bytes(b"")


@pytest.mark.parametrize("harm", [cut_short, garbled, names_gone, of_another_file, rewritten, shorter, gone])
def test_an_index_that_is_damaged_or_another_files_is_not_believed(tmp_path, harm):
    (tmp_path / "tickets.jsonl").write_bytes(journal(0, 60))
    opened(tmp_path).find()
    assert index(tmp_path).exists()
    harm(tmp_path)
    Plain((tmp_path / "tickets.jsonl").read_bytes()).agrees(opened(tmp_path))


def test_a_run_that_goes_back_is_read_anew_by_old_and_new_readers(tmp_path):
    records = [json.loads(line) | {"since": place // 5} for place, line in enumerate(journal(0).splitlines())]
    recorder = RunRecorder(tmp_path)
    recorder.tickets(records)
    old = opened(tmp_path)
    old.find()
    recorder.roll_back(3)
    plain = Plain((tmp_path / "tickets.jsonl").read_bytes())
    assert 0 < len(plain.lines) < len(records)
    for reader in (old, opened(tmp_path)):
        plain.agrees(reader)


def test_where_nothing_can_be_written_answers_are_the_same(tmp_path):
    (tmp_path / "tickets.jsonl").write_bytes(journal(0))
    index(tmp_path).mkdir()  # a path that no file can take, for any user
    reader = opened(tmp_path)
    for _ in range(2):
        Plain(journal(0)).agrees(reader)
    assert list(index(tmp_path).iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"tickets.jsonl", ".tickets.index"}


def test_a_line_longer_than_a_block_is_read_once_it_is_whole(tmp_path):
    long = json.dumps({"number": 50, "state": "dropped", "reason": "x" * (3 << 20)}).encode()
    (tmp_path / "tickets.jsonl").write_bytes(journal(0) + long)
    reader = opened(tmp_path)
    Plain(journal(0)).agrees(reader)
    with (tmp_path / "tickets.jsonl").open("ab") as file:
        file.write(b"\n" + b'{"number": 51, "state": "in flight"}\n')
    assert [row["number"] for row in reader.find(limit=2).rows] == [51, 50]
    assert len(reader.history(50)[0]["reason"]) == 3 << 20
    shutil.rmtree(tmp_path)
    assert reader.find().total == 0


def test_a_page_does_not_wait_for_a_long_journal_and_hears_later_what_it_says(tmp_path):
    Told(tmp_path, "long").step(1).end()
    few = journal(0, 60)
    (tmp_path / "long" / "tickets.jsonl").write_bytes(b"garbage\n" + few * (5_000_000 // len(few)))
    runs = Runs(tmp_path)
    run = runs.open("long")
    assert run_state(run, patient=False)["problems"] == runs.table(patient=False)["long"]["problems"] == []
    news = RunWatcher(run, "")
    heard = [told["problems"] for _ in range(3) for name, told, _ in news.poll() if name == "standing"]
    assert heard[0] == []
    ((problem,),) = heard[1:]
    assert problem.endswith("the first is line 1")
    assert run_state(run, patient=False)["problems"] == [problem]
    assert runs.table(patient=True)["long"]["problems"] == [problem]


def test_the_table_of_runs_hears_of_one_journal_after_the_other(tmp_path):
    for name in "abc":
        Told(tmp_path, name).step(1).end()
        (tmp_path / name / "tickets.jsonl").write_bytes(b"garbage\n" + journal(0))
    news = FolderWatcher(Runs(tmp_path))
    looks = [list(news.poll()) for _ in range(5)]
    changed = [
        [told["name"] for _, found, _ in look for told in found["changed"] if told["problems"]] for look in looks
    ]
    assert [len(names) for names in changed] == [0, 1, 1, 1, 0]
    assert {name for names in changed for name in names} == set("abc")


def test_a_short_journal_is_read_at_once(tmp_path):
    Told(tmp_path, "short").step(1).end()
    (tmp_path / "short" / "tickets.jsonl").write_bytes(b"garbage\n" + journal(0))
    assert len(run_state(Runs(tmp_path).open("short"), patient=False)["problems"]) == 1

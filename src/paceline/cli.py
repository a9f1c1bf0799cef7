"""The commands, thin: each reads its arguments and calls one function."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline import __version__
from paceline.config import Loaded, dump, load, schema
from paceline.errors import PacelineError
from paceline.parent import end_with_parent

OVERRIDES = """
any key of the run file can be set on the command line, by its dotted path:
  --staleness 2   --trainer.optimizer.lr 1e-4   --env.0.group_size 4   --deterministic
`paceline check FILE` prints every key with its value.
"""

SERVING = """
examples:
  paceline serve paceline:quickstart                       the tiny model of the package, at http://127.0.0.1:8000/v1
  paceline serve ./my-model --name mine --port 9000        a Hugging Face folder, under a name of your choice
  paceline serve runs/quickstart/config.toml --engine.max_running 64
  paceline serve ./my-model --host 0.0.0.0 --api-key KEY   for other machines; the key may stand in PACELINE_API_KEY
  paceline serve ./my-model --allow runs                   POST /weights/load may read below runs/

then any OpenAI client works:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "reverse: paceline"}]}'

the model and engine sections of a run file can be set by their dotted path:
  --model.dtype bfloat16   --engine.max_context 4096   --deterministic
"""

CHECK = (
    """
Prints the run file with every key (standard output), then a plan of memory and time (standard error). Loads no weights.

examples:
  paceline check my-run.toml                               does it fit this machine, and who waits for whom?
  paceline check my-run.toml --hardware h200x8             the same for eight H200
  paceline check my-run.toml --hardware a100-80x2 --reply-tokens 2000 --json
  paceline check runs/quickstart                           what was planned, beside what was measured
"""
    + OVERRIDES
)

CLUSTER = """
on the first machine, then on each further one:
  paceline up
  paceline up --join HOST:6379                             the address that `up` printed

then, on any of them:
  paceline train my-run.toml --placement ray --cluster.address HOST:6379 --cluster.engines 6
  paceline status                                          machines, runs, engines and their versions

All machines must see the run directory and the model under the same path, and have the same versions installed. Where
Ray asks for a token (it says so), copy ~/.ray/auth_token of the first machine to the others.
"""

ROLLOUTS = (
    """
examples:
  paceline rollout reverse-text -n 4                       a built-in environment, played by the tiny model
  paceline rollout my-run.toml --env tools --split eval    an environment of a run file, on held-out rows
  paceline rollout gsm8k --dataset gsm8k/train.jsonl --endpoint http://127.0.0.1:8000/v1
  paceline rollout my-run.toml --row 3 -n 8                one row, as a group would play it
"""
    + OVERRIDES
)

PLAY = (
    """
You hear what the policy would hear in your seat and type what it would say; it plays all other seats. An environment
with one seat is yours alone: so one learns what the policy sees. Lines may be piped in, too.

examples:
  paceline play examples/arenas/kuhn_poker.toml            against the tiny model, from the first seat
  paceline play my-run.toml --seat o --model runs/my-run/export          against what a run has made of it
  paceline play my-run.toml --model runs/my-run/checkpoints/latest       or against a checkpoint of this run file
  paceline play my-run.toml --url http://127.0.0.1:8000/v1               or whatever any endpoint serves
  paceline play reverse-text --split eval --games 10       a built-in environment, alone

a line that ends in \\ goes on in the next; Ctrl-D or Ctrl-C ends the game and shows the score.
"""
    + OVERRIDES
)

REPLAY = (
    """
The samples of a step are read from the record, or from batches/ where `record.batches` says how many are kept there.
Replaying takes the weights of the newest checkpoint from before the step; with `checkpoint.every = 1` these are the
very weights it began with.

examples:
  paceline replay runs/quickstart 40                       every component of the loss, recorded and replayed
  paceline replay runs/quickstart 40 --trainer.loss.type ppo     what another loss would have said
  paceline replay runs/quickstart 40 --json                the same, and what each token contributes
  paceline replay runs/quickstart --dump 12                a batch whose step was left out, sample by sample
"""
    + OVERRIDES
)

DOCTOR = """
Reads the run directory alone, so it works beside a living run and after one was killed: does it live, when did
something last move, who waits for whom since when and at which line, the last events, the newest whole checkpoint and
the command that goes on from it.

examples:
  paceline doctor runs/quickstart                          how is it?
  watch -n 2 paceline doctor runs/quickstart               and again every two seconds
  paceline doctor runs/quickstart > report.txt             plain text, to send to somebody
"""

WATCHING = """
Looks at the run directory each second, so it works beside a living run, over ssh, and after one was killed. Keys: q
leaves, j and k go from run to run, t changes the theme, ? explains. Into a pipe it prints one plain picture.

examples:
  paceline top runs/quickstart                             one run
  paceline top runs                                        all runs of a folder, the newest first
  paceline top runs/quickstart | mail -s "how it is" me    one picture, as text
"""

REPORTING = """
Writes one HTML file that needs nothing else: no network, no script. It holds what the run directory tells: how it went,
the curves, what the run file changed, what speaks against it, and a few rollouts as conversations. Whoever gets the
file can read these conversations and settings.

examples:
  paceline report runs/quickstart                          quickstart-report.html, here
  paceline report runs/quickstart -o /tmp/for-anna.html --rollouts 5
  paceline report runs/quickstart --rollouts 0             no conversations
"""

SHOWING = """
Shows runs in a browser, live and after they ended or died; reads nothing but their directories. Opens no browser: it
prints the address. Other machines may look only where a key is set.

examples:
  paceline ui                                              the folder `runs`, at http://127.0.0.1:8200/
  paceline ui runs/quickstart --port 0                     one run, at a free port
  PACELINE_UI_KEY=KEY paceline ui --host 0.0.0.0           for other machines; the page asks for the key
"""

DIFFERING = """
Walks through both runs in the order in which one thing leads to the next and stops where they part: a setting, a row of
the data, a prompt, weights, a sampled token, a reward, credit, the loss, the gradient. Times are not compared. Exits
with 1 if there is a difference. Runs that are to be the same need `deterministic = true` and `staleness = 0`.

examples:
  paceline diff runs/a runs/b                              on one machine: equal to the last bit, or not
  paceline diff runs/cpu runs/gpu --tolerance 1e-3         on two: leave rounding out
"""

COMPARING = """
Trains two adapters on one engine, over the same draws with the same noise, and says when their difference is real:
however often one looks, equals are told apart in at most one of twenty comparisons. Both leave a run directory, NAME-a
and NAME-b; `paceline ui` shows them side by side. What is compared is the reward of the training draws, for this seed.

examples:
  paceline ab examples/quickstart.toml --model.lora.rank 8 --b.env.0.algo.type max_rl
  paceline ab my-run.toml --a.trainer.optimizer.lr 1e-5 --b.trainer.optimizer.lr 3e-5 --until-real
  paceline ab my-run.toml --b.env.0.kwargs.length_penalty 0.1        another reward

keys behind --a. or --b. are one arm's alone; any other is set for both:
  --steps 200   --b.trainer.loss.type cispo
"""

DATA = """
examples:
  paceline data rows.jsonl                                 the first rows, as the model will see them
  paceline data train.parquet --field question=prompt --field gt_answer=answer --model ./my-model
  paceline data demonstrations.jsonl --demonstrations      what would be trained, in green
"""

EXAMPLES = """
examples:
  paceline train examples/quickstart.toml                  train the quickstart, about half a minute on a laptop
  paceline train examples/quickstart.toml --staleness 0    the same, sampling and training in turn
  paceline train runs/quickstart/config.toml --resume latest --steps 80
  paceline check my-run.toml                               is it valid, does it fit, how long is a step?
  paceline rollout reverse-text -n 4                       look at episodes before training
  paceline play examples/arenas/kuhn_poker.toml            take a seat yourself, against the policy
  paceline league runs/tic-tac-toe                         who beats whom among the versions of a self-play run
  paceline data rows.jsonl                                 look at rows as the model will see them
  paceline replay runs/quickstart 40                       a recorded batch's loss once more, component by component
  paceline doctor runs/quickstart                          does it live, who waits for whom, how to go on
  paceline top runs/quickstart                             watch it in a terminal
  paceline report runs/quickstart                          one HTML file to send to a colleague
  paceline ui                                              look at all runs in a browser, live
  paceline diff runs/a runs/b                              the first thing in which two runs differ
  paceline ab my-run.toml --b.env.0.algo.type max_rl       which of two ways is better, and is it sure?
  paceline serve paceline:quickstart                       a model behind the OpenAI API
  paceline schema > paceline.schema.json                   completion and help in your editor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The `paceline` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command not in ("train", "ab", "check", "serve", "rollout", "play", "replay"):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return known.run(known, rest)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "peft"):
            raise
        print("paceline: this computes with torch, which is not here: pip install 'paceline[torch]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Reinforcement learning for language models, on a laptop as on a cluster.",
        epilog=EXAMPLES,
        formatter_class=plain,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str, epilog: str = "") -> argparse.ArgumentParser:  # noqa: ANN001
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=plain, allow_abbrev=False
        )
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "Train a policy as the run file says.", OVERRIDES)
    train.add_argument("file", help="run file (TOML)")
    train.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    train.add_argument("--quiet", action="store_true", help="show nothing but the summary")
    ab = command("ab", _ab, "Train two ways side by side, and say when their difference is real.", COMPARING)
    ab.add_argument("file", help="run file (TOML)")
    ab.add_argument("--overwrite", action="store_true", help="replace runs of the same names")
    ab.add_argument("--until-real", action="store_true", help="end as soon as the difference is beyond doubt")
    check = command("check", _check, "Validate a run file, and say what it needs and how long a step takes.", CHECK)
    check.add_argument("file", help="run file (TOML); or a run directory, to compare its plan with its metrics")
    check.add_argument("--hardware", metavar="GPUS", help="plan for these instead of this machine, such as h200x8")
    check.add_argument("--memory", metavar="SIZE", help="of each device, such as 24GB")
    check.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of an average prompt (128)")
    check.add_argument("--reply-tokens", type=int, metavar="N", help="tokens of an average reply (half of max_tokens)")
    check.add_argument("--json", action="store_true", help="print the plan alone, as JSON")
    serve = command("serve", _serve, "Serve a model with the OpenAI API.", SERVING)
    serve.add_argument("model", help="Hugging Face folder or hub name, paceline:quickstart, or a run file (TOML)")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="port; 0 picks a free one and prints it (8000)")
    serve.add_argument("--api-key", help="what clients must send; needed off loopback (env PACELINE_API_KEY)")
    serve.add_argument("--name", help="the model's name for clients (the name it is loaded by)")
    serve.add_argument("--allow", action="append", metavar="FOLDER", help="folder /weights/load may read; repeatable")
    serve.add_argument("--grace", type=float, help="seconds that requests get to finish after a signal (10)")
    serve.add_argument("--max-body-bytes", type=int, help="longest request body (64 MiB)")
    serve.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the engine in its own process (on a GPU)",
    )
    serve.add_argument(
        "--scores-only", action="store_true", default=None, help="score given tokens, never sample: for teachers"
    )
    rollout = command("rollout", _rollout, "Play episodes of an environment and look at them.", ROLLOUTS)
    rollout.add_argument("target", help="run file (TOML), or the type of an environment")
    rollout.add_argument("-n", "--count", type=int, default=4, help="episodes (4)")
    rollout.add_argument("--env", help="the environment's name, where the run file has several")
    rollout.add_argument("--split", choices=["train", "eval"], default="train")
    rollout.add_argument("--row", type=int, help="play all episodes on this row")
    rollout.add_argument("--endpoint", help="base URL of any OpenAI-compatible server, instead of the run's model")
    rollout.add_argument("--endpoint-model", help="the model's name there (the first it lists)")
    rollout.add_argument("--api-key", help="what the endpoint wants to be sent")
    rollout.add_argument("--concurrency", type=int, default=8, help="episodes at once (8)")
    up = command("up", _up, "Make this machine a cluster, or a part of one.", CLUSTER)
    up.add_argument("--join", metavar="ADDRESS", help="the cluster to be part of, HOST:PORT")
    up.add_argument("--port", type=int, default=6379, help="where a new cluster is reached (6379)")
    up.add_argument("--cpus", type=int, help="cores it may use here (all)")
    up.add_argument("--gpus", type=int, help="GPUs it may use here (all)")
    status = command("status", _status, "Show a cluster: its machines, and the parts of every run on it.")
    status.add_argument("address", nargs="?", default="auto", help="HOST:PORT (the cluster this machine is part of)")
    command("down", _down, "Leave the cluster; what runs on this machine ends.")
    play = command("play", _play, "Take a seat yourself: a person among the policy's actors, or alone.", PLAY)
    play.add_argument("target", help="run file (TOML), or the type of an environment")
    play.add_argument("--env", help="the environment's name, where the run file has several")
    play.add_argument("--seat", metavar="ACTOR", help="who you are (the first actor)")
    play.add_argument("--games", type=int, help="how many (until you leave)")
    play.add_argument("--split", choices=["train", "eval"], default="train")
    play.add_argument("--row", type=int, help="play every game on this row")
    play.add_argument("--url", help="base URL of any OpenAI-compatible server that plays the others")
    play.add_argument("--model", help="its name there; or a folder, hub name or checkpoint instead of the run's model")
    play.add_argument("--api-key", help="what the endpoint wants to be sent")
    play.add_argument("--reveal", action="store_true", help="after each game, show what the others heard and said")
    league = command("league", _league, "Ratings and payoff matrix of a self-play run, as table and picture.")
    league.add_argument("directory", metavar="RUN", help="run directory, such as runs/tic-tac-toe")
    replay = command(
        "replay", _replay, "Train a recorded batch once more on the CPU, beside what was recorded.", REPLAY
    )
    replay.add_argument("directory", metavar="RUN", help="run directory, such as runs/quickstart")
    replay.add_argument("step", type=int, metavar="STEP", nargs="?", help="which of its batches")
    replay.add_argument("--dump", metavar="STEP", help="a batch kept because its step was bad: step or path")
    replay.add_argument("--json", action="store_true", help="one JSON object with every token's share of the loss")
    doctor = command("doctor", _doctor, "Show how a run is: alive or dead, who waits for whom, how to go on.", DOCTOR)
    doctor.add_argument("directory", metavar="RUN", help="run directory, such as runs/quickstart")
    top = command("top", _top, "Watch a run's vital signs in a terminal.", WATCHING)
    top.add_argument("directory", metavar="RUN", nargs="?", default="runs", help="run directory, or a folder of runs")
    report = command("report", _report, "Write one HTML file about a run, to send to somebody.", REPORTING)
    report.add_argument("directory", metavar="RUN", help="run directory, such as runs/quickstart")
    report.add_argument("-o", dest="file", metavar="FILE", help="where to (NAME-report.html, here)")
    report.add_argument("--rollouts", type=int, default=2, metavar="N", help="best, median and worst ones, each (2)")
    diff = command("diff", _diff, "Name the first thing in which two runs differ.", DIFFERING)
    diff.add_argument("one", metavar="A", help="a run directory")
    diff.add_argument("other", metavar="B", help="another")
    diff.add_argument("--tolerance", type=float, default=0.0, help="numbers this far apart count as the same (0)")
    diff.add_argument("--json", action="store_true", help="one JSON object instead of tables")

    ui = command("ui", _ui, "Look at runs in a browser, live.", SHOWING)
    ui.add_argument("runs", metavar="RUNS", nargs="?", help="folder of run directories, or one of them (runs)")
    ui.add_argument("--host", help="address to listen on (127.0.0.1)")
    ui.add_argument("--port", type=int, help="port; 0 picks a free one and prints it (8200)")
    ui.add_argument("--key", help="what a browser must know; needed off loopback (env PACELINE_UI_KEY)")
    data = command("data", _data, "Show dataset rows as the model will see them, with token counts.", DATA)
    data.add_argument("source", help="file or URI: .jsonl, .json, .csv, .parquet, .arrow, split@hub/name")
    data.add_argument("--limit", type=int, default=5, help="rows to show (5)")
    data.add_argument("--model", default="paceline:quickstart", help="whose tokenizer and chat template")
    data.add_argument("--field", action="append", default=[], metavar="THEIRS=OURS", help="rename a field; repeatable")
    data.add_argument("--demonstrations", action="store_true", help="rows must end in an assistant message")
    search = command("search-server", _search, "Serve a corpus to retrieval environments: POST /search.")
    for flag, kind, text in (
        ("--corpus", str, "documents, .jsonl with `id`, `text` and perhaps `title` (those of the package)"),
        ("--index", str, "folder to keep the index in"),
        ("--top-k", int, "results for a query that does not say (5)"),
        ("--host", str, "address to listen on (127.0.0.1)"),
        ("--port", int, "port; 0 picks a free one (8100)"),
        ("--api-key", str, "what clients must send; needed off loopback (env PACELINE_SEARCH_API_KEY)"),
        ("--embeddings-url", str, "base URL of an OpenAI-compatible endpoint, to search by meaning"),
        ("--embeddings-model", str, "its model"),
        ("--embeddings-api-key", str, "its key"),
    ):
        search.add_argument(flag, type=kind, help=text)
    command("schema", _schema, "Print the JSON schema of run files, for editors.")
    return parser


def _train(known: argparse.Namespace, overrides: list[str]) -> int:
    loaded = load(known.file, overrides)
    if os.environ.get("RANK", "0") == "0":  # of the ranks of a torchrun one is enough to speak
        _show_warnings(loaded)
    from paceline.cluster import train

    result = train(loaded.config, overwrite=known.overwrite, screen=None if known.quiet else sys.stdout)
    if result.summary:
        print("\n".join(result.summary))
    if result.outcome.status == "failed":
        print(f"paceline: {result.outcome.message}", file=sys.stderr)
    return {"finished": 0, "failed": 1, "interrupted": 130}[result.outcome.status]


def _ab(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.config.arms import arms_of

    arms = arms_of(known.file, overrides)
    for loaded in arms.values():
        _show_warnings(loaded)
    from paceline.cluster.ab import compare

    return compare(
        {arm: loaded.config for arm, loaded in arms.items()},
        overwrite=known.overwrite,
        screen=sys.stdout,
        until_real=known.until_real,
    )


def _check(known: argparse.Namespace, overrides: list[str]) -> int:
    if Path(known.file).is_dir():
        return _compare(known)
    loaded = load(known.file, overrides)
    if not known.json:
        print(dump(loaded.config), end="", flush=True)
    _show_warnings(loaded)
    _show_plan(loaded, known)
    print(f"paceline: {known.file} is valid", file=sys.stderr)
    return 0


def _show_plan(loaded: Loaded, known: argparse.Namespace) -> None:
    from rich.console import Console

    from paceline import planner
    from paceline.planner.report import plan_report
    from paceline.planner.shape import UnknownShape, shape_of
    from paceline.planner.work import assumed

    config = loaded.config
    hardware = planner.parse(known.hardware) if known.hardware else planner.found(config.device, backend=config.backend)
    hardware = planner.with_memory(hardware, known.memory)
    try:
        shape = shape_of(config.model.name)
    except UnknownShape as reason:
        if known.json:
            raise
        print(f"paceline: no plan: {reason}", file=sys.stderr)
        return
    plan = planner.predict(config, hardware, assumed(config, shape, known.prompt_tokens, known.reply_tokens), shape)
    if known.json:
        print(json.dumps(plan.table(), indent=2))
    else:
        Console(stderr=True, highlight=False).print(plan_report(plan))


def _compare(known: argparse.Namespace) -> int:
    from rich.console import Console

    from paceline.planner import compare
    from paceline.planner.report import comparison_report

    comparison = compare(Path(known.file))
    if known.json:
        print(json.dumps(comparison.table(), indent=2))
    else:
        Console(highlight=False).print(comparison_report(comparison))
    return 0


def _serve(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.config.serve import load_serve, load_served

    settings = load_serve(
        host=known.host,
        port=known.port,
        api_key=known.api_key or os.environ.get("PACELINE_API_KEY"),
        name=known.name,
        allow=known.allow,
        grace=known.grace,
        max_body_bytes=known.max_body_bytes,
        isolate=known.isolate,
        scores_only=known.scores_only,
    )
    loaded = load_served(known.model, overrides)
    from paceline.cluster.serving import serve_model
    from paceline.inference import EngineError

    try:
        serve_model(loaded.config, settings)
    except EngineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    return 0


def _up(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().up(known.join, known.port, known.cpus, known.gpus))


def _down(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().down())


def _status(known: argparse.Namespace, _: list[str]) -> int:
    return _tell(_cluster().status(known.address))


def _cluster() -> ModuleType:
    try:
        from paceline.cluster.ray import commands
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PacelineError('a cluster needs Ray: pip install "paceline[ray]"') from None
    return commands


def _tell(lines: list[str]) -> int:
    print(*lines, sep="\n")
    return 0


def _rollout(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.cluster.rollouts import RolloutOptions, load_rollouts, rollouts

    loaded = load_rollouts(known.target, overrides)
    names = ("count", "env", "split", "row", "endpoint", "endpoint_model", "api_key", "concurrency")
    return rollouts(loaded.config, RolloutOptions(**{name: getattr(known, name) for name in names}))


def _play(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.cluster.play import PlayOptions, play
    from paceline.cluster.rollouts import load_rollouts

    names = ("env", "seat", "games", "split", "row", "url", "model", "api_key", "reveal")
    options = PlayOptions(**{name: getattr(known, name) for name in names})
    return play(load_rollouts(known.target, overrides).config, options)


def _league(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from paceline.cluster.league import leagues, picture

    run = Path(known.directory)
    found = leagues(run)
    if not found:
        raise PacelineError(f"{run} has no league: add [env.league] to an arena and evaluate (eval.every)")
    for name, payoff in found.items():
        Console().print(payoff.table(name))
        print(picture(run, name, payoff))
    return 0


def _replay(known: argparse.Namespace, overrides: list[str]) -> int:
    end_with_parent()
    run = Path(known.directory)
    file = run / "config.toml"
    if not file.is_file():
        raise PacelineError(f"there is no run at {run}: name a run directory, such as runs/quickstart")
    loaded = load(str(file), overrides)
    from rich.console import Console

    from paceline.cluster.replay import replay, replay_dump, samples_table, table

    if (known.step is None) == (known.dump is None):
        raise PacelineError("name one batch: a STEP whose batch was recorded, or --dump with one whose step was bad")
    if known.json:
        return _replay_json(run, known, loaded)
    dumped = known.dump is not None
    result = replay_dump(run, known.dump, loaded.config) if dumped else replay(run, known.step, loaded.config)
    console = Console()
    console.print(table(result))
    if dumped:
        console.print(samples_table(result))
        print(result.verdict)
    note = "" if result.exact else f"; they are not those step {result.step} began with, so the figures differ"
    print(f"weights: {result.weights}{note}")
    return 0


def _replay_json(run: Path, known: argparse.Namespace, loaded: Loaded) -> int:
    from paceline.cluster.replay import replay
    from paceline.cluster.replay_json import as_json

    if known.dump is not None:
        raise PacelineError("--json tells of a STEP: leave --dump out")

    def telling(sentence: str) -> None:
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)

    result = replay(run, known.step, loaded.config, telling)
    telling("writing what the tokens said")
    sys.stdout.buffer.write(as_json(run, result, loaded.config) + b"\n")
    return 0


def _doctor(known: argparse.Namespace, rest: list[str]) -> int:
    from rich.console import Console

    from paceline.monitor.doctor import examine, report
    from paceline.record import open_run
    from paceline.record.advice.telling import advice

    # A pipe has no width: wide enough there that no line of a stack is broken.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(report(examine(Path(known.directory))))
    console.print(advice(open_run(known.directory)))
    return 0


def _top(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.top import watch

    watch(Path(known.directory))
    return 0


def _report(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.report import write_report

    file = write_report(Path(known.directory), known.file and Path(known.file), known.rollouts)
    print(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")
    return 0


def _diff(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.record import open_run
    from paceline.record.parting import compare

    one, other = open_run(known.one), open_run(known.other)
    compared = compare(one, other, known.tolerance)
    if known.json:
        print(json.dumps(compared.as_json()))
    else:
        from rich.console import Console

        from paceline.record.telling import told

        Console().print(told(compared, one.name, other.name))
    return int(compared.first is not None)


def _ui(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.ui import KEY_VARIABLE, load_options, serve_ui

    key = known.key or os.environ.get(KEY_VARIABLE) or None
    serve_ui(load_options(runs=known.runs, host=known.host, port=known.port, key=key))
    return 0


def _data(known: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    import paceline.envs  # noqa: F401 - they bring schemes of their own, such as `reasoning-gym:`
    from paceline.config.model import Model
    from paceline.data import open_rows
    from paceline.model import load_tokenizer
    from paceline.rollout.show import show_rows

    wrong = [pair for pair in known.field if not all(pair.partition("="))]
    if wrong:
        raise PacelineError(f"--field {wrong[0]}: write THEIRS=OURS, such as --field question=prompt")
    fields = dict(pair.split("=", 1) for pair in known.field)
    rows = open_rows(known.source, fields, demonstrations=known.demonstrations)
    show_rows(rows, load_tokenizer(Model(name=known.model)), known.limit, Console())
    return 0


def _search(known: argparse.Namespace, overrides: list[str]) -> int:
    from paceline.config.env.retrieval import SEARCH_KEY_VARIABLE
    from paceline.envs.search.options import SearchOptions, load_options

    flags = {name: getattr(known, name) for name in SearchOptions.model_fields}
    options = load_options(**flags | {"api_key": known.api_key or os.environ.get(SEARCH_KEY_VARIABLE)})
    from paceline.envs.search.server import serve_search

    serve_search(options)
    return 0


def _schema(known: argparse.Namespace, overrides: list[str]) -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def _show_warnings(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        print(f"paceline: warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

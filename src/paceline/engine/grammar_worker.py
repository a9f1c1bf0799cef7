"""Compiles grammars in a process of its own, which can be given up: a short pattern may take minutes and gigabytes.

Run as a file, so that it imports xgrammar and nothing of Paceline. Each line of its input is a JSON object: first the
tokenizer, then one grammar after another. Each grammar is answered by a line of JSON, which also says by how many bytes
compiling has made this process grow: memory that is not given back is a reason to end it.
"""

import json
import resource
import signal
import sys
from typing import Any


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    import xgrammar

    begin = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_DATA, (begin["memory"], begin["memory"]))
    info = xgrammar.TokenizerInfo.deserialize_json(begin["tokenizer"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=begin["threads"], cache_enabled=False)
    small = peak()
    for line in sys.stdin:
        signal.alarm(begin["seconds"])  # ends this process, also where the one that asks is gone
        found = answer(compiler, json.loads(line))
        print(json.dumps({**found, "grown": peak() - small}), file=answers, flush=True)
        signal.alarm(0)


def peak() -> int:
    """The most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def answer(compiler: Any, asked: dict[str, Any]) -> dict[str, str]:
    try:
        if asked["kind"] == "regex":
            compiled = compiler.compile_regex(asked["source"])
        else:
            compiled = compiler.compile_json_schema(asked["source"], max_whitespace_cnt=asked["whitespace"])
    except RuntimeError as error:
        return {"wrong": str(error)}
    return {"compiled": compiled.serialize_json()}


if __name__ == "__main__":
    main()

"""Compiles grammars in a separate process that can be killed.

A short pattern may take minutes and gigabytes.

Run as a file, so that it imports xgrammar and nothing of Paceline. Each line of its input is a JSON object: first the
tokenizer, then one grammar after another. Each grammar is answered by a line of JSON, which also says by how many bytes
compiling has made this process grow: memory that is not given back is a reason to end it. What compiled quickly and in
little memory is only said to be `quick`: as JSON a grammar of 2 MB may take 200, so the asker compiles it once more.
"""

import json
import resource
import signal
import sys
import time
from typing import Any


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    import xgrammar

    begin = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_DATA, (begin["memory"], begin["memory"]))
    info = xgrammar.TokenizerInfo.deserialize_json(begin["tokenizer"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=begin["threads"], cache_enabled=False)
    baseline = peak_memory()
    for line in sys.stdin:
        signal.alarm(begin["seconds"])  # ends this process, also where the one that asks is gone
        reply = compile_grammar(compiler, json.loads(line), begin, baseline)
        print(json.dumps({**reply, "grown": peak_memory() - baseline}), file=replies, flush=True)
        signal.alarm(0)


def peak_memory() -> int:
    """The most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compile_grammar(compiler: Any, request: dict[str, Any], limits: dict[str, Any], baseline: int) -> dict[str, Any]:
    began = time.monotonic()
    try:
        if request["kind"] == "regex":
            compiled = compiler.compile_regex(request["source"])
        else:
            compiled = compiler.compile_json_schema(request["source"], max_whitespace_cnt=request["whitespace"])
    except RuntimeError as error:
        return {"wrong": str(error)}
    if time.monotonic() - began < limits["quick_seconds"] and peak_memory() - baseline < limits["quick_bytes"]:
        return {"quick": True}
    written = compiled.serialize_json()
    return {"compiled": written} if len(written) <= limits["written"] else {"large": len(written)}


if __name__ == "__main__":
    main()

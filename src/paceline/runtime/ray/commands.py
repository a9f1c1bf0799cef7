"""`paceline up`, `paceline status` and `paceline down`: a cluster by hand, machine by machine."""

import asyncio
import subprocess
import sys
from collections import defaultdict

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from paceline.errors import EngineError, PacelineError
from paceline.runtime.ray.engines import RayEngine
from paceline.runtime.ray.place import NAMESPACE, connect_ray
from paceline.util.private_folder import shorten_ray_sockets

ANSWER_SECONDS = 10.0
START_SECONDS = 120.0


def up(join: str | None, port: int, cpus: int | None, gpus: int | None) -> list[str]:
    """Make this machine the head of a cluster, or a part of one; answers with what to do next."""
    where = [f"--address={join}"] if join else ["--head", f"--port={port}", "--include-dashboard=false"]
    counts = [f"--num-cpus={cpus}"] * (cpus is not None) + [f"--num-gpus={gpus}"] * (gpus is not None)
    _ray(["start", *where, *counts, "--disable-usage-stats"])
    if join:
        return [f"this machine is part of the cluster at {join}; runs that may grow (cluster.most_engines) will use it"]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    return [
        f"a cluster is up at {address}",
        f"on each further machine:  paceline up --join {address}",
        f'in the run file:          placement = "ray", and under [cluster] address = "{address}"',
        "to see it: paceline status; to end it, on each machine: paceline down",
    ]


def down() -> list[str]:
    """This machine leaves its cluster, and whatever runs on it ends."""
    _ray(["stop"])
    return ["this machine is in no cluster any more"]


def status(address: str) -> list[str]:
    """Machines, what is free on them, and the parts of every run."""
    with connect_ray(address, "start one with `paceline up`"):
        return [*_machines(), *asyncio.run(_parts())]


def _machines() -> list[str]:
    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    amounts = [
        f"{free.get(name, 0.0):g} of {total[name]:g} {unit} free"
        for name, unit in (("CPU", "cores"), ("GPU", "GPUs"))
        if name in total
    ]
    lines = [f"{len(nodes)} machines, {', '.join(amounts)}"]
    for node in sorted(nodes, key=lambda node: node["NodeManagerAddress"]):
        held = node["Resources"]
        gpus = f", {held['GPU']:g} GPUs" if held.get("GPU") else ""
        lines.append(f"  {node['NodeManagerAddress']}  {held.get('CPU', 0):g} cores{gpus}")
    return lines


async def _parts() -> list[str]:
    runs: dict[str, list[str]] = defaultdict(list)
    for entry in list_named_actors(all_namespaces=True):
        run, _, part = entry["name"].rpartition("/")
        if entry["namespace"] == NAMESPACE and run:
            runs[run].append(part)
    lines = [] if runs else ["no run is under way"]
    for run, parts in sorted(runs.items()):
        states = await asyncio.gather(*(_describe(run, part) for part in sorted(parts)))
        lines += [f"run {run}", *(f"  {line}" for line in states)]
    return lines


async def _describe(run: str, part: str) -> str:
    """One line on a part: where it is and, if it is an engine or a scorer, what it does."""
    try:
        handle = ray.get_actor(f"{run}/{part}", namespace=NAMESPACE)
        async with asyncio.timeout(ANSWER_SECONDS):
            host, pid = await handle.host_and_pid.remote()
            doing = ""
            if part.startswith(("engine", "scorer", "reference")):
                engine = RayEngine(handle, part)
                policy, stats = await asyncio.gather(engine.policy(), engine.stats())
                running = f"{stats.running} requests run and {stats.waiting} wait"
                doing = f", version {policy.version}, {running}, {stats.tokens:,} tokens"
                if not part.startswith("engine"):
                    doing = f", {stats.waiting} sequences wait, {stats.prompt_tokens:,} tokens scored"
    except (RayError, GetTimeoutError, EngineError, TimeoutError, ValueError):
        return f"{part:<12} does not answer"
    return f"{part:<12} {host}, process {pid}{doing}"


def _ray(arguments: list[str]) -> None:
    shorten_ray_sockets()
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise PacelineError(f"ray {arguments[0]} failed: {lines[-1].strip() if lines else done.returncode}")

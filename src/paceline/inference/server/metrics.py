"""Prometheus text, written by hand: a dozen gauges and one histogram need no library."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from paceline.inference.base import EngineStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTERS = {"steps", "tokens", "prompt_tokens", "cached_tokens", "preempted", "swaps", "pause_seconds", "busy_seconds"}


class Meter:
    """Counts answers and how long they took, by route; routes are few and fixed, so the counts stay small."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.open = 0
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def record(self, route: str, status: int, seconds: float) -> None:
        self.answers[route, status] += 1
        counts = self._buckets.setdefault(route, [0] * (len(SECONDS) + 1))
        counts[bisect_left(SECONDS, seconds)] += 1
        self._seconds[route] += seconds  # ty: ignore[invalid-assignment] - a Counter adds floats as well

    def exposition(self, stats: EngineStats) -> str:
        return "\n".join([*self._engine(stats), *self._http()]) + "\n"

    def _engine(self, stats: EngineStats) -> Iterator[str]:
        for field in fields(stats):
            counts = field.name in COUNTERS
            name = f"paceline_engine_{field.name}{'_total' if counts else ''}"
            yield f"# TYPE {name} {'counter' if counts else 'gauge'}"
            yield f"{name} {float(getattr(stats, field.name)):g}"

    def _http(self) -> Iterator[str]:
        yield "# TYPE paceline_http_open_requests gauge"
        yield f"paceline_http_open_requests {self.open}"
        yield "# TYPE paceline_http_requests_total counter"
        for (route, status), count in sorted(self.answers.items()):
            yield f'paceline_http_requests_total{{route="{route}",status="{status}"}} {count}'
        yield "# TYPE paceline_http_request_seconds histogram"
        for route, counts in sorted(self._buckets.items()):
            below = 0
            for bound, count in zip((*SECONDS, "+Inf"), counts, strict=True):
                below += count
                yield f'paceline_http_request_seconds_bucket{{route="{route}",le="{bound}"}} {below}'
            yield f'paceline_http_request_seconds_sum{{route="{route}"}} {self._seconds[route]:g}'
            yield f'paceline_http_request_seconds_count{{route="{route}"}} {below}'

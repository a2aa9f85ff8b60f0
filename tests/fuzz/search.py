"""Batches of examples: the same ones for the same seed."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from fuzz import front, rpc
from fuzz.databases import Kind
from fuzz.documented import Documented
from fuzz.exchange import exchange
from fuzz.findings import Counts, Finding
from fuzz.front import Front
from fuzz.garden import plant
from fuzz.http_judge import judge
from fuzz.odd_http import Oddities

Draw = Callable[[st.SearchStrategy[Any]], Any]
# Of HTTP inputs so many come from the document, and the rest are odd.
_DOCUMENTED: Final = 0.4


def batch(
    one: Callable[[Draw], None], counts: Counts, *, seed: int, examples: int, shrink: bool = True
) -> None:
    """Run examples; what is found is added to the counts, in its smallest form."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(st.data())
    def run(data: Any) -> None:
        one(data.draw)

    try:
        run()
    except Finding as finding:
        counts.found.append(finding)
    except BaseExceptionGroup as several:
        # Of what comes and goes there may be more than the finding.
        wanted, _ = several.split(Finding)
        if wanted is None:
            raise
        counts.found += _flat(wanted)


def _flat(group: BaseExceptionGroup[Any]) -> Iterator[Finding]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _flat(one)
        else:
            yield one


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder for the time of a search."""
    made = Path(tempfile.mkdtemp(prefix="kvplane-fuzz-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


class RpcSearch:
    """Calls of all RPCs; each example on a fresh copy of the same database."""

    def __init__(
        self, runner: asyncio.Runner, kind: Kind, methods: Sequence[str] | None = None
    ) -> None:
        self._runner, self.methods = runner, methods
        self.garden = runner.run(plant(kind))

    def batch(self, counts: Counts, *, seed: int, examples: int, shrink: bool = True) -> None:
        """Run so many sequences of calls."""

        def one(draw: Draw) -> None:
            self._runner.run(rpc.example(self.garden, draw, counts, self.methods))

        batch(one, counts, seed=seed, examples=examples, shrink=shrink)


class HttpSearch:
    """Requests to the gateway, all to the same one."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self._runner = runner
        self._running = front.running(folder)
        self._front: Front = runner.run(self._running.__aenter__())
        self._documented = Documented(self._front, runner.run(self._document()))

    async def _document(self) -> dict[str, Any]:
        async with self._front.http.get(f"{self._front.url}/openapi.json") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    def batch(self, counts: Counts, *, seed: int, examples: int) -> None:
        """Send so many requests; then nothing may be held or under way."""

        def documented(draw: Draw) -> None:
            self._runner.run(self._documented.example(draw, counts))

        def odd(draw: Draw) -> None:
            self._runner.run(self._odd(draw, counts))

        share = round(examples * _DOCUMENTED)
        batch(documented, counts, seed=seed, examples=max(1, share))
        batch(odd, counts, seed=seed, examples=max(1, examples - share))
        try:
            self._runner.run(self._front.check_all_given_back())
        except Finding as finding:
            counts.found.append(finding)

    async def _odd(self, draw: Draw, counts: Counts) -> None:
        sent = Oddities(draw, self._front).request()
        heard = await exchange(self._front.port, sent.raw, close=sent.close)
        judge(
            self._front,
            counts,
            whose=sent.whose,
            asked=sent.raw,
            heard=heard,
            head_only=sent.raw.startswith(b"HEAD"),
            whole=not sent.close,
        )

    def close(self) -> None:
        """Stop everything."""
        self._runner.run(self._running.__aexit__(None, None, None))

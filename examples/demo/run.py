"""The demo: `make demo`, or `make demo ENGINE=reference`.

A five-turn conversation of an agent through kvplane, with and without KV reuse. Writes
build/demo/report.json and build/demo/plot.png. The exit status is 1 when any token differs
or no turn reused, 2 when something did not start.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from demo import report
from demo.cluster import FOLDER, MODEL, Cluster, end_leftovers
from demo.play import Turn, play
from demo.servers import ROOT, Failed


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


async def converse(cluster: Cluster) -> list[Turn]:
    """Play all turns and show each as it ends."""
    say("\nWarming up, then five turns, each with and without reuse:\n")
    say(report.header())
    turns = []
    async for turn in play(cluster.gateway, cluster.control_plane):
        turns.append(turn)
        say(report.row(turn))
    return turns


def go_on(cluster: Cluster, running: bool) -> None:
    """Say what can be tried by hand."""
    demo = "make demo" + (" ENGINE=reference" if cluster.engine == "reference" else "")
    if not running:
        say(f"\nTo go on by hand, leave everything running: {demo} ARGS=--keep")
        return
    kvplane = f"{python_folder()}/kvplane"
    say(
        f"""
Everything keeps running; `{demo} ARGS=--stop` ends it.
Go on by hand, with one x-session-id for each conversation:

  curl {cluster.gateway}/v1/chat/completions -H 'content-type: application/json' \\
    -H 'x-session-id: mine' -d '{{"model": "{MODEL}", "max_tokens": 32, "messages":
    [{{"role": "user", "content": "Why is the search slow?"}}]}}'

See what the control plane knows:

  {kvplane} workers list --server {cluster.control_plane}
  {kvplane} sessions list --server {cluster.control_plane}
  {kvplane} leases list --server {cluster.control_plane}"""
    )


def python_folder() -> str:
    """Return the folder of this environment's programs, as one types it."""
    folder = sys.prefix.removeprefix(f"{ROOT}/")
    return f"{folder}/bin"


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="make demo ARGS=...", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "reference"), default="vllm")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where everything is written")
    parser.add_argument("--keep", action="store_true", help="leave everything running")
    parser.add_argument("--stop", action="store_true", help="end what --keep left running")
    args = parser.parse_args()
    if args.stop:
        say("Ended." if end_leftovers(args.out) else "Nothing is running.")
        return 0
    end_leftovers(args.out)
    cluster = Cluster(args.engine, args.out)
    running = False
    try:
        say(f"Starting prefill, decode ({args.engine}) and kvplane; logs in {args.out}")
        cluster.start(say)
        turns = asyncio.run(converse(cluster))
        report.write(turns, args.out / "report.json")
        report.plot(turns, args.engine, args.out / "plot.png")
        running = args.keep
    except (Failed, RuntimeError, OSError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if not running:
            cluster.stop()
    say(f"\nReport: {args.out / 'report.json'}\nPlot:   {args.out / 'plot.png'}")
    go_on(cluster, running)
    problem = report.verdict(turns)
    if problem:
        print(f"\nFAILED: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())

"""The `forebay` command. Each subcommand imports what it needs when it runs, so that `--help` is fast."""

import errno
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from forebay import __version__
from forebay.cli import settings
from forebay.cli.conformance.command import conformance
from forebay.cli.deploy import command as deploying
from forebay.cli.keys.command import keys
from forebay.cli.nodes import command as of_nodes
from forebay.cli.options import (
    AdminOptions,
    ApiKeyOption,
    CaOption,
    FileOption,
    JsonOption,
    ServerUrlOption,
    SetOption,
    WatchOption,
    with_fields,
)
from forebay.cli.records import command as records
from forebay.cli.registry.command import history, registry
from forebay.cli.repository.command import serve
from forebay.cli.repository.demos.command import repository
from forebay.cli.scale.command import scale
from forebay.cli.settings import UserError, is_text
from forebay.cli.simulate.command import simulate
from forebay.cli.sla.command import sla

if TYPE_CHECKING:
    from forebay.core.cluster import Cluster

PASSWORD = re.compile(r"(://[^\s/@:]*):[^\s/@]*@")
"""That of a URL, behind the user's name."""
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
EPILOG = (
    "Exit codes: 0 success · 1 failure · 2 usage error · 3 server unreachable · 4 `drain --timeout` gave up · "
    "130 interrupted with Ctrl-C"
)

app = typer.Typer(
    name="forebay",
    help="Any model behind one API with an SLA.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
config = typer.Typer(help="The cluster file.", no_args_is_help=True)
app.add_typer(config, name="config")
app.add_typer(records.audit, name="audit")
app.add_typer(keys, name="keys")
app.add_typer(registry, name="registry")
app.add_typer(repository, name="repository")
app.add_typer(deploying.rollout, name="rollout")
app.add_typer(scale, name="scale")

HeaderOption = Annotated[
    list[str] | None, typer.Option(help="NAME:VALUE, sent with every request; repeatable.", show_default=False)
]
RateOption = Annotated[
    float | None,
    typer.Option(
        help="Open loop: requests per second with Poisson arrivals; latency counts from the scheduled send time."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Any model behind one API with an SLA."""


@app.command()
def up(
    file: FileOption = None,
    set_: SetOption = None,
    demo: Annotated[bool, typer.Option("--demo", help="Start the demo even if there is a forebay.yaml.")] = False,
) -> None:
    """Start the cluster of a cluster file and stay in the foreground; Ctrl-C drains and stops it."""
    from forebay.cli.up import run_up

    if demo and file:
        raise UserError("--demo and -f cannot be combined.", settings.WRONG_USAGE)
    source = settings.demo_file() if demo else settings.read_file(file)
    console = settings.screen()
    if source.is_demo and not demo:
        console.print("[dim]There is no forebay.yaml here: starting the demo.[/]")

    def read_again() -> "Cluster":
        again = settings.read_file(Path(source.name))
        return settings.load_cluster(again, set_ or [], os.environ, to_run=True, otherwise="nothing was changed")

    def parse(text: str) -> "Cluster":
        sent = settings.FileText("what was sent", text.encode())
        return settings.load_cluster(sent, set_ or [], os.environ, to_run=True, otherwise="nothing was changed")

    cluster = settings.load_cluster(source, set_ or [], os.environ, to_run=True)
    raise typer.Exit(run_up(cluster, settings.home(), console, None if source.is_demo else read_again, parse))


@app.command()
@with_fields(api=AdminOptions)
def reload(*, api: AdminOptions) -> None:
    """Apply changes of the cluster file to the running cluster without dropping requests."""
    from forebay.cli.view import reload as view

    raise typer.Exit(view.reload(api.admin(), settings.screen()))


app.command()(serve)


@app.command()
@with_fields(api=AdminOptions)
def status(
    watch: WatchOption = False,
    as_json: JsonOption = False,
    *,
    api: AdminOptions,
) -> None:
    """Show every replica of the running cluster."""
    from forebay.cli.view import status as view

    raise typer.Exit(view.status(api.admin(), watch, as_json, settings.screen()))


app.command()(deploying.deploy)
app.command()(deploying.apply)
app.command()(of_nodes.nodes)
app.command()(of_nodes.drain)
app.command()(of_nodes.undrain)


app.command()(records.explain)
app.command()(records.usage)
app.command()(sla)
app.command()(history)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="A single question; leave out for a conversation.", show_default=False)
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Model.", show_default="the only one, or `chat`")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit on the answer's length, tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature; 0: greedy.", show_default="the server's")
    ] = None,
    url: ServerUrlOption = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D quits."""
    from forebay.cli import chat as talk
    from forebay.cli.server import choose_model, connect, trusted

    out, notes = settings.screen(), settings.screen(stderr=True)
    base = url or settings.gateway_url()
    with connect(base, api_key, trusted(base, ca)) as client:
        chosen = choose_model(client, model, "chat")
        conversation = talk.Talk(client, chosen, max_tokens, temperature, talk.system_message(system))
        raise typer.Exit(talk.chat(conversation, prompt, out, notes))


@app.command()
def bench(
    *,
    url: ServerUrlOption = None,
    model: Annotated[str | None, typer.Option(help="Model.", show_default="the only one, or by task")] = None,
    task: Annotated[str, typer.Option(help="chat, completions or embed.")] = "chat",
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Closed loop: concurrent requests.")] = 8,
    rate: RateOption = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", help="Stop after this many requests.", show_default="100")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Stop after this time, seconds; alone it is the only limit."),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH, or lognormal:MEDIAN,SIGMA[,MAX].")] = "64",
    output_tokens: Annotated[str, typer.Option(help="Limit on answers, in the same forms.")] = "64",
    fixed_output: Annotated[
        bool, typer.Option("--fixed-output", help="Request answers of exactly that length (ignore_eos).")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.", show_default="the server's")] = None,
    stream: Annotated[bool, typer.Option(help="Stream the answers; needed for TTFT and TPOT.")] = True,
    batch: Annotated[int, typer.Option(help="embed: inputs per request.")] = 1,
    warmup: Annotated[int, typer.Option(help="Number of requests sent first and not counted.")] = 0,
    timeout: Annotated[float, typer.Option(help="Give up on a request after this, seconds.")] = 300.0,
    header: HeaderOption = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: time to first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Goodput: time per output token.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="Goodput: end-to-end latency.")] = None,
    seed: Annotated[int, typer.Option(help="Seed: the same requests at the same times.")] = 0,
    as_json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(help="Plot latencies and rates (.png, .svg, .pdf).")] = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
) -> None:
    """Load-test an OpenAI-compatible server and report latency, throughput and errors."""
    from forebay.cli.bench.command import Output, bench
    from forebay.cli.bench.plan import Plan
    from forebay.cli.bench.stats import Slo

    plan = Plan(
        url=url or settings.gateway_url(),
        model=model,
        task=task,
        concurrency=concurrency,
        rate=rate,
        requests=requests,
        duration_s=duration,
        warmup=warmup,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        stream=stream,
        fixed_output=fixed_output,
        batch=batch,
        seed=seed,
        timeout_s=timeout,
        api_key=api_key,
        ca=ca,
        headers=tuple(header or ()),
        temperature=temperature,
    )
    raise typer.Exit(bench(plan, Slo(slo_ttft_ms, slo_tpot_ms, slo_e2e_ms), Output(as_json, plot)))


app.command()(simulate)
app.command()(conformance)


@app.command()
def doctor(file: FileOption = None, as_json: JsonOption = False) -> None:
    """Check this machine: what is present, what is missing, how to get it."""
    import msgspec

    from forebay.cli import doctor as look

    cluster = settings.load_cluster(settings.read_file(file), [], os.environ)
    gateway, admin = cluster.gateway, cluster.admin
    ports = (
        ("gateway", gateway.host, gateway.port, "https" if gateway.tls else "http"),
        ("admin", admin.host, admin.port, "http"),
    )
    console, notes = settings.screen(), settings.screen(stderr=True)
    with notes.status("checking the machine"):
        found = list(look.checks(settings.home(), ports, gateway.tls.value() if gateway.tls else None))
    missing = [check.name for check in found if check.state is look.State.MISSING]
    if as_json:
        document = {"ok": not missing, "checks": found}
        console.out(msgspec.json.format(msgspec.json.encode(document)).decode(), highlight=False)
    else:
        console.print(look.table(found), highlight=False)
        verdict = f"[bold red]missing: {', '.join(missing)}[/]" if missing else "[green]Forebay can run here.[/]"
        console.print(f"\n{verdict}")
    raise typer.Exit(1 if missing else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the cluster file, for editors."""
    import json

    from forebay.core.cluster import Cluster

    typer.echo(json.dumps(Cluster.model_json_schema(), indent=2))


@config.command()
def check(
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Cluster file; same as -f.", show_default=False)
    ] = None,
    file: FileOption = None,
    set_: SetOption = None,
) -> None:
    """Check a cluster file and print all problems at once."""
    if path and file:
        raise UserError("FILE and -f FILE are the same: give only one of them.", settings.WRONG_USAGE)
    from forebay.registry import sources

    source = settings.read_file(path or file)
    cluster = settings.load_cluster(source, set_ or [], os.environ, to_run=True)
    models = ", ".join(f"{m.name} ({m.task}, {m.replicas} replica{'s' * (m.replicas > 1)})" for m in cluster.models)
    typer.echo(f"{source.name}: valid. Cluster {cluster.name}: {models}")
    for model in cluster.models:
        needs_none = model.engine is not None and model.engine.name == "synthetic"
        problem = "" if needs_none else sources.problem(model.source)
        if problem:  # only a note: the file may be for another machine
            typer.echo(f"{model.name} cannot start on this machine: {problem}")
    if cluster.gateway.tls:
        from forebay.cli.doctor import check_certificate

        found = check_certificate(cluster.gateway.tls.value())
        typer.echo(f"The certificate {found.found}{f': {found.advice}' if found.advice else ''}")


def _fitted(text: str) -> str:
    """A message for standard error, wrapped at words on a terminal."""
    if not sys.stderr.isatty():
        return text
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4) if line.startswith(" ") else ""
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """An exception raised while an object is finalised is lost, a Ctrl-C too: send it again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()  # not here: it would be lost as well
    else:
        sys.__unraisablehook__(lost)


def _open_streams() -> None:
    """A standard stream that was closed, as by `>&-`, is empty, or discards what is written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the whole process


def _no_text() -> str | None:
    """The first argument that is not UTF-8, made printable. It may be a path, and then nothing is wrong with it."""
    shown = (os.fsencode(word).decode(errors="backslashreplace") for word in sys.argv[1:] if not is_text(word))
    return next(shown, None)


def _said(error: OSError) -> str:
    """What an error of the system is about, and its text; empty if it says too little for that."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    if error.errno in UNWRITABLE:
        return f"the output cannot be written: {error.strerror}."
    try:
        Path.cwd()
    except OSError:
        return "The current folder does not exist any more: change to another one."
    return ""


def _fail(text: str, exit_code: int) -> NoReturn:
    text = PASSWORD.sub(r"\1:***@", text)  # errors name addresses, and end up in the logs of jobs
    print(_fitted(f"forebay: {text}"), file=sys.stderr)
    sys.exit(exit_code)


def main() -> None:
    """Entry point: expected errors end with a message and an exit code, not with a traceback."""
    sys.unraisablehook = _interrupt_again
    _open_streams()
    try:
        try:
            app()
        finally:
            print(end="", flush=True)  # a failure at the interpreter's exit would be reported in its words, with 120
    except UserError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(settings.INTERRUPTED)
    except UnicodeEncodeError:
        argument = _no_text()
        if argument is None:
            raise
        _fail(f"{argument}: this argument is not UTF-8.", settings.WRONG_USAGE)
    except OSError as error:
        text = _said(error)
        if not text:
            raise
        if error.errno in UNWRITABLE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of the output
        if isinstance(error, BrokenPipeError):  # a reader such as `head` has what it wants
            sys.exit(1)
        _fail(text, 1)


if __name__ == "__main__":
    main()

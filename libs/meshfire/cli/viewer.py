"""`meshfire viewer`: an OTLP receiver and a page with its traces, for meshes that `meshfire up` did not start."""

from __future__ import annotations

import asyncio
import html
import io
import signal
import tempfile
from pathlib import Path

import click
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from meshfire.errors import MeshfireError
from meshfire.telemetry.sink import TraceSink
from meshfire.telemetry.store import find_trace, newest_first, read_trace
from meshfire.telemetry.waterfall import render

MAX_LISTED = 50
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px sans-serif;margin:2em}}pre{{font:12px/1.35 monospace}}td{{padding-right:2em}}</style>{body}"""


@click.command()
@click.option("--otlp-port", default=4317, show_default=True, type=click.IntRange(0, 65535), help="OTLP/gRPC.")
@click.option("--http-port", default=8601, show_default=True, type=click.IntRange(0, 65535), help="The page.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep traces here.")
def viewer(otlp_port: int, http_port: int, folder: Path | None) -> None:
    """Receive traces over OTLP and show the recent ones on a page. Loopback only."""
    with tempfile.TemporaryDirectory(prefix="meshfire-traces-") as temporary:
        asyncio.run(_serve(otlp_port, http_port, folder or Path(temporary)))


async def _serve(otlp_port: int, http_port: int, folder: Path) -> None:
    async with TraceSink(folder, port=otlp_port) as sink:
        click.echo(f"OTLP {sink.endpoint}\npage http://127.0.0.1:{http_port}")
        config = uvicorn.Config(page(folder), host="127.0.0.1", port=http_port, log_level="warning")
        server = uvicorn.Server(config)
        for one in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(one, setattr, server, "should_exit", True)
        await server.serve()


def page(folder: Path) -> Starlette:
    """The page over a folder of traces."""

    async def listing(_: Request) -> Response:
        return HTMLResponse(_document("traces", await asyncio.to_thread(_rows, folder)))

    async def one(request: Request) -> Response:
        try:
            body = await asyncio.to_thread(_waterfall, folder, request.path_params["trace_id"])
        except MeshfireError as error:
            return HTMLResponse(_document("no trace", f"<p>{html.escape(error.message)}</p>"), status_code=404)
        return HTMLResponse(_document("trace", body))

    return Starlette(routes=[Route("/", listing), Route("/{trace_id}", one)])


def _document(title: str, body: str) -> str:
    return PAGE.format(title=title, body=body)


def _rows(folder: Path) -> str:
    cells = []
    for path in newest_first(folder)[:MAX_LISTED]:
        spans = read_trace(path)
        first = min(spans, key=lambda span: span.start_ns, default=None)
        name = html.escape(first.name) if first else ""
        link = f'<a href="/{path.stem}">{path.stem}</a>'
        cells.append(f"<tr><td>{link}</td><td>{name}</td><td>{len(spans)} spans</td></tr>")
    return "<h1>traces</h1><table>" + "".join(cells) + "</table>" if cells else "<p>no traces yet</p>"


def _waterfall(folder: Path, trace_id: str) -> str:
    console = Console(record=True, width=180, file=io.StringIO(), force_terminal=True)
    console.print(render(find_trace(folder, trace_id)))
    return console.export_html(inline_styles=True, code_format='<p><a href="/">all</a></p><pre>{code}</pre>')

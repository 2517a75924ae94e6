"""The helper process of `trainer.wandb_sink`: follows metrics.jsonl and logs its rows to W&B.

Run as `python -P -m trainer.wandb_process`. One JSON object a line: in comes
first the header (see `trainer.wandb_sink`), then at the end {summary, exit_code, interrupted, media}; out go
{ready: page or folder, folder}, {failed: reason}, {remark}, {progress: rows},
{finishing}, {done: whether everything was taken}. End of input without the second line
means that rank 0 died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from trainer.wandb_account import base_url
from trainer.wandb_sink import INTERRUPTED_S

POLL_S = 0.25  # how often new rows are looked for
CONNECT_S = 3.0
FLUSH_S = 1.0  # W&B's file on disk is never older; must be less than INTERRUPTED_S
START_SHARE = 0.8  # W&B's own limit, so that it can say what is wrong before rank 0 gives up
NICENESS = 10  # the ranks have the processors first

PRIVATE: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",  # its name
    "program": "splitmeter",
    "save_code": False,
    "silent": True,
    "x_disable_meta": True,  # user, program, arguments
    "x_save_requirements": False,
}


def main() -> None:
    # Whatever prints, W&B's service included, must not reach the channel to rank 0.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGTERM, lambda *_: leave())
    serve(sys.stdin, Channel(out))
    leave()


def leave() -> None:
    """Ends the process at once, service first: W&B's own exit hooks wait for the network."""
    end_service()
    os._exit(0)


def end_service() -> None:
    """Ends W&B's service if it still runs. Left alone, it would notice our end within two seconds."""
    try:
        service = sys.modules["wandb.sdk.wandb_setup"]._singleton._connection._proc._process
        service.kill()
        service.wait(timeout=1.0)
    except Exception:  # not started, torn down, or a version that names it otherwise
        pass


class Channel:
    """Messages to rank 0; silent when it is gone."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        try:
            with self._lock:
                self._stream.write(json.dumps(message) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            pass


class Ending:
    """How the run ended, once it did: read from the input by a thread."""

    def __init__(self, commands: IO[str]) -> None:
        self.summary: dict[str, Any] = {}
        self.exit_code = 1
        self.media: dict[str, str] = {}
        self.known = threading.Event()
        self._commands = commands
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        line = self._commands.readline()
        message: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"interrupted": True}
        self.summary = message.get("summary", {})
        self.exit_code = message.get("exit_code", 1)
        self.media = message.get("media", {})
        if message["interrupted"]:
            timer = threading.Timer(INTERRUPTED_S + 0.1, leave)  # rank 0, if alive, comes first
            timer.daemon = True
            timer.start()
        self.known.set()


def serve(commands: IO[str], channel: Channel) -> None:
    """One W&B run from header to end. Errors become messages; none is raised."""
    try:
        header = json.loads(commands.readline())
        if header["mode"] == "online":
            check_reachable(base_url(os.environ))
        run = start(header, channel)
        folder = os.path.dirname(run.dir)
        channel.send(ready=folder if run.offline else run.url, folder=folder)
        ending = Ending(commands)
        follow(header["metrics"], run, ending, channel)
        show(run, ending.media, header["metrics"], channel)
        channel.send(finishing=True)
        taken = finish(run, ending)
        end_service()
        channel.send(done=taken)
    except Exception as error:
        end_service()
        channel.send(failed=" ".join(f"{type(error).__name__}: {error}".split())[:300])


def check_reachable(url: str) -> None:
    """Spares the user W&B's retries when nothing listens at the server's address.

    Raises:
        OSError: no connection. Behind a proxy nothing is tried.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise OSError(f"{url}: {error.strerror or error}") from error


def start(header: dict[str, Any], channel: Channel) -> Any:
    """The run as W&B has it: keys have the header's step metrics, `schema` is kept off the charts."""
    import wandb

    os.nice(NICENESS)  # from here on; W&B's service takes it over
    logger = header["config"]["logger"]
    settings = wandb.Settings(
        **PRIVATE,
        init_timeout=START_SHARE * header["timeout_s"],
        finish_timeout=header["finish_s"],
        finish_timeout_raises=True,
        x_transaction_log_flush_interval=FLUSH_S,
        x_stats_pid=header["rank_0_pid"],
        stop_fn=lambda: channel.send(remark="its stop button does not reach the ranks: use Ctrl-C"),
    )
    run = wandb.init(
        mode=header["mode"],
        dir=header["dir"],
        id=header["run_id"],
        resume=header["resume"],
        reinit="create_new",
        project=logger["project"],
        entity=logger["entity"],
        group=logger["group"],
        job_type=logger["job_type"],
        name=logger["run_name"],
        tags=logger["tags"],
        config=header["config"],
        settings=settings,
    )
    for keys, step_metric in header["step_metrics"].items():
        run.define_metric(keys, step_metric=step_metric)
    run.define_metric("schema", hidden=True)
    return run


def follow(metrics: str, run: Any, ending: Ending, channel: Channel) -> None:
    """Logs every row of the file and waits for more, until the run has ended and nothing is left."""
    pending = b""
    rows = 0
    with open(metrics, "rb") as file:
        while True:
            ended = ending.known.is_set()  # before reading: rows are written before the end is told
            *lines, pending = (pending + file.read(1 << 16)).split(b"\n")
            for line in lines:
                row = json.loads(line)
                run.log({key: value for key, value in row.items() if value is not None})
            rows += len(lines)
            if lines:
                if ended:
                    channel.send(progress=rows)
            elif ended:
                return
            else:
                ending.known.wait(POLL_S)


def show(run: Any, media: dict[str, str], metrics: str, channel: Channel) -> None:
    """Logs a page, and a file's rows as a table, where the end of the run named them.

    What W&B refuses costs a remark: the rows and the summary are worth more.
    """
    for kind, log in (("html", _log_page), ("table", _log_table)):
        if kind in media:
            try:
                log(run, media, metrics)
            except Exception as error:
                channel.send(remark=f"{media[kind]} is left out ({type(error).__name__}: {error})")


def _log_page(run: Any, media: dict[str, str], metrics: str) -> None:
    import wandb

    run.log({Path(media["html"]).stem: wandb.Html(Path(media["html"]), inject=False)})


def _log_table(run: Any, media: dict[str, str], metrics: str) -> None:
    import wandb

    with open(media.get("rows", metrics), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_cell(row.get(key)) for key in columns] for row in rows]
    run.log({media["table"]: wandb.Table(columns=columns, data=data, allow_mixed_types=True)})


def _cell(value: Any) -> Any:
    """W&B's tables take numbers and texts; what has parts is written out."""
    return json.dumps(value) if isinstance(value, dict | list) else value


def finish(run: Any, ending: Ending) -> bool:
    """Ends the run; whether W&B took everything within its time."""
    import wandb

    run.summary.update(ending.summary)
    try:
        run.finish(exit_code=ending.exit_code)
    except TimeoutError:
        return False
    wandb.teardown()
    return True


if __name__ == "__main__":
    main()

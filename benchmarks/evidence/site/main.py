"""Check every page of the docs site in a browser, at phone and desktop widths.

    python benchmarks/evidence/site/main.py [FOLDER]

FOLDER is the output of `make site` (default build/site). The browser is Debian's Chromium (apt-get install chromium). A
page fails if it logs an error to the console, cannot load a resource, or scrolls sideways. The program also fails if
the reference lacks a public name.
"""

import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
WIDTHS = (390, 1440)
DEADLINE_S = 600.0
# This script is inserted before every page's own scripts.
WITNESS = """<script>
window.__errors = [];
const note = text => window.__errors.push(String(text));
addEventListener("error", e => note(e.message || "cannot load " + (e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", e => note(e.reason));
const said = console.error; console.error = (...all) => { note(all.join(" ")); said(...all); };
</script>"""
LOOK = """<!doctype html><title>looking</title><body><script>
const wait = ms => new Promise(go => setTimeout(go, ms));
async function look(page, width) {
  const frame = document.createElement("iframe");
  Object.assign(frame.style, {width: width + "px", height: "900px", border: 0});
  frame.src = "/" + page;
  const loaded = new Promise(go => frame.addEventListener("load", go));
  document.body.append(frame);
  await loaded;
  await wait(300);
  const root = frame.contentDocument.documentElement, view = frame.contentWindow;
  const wide = [...frame.contentDocument.querySelectorAll("article *")].filter(
    each => each.getBoundingClientRect().right > root.clientWidth + 1 && !each.closest("table, pre, .highlight"));
  const boxes = [...frame.contentDocument.querySelectorAll("body table, body svg, body img")];
  const cut = boxes.filter(each => each.getBoundingClientRect().right > root.clientWidth + 1).length;
  const found = {page, width, errors: view.__errors, wide: root.scrollWidth - root.clientWidth, cut,
    by: wide.slice(0, 3).map(each => each.outerHTML.slice(0, 120)), text: root.innerText.length};
  frame.remove();
  return found;
}
(async () => {
  const found = [];
  for (const page of PAGES) for (const width of WIDTHS) found.push(await look(page, width));
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page that checks it, and receives the result."""

    def __init__(self, *arguments: Any, pages: list[str], found: list[Any], done: threading.Event, **rest: Any) -> None:
        self._pages, self._found, self._done = pages, found, done
        super().__init__(*arguments, **rest)

    def do_GET(self) -> None:
        """Serve a file. Pages of the site get the error-recording script."""
        name = self.path.partition("?")[0].lstrip("/")
        if name == "look":
            self._send(LOOK.replace("PAGES", json.dumps(self._pages)).replace("WIDTHS", json.dumps(WIDTHS)))
        elif name in self._pages:
            text = (Path(self.directory) / name).read_text(encoding="utf-8")
            self._send(text.replace("<head>", "<head>" + WITNESS, 1))
        elif name == "favicon.ico":
            self._send("")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Receive the result of the check."""
        self._found += json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send("")
        self._done.set()

    def log_message(self, *_: Any) -> None:
        """Drop the log message of a request."""

    def _send(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def looked_at(site: Path, pages: list[str]) -> list[dict[str, Any]]:
    """Return the browser's findings for each page at each width."""
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("no chromium here: apt-get install chromium")
    found: list[dict[str, Any]] = []
    done = threading.Event()
    handler = partial(Handler, directory=str(site), pages=pages, found=found, done=done)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as home:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1600,1000",
            "--remote-debugging-port=0",
        ]
        address = f"http://127.0.0.1:{server.server_address[1]}/look"
        with subprocess.Popen(  # noqa: S603 -- our own server, in a browser
            [browser, *options, f"--user-data-dir={home}", address],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            ended = done.wait(DEADLINE_S)
            process.terminate()
        server.shutdown()
    if not ended:
        sys.exit(f"chromium did not finish {len(pages)} pages within {DEADLINE_S:.0f} s")
    return found


def missing_names(site: Path) -> list[str]:
    """Return the public names that are missing in the reference."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    import hooks  # type: ignore[import-not-found] # noqa: PLC0415 -- of the site, beside its pages

    missing = []
    for module in hooks.MODULES:
        text = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")
        ids = set(re.findall(r'id="([^"]+)"', text))
        missing += [f"{module}.{name}" for name in hooks.public_names(module) if f"{module}.{name}" not in ids]
    return missing


def main() -> None:
    """Check all pages and print the faults."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    if not pages:
        sys.exit(f"no pages at {site}: run `make site` first")
    wrong = [f"{name} is not in the reference" for name in missing_names(site)]
    for each in looked_at(site, pages):
        where = f"{each['page']} at {each['width']} px"
        wrong += [f"{where}: {text}" for text in each["errors"]]
        if each["wide"] > 0:
            wrong.append(f"{where}: scrolls sideways by {each['wide']} px: {each['by']}")
        if each["text"] < 50:
            wrong.append(f"{where}: is empty")
    for text in wrong:
        print(text)
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px: {len(wrong)} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
